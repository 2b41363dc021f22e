"""kvlink in somebody else's process: it gives back what it takes, and touches nothing that is not its own."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import kvlink as kv
from kvlink.caches.store import CacheStore
from kvlink.memory import pool
from tests.support import inside
from tests.support.leaks import holdings, new_since
from tests.support.loops import asyncio_and_uvloop, eventually, every_loop, run_on
from tests.support.pair import RUBBISH, SLOW, pair
from tests.support.pattern import Stamp, expect, fill
from tests.support.peer import PATHS, REPOSITORY, spawn_peer

DESC = kv.CacheDesc(4, (64, 4096), "uint8")


def prompt(cluster_id: int = 1, **options: Any) -> kv.Cluster:
    """Return a small owner."""
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.PROMPT, pool="4MiB", **options)


def decoder(cluster_id: int = 2, **options: Any) -> kv.Cluster:
    """Return a small puller."""
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.DECODER, pool="4MiB", **options)


def run_python(*arguments: str) -> tuple[int, str, str]:
    """Run Python to its end, bounded; return status, standard output and standard error."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **PATHS},
    )
    with process:
        try:
            output, errors = process.communicate(timeout=50)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            pytest.fail(f"not done in time; it wrote: {output}\n{errors}")
        return process.returncode, output, errors


def names_in(folder: str | Path) -> list[str]:
    """Return what a folder holds."""
    return sorted(os.listdir(folder))


# Opening and closing


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop", "trio"])
def test_200_openings_and_closings_leave_nothing(loop_name: str) -> None:
    """Open, link, pull, close, two hundred times: afterwards not one descriptor, thread or mapping more than before."""
    held: list[int] = []

    async def cycle(owner: kv.Cluster) -> None:
        async with decoder() as here:
            (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
            cache = here.kv_cache_manager.allocate_blocks_cache(DESC)
            await here.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(1), cache, [0, 1], [0, 1])
            here.kv_cache_manager.deallocate_cache(cache)

    async def run() -> None:
        async with prompt() as owner:
            owned = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
            for index in range(200):
                await cycle(owner)
                if index % 66 == 0:
                    await eventually(lambda: not list(owner.links), "the owner's half gone")
                    gc.collect()
                    held.append(len(holdings()))
            owner.kv_cache_manager.deallocate_cache(owned)

    run_on(loop_name, run)
    # Trio's worker threads come and go, with a descriptor or two of their own.
    assert max(held) - held[0] <= 2, held


@every_loop
async def test_closing_is_idempotent() -> None:
    """Twice by hand, and again by the context: no error, and everything is closed."""
    async with prompt() as owner, decoder() as here:
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        await here.aclose()
        await here.aclose()
        await eventually(lambda: not list(owner.links), "the owner's half gone")
        for call in (lambda: here.kv_cache_manager, lambda: here.links, lambda: owner.address and here.address):
            with pytest.raises(kv.ClosedError):
                call()
        with pytest.raises(kv.ClosedError):
            await here.link_clusters([kv.ClusterInfo(1, owner.address)])


@every_loop
async def test_aborting_is_idempotent() -> None:
    """Twice, then closed, then left: no error, the peer notices at once, and this task is not cancelled."""
    async with prompt() as owner:
        async with decoder() as here:
            (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
            link = inside.link_to(here, 1)
            here.abort()
            here.abort()
            assert link.state is kv.LinkState.CLOSED
            await here.aclose()
        await eventually(lambda: not list(owner.links), "the owner's half gone")


@every_loop
async def test_aborting_from_another_task() -> None:
    """The task that holds the context learns it as a ClosedError of its next call, not as a cancellation."""
    async with prompt() as owner, anyio.create_task_group() as tasks, decoder() as here:
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        is_aborted = anyio.Event()

        async def abort() -> None:
            here.abort()
            is_aborted.set()

        tasks.start_soon(abort)
        await is_aborted.wait()
        await anyio.lowlevel.checkpoint()
        with pytest.raises(kv.ClosedError):
            _ = here.kv_cache_manager


@every_loop
async def test_closing_from_several_tasks_at_once() -> None:
    """Each returns when all is closed."""
    async with prompt() as owner, decoder() as here:
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        link = inside.link_to(here, 1)

        async def close() -> None:
            await here.aclose()
            assert link.state is kv.LinkState.CLOSED

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(close)


@pytest.mark.parametrize("how", ["close", "abort", "leave"])
@asyncio_and_uvloop
async def test_closing_during_a_pull(how: str) -> None:
    """The pull ends with every byte, or a typed error; nothing moves afterwards; closing is bounded."""
    desc = kv.CacheDesc(8, (1024, 4096), "uint8")
    config = kv.ClusterConfig(**SLOW, close_timeout_s=0.2)
    async with spawn_peer(1, pool="40MiB") as owner:
        await owner.call("allocate_blocks", num_tensors=8, shape=[1024, 4096], model_id=0)
        outcome: list[Any] = []
        async with anyio.create_task_group() as tasks:
            here = kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="40MiB", config=config)
            async with here:
                (await here.link_clusters([owner.info])).raise_for_status()
                manager = here.kv_cache_manager
                cache = manager.allocate_blocks_cache(desc)
                views = cache.tensors
                fill(views, RUBBISH)
                blocks = list(range(1024))

                async def pull() -> None:
                    try:
                        outcome.append(await manager.pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks))
                    except kv.KVLinkError as exc:
                        outcome.append(exc)

                first = views[0].reshape(-1)
                before = int(first[2])
                tasks.start_soon(pull)
                await eventually(lambda: first[2] != before, "the pull's first bytes")
                if how == "close":
                    await here.aclose()
                if how == "abort":
                    here.abort()
        assert len(outcome) == 1
        after = [view.copy() for view in views]
        if isinstance(outcome[0], kv.TransferReport):
            expect(views, owner.stamp(1))
        await anyio.sleep(0.01)
        assert all(np.array_equal(view, copy) for view, copy in zip(views, after, strict=True))


