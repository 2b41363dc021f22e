"""Objects that say that their bytes are in CUDA memory: what is believed of them, and what is refused.

There need not be a device: the driver's answer is given by the test, and nothing looks at the bytes.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvlink as kv
from kvlink.memory import cuda, devicebuffers
from kvlink.memory.cuda import Allocation, find_allocation
from kvlink.memory.devicebuffers import DeviceBytes, as_device_bytes, check_one_device, is_in_cuda_memory
from kvlink.memory.regions import DeviceRegion, LocalMemory

ADDRESS = 0x7F00_0000_1000
ALLOCATION = Allocation(3, 0x7F00_0000_0000, 1 << 20)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver know one allocation of a MiB on device 3."""

    def answer(name: str, address: int) -> Allocation:
        return ALLOCATION

    monkeypatch.setattr(devicebuffers, "find_allocation", answer)


class Interfaced:
    """Has nothing but ``__cuda_array_interface__``."""

    def __init__(self, shape: Sequence[int] = (4, 8), typestr: str = "<f2", **changes: Any) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(shape),
            "typestr": typestr,
            "data": (ADDRESS, False),
            "version": 3,
            "strides": None,
            **changes,
        }


_CAPSULES = ctypes.pythonapi
_CAPSULES.PyCapsule_New.restype = ctypes.py_object
_CAPSULES.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Packed:
    """Has nothing but DLPack, with a capsule made by hand.

    Attributes:
        asked: the keywords of each call.
    """

    def __init__(
        self,
        shape: Sequence[int] = (4, 8),
        strides: Sequence[int] | None = None,
        *,
        bits: int = 16,
        kind: int = 2,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        offset: int = 0,
        name: bytes | None = None,
        address: int = ADDRESS,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self._kind, self._version = kind, version
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._managed = devicebuffers._Versioned()
        if version is not None:
            self._managed.major, self._managed.minor = version
        self._managed.flags = flags
        tensor = self._managed.tensor
        tensor.data, tensor.byte_offset = address, offset
        tensor.device_type, tensor.device_id, tensor.ndim = kind, 3, len(shape)
        tensor.code, tensor.bits, tensor.lanes = 2, bits, 1
        tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if self._strides is not None:
            tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        self._name = name or (b"dltensor" if version is None else b"dltensor_versioned")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 3

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if self._version is None:
            if "max_version" in options:
                raise TypeError("unexpected keyword max_version")
            return _CAPSULES.PyCapsule_New(ctypes.addressof(self._managed.tensor), self._name, None)
        return _CAPSULES.PyCapsule_New(ctypes.addressof(self._managed), self._name, None)


def found(buffer: Any, nbytes: int = 64) -> tuple[int, int, int, int]:
    """Return where a buffer is found: address, length, device, allocation."""
    return as_device_bytes("it", buffer, nbytes)[:4]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "buffer",
    [
        Interfaced(),
        Interfaced(version=2),
        Interfaced((64,), "|V1"),
        Interfaced((32,), "<V2"),
        Interfaced((4, 8), strides=(16, 2)),
        Interfaced((4, 1, 8), strides=(16, 999, 2)),
        Interfaced((), "|V64"),
        Interfaced(stream=7),
        Packed(),
        Packed((64,), bits=8),
        Packed((4, 8), (8, 1)),
        Packed((4, 1, 8), (8, 999, 1)),
        Packed(version=None),
        Packed(kind=13),
        Packed(offset=0x400, address=ADDRESS - 0x400),
    ],
)
def test_found_where_they_say(buffer: Any) -> None:
    """Both interfaces, with and without strides, of every version: the address, the length, and the driver's word."""
    assert is_in_cuda_memory(buffer)
    assert found(buffer) == (ADDRESS, 64, 3, ALLOCATION.start)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (Interfaced(data=(ADDRESS, True)), "read-only"),
        (Interfaced(strides=(32, 2)), "contiguous"),
        (Interfaced(strides=(2, 8)), "contiguous"),
        (Interfaced(strides=(-16, 2)), "contiguous"),
        (Interfaced(strides=(2,)), "malformed"),
        (Interfaced((4, 7)), "56 bytes"),
        (Interfaced((0, 8)), "0 bytes"),
        (Interfaced(data=(0, False)), "no memory"),
        (Interfaced(data=(2**64 - 8, False)), "no memory"),
        (Interfaced(data=(2**70, False)), "no memory"),
        (Interfaced(data=(-8, False)), "no memory"),
        (Interfaced(data=ADDRESS), "malformed"),
        (Interfaced(data=("text", False)), "malformed"),
        (Interfaced(typestr="rubbish"), "malformed"),
        (Interfaced(shape=(-4, -8)), "malformed"),
        (Interfaced(mask=object()), "malformed"),
        (Packed(flags=1), "read-only"),
        (Packed((4, 8), (16, 1)), "contiguous"),
        (Packed((4, 7)), "56 bytes"),
        (Packed(bits=4), "4 bits"),
        (Packed(address=0), "no memory"),
        (Packed(version=(2, 0)), r"DLPack 2\.0"),
        (Packed(name=b"something"), "no capsule"),
        (Interfaced(data=(ALLOCATION.start + ALLOCATION.nbytes - 8, False)), "expandable_segments"),
        (Interfaced(data=(ALLOCATION.start - 8, False)), "expandable_segments"),
    ],
)
def test_refused(buffer: Any, why: str) -> None:
    """What does not fit, lies about itself, or reaches out of its allocation: one typed error that says why."""
    assert is_in_cuda_memory(buffer)
    with pytest.raises(kv.ParameterError, match=why):
        as_device_bytes("it", buffer, 64)


