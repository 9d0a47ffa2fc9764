"""Training of a byte-pair tokenizer that encodes every text, because each single byte is among its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"


def byte_pairs(texts: Iterable[str], size: int, *, single_digits: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `texts`; the same texts give the same tokenizer.

    It has no post-processor, so nothing is added to a text. `END` ("<|endoftext|>") written out in a text becomes token
    0.

    Args:
        texts: Training texts; lone surrogates are replaced.
        size: Maximum number of tokens, at least the 257 of `END` (token 0) and the single bytes. Short texts give
            fewer.
        single_digits: Let no token combine a digit with any other character, not even with the space before it.
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
    # JSON may hold lone surrogates, which cannot be encoded
    encodable_texts = (text.encode(errors="replace").decode() for text in texts)
    tokenizer.train_from_iterator(encodable_texts, trainer)
    return tokenizer
