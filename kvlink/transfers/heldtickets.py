"""The holder's side of tickets: what of each has been moved, and telling its owner how it ended.

What a ticket came to is decided where the bytes are moved: by its holder. `Coverage` keeps which blocks of which
tensors are missing, on their way, and in place; the ticket is DONE when nothing is missing and nothing is on its way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlink.caches.ending import Ending
from kvlink.caches.tickets import MAX_CAUSE
from kvlink.checks import Tensors
from kvlink.errors import ParameterValueError, TicketError
from kvlink.links.grants import WriteGrant
from kvlink.links.link import Link
from kvlink.tokens import TicketEnding, TicketOutcome, Token
from kvlink.wire import EndTicket, Filled, Found

_MISSING: Final = 0
_MOVING: Final = 1
_PLACED: Final = 2

_TOLD: Final = (TicketEnding.DONE, TicketEnding.FAILED, TicketEnding.DROPPED)
"""Endings that the holder tells the owner; of the others the owner knows."""
_OWNERS: Final = (TicketEnding.REVOKED, TicketEnding.FAILED, TicketEnding.PEER_LOST)
"""Endings that an owner may tell the holder: none is a success."""


_MAX_EARLY: Final = 1024
"""Ends that came before their tickets, for each link; each is waited for by one claim, so there are never many."""


class Coverage:
    """How far each block of each tensor is. Pure.

    Args:
        num_tensors, num_blocks: how many there are.
    """

    def __init__(self, num_tensors: int, num_blocks: int) -> None:
        self._states: NDArray[np.uint8] = np.zeros((num_tensors, num_blocks), np.uint8)
        self._num_left: NDArray[np.int64] = np.full(num_tensors, num_blocks, np.int64)

    def begin(self, tensors: Tensors, places: NDArray[np.int64]) -> bool:
        """Note that these are on their way; false, and no change, where one of them is or has been already."""
        if self._states[tensors.start : tensors.stop, places].any():
            return False
        self._states[tensors.start : tensors.stop, places] = _MOVING
        return True

    def end(self, tensors: Tensors, places: NDArray[np.int64], *, is_placed: bool) -> None:
        """Note that these are in place, or missing again."""
        chosen = slice(tensors.start, tensors.stop)
        if not is_placed:
            self._states[chosen, places] = _MISSING
            return
        self._num_left[chosen] -= (self._states[chosen, places] != _PLACED).sum(axis=1)
        self._states[chosen, places] = _PLACED

    @property
    def is_whole(self) -> bool:
        """Whether everything is in place."""
        return not self._num_left.any()

    def whole_tensors(self, tensors: Tensors) -> list[Tensors]:
        """Return the longest runs, among these tensors, of which all blocks are in place."""
        runs: list[Tensors] = []
        for tensor in range(tensors.start, tensors.stop):
            if self._num_left[tensor]:
                continue
            if runs and runs[-1].stop == tensor:
                runs[-1] = Tensors(runs[-1].start, tensor + 1)
            else:
                runs.append(Tensors(tensor, tensor + 1))
        return runs

    @property
    def missing_tensors(self) -> list[int]:
        """The tensors that have a block which is not in place."""
        return [int(each) for each in np.flatnonzero(self._num_left)]


class HeldTicket:
    """A ticket of a peer's that we hold. Made by `KvCacheManager.hold_ticket`; a context manager, which drops it.

    Holding costs no messages. It lasts until everything has been moved (DONE), it is dropped, its owner takes it back,
    or the link ends. A pull or push that fails leaves it held, to be tried again or dropped. Forgetting the object
    gives nothing back: drop it, or use it in a ``with``.

    Attributes:
        peer: the owner's cluster id.
        number: the ticket's number there.
        blocks: the owner's block numbers that it is about, in order.
        is_write: whether it is for filling rather than for reading.
    """

    def __init__(
        self, link: Link, said: Token, found: Found, grant: WriteGrant | None, forget: Callable[[HeldTicket], None]
    ) -> None:
        self.peer = link.peer
        self.number = said.number
        self.secret = said.secret
        self.blocks = found.blocks
        self.is_write = grant is not None
        self.link = link
        self.found = found
        self.grant = grant
        self.coverage = Coverage(found.geometry.num_tensors, len(found.blocks))
        self.ending = Ending(f"ticket {said.number} of cluster {link.peer}")
        self._num_moving = 0
        self._place_of: dict[int, int] = {}
        self._forget = forget

    def __enter__(self) -> HeldTicket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    @property
    def is_live(self) -> bool:
        """Whether it has not ended, as far as is known here."""
        return self.ending.outcome is None

    def drop(self, cause: str = "its holder gave it back") -> None:
        """Give it back, whatever was moved; the owner is told. After its end: nothing."""
        self.end(TicketEnding.DROPPED, cause)

    def seal(self) -> None:
        """Declare a ticket for filling complete. Not needed: it seals itself when nothing is missing.

        Raises:
            TicketError: something is missing; the ticket has now FAILED on both sides. Or it had ended otherwise.
        """
        if self.ending.outcome is not None:
            if not self.ending.outcome.is_done:
                raise self.ended("seal")
            return
        missing = self.coverage.missing_tensors
        if missing:
            cause = f"sealed without tensors {', '.join(map(str, missing[:8]))}{' ...' if missing[8:] else ''}"
            self.end(TicketEnding.FAILED, cause)
            raise TicketError(
                f"ticket {self.number} of cluster {self.peer} was {cause}; it has failed on both sides",
                peer=self.peer,
                phase="settle",
                ticket=self.number,
            )
        self._end_if_whole()

    async def outcome(self, *, timeout_s: float) -> TicketOutcome:
        """Wait for the end and return it; the same for everybody, and as often as asked.

        Raises:
            TransferTimeoutError: not within `timeout_s`; the ticket goes on.
        """
        return await self.ending.wait(timeout_s=timeout_s)

    def places_of(self, blocks: list[int]) -> tuple[NDArray[np.int64], list[int]]:
        """Return where blocks of the owner stand in the ticket, and the blocks; none given means all, in order.

        Raises:
            ParameterError: the ticket is not about one of them.
        """
        if not blocks:
            return np.arange(len(self.blocks)), list(self.blocks)
        if not self._place_of:
            self._place_of = {block: place for place, block in enumerate(self.blocks)}
        try:
            return np.array([self._place_of[block] for block in blocks]), blocks
        except KeyError as exc:
            name = f"{'dst' if self.is_write else 'src'}_blocks[{blocks.index(exc.args[0])}]"
            raise ParameterValueError(
                f"{name} is block {exc}; ticket {self.number} of cluster {self.peer} is not about it"
            ) from None

    def begin(self, tensors: Tensors, places: NDArray[np.int64]) -> None:
        """Count a movement of the blocks at `places` of the ticket. Paired with `finish`. Internal.

        Raises:
            TicketError: the ticket has ended, or something that is to be filled has been, or is being.
        """
        if not self.is_live:
            raise self.ended("look-up")
        if self.is_write and not self.coverage.begin(tensors, places):
            raise TicketError(
                f"ticket {self.number} of cluster {self.peer} fills each block once; some of these in tensors "
                f"{tensors.start} to {tensors.stop - 1} are filled, or being filled, already",
                peer=self.peer,
                phase="look-up",
                ticket=self.number,
            )
        self._num_moving += 1

    def finish(self, tensors: Tensors, places: NDArray[np.int64], *, is_placed: bool) -> None:
        """Note how a movement ended; the last one that was missing ends the ticket. Internal."""
        self._num_moving -= 1
        if not self.is_write:
            places = np.unique(places)  # a block may be read into several places
        if is_placed or self.is_write:
            self.coverage.end(tensors, places, is_placed=is_placed)
        if is_placed and self.is_write and self.is_live:
            for run in self.coverage.whole_tensors(tensors):
                self.link.post(Filled(self.number, run.start, run.stop))
        self._end_if_whole()

    def end(self, kind: TicketEnding, cause: str) -> None:
        """End it here, once, and tell the owner where it does not know. Internal."""
        cause = cause[:MAX_CAUSE]
        if not self.ending.settle(TicketOutcome(kind, cause, self.peer)):
            return
        self._forget(self)
        if self.grant is not None:
            self.link.grants.recall(self.grant.found.lease)  # before the end is said: the owner need not ask for it
        if kind in _TOLD:
            self.link.post(EndTicket(self.number, kind, cause))

    def ended(self, phase: str) -> TicketError:
        """Return the error of using it after its end."""
        return TicketError(
            f"ticket {self.number} of cluster {self.peer} has ended: {self.ending.outcome or 'its owner took it back'}"
            "; ask for a new one",
            peer=self.peer,
            phase=phase,
            ticket=self.number,
        )

    def _end_if_whole(self) -> None:
        if self._num_moving == 0 and self.is_live and self.coverage.is_whole:
            self.end(TicketEnding.DONE, "")

    def __repr__(self) -> str:
        state = self.ending.outcome or "held"
        return f"<HeldTicket {self.number} of cluster {self.peer}, {len(self.blocks)} blocks: {state}>"


class HeldTickets:
    """All tickets of others that one cluster holds."""

    def __init__(self) -> None:
        self._held: dict[tuple[Link, int], HeldTicket] = {}
        self._ended_early: dict[Link, OrderedDict[int, EndTicket]] = {}

    def add(self, link: Link, said: Token, found: Found, grant: WriteGrant | None) -> HeldTicket:
        """Keep a ticket that has just been claimed; it may have ended already."""
        held = self._held[link, said.number] = HeldTicket(link, said, found, grant, self._forget)
        early = self._ended_early.get(link)
        message = None if early is None else early.pop(said.number, None)
        if message is not None:
            self.take(link, message)
        return held

    def get(self, link: Link, number: int) -> HeldTicket | None:
        """Return a ticket that is held, None where it is not (any more)."""
        return self._held.get((link, number))

    def take(self, link: Link, message: EndTicket) -> None:
        """The owner says that a ticket has ended."""
        held = self._held.get((link, message.number))
        if held is not None:
            held.end(message.kind if message.kind in _OWNERS else TicketEnding.REVOKED, message.cause)
            return
        # Whoever claimed it has the answer and has not had a turn yet; or has gone.
        early = self._ended_early.setdefault(link, OrderedDict())
        early[message.number] = message
        if len(early) > _MAX_EARLY:
            early.popitem(last=False)

    def lose(self, link: Link, cause: str) -> None:
        """A link has ended."""
        for held in [held for held in self._held.values() if held.link is link]:
            held.end(TicketEnding.PEER_LOST, cause)
        self._ended_early.pop(link, None)

    def _forget(self, held: HeldTicket) -> None:
        self._held.pop((held.link, held.number), None)
