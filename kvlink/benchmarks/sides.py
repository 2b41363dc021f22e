"""One process's side: its cluster, its memory, and the cache of the current scenario."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvlink.benchmarks.native import Addresses, Native, fill
from kvlink.benchmarks.scenarios import BlockIds, Scenario
from kvlink.caches.kvcache import KvCache
from kvlink.cluster import Cluster
from kvlink.config import ClusterConfig
from kvlink.errors import OutOfMemoryError
from kvlink.geometry import CacheDesc, Role
from kvlink.keys import BlocksCacheKey
from kvlink.memory.pool import Segment

SHM: Final = "kvlink-shm"
REGISTERED: Final = "kvlink-shm-registered"
UCX: Final = "kvlink-ucx"
UCX_REGISTERED: Final = "kvlink-ucx-registered"
TRANSPORTS: Final = (SHM, REGISTERED, UCX, UCX_REGISTERED)
"""Over shared memory the pool, which the other side maps, and memory of the caller, which the kernel copies
(``process_vm_readv``); over UCX the pool, and memory of the caller. What UCX uses underneath is its own choice, by
``UCX_TLS``.
"""

_SMALLEST_POOL: Final = 4096
_FREE_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a side is to be. Sent to the target as its first message.

    Args:
        transport: one of `TRANSPORTS`.
        num_threads: `ClusterConfig.copy_threads`.
        pool_nbytes: memory of each side.
        is_compiled: whether a C compiler may be used for the comparison and the floor.
        has_uvloop: whether the event loop is uvloop's.
        is_setup: whether the making of the side is what is measured.
    """

    transport: str
    num_threads: int
    pool_nbytes: int
    is_compiled: bool = True
    has_uvloop: bool = False
    is_setup: bool = False

    @property
    def config(self) -> ClusterConfig:
        """The settings of both clusters."""
        return ClusterConfig(
            copy_threads=self.num_threads,
            permit_peer_access="peer" if self.transport == REGISTERED else None,
            transports=("ucx",) if self.transport in (UCX, UCX_REGISTERED) else ("shm",),
        )


class Places(NamedTuple):
    """Where the tensors of a cache lie for others of this host: descriptor `fd` of process `pid`, and offsets in it."""

    pid: int
    fd: int
    offsets: list[int]


class Side:
    """One cluster and one cache at a time, over the same memory. Made by `open_side`.

    Attributes:
        cluster: open.
        native: loops in C.
        setup: seconds that the parts of its making took, by name.
    """

    def __init__(self, cluster: Cluster, segment: Segment | None, native: Native, setup: dict[str, float]) -> None:
        self.cluster = cluster
        self.native = native
        self.setup = setup
        self._segment = segment
        self._scenario: Scenario | None = None
        self._cache: KvCache | None = None

    @property
    def scenario(self) -> Scenario:
        """Whose cache is allocated."""
        assert self._scenario is not None
        return self._scenario

    @property
    def cache(self) -> KvCache:
        """The cache that is allocated."""
        assert self._cache is not None
        return self._cache

    async def allocate(self, scenario: Scenario) -> None:
        """Make the cache of `scenario` in place of the one before."""
        manager = self.cluster.kv_cache_manager
        self.release()
        desc = CacheDesc(scenario.num_tensors, (scenario.blocks_per_tensor, scenario.block_nbytes), "uint8")
        key = BlocksCacheKey(self.cluster.cluster_id) if self.cluster.role is Role.PROMPT else None
        started = time.perf_counter()
        if self._segment is not None:
            size = scenario.tensor_nbytes
            buffers = [self._segment.memory[index * size : (index + 1) * size] for index in range(desc.num_tensors)]
            self._cache = manager.register_blocks_cache(desc, buffers, key)
        else:
            self._cache = await _allocate(self.cluster, desc, key)
        self.setup["register_s"] = time.perf_counter() - started
        self._scenario = scenario

    def release(self) -> None:
        """Give the cache up, if there is one."""
        if self._cache is not None:
            self.cluster.kv_cache_manager.deallocate_cache(self._cache)
            self._cache = None

    def addresses(self, blocks: BlockIds) -> Addresses:
        """Return where these blocks lie in this process, tensor by tensor."""
        return block_addresses(self.cache.tensor_addresses, blocks, self.scenario.block_nbytes)

    def places(self) -> Places:
        """Return where the tensors lie for other processes."""
        addresses = self.cache.tensor_addresses
        fd, mapped_at = _descriptor_behind(addresses[0])
        return Places(os.getpid(), fd, [address - mapped_at for address in addresses])

    def fill(self, seed: int) -> None:
        """Write the pattern into every word."""
        num_words = self.scenario.tensor_nbytes // 8
        for index in range(self.scenario.num_tensors):
            fill(self._words(index).reshape(-1), index * num_words, seed)

    def clear(self, blocks: BlockIds) -> None:
        """Write zeros into these blocks of each tensor."""
        for index in range(self.scenario.num_tensors):
            words = self._words(index)
            for block in blocks.tolist():
                words[block] = 0

    def count_wrong(self, target: BlockIds, source: BlockIds, seed: int) -> int:
        """Return how many blocks, over all tensors, are not those of a cache that was filled with `seed`."""
        scenario = self.scenario
        words_per_block = scenario.block_nbytes // 8
        tensors = np.arange(scenario.num_tensors, dtype=np.uint64)[:, None]
        first = (tensors * np.uint64(scenario.blocks_per_tensor) + source.astype(np.uint64)) * np.uint64(
            words_per_block
        )
        blocks = self.addresses(target)
        return self.native.count_wrong(blocks, np.ascontiguousarray(first.ravel()), scenario.block_nbytes, seed)

    def _words(self, index: int) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self.cache.tensors[index].view(np.uint64)
        return words


