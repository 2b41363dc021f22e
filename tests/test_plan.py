"""Plans: no byte of a request is lost, moved twice or added, and no extent is more than is needed.

Hypothesis makes requests; a loop over single bytes says what they mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlink.geometry import TensorRun, join_tensors, select_runs, tensor_at
from kvlink.memory.pool import Bytes
from kvlink.plan import (
    BlockNumbers,
    Extent,
    Extents,
    Piece,
    join_blocks,
    plan_blocks,
    regions_of,
    restage,
    scatter_slot,
    spread,
    total_nbytes,
)

Place = tuple[int, int]
"""``(region, offset)`` of a tensor."""
Memory = dict[int, Bytes]
Move = tuple[int, int, int, int]
"""One byte: from ``(remote region, offset)`` to ``(local region, offset)``; ours first."""


# ---- what plans mean, byte by byte


def places_of(runs: Sequence[TensorRun]) -> list[Place]:
    """Where each tensor begins, in order."""
    return [(region, offset + k * stride) for region, offset, stride, count in runs for k in range(count)]


def moves_of_pieces(local: Sequence[Place], remote: Sequence[Place], pieces: Sequence[Piece]) -> list[Move]:
    """Every byte that `pieces` move in each pair of tensors."""
    return [
        (region, base + local_offset + byte, peer_region, peer_base + remote_offset + byte)
        for (region, base), (peer_region, peer_base) in zip(local, remote, strict=True)
        for local_offset, remote_offset, nbytes in pieces
        for byte in range(nbytes)
    ]


def moves_of_blocks(
    local: Sequence[Place], remote: Sequence[Place], numbers: Sequence[tuple[int, int]], block_nbytes: int
) -> list[Move]:
    """Every byte of the request "block r of the peer's to or from block l of ours" in each pair of tensors."""
    return [
        (region, base + ours * block_nbytes + byte, peer_region, peer_base + theirs * block_nbytes + byte)
        for (region, base), (peer_region, peer_base) in zip(local, remote, strict=True)
        for ours, theirs in numbers
        for byte in range(block_nbytes)
    ]


def moves_of_extents(extents: Sequence[Extent]) -> list[Move]:
    """Every byte that `extents` move."""
    return [
        (
            extent.local_region,
            extent.local_offset + row * extent.local_stride + byte,
            extent.remote_region,
            extent.remote_offset + row * extent.remote_stride + byte,
        )
        for extent in extents
        for row in range(extent.num_rows)
        for byte in range(extent.nbytes)
    ]


def execute(extents: Sequence[Extent], local: Memory, remote: Memory) -> None:
    """Get the extents as a transport does: one strided numpy assignment each. numpy refuses what leaves its buffer."""
    for region, offset, stride, peer_region, peer_offset, peer_stride, nbytes, count in extents:
        shape = (count, nbytes)
        target = np.ndarray(shape, np.uint8, local[region], offset, (stride, 1))
        target[...] = np.ndarray(shape, np.uint8, remote[peer_region], peer_offset, (peer_stride, 1))


# ---- requests


@st.composite
def paired_numbers(draw: st.DrawFn, *, most: int = 10) -> list[tuple[int, int]]:
    """Pairs ``(ours, theirs)``, ours each once, in runs that follow each other often; in any order."""
    ours = draw(st.lists(st.integers(0, most - 1), unique=True, max_size=most))
    if draw(st.booleans()):
        shift = draw(st.integers(0, most))
        theirs = [number + shift for number in ours]
        for index in draw(st.lists(st.integers(0, most - 1), max_size=3)):
            if index < len(theirs):
                theirs[index] = draw(st.integers(0, 2 * most - 1))
    else:
        theirs = draw(st.lists(st.integers(0, 2 * most - 1), min_size=len(ours), max_size=len(ours)))
    return list(zip(ours, theirs, strict=True))


def numbers_of_ours(numbers: Sequence[tuple[int, int]]) -> list[int]:
    return [ours for ours, _ in numbers]


def numbers_of_theirs(numbers: Sequence[tuple[int, int]]) -> list[int]:
    return [theirs for _, theirs in numbers]


def fewest_pieces(numbers: Sequence[tuple[int, int]]) -> int:
    """How many blocks continue no other block of the request on both sides: no piece can begin anywhere else."""
    pairs = set(numbers)
    return sum((ours - 1, theirs - 1) not in pairs for ours, theirs in pairs)


class Layout(NamedTuple):
    """Tensors of one side: the runs that describe them, and how long their regions are."""

    runs: tuple[TensorRun, ...]
    region_nbytes: dict[int, int]


@st.composite
def layouts(draw: st.DrawFn, num_tensors: int, tensor_nbytes: int) -> Layout:
    """Tensors that do not overlap, in runs of any strides, backwards ones among them, in up to three regions."""
    lengths: list[int] = []
    while sum(lengths) < num_tensors:
        lengths.append(draw(st.integers(1, num_tensors - sum(lengths))))
    region_nbytes: dict[int, int] = {}
    runs = []
    for count in lengths:
        region = draw(st.integers(0, 2))
        stride = tensor_nbytes + draw(st.sampled_from([0, 0, 1, 5]))
        start = region_nbytes.get(region, 0) + draw(st.sampled_from([0, 0, 3]))
        span = (count - 1) * stride + tensor_nbytes
        region_nbytes[region] = start + span
        if draw(st.booleans()):
            runs.append(TensorRun(region, start, stride, count))
        else:
            runs.append(TensorRun(region, start + span - tensor_nbytes, -stride, count))
    return Layout(tuple(runs), region_nbytes)


@dataclass(frozen=True)
class Request:
    """Blocks to get, over all tensors of two layouts."""

    block_nbytes: int
    local: Layout
    remote: Layout
    numbers: list[tuple[int, int]]

    def plan(self) -> list[Extent]:
        pieces = join_blocks(numbers_of_ours(self.numbers), numbers_of_theirs(self.numbers), self.block_nbytes)
        return spread(self.local.runs, self.remote.runs, pieces)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    block_nbytes = draw(st.integers(1, 4))
    num_tensors = draw(st.integers(1, 6))
    most = 4
    numbers = draw(st.one_of(paired_numbers(most=most), st.just([(n, n) for n in range(most)])))
    # Ours may have more blocks than were asked for, and theirs are at least as many as the highest number.
    ours = max([most, *(number + 1 for number, _ in numbers)]) + draw(st.integers(0, 1))
    theirs = max([most, *(number + 1 for _, number in numbers)]) + draw(st.integers(0, 1))
    return Request(
        block_nbytes,
        draw(layouts(num_tensors, ours * block_nbytes)),
        draw(layouts(num_tensors, theirs * block_nbytes)),
        numbers,
    )


# ---- plan_blocks


@given(requests())
def test_plan_blocks_is_join_and_spread(wanted: Request) -> None:
    """The arrays' way makes the very extents of `join_blocks` and `spread`, in their order."""
    ours, theirs = (np.array(f(wanted.numbers), np.int64) for f in (numbers_of_ours, numbers_of_theirs))
    extents = plan_blocks(wanted.local.runs, wanted.remote.runs, ours, theirs, wanted.block_nbytes, few=0)
    assert isinstance(extents, Extents) or not wanted.numbers
    assert list(extents) == wanted.plan()
    assert plan_blocks(wanted.local.runs, wanted.remote.runs, ours, theirs, wanted.block_nbytes) == list(extents)
    assert len(extents) == len(wanted.plan())
    assert [extents[index] for index in range(len(extents))] == list(extents)
    assert list(extents[1:]) == list(extents)[1:]
    assert total_nbytes(extents) == total_nbytes(list(extents))
    assert not len(extents) or regions_of(extents) == regions_of(list(extents))
    assert all(type(extent) is Extent for extent in extents)


