"""How long a cache lives, and what a key does for it. Source: the spec, sections 5.1 to 5.4, 6.1 to 6.4 and 7."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import kvlink as kv
from tests.spec.harness import D, P, Stage, cluster, hold, linked_pair, owner_and_reader, refused, snapshot, stamped
from tests.support.inside import link_to, num_read_leases, used_nbytes
from tests.support.loops import every_loop
from tests.support.pattern import expect

SLOT = 512
DESC = kv.CacheDesc(4, (4, SLOT), "uint8")
CACHE_NBYTES = 4 * 4 * SLOT


def request(number: int, **fields: int) -> kv.CacheKey:
    """Return the key of a request at P."""
    return kv.CacheKey(P, number, **fields)


def prefix(number: int, **fields: int) -> kv.CacheKey:
    """Return the key of a prefix at P."""
    return kv.CacheKey(P, kv.ABSENT, prefix_id=number, **fields)


async def is_bound(stage: Stage, number: int, into: kv.KvCache) -> bool:
    """Whether a pull by that request key finds something; the pull, with an offset, changes nothing."""
    try:
        await stage.pull(number, into, src_cache_offset=0)
    except kv.CacheNotFoundError:
        return False
    return True


async def is_there(stage: Stage, cache_id: int, into: kv.KvCache) -> bool:
    """Whether a pull by cache id finds something; the pull, with an offset, changes nothing."""
    try:
        await stage.pull_by(kv.CacheKeyByIdAndIndex(P, cache_id), into, src_cache_offset=0)
    except kv.CacheNotFoundError:
        return False
    return True


# Section 7: the worked examples.


async def test_worked_case_1(world: str, transport: str) -> None:
    """P allocates batch 4 with keys r0, pad, r2. D pulls r0 into slot 3. r0 gone, r2 stays. P deallocates: deferred.

    D pulls r2: memory freed. Source: the spec, section 7, case 1.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10, None, 12])
        await stage.pull(10, into, batch_index=3)
        expect(into.tensors, stage.owner.stamp(cache), [3], src_blocks=[0])
        assert not await is_bound(stage, 10, into)
        assert await is_bound(stage, 12, into)
        await stage.owner.call("deallocate", cache=cache)
        assert await stage.owner.call("used_nbytes") == CACHE_NBYTES
        await stage.pull(12, into, batch_index=1)
        expect(into.tensors, stage.owner.stamp(cache), [1], src_blocks=[2])
        assert await stage.owner.call("used_nbytes") == 0


async def test_worked_case_2(world: str, transport: str) -> None:
    """P allocates r0, deallocates, D pulls twice: first ok, second KV_CACHE_NOT_EXIST.

    Source: the spec, section 7, case 2.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        await stage.owner.call("deallocate", cache=cache)
        await stage.pull(10, into)
        expect(into.tensors, stage.owner.stamp(cache), [0])
        with pytest.raises(kv.CacheNotFoundError) as caught:
            await stage.pull(10, into)
        assert caught.value.status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST


async def test_worked_case_3(world: str, transport: str) -> None:
    """P allocates r0; D pulls with src_cache_offset=0: key stays; D pulls plainly: key goes.

    Source: the spec, section 7, case 3.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        await stage.pull(10, into, src_cache_offset=0)
        assert await is_bound(stage, 10, into)
        await stage.pull(10, into)
        assert not await is_bound(stage, 10, into)


async def test_worked_case_4(world: str, transport: str) -> None:
    """4 tensors, N=2: pull layer 0, key stays; pull layer 0 again, stays; pull layer 1, goes.

    Source: the spec, section 7, case 4.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        for _ in range(2):
            await stage.pull(10, into, src_layer_range=range(1), dst_layer_range=range(1))
            assert await is_bound(stage, 10, into)
        await stage.pull(10, into, src_layer_range=range(1, 2), dst_layer_range=range(1, 2))
        assert not await is_bound(stage, 10, into)


async def test_worked_case_4_with_layers_of_one_tensor(world: str, transport: str) -> None:
    """With N=1 and 4 ranges it takes four. Source: the spec, section 7, case 4."""
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        for layer in (2, 0, 3, 1):
            assert await is_bound(stage, 10, into)
            layers = range(layer, layer + 1)
            await stage.pull(10, into, src_layer_range=layers, dst_layer_range=layers, tensor_num_per_layer=1)
        assert not await is_bound(stage, 10, into)


async def test_worked_case_5(world: str, transport: str) -> None:
    """Prefix key p: D pulls any number of times; P must remove. Source: the spec, section 7, case 5."""
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[], prefixes=[77])
        await stage.owner.call("deallocate", cache=cache)
        for _ in range(3):
            await stage.pull_by(prefix(77), into)
        expect(into.tensors, stage.owner.stamp(cache), [0])
        assert await stage.owner.call("used_nbytes") == CACHE_NBYTES
        await stage.owner.call("remove_prefix", prefix=77)
        assert await stage.owner.call("used_nbytes") == 0
        with pytest.raises(kv.CacheNotFoundError):
            await stage.pull_by(prefix(77), into)


async def test_worked_case_6(world: str, transport: str) -> None:
    """P allocates with r0; D pulls by (id, slot 0): r0 goes. Pulls by (id, slot 1): nothing changes.

    Source: the spec, section 7, case 6.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        cache_id = await stage.owner.call("cache_id", cache=cache)
        await stage.pull_by(kv.CacheKeyByIdAndIndex(P, cache_id, 1), into)
        expect(into.tensors, stage.owner.stamp(cache), [0], src_blocks=[1])
        assert await is_bound(stage, 10, into)
        await stage.pull_by(kv.CacheKeyByIdAndIndex(P, cache_id, 0), into)
        expect(into.tensors, stage.owner.stamp(cache), [0])
        assert not await is_bound(stage, 10, into)


