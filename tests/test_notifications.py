"""Notifications: behind the bytes, in order, at most once, bounded, and in nobody's way."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import kvlink as kv
from kvlink.links.notifications import WINDOW, NotificationStream
from kvlink.wire import Credit, Failed, Notify
from tests.support import inside
from tests.support.loops import asyncio_and_trio, eventually, every_loop
from tests.support.pair import pair
from tests.support.pattern import Stamp, expect, fill
from tests.support.peer import spawn_peer
from tests.support.stranger import Stranger, hello

DESC = kv.CacheDesc(2, (8, 4096), "uint8")


def mix(cluster_id: int, **config: Any) -> kv.Cluster:
    """Return a small MIX."""
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.MIX, pool="1MiB", config=kv.ClusterConfig(**config))


@asynccontextmanager
async def linked(**config: Any) -> AsyncIterator[tuple[kv.Cluster, kv.Cluster]]:
    """Run clusters 1 and 2 of this process, linked; the settings are those of 1."""
    async with mix(1, **config) as one, mix(2) as two:
        (await two.link_clusters([kv.ClusterInfo(1, one.address)])).raise_for_status()
        await eventually(lambda: one.links, "the other half")
        yield one, two


async def take(stream: NotificationStream, num: int) -> list[bytes]:
    """Take that many payloads, bounded."""
    with anyio.fail_after(10):
        return [(await stream.__anext__()).payload for _ in range(num)]


async def is_silent(cluster: kv.Cluster) -> None:
    """Check that nothing waits."""
    with anyio.move_on_after(0.05) as scope:
        late = await cluster.notifications().__anext__()
    assert scope.cancelled_caught, late


# What arrives


@every_loop
async def test_payloads_arrive_in_the_order_of_the_calls_with_their_sender() -> None:
    """200 of many callers, far more than fit at once, while they are taken; both directions; each exactly once."""
    async with linked() as (one, two):
        num = 200
        async with anyio.create_task_group() as tasks:
            for index in range(num):
                tasks.start_soon(two.notify, 1, f"{index}".encode())
                await anyio.lowlevel.checkpoint()  # so that the calls have an order
            assert await take(one.notifications(), num) == [f"{index}".encode() for index in range(num)]
        await is_silent(one)
        await one.notify(2, bytearray(b"back"))
        async with two.notifications() as stream:
            notification = await stream.__anext__()
        assert notification == kv.Notification(1, one.incarnation, b"back")


async def test_a_notification_comes_after_the_bytes_that_were_pushed() -> None:
    """Whoever has taken it sees every byte of the push, between processes, a hundred times."""
    async with mix(1) as here, spawn_peer(2, "MIX", pool="4MiB") as peer:
        await peer.call("link", clusters=[(1, here.address)])
        cache = here.kv_cache_manager.allocate_blocks_cache(DESC)
        handle = await peer.call("allocate_blocks", num_tensors=2, shape=[8, 4096])
        stamps = [[2, 1, number] for number in range(1, 101)]
        blocks = list(range(8))
        pushing = peer.start(
            "push_with_notice", peer=1, cache_id=cache.cache_id, cache=handle, blocks=blocks, stamps=stamps[:1]
        )
        async for notification in here.notifications():
            stamp = json.loads(notification.payload)
            assert stamp == stamps[0]
            expect(cache.tensors, Stamp(*stamp), blocks)
            await pushing.result()
            del stamps[0]
            if not stamps:
                break
            pushing = peer.start(
                "push_with_notice", peer=1, cache_id=cache.cache_id, cache=handle, blocks=blocks, stamps=stamps[:1]
            )
        here.kv_cache_manager.deallocate_cache(cache)


@asyncio_and_trio
async def test_every_movement_notifies_when_it_has_ended_well_and_only_then() -> None:
    """Pulls and pushes of both kinds, and a ticket: one each, in order; none of a movement that fails."""
    async with linked() as (one, two):
        owner, reader = one.kv_cache_manager, two.kv_cache_manager
        paged = owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        slots = owner.allocate_cache(DESC, [kv.CacheKey(1, 7)])
        cache = reader.allocate_blocks_cache(DESC)
        fill(paged.tensors, Stamp(1, 1, 1))
        by_id = kv.CacheKeyByIdAndIndex(1, slots.cache_id, 2)
        for failing in (
            reader.pull_blocks(kv.BlocksCacheKey(1, 99), cache, [0], [0], notify=b"no such cache"),
            reader.pull_blocks(kv.BlocksCacheKey(1), cache, [99], [0], notify=b"no such block"),
            reader.pull_cache(kv.CacheKey(1, 8), cache, notify=b"no such key"),
            reader.push_blocks(kv.BlocksCacheKey(1, 99), cache, [0], [0], notify=b"no such cache"),
            reader.pull_blocks(kv.BlocksCacheKey(3), cache, [0], [0], notify=b"no such cluster"),
        ):
            with pytest.raises(kv.KVLinkError) as caught:
                await failing
            assert caught.value.phase != "notify"
        report = await reader.pull_blocks(kv.BlocksCacheKey(1), cache, [1, 2], [3, 4], notify=b"1")
        assert report.done == (3, 4)
        expect(cache.tensors, Stamp(1, 1, 1), [3, 4], src_blocks=[1, 2])
        await reader.pull_blocks(kv.BlocksCacheKey(1), cache, [], [], notify=b"2")
        await reader.pull_cache(kv.CacheKey(1, 7), cache, notify=b"3")
        await reader.push_blocks(kv.BlocksCacheKey(1), cache, [0], [0], notify=b"4")
        await reader.push_cache(by_id, cache, notify=b"5")
        ticket = owner.offer_blocks(paged, [5])
        await reader.pull_blocks(ticket.token, cache, [], [0], notify=b"6")
        assert await take(one.notifications(), 6) == [b"1", b"2", b"3", b"4", b"5", b"6"]
        await is_silent(one)
        for manager, own in ((owner, paged), (owner, slots), (reader, cache)):
            manager.deallocate_cache(own)


async def test_what_cannot_be_sent_is_refused_before_any_byte_moves() -> None:
    """Text, too many bytes, no link: the argument is named and the destination is as it was."""
    async with pair() as p:
        for payload, kind in (("text", TypeError), (b"x" * 65537, kv.ParameterError)):
            with pytest.raises(kind, match="notification"):
                await p.pull(notify=payload)
            with pytest.raises(kind, match="notification"):
                await p.here.notify(1, payload)  # type: ignore[arg-type]  # what it is about
        with pytest.raises(kv.NotLinkedError):
            await p.here.notify(42, b"")
        p.expect_untouched()
        await p.here.notify(p.owner.info, b"x" * 65536)


# Back-pressure


@every_loop
async def test_a_receiver_that_does_not_look_stops_its_senders_and_nothing_else() -> None:
    """As many as fit are taken; the next call fails by its deadline and never arrives; pulls and questions go on."""
    async with linked() as (one, two):
        for index in range(WINDOW):
            await two.notify(1, b"%d" % index)
        with pytest.raises(kv.TransferTimeoutError, match="was not sent") as caught:
            await two.notify(1, b"never", timeout_s=0.05)
        assert (caught.value.peer, caught.value.phase) == (1, "notify")
        with anyio.move_on_after(0.05) as scope:
            await two.notify(1, b"cancelled")
        assert scope.cancelled_caught
        (await two.check_link_status(1)).raise_for_status()
        owned = one.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        cache = two.kv_cache_manager.allocate_blocks_cache(DESC)
        await two.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(1), cache, [0], [0])
        with pytest.raises(kv.TransferTimeoutError, match="all bytes are in place, but") as caught:
            await two.kv_cache_manager.pull_blocks(
                kv.BlocksCacheKey(1), cache, [0], [0], notify=b"never", timeout_s=0.05
            )
        assert caught.value.phase == "notify"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(two.notify, 1, b"late")
            assert await take(one.notifications(), WINDOW) == [b"%d" % index for index in range(WINDOW)]
        assert await take(one.notifications(), 1) == [b"late"]
        await is_silent(one)
        one.kv_cache_manager.deallocate_cache(owned)
        two.kv_cache_manager.deallocate_cache(cache)


async def test_all_links_together_are_bounded_too() -> None:
    """Beyond `max_notifications` senders are told that the receiver is busy, and not any more once some are taken."""
    async with linked(max_notifications=3) as (one, two):
        for _ in range(3):
            await two.notify(1, b"")
        for _ in range(2 * WINDOW):
            with pytest.raises(kv.KVLinkError, match="max_notifications") as caught:
                await two.notify(1, b"")
            assert caught.value.status is kv.StatusCode.LLM_LINK_BUSY
        await take(one.notifications(), 3)
        await two.notify(1, b"now")
        assert await take(one.notifications(), 1) == [b"now"]


async def test_a_hostile_sender_cannot_fill_the_receiver() -> None:
    """A payload that is too long is refused; more than the window without credit ends that link and no other."""
    async with mix(1, max_notification_nbytes=100) as here, mix(2) as other:
        (await other.link_clusters([kv.ClusterInfo(1, here.address)])).raise_for_status()

        def attack() -> None:
            with Stranger.dial(here.address) as stranger:
                stranger.link(1, hello(expects=1))
                stranger.say(Notify(1, b"x" * 101))
                credit, refusal = stranger.hear(), stranger.hear()
                assert credit == Credit(1)
                assert isinstance(refusal, Failed)
                assert "101 bytes" in refusal.text
                stranger.say(*[Notify(number, b"") for number in range(2, 3 + WINDOW)])
                stranger.hear_end()

        await anyio.to_thread.run_sync(attack)
        await eventually(lambda: [link.peer for link in here.links] == [2], "the other link alone")
        await other.notify(1, b"fine")
        assert await take(here.notifications(), WINDOW + 1) == [b""] * WINDOW + [b"fine"]


# Ends


@asyncio_and_trio
async def test_a_stopped_receiver_costs_the_deadline_and_a_dead_one_fails_at_once() -> None:
    """Stopped: it may still arrive, the error says so, and it does, once. Killed: LinkLostError, for waiters too."""
    async with mix(1) as here, spawn_peer(2, "DECODER", pool="1MiB") as peer:
        await peer.call("link", clusters=[(1, here.address)])
        await eventually(lambda: here.links, "our half")
        peer.stop()
        with pytest.raises(kv.TransferTimeoutError, match="may still arrive"):
            await here.notify(2, b"slow", timeout_s=0.05)
        peer.cont()
        await here.notify(2, b"second")
        assert await peer.call("take_notifications", num=2) == [[1, "slow"], [1, "second"]]
        peer.stop()
        failures: list[kv.KVLinkError] = []

        async def notify() -> None:
            with pytest.raises(kv.KVLinkError) as caught:
                await here.notify(2, b"")
            failures.append(caught.value)

        async with anyio.create_task_group() as tasks:
            for _ in range(WINDOW + 5):
                tasks.start_soon(notify)
            await eventually(lambda: inside.link_to(here, 2).num_operations == WINDOW + 5, "the calls")
            peer.kill()
        assert {type(failure) for failure in failures} == {kv.LinkLostError}
        assert {failure.peer for failure in failures} == {2}


@every_loop
async def test_taking_ends_with_the_cluster_and_a_cancelled_wait_loses_nothing() -> None:
    """What was acknowledged can be taken after the sender has gone, and after this cluster was closed."""
    async with mix(1) as one:
        stream = one.notifications()
        with anyio.move_on_after(0.01):
            await stream.__anext__()
        async with mix(2) as two:
            (await two.link_clusters([kv.ClusterInfo(1, one.address)])).raise_for_status()
            for number in range(3):
                await two.notify(1, b"%d" % number)
        beside = one.notifications()
        assert await take(beside, 1) == [b"0"]
        await beside.aclose()
        assert [each async for each in beside] == []
    assert [each.payload async for each in stream] == [b"1", b"2"]
    with pytest.raises(kv.ClosedError):
        one.notifications()
    with pytest.raises(kv.ClosedError):
        await one.notify(2, os.urandom(1))
