"""The owner's side of tickets: leased rights to read or to fill some blocks of a cache.

A ticket is OPEN until somebody shows its token, then HELD by that peer's link, and ends exactly once:

=======  ===============================================  ========================================================
state    ends by                                          when
=======  ===============================================  ========================================================
OPEN     REVOKED, EXPIRED                                 the owner says so; its lease is over
HELD     DONE, FAILED, DROPPED                            the holder says so
HELD     REVOKED                                          the owner says so, whatever the holder is doing
HELD     PEER_LOST                                        the link has ended, or has been silent for too long
=======  ===============================================  ========================================================

Each ticket has a state word of its own, and ending it begins with one store to that word. So a reader in the middle
finds out when it settles, and the memory can be used for something else at once: a ticket for reading pins it as a read
lease does, and no longer. A writer cannot be undone by looking afterwards, so a ticket for filling comes with a write
lease on its blocks, which outlives the ticket when it must: until the writer has given it back, or is known to be dead,
the blocks are not quiet and their memory is not reused. The outcome does not wait for that; `Ticket.quiet` does.

Renewal: a held ticket costs no messages of its own. Whatever is heard on the holder's link renews all tickets that it
holds, and a holder that has said nothing for a quarter of its limit (the lease, or the liveness limit where that is
longer) is asked once, for all of them. Only one that stays silent for the other three quarters loses its tickets while
its link stands: a busy process answers late, and a stopped one must not keep memory for ever.

Many tickets may be given for reading a block, or one for filling it, until that one is quiet (`BlockUse`).

Deallocating a cache leaves its tickets for reading valid, and revokes those for filling: nobody could see the bytes.
Unregistering memory revokes both: what it holds from then on is its user's business.
"""

from __future__ import annotations

import heapq
import hmac
import math
import secrets
from collections import OrderedDict
from typing import Final, Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from kvlink.caches.ending import Ending
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.caches.ticketblocks import BlockUse
from kvlink.config import ClusterConfig
from kvlink.errors import ClosedError, ParameterError, TicketError
from kvlink.tokens import TicketEnding, TicketOutcome, Token
from kvlink.wire import Claim, EndTicket, Filled, Found, Message, Ping, Recall

_MAX_REMEMBERED: Final = 4096
"""Ended tickets whose end a late claim is told; older ones are only "unknown"."""
_ASK_AFTER: Final = 0.25
"""Part of its limit that a holder may be silent before it is asked for a sign of life; it has the rest to answer."""
_DEAF_S: Final = 0.1
"""A stall of our own loop that is longer than this is no silence of theirs."""
MAX_CAUSE: Final = 1000


class Holder(Protocol):
    """A link, as far as this module knows it."""

    @property
    def peer(self) -> int:
        """The other side's cluster id."""

    @property
    def incarnation(self) -> bytes:
        """Which life of it."""

    @property
    def heard_at(self) -> float:
        """When anything was heard last."""

    def post(self, message: Message) -> None:
        """Send a message soon."""


