"""One destination of a layer-wise push: open it for writing, put layer after layer, tell the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvlink.caches.table import CacheEntry
from kvlink.checks import check_blocks, check_same_kind
from kvlink.errors import FeatureNotEnabledError, KVLinkError, MismatchError, ParameterError
from kvlink.geometry import TensorRun, select_runs, tensor_at
from kvlink.keys import BlocksCacheKey
from kvlink.links.grants import WriteGrant
from kvlink.links.link import Link
from kvlink.links.table import LinkTable
from kvlink.plan import Extent, Piece, plan_blocks, scatter_slot, spread, total_nbytes
from kvlink.transfers.layerconfig import TransferConfig, TransferWithCacheKeyConfig
from kvlink.transfers.transfer import put_checked
from kvlink.transfers.views import cache_of, open_write
from kvlink.wire import LayerEvent, Target

WIDTH: Final = 2
"""Tensors of a layer; always K and V here (the spec, section 8.2)."""


class BlocksToMove(NamedTuple):
    """What is moved of each tensor: blocks to blocks, a slot into blocks, or (no `destination`) a slot to a slot."""

    source: list[int] | None
    destination: list[int] | None
    dst_block_nbytes: int


class _Place(NamedTuple):
    """Where tensors of a layer lie in the receiver.

    `local` are the source's tensors, `remote` as many of the receiver's, `slot_offset` the bytes into each of these
    where a slot goes, and `layer` the layer that they belong to there.
    """

    grant: WriteGrant
    layer: int
    local: tuple[TensorRun, ...]
    remote: tuple[TensorRun, ...]
    slot_offset: int


class LayerSender:
    """Sends layers of one cache to one destination, in order.

    Args:
        push_id: tells this push from others of this cluster.
        layers: which source layers.
        timeout_s: deadline for opening, and for each layer.
    """

    def __init__(
        self,
        push_id: int,
        config: TransferConfig | TransferWithCacheKeyConfig,
        layers: range,
        entry: CacheEntry,
        moving: BlocksToMove,
        links: LinkTable,
        *,
        timeout_s: float,
    ) -> None:
        self.config = config
        self.layers = layers
        self._push_id = push_id
        self._entry = entry
        self._moving = moving
        self._links = links
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._opened: WriteGrant | None = None
        self._caches: set[int] = set()
        self._known: list[WriteGrant] = []
        self._has_ended = False

    async def open(self) -> None:
        """Get the right to write into the destination, and check that it fits, before the first layer is there.

        Raises:
            NotLinkedError, CacheNotFoundError, ParameterError, MismatchError: it cannot be.
        """
        link = self._links.open_link(self.config.dst_cluster_id)
        link.begin()
        self._link = link
        if isinstance(self.config, TransferWithCacheKeyConfig):
            grant = self._opened = await self._grant(link, cache_of(self.config.cache_key))
            geometry = grant.found.geometry
            check_same_kind(self._entry.geometry, geometry, is_by_block=self._moving.source is not None)
            if geometry.num_tensors < self.config.dst_layer_range.stop * WIDTH:
                raise MismatchError(
                    f"dst_layer_range is {self.config.dst_layer_range!r}; the receiver's cache has "
                    f"{geometry.num_tensors} tensors"
                )
            if self._moving.destination is not None:
                if self._moving.dst_block_nbytes != geometry.slot_nbytes:
                    raise MismatchError(
                        f"bytes of a block do not match: {self._moving.dst_block_nbytes} are sent, the receiver's "
                        f"cache has {geometry.slot_nbytes}"
                    )
                check_blocks("dst_block_indices", self._moving.destination, geometry.num_slots)
            elif isinstance(self.config.cache_key, BlocksCacheKey):
                raise ParameterError("a BlocksCacheKey needs dst_block_indices")
            elif self._entry.desc.slot_nbytes > geometry.slot_nbytes:
                raise MismatchError(
                    f"bytes of a slot do not fit: {self._entry.desc.slot_nbytes} are sent, the receiver's slot has "
                    f"{geometry.slot_nbytes}"
                )
            elif self.config.cache_key.batch_index >= geometry.num_slots:
                raise ParameterError(f"the receiver's cache has no slot {self.config.cache_key.batch_index}")
            self._caches.add(grant.found.cache_id)
        else:
            for layer in self.layers:
                self._caches.update(place.grant.found.cache_id for place in await self._places(link, layer))

    async def send(self, layer: int) -> None:
        """Put one layer, then tell the receiver. Raises what a push raises."""
        link = self._link
        assert link is not None
        places = await self._places(link, layer)
        for place in places:
            extents = self._plan(place)
            await put_checked(link, place.grant, extents, total_nbytes(extents), timeout_s=self._timeout_s)
            link.stats.nbytes_pushed += total_nbytes(extents)
        for cache_id, landed in sorted({(place.grant.found.cache_id, place.layer) for place in places}):
            self._caches.add(cache_id)
            link.post(LayerEvent(push_id=self._push_id, cache_id=cache_id, tag=self.config.tag, layer=landed))

    def close(self, error: KVLinkError | None) -> None:
        """Tell the receiver how it ended, and let the link go. Idempotent; the first call counts."""
        link = self._link
        if link is None or self._has_ended:
            return
        self._has_ended = True
        status, text = (0, "") if error is None else (error.status, str(error)[:1000])
        for cache_id in self._caches:
            link.post(
                LayerEvent(push_id=self._push_id, cache_id=cache_id, tag=self.config.tag, status=status, text=text)
            )
        link.stats.pushes += error is None
        link.stats.failures += error is not None
        link.end()

    def blame(self, error: KVLinkError) -> None:
        """Let an error of this destination name it."""
        if self._link is not None:
            self._link.blame(error)

    async def _grant(self, link: Link, target: Target) -> WriteGrant:
        grant = await open_write(link, target, timeout_s=self._timeout_s)
        if link.is_out_of_reach(grant.found.geometry.runs):
            raise FeatureNotEnabledError(f"layer-wise pushes take no detour: {link.detour}", peer=link.peer)
        return grant

    async def _places(self, link: Link, layer: int) -> list[_Place]:
        first = layer * WIDTH
        runs = self._entry.geometry.runs
        if isinstance(self.config, TransferWithCacheKeyConfig):
            # Never asked for again: the key may name another cache by now, and a push goes into one or fails.
            grant = self._opened
            assert grant is not None
            landed = self.config.dst_layer_range[layer - self.layers.start]
            remote = select_runs(grant.found.geometry.runs, landed * WIDTH, landed * WIDTH + WIDTH)
            key = self.config.cache_key
            slot = 0 if isinstance(key, BlocksCacheKey) else key.batch_index
            offset = slot * grant.found.geometry.slot_nbytes
            return [_Place(grant, landed, select_runs(runs, first, first + WIDTH), remote, offset)]
        places = []
        for index in range(WIDTH):
            address = self.config.dst_addrs[(layer - self.layers.start) * WIDTH + index]
            known = [grant for grant in self._known if self._find(grant, address) is not None]
            grant = known[0] if known else await self._grant(link, Target("address", address))
            if not known:
                self._known.append(grant)
            landed, run = self._locate(grant, address)
            local = select_runs(runs, first + index, first + index + 1)
            places.append(_Place(grant, landed, local, (run,), 0))
        return places

    def _locate(self, grant: WriteGrant, address: int) -> tuple[int, TensorRun]:
        """Return the layer that `address` is in, and the place there; refuse one without room for what is sent."""
        found = self._find(grant, address)
        peer = self.config.dst_cluster_id
        if found is None:
            raise ParameterError(f"cluster {peer} has no tensor at {address:#x}")
        tensor, run, room = found
        targets = self._moving.destination
        span = self._entry.desc.slot_nbytes if targets is None else (max(targets) + 1) * self._moving.dst_block_nbytes
        if span > room:
            raise ParameterError(
                f"address {address:#x} of cluster {peer} has {room} bytes of its tensor behind it; {span} are sent"
            )
        return tensor // WIDTH, run

    @staticmethod
    def _find(grant: WriteGrant, address: int) -> tuple[int, TensorRun, int] | None:
        """Return the tensor that `address` is in, the place, and the bytes of the tensor behind it; None: in none."""
        geometry, bases = grant.found.geometry, dict(grant.found.addresses)
        tensor_nbytes = geometry.num_slots * geometry.slot_nbytes
        first = 0
        for run in geometry.runs:
            place = address - bases.get(run.region, 0)
            found = tensor_at(run, place, tensor_nbytes)
            if run.region in bases and found is not None:
                index, within = found
                return first + index, TensorRun(run.region, place, 0, 1), tensor_nbytes - within
            first += run.num_tensors
        return None

    def _plan(self, place: _Place) -> Sequence[Extent]:
        source, destination, block_nbytes = self._moving
        own_nbytes = self._entry.desc.slot_nbytes
        slot_offset = self.config.src_batch_index * own_nbytes
        if destination is None:
            pieces = [Piece(slot_offset, place.slot_offset, own_nbytes)]
        elif source is None:
            scattered = scatter_slot(destination, block_nbytes, slot_offset, own_nbytes)
            pieces = [Piece(local, remote, nbytes) for remote, local, nbytes in scattered]
        else:
            return plan_blocks(place.local, place.remote, source, destination, block_nbytes, is_push=True)
        return spread(place.local, place.remote, pieces)
