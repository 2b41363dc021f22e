"""Clusters in processes of their own: every byte of what they pull is checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import kvlink as kv
from tests.support import inside
from tests.support.loops import asyncio_and_trio, asyncio_and_uvloop, every_loop
from tests.support.pair import RUBBISH, Pair, pair
from tests.support.pattern import Stamp, expect, faults, fill
from tests.support.peer import Peer, spawn_peer


@every_loop
async def test_every_block_arrives_where_it_was_sent() -> None:
    """Blocks in random order land in random places, all bytes right, and no other block is touched."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with pair() as p:
        blocks = p.blocks
        source, destination = chance.sample(blocks, 40), chance.sample(blocks, 40)
        await p.pull(source, destination)
        expect(p.cache.tensors, p.stamp, destination, src_blocks=source)
        expect(p.cache.tensors, RUBBISH, sorted(set(blocks) - set(destination)))


@pytest.mark.parametrize("owner_loop", ["asyncio", "uvloop", "trio"])
async def test_the_owner_may_run_any_loop(owner_loop: str) -> None:
    """Both sides need not run the same event loop."""
    async with pair(loop_name=owner_loop) as p:
        await p.pull()
        p.expect_all()


async def test_one_source_block_fills_many() -> None:
    """A source block may be named more than once; each of its destinations gets all of it."""
    async with pair() as p:
        await p.pull([5] * 8, list(range(8)))
        expect(p.cache.tensors, p.stamp, list(range(8)), src_blocks=[5] * 8)


@pytest.mark.parametrize(
    ("data_type", "shape"),
    [("float32", (64, 16, 8, 8)), ("bfloat16", (100, 33)), ("int8", (7, 1)), ("float8_e4m3fn", (3, 5, 7))],
)
async def test_any_data_type_and_shape(data_type: str, shape: tuple[int, ...]) -> None:
    """Odd block sizes and every width of element go over unharmed."""
    async with pair(kv.CacheDesc(6, shape, data_type)) as p:
        await p.pull()
        p.expect_all()


async def test_the_report_says_what_was_done() -> None:
    """Peer, transport, bytes, duration and the caller's own block numbers; the link's counters agree."""
    async with pair() as p:
        report = await p.pull([1, 2, 9], [4, 5, 0])
        nbytes = 3 * p.cache.block_nbytes * p.desc.num_tensors
        assert (report.peer, report.transport, report.nbytes) == (1, "shm", nbytes)
        assert sorted(report.done) == [0, 4, 5]
        assert report.failed == ()
        assert report.num_extents == 2
        assert report.duration_s > 0
        assert report.gb_per_s == pytest.approx(nbytes / report.duration_s / 1e9)
        stats = p.link.stats
        assert (stats.pulls, stats.nbytes_pulled, stats.failures) == (1, nbytes, 0)
        assert stats.round_trips == 1
        await p.pull([1], [1])
        assert stats.round_trips == 1, "the second pull of a cache asks nobody"
        with pytest.raises(kv.ParameterError):
            await p.pull([1], [64])
        with pytest.raises(kv.ParameterError):
            await p.pull([64], [1])
        assert stats.pulls == 2
        assert (p.link.peer, p.link.role, p.link.address) == (1, kv.Role.PROMPT, p.owner.address)
        assert "shm" in p.link.reason


@pytest.mark.parametrize(
    "as_blocks",
    [
        pytest.param(lambda blocks: np.array(blocks, np.int64), id="int64"),
        pytest.param(lambda blocks: np.array(blocks, np.uint8), id="uint8"),
        pytest.param(lambda blocks: np.array(blocks, ">i4"), id="big-endian"),
        pytest.param(lambda blocks: np.repeat(np.array(blocks, np.int32), 3)[::3], id="strided"),
        pytest.param(tuple, id="tuple"),
        pytest.param(lambda blocks: [np.int16(block) for block in blocks], id="list of numpy ints"),
    ],
)
async def test_block_numbers_may_come_as_arrays(as_blocks: Callable[[list[int]], Any]) -> None:
    """Integer arrays of any width and stride are as good as lists; the report has plain ints."""
    async with pair() as p:
        source, destination = [9, 8, 1, 60], [3, 63, 0, 4]
        report = await p.pull(as_blocks(source), as_blocks(destination))
        expect(p.cache.tensors, p.stamp, destination, src_blocks=source)
        assert sorted(report.done) == sorted(destination)
        assert {type(block) for block in report.done} == {int}


