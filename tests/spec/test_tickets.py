"""Tickets: `offer_blocks`, `expect_blocks`, and their tokens in place of keys. Source: kvlink's contract, 1-3, 6-8, 12.

Most tests run on both kinds of ticket: `side` says who gives it and who uses it. A ticket for reading (``read``) is
given by P and used by D's pulls, one for filling (``fill``) by D and used by P's pushes; both clusters are MIX.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest

import kvlink as kv
from kvlink.tokens import Token, parse_token
from kvlink.wire import Found
from tests.spec.harness import D, Held, LayerGate, P, Pair, cluster, hold, linked_pair, stamped
from tests.spec.harness import link as link_clusters
from tests.spec.ticketing import owner_in_child
from tests.support.inside import link_to, used_nbytes
from tests.support.loops import eventually, every_loop
from tests.support.pattern import Stamp, expect

NUM = 16
DESC = kv.CacheDesc(4, (NUM, 256), "uint8")
CACHE_NBYTES = 4 * NUM * 256
MIX = (kv.Role.MIX, kv.Role.MIX)
KINDS = pytest.mark.parametrize("kind", ["read", "fill"])
End = kv.TicketEnding


class Side(NamedTuple):
    """One kind of ticket: `giver` gives it, on blocks of `theirs`, and `user` moves them to or from `ours`."""

    kind: str
    pair: Pair
    giver: kv.Cluster
    user: kv.Cluster
    theirs: kv.KvCache
    ours: kv.KvCache
    stamp: Stamp

    def give(self, blocks: list[int], lease_s: float = 30.0) -> kv.Ticket:
        """Give a ticket."""
        manager = self.giver.kv_cache_manager
        return (manager.offer_blocks if self.kind == "read" else manager.expect_blocks)(
            self.theirs, blocks, lease_s=lease_s
        )

    async def hold(self, ticket: kv.Ticket) -> kv.HeldTicket:
        """Claim it."""
        return await self.user.kv_cache_manager.hold_ticket(ticket.token)

    async def move(
        self,
        ticket: kv.HeldTicket | bytes | str,
        ours: list[int],
        theirs: list[int] | None = None,
        layers: range | None = None,
        **options: Any,
    ) -> kv.TransferReport:
        """Pull or push by it."""
        manager = self.user.kv_cache_manager
        options |= {"src_layer_range": layers, "dst_layer_range": layers}
        if self.kind == "read":
            return await manager.pull_blocks(ticket, self.ours, theirs or [], ours, **options)
        return await manager.push_blocks(ticket, self.ours, ours, theirs or [], **options)

    def expect(self, ours: list[int], theirs: list[int]) -> None:
        """Check that the bytes are where they should be."""
        if self.kind == "read":
            expect(self.ours.tensors, self.stamp, ours, src_blocks=theirs)
        else:
            expect(self.theirs.tensors, self.stamp, theirs, src_blocks=ours)

    def stop_at_bytes(self) -> Held:
        """Make the user's movements stand still when everything has been checked."""
        return hold(self.user, self.giver.cluster_id, "get" if self.kind == "read" else "put")


@asynccontextmanager
async def side_of(transport: str, kind: str, **config: Any) -> AsyncIterator[Side]:
    """Run P and D in this process, with a cache each; the source of the bytes is filled."""
    async with linked_pair(transport, roles=MIX, **config) as pair:
        at_p, at_d = pair.owner.allocate_blocks_cache(DESC), pair.reader.allocate_blocks_cache(DESC)
        stamp = stamped(at_p)
        if kind == "read":
            yield Side(kind, pair, pair.prompt, pair.decoder, at_p, at_d, stamp)
        else:
            yield Side(kind, pair, pair.decoder, pair.prompt, at_d, at_p, stamp)


async def both(ticket: kv.Ticket, held: kv.HeldTicket) -> tuple[kv.TicketOutcome, kv.TicketOutcome]:
    """Return how it ended at its owner and at its holder."""
    return await ticket.outcome(timeout_s=5), await held.outcome(timeout_s=5)


# ---- moving


async def test_between_processes(transport: str) -> None:
    """A token that travels as text lets another process read these blocks, and both sides learn that it is done."""
    async with owner_in_child(transport) as stage:
        into = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        token = await stage.owner.call("offer", cache=cache, blocks=[7, 1, 2])
        report = await stage.reader.pull_blocks(token, into, [], [4, 5, 6])
        expect(into.tensors, stage.owner.stamp(cache), [4, 5, 6], src_blocks=[7, 1, 2])
        assert (report.peer, report.done, report.nbytes) == (P, (4, 5, 6), 3 * 4 * 256)
        assert await stage.owner.call("outcome", number=1) == ["DONE", "", D]


