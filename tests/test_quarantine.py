"""Memory that a lost peer may still write into: it is known, named, used for nothing else, and it comes back."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import kvlink as kv
from kvlink.checks import Tensors
from kvlink.geometry import CacheGeometry
from kvlink.links.grants import WriteGrants
from kvlink.transfers.staging import stage
from kvlink.transports.base import Capabilities
from kvlink.transports.pidfd import PidfdWatch
from kvlink.transports.shm_endpoint import ShmEndpoint
from kvlink.wire import CloseWrite, Found, Message, Target
from tests.support import inside
from tests.support.loops import asyncio_and_trio, eventually, every_loop
from tests.support.pair import RUBBISH, SLOW
from tests.support.pattern import Stamp, expect, fill, rows
from tests.support.peer import Peer, spawn_peer

DESC = kv.CacheDesc(4, (256, 4096), "uint8")
BLOCKS = list(range(256))
SUCCESS = kv.StatusCode.LLM_SUCCESS


def mix(cluster_id: int, pool: str = "6MiB", **config: Any) -> kv.Cluster:
    """Return a MIX with room for one cache of `DESC`, and not for two."""
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.MIX, pool=pool, config=kv.ClusterConfig(**config))


@asynccontextmanager
async def written_into(**config: Any) -> AsyncIterator[tuple[kv.Cluster, Peer, kv.KvCache]]:
    """Run cluster 1 here, whose cache a child has written into; the child stands still, and its link is cut."""
    async with mix(1, **config) as here, spawn_peer(2, "MIX", pool="6MiB") as writer:
        cache = here.kv_cache_manager.allocate_blocks_cache(DESC)
        fill(cache.tensors, RUBBISH)
        assert await writer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
        handle = await writer.call("allocate_blocks", num_tensors=4, shape=[256, 4096])
        await writer.call("push_by_id", peer=1, cache_id=cache.cache_id, cache=handle, blocks=BLOCKS)
        expect(cache.tensors, writer.stamp(handle))
        assert cache.is_quiet()
        writer.stop()
        (await here.unlink_clusters([2], force=True)).raise_for_status()
        yield here, writer, cache
        if cache.is_valid:
            here.kv_cache_manager.deallocate_cache(cache)
        if writer.is_alive:
            writer.cont()


def differs(row: NDArray[np.uint8], before: int) -> bool:
    """Whether something has been written into a row of bytes."""
    return int(row[2]) != before


def num_waiting(cluster: kv.Cluster) -> int:
    """Return how many caches have ended and keep their memory."""
    return cluster.kv_cache_manager.pool_usage().num_waiting


@pytest.mark.parametrize("how", ["link again", "die"])
@asyncio_and_trio
async def test_what_a_lost_writer_may_write_into_is_kept_until_it_cannot(how: str) -> None:
    """Not quiet, counted, named by the error of who wants the memory; back at once when the writer links or dies."""
    async with written_into() as (here, writer, cache):
        manager = here.kv_cache_manager
        assert not cache.is_quiet()
        assert not cache.is_quiet([3])
        assert manager.pool_usage().quarantined == {2: 1}
        manager.deallocate_cache(cache)
        assert not cache.is_quiet()
        assert num_waiting(here) == 1
        with pytest.raises(kv.OutOfMemoryError, match="quarantine, because clusters 2 may still write"):
            manager.allocate_blocks_cache(DESC)
        if how == "die":
            writer.kill()
        else:
            writer.cont()
            assert await writer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
        await eventually(lambda: cache.is_quiet(), "quiet")
        assert manager.pool_usage().quarantined == {}
        manager.deallocate_cache(manager.allocate_blocks_cache(DESC))


async def test_a_live_cache_comes_out_of_quarantine_too() -> None:
    """It was in use all the while; after the writer has linked again it is quiet and can be written again."""
    async with written_into() as (here, writer, cache):
        writer.cont()
        for _ in range(3):
            assert await writer.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
            assert cache.is_quiet()
            await writer.call("push_by_id", peer=1, cache_id=cache.cache_id, cache=1, blocks=[0])
            await writer.call("unlink", clusters=[1], force=True)
            await eventually(lambda: not here.links, "the link gone")
            assert not cache.is_quiet()
        assert len(inside.server(here)._watching) == 1


async def test_where_death_cannot_be_seen_closing_our_end_must_be_proof_or_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transport whose closed endpoint lets nothing through frees the memory; any other keeps it, whatever happens."""
    monkeypatch.setattr(ShmEndpoint, "watch_death", lambda self: PidfdWatch(None))
    for is_fenced in (True, False):
        capabilities = Capabilities(is_one_sided=True, is_same_host=False, is_fenced_by_close=is_fenced)
        monkeypatch.setattr(ShmEndpoint, "capabilities", capabilities)
        async with written_into() as (here, writer, cache):
            if is_fenced:
                await eventually(cache.is_quiet, "quiet")
            else:
                writer.kill()
                await anyio.sleep(0.1)
                assert not cache.is_quiet()
                assert here.kv_cache_manager.pool_usage().quarantined == {2: 1}
                assert here.confirm_death(3) == 0
                assert not cache.is_quiet()
                assert here.confirm_death(2) == 1  # whoever has killed it knows
                assert cache.is_quiet()
                assert here.kv_cache_manager.pool_usage().quarantined == {}
                assert here.confirm_death(2) == 0


