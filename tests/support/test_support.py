"""The harness itself: a check that cannot fail would be worse than none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.leaks import holdings, new_since
from tests.support.loops import every_loop
from tests.support.pattern import Stamp, expect, faults, fill
from tests.support.peer import PeerEndedError, spawn_peer

HERE = Stamp(1, 2, 3)


def tensors() -> list[Any]:
    """Return two filled tensors of four blocks."""
    made = [np.zeros((4, 100), np.uint8) for _ in range(2)]
    fill(made, HERE)
    return made


def test_a_filled_cache_has_no_faults() -> None:
    """Also where blocks are no whole number of records, and after blocks have moved."""
    made = tensors()
    assert faults(made, HERE) is None
    made[0][0], made[1][0] = made[0][3], made[1][3]
    assert faults(made, HERE, [0], src_blocks=[3]) is None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda made: made[1][2].__setitem__(17, 255), ("1 of 4 blocks of tensor 1", "1 bytes", "byte 17 of block 2")),
        (lambda made: made[0].__setitem__(1, made[0][3]), ("block 1,", "tensor 0, block 3, record 0 of it")),
        (lambda made: made[0].__setitem__(1, 0), ("block 1,", "zeros: nobody wrote there")),
        (lambda made: made[0].__setitem__(1, 7), ("block 1,", "not a test pattern")),
        (lambda made: fill(made, Stamp(1, 1, 3), [2]), ("block 2,", "cluster 1, life 1, cache 3")),
    ],
    ids=["one byte", "another block", "never written", "foreign", "another life"],
)
def test_a_wrong_byte_is_found_and_named(spoil: object, words: tuple[str, ...]) -> None:
    """The text says how many bytes are wrong, which is the first, and whose it is."""
    made = tensors()
    assert callable(spoil)
    spoil(made)
    with pytest.raises(AssertionError) as caught:
        expect(made, HERE)
    for word in words:
        assert word in str(caught.value)


def test_what_is_left_behind_is_seen() -> None:
    """A descriptor, a thread, a child: each is named, and gone from the list when it has gone."""
    before = holdings()
    fd = os.open(os.devnull, os.O_RDONLY)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="straggler")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        new = " ".join(new_since(before, within_s=0))
        assert f"descriptor {fd} (/dev/null)" in new
        assert "thread straggler" in new
        assert f"child {child.pid}" in new
    finally:
        os.close(fd)
        end.set()
        thread.join()
        child.communicate(b"\n")
    assert new_since(before, within_s=1) == []


@every_loop
async def test_a_child_that_dies_is_reported() -> None:
    """Whoever waits for a child that was killed learns it, and is not left waiting."""
    async with spawn_peer(1, pool="1MiB") as peer:
        pending = peer.start("block_loop", seconds=30)
        peer.kill()
        with pytest.raises(PeerEndedError, match="status -9"):
            await pending.result(within_s=10)


async def test_a_child_that_hangs_is_reported_with_its_stack() -> None:
    """A call that takes too long fails, shows where the child is, and the child is ended."""
    with pytest.raises(pytest.fail.Exception, match="block_loop"):
        async with spawn_peer(1, pool="1MiB") as peer:
            await peer.call("block_loop", seconds=30, within_s=0.3)
    assert not peer.is_alive
