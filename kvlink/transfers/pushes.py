"""`push_blocks` and `push_cache`: check, open for writing, plan, put, settle. Source: the spec, section 9.4.

A late write cannot be undone by looking afterwards, so a push runs under a write lease: the owner does not use the
memory for anything else until the lease is back. Looking at the state word afterwards tells the *writer* whether what
it has written is still in the cache that it meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter

import anyio

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import (
    Blocks,
    Tensors,
    check_block_numbers,
    check_blocks,
    check_layer_range,
    check_layers,
    check_same_kind,
    check_same_length,
    check_same_tensors,
    few_blocks,
    highest,
)
from kvlink.errors import CacheNotFoundError, ParameterError, ParameterTypeError, TransferTimeoutError
from kvlink.geometry import TensorRun, select_runs
from kvlink.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from kvlink.links.gates import finish, start
from kvlink.links.grants import WriteGrant
from kvlink.links.link import Link
from kvlink.links.pairing import CacheHasEnded, Pairing, move_few
from kvlink.links.table import LinkTable
from kvlink.plan import FEW_BLOCKS, Piece, as_ints, join_blocks, restage, spread
from kvlink.report import TransferReport
from kvlink.transfers.planning import plan
from kvlink.transfers.pulls import PLAIN_RANGES, Place
from kvlink.transfers.staging import commit, stage
from kvlink.transfers.transfer import ended_while_written, is_current, put_checked
from kvlink.transfers.turns import LoopTurns
from kvlink.transfers.views import cache_of, open_write
from kvlink.wire import CloseRead, Target


def place_of_push(
    key: BlocksCacheKey | CacheKeyByIdAndIndex,
    cache: KvCache,
    src_layer_range: range | None,
    dst_layer_range: range | None,
    tensor_num_per_layer: int,
) -> Place | None:
    """As `place_of_pull`, whose places are shorter. A key by id names the whole cache, whatever its slot."""
    if (
        type(cache) is not KvCache
        or type(tensor_num_per_layer) is not int
        or type(src_layer_range) not in PLAIN_RANGES
        or type(dst_layer_range) not in PLAIN_RANGES
    ):
        return None
    if type(key) is BlocksCacheKey:
        return ("blocks", key.model_id, cache.cache_id, src_layer_range, dst_layer_range, tensor_num_per_layer)
    if type(key) is CacheKeyByIdAndIndex:
        return ("id", key.cache_id, cache.cache_id, src_layer_range, dst_layer_range, tensor_num_per_layer)
    return None


def _pair(entry: CacheEntry, ours: Tensors, grant: WriteGrant, dst_layer_range: range | None, width: int) -> Pairing:
    """Check that our blocks fit into the peer's cache; raises before any byte has moved."""
    geometry = grant.found.geometry
    check_same_kind(entry.geometry, geometry, is_by_block=True)
    theirs = check_layers("dst_layer_range", dst_layer_range, geometry.num_tensors, width)
    check_same_tensors(ours, theirs)
    local, remote = select_runs(entry.geometry.runs, *ours), select_runs(geometry.runs, *theirs)
    return Pairing.of(grant.found, local, remote, ours.num, theirs, grant)


