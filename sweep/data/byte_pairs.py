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

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digit_splitters = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digit_splitters, byte_level]) if digit_splitters else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    # half a surrogate pair, which JSON may hold, has no bytes
    encodable_texts = (text.encode(errors="replace").decode() for text in texts)
    tokenizer.train_from_iterator(encodable_texts, trainer)
    return tokenizer
