"""Notifications: a few bytes from one application to another over a link, behind the bytes that they are about.

What is promised:

- *Behind the bytes.* With ``notify=`` on a pull or push it is sent when all bytes are in place, never before; one that
  fails sends none.
- *Acknowledged.* `Cluster.notify` returns when the peer's process has the payload in its queue. That its application
  has taken it is for the two applications to say.
- *In order, at most once.* What was sent earlier over a link is taken earlier, and nothing is sent twice. A call that
  fails says whether it may have arrived: not while it was waiting for room; perhaps, once it was sent.
- *Bounded.* Each side of a link may have `WINDOW` notifications that the other application has not taken. Then senders
  wait, each for its own deadline, and nothing else on the link does. Taking some gives as many back (`Credit`). A
  receiver that never looks costs its process ``WINDOW x max_notification_nbytes`` per link, and all links together at
  most `ClusterConfig.max_notifications`, beyond which senders are told that it is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from kvlink.config import ClusterConfig
from kvlink.errors import (
    KVLinkError,
    ParameterError,
    ParameterTypeError,
    ProtocolError,
    StatusCode,
    TransferTimeoutError,
    shown,
)
from kvlink.report import TransferReport
from kvlink.wire import Credit, Failed, Message, Notify, Pong

if TYPE_CHECKING:
    from kvlink.links.link import Link, MessageHandler, Question

WINDOW: Final = 32
"""Notifications that a peer may have sent and the application not taken. Part of the protocol: both sides count."""
_CREDIT_STEP: Final = 8
"""Credit goes back in pieces of at least this many, or when nothing of the peer waits any more."""
_MIN_LEFT_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Notification:
    """What a peer's application has sent.

    Attributes:
        peer: the sender's cluster id.
        incarnation: which life of it, as in `LinkUp`.
        payload: its bytes.
    """

    peer: int
    incarnation: bytes
    payload: bytes


class Notices:
    """One side's notifications of one link: those on their way out, and the count of those that came in.

    Attributes:
        num_waiting: came in and was not taken.
        num_owed: was taken, and its credit not given back yet.
    """

    def __init__(self, link: Link) -> None:
        self.num_waiting = 0
        self.num_owed = 0
        self._link = link
        self._credit = WINDOW
        self._outgoing: deque[_Outgoing] = deque()

    async def send(self, payload: bytes, *, timeout_s: float) -> None:
        """Send one, in its turn, and return when the peer has it in its queue. The link counts the caller's operation.

        Cancellation: one that was not sent never is.

        Raises:
            TransferTimeoutError: not within `timeout_s`; the message says whether it may have arrived.
            LinkLostError, NotLinkedError: the link has ended.
            KVLinkError: the peer refuses it: too large, or `LLM_LINK_BUSY` when its queue for all peers is full.
        """
        self._link.check_alive()  # it may have ended during the movement that this is about
        own = _Outgoing(payload)
        self._outgoing.append(own)
        self._send_some()
        try:
            with anyio.move_on_after(timeout_s):
                await own.settled.wait()
                if own.question is None:
                    raise self._link.gone()
                await self._link.answer(own.question)
                return
        finally:
            if own.question is not None:
                self._link.give_up(own.question)
            elif own in self._outgoing:
                self._outgoing.remove(own)
        peer = self._link.peer
        what = (
            f"the application of cluster {peer} does not take its notifications, {WINDOW} wait; this one was not sent"
            if own.question is None
            else f"cluster {peer} did not acknowledge a notification within {timeout_s:.3g} s; it may still arrive"
        )
        raise TransferTimeoutError(what, peer=peer, phase="notify")

    def add_credit(self, num: int) -> None:
        """The peer's application has taken some."""
        self._credit = min(WINDOW, self._credit + num)
        self._send_some()

    def close(self) -> None:
        """The link has ended."""
        for each in self._outgoing:
            each.settled.set()
        self._outgoing.clear()

    def give_credit(self) -> None:
        """Say how many were taken, now and then."""
        if self.num_owed >= _CREDIT_STEP or (self.num_owed and not self.num_waiting):
            self._link.post(Credit(self.num_owed))
            self.num_owed = 0

    def _send_some(self) -> None:
        # Here and not in the senders' tasks: whoever was woken first need not run first.
        while self._credit and self._outgoing:
            self._credit -= 1
            own = self._outgoing.popleft()
            own.question = self._link.pose(own.message)
            own.settled.set()


class _Outgoing:
    """A notification on its way out."""

    __slots__ = ("payload", "question", "settled")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.settled = anyio.Event()
        self.question: Question | None = None

    def message(self, seq: int) -> Message:
        return Notify(seq, self.payload)


