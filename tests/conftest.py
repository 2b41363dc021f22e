"""After every test: no descriptor, thread, child process or mapping of kvlink's memory more than before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.leaks import holdings, new_since


@pytest.fixture(autouse=True)
def nothing_is_leaked() -> Iterator[None]:
    """Compare what the process holds before and after the test."""
    before = holdings()
    yield
    leaked = new_since(before, within_s=3.0)
    if leaked:
        pytest.fail("the test leaves behind: " + "; ".join(leaked))
