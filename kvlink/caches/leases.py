"""Who else is using our memory: leases given to peers. Pure bookkeeping; times are arguments.

A *read lease* keeps a cache's memory while a peer reads it, so that `deallocate_cache` defers the real free. It has a
state word of its own, which holds as long as the lease does: the reader succeeds although the cache ends meanwhile. It
ends when the reader says so, when its link ends, or when its time is up:
reading on after that is harmless, since the word tells.

A *write lease* lets a peer write into a cache. A late write cannot be undone by looking afterwards, so it has no time
limit: it ends when the writer gives it back, or when it is certain that the writer can write no more. The owner recalls
it when the cache ends.

A write lease whose holder should write no more, but may, puts its blocks in *quarantine*: its link was lost, or the
lease was recalled and is not back yet. They stay there until the lease ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvlink.caches.table import CacheEntry, CacheTable
from kvlink.errors import LinkBusyError
from kvlink.keys import KeyName
from kvlink.memory.stateregion import StateRegion

_Key = TypeVar("_Key")


class ReadLease(NamedTuple):
    """Peer `holder` reads slot `slot` of `entry` until `expires_at` at the latest, or until `word` changes."""

    number: int
    word: int
    generation: int
    holder: bytes
    entry: CacheEntry
    slot: int
    name: KeyName | None
    expires_at: float


class WriteLease(NamedTuple):
    """Peer `holder` may write into `blocks` of `entry`, None for all.

    The lease of a ticket has an `on_closed`: called when it no longer may.
    """

    holder: bytes
    entry: CacheEntry
    blocks: Sequence[int] | None = None
    on_closed: Callable[[], None] | None = None


class LeaseBook:
    """All leases that this cluster has given.

    Args:
        table: whose caches they keep.
        state: where the validity of read leases is published.
        max_reads_per_holder: read leases that one peer gets; all together get half of the state words.
    """

    def __init__(self, table: CacheTable, state: StateRegion, *, max_reads_per_holder: int) -> None:
        self._table = table
        self._state = state
        self.max_reads_per_holder = max_reads_per_holder
        self._reads: dict[int, ReadLease] = {}
        self._writes: dict[int, WriteLease] = {}
        # Each lease once more by its holder, and write leases by their cache: so that no call looks at all of them.
        self._reads_of: dict[bytes, dict[int, None]] = {}
        self._writes_of: dict[bytes, dict[int, None]] = {}
        self._writers: dict[int, dict[int, None]] = {}
        self._shared: dict[tuple[bytes, int], int] = {}  # the one write lease of a holder that is not of a ticket
        self._suspects: dict[int, int] = {}
        self._next = 1

    def open_read(
        self, holder: bytes, entry: CacheEntry, slot: int, name: KeyName | None, expires_at: float
    ) -> ReadLease:
        """Give a read lease.

        Raises:
            LinkBusyError: `holder`, or all together, have as many as they get.
        """
        num_held = len(self._reads_of.get(holder, ()))
        if num_held >= self.max_reads_per_holder:
            raise LinkBusyError(
                f"you hold {num_held} read leases already, which is ClusterConfig.max_leases_per_link here; "
                "have fewer pulls at a time"
            )
        if 2 * len(self._reads) >= self._state.capacity:
            raise LinkBusyError(
                f"peers hold {len(self._reads)} read leases, half of ClusterConfig.max_caches here; try again later"
            )
        word, generation = self._state.begin()
        lease = ReadLease(self.new_number(), word, generation, holder, entry, slot, name, expires_at)
        self._table.pin(entry)
        self._reads[lease.number] = lease
        self._reads_of.setdefault(holder, {})[lease.number] = None
        return lease

    def close_read(self, holder: bytes, number: int, tensors: tuple[int, int] | None) -> None:
        """End a read lease; `tensors` (first, stop) were delivered and count towards the key. Unknown: no-op."""
        lease = self._reads.get(number)
        if lease is None or lease.holder != holder:
            return
        del self._reads[number]
        _discard(self._reads_of, holder, number)
        if tensors is not None:
            self._table.mark_read(lease.entry, lease.name, lease.slot, *tensors)
        self._state.end(lease.word)
        self._table.unpin(lease.entry)

    def open_write(self, holder: bytes, entry: CacheEntry) -> int:
        """Give a write lease, or the one that `holder` already has on this cache, and return its number."""
        number = self._shared.get((holder, entry.cache_id))
        if number is None:
            number = self._shared[holder, entry.cache_id] = self._enter(WriteLease(holder, entry))
        return number

    def open_fill(self, holder: bytes, entry: CacheEntry, blocks: Sequence[int], on_closed: Callable[[], None]) -> int:
        """Give a write lease for one ticket, apart from any other, and return its number."""
        return self._enter(WriteLease(holder, entry, blocks, on_closed))

    def _enter(self, lease: WriteLease) -> int:
        number = self.new_number()
        self._table.pin(lease.entry)
        self._writes[number] = lease
        self._writes_of.setdefault(lease.holder, {})[number] = None
        self._writers.setdefault(lease.entry.cache_id, {})[number] = None
        return number

    def close_write(self, holder: bytes, number: int) -> None:
        """End a write lease: nothing is written under it any more. Unknown: no-op."""
        lease = self._writes.get(number)
        if lease is not None and lease.holder == holder:
            del self._writes[number]
            _discard(self._writes_of, holder, number)
            _discard(self._writers, lease.entry.cache_id, number)
            if lease.on_closed is None:
                del self._shared[holder, lease.entry.cache_id]
            self._suspects.pop(number, None)
            lease.entry.quarantined.pop(number, None)
            if lease.on_closed is not None:
                lease.on_closed()
            self._table.unpin(lease.entry)

    def writers_of(self, entry: CacheEntry) -> list[tuple[bytes, int]]:
        """Return ``(holder, number)`` of the write leases on `entry`."""
        return [(self._writes[number].holder, number) for number in self._writers.get(entry.cache_id, ())]

    def quarantine(self, number: int, peer: int) -> None:
        """Note that the holder of a write lease, cluster `peer`, should write no more, and may. Unknown: no-op."""
        lease = self._writes.get(number)
        if lease is not None:
            self._suspects[number] = peer
            lease.entry.quarantined[number] = lease.blocks

    def quarantine_all(self, holder: bytes, peer: int) -> None:
        """Note that for all write leases of a peer whose link was lost."""
        for number in list(self._writes_of.get(holder, ())):
            self.quarantine(number, peer)

    def quarantined(self) -> dict[int, int]:
        """Return how many write leases keep memory in quarantine, by the peer's cluster id."""
        return dict(Counter(self._suspects.values()))

    def is_writer(self, holder: bytes) -> bool:
        """Whether `holder` has a write lease on anything."""
        return holder in self._writes_of

    def end_reads(self, entry: CacheEntry) -> None:
        """End the read leases on memory that is its user's again: what is read under them may be something else."""
        for number in [number for number, lease in self._reads.items() if lease.entry is entry]:
            self.close_read(self._reads[number].holder, number, None)

    def drop_readers(self, holder: bytes) -> None:
        """End the read leases of a peer whose link has ended; nothing counts as delivered."""
        for number in list(self._reads_of.get(holder, ())):
            self.close_read(holder, number, None)

    def drop_writers(self, holder: bytes) -> None:
        """End the write leases of a peer that is certain to write no more."""
        for number in list(self._writes_of.get(holder, ())):
            self.close_write(holder, number)

    def expire(self, now: float) -> None:
        """End the read leases whose time is up."""
        for number, lease in list(self._reads.items()):
            if lease.expires_at <= now:
                self.close_read(lease.holder, number, None)

    @property
    def num_reads(self) -> int:
        """Read leases given and not ended."""
        return len(self._reads)

    @property
    def num_writes(self) -> int:
        """Write leases given and not ended."""
        return len(self._writes)

    def new_number(self) -> int:
        """Return a number that no lease has had; also for claims of tickets, which are given back in the same way."""
        number = self._next
        self._next += 1
        return number


def _discard(index: dict[_Key, dict[int, None]], key: _Key, number: int) -> None:
    """Take a lease out of an index, which keeps nothing for those who have none."""
    numbers = index[key]
    del numbers[number]
    if not numbers:
        del index[key]
