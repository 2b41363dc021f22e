"""``kvlink bench``: its arguments, and the run from the first scenario to the table."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

import anyio

from kvlink.benchmarks.accounting import QuietGate, machine, versions
from kvlink.benchmarks.chart import draw, machine_of
from kvlink.benchmarks.measuring import Line, measure
from kvlink.benchmarks.pair import open_pair
from kvlink.benchmarks.progress import Progress
from kvlink.benchmarks.rivals import find_rivals, run_rival
from kvlink.benchmarks.scale import measure_scale
from kvlink.benchmarks.scalechart import draw_scale, write_curves
from kvlink.benchmarks.scenarios import FULL, IDLE, READ, SEED, SETUP, SIZES, WRITE, Size
from kvlink.benchmarks.setups import Setups
from kvlink.benchmarks.sides import SHM, TRANSPORTS, Order
from kvlink.benchmarks.table import write_tables
from kvlink.errors import KVLinkError

_NAMES: Final = (SETUP, IDLE, *FULL.scenarios)
_FAULTS: Final = (KVLinkError, EOFError, OSError, TimeoutError, LookupError)
"""What ends the measurement of one transport and is a result too. A target that has died is an EOFError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, and return the exit status: 0, or 1 where something failed or a byte was wrong."""
    arguments = _parse(argv)
    progress = Progress(sys.stderr)
    lines: list[Line] = []
    with ExitStack() as files:
        record: TextIO | None = None
        if arguments.json == "-":
            record = sys.stdout
        elif arguments.json:
            record = files.enter_context(open(arguments.json, "w", encoding="utf-8"))

        def emit(line: Line) -> None:
            lines.append(line)
            if record is not None:
                record.write(json.dumps(line) + "\n")
                record.flush()

        is_uvloop = arguments.loop == "uvloop"
        if arguments.scale:
            anyio.run(_measure_scale, arguments, emit, progress, backend_options={"use_uvloop": is_uvloop})
            progress.clear()
            if arguments.json != "-":
                sys.stdout.write(f"{write_curves(lines)}{machine_of(lines)}\n")
            if arguments.plot is not None:
                for path in draw_scale(lines, arguments.plot):
                    progress.say(f"wrote {path}")
            return 0
        anyio.run(_measure_all, arguments, emit, progress, backend_options={"use_uvloop": is_uvloop})
        if arguments.peers is not None:
            _run_rivals(arguments, emit, progress)
    progress.clear()
    if arguments.json != "-":
        write_tables(lines)
    if arguments.plot is not None:
        for path in draw(lines, arguments.plot):
            progress.say(f"wrote {path}")
    is_sound = all("error" not in line and line.get("verified", True) for line in lines)
    return 0 if is_sound else 1


async def _measure_all(arguments: argparse.Namespace, emit: Callable[[Line], None], progress: Progress) -> None:
    size: Size = SIZES[arguments.size]
    gate = QuietGate(arguments.quiet_s, arguments.quiet_percent)
    common = {
        "mem": "shm",
        "size": size.name,
        "seed": SEED,
        "loop": arguments.loop,
        "machine": machine(),
        "versions": versions(),
    }
    for transport in arguments.transport:
        for num_threads in arguments.threads:
            order = Order(
                transport=transport,
                num_threads=num_threads,
                pool_nbytes=size.pool_nbytes,
                is_compiled=not arguments.no_compiler,
                has_uvloop=arguments.loop == "uvloop",
            )
            used = order.config.num_copy_threads
            head = {
                "peer": transport,
                "version": f"kvlink {common['versions'].get('kvlink', '?')}",
                "variant": f"{used} thread" + ("s" if used != 1 else ""),
                "transport": transport,
                "copy_threads": used,
            }

            def finish(line: Line, head: Line = head) -> None:
                emit({**head, **common, **line, "load1": round(os.getloadavg()[0], 2)})

            await _measure(order, size, arguments, gate, finish, progress)


async def _measure_scale(arguments: argparse.Namespace, emit: Callable[[Line], None], progress: Progress) -> None:
    common = {"machine": machine(), "versions": versions()}

    def finish(line: Line) -> None:
        emit({**line, **common, "load1": round(os.getloadavg()[0], 2)})

    await measure_scale(
        finish, progress, num_links=arguments.links, num_processes=arguments.processes, idle_s=arguments.idle_s
    )


async def _measure(
    order: Order,
    size: Size,
    arguments: argparse.Namespace,
    gate: QuietGate,
    finish: Callable[[Line], None],
    progress: Progress,
) -> None:
    """Measure one transport; a fault is a line too, and the end of it. The last pair of SETUP serves the scenarios."""
    has_setup = bool({SETUP, IDLE} & set(arguments.scen))
    num_pairs = arguments.setups if has_setup else 1
    setups = Setups(size)
    doing: Line = {"scenario": SETUP}
    try:
        for number in range(1, num_pairs + 1):
            progress.show(f"{order.transport}: making processes and memory", f"{number} of {num_pairs}")
            async with open_pair(replace(order, is_setup=has_setup), size.setup) as pair:
                if has_setup:
                    await setups.use(pair)
                if number < num_pairs:
                    continue
                if has_setup:
                    progress.show(IDLE)
                    finish(await setups.line(pair, idle_s=arguments.idle_s))
                for op in arguments.ops:
                    for scenario in size.scenarios.values():
                        if scenario.name in arguments.scen:
                            doing = {"scenario": scenario.name, "op": op}
                            line = await measure(
                                pair,
                                scenario,
                                op,
                                repeats=arguments.repeats,
                                spares=0 if arguments.quick else arguments.repeats,
                                gate=gate,
                                progress=progress,
                            )
                            finish(line)
    except _FAULTS as exc:
        finish({**doing, "error": f"{type(exc).__name__}: {exc}"})


def _run_rivals(arguments: argparse.Namespace, emit: Callable[[Line], None], progress: Progress) -> None:
    for rival in find_rivals(arguments.peers, arguments.venvs, progress):
        for line in run_rival(
            rival,
            arguments.scen,
            arguments.ops,
            repeats=arguments.repeats,
            setups=arguments.setups,
            quiet_s=arguments.quiet_s,
            progress=progress,
        ):
            emit(line)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvlink bench",
        description="Measure how fast blocks move between two processes of this host, beside a plain memcpy. "
        "Needs 4 GiB of memory, and a quiet machine for numbers that mean something.",
    )
    parser.add_argument("--quick", action="store_true", help="2 repeats, no waiting for quiet: under a minute")
    parser.add_argument("--scen", type=_one_of(_NAMES), default=_NAMES, help="scenarios: " + ",".join(_NAMES))
    parser.add_argument("--ops", type=_one_of((READ, WRITE)), default=(READ, WRITE), help="READ, WRITE or both")
    parser.add_argument("--repeats", type=_positive, help="repeats that count (7; quick: 2)")
    parser.add_argument("--setups", type=_positive, help="pairs made for SETUP (5; quick: 1)")
    parser.add_argument(
        "--transport", type=_one_of(TRANSPORTS), default=(SHM,), help="ways of moving: " + ",".join(TRANSPORTS)
    )
    parser.add_argument(
        "--threads", type=_counts, default=(0,), help="copy threads, 0 for one per core, at most 4; 1,2: both in turn"
    )
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="the event loop of both sides")
    parser.add_argument("--json", metavar="FILE", help="write lines of JSON, one per scenario; '-': instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the chart, as PNG and SVG (matplotlib)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="then run the other libraries' peer_*.py found there")
    parser.add_argument("--venvs", type=Path, metavar="DIR", help="their environments (or the variable VENVS)")
    parser.add_argument("--quiet-s", type=float, help="seconds to wait for quiet, in all (120; quick: 0)")
    parser.add_argument("--quiet-percent", type=float, default=8.0, help="foreign CPU use that counts as quiet (8)")
    parser.add_argument("--no-compiler", action="store_true", help="floor and comparison without a C compiler")
    parser.add_argument("--size", choices=tuple(SIZES), default=FULL.name, help="'tiny' tests the benchmark itself")
    parser.add_argument("--idle-s", type=float, default=2.0, help="seconds of IDLE (2)")
    parser.add_argument("--scale", action="store_true", help="instead: how costs grow with links, caches and blocks")
    parser.add_argument("--links", type=_positive, default=500, help="links of --scale (500)")
    parser.add_argument("--processes", type=_positive, default=8, help="processes that these links lead to (8)")
    arguments = parser.parse_args(argv)
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else 7
    if arguments.setups is None:
        arguments.setups = 1 if arguments.quick else 5
    if arguments.quiet_s is None:
        arguments.quiet_s = 0.0 if arguments.quick else 120.0
    if arguments.loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        parser.error("uvloop is not installed: pip install 'kvlink[uvloop]'")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'kvlink[bench]'")
    if arguments.peers is not None:
        if not arguments.peers.is_dir():
            parser.error(f"--peers: no folder {arguments.peers}")
        venvs = arguments.venvs or os.environ.get("VENVS")
        if venvs is None:
            parser.error("--peers needs --venvs, or the variable VENVS: the folder of the peers' environments")
        arguments.venvs = Path(venvs)
    return arguments


def _one_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        asked = [name for name in text.split(",") if name]
        for name in asked:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return tuple(name for name in known if name in asked)

    return names


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if any(not 0 <= count <= 256 for count in counts):
        raise argparse.ArgumentTypeError("threads are 0 to 256")
    return counts


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
