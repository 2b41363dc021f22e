"""Peers that die, stop, hang, restart and free their memory in the middle of things."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray

import kvlink as kv
from tests.support import inside
from tests.support.loops import asyncio_and_trio, asyncio_and_uvloop, eventually, every_loop, until
from tests.support.pair import RUBBISH, SLOW, Pair, pair
from tests.support.pattern import expect, fill, read_stamp, rows
from tests.support.peer import spawn_peer

BIG = kv.CacheDesc(8, (1024, 4096), "uint8")
"""32 MiB: with `SLOW` a pull of it takes long enough to do something in its middle."""


def snapshot(cache: kv.KvCache) -> NDArray[np.uint8]:
    """Return a copy of every byte of a cache."""
    return np.stack([rows(tensor) for tensor in cache.tensors])


async def attempt(p: Pair, outcome: list[Any], **options: Any) -> None:
    """Pull everything and note the report or the error."""
    try:
        outcome.append(await p.pull(**options))
    except kv.KVLinkError as exc:
        outcome.append(exc)


# The owner frees its memory


@pytest.mark.stress
@pytest.mark.parametrize("chunks", ["inline", "threads"])
async def test_a_pull_never_takes_a_newer_caches_bytes_for_the_old_ones(chunks: str) -> None:
    """The owner frees and refills the same memory at random: right bytes of one cache, or CacheNotFoundError."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    # Inline: one large copy on the loop. Threads: many chunks, the owner's changes fall in between.
    config = {"inline_nbytes": 2**30} if chunks == "inline" else SLOW
    async with pair(kv.CacheDesc(8, (256, 4096), "uint8"), config=config, pool="16MiB") as p:
        await p.owner.call("deallocate", cache=p.handle)
        churning = p.owner.start(
            "churn",
            num_tensors=8,
            shape=list(p.desc.shape),
            model_id=0,
            seed=seed,
            pause_s=0.012 if chunks == "inline" else 0.3,
        )
        num_right = num_gone = 0
        last = p.handle
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline or not (num_right and num_gone):
            assert time.monotonic() < deadline + 20, f"{num_right} pulls succeeded and {num_gone} failed"
            try:
                await p.pull(timeout_s=10)
            except kv.CacheNotFoundError:
                num_gone += 1
            else:
                stamp = read_stamp(p.cache.tensors[0], 0)
                expect(p.cache.tensors, stamp)
                assert stamp[:2] == (1, 1)
                assert stamp.cache >= last, "an older cache than before"
                last = stamp.cache
                num_right += 1
        await p.owner.call("stop_churning")
        rounds = await churning.result()
        print(f"{rounds} caches, {num_right} pulls right, {num_gone} refused")


async def test_a_lease_keeps_the_memory_until_the_reader_has_done() -> None:
    """`deallocate_cache` under a leased read: the memory is not reused before the read has ended, then it is free."""
    async with spawn_peer(1, pool="40MiB") as owner:
        handle = await owner.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[7])
        async with kv.Cluster(
            cluster_id=2, role=kv.Role.DECODER, pool="40MiB", config=kv.ClusterConfig(**SLOW)
        ) as here:
            (await here.link_clusters([owner.info])).raise_for_status()
            manager = here.kv_cache_manager
            cache = manager.allocate_cache(kv.CacheDesc(4, (1, 2**23), "uint8"))
            fill(cache.tensors, RUBBISH)
            outcome: list[Any] = []

            async def pull() -> None:
                try:
                    outcome.append(await manager.pull_cache(kv.CacheKey(1, 7), cache))
                except kv.CacheNotFoundError as exc:
                    outcome.append(exc)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pull)
                first = rows(cache.tensors[0])[0]
                before = int(first[2])
                await eventually(lambda: first[2] != before, "the pull's first bytes")
                await owner.call("remove_key", request=7)
                await owner.call("deallocate", cache=handle)
                with pytest.raises(kv.OutOfMemoryError):  # all of the pool is still held
                    await owner.call("allocate_blocks", num_tensors=1, shape=[4, 2**22])
                assert not outcome, "the pull was over before the test had begun"
            # The bytes that the pull has brought are right in any case; whether it may say so is another test's matter.
            expect(cache.tensors, owner.stamp(handle))
            await until(partial(owner.call, "usage"), lambda usage: not usage["pool_nbytes"], within_s=5)
            await owner.call("allocate_blocks", num_tensors=4, shape=[2, 2**22])
            manager.deallocate_cache(cache)