class Broken:
    """Has an interface that is no dict."""

    __cuda_array_interface__ = None


class Lying(Packed):
    """Is on a device, says DLPack, and gives out something of the host."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Raising(Packed):
    """Cannot be shared."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("in use")


@pytest.mark.usefixtures("driver")
def test_objects_that_break_their_promise() -> None:
    """An interface that is none, a capsule of another device, an export that fails: typed, like everything else."""
    for buffer, why in ((Broken(), "malformed"), (Lying(kind=1), "another one"), (Raising(), "in use")):
        with pytest.raises(kv.ParameterError, match=why):
            as_device_bytes("it", buffer, 64)


def test_what_is_not_in_cuda_memory() -> None:
    """Host memory is not asked for twice, and what cannot say where it is does not count as a device's."""

    class Silent:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("no idea")

    for buffer in (np.zeros(4), bytearray(4), memoryview(b"abc"), Packed(kind=1), Packed(kind=3), Silent(), None, 7):
        assert not is_in_cuda_memory(buffer)


@pytest.mark.usefixtures("driver")
def test_no_stream_is_waited_for() -> None:
    """DLPack's producer is told not to synchronise; the version that is asked for is the one that can be read."""
    buffer = Packed()
    found(buffer)
    assert buffer.asked == [{"stream": -1, "max_version": (1, 0)}]
    older = Packed(version=None)
    found(older)
    assert older.asked[-1] == {"stream": -1}


@pytest.mark.usefixtures("driver")
def test_owners_live_as_long_as_their_region() -> None:
    """The owner is kept until the region is forgotten, and no longer."""
    memory = LocalMemory()
    buffer = Interfaced()
    watch = weakref.ref(buffer)
    places = memory.register_on_device([as_device_bytes("it", buffer, 64)])
    del buffer
    gc.collect()
    assert watch() is not None
    memory.forget(places[0][0])
    gc.collect()
    assert watch() is None


