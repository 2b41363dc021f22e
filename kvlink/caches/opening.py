"""Reserving a cluster's memory in a thread."""

from __future__ import annotations

from kvlink.caches.store import CacheStore
from kvlink.config import ClusterConfig
from kvlink.handingover import make_in_thread


async def open_store(pool_nbytes: int, host_pool_nbytes: int, config: ClusterConfig) -> CacheStore:
    """Return a store with its memory reserved, see `CacheStore.create`.

    Cancellation: whatever has been reserved, or is being reserved, is given back.
    """
    return await make_in_thread(lambda: CacheStore.create(pool_nbytes, host_pool_nbytes, config), CacheStore.close)
