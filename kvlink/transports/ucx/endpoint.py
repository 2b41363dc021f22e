"""One side of a link over UCX: the peer's regions as we may address them, and the transfers between.

Regions travel over the link's control stream as `Share`: address, length and remote key, never before the link is
there. What a peer says of its regions bounds what is asked of UCX, since not every network checks a key.

The first transfer over an endpoint needs the peer's help, for UCX wires it up then; so one word is read as soon as the
peer's state region is known, and nothing else is said to be within reach before that has come back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Final

import anyio

from kvlink.errors import (
    ClosedError,
    FeatureNotEnabledError,
    KVLinkError,
    LinkLostError,
    ProtocolError,
    TransportError,
)
from kvlink.loops import until_set
from kvlink.memory.regions import STATE
from kvlink.memory.stateregion import WORD_NBYTES, order_memory
from kvlink.memory.strided import complete
from kvlink.plan import Extent, ExtentFields
from kvlink.transports.base import NOT_QUIET, Capabilities, Endpoint
from kvlink.transports.lives import SMALL_NBYTES, Life
from kvlink.transports.pidfd import PidfdWatch
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.asking import Part, RemoteRegion, transfer_of, transfer_of_rows
from kvlink.transports.ucx.cards import unpack_key
from kvlink.transports.ucx.connection import WorkerEndpoint
from kvlink.transports.ucx.lanes import judge, no_way, only_tcp
from kvlink.transports.ucx.mapped import MappedState
from kvlink.transports.ucx.pieces import cut_pieces
from kvlink.transports.ucx.registry import GONE, Registered
from kvlink.transports.ucx.requests import ROW, Transfer
from kvlink.transports.ucx.services import MAX_LOADS, Services
from kvlink.wire import Share

_MAX_REGIONS, _CLOSE_S = 2**20, 5.0
_NO_WORDS: Final = memoryview(b"").cast("Q")
_FRESH_S: Final = 0.0001
"""So soon after a look a peer's process may have ended, and is not yet another program with memory in that place."""
_ENDED: Final = "the peer's process has ended, or is another program now; link again"


