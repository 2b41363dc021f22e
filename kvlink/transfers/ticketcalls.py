"""Moving bytes by ticket: claim, check, plan, move, settle.

A bare token is used up by one call: claim (one round trip), move, say how it ended (no round trip). A claim that is
cancelled on its way may still be granted: the link gives it back when the answer comes, as it does with read leases.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvlink.caches.kvcache import KvCache
from kvlink.caches.store import CacheStore
from kvlink.caches.table import CacheEntry
from kvlink.checks import (
    Blocks,
    Tensors,
    check_blocks,
    check_layer_range,
    check_layers,
    check_same_kind,
    check_same_length,
    check_same_tensors,
)
from kvlink.errors import (
    CacheNotFoundError,
    FeatureNotEnabledError,
    KVLinkError,
    ProtocolError,
    TicketError,
    TransferTimeoutError,
)
from kvlink.geometry import select_runs
from kvlink.links.gates import finish, start
from kvlink.links.link import Link
from kvlink.links.table import LinkTable
from kvlink.plan import Extent, join_blocks, spread
from kvlink.report import TransferReport
from kvlink.tokens import TicketEnding, Token, parse_token
from kvlink.transfers.heldtickets import HeldTicket, HeldTickets
from kvlink.transfers.staging import get_by_detour
from kvlink.transfers.transfer import ended_while_read, get_checked, is_current, put_checked
from kvlink.transfers.views import accept_found
from kvlink.wire import Claim, CloseRead, Found, Target

_MAX_CELLS: Final = 2**28
"""Blocks times tensors of a ticket: a million blocks of 256 tensors. Each takes a byte at its holder."""

AnyTicket = bytes | str | HeldTicket
"""What stands for a ticket in a call: its token, or the ticket while it is held."""


class _Request(NamedTuple):
    """What a call asks for: these blocks and tensors of ours, those of the ticket, in this time."""

    entry: CacheEntry
    ours: Tensors
    local: list[int]
    remote: list[int]
    their_layers: range | None
    width: int
    timeout_s: float
    started: float


class TicketMover:
    """The pulls and pushes by ticket of one cluster.

    Args:
        store: what it owns.
        links: whose tickets it can use.
        held: those that it holds.
    """

    def __init__(self, store: CacheStore, links: LinkTable, held: HeldTickets) -> None:
        self._store = store
        self._links = links
        self._held = held
        self._claiming: dict[tuple[Link, int], anyio.Event] = {}

    async def hold(self, token: bytes | str, *, timeout_s: float) -> HeldTicket:
        """See `KvCacheManager.hold_ticket`."""
        said = parse_token(token)
        return await self._claim(self._link_of(said), said, timeout_s=timeout_s)

    async def pull_blocks(
        self,
        ticket: AnyTicket,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.pull_blocks`."""
        started = perf_counter()
        check_layer_range("src_layer_range", src_layer_range)
        entry = self._store.own_entry(cache, "the destination")
        ours = check_layers("dst_layer_range", dst_layer_range, entry.desc.num_tensors, tensor_num_per_layer)
        local = check_blocks("dst_blocks", dst_blocks, entry.desc.num_slots, is_unique=True)
        remote = check_blocks("src_blocks", src_blocks, 2**63)

        request = _Request(entry, ours, local, remote, src_layer_range, tensor_num_per_layer, timeout_s, started)
        if isinstance(ticket, HeldTicket):
            return await self._move(request, self._checked(ticket, is_write=False))
        said = parse_token(ticket)
        link = self._link_of(said, is_write=False)
        held = await self._claim(link, said, timeout_s=timeout_s)
        try:
            report = await self._move(request, held)
        except BaseException as exc:
            held.end(TicketEnding.FAILED, f"the pull failed: {exc or type(exc).__name__}")
            raise
        held.end(TicketEnding.DONE, "")  # the reader may have wanted only some of it
        return report

    async def push_blocks(
        self,
        ticket: AnyTicket,
        cache: KvCache,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        timeout_s: float,
    ) -> TransferReport:
        """See `KvCacheManager.push_blocks`."""
        started = perf_counter()
        check_layer_range("dst_layer_range", dst_layer_range)
        entry = self._store.own_entry(cache, "the source")
        ours = check_layers("src_layer_range", src_layer_range, entry.desc.num_tensors, tensor_num_per_layer)
        local = check_blocks("src_blocks", src_blocks, entry.desc.num_slots)
        remote = check_blocks("dst_blocks", dst_blocks, 2**63, is_unique=True)

        request = _Request(entry, ours, local, remote, dst_layer_range, tensor_num_per_layer, timeout_s, started)
        if isinstance(ticket, HeldTicket):
            return await self._move(request, self._checked(ticket, is_write=True))
        said = parse_token(ticket)
        held = await self.hold_for_filling(said, timeout_s=timeout_s)
        try:
            return await self._move(request, held)
        except BaseException as exc:
            held.end(TicketEnding.FAILED, f"the push failed: {exc or type(exc).__name__}")
            raise

    async def hold_for_filling(self, said: Token, *, timeout_s: float) -> HeldTicket:
        """Return the ticket for filling of a token: claimed by the first push, and held until nothing is missing."""
        link = self._link_of(said, is_write=True)
        place = (link, said.number)
        started = perf_counter()
        with anyio.move_on_after(timeout_s) as scope:
            while (claiming := self._claiming.get(place)) is not None:
                await claiming.wait()
        if scope.cancelled_caught:
            raise _not_handed_out(link.peer, said, timeout_s)
        held = self._held.get(link, said.number)
        if held is not None and hmac.compare_digest(held.secret, said.secret):
            return held
        claiming = self._claiming[place] = anyio.Event()
        try:
            return await self._claim(link, said, timeout_s=max(0.0, timeout_s - (perf_counter() - started)))
        finally:
            del self._claiming[place]
            claiming.set()

    async def _move(self, request: _Request, held: HeldTicket) -> TransferReport:
        """Move blocks under a held ticket, in the direction that it is for, and note what is in place."""
        entry, ours, local, remote, layers, width, timeout_s, started = request
        link, geometry, is_write = held.link, held.found.geometry, held.is_write
        places, remote = held.places_of(remote)
        if len(local) != len(remote):
            check_same_length(*((local, remote) if is_write else (remote, local)))
        range_name = "dst_layer_range" if is_write else "src_layer_range"
        theirs = check_layers(range_name, layers, geometry.num_tensors, width)
        check_same_tensors(ours, theirs)
        check_same_kind(entry.geometry, geometry, is_by_block=True)
        nbytes = geometry.slot_nbytes * len(local) * ours.num
        runs, their_runs = select_runs(entry.geometry.runs, *ours), select_runs(geometry.runs, *theirs)
        pieces = join_blocks(local, remote, geometry.slot_nbytes, is_push=is_write)
        extents = spread(runs, their_runs, pieces)
        target = Target("id", held.found.cache_id)
        detour = partial(get_by_detour, link, target, held.found, runs, theirs, pieces, nbytes)
        movement = self._store.begin_moving(entry, local)
        in_turn_s: float | None = None
        try:
            in_turn_s = await start(link, max(0.0, timeout_s - (perf_counter() - started)))
            left_s = timeout_s - (perf_counter() - started)
            await move_under(held, theirs, places, extents, nbytes, left_s, None if is_write else detour)
        except BaseException as exc:
            link.failed(exc)
            raise
        finally:
            self._store.end_moving(entry, movement, is_quiet=is_write or link.endpoint.is_quiet)
            if in_turn_s is not None:
                finish(link)
        if is_write:
            link.stats.pushes += 1
            link.stats.nbytes_pushed += nbytes
        else:
            link.stats.pulls += 1
            link.stats.nbytes_pulled += nbytes
        done = tuple(remote if is_write else local)
        return TransferReport.of(link.peer, link.transport, nbytes, len(extents), started, done)

    def _link_of(self, said: Token, *, is_write: bool | None = None) -> Link:
        """Return the link to a token's owner; refuse what can be seen to be of no use without asking."""
        if is_write is not None:
            _check_direction(said.number, said.cluster_id, said.is_write, is_write)
        link = self._links.open_link(said.cluster_id)
        if link.incarnation != said.incarnation:
            raise TicketError(
                f"ticket {said.number} is of an earlier life of cluster {said.cluster_id}, which has restarted since; "
                "ask for a new one",
                peer=said.cluster_id,
                phase="look-up",
                ticket=said.number,
            )
        return link

    def _checked(self, held: HeldTicket, *, is_write: bool) -> HeldTicket:
        _check_direction(held.number, held.peer, held.is_write, is_write)
        if not held.is_live:
            raise held.ended("look-up")
        return held

    async def _claim(self, link: Link, said: Token, *, timeout_s: float) -> HeldTicket:
        """Become the holder of a ticket: one round trip."""
        link.begin()
        try:
            with anyio.move_on_after(timeout_s):
                found = await self._ask(link, said)
                link.check_alive()  # else nobody would ever end it here
                grant = None
                if said.is_write:
                    # Kept before anything can fail: only a lease that is known here can be given back.
                    grant = link.grants.add(found)
                held = self._held.add(link, said, found, grant)
                try:
                    await accept_found(link, found, for_writing=said.is_write)
                except BaseException as exc:
                    held.end(TicketEnding.FAILED, f"its holder cannot reach its blocks: {exc or type(exc).__name__}")
                    raise
                if not held.is_live:  # its end overtook us
                    raise held.ended("look-up")
                return held
        except KVLinkError as exc:
            link.blame(exc)
            raise
        finally:
            link.end()
        raise _not_handed_out(link.peer, said, timeout_s)

    async def _ask(self, link: Link, said: Token) -> Found:
        try:
            answer = await link.ask(lambda seq: Claim(seq, said.number, said.secret, said.is_write))
        except CacheNotFoundError as exc:
            raise TicketError(str(exc), peer=link.peer, phase="look-up", ticket=said.number) from None
        if not isinstance(answer, Found) or not _is_sound(answer):
            if isinstance(answer, Found):
                link.post(CloseRead(answer.lease))
            raise ProtocolError(f"cluster {link.peer} answered a claim with nonsense", peer=link.peer)
        return answer