async def test_layer_ranges_choose_tensors_on_either_side() -> None:
    """Layers 1 and 2 of the peer land in layers 0 and 1 of ours; other layers are not touched."""
    async with pair() as p:
        await p.pull([3, 4], [7, 9], src_layer_range=range(1, 3), dst_layer_range=range(2))
        expect(p.cache.tensors[:4], p.stamp, [7, 9], src_blocks=[3, 4], src_tensor=2)
        expect(p.cache.tensors[:4], RUBBISH, [0, 8])
        for index in range(4, 8):
            assert faults([p.cache.tensors[index]], RUBBISH, src_tensor=index) is None
        await p.pull([0], [0], src_layer_range=range(2, 3), dst_layer_range=range(7, 8), tensor_num_per_layer=1)
        expect([p.cache.tensors[7]], p.stamp, [0], src_tensor=2)


async def test_layer_by_layer_adds_up_to_everything() -> None:
    """A layer at a time, concurrently, gives what one pull of all gives."""
    async with pair() as p:
        async with anyio.create_task_group() as tasks:
            for layer in range(4):
                layers = range(layer, layer + 1)
                tasks.start_soon(lambda chosen: p.pull(src_layer_range=chosen, dst_layer_range=chosen), layers)
        p.expect_all()


@pytest.mark.parametrize("num_blocks", [8, 200])
async def test_caches_of_different_sizes(num_blocks: int) -> None:
    """The peer's cache may have more blocks than ours, or fewer; only the size of a block must agree."""
    async with pair() as p:
        desc = kv.CacheDesc(8, (num_blocks, 4096), "uint8")
        ours = p.manager.allocate_blocks_cache(desc)
        fill(ours.tensors, RUBBISH)
        source, destination = [63, 0, 31], [num_blocks - 1, 3, 0]
        await p.manager.pull_blocks(p.key, ours, source, destination)
        expect(ours.tensors, p.stamp, destination, src_blocks=source)
        expect(ours.tensors, RUBBISH, sorted(set(range(num_blocks)) - set(destination)))
        p.manager.deallocate_cache(ours)


@every_loop
async def test_fifty_pulls_at_once() -> None:
    """Fifty concurrent pulls, small and large, into disjoint blocks: each byte of each is right."""
    desc = kv.CacheDesc(8, (400, 4096), "uint8")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with pair(desc) as p:
        free = chance.sample(p.blocks, 400)
        jobs = []
        for index in range(50):
            number = chance.choice([1, 2, 7]) if index % 5 else 20
            destination, free = free[:number], free[number:]
            jobs.append((chance.choices(p.blocks, k=len(destination)), destination))
        async with anyio.create_task_group() as tasks:
            for source, destination in jobs:
                tasks.start_soon(p.pull, source, destination)
        for source, destination in jobs:
            expect(p.cache.tensors, p.stamp, destination, src_blocks=source)
        expect(p.cache.tensors, RUBBISH, free)
        assert p.link.stats.pulls == 50


