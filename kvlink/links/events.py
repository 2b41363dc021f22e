"""What happens to links, as values: for a scheduler that must know whom it can reach.

Each change is one event, whoever dialled, and every listener gets it once::

    LinkUp  ->  LinkLost  ->  LinkUp  ->  LinkLost  ->  PeerRestarted  ->  LinkUp
                              (the same life again)     (a new life of that cluster id)

A listener's queue is bounded: one that does not read loses the *oldest* events, for the newest say how things are, and
counts them. Publishing is appending to the queues that there are; without listeners it is nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from kvlink.errors import KVLinkError, LinkLostError

if TYPE_CHECKING:
    from kvlink.links.link import Link

_MAX_LIVES: Final = 16384
"""Peers whose last life is remembered after their link has ended; the one that was linked longest ago goes first."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link to `peer` is open.

    Attributes:
        incarnation: which life of it, 16 random bytes.
        is_dialled: whether this side dialled.
    """

    peer: int
    incarnation: bytes
    is_dialled: bool


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to `peer` has ended.

    Attributes:
        incarnation: of the life that it led to.
        cause: a `LinkLostError` when the peer died, hung up, fell silent or linked anew; a `NotLinkedError` when either
            side ended the link on purpose.
    """

    peer: int
    incarnation: bytes
    cause: KVLinkError


@dataclass(frozen=True, slots=True)
class PeerRestarted:
    """`peer` is back as a new life: what was known of the old one, keys and tickets included, is void.

    Comes before the `LinkUp` of the new life.
    """

    peer: int
    old_incarnation: bytes
    new_incarnation: bytes


LinkChange = LinkUp | LinkLost | PeerRestarted


class LinkEventStream:
    """One listener. Made by `Cluster.events`; an async iterator, and an async context manager that closes it.

    It has every event from the moment it was made. Iteration ends when it is closed, or when the cluster is and all
    events have been taken. Of several tasks that take from it, each event goes to one.

    Attributes:
        num_missed: events that were dropped, oldest first, because nobody took them in time.
    """

    def __init__(self, max_waiting: int) -> None:
        self.num_missed = 0
        self._waiting: deque[LinkChange] = deque(maxlen=max_waiting)
        self._has_news = anyio.Event()
        self._is_closed = False

    def __aiter__(self) -> LinkEventStream:
        return self

    async def __anext__(self) -> LinkChange:
        await anyio.lowlevel.checkpoint()
        while not self._waiting:
            if self._is_closed:
                raise StopAsyncIteration
            self._has_news = anyio.Event() if self._has_news.is_set() else self._has_news
            await self._has_news.wait()
        return self._waiting.popleft()

    async def __aenter__(self) -> LinkEventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening; what was not taken is dropped. Idempotent."""
        self._waiting.clear()
        self.end()

    def put(self, event: LinkChange) -> None:
        """Add an event. Internal."""
        if self._is_closed:
            return
        self.num_missed += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(event)
        self._has_news.set()

    def end(self) -> None:
        """No more events will come; those that wait may still be taken. Internal."""
        self._is_closed = True
        self._has_news.set()


class LinkEvents:
    """The events of one cluster, and who listens."""

    def __init__(self) -> None:
        # Weak: a listener that was forgotten without being closed costs nothing any more.
        self._listeners: weakref.WeakSet[LinkEventStream] = weakref.WeakSet()
        self._lives: dict[int, bytes] = {}
        self._is_closed = False

    def listen(self, max_waiting: int) -> LinkEventStream:
        """Return a listener for everything from now on."""
        stream = LinkEventStream(max_waiting)
        if self._is_closed:
            stream.end()
        else:
            self._listeners.add(stream)
        return stream

    def opened(self, link: Link) -> None:
        """A link has become the one to its peer."""
        before = self._lives.pop(link.peer, None)
        self._lives[link.peer] = link.incarnation
        if len(self._lives) > _MAX_LIVES:
            del self._lives[next(iter(self._lives))]
        if before is not None and before != link.incarnation:
            self._publish(PeerRestarted(link.peer, before, link.incarnation))
        self._publish(LinkUp(link.peer, link.incarnation, link.is_dialled))

    def closed(self, link: Link) -> None:
        """A link that was `opened` has ended."""
        cause = link.error or LinkLostError(f"the link to cluster {link.peer} has ended", peer=link.peer)
        self._publish(LinkLost(link.peer, link.incarnation, cause))

    def close(self) -> None:
        """The cluster is closed: iteration ends once all has been taken. Idempotent."""
        self._is_closed = True
        for stream in self._listeners:
            stream.end()

    def _publish(self, event: LinkChange) -> None:
        for stream in self._listeners:
            stream.put(event)
