"""One side of a link over shared memory: what is mapped, what is shared, and the copies between."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

import anyio

from kvlink.config import ClusterConfig
from kvlink.errors import KVLinkError, LinkLostError, ProtocolError
from kvlink.memory.copying import Copier
from kvlink.memory.pool import Bytes, Segment
from kvlink.memory.regions import FIRST_REGISTERED, STATE, DeviceRegion, LocalMemory
from kvlink.memory.stateregion import WORD_NBYTES, order_memory
from kvlink.memory.strided import Copy, complete, copy_row, copy_rows, make_copy
from kvlink.plan import Extent, ExtentFields, regions_of, total_nbytes
from kvlink.transports.base import Capabilities, Endpoint
from kvlink.transports.lives import SMALL_NBYTES, Life
from kvlink.transports.pidfd import PidfdWatch
from kvlink.transports.process_vm import ForeignMemory, cut_vectors, join_vectors, permit_tracing
from kvlink.transports.shm_channel import Channel, SharedRegion
from kvlink.wire import Share

_log = logging.getLogger(__name__)

GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

_LARGE_NBYTES: Final = 16 * 1024 * 1024
"""Mappings of this size and more are not unmapped at once: 16 MiB take 1 ms."""

_MIN_PIECE_NBYTES: Final = 4096
"""A piece of memory that cannot be mapped is worth a system call of its own from here on: 2.5 us on the event loop, of
which a movement of `Endpoint.immediate_nbytes` then takes 64 at most."""

_MAX_MAPPED: Final = FIRST_REGISTERED
_MAX_FOREIGN: Final = 2**20
_END_OF_MEMORY: Final = 2**63
"""Bounds on what a peer may share: a process has few mappings, and no memory in the upper half of all addresses."""

_NO_WORDS: Final = memoryview(b"").cast("Q")


class ShmEndpoint(Endpoint):
    """Our half of a link to a process of this host. Made by `ShmTransport`."""

    name = "shm"
    capabilities = Capabilities(is_one_sided=True, is_same_host=True)
    has_immediate_words = True

    def __init__(self, local: LocalMemory, copier: Copier, channel: Channel, config: ClusterConfig) -> None:
        self._local = local
        self._permit = config.permit_peer_access
        self._is_prefaulted = config.is_prefaulted
        self._copier = copier
        self.immediate_nbytes = copier.inline_nbytes
        self.window_nbytes = copier.window_nbytes
        self._channel = channel
        self._segments: dict[int, Segment] = {}
        self._remote: dict[int, Bytes] = {}
        self._foreign: dict[int, ForeignMemory] = {}
        self._views: dict[int, memoryview] = {}
        self._prefaults: dict[int, Callable[[], None]] = {}
        self._is_connected = False
        self._lose: Callable[[KVLinkError], None] | None = None
        self._failure: LinkLostError | None = None
        self._words = _NO_WORDS
        self._shared: dict[int, bool] = {}
        self._to_share: deque[tuple[int, bool]] = deque()
        self._changed = anyio.Event()
        self._has_to_share = anyio.Event()
        self._is_closed = False
        self._served: anyio.Event | None = None
        self._pidfd = channel.open_peer_pidfd()
        self._life: Life | None = None

    async def get(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        self._check_open()
        if self._foreign and not self._foreign.keys().isdisjoint(regions_of(extents)[1]):
            await self._copy_foreign(extents, nbytes, is_write=False)
            return
        if nbytes <= self.immediate_nbytes:
            if not all(map(self.get_at_once, extents)):
                raise LinkLostError("the link has ended; link again", phase="transfer")
            return
        local, remote = self._memories(extents)
        copies = (
            make_copy((local[region], offset, stride, remote[peer_region], peer_offset, peer_stride, length, count))
            for region, offset, stride, peer_region, peer_offset, peer_stride, length, count in extents
        )
        await self._copy(copies, extents, nbytes, done)

    async def put(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        self._check_open()
        if self._foreign and not self._foreign.keys().isdisjoint(regions_of(extents)[1]):
            await self._copy_foreign(extents, nbytes, is_write=True)
            return
        if nbytes <= self.immediate_nbytes:
            if not all(map(self.put_at_once, extents)):
                raise LinkLostError("the link has ended; link again", phase="transfer")
            return
        local, remote = self._memories(extents)
        copies = (
            make_copy((remote[peer_region], peer_offset, peer_stride, local[region], offset, stride, length, count))
            for region, offset, stride, peer_region, peer_offset, peer_stride, length, count in extents
        )
        await self._copy(copies, extents, nbytes, done)
        order_memory()

    async def _copy(
        self, copies: Iterable[Copy], extents: Sequence[Extent], nbytes: int, done: list[int] | None
    ) -> None:
        if done is None:
            await self._copier.run(copies, nbytes)
            return
        copied: list[tuple[int, int]] = []
        try:
            await self._copier.run(copies, nbytes, copied)
        except BaseException:
            done += complete([extent.nbytes * extent.num_rows for extent in extents], copied)
            raise

    def _memories(self, extents: Sequence[Extent]) -> tuple[dict[int, Bytes], dict[int, Bytes]]:
        """Return the memory of each region that `extents` name, ours and the peer's, as it is now."""
        ours, theirs = regions_of(extents)
        return {number: self._local[number].memory for number in ours}, {
            number: self._remote[number] for number in theirs
        }

    async def load_word(self, word: int) -> int:
        order_memory()
        if word >= len(self._words):
            raise LinkLostError("the link has ended; link again", phase="settle")
        return int(self._words[word])

    def peek_word(self, word: int) -> int | None:
        order_memory()
        words = self._words
        return words[word] if word < len(words) else None

    def get_at_once(self, extent: ExtentFields) -> bool:
        region, offset, stride, peer_region, peer_offset, peer_stride, nbytes, num_rows = extent
        source = self._views.get(peer_region)
        if source is None:
            return self._copy_foreign_at_once(extent, is_write=False)
        own = self._local[region]
        if num_rows == 1:
            copy_row(own.view, offset, source, peer_offset, nbytes)
        else:
            remote = self._remote[peer_region]
            copy_rows(own.memory, offset, stride, remote, peer_offset, peer_stride, nbytes, num_rows)
        return True

    def put_at_once(self, extent: ExtentFields) -> bool:
        region, offset, stride, peer_region, peer_offset, peer_stride, nbytes, num_rows = extent
        target = self._views.get(peer_region)
        if target is None:
            return self._copy_foreign_at_once(extent, is_write=True)
        own = self._local[region]
        if num_rows == 1:
            copy_row(target, peer_offset, own.view, offset, nbytes)
        else:
            remote = self._remote[peer_region]
            copy_rows(remote, peer_offset, peer_stride, own.memory, offset, stride, nbytes, num_rows)
        order_memory()
        return True

    async def reach(self, regions: Collection[int], *, for_writing: bool) -> None:
        for region in regions:
            while not self._has(region, for_writing):
                self._check_open()
                await self._changed.wait()

    def region_nbytes(self, region: int) -> int:
        memory = self._remote.get(region, self._foreign.get(region))
        return 0 if memory is None else len(memory)

    def share(self, regions: Collection[int], *, for_writing: bool) -> None:
        for region in regions:
            if region in self._shared and self._shared[region] >= for_writing:
                continue
            self._shared[region] = for_writing
            self._to_share.append((region, for_writing))
            self._has_to_share.set()

    def connect(self, post: Callable[[Share], None], lose: Callable[[KVLinkError], None]) -> None:
        """Begin to enter the peer's pages into the page table: not before, so that the handshake need not wait for it.

        Nothing is posted: descriptors travel over a channel of their own. Its end in good order comes with that of the
        link; but a link over which nothing can be shared any more is worth nothing.
        """
        self._is_connected = True
        self._lose = lose
        if self._failure is not None:
            lose(self._failure)
        for number in self._segments:
            self._prefault(number)

    def take(self, share: Share) -> None:
        raise ProtocolError(f"a message about region {share.region}, which shared memory does not share this way")

    def watch_death(self) -> PidfdWatch:
        return PidfdWatch(self._pidfd)

    async def aclose(self) -> None:
        self.abort()
        if self._served is not None:
            # The reader finds the end of the stream by itself; closing the socket under it would wake it twice.
            await self._served.wait()
        await self._channel.aclose()
        self._words = _NO_WORDS  # whoever holds the closed link keeps nothing of the peer mapped
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._life is not None:
            self._life.close()

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._channel.abort()
        self._changed.set()
        self._has_to_share.set()
        for number in list(self._segments):
            self._drop(number)
        self._remote.clear()
        self._views.clear()
        self._foreign.clear()

    async def exchange(self, *, is_first: bool) -> None:
        """Hand over what every peer gets, both ways; the dialling side goes first."""
        if is_first:
            await self._send_initial()
        self._take(*await self._channel.receive())
        if not is_first:
            await self._send_initial()
        if STATE not in self._remote:
            raise ProtocolError("the peer did not share its state words")

    async def run(self) -> None:
        """Serve the channel until it ends: send what is shared, take what the peer shares. Never raises."""
        self._served = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_shared)
                await self._take_shared()
                tasks.cancel_scope.cancel()
        finally:
            self._served.set()

    async def _take_shared(self) -> None:
        try:
            while not self._is_closed:
                self._take(*await self._channel.receive())
                self._changed.set()
                self._changed = anyio.Event()
        except GONE:
            pass
        except Exception as exc:
            # Nothing more can be trusted from there, and whoever waits for a region would wait for nothing.
            _log.warning("closed a descriptor channel: %s", str(exc))
            self._channel.abort()
            self._failure = LinkLostError(f"the peer's memory could not be taken over: {exc}; link again")
            if self._lose is not None:
                self._lose(self._failure)

    async def _send_shared(self) -> None:
        while not self._is_closed:
            while self._to_share:
                region, for_writing = self._to_share.popleft()
                try:
                    await self._send([region], for_writing=for_writing)
                except GONE as exc:
                    self._shared.pop(region, None)  # the next lease asks anew: there may be descriptors again
                    if not self._is_closed and isinstance(exc, OSError):
                        _log.warning("could not share region %d with a peer: %s", region, str(exc))
            self._has_to_share = anyio.Event()
            await self._has_to_share.wait()

    async def _send_initial(self) -> None:
        regions = [number for number, region in self._local.items() if region.segment is not None]
        self._shared.update(dict.fromkeys(regions, False))
        await self._send(regions, for_writing=False)

    async def _send(self, numbers: Sequence[int], *, for_writing: bool) -> None:
        regions: list[SharedRegion] = []
        descriptors: list[int] = []
        try:
            for number in numbers:
                region = self._local.get(number)
                if region is None or isinstance(region, DeviceRegion):  # nobody is told of one over this transport
                    continue
                segment = region.segment
                if segment is None:
                    self._permit_tracing()
                    regions.append(SharedRegion(number, region.nbytes, False, True, region.address))
                    continue
                regions.append(SharedRegion(number, segment.nbytes, True, for_writing))
                descriptors.append(os.dup(segment.fd) if for_writing else segment.open_read_only())
            await self._channel.send(tuple(regions), descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _permit_tracing(self) -> None:
        """Let the peer reach memory that is not in a memfd, where the settings ask for it; once, and with a line."""
        permit, self._permit = self._permit, None
        if permit is not None:
            pid = self._channel.peer()[0] if permit == "peer" else None
            _log.warning("letting %s copy this process's memory", "any process" if pid is None else f"process {pid}")
            permit_tracing(pid)

    def _take(self, regions: tuple[SharedRegion, ...], descriptors: list[int]) -> None:
        remaining = deque(descriptors)
        try:
            for region in regions:
                self._check_bounds(region)
                if not region.has_descriptor:
                    if self._pidfd is not None:
                        self._life = self._life or self._channel.open_peer_life(region.address)
                        self._foreign[region.number] = ForeignMemory(
                            self._channel.peer()[0], self._pidfd, region.address, region.nbytes, self._life
                        )
                    continue
                fd = remaining.popleft()
                segment = Segment.attach(fd, region.nbytes, is_writable=region.is_writable)
                old = self._segments.get(region.number)
                if old is not None:
                    self._drop(region.number)
                    if old.nbytes != segment.nbytes:
                        segment.close()
                        raise ProtocolError(
                            f"region {region.number} changes from {old.nbytes} to {region.nbytes} bytes"
                        )
                self._segments[region.number] = segment
                if self._is_connected:
                    self._prefault(region.number)
                self._remote[region.number] = segment.memory
                self._views[region.number] = segment.memory.data
                if region.number == STATE:
                    self._words = segment.memory.data.cast("Q")
        finally:
            for fd in remaining:
                os.close(fd)

    def _check_bounds(self, region: SharedRegion) -> None:
        """Refuse what no region of a peer can be.

        Raises:
            ProtocolError: it is too far up, too many, or no room for words.
        """
        if region.has_descriptor:
            is_one_too_many = region.number not in self._segments and len(self._segments) >= _MAX_MAPPED
        else:
            is_one_too_many = region.number not in self._foreign and len(self._foreign) >= _MAX_FOREIGN
        if (
            is_one_too_many
            or region.address + region.nbytes > _END_OF_MEMORY
            or (region.number == STATE and region.nbytes % WORD_NBYTES)
        ):
            raise ProtocolError(f"a peer shares what cannot be one more region of its memory: {region}")

    def _prefault(self, number: int) -> None:
        if self._is_prefaulted:
            memory = self._segments[number].memory
            self._prefaults[number] = self._copier.prefault(memory, for_writing=memory.flags.writeable)

    def _drop(self, number: int) -> None:
        """Give a mapping of the peer's memory up; a large one leaves the page table before it goes."""
        stop = self._prefaults.pop(number, None)
        if stop is not None:
            stop()
        segment = self._segments.pop(number)
        if segment.nbytes >= _LARGE_NBYTES:
            self._copier.evict(segment.memory)
        segment.close()

    def _copy_foreign_at_once(self, extent: ExtentFields, *, is_write: bool) -> bool:
        """One system call for one piece; many small ones are better off with 1,024 of them in a call."""
        region, offset, _, peer_region, peer_offset, _, nbytes, num_rows = extent
        foreign = self._foreign.get(peer_region)
        if foreign is None or num_rows != 1 or nbytes < _MIN_PIECE_NBYTES:
            return False
        own, remote = self._local[region], foreign.address + peer_offset
        is_small = not is_write and nbytes <= SMALL_NBYTES and 0 <= offset <= own.nbytes - nbytes
        if is_small and foreign.read(own.view[offset : offset + nbytes], remote):
            return True
        return foreign.copy_piece(own.host_address + offset, remote, nbytes, is_write=is_write)

    async def _copy_foreign(self, extents: Sequence[Extent], nbytes: int, *, is_write: bool) -> None:
        """Copy extents of which at least one is in memory that cannot be mapped, each group in its own way."""
        by_region: dict[int, list[Extent]] = {}
        for extent in extents:
            by_region.setdefault(extent.remote_region, []).append(extent)
        for number, group in by_region.items():
            foreign = self._foreign.get(number)
            if foreign is None:
                moved = total_nbytes(group)
                await (self.put(group, moved) if is_write else self.get(group, moved))
                continue
            pieces = [
                (
                    self._local[extent.local_region].host_address + extent.local_offset,
                    extent.local_stride,
                    foreign.address + extent.remote_offset,
                    extent.remote_stride,
                    extent.nbytes,
                    extent.num_rows,
                )
                for extent in group
            ]
            chunk_nbytes = self._copier.chunk_nbytes
            vectors = join_vectors(cut_vectors(pieces, chunk_nbytes), chunk_nbytes)
            calls = (partial(foreign.copy, mine, theirs, is_write=is_write) for mine, theirs in vectors)
            try:
                if nbytes <= self.immediate_nbytes:
                    for call in calls:
                        call()
                else:
                    await self._copier.run_calls(calls)
            except LinkLostError as exc:
                if self._lose is not None:  # a child of the peer may keep its connections open
                    self._lose(exc)
                raise

    def _has(self, region: int, for_writing: bool) -> bool:
        foreign = self._foreign.get(region)
        if foreign is not None:
            foreign.probe()
            return True
        memory = self._remote.get(region)
        return memory is not None and (memory.flags.writeable or not for_writing)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LinkLostError("the link has ended; link again", phase="transfer")
