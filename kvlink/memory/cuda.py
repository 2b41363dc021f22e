"""What the CUDA driver says of an address: the device, and the allocation around it.

The driver is asked by ctypes, and only for memory that somebody registers as CUDA memory: nothing here initialises
CUDA, makes a context, or loads the driver into a process that does not use it. An object's own word on where its bytes
are is not enough: a pointer that is not what it seems to be would only be found out by a device fault, in this process
or in a peer's, and ends CUDA there.

    Decision: a buffer must lie within one allocation.
    Because: what UCX gives a peer of the same host is a handle of the allocation at the first address, and the peer
        computes addresses behind it without a check (``uct_cuda_ipc_mkey_pack``; the check is an assertion, which
        releases of UCX leave out).
    Instead of: one key per allocation that a buffer touches; a block could then still lie across two.
    Revisit when: UCX gives out memory that was mapped piece by piece (PyTorch's expandable segments) as a whole.

Source: ``cuda.h`` (values and signatures), and ``uct_cuda_ipc_check_and_push_ctx`` of UCX, which does the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kvlink.errors import FeatureNotEnabledError, ParameterError

_SUCCESS: Final = 0
_NOT_INITIALIZED: Final = 3

_CONTEXT: Final = 1  # enum CUpointer_attribute
_MEMORY_TYPE: Final = 2
_IS_MANAGED: Final = 8
_DEVICE_ORDINAL: Final = 9

_DEVICE_MEMORY: Final = 2  # enum CUmemorytype

_Address = ctypes.c_uint64  # CUdeviceptr

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuPointerGetAttributes": (
        ctypes.c_uint,
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_void_p),
        _Address,
    ),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_Address), ctypes.POINTER(ctypes.c_size_t), _Address),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_int)),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Allocation(NamedTuple):
    """A piece of device memory, as it was allocated.

    Attributes:
        device: its number in this process.
        start, nbytes: where it lies.
    """

    device: int
    start: int
    nbytes: int


def find_allocation(name: str, address: int) -> Allocation:
    """Return the allocation that an address of CUDA memory lies in.

    Args:
        name: of the buffer, for errors.

    Raises:
        FeatureNotEnabledError: there is no CUDA driver here, this process does not use CUDA, or the memory is managed.
        ParameterError: the driver does not know this address as device memory.
    """
    driver = _load(name)
    context, kind, is_managed, ordinal = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int(-1)
    wanted = {_CONTEXT: context, _MEMORY_TYPE: kind, _IS_MANAGED: is_managed, _DEVICE_ORDINAL: ordinal}
    numbers = (ctypes.c_int * len(wanted))(*wanted)
    places = (ctypes.c_void_p * len(wanted))(*(ctypes.addressof(place) for place in wanted.values()))
    result = driver.cuPointerGetAttributes(len(wanted), numbers, places, address)
    if result == _NOT_INITIALIZED:
        raise FeatureNotEnabledError(f"{name} is said to be in CUDA memory, and this process does not use CUDA")
    _check(driver, result, name)
    if is_managed.value:
        raise FeatureNotEnabledError(
            f"{name} is in managed memory, which moves between host and device and which UCX can neither read nor "
            "write for a peer; register device memory or host memory"
        )
    if kind.value != _DEVICE_MEMORY or ordinal.value < 0:
        raise ParameterError(f"{name} is said to be in CUDA memory, and {address:#x} is not device memory")
    start, nbytes = _Address(), ctypes.c_size_t()
    with _current(driver, name, context, ordinal.value):
        result = driver.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(nbytes), address)
    _check(driver, result, name)
    return Allocation(ordinal.value, start.value, nbytes.value)


@functools.cache
def _open() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for function, arguments in _SIGNATURES.items():
        getattr(driver, function).argtypes = arguments
        getattr(driver, function).restype = ctypes.c_int
    return driver


def _load(name: str) -> ctypes.CDLL:
    try:
        return _open()
    except (OSError, AttributeError) as exc:
        raise FeatureNotEnabledError(
            f"{name} is said to be in CUDA memory; there is no CUDA driver here: {exc}"
        ) from exc


@contextmanager
def _current(driver: ctypes.CDLL, name: str, context: ctypes.c_void_p, ordinal: int) -> Iterator[None]:
    """Make the context of some memory current in this thread; the device's own where the memory belongs to none."""
    device = ctypes.c_int(-1)
    is_retained = not context.value
    if is_retained:
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        _check(driver, driver.cuDeviceGet(ctypes.byref(device), ordinal), name)
        _check(
            driver,
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active)),
            name,
        )
        if not is_active.value:  # to retain it would make one
            raise FeatureNotEnabledError(f"{name} is on CUDA device {ordinal}, whose primary context is not active")
        _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), name)
    try:
        _check(driver, driver.cuCtxPushCurrent_v2(context), name)
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        if is_retained:
            driver.cuDevicePrimaryCtxRelease_v2(device)


def _check(driver: ctypes.CDLL, result: int, name: str) -> None:
    if result != _SUCCESS:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        why = (text.value or str(result).encode()).decode()
        raise ParameterError(f"{name} is said to be in CUDA memory; the driver does not know its address: {why}")
