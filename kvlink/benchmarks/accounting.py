"""CPU time, what else runs on the machine, and what machine it is."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import numpy as np

GIB: Final = float(1 << 30)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used so far.

    From ``schedstat`` where the kernel keeps it, in nanoseconds; else from ``stat``, in hundredths of a second. Nothing
    is asked of the process, so a target that does nothing shows nothing.
    """
    total = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                total += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError):
        total = 0
    if total:
        return total / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class MachineTime(NamedTuple):
    """Seconds of all cores together since the machine started."""

    busy_s: float
    steal_s: float
    total_s: float


def machine_time() -> MachineTime:
    """Return how much of the machine has been used so far."""
    with open("/proc/stat", encoding="ascii") as lines:
        ticks = [int(field) for field in lines.readline().split()[1:9]]
    idle, steal, total = ticks[3] + ticks[4], ticks[7], sum(ticks)
    return MachineTime((total - idle - steal) / _TICKS_PER_S, steal / _TICKS_PER_S, total / _TICKS_PER_S)


class Noise(NamedTuple):
    """What others used of the machine during a measurement, in percent of all cores."""

    foreign_percent: float
    steal_percent: float


class NoiseMeter:
    """Measures from its making to `read`.

    Args:
        own_cpu_s: CPU seconds of the benchmark's own processes so far.
    """

    def __init__(self, own_cpu_s: Callable[[], float]) -> None:
        self._own_cpu_s = own_cpu_s
        self._own = own_cpu_s()
        self._machine = machine_time()

    def read(self) -> Noise:
        """Return the noise since then; ``/proc/stat`` counts hundredths of a second, so very short spans are rough."""
        before, now = self._machine, machine_time()
        total = max(1e-9, now.total_s - before.total_s)
        foreign = max(0.0, now.busy_s - before.busy_s - (self._own_cpu_s() - self._own))
        return Noise(min(100.0, 100 * foreign / total), 100 * (now.steal_s - before.steal_s) / total)


class QuietGate:
    """Waits for moments in which little else runs, within one budget for the whole benchmark.

    Args:
        budget_s: seconds to wait in all.
        limit_percent: foreign use of the machine that counts as quiet.
    """

    def __init__(self, budget_s: float, limit_percent: float) -> None:
        self._left_s = budget_s
        self._limit_percent = limit_percent

    async def wait(self, own_cpu_s: Callable[[], float]) -> float:
        """Wait, 6 s at most at a time; return the seconds waited."""
        started = time.perf_counter()
        while True:
            spent = time.perf_counter() - started
            if spent >= min(6.0, self._left_s):
                break
            meter = NoiseMeter(own_cpu_s)
            await anyio.sleep(0.25)
            if meter.read().foreign_percent <= self._limit_percent:
                break
        spent = time.perf_counter() - started
        self._left_s = max(0.0, self._left_s - spent)
        return spent


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at this place of the sorted values, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(percent / 100 * (len(ranked) - 1)))]


def machine() -> dict[str, Any]:
    """Return what this runs on."""
    model = ""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of kvlink and of what it stands on."""
    found = {"numpy": np.__version__}
    for name in ("kvlink", "anyio", "msgspec", "uvloop"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
