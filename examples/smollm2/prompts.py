"""What the demonstration asks the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class Prompt(NamedTuple):
    """Some words to be continued as they are, or a question to be answered in the model's own chat form."""

    text: str
    is_question: bool

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return what the model is given."""
        if not self.is_question:
            return tokenizer.encode(self.text)
        return tokenizer.encode(f"<|im_start|>user\n{self.text}<|im_end|>\n<|im_start|>assistant\n")


# Picked because nowhere in their answers do the two likeliest tokens come closer than 0.06 in logits, while the order
# of sums moves a logit by 0.00004 in float32: the tokens are the same with any BLAS.
PROMPTS: Final = (
    Prompt("The capital of France is", is_question=False),
    Prompt("Once upon a time", is_question=False),
    Prompt(
        "My cat is called Biscuit. She is four years old and sleeps all day. What is my cat called?", is_question=True
    ),
    Prompt(
        "The small harbour town of Orrin Bay lies where the river Tarn meets the sea. In spring its boats go out for "
        "herring, in summer for mackerel, and in winter they stay ashore to be mended. The lighthouse on the cliff was "
        "built in 1874 by Hanna Lindqvist, who kept its lamp for thirty-one years. Her daughter ran the school, and "
        "her son sailed the mail boat to the islands every Tuesday. When was the lighthouse built?",
        is_question=True,
    ),
)
