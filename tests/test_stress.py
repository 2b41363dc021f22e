"""A little of the stress program in every run, a lot of it with ``KVLINK_STRESS=1``; see `tests.programs.stress`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.programs.stress import checks
from tests.programs.stress.settings import Settings, part_of
from tests.support.pattern import Stamp, block_bytes, fill, rows
from tests.support.peer import PATHS, REPOSITORY

_LITTLE = [
    ("--cancellations", "100", "--kills", "3"),
    ("--cancellations", "100", "--kills", "3", "--transport", "faulty"),
]
_A_LOT = [
    ("--cancellations", "10000"),
    ("--kills", "200"),
    ("--minutes", "3", "--transport", "late"),
    ("--minutes", "3", "--transport", "faulty"),
]


def run(*arguments: str, limit_s: float) -> None:
    """Run the program; it prints its seed first, and what was wrong last."""
    seed = str(random.randrange(2**31))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.programs.stress", "--seed", seed, "--limit-minutes", "30", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **PATHS, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("arguments", _LITTLE, ids=" ".join)
def test_random_work_for_a_moment(arguments: Sequence[str]) -> None:
    """Pulls, pushes, cancels, kills, stops and restarts: no wrong byte, no hang, no leak."""
    run(*arguments, limit_s=100)


@pytest.mark.stress
@pytest.mark.timeout(2400)
@pytest.mark.skipif("KVLINK_STRESS" not in os.environ, reason="set KVLINK_STRESS=1: takes many minutes")
@pytest.mark.parametrize("arguments", _A_LOT, ids=" ".join)
def test_random_work_for_long(arguments: Sequence[str]) -> None:
    """The same, a lot of it."""
    run(*arguments, limit_s=2300)


# The program finds what it is for


def test_parts_of_an_inbox_do_not_overlap() -> None:
    """Every task of every worker has blocks of its own, and together they are the inbox."""
    settings = Settings(seed=1, num_workers=3)
    parts = [block for worker in (1, 2, 3) for task in range(3) for block in part_of(worker, task)]
    assert sorted(parts) == list(range(settings.inbox.num_slots))


def test_a_wrong_byte_in_an_inbox_is_found() -> None:
    """Bytes of its owner and of the block's own writer are right anywhere; one byte of anybody else is found."""
    import numpy as np

    settings, own = Settings(seed=1, num_workers=3), Stamp(1, 4, 77)
    desc = settings.inbox
    tensors = [np.empty(desc.shape, np.uint8) for _ in range(desc.num_tensors)]
    fill(tensors, own)
    assert checks.check_inbox(tensors, own, 3) is None
    block = part_of(3, 1)[2]
    rows(tensors[1])[block, :1000] = block_bytes(Stamp(3, 9, 500), 1, [block], 1000)[0]  # cut short in a record
    assert checks.check_inbox(tensors, own, 3) is None
    for wrong in (Stamp(2, 9, 500), Stamp(250, 1, 1)):
        kept = rows(tensors[1])[block].copy()
        rows(tensors[1])[block, :1000] = block_bytes(wrong, 1, [block], 1000)[0]
        assert checks.check_inbox(tensors, own, 3)
        rows(tensors[1])[block] = kept
    rows(tensors[1])[block] = block_bytes(Stamp(3, 9, 500), 1, [block + 1], 4096)[0]  # the neighbour's bytes
    assert checks.check_inbox(tensors, own, 3)


def test_stale_bytes_are_found() -> None:
    """Bytes of an older cache, an older life, or another cluster than the one that was asked are found."""

    class Link:
        incarnation = b"a"

    lives, link = checks.Lives(), Link()
    checked = [
        lives.check(stamp, 1, "model 0", link, lives.seen(1, "model 0"))  # type: ignore[arg-type]  # enough of one
        for stamp in (Stamp(1, 2, 10), Stamp(1, 2, 11), Stamp(1, 2, 11), Stamp(1, 2, 10), Stamp(1, 1, 50))
    ]
    assert [fault is None for fault in checked] == [True, True, True, False, False]
    assert lives.check(Stamp(2, 2, 12), 1, "model 0", link, (0, 0))  # type: ignore[arg-type]
    assert lives.check(Stamp(1, 3, 1), 1, "model 0", link, (0, 0))  # type: ignore[arg-type]  # over the link to life 2
