"""`push_blocks` and `push_cache`, and the write leases under them. Source: the spec, section 9.4."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import kvlink as kv
from tests.spec.harness import D, P, Pair, hold, linked_pair, owner_and_reader, refused, stamped
from tests.support.inside import link_to, used_nbytes
from tests.support.loops import eventually, every_loop
from tests.support.pattern import expect, rows

NUM = 16
DESC = kv.CacheDesc(4, (NUM, 256), "uint8")
NBYTES = 4 * NUM * 256
KEY = kv.BlocksCacheKey(D)


def target_at_d(pair: Pair) -> tuple[kv.KvCache, kv.KvCache]:
    """Return a keyed paged cache at D, which must be a MIX for that, and one at P to push from."""
    return pair.reader.allocate_blocks_cache(DESC, KEY), pair.owner.allocate_blocks_cache(DESC)


MIXED = (kv.Role.PROMPT, kv.Role.MIX)


@every_loop
async def test_push_blocks(transport: str) -> None:
    """Block src_blocks[i] of ours lands in block dst_blocks[i] of the peer's, whole, in every tensor.

    Source: the spec, section 9.4.
    """
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        other, stamp = stamped(target, D), stamped(cache)
        report = await pair.owner.push_blocks(KEY, cache, [7, 0, 15, 8], [1, 14, 3, 2])
        expect(target.tensors, stamp, [1, 14, 3, 2], src_blocks=[7, 0, 15, 8])
        expect(target.tensors, other, [0, *range(4, 14), 15])
        expect(cache.tensors, stamp)
        assert (report.peer, report.nbytes, set(report.done)) == (D, 4 * 4 * 256, {1, 14, 3, 2})


@every_loop
async def test_push_cache(transport: str) -> None:
    """Slot src_batch_index of ours lands in the slot of the peer's cache that the key names.

    Source: the spec, section 9.4.
    """
    async with linked_pair(transport) as pair:
        target, cache = pair.reader.allocate_cache(DESC), pair.owner.allocate_cache(DESC)
        other, stamp = stamped(target, D), stamped(cache)
        report = await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, target.cache_id, 5), cache, 9)
        expect(target.tensors, stamp, [5], src_blocks=[9])
        expect(target.tensors, other, [*range(5), *range(6, NUM)])
        assert (report.nbytes, report.done) == (4 * 256, (5,))


async def test_between_processes(transport: str) -> None:
    """A process pushes blocks and slots into the memory of another one, in both directions.

    Source: the spec, section 9.4.
    """
    async with owner_and_reader("two processes", transport) as stage:
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256], model_id=3)
        target = stage.reader.allocate_blocks_cache(DESC)
        other = stamped(target, D)
        cache_id = target.cache_id
        assert await stage.owner.call("push_cache", cache_id=cache_id, slot=2, cache=cache, src_slot=6) == 4 * 256
        expect(target.tensors, stage.owner.stamp(cache), [2], src_blocks=[6])
        expect(target.tensors, other, [0, 1, *range(3, NUM)])
        mine = stage.reader.allocate_blocks_cache(DESC)
        stamp = stamped(mine, D)
        await stage.reader.push_blocks(kv.BlocksCacheKey(P, 3), mine, [1, 2], [9, 8])
        assert (
            await stage.owner.call("faults", cache=cache, stamp=list(stamp), blocks=[9, 8], src_blocks=[1, 2]) is None
        )


async def test_blocks_by_cache_id(transport: str) -> None:
    """The target may also be named by cluster and cache id. Source: the spec, section 9.4."""
    async with linked_pair(transport) as pair:
        target, cache = pair.reader.allocate_blocks_cache(DESC), pair.owner.allocate_blocks_cache(DESC)
        stamp = stamped(cache)
        await pair.owner.push_blocks(kv.CacheKeyByIdAndIndex(D, target.cache_id), cache, [3], [4])
        expect(target.tensors, stamp, [4], src_blocks=[3])


async def test_size(transport: str) -> None:
    """kvlink: push_cache takes a size, in bytes per tensor; -1 is the whole source slot.

    Source: the spec, section 9.4, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        target = pair.reader.allocate_cache(kv.CacheDesc(4, (3, 300), "uint8"))
        other = stamped(target, D)
        cache = pair.owner.allocate_cache(DESC)
        stamped(cache)
        expected = [tensor.copy() for tensor in target.tensors]
        for tensor, source in zip(expected, cache.tensors, strict=True):
            tensor[1, :100] = source[2, :100]
            tensor[2, :256] = source[3]
        key = kv.CacheKeyByIdAndIndex(D, target.cache_id, 1)
        await pair.owner.push_cache(key, cache, 2, size=100)
        await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, target.cache_id, 2), cache, 3)
        assert [tensor.tobytes() for tensor in target.tensors] == [tensor.tobytes() for tensor in expected]
        expect(target.tensors, other, [0])
        for size in (0, -2, 257):
            with pytest.raises(kv.ParameterError):
                await pair.owner.push_cache(key, cache, 2, size=size)


