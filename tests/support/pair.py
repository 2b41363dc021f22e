"""The commonest scene: an owner of one paged cache in a process of its own, and a cluster here that is linked to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kvlink as kv
from tests.support import inside
from tests.support.actor import config_of
from tests.support.loops import eventually
from tests.support.pattern import Stamp, expect, fill
from tests.support.peer import Peer, spawn_peer

SLOW: dict[str, Any] = {"inline_nbytes": 0, "chunk_nbytes": 4096, "copy_threads": 1}
"""Settings that make a large pull of many small chunks, so that there is time to do something in the middle of it."""

RUBBISH = Stamp(250, 250, 65000)
"""What destinations hold before anything is pulled into them."""


class Pair:
    """An owner, a puller here, a cache on each side: the owner's is filled, ours holds `RUBBISH`.

    Attributes:
        owner, handle: the child and its cache's handle.
        here, cache: the cluster in this process and its cache.
        desc: of both caches, unless they were asked to differ.
    """

    def __init__(self, owner: Peer, handle: int, here: kv.Cluster, desc: kv.CacheDesc) -> None:
        self.owner = owner
        self.handle = handle
        self.here = here
        self.desc = desc
        self.cache = here.kv_cache_manager.allocate_blocks_cache(desc)
        self.key = kv.BlocksCacheKey(owner.cluster_id)
        fill(self.cache.tensors, RUBBISH)

    @property
    def manager(self) -> kv.KvCacheManager:
        """The functions of the cluster here."""
        return self.here.kv_cache_manager

    @property
    def stamp(self) -> Stamp:
        """What the owner's cache holds."""
        return self.owner.stamp(self.handle)

    @property
    def blocks(self) -> list[int]:
        """Every block number."""
        return list(range(self.desc.num_slots))

    @property
    def link(self) -> kv.Link:
        """Our link to the owner."""
        return inside.link_to(self.here, self.owner.cluster_id)

    async def pull(self, src_blocks: Any = None, dst_blocks: Any = None, **options: Any) -> kv.TransferReport:
        """Pull blocks, all of them unless told otherwise. Takes anything, so that the wrong things can be tried."""
        source = self.blocks if src_blocks is None else src_blocks
        return await self.manager.pull_blocks(
            self.key, self.cache, source, source if dst_blocks is None else dst_blocks, **options
        )

    async def warm_up(self) -> None:
        """Pull one block, so that the next pull needs nothing of the owner, then forget that it was pulled."""
        await self.pull([0], [0])
        fill(self.cache.tensors, RUBBISH)

    async def is_moving(self) -> None:
        """Return as soon as a pull that was started has begun to write."""
        first = self.cache.tensors[0].reshape(-1).view("uint8")
        before = bytes(first[:64])
        await eventually(lambda: bytes(first[:64]) != before, "the pull's first bytes")

    def expect_all(self) -> None:
        """Check every byte of a pull of everything."""
        expect(self.cache.tensors, self.stamp)

    def expect_untouched(self) -> None:
        """Check that no byte of the destination has changed."""
        expect(self.cache.tensors, RUBBISH)


@asynccontextmanager
async def pair(
    desc: kv.CacheDesc | None = None,
    *,
    role: str = "PROMPT",
    pool: str = "64MiB",
    loop_name: str = "asyncio",
    owner_config: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    here_role: kv.Role = kv.Role.DECODER,
) -> AsyncIterator[Pair]:
    """Set the scene: owner is cluster 1, the one here is cluster 2.

    Args:
        desc: of both caches; None for 8 tensors of 64 blocks of 4 KiB.
        role, loop_name, owner_config: of the owner.
        pool: of both.
        config, here_role: of the cluster here.
    """
    desc = desc or kv.CacheDesc(8, (64, 4096), "uint8")
    async with spawn_peer(1, role, pool=pool, loop_name=loop_name, config=owner_config) as owner:
        handle = await owner.call(
            "allocate_blocks",
            num_tensors=desc.num_tensors,
            shape=list(desc.shape),
            data_type=desc.data_type.value,
            model_id=0,
        )
        settings = config_of(config or {})
        async with kv.Cluster(cluster_id=2, role=here_role, pool=pool, config=settings) as here:
            (await here.link_clusters([owner.info])).raise_for_status()
            made = Pair(owner, handle, here, desc)
            try:
                yield made
            finally:
                if made.cache.is_valid:
                    made.manager.deallocate_cache(made.cache)
