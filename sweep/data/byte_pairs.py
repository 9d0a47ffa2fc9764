"""A tokenizer of byte pairs made from text: every byte is among its tokens, so that it knows all texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"


def byte_pairs(texts: Iterable[str], size: int, *, single_digits: bool = False) -> Tokenizer:
    """One of `size` tokens at most, `END` the first of them. The same texts give the same tokenizer.

    With `single_digits` no token holds a digit and anything else, not even the space before it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    apart = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*apart, words]) if apart else words
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    # half a surrogate pair, which JSON may hold, has no bytes
    whole = (text.encode(errors="replace").decode() for text in texts)
    made.train_from_iterator(whole, trainer)
    return made
