"""A movement that fails says what is done and what is not, in the caller's numbers; only what can be vouched for is."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlink as kv
from kvlink.geometry import CacheGeometry, TensorRun, select_runs
from kvlink.memory.strided import Copy, complete, cut
from kvlink.plan import join_blocks, spread
from kvlink.report import Interrupted
from kvlink.testing import Faults, FaultyTransport
from kvlink.transfers.partial import report_failure, touched_blocks
from tests.support.inside import link_to
from tests.support.loops import asyncio_and_trio, eventually
from tests.support.pair import SLOW
from tests.support.pattern import Stamp, expect, faults, fill

DESC = kv.CacheDesc(4, (256, 4096), "uint8")
SOURCE = list(range(0, 256, 2))
"""No two of them can be joined: as many extents as blocks."""
TARGET = list(range(255, 0, -2))
OWNED, RUBBISH = Stamp(1, 1, 1), Stamp(250, 250, 65000)


class Scene:
    """An owner with a filled cache and a reader with one of rubbish, in this process."""

    def __init__(self, owner: kv.Cluster, reader: kv.Cluster, source: kv.KvCache, cache: kv.KvCache) -> None:
        self.owner, self.reader, self.source, self.cache = owner, reader, source, cache
        self.manager = reader.kv_cache_manager

    async def move(self, direction: str, **options: Any) -> kv.TransferReport:
        """Pull SOURCE to TARGET, or push TARGET's bytes to SOURCE of the owner."""
        key = kv.BlocksCacheKey(1)
        if direction == "pull":
            return await self.manager.pull_blocks(key, self.cache, SOURCE, TARGET, **options)
        return await self.manager.push_blocks(key, self.cache, TARGET, SOURCE, **options)

    def wrong(self, direction: str, blocks: Sequence[int]) -> list[int]:
        """Return those of these destination blocks that do not hold what was to be moved there."""
        if direction == "pull":
            of, tensors, stamp = dict(zip(TARGET, SOURCE, strict=True)), self.cache.tensors, OWNED
        else:
            of, tensors, stamp = dict(zip(SOURCE, TARGET, strict=True)), self.source.tensors, RUBBISH
        return [block for block in blocks if faults(tensors, stamp, [block], src_blocks=[of[block]])]


