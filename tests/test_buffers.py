"""Host memory in whatever object: found as it always was, and nothing that an object does when asked gets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvlink as kv
from kvlink.memory.buffers import as_bytes
from kvlink.memory.devicebuffers import as_device_bytes, is_in_cuda_memory

NBYTES = 64
ERRORS: list[Any] = [
    *(AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError, OSError),
    *(AssertionError, NotImplementedError, ZeroDivisionError, BufferError),
]


def memory() -> Any:
    """Return some."""
    return np.zeros(NBYTES, np.uint8)


def of_class(base: type, **members: Any) -> Any:
    """Return an instance of a class with these members; of a base with the buffer protocol, of `NBYTES` bytes."""
    made = type("Odd", (base,), members)
    return made(NBYTES) if base is bytearray else made()


def raising(error: Any) -> Callable[..., Any]:
    """Return a method that raises."""

    def method(*_: Any, **__: Any) -> Any:
        raise error("when asked")

    return method


@pytest.mark.parametrize("error", ERRORS)
def test_host_memory_is_found_whatever_else_an_object_does(error: Any) -> None:
    """What it raises when asked for the interface of CUDA, or of DLPack, does not keep its bytes from being found."""
    array, cuda, where = memory(), property(raising(error)), raising(error)
    for buffer in (
        of_class(bytearray, __cuda_array_interface__=cuda, __dlpack_device__=where),
        of_class(object, __cuda_array_interface__=cuda, __array_interface__=array.__array_interface__),
        of_class(object, __dlpack_device__=array.__dlpack_device__, __dlpack__=array.__dlpack__),
        of_class(object, __dlpack_device__=where, __array_interface__=array.__array_interface__),
    ):
        assert not is_in_cuda_memory(buffer)
        assert len(as_bytes("it", buffer, NBYTES)) == NBYTES


@pytest.mark.parametrize("error", ERRORS)
def test_what_gives_no_bytes_is_refused(error: Any) -> None:
    """An object that raises whatever it is asked: one error of kvlink's, of host memory and of CUDA's."""
    refuse = raising(error)
    for buffer in (of_class(object, __getattr__=refuse), of_class(object, __array_interface__=property(refuse))):
        assert not is_in_cuda_memory(buffer)
        with pytest.raises(kv.ParameterTypeError):
            as_bytes("it", buffer, NBYTES)
    sharing = of_class(object, __dlpack_device__=lambda _: (1, 0), __dlpack__=refuse)
    with pytest.raises(kv.ParameterError):
        as_bytes("it", sharing, NBYTES)
    on_device = of_class(object, __dlpack_device__=lambda _: (2, 0), __dlpack__=refuse)
    assert is_in_cuda_memory(on_device)
    with pytest.raises(kv.ParameterError):
        as_device_bytes("it", on_device, NBYTES)


@pytest.mark.parametrize("where", [(), (2,), (float("inf"), 0), (None, 0), None])
def test_who_does_not_say_where_its_bytes_are(where: Any) -> None:
    """An answer that is none of DLPack's is no word of CUDA, unless its kind of device is CUDA's."""
    buffer = of_class(object, __dlpack_device__=lambda _: where)
    assert is_in_cuda_memory(buffer) == (where == (2,))


@pytest.mark.parametrize("shape", [(float("inf"),), 5, None, ("x",)])
def test_an_interface_of_cuda_that_is_none(shape: Any) -> None:
    """Whatever is wrong with it: one error."""
    interface = {"shape": shape, "typestr": "|u1", "data": (4096, False), "version": 3}
    with pytest.raises(kv.ParameterError):
        as_device_bytes("it", of_class(object, __cuda_array_interface__=interface), NBYTES)


def test_python_objects_are_no_bytes() -> None:
    """Pointers to objects of this process mean nothing anywhere else, and may not be written."""
    with pytest.raises(kv.ParameterTypeError, match="Python objects"):
        as_bytes("it", np.zeros(NBYTES // 8, object), NBYTES)


def test_torch_tensors_without_bytes_to_share() -> None:
    """Views that torch computes when they are read, and memory that it has not got: one error, as for any other."""
    torch = pytest.importorskip("torch")
    floats = torch.zeros(NBYTES // 8, dtype=torch.complex64)
    for tensor in (floats.conj(), torch._neg_view(torch.zeros(NBYTES // 4)), torch.zeros(4, 4).to_mkldnn()):
        assert not is_in_cuda_memory(tensor)
        with pytest.raises(kv.ParameterError):
            as_bytes("it", tensor, NBYTES)
    with pytest.raises(kv.FeatureNotEnabledError, match="meta"):
        as_bytes("it", torch.zeros(NBYTES, device="meta"), NBYTES)
