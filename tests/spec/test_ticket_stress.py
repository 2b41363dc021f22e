"""Tickets under random work: revoked, dropped, cancelled, run out of time, cut off, by both sides of one link at once.

Every block says which ticket's life it was written in, so a success with a newer byte, or a late write into blocks that
were quiet, is seen. A little of it in every run; with ``KVLINK_STRESS=1`` a lot. The seed is in the test's name.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from typing import Any, Final

import anyio
import pytest

import kvlink as kv
from tests.spec.harness import P, Pair, linked_pair
from tests.support.inside import num_read_leases, used_nbytes
from tests.support.loops import eventually
from tests.support.pattern import Stamp, expect, fill

NUM: Final = 24
DESC = kv.CacheDesc(4, (NUM, 16384), "uint8")
End = kv.TicketEnding

# What the two sides may say of one ticket: the same, or the two ends have crossed on their way.
CROSSED: Final = {
    (owner, holder) for owner in (End.REVOKED, End.PEER_LOST) for holder in (End.DONE, End.DROPPED, End.FAILED)
} | {(End.REVOKED, End.PEER_LOST), (End.PEER_LOST, End.REVOKED)}


class Party:
    """One cluster: blocks that it gives tickets on, and blocks that it moves others' to and from."""

    def __init__(self, cluster: kv.Cluster) -> None:
        self.cluster = cluster
        self.manager = cluster.kv_cache_manager
        self.given = self.manager.allocate_blocks_cache(DESC)
        self.own = self.manager.allocate_blocks_cache(DESC)
        self.free_given, self.free_own = set(range(NUM)), set(range(NUM))


