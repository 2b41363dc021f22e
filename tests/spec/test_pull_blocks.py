"""Paged caches and `pull_blocks`. Source: the spec, sections 6.6 and 6.7."""

from __future__ import annotations

import random
from typing import Any

import anyio
import numpy as np
import pytest

import kvlink as kv
from tests.spec.harness import D, P, cluster, hold, linked_pair, owner_and_reader, refused, stamped
from tests.support.inside import link_to, used_nbytes
from tests.support.loops import every_loop
from tests.support.pattern import expect

NUM = 16
DESC = kv.CacheDesc(4, (NUM, 4, 32), "uint8")
KEY = kv.BlocksCacheKey(P)


# Section 6.6.


async def test_first_dimension_is_blocks() -> None:
    """shape[0] = number of blocks; block bytes = tensor bytes / shape[0]. Source: the spec, section 6.6."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        cache = prompt.kv_cache_manager.allocate_blocks_cache(kv.CacheDesc(2, (6, 5, 3), "float32"), KEY)
        assert (cache.num_blocks, cache.block_nbytes, cache.is_blocks) == (6, 60, True)
        assert [tensor.shape for tensor in cache.tensors] == [(6, 5, 3)] * 2


async def test_one_blocks_cache_for_each_model(transport: str) -> None:
    """Another live blocks cache with the same model_id: fails like a duplicate key; other models have their own.

    Source: the spec, sections 1.4 and 6.6.
    """
    async with linked_pair(transport) as pair:
        caches = {model: pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P, model)) for model in (0, 1, 2**63)}
        stamps = {model: stamped(cache) for model, cache in caches.items()}
        used = used_nbytes(pair.prompt)
        with pytest.raises(kv.ParameterError) as caught:
            pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P, 1))
        assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
        assert used_nbytes(pair.prompt) == used
        into = pair.reader.allocate_blocks_cache(DESC)
        for model, stamp in stamps.items():
            await pair.reader.pull_blocks(kv.BlocksCacheKey(P, model), into, [3], [5])
            expect(into.tensors, stamp, [5], src_blocks=[3])


async def test_cluster_id_of_an_allocated_key(transport: str) -> None:
    """The cluster id is ignored when allocating and must be exact when pulling. Source: the spec, section 1.4."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(77))
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        with pytest.raises(kv.NotLinkedError):
            await pair.reader.pull_blocks(kv.BlocksCacheKey(77), into, [0], [0])
        await pair.reader.pull_blocks(KEY, into, [0], [0])
        expect(into.tensors, stamp, [0])


async def test_without_a_key(transport: str) -> None:
    """Without a key there is no difference except that it cannot be addressed by key.

    Source: the spec, section 6.6.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_blocks(KEY, into, [0], [0])
        await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache.cache_id, 7), into, 2)
        expect(into.tensors, stamp, [2], src_blocks=[7])


# Section 6.7.


@every_loop
async def test_block_to_block(transport: str) -> None:
    """For every i and every selected tensor: block prompt_blocks[i] of P goes to block decoder_blocks[i] of D, in full.

    Source: the spec, section 6.7.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        other = stamped(into, D)
        report = await pair.reader.pull_blocks(KEY, into, [7, 0, 15, 8], [1, 14, 3, 2])
        expect(into.tensors, stamp, [1, 14, 3, 2], src_blocks=[7, 0, 15, 8])
        expect(into.tensors, other, [0, *range(4, 14), 15])
        assert (report.nbytes, set(report.done), report.failed) == (4 * 4 * 128, {1, 14, 3, 2}, ())


async def test_between_processes(transport: str) -> None:
    """The same between two processes, for any choice of blocks. Source: the spec, section 6.7."""
    chance = random.Random(7)
    async with owner_and_reader("two processes", transport) as stage:
        shape = [64, 256]
        cache = await stage.owner.call("allocate_blocks", num_tensors=4, shape=shape, model_id=0)
        into = stage.reader.allocate_blocks_cache(kv.CacheDesc(4, shape, "uint8"))
        for _ in range(20):
            count = chance.randint(1, 64)
            source, destination = chance.choices(range(64), k=count), chance.sample(range(64), count)
            other = stamped(into, D)
            await stage.reader.pull_blocks(KEY, into, source, destination)
            expect(into.tensors, stage.owner.stamp(cache), destination, src_blocks=source)
            expect(into.tensors, other, [block for block in range(64) if block not in destination])


