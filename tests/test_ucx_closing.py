"""A UCX that is started and ended, on good days and bad ones: nothing stays behind, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import kvlink as kv
from tests.support.loops import asyncio_and_trio, asyncio_and_uvloop, eventually, every_loop
from tests.support.pair import pair
from tests.support.ucx import need_ucx

SMALL = kv.CacheDesc(1, (4, 4096), "uint8")

pytestmark = pytest.mark.ucx

PROGRESS = pytest.mark.parametrize("progress", ["thread", "loop"])


def settings(progress: str = "thread") -> kv.ClusterConfig:
    """Return settings of a cluster that uses nothing but UCX."""
    return kv.ClusterConfig(transports=("ucx",), ucx=kv.UcxConfig(progress=progress))


def cluster(progress: str = "thread") -> kv.Cluster:
    """Return such a cluster."""
    return kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="64KiB", config=settings(progress))


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Give the registrations that were made and not undone; at the end there must be none."""
    need_ucx()
    from kvlink.transports.ucx.registry import Registry

    there: list[Any] = []
    do_map, do_unmap = Registry.map, Registry.unmap

    def note_map(registry: Registry, region: Any) -> Any:
        there.append(do_map(registry, region))
        return there[-1]

    def note_unmap(registry: Registry, registered: Any) -> None:
        there.remove(registered)
        do_unmap(registry, registered)

    monkeypatch.setattr(Registry, "map", note_map)
    monkeypatch.setattr(Registry, "unmap", note_unmap)
    yield there
    assert not there


@every_loop
@PROGRESS
async def test_a_cluster_that_did_nothing_closes(progress: str, registrations: list[Any]) -> None:
    """In either way of progress: nothing is in flight, and so there is nothing to wait for."""
    with anyio.fail_after(5):
        async with cluster(progress):
            assert len(registrations) == 3


@every_loop
@PROGRESS
async def test_a_start_that_fails_leaves_nothing(
    progress: str, registrations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration is refused after others were made: a typed error, and those are undone."""
    from kvlink.transports.ucx.registry import Registry

    note_map = Registry.map

    def refuse_third(registry: Registry, region: Any) -> Any:
        if len(registrations) == 2:
            raise kv.LinkError("no more memory can be registered")
        return note_map(registry, region)

    monkeypatch.setattr(Registry, "map", refuse_third)
    with pytest.raises(kv.FeatureNotEnabledError, match="no more memory"), anyio.fail_after(5):
        await cluster(progress).__aenter__()


@asyncio_and_uvloop
@pytest.mark.parametrize("step", ["context", "words", "pool"])
async def test_a_start_that_asyncio_cancels_leaves_nothing(
    step: str, registrations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the context is being made, or a registration: whatever comes of it is given back."""
    from kvlink.transports.ucx.context import Context
    from kvlink.transports.ucx.registry import Registry

    may_go_on, is_there = threading.Event(), threading.Event()
    place = {"words": 0, "pool": 2}.get(step)
    note_map, create = Registry.map, Context.create

    def stop_here() -> None:
        is_there.set()
        assert may_go_on.wait(10)

    def slow_map(registry: Registry, region: Any) -> Any:
        if len(registrations) == place:
            stop_here()
        return note_map(registry, region)

    def slow_create(config: kv.UcxConfig) -> Context:
        if place is None:
            stop_here()
        return create(config)

    async def start() -> None:
        async with cluster():
            pytest.fail("it was cancelled")

    monkeypatch.setattr(Registry, "map", slow_map)
    monkeypatch.setattr(Context, "create", slow_create)
    starting = asyncio.get_running_loop().create_task(start())
    await anyio.to_thread.run_sync(is_there.wait)
    starting.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError), anyio.fail_after(5):
        await starting