@pytest.mark.parametrize(
    ("width", "src_layers", "dst_layers"), [(2, range(1), range(1, 2)), (1, range(1, 3), range(1, 3)), (2, None, None)]
)
async def test_layers(transport: str, width: int, src_layers: range | None, dst_layers: range | None) -> None:
    """Equal length of both ranges is required; kvlink lets them differ otherwise, and None is all layers.

    Source: the spec, section 9.4, and DIFFERENCES.md.
    """
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        other, stamp = stamped(target, D), stamped(cache)
        await pair.owner.push_blocks(
            KEY, cache, [1], [2], src_layer_range=src_layers, dst_layer_range=dst_layers, tensor_num_per_layer=width
        )
        first, stop = (0, 4) if dst_layers is None else (dst_layers.start * width, dst_layers.stop * width)
        from_tensor = 0 if src_layers is None else src_layers.start * width
        expect(target.tensors[first:stop], stamp, [2], src_blocks=[1], src_tensor=from_tensor)
        expect(target.tensors[stop:], other, src_tensor=stop)
        with pytest.raises(kv.MismatchError):
            await pair.owner.push_blocks(KEY, cache, [1], [2], src_layer_range=range(1), dst_layer_range=range(2))


async def test_any_role(transport: str) -> None:
    """kvlink: a DECODER may push as well as a PROMPT. Source: the spec, section 9.4, and DIFFERENCES.md."""
    async with linked_pair(transport) as pair:
        target = pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P))
        cache = pair.reader.allocate_blocks_cache(DESC)
        stamp = stamped(cache, D)
        await pair.reader.push_blocks(kv.BlocksCacheKey(P), cache, [1], [2])
        expect(target.tensors, stamp, [2], src_blocks=[1])


async def test_no_key_is_released(transport: str) -> None:
    """No key is released, at either end. Source: the spec, section 9.4."""
    async with linked_pair(transport, roles=(kv.Role.MIX, kv.Role.MIX)) as pair:
        source_key, target_key = kv.CacheKey(P, 1), kv.CacheKey(D, 2)
        cache = pair.owner.allocate_cache(DESC, [source_key])
        target = pair.reader.allocate_cache(DESC, [target_key])
        stamp = stamped(cache)
        await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, target.cache_id), cache)
        into = pair.owner.allocate_cache(DESC)
        await pair.owner.pull_cache(target_key, into)
        expect(into.tensors, stamp, [0])
        await pair.reader.pull_cache(source_key, target, 1)
        expect(target.tensors, stamp, [1], src_blocks=[0])


BAD_BLOCKS: list[tuple[Any, Any, dict[str, Any]]] = [
    ([0], [NUM], {}),
    ([NUM], [0], {}),
    ([-1], [0], {}),
    ([0], [-1], {}),
    ([0, 1], [0], {}),
    ([0, 1], [5, 5], {}),
    ([], [0], {}),
    ([True], [0], {}),
    ([0], [0.0], {}),
    ([0], [0], {"src_layer_range": range(3)}),
    ([0], [0], {"dst_layer_range": range(3)}),
    ([0], [0], {"dst_layer_range": range(1)}),
    ([0], [0], {"tensor_num_per_layer": 0}),
    ([0], [0], {"timeout_s": -1}),
]


