"""The functions that copy within one cluster, on the manager. Source: the spec, sections 6.8 to 6.10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlink.caches.copies import LocalCopier
from kvlink.caches.kvcache import KvCache
from kvlink.checks import check_size
from kvlink.geometry import check_int


class CopyCalls:
    """Copies between caches of one cluster. Base of `KvCacheManager`."""

    _local: LocalCopier

    async def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
    ) -> None:
        """Copy a slot of one of our caches into a slot of another, or of the same; destination first. Any role.

        Args:
            offset: bytes into *both* slots.
            size: bytes per tensor; -1 for the rest of the source slot after `offset`.

        Raises:
            ParameterError, MismatchError: slots, offset and size do not fit, or the caches differ in tensors or data
                type; no byte has moved.
            CacheNotFoundError: a cache was deallocated.

        Source: the spec, section 6.8.
        """
        size = check_size(size)
        await self._local.copy_cache(
            dst,
            src,
            check_int("dst_batch_index", dst_batch_index, 0, 2**32 - 1),
            check_int("src_batch_index", src_batch_index, 0, 2**32 - 1),
            check_int("offset", offset, 0, 2**63 - 1),
            size,
        )

    async def copy_blocks(self, cache: KvCache, copy_block_info: Mapping[int, Sequence[int]]) -> None:
        """Copy blocks inside one cache: each key block to every block of its list, in all tensors. Any role.

        Copies behave as if all sources were read before anything is written, so ``{0: [1], 1: [0]}`` exchanges two
        blocks. A destination may occur once. An empty dict is a no-op. Nothing moves if any number is wrong.

        Source: the spec, section 6.9.
        """
        await self._local.copy_blocks(cache, copy_block_info)

    async def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: Mapping[int, int]) -> None:
        """Copy blocks between a HOST and a DEVICE cache, one way: the source stays as it is. Any role.

        From HOST to DEVICE it swaps in, from DEVICE to HOST it swaps out. An empty dict is a no-op.

        Raises:
            ParameterError: not exactly one of the two is a HOST cache, or a number is wrong; no byte has moved.
            MismatchError: different block sizes, tensors or data types.

        Source: the spec, section 6.10.
        """
        await self._local.swap_blocks(src, dst, src_to_dst)
