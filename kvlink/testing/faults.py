"""What may go wrong with an operation of a transport, how often, and in which order. Pure.

Every fault is one that a real network may commit without breaking the contract of `kvlink.transports.base`. The bytes
that are reported as moved are the right ones, so whatever else a program sees is its own doing, or kvlink's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from kvlink.errors import ParameterTypeError, ParameterValueError


class Fault(Enum):
    """What happens to one operation; its value is the field of `Faults` with the probability.

    ========= ==========================================================================================
    DELAY     it begins late, or its completion is reported late: up to `Faults.longest_delay_s`
    REORDER   its extents move in another order, and operations that began after it may end before it
    REPEAT    it is carried out twice before it is reported
    FAIL      some of its extents move, and it raises `TransportError`
    DROP      it happens or not, and its completion never comes: only a cancellation or an abort ends it
    ========= ==========================================================================================
    """

    DELAY = "delay"
    REORDER = "reorder"
    REPEAT = "repeat"
    FAIL = "fail"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often each fault strikes: probabilities per operation, of which at most one strikes.

    Args:
        seed: of the dice. The same operations in the same order on the same links meet the same faults.
        delay, reorder, repeat, fail, drop: from 0 to 1, together at most 1; see `Fault`.
        longest_delay_s: what is late is late by less than this.
        operations: which operations of an endpoint can be struck.
    """

    seed: int = 0
    delay: float = 0.0
    reorder: float = 0.0
    repeat: float = 0.0
    fail: float = 0.0
    drop: float = 0.0
    longest_delay_s: float = 0.002
    operations: frozenset[str] = frozenset({"get", "put", "load_word", "reach"})

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ParameterTypeError(f"seed must be an int, got {self.seed!r}")
        for name, value, limit in (
            *((fault.value, self.probability(fault), 1.0) for fault in Fault),
            ("longest_delay_s", self.longest_delay_s, 3600.0),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ParameterTypeError(f"{name} must be a number, got {value!r}")
            if not 0 <= value <= limit:
                raise ParameterValueError(f"{name} must be from 0 to {limit:g}, got {value!r}")
        total = sum(self.probability(fault) for fault in Fault)
        if total > 1 + 1e-9:
            raise ParameterValueError(f"the probabilities add up to {total:g}; one operation meets one fault at most")
        unknown = self.operations - OPERATIONS
        if unknown:
            raise ParameterValueError(f"operations are {sorted(OPERATIONS)}, got {sorted(unknown)}")

    def probability(self, fault: Fault) -> float:
        """Return how often `fault` strikes."""
        value: float = getattr(self, fault.value)
        return value


OPERATIONS: Final = frozenset({"get", "put", "load_word", "reach"})
"""The operations of an endpoint that can be struck."""


class Dice:
    """Decides what happens to the operations of one endpoint, one after the other.

    Args:
        faults: how often.
        name: tells endpoints of one transport apart, so that each meets faults of its own.
    """

    def __init__(self, faults: Faults, name: str) -> None:
        self._faults = faults
        self._random = Random(f"{faults.seed}/{name}")

    def draw(self, operation: str) -> Fault | None:
        """Return what happens to the next operation; None: nothing."""
        if operation not in self._faults.operations:
            return None
        left = self._random.random()
        for fault in Fault:
            left -= self._faults.probability(fault)
            if left < 0:
                return fault
        return None

    def late_s(self) -> float:
        """Return by how much something is late."""
        return self._random.random() * self._faults.longest_delay_s

    def is_heads(self) -> bool:
        """Toss a coin."""
        return self._random.random() < 0.5

    def some(self, total: int) -> int:
        """Return a number from 0 to `total`."""
        return self._random.randint(0, total)

    def batches(self, total: int) -> Iterator[list[int]]:
        """Yield the numbers below `total` in another order, a few at a time."""
        order = list(range(total))
        self._random.shuffle(order)
        while order:
            size = self._random.randint(1, max(1, total // 2))
            yield order[:size]
            del order[:size]
