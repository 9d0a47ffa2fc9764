"""Division of documents into splits by tokens: a pool of tokenised documents and the split of each.

The pool is a temporary stream of all documents. Their splits are chosen once all of them are in it.
"""

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
"""Default maximum of tokens in the validation split; the shipped recipes read 2,097,152 targets."""
VALIDATION_SHARE = 0.05
"""Share of all tokens that validate, where that is fewer than `VALIDATION_TOKENS`."""
HELDOUT_DOCUMENTS = 16
"""Default number of held-out documents, as many as the shipped recipes read."""
HELDOUT_SHARE = 0.25
"""Maximum share of all tokens that is held out, unless the config gives a number of documents."""
SPLITS = ("train", "validation", "heldout")


class Pooled(NamedTuple):
    """A tokenised document of the pool: name, number of tokens and split."""

    name: str
    tokens: int
    split: str | None
    """Split given by the source; None leaves the choice to the division."""


@dataclass(frozen=True)
class Division:
    """Sizes of the splits that a config asks for."""

    corpus: str
    """Name of the corpus, for error messages."""
    long_tokens: int
    """Minimum number of tokens of a held-out document."""
    train_tokens: int | None
    """Requested training tokens; None: all."""
    validation_tokens: int | None
    """Requested validation tokens; None: the default."""
    heldout_documents: int | None
    """Requested number of held-out documents; None: the default."""
    has_foreign_heldout: bool
    """True if another corpus provides the held-out documents."""

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
        """Maximum number of held-out documents, by default 16; 0 if another corpus provides them."""
        if self.has_foreign_heldout:
            return 0
        return HELDOUT_DOCUMENTS if self.heldout_documents is None else self.heldout_documents

    def heldout_limit(self, total: int) -> float:
        """Return the maximum number of held-out tokens for a text of `total` tokens.

        That is a quarter of it (HELDOUT_SHARE), or all of it if `heldout_documents` is set.
        """
        return total if self.heldout_documents is not None else HELDOUT_SHARE * total

    def validation_target(self, total: int) -> int:
        """Return the number of validation tokens to reach for a text of `total` tokens, at least 1.

        That is `validation_tokens`; by default 5 % of the text (VALIDATION_SHARE), at most 2,097,153 tokens.
        """
        if self.validation_tokens is not None:
            return self.validation_tokens
        return max(1, min(VALIDATION_TOKENS, int(VALIDATION_SHARE * total)))

    def assign(self, documents: Sequence[Pooled]) -> list[str]:
        """Return the split of each document, in order: "train", "validation" or "heldout".

        A split that the source gave stays. The other documents are visited in the order of the hashes of their names,
        which is random and reproducible. The first long ones are held out, within the limits of their number and
        tokens. Then the validation split takes each document that fits into its target, unless the source gave some
        document to validation. If it falls short, it also takes the shortest remaining document, so it exceeds the
        target by less than one document. All others are for training; `train_tokens` is not applied here.

        Raises:
            CorpusError: The text has too few documents or tokens for the requested sizes, or has splits of its own
                although `validation_tokens` is set.
        """
        splits = [document.split or "train" for document in documents]
        unassigned = [index for index, document in enumerate(documents) if document.split is None]
        unassigned.sort(key=lambda index: (name_digest(documents[index].name), index))
        total = sum(document.tokens for document in documents)
        if len(unassigned) < len(documents) and self.validation_tokens is not None:
            raise CorpusError(
                f"data.validation_tokens: corpus {self.corpus!r} has its own splits; remove data.validation_tokens"
            )
        self._hold_out(documents, unassigned, splits, total)
        if "validation" not in splits:
            remaining = [index for index in unassigned if splits[index] == "train"]
            self._validate(documents, remaining, splits, self.validation_target(total))
        if not {"train", "validation"} <= set(splits):
            raise CorpusError(f"corpus {self.corpus!r} has too few documents: give at least two")
        return splits

    def _hold_out(self, documents: Sequence[Pooled], candidates: Sequence[int], splits: list[str], total: int) -> None:
        """Set `splits` of the documents that are held out; at least two of the candidates remain.

        A document is held out if it has at least `long_tokens` tokens and the total stays within `heldout_limit`. It
        ends at `max_heldout` documents.

        Args:
            documents: All documents.
            candidates: Indices of the documents without a split, in the order of visiting.
            splits: Split of each document; changed in place.
            total: Tokens of all documents.
        """
        count = tokens = 0
        limit = self.heldout_limit(total)
        for index in candidates:
            size = documents[index].tokens
            if count >= min(self.max_heldout, len(candidates) - 2):
                return
            if size >= self.long_tokens and tokens + size <= limit:
                splits[index] = "heldout"
                count, tokens = count + 1, tokens + size

    def _validate(self, documents: Sequence[Pooled], remaining: Sequence[int], splits: list[str], target: int) -> None:
        """Set `splits` of the documents that validate; at least one of the remaining documents is for training.

        A document that would exceed the target is passed over. If the target is not reached, the shortest one left is
        added.

        Args:
            documents: All documents.
            remaining: Indices of the documents that are neither held out nor assigned by their source, in the order of
                visiting.
            splits: Split of each document; changed in place.
            target: Validation tokens to reach.

        Raises:
            CorpusError: The config gives the validation tokens, and they would leave no training text.
        """
        available = sum(documents[index].tokens for index in remaining)
        if self.validation_tokens is not None and available <= target:
            raise CorpusError(
                f"corpus {self.corpus!r} has {available} tokens besides the held-out documents, and "
                f"data.validation_tokens requests {target}, which leaves none for training: lower it, or add text"
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
    """Names, sizes and splits of the documents of a pool, in a file of JSON lines that can be appended to."""

    path: Path
    """File of JSON lines."""
    division: Division
    """Requested sizes of the splits."""
    end: int = 0
    """Valid bytes of the file; anything that a crash wrote after them is cut off."""
    documents: list[Pooled] = field(default_factory=list)
    """Documents in the order of the pool."""
    _total: int = 0
    _longest: int = 0
    _heldout: list[int] = field(default_factory=list)
    """Sizes of the largest documents that may be held out, as a heap."""
    _not_trained: int = 0
    """Tokens of the documents that their source assigns to other splits than training."""

    def __post_init__(self) -> None:
        """Create the file if necessary, cut it at `end`, read its documents, and open it to append.

        With `end` 0 the file is emptied.
        """
        self.path.touch()
        os.truncate(self.path, self.end)
        for line in self.path.read_text(encoding="ascii").splitlines():
            self._count(Pooled(*json.loads(line)))
        self._file = self.path.open("a", encoding="ascii")

    def add(self, name: str, tokens: int, split: str | None) -> None:
        """Append a document to the file, which is not synced yet, and to the list and the totals.

        Args:
            name: Name of the document.
            tokens: Its number of tokens, the end-of-text token included.
            split: Split given by the source, or None.
        """
        document = Pooled(name, tokens, split)
        self._file.write(json.dumps(document) + "\n")
        self._count(document)

    def _count(self, document: Pooled) -> None:
        """Add a document to the list and the running totals."""
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
        """Flush the file to the disk and return its size in bytes, which is `end` for a later index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.end = self._file.tell()
        return self.end

    def close(self) -> None:
        """Close the file; the documents stay in memory."""
        self._file.close()

    def is_full(self) -> bool:
        """Return True once the training split has the requested tokens, whichever way the documents so far are divided.

        The pool then holds those tokens plus the most that can be held out, the validation target, the tokens that the
        source gave to other splits, and one longest document. Called after each document, so that neither batch sizes
        nor restarts change which documents are read. Always False without a requested number.
        """
        target = self.division.train_tokens
        if target is None:
            return False
        heldout = min(sum(self._heldout), self.division.heldout_limit(self._total)) + self._not_trained
        return self._total >= target + heldout + self.division.validation_target(self._total) + self._longest


def pieces(
    shards: Sequence[np.ndarray], documents: Sequence[Pooled], splits: Sequence[str], first: int = 0
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield (end, split, tokens) for consecutive documents of a pool, where `end` is the index after the last one.

    Neighbours of the same split are joined until a piece has 2^24 tokens (CHUNK_TOKENS), so the last document can
    exceed that. Held-out documents are not joined. Tokens are a view where they lie in one shard, else a copy.

    Args:
        shards: Shards of the pool, in order.
        documents: Documents of the pool, in order.
        splits: Split of each document.
        first: Index of the document to start from, as a former `end`.
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
    """Return the tokens from `start` up to `end` of the stream that the shards form together.

    They are a view where they lie in one shard, else a copy. The range must not be empty.
    """
    parts, before = [], 0
    for shard in shards:
        low, high = max(start - before, 0), min(end - before, len(shard))
        if low < high:
            parts.append(shard[low:high])
        before += len(shard)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
