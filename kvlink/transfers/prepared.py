"""Prepared transfers: one pair of caches, many movements between them by block numbers.

For engines that issue thousands a second. Everything that does not depend on the block numbers is checked once; a call
takes the numbers as index arrays (int32, int64, any integer type) or lists, and checks and plans them without a Python
loop per block.

A prepared transfer is never stale. It holds no address of the peer's, only what the caller meant: a key, a cache, the
layers. Before and after each movement the state word of the peer's cache is read, as for every other movement.

    Decision: when the peer's cache has ended, or the link is a new one, the next call looks the key up again and
        checks the geometry again, one round trip, and fails typed where there is no such cache or it does not fit.
    Because: it then does exactly what `pull_blocks` with the same arguments does, and there is one rule to know.
    Instead of: an error that makes every engine write the same loop around it.
    Revisit when: somebody must know that a key names another cache now; `BlocksCacheKey` never tells.
"""

from __future__ import annotations

from kvlink.caches.bookkeeping import READERS, CacheBookkeeping
from kvlink.caches.kvcache import KvCache
from kvlink.checks import Blocks, check_layer_width
from kvlink.errors import KVLinkError, ParameterTypeError
from kvlink.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from kvlink.report import TransferReport
from kvlink.transfers.partial import raise_reported
from kvlink.transfers.pulls import Puller, place_of_pull
from kvlink.transfers.pushes import Pusher, place_of_push


class PreparedPull:
    """Pulls blocks of one cache of a peer into one of ours. Made by `KvCacheManager.prepare_pull`.

    Holds nothing that must be given back. It keeps `cache` alive as any reference does.

    Attributes:
        key: of the peer's cache.
        cache: ours.
    """

    __slots__ = ("_dst_layer_range", "_manager", "_place", "_src_layer_range", "_width", "cache", "key")

    def __init__(
        self,
        manager: Preparing,
        key: BlocksCacheKey,
        cache: KvCache,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        width: int,
    ) -> None:
        self.key = key
        self.cache = cache
        self._manager = manager
        self._src_layer_range = src_layer_range
        self._dst_layer_range = dst_layer_range
        self._width = width
        self._place = place_of_pull(key, cache, src_layer_range, dst_layer_range, width)

    async def pull(self, src_blocks: Blocks, dst_blocks: Blocks, *, timeout_s: float | None = None) -> TransferReport:
        """Copy blocks as `KvCacheManager.pull_blocks` with the prepared arguments does; the same report and errors.

        Args:
            src_blocks, dst_blocks: integer arrays of shape (n,), or lists; no number twice in `dst_blocks`. Do not
                change them until the call has ended.
            timeout_s: deadline of the call; None for the cluster's `ClusterConfig.operation_timeout_s`.

        Ownership and cancellation: as for `KvCacheManager.pull_blocks`.
        """
        manager = self._manager
        manager._check_role("pull", READERS)
        try:
            if timeout_s is None:
                report = manager._puller.pull_at_once(self.key, self.cache, src_blocks, dst_blocks, self._place)
                if report is not None:
                    return report
            return await manager._puller.pull_blocks(
                self.key,
                self.cache,
                src_blocks,
                dst_blocks,
                src_layer_range=self._src_layer_range,
                dst_layer_range=self._dst_layer_range,
                tensor_num_per_layer=self._width,
                timeout_s=manager._timeout_s(timeout_s),
            )
        except KVLinkError as exc:
            raise_reported(exc, self.cache, dst_blocks, dst_blocks)

    def __repr__(self) -> str:
        return f"<PreparedPull of {self.key} into {self.cache!r}>"


