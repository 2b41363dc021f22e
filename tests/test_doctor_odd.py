"""The doctor on odd machines: it always ends, never with a traceback, and what it says can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvlink.doctor.children import Answer, run_probes
from kvlink.doctor.command import examine, show
from kvlink.doctor.findings import State
from kvlink.doctor.host import Host
from tests.support.loops import eventually
from tests.support.peer import PATHS
from tests.test_doctor import PLAIN, WELL, host_of

NOT_LINUX: Final = """
    import ctypes, fcntl, os, select, socket
    for module, names in (
        (fcntl, ["F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW"]),
        (os, ["memfd_create", "MFD_CLOEXEC", "sched_getaffinity", "pidfd_open", "eventfd", "posix_fallocate"]),
        (socket, ["SO_PEERCRED"]),
        (select, ["epoll"]),
    ):
        for name in names:
            delattr(module, name)

    class Poor(ctypes.CDLL):
        def __getattr__(self, name):
            if name in ("process_vm_readv", "process_vm_writev", "prctl"):
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Poor
"""
"""Loaded by each process before anything else: what another system has not."""


def run(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python, with a module of `folder` before it."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *PATHS])},
        text=True,
        timeout=40,
        check=False,
        **{"capture_output": True, **options},
    )


def test_a_system_that_is_not_linux_is_told_so(tmp_path: Path) -> None:
    """`kvlink` can be imported, the doctor and ``info`` say what is missing with status 1, and a cluster is refused."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(NOT_LINUX))
    said = run(tmp_path, "-m", "kvlink", "doctor", "--json")
    found = {check["name"]: check for check in json.loads(said.stdout)["checks"]}
    assert "kvlink needs Linux" in found["pool-memory"]["found"]
    assert "this check failed" not in said.stdout
    assert (said.returncode, said.stderr) == (1, "")
    said = run(tmp_path, "-m", "kvlink", "info")
    assert "kvlink needs Linux" in said.stdout
    assert (said.returncode, said.stderr) == (1, "")
    program = """
        import anyio
        import kvlink as kv

        async def main():
            try:
                async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB"):
                    pass
            except kv.FeatureNotEnabledError as exc:
                print(exc)

        anyio.run(main)
    """
    said = run(tmp_path, "-c", textwrap.dedent(program))
    assert (said.stdout[:19], said.stderr) == ("kvlink needs Linux:", "")


def with_strange_cards(root: Path) -> None:
    """Write devices of names that nobody would choose."""
    folder = os.fsencode(root) + b"/sys/class/infiniband/"
    for name in (b"mlx5 0/ports/1", "ü:x/ports/²".encode(), b"\xff\xfe/ports/1", b"no port"):
        os.makedirs(folder + name)
        Path(os.fsdecode(folder + name + b"/state")).write_bytes(
            b"4: ACTIVE\xff\n" if b"\xff" in name else b"4: ACTIVE\n"
        )


def with_folders_for_files(root: Path) -> None:
    """Make folders of what should be files."""
    for name in PLAIN:
        (root / name).unlink()
        (root / name).mkdir()


def with_strange_numbers(root: Path) -> None:
    """Write digits that are no decimals, and numbers that nothing has."""
    (root / "proc/meminfo").write_text("MemAvailable: " + "9" * 40 + " kB\nHugePages_Total: 5\nHugePages_Free: ²\n")
    (root / "proc/self/limits").write_text("Max open files  0  0  files\nMax locked memory " + "9" * 20 + " x bytes\n")


def with_links_in_a_circle(root: Path) -> None:
    """Make files that lead to themselves."""
    (root / "proc/self/cgroup").unlink()
    (root / "proc/self/cgroup").symlink_to("cgroup")
    (root / "sys/class").symlink_to("class")


@pytest.mark.parametrize(
    "make", [with_strange_cards, with_folders_for_files, with_strange_numbers, with_links_in_a_circle]
)
def test_what_nobody_expects_of_a_kernel_is_no_reason_to_fail(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Every check answers, and both forms can be written."""
    host = host_of(tmp_path, PLAIN)
    make(tmp_path)
    diagnosis = examine(host, environ={}, probe=lambda probes: WELL)
    json.loads(json.dumps(diagnosis.as_json()))
    assert show(diagnosis).encode(errors="backslashreplace")
    assert not [found for found in diagnosis.findings if "this check failed" in found.found]


@pytest.mark.parametrize("facts", [{}, {"devices": None}, {**WELL["ucx"].facts, "devices": [[]]}])
def test_a_probe_that_answers_something_else_is_a_failed_check(tmp_path: Path, facts: dict[str, Any]) -> None:
    """What its answer means is not known: it is told as a check that failed, and so is what would carry a link."""
    answers = {name: Answer(facts) for name in WELL}
    diagnosis = examine(Host(tmp_path), environ={}, probe=lambda probes: answers)
    json.loads(json.dumps(diagnosis.as_json()))
    found = {finding.name: finding for finding in diagnosis.findings}
    assert found["ucx-library"].state is State.MISSING
    assert "this check failed" in found["ucx-library"].found
    assert not diagnosis.is_well


async def test_a_probe_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that starts a process and dies: that process is ended with the probe."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if sys.orig_argv[-1] == 'fork':\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(60)\n"
        f"    open({str(tmp_path / 'child')!r}, 'w').write(str(child))\n"
        "    os._exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_probes({"fork": ()}, timeout_s=1.0)["fork"].failure
    child = int((tmp_path / "child").read_text())

    def has_ended() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    await eventually(has_ended, "the process that the probe has started to end")


def test_a_process_that_no_signal_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sleeps in a device does not die of SIGKILL; the doctor does not wait for it."""

    started: list[subprocess.Popen[bytes]] = []

    def never(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait for ever"
        started.append(process)
        raise subprocess.TimeoutExpired("probe", timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", never)
        patch.setattr(subprocess.Popen, "communicate", never)
        assert "did not answer" in run_probes({"sockets": ()}, timeout_s=0.1)["sockets"].failure
    assert started[-1].wait(10)


@pytest.mark.parametrize(
    ("stdout", "status"), [("/dev/full", False), ("closed", False), ("nobody", True), ("ascii", True)]
)
def test_output_that_nobody_can_take_is_no_traceback(tmp_path: Path, stdout: str, status: bool) -> None:
    """A full disk or no standard output is a failure, a reader that has gone is none, and any name can be written."""
    program = "from kvlink.doctor.command import _say; import sys; sys.exit(not _say('\\udcff ü' * 100000))"
    if stdout == "ascii":
        said = run(tmp_path, "-X", "utf8=0", "-c", "import sys; sys.stdout.reconfigure(encoding='ascii'); " + program)
        assert said.stdout.startswith("\\udcff \\xfc")
    elif stdout == "closed":
        program = "import sys; sys.stdout = None; " + program
        said = run(tmp_path, "-c", program)
    elif stdout == "nobody":
        reader, writer = os.pipe()
        os.close(reader)
        said = run(tmp_path, "-c", program, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
    else:
        with open(stdout, "w") as full:
            said = run(tmp_path, "-c", program, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (said.returncode == 0, said.stderr) == (status, "")
