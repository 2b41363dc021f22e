"""From tensors and block numbers to a few large strided extents. Pure.

A request names tensors (all of some layers) and, inside each of them, the same *pieces*: blocks, or a byte range of a
slot. Both sides' tensors lie in runs of constant stride (`TensorRun`), so a piece over a run of tensors is one
`Extent`: the same bytes repeated at a stride. A cache from a pool is one run, so a request becomes one extent per
piece, whatever the number of tensors, and neighbouring blocks are joined first. Nothing here loops over tensors.

Joining: blocks ``i`` and ``j`` of a request can be moved as one when both numbers of ``j`` follow those of ``i``. As no
destination occurs twice, each block has at most one successor, and sorting by destination puts it next: so the number
of pieces is the least possible, whatever the order of the request.

Directions do not matter to a plan: *local* is our memory, *remote* the peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvlink.geometry import TensorRun


class Piece(NamedTuple):
    """`nbytes` contiguous bytes inside each tensor, at these offsets from the tensor's first byte."""

    local_offset: int
    remote_offset: int
    nbytes: int


class Extent(NamedTuple):
    """`nbytes` contiguous bytes, `num_rows` times: row ``k`` lies ``k`` strides after the offsets. All in bytes."""

    local_region: int
    local_offset: int
    local_stride: int
    remote_region: int
    remote_offset: int
    remote_stride: int
    nbytes: int
    num_rows: int


Regions = tuple[set[int], set[int]]
"""Numbers of regions: ours, the peer's."""

ExtentFields = tuple[int, int, int, int, int, int, int, int]
"""The fields of an `Extent`, which is one; a plain tuple is made in a sixth of the time."""


