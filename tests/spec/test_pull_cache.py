"""`pull_cache`: what lands where, and what is refused before. Source: the spec, section 6.5; for keys section 5.3."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

import kvlink as kv
from tests.spec.harness import D, P, cluster, hold, link, linked_pair, owner_and_reader, refused, snapshot, stamped
from tests.support.inside import link_to, num_read_leases
from tests.support.loops import every_loop
from tests.support.pattern import expect, rows

SLOT = 512
DESC = kv.CacheDesc(4, (4, SLOT), "uint8")
KEY = kv.CacheKey(P, 10)


@every_loop
async def test_slot_to_slot(transport: str) -> None:
    """The source slot comes from the key, batch_index is the destination slot; on return data is in place.

    Source: the spec, section 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [kv.CacheKey(P, kv.ABSENT), KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        other = stamped(into, D)
        report = await pair.reader.pull_cache(KEY, into, 3)
        expect(into.tensors, stamp, [3], src_blocks=[1])
        expect(into.tensors, other, [0, 1, 2])
        assert (report.peer, report.transport, report.nbytes, report.done) == (P, transport, 4 * SLOT, (3,))
        assert report.failed == ()


async def test_between_processes(transport: str) -> None:
    """For k-th selected source tensor and k-th selected destination tensor, copy `size` bytes from (source slot base +
    src offset) to (destination slot base + dst offset). Source: the spec, section 6.5.
    """
    async with owner_and_reader("two processes", transport) as stage:
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[9, 10])
        into = stage.reader.allocate_cache(DESC)
        other = stamped(into, D)
        await stage.pull(10, into, batch_index=2, src_layer_range=range(1), dst_layer_range=range(1, 2))
        expect(into.tensors[2:], stage.owner.stamp(cache), [2], src_blocks=[1])
        expect(into.tensors[:2], other)
        expect(into.tensors, other, [0, 1, 3])


async def test_by_id_and_index(transport: str) -> None:
    """By CacheKeyByIdAndIndex the source slot is its own batch_index; no key need have been bound.

    Source: the spec, sections 1.4 and 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC)
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        for slot in range(4):
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache.cache_id, slot), into, 3 - slot)
        expect(into.tensors, stamp, [3, 2, 1, 0], src_blocks=[0, 1, 2, 3])


@pytest.mark.parametrize(("size", "src_offset", "dst_offset"), [(16, 0, 0), (100, 32, 64), (1, 511, 0), (512, 0, 0)])
async def test_bytes_of_each_tensor(transport: str, size: int, src_offset: int, dst_offset: int) -> None:
    """`size` is bytes per tensor, the offsets are bytes into the source and into the destination slot.

    Source: the spec, section 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [kv.CacheKey(P, kv.ABSENT), KEY])
        stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        other = stamped(into, D)
        expected = [tensor.copy() for tensor in into.tensors]
        for tensor, source in zip(expected, cache.tensors, strict=True):
            tensor[2, dst_offset : dst_offset + size] = source[1, src_offset : src_offset + size]
        report = await pair.reader.pull_cache(
            KEY, into, 2, size, src_cache_offset=src_offset, dst_cache_offset=dst_offset
        )
        assert report.nbytes == 4 * size
        assert snapshot(into) == [tensor.tobytes() for tensor in expected]
        expect(into.tensors, other, [0, 1, 3])


async def test_size_by_default(transport: str) -> None:
    """-1 means destination stride minus dst_cache_offset. Source: the spec, section 6.5."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamped(cache)
        into = pair.reader.allocate_cache(kv.CacheDesc(4, (2, 300), "uint8"))
        report = await pair.reader.pull_cache(KEY, into, 1, dst_cache_offset=44)
        assert report.nbytes == 4 * 256
        for tensor, source in zip(into.tensors, cache.tensors, strict=True):
            assert tensor[1, 44:].tobytes() == source[0, :256].tobytes()


async def test_other_batch_size_and_stride(transport: str) -> None:
    """Source and destination may differ in batch size and stride; a larger destination than source fails, a smaller
    one pulls a prefix of the slot. Source: the spec, section 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [kv.CacheKey(P, 9), KEY])
        stamped(cache)
        small = pair.reader.allocate_cache(kv.CacheDesc(4, (9, 3, 100), "uint8"))
        large = pair.reader.allocate_cache(kv.CacheDesc(4, (1, SLOT + 1), "uint8"))
        before = snapshot(large)
        with pytest.raises(kv.ParameterError) as caught:
            await pair.reader.pull_cache(KEY, large)
        assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
        assert snapshot(large) == before
        await pair.reader.pull_cache(KEY, small, 8)
        for tensor, source in zip(small.tensors, cache.tensors, strict=True):
            assert tensor[8].tobytes() == source[1, :300].tobytes()
        await pair.reader.pull_cache(kv.CacheKey(P, 9), large, size=SLOT)
        for tensor, source in zip(large.tensors, cache.tensors, strict=True):
            assert tensor[0, :SLOT].tobytes() == source[0].tobytes()