@asynccontextmanager
async def open_side(order: Order, *, cluster_id: int, role: Role) -> AsyncIterator[Side]:
    """Open a cluster and its memory as `order` says.

    Raises:
        OutOfMemoryError: the host has not that much.
    """
    native = Native(is_compiled=order.is_compiled)
    setup: dict[str, float] = {}
    config = order.config
    segment = None
    pool_nbytes = order.pool_nbytes
    if order.transport in (REGISTERED, UCX_REGISTERED):
        segment = await anyio.to_thread.run_sync(Segment.create, "kvlink-bench", pool_nbytes)
        pool_nbytes = _SMALLEST_POOL
    try:
        if order.is_setup and segment is None:
            # What a cluster costs without its memory, which others measure with memory that exists already.
            started = time.perf_counter()
            async with Cluster(cluster_id=cluster_id, role=role, pool=_SMALLEST_POOL, config=config):
                setup["create_s"] = time.perf_counter() - started
        started = time.perf_counter()
        async with Cluster(cluster_id=cluster_id, role=role, pool=pool_nbytes, config=config) as cluster:
            setup["create_s" if segment is not None else "pool_s"] = time.perf_counter() - started
            side = Side(cluster, segment, native, setup)
            try:
                yield side
            finally:
                side.release()
    finally:
        if segment is not None:
            segment.close()


def block_addresses(tensors: list[int], blocks: BlockIds, block_nbytes: int) -> Addresses:
    """Return the address of each block in each tensor, tensor by tensor, for tensors that begin at these addresses."""
    offsets = blocks.astype(np.uint64) * np.uint64(block_nbytes)
    addresses: Addresses = (np.array(tensors, dtype=np.uint64)[:, None] + offsets).ravel()
    return addresses


async def _allocate(cluster: Cluster, desc: CacheDesc, key: BlocksCacheKey | None) -> KvCache:
    """Allocate; the memory of the cache before may still be under the peer's write lease, which it gives back soon."""
    with anyio.fail_after(_FREE_WITHIN_S):
        while True:
            try:
                return cluster.kv_cache_manager.allocate_blocks_cache(desc, key)
            except OutOfMemoryError:
                await anyio.sleep(0.005)


def _descriptor_behind(address: int) -> tuple[int, int]:
    """Return our descriptor of the memfd that is mapped at `address`, and where its first byte is mapped."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            fields: list[Any] = line.split(maxsplit=5)
            low, high = (int(end, 16) for end in fields[0].split("-"))
            if low <= address < high:
                inode, offset = int(fields[4]), int(fields[2], 16)
                for fd in map(int, os.listdir("/proc/self/fd")):
                    try:
                        if os.fstat(fd).st_ino == inode and "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):
                            return fd, low - offset
                    except OSError:  # the descriptor of the listing itself
                        continue
    raise LookupError(f"no descriptor of ours is mapped at {address:#x}")
