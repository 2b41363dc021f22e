"""Back-pressure: how much a cluster has in flight, in all and per link, and who goes next.

There are two things to share, each a `Quota` with a `Gate` per link:

- *operations*: pulls and pushes that have begun, from before their look-up until they have ended. Each costs the owner
  a lease, so a caller with ten thousand requests does not take ten thousand leases at once.
- *bytes*: what a transport has in its hands for movements that have begun and not returned. A movement counts with its
  size, but with no more than its endpoint moves at a time (`Endpoint.window_nbytes`: for shared memory, a chunk per
  copy thread), so a pull of 1 GiB counts with some MiB and leaves room for those behind it.

What does not wait is not counted: a movement that ends before its call returns to the loop has nothing in flight.

Who goes next: within a link, whoever asked first; between links, in turn. A link that has its own share in flight is
passed over; but when the *whole* is short, the one whose turn it is waits for room and nobody overtakes it, so a large
movement is not kept out by a stream of small ones. What could never fit is cut down to what fits alone.

Decision: a count that is taken and given back, with queues that are touched only when it is full.
Because: an uncontended movement pays two comparisons and two additions, 0.3 us in all.
Instead of: cutting movements into slices, each of which waits for its turn: between slices nothing moves until the
event loop gets round to it, and a loop that is 5 ms late would halve the throughput of slices that take 5 ms.
Revisit when: a transport comes that cannot bound what it has in its hands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Protocol

import anyio

from kvlink.errors import KVLinkError, TransferTimeoutError


class _Waiter:
    __slots__ = ("amount", "is_granted", "settled")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.is_granted = False
        self.settled = anyio.Event()


class Quota:
    """One thing that the links of a cluster share.

    Args:
        what: its name in errors: ``operations``, ``bytes in flight``.
        per_link, total: how much of it one link, and all together, may have at a time.
    """

    def __init__(self, what: str, *, per_link: int, total: int) -> None:
        self.what = what
        self.per_link = min(per_link, total)
        self.total = total
        self.used = 0
        self.ready: deque[Gate] = deque()
        """Gates whose first waiter has room on its own link, in the order of their turns: they lack the total."""

    def serve(self) -> None:
        """Let in whoever is next, as long as there is room."""
        ready = self.ready
        while ready and ready[0].waiting[0].amount <= self.total - self.used:
            gate = ready.popleft()
            gate.is_ready = False
            waiter = gate.waiting.popleft()
            gate.count(waiter.amount)
            waiter.is_granted = True
            waiter.settled.set()
            gate.line_up()


class Gate:
    """One link's way to a `Quota`.

    Args:
        gone: makes the error of who waits when the link ends.
        peer: for errors.
    """

    def __init__(self, quota: Quota, gone: Callable[[], KVLinkError], peer: int) -> None:
        self._quota = quota
        self._gone = gone
        self._peer = peer
        self.used = 0
        self.waiting: deque[_Waiter] = deque()
        self.is_ready = False
        self._is_closed = False

    def try_take(self, amount: int) -> bool:
        """Take `amount` now, if that is free and nobody else's turn. Paired with `give`."""
        quota = self._quota
        if amount > quota.per_link:
            amount = quota.per_link
        used, total = self.used + amount, quota.used + amount
        if self.waiting or used > quota.per_link or quota.ready or total > quota.total:
            return False
        self.used, quota.used = used, total
        return True

    async def take(self, amount: int, timeout_s: float) -> float:
        """Take `amount` when it is our turn and return how many of the `timeout_s` seconds are left.

        Cancellation: leaves the queue, and nothing is taken.

        Raises:
            TransferTimeoutError: it was not our turn in time; nothing was taken.
            LinkLostError, NotLinkedError: the link has ended meanwhile.
        """
        if self.try_take(amount):
            return timeout_s
        if self._is_closed:
            raise self._gone()
        started = perf_counter()
        waiter = _Waiter(min(amount, self._quota.per_link))
        self.waiting.append(waiter)
        self.line_up()
        try:
            with anyio.move_on_after(timeout_s) as scope:
                await waiter.settled.wait()
        except BaseException:
            self._leave(waiter)
            raise
        if not waiter.is_granted:
            self._leave(waiter)
            if not scope.cancelled_caught:
                raise self._gone()
            quota = self._quota
            raise TransferTimeoutError(
                f"waited {timeout_s:.3g} s for its turn: cluster {self._peer} has {self.used} {quota.what} of "
                f"{quota.per_link}, all peers together {quota.used} of {quota.total}; nothing was moved",
                peer=self._peer,
                phase="queue",
            )
        return max(0.0, timeout_s - (perf_counter() - started))

    def give(self, amount: int) -> None:
        """Give back what one `try_take` or `take` of the same `amount` has taken."""
        quota = self._quota
        if amount > quota.per_link:
            amount = quota.per_link
        self.used -= amount
        quota.used -= amount
        if self.waiting:
            self.line_up()
        if quota.ready:
            quota.serve()

    def close(self) -> None:
        """Let nobody wait any more: the link has ended. What was taken is still to be given back."""
        self._is_closed = True
        waiting = list(self.waiting)
        self.waiting.clear()
        self._stand_back()
        for waiter in waiting:
            waiter.settled.set()
        self._quota.serve()

    def count(self, amount: int) -> None:
        """Add to what is used."""
        self.used += amount
        self._quota.used += amount

    def line_up(self) -> None:
        """Take a place among the ready, if our first waiter has room on this link and we have none yet."""
        if self.waiting and not self.is_ready and self.used + self.waiting[0].amount <= self._quota.per_link:
            self.is_ready = True
            self._quota.ready.append(self)

    def _leave(self, waiter: _Waiter) -> None:
        """Undo a `take` that does not come to its end."""
        if waiter.is_granted:
            self.give(waiter.amount)
            return
        was_first = bool(self.waiting) and self.waiting[0] is waiter
        with suppress(ValueError):
            self.waiting.remove(waiter)
        if was_first:  # the next one may fit where this one did not, or not where it did
            self._stand_back()
            self.line_up()
            self._quota.serve()

    def _stand_back(self) -> None:
        if self.is_ready:
            self.is_ready = False
            self._quota.ready.remove(self)


class _Starts(Protocol):
    """A link, as far as this module knows it."""

    operations: Gate

    def begin(self) -> None: ...

    def end(self) -> None: ...


async def start(link: _Starts, timeout_s: float) -> float:
    """Begin an operation on a link when it is its turn; return how many of the `timeout_s` seconds are left for it.

    Paired with `finish`. Where nothing waits this costs 0.3 us, and the loop gets no turn.

    Raises:
        NotLinkedError: the link is not open.
        TransferTimeoutError: too many operations were before it.
    """
    gate = link.operations
    if not gate.try_take(1):
        timeout_s = await gate.take(1, timeout_s)
    try:
        link.begin()
    except KVLinkError:
        gate.give(1)
        raise
    return timeout_s


def finish(link: _Starts) -> None:
    """Undo one `start`."""
    link.operations.give(1)
    link.end()