async def test_filled_by_another_process_layer_by_layer(transport: str) -> None:
    """The receiver awaits layer by layer what another process pushes by its token, then the end."""
    async with owner_in_child(transport) as stage:
        into = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        ticket = stage.reader.expect_blocks(into, [4, 5])
        token = ticket.token.decode()
        assert await stage.owner.call("push", token=token, cache=cache, src=[9, 0], dst=[], layers=[1, 2]) == 1024
        await ticket.layer(1, timeout_s=5)
        expect(into.tensors[2:], stage.owner.stamp(cache), [4, 5], src_blocks=[9, 0], src_tensor=2)
        with pytest.raises(kv.TransferTimeoutError):
            await ticket.layer(0, timeout_s=0.01)
        assert not into.is_quiet([4])
        await stage.owner.call("push", token=token, cache=cache, src=[9, 0], dst=[4, 5], layers=[0, 1])
        await ticket.layer(0, timeout_s=5)
        assert await ticket.outcome(timeout_s=5) == (End.DONE, "", P)
        await ticket.quiet(timeout_s=5)
        assert into.is_quiet()
        expect(into.tensors, stage.owner.stamp(cache), [4, 5], src_blocks=[9, 0])


@KINDS
@every_loop
async def test_a_bare_token_is_used_up_by_one_call(transport: str, kind: str) -> None:
    """One round trip to claim, none to say how it ended; the same token a second time is refused and says why."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1, 7])
        stats = link_to(side.user, side.giver.cluster_id).stats
        before = (stats.round_trips, stats.messages_sent, stats.messages_received)
        await side.move(ticket.token.decode(), [0, 1, 2])
        side.expect([0, 1, 2], [3, 1, 7])
        await side.pair.flush()
        after = (stats.round_trips, stats.messages_sent, stats.messages_received)
        pings = (side.user.cluster_id == P) + 2 * (side.user.cluster_id == D)
        trips, sent, received = (now - then for now, then in zip(after, before, strict=True))
        assert trips == 1 + pings
        assert sent - 3 == (2 if kind == "read" else 4), "the claim, and the end; filled, and the lease given back"
        if transport == "shm":  # others share memory by messages, before the answer
            assert received - 3 == 1, "the answer to the claim"
        for _ in range(2):
            assert await ticket.outcome(timeout_s=5) == (End.DONE, "", side.user.cluster_id)
        with pytest.raises(kv.TicketError, match="ticket 1 has ended: done") as caught:
            await side.move(ticket.token, [0, 1, 2])
        assert (caught.value.ticket, caught.value.peer) == (1, side.giver.cluster_id)
        assert caught.value.status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST


async def test_a_reader_may_want_only_some(transport: str) -> None:
    """A bare token may be used for some of its blocks, in any order; the rest goes back with it."""
    async with side_of(transport, "read") as side:
        ticket = side.give([3, 1, 7])
        await side.move(ticket.token, [5], [7])
        side.expect([5], [7])
        assert (await ticket.outcome(timeout_s=5)).kind is End.DONE


@KINDS
async def test_held_for_several_movements(transport: str, kind: str) -> None:
    """A held ticket is DONE on both sides when every block of every tensor has been moved, in whatever portions."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1, 7])
        held = await side.hold(ticket)
        assert (held.blocks, held.peer, held.is_write) == ((3, 1, 7), side.giver.cluster_id, kind == "fill")
        await side.move(held, [0, 2], [3, 7], range(1))
        await side.move(held, [0, 2], [3, 7], range(1, 2))
        assert held.is_live
        assert ticket.is_live
        await side.move(held, [1], [1])
        side.expect([0, 1, 2], [3, 1, 7])
        for outcome in await both(ticket, held):
            assert outcome.kind is End.DONE
        with pytest.raises(kv.TicketError, match="has ended: done"):
            await side.move(held, [0, 1, 2])


@KINDS
async def test_memory_that_is_out_of_reach(transport: str, kind: str) -> None:
    """Reading takes a detour through the owner's pool, and is undone by a revocation; filling says what to allow."""
    async with side_of(transport, kind, pool="2MiB") as side:
        link = link_to(side.user, side.giver.cluster_id)
        link.unreachable |= {run.region for run in side.theirs.geometry.runs}
        link.detour = "as where the kernel does not permit it"
        ticket = side.give([3, 1])
        if kind == "fill":
            with pytest.raises(kv.FeatureNotEnabledError, match="no detour: as where the kernel"):
                await side.move(ticket.token, [0, 1])
            assert (await ticket.outcome(timeout_s=5)).kind is End.FAILED
            return
        await side.move(ticket.token, [0, 1])
        side.expect([0, 1], [3, 1])
        late = side.give([3, 1])
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refused_move, side, late)
            await held_back.reached.wait()
            late.revoke()
            held_back.release()


@KINDS
async def test_arguments(transport: str, kind: str) -> None:
    """What a call cannot mean is refused before a byte moves, and a held ticket stays held."""
    async with side_of(transport, kind) as side:
        for blocks in ([], [1, 1], [NUM], [-1]):
            with pytest.raises(kv.ParameterError):
                side.give(blocks)
        for lease_s in (0, -1, float("nan")):
            with pytest.raises(kv.ParameterError):
                side.give([1], lease_s=lease_s)
        ticket = side.give([3, 1])
        with await side.hold(ticket) as held:
            for ours, theirs in (([0], []), ([0, 1], [3, 2]), ([0], [3, 1]), ([NUM], [3])):
                with pytest.raises(kv.ParameterError):
                    await side.move(held, ours, theirs)
            with pytest.raises(kv.ParameterError):
                await side.move(held, [0, 1], layers=range(3))
            assert ticket.is_live
        assert (await ticket.outcome(timeout_s=5)).kind is End.DROPPED
        other = side.give([3])
        manager = side.user.kv_cache_manager
        wrong = manager.push_blocks if kind == "read" else manager.pull_blocks
        with pytest.raises(kv.TicketError, match="is for"):
            await wrong(other.token, side.ours, [0], [0])
        assert other.is_live


