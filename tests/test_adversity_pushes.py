"""Pushes, layer-wise pushes and registered memory when the peer dies, stops, or the call is cancelled at any await."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import kvlink as kv
from tests.support import inside
from tests.support.loops import asyncio_and_trio, eventually
from tests.support.pair import RUBBISH, SLOW, Pair, pair
from tests.support.pattern import Stamp, expect, fill
from tests.support.peer import spawn_peer

BIG: Final = kv.CacheDesc(8, (1024, 4096), "uint8")
"""32 MiB: with `SLOW` a movement of it takes long enough to do something in its middle."""


class Layers(kv.LayerSynchronizer):
    """All layers are there."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


async def push(p: Pair) -> object:
    """Push everything into the owner's cache."""
    return await p.manager.push_blocks(p.key, p.cache, p.blocks, p.blocks, timeout_s=20)


async def push_layers(p: Pair) -> object:
    """Push everything, layer by layer."""
    config = kv.TransferWithCacheKeyConfig(p.key, range(4), range(4))
    return await p.manager.transfer_cache_async(p.cache, Layers(), [config], p.blocks, p.blocks)


PUSHES: Final[dict[str, Callable[[Pair], Awaitable[object]]]] = {"push": push, "layers": push_layers}


async def attempt(call: Awaitable[object], outcome: list[object]) -> None:
    """Note what a call returned or raised."""
    try:
        outcome.append(await call)
    except kv.KVLinkError as exc:
        outcome.append(exc)


# The peer dies and stops


@pytest.mark.parametrize("kind", PUSHES)
async def test_the_receiver_is_killed_in_mid_push(kind: str) -> None:
    """The push ends soon and typed, its memory is quiet, and the link is gone."""
    async with pair(BIG, role="MIX", config=SLOW, here_role=kv.Role.MIX) as p:
        await p.manager.push_blocks(p.key, p.cache, [0], [0])
        link, outcome = p.link, list[object]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt, PUSHES[kind](p), outcome)
            await eventually(lambda: not p.cache.is_quiet(), "the push")
            await anyio.sleep(0.002)
            p.owner.kill()
        if isinstance(outcome[0], kv.KVLinkError):
            assert isinstance(outcome[0], (kv.LinkLostError, kv.NotLinkedError)), outcome
            assert outcome[0].peer == 1
        with anyio.fail_after(5):
            await link.closed.wait()
        assert p.cache.is_quiet()
        with pytest.raises((kv.NotLinkedError, kv.LinkLostError)):
            await PUSHES[kind](p)


@pytest.mark.parametrize("kind", PUSHES)
async def test_a_stopped_receiver_does_not_stop_a_push(kind: str) -> None:
    """Once the lease is there nobody needs the receiver's process: every byte arrives while it stands still."""
    async with pair(BIG, role="MIX", config=SLOW, here_role=kv.Role.MIX) as p:
        await p.manager.push_blocks(p.key, p.cache, [0], [0])
        p.owner.stop()
        await PUSHES[kind](p)
        p.owner.cont()
        assert await p.owner.call("faults", cache=p.handle, stamp=list(RUBBISH)) is None


async def test_a_receiver_that_must_be_asked_and_stands_still() -> None:
    """The first push has a question; unanswered it is a time-out of the look-up, and nothing was written."""
    async with pair(role="MIX", here_role=kv.Role.MIX) as p:
        p.owner.stop()
        with pytest.raises(kv.TransferTimeoutError) as caught:
            await p.manager.push_blocks(p.key, p.cache, [0], [0], timeout_s=0.2)
        assert (caught.value.peer, caught.value.phase) == (1, "look-up")
        p.owner.cont()
        assert await p.owner.call("faults", cache=p.handle, stamp=list(p.stamp)) is None
        await p.manager.push_blocks(p.key, p.cache, [0], [0])


@pytest.mark.parametrize("fate", ["killed", "stopped"])
async def test_registered_memory_of_a_peer_that_is(fate: str) -> None:
    """A pull out of memory that the owner registered: every byte of a stopped owner, a typed error of a dead one."""
    async with AsyncExitStack() as stack:
        owner = await stack.enter_async_context(
            spawn_peer(1, pool="1MiB", python=("-W", "error", "-m", "tests.spec.harness"))
        )
        handle = await owner.call("register_blocks", num_tensors=8, shape=[512, 4096], model_id=0)
        config = kv.ClusterConfig(**SLOW)
        here = await stack.enter_async_context(
            kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="32MiB", config=config)
        )
        (await here.link_clusters([owner.info])).raise_for_status()
        manager = here.kv_cache_manager
        cache = manager.allocate_blocks_cache(kv.CacheDesc(8, (512, 4096), "uint8"))
        fill(cache.tensors, RUBBISH)
        key, blocks = kv.BlocksCacheKey(1, 0), list(range(512))
        await manager.pull_blocks(key, cache, [0], [0])
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt, manager.pull_blocks(key, cache, blocks, blocks, timeout_s=20), outcome)
            await eventually(lambda: not cache.is_quiet(), "the pull")
            await anyio.sleep(0.001)
            owner.stop()
            if fate == "killed":
                owner.kill()
        if isinstance(outcome[0], kv.TransferReport):
            expect(cache.tensors, owner.stamp(handle))
        else:
            assert fate == "killed"
            assert isinstance(outcome[0], (kv.LinkLostError, kv.CacheNotFoundError)), outcome
            assert outcome[0].peer == 1
        assert cache.is_quiet()
        manager.deallocate_cache(cache)
        if fate == "stopped":
            owner.cont()


