"""Bytes that say where they come from.

A test cache is filled with 16-byte records. Each names the cluster that wrote it, which life of the cluster, which
cache of that life, the tensor, the block, and its own place in the block. So a byte that is wrong after a transfer is
not only found: the record around it tells which block it belongs to, or that nobody ever wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_RECORD = np.dtype(
    [
        ("magic", "<u2"),
        ("cluster", "u1"),
        ("life", "u1"),
        ("cache", "<u2"),
        ("tensor", "<u2"),
        ("block", "<u4"),
        ("place", "<u4"),
    ]
)
_MAGIC = 0xC0DE

Tensors = Sequence[NDArray[Any]]


class Stamp(NamedTuple):
    """Who wrote a cache: the `cache`-th one of the `life`-th life of a cluster."""

    cluster: int
    life: int
    cache: int

    def __str__(self) -> str:
        return f"cluster {self.cluster}, life {self.life}, cache {self.cache}"


def block_bytes(stamp: Stamp, tensor: int, blocks: Sequence[int], nbytes: int) -> NDArray[np.uint8]:
    """Return what `blocks` of one tensor hold after `fill`: shape ``(len(blocks), nbytes)``, uint8."""
    num_records = -(-nbytes // _RECORD.itemsize)
    records = np.zeros((len(blocks), num_records), _RECORD)
    records["magic"] = _MAGIC
    records["cluster"], records["life"], records["cache"] = stamp
    records["tensor"] = tensor
    records["block"] = np.asarray(blocks, np.uint32)[:, np.newaxis]
    records["place"] = np.arange(num_records, dtype=np.uint32)
    return records.view(np.uint8)[:, :nbytes]


def rows(tensor: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a tensor as bytes, one row per block; no copy."""
    return tensor.reshape(tensor.shape[0], -1).view(np.uint8)


def fill(tensors: Tensors, stamp: Stamp, blocks: Sequence[int] | None = None) -> None:
    """Write the pattern of `stamp` into `blocks` (None: all) of every tensor."""
    for index, tensor in enumerate(tensors):
        target = rows(tensor)
        chosen = range(len(target)) if blocks is None else blocks
        target[list(chosen)] = block_bytes(stamp, index, chosen, target.shape[1])


def faults(
    tensors: Tensors,
    stamp: Stamp,
    blocks: Sequence[int] | None = None,
    *,
    src_blocks: Sequence[int] | None = None,
    src_tensor: int = 0,
) -> str | None:
    """Say in words which bytes are not those that `stamp` wrote; None when all are right.

    Args:
        tensors: those to look at.
        blocks: of them, None for all.
        src_blocks: whose pattern ``blocks[i]`` must hold; None for the same numbers.
        src_tensor: the tensor whose pattern ``tensors[0]`` must hold; the others follow.
    """
    for index, tensor in enumerate(tensors):
        found = rows(tensor)
        chosen = list(range(len(found)) if blocks is None else blocks)
        source = chosen if src_blocks is None else list(src_blocks)
        assert len(source) == len(chosen)
        expected = block_bytes(stamp, src_tensor + index, source, found.shape[1])
        is_wrong = found[chosen] != expected
        if is_wrong.any():
            row, column = map(int, np.argwhere(is_wrong)[0])
            return (
                f"{int(is_wrong.any(axis=1).sum())} of {len(chosen)} blocks of tensor {index} are wrong, "
                f"{int(is_wrong.sum())} bytes; first byte {column} of block {chosen[row]}, which should hold {stamp}, "
                f"tensor {src_tensor + index}, block {source[row]}, and holds {describe(found[chosen[row]], column)}"
            )
    return None


def describe(row: NDArray[np.uint8], column: int) -> str:
    """Say whose the byte at `column` of a block is."""
    start = column - column % _RECORD.itemsize
    raw = row[start : start + _RECORD.itemsize].tobytes()
    if not any(raw):
        return "zeros: nobody wrote there"
    if len(raw) < _RECORD.itemsize:
        return f"{raw.hex()}, the end of a block"
    record = np.frombuffer(raw, _RECORD)[0]
    if record["magic"] != _MAGIC:
        return f"{raw.hex()}: not a test pattern"
    stamp = Stamp(int(record["cluster"]), int(record["life"]), int(record["cache"]))
    return f"{stamp}, tensor {record['tensor']}, block {record['block']}, record {record['place']} of it"


def read_stamp(tensor: NDArray[Any], block: int) -> Stamp:
    """Return who wrote the first record of a block."""
    record = np.frombuffer(rows(tensor)[block][: _RECORD.itemsize].tobytes(), _RECORD)[0]
    assert record["magic"] == _MAGIC, describe(rows(tensor)[block], 0)
    return Stamp(int(record["cluster"]), int(record["life"]), int(record["cache"]))


def expect(
    tensors: Tensors,
    stamp: Stamp,
    blocks: Sequence[int] | None = None,
    *,
    src_blocks: Sequence[int] | None = None,
    src_tensor: int = 0,
) -> None:
    """Fail with `faults` in words."""
    text = faults(tensors, stamp, blocks, src_blocks=src_blocks, src_tensor=src_tensor)
    if text is not None:
        raise AssertionError(text)
