"""`kvlink.testing`: every fault strikes as it says, under a seed, and none breaks the contract of transports."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlink as kv
from kvlink.loops import current_call_soon
from kvlink.memory.regions import STATE
from kvlink.testing import Fault, Faults, FaultyEndpoint, FaultyTransport
from kvlink.testing.faults import Dice
from tests.support.inside import link_to, num_write_leases
from tests.support.loops import asyncio_and_trio, asyncio_and_uvloop, eventually
from tests.support.pattern import Stamp, expect, fill

DESC = kv.CacheDesc(4, (32, 1024), "uint8")
OWNED, RUBBISH = Stamp(1, 1, 1), Stamp(250, 250, 65000)
SCATTERED = list(range(0, 32, 2))
"""Blocks that cannot be joined, so that a pull of them has many extents."""


class Scene(NamedTuple):
    """An owner with a filled cache, and a reader whose link to it is faulty."""

    owner: kv.Cluster
    reader: kv.Cluster
    source: kv.KvCache
    cache: kv.KvCache

    @property
    def endpoint(self) -> FaultyEndpoint:
        """The reader's side of the transport."""
        endpoint = link_to(self.reader, 1).endpoint
        assert isinstance(endpoint, FaultyEndpoint)
        return endpoint

    async def pull(self, **options: Any) -> kv.TransferReport:
        """Pull the scattered blocks."""
        manager = self.reader.kv_cache_manager
        return await manager.pull_blocks(kv.BlocksCacheKey(1), self.cache, SCATTERED, SCATTERED, **options)

    async def push(self, **options: Any) -> kv.TransferReport:
        """Push the scattered blocks."""
        manager = self.reader.kv_cache_manager
        return await manager.push_blocks(kv.BlocksCacheKey(1), self.cache, SCATTERED, SCATTERED, **options)


