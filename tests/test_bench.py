"""The benchmark as a program: it runs, compares every byte, and writes what can be joined. No time is ever asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlink.benchmarks import command, pair, scenarios, sides, table
from kvlink.benchmarks.accounting import percentile
from kvlink.benchmarks.native import Native, fill
from kvlink.benchmarks.scenarios import FULL, TINY, requests_of

Line = dict[str, Any]

# What the table over several systems is made of; the peers' scripts write the same names.
JOINED = {
    *("peer", "variant", "mem", "scenario", "op", "p50_us", "p99_us", "GiBps", "floor_p50_us", "x_floor"),
    *("x_floor_min", "x_floor_max", "cpu_initiator_s_per_GiB", "cpu_target_s_per_GiB", "noise_foreign_cpu_pct"),
    "verified",
}
JOINED_SETUP = {
    *("peer", "variant", "mem", "scenario", "initiator_create_s", "target_create_s", "initiator_register_s"),
    *("initiator_connect_s", "initiator_first_op_s", "idle_cpu"),
}

# A peer's script, as far as the benchmark sees it.
PEER = """
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("a word of the library's own")
for name in arguments["--scen"].split(","):
    for op in arguments["--ops"].split(","):
        line = dict.fromkeys(%r, 2.0)
        print(json.dumps({**line, "peer": "other", "variant": "usual", "mem": "shm", "scenario": name, "op": op}))
"""


# Small, and once: enough to see that it works.
TINY_RUN = ("--size=tiny", "--repeats=1", "--setups=1", "--quiet-s=0", "--idle-s=0.01", "--threads=2")


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[Line]]:
    """Run the benchmark in its tiny geometry, in this process; return its exit status and the lines it wrote."""
    file = tmp_path / "lines.jsonl"
    status = command.main([*TINY_RUN, "--json", str(file), *arguments])
    return status, [json.loads(line) for line in file.read_text().splitlines()]


def skip_where_refused(lines: list[Line]) -> None:
    """Skip where the kernel does not let one process copy another one's memory."""
    for line in lines:
        if line.get("error", "").startswith("FeatureNotEnabledError"):
            pytest.skip(line["error"])