async def move_under(
    held: HeldTicket,
    theirs: Tensors,
    places: NDArray[np.int64],
    extents: list[Extent],
    nbytes: int,
    timeout_s: float,
    detour: Callable[[float], Awaitable[object]] | None = None,
) -> None:
    """Move `extents` under a held ticket: the blocks at `places` of the ticket, of these tensors of the owner's.

    The ticket's word is looked at before anything moves, and again after it.

    Args:
        detour: how to read, in so many seconds, what cannot be reached where it is. A write has none: the owner would
            copy it to its place later, perhaps when the ticket has ended.

    Raises:
        TicketError: the ticket has ended; what was moved is worthless.
        FeatureNotEnabledError, LinkLostError, TransferTimeoutError: as for a movement by key.
    """
    link, found = held.link, held.found
    is_out_of_reach = link.is_out_of_reach(found.geometry.runs)
    if is_out_of_reach and detour is None:
        raise FeatureNotEnabledError(f"pushes by ticket take no detour: {link.detour}", peer=link.peer)
    held.begin(theirs, places)
    is_placed = False
    try:
        if not await is_current(link.endpoint, found, timeout_s=timeout_s, peer=link.peer):
            raise held.ended("look-up")
        if is_out_of_reach and detour is not None:
            await detour(timeout_s)
            if not await is_current(link.endpoint, found, timeout_s=timeout_s, peer=link.peer):
                raise ended_while_read(found, link.peer)
        elif held.grant is not None:
            await put_checked(link, held.grant, extents, nbytes, timeout_s=timeout_s)
        else:
            await get_checked(link, found, extents, nbytes, timeout_s=timeout_s)
        is_placed = True
    except TicketError:
        raise
    except CacheNotFoundError as exc:  # by the ticket's own word
        lost = "what was pushed is lost" if held.is_write else "the destination holds rubbish"
        how = f", {held.ending.outcome}," if held.ending.outcome else ""
        raise TicketError(
            f"ticket {held.number} of cluster {held.peer} ended{how} while its blocks were moved: {lost}; "
            "ask for a new one",
            peer=held.peer,
            phase="settle",
            ticket=held.number,
        ) from exc
    finally:
        held.finish(theirs, places, is_placed=is_placed)


def _not_handed_out(peer: int, said: Token, timeout_s: float) -> TransferTimeoutError:
    return TransferTimeoutError(
        f"cluster {peer} did not hand out ticket {said.number} within {timeout_s:.3g} s; its event loop may be blocked",
        peer=peer,
        phase="look-up",
    )


def _is_sound(found: Found) -> bool:
    """Whether a peer's answer to a claim can be kept: what is noted for each block of each tensor is bounded."""
    geometry, blocks = found.geometry, found.blocks
    return (
        bool(blocks)
        and max(blocks) < geometry.num_slots
        and len(set(blocks)) == len(blocks)
        and 1 <= geometry.num_tensors <= _MAX_CELLS // len(blocks)
    )


def _check_direction(number: int, owner: int, is_for_write: bool, is_write: bool) -> None:
    if is_for_write != is_write:
        raise TicketError(
            f"ticket {number} of cluster {owner} is for "
            + ("filling: give it to push_blocks" if is_for_write else "reading: give it to pull_blocks"),
            peer=owner,
            phase="look-up",
            ticket=number,
        )
