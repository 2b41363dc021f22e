"""How costs grow: ``kvlink bench --scale``. One cluster with hundreds of links, and one with many caches and blocks.

*Links.* This process runs one cluster, the hub, and some more processes run its peers, several in each: every link is a
link between processes, with memory of its own on the far side. At each number of links it is measured what linking
took, what a link holds (memory, descriptors), what all of them cost while nothing happens, and how even the hub's pulls
are when it pulls from all of them at the same time. What links hold is the hub's; the peers have one link each.

*Caches and blocks*: see `kvlink.benchmarks.curves`.

Each point is a line of JSON. What grows faster than linearly shows as a rising cost per piece.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import numpy as np
from anyio import to_thread

from kvlink.benchmarks.curves import caches, million_blocks, plans
from kvlink.benchmarks.measuring import Line
from kvlink.benchmarks.progress import Progress
from kvlink.caches.kvcache import KvCache
from kvlink.cluster import Cluster
from kvlink.config import ClusterConfig, ClusterInfo
from kvlink.geometry import CacheDesc, Role
from kvlink.keys import BlocksCacheKey
from kvlink.transfers.manager import KvCacheManager

HUB_ID: Final = 1
STEPS: Final = (10, 50, 100, 200, 300, 400, 500)
_DESC: Final = CacheDesc(4, (16, 4096), "uint8")
_PULLED: Final = 8
_ROUNDS: Final = 20
_ANSWER_WITHIN_S: Final = 120.0
_QUIT_WITHIN_S: Final = 20.0
_SETTLE_S: Final = 0.5


async def measure_scale(
    emit: Callable[[Line], None], progress: Progress, *, num_links: int, num_processes: int, idle_s: float
) -> None:
    """Measure all of it and hand each line to `emit`.

    Args:
        num_links: at most; the fewer ones of `STEPS` are measured on the way.
        num_processes: that run the peers.
        idle_s: seconds of doing nothing at each number of links.
    """
    async for line in _links(progress, num_links, num_processes, idle_s):  # first: it looks at this process's memory
        emit(line)
    progress.show("planning and bookkeeping")
    for line in (*plans(), *caches(), million_blocks()):
        emit(line)


async def _links(progress: Progress, num_links: int, num_processes: int, idle_s: float) -> AsyncIterator[Line]:
    config = ClusterConfig(max_links=max(512, num_links), link_timeout_s=60.0)
    progress.show("starting peers", f"{num_links} in {num_processes} processes")
    with _peers(num_processes, -(-num_links // num_processes)) as channels:
        infos: list[ClusterInfo] = []
        for channel in channels:
            infos += await _receive(channel)
        random.Random(1).shuffle(infos)
        async with Cluster(cluster_id=HUB_ID, role=Role.MIX, pool="16MiB", config=config) as hub:
            bare, done = _holdings(), 0
            for step in sorted({*(step for step in STEPS if step < num_links), num_links}):
                progress.show(f"{step} links")
                fresh, done = infos[done:step], step
                linking = await _link(hub, fresh, config.max_clusters_per_call)
                await anyio.sleep(_SETTLE_S)
                held = {name: round((count - bare[name]) / done, 2) for name, count in _holdings().items()}
                cpu = time.process_time()
                await anyio.sleep(idle_s)
                idle = {"idle_cpu_percent": round(100 * (time.process_time() - cpu) / idle_s, 3)}
                yield {"scenario": "LINKS", "links": done, **linking, **held, **idle, **await _pull(hub, infos[:done])}
            started, cpu = time.perf_counter(), time.process_time()
        yield {
            "scenario": "LINKS",
            "links": 0,
            "close_ms": round((time.perf_counter() - started) / done * 1e3, 3),
            "close_cpu_ms": round((time.process_time() - cpu) / done * 1e3, 3),
        }


async def _link(hub: Cluster, infos: list[ClusterInfo], at_once: int) -> Line:
    started, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(infos), at_once):
        (await hub.link_clusters(infos[start : start + at_once])).raise_for_status()
    return {
        "link_ms": round((time.perf_counter() - started) / len(infos) * 1e3, 3),
        "link_cpu_ms": round((time.process_time() - cpu) / len(infos) * 1e3, 3),
    }


async def _pull(hub: Cluster, infos: list[ClusterInfo]) -> Line:
    """Pull from every peer at once, `_ROUNDS` times each; return what one takes, and how even they are."""
    manager = hub.kv_cache_manager
    own = manager.allocate_blocks_cache(CacheDesc(4, (_PULLED * 64, 4096), "uint8"))
    blocks = np.arange(_PULLED)
    ends: list[float] = []

    async def pull(number: int, info: ClusterInfo, rounds: int) -> None:
        into = blocks + _PULLED * (number % 64)
        for _ in range(rounds):
            await manager.pull_blocks(BlocksCacheKey(info.cluster_id), own, blocks, into)
            await anyio.lowlevel.checkpoint()  # as a caller between two layers would
        ends.append(time.perf_counter() - began)

    line: Line = {}
    for rounds in (1, _ROUNDS):
        ends.clear()
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for number, info in enumerate(infos):
                tasks.start_soon(pull, number, info, rounds)
        if rounds == 1:
            line["first_pull_ms"] = round(max(ends) / len(infos) * 1e3, 3)
    line["pull_us"] = round(max(ends) / (_ROUNDS * len(infos)) * 1e6, 2)
    line["first_to_last_done"] = round(min(ends) / max(ends), 3)
    manager.deallocate_cache(own)
    return line


def _holdings() -> dict[str, float]:
    """Return what this process holds: KiB of memory of its own, KiB of page tables, descriptors."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_kib": float(status["RssAnon"].split()[0]),
        "page_table_kib": float(status["VmPTE"].split()[0]),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
    }


