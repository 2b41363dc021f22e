"""Checks of arguments: what is refused, how it is named, and what good input becomes."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.checks import (
    Tensors,
    check_block_array,
    check_blocks,
    check_geometry,
    check_layer_range,
    check_layer_width,
    check_layers,
    check_same_kind,
    check_same_length,
    check_same_tensors,
)
from kvlink.errors import MismatchError, ParameterError, ParameterTypeError, ParameterValueError, StatusCode
from kvlink.geometry import CacheGeometry, TensorRun, check_int

NUM_BLOCKS: Final = 8


class Block(IntEnum):
    FIRST = 1
    LAST = 7


# ---- check_blocks


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([0, 7, 3], [0, 7, 3]),
        ((2, 1), [2, 1]),
        (range(2, 8, 2), [2, 4, 6]),
        (range(3, 0, -1), [3, 2, 1]),
        (np.array([7, 0], np.int32), [7, 0]),
        (np.array([7, 0], np.uint64), [7, 0]),
        (np.array([5], np.int8), [5]),
        (np.arange(8)[::3], [0, 3, 6]),
        ([np.int64(4), 2], [4, 2]),
        ([np.uint8(4), np.int16(2)], [4, 2]),
        ([Block.FIRST, Block.LAST], [1, 7]),
        ([], []),
        ((), []),
        (range(0), []),
        (np.array([], np.int64), []),
        (np.array([]), []),  # numpy's own choice for nothing is float64
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_unique", [False, True])
def test_good_blocks_become_a_list_of_ints(blocks: Any, expected: list[int], is_unique: bool) -> None:
    """Lists, tuples, ranges and integer arrays of any width, empty ones too, become a list of plain ints."""
    numbers = check_blocks("dst_blocks", blocks, NUM_BLOCKS, is_unique=is_unique)
    assert numbers == expected
    assert type(numbers) is list
    assert all(type(number) is int for number in numbers)


def test_the_result_is_not_the_argument() -> None:
    """The caller may change its own list afterwards: the result is another one."""
    blocks = [1, 2]
    assert check_blocks("blocks", blocks, NUM_BLOCKS) is not blocks


@pytest.mark.parametrize(
    ("blocks", "error", "fragments"),
    [
        # a number that the cache has not
        ([0, 8], ParameterValueError, ["[1] is 8", "0 to 7"]),
        ([-1], ParameterValueError, ["[0] is -1", "0 to 7"]),
        ([3, 2, -5, 9], ParameterValueError, ["[2] is -5"]),
        (range(6, 10), ParameterValueError, ["[2] is 8"]),
        (range(2, -2, -1), ParameterValueError, ["[3] is -1"]),
        (np.array([1, 9], np.uint8), ParameterValueError, ["[1] is 9"]),
        (np.array([-3], np.int64), ParameterValueError, ["[0] is -3"]),
        (np.array([2**64 - 1], np.uint64), ParameterValueError, ["[0] is 18446744073709551615"]),
        ([2**70], ParameterValueError, [f"[0] is {2**70}"]),
        ([1, -(2**70)], ParameterValueError, [f"[1] is {-(2**70)}"]),
        ([np.int64(1), 2**70], ParameterValueError, ["[1]", str(2**70)]),
        ([np.int64(-1)], ParameterValueError, ["[0]", "-1"]),
        # no number
        ([True], ParameterTypeError, ["[0]", "True"]),
        ([0, False], ParameterTypeError, ["[1]", "False"]),
        ([np.True_], ParameterTypeError, ["[0]", "True"]),
        ([1.0], ParameterTypeError, ["[0]", "1.0"]),
        ([np.float64(2)], ParameterTypeError, ["[0]", "2.0"]),
        ([0, "1"], ParameterTypeError, ["[1]", "'1'"]),
        ([None], ParameterTypeError, ["[0]", "None"]),
        ([[1, 2]], ParameterTypeError, ["[0]", "[1, 2]"]),
        ([np.array([1])], ParameterTypeError, ["[0]", "array([1])"]),
        # no list
        (None, ParameterTypeError, ["None"]),
        (3, ParameterTypeError, ["3"]),
        ("012", ParameterTypeError, ["'012'"]),
        (b"\x00\x01", ParameterTypeError, [r"b'\x00\x01'"]),
        ({1, 2}, ParameterTypeError, ["{1, 2}"]),
        ({1: 2}, ParameterTypeError, ["{1: 2}"]),
        (iter([1]), ParameterTypeError, ["list_iterator"]),
        (np.int64(3), ParameterTypeError, ["3"]),
        # no 1-D array of integers
        (np.array([[1, 2]]), ParameterTypeError, ["2-D", "int64", "[[1, 2]]"]),
        (np.array(3), ParameterTypeError, ["0-D", "array(3)"]),
        (np.array([1.5]), ParameterTypeError, ["float64", "1.5"]),
        (np.array([1.0]), ParameterTypeError, ["float64", "1."]),
        (np.array([True]), ParameterTypeError, ["bool", "True"]),
        (np.array([1], object), ParameterTypeError, ["object"]),
        (np.array(["1"]), ParameterTypeError, ["<U1"]),
        (np.empty((0, 2), np.int64), ParameterTypeError, ["2-D"]),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, type) else value.__name__,
)
@pytest.mark.parametrize("is_unique", [False, True])
def test_bad_blocks_are_refused_by_name(blocks: Any, error: type, fragments: list[str], is_unique: bool) -> None:
    """Each bad list raises the error of its kind, which names the argument, the place in it, and the value."""
    with pytest.raises(error) as caught:
        check_blocks("dst_blocks", blocks, NUM_BLOCKS, is_unique=is_unique)
    text = str(caught.value)
    assert text.startswith("dst_blocks")
    for fragment in fragments:
        assert fragment in text
    assert isinstance(caught.value, ParameterError)
    assert isinstance(caught.value, TypeError if error is ParameterTypeError else ValueError)
    assert caught.value.status is StatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    ("blocks", "twice"),
    [
        ([1, 2, 1], 1),
        ((0, 0), 0),
        (np.array([5, 6, 7, 6], np.int32), 6),
        ([np.int64(4), 4], 4),
        ([3, 2, 3, 2], 3),
    ],
    ids=repr,
)
def test_a_destination_that_occurs_twice_is_refused(blocks: Any, twice: int) -> None:
    """Where numbers must differ the repeated one is named; where they need not, the same list is good."""
    with pytest.raises(ParameterValueError, match=rf"^dst_blocks has block {twice} twice"):
        check_blocks("dst_blocks", blocks, NUM_BLOCKS, is_unique=True)
    assert check_blocks("src_blocks", blocks, NUM_BLOCKS) == list(blocks)


@given(
    st.lists(st.one_of(st.integers(-2, 9), st.sampled_from([True, 1.5, None, "1", 2**70, np.int64(3)])), max_size=6),
    st.booleans(),
)
def test_blocks_are_good_exactly_when_all_of_them_are(blocks: list[Any], is_unique: bool) -> None:
    """A list passes if and only if each entry is an integer in range and, where asked, no two are equal."""
    is_good = all(type(b) in (int, np.int64) and 0 <= b < NUM_BLOCKS for b in blocks)
    is_good = is_good and not (is_unique and len(set(blocks)) < len(blocks))
    if is_good:
        assert check_blocks("blocks", blocks, NUM_BLOCKS, is_unique=is_unique) == blocks
    else:
        with pytest.raises(ParameterError, match=r"^blocks"):
            check_blocks("blocks", blocks, NUM_BLOCKS, is_unique=is_unique)


@given(
    st.one_of(
        st.lists(
            st.one_of(st.integers(-2, 9), st.sampled_from([True, 1.5, None, "1", 2**70, np.int64(3)])), max_size=6
        ),
        st.lists(st.integers(0, 9), max_size=6).map(lambda numbers: np.array(numbers, np.uint8)),
        st.lists(st.integers(0, 9), max_size=6).map(lambda numbers: np.array(numbers, np.uint64)),
        st.lists(st.integers(-2, 9), max_size=6).map(lambda numbers: np.array(numbers, np.int32)),
        st.sampled_from([np.ma.masked_array([1, 2], [False, True]), np.ma.masked_array([1, 2])]),
        st.sampled_from([np.array([2**64 - 1], np.uint64), np.array([1.0]), np.array([[1]]), range(5), range(-1, 3)]),
    ),
    st.booleans(),
)
def test_arrays_of_blocks_are_checked_as_lists_are(blocks: Any, is_unique: bool) -> None:
    """`check_block_array` gives the numbers of `check_blocks` as int64, or raises the same error with the same text."""
    try:
        expected = check_blocks("blocks", blocks, NUM_BLOCKS, is_unique=is_unique)
    except ParameterError as exc:
        with pytest.raises(type(exc), match=f"^{re.escape(str(exc))}$"):
            check_block_array("blocks", blocks, NUM_BLOCKS, is_unique=is_unique)
        return
    numbers = check_block_array("blocks", blocks, NUM_BLOCKS, is_unique=is_unique)
    assert numbers.dtype == np.int64
    assert numbers.ndim == 1
    assert numbers.tolist() == expected
    assert not isinstance(blocks, np.ndarray) or not np.shares_memory(numbers, blocks)


def test_no_block_fits_a_peer_that_has_not_been_asked_yet() -> None:
    """With 2**63 for "not known", every number of 63 bits passes and none above."""
    assert check_blocks("src_blocks", [2**63 - 1], 2**63) == [2**63 - 1]
    with pytest.raises(ParameterValueError):
        check_blocks("src_blocks", [2**63], 2**63)


def test_lists_of_unequal_length_are_refused_with_both_lengths() -> None:
    """Source and destination must pair up; the error has both names and lengths."""
    check_same_length([1, 2], [3, 4])
    check_same_length([], [])
    with pytest.raises(ParameterValueError, match=r"^src_blocks has 2 blocks and dst_blocks has 3"):
        check_same_length([1, 2], [3, 4, 5])


# ---- check_int, check_layer_width


@pytest.mark.parametrize("value", [True, False, np.True_, 1.0, np.float32(1), "1", None, [1], b"1", 1j], ids=repr)
def test_what_is_no_integer_is_a_type_error(value: object) -> None:
    """Booleans, floats, text and containers are no integers; the error names argument and value."""
    with pytest.raises(ParameterTypeError, match=rf"^num must be an integer, got {re.escape(repr(value))}$"):
        check_int("num", value, 0, 10)


@pytest.mark.parametrize("value", [-1, 11, 2**70, -(2**70), np.int64(11), np.int8(-1), np.uint64(2**64 - 1)])
def test_an_integer_outside_its_width_is_a_value_error(value: object) -> None:
    """The error names argument, range and value."""
    with pytest.raises(ParameterValueError, match=rf"^num must be in 0\.\.10, got {re.escape(repr(value))}$"):
        check_int("num", value, 0, 10)


@pytest.mark.parametrize("value", [0, 10, np.int64(3), np.uint8(10), Block.LAST])
def test_integers_in_range_become_plain_ints(value: Any) -> None:
    """The bounds are in range, and numpy's integers come back as int."""
    result = check_int("num", value, 0, 10)
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize("value", [0, -1, 2**32, True, 1.0, None])
def test_a_layer_has_at_least_one_tensor(value: object) -> None:
    """`tensor_num_per_layer` is a 32-bit integer of at least 1; the error names it."""
    with pytest.raises(ParameterError, match=r"^tensor_num_per_layer must be"):
        check_layer_width(value)