async def test_runs_are_merged(transport: str) -> None:
    """Runs of consecutive indices on both sides are merged into one transfer, in whatever order they are listed.

    Source: the spec, section 6.7.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        for source, destination, num_extents in (
            ([2, 3, 4, 5], [8, 9, 10, 11], 1),
            ([5, 3, 4, 2], [11, 9, 10, 8], 1),
            ([2, 3, 5, 6], [8, 9, 10, 11], 2),
            ([2, 3, 4, 5], [8, 9, 11, 12], 2),
            ([5, 4, 3], [8, 9, 10], 3),
        ):
            report = await pair.reader.pull_blocks(KEY, into, source, destination)
            assert report.num_extents == num_extents
            expect(into.tensors, stamp, destination, src_blocks=source)


@pytest.mark.parametrize(
    ("width", "src_layers", "dst_layers"),
    [(2, range(1, 2), range(1)), (1, range(1, 3), range(2, 4)), (4, range(1), range(1)), (2, None, range(2))],
)
async def test_layers(transport: str, width: int, src_layers: range | None, dst_layers: range) -> None:
    """src_layer_range, dst_layer_range, tensor_num_per_layer as for pull_cache. Source: the spec, section 6.7."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        other = stamped(into, D)
        await pair.reader.pull_blocks(
            KEY,
            into,
            [4, 5],
            [6, 7],
            src_layer_range=src_layers,
            dst_layer_range=dst_layers,
            tensor_num_per_layer=width,
        )
        first, stop = dst_layers.start * width, dst_layers.stop * width
        from_tensor = 0 if src_layers is None else src_layers.start * width
        expect(into.tensors[first:stop], stamp, [6, 7], src_blocks=[4, 5], src_tensor=from_tensor)
        expect(into.tensors[:first], other)
        expect(into.tensors[stop:], other, src_tensor=stop)


async def test_other_number_of_blocks(transport: str) -> None:
    """Both sides may have different numbers of blocks. Source: the spec, section 6.7."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(kv.CacheDesc(4, (40, 128), "uint8"))
        await pair.reader.pull_blocks(KEY, into, [15, 1], [39, 0])
        expect(into.tensors, stamp, [39, 0], src_blocks=[15, 1])


async def test_repeatable(transport: str) -> None:
    """Never releases anything; repeatable; one source block may go to several places. Source: the spec, section 6.7."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        for _ in range(3):
            await pair.reader.pull_blocks(KEY, into, [4, 4, 4], [0, 5, 6])
            expect(into.tensors, stamp, [0, 5, 6], src_blocks=[4, 4, 4])
        assert cache.is_valid


async def test_pulls_see_what_is_there_now(transport: str) -> None:
    """A later pull brings what the owner has written since. Source: the spec, section 6.7."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        into = pair.reader.allocate_blocks_cache(DESC)
        for value in range(5):
            cache.tensors[3][9] = value
            await pair.reader.pull_blocks(KEY, into, [9], [value])
            assert (into.tensors[3][value] == value).all()


async def test_asks_the_owner_once(transport: str) -> None:
    """kvlink: the first pull costs one round trip to P, later ones none; a new cache is asked for anew.

    Source: the spec, section 10, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        stats = link_to(pair.decoder, P).stats
        for round_trips in (1, 2):
            before = stats.round_trips
            for _ in range(4):
                await pair.reader.pull_blocks(KEY, into, [0], [1])
            assert stats.round_trips == before + 1, round_trips
            pair.owner.deallocate_cache(cache)
            cache = pair.owner.allocate_blocks_cache(DESC, KEY)
            stamp = stamped(cache)
        await pair.reader.pull_blocks(KEY, into, [0], [1])
        expect(into.tensors, stamp, [1], src_blocks=[0])


async def test_unknown_blocks_key(transport: str) -> None:
    """Unknown blocks key: KV_CACHE_NOT_EXIST. Source: the spec, section 6.7."""
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_blocks_cache(DESC)
        with pytest.raises(kv.CacheNotFoundError) as caught:
            await pair.reader.pull_blocks(KEY, into, [0], [0])
        assert caught.value.status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST


async def test_ends_while_being_read(transport: str) -> None:
    """kvlink: a blocks cache that P gives back in the middle of a pull fails the pull, and its memory is free at once.

    Source: the spec, section 5.2, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        into = pair.reader.allocate_blocks_cache(DESC)
        held = hold(pair.decoder, P, "get")
        failures: list[kv.KVLinkError] = []

        async def pull() -> None:
            with pytest.raises(kv.CacheNotFoundError) as caught:
                await pair.reader.pull_blocks(KEY, into, [0], [0])
            failures.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await held.reached.wait()
            pair.owner.deallocate_cache(cache)
            assert used_nbytes(pair.prompt) == 0
            held.release()
        assert failures[0].status is kv.StatusCode.LLM_KV_CACHE_NOT_EXIST
        assert failures[0].phase == "settle"


BAD_VALUES: list[tuple[list[int], list[int], dict[str, Any]]] = [
    ([0], [NUM], {}),
    ([NUM], [0], {}),
    ([0, 1, NUM], [0, 1, 2], {}),
    ([-1], [0], {}),
    ([0], [-1], {}),
    ([2**63], [0], {}),
    ([0, 1], [0], {}),
    ([0], [0, 1], {}),
    ([], [0], {}),
    ([0], [], {}),
    ([0, 1], [5, 5], {}),
    ([0], [0], {"src_layer_range": range(3)}),
    ([0], [0], {"dst_layer_range": range(1)}),
    ([0], [0], {"dst_layer_range": range(0, 2, 2)}),
    ([0], [0], {"tensor_num_per_layer": 0}),
]


async def test_values_that_are_refused(transport: str) -> None:
    """Lists of unequal length and indices outside of 0..num_blocks-1 on either side: PARAM_INVALID, before a byte
    moves. kvlink refuses a destination block that occurs twice, too. Source: the spec, section 6.7, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        other = stamped(into, D)
        for source, destination, options in BAD_VALUES:
            call = pair.reader.pull_blocks(KEY, into, source, destination, **options)
            await refused(call, kv.ParameterError, (source, destination, options))
            expect(into.tensors, other)
            assert into.is_quiet()
        await pair.reader.pull_blocks(KEY, into, [1], [2])
        expect(into.tensors, stamp, [2], src_blocks=[1])


NOT_BLOCKS: list[Any] = [[True], [1.0], ["1"], [None], np.array([1.0]), np.array([[1]]), "1", 1, {1}]


async def test_types_that_are_refused(transport: str) -> None:
    """Both are real lists, of int; kvlink refuses bool and float, and takes tuples, ranges and integer arrays too.

    Source: the spec, section 6.7, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        other = stamped(into, D)
        for blocks in NOT_BLOCKS:
            await refused(pair.reader.pull_blocks(KEY, into, blocks, [1]), TypeError, blocks)
            await refused(pair.reader.pull_blocks(KEY, into, [1], blocks), TypeError, blocks)
        expect(into.tensors, other)


async def test_other_lists(transport: str) -> None:
    """kvlink: tuples, ranges and 1-D integer arrays are lists too.

    Source: the spec, section 6.7, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_blocks_cache(DESC)
        lists: list[Any] = [(3, 4), range(3, 5), np.array([3, 4]), np.array([3, 4], np.uint8), [np.int64(3), 4]]
        for blocks in lists:
            other = stamped(into, D)
            await pair.reader.pull_blocks(KEY, into, blocks, blocks)
            expect(into.tensors, stamp, [3, 4])
            expect(into.tensors, other, [0, 1, 2, *range(5, NUM)])


async def test_empty_lists(transport: str) -> None:
    """kvlink: empty lists are a no-op, once link and destination have been checked.

    Source: the spec, section 6.7, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_blocks_cache(DESC)
        report = await pair.reader.pull_blocks(KEY, into, [], [])
        assert (report.nbytes, report.done, report.failed) == (0, (), ())
        with pytest.raises(kv.NotLinkedError):
            await pair.reader.pull_blocks(kv.BlocksCacheKey(9), into, [], [])


async def test_types_of_ranges(transport: str) -> None:
    """A layer range is a range or None: TypeError, as an error of kvlink's that names it.

    Source: the spec, section 6.7.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        assert cache.is_valid
        into = pair.reader.allocate_blocks_cache(DESC)
        with pytest.raises(kv.ParameterTypeError, match="dst_layer_range"):
            await pair.reader.pull_blocks(KEY, into, [0], [0], dst_layer_range=[0])  # type: ignore[arg-type]  # refused
        with pytest.raises(kv.ParameterTypeError, match="src_layer_range"):
            await pair.reader.pull_blocks(KEY, into, [0], [0], src_layer_range=[0])  # type: ignore[arg-type]  # refused


async def test_keys_that_are_refused(transport: str) -> None:
    """The key is a BlocksCacheKey, or names one slot. Source: the spec, sections 6.7 and 9.3."""
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_blocks_cache(DESC)
        for key in (P, ("blocks", 0), None):
            with pytest.raises(TypeError):
                await pair.reader.pull_blocks(key, into, [0], [0])  # type: ignore[arg-type]  # refused


# Section 9.3: a contiguous slot scattered into blocks.


