"""`prepare_pull` and `prepare_push`: the same as `pull_blocks` and `push_blocks`, with what can be done once done once.

Source: DIFFERENCES.md.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvlink as kv
from kvlink.checks import check_block_array
from kvlink.geometry import TensorRun
from kvlink.plan import FEW_BLOCKS, plan_blocks
from tests.spec.harness import D, P, Pair, link, linked_pair, refused, stamped
from tests.support.inside import link_to
from tests.support.pattern import expect

NUM = 64
DESC = kv.CacheDesc(4, (NUM, 4, 32), "uint8")
MIXED = (kv.Role.MIX, kv.Role.MIX)
THEIRS = kv.BlocksCacheKey(P)

both_ways = pytest.mark.parametrize("direction", ["pull", "push"])


async def prepared(pair: Pair, direction: str, own: kv.KvCache, **options: Any) -> Callable[..., Any]:
    """D's prepared pull from, or push to, P's cache."""
    if direction == "pull":
        return (await pair.reader.prepare_pull(THEIRS, own, **options)).pull
    return (await pair.reader.prepare_push(THEIRS, own, **options)).push


@both_ways
@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda blocks: np.array(blocks, np.int32)])
@pytest.mark.parametrize("count", [1, 5, 40])
async def test_moves_what_the_plain_call_moves(
    transport: str, direction: str, kind: Callable[..., Any], count: int
) -> None:
    """A prepared transfer moves the same bytes with the same report as the plain call, and asks the peer nothing."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache, own = pair.owner.allocate_blocks_cache(DESC, THEIRS), pair.reader.allocate_blocks_cache(DESC)
        source, target = (cache, own) if direction == "pull" else (own, cache)
        stats = link_to(pair.decoder, P).stats
        go = await prepared(pair, direction, own)
        assert stats.round_trips == 1
        stamp, other = stamped(source, 8), stamped(target, 9)
        random = np.random.default_rng(count)
        blocks, into = random.permutation(NUM)[:count].tolist(), random.permutation(NUM)[:count].tolist()
        report = await go(kind(blocks), kind(into))
        expect(target.tensors, stamp, into, src_blocks=blocks)
        expect(target.tensors, other, sorted(set(range(NUM)) - set(into)))
        plain = pair.reader.pull_blocks if direction == "pull" else pair.reader.push_blocks
        expected = await plain(THEIRS, own, blocks, into)
        for name in ("peer", "transport", "nbytes", "num_extents", "done", "failed"):
            assert getattr(report, name) == getattr(expected, name), name
        assert (stats.round_trips, stats.failures) == (1, 0)


@both_ways
async def test_layers(transport: str, direction: str) -> None:
    """The layers are those that were prepared."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache, own = pair.owner.allocate_blocks_cache(DESC, THEIRS), pair.reader.allocate_blocks_cache(DESC)
        source, target = (cache, own) if direction == "pull" else (own, cache)
        go = await prepared(pair, direction, own, src_layer_range=range(1), dst_layer_range=range(1, 2))
        for tensor in target.tensors:
            tensor[:] = 0
        stamped(source)
        for blocks in ([3], list(range(40))):
            await go(blocks, blocks)
            assert [bool(tensor.any()) for tensor in target.tensors] == [False, False, True, True]
            for theirs, ours in ((2, 0), (3, 1)):
                assert (target.tensors[theirs][blocks] == source.tensors[ours][blocks]).all()


@both_ways
async def test_what_can_be_refused_at_once_is(transport: str, direction: str) -> None:
    """Arguments of our side are refused before the peer is asked; what does not fit the peer's cache, when it is."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache, own = pair.owner.allocate_blocks_cache(DESC, THEIRS), pair.reader.allocate_blocks_cache(DESC)
        prepare: Callable[..., Any] = pair.reader.prepare_pull if direction == "pull" else pair.reader.prepare_push
        stats = link_to(pair.decoder, P).stats
        cases: list[tuple[Any, Any, dict[str, Any]]] = [
            (P, own, {}),
            (kv.CacheKey(P, 1), own, {}),
            (THEIRS, "cache", {}),
            (THEIRS, cache, {}),
            (THEIRS, own, {"tensor_num_per_layer": 0}),
            (THEIRS, own, {"tensor_num_per_layer": 2.0}),
            (THEIRS, own, {"src_layer_range": [0]}),
            (THEIRS, own, {"dst_layer_range": [0]}),
            (THEIRS, own, {"timeout_s": 0}),
        ]
        for key, into, options in cases:
            await refused(prepare(key, into, **options), kv.ParameterError, (key, options))
        with pytest.raises(kv.NotLinkedError):
            await prepare(kv.BlocksCacheKey(9), own)
        assert stats.round_trips == 0
        for ranges in ({"src_layer_range": range(1)}, {"src_layer_range": range(3)}, {"dst_layer_range": range(3)}):
            await refused(prepare(THEIRS, own, **ranges), kv.ParameterError, ranges)
        with pytest.raises(kv.CacheNotFoundError):
            await prepare(kv.BlocksCacheKey(P, 5), own)
        small = pair.reader.allocate_blocks_cache(kv.CacheDesc(4, (NUM, 64), "uint8"))
        with pytest.raises(kv.MismatchError):
            await prepare(THEIRS, small)


