"""The names by which a cache is addressed. Source: the spec, section 1.4. Plain comparable, hashable values.

A `CacheKey` names one slot of one cache, in a *request* or a *prefix* namespace that never collide. A `BlocksCacheKey`
names the one paged cache of a model. A `CacheKeyByIdAndIndex` needs no bound key: the owner's cache id and a slot.
The cluster id is ignored when a key is bound and must be exact when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvlink.errors import ParameterError, ParameterTypeError
from kvlink.geometry import check_int

ABSENT: Final = 2**64 - 1
"""The id that means "none": a key of this `req_id` binds nothing and holds the place of an unused slot."""

_UINT64_MAX = 2**64 - 1
_UINT32_MAX = 2**32 - 1
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class CacheKey:
    """One slot of a contiguous cache, by request or by prefix.

    Args:
        cluster_id: the owner.
        req_id: the request, or `ABSENT`.
        model_id: one cluster may serve several models.
        prefix_id: set for a shared prefix, which pulls never consume.
    """

    cluster_id: int
    req_id: int
    model_id: int = 0
    prefix_id: int = ABSENT

    def __post_init__(self) -> None:
        for name in ("cluster_id", "req_id", "model_id", "prefix_id"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 0, _UINT64_MAX))

    @property
    def prompt_cluster_id(self) -> int:
        """The spec's other name of `cluster_id`."""
        return self.cluster_id

    @property
    def is_placeholder(self) -> bool:
        """Whether it binds nothing: neither a request nor a prefix."""
        return self.req_id == ABSENT and self.prefix_id == ABSENT

    @property
    def name(self) -> KeyName:
        """Its identity inside the owner; a prefix, where there is one, decides the namespace."""
        if self.prefix_id != ABSENT:
            return KeyName("prefix", self.prefix_id, self.model_id)
        return KeyName("request", self.req_id, self.model_id)


@dataclass(frozen=True, slots=True)
class BlocksCacheKey:
    """The paged cache of model `model_id` in cluster `cluster_id`; there is at most one."""

    cluster_id: int
    model_id: int = 0

    def __post_init__(self) -> None:
        for name in ("cluster_id", "model_id"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 0, _UINT64_MAX))

    @property
    def prompt_cluster_id(self) -> int:
        """The spec's other name of `cluster_id`."""
        return self.cluster_id

    @property
    def name(self) -> KeyName:
        """Its identity inside the owner."""
        return KeyName("blocks", 0, self.model_id)


@dataclass(frozen=True, slots=True)
class CacheKeyByIdAndIndex:
    """Slot `batch_index` of the owner's cache `cache_id`."""

    cluster_id: int
    cache_id: int
    batch_index: int = 0

    def __post_init__(self) -> None:
        for name, highest in (("cluster_id", _UINT64_MAX), ("cache_id", _INT64_MAX), ("batch_index", _UINT32_MAX)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 0, highest))


@dataclass(frozen=True, slots=True)
class KeyName:
    """A key as the owner's table knows it: the namespace (``request``, ``prefix``, ``blocks``), the id, the model."""

    namespace: str
    id: int
    model_id: int

    def __str__(self) -> str:
        if self.namespace == "blocks":
            return f"blocks key of model {self.model_id}"
        return f"{self.namespace} {self.id} of model {self.model_id}"


def check_pull_key(key: object) -> CacheKey | CacheKeyByIdAndIndex:
    """Return a key that `pull_cache` may use: exactly one of request and prefix. Source: the spec, section 1.4."""
    if isinstance(key, CacheKeyByIdAndIndex):
        return key
    if not isinstance(key, CacheKey):
        raise ParameterTypeError(f"the key must be a CacheKey or CacheKeyByIdAndIndex, got {key!r}")
    if (key.req_id == ABSENT) == (key.prefix_id == ABSENT):
        raise ParameterError(f"a pull needs exactly one of req_id and prefix_id; {key!r} has both or neither")
    return key
