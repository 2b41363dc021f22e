"""A transport around another one that delays, reorders, repeats, fails and drops completions, under a seed.

The wrapper keeps the contract of `kvlink.transports.base` as long as the transport inside does, so whatever runs over
the one must run over the other, only later or with errors. In particular it is *quiet*: what is late or dropped is the
report of an operation, never the operation itself. When `get` or `put` has ended in any way nothing moves any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from kvlink.errors import KVLinkError, LinkLostError, TransportError
from kvlink.plan import Extent, total_nbytes
from kvlink.testing.faults import Dice, Fault, Faults
from kvlink.transports.base import DeathWatch, Endpoint, Offer, Transport
from kvlink.wire import Share

_T = TypeVar("_T")


class FaultyTransport(Transport):
    """Commits faults on every endpoint of another transport, whose name it bears.

    Args:
        inner: the transport that moves the bytes; owned from now on.
        faults: what goes wrong, and how often.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.name = inner.name
        self._inner = inner
        self._faults = faults
        self._num_endpoints = 0

    async def start(self, tasks: TaskGroup) -> None:
        await self._inner.start(tasks)

    def offer(self) -> Offer | None:
        return self._inner.offer()

    async def accept(self, offer: Offer, card: bytes) -> Endpoint:
        return self._wrap(await self._inner.accept(offer, card))

    def withdraw(self, offer: Offer) -> None:
        self._inner.withdraw(offer)

    async def dial(self, card: bytes) -> Endpoint:
        return self._wrap(await self._inner.dial(card))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _wrap(self, endpoint: Endpoint) -> FaultyEndpoint:
        self._num_endpoints += 1
        return FaultyEndpoint(endpoint, Dice(self._faults, f"{self.name} {self._num_endpoints}"))


class FaultyEndpoint(Endpoint):
    """Commits faults on the operations of another endpoint. Made by `FaultyTransport`.

    Attributes:
        num_faults: how often each fault has struck.
    """

    immediate_nbytes = -1  # also the smallest operation may wait

    def __init__(self, inner: Endpoint, dice: Dice) -> None:
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.card = inner.card
        self.settings = inner.settings
        self.reaches_cuda = inner.reaches_cuda
        self.window_nbytes = inner.window_nbytes
        self.num_faults = dict.fromkeys(Fault, 0)
        self._inner = inner
        self._dice = dice
        self._aborted = anyio.Event()
        self._ended = anyio.Event()

    @property
    def is_quiet(self) -> bool:
        return self._inner.is_quiet

    def connect(self, post: Callable[[Share], None], lose: Callable[[KVLinkError], None]) -> None:
        self._inner.connect(post, lose)

    def take(self, share: Share) -> None:
        self._inner.take(share)

    async def get(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        await self._move("get", self._inner.get, extents, nbytes, [] if done is None else done)

    async def put(self, extents: Sequence[Extent], nbytes: int, done: list[int] | None = None) -> None:
        await self._move("put", self._inner.put, extents, nbytes, [] if done is None else done)

    async def load_word(self, word: int) -> int:
        return await self._do("load_word", lambda: self._inner.load_word(word))

    async def reach(self, regions: Collection[int], *, for_writing: bool) -> None:
        await self._do("reach", lambda: self._inner.reach(regions, for_writing=for_writing))

    def region_nbytes(self, region: int) -> int:
        return self._inner.region_nbytes(region)

    def share(self, regions: Collection[int], *, for_writing: bool) -> None:
        self._inner.share(regions, for_writing=for_writing)

    def watch_death(self) -> DeathWatch:
        return self._inner.watch_death()

    async def aclose(self) -> None:
        self._aborted.set()
        await self._inner.aclose()

    def abort(self) -> None:
        self._aborted.set()
        self._inner.abort()

    def _draw(self, operation: str) -> Fault | None:
        fault = self._dice.draw(operation)
        if fault is not None:
            self.num_faults[fault] += 1
        return fault

    async def _move(
        self,
        operation: str,
        move: Callable[[Sequence[Extent], int, list[int] | None], Awaitable[None]],
        extents: Sequence[Extent],
        nbytes: int,
        done: list[int],
    ) -> None:
        fault = self._draw(operation)
        if fault is Fault.REORDER:
            for batch in self._dice.batches(len(extents)):
                chosen = [extents[index] for index in batch]
                partly: list[int] = []
                try:
                    await move(chosen, total_nbytes(chosen), partly)
                except BaseException:
                    done += [batch[index] for index in partly]
                    raise
                done += batch
            with anyio.move_on_after(self._dice.late_s()):
                await self._ended.wait()  # let one overtake that began later
        elif fault is Fault.FAIL:
            moved = extents[: self._dice.some(len(extents))]
            if moved:
                await move(moved, total_nbytes(moved), done)
            done[:] = range(len(moved))
            raise TransportError(f"{operation} failed after {len(moved)} of {len(extents)} pieces, on purpose")
        else:
            await self._strike(fault, operation, lambda: move(extents, nbytes, done))
        self._ended.set()
        self._ended = anyio.Event()

    async def _do(self, operation: str, do: Callable[[], Awaitable[_T]]) -> _T:
        fault = self._draw(operation)
        if fault is Fault.FAIL:
            raise TransportError(f"{operation} failed, on purpose")
        return await self._strike(fault, operation, do)

    async def _strike(self, fault: Fault | None, operation: str, do: Callable[[], Awaitable[_T]]) -> _T:
        """Do something that may be early or late, done twice, or never reported."""
        if fault is Fault.DROP:
            if self._dice.is_heads():
                await do()
            await self._aborted.wait()
            raise LinkLostError(f"the link ended during {operation}; link again", phase="transfer")
        is_late = fault in (Fault.DELAY, Fault.REORDER)
        is_early = is_late and self._dice.is_heads()
        if is_late and not is_early:
            await anyio.sleep(self._dice.late_s())
        result = await do()
        if fault is Fault.REPEAT:
            result = await do()
        if is_early:
            await anyio.sleep(self._dice.late_s())
        return result
