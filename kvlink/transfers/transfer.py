"""Run a plan on an endpoint, and settle whether what it moved was worth moving."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import anyio

from kvlink.errors import CacheNotFoundError, TransferTimeoutError
from kvlink.plan import Extent
from kvlink.transports.base import Endpoint
from kvlink.wire import Found


async def load_word_within(endpoint: Endpoint, word: int, *, timeout_s: float, peer: int) -> int:
    """Load a state word of the peer, bounded also where that is a round trip over a network.

    Raises:
        TransferTimeoutError: the deadline passed.
    """
    if endpoint.has_immediate_words:
        return await endpoint.load_word(word)
    with anyio.move_on_after(timeout_s):
        return await endpoint.load_word(word)
    raise TransferTimeoutError(
        f"cluster {peer}'s memory did not say in time whether the cache is still valid; nothing is known of the bytes",
        peer=peer,
        phase="settle",
    )


async def is_current(endpoint: Endpoint, found: Found, *, timeout_s: float, peer: int) -> bool:
    """Whether the cache that `found` describes is still valid. Raises as `load_word_within`."""
    return await load_word_within(endpoint, found.word, timeout_s=timeout_s, peer=peer) == found.generation


async def get_checked(
    endpoint: Endpoint, found: Found, extents: Sequence[Extent], nbytes: int, *, timeout_s: float, peer: int
) -> None:
    """Get `extents` of the cache that `found` describes, then make sure that it was valid all the while.

    Cancellation: ends when nothing is in flight any more; the destination's contents are then undefined.

    Raises:
        CacheNotFoundError: the cache ended before all of it was read; the destination's contents are worthless.
        TransferTimeoutError: the deadline passed; as for a cancellation.
    """
    if nbytes <= endpoint.immediate_nbytes:
        await endpoint.get(extents, nbytes)
    else:
        started = perf_counter()
        with anyio.move_on_after(timeout_s) as scope:
            await endpoint.get(extents, nbytes)
        if scope.cancelled_caught:
            raise TransferTimeoutError(
                f"pulling {nbytes} bytes from cluster {peer} did not end in time; the destination holds rubbish",
                peer=peer,
                phase="transfer",
            )
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