@asynccontextmanager
async def scene(config: dict[str, Any] | None = None, **chances: Any) -> AsyncIterator[Scene]:
    """Set it up; `chances` are fields of `Faults`."""
    made = Faults(**chances)
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(30))
        owner = await stack.enter_async_context(kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="8MiB"))
        reader = await stack.enter_async_context(
            kv.Cluster(
                cluster_id=2,
                role=kv.Role.MIX,
                pool="8MiB",
                config=kv.ClusterConfig(**(config or {})),
                wrap_transport=(lambda transport: FaultyTransport(transport, made)) if chances else None,
            )
        )
        source = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        fill(source.tensors, OWNED)
        (await reader.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        cache = reader.kv_cache_manager.allocate_blocks_cache(DESC)
        fill(cache.tensors, RUBBISH)
        yield Scene(owner, reader, source, cache)


def check_partition(report: kv.TransferReport | None, request: Sequence[int]) -> kv.TransferReport:
    """`done` and `failed` are the request, each block once, and every failure has its cause."""
    assert report is not None
    failed = [block for failure in report.failed for block in failure.blocks]
    assert sorted([*report.done, *failed]) == sorted(request)
    assert all(failure.cause and not failure.status.is_ok for failure in report.failed)
    return report


@pytest.mark.parametrize("direction", ["pull", "push"])
@asyncio_and_trio
async def test_a_deadline_in_the_middle(direction: str) -> None:
    """What had landed by the deadline is done and right; the error is a time-out for who knows no more than that."""
    request = TARGET if direction == "pull" else SOURCE
    async with scene(SLOW) as s:
        await s.move(direction)  # nothing is to be asked any more
        fill(s.cache.tensors, RUBBISH)
        fill(s.source.tensors, OWNED)
        num_partial = 0
        for attempt in range(400):
            timeout_s = 0.0005 * (attempt % 40 + 1)
            error: kv.KVLinkError | None = None
            try:
                await s.move(direction, timeout_s=timeout_s)
            except kv.TransferTimeoutError as exc:
                error = exc
            if error is not None:
                report = check_partition(error.report, request)
                assert isinstance(error, kv.PartialTransferError) == bool(report.done)
                assert s.wrong(direction, report.done) == []
                assert error.peer == 1
                if report.done:
                    assert report.transport == "shm"
                    assert report.nbytes >= 4 * 4096 * len(report.done)
                    num_partial += 1
            fill(s.cache.tensors, RUBBISH)
            fill(s.source.tensors, OWNED)
            if num_partial >= 2:
                break
        assert num_partial


@pytest.mark.parametrize("direction", ["pull", "push"])
@asyncio_and_trio
async def test_a_failure_of_the_transport(direction: str) -> None:
    """A transport that fails after some extents: these are done, the rest failed for the transport's reason."""
    request = TARGET if direction == "pull" else SOURCE
    operation = "get" if direction == "pull" else "put"
    async with scene(fail=1.0, seed=5, operations=frozenset({operation})) as s:
        seen = set()
        for _ in range(6):
            with pytest.raises(kv.KVLinkError) as caught:
                await s.move(direction)
            error = caught.value
            report = check_partition(error.report, request)
            seen.add(type(error))
            if report.done:
                assert isinstance(error, kv.PartialTransportError)
                assert isinstance(error.__cause__, kv.TransportError)
            assert s.wrong(direction, report.done) == []
            assert "on purpose" in report.failed[0].cause
            fill(s.cache.tensors, RUBBISH)
            fill(s.source.tensors, OWNED)
        assert kv.PartialTransportError in seen


@pytest.mark.parametrize("direction", ["pull", "push"])
@asyncio_and_trio
async def test_nothing_is_done_when_the_cache_has_ended(direction: str) -> None:
    """Extents that had landed do not count when the cache ended meanwhile: their bytes may be another cache's."""
    request = TARGET if direction == "pull" else SOURCE
    operation = "get" if direction == "pull" else "put"
    async with scene(drop=1.0, operations=frozenset({operation})) as s:
        caught: list[kv.KVLinkError] = []

        async def move() -> None:
            with pytest.raises(kv.TransferTimeoutError) as info:
                await s.move(direction, timeout_s=0.2)
            caught.append(info.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move)
            await eventually(lambda: not s.cache.is_quiet(), "the movement")
            await anyio.sleep(0.05)
            s.owner.kv_cache_manager.deallocate_cache(s.source)
        report = check_partition(caught[0].report, request)
        assert report.done == ()
        assert not isinstance(caught[0], kv.PartialTransferError)


async def test_a_transport_that_fails_because_the_cache_has_ended() -> None:
    """Registered memory that was unmapped, for instance: the error says that the cache has ended, which is why."""
    async with scene(fail=1.0, operations=frozenset({"get"})) as s:
        endpoint = link_to(s.reader, 1).endpoint
        get = endpoint.get

        async def end_first(*arguments: Any) -> None:
            s.owner.kv_cache_manager.deallocate_cache(s.source)
            await get(*arguments)

        setattr(endpoint, "get", end_first)  # noqa: B010  # a method is replaced
        with pytest.raises(kv.CacheNotFoundError) as caught:
            await s.move("pull")
        assert isinstance(caught.value.__cause__, kv.TransportError)
        assert check_partition(caught.value.report, TARGET).done == ()


async def test_a_link_that_is_lost_in_the_middle() -> None:
    """What had landed when the link was lost counts while the state word can be read; the error is a lost link."""
    async with scene(drop=1.0, seed=2, operations=frozenset({"get"})) as s:
        caught: list[kv.KVLinkError] = []

        async def pull() -> None:
            with pytest.raises(kv.LinkLostError) as info:
                await s.move("pull")
            caught.append(info.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await eventually(lambda: not s.cache.is_quiet(), "the movement")
            await anyio.sleep(0.02)
            link_to(s.reader, 1).lose(kv.LinkLostError("cut", peer=1))
        report = check_partition(caught[0].report, TARGET)
        assert s.wrong("pull", report.done) == []
        assert isinstance(caught[0], kv.PartialTransferError) == bool(report.done)


@pytest.mark.parametrize(
    "kind", [kv.TransferTimeoutError, kv.LinkLostError, kv.NotLinkedError, kv.TransportError, kv.ClosedError]
)
async def test_a_partial_error_is_what_its_cause_is(kind: type[kv.KVLinkError]) -> None:
    """Class, status, peer and phase of what ended a movement stay; only what nobody expects of one is just partial."""
    async with scene() as s:
        runs = s.cache.geometry.runs
        extents = spread(runs, runs, join_blocks([1, 5], [1, 5], DESC.slot_nbytes))
        error = kind("the end", peer=1, phase="transfer")
        error.interrupted = Interrupted(tuple(extents[1:]), len(extents), 4 * DESC.slot_nbytes, "shm", 0.1)
        reported = report_failure(error, s.cache, [1, 5], [11, 15])
        assert isinstance(reported, kv.PartialTransferError)
        assert isinstance(reported, kind) or kind is kv.ClosedError
        assert (reported.status, reported.peer, reported.phase) == (error.status, 1, "transfer")
        assert check_partition(reported.report, [11, 15]).done == (11,)


@pytest.mark.parametrize("call", ["pull_blocks", "pull_cache", "push_blocks", "push_cache"])
async def test_every_failure_has_a_report(call: str) -> None:
    """A movement that could not even begin reports every block of the request as failed, and why."""
    async with scene() as s:
        manager, key = s.manager, kv.CacheKeyByIdAndIndex(1, 99999, 3)
        moves: dict[str, tuple[Callable[[], Awaitable[kv.TransferReport]], list[int]]] = {
            "pull_blocks": (lambda: manager.pull_blocks(kv.BlocksCacheKey(1, 9), s.cache, [0, 1], [5, 3]), [5, 3]),
            "pull_cache": (lambda: manager.pull_cache(key, s.cache, 7), [7]),
            "push_blocks": (lambda: manager.push_blocks(kv.BlocksCacheKey(1, 9), s.cache, [0, 1], [5, 3]), [5, 3]),
            "push_cache": (lambda: manager.push_cache(key, s.cache, 7), [3]),
        }
        move, request = moves[call]
        with pytest.raises(kv.CacheNotFoundError) as caught:
            await move()
        report = check_partition(caught.value.report, request)
        assert (report.peer, report.done) == (1, ())
        await s.reader.unlink_clusters([1])
        with pytest.raises(kv.NotLinkedError) as unlinked:
            await move()
        check_partition(unlinked.value.report, request)


async def test_prepared_movements_report_too() -> None:
    """A prepared pull or push that fails reports as the call that it stands for."""
    async with scene() as s:
        pulling = await s.manager.prepare_pull(kv.BlocksCacheKey(1), s.cache)
        pushing = await s.manager.prepare_push(kv.BlocksCacheKey(1), s.cache)
        s.owner.kv_cache_manager.deallocate_cache(s.source)
        for move in (pulling.pull, pushing.push):
            with pytest.raises(kv.CacheNotFoundError) as caught:
                await move([0, 1], [5, 3])
            assert check_partition(caught.value.report, [5, 3]).done == ()


async def test_arguments_that_are_refused_have_no_report() -> None:
    """A request that makes no sense has no blocks to report on."""
    async with scene() as s:
        with pytest.raises(kv.ParameterError) as caught:
            await s.manager.pull_blocks(kv.BlocksCacheKey(1), s.cache, [0, 1], [5, 5])
        assert caught.value.report is None


# Pure


@given(st.data())
def test_a_copy_is_complete_when_all_its_chunks_are(data: st.DataObject) -> None:
    """`complete` names exactly the copies of which no chunk is missing, whatever chunks were done in whatever order."""
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=12))
    memory = np.zeros(1, np.uint8)
    copies = [Copy(memory, 0, 0, memory, 0, 0, nbytes, rows) for nbytes, rows in shapes]
    chunks = list(cut(copies, data.draw(st.integers(1, 30))))
    sizes = [sum(copy.nbytes * copy.num_rows for copy in chunk) for chunk in chunks]
    starts = np.cumsum([0, *sizes]).tolist()
    is_done = data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks)))
    copied = [(starts[index], starts[index + 1]) for index in range(len(chunks)) if is_done[index]]
    random.Random(0).shuffle(copied)
    missing = {byte for index, done in enumerate(is_done) if not done for byte in range(*starts[index : index + 2])}
    ends = np.cumsum([0, *[nbytes * rows for nbytes, rows in shapes]]).tolist()
    expected = [i for i in range(len(copies)) if missing.isdisjoint(range(ends[i], ends[i + 1]))]
    assert complete([nbytes * rows for nbytes, rows in shapes], copied) == expected


