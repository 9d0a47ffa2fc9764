"""Long documents of the texts that `eval.texts` names, tokenised when a cell is evaluated."""

from __future__ import annotations

import functools
import hashlib
import heapq
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .sources import CorpusError, FileSource, Text
from .tokenizer import Tokenizer

SETTING = "eval.texts"
CHARACTERS_PER_TOKEN = 16
"""Characters that are tokenised first per requested token; a text that needs more is tokenised completely."""


@dataclass(frozen=True)
class LongText:
    """Documents of one text, as probes read them."""

    documents: tuple[np.ndarray, ...]
    """Tokens of each document, the end-of-text token first."""
    names: tuple[str, ...]
    """Names of the documents."""
    sha256: str
    """SHA-256 in hex of the documents' tokens, in order."""


@functools.lru_cache(maxsize=4)
def read_long_text(path: str, tokenizer: Tokenizer, documents: int, tokens: int) -> LongText:
    """Return the first documents of a file or folder that have enough tokens, cut off after them; results are cached.

    If there are too few, the longest of the others (by characters) follow, which are shorter.

    Args:
        path: File or folder.
        tokenizer: Tokenizer of the cells.
        documents: Largest number of documents.
        tokens: Tokens that a document should have, the end-of-text token included.

    Raises:
        CorpusError: The path does not exist, or holds no readable file.
    """
    chosen: list[tuple[str, np.ndarray]] = []
    shorter: list[tuple[int, int, Text]] = []
    for index, text in enumerate(FileSource(Path(path), SETTING).documents()):
        # no tokenizer makes more than four tokens of a character
        if 4 * len(text.text) + 1 >= tokens:
            ids = _encode(text.text, tokenizer, tokens)
            if len(ids) >= tokens:
                chosen.append((text.name, ids))
                if len(chosen) == documents:
                    break
                continue
        # the index decides between equal lengths, and keeps texts out of the comparison
        heapq.heappush(shorter, (len(text.text), -index, text))
        if len(shorter) > documents:
            heapq.heappop(shorter)
    for _, _, text in sorted(shorter, reverse=True)[: documents - len(chosen)]:
        chosen.append((text.name, _encode(text.text, tokenizer, tokens)))
    if not chosen:
        raise CorpusError(f"{SETTING}: {path} holds no document")
    digest = hashlib.sha256()
    for _, ids in chosen:
        digest.update(ids.astype("<u4").tobytes())
    names, arrays = zip(*chosen, strict=True)
    return LongText(arrays, names, digest.hexdigest())


def _encode(text: str, tokenizer: Tokenizer, tokens: int) -> np.ndarray:
    """Return at most `tokens` tokens: the end-of-text token, then those of the text."""
    ids = tokenizer.encode(text[: CHARACTERS_PER_TOKEN * tokens])
    if len(ids) + 1 < tokens and len(text) > CHARACTERS_PER_TOKEN * tokens:
        ids = tokenizer.encode(text)
    return np.concatenate([[tokenizer.eot], ids[: tokens - 1]]).astype(tokenizer.dtype)