async def test_one_decoder_pulls_from_several_prompts() -> None:
    """Several links of one cluster work at the same time, each with its own caches."""
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for cluster_id in (11, 12, 13):
            peers.append(await stack.enter_async_context(spawn_peer(cluster_id, pool="8MiB")))
            await peers[-1].call("allocate_blocks", num_tensors=4, shape=[32, 4096], model_id=0)
        here = await stack.enter_async_context(kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="16MiB"))
        (await here.link_clusters([peer.info for peer in peers])).raise_for_status()
        assert sorted(link.peer for link in here.links) == [11, 12, 13]
        cache = here.kv_cache_manager.allocate_blocks_cache(kv.CacheDesc(4, (96, 4096), "uint8"))
        blocks = list(range(32))
        async with anyio.create_task_group() as tasks:
            for index, peer in enumerate(peers):
                tasks.start_soon(
                    here.kv_cache_manager.pull_blocks,
                    kv.BlocksCacheKey(peer.cluster_id),
                    cache,
                    blocks,
                    [32 * index + block for block in blocks],
                )
        for index, peer in enumerate(peers):
            expect(cache.tensors, peer.stamp(1), [32 * index + block for block in blocks], src_blocks=blocks)
        here.kv_cache_manager.deallocate_cache(cache)


@asyncio_and_uvloop
async def test_several_clusters_live_in_one_process() -> None:
    """Two decoders of this process pull from one prompt in it and from one outside, none disturbing the others."""
    desc = kv.CacheDesc(4, (32, 4096), "uint8")
    async with AsyncExitStack() as stack:
        outside = await stack.enter_async_context(spawn_peer(11, pool="8MiB"))
        await outside.call("allocate_blocks", num_tensors=4, shape=[32, 4096], model_id=0)
        prompt, first, second = [
            await stack.enter_async_context(kv.Cluster(cluster_id=number, role=role, pool="8MiB"))
            for number, role in ((1, kv.Role.PROMPT), (2, kv.Role.DECODER), (3, kv.Role.DECODER))
        ]
        owned = prompt.kv_cache_manager.allocate_blocks_cache(desc, kv.BlocksCacheKey(1))
        fill(owned.tensors, Stamp(1, 1, 1))
        blocks = list(range(32))
        for decoder in (first, second):
            (await decoder.link_clusters([outside.info, kv.ClusterInfo(1, prompt.address)])).raise_for_status()
        caches = [decoder.kv_cache_manager.allocate_blocks_cache(desc) for decoder in (first, second)]
        for peer, stamp in ((11, outside.stamp(1)), (1, Stamp(1, 1, 1))):
            async with anyio.create_task_group() as tasks:
                for decoder, cache in zip((first, second), caches, strict=True):
                    key = kv.BlocksCacheKey(peer)
                    tasks.start_soon(decoder.kv_cache_manager.pull_blocks, key, cache, blocks, blocks)
            for cache in caches:
                expect(cache.tensors, stamp)
        for decoder, cache in zip((first, second), caches, strict=True):
            decoder.kv_cache_manager.deallocate_cache(cache)
        prompt.kv_cache_manager.deallocate_cache(owned)


@asyncio_and_uvloop
async def test_a_ring_of_three_mix_clusters() -> None:
    """1 pulls from 2, 2 from 3, 3 from 1, all at once and in three processes."""
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(spawn_peer(number, "MIX", pool="16MiB")) for number in (1, 2, 3)]
        for peer in peers:
            assert await peer.call("allocate_blocks", num_tensors=4, shape=[64, 4096], model_id=0) == 1
            assert await peer.call("allocate_blocks", num_tensors=4, shape=[64, 4096], is_filled=False) == 2
        following = dict(zip(peers, [*peers[1:], peers[0]], strict=True))
        blocks = list(range(64))
        links = [peer.start("link", clusters=[(other.cluster_id, other.address)]) for peer, other in following.items()]
        assert [await link.result() for link in links] == [["LLM_SUCCESS"]] * 3
        pulls = [
            peer.start("pull_blocks", peer=other.cluster_id, model_id=0, cache=2, src_blocks=blocks, dst_blocks=blocks)
            for peer, other in following.items()
        ]
        for pull in pulls:
            assert (await pull.result())["done"] == blocks
        for peer, other in following.items():
            assert await peer.call("faults", cache=2, stamp=other.stamp(1)) is None
        for peer in peers:
            await peer.call("deallocate", cache=1)
            await peer.call("deallocate", cache=2)