async def test_worked_case_7(world: str, transport: str) -> None:
    """r0 pulled and cache not deallocated: P may allocate another cache with r0 again. Before the pull: refused.

    Source: the spec, section 7, case 7.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        with pytest.raises(kv.ParameterError) as caught:
            await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
        assert await stage.owner.call("used_nbytes") == CACHE_NBYTES
        await stage.pull(10, into)
        again = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        await stage.pull(10, into)
        expect(into.tensors, stage.owner.stamp(again), [0])


async def test_worked_case_8(world: str, transport: str) -> None:
    """Pool of exactly one cache: second allocate OOM; after deallocate plus last key release, succeeds.

    Source: the spec, section 7, case 8.
    """
    shape = [4, 1 << 16]
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(kv.CacheDesc(4, shape, "uint8"))
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=shape, keys=[10])

        async def cannot_allocate() -> None:
            with pytest.raises(kv.KVLinkError) as caught:
                await stage.owner.call("allocate_slots", num_tensors=1, shape=[512], keys=[])
            assert caught.value.status is kv.StatusCode.LLM_DEVICE_OUT_OF_MEMORY

        await cannot_allocate()
        await stage.owner.call("deallocate", cache=cache)
        await cannot_allocate()
        await stage.pull(10, into)
        await stage.owner.call("allocate_slots", num_tensors=4, shape=shape, keys=[10])


async def test_worked_case_9(world: str, transport: str) -> None:
    """Remove key while still linked, then pull: KV_CACHE_NOT_EXIST and the link still works for other keys.

    Source: the spec, section 7, case 9.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10, 11])
        await stage.owner.call("remove_key", request=10)
        with pytest.raises(kv.CacheNotFoundError):
            await stage.pull(10, into)
        await stage.pull(11, into)
        expect(into.tensors, stage.owner.stamp(cache), [0], src_blocks=[1])


async def test_worked_case_10(world: str, transport: str) -> None:
    """Switch role P to D and back: keys bound before still resolve after re-linking.

    Source: the spec, section 7, case 10.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        (await stage.decoder.unlink_clusters([P])).raise_for_status()
        await stage.owner.call("switch_role", role="DECODER")
        await stage.relink(transport, await stage.owner.call("switch_role", role="PROMPT"))
        await stage.pull(10, into)
        expect(into.tensors, stage.owner.stamp(cache), [0])


# Sections 5.1 and 5.2.


async def test_cache_ids() -> None:
    """cache_id comes from a counter, never reused. Source: the spec, section 5.1.

    Where that begins at 1, ours begins elsewhere in every life, so that an id of an earlier life names nothing now.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager, ids = prompt.kv_cache_manager, []
        for _ in range(3):
            cache = manager.allocate_cache(DESC)
            ids.append(cache.cache_id)
            manager.deallocate_cache(cache)
        assert ids == [ids[0], ids[0] + 1, ids[0] + 2]
    async with cluster(P, kv.Role.PROMPT) as prompt:
        cache = prompt.kv_cache_manager.allocate_cache(DESC)
        assert abs(cache.cache_id - ids[0]) > 2**19
        prompt.kv_cache_manager.deallocate_cache(cache)


async def test_deallocated_with_keys_left(transport: str) -> None:
    """Deallocate, keys left: memory stays, still pullable by key and by id; local handle unusable.

    Source: the spec, section 5.2.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10), request(11)])
        stamp, cache_id = stamped(cache), cache.cache_id
        into = pair.reader.allocate_cache(DESC)
        pair.owner.deallocate_cache(cache)
        assert not cache.is_valid
        assert used_nbytes(pair.prompt) == CACHE_NBYTES
        await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache_id, 3), into)
        expect(into.tensors, stamp, [0], src_blocks=[3])
        await pair.reader.pull_cache(request(11), into)
        expect(into.tensors, stamp, [0], src_blocks=[1])


async def test_deallocated_without_keys() -> None:
    """Deallocate, no keys: freed now. Source: the spec, section 5.2."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        cache = prompt.kv_cache_manager.allocate_cache(DESC)
        assert used_nbytes(prompt) == CACHE_NBYTES
        prompt.kv_cache_manager.deallocate_cache(cache)
        assert used_nbytes(prompt) == 0