async def test_blocks_that_are_refused(transport: str) -> None:
    """What does not fit is LLM_PARAM_INVALID before a byte moves, and the link works on.

    Source: the spec, section 9.4.
    """
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        other, stamp = stamped(target, D), stamped(cache)
        for source, destination, options in BAD_BLOCKS:
            call = pair.owner.push_blocks(KEY, cache, source, destination, **options)
            await refused(call, kv.ParameterError, (source, destination, options))
            expect(target.tensors, other)
        await pair.owner.push_blocks(KEY, cache, [1], [2])
        expect(target.tensors, stamp, [2], src_blocks=[1])


async def test_empty_lists(transport: str) -> None:
    """kvlink: empty lists are a no-op. Source: the spec, section 9.4, and DIFFERENCES.md."""
    async with linked_pair(transport, roles=MIXED) as pair:
        _, cache = target_at_d(pair)
        assert (await pair.owner.push_blocks(KEY, cache, [], [])).nbytes == 0


async def test_slots_that_are_refused(transport: str) -> None:
    """Slots and sizes that do not fit: PARAM_INVALID; a slot or cache that the peer has not: KV_CACHE_NOT_EXIST.

    Source: the spec, section 9.4.
    """
    async with linked_pair(transport) as pair:
        target = pair.reader.allocate_cache(kv.CacheDesc(4, (2, 255), "uint8"))
        other = stamped(target, D)
        cache, few = pair.owner.allocate_cache(DESC), pair.owner.allocate_cache(kv.CacheDesc(2, (2, 255), "uint8"))
        key = kv.CacheKeyByIdAndIndex(D, target.cache_id)
        for slot in (NUM, -1, 2**32):
            with pytest.raises(kv.ParameterError):
                await pair.owner.push_cache(key, cache, slot)
        with pytest.raises(kv.ParameterError):
            await pair.owner.push_cache(key, cache)  # 256 bytes into 255
        with pytest.raises(kv.MismatchError):
            await pair.owner.push_cache(key, few)
        for wrong in (kv.CacheKeyByIdAndIndex(D, target.cache_id, 2), kv.CacheKeyByIdAndIndex(D, 99)):
            with pytest.raises(kv.CacheNotFoundError):
                await pair.owner.push_cache(wrong, cache, size=1)
        for key_of_wrong_type in (kv.CacheKey(D, 1), kv.BlocksCacheKey(D)):
            with pytest.raises(TypeError):
                await pair.owner.push_cache(key_of_wrong_type, cache)  # type: ignore[arg-type]  # refused
        with pytest.raises(TypeError):
            await pair.owner.push_blocks(kv.CacheKey(D, 1), cache, [0], [0])  # type: ignore[arg-type]  # refused
        with pytest.raises(kv.NotLinkedError):
            await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(9, 1), cache)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.owner.push_blocks(KEY, cache, [0], [0])
        expect(target.tensors, other)


async def test_order_of_checks(transport: str) -> None:
    """Check order: local cache known, parameters, link, then the exchange. Source: the spec, section 9.3."""
    nowhere = kv.BlocksCacheKey(9)
    async with linked_pair(transport) as pair:
        gone, cache = pair.owner.allocate_blocks_cache(DESC), pair.owner.allocate_blocks_cache(DESC)
        pair.owner.deallocate_cache(gone)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.owner.push_blocks(nowhere, gone, [NUM], [0])
        with pytest.raises(kv.ParameterError):
            await pair.owner.push_blocks(nowhere, cache, [NUM], [0])
        with pytest.raises(kv.NotLinkedError) as caught:
            await pair.owner.push_blocks(nowhere, cache, [0], [0])
        assert caught.value.status is kv.StatusCode.LLM_NOT_YET_LINK


# kvlink's write leases: a late write must never land in somebody else's cache.


