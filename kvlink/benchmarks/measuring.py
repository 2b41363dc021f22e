"""The numbers of one scenario: repeats of kvlink and of the floor, side by side, and what is made of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, TypeAlias

import anyio
import numpy as np

from kvlink.benchmarks.accounting import GIB, Noise, NoiseMeter, QuietGate, percentile
from kvlink.benchmarks.pair import Pair
from kvlink.benchmarks.progress import Progress
from kvlink.benchmarks.scenarios import READ, Request, Scenario, requests_of

Line: TypeAlias = dict[str, Any]
"""One line of output; the names of the fields are those of the peers' scripts, so that all join into one table."""

NOISY_PERCENT: Final = 15.0
"""Repeats with more foreign CPU use are made up for, and lines with more should be measured again."""

_READ_SEED: Final = 0xA5A5_0000_1111_2222
_WRITE_SEED: Final = 0x0B0B_3333_4444_5555
_TICK_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch of requests: seconds of each, of all, and of CPU on both sides."""

    each_s: list[float]
    span_s: float
    initiator_cpu_s: float
    target_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Repeat:
    """What one repeat has measured."""

    scenario: Scenario
    kvlink: Timing
    floor: Timing
    noise: Noise
    gaps_s: list[float] = field(default_factory=list)

    @property
    def x_floor(self) -> float:
        """Time over the floor's: of one request, or of all where several are in flight."""
        if self.scenario.num_in_flight > 1:
            return self.kvlink.span_s / self.floor.span_s
        return median(self.kvlink.each_s) / median(self.floor.each_s)

    def per_gib(self, amount: float) -> float:
        """Return an amount of one batch for each GiB that was moved."""
        return amount * GIB / (self.scenario.nbytes * self.scenario.num_requests)


async def measure(
    pair: Pair, scenario: Scenario, op: str, *, repeats: int, spares: int, gate: QuietGate, progress: Progress
) -> Line:
    """Measure a scenario on an open pair and return its line, without what is common to all lines.

    The first repeat warms up and is dropped. Noisy ones are made up for by at most `spares` further ones, and the
    quietest `repeats` are kept.
    """
    await pair.allocate(scenario)
    seed = _READ_SEED if op == READ else _WRITE_SEED
    await pair.fill_source(op, seed)
    made: list[Repeat] = []
    num_wrong, waited_s = 0, 0.0
    for number in range(1 + repeats + spares):
        if number > repeats and sum(each.noise.foreign_percent < NOISY_PERCENT for each in made) >= repeats:
            break
        progress.show(f"{op} {scenario.name}", _detail(number, repeats))
        requests = requests_of(scenario, number)
        moved = Request(*(np.concatenate(side) for side in zip(*requests, strict=True)))
        await pair.clear(op, moved.target)
        waited_s += await gate.wait(pair.own_cpu_s)
        repeat = await _repeat(pair, scenario, op, number, requests)
        num_wrong += await pair.count_wrong(op, moved, seed)
        if number:
            made.append(repeat)
    kept = sorted(made, key=lambda each: each.noise.foreign_percent)[:repeats]
    return {
        "scenario": scenario.name,
        "op": op,
        **_shape(scenario, repeats, len(made)),
        **_numbers(kept),
        **_gaps(kept),
        "verified": num_wrong == 0,
        "bad_blocks": num_wrong,
        "prep_s": 0.0,
        "noise_waited_s": round(waited_s, 1),
        "floor": pair.side.native.floor,
    }


def _detail(number: int, repeats: int) -> str:
    if number == 0:
        return "warming up"
    return f"repeat {number} of {repeats}" + (", for a noisy one" if number > repeats else "")


async def _repeat(pair: Pair, scenario: Scenario, op: str, number: int, requests: list[Request]) -> Repeat:
    floors = pair.floors(op, requests_of(scenario, number, is_floor=True))
    meter = NoiseMeter(pair.own_cpu_s)
    # The order alternates, so that a machine that becomes slower or faster meanwhile does so for both alike.
    if number % 2:
        floor = _time_floor(floors)
        kvlink = await _time_kvlink(pair, scenario, op, requests)
    else:
        kvlink = await _time_kvlink(pair, scenario, op, requests)
        floor = _time_floor(floors)
    noise = meter.read()
    # The ticker costs a few percent itself, so it runs beside requests of its own: the same once more.
    gaps_s = await _time_gaps(lambda: _time_kvlink(pair, scenario, op, requests)) if scenario.has_ticker else []
    return Repeat(scenario, kvlink, floor, noise, gaps_s)


