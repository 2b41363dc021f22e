"""What this process holds, and what of it is new."""

from __future__ import annotations

import functools
import gc
import multiprocessing.resource_tracker
import os
import threading
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

_KEPT_THREADS = ("Trio thread", "asyncio_")
"""Trio keeps idle worker threads for 10 s; so may an executor whose loop has been closed."""


def holdings() -> frozenset[str]:
    """Name every open descriptor, thread, child and mapping of kvlink's memory of this process."""
    _make_what_lasts()
    return frozenset(_descriptors() | _threads() | _children() | _mappings())


def new_since(before: Set[str], *, within_s: float) -> list[str]:
    """Return what is held now and was not then; wait up to `within_s` for that to become nothing."""
    deadline = time.monotonic() + within_s
    while True:
        gc.collect()
        new = sorted(holdings() - before)
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.01)


@functools.cache
def _make_what_lasts() -> None:
    """Let libuv open the one pipe that it keeps for the life of the process."""
    with suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            target = os.readlink(f"/proc/self/fd/{fd}")
            if int(fd) != _tracker_fd() and not target.startswith("/proc/"):
                found.add(f"descriptor {fd} ({target})")
    return found


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.name.startswith(_KEPT_THREADS)
    }


def _children() -> set[str]:
    found = set()
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in children.read_text().split():
                if int(pid) != _tracker_pid():
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.add(f"child {pid} ({command.strip() or 'ended, not collected'})")
    return found


def _mappings() -> set[str]:
    with open("/proc/self/maps") as lines:
        return {f"mapping {line.split(maxsplit=5)[0]} of kvlink's memory" for line in lines if "/memfd:kvlink" in line}


# The standard library starts its tracker once, for good, when a program first uses multiprocessing.
def _tracker_fd() -> int | None:
    return getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)


def _tracker_pid() -> int | None:
    return getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
