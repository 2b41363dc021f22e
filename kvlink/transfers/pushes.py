"""`push_blocks` and `push_cache`: check, open for writing, plan, put, settle. Source: the spec, section 9.4.

A late write cannot be undone by looking afterwards, so a push runs under a write lease: the owner does not use the
memory for anything else until the lease is back. Looking at the state word afterwards tells the *writer* whether what
it has written is still in the cache that it meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import anyio

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import (
    Blocks,
    Tensors,
    check_blocks,
    check_layer_range,
    check_layers,
    check_same_kind,
    check_same_length,
    check_same_tensors,
)
from kvlink.errors import CacheNotFoundError, ParameterError, ParameterTypeError, TransferTimeoutError
from kvlink.geometry import TensorRun, select_runs
from kvlink.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from kvlink.links.grants import WriteGrant
from kvlink.links.link import Link
from kvlink.links.table import LinkTable
from kvlink.plan import Extent, Piece, join_blocks, restage, spread
from kvlink.report import TransferReport
from kvlink.transfers.staging import commit, stage
from kvlink.transfers.transfer import load_word_within
from kvlink.transfers.views import cache_of, open_write
from kvlink.wire import CloseRead, Target


async def put_checked(
    link: Link, grant: WriteGrant, extents: Sequence[Extent], nbytes: int, *, timeout_s: float
) -> None:
    """Put `extents` into the cache of `grant`, then make sure that it is still that cache.

    Cancellation: ends when nothing is in flight any more; what was to be written is then undefined.

    Raises:
        CacheNotFoundError: the cache ended before all of it was written.
        TransferTimeoutError: the deadline passed; as for a cancellation.
    """
    found = grant.found
    if grant.is_recalled:
        raise _ended(link, found.cache_id)
    grant.begin()
    try:
        if nbytes <= link.endpoint.immediate_nbytes:
            await link.endpoint.put(extents, nbytes)
        else:
            started = perf_counter()
            with anyio.move_on_after(timeout_s) as scope:
                await link.endpoint.put(extents, nbytes)
            if scope.cancelled_caught:
                raise TransferTimeoutError(
                    f"pushing {nbytes} bytes to cluster {link.peer} did not end in time; the destination holds rubbish",
                    peer=link.peer,
                    phase="transfer",
                )
            timeout_s = max(0.0, timeout_s - (perf_counter() - started))
        word = await load_word_within(link.endpoint, found.word, timeout_s=timeout_s, peer=link.peer)
        if word != found.generation:
            raise _ended(link, found.cache_id)
    finally:
        grant.end()


def _ended(link: Link, cache_id: int) -> CacheNotFoundError:
    return CacheNotFoundError(
        f"cache {cache_id} of cluster {link.peer} has ended; what was pushed is lost", peer=link.peer, phase="settle"
    )


class Pusher:
    """The pushes of one cluster.

    Args:
        store: what it owns.
        links: whom it can push to.
    """

    def __init__(self, store: CacheStore, links: LinkTable) -> None:
        self._store = store
        self._links = links

    async def push_blocks(
        self,
        key: BlocksCacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.push_blocks`."""
        started = perf_counter()
        if not isinstance(key, (BlocksCacheKey, CacheKeyByIdAndIndex)):
            raise ParameterTypeError(f"the key must be a BlocksCacheKey or CacheKeyByIdAndIndex, got {key!r}")
        check_layer_range("dst_layer_range", dst_layer_range)
        entry = self._store.own_entry(cache, "the source")
        ours = check_layers("src_layer_range", src_layer_range, entry.desc.num_tensors, tensor_num_per_layer)
        source = check_blocks("src_blocks", src_blocks, entry.desc.num_slots)
        destination = check_blocks("dst_blocks", dst_blocks, 2**63, is_unique=True)
        check_same_length(source, destination)
        link = self._links.open_link(key.cluster_id)
        if not destination:
            return TransferReport.of(link.peer, link.transport, 0, 0, started, ())
        target = cache_of(key)

        def plan(grant: WriteGrant) -> tuple[Tensors, list[Piece]]:
            geometry = grant.found.geometry
            check_same_kind(entry.geometry, geometry, is_by_block=True)
            check_blocks("dst_blocks", destination, geometry.num_slots)
            theirs = check_layers("dst_layer_range", dst_layer_range, geometry.num_tensors, tensor_num_per_layer)
            joined = join_blocks(destination, source, geometry.slot_nbytes)
            return theirs, [Piece(local, remote, nbytes) for remote, local, nbytes in joined]

        return await self._push(link, target, entry, ours, source, plan, destination, timeout_s, started)

    async def push_cache(
        self,
        key: CacheKeyByIdAndIndex,
        cache: KvCache,
        src_batch_index: int,
        size: int,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.push_cache`."""
        started = perf_counter()
        if not isinstance(key, CacheKeyByIdAndIndex):
            raise ParameterTypeError(f"the key must be a CacheKeyByIdAndIndex, got {key!r}")
        check_layer_range("dst_layer_range", dst_layer_range)
        entry = self._store.own_entry(cache, "the source")
        desc = entry.desc
        if src_batch_index >= desc.num_slots:
            raise ParameterError(f"src_batch_index is {src_batch_index}; the cache has slots 0 to {desc.num_slots - 1}")
        ours = check_layers("src_layer_range", src_layer_range, desc.num_tensors, tensor_num_per_layer)
        nbytes = desc.slot_nbytes if size == -1 else size
        if nbytes > desc.slot_nbytes:
            raise ParameterError(f"size {nbytes} does not fit into a slot of {desc.slot_nbytes} bytes")
        link = self._links.open_link(key.cluster_id)

        def plan(grant: WriteGrant) -> tuple[Tensors, list[Piece]]:
            geometry = grant.found.geometry
            check_same_kind(entry.geometry, geometry, is_by_block=False)
            if key.batch_index >= geometry.num_slots:
                raise CacheNotFoundError(
                    f"cache {key.cache_id} of cluster {link.peer} has no slot {key.batch_index}", peer=link.peer
                )
            if nbytes > geometry.slot_nbytes:
                raise ParameterError(f"size {nbytes} does not fit into the peer's slot of {geometry.slot_nbytes} bytes")
            theirs = check_layers("dst_layer_range", dst_layer_range, geometry.num_tensors, tensor_num_per_layer)
            return theirs, [Piece(src_batch_index * desc.slot_nbytes, key.batch_index * geometry.slot_nbytes, nbytes)]

        target = cache_of(key)
        return await self._push(
            link, target, entry, ours, (src_batch_index,), plan, [key.batch_index], timeout_s, started
        )

    async def _push(
        self,
        link: Link,
        target: Target,
        entry: CacheEntry,
        ours: Tensors,
        moving: Sequence[int],
        plan: Callable[[WriteGrant], tuple[Tensors, list[Piece]]],
        done: list[int],
        timeout_s: float,
        started: float,
    ) -> TransferReport:
        link.begin()
        movement = self._store.begin_moving(entry, moving)
        try:
            grant = await open_write(link, target, timeout_s=timeout_s)
            theirs, pieces = plan(grant)
            check_same_tensors(ours, theirs)
            runs = select_runs(entry.geometry.runs, *ours)
            nbytes = sum([piece.nbytes for piece in pieces]) * ours.num
            left_s = timeout_s - (perf_counter() - started)
            if link.is_out_of_reach(grant.found.geometry.runs):
                num_extents = await self._detour(link, target, grant, runs, theirs, pieces, nbytes, left_s)
            else:
                extents = spread(runs, select_runs(grant.found.geometry.runs, *theirs), pieces)
                num_extents = len(extents)
                await put_checked(link, grant, extents, nbytes, timeout_s=left_s)
            link.stats.pushes += 1
            link.stats.nbytes_pushed += nbytes
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            self._store.end_moving(entry, movement)
            link.end()
        return TransferReport.of(link.peer, link.transport, nbytes, num_extents, started, tuple(done))

    async def _detour(
        self,
        link: Link,
        target: Target,
        grant: WriteGrant,
        runs: tuple[TensorRun, ...],
        theirs: Tensors,
        pieces: list[Piece],
        nbytes: int,
        timeout_s: float,
    ) -> int:
        """Put what cannot be reached where it is through the owner's pool; return the number of extents."""
        slots, moved = restage(pieces, grant.found.geometry.slot_nbytes)
        with anyio.move_on_after(timeout_s) as scope:
            room = await stage(link, target, slots, theirs, is_write=True)
            try:
                await link.endpoint.reach({run.region for run in room.geometry.runs}, for_writing=True)
                # Slots that are written in part keep the rest: the room begins as what is there.
                extents = spread(runs, room.geometry.runs, moved)
                await link.endpoint.put(extents, nbytes)
                await commit(link, room.lease)
            finally:
                link.post(CloseRead(room.lease))
        if scope.cancelled_caught:
            raise TransferTimeoutError(
                f"pushing {nbytes} bytes through the pool of cluster {link.peer} did not end in time", peer=link.peer
            )
        return len(extents)