async def test_last_key_released_while_held(world: str, transport: str) -> None:
    """Last key released, ext_ref 1: memory stays, addressable only by id. Source: the spec, section 5.2."""
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_cache(DESC)
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        await stage.pull(10, into)
        assert await stage.owner.call("used_nbytes") == CACHE_NBYTES
        assert not await is_bound(stage, 10, into)
        assert await is_there(stage, await stage.owner.call("cache_id", cache=cache), into)
        expect(into.tensors, stage.owner.stamp(cache), [0])


async def test_last_key_released_after_deallocation(transport: str) -> None:
    """Last key released, ext_ref 0: freed now, and the id is gone too. Source: the spec, section 5.2."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        into, cache_id = pair.reader.allocate_cache(DESC), cache.cache_id
        pair.owner.deallocate_cache(cache)
        pair.owner.remove_cache_key(request(10))
        assert used_nbytes(pair.prompt) == 0
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache_id), into)


async def test_four_slots_with_two_keys(transport: str) -> None:
    """4 slots, keys at 0, padding at 1, key at 2; deallocate; both keys still resolve; remove key 0; entry lives with
    one key; remove the other; entry gone; pool fully available again. Source: the spec, section 5.2, tested.
    """
    desc = kv.CacheDesc(4, (4, 1 << 16), "uint8")
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(desc, [request(10), request(kv.ABSENT), request(12)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(desc)
        pair.owner.deallocate_cache(cache)
        for key, slot in ((request(10), 0), (request(12), 2)):
            await pair.reader.pull_cache(key, into, src_cache_offset=0)
            expect(into.tensors, stamp, [0], src_blocks=[slot])
        pair.owner.remove_cache_key(request(10))
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(request(10), into)
        await pair.reader.pull_cache(request(12), into, src_cache_offset=0)
        with pytest.raises(kv.OutOfMemoryError):
            pair.owner.allocate_cache(desc)
        await pair.flush()
        pair.owner.remove_cache_key(request(12))
        again = pair.owner.allocate_cache(desc)
        assert again.is_valid


async def test_deallocated_blocks_cache(world: str, transport: str) -> None:
    """Deallocate a blocks cache: its key vanishes at once and memory is freed; blocks keys never defer.

    Source: the spec, section 5.2.
    """
    async with owner_and_reader(world, transport) as stage:
        into = stage.reader.allocate_blocks_cache(DESC)
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[4, SLOT], model_id=5)
        await stage.reader.pull_blocks(kv.BlocksCacheKey(P, 5), into, [1], [2])
        await stage.owner.call("deallocate", cache=cache)
        assert await stage.owner.call("used_nbytes") == 0
        with pytest.raises(kv.CacheNotFoundError) as caught:
            await stage.reader.pull_blocks(kv.BlocksCacheKey(P, 5), into, [1], [2])
        assert caught.value.status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST
        again = await stage.owner.call("allocate_blocks", num_tensors=4, shape=[4, SLOT], model_id=5)
        await stage.reader.pull_blocks(kv.BlocksCacheKey(P, 5), into, [1], [2])
        expect(into.tensors, stage.owner.stamp(again), [2], src_blocks=[1])


async def test_memory_of_a_running_pull(transport: str) -> None:
    """Memory that a running transfer is using stays alive until that operation ends; bookkeeping changes at once.

    The pull itself ends well, since nothing else was put there. Source: the spec, section 5.2.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        held = hold(pair.decoder, P, "get")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.reader.pull_cache, request(10), into)
            await held.reached.wait()
            pair.owner.deallocate_cache(cache)
            pair.owner.remove_cache_key(request(10))
            assert used_nbytes(pair.prompt) == CACHE_NBYTES
            with pytest.raises(kv.CacheNotFoundError):
                await pair.reader.pull_cache(request(10), into, 1)
            held.release()
        await pair.flush()
        assert used_nbytes(pair.prompt) == 0
        expect(into.tensors, stamp, [0])


