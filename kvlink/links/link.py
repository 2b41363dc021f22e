"""One link: our relation to one life of one peer.

A `Link` owns the control stream and the endpoint of the transport. Three small tasks serve it: one reads messages, one
writes what was posted, one waits for the operating system to report the peer's death. Posting a message never waits, so
bookkeeping can be `def`; asking a question is posting it and waiting for the answer with its number.

Everything that a link knows of the peer's caches (`views`) belongs to that one life: a peer that restarts is a new
incarnation and gets a new `Link`, so nothing stale can survive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from kvlink.errors import (
    KVLinkError,
    LinkLostError,
    NotLinkedError,
    ProtocolError,
    error_for,
)
from kvlink.geometry import Role, TensorRun
from kvlink.links.blame import blame
from kvlink.links.gates import Gate, Quota
from kvlink.links.grants import WriteGrants
from kvlink.links.notifications import Notices
from kvlink.links.outbox import Outbox
from kvlink.links.pairing import MAX_PAIRINGS, Pairing
from kvlink.links.state import LinkEvent, LinkState, next_state
from kvlink.loops import until_readable
from kvlink.stats import LinkStats
from kvlink.wire import (
    Answer,
    CloseRead,
    Failed,
    Found,
    Goodbye,
    Message,
    OpenWrite,
    Ping,
    Pong,
    Recall,
    Share,
    Target,
    encode,
)

if TYPE_CHECKING:
    from kvlink.links.handshake import Greeted

_log = logging.getLogger(__name__)

_MAX_QUEUED_NBYTES: Final = 32 * 1024 * 1024
"""A peer that lets this much pile up does not read; the link is given up instead of the memory."""

_MESSAGES_PER_TURN: Final = 64
"""About 1 ms of look-ups: a piece of 64 KiB would be 20 ms of them."""

_DEATH_GRACE_S: Final = 0.05

MessageHandler = Callable[["Link", Message], Message | None]


class Link:
    """An established link. Made by the link table; lives until it is closed, lost or replaced.

    Attributes:
        peer: the other side's cluster id.
        incarnation: which life of it, 16 random bytes.
        role: its role.
        address: where it was dialled, or where its connection came from.
        is_dialled: whether we dialled it.
        transport: what moves the bytes: ``"shm"`` ...
        reason: why this transport was chosen, and others were not.
        settings: of the transport, those that are in force.
        state, stats: where it is in its life, and what went over it.
        views, grants: where the peer's caches lie, and which of them we may write into.
        notices: notifications on their way out, and how many came in.
        operations, nbytes: how much may be in flight, and who waits for it.
        pairings: what was found to fit together, so that it is checked once; see `Pairing`.
        detour: why transfers with some of the peer's registered memory go through its pool, and what to allow; None
            while none does.
        unreachable: the regions of the peer for which that is so.
        error: why it has ended; None while it lives.
        is_orderly: whether the peer has said, or shown by hanging up after our goodbye, that it moves nothing any more.
        is_dismissed: whether the peer has unlinked us, other than by closing its cluster.
    """

    def __init__(
        self,
        greeted: Greeted,
        *,
        address: str,
        is_dialled: bool,
        max_frame_nbytes: int,
        close_timeout_s: float,
        operations: Quota,
        nbytes: Quota,
        on_message: MessageHandler,
        on_closed: Callable[[Link], None],
    ) -> None:
        self.peer = greeted.hello.cluster_id
        self.incarnation = greeted.hello.incarnation
        self.role = Role(greeted.hello.role)
        self.address = address
        self.is_dialled = is_dialled
        self.endpoint = greeted.endpoint
        self.transport = greeted.endpoint.name
        self.reason = greeted.reason
        self.settings = greeted.endpoint.settings
        self.state = next_state(LinkState.GREETING, LinkEvent.HELLO)
        self.stats = LinkStats()
        self.views: dict[Target, Found] = {}
        self.grants = WriteGrants(self.post)
        self.notices = Notices(self)
        self.pairings: dict[tuple[object, ...], Pairing] = {}
        self.detour: str | None = None
        self.unreachable: set[int] = set()
        self.operations, self.nbytes = Gate(operations, self.gone, self.peer), Gate(nbytes, self.gone, self.peer)
        self.is_orderly = self.is_dismissed = False
        self._has_said_goodbye = False
        self.heard_at = self.sent_at = anyio.current_time()
        self.closed = anyio.Event()
        self._stream = greeted.stream
        self._decoder = greeted.decoder
        self._decoder.max_nbytes = max_frame_nbytes
        self._close_timeout_s = close_timeout_s
        self._on_message = on_message
        self._on_closed = on_closed
        self._scope = anyio.CancelScope()
        self._outbox = Outbox()
        self._next_seq = 1
        self._answers: dict[int, Question] = {}
        self._num_operations = 0
        self._is_idle = anyio.Event()
        self.error: KVLinkError | None = None
        self._failure: KVLinkError | None = None
        self._has_failed = anyio.Event()
        self.endpoint.connect(self.post, self._lose_soon)

    @property
    def is_open(self) -> bool:
        """Whether operations may start."""
        return self.state is LinkState.OPEN

    @property
    def num_operations(self) -> int:
        """Movements and questions in flight."""
        return self._num_operations

    def begin(self) -> None:
        """Count an operation in flight, which an orderly close waits for. Paired with `end`.

        Raises:
            NotLinkedError: the link is not open.
        """
        if self.state is not LinkState.OPEN:
            raise self.gone()
        self._num_operations += 1

    def is_out_of_reach(self, runs: tuple[TensorRun, ...]) -> bool:
        """Whether some of these tensors of the peer can only be moved by a detour through its pool."""
        return bool(self.unreachable) and any(run.region in self.unreachable for run in runs)

    def keep_pairing(self, place: tuple[object, ...], pairing: Pairing) -> None:
        """Remember that two caches fit together."""
        if len(self.pairings) >= MAX_PAIRINGS:
            self.pairings.clear()
        self.pairings[place] = pairing

    def failed(self, error: BaseException) -> None:
        """Count a movement that failed, and let its error name the peer if nobody has."""
        self.stats.failures += 1
        self.blame(error)

    def blame(self, error: BaseException) -> None:
        """Let an error of a movement name the peer and the phase, if nobody has."""
        if isinstance(error, KVLinkError):
            blame(error, self.peer)

    def end(self) -> None:
        """Undo one `begin`."""
        self._num_operations -= 1
        if self._num_operations == 0:
            self._is_idle.set()

    def post(self, message: Message) -> None:
        """Send a message soon, in order. Does nothing on a closed link."""
        if self.state is LinkState.CLOSED:
            return
        self._outbox.put(encode(message))
        self.stats.messages_sent += 1
        if self._outbox.nbytes > _MAX_QUEUED_NBYTES:
            self.lose(LinkLostError(f"cluster {self.peer} does not read its messages; link again", peer=self.peer))

    async def ask(self, question: Callable[[int], Message]) -> Answer:
        """Post the message that `question` makes of a number, and return the answer to it. The caller has a deadline.

        Raises:
            LinkLostError: the peer went away.
            KVLinkError: the peer's answer is an error, of the class that belongs to its status.
        """
        if self.state is LinkState.CLOSED:
            raise self.gone("look-up")
        return await self.answer(self.pose(question))

    def pose(self, question: Callable[[int], Message]) -> Question:
        """Post a question now. Its `answer` is awaited, or it is given up (`give_up`)."""
        seq = self._next_seq
        self._next_seq += 1
        posed = self._answers[seq] = Question(seq, question(seq))
        self.post(posed.asked)
        self.stats.round_trips += 1
        return posed

    def give_up(self, posed: Question) -> None:
        """Wait no more for the answer to a question. Idempotent."""
        self._answers.pop(posed.seq, None)

    async def answer(self, posed: Question) -> Answer:
        """Return the answer to a question. Raises what `ask` raises."""
        try:
            await posed.settled.wait()
        except BaseException:
            # Cancelled between the answer's arrival and our turn: a read lease that came with it is nobody's. (A write
            # lease waits to be recalled.)
            late = posed.answer
            if isinstance(late, Found) and late.lease and not isinstance(posed.asked, OpenWrite):
                self.post(CloseRead(late.lease))
            raise
        finally:
            self.give_up(posed)
        answer = posed.answer
        if answer is None:
            raise self.gone("look-up")
        if isinstance(answer, Failed):
            raise error_for(answer.status, f"cluster {self.peer}: {answer.text}", peer=self.peer, phase="look-up")
        return answer

    async def ping(self) -> None:
        """Ask the peer's loop for a sign of life. The caller has a deadline; raises what `ask` raises."""
        await self.ask(Ping)

    async def run(self) -> None:
        """Serve the link until it ends; never raises."""
        error: KVLinkError = LinkLostError(f"the link to cluster {self.peer} was closed", peer=self.peer)
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write)
                    tasks.start_soon(self._watch)
                    tasks.start_soon(self._heed)
                    error = await self._read(tasks)
                    tasks.cancel_scope.cancel()
        except Exception as exc:  # a fault of ours ends this link, and not the cluster
            _log.exception("serving cluster %d failed", self.peer)
            error = LinkLostError(f"serving cluster {self.peer} failed: {exc!r}; link again", peer=self.peer)
        finally:
            self.lose(error)
            with anyio.CancelScope(shield=True):
                # Hanging up tells the peer that nothing of ours moves any more.
                await self.grants.until_quiet()
                await self.endpoint.aclose()
                with suppress(OSError):
                    await anyio.aclose_forcefully(self._stream)
            self.closed.set()

    async def close(self, reason: str, *, timeout_s: float, is_closing: bool = False) -> bool:
        """End the link in good order: let operations end, say goodbye, wait for the peer to hang up.

        Args:
            is_closing: because this cluster closes.

        Returns:
            Whether the peer has been told; the local half is gone in any case.
        """
        if self.state is LinkState.CLOSED:
            return True
        self.state = next_state(self.state, LinkEvent.CLOSE_ASKED)
        self.operations.close()
        is_told = False
        try:
            with anyio.move_on_after(timeout_s):
                await self._wait_idle()
                self.post(Goodbye(reason, is_closing))
                self._has_said_goodbye = True
                await self.closed.wait()
                is_told = True
        finally:
            self._end(
                LinkEvent.PEER_LOST, NotLinkedError(f"the link to cluster {self.peer} was closed", peer=self.peer)
            )
        return is_told

    def lose(self, error: KVLinkError, event: LinkEvent = LinkEvent.PEER_LOST) -> None:
        """End the link now: what waits gets `error`, what moves fails or ends within a chunk. Idempotent."""
        self._end(event, error)

    def _end(self, event: LinkEvent, error: KVLinkError) -> None:
        before, self.state = self.state, next_state(self.state, event)
        if before is LinkState.CLOSED:
            return
        self.error = error
        self.endpoint.abort()
        self.operations.close()
        self.nbytes.close()
        for waiting in self._answers.values():
            waiting.settled.set()
        self.notices.close()
        self.grants.stop()
        self.views.clear()
        self.pairings.clear()
        self._scope.cancel()
        self._on_closed(self)

    async def _wait_idle(self) -> None:
        while self._num_operations:
            if self._is_idle.is_set():  # one event for all who wait at the same time
                self._is_idle = anyio.Event()
            await self._is_idle.wait()

    def check_alive(self) -> None:
        """Refuse to go on with what the peer has said once the link has ended.

        Raises:
            LinkLostError, NotLinkedError: it has.
        """
        if self.state is LinkState.CLOSED:
            raise self.gone()

    def gone(self, phase: str | None = None) -> KVLinkError:
        """Return the error for whoever uses this link, in that phase of its doing, now that it has ended."""
        error = self.error
        if isinstance(error, LinkLostError):
            return LinkLostError(str(error), peer=self.peer, phase=error.phase or phase)
        return NotLinkedError(f"the link to cluster {self.peer} has ended; link again", peer=self.peer, phase=phase)

    async def _read(self, tasks: TaskGroup) -> KVLinkError:
        """Take messages until there are no more; return why."""
        decoder, stats = self._decoder, self.stats
        try:
            while True:
                for message in decoder.messages():
                    if self.state is LinkState.CLOSED:
                        return self.gone()  # a lease or ticket that is asked for now would never be taken back
                    stats.messages_received += 1
                    if not isinstance(message, Goodbye):
                        self._take(message)
                    elif not self.is_orderly:
                        tasks.start_soon(self._take_leave, message.reason)
                        self.is_orderly = True
                        self.is_dismissed = not message.is_closing
                        self.state = next_state(self.state, LinkEvent.CLOSE_ASKED)
                        self.operations.close()
                    if stats.messages_received % _MESSAGES_PER_TURN == 0:
                        await anyio.lowlevel.checkpoint()  # a peer with much to say does not have the loop to itself
                await until_readable(self._stream)
                decoder.extend(await self._stream.receive())
                self.heard_at = anyio.current_time()
        except ProtocolError as exc:
            _log.warning("closed the link to cluster %d: %s", self.peer, str(exc))
            return LinkLostError(f"cluster {self.peer} broke the protocol: {exc}; link again", peer=self.peer)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as exc:
            self.is_orderly |= self._has_said_goodbye and isinstance(exc, anyio.EndOfStream)
            if self.is_orderly:
                return NotLinkedError(f"the link to cluster {self.peer} was closed", peer=self.peer)
            lost = LinkLostError(
                f"cluster {self.peer} hung up ({exc or type(exc).__name__}); link again", peer=self.peer
            )
            lost.__cause__ = exc
            return lost

    async def _take_leave(self, reason: str) -> None:
        """Hang up on a peer that has said goodbye: that tells it that nothing of ours moves any more."""
        with anyio.move_on_after(self._close_timeout_s):
            await self._wait_idle()  # it still answers what was asked before its goodbye came
            await self._outbox.flush()  # what they came to
        self.lose(
            NotLinkedError(f"cluster {self.peer} has ended the link: {reason or 'no reason given'}", peer=self.peer)
        )

    def _take(self, message: Message) -> None:
        if isinstance(message, (Found, Failed, Pong)):
            waiting = self._answers.get(message.seq)
            if waiting is not None:
                waiting.answer = message
                waiting.settled.set()
            elif isinstance(message, Found) and message.lease:
                self.post(CloseRead(message.lease))  # whoever asked has gone; a write lease waits to be recalled
        elif isinstance(message, Ping):
            self.post(Pong(message.seq))
        elif isinstance(message, Recall):
            self.grants.recall(message.lease)
        elif isinstance(message, Share):
            self.endpoint.take(message)
        else:
            reply = self._on_message(self, message)
            if reply is not None:
                self.post(reply)

    async def _write(self) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await self._outbox.write(self._stream, self._note_sent)

    def _note_sent(self) -> None:
        self.sent_at = anyio.current_time()

    def _lose_soon(self, error: KVLinkError) -> None:
        """End the link for its endpoint, which may be in a callback of the loop: what follows must be in a task."""
        self._failure = self._failure or error
        self._has_failed.set()

    async def _heed(self) -> None:
        await self._has_failed.wait()
        assert self._failure is not None
        self.lose(self._failure)

    async def _watch(self) -> None:
        watch = self.endpoint.watch_death()
        try:
            await watch.wait()
        finally:
            watch.close()
        # What it sent before it died is still in the socket, its end behind it: let the reader find both first. Only a
        # socket that somebody else inherited stays open, and then this is what ends the link.
        await anyio.sleep(_DEATH_GRACE_S)
        self.lose(LinkLostError(f"the process of cluster {self.peer} has ended; link again", peer=self.peer))

    def __repr__(self) -> str:
        return f"<Link to cluster {self.peer} {self.state.value} over {self.transport}>"


class Question:
    """Something that waits for the peer's answer."""

    __slots__ = ("answer", "asked", "seq", "settled")

    def __init__(self, seq: int, asked: Message) -> None:
        self.seq = seq
        self.asked = asked
        self.settled = anyio.Event()
        self.answer: Answer | None = None
