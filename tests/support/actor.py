"""The child of `tests.support.peer`: one cluster, obeying JSON lines on standard input until they end.

Run as ``python -m tests.support.actor SETTINGS``. It ends when its parent does, also when that was killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio

import kvlink as kv
from kvlink.transports.base import Transport
from tests.support import inside
from tests.support.pattern import Stamp, fill, read_stamp
from tests.support.pattern import faults as find_faults

wrap_transport: Callable[[Transport], Transport] | None = None
"""What stands between the cluster and its transports."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Actor:
    """One cluster and what it is asked to do. Each public method is a call; caches go by their handle, a number.

    Handles count from 1, and a cache is filled with its handle as the cache number of its stamp.
    """

    def __init__(self, cluster: kv.Cluster, life: int) -> None:
        self._cluster = cluster
        self._life = life
        self._caches: dict[int, kv.KvCache] = {}
        self._next = 1
        self._is_churning = False
        self.is_done = anyio.Event()

    def allocate_blocks(
        self,
        num_tensors: int,
        shape: list[int],
        model_id: int | None = None,
        data_type: str = "uint8",
        layout: str | None = None,
        is_filled: bool = True,
    ) -> int:
        """Allocate a paged cache, by default filled; return its handle."""
        key = None if model_id is None else kv.BlocksCacheKey(self._cluster.cluster_id, model_id)
        desc = kv.CacheDesc(num_tensors, shape, data_type, layout=layout)
        return self._keep(self._cluster.kv_cache_manager.allocate_blocks_cache(desc, key), is_filled)

    def allocate(
        self, num_tensors: int, shape: list[int], requests: list[int], data_type: str = "uint8", is_filled: bool = True
    ) -> int:
        """Allocate a contiguous cache with request keys; return its handle."""
        keys = [kv.CacheKey(self._cluster.cluster_id, request) for request in requests]
        desc = kv.CacheDesc(num_tensors, shape, data_type)
        return self._keep(self._cluster.kv_cache_manager.allocate_cache(desc, keys), is_filled)

    def register_blocks(self, num_tensors: int, shape: list[int], model_id: int) -> int:
        """Register filled memory of the process's own as a keyed paged cache; return its handle."""
        desc = kv.CacheDesc(num_tensors, shape, "uint8")
        buffers = [bytearray(desc.tensor_nbytes) for _ in range(num_tensors)]
        key = kv.BlocksCacheKey(self._cluster.cluster_id, model_id)
        return self._keep(self._cluster.kv_cache_manager.register_blocks_cache(desc, buffers, key), True)

    def cache_id(self, cache: int) -> int:
        """Return the id under which peers know a cache."""
        return self._caches[cache].cache_id

    def fill(self, cache: int, stamp: list[int] | None = None, blocks: list[int] | None = None) -> None:
        """Write the pattern of `stamp` (None: the cache's own) into blocks of a cache."""
        fill(self._caches[cache].tensors, self._stamp(cache) if stamp is None else Stamp(*stamp), blocks)

    def faults(
        self, cache: int, stamp: list[int], blocks: list[int] | None = None, src_blocks: list[int] | None = None
    ) -> str | None:
        """Say in words what in a cache is not the pattern of `stamp`."""
        return find_faults(self._caches[cache].tensors, Stamp(*stamp), blocks, src_blocks=src_blocks)

    def deallocate(self, cache: int) -> None:
        """Give a cache back."""
        self._cluster.kv_cache_manager.deallocate_cache(self._caches.pop(cache))

    def remove_key(self, request: int) -> None:
        """Release a request key."""
        self._cluster.kv_cache_manager.remove_cache_key(kv.CacheKey(self._cluster.cluster_id, request))

    def become(self, program: str, arguments: list[str]) -> None:
        """Go on as another program, in Python, without a word to anybody: a child keeps the connections open."""
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            time.sleep(20)
            os._exit(0)
        os.execv(sys.executable, [sys.executable, "-c", program, *arguments])

    def block_loop(self, seconds: float) -> None:
        """Hold the event loop."""
        time.sleep(seconds)

    async def link(
        self, clusters: list[tuple[int, str]], timeout_s: float | None = None, relink: bool = False
    ) -> list[str]:
        """Link; return the status of each, or raise the first error."""
        infos = [kv.ClusterInfo(cluster_id, address) for cluster_id, address in clusters]
        results = await self._cluster.link_clusters(infos, timeout_s=timeout_s, relink=relink)
        results.raise_for_status()
        return [result.status.name for result in results.results]

    async def unlink(self, clusters: list[int], timeout_s: float | None = None, force: bool = False) -> list[str]:
        """Unlink; return the status of each."""
        results = await self._cluster.unlink_clusters(clusters, timeout_s=timeout_s, force=force)
        return [result.status.name for result in results.results]

    def links(self) -> list[dict[str, Any]]:
        """Return what there is to know of each link."""
        return [
            {
                "peer": link.peer,
                "state": link.state.value,
                "transport": link.transport,
                "reason": link.reason,
                "pulls": link.stats.pulls,
                "failures": link.stats.failures,
            }
            for link in self._cluster.links
        ]

    async def pull_blocks(
        self, peer: int, model_id: int, cache: int, src_blocks: list[int], dst_blocks: list[int], **options: Any
    ) -> dict[str, Any]:
        """Pull blocks and return the report."""
        key = kv.BlocksCacheKey(peer, model_id)
        report = await self._cluster.kv_cache_manager.pull_blocks(
            key, self._caches[cache], src_blocks, dst_blocks, **options
        )
        return {"nbytes": report.nbytes, "transport": report.transport, "done": list(report.done)}

    async def pull_cache(self, peer: int, request: int, cache: int, **options: Any) -> dict[str, Any]:
        """Pull the slot of a request key and return the report."""
        key = kv.CacheKey(peer, request)
        report = await self._cluster.kv_cache_manager.pull_cache(key, self._caches[cache], **options)
        return {"nbytes": report.nbytes, "transport": report.transport, "done": list(report.done)}

    async def push_by_id(self, peer: int, cache_id: int, cache: int, blocks: list[int], **options: Any) -> int:
        """Push blocks to the same blocks of a cache of `peer`; return how many bytes."""
        key = kv.CacheKeyByIdAndIndex(peer, cache_id)
        manager = self._cluster.kv_cache_manager
        return (await manager.push_blocks(key, self._caches[cache], blocks, blocks, **options)).nbytes

    async def push_with_notice(
        self, peer: int, cache_id: int, cache: int, blocks: list[int], stamps: list[list[int]]
    ) -> None:
        """Again and again: fill a cache with the next stamp, push blocks of it to `peer`, and notify it."""
        manager, key = self._cluster.kv_cache_manager, kv.CacheKeyByIdAndIndex(peer, cache_id)
        for stamp in stamps:
            self.fill(cache, stamp)
            await manager.push_blocks(key, self._caches[cache], blocks, blocks, notify=json.dumps(stamp).encode())

    async def notify(self, peer: int, text: str, **options: Any) -> None:
        """Send a notification."""
        await self._cluster.notify(peer, text.encode(), **options)

    async def take_notifications(self, num: int) -> list[tuple[int, str]]:
        """Take that many, each with its sender."""
        async with self._cluster.notifications() as stream:
            taken = [await stream.__anext__() for _ in range(num)]
        return [(each.peer, each.payload.decode()) for each in taken]

    def stamp_of(self, cache: int) -> list[int]:
        """Return who wrote the first block of a cache."""
        return list(read_stamp(self._caches[cache].tensors[0], 0))

    async def churn(self, num_tensors: int, shape: list[int], model_id: int, seed: int, pause_s: float) -> int:
        """Until `stop_churning`: allocate, fill, give back, and so on, on the same memory. Return how often."""
        chance = random.Random(seed)
        self._is_churning = True
        rounds = 0
        while self._is_churning:
            # No await between allocate and fill: a peer is told of the cache only when it is full.
            handle = self.allocate_blocks(num_tensors, shape, model_id)
            await anyio.sleep(chance.random() * pause_s)
            self.deallocate(handle)
            rounds += 1
        return rounds

    def stop_churning(self) -> None:
        """End `churn`."""
        self._is_churning = False

    def usage(self) -> dict[str, int]:
        """Return what the process and the cluster hold at this moment."""
        gc.collect()
        return {
            "fds": len(os.listdir("/proc/self/fd")) - 1,  # but for the one that lists them
            "threads": threading.active_count(),
            "mappings": inside.num_memfd_mappings(),
            "pool_nbytes": inside.used_nbytes(self._cluster),
            "read_leases": inside.num_read_leases(self._cluster),
        }

    def exit(self) -> None:
        """Close the cluster and end."""
        self.is_done.set()

    def _keep(self, cache: kv.KvCache, is_filled: bool) -> int:
        handle = self._next
        self._next += 1
        self._caches[handle] = cache
        if is_filled:
            self.fill(handle)
        return handle

    def _stamp(self, cache: int) -> Stamp:
        return Stamp(self._cluster.cluster_id, self._life, cache)