async def test_memory_of_a_running_pull_of_a_key(transport: str) -> None:
    """A pull in flight may end when the id reference goes: the key holds the cache. Source: the spec, section 5.2."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        held = hold(pair.decoder, P, "get")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.reader.pull_cache, request(10), into)
            await held.reached.wait()
            assert num_read_leases(pair.prompt) == 1
            pair.owner.deallocate_cache(cache)
            held.release()
        expect(into.tensors, stamp, [0])
        await pair.flush()
        assert num_read_leases(pair.prompt) == 0
        assert used_nbytes(pair.prompt) == 0


async def test_memory_behind_a_view() -> None:
    """kvlink: memory is reused only after the views on it have died, also when all references of section 5.2 are gone.

    Source: the spec, section 5.2, and DIFFERENCES.md.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        cache = prompt.kv_cache_manager.allocate_cache(DESC)
        view = cache.tensors[2][1, 7:9]
        view[:] = 42
        prompt.kv_cache_manager.deallocate_cache(cache)
        assert used_nbytes(prompt) == CACHE_NBYTES
        assert view.tolist() == [42, 42]
        del view
        assert used_nbytes(prompt) == 0


# Section 5.3: what releases a key.


async def test_partial_size_releases(transport: str) -> None:
    """The amount (size) does not matter: a partial-bytes pull of all tensors releases the key.

    Source: the spec, section 5.3.
    """
    async with linked_pair(transport) as pair:
        pair.owner.deallocate_cache(pair.owner.allocate_cache(DESC, [request(10)]))
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(request(10), into, size=1)
        await pair.flush()
        assert used_nbytes(pair.prompt) == 0


async def test_offsets_never_release(transport: str) -> None:
    """Never for a pull "with offset" (either offset argument given, even 0). Source: the spec, section 5.3."""
    async with linked_pair(transport) as pair:
        pair.owner.deallocate_cache(pair.owner.allocate_cache(DESC, [request(10)]))
        into = pair.reader.allocate_cache(DESC)
        for _ in range(2):
            await pair.reader.pull_cache(request(10), into, size=16, src_cache_offset=0)
            await pair.reader.pull_cache(request(10), into, size=16, dst_cache_offset=0)
            await pair.reader.pull_cache(request(10), into, size=16, src_cache_offset=8)
        await pair.flush()
        assert used_nbytes(pair.prompt) == CACHE_NBYTES


async def test_as_many_indices_as_tensors(transport: str) -> None:
    """A full pull (as many indices as tensors) empties the set at once. Source: the spec, section 5.3."""
    async with linked_pair(transport) as pair:
        pair.owner.deallocate_cache(pair.owner.allocate_cache(DESC, [request(10)]))
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(request(10), into, src_layer_range=range(2), dst_layer_range=range(2))
        await pair.flush()
        assert used_nbytes(pair.prompt) == 0


@pytest.mark.parametrize("order", [(range(2), range(2, 4)), (range(2, 4), range(2))])
async def test_layers_in_any_order(transport: str, order: tuple[range, range]) -> None:
    """Pulling layers 0..1 then 2..3 releases on the second, in any order. Source: the spec, section 5.3."""
    desc = kv.CacheDesc(8, (2, 64), "uint8")
    async with linked_pair(transport) as pair:
        pair.owner.deallocate_cache(pair.owner.allocate_cache(desc, [request(10)]))
        into = pair.reader.allocate_cache(desc)
        await pair.reader.pull_cache(request(10), into, src_layer_range=order[0], dst_layer_range=range(2))
        await pair.flush()
        assert used_nbytes(pair.prompt) > 0
        await pair.reader.pull_cache(request(10), into, src_layer_range=order[1], dst_layer_range=range(2))
        await pair.flush()
        assert used_nbytes(pair.prompt) == 0


async def test_layers_are_counted_for_each_slot(transport: str) -> None:
    """Layers of one slot say nothing of another (one generation of the spec counts them together).

    Source: the spec, sections 5.3 and 9.3.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10), request(11)])
        stamp = stamped(cache)
        pair.owner.deallocate_cache(cache)
        into = pair.reader.allocate_cache(DESC)
        for number, layer in ((10, 0), (11, 1)):
            layers = range(layer, layer + 1)
            await pair.reader.pull_cache(request(number), into, src_layer_range=layers, dst_layer_range=layers)
        await pair.flush()
        for slot in (0, 1):
            await pair.reader.pull_cache(request(10 + slot), into)
            expect(into.tensors, stamp, [0], src_blocks=[slot])
        await pair.flush()
        assert used_nbytes(pair.prompt) == 0


async def test_layers_by_id_count_too(transport: str) -> None:
    """By id: if (cache id, slot) maps to a key, that key is released the same way. Source: the spec, section 5.3."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(9), request(10)])
        by_id = kv.CacheKeyByIdAndIndex(P, cache.cache_id, 1)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(by_id, into, src_layer_range=range(1), dst_layer_range=range(1))
        await pair.reader.pull_cache(request(10), into, src_layer_range=range(1, 2), dst_layer_range=range(1))
        await pair.flush()
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(request(10), into)
        await pair.reader.pull_cache(request(9), into)


