"""Strided copies between two mappings: each is one numpy assignment. Pure, and whoever calls does the work.

A `Copy` is rows of equal length at a constant stride on either side, so it is one memcpy per row, no temporary, no
Python loop over rows, and the GIL released meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from kvlink.memory.pool import Bytes


class Copy(NamedTuple):
    """`num_rows` rows of `nbytes` from `source` to `target`; row k lies k strides after the offset. All in bytes."""

    target: Bytes
    target_offset: int
    target_stride: int
    source: Bytes
    source_offset: int
    source_stride: int
    nbytes: int
    num_rows: int


make_copy: Final[Callable[[Iterable[Any]], Copy]] = partial(tuple.__new__, Copy)
"""Makes a `Copy` of its fields in a third of the time that calling the class takes."""


def copy_rows(
    target: Bytes,
    target_offset: int,
    target_stride: int,
    source: Bytes,
    source_offset: int,
    source_stride: int,
    nbytes: int,
    num_rows: int,
) -> None:
    """Do one copy in this thread; the arguments are the fields of `Copy`.

    Raises:
        ValueError: a row lies outside its memory; nothing was copied.
    """
    if num_rows == 1:
        # A quarter of the cost of building two arrays; but slices that are cut short could match, so look first.
        if (
            target_offset < 0
            or source_offset < 0
            or target_offset + nbytes > len(target)
            or source_offset + nbytes > len(source)
        ):
            raise ValueError(f"a row of {nbytes} bytes lies outside its memory")
        target[target_offset : target_offset + nbytes] = source[source_offset : source_offset + nbytes]
    else:
        shape = (num_rows, nbytes)
        np.ndarray(shape, np.uint8, target, target_offset, (target_stride, 1))[...] = np.ndarray(
            shape, np.uint8, source, source_offset, (source_stride, 1)
        )


def copy_row(target: memoryview, target_offset: int, source: memoryview, source_offset: int, nbytes: int) -> None:
    """Copy one small row, holding the GIL: 0.2 us and the memcpy, where numpy's slices take 0.45 us; bench S1_4K.

    Raises:
        ValueError: the row lies outside its memory, or `target` is read-only; nothing was copied.
    """
    end, source_end = target_offset + nbytes, source_offset + nbytes
    # Slices that are cut short could match, so look first.
    if target_offset < 0 or source_offset < 0 or end > len(target) or source_end > len(source) or target.readonly:
        raise ValueError(f"a row of {nbytes} bytes lies outside its memory, or is read-only")
    target[target_offset:end] = source[source_offset:source_end]


def copy_now(copies: Iterable[Copy]) -> None:
    """Do the copies in this thread; raises as `copy_rows`, and then copies before the faulty one have been done.

    Any two places lie at a constant stride, so two copies of one shape are one assignment: half the calls of numpy,
    which take 7 us each when 64 MiB have just gone through the processor's caches, and 2 % of the time of bench S2.
    """
    first: Copy | None = None
    for copy in copies:
        if first is None:
            first = copy
        elif _are_alike(first, copy):
            copy_two(first, copy)
            first = None
        else:
            copy_rows(*first)
            first = copy
    if first is not None:
        copy_rows(*first)


def _are_alike(one: Copy, other: Copy) -> bool:
    """Whether two copies differ in their offsets only. Not within one memory, where numpy would make a temporary."""
    return (
        one[0] is other[0]
        and one[3] is other[3]
        and one[2] == other[2]
        and one[5] == other[5]
        and one[6:] == other[6:]
        and one[0] is not one[3]
    )


def copy_two(one: Copy, other: Copy) -> None:
    """Do two copies that are alike; raises as `copy_rows`, and then neither has been done."""
    target, target_offset, target_stride, source, source_offset, source_stride, nbytes, num_rows = one
    shape = (2, num_rows, nbytes)
    target_strides = (other.target_offset - target_offset, target_stride, 1)
    source_strides = (other.source_offset - source_offset, source_stride, 1)
    np.ndarray(shape, np.uint8, target, target_offset, target_strides)[...] = np.ndarray(
        shape, np.uint8, source, source_offset, source_strides
    )


def cut(
    copies: Iterable[Copy], chunk_nbytes: int, *, stream_nbytes: int = 0, is_alone: Callable[[], bool] = lambda: True
) -> Iterator[list[Copy]]:
    """Yield the same work in lists of about `chunk_nbytes`: small copies together, large ones by rows, then columns.

    Args:
        stream_nbytes: what is left of one row is cut into pieces of this size while it has so much; 0: never.
        is_alone: asked before each such piece; False for `chunk_nbytes` after all.
    """
    batch: list[Copy] = []
    batch_nbytes = 0
    for copy in copies:
        nbytes = copy.nbytes * copy.num_rows
        if batch_nbytes and batch_nbytes + nbytes > chunk_nbytes:
            yield batch
            batch, batch_nbytes = [], 0
        if nbytes <= chunk_nbytes:
            batch.append(copy)
            batch_nbytes += nbytes
        elif copy.nbytes > chunk_nbytes:
            for row in range(copy.num_rows):
                start = 0
                while start < copy.nbytes:
                    left = copy.nbytes - start
                    step = stream_nbytes if 0 < stream_nbytes <= left and is_alone() else min(chunk_nbytes, left)
                    yield [_part(copy, row, 1, start, step)]
                    start += step
        else:
            step = chunk_nbytes // copy.nbytes
            for row in range(0, copy.num_rows, step):
                yield [_part(copy, row, min(step, copy.num_rows - row), 0, copy.nbytes)]
    if batch:
        yield batch


def _part(copy: Copy, row: int, count: int, start: int, nbytes: int) -> Copy:
    return copy._replace(
        target_offset=copy.target_offset + row * copy.target_stride + start,
        source_offset=copy.source_offset + row * copy.source_stride + start,
        nbytes=nbytes,
        num_rows=count,
    )


def complete(sizes: Sequence[int], copied: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of copies that are complete.

    Args:
        sizes: bytes of each copy.
        copied: first byte and end of the pieces that have been copied, in any order, none twice, when the bytes of all
            copies are counted one after the other.
    """
    joined: list[list[int]] = []
    for start, stop in sorted(copied):
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    found: list[int] = []
    place = first = 0
    for index, size in enumerate(sizes):
        stop = place + size
        while first < len(joined) and joined[first][1] < stop:
            first += 1
        if first < len(joined) and joined[first][0] <= place:
            found.append(index)
        place = stop
    return found
