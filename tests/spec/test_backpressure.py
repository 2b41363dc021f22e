"""Limits on what is in flight: callers wait for their turn, nobody is forgotten, and peers cannot take without end."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import kvlink as kv
from kvlink.wire import Failed, Found, OpenRead, Ping, Pong, Stage, Target, encode
from tests.support import inside
from tests.support.loops import asyncio_and_trio, eventually, until
from tests.support.pair import SLOW, Pair, pair
from tests.support.pattern import fill
from tests.support.peer import spawn_peer
from tests.support.stranger import Stranger

FEW = kv.CacheDesc(1, (2048, 4096), "uint8")
WHOLE_CACHE = kv.CacheDesc(2, (4, 4096), "uint8")


def in_flight(link: kv.Link) -> tuple[int, int]:
    """Return the operations that have begun and those that wait."""
    return link.operations.used, len(link.operations.waiting)


async def pull_some(here: Pair, order: list[int], number: int, **options: Any) -> None:
    """Pull a block that nobody has looked up yet: it needs the owner."""
    key = kv.BlocksCacheKey(1, number)
    try:
        await here.manager.pull_blocks(key, here.cache, [0], [number], **options)
    except kv.CacheNotFoundError:  # the owner has answered, which is all that this is about
        order.append(number)


@asyncio_and_trio
async def test_more_operations_than_may_be_wait_in_order() -> None:
    """With a limit of 3 and an owner that does not answer, 3 have asked; then all do, in the order of their calls."""
    async with pair(FEW, config={"max_operations_per_link": 3}) as here:
        order: list[int] = []
        here.owner.stop()
        async with anyio.create_task_group() as tasks:
            for number in range(1, 41):
                tasks.start_soon(partial(pull_some, here, order, number))
                await anyio.lowlevel.checkpoint()
            await eventually(lambda: in_flight(here.link) == (3, 37), "the queue")
            here.owner.cont()
        assert sorted(order) == list(range(1, 41))
        assert all(place - 3 <= number <= place + 3 for place, number in enumerate(order, 1))
        assert in_flight(here.link) == (0, 0)
        await here.pull()
        here.expect_all()


async def test_the_deadline_of_a_call_counts_while_it_waits() -> None:
    """It ends by it with a typed error that says what was before it; its blocks are quiet then, and were not."""
    async with pair(FEW, config={"max_operations_per_link": 1}) as here:
        here.owner.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(pull_some, here, [], 1))
            await eventually(lambda: in_flight(here.link) == (1, 0), "the first")
            started = anyio.current_time()
            with pytest.raises(kv.TransferTimeoutError, match=r"waited .* 1 operations of 1") as caught:
                await here.pull([7], [7], timeout_s=0.1)
            assert anyio.current_time() - started < 1
            assert (caught.value.phase, caught.value.peer) == ("queue", 1)
            assert here.cache.is_quiet([7])
            tasks.cancel_scope.cancel()
        here.owner.cont()
        assert in_flight(here.link) == (0, 0)
        await here.pull()
        here.expect_all()


async def test_whoever_is_cancelled_in_the_queue_leaves_it() -> None:
    """Callers before and behind it are served, and its own destination is untouched and quiet."""
    async with pair(FEW, config={"max_operations_per_link": 1}) as here:
        here.owner.stop()
        order: list[int] = []
        async with anyio.create_task_group() as tasks:
            for number in (1, 2, 3):
                scope = anyio.CancelScope()

                async def call(number: int, scope: anyio.CancelScope) -> None:
                    with scope:
                        await pull_some(here, order, number)

                tasks.start_soon(call, number, scope)
                await anyio.lowlevel.checkpoint()
                if number == 2:
                    second = scope
            await eventually(lambda: in_flight(here.link) == (1, 2), "the queue")
            assert not here.cache.is_quiet([2])
            second.cancel()
            await eventually(lambda: in_flight(here.link) == (1, 1), "the shorter queue")
            assert here.cache.is_quiet([2])
            here.owner.cont()
        assert order == [1, 3]
        here.expect_untouched()


@asyncio_and_trio
async def test_a_lost_link_ends_everybody_in_its_queue() -> None:
    """Each caller that waits has one typed error at once when the peer dies."""
    async with pair(FEW, config={"max_operations_per_link": 2}) as here:
        here.owner.stop()
        errors: list[kv.KVLinkError] = []

        async def call(number: int) -> None:
            try:
                await here.pull([number], [number])
            except kv.KVLinkError as exc:
                errors.append(exc)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(call, number)
            await eventually(lambda: in_flight(here.link) == (2, 18), "the queue")
            here.owner.kill()
        assert len(errors) == 20
        assert all(isinstance(error, kv.LinkLostError) and error.peer == 1 for error in errors)
        here.expect_untouched()


async def test_unlinking_sends_the_queue_away_and_lets_the_others_end() -> None:
    """What has begun ends as ever; what waits is refused."""
    async with pair(FEW, config={"max_operations_per_link": 1}) as here:
        here.owner.stop()
        order: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(pull_some, here, order, 1))
            await eventually(lambda: in_flight(here.link) == (1, 0), "the first")

            async def refused() -> None:
                with pytest.raises(kv.NotLinkedError):
                    await here.pull([2], [2])
                here.owner.cont()

            tasks.start_soon(refused)
            await eventually(lambda: in_flight(here.link) == (1, 1), "the second")
            (await here.here.unlink_clusters([1])).raise_for_status()
        assert order == [1]


async def test_a_cache_that_ends_while_its_pull_waits_keeps_its_memory() -> None:
    """A pull in the queue will write there: the memory is not used for another cache before it has ended."""
    async with pair(FEW, config={"max_operations_per_link": 1}, pool="9MiB") as here:
        here.owner.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(pull_some, here, [], 1))
            await eventually(lambda: in_flight(here.link) == (1, 0), "the first")
            tasks.start_soon(partial(here.pull, [7], [7], timeout_s=10))
            await eventually(lambda: in_flight(here.link) == (1, 1), "the second")
            here.manager.deallocate_cache(here.cache)
            with pytest.raises(kv.OutOfMemoryError):
                here.manager.allocate_blocks_cache(FEW)
            here.owner.cont()
        other = here.manager.allocate_blocks_cache(FEW)
        here.manager.deallocate_cache(other)


async def test_bytes_in_flight_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty large pulls at once, with room for three chunks: three are in the transport's hands, and all arrive."""
    limits = {"max_nbytes_in_flight_per_link": 3 * 4096, "max_operations_per_link": 50}
    async with pair(FEW, config={**SLOW, **limits}) as here:
        await here.warm_up()
        now, most = [0], [0]
        endpoint = here.link.endpoint
        get = endpoint.get

        async def counted(*arguments: Any) -> None:
            now[0] += 1
            most[0] = max(most[0], now[0])
            try:
                await get(*arguments)
            finally:
                now[0] -= 1

        monkeypatch.setattr(endpoint, "get", counted)
        async with anyio.create_task_group() as tasks:
            for first in range(0, 2000, 100):
                blocks = list(range(first, first + 100))
                tasks.start_soon(here.pull, blocks, blocks)
        await here.pull(list(range(2000, 2048)))
        here.expect_all()
        assert most[0] == 3
        assert here.link.nbytes.used == 0