async def test_ucx_is_not_started_without_descriptors(
    registrations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has too few it aborts the process; so it is not tried, and the few are given back."""
    from kvlink.transports.ucx import context

    left = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]

    def give(*_: object) -> int:
        if not left:
            raise OSError(errno.EMFILE, "Too many open files")
        return left.pop()

    monkeypatch.setattr(context, "os", SimpleNamespace(open=give, close=os.close, devnull="", O_RDONLY=0, O_CLOEXEC=0))
    with pytest.raises(kv.FeatureNotEnabledError, match=r"has 40 left .*ulimit -n"):
        await cluster().__aenter__()
    assert not registrations


async def test_a_host_without_a_thread_to_give(registrations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error at once, and nothing stays."""
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == "kvlink-ucx":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    with pytest.raises(kv.FeatureNotEnabledError, match="no thread"), anyio.fail_after(2):
        await cluster().__aenter__()
    assert not registrations


@every_loop
@PROGRESS
async def test_a_worker_that_cannot_be_waited_for_ends_its_links(
    progress: str, registrations: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """``ucp_worker_arm`` fails: that is no reason to come back for ever; the cluster moves nothing more, and closes."""

    class Broken:
        """Of libucp, all but one function."""

        def __init__(self, api: Any) -> None:
            self.api = api

        def ucp_worker_arm(self, worker: object) -> int:
            return -3  # UCS_ERR_IO_ERROR

        def __getattr__(self, name: str) -> Any:
            return getattr(self.api, name)

    with anyio.fail_after(10):
        async with cluster(progress) as here:
            worker = here._transports[0]._services.worker  # type: ignore[attr-defined]
            library = worker.context.library
            broken = type(library)(
                **{
                    name: Broken(library.api) if name == "api" else getattr(library, name)
                    for name in type(library).__slots__
                }
            )
            worker.context.library = broken
            worker.ask(lambda: None)
            with anyio.fail_after(3):
                await worker._ended.wait()
            assert worker._is_broken
    assert "waiting for events" in caplog.text


@every_loop
@PROGRESS
async def test_closing_is_bounded_where_ucx_ends_nothing(
    progress: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is closed never is: the cluster closes all the same, in time, and without holding the loop."""
    need_ucx()
    from kvlink.transports.ucx import worker as module

    monkeypatch.setattr(module, "_JOIN_S", 0.3)
    monkeypatch.setattr("kvlink.transports.ucx.turns._given_up", [])
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = anyio.current_time()
            await anyio.sleep(0.01)
            longest = max(longest, anyio.current_time() - before)

    ucx: Any = None
    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(5):
            async with cluster(progress) as here:
                ucx = here._transports[0]._services.worker  # type: ignore[attr-defined]
                monkeypatch.setattr(ucx, "_has_no_more_turns", lambda: ucx._is_left)
                tasks.start_soon(watch)
        tasks.cancel_scope.cancel()
    assert longest < 0.2
    assert "does not end what is in flight" in caplog.text
    if ucx._thread is not None:  # and now it may
        ucx._thread.join(5)
    while ucx._at_end:
        ucx._at_end.pop()()
    ucx.context.close()


@PROGRESS
async def test_what_ucx_does_not_let_go_of_ends_and_its_memory_is_used_for_nothing_else(
    progress: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A get that no closing ends: a typed error within seconds that says so, blocks that are never quiet and never
    reused, another link over the same worker that goes on, and a cluster that can be closed.
    """
    need_ucx()
    monkeypatch.setattr("kvlink.transports.ucx.turns.PATIENCE_S", 0.3)
    given_up: list[Any] = []
    monkeypatch.setattr("kvlink.transports.ucx.turns._given_up", given_up)
    config = {"transports": ["ucx"], "inline_nbytes": 0, "ucx": {"progress": progress, "drain_s": 0.2}}
    with anyio.fail_after(20):
        async with (
            kv.Cluster(
                cluster_id=7, role=kv.Role.PROMPT, pool="1MiB", config=kv.ClusterConfig(transports=("ucx",))
            ) as other,
            pair(config=config, owner_config={"transports": ["ucx"]}, pool="4MiB") as p,
        ):
            await p.warm_up()
            (await p.here.link_clusters([kv.ClusterInfo(7, other.address)])).raise_for_status()
            theirs = other.kv_cache_manager.allocate_blocks_cache(SMALL, kv.BlocksCacheKey(7))
            mine = p.manager.allocate_blocks_cache(SMALL)
            ucx: Any = p.link.endpoint._worker  # type: ignore[attr-defined]
            slots, has_ended, held = ucx._slots, ucx._slots.has_ended, p.link.endpoint._connection  # type: ignore[attr-defined]

            def never(row: Any) -> bool:
                return row.number not in stuck and has_ended(row)

            stuck = set(range(1000))
            slots.has_ended = never
            with pytest.raises(kv.TransferTimeoutError, match="has not let go of it"), anyio.fail_after(5):
                await p.pull(timeout_s=0.2)
            stuck = {row.number for _, _, transfers in given_up for transfer, _ in transfers for row in transfer.rows}
            assert not p.cache.is_quiet()
            assert not p.cache.is_quiet([3])
            assert "as where a CUDA device hangs" in caplog.text
            free = p.manager.pool_usage().free_nbytes
            p.manager.deallocate_cache(p.cache)
            assert p.manager.pool_usage().free_nbytes == free
            await p.manager.pull_blocks(kv.BlocksCacheKey(7), mine, [0, 1], [1, 0])
            assert mine.is_quiet()
            assert theirs.is_valid
            await eventually(lambda: len(p.here.links) == 1, "the end of the one link")
    del slots.has_ended  # and now it ends
    ucx._is_quiet = True
    held.forget(ucx._api)
    if ucx._thread is not None:
        ucx._thread.join(5)
    while ucx._at_end:
        ucx._at_end.pop()()
    ucx.context.close()


@asyncio_and_trio
async def test_a_turn_that_never_ends_holds_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """UCX hangs in a system call: a pull whose deadline has passed, and a dial, end with the cluster, which closes."""
    need_ucx()
    from kvlink.transports.ucx import endpoint as endpoints
    from kvlink.transports.ucx import worker as workers

    monkeypatch.setattr(workers, "_JOIN_S", 0.3)
    monkeypatch.setattr(endpoints, "_CLOSE_S", 0.3)
    monkeypatch.setattr("kvlink.transports.ucx.turns._given_up", [])
    may_go_on = threading.Event()
    errors: list[kv.KVLinkError] = []
    ucx: Any = None
    try:
        with anyio.fail_after(10):
            config = {"transports": ["ucx"], "inline_nbytes": 0, "close_timeout_s": 0.3}
            async with anyio.create_task_group() as tasks:

                async def wait_for(call: Callable[[], Awaitable[object]]) -> None:
                    try:
                        await call()
                    except kv.KVLinkError as exc:
                        errors.append(exc)

                async with pair(config=config, owner_config={"transports": ["ucx"]}) as p:
                    await p.warm_up()
                    ucx = p.link.endpoint._worker  # type: ignore[attr-defined]
                    ucx.ask(may_go_on.wait)
                    tasks.start_soon(wait_for, partial(p.pull, timeout_s=0.1))
                    tasks.start_soon(wait_for, partial(p.here._transports[0].dial, p.link.endpoint.card))
                    await anyio.sleep(0.2)
                    assert not errors
        assert len(errors) == 2
        assert "does not end what is in flight" in caplog.text
    finally:
        may_go_on.set()
        if ucx is not None:
            ucx._thread.join(5)
            while ucx._at_end:
                ucx._at_end.pop()()
            ucx.context.close()


@pytest.mark.parametrize("way", ["try_now", "finish_now"])
async def test_turns_that_fail_in_the_callers_hands_end_the_transfer(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A small pull that makes its turns itself, and a fault of ours in one: typed, quiet, and the link is lost."""
    need_ucx()
    caplog.set_level(60, "kvlink.transports.ucx.worker")  # the traceback in a record would hold everything
    with anyio.fail_after(20):
        async with pair(config={"transports": ["ucx"]}, owner_config={"transports": ["ucx"]}) as p:
            await p.warm_up()
            link, worker = p.link, p.link.endpoint._worker  # type: ignore[attr-defined]
            if way == "try_now":
                p.link.endpoint._is_copying = False  # type: ignore[attr-defined]
            monkeypatch.setattr(worker, "_look_at", lambda _: 1 // 0)
            with pytest.raises(kv.KVLinkError), anyio.fail_after(5):
                await p.pull([1, 3], [1, 3])
            assert p.cache.is_quiet()
            assert not worker._active
            with anyio.fail_after(5):
                await link.closed.wait()
            assert worker._is_broken


async def test_a_peer_that_answers_no_load_takes_few_places_from_the_others() -> None:
    """However many words of it are asked for, a word of somebody else's is loaded at once."""
    need_ucx()
    from kvlink.transports.ucx.services import MAX_LOADS

    async with pair(config={"transports": ["ucx"]}, owner_config={"transports": ["ucx"]}) as p:
        await p.warm_up()
        endpoint: Any = p.link.endpoint
        endpoint._unmap_state()  # as of a peer on another host
        words, never = endpoint._services.words, anyio.Event()
        num_free = len(words._free)

        async def wait(*_: object, **__: object) -> None:
            await never.wait()

        endpoint._run = wait
        async with anyio.create_task_group() as tasks:
            for _ in range(10 * MAX_LOADS):
                tasks.start_soon(endpoint.load_word, 0)
            await anyio.wait_all_tasks_blocked()
            assert num_free - len(words._free) == MAX_LOADS
            assert len(words._free) > 30 * MAX_LOADS - 2 * MAX_LOADS
            tasks.cancel_scope.cancel()
        assert len(words._free) == num_free
        del endpoint._run


async def test_whoever_waits_for_a_registration_hears_of_it_whatever_others_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of those who are told of a registration fails: the others are told."""
    need_ucx()
    async with cluster() as here:
        registry = here._transports[0]._services.registry  # type: ignore[attr-defined]
        caplog.set_level("CRITICAL", "kvlink.transports.ucx.turns")
        with anyio.fail_after(5):
            registry.known.pop(0)  # as if nobody had asked yet
            registry.register(0, lambda made, reason: 1 // 0)
            assert await registry.ensure(0)
