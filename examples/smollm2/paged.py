"""A sequence whose keys and values lie in numbered blocks of memory that somebody else owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class PagedSequence:
    """Say where the keys and values of one sequence lie.

    `tensors` holds two arrays for each layer, K at ``2 * layer`` and V at ``2 * layer + 1``, each of shape
    (num_blocks, tokens_per_block, kv_heads, head_dim): the tensors of a kvlink cache as they are. Position ``p`` of the
    sequence is row ``p % tokens_per_block`` of block ``block_table[p // tokens_per_block]``; `length` positions are
    filled.

    Ownership: the arrays stay the caller's, and are written in place. Blocks outside `block_table` are never touched.
    """

    tensors: Sequence[NDArray[Any]]
    block_table: Sequence[int]
    length: int = 0

    @property
    def tokens_per_block(self) -> int:
        """Positions in one block."""
        return int(self.tensors[0].shape[1])

    def append(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Write keys and values, each (tokens, kv_heads, head_dim), behind the filled positions of a layer.

        `length` does not move: a model calls `advance` once, after its last layer.

        Raises:
            ValueError: the block table has no room for so many positions.
        """
        end = self.length + len(keys)
        room = len(self.block_table) * self.tokens_per_block
        if end > room:
            raise ValueError(f"{end} positions do not fit in {len(self.block_table)} blocks ({room} positions)")
        positions = np.arange(self.length, end)
        blocks = np.asarray(self.block_table)[positions // self.tokens_per_block]
        rows = positions % self.tokens_per_block
        self.tensors[2 * layer][blocks, rows] = keys
        self.tensors[2 * layer + 1][blocks, rows] = values

    def gather(self, layer: int, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return copies of the first `length` keys and values of a layer, each (length, kv_heads, head_dim)."""
        blocks = np.asarray(self.block_table[: blocks_for(length, self.tokens_per_block)])
        keys, values = (
            tensor[blocks].reshape(-1, *tensor.shape[2:])[:length]
            for tensor in (self.tensors[2 * layer], self.tensors[2 * layer + 1])
        )
        return keys, values

    def advance(self, count: int) -> None:
        """Count `count` more positions as filled."""
        self.length += count


def blocks_for(length: int, tokens_per_block: int) -> int:
    """Return how many blocks `length` positions need."""
    return -(-length // tokens_per_block)
