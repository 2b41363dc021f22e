"""The examples as their readers meet them: each runs with no arguments, ends in time, and says that all was right."""

from __future__ import annotations

import ast
import os
import re
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support.ucx import need_ucx
from tests.test_demo import EXAMPLES, needs_model, run_python

ROOT: Final = EXAMPLES.parent

# What each program must say: whole lines, as patterns, in this order. Other lines may stand between them.
SAYS: Final[dict[str, list[str]]] = {
    "pull_blocks.py": [r"62914560 bytes over shm, \d+\.\d GB/s: ok"],
    "contiguous_caches.py": [
        r"D: request 71 pulled into slot 3: right",
        r"D: request 72 pulled into slot 0: right",
        r"P: cache deallocated; its memory stays, because request 73 is still to be pulled",
        r"D: request 73 pulled out of the deallocated cache: right",
        r"P: memory is free; another cache allocated in it",
        *(rf"D: layer {layer} of request 74 is in slot 1: right" for layer in range(8)),
        r"D: unlinked: ok",
    ],
    "paged_blocks.py": [
        r"D: 393216 bytes pulled, blocks \[3, 4, 9\] of P to \[60, 10, 11\]: right",
        r"D: copied to \[30, 31, 32\]: right",
        r"D: copied to \[33, 34, 35\]: right",
        r"D: swapped out to \[2, 0, 1\] of the host cache: right",
        r"D: swapped in to \[50, 51, 52\]: right",
        *(rf"D: layer {layer} pushed to \[40, 5\]: right" for layer in range(8)),
        r"D: swapped in blocks are still the same: right",
        r"D: unlinked: ok",
    ],
    "notifications.py": [
        r"P: cluster 2 is linked",
        *(rf"P: request {request} is done; \d+ caches are left" for request in range(70, 76)),
        r"P: cluster 2 has gone",
    ],
    "tickets.py": [
        r"P: request 0: done",
        r"P: request 1: dropped",
        r"P: request 2: revoked",
        r"P: request 3: expired",
        r"D: the held ticket was revoked, the expected blocks are done",
        r"D: all bytes are right",
    ],
    "disaggregated_generation.py": [r"4 of 4 answers equal those of one undivided process"],
}

# `tests/test_demo.py` runs this one in every run.
NOW_AND_THEN: Final = pytest.mark.skipif("KVLINK_STRESS" not in os.environ, reason="KVLINK_STRESS=1 runs it")
SLOW: Final = {"disaggregated_generation.py": [pytest.mark.slow, needs_model, NOW_AND_THEN]}
MAX_LINES: Final = {"pull_blocks.py": 59}
"""All others: 99."""


def is_program(path: Path) -> bool:
    """Whether a file does something when it is run: it asks for its ``__name__``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(tree))


def named_examples(text: str) -> set[str]:
    """Return every path below ``examples/`` that a text names."""
    return {match.rstrip(".") for match in re.findall(r"\bexamples/[\w./-]+", text)}


def missing_examples(text: str) -> list[str]:
    """Return those of them that do not exist."""
    return sorted(name for name in named_examples(text) if not (ROOT / name).exists())


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, [])) for name in SAYS])
def test_example_runs_and_says_what_it_must(name: str) -> None:
    """With development mode on and warnings as errors, it ends with 0 and says each line in order."""
    started = time.monotonic()
    status, output = run_python("-X", "dev", "-W", "error", str(EXAMPLES / name))
    assert status == 0, output
    assert time.monotonic() - started < (90 if name in SLOW else 30)
    lines = iter(output.splitlines())
    for pattern in SAYS[name]:
        assert any(re.fullmatch(pattern, line) for line in lines), f"{pattern!r} is missing, or out of order:\n{output}"
    assert "Warning" not in output


OVER_UCX: Final = ["pull_blocks.py", "contiguous_caches.py", "paged_blocks.py", "notifications.py", "tickets.py"]


@pytest.mark.ucx
@pytest.mark.parametrize("name", OVER_UCX)
def test_example_runs_over_ucx_with_one_variable_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With ``KVLINK_TRANSPORTS=ucx`` in the environment everything is as it was."""
    need_ucx()
    monkeypatch.setenv("KVLINK_TRANSPORTS", "ucx")
    status, output = run_python("-W", "error", str(EXAMPLES / name))
    assert status == 0, output
    lines = iter(output.splitlines())
    for pattern in SAYS[name]:
        assert any(re.fullmatch(pattern.replace("over shm", "over ucx"), line) for line in lines), output