async def test_what_leaves_keys_alone(transport: str) -> None:
    """Nothing else. Pushes, transfer_cache_async, copies, swaps, link loss, and deallocation leave keys alone.

    Source: the spec, section 5.3.
    """
    async with linked_pair(transport, host_pool="64KiB") as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        host = pair.owner.allocate_cache(kv.CacheDesc(4, (4, SLOT), "uint8", kv.Placement.HOST))
        await pair.owner.push_cache(kv.CacheKeyByIdAndIndex(D, into.cache_id), cache)
        await pair.reader.push_cache(kv.CacheKeyByIdAndIndex(P, cache.cache_id, 3), into)
        config = kv.TransferWithCacheKeyConfig(kv.CacheKeyByIdAndIndex(D, into.cache_id), range(2), range(2))
        await pair.owner.transfer_cache_async(cache, Ready(), [config])
        await pair.owner.copy_cache(cache, cache, 1, 0)
        await pair.owner.copy_blocks(cache, {1: [2]})
        await pair.owner.swap_blocks(cache, host, {0: 0})
        pair.owner.deallocate_cache(cache)
        link_to(pair.decoder, P).endpoint.abort()
        (await pair.decoder.unlink_clusters([P], force=True)).raise_for_status()
        info = kv.ClusterInfo(P, pair.prompt.address)
        (await pair.decoder.link_clusters([info])).raise_for_status()
        await pair.reader.pull_cache(request(10), into, 2)
        expect(into.tensors, stamp, [2], src_blocks=[0])


class Ready(kv.LayerSynchronizer):
    """Every layer is there already."""

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


async def test_rejected_at_the_owner(transport: str) -> None:
    """kvlink: a pull that P rejects (too long, bad source tensor index) consumes nothing.

    Source: the spec, sections 5.3 and 19, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        stamped(cache)
        into = pair.reader.allocate_cache(kv.CacheDesc(4, (2, 2 * SLOT), "uint8"))
        more = pair.reader.allocate_cache(kv.CacheDesc(6, (2, SLOT), "uint8"))
        fewer = pair.reader.allocate_cache(kv.CacheDesc(2, (2, SLOT), "uint8"))
        other = pair.reader.allocate_cache(kv.CacheDesc(4, (2, SLOT), "int8"))
        before = snapshot(into)
        cases: list[tuple[kv.KvCache, dict[str, Any]]] = [
            (into, {}),
            (into, {"size": SLOT + 1}),
            (more, {}),
            (fewer, {}),
            (other, {}),
            (into, {"src_layer_range": range(3), "dst_layer_range": range(2), "size": 1}),
        ]
        for destination, options in cases:
            call = pair.reader.pull_cache(request(10), destination, **options)
            await refused(call, kv.ParameterError, (destination, options))
        assert snapshot(into) == before
        await pair.flush()
        assert num_read_leases(pair.prompt) == 0
        await pair.reader.pull_cache(request(10), into, size=SLOT)


async def test_rejected_at_the_reader(transport: str) -> None:
    """A pull that D rejects before contacting P (bad slot, bad offset, unknown local cache, no link) changes nothing
    on P. Source: the spec, section 5.3.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        stamp = stamped(cache)
        into, gone = pair.reader.allocate_cache(DESC), pair.reader.allocate_cache(DESC)
        pair.reader.deallocate_cache(gone)
        asked = link_to(pair.decoder, P).stats.round_trips
        with pytest.raises(kv.ParameterError):
            await pair.reader.pull_cache(request(10), into, 4)
        with pytest.raises(kv.ParameterError):
            await pair.reader.pull_cache(request(10), into, dst_cache_offset=SLOT)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(request(10), gone)
        with pytest.raises(kv.NotLinkedError):
            await pair.reader.pull_cache(kv.CacheKey(9, 10), into)
        assert link_to(pair.decoder, P).stats.round_trips == asked
        await pair.reader.pull_cache(request(10), into)
        expect(into.tensors, stamp, [0])


async def test_released_on_delivery(world: str, transport: str) -> None:
    """kvlink: the key is released when D has received, so a D that gives up in the middle leaves it usable.

    Source: the spec, sections 5.3 and 19, and DIFFERENCES.md.
    """
    async with owner_and_reader(world, transport) as stage:
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        into = stage.reader.allocate_cache(DESC)
        held = hold(stage.decoder, P, "get")
        with pytest.raises(kv.TransferTimeoutError) as caught:
            await stage.reader.pull_cache(kv.CacheKey(P, 10), into, timeout_s=0.05)
        assert caught.value.status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
        async with anyio.create_task_group() as tasks:
            again = hold(stage.decoder, P, "get")
            tasks.start_soon(stage.reader.pull_cache, kv.CacheKey(P, 10), into)
            await again.reached.wait()
            tasks.cancel_scope.cancel()
        again.release()
        held.release()
        await stage.flush()
        assert await stage.owner.call("usage") | {"read_leases": 0} == await stage.owner.call("usage")
        await stage.pull(10, into)
        expect(into.tensors, stage.owner.stamp(cache), [0])
        assert not await is_bound(stage, 10, into)


