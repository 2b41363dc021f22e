"""The command line. Runs with nothing installed but the core: ``kvlink info`` says what this host can do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import anyio
import msgspec
import numpy as np

from kvlink.doctor.host import Host, num_cores
from kvlink.errors import KVLinkError
from kvlink.memory.pool import Segment
from kvlink.wire import PROTOCOL_VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 1 where the host lacks something that kvlink needs."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:  # it has arguments of its own, and is loaded only when it is asked for
        from kvlink.benchmarks.command import main as bench

        return bench(given[1:])
    if given[:1] == ["doctor"]:
        from kvlink.doctor.command import main as doctor

        return doctor(given[1:])
    parser = argparse.ArgumentParser(prog="kvlink", description="KV-cache transfer between serving processes")
    parser.add_argument("--version", action="version", version=f"kvlink {version('kvlink')}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="say what this host can do")
    info.add_argument("--json", action="store_true", help="as JSON")
    commands.add_parser("bench", help="measure how fast blocks move on this host")
    commands.add_parser("doctor", help="try what this host can do, and say what to do about what it cannot")
    arguments = parser.parse_args(given)
    facts = _facts()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    return 0 if facts["shared memory"] == "ok" else 1


def _facts() -> dict[str, str]:
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    return {
        "kvlink": f"{version('kvlink')} (protocol {PROTOCOL_VERSION})",
        "python": f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}",
        "numpy, anyio, msgspec": f"{np.__version__}, {_version_of(anyio)}, {_version_of(msgspec)}",
        "cores": str(num_cores()),
        "shared memory": _try_segment(),
        "process death seen at once": "yes" if hasattr(os, "pidfd_open") else "no: needs Linux 5.3",
        "yama ptrace_scope": (Host().read(str(yama)) if yama.exists() else "absent: registered memory is reachable")
        or "cannot be read",
    }


def _version_of(module: object) -> str:
    return version(str(getattr(module, "__name__", "")))


def _try_segment() -> str:
    try:
        Segment.create("kvlink-info", 4096).close()
    except (OSError, AttributeError, KVLinkError) as exc:
        return f"not available: {exc}"
    return "ok"


if __name__ == "__main__":
    sys.exit(main())
