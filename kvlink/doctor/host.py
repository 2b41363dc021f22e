"""What the kernel says of this host and of the limits of this process. Reads files, does nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvlink.doctor.findings import Finding, State, failed_check
from kvlink.memory.hostmemory import available_nbytes

LINK_DESCRIPTORS: Final = 10
"""What a link on one host takes at most: connection, side channel, the peer's process, its regions."""
_OWN_DESCRIPTORS: Final = 64
_MANY_LINKS: Final = 512
_LOW_MEMORY_NBYTES: Final = 2**30
_UNLIMITED: Final = -1


class Host:
    """The files in which a kernel describes itself, below `root`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self, path: str) -> str | None:
        """Return a file's text without the white space around it; None where it cannot be read."""
        with suppress(OSError, ValueError):
            return (self.root / path).read_text().strip()
        return None

    def names(self, path: str) -> list[str]:
        """Return what is in a folder, sorted; nothing where it cannot be read."""
        with suppress(OSError):
            return sorted(entry.name for entry in (self.root / path).iterdir())
        return []

    def limit(self, name: str) -> int | None:
        """Return a soft limit of this process as ``/proc/self/limits`` names it; -1 for none, None if unknown."""
        for line in (self.read("proc/self/limits") or "").splitlines():
            found = re.match(re.escape(name) + r"\s+(unlimited|\d{1,20})\s", line)
            if found:
                return _UNLIMITED if found[1] == "unlimited" else int(found[1])
        return None

    def meminfo(self, name: str) -> int | None:
        """Return a line of ``/proc/meminfo``: bytes, or a plain number where the line has no unit."""
        for line in (self.read("proc/meminfo") or "").splitlines():
            head, _, rest = line.partition(":")
            words = rest.split()
            if head == name and words and words[0].isdecimal():
                return int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        return None


def examine_host(host: Host) -> Iterator[Finding]:
    """Yield what can be read of limits, memory, cores and event loops."""
    for examine in EXAMINATIONS:
        try:
            yield examine(host)
        except Exception as exc:  # a kernel that describes itself in a way that nobody thought of
            yield failed_check(examine.__name__.replace("_", "-"), "host", exc, state=State.WARN)


