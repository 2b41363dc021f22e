"""What the bytes of a block must be: a function of who wrote it, in which tensor and block it lies, and the place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, so that different words stay different
_STAMP: Final = np.uint64(0xBF58476D1CE4E5B9)

Tensors = Sequence[NDArray[Any]]
"""Each of shape ``(blocks, nbytes of a block)``, uint8, whole 8-byte words."""


def block(writer: int, tensor: int, number: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes that `writer` puts into one block: 8-byte words, all different from each other.

    Args:
        writer: who, below 2**16.
    """
    with np.errstate(over="ignore"):
        stamp = np.uint64((writer << 40) ^ (tensor << 32) ^ number) * _STAMP
        words: NDArray[np.uint64] = np.arange(nbytes // 8, dtype=np.uint64) * _SPREAD + stamp
    return words.view(np.uint8)


def fill(tensors: Tensors, writer: int) -> None:
    """Write the pattern of `writer` into every block."""
    for index, tensor in enumerate(tensors):
        for number in range(len(tensor)):
            tensor[number] = block(writer, index, number, tensor.shape[1])


def count_wrong(tensors: Tensors, writer: int, blocks: Sequence[int], sources: Sequence[int]) -> int:
    """Return how many of `blocks`, over all tensors, are not what `writer` put into the `sources` beside them."""
    return sum(
        not np.array_equal(tensor[here], block(writer, index, there, tensor.shape[1]))
        for index, tensor in enumerate(tensors)
        for here, there in zip(blocks, sources, strict=True)
    )