@every_loop
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_large_pool_is_unmapped_beside_the_loop(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 0.3 s per GiB: a thread does it, the loop goes on, and when all is closed it has been done."""
    where: list[threading.Thread] = []
    let_go = pool._let_go

    def note(held: list[Any]) -> None:
        if len(held[1]) >= 2**24:
            where.append(threading.current_thread())
        let_go(held)

    monkeypatch.setattr(pool, "_let_go", note)
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="16MiB", host_pool="16MiB") as here:
        if how == "abort":
            here.abort()
            assert not where
    assert len(where) == 2
    assert threading.current_thread() not in where


@every_loop
async def test_what_the_body_raises_comes_out_as_it_is() -> None:
    """Not wrapped in a group, and the cluster is closed all the same."""
    with pytest.raises(ZeroDivisionError):
        async with prompt():
            _ = 1 // 0
    with anyio.move_on_after(0.05) as scope:
        async with prompt():
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@every_loop
async def test_a_cluster_is_entered_once_and_used_only_inside() -> None:
    """Before and after, every call is refused with LLM_ENGINE_FINALIZED."""
    cluster = prompt()
    with pytest.raises(kv.ClosedError):
        _ = cluster.kv_cache_manager
    async with cluster:
        manager = cluster.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        with pytest.raises(kv.ClosedError):
            async with cluster:
                pass
    assert not cache.is_valid
    with pytest.raises(kv.ClosedError) as caught:
        manager.allocate_blocks_cache(DESC)
    assert caught.value.status is kv.StatusCode.LLM_ENGINE_FINALIZED
    with pytest.raises(kv.ClosedError):
        async with cluster:
            pass


async def nothing_new_since(before: Set[str]) -> None:
    """Wait until this process holds nothing more than `before`, but for the loop's own worker threads."""
    deadline = time.monotonic() + 15
    while new := [what for what in new_since(before, within_s=0) if "AnyIO worker" not in what]:
        assert time.monotonic() < deadline, new
        await anyio.sleep(0.01)


@asyncio_and_uvloop  # trio itself breaks down without threads
async def test_a_host_without_threads_opens_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error that says what to raise, and nothing stays."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(kv.FeatureNotEnabledError, match=r"no thread.*pids\.max"):
        await prompt().__aenter__()


@every_loop
async def test_opening_can_be_cancelled_at_any_moment() -> None:
    """Whatever had been reserved by then is given back."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    before = holdings()
    for _ in range(40):
        with anyio.move_on_after(chance.random() * 0.006):
            async with prompt():
                await anyio.lowlevel.checkpoint()
    await nothing_new_since(before)


async def test_opening_can_be_cancelled_by_asyncio_at_any_moment() -> None:
    """The same with asyncio's own cancellation, which pays no heed to shields."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def open_and_close() -> None:
        async with prompt():
            await asyncio.sleep(0)

    before = holdings()
    loop = asyncio.get_running_loop()
    for _ in range(40):
        task = loop.create_task(open_and_close())
        await asyncio.sleep(chance.random() * 0.006)
        task.cancel()
        await asyncio.wait([task])
    await nothing_new_since(before)


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_cancelled_opening_keeps_nothing_in_its_task(num_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled by asyncio between the end of the reservation and its own turn: not even its task has the memory."""
    loop = asyncio.get_running_loop()
    create = CacheStore.create
    gc.collect()
    before = inside.num_memfd_mappings()

    def cancel(turns: int) -> None:
        if turns:
            loop.call_soon(cancel, turns - 1)
        else:
            task.cancel()

    def create_and_cancel(*arguments: Any) -> CacheStore:
        store = create(*arguments)
        is_held = threading.Event()

        def hold() -> None:
            is_held.set()
            time.sleep(0.05)

        loop.call_soon_threadsafe(hold)
        is_held.wait(10)  # what this thread reports meanwhile, and the cancellation, happen in one turn of the loop
        loop.call_soon_threadsafe(cancel, num_turns)
        return store

    async def open_and_close() -> None:
        async with prompt():
            await anyio.sleep_forever()

    monkeypatch.setattr(CacheStore, "create", create_and_cancel)
    task = loop.create_task(open_and_close())
    await asyncio.wait([task])
    assert task.cancelled()
    await eventually(lambda: inside.num_memfd_mappings() <= before, "the memory back", within_s=5)


async def test_an_address_that_is_taken_is_an_error_and_leaves_nothing() -> None:
    """The operating system's error, unwrapped, on entry."""
    async with prompt(1) as first:
        with pytest.raises(OSError, match="in use"):
            async with prompt(2, listen=first.address):
                pass


# Views and memory


STEPS = ("deallocate", "unlink", "close here", "close there")


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids=lambda order: ", ".join(order))
async def test_views_outlive_everything(order: tuple[str, ...]) -> None:
    """Whatever is closed first, a view on a cache keeps its bytes, can be written, and shares them with nobody."""
    owner, here = prompt(), decoder()
    await owner.__aenter__()
    await here.__aenter__()
    try:
        owned = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        fill(owned.tensors, Stamp(1, 1, 1))
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        manager = here.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        blocks = list(range(64))
        await manager.pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks)
        views = (*cache.tensors, *owned.tensors)
        is_here_open = True
        for step in order:
            if step == "deallocate" and is_here_open:
                manager.deallocate_cache(cache)
                assert cache.tensors == ()
                with pytest.raises(kv.OutOfMemoryError):  # as long as the views live
                    manager.allocate_blocks_cache(kv.CacheDesc(4, (250, 4096), "uint8"))
            elif step == "unlink" and is_here_open:
                (await here.unlink_clusters([1])).raise_for_status()
            elif step == "close here":
                await here.aclose()
                is_here_open = False
            elif step == "close there":
                await owner.aclose()
            gc.collect()
            expect(views[:4], Stamp(1, 1, 1))
            expect(views[4:], Stamp(1, 1, 1))
        del cache, owned
        gc.collect()
        fill(views[:4], RUBBISH)
        expect(views[:4], RUBBISH)
        expect(views[4:], Stamp(1, 1, 1))
        one = views[0][3:5]
        del views
        gc.collect()
        expect([one], RUBBISH, [0, 1], src_blocks=[3, 4])
    finally:
        await here.__aexit__(None, None, None)
        await owner.__aexit__(None, None, None)


