"""The user's handle on a cache."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from kvlink.caches.arrivals import Arrivals
from kvlink.caches.table import CacheEntry
from kvlink.checks import Blocks, check_blocks
from kvlink.errors import CacheNotFoundError
from kvlink.geometry import CacheDesc, CacheGeometry

if TYPE_CHECKING:
    from kvlink.caches.store import CacheStore


class KvCache:
    """A cache of this cluster. Made by the manager's ``allocate_*`` and ``register_*``, never by hand.

    Ownership: the cache lives until `KvCacheManager.deallocate_cache`, and on until its bound keys are released. A
    handle that is garbage-collected before gives the cache back, with a `ResourceWarning`. Views outlive everything:
    the memory behind a view is used for nothing else while the view lives.

    Attributes:
        cache_id: by which peers may address it (`CacheKeyByIdAndIndex`).
        desc: shape, data type and placement.
        is_blocks: whether dimension 0 is blocks (paged) rather than slots.
        is_registered: whether the memory is the caller's own rather than the pool's.
        device: the number of the CUDA device that its memory is on; None for host memory.
        arrivals: what layer-wise pushes of peers have put into it.
        live_entry: the table's record while the handle is valid, else None. Internal.
    """

    def __init__(
        self,
        store: CacheStore,
        entry: CacheEntry,
        tensors: tuple[Any, ...],
        forgotten: deque[int],
        addresses: Sequence[int],
        device: int | None = None,
    ) -> None:
        self.cache_id = entry.cache_id
        self.desc = entry.desc
        self.is_blocks = entry.geometry.is_blocks
        self.is_registered = not entry.is_consumable
        self.arrivals = Arrivals(entry.cache_id, store.watched)
        self.store = store
        self._entry = entry
        self.live_entry: CacheEntry | None = entry
        self.device = device
        self._tensors: tuple[NDArray[Any], ...] = tensors
        self._addresses = addresses
        self._finalizer = weakref.finalize(self, _forget, forgotten, entry.cache_id, os.getpid())
        self._finalizer.atexit = False

    @property
    def cache_desc(self) -> CacheDesc:
        """The spec's name of `desc`."""
        return self.desc

    @property
    def tensors(self) -> tuple[NDArray[Any], ...]:
        """Views on the tensors, each of shape ``desc.shape``; no copies. Empty after `deallocate_cache`.

        A view keeps the memory, also that of a loop variable: after ``for tensor in cache.tensors`` the last one is
        alive until the function ends.

        The dtype is ``desc.data_type.numpy_dtype``. ``torch.from_dlpack(tensor)`` shares them with torch.

        Of a cache in CUDA memory (`device` is not None) these are the very objects that were registered, for numpy has
        no arrays there.
        """
        return self._tensors

    @property
    def tensor_addresses(self) -> list[int]:
        """Where each tensor begins in this process; empty after `deallocate_cache`."""
        return list(self._addresses)

    @property
    def num_blocks(self) -> int:
        """Blocks (slots) of each tensor."""
        return self.desc.num_slots

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block (slot) of one tensor."""
        return self.desc.slot_nbytes

    @property
    def is_valid(self) -> bool:
        """Whether the handle may still be used: not deallocated, and its cluster is open."""
        return self.live_entry is not None

    def is_quiet(self, blocks: Blocks | None = None) -> bool:
        """Whether nothing can change in these blocks (None: the whole cache) but by the two applications' agreement.

        False while a movement of this cluster's moves them in or out, and while they are in *quarantine*: a peer that
        was let write into them may still do so and should not, because its link was lost, the cache was deallocated, or
        its ticket has ended. That ends when the peer says that it has stopped, is known to be dead, or links again.
        What a transport that hangs has not let go of is never quiet again; the error of that pull says so.

        Also meaningful for a deallocated cache: its memory is reused only when this is true.
        """
        entry = self._entry
        if blocks is None:
            return not entry.moving and not entry.quarantined
        asked = set(check_blocks("blocks", blocks, self.num_blocks))
        return all(asked.isdisjoint(moving) for moving in entry.moving.values()) and not any(
            suspect is None or not asked.isdisjoint(suspect) for suspect in entry.quarantined.values()
        )

    @property
    def geometry(self) -> CacheGeometry:
        """What peers are told of it, also after its end. Internal."""
        return self._entry.geometry

    def entry(self) -> CacheEntry:
        """Return the table's record; raise `CacheNotFoundError` when the handle is no longer valid. Internal."""
        if self.live_entry is None:
            raise CacheNotFoundError(f"cache {self.cache_id} was deallocated, or its cluster is closed")
        return self.live_entry

    def invalidate(self) -> None:
        """Let go of everything; the handle is of no more use. Internal: callers use `deallocate_cache`."""
        self._finalizer.detach()
        self.live_entry = None
        self._tensors = ()
        self._addresses = ()
        self.arrivals.close(CacheNotFoundError(f"cache {self.cache_id} was deallocated, or its cluster is closed"))

    def __repr__(self) -> str:
        state = "" if self.is_valid else " (deallocated)"
        return (
            f"<KvCache {self.cache_id}: {self.desc.num_tensors} x {self.desc.shape} {self.desc.data_type.value}{state}>"
        )


def _forget(forgotten: deque[int], cache_id: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child lets go of its copy of the handle; the cache is the parent's
    forgotten.append(cache_id)
    warnings.warn(
        f"cache {cache_id} was garbage-collected without deallocate_cache; its memory goes back to the pool",
        ResourceWarning,
        stacklevel=2,
    )