@asyncio_and_trio
async def test_request_keys_over_processes() -> None:
    """`pull_cache` takes the slot of a request, releases its key, and gives the memory back when all are pulled."""
    async with spawn_peer(1, pool="8MiB") as owner:
        handle = await owner.call("allocate", num_tensors=4, shape=[3, 65536], requests=[70, 71, 72])
        async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="8MiB") as here:
            (await here.link_clusters([owner.info])).raise_for_status()
            manager = here.kv_cache_manager
            cache = manager.allocate_cache(kv.CacheDesc(4, (2, 65536), "uint8"))
            fill(cache.tensors, RUBBISH)
            report = await manager.pull_cache(kv.CacheKey(1, 71), cache, 1)
            assert report.nbytes == 4 * 65536
            expect(cache.tensors, owner.stamp(handle), [1], src_blocks=[1])
            expect(cache.tensors, RUBBISH, [0])
            with pytest.raises(kv.CacheNotFoundError, match="71"):
                await manager.pull_cache(kv.CacheKey(1, 71), cache, 0)
            by_id = kv.CacheKeyByIdAndIndex(1, await owner.call("cache_id", cache=handle), 0)
            await manager.pull_cache(by_id, cache, 0, src_cache_offset=0)
            expect(cache.tensors, owner.stamp(handle), [0], src_blocks=[0])
            await owner.call("deallocate", cache=handle)
            assert (await owner.call("usage"))["pool_nbytes"] > 0, "two keys still hold it"
            await manager.pull_cache(kv.CacheKey(1, 70), cache, 0)
            await manager.pull_cache(kv.CacheKey(1, 72), cache, 1)
            expect(cache.tensors, owner.stamp(handle), [0, 1], src_blocks=[0, 2])
            (await here.check_link_status(1)).raise_for_status()  # behind the release, in order
            usage = await owner.call("usage")
            assert (usage["pool_nbytes"], usage["read_leases"]) == (0, 0)
            manager.deallocate_cache(cache)


async def test_empty_lists_move_nothing() -> None:
    """Empty lists are a pull of nothing: a report, no round trip, no byte."""
    async with pair() as p:
        nothing: tuple[Any, ...] = ([], (), np.array([], np.int64), np.array([]))
        for empty in nothing:
            report = await p.manager.pull_blocks(p.key, p.cache, empty, empty)
            assert (report.nbytes, report.done, report.num_extents) == (0, (), 0)
        assert p.link.stats.round_trips == 0
        p.expect_untouched()


