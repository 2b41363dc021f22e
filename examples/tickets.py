"""Hand out leased rights to KV blocks, the way two processes do that share no scheduler.

P computes blocks and offers them; D pulls some by token, and P learns that they are its own again. What D does not
want, it drops; what P wants back, it revokes; what nobody asks for, expires. Then D expects blocks, and P fills them
layer by layer.
"""

import asyncio
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvlink as kv

DESC = kv.CacheDesc(num_tensors=8, shape=(64, 16, 128), data_type="float32")  # K and V of 4 layers, 64 blocks


def fill(cache: kv.KvCache, blocks: list[int]) -> None:
    """Stand in for the model: every block holds its own number."""
    for tensor in cache.tensors:
        for block in blocks:
            tensor[block] = block


async def receive(pipe: Connection) -> Any:
    """Take the other process's message off the loop's hands."""
    if not await asyncio.to_thread(pipe.poll, 60):
        raise TimeoutError("the other process does not answer")
    return json.loads(pipe.recv())


async def prompt(pipe: Connection) -> None:
    """P: offer four requests' blocks, say how each offer ended, then fill what D expects."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, listen="127.0.0.1:0", pool="32MiB") as cluster:
        manager = cluster.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        fill(cache, list(range(64)))
        offers = [manager.offer_blocks(cache, [4 * i, 4 * i + 1], lease_s=30) for i in range(3)]
        offers.append(manager.offer_blocks(cache, [60, 61], lease_s=0.1))
        tokens = [ticket.token.decode() for ticket in offers]  # text: it travels inside the application's own requests
        pipe.send(json.dumps({"address": cluster.address, "tokens": tokens}))
        await receive(pipe)  # D holds the third
        offers[2].revoke()
        for request, ticket in enumerate(offers):
            print(f"P: request {request}: {(await ticket.outcome(timeout_s=10)).kind.value}", flush=True)
        pipe.send(json.dumps("go on"))
        token = await receive(pipe)
        for layer in range(4):
            layers = range(layer, layer + 1)
            await manager.push_blocks(token, cache, [20, 21], [], src_layer_range=layers, dst_layer_range=layers)
        await receive(pipe)


async def decode(pipe: Connection) -> bool:
    """D: pull the first offer, drop the second, lose the third; then expect two blocks."""
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="32MiB") as cluster:
        manager = cluster.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC)
        said = await receive(pipe)
        (await cluster.link_clusters([kv.ClusterInfo(1, said["address"])], timeout_s=5)).raise_for_status()
        await manager.pull_blocks(said["tokens"][0], cache, [], [10, 11])
        (await manager.hold_ticket(said["tokens"][1])).drop()
        held = await manager.hold_ticket(said["tokens"][2])
        pipe.send(json.dumps("held"))
        lost = await held.outcome(timeout_s=10)
        await receive(pipe)
        ticket = manager.expect_blocks(cache, [30, 31])
        pipe.send(json.dumps(ticket.token.decode()))
        for layer in range(4):
            await ticket.layer(layer, timeout_s=10)
        outcome = await ticket.outcome(timeout_s=10)
        places = {10: 0, 11: 1, 30: 20, 31: 21}  # ours: P's
        is_right = all(np.all(tensor[ours] == theirs) for tensor in cache.tensors for ours, theirs in places.items())
        pipe.send(json.dumps("done"))
    print(f"D: the held ticket was {lost.kind.value}, the expected blocks are {outcome.kind.value}")
    print("D: all bytes are", "right" if is_right else "WRONG")
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
    sys.exit(0 if is_right else 1)
