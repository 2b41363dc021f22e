"""`pull_blocks` and `pull_cache`: check, look up, plan, get, settle. Source: the spec, sections 6.5 and 6.7."""

from __future__ import annotations

from time import perf_counter
from typing import Final

import anyio.lowlevel

from kvlink.caches import CacheEntry
from kvlink.checks import (
    Blocks,
    Tensors,
    check_blocks,
    check_layer_width,
    check_layers,
    check_same_kind,
    check_same_length,
    check_same_tensors,
)
from kvlink.errors import ParameterError, ParameterTypeError
from kvlink.geometry import select_runs
from kvlink.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from kvlink.kvcache import KvCache
from kvlink.link import Link
from kvlink.links import LinkTable
from kvlink.plan import Piece, join_blocks, spread
from kvlink.report import TransferReport
from kvlink.store import CacheStore
from kvlink.transfer import get_checked
from kvlink.views import find_cache, open_read
from kvlink.wire import CloseRead, Found, Target

_YIELD_EVERY_S: Final = 0.001
"""Small pulls end without giving the loop a turn; a caller that makes thousands in a row gives it one this often."""


class Puller:
    """The pulls of one cluster.

    Args:
        store: what it owns.
        links: whom it can pull from.
    """

    def __init__(self, store: CacheStore, links: LinkTable) -> None:
        self._store = store
        self._links = links
        self._yielded_at = 0.0

    async def pull_blocks(
        self,
        key: BlocksCacheKey,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.pull_blocks`."""
        started = await self._start()
        if not isinstance(key, BlocksCacheKey):
            raise ParameterTypeError(f"the key must be a BlocksCacheKey, got {key!r}")
        width = check_layer_width(tensor_num_per_layer)
        entry = self._store.own_entry(cache, "the destination")
        ours = check_layers("dst_layer_range", dst_layer_range, entry.desc.num_tensors, width)
        destination = check_blocks("dst_blocks", dst_blocks, entry.desc.num_slots, is_unique=True)
        source = check_blocks("src_blocks", src_blocks, 2**63)
        check_same_length(source, destination)
        link = self._links.open_link(key.cluster_id)
        if not destination:
            return TransferReport.of(link.peer, link.transport, 0, 0, started, ())
        name = key.name
        link.begin()
        movement = self._store.begin_moving(entry, destination)
        try:
            found = await find_cache(link, Target(name.namespace, name.id, name.model_id), timeout_s=timeout_s)
            geometry = found.geometry
            theirs = check_layers("src_layer_range", src_layer_range, geometry.num_tensors, width)
            check_same_tensors(ours, theirs)
            check_same_kind(entry.geometry, geometry, is_by_block=True)
            if max(source) >= geometry.num_slots:
                check_blocks("src_blocks", source, geometry.num_slots)
            pieces = join_blocks(destination, source, geometry.slot_nbytes)
            nbytes = geometry.slot_nbytes * len(destination) * ours.num
            num_extents = await self._get(link, found, entry, ours, theirs, pieces, nbytes, timeout_s, started)
        except BaseException:
            link.stats.failures += 1
            raise
        finally:
            self._store.end_moving(entry, movement)
            link.end()
        return TransferReport.of(link.peer, link.transport, nbytes, num_extents, started, tuple(destination))

    async def pull_cache(
        self,
        key: CacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        batch_index: int,
        size: int,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        src_cache_offset: int | None,
        dst_cache_offset: int | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.pull_cache`. All arguments but the layer ranges have been checked by themselves."""
        started = await self._start()
        entry = self._store.own_entry(cache, "the destination")
        desc = entry.desc
        if batch_index >= desc.num_slots:
            raise ParameterError(f"batch_index is {batch_index}; the cache has slots 0 to {desc.num_slots - 1}")
        ours = check_layers("dst_layer_range", dst_layer_range, desc.num_tensors, tensor_num_per_layer)
        to_offset, from_offset = dst_cache_offset or 0, src_cache_offset or 0
        nbytes = desc.slot_nbytes - to_offset if size == -1 else size
        if nbytes < 1 or to_offset + nbytes > desc.slot_nbytes:
            raise ParameterError(
                f"dst_cache_offset {to_offset} and size {nbytes} do not fit into a slot of {desc.slot_nbytes} bytes"
            )
        link = self._links.open_link(key.cluster_id)
        if isinstance(key, CacheKeyByIdAndIndex):
            target = Target("id", key.cache_id, 0, key.batch_index)
        else:
            target = Target(key.name.namespace, key.name.id, key.name.model_id)
        link.begin()
        movement = self._store.begin_moving(entry, (batch_index,))
        found: Found | None = None
        delivered: tuple[int, int] | None = None
        try:
            found = await open_read(link, target, timeout_s=timeout_s)
            geometry = found.geometry
            theirs = check_layers("src_layer_range", src_layer_range, geometry.num_tensors, tensor_num_per_layer)
            if from_offset + nbytes > geometry.slot_nbytes:
                raise ParameterError(
                    f"src_cache_offset {from_offset} and size {nbytes} do not fit into the peer's slot "
                    f"of {geometry.slot_nbytes} bytes"
                )
            check_same_tensors(ours, theirs)
            check_same_kind(entry.geometry, geometry, is_by_block=False)
            piece = Piece(
                batch_index * desc.slot_nbytes + to_offset, found.slot * geometry.slot_nbytes + from_offset, nbytes
            )
            total = nbytes * ours.num
            num_extents = await self._get(link, found, entry, ours, theirs, [piece], total, timeout_s, started)
            # A pull "with offset" never releases a key, even with offset 0 (the spec, section 5.3).
            if src_cache_offset is None and dst_cache_offset is None:
                delivered = (theirs.start, theirs.stop)
        except BaseException:
            link.stats.failures += 1
            raise
        finally:
            if found is not None:
                link.post(CloseRead(found.lease, delivered))
            self._store.end_moving(entry, movement)
            link.end()
        return TransferReport.of(link.peer, link.transport, total, num_extents, started, (batch_index,))

    async def _start(self) -> float:
        started = perf_counter()
        if started - self._yielded_at > _YIELD_EVERY_S:
            await anyio.lowlevel.checkpoint()
            self._yielded_at = started = perf_counter()
        return started

    async def _get(
        self,
        link: Link,
        found: Found,
        entry: CacheEntry,
        ours: Tensors,
        theirs: Tensors,
        pieces: list[Piece],
        nbytes: int,
        timeout_s: float,
        started: float,
    ) -> int:
        extents = spread(select_runs(entry.geometry.runs, *ours), select_runs(found.geometry.runs, *theirs), pieces)
        await get_checked(
            link.endpoint,
            found,
            extents,
            nbytes,
            timeout_s=timeout_s - (perf_counter() - started),
            peer=link.peer,
        )
        link.stats.pulls += 1
        link.stats.nbytes_pulled += nbytes
        return len(extents)
