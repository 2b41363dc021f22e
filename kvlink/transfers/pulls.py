"""`pull_blocks` and `pull_cache`: check, look up, plan, get, settle. Source: the spec, sections 6.5, 6.7 and 9.3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter
from types import NoneType
from typing import Final

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import (
    Blocks,
    Tensors,
    check_block_numbers,
    check_blocks,
    check_layer_range,
    check_layer_width,
    check_layers,
    check_same_kind,
    check_same_length,
    check_same_tensors,
    few_blocks,
    highest,
)
from kvlink.errors import ParameterError
from kvlink.geometry import CacheGeometry, select_runs
from kvlink.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, check_pull_key
from kvlink.links.gates import finish, start
from kvlink.links.link import Link
from kvlink.links.pairing import CacheHasEnded, Pairing, move_few
from kvlink.links.table import LinkTable
from kvlink.plan import FEW_BLOCKS, Piece, as_ints, join_blocks, scatter_slot, spread
from kvlink.report import TransferReport
from kvlink.transfers.planning import plan
from kvlink.transfers.staging import get_by_detour
from kvlink.transfers.transfer import ended_while_read, get_checked, is_current
from kvlink.transfers.turns import LoopTurns
from kvlink.transfers.views import find_cache, open_read, target_of
from kvlink.wire import CloseRead, Found, Target

PLAIN_RANGES: Final = (NoneType, range)

Place = tuple[object, ...]
"""Under which a link remembers a `Pairing`."""

Plan = Callable[[Found], tuple[Tensors, list[Piece]]]
"""Checks a peer's cache against the request; returns the peer's tensors and the pieces to move in each."""


def place_of_pull(
    key: BlocksCacheKey,
    cache: KvCache,
    src_layer_range: range | None,
    dst_layer_range: range | None,
    tensor_num_per_layer: int,
) -> Place | None:
    """Return the place of these arguments, None where one is not of the plain type that can be compared by value."""
    if (
        type(cache) is not KvCache
        or type(tensor_num_per_layer) is not int
        or type(src_layer_range) not in PLAIN_RANGES
        or type(dst_layer_range) not in PLAIN_RANGES
    ):
        return None
    return (key.model_id, cache.cache_id, src_layer_range, dst_layer_range, tensor_num_per_layer)


class Puller:
    """The pulls of one cluster.

    Args:
        store: what it owns.
        links: whom it can pull from.
        turns: when the loop must have one.
    """

    def __init__(self, store: CacheStore, links: LinkTable, turns: LoopTurns) -> None:
        self._store = store
        self._links = links
        self._turns = turns

    def pull_at_once(
        self,
        key: BlocksCacheKey,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        place: Place | None,
    ) -> TransferReport | None:
        """Do what `pull_blocks` does without waiting; None where that cannot be, or is not known to be right.

        The short way of kvlink, see `kvlink.links.pairing`. Nothing is refused here: what is not plainly right goes
        the long way, whose checks have names.

        Args:
            place: of these layers, by `place_of_pull`.

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
        if pairing is None:
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
                endpoint, endpoint.get_at_once, quick, destination, source, entry.geometry.num_slots, is_push=False
            )
        except CacheHasEnded:
            error = ended_while_read(pairing.found, link.peer)
            link.failed(error)
            raise error from None
        if not num_extents:
            return None
        nbytes = quick.nbytes * len(destination)
        stats = link.stats
        stats.pulls += 1
        stats.nbytes_pulled += nbytes
        duration_s = perf_counter() - started
        self._turns.held_s += duration_s
        return TransferReport(link.peer, link.transport, nbytes, num_extents, duration_s, tuple(destination))

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
        """See `KvCacheManager.pull_blocks`. What fits is looked up and checked once (`Pairing`)."""
        await self._turns.give()
        started = perf_counter()
        width = check_layer_width(tensor_num_per_layer)
        check_layer_range("src_layer_range", src_layer_range)
        entry = self._store.own_entry(cache, "the destination")
        destination = check_block_numbers("dst_blocks", dst_blocks, entry.geometry.num_slots, is_unique=True)
        source = check_block_numbers("src_blocks", src_blocks, 2**63)
        check_same_length(source, destination)
        ours = check_layers("dst_layer_range", dst_layer_range, entry.geometry.num_tensors, width)
        link = self._links.open_link(key.cluster_id)
        if not len(destination):
            return TransferReport.of(link.peer, link.transport, 0, 0, started, ())
        done = tuple(as_ints(destination))
        movement = self._store.begin_moving(entry, done)
        in_turn_s: float | None = None
        try:
            in_turn_s = await start(link, timeout_s)
            endpoint = link.endpoint
            place = place_of_pull(key, cache, src_layer_range, dst_layer_range, width)
            pairing = await self._pair(link, key, entry, ours, src_layer_range, width, place, in_turn_s)
            found, local, remote, num_tensors, theirs = pairing[:5]
            geometry = found.geometry
            if highest(source) >= geometry.num_slots:
                check_blocks("src_blocks", source, geometry.num_slots)
            nbytes = geometry.slot_nbytes * len(done) * num_tensors
            found_at = perf_counter()
            left_s = timeout_s - (found_at - started)
            if link.is_out_of_reach(remote):
                pieces = join_blocks(destination, source, geometry.slot_nbytes)
                num_extents = await get_by_detour(link, target_of(key), found, local, theirs, pieces, nbytes, left_s)
            else:
                extents = await plan(local, remote, destination, source, geometry.slot_nbytes, timeout_s=left_s)
                num_extents = len(extents)
                left_s = timeout_s - (perf_counter() - started)
                await get_checked(link, found, extents, nbytes, timeout_s=left_s)
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            self._store.end_moving(entry, movement, is_quiet=link.endpoint.is_quiet)
            if in_turn_s is not None:
                finish(link)
        stats = link.stats
        stats.pulls += 1
        stats.nbytes_pulled += nbytes
        report = TransferReport.of(link.peer, link.transport, nbytes, num_extents, started, done)
        if nbytes <= endpoint.immediate_nbytes:
            self._turns.held_s += perf_counter() - found_at
        return report

    async def prepare(
        self,
        key: BlocksCacheKey,
        cache: KvCache,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> None:
        """Check and look up what `pull_blocks` with these arguments would, so that it need not. Raises as that does."""
        check_layer_range("src_layer_range", src_layer_range)
        entry = self._store.own_entry(cache, "the destination")
        ours = check_layers("dst_layer_range", dst_layer_range, entry.geometry.num_tensors, tensor_num_per_layer)
        link = self._links.open_link(key.cluster_id)
        place = place_of_pull(key, cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        link.begin()
        try:
            await self._pair(link, key, entry, ours, src_layer_range, tensor_num_per_layer, place, timeout_s)
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            link.end()

    async def _pair(
        self,
        link: Link,
        key: BlocksCacheKey,
        entry: CacheEntry,
        ours: Tensors,
        src_layer_range: range | None,
        width: int,
        place: Place | None,
        timeout_s: float,
    ) -> Pairing:
        """Return the peer's cache of `key` paired with ours: remembered while it is still that one, else looked up."""
        pairing = None if place is None else link.pairings.get(place)
        if pairing is not None and await is_current(link.endpoint, pairing.found, timeout_s=timeout_s, peer=link.peer):
            return pairing
        found = await find_cache(link, target_of(key), timeout_s)
        pairing = _pair(entry, ours, found, src_layer_range, width)
        if place is not None and not link.is_out_of_reach(pairing.remote):
            link.keep_pairing(place, pairing)
        return pairing

    async def pull_slot_into_blocks(
        self,
        key: CacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.pull_blocks`, with the key of a slot."""
        await self._turns.give()
        started = perf_counter()
        width = check_layer_width(tensor_num_per_layer)
        check_layer_range("src_layer_range", src_layer_range)
        key = check_pull_key(key)
        entry = self._store.own_entry(cache, "the destination")
        ours = check_layers("dst_layer_range", dst_layer_range, entry.desc.num_tensors, width)
        destination = check_blocks("dst_blocks", dst_blocks, entry.desc.num_slots, is_unique=True)
        if len(src_blocks):
            raise ParameterError(f"src_blocks must be empty when a slot is pulled into blocks, got {src_blocks!r}")
        link = self._links.open_link(key.cluster_id)
        if not destination:
            return TransferReport.of(link.peer, link.transport, 0, 0, started, ())

        def plan(found: Found) -> tuple[Tensors, list[Piece]]:
            geometry = found.geometry
            theirs = check_layers("src_layer_range", src_layer_range, geometry.num_tensors, width)
            check_same_tensors(ours, theirs)
            check_same_kind(entry.geometry, geometry, is_by_block=False)
            return theirs, _scatter(destination, entry.geometry, found)

        return await self._pull(
            link, entry, ours, destination, target_of(key), plan, timeout_s, started, is_consuming=True
        )

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
        await self._turns.give()
        started = perf_counter()
        check_layer_range("src_layer_range", src_layer_range)
        check_layer_range("dst_layer_range", dst_layer_range)
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

        def plan(found: Found) -> tuple[Tensors, list[Piece]]:
            geometry = found.geometry
            theirs = check_layers("src_layer_range", src_layer_range, geometry.num_tensors, tensor_num_per_layer)
            if from_offset + nbytes > geometry.slot_nbytes:
                raise ParameterError(
                    f"src_cache_offset {from_offset} and size {nbytes} do not fit into the peer's slot "
                    f"of {geometry.slot_nbytes} bytes"
                )
            check_same_tensors(ours, theirs)
            check_same_kind(entry.geometry, geometry, is_by_block=False)
            to, source = batch_index * desc.slot_nbytes + to_offset, found.slot * geometry.slot_nbytes + from_offset
            return theirs, [Piece(to, source, nbytes)]

        # A pull "with offset" never releases a key, even with offset 0 (the spec, section 5.3).
        is_consuming = src_cache_offset is None and dst_cache_offset is None
        return await self._pull(
            link,
            entry,
            ours,
            (batch_index,),
            target_of(key),
            plan,
            timeout_s,
            started,
            is_consuming=is_consuming,
        )

    async def _pull(
        self,
        link: Link,
        entry: CacheEntry,
        ours: Tensors,
        moving: Sequence[int],
        target: Target,
        plan: Plan,
        timeout_s: float,
        started: float,
        *,
        is_consuming: bool,
    ) -> TransferReport:
        """Pull one slot: look up with a read lease, plan, get, and give the lease back with what was delivered."""
        movement = self._store.begin_moving(entry, moving)
        in_turn_s: float | None = None
        found: Found | None = None
        delivered: tuple[int, int] | None = None
        try:
            in_turn_s = await start(link, timeout_s)
            found = await open_read(link, target, in_turn_s)
            theirs, pieces = plan(found)
            nbytes = sum([piece.nbytes for piece in pieces]) * ours.num
            runs = select_runs(entry.geometry.runs, *ours)
            left_s = timeout_s - (perf_counter() - started)
            if link.is_out_of_reach(found.geometry.runs):
                num_extents = await get_by_detour(link, target, found, runs, theirs, pieces, nbytes, left_s)
            else:
                extents = spread(runs, select_runs(found.geometry.runs, *theirs), pieces)
                num_extents = len(extents)
                await get_checked(link, found, extents, nbytes, timeout_s=left_s)
            link.stats.pulls += 1
            link.stats.nbytes_pulled += nbytes
            if is_consuming:
                delivered = (theirs.start, theirs.stop)
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            if found is not None:
                link.post(CloseRead(found.lease, delivered))
            self._store.end_moving(entry, movement, is_quiet=link.endpoint.is_quiet)
            if in_turn_s is not None:
                finish(link)
        return TransferReport.of(link.peer, link.transport, nbytes, num_extents, started, tuple(moving))


def _pair(entry: CacheEntry, ours: Tensors, found: Found, src_layer_range: range | None, width: int) -> Pairing:
    """Check that blocks of the peer's cache fit into ours; raises before any byte has moved."""
    geometry = found.geometry
    theirs = check_layers("src_layer_range", src_layer_range, geometry.num_tensors, width)
    check_same_tensors(ours, theirs)
    check_same_kind(entry.geometry, geometry, is_by_block=True)
    local, remote = select_runs(entry.geometry.runs, *ours), select_runs(geometry.runs, *theirs)
    return Pairing.of(found, local, remote, ours.num, theirs)


def _scatter(destination: list[int], ours: CacheGeometry, found: Found) -> list[Piece]:
    """Return the pieces that lay a slot into blocks, the last perhaps in part. Source: the spec, section 9.3."""
    nbytes = found.geometry.slot_nbytes
    needed = -(-nbytes // ours.slot_nbytes)
    if len(destination) != needed:
        raise ParameterError(
            f"a slot of {nbytes} bytes fills {needed} blocks of {ours.slot_nbytes} bytes; "
            f"dst_blocks has {len(destination)}"
        )
    return scatter_slot(destination, ours.slot_nbytes, found.slot * nbytes, nbytes)
