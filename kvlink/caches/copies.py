"""Copies inside one cluster: `copy_cache`, `copy_blocks`, `swap_blocks`. Source: the spec, sections 6.8 to 6.10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import check_blocks
from kvlink.errors import FeatureNotEnabledError, MismatchError, ParameterError, ParameterTypeError, shown
from kvlink.geometry import Placement, TensorRun
from kvlink.memory.copying import Copier
from kvlink.memory.regions import LocalRegion, Region
from kvlink.memory.strided import Copy
from kvlink.plan import Extent, Piece, join_blocks, spread

_BUFFER = -1
"""The region number of a buffer that lives for one copy."""


class LocalCopier:
    """The copies of one cluster between its own caches.

    Args:
        store: what it owns.
        copier: its copy threads.
    """

    def __init__(self, store: CacheStore, copier: Copier) -> None:
        self._store = store
        self._copier = copier

    async def copy_cache(
        self, dst: KvCache, src: KvCache, dst_batch_index: int, src_batch_index: int, offset: int, size: int
    ) -> None:
        """See `KvCacheManager.copy_cache`."""
        to, source = self._own_entry(dst, "the destination"), self._own_entry(src, "the source")
        for name, entry, index in (("dst", to, dst_batch_index), ("src", source, src_batch_index)):
            if index >= entry.desc.num_slots:
                raise ParameterError(
                    f"{name}_batch_index is {index}; the cache has slots 0 to {entry.desc.num_slots - 1}"
                )
        _check_tensors(to, source)
        nbytes = source.desc.slot_nbytes - offset if size == -1 else size
        for name, entry in (("source", source), ("destination", to)):
            if nbytes < 1 or offset + nbytes > entry.desc.slot_nbytes:
                raise ParameterError(
                    f"offset {offset} and size {nbytes} do not fit into the {name}'s slot of "
                    f"{entry.desc.slot_nbytes} bytes"
                )
        if to is source and dst_batch_index == src_batch_index:
            return
        piece = Piece(
            dst_batch_index * to.desc.slot_nbytes + offset, src_batch_index * source.desc.slot_nbytes + offset, nbytes
        )
        await self._run([(to, [dst_batch_index]), (source, [src_batch_index])], to, source, [piece])

    async def copy_blocks(self, cache: KvCache, copies: Mapping[int, Sequence[int]]) -> None:
        """See `KvCacheManager.copy_blocks`."""
        entry = self._own_entry(cache, "the cache")
        if not isinstance(copies, Mapping):
            raise ParameterTypeError(f"copy_blocks takes a dict from block to list of blocks, got {shown(copies)}")
        num_blocks = entry.desc.num_slots
        sources: list[int] = []
        targets: list[int] = []
        for source, blocks in copies.items():
            (block,) = check_blocks("a source block", [source], num_blocks)
            each = check_blocks(f"the blocks that {block} is copied to", blocks, num_blocks)
            sources += [block] * len(each)
            targets += each
        check_blocks("the destination blocks", targets, num_blocks, is_unique=True)
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        if not pairs:
            return
        # A block that is both read and written is read first, into a buffer: as if all sources were read at once.
        overwritten = {target for _, target in pairs}
        first = sorted({source for source, _ in pairs} & overwritten)
        place = {block: index for index, block in enumerate(first)}
        direct = [(source, target) for source, target in pairs if source not in place]
        staged = [(place[source], target) for source, target in pairs if source in place]
        movement = self._store.begin_moving(entry, [*targets, *sources])
        try:
            nbytes = entry.desc.slot_nbytes
            if staged:
                buffer = np.empty(len(first) * nbytes * entry.desc.num_tensors, np.uint8)
                run = (TensorRun(_BUFFER, 0, len(first) * nbytes, entry.desc.num_tensors),)
                memory: Mapping[int, Region] = {**self._store.memory, _BUFFER: LocalRegion(buffer)}
                fill = join_blocks(range(len(first)), first, nbytes)
                await self._copy(memory, spread(run, entry.geometry.runs, fill))
            if direct:
                pieces = join_blocks([t for _, t in direct], [s for s, _ in direct], nbytes)
                await self._copy(self._store.memory, spread(entry.geometry.runs, entry.geometry.runs, pieces))
            if staged:
                pieces = join_blocks([t for _, t in staged], [s for s, _ in staged], nbytes)
                await self._copy(memory, spread(entry.geometry.runs, run, pieces))
        finally:
            self._store.end_moving(entry, movement)

    async def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: Mapping[int, int]) -> None:
        """See `KvCacheManager.swap_blocks`."""
        source, to = self._own_entry(src, "the source"), self._own_entry(dst, "the destination")
        if {source.desc.placement, to.desc.placement} != {Placement.HOST, Placement.DEVICE}:
            raise ParameterError(
                f"swap_blocks moves between a HOST and a DEVICE cache; these are {source.desc.placement.name} and "
                f"{to.desc.placement.name}"
            )
        if not isinstance(src_to_dst, Mapping):
            raise ParameterTypeError(f"swap_blocks takes a dict from block to block, got {shown(src_to_dst)}")
        _check_tensors(to, source)
        if source.desc.slot_nbytes != to.desc.slot_nbytes:
            raise MismatchError(
                f"bytes of a block do not match: the source has {source.desc.slot_nbytes}, "
                f"the destination has {to.desc.slot_nbytes}"
            )
        sources = check_blocks("the source blocks", list(src_to_dst.keys()), source.desc.num_slots)
        targets = check_blocks("the destination blocks", list(src_to_dst.values()), to.desc.num_slots, is_unique=True)
        if targets:
            pieces = join_blocks(targets, sources, to.desc.slot_nbytes)
            await self._run([(to, targets), (source, sources)], to, source, pieces)

    def _own_entry(self, cache: KvCache, what: str) -> CacheEntry:
        """Return the record of a cache of ours that this process can copy."""
        entry = self._store.own_entry(cache, what)
        device = self._store.device_of(entry)
        if device is not None:
            raise FeatureNotEnabledError(
                f"{what} {cache!r} is in the memory of CUDA device {device}, where kvlink copies nothing; use the copy "
                "of the framework that made it, such as torch's tensor.copy_()"
            )
        return entry

    async def _run(
        self,
        moving: list[tuple[CacheEntry, list[int]]],
        to: CacheEntry,
        source: CacheEntry,
        pieces: list[Piece],
    ) -> None:
        movements = [(entry, self._store.begin_moving(entry, blocks)) for entry, blocks in moving]
        try:
            await self.copy_runs(to.geometry.runs, source.geometry.runs, pieces)
        finally:
            for entry, movement in movements:
                self._store.end_moving(entry, movement)

    async def copy_runs(
        self, to: tuple[TensorRun, ...], source: tuple[TensorRun, ...], pieces: Sequence[Piece]
    ) -> None:
        """Copy pieces between tensors of ours, whose caches the caller keeps."""
        await self._copy(self._store.memory, spread(to, source, pieces))

    async def _copy(self, memory: Mapping[int, Region], extents: list[Extent]) -> None:
        nbytes = sum(extent.nbytes * extent.num_rows for extent in extents)
        copies = [
            Copy(memory[to].memory, offset, stride, memory[source].memory, source_offset, source_stride, length, rows)
            for to, offset, stride, source, source_offset, source_stride, length, rows in extents
        ]
        await self._copier.run(copies, nbytes)


def _check_tensors(to: CacheEntry, source: CacheEntry) -> None:
    for field, ours, theirs in (
        ("number of tensors", to.desc.num_tensors, source.desc.num_tensors),
        ("data type", to.desc.data_type.value, source.desc.data_type.value),
    ):
        if ours != theirs:
            raise MismatchError(f"{field} does not match: the destination has {ours}, the source has {theirs}")