class Extents(Sequence[Extent]):
    """Many extents as rows of one array, each made when it is looked at.

    So a request for thousands of scattered blocks costs the event loop a few numpy calls, and the copy threads make the
    extents of a chunk when they come to it.

    Args:
        table: shape (n, 8), the fields of `Extent` in their order; owned from now on.
        regions: those that they name, ours and the peer's; a part of them may name fewer.
    """

    __slots__ = ("regions", "table")

    def __init__(self, table: NDArray[np.int64], regions: Regions) -> None:
        self.table = table
        self.regions = regions

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Extent]:
        for start in range(0, len(self.table), _MADE_AT_ONCE):
            yield from map(_make_extent, self.table[start : start + _MADE_AT_ONCE].tolist())

    @overload
    def __getitem__(self, index: int) -> Extent: ...

    @overload
    def __getitem__(self, index: slice) -> Extents: ...

    def __getitem__(self, index: int | slice) -> Extent | Extents:
        if isinstance(index, slice):
            return Extents(self.table[index], self.regions)
        return _make_extent(self.table[index].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and np.array_equal(self.table, other.table)

    __hash__ = None  # type: ignore[assignment]  # it holds an array


_OFFSET, _STRIDE, _PEER_OFFSET, _PEER_STRIDE, _NBYTES, _ROWS = 1, 2, 4, 5, 6, 7
_MADE_AT_ONCE: Final = 512
"""Extents made between two chances for other threads: 0.1 ms."""


def regions_of(extents: Sequence[Extent]) -> Regions:
    """Return the regions that extents name."""
    if isinstance(extents, Extents):
        return extents.regions
    return {extent[0] for extent in extents}, {extent[3] for extent in extents}


BlockNumbers = Sequence[int] | NDArray[np.integer[Any]]
BlockArray = NDArray[np.int64]

_make_extent: Final[Callable[[Iterable[int]], Extent]] = partial(tuple.__new__, Extent)
"""0.14 us each in a `map`, where calling the class takes 0.35 us: planning of thousands of blocks."""

_make_piece: Final[Callable[[Iterable[int]], Piece]] = partial(tuple.__new__, Piece)


FEW_BLOCKS: Final = 64
"""Up to here plain ints are checked, sorted and joined faster than numpy can: 0.8 us a block; numpy 25 us, cold 100."""


def join_few(unique: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ``(first of unique, first of other, length)`` of the fewest runs in which both count up together.

    Args:
        unique, other: as many plain ints, in any order.

    Returns:
        nothing where a number occurs twice in `unique`.
    """
    runs: list[tuple[int, int, int]] = []
    first = first_other = length = 0
    for number, partner in sorted(zip(unique, other, strict=True)):
        if length and number == first + length and partner == first_other + length:
            length += 1
            continue
        if length:
            if number == first + length - 1:
                return []
            runs.append((first, first_other, length))
        first, first_other, length = number, partner, 1
    if length:
        runs.append((first, first_other, length))
    return runs


def join_blocks(local: BlockNumbers, remote: BlockNumbers, block_nbytes: int, *, is_push: bool = False) -> list[Piece]:
    """Return the fewest pieces that move block ``remote[i]`` to or from block ``local[i]``, for all i.

    Args:
        local: destination block numbers of a pull, each at most once, in any order.
        remote: the peer's block numbers, as many.
        block_nbytes: bytes of a block, the same on both sides.
        is_push: `remote` is where each block occurs at most once, instead of `local`.
    """
    if is_push:
        joined = join_blocks(remote, local, block_nbytes)
        return [_make_piece((ours, theirs, nbytes)) for theirs, ours, nbytes in joined]
    if len(local) <= FEW_BLOCKS:
        runs = join_few(as_ints(local), as_ints(remote))
        return [_make_piece((ours * block_nbytes, theirs * block_nbytes, n * block_nbytes)) for ours, theirs, n in runs]
    columns = _join(np.asarray(local, np.int64), np.asarray(remote, np.int64), block_nbytes)
    return list(map(Piece, *(column.tolist() for column in columns)))


def as_ints(numbers: BlockNumbers) -> Sequence[int]:
    """Return block numbers as plain ints; perhaps the caller's own list."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def plan_blocks(
    local_runs: tuple[TensorRun, ...],
    remote_runs: tuple[TensorRun, ...],
    local: BlockNumbers,
    remote: BlockNumbers,
    block_nbytes: int,
    *,
    is_push: bool = False,
    few: int = FEW_BLOCKS,
) -> Sequence[Extent]:
    """Return what `spread` makes of the pieces of `join_blocks`; nothing here loops over many blocks.

    Args:
        local, remote: block numbers, as many each.
        is_push: `remote` is where each block occurs at most once, instead of `local`.
        few: more blocks than these are planned by numpy.
    """
    if len(local) <= few:
        return spread(local_runs, remote_runs, join_blocks(local, remote, block_nbytes, is_push=is_push))
    our_blocks, their_blocks = np.asarray(local, np.int64), np.asarray(remote, np.int64)
    if is_push:
        remote_offsets, local_offsets, lengths = _join(their_blocks, our_blocks, block_nbytes)
    else:
        local_offsets, remote_offsets, lengths = _join(our_blocks, their_blocks, block_nbytes)
    pairs = pair_runs(local_runs, remote_runs)
    tables = np.empty((len(pairs), len(lengths), 8), np.int64)
    for table, ((region, base, stride, count), (peer_region, peer_base, peer_stride, _)) in zip(
        tables, pairs, strict=True
    ):
        table[:] = (region, base, stride, peer_region, peer_base, peer_stride, 0, count)
        table[:, _OFFSET] += local_offsets
        table[:, _PEER_OFFSET] += remote_offsets
        table[:, _NBYTES] = lengths
        if count > 1 and stride == peer_stride and (is_whole := lengths == stride).any():
            # Rows that touch on both sides become one longer row.
            table[is_whole, _NBYTES] *= count
            table[is_whole, _ROWS] = 1
            table[is_whole, _STRIDE] = table[is_whole, _PEER_STRIDE] = 0
    regions = {run.region for run, _ in pairs}, {run.region for _, run in pairs}
    return Extents(tables.reshape(-1, 8), regions)


def _join(unique: BlockArray, other: BlockArray, block_nbytes: int) -> tuple[BlockArray, BlockArray, BlockArray]:
    """Return offsets on both sides and lengths, in bytes, of the fewest pieces; no number occurs twice in `unique`."""
    order = np.argsort(unique, kind="stable")
    left, right = unique[order], other[order]
    is_first = np.empty(len(left), dtype=bool)
    is_first[:1] = True
    np.logical_or(left[1:] != left[:-1] + 1, right[1:] != right[:-1] + 1, out=is_first[1:])
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=len(left))
    return left[starts] * block_nbytes, right[starts] * block_nbytes, lengths * block_nbytes


