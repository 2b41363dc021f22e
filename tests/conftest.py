"""After every test: no descriptor, thread, child process or mapping of kvlink's memory more than before it."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import pytest

from tests.support.leaks import holdings, new_since

_HAS_FAILED = pytest.StashKey[bool]()


def pytest_collection_finish() -> None:
    """Keep what is there before the first test out of the garbage collector: each test ends with a whole collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember how the test itself went."""
    report = yield
    if report.when == "call":
        item.stash[_HAS_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_leaked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what the process holds before and after the test."""
    before = holdings()
    yield
    if request.node.stash.get(_HAS_FAILED, False):
        return  # its traceback keeps everything alive
    leaked = new_since(before, within_s=3.0)
    if leaked:
        pytest.fail("the test leaves behind: " + "; ".join(leaked))
