"""What a cache looks like: data type, shape, and where its tensors lie.

A cache is `num_tensors` equal tensors. Dimension 0 of each is its *slots* (a contiguous cache, one per request) or its
*blocks* (a paged cache); both are `slot_nbytes` contiguous bytes. Where the tensors lie is a list of `TensorRun`: runs
of tensors at one constant stride. A cache carved from a pool is one run, so that a block over all of its tensors is a
single strided extent; memory that the caller owns may need several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvlink.errors import ParameterError, ParameterTypeError, ParameterValueError, shown


class Role(IntEnum):
    """What a cluster does. MIX may do whatever either of the others may. Source: the spec, sections 1.2 and 12."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(IntEnum):
    """Which pool a cache comes from. Without an accelerator DEVICE is the main pool and HOST the second one."""

    HOST = 0
    DEVICE = 1


class DataType(str, Enum):
    """Element types of the spec (section 1.2), and the 8-bit floats. `STRING` has no size: it cannot be allocated."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    FLOAT64 = "float64"
    STRING = "string"

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 0 for `STRING`."""
        return _ITEMSIZE[self]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of views on a cache of this type.

        bfloat16 and the 8-bit floats come from the package ``ml_dtypes`` where it is installed; else the views show
        the raw bits, as unsigned integers of the same width.
        """
        if self is DataType.STRING:
            raise ParameterError("data type 'string' has no fixed size and cannot be viewed")
        if self in _RAW_BITS:
            try:
                import ml_dtypes
            except ImportError:
                return np.dtype(_RAW_BITS[self])
            dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.value))
            return dtype
        plain: np.dtype[Any] = np.dtype(self.value)
        return plain


_RAW_BITS = {DataType.BFLOAT16: "uint16", DataType.FLOAT8_E4M3: "uint8", DataType.FLOAT8_E5M2: "uint8"}
_ITEMSIZE: dict[DataType, int] = {
    kind: 0 if kind is DataType.STRING else np.dtype(_RAW_BITS.get(kind, kind.value)).itemsize for kind in DataType
}

_UINT32_MAX = 2**32 - 1
_INT64_MAX = 2**63 - 1


def check_int(name: str, value: object, lowest: int, highest: int) -> int:
    """Return `value` as an int in ``lowest..highest``; refuse booleans, floats and anything that is no integer."""
    if type(value) is int and lowest <= value <= highest:
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ParameterTypeError(f"{name} must be an integer, got {shown(value)}")
    if not lowest <= value <= highest:
        raise ParameterValueError(f"{name} must be in {lowest}..{highest}, got {shown(value)}")
    return int(value)


_MAX_LAYOUT: Final = 256
"""It travels with every description of a cache."""


@dataclass(frozen=True, slots=True)
class CacheDesc:
    """Describe a cache to allocate or register.

    Args:
        num_tensors: how many equal tensors; K and V of layer ``l`` are tensors ``2*l`` and ``2*l + 1``.
        shape: of one tensor; ``shape[0]`` is the number of slots or blocks.
        data_type: of the elements; a `DataType` or its name.
        placement: which pool the memory comes from.
        layout: an optional tag of the caller for the order of the inner dimensions (``"NHD"``). Two caches that
            both carry a tag must carry the same one before data can flow.

    Source: the spec, section 1.3. Dimension 0 is always the slots, as in the spec's native code.
    """

    num_tensors: int
    shape: tuple[int, ...]
    data_type: DataType
    placement: Placement = Placement.DEVICE
    layout: str | None = None

    def __init__(
        self,
        num_tensors: int,
        shape: tuple[int, ...] | list[int],
        data_type: DataType | str,
        placement: Placement = Placement.DEVICE,
        *,
        layout: str | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "num_tensors", check_int("num_tensors", num_tensors, 1, _UINT32_MAX))
        if not isinstance(shape, (tuple, list)):
            raise ParameterTypeError(f"shape must be a tuple or list of integers, got {shown(shape)}")
        if not 1 <= len(shape) <= 31:
            raise ParameterValueError(f"shape must have 1 to 31 dimensions, got {len(shape)}")
        put(self, "shape", tuple(check_int(f"shape[{i}]", n, 1, _INT64_MAX) for i, n in enumerate(shape)))
        try:
            put(self, "data_type", DataType(data_type))
        except ValueError:
            known = ", ".join(kind.value for kind in DataType)
            raise ParameterValueError(f"data_type must be one of {known}; got {shown(data_type)}") from None
        if not isinstance(placement, Placement):
            raise ParameterTypeError(f"placement must be a Placement, got {placement!r}")
        put(self, "placement", placement)
        if layout is not None and not isinstance(layout, str):
            raise ParameterTypeError(f"layout must be a string or None, got {layout!r}")
        if layout is not None and not (layout.isprintable() and len(layout) <= _MAX_LAYOUT):
            raise ParameterValueError(f"layout is a short tag of printable characters, got {layout[:100]!r}")
        put(self, "layout", layout)
        if self.nbytes > _INT64_MAX:
            raise ParameterValueError(f"a cache of {self.nbytes} bytes is larger than any memory")

    @property
    def num_slots(self) -> int:
        """Slots of a contiguous cache, blocks of a paged one: ``shape[0]``."""
        return self.shape[0]

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self.shape) * self.data_type.itemsize

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot or block of one tensor."""
        return self.tensor_nbytes // self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.tensor_nbytes * self.num_tensors


