"""What bookkeeping and planning cost when there is a lot of it: caches, keys, blocks. In one process, without links."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from kvlink.benchmarks.measuring import Line
from kvlink.caches.kvcache import KvCache
from kvlink.caches.leases import ReadLease
from kvlink.caches.store import CacheStore
from kvlink.checks import check_block_array
from kvlink.config import ClusterConfig
from kvlink.geometry import CacheDesc, TensorRun
from kvlink.keys import KeyName
from kvlink.plan import plan_blocks
from kvlink.wire import Target

_DESC: Final = CacheDesc(4, (4, 512), "uint8")
_SLOTS: Final = 4
_CACHES: Final = (100, 1000, 2000, 5000, 10_000)
_BLOCKS: Final = (1, 16, 256, 4096, 65_536, 1_000_000)
_HOLDER: Final = b"a peer's life"


def caches(counts: tuple[int, ...] = _CACHES) -> Iterator[Line]:
    """Yield, for each number of live caches, microseconds of one call.

    `allocate` binds four keys; `find_key` and `find_id` are the owner's look-up for a pull, `find_address` that for a
    layer-wise push by address; `lease` is a read lease and its end, while every tenth cache is leased to somebody;
    `write_lease` asks for one that the peer has already; `free` removes four keys and gives the cache back.
    """
    most = 2 * counts[-1] + 200 * len(counts)  # what is leased stays a while
    store = CacheStore.create(most * _DESC.nbytes, 0, ClusterConfig())
    try:
        live: list[KvCache] = []
        leased: list[ReadLease] = []
        for count in counts:
            fresh = range(len(live), count)
            allocate_us = _time(fresh, lambda number: live.append(_allocate(store, number)))
            for cache in live[len(leased) * 10 :: 10]:
                entry = cache.entry()
                store.leases.open_write(_HOLDER, entry)
                leased.append(store.leases.open_read(bytes([len(leased) % 16]), entry, 0, None, float("inf")))
            some = random.Random(count).sample(range(count), min(200, count))
            entries = [live[number].entry() for number in some]
            line = {
                "scenario": "CACHES",
                "caches": count,
                "allocate_us": allocate_us,
                "find_key_us": _time(some, lambda number: store.table.find(_target(number))),
                "find_id_us": _time(some, lambda number: store.table.find(Target("id", live[number].cache_id, 0, 3))),
                "find_address_us": _time(
                    [live[number].tensor_addresses[1] for number in some[:20]], lambda place: store.locate(place)
                ),
                "lease_us": _time(entries, lambda entry: _lease(store, entry)),
                "write_lease_us": _time(entries, lambda entry: store.leases.open_write(_HOLDER, entry)),
            }
            line["free_us"] = _time(some, lambda number: _free(store, live[number], number))
            for number in some:
                live[number] = _allocate(store, number)
            yield line
        for lease in leased:
            store.leases.close_read(lease.holder, lease.number, None)
        store.leases.drop_writers(_HOLDER)
    finally:
        store.close()


def plans(counts: tuple[int, ...] = _BLOCKS) -> Iterator[Line]:
    """Yield, for each number of scattered blocks of a cache of 64 tensors, the microseconds until its extents are made.

    `check` is for both arrays, `plan` for the table of extents, both on the event loop; `make` is for the extents
    themselves, which copy threads make chunk by chunk; `plan_joined` is the plan of as many blocks in one piece.
    """
    for count in counts:
        numbers = np.random.default_rng(count)
        ours, theirs = numbers.permutation(count), numbers.permutation(count)
        run = (TensorRun(0, 0, count * 4096, 64),)
        repeats = range(max(1, min(1000, 200_000 // count)))

        def check(_: int, ours: Any = ours, theirs: Any = theirs, count: int = count) -> None:
            check_block_array("dst_blocks", ours, count, is_unique=True)
            check_block_array("src_blocks", theirs, count)

        def plan(_: int, ours: Any = ours, theirs: Any = theirs, run: Any = run) -> None:
            plan_blocks(run, run, ours, theirs, 4096)

        in_order = np.arange(count)

        def plan_joined(_: int, ours: Any = in_order, run: Any = run) -> None:
            plan_blocks(run, run, ours, ours, 4096)

        extents = plan_blocks(run, run, ours, theirs, 4096)
        check_us, plan_us = _time(repeats, check), _time(repeats, plan)
        yield {
            "scenario": "PLAN",
            "blocks": count,
            "check_us": check_us,
            "plan_us": plan_us,
            "make_us": _time([extents], lambda extents: deque(extents, maxlen=0)),
            "plan_joined_us": _time(repeats, plan_joined),
            "us_per_block": round((check_us + plan_us) / count, 4),
        }


def million_blocks(num_blocks: int = 1_000_000) -> Line:
    """Return what a paged cache of so many blocks costs: allocating it, and looking it up."""
    desc = CacheDesc(2, (num_blocks, 64), "uint8")
    store = CacheStore.create(desc.nbytes, 0, ClusterConfig())
    try:
        made: list[KvCache] = []
        name = KeyName("blocks", 0, 0)
        allocate_us = _time(range(1), lambda _: made.append(store.allocate(desc, (name,), is_blocks=True)))
        find_us = _time(range(1000), lambda _: store.table.find(Target("blocks", 0)))
        free_us = _time(made, store.deallocate)
        made.clear()
        return {
            "scenario": "CACHES",
            "caches": 1,
            "blocks": num_blocks,
            "allocate_us": allocate_us,
            "find_key_us": find_us,
            "free_us": free_us,
        }
    finally:
        store.close()


def _time(pieces: Any, call: Callable[[Any], object]) -> float:
    """Return the microseconds of one call, on average over `pieces`."""
    started = time.perf_counter()
    for piece in pieces:
        call(piece)
    return round((time.perf_counter() - started) / len(pieces) * 1e6, 3)


def _name(number: int, slot: int) -> KeyName:
    return KeyName("request", number * _SLOTS + slot, 0)


def _target(number: int) -> Target:
    return Target("request", number * _SLOTS + 3)


def _allocate(store: CacheStore, number: int) -> KvCache:
    return store.allocate(_DESC, [_name(number, slot) for slot in range(_SLOTS)], is_blocks=False)


def _lease(store: CacheStore, entry: Any) -> None:
    lease = store.leases.open_read(b"another", entry, 0, None, float("inf"))
    store.leases.close_read(b"another", lease.number, None)


def _free(store: CacheStore, cache: KvCache, number: int) -> None:
    for slot in range(_SLOTS):
        store.table.remove_key(_name(number, slot))
    store.deallocate(cache)
