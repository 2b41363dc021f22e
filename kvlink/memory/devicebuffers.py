"""Memory of a CUDA device that the caller owns, whatever object holds it: find its bytes, and keep the owner alive.

Known are torch's CUDA tensors of every data type, ``__cuda_array_interface__`` (CuPy, Numba, ...) and DLPack. Nothing
is copied, no kernel is launched and no stream is waited for: also where the interface names a stream, what its owner
has put there must have ended before a peer may read the memory, and that is the owner's to know.

Nothing can keep an owner from freeing or resizing device memory by force (``untyped_storage().resize_``): unlike host
memory it is kept alive, and not locked.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvlink.errors import KVLinkError, ParameterError, shown
from kvlink.memory.buffers import buffer_of, says
from kvlink.memory.cuda import find_allocation

_DLPACK_CUDA: Final = frozenset({2, 13})  # kDLCUDA, kDLCUDAManaged, of <dlpack/dlpack.h>
_DLPACK_MAJOR: Final = 1
_DLPACK_READ_ONLY: Final = 1
_NO_SYNCHRONISATION: Final = -1
"""As ``stream`` of ``__dlpack__``: the producer shall wait for nothing."""


class DeviceBytes(NamedTuple):
    """The bytes of one buffer in CUDA memory.

    Attributes:
        address, nbytes: where they lie.
        device: its number in this process.
        allocation: where the allocation that they lie in begins.
        export: what keeps them alive.
    """

    address: int
    nbytes: int
    device: int
    allocation: int
    export: object


class _Said(NamedTuple):
    """What an object says of its bytes."""

    address: int
    nbytes: int
    is_contiguous: bool
    is_read_only: bool
    export: Any


def is_in_cuda_memory(buffer: Any) -> bool:
    """Whether an object says that its bytes are in CUDA memory; never raises.

    What has the buffer protocol is in host memory, whatever else it says.
    """
    if isinstance(buffer, (np.ndarray, bytearray)):
        return False
    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(buffer, torch.Tensor):  # first: asking it for its interface may raise
            return bool(buffer.device.type == "cuda")
        if buffer_of(buffer) is not None:
            return False
        return says(buffer, "__cuda_array_interface__") or int(buffer.__dlpack_device__()[0]) in _DLPACK_CUDA
    except Exception:  # what an object raises when it is asked is its own affair
        return False


def as_device_bytes(name: str, buffer: Any, nbytes: int) -> DeviceBytes:
    """Return where the bytes of `buffer` are, for which `is_in_cuda_memory`.

    Args:
        name: the argument, for errors.
        nbytes: how many there must be.

    Raises:
        ParameterError: wrong length, not C-contiguous, read-only, no pointer, not in device memory after all, or
            mapped together from several allocations.
        FeatureNotEnabledError: see `find_allocation`.
    """
    try:
        said = _ask(name, buffer)
    except KVLinkError:
        raise
    except Exception as exc:  # what an object raises when it is asked is its own affair
        raise ParameterError(f"{name} does not say where its bytes are: {type(exc).__name__}: {exc}") from exc
    if not said.is_contiguous:
        raise ParameterError(f"{name} is not C-contiguous")
    if said.is_read_only:
        raise ParameterError(f"{name} is read-only; peers may be allowed to write into registered memory")
    if said.nbytes != nbytes:
        raise ParameterError(f"{name} has {said.nbytes} bytes; the description says {nbytes}")
    if not 0 < said.address <= 2**64 - nbytes:
        raise ParameterError(f"{name} has no memory: its pointer is {said.address:#x}")
    found = find_allocation(name, said.address)
    if not found.start <= said.address <= said.address + nbytes <= found.start + found.nbytes:
        raise ParameterError(
            f"{name} has {nbytes} bytes at {said.address:#x}, and the allocation there has {found.nbytes} at "
            f"{found.start:#x}: memory that is mapped together from several allocations cannot be registered; with "
            "PyTorch, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    return DeviceBytes(said.address, nbytes, found.device, found.start, said.export)


def check_one_device(found: Sequence[DeviceBytes]) -> None:
    """Refuse buffers that lie on several devices."""
    for index, each in enumerate(found):
        if each.device != found[0].device:
            raise ParameterError(
                f"buffers[0] is on CUDA device {found[0].device}, and buffers[{index}] is on CUDA device {each.device}"
            )


def _ask(name: str, buffer: Any) -> _Said:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _ask_torch(name, buffer, torch)
    if says(buffer, "__cuda_array_interface__"):
        return _ask_interface(name, buffer)
    return _ask_dlpack(name, buffer)


def _ask_torch(name: str, tensor: Any, torch: Any) -> _Said:
    try:
        # Another tensor on the same storage: what is done to the first one's ``data`` does not free it.
        export = tensor.detach()
        is_contiguous = export.layout == torch.strided and export.is_contiguous()
        return _Said(tensor.data_ptr(), tensor.numel() * tensor.element_size(), is_contiguous, False, export)
    except (RuntimeError, NotImplementedError) as exc:
        raise ParameterError(f"{name} is a tensor without memory of its own: {exc}") from exc


def _ask_interface(name: str, buffer: Any) -> _Said:
    interface = buffer.__cuda_array_interface__
    try:
        shape = tuple(map(int, interface["shape"]))
        address, is_read_only = interface["data"]
        itemsize = np.dtype(interface["typestr"]).itemsize
        strides = interface.get("strides")
        steps = None if strides is None else tuple(map(int, strides))
        if interface.get("mask") is not None or min(shape, default=0) < 0:
            raise ValueError("it has a mask, or a negative length")
        is_contiguous = steps is None or _is_contiguous(shape, steps, itemsize)
        return _Said(int(address), math.prod(shape) * itemsize, is_contiguous, bool(is_read_only), buffer)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ParameterError(f"{name}.__cuda_array_interface__ is malformed: {exc!r} in {shown(interface)}") from exc


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether elements lie in the order of C without a gap; the stride of a dimension of one element says nothing."""
    if len(shape) != len(strides):
        raise ValueError("as many strides as dimensions")
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


