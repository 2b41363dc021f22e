"""One destination of a layer-wise push that is named by a ticket: claim it, fill layer after layer, fail it if need be.

The receiver learns of layers and of the end through its `Ticket`, not through `KvCache.arrivals`. A push of all layers
seals the ticket; one of some of them leaves it held, for a later push by the same token.
"""

from __future__ import annotations

from kvlink.caches.table import CacheEntry
from kvlink.checks import Tensors, check_layers, check_same_kind, check_same_length
from kvlink.errors import KVLinkError
from kvlink.geometry import select_runs
from kvlink.plan import join_blocks, spread
from kvlink.tokens import TicketEnding, parse_token
from kvlink.transfers.heldtickets import HeldTicket
from kvlink.transfers.layerconfig import TransferWithTicketConfig
from kvlink.transfers.layersender import WIDTH, BlocksToMove
from kvlink.transfers.ticketcalls import TicketMover, move_under


class TicketSender:
    """Sends layers of one cache to the blocks of one ticket, in order: what `LayerSender` is for keys.

    Args:
        layers: which source layers.
        timeout_s: deadline for claiming, and for each layer.
    """

    def __init__(
        self,
        config: TransferWithTicketConfig,
        layers: range,
        entry: CacheEntry,
        moving: BlocksToMove,
        mover: TicketMover,
        *,
        timeout_s: float,
    ) -> None:
        self.config = config
        self.layers = layers
        self._entry = entry
        self._moving = moving
        self._mover = mover
        self._timeout_s = timeout_s
        self._held: HeldTicket | None = None
        self._has_ended = False

    async def open(self) -> None:
        """Claim the ticket, and check that it fits, before the first layer is there.

        Raises:
            TicketError, NotLinkedError, ParameterError, MismatchError: it cannot be.
        """
        held = await self._mover.hold_for_filling(parse_token(self.config.ticket), timeout_s=self._timeout_s)
        held.link.begin()
        self._held = held
        geometry = held.found.geometry
        check_same_kind(self._entry.geometry, geometry, is_by_block=True)
        check_layers("dst_layer_range", self._their_layers(), geometry.num_tensors, WIDTH)
        check_same_length(self._local(), held.places_of(self._moving.destination or [])[1])

    async def send(self, layer: int) -> None:
        """Put one layer. Raises what a push raises."""
        held = self._held
        assert held is not None
        local, geometry = self._local(), held.found.geometry
        places, remote = held.places_of(self._moving.destination or [])
        landed = self._their_layers()[layer - self.layers.start]
        theirs = Tensors(landed * WIDTH, landed * WIDTH + WIDTH)
        runs = select_runs(self._entry.geometry.runs, layer * WIDTH, layer * WIDTH + WIDTH)
        pieces = join_blocks(local, remote, geometry.slot_nbytes, is_push=True)
        extents = spread(runs, select_runs(geometry.runs, *theirs), pieces)
        nbytes = geometry.slot_nbytes * len(local) * WIDTH
        await move_under(held, theirs, places, extents, nbytes, self._timeout_s)
        held.link.stats.nbytes_pushed += nbytes

    def close(self, error: KVLinkError | None) -> None:
        """Fail the ticket where there is an error, and let the link go. Idempotent; the first call counts."""
        held = self._held
        if held is None or self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            held.end(TicketEnding.FAILED, f"the layer-wise push failed: {error}")
        held.link.stats.pushes += error is None
        held.link.stats.failures += error is not None
        held.link.end()

    def blame(self, error: KVLinkError) -> None:
        """Let an error of this destination name it."""
        if self._held is not None:
            self._held.link.blame(error)

    def _local(self) -> list[int]:
        return [self.config.src_batch_index] if self._moving.source is None else self._moving.source

    def _their_layers(self) -> range:
        return self.layers if self.config.dst_layer_range is None else self.config.dst_layer_range
