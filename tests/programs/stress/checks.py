"""Whether bytes are what they must be, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import kvlink as kv
from tests.programs.stress.settings import NUM_TASKS, WIDTH
from tests.support.pattern import Stamp, Tensors, block_bytes, faults, read_stamp, rows


class Lives:
    """What a worker has seen of the others: it must never see anything older than that."""

    def __init__(self) -> None:
        self._life: dict[int, int] = {}
        self._of_incarnation: dict[bytes, int] = {}
        self._cache: dict[tuple[int, int, str], int] = {}

    def seen(self, peer: int, name: str) -> tuple[int, int]:
        """Return the newest life of `peer` that was seen, and the newest cache of that life under `name`."""
        life = self._life.get(peer, 0)
        return life, self._cache.get((peer, life, name), 0)

    def check(self, stamp: Stamp, peer: int, name: str, link: kv.Link, before: tuple[int, int]) -> str | None:
        """Say what is wrong with a stamp that was pulled from `peer` over `link`.

        Args:
            before: what `seen` returned before the pull.
        """
        if stamp.cluster != peer:
            return f"bytes of {stamp} came from cluster {peer}"
        if stamp[1:] < before:
            seen = f"life {before[0]}, cache {before[1]}"
            return f"bytes of {stamp} came from {name} of cluster {peer}; {seen} was seen before"
        known = self._of_incarnation.setdefault(link.incarnation, stamp.life)
        if known != stamp.life:
            return f"bytes of {stamp} came over a link to life {known} of cluster {peer}"
        self._life[peer] = max(self._life.get(peer, 0), stamp.life)
        place = (peer, stamp.life, name)
        self._cache[place] = max(self._cache.get(place, 0), stamp.cache)
        return None


def check_pulled(
    tensors: Tensors, destination: Sequence[int], source: Sequence[int], src_tensor: int = 0
) -> tuple[Stamp, str | None]:
    """Return whose the pulled blocks are, and what is wrong with them: all must be of one cache, and complete."""
    try:
        stamp = read_stamp(tensors[0], destination[0])
    except AssertionError as exc:
        return Stamp(0, 0, 0), f"block {destination[0]} holds {exc}"
    return stamp, faults(tensors, stamp, destination, src_blocks=source, src_tensor=src_tensor)


def check_inbox(tensors: Tensors, own: Stamp, num_workers: int) -> str | None:
    """Say which bytes of an inbox nobody may have put there.

    Every block belongs to one worker. Pushes into it may have been cut short anywhere, so each byte by itself must be
    the owner's or that worker's, of whichever life, for exactly that place.
    """
    num_blocks = len(tensors[0])
    writer = np.arange(num_blocks) // (NUM_TASKS * WIDTH) + 1
    for index, tensor in enumerate(tensors):
        found = rows(tensor).reshape(num_blocks, -1, 16)
        initial = block_bytes(own, index, range(num_blocks), rows(tensor).shape[1]).reshape(found.shape)
        is_wrong = found != initial
        cluster: NDArray[np.uint8] = found[:, :, 2]
        is_wrong[:, :, 2] = (cluster != own.cluster) & (cluster != writer[:, np.newaxis])
        is_wrong[:, :, 3:6] = False  # life and number of the cache
        if is_wrong.any():
            block, record, byte = map(int, np.argwhere(is_wrong)[0])
            return (
                f"block {block} of tensor {index} of inbox {own} belongs to cluster {writer[block]}; "
                f"byte {byte} of record {record} is of {found[block, record].tobytes().hex()}"
            )
    return None
