"""What a transport is: the whole contract between kvlink and a way of moving bytes.

A `Transport` belongs to one cluster and reaches its memory; an `Endpoint` is its half of one link. An endpoint moves
*extents* between our regions and the peer's, by their numbers. It knows no caches, blocks or keys, and decides nothing:
whether the bytes were worth moving is settled above, by the state word.

Rules for every implementation:

- One-sided: `get` and `put` need nothing of the peer's CPU, unless `Capabilities.is_one_sided` is false.
- A completion may come late, in any order, or never: whoever calls has a deadline, unless told that there is no wait.
- Quiet: when `get` or `put` has ended in any way, our memory is not written any more for it. Cancellation drains. Where
  that cannot be had, it ends all the same, after a bounded time, and `is_quiet` is False from then on.
- `load_word` is ordered after every `get` that has returned.
- An endpoint that is aborted, or whose peer is gone, fails what is in flight and everything later with `LinkLostError`.
- What cannot be moved although the peer is there is a `TransportError`; the endpoint stays usable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from anyio.abc import TaskGroup

from kvlink.errors import KVLinkError
from kvlink.plan import Extent, ExtentFields
from kvlink.wire import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do beyond the contract.

    Args:
        is_one_sided: the peer's process may be stopped, or its loop blocked, and transfers still complete.
        is_same_host: the peer's death is seen through the operating system, at once.
        is_fenced_by_close: once our endpoint's `aclose` has returned the peer can write nothing over it any more, also
            if it lives and wants to. Not so where the peer has mapped our memory.
    """

    is_one_sided: bool
    is_same_host: bool
    is_fenced_by_close: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What the accepting side puts into its hello: how to attach, for one handshake, in the transport's own terms."""

    card: bytes


NOT_QUIET: Final = (
    "; the transport has not let go of it, so the destination may still be written into: its blocks are never quiet "
    "again (KvCache.is_quiet), and their memory is used for nothing else"
)
"""What an error says of a get where `Endpoint.is_quiet` is false."""


class DeathWatch(Protocol):
    """Tells when a peer's process has ended, also after its endpoint was closed."""

    async def wait(self) -> None:
        """Return when it has; never, where the operating system cannot tell."""

    def close(self) -> None:
        """Stop watching. Idempotent."""


class Endpoint(ABC):
    """One side of a link, as far as bytes go."""

    name: str
    capabilities: Capabilities
    immediate_nbytes: int = 0
    """A get or put of at most this size never waits, so it needs no deadline."""
    settings: Mapping[str, str] = MappingProxyType({})
    """What is in force of the transport's own settings, to be read."""
    window_nbytes: int = 2**62
    """How much of one get or put is in the hands of threads or hardware at a time, at most, while there are others too;
    unbounded by default."""
    reaches_cuda: bool = False
    """Regions in CUDA memory may be shared and moved; whether it can be done shows then. Others refuse them, with
    `FeatureNotEnabledError`, and are never asked to share one."""
    card: bytes = b""
    """What the accepting side needs to know of a dialler; travels to its `Transport.accept`."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that has ended over this endpoint can still write into our memory."""
        return True

    @abstractmethod
    def connect(self, post: Callable[[Share], None], lose: Callable[[KVLinkError], None]) -> None:
        """Take the link's control stream into service, where the endpoint has no channel of its own.

        Args:
            post: sends a message to the other half, whose `take` gets it; in order with everything else on the link.
            lose: ends the link, for an endpoint that finds its peer unreachable while nothing waits for it.
        """

    @abstractmethod
    def take(self, share: Share) -> None:
        """Take what the other half has posted.

        Raises:
            ProtocolError: it makes no sense; the link ends.
        """

    has_immediate_words: bool = False
    """`load_word` never waits, so it needs no deadline either."""

    def get_at_once(self, extent: ExtentFields) -> bool:
        """Do what `get` does with one small extent before returning, if that is possible.

        Only for at most `immediate_nbytes`. A call that ends at once needs nothing of what a movement in flight needs:
        no count, no deadline, no task. It is an offer that a transport may leave as it is.

        Returns:
            False where nothing was done and `get` must be awaited.
        """
        return False

    def put_at_once(self, extent: ExtentFields) -> bool:
        """As `get_at_once`, for `put`: the peer can see the bytes when it returns True."""
        return False

    def peek_word(self, word: int) -> int | None:
        """Return what `load_word` would, if that is possible without waiting; else None."""
        return None

    @abstractmethod
    async def get(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        """Copy the peer's bytes into ours, for all `extents`, `nbytes` in all. Ends when they are in place.

        Args:
            done: gets the indices of extents that are in place whole, where it ends in any other way, cancellation
                included. An endpoint that cannot tell leaves it empty.
        """

    @abstractmethod
    async def put(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        """Copy our bytes into the peer's; ends when the peer can see them. `done` is as for `get`."""

    @abstractmethod
    async def load_word(self, word: int) -> int:
        """Return word `word` of the peer's state region, as it is after all gets that have returned."""

    @abstractmethod
    async def reach(self, regions: Collection[int], *, for_writing: bool) -> None:
        """Wait until these regions of the peer can be addressed; the peer has been asked to `share` them.

        One that the peer has given up since has no bytes: see `region_nbytes`.

        Raises:
            FeatureNotEnabledError: this endpoint cannot reach one of them, and why.
        """

    @abstractmethod
    def region_nbytes(self, region: int) -> int:
        """Return the length of a region of the peer that has been reached, 0 for any other number."""

    @abstractmethod
    def share(self, regions: Collection[int], *, for_writing: bool) -> None:
        """Let the peer address these regions of ours. Returns at once; what was shared already is not sent again."""

    @abstractmethod
    def watch_death(self) -> DeathWatch:
        """Return a watch on the peer's process; it may be asked for until `aclose`, and outlives it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Give everything up in good order. Idempotent."""

    @abstractmethod
    def abort(self) -> None:
        """Give everything up now; what is in flight fails. Idempotent."""


class Transport(ABC):
    """A way of moving bytes, for one cluster."""

    name: str

    @abstractmethod
    async def start(self, tasks: TaskGroup) -> None:
        """Get ready to be attached to; `tasks` is the cluster's, for whatever must run beside."""

    @abstractmethod
    def offer(self) -> Offer | None:
        """Return what a peer needs to attach, None where this side cannot be attached to. Ended by `withdraw`."""

    @abstractmethod
    async def accept(self, offer: Offer, card: bytes) -> Endpoint:
        """Wait for the peer that was given `offer` and return our side, which is the caller's from then on.

        Args:
            card: what the peer's endpoint says of itself.
        """

    @abstractmethod
    def withdraw(self, offer: Offer) -> None:
        """Forget an offer, whether it was taken or not; a peer that attached and was not accepted is dropped."""

    @abstractmethod
    async def dial(self, card: bytes) -> Endpoint:
        """Attach to a peer.

        Args:
            card: of its `Offer`. From a stranger: may be anything.

        Raises:
            LinkError: it cannot be reached this way; the message says why, for the link's `reason`.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End everything that `start` began. Idempotent."""
