"""How fast: scattered blocks of each size, pulled and pushed, with the loop's lateness beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvlink.proving.checks import OUR_WRITER, STEADY, Outcome, ProofError, Scene, beside
from kvlink.proving.layout import BLOCK_NBYTES, NUM_TENSORS
from kvlink.proving.pattern import fill

_LEAST: Final = 3
_MOST: Final = 200


async def measure(scene: Scene, name: str, *, for_s: float) -> Outcome:
    """Return a table: a line per size of block, medians over what fits into `for_s` each way."""
    lateness: list[float] = []
    rows = [await _measure_one(scene, number, lateness, for_s) for number in range(len(BLOCK_NBYTES))]
    if not lateness:
        raise ProofError("the event loop never turned")
    late_ms = sorted(lateness)[int(len(lateness) * 0.99)] * 1000
    best = max(max(row["pull_gb_per_s"], row["push_gb_per_s"]) for row in rows)
    return Outcome(name, "passed", f"up to {best:.2f} GB/s; the event loop was {late_ms:.1f} ms late (p99)", rows)


async def _measure_one(scene: Scene, number: int, lateness: list[float], for_s: float) -> dict[str, Any]:
    """Push all blocks in one random order, pull them in another one, check what came back; return the line."""
    block_nbytes = BLOCK_NBYTES[number]
    fill(scene.caches[number].tensors, OUR_WRITER)
    sent, landed = scene.scatter(number)
    theirs, ours = scene.scatter(number)

    async def push() -> int:
        return (await scene.push(STEADY, number, sent, landed)).nbytes

    async def pull() -> int:
        return (await scene.pull(STEADY, number, theirs, ours)).nbytes

    line: dict[str, Any] = {"block_nbytes": block_nbytes, "blocks": len(sent) * NUM_TENSORS}
    for what, move in (("push", push), ("pull", pull)):
        async with beside(lateness):
            nbytes, took_s = await _repeat(move, for_s)
        line[f"{what}_gb_per_s"] = round(nbytes / took_s / 1e9, 3)
        line[f"{what}_us_per_block"] = round(took_s / (nbytes / block_nbytes) * 1e6, 2)
    origin = dict(zip(landed, sent, strict=True))
    scene.expect(number, ours, [origin[block] for block in theirs], writer=OUR_WRITER)
    return line


async def _repeat(move: Callable[[], Awaitable[int]], for_s: float) -> tuple[int, float]:
    """Return the bytes of one movement and the median of its seconds."""
    nbytes = await move()
    taken: list[float] = []
    until = time.perf_counter() + for_s
    while len(taken) < _LEAST or (time.perf_counter() < until and len(taken) < _MOST):
        started = time.perf_counter()
        await move()
        taken.append(time.perf_counter() - started)
    return nbytes, statistics.median(taken)
