"""Everything that one cluster owns of memory: pools, state words, caches, leases. Plain bookkeeping; nothing waits."""

from __future__ import annotations

import os
import secrets
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import get_ident

from kvlink.caches.arrivals import Arrivals
from kvlink.caches.kvcache import KvCache
from kvlink.caches.leases import LeaseBook
from kvlink.caches.table import CacheEntry, CacheTable
from kvlink.config import ClusterConfig
from kvlink.errors import (
    CacheNotFoundError,
    ClosedError,
    FeatureNotEnabledError,
    OutOfMemoryError,
    ParameterError,
    ParameterTypeError,
    shown,
)
from kvlink.geometry import CacheDesc, CacheGeometry, DataType, Placement, TensorRun, join_tensors, tensor_at
from kvlink.keys import KeyName
from kvlink.memory.buffers import as_bytes, check_distinct
from kvlink.memory.devicebuffers import as_device_bytes, check_one_device, is_in_cuda_memory
from kvlink.memory.forkmark import GONE, make_mark
from kvlink.memory.pool import Pool, Segment, as_tensors
from kvlink.memory.regions import HOST_POOL, ONLY_UCX, POOL, STATE, DeviceRegion, LocalMemory, LocalRegion
from kvlink.memory.stateregion import WORD_NBYTES, StateRegion
from kvlink.stats import PoolUsage


