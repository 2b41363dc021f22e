"""Run a plan on an endpoint, and settle whether what it moved was worth moving."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Final

import anyio

from kvlink.errors import CacheNotFoundError, KVLinkError, LinkLostError, TransferTimeoutError, TransportError
from kvlink.links.grants import WriteGrant
from kvlink.links.link import Link
from kvlink.plan import Extent, total_nbytes
from kvlink.report import Interrupted
from kvlink.transports.base import NOT_QUIET, Endpoint
from kvlink.wire import Found

_VOUCH_S: Final = 0.05
"""How long a failed movement waits for the state word, for what it has moved to count."""


async def load_word_within(endpoint: Endpoint, word: int, *, timeout_s: float, peer: int) -> int:
    """Load a state word of the peer, bounded also where that is a round trip over a network.

    Raises:
        TransferTimeoutError: the deadline passed.
    """
    if endpoint.has_immediate_words:
        return await endpoint.load_word(word)
    try:
        with anyio.move_on_after(timeout_s):
            return await endpoint.load_word(word)
    except KVLinkError as exc:
        exc.phase = exc.phase or "settle"
        raise
    raise TransferTimeoutError(
        f"cluster {peer}'s memory did not say in time whether the cache is still valid; nothing is known of the bytes",
        peer=peer,
        phase="settle",
    )


async def is_current(endpoint: Endpoint, found: Found, *, timeout_s: float, peer: int) -> bool:
    """Whether the cache that `found` describes is still valid. Raises as `load_word_within`."""
    return await load_word_within(endpoint, found.word, timeout_s=timeout_s, peer=peer) == found.generation


async def vouch(
    error: KVLinkError,
    endpoint: Endpoint,
    found: Found,
    extents: Sequence[Extent],
    done: Sequence[int],
    started: float,
    *,
    peer: int,
) -> None:
    """Note in the error of a get or put which extents can be relied on: none, unless the cache is still the one.

    Waits 50 ms for the state word at most, also when the deadline has passed.

    Raises:
        CacheNotFoundError: a transport failed because the cache has ended.
    """
    error.phase = error.phase or "transfer"
    is_valid = False
    if done or isinstance(error, TransportError):
        with suppress(LinkLostError, TransferTimeoutError, TransportError):
            word = await load_word_within(endpoint, found.word, timeout_s=_VOUCH_S, peer=peer)
            is_valid = word == found.generation
            if not is_valid and isinstance(error, TransportError):
                raise CacheNotFoundError(
                    f"cache {found.cache_id} of cluster {peer} ended during the transfer", peer=peer, phase="transfer"
                ) from error
    kept = set(done) if is_valid else set()
    missing = tuple([extent for index, extent in enumerate(extents) if index not in kept])
    landed = total_nbytes(extents) - total_nbytes(missing)
    error.interrupted = Interrupted(missing, len(extents), landed, endpoint.name, perf_counter() - started)


async def get_checked(link: Link, found: Found, extents: Sequence[Extent], nbytes: int, *, timeout_s: float) -> None:
    """Get `extents` of the cache that `found` describes, then make sure that it was valid all the while.

    More than what is moved at once waits for its turn (`kvlink.links.gates`).

    Cancellation: ends when nothing is in flight any more; the destination's contents are then undefined.

    Raises:
        CacheNotFoundError: the cache ended before all of it was read; the destination's contents are worthless.
        TransferTimeoutError, LinkLostError, TransportError: it ended early; `KVLinkError.interrupted` says with what.
    """
    endpoint, in_flight = link.endpoint, 0
    if nbytes > endpoint.immediate_nbytes:
        in_flight = min(nbytes, endpoint.window_nbytes)
        timeout_s = await link.nbytes.take(in_flight, timeout_s)
    try:
        await _get_checked(endpoint, found, extents, nbytes, timeout_s=timeout_s, peer=link.peer)
    except CacheNotFoundError:
        if found.lease:
            # A lease ends with its link too, and perhaps the owner has lost that before us: then it does not answer.
            with anyio.move_on_after(_VOUCH_S):
                await link.ping()
        raise
    finally:
        if in_flight:
            link.nbytes.give(in_flight)


async def _get_checked(
    endpoint: Endpoint, found: Found, extents: Sequence[Extent], nbytes: int, *, timeout_s: float, peer: int
) -> None:
    if nbytes <= endpoint.immediate_nbytes:
        await endpoint.get(extents, nbytes)
    else:
        started = perf_counter()
        done: list[int] = []
        try:
            with anyio.move_on_after(timeout_s) as scope:
                await endpoint.get(extents, nbytes, done)
            if scope.cancelled_caught:
                raise TransferTimeoutError(
                    f"pulling {nbytes} bytes from cluster {peer} did not end in time; see the report for what is there"
                    + ("" if endpoint.is_quiet else NOT_QUIET),
                    peer=peer,
                    phase="transfer",
                )
        except KVLinkError as exc:
            await vouch(exc, endpoint, found, extents, done, started, peer=peer)
            raise
        timeout_s = max(0.0, timeout_s - (perf_counter() - started))
    if endpoint.has_immediate_words:
        generation = await endpoint.load_word(found.word)
    else:
        generation = await load_word_within(endpoint, found.word, timeout_s=timeout_s, peer=peer)
    if generation != found.generation:
        raise ended_while_read(found, peer)


def ended_while_read(found: Found, peer: int) -> CacheNotFoundError:
    """Return the error of a get whose cache was not valid all the while."""
    return CacheNotFoundError(
        f"cache {found.cache_id} of cluster {peer} ended while it was being read; the destination holds rubbish",
        peer=peer,
        phase="settle",
    )


async def put_checked(
    link: Link, grant: WriteGrant, extents: Sequence[Extent], nbytes: int, *, timeout_s: float
) -> None:
    """Put `extents` into the cache of `grant`, then make sure that it is still that cache.

    More than what is moved at once waits for its turn (`kvlink.links.gates`).

    Cancellation: ends when nothing is in flight any more; what was to be written is then undefined.

    Raises:
        CacheNotFoundError: the cache ended before all of it was written.
        TransferTimeoutError, LinkLostError, TransportError: it ended early; `KVLinkError.interrupted` says with what.
    """
    if nbytes <= link.endpoint.immediate_nbytes:
        await _put_checked(link, grant, extents, nbytes, timeout_s=timeout_s)
        return
    in_flight = min(nbytes, link.endpoint.window_nbytes)
    left_s = await link.nbytes.take(in_flight, timeout_s)
    try:
        await _put_checked(link, grant, extents, nbytes, timeout_s=left_s)
    finally:
        link.nbytes.give(in_flight)


async def _put_checked(
    link: Link, grant: WriteGrant, extents: Sequence[Extent], nbytes: int, *, timeout_s: float
) -> None:
    found = grant.found
    if grant.is_recalled:
        raise ended_while_written(link, found.cache_id)
    grant.begin()
    try:
        if nbytes <= link.endpoint.immediate_nbytes:
            await link.endpoint.put(extents, nbytes)
        else:
            started = perf_counter()
            done: list[int] = []
            try:
                with anyio.move_on_after(timeout_s) as scope, link.grants.stoppable(scope):
                    await link.endpoint.put(extents, nbytes, done)
                if scope.cancelled_caught:
                    if link.error is not None:
                        raise link.gone()
                    raise TransferTimeoutError(
                        f"pushing {nbytes} bytes to cluster {link.peer} did not end in time; see the report for what "
                        "is there",
                        peer=link.peer,
                        phase="transfer",
                    )
            except KVLinkError as exc:
                await vouch(exc, link.endpoint, found, extents, done, started, peer=link.peer)
                raise
            timeout_s = max(0.0, timeout_s - (perf_counter() - started))
        word = await load_word_within(link.endpoint, found.word, timeout_s=timeout_s, peer=link.peer)
        if word != found.generation:
            raise ended_while_written(link, found.cache_id)
    finally:
        grant.end()


def ended_while_written(link: Link, cache_id: int) -> CacheNotFoundError:
    """Return the error of a put whose cache was not valid all the while."""
    return CacheNotFoundError(
        f"cache {cache_id} of cluster {link.peer} has ended; what was pushed is lost", peer=link.peer, phase="settle"
    )
