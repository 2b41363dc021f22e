"""The examples' model: plain numpy over blocks that somebody else owns. Tiny random weights, no file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import smollm2
from smollm2.model import Floats, Layer, Weights

CONFIG = smollm2.ModelConfig(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4, rope_base=100.0, norm_epsilon=1e-5)
VOCABULARY, HIDDEN, INNER, NUM_BLOCKS, TOKENS_PER_BLOCK = 50, 12, 20, 8, 3
TOKEN_IDS = [7, 3, 3, 49, 0, 12, 31, 7, 8, 21, 40]


def random_weights() -> Weights:
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> Floats:
        return rng.normal(size=shape).astype(np.float32)

    width = CONFIG.num_heads * CONFIG.head_dim
    layers = [
        Layer(
            attention_norm=draw(HIDDEN),
            qkv=draw(width + 2 * CONFIG.num_kv_heads * CONFIG.head_dim, HIDDEN),
            attention_out=draw(HIDDEN, width),
            mlp_norm=draw(HIDDEN),
            gate_up=draw(2 * INNER, HIDDEN),
            down=draw(HIDDEN, INNER),
        )
        for _ in range(CONFIG.num_layers)
    ]
    return Weights(embedding=draw(VOCABULARY, HIDDEN), layers=layers, final_norm=draw(HIDDEN))


WEIGHTS = random_weights()
MODEL = smollm2.Llama(CONFIG, WEIGHTS)


def fresh_sequence(block_table: Sequence[int] = range(NUM_BLOCKS), *, fill: float = np.nan) -> smollm2.PagedSequence:
    """Return an empty sequence in blocks full of `fill`, so that a read of what was never written shows."""
    shape = CONFIG.cache_shape(NUM_BLOCKS, TOKENS_PER_BLOCK)
    tensors = [np.full(shape, fill, np.float32) for _ in range(CONFIG.num_tensors)]
    return smollm2.PagedSequence(tensors=tensors, block_table=block_table)


def slow_logits(token_ids: Sequence[int]) -> NDArray[np.float64]:
    """The same model written out head by head and token by token, in float64 and without any cache."""

    def norm(row: NDArray[Any], weight: Floats) -> NDArray[Any]:
        return np.asarray(row / np.sqrt(np.mean(row**2) + CONFIG.norm_epsilon) * weight)

    def turn(head: NDArray[Any], position: int) -> NDArray[Any]:
        steps = np.arange(CONFIG.head_dim // 2)
        angles = position * CONFIG.rope_base ** (-2.0 * steps / CONFIG.head_dim)
        pairs = (head[0::2] + 1j * head[1::2]) * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], axis=1).ravel()

    rows = [WEIGHTS.embedding[token_id].astype(np.float64) for token_id in token_ids]
    sharing = CONFIG.num_heads // CONFIG.num_kv_heads
    for layer in WEIGHTS.layers:
        heads = [(layer.qkv @ norm(row, layer.attention_norm)).reshape(-1, CONFIG.head_dim) for row in rows]
        for position in range(len(rows)):
            mixed = []
            for head in range(CONFIG.num_heads):
                key_head = CONFIG.num_heads + head // sharing
                query = turn(heads[position][head], position)
                scores = [query @ turn(heads[p][key_head], p) / CONFIG.head_dim**0.5 for p in range(position + 1)]
                shares = np.exp(scores) / np.exp(scores).sum()
                mixed.append(sum(shares[p] * heads[p][key_head + CONFIG.num_kv_heads] for p in range(position + 1)))
            rows[position] = rows[position] + layer.attention_out @ np.concatenate(mixed)
            gate, up = np.split(layer.gate_up @ norm(rows[position], layer.mlp_norm), 2)
            rows[position] = rows[position] + layer.down @ (gate / (1 + np.exp(-gate)) * up)
    return np.asarray(WEIGHTS.embedding @ norm(rows[-1], WEIGHTS.final_norm))


def test_prefill_computes_what_the_architecture_says() -> None:
    """One batched pass over blocks gives the logits of the model written out head by head."""
    logits = MODEL.prefill(TOKEN_IDS, fresh_sequence())
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, slow_logits(TOKEN_IDS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prefilled", [1, 2, 3, 4, 10])
def test_decoding_over_blocks_equals_a_full_recomputation(prefilled: int) -> None:
    """However many tokens come in the first call, the logits after each later one are those of a fresh prefill."""
    sequence = fresh_sequence()
    MODEL.prefill(TOKEN_IDS[:prefilled], sequence)
    for end in range(prefilled + 1, len(TOKEN_IDS) + 1):
        logits = MODEL.decode(TOKEN_IDS[end - 1], sequence)
        np.testing.assert_allclose(logits, MODEL.prefill(TOKEN_IDS[:end], fresh_sequence()), rtol=1e-4, atol=1e-4)
    assert sequence.length == len(TOKEN_IDS)


def test_a_prompt_may_be_prefilled_in_pieces() -> None:
    """A second prefill continues the sequence, also in the middle of a block."""
    sequence = fresh_sequence()
    MODEL.prefill(TOKEN_IDS[:5], sequence)
    logits = MODEL.prefill(TOKEN_IDS[5:], sequence)
    np.testing.assert_allclose(logits, MODEL.prefill(TOKEN_IDS, fresh_sequence()), rtol=1e-4, atol=1e-4)


def test_the_numbers_of_the_blocks_do_not_matter() -> None:
    """Blocks moved to other numbers, with the table to match, give bitwise the same logits."""
    source = fresh_sequence([0, 1, 2, 3])
    MODEL.prefill(TOKEN_IDS[:-1], source)
    moved = fresh_sequence([6, 2, 7, 0])
    for ours, theirs in zip(moved.tensors, source.tensors, strict=True):
        ours[moved.block_table] = theirs[source.block_table]
    moved.length = source.length
    np.testing.assert_array_equal(MODEL.decode(TOKEN_IDS[-1], moved), MODEL.decode(TOKEN_IDS[-1], source))


def test_the_last_token_may_be_run_again() -> None:
    """A decoder that has all positions but no logits steps back by one and runs the last token: same logits."""
    sequence = fresh_sequence()
    logits = MODEL.prefill(TOKEN_IDS, sequence)
    sequence.length -= 1
    np.testing.assert_allclose(MODEL.decode(TOKEN_IDS[-1], sequence), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_every_block_counts(block: int) -> None:
    """Wiping any one block of the prompt changes the logits."""
    sequence = fresh_sequence()
    MODEL.prefill(TOKEN_IDS[:-1], sequence)
    logits = MODEL.decode(TOKEN_IDS[-1], sequence)
    for tensor in sequence.tensors:
        tensor[block] = 0
    sequence.length -= 1
    assert np.abs(MODEL.decode(TOKEN_IDS[-1], sequence) - logits).max() > 1e-3


def test_only_blocks_of_the_table_are_written() -> None:
    """The model writes in place, into the blocks of its table and nowhere else."""
    sequence = fresh_sequence([5, 1, 4, 2], fill=-8.0)
    MODEL.prefill(TOKEN_IDS, sequence)
    for tensor in sequence.tensors:
        written = [block for block in range(NUM_BLOCKS) if (tensor[block] != -8).any()]
        assert written == [1, 2, 4, 5]
        assert (tensor[2, 2] == -8).all()  # position 11, behind the last token


def test_a_full_sequence_refuses_another_token() -> None:
    """Where the blocks have no room, nothing is counted as filled."""
    sequence = fresh_sequence([0, 1])
    MODEL.prefill(TOKEN_IDS[:6], sequence)
    with pytest.raises(ValueError, match=r"7 positions do not fit in 2 blocks \(6 positions\)"):
        MODEL.decode(1, sequence)
    assert sequence.length == 6


def test_no_token_is_refused() -> None:
    """There are no logits after nothing."""
    with pytest.raises(ValueError, match="at least one token"):
        MODEL.prefill([], fresh_sequence())


def test_the_tokenizer_gives_back_what_it_was_given() -> None:
    """Text survives, merges are used, digits stand alone, and a character of several tokens comes out whole."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    from smollm2.tokenizer import Tokenizer
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|im_start|>", "<|im_end|>", *alphabet, "at", "Ġc", "Ġcat", "12"]
    tokenizer = Tokenizer(
        tokens=tokens, merges=["a t", "Ġ c", "Ġc at", "1 2"], control_tokens=["<|im_start|>", "<|im_end|>"], end_id=1
    )
    text = "one cat, 12 日本\n"
    token_ids = tokenizer.encode(f"<|im_start|>{text}<|im_end|>")
    pieces = [tokens[token_id] for token_id in token_ids]
    assert pieces[:6] == ["<|im_start|>", "o", "n", "e", "Ġcat", ","]
    assert pieces[7:9] == ["1", "2"]
    assert token_ids[-1] == tokenizer.end_id
    assert tokenizer.decode(token_ids) == text
    printed = [tokenizer.new_text(token_ids[: end + 1]) for end in range(len(token_ids))]
    assert "".join(printed) == text
    assert {"日", "本"} < set(printed)


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is named, each with the command that installs it, and no other."""
    found = metadata.distributions

    def without_gguf(*, name: str) -> Any:
        return [] if name == "gguf" else ["there"]

    monkeypatch.setattr(metadata, "distributions", without_gguf)
    assert smollm2.missing_packages() == ["gguf is missing; install it with: pip install gguf"]
    monkeypatch.setattr(metadata, "distributions", lambda **_: ["there"])
    assert smollm2.missing_packages() == []
    monkeypatch.setattr(metadata, "distributions", found)
