"""Registered memory that the kernel does not let a peer reach."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvlink as kv

ROOT = Path(__file__).parents[1]


def test_registered_memory_out_of_reach_takes_a_detour_through_the_pool() -> None:
    """Pulls and pushes still move the right bytes, the link says why, and the pool gets its room back."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs.detour"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["is_pulled"]
    assert outcome["is_slot_pulled"]
    assert outcome["is_pushed"]
    assert outcome["pool_left"] == 0
    assert "permit_peer_access" in outcome["detour"]
    assert outcome["layerwise"] == "LLM_FEATURE_NOT_ENABLED"


@pytest.mark.parametrize(
    ("permit", "says"), [(None, None), ("peer", "letting process"), ("any", "letting any process")]
)
async def test_peers_are_let_in_only_where_asked_and_never_silently(
    permit: str | None, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Permission is given when a peer first uses registered memory, and one line of the log says so."""
    caplog.set_level(logging.WARNING, "kvlink")
    desc = kv.CacheDesc(2, (4, 64), "uint8")
    config = kv.ClusterConfig(permit_peer_access=permit)
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="1MiB", config=config) as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="1MiB") as reader,
    ):
        (await reader.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        buffers = [np.full((4, 64), 7 + index, np.uint8) for index in range(2)]
        registered = owner.kv_cache_manager.register_blocks_cache(desc, buffers, kv.BlocksCacheKey(1))
        assert not caplog.records
        cache = reader.kv_cache_manager.allocate_blocks_cache(desc)
        await reader.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(1), cache, [1], [2])
        await reader.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(1), cache, [0], [3])
        assert (cache.tensors[1][2:] == 8).all()
        lines = [record.getMessage() for record in caplog.records]
        assert [says is not None and says in line for line in lines] == ([True] if says else [])
        reader.kv_cache_manager.deallocate_cache(cache)
        owner.kv_cache_manager.unregister_cache(registered)
