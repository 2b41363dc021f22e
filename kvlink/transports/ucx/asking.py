"""From pieces of regions to a transfer of UCX: addresses instead of offsets, and nothing outside of a region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvlink.plan import ExtentFields
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.pieces import Pieces
from kvlink.transports.ucx.registry import Registered
from kvlink.transports.ucx.requests import Group, Transfer


class RemoteRegion(NamedTuple):
    """A region of the peer that we can address."""

    address: int
    nbytes: int
    rkey: Any
    is_on_device: bool


class Part(NamedTuple):
    """Pieces, and the regions that they have in common."""

    pieces: Pieces
    ours: Registered
    theirs: RemoteRegion


def transfer_of(connection: WorkerEndpoint, parts: Sequence[Part], *, is_put: bool) -> Transfer:
    """Return the transfer of all `parts`, in their order.

    Raises:
        ValueError: a piece lies outside its region.
    """
    local: list[int] = []
    remote: list[int] = []
    lengths: list[int] = []
    groups: list[Group] = []
    for pieces, ours, theirs in parts:
        for offsets, limit in ((pieces.local, ours.nbytes), (pieces.remote, theirs.nbytes)):
            if offsets.min() < 0 or (offsets + pieces.nbytes).max() > limit:
                raise ValueError(f"a row lies outside its memory of {limit} bytes")
        local += (pieces.local.astype(np.uint64) + np.uint64(ours.address)).tolist()
        remote += (pieces.remote.astype(np.uint64) + np.uint64(theirs.address)).tolist()
        lengths += pieces.nbytes.tolist()
        groups.append(Group(len(local), ours.memh, theirs.rkey, ours.memory_type))
    return Transfer(
        connection,
        is_put=is_put,
        local=local,
        nbytes=lengths,
        remote=remote,
        groups=groups,
        keep=[part.ours for part in parts],
        is_on_device=any(part.ours.is_on_device or part.theirs.is_on_device for part in parts),
    )


def transfer_of_rows(
    connection: WorkerEndpoint, extent: ExtentFields, ours: Registered, theirs: RemoteRegion, *, is_put: bool
) -> Transfer:
    """Return the transfer of a few short rows, which lie inside of both regions."""
    _, offset, stride, _, peer_offset, peer_stride, nbytes, num_rows = extent
    local, remote = ours.address + offset, theirs.address + peer_offset
    return Transfer(
        connection,
        is_put=is_put,
        local=[local + row * stride for row in range(num_rows)],
        nbytes=[nbytes] * num_rows,
        remote=[remote + row * peer_stride for row in range(num_rows)],
        groups=[Group(num_rows, ours.memh, theirs.rkey)],
        keep=ours,
    )