async def test_lost_reader_leaves_the_key(transport: str) -> None:
    """kvlink: a D that goes away in the middle of a pull leaves the key usable, and its lease is taken back.

    Source: the spec, section 19, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(10)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        held = hold(pair.decoder, P, "get")
        lost: list[kv.KVLinkError] = []

        async def pull() -> None:
            with pytest.raises(kv.KVLinkError) as caught:
                await pair.reader.pull_cache(request(10), into)
            lost.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await held.reached.wait()
            link = link_to(pair.prompt, D)
            (await pair.decoder.unlink_clusters([P], force=True)).raise_for_status()
            await link.closed.wait()
            assert num_read_leases(pair.prompt) == 0
            held.release()
        assert lost
        (await pair.decoder.link_clusters([kv.ClusterInfo(P, pair.prompt.address)])).raise_for_status()
        await pair.reader.pull_cache(request(10), into)
        expect(into.tensors, stamp, [0])


async def test_prefix_slot_by_id(transport: str) -> None:
    """kvlink: a prefix-keyed slot can be addressed by id, and that releases nothing either.

    Source: the spec, section 5.3, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [prefix(77)])
        stamp, cache_id = stamped(cache), cache.cache_id
        pair.owner.deallocate_cache(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache_id), into)
        expect(into.tensors, stamp, [0])
        await pair.reader.pull_cache(prefix(77), into)
        await pair.flush()
        assert used_nbytes(pair.prompt) == CACHE_NBYTES


# Section 5.4.


@every_loop
async def test_missing_key(transport: str) -> None:
    """P answers immediately with KV_CACHE_NOT_EXIST; there is no waiting for a key that appears later. The link stays
    healthy, other requests are unaffected, the caller may retry. Source: the spec, section 5.4.
    """
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_cache(DESC)
        present = pair.owner.allocate_cache(DESC, [request(11)])
        stamp = stamped(present)
        with pytest.raises(kv.CacheNotFoundError) as caught:
            await pair.reader.pull_cache(request(10), into)
        assert caught.value.status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST
        assert caught.value.peer == P
        await pair.reader.pull_cache(request(11), into)
        expect(into.tensors, stamp, [0])
        late = pair.owner.allocate_cache(DESC, [request(10)])
        stamp = stamped(late)
        await pair.reader.pull_cache(request(10), into)
        expect(into.tensors, stamp, [0])
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_blocks(kv.BlocksCacheKey(P, 3), into, [0], [0])
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, 99), into)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, late.cache_id, 4), into)
        assert link_to(pair.decoder, P).is_open


# Section 6.1.


async def test_before_and_after() -> None:
    """Use before entering is an error, and so is use after leaving (the spec's is_initialized).

    Source: the spec, sections 1.9 and 6.1.
    """
    made = kv.Cluster(cluster_id=P, role=kv.Role.PROMPT, pool="1MiB")
    with pytest.raises(kv.ClosedError):
        _ = made.kv_cache_manager
    async with made:
        manager = made.kv_cache_manager
        cache = manager.allocate_cache(DESC)
    with pytest.raises(kv.ClosedError) as caught:
        manager.allocate_cache(DESC)
    assert caught.value.status is kv.StatusCode.LLM_ENGINE_FINALIZED
    assert isinstance(caught.value, RuntimeError)
    assert not cache.is_valid


# Section 6.2.


async def test_key_i_is_slot_i(transport: str) -> None:
    """Key i is bound to batch slot i; placeholders hold a slot's place and at the end may be left out.

    Source: the spec, section 6.2.
    """
    async with linked_pair(transport) as pair:
        keys = [request(kv.ABSENT), request(20), request(kv.ABSENT)]
        cache = pair.owner.allocate_cache(DESC, keys)
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(request(20), into, 2)
        expect(into.tensors, stamp, [2], src_blocks=[1])


async def test_fewer_keys_than_slots() -> None:
    """With batch size > 1 fewer keys than slots is fine. Source: the spec, section 6.2."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        cache = prompt.kv_cache_manager.allocate_cache(DESC, [request(1)])
        assert cache.is_valid


async def test_surplus_keys() -> None:
    """Surplus keys are refused, placeholders included; nothing is allocated and no key is bound.

    Source: the spec, sections 6.2, 9.2 and 19.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        for surplus in (request(5), request(kv.ABSENT)):
            with pytest.raises(kv.ParameterError):
                manager.allocate_cache(DESC, [*map(request, range(4)), surplus])
        assert used_nbytes(prompt) == 0
        cache = manager.allocate_cache(DESC, [*map(request, range(4))])
        assert cache.is_valid


