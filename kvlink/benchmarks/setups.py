"""SETUP and IDLE: what it costs to make a pair, and to leave it alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import anyio

from kvlink.benchmarks.measuring import Line
from kvlink.benchmarks.pair import Pair, open_pair
from kvlink.benchmarks.progress import Progress
from kvlink.benchmarks.scenarios import SETUP, Size, requests_of
from kvlink.benchmarks.sides import Order

_IDLE_S: Final = 2.0


async def measure_setup(order: Order, size: Size, *, setups: int, idle_s: float = _IDLE_S, progress: Progress) -> Line:
    """Make `setups` pairs, one after another, and return one line of medians; the last pair is left alone for a while.

    ``create_s`` is a cluster without its memory; ``pool_s`` a cluster with a pool, whose pages are reserved and entered
    into the page table then; ``register_s`` the cache; ``first_op_s`` one block of one tensor, look-up included.
    """
    made: list[dict[str, float]] = []
    idle: dict[str, float] = {}
    for number in range(1, setups + 1):
        progress.show(SETUP, f"pair {number} of {setups}")
        async with open_pair(replace(order, is_setup=True), size.setup) as pair:
            first_op_s = await _first(pair, size)
            made.append({**pair.setup, "initiator_first_op_s": first_op_s, "import_s": _time_import()})
            if number == setups:
                idle = await _idle(pair, idle_s)
    medians = {name: round(median(each[name] for each in made), 5) for name in made[0]}
    return {
        "scenario": SETUP,
        "repeats": setups,
        "registered_bytes": size.pool_nbytes,
        "regions": size.setup.num_tensors,
        **medians,
        "idle_cpu": idle,
    }


async def _first(pair: Pair, size: Size) -> float:
    """Pull one block of the first tensor; return the seconds it took."""
    (request, *_) = requests_of(size.setup, 999)
    pull = pair.side.cluster.kv_cache_manager.pull_blocks
    one = range(1)
    started = time.perf_counter()
    await pull(
        pair.key,
        pair.side.cache,
        request.source,
        request.target,
        src_layer_range=one,
        dst_layer_range=one,
        tensor_num_per_layer=1,
    )
    return time.perf_counter() - started


async def _idle(pair: Pair, seconds: float) -> dict[str, float]:
    """Return the percent of a core that each side uses while nothing is asked of it."""
    target, initiator = pair.target_cpu_s(), time.process_time()
    await anyio.sleep(seconds)
    target, initiator = pair.target_cpu_s() - target, time.process_time() - initiator
    return {
        "initiator_pct": round(100 * initiator / seconds, 2),
        "target_pct": round(100 * target / seconds, 2),
    }


def _time_import() -> float:
    """Return the seconds that ``import kvlink`` takes in a fresh process."""
    probe = "import time; t = time.perf_counter(); import kvlink; print(time.perf_counter() - t)"
    command: Sequence[str] = [sys.executable, "-c", probe]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
