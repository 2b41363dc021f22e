"""The functions that give and take tickets, on the manager."""

from __future__ import annotations

from collections.abc import Callable

from kvlink.caches.bookkeeping import CacheBookkeeping
from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.tickets import Ticket, TicketBook
from kvlink.checks import Blocks, check_blocks
from kvlink.config import ClusterConfig, check_seconds
from kvlink.errors import ParameterValueError
from kvlink.geometry import Role
from kvlink.transfers.heldtickets import HeldTicket
from kvlink.transfers.ticketcalls import TicketMover
from kvlink.wire import MAX_BLOCKS


class Ticketing(CacheBookkeeping):
    """Give tickets, and hold those of others. Base of `KvCacheManager`."""

    def __init__(
        self,
        store: CacheStore,
        config: ClusterConfig,
        role: Callable[[], Role],
        tickets: TicketBook,
        mover: TicketMover,
    ) -> None:
        super().__init__(store, config, role)
        self._tickets = tickets
        self._mover = mover

    def offer_blocks(self, cache: KvCache, blocks: Blocks, *, lease_s: float = 30.0) -> Ticket:
        """Give the right to read blocks of `cache` to whoever gets the ticket's token. Any role.

        The reader passes the token to `pull_blocks` in place of a key, or to `hold_ticket`. It must be linked to this
        cluster, and to this life of it.

        Args:
            blocks: block (slot) numbers, none of them twice; not empty.
            lease_s: how long the ticket waits to be claimed, in seconds. Once claimed it lives as long as the reader's
                link; a reader that is silent for longer than this and the liveness limit loses it.

        Ownership: do not write these blocks until the ticket has ended. `deallocate_cache` may be called before: the
        memory stays until then. `unregister_cache` revokes the ticket.

        Raises:
            ParameterError: a block number is wrong, or there is none; or a block is to be filled under another ticket.
            OutOfMemoryError: too many caches and tickets, see `ClusterConfig.max_caches`.
        """
        return self._open_ticket(cache, blocks, lease_s, is_write=False)

    def expect_blocks(self, cache: KvCache, blocks: Blocks, *, lease_s: float = 30.0) -> Ticket:
        """Give the right to fill blocks of `cache` to whoever gets the ticket's token: the mirror of `offer_blocks`.

        The sender passes the token to `push_blocks`, all at once or layer range by layer range, until every block of
        every tensor has been filled, each once: then the ticket is DONE. `Ticket.layer` awaits single layers. No other
        ticket may be about these blocks, nor one that has ended and is not quiet.

        Ownership: do not touch these blocks until the ticket has ended and `Ticket.quiet` has returned.
        `deallocate_cache` revokes it.

        Args and errors: as for `offer_blocks`.
        """
        return self._open_ticket(cache, blocks, lease_s, is_write=True)

    async def hold_ticket(self, token: bytes | str, *, timeout_s: float | None = None) -> HeldTicket:
        """Claim a peer's ticket, to use it in several pulls or pushes, or to drop it. One round trip.

        Args:
            token: of either kind of ticket.
            timeout_s: deadline of the claim; None for the cluster's `ClusterConfig.operation_timeout_s`.

        Cancellation: the ticket is given back.

        Raises:
            TicketError: the token is damaged, of another life of its owner, or forged; or the ticket is held by
                somebody else, or has ended.
            NotLinkedError, LinkLostError, TransferTimeoutError: as for `pull_blocks`.
        """
        return await self._mover.hold(token, timeout_s=self._timeout_s(timeout_s))

    def _open_ticket(self, cache: KvCache, blocks: Blocks, lease_s: float, *, is_write: bool) -> Ticket:
        entry = self._store.own_entry(cache, "the cache of a ticket")
        numbers = check_blocks("blocks", blocks, entry.desc.num_slots, is_unique=True)
        if not numbers:
            raise ParameterValueError("blocks is empty; a ticket is about at least one block")
        if len(numbers) > MAX_BLOCKS:
            raise ParameterValueError(f"blocks has {len(numbers)} blocks; a ticket is about at most {MAX_BLOCKS}")
        return self._tickets.open(entry, numbers, check_seconds("lease_s", lease_s), is_write=is_write)