async def test_each_key_keeps_its_own_model_and_namespace(transport: str) -> None:
    """kvlink: each key keeps its own model id and namespace, whatever the first or last key of the list says.

    Source: the spec, sections 6.2 and 9.2, and DIFFERENCES.md.
    """
    keys = [request(7, model_id=1), prefix(7, model_id=2), request(7, model_id=3), prefix(7, model_id=1)]
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, keys)
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        for slot, key in enumerate(keys):
            await pair.reader.pull_cache(key, into, src_cache_offset=0)
            expect(into.tensors, stamp, [0], src_blocks=[slot])
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(request(7, model_id=2), into)


async def test_namespaces_never_collide() -> None:
    """The two namespaces never collide, nor does a placeholder with a blocks key of the same model.

    Source: the spec, section 1.4, and DIFFERENCES.md for the blocks key.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        kept = [
            manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P)),
            manager.allocate_cache(DESC, [request(kv.ABSENT), request(kv.ABSENT)]),
            manager.allocate_cache(DESC, [request(0), prefix(0)]),
        ]
        assert all(cache.is_valid for cache in kept)


async def test_key_bound_elsewhere() -> None:
    """A key already bound to a live cache: the call fails, nothing is allocated, no other key of the call is bound.

    Source: the spec, sections 6.2 and 19.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        first = manager.allocate_cache(DESC, [request(1)])
        with pytest.raises(kv.ParameterError) as caught:
            manager.allocate_cache(DESC, [request(2), request(1)])
        assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
        assert used_nbytes(prompt) == CACHE_NBYTES
        second = manager.allocate_cache(DESC, [request(2)])
        manager.deallocate_cache(first)
        with pytest.raises(kv.ParameterError):
            manager.allocate_cache(DESC, [request(1)])
        assert second.is_valid


async def test_same_key_twice(transport: str) -> None:
    """The same key twice in one list: the last one wins. Source: the spec, sections 6.2 and 19."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [request(1), request(2), request(1)])
        stamp = stamped(cache)
        pair.owner.deallocate_cache(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(request(1), into)
        expect(into.tensors, stamp, [0], src_blocks=[2])
        await pair.reader.pull_cache(request(2), into)
        await pair.flush()
        assert used_nbytes(pair.prompt) == 0


async def test_out_of_memory() -> None:
    """Pool exhausted: LLM_DEVICE_OUT_OF_MEMORY. All or nothing: tensors taken so far go back, no key is bound.

    Source: the spec, section 6.2.
    """
    async with cluster(P, kv.Role.PROMPT, pool="64KiB") as prompt:
        manager = prompt.kv_cache_manager
        with pytest.raises(kv.OutOfMemoryError) as caught:
            manager.allocate_cache(kv.CacheDesc(3, (1, 32 << 10), "uint8"), [request(1)])
        assert caught.value.status is kv.StatusCode.LLM_DEVICE_OUT_OF_MEMORY
        assert used_nbytes(prompt) == 0
        cache = manager.allocate_cache(kv.CacheDesc(2, (1, 32 << 10), "uint8"), [request(1)])
        assert cache.is_valid


async def test_alignment() -> None:
    """Each tensor is aligned to 512 bytes. Source: the spec, section 6.2."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        for shape in ((3, 5), (1, 513), (7, 100)):
            cache = prompt.kv_cache_manager.allocate_cache(kv.CacheDesc(5, shape, "uint8"))
            assert all(address % 512 == 0 for address in cache.tensor_addresses)
            prompt.kv_cache_manager.deallocate_cache(cache)


async def test_descriptions_that_cannot_be() -> None:
    """num_tensors > 0, and a rank of 1 to 31: else LLM_PARAM_INVALID. Source: the spec, sections 1.3 and 6.2."""
    for num_tensors, shape in ((0, (4, 8)), (2, ()), (2, (1,) * 32), (2, (0, 8)), (2, (4, -1))):
        with pytest.raises(kv.ParameterError) as caught:
            kv.CacheDesc(num_tensors, shape, "uint8")
        assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        for rank in (1, 31):
            cache = manager.allocate_cache(kv.CacheDesc(1, (2,) + (1,) * (rank - 1), "uint8"))
            assert cache.tensors[0].ndim == rank
            manager.deallocate_cache(cache)
        with pytest.raises(kv.ParameterError):
            manager.allocate_cache(kv.CacheDesc(1, (2,), kv.DataType.STRING))