@pytest.mark.parametrize(
    ("width", "src_layers", "dst_layers"),
    [
        (2, range(1, 3), range(2)),
        (2, range(2, 3), range(1)),
        (1, range(1, 6), range(5)),
        (3, range(1, 2), range(1)),
        (6, range(1), range(1)),
    ],
)
async def test_layers(transport: str, width: int, src_layers: range, dst_layers: range) -> None:
    """A layer is tensor_num_per_layer consecutive tensors; the k-th selected of either side belong together.

    Source: the spec, section 6.5.
    """
    desc = kv.CacheDesc(6, (2, 64), "uint8")
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(desc, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(desc)
        other = stamped(into, D)
        await pair.reader.pull_cache(
            KEY, into, src_layer_range=src_layers, dst_layer_range=dst_layers, tensor_num_per_layer=width
        )
        first, stop = dst_layers.start * width, dst_layers.stop * width
        expect(into.tensors[first:stop], stamp, [0], src_tensor=src_layers.start * width)
        expect(into.tensors[stop:], other, src_tensor=stop)
        expect(into.tensors, other, [1])


async def test_one_range_is_enough(transport: str) -> None:
    """None: all source tensors; so a source range alone fits a destination of that many tensors.

    Source: the spec, section 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(kv.CacheDesc(2, (4, SLOT), "uint8"))
        await pair.reader.pull_cache(KEY, into, src_layer_range=range(1, 2))
        expect(into.tensors, stamp, [0], src_tensor=2)


async def test_empty_range(transport: str) -> None:
    """An empty range counts as "not given". Source: the spec, section 6.5."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(KEY, into, src_layer_range=range(1, 1), dst_layer_range=range(0))
        expect(into.tensors, stamp, [0])


async def test_width_without_ranges(transport: str) -> None:
    """tensor_num_per_layer need be a divisor of num_tensors only when ranges are used.

    Source: the spec, section 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        with pytest.raises(kv.ParameterError):
            await pair.reader.pull_cache(KEY, into, src_layer_range=range(1), tensor_num_per_layer=3)
        await pair.reader.pull_cache(KEY, into, tensor_num_per_layer=3)
        expect(into.tensors, stamp, [0])


BAD_VALUES: list[dict[str, Any]] = [
    {"size": 0},
    {"size": -2},
    {"size": 2**63},
    {"batch_index": 4},
    {"batch_index": -1},
    {"batch_index": 2**32},
    {"src_cache_offset": -1},
    {"dst_cache_offset": -1},
    {"dst_cache_offset": SLOT},
    {"dst_cache_offset": 1, "size": SLOT},
    {"src_cache_offset": SLOT},
    {"src_cache_offset": 1},
    {"src_cache_offset": 2**62, "size": 2**62},
    {"tensor_num_per_layer": 0},
    {"src_layer_range": range(0, 2, 2)},
    {"dst_layer_range": range(-1, 1)},
    {"dst_layer_range": range(3)},
    {"src_layer_range": range(3)},
    {"src_layer_range": range(1)},
    {"dst_layer_range": range(1)},
    {"timeout_s": 0},
]


BAD_TYPES: list[dict[str, Any]] = [
    {"batch_index": True},
    {"batch_index": 1.0},
    {"size": "16"},
    {"size": 16.0},
    {"src_cache_offset": 1.5},
    {"dst_cache_offset": False},
    {"src_layer_range": [0, 1]},
    {"dst_layer_range": (0, 1)},
    {"tensor_num_per_layer": None},
    {"timeout_s": "1"},
]


async def test_values_that_are_refused(transport: str) -> None:
    """Size, slots, offsets, ranges and numbers of tensors that do not fit are PARAM_INVALID on either side; no byte
    moves, the key stays, the link works on. Source: the spec, section 6.5.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        other = stamped(into, D)
        for options in BAD_VALUES:
            await refused(pair.reader.pull_cache(KEY, into, **options), kv.ParameterError, options)
            expect(into.tensors, other)
            assert into.is_quiet()
        await pair.flush()
        assert num_read_leases(pair.prompt) == 0
        await pair.reader.pull_cache(KEY, into)
        expect(into.tensors, stamp, [0])


async def test_types_that_are_refused(transport: str) -> None:
    """Wrong Python type: TypeError, before P is asked; booleans and floats are no integers.

    Source: the spec, sections 1.1 and 6.5.
    """
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_cache(DESC)
        for options in BAD_TYPES:
            await refused(pair.reader.pull_cache(KEY, into, **options), TypeError, options)


async def test_numpy_integers(transport: str) -> None:
    """Integers of numpy are integers. Source: the spec, section 6.5, and DIFFERENCES.md on what is an integer."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        await pair.reader.pull_cache(
            kv.CacheKey(np.uint64(P), np.int64(10)),
            into,
            np.int32(2),
        )
        expect(into.tensors, stamp, [2], src_blocks=[0])


async def test_unknown_keyword(transport: str) -> None:
    """kvlink: an unknown keyword is a TypeError instead of being ignored.

    Source: the spec, section 6.5, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_cache(DESC)
        with pytest.raises(TypeError):
            await pair.reader.pull_cache(KEY, into, src_layer=range(1))  # type: ignore[call-arg]  # what is tested


async def test_keys_that_are_refused(transport: str) -> None:
    """For a pull exactly one of req_id, prefix_id must be present; both or none: LLM_PARAM_INVALID.

    Source: the spec, sections 1.4 and 6.5.
    """
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_cache(DESC)
        for key in (kv.CacheKey(P, kv.ABSENT), kv.CacheKey(P, 1, prefix_id=2)):
            with pytest.raises(kv.ParameterError) as caught:
                await pair.reader.pull_cache(key, into)
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID
        for wrong in (kv.BlocksCacheKey(P), (P, 10), None):
            with pytest.raises(TypeError):
                await pair.reader.pull_cache(wrong, into)  # type: ignore[arg-type]  # refused
        with pytest.raises(TypeError):
            await pair.reader.pull_cache(KEY, into.tensors)  # type: ignore[arg-type]  # refused


async def test_order_of_checks(transport: str) -> None:
    """Checks, in order: role; arguments; local cache; link; then P's: the first that fails is the one that is raised.

    Source: the spec, section 6.5.
    """
    nowhere = kv.CacheKey(9, 10)
    async with linked_pair(transport) as pair:
        gone = pair.reader.allocate_cache(DESC)
        pair.reader.deallocate_cache(gone)
        into = pair.reader.allocate_cache(DESC)
        with pytest.raises(kv.RoleError):
            await pair.owner.pull_cache(nowhere, gone, size=0)
        with pytest.raises(kv.ParameterError):
            await pair.reader.pull_cache(nowhere, gone, size=0)
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(nowhere, gone, 4)
        with pytest.raises(kv.ParameterError):
            await pair.reader.pull_cache(nowhere, into, 4)
        with pytest.raises(kv.NotLinkedError) as not_linked:
            await pair.reader.pull_cache(nowhere, into, src_cache_offset=SLOT)
        assert not_linked.value.status is kv.StatusCode.LLM_NOT_YET_LINK
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(KEY, into, src_cache_offset=SLOT)


async def test_own_cluster_as_source(transport: str) -> None:
    """Own cluster id as source is refused: there is no link to oneself. Source: the spec, section 9.3."""
    async with linked_pair(transport) as pair:
        into = pair.reader.allocate_cache(DESC)
        with pytest.raises(kv.NotLinkedError):
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(D, into.cache_id), into)


