"""A target: a process with one cluster whose memory is read and written. Started by `kvlink.proving.server`.

It obeys lines of JSON on standard input, the first of which are its settings, answers each with one on standard output,
and ends with its input.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from typing import Any

import anyio
from anyio import to_thread

from kvlink.caches.kvcache import KvCache
from kvlink.cluster import Cluster
from kvlink.config import ClusterConfig
from kvlink.geometry import Role
from kvlink.keys import BlocksCacheKey
from kvlink.proving.layout import BLOCK_NBYTES, desc_of, pool_nbytes
from kvlink.proving.pattern import count_wrong, fill


def config_with(key: str) -> ClusterConfig:
    """Return the settings of the environment; where they have no secret, `key` makes one that both sides know."""
    config = ClusterConfig.from_environ()
    if config.has_authentication:
        return config
    return replace(config, secret=hashlib.sha256(key.encode()).digest())


async def _serve(settings: dict[str, Any]) -> None:
    size_nbytes, writer = int(settings["size_nbytes"]), int(settings["writer"])
    async with Cluster(
        cluster_id=settings["cluster_id"],
        role=Role.MIX,
        pool=pool_nbytes(size_nbytes),
        listen=f"{settings['host']}:0",
        config=config_with(settings["key"]),
    ) as cluster:
        caches: list[KvCache] = []
        for number, block_nbytes in enumerate(BLOCK_NBYTES):
            key = BlocksCacheKey(cluster.cluster_id, number)
            cache = cluster.kv_cache_manager.allocate_blocks_cache(desc_of(block_nbytes, size_nbytes), key)
            fill(cache.tensors, writer)
            caches.append(cache)
        _answer({"address": cluster.address})
        while line := await to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            asked = json.loads(line)
            tensors = caches[asked["cache"]].tensors
            _answer({"wrong": count_wrong(tensors, asked["writer"], asked["blocks"], asked["sources"])})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(_serve, json.loads(sys.stdin.readline()))
