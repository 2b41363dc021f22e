"""Hand contiguous caches from P to D: requests that D pulls by their keys, then one that P pushes layer by layer."""

import sys
from multiprocessing.connection import Connection
from threading import Event

import numpy as np
from numpy.typing import NDArray
from two_processes import receive, run_both

import kvlink as kv

LAYERS, TENSORS, SLOT = range(8), range(16), (128, 4, 32)  # K and V of each layer; tokens, heads, size of a head
DESC = kv.CacheDesc(len(TENSORS), (4, *SLOT), "float32")  # four slots
IS_COMPUTED = [Event() for _ in LAYERS]  # of request 74, in P


def content(request: int, tensor: int) -> NDArray[np.float32]:
    """Return what the model computes of a request for a tensor."""
    return np.random.default_rng([request, tensor]).random(SLOT, dtype=np.float32)


def compute(cache: kv.KvCache, slot: int, request: int, tensors: range = TENSORS) -> None:
    """Fill a slot. No view outlives this call; one that did would keep the memory from being used again."""
    for tensor in tensors:
        cache.tensors[tensor][slot] = content(request, tensor)


def check(step: str, cache: kv.KvCache, slot: int, request: int, tensors: range = TENSORS) -> None:
    """Compare a slot with what the model computes, and say that `step` is done."""
    if not all(np.array_equal(cache.tensors[tensor][slot], content(request, tensor)) for tensor in tensors):
        sys.exit(f"{step}: WRONG")
    print(f"{step}: right", flush=True)


class ComputedLayers(kv.LayerSynchronizer):
    """Lets the push wait for each layer. A plain method, such as this one, is called in a thread and may block."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return IS_COMPUTED[layer_index].wait(10)  # False gives the push up


async def prompt(pipe: Connection) -> int:
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, listen="127.0.0.1:0", pool=DESC.nbytes) as cluster:
        manager = cluster.kv_cache_manager
        cache = manager.allocate_cache(DESC, [kv.CacheKey(1, request) for request in (71, kv.ABSENT, 72, 73)])
        for slot, request in {0: 71, 2: 72, 3: 73}.items():
            compute(cache, slot, request)
        pipe.send(cluster.address)
        await receive(pipe)  # D has pulled 71 and 72
        manager.deallocate_cache(cache)
        try:
            manager.allocate_cache(DESC)
            sys.exit("P: there is room for a second cache already")
        except kv.OutOfMemoryError:
            print("P: cache deallocated; its memory stays, because request 73 is still to be pulled", flush=True)
        pipe.send("deallocated")
        config = kv.TransferWithCacheKeyConfig(await receive(pipe), LAYERS, LAYERS, src_batch_index=2)  # 73 is pulled
        cache = manager.allocate_cache(DESC)
        print("P: memory is free; another cache allocated in it", flush=True)
        push = manager.transfer_cache_async(cache, ComputedLayers(), [config])
        for layer in LAYERS:
            compute(cache, 2, 74, range(2 * layer, 2 * layer + 2))
            IS_COMPUTED[layer].set()
            await receive(pipe)  # D has checked it; only this program waits, to show that no layer waits for the next
        if not (await push.synchronize(timeout_s=10)).is_ok:
            sys.exit(f"P: {push.error}")
        await receive(pipe)  # D has unlinked
    return 0


async def decode(pipe: Connection) -> int:
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool=DESC.nbytes) as cluster:
        manager, peer = cluster.kv_cache_manager, kv.ClusterInfo(1, await receive(pipe))
        (await cluster.link_clusters([peer], timeout_s=5)).raise_for_status()
        cache = manager.allocate_cache(DESC)
        for request, slot in {71: 3, 72: 0}.items():
            await manager.pull_cache(kv.CacheKey(1, request), cache, slot)  # uses the key up
            check(f"D: request {request} pulled into slot {slot}", cache, slot, request)
        pipe.send("pulled")
        await receive(pipe)  # P has deallocated its cache
        await manager.pull_cache(kv.CacheKey(1, 73), cache, 2)
        check("D: request 73 pulled out of the deallocated cache", cache, 2, 73)
        (await cluster.check_link_status(1, timeout_s=5)).raise_for_status()  # P knows of the pull before it answers
        with cache.arrivals.watch(peer=1) as watch:  # before the push begins
            pipe.send(kv.CacheKeyByIdAndIndex(2, cache.cache_id, batch_index=1))
            for layer in LAYERS:
                await watch.layer(layer, timeout_s=10)
                check(f"D: layer {layer} of request 74 is in slot 1", cache, 1, 74, range(2 * layer, 2 * layer + 2))
                pipe.send("checked")
            await watch.end(timeout_s=10)
        (await cluster.unlink_clusters([peer], timeout_s=5)).raise_for_status()
        print("D: unlinked: ok", flush=True)
        pipe.send("unlinked")
    return 0


if __name__ == "__main__":
    sys.exit(run_both({"P": prompt, "D": decode}, timeout_s=60))