def config_of(fields: dict[str, Any]) -> kv.ClusterConfig:
    """Return the settings that came as JSON, over those of the environment."""
    changes = _with_tuples(fields)
    if "ucx" in changes:
        changes["ucx"] = kv.UcxConfig(**_with_tuples(changes["ucx"]))
    return replace(kv.ClusterConfig.from_environ(), **changes)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


async def serve(talk: socket.socket, settings: dict[str, Any]) -> None:
    """Hold the cluster and obey."""

    def answer(number: int, **outcome: Any) -> None:
        with suppress(BrokenPipeError):  # the parent has gone, and so shall we
            talk.sendall((json.dumps({"number": number, **outcome}) + "\n").encode())

    async def obey(number: int, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            value = call(**arguments)
            if isinstance(value, Awaitable):
                value = await value
        except Exception as exc:  # told to the parent, which raises it
            described: dict[str, Any] = {"kind": type(exc).__name__, "text": str(exc)}
            if isinstance(exc, kv.KVLinkError):
                described |= {"status": exc.status, "peer": exc.peer, "phase": exc.phase}
            answer(number, error=described)
        else:
            answer(number, value=value)

    config = settings["config"]
    secret = config.get("secret")  # text: it came as JSON
    cluster = kv.Cluster(
        cluster_id=settings["cluster_id"],
        role=kv.Role[settings["role"]],
        pool=settings["pool"],
        listen=settings["listen"],
        config=config_of({**config, "secret": secret and secret.encode()}),
        wrap_transport=wrap_transport,
    )
    async with cluster, anyio.create_task_group() as tasks:
        actor = Actor(cluster, settings["life"])

        async def leave_when_done() -> None:
            await actor.is_done.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(leave_when_done)
        answer(0, value=cluster.address if cluster.role is not kv.Role.DECODER or settings["listen"] else "")
        received = b""
        while not actor.is_done.is_set():
            await anyio.wait_readable(talk)
            piece = talk.recv(1 << 16)
            if not piece:
                actor.is_done.set()
            *lines, received = (received + piece).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                tasks.start_soon(obey, asked["number"], getattr(actor, asked["name"]), asked["arguments"])


def main() -> None:
    """Take the settings from the command line and serve."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    settings = json.loads(sys.argv[1])
    # The conversation gets a descriptor of its own: what anybody prints goes to standard error, where it is noticed.
    talk = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if settings["max_fds"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (settings["max_fds"], settings["max_fds"]))
    backend = "trio" if settings["loop_name"] == "trio" else "asyncio"
    options = {} if backend == "trio" else {"use_uvloop": settings["loop_name"] == "uvloop"}
    with talk:
        anyio.run(serve, talk, settings, backend=backend, backend_options=options)


if __name__ == "__main__":
    main()