class Work:
    """Episodes, each the life of one ticket.

    Attributes:
        counts: how the tickets ended, by kind of ticket, and what calls raised.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.chance = random.Random(seed)
        self.parties = Party(pair.prompt), Party(pair.decoder)
        self.version = 0
        self.counts: Counter[str] = Counter()

    def next_stamp(self, party: Party) -> Stamp:
        """Return bytes that nobody has written before."""
        self.version += 1
        return Stamp(party.cluster.cluster_id, 1, self.version % 65536)

    def take(self, free: set[int], num: int) -> list[int]:
        """Take blocks for one episode."""
        blocks = self.chance.sample(sorted(free), num)
        free.difference_update(blocks)
        return blocks

    async def episode(self) -> None:
        """Give a ticket, use it somehow, and check what both sides were told against the bytes."""
        giver, user = self.chance.sample(self.parties, 2)
        num = self.chance.randint(1, 3)
        if min(len(giver.free_given), len(user.free_own)) < num:
            return
        theirs, ours = self.take(giver.free_given, num), self.take(user.free_own, num)
        is_write = self.chance.random() < 0.5
        stamp = self.next_stamp(user if is_write else giver)
        fill((user.own if is_write else giver.given).tensors, stamp, ours if is_write else theirs)
        give = giver.manager.expect_blocks if is_write else giver.manager.offer_blocks
        ticket = give(giver.given, theirs, lease_s=self.chance.choice([0.005, 0.3, 0.3, 0.3]))
        seen: dict[str, Any] = {"stamp": stamp, "theirs": theirs}
        async with anyio.create_task_group() as tasks:
            if self.chance.random() < 0.4:
                tasks.start_soon(self.revoke, ticket, giver)
            with anyio.move_on_after(self.chance.choice([0.001, 0.004, 5, 5])):
                await self.use(ticket, user, ours, is_write, seen)
        outcome = await ticket.outcome(timeout_s=20)
        await ticket.quiet(timeout_s=20)
        self.counts[f"{'fill' if is_write else 'read'} {outcome.kind.value}"] += 1
        held = seen.get("held")
        if held is not None:
            told = (await held.outcome(timeout_s=20)).kind
            assert told is outcome.kind or (outcome.kind, told) in CROSSED, (outcome, held.ending.outcome)
        if is_write and outcome.is_done:
            expect(giver.given.tensors, stamp, theirs, src_blocks=ours)
        # Quiet: whatever its holder still believes, nothing is written here any more.
        after = self.next_stamp(giver)
        fill(giver.given.tensors, after, theirs)
        await anyio.sleep(self.chance.random() * 0.004)
        expect(giver.given.tensors, after, theirs)
        giver.free_given.update(theirs)
        user.free_own.update(ours)

    async def revoke(self, ticket: kv.Ticket, giver: Party) -> None:
        """Take a ticket back at some moment, and write into what was for reading at once."""
        await anyio.sleep(self.chance.random() * 0.006)
        is_live = ticket.is_live
        ticket.revoke()
        if is_live and not ticket.is_write:
            fill(giver.given.tensors, self.next_stamp(giver), list(ticket.blocks))

    async def use(self, ticket: kv.Ticket, user: Party, ours: list[int], is_write: bool, seen: dict[str, Any]) -> None:
        """Move by the bare token, or hold the ticket and move by that, in one go or in layers; or drop it."""
        style = self.chance.choice(["bare", "bare", "held", "layers", "drop"])
        timeout_s = self.chance.choice([0.001, 5, 5])
        try:
            if style == "bare":
                await self.move(ticket.token, user, ours, is_write, None, timeout_s, seen)
                return
            with await user.manager.hold_ticket(ticket.token, timeout_s=timeout_s) as held:
                seen["held"] = held
                if style == "held":
                    await self.move(held, user, ours, is_write, None, timeout_s, seen)
                elif style == "layers":
                    for layer in self.chance.sample(range(2), 2):
                        await self.move(held, user, ours, is_write, range(layer, layer + 1), timeout_s, seen)
        except kv.KVLinkError as exc:
            self.counts[type(exc).__name__] += 1

    async def move(
        self,
        ticket: kv.HeldTicket | bytes,
        user: Party,
        ours: list[int],
        is_write: bool,
        layers: range | None,
        timeout_s: float,
        seen: dict[str, Any],
    ) -> None:
        """Pull or push; check what a pull that succeeds has brought before anything else happens."""
        options: dict[str, Any] = {"src_layer_range": layers, "dst_layer_range": layers, "timeout_s": timeout_s}
        if is_write:
            await user.manager.push_blocks(ticket, user.own, ours, [], **options)
            return
        await user.manager.pull_blocks(ticket, user.own, [], ours, **options)
        tensors = user.own.tensors if layers is None else user.own.tensors[2 * layers.start : 2 * layers.stop]
        first = 0 if layers is None else 2 * layers.start
        expect(tensors, seen["stamp"], ours, src_blocks=seen["theirs"], src_tensor=first)

    async def cut(self, every_s: float) -> None:
        """Cut the link now and then, and link again."""
        dialler, owner = self.pair.decoder, self.pair.prompt
        while True:
            await anyio.sleep(every_s)
            await dialler.unlink_clusters([P], force=self.chance.random() < 0.5)
            result = await dialler.link_clusters([kv.ClusterInfo(P, owner.address)], timeout_s=10)
            result.raise_for_status()
            self.counts["cuts"] += 1


def is_free(cluster: kv.Cluster) -> bool:
    """Whether nothing of a cluster's pool is taken."""
    return used_nbytes(cluster) == 0


async def test_random_work_for_a_moment(transport: str) -> None:
    """Whatever is done with tickets: one end each, right bytes or an error, quiet blocks that stay quiet, no leak."""
    await random_work(transport, 1, 60)


@pytest.mark.stress
@pytest.mark.skipif("KVLINK_STRESS" not in os.environ, reason="set KVLINK_STRESS=1: takes minutes")
@pytest.mark.parametrize("seed", range(2, 10))
async def test_random_work_for_long(transport: str, seed: int) -> None:
    """The same, a lot of it."""
    await random_work(transport, seed, 600)


async def random_work(transport: str, seed: int, num_episodes: int) -> None:
    """Live so many tickets' lives, eight at a time, while the link is cut now and then; then check what is left."""
    config: dict[str, Any] = {"inline_nbytes": 0, "chunk_nbytes": 8192, "copy_threads": 2}
    async with linked_pair(transport, roles=(kv.Role.MIX, kv.Role.MIX), pool="8MiB", limit_s=120, **config) as pair:
        work = Work(pair, seed)
        left = num_episodes

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await work.episode()

        async with anyio.create_task_group() as cutting:
            cutting.start_soon(work.cut, 0.15)
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(worker)
            cutting.cancel_scope.cancel()
        print(dict(work.counts))
        for party in work.parties:
            for cache in (party.given, party.own):
                await eventually(cache.is_quiet, "the caches are quiet")
                party.manager.deallocate_cache(cache)
            await eventually(partial(is_free, party.cluster), "the memory is free")
            assert num_read_leases(party.cluster) == 0
