"""The chart for a README: time over the floor, per scenario and system, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlink.benchmarks.measuring import Line
from kvlink.benchmarks.table import best_lines, system_of

_COLOURS: Final = (
    "#0b6e4f",
    "#d1495b",
    "#3066be",
    "#e09f3e",
    "#7b5ea7",
    "#5f6b6d",
    "#2a9d8f",
    "#a23e48",
    "#111111",
    "#8ab17d",
    "#e76f51",
)
"""Told apart by most colour-blind readers, and by their order from top to bottom by all."""

_ROW: Final = 0.8
"""Of the height of a scenario; the rest is the gap to the next."""


def draw(lines: Sequence[Line], path: Path) -> list[Path]:
    """Draw what was measured into `path`, and the same as SVG beside it; return what was written.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no line has a number to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    best = best_lines(lines)
    if not best:
        raise ValueError("nothing was measured that could be drawn")
    ops = list(dict.fromkeys(line["op"] for line in best))
    scenarios = list(dict.fromkeys(line["scenario"] for line in best))
    systems = list(dict.fromkeys(system_of(line) for line in best))
    height = 1.3 + len(scenarios) * (0.3 + 0.17 * len(systems))
    figure = Figure(figsize=(5.4 * len(ops) + 0.6, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    # Leave room on the right for the number beside the last dot.
    high = max(line["x_floor_max"] for line in best) * 2.2
    low = min(0.8, min(line["x_floor_min"] for line in best) / 1.15)
    for panel, op in zip(panels, ops, strict=True):
        for place, system in enumerate(systems):
            colour = _COLOURS[place % len(_COLOURS)]
            shift = ((place + 0.5) / len(systems) - 0.5) * _ROW
            chosen = [line for line in best if line["op"] == op and system_of(line) == system]
            heights = [scenarios.index(line["scenario"]) + shift for line in chosen]
            ratios = [line["x_floor"] for line in chosen]
            lowest, highest = [line["x_floor_min"] for line in chosen], [line["x_floor_max"] for line in chosen]
            panel.hlines(heights, lowest, highest, color=colour, alpha=0.4, linewidth=3)
            panel.scatter(ratios, heights, color=colour, s=26, zorder=3, label=system)
            for ratio, right, at in zip(ratios, highest, heights, strict=True):
                panel.annotate(
                    f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                    (right, at),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                    color=colour,
                )
        panel.axvline(1, color="black", linewidth=1, zorder=1)
        panel.set_xscale("log")
        panel.set_xlim(low, high)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= tick <= high]
        panel.set_xticks(ticks)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        for edge in range(1, len(scenarios)):
            panel.axhline(edge - 0.5, color="#eeeeee", linewidth=0.8)
        panel.set_yticks(range(len(scenarios)), scenarios)
        panel.set_ylim(len(scenarios) - 0.5, -0.5)
        panel.set_title(f"{op}: time over memcpy of the same blocks (less is better)", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.suptitle(machine_of(lines), fontsize=8, color="#5f6b6d")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(systems)), fontsize=8, frameon=False)
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(written[0], dpi=150)
    figure.savefig(written[1])
    return written


def machine_of(lines: Sequence[Line]) -> str:
    """Return the machine and the versions that lines were measured with, as far as they say so."""
    line = next((line for line in lines if "machine" in line), None)
    if line is None:
        return ""
    machine, versions = line["machine"], line.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("kvlink", "numpy"))
    parts = [machine["cpu"], f"{machine['cores']} cores", f"Linux {machine['kernel']}", f"Python {machine['python']}"]
    return ", ".join([*parts, named] if named else parts)
