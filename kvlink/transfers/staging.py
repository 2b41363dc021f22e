"""Detours through the owner's pool, for registered memory that the kernel does not let a peer reach.

The owner makes room in its pool for just the slots that are moved. To read, it copies them there first; to write, it
copies them from there when the writer says so. Its CPU takes part, and the bytes move twice: the link says why
(`Link.detour`), and what to allow to get rid of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from kvlink.caches.copies import LocalCopier
from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import Tensors, check_blocks
from kvlink.errors import (
    CacheNotFoundError,
    FeatureNotEnabledError,
    KVLinkError,
    LinkBusyError,
    ParameterError,
    ProtocolError,
    StatusCode,
    TransferTimeoutError,
)
from kvlink.geometry import CacheDesc, DataType, Placement, TensorRun, select_runs
from kvlink.links.link import Link
from kvlink.memory.pool import stride_of
from kvlink.plan import Piece, join_blocks, restage, spread
from kvlink.transfers.transfer import get_checked
from kvlink.transfers.views import accept_found
from kvlink.wire import MAX_BLOCKS, CloseRead, Commit, Failed, Found, Message, Pong, Stage, Target

_log = logging.getLogger(__name__)

_MAX_LEASE_S = 3600.0
"""A room that its peer neither uses nor gives back goes back to the pool after this, or when the link ends."""


class _Room(NamedTuple):
    """Room for a detour, and the slots that it stands for. One that the peer writes into has a write lease."""

    holder: bytes
    cache: KvCache
    own: CacheEntry
    target: CacheEntry
    slots: list[int]
    tensors: Tensors
    nbytes: int
    write_lease: int = 0


class StagingServer:
    """The owner's side of detours.

    Args:
        store: what it owns.
        copier: copies between its caches.
        tasks: parent of the copies.
        most_nbytes: room that one peer gets at a time, all together twice as much; 0 for a quarter of the pool.
    """

    def __init__(self, store: CacheStore, copier: LocalCopier, tasks: TaskGroup, most_nbytes: int = 0) -> None:
        self._most_nbytes = most_nbytes or store.pool(Placement.DEVICE).nbytes // 4
        self._nbytes: Counter[bytes] = Counter()  # by holder
        self._leaving: list[_Room] = []  # given back, and still written into or copied from
        self._store = store
        self._copier = copier
        self._tasks = tasks
        self._rooms: dict[int, _Room] = {}
        self._num_serving: dict[bytes, int] = {}

    def begin(self, link: Link, message: Stage | Commit) -> None:
        """Serve a message in a task of its own, which answers it; refuse a peer that asks for ever more at a time."""
        holder, most = link.incarnation, self._store.leases.max_reads_per_holder
        num_serving = self._num_serving.get(holder, 0)
        if num_serving >= most:
            link.post(Failed(message.seq, StatusCode.LLM_LINK_BUSY, f"{num_serving} detours at a time are too many"))
            return
        self._num_serving[holder] = num_serving + 1
        self._tasks.start_soon(self._serve, link, message)

    def close(self, holder: bytes, lease: int) -> None:
        """Give a room back: the peer has stopped using it."""
        room = self._rooms.get(lease)
        if room is not None and room.holder == holder:
            del self._rooms[lease]
            self._store.leases.close_write(holder, room.write_lease)
            self._give_back(room)

    def drop(self, holder: bytes) -> None:
        """Give back every room of a peer whose link has ended; what it may still write into waits for its lease."""
        for lease in [lease for lease, room in self._rooms.items() if room.holder == holder]:
            self._give_back(self._rooms.pop(lease))

    async def _serve(self, link: Link, message: Stage | Commit) -> None:
        answer: Message
        try:
            answer = await (self._stage(link, message) if isinstance(message, Stage) else self._commit(link, message))
        except KVLinkError as exc:
            answer = Failed(message.seq, exc.status, str(exc)[:1000])
        except Exception as exc:  # a fault of ours ends this detour, and not the cluster
            _log.exception("a detour for cluster %d failed", link.peer)
            answer = Failed(message.seq, StatusCode.LLM_FAILED, repr(exc)[:1000])
        finally:
            self._num_serving[link.incarnation] -= 1
            if not self._num_serving[link.incarnation]:
                del self._num_serving[link.incarnation]
        link.post(answer)

    async def _stage(self, link: Link, message: Stage) -> Found:
        store = self._store
        entry, _, _ = store.table.find(message.target)
        device = store.device_of(entry)
        if device is not None:
            raise FeatureNotEnabledError(
                f"cache {entry.cache_id} is in the memory of CUDA device {device}, which no detour through the pool "
                "reaches"
            )
        desc = entry.desc
        slots = check_blocks("slots", list(message.slots), desc.num_slots, is_unique=True)
        if not 0 <= message.start < message.stop <= desc.num_tensors:
            raise ParameterError(f"tensors {message.start} to {message.stop} of {desc.num_tensors}")
        tensors = Tensors(message.start, message.stop)
        room_desc = CacheDesc(tensors.num, (len(slots), desc.slot_nbytes), DataType.UINT8)
        nbytes = stride_of(room_desc.tensor_nbytes) * tensors.num
        self._check_room(link.incarnation, nbytes)
        cache = store.allocate(room_desc, (), is_blocks=True)
        own = cache.entry()
        room = _Room(link.incarnation, cache, own, entry, slots, tensors, nbytes)
        self._nbytes[room.holder] += nbytes
        try:
            # Also before a write: slots that are written in part keep the rest of their bytes.
            await self._copy(room, is_write=False)
            if not link.is_open:
                raise ParameterError("the link has ended")
            expires_at = anyio.current_time() + _MAX_LEASE_S
            lease, word, generation, *_ = store.leases.open_read(link.incarnation, own, 0, None, expires_at)
            if message.is_write:
                room = room._replace(write_lease=store.leases.open_write(link.incarnation, own))
        except BaseException:
            self._give_back(room)
            raise
        self._rooms[lease] = room
        regions = {run.region for run in own.geometry.runs}
        link.endpoint.share(regions, for_writing=message.is_write)
        return Found(
            seq=message.seq,
            cache_id=own.cache_id,
            slot=0,
            geometry=own.geometry,
            word=word,
            generation=generation,
            lease=lease,
        )

    def _check_room(self, holder: bytes, nbytes: int) -> None:
        """Refuse a peer that wants more of the pool than it gets."""
        leaving, self._leaving = self._leaving, []
        for room in leaving:
            self._settle(room)
        most, taken, total = self._most_nbytes, self._nbytes[holder], self._nbytes.total()
        why = "see ClusterConfig.max_detour_nbytes_per_link"
        if nbytes > most:
            raise ParameterError(f"a detour of {nbytes} bytes; at most {most} are given, {why}: move less at once")
        if taken + nbytes > most:
            raise LinkBusyError(f"your detours take {taken} bytes, and {nbytes} more are over {most}, {why}")
        if total + nbytes > 2 * most:
            raise LinkBusyError(f"detours of all peers take {total} bytes, {why}; try again later")

    def _give_back(self, room: _Room) -> None:
        self._store.deallocate(room.cache)
        self._settle(room)

    def _settle(self, room: _Room) -> None:
        """Count a room that was given back no longer, once its memory is the pool's again."""
        if self._store.table.is_waiting(room.own):
            self._leaving.append(room)
            return
        self._nbytes[room.holder] -= room.nbytes
        if not self._nbytes[room.holder]:
            del self._nbytes[room.holder]

    async def _commit(self, link: Link, message: Commit) -> Pong:
        room = self._rooms.get(message.lease)
        if room is None or room.holder != link.incarnation:
            raise CacheNotFoundError(f"there is no room under lease {message.lease}")
        await self._copy(room, is_write=True)
        return Pong(message.seq)

    async def _copy(self, room: _Room, *, is_write: bool) -> None:
        """Copy between a room and the slots that it stands for, and make sure that those were valid all the while."""
        target, own = room.target, room.own
        nbytes = target.desc.slot_nbytes
        runs = select_runs(target.geometry.runs, *room.tensors)
        movement = self._store.begin_moving(target, room.slots)
        self._store.table.pin(own)  # its peer may give the room back in the middle
        try:
            if target.has_ended:
                raise CacheNotFoundError(f"cache {target.cache_id} has ended")
            inside = range(len(room.slots))
            if is_write:
                await self._copier.copy_runs(runs, own.geometry.runs, join_blocks(room.slots, inside, nbytes))
            else:
                await self._copier.copy_runs(own.geometry.runs, runs, join_blocks(inside, room.slots, nbytes))
            if target.has_ended:
                raise CacheNotFoundError(f"cache {target.cache_id} ended while it was being copied")
        finally:
            self._store.table.unpin(own)
            self._store.end_moving(target, movement)


