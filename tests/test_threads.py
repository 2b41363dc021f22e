"""A cluster belongs to the thread of its event loop: elsewhere calls are refused, and it does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

import kvlink as kv
from tests.support.loops import asyncio_and_trio

DESC = kv.CacheDesc(2, (4, 64), "uint8")
KEY = kv.BlocksCacheKey(1)


@asyncio_and_trio
async def test_calls_from_other_threads_are_refused() -> None:
    """Each says to hand the call over, nothing is changed by it, and the cluster works and closes as before.

    Before, such a call waited on the wrong loop, and the cluster it belonged to never closed.
    """
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="1MiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="1MiB") as here,
    ):
        manager = here.kv_cache_manager
        theirs = owner.kv_cache_manager.allocate_blocks_cache(DESC, KEY)
        cache = manager.allocate_blocks_cache(DESC)
        info = kv.ClusterInfo(1, owner.address)
        (await here.link_clusters([info])).raise_for_status()
        prepared = await manager.prepare_pull(KEY, cache)
        calls: dict[str, Callable[[], Any]] = {
            "a prepared pull": lambda: prepared.pull([0], [0]),
            "pull_blocks": lambda: manager.pull_blocks(KEY, cache, [0], [0]),
            "push_blocks": lambda: manager.push_blocks(KEY, cache, [0], [0]),
            "copy_blocks": lambda: manager.copy_blocks(cache, {0: [1]}),
            "link_clusters": lambda: here.link_clusters([info]),
            "unlink_clusters": lambda: here.unlink_clusters([1]),
            "notify": lambda: here.notify(1, b"x"),
            "switch_role": lambda: here.switch_role(kv.Role.MIX),
            "aclose": here.aclose,
            "allocate": lambda: manager.allocate_blocks_cache(DESC),
            "deallocate": lambda: manager.deallocate_cache(cache),
        }

        def elsewhere(call: Callable[[], Any]) -> None:
            async def run() -> None:
                answer = call()
                if isinstance(answer, Awaitable):
                    await answer

            with pytest.raises(kv.ClosedError, match="event loop of another thread"):
                asyncio.run(run())
            assert [link.peer for link in here.links] == [1]  # whoever only looks may do so anywhere

        for call in calls.values():
            await anyio.to_thread.run_sync(elsewhere, call)
        with anyio.fail_after(5):
            assert (await manager.pull_blocks(KEY, cache, [0, 1], [2, 3])).nbytes == 2 * 2 * 64
            (await here.unlink_clusters([1])).raise_for_status()
        manager.deallocate_cache(cache)
        owner.kv_cache_manager.deallocate_cache(theirs)


async def test_calls_can_be_handed_over() -> None:
    """A thread that hands its call to the loop gets its answer."""
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="1MiB") as owner,
        kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="1MiB") as here,
    ):
        manager = here.kv_cache_manager
        theirs = owner.kv_cache_manager.allocate_blocks_cache(DESC, KEY)
        cache = manager.allocate_blocks_cache(DESC)
        (await here.link_clusters([kv.ClusterInfo(1, owner.address)])).raise_for_status()
        loop = asyncio.get_running_loop()

        def elsewhere() -> kv.TransferReport:
            return asyncio.run_coroutine_threadsafe(manager.pull_blocks(KEY, cache, [0], [0]), loop).result(10)

        assert (await anyio.to_thread.run_sync(elsewhere)).nbytes == 2 * 64
        manager.deallocate_cache(cache)
        owner.kv_cache_manager.deallocate_cache(theirs)