async def test_lease_costs_one_round_trip(transport: str) -> None:
    """A push asks the peer the first time and never again. Source: the spec, section 9.4, and DIFFERENCES.md."""
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        stats = link_to(pair.prompt, D).stats
        before = stats.round_trips
        for block in range(4):
            await pair.owner.push_blocks(KEY, cache, [block], [block])
        await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, target.cache_id), cache)
        await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, target.cache_id, 1), cache)
        assert stats.round_trips == before + 2  # one for each name by which the cache was reached


async def test_a_second_push_waits_for_the_memory_too(transport: str) -> None:
    """Two pushes to a cache that nobody has written into yet: neither writes before it may. Source: as above."""
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        stamp = stamped(cache)
        endpoint = link_to(pair.prompt, D).endpoint
        reach, put = endpoint.reach, endpoint.put
        arrived, is_open, num_waiting = anyio.Event(), anyio.Event(), 0

        async def reach_later(regions: Any, *, for_writing: bool) -> None:
            nonlocal num_waiting
            num_waiting += 1
            arrived.set()
            await is_open.wait()
            await reach(regions, for_writing=for_writing)

        async def put_now(*arguments: Any) -> None:
            assert is_open.is_set(), "written before the memory could be reached"
            await put(*arguments)

        endpoint.immediate_nbytes = -1  # everything takes the way that is watched here
        setattr(endpoint, "reach", reach_later)  # noqa: B010  # a method is replaced
        setattr(endpoint, "put", put_now)  # noqa: B010
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.owner.push_blocks, KEY, cache, [0], [0])
            await arrived.wait()
            tasks.start_soon(pair.owner.push_blocks, KEY, cache, [1], [1])
            await eventually(lambda: num_waiting == 2, "the second push")
            is_open.set()
        expect(target.tensors, stamp, [0, 1])


async def test_idle_lease_is_recalled(transport: str) -> None:
    """Deallocation recalls the lease of an idle writer, and then the memory is free. Source: the spec, section 5.2."""
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        await pair.owner.push_blocks(KEY, cache, [0], [0])
        pair.reader.deallocate_cache(target)
        assert used_nbytes(pair.decoder) == NBYTES
        await pair.flush()
        assert used_nbytes(pair.decoder) == 0
        with pytest.raises(kv.CacheNotFoundError):
            await pair.owner.push_blocks(KEY, cache, [0], [0])
        again = pair.reader.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        await pair.owner.push_blocks(KEY, cache, [1], [2])
        expect(again.tensors, stamp, [2], src_blocks=[1])


@pytest.mark.parametrize("has_heard", [True, False])
async def test_deallocation_under_a_writer(transport: str, has_heard: bool) -> None:
    """Memory that a running transfer is using stays alive until that operation ends; the writer learns that the cache
    has ended, whether or not the recall of its lease has reached it in the middle. Source: the spec, section 5.2.
    """
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        stamped(cache)
        await pair.owner.push_blocks(KEY, cache, [0], [0])
        held = hold(pair.prompt, D, "put")
        failures: list[kv.KVLinkError] = []

        async def push() -> None:
            with pytest.raises(kv.CacheNotFoundError) as caught:
                await pair.owner.push_blocks(KEY, cache, list(range(NUM)), list(range(NUM)))
            failures.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push)
            await held.reached.wait()
            pair.reader.deallocate_cache(target)
            if has_heard:
                await pair.flush()
            assert used_nbytes(pair.decoder) == NBYTES
            new = pair.reader.allocate_blocks_cache(DESC, KEY)
            for tensor in new.tensors:
                tensor[:] = 0
            held.release()
        assert failures[0].peer == D
        await pair.flush()
        assert used_nbytes(pair.decoder) == NBYTES
        assert not any(rows(tensor).any() for tensor in new.tensors)


