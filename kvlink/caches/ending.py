"""The one end of a ticket, on one side: settled once, awaited by any number of tasks, any number of times."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from kvlink.config import check_seconds
from kvlink.errors import TransferTimeoutError
from kvlink.tokens import TicketOutcome


class Ending:
    """What a ticket came to, and who waits for it and for the steps on the way.

    Args:
        name: the ticket in words, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.outcome: TicketOutcome | None = None
        self._changed = anyio.Event()

    def settle(self, outcome: TicketOutcome) -> bool:
        """Make `outcome` the end; return whether it is, rather than one that came before it."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.wake()
        return True

    def wake(self) -> None:
        """Let everyone who waits look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self, *, timeout_s: float) -> TicketOutcome:
        """Return the outcome once there is one; `TransferTimeoutError` when there is none within `timeout_s`."""
        await self.until(lambda: self.outcome is not None, "end", timeout_s=timeout_s)
        assert self.outcome is not None
        return self.outcome

    async def until(self, is_met: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        """Return once `is_met`, which is asked again at every change."""
        check_seconds("timeout_s", timeout_s)
        with anyio.move_on_after(timeout_s):
            while not is_met():
                await self._changed.wait()
            return
        raise TransferTimeoutError(f"{self.name} did not {what} within {timeout_s} s; it goes on")