@given(requests())
def test_plan_blocks_of_a_push(wanted: Request) -> None:
    """A push is the pull of the other side, seen from here: there each of the peer's blocks occurs once."""
    ours, theirs = (np.array(f(wanted.numbers), np.int64) for f in (numbers_of_ours, numbers_of_theirs))
    pulled = plan_blocks(wanted.local.runs, wanted.remote.runs, ours, theirs, wanted.block_nbytes, few=0)
    pushed = plan_blocks(wanted.remote.runs, wanted.local.runs, theirs, ours, wanted.block_nbytes, is_push=True, few=0)
    few = plan_blocks(wanted.remote.runs, wanted.local.runs, theirs, ours, wanted.block_nbytes, is_push=True)
    assert few == list(pushed)
    assert [Extent(*extent[3:6], *extent[:3], *extent[6:]) for extent in pushed] == list(pulled)


# ---- join_blocks


@given(paired_numbers(), st.integers(1, 5))
def test_join_blocks_covers_the_request_exactly(numbers: list[tuple[int, int]], block_nbytes: int) -> None:
    """The pieces have every byte of the asked blocks once, and no other byte."""
    pieces = join_blocks(numbers_of_ours(numbers), numbers_of_theirs(numbers), block_nbytes)
    moved = moves_of_pieces([(0, 0)], [(0, 0)], pieces)
    assert sorted(moved) == sorted(moves_of_blocks([(0, 0)], [(0, 0)], numbers, block_nbytes))
    assert all(piece.nbytes > 0 for piece in pieces)


