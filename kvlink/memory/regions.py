"""Which of our memory peers may address: numbered regions.

Region 0 is the main pool, 1 the host pool, 2 the state words. Numbers from `FIRST_REGISTERED` on are buffers that the
caller owns and has registered; they are never used twice. Those may be in the memory of a CUDA device, which nothing
here can read or write: whoever wants the bytes of such a region is refused (`DeviceRegion`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import numpy as np

from kvlink.errors import FeatureNotEnabledError
from kvlink.memory.devicebuffers import DeviceBytes
from kvlink.memory.pool import Bytes, Segment

POOL: Final = 0
HOST_POOL: Final = 1
STATE: Final = 2
FIRST_REGISTERED: Final = 16

ONLY_UCX: Final = (
    'only UCX reaches: ClusterConfig(transports=("ucx",), ucx=UcxConfig(allow_cuda=True)) on both sides, with UCX 1.21 '
    "or later (kvlink[ucx])"
)
"""What to set, in the words of every error about it."""

_MAX_SPREAD: Final = 64
"""Buffers share a region while its addresses span at most this many times their bytes."""


@dataclass(slots=True)
class LocalRegion:
    """One region of ours.

    Args:
        memory: all of it, uint8.
        segment: the memfd behind it, which peers can map; None for memory that the caller owns.
        exports: what keeps memory of the caller alive and in its place.

    Attributes:
        view: the same bytes, for copies of a single small row.
    """

    memory: Bytes
    segment: Segment | None = None
    exports: tuple[Bytes, ...] = ()
    view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.view = self.memory.data

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self.memory.ctypes.data)

    @property
    def host_address(self) -> int:
        """The same, for whoever reads or writes there."""
        return self.address

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.memory)


class DeviceRegion:
    """One region of ours in the memory of a CUDA device: a part of one allocation.

    Args:
        address, nbytes: where it lies.
        device: its number in this process.
        exports: what keeps the memory alive.
    """

    segment: None = None

    def __init__(self, address: int, nbytes: int, device: int, exports: tuple[object, ...]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.exports = exports

    @property
    def memory(self) -> Bytes:
        """Refuse: there are no bytes to be had here."""
        self._refuse()

    @property
    def view(self) -> memoryview:
        """Refuse, as `memory`."""
        self._refuse()

    @property
    def host_address(self) -> int:
        """Refuse, as `memory`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FeatureNotEnabledError(f"our cache is in the memory of CUDA device {self.device}, which {ONLY_UCX}")


Region = LocalRegion | DeviceRegion


class LocalMemory(dict[int, Region]):
    """The regions of one cluster, by number.

    Attributes:
        watchers: called with the number of a region that is forgotten.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watchers: list[Callable[[int], None]] = []
        self._next = FIRST_REGISTERED

    def register(self, buffers: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Enter memory that the caller owns and return the ``(region, offset)`` of each buffer.

        Buffers that lie near each other share one region, so that tensors at a constant stride become one run. What
        lies between them is never touched: a region is a range of addresses, not a right to all of it.
        """
        low = min(int(buffer.ctypes.data) for buffer in buffers)
        high = max(int(buffer.ctypes.data) + len(buffer) for buffer in buffers)
        total = sum(map(len, buffers))
        if high - low <= _MAX_SPREAD * total:
            span = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
            number = self._enter(LocalRegion(span, exports=tuple(buffers)))
            return [(number, int(buffer.ctypes.data) - low) for buffer in buffers]
        return [(self._enter(LocalRegion(buffer, exports=(buffer,))), 0) for buffer in buffers]

    def register_on_device(self, buffers: Sequence[DeviceBytes]) -> list[tuple[int, int]]:
        """As `register`, for CUDA memory: those in one allocation share a region, and no region leaves its allocation.

        Whoever reaches memory of another process through a handle of its allocation can reach no other one with it.
        """
        together: dict[int, list[DeviceBytes]] = {}
        for buffer in buffers:
            together.setdefault(buffer.allocation, []).append(buffer)
        begins: dict[int, tuple[int, int]] = {}
        for allocation, group in together.items():
            low = min(buffer.address for buffer in group)
            high = max(buffer.address + buffer.nbytes for buffer in group)
            exports = tuple(buffer.export for buffer in group)
            begins[allocation] = self._enter(DeviceRegion(low, high - low, group[0].device, exports)), low
        places = []
        for buffer in buffers:
            number, low = begins[buffer.allocation]
            places.append((number, buffer.address - low))
        return places

    def _enter(self, region: Region) -> int:
        number = self._next
        self._next += 1
        self[number] = region
        return number

    def forget(self, region: int) -> None:
        """Remove a region; its number is not used again."""
        if self.pop(region, None) is not None:
            for watch in self.watchers:
                watch(region)
