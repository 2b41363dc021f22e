"""A cache of a peer and one of ours that fit together: checked once, used by every movement of blocks between them.

The awaited small pull and push. What is checked for every call is what may have changed since the pair was found to
fit: that the handle is valid and the link open, that every block number is inside its cache and no destination occurs
twice, and, by the state word, that the peer's cache is still the one that was looked up; then, after the bytes, the
word again. A movement that is small enough to be copied at once (`Endpoint.get_at_once`) ends before anything else of
this loop can run, so it has nothing in flight to count, to time or to cancel: no movement number, no deadline, no
task. Everything that is not so plain returns None from here, and goes the long way, which says what is wrong.

    Decision: one function, without an await, from the block numbers to the last look at the word.
    Because: an awaited pull of 4 KiB takes 3.5 us instead of 9, a push 3.5 instead of 14 (bench S1_4K).
    Instead of: the long way with each step made cheaper; each await alone costs 0.1 to 0.2 us.
    Revisit when: a small movement has to wait for its turn among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvlink.checks import Tensors
from kvlink.geometry import TensorRun
from kvlink.links.grants import WriteGrant
from kvlink.plan import ExtentFields, join_few, pair_runs
from kvlink.transports.base import Endpoint
from kvlink.wire import Found

MAX_PAIRINGS: Final = 4096
"""Remembered pairs of caches and layer ranges per link; beyond that they are found anew."""


class Pairing(NamedTuple):
    """Two caches that have been checked to fit, tensor by tensor, for moving blocks.

    It holds while the state word of `found` holds its generation, and `grant` is not recalled.

    Attributes:
        found: the peer's cache.
        local, remote: where the chosen tensors lie, on our side and on the peer's.
        num_tensors: how many tensors.
        theirs: which of the peer's.
        grant: for pushes, the write lease.
        quick: the same once more, as the short way needs it.
    """

    found: Found
    local: tuple[TensorRun, ...]
    remote: tuple[TensorRun, ...]
    num_tensors: int
    theirs: Tensors
    grant: WriteGrant | None
    quick: Quick

    @classmethod
    def of(
        cls,
        found: Found,
        local: tuple[TensorRun, ...],
        remote: tuple[TensorRun, ...],
        num_tensors: int,
        theirs: Tensors,
        grant: WriteGrant | None = None,
    ) -> Pairing:
        """Return the pairing of tensors that fit."""
        geometry = found.geometry
        rows = tuple(
            (ours.region, ours.offset, ours.stride, peer.region, peer.offset, peer.stride, ours.num_tensors)
            for ours, peer in pair_runs(local, remote)
        )
        nbytes = geometry.slot_nbytes
        quick = Quick(found.word, found.generation, geometry.num_slots, nbytes, nbytes * num_tensors, rows)
        return cls(found, local, remote, num_tensors, theirs, grant, quick)


class Quick(NamedTuple):
    """What moving a few blocks needs of a pairing.

    Attributes:
        word, generation: what the peer's state word must hold.
        num_slots: blocks of the peer's cache.
        block_nbytes: bytes of a block in one tensor.
        nbytes: bytes of a block in all chosen tensors.
        rows: (our region, offset, stride, the peer's region, offset, stride, tensors) of each pair of runs.
    """

    word: int
    generation: int
    num_slots: int
    block_nbytes: int
    nbytes: int
    rows: tuple[tuple[int, int, int, int, int, int, int], ...]


class CacheHasEnded(Exception):
    """The peer's cache ended while it was being moved."""


def move_few(
    endpoint: Endpoint,
    move: Callable[[ExtentFields], bool],
    quick: Quick,
    local: Sequence[int],
    remote: Sequence[int],
    num_local: int,
    *,
    is_push: bool,
) -> int:
    """Move block ``remote[i]`` to or from ``local[i]`` at once and return the number of extents; 0: nothing is settled.

    Args:
        move: `Endpoint.get_at_once` or `Endpoint.put_at_once` of `endpoint`.
        local, remote: as many each, not yet compared with any limit.
        num_local: blocks of our cache.
        is_push: `remote` is where each block may occur once, instead of `local`.

    Raises:
        CacheHasEnded: the peer's cache ended meanwhile.
    """
    word, generation, num_remote, block_nbytes, nbytes, rows = quick
    num_blocks = len(local)
    if num_blocks != len(remote) or nbytes * num_blocks > endpoint.immediate_nbytes:
        return 0
    if num_blocks == 1:
        here, there = local[0], remote[0]
        if not (0 <= here < num_local and 0 <= there < num_remote) or endpoint.peek_word(word) != generation:
            return 0
        here *= block_nbytes
        there *= block_nbytes
        for region, offset, stride, peer, peer_offset, peer_stride, count in rows:
            if not move((region, offset + here, stride, peer, peer_offset + there, peer_stride, block_nbytes, count)):
                return 0
        num_extents = len(rows)
    else:
        pieces = _join_few(local, remote, num_local, num_remote, is_push=is_push)
        if not pieces or endpoint.peek_word(word) != generation:
            return 0
        for region, offset, stride, peer, peer_offset, peer_stride, count in rows:
            for here, there, length in pieces:
                extent = (
                    *(region, offset + here * block_nbytes, stride),
                    *(peer, peer_offset + there * block_nbytes, peer_stride),
                    *(length * block_nbytes, count),
                )
                if not move(extent):
                    return 0
        num_extents = len(rows) * len(pieces)
    if endpoint.peek_word(word) != generation:
        raise CacheHasEnded
    return num_extents


def _join_few(
    local: Sequence[int], remote: Sequence[int], num_local: int, num_remote: int, *, is_push: bool
) -> list[tuple[int, int, int]]:
    """Return (our block, the peer's, blocks) of the fewest pieces; nothing where a number is wrong or occurs twice."""
    if min(local) < 0 or min(remote) < 0 or max(local) >= num_local or max(remote) >= num_remote:
        return []
    if is_push:
        return [(ours, theirs, length) for theirs, ours, length in join_few(remote, local)]
    return join_few(local, remote)
