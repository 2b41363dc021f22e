"""Which of our memory peers may address: numbered regions.

Region 0 is the main pool, 1 the host pool, 2 the state words. Numbers from `FIRST_REGISTERED` on are buffers that the
caller owns and has registered; they are never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvlink.pool import Bytes, Segment

POOL: Final = 0
HOST_POOL: Final = 1
STATE: Final = 2
FIRST_REGISTERED: Final = 16


@dataclass(slots=True)
class LocalRegion:
    """One region of ours.

    Args:
        memory: all of it, uint8.
        segment: the memfd behind it, which peers can map; None for memory that the caller owns.
    """

    memory: Bytes
    segment: Segment | None = None

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self.memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.memory)


class LocalMemory(dict[int, LocalRegion]):
    """The regions of one cluster, by number."""

    def __init__(self) -> None:
        super().__init__()
        self._next = FIRST_REGISTERED

    def register(self, memory: Bytes) -> int:
        """Enter memory that the caller owns and return its region number; the caller keeps it valid until `forget`."""
        number = self._next
        self._next += 1
        self[number] = LocalRegion(memory)
        return number

    def forget(self, region: int) -> None:
        """Remove a region; its number is not used again."""
        self.pop(region, None)
