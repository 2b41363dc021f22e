"""What is moved: scenarios, their geometry, and the block numbers of every request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEED: Final = 20260101
READ: Final = "READ"
WRITE: Final = "WRITE"
SETUP: Final = "SETUP"
IDLE: Final = "IDLE"
"""SETUP and IDLE are one measurement and one line: a pair is made, used once, and then left alone."""

BlockIds = NDArray[np.int64]

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_GIB: Final = 1024 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One way of moving blocks.

    Args:
        name: as in the table.
        block_nbytes: of one block in one tensor.
        num_blocks: blocks of one request, the same in each tensor.
        num_tensors: tensors of the cache; a request moves all of them.
        tensor_nbytes: of one tensor.
        num_requests: in one repeat.
        num_in_flight: requests at the same time.
        has_ticker: whether the gaps of the event loop are measured as well.
    """

    name: str
    block_nbytes: int
    num_blocks: int = 1
    num_tensors: int
    tensor_nbytes: int
    num_requests: int = 1
    num_in_flight: int = 1
    has_ticker: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one request."""
        return self.block_nbytes * self.num_blocks * self.num_tensors

    @property
    def blocks_per_tensor(self) -> int:
        """Blocks of the cache."""
        return self.tensor_nbytes // self.block_nbytes


class Request(NamedTuple):
    """Block ``source[i]`` of one side goes to block ``target[i]`` of the other, in every tensor."""

    source: BlockIds
    target: BlockIds


def requests_of(scenario: Scenario, repeat: int, *, is_floor: bool = False) -> list[Request]:
    """Return the requests of a repeat; no target block occurs twice, also not between kvlink's and the floor's.

    Args:
        is_floor: of the other half of the permutations, so that neither finds the other's blocks in the processor's
            caches.
    """
    if scenario.blocks_per_tensor == 2:  # two slots: one for kvlink, one for the floor
        first = int(is_floor)
        return [Request(np.array([1 - first]), np.array([first]))]
    random = np.random.default_rng([SEED, repeat, scenario.block_nbytes, scenario.num_blocks])
    target = random.permutation(scenario.blocks_per_tensor)
    source = random.permutation(scenario.blocks_per_tensor)
    half = scenario.blocks_per_tensor // 2
    num_blocks = scenario.num_blocks
    assert scenario.num_requests * num_blocks <= half, scenario
    starts = range(half * is_floor, half * is_floor + scenario.num_requests * num_blocks, num_blocks)
    return [Request(source[start : start + num_blocks], target[start : start + num_blocks]) for start in starts]


@dataclass(frozen=True, slots=True)
class Size:
    """A set of scenarios over one pool.

    Args:
        name: ``"full"``, or ``"tiny"`` for tests, whose times say nothing.
        pool_nbytes: what each side owns.
        setup: the cache of SETUP, and its first operation: one block of its first tensor.
        scenarios: by name, in the order of the table.
    """

    name: str
    pool_nbytes: int
    setup: Scenario
    scenarios: Mapping[str, Scenario]


def _size(name: str, num_tensors: int, tensor_nbytes: int, scenarios: list[dict[str, Any]]) -> Size:
    shape: dict[str, Any] = {"num_tensors": num_tensors, "tensor_nbytes": tensor_nbytes}
    made = [Scenario(**{**shape, **fields}) for fields in scenarios]
    return Size(
        name,
        num_tensors * tensor_nbytes,
        Scenario(name=SETUP, block_nbytes=4 * _KIB, **shape),
        {scenario.name: scenario for scenario in made},
    )


FULL: Final = _size(
    "full",
    64,  # 32 layers, K and V
    32 * _MIB,
    [
        {"name": "S1_4K", "block_nbytes": 4 * _KIB, "num_tensors": 1, "num_requests": 1000},
        {"name": "S1_64K", "block_nbytes": 64 * _KIB, "num_tensors": 1, "num_requests": 250},
        {"name": "S2_64M", "block_nbytes": 16 * _KIB, "num_blocks": 64, "num_requests": 8},
        {"name": "S3_1G", "block_nbytes": 64 * _KIB, "num_blocks": 256, "has_ticker": True},
        {"name": "S4_1Gcontig", "block_nbytes": _GIB, "num_tensors": 1, "tensor_nbytes": 2 * _GIB},
        {
            "name": "S5_32x8M",
            "block_nbytes": 16 * _KIB,
            "num_blocks": 8,
            "num_requests": 96,
            "num_in_flight": 32,
        },
    ],
)

TINY: Final = _size(
    "tiny",
    4,
    _MIB,
    [
        {"name": "S1_4K", "block_nbytes": 4 * _KIB, "num_tensors": 1, "num_requests": 8},
        {"name": "S1_64K", "block_nbytes": 64 * _KIB, "num_tensors": 1, "num_requests": 4},
        # more than is copied on the event loop, so that the threads have their turn
        {"name": "S2_64M", "block_nbytes": 16 * _KIB, "num_blocks": 8, "num_requests": 4},
        {"name": "S3_1G", "block_nbytes": 64 * _KIB, "num_blocks": 8, "has_ticker": True},
        {"name": "S4_1Gcontig", "block_nbytes": 2 * _MIB, "num_tensors": 1, "tensor_nbytes": 4 * _MIB},
        {"name": "S5_32x8M", "block_nbytes": 16 * _KIB, "num_blocks": 1, "num_requests": 32, "num_in_flight": 4},
    ],
)

SIZES: Final = {size.name: size for size in (FULL, TINY)}