async def test_slot_into_blocks(transport: str) -> None:
    """The contiguous source slot is scattered: chunk j goes to block dst_blocks[j]; the last chunk may be short.

    Tested: 7 int32 into 2-int blocks [1, 3, 5, 7] leaves the tail of block 7 untouched. Consumes the CacheKey.

    Source: the spec, section 9.3.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(kv.CacheDesc(2, (2, 7), "int32"), [kv.CacheKey(P, 9), kv.CacheKey(P, 10)])
        for tensor in cache.tensors:
            tensor[:] = np.arange(14).reshape(2, 7)
        into = pair.reader.allocate_blocks_cache(kv.CacheDesc(2, (8, 2), "int32"))
        for tensor in into.tensors:
            tensor[:] = -1
        report = await pair.reader.pull_blocks(kv.CacheKey(P, 10), into, [], [1, 3, 5, 7])
        assert (report.nbytes, set(report.done)) == (2 * 28, {1, 3, 5, 7})
        for tensor in into.tensors:
            assert tensor[[1, 3, 5, 7]].ravel().tolist() == [7, 8, 9, 10, 11, 12, 13, -1]
            assert (tensor[[0, 2, 4, 6]] == -1).all()
        await pair.flush()
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_blocks(kv.CacheKey(P, 10), into, [], [1, 3, 5, 7])
        await pair.reader.pull_blocks(kv.CacheKeyByIdAndIndex(P, cache.cache_id, 0), into, [], [7, 6, 5, 4])
        assert into.tensors[1][[7, 6, 5, 4]].ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, -1]


async def test_slot_into_wrong_blocks(transport: str) -> None:
    """CacheKey: src_blocks must be empty; kvlink wants exactly the blocks that the slot fills.

    A refusal moves nothing and leaves the key. Source: the spec, section 9.3, and DIFFERENCES.md.
    """
    key = kv.CacheKey(P, 10)
    cases: list[tuple[list[int], list[int]]] = [
        ([0], [1, 3, 5, 7]),
        ([], [1, 3, 5]),
        ([], [1, 3, 5, 7, 0]),
        ([], [1, 3, 5, 8]),
        ([], [1, 3, 5, 5]),
    ]
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(kv.CacheDesc(2, (2, 7), "int32"), [key])
        stamped(cache)
        into = pair.reader.allocate_blocks_cache(kv.CacheDesc(2, (8, 2), "int32"))
        other = stamped(into, D)
        for source, destination in cases:
            await refused(pair.reader.pull_blocks(key, into, source, destination), kv.ParameterError, destination)
            expect(into.tensors, other)
        await pair.reader.pull_blocks(key, into, [], [1, 3, 5, 7])


async def test_blocks_into_a_slot(transport: str) -> None:
    """Blocks source to plain destination: refused in the spec; kvlink moves whole slots that are as large as a block.

    Source: the spec, section 9.3, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_blocks(KEY, into, [3], [4])
        expect(into.tensors, stamp, [4], src_blocks=[3])


async def test_block_sizes(transport: str) -> None:
    """kvlink: bytes of a block must be equal on both sides; a multiple of P's is refused like any other size.

    Source: the spec, section 6.7, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, KEY)
        assert cache.is_valid
        for nbytes in (64, 127, 129, 256):
            into = pair.reader.allocate_blocks_cache(kv.CacheDesc(4, (8, nbytes), "uint8"))
            other = stamped(into, D)
            with pytest.raises(kv.MismatchError, match=rf"{nbytes}.*128") as caught:
                await pair.reader.pull_blocks(KEY, into, [0], [0])
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
            expect(into.tensors, other)
            pair.reader.deallocate_cache(into)
        same = pair.reader.allocate_blocks_cache(kv.CacheDesc(4, (3, 128), "uint8"))
        await pair.reader.pull_blocks(KEY, same, [0], [0])


async def test_order_of_checks(transport: str) -> None:
    """Role, arguments, local cache, link, then P's: the first that fails is raised. Source: the spec, section 6.5."""
    nowhere = kv.BlocksCacheKey(9)
    async with linked_pair(transport) as pair:
        gone, into = pair.reader.allocate_blocks_cache(DESC), pair.reader.allocate_blocks_cache(DESC)
        pair.reader.deallocate_cache(gone)
        with pytest.raises(kv.RoleError):
            await pair.owner.pull_blocks(nowhere, gone, [0], [0])
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_blocks(nowhere, gone, [0], [0])
        with pytest.raises(kv.ParameterError):
            await pair.reader.pull_blocks(nowhere, into, [0], [NUM])
        with pytest.raises(kv.NotLinkedError):
            await pair.reader.pull_blocks(nowhere, into, [0], [0])
