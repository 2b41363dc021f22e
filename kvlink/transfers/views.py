"""What we know of a peer's caches: asked once, remembered for one life, never trusted without the state word."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import anyio

from kvlink.checks import check_geometry
from kvlink.errors import CacheNotFoundError, FeatureNotEnabledError, ProtocolError, TransferTimeoutError
from kvlink.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from kvlink.links.grants import WriteGrant
from kvlink.links.link import Link
from kvlink.links.pairing import MAX_PAIRINGS
from kvlink.memory.regions import STATE
from kvlink.memory.stateregion import WORD_NBYTES
from kvlink.transfers.transfer import load_word_within
from kvlink.wire import CloseRead, Found, LookUp, Message, OpenRead, OpenWrite, Target

_UNKNOWN_NBYTES: Final = 2**64


def target_of(key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex) -> Target:
    """Return how a key is said on the wire."""
    if isinstance(key, CacheKeyByIdAndIndex):
        return Target("id", key.cache_id, 0, key.batch_index)
    name = key.name
    return Target(name.namespace, name.id, name.model_id)


def cache_of(key: BlocksCacheKey | CacheKeyByIdAndIndex) -> Target:
    """Return how the whole cache of a key is said, whatever slot the key names: one write lease serves all slots."""
    return target_of(key) if isinstance(key, BlocksCacheKey) else Target("id", key.cache_id)


async def find_cache(link: Link, target: Target, timeout_s: float) -> Found:
    """Return where a cache of the peer lies: remembered while its state word still holds, else asked for again.

    Raises:
        CacheNotFoundError: the peer has no such cache now.
        TransferTimeoutError: the peer did not answer in time.
        LinkLostError: the peer went away.
    """
    found = link.views.get(target)
    if found is not None:
        started = perf_counter()
        word = await load_word_within(link.endpoint, found.word, timeout_s=timeout_s, peer=link.peer)
        if word == found.generation:
            return found
        timeout_s = max(0.0, timeout_s - (perf_counter() - started))
        link.views.pop(target, None)
    found = await _ask(link, LookUp, target, timeout_s=timeout_s)
    if len(link.views) >= MAX_PAIRINGS:
        link.views.clear()
    link.views[target] = found
    return found


async def open_read(link: Link, target: Target, timeout_s: float) -> Found:
    """Return where a cache of the peer lies, with a read lease: one round trip, always. Raises as `find_cache`."""
    return await _ask(link, lambda seq, target: OpenRead(seq, target, timeout_s), target, timeout_s=timeout_s)


async def open_write(link: Link, target: Target, *, timeout_s: float) -> WriteGrant:
    """Return the right to write into a cache of the peer: one round trip the first time, then remembered.

    Raises as `find_cache`, and FeatureNotEnabledError where the peer's memory cannot be written from here.
    """
    grant = link.grants.get(target)
    if grant is not None:
        started = perf_counter()
        word = await load_word_within(link.endpoint, grant.found.word, timeout_s=timeout_s, peer=link.peer)
        if word == grant.found.generation:
            return grant
        timeout_s = max(0.0, timeout_s - (perf_counter() - started))
        link.grants.forget(target)
    await _ask(link, OpenWrite, target, timeout_s=timeout_s, for_writing=True)
    grant = link.grants.get(target)
    if grant is None:
        raise CacheNotFoundError(
            f"the cache ended while it was being opened: {target}", peer=link.peer, phase="look-up"
        )
    return grant


async def _ask(
    link: Link,
    question: Callable[[int, Target], Message],
    target: Target,
    *,
    timeout_s: float,
    for_writing: bool = False,
) -> Found:
    with anyio.move_on_after(timeout_s):
        answer = await link.ask(lambda seq: question(seq, target))
        if not isinstance(answer, Found):
            raise ProtocolError(f"cluster {link.peer} answered a look-up with {type(answer).__name__}", peer=link.peer)
        grant = link.grants.add(answer) if for_writing else None
        try:
            await accept_found(link, answer, for_writing=for_writing)
        except BaseException:
            if grant is None and answer.lease:
                link.post(CloseRead(answer.lease))
            raise
        if grant is not None:
            link.grants.name(target, grant)
        return answer
    raise TransferTimeoutError(
        f"cluster {link.peer} did not say within {timeout_s} s where its cache lies; its event loop may be blocked",
        peer=link.peer,
        phase="look-up",
    )


async def accept_found(link: Link, found: Found, *, for_writing: bool) -> None:
    """Make the regions of an answer addressable, and refuse one that points outside of them."""
    endpoint = link.endpoint
    regions = {run.region for run in found.geometry.runs}
    is_refused = False
    try:
        await endpoint.reach(regions, for_writing=for_writing)
    except FeatureNotEnabledError as exc:
        link.detour = str(exc)
        link.unreachable |= regions
        is_refused = True
    link.check_alive()  # else its regions have gone, and what the peer has said looks wrong
    if found.word >= endpoint.region_nbytes(STATE) // WORD_NBYTES:
        raise ProtocolError(f"cluster {link.peer} names state word {found.word}, which it has not", peer=link.peer)
    if found.slot >= found.geometry.num_slots:
        raise ProtocolError(
            f"cluster {link.peer} names slot {found.slot} of a cache with {found.geometry.num_slots}", peer=link.peer
        )
    limits = {region: endpoint.region_nbytes(region) for region in regions}
    if is_refused:  # of such a region nothing is known, and no address in it is used: it takes a detour or an error
        limits = {region: nbytes or _UNKNOWN_NBYTES for region, nbytes in limits.items()}
    if not all(limits.values()):  # reached, and taken back since
        raise CacheNotFoundError(
            f"cache {found.cache_id} of cluster {link.peer} ended while it was being opened",
            peer=link.peer,
            phase="look-up",
        )
    check_geometry(found.geometry, limits, peer=link.peer)
