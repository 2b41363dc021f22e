"""Requests of very many blocks: planned beside the loop, and no less right."""

from __future__ import annotations

import threading
from typing import Any

import anyio
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