Call = Callable[[Pair], Any]
WRONG: dict[str, tuple[type[Exception], tuple[str, ...], Call]] = {
    "destination out of range": (kv.ParameterError, ("dst_blocks", "64"), lambda p: p.pull([0, 1], [0, 64])),
    "source out of range": (kv.ParameterError, ("src_blocks", "64"), lambda p: p.pull([0, 64], [0, 1])),
    "source far out of range": (kv.ParameterError, ("src_blocks", str(2**62)), lambda p: p.pull([2**62], [0])),
    "negative destination": (kv.ParameterError, ("dst_blocks", "-1"), lambda p: p.pull([0, 1], [0, -1])),
    "negative source": (kv.ParameterError, ("src_blocks", "-3"), lambda p: p.pull([0, -3], [0, 1])),
    "negative in an array": (kv.ParameterError, ("-2",), lambda p: p.pull(np.array([-2]), np.array([0]))),
    "beyond 64 bits": (kv.ParameterError, ("dst_blocks", str(2**64)), lambda p: p.pull([0], [2**64])),
    "destination twice": (kv.ParameterError, ("dst_blocks", "7", "twice"), lambda p: p.pull([0, 1, 2], [7, 3, 7])),
    "True": (kv.ParameterError, ("dst_blocks", "True"), lambda p: p.pull([0, 1], [0, True])),
    "numpy False": (kv.ParameterError, ("src_blocks", "False"), lambda p: p.pull([np.False_], [1])),
    "float": (kv.ParameterError, ("src_blocks", "1.0"), lambda p: p.pull([1.0], [1])),
    "float array": (kv.ParameterError, ("float64",), lambda p: p.pull(np.array([1.0]), np.array([1]))),
    "boolean array": (kv.ParameterError, ("bool",), lambda p: p.pull(np.array([True]), np.array([1]))),
    "2-D array": (kv.ParameterError, ("2-D",), lambda p: p.pull(np.array([[1]]), np.array([1]))),
    "text": (kv.ParameterError, ("'12'",), lambda p: p.pull("12", [0, 1])),
    "generator": (kv.ParameterError, ("generator",), lambda p: p.pull((n for n in (1,)), [0])),
    "unequal lists": (kv.ParameterError, ("3", "2"), lambda p: p.pull([0, 1, 2], [0, 1])),
    "one list empty": (kv.ParameterError, ("0", "1"), lambda p: p.pull([], [1])),
    "None": (kv.ParameterError, ("None",), lambda p: p.pull([None], [1])),
    "unknown model": (
        kv.CacheNotFoundError,
        ("model 9",),
        lambda p: p.manager.pull_blocks(kv.BlocksCacheKey(1, 9), p.cache, [0], [0]),
    ),
    "unlinked cluster": (
        kv.NotLinkedError,
        ("cluster 77",),
        lambda p: p.manager.pull_blocks(kv.BlocksCacheKey(77), p.cache, [0], [0]),
    ),
    "key of another kind": (
        kv.ParameterError,
        ("got 71",),
        lambda p: p.manager.pull_blocks(71, p.cache, [0], [0]),  # type: ignore[arg-type]  # on purpose
    ),
    "destination that is no cache": (
        kv.ParameterError,
        ("array(",),
        lambda p: p.manager.pull_blocks(p.key, p.cache.tensors[0], [0], [0]),  # type: ignore[arg-type]  # on purpose
    ),
    "layers out of range": (kv.ParameterError, ("range(0, 5)",), lambda p: p.pull([0], [0], dst_layer_range=range(5))),
    "source layers out of range": (
        kv.ParameterError,
        ("range(3, 9)",),
        lambda p: p.pull([0], [0], src_layer_range=range(3, 9), dst_layer_range=range(4)),
    ),
    "layers of unequal number": (
        kv.ParameterError,
        ("2", "4"),
        lambda p: p.pull([0], [0], src_layer_range=range(2), dst_layer_range=range(1)),
    ),
    "layers with a step": (
        kv.ParameterError,
        ("range(0, 4, 2)",),
        lambda p: p.pull([0], [0], src_layer_range=range(0, 4, 2)),
    ),
    "layer width that does not divide": (
        kv.ParameterError,
        ("3", "8"),
        lambda p: p.pull([0], [0], src_layer_range=range(1), dst_layer_range=range(1), tensor_num_per_layer=3),
    ),
    "no deadline": (kv.ParameterError, ("timeout_s", "0"), lambda p: p.pull([0], [0], timeout_s=0)),
    "deadline of True": (kv.ParameterError, ("timeout_s", "True"), lambda p: p.pull([0], [0], timeout_s=True)),
}