def open_files(host: Host) -> Finding:
    """Look at the limit on descriptors: each link takes some."""
    soft = host.limit("Max open files")
    facts = {"soft_limit": soft, "per_link": LINK_DESCRIPTORS}
    if soft is None:
        return Finding(name="open-files", group="host", state=State.OK, found="the kernel states no limit", facts=facts)
    room = _MANY_LINKS if soft == _UNLIMITED else max(0, (soft - _OWN_DESCRIPTORS) // LINK_DESCRIPTORS)
    few = room < _MANY_LINKS
    return Finding(
        name="open-files",
        group="host",
        state=State.WARN if few else State.OK,
        found="no limit" if soft == _UNLIMITED else f"{soft} descriptors, room for about {room} links on this host",
        advice="for more links raise it: `ulimit -n 16384`, or LimitNOFILE= of the service" if few else "",
        facts=facts | {"links": room},
    )


def locked_memory(host: Host) -> Finding:
    """Look at the limit on locked memory: a network card pins what it reads and writes, shared memory does not."""
    soft = host.limit("Max locked memory")
    has_cards = bool(host.names("sys/class/infiniband"))
    is_short = has_cards and soft not in (None, _UNLIMITED)
    found = "no limit" if soft in (None, _UNLIMITED) else f"{show_nbytes(soft or 0)}"
    return Finding(
        name="locked-memory",
        group="host",
        state=State.WARN if is_short else State.OK,
        found=found if has_cards else f"{found}; only RDMA needs it, and there is no RDMA device",
        advice="pools larger than that cannot be registered with the network card: `ulimit -l unlimited`, "
        "LimitMEMLOCK=infinity of the service, or `--ulimit memlock=-1` of the container"
        if is_short
        else "",
        facts={"soft_limit": soft},
    )


def memory(host: Host) -> Finding:
    """Look at how large a pool may be now: what the host has, and what the control group leaves."""
    free = available_nbytes(host.root / "proc", host.root / "sys/fs/cgroup")
    total = host.meminfo("MemTotal")
    facts = {"available_nbytes": free, "total_nbytes": total}
    if free is None:
        return Finding(
            name="memory", group="host", state=State.WARN, found="the kernel does not say", facts=facts,
            advice="a pool that is too large is then noticed when the kernel kills a process",
        )  # fmt: skip
    bound = host.meminfo("MemAvailable")
    by_group = bound is not None and free < bound
    is_low = free < _LOW_MEMORY_NBYTES
    return Finding(
        name="memory",
        group="host",
        state=State.WARN if is_low else State.OK,
        found=f"pools of {show_nbytes(free)} can be had now"
        + (f" of {show_nbytes(total)}" if total else "")
        + (", bounded by the control group" if by_group else ""),
        advice=("raise the control group's memory limit" if by_group else "free memory") if is_low else "",
        facts=facts | {"is_bounded_by_group": by_group},
    )


def huge_pages(host: Host) -> Finding:
    """Look at the 2 MiB pages that were set aside, for ``ClusterConfig(has_huge_pages=True)``."""
    total, free = host.meminfo("HugePages_Total") or 0, host.meminfo("HugePages_Free") or 0
    size = host.meminfo("Hugepagesize") or 0
    facts = {"total": total, "free": free, "page_nbytes": size}
    if not total:
        return Finding(
            name="huge-pages", group="host", state=State.MISSING, found="none set aside", facts=facts,
            advice="for ClusterConfig(has_huge_pages=True) only: `sysctl vm.nr_hugepages=N`, 2 MiB each",
        )  # fmt: skip
    return Finding(
        name="huge-pages",
        group="host",
        state=State.OK if free else State.WARN,
        found=f"{free} of {total} free, {show_nbytes(size)} each",
        advice="" if free else "all are in use: `sysctl vm.nr_hugepages=N` with a larger N",
        facts=facts,
    )


def transparent_huge_pages(host: Host) -> Finding:
    """Look at what the kernel does unasked for pools, which are shared memory."""
    text = host.read("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    mode = chosen[1] if chosen else None
    says = {
        None: "the kernel has none",
        "always": "for every pool",
        "force": "for every pool",
        "within_size": "for every pool, but for its last part",
        "advise": "not for pools: only where a program asks",
        "never": "not for pools",
        "deny": "not for pools",
    }
    return Finding(
        name="transparent-huge-pages",
        group="host",
        state=State.OK,
        found=says.get(mode, f"mode {mode}"),
        facts={"shmem_enabled": mode},
    )


def numa(host: Host) -> Finding:
    """Count the NUMA nodes, for ``ClusterConfig(numa_node=...)``."""
    nodes = [int(name[4:]) for name in host.names("sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    several = len(nodes) > 1
    return Finding(
        name="numa",
        group="host",
        state=State.OK,
        found=f"nodes {', '.join(map(str, sorted(nodes)))}" if several else "one node",
        advice="ClusterConfig(numa_node=N) takes pools from the node of the card or of the cores" if several else "",
        facts={"nodes": sorted(nodes)},
    )


def cores(host: Host) -> Finding:
    """Count the cores that this process may use: copies want one beside the event loop's."""
    count = num_cores()
    return Finding(
        name="cores",
        group="host",
        state=State.OK if count > 1 else State.WARN,
        found=f"{count} for this process",
        advice="" if count > 1 else "copies and the event loop share one: large transfers delay the loop",
        facts={"count": count},
    )


def num_cores() -> int:
    """Return how many cores this process may use, of all where the system does not say."""
    try:
        return len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return os.cpu_count() or 1


def event_loops(host: Host) -> Finding:
    """See which event loops are installed; asyncio always is."""
    found = {"asyncio": ""}
    for name in ("uvloop", "trio"):
        with suppress(ImportError, ValueError, PackageNotFoundError):
            if find_spec(name) is not None:
                found[name] = version(name)
    return Finding(
        name="event-loops",
        group="host",
        state=State.OK,
        found=", ".join(f"{name} {number}".strip() for name, number in found.items()),
        facts={"installed": found},
    )


EXAMINATIONS: Final[tuple[Callable[[Host], Finding], ...]] = (
    memory,
    cores,
    open_files,
    locked_memory,
    huge_pages,
    transparent_huge_pages,
    numa,
    event_loops,
)


def show_nbytes(nbytes: int) -> str:
    """Return a number of bytes as people write it: ``23.4 GiB``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f}".removesuffix(".0") + f" {unit}"
        amount /= 1024
    return f"{amount:.1f}".removesuffix(".0") + " TiB"