async def test_placement(transport: str) -> None:
    """Keys are for DEVICE caches. kvlink also allocates HOST caches, from a pool of their own, and gives them back.

    Source: the spec, sections 6.2 and 6.3, and DIFFERENCES.md.
    """
    desc = kv.CacheDesc(1, (2, 64), "uint8", kv.Placement.HOST)
    async with linked_pair(transport, host_pool="64KiB") as pair:
        with pytest.raises(kv.ParameterError):
            pair.owner.allocate_cache(desc, [request(1)])
        cache = pair.owner.allocate_cache(desc)
        assert used_nbytes(pair.prompt) == 0
        pair.owner.deallocate_cache(cache)
    async with cluster(P, kv.Role.PROMPT) as prompt:
        with pytest.raises(kv.ParameterError):
            prompt.kv_cache_manager.allocate_cache(desc)


# Section 6.3.


async def test_handle_after_deallocation(transport: str) -> None:
    """After it: handle invalid, addresses cleared; pulling into or copying with the handle: LLM_KV_CACHE_NOT_EXIST.

    Source: the spec, section 6.3.
    """
    async with linked_pair(transport, host_pool="64KiB") as pair:
        kept = [
            pair.owner.allocate_cache(DESC, [request(10)]),
            pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P)),
        ]
        gone, live = pair.reader.allocate_cache(DESC), pair.reader.allocate_cache(DESC)
        host = pair.reader.allocate_cache(kv.CacheDesc(4, (4, SLOT), "uint8", kv.Placement.HOST))
        pair.reader.deallocate_cache(gone)
        assert gone.tensors == ()
        assert gone.tensor_addresses == []
        assert not gone.is_valid
        for call in (
            pair.reader.pull_cache(request(10), gone),
            pair.reader.pull_blocks(kv.BlocksCacheKey(P), gone, [0], [0]),
            pair.reader.push_blocks(kv.BlocksCacheKey(P), gone, [0], [0]),
            pair.reader.copy_cache(live, gone),
            pair.reader.copy_cache(gone, live),
            pair.reader.copy_blocks(gone, {0: [1]}),
            pair.reader.swap_blocks(gone, host, {0: 0}),
        ):
            with pytest.raises(kv.CacheNotFoundError) as caught:
                await call
            assert caught.value.status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST
        assert all(cache.is_valid for cache in kept)


async def test_deallocate_twice() -> None:
    """Second call on the same id: documented no-op. Source: the spec, sections 6.3 and 19."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        cache = manager.allocate_cache(DESC, [request(1)])
        manager.deallocate_cache(cache)
        manager.deallocate_cache(cache)
        assert used_nbytes(prompt) == CACHE_NBYTES
        manager.remove_cache_key(request(1))
        manager.deallocate_cache(cache)
        assert used_nbytes(prompt) == 0


async def test_deallocate_blocks_cache() -> None:
    """Works for blocks caches too. Source: the spec, section 6.3."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        prompt.kv_cache_manager.deallocate_cache(
            prompt.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P))
        )
        assert used_nbytes(prompt) == 0


async def test_forgotten_handle() -> None:
    """Garbage collection of a valid handle deallocates it; on P that starts the deferred release.

    Source: the spec, section 1.5.
    """
    async with cluster(P, kv.Role.PROMPT) as prompt:
        cache = prompt.kv_cache_manager.allocate_cache(DESC, [request(1)])
        held = [cache]
        del cache
        with pytest.warns(ResourceWarning, match="garbage-collected"):
            held.clear()
        assert used_nbytes(prompt) == CACHE_NBYTES
        prompt.kv_cache_manager.remove_cache_key(request(1))
        assert used_nbytes(prompt) == 0


# Section 6.4.


async def test_remove_unknown_key() -> None:
    """Unknown or already gone: silent no-op. Source: the spec, sections 5.2 and 6.4."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        cache = manager.allocate_cache(DESC, [request(1)])
        for number in (1, 1, 2, kv.ABSENT):
            manager.remove_cache_key(request(number))
        manager.remove_cache_key(prefix(1))
        assert cache.is_valid


async def test_remove_partly_pulled_key(transport: str) -> None:
    """Releases the whole key, whatever was already pulled by layers. Later pulls of that key: KV_CACHE_NOT_EXIST.

    Source: the spec, section 6.4.
    """
    async with linked_pair(transport) as pair:
        pair.owner.deallocate_cache(pair.owner.allocate_cache(DESC, [request(10)]))
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(request(10), into, src_layer_range=range(1), dst_layer_range=range(1))
        await pair.flush()
        pair.owner.remove_cache_key(request(10))
        assert used_nbytes(pair.prompt) == 0
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(request(10), into, src_layer_range=range(1, 2), dst_layer_range=range(1))


async def test_blocks_keys_are_not_removed() -> None:
    """There is no call taking a BlocksCacheKey. Source: the spec, section 6.4."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        with pytest.raises(TypeError):
            prompt.kv_cache_manager.remove_cache_key(kv.BlocksCacheKey(P))  # type: ignore[arg-type]  # refused
