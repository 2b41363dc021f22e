"""From extents to single requests: which bytes go where, by address. Pure; numpy does it per call, not per block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlink.plan import Extent, Extents

_FIELDS = len(Extent._fields)


class Pieces(NamedTuple):
    """Requests that have both regions in common: offsets and lengths, in bytes, all of the same shape ``(n,)``."""

    local_region: int
    remote_region: int
    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def cut_pieces(extents: Sequence[Extent], longest_nbytes: int) -> list[Pieces]:
    """Return the rows of `extents`, none longer than `longest_nbytes`, grouped by the regions that they are in."""
    if isinstance(extents, Extents):
        table = extents.table
    else:
        table = np.fromiter(chain.from_iterable(extents), np.int64, _FIELDS * len(extents)).reshape(-1, _FIELDS)
    table = table[(table[:, 6] > 0) & (table[:, 7] > 0)]
    groups = []
    while len(table):
        regions = table[:, (0, 3)]
        is_here = (regions == regions[0]).all(axis=1)
        groups.append(_cut(table if is_here.all() else table[is_here], longest_nbytes))
        table = table[~is_here]
    return groups


def _cut(table: NDArray[np.int64], longest_nbytes: int) -> Pieces:
    _, local, local_stride, _, remote, remote_stride, nbytes, num_rows = table.T
    if (num_rows > 1).any():
        index, row = _repeat(num_rows)
        local, remote = local[index] + row * local_stride[index], remote[index] + row * remote_stride[index]
        nbytes = nbytes[index]
    if (nbytes > longest_nbytes).any():
        index, part = _repeat(-(-nbytes // longest_nbytes))
        start = part * longest_nbytes
        local, remote = local[index] + start, remote[index] + start
        nbytes = np.minimum(nbytes[index] - start, longest_nbytes)
    return Pieces(int(table[0, 0]), int(table[0, 3]), local, remote, nbytes)


def _repeat(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ``(index, number)``: index i ``counts[i]`` times, and a number that counts up from 0 for each index."""
    index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    starts = np.cumsum(counts) - counts
    return index, np.arange(len(index), dtype=np.int64) - starts[index]