@pytest.mark.ucx
@pytest.mark.slow
@needs_model
@NOW_AND_THEN
def test_demo_runs_over_ucx_with_one_variable_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """``KVLINK_TRANSPORTS=ucx`` moves the blocks of the demo over UCX, and the answers stay the same."""
    need_ucx()
    monkeypatch.setenv("KVLINK_TRANSPORTS", "ucx")
    status, output = run_python("-W", "error", str(EXAMPLES / "disaggregated_generation.py"))
    assert status == 0, output
    assert re.search(r"moved \S+ MB over ucx at", output)
    assert "4 of 4 answers equal" in output


def test_every_program_is_run() -> None:
    """No example is there that the test above does not know."""
    assert {path.name for path in EXAMPLES.glob("*.py") if is_program(path)} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example_is_short(name: str) -> None:
    """What the README shows has under 60 lines, every other program under 100."""
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES.get(name, 99)


def test_readme_names_examples_that_exist() -> None:
    """Nobody is sent to a file that is not there."""
    assert missing_examples((ROOT / "README.md").read_text(encoding="utf-8")) == []


def test_missing_example_is_found() -> None:
    """The check above sees a wrong name in prose, in a link and in a command, and lets right ones pass."""
    text = "[One](examples/pull_blocks.py), examples/two_processes.py. [Gone](examples/gone.py): `examples/lost.py x`"
    assert missing_examples(text) == ["examples/gone.py", "examples/lost.py"]


DIE: Final = "__import__('os').kill(__import__('os').getpid(), 9)"

# What goes wrong: the program, a part of it, what stands there instead, the exit status, a part of what is said.
FAULTS: Final[dict[str, tuple[str, str, str, int, str]]] = {
    "P dies before it can be linked to": ("pull_blocks.py", "pipe.send(cluster.address)", DIE, 1, "EOFError"),
    "P dies while D needs it": (
        "pull_blocks.py",
        "await asyncio.to_thread(pipe.poll, 60)\n\n",
        f"{DIE}\n\n",
        1,
        "kvlink.errors.",
    ),
    "D dies": (
        "pull_blocks.py",
        "peer = kv.ClusterInfo",
        f"{DIE}\n        peer = kv.ClusterInfo",
        -9,
        "",
    ),
    "other blocks": ("pull_blocks.py", "cache, range(32),", "cache, range(1, 33),", 1, "GB/s: WRONG"),
    "P dies in a push": (
        "contiguous_caches.py",
        "IS_COMPUTED[layer].set()",
        DIE,
        1,
        "P ended with exit status -9",
    ),
    "D dies in a push": ("contiguous_caches.py", 'pipe.send("checked")', DIE, 1, "D ended with exit status -9"),
    "other slot": ("contiguous_caches.py", "src_batch_index=2", "src_batch_index=1", 1, "layer 0 of request 74 is in"),
    "P dies computing": (
        "paged_blocks.py",
        "layers.events[layer].set()",
        DIE,
        1,
        "P ended with exit status -9",
    ),
    "other host blocks": ("paged_blocks.py", "{60: 2, 10: 0,", "{60: 0, 10: 2,", 1, "host cache: tensor 0 is WRONG"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_example_notices_what_goes_wrong(tmp_path: Path, fault: str) -> None:
    """A copy of the program with one fault ends soon, all of it, with an exit status that says so."""
    name, part, instead, expected_status, said = FAULTS[fault]
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert text.count(part) == 1, f"{name} has changed; change FAULTS too"
    (tmp_path / name).write_text(text.replace(part, instead), encoding="utf-8")
    started = time.monotonic()
    status, output = run_python("-W", "error", str(tmp_path / name))
    assert (status, said in output) == (expected_status, True), output
    assert time.monotonic() - started < 20  # and not after the time limit of the process that is left


def test_the_readme_shows_the_first_example_as_it_is() -> None:
    """The program that the README shows is the file, to the letter."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (EXAMPLES / "pull_blocks.py").read_text(encoding="utf-8").rstrip() in readme
