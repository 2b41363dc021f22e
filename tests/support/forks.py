"""A program that forks with two linked clusters open; the child does what it must not. Prints ``ok`` when all is well.

Run as ``python -m tests.support.forks HOW PATH``: how the child ends, and where the prompt listens.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Coroutine
from typing import Any

import anyio

import kvlink as kv
from tests.support.pattern import Stamp, expect, fill

DESC = kv.CacheDesc(4, (64, 65536), "uint8")


def run_without_loop(call: Coroutine[Any, Any, Any]) -> Any:
    """Run a call in the child, where the loop is the parent's: it may yield its turn, and must not wait."""
    try:
        for _ in range(5):
            if call.send(None) is not None:
                break
    except StopIteration as exc:
        return exc.value
    call.close()
    raise AssertionError("it waits for something in the child")


def refuse(what: str, call: Any) -> None:
    """Check that the child is refused."""
    try:
        outcome = call()
        if isinstance(outcome, Coroutine):
            outcome = run_without_loop(outcome)
    except kv.ClosedError as exc:
        if "fork" in str(exc):
            return
        raise
    raise AssertionError(f"{what} was not refused in the child: {outcome!r}")


def child(how: str, prompt: kv.Cluster, decoder: kv.Cluster, cache: kv.KvCache) -> None:
    """Use everything, let go of everything, close everything."""
    key = kv.BlocksCacheKey(1)
    refuse("address", lambda: prompt.address)
    refuse("kv_cache_manager", lambda: decoder.kv_cache_manager)
    refuse("links", lambda: list(decoder.links))
    refuse("link_clusters", lambda: decoder.link_clusters([kv.ClusterInfo(3, "127.0.0.1:1")]))
    refuse("unlink_clusters", lambda: decoder.unlink_clusters([1]))
    refuse("allocate", lambda: MANAGERS[0].allocate_blocks_cache(DESC))
    refuse("deallocate", lambda: MANAGERS[1].deallocate_cache(cache))
    refuse("pull", lambda: MANAGERS[1].pull_blocks(key, cache, [0], [0]))
    if how == "abort":
        prompt.abort()
        decoder.abort()
    if how == "close":
        run_without_loop(prompt.aclose())
        run_without_loop(decoder.aclose())


MANAGERS: list[kv.KvCacheManager] = []


async def main() -> None:
    """Link, fork, let the child end, and see whether anything has changed here."""
    how, path = sys.argv[1:]
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="20MiB", listen=f"unix:{path}") as prompt,
        kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="20MiB") as decoder,
    ):
        owned = prompt.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        fill(owned.tensors, Stamp(1, 1, 1))
        (await decoder.link_clusters([kv.ClusterInfo(1, prompt.address)])).raise_for_status()
        MANAGERS[:] = [prompt.kv_cache_manager, decoder.kv_cache_manager]
        cache = MANAGERS[1].allocate_blocks_cache(DESC)
        blocks = list(range(64))
        await MANAGERS[1].pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks)
        links = [*prompt.links, *decoder.links]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # to fork with threads is what this is about
            pid = os.fork()
        if pid == 0:
            try:
                child(how, prompt, decoder, cache)
                if how == "collect":
                    del cache, owned, links
                    gc.collect()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = await anyio.to_thread.run_sync(os.waitpid, pid, 0)
        assert status == 0, status
        fill(cache.tensors, Stamp(9, 9, 9))
        await MANAGERS[1].pull_blocks(kv.BlocksCacheKey(1), cache, blocks, blocks)
        expect(cache.tensors, Stamp(1, 1, 1))
        (await decoder.check_link_status(1)).raise_for_status()
        assert [link.is_open for link in links] == [True, True]
        (await decoder.unlink_clusters([1])).raise_for_status()
        (await decoder.link_clusters([kv.ClusterInfo(1, prompt.address)])).raise_for_status()
        MANAGERS[1].deallocate_cache(cache)
        MANAGERS[0].deallocate_cache(owned)
        # The path is still there: it was just dialled.
    print("ok")


if __name__ == "__main__":
    anyio.run(main)