def test_regions_stay_inside_of_allocations() -> None:
    """Buffers of one allocation share a region that ends with them; every buffer is at its place."""
    memory = LocalMemory()
    starts = {0: 0x1000_0000, 1: 0x1001_0000, 2: 0x9000_0000}
    offsets = [(0, 0), (0, 0x2000), (1, 0), (2, 0x500), (0, 0x1000)]
    buffers = [DeviceBytes(starts[which] + at, 0x1000, 0, starts[which], object()) for which, at in offsets]
    places = memory.register_on_device(buffers)
    assert len({region for region, _ in places}) == 3
    for buffer, (number, offset) in zip(buffers, places, strict=True):
        region = memory[number]
        assert isinstance(region, DeviceRegion)
        assert region.address + offset == buffer.address
        assert buffer.allocation <= region.address
        assert offset + buffer.nbytes <= region.nbytes
    assert sorted(region.nbytes for region in memory.values()) == [0x1000, 0x1000, 0x3000]


def test_nobody_gets_at_the_bytes_of_a_device() -> None:
    """A region on a device refuses whoever would read or write it, and says what reaches it."""
    region = DeviceRegion(ADDRESS, 64, 3, ())
    for look in ("memory", "view", "host_address"):
        with pytest.raises(kv.FeatureNotEnabledError, match=r"device 3, which only UCX reaches.*allow_cuda"):
            getattr(region, look)


def test_devices_are_not_mixed() -> None:
    """All buffers of a cache lie on one device."""
    one, other = (DeviceBytes(ADDRESS, 64, device, ADDRESS, None) for device in (0, 1))
    check_one_device([one, one])
    with pytest.raises(kv.ParameterError, match=r"buffers\[0\] is on CUDA device 0, and buffers\[1\] is on .* 1"):
        check_one_device([one, other])


def test_torch_tensors_of_every_data_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tensors of torch: any dtype, also those that no interface has a word for; strided ones are refused."""
    torch: Any = pytest.importorskip("torch")
    tensor_type: Any = torch.Tensor
    monkeypatch.setattr(devicebuffers, "find_allocation", lambda name, address: ALLOCATION)

    class Elsewhere(tensor_type):  # type: ignore[misc]  # torch is Any here
        """A tensor of the host that says that it is on a device, at an address of its own."""

        device = torch.device("cuda", 3)

        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("asked for the interface of a tensor that requires grad")

        def data_ptr(self) -> int:
            return ADDRESS

    kinds = ["float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn", "float8_e5m2", "complex64"]
    for name in filter(lambda name: hasattr(torch, name), kinds):
        tensor = torch.zeros(4, 8, dtype=getattr(torch, name)).as_subclass(Elsewhere)
        nbytes = 32 * tensor.element_size()
        assert is_in_cuda_memory(tensor)
        assert found(tensor, nbytes) == (ADDRESS, nbytes, 3, ALLOCATION.start)
        with pytest.raises(kv.ParameterError, match="bytes"):
            found(tensor, nbytes + 1)
        with pytest.raises(kv.ParameterError, match="contiguous"):
            found(tensor.t(), nbytes)
    with pytest.raises(kv.ParameterError, match="memory"):
        devicebuffers._ask_torch("it", torch.eye(4).to_sparse(), torch)


def test_a_replaced_tensor_keeps_its_first_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done to the ``data`` of a registered tensor does not free what was registered."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(devicebuffers, "find_allocation", lambda name, address: Allocation(0, address, 64))
    tensor = torch.zeros(64, dtype=torch.uint8)
    kept = devicebuffers._ask_torch("it", tensor, torch).export
    address = tensor.data_ptr()
    tensor.data = torch.ones(64, dtype=torch.uint8)
    assert kept.data_ptr() == address
    assert tensor.data_ptr() != address


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that claims CUDA memory where no driver is: a typed refusal, and nothing is loaded or initialised."""

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("kvlink.memory.cuda.ctypes.CDLL", missing)
    cuda._open.cache_clear()
    try:
        with pytest.raises(kv.FeatureNotEnabledError, match=r"no CUDA driver here: libcuda\.so\.1"):
            find_allocation("buffers[0]", ADDRESS)
    finally:
        cuda._open.cache_clear()


def test_sizes_of_the_structures() -> None:
    """The structures of DLPack are as <dlpack/dlpack.h> lays them out on a machine of 64 bits."""
    assert ctypes.sizeof(devicebuffers._Tensor) == 48
    assert ctypes.sizeof(devicebuffers._Versioned) == 80