async def test_one_fills_or_many_read(transport: str) -> None:
    """Blocks may be offered to many, and expected from one only, who must be out of the way first."""
    async with side_of(transport, "fill") as side:
        manager, cache = side.giver.kv_cache_manager, side.theirs
        offers = [manager.offer_blocks(cache, blocks) for blocks in ([1, 2], [2, 3])]
        for blocks in ([1], [0, 3]):
            with pytest.raises(kv.ParameterError, match=rf"block {blocks[-1]} is to be read under ticket"):
                manager.expect_blocks(cache, blocks)
        for each in offers:
            each.revoke()
        expected = manager.expect_blocks(cache, [1, 2])
        for give in (manager.offer_blocks, manager.expect_blocks):
            with pytest.raises(kv.ParameterError, match="block 2 is to be filled under ticket 3"):
                give(cache, [2])
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(side.move, expected.token, [0, 1])
            await held_back.reached.wait()
            expected.revoke()
            for give in (manager.offer_blocks, manager.expect_blocks):
                with pytest.raises(kv.ParameterError, match=r"block 2 can still be written .*quiet"):
                    give(cache, [2])
            tasks.cancel_scope.cancel()
        await expected.quiet(timeout_s=5)
        manager.expect_blocks(cache, [0, 1, 2]).revoke()
        manager.offer_blocks(cache, [0, 1, 2])


# ---- exactly one end, on both sides


async def _done(side: Side, ticket: kv.Ticket, held: kv.HeldTicket) -> None:
    await side.move(held, [0, 1])


async def _failed(side: Side, ticket: kv.Ticket, held: kv.HeldTicket) -> None:
    if side.kind == "fill":
        with pytest.raises(kv.TicketError, match="sealed without tensors 0, 1, 2, 3"):
            held.seal()
    else:
        held.end(End.FAILED, "as a failed pull does")


async def _dropped(side: Side, ticket: kv.Ticket, held: kv.HeldTicket) -> None:
    held.drop()


async def _revoked(side: Side, ticket: kv.Ticket, held: kv.HeldTicket) -> None:
    ticket.revoke()


async def _peer_lost(side: Side, ticket: kv.Ticket, held: kv.HeldTicket) -> None:
    await side.user.unlink_clusters([side.giver.cluster_id])


ENDS: dict[End, Callable[[Side, kv.Ticket, kv.HeldTicket], Awaitable[None]]] = {
    End.DONE: _done,
    End.FAILED: _failed,
    End.DROPPED: _dropped,
    End.REVOKED: _revoked,
    End.PEER_LOST: _peer_lost,
}


@KINDS
@pytest.mark.parametrize("how", ENDS, ids=lambda how: how.name)
async def test_one_end_on_both_sides(transport: str, kind: str, how: End) -> None:
    """However a held ticket ends, both sides learn the same, once, whatever else is tried; its blocks come back."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1])
        held = await side.hold(ticket)
        async with anyio.create_task_group() as tasks:
            seen: list[kv.TicketOutcome] = []

            async def wait(which: kv.Ticket | kv.HeldTicket) -> None:
                seen.append(await which.outcome(timeout_s=5))

            for which in (ticket, held, ticket, held):
                tasks.start_soon(wait, which)
            await anyio.lowlevel.checkpoint()
            await ENDS[how](side, ticket, held)
        assert [outcome.kind for outcome in seen] == [how] * 4
        assert {outcome.peer for outcome in seen} == {P, D}
        ticket.revoke()
        held.drop()
        assert {outcome.kind for outcome in await both(ticket, held)} == {how}
        side.giver.kv_cache_manager.deallocate_cache(side.theirs)
        await ticket.quiet(timeout_s=5)
        await eventually(lambda: used_nbytes(side.giver) == 0, "the memory is free")


async def test_tickets_both_ways(transport: str) -> None:
    """Two clusters that hold each other's tickets of the same number end them one by one."""
    async with side_of(transport, "read") as side:
        ours, theirs = side.pair.owner, side.pair.reader
        given = ours.offer_blocks(side.theirs, [1]), theirs.expect_blocks(side.ours, [2])
        held = await theirs.hold_ticket(given[0].token), await ours.hold_ticket(given[1].token)
        assert given[0].number == given[1].number
        held[0].drop()
        await side.pair.flush()
        assert (given[0].is_live, held[0].is_live, given[1].is_live, held[1].is_live) == (False, False, True, True)
        given[1].revoke()
        assert {outcome.kind for outcome in await both(given[1], held[1])} == {End.REVOKED}


