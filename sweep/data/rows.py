"""Streams of tokens whose rows are worked out when they are read, so that nothing of them lies on a disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class Rows(ABC):
    """`rows` rows of `length` tokens one behind the other, and the first token of the row that would come next.

    Read like a one-dimensional array: it has a length, and slices of it are arrays. Row i depends on i alone, so every
    order of reading, and every number of rows at once, gives the same tokens.
    """

    dtype = np.dtype(np.uint16)
    first: int
    """The token that every row begins with."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length

    @abstractmethod
    def made(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of those numbers (int64 [n]): uint16 [n, length]."""

    def __len__(self) -> int:
        return self.rows * self.length + 1

    def __getitem__(self, part: slice) -> np.ndarray:
        """A piece of the stream, uint16, the slice being a plain one (no step)."""
        start, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError("rows are read forwards, one token after the other")
        return self.pieces(np.array([start]), max(0, end - start))[0]

    def pieces(self, starts: np.ndarray, count: int) -> np.ndarray:
        """`count` tokens from each of these places (int64 [n]): uint16 [n, count]."""
        numbers, offsets = np.divmod(starts, self.length)
        over = int(offsets.max(initial=0)) + count
        whole, more = divmod(over, self.length)
        # of a row that is only touched, as by the last target of the one before it, the token is known
        known = more == 1 and not offsets.any()
        deep = whole if known else whole + (more > 0)
        asked = (numbers[:, None] + np.arange(deep)).ravel()
        found = self.made(asked).reshape(len(starts), deep * self.length)
        if known:
            end = np.full((len(starts), 1), self.first, dtype=self.dtype)
            return np.concatenate([found, end], 1)
        return np.take_along_axis(found, offsets[:, None] + np.arange(count), 1)


Stream = np.ndarray | Rows
"""Tokens one behind the other, of a file or worked out."""


@dataclass(frozen=True)
class Streams:
    """What a corpus that is worked out consists of."""

    train: Rows
    validation: Rows
    train_marks: Rows | None
    """Which tokens count as targets, 0 or 1; both marks or neither."""
    validation_marks: Rows | None
    largest: int
    """Largest token."""
    unigram_entropy: float
    """Of the training split as it is expected, nats per token."""
    bigram_entropy: float
    """The same of a token given the one before."""
    marked_share: float
    """Expected share of the tokens that are marked."""


def pieces(stream: Stream, starts: Sequence[int], count: int) -> np.ndarray:
    """`count` tokens from each of these places of a stream: [n, count]."""
    if isinstance(stream, Rows):
        return stream.pieces(np.asarray(starts, dtype=np.int64), count)
    found: np.ndarray[Any, Any] = np.stack([stream[start : start + count] for start in starts])
    return found