class Pusher:
    """The pushes of one cluster.

    Args:
        store: what it owns.
        links: whom it can push to.
        turns: when the loop must have one.
    """

    def __init__(self, store: CacheStore, links: LinkTable, turns: LoopTurns) -> None:
        self._store = store
        self._links = links
        self._turns = turns

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
        """See `KvCacheManager.push_blocks`. What fits is opened and checked once (`Pairing`)."""
        await self._turns.give()
        started = perf_counter()
        if not isinstance(key, (BlocksCacheKey, CacheKeyByIdAndIndex)):
            raise ParameterTypeError(f"the key must be a BlocksCacheKey or CacheKeyByIdAndIndex, got {key!r}")
        check_layer_range("dst_layer_range", dst_layer_range)
        entry = self._store.own_entry(cache, "the source")
        ours = check_layers("src_layer_range", src_layer_range, entry.desc.num_tensors, tensor_num_per_layer)
        source = check_block_numbers("src_blocks", src_blocks, entry.desc.num_slots)
        destination = check_block_numbers("dst_blocks", dst_blocks, 2**63, is_unique=True)
        check_same_length(source, destination)
        link = self._links.open_link(key.cluster_id)
        if not len(destination):
            return TransferReport.of(link.peer, link.transport, 0, 0, started, ())
        done, target = tuple(as_ints(destination)), cache_of(key)
        movement = self._store.begin_moving(entry, as_ints(source))
        in_turn_s: float | None = None
        try:
            in_turn_s = await start(link, timeout_s)
            place = place_of_push(key, cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
            pairing = await self._pair(link, key, entry, ours, dst_layer_range, tensor_num_per_layer, place, in_turn_s)
            grant = pairing.grant
            assert grant is not None
            found, local, remote, num_tensors, theirs = pairing[:5]
            geometry = found.geometry
            if highest(destination) >= geometry.num_slots:
                check_blocks("dst_blocks", destination, geometry.num_slots)
            nbytes = geometry.slot_nbytes * len(done) * num_tensors
            found_at = perf_counter()
            left_s = timeout_s - (found_at - started)
            if link.is_out_of_reach(remote):
                pieces = join_blocks(source, destination, geometry.slot_nbytes, is_push=True)
                num_extents = await self._detour(link, target, grant, local, theirs, pieces, nbytes, left_s)
            else:
                nbytes_each = geometry.slot_nbytes
                extents = await plan(local, remote, source, destination, nbytes_each, timeout_s=left_s, is_push=True)
                num_extents, left_s = len(extents), timeout_s - (perf_counter() - started)
                await put_checked(link, grant, extents, nbytes, timeout_s=left_s)
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            self._store.end_moving(entry, movement)
            if in_turn_s is not None:
                finish(link)
        stats = link.stats
        stats.pushes += 1
        stats.nbytes_pushed += nbytes
        report = TransferReport.of(link.peer, link.transport, nbytes, num_extents, started, done)
        if nbytes <= link.endpoint.immediate_nbytes:
            self._turns.held_s += perf_counter() - found_at
        return report

    async def prepare(
        self,
        key: BlocksCacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> None:
        """Check and open what `push_blocks` with these arguments would, so that it need not. Raises as that does."""
        check_layer_range("dst_layer_range", dst_layer_range)
        entry = self._store.own_entry(cache, "the source")
        ours = check_layers("src_layer_range", src_layer_range, entry.desc.num_tensors, tensor_num_per_layer)
        link = self._links.open_link(key.cluster_id)
        place = place_of_push(key, cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        link.begin()
        try:
            await self._pair(link, key, entry, ours, dst_layer_range, tensor_num_per_layer, place, timeout_s)
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            link.end()

    async def _pair(
        self,
        link: Link,
        key: BlocksCacheKey | CacheKeyByIdAndIndex,
        entry: CacheEntry,
        ours: Tensors,
        dst_layer_range: range | None,
        width: int,
        place: Place | None,
        timeout_s: float,
    ) -> Pairing:
        """Return the peer's cache of `key` paired with ours, under a write lease: remembered while both hold."""
        pairing = None if place is None else link.pairings.get(place)
        if (
            pairing is not None
            and pairing.grant is not None
            and not pairing.grant.is_recalled
            and await is_current(link.endpoint, pairing.found, timeout_s=timeout_s, peer=link.peer)
        ):
            return pairing
        grant = await open_write(link, cache_of(key), timeout_s=timeout_s)
        pairing = _pair(entry, ours, grant, dst_layer_range, width)
        if place is not None and not link.is_out_of_reach(pairing.remote):
            link.keep_pairing(place, pairing)
        return pairing

    def push_at_once(
        self,
        key: BlocksCacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        place: Place | None,
    ) -> TransferReport | None:
        """Do what `push_blocks` does without waiting; None where that cannot be, or is not known to be right.

        The short way, as `Puller.pull_at_once`. Nothing is written under a recalled lease, and the put has ended when
        the loop can next hear of a recall, so it is not counted.

        Args:
            place: of these layers, by `place_of_push`.

        Raises:
            CacheNotFoundError: the cache ended during the copy.
        """
        started = perf_counter()
        store = self._store
        if place is None or cache.store is not store or not store.mark[0] or self._turns.is_due:
            return None
        if store.thread != get_ident():  # 0.05 us; the long way says what is wrong
            return None
        entry = cache.live_entry
        link = self._links.peek(key.cluster_id)
        if entry is None or link is None:
            return None
        pairing = link.pairings.get(place)
        if pairing is None or pairing.grant is None or pairing.grant.is_recalled:
            return None
        endpoint, quick = link.endpoint, pairing.quick
        most = endpoint.immediate_nbytes // quick.nbytes
        if most > FEW_BLOCKS:
            most = FEW_BLOCKS
        source, destination = few_blocks(src_blocks, most), few_blocks(dst_blocks, most)
        if source is None or destination is None:
            return None
        try:
            num_extents = move_few(
                endpoint, endpoint.put_at_once, quick, source, destination, entry.geometry.num_slots, is_push=True
            )
        except CacheHasEnded:
            error = ended_while_written(link, pairing.found.cache_id)
            link.failed(error)
            raise error from None
        if not num_extents:
            return None
        nbytes = quick.nbytes * len(destination)
        stats = link.stats
        stats.pushes += 1
        stats.nbytes_pushed += nbytes
        duration_s = perf_counter() - started
        self._turns.held_s += duration_s
        return TransferReport(link.peer, link.transport, nbytes, num_extents, duration_s, tuple(destination))

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
        await self._turns.give()
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
        movement = self._store.begin_moving(entry, moving)
        in_turn_s: float | None = None
        try:
            in_turn_s = await start(link, timeout_s)
            grant = await open_write(link, target, timeout_s=in_turn_s)
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
            if in_turn_s is not None:
                finish(link)
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
            room = await stage(link, target, slots, theirs, grant.found.geometry.slot_nbytes, is_write=True)
            try:
                # Slots that are written in part keep the rest: the room begins as what is there.
                extents = spread(runs, room.geometry.runs, moved)
                in_flight = min(nbytes, link.endpoint.window_nbytes)
                await link.nbytes.take(in_flight, timeout_s)
                try:
                    with link.grants.stoppable(scope):
                        await link.endpoint.put(extents, nbytes)
                finally:
                    link.nbytes.give(in_flight)
                await commit(link, room.lease)
            finally:
                link.post(CloseRead(room.lease))
        if scope.cancelled_caught:
            if link.error is not None:
                raise link.gone()
            raise TransferTimeoutError(
                f"pushing {nbytes} bytes through the pool of cluster {link.peer} did not end in time",
                peer=link.peer,
                phase="transfer",
            )
        return len(extents)
