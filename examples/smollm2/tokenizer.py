"""Text to token ids and back: byte-level byte-pair encoding, made from a vocabulary and its merges alone."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer


class Tokenizer:
    """The tokenizer of a SmolLM2 model file.

    `tokens[i]` is the text of id ``i`` in the byte-level alphabet, a merge is two such texts with a space between, most
    frequent first; `control_tokens` (such as ``<|im_start|>``) are never split.

    Text is cut before merging: every digit stands alone, and the rest follows GPT-2's pattern. Source: this is what the
    file's pre-tokenizer name, "smollm", stands for.
    """

    def __init__(
        self, *, tokens: Sequence[str], merges: Sequence[str], control_tokens: Sequence[str], end_id: int
    ) -> None:
        self.end_id = end_id
        vocabulary = {token: index for index, token in enumerate(tokens)}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self._bpe = BpeTokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        self._bpe.add_special_tokens([AddedToken(token, normalized=False) for token in control_tokens])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; control tokens written out in it become their one id. Nothing is added in front."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, control tokens left out."""
        return self._bpe.decode(list(token_ids), skip_special_tokens=True)

    def new_text(self, token_ids: Sequence[int]) -> str:
        """Return what the last of `token_ids` adds to the text, for printing as it is made.

        One character may need several tokens; it comes out whole, with the last of them.
        """
        before, after = (self.decode(ids).rstrip("\ufffd") for ids in (token_ids[:-1], token_ids))
        return after[len(before) :]