class PreparedPush:
    """Pushes blocks of one of our caches into one of a peer's. Made by `KvCacheManager.prepare_push`.

    The write lease that it works under is the link's, as for every push; there is nothing to give back.

    Attributes:
        key: of the peer's cache.
        cache: ours.
    """

    __slots__ = ("_dst_layer_range", "_manager", "_place", "_src_layer_range", "_width", "cache", "key")

    def __init__(
        self,
        manager: Preparing,
        key: BlocksCacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        width: int,
    ) -> None:
        self.key = key
        self.cache = cache
        self._manager = manager
        self._src_layer_range = src_layer_range
        self._dst_layer_range = dst_layer_range
        self._width = width
        self._place = place_of_push(key, cache, src_layer_range, dst_layer_range, width)

    async def push(self, src_blocks: Blocks, dst_blocks: Blocks, *, timeout_s: float | None = None) -> TransferReport:
        """Copy blocks as `KvCacheManager.push_blocks` with the prepared arguments does; the same report and errors.

        Args:
            src_blocks, dst_blocks, timeout_s: as for `PreparedPull.pull`; no number twice in `dst_blocks`.

        Ownership and cancellation: as for `KvCacheManager.push_blocks`.
        """
        manager = self._manager
        try:
            if timeout_s is None:
                report = manager._pusher.push_at_once(self.key, self.cache, src_blocks, dst_blocks, self._place)
                if report is not None:
                    return report
            return await manager._pusher.push_blocks(
                self.key,
                self.cache,
                src_blocks,
                dst_blocks,
                src_layer_range=self._src_layer_range,
                dst_layer_range=self._dst_layer_range,
                tensor_num_per_layer=self._width,
                timeout_s=manager._timeout_s(timeout_s),
            )
        except KVLinkError as exc:
            raise_reported(exc, self.cache, src_blocks, dst_blocks)

    def __repr__(self) -> str:
        return f"<PreparedPush of {self.cache!r} into {self.key}>"


class Preparing(CacheBookkeeping):
    """Prepare transfers. Base of `KvCacheManager`."""

    _puller: Puller
    _pusher: Pusher

    async def prepare_pull(
        self,
        key: BlocksCacheKey,
        cache: KvCache,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
    ) -> PreparedPull:
        """Check and look up once what many pulls of blocks have in common. DECODER and MIX only.

        One round trip, or none where the link knows the peer's cache already. No byte moves. When the peer's cache
        ends, or the link is lost and made anew, the pulls look it up again by themselves.

        Args:
            key: of the peer's paged cache.
            cache, src_layer_range, dst_layer_range, tensor_num_per_layer: as for `pull_blocks`.
            timeout_s: deadline of the look-up; None for the cluster's `ClusterConfig.operation_timeout_s`.

        Raises:
            ParameterError, MismatchError, NotLinkedError, CacheNotFoundError, LinkLostError, TransferTimeoutError: as
                for `pull_blocks`.
        """
        self._check_role("prepare_pull", READERS)
        if not isinstance(key, BlocksCacheKey):
            raise ParameterTypeError(f"the key must be a BlocksCacheKey, got {key!r}")
        width = check_layer_width(tensor_num_per_layer)
        limit_s = self._timeout_s(timeout_s)
        await self._puller.prepare(key, cache, src_layer_range, dst_layer_range, width, limit_s)
        return PreparedPull(self, key, cache, src_layer_range, dst_layer_range, width)

    async def prepare_push(
        self,
        key: BlocksCacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
    ) -> PreparedPush:
        """Check and open once what many pushes of blocks have in common. Any role.

        As `prepare_pull`, with the sides exchanged; it takes the write lease that the pushes run under.

        Args:
            key: of the peer's cache: its blocks key, or its cache id.
            Others: as for `prepare_pull`.
        """
        if not isinstance(key, (BlocksCacheKey, CacheKeyByIdAndIndex)):
            raise ParameterTypeError(f"the key must be a BlocksCacheKey or CacheKeyByIdAndIndex, got {key!r}")
        width = check_layer_width(tensor_num_per_layer)
        limit_s = self._timeout_s(timeout_s)
        await self._pusher.prepare(key, cache, src_layer_range, dst_layer_range, width, limit_s)
        return PreparedPush(self, key, cache, src_layer_range, dst_layer_range, width)
