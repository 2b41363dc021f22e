"""Run a plan on an endpoint, and settle whether what it moved was worth moving."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvlink.errors import CacheNotFoundError, TransferTimeoutError
from kvlink.plan import Extent
from kvlink.transports.base import Endpoint
from kvlink.wire import Found


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
        with anyio.move_on_after(timeout_s) as scope:
            await endpoint.get(extents, nbytes)
        if scope.cancelled_caught:
            raise TransferTimeoutError(
                f"pulling {nbytes} bytes from cluster {peer} did not end in time; the destination holds rubbish",
                peer=peer,
                phase="transfer",
            )
    if await endpoint.load_word(found.word) != found.generation:
        raise CacheNotFoundError(
            f"cache {found.cache_id} of cluster {peer} ended while it was being read; the destination holds rubbish",
            peer=peer,
            phase="settle",
        )
