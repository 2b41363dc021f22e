"""What a layer-wise push is told: when layers are ready, and where they go. Source: the spec, sections 1.8 and 8.1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from kvlink.errors import ParameterTypeError, ParameterValueError
from kvlink.geometry import check_int
from kvlink.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from kvlink.tokens import parse_token


class LayerSynchronizer(ABC):
    """Tells when a layer has been computed. Subclass it with a plain or an ``async`` `synchronize_layer`.

    A plain one is called in a thread and may block; an ``async`` one is awaited on the event loop.
    """

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool | Awaitable[bool]:
        """Return once K and V of `layer_index` are computed: True to send it, False to give the whole push up.

        Args:
            layer_index: of the source cache, ascending; each layer is asked for once.
            timeout_in_millis: always None at present.
        """


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """One destination of a layer-wise push, by raw addresses.

    Args:
        dst_cluster_id: the receiver.
        dst_addrs: addresses in the receiver's process, two (K, V) for each transferred layer, each inside a live cache
            of the receiver (`KvCache.tensor_addresses`). For a slot other than 0 add slot times its bytes.
        src_layer_range: layers to send, None for all.
        src_batch_index: the source slot; 0 when blocks are sent.
        tag: travels to the receiver, see `Arrivals.watch`.
    """

    dst_cluster_id: int
    dst_addrs: Sequence[int]
    src_layer_range: range | None = None
    src_batch_index: int = 0
    tag: str = ""

    def __post_init__(self) -> None:
        check_int("dst_cluster_id", self.dst_cluster_id, 0, 2**64 - 1)
        if not isinstance(self.dst_addrs, (list, tuple)):
            raise ParameterTypeError(f"dst_addrs must be a list of addresses, got {self.dst_addrs!r}")
        for index, address in enumerate(self.dst_addrs):
            check_int(f"dst_addrs[{index}]", address, 0, 2**64 - 1)
        _check_range("src_layer_range", self.src_layer_range)
        check_int("src_batch_index", self.src_batch_index, 0, 2**32 - 1)
        _check_tag(self.tag)


@dataclass(frozen=True, slots=True)
class TransferWithCacheKeyConfig:
    """One destination of a layer-wise push, by the key of the receiver's cache.

    Args:
        cache_key: a `BlocksCacheKey`, or a `CacheKeyByIdAndIndex` (whose slot is the destination slot).
        src_layer_range, dst_layer_range: layers to send and to fill; equally many.
        src_batch_index: the source slot; 0 when blocks are sent.
        tag: travels to the receiver, see `Arrivals.watch`.
    """

    cache_key: BlocksCacheKey | CacheKeyByIdAndIndex
    src_layer_range: range
    dst_layer_range: range
    src_batch_index: int = 0
    tag: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex)):
            raise ParameterTypeError(
                f"cache_key must be a BlocksCacheKey or CacheKeyByIdAndIndex, got {self.cache_key!r}"
            )
        for name in ("src_layer_range", "dst_layer_range"):
            if getattr(self, name) is None:
                raise ParameterTypeError(f"{name} is required with a cache key")
            _check_range(name, getattr(self, name))
        if len(self.src_layer_range) != len(self.dst_layer_range):
            raise ParameterValueError(
                f"src_layer_range {self.src_layer_range!r} and dst_layer_range {self.dst_layer_range!r} "
                "must be equally long"
            )
        check_int("src_batch_index", self.src_batch_index, 0, 2**32 - 1)
        if isinstance(self.cache_key, BlocksCacheKey) and self.src_batch_index:
            raise ParameterValueError(f"src_batch_index must be 0 with a BlocksCacheKey, got {self.src_batch_index}")
        _check_tag(self.tag)

    @property
    def dst_cluster_id(self) -> int:
        """The receiver."""
        return self.cache_key.cluster_id


@dataclass(frozen=True, slots=True, repr=False)
class TransferWithTicketConfig:
    """One destination of a layer-wise push, by a ticket for filling (`KvCacheManager.expect_blocks`).

    The blocks that are sent, or the source slot, go to the ticket's blocks in order; to some of them, in another order,
    where the push has destination blocks. The receiver awaits layers and the end by its `Ticket`.

    Args:
        ticket: its token.
        src_layer_range: layers to send, None for all.
        dst_layer_range: layers to fill, equally many; None for the same.
        src_batch_index: the source slot; 0 when blocks are sent.

    Raises:
        TicketError: that is no token.
    """

    ticket: bytes | str
    src_layer_range: range | None = None
    dst_layer_range: range | None = None
    src_batch_index: int = 0

    def __post_init__(self) -> None:
        parse_token(self.ticket)
        for name in ("src_layer_range", "dst_layer_range"):
            _check_range(name, getattr(self, name))
        source, target = self.src_layer_range, self.dst_layer_range
        if target is not None and (source is None or len(source) != len(target)):
            raise ParameterValueError(f"src_layer_range {source!r} and dst_layer_range {target!r} must be equally long")
        check_int("src_batch_index", self.src_batch_index, 0, 2**32 - 1)

    @property
    def dst_cluster_id(self) -> int:
        """The receiver."""
        return parse_token(self.ticket).cluster_id

    def __repr__(self) -> str:  # a token is a right, and no business of logs
        return f"<TransferWithTicketConfig to cluster {self.dst_cluster_id}>"


def _check_range(name: str, layers: object) -> None:
    if layers is None:
        return
    if not isinstance(layers, range):
        raise ParameterTypeError(f"{name} must be a range of layers, got {layers!r}")
    if layers.step != 1 or not 0 <= layers.start < layers.stop:
        raise ParameterValueError(f"{name} must be a range of step 1 with at least one layer, got {layers!r}")


def _check_tag(tag: object) -> None:
    if not isinstance(tag, str) or len(tag) > 1024:
        raise ParameterTypeError(f"tag must be a string of at most 1024 characters, got {tag!r}")