@given(paired_numbers(), st.integers(1, 5))
def test_join_blocks_makes_the_fewest_pieces(numbers: list[tuple[int, int]], block_nbytes: int) -> None:
    """There are as many pieces as there are blocks that continue no other asked block on both sides."""
    assert len(join_blocks(numbers_of_ours(numbers), numbers_of_theirs(numbers), block_nbytes)) == fewest_pieces(
        numbers
    )


@given(paired_numbers(), st.randoms(use_true_random=False))
def test_join_blocks_does_not_depend_on_the_order(numbers: list[tuple[int, int]], random: Any) -> None:
    """The same request in another order has the same pieces."""
    shuffled = list(numbers)
    random.shuffle(shuffled)
    plans = [join_blocks(numbers_of_ours(some), numbers_of_theirs(some), 8) for some in (numbers, shuffled)]
    assert sorted(plans[0]) == sorted(plans[1])


@given(paired_numbers())
def test_join_blocks_takes_arrays_and_lists(numbers: list[tuple[int, int]]) -> None:
    """Lists, tuples and integer arrays of any width mean the same, and offsets are plain ints."""
    ours, theirs = numbers_of_ours(numbers), numbers_of_theirs(numbers)
    expected = join_blocks(ours, theirs, 8)
    arrays: list[tuple[BlockNumbers, BlockNumbers]] = [
        (np.array(ours, np.int32), np.array(theirs, np.uint64)),
        (tuple(ours), np.array(theirs, np.int64)),
        (np.array(ours, np.uint8), theirs),
    ]
    for left, right in arrays:
        pieces = join_blocks(left, right, 8)
        assert pieces == expected
        assert all(type(field) is int for piece in pieces for field in piece)


def test_join_blocks_counts_bytes_beyond_32_bits() -> None:
    """Offsets and lengths of 64 bits are exact, also where the numbers come in narrow arrays."""
    block = 3 * 2**30
    pieces = join_blocks(np.array([7, 8], np.uint8), np.array([2**20, 2**20 + 1], np.int32), block)
    assert pieces == [Piece(7 * block, 2**20 * block, 2 * block)]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([], [], []),
        ([5], [2], [Piece(50, 20, 10)]),
        ([0, 1, 2], [4, 5, 6], [Piece(0, 40, 30)]),
        ([2, 0, 1], [6, 4, 5], [Piece(0, 40, 30)]),
        ([0, 1], [5, 4], [Piece(0, 50, 10), Piece(10, 40, 10)]),
        ([0, 2], [4, 5], [Piece(0, 40, 10), Piece(20, 50, 10)]),
        ([0, 1], [4, 4], [Piece(0, 40, 10), Piece(10, 40, 10)]),
        ([3, 4, 9, 10], [0, 1, 2, 3], [Piece(30, 0, 20), Piece(90, 20, 20)]),
    ],
)
def test_join_blocks_by_example(ours: list[int], theirs: list[int], expected: list[Piece]) -> None:
    """Neighbours on both sides are one piece, in any order; neighbours on one side only are not."""
    assert join_blocks(ours, theirs, 10) == expected


# ---- scatter_slot


