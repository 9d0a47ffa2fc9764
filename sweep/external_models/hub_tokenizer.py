"""Tokenizers of external models, and the alignment of their tokens with those of a corpus.

A corpus is stored in tokens of its own tokenizer. For another tokenizer they are decoded to text, which every model
reads alike. The losses of a model's tokens are then distributed over the tokens of the corpus by bytes.
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
"""Tokenizers whose tokens can be decoded to their text, byte for byte."""


class HubTokenizer:
    """Tokenizer of transformers behind the `Tokenizer` protocol.

    Nothing is added to a text, and special tokens written out in it are plain text.
    """

    def __init__(self, folder: Path) -> None:
        """Load the fast tokenizer in a folder, without network access or foreign code.

        `eot` is the token that precedes a text: BOS, or EOS where the tokenizer has no BOS. Truncation and padding are
        off. `name` is `hf:` and the folder's name, so it does not identify the tokenizer.

        Raises:
            SweepError: The folder has no fast tokenizer, or that has neither BOS nor EOS.
        """
        from tokenizers import decoders
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            self._model = tokenizer.backend_tokenizer
        except (OSError, ValueError, AttributeError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise SweepError(f"{folder} has no usable tokenizer: {first}; it needs a tokenizer.json") from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise SweepError(
                f"{folder}: the tokenizer defines neither a BOS nor an EOS token, one of which must start a text"
            )
        self._by_bytes = isinstance(self._model.decoder, decoders.ByteLevel)
        self.name = f"hf:{folder.name}"
        self.eot = int(start)
        """What leads a text: the token that begins one, or where there is none the one that ends it."""
        end = tokenizer.eos_token_id
        self.end = int(start if end is None else end)
        """Token that ends a text."""
        self.vocabulary = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.dtype = dtype_of(self.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, without a start token."""
        return self.encode_with_offsets(text)[0]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, int64 [n], with the special tokens that the tokenizer itself adds."""
        return np.asarray(self._model.encode(text, add_special_tokens=True).ids, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Return the token ids of each text, without start tokens; `threads` is ignored."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids [n], byte spans int64 [n, 2]) of a text, without a start token.

        The span of a token is [start, end) in bytes of the UTF-8 text. For byte-level tokenizers spans follow each
        other without gaps and can end within a character. If their sum differs from the text's bytes, and for other
        tokenizers, a span covers complete characters; spans can then overlap, leave gaps or be empty.
        """
        encoding = self._model.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=self.dtype)
        characters = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        sizes = np.array([len(character.encode()) for character in text], dtype=np.int64)
        byte_of_character = np.concatenate([[0], np.cumsum(sizes)])
        if self._by_bytes:
            # a byte-level token is spelled with one letter per byte, and can be a part of a character
            ends = np.cumsum([len(token) for token in encoding.tokens], dtype=np.int64)
            if len(ends) and ends[-1] == byte_of_character[-1]:
                return ids, np.stack([np.concatenate([[0], ends[:-1]]), ends], 1)
        return ids, byte_of_character[characters]

    def token_bytes(self, token: int) -> bytes:
        """Return the text of one token as UTF-8; empty for `eot`."""
        return b"" if token == self.eot else self._model.decode([int(token)], skip_special_tokens=False).encode()

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._model.decode(tokens.tolist(), skip_special_tokens=True))

    def save(self, folder: Path) -> str | None:
        """Write the tokenizer as one JSON file and return its name."""
        self._model.save(str(folder / "tokenizer.json"))
        return "tokenizer.json"


@dataclass(frozen=True)
class Passage:
    """Text of consecutive tokens of a corpus without end-of-text tokens, as far as its characters are complete."""

    first_token: int
    """Index of its first token."""
    ends: np.ndarray
    """End of each of its tokens in bytes of the text, int64 [n]."""
    text: str
    """The text."""

    @cached_property
    def bytes(self) -> int:
        """Bytes of the text as UTF-8."""
        return int(self.ends[-1]) if len(self.ends) else 0


def check_lossless(tokenizer: Tokenizer) -> None:
    """Check that the tokens of a corpus can be decoded to their text, byte for byte.

    Args:
        tokenizer: Tokenizer of the corpus.

    Raises:
        SweepError: Its kind is neither "bytes" nor "gpt2".
    """
    if tokenizer.name.split(":")[0] not in LOSSLESS_TOKENIZERS:
        raise SweepError(
            f"the sweep's corpus uses tokenizer {tokenizer.name}, which does not reproduce the text byte for byte, as a model "
            f"with another tokenizer requires; use a corpus of tokenizer {' or '.join(LOSSLESS_TOKENIZERS)}"
        )


def passages(tokens: np.ndarray, tokenizer: Tokenizer) -> Iterator[Passage]:
    """Yield the texts between end-of-text tokens, in order, as `Passage`; also that after the last one.

    Tokens with a part of a character at either end of a text belong to no passage. An empty text is left out. A text
    without a complete character gives a passage without tokens.

    Args:
        tokens: Tokens of the corpus, one-dimensional; `first_token` counts in them.
        tokenizer: Tokenizer of the corpus, whose tokens can be decoded byte for byte.
    """
    borders = np.flatnonzero(tokens == tokenizer.eot).tolist()
    for start, stop in zip([0, *(border + 1 for border in borders)], [*borders, len(tokens)], strict=True):
        if stop > start:
            yield _passage(start, [tokenizer.token_bytes(int(token)) for token in tokens[start:stop]])


def _passage(start: int, parts: list[bytes]) -> Passage:
    """Return the passage of consecutive tokens, without tokens of incomplete characters at either end.

    The passage begins at the first token border that is the start of a character, and ends at the last one up to which
    all bytes are complete characters. So bytes that are no UTF-8 end it early, and it can be empty.

    Args:
        start: Index of the first token.
        parts: Bytes of each token.
    """
    ends = np.cumsum([len(part) for part in parts])
    joined = b"".join(parts)
    bounds = [0, *ends.tolist()]
    first = next(
        (n for n, bound in enumerate(bounds) if bound == len(joined) or not _is_continuation_byte(joined[bound])),
        len(parts),
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
    """Return True if the text is not empty and its last character is complete."""
    return bool(text) and len(text.decode(errors="ignore").encode()) == len(text)


def spread_over_tokens(nats: np.ndarray, byte_spans: np.ndarray, passage: Passage) -> np.ndarray:
    """Distribute the losses of a model's tokens over the corpus's tokens, each evenly over its bytes.

    A token of the model without bytes of its own counts for the next byte, or the last one. The total is preserved.

    Args:
        nats: Loss of each token of the model, [m].
        byte_spans: Start and end of each of these tokens in bytes of the passage, int64 [m, 2].
        passage: Text with the ends of the corpus's tokens; not empty.

    Returns:
        Loss in nats of each token of the passage, float64 [n].
    """
    # a token without bytes counts for the next byte, or the last one
    begins = np.minimum(byte_spans[:, 0], passage.bytes - 1)
    ends = np.maximum(byte_spans[:, 1], begins + 1)
    change = np.zeros(passage.bytes + 1)
    share = nats.astype(np.float64) / (ends - begins)
    np.add.at(change, begins, share)
    np.add.at(change, ends, -share)
    per_byte = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1])])
    return np.asarray(per_byte[passage.ends] - per_byte[np.concatenate([[0], passage.ends[:-1]])])