async def test_a_restarted_peer_does_not_hide_that_its_earlier_life_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new process is linked already, perhaps by itself: what the one before may write into can still be freed."""
    monkeypatch.setattr(ShmEndpoint, "watch_death", lambda self: PidfdWatch(None))
    monkeypatch.setattr(ShmEndpoint, "capabilities", Capabilities(is_one_sided=True, is_same_host=False))
    async with written_into() as (here, writer, cache):
        writer.kill()
        async with spawn_peer(2, "MIX", pool="6MiB", life=2) as restarted:
            assert await restarted.call("link", clusters=[(1, here.address)]) == ["LLM_SUCCESS"]
            handle = await restarted.call("allocate_blocks", num_tensors=4, shape=[256, 4096])
            await restarted.call("push_by_id", peer=1, cache_id=cache.cache_id, cache=handle, blocks=[0])
            assert not cache.is_quiet()
            assert here.confirm_death(2) == 1
            assert cache.is_quiet()
            assert inside.num_write_leases(here) == 1  # of the one that lives
            with pytest.raises(kv.LinkExistsError):
                here.confirm_death(2)


async def test_a_peer_that_is_linked_is_not_dead() -> None:
    """Whoever says so is told, and what it may write into stays its own."""
    async with mix(1) as here, mix(2) as there:
        (await there.link_clusters([kv.ClusterInfo(1, here.address)])).raise_for_status()
        for cluster in (2, kv.ClusterInfo(2, there.address)):
            with pytest.raises(kv.LinkExistsError, match="cluster 2 is linked"):
                here.confirm_death(cluster)
    with pytest.raises(kv.ClosedError):
        here.confirm_death(2)


@pytest.mark.parametrize("dialler", ["the writer", "the owner"])
@every_loop
async def test_no_new_link_while_something_is_written_over_the_old_one(dialler: str) -> None:
    """A put that has not ended keeps the two from linking, and the owner's memory in quarantine, until it has."""
    async with mix(1) as owner, mix(2) as writer:
        cache = owner.kv_cache_manager.allocate_blocks_cache(DESC)
        source = writer.kv_cache_manager.allocate_blocks_cache(DESC)
        info = kv.ClusterInfo(1, owner.address)
        (await writer.link_clusters([info])).raise_for_status()
        key = kv.CacheKeyByIdAndIndex(1, cache.cache_id)
        await writer.kv_cache_manager.push_blocks(key, source, [0], [0])
        old = inside.link_to(writer, 1)
        again = (writer, info) if dialler == "the writer" else (owner, kv.ClusterInfo(2, writer.address))
        with old.grants.stoppable(anyio.CancelScope()):  # a put in the hands of hardware
            (await owner.unlink_clusters([2], force=True)).raise_for_status()
            assert not cache.is_quiet()
            await eventually(lambda: not writer.links, "the writer's half gone")
            (result,) = (await again[0].link_clusters([again[1]], timeout_s=0.2)).results
            assert result.status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
            assert not cache.is_quiet()
        (await again[0].link_clusters([again[1]], timeout_s=5)).raise_for_status()
        await eventually(lambda: cache.is_quiet(), "quiet")
        await writer.kv_cache_manager.push_blocks(key, source, [0], [0])
        writer.kv_cache_manager.deallocate_cache(source)
        owner.kv_cache_manager.deallocate_cache(cache)