async def test_roles(transport: str) -> None:
    """Pulls are for DECODER and MIX, prepared or not; pushes for all."""
    async with linked_pair(transport) as pair:
        cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
        into = pair.reader.allocate_blocks_cache(DESC)
        await pair.reader.prepare_pull(THEIRS, into)
        with pytest.raises(kv.RoleError):
            await pair.owner.prepare_pull(kv.BlocksCacheKey(D), cache)
        await pair.owner.prepare_push(kv.CacheKeyByIdAndIndex(D, into.cache_id), cache)


@both_ways
async def test_the_peers_cache_ends(transport: str, direction: str) -> None:
    """The next call looks the key up again: an error where there is none, or one that does not fit; else it goes on."""
    async with linked_pair(transport, roles=MIXED, pool="4MiB") as pair:
        cache, own = pair.owner.allocate_blocks_cache(DESC, THEIRS), pair.reader.allocate_blocks_cache(DESC)
        go = await prepared(pair, direction, own)
        for blocks in ([1], list(range(40))):
            await go(blocks, blocks)
            pair.owner.deallocate_cache(cache)
            other = stamped(own, 9)
            with pytest.raises(kv.CacheNotFoundError):
                await go(blocks, blocks)
            cache = pair.owner.allocate_blocks_cache(kv.CacheDesc(4, (NUM, 64), "uint8"), THEIRS)
            with pytest.raises(kv.MismatchError):
                await go(blocks, blocks)
            expect(own.tensors, other)
            pair.owner.deallocate_cache(cache)
            cache = pair.owner.allocate_blocks_cache(DESC, THEIRS)
            source, target = (cache, own) if direction == "pull" else (own, cache)
            stamp = stamped(source, 8)
            await go(blocks, blocks)
            expect(target.tensors, stamp, blocks)


@both_ways
async def test_ours_ends(transport: str, direction: str) -> None:
    """When our cache or the link ends the calls say so; over a new link they go on."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache, own = pair.owner.allocate_blocks_cache(DESC, THEIRS), pair.reader.allocate_blocks_cache(DESC)
        go = await prepared(pair, direction, own)
        address = pair.prompt.address
        await pair.decoder.unlink_clusters([kv.ClusterInfo(P, address)], timeout_s=5)
        with pytest.raises(kv.NotLinkedError):
            await go([0], [0])
        await link(pair.decoder, P, address, transport)
        source, target = (cache, own) if direction == "pull" else (own, cache)
        stamp = stamped(source, 8)
        await go([2], [1])
        expect(target.tensors, stamp, [1], src_blocks=[2])
        pair.reader.deallocate_cache(own)
        with pytest.raises(kv.CacheNotFoundError):
            await go([0], [0])
        await pair.decoder.aclose()
        with pytest.raises(kv.ClosedError):
            await go([0], [0])


@pytest.mark.parametrize("kind", [list, np.array])
def test_planning_has_no_loop_over_blocks(kind: Callable[..., Any]) -> None:
    """Checking and planning 4,096 scattered blocks calls as many Python functions as 64 do: numpy loops, not Python."""

    def calls(count: int) -> int:
        num_calls = 0

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        random = np.random.default_rng(count)
        ours, theirs = kind(random.permutation(count).tolist()), kind(random.permutation(count).tolist())
        run = (TensorRun(0, 0, 1 << 20, 4),)
        gc.collect()
        gc.disable()  # finalisers of other tests' objects would be counted
        sys.setprofile(count_calls)
        try:
            local = check_block_array("dst_blocks", ours, count, is_unique=True)
            remote = check_block_array("src_blocks", theirs, count)
            extents = plan_blocks(run, run, local, remote, 64)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert len(extents) > count // 2
        return num_calls

    few = calls(2 * FEW_BLOCKS)
    assert calls(4096) == few


@both_ways
async def test_a_failure_has_the_report_that_an_unprepared_one_has(transport: str, direction: str) -> None:
    """The peer's cache has gone: which blocks failed, and why, in the caller's numbers."""
    async with linked_pair(transport, roles=MIXED) as pair:
        cache, own = pair.owner.allocate_blocks_cache(DESC, THEIRS), pair.reader.allocate_blocks_cache(DESC)
        go = await prepared(pair, direction, own)
        pair.owner.deallocate_cache(cache)
        await pair.flush()
        plain: Callable[..., Any] = pair.reader.pull_blocks if direction == "pull" else pair.reader.push_blocks
        reports = []
        for call in (go([1, 2], [3, 4]), plain(THEIRS, own, [1, 2], [3, 4])):
            with pytest.raises(kv.CacheNotFoundError) as caught:
                await call
            assert caught.value.report is not None
            reports.append(caught.value.report)
        assert reports[0] == reports[1]
        assert [failure.blocks for failure in reports[0].failed] == [(3, 4)]