@asynccontextmanager
async def scene(**faults: Any) -> Any:
    """Set it up; the keywords are fields of `Faults`."""
    made = Faults(**faults)
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(30))
        owner = await stack.enter_async_context(kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB"))
        reader = await stack.enter_async_context(
            kv.Cluster(
                cluster_id=2,
                role=kv.Role.MIX,
                pool="1MiB",
                wrap_transport=lambda transport: FaultyTransport(transport, made),
            )
        )
        source = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        fill(source.tensors, OWNED)
        (await reader.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        cache = reader.kv_cache_manager.allocate_blocks_cache(DESC)
        fill(cache.tensors, RUBBISH)
        yield Scene(owner, reader, source, cache)


@pytest.mark.parametrize("fault", ["delay", "reorder", "repeat"])
@asyncio_and_trio
async def test_what_is_only_late_succeeds(fault: str) -> None:
    """Delayed, reordered and repeated operations move the same bytes, concurrently too."""
    async with scene(**{fault: 1.0}, longest_delay_s=0.001) as s:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(s.pull)
        expect(s.cache.tensors, OWNED, SCATTERED)
        untouched = sorted(set(range(32)) - set(SCATTERED))
        expect(s.cache.tensors, RUBBISH, untouched)
        fill(s.cache.tensors, RUBBISH)
        await s.push()
        expect(s.source.tensors, RUBBISH, SCATTERED)
        expect(s.source.tensors, OWNED, untouched)
        assert s.endpoint.num_faults[Fault(fault)] > 5


@asyncio_and_trio
async def test_a_failure_is_a_typed_error() -> None:
    """A failed get or put raises TransportError with the peer's id; the link stands and the next call may succeed."""
    async with scene(fail=1.0, operations=frozenset({"get", "put"})) as s:
        for move in (s.pull, s.push):
            with pytest.raises(kv.TransportError) as caught:
                await move()
            assert caught.value.peer == 1
        assert link_to(s.reader, 1).is_open
        assert s.cache.is_quiet()


@pytest.mark.parametrize("operation", ["get", "put", "reach", "load_word"])
@asyncio_and_trio
async def test_a_dropped_completion_costs_the_deadline(operation: str) -> None:
    """An operation that is never reported ends by the deadline of the call, whichever operation it is."""
    async with scene(drop=1.0, operations=frozenset({operation})) as s:
        for move in (s.push,) if operation == "put" else (s.pull,) if operation == "get" else (s.pull, s.push):
            with anyio.fail_after(5), pytest.raises(kv.TransferTimeoutError) as caught:
                await move(timeout_s=0.05)
            assert caught.value.peer == 1
            assert s.cache.is_quiet()
        assert link_to(s.reader, 1).num_operations == 0


@asyncio_and_trio
async def test_a_dropped_completion_ends_with_the_link() -> None:
    """What waits for a report that never comes fails when the link is lost."""
    async with scene(drop=1.0, operations=frozenset({"get"})) as s:
        outcome: list[Exception] = []

        async def pull() -> None:
            with pytest.raises(kv.LinkLostError) as caught:
                await s.pull()
            outcome.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await eventually(lambda: s.endpoint.num_faults[Fault.DROP], "the dropped get")
            await s.reader.unlink_clusters([1], force=True)
        assert len(outcome) == 1


async def test_memory_that_is_taken_back_while_a_cache_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that was reached and then taken back, as its cache ended, is no lie of the peer's."""
    async with scene() as s:
        nbytes = FaultyEndpoint.region_nbytes
        monkeypatch.setattr(
            FaultyEndpoint, "region_nbytes", lambda self, region: nbytes(self, region) if region == STATE else 0
        )
        with pytest.raises(kv.CacheNotFoundError, match="ended while it was being opened") as caught:
            await s.pull()
        assert (caught.value.peer, caught.value.phase) == (1, "look-up")


@asyncio_and_uvloop
async def test_an_endpoint_may_end_its_link_in_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a transport finds out in a callback of the loop ends the link as well as what it finds out in a task."""
    losing: list[Callable[[kv.KVLinkError], None]] = []
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    monkeypatch.setattr(FaultyEndpoint, "connect", lambda _, post, lose: losing.append(lose))
    async with scene() as s:
        theirs = link_to(s.owner, 2)
        kept = s.reader.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(2))
        await s.owner.kv_cache_manager.push_blocks(kv.BlocksCacheKey(2), s.source, [0], [0])
        assert num_write_leases(s.reader) == 1  # which must be looked after
        link = link_to(s.reader, 1)
        error = kv.LinkLostError("the cable is gone; link again", peer=1)
        # From a thread that knows nothing of our context, as a transport's own.
        thread = threading.Thread(target=current_call_soon(), args=(partial(losing[0], error),))
        thread.start()
        thread.join()
        with anyio.fail_after(5):
            await link.closed.wait()
            await theirs.closed.wait()
        with pytest.raises((kv.LinkLostError, kv.NotLinkedError)):
            await s.pull()
        s.reader.kv_cache_manager.deallocate_cache(kept)
        assert complaints == []


async def test_an_operation_may_overtake_another() -> None:
    """With reordered completions, calls do not end in the order in which they began."""
    async with scene(reorder=0.5, seed=3, longest_delay_s=0.05) as s:
        ended: list[int] = []

        async def pull(index: int) -> None:
            await s.pull()
            ended.append(index)

        async with anyio.create_task_group() as tasks:
            for index in range(12):
                tasks.start_soon(pull, index)
        assert sorted(ended) == list(range(12))
        assert ended != sorted(ended)


def test_the_seed_decides() -> None:
    """One seed, one sequence of faults; another seed or another endpoint, another one."""

    def sequence(seed: int, name: str) -> list[Fault | None]:
        dice = Dice(Faults(seed=seed, delay=0.2, drop=0.2, fail=0.2, reorder=0.2), name)
        return [dice.draw("get") for _ in range(50)]

    assert sequence(1, "a") == sequence(1, "a")
    assert sequence(1, "a") != sequence(2, "a")
    assert sequence(1, "a") != sequence(1, "b")


def test_faults_are_as_frequent_as_asked() -> None:
    """Each strikes with its probability, and never an operation that it is not for."""
    dice = Dice(Faults(delay=0.5, fail=0.25, operations=frozenset({"get"})), "a")
    counts = Counter(dice.draw("get") for _ in range(4000))
    assert 1800 < counts[Fault.DELAY] < 2200
    assert 850 < counts[Fault.FAIL] < 1150
    assert counts[Fault.DROP] == 0
    assert dice.draw("put") is None


@given(st.integers(0, 40), st.integers())
def test_another_order_is_the_same_set(total: int, seed: int) -> None:
    """Reordering loses and adds nothing."""
    batches = list(Dice(Faults(seed=seed), "a").batches(total))
    assert sorted(index for batch in batches for index in batch) == list(range(total))
    assert all(batches)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"delay": -0.1}, kv.ParameterValueError),
        ({"drop": 1.1}, kv.ParameterValueError),
        ({"drop": 0.6, "fail": 0.6}, kv.ParameterValueError),
        ({"delay": "often"}, kv.ParameterTypeError),
        ({"seed": 1.5}, kv.ParameterTypeError),
        ({"operations": frozenset({"close"})}, kv.ParameterValueError),
        ({"longest_delay_s": -1}, kv.ParameterValueError),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], kind: type[kv.KVLinkError]) -> None:
    """A probability is one, and together they are at most one."""
    with pytest.raises(kind):
        Faults(**wrong)