async def test_a_leased_read_that_outlives_its_cache_succeeds() -> None:
    """The lease is there so that a pull under way does not fail because the owner lets go: it ends with its bytes."""
    async with spawn_peer(1, pool="40MiB") as owner:
        handle = await owner.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[7])
        async with kv.Cluster(
            cluster_id=2, role=kv.Role.DECODER, pool="40MiB", config=kv.ClusterConfig(**SLOW)
        ) as here:
            (await here.link_clusters([owner.info])).raise_for_status()
            manager = here.kv_cache_manager
            cache = manager.allocate_cache(kv.CacheDesc(4, (1, 2**23), "uint8"))
            fill(cache.tensors, RUBBISH)
            first = rows(cache.tensors[0])[0]
            before = int(first[2])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(manager.pull_cache, kv.CacheKey(1, 7), cache)
                await eventually(lambda: first[2] != before, "the pull's first bytes")
                await owner.call("remove_key", request=7)
                await owner.call("deallocate", cache=handle)
            expect(cache.tensors, owner.stamp(handle))
            manager.deallocate_cache(cache)


# The owner dies, stops, hangs


@every_loop
async def test_the_owner_is_killed_during_a_pull() -> None:
    """The pull ends at once, with every byte or a typed error; the link is gone, and nothing moves afterwards."""
    async with pair(BIG, config=SLOW) as p:
        await p.warm_up()
        link = p.link
        outcome: list[Any] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt, p, outcome)
            await p.is_moving()
            p.owner.kill()
        if isinstance(outcome[0], kv.TransferReport):
            p.expect_all()
        else:
            assert isinstance(outcome[0], (kv.LinkLostError, kv.CacheNotFoundError)), outcome
            assert outcome[0].peer == 1
        with anyio.fail_after(5):
            await link.closed.wait()
        assert p.cache.is_quiet()
        before = snapshot(p.cache)
        with pytest.raises((kv.NotLinkedError, kv.LinkLostError)):
            await p.pull()
        assert np.array_equal(before, snapshot(p.cache))


@asyncio_and_uvloop
async def test_the_owner_is_killed_between_pulls() -> None:
    """The next pull is a typed error that names the cluster, never bytes of the dead one."""
    async with pair() as p:
        await p.warm_up()
        link = p.link
        p.owner.kill()
        with anyio.fail_after(5):
            await link.closed.wait()
        with pytest.raises((kv.NotLinkedError, kv.LinkLostError), match="cluster 1"):
            await p.pull()
        p.expect_untouched()


@asyncio_and_trio
async def test_the_owner_is_killed_while_it_is_being_asked() -> None:
    """A look-up that nobody will answer ends as soon as the owner is dead, long before its deadline."""
    async with pair() as p:
        p.owner.stop()
        outcome: list[Any] = []
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt, p, outcome)
            await eventually(lambda: p.link.num_operations == 1, "the pull")
            p.owner.kill()
        assert isinstance(outcome[0], kv.LinkLostError)
        assert outcome[0].peer == 1
        assert time.monotonic() - started < 10
        p.expect_untouched()


@every_loop
async def test_a_stopped_owner_does_not_stop_a_pull() -> None:
    """SIGSTOP in mid-pull, and before one: both complete with every byte, for nobody needs the owner's process."""
    async with pair(BIG, config=SLOW) as p:
        await p.warm_up()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.pull)
            await p.is_moving()
            p.owner.stop()
        p.expect_all()
        fill(p.cache.tensors, RUBBISH)
        await p.pull()
        p.expect_all()
        p.owner.cont()


