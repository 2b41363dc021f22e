"""Which caches both sides have: one for each size of block."""

from __future__ import annotations

from typing import Final

from kvlink.geometry import CacheDesc

BLOCK_NBYTES: Final = (4096, 16384, 65536, 262144, 1048576)
NUM_TENSORS: Final = 2
_MAX_BLOCKS: Final = 4096
_SLACK_NBYTES: Final = 4 << 20


def desc_of(block_nbytes: int, size_nbytes: int) -> CacheDesc:
    """Return the cache for blocks of that size, of `size_nbytes` at most, and of 8 blocks at least."""
    num_blocks = max(8, min(_MAX_BLOCKS, size_nbytes // (NUM_TENSORS * block_nbytes)))
    return CacheDesc(NUM_TENSORS, (num_blocks, block_nbytes), "uint8")


def pool_nbytes(size_nbytes: int) -> int:
    """Return the pool that holds all of them."""
    return _SLACK_NBYTES + sum(
        desc.num_slots * NUM_TENSORS * size for size, desc in ((n, desc_of(n, size_nbytes)) for n in BLOCK_NBYTES)
    )