def _time_floor(calls: Sequence[Callable[[], None]]) -> Timing:
    clock = time.perf_counter
    each: list[float] = []
    cpu = time.process_time()
    began = clock()
    for call in calls:
        started = clock()
        call()
        each.append(clock() - started)
    return Timing(each, clock() - began, time.process_time() - cpu)


async def _time_kvlink(pair: Pair, scenario: Scenario, op: str, requests: Sequence[Request]) -> Timing:
    clock = time.perf_counter
    each: list[float] = []
    move, key, cache = pair.mover(op), pair.key, pair.side.cache
    waiting = iter(requests)

    async def run() -> None:
        for request in waiting:
            started = clock()
            await move(key, cache, request.source, request.target)
            each.append(clock() - started)

    target_cpu, cpu = pair.target_cpu_s(), time.process_time()
    began = clock()
    if scenario.num_in_flight == 1:
        await run()
    else:
        async with anyio.create_task_group() as tasks:
            for _ in range(scenario.num_in_flight):
                tasks.start_soon(run)
    span = clock() - began
    cpu = time.process_time() - cpu
    return Timing(each, span, cpu, pair.target_cpu_s() - target_cpu)


async def _time_gaps(work: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the seconds between the turns of a task that sleeps for 1 ms at a time while `work` runs."""
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            started = time.perf_counter()
            await anyio.sleep(_TICK_S)
            gaps.append(time.perf_counter() - started)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await anyio.sleep(2 * _TICK_S)
        gaps.clear()
        await work()
        tasks.cancel_scope.cancel()
    return gaps


def _shape(scenario: Scenario, repeats: int, num_made: int) -> Line:
    return {
        "bytes_per_op": scenario.nbytes,
        "descriptors_per_op": scenario.num_blocks * scenario.num_tensors,
        "block_bytes": scenario.block_nbytes,
        "in_flight": scenario.num_in_flight,
        "repeats": repeats,
        "repeats_made": num_made,
        "ops_per_repeat": scenario.num_requests,
    }


def _numbers(kept: Sequence[Repeat]) -> Line:
    scenario = kept[0].scenario
    nbytes = scenario.nbytes * scenario.num_requests
    p50s = [median(each.kvlink.each_s) for each in kept]
    floor_p50s = [median(each.floor.each_s) for each in kept]
    gib_per_s = [nbytes / each.kvlink.span_s / GIB for each in kept]
    ratios = [each.x_floor for each in kept]
    initiator = median(each.per_gib(each.kvlink.initiator_cpu_s) for each in kept)
    target = median(each.per_gib(each.kvlink.target_cpu_s) for each in kept)
    foreign = [each.noise.foreign_percent for each in kept]
    return {
        "p50_us": round(median(p50s) * 1e6, 2),
        "p99_us": round(percentile([span for each in kept for span in each.kvlink.each_s], 99) * 1e6, 2),
        "p50_min_us": round(min(p50s) * 1e6, 2),
        "p50_max_us": round(max(p50s) * 1e6, 2),
        "GiBps": round(median(gib_per_s), 4),
        "GiBps_best": round(max(gib_per_s), 4),
        "floor_p50_us": round(median(floor_p50s) * 1e6, 3),
        "floor_GiBps": round(median(nbytes / each.floor.span_s / GIB for each in kept), 3),
        "x_floor": round(median(ratios), 3),
        "x_floor_min": round(min(ratios), 3),
        "x_floor_max": round(max(ratios), 3),
        "cpu_initiator_s_per_GiB": round(initiator, 4),
        "cpu_target_s_per_GiB": round(target, 4),
        "cpu_floor_s_per_GiB": round(median(each.per_gib(each.floor.initiator_cpu_s) for each in kept), 4),
        "cpu_initiator_us_per_op": round(initiator * scenario.nbytes / GIB * 1e6, 2),
        "cpu_target_us_per_op": round(target * scenario.nbytes / GIB * 1e6, 2),
        "noise_foreign_cpu_pct": round(median(foreign), 1),
        "noise_foreign_max_pct": round(max(foreign), 1),
        "noise_steal_pct": round(median(each.noise.steal_percent for each in kept), 2),
        "floor_spread": round(max(floor_p50s) / min(floor_p50s), 2),
    }


def _gaps(kept: Sequence[Repeat]) -> Line:
    gaps = [gap for each in kept for gap in each.gaps_s]
    if not gaps:
        return {}
    return {
        "loop_gap_p99_ms": round(percentile(gaps, 99) * 1e3, 3),
        "loop_gap_max_ms": round(max(gaps) * 1e3, 3),
        "loop_gap_ticks": len(gaps),
    }