async def test_a_stopped_owner_that_must_be_asked_costs_the_deadline() -> None:
    """The first pull of a cache has a question; unanswered, it is a time-out that says so, and nothing has changed."""
    async with pair() as p:
        p.owner.stop()
        started = time.monotonic()
        with pytest.raises(kv.TransferTimeoutError) as caught:
            await p.pull(timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 5
        assert (caught.value.peer, caught.value.phase) == (1, "look-up")
        p.expect_untouched()
        p.owner.cont()
        await p.pull()
        p.expect_all()


async def test_an_owner_whose_loop_is_blocked_serves_all_the_same() -> None:
    """Its loop sleeps for 3 s; a hundred pulls are done long before that."""
    async with pair() as p:
        await p.warm_up()
        blocked = p.owner.start("block_loop", seconds=3.0)
        started = time.monotonic()
        for _ in range(100):
            await p.pull()
        took_s = time.monotonic() - started
        p.expect_all()
        await blocked.result()
        assert took_s < 2
        assert time.monotonic() - started > took_s, "the loop was not blocked"


# The puller dies


async def test_a_puller_killed_in_mid_pull_leaves_the_key_usable() -> None:
    """The lease comes back, the key can be pulled by the next one, and then the memory is free."""
    desc = kv.CacheDesc(4, (1, 2**23), "uint8")
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="40MiB") as owner:
        manager = owner.kv_cache_manager
        cache = manager.allocate_cache(desc, [kv.CacheKey(1, 7)])
        fill(cache.tensors, RUBBISH)
        for life in (1, 2):
            async with spawn_peer(2, "DECODER", pool="40MiB", life=life, config=SLOW) as puller:
                await puller.call("link", clusters=[(1, owner.address)])
                handle = await puller.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[], is_filled=False)
                puller.start("pull_cache", peer=1, request=7, cache=handle)
                await eventually(lambda: inside.num_read_leases(owner) == 1, "the lease")
                puller.kill()
                await eventually(lambda: inside.num_read_leases(owner) == 0, "the lease back")
        manager.deallocate_cache(cache)
        assert inside.used_nbytes(owner) == desc.nbytes, "the key still holds it"
        async with spawn_peer(2, "DECODER", pool="40MiB", life=3) as puller:
            await puller.call("link", clusters=[(1, owner.address)])
            handle = await puller.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[], is_filled=False)
            report = await puller.call("pull_cache", peer=1, request=7, cache=handle)
            assert report["nbytes"] == desc.nbytes
            assert await puller.call("faults", cache=handle, stamp=list(RUBBISH)) is None
            await eventually(lambda: inside.used_nbytes(owner) == 0, "the memory back")
            await puller.call("deallocate", cache=handle)


