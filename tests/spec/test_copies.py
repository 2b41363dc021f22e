"""Copies inside one cluster: `copy_cache`, `copy_blocks`, `swap_blocks`. Source: the spec, sections 6.8 to 6.10."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import kvlink as kv
from tests.spec.harness import LIMIT_S, P, cluster, refused, snapshot, stamped
from tests.support.inside import used_nbytes
from tests.support.loops import every_loop
from tests.support.pattern import expect, rows

SLOT = 512
DESC = kv.CacheDesc(4, (4, SLOT), "uint8")
BLOCKS = kv.CacheDesc(4, (16, 128), "uint8")
HOST_BLOCKS = kv.CacheDesc(4, (24, 128), "uint8", kv.Placement.HOST)


@asynccontextmanager
async def one_cluster(role: kv.Role = kv.Role.PROMPT, **options: Any) -> AsyncIterator[kv.KvCacheManager]:
    """Run a cluster with both pools, bounded in time."""
    with anyio.fail_after(LIMIT_S):
        async with cluster(P, role, **{"host_pool": "1MiB", **options}) as made:
            yield made.kv_cache_manager


# Section 6.8.


@every_loop
async def test_copy_cache_is_destination_first() -> None:
    """Destination first; all tensors; nothing but that slot changes. Source: the spec, section 6.8."""
    async with one_cluster() as manager:
        to, source = manager.allocate_cache(DESC), manager.allocate_cache(DESC)
        other, stamp = stamped(to, 9), stamped(source)
        await manager.copy_cache(to, source, 3, 1)
        expect(to.tensors, stamp, [3], src_blocks=[1])
        expect(to.tensors, other, [0, 1, 2])
        expect(source.tensors, stamp)


async def test_copy_cache_defaults() -> None:
    """Both slots are 0, offset 0 and size -1 by default. Source: the spec, section 6.8."""
    async with one_cluster() as manager:
        to, source = manager.allocate_cache(DESC), manager.allocate_cache(DESC)
        other, stamp = stamped(to, 9), stamped(source)
        await manager.copy_cache(to, source)
        expect(to.tensors, stamp, [0])
        expect(to.tensors, other, [1, 2, 3])


async def test_copy_cache_bytes() -> None:
    """`offset` applies to both sides, inside each slot; size -1 = source stride - offset.

    Source: the spec, section 6.8.
    """
    async with one_cluster() as manager:
        to, source = manager.allocate_cache(DESC), manager.allocate_cache(DESC)
        for offset, size in ((0, 1), (100, 50), (511, 1), (100, -1), (0, 512)):
            stamped(to, 9)
            stamped(source)
            stop = SLOT if size == -1 else offset + size
            expected = [tensor.copy() for tensor in to.tensors]
            for tensor, origin in zip(expected, source.tensors, strict=True):
                tensor[2, offset:stop] = origin[1, offset:stop]
            await manager.copy_cache(to, source, 2, 1, offset, size)
            assert snapshot(to) == [tensor.tobytes() for tensor in expected]


async def test_copy_cache_between_shapes() -> None:
    """Shapes may otherwise differ: a batch-1 staging cache into a batch-4 model cache; the source side's size counts.

    Source: the spec, section 6.8.
    """
    async with one_cluster() as manager:
        to, source = manager.allocate_cache(DESC), manager.allocate_cache(kv.CacheDesc(4, (1, 10, 30), "uint8"))
        stamped(to, 9)
        stamped(source)
        before = [tensor[2, 300:].tobytes() for tensor in to.tensors]
        await manager.copy_cache(to, source, 2)
        for tensor, origin, rest in zip(to.tensors, source.tensors, before, strict=True):
            assert tensor[2, :300].tobytes() == origin.tobytes()
            assert tensor[2, 300:].tobytes() == rest
        with pytest.raises(kv.ParameterError):
            await manager.copy_cache(source, to)


async def test_copy_cache_in_one_cache() -> None:
    """kvlink: slots of one cache can be copied, and a slot onto itself is a no-op.

    Source: the spec, section 6.8 (not described there), and DIFFERENCES.md.
    """
    async with one_cluster() as manager:
        cache = manager.allocate_cache(DESC)
        stamp = stamped(cache)
        await manager.copy_cache(cache, cache, 1, 1)
        expect(cache.tensors, stamp)
        await manager.copy_cache(cache, cache, 3, 0)
        expect(cache.tensors, stamp, [0, 1, 2, 3], src_blocks=[0, 1, 2, 0])


async def test_copy_cache_values_that_are_refused() -> None:
    """offset < both strides; offset + size <= both strides; slots in range; size > 0 or -1: else PARAM_INVALID.

    Source: the spec, section 6.8.
    """
    cases: list[tuple[int, ...]] = [
        (4, 0),
        (0, 4),
        (-1, 0),
        (0, -1),
        (0, 0, -1),
        (0, 0, SLOT),
        (0, 0, SLOT, 1),
        (0, 0, 1, SLOT),
        (0, 0, 0, 0),
        (0, 0, 0, -2),
        (0, 0, 0, SLOT + 1),
        (0, 0, 2**62, 2**62),
    ]
    async with one_cluster() as manager:
        to, source = manager.allocate_cache(DESC), manager.allocate_cache(DESC)
        stamped(source)
        other = stamped(to, 9)
        for arguments in cases:
            await refused(manager.copy_cache(to, source, *arguments), kv.ParameterError, arguments)
            expect(to.tensors, other)


async def test_copy_cache_caches_that_are_refused() -> None:
    """Equal num_tensors: else PARAM_INVALID; kvlink compares data types too. Source: the spec, section 6.8."""
    async with one_cluster() as manager, cluster(9, kv.Role.PROMPT) as stranger:
        cache = manager.allocate_cache(DESC)
        others = [
            manager.allocate_cache(kv.CacheDesc(2, (4, SLOT), "uint8")),
            manager.allocate_cache(kv.CacheDesc(4, (4, SLOT), "int8")),
            stranger.kv_cache_manager.allocate_cache(DESC),
        ]
        for other in others:
            for pair in ((cache, other), (other, cache)):
                with pytest.raises(kv.ParameterError):
                    await manager.copy_cache(*pair)
        with pytest.raises(TypeError):
            await manager.copy_cache(cache, cache.tensors)  # type: ignore[arg-type]  # refused
        for bad in (True, 1.0, "1"):
            with pytest.raises(TypeError):
                await manager.copy_cache(cache, cache, bad)  # type: ignore[arg-type]  # refused


async def test_copies_leave_references_alone() -> None:
    """No effect on references or keys. Source: the spec, section 6.8."""
    async with cluster(P, kv.Role.PROMPT) as prompt:
        manager = prompt.kv_cache_manager
        to, source = manager.allocate_cache(DESC), manager.allocate_cache(DESC, [kv.CacheKey(P, 1)])
        await manager.copy_cache(to, source)
        with pytest.raises(kv.ParameterError):
            manager.allocate_cache(DESC, [kv.CacheKey(P, 1)])
        manager.deallocate_cache(to)
        manager.deallocate_cache(source)
        assert used_nbytes(prompt) == 4 * 4 * SLOT


async def test_concurrent_copies() -> None:
    """Concurrent copies are allowed, and a cache that is deallocated under one keeps its memory until it has ended.

    Source: the spec, sections 5.2 and 6.8.
    """
    desc = kv.CacheDesc(4, (2, 1 << 20), "uint8")
    with anyio.fail_after(LIMIT_S):
        async with cluster(P, kv.Role.PROMPT, pool="64MiB", inline_nbytes=0) as prompt:
            manager = prompt.kv_cache_manager
            source = manager.allocate_cache(desc)
            stamp = stamped(source)
            targets = [manager.allocate_cache(desc) for _ in range(3)]
            async with anyio.create_task_group() as tasks:
                for target in targets:
                    tasks.start_soon(manager.copy_cache, target, source, 1, 0)
                while source.is_quiet():
                    await anyio.lowlevel.checkpoint()
                manager.deallocate_cache(source)
                assert used_nbytes(prompt) == 4 * desc.nbytes
            for target in targets:
                expect(target.tensors, stamp, [1], src_blocks=[0])
            assert used_nbytes(prompt) == 3 * desc.nbytes


# Section 6.9.


@every_loop
async def test_copy_blocks() -> None:
    """Within one cache: block `src` to every block of its list, for all tensors. Source: the spec, section 6.9."""
    async with one_cluster() as manager:
        cache = manager.allocate_blocks_cache(BLOCKS)
        stamp = stamped(cache)
        await manager.copy_blocks(cache, {0: [3, 4], 9: [1], 15: []})
        expect(cache.tensors, stamp, range(16), src_blocks=[0, 9, 2, 0, 0, *range(5, 16)])


async def test_copy_blocks_at_once() -> None:
    """kvlink: copies behave as if all sources were read first, instead of in dict order.

    Source: the spec, section 6.9, and DIFFERENCES.md.
    """
    chance = random.Random(3)
    async with one_cluster() as manager:
        cache = manager.allocate_blocks_cache(BLOCKS)
        for _ in range(30):
            stamp = stamped(cache)
            expected = list(range(16))
            targets = chance.sample(range(16), chance.randint(1, 16))
            copies: dict[int, list[int]] = {}
            for target in targets:
                expected[target] = chance.randrange(16)
                copies.setdefault(expected[target], []).append(target)
            await manager.copy_blocks(cache, copies)
            expect(cache.tensors, stamp, range(16), src_blocks=expected)


async def test_copy_blocks_exchange() -> None:
    """kvlink: ``{0: [1], 1: [0]}`` exchanges two blocks. Source: the spec, section 6.9, and DIFFERENCES.md."""
    async with one_cluster() as manager:
        cache = manager.allocate_blocks_cache(BLOCKS)
        stamp = stamped(cache)
        await manager.copy_blocks(cache, {0: [1], 1: [0]})
        expect(cache.tensors, stamp, range(16), src_blocks=[1, 0, *range(2, 16)])


async def test_copy_blocks_without_blocks() -> None:
    """kvlink: an empty dict is a no-op (in the spec it copies slot 0 onto itself); so is a block onto itself.

    Source: the spec, section 6.9, and DIFFERENCES.md.
    """
    async with one_cluster() as manager:
        cache = manager.allocate_blocks_cache(BLOCKS)
        stamp = stamped(cache)
        await manager.copy_blocks(cache, {})
        await manager.copy_blocks(cache, {5: [5]})
        expect(cache.tensors, stamp)


async def test_copy_blocks_values_that_are_refused() -> None:
    """Out of range: PARAM_INVALID before anything is copied; kvlink refuses a destination that occurs twice, too.

    Types checked (TypeError). Source: the spec, section 6.9, and DIFFERENCES.md.
    """
    bad_values: list[dict[int, list[int]]] = [
        {16: [0]},
        {0: [16]},
        {0: [1, 2, 16]},
        {-1: [0]},
        {0: [-1]},
        {0: [1, 1]},
        {0: [2], 1: [2]},
    ]
    bad_types: list[Any] = [[(0, 1)], None, {0: 1}, {"0": [1]}, {0: ["1"]}, {0.0: [1]}, {0: [True]}]
    async with one_cluster() as manager:
        cache = manager.allocate_blocks_cache(BLOCKS)
        stamp = stamped(cache)
        for copies in bad_values:
            await refused(manager.copy_blocks(cache, copies), kv.ParameterError, copies)
        for copies in bad_types:
            await refused(manager.copy_blocks(cache, copies), TypeError, copies)
        expect(cache.tensors, stamp)


# Section 6.10.


@every_loop
async def test_swap_in_and_out() -> None:
    """HOST to DEVICE is "swap in", DEVICE to HOST "swap out"; one-way copy, not an exchange; the source is untouched;
    applies to all tensors. Source: the spec, section 6.10.
    """
    async with one_cluster() as manager:
        device, host = manager.allocate_blocks_cache(BLOCKS), manager.allocate_blocks_cache(HOST_BLOCKS)
        stamp, other = stamped(device), stamped(host, 9)
        await manager.swap_blocks(device, host, {0: 23, 7: 1, 8: 2})
        expect(host.tensors, stamp, [23, 1, 2], src_blocks=[0, 7, 8])
        expect(host.tensors, other, [0, *range(3, 23)])
        expect(device.tensors, stamp)
        stamp = stamped(device, 5)
        stamped(host, 9)
        await manager.swap_blocks(host, device, {20: 3, 21: 4, 0: 15})
        expect(device.tensors, other, [3, 4, 15], src_blocks=[20, 21, 0])
        expect(device.tensors, stamp, [0, 1, 2, *range(5, 15)])
        expect(host.tensors, other)


async def test_swap_needs_one_host_side() -> None:
    """Exactly one of the two is HOST, the other DEVICE; anything else: PARAM_INVALID.

    Source: the spec, section 6.10.
    """
    async with one_cluster() as manager:
        device = [manager.allocate_blocks_cache(BLOCKS) for _ in range(2)]
        host = [manager.allocate_blocks_cache(HOST_BLOCKS) for _ in range(2)]
        for pair in (device, host, (device[0], device[0])):
            with pytest.raises(kv.ParameterError) as caught:
                await manager.swap_blocks(pair[0], pair[1], {0: 1})
            assert caught.value.status is kv.StatusCode.LLM_PARAM_INVALID


async def test_swap_needs_caches_that_fit() -> None:
    """Equal block bytes and equal num_tensors: else LLMException; kvlink compares data types too.

    Source: the spec, section 6.10.
    """
    async with one_cluster() as manager:
        device = manager.allocate_blocks_cache(BLOCKS)
        stamp = stamped(device)
        hosts = [
            manager.allocate_blocks_cache(kv.CacheDesc(num_tensors, (4, nbytes), data_type, kv.Placement.HOST))
            for num_tensors, nbytes, data_type in ((2, 128, "uint8"), (4, 64, "uint8"), (4, 128, "int8"))
        ]
        for host in hosts:
            for pair in ((device, host), (host, device)):
                with pytest.raises(kv.MismatchError):
                    await manager.swap_blocks(*pair, {0: 0})
        expect(device.tensors, stamp)


async def test_swap_values_that_are_refused() -> None:
    """Every index in range: else LLMException; kvlink refuses a destination that occurs twice, and checks the types of
    keys and values. Source: the spec, sections 1.1 and 6.10, and DIFFERENCES.md.
    """
    bad_types: list[Any] = [[(0, 1)], None, {"0": 1}, {0: "1"}, {0: [1]}, {0: 1.0}, {True: 1}]
    async with one_cluster() as manager:
        device, host = manager.allocate_blocks_cache(BLOCKS), manager.allocate_blocks_cache(HOST_BLOCKS)
        stamped(device)
        other = stamped(host, 9)
        for pairs in ({16: 0}, {0: 24}, {-1: 0}, {0: -1}, {0: 1, 1: 1}):
            await refused(manager.swap_blocks(device, host, pairs), kv.ParameterError, pairs)
        for pairs in bad_types:
            await refused(manager.swap_blocks(device, host, pairs), TypeError, pairs)
        expect(host.tensors, other)


async def test_swap_nothing() -> None:
    """Empty mapping: no-op. One source may go to several places. Source: the spec, section 6.10."""
    async with one_cluster() as manager:
        device, host = manager.allocate_blocks_cache(BLOCKS), manager.allocate_blocks_cache(HOST_BLOCKS)
        stamped(device)
        other = stamped(host, 9)
        await manager.swap_blocks(device, host, {})
        expect(host.tensors, other)


async def test_swap_contiguous_caches() -> None:
    """Slots of contiguous caches swap as well (one generation of the spec wants blocks caches).

    Source: the spec, section 6.10.
    """
    async with one_cluster() as manager:
        device, host = manager.allocate_cache(BLOCKS), manager.allocate_cache(HOST_BLOCKS)
        stamp = stamped(device)
        await manager.swap_blocks(device, host, {3: 4})
        expect(host.tensors, stamp, [4], src_blocks=[3])


async def test_large_copies() -> None:
    """Copies that are too large to be made on the event loop arrive whole. Source: the spec, sections 6.8 to 6.10."""
    shape = (6, 1 << 20)
    async with one_cluster(pool="64MiB", host_pool="64MiB", chunk_nbytes=1 << 20) as manager:
        device = manager.allocate_blocks_cache(kv.CacheDesc(4, shape, "uint8"))
        host = manager.allocate_blocks_cache(kv.CacheDesc(4, shape, "uint8", kv.Placement.HOST))
        stamp = stamped(device)
        for tensor in host.tensors:
            rows(tensor)[:] = 0
        await manager.swap_blocks(device, host, {block: 5 - block for block in range(6)})
        expect(host.tensors, stamp, range(6), src_blocks=[5, 4, 3, 2, 1, 0])
        await manager.copy_blocks(device, {0: [1, 2], 1: [0], 5: [4]})
        expect(device.tensors, stamp, range(6), src_blocks=[1, 0, 0, 3, 5, 5])
