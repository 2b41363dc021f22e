"""Linking again by itself, for peers that were linked with ``relink=True``.

A link that is lost leaves a *gap*. A gap is a task that dials until the peer is linked again: by this dial, by anybody
else's, or because the peer dialled us. It ends with `unlink_clusters` and with the cluster. Between two attempts it
waits: `ClusterConfig.relink_min_s` at first, twice as long each time, at most `relink_max_s`, each wait shortened by a
random part of up to one half, so that many clusters do not dial a peer that is back at the same moment. Of many gaps
`max_relinks` dial at the same time; the others wait for their turn.

Decision: a peer that closes its cluster in good order is dialled too; one that *unlinks* is not.
Because: closing is the first half of a restart, and a rolling upgrade is the commonest one. Unlinking is somebody's
wish about this very link.
Instead of: treating both alike, which either undoes an unlink or stops at every upgrade.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import anyio

from kvlink.config import ClusterConfig, ClusterInfo
from kvlink.errors import KVLinkError
from kvlink.report import LinkResult

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from kvlink.links.link import Link

_log = logging.getLogger(__name__)


class _Dial(Protocol):
    def __call__(self, info: ClusterInfo, *, timeout_s: float) -> Awaitable[LinkResult]: ...


class Relinker:
    """The peers of one cluster that are to be linked again.

    Args:
        dial: makes one attempt, or joins the one that is under way; never raises for what a peer does.
        tasks: the cluster's, parent of the gaps' tasks.
        chance: returns a number in ``[0, 1)``.
    """

    def __init__(
        self, dial: _Dial, config: ClusterConfig, tasks: TaskGroup, chance: Callable[[], float] | None = None
    ) -> None:
        self._dial = dial
        self._config = config
        self._tasks = tasks
        self._chance = chance or random.Random().random
        self._wanted: dict[int, ClusterInfo] = {}
        self._gaps: dict[int, _Gap] = {}
        self._turns = anyio.Semaphore(config.max_relinks)

    def __len__(self) -> int:
        """How many peers are being linked again now."""
        return len(self._gaps)

    def __iter__(self) -> Iterator[int]:
        """Whom."""
        return iter(list(self._gaps))

    def is_wanted(self, peer: int) -> bool:
        """Whether `peer` will be linked again when its link is lost."""
        return peer in self._wanted

    def want(self, info: ClusterInfo) -> None:
        """Link to this peer again, at this address, whenever its link is lost from now on."""
        self._wanted[info.cluster_id] = info
        gap = self._gaps.get(info.cluster_id)
        if gap is not None:
            gap.info = info

    def forget(self, peer: int) -> None:
        """Do not link to this peer again; an attempt that nobody else waits for ends."""
        self._wanted.pop(peer, None)
        self._end(peer)

    def close(self) -> None:
        """Forget all. Idempotent."""
        self._wanted.clear()
        for peer in self:
            self._end(peer)

    def lost(self, link: Link) -> None:
        """A link has ended, and no other to that peer is there."""
        info = self._wanted.get(link.peer)
        if info is None:
            return
        if link.is_dismissed:
            self.forget(link.peer)
            return
        if link.peer not in self._gaps:
            gap = self._gaps[link.peer] = _Gap(info, link.error)
            self._tasks.start_soon(self._close_gap, gap)

    def found(self, peer: int) -> None:
        """A link to this peer is open, whoever made it."""
        self._end(peer)

    def explain(self, peer: int) -> str | None:
        """Say how it goes with a peer that is being linked again; None for any other."""
        gap = self._gaps.get(peer)
        if gap is None:
            return None
        return (
            f"there is no link to cluster {peer} now: {gap.cause}. Re-linking is under way, "
            f"{gap.num_attempts} attempts have failed{f' (the last: {gap.error})' if gap.error else ''}; "
            "call again once it is linked"
        )

    def _end(self, peer: int) -> None:
        gap = self._gaps.pop(peer, None)
        if gap is not None:
            gap.scope.cancel()

    async def _close_gap(self, gap: _Gap) -> None:
        wait_s = self._config.relink_min_s
        with gap.scope:
            while True:
                await anyio.sleep(wait_s * (1 - self._chance() / 2))
                async with self._turns:
                    result = await self._dial(gap.info, timeout_s=self._config.link_timeout_s)
                if result.is_ok:
                    break
                gap.num_attempts += 1
                if gap.num_attempts == 1:
                    _log.info("linking to cluster %d again fails for now: %s", gap.info.cluster_id, result.error)
                gap.error = result.error
                wait_s = min(wait_s * 2, self._config.relink_max_s)
        if self._gaps.get(gap.info.cluster_id) is gap:
            del self._gaps[gap.info.cluster_id]


class _Gap:
    """A peer whose link is lost and is wanted back."""

    def __init__(self, info: ClusterInfo, cause: KVLinkError | None) -> None:
        self.info = info
        self.cause = cause
        self.scope = anyio.CancelScope()
        self.num_attempts = 0
        self.error: KVLinkError | None = None
