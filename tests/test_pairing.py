"""The short way of small movements: which extents it moves, and when it leaves a request to the long way. Pure."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.checks import Tensors, check_block_array, few_blocks
from kvlink.errors import ParameterError
from kvlink.geometry import CacheGeometry, TensorRun
from kvlink.links.pairing import CacheHasEnded, Pairing, move_few
from kvlink.plan import FEW_BLOCKS, Extent, ExtentFields, plan_blocks
from kvlink.transports.base import Endpoint
from kvlink.wire import Found

BLOCK = 16
NUM_OURS, NUM_THEIRS = 9, 12
OURS = (TensorRun(0, 512, NUM_OURS * BLOCK + 64, 2), TensorRun(16, 0, NUM_OURS * BLOCK, 1))
THEIRS = (TensorRun(0, 1024, NUM_THEIRS * BLOCK, 1), TensorRun(1, 0, NUM_THEIRS * BLOCK + 32, 2))


class Recorder:
    """An endpoint that remembers extents; its word holds 7 for as many looks as it is told."""

    immediate_nbytes = 1 << 20

    def __init__(self, looks: int = 2) -> None:
        self.moved: list[ExtentFields] = []
        self._looks = looks

    def move(self, extent: ExtentFields) -> bool:
        """Remember."""
        self.moved.append(extent)
        return True

    def peek_word(self, word: int) -> int | None:
        """Look."""
        assert word == 3
        self._looks -= 1
        return 7 if self._looks >= 0 else 8


def pairing() -> Pairing:
    """Three tensors, in two runs on either side."""
    geometry = CacheGeometry(3, NUM_THEIRS, BLOCK, "uint8", None, True, THEIRS)
    found = Found(seq=1, cache_id=1, slot=0, geometry=geometry, word=3, generation=7, lease=0)
    return Pairing.of(found, OURS, THEIRS, 3, Tensors(0, 3))


def run(endpoint: Recorder, local: list[int], remote: list[int], *, is_push: bool = False) -> int:
    """Move."""
    quick = pairing().quick
    return move_few(cast(Endpoint, endpoint), endpoint.move, quick, local, remote, NUM_OURS, is_push=is_push)


numbers = st.lists(st.tuples(st.integers(-1, NUM_OURS), st.integers(-1, NUM_THEIRS)), max_size=8)


@given(numbers, st.booleans())
def test_extents_are_those_of_the_long_way(pairs: list[tuple[int, int]], is_push: bool) -> None:
    """Good numbers move exactly the extents that `plan_blocks` makes of them; of others nothing moves."""
    local, remote = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    endpoint = Recorder()
    try:
        mine = check_block_array("ours", local, NUM_OURS, is_unique=not is_push)
        peers = check_block_array("theirs", remote, NUM_THEIRS, is_unique=is_push)
    except ParameterError:
        assert run(endpoint, local, remote, is_push=is_push) == 0
        assert endpoint.moved == []
        return
    if not pairs:
        return  # the callers do not come here with nothing
    num_extents = run(endpoint, local, remote, is_push=is_push)
    expected = plan_blocks(OURS, THEIRS, mine, peers, BLOCK, is_push=is_push)
    assert [Extent(*extent) for extent in endpoint.moved] == list(expected)
    assert num_extents == len(expected)


def test_too_much_goes_the_long_way() -> None:
    """More than an endpoint moves at once is left alone, and so are lists that do not pair up."""
    endpoint = Recorder()
    endpoint.immediate_nbytes = 3 * BLOCK
    assert run(endpoint, [0, 1], [0, 1]) == 0
    assert run(endpoint, [0], [0, 1]) == 0
    assert endpoint.moved == []
    assert run(endpoint, [0], [0]) == 3


@pytest.mark.parametrize(("local", "remote"), [([4], [4]), ([4, 6], [4, 4])])
def test_the_word_is_looked_at_before_and_after(local: list[int], remote: list[int]) -> None:
    """A cache that has ended before is left alone; one that has ended since raises."""
    endpoint = Recorder(looks=0)
    assert run(endpoint, local, remote) == 0
    assert endpoint.moved == []
    endpoint = Recorder(looks=1)
    with pytest.raises(CacheHasEnded):
        run(endpoint, local, remote)
    assert endpoint.moved


def test_an_endpoint_may_decline() -> None:
    """What the endpoint does not do at once goes the long way, whole."""
    endpoint = Recorder()
    quick = pairing().quick
    assert move_few(cast(Endpoint, endpoint), lambda extent: False, quick, [0], [0], NUM_OURS, is_push=False) == 0


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        list(range(FEW_BLOCKS + 1)),
        range(3),
        [True],
        [1.0],
        [np.int64(1)],
        "1",
        1,
        None,
        {1},
        np.array([], np.int64),
        np.array([1.0]),
        np.array([[1]]),
        np.array(1),
        np.array([True]),
    ],
    ids=repr,
)
def test_what_is_not_plainly_a_few_blocks(blocks: Any) -> None:
    """Anything but 1 to 32 plain integers goes the long way, whose checks have names."""
    assert few_blocks(blocks) is None


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda blocks: np.array(blocks, np.uint16)])
def test_a_few_blocks(kind: Any) -> None:
    """Lists, tuples and arrays of integers become plain ints."""
    blocks = few_blocks(kind([3, 1]))
    assert blocks is not None
    assert list(blocks) == [3, 1]
    assert all(type(block) is int for block in blocks)
