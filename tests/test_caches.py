"""The owner's table of caches and its leases: who lives how long, and whose memory is free when.

Sections are the spec's. Peers are played by `Owner.pull`, which does what a served pull does to the table; state words
are read through a mapping of their own, as a peer reads them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvlink.caches.leases import LeaseBook, ReadLease
from kvlink.caches.table import CacheEntry, CacheTable
from kvlink.errors import CacheNotFoundError, OutOfMemoryError, ParameterError, StatusCode
from kvlink.geometry import CacheDesc, CacheGeometry, TensorRun
from kvlink.keys import ABSENT, BlocksCacheKey, CacheKey, KeyName
from kvlink.memory.pool import Bytes, Pool, Segment
from kvlink.memory.stateregion import ENDED, StateRegion
from kvlink.wire import Target

PAGE: Final = 4096
TENSOR_NBYTES: Final = 512
DECODER: Final = b"decoder"
OTHER: Final = b"other"
FOREVER: Final = 1e9


def request(number: int, model: int = 0) -> KeyName:
    return CacheKey(0, number, model).name


def prefix(number: int, model: int = 0) -> KeyName:
    return CacheKey(0, ABSENT, model, number).name


def blocks(model: int = 0) -> KeyName:
    return BlocksCacheKey(0, model).name


def by_key(name: KeyName) -> Target:
    return Target(name.namespace, name.id, name.model_id)


def by_id(cache_id: int, slot: int = 0) -> Target:
    return Target("id", cache_id, 0, slot)


class Owner:
    """A cluster's memory and table, without the cluster: a pool, state words, and what was freed, in order."""

    def __init__(self, pool_nbytes: int = 64 * PAGE) -> None:
        self._segments = [Segment.create("kvlink-test-pool", pool_nbytes), Segment.create("kvlink-test-state", PAGE)]
        self.pool = Pool(self._segments[0], 0)
        self.state = StateRegion(self._segments[1])
        self._segments.append(Segment.attach(self._segments[1].open_read_only(), PAGE))
        self.words: NDArray[np.uint64] = self._segments[2].memory.view(np.uint64)
        self.table = CacheTable(self.state, self._free)
        self.table.on_ended = self._on_ended
        self.leases = LeaseBook(self.table, self.state, max_reads_per_holder=250)
        self.given: list[ReadLease] = []
        self.ended: list[int] = []
        self.freed: list[int] = []

    def allocate(
        self,
        names: Sequence[KeyName | None] = (),
        *,
        num_tensors: int = 4,
        num_slots: int = 4,
        is_consumable: bool = True,
    ) -> CacheEntry:
        """Enter a cache as the store does, but for views."""
        self.table.check_names(names)
        desc = CacheDesc(num_tensors, (num_slots, TENSOR_NBYTES // num_slots), "int8")
        offset, stride = self.pool.allocate(desc.tensor_nbytes, num_tensors)
        run = TensorRun(0, offset, stride, num_tensors)
        geometry = CacheGeometry(num_tensors, num_slots, desc.slot_nbytes, "int8", None, False, (run,))
        return self.table.add(desc, geometry, names, is_consumable=is_consumable)

    def view(self, entry: CacheEntry) -> Bytes:
        """Return the root of all views on a cache, and have the table watch it."""
        run = entry.geometry.runs[0]
        root = self.pool.segment.root(run.offset, run.stride * run.num_tensors)
        self.table.watch_views(entry, root)
        return root

    def open_read(
        self, holder: bytes, entry: CacheEntry, slot: int, name: KeyName | None, expires_at: float
    ) -> ReadLease:
        """Give a read lease, and remember it for `_free`."""
        lease = self.leases.open_read(holder, entry, slot, name, expires_at)
        self.given.append(lease)
        return lease

    def pull(self, target: Target, tensors: tuple[int, int] | None = (0, 4)) -> CacheEntry:
        """Do what a pull does here: find and lease, then give back with what was read; None as "with offset"."""
        entry, slot, name = self.table.find(target)
        lease = self.open_read(DECODER, entry, slot, name, FOREVER)
        self.leases.close_read(DECODER, lease.number, tensors)
        return entry

    def has(self, target: Target) -> bool:
        """Whether a peer would find this now."""
        try:
            self.table.find(target)
        except CacheNotFoundError:
            return False
        return True

    def is_valid(self, entry: CacheEntry) -> bool:
        """Whether a peer that was told of this cache would still trust what it reads there."""
        return int(self.words[entry.word]) == entry.generation

    def is_running(self, lease: ReadLease) -> bool:
        """Whether a peer that was given this lease would still trust what it reads under it."""
        return int(self.words[lease.word]) == lease.generation

    def is_freed(self, entry: CacheEntry) -> bool:
        return entry.cache_id in self.freed

    def close(self) -> None:
        self.words = np.empty(0, np.uint64)
        self.state.close()
        for segment in self._segments:
            segment.close()

    def _on_ended(self, entry: CacheEntry) -> None:
        assert entry.cache_id not in self.ended
        assert not self.has(by_id(entry.cache_id))
        assert not self.is_valid(entry), "the state word changes before anything else"
        assert not self.is_freed(entry)
        self.ended.append(entry.cache_id)

    def _free(self, entry: CacheEntry) -> None:
        assert not self.is_valid(entry), "the state word changes before the memory may be used again"
        assert not any(self.is_running(lease) for lease in self.given if lease.entry is entry)
        assert self.ended.count(entry.cache_id) == 1
        assert not self.is_freed(entry), "freed twice"
        self.freed.append(entry.cache_id)
        self.pool.free(entry.geometry.runs[0].offset)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


# ---- section 5.1: identity


def test_cache_ids_count_from_one_and_do_not_return(owner: Owner) -> None:
    """Ids start at 1 and are never used twice, also after their cache has gone (section 5.1)."""
    ids = []
    for _ in range(3):
        entry = owner.allocate()
        ids.append(entry.cache_id)
        owner.table.drop_id(entry.cache_id)
    assert ids == [1, 2, 3]
    assert owner.freed == [1, 2, 3]
    assert len(owner.table) == 0


def test_namespaces_are_apart(owner: Owner) -> None:
    """A request, a prefix and a blocks key of one number are three names, and so are models (section 1.4)."""
    names = [request(0), prefix(0), blocks(0), request(0, 1), prefix(0, 1), blocks(1)]
    entries = [owner.allocate([name]) for name in names]
    assert [owner.table.find(by_key(name))[0] for name in names] == entries


def test_key_i_is_bound_to_slot_i(owner: Owner) -> None:
    """Each key finds its slot; a placeholder's slot has no key; a request's name is what a pull would release."""
    names = [request(7), None, prefix(9), request(8)]
    entry = owner.allocate(names)
    assert owner.table.find(by_key(request(7))) == (entry, 0, request(7))
    assert owner.table.find(by_key(prefix(9))) == (entry, 2, None)
    assert owner.table.find(by_key(request(8))) == (entry, 3, request(8))
    found = [owner.table.find(by_id(entry.cache_id, slot)) for slot in range(4)]
    assert found == [(entry, 0, request(7)), (entry, 1, None), (entry, 2, None), (entry, 3, request(8))]


def test_a_key_that_occurs_twice_stays_with_its_last_slot(owner: Owner) -> None:
    """Of the same key twice in one list the last one counts, and releasing it releases all of it (section 6.2)."""
    entry = owner.allocate([request(7), request(7), None])
    assert owner.table.find(by_key(request(7))) == (entry, 1, request(7))
    assert owner.table.find(by_id(entry.cache_id, 0)) == (entry, 0, None)
    owner.table.drop_id(entry.cache_id)
    owner.pull(by_key(request(7)))
    assert owner.is_freed(entry)


def test_a_key_that_is_bound_refuses_another_cache(owner: Owner) -> None:
    """A second cache under a live key is refused, naming key and cache, and changes nothing (section 6.2)."""
    entry = owner.allocate([request(7)])
    for names in ([request(7)], [request(1), None, request(7)]):
        with pytest.raises(ParameterError, match="request 7 of model 0 is already bound to cache 1") as caught:
            owner.table.add(entry.desc, entry.geometry, names)
        assert caught.value.status is StatusCode.LLM_PARAM_INVALID
    assert not owner.has(by_key(request(1)))
    assert len(owner.table) == 1
    assert list(owner.table) == [entry]
    assert owner.table.find(by_key(request(7)))[0] is entry
    assert np.count_nonzero(owner.words) == 1


# ---- section 5.2: the lifetime rule


def test_deallocate_without_keys_frees_now(owner: Owner) -> None:
    """No key is left: the memory returns at once and the id is gone (section 5.2)."""
    entry = owner.allocate()
    assert owner.is_valid(entry)
    owner.table.drop_id(entry.cache_id)
    assert owner.freed == [entry.cache_id]
    assert not owner.is_valid(entry)
    assert not owner.has(by_id(entry.cache_id))
    assert owner.pool.used_nbytes == 0


def test_deallocate_with_keys_keeps_the_cache_for_peers(owner: Owner) -> None:
    """Keys are left: the memory stays, and the cache can be pulled by key and by id (section 5.2)."""
    entry = owner.allocate([request(0), request(1)])
    owner.table.drop_id(entry.cache_id)
    assert owner.is_valid(entry)
    assert owner.has(by_key(request(0)))
    assert owner.has(by_id(entry.cache_id, 1))
    assert owner.table.get(entry.cache_id) is entry
    assert owner.freed == []


def test_the_last_key_after_deallocate_frees_now(owner: Owner) -> None:
    """The reference that goes last frees, whichever it is: here the second key (section 5.2)."""
    entry = owner.allocate([request(0), request(1)])
    owner.table.drop_id(entry.cache_id)
    owner.table.remove_key(request(0))
    assert owner.is_valid(entry)
    assert owner.freed == []
    owner.table.remove_key(request(1))
    assert not owner.is_valid(entry)
    assert owner.freed == [entry.cache_id]


def test_the_last_key_before_deallocate_leaves_the_id(owner: Owner) -> None:
    """Without keys the cache is addressed by id alone, until it is deallocated (section 5.2)."""
    entry = owner.allocate([request(0)])
    owner.table.remove_key(request(0))
    assert not owner.has(by_key(request(0)))
    assert owner.has(by_id(entry.cache_id))
    assert owner.is_valid(entry)
    owner.table.drop_id(entry.cache_id)
    assert owner.freed == [entry.cache_id]


def test_releasing_twice_is_a_no_op_or_not_found(owner: Owner) -> None:
    """Removing a key again, or one that never was, does nothing; pulling it again finds nothing (section 5.2)."""
    entry = owner.allocate([request(0)])
    owner.table.remove_key(request(0))
    owner.table.remove_key(request(0))
    owner.table.remove_key(request(99))
    with pytest.raises(CacheNotFoundError):
        owner.pull(by_key(request(0)))
    assert owner.is_valid(entry)


def test_deallocating_twice_is_a_no_op(owner: Owner) -> None:
    """A second time, or for an id that never was, nothing happens (sections 6.3 and 19)."""
    entry = owner.allocate([request(0)])
    for cache_id in (entry.cache_id, entry.cache_id, 99, 0, -1):
        owner.table.drop_id(cache_id)
    assert owner.is_valid(entry)
    owner.table.remove_key(request(0))
    owner.table.drop_id(entry.cache_id)
    assert owner.freed == [entry.cache_id]


def test_a_blocks_key_vanishes_with_the_id(owner: Owner) -> None:
    """Deallocating a blocks cache unbinds its key and frees the memory at once; another may follow (section 5.2)."""
    entry = owner.allocate([blocks()])
    with pytest.raises(ParameterError):
        owner.table.check_names([blocks()])
    owner.table.drop_id(entry.cache_id)
    assert not owner.has(by_key(blocks()))
    assert owner.freed == [entry.cache_id]
    owner.table.check_names([blocks()])
    again = owner.allocate([blocks()])
    assert owner.table.find(by_key(blocks()))[0] is again


def test_memory_of_the_caller_ends_with_the_id(owner: Owner) -> None:
    """A registered cache is never consumed by pulls, and giving it up unbinds all of its keys (section 9.1)."""
    entry = owner.allocate([request(0), prefix(1)], is_consumable=False)
    for _ in range(2):
        owner.pull(by_key(request(0)))
        owner.pull(by_id(entry.cache_id, 0))
    assert owner.has(by_key(request(0)))
    owner.table.drop_id(entry.cache_id)
    assert not owner.has(by_key(request(0)))
    assert not owner.has(by_key(prefix(1)))
    assert owner.freed == [entry.cache_id]


def test_four_slots_two_keys_and_a_placeholder(owner: Owner) -> None:
    """The test of section 5.2: both keys resolve after deallocate; the cache lives until both are removed."""
    entry = owner.allocate([request(0), None, request(2)])
    owner.table.drop_id(entry.cache_id)
    assert owner.table.find(by_key(request(0)))[:2] == (entry, 0)
    assert owner.table.find(by_key(request(2)))[:2] == (entry, 2)
    owner.table.remove_key(request(0))
    assert list(owner.table) == [entry]
    assert entry.keys == {request(2): 2}
    owner.table.remove_key(request(2))
    assert list(owner.table) == []
    assert owner.pool.free_nbytes == owner.pool.nbytes


def test_the_state_word_changes_exactly_when_the_last_reference_goes(owner: Owner) -> None:
    """Neither a key that is left nor the id lets it change early; pins, leases and views do not let it change late."""
    entry = owner.allocate([request(0), request(1)])
    view = owner.view(entry)
    lease = owner.leases.open_write(DECODER, entry)
    reading = owner.open_read(DECODER, entry, 0, None, FOREVER)
    owner.table.pin(entry)
    releases: list[Callable[[], None]] = [
        lambda: owner.table.remove_key(request(0)),
        lambda: owner.table.drop_id(entry.cache_id),
        lambda: owner.table.remove_key(request(1)),
    ]
    for end_one_reference in releases:
        assert owner.is_valid(entry)
        assert owner.ended == []
        end_one_reference()
    assert not owner.is_valid(entry)
    assert int(owner.words[entry.word]) == ENDED
    assert owner.ended == [entry.cache_id]
    assert owner.freed == []
    owner.table.unpin(entry)
    owner.leases.close_write(DECODER, lease)
    owner.leases.close_read(DECODER, reading.number, None)
    assert owner.freed == []
    del view
    owner.table.collect()
    assert owner.freed == [entry.cache_id]


# ---- section 5.3: what releases a key


def test_a_full_pull_releases_its_key(owner: Owner) -> None:
    """All tensors were delivered: the key goes, and only that one (section 5.3)."""
    entry = owner.allocate([request(0), request(1)])
    owner.pull(by_key(request(0)))
    assert not owner.has(by_key(request(0)))
    assert owner.has(by_key(request(1)))
    assert owner.is_valid(entry)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_the_last_missing_tensor_releases_the_key(owner: Owner, order: list[int]) -> None:
    """Layer by layer, in any order: the key goes with the last tensor that was missing (section 5.3)."""
    owner.allocate([request(0)])
    for count, tensor in enumerate(order):
        assert owner.has(by_key(request(0))), count
        owner.pull(by_key(request(0)), (tensor, tensor + 1))
    assert not owner.has(by_key(request(0)))


def test_the_same_tensors_again_release_nothing(owner: Owner) -> None:
    """Layers 0 and 1 twice are not layers 2 and 3 (section 5.3)."""
    owner.allocate([request(0)])
    for _ in range(3):
        owner.pull(by_key(request(0)), (0, 2))
    assert owner.has(by_key(request(0)))
    owner.pull(by_key(request(0)), (1, 4))
    assert not owner.has(by_key(request(0)))


def test_slots_are_counted_apart(owner: Owner) -> None:
    """What was read of one slot does not count for another slot of the cache."""
    owner.allocate([request(0), request(1)])
    owner.pull(by_key(request(0)), (0, 2))
    owner.pull(by_key(request(1)), (2, 4))
    assert owner.has(by_key(request(0)))
    assert owner.has(by_key(request(1)))
    owner.pull(by_key(request(0)), (2, 4))
    assert not owner.has(by_key(request(0)))
    assert owner.has(by_key(request(1)))


def test_a_key_that_is_bound_again_begins_unread(owner: Owner) -> None:
    """What was read under an earlier binding of a key does not count for its next cache."""
    first = owner.allocate([request(0)])
    owner.pull(by_key(request(0)), (0, 2))
    owner.table.remove_key(request(0))
    second = owner.allocate([request(0)])
    owner.pull(by_key(request(0)), (2, 4))
    assert owner.table.find(by_key(request(0)))[0] is second
    assert owner.is_valid(first)


def test_what_never_releases_a_key(owner: Owner) -> None:
    """Prefix pulls, blocks pulls, pulls with an offset, and writing leave every key alone (section 5.3)."""
    entry = owner.allocate([request(0), prefix(1), None, blocks()])
    for _ in range(3):
        owner.pull(by_key(prefix(1)))
        owner.pull(by_id(entry.cache_id, 1))
        owner.pull(by_key(blocks()))
        owner.pull(by_id(entry.cache_id, 2))
        owner.pull(by_key(request(0)), None)
        owner.leases.close_write(DECODER, owner.leases.open_write(DECODER, entry))
        owner.open_read(DECODER, entry, 0, request(0), 5.0)
        owner.leases.expire(5.0)
        owner.open_read(DECODER, entry, 0, request(0), FOREVER)
        owner.leases.drop_readers(DECODER)
    assert set(entry.keys) == {request(0), prefix(1), blocks()}


def test_a_late_report_releases_nothing_that_came_later(owner: Owner) -> None:
    """A reader that reports after its key was removed and bound to another cache does not release the new one."""
    old = owner.allocate([request(0)])
    found = owner.table.find(by_key(request(0)))
    lease = owner.open_read(DECODER, *found, FOREVER)
    owner.table.remove_key(request(0))
    new = owner.allocate([request(0)])
    owner.leases.close_read(DECODER, lease.number, (0, 4))
    assert owner.table.find(by_key(request(0)))[0] is new
    assert owner.is_valid(old)


def test_two_readers_of_one_key(owner: Owner) -> None:
    """Of two pulls at the same time the first report releases the key, the second does nothing, neither is cut off."""
    entry = owner.allocate([request(0)])
    owner.table.drop_id(entry.cache_id)
    leases = [owner.open_read(holder, *owner.table.find(by_key(request(0))), FOREVER) for holder in (DECODER, OTHER)]
    owner.leases.close_read(DECODER, leases[0].number, (0, 4))
    assert not owner.has(by_key(request(0)))
    assert owner.freed == []
    owner.leases.close_read(OTHER, leases[1].number, (0, 4))
    assert owner.freed == [entry.cache_id]


def test_a_report_of_tensors_that_are_not_there_is_bounded_work() -> None:
    """A peer that claims to have read 2**32 - 1 tensors of a cache that has 4 costs no more than one that read 4."""
    # In a process of its own: a loop in C over that many numbers cannot be interrupted from within.
    code = (
        "from tests.test_caches import *\n"
        "owner = Owner()\n"
        "owner.allocate([request(0)])\n"
        "owner.pull(by_key(request(0)), (0, 2**32 - 1))\n"
        "assert not owner.has(by_key(request(0)))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=15)


# ---- section 5.4: what is not there


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (by_key(request(5)), "request 5 of model 0 is not bound to any cache"),
        (by_key(prefix(0)), "prefix 0 of model 0 is not bound"),
        (by_key(request(0, 1)), "request 0 of model 1 is not bound"),
        (by_key(blocks(3)), "blocks key of model 3 is not bound"),
        (by_id(2), "no cache has the id 2"),
        (by_id(0), "no cache has the id 0"),
        (by_id(1, 4), "cache 1 has no slot 4, only 0 to 3"),
        (Target("id", 1, 0, 2**32 - 1), "cache 1 has no slot 4294967295"),
        (Target("no such namespace", 0), "no such namespace 0 of model 0 is not bound"),
    ],
    ids=repr,
)
def test_what_is_not_there_is_refused_at_once(owner: Owner, target: Target, text: str) -> None:
    """An unknown key, id, slot or namespace raises at once, by name; nobody waits for a key (section 5.4)."""
    owner.allocate([request(0)])
    with pytest.raises(CacheNotFoundError, match=text) as caught:
        owner.table.find(target)
    assert caught.value.status is StatusCode.LLM_KV_CACHE_NOT_EXIST


def test_getting_an_ended_cache_by_id_raises(owner: Owner) -> None:
    """A handle's id is of no more use once the cache has ended."""
    entry = owner.allocate()
    assert owner.table.get(entry.cache_id) is entry
    owner.table.drop_id(entry.cache_id)
    with pytest.raises(CacheNotFoundError, match="no cache has the id 1"):
        owner.table.get(entry.cache_id)


# ---- section 7: the worked examples


def test_example_1(owner: Owner) -> None:
    """Keys r0, pad, r2; r0 is pulled and goes; deallocate is deferred; the pull of r2 frees (section 7, 1)."""
    entry = owner.allocate([request(0), None, request(2)])
    owner.pull(by_key(request(0)))
    assert not owner.has(by_key(request(0)))
    assert owner.has(by_key(request(2)))
    owner.table.drop_id(entry.cache_id)
    assert owner.freed == []
    owner.pull(by_key(request(2)))
    assert owner.freed == [entry.cache_id]


def test_example_2(owner: Owner) -> None:
    """r0 is deallocated and pulled twice: the first succeeds, the second finds nothing (section 7, 2)."""
    entry = owner.allocate([request(0)])
    owner.table.drop_id(entry.cache_id)
    owner.pull(by_key(request(0)))
    with pytest.raises(CacheNotFoundError):
        owner.pull(by_key(request(0)))
    assert owner.freed == [entry.cache_id]


def test_example_3(owner: Owner) -> None:
    """A pull with an offset, even 0, keeps the key; a plain one releases it (section 7, 3)."""
    owner.allocate([request(0)])
    owner.pull(by_key(request(0)), None)
    assert owner.has(by_key(request(0)))
    owner.pull(by_key(request(0)))
    assert not owner.has(by_key(request(0)))


def test_example_4(owner: Owner) -> None:
    """4 tensors, 2 a layer: layer 0, layer 0, layer 1 releases with the third; 1 a layer takes four (section 7, 4)."""
    owner.allocate([request(0), request(1)])
    for tensors, is_left in (((0, 2), True), ((0, 2), True), ((2, 4), False)):
        owner.pull(by_key(request(0)), tensors)
        assert owner.has(by_key(request(0))) is is_left
    for tensor in range(4):
        assert owner.has(by_key(request(1)))
        owner.pull(by_key(request(1)), (tensor, tensor + 1))
    assert not owner.has(by_key(request(1)))


def test_example_5(owner: Owner) -> None:
    """A prefix is pulled any number of times; the owner must remove it (section 7, 5)."""
    entry = owner.allocate([prefix(5)])
    owner.table.drop_id(entry.cache_id)
    for _ in range(5):
        owner.pull(by_key(prefix(5)))
    assert owner.freed == []
    owner.table.remove_key(prefix(5))
    assert owner.freed == [entry.cache_id]


def test_example_6(owner: Owner) -> None:
    """A pull by id and slot 0 releases r0; by id and slot 1 it changes nothing (section 7, 6)."""
    entry = owner.allocate([request(0), None, request(2)])
    owner.pull(by_id(entry.cache_id, 1))
    assert set(entry.keys) == {request(0), request(2)}
    owner.pull(by_id(entry.cache_id, 0))
    assert set(entry.keys) == {request(2)}


def test_example_7(owner: Owner) -> None:
    """r0 may be bound again once it was pulled, though its cache lives; before that it is refused (section 7, 7)."""
    entry = owner.allocate([request(0)])
    with pytest.raises(ParameterError):
        owner.table.check_names([request(0)])
    owner.pull(by_key(request(0)))
    owner.table.check_names([request(0)])
    again = owner.allocate([request(0)])
    assert owner.table.find(by_key(request(0)))[0] is again
    assert owner.is_valid(entry)


def test_example_8() -> None:
    """In a pool of one cache a second is out of memory until deallocate and the last key have gone (section 7, 8)."""
    owner = Owner(PAGE)
    try:
        entry = owner.allocate([request(0)], num_tensors=8)
        releases: list[Callable[[], None]] = [
            lambda: owner.table.drop_id(entry.cache_id),
            lambda: owner.table.remove_key(request(0)),
        ]
        for release in releases:
            with pytest.raises(OutOfMemoryError):
                owner.allocate([request(1)], num_tensors=8)
            assert not owner.has(by_key(request(1)))
            release()
        owner.allocate([request(1)], num_tensors=8)
    finally:
        owner.close()


def test_example_9(owner: Owner) -> None:
    """After a key is removed a pull of it finds nothing, and other keys of the cache still work (section 7, 9)."""
    owner.allocate([request(0), request(1)])
    owner.table.remove_key(request(0))
    with pytest.raises(CacheNotFoundError):
        owner.pull(by_key(request(0)))
    owner.pull(by_key(request(1)))


def test_example_10(owner: Owner) -> None:
    """The end of every link, as before a switch of roles, leaves keys bound and caches valid (section 7, 10)."""
    entry = owner.allocate([request(0)])
    owner.open_read(DECODER, *owner.table.find(by_key(request(0))), FOREVER)
    owner.leases.open_write(DECODER, entry)
    owner.leases.drop_readers(DECODER)
    owner.leases.drop_writers(DECODER)
    assert owner.is_valid(entry)
    assert owner.pull(by_key(request(0))) is entry


# ---- kvlink's own: pins, leases, views


def test_a_pin_defers_the_real_free(owner: Owner) -> None:
    """Memory in use is not freed when its cache ends, and is freed with the last pin; nobody finds it meanwhile."""
    entry = owner.allocate([request(0)])
    owner.table.pin(entry)
    owner.table.pin(entry)
    owner.table.remove_key(request(0))
    owner.table.drop_id(entry.cache_id)
    assert not owner.is_valid(entry)
    assert not owner.has(by_id(entry.cache_id))
    assert owner.table.is_waiting(entry)
    owner.table.unpin(entry)
    assert owner.freed == []
    assert owner.table.num_waiting == 1
    owner.table.unpin(entry)
    assert owner.freed == [entry.cache_id]
    assert not owner.table.is_waiting(entry)
    assert owner.table.num_waiting == 0


def test_unpinning_a_live_cache_frees_nothing(owner: Owner) -> None:
    """Pins are no references: without one a cache that is held stays."""
    entry = owner.allocate()
    owner.table.pin(entry)
    owner.table.unpin(entry)
    assert owner.is_valid(entry)
    assert owner.freed == []
    assert not owner.table.is_waiting(entry)


def test_a_view_keeps_the_memory(owner: Owner) -> None:
    """Views of views, of another type, sliced, or as a buffer keep it; when the last has died it is freed."""
    entry = owner.allocate()
    root = owner.view(entry)
    views = [root.view(np.float16)[5:9], np.ndarray((2, 4), np.int8, root, 512)[1:].T, root.data[3:5]]
    del root
    owner.table.drop_id(entry.cache_id)
    assert not owner.is_valid(entry)
    while views:
        owner.table.collect()
        assert owner.freed == []
        assert owner.table.num_waiting == 1
        views.pop()
    assert owner.freed == [], "the death of a view is taken note of by `collect`"
    owner.table.collect()
    assert owner.freed == [entry.cache_id]


def test_views_that_died_before_the_end_keep_nothing(owner: Owner) -> None:
    """A cache whose views are gone already is freed as it ends, whether or not their death was noted before."""
    for is_noted in (True, False):
        entry = owner.allocate()
        view = owner.view(entry)
        del view
        if is_noted:
            owner.table.collect()
        owner.table.drop_id(entry.cache_id)
        assert owner.is_freed(entry)
        owner.table.collect()
    assert owner.freed == [1, 2]


def test_a_view_and_a_pin_both_keep_the_memory(owner: Owner) -> None:
    """The one that goes last frees, whichever it is."""
    for is_view_last in (True, False):
        entry = owner.allocate()
        view: Bytes | None = owner.view(entry)
        owner.table.pin(entry)
        owner.table.drop_id(entry.cache_id)
        if is_view_last:
            owner.table.unpin(entry)
        else:
            view = None
        owner.table.collect()
        assert not owner.is_freed(entry)
        if is_view_last:
            view = None
        else:
            owner.table.unpin(entry)
        del view
        owner.table.collect()
        assert owner.is_freed(entry)


def test_a_leased_reader_may_finish(owner: Owner) -> None:
    """A cache that ends during leased reads is valid no more, but each lease runs on, and the memory stays for them."""
    entry = owner.allocate([request(0)])
    found = owner.table.find(by_key(request(0)))
    leases = [owner.open_read(holder, *found, FOREVER) for holder in (DECODER, OTHER)]
    owner.table.remove_key(request(0))
    owner.table.drop_id(entry.cache_id)
    assert owner.ended == [entry.cache_id]
    assert not owner.is_valid(entry)
    assert not owner.has(by_id(entry.cache_id))
    for lease in leases:
        assert owner.is_running(lease)
        assert owner.freed == []
        owner.leases.close_read(lease.holder, lease.number, (0, 4))
        assert not owner.is_running(lease)
    assert owner.freed == [entry.cache_id]
    assert owner.ended == [entry.cache_id]


def test_a_lost_reader_is_told_by_its_own_word(owner: Owner) -> None:
    """When its link ends a reader's leases end, not those of others, and before the memory can be used again."""
    entry = owner.allocate()
    lost = [owner.open_read(DECODER, entry, slot, None, FOREVER) for slot in range(2)]
    other = owner.open_read(OTHER, entry, 0, None, FOREVER)
    owner.table.drop_id(entry.cache_id)
    owner.leases.drop_readers(DECODER)
    assert not any(map(owner.is_running, lost))
    assert owner.is_running(other)
    assert owner.freed == []


def test_words_of_leases_and_caches_are_never_shared(owner: Owner) -> None:
    """Each live cache and each open lease has a word of its own; all of them are used again."""
    for _ in range(3):
        entry = owner.allocate([request(0)])
        leases = [owner.open_read(DECODER, entry, 0, None, FOREVER) for _ in range(3)]
        later = owner.allocate()
        assert {entry.word, later.word, *(lease.word for lease in leases)} == set(range(5))
        for lease in leases:
            owner.leases.close_read(DECODER, lease.number, None)
            owner.leases.close_read(DECODER, lease.number, None)
        owner.table.remove_key(request(0))
        for cache in (entry, later, entry):
            owner.table.drop_id(cache.cache_id)
    assert not owner.words.any()


def test_a_lease_without_a_word_is_not_given(owner: Owner) -> None:
    """When all state words are in use a lease is refused, and the cache is not pinned for it."""
    entry = owner.allocate()
    for _ in range(owner.state.capacity - 1):
        owner.state.begin()
    with pytest.raises(OutOfMemoryError, match="max_caches"):
        owner.open_read(DECODER, entry, 0, None, FOREVER)
    assert owner.leases.num_reads == 0
    owner.table.drop_id(entry.cache_id)
    assert owner.freed == [entry.cache_id]


def test_a_silent_reader_defers_nothing_for_ever(owner: Owner) -> None:
    """A read lease ends when its time is up, not earlier; what the reader says later is passed over."""
    entry = owner.allocate([request(0)])
    lease = owner.open_read(DECODER, *owner.table.find(by_key(request(0))), 10.0)
    owner.leases.expire(9.999)
    assert owner.leases.num_reads == 1
    assert owner.is_running(lease)
    owner.leases.expire(10.0)
    assert owner.leases.num_reads == 0
    assert not owner.is_running(lease)
    owner.leases.close_read(DECODER, lease.number, (0, 4))
    assert owner.has(by_key(request(0)))
    owner.table.drop_id(entry.cache_id)
    owner.table.remove_key(request(0))
    assert owner.freed == [entry.cache_id]


def test_a_write_lease_does_not_expire(owner: Owner) -> None:
    """Time and the end of reading do not end it: a late write could not be undone."""
    entry = owner.allocate()
    lease = owner.leases.open_write(DECODER, entry)
    owner.table.drop_id(entry.cache_id)
    owner.leases.expire(1e18)
    owner.leases.drop_readers(DECODER)
    owner.leases.close_read(DECODER, lease, None)
    assert owner.freed == []
    assert owner.leases.writers_of(entry) == [(DECODER, lease)]
    owner.leases.close_write(DECODER, lease)
    assert owner.freed == [entry.cache_id]


def test_a_writer_has_one_lease_per_cache(owner: Owner) -> None:
    """Asking again gives the same lease, which one answer ends; another writer or cache has another."""
    one, two = owner.allocate(), owner.allocate()
    lease = owner.leases.open_write(DECODER, one)
    assert owner.leases.open_write(DECODER, one) == lease
    assert len({lease, owner.leases.open_write(OTHER, one), owner.leases.open_write(DECODER, two)}) == 3
    assert owner.leases.num_writes == 3
    owner.leases.close_write(DECODER, lease)
    assert [holder for holder, _ in owner.leases.writers_of(one)] == [OTHER]
    assert owner.leases.is_writer(DECODER)
    owner.leases.drop_writers(DECODER)
    assert not owner.leases.is_writer(DECODER)
    assert owner.leases.num_writes == 1


def test_a_lease_is_its_holders(owner: Owner) -> None:
    """Another peer cannot end it, nor can it be ended twice; an unknown number is passed over."""
    entry = owner.allocate([request(0)])
    reading = owner.open_read(DECODER, *owner.table.find(by_key(request(0))), FOREVER)
    writing = owner.leases.open_write(DECODER, entry)
    owner.leases.close_read(OTHER, reading.number, (0, 4))
    owner.leases.close_write(OTHER, writing)
    owner.leases.close_read(DECODER, writing, None)
    owner.leases.close_write(DECODER, reading.number)
    owner.leases.close_read(DECODER, 99, (0, 4))
    owner.leases.drop_readers(OTHER)
    owner.leases.drop_writers(OTHER)
    assert (owner.leases.num_reads, owner.leases.num_writes) == (1, 1)
    assert owner.has(by_key(request(0)))
    for _ in range(2):
        owner.leases.close_read(DECODER, reading.number, None)
        owner.leases.close_write(DECODER, writing)
    assert entry.pins == 0


# ---- state words


def test_generations_and_words(owner: Owner) -> None:
    """A word is used again, a generation never: what a peer was told of an ended cache is never true again."""
    told = []
    for _ in range(5):
        entry = owner.allocate()
        told.append((entry.word, entry.generation))
        owner.table.drop_id(entry.cache_id)
        assert all(int(owner.words[word]) != generation for word, generation in told)
    assert len({word for word, _ in told}) == 1
    assert len({generation for _, generation in told}) == 5
    assert all(generation != ENDED for _, generation in told)


def test_there_are_as_many_words_as_fit(owner: Owner) -> None:
    """One more is out of memory and names the setting; after one has ended there is room for one again."""
    assert owner.state.capacity == PAGE // 8
    words = [owner.state.begin()[0] for _ in range(owner.state.capacity)]
    assert sorted(words) == list(range(owner.state.capacity))
    with pytest.raises(OutOfMemoryError, match="max_caches"):
        owner.state.begin()
    with pytest.raises(OutOfMemoryError):
        owner.allocate([request(0)])
    assert not owner.has(by_key(request(0)))
    owner.state.end(17)
    word, generation = owner.state.begin()
    assert (word, generation) == (17, owner.state.capacity + 1)
    assert int(owner.words[17]) == generation


def test_closing_ends_everything(owner: Owner) -> None:
    """When the cluster closes no word is true any more, for every peer that has them mapped."""
    entries = [owner.allocate() for _ in range(3)]
    assert all(owner.is_valid(entry) for entry in entries)
    owner.state.end_all()
    assert not owner.words.any()
    owner.state.close()
    owner.state.close()
    assert not owner.words.any()


# ---- all of it against a model

NAMES: Final = [request(0), request(1), prefix(0), blocks(0)]
NUM_TENSORS: Final = 3
NUM_SLOTS: Final = 3


@dataclass
class ModelLease:
    """A lease as the model knows it."""

    holder: bytes
    cache: ModelCache
    slot: int = 0
    name: KeyName | None = None
    expires_at: float = FOREVER
    is_over: bool = False
    number: int = 0
    word: tuple[int, int] = (0, 0)


@dataclass
class ModelCache:
    """A cache as the model knows it: what refers to it, and what uses it."""

    entry: CacheEntry
    names: dict[KeyName, int]
    is_consumable: bool
    is_held: bool = True
    pins: int = 0
    view: Bytes | None = None
    is_view_unnoticed: bool = False
    read: dict[KeyName, set[int]] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        return self.is_held or bool(self.names)

    def take_away(self, name: KeyName) -> None:
        self.names.pop(name, None)
        self.read.pop(name, None)


class AgainstModel(RuleBasedStateMachine):
    """The model keeps lists and looks at all of them each time."""

    caches: Bundle[ModelCache] = Bundle("caches")
    reads: Bundle[ModelLease] = Bundle("reads")
    writes: Bundle[ModelLease] = Bundle("writes")

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner()
        self.all: list[ModelCache] = []
        self.leases: list[tuple[str, ModelLease]] = []
        self.now = 0.0

    # -- what the model says

    def bound(self, name: KeyName) -> ModelCache | None:
        return next((cache for cache in self.all if name in cache.names), None)

    def open_leases(self, kind: str, cache: ModelCache | None = None) -> list[ModelLease]:
        return [
            lease
            for of, lease in self.leases
            if of == kind and not lease.is_over and (cache is None or lease.cache is cache)
        ]

    def users(self, cache: ModelCache) -> int:
        return cache.pins + len(self.open_leases("read", cache)) + len(self.open_leases("write", cache))

    def deliver(self, lease: ModelLease, tensors: tuple[int, int] | None) -> None:
        cache, name = lease.cache, lease.name
        if tensors is None or name is None or not cache.is_consumable or cache.names.get(name) != lease.slot:
            return
        read = cache.read.setdefault(name, set())
        read.update(range(*tensors))
        if read >= set(range(NUM_TENSORS)):
            cache.take_away(name)

    # -- caches

    @initialize(target=caches, is_consumable=st.booleans(), has_view=st.booleans())
    def begin(self, is_consumable: bool, has_view: bool) -> MultipleResults[ModelCache]:
        """Start with every name bound: few random walks from an empty table do much."""
        made = [
            self.allocate([request(0), prefix(0), request(1)], is_consumable, has_view),
            self.allocate([None, blocks(0)], True, False),
        ]
        return multiple(*(cache for cache in made if isinstance(cache, ModelCache)))

    @rule(
        target=caches,
        names=st.lists(st.none() | st.sampled_from(NAMES), max_size=NUM_SLOTS),
        is_consumable=st.sampled_from([True, True, True, False]),
        has_view=st.booleans(),
    )
    def allocate(
        self, names: list[KeyName | None], is_consumable: bool, has_view: bool
    ) -> ModelCache | MultipleResults[ModelCache]:
        if sum(not self.owner.is_freed(cache.entry) for cache in self.all) >= 8:
            return multiple()
        if any(name is not None and self.bound(name) for name in names):
            used = self.owner.pool.used_nbytes
            with pytest.raises(ParameterError, match="already bound"):
                self.owner.allocate(names, num_tensors=NUM_TENSORS, num_slots=NUM_SLOTS)
            assert self.owner.pool.used_nbytes == used
            return multiple()
        entry = self.owner.allocate(names, num_tensors=NUM_TENSORS, num_slots=NUM_SLOTS, is_consumable=is_consumable)
        bound = {name: slot for slot, name in enumerate(names) if name is not None}
        cache = ModelCache(entry, bound, is_consumable)
        if has_view:
            cache.view = self.owner.view(entry)
        assert all(entry.cache_id > other.entry.cache_id for other in self.all)
        self.all.append(cache)
        return cache

    @rule(cache=caches)
    def drop_id(self, cache: ModelCache) -> None:
        self.owner.table.drop_id(cache.entry.cache_id)
        if cache.is_held:
            cache.is_held = False
            for name in list(cache.names):
                if name.namespace == "blocks" or not cache.is_consumable:
                    cache.take_away(name)

    @rule(name=st.sampled_from(NAMES))
    def remove_key(self, name: KeyName) -> None:
        cache = self.bound(name)
        self.owner.table.remove_key(name)
        if cache is not None:
            cache.take_away(name)

    # -- who uses them

    @rule(cache=caches)
    def pin(self, cache: ModelCache) -> None:
        if cache.is_live:
            self.owner.table.pin(cache.entry)
            cache.pins += 1

    @rule(cache=caches)
    def unpin(self, cache: ModelCache) -> None:
        if cache.pins:
            cache.pins -= 1
            self.owner.table.unpin(cache.entry)

    @rule(cache=caches)
    def drop_view(self, cache: ModelCache) -> None:
        if cache.view is not None:
            cache.view = None
            cache.is_view_unnoticed = True

    @rule()
    def collect(self) -> None:
        self.owner.table.collect()
        for cache in self.all:
            cache.is_view_unnoticed = False

    # -- leases

    @rule(name=st.sampled_from(NAMES), tensors=st.sampled_from([None, (0, 3), (0, 3), (0, 2), (1, 3), (2, 3)]))
    def pull(self, name: KeyName, tensors: tuple[int, int] | None) -> None:
        """A whole pull at once, and then the same again: it may have released the key."""
        for _ in range(2):
            lease = self.open_read_by_key(name, DECODER, 1)
            if isinstance(lease, ModelLease):
                self.close_read(lease, True, tensors)

    @rule(name=st.sampled_from([request(0), request(1)]), is_again=st.booleans())
    def report_late(self, name: KeyName, is_again: bool) -> None:
        """A reader that reports all tensors after its key was removed, and perhaps bound to the next cache."""
        lease = self.open_read_by_key(name, DECODER, 1)
        if isinstance(lease, ModelLease):
            self.remove_key(name)
            if is_again:
                self.allocate([None, name], True, False)
            self.close_read(lease, True, (0, 3))

    @rule(
        target=reads,
        name=st.sampled_from(NAMES),
        holder=st.sampled_from([DECODER, OTHER]),
        lasts=st.integers(1, 3),
    )
    def open_read_by_key(self, name: KeyName, holder: bytes, lasts: int) -> ModelLease | MultipleResults[ModelLease]:
        cache = self.bound(name)
        if cache is None:
            with pytest.raises(CacheNotFoundError):
                self.owner.table.find(by_key(name))
            return multiple()
        released = name if name.namespace == "request" else None
        return self.open_read(by_key(name), ModelLease(holder, cache, cache.names[name], released), lasts)

    @rule(
        target=reads,
        cache=caches,
        slot=st.integers(0, NUM_SLOTS),
        holder=st.sampled_from([DECODER, OTHER]),
        lasts=st.integers(1, 3),
    )
    def open_read_by_id(
        self, cache: ModelCache, slot: int, holder: bytes, lasts: int
    ) -> ModelLease | MultipleResults[ModelLease]:
        target = by_id(cache.entry.cache_id, slot)
        if not cache.is_live or slot == NUM_SLOTS:
            with pytest.raises(CacheNotFoundError):
                self.owner.table.find(target)
            return multiple()
        named = [name for name, at in cache.names.items() if at == slot and name.namespace == "request"]
        return self.open_read(target, ModelLease(holder, cache, slot, named[0] if named else None), lasts)

    def open_read(self, target: Target, lease: ModelLease, lasts: int) -> ModelLease:
        assert self.owner.table.find(target) == (lease.cache.entry, lease.slot, lease.name)
        lease.expires_at = self.now + lasts
        given = self.owner.open_read(lease.holder, lease.cache.entry, lease.slot, lease.name, lease.expires_at)
        lease.number, lease.word = given.number, (given.word, given.generation)
        self.leases.append(("read", lease))
        return lease

    @rule(
        lease=reads,
        is_holder=st.sampled_from([True, True, True, False]),
        tensors=st.sampled_from([None, (0, 3), (0, 3), (0, 1), (1, 3), (2, 3), (1, 9), (2, 1)]),
    )
    def close_read(self, lease: ModelLease, is_holder: bool, tensors: tuple[int, int] | None) -> None:
        """Also leases that are over already: a peer may be late."""
        if not is_holder:
            self.owner.leases.close_read(b"somebody else", lease.number, tensors)
            return
        self.owner.leases.close_read(lease.holder, lease.number, tensors)
        if not lease.is_over:
            lease.is_over = True
            self.deliver(lease, tensors)

    @rule(target=writes, cache=caches, holder=st.sampled_from([DECODER, OTHER]))
    def open_write(self, cache: ModelCache, holder: bytes) -> ModelLease | MultipleResults[ModelLease]:
        if not cache.is_live:
            return multiple()
        number = self.owner.leases.open_write(holder, cache.entry)
        same = [lease for lease in self.open_leases("write", cache) if lease.holder == holder]
        if same:
            assert same[0].number == number
            return same[0]
        lease = ModelLease(holder, cache, number=number)
        self.leases.append(("write", lease))
        return lease

    @rule(lease=consumes(writes), is_holder=st.sampled_from([True, True, False]))
    def close_write(self, lease: ModelLease, is_holder: bool) -> None:
        self.owner.leases.close_write(lease.holder if is_holder else b"somebody else", lease.number)
        lease.is_over = lease.is_over or is_holder

    @rule(holder=st.sampled_from([DECODER, OTHER]))
    def lose(self, holder: bytes) -> None:
        self.owner.leases.drop_readers(holder)
        for lease in self.open_leases("read"):
            lease.is_over = lease.holder == holder

    @rule(holder=st.sampled_from([DECODER, OTHER]))
    def outlive(self, holder: bytes) -> None:
        self.owner.leases.drop_writers(holder)
        for lease in self.open_leases("write"):
            lease.is_over = lease.holder == holder

    @precondition(lambda self: self.open_leases("read"))
    @rule(seconds=st.integers(0, 2))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.owner.leases.expire(self.now)
        for lease in self.open_leases("read"):
            lease.is_over = lease.expires_at <= self.now

    # -- what must hold after every step

    @invariant()
    def the_memory_is_where_it_should_be(self) -> None:
        """Nothing is freed that has a reference, a user or a view; whatever has none is freed, and but once."""
        assert len(self.owner.freed) == len(set(self.owner.freed))
        for cache in self.all:
            may_be_freed = not cache.is_live and not self.users(cache) and cache.view is None
            if not may_be_freed:
                assert not self.owner.is_freed(cache.entry), "freed under somebody"
            elif not cache.is_view_unnoticed:
                assert self.owner.is_freed(cache.entry), "kept for nobody"
        kept = [cache for cache in self.all if not self.owner.is_freed(cache.entry)]
        assert self.owner.pool.used_nbytes == len(kept) * NUM_TENSORS * TENSOR_NBYTES
        assert self.owner.table.num_waiting == sum(not cache.is_live for cache in kept)
        for cache in self.all:
            assert self.owner.table.is_waiting(cache.entry) is (cache in kept and not cache.is_live)

    @invariant()
    def the_words_tell_the_truth(self) -> None:
        """A cache's word holds exactly while something refers to it, and a read lease's exactly until it is over."""
        for cache in self.all:
            assert self.owner.is_valid(cache.entry) is cache.is_live
            assert (cache.entry.cache_id in self.owner.ended) is not cache.is_live
        for kind, lease in self.leases:
            if kind == "read":
                word, generation = lease.word
                assert (int(self.owner.words[word]) == generation) is not lease.is_over
        num_valid = sum(cache.is_live for cache in self.all) + len(self.open_leases("read"))
        assert np.count_nonzero(self.owner.words) == num_valid

    @invariant()
    def the_table_finds_what_is_bound(self) -> None:
        """Names and ids lead to what the model says, and to nothing else."""
        assert list(self.owner.table) == [cache.entry for cache in self.all if cache.is_live]
        for name in NAMES:
            cache = self.bound(name)
            assert self.owner.has(by_key(name)) is (cache is not None)
            if cache is not None:
                assert self.owner.table.find(by_key(name))[:2] == (cache.entry, cache.names[name])
        for cache in self.all:
            assert self.owner.has(by_id(cache.entry.cache_id)) is cache.is_live
            assert cache.entry.keys == cache.names

    @invariant()
    def the_leases_are_counted(self) -> None:
        assert self.owner.leases.num_reads == len(self.open_leases("read"))
        assert self.owner.leases.num_writes == len(self.open_leases("write"))
        for cache in self.all:
            assert sorted(self.owner.leases.writers_of(cache.entry)) == sorted(
                (lease.holder, lease.number) for lease in self.open_leases("write", cache)
            )
            assert cache.entry.pins == self.users(cache)

    def teardown(self) -> None:
        """Whatever was done, letting go of everything gives everything back."""
        for cache in self.all:
            while cache.pins:
                self.unpin(cache)
            cache.view = None
            self.owner.table.drop_id(cache.entry.cache_id)
        for name in NAMES:
            self.owner.table.remove_key(name)
        for holder in (DECODER, OTHER):
            self.owner.leases.drop_readers(holder)
            self.owner.leases.drop_writers(holder)
        self.owner.table.collect()
        assert self.owner.pool.used_nbytes == 0
        assert sorted(self.owner.freed) == [cache.entry.cache_id for cache in self.all]
        assert not self.owner.words.any()
        self.owner.close()


def test_table_and_leases_answer_as_the_model() -> None:
    """Under any history no memory is freed while it is referenced, used or viewed, and all is freed once when not."""
    run_state_machine_as_test(
        AgainstModel,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None, report_multiple_bugs=False),
    )