async def test_a_puller_killed_after_the_owner_let_go_frees_the_memory() -> None:
    """Key removed and cache deallocated during a leased read: the reader's death gives the memory back."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="40MiB") as owner:
        manager = owner.kv_cache_manager
        cache = manager.allocate_cache(kv.CacheDesc(4, (1, 2**23), "uint8"), [kv.CacheKey(1, 7)])
        async with spawn_peer(2, "DECODER", pool="40MiB", config=SLOW) as puller:
            await puller.call("link", clusters=[(1, owner.address)])
            handle = await puller.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[], is_filled=False)
            puller.start("pull_cache", peer=1, request=7, cache=handle)
            await eventually(lambda: inside.num_read_leases(owner) == 1, "the lease")
            puller.stop()
            manager.remove_cache_key(kv.CacheKey(1, 7))
            manager.deallocate_cache(cache)
            assert inside.used_nbytes(owner) > 0
            puller.kill()
            await eventually(lambda: inside.used_nbytes(owner) == 0, "the memory back")


async def test_a_stopped_reader_does_not_hold_the_memory_for_ever() -> None:
    """A reader that stands still has the memory until its own deadline, and no longer."""
    config = kv.ClusterConfig(liveness_s=0.4)
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="40MiB", config=config) as owner:
        manager = owner.kv_cache_manager
        cache = manager.allocate_cache(kv.CacheDesc(4, (1, 2**23), "uint8"), [kv.CacheKey(1, 7)])
        async with spawn_peer(2, "DECODER", pool="40MiB", config=SLOW) as puller:
            await puller.call("link", clusters=[(1, owner.address)])
            handle = await puller.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[], is_filled=False)
            pulling = puller.start("pull_cache", peer=1, request=7, cache=handle, timeout_s=1.0)
            await eventually(lambda: inside.num_read_leases(owner) == 1, "the lease")
            puller.stop()
            manager.remove_cache_key(kv.CacheKey(1, 7))
            manager.deallocate_cache(cache)
            await eventually(lambda: inside.used_nbytes(owner) == 0, "the memory back")
            reused = manager.allocate_blocks_cache(kv.CacheDesc(4, (1, 2**23), "uint8"))
            fill(reused.tensors, RUBBISH)
            puller.cont()
            with pytest.raises((kv.CacheNotFoundError, kv.TransferTimeoutError)):
                await pulling.result()
            manager.deallocate_cache(reused)
            await puller.call("deallocate", cache=handle)


# Cancellation


@every_loop
async def test_a_cancelled_pull_is_quiet_when_it_has_ended() -> None:
    """Cancelled at random moments it ends soon; from then on no destination byte changes and `is_quiet` is true."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with pair(BIG, config={"inline_nbytes": 0, "chunk_nbytes": 65536}) as p:
        await p.warm_up()
        num_cancelled = 0
        for index in range(25):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(attempt, p, [])
                    await anyio.sleep(chance.random() * 0.004)
                    if index % 2:
                        assert not p.cache.is_quiet() or p.link.num_operations == 0
                    cancelled_at = time.monotonic()
                    scope.cancel()
            assert time.monotonic() - cancelled_at < 5
            assert p.cache.is_quiet()
            assert p.cache.is_quiet([0, 1])
            assert p.link.num_operations == 0
            num_cancelled += scope.cancelled_caught
            before = snapshot(p.cache)
            await anyio.sleep(0.005)
            assert np.array_equal(before, snapshot(p.cache))
        assert num_cancelled > 5
        await p.pull()
        p.expect_all()


@asyncio_and_trio
async def test_a_pull_with_a_tiny_deadline_is_quiet_when_it_has_ended() -> None:
    """`fail_after` around it, or its own `timeout_s`: a time-out, and nothing is written any more."""
    async with pair(BIG, config=SLOW) as p:
        await p.warm_up()

        async def pull_within() -> None:
            with anyio.fail_after(0.001):
                await p.pull()

        for index in range(6):
            with pytest.raises(TimeoutError):
                await (pull_within() if index % 2 else p.pull(timeout_s=0.001))
            assert p.cache.is_quiet()
            before = snapshot(p.cache)
            await anyio.sleep(0.005)
            assert np.array_equal(before, snapshot(p.cache))
        assert p.link.stats.failures == 6
        await p.pull()
        p.expect_all()


@every_loop
async def test_a_cancelled_look_up_leaves_nothing() -> None:
    """Cancelled while the owner is asked: prompt, quiet, and the answer that comes too late does no harm."""
    async with pair() as p:
        p.owner.stop()
        for _ in range(5):
            with anyio.move_on_after(0.01) as scope:
                await p.pull()
            assert scope.cancelled_caught
            assert p.cache.is_quiet()
        assert p.link.num_operations == 0
        p.owner.cont()
        p.expect_untouched()
        await p.pull()
        p.expect_all()


