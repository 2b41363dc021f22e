"""The calls about links: `link_clusters`, `unlink_clusters`, `check_link_status`. Source: the spec, section 4.2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import anyio

from kvlink.config import ClusterConfig, ClusterInfo, check_seconds
from kvlink.errors import (
    KVLinkError,
    ParameterError,
    ParameterTypeError,
    ParameterValueError,
    RoleError,
    StatusCode,
    TransferTimeoutError,
    shown,
)
from kvlink.geometry import Role, check_int
from kvlink.links.events import LinkEventStream
from kvlink.links.notifications import NotificationStream, check_payload
from kvlink.links.table import LinkTable
from kvlink.report import LinkResult, LinkResults, failed_result

_HARMLESS_UNLINK: Final = frozenset({StatusCode.LLM_SUCCESS, StatusCode.LLM_NOT_YET_LINK})


class LinkCalls(ABC):
    """What a cluster can be asked about its links. Base of `Cluster`.

    Attributes:
        config: its settings.
    """

    config: ClusterConfig

    @property
    @abstractmethod
    def role(self) -> Role:
        """What the cluster does now."""

    @abstractmethod
    def _open_links(self) -> LinkTable:
        """Return the links; raise `ClosedError` where the cluster is not open."""

    async def link_clusters(
        self, clusters: Sequence[ClusterInfo], *, timeout_s: float | None = None, relink: bool = False
    ) -> LinkResults:
        """Link to peers, all at once; never raises for what a peer does.

        Clusters of one call do not wait for each other and do not abort each other; those that succeeded stay linked.
        A peer that is linked already is `LLM_ALREADY_LINK`, the same cluster twice is `LLM_REPEAT_REQUEST`; neither
        makes the call a failure. DECODER and MIX only.

        Args:
            clusters: whom, at most `ClusterConfig.max_clusters_per_call`.
            timeout_s: deadline for all of them; None for `ClusterConfig.link_timeout_s`.
            relink: those that are linked now are linked again whenever their link is lost, until `unlink_clusters` or
                the end of this cluster: with growing waits (`ClusterConfig.relink_min_s`, `relink_max_s`), also after
                the peer closed its cluster in good order, but not after it unlinked. Nothing that was pulled, pushed or
                held over the old link comes back; calls fail at once with `NotLinkedError` until there is a new one.

        Returns:
            The pair ``(status, results)``; ``raise_for_status()`` turns a failure into an exception.

        Cancellation: stops waiting; an attempt that somebody else waits for goes on.

        Source: the spec, section 4.2.
        """
        links = self._open_links()
        timeout_s = self.config.link_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        refusal = self._refuse_link_call("link_clusters", clusters)
        if refusal is not None:
            return LinkResults.refused(refusal)
        results: list[LinkResult | None] = [None] * len(clusters)
        seen: set[int] = set()
        taken = {*links.relinker, *(link.peer for link in links)}
        room = self.config.max_links - len(taken)
        if len({info.cluster_id for info in clusters} - taken) > room:
            error = ParameterError(f"only {room} more links are allowed, see ClusterConfig.max_links")
            return LinkResults(error.status, tuple(LinkResult.failed(info.cluster_id, error) for info in clusters))

        async def link(index: int, info: ClusterInfo) -> None:
            is_new_wish = relink and not links.relinker.is_wanted(info.cluster_id)
            if relink:
                links.relinker.want(info)  # before: a link that is lost as soon as it is made is lost too
            result: LinkResult | None = None
            try:
                result = results[index] = await links.link(info, timeout_s=timeout_s)
            finally:
                if is_new_wish and (result is None or not result.is_ok):
                    links.relinker.forget(info.cluster_id)

        async with anyio.create_task_group() as tasks:
            for index, info in enumerate(clusters):
                if info.cluster_id in seen:
                    results[index] = failed_result(
                        info.cluster_id, StatusCode.LLM_REPEAT_REQUEST, f"cluster {info.cluster_id} is listed twice"
                    )
                    continue
                seen.add(info.cluster_id)
                tasks.start_soon(link, index, info)
        finished = tuple(result for result in results if result is not None)
        is_ok = all(result.is_ok for result in finished)
        return LinkResults(StatusCode.LLM_SUCCESS if is_ok else StatusCode.LLM_LINK_FAILED, finished)

    async def unlink_clusters(
        self, clusters: Sequence[ClusterInfo | int], *, timeout_s: float | None = None, force: bool = False
    ) -> LinkResults:
        """End links, all at once; never raises for what a peer does.

        In good order: operations in flight may end, then the peer is told and drops its half. A peer that cannot be
        told is `LLM_NOTIFY_PROMPT_UNLINK_FAILED`: our half is gone in any case. One that is not linked is
        `LLM_NOT_YET_LINK`, which does not make the call a failure.

        Args:
            clusters: cluster ids, or the `ClusterInfo` that they were linked with.
            timeout_s: deadline for all of them; None for `ClusterConfig.link_timeout_s`.
            force: say nothing, drop our half now.

        Source: the spec, section 4.2.
        """
        links = self._open_links()
        timeout_s = self.config.link_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        refusal = self._refuse_list("unlink_clusters", clusters)
        if refusal is not None:
            return LinkResults.refused(refusal)
        peers = [peer_of(cluster) for cluster in clusters]
        results: dict[int, LinkResult] = {}

        async def unlink(peer: int) -> None:
            results[peer] = await links.unlink(peer, timeout_s=timeout_s, force=force)

        async with anyio.create_task_group() as tasks:
            for peer in set(peers):
                tasks.start_soon(unlink, peer)
        is_ok = all(result.status in _HARMLESS_UNLINK for result in results.values())
        status = StatusCode.LLM_SUCCESS if is_ok else StatusCode.LLM_UNLINK_FAILED
        return LinkResults(status, tuple(results[peer] for peer in peers))

    async def check_link_status(
        self, clusters: int | Sequence[ClusterInfo | int], *, timeout_s: float | None = None
    ) -> LinkResults:
        """Ask peers for a sign of life over their links, all at once. DECODER and MIX only.

        Args:
            clusters: one cluster id, or a list of several.
            timeout_s: deadline for all of them; None for `ClusterConfig.link_timeout_s`.

        Returns:
            Per cluster `LLM_SUCCESS`, `LLM_NOT_YET_LINK` or `LLM_WAIT_PROCESS_TIMEOUT`. A failure leaves the link as
            it is. The call's own status is the first failure.

        Raises:
            RoleError: this cluster is a PROMPT.

        Source: the spec, section 4.2.
        """
        links = self._open_links()
        if self.role is Role.PROMPT:
            raise RoleError("check_link_status is for DECODER and MIX; this cluster is PROMPT")
        timeout_s = self.config.link_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        asked: Sequence[object]
        asked = clusters if isinstance(clusters, (list, tuple)) else [clusters]
        peers = [peer_of(cluster) for cluster in asked]
        results: dict[int, LinkResult] = {}

        async def probe(peer: int) -> None:
            try:
                with anyio.move_on_after(timeout_s):
                    await links.open_link(peer).ping()
                    results[peer] = LinkResult(peer, StatusCode.LLM_SUCCESS)
                    return
                raise TransferTimeoutError(
                    f"cluster {peer} did not answer within {timeout_s} s", peer=peer, phase="look-up"
                )
            except KVLinkError as exc:
                results[peer] = LinkResult.failed(peer, exc)

        async with anyio.create_task_group() as tasks:
            for peer in set(peers):
                tasks.start_soon(probe, peer)
        finished = tuple(results[peer] for peer in peers)
        failures = [result.status for result in finished if not result.is_ok]
        return LinkResults(failures[0] if failures else StatusCode.LLM_SUCCESS, finished)

    def events(self, *, max_waiting: int = 1024) -> LinkEventStream:
        """Return what happens to links from now on: `LinkUp`, `LinkLost` and `PeerRestarted`, each once per change.

        ::

            async with cluster.events() as events:
                async for event in events:
                    if isinstance(event, kv.LinkLost):
                        ...  # nothing of event.peer can be pulled now

        Links that peers dialled are among them. Any number of listeners; each gets every event. The iteration ends when
        the cluster is closed.

        Args:
            max_waiting: events kept for a listener that does not take them; beyond that the oldest are dropped and
                counted in `LinkEventStream.num_missed`.
        """
        return self._open_links().events.listen(check_int("max_waiting", max_waiting, 1, 2**20))

    async def notify(
        self, peer: int | ClusterInfo, payload: bytes | bytearray | memoryview, *, timeout_s: float | None = None
    ) -> None:
        """Send a few bytes to a linked peer's application, which takes them from `notifications`. Any role.

        Returns when the peer's process has them in its queue; whether its application has taken them is for the two
        applications to say. Notifications over one link arrive in the order of the calls, each at most once. While the
        peer's application has 32 of this link to take, further calls wait, and delay nothing else.

        Args:
            payload: at most `ClusterConfig.max_notification_nbytes`.
            timeout_s: deadline; None for `ClusterConfig.operation_timeout_s`.

        Cancellation: one that was still waiting for its turn is never sent; another one may arrive.

        Raises:
            NotLinkedError, LinkLostError: there is no link, or it ended; sent or not, it is not sent again.
            TransferTimeoutError: not in time; the message says whether it may still arrive.
            ParameterError: too long, here or for the peer.
            KVLinkError: with `LLM_LINK_BUSY`, the peer's queue for all its links is full.
        """
        links = self._open_links()
        made = check_payload(payload, self.config.max_notification_nbytes)
        timeout_s = self.config.operation_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        link = links.open_link(peer_of(peer))
        link.begin()
        try:
            await link.notices.send(made, timeout_s=timeout_s)
        finally:
            link.end()

    def notifications(self) -> NotificationStream:
        """Return what peers have sent with `notify`, and with ``notify=`` on pulls and pushes, oldest first.

        ::

            async for notification in cluster.notifications():
                ...  # notification.peer, notification.payload

        They are kept from the start of the cluster, so none is missed that was sent before this call. Several streams
        take from one queue. The iteration ends when the cluster is closed and all have been taken.
        """
        return NotificationStream(self._open_links().inbox)

    def _refuse_link_call(self, call: str, clusters: object) -> KVLinkError | None:
        if self.role is Role.PROMPT:
            return RoleError(f"{call} is for DECODER and MIX; this cluster is PROMPT, its peers dial it")
        refusal = self._refuse_list(call, clusters)
        if refusal is None and isinstance(clusters, Sequence):
            for info in clusters:
                if not isinstance(info, ClusterInfo):
                    return ParameterTypeError(f"{call} takes a list of ClusterInfo, got {shown(info)} in it")
        return refusal

    def _refuse_list(self, call: str, clusters: object) -> KVLinkError | None:
        limit = self.config.max_clusters_per_call
        if not isinstance(clusters, (list, tuple)):
            return ParameterTypeError(f"{call} takes a list, got {shown(clusters)}")
        if not clusters:
            return ParameterValueError(f"{call} takes at least one cluster")
        if len(clusters) > limit:
            message = f"{call} takes at most {limit} clusters, got {len(clusters)}"
            return KVLinkError(message, status=StatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT)
        return None


def peer_of(cluster: object) -> int:
    """Return the id of a cluster that a caller names, by its id or its `ClusterInfo`."""
    if isinstance(cluster, ClusterInfo):
        return cluster.cluster_id
    return check_int("cluster id", cluster, 0, 2**64 - 1)