async def test_hanging_up_is_no_proof_while_something_is_written() -> None:
    """An orderly unlink whose other side has a put in flight: it is not hung up on, and the memory is in quarantine."""
    async with mix(1) as owner, mix(2, close_timeout_s=0.05) as writer:
        cache = owner.kv_cache_manager.allocate_blocks_cache(DESC)
        source = writer.kv_cache_manager.allocate_blocks_cache(DESC)
        (await writer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        key = kv.CacheKeyByIdAndIndex(1, cache.cache_id)
        await writer.kv_cache_manager.push_blocks(key, source, [0], [0])
        link = inside.link_to(writer, 1)
        link.begin()
        with link.grants.stoppable(anyio.CancelScope()):  # a put in the hands of hardware
            (result,) = (await owner.unlink_clusters([2], timeout_s=0.3)).results
            assert result.status is kv.StatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
            assert link.state is kv.LinkState.CLOSED
            assert not cache.is_quiet()
            assert not link.closed.is_set()
        link.end()
        with anyio.fail_after(5):
            await link.closed.wait()
        (await writer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        await eventually(cache.is_quiet, "quiet")
        writer.kv_cache_manager.deallocate_cache(source)
        owner.kv_cache_manager.deallocate_cache(cache)


@every_loop
async def test_a_push_stops_with_its_link() -> None:
    """It does not run to its end over a link that is gone: a typed error within a chunk or so, then no byte more."""
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    async with mix(1, "33MiB") as owner, mix(2, "33MiB", **SLOW) as writer:
        cache = owner.kv_cache_manager.allocate_blocks_cache(desc)
        source = writer.kv_cache_manager.allocate_blocks_cache(desc)
        fill(cache.tensors, RUBBISH)
        (await writer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        first = rows(cache.tensors[0])[0]
        before = int(first[2])
        blocks = list(range(1024))

        async def push() -> None:
            key = kv.CacheKeyByIdAndIndex(1, cache.cache_id)
            with pytest.raises((kv.NotLinkedError, kv.LinkLostError)):
                await writer.kv_cache_manager.push_blocks(key, source, blocks, blocks)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push)
            await eventually(lambda: first[2] != before, "the push's first bytes")
            (await writer.unlink_clusters([1], force=True)).raise_for_status()
        after = [tensor.copy() for tensor in cache.tensors]
        expect(cache.tensors[-1:], RUBBISH, [1023], src_tensor=7)
        await anyio.sleep(0.01)
        assert all(np.array_equal(now, then) for now, then in zip(cache.tensors, after, strict=True))
        writer.kv_cache_manager.deallocate_cache(source)
        owner.kv_cache_manager.deallocate_cache(cache)


async def test_no_late_byte_lands_in_the_next_cache() -> None:
    """Links cut in mid-push, memory given back, writers that link again at once: the next cache keeps its own bytes."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    num_rounds = 200 if os.environ.get("KVLINK_STRESS") == "1" else 4
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    blocks = list(range(1024))
    config = {**SLOW, "relink_min_s": 0.002, "relink_max_s": 0.01}
    async with mix(1, "33MiB") as here, spawn_peer(2, "MIX", pool="33MiB", config=config) as writer:
        manager = here.kv_cache_manager
        source = await writer.call("allocate_blocks", num_tensors=8, shape=[1024, 4096])
        cache = manager.allocate_blocks_cache(desc)
        await writer.call("link", clusters=[(1, here.address)], relink=True)
        for number in range(num_rounds):
            own = Stamp(1, 1, number)
            fill(cache.tensors, own)
            await eventually(lambda: here.links, "the link")
            pushing = writer.start("push_by_id", peer=1, cache_id=cache.cache_id, cache=source, blocks=blocks)
            first = rows(cache.tensors[0])[0]
            before = int(first[2])
            await eventually(partial(differs, first, before), "the push's first bytes")
            del first
            await anyio.sleep(chance.random() * 0.01)
            (await here.unlink_clusters([2], force=True)).raise_for_status()
            manager.deallocate_cache(cache)
            await eventually(lambda: not num_waiting(here), "the memory back")
            cache = manager.allocate_blocks_cache(desc)
            fill(cache.tensors, own)
            with suppress(kv.KVLinkError):  # or it was done before the link was cut
                await pushing.result()
            expect(cache.tensors, own)
            assert cache.is_quiet()
        manager.deallocate_cache(cache)


async def test_a_room_that_is_written_into_is_kept_as_well() -> None:
    """A detour's room in the owner's pool outlives the link of its writer, until the writer cannot write any more."""
    async with mix(1) as owner, mix(2) as writer:
        cache = owner.kv_cache_manager.register_blocks_cache(DESC, [np.zeros(2**20, np.uint8) for _ in range(4)])
        (await writer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        target = Target("id", cache.cache_id)
        for is_write in (False, True):
            await stage(inside.link_to(writer, 1), target, [1, 2], Tensors(0, 4), 4096, is_write=is_write)
            assert inside.used_nbytes(owner) == 4 * 2 * 4096
            (await owner.unlink_clusters([2], force=True)).raise_for_status()
            assert owner.kv_cache_manager.pool_usage().quarantined == ({2: 1} if is_write else {})
            assert inside.used_nbytes(owner) == (4 * 2 * 4096 if is_write else 0)
            await eventually(lambda: not writer.links, "the writer's half gone")
            (await writer.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
            await eventually(lambda: not inside.used_nbytes(owner), "the room back")
        owner.kv_cache_manager.unregister_cache(cache)


def test_a_recall_that_overtakes_its_asker_is_kept() -> None:
    """The lease went back before whoever asked for it had its turn: it must not be written under any more."""
    posted: list[Message] = []
    grants = WriteGrants(posted.append)
    grants.recall(7)
    assert posted == [CloseWrite(7)]
    geometry = CacheGeometry(1, 1, 1, "uint8", None, True, ())
    found = Found(seq=1, cache_id=1, slot=0, geometry=geometry, word=0, generation=1, lease=7)
    grant = grants.add(found)
    assert grant.is_recalled
    grants.name(Target("id", 1), grant)
    assert grants.get(Target("id", 1)) is None
    assert posted == [CloseWrite(7)]


# Liveness where the operating system cannot help


async def test_silence_ends_a_link_to_another_host_and_a_busy_loop_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped peer is lost within the limit, with a cause that says so; one that is busy for less is not."""
    monkeypatch.setattr(ShmEndpoint, "capabilities", Capabilities(is_one_sided=True, is_same_host=False))
    async with mix(1, liveness_s=0.8) as here, spawn_peer(2, "MIX", pool="1MiB") as peer, here.events() as events:
        (await here.link_clusters([peer.info])).raise_for_status()
        await events.__anext__()
        await peer.call("block_loop", seconds=0.4)
        assert [link.peer for link in here.links] == [2]
        started = anyio.current_time()
        peer.stop()
        with anyio.fail_after(5):
            lost = await events.__anext__()
        assert isinstance(lost, kv.LinkLost)
        assert "nothing was heard from cluster 2 for 0.8 s" in str(lost.cause)
        assert anyio.current_time() - started < 1.6  # the limit, and the wait between two looks
        peer.cont()
