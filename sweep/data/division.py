"""Division of documents into splits by tokens: a pool of tokenised documents, and which split each of them goes to."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import DataConfig
from .shards import CHUNK_TOKENS
from .sources import CorpusError, name_digest

VALIDATION_TOKENS = 2_097_153
"""Most tokens of a validation split unless more are asked for: the shipped recipes read 2,097,152 targets."""
VALIDATION_SHARE = 0.05
"""Share of the tokens of a text that validate, where that is fewer."""
HELDOUT_DOCUMENTS = 16
"""Long documents that are held out unless another number is asked for: as many as the shipped recipes read."""
HELDOUT_SHARE = 0.25
"""Largest share of the tokens of a text that is held out unless a number of documents is asked for."""
SPLITS = ("train", "validation", "heldout")


class Pooled(NamedTuple):
    """A tokenised document of the pool."""

    name: str
    tokens: int
    split: str | None
    """The split that its source gives it; None lets the division decide."""


@dataclass(frozen=True)
class Division:
    """The sizes of the splits that a config asks for."""

    corpus: str
    long_tokens: int
    """Tokens of a document that may be held out."""
    train_tokens: int | None
    validation_tokens: int | None
    heldout_documents: int | None
    lent: bool
    """Another corpus gives the held-out documents."""

    @classmethod
    def of(cls, data: DataConfig) -> Division:
        """Return the sizes that the data section of a config asks for."""
        return cls(
            data.corpus,
            data.heldout_tokens,
            data.train_tokens,
            data.validation_tokens,
            data.heldout_documents,
            data.heldout is not None,
        )

    @property
    def max_heldout(self) -> int:
        """The largest number of held-out documents."""
        if self.lent:
            return 0
        return HELDOUT_DOCUMENTS if self.heldout_documents is None else self.heldout_documents

    def heldout_limit(self, total: int) -> float:
        """Return the largest number of held-out tokens of a text of `total` tokens."""
        return total if self.heldout_documents is not None else HELDOUT_SHARE * total

    def validation_target(self, total: int) -> int:
        """Return the tokens that the validation split of a text of `total` tokens should have, at least 1."""
        if self.validation_tokens is not None:
            return self.validation_tokens
        return max(1, min(VALIDATION_TOKENS, int(VALIDATION_SHARE * total)))

    def assign(self, documents: Sequence[Pooled]) -> list[str]:
        """Return the split of each document.

        Documents are drawn in the order of the hashes of their names, which is random and no matter of luck. Held out are
        the first long ones. Then the validation split takes each document that it has room for, and at last the shortest
        one that is left, so that it has the target and less than one document more. All others are trained on.

        Raises:
            CorpusError: The text has too few documents or tokens for what is asked.
        """
        splits = [document.split or "train" for document in documents]
        drawn = [index for index, document in enumerate(documents) if document.split is None]
        drawn.sort(key=lambda index: (name_digest(documents[index].name), index))
        total = sum(document.tokens for document in documents)
        if len(drawn) < len(documents) and self.validation_tokens is not None:
            raise CorpusError(f"data.validation_tokens: corpus {self.corpus!r} has splits of its own; remove it")
        self._hold_out(documents, drawn, splits, total)
        if "validation" not in splits:
            remaining = [index for index in drawn if splits[index] == "train"]
            self._validate(documents, remaining, splits, self.validation_target(total))
        if not {"train", "validation"} <= set(splits):
            raise CorpusError(f"corpus {self.corpus!r} has too few documents: give at least two")
        return splits

    def _hold_out(self, documents: Sequence[Pooled], drawn: Sequence[int], splits: list[str], total: int) -> None:
        """Set the split of the documents that are held out; two of those drawn remain at least."""
        count = tokens = 0
        limit = self.heldout_limit(total)
        for index in drawn:
            size = documents[index].tokens
            if count >= min(self.max_heldout, len(drawn) - 2):
                return
            if size >= self.long_tokens and tokens + size <= limit:
                splits[index] = "heldout"
                count, tokens = count + 1, tokens + size

    def _validate(self, documents: Sequence[Pooled], remaining: Sequence[int], splits: list[str], target: int) -> None:
        """Set the split of the documents that validate; one of those that remain is trained on at least.

        Raises CorpusError when a size was asked for that takes the whole text.
        """
        available = sum(documents[index].tokens for index in remaining)
        if self.validation_tokens is not None and available <= target:
            raise CorpusError(
                f"corpus {self.corpus!r} has {available} tokens beside the held-out documents, and data.validation_tokens asks for "
                f"{target} of them, which leaves none to train on: lower it, or add text"
            )
        n_training, tokens = len(remaining), 0
        for index in remaining:
            size = documents[index].tokens
            if n_training > 1 and tokens + size <= target:
                splits[index] = "validation"
                n_training, tokens = n_training - 1, tokens + size
        if tokens < target and n_training > 1:
            candidates = [index for index in remaining if splits[index] == "train"]
            splits[min(candidates, key=lambda index: documents[index].tokens)] = "validation"


@dataclass
class PoolIndex:
    """Names, sizes and splits of the documents of a pool, a line of JSON each, in a file that a stopped preparation appends to."""

    path: Path
    division: Division
    end: int = 0
    """Bytes of the file that are valid; what a crash wrote after them is cut off."""
    documents: list[Pooled] = field(default_factory=list)
    _total: int = 0
    _longest: int = 0
    _heldout: list[int] = field(default_factory=list)
    """The sizes of the largest documents that might be held out, as a heap."""
    _not_trained: int = 0
    """Tokens of the documents that their source puts into other splits."""

    def __post_init__(self) -> None:
        """Read the documents that the file holds up to `end`, and open it to append."""
        self.path.touch()
        os.truncate(self.path, self.end)
        for line in self.path.read_text(encoding="ascii").splitlines():
            self._count(Pooled(*json.loads(line)))
        self._file = self.path.open("a", encoding="ascii")

    def add(self, name: str, tokens: int, split: str | None) -> None:
        """Append a document."""
        document = Pooled(name, tokens, split)
        self._file.write(json.dumps(document) + "\n")
        self._count(document)

    def _count(self, document: Pooled) -> None:
        self.documents.append(document)
        self._total += document.tokens
        self._longest = max(self._longest, document.tokens)
        if document.split in ("validation", "heldout"):
            self._not_trained += document.tokens
        elif document.split is None and document.tokens >= self.division.long_tokens:
            heapq.heappush(self._heldout, document.tokens)
            if len(self._heldout) > self.division.max_heldout:
                heapq.heappop(self._heldout)

    def sync(self) -> int:
        """Write everything to the disk and return the size of the file in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.end = self._file.tell()
        return self.end

    def close(self) -> None:
        """Close the file; the documents stay in memory."""
        self._file.close()

    def is_full(self) -> bool:
        """Return whether the training split has the tokens asked for, however the documents so far are divided.

        It asks after each document, so that neither batches nor a restart change which documents are read.
        """
        target = self.division.train_tokens
        if target is None:
            return False
        heldout = min(sum(self._heldout), self.division.heldout_limit(self._total)) + self._not_trained
        return self._total >= target + heldout + self.division.validation_target(self._total) + self._longest


def pieces(
    shards: Sequence[np.ndarray], documents: Sequence[Pooled], splits: Sequence[str], first: int = 0
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield (end, split, tokens) of the documents of a pool, in its order from the `first` on; `end` is the index after the last.

    Neighbours of a split are joined into pieces of about `CHUNK_TOKENS` tokens; held-out documents are not.
    """
    position = sum(document.tokens for document in documents[:first])
    while first < len(documents):
        end, tokens = first + 1, documents[first].tokens
        joins = splits[first] != "heldout"
        while joins and end < len(documents) and splits[end] == splits[first] and tokens < CHUNK_TOKENS:
            tokens += documents[end].tokens
            end += 1
        yield end, splits[first], _slice(shards, position, position + tokens)
        first, position = end, position + tokens


def _slice(shards: Sequence[np.ndarray], start: int, end: int) -> np.ndarray:
    """Return the tokens from `start` to before `end` of the stream that the shards are together."""
    parts, before = [], 0
    for shard in shards:
        low, high = max(start - before, 0), min(end - before, len(shard))
        if low < high:
            parts.append(shard[low:high])
        before += len(shard)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