async def test_a_movement_larger_than_the_limit_works() -> None:
    """With a limit below a single chunk, pulls and pushes go one at a time, and all arrive."""
    async with pair(FEW, config={**SLOW, "max_nbytes_in_flight": 1}, role="MIX", here_role=kv.Role.MIX) as here:
        async with anyio.create_task_group() as tasks:
            for first in range(0, 2048, 512):
                blocks = list(range(first, first + 512))
                tasks.start_soon(here.pull, blocks, blocks)
        here.expect_all()
        fill(here.cache.tensors, here.stamp)
        await here.manager.push_blocks(here.key, here.cache, here.blocks, here.blocks)
        assert here.link.nbytes.used == 0


async def test_a_huge_pull_does_not_hold_up_one_behind_it() -> None:
    """A pull of 64 chunks that is called after one of thousands, on one thread, is done before it."""
    desc = kv.CacheDesc(1, (2048, 16384), "uint8")
    async with pair(desc, config={**SLOW, "chunk_nbytes": 16384}) as here:
        await here.warm_up()
        order: list[str] = []

        async def pull(name: str, blocks: range) -> None:
            await here.pull(blocks, blocks)
            order.append(name)  # threads report in the order in which they end, however late the loop is

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull, "huge", range(64, 2048))
            while not here.link.nbytes.used:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(pull, "small", range(64))
        assert order == ["small", "huge"]
        here.expect_all()


