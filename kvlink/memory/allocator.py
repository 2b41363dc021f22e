"""Offsets inside one pool: who has which bytes, and which are free.

Theory of operation. A pool is the bytes ``0`` to ``nbytes``. At every moment it is tiled exactly by *allocations* and
*holes*, and no two holes touch. Sizes and offsets are multiples of the base alignment. Nothing here touches memory: the
pool owns the bytes, this module only says which are whose.

Each hole is known three ways: by size and offset in one sorted list (the best fit is one bisect, the largest hole is
the last entry), by its first byte, and by the byte after its last (the neighbours of freed bytes are two dict look-ups,
so coalescing is immediate). `allocate` finds its place first and changes things after, so one that fails has changed
nothing. An alignment above the base skips bytes at the front of a hole; they stay a hole, as do the bytes behind.

Decision: best fit over a sorted list; the lowest address among holes of equal size.
Because: caches are few, large, of a few recurring sizes, and freed in any order. The smallest hole that fits is most
    often one that a cache of the same shape left, so large holes stay whole; the tie-break makes layouts repeatable.
    A sorted list is enough: with 10,000 allocations and as many holes, `allocate` and `free` take 2 to 5 us each.
Instead of: first fit (breaks up large holes, and walks), a buddy system (rounds up to powers of two: up to half of a
    pool of many GB lost), size classes (cache sizes have no classes), a balanced tree (more code, for a number of holes
    that pools do not have).
Revisit when: a pool has more than 100,000 holes, or large alignments are asked for among thousands of holes that are
    large enough but lie wrongly: those are looked at one by one, 10,000 of them in 1 to 2 ms.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import index
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Allocator", "PoolExhausted"]


class PoolExhausted(Exception):
    """No hole has room for an allocation; nothing was changed.

    Attributes:
        needed: bytes asked for, rounded up to the base alignment.
        free: bytes free in all holes together.
        largest_hole: bytes of the largest hole. May be `needed` or more, when no hole has `needed` bytes from an
            aligned offset on.
        alignment: the alignment asked for, in bytes.
    """

    def __init__(self, needed: int, free: int, *, largest_hole: int, alignment: int) -> None:
        if free < needed:
            why = f"only {free} are free"
        elif largest_hole < needed:
            why = f"{free} are free, but in pieces of which the largest has {largest_hole}"
        else:
            why = f"{free} are free, {largest_hole} in one piece, but none has room from a multiple of {alignment} on"
        super().__init__(f"no room for {needed} bytes in the pool: {why}; free something or make the pool larger")
        self.needed = needed
        self.free = free
        self.largest_hole = largest_hole
        self.alignment = alignment


class Allocator:
    """Give out and take back ranges of a pool of `nbytes` bytes.

    Offsets count from the start of the pool, and alignments hold for offsets: for addresses they hold as far as the
    start of the pool is itself aligned.

    Not safe for use by several threads at once. No call waits.

    Args:
        nbytes: size of the pool; a multiple of `alignment`. 0 is a pool in which nothing has room.
        alignment: the base alignment, a power of two: every offset and every size is a multiple of it. The default is
            the spec's.

    Raises:
        ValueError: `alignment` is not a power of two, or `nbytes` is negative or not a multiple of it.

    Source: the spec, section 6.2 (alignment of 512).
    """

    __slots__ = ("_alignment", "_allocations", "_by_end", "_by_size", "_by_start", "_free_nbytes", "_nbytes")

    def __init__(self, nbytes: int, *, alignment: int = 512) -> None:
        nbytes = index(nbytes)
        alignment = index(alignment)
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, not {alignment}")
        if nbytes < 0 or nbytes % alignment:
            raise ValueError(f"a pool must be a multiple of its alignment, {alignment} bytes, not {nbytes} bytes")
        self._nbytes = nbytes
        self._alignment = alignment
        self._free_nbytes = 0
        self._allocations: dict[int, int] = {}  # offset -> nbytes
        self._by_size: list[tuple[int, int]] = []  # (nbytes, offset) of each hole, sorted
        self._by_start: dict[int, int] = {}  # a hole's offset -> its end
        self._by_end: dict[int, int] = {}  # a hole's end -> its offset
        if nbytes:
            self._add_hole(0, nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the pool."""
        return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes in all holes together."""
        return self._free_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes in all allocations together, rounding included."""
        return self._nbytes - self._free_nbytes

    @property
    def largest_hole_nbytes(self) -> int:
        """Bytes of the largest hole, 0 if there is none: the most that `allocate` can get at the base alignment."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def num_allocations(self) -> int:
        """Number of allocations not yet freed."""
        return len(self._allocations)

    def holes(self) -> Iterator[tuple[int, int]]:
        """Iterate over ``(offset, nbytes)`` of each hole, in address order.

        The holes are those of the moment of the call; allocating and freeing while iterating is allowed.
        """
        return iter([(start, end - start) for start, end in sorted(self._by_start.items())])

    def allocate(self, nbytes: int, *, alignment: int | None = None) -> int:
        """Take `nbytes` bytes, rounded up to the base alignment, and return their offset.

        They come from the smallest hole that has room, the one at the lowest address if several are equal, and lie as
        low in it as `alignment` permits: the base alignment times a power of two; ``None`` is the base alignment.

        Ownership: the range is the caller's until `free` is called with this offset.

        Raises:
            ValueError: `nbytes` is not positive, or `alignment` is not the base alignment times a power of two.
            PoolExhausted: no hole has room; nothing was changed.
        """
        base = self._alignment
        nbytes = index(nbytes)
        if nbytes <= 0:
            raise ValueError(f"an allocation must have at least 1 byte, not {nbytes}")
        alignment = base if alignment is None else index(alignment)
        if alignment < base or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, {base} (the pool's own) or more, not {alignment}")
        needed = (nbytes + base - 1) & -base

        # At the base alignment the first hole looked at is the answer. At a larger one, holes that lie wrongly are
        # passed over; the first of `needed + alignment - base` bytes has room wherever it lies and ends the search.
        by_size = self._by_size
        for position in range(bisect_left(by_size, (needed, 0)), len(by_size)):
            hole_nbytes, hole_start = by_size[position]
            offset = (hole_start + alignment - 1) & -alignment
            hole_end = hole_start + hole_nbytes
            if offset + needed <= hole_end:
                break
        else:
            raise PoolExhausted(needed, self._free_nbytes, largest_hole=self.largest_hole_nbytes, alignment=alignment)

        self._remove_hole(position, hole_start, hole_end)
        if hole_start < offset:
            self._add_hole(hole_start, offset)
        if offset + needed < hole_end:
            self._add_hole(offset + needed, hole_end)
        self._allocations[offset] = needed
        return offset

    def free(self, offset: int) -> int:
        """Give back the allocation at `offset` and return how many bytes that was, rounding included.

        The bytes form one hole with those next to them.

        Raises:
            ValueError: no allocation starts at `offset`: it was freed before, or never given out. Nothing was changed.
        """
        start = index(offset)
        nbytes = self._allocations.pop(start, None)
        if nbytes is None:
            raise ValueError(f"no allocation starts at offset {start}: it was freed before, or never given out")
        end = start + nbytes
        before = self._by_end.get(start)
        if before is not None:
            self._remove_hole(bisect_left(self._by_size, (start - before, before)), before, start)
            start = before
        after = self._by_start.get(end)
        if after is not None:
            self._remove_hole(bisect_left(self._by_size, (after - end, end)), end, after)
            end = after
        self._add_hole(start, end)
        return nbytes

    def _add_hole(self, start: int, end: int) -> None:
        insort(self._by_size, (end - start, start))
        self._by_start[start] = end
        self._by_end[end] = start
        self._free_nbytes += end - start

    def _remove_hole(self, position: int, start: int, end: int) -> None:
        """Forget the hole from `start` to `end`, which is at `position` of the list by size."""
        del self._by_size[position]
        del self._by_start[start]
        del self._by_end[end]
        self._free_nbytes -= end - start
