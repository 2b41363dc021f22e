"""Other libraries, measured by scripts that print lines of the same kind: ``peer_*.py`` in a folder.

Each needs a virtual environment of its own, a folder in VENVS. What has none is skipped, and that is said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvlink.benchmarks.measuring import Line
from kvlink.benchmarks.progress import Progress
from kvlink.benchmarks.scenarios import IDLE, SETUP

_VENV_OF: Final = {"peer_nixl": "nixl", "peer_mooncake": "mooncake"}
_OTHER_VENV: Final = "misc"

_VARIANTS: Final = {"peer_nixl": ("prepped", "noprog")}
"""More than one way of using a library, the usual one first: NIXL as it comes, and at its best on one host."""

_LIMIT_S: Final = 420
_GRACE_S: Final = 40


@dataclass(frozen=True, slots=True)
class Rival:
    """One script, its Python, and its arguments."""

    python: Path
    script: Path
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """For the user."""
        return " ".join([self.script.name, *self.arguments[1:2]])


def find_rivals(folder: Path, venvs: Path, progress: Progress) -> list[Rival]:
    """Return the rivals that can run here."""
    found = []
    for script in sorted(folder.glob("peer_*.py")):
        python = venvs / _VENV_OF.get(script.stem, _OTHER_VENV) / "bin" / "python"
        if not python.exists():
            progress.say(f"skipped {script.name}: no {python}")
            continue
        for variant in _VARIANTS.get(script.stem, ("",)):
            found.append(Rival(python, script, ("--variant", variant) if variant else ()))
    return found


def run_rival(
    rival: Rival,
    names: Sequence[str],
    ops: Sequence[str],
    *,
    repeats: int,
    setups: int,
    quiet_s: float,
    progress: Progress,
) -> Iterator[Line]:
    """Run one script and yield its lines as they come; what it says on stderr is shown if it fails.

    Args:
        names: scenarios.
    """
    wanted = list(dict.fromkeys(SETUP if name == IDLE else name for name in names))
    process = subprocess.Popen(
        [
            *(str(rival.python), str(rival.script), *rival.arguments),
            *("--scen", ",".join(wanted), "--ops", ",".join(ops)),
            *("--repeats", str(repeats), "--setups", str(setups), "--limit", str(_LIMIT_S)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "QUIET_BUDGET_S": str(quiet_s)},
        start_new_session=True,  # so that whatever it starts can be ended with it
    )
    said: list[str] = []
    try:
        assert process.stdout is not None
        progress.show(rival.name)
        for text in process.stdout:
            line = _parse(text)
            if line is None:
                said.append(text.rstrip())
                continue
            progress.show(rival.name, f"{line.get('op', '')} {line['scenario']}")
            yield line
        status = process.wait(_GRACE_S)
        if status:
            progress.say(f"{rival.name} ended with exit status {status}: " + "\n".join(said[-5:]))
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _parse(text: str) -> Line | None:
    if not text.startswith("{"):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "scenario" in line and "peer" in line else None