async def test_concurrent_pulls(transport: str) -> None:
    """kvlink: operations on one link run concurrently; LINK_BUSY does not exist.

    Source: the spec, sections 6.5 and 11, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [kv.CacheKey(P, slot) for slot in range(4)])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        blocks = pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P))
        block_stamp = stamped(blocks)
        into_blocks = pair.reader.allocate_blocks_cache(DESC)
        held = hold(pair.decoder, P, "get")
        async with anyio.create_task_group() as tasks:
            for slot in range(4):
                tasks.start_soon(pair.reader.pull_cache, kv.CacheKey(P, slot), into, 3 - slot)
            tasks.start_soon(pair.reader.pull_blocks, kv.BlocksCacheKey(P), into_blocks, [0], [1])
            await held.reached.wait()
            assert (await pair.decoder.check_link_status(P)).is_ok
            await pair.reader.push_cache(kv.CacheKeyByIdAndIndex(P, blocks.cache_id, 3), into_blocks, 3)
            held.release()
        expect(into.tensors, stamp, [3, 2, 1, 0], src_blocks=[0, 1, 2, 3])
        expect(into_blocks.tensors, block_stamp, [1], src_blocks=[0])


async def test_timeout_leaves_the_link_usable(transport: str) -> None:
    """Timeout: LLM_WAIT_PROCESS_TIMEOUT. kvlink: the link need not be rebuilt, and the key is still there.

    Source: the spec, section 6.5, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(DESC)
        held = hold(pair.decoder, P, "get")
        with pytest.raises(kv.TransferTimeoutError) as caught:
            await pair.reader.pull_cache(KEY, into, timeout_s=0.02)
        assert caught.value.status is kv.StatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert isinstance(caught.value, TimeoutError)
        assert into.is_quiet()
        held.release()
        assert link_to(pair.decoder, P).is_open
        await pair.reader.pull_cache(KEY, into)
        expect(into.tensors, stamp, [0])


