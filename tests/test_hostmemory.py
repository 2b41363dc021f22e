"""What the host can still give."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlink.errors import OutOfMemoryError
from kvlink.memory.hostmemory import available_nbytes
from kvlink.memory.pool import Segment


def host(tmp_path: Path, group: str = "0::/a/b\n", **limits: tuple[str, str, str]) -> tuple[Path, Path]:
    """Make a ``/proc`` with 1 GiB available and a tree of control groups; limits are (max, current, inactive)."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 1048576 kB\n")
    (proc / "self" / "cgroup").write_text(group)
    for name, (most, current, inactive) in limits.items():
        folder = groups / name.replace("_", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text(current)
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return proc, groups


def test_the_host_sets_the_limit_where_no_group_does(tmp_path: Path) -> None:
    """MemAvailable counts, in bytes; a group without a limit does not."""
    assert available_nbytes(*host(tmp_path, a_b=("max\n", "77\n", "0"))) == 2**30


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    """The group of the process and those above it all count, with what could be dropped from the page cache."""
    proc, groups = host(tmp_path, a_b=("max", "0", "0"), a=("1000000", "900000", "50000"))
    assert available_nbytes(proc, groups) == 150_000


def test_nothing_known_means_no_limit(tmp_path: Path) -> None:
    """A kernel that says nothing refuses nothing."""
    assert available_nbytes(tmp_path / "none", tmp_path / "none") is None


def test_a_segment_larger_than_the_host_is_refused_before_anything_is_taken() -> None:
    """The error names what is needed and what there is; not one page was reserved for it."""
    before = available_nbytes()
    assert before is not None
    with pytest.raises(OutOfMemoryError, match="smaller pool") as caught:
        Segment.create("more than there is", before * 4)
    assert caught.value.needed >= before * 4
    assert 0 < caught.value.free < caught.value.needed


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    """A container of a host with version 1 groups is not told of a pool that would get it killed."""
    proc, groups = host(tmp_path, group="12:cpu:/x\n9:memory,pids:/box\n0::/\n")
    for folder, limit in (("memory", 2**63 - 4096), ("memory/box", 700_000)):
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (groups / folder / "memory.usage_in_bytes").write_text("200000\n")
        (groups / folder / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 1000\n")
    assert available_nbytes(proc, groups) == 501_000
