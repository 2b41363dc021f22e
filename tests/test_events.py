"""What a cluster tells of its links: every change once, to every listener, and nothing to nobody."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import TypeVar

import anyio
import pytest

import kvlink as kv
from kvlink.links.events import LinkEventStream
from tests.support.loops import asyncio_and_trio, eventually, every_loop
from tests.support.peer import spawn_peer

_T = TypeVar("_T")


def mix(cluster_id: int) -> kv.Cluster:
    """Return a small MIX."""
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.MIX, pool="1MiB")


async def next_of(stream: AsyncIterator[_T]) -> _T:
    """Return the next item, bounded."""
    with anyio.fail_after(10):
        return await stream.__anext__()


async def take(events: LinkEventStream, *kinds: type) -> list[kv.LinkChange]:
    """Return the next events, which must be of these kinds, in this order."""
    taken = [await next_of(events) for _ in kinds]
    assert [type(event) for event in taken] == list(kinds), taken
    return taken


async def is_silent(events: LinkEventStream) -> None:
    """Check that nothing more has happened."""
    with anyio.move_on_after(0.05) as scope:
        event = await events.__anext__()
    assert scope.cancelled_caught, event


@every_loop
async def test_both_sides_hear_of_a_link_once_each() -> None:
    """Whoever dialled: one LinkUp and one LinkLost on each side, to each of several listeners, with peer and cause."""
    async with mix(1) as one, mix(2) as two, one.events() as here, one.events() as beside, two.events() as there:
        (await two.link_clusters([kv.ClusterInfo(1, one.address)])).raise_for_status()
        (up,) = await take(here, kv.LinkUp)
        assert up == kv.LinkUp(2, two.incarnation, is_dialled=False)
        assert await take(beside, kv.LinkUp) == [up]
        assert await take(there, kv.LinkUp) == [kv.LinkUp(1, one.incarnation, is_dialled=True)]
        (await one.unlink_clusters([2])).raise_for_status()
        (lost,) = await take(here, kv.LinkLost)
        assert isinstance(lost, kv.LinkLost)
        assert (lost.peer, lost.incarnation) == (2, two.incarnation)
        assert isinstance(lost.cause, kv.NotLinkedError)
        assert await take(beside, kv.LinkLost) == [lost]
        (theirs,) = await take(there, kv.LinkLost)
        assert isinstance(theirs, kv.LinkLost)
        assert "unlinked" in str(theirs.cause)
        for events in (here, beside, there):
            await is_silent(events)


@asyncio_and_trio
async def test_death_on_an_idle_link_is_one_event_and_others_do_not_notice() -> None:
    """The killed peer's link is lost with a cause that names it; the other link has no event and works on."""
    async with spawn_peer(11, pool="1MiB") as victim, spawn_peer(12, pool="1MiB") as other, mix(2) as here:
        (await here.link_clusters([victim.info, other.info])).raise_for_status()
        async with here.events() as events:
            victim.kill()
            (lost,) = await take(events, kv.LinkLost)
            assert isinstance(lost, kv.LinkLost)
            assert lost.peer == 11
            assert isinstance(lost.cause, kv.LinkLostError)
            assert "cluster 11" in str(lost.cause)
            await is_silent(events)
        (await here.check_link_status(12)).raise_for_status()


async def test_a_restart_is_told_before_the_new_life_is_up() -> None:
    """Lost, restarted with both incarnations, up: also where the peer dials, and nobody had noticed its death."""
    async with mix(1) as here, here.events() as events:
        async with spawn_peer(2, "DECODER", pool="1MiB") as peer:
            await peer.call("link", clusters=[(1, here.address)])
            (up,) = await take(events, kv.LinkUp)
            peer.kill()
        async with spawn_peer(2, "DECODER", pool="1MiB", life=2) as peer:
            await peer.call("link", clusters=[(1, here.address)])
            _, restarted, again = await take(events, kv.LinkLost, kv.PeerRestarted, kv.LinkUp)
            assert isinstance(restarted, kv.PeerRestarted)
            assert isinstance(up, kv.LinkUp)
            assert isinstance(again, kv.LinkUp)
            assert restarted == kv.PeerRestarted(2, up.incarnation, again.incarnation)
            await peer.call("unlink", clusters=[1])
            await peer.call("link", clusters=[(1, here.address)])
            await take(events, kv.LinkLost, kv.LinkUp)  # the same life again is no restart


async def test_a_listener_that_does_not_read_misses_the_oldest_and_counts_them() -> None:
    """Its queue is bounded; the newest events are what is left, and another listener has all."""
    async with mix(1) as one, mix(2) as two, one.events(max_waiting=3) as slow, one.events() as quick:
        for _ in range(4):
            (await two.link_clusters([kv.ClusterInfo(1, one.address)])).raise_for_status()
            (await two.unlink_clusters([1])).raise_for_status()
            await eventually(lambda: not one.links, "the link gone")
        assert slow.num_missed == 5
        await take(slow, kv.LinkLost, kv.LinkUp, kv.LinkLost)
        await is_silent(slow)
        assert quick.num_missed == 0
        await take(quick, *[kv.LinkUp, kv.LinkLost] * 4)
        with pytest.raises(kv.ParameterError):
            one.events(max_waiting=0)


@every_loop
async def test_listening_ends_with_the_cluster_and_a_cancelled_wait_loses_nothing() -> None:
    """What has happened by then can still be taken; a listener that was closed, or forgotten, gets nothing."""
    async with mix(2) as two:
        async with mix(1) as one:
            events, closed, forgotten = one.events(), one.events(), one.events()
            with anyio.move_on_after(0.01):
                await events.__anext__()
            await closed.aclose()
            await closed.aclose()
            (await two.link_clusters([kv.ClusterInfo(1, one.address)])).raise_for_status()
            hub = one._open_links().events
            assert len(hub._listeners) == 3
            del forgotten
            gc.collect()
            assert len(hub._listeners) == 2
        heard = [type(event) async for event in events]
        assert heard == [kv.LinkUp, kv.LinkLost]
        assert [event async for event in closed] == []
        with pytest.raises(kv.ClosedError):
            one.events()


@every_loop
async def test_two_tasks_that_take_from_one_stream_both_end_with_it() -> None:
    """Each event goes to one of them, and neither sleeps through the end."""
    stream, taken = LinkEventStream(10), list[int]()

    async def take() -> None:
        taken.extend([event.peer async for event in stream])

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            tasks.start_soon(take)
            await anyio.wait_all_tasks_blocked()
            stream.put(kv.LinkUp(7, bytes(16), True))
            stream.end()
    assert taken == [7]
