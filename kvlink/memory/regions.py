"""Which of our memory peers may address: numbered regions.

Region 0 is the main pool, 1 the host pool, 2 the state words. Numbers from `FIRST_REGISTERED` on are buffers that the
caller owns and has registered; they are never used twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvlink.memory.pool import Bytes, Segment

POOL: Final = 0
HOST_POOL: Final = 1
STATE: Final = 2
FIRST_REGISTERED: Final = 16

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
    def nbytes(self) -> int:
        """Its length."""
        return len(self.memory)


class LocalMemory(dict[int, LocalRegion]):
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

    def _enter(self, region: LocalRegion) -> int:
        number = self._next
        self._next += 1
        self[number] = region
        return number

    def forget(self, region: int) -> None:
        """Remove a region; its number is not used again."""
        if self.pop(region, None) is not None:
            for watch in self.watchers:
                watch(region)