def scatter_slot(local_blocks: BlockNumbers, local_block_nbytes: int, remote_offset: int, nbytes: int) -> list[Piece]:
    """Return the pieces that lay `nbytes` contiguous remote bytes into local blocks, the last perhaps in part.

    Source: the spec, section 9.3. ``remote_offset`` counts from the remote tensor's first byte.
    """
    pieces: list[Piece] = []
    for index, block in enumerate(local_blocks):
        start = index * local_block_nbytes
        length = min(local_block_nbytes, nbytes - start)
        if length <= 0:
            break
        offset = int(block) * local_block_nbytes
        last = pieces[-1] if pieces else None
        if last is not None and last.local_offset + last.nbytes == offset:
            pieces[-1] = Piece(last.local_offset, last.remote_offset, last.nbytes + length)
        else:
            pieces.append(Piece(offset, remote_offset + start, length))
    return pieces


def restage(pieces: Sequence[Piece], slot_nbytes: int) -> tuple[list[int], list[Piece]]:
    """Return the remote slots that `pieces` touch, ascending, and the same pieces on a cache of just these slots.

    For a remote cache that cannot be reached where it is: its owner copies the slots, in this order, to where it can.
    """
    touched = {
        slot
        for piece in pieces
        for slot in range(
            piece.remote_offset // slot_nbytes, (piece.remote_offset + piece.nbytes - 1) // slot_nbytes + 1
        )
    }
    slots = sorted(touched)
    place = {slot: index for index, slot in enumerate(slots)}
    moved: list[Piece] = []
    for local_offset, remote_offset, nbytes in pieces:
        done = 0
        while done < nbytes:
            slot, within = divmod(remote_offset + done, slot_nbytes)
            length = min(slot_nbytes - within, nbytes - done)
            moved.append(Piece(local_offset + done, place[slot] * slot_nbytes + within, length))
            done += length
    return slots, moved


def spread(
    local_runs: tuple[TensorRun, ...], remote_runs: tuple[TensorRun, ...], pieces: Sequence[Piece]
) -> list[Extent]:
    """Return the extents that move `pieces` in each pair of tensors, first with first, second with second.

    Both run lists hold the same number of tensors. One extent per piece and pair of runs; rows that touch on both
    sides become one longer row.
    """
    extents: list[Extent] = []
    for (region, base, stride, count), (peer, peer_base, peer_stride, _) in pair_runs(local_runs, remote_runs):
        # Rows that touch on both sides become one longer row.
        whole = stride if count > 1 and stride == peer_stride else -1
        extents += [
            _make_extent((region, base + ours, 0, peer, peer_base + theirs, 0, nbytes * count, 1))
            if nbytes == whole
            else _make_extent((region, base + ours, stride, peer, peer_base + theirs, peer_stride, nbytes, count))
            for ours, theirs, nbytes in pieces
        ]
    return extents


def pair_runs(
    local_runs: tuple[TensorRun, ...], remote_runs: tuple[TensorRun, ...]
) -> list[tuple[TensorRun, TensorRun]]:
    """Return the runs of both sides cut at each other's ends, so that they match one to one."""
    if len(local_runs) == 1 and len(remote_runs) == 1:
        return [(local_runs[0], remote_runs[0])]
    pairs = []
    ours, theirs = list(reversed(local_runs)), list(reversed(remote_runs))
    while ours and theirs:
        left, right = ours.pop(), theirs.pop()
        count = min(left.num_tensors, right.num_tensors)
        pairs.append((left._replace(num_tensors=count), right._replace(num_tensors=count)))
        for run, stack in ((left, ours), (right, theirs)):
            if run.num_tensors > count:
                stack.append(
                    TensorRun(run.region, run.offset + count * run.stride, run.stride, run.num_tensors - count)
                )
    return pairs


def total_nbytes(extents: Sequence[Extent]) -> int:
    """Return how many bytes `extents` move."""
    if isinstance(extents, Extents):
        return int((extents.table[:, _NBYTES] * extents.table[:, _ROWS]).sum())
    return sum(extent.nbytes * extent.num_rows for extent in extents)
