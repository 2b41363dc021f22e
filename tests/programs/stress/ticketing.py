"""Tickets and notifications: a worker gives tickets away by notification, and uses those that it is notified of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np

import kvlink as kv
from tests.programs.stress.settings import NUM_OFFERS, NUM_TENSORS, OFFER
from tests.support.pattern import Stamp, block_bytes, faults, fill, read_stamp, rows

if TYPE_CHECKING:
    from tests.programs.stress.worker import Worker

NUM_GIVERS: Final = 2
"""Tickets of a worker that are under way at the same time."""
FILLED: Final = kv.CacheDesc(NUM_TENSORS, (8, 4096), "uint8")
_LEASE_S: Final = 0.7
_RUBBISH: Final = Stamp(250, 250, 65000)


class TicketWork:
    """What one worker does with tickets.

    Args:
        worker: whose; its calls are counted, cancelled and bounded as all others.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._cluster = worker.cluster
        self._manager = worker.cluster.kv_cache_manager
        self._chance = worker.chance
        self._journal = worker.journal
        self._next_number = 1
        self._heard: dict[bytes, int] = {}
        self._stream = worker.cluster.notifications()
        self._waiting = anyio.CancelScope()

    def end(self) -> None:
        """Take no more notifications."""
        self._waiting.cancel()

    # Given away

    async def give(self) -> None:
        """Give one ticket after the other."""
        cache = self._manager.allocate_blocks_cache(FILLED)
        while not self._worker.is_ending:
            await anyio.sleep(self._chance.expovariate(20))
            linked = sorted({link.peer for link in self._cluster.links if link.peer < 1000})
            if not linked:
                continue
            peer = self._chance.choice(linked)
            with suppress(kv.OutOfMemoryError):
                await (self._offer(peer) if self._chance.random() < 0.6 else self._expect(peer, cache))
        self._manager.deallocate_cache(cache)

    async def _offer(self, peer: int) -> None:
        model = self._chance.randrange(NUM_OFFERS)
        if model not in self._worker.offers:
            return
        cache, stamp, _ = self._worker.offers[model]
        blocks = self._chance.sample(range(OFFER.num_slots), self._chance.randint(1, OFFER.num_slots))
        await self._see_through(peer, self._manager.offer_blocks(cache, blocks, lease_s=_LEASE_S), stamp)

    async def _expect(self, peer: int, cache: kv.KvCache) -> None:
        blocks = self._chance.sample(range(FILLED.num_slots), self._chance.randint(1, FILLED.num_slots))
        fill(cache.tensors, _RUBBISH)
        ticket = self._manager.expect_blocks(cache, blocks, lease_s=_LEASE_S)
        outcome = await self._see_through(peer, ticket, _RUBBISH)
        if outcome is kv.TicketEnding.DONE:  # at this very moment, not later
            stamp = read_stamp(cache.tensors[0], blocks[0])
            fault = faults(cache.tensors, stamp, blocks)
            if fault is None and stamp.cluster != peer:
                fault = f"they are of {stamp}"
            if fault is not None:
                self._journal.accuse(f"a ticket for blocks {blocks} was filled by cluster {peer}, but {fault}")
        with self._worker.bounded(f"the quiet of a ticket that cluster {peer} had", 10.0):
            while True:
                with suppress(kv.TransferTimeoutError):
                    await ticket.quiet(timeout_s=1.0)
                    break
        if not cache.is_quiet(blocks):
            self._journal.accuse("a ticket is quiet, and its blocks are not")
        before = [rows(tensor).copy() for tensor in cache.tensors]
        await anyio.sleep(self._chance.random() * 0.01)
        if any(not np.array_equal(old, rows(tensor)) for old, tensor in zip(before, cache.tensors, strict=True)):
            self._journal.accuse(f"blocks {blocks} change after their ticket has become quiet")

    async def _see_through(self, peer: int, ticket: kv.Ticket, stamp: Stamp) -> kv.TicketEnding | None:
        """Tell the peer of a ticket, perhaps take it back, and wait for its end, which must come."""
        kind = "fill" if ticket.is_write else "read"
        number, self._next_number = self._next_number, self._next_number + 1
        told = {"number": number, "kind": kind, "token": ticket.token.decode(), "blocks": ticket.blocks, "stamp": stamp}
        payload = json.dumps(told).encode()
        await self._worker.do("notify", peer, 1.0, lambda: self._cluster.notify(peer, payload, timeout_s=1.0))
        if self._chance.random() < 0.15:
            await anyio.sleep(self._chance.random() * 0.02)
            ticket.revoke()
        with self._worker.bounded(f"the end of a ticket to {kind} that cluster {peer} was told of", 10.0):
            while True:
                with suppress(kv.TransferTimeoutError):
                    outcome = await ticket.outcome(timeout_s=1.0)
                    break
        self._journal.note(f"ticket to {kind}", outcome.kind.value, f"cluster {peer}")
        if ticket.is_live:
            self._journal.accuse("a ticket that has ended is live")
        return outcome.kind

    # Heard of

    async def take(self) -> None:
        """Use the tickets that peers tell us of."""
        read = self._manager.allocate_blocks_cache(OFFER)
        written = self._manager.allocate_blocks_cache(FILLED)
        while not self._worker.is_ending:
            with anyio.CancelScope() as self._waiting:  # a wait that is cancelled loses nothing
                notification = await anext(self._stream)
            if self._waiting.cancelled_caught:
                break
            told = json.loads(notification.payload)
            last = self._heard.get(notification.incarnation, 0)
            if told["number"] <= last:
                number = told["number"]
                self._journal.accuse(f"cluster {notification.peer} sent number {number}, which came after {last}")
            self._heard[notification.incarnation] = told["number"]
            if self._chance.random() < 0.1:
                continue  # and the ticket runs out
            peer, token, blocks = notification.peer, told["token"], told["blocks"]
            if told["kind"] == "read":
                await self._read(peer, token, blocks, Stamp(*told["stamp"]), read)
            else:
                await self._fill(peer, token, blocks, written)
        self._manager.deallocate_cache(read)
        self._manager.deallocate_cache(written)

    async def _read(self, peer: int, token: str, blocks: Sequence[int], stamp: Stamp, cache: kv.KvCache) -> None:
        """Pull what a ticket is for: exactly the bytes that its owner has told of."""
        places = list(range(len(blocks)))
        timeout_s = self._worker.timeout_s()
        report: Any = await self._worker.do(
            "ticket_pull",
            peer,
            timeout_s,
            lambda: self._manager.pull_blocks(token, cache, [], places, timeout_s=timeout_s),
        )
        if report is None:
            await self._worker.expect_quiet("ticket_pull", cache, places)
            return
        fault = faults(cache.tensors, stamp, places, src_blocks=blocks)
        if fault is not None:
            self._journal.accuse(f"a pull by ticket from cluster {peer} succeeded, but {fault}")
        self._journal.counts["bytes checked"] += report.nbytes

    async def _fill(self, peer: int, token: str, blocks: Sequence[int], cache: kv.KvCache) -> None:
        """Push what a ticket is for."""
        stamp, places = self._worker.stamp(), list(range(len(blocks)))
        for index, tensor in enumerate(cache.tensors):
            target = rows(tensor)
            target[places] = block_bytes(stamp, index, blocks, target.shape[1])
        timeout_s = self._worker.timeout_s()
        await self._worker.do(
            "ticket_push",
            peer,
            timeout_s,
            lambda: self._manager.push_blocks(token, cache, places, [], timeout_s=timeout_s),
        )
