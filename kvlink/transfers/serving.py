"""What a cluster does when a peer asks about its caches, and what it takes back when a peer goes."""

from __future__ import annotations

from typing import Final, NamedTuple

import anyio
from anyio.abc import TaskGroup

from kvlink.caches.copies import LocalCopier
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.caches.tickets import TicketBook, found_by
from kvlink.errors import FeatureNotEnabledError, KVLinkError
from kvlink.links.link import Link
from kvlink.memory.regions import ONLY_UCX
from kvlink.transfers.heldtickets import HeldTickets
from kvlink.transfers.staging import StagingServer
from kvlink.transports.base import DeathWatch
from kvlink.wire import (
    Claim,
    CloseRead,
    CloseWrite,
    Commit,
    EndTicket,
    Failed,
    Filled,
    Found,
    LayerEvent,
    LookUp,
    Message,
    OpenRead,
    OpenWrite,
    Recall,
    Stage,
)

_MAX_LEASE_S: Final = 3600.0
"""No peer keeps memory longer than this without its link being looked at again."""


class _Watched(NamedTuple):
    """A lost life of cluster `peer` that may still write; `scope` ends the watch on it."""

    peer: int
    scope: anyio.CancelScope


class CacheServer:
    """The owner's side of every link of one cluster.

    Args:
        store: what it owns.
        copier: copies between its caches, for detours.
        tickets: those that it has given to others.
        held: those of others that it holds.
        tasks: the cluster's, for detours, and for waiting until a lost writer is certain to be dead.
        max_detour_nbytes: see `StagingServer`.
    """

    def __init__(
        self,
        store: CacheStore,
        copier: LocalCopier,
        tickets: TicketBook,
        held: HeldTickets,
        tasks: TaskGroup,
        *,
        max_detour_nbytes: int = 0,
    ) -> None:
        self._store = store
        self._tickets = tickets
        self._held = held
        self._tasks = tasks
        self._staging = StagingServer(store, copier, tasks, max_detour_nbytes)
        self._open: dict[bytes, Link] = {}
        self._watching: dict[bytes, _Watched] = {}
        store.table.on_ended = self._recall

    def on_opened(self, link: Link) -> None:
        """Know a new link. Nothing is written over older links of that life any more: see `LinkTable._hand_over`."""
        self._open[link.incarnation] = link
        watching = self._watching.pop(link.incarnation, None)
        if watching is not None:
            watching.scope.cancel()
        self._store.leases.drop_writers(link.incarnation)

    def release(self, peer: int) -> int:
        """End the write leases of a lost cluster that is certain to be dead; return how many there were."""
        leases = self._store.leases
        before = leases.num_writes
        for holder, watched in list(self._watching.items()):
            if watched.peer == peer:
                del self._watching[holder]
                watched.scope.cancel()
                leases.drop_writers(holder)
        return before - leases.num_writes

    def on_message(self, link: Link, message: Message) -> Message | None:
        """Serve one message and return the answer, if it has one. Waits for nothing."""
        if isinstance(message, (LookUp, OpenRead, OpenWrite, Claim)):
            try:
                return self._claim(link, message) if isinstance(message, Claim) else self._find(link, message)
            except KVLinkError as exc:
                return Failed(message.seq, exc.status, str(exc)[:1000])
        holder = link.incarnation
        if isinstance(message, CloseRead):
            self._store.leases.close_read(holder, message.lease, message.tensors)
            self._staging.close(holder, message.lease)
            self._tickets.give_back(link, message.lease)
        elif isinstance(message, (Stage, Commit)):
            self._staging.begin(link, message)
        elif isinstance(message, CloseWrite):
            self._store.leases.close_write(holder, message.lease)
        elif isinstance(message, EndTicket) and message.is_mine:
            self._held.take(link, message)
        elif isinstance(message, (Filled, EndTicket)):
            self._tickets.take(link, message)
        elif isinstance(message, LayerEvent):
            handle = self._store.handle(message.cache_id)
            if handle is not None:
                handle.arrivals.take(link.peer, message)
        return None

    def on_closed(self, link: Link) -> None:
        """Take back what a peer held whose link has ended: at once, but for what it could still write into."""
        leases, holder = self._store.leases, link.incarnation
        if self._open.get(holder) is link:
            del self._open[holder]
        cause = f"the link to cluster {link.peer} has ended"
        self._tickets.lose(link, cause)
        self._held.lose(link, cause)
        leases.drop_readers(holder)
        self._staging.drop(holder)
        for arrivals in list(self._store.watched):
            arrivals.lose(link.peer)
        if not leases.is_writer(holder):
            return
        if link.is_orderly:
            leases.drop_writers(holder)
        else:
            leases.quarantine_all(holder, link.peer)
            scope = anyio.CancelScope()
            self._watching[holder] = _Watched(link.peer, scope)
            self._tasks.start_soon(self._outlive, link, link.endpoint.watch_death(), scope)

    def _find(self, link: Link, message: LookUp | OpenRead | OpenWrite) -> Found:
        store, target = self._store, message.target
        store.collect()
        if target.namespace == "address":
            entry, slot, name = store.locate(target.id), 0, None
        else:
            entry, slot, name = store.table.find(target)
        self._check_reach(link, entry)
        lease, word, generation = 0, entry.word, entry.generation
        if isinstance(message, OpenRead):
            expires_at = anyio.current_time() + min(message.lease_s, _MAX_LEASE_S)
            lease, word, generation, *_ = store.leases.open_read(link.incarnation, entry, slot, name, expires_at)
        elif isinstance(message, OpenWrite):
            lease = store.leases.open_write(link.incarnation, entry)
        regions = {run.region for run in entry.geometry.runs}
        link.endpoint.share(regions, for_writing=isinstance(message, OpenWrite))
        addresses: tuple[tuple[int, int], ...] = ()
        if target.namespace == "address":
            addresses = tuple((region, store.memory[region].address) for region in sorted(regions))
        return Found(
            seq=message.seq,
            cache_id=entry.cache_id,
            slot=slot,
            geometry=entry.geometry,
            word=word,
            generation=generation,
            lease=lease,
            addresses=addresses,
        )

    def _claim(self, link: Link, message: Claim) -> Found:
        asked = self._tickets.entry_of(message)
        if asked is not None:
            self._check_reach(link, asked)
        ticket = self._tickets.claim(link, message, anyio.current_time())
        link.endpoint.share({run.region for run in ticket.entry.geometry.runs}, for_writing=ticket.is_write)
        return found_by(ticket, message.seq)

    def _check_reach(self, link: Link, entry: CacheEntry) -> None:
        """Refuse a cache in CUDA memory over a link that cannot move it, before anything is given out."""
        device = self._store.device_of(entry)
        if device is not None and not link.endpoint.reaches_cuda:
            raise FeatureNotEnabledError(
                f"cache {entry.cache_id} is in the memory of CUDA device {device}, which {ONLY_UCX}; "
                f"this link is over {link.transport}"
            )

    def _recall(self, entry: CacheEntry) -> None:
        """A cache has ended: ask its writers to stop. Its memory waits for them."""
        self._tickets.end_cache(entry)
        if not entry.is_consumable:
            self._store.leases.end_reads(entry)
        for holder, number in self._store.leases.writers_of(entry):
            link = self._open.get(holder)
            if link is not None:
                self._store.leases.quarantine(number, link.peer)
                link.post(Recall(number))

    async def _outlive(self, link: Link, watch: DeathWatch, scope: anyio.CancelScope) -> None:
        """Keep what a lost peer may write into until it can write no more.

        Because the operating system says that it is dead; or, where the transport makes that certain, because our
        endpoint is closed. A link of the same life ends the watch (`on_opened`), and so does whoever knows that it is
        dead (`release`). Where none of these happens the memory stays in quarantine as long as this cluster is open:
        silence is no proof.
        """
        try:
            with scope:
                if link.endpoint.capabilities.is_fenced_by_close:
                    await link.closed.wait()
                else:
                    await watch.wait()
                self._watching.pop(link.incarnation, None)
                self._store.leases.drop_writers(link.incarnation)
        finally:
            watch.close()
