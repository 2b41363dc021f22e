"""Reserving a cluster's memory in a thread, so that whoever gives up waiting for it keeps none of it.

The memory must not be the thread's *result*: a native asyncio cancellation that comes between the thread's end and the
waiting task's turn leaves a result in the traceback of the cancelled task, for as long as anybody holds that task. So
the two sides meet under a lock: the memory is handed to one who still wants it, or it is given back.
"""

from __future__ import annotations

import threading

import anyio
import anyio.to_thread

from kvlink.caches.store import CacheStore
from kvlink.config import ClusterConfig


async def open_store(pool_nbytes: int, host_pool_nbytes: int, config: ClusterConfig) -> CacheStore:
    """Return a store with its memory reserved, see `CacheStore.create`.

    Cancellation: whatever has been reserved, or is being reserved, is given back.
    """
    handing_over = _HandingOver()

    def make() -> None:
        handing_over.offer(CacheStore.create(pool_nbytes, host_pool_nbytes, config))

    try:
        await anyio.to_thread.run_sync(make)
    except BaseException:
        handing_over.refuse()
        raise
    return handing_over.take()


class _HandingOver:
    """A store on its way from the thread that made it to the task that wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = True
        self._store: CacheStore | None = None

    def offer(self, store: CacheStore) -> None:
        """Hand over a store, or close it if nobody wants it any more. In the thread."""
        with self._lock:
            if self._is_wanted:
                self._store = store
                return
        store.close()

    def take(self) -> CacheStore:
        """Return the store that was offered."""
        with self._lock:
            store, self._store = self._store, None
        assert store is not None
        return store

    def refuse(self) -> None:
        """Want it no more, whether it was offered or will be."""
        with self._lock:
            self._is_wanted = False
            store, self._store = self._store, None
        if store is not None:
            store.close()
