"""The curves of ``kvlink bench --scale``: what one piece costs, over how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlink.benchmarks.chart import machine_of
from kvlink.benchmarks.measuring import Line

_PANELS: Final = (
    ("LINKS", "links", "links of one cluster", {"link_cpu_ms": "ms of CPU to link", "first_pull_ms": "ms, first pull"}),
    ("LINKS", "links", "links of one cluster", {"rss_kib": "KiB each", "descriptors": "descriptors each"}),
    ("LINKS", "links", "links of one cluster", {"pull_us": "us, a pull of 128 KiB", "idle_cpu_percent": "% idle CPU"}),
    (
        "CACHES",
        "caches",
        "caches with 4 keys each",
        {"allocate_us": "us, allocate", "free_us": "us, free", "find_key_us": "us, find", "lease_us": "us, lease"},
    ),
    ("PLAN", "blocks", "blocks of a request", {"check_us": "us, check", "plan_us": "us, plan"}),
)


def draw_scale(lines: Sequence[Line], path: Path) -> list[Path]:
    """Draw the curves into `path`, and the same as SVG beside it; return what was written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(_PANELS), 3.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for panel, (scenario, over, title, curves) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for name, label in curves.items():
            points = [(line[over], line[name]) for line in lines if line["scenario"] == scenario and name in line]
            points = sorted(point for point in points if point[0] > 1 or scenario == "PLAN")
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=label)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(title, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.legend(fontsize=7, frameon=False)
    figure.suptitle(machine_of(lines), fontsize=8, color="#5f6b6d")
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(written[0], dpi=150)
    figure.savefig(written[1])
    return written


def write_curves(lines: Sequence[Line]) -> str:
    """Return the lines as text, one table for each scenario."""
    parts: list[str] = []
    for scenario in dict.fromkeys(line["scenario"] for line in lines):
        chosen = [line for line in lines if line["scenario"] == scenario and "close_ms" not in line]
        names = [name for name in chosen[0] if name not in ("scenario", "machine", "versions", "load1")]
        rows = [names, *([str(line.get(name, "")) for name in names] for line in chosen)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
        parts += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        parts.append("")
    return "\n".join(parts)