@contextmanager
def _peers(num_processes: int, per_process: int) -> Iterator[list[Connection]]:
    """Run processes with clusters in them; each sends its list of `ClusterInfo`, and ends when its channel does."""
    processes, channels = [], []
    try:
        for number in range(num_processes):
            ours, theirs = socket.socketpair()
            with theirs:
                first = HUB_ID + 1 + number * per_process
                arguments = [str(theirs.fileno()), str(first), str(per_process)]
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "kvlink.benchmarks.scale", *arguments],
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                    )
                )
            channels.append(Connection(ours.detach()))
        yield channels
    finally:
        for channel in channels:
            channel.close()
        for process in processes:
            try:
                process.wait(_QUIT_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _receive(channel: Connection) -> Any:
    with anyio.fail_after(_ANSWER_WITHIN_S):
        return await to_thread.run_sync(channel.recv, abandon_on_cancel=True)


async def _serve(channel: Connection, first: int, count: int) -> None:
    """Be the peers of one process, until the hub's process closes the channel."""
    async with AsyncExitStack() as stack:
        infos: list[ClusterInfo] = []
        kept: list[tuple[KvCacheManager, KvCache]] = []
        for cluster_id in range(first, first + count):
            cluster = await stack.enter_async_context(Cluster(cluster_id=cluster_id, role=Role.MIX, pool="1MiB"))
            manager = cluster.kv_cache_manager
            kept.append((manager, manager.allocate_blocks_cache(_DESC, BlocksCacheKey(cluster_id))))
            infos.append(ClusterInfo(cluster_id, cluster.address))
        channel.send(infos)
        with suppress(EOFError, OSError):
            await to_thread.run_sync(channel.recv, abandon_on_cancel=True)
        for manager, cache in kept:
            manager.deallocate_cache(cache)


def main() -> None:
    """Serve the hub's process, whose end of a socket pair is our descriptor ``argv[1]``: ids from ``argv[2]`` on."""
    with suppress(KeyboardInterrupt, BrokenPipeError):
        anyio.run(_serve, Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
