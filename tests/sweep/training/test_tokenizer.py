"""Text to tokens and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.training.tokenizer import TOKENIZERS, load_tokenizer


@pytest.mark.parametrize("text", ["", "a", "naïve — 你好\n\t\0", "🙂" * 3])
def test_bytes_are_utf8(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode(text)
    assert (tokens.dtype, tokens.tolist()) == (np.uint16, list(text.encode()))
    assert b"".join(tokenizer.token_bytes(int(t)) for t in tokens).decode() == text


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert load_tokenizer("bytes").encode("a\ud800b").tolist() == [97, 63, 98]


def test_end_of_text_of_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.eot, tokenizer.vocabulary, tokenizer.token_bytes(256)) == (256, 257, b"")
    assert TOKENIZERS["bytes"].vocabulary == 257


def test_unknown_name() -> None:
    with pytest.raises(SweepError, match="no tokenizer 'byte'; there are: bytes, gpt2"):
        load_tokenizer("byte")


def test_loaded_once() -> None:
    assert load_tokenizer("bytes") is load_tokenizer("bytes")


def test_gpt2(gpt2: Any) -> None:
    text = "Hello world, 12345!\n  naïve 🙂<|endoftext|>"
    tokens = gpt2.encode(text)
    assert tokens[:3].tolist() == [15496, 995, 11]
    assert tokens.dtype == np.uint16
    assert 50256 not in tokens, "text never makes the token that separates documents"
    assert b"".join(gpt2.token_bytes(int(t)) for t in tokens).decode() == text
    assert (gpt2.eot, gpt2.vocabulary, gpt2.token_bytes(50256)) == (50256, 50257, b"")