def test_good_layer_widths() -> None:
    """1 to 2**32 - 1 pass."""
    assert check_layer_width(1) == 1
    assert check_layer_width(np.int64(4)) == 4
    assert check_layer_width(2**32 - 1) == 2**32 - 1


# ---- check_layers


@pytest.mark.parametrize(
    ("layers", "width", "expected"),
    [
        (None, 2, Tensors(0, 12)),
        (None, 5, Tensors(0, 12)),  # no range, so nothing has to divide
        (range(0), 2, Tensors(0, 12)),
        (range(3, 3), 2, Tensors(0, 12)),
        (range(5, 2), 2, Tensors(0, 12)),
        (range(6), 2, Tensors(0, 12)),
        (range(1), 2, Tensors(0, 2)),
        (range(2, 5), 2, Tensors(4, 10)),
        (range(5, 6), 2, Tensors(10, 12)),
        (range(2, 5), 1, Tensors(2, 5)),
        (range(1, 2), 4, Tensors(4, 8)),
        (range(1), 12, Tensors(0, 12)),
    ],
)
def test_layers_become_tensors(layers: range | None, width: int, expected: Tensors) -> None:
    """Layer l is tensors ``l*width..(l+1)*width-1``; None and an empty range mean all (the spec, section 6.5)."""
    tensors = check_layers("src_layer_range", layers, 12, width)
    assert tensors == expected
    assert tensors.num == expected.stop - expected.start