class UcxEndpoint(Endpoint):
    """Our half of a link over UCX. Made by `UcxTransport`.

    Args:
        services: of the cluster: worker, registrations, room for words.
        connection: of the worker; its endpoint is open, and owned from now on.
        pidfd: of the peer's process where it is on this host; owned from now on.
        state: the peer's state region, where it could be mapped; owned from now on.
    """

    name = "ucx"
    reaches_cuda = True
    immediate_nbytes = -1
    has_immediate_words = False

    def __init__(
        self,
        services: Services,
        connection: WorkerEndpoint,
        card: bytes,
        pidfd: int | None,
        state: MappedState | None = None,
    ) -> None:
        self.card = card
        self.settings = services.worker.context.applied
        self.window_nbytes = services.config.max_inflight_nbytes
        self._services = services
        self._worker = services.worker
        self._connection = connection
        self._pidfd = pidfd
        self._state = state
        self._words = _NO_WORDS
        self._life: Life | None = None
        self._has_moved = False  # bytes, since the last look at the peer's life, which was then
        self._seen_at = 0.0
        self._remote: dict[int, RemoteRegion] = {}
        self._refused: dict[int, str] = {}
        self._announced: set[int] = set()
        self._shared: set[int] = set()
        self._changed = anyio.Event()
        self._is_wired = False
        self._is_copying = False
        self._is_closed = False
        self._closed = anyio.Event()
        self._loads = anyio.Semaphore(MAX_LOADS, fast_acquire=True)
        self._post: Callable[[Share], None] | None = None
        self._lose: Callable[[KVLinkError], None] | None = None
        self.lanes: tuple[str, ...] = ()
        # What serves the link is known once it has been used; until then its silence counts, as that of another host.
        self.capabilities = Capabilities(is_one_sided=services.is_one_sided, is_same_host=False)
        connection.on_failed = self._on_failed

    @property
    def is_quiet(self) -> bool:
        return self._connection.is_quiet

    def get_at_once(self, extent: ExtentFields) -> bool:
        return self._move_at_once(extent, False)

    def put_at_once(self, extent: ExtentFields) -> bool:
        return self._move_at_once(extent, True)

    def peek_word(self, word: int) -> int | None:
        mapped = self._words
        if word < len(mapped):
            if self._has_moved and not self._goes_on():
                return None
            order_memory()
            return mapped[word]
        remote = self._remote.get(STATE)
        if not self._is_copying or remote is None or (word + 1) * WORD_NBYTES > remote.nbytes:
            return None
        words = self._services.words
        where, memh = words.address_of(words.now), words.registered.memh
        status = self._worker.move_now(
            self._connection, False, where, WORD_NBYTES, remote.address + word * WORD_NBYTES, memh, remote.rkey
        )
        if status == ucp.OK:
            return words.value(words.now)
        if status is not None:
            self._give_up(status)
        return None

    async def get(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        await self._move(extents, nbytes, done, is_put=False)

    async def put(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        await self._move(extents, nbytes, None, is_put=True)  # what was not flushed may never be seen

    async def load_word(self, word: int) -> int:
        if word < len(self._words):
            self._check_life()
            order_memory()
            return self._words[word]
        async with self._loads:
            return await self._load_word(word)

    async def _load_word(self, word: int) -> int:
        words = self._services.words
        place = await words.take()
        remote = self._remote.get(STATE)
        if remote is None or self._is_closed or (word + 1) * WORD_NBYTES > remote.nbytes:
            words.give_back(place)
            raise LinkLostError("the link has ended; link again", phase="settle")
        try:
            load = words.load(self._connection, place, remote.address + word * WORD_NBYTES, remote.rkey)
            await self._run(load, WORD_NBYTES, phase="settle")
            return words.value(place)
        finally:
            if self.is_quiet:  # else it may be written into at any time
                words.give_back(place)

    async def reach(self, regions: Collection[int], *, for_writing: bool) -> None:
        for region in (STATE, *regions):
            while region not in self._remote or not self._is_wired:
                self._check_open()
                if region in self._refused:
                    if self._refused[region] == GONE:
                        break  # given up since we were told of it: it has no bytes
                    raise FeatureNotEnabledError(
                        f"the peer's memory cannot be reached over UCX: {self._refused[region]}"
                    )
                await self._changed.wait()

    def region_nbytes(self, region: int) -> int:
        remote = self._remote.get(region)
        return 0 if remote is None else remote.nbytes

    def share(self, regions: Collection[int], *, for_writing: bool) -> None:
        for region in regions:
            if region not in self._shared:
                self._shared.add(region)
                self._services.registry.register(region, partial(self._announce, region))

    def connect(self, post: Callable[[Share], None], lose: Callable[[KVLinkError], None]) -> None:
        if self._is_closed:
            return
        self._post, self._lose = post, lose
        self.share((STATE, *self._services.first_regions), for_writing=False)
        if self._connection.failure != ucp.OK:
            self._on_failed()

    def take(self, share: Share) -> None:
        region = share.region
        if self._is_closed:
            return
        if region in self._announced or len(self._announced) >= _MAX_REGIONS:
            raise ProtocolError(f"region {region} was shared already, or there are too many")
        if share.nbytes == 0:
            self._announced.add(region)
            self._refused[region] = share.reason
            self._tell()
            return
        if share.address + share.nbytes > 2**64:
            raise ProtocolError(f"region {region} of {share.nbytes} bytes at {share.address:#x} is impossible")
        key = unpack_key(share.key)
        self._announced.add(region)
        self._worker.ask(lambda: self._unpack(share, key))

    def watch_death(self) -> PidfdWatch:
        return PidfdWatch(self._pidfd)

    async def aclose(self) -> None:
        self.abort()
        # What is not closed by then is left to the worker: nobody relies on it, and the link must end.
        await until_set(self._closed, patience_s=_CLOSE_S, hurry=self._closed.set)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._post = self._lose = None
        self._remote.clear()
        self._unmap_state()
        self._tell()
        try:
            self._worker.close_endpoint(self._connection, self._closed.set)
        except ClosedError:
            self._closed.set()

    def _unmap_state(self) -> None:
        self._words, self._life = _NO_WORDS, None
        if self._state is not None:
            self._state.close()
            self._state = None

    def _move_at_once(self, extent: ExtentFields, is_put: bool) -> bool:
        region, offset, stride, peer_region, peer_offset, peer_stride, nbytes, num_rows = extent
        ours, theirs = self._services.registry.known.get(region), self._remote.get(peer_region)
        if ours is None or theirs is None or ours.is_on_device or theirs.is_on_device:
            return False
        if num_rows > ROW or not self._is_copying:
            return False
        low, peer_low, high, peer_high = offset, peer_offset, offset + nbytes, peer_offset + nbytes
        if num_rows > 1:
            way, peer_way = (num_rows - 1) * stride, (num_rows - 1) * peer_stride
            low, high = low + min(way, 0), high + max(way, 0)
            peer_low, peer_high = peer_low + min(peer_way, 0), peer_high + max(peer_way, 0)
        if low < 0 or peer_low < 0 or high > ours.nbytes or peer_high > theirs.nbytes:
            raise ValueError(f"a row of {nbytes} bytes lies outside its memory")
        local, remote = ours.address + offset, theirs.address + peer_offset
        # A small get is faster this way than by UCX with a look at the peer's life behind it, which it needs not.
        life = self._life if not is_put and num_rows == 1 and nbytes <= SMALL_NBYTES else None
        if life is not None and life.read(ours.region.view[offset : offset + nbytes], remote):
            return True
        if is_put and perf_counter() - self._seen_at > _FRESH_S and not self._goes_on():
            return False
        if num_rows == 1:
            status = self._worker.move_now(self._connection, is_put, local, nbytes, remote, ours.memh, theirs.rkey)
        else:
            transfer = transfer_of_rows(self._connection, extent, ours, theirs, is_put=is_put)
            status = transfer.status if self._worker.finish_now(transfer) else None
        if status is not None and status != ucp.OK:
            self._give_up(status)
        self._has_moved = True
        return status == ucp.OK

    async def _move(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None, *, is_put: bool) -> None:
        self._check_open()
        registry = self._services.registry
        parts: list[Part] = []
        for pieces in cut_pieces(extents, self._services.longest_nbytes):
            ours = registry.known.get(pieces.local_region) or await registry.ensure(pieces.local_region)
            theirs = self._remote.get(pieces.remote_region)
            if theirs is None:
                self._check_open()
                raise TransportError(f"region {pieces.remote_region} of the peer is not within reach", phase="transfer")
            parts.append(Part(pieces, ours, theirs))
        if not parts:
            return
        transfer = transfer_of(self._connection, parts, is_put=is_put)
        if is_put:
            self._check_life()
        try:
            await self._run(transfer, nbytes, phase="transfer")
        except BaseException:
            if done is not None and len(parts) == 1:  # one group: its requests are in the order of the extents
                sizes = [extent.nbytes * extent.num_rows for extent in extents]
                done += complete(sizes, [(0, transfer.done_nbytes)])
            raise

    async def _run(self, transfer: Transfer, nbytes: int, *, phase: str) -> None:
        """Wait for a transfer; raise `LinkLostError` where it failed. When cancelled, drain it first."""
        worker = self._worker
        done = anyio.Event()
        try:
            if nbytes > self._services.inline_nbytes or transfer.is_on_device:  # a device's copy is not ours to help
                transfer.finish = done.set
                worker.submit(transfer)
            elif worker.try_now(transfer, done.set):
                done.set()
        except ClosedError as exc:
            raise LinkLostError("the link has ended; link again", phase=phase) from exc
        if not done.is_set():
            try:
                await done.wait()
            except BaseException:
                worker.stop(transfer)
                await until_set(done, patience_s=self._services.config.drain_s, hurry=self._give_up_to_be_quiet)
                raise
        if transfer.is_refused:
            raise no_way(self.lanes)
        if transfer.status != ucp.OK:
            error = LinkLostError(self._describe(transfer.status) + ("" if self.is_quiet else NOT_QUIET), phase=phase)
            self._give_up(transfer.status)
            raise error
        self._has_moved = True

    def _give_up_to_be_quiet(self) -> None:
        self._lost(
            LinkLostError(
                "a cancelled transfer did not end in time; the link was given up, so that the memory is quiet: link "
                "again",
                phase="transfer",
            )
        )

    def _unpack(self, share: Share, key: bytes) -> None:
        """In a turn: make a region of the peer addressable."""
        worker, connection = self._worker, self._connection
        if connection.ep is None or connection.failure != ucp.OK:
            return
        ffi = worker.context.library.ffi
        rkey = ffi.new("ucp_rkey_h *")
        status = int(worker.context.library.api.ucp_ep_rkey_unpack(connection.ep, ffi.from_buffer(key), rkey))
        if status != ucp.OK:
            reason = f"UCX does not take the key of region {share.region}: {self._describe(status)}"
            worker.report(lambda: self._take_refusal(share.region, reason))
            return
        connection.rkeys.append(rkey[0])
        region = RemoteRegion(share.address, share.nbytes, rkey[0], share.is_on_device)
        worker.report(lambda: self._take_region(share.region, region))

    def _take_region(self, number: int, region: RemoteRegion) -> None:
        if self._is_closed:
            return
        self._remote[number] = region
        if number == STATE and not self._is_wired:
            self._wire_up(region)
        self._tell()

    def _take_refusal(self, number: int, reason: str) -> None:
        self._refused[number] = reason
        self._tell()

    def _wire_up(self, state: RemoteRegion) -> None:
        """Read one word, so that nothing later needs the peer's help."""
        words = self._services.words
        transfer = words.load(self._connection, words.nowhere, state.address, state.rkey)
        transfer.finish = partial(self._wired, transfer)
        with suppress(ClosedError):  # then the link has been told, or the cluster is closing
            self._worker.submit(transfer)

    def _wired(self, transfer: Transfer) -> None:
        if transfer.status != ucp.OK:
            self._give_up(transfer.status)
        elif not self._is_closed:
            with suppress(ClosedError):
                self._worker.ask(self._query_lanes)

    def _query_lanes(self) -> None:
        """In a turn: find out what serves this endpoint."""
        if self._connection.ep is not None:
            lanes = self._worker.context.describe_transports(self._connection.ep)
            self._worker.report(lambda: self._take_lanes(lanes))

    def _take_lanes(self, lanes: tuple[str, ...]) -> None:
        self.lanes = lanes
        service = judge(lanes)
        if service.is_tcp and not self._services.config.allow_tcp:
            self._lost(only_tcp(lanes))
            return
        self.capabilities = Capabilities(
            is_one_sided=self._services.is_one_sided and service.is_one_sided,
            is_same_host=self._pidfd is not None and service.is_local,
        )
        # Then a transfer is a system call of ours: it needs no deadline, and small ones may be done where they stand.
        self._is_copying = self._services.is_one_sided and service.is_copying
        if self._is_copying and self.immediate_nbytes < 0:
            self.immediate_nbytes, self.has_immediate_words = self._services.inline_nbytes, True
        if self._state is not None and self.capabilities.is_same_host:
            self._words, self._life, self.has_immediate_words = self._state.words, self._state.life, True
            self._life.place = self._remote[STATE].address
        else:
            self._unmap_state()
        self._is_wired = True
        self._tell()

    def _announce(self, number: int, registered: Registered | None, reason: str) -> None:
        """Tell the peer of a region of ours that was registered, or could not be."""
        if self._post is not None:
            refusal = Share(region=number, nbytes=0, address=0, key=b"", reason=reason[:1000])
            self._post(refusal if registered is None else registered.share(number))

    def _on_failed(self) -> None:
        self._give_up(self._connection.failure)

    def _give_up(self, status: int) -> None:
        """What UCX has failed to do once over an endpoint it will not do again."""
        self._lost(LinkLostError(f"{self._describe(status)}; link again", phase="transfer"))

    def _goes_on(self) -> bool:
        """Whether the peer's memory is still that of the process that we have linked to; ends the link where not."""
        if self._life is None or self._life.goes_on():
            self._has_moved, self._seen_at = False, perf_counter()
            return True
        self._lost(LinkLostError(_ENDED))
        return False

    def _check_life(self) -> None:
        if not self._goes_on():
            raise LinkLostError(_ENDED, phase="transfer")

    def _lost(self, error: KVLinkError) -> None:
        lose = self._lose
        if lose is not None:
            lose(error)
        else:
            self.abort()

    def _describe(self, status: int) -> str:
        return f"UCX: {self._worker.context.library.describe_status(status)}"

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _check_open(self) -> None:
        if self._is_closed:
            raise LinkLostError("the link has ended; link again", phase="transfer")