@KINDS
async def test_revoked_while_it_is_claimed(transport: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that overtakes whoever claims, on the heels of the answer, is not missed: the claim fails."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1])
        link = link_to(side.giver, side.user.cluster_id)
        post = link.post

        def post_and_revoke(message: Any) -> None:
            post(message)
            if isinstance(message, Found):
                ticket.revoke()

        monkeypatch.setattr(link, "post", post_and_revoke)
        with pytest.raises(kv.TicketError, match="has ended: revoked"):
            await side.hold(ticket)
        await ticket.quiet(timeout_s=5)
        assert (await ticket.outcome(timeout_s=5)).kind is End.REVOKED
        assert side.theirs.is_quiet()


@KINDS
async def test_lost_while_it_is_claimed(transport: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that ends between the answer and its reader fails the claim: nothing is held for ever."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1])
        link = link_to(side.user, side.giver.cluster_id)
        ask = link.ask

        async def ask_and_lose(question: Any) -> Any:
            answer = await ask(question)
            link.lose(kv.LinkLostError("as when the cable is cut"))
            return answer

        monkeypatch.setattr(link, "ask", ask_and_lose)
        with pytest.raises(kv.LinkLostError, match="as when the cable is cut"):
            await side.hold(ticket)
        assert (await ticket.outcome(timeout_s=5)).kind is End.PEER_LOST


@KINDS
@every_loop
async def test_expired(transport: str, kind: str) -> None:
    """What nobody claims comes back within its lease and a second, once, with the cause; the token is refused then."""
    async with side_of(transport, kind) as side:
        started = time.perf_counter()
        tickets = [side.give([index, 8 + index], lease_s=0.05 + index / 100) for index in (2, 0, 1)]
        for ticket in tickets:
            outcome = await ticket.outcome(timeout_s=5)
            assert outcome.kind is End.EXPIRED
            assert "nobody claimed it within" in outcome.cause
            assert outcome.peer is None
        assert time.perf_counter() - started < 1.07
        with pytest.raises(kv.TicketError, match="has ended: expired"):
            await side.hold(tickets[0])


async def test_expired_after_others_have_ended(transport: str) -> None:
    """A ticket expires whatever the tickets before it, all of which have ended, would have waited for."""
    async with side_of(transport, "read") as side:
        first, second = side.give([1], lease_s=0.03), side.give([2], lease_s=0.1)
        second.revoke()
        assert (await first.outcome(timeout_s=5)).kind is End.EXPIRED
        third = side.give([3], lease_s=0.15)
        assert (await third.outcome(timeout_s=5)).kind is End.EXPIRED


@KINDS
async def test_closing_the_owner(transport: str, kind: str) -> None:
    """Closing the cluster that gave tickets ends them: those that nobody holds as revoked."""
    async with side_of(transport, kind) as side:
        open_ticket, ticket = side.give([3]), side.give([1])
        held = await side.hold(ticket)
        await side.giver.aclose()
        assert (await open_ticket.outcome(timeout_s=5)).kind is End.REVOKED
        for outcome in await both(ticket, held):
            assert outcome.kind is End.PEER_LOST


@KINDS
@every_loop
async def test_closing_the_owner_in_good_order(transport: str, kind: str) -> None:
    """What is moved when its owner closes in good order may end, and is DONE on both sides."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1])
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(side.move, ticket.token, [0, 1])
            await held_back.reached.wait()
            tasks.start_soon(side.giver.aclose)
            await eventually(lambda: not link_to(side.user, side.giver.cluster_id).is_open, "the goodbye has come")
            assert ticket.is_live
            held_back.release()
        assert (await ticket.outcome(timeout_s=5)).kind is End.DONE


# ---- revoking in the middle


async def test_revoke_during_a_pull(transport: str) -> None:
    """A reader in the middle never reports success with a newer byte: the ticket's own word tells; the cache lives."""
    async with side_of(transport, "read") as side:
        ticket = side.give([3, 1])
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refused_move, side, ticket)
            await held_back.reached.wait()
            ticket.revoke()
            assert (await ticket.outcome(timeout_s=5)).kind is End.REVOKED
            held_back.release()
        assert side.ours.is_quiet()


async def _refused_move(side: Side, ticket: kv.Ticket) -> None:
    with pytest.raises(kv.TicketError, match=r"ticket . of cluster . ended.* while its blocks were moved") as caught:
        await side.move(ticket.token, [0, 1])
    assert (caught.value.phase, caught.value.peer) == ("settle", side.giver.cluster_id)


async def test_revoke_during_a_push(transport: str) -> None:
    """The outcome is REVOKED at once; the blocks are quiet, and the memory free, only when the writer has stopped."""
    async with side_of(transport, "fill") as side:
        ticket = side.give([3, 1])
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refused_move, side, ticket)
            await held_back.reached.wait()
            ticket.revoke()
            assert (await ticket.outcome(timeout_s=5)).kind is End.REVOKED
            await side.pair.flush()
            assert not side.theirs.is_quiet([3])
            assert side.theirs.is_quiet([2])
            with pytest.raises(kv.TransferTimeoutError):
                await ticket.quiet(timeout_s=0.01)
            side.giver.kv_cache_manager.deallocate_cache(side.theirs)
            assert used_nbytes(side.giver) == CACHE_NBYTES
            held_back.release()
            await ticket.quiet(timeout_s=5)
        assert side.theirs.is_quiet()
        assert used_nbytes(side.giver) == 0