@asyncio_and_uvloop
async def test_a_cancelled_leased_pull_gives_its_lease_back() -> None:
    """Whether it is cancelled while asking or while moving, the owner's lease ends and the key can still be pulled."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with spawn_peer(1, pool="40MiB") as owner:
        handle = await owner.call("allocate", num_tensors=4, shape=[1, 2**23], requests=[7])
        async with kv.Cluster(
            cluster_id=2, role=kv.Role.DECODER, pool="40MiB", config=kv.ClusterConfig(**SLOW)
        ) as here:
            (await here.link_clusters([owner.info])).raise_for_status()
            manager = here.kv_cache_manager
            cache = manager.allocate_cache(kv.CacheDesc(4, (1, 2**23), "uint8"))
            # Sixty around the moment at which the answer comes, and some in the middle of the copy. With an offset, a
            # pull that was too fast to be cancelled does not take the key with it.
            for after_s in [*(chance.random() * 0.0015 for _ in range(60)), 0.004, 0.006, 0.008]:
                with anyio.move_on_after(after_s):
                    await manager.pull_cache(kv.CacheKey(1, 7), cache, src_cache_offset=0)
                assert cache.is_quiet()
            await until(partial(owner.call, "usage"), lambda usage: not usage["read_leases"], within_s=5)
            await manager.pull_cache(kv.CacheKey(1, 7), cache)
            expect(cache.tensors, owner.stamp(handle))
            manager.deallocate_cache(cache)
        await owner.call("deallocate", cache=handle)
        assert (await owner.call("usage"))["pool_nbytes"] == 0


@asyncio_and_uvloop
async def test_the_destination_is_deallocated_during_the_pull() -> None:
    """Its memory is not used for anything else before the pull has ended."""
    async with pair(BIG, config=SLOW, pool="40MiB") as p:
        await p.warm_up()
        outcome: list[Any] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt, p, outcome)
            await p.is_moving()
            p.manager.deallocate_cache(p.cache)
            assert not p.cache.is_quiet()
            assert inside.used_nbytes(p.here) == BIG.nbytes
            with pytest.raises(kv.OutOfMemoryError):
                p.manager.allocate_blocks_cache(BIG)
        assert outcome
        assert p.cache.is_quiet()
        assert inside.used_nbytes(p.here) == 0


# The loop and the processor


@asyncio_and_uvloop
async def test_the_loop_stays_free_during_a_large_pull() -> None:
    """While 512 MiB move, a task that wants to run every millisecond runs again and again."""
    desc = kv.CacheDesc(64, (128, 65536), "uint8")
    async with pair(desc, pool="513MiB") as p:
        num_ticks = 0

        async def tick() -> None:
            nonlocal num_ticks
            while True:
                await anyio.sleep(0.001)
                num_ticks += 1

        await p.pull([0], [0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await anyio.lowlevel.checkpoint()
            num_ticks = 0
            report = await p.pull()
            during = num_ticks
            tasks.cancel_scope.cancel()
        assert report.nbytes == 2**29
        print(f"{during} ticks in {report.duration_s * 1e3:.0f} ms, {report.gb_per_s:.1f} GB/s")
        assert during >= 5
        expect(p.cache.tensors[:2], p.stamp)
        expect(p.cache.tensors[-1:], p.stamp, src_tensor=63)


async def test_an_idle_pair_costs_no_processor() -> None:
    """Two linked processes that do nothing, one on asyncio and one on trio, use next to no processor time in 5 s."""
    async with (
        spawn_peer(1, "MIX", pool="4MiB", loop_name="asyncio") as one,
        spawn_peer(2, "MIX", pool="4MiB", loop_name="trio") as two,
    ):
        await one.call("link", clusters=[(2, two.address)])
        before = one.cpu_seconds(), two.cpu_seconds()
        await anyio.sleep(5)  # the time itself is what is measured
        after = one.cpu_seconds(), two.cpu_seconds()
        assert after[0] - before[0] < 0.1
        assert after[1] - before[1] < 0.1