async def test_timeout_while_the_owner_does_not_answer(transport: str) -> None:
    """The same when P does not answer at all: its process is stopped. Source: the spec, section 6.5."""
    async with owner_and_reader("two processes", transport) as stage:
        cache = await stage.owner.call("allocate_slots", num_tensors=4, shape=[4, SLOT], keys=[10])
        into = stage.reader.allocate_cache(DESC)
        stage.process().stop()
        try:
            with pytest.raises(kv.TransferTimeoutError):
                await stage.reader.pull_cache(KEY, into, timeout_s=0.1)
        finally:
            stage.process().cont()
        await stage.pull(10, into)
        expect(into.tensors, stage.owner.stamp(cache), [0])
        usage = await stage.owner.call("usage")
        assert usage["read_leases"] == 0


async def test_cluster_default_timeout(transport: str) -> None:
    """Without a timeout the cluster's own counts (the spec's sync_kv_timeout). Source: the spec, section 6."""
    async with linked_pair(transport, operation_timeout_s=0.02) as pair:
        cache = pair.owner.allocate_cache(DESC, [KEY])
        assert cache.is_valid
        into = pair.reader.allocate_cache(DESC)
        held = hold(pair.decoder, P, "get")
        with pytest.raises(kv.TransferTimeoutError):
            await pair.reader.pull_cache(KEY, into)
        held.release()


async def test_into_a_blocks_cache(transport: str) -> None:
    """kvlink: the destination may be any cache of ours, paged, contiguous or HOST.

    Source: the spec, section 9.3, and DIFFERENCES.md.
    """
    async with linked_pair(transport, host_pool="64KiB") as pair:
        cache = pair.owner.allocate_cache(DESC)
        stamp = stamped(cache)
        caches = [
            pair.reader.allocate_blocks_cache(DESC),
            pair.reader.allocate_cache(kv.CacheDesc(4, (4, SLOT), "uint8", kv.Placement.HOST)),
        ]
        for into in caches:
            await pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, cache.cache_id, 2), into, 1)
            expect(into.tensors, stamp, [1], src_blocks=[2])


async def test_large_slots(transport: str) -> None:
    """A slot that is too large to be moved at once arrives whole, with its own layers only. Source: section 6.5."""
    desc = kv.CacheDesc(4, (2, 3 << 20), "uint8")
    async with linked_pair(transport, pool="32MiB", chunk_nbytes=1 << 20) as pair:
        cache = pair.owner.allocate_cache(desc, [kv.CacheKey(P, kv.ABSENT), KEY])
        stamp = stamped(cache)
        into = pair.reader.allocate_cache(desc)
        for tensor in into.tensors:
            tensor[1] = 0
        await pair.reader.pull_cache(KEY, into, 0)
        expect(into.tensors, stamp, [0], src_blocks=[1])
        assert not any(rows(tensor)[1].any() for tensor in into.tensors)


async def test_several_clusters_of_one_process(transport: str) -> None:
    """kvlink: several clusters live in one process, and a decoder pulls from each by its cluster id.

    Source: the spec, sections 1.5 and 18, and DIFFERENCES.md.
    """
    async with linked_pair(transport) as pair, cluster(3, kv.Role.PROMPT) as third:
        await link(pair.decoder, 3, third.address, transport)
        caches = [pair.owner.allocate_cache(DESC, [KEY]), third.kv_cache_manager.allocate_cache(DESC, [KEY])]
        stamps = [stamped(caches[0]), stamped(caches[1], 3)]
        into = pair.reader.allocate_cache(DESC)
        for slot, owner in enumerate((P, 3)):
            await pair.reader.pull_cache(kv.CacheKey(owner, 10), into, slot)
            expect(into.tensors, stamps[slot], [slot], src_blocks=[0])
        with pytest.raises(kv.CacheNotFoundError):
            await pair.reader.pull_cache(kv.CacheKey(3, 10), into)
