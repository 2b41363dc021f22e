"""Small movements end without giving the loop a turn; a caller that makes thousands in a row gives it one now and then.

One clock for all movements of a cluster: it counts what has been copied on the loop since the loop last had its turn.
"""

from __future__ import annotations

from typing import Final

import anyio.lowlevel

_YIELD_EVERY_S: Final = 0.001


class LoopTurns:
    """Seconds that movements have held the loop since it last had a turn.

    Attributes:
        held_s: grows by each movement that ended without waiting.
    """

    __slots__ = ("held_s",)

    def __init__(self) -> None:
        self.held_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the loop must have a turn before the next movement."""
        return self.held_s > _YIELD_EVERY_S

    async def give(self) -> None:
        """Give the loop its turn if it is due."""
        if self.held_s > _YIELD_EVERY_S:
            self.held_s = 0.0
            await anyio.lowlevel.checkpoint()
