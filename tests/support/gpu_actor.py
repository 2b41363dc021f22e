"""The actor of `tests.support.peer`, with caches on a CUDA device. Run as ``python -m tests.support.gpu_actor``."""

from __future__ import annotations

from typing import Any

import anyio

import kvlink as kv
from tests.support import actor
from tests.support.gpu import DeviceArray, Gpu, faults_on_device, fill_on_device
from tests.support.pattern import Stamp


class GpuActor(actor.Actor):
    """An actor that can also have caches on a device. They go by handles as all others do."""

    def __init__(self, cluster: kv.Cluster, life: int) -> None:
        super().__init__(cluster, life)
        self._gpus: dict[int, Gpu] = {}
        self._arrays: dict[int, list[DeviceArray]] = {}

    def register_on_device(
        self, num_tensors: int, shape: list[int], model_id: int, ordinal: int = 0, is_filled: bool = True
    ) -> int:
        """Register a paged cache in memory of a device, by default filled; return its handle."""
        gpu = self._gpus[ordinal] = self._gpus.get(ordinal) or Gpu(ordinal)
        arrays = [gpu.allocate(shape) for _ in range(num_tensors)]
        desc, key = kv.CacheDesc(num_tensors, shape, "uint8"), kv.BlocksCacheKey(self._cluster.cluster_id, model_id)
        handle = self._keep(self._cluster.kv_cache_manager.register_blocks_cache(desc, arrays, key), False)
        self._arrays[handle] = arrays
        if is_filled:
            self.fill_on_device(handle)
        return handle

    def fill_on_device(self, cache: int, stamp: list[int] | None = None) -> None:
        """Write the pattern of `stamp` (None: the cache's own) into a cache on a device."""
        fill_on_device(self._arrays[cache], self._stamp(cache) if stamp is None else Stamp(*stamp))

    def faults_on_device(
        self, cache: int, stamp: list[int], blocks: list[int] | None = None, src_blocks: list[int] | None = None
    ) -> str | None:
        """Say in words what in a cache on a device is not the pattern of `stamp`."""
        return faults_on_device(self._arrays[cache], Stamp(*stamp), blocks, src_blocks)

    def addresses(self, cache: int) -> list[int]:
        """Return where the tensors of a cache begin."""
        return self._caches[cache].tensor_addresses

    def offer(self, cache: int, blocks: list[int]) -> str:
        """Give a ticket to read blocks and return its token."""
        return self._cluster.kv_cache_manager.offer_blocks(self._caches[cache], blocks).token.decode()

    async def push_by_ticket(self, token: str, cache: int, blocks: list[int]) -> int:
        """Push blocks by ticket; return how many bytes."""
        return (await self._cluster.kv_cache_manager.push_blocks(token, self._caches[cache], blocks, [])).nbytes

    def deallocate(self, cache: int) -> None:
        """Give a cache back, and the memory of a device with it."""
        super().deallocate(cache)
        for array in self._arrays.pop(cache, []):
            array.free()

    async def overwrite_again_and_again(self, cache: int, num: int) -> None:
        """Give a cache on a device back and register another one under the same key, on the same memory, many times.

        Each is filled before its key is bound, with a stamp of its own: cache numbers from 1000 on.
        """
        arrays, desc = self._arrays[cache], self._caches[cache].desc
        key: Any = kv.BlocksCacheKey(self._cluster.cluster_id, 1)
        for number in range(num):
            self._cluster.kv_cache_manager.deallocate_cache(self._caches[cache])
            fill_on_device(arrays, Stamp(self._cluster.cluster_id, self._life, 1000 + number))
            self._caches[cache] = self._cluster.kv_cache_manager.register_blocks_cache(desc, arrays, key)
            await anyio.sleep(0.002)


def main() -> None:
    """Act."""
    vars(actor)["Actor"] = GpuActor
    actor.main()


if __name__ == "__main__":
    main()