class Ticket:
    """A right that we have given away: to read, or to fill, some blocks of a cache. Made by the manager.

    Dropping the object changes nothing: the ticket lives until it ends.

    Attributes:
        token: what the peer needs: ASCII, so that ``token.decode()`` goes into JSON. Whoever has it has the right.
        blocks: the blocks that it is about, in order.
        is_write: whether it is for filling (`expect_blocks`) rather than for reading (`offer_blocks`).
        lease_s: how long it waits to be claimed, in seconds.
    """

    def __init__(self, book: TicketBook, token: Token, entry: CacheEntry, blocks: list[int], lease_s: float) -> None:
        self.token = token.encode()
        self.blocks = tuple(blocks)
        self.is_write = token.is_write
        self.lease_s = lease_s
        self.number = token.number
        self.entry = entry
        self.secret = token.secret
        self.word, self.generation = book.state.begin()
        self.expires_at = anyio.current_time() + lease_s
        self.holder: Holder | None = None
        self.claim = 0
        self.lease = 0
        self.unfilled: NDArray[np.bool_] = np.ones(entry.desc.num_tensors if token.is_write else 0, bool)
        self.ending = Ending(f"ticket {token.number}")
        self._book = book

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.ending.outcome is None

    def revoke(self, cause: str = "its owner took it back") -> None:
        """Take it back, now: a reader in the middle fails, a writer writes nothing more. After its end: nothing.

        The memory of a ticket for filling may be written until `quiet` has returned.
        """
        self._book.end(self, TicketEnding.REVOKED, cause)

    async def outcome(self, *, timeout_s: float) -> TicketOutcome:
        """Wait for the end and return it; the same for everybody, and as often as asked.

        Raises:
            TransferTimeoutError: not within `timeout_s`; the ticket goes on.
        """
        return await self.ending.wait(timeout_s=timeout_s)

    async def layer(self, layer: int, *, timeout_s: float, tensor_num_per_layer: int = 2) -> None:
        """Return once `layer` of all blocks of a ticket for filling is in place.

        Raises:
            TicketError: the ticket ended without it.
            TransferTimeoutError: not within `timeout_s`.
        """
        num_layers = len(self.unfilled) // tensor_num_per_layer if tensor_num_per_layer > 0 else 0
        if not 0 <= layer < num_layers:
            raise ParameterError(f"layer {layer} of a ticket that is for filling {num_layers} layers")
        tensors = slice(layer * tensor_num_per_layer, (layer + 1) * tensor_num_per_layer)

        def is_settled() -> bool:
            return not self.unfilled[tensors].any() or not self.is_live

        await self.ending.until(is_settled, f"bring layer {layer}", timeout_s=timeout_s)
        if self.unfilled[tensors].any():
            raise TicketError(
                f"ticket {self.number} ended without layer {layer}: {self.ending.outcome}", ticket=self.number
            )

    async def quiet(self, *, timeout_s: float) -> None:
        """Return once nobody can write into the blocks under this ticket any more; it has ended then.

        Raises:
            TransferTimeoutError: not within `timeout_s`: its writer has neither stopped nor died.
        """
        await self.ending.until(lambda: not self.is_live and not self.lease, "become quiet", timeout_s=timeout_s)

    def __repr__(self) -> str:
        state = str(self.ending.outcome) if self.ending.outcome else "open" if self.holder is None else "held"
        return f"<Ticket {self.number} to {'fill' if self.is_write else 'read'} {len(self.blocks)} blocks: {state}>"