@given(st.data())
def test_blocks_with_missing_bytes_are_found(data: st.DataObject) -> None:
    """A block has failed exactly when one of the extents that carry its bytes is missing."""
    runs = data.draw(
        st.sampled_from(
            [
                (TensorRun(1, 0, 80, 4),),
                (TensorRun(1, 512, 96, 4),),
                (TensorRun(1, 0, 80, 2), TensorRun(2, 160, 100, 2)),
                (TensorRun(1, 300, -100, 3), TensorRun(2, 0, 80, 1)),
            ]
        )
    )
    geometry = CacheGeometry(4, 10, 8, "uint8", None, True, runs)
    local = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True))
    remote = data.draw(st.lists(st.integers(0, 9), min_size=len(local), max_size=len(local)))
    start = data.draw(st.integers(0, 3))
    stop = data.draw(st.integers(start + 1, 4))
    pieces = join_blocks(local, remote, 8)
    ours = select_runs(runs, start, stop)
    extents = spread(ours, (TensorRun(7, 0, 80, stop - start),), pieces)
    missing = [extent for extent in extents if data.draw(st.booleans())]
    touched = touched_blocks(missing, geometry) & set(local)
    expected = set()
    for index, extent in enumerate(extents):
        if extent in missing:
            piece = pieces[index % len(pieces)]
            first = piece.local_offset // 8
            expected |= set(range(first, first + piece.nbytes // 8))
    if not any(extent.nbytes > 80 for extent in extents):  # joined tensors are one extent, all of it
        assert touched == expected & set(local)
    assert touched >= expected & set(local)


def test_the_right_block_of_several_tensors() -> None:
    """One block of many, in the last of several runs."""
    geometry = CacheGeometry(4, 10, 8, "uint8", None, True, (TensorRun(1, 0, 80, 2), TensorRun(2, 160, 100, 2)))
    extents = spread(geometry.runs, (TensorRun(7, 0, 80, 4),), join_blocks([2, 7], [0, 1], 8))
    assert touched_blocks(extents[3:], geometry) == {7}


async def test_expected_bytes_of_the_scene() -> None:
    """The scene itself: a pull that succeeds leaves what `wrong` looks for."""
    async with scene() as s:
        report = await s.move("pull")
        assert s.wrong("pull", report.done) == []
        expect(s.cache.tensors, RUBBISH, sorted(set(range(256)) - set(TARGET)))
        assert s.wrong("push", SOURCE) == SOURCE