async def test_views_outlive_a_killed_owner() -> None:
    """What was pulled from a process that is then killed stays."""
    async with pair() as p:
        await p.pull()
        views = p.cache.tensors
        p.owner.kill()
        await eventually(lambda: not list(p.here.links), "the link gone")
        expect(views, p.stamp)
    expect(views, p.stamp)


@every_loop
async def test_a_peers_memory_is_let_go_with_the_link() -> None:
    """After unlinking, or the peer's death, this process maps nothing of the peer: large pools do not pile up."""
    async with pair(config={"inline_nbytes": 0}) as p:
        own = 2  # pool and state words
        await p.pull()
        assert inside.num_memfd_mappings() > own
        (await p.here.unlink_clusters([1])).raise_for_status()
        gc.collect()
        await eventually(lambda: inside.num_memfd_mappings() <= own, "the peer's mappings gone", within_s=3)
        (await p.here.link_clusters([p.owner.info])).raise_for_status()
        await p.pull()
        p.owner.kill()
        await eventually(lambda: not list(p.here.links), "the link gone")
        gc.collect()
        await eventually(lambda: inside.num_memfd_mappings() <= own, "the dead peer's mappings gone", within_s=3)


@every_loop
async def test_a_forgotten_cache_is_given_back_with_a_warning() -> None:
    """ResourceWarning names the cache, and its memory is free again."""
    async with prompt() as owner:
        manager = owner.kv_cache_manager
        forgotten = [manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))]
        with pytest.warns(ResourceWarning, match=f"cache {forgotten[0].cache_id} "):
            forgotten.clear()
        assert inside.used_nbytes(owner) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
            manager.deallocate_cache(again)
            del again
            gc.collect()


# The process around it


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop", "trio"])
def test_nothing_of_the_process_is_touched_and_nothing_printed(loop_name: str) -> None:
    """No handler, variable, hook, filter or thread remains, and with all of Python's checks on not a word is said."""
    status, output, errors = run_python("-X", "dev", "-W", "error", "-m", "tests.support.guest", loop_name)
    assert (status, output, errors) == (0, "", "")


