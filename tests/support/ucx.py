"""Whether this host has a UCX to test with, and why not."""

from __future__ import annotations

import functools

import pytest

from kvlink.errors import FeatureNotEnabledError


@functools.cache
def missing() -> str:
    """Return why there is no UCX here, empty where there is one."""
    from kvlink.transports.ucx.library import load

    try:
        load()
    except FeatureNotEnabledError as exc:
        return str(exc)
    return ""


def need_ucx() -> None:
    """Skip the test, naming the missing part, where there is no UCX."""
    reason = missing()
    if reason:
        pytest.skip(reason)
