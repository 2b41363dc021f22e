"""Requests of very many blocks: planned beside the loop, and no less right."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import kvlink as kv
from kvlink.plan import plan_blocks
from kvlink.transfers import planning
from tests.support.loops import every_loop

NUM = planning.MANY_BLOCKS
KEY = kv.BlocksCacheKey(1)
DESC = kv.CacheDesc(1, (NUM + 1, 4), "uint32")


@every_loop
async def test_many_blocks_are_planned_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulled and pushed in random order, each lands in its place; a cancelled caller does not wait for the plan."""
    where: list[threading.Thread] = []
    may_plan = threading.Event()

    def note(*args: Any, **options: Any) -> Any:
        where.append(threading.current_thread())
        assert may_plan.wait(10)
        return plan_blocks(*args, **options)

    monkeypatch.setattr(planning, "plan_blocks", note)
    chance = np.random.default_rng(5)
    source, target = chance.permutation(NUM), chance.permutation(NUM)
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="2MiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="2MiB") as here,
    ):
        theirs = owner.kv_cache_manager.allocate_blocks_cache(DESC, blocks_cache_key=KEY)
        ours = here.kv_cache_manager.allocate_blocks_cache(DESC)
        theirs.tensors[0][...] = np.arange(NUM + 1, dtype=np.uint32)[:, None]
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        with anyio.move_on_after(0.05) as scope:
            await here.kv_cache_manager.pull_blocks(KEY, ours, source, target)
        assert scope.cancelled_caught
        assert not ours.tensors[0].any()
        assert ours.is_quiet()
        may_plan.set()
        report = await here.kv_cache_manager.pull_blocks(KEY, ours, source, target)
        assert len(report.done) == NUM
        assert (ours.tensors[0][target] == source[:, None]).all()
        theirs.tensors[0][...] = 0
        await here.kv_cache_manager.push_blocks(KEY, ours, target, source)
        assert (theirs.tensors[0][source] == source[:, None]).all()
        assert not theirs.tensors[0][NUM].any()
    assert len(where) == 3
    assert threading.current_thread() not in where


class Scene:
    """A request of many blocks whose planning waits until it may go on."""

    def __init__(self, owner: kv.Cluster, here: kv.Cluster) -> None:
        self.owner, self.here = owner, here
        self.theirs = owner.kv_cache_manager.allocate_blocks_cache(DESC, blocks_cache_key=KEY)
        self.ours = here.kv_cache_manager.allocate_blocks_cache(DESC)
        self.theirs.tensors[0][...] = np.arange(NUM + 1, dtype=np.uint32)[:, None]
        chance = np.random.default_rng(5)
        self.source, self.target = chance.permutation(NUM), chance.permutation(NUM)
        self.is_planning, self.may_plan = threading.Event(), threading.Event()

    async def move(self, *, is_push: bool, **options: Any) -> kv.TransferReport:
        """Pull, or push."""
        manager = self.here.kv_cache_manager
        if is_push:
            return await manager.push_blocks(KEY, self.ours, self.source, self.target, **options)
        return await manager.pull_blocks(KEY, self.ours, self.source, self.target, **options)


@asynccontextmanager
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Set it."""
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="4MiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="4MiB") as here,
    ):
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        s = Scene(owner, here)

        def wait(*args: Any, **options: Any) -> Any:
            s.is_planning.set()
            assert s.may_plan.wait(10)
            return plan_blocks(*args, **options)

        monkeypatch.setattr(planning, "plan_blocks", wait)
        try:
            yield s
        finally:
            s.may_plan.set()


DIRECTION = pytest.mark.parametrize("is_push", [False, True])


@DIRECTION
async def test_a_deadline_passes_while_it_is_planned(is_push: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends by it, says that nothing is done, and leaves both caches as they were."""
    async with scene(monkeypatch) as s:
        with anyio.fail_after(5), pytest.raises(kv.TransferTimeoutError) as caught:
            await s.move(is_push=is_push, timeout_s=0.2)
        assert caught.value.report is not None
        assert not caught.value.report.done
        assert s.ours.is_quiet()
        assert not s.ours.tensors[0].any()
        assert (s.theirs.tensors[0][:, 0] == np.arange(NUM + 1)).all()


@DIRECTION
@pytest.mark.parametrize("what", ["their cache", "our cache", "the link", "the arrays"])
async def test_what_changes_while_it_is_planned(what: str, is_push: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache or link that ends touches nobody else's memory; the caller's arrays are not looked at any more."""
    async with scene(monkeypatch) as s, anyio.create_task_group() as tasks:
        outcome: list[object] = []
        has_ended = anyio.Event()
        source, target = s.source.copy(), s.target.copy()

        async def move() -> None:
            try:
                outcome.append(await s.move(is_push=is_push))
            except kv.KVLinkError as exc:
                outcome.append(exc)
            has_ended.set()

        tasks.start_soon(move)
        await anyio.to_thread.run_sync(s.is_planning.wait)
        next_cache: Any = None
        if what == "their cache":
            s.owner.kv_cache_manager.deallocate_cache(s.theirs)
            next_cache = s.owner.kv_cache_manager.allocate_blocks_cache(DESC)
        elif what == "our cache":
            s.here.kv_cache_manager.deallocate_cache(s.ours)
            next_cache = s.here.kv_cache_manager.allocate_blocks_cache(DESC)
        elif what == "the link":
            (await s.here.unlink_clusters([1], force=True)).raise_for_status()
        else:
            s.source[:], s.target[:] = 0, 0
        if next_cache is not None:
            next_cache.tensors[0][...] = 7
        s.may_plan.set()
        with anyio.fail_after(5):
            await has_ended.wait()
        (end,) = outcome
        if what == "their cache":
            assert isinstance(end, kv.CacheNotFoundError)
        elif what == "the link":
            assert isinstance(end, (kv.LinkLostError, kv.NotLinkedError))
        else:
            assert isinstance(end, kv.TransferReport), end
            assert list(end.done) == target.tolist()
        if what == "the arrays" and not is_push:
            assert (s.ours.tensors[0][target] == source[:, None]).all()
        assert next_cache is None or (next_cache.tensors[0] == 7).all()