async def test_bad_arguments_name_the_value_and_change_nothing() -> None:
    """Each wrong argument is a typed error with its name and value in the text, and not one byte has moved."""
    complaints = []
    async with pair() as p:
        for name, (kind, words, call) in WRONG.items():
            try:
                await call(p)
            except kind as exc:
                missing = [word for word in words if word not in str(exc)]
                if missing:
                    complaints.append(f"{name}: the text lacks {missing}: {exc}")
                if not isinstance(exc, kv.KVLinkError):
                    complaints.append(f"{name}: {exc!r} is no KVLinkError")
            except Exception as exc:  # collected, so that all of them are seen
                complaints.append(f"{name}: {exc!r} instead of {kind.__name__}")
            else:
                complaints.append(f"{name}: no error")
            p.expect_untouched()
            assert p.cache.is_quiet()
        await p.pull()
        p.expect_all()
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("desc", "layout", "words"),
    [
        (kv.CacheDesc(8, (64, 4096), "int8"), None, ("data type", "int8", "uint8")),
        (kv.CacheDesc(8, (64, 2048), "uint8"), None, ("bytes of a block", "2048", "4096")),
        (kv.CacheDesc(6, (64, 4096), "uint8"), None, ("number of tensors", "6", "8")),
        (kv.CacheDesc(8, (64, 4096), "uint8", layout="HND"), "NHD", ("layout", "HND", "NHD")),
    ],
    ids=["data type", "block size", "tensors", "layout"],
)
async def test_caches_that_do_not_fit_are_refused_with_both_values(
    desc: kv.CacheDesc, layout: str | None, words: tuple[str, ...]
) -> None:
    """Mismatch is found before a byte moves, and the error has the field and both sides' values."""
    async with pair() as p:
        await p.owner.call("allocate_blocks", num_tensors=8, shape=[64, 4096], model_id=1, layout=layout)
        ours = p.manager.allocate_blocks_cache(desc)
        fill(ours.tensors, RUBBISH)
        with pytest.raises(kv.MismatchError) as caught:
            await p.manager.pull_blocks(kv.BlocksCacheKey(1, 1), ours, [0, 1], [0, 1])
        for word in words:
            assert word in str(caught.value)
        expect(ours.tensors, RUBBISH)
        p.manager.deallocate_cache(ours)


async def test_a_tag_on_one_side_alone_fits() -> None:
    """A layout tag is compared only when both caches carry one."""
    async with pair() as p:
        ours = p.manager.allocate_blocks_cache(kv.CacheDesc(8, (64, 4096), "uint8", layout="HND"))
        await p.manager.pull_blocks(p.key, ours, [1], [1])
        expect(ours.tensors, p.stamp, [1])
        p.manager.deallocate_cache(ours)


async def test_a_foreign_cache_is_refused() -> None:
    """The destination must be a live cache of this very cluster."""
    async with pair() as p, kv.Cluster(cluster_id=3, role=kv.Role.DECODER, pool="4MiB") as other:
        foreign = other.kv_cache_manager.allocate_blocks_cache(kv.CacheDesc(8, (8, 4096), "uint8"))
        with pytest.raises(kv.ParameterError, match="another cluster"):
            await p.manager.pull_blocks(p.key, foreign, [0], [0])
        other.kv_cache_manager.deallocate_cache(foreign)
        gone = p.manager.allocate_blocks_cache(p.desc)
        p.manager.deallocate_cache(gone)
        with pytest.raises(kv.CacheNotFoundError):
            await p.manager.pull_blocks(p.key, gone, [0], [0])


async def test_the_owners_processor_is_not_needed() -> None:
    """A thousand pulls of a known cache cost the owner's process next to nothing: it is not asked."""
    async with pair() as p:
        await p.warm_up()
        before = p.owner.cpu_seconds()
        messages = p.link.stats.messages_sent
        for _ in range(1000):
            await p.pull([1, 2], [3, 4])
        assert p.link.stats.messages_sent - messages <= 8  # a heartbeat or two
        assert p.owner.cpu_seconds() - before < 0.5


async def test_pools_are_used_and_given_back() -> None:
    """What was allocated for a pull is free again afterwards, on both sides."""
    async with pair() as p:
        assert inside.used_nbytes(p.here) == p.desc.nbytes
        await p.pull()
        p.manager.deallocate_cache(p.cache)
        assert inside.used_nbytes(p.here) == 0
        await p.owner.call("deallocate", cache=p.handle)
        assert (await p.owner.call("usage"))["pool_nbytes"] == 0