async def stage(
    link: Link, target: Target, slots: list[int], tensors: Tensors, slot_nbytes: int, *, is_write: bool
) -> Found:
    """Ask the owner for room for these slots of so many bytes, filled when it is for reading.

    The caller has a deadline, and gives the lease back with `CloseRead`.

    Raises:
        FeatureNotEnabledError: the cache is in memory that the owner itself cannot copy, such as a device's.
        OutOfMemoryError, CacheNotFoundError, LinkBusyError and others: what the owner answers.
    """
    if len(slots) > MAX_BLOCKS:
        raise ParameterError(f"a detour of {len(slots)} blocks; move at most {MAX_BLOCKS} at a time")
    try:
        answer = await link.ask(lambda seq: Stage(seq, target, tuple(slots), tensors.start, tensors.stop, is_write))
    except FeatureNotEnabledError as exc:
        raise FeatureNotEnabledError(f"{exc}; and where it is: {link.detour}", peer=link.peer) from exc
    if not isinstance(answer, Found):
        raise ProtocolError(f"cluster {link.peer} answered a detour with {type(answer).__name__}", peer=link.peer)
    try:
        await accept_found(link, answer, for_writing=is_write)
        room = answer.geometry
        if (room.num_tensors, room.num_slots, room.slot_nbytes) != (tensors.num, len(slots), slot_nbytes):
            raise ProtocolError(f"cluster {link.peer} gave room for something else", peer=link.peer)
    except BaseException:
        link.post(CloseRead(answer.lease))
        raise
    return answer


async def get_by_detour(
    link: Link,
    target: Target,
    found: Found,
    runs: tuple[TensorRun, ...],
    theirs: Tensors,
    pieces: list[Piece],
    nbytes: int,
    timeout_s: float,
) -> int:
    """Get what cannot be reached where it is through the owner's pool; return the number of extents."""
    slots, moved = restage(pieces, found.geometry.slot_nbytes)
    with anyio.move_on_after(timeout_s) as scope:
        room = await stage(link, target, slots, theirs, found.geometry.slot_nbytes, is_write=False)
        try:
            extents = spread(runs, room.geometry.runs, moved)
            await get_checked(link, room, extents, nbytes, timeout_s=timeout_s)
        finally:
            link.post(CloseRead(room.lease))
    if scope.cancelled_caught:
        raise TransferTimeoutError(
            f"pulling {nbytes} bytes through the pool of cluster {link.peer} did not end in time",
            peer=link.peer,
            phase="transfer",
        )
    return len(extents)


async def commit(link: Link, lease: int) -> None:
    """Ask the owner to copy a room into the cache that it stands for; returns when that is done."""
    await link.ask(lambda seq: Commit(seq, lease))