async def test_a_revoked_ticket_is_not_written_into(transport: str) -> None:
    """The writer looks at the ticket's word before it puts: nothing moves after a revocation it has not heard of."""
    async with side_of(transport, "fill") as side:
        other = stamped(side.theirs, D)
        ticket = side.give([3])
        held = await side.hold(ticket)
        ticket.revoke()
        assert held.is_live  # the message is on its way; nothing has been awaited since
        with pytest.raises(kv.TicketError):
            await side.move(held, [0])
        expect(side.theirs.tensors, other)


# ---- cancellation and failure


@KINDS
async def test_a_failed_bare_call_fails_the_ticket(transport: str, kind: str) -> None:
    """A bare token whose call fails, or is cancelled, has FAILED at its owner, with the cause; nothing stays held."""
    async with side_of(transport, kind) as side:
        wrong = side.give([3, 1])
        with pytest.raises(kv.ParameterError):
            await side.move(wrong.token, [0, 1, 2])
        outcome = await wrong.outcome(timeout_s=5)
        assert outcome.kind is End.FAILED
        assert "2 blocks" in outcome.cause or "3 blocks" in outcome.cause
        ticket = side.give([3, 1])
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(side.move, ticket.token, [0, 1])
            await held_back.reached.wait()
            tasks.cancel_scope.cancel()
        assert (await ticket.outcome(timeout_s=5)).kind is End.FAILED
        await ticket.quiet(timeout_s=5)
        assert side.theirs.is_quiet()
        assert side.ours.is_quiet()


@KINDS
async def test_a_failed_movement_leaves_a_held_ticket_held(transport: str, kind: str) -> None:
    """A held ticket survives a movement that runs out of time, which can be tried again."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1])
        held = await side.hold(ticket)
        held_back = side.stop_at_bytes()
        with pytest.raises(kv.TransferTimeoutError):
            await side.move(held, [0, 1], timeout_s=0.05)
        assert ticket.is_live
        held_back.release()
        await side.move(held, [0, 1])
        side.expect([0, 1], [3, 1])
        assert {outcome.kind for outcome in await both(ticket, held)} == {End.DONE}


@KINDS
async def test_a_claim_that_is_given_up_is_given_back(transport: str, kind: str) -> None:
    """A claim that is cancelled on its way may have been granted: the ticket comes back all the same."""
    async with side_of(transport, kind) as side:
        ticket = side.give([3, 1])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(side.hold, ticket)
            await anyio.lowlevel.checkpoint()  # the claim is posted, and the answer cannot be there
            tasks.cancel_scope.cancel()
        assert (await ticket.outcome(timeout_s=5)).kind is End.DROPPED
        await ticket.quiet(timeout_s=5)
        assert side.theirs.is_quiet()


async def test_each_block_is_filled_once(transport: str) -> None:
    """Filling what is filled, or being filled, is refused: what the receiver was told is in place stays as it is."""
    async with side_of(transport, "fill") as side:
        ticket = side.give([3, 1])
        held = await side.hold(ticket)
        await side.move(held, [0, 1], layers=range(1))
        with pytest.raises(kv.TicketError, match="fills each block once"):
            await side.move(held, [5, 5], layers=range(2))
        held_back = side.stop_at_bytes()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(side.move, held, [0, 1], None, range(1, 2))
            await held_back.reached.wait()
            with pytest.raises(kv.TicketError, match="fills each block once"):
                await side.move(held, [5], [1], range(1, 2))
            held_back.release()
        side.expect([0, 1], [3, 1])
        assert {outcome.kind for outcome in await both(ticket, held)} == {End.DONE}


async def test_a_bare_token_fills_layer_by_layer(transport: str) -> None:
    """Pushes by the same token continue each other, also at the same time; the last missing layer seals."""
    async with side_of(transport, "fill") as side:
        ticket = side.give([3, 1])
        async with anyio.create_task_group() as tasks:
            for layer in range(2):
                tasks.start_soon(side.move, ticket.token, [0, 1], None, range(layer, layer + 1))
        side.expect([0, 1], [3, 1])
        for layer in range(2):
            await ticket.layer(layer, timeout_s=5)
        assert (await ticket.outcome(timeout_s=5)).kind is End.DONE


async def test_a_skipped_layer_cannot_be_sealed(transport: str) -> None:
    """Sealing without a layer raises at the sender and is FAILED at the receiver, whose wait for that layer fails."""
    async with side_of(transport, "fill") as side:
        ticket = side.give([3, 1])
        held = await side.hold(ticket)
        await side.move(held, [0, 1], layers=range(1))
        await ticket.layer(0, timeout_s=5)
        with pytest.raises(kv.TicketError, match="sealed without tensors 2, 3"):
            held.seal()
        with pytest.raises(kv.TicketError, match=r"ended without layer 1: failed"):
            await ticket.layer(1, timeout_s=5)
        await ticket.layer(0, timeout_s=5)
        assert {outcome.kind for outcome in await both(ticket, held)} == {End.FAILED}


async def test_done_is_not_believed_without_the_bytes(transport: str) -> None:
    """A writer that says DONE without having filled everything has FAILED at the owner."""
    async with side_of(transport, "fill") as side:
        ticket = side.give([3])
        held = await side.hold(ticket)
        held.end(End.DONE, "")
        outcome = await ticket.outcome(timeout_s=5)
        assert (outcome.kind, outcome.cause) == (End.FAILED, "sealed without tensors [0, 1, 2] ...")


# ---- layer by layer while it is computed


async def test_layerwise_by_ticket(transport: str) -> None:
    """`transfer_cache_async` fills tickets: each receiver awaits its layers, and DONE after the last one."""
    async with side_of(transport, "fill") as side:
        tickets = [side.give([3, 1]), side.give([8, 9])]
        gate = LayerGate(1)
        task = side.user.kv_cache_manager.transfer_cache_async(
            side.ours, gate, [kv.TransferWithTicketConfig(each.token) for each in tickets], [5, 6]
        )
        for ticket in tickets:
            await ticket.layer(0, timeout_s=5)
            assert ticket.is_live
        gate.open(2)
        assert await task == [kv.StatusCode.LLM_SUCCESS] * 2
        for ticket, blocks in zip(tickets, ([3, 1], [8, 9]), strict=True):
            assert await ticket.outcome(timeout_s=5) == (End.DONE, "", P)
            side.expect([5, 6], blocks)


async def test_layerwise_by_ticket_into_other_layers(transport: str) -> None:
    """Layers may go to others, and blocks to some of the ticket's: what is missing then keeps the ticket held."""
    async with side_of(transport, "fill") as side:
        ticket = side.give([3, 1])
        config = kv.TransferWithTicketConfig(ticket.token, range(1), range(1, 2))
        await side.user.kv_cache_manager.transfer_cache_async(side.ours, LayerGate(2), [config], [5], [1])
        expect(side.theirs.tensors[2:], side.stamp, [1], src_blocks=[5])
        assert ticket.is_live
        await side.move(ticket.token, [5], [1], range(1))
        await side.move(ticket.token, [6], [3])
        side.expect([6], [3])
        assert (await ticket.outcome(timeout_s=5)).kind is End.DONE


