"""The tokenizer of a model from elsewhere, and how its tokens lie on those of a corpus.

A corpus is written in tokens of its own. For another tokenizer they are turned back into the text that they stand for; every
tokenizer then reads the same characters, and what a model says of its own tokens is spread over theirs by bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..data.tokenizer import Tokenizer, dtype_of
from ..errors import SweepError

LOSSLESS_TOKENIZERS = ("bytes", "gpt2")
"""Tokenizers whose tokens give their text back, byte for byte."""


class HubTokenizer:
    """A tokenizer of transformers, as ours are: ids alone, nothing added, and what looks like a special token is text."""

    def __init__(self, folder: Path) -> None:
        """Raises SweepError for a folder without a fast tokenizer, or whose text nothing leads."""
        from tokenizers import decoders
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            self._model = tokenizer.backend_tokenizer
        except (OSError, ValueError, AttributeError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise SweepError(
                f"{folder} has no tokenizer that can be used: {first}; it needs a tokenizer.json"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise SweepError(
                f"{folder}: its tokenizer has neither a first nor a last token, so nothing can lead a text"
            )
        self._by_bytes = isinstance(self._model.decoder, decoders.ByteLevel)
        self.name = f"hf:{folder.name}"
        self.eot = int(start)
        """What leads a text: the token that begins one, or where there is none the one that ends it."""
        self.vocabulary = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.dtype = dtype_of(self.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`."""
        return self.encode_with_offsets(text)[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """The same for many texts."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, and the bytes of the text that each stands for, [tokens, 2] from and to."""
        encoding = self._model.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=self.dtype)
        characters = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        sizes = np.array([len(character.encode()) for character in text], dtype=np.int64)
        byte_of_character = np.concatenate([[0], np.cumsum(sizes)])
        if self._by_bytes:
            # such a token is written with a letter for each of its bytes, which may be less than a character
            ends = np.cumsum([len(token) for token in encoding.tokens], dtype=np.int64)
            if len(ends) and ends[-1] == byte_of_character[-1]:
                return ids, np.stack([np.concatenate([[0], ends[:-1]]), ends], 1)
        return ids, byte_of_character[characters]

    def token_bytes(self, token: int) -> bytes:
        """The text that one token stands for, as UTF-8; empty for `eot`."""
        return b"" if token == self.eot else self._model.decode([int(token)], skip_special_tokens=False).encode()

    def text(self, tokens: np.ndarray) -> str:
        """The text that tokens stand for."""
        return str(self._model.decode(tokens.tolist(), skip_special_tokens=True))

    def save(self, folder: Path) -> str | None:
        """Writes its one file."""
        self._model.save(str(folder / "tokenizer.json"))
        return "tokenizer.json"


@dataclass(frozen=True)
class Passage:
    """The text of consecutive tokens of a corpus, none of which ends a text, as far as its characters are whole."""

    first_token: int
    """Place of its first token."""
    ends: np.ndarray
    """Byte of the text at which each of its tokens ends."""
    text: str

    @cached_property
    def bytes(self) -> int:
        """Of the text as UTF-8."""
        return int(self.ends[-1]) if len(self.ends) else 0


def check_lossless(tokenizer: Tokenizer) -> None:
    """Raises SweepError for a corpus whose tokens do not give their text back."""
    if tokenizer.name.split(":")[0] not in LOSSLESS_TOKENIZERS:
        raise SweepError(
            f"the sweep's corpus is written in tokens of {tokenizer.name}, which do not give the text back byte for byte, as a model "
            f"with another tokenizer needs it; corpora of {' and '.join(LOSSLESS_TOKENIZERS)} do"
        )


def passages(tokens: np.ndarray, tokenizer: Tokenizer) -> Iterator[Passage]:
    """The texts between ends of text, in order; tokens that bear half a character at either end of `tokens` are in none."""
    borders = np.flatnonzero(tokens == tokenizer.eot).tolist()
    for start, stop in zip([0, *(border + 1 for border in borders)], [*borders, len(tokens)], strict=True):
        if stop > start:
            yield _passage(start, [tokenizer.token_bytes(int(token)) for token in tokens[start:stop]])


def _passage(start: int, parts: list[bytes]) -> Passage:
    ends = np.cumsum([len(part) for part in parts])
    joined = b"".join(parts)
    bounds = [0, *ends.tolist()]
    first = next(
        (n for n, at in enumerate(bounds) if at == len(joined) or not _is_continuation_byte(joined[at])), len(parts)
    )
    last = next(
        n
        for n in range(len(parts), first - 1, -1)
        if n == first or _ends_on_character(joined[bounds[first] : bounds[n]])
    )
    text = joined[bounds[first] : bounds[last]].decode()
    return Passage(start + first, ends[first:last] - bounds[first], text)


def _is_continuation_byte(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _ends_on_character(text: bytes) -> bool:
    """Return whether there is a last character, and all of it is there; the others are whole."""
    return bool(text) and len(text.decode(errors="ignore").encode()) == len(text)


def spread_over_tokens(nats: np.ndarray, byte_spans: np.ndarray, passage: Passage) -> np.ndarray:
    """What tokens of another tokenizer cost, over those of the corpus: each evenly over its bytes, `characters`. float64."""
    # one that stands for nothing of its own goes with the next one, or the last
    begins = np.minimum(byte_spans[:, 0], passage.bytes - 1)
    ends = np.maximum(byte_spans[:, 1], begins + 1)
    change = np.zeros(passage.bytes + 1)
    share = nats.astype(np.float64) / (ends - begins)
    np.add.at(change, begins, share)
    np.add.at(change, ends, -share)
    per_byte = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1])])
    return np.asarray(per_byte[passage.ends] - per_byte[np.concatenate([[0], passage.ends[:-1]])])
