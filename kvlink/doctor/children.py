"""Probes in processes of their own: whatever a probe does to its process, the doctor goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

PROBE_TIMEOUT_S: Final = 15.0
_END_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a probe.

    Args:
        facts: what it found; empty when it failed.
        failure: how its process failed; empty when it did not.
    """

    facts: dict[str, Any]
    failure: str = ""


def run_probes(probes: Mapping[str, Sequence[str]], *, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, Answer]:
    """Run probes, given with their arguments, side by side, each in a process of its own.

    The slowest has `timeout_s`. Never raises for what a probe does.
    """
    deadline = time.monotonic() + timeout_s
    started: dict[str, subprocess.Popen[bytes] | str] = {}
    answers = {}
    try:
        for name, arguments in probes.items():
            started[name] = _start(name, arguments)
        for name, process in started.items():
            answers[name] = (
                Answer({}, process)
                if isinstance(process, str)
                else _collect(process, max(0.1, deadline - time.monotonic()), timeout_s)
            )
    finally:
        for process in started.values():
            if not isinstance(process, str):
                _end(process)
    return answers


def _start(name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes] | str:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # it must find the kvlink that asks
    try:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "kvlink.doctor.probes", name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a group of its own, to end it with whatever it has started
        )
    except OSError as exc:
        return f"no process could be started: {exc.strerror or exc}"


def _collect(process: subprocess.Popen[bytes], within_s: float, timeout_s: float) -> Answer:
    try:
        said, complaint = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        return Answer({}, f"did not answer within {timeout_s:g} s")
    status = process.returncode
    if status < 0:
        with suppress(ValueError):
            return Answer({}, f"its process was ended by {signal.Signals(-status).name}")
        return Answer({}, f"its process was ended by signal {-status}")
    with suppress(ValueError):
        facts = json.loads(said)
        if isinstance(facts, dict):
            return Answer(facts)
    lines = complaint.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), f"its process ended with status {status}")
    return Answer({}, last[:300])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # not waited for: the number of its group is still its own, and of what it started
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # it may sleep where no signal wakes it: on a disk or a device that hangs
        process.wait(_END_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
