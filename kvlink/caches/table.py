"""The owner's table of caches: references, keys, generations and their end. Pure bookkeeping; nothing here waits.

A cache lives by *references*: its id (from `add` until `drop_id`) and every key still bound to it. When the last one
goes the cache has *ended*: its state word changes, nobody can find it any more. Its memory returns to the pool when,
besides that, nothing uses it: no transfer or lease has it pinned, and no numpy or torch view on it is alive. The second
half is kvlink's own (the spec frees at the first): a view that outlives its cache can never show or overwrite another
request's bytes.

Source: the spec, sections 5.1 to 5.4, 6.2 to 6.4.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvlink.errors import CacheNotFoundError, ParameterError
from kvlink.geometry import CacheDesc, CacheGeometry
from kvlink.keys import KeyName
from kvlink.memory.pool import Bytes
from kvlink.memory.stateregion import StateRegion
from kvlink.wire import Target


class CacheEntry:
    """One cache in the table.

    Attributes:
        cache_id: never used twice by this cluster.
        desc, geometry: what it looks like, and where it lies.
        is_consumable: whether pulls release its request keys; memory that the caller owns is never consumed.
        is_held: whether the id reference lives.
        keys: the keys still bound, with their slots.
        requests: the request keys among them, by their slots.
        pins: transfers, copies and leases that are using the memory right now.
        moving: the blocks that each of our own movements is using right now, by a number of the movement.
        quarantined: the blocks (None: all) that a peer may still write into and should not, by write lease.
        word, generation: its state word and what that holds while the cache is valid.
    """

    __slots__ = (
        "__weakref__",
        "_unread",
        "cache_id",
        "desc",
        "generation",
        "geometry",
        "has_ended",
        "is_consumable",
        "is_held",
        "keys",
        "moving",
        "pins",
        "quarantined",
        "requests",
        "root",
        "word",
    )

    def __init__(
        self,
        cache_id: int,
        desc: CacheDesc,
        geometry: CacheGeometry,
        word: int,
        generation: int,
        *,
        is_consumable: bool,
    ) -> None:
        self.cache_id = cache_id
        self.desc = desc
        self.geometry = geometry
        self.word = word
        self.generation = generation
        self.is_consumable = is_consumable
        self.is_held = True
        self.has_ended = False
        self.keys: dict[KeyName, int] = {}
        self.requests: dict[int, KeyName] = {}
        self.pins = 0
        self.moving: dict[int, Sequence[int]] = {}
        self.quarantined: dict[int, Sequence[int] | None] = {}
        self.root: weakref.ref[Bytes] | None = None
        self._unread: dict[int, set[int]] = {}

    def key_at(self, slot: int) -> KeyName | None:
        """Return the request key bound to `slot`, if any."""
        return self.requests.get(slot)

    def mark_read(self, slot: int, start: int, stop: int) -> bool:
        """Note that tensors ``start..stop-1`` of `slot` were delivered; return whether all of them have been now."""
        num_tensors = self.desc.num_tensors
        unread = self._unread.setdefault(slot, set(range(num_tensors)))
        unread.difference_update(range(start, min(stop, num_tensors)))  # a peer's numbers: never loop over them all
        return not unread

    def forget_reads(self, slot: int) -> None:
        """Begin anew: the slot's key is gone."""
        self._unread.pop(slot, None)