@pytest.mark.parametrize("transport", sides.TRANSPORTS)
def test_every_scenario_runs_and_every_byte_is_right(
    tmp_path: Path, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each scenario in both directions gives a line that can be joined, all blocks verified, and a row of the table."""
    status, lines = run(tmp_path, "--transport", transport)
    skip_where_refused(lines)
    assert status == 0, lines
    setup, *measured = lines
    assert set(setup) >= JOINED_SETUP
    assert set(setup["idle_cpu"]) == {"initiator_pct", "target_pct"}
    assert [(line["scenario"], line["op"]) for line in measured] == [
        (name, op) for op in ("READ", "WRITE") for name in FULL.scenarios
    ]
    for line in measured:
        assert set(line) >= JOINED
        assert line["verified"] is True
        assert line["bad_blocks"] == 0
        assert line["peer"] == line["transport"] == transport
        assert line["seed"] == scenarios.SEED
        assert line["bytes_per_op"] == TINY.scenarios[line["scenario"]].nbytes
        assert ("loop_gap_p99_ms" in line) == (line["scenario"] == "S3_1G")
    output = capsys.readouterr()
    for name in FULL.scenarios:
        assert output.out.count(f"\n{name} ") == 2, output.out
        assert f"READ {name}\n" in output.err
    assert "WRONG" not in output.out


def test_the_floor_needs_no_compiler(tmp_path: Path) -> None:
    """Without a C compiler ctypes and numpy do the same work, and the line says so."""
    status, lines = run(tmp_path, "--no-compiler", "--scen", "S1_4K,S2_64M")
    assert status == 0
    assert [(line["floor"], line["verified"]) for line in lines] == [("ctypes_memmove_loop", True)] * 4


def test_bytes_that_did_not_move_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A transfer that leaves one block out is a wrong result: in the line, in the table and in the exit status."""
    whole = pair.Pair.mover

    def mover(self: pair.Pair, op: str) -> pair.Mover:
        move = whole(self, op)
        return lambda key, cache, source, target: move(key, cache, source[1:], target[1:])

    monkeypatch.setattr(pair.Pair, "mover", mover)
    status, lines = run(tmp_path, "--scen", "S2_64M")
    assert status == 1
    assert [(line["op"], line["verified"]) for line in lines] == [("READ", False), ("WRITE", False)]
    for line in lines:
        # one block of each of 4 tensors, in 4 requests, in the repeats that were made and the one that warms up
        assert line["bad_blocks"] == 16 * (line["repeats_made"] + 1)
    assert capsys.readouterr().out.count("WRONG") == 2


@pytest.mark.parametrize("is_compiled", [True, False])
def test_one_wrong_bit_is_one_wrong_block(is_compiled: bool) -> None:
    """The comparison sees a single bit, in the last word too, and counts blocks."""
    native = Native(is_compiled=is_compiled)
    if is_compiled and native.floor != "c_memcpy_loop":
        pytest.skip("no C compiler on this host")
    words = np.zeros((8, 512), np.uint64)
    fill(words.reshape(-1), 1000, 7)
    blocks = np.array([words[index].ctypes.data for index in range(8)], np.uint64)
    first = np.arange(8, dtype=np.uint64) * np.uint64(512) + np.uint64(1000)
    assert native.count_wrong(blocks, first, 4096, 7) == 0
    words[2, 511] ^= np.uint64(1)
    words[5, 0] ^= np.uint64(1 << 63)
    assert native.count_wrong(blocks, first, 4096, 7) == 2
    assert native.count_wrong(blocks, first, 4096, 8) == 8
    copied = np.zeros_like(words)
    native.copy(np.array([copied[index].ctypes.data for index in range(8)], np.uint64), blocks, 4096)()
    assert np.array_equal(copied, words)


def test_scenarios_are_what_they_are_called() -> None:
    """Bytes and descriptors of one request of each scenario."""
    kib, mib = 1024, 1024**2
    assert {name: (each.nbytes, each.num_blocks * each.num_tensors) for name, each in FULL.scenarios.items()} == {
        "S1_4K": (4 * kib, 1),
        "S1_64K": (64 * kib, 1),
        "S2_64M": (64 * mib, 4096),
        "S3_1G": (1024 * mib, 16384),
        "S4_1Gcontig": (1024 * mib, 1),
        "S5_32x8M": (8 * mib, 512),
    }
    assert FULL.pool_nbytes == 2048 * mib
    assert list(TINY.scenarios) == list(FULL.scenarios)


@pytest.mark.parametrize("scenario", [*FULL.scenarios.values(), *TINY.scenarios.values()], ids=lambda each: each.name)
def test_requests_use_no_destination_twice(scenario: scenarios.Scenario) -> None:
    """In a repeat kvlink and the floor write disjoint blocks, from disjoint ones, the same in each run."""
    requests = [*requests_of(scenario, 3), *requests_of(scenario, 3, is_floor=True)]
    assert len(requests) == 2 * scenario.num_requests
    for blocks in (
        np.concatenate([request.target for request in requests]),
        np.concatenate([request.source for request in requests]),
    ):
        assert len(np.unique(blocks)) == len(blocks) == 2 * scenario.num_requests * scenario.num_blocks
        assert blocks.min() >= 0
        assert blocks.max() < scenario.blocks_per_tensor
    again = requests_of(scenario, 3)
    assert all(np.array_equal(left.target, right.target) for left, right in zip(requests, again, strict=False))
    assert not all(np.array_equal(request.source, request.target) for request in requests)


def test_a_target_that_dies_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark ends with exit status 1 and a line that says where; nothing is left running."""

    async def kill(self: pair.Pair, op: str, blocks: scenarios.BlockIds) -> None:
        os.kill(self.target.pid, signal.SIGKILL)

    monkeypatch.setattr(pair.Pair, "clear", kill)
    status, lines = run(tmp_path, "--scen", "S2_64M", "--ops", "WRITE")
    assert status == 1
    (line,) = lines
    assert (line["scenario"], line["op"], line["peer"]) == ("S2_64M", "WRITE", "kvlink-shm")
    assert line["error"]


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    """``--plot`` writes a PNG and an SVG that names scenarios and systems."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    # In a process of its own: matplotlib keeps the files of its fonts open.
    chosen = ["--scen", "S1_4K,S2_64M", "--plot", str(tmp_path / "chart.png")]
    command_line = [sys.executable, "-m", "kvlink", "bench", *TINY_RUN, *chosen]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    for word in ("S1_4K", "S2_64M", "kvlink-shm 2 threads", "READ", "WRITE"):
        assert word in text
    assert "chart.svg" in done.stderr


def test_peers_join_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other libraries' scripts run in their environments; their lines stand beside ours, and who has none is named."""
    python = tmp_path / "venvs" / "misc" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "peer_other.py").write_text(PEER % sorted(JOINED), encoding="utf-8")
    (folder / "peer_nixl.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    (folder / "peer_broken.py").write_text("raise SystemExit('broken')\n", encoding="utf-8")
    status, lines = run(
        tmp_path, "--scen", "S1_4K", "--ops", "READ", "--peers", str(folder), "--venvs", str(tmp_path / "venvs")
    )
    assert status == 0
    assert [line["peer"] for line in lines] == ["kvlink-shm", "other"]
    output = capsys.readouterr()
    assert "S1_4K     READ  other usual" in output.out
    assert "skipped peer_nixl.py" in output.err
    assert "peer_broken.py ended with exit status 1: broken" in output.err


def test_of_two_measurements_the_quieter_one_is_shown() -> None:
    """The same system measured twice is one row; a noisy one is marked, and a failure is named."""
    line: Line = dict.fromkeys(JOINED, 1.0)
    line.update(peer="kvlink-shm", variant="2 threads", mem="shm", scenario="S1_4K", op="READ", x_floor_max=3.0)
    noisy, quiet = {**line, "noise_foreign_cpu_pct": 60.0, "p50_us": 8.0}, {**line, "p50_us": 5.0}
    assert table.best_lines([noisy, quiet, noisy]) == [quiet]
    out = StringIO()
    failed = {"peer": "other", "variant": "usual", "scenario": "S1_4K", "op": "READ", "error": "EOFError: "}
    table.write_tables([noisy, failed], out)
    assert "60 %!" in out.getvalue()
    assert "measure again" in out.getvalue()
    assert "failed: other usual S1_4K READ: EOFError" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scen", "S9"], "'S9' is none of SETUP"),
        (["--repeats", "0"], "at least 1"),
        (["--threads", "-1"], "0 to 256"),
        (["--peers", "/nowhere"], "no folder /nowhere"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started; what is wrong is said, and the exit status is argparse's."""
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``--plot`` without matplotlib is refused before anything is measured."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main(["--plot", "chart.png"])
    assert "pip install 'kvlink[bench]'" in capsys.readouterr().err


def test_the_command_line_loads_it_only_when_asked() -> None:
    """``kvlink bench`` hands its arguments over; the package and its command line load without the benchmark."""
    probe = "import sys, kvlink, kvlink.cli; print([name for name in sys.modules if 'benchmarks' in name])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]"]
    shown = subprocess.run(
        [sys.executable, "-m", "kvlink", "bench", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "usage: kvlink bench" in shown.stdout


def test_percentiles_are_measured_values() -> None:
    """The nearest rank; of one value all are that value."""
    assert percentile([5.0], 99) == 5.0
    assert percentile([float(value) for value in range(101)], 99) == 99.0
