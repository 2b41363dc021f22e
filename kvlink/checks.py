"""Checks of what callers hand in. Pure; each names the argument and the value, before anything has happened."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlink.errors import MismatchError, ParameterError, ParameterTypeError, ParameterValueError, shown
from kvlink.geometry import CacheGeometry, check_int
from kvlink.plan import FEW_BLOCKS, BlockArray

Blocks = Sequence[int] | NDArray[np.integer[Any]]
"""Block numbers: a list, tuple or range of ints, or a 1-D integer array."""


def check_blocks(name: str, blocks: Blocks, num_blocks: int, *, is_unique: bool = False) -> list[int]:
    """Return block numbers as a list of ints in ``0..num_blocks-1``.

    Args:
        name: the argument, for the error.
        is_unique: refuse a number that occurs twice: one of two sources would be lost.
    """
    numbers: list[int]
    if isinstance(blocks, np.ndarray):
        if blocks.ndim != 1 or (blocks.dtype.kind not in "iu" and blocks.size):
            raise ParameterTypeError(
                f"{name} must be a 1-D array of integers, got {blocks.ndim}-D of {blocks.dtype}: {shown(blocks)}"
            )
        numbers = blocks.tolist()
    elif isinstance(blocks, (list, tuple, range)):
        numbers = list(blocks)
    else:
        raise ParameterTypeError(f"{name} must be a list or a 1-D array of block numbers, got {shown(blocks)}")
    if len(numbers) == 1 and type(numbers[0]) is int and 0 <= numbers[0] < num_blocks:
        return numbers  # a third of what the rest costs: bench S1_4K
    if not set(map(type, numbers)) <= _INT:
        numbers = [check_int(f"{name}[{index}]", block, 0, 2**63 - 1) for index, block in enumerate(numbers)]
    if not numbers:
        return numbers
    if min(numbers) < 0 or max(numbers) >= num_blocks:
        index, block = next((i, b) for i, b in enumerate(numbers) if not 0 <= b < num_blocks)
        raise ParameterValueError(f"{name}[{index}] is {block}; the cache has blocks 0 to {num_blocks - 1}")
    if is_unique and len(set(numbers)) != len(numbers):
        seen: set[int] = set()
        for block in numbers:
            if block in seen:
                raise ParameterValueError(f"{name} has block {block} twice; one of the two sources would be lost")
            seen.add(block)
    return numbers


_INT = {int}


_DENSE: Final = 16
"""Numbers below so many times their count are marked in an array rather than sorted: a tenth of the time."""


def few_blocks(blocks: Blocks, most: int = FEW_BLOCKS) -> Sequence[int] | None:
    """Return 1 to `most` block numbers as plain ints, not yet compared with any limit; None for all else.

    Ownership: may be the caller's own list; it is good until the next await.
    """
    kind = type(blocks)
    if kind is np.ndarray:
        if blocks.ndim == 1 and 0 < len(blocks) <= most and blocks.dtype.kind in "iu":  # type: ignore[union-attr]  # an array
            return blocks.tolist()  # type: ignore[union-attr,no-any-return]  # an array
        return None
    if (kind is not list and kind is not tuple) or not 0 < len(blocks) <= most:
        return None
    for block in blocks:
        if type(block) is not int:
            return None
    return blocks  # type: ignore[return-value]  # a list or tuple of int


def check_block_array(name: str, blocks: Blocks, num_blocks: int, *, is_unique: bool = False) -> BlockArray:
    """Return a copy of block numbers, shape (n,); checks and raises as `check_blocks`, without a loop over blocks."""
    numbers: BlockArray
    is_masked = hasattr(blocks, "mask")  # what is masked out is no number
    if isinstance(blocks, np.ndarray) and blocks.ndim == 1 and blocks.dtype.kind in "iu" and not is_masked:
        numbers = blocks.astype(np.int64)  # of uint64 what is too large becomes negative, and is refused below
    elif isinstance(blocks, (list, tuple, range)) and set(map(type, blocks)) <= _INT:
        try:
            numbers = np.array(blocks, np.int64)
        except OverflowError:
            numbers = np.array([-1])
    else:
        return np.array(check_blocks(name, blocks, num_blocks, is_unique=is_unique), np.int64)
    if not len(numbers):
        return numbers
    limit = int(numbers.max()) + 1
    is_wrong = numbers.min() < 0 or limit > num_blocks
    if not is_wrong and is_unique:
        is_wrong = _has_repeats(numbers, limit)
    if is_wrong:
        check_blocks(name, blocks, num_blocks, is_unique=is_unique)  # says which
    return numbers


def _has_repeats(numbers: BlockArray, limit: int) -> bool:
    """Whether a number occurs twice; all are at least 0 and below `limit`."""
    if limit <= _DENSE * len(numbers):
        is_there = np.zeros(limit, dtype=bool)
        is_there[numbers] = True
        return int(np.count_nonzero(is_there)) < len(numbers)
    ordered = np.sort(numbers)
    return bool((ordered[1:] == ordered[:-1]).any())


def check_block_numbers(name: str, blocks: Blocks, num_blocks: int, *, is_unique: bool = False) -> Blocks:
    """Return a copy of block numbers, a list of ints or an array, whichever is faster; as `check_blocks`."""
    is_plain = isinstance(blocks, (list, tuple)) or (isinstance(blocks, np.ndarray) and blocks.ndim == 1)
    check = check_blocks if is_plain and len(blocks) <= FEW_BLOCKS else check_block_array
    return check(name, blocks, num_blocks, is_unique=is_unique)


def highest(numbers: Blocks) -> int:
    """Return the highest of some block numbers that have been checked."""
    return int(numbers.max()) if isinstance(numbers, np.ndarray) else max(numbers)


def check_size(size: object) -> int:
    """Return a number of bytes, or -1 for all that there is."""
    if isinstance(size, (int, np.integer)) and size == -1:
        return -1
    return check_int("size", size, 1, 2**63 - 1)


def check_same_length(src_blocks: Sized, dst_blocks: Sized) -> None:
    """Refuse lists that do not pair up."""
    if len(src_blocks) != len(dst_blocks):
        raise ParameterValueError(
            f"src_blocks has {len(src_blocks)} blocks and dst_blocks has {len(dst_blocks)}; they must pair up"
        )


class Tensors(NamedTuple):
    """Tensors ``start..stop-1`` of a cache."""

    start: int
    stop: int

    @property
    def num(self) -> int:
        """How many."""
        return self.stop - self.start


def check_layer_range(name: str, layers: object) -> None:
    """Refuse what is no layer range of any cache; before the cache itself, perhaps a peer's, is known."""
    if layers is None:
        return
    if not isinstance(layers, range):
        raise ParameterTypeError(f"{name} must be a range of layers or None, got {layers!r}")
    if layers and (layers.step != 1 or layers.start < 0):
        raise ParameterValueError(f"{name} must have step 1 and start at 0 or later, got {layers!r}")


