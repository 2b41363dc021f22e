"""Serve requests with nothing but links: notifications say what is wanted, ready and done; events say who is there."""

import sys
from multiprocessing.connection import Connection

import anyio
import numpy as np
from numpy.typing import NDArray
from two_processes import receive, run_both

import kvlink as kv

REQUESTS = range(70, 76)
DESC = kv.CacheDesc(num_tensors=4, shape=(1, 64, 32), data_type="float32")  # one request's keys and values


def content(request: int, tensor: int) -> NDArray[np.float32]:
    """Return what the model computes of a request for a tensor."""
    return np.random.default_rng([request, tensor]).random(DESC.shape, dtype=np.float32)


async def tell(cluster: kv.Cluster) -> None:
    """Say who comes and goes, until the peer has gone."""
    async with cluster.events() as events:
        async for event in events:
            if isinstance(event, kv.LinkUp):
                print(f"P: cluster {event.peer} is linked", flush=True)
            elif isinstance(event, kv.LinkLost):
                print(f"P: cluster {event.peer} has gone", flush=True)
                return


async def serve(cluster: kv.Cluster) -> None:
    """Compute what peers want, say when it is ready, and give the memory back when it is done with."""
    manager, caches = cluster.kv_cache_manager, dict[int, kv.KvCache]()
    async for notification in cluster.notifications():
        word, number = notification.payload.split()
        request = int(number)
        if word == b"want":
            cache = caches[request] = manager.allocate_cache(DESC, [kv.CacheKey(1, request)])
            for tensor in range(DESC.num_tensors):
                cache.tensors[tensor][:] = content(request, tensor)
            await cluster.notify(notification.peer, b"ready %d" % request)
        elif word == b"done":  # sent by the pull itself, behind the last byte
            manager.deallocate_cache(caches.pop(request))
            print(f"P: request {request} is done; {manager.pool_usage().num_caches} caches are left", flush=True)


async def prompt(pipe: Connection) -> int:
    made = kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, listen="127.0.0.1:0", pool="4MiB")
    async with made as cluster, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, cluster)
        pipe.send(cluster.address)
        await tell(cluster)
        tasks.cancel_scope.cancel()
    return 0


async def decode(pipe: Connection) -> int:
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="4MiB") as cluster:
        manager, peer = cluster.kv_cache_manager, kv.ClusterInfo(1, await receive(pipe))
        # A prompt that dies, or is upgraded, is linked anew when it is back.
        (await cluster.link_clusters([peer], timeout_s=5, relink=True)).raise_for_status()
        cache = manager.allocate_cache(DESC)
        for request in REQUESTS:
            await cluster.notify(peer, b"want %d" % request)
        num_right = 0
        async for notification in cluster.notifications():
            request = int(notification.payload.split()[1])
            await manager.pull_cache(kv.CacheKey(1, request), cache, notify=b"done %d" % request)
            num_right += all(np.array_equal(cache.tensors[i], content(request, i)) for i in range(DESC.num_tensors))
            if request == REQUESTS[-1]:
                break
        print(f"D: {num_right} of {len(REQUESTS)} requests are right", flush=True)
        manager.deallocate_cache(cache)
        (await cluster.unlink_clusters([peer])).raise_for_status()
    return 0 if num_right == len(REQUESTS) else 1


if __name__ == "__main__":
    sys.exit(run_both({"P": prompt, "D": decode}, timeout_s=60))
