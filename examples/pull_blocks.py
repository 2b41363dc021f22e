"""Pull blocks from the KV cache of one process into the KV cache of another one, and check every byte."""

import asyncio
import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

import kvlink as kv

DESC = kv.CacheDesc(num_tensors=60, shape=(64, 16, 8, 64), data_type="float32")  # K and V of 30 layers, 64 blocks
KEY = kv.BlocksCacheKey(cluster_id=1)


def computed(tensor: int) -> NDArray[np.float32]:
    """Stand in for the model: what the prompt process has computed for one tensor."""
    return np.random.default_rng(tensor).random(DESC.shape, dtype=np.float32)


async def prompt(pipe: Connection) -> None:
    """Fill a cache, say where it can be had, and keep it until the decoder is done: until the pipe ends."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, listen="127.0.0.1:0", pool="128MiB") as cluster:
        cache = cluster.kv_cache_manager.allocate_blocks_cache(DESC, KEY)
        for number, tensor in enumerate(cache.tensors):  # numpy views of the cache itself
            tensor[:] = computed(number)
        pipe.send(cluster.address)
        await asyncio.to_thread(pipe.poll, 60)


async def decode(pipe: Connection) -> bool:
    """Pull blocks 0 to 31 into our blocks 32 to 63; return whether all of them are right."""
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="128MiB") as cluster:
        cache = cluster.kv_cache_manager.allocate_blocks_cache(DESC)
        if not await asyncio.to_thread(pipe.poll, 60):
            raise TimeoutError("the prompt process does not say its address")
        peer = kv.ClusterInfo(cluster_id=1, address=pipe.recv())
        (await cluster.link_clusters([peer], timeout_s=5)).raise_for_status()
        report = await cluster.kv_cache_manager.pull_blocks(KEY, cache, range(32), range(32, 64))
        (await cluster.unlink_clusters([peer], timeout_s=5)).raise_for_status()
        is_right = all(np.array_equal(tensor[32:], computed(i)[:32]) for i, tensor in enumerate(cache.tensors))
    print(f"{report.nbytes} bytes over {report.transport}, {report.gb_per_s:.1f} GB/s:", "ok" if is_right else "WRONG")
    return is_right


def run_prompt(pipe: Connection) -> None:  # what the other process runs
    asyncio.run(prompt(pipe))


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_prompt, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the pipe ends when the other process does
    with ours:
        is_right = asyncio.run(decode(ours))
    process.join(10)
    sys.exit(0 if is_right and process.exitcode == 0 else 1)