class CacheTable:
    """All caches of one cluster.

    Args:
        state: where validity is published.
        free: called once per cache, when its memory may be used for something else.
        first_id: of the first cache; ids then count up.

    Attributes:
        on_ended: called once per cache, when it cannot be found any more.
    """

    def __init__(self, state: StateRegion, free: Callable[[CacheEntry], None], *, first_id: int = 1) -> None:
        self.on_ended: Callable[[CacheEntry], None] = lambda entry: None
        self._state = state
        self._free = free
        self._entries: dict[int, CacheEntry] = {}
        self._bound: dict[KeyName, CacheEntry] = {}
        self._waiting: dict[int, CacheEntry] = {}
        self._next_id = first_id
        # Appended to by finalisers, which run in whatever thread drops the last reference; a deque's append is atomic.
        self._dead_views: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self._entries.values())

    def check_names(self, names: Sequence[KeyName | None]) -> None:
        """Refuse keys that are bound already, before anything is allocated for them. Source: the spec, section 6.2."""
        for name in names:
            if name is not None and name in self._bound:
                raise ParameterError(
                    f"{name} is already bound to cache {self._bound[name].cache_id}; remove or pull it first"
                )

    def add(
        self, desc: CacheDesc, geometry: CacheGeometry, names: Sequence[KeyName | None], *, is_consumable: bool = True
    ) -> CacheEntry:
        """Enter a cache whose memory is ready; ``names[i]`` is bound to slot i, and None binds nothing.

        A name that occurs twice stays with its last slot (the spec, sections 6.2 and 19).
        """
        self.check_names(names)
        word, generation = self._state.begin()
        entry = CacheEntry(self._next_id, desc, geometry, word, generation, is_consumable=is_consumable)
        self._next_id += 1
        self._entries[entry.cache_id] = entry
        for slot, name in enumerate(names):
            if name is not None:
                entry.keys[name] = slot
                self._bound[name] = entry
        entry.requests = {slot: name for name, slot in entry.keys.items() if name.namespace == "request"}
        return entry

    def watch_views(self, entry: CacheEntry, root: Bytes) -> None:
        """Keep the memory of `entry` for as long as views made from `root` live."""
        cache_id, dead = entry.cache_id, self._dead_views
        entry.root = weakref.ref(root, lambda _: dead.append(cache_id))

    def find(self, target: Target) -> tuple[CacheEntry, int, KeyName | None]:
        """Return the cache, the slot, and the key that a pull of it would release.

        Raises:
            CacheNotFoundError: no such key, cache or slot; at once, nobody waits for a key (the spec, section 5.4).
        """
        if target.namespace == "id":
            entry = self._entries.get(target.id)
            if entry is None:
                raise CacheNotFoundError(f"no cache has the id {target.id}")
            if target.slot >= entry.desc.num_slots:
                raise CacheNotFoundError(
                    f"cache {target.id} has no slot {target.slot}, only 0 to {entry.desc.num_slots - 1}"
                )
            return entry, target.slot, entry.key_at(target.slot)
        name = KeyName(target.namespace, target.id, target.model_id)
        entry = self._bound.get(name)
        if entry is None:
            raise CacheNotFoundError(f"{name} is not bound to any cache: not there yet, already pulled, or removed")
        return entry, entry.keys[name], name if name.namespace == "request" else None

    def get(self, cache_id: int) -> CacheEntry:
        """Return a cache by its id; raise `CacheNotFoundError` where it has ended."""
        entry = self._entries.get(cache_id)
        if entry is None:
            raise CacheNotFoundError(f"no cache has the id {cache_id}; it was deallocated or never existed")
        return entry

    def drop_id(self, cache_id: int) -> None:
        """Drop the id reference; a second time, or for an unknown id, does nothing (the spec, sections 6.3 and 19).

        The key of a blocks cache goes with it (section 5.2); other keys keep the cache alive until they are released.
        """
        entry = self._entries.get(cache_id)
        if entry is None or not entry.is_held:
            return
        entry.is_held = False
        for name in [name for name in entry.keys if name.namespace == "blocks" or not entry.is_consumable]:
            self._unbind(entry, name)
        self._settle(entry)

    def remove_key(self, name: KeyName) -> None:
        """Release a whole key, whatever was read of it; an unknown one is no error (the spec, section 6.4)."""
        entry = self._bound.get(name)
        if entry is not None:
            self._unbind(entry, name)
            self._settle(entry)

    def mark_read(self, entry: CacheEntry, name: KeyName | None, slot: int, start: int, stop: int) -> None:
        """Note that a peer has tensors ``start..stop-1``; the last of them releases a request key (section 5.3)."""
        if name is None or not entry.is_consumable or entry.keys.get(name) != slot:
            return
        if entry.mark_read(slot, start, stop):
            self._unbind(entry, name)
            self._settle(entry)

    def pin(self, entry: CacheEntry) -> None:
        """Keep the memory of `entry` until `unpin`, whatever happens to its references."""
        entry.pins += 1

    def unpin(self, entry: CacheEntry) -> None:
        """Undo one `pin`."""
        entry.pins -= 1
        self._release(entry)

    def collect(self) -> None:
        """Take note of the views that have died since."""
        while self._dead_views:
            entry = self._waiting.get(self._dead_views.popleft())
            if entry is not None:
                self._release(entry)

    @property
    def num_waiting(self) -> int:
        """Caches that have ended and whose memory something still uses."""
        return len(self._waiting)

    def is_waiting(self, entry: CacheEntry) -> bool:
        """Whether `entry` has ended and something still uses its memory."""
        return entry.cache_id in self._waiting

    def _unbind(self, entry: CacheEntry, name: KeyName) -> None:
        slot = entry.keys.pop(name)
        if entry.requests.get(slot) == name:
            del entry.requests[slot]
        entry.forget_reads(slot)
        del self._bound[name]

    def _settle(self, entry: CacheEntry) -> None:
        """End the cache if that was its last reference."""
        if entry.is_held or entry.keys or entry.has_ended:
            return
        entry.has_ended = True
        self._state.end(entry.word)
        del self._entries[entry.cache_id]
        self._waiting[entry.cache_id] = entry
        self.on_ended(entry)
        self._release(entry)

    def _release(self, entry: CacheEntry) -> None:
        """Give the memory back if nothing uses it."""
        if not entry.has_ended or entry.pins or entry.cache_id not in self._waiting:
            return
        if entry.root is not None and entry.root() is not None:
            return
        del self._waiting[entry.cache_id]
        self._free(entry)