@given(st.lists(st.integers(0, 9), unique=True, max_size=8), st.integers(1, 4), st.integers(0, 7), st.integers(0, 40))
@example([1, 3, 5, 7], 8, 0, 28)  # the spec, section 9.3: 7 numbers of 4 bytes into blocks of 2 numbers
@example([4, 5, 6, 7], 4, 3, 14)
def test_scatter_slot_lays_out_the_slot(blocks: list[int], block_nbytes: int, offset: int, nbytes: int) -> None:
    """Byte k of the slot lands at its place in the chunk it falls into, the tail in part; nothing else moves."""
    nbytes = min(nbytes, len(blocks) * block_nbytes)
    moved = moves_of_pieces([(0, 0)], [(0, 0)], scatter_slot(blocks, block_nbytes, offset, nbytes))
    assert sorted(moved) == sorted(
        (0, blocks[byte // block_nbytes] * block_nbytes + byte % block_nbytes, 0, offset + byte)
        for byte in range(nbytes)
    )


@given(st.lists(st.integers(0, 9), unique=True, max_size=8), st.integers(1, 4), st.integers(0, 40))
def test_scatter_slot_makes_the_fewest_pieces(blocks: list[int], block_nbytes: int, nbytes: int) -> None:
    """A piece ends only where the next block of the list is not the next block of memory."""
    nbytes = min(nbytes, len(blocks) * block_nbytes)
    used = blocks[: -(-nbytes // block_nbytes)]
    fewest = len(used) - sum(right == left + 1 for left, right in itertools.pairwise(used))
    pieces = scatter_slot(blocks, block_nbytes, 0, nbytes)
    assert len(pieces) == fewest
    assert all(piece.nbytes > 0 for piece in pieces)
    assert scatter_slot(np.array(blocks, np.int32), block_nbytes, 0, nbytes) == pieces


def test_scatter_slot_leaves_the_rest_of_the_last_block() -> None:
    """7 numbers of 4 bytes into blocks of 2: the tail of block 7 is not touched (the spec, section 9.3)."""
    assert scatter_slot([1, 3, 5, 7], 8, 100, 28) == [
        Piece(8, 100, 8),
        Piece(24, 108, 8),
        Piece(40, 116, 8),
        Piece(56, 124, 4),
    ]
    assert scatter_slot([1, 2, 3], 8, 100, 20) == [Piece(8, 100, 20)]


def test_scatter_slot_takes_no_more_blocks_than_it_needs() -> None:
    """Blocks beyond the bytes are left alone."""
    assert scatter_slot([4, 9, 2], 8, 0, 8) == [Piece(32, 0, 8)]
    assert scatter_slot([4, 9, 2], 8, 0, 0) == []
    assert scatter_slot([], 8, 0, 8) == []


# ---- restage


@given(paired_numbers(), st.integers(1, 3), st.integers(1, 3))
def test_restaged_pieces_have_the_bytes_of_the_touched_slots(
    numbers: list[tuple[int, int]], block_nbytes: int, blocks_per_slot: int
) -> None:
    """The slots are those that the pieces touch, once each and ascending; in their copies lies every byte as before."""
    slot_nbytes = block_nbytes * blocks_per_slot
    pieces = join_blocks(numbers_of_ours(numbers), numbers_of_theirs(numbers), block_nbytes)
    slots, moved = restage(pieces, slot_nbytes)
    wanted = moves_of_pieces([(0, 0)], [(0, 0)], pieces)
    assert slots == sorted({remote // slot_nbytes for _, _, _, remote in wanted})
    assert sorted(
        (0, local, 0, slots[staged // slot_nbytes] * slot_nbytes + staged % slot_nbytes)
        for _, local, _, staged in moves_of_pieces([(0, 0)], [(0, 0)], moved)
    ) == sorted(wanted)


def test_restage_by_example() -> None:
    """A piece from the middle of slot 7 to the middle of slot 9, and one inside of slot 2."""
    slots, moved = restage([Piece(0, 75, 20), Piece(100, 21, 3)], 10)
    assert slots == [2, 7, 8, 9]
    assert moved == [Piece(0, 15, 5), Piece(5, 20, 10), Piece(15, 30, 5), Piece(100, 1, 3)]
    assert restage([], 10) == ([], [])


# ---- spread


@settings(max_examples=300, deadline=None)
@given(requests())
def test_a_plan_moves_every_byte_of_the_request_once(wanted: Request) -> None:
    """The extents move every byte of every asked block of every tensor exactly once, and nothing else."""
    extents = wanted.plan()
    asked = moves_of_blocks(
        places_of(wanted.local.runs), places_of(wanted.remote.runs), wanted.numbers, wanted.block_nbytes
    )
    assert sorted(moves_of_extents(extents)) == sorted(asked)
    assert total_nbytes(extents) == len(asked)


@settings(max_examples=300, deadline=None)
@given(requests())
def test_executing_a_plan_equals_copying_byte_by_byte(wanted: Request) -> None:
    """Done as strided copies, a plan leaves exactly the bytes that a loop over single bytes leaves."""
    counter = itertools.count(1)
    remote = {
        region: np.array([next(counter) % 251 for _ in range(nbytes)], np.uint8)
        for region, nbytes in wanted.remote.region_nbytes.items()
    }
    local = {region: np.full(nbytes, 255, np.uint8) for region, nbytes in wanted.local.region_nbytes.items()}
    expected = {region: memory.copy() for region, memory in local.items()}
    for region, offset, peer_region, peer_offset in moves_of_blocks(
        places_of(wanted.local.runs), places_of(wanted.remote.runs), wanted.numbers, wanted.block_nbytes
    ):
        expected[region][offset] = remote[peer_region][peer_offset]
    execute(wanted.plan(), local, remote)
    for region, memory in expected.items():
        np.testing.assert_array_equal(local[region], memory)


@settings(max_examples=300, deadline=None)
@given(requests())
def test_a_plan_has_one_extent_per_piece_and_pair_of_runs(wanted: Request) -> None:
    """The number of extents is that of the pieces times that of the places where a run of either side ends."""
    ends = {end for runs in (wanted.local.runs, wanted.remote.runs) for end in itertools.accumulate(r[3] for r in runs)}
    event(f"{len(ends)} pairs of runs")
    assert len(wanted.plan()) == fewest_pieces(wanted.numbers) * len(ends)


@pytest.mark.parametrize("num_tensors", [1, 2, 60, 4000])
def test_a_block_over_all_tensors_of_a_pool_cache_is_one_extent(num_tensors: int) -> None:
    """On caches of one run each, the extents are as many as the pieces, whatever the number of tensors."""
    local, remote = (TensorRun(0, 512, 4096, num_tensors),), (TensorRun(0, 0, 8192, num_tensors),)
    pieces = [Piece(0, 64, 16), Piece(128, 32, 16)]
    assert spread(local, remote, pieces) == [
        Extent(0, 512, 4096, 0, 64, 8192, 16, num_tensors),
        Extent(0, 640, 4096, 0, 32, 8192, 16, num_tensors),
    ]


def test_whole_tensors_that_touch_become_one_row() -> None:
    """Where the rows touch on both sides, they are one contiguous row; on one side only, they stay rows."""
    whole = [Piece(0, 0, 64)]
    assert spread((TensorRun(1, 128, 64, 5),), (TensorRun(2, 0, 64, 5),), whole) == [Extent(1, 128, 0, 2, 0, 0, 320, 1)]
    (extent,) = spread((TensorRun(1, 128, 64, 5),), (TensorRun(2, 0, 65, 5),), whole)
    assert (extent.nbytes, extent.num_rows) == (64, 5)
    (extent,) = spread((TensorRun(1, 128, 64, 5),), (TensorRun(2, 512, -64, 5),), whole)
    assert (extent.nbytes, extent.num_rows) == (64, 5)


def test_no_pieces_make_no_extents() -> None:
    """An empty request is an empty plan."""
    assert spread((TensorRun(0, 0, 8, 3),), (TensorRun(0, 0, 8, 3),), []) == []
    assert total_nbytes([]) == 0


def test_spread_keeps_the_regions_apart() -> None:
    """Each extent has the regions of its own pair of runs: ours on the left, the peer's on the right."""
    local = (TensorRun(0, 0, 16, 1), TensorRun(1, 32, 16, 3))
    remote = (TensorRun(7, 0, 16, 2), TensorRun(8, 64, -16, 2))
    assert spread(local, remote, [Piece(1, 2, 4)]) == [
        Extent(0, 1, 16, 7, 2, 16, 4, 1),
        Extent(1, 33, 16, 7, 18, 16, 4, 1),
        Extent(1, 49, 16, 8, 66, -16, 4, 2),
    ]


# ---- select_runs, join_tensors

ANY_RUNS = st.lists(
    st.builds(TensorRun, st.integers(0, 2), st.integers(0, 1000), st.integers(-50, 50), st.integers(1, 5)),
    min_size=1,
    max_size=5,
).map(tuple)


@given(ANY_RUNS, st.lists(st.integers(0, 25), min_size=2, max_size=2))
def test_select_runs_is_a_slice_of_the_tensors(runs: tuple[TensorRun, ...], bounds: list[int]) -> None:
    """The chosen runs have exactly the tensors ``start..stop-1``, in order, and no run of the result is empty."""
    places = places_of(runs)
    start, stop = sorted(min(bound, len(places)) for bound in bounds)
    if start == stop:
        return
    chosen = select_runs(runs, start, stop)
    assert places_of(chosen) == places[start:stop]
    assert all(run.num_tensors > 0 for run in chosen)
    assert len(chosen) <= len(runs)


def test_select_runs_of_everything_is_the_same() -> None:
    """Choosing all tensors of a cache from a pool changes and copies nothing."""
    runs = (TensorRun(0, 512, 1024, 60),)
    assert select_runs(runs, 0, 60) is runs


PLACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12)), min_size=1, max_size=9)
STEADY_PLACES = ANY_RUNS.map(places_of)


@given(st.one_of(PLACES, STEADY_PLACES))
def test_join_tensors_keeps_every_tensor_in_its_place(places: list[Place]) -> None:
    """The runs name the given places, in the given order."""
    assert places_of(join_tensors(places)) == places


def is_one_run(places: Sequence[Place]) -> bool:
    """Whether one region and one stride describe these places."""
    gaps = {right[1] - left[1] for left, right in itertools.pairwise(places)}
    return len({region for region, _ in places}) == 1 and len(gaps) <= 1


@given(st.one_of(PLACES, STEADY_PLACES))
def test_join_tensors_makes_the_fewest_runs(places: list[Place]) -> None:
    """No division of the places into runs, of all that there are, has fewer."""
    fewest = [0]
    for end in range(1, len(places) + 1):
        fewest.append(1 + min(fewest[start] for start in range(end) if is_one_run(places[start:end])))
    assert len(join_tensors(places)) == fewest[-1]


def test_join_tensors_by_example() -> None:
    """A constant step forwards or backwards is one run; a lone tensor has stride 0; no tensors are no runs."""
    assert join_tensors([]) == ()
    assert join_tensors([(3, 7)]) == (TensorRun(3, 7, 0, 1),)
    assert join_tensors([(0, 0), (0, 512), (0, 1024)]) == (TensorRun(0, 0, 512, 3),)
    assert join_tensors([(0, 1024), (0, 512), (0, 0)]) == (TensorRun(0, 1024, -512, 3),)
    assert join_tensors([(0, 0), (1, 512)]) == (TensorRun(0, 0, 0, 1), TensorRun(1, 512, 0, 1))


@given(
    st.integers(1, 6), st.integers(0, 4), st.booleans(), st.integers(0, 40), st.integers(1, 5), st.integers(-10, 120)
)
def test_tensor_at_finds_the_tensor_that_has_a_byte(
    tensor_nbytes: int, gap: int, is_backwards: bool, offset: int, num_tensors: int, place: int
) -> None:
    """Every byte of every tensor is found with its distance from the tensor's first; bytes between are nobody's."""
    stride = (tensor_nbytes + gap) * (-1 if is_backwards else 1)
    run = TensorRun(0, offset, stride if num_tensors > 1 else 0, num_tensors)
    expected = [
        (index, place - start)
        for index, (_, start) in enumerate(places_of([run]))
        if 0 <= place - start < tensor_nbytes
    ]
    assert tensor_at(run, place, tensor_nbytes) == (expected[0] if expected else None)


@settings(max_examples=200, deadline=None)
@given(requests(), st.data())
def test_chosen_layers_move_and_no_others(wanted: Request, data: st.DataObject) -> None:
    """Selecting tensors on each side first moves the blocks between the k-th selected tensors, and nowhere else."""
    ours, theirs = places_of(wanted.local.runs), places_of(wanted.remote.runs)
    count = data.draw(st.integers(1, len(ours)))
    start, peer_start = (data.draw(st.integers(0, len(ours) - count)) for _ in range(2))
    pieces = join_blocks(numbers_of_ours(wanted.numbers), numbers_of_theirs(wanted.numbers), wanted.block_nbytes)
    extents = spread(
        select_runs(wanted.local.runs, start, start + count),
        select_runs(wanted.remote.runs, peer_start, peer_start + count),
        pieces,
    )
    asked = moves_of_blocks(
        ours[start : start + count],
        theirs[peer_start : peer_start + count],
        wanted.numbers,
        wanted.block_nbytes,
    )
    assert sorted(moves_of_extents(extents)) == sorted(asked)


def test_planning_does_not_write_to_its_arguments() -> None:
    """Arrays handed in as block numbers are left as they were, though a plan sorts them."""
    ours: NDArray[np.int64] = np.array([3, 1, 2])
    theirs: NDArray[np.int64] = np.array([5, 9, 4])
    join_blocks(ours, theirs, 16)
    assert ours.tolist() == [3, 1, 2]
    assert theirs.tolist() == [5, 9, 4]
