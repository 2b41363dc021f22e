"""Small pulls and pushes of blocks after the first: done before the call can wait, with the same checks.

What the speed stands on is counted here, not timed: nothing is awaited, nothing asked, nothing kept.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import kvlink as kv
from tests.spec.harness import D, P, Pair, linked_pair, refused, stamped
from tests.support.inside import give_turn, link_to
from tests.support.pattern import expect

NUM = 64
DESC = kv.CacheDesc(4, (NUM, 4, 32), "uint8")
MIXED = (kv.Role.MIX, kv.Role.MIX)
THEIRS = kv.BlocksCacheKey(P)

Move = Callable[..., Coroutine[Any, Any, kv.TransferReport]]


def mover(pair: Pair, direction: str) -> Move:
    """D's `pull_blocks` or `push_blocks`."""
    return pair.reader.pull_blocks if direction == "pull" else pair.reader.push_blocks


def at_once(call: Coroutine[Any, Any, kv.TransferReport]) -> kv.TransferReport:
    """Run a call that must end before it waits for anything; no event loop takes part."""
    try:
        call.send(None)
    except StopIteration as stop:
        report: kv.TransferReport = stop.value
        return report
    finally:
        call.close()
    raise AssertionError("the call waits")


both_ways = pytest.mark.parametrize("direction", ["pull", "push"])


@both_ways
@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda blocks: np.array(blocks, np.int32)])
async def test_nothing_is_awaited_and_nothing_asked(transport: str, direction: str, kind: Callable[..., Any]) -> None:
    """A small movement after the first ends without a turn of the loop, a message or a question; its bytes are right,
    and its report is that of the long way.
    """
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        source, target = (cache, own) if direction == "pull" else (own, cache)
        move, stats = mover(pair, direction), link_to(pair.decoder, P).stats
        first = await move(THEIRS, own, [0], [0])
        stamp = stamped(source, P if direction == "pull" else D)
        other = stamped(target, 9)
        before = (stats.round_trips, stats.messages_sent)
        moved = 1
        for blocks in ([5], [7, 6, 5], [3, 1, 2, 0]):
            into = [block + 10 for block in blocks]
            give_turn(pair.decoder)
            report = at_once(move(THEIRS, own, kind(blocks), kind(into)))
            expect(target.tensors, stamp, into, src_blocks=blocks)
            moved += len(blocks)
            assert report.done == tuple(into)
            assert report.nbytes == len(blocks) * first.nbytes
            assert report.num_extents == {1: 1, 3: 1, 4: 1}[len(blocks)]
            assert (report.peer, report.transport, report.failed) == (P, transport, ())
        expect(target.tensors, other, [4, 8, 9, 14, *range(18, NUM)])
        assert (stats.round_trips, stats.messages_sent) == before
        assert (stats.pulls, stats.pushes) == ((4, 0) if direction == "pull" else (0, 4))
        assert stats.nbytes_pulled + stats.nbytes_pushed == moved * first.nbytes
        assert own.is_quiet()
        assert link_to(pair.decoder, P).num_operations == 0


