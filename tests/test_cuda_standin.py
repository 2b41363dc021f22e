"""`tests/test_cuda.py` where there is no device: UCX's own cuda_ipc, over a stand-in for the CUDA driver.

The library is the real one, and so is every call of it; what a driver does is done by ``tests/support/standin_cuda.c``,
which the host's C compiler builds. Most of the tests run with ``KVLINK_STRESS=1`` only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.peer import PATHS
from tests.support.ucx import need_ucx

pytestmark = pytest.mark.ucx

ROOT = Path(__file__).parents[1]
OFTEN = ("from_device_to_device", "layer_wise", "what_ended", "what_the_driver_says")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in and return its folder; skip where there is a device, no UCX with CUDA, or no compiler."""
    need_ucx()
    from kvlink.transports.ucx.library import load

    if load().version < (1, 21, 0):
        pytest.skip("UCX moves device memory from 1.21 on")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a device: tests/test_cuda.py runs on it")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    source = ROOT / "tests" / "support" / "standin_cuda.c"
    flags = ("-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1")
    subprocess.run([compiler, *flags, "-o", library, source, "-lpthread", "-ldl"], check=True, timeout=60)
    (folder / "libnvidia-ml.so.1").symlink_to(library)
    return folder


def run(driver: Path, chosen: str, **environ: str) -> None:
    """Run tests of `tests/test_cuda.py` with the stand-in; none may fail, and none may be skipped."""
    path = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py", "-k", chosen],
        cwd=ROOT,
        env={**os.environ, **PATHS, "LD_LIBRARY_PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if "reaches no CUDA memory" in done.stdout:
        pytest.skip("this UCX was built without CUDA")
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
    assert "passed" in done.stdout


def test_what_moves_device_memory(driver: Path) -> None:
    """Pulls, pushes, layers, and a cache that ends in the middle, over UCX's cuda_ipc."""
    run(driver, " or ".join(OFTEN), STANDIN_DEVICES="2")


@pytest.mark.stress
@pytest.mark.skipif(os.environ.get("KVLINK_STRESS") != "1", reason="KVLINK_STRESS=1 runs it")
@pytest.mark.parametrize("delay_us", [0, 30])
def test_all_of_it(driver: Path, delay_us: int) -> None:
    """Every test, with copies that end at once and with late ones."""
    run(driver, "test", STANDIN_DEVICES="2", STANDIN_DELAY_US=str(delay_us))
