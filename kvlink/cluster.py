"""A cluster: one serving process, as seen by the others. Owns every task, thread, socket and byte it uses."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from kvlink.acceptor import Acceptor
from kvlink.caches.copies import LocalCopier
from kvlink.caches.opening import open_store
from kvlink.caches.store import CacheStore
from kvlink.caches.tickets import TicketBook
from kvlink.config import ClusterConfig, ClusterInfo, check_listen, default_listen, parse_nbytes
from kvlink.errors import (
    ClosedError,
    LinkExistsError,
    NotLinkedError,
    ParameterError,
    ParameterTypeError,
)
from kvlink.geometry import Role, check_int
from kvlink.links.calls import LinkCalls, peer_of
from kvlink.links.table import BEATS, LinkTable
from kvlink.listening import Door, open_door
from kvlink.memory.copying import Copier
from kvlink.transfers.heldtickets import HeldTickets
from kvlink.transfers.manager import KvCacheManager
from kvlink.transfers.serving import CacheServer
from kvlink.transfers.ticketcalls import TicketMover
from kvlink.transports.choice import choose_transports
from kvlink.transports.shm import ShmTransport
from kvlink.transports.ucx.transport import UcxTransport
from kvlink.wire import Hello

if TYPE_CHECKING:
    from kvlink.links.link import Link
    from kvlink.transports.base import Transport


_log = logging.getLogger(__name__)

_LARGE_NBYTES: Final = 16 * 1024 * 1024
"""Pools of this size and more are unmapped in a thread: 16 MiB take up to 5 ms."""


class Cluster(LinkCalls):
    """One member of a disaggregated deployment: its memory, its links, its KV-cache functions.

    An async context manager: the pool is reserved and the listener opened on entry, everything is given back on exit.
    Several may live in one process. All methods belong to the event loop that entered it, and are refused in other
    threads; the properties may be read anywhere. Enter and leave it in one task, and several in reverse order, as
    nested ``async with`` does.

    Args:
        cluster_id: unique among all that will ever link together, below 2**64.
        role: what it does, see `Role`.
        pool: size of the memory that caches come from: bytes, or text such as ``"2GiB"``.
        listen: ``"host:port"`` (port 0: any free one), ``"[v6]:port"`` or ``"unix:/path"``. None: loopback and any free
            port for PROMPT and MIX, nowhere for DECODER.
        host_pool: size of a second pool for caches of placement HOST; None for no such pool.
        config: everything else; None for `ClusterConfig.from_environ`: the defaults, but for ``KVLINK_`` variables.
        wrap_transport: puts something of the caller's between the cluster and each of its transports, for tests (see
            `kvlink.testing`). Not a setting, because it is code.

    Raises:
        ParameterError: an argument is wrong, or `listen` would let anybody in (`ClusterConfig.allow_unauthenticated`).
        OutOfMemoryError: on entry, the host cannot reserve the pool.
        ListenError: on entry, it cannot listen there.
    """

    def __init__(
        self,
        *,
        cluster_id: int,
        role: Role,
        pool: int | str,
        listen: str | None = None,
        host_pool: int | str | None = None,
        config: ClusterConfig | None = None,
        wrap_transport: Callable[[Transport], Transport] | None = None,
    ) -> None:
        self.cluster_id = check_int("cluster_id", cluster_id, 0, 2**64 - 1)
        if not isinstance(role, Role):
            raise ParameterTypeError(f"role must be a Role, got {role!r}")
        if config is not None and not isinstance(config, ClusterConfig):
            raise ParameterTypeError(f"config must be a ClusterConfig, got {config!r}")
        self.config = ClusterConfig.from_environ() if config is None else config
        self._role = role
        self._pool_nbytes = parse_nbytes(pool, "pool")
        self._host_pool_nbytes = 0 if host_pool is None else parse_nbytes(host_pool, "host_pool")
        self._listen = default_listen(role) if listen is None else listen
        if self._listen is not None:
            check_listen(self._listen, self.config)
        self.incarnation = secrets.token_bytes(16)
        self._door: Door | None = None
        self._host: TaskGroup | None = None
        self._tasks: TaskGroup | None = None
        self._store: CacheStore | None = None
        self._links: LinkTable | None = None
        self._server: CacheServer | None = None
        self._manager: KvCacheManager | None = None
        self._copier: Copier | None = None
        self._tickets: TicketBook | None = None
        self._transports: list[Transport] = []
        self._wrap_transport = wrap_transport
        self._acceptor: Acceptor | None = None
        self._is_closed = False
        self._unmappings: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._closing: anyio.Event | None = None

    @property
    def role(self) -> Role:
        """What the cluster does now."""
        return self._role

    @property
    def address(self) -> str:
        """Where peers dial it: the ``address`` of their `ClusterInfo`.

        Raises:
            NotLinkedError: it does not listen.
            ClosedError: it was not entered, or is closed.
        """
        self._check_open()
        if self._door is None:
            raise NotLinkedError(f"cluster {self.cluster_id} ({self._role.name}) does not listen; give it `listen`")
        return self._door.address

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The KV-cache functions. Raises `ClosedError` outside of the context."""
        self._check_open()
        assert self._manager is not None
        return self._manager

    @property
    def links(self) -> tuple[Link, ...]:
        """The links there are now, each with its state, transport, reason and statistics."""
        self._check_open()
        assert self._links is not None
        return tuple(self._links)

    async def __aenter__(self) -> Cluster:
        if self._tasks is not None or self._is_closed:
            raise ClosedError("a Cluster is entered once; make a new one")
        config = self.config
        store = await open_store(self._pool_nbytes, self._host_pool_nbytes, config)
        store.thread = get_ident()  # it was made in another one
        self._store = store
        self._host = anyio.create_task_group()
        await self._host.__aenter__()
        try:
            # Our tasks live in a group of their own, inside a task: ending them never cancels the body of the caller.
            tasks = self._tasks = await self._host.start(_hold_tasks)
            self._copier = Copier(
                num_threads=config.num_copy_threads,
                inline_nbytes=config.inline_nbytes,
                chunk_nbytes=config.chunk_nbytes,
            )
            names = choose_transports(config)
            store.takes_cuda = "ucx" in names and config.ucx.allow_cuda
            self._transports = [self._make_transport(name) for name in names]
            if self._wrap_transport is not None:
                self._transports = [self._wrap_transport(transport) for transport in self._transports]
            for transport in self._transports:
                await transport.start(tasks)
            local = LocalCopier(store, self._copier)
            tickets = self._tickets = TicketBook(store, self.cluster_id, self.incarnation, config)
            held = HeldTickets()
            server = self._server = CacheServer(
                store, local, tickets, held, tasks, max_detour_nbytes=config.max_detour_nbytes_per_link
            )
            self._links = LinkTable(
                self._hello,
                self._transports,
                config,
                tasks,
                on_message=server.on_message,
                on_opened=server.on_opened,
                on_closed=server.on_closed,
            )
            self._manager = KvCacheManager(
                store,
                self._links,
                config,
                lambda: self._role,
                local,
                tasks,
                tickets,
                TicketMover(store, self._links, held),
            )
            await self._open_listener()
            tasks.start_soon(self._tick)
            tasks.start_soon(tickets.keep_time)
        except BaseException:
            await self._leave()
            raise
        return self

    def _make_transport(self, name: str) -> Transport:
        assert self._store is not None
        assert self._copier is not None
        if name == "ucx":
            return UcxTransport(self._store.memory, self.config)
        return ShmTransport(self._store.memory, self._copier, self.config)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        await self._leave()
        return None

    async def _leave(self) -> None:
        """Close, end our tasks, and wait for them."""
        assert self._host is not None
        try:
            await self.aclose()
        finally:
            (self._tasks or self._host).cancel_scope.cancel()
            # What the body raised passes through unwrapped: our tasks never fail, so there is nothing to add to it.
            await self._host.__aexit__(None, None, None)

    async def aclose(self) -> None:
        """Close in good order: links say goodbye, what is in flight may end, within `close_timeout_s`. Idempotent.

        Views on caches stay valid. Safe to call from several tasks at once; each returns when all is closed.
        """
        if os.getpid() != self._pid:
            return  # a forked child: all of this is the parent's, and a goodbye would be said in its name
        if self._store is not None and not self._is_closed:
            self._store.check_usable()  # waiting for another thread's loop here would never end
        if self._closing is not None:
            await self._closing.wait()
            return
        self._closing = anyio.Event()
        self._is_closed = True
        try:
            with anyio.CancelScope(shield=True):
                await self._close_listener()
                if self._links is not None:
                    await self._links.close_all("the cluster is closing", timeout_s=self.config.close_timeout_s)
                for transport in self._transports:
                    await transport.aclose()
                if self._copier is not None:
                    with anyio.move_on_after(self.config.close_timeout_s):
                        await self._copier.drain()
        finally:
            self._release()
            await self._unmap()
            self._closing.set()

    def abort(self) -> None:
        """Close now: nothing is said to anyone, what is in flight fails. Idempotent.

        Leave the context afterwards: that gives the memory of the pools back, which takes too long for the event loop.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        if self._links is not None:
            self._links.abort_all("the cluster was aborted")
        if self._acceptor is not None:
            self._acceptor.abort()
        self._release()

    def _release(self) -> None:
        if self._links is not None:
            self._links.abort_all("the cluster is closed")
        if self._tickets is not None:
            self._tickets.close("the cluster of its owner was closed")
        if self._copier is not None:
            self._copier.close()
        if self._store is not None:
            self._unmappings.append(self._store.retire())
        self._remove_socket()

    async def _unmap(self) -> None:
        """Give the memory of the pools back, but for what is viewed, in a thread that is not waited for for ever."""
        unmappings, self._unmappings = self._unmappings, []

        def unmap() -> None:
            while unmappings:
                unmappings.pop()()

        if self._pool_nbytes + self._host_pool_nbytes < _LARGE_NBYTES:
            unmap()
            return
        with anyio.move_on_after(self.config.close_timeout_s, shield=True):
            try:
                await anyio.to_thread.run_sync(unmap, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
            except RuntimeError:  # the host has no thread to give
                unmap()

    async def switch_role(self, role: Role, *, listen: str | None = None) -> None:
        """Become another role. Caches, cache ids and bound keys survive; only what is allowed changes.

        It stops listening, and listens anew if the role does or `listen` is given; `address` is then a new one.

        Raises:
            ParameterError: it has that role already.
            LinkExistsError: it has links; unlink all of them first.

        Source: the spec, section 4.4.
        """
        links = self._open_links()
        if not isinstance(role, Role):
            raise ParameterTypeError(f"role must be a Role, got {role!r}")
        if role is self._role:
            raise ParameterError(f"this cluster is {role.name} already")
        if listen is not None:
            check_listen(listen, self.config)
        if len(links) or len(links.relinker):
            peers = ", ".join(str(peer) for peer in [*(link.peer for link in links), *links.relinker])
            raise LinkExistsError(f"unlink first: there are links to clusters {peers}")
        await self._close_listener()
        self._role = role
        self._listen = default_listen(role) if listen is None else listen
        await self._open_listener()

    def confirm_death(self, cluster: ClusterInfo | int) -> int:
        """Say that the process of a lost peer has ended for certain; what it could still write into is free at once.

        For peers of other hosts, whose death kvlink cannot see for itself: whoever runs them (the orchestrator, after
        its container is gone; the operator, after its host is off) knows. A peer of this host, or the same process when
        it links again, needs none of this; a restarted one does, for the life before. Said of a process that lives, it
        lets that process write into another request's memory.

        Args:
            cluster: its id, or the `ClusterInfo` that it was linked with; all lost lives of that cluster are meant, and
                never the one that is linked.

        Returns:
            How many write leases have ended, of those that `PoolUsage.quarantined` counts; 0 when there was nothing.

        Raises:
            LinkExistsError: it is linked, so it lives, and no earlier life of it is waited for.
        """
        links = self._open_links()
        peer = peer_of(cluster)
        assert self._server is not None
        num_ended = self._server.release(peer)
        if not num_ended and links.get(peer) is not None:
            raise LinkExistsError(f"cluster {peer} is linked, so it lives; unlink it first", peer=peer)
        return num_ended

    def _open_links(self) -> LinkTable:
        self._check_open()
        assert self._store is not None
        assert self._links is not None
        self._store.check_usable()
        return self._links

    def _check_open(self) -> None:
        if self._store is None or self._is_closed:
            raise ClosedError("the cluster is closed, or was not entered: use `async with Cluster(...)`")
        self._store.check_alive()

    def _hello(self) -> Hello:
        return Hello(
            cluster_id=self.cluster_id,
            incarnation=self.incarnation,
            role=self._role,
            transports=tuple(transport.name for transport in self._transports),
        )

    async def _open_listener(self) -> None:
        if self._listen is None:
            return
        assert self._tasks is not None
        assert self._links is not None
        self._door = await open_door(self._listen)
        self._acceptor = Acceptor(self._door.listener, self._links.accept, self._tasks)

    async def _close_listener(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.aclose()
            self._acceptor = None
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._door is not None:
            self._door.remove()
        self._door = None

    async def _tick(self) -> None:
        """Heartbeats, leases that ran out, memory whose views have died: a few times within the liveness limit."""
        assert self._links is not None
        assert self._store is not None
        while True:
            await anyio.sleep(self.config.liveness_s / BEATS)
            now = anyio.current_time()
            for look in (partial(self._links.beat, now), partial(self._store.leases.expire, now), self._store.collect):
                try:
                    look()
                except Exception:  # a fault of ours must not end the cluster, nor keep the others from being looked at
                    _log.exception("a regular look at the links and the memory failed")

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "new" if self._store is None else "open"
        return f"<Cluster {self.cluster_id} {self._role.name} {state}>"


async def _hold_tasks(*, task_status: TaskStatus[TaskGroup]) -> None:
    """Be the parent of a cluster's tasks until they are cancelled."""
    async with anyio.create_task_group() as tasks:
        task_status.started(tasks)
        await anyio.sleep_forever()