async def test_an_aborted_layerwise_push_reaches_the_receiver(transport: str) -> None:
    """A push that gives up fails the ticket with its cause; whoever awaits a layer that will not come is told."""
    async with side_of(transport, "fill") as side:
        ticket, spoiled = side.give([3, 1]), side.give([2])
        gate = LayerGate(1)
        task = side.user.kv_cache_manager.transfer_cache_async(
            side.ours, gate, [kv.TransferWithTicketConfig(ticket.token.decode())], [5, 6]
        )
        await ticket.layer(0, timeout_s=5)
        gate.open(1, is_good=False)
        with pytest.raises(kv.TicketError, match=r"ended without layer 1: failed .*gave up on layer 1"):
            await ticket.layer(1, timeout_s=5)
        with pytest.raises(kv.ParameterError):
            await task
        await ticket.quiet(timeout_s=5)
        config = kv.TransferWithTicketConfig(spoiled.token)
        with pytest.raises(kv.ParameterError):
            await side.user.kv_cache_manager.transfer_cache_async(side.ours, LayerGate(0), [config], [5, 6])
        assert (await spoiled.outcome(timeout_s=5)).kind is End.FAILED


# ---- memory


async def test_deallocate_under_a_ticket_for_reading(transport: str) -> None:
    """The memory stays, whole, until the ticket has ended; then it is free at once."""
    async with side_of(transport, "read") as side:
        ticket, unclaimed = side.give([3, 1]), side.give([2], lease_s=0.3)
        held = await side.hold(ticket)
        side.giver.kv_cache_manager.deallocate_cache(side.theirs)
        assert used_nbytes(side.giver) == CACHE_NBYTES
        await side.move(held, [0, 1])
        side.expect([0, 1], [3, 1])
        assert (await unclaimed.outcome(timeout_s=5)).kind is End.EXPIRED
        assert used_nbytes(side.giver) == 0


async def test_deallocate_under_a_ticket_for_filling(transport: str) -> None:
    """The ticket is revoked with that cause, also while it is held."""
    async with side_of(transport, "fill") as side:
        ticket, unclaimed = side.give([3, 1]), side.give([2])
        held = await side.hold(ticket)
        side.giver.kv_cache_manager.deallocate_cache(side.theirs)
        for outcome in (*await both(ticket, held), await unclaimed.outcome(timeout_s=5)):
            assert outcome[:2] == (End.REVOKED, "its cache was deallocated")
        await ticket.quiet(timeout_s=5)
        assert used_nbytes(side.giver) == 0


