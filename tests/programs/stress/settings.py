"""What is the same for all processes of one run, and what workers tell the supervisor."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

import kvlink as kv
from kvlink.testing import Faults

NUM_TENSORS: Final = 4
NUM_OFFERS: Final = 3
"""Blocks caches of each worker that the others pull; their models are 0, 1, 2."""
OFFER: Final = kv.CacheDesc(NUM_TENSORS, (32, 8192), "uint8")
INBOX_MODEL: Final = 9
NUM_REQUESTS: Final = 4
"""Request keys of each worker: 1, 2, 3, 4."""
SLOTS: Final = kv.CacheDesc(NUM_TENSORS, (1, 256 * 1024), "uint8")
NUM_TASKS: Final = 3
"""Tasks of a worker that move bytes at the same time; each has caches of its own, and its part of every inbox."""
WIDTH: Final = 8
"""Blocks of an inbox that belong to one task of one worker."""
HANG_S: Final = 20.0
"""A call that has outlived its deadline by this, or a process silent for so long, hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run.

    Args:
        seed: of everything that is random.
        num_workers: processes.
        faults: what is wrong with the transports; None for nothing.
        transports: the transports to use, in order; empty for the library's choice.
    """

    seed: int
    num_workers: int = 3
    faults: Faults | None = None
    transports: tuple[str, ...] = ()

    @property
    def inbox(self) -> kv.CacheDesc:
        """Of the cache that the others push into."""
        return kv.CacheDesc(NUM_TENSORS, (self.num_workers * NUM_TASKS * WIDTH, 4096), "uint8")


def part_of(worker: int, task: int) -> range:
    """Return the blocks of every inbox that a task of a worker may write."""
    start = ((worker - 1) * NUM_TASKS + task) * WIDTH
    return range(start, start + WIDTH)


@dataclass(slots=True)
class Journal:
    """What a worker has done: counted, and the last of it in words.

    Attributes:
        counts: by ``"operation outcome"``, and bytes checked.
        wrong: what must not be, in words.
        slowest_cancel_s: the longest time from a cancellation to the end of what was cancelled.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_cancel_s: float = 0.0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def note(self, operation: str, outcome: str, detail: str = "") -> None:
        """Count an operation that has ended, and remember it."""
        self.counts[f"{operation} {outcome}"] += 1
        self.last.append(f"{time.monotonic():.4f} {operation} {outcome} {detail}")

    def accuse(self, text: str) -> None:
        """Say that something is wrong."""
        self.wrong.append(text)
        self.last.append(f"{time.monotonic():.4f} WRONG {text}")

    def line(self, **more: Any) -> bytes:
        """Return all of it as the line that a worker sends."""
        told: dict[str, Any] = {"counts": self.counts, "wrong": self.wrong, "slowest_cancel_s": self.slowest_cancel_s}
        if self.wrong or more.get("is_done"):
            told["last"] = list(self.last)
        return json.dumps({**told, **more}).encode() + b"\n"
