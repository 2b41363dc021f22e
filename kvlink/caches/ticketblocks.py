"""Which blocks of a cache its tickets are about: many may read a block, or one may fill it. Pure.

Without this, a ticket for filling given on blocks that are offered for reading would let the reader report success with
the newer bytes; and one given on blocks that a revoked writer can still reach would let that writer's bytes into them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockUse:
    """The blocks of one cache.

    Args:
        num_blocks: of the cache. Takes five bytes for each.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_reading: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._is_filling: NDArray[np.bool_] = np.zeros(num_blocks, bool)
        self._num_tickets = 0

    def conflict(self, blocks: list[int], *, is_write: bool) -> int | None:
        """Return the first of these blocks that another ticket stands in the way of, None where none does."""
        is_taken = self._is_filling[blocks]
        if is_write:
            is_taken |= self._num_reading[blocks] > 0
        return blocks[int(is_taken.argmax())] if is_taken.any() else None

    def add(self, blocks: list[int], *, is_write: bool) -> None:
        """Note a ticket on these blocks, none of which has a conflict."""
        self._num_tickets += 1
        if is_write:
            self._is_filling[blocks] = True
        else:
            self._num_reading[blocks] += 1

    def remove(self, blocks: list[int], *, is_write: bool) -> bool:
        """Undo one `add`; return whether no ticket is left."""
        self._num_tickets -= 1
        if is_write:
            self._is_filling[blocks] = False
        else:
            self._num_reading[blocks] -= 1
        return self._num_tickets == 0