class NotificationInbox:
    """What all peers of one cluster have sent and its application has not taken.

    Args:
        serve: serves every message that is not about notifications.
    """

    def __init__(self, serve: MessageHandler, config: ClusterConfig) -> None:
        self._serve = serve
        self._config = config
        self._waiting: deque[tuple[Link, Notification]] = deque()
        self._has_some = anyio.Event()
        self._is_closed = False

    def on_message(self, link: Link, message: Message) -> Message | None:
        """Serve one message; see `CacheServer.on_message`."""
        if isinstance(message, Notify):
            return self._take_in(link, message)
        if isinstance(message, Credit):
            link.notices.add_credit(message.num)
            return None
        return self._serve(link, message)

    async def next(self) -> Notification | None:
        """Return the oldest one as soon as there is one; None when the cluster is closed and none is left."""
        await anyio.lowlevel.checkpoint()
        while not self._waiting:
            if self._is_closed:
                return None
            self._has_some = anyio.Event() if self._has_some.is_set() else self._has_some
            await self._has_some.wait()
        link, notification = self._waiting.popleft()
        link.notices.num_waiting -= 1
        link.notices.num_owed += 1
        link.notices.give_credit()
        return notification

    def close(self) -> None:
        """Nothing more will come. Idempotent."""
        self._is_closed = True
        self._has_some.set()

    def _take_in(self, link: Link, message: Notify) -> Message:
        notices, limit = link.notices, self._config.max_notification_nbytes
        if notices.num_waiting + notices.num_owed >= WINDOW:
            raise ProtocolError(f"more than {WINDOW} notifications without credit", peer=link.peer)
        refusal: KVLinkError | None = None
        if len(message.payload) > limit:
            refusal = ParameterError(f"a notification of {len(message.payload)} bytes; at most {limit} are taken here")
        elif len(self._waiting) >= self._config.max_notifications:
            refusal = KVLinkError(
                f"{len(self._waiting)} notifications wait for the application, see ClusterConfig.max_notifications",
                status=StatusCode.LLM_LINK_BUSY,
            )
        if refusal is not None:
            notices.num_owed += 1
            notices.give_credit()
            return Failed(message.seq, refusal.status, str(refusal))
        notices.num_waiting += 1
        self._waiting.append((link, Notification(link.peer, link.incarnation, message.payload)))
        self._has_some.set()
        return Pong(message.seq)


class NotificationStream:
    """What peers have sent, in order of arrival. Made by `Cluster.notifications`; an async iterator.

    All streams of a cluster take from one queue: each notification goes to one of them. A cancelled wait loses none.
    Iteration ends when the stream is closed, or when the cluster is and all have been taken.
    """

    def __init__(self, inbox: NotificationInbox) -> None:
        self._inbox: NotificationInbox | None = inbox

    def __aiter__(self) -> NotificationStream:
        return self

    async def __anext__(self) -> Notification:
        taken = None if self._inbox is None else await self._inbox.next()
        if taken is None:
            raise StopAsyncIteration
        return taken

    async def __aenter__(self) -> NotificationStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take no more; what waits stays for other streams. Idempotent."""
        self._inbox = None


def check_payload(payload: object, limit: int) -> bytes:
    """Return a payload as bytes; refuse what is none, or too long."""
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise ParameterTypeError(f"a notification is bytes, got {shown(payload)}")
    made = bytes(payload)
    if len(made) > limit:
        raise ParameterError(
            f"a notification has at most {limit} bytes (ClusterConfig.max_notification_nbytes), got {len(made)}"
        )
    return made


async def move_then_notify(
    link: Link, payload: bytes, move: Callable[[], Awaitable[TransferReport]], *, timeout_s: float
) -> TransferReport:
    """Make a movement over `link`, then notify its peer, that very life of it; return the movement's report.

    Raises:
        KVLinkError: what the movement raises; nothing was sent. Or what `Notices.send` raises, with the phase
            ``notify``: the bytes are in place.
    """
    started = perf_counter()
    link.begin()  # an orderly end of the link waits for both
    try:
        report = await move()
        try:
            left_s = max(_MIN_LEFT_S, timeout_s - (perf_counter() - started))
            await link.notices.send(payload, timeout_s=left_s)
        except KVLinkError as exc:
            exc.phase = "notify"
            exc.args = (f"all bytes are in place, but cluster {link.peer} was not notified: {exc}",)
            raise
        return report
    finally:
        link.end()
