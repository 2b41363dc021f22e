"""Memory that the caller owns, whatever object holds it: find its bytes, and keep them where they are.

Host memory; that of a CUDA device is found by `kvlink.memory.devicebuffers`.

Anything with the buffer protocol (numpy, bytearray, array, mmap), ``__array_interface__`` or DLPack (torch on the CPU,
JAX) becomes a flat uint8 view. The view holds an export of the owner, so that the owner refuses to resize or close
while it lives, and dropping the last other reference frees nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvlink.errors import FeatureNotEnabledError, KVLinkError, ParameterError, ParameterTypeError
from kvlink.memory.pool import Bytes


def as_bytes(name: str, buffer: object, nbytes: int) -> Bytes:
    """Return the bytes of `buffer`, shape ``(nbytes,)``; no copy.

    Args:
        name: the argument, for errors.
        nbytes: how many there must be.

    Raises:
        ParameterTypeError: the object has no bytes that kvlink can find, or those of Python objects.
        ParameterError: wrong length, not C-contiguous, not writable, or it raises something when it is asked.
        FeatureNotEnabledError: the bytes are in an accelerator's memory other than CUDA's.
    """
    array = _view(name, buffer)
    if not array.flags.c_contiguous:
        raise ParameterError(f"{name} is not C-contiguous; its strides are {array.strides}")
    if array.dtype.hasobject:
        raise ParameterTypeError(f"{name} holds Python objects, which only this process can use")
    if not array.flags.writeable:
        raise ParameterError(f"{name} is read-only; peers may be allowed to write into registered memory")
    if array.nbytes != nbytes:
        raise ParameterError(f"{name} has {array.nbytes} bytes; the description says {nbytes}")
    flat = array.reshape(-1).view(np.uint8)
    # A second export, of the view itself: numpy counts it as a reference and refuses `resize`.
    return np.frombuffer(flat.data, np.uint8)


def buffer_of(buffer: Any) -> memoryview | None:
    """Return what the buffer protocol gives of an object, None where there is none: an object need not promise it."""
    try:
        return memoryview(buffer)
    except Exception:  # what an object raises when it is asked is its own affair
        return None


def says(buffer: object, name: str) -> bool:
    """Whether an object has an attribute, and tells it: not `hasattr`, which lets all but one kind of error through."""
    try:
        getattr(buffer, name)
    except Exception:
        return False
    return True


def check_distinct(places: Sequence[tuple[int, int]]) -> None:
    """Refuse buffers, given as (address, nbytes), that overlap: a transfer would write some bytes twice."""
    order = sorted((address, nbytes, index) for index, (address, nbytes) in enumerate(places))
    for (low, nbytes, index), (after, _, other) in pairwise(order):
        if low + nbytes > after:
            raise ParameterError(f"buffers[{index}] and buffers[{other}] share memory")


def _view(name: str, buffer: Any) -> np.ndarray[Any, Any]:
    try:
        return _find(name, buffer)
    except KVLinkError:
        raise
    except Exception as exc:  # what an object raises when it is asked is its own affair
        raise ParameterError(
            f"{name} does not give its bytes away: {type(exc).__name__}: {exc}; register a view of bytes"
        ) from exc


def _find(name: str, buffer: Any) -> np.ndarray[Any, Any]:
    if isinstance(buffer, np.ndarray):
        return buffer
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise FeatureNotEnabledError(
                f"{name} is on {buffer.device}, which no transport of kvlink can reach; copy it to the host"
            )
        if not buffer.is_contiguous():
            raise ParameterError(f"{name} is not C-contiguous; its strides are {tuple(buffer.stride())}")
        # `numpy()` also makes torch refuse to resize the storage; the detour over bytes carries every data type.
        return np.asarray(buffer.detach().reshape(-1).view(torch.uint8).numpy())
    view = buffer_of(buffer)
    if view is not None:
        return np.asarray(view)
    if says(buffer, "__array_interface__"):
        return np.asarray(buffer)
    if says(buffer, "__dlpack__"):
        try:
            return np.from_dlpack(buffer)
        except (BufferError, TypeError, RuntimeError) as exc:
            raise ParameterError(f"{name} cannot be shared through DLPack: {exc}; register a view of bytes") from exc
    raise ParameterTypeError(f"{name} has no buffer protocol, __array_interface__ or DLPack: {type(buffer).__name__}")
