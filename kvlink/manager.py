"""The KV-cache functions of the spec, on one object. Bookkeeping is ``def``, at once; movement is awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlink.checks import Blocks, check_layer_width
from kvlink.config import ClusterConfig, check_seconds
from kvlink.errors import ParameterError, ParameterTypeError, RoleError
from kvlink.geometry import CacheDesc, Placement, Role, check_int
from kvlink.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, KeyName, check_pull_key
from kvlink.kvcache import KvCache
from kvlink.links import LinkTable
from kvlink.pulls import Puller
from kvlink.report import TransferReport
from kvlink.store import CacheStore

_OWNERS = frozenset({Role.PROMPT, Role.MIX})
_READERS = frozenset({Role.DECODER, Role.MIX})


class KvCacheManager:
    """The caches of one cluster and what moves them. Reached as `Cluster.kv_cache_manager`.

    Which role may call what: the spec, section 12; MIX may do whatever either role may. A call that the role forbids
    raises `RoleError` before anything else is looked at.
    """

    def __init__(self, store: CacheStore, links: LinkTable, config: ClusterConfig, role: Callable[[], Role]) -> None:
        self._store = store
        self._config = config
        self._role = role
        self._puller = Puller(store, links)

    def allocate_cache(self, desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """Take a contiguous cache from the pool and bind key i to slot i.

        Args:
            desc: what to allocate; ``shape[0]`` is the number of slots. Contents are not initialised.
            cache_keys: at most one per slot. A key with ``req_id=ABSENT`` holds a slot's place and binds nothing; of
                the same key twice the last one counts. PROMPT and MIX only.

        Ownership: yours until `deallocate_cache`; bound keys keep it readable for peers after that.

        Raises:
            ParameterError: more keys than slots, or a key that is bound already; nothing is allocated.
            OutOfMemoryError: no room; nothing is allocated and no key is bound.

        Source: the spec, section 6.2.
        """
        _check_desc(desc)
        if not isinstance(cache_keys, (list, tuple)):
            raise ParameterTypeError(f"cache_keys must be a list or tuple of CacheKey, got {cache_keys!r}")
        if cache_keys:
            self._check_role("allocate_cache with keys", _OWNERS)
        if desc.placement is not Placement.DEVICE and cache_keys:
            raise ParameterError("keys are bound to caches of placement DEVICE only")
        names: list[KeyName | None] = []
        for index, key in enumerate(cache_keys):
            if not isinstance(key, CacheKey):
                raise ParameterTypeError(f"cache_keys[{index}] must be a CacheKey, got {key!r}")
            names.append(None if key.is_placeholder else key.name)
        if len(names) > desc.num_slots:
            raise ParameterError(f"{len(names)} keys for a cache of {desc.num_slots} slots; slot i takes key i")
        return self._store.allocate(desc, names, is_blocks=False)

    def allocate_blocks_cache(self, desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> KvCache:
        """Take a paged cache from the pool; ``desc.shape[0]`` is the number of blocks.

        Args:
            blocks_cache_key: under which peers find it; one live cache per model. PROMPT and MIX only.

        Raises:
            ParameterError: the model has a live blocks cache already; nothing is allocated.
            OutOfMemoryError: no room; nothing is allocated.

        Source: the spec, section 6.6.
        """
        _check_desc(desc)
        if blocks_cache_key is None:
            return self._store.allocate(desc, (), is_blocks=True)
        self._check_role("allocate_blocks_cache with a key", _OWNERS)
        if not isinstance(blocks_cache_key, BlocksCacheKey):
            raise ParameterTypeError(f"blocks_cache_key must be a BlocksCacheKey, got {blocks_cache_key!r}")
        return self._store.allocate(desc, (blocks_cache_key.name,), is_blocks=True)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Give a cache back; the handle is of no more use. A second time does nothing.

        Keys that are still bound keep it alive and readable for peers; the key of a blocks cache goes at once. The
        memory itself is reused only when no key, no transfer, no lease and no view is left.

        Source: the spec, sections 5.2 and 6.3.
        """
        if not isinstance(cache, KvCache):
            raise ParameterTypeError(f"deallocate_cache takes a KvCache, got {cache!r}")
        if cache.store is not self._store:
            raise ParameterError(f"{cache!r} belongs to another cluster")
        self._store.deallocate(cache)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Release a key, whatever was pulled of it; an unknown one is no error. PROMPT and MIX only.

        Source: the spec, section 6.4.
        """
        self._check_role("remove_cache_key", _OWNERS)
        if not isinstance(cache_key, CacheKey):
            raise ParameterTypeError(f"remove_cache_key takes a CacheKey, got {cache_key!r}")
        self._store.check_usable()
        self._store.table.remove_key(cache_key.name)

    async def pull_blocks(
        self,
        key: BlocksCacheKey,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
    ) -> TransferReport:
        """Copy blocks of a peer's cache into ours, for every tensor of the chosen layers.

        ``src_blocks[i]`` of the peer lands in ``dst_blocks[i]`` of `cache`, whole: `cache.block_nbytes` bytes of each
        tensor. Order among blocks is not defined; the call returns once all have landed. Nothing is released at the
        peer; the same blocks can be pulled again. Empty lists are a no-op. DECODER and MIX only.

        Args:
            key: of the peer's cache.
            cache: ours; any cache of the same data type and block size.
            src_blocks, dst_blocks: equally long lists or 1-D integer arrays of block numbers; no number twice in
                `dst_blocks`.
            src_layer_range, dst_layer_range: layers to take from and to fill, None for all; equally many.
            tensor_num_per_layer: consecutive tensors that make a layer.
            timeout_s: deadline of the whole call; None for the cluster's `ClusterConfig.operation_timeout_s`.

        Ownership: do not read or write the destination blocks until the call has ended.
        Cancellation: waits, a few ms over shared memory, until nothing is in flight; leaves the contents undefined.

        Raises:
            ParameterError: an argument is wrong (its name and value are in the message); no byte has moved.
            MismatchError: the caches do not fit; no byte has moved.
            NotLinkedError: no link to ``key.cluster_id``.
            CacheNotFoundError: the peer has no such cache (any more); nothing usable was written.
            LinkLostError: the peer went away.
            TransferTimeoutError: the deadline passed.

        Source: the spec, section 6.7.
        """
        self._check_role("pull_blocks", _READERS)
        return await self._puller.pull_blocks(
            key,
            cache,
            src_blocks,
            dst_blocks,
            src_layer_range=src_layer_range,
            dst_layer_range=dst_layer_range,
            tensor_num_per_layer=tensor_num_per_layer,
            timeout_s=self._timeout_s(timeout_s),
        )

    async def pull_cache(
        self,
        key: CacheKey | CacheKeyByIdAndIndex,
        cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_cache_offset: int | None = None,
        dst_cache_offset: int | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
    ) -> TransferReport:
        """Copy one slot of a peer's cache into slot `batch_index` of ours, for every tensor of the chosen layers.

        The source slot comes from the key: its place when it was bound, or its own ``batch_index``. The k-th chosen
        tensor of the peer lands in the k-th chosen tensor of ours. DECODER and MIX only.

        Args:
            key: a request or prefix `CacheKey` (exactly one of the two ids), or a `CacheKeyByIdAndIndex`.
            cache: ours; slots may be larger or smaller than the peer's.
            batch_index: the *destination* slot.
            size: bytes per tensor; -1 for the rest of the destination slot after `dst_cache_offset`.
            src_layer_range, dst_layer_range: layers to take from and to fill, None for all; equally many tensors.
            src_cache_offset, dst_cache_offset: bytes into the source and destination slot. Giving either, even 0, makes
                this a pull that never releases the key.
            tensor_num_per_layer: consecutive tensors that make a layer.
            timeout_s: deadline of the whole call; None for the cluster's `ClusterConfig.operation_timeout_s`.

        What it does to the key: a request key is released at the peer once every tensor has been delivered, by one pull
        or by several of different layers. Prefix keys, pulls with offsets, and pulls that fail release nothing.

        Ownership and cancellation: as for `pull_blocks`.

        Raises:
            ParameterError, MismatchError, NotLinkedError, CacheNotFoundError, LinkLostError, TransferTimeoutError: as
                for `pull_blocks`.

        Source: the spec, sections 5.3 and 6.5.
        """
        self._check_role("pull_cache", _READERS)
        key = check_pull_key(key)
        if size != -1:
            size = check_int("size", size, 1, 2**63 - 1)
        for name, offset in (("src_cache_offset", src_cache_offset), ("dst_cache_offset", dst_cache_offset)):
            if offset is not None:
                check_int(name, offset, 0, 2**63 - 1)
        return await self._puller.pull_cache(
            key,
            cache,
            check_int("batch_index", batch_index, 0, 2**32 - 1),
            size,
            src_layer_range=src_layer_range,
            dst_layer_range=dst_layer_range,
            src_cache_offset=src_cache_offset,
            dst_cache_offset=dst_cache_offset,
            tensor_num_per_layer=check_layer_width(tensor_num_per_layer),
            timeout_s=self._timeout_s(timeout_s),
        )

    def _check_role(self, call: str, allowed: frozenset[Role]) -> None:
        role = self._role()
        if role not in allowed:
            names = " and ".join(sorted(each.name for each in allowed))
            raise RoleError(f"{call} is for {names}; this cluster is {role.name}")

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._config.operation_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)


def _check_desc(desc: object) -> None:
    if not isinstance(desc, CacheDesc):
        raise ParameterTypeError(f"a cache is described by a CacheDesc, got {desc!r}")
