"""SETUP and IDLE: what it costs to make a pair, and to leave it alone."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import anyio

from kvlink.benchmarks.measuring import Line
from kvlink.benchmarks.pair import Pair
from kvlink.benchmarks.scenarios import SETUP, Size, requests_of


class Setups:
    """The set-ups that have been measured so far.

    ``create_s`` is a cluster without its memory; ``pool_s`` a cluster with a pool, whose pages are reserved and entered
    into the page table then; ``register_s`` the cache; ``first_op_s`` one block of one tensor, look-up included.

    Args:
        size: whose `Size.setup` the pairs were made for.
    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self._made: list[dict[str, float]] = []

    async def use(self, pair: Pair) -> None:
        """Use a new pair for the first time, and keep what its making and its first operation took."""
        (request, *_) = requests_of(self._size.setup, 999)
        pull = pair.side.cluster.kv_cache_manager.pull_blocks
        key, cache, one = pair.key, pair.side.cache, range(1)
        started = time.perf_counter()
        await pull(
            key,
            cache,
            request.source,
            request.target,
            src_layer_range=one,
            dst_layer_range=one,
            tensor_num_per_layer=1,
        )
        first_op_s = time.perf_counter() - started
        self._made.append({**pair.setup, "initiator_first_op_s": first_op_s, "import_s": _time_import()})

    async def line(self, pair: Pair, *, idle_s: float) -> Line:
        """Return the medians as one line, with what `pair` costs while it is left alone for `idle_s`."""
        medians = {name: round(median(each[name] for each in self._made), 5) for name in self._made[0]}
        return {
            "scenario": SETUP,
            "repeats": len(self._made),
            "registered_bytes": self._size.pool_nbytes,
            "regions": self._size.setup.num_tensors,
            **medians,
            "idle_cpu": await _idle(pair, idle_s),
        }


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
    return float(
        subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True, timeout=60).stdout
    )
