"""The links of one cluster: dialling, accepting, one per peer, replaced when the peer restarts.

Single flight: whoever wants a link to a peer joins the attempt that is under way. The attempt is a task of the cluster,
not of a caller, so that cancelling one caller stops nothing while another still waits; when the last one leaves, the
attempt is cancelled.

Two clusters that dial each other at the same moment keep one connection: the one that the lower cluster id dialled. The
other side is refused with the field `CROSSED` and waits for the link to come in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
from anyio.abc import SocketStream, TaskGroup

from kvlink.acceptor import Complaints, Strangers
from kvlink.config import ClusterConfig, ClusterInfo
from kvlink.errors import (
    HandshakeError,
    KVLinkError,
    LinkError,
    LinkLostError,
    NotLinkedError,
    ProtocolError,
    StatusCode,
    TransferTimeoutError,
)
from kvlink.links.attempt import Attempt
from kvlink.links.connections import connect, hang_up, origin, welcome
from kvlink.links.events import LinkEvents
from kvlink.links.gates import Quota
from kvlink.links.handshake import CROSSED, Greeted, RefusedError, greet_as_acceptor, greet_as_dialler
from kvlink.links.link import Link, MessageHandler
from kvlink.links.notifications import NotificationInbox
from kvlink.links.relink import Relinker
from kvlink.links.state import LinkEvent, LinkState
from kvlink.report import LinkResult
from kvlink.wire import Hello, Ping

if TYPE_CHECKING:
    from kvlink.transports.base import Transport

_log = logging.getLogger(__name__)

_PROBE_S: Final = 1.0
"""How long an older link of a peer that dials again may take to show that it is alive."""
BEATS: Final = 8
"""Looks at the silence of peers within the liveness limit: with a ping at every third of them, one may be lost."""
_MAX_STRANGERS: Final = 256
"""Connections that have not said who they are yet; at least as many as links, which may all come at once."""


class LinkTable:
    """All links of one cluster.

    Args:
        hello: what this cluster says of itself.
        transports: in order of preference.
        tasks: the cluster's task group, parent of every task here.
        on_message: serves the messages that a link does not serve itself.
        on_opened, on_closed: told once per link.

    Attributes:
        events: tells whoever listens of links that open and end.
        inbox: what peers' applications have sent.
        relinker: links again to peers that are lost, where that was asked for.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        transports: Sequence[Transport],
        config: ClusterConfig,
        tasks: TaskGroup,
        *,
        on_message: MessageHandler,
        on_opened: Callable[[Link], None],
        on_closed: Callable[[Link], None],
    ) -> None:
        self._hello = hello
        self._transports = transports
        self._config = config
        self._tasks = tasks
        self.inbox = NotificationInbox(on_message, config)
        self._on_opened = on_opened
        self._link_closed = on_closed
        self._links: dict[int, Link] = {}
        self._beat_at: float | None = None
        self._attempts: dict[int, Attempt] = {}
        self._stopping: list[Link] = []  # those that have ended and whose puts have not, yet
        self._strangers = Strangers(max(_MAX_STRANGERS, config.max_links))
        self.events = LinkEvents()
        self.relinker = Relinker(self.link, config, tasks)
        self._complaints = Complaints(_log)
        self._operations = Quota("operations", per_link=config.max_operations_per_link, total=config.max_operations)
        self._nbytes = Quota(
            "bytes in flight", per_link=config.max_nbytes_in_flight_per_link, total=config.max_nbytes_in_flight
        )

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def get(self, peer: int) -> Link | None:
        """Return the link to `peer`, open or draining, if there is one."""
        return self._links.get(peer)

    def peek(self, peer: int) -> Link | None:
        """Return the link to `peer` if there is one and it is open."""
        link = self._links.get(peer)
        return link if link is not None and link.state is LinkState.OPEN else None

    def open_link(self, peer: int) -> Link:
        """Return the open link to `peer`.

        Raises:
            NotLinkedError: there is none.
        """
        link = self._links.get(peer)
        if link is None or not link.is_open:
            message = self.relinker.explain(peer) or f"there is no link to cluster {peer}; call link_clusters first"
            raise NotLinkedError(message, peer=peer, phase="look-up")
        return link

    async def link(self, info: ClusterInfo, *, timeout_s: float) -> LinkResult:
        """Link to one peer, or join whoever is doing that already."""
        peer = info.cluster_id
        link = self._links.get(peer)
        if link is not None and link.is_open:
            return LinkResult(peer, StatusCode.LLM_ALREADY_LINK)
        deadline = anyio.current_time() + timeout_s
        attempt = self._attempts.get(peer)
        if attempt is None:
            attempt = self._attempts[peer] = Attempt(info)
            self._tasks.start_soon(self._run_attempt, attempt)
        attempt.num_waiting += 1
        try:
            with anyio.CancelScope(deadline=deadline):
                await attempt.settled.wait()
        finally:
            attempt.num_waiting -= 1
            if attempt.num_waiting == 0 and not attempt.settled.is_set():
                attempt.scope.cancel()
                if self._attempts.get(peer) is attempt:
                    del self._attempts[peer]
        if not attempt.settled.is_set():
            message = f"cluster {peer} at {info.address} did not finish linking within {timeout_s} s"
            return LinkResult.failed(peer, TransferTimeoutError(message, peer=peer, phase="dial"))
        if attempt.error is not None:
            return LinkResult.failed(peer, attempt.error)
        return LinkResult(peer, StatusCode.LLM_SUCCESS)

    async def unlink(self, peer: int, *, timeout_s: float, force: bool) -> LinkResult:
        """End the link to one peer, and do not link to it again. Source: the spec, section 4.2."""
        self.relinker.forget(peer)
        link = self._links.get(peer)
        if link is None:
            error = NotLinkedError(f"there is no link to cluster {peer}", peer=peer)
            return LinkResult.failed(peer, error)
        if force:
            link.lose(NotLinkedError(f"the link to cluster {peer} was closed by force", peer=peer))
            with anyio.move_on_after(timeout_s):
                await link.closed.wait()
            return LinkResult(peer, StatusCode.LLM_SUCCESS)
        if await link.close("unlinked", timeout_s=timeout_s):
            return LinkResult(peer, StatusCode.LLM_SUCCESS)
        message = f"cluster {peer} could not be told within {timeout_s} s; this half is closed, unlink there too"
        return LinkResult.failed(
            peer, KVLinkError(message, status=StatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED, peer=peer)
        )

    async def close_all(self, reason: str, *, timeout_s: float) -> None:
        """End every link in good order, at the same time."""
        self.relinker.close()
        for attempt in list(self._attempts.values()):
            attempt.error = LinkError("the cluster is closing", peer=attempt.info.cluster_id, phase="dial")
            attempt.scope.cancel()
        async with anyio.create_task_group() as tasks:
            for link in self:
                tasks.start_soon(partial(link.close, reason, timeout_s=timeout_s, is_closing=True))

    def abort_all(self, reason: str) -> None:
        """End every link now."""
        self.relinker.close()
        for link in self:
            link.lose(NotLinkedError(f"the link to cluster {link.peer} has ended: {reason}", peer=link.peer))
        self.events.close()
        self.inbox.close()

    def beat(self, now: float) -> None:
        """Keep quiet links to other hosts alive, and give up those whose peer has been silent for too long.

        On one host the kernel reports a death at once, so nothing is said and nothing awaited: silence there means a
        busy loop or a stopped process. 200 idle links on one host cost 0.03 % of a core this way, and 4 % with
        heartbeats; bench --scale.

        To be called `BEATS` times within the liveness limit. A link is given up one beat before the limit, so that it
        is lost within the limit and not at the first beat after it. While this loop was held up it heard nobody: that
        is not silence of theirs.
        """
        liveness_s = self._config.liveness_s
        beat_s = liveness_s / BEATS
        deaf_s = 0.0 if self._beat_at is None else max(0.0, now - self._beat_at - beat_s)
        self._beat_at = now
        for link in self._links.copy().values():
            if link.endpoint.capabilities.is_same_host:
                continue
            if deaf_s > beat_s:
                link.heard_at += deaf_s
            if now - link.sent_at > liveness_s / 4:
                link.sent_at = now
                link.post(Ping(0))
            if now - link.heard_at > liveness_s - beat_s:
                link.lose(
                    LinkLostError(
                        f"nothing was heard from cluster {link.peer} for {liveness_s} s; link again", peer=link.peer
                    )
                )

    async def accept(self, stream: SocketStream) -> None:
        """Serve one incoming connection; never raises. A stranger costs one small buffer until its deadline."""
        whom = origin(stream)
        greeted: Greeted | None = None
        link: Link | None = None
        is_ready = False

        def enter(made: Greeted) -> None:
            nonlocal greeted, link
            greeted, link = made, self._open(made, whom, is_dialled=False)

        try:
            with self._strangers.waiting(self._config.handshake_timeout_s) as scope:
                await greet_as_acceptor(
                    await welcome(stream, self._config),
                    self._hello(),
                    self._transports,
                    whom=whom,
                    admit=self._admit,
                    settle=self._settle_old,
                    hand_over=partial(self._hand_over, is_dialled=False),
                    enter=enter,
                    secret=self._config.secret,
                )
                is_ready = True
            if scope.cancelled_caught:
                self._complaints.say("closed a connection from %s: it never said who it is", whom)
        except (KVLinkError, OSError) as exc:
            self._complaints.say("refused a connection from %s: %s", whom, str(exc))
        except Exception as exc:
            self._complaints.say("failed to serve a connection from %s", whom, cause=exc)
        finally:
            if greeted is None:
                await hang_up(stream)
            else:
                if link is not None and not is_ready:
                    link.lose(LinkLostError(f"{whom} went away while it was linking", peer=link.peer))
                await (_drop(greeted) if link is None else link.run())

    def _admit(self, hello: Hello) -> None:
        """Refuse a peer for which there is no room, or whose connection crosses ours."""
        self._check_room(hello.cluster_id)
        ours = self._hello().cluster_id
        if hello.cluster_id in self._attempts and ours < hello.cluster_id:
            raise RefusedError(f"cluster {ours} is dialling cluster {hello.cluster_id}", field=CROSSED)

    def _check_room(self, peer: int) -> None:
        """Refuse a link too many. Looked at again when a link is entered: any number may be on their way."""
        if len(self._links) >= self._config.max_links and peer not in self._links:
            raise RefusedError(f"this cluster has its {self._config.max_links} links already", field="links")

    async def _settle_old(self, hello: Hello) -> None:
        """Look at an older link of a peer that dials again.

        The same life again means that it has given its half up. A new life is a restart, unless the old one is still
        there: then two processes claim one id, and the newcomer is refused.
        """
        old = self._links.get(hello.cluster_id)
        if old is None or old.incarnation == hello.incarnation:
            return
        with anyio.move_on_after(_PROBE_S) as scope, suppress(KVLinkError):
            await old.ping()
        is_dead = scope.cancelled_caught or not old.is_open
        if is_dead and old.is_open and old.endpoint.capabilities.is_same_host:
            is_dead = False  # silent, but its process exists: busy or stopped
        if not is_dead:
            raise RefusedError(
                f"cluster {hello.cluster_id} is linked already from {old.address} (incarnation "
                f"{old.incarnation.hex()[:8]}), and that process is alive; you are another one (incarnation "
                f"{hello.incarnation.hex()[:8]}), and cluster ids must be unique",
                field="cluster id",
            )

    async def _run_attempt(self, attempt: Attempt) -> None:
        peer = attempt.info.cluster_id
        link: Link | None = None
        with attempt.scope:
            try:
                link = await self._dial(attempt)
            except KVLinkError as exc:
                exc.peer = peer
                attempt.error = exc
            except (OSError, ValueError) as exc:  # a name that cannot be looked up may be a ValueError
                attempt.error = LinkError(
                    f"cannot reach cluster {peer} at {attempt.info.address}: "
                    f"{getattr(exc, 'strerror', None) or exc}; is it running?",
                    peer=peer,
                    phase="dial",
                )
            except Exception as exc:  # a fault of ours ends this attempt, and no other link
                _log.exception("failed to link to cluster %d", peer)
                attempt.error = LinkError(
                    f"linking to cluster {peer} failed: {type(exc).__name__}: {exc}", peer=peer, phase="dial"
                )
        if self._attempts.get(peer) is attempt:
            del self._attempts[peer]
        incoming = self._links.get(peer)
        if incoming is not None and incoming.is_open:
            attempt.error = None  # the peer's own connection has become the link
        elif link is None and attempt.error is None:
            attempt.error = LinkLostError(f"cluster {peer} linked to us meanwhile, and went away", peer=peer)
        attempt.settled.set()
        if link is not None:
            await link.run()

    async def _dial(self, attempt: Attempt) -> Link | None:
        """Return a new link, or None when the peer's own connection has become the link."""
        info = attempt.info
        whom = f"cluster {info.cluster_id} at {info.address}"
        try:
            stream = await connect(info.address, self._config)
        except LinkError as exc:
            exc.args = (f"{whom}: {exc}",)
            raise
        greeted: Greeted | None = None
        try:
            with attempt.dialling:
                greeted = await greet_as_dialler(
                    stream,
                    self._hello(),
                    self._transports,
                    whom=whom,
                    expects=info.cluster_id,
                    hand_over=partial(self._hand_over, is_dialled=True),
                    secret=self._config.secret,
                )
        except ProtocolError as exc:
            raise HandshakeError(f"{whom} does not speak kvlink: {exc}", peer=info.cluster_id, phase="hello") from exc
        except RefusedError as exc:
            if exc.field != CROSSED:
                raise HandshakeError(str(exc), status=exc.status, peer=info.cluster_id, phase="hello") from exc
        finally:
            if greeted is None:
                await hang_up(stream)
        if greeted is None:
            await attempt.came_in.wait()
            return None
        link: Link | None = None
        try:
            link = self._open(greeted, info.address, is_dialled=True)
        finally:
            if link is None:
                await _drop(greeted)
        return link

    def _stays(self, old: Link, hello: Hello, is_dialled: bool) -> bool:
        """Whether an older link stays, when a new one that we dialled, or did not, has been agreed on."""
        return (
            old.is_open
            and old.incarnation == hello.incarnation
            and old.is_dialled != is_dialled
            and is_dialled != (self._hello().cluster_id < hello.cluster_id)
        )

    async def _hand_over(self, hello: Hello, *, is_dialled: bool) -> None:
        """End what is written over older links to the same life. The peer relies on it: see `CacheServer.on_opened`."""
        peer = hello.cluster_id
        old = self._links.get(peer)
        if old is not None and old.incarnation == hello.incarnation and not self._stays(old, hello, is_dialled):
            self._replace(old)
        for link in [link for link in self._stopping if link.incarnation == hello.incarnation]:
            await link.grants.until_quiet()

    def _replace(self, old: Link) -> None:
        message = f"cluster {old.peer} has linked anew; the older link has ended"
        old.lose(LinkLostError(message, peer=old.peer), LinkEvent.REPLACED)

    def _open(self, greeted: Greeted, address: str, *, is_dialled: bool) -> Link | None:
        """Enter a new link in the place of an older one of that peer; None when the older one stays.

        The same two lives, linked by both at the same moment: the connection that the lower cluster id dialled stays,
        on both sides.

        Raises:
            RefusedError: there are as many links as there may be; nothing was done.
        """
        peer = greeted.hello.cluster_id
        old = self._links.get(peer)
        if old is not None and self._stays(old, greeted.hello, is_dialled):
            return None
        self._check_room(peer)
        link = Link(
            greeted,
            address=address,
            is_dialled=is_dialled,
            max_frame_nbytes=self._config.max_frame_nbytes,
            close_timeout_s=self._config.close_timeout_s,
            operations=self._operations,
            nbytes=self._nbytes,
            on_message=self.inbox.on_message,
            on_closed=self._closed,
        )
        self._links[peer] = link
        if old is not None:
            self._replace(old)
        self._on_opened(link)
        self.relinker.found(peer)
        self.events.opened(link)
        attempt = self._attempts.get(peer)
        if attempt is not None:
            attempt.came_in.set()
            if peer < self._hello().cluster_id:  # else ours is the one that stays on both sides
                attempt.dialling.cancel()
        return link

    def _closed(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self.relinker.lost(link)
        self._stopping = [each for each in self._stopping if each.grants.num_puts]
        if link.grants.num_puts:
            self._stopping.append(link)
        self._link_closed(link)
        self.events.closed(link)


async def _drop(greeted: Greeted) -> None:
    """Let go of a connection that is not needed after all."""
    greeted.endpoint.abort()
    with anyio.CancelScope(shield=True):
        await greeted.endpoint.aclose()
        await hang_up(greeted.stream)