@pytest.mark.parametrize(
    ("layers", "width", "error", "fragments"),
    [
        (range(7), 2, ParameterValueError, ["src_layer_range", "range(0, 7)", "layers 0 to 5"]),
        (range(6, 7), 2, ParameterValueError, ["src_layer_range", "range(6, 7)"]),
        (range(0, 6, 2), 2, ParameterValueError, ["src_layer_range", "step 1", "range(0, 6, 2)"]),
        (range(5, 0, -1), 2, ParameterValueError, ["src_layer_range", "range(5, 0, -1)"]),
        (range(-1, 2), 2, ParameterValueError, ["src_layer_range", "range(-1, 2)"]),
        (range(1), 5, ParameterValueError, ["tensor_num_per_layer", "5", "12"]),
        (range(2**70), 1, ParameterValueError, ["src_layer_range", str(2**70)]),
        ([0, 1], 2, ParameterTypeError, ["src_layer_range", "[0, 1]"]),
        ((0, 1), 2, ParameterTypeError, ["src_layer_range", "(0, 1)"]),
        (slice(0, 1), 2, ParameterTypeError, ["src_layer_range", "slice(0, 1, None)"]),
        (0, 2, ParameterTypeError, ["src_layer_range", "0"]),
        ([], 2, ParameterTypeError, ["src_layer_range", "[]"]),
        (False, 2, ParameterTypeError, ["src_layer_range", "False"]),
    ],
    ids=repr,
)
def test_bad_layers_are_refused_by_name(layers: Any, width: int, error: type, fragments: list[str]) -> None:
    """What is no range, has another step, begins below 0 or ends beyond the last layer is refused with its value."""
    with pytest.raises(error) as caught:
        check_layers("src_layer_range", layers, 12, width)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("layers", [None, range(0), range(5, 2), range(3, 3, -1), range(7), range(10**9, 10**9 + 1)])
