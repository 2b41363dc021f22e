"""Hand paged blocks from P to D: some that D pulls, copies, swaps out and in, then some that P pushes by layers."""

import sys
from multiprocessing.connection import Connection

import anyio
import numpy as np
from anyio import to_thread
from numpy.typing import NDArray
from two_processes import receive, run_both

import kvlink as kv

LAYERS, TENSORS, BLOCK = range(8), range(16), (16, 4, 32)  # K and V of each layer; tokens, heads, size of a head
DESC = kv.CacheDesc(len(TENSORS), (64, *BLOCK), "float32")  # 64 blocks
HOST_DESC = kv.CacheDesc(len(TENSORS), (4, *BLOCK), "float32", kv.Placement.HOST)  # room for four that wait
KEY = kv.BlocksCacheKey(cluster_id=1)


def content(request: int, index: int, tensor: int) -> NDArray[np.float32]:
    """Return what the model computes for a tensor of block `index` of a request."""
    return np.random.default_rng([request, index, tensor]).random(BLOCK, dtype=np.float32)


def compute(cache: kv.KvCache, blocks: list[int], request: int, tensors: range = TENSORS) -> None:
    """Fill the blocks of a request."""
    for tensor in tensors:
        for index, block in enumerate(blocks):
            cache.tensors[tensor][block] = content(request, index, tensor)


def check(step: str, cache: kv.KvCache, blocks: list[int], request: int, tensors: range = TENSORS) -> None:
    """Compare blocks with what the model computes for a request, and say that `step` is done."""
    for tensor in tensors:
        if not np.array_equal(cache.tensors[tensor][blocks], [content(request, i, tensor) for i in range(len(blocks))]):
            sys.exit(f"{step}: tensor {tensor} is WRONG")
    print(f"{step}: right", flush=True)


class ComputedLayers(kv.LayerSynchronizer):
    """Lets the push wait for each layer. An async method, such as this one, is awaited on the event loop."""

    def __init__(self) -> None:
        self.events = [anyio.Event() for _ in LAYERS]

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        with anyio.fail_after(10):
            await self.events[layer_index].wait()
        return True


async def prompt(pipe: Connection) -> int:
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, listen="127.0.0.1:0", pool="16MiB") as cluster:
        cache = cluster.kv_cache_manager.allocate_blocks_cache(DESC, KEY)
        compute(cache, [3, 4, 9], request=71)
        pipe.send((cluster.address, [3, 4, 9]))
        target, dst_blocks = await receive(pipe)  # request 72: D tells where it is to go
        layers, config = ComputedLayers(), kv.TransferWithCacheKeyConfig(target, LAYERS, LAYERS)
        push = cluster.kv_cache_manager.transfer_cache_async(cache, layers, [config], [20, 7], dst_blocks)
        for layer in LAYERS:
            await to_thread.run_sync(compute, cache, [20, 7], 72, range(2 * layer, 2 * layer + 2))
            layers.events[layer].set()
        with anyio.fail_after(10):
            await push
        await receive(pipe)  # D has unlinked
    return 0


async def decode(pipe: Connection) -> int:
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="16MiB", host_pool="2MiB") as cluster:
        manager = cluster.kv_cache_manager
        cache, host = manager.allocate_blocks_cache(DESC), manager.allocate_blocks_cache(HOST_DESC)
        address, blocks = await receive(pipe)
        (await cluster.link_clusters([kv.ClusterInfo(1, address)], timeout_s=5)).raise_for_status()
        report = await manager.pull_blocks(KEY, cache, blocks, [60, 10, 11])
        check(f"D: {report.nbytes} bytes pulled, blocks {blocks} of P to [60, 10, 11]", cache, [60, 10, 11], 71)
        await manager.copy_blocks(cache, {60: [30, 33], 10: [31, 34], 11: [32, 35]})
        check("D: copied to [30, 31, 32]", cache, [30, 31, 32], 71)
        check("D: copied to [33, 34, 35]", cache, [33, 34, 35], 71)
        await manager.swap_blocks(cache, host, {60: 2, 10: 0, 11: 1})
        check("D: swapped out to [2, 0, 1] of the host cache", host, [2, 0, 1], 71)
        await manager.swap_blocks(host, cache, {2: 50, 0: 51, 1: 52})
        check("D: swapped in to [50, 51, 52]", cache, [50, 51, 52], 71)
        with cache.arrivals.watch(peer=1) as watch:  # before the push begins
            pipe.send((kv.CacheKeyByIdAndIndex(2, cache.cache_id), [40, 5]))
            for layer in LAYERS:
                await watch.layer(layer, timeout_s=10)
                check(f"D: layer {layer} pushed to [40, 5]", cache, [40, 5], 72, range(2 * layer, 2 * layer + 2))
            await watch.end(timeout_s=10)
        check("D: swapped in blocks are still the same", cache, [50, 51, 52], 71)
        (await cluster.unlink_clusters([1], timeout_s=5)).raise_for_status()
        print("D: unlinked: ok", flush=True)
        pipe.send("unlinked")
    return 0


if __name__ == "__main__":
    sys.exit(run_both({"P": prompt, "D": decode}, timeout_s=60))
