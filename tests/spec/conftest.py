"""Every test that asks for `transport` runs once over each of them, and one that asks for `world` in each of these."""

from __future__ import annotations

import pytest

from tests.spec.harness import TRANSPORTS, WORLDS


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Name what moves the bytes."""
    return str(request.param)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> str:
    """Say whether the owner of the caches shares our process or has one of its own."""
    return str(request.param)
