"""The KV-cache functions of the spec, on one object. Bookkeeping is ``def``, at once; movement is awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from anyio.abc import TaskGroup

from kvlink.caches.bookkeeping import OWNERS, READERS
from kvlink.caches.copies import LocalCopier
from kvlink.caches.copycalls import CopyCalls
from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.tickets import TicketBook
from kvlink.checks import Blocks, check_layer_width, check_size
from kvlink.config import ClusterConfig
from kvlink.errors import KVLinkError, ParameterTypeError, shown
from kvlink.geometry import Role, check_int
from kvlink.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, check_pull_key
from kvlink.links.notifications import check_payload, move_then_notify
from kvlink.links.table import LinkTable
from kvlink.report import TransferReport
from kvlink.tokens import parse_token
from kvlink.transfers.heldtickets import HeldTicket
from kvlink.transfers.layerconfig import LayerSynchronizer
from kvlink.transfers.layerwise import AnyTransferConfig, CacheTask, LayerPusher
from kvlink.transfers.partial import raise_reported
from kvlink.transfers.prepared import Preparing
from kvlink.transfers.pulls import Puller, place_of_pull
from kvlink.transfers.pushes import Pusher, place_of_push
from kvlink.transfers.ticketcalls import TicketMover
from kvlink.transfers.ticketing import Ticketing
from kvlink.transfers.turns import LoopTurns


class KvCacheManager(Preparing, Ticketing, CopyCalls):
    """The caches of one cluster and what moves them. Reached as `Cluster.kv_cache_manager`.

    Which role may call what: the spec, section 12; MIX may do whatever either role may. A call that the role forbids
    raises `RoleError` before anything else is looked at.
    """

    def __init__(
        self,
        store: CacheStore,
        links: LinkTable,
        config: ClusterConfig,
        role: Callable[[], Role],
        local: LocalCopier,
        tasks: TaskGroup,
        tickets: TicketBook,
        mover: TicketMover,
    ) -> None:
        super().__init__(store, config, role, tickets, mover)
        self._turns = LoopTurns()
        self._puller = Puller(store, links, self._turns)
        self._pusher = Pusher(store, links, self._turns)
        self._local = local
        self._links = links
        self._layers = LayerPusher(store, links, config, tasks, mover)

    async def pull_blocks(
        self,
        key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex | HeldTicket | bytes | str,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
        notify: bytes | None = None,
    ) -> TransferReport:
        """Copy blocks of a peer's cache into ours, for every tensor of the chosen layers.

        ``src_blocks[i]`` of the peer lands in ``dst_blocks[i]`` of `cache`, whole: `cache.block_nbytes` bytes of each
        tensor. Order among blocks is not defined; the call returns once all have landed. Nothing is released at the
        peer; the same blocks can be pulled again. Empty lists are a no-op. DECODER and MIX only.

        Args:
            key: of the peer's paged cache. With a `CacheKey` or `CacheKeyByIdAndIndex` the peer's contiguous slot is
                laid into `dst_blocks`, the last one perhaps in part; `src_blocks` is then empty, and the key is
                consumed as by `pull_cache`. Or a ticket, see `offer_blocks`: its token, which this call uses up, or the
                ticket while it is held; `src_blocks` must be of the ticket, and empty means all of them, in order.
            cache: ours; any cache of the same data type and block size.
            src_blocks, dst_blocks: equally long lists or 1-D integer arrays of block numbers; no number twice in
                `dst_blocks`.
            src_layer_range, dst_layer_range: layers to take from and to fill, None for all; equally many.
            tensor_num_per_layer: consecutive tensors that make a layer.
            timeout_s: deadline of the whole call; None for the cluster's `ClusterConfig.operation_timeout_s`.
            notify: payload for the peer's `Cluster.notifications`, sent when all blocks have landed, and acknowledged
                before the call returns; a call that fails sends nothing. An error with the phase ``notify`` means that
                the blocks have landed and the peer was not told.

        Ownership: do not read or write the destination blocks until the call has ended.
        Cancellation: waits, a few ms over shared memory, until nothing is in flight; leaves the contents undefined.

        Raises:
            ParameterError: an argument is wrong (its name and value are in the message); no byte has moved.
            MismatchError: the caches do not fit; no byte has moved.
            NotLinkedError: no link to ``key.cluster_id``.
            CacheNotFoundError: the peer has no such cache (any more); nothing usable was written.
            TicketError: a token is damaged, used already, or its ticket has ended; nothing usable was written.
            LinkLostError: the peer went away.
            TransferTimeoutError: the deadline passed.

        Source: the spec, sections 6.7 and 9.3.
        """
        self._check_role("pull_blocks", READERS)
        if notify is not None:
            again = partial(
                self.pull_blocks,
                key,
                cache,
                src_blocks,
                dst_blocks,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=tensor_num_per_layer,
                timeout_s=timeout_s,
            )
            return await self._and_notify(key, notify, timeout_s, again)
        try:
            if isinstance(key, (bytes, str, HeldTicket)):
                return await self._mover.pull_blocks(
                    key,
                    cache,
                    src_blocks,
                    dst_blocks,
                    src_layer_range=src_layer_range,
                    dst_layer_range=dst_layer_range,
                    tensor_num_per_layer=check_layer_width(tensor_num_per_layer),
                    timeout_s=self._timeout_s(timeout_s),
                )
            if isinstance(key, BlocksCacheKey):
                if timeout_s is None:
                    place = place_of_pull(key, cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
                    report = self._puller.pull_at_once(key, cache, src_blocks, dst_blocks, place)
                    if report is not None:
                        return report
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
            return await self._puller.pull_slot_into_blocks(
                key,
                cache,
                src_blocks,
                dst_blocks,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=tensor_num_per_layer,
                timeout_s=self._timeout_s(timeout_s),
            )
        except KVLinkError as exc:
            raise_reported(exc, cache, dst_blocks, dst_blocks)

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
        notify: bytes | None = None,
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
            notify: as for `pull_blocks`.

        What it does to the key: a request key is released at the peer once every tensor has been delivered, by one pull
        or by several of different layers. Prefix keys, pulls with offsets, and pulls that fail release nothing.

        Ownership and cancellation: as for `pull_blocks`.

        Raises:
            ParameterError, MismatchError, NotLinkedError, CacheNotFoundError, LinkLostError, TransferTimeoutError: as
                for `pull_blocks`.

        Source: the spec, sections 5.3 and 6.5.
        """
        self._check_role("pull_cache", READERS)
        if notify is not None:
            again = partial(
                self.pull_cache,
                key,
                cache,
                batch_index,
                size,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                src_cache_offset=src_cache_offset,
                dst_cache_offset=dst_cache_offset,
                tensor_num_per_layer=tensor_num_per_layer,
                timeout_s=timeout_s,
            )
            return await self._and_notify(key, notify, timeout_s, again)
        key = check_pull_key(key)
        size = check_size(size)
        for name, offset in (("src_cache_offset", src_cache_offset), ("dst_cache_offset", dst_cache_offset)):
            if offset is not None:
                check_int(name, offset, 0, 2**63 - 1)
        try:
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
        except KVLinkError as exc:
            raise_reported(exc, cache, (batch_index,), (batch_index,))

    async def push_blocks(
        self,
        key: BlocksCacheKey | CacheKeyByIdAndIndex | HeldTicket | bytes | str,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
        notify: bytes | None = None,
    ) -> TransferReport:
        """Copy blocks of our cache into a peer's, for every tensor of the chosen layers. Any role.

        ``src_blocks[i]`` of `cache` lands in ``dst_blocks[i]`` of the peer's cache, whole. The call returns once the
        peer can see all of them. It runs under a write lease: one round trip the first time, none after that.

        Args:
            key: of the peer's cache: its blocks key, or its cache id. Or a ticket, see `expect_blocks`: its token, or
                the ticket while it is held; `dst_blocks` must be of the ticket, and empty means all of them, in order.
            Others: as for `pull_blocks`, with the sides exchanged.

        Ownership: do not write the source blocks until the call has ended; who uses the destination blocks is for the
        two applications to agree on.
        Cancellation: waits until nothing is in flight; leaves the destination undefined.

        Raises:
            As `pull_blocks`; CacheNotFoundError also when the peer's cache ended meanwhile (nobody else's memory was
            touched).

        Source: the spec, section 9.4.
        """
        if notify is not None:
            again = partial(
                self.push_blocks,
                key,
                cache,
                src_blocks,
                dst_blocks,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=tensor_num_per_layer,
                timeout_s=timeout_s,
            )
            return await self._and_notify(key, notify, timeout_s, again)
        try:
            if isinstance(key, (bytes, str, HeldTicket)):
                return await self._mover.push_blocks(
                    key,
                    cache,
                    src_blocks,
                    dst_blocks,
                    src_layer_range=src_layer_range,
                    dst_layer_range=dst_layer_range,
                    tensor_num_per_layer=check_layer_width(tensor_num_per_layer),
                    timeout_s=self._timeout_s(timeout_s),
                )
            if timeout_s is None:
                place = place_of_push(key, cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
                report = self._pusher.push_at_once(key, cache, src_blocks, dst_blocks, place)
                if report is not None:
                    return report
            return await self._pusher.push_blocks(
                key,
                cache,
                src_blocks,
                dst_blocks,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=check_layer_width(tensor_num_per_layer),
                timeout_s=self._timeout_s(timeout_s),
            )
        except KVLinkError as exc:
            raise_reported(exc, cache, src_blocks, dst_blocks)

    async def push_cache(
        self,
        key: CacheKeyByIdAndIndex,
        cache: KvCache,
        src_batch_index: int = 0,
        *,
        size: int = -1,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        timeout_s: float | None = None,
        notify: bytes | None = None,
    ) -> TransferReport:
        """Copy slot `src_batch_index` of our cache into the slot of a peer's cache that `key` names. Any role.

        Args:
            size: bytes per tensor; -1 for the whole source slot, which must fit into the destination slot.
            Others: as for `push_blocks`.

        Source: the spec, section 9.4.
        """
        if notify is not None:
            again = partial(
                self.push_cache,
                key,
                cache,
                src_batch_index,
                size=size,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=tensor_num_per_layer,
                timeout_s=timeout_s,
            )
            return await self._and_notify(key, notify, timeout_s, again)
        size = check_size(size)
        try:
            return await self._pusher.push_cache(
                key,
                cache,
                check_int("src_batch_index", src_batch_index, 0, 2**32 - 1),
                size,
                src_layer_range=src_layer_range,
                dst_layer_range=dst_layer_range,
                tensor_num_per_layer=check_layer_width(tensor_num_per_layer),
                timeout_s=self._timeout_s(timeout_s),
            )
        except KVLinkError as exc:
            slot = key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else 0
            raise_reported(exc, cache, (src_batch_index,), (slot,))

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[AnyTransferConfig],
        src_block_indices: Blocks | None = None,
        dst_block_indices: Blocks | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a cache layer by layer while it is being computed, to one or several peers. PROMPT and MIX only.

        Returns at once with a `CacheTask` that can be awaited, polled and cancelled. The synchroniser is asked for each
        layer once, ascending, for as many layers as any destination wants; a layer travels while the next one is
        computed. K and V of a layer are two tensors, always. Keys and references are not touched on either side.
        Receivers can await layers and the end: `KvCache.arrivals`.

        Args:
            transfer_configs: the destinations. One by ticket says itself where blocks go: where all are, leave out
                `dst_block_indices`.
            src_block_indices, dst_block_indices: blocks to send and where they go; equally many. Only destination
                blocks: the source slot is laid into them, the last one perhaps in part.
            dst_block_memory_size: bytes of a destination block in that case; else None, 0, or the source's.

        Ownership: layers that have been reported as computed must not be written until the task has ended.

        Raises:
            RoleError, ParameterError: nothing has started. Everything later is the task's.

        Source: the spec, section 8.
        """
        self._check_role("transfer_cache_async", OWNERS)
        return self._layers.start(
            src_cache,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )

    async def _and_notify(
        self, key: object, payload: bytes, timeout_s: float | None, move: Callable[[], Awaitable[TransferReport]]
    ) -> TransferReport:
        made = check_payload(payload, self._config.max_notification_nbytes)
        link = self._links.open_link(_owner_of(key))
        return await move_then_notify(link, made, move, timeout_s=self._timeout_s(timeout_s))


def _owner_of(key: object) -> int:
    """Return the cluster that a key, a token or a held ticket is about."""
    if isinstance(key, (bytes, str)):
        return parse_token(key).cluster_id
    if isinstance(key, HeldTicket):
        return key.peer
    if isinstance(key, (BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex)):
        return key.cluster_id
    raise ParameterTypeError(f"the key must be a key, a token or a held ticket, got {shown(key)}")