class TensorRun(NamedTuple):
    """`num_tensors` consecutive tensors: the first at byte `offset` of `region`, each `stride` bytes after the last."""

    region: int
    offset: int
    stride: int
    num_tensors: int


class CacheGeometry(msgspec.Struct, frozen=True):
    """Where a cache lies and what it is made of: all that the other side needs to address it. Travels in look-ups."""

    num_tensors: int
    num_slots: int
    slot_nbytes: int
    data_type: str
    layout: str | None
    is_blocks: bool
    runs: tuple[TensorRun, ...]


def tensor_at(run: TensorRun, place: int, tensor_nbytes: int) -> tuple[int, int] | None:
    """Return which tensor of `run` has the byte at `place` of its region, and how far into it; None: none has."""
    distance = place - run.offset
    # The stride may be negative: tensors at descending addresses.
    index = 0 if run.stride == 0 else distance // run.stride if run.stride > 0 else -(-distance // run.stride)
    within = distance - index * run.stride
    return (index, within) if 0 <= index < run.num_tensors and 0 <= within < tensor_nbytes else None


def select_runs(runs: tuple[TensorRun, ...], start: int, stop: int) -> tuple[TensorRun, ...]:
    """Return the runs of tensors ``start..stop-1``: the same memory, cut at both ends."""
    if len(runs) == 1:  # every cache of a pool
        region, offset, stride, count = runs[0]
        if start == 0 and stop == count:
            return runs
        return (TensorRun(region, offset + start * stride, stride, stop - start),)
    chosen = []
    first = 0
    for region, offset, stride, count in runs:
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            chosen.append(TensorRun(region, offset + (low - first) * stride, stride, high - low))
        first += count
    return tuple(chosen)


def join_tensors(places: list[tuple[int, int]]) -> tuple[TensorRun, ...]:
    """Return the fewest runs, greedily, for tensors at these ``(region, offset)`` places, in order."""
    runs: list[TensorRun] = []
    for region, offset in places:
        if runs and runs[-1].region == region:
            last = runs[-1]
            gap = offset - (last.offset + (last.num_tensors - 1) * last.stride)
            if last.num_tensors == 1 or gap == last.stride:
                runs[-1] = TensorRun(region, last.offset, gap, last.num_tensors + 1)
                continue
        runs.append(TensorRun(region, offset, 0, 1))
    return tuple(runs)