async def test_unregistering_revokes(transport: str) -> None:
    """Registered memory is its user's at once: a reader in the middle fails, whatever it reads from then on."""
    async with linked_pair(transport, roles=MIX) as pair:
        buffers = [bytearray(DESC.tensor_nbytes) for _ in range(DESC.num_tensors)]
        cache, into = pair.owner.register_blocks_cache(DESC, buffers), pair.reader.allocate_blocks_cache(DESC)
        ticket = pair.owner.offer_blocks(cache, [3, 1])
        held_back = hold(pair.decoder, P, "get")
        async with anyio.create_task_group() as tasks:

            async def pull() -> None:
                with pytest.raises(kv.TicketError, match="ended"):
                    await pair.reader.pull_blocks(ticket.token, into, [], [0, 1])

            tasks.start_soon(pull)
            await held_back.reached.wait()
            pair.owner.unregister_cache(cache)
            held_back.release()
        assert await ticket.outcome(timeout_s=5) == (End.REVOKED, "its cache was deallocated", D)


# ---- tokens


@KINDS
async def test_tokens_that_are_refused(transport: str, kind: str) -> None:
    """Truncated, damaged, foreign and used tokens are refused before a byte moves, most of them without asking."""
    async with side_of(transport, kind) as side:
        before = [tensor.tobytes() for tensor in side.theirs.tensors + side.ours.tensors]
        ticket = side.give([3, 1])
        held = await side.hold(ticket)
        good = parse_token(ticket.token)
        link = link_to(side.user, side.giver.cluster_id)
        sent = link.stats.messages_sent
        text = ticket.token.decode()
        for token in ("", text[:-1], text + "A", text[:-1] + "=", text.swapcase(), "\N{SNOWMAN}" * 72):
            with pytest.raises(kv.TicketError, match="no token"):
                await side.move(token, [0, 1])
        with pytest.raises(kv.TicketError, match="earlier life"):
            await side.move(good._replace(incarnation=b"x" * 16).encode(), [0, 1])
        with pytest.raises(kv.NotLinkedError):
            await side.move(good._replace(cluster_id=77).encode(), [0, 1])
        assert link.stats.messages_sent == sent
        forged = [good._replace(secret=b"s" * 16), good._replace(number=99), good._replace(number=2**64 - 1)]
        for each in forged:
            with pytest.raises(kv.TicketError, match="is not known here"):
                await side.move(each.encode(), [0, 1])
        with pytest.raises(kv.TicketError, match="is not known here"):
            await side.user.kv_cache_manager.hold_ticket(good._replace(is_write=not good.is_write).encode())
        async with cluster(3, kv.Role.MIX) as third:
            await link_clusters(third, side.giver.cluster_id, side.giver.address, transport)
            with pytest.raises(kv.TicketError, match=f"held by cluster {side.user.cluster_id} already"):
                await third.kv_cache_manager.hold_ticket(ticket.token)
        assert ticket.is_live
        assert held.is_live
        assert [tensor.tobytes() for tensor in side.theirs.tensors + side.ours.tensors] == before