@pytest.mark.parametrize("how", ["exit", "abort", "close", "collect"])
def test_a_forked_child_is_refused_and_the_parent_undisturbed(how: str, tmp_path: Path) -> None:
    """Every call in the child is a ClosedError; whatever it closes or drops, the parent's links and memory work on."""
    status, output, errors = run_python("-W", "error", "-m", "tests.support.forks", how, f"{tmp_path}/socket")
    assert (status, output, errors) == (0, "ok\n", "")


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop", "trio"])
async def test_an_interrupt_in_the_middle_of_a_pull_ends_it_and_everything(loop_name: str) -> None:
    """^C: the program's KeyboardInterrupt, soon, without a word of ours; nothing moves any more; the peer is told."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="40MiB") as owner:
        desc = kv.CacheDesc(8, (1024, 4096), "uint8")
        cache = owner.kv_cache_manager.allocate_blocks_cache(desc, kv.BlocksCacheKey(1))
        fill(cache.tensors, RUBBISH)
        process = subprocess.Popen(  # noqa: ASYNC220  # it returns at once
            [sys.executable, "-W", "error", "-m", "tests.programs.interrupted", loop_name, owner.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, **PATHS},
            start_new_session=True,
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                with anyio.fail_after(30):
                    await anyio.wait_readable(process.stdout)
                    assert process.stdout.readline() == b"moving\n"
                    process.send_signal(signal.SIGINT)
                    await anyio.wait_readable(process.stdout)
                    said = process.stdout.readline()
                    assert said == b"quiet\n", said or process.stderr.read()
                    await eventually(lambda: process.poll() is not None, "the end")
                assert (process.returncode, process.stderr.read()) == (0, b"")
            finally:
                process.kill()
        await eventually(lambda: not owner.links, "the owner's half gone", within_s=1)
        owner.kv_cache_manager.deallocate_cache(cache)


@asyncio_and_uvloop
async def test_a_killed_process_leaves_nothing_on_the_host() -> None:
    """After kill -9 there is nothing new in /dev/shm, in the temporary folder, or among the mappings of its peer."""
    before = names_in("/dev/shm")
    async with decoder() as here:
        for life in (1, 2, 3):
            async with spawn_peer(1, pool="16MiB", life=life) as peer:
                await peer.call("allocate_blocks", num_tensors=4, shape=[64, 4096], model_id=0)
                (await here.link_clusters([peer.info])).raise_for_status()
                peer.kill()
                await eventually(lambda: not list(here.links), "the link gone")
    assert names_in("/dev/shm") == before


async def test_a_killed_process_leaves_no_temporary_file(tmp_path: Path) -> None:
    """Nothing of kvlink's ever had a name in the temporary folder."""
    async with spawn_peer(1, pool="4MiB", environ={"TMPDIR": str(tmp_path)}) as peer, decoder() as here:
        (await here.link_clusters([peer.info])).raise_for_status()
        assert names_in(tmp_path) == []
        peer.kill()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("first", "second"), [("asyncio", "asyncio"), ("asyncio", "trio"), ("uvloop", "asyncio")], ids="-".join
)
def test_two_loops_in_two_threads(first: str, second: str) -> None:
    """Each thread has clusters of its own on a loop of its own, at the same time."""
    if "uvloop" in (first, second):
        pytest.importorskip("uvloop")
    meeting = threading.Barrier(2, timeout=20)
    failures: list[BaseException] = []

    async def use(number: int) -> None:
        async with prompt(number) as owner, decoder(number + 1) as here:
            owned = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(number))
            fill(owned.tensors, Stamp(number, 1, 1))
            (await here.link_clusters([kv.ClusterInfo(number, owner.address)])).raise_for_status()
            cache = here.kv_cache_manager.allocate_blocks_cache(DESC)
            await anyio.to_thread.run_sync(meeting.wait)  # both are linked now
            for _ in range(30):
                fill(cache.tensors, RUBBISH)
                blocks = list(range(64))
                await here.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(number), cache, blocks, blocks)
                expect(cache.tensors, Stamp(number, 1, 1))
            here.kv_cache_manager.deallocate_cache(cache)
            owner.kv_cache_manager.deallocate_cache(owned)

    def run(loop_name: str, number: int) -> None:
        try:
            run_on(loop_name, partial(use, number))
        except BaseException as exc:  # shown by the test's own thread
            failures.append(exc)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(name, number)) for name, number in ((first, 10), (second, 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


@every_loop
async def test_the_body_may_close_in_any_task() -> None:
    """A cluster may be closed from another task than the one that entered it, which then just leaves."""
    async with anyio.create_task_group() as tasks, prompt() as owner:
        tasks.start_soon(owner.aclose)
        await eventually(lambda: "closed" in repr(owner), "the close")