class TicketBook:
    """All tickets that one cluster has given. Bookkeeping; only `keep_time` waits.

    Args:
        store: whose blocks they are about.
        cluster_id, incarnation: the owner, for tokens.
    """

    def __init__(self, store: CacheStore, cluster_id: int, incarnation: bytes, config: ClusterConfig) -> None:
        self.state = store.state
        self._store = store
        self._cluster_id = cluster_id
        self._incarnation = incarnation
        self._liveness_s = config.liveness_s
        self._live: dict[int, Ticket] = {}
        self._ended: OrderedDict[int, tuple[bytes, TicketOutcome]] = OrderedDict()
        self._due: list[tuple[float, int]] = []
        self._claims: dict[int, Ticket] = {}
        self._used: dict[CacheEntry, BlockUse] = {}
        self._probed: dict[
            Holder, tuple[float, float]
        ] = {}  # when it was last heard before it was asked, and when that was
        self._sooner = anyio.Event()
        self._is_closed = False
        self._next = 1

    def open(self, entry: CacheEntry, blocks: list[int], lease_s: float, *, is_write: bool) -> Ticket:
        """Give a ticket on blocks of `entry`, for `lease_s` seconds until somebody claims it.

        Raises:
            ParameterError: another ticket stands in the way.
            OutOfMemoryError: no state word is left.
        """
        if self._is_closed:
            raise ClosedError("the cluster is closed")
        use = self._used.get(entry) or BlockUse(entry.desc.num_slots)
        taken = use.conflict(blocks, is_write=is_write)
        if taken is not None:
            raise self._in_the_way(entry, taken)
        token = Token(is_write, self._cluster_id, self._incarnation, self._next, secrets.token_bytes(16))
        ticket = Ticket(self, token, entry, blocks, lease_s)
        self._next += 1
        self._live[ticket.number] = ticket
        use.add(blocks, is_write=is_write)
        self._used[entry] = use
        self._store.table.pin(entry)
        self._remind(ticket, ticket.expires_at)
        return ticket

    def entry_of(self, message: Claim) -> CacheEntry | None:
        """Return the cache of a live ticket, for whoever has its token."""
        ticket = self._live.get(message.number)
        return ticket.entry if ticket and hmac.compare_digest(ticket.secret, message.secret) else None

    def claim(self, holder: Holder, message: Claim, now: float) -> Ticket:
        """Make `holder` the holder of a ticket.

        Raises:
            TicketError: no such ticket, it is held already, or it has ended.
        """
        number = message.number
        ticket = self._live.get(number)
        if ticket is None:
            secret, outcome = self._ended.get(number, (b"", None))
            if outcome is None or not hmac.compare_digest(secret, message.secret):
                raise TicketError(f"ticket {number} is not known here: forged, or it ended long ago", ticket=number)
            raise TicketError(f"ticket {number} has ended: {outcome}; ask for a new one", ticket=number)
        if not hmac.compare_digest(ticket.secret, message.secret) or ticket.is_write != message.is_write:
            raise TicketError(f"ticket {number} is not known here: forged, or it ended long ago", ticket=number)
        if ticket.holder is not None:
            raise TicketError(
                f"ticket {number} is held by cluster {ticket.holder.peer} already; a token is good for one claim",
                ticket=number,
            )
        if ticket.expires_at <= now:
            self.end(ticket, TicketEnding.EXPIRED, f"nobody claimed it within {ticket.lease_s} s")
            raise TicketError(f"ticket {number} has ended: {ticket.ending.outcome}; ask for a new one", ticket=number)
        ticket.holder = holder
        if ticket.is_write:
            self._let_write(ticket, holder)
        ticket.claim = ticket.lease or self._store.leases.new_number()
        self._claims[ticket.claim] = ticket
        self._remind(ticket, holder.heard_at + self._limit_s(ticket) * _ASK_AFTER)
        return ticket

    def give_back(self, holder: Holder, claim: int) -> None:
        """Take note that whoever made a claim had gone when the answer came. Unknown: no-op."""
        ticket = self._claims.get(claim)
        if ticket is not None and ticket.holder is holder:
            self.end(ticket, TicketEnding.DROPPED, "its claim was given up", told_by=holder)

    def take(self, holder: Holder, message: Filled | EndTicket) -> None:
        """Take note of what a ticket's holder has done; anybody else's word counts for nothing."""
        ticket = self._live.get(message.number)
        if ticket is None or ticket.holder is not holder:
            return
        if isinstance(message, Filled):
            ticket.unfilled[message.start : message.stop] = False
            ticket.ending.wake()
        elif message.kind is TicketEnding.DONE and ticket.unfilled.any():
            missing = np.flatnonzero(ticket.unfilled)[:3].tolist()
            self.end(ticket, TicketEnding.FAILED, f"sealed without tensors {missing} ...", told_by=holder)
        elif message.kind in (TicketEnding.DONE, TicketEnding.FAILED, TicketEnding.DROPPED):
            self.end(ticket, message.kind, message.cause, told_by=holder)

    def lose(self, holder: Holder, cause: str) -> None:
        """A link has ended: so have the tickets that its peer held. Write leases end as those of any writer do."""
        self._probed.pop(holder, None)
        for ticket in [ticket for ticket in self._live.values() if ticket.holder is holder]:
            self.end(ticket, TicketEnding.PEER_LOST, cause, told_by=holder)

    def end_cache(self, entry: CacheEntry) -> None:
        """A cache has ended: nobody waits for its blocks to be filled any more, and registered memory is its user's."""
        is_pinned = entry.is_consumable
        for ticket in [ticket for ticket in self._live.values() if ticket.entry is entry]:
            if ticket.is_write or not is_pinned:
                self.end(ticket, TicketEnding.REVOKED, "its cache was deallocated")

    def close(self, cause: str) -> None:
        """End every ticket: the cluster is closing. Idempotent."""
        self._is_closed = True
        for ticket in list(self._live.values()):
            self.end(ticket, TicketEnding.REVOKED, cause)

    def end(self, ticket: Ticket, kind: TicketEnding, cause: str, *, told_by: Holder | None = None) -> None:
        """End a ticket; a second time does nothing. Its holder is told, unless it is the one who said so."""
        if not ticket.is_live:
            return
        self.state.end(ticket.word)  # first: from here on nothing that is read under it counts
        del self._live[ticket.number]
        self._claims.pop(ticket.claim, None)
        holder = ticket.holder
        outcome = TicketOutcome(kind, cause[:MAX_CAUSE], None if holder is None else holder.peer)
        self._ended[ticket.number] = (ticket.secret, outcome)
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if holder is not None:
            if told_by is not holder:
                holder.post(EndTicket(ticket.number, kind, outcome.cause, is_mine=True))
            if ticket.lease:
                self._store.leases.quarantine(ticket.lease, holder.peer)
                holder.post(Recall(ticket.lease))
        ticket.ending.settle(outcome)
        self._let_go(ticket)
        self._store.table.unpin(ticket.entry)

    def expire(self, now: float) -> float | None:
        """End what nobody claimed in time, and what is held by peers that are silent.

        Returns:
            When to look again; None while there is no need.
        """
        while self._due and self._due[0][0] <= now:
            number = heapq.heappop(self._due)[1]
            ticket = self._live.get(number)
            if ticket is None:
                continue
            holder = ticket.holder
            if holder is None:
                if ticket.expires_at > now:
                    self._remind(ticket, ticket.expires_at)
                else:
                    self.end(ticket, TicketEnding.EXPIRED, f"nobody claimed it within {ticket.lease_s} s")
            else:
                self._look_at(ticket, holder, now)
        if not self._live:
            self._due.clear()
        elif len(self._due) > 2 * len(self._live) + 64:  # most of them have ended long ago
            self._due = [due for due in self._due if due[1] in self._live]
            heapq.heapify(self._due)
        return self._due[0][0] if self._due else None

    async def keep_time(self) -> None:
        """Call `expire` whenever there is something to end; sleeps while there are no tickets. Never returns."""
        due: float | None = None
        while True:
            now = anyio.current_time()
            if due is not None and now - due > _DEAF_S:  # answers may have come that nobody has read
                late_s = now - due
                self._probed = {holder: (heard, asked + late_s) for holder, (heard, asked) in self._probed.items()}
            self._sooner = anyio.Event()
            due = self.expire(now)
            with anyio.CancelScope(deadline=math.inf if due is None else due):
                await self._sooner.wait()

    @property
    def num_live(self) -> int:
        """Tickets given that have not ended."""
        return len(self._live)

    def _limit_s(self, ticket: Ticket) -> float:
        """Return how long the holder of `ticket` may be silent."""
        return max(ticket.lease_s, self._liveness_s)

    def _look_at(self, ticket: Ticket, holder: Holder, now: float) -> None:
        """Ask a silent holder for a sign of life, and end the ticket of one that was asked and gave none."""
        limit_s = self._limit_s(ticket)
        heard_at, asked_at = self._probed.get(holder, (0.0, 0.0))
        if heard_at != holder.heard_at:
            ask_at = holder.heard_at + limit_s * _ASK_AFTER
            if ask_at > now:
                self._remind(ticket, ask_at)
                return
            self._probed[holder] = holder.heard_at, now
            holder.post(Ping(0))
            asked_at = now
        end_at = asked_at + limit_s * (1 - _ASK_AFTER)
        if end_at > now:
            self._remind(ticket, end_at)
        else:
            self.end(ticket, TicketEnding.PEER_LOST, f"nothing was heard from cluster {holder.peer} any more")

    def _let_write(self, ticket: Ticket, holder: Holder) -> None:
        """Give the holder a write lease on the ticket's blocks."""
        store, entry = self._store, ticket.entry
        movement = store.begin_moving(entry, ticket.blocks)

        def is_over() -> None:
            ticket.lease = 0
            store.end_moving(entry, movement)
            self._let_go(ticket)
            ticket.ending.wake()

        ticket.lease = store.leases.open_fill(holder.incarnation, entry, ticket.blocks, is_over)

    def _let_go(self, ticket: Ticket) -> None:
        """Let other tickets have the blocks of one that has ended and is quiet."""
        if ticket.is_live or ticket.lease:
            return
        if self._used[ticket.entry].remove(list(ticket.blocks), is_write=ticket.is_write):
            del self._used[ticket.entry]

    def _in_the_way(self, entry: CacheEntry, block: int) -> ParameterError:
        for ticket in self._live.values():
            if ticket.entry is entry and block in ticket.blocks:
                what = "filled" if ticket.is_write else "read"
                return ParameterError(
                    f"block {block} is to be {what} under ticket {ticket.number}; await its outcome, or revoke it first"
                )
        return ParameterError(
            f"block {block} can still be written under a ticket that has ended; await its `Ticket.quiet` first"
        )

    def _remind(self, ticket: Ticket, at: float) -> None:
        if not self._due or at < self._due[0][0]:
            self._sooner.set()
        heapq.heappush(self._due, (at, ticket.number))


def found_by(ticket: Ticket, seq: int) -> Found:
    """Return the answer to the claim `seq` of `ticket`."""
    entry = ticket.entry
    return Found(
        seq=seq,
        cache_id=entry.cache_id,
        slot=0,
        geometry=entry.geometry,
        word=ticket.word,
        generation=ticket.generation,
        lease=ticket.claim,
        blocks=ticket.blocks,
    )