class _Tensor(ctypes.Structure):
    """``DLTensor`` of <dlpack/dlpack.h>."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``. The older ``DLManagedTensor`` begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_PYTHON: Final = ctypes.pythonapi
_PYTHON.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_PYTHON.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p


def _ask_dlpack(name: str, buffer: Any) -> _Said:
    try:
        try:
            capsule = buffer.__dlpack__(stream=_NO_SYNCHRONISATION, max_version=(_DLPACK_MAJOR, 0))
        except TypeError:  # a producer from before there were versions
            capsule = buffer.__dlpack__(stream=_NO_SYNCHRONISATION)
    except (BufferError, TypeError, RuntimeError) as exc:
        raise ParameterError(f"{name} cannot be shared through DLPack: {exc}") from exc
    # The capsule is not consumed, so its own end frees what it stands for: it is the export.
    flags = 0
    if _PYTHON.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_PYTHON.PyCapsule_GetPointer(capsule, b"dltensor_versioned"))
        if managed.major != _DLPACK_MAJOR:
            raise ParameterError(f"{name} speaks DLPack {managed.major}.{managed.minor}, which is not known here")
        flags, tensor = managed.flags, managed.tensor
    elif _PYTHON.PyCapsule_IsValid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_PYTHON.PyCapsule_GetPointer(capsule, b"dltensor"))
    else:
        raise ParameterError(f"{name}.__dlpack__ gave {shown(capsule)}, which is no capsule of DLPack")
    if tensor.device_type not in _DLPACK_CUDA:
        raise ParameterError(f"{name} is on device kind {tensor.device_type} of DLPack, and said another one before")
    itemsize, rest = divmod(tensor.bits * tensor.lanes, 8)
    if rest:
        raise ParameterError(f"{name} has elements of {tensor.bits} bits; register a view of bytes")
    shape = tuple(tensor.shape[: tensor.ndim])
    steps = tuple(step * itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    is_contiguous = steps is None or _is_contiguous(shape, steps, itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    return _Said(address, math.prod(shape) * itemsize, is_contiguous, bool(flags & _DLPACK_READ_ONLY), capsule)
