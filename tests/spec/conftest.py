"""Every test that asks for `transport` runs once over each of them, and one that asks for `world` in each of these.

``late`` is a transport whose completions come late, in another order, and after more than one try: the spec holds over
it as it does over any other. ``ucx afar`` is UCX as between hosts: state words are got, not mapped. All tests run over
shared memory and over UCX; some of each kind also run afar and over a late transport every time, and all of them do
with ``KVLINK_STRESS=1``.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.spec import harness
from tests.spec.harness import TRANSPORTS, WORLDS
from tests.support.ucx import need_ucx

_OFTEN: Final = (
    *("test_block_to_block", "test_slot_into_blocks", "test_concurrent_pulls", "test_ends_while_being_read"),
    *("test_push_blocks", "test_push_cache", "test_cancelled_writer", "test_deallocation_under_a_writer_and_a_reader"),
    *("test_blocks", "test_several_receivers", "test_cancelling_the_task", "test_between_processes"),
    *("test_released_on_delivery", "test_memory_of_a_running_pull"),
)
"""What runs afar and over a late transport each time: all kinds of pull, push and layer-wise push, and keys."""

_IN_TIME: Final = ("test_two_configs_to_one_cluster",)
"""What counts on one thing being done before another, or at once, which nobody promises of a late transport."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test its transports."""
    if "transport" not in metafunc.fixturenames:
        return
    has_all = os.environ.get("KVLINK_STRESS") == "1"
    is_often = metafunc.function.__name__ in _OFTEN
    names = (*TRANSPORTS, "ucx afar") if has_all or is_often else TRANSPORTS
    is_in_time = metafunc.function.__name__ in _IN_TIME or metafunc.module.__name__.endswith("test_short_way")
    may_be_late = (has_all or is_often) and not is_in_time
    late = [f"{name} late" for name in (TRANSPORTS if has_all else TRANSPORTS[:1])] if may_be_late else []
    metafunc.parametrize("transport", [*names, *late], indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name what moves the bytes; what is late about it is the harness's business."""
    name, _, how = str(request.param).partition(" ")
    if name == "ucx":
        need_ucx()
    monkeypatch.setenv("KVLINK_TRANSPORTS", name)
    if how == "late":
        monkeypatch.setenv(harness.LATE_VARIABLE, "1")  # also for the children
    elif how == "afar":
        monkeypatch.setattr("kvlink.transports.ucx.transport.map_state", lambda *_: None)
    return name


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> str:
    """Say whether the owner of the caches shares our process or has one of its own."""
    return str(request.param)
