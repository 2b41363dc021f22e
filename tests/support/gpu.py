"""Memory of a CUDA device, by the driver alone: no toolkit, no framework.

Everything happens in the primary context of one device, which is made current in the thread that asks; frameworks use
the same one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvlink as kv
from tests.support.pattern import Stamp, fill
from tests.support.pattern import faults as find_faults
from tests.support.ucx import missing as missing_ucx

_Address = ctypes.c_uint64


@functools.cache
def missing() -> str:
    """Return why device memory cannot be moved here, empty where it can."""
    reason = missing_ucx()
    if reason:
        return reason
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        return f"no CUDA driver: {exc}"
    result = driver.cuInit(0)
    count = ctypes.c_int()
    if result == 0:
        result = driver.cuDeviceGetCount(ctypes.byref(count))
    if result or not count.value:
        return f"no CUDA device: the driver found {count.value}, and answered {result}"
    from kvlink.transports.ucx.context import Context

    try:
        Context.create(kv.UcxConfig(allow_cuda=True)).close()
    except kv.KVLinkError as exc:
        return str(exc)
    return ""


def num_devices() -> int:
    """Return how many devices the driver knows."""
    count = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value


def need_gpu() -> None:
    """Skip the test, naming the missing part, where device memory cannot be moved."""
    reason = missing()
    if reason:
        pytest.skip(reason)


class Gpu:
    """One device.

    Args:
        ordinal: which one.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.ordinal = ordinal
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Make the device current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver, which must succeed."""
        result = getattr(self._driver, name)(*arguments)
        assert result == 0, f"{name} answered {result}"

    def allocate(self, shape: Sequence[int]) -> DeviceArray:
        """Return device memory of its own, of bytes."""
        return DeviceArray(self, shape)


class DeviceArray:
    """Bytes on a device, with ``__cuda_array_interface__``. They are freed with the object, or by `free`."""

    def __init__(self, gpu: Gpu, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.nbytes = int(np.prod(self.shape))
        self._gpu = gpu
        address = _Address()
        gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self.nbytes))
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}

    def write(self, contents: NDArray[np.uint8]) -> None:
        """Copy host bytes into it, and wait until they are there."""
        source = np.ascontiguousarray(contents).reshape(-1)
        assert source.nbytes == self.nbytes
        self._gpu.enter()
        self._gpu.call(
            "cuMemcpyHtoD_v2", _Address(self.address), ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(self.nbytes)
        )
        self._gpu.call("cuCtxSynchronize")

    def read(self) -> NDArray[np.uint8]:
        """Return a copy of what it holds when everything before has ended on the device."""
        target = np.empty(self.shape, np.uint8)
        self._gpu.enter()
        self._gpu.call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(target.ctypes.data), _Address(self.address), ctypes.c_size_t(self.nbytes)
        )
        return target

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        if self.address:
            self._gpu.enter()
            self._gpu.call("cuMemFree_v2", _Address(self.address))
            self.address = 0

    def __del__(self) -> None:
        self.free()


def fill_on_device(arrays: Sequence[DeviceArray], stamp: Stamp) -> None:
    """Write the pattern of `stamp` into device arrays."""
    host = [np.zeros(array.shape, np.uint8) for array in arrays]
    fill(host, stamp)
    for array, contents in zip(arrays, host, strict=True):
        array.write(contents)


def faults_on_device(
    arrays: Sequence[DeviceArray], stamp: Stamp, blocks: list[int] | None = None, src_blocks: list[int] | None = None
) -> str | None:
    """Say in words what in device arrays is not the pattern of `stamp`."""
    return find_faults([array.read() for array in arrays], stamp, blocks, src_blocks=src_blocks)
