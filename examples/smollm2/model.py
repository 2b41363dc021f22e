"""A small Llama in plain numpy that keeps its keys and values in blocks given from outside.

Theory of operation. One `forward` serves both phases: it takes some tokens that follow the filled positions of a
sequence, writes their keys and values into the sequence's blocks layer by layer, attends over everything filled so far,
and returns the logits of the last token. Prefill is a call with many tokens (one pass of matrix products under a causal
mask), decode a call with one. Rows are tokens, float32 throughout.

Grouped-query attention: the query heads are split into as many groups as there are key heads, and all the queries of
one group are stacked into one matrix, so that a layer needs one product for each key head however many query heads
share it.

Source: the architecture is Llama's (RMSNorm, rotary positions, SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .paged import PagedSequence

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    norm_epsilon: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and rotary positions turn pairs")

    @property
    def num_tensors(self) -> int:
        """Tensors of a cache: K and V of every layer."""
        return 2 * self.num_layers

    def cache_shape(self, num_blocks: int, tokens_per_block: int) -> tuple[int, int, int, int]:
        """Return the shape of each of them."""
        return (num_blocks, tokens_per_block, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer; every matrix is (outputs, inputs).

    `qkv` is the query, key and value matrix stacked, `gate_up` the gate and up matrix stacked: fewer, larger products.
    """

    attention_norm: Floats
    qkv: Floats
    attention_out: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All the weights of a model; `embedding` (vocabulary, hidden) serves as input and as output matrix."""

    embedding: Floats
    layers: Sequence[Layer]
    final_norm: Floats


class Llama:
    """A Llama that reads and writes the blocks of a `PagedSequence`.

    Calls for different sequences may run in different threads: the model itself holds only constants.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        half = config.head_dim // 2
        self._frequencies = config.rope_base ** (-np.arange(half) / half)

    def prefill(self, token_ids: Sequence[int], kv: PagedSequence) -> Floats:
        """Append tokens to the sequence; return the logits (vocabulary,) that follow the last one.

        A sequence that is filled already is continued, so a prompt may be given in pieces.
        """
        return self.forward(token_ids, kv)

    def decode(self, token_id: int, kv: PagedSequence) -> Floats:
        """Append one token to the sequence; return the logits (vocabulary,) that follow it."""
        return self.forward([token_id], kv)

    def forward(self, token_ids: Sequence[int], kv: PagedSequence) -> Floats:
        """Append at least one token to the sequence, layer by layer; return the logits (vocabulary,) after the last.

        Raises:
            ValueError: no token, or the sequence's blocks have no room; in the second case `kv.length` has not moved.
        """
        if not token_ids:
            raise ValueError("at least one token is needed")
        config, weights = self.config, self._weights
        count, end = len(token_ids), kv.length + len(token_ids)
        positions = np.arange(kv.length, end)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        is_hidden = np.arange(end) > positions[:, None]
        num_rotated = config.num_heads + config.num_kv_heads

        hidden = weights.embedding[np.asarray(token_ids)]
        for index, layer in enumerate(weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            heads = (normed @ layer.qkv.T).reshape(count, -1, config.head_dim)
            rotated = _rotate(heads[:, :num_rotated], cos, sin)
            kv.append(index, rotated[:, config.num_heads :], heads[:, num_rotated:])
            keys, values = kv.gather(index, end)
            attended = _attend(rotated[:, : config.num_heads], keys, values, is_hidden)
            hidden = hidden + attended @ layer.attention_out.T
            gate, up = np.split(self._norm(hidden, layer.mlp_norm) @ layer.gate_up.T, 2, axis=1)
            hidden = hidden + (_silu(gate) * up) @ layer.down.T
        kv.advance(count)
        last: Floats = weights.embedding @ self._norm(hidden[-1], weights.final_norm)
        return last

    def _norm(self, rows: Floats, weight: Floats) -> Floats:
        mean_square = np.mean(rows * rows, axis=-1, keepdims=True)
        normed: Floats = rows / np.sqrt(mean_square + np.float32(self.config.norm_epsilon)) * weight
        return normed


def _rotate(heads: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn each pair (2i, 2i + 1) of every head by its position's angle.

    Neighbours make a pair, not the two halves of a head: GGUF files of this architecture hold the rows of the query and
    key matrices in that order.
    """
    even, odd = heads[..., 0::2], heads[..., 1::2]
    turned = np.empty_like(heads)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned


def _attend(queries: Floats, keys: Floats, values: Floats, is_hidden: NDArray[np.bool_]) -> Floats:
    """Return each query's mean of the values, weighted by its softmax over the keys it may see.

    `queries` is (tokens, heads, head_dim), `keys` and `values` are (length, kv_heads, head_dim), `is_hidden` is
    (tokens, length); the result is (tokens, heads * head_dim).
    """
    count, num_heads, head_dim = queries.shape
    length, num_kv_heads = keys.shape[:2]
    grouped = queries.reshape(count, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    stacked = grouped.reshape(num_kv_heads, -1, head_dim)
    scores = (stacked @ keys.transpose(1, 2, 0)).reshape(num_heads, count, length) * np.float32(head_dim**-0.5)
    scores[:, is_hidden] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores.reshape(num_kv_heads, -1, length) @ values.transpose(1, 0, 2)
    joined: Floats = mixed.reshape(num_heads, count, head_dim).transpose(1, 0, 2).reshape(count, -1)
    return joined


def _silu(values: Floats) -> Floats:
    smooth: Floats = values / (np.float32(1) + np.exp(-values))
    return smooth
