"""Finding libucp: one copy, the right one, and words for what is missing. Each look is at a fresh process."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlink.transports.ucx.library import UcxReport, rdma_devices
from tests.support.ucx import need_ucx

pytestmark = pytest.mark.ucx


def run(program: str) -> Any:
    """Run a program in a fresh process and return the value that it prints as JSON, its only output."""
    text = f"import json, sys\nfrom kvlink.transports.ucx import library\n{program}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


@functools.cache
def fresh_look() -> dict[str, Any]:
    """Load UCX in a fresh process, then look at it, and ask for a second copy."""
    found: dict[str, Any] = run(
        """
import os

def caught():
    with open("/proc/self/status") as status:
        mask = next(line for line in status if line.startswith("SigCgt")).split()[1]
    return int(mask, 16) & 0xFFFFFFFF

before = caught()
first = library.load()
after = caught()
folder, name = first.path.rsplit("/", 1)
other = next(p for p in (f"{folder}/libucp.so", f"{folder}/libucp.so.0", "/nowhere/libucp.so")
             if os.path.realpath(p) != os.path.realpath(first.path))
try:
    library.load(other)
    refusal = ""
except library.FeatureNotEnabledError as exc:
    refusal = str(exc)
r = library.probe()
print(json.dumps({
    "signals": [before, after], "refusal": refusal, "copies": library._mapped_copies(),
    "report": [r.problem, r.version, r.path, r.configure_line, r.devices],
}))
"""
    )
    return found


def test_probe_finds_ucx_and_says_what_it_can_do() -> None:
    """The report has the version, the file, how it was built and the devices, with nothing printed by UCX."""
    need_ucx()
    problem, version, path, configure_line, devices = fresh_look()["report"]
    assert problem == ""
    assert version.count(".") == 2
    assert Path(path).exists()
    assert "--prefix=" in configure_line or "libucx" not in path
    assert ["self", "memory"] in devices


def test_a_second_copy_is_never_loaded() -> None:
    """Asking for another file after one is in use is refused with both paths, and the process keeps one copy."""
    need_ucx()
    assert "a second one" in fresh_look()["refusal"]
    assert len(fresh_look()["copies"]) == 1


def test_loading_takes_no_signals() -> None:
    """UCX takes signals for itself when it is loaded; kvlink gives them back."""
    need_ucx()
    before, after = fresh_look()["signals"]
    assert before == after


def test_a_library_that_is_in_the_process_is_used() -> None:
    """Where a package has loaded UCX before, kvlink uses that copy."""
    need_ucx()
    origin, copies = run(
        """
import ctypes
from kvlink.transports.ucx.library import _mapped_copies
import importlib.util
if importlib.util.find_spec("libucx"):
    import libucx
    kept = libucx.load_library()
else:
    kept = ctypes.CDLL(library.SONAME)
print(json.dumps([library.load().origin, _mapped_copies()]))
"""
    )
    assert origin == "in the process already"
    assert len(copies) == 1


def test_what_is_missing_is_named() -> None:
    """Without cffi or a libucp, or with a wrong path, the report says which, and the command that installs it."""
    reports = run(
        """
import importlib.util
find_spec = importlib.util.find_spec
reports = {}
for name in ("cffi", "libucx"):
    importlib.util.find_spec = lambda wanted, *rest: None if wanted == name else find_spec(wanted, *rest)
    library.SONAME = "libucp-of-nowhere.so.0"
    report = library.probe()
    reports[name] = [report.problem, report.remedy]
importlib.util.find_spec = find_spec
report = library.probe("/nowhere/libucp.so")
reports["path"] = [report.problem, report.remedy]
print(json.dumps(reports))
"""
    )
    has_cffi = importlib.util.find_spec("cffi") is not None
    for name, word in (("cffi", "cffi"), ("libucx", "no libucp"), ("path", "/nowhere/libucp.so")):
        problem, remedy = reports[name]
        assert word in problem or not has_cffi
        assert "pip install" in problem
        assert "pip install" in remedy


def test_rdma_devices_are_those_of_the_kernel(tmp_path: Path) -> None:
    """The devices are read from sysfs; a host without the folder has none."""
    assert rdma_devices(tmp_path / "missing") == ()
    (tmp_path / "mlx5_1").mkdir()
    (tmp_path / "mlx5_0").mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0", "mlx5_1")


def test_a_report_without_a_problem_is_usable() -> None:
    """`is_usable` follows `problem`, and transports are named once."""
    assert UcxReport().is_usable
    assert not UcxReport(problem="none").is_usable
