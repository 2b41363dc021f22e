"""How far the blocks of a held ticket are: nothing is filled twice, and whole means everything."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlink.checks import Tensors
from kvlink.transfers.heldtickets import Coverage

NUM_TENSORS, NUM_BLOCKS = 5, 4
PORTIONS = st.tuples(
    st.tuples(st.integers(0, NUM_TENSORS - 1), st.integers(1, NUM_TENSORS)).map(lambda pair: tuple(sorted(pair))),
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True),
    st.sampled_from(["placed", "missing", "moving"]),
)


@given(st.lists(PORTIONS, max_size=40))
def test_coverage(portions: list[tuple[tuple[int, int], list[int], str]]) -> None:
    """It agrees with a set of what is in place and one of what is on its way, whatever happens in whatever order."""
    coverage = Coverage(NUM_TENSORS, NUM_BLOCKS)
    placed: set[tuple[int, int]] = set()
    moving: set[tuple[int, int]] = set()
    for (start, stop), places, end in portions:
        tensors, chosen = Tensors(start, stop), np.array(places)
        cells = {(tensor, place) for tensor in range(start, stop) for place in places}
        is_free = cells.isdisjoint(placed | moving)
        assert coverage.begin(tensors, chosen) == is_free
        if is_free and end == "moving":
            moving |= cells
        elif is_free:
            coverage.end(tensors, chosen, is_placed=end == "placed")
            placed |= cells if end == "placed" else set()
        whole = [t for t in range(NUM_TENSORS) if all((t, place) in placed for place in range(NUM_BLOCKS))]
        found = [tensor for run in coverage.whole_tensors(Tensors(0, NUM_TENSORS)) for tensor in range(*run)]
        assert found == whole
        assert coverage.missing_tensors == [tensor for tensor in range(NUM_TENSORS) if tensor not in whole]
        assert coverage.is_whole == (len(whole) == NUM_TENSORS)


def test_reading_again_counts_once() -> None:
    """What is delivered twice, as reads may be, is in place once."""
    coverage = Coverage(2, 3)
    for places in ([0, 1], [1, 0], [1]):
        coverage.end(Tensors(0, 2), np.array(places), is_placed=True)
        assert not coverage.is_whole
    coverage.end(Tensors(0, 2), np.array([2, 0]), is_placed=True)
    assert coverage.is_whole
