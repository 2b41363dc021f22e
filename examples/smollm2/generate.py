"""Greedy answers, made one token at a time without holding up the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from anyio import to_thread

from .model import Llama
from .paged import PagedSequence, blocks_for

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_TOKENS_PER_BLOCK: Final = 64


async def greedy(
    model: Llama, tokenizer: Tokenizer, *, token_ids: Sequence[int], sequence: PagedSequence, limit: int
) -> AsyncIterator[int]:
    """Append `token_ids` to `sequence`, then yield the likeliest next token, at most `limit` times.

    The answer ends before the model's own end token, and before a new line, so that a bare continuation is one line
    too.

    Every step runs in a worker thread. Cancellation: the step in hand is finished first, and its token is lost.
    """
    for _ in range(limit):
        logits = await to_thread.run_sync(model.forward, token_ids, sequence)
        token_id = int(logits.argmax())
        if token_id == tokenizer.end_id or "\n" in tokenizer.decode([token_id]):
            return
        yield token_id
        token_ids = [token_id]


async def write_answer(
    model: Llama, tokenizer: Tokenizer, *, token_ids: Sequence[int], sequence: PagedSequence, limit: int
) -> list[int]:
    """Print the greedy answer to `token_ids` word by word as it is made, and return its tokens."""
    answer: list[int] = []
    async for token_id in greedy(model, tokenizer, token_ids=token_ids, sequence=sequence, limit=limit):
        answer.append(token_id)
        print(tokenizer.new_text(answer), end="", flush=True)
    print()
    return answer


async def answer_alone(model: Llama, tokenizer: Tokenizer, *, token_ids: Sequence[int], limit: int) -> list[int]:
    """Return the greedy answer to a prompt made in this process alone, in arrays of its own: nothing is moved."""
    num_blocks = blocks_for(len(token_ids) + limit, _TOKENS_PER_BLOCK)
    shape = model.config.cache_shape(num_blocks, _TOKENS_PER_BLOCK)
    arrays = [np.zeros(shape, np.float32) for _ in range(model.config.num_tensors)]
    sequence = PagedSequence(tensors=arrays, block_table=range(num_blocks))
    steps = greedy(model, tokenizer, token_ids=token_ids, sequence=sequence, limit=limit)
    return [token_id async for token_id in steps]
