"""The fuzzing programs run, find nothing in a moment, and would find something."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import subprocess
import sys

import pytest

from tests.fuzz.driver import fuzz
from tests.support.peer import PATHS, REPOSITORY

TARGETS = ["frames", "seals", "tokens", "cards", "addresses"]
SECONDS = 300 if os.environ.get("KVLINK_STRESS") else 0.3


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.timeout(SECONDS + 60)
def test_nothing_is_found(name: str) -> None:
    """Whatever a peer sends is understood or refused, with the error that is promised."""
    target = importlib.import_module(f"tests.fuzz.{name}")
    seed = random.randrange(2**32)
    assert fuzz(target.one_input, target.SAMPLES, seconds=SECONDS, seed=seed) > 50


def test_something_is_found_where_there_is_something() -> None:
    """A target with a fault at one changed byte of a sample does not survive a second, and the report has the input."""

    def fragile(given: bytes) -> None:
        if given[:4] == b"good" and given[4:5] not in (b"!", b""):
            raise IndexError("beyond the end")

    with pytest.raises(AssertionError, match=r"seed 1 raises IndexError.* for b'good"):
        fuzz(fragile, [b"good! and more"], seconds=20, seed=1)


def test_a_target_is_a_program() -> None:
    """It says its seed, so that what it finds can be found again."""
    command = [sys.executable, "-m", "tests.fuzz.tokens", "--seconds", "0.1", "--seed", "7"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, **PATHS}, timeout=60, check=True
    )
    assert done.stdout.startswith("seed 7\n")
    assert done.stdout.endswith(" inputs\n")


@pytest.mark.parametrize("name", TARGETS)
def test_atheris_runs_the_targets(name: str) -> None:
    """Guided by coverage, for a moment: libFuzzer ends by itself and reports no crash."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: `pip install atheris`")
    if SECONDS < 1:
        pytest.skip("set KVLINK_STRESS=1: atheris takes seconds to begin")
    command = [sys.executable, "-m", f"tests.fuzz.{name}", "--atheris", "-max_total_time=1", "-verbosity=0"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, **PATHS}, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
