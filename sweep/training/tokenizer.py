"""Tokenizers behind one interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import MachineError, SweepError

TokenArray = np.ndarray
"""One-dimensional, uint16."""


class Tokenizer(Protocol):
    """Text to token ids and back. `eot` separates documents and is never produced by `encode`."""

    name: str
    vocabulary: int
    eot: int

    def encode(self, text: str) -> TokenArray:
        """Token ids of `text`, uint16."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for `eot`."""


class Bytes:
    """UTF-8 bytes; id 256 ends a text."""

    name = "bytes"
    vocabulary = 257
    eot = 256

    def encode(self, text: str) -> TokenArray:
        """Token ids of `text`, uint16."""
        # JSON may hold half a surrogate pair, which UTF-8 has no bytes for: it becomes a question mark
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for `eot`."""
        return b"" if token == self.eot else bytes([token])


class GPT2:
    """GPT-2's byte-pair encoding through tiktoken, from its cache or downloaded."""

    name = "gpt2"
    vocabulary = 50257
    eot = 50256

    def __init__(self) -> None:
        import requests
        import tiktoken

        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except (OSError, requests.RequestException) as error:
            raise MachineError(
                f"the GPT-2 tokenizer files are neither in tiktoken's cache nor downloadable ({type(error).__name__}); "
                "connect once, or point TIKTOKEN_CACHE_DIR at a folder that holds them"
            ) from error

    def encode(self, text: str) -> TokenArray:
        """Token ids of `text`, uint16."""
        return np.asarray(self._bpe.encode_ordinary(text), dtype=np.uint16)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for `eot`."""
        return b"" if token == self.eot else self._bpe.decode_single_token_bytes(token)


@dataclass(frozen=True)
class TokenizerSpec:
    """What is known of a tokenizer before it is loaded."""

    vocabulary: int
    create: Callable[[], Tokenizer]


TOKENIZERS: dict[str, TokenizerSpec] = {
    "bytes": TokenizerSpec(Bytes.vocabulary, Bytes),
    "gpt2": TokenizerSpec(GPT2.vocabulary, GPT2),
}


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name. Raises SweepError for an unknown name, MachineError when its files are missing."""
    if name not in TOKENIZERS:
        raise SweepError(f"no tokenizer {name!r}; there are: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name].create()