class CacheStore:
    """The memory of one cluster, from the moment its pools exist.

    Args:
        pool, host_pool: segments, owned from now on.
        state: the segment of the state words, owned from now on.
        max_leases_per_link: read leases that one peer gets.

    Attributes:
        thread: the one that may use it; whoever hands it to another one sets this.
        watched: the arrivals of caches that somebody watches.
        takes_cuda: whether a transport of the cluster reaches CUDA memory; whoever makes the transports sets this.
        mark: ``mark[0]`` is 0 when nothing may be done any more: after `close`, and in a forked child.
    """

    def __init__(self, pool: Segment, host_pool: Segment | None, state: Segment, *, max_leases_per_link: int) -> None:
        self.memory = LocalMemory()
        self.state = StateRegion(state)
        # Elsewhere in every life: a key that names a cache of an earlier life by its id must not find one of this life.
        # Below 2**53, so that ids pass through any JSON.
        self.table = CacheTable(self.state, self._free, first_id=secrets.randbelow(2**32) * 2**20 + 1)
        self.leases = LeaseBook(self.table, self.state, max_reads_per_holder=max_leases_per_link)
        self._pools: dict[Placement, Pool] = {Placement.DEVICE: Pool(pool, POOL)}
        if host_pool is not None:
            self._pools[Placement.HOST] = Pool(host_pool, HOST_POOL)
        for own in self._pools.values():
            self.memory[own.region] = LocalRegion(own.segment.memory, own.segment)
        self.memory[STATE] = LocalRegion(state.memory, state)
        self._handles: weakref.WeakValueDictionary[int, KvCache] = weakref.WeakValueDictionary()
        self._forgotten: deque[int] = deque()
        self._pid = os.getpid()
        self.mark = make_mark()
        self.thread = get_ident()
        self.watched: set[Arrivals] = set()
        self.takes_cuda = False
        # Pool caches by where they begin in this process, and registered ones, which may lie anywhere.
        self._placed: list[tuple[int, int, CacheEntry]] = []
        self._registered: dict[int, CacheEntry] = {}
        self._next_movement = 1
        self._is_closed = False

    @classmethod
    def create(cls, pool_nbytes: int, host_pool_nbytes: int, config: ClusterConfig) -> CacheStore:
        """Reserve the memory. Slow (about 0.5 s per GiB): to be called in a thread.

        Raises:
            OutOfMemoryError: the host has not that much.
        """
        made: list[Segment] = []
        try:
            made.append(Segment.create("kvlink-state", config.max_caches * WORD_NBYTES))
            for name, nbytes in (("kvlink-pool", pool_nbytes), ("kvlink-host-pool", host_pool_nbytes)):
                if nbytes:
                    segment = Segment.create(
                        name,
                        nbytes,
                        is_huge=config.has_huge_pages,
                        is_prefaulted=config.is_prefaulted,
                        numa_node=config.numa_node,
                    )
                    made.append(segment)
        except BaseException:
            for segment in made:
                segment.close()
            raise
        return cls(
            made[1],
            made[2] if host_pool_nbytes else None,
            made[0],
            max_leases_per_link=config.max_leases_per_link,
        )

    def allocate(self, desc: CacheDesc, names: Sequence[KeyName | None], *, is_blocks: bool) -> KvCache:
        """Carve a cache from the pool of its placement and bind its keys; all or nothing.

        Raises:
            ParameterError: a key is bound already, or there is no such pool.
            OutOfMemoryError: no room.
        """
        self.check_usable()
        self.collect()
        if desc.data_type is DataType.STRING:
            raise ParameterError("data type 'string' has no fixed size and cannot be allocated")
        pool = self.pool(desc.placement)
        self.table.check_names(names)
        try:
            offset, stride = pool.allocate(desc.tensor_nbytes, desc.num_tensors)
        except OutOfMemoryError as exc:
            kept = [entry for entry in self.table if not entry.is_held]
            if kept:
                bound = ", ".join(str(name) for entry in kept[:3] for name in list(entry.keys)[:3])
                exc.args = (f"{exc}; {len(kept)} deallocated caches live by keys that nobody has pulled: {bound} ...",)
            if self.table.num_waiting:
                exc.args = (
                    f"{exc}; {self.table.num_waiting} deallocated caches still hold memory, because views on them are "
                    "alive or a peer is using them",
                )
            suspects = self.leases.quarantined()
            if suspects:
                exc.args = (
                    f"{exc}; some of it is in quarantine, because clusters {', '.join(map(str, suspects))} may still "
                    "write into it: it comes back when they say that they have stopped, end, or link again",
                )
            raise
        try:
            run = TensorRun(pool.region, offset, stride, desc.num_tensors)
            entry = self.table.add(desc, describe(desc, (run,), is_blocks=is_blocks), names)
        except BaseException:
            pool.free(offset)
            raise
        insort(self._placed, (pool.segment.address + offset, entry.cache_id, entry), key=itemgetter(0))
        root = pool.segment.root(offset, stride * desc.num_tensors)
        self.table.watch_views(entry, root)
        tensors = as_tensors(root, stride, desc.num_tensors, desc.shape, desc.data_type.numpy_dtype)
        begin = pool.segment.address + offset
        addresses = range(begin, begin + stride * desc.num_tensors, stride)
        handle = KvCache(self, entry, tensors, self._forgotten, addresses)
        self._handles[entry.cache_id] = handle
        return handle

    def register(
        self, desc: CacheDesc, buffers: Sequence[object], names: Sequence[KeyName | None], *, is_blocks: bool
    ) -> KvCache:
        """Enter memory that the caller owns as a cache; all or nothing. Its keys are never consumed by pulls.

        Raises:
            ParameterError: a key is bound already, or a buffer does not fit the description.
            FeatureNotEnabledError: a buffer is in memory that no transport of this cluster reaches.
        """
        self.check_usable()
        self.collect()
        if desc.data_type is DataType.STRING:
            raise ParameterError("data type 'string' has no fixed size and cannot be registered")
        if len(buffers) != desc.num_tensors:
            raise ParameterError(f"{len(buffers)} buffers for a cache of {desc.num_tensors} tensors")
        self.table.check_names(names)
        if any(map(is_in_cuda_memory, buffers)):
            places, tensors = self._place_on_device(desc, buffers), tuple(buffers)
        else:
            flat = [as_bytes(f"buffers[{index}]", buffer, desc.tensor_nbytes) for index, buffer in enumerate(buffers)]
            check_distinct([(int(buffer.ctypes.data), len(buffer)) for buffer in flat])
            places = self.memory.register(flat)
            dtype = desc.data_type.numpy_dtype
            tensors = tuple(buffer.view(dtype).reshape(desc.shape) for buffer in flat)
        try:
            geometry = describe(desc, join_tensors(places), is_blocks=is_blocks)
            entry = self.table.add(desc, geometry, names, is_consumable=False)
        except BaseException:
            for region in {region for region, _ in places}:
                self.memory.forget(region)
            raise
        self._registered[entry.cache_id] = entry
        addresses = [self.memory[region].address + offset for region, offset in places]
        handle = KvCache(self, entry, tensors, self._forgotten, addresses, self.device_of(entry))
        self._handles[entry.cache_id] = handle
        return handle

    def _place_on_device(self, desc: CacheDesc, buffers: Sequence[object]) -> list[tuple[int, int]]:
        """Enter CUDA memory; return the ``(region, offset)`` of each buffer."""
        for index, buffer in enumerate(buffers):
            if not is_in_cuda_memory(buffer):
                raise ParameterError(
                    f"buffers[{index}] is in host memory and others are in CUDA memory: a cache lies in one of them"
                )
        if not self.takes_cuda:
            raise FeatureNotEnabledError(f"buffers[0] is in CUDA memory, which {ONLY_UCX}")
        found = [
            as_device_bytes(f"buffers[{index}]", buffer, desc.tensor_nbytes) for index, buffer in enumerate(buffers)
        ]
        check_one_device(found)
        check_distinct([(each.address, each.nbytes) for each in found])
        return self.memory.register_on_device(found)

    def device_of(self, entry: CacheEntry) -> int | None:
        """Return the CUDA device that a cache lies on, None for host memory."""
        region = self.memory.get(entry.geometry.runs[0].region)
        return region.device if isinstance(region, DeviceRegion) else None

    def handle(self, cache_id: int) -> KvCache | None:
        """Return the handle of a live cache, None where it was forgotten or never existed."""
        return self._handles.get(cache_id)

    def locate(self, address: int) -> CacheEntry:
        """Return the live cache that has `address` in one of its tensors.

        Raises:
            CacheNotFoundError: none has.
        """
        place = bisect_right(self._placed, address, key=itemgetter(0)) - 1
        near = [self._placed[place][2]] if place >= 0 else []
        for entry in (*near, *self._registered.values()):
            if entry.has_ended:
                continue
            for run in entry.geometry.runs:
                if tensor_at(run, address - self.memory[run.region].address, entry.desc.tensor_nbytes) is not None:
                    return entry
        raise CacheNotFoundError(f"address {address:#x} is in no live cache")

    def deallocate(self, cache: KvCache) -> None:
        """Drop the id reference of a cache; a second time does nothing. Source: the spec, sections 5.2 and 6.3."""
        self.check_usable()
        self.collect()
        cache.invalidate()
        self._handles.pop(cache.cache_id, None)
        self.table.drop_id(cache.cache_id)

    def pool(self, placement: Placement) -> Pool:
        """Return the pool of a placement; raise `ParameterError` where the cluster has none."""
        pool = self._pools.get(placement)
        if pool is None:
            raise ParameterError(f"this cluster has no {placement.name} pool; give Cluster a host_pool size")
        return pool

    def usage(self, placement: Placement) -> PoolUsage:
        """Return what the pool of a placement holds now; the numbers of caches are those of the whole cluster."""
        self.check_usable()
        self.collect()
        pool = self.pool(placement)
        return PoolUsage(
            pool.nbytes,
            pool.free_nbytes,
            pool.largest_hole_nbytes,
            len(self.table),
            self.table.num_waiting,
            self.leases.quarantined(),
        )

    def own_entry(self, cache: object, what: str) -> CacheEntry:
        """Return the record of a cache that a caller handed in as `what`; refuse one that is not ours or has ended."""
        if not isinstance(cache, KvCache):
            raise ParameterTypeError(f"{what} must be a KvCache, got {shown(cache)}")
        self.check_usable()
        if cache.store is not self:
            raise ParameterError(f"{what} {cache!r} belongs to another cluster")
        return cache.entry()

    def begin_moving(self, entry: CacheEntry, blocks: Sequence[int]) -> int:
        """Keep the memory of `entry` during a movement of ours, and let `KvCache.is_quiet` know of these blocks.

        Returns:
            The movement's number, for `end_moving`.
        """
        number = self._next_movement
        self._next_movement += 1
        entry.moving[number] = blocks
        entry.pins += 1
        return number

    def end_moving(self, entry: CacheEntry, number: int, *, is_quiet: bool = True) -> None:
        """End a movement: nothing of it touches the memory any more.

        Args:
            is_quiet: False where something may: then its blocks are never quiet, and the memory is never used again.
        """
        if is_quiet:
            del entry.moving[number]
            self.table.unpin(entry)

    def collect(self) -> None:
        """Take note of handles that were forgotten and views that have died since."""
        while self._forgotten:
            self.table.drop_id(self._forgotten.popleft())
        self.table.collect()

    def check_usable(self) -> None:
        """Refuse after the cluster was closed, in a forked child, and in a thread that is not the event loop's."""
        if self.mark[0] and self.thread == get_ident():
            return
        self.check_alive()
        raise ClosedError(
            "this cluster belongs to the event loop of another thread; hand the call over to it, with "
            "asyncio.run_coroutine_threadsafe or anyio.from_thread.run for example"
        )

    def check_alive(self) -> None:
        """Refuse after the cluster was closed and in a forked child; enough for what only looks."""
        if self.mark[0]:
            return
        if self._is_closed:
            raise ClosedError("the cluster is closed, or was not entered: use `async with Cluster(...)`")
        raise ClosedError(
            f"this cluster belongs to process {self._pid}; a forked child cannot use it: make a Cluster of its own"
        )

    def close(self) -> None:
        """End every cache. Views that callers hold stay valid until they die. Idempotent."""
        self.retire()()

    def retire(self) -> Callable[[], None]:
        """Close, but leave the unmapping of the pools to the call that is returned; see `Segment.retire`."""
        if self._is_closed:
            return lambda: None
        self._is_closed = True
        self.mark = GONE
        self.state.end_all()
        for handle in list(self._handles.values()):
            handle.invalidate()
        self.memory.clear()
        self.state.close()
        unmappings = [pool.segment.retire() for pool in self._pools.values()]

        def unmap() -> None:
            for each in unmappings:
                each()

        return unmap

    def _free(self, entry: CacheEntry) -> None:
        if self._is_closed:
            return
        if not entry.is_consumable:
            del self._registered[entry.cache_id]
            for region in {run.region for run in entry.geometry.runs}:
                self.memory.forget(region)
            return
        run = entry.geometry.runs[0]
        for pool in self._pools.values():
            if pool.region == run.region:
                del self._placed[bisect_left(self._placed, pool.segment.address + run.offset, key=itemgetter(0))]
                pool.free(run.offset)


def describe(desc: CacheDesc, runs: tuple[TensorRun, ...], *, is_blocks: bool) -> CacheGeometry:
    """Return what peers are told of a cache."""
    return CacheGeometry(
        num_tensors=desc.num_tensors,
        num_slots=desc.num_slots,
        slot_nbytes=desc.slot_nbytes,
        data_type=desc.data_type.value,
        layout=desc.layout,
        is_blocks=is_blocks,
        runs=runs,
    )