@pytest.mark.parametrize("victim_loop", ["asyncio", "trio"])
async def test_a_peer_gets_so_many_leases_and_no_more(victim_loop: str) -> None:
    """Ten thousand requests for a lease: the limit's number is given, the rest refused, and nobody else notices."""
    config = {"max_leases_per_link": 50}
    async with spawn_peer(1, "MIX", pool="8MiB", loop_name=victim_loop, config=config) as owner:
        await owner.call("allocate", num_tensors=2, shape=[4, 4096], requests=[7])
        async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="8MiB") as good:
            (await good.link_clusters([owner.info])).raise_for_status()
            with Stranger.dial(owner.address) as greedy:
                greedy.link(1)
                greedy.say(*[OpenRead(seq, Target("request", 7), 1e9) for seq in range(1, 10_001)])
                leases: list[int] = []
                num_refused = 0
                while len(leases) + num_refused < 10_000:
                    answer = await anyio.to_thread.run_sync(greedy.hear)
                    if isinstance(answer, Found):
                        leases.append(answer.lease)
                    elif not isinstance(answer, Ping):
                        assert isinstance(answer, Failed)
                        assert answer.status == kv.StatusCode.LLM_LINK_BUSY
                        assert "max_leases_per_link" in answer.text
                        num_refused += 1
                assert len(leases) == 50
                cache = good.kv_cache_manager.allocate_cache(kv.CacheDesc(2, (4, 4096), "uint8"))
                await good.kv_cache_manager.pull_cache(kv.CacheKey(1, 7), cache, 0, timeout_s=5)
                good.kv_cache_manager.deallocate_cache(cache)
            await until(partial(owner.call, "usage"), lambda usage: usage["read_leases"] == 0)


async def test_a_peer_gets_so_much_room_for_detours_and_no_more() -> None:
    """A hundred at once: the limit's number is served, the rest refused, and the room comes back with the link."""
    async with spawn_peer(1, "MIX", pool="8MiB", config={"max_leases_per_link": 5}) as owner:
        await owner.call("allocate_blocks", num_tensors=2, shape=[4, 4096], model_id=0)
        used = (await owner.call("usage"))["pool_nbytes"]
        with Stranger.dial(owner.address) as greedy:
            greedy.link(1)
            greedy.say(*[Stage(seq, Target("blocks", 0), (0, 1), 0, 2, False) for seq in range(1, 101)])
            num_rooms = num_refused = 0
            while num_rooms + num_refused < 100:
                answer = await anyio.to_thread.run_sync(greedy.hear)
                if isinstance(answer, Failed):
                    assert answer.status == kv.StatusCode.LLM_LINK_BUSY
                    num_refused += 1
                elif not isinstance(answer, Ping):
                    assert isinstance(answer, Found)
                    num_rooms += 1
            assert num_rooms == 5
            assert (await owner.call("usage"))["pool_nbytes"] > used
        await until(partial(owner.call, "usage"), lambda usage: usage["pool_nbytes"] == used)


async def test_a_refused_lease_is_a_typed_error() -> None:
    """Whoever has more pulls at a time than its peer gives leases learns that it is the peer's limit."""
    async with spawn_peer(1, "PROMPT", pool="8MiB", config={"max_caches": 2}) as owner:
        await owner.call("allocate", num_tensors=2, shape=[4, 4096], requests=[7])
        with Stranger.dial(owner.address) as greedy:
            greedy.link(1)
            greedy.say(*[OpenRead(seq, Target("request", 7), 1e9) for seq in range(256)])  # of a page of 512 words
            for _ in range(256):
                assert isinstance(greedy.hear(), Found)
            async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="8MiB") as here:
                (await here.link_clusters([owner.info])).raise_for_status()
                cache = here.kv_cache_manager.allocate_cache(kv.CacheDesc(2, (4, 4096), "uint8"))
                with pytest.raises(kv.LinkBusyError, match="max_caches") as caught:
                    await here.kv_cache_manager.pull_cache(kv.CacheKey(1, 7), cache, 0)
                assert (caught.value.status, caught.value.peer) == (kv.StatusCode.LLM_LINK_BUSY, 1)
                here.kv_cache_manager.deallocate_cache(cache)
                assert inside.num_read_leases(here) == 0


async def test_a_peer_that_talks_without_end_leaves_the_loop_to_others() -> None:
    """64 KiB of questions in one piece are not answered in one go: a ticker runs in between."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="8MiB") as victim:
        gaps: list[int] = []

        def chat() -> None:
            with Stranger.dial(victim.address) as stranger:
                stranger.link(1)
                stranger.say(encode(Ping(7)) * 3000)
                for _ in range(3000):
                    assert stranger.hear() == Pong(7)

        async with anyio.create_task_group() as tasks:

            async def tick() -> None:
                while True:
                    before = sum(link.stats.messages_received for link in victim.links)
                    await anyio.lowlevel.checkpoint()
                    gaps.append(sum(link.stats.messages_received for link in victim.links) - before)

            tasks.start_soon(tick)
            await anyio.to_thread.run_sync(chat)
            tasks.cancel_scope.cancel()
        assert 1 <= max(gaps) <= 64
