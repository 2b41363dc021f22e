"""Two processes whose kernel forbids one to copy the other's memory: transfers with registered memory take a detour.

The owner makes itself undumpable and the other side gives up the capability that would override that, which is what an
ordinary user meets on a host with Yama or in a hardened container. Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import multiprocessing.connection

import anyio
import numpy as np

import kvlink as kv

_CAP_SYS_PTRACE = 19
_PR_SET_DUMPABLE = 4
_LIBC = ctypes.CDLL(None, use_errno=True)
_DESC = kv.CacheDesc(num_tensors=4, shape=(16, 1000), data_type="uint8")


def give_up_tracing() -> None:
    """Drop CAP_SYS_PTRACE from this process; a process without it stays as it is."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    _LIBC.capget(header, sets)
    for index in range(3):
        sets[index] &= ~(1 << _CAP_SYS_PTRACE)
    if _LIBC.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def own(pipe: multiprocessing.connection.Connection) -> None:
    """Own registered memory until told to stop, then say what is in it."""
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

    async def main() -> None:
        async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, pool="4MiB") as owner:
            buffers = [np.arange(16_000, dtype=np.uint32).astype(np.uint8) + index for index in range(4)]
            paged = owner.kv_cache_manager.register_blocks_cache(_DESC, buffers, kv.BlocksCacheKey(1))
            slots = [np.full(16_000, 7 + index, np.uint8) for index in range(4)]
            slotted = owner.kv_cache_manager.register_cache(_DESC, slots, [kv.CacheKey(1, 5)])
            pipe.send((owner.address, slotted.cache_id))
            await anyio.to_thread.run_sync(pipe.poll, 60)
            pipe.send([buffer[2000:3000].tolist() for buffer in buffers])
            pipe.send(owner.kv_cache_manager._store.pool(kv.Placement.DEVICE).used_nbytes)
            assert paged.is_valid

    anyio.run(main)


async def use(pipe: multiprocessing.connection.Connection) -> dict[str, object]:
    """Pull from, and push to, memory that cannot be reached."""
    address, cache_id = pipe.recv()
    async with kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="4MiB") as user:
        (await user.link_clusters([kv.ClusterInfo(1, address)])).raise_for_status()
        manager = user.kv_cache_manager
        cache = manager.allocate_blocks_cache(_DESC)
        await manager.pull_blocks(kv.BlocksCacheKey(1), cache, [3, 4, 9], [1, 2, 0])
        expected = np.arange(16_000, dtype=np.uint32).astype(np.uint8).reshape(16, 1000)
        is_pulled = all(
            (cache.tensors[t][to] == expected[block] + np.uint8(t)).all()
            for t in range(4)
            for block, to in ((3, 1), (4, 2), (9, 0))
        )
        await manager.pull_cache(kv.CacheKey(1, 5), cache, 5)
        is_slot_pulled = all((cache.tensors[t][5] == 7 + t).all() for t in range(4))
        cache.tensors[0][7], cache.tensors[3][7] = 77, 88
        await manager.push_blocks(
            kv.BlocksCacheKey(1), cache, [7], [2], src_layer_range=range(1), dst_layer_range=range(1)
        )
        await manager.push_cache(kv.CacheKeyByIdAndIndex(1, cache_id, 3), cache, 7, size=10)
        layerwise = manager.transfer_cache_async(
            cache, _Ready(), [kv.TransferWithCacheKeyConfig(kv.BlocksCacheKey(1), range(2), range(2))], [7], [3]
        )
        await user.check_link_status(1)
        (link,) = user.links
        outcome: dict[str, object] = {
            "is_pulled": is_pulled,
            "is_slot_pulled": is_slot_pulled,
            "detour": link.detour,
            "layerwise": (await layerwise.synchronize(30)).name,
        }
        pipe.send("stop")
        rows = await anyio.to_thread.run_sync(pipe.recv)
        outcome["is_pushed"] = rows[0] == [77] * 1000 and rows[2] != [77] * 1000
        outcome["pool_left"] = pipe.recv()
    return outcome


class _Ready(kv.LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def main() -> None:
    """Run both sides."""
    give_up_tracing()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,))
    process.start()
    try:
        print(json.dumps(anyio.run(use, ours)))
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


if __name__ == "__main__":
    main()