async def test_deallocation_under_a_writer_and_a_reader(transport: str) -> None:
    """The writer learns that the cache has ended also when somebody is still reading it.

    Source: the spec, section 5.2.
    """
    async with linked_pair(transport, roles=(kv.Role.MIX, kv.Role.MIX)) as pair:
        target, cache = target_at_d(pair)
        stamp = stamped(target, D)
        into = pair.owner.allocate_blocks_cache(DESC)
        await pair.owner.push_blocks(KEY, cache, [0], [0])
        reading, writing = hold(pair.prompt, D, "get"), hold(pair.prompt, D, "put")
        by_id = kv.CacheKeyByIdAndIndex(D, target.cache_id, 1)

        async def push() -> None:
            with pytest.raises(kv.CacheNotFoundError):
                await pair.owner.push_blocks(KEY, cache, [0], [0])

        async with anyio.create_task_group() as reader, anyio.create_task_group() as writer:
            reader.start_soon(pair.owner.pull_cache, by_id, into)
            writer.start_soon(push)
            await reading.reached.wait()
            await writing.reached.wait()
            pair.reader.deallocate_cache(target)
            await pair.flush()
            writing.release()
            reading.release()
        expect(into.tensors, stamp, [0], src_blocks=[1])
        await pair.flush()
        assert used_nbytes(pair.decoder) == 0


async def test_cancelled_writer(transport: str) -> None:
    """A push that is cancelled or runs out of time leaves the link, the lease and other pushes as they were.

    Source: the spec, section 19, and DIFFERENCES.md.
    """
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        stamp = stamped(cache)
        held = hold(pair.prompt, D, "put")
        with pytest.raises(kv.TransferTimeoutError) as caught:
            await pair.owner.push_blocks(KEY, cache, [0], [0], timeout_s=0.02)
        assert caught.value.status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.owner.push_blocks, KEY, cache, [0], [0])
            await held.reached.wait()
            tasks.cancel_scope.cancel()
        assert cache.is_quiet()
        held.release()
        await pair.owner.push_blocks(KEY, cache, [1], [2])
        expect(target.tensors, stamp, [2], src_blocks=[1])
        pair.reader.deallocate_cache(target)
        await pair.flush()
        assert used_nbytes(pair.decoder) == 0


async def test_writer_that_unlinks(transport: str) -> None:
    """A link that ends in good order gives its leases back. Source: the spec, section 5.2."""
    async with linked_pair(transport, roles=MIXED) as pair:
        target, cache = target_at_d(pair)
        await pair.owner.push_blocks(KEY, cache, [0], [0])
        (await pair.decoder.unlink_clusters([P])).raise_for_status()
        pair.reader.deallocate_cache(target)
        assert used_nbytes(pair.decoder) == 0


async def test_writer_that_is_stopped_and_killed(transport: str) -> None:
    """A writer whose process does not answer keeps what it could still write into; when it is dead all is free, and a
    writer that was killed never spoils what came after. Source: the spec, section 5.2, and DIFFERENCES.md.
    """
    async with owner_and_reader("two processes", transport) as stage:
        target = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        await stage.owner.call("push_cache", cache_id=target.cache_id, slot=0, cache=cache, src_slot=0)
        stage.process().stop()
        stage.reader.deallocate_cache(target)
        link = link_to(stage.decoder, P)
        assert used_nbytes(stage.decoder) == NBYTES
        (await stage.decoder.unlink_clusters([P], force=True)).raise_for_status()
        assert link.closed.is_set()
        assert used_nbytes(stage.decoder) == NBYTES
        stage.process().kill()
        await eventually(lambda: used_nbytes(stage.decoder) == 0, "the memory of a dead writer is free")


async def test_writer_that_dies_while_idle(transport: str) -> None:
    """The same for a writer that dies on a link that nobody has ended. Source: the spec, section 5.2."""
    async with owner_and_reader("two processes", transport) as stage:
        target = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[NUM, 256])
        await stage.owner.call("push_cache", cache_id=target.cache_id, slot=3, cache=cache, src_slot=4)
        expect(target.tensors, stage.owner.stamp(cache), [3], src_blocks=[4])
        stage.process().kill()
        await link_to(stage.decoder, P).closed.wait()
        expect(target.tensors, stage.owner.stamp(cache), [3], src_blocks=[4])
        stage.reader.deallocate_cache(target)
        await eventually(lambda: used_nbytes(stage.decoder) == 0, "the memory of a dead writer is free")
