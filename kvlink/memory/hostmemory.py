"""How much memory this host, and this process's control group, can still give.

Reserving pages of a memfd does not fail when memory runs out: it goes on until the kernel kills somebody. So the amount
is looked up first, and a reservation that cannot fit is refused.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def available_nbytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that can be reserved without pushing anything out; None where the kernel does not say."""
    amounts = [*_of_host(proc / "meminfo"), *_of_groups(proc / "self" / "cgroup", groups)]
    return min(amounts, default=None)


def _of_host(meminfo: Path) -> list[int]:
    with suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return [int(rest.split()[0]) * 1024]
    return []


def _of_groups(membership: Path, groups: Path) -> list[int]:
    """What is left of ``memory.max`` in the process's control group (version 2) and in each one above it."""
    amounts = []
    with suppress(OSError):
        path = next((line[len("0::") :] for line in membership.read_text().splitlines() if line.startswith("0::")), "/")
        folder = groups / path.lstrip("/")
        while folder == groups or groups in folder.parents:
            with suppress(OSError, ValueError):
                limit = int((folder / "memory.max").read_text())  # "max", no limit, is a ValueError
                used = int((folder / "memory.current").read_text())
                amounts.append(max(0, limit - used + _reclaimable(folder / "memory.stat")))
            folder = folder.parent
    return amounts


def _reclaimable(stat: Path) -> int:
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
