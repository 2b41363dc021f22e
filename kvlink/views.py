"""What we know of a peer's caches: asked once, remembered for one life, never trusted without the state word."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from kvlink.checks import check_geometry
from kvlink.errors import ProtocolError, TransferTimeoutError
from kvlink.link import Link
from kvlink.memory import STATE
from kvlink.stateregion import WORD_NBYTES
from kvlink.wire import Found, LookUp, Message, OpenRead, Target


async def find_cache(link: Link, target: Target, *, timeout_s: float) -> Found:
    """Return where a cache of the peer lies: remembered while its state word still holds, else asked for again.

    Raises:
        CacheNotFoundError: the peer has no such cache now.
        TransferTimeoutError: the peer did not answer in time.
        LinkLostError: the peer went away.
    """
    found = link.views.get(target)
    if found is not None:
        if await link.endpoint.load_word(found.word) == found.generation:
            return found
        link.views.pop(target, None)
    found = await _ask(link, LookUp, target, timeout_s=timeout_s)
    link.views[target] = found
    return found


async def open_read(link: Link, target: Target, *, timeout_s: float) -> Found:
    """Return where a cache of the peer lies, with a read lease: one round trip, always. Raises as `find_cache`."""
    return await _ask(link, lambda seq, target: OpenRead(seq, target, timeout_s), target, timeout_s=timeout_s)


async def _ask(link: Link, question: Callable[[int, Target], Message], target: Target, *, timeout_s: float) -> Found:
    with anyio.move_on_after(timeout_s):
        answer = await link.ask(lambda seq: question(seq, target))
        if not isinstance(answer, Found):
            raise ProtocolError(f"cluster {link.peer} answered a look-up with {type(answer).__name__}", peer=link.peer)
        await _accept(link, answer)
        return answer
    raise TransferTimeoutError(
        f"cluster {link.peer} did not say within {timeout_s} s where its cache lies; its event loop may be blocked",
        peer=link.peer,
        phase="look-up",
    )


async def _accept(link: Link, found: Found) -> None:
    """Make the regions of an answer addressable, and refuse one that points outside of them."""
    endpoint = link.endpoint
    regions = {run.region for run in found.geometry.runs}
    await endpoint.reach(regions, for_writing=False)
    if found.word >= endpoint.region_nbytes(STATE) // WORD_NBYTES:
        raise ProtocolError(f"cluster {link.peer} names state word {found.word}, which it has not", peer=link.peer)
    check_geometry(found.geometry, {region: endpoint.region_nbytes(region) for region in regions}, peer=link.peer)