@both_ways
async def test_nothing_is_kept(transport: str, direction: str) -> None:
    """A thousand small movements leave not one object behind."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        move = mover(pair, direction)
        assert cache.is_valid

        async def many() -> int:
            for block in range(NUM):
                await move(THEIRS, own, [block], [block])
            gc.collect()
            return sys.getallocatedblocks()

        await many()
        before = await many()
        for _ in range(16):
            after = await many()
        assert after - before < 200  # counters that have become larger numbers, and the loop's own


@both_ways
async def test_same_refusals(transport: str, direction: str) -> None:
    """What the long way refuses is refused after it, too, with the same names; no byte has moved."""
    bad: list[tuple[Any, Any, dict[str, Any]]] = [
        ([NUM], [0], {}),
        ([0], [NUM], {}),
        ([-1], [0], {}),
        ([0], [-1], {}),
        ([0, NUM], [0, 1], {}),
        ([0, 1], [0, NUM], {}),
        ([0, -1], [0, 1], {}),
        ([0, 1], [5, 5], {}),
        ([3, 0, 1], [5, 4, 5], {}),
        ([0, 1], [0], {}),
        ([True], [0], {}),
        ([0], [True], {}),
        ([0.0], [0], {}),
        (np.array([[0]]), [0], {}),
        (np.array([0.0]), [0], {}),
        ([0], [0], {"tensor_num_per_layer": True}),
        ([0], [0], {"tensor_num_per_layer": 2.0}),
        ([0], [0], {"src_layer_range": [0]}),
        ([0], [0], {"dst_layer_range": 2}),
        ([0], [0], {"timeout_s": -1}),
        ([0], [0], {"timeout_s": "1"}),
    ]
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        move = mover(pair, direction)
        for width in (1, 2):
            await move(THEIRS, own, [0], [0], tensor_num_per_layer=width)
        target = own if direction == "pull" else cache
        other = stamped(target, 9)
        for source, destination, options in bad:
            case = (source, destination, options)
            await refused(move(THEIRS, own, source, destination, **options), kv.ParameterError, case)
            expect(target.tensors, other)
        assert own.is_quiet()


@both_ways
async def test_layers_and_models_are_not_mixed_up(transport: str, direction: str) -> None:
    """What was found to fit for some layers, a model or a cache of ours serves exactly those."""
    async with linked_pair(transport, roles=MIXED) as pair:
        caches = [pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P, model)) for model in (0, 1)]
        owns = [pair.reader.allocate_blocks_cache(DESC) for _ in range(2)]
        move = mover(pair, direction)
        for _ in range(2):
            for model, cache in enumerate(caches):
                for own in owns:
                    source, target = (cache, own) if direction == "pull" else (own, cache)
                    stamp = stamped(source, 8)
                    for tensor in target.tensors:
                        tensor[:] = 0
                    key = kv.BlocksCacheKey(P, model)
                    options = {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
                    await move(key, own, [4], [6], **options)
                    for number, tensor in enumerate(target.tensors):
                        assert tensor.any() == (number >= 2)
                        if number >= 2:
                            assert (tensor[6] == source.tensors[number - 2][4]).all()
                    await move(key, own, [4], [6])
                    expect(target.tensors, stamp, [6], src_blocks=[4])


@both_ways
async def test_cache_that_ends_during_the_copy(transport: str, direction: str) -> None:
    """Bytes of a generation that ended while they moved are never a success."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        move, link = mover(pair, direction), link_to(pair.decoder, P)
        await move(THEIRS, own, [0], [0])
        endpoint, name = link.endpoint, "get_at_once" if direction == "pull" else "put_at_once"
        copy = getattr(endpoint, name)

        def copy_and_end(extent: Any) -> bool:
            pair.owner.deallocate_cache(cache)
            return bool(copy(extent))

        setattr(endpoint, name, copy_and_end)
        give_turn(pair.decoder)
        with pytest.raises(kv.CacheNotFoundError) as caught:
            at_once(move(THEIRS, own, [1], [1]))
        assert (caught.value.phase, caught.value.peer) == ("settle", P)
        assert link.stats.failures == 1


@both_ways
async def test_cache_that_has_ended(transport: str, direction: str) -> None:
    """A cache that has ended is looked up anew: not there any more, or another one under the same key."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        move = mover(pair, direction)
        await move(THEIRS, own, [0], [0])
        other = stamped(own, D)
        pair.owner.deallocate_cache(cache)
        with pytest.raises(kv.CacheNotFoundError):
            await move(THEIRS, own, [1], [1])
        expect(own.tensors, other)
        again = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        source, target = (again, own) if direction == "pull" else (own, again)
        stamp = stamped(source, 8)
        await move(THEIRS, own, [1], [2])
        expect(target.tensors, stamp, [2], src_blocks=[1])


async def test_recalled_lease(transport: str) -> None:
    """Nothing is written under a lease that was recalled, also where the word of the cache still holds."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        await pair.reader.push_blocks(THEIRS, own, [0], [0])
        link = link_to(pair.decoder, P)
        (pairing,) = link.pairings.values()
        assert pairing.grant is not None
        other = stamped(cache)
        link.grants.recall(pairing.found.lease)
        before = link.stats.round_trips
        give_turn(pair.decoder)
        call = pair.reader.push_blocks(THEIRS, own, [1], [1])
        with pytest.raises(AssertionError, match="waits"):
            at_once(call)
        assert link.stats.round_trips == before + 1
        expect(cache.tensors, other)


@both_ways
async def test_closed_things(transport: str, direction: str) -> None:
    """A deallocated cache of ours, an ended link and a closed cluster are refused as on the long way."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own, gone = pair.reader.allocate_blocks_cache(DESC), pair.reader.allocate_blocks_cache(DESC)
        move = mover(pair, direction)
        assert cache.is_valid
        for each in (own, gone):
            await move(THEIRS, each, [0], [0])
        pair.reader.deallocate_cache(gone)
        with pytest.raises(kv.CacheNotFoundError):
            await move(THEIRS, gone, [0], [0])
        with pytest.raises(kv.ParameterError, match="another cluster"):
            await pair.owner.push_blocks(kv.BlocksCacheKey(D), own, [0], [0])
        await pair.decoder.unlink_clusters([kv.ClusterInfo(P, pair.prompt.address)], timeout_s=5)
        with pytest.raises(kv.NotLinkedError):
            await move(THEIRS, own, [0], [0])
        await pair.decoder.aclose()
        with pytest.raises(kv.ClosedError):
            await move(THEIRS, own, [0], [0])


@both_ways
async def test_the_loop_has_its_turn(transport: str, direction: str) -> None:
    """A caller that moves thousands of blocks in a row without another await lets others run all the while."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        own = pair.reader.allocate_blocks_cache(DESC)
        move, turns, is_over = mover(pair, direction), 0, False
        assert cache.is_valid

        async def count() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            await move(THEIRS, own, [0], [0])
            begun = turns
            for number in range(4000):
                await move(THEIRS, own, [number % NUM], [number % NUM])
            assert turns - begun >= 4
            is_over = True