async def test_nonsense_in_answer_to_a_claim(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that describes an impossible ticket is refused before anything is kept, and gets its ticket back."""
    async with side_of(transport, "read") as side:
        link = link_to(side.user, side.giver.cluster_id)
        ask = link.ask
        for changes in (
            {"blocks": ()},
            {"blocks": (NUM,)},
            {"blocks": (1, 1)},
            {"num_tensors": 2**40},
            {"num_tensors": -1},
        ):

            async def lie(question: Any, changes: dict[str, Any] = changes) -> Any:
                answer = await ask(question)
                assert isinstance(answer, Found)
                geometry = {key: value for key, value in changes.items() if key != "blocks"}
                blocks = changes.get("blocks", answer.blocks)
                return msgspec.structs.replace(
                    answer, blocks=blocks, geometry=msgspec.structs.replace(answer.geometry, **geometry)
                )

            monkeypatch.setattr(link, "ask", lie)
            ticket = side.give([3, 1])
            with pytest.raises(kv.ProtocolError):
                await side.hold(ticket)
            assert (await ticket.outcome(timeout_s=5)).kind is End.DROPPED


async def test_bad_tokens_delay_nobody(transport: str) -> None:
    """A good pull amid 1,000 forged claims and 10,000 damaged tokens takes about as long as they would, not longer."""
    async with side_of(transport, "read") as side:
        good = parse_token(side.give([3]).token)
        forged = good._replace(secret=b"s" * 16).encode()

        async def refuse(token: bytes) -> None:
            with pytest.raises(kv.TicketError):
                await side.move(token, [5])

        async with anyio.create_task_group() as tasks:
            for _ in range(1000):
                tasks.start_soon(refuse, forged)
            started = time.perf_counter()
            await side.move(good.encode(), [0])
            took_s = time.perf_counter() - started
        assert took_s < 5
        started = time.perf_counter()
        for _ in range(1000):
            await refuse(forged[:-2] + b"AA")
        assert time.perf_counter() - started < 2


def test_a_token_shows_no_secret() -> None:
    """Neither a token's value nor a ticket's says the secret when it is printed."""
    token = Token(False, 1, b"i" * 16, 5, b"secret!!secret!!")
    assert "secret" not in repr(token)
    assert parse_token(token.encode()) == token


# ---- peers that die, stop, and restart


async def test_killed_holder(transport: str) -> None:
    """The tickets of a holder that is killed are PEER_LOST at once, for reading and for filling, and quiet."""
    async with owner_in_child(transport) as stage:
        cache = stage.reader.allocate_blocks_cache(DESC)
        tickets = [stage.reader.offer_blocks(cache, [1]), stage.reader.expect_blocks(cache, [2, 3])]
        for ticket in tickets:
            await stage.owner.call("hold", token=ticket.token.decode())
        assert not cache.is_quiet([3])
        started = time.perf_counter()
        stage.process().kill()
        for ticket in tickets:
            outcome = await ticket.outcome(timeout_s=5)
            assert (outcome.kind, outcome.peer) == (End.PEER_LOST, P)
            await ticket.quiet(timeout_s=5)
        assert time.perf_counter() - started < 1
        assert cache.is_quiet()
        stage.reader.deallocate_cache(cache)
        assert used_nbytes(stage.decoder) == 0


async def test_killed_owner(transport: str) -> None:
    """A holder whose tickets' owner is killed learns it once; what it would move with them fails."""
    async with owner_in_child(transport) as stage:
        into = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        tokens = [
            await stage.owner.call("offer", cache=cache, blocks=[7 + is_write], is_write=is_write)
            for is_write in (False, True)
        ]
        held = [await stage.reader.hold_ticket(token) for token in tokens]
        stage.process().kill()
        for each in held:
            assert (await each.outcome(timeout_s=5)).kind is End.PEER_LOST
        with pytest.raises(kv.TicketError, match="ended: peer lost"):
            await stage.reader.pull_blocks(held[0], into, [], [0])
        with pytest.raises(kv.NotLinkedError):
            await stage.reader.pull_blocks(tokens[0], into, [], [0])


async def test_stopped_holder(transport: str) -> None:
    """A holder that is silent for its lease and the liveness limit has lost its tickets; its writes stay fenced off.

    A process that is stopped still has the memory mapped: the blocks that it may fill are not quiet until it is dead.
    """
    async with owner_in_child(transport, liveness_s=0.3) as stage:
        cache = stage.reader.allocate_blocks_cache(DESC)
        reading = stage.reader.offer_blocks(cache, [1], lease_s=0.3)
        filling = stage.reader.expect_blocks(cache, [2], lease_s=0.3)
        for ticket in (reading, filling):
            await stage.owner.call("hold", token=ticket.token.decode())
        started = time.perf_counter()
        stage.process().stop()
        for ticket in (reading, filling):
            assert (await ticket.outcome(timeout_s=5)).kind is End.PEER_LOST
        assert time.perf_counter() - started < 1.3
        assert not cache.is_quiet([2])
        assert cache.is_quiet([1])
        stage.process().kill()
        await filling.quiet(timeout_s=5)
        assert cache.is_quiet()


async def test_busy_holder(transport: str) -> None:
    """A holder whose loop is held up again and again for most of the limit keeps its tickets, past their leases."""
    async with owner_in_child(transport, liveness_s=1.0) as stage:
        cache = stage.reader.allocate_blocks_cache(DESC)
        ticket = stage.reader.offer_blocks(cache, [1], lease_s=0.2)
        await stage.owner.call("hold", token=ticket.token.decode())
        for seconds in (0.8, 0.75):
            await stage.owner.call("block_loop", seconds=seconds)
            assert ticket.is_live
        await anyio.sleep(0.3)  # past what it would have had without an answer
        assert ticket.is_live


async def test_hundreds_of_held_tickets_cost_nothing(transport: str) -> None:
    """Tickets outlive their lease while they are held, with no more messages than the link has anyway."""
    async with side_of(transport, "read", liveness_s=0.4) as side:
        tickets, held = [], []
        for index in range(300):
            tickets.append(side.give([index % NUM], lease_s=0.4))
            held.append(await side.hold(tickets[-1]))
        link = link_to(side.user, side.giver.cluster_id)
        before = link.stats.messages_sent + link.stats.messages_received
        await anyio.sleep(1.2)
        messages = link.stats.messages_sent + link.stats.messages_received - before
        assert messages < 100, "a question a lease and liveness limit, and its answer, whatever the number of tickets"
        assert all(ticket.is_live for ticket in tickets)
        for each in held:
            each.drop()
        for ticket in tickets:
            assert (await ticket.outcome(timeout_s=5)).kind is End.DROPPED


async def test_a_restarted_owner_refuses_what_it_gave_before(transport: str) -> None:
    """The token of an owner's earlier life is refused, and names that; the new life's is served."""
    async with owner_in_child(transport) as stage:
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        old = await stage.owner.call("offer", cache=cache, blocks=[7])
        into = stage.reader.allocate_blocks_cache(DESC)
        stage.process().kill()
        async with owner_in_child(transport, life=2, here=stage.decoder) as again:
            with pytest.raises(kv.TicketError, match="of an earlier life of cluster 1"):
                await stage.reader.pull_blocks(old, into, [], [0])
            cache = await again.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
            new = await again.owner.call("offer", cache=cache, blocks=[7])
            await stage.reader.pull_blocks(new, into, [], [0])
            expect(into.tensors, again.owner.stamp(cache), [0], src_blocks=[7])
