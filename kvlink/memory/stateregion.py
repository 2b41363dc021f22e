"""One word per live cache: how a reader learns, without asking, that what it has read was worth reading.

Each cluster publishes a small region of 64-bit words. While a cache is valid its word holds the cache's *generation*, a
number never used twice by this cluster; when the cache ends the word changes first, and only then may its memory be
used for something else. A reader copies, then looks at the word: if it still holds the generation that the reader was
told, no byte was touched by a later owner before the copy ended.

That argument needs order. The owner's store to the word must be visible before its later stores to the memory, and the
reader's load of the word must not be done before its loads of the data. x86 keeps both orders; elsewhere
`order_memory` stands between (a lock released and another taken is a barrier on every machine that CPython runs on).
"""

from __future__ import annotations

import platform
import threading

import numpy as np
from numpy.typing import NDArray

from kvlink.errors import OutOfMemoryError
from kvlink.memory.pool import Segment

WORD_NBYTES = 8
ENDED = 0
"""What a word holds when nothing valid is behind it."""

_IS_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
_FENCES = (threading.Lock(), threading.Lock())


def order_memory() -> None:
    """Keep memory accesses before this call before those after it."""
    if _IS_ORDERED:
        return
    for fence in _FENCES:
        with fence:
            pass


class StateRegion:
    """The owner's side of the words.

    Args:
        segment: room for the words, owned from now on.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._words: NDArray[np.uint64] = segment.memory.view(np.uint64)
        self._generation = 0
        self._next = 0
        self._spare: list[int] = []

    @property
    def capacity(self) -> int:
        """How many words there are."""
        return len(self._words)

    def begin(self) -> tuple[int, int]:
        """Return ``(word, generation)`` for something that is valid from now on."""
        if self._spare:
            word = self._spare.pop()
        elif self._next < self.capacity:
            word = self._next
            self._next += 1
        else:
            raise OutOfMemoryError(
                f"all {self.capacity} state words are in use; raise ClusterConfig.max_caches",
                needed=WORD_NBYTES,
                free=0,
                largest_hole=0,
            )
        self._generation += 1
        self._words[word] = self._generation
        return word, self._generation

    def end(self, word: int) -> None:
        """Make whatever is behind `word` invalid, visibly to all, before anything that the caller does next.

        After `close` everything has ended already.
        """
        if not len(self._words):
            return
        self._words[word] = ENDED
        order_memory()
        self._spare.append(word)

    def end_all(self) -> None:
        """End everything: the cluster is closing."""
        self._words[:] = ENDED
        order_memory()

    def close(self) -> None:
        """Give the region up. Idempotent."""
        self._words = np.empty(0, np.uint64)
        self.segment.close()
