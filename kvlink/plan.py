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

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

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


ExtentFields = tuple[int, int, int, int, int, int, int, int]
"""The fields of an `Extent`, which is one; a plain tuple is made in a sixth of the time."""

BlockNumbers = Sequence[int] | NDArray[np.integer[Any]]
BlockArray = NDArray[np.int64]

_make_extent: Final[Callable[[Iterable[int]], Extent]] = partial(tuple.__new__, Extent)
"""0.14 us each in a `map`, where calling the class takes 0.35 us: planning of thousands of blocks."""


def join_blocks(local: BlockNumbers, remote: BlockNumbers, block_nbytes: int) -> list[Piece]:
    """Return the fewest pieces that move block ``remote[i]`` to or from block ``local[i]``, for all i.

    Args:
        local: destination block numbers of a pull (source of a push), each at most once, in any order.
        remote: the peer's block numbers, as many.
        block_nbytes: bytes of a block, the same on both sides.
    """
    if len(local) == 1:
        return [Piece(int(local[0]) * block_nbytes, int(remote[0]) * block_nbytes, block_nbytes)]
    columns = _join(np.asarray(local, np.int64), np.asarray(remote, np.int64), block_nbytes)
    return list(map(Piece, *(column.tolist() for column in columns)))


def plan_blocks(
    local_runs: tuple[TensorRun, ...],
    remote_runs: tuple[TensorRun, ...],
    local: BlockArray,
    remote: BlockArray,
    block_nbytes: int,
    *,
    is_push: bool = False,
) -> list[Extent]:
    """Return what `spread` makes of the pieces of `join_blocks`; nothing here loops over blocks.

    Args:
        local, remote: block numbers, shape (n,) both.
        is_push: `remote` is where each block occurs at most once, instead of `local`.
    """
    if is_push:
        remote_offsets, local_offsets, lengths = _join(remote, local, block_nbytes)
    else:
        local_offsets, remote_offsets, lengths = _join(local, remote, block_nbytes)
    extents: list[Extent] = []
    for (region, base, stride, count), (peer_region, peer_base, peer_stride, _) in pair_runs(local_runs, remote_runs):
        nbytes, rows = lengths.tolist(), repeat(count)
        strides, peer_strides = repeat(stride), repeat(peer_stride)
        if count > 1 and stride == peer_stride and (is_whole := lengths == stride).any():
            # Rows that touch on both sides become one longer row.
            nbytes = np.where(is_whole, lengths * count, lengths).tolist()
            rows = np.where(is_whole, 1, count).tolist()
            strides = peer_strides = np.where(is_whole, 0, stride).tolist()
        offsets, peer_offsets = (local_offsets + base).tolist(), (remote_offsets + peer_base).tolist()
        columns = (repeat(region), offsets, strides, repeat(peer_region), peer_offsets, peer_strides, nbytes, rows)
        extents += map(_make_extent, zip(*columns, strict=False))
    return extents


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
    for (region, base, stride, count), (peer_region, peer_base, peer_stride, _) in pair_runs(local_runs, remote_runs):
        for local_offset, remote_offset, nbytes in pieces:
            if count > 1 and nbytes == stride == peer_stride:
                extents.append(
                    Extent(region, base + local_offset, 0, peer_region, peer_base + remote_offset, 0, nbytes * count, 1)
                )
            else:
                extents.append(
                    Extent(
                        region,
                        base + local_offset,
                        stride,
                        peer_region,
                        peer_base + remote_offset,
                        peer_stride,
                        nbytes,
                        count,
                    )
                )
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
    return sum(extent.nbytes * extent.num_rows for extent in extents)