def test_a_range_may_be_good_for_some_cache(layers: range | None) -> None:
    """Before the cache is known, any range of step 1 from 0 or later passes, and so does what means all layers."""
    check_layer_range("src_layer_range", layers)


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        (range(-1, 2), ParameterValueError),
        (range(0, 6, 2), ParameterValueError),
        (range(5, 0, -1), ParameterValueError),
        ([0, 1], ParameterTypeError),
        (0, ParameterTypeError),
        ("", ParameterTypeError),
        (False, ParameterTypeError),
    ],
    ids=repr,
)
def test_a_range_that_is_good_for_no_cache_is_refused(layers: object, error: type) -> None:
    """Another step, a start below 0 and what is no range are refused by name and value, whatever the cache."""
    with pytest.raises(error, match=r"^src_layer_range must ") as caught:
        check_layer_range("src_layer_range", layers)
    assert repr(layers) in str(caught.value)


# ---- do the two caches fit?


def geometry(**changes: Any) -> CacheGeometry:
    fields: dict[str, Any] = {
        "num_tensors": 4,
        "num_slots": 8,
        "slot_nbytes": 16,
        "data_type": "float32",
        "layout": None,
        "is_blocks": True,
        "runs": (TensorRun(0, 0, 128, 4),),
    }
    return CacheGeometry(**(fields | changes))


def test_caches_of_one_kind_fit() -> None:
    """Equal type, layout and block size pass, and a layout that one side leaves out fits any."""
    for ours, theirs in ((None, None), ("NHD", "NHD"), (None, "NHD"), ("NHD", None)):
        check_same_kind(geometry(layout=ours), geometry(layout=theirs), is_by_block=True)
    check_same_kind(geometry(), geometry(num_slots=3, num_tensors=9), is_by_block=True)
    check_same_kind(geometry(), geometry(slot_nbytes=32), is_by_block=False)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"data_type": "float16"}, ["data type", "float32", "float16"]),
        ({"layout": "HND"}, ["layout", "NHD", "HND"]),
        ({"slot_nbytes": 32}, ["bytes of a block", "16", "32"]),
    ],
    ids=["data type", "layout", "block bytes"],
)
def test_a_mismatch_has_the_field_and_both_values(changes: dict[str, Any], fragments: list[str]) -> None:
    """Caches that mean different things are refused, naming the field, our value and the peer's."""
    with pytest.raises(MismatchError) as caught:
        check_same_kind(geometry(layout="NHD"), geometry(**({"layout": "NHD"} | changes)), is_by_block=True)
    ours, theirs = fragments[1:]
    assert f"{fragments[0]} does not match: our cache has {ours}, the peer's has {theirs}" in str(caught.value)
    assert caught.value.status is StatusCode.LLM_PARAM_INVALID


def test_selections_of_different_size_do_not_fit() -> None:
    """Equally many tensors on both sides pass, wherever they are; else both numbers are named."""
    check_same_tensors(Tensors(0, 4), Tensors(8, 12))
    with pytest.raises(MismatchError, match=r"number of tensors does not match: 4 are selected .*, 2 of the peer's"):
        check_same_tensors(Tensors(0, 4), Tensors(0, 2))


# ---- what a peer says of its memory


