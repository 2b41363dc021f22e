"""The proof of a fabric, on loopback: what it proves, what it admits, and that it fails when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from kvlink.proving.command import main
from kvlink.proving.layout import BLOCK_NBYTES, desc_of, pool_nbytes
from kvlink.proving.pattern import block, count_wrong, fill
from kvlink.proving.report import Report
from tests.support.peer import PATHS

STEPS: Final = ["link", "bytes", "one-sided", "cancellation", "death", "speed"]


@contextmanager
def serving(*options: str, key: str = "key") -> Iterator[str]:
    """Run the side that serves in a process of its own; yields its address."""
    command = [sys.executable, "-m", "kvlink.proving", "serve", "127.0.0.1:0", "--key", key, "--size", "1MiB", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **PATHS})
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.stdout.readline().split()[2]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def prove(address: str, *options: str, key: str = "key", python: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Run the side that proves; return its status and its report."""
    quick = ["--kills", "1", "--seconds", "0.01", "--seed", "5", "--json", "-"]
    command = [sys.executable, *python, "-m", "kvlink.proving", "prove", address, "--key", key, *quick, *options]
    done = subprocess.run(command, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=90)
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, said


def test_everything_is_proved_on_loopback_and_nothing_is_claimed_of_rdma() -> None:
    """All steps pass over what there is, and the verdict says what that does not prove."""
    with serving() as address:
        status, said = prove(address)
    assert [(step["name"], step["state"]) for step in said["steps"]] == [(name, "passed") for name in STEPS], said
    assert status == 0
    assert said["passed"]
    assert said["carrier"]["transport"] == "shm"
    assert "nothing about RDMA" in said["verdict"]
    assert [row["block_nbytes"] for row in said["steps"][-1]["rows"]] == list(BLOCK_NBYTES)
    assert said["about"]["there"]["doctor"]["ok"]


def test_a_stranger_without_the_key_gets_nothing() -> None:
    """A wrong key and rubbish are hung up on, and the side that serves goes on serving."""
    with serving() as address:
        host, port = address.split(":")
        for rubbish in (b"\x00" * 100 + b"\n", b"[" * 100_000 + b"\n", b"{}\n", b'{"key": 7}\n', b'"key"\n'):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(rubbish)
                assert stranger.recv(100) == b""
        status, said = prove(address, key="wrong")
        assert status == 1
        assert "is the key right?" in said["steps"][0]["found"]
        with socket.create_connection((host, int(port)), timeout=10) as friend:
            friend.sendall(b'{"key": "key"}\n{"ask": "go", "cluster_id": 5}\n{"ask": "nonsense"}\n')
            with friend.makefile() as answers:
                assert "error" in json.loads(answers.readline())
                assert "error" in json.loads(answers.readline())


def test_nobody_serves() -> None:
    """The prover says at once that nobody is there, and what to do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    status, said = prove(f"127.0.0.1:{port}")
    assert status == 1
    assert "prove-rdma serve" in said["steps"][0]["found"]
    assert "Nothing is proved" in said["verdict"]


def test_the_death_of_the_prover_is_in_the_report() -> None:
    """A report exists, and names step and signal, when a C library takes the prover's process down."""
    report = Report()
    report.take({"kind": "carrier", "transport": "ucx", "reason": "asked for"})
    report.take({"kind": "outcome", "name": "link", "state": "passed", "found": "linked", "rows": []})
    report.take({"kind": "starting", "name": "bytes"})
    report.take_death("was ended by SIGSEGV")
    assert not report.has_passed
    assert "| bytes | **FAILED** | the prover's process was ended by SIGSEGV |" in report.render()
    assert "Not proved over ucx" in report.render()


# What carried the bytes: the transport, UCX's lanes, and what the verdict must say, and must not.
VERDICTS: Final = {
    "shm": ("shm", [], "over shared memory. That proves the checks, and nothing about RDMA"),
    "one host": ("ucx", ["posix", "cma"], "over ucx (posix, cma). That proves the checks, and nothing about RDMA"),
    "tcp": ("ucx", ["tcp"], "over ucx (tcp). That proves the checks, and nothing about RDMA"),
    "RDMA": ("ucx", ["rc_mlx5", "cma"], "Proved over RDMA: everything passed over UCX's rc_mlx5."),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_claims_what_carried_the_bytes(case: str) -> None:
    """RDMA is proved where UCX's lanes are RDMA's, and nowhere else."""
    transport, lanes, words = VERDICTS[case]
    report = Report()
    report.take({"kind": "carrier", "transport": transport, "reason": "asked for", "lanes": lanes})
    report.take({"kind": "outcome", "name": "link", "state": "passed", "found": "linked", "rows": []})
    assert words in report.verdict()


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An address that the other machine cannot use, and one that is none, end with status 2 and the reason."""
    for arguments, words in (
        (["serve", "0.0.0.0:7000"], "by which the other machine"),
        (["serve", "7000"], "host:port"),
        (["serve", "unix:/tmp/x"], "by which the other machine"),
        (["serve", "127.0.0.1:0", "--size", "much"], "--size"),
        (["prove", "nowhere", "--key", "k"], "host:port"),
    ):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        assert refused.value.code == 2
        assert words in capsys.readouterr().err


def test_the_pattern_tells_blocks_writers_and_tensors_apart() -> None:
    """A block of another writer, tensor or number, and a single wrong byte anywhere, are counted as wrong."""
    tensors = [np.zeros((4, 64), np.uint8) for _ in range(2)]
    fill(tensors, 1)
    blocks = [0, 1, 2, 3]
    assert count_wrong(tensors, 1, blocks, blocks) == 0
    assert count_wrong(tensors, 2, blocks, blocks) == 8
    assert count_wrong(tensors, 1, blocks, [1, 0, 2, 3]) == 4
    assert count_wrong(tensors[::-1], 1, blocks, blocks) == 8
    tensors[1][2, 63] ^= 1
    assert count_wrong(tensors, 1, blocks, blocks) == 1
    assert len({block(w, t, n, 64).tobytes() for w in range(3) for t in range(3) for n in range(100)}) == 900


def test_the_caches_fit_into_the_pool() -> None:
    """Whatever size is asked for, all caches together leave some room."""
    for size in (1, 1 << 20, 1 << 28, 10**10):
        caches = [desc_of(nbytes, size) for nbytes in BLOCK_NBYTES]
        used = sum(desc.num_tensors * desc.shape[0] * desc.shape[1] for desc in caches)
        assert used < pool_nbytes(size) <= used + (4 << 20)
