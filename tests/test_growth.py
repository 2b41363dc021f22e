"""What must not grow with the number of links, caches, keys and leases: counted in calls, never timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import kvlink as kv
from kvlink.benchmarks import curves
from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.config import ClusterConfig
from kvlink.geometry import CacheDesc
from kvlink.keys import KeyName
from kvlink.wire import Target
from tests.spec.harness import D, P, linked_pair
from tests.support.inside import link_to

DESC = CacheDesc(2, (4, 512), "uint8")
FEW, MANY = 20, 200
HOLDER, OTHER = b"one life", b"another"


class Owner:
    """A store with `count` caches, each with a key, a reader and a writer."""

    def __init__(self, count: int) -> None:
        self.store = CacheStore.create(MANY * DESC.nbytes * 2, 0, ClusterConfig(is_prefaulted=False))
        self.caches: list[KvCache] = []
        for number in range(count):
            cache = self.store.allocate(DESC, (KeyName("request", number, 0),), is_blocks=False)
            self.caches.append(cache)
            entry, leases = cache.entry(), self.store.leases
            leases.open_read(OTHER, entry, 0, None, 1e9)
            leases.open_write(OTHER, entry)
        self.entry = self.caches[count // 2].entry()
        self.mine = self.store.leases.open_write(HOLDER, self.entry)

    def close(self) -> None:
        """Give everything up."""
        self.store.close()


@contextmanager
def owner_of(count: int) -> Iterator[Owner]:
    """Make one and close it."""
    owner = Owner(count)
    try:
        yield owner
    finally:
        owner.close()


def steps(call: Callable[[], object]) -> int:
    """Return how many lines and calls of Python `call` takes."""
    taken = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal taken
        taken += 1
        return count

    gc.collect()
    gc.disable()  # finalisers of other tests' objects would be counted
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(None)
        gc.enable()
    return taken


CALLS: dict[str, Callable[[Owner], object]] = {
    "a write lease that is there": lambda owner: owner.store.leases.open_write(HOLDER, owner.entry),
    "writers of a cache": lambda owner: owner.store.leases.writers_of(owner.entry),
    "whether a peer writes": lambda owner: owner.store.leases.is_writer(HOLDER),
    "readers of a peer that has gone": lambda owner: owner.store.leases.drop_readers(HOLDER),
    "writers of a peer that has gone": lambda owner: owner.store.leases.drop_writers(HOLDER),
    "quarantine of a peer": lambda owner: owner.store.leases.quarantine_all(HOLDER, 7),
    "find by key": lambda owner: owner.store.table.find(Target("request", 3)),
    "find by id": lambda owner: owner.store.table.find(Target("id", owner.entry.cache_id, 0, 0)),
    "collect": lambda owner: owner.store.collect(),
    "arrivals of a peer that has gone": lambda owner: list(owner.store.watched),
    "deallocate": lambda owner: owner.store.deallocate(owner.caches[5]),
}


@pytest.mark.parametrize("name", CALLS)
def test_work_does_not_grow_with_what_others_have(name: str) -> None:
    """Each call takes as many steps with 200 caches, keys and leases of others as with 20."""
    taken = []
    for count in (FEW, MANY):
        with owner_of(count) as owner:
            taken.append(steps(lambda owner=owner: CALLS[name](owner)))  # type: ignore[misc]  # bound in the loop
    assert taken[1] == taken[0]


def test_a_cache_is_found_by_address_without_looking_at_all() -> None:
    """Finding the cache at an address looks at one; only registered memory, which may lie anywhere, is gone through."""
    taken = []
    for count in (FEW, MANY):
        with owner_of(count) as owner:
            cache = owner.caches[count // 3]
            address = cache.tensor_addresses[1] + 700
            assert owner.store.locate(address) is cache.entry()
            taken.append(steps(lambda owner=owner, address=address: owner.store.locate(address)))  # type: ignore[misc]  # bound in the loop
    assert taken[1] - taken[0] <= 10  # the bisection's own


def test_addresses_of_caches_that_come_and_go() -> None:
    """Each live cache is found at each of its ends, also registered memory; what has ended is not found any more."""
    with owner_of(FEW) as owner:
        store = owner.store
        buffers = [bytearray(DESC.tensor_nbytes) for _ in range(2)]
        registered = store.register(DESC, buffers, (), is_blocks=False)
        live = [*owner.caches[10:], registered]
        for cache in owner.caches[:10]:
            store.leases.drop_readers(OTHER)
            store.leases.drop_writers(OTHER)
            address = cache.tensor_addresses[0]
            store.table.remove_key(next(iter(cache.entry().keys)))
            store.deallocate(cache)
            with pytest.raises(kv.CacheNotFoundError):
                store.locate(address)
        for cache in live:
            for first in cache.tensor_addresses:
                for address in (first, first + DESC.tensor_nbytes - 1):
                    assert store.locate(address) is cache.entry()
        store.deallocate(registered)
        with pytest.raises(kv.CacheNotFoundError):
            store.locate(live[0].tensor_addresses[0] - 10**9)
        again = store.allocate(DESC, (), is_blocks=False)
        assert store.locate(again.tensor_addresses[1]) is again.entry()


def test_indexes_keep_nothing() -> None:
    """When all leases have ended, however, no index of them remembers one."""
    with owner_of(FEW) as owner:
        leases = owner.store.leases
        leases.drop_readers(OTHER)
        leases.close_write(HOLDER, owner.mine)
        leases.drop_writers(OTHER)
        for index in (leases._reads, leases._writes, leases._reads_of, leases._writes_of, leases._writers):
            assert not index
        assert not leases._shared
        fresh = leases.open_write(HOLDER, owner.entry)
        assert fresh != owner.mine
        assert leases.writers_of(owner.entry) == [(HOLDER, fresh)]


async def test_idle_links_of_one_host_say_nothing() -> None:
    """The kernel tells of a death, so no heartbeat is sent or awaited, however long the silence."""
    async with linked_pair("shm") as pair:
        for cluster, peer in ((pair.decoder, P), (pair.prompt, D)):
            table = cluster._links
            assert table is not None
            link = link_to(cluster, peer)
            before = link.stats.messages_sent
            table.beat(anyio.current_time() + 1000)
            assert link.is_open
            assert link.stats.messages_sent == before


async def test_a_link_holds_few_descriptors() -> None:
    """A link holds 6 descriptors on either side: two sockets, two watches on the peer's process, and what polls them.

    Mappings need none once they are there.
    """
    import os

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with linked_pair("shm") as pair:
        linked = count()
        await pair.decoder.unlink_clusters([kv.ClusterInfo(P, pair.prompt.address)], timeout_s=10)
        while pair.prompt.links:
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.05)
        assert linked - count() <= 2 * 6


def test_the_curves_can_be_measured() -> None:
    """`kvlink bench --scale` measures bookkeeping and planning; here with numbers that are small."""
    lines = [*curves.plans((1, 100)), *curves.caches((10, 50)), curves.million_blocks(1000)]
    assert [line["scenario"] for line in lines] == ["PLAN"] * 2 + ["CACHES"] * 3
    assert all(value > 0 for line in lines for name, value in line.items() if name.endswith("_us"))


async def test_a_link_keeps_nothing_of_caches_that_it_has_pushed_into_once_they_have_ended() -> None:
    """A hundred caches, each pushed into by its id and deallocated: the writer remembers none of them."""
    async with linked_pair("shm", roles=(kv.Role.MIX, kv.Role.MIX)) as pair:
        link = link_to(pair.decoder, P)
        ours = pair.reader.allocate_blocks_cache(DESC)
        for _ in range(100):
            theirs = pair.owner.allocate_blocks_cache(DESC)
            await pair.reader.push_blocks(kv.CacheKeyByIdAndIndex(P, theirs.cache_id), ours, [0], [0])
            pair.owner.deallocate_cache(theirs)
        await pair.flush()
        assert len(link.grants) == 0
        pair.reader.deallocate_cache(ours)