@pytest.mark.parametrize(
    "runs",
    [
        (TensorRun(0, 0, 128, 4),),
        (TensorRun(0, 512, 128, 4),),  # ends with the last byte
        (TensorRun(0, 896, -128, 4),),
        (TensorRun(0, 384, -128, 4),),  # ends at byte 0
        (TensorRun(0, 0, 128, 2), TensorRun(1, 0, 128, 2)),
        (TensorRun(0, 0, 0, 1), TensorRun(1, 0, 128, 2), TensorRun(0, 896, 0, 1)),
    ],
    ids=repr,
)
def test_a_geometry_inside_of_the_peers_memory_passes(runs: tuple[TensorRun, ...]) -> None:
    """Runs forwards and backwards, up to the first and the last byte of a region."""
    check_geometry(geometry(runs=runs), {0: 1024, 1: 256}, peer=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": (TensorRun(0, 513, 128, 4),)},  # one byte too far
        {"runs": (TensorRun(0, 0, 300, 4),)},
        {"runs": (TensorRun(0, -1, 128, 4),)},
        {"runs": (TensorRun(0, 383, -128, 4),)},  # one byte too low
        {"runs": (TensorRun(0, 897, -128, 4),)},
        {"runs": (TensorRun(5, 0, 128, 4),)},  # no such region
        {"runs": (TensorRun(0, 0, 128, 3),)},  # too few
        {"runs": (TensorRun(0, 0, 128, 5),)},
        {"runs": (TensorRun(0, 0, 128, 6), TensorRun(0, 0, 128, -2))},
        {"runs": (TensorRun(0, 0, 128, 6), TensorRun(0, 0, -128, -2))},
        {"runs": (TensorRun(0, 0, 128, 4), TensorRun(0, 0, 128, 0))},
        {"runs": (TensorRun(0, 0, 128, 4), TensorRun(0, 0, -128, 0))},
        {"runs": ()},
        {"num_tensors": 0, "runs": ()},
        {"num_tensors": -1, "runs": (TensorRun(0, 0, 128, -1),)},
        {"num_slots": 0},
        {"num_slots": -1},
        {"num_slots": 2**62},
        {"slot_nbytes": 0},
        {"slot_nbytes": -16},
        {"num_slots": -8, "slot_nbytes": -16},
        {"slot_nbytes": 2**62},
        {"runs": (TensorRun(0, 2**63 - 1, 2**63 - 1, 4),)},
        {"runs": (TensorRun(0, 0, 128, 4),), "slot_nbytes": 2**63 - 1, "num_slots": 2**63 - 1},
    ],
    ids=repr,
)
def test_a_geometry_outside_of_the_peers_memory_is_refused(changes: dict[str, Any]) -> None:
    """A peer that describes bytes which it has not shared, or an impossible cache, is named and nothing is read."""
    with pytest.raises(ParameterError, match=r"^cluster 7 describes") as caught:
        check_geometry(geometry(**changes), {0: 1024, 1: 256}, peer=7)
    assert caught.value.peer == 7


RUNS = st.builds(TensorRun, st.integers(0, 2), st.integers(-20, 60), st.integers(-30, 30), st.integers(-1, 3))


@given(st.integers(-1, 6), st.integers(-1, 3), st.integers(-1, 8), st.lists(RUNS, max_size=3).map(tuple))
def test_an_accepted_geometry_touches_only_shared_bytes(
    num_tensors: int, num_slots: int, slot_nbytes: int, runs: tuple[TensorRun, ...]
) -> None:
    """Every byte of every tensor of an accepted description lies in its region; every such description is accepted."""
    regions = {0: 64, 1: 16}
    claimed = geometry(num_tensors=num_tensors, num_slots=num_slots, slot_nbytes=slot_nbytes, runs=runs)
    starts = [(region, offset + k * stride) for region, offset, stride, count in runs for k in range(max(0, count))]
    is_good = (
        min(num_tensors, num_slots, slot_nbytes) >= 1
        and all(run.num_tensors >= 1 for run in runs)
        and len(starts) == num_tensors
        and all(0 <= start <= regions.get(region, -1) - num_slots * slot_nbytes for region, start in starts)
    )
    if is_good:
        check_geometry(claimed, regions, peer=1)
    else:
        with pytest.raises(ParameterError):
            check_geometry(claimed, regions, peer=1)


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**62)), max_size=40))
def test_repeats_are_found_among_near_and_far_numbers(numbers: list[int]) -> None:
    """Whether they lie close together, and are marked, or far apart, and are sorted."""
    if len(set(numbers)) == len(numbers):
        assert check_block_array("blocks", numbers, 2**63, is_unique=True).tolist() == numbers
    else:
        with pytest.raises(ParameterError, match="blocks"):
            check_block_array("blocks", numbers, 2**63, is_unique=True)
