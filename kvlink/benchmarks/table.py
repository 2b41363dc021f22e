"""Result lines as tables on a terminal: with rich where it is installed, plain otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TextIO

from kvlink.benchmarks.measuring import NOISY_PERCENT, Line
from kvlink.benchmarks.scenarios import SETUP


class Column(NamedTuple):
    """A heading and on which side its cells are aligned."""

    heading: str
    is_number: bool = True


_COLUMNS: Final = (
    Column("scenario", False),
    Column("op", False),
    Column("system", False),
    Column("p50"),
    Column("p99"),
    Column("GiB/s"),
    Column("floor p50"),
    Column("x floor"),
    Column("range"),
    Column("CPU s/GiB"),
    Column("target's"),
    Column("noise"),
    Column("bytes", False),
)
_SETUP_COLUMNS: Final = (
    Column("system", False),
    Column("create, target's"),
    Column("pool, target's"),
    Column("register"),
    Column("connect"),
    Column("first op"),
    Column("idle CPU, target's"),
)


def system_of(line: Line) -> str:
    """Return what a line is about, as tables and charts name it."""
    memory = line.get("mem", "shm")
    return " ".join([str(line["peer"]), str(line["variant"]), *([memory] if memory != "shm" else [])])


def best_lines(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with numbers, the quietest of each scenario, direction and system, in order of appearance."""
    best: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        if "x_floor" not in line:
            continue
        key = (line["scenario"], line["op"], system_of(line))
        if key not in best or line["noise_foreign_cpu_pct"] < best[key]["noise_foreign_cpu_pct"]:
            best[key] = line
    return list(best.values())


def write_tables(lines: Sequence[Line], stream: TextIO | None = None) -> None:
    """Write all that was measured: set-ups, scenarios, gaps of the event loop, what it ran on."""
    out = stream or sys.stdout
    order = {name: place for place, name in enumerate(dict.fromkeys(line["scenario"] for line in lines))}
    measured = sorted(best_lines(lines), key=lambda line: (order[line["scenario"]], line["op"], line["x_floor"]))
    setups = [line for line in lines if line["scenario"] == SETUP and "error" not in line]
    if measured:
        _write(out, "", _COLUMNS, [_cells(line) for line in measured])
    if setups:
        _write(out, "set-up (medians)", _SETUP_COLUMNS, [_setup_cells(line) for line in setups])
    for line in measured:
        if "loop_gap_p99_ms" in line:
            out.write(
                f"{system_of(line)}, {line['op']} {line['scenario']}: a task that sleeps 1 ms at a time gets its turn "
                f"after {line['loop_gap_p99_ms']:.1f} ms (p99), {line['loop_gap_max_ms']:.1f} ms (longest)\n"
            )
    for line in lines:
        if "error" in line:
            out.write(f"failed: {system_of(line)} {line['scenario']} {line.get('op', '')}: {line['error']}\n")
    if any(line["noise_foreign_cpu_pct"] > NOISY_PERCENT for line in measured):
        out.write(
            f"! more than {NOISY_PERCENT:.0f} % of the machine was used by others: measure again before quoting\n"
        )
    for text in dict.fromkeys(_basis(line) for line in lines if "machine" in line and "seed" in line):
        out.write(text)
    out.flush()


def _basis(line: Line) -> str:
    machine = line["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in line.get("versions", {}).items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, "
        f"{packages}; "
        f"{line.get('loop', 'asyncio')}, seed {line['seed']}, size {line.get('size', 'full')}\n"
    )


def _cells(line: Line) -> list[str]:
    noise = line["noise_foreign_cpu_pct"]
    return [
        line["scenario"],
        line["op"],
        system_of(line),
        _time(line["p50_us"]),
        _time(line["p99_us"]),
        f"{line['GiBps']:.2f}",
        _time(line["floor_p50_us"]),
        f"{line['x_floor']:.2f}",
        f"{line['x_floor_min']:.2f}-{line['x_floor_max']:.2f}",
        f"{line['cpu_initiator_s_per_GiB']:.2f}",
        f"{line['cpu_target_s_per_GiB']:.2f}",
        f"{noise:.0f} %" + ("!" if noise > NOISY_PERCENT else ""),
        "right" if line["verified"] else "WRONG",
    ]


def _setup_cells(line: Line) -> list[str]:
    idle: dict[str, Any] = line["idle_cpu"] or {}

    def both(name: str) -> str:
        if f"initiator_{name}" not in line:
            return "-"
        return f"{line[f'initiator_{name}'] * 1e3:.1f} / {line.get(f'target_{name}', 0.0) * 1e3:.1f} ms"

    def ours(name: str) -> str:
        return f"{line[f'initiator_{name}'] * 1e3:.2f} ms"

    return [
        system_of(line),
        both("create_s"),
        both("pool_s"),
        ours("register_s"),
        ours("connect_s"),
        ours("first_op_s"),
        f"{idle.get('initiator_pct', 0.0):.1f} / {idle.get('target_pct', 0.0):.1f} %",
    ]


def _time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1e3 else f"{microseconds:.1f} us"


def _write(out: TextIO, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    table = [[column.heading for column in columns], *rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    if out.isatty() and _write_rich(out, title, columns, rows, sum(widths) + 3 * len(widths) + 1):
        return
    if title:
        out.write(f"{title}\n")
    for row in table:
        cells = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        out.write("  ".join(cells).rstrip() + "\n")
    out.write("\n")


def _write_rich(out: TextIO, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Return False where rich is missing or would cut cells short: a terminal wraps what is plain, and cuts nothing."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    console = Console(file=out)
    if console.width < width:
        return False
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=True)
    last = ""
    for row in rows:
        if last and row[0] != last and not title:
            table.add_section()
        last = row[0]
        table.add_row(*row)
    console.print(table)
    return True