def check_layers(name: str, layers: range | None, num_tensors: int, tensor_num_per_layer: int) -> Tensors:
    """Return the tensors of a layer range; None or an empty range means all. Source: the spec, section 6.5.

    Args:
        num_tensors: of the cache that the range is about.
        tensor_num_per_layer: consecutive tensors that make a layer.
    """
    check_layer_range(name, layers)
    if not layers:
        return Tensors(0, num_tensors)
    if num_tensors % tensor_num_per_layer:
        raise ParameterValueError(
            f"tensor_num_per_layer is {tensor_num_per_layer} and does not divide the cache's {num_tensors} tensors"
        )
    num_layers = num_tensors // tensor_num_per_layer
    if layers.stop > num_layers:
        raise ParameterValueError(f"{name} is {layers!r}; the cache has layers 0 to {num_layers - 1}")
    return Tensors(layers.start * tensor_num_per_layer, layers.stop * tensor_num_per_layer)


def check_layer_width(tensor_num_per_layer: object) -> int:
    """Return a checked `tensor_num_per_layer`."""
    return check_int("tensor_num_per_layer", tensor_num_per_layer, 1, 2**32 - 1)


def check_same_kind(local: CacheGeometry, remote: CacheGeometry, *, is_by_block: bool) -> None:
    """Refuse to move bytes between caches that mean different things; the error has the field and both values.

    Args:
        is_by_block: whole blocks are moved, so their sizes must be equal too.
    """
    for field, ours, theirs in (
        ("data type", local.data_type, remote.data_type),
        ("layout", local.layout, remote.layout),
        ("bytes of a block", local.slot_nbytes if is_by_block else 0, remote.slot_nbytes if is_by_block else 0),
    ):
        if ours != theirs and not (field == "layout" and None in (ours, theirs)):
            raise MismatchError(f"{field} does not match: our cache has {ours}, the peer's has {theirs}")


def check_same_tensors(local: Tensors, remote: Tensors) -> None:
    """Refuse selections of different numbers of tensors."""
    if local.num != remote.num:
        raise MismatchError(
            f"number of tensors does not match: {local.num} are selected of our cache, {remote.num} of the peer's"
        )


def check_geometry(geometry: CacheGeometry, region_nbytes: dict[int, int], *, peer: int) -> None:
    """Refuse a peer's description of a cache that points outside of what the peer has shared."""
    tensor_nbytes = geometry.num_slots * geometry.slot_nbytes
    if (
        geometry.num_tensors < 1
        or geometry.num_slots < 1
        or geometry.slot_nbytes < 1
        or sum(run.num_tensors for run in geometry.runs) != geometry.num_tensors
    ):
        raise ParameterError(f"cluster {peer} describes an impossible cache: {geometry}", peer=peer)
    for run in geometry.runs:
        last = run.offset + (run.num_tensors - 1) * run.stride
        if (
            run.num_tensors < 1
            or min(run.offset, last) < 0
            or max(run.offset, last) + tensor_nbytes > region_nbytes.get(run.region, 0)
        ):
            raise ParameterError(f"cluster {peer} describes a cache outside of its memory: {run}", peer=peer)
