"""The half of the KV-cache functions that finishes at once: allocating, registering, keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.config import ClusterConfig, check_seconds
from kvlink.errors import ParameterError, ParameterTypeError, RoleError
from kvlink.geometry import CacheDesc, Placement, Role, check_int
from kvlink.keys import BlocksCacheKey, CacheKey, KeyName
from kvlink.stats import PoolUsage

OWNERS = frozenset({Role.PROMPT, Role.MIX})
READERS = frozenset({Role.DECODER, Role.MIX})


class CacheBookkeeping:
    """Allocate, register and release caches and keys. Every call finishes at once. Base of `KvCacheManager`."""

    def __init__(self, store: CacheStore, config: ClusterConfig, role: Callable[[], Role]) -> None:
        self._store = store
        self._config = config
        self._role = role

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
        names = _names(desc, cache_keys)
        if names:
            self._check_role("allocate_cache with keys", OWNERS)
            if desc.placement is not Placement.DEVICE:
                raise ParameterError("keys are bound to caches of placement DEVICE only")
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
        self._check_role("allocate_blocks_cache with a key", OWNERS)
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
        self._check_role("remove_cache_key", OWNERS)
        if not isinstance(cache_key, CacheKey):
            raise ParameterTypeError(f"remove_cache_key takes a CacheKey, got {cache_key!r}")
        self._store.check_usable()
        self._store.table.remove_key(cache_key.name)

    def register_cache(
        self, desc: CacheDesc, buffers: Sequence[object], cache_keys: Sequence[CacheKey] = ()
    ) -> KvCache:
        """Make a contiguous cache of memory that you own, and bind key i to slot i. Any role.

        Args:
            desc: what it is.
            buffers: one per tensor, each of ``desc.tensor_nbytes`` bytes, C-contiguous and writable: numpy arrays,
                torch CPU tensors, anything with the buffer protocol, ``__array_interface__`` or DLPack; or all of them
                in the memory of one CUDA device: torch CUDA tensors of any dtype, ``__cuda_array_interface__`` or
                DLPack. No two may overlap.
            cache_keys: as for `allocate_cache`; pulls never release them.

        Ownership: the memory stays yours and is used in place. It is kept alive and locked against resizing until
        `unregister_cache`, and until peers that may write into it have stopped.

        Peers of the same host reach it with ``process_vm_readv`` and ``process_vm_writev``, which the kernel must
        allow; where it does not, their calls raise `FeatureNotEnabledError` and say what to do.

        CUDA memory is moved by UCX alone, with `UcxConfig.allow_cuda` on both sides: over a link of another transport,
        and where UCX has no way, calls of either side raise `FeatureNotEnabledError`, and no detour is taken. kvlink
        waits for no stream. Before a peer may pull, and before a push of ours, what writes the source blocks must have
        ended on the device (``torch.cuda.synchronize``, or an event that was waited for); so must have what reads or
        writes the destination blocks. When a pull has returned, or a peer was told of a push, the bytes are there for
        all that is submitted to the device from then on; a kernel that runs already may see old ones. The memory is
        kept alive, and not locked: free it when the cache is unregistered and the links to those that used it have
        ended, since UCX keeps it mapped for a peer as long as the link lives. `KvCache.tensors` are the objects that
        were registered, and copies within a cluster are the framework's.

        Raises:
            ParameterError: a buffer does not fit, or a key is bound already; nothing is registered.
            FeatureNotEnabledError: a buffer is in memory that no transport of this cluster reaches; the message says
                what to set.

        Source: the spec, section 9.1.
        """
        _check_desc(desc)
        return self._store.register(desc, _buffers(buffers), _names(desc, cache_keys), is_blocks=False)

    def register_blocks_cache(
        self, desc: CacheDesc, buffers: Sequence[object], blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """Make a paged cache of memory that you own; any role, also with a key. Otherwise as `register_cache`."""
        _check_desc(desc)
        names: tuple[KeyName, ...] = ()
        if blocks_cache_key is not None:
            if not isinstance(blocks_cache_key, BlocksCacheKey):
                raise ParameterTypeError(f"blocks_cache_key must be a BlocksCacheKey, got {blocks_cache_key!r}")
            names = (blocks_cache_key.name,)
        return self._store.register(desc, _buffers(buffers), names, is_blocks=True)

    def unregister_cache(self, cache: KvCache | int) -> None:
        """Let go of registered memory and drop every key of it; takes the cache or its id. An unknown id is no error.

        Source: the spec, section 9.1.
        """
        if isinstance(cache, KvCache):
            self.deallocate_cache(cache)
            return
        handle = self._store.handle(check_int("cache", cache, 0, 2**64 - 1))
        if handle is not None:
            self.deallocate_cache(handle)

    def pool_usage(self, placement: Placement = Placement.DEVICE) -> PoolUsage:
        """Return what a pool holds now; free, and never waits. Raises `ParameterError` where there is no such pool."""
        return self._store.usage(placement)

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


def _buffers(buffers: object) -> Sequence[object]:
    if not isinstance(buffers, (list, tuple)):
        raise ParameterTypeError(f"buffers must be a list or tuple, one per tensor, got {type(buffers).__name__}")
    return buffers


def _names(desc: CacheDesc, cache_keys: object) -> list[KeyName | None]:
    if not isinstance(cache_keys, (list, tuple)):
        raise ParameterTypeError(f"cache_keys must be a list or tuple of CacheKey, got {cache_keys!r}")
    names: list[KeyName | None] = []
    for index, key in enumerate(cache_keys):
        if not isinstance(key, CacheKey):
            raise ParameterTypeError(f"cache_keys[{index}] must be a CacheKey, got {key!r}")
        names.append(None if key.is_placeholder else key.name)
    if len(names) > desc.num_slots:
        raise ParameterError(f"{len(names)} keys for a cache of {desc.num_slots} slots; slot i takes key i")
    return names
