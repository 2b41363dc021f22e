"""Corners of tickets: blocks that are asked for twice, and deadlines of calls that wait for each other."""

from __future__ import annotations

import anyio
import pytest

import kvlink as kv
from tests.spec.harness import P, linked_pair, stamped
from tests.support.inside import link_to
from tests.support.loops import asyncio_and_trio, every_loop
from tests.support.pattern import expect

DESC = kv.CacheDesc(4, (8, 256), "uint8")
MIX = (kv.Role.MIX, kv.Role.MIX)


@every_loop
async def test_a_block_that_is_pulled_twice_counts_once() -> None:
    """A held ticket of two blocks is not DONE when one of them has been pulled into two places."""
    async with linked_pair("shm", roles=MIX) as pair:
        theirs = pair.owner.allocate_blocks_cache(DESC)
        stamp = stamped(theirs)
        ours = pair.reader.allocate_blocks_cache(DESC)
        ticket = pair.owner.offer_blocks(theirs, [3, 5])
        held = await pair.reader.hold_ticket(ticket.token)
        await pair.reader.pull_blocks(held, ours, [3, 3], [0, 1])
        assert held.is_live
        await pair.reader.pull_blocks(held, ours, [5], [2])
        assert (await ticket.outcome(timeout_s=5)).is_done
        expect(ours.tensors, stamp, [0, 1, 2], src_blocks=[3, 3, 5])
        pair.owner.deallocate_cache(theirs)
        pair.reader.deallocate_cache(ours)


@asyncio_and_trio
async def test_a_push_that_waits_for_the_claim_of_another_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pushes by one token, the owner silent: the impatient one ends by its deadline, not by the other's."""
    async with linked_pair("shm", roles=MIX) as pair:
        theirs = pair.reader.allocate_blocks_cache(DESC)
        ours = pair.owner.allocate_blocks_cache(DESC)
        ticket = pair.reader.expect_blocks(theirs, [0, 1])
        link = link_to(pair.decoder, P)
        monkeypatch.setattr(link, "_on_message", lambda *_: None)  # the claim is not answered
        async with anyio.create_task_group() as tasks:

            async def wait_long() -> None:
                with pytest.raises(kv.TransferTimeoutError):
                    await pair.owner.push_blocks(ticket.token, ours, [0], [0], timeout_s=4)

            tasks.start_soon(wait_long)
            await anyio.wait_all_tasks_blocked()
            started = anyio.current_time()
            with pytest.raises(kv.TransferTimeoutError):
                await pair.owner.push_blocks(ticket.token, ours, [1], [1], timeout_s=0.1)
            took_s = anyio.current_time() - started
            tasks.cancel_scope.cancel()
        assert took_s < 2
        ticket.revoke()
        pair.reader.deallocate_cache(theirs)
        pair.owner.deallocate_cache(ours)


async def test_a_ticket_is_about_no_more_blocks_than_a_message_can_name() -> None:
    """More are refused where the ticket is given, instead of ending the link of whoever claims it."""
    async with linked_pair("shm", roles=MIX, pool="2MiB") as pair:
        cache = pair.owner.allocate_blocks_cache(kv.CacheDesc(1, (2**20 + 1, 1), "uint8"))
        with pytest.raises(kv.ParameterError, match="at most 1048576"):
            pair.owner.offer_blocks(cache, range(2**20 + 1))
        held = await pair.reader.hold_ticket(pair.owner.offer_blocks(cache, range(2**20)).token)
        assert len(held.blocks) == 2**20
        held.drop()
        pair.owner.deallocate_cache(cache)