# Cancelled at each await


class Both(NamedTuple):
    """Two clusters of this process, linked, with what they move."""

    owner: kv.Cluster
    here: kv.Cluster
    ours: kv.KvCache

    @property
    def manager(self) -> kv.KvCacheManager:
        """Of the one that pulls and pushes."""
        return self.here.kv_cache_manager


SMALL: Final = kv.CacheDesc(4, (16, 4096), "uint8")
OWNED: Final = Stamp(1, 1, 1)


@asynccontextmanager
async def both(**config: Any) -> AsyncIterator[Both]:
    """Set it up."""
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(50))
        owner = await stack.enter_async_context(kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="2MiB"))
        here = await stack.enter_async_context(
            kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="2MiB", config=kv.ClusterConfig(**config))
        )
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        yield Both(owner, here, here.kv_cache_manager.allocate_blocks_cache(SMALL))


async def cancelled_after(num_turns: int, call: Callable[[], Awaitable[object]]) -> bool:
    """Cancel a call after so many turns of the loop; return whether it was over before."""
    has_ended = False

    async def run(scope: anyio.CancelScope) -> None:
        nonlocal has_ended
        with scope:
            await call()
            has_ended = True

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(run, scope)
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        scope.cancel()
    return has_ended


ALL: Final = list(range(0, 16, 2))


async def do_pull(b: Both) -> None:
    """Pull blocks of a cache that nobody has looked up yet."""
    await b.manager.pull_blocks(kv.BlocksCacheKey(1), b.ours, ALL, ALL)


async def do_push(b: Both) -> None:
    """Push blocks into it."""
    await b.manager.push_blocks(kv.BlocksCacheKey(1), b.ours, ALL, ALL)


async def do_layers(b: Both) -> None:
    """Push two layers into it."""
    config = kv.TransferWithCacheKeyConfig(kv.BlocksCacheKey(1), range(2), range(2))
    task = b.manager.transfer_cache_async(b.ours, Layers(), [config], ALL, ALL)
    try:
        await task
    finally:
        task.cancel()
        with anyio.CancelScope(shield=True):
            assert await task.synchronize(10) is not kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT


MOVES: Final = {"pull": do_pull, "push": do_push, "layers": do_layers}


@pytest.mark.parametrize("memory", ["pool", "registered"])
@pytest.mark.parametrize("move", MOVES)
@asyncio_and_trio
async def test_cancelled_at_each_await(move: str, memory: str) -> None:
    """Wherever it is cancelled: nothing moves afterwards, nothing is held, and the next call does it all."""
    async with both(inline_nbytes=0, chunk_nbytes=4096) as b:
        owners = b.owner.kv_cache_manager
        link, back = inside.link_to(b.here, 1), inside.link_to(b.owner, 2)
        num_turns, num_over = 0, 0
        while num_over < 3:
            # A new cache each time, so that each time there is a question to be answered.
            if memory == "pool":
                theirs = owners.allocate_blocks_cache(SMALL, kv.BlocksCacheKey(1))
            else:
                buffers = [np.empty(SMALL.tensor_nbytes, np.uint8) for _ in range(SMALL.num_tensors)]
                theirs = owners.register_blocks_cache(SMALL, buffers, kv.BlocksCacheKey(1))
            fill(theirs.tensors, OWNED)
            fill(b.ours.tensors, RUBBISH)
            num_over += await cancelled_after(num_turns, lambda: MOVES[move](b))
            assert b.ours.is_quiet()
            assert link.num_operations == 0
            before = [tensor.tobytes() for tensor in (*theirs.tensors, *b.ours.tensors)]
            await link.ping()
            await back.ping()
            assert before == [tensor.tobytes() for tensor in (*theirs.tensors, *b.ours.tensors)]
            await MOVES[move](b)
            expect(*((b.ours.tensors, OWNED, ALL) if move == "pull" else (theirs.tensors, RUBBISH, ALL)))
            if memory == "pool":
                owners.deallocate_cache(theirs)
            else:
                owners.unregister_cache(theirs)
            await back.ping()  # leases are recalled, and given back, before the answer
            await link.ping()
            assert inside.used_nbytes(b.owner) == 0
            assert inside.num_write_leases(b.owner) == 0
            num_turns += 1
            assert num_turns < 400
        assert num_turns > 4
