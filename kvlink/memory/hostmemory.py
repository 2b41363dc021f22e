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
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return [int(rest.split()[0]) * 1024]
    return []


def _of_groups(membership: Path, groups: Path) -> list[int]:
    """What is left in the process's control group and in each one above it, in either version of control groups.

    In a container the path that the process is told may not exist below its own ``/sys/fs/cgroup``; the walk up then
    begins where it does.
    """
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = membership.read_text().splitlines()
    amounts = []
    for line in lines or ["0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root, names = groups, ("memory.max", "memory.current", "inactive_file ")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder == root or root in folder.parents:
            with suppress(OSError, ValueError):
                limit = int((folder / names[0]).read_text())  # "max", no limit, is a ValueError
                used = int((folder / names[1]).read_text())
                amounts.append(max(0, limit - used + _reclaimable(folder / "memory.stat", names[2])))
            folder = folder.parent
    return amounts


def _reclaimable(stat: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
