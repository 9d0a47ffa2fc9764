"""Streams of tokens whose rows are worked out when they are read, so that nothing of them lies on a disk.

What is drawn are raw Philox numbers, which NumPy promises for ever: any row comes from its number alone.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np


class Rows(ABC):
    """`rows` rows of `length` tokens one behind the other, and the first token of the row that would come next.

    Read like a one-dimensional array: it has a length, and slices of it are arrays. Row i depends on i alone, so every
    order of reading, and every number of rows at once, gives the same tokens.
    """

    first: int
    """The token that every row begins with."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16."""
        return np.dtype(np.uint16)

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
        span = int(offsets.max(initial=0)) + count
        full_rows, remainder = divmod(span, self.length)
        # of a row that is only touched, as by the last target of the one before it, the token is known
        next_is_first = remainder == 1 and not offsets.any()
        rows_per_piece = full_rows if next_is_first else full_rows + (remainder > 0)
        row_numbers = (numbers[:, None] + np.arange(rows_per_piece)).ravel()
        tokens = self.made(row_numbers).reshape(len(starts), rows_per_piece * self.length)
        if next_is_first:
            end = np.full((len(starts), 1), self.first, dtype=self.dtype)
            return np.concatenate([tokens, end], 1)
        return np.take_along_axis(tokens, offsets[:, None] + np.arange(count), 1)


class RandomRows(Rows):
    """Rows made of `draws` random numbers each; corpus, seed and split name the Philox key, the number of a row its counter."""

    NUMBERS_AT_ONCE: ClassVar[int] = 1 << 21
    """Numbers that are worked out at a time, which bounds memory."""

    def __init__(self, rows: int, length: int, *, corpus: str, seed: int, split: str, draws: int) -> None:
        super().__init__(rows, length)
        digest = hashlib.sha256(f"{corpus}/{seed}/{split}".encode()).digest()
        self._key = int.from_bytes(digest[:16], "big")
        self._draws = draws
        self._blocks = -(-draws // 4)  # a Philox block is four numbers

    def made(self, numbers: np.ndarray) -> np.ndarray:
        rows = np.empty((len(numbers), self.length), dtype=self.dtype)
        rows_at_once = max(1, self.NUMBERS_AT_ONCE // self._draws)
        for start in range(0, len(numbers), rows_at_once):
            part = slice(start, start + rows_at_once)
            self.fill(rows[part], self._draw_numbers(numbers[part]))
        return rows

    @abstractmethod
    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Writes the rows, uint16 [n, length], that follow from their numbers, uint64 [n, draws]."""

    def _draw_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """uint64 [n, draws]."""
        draws = np.empty((len(numbers), 4 * self._blocks), dtype=np.uint64)
        if not len(numbers):
            return draws[:, : self._draws]
        bits = np.random.Philox(key=self._key)
        state: Any = bits.state
        # runs of one row after the other need one jump
        runs = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
        for start, end in zip(runs, [*runs[1:], len(numbers)], strict=True):
            counter = int(numbers[start]) * self._blocks
            state["state"]["counter"][:] = (counter, 0, 0, 0)
            bits.state = state
            draws[start:end] = bits.random_raw(4 * self._blocks * int(end - start)).reshape(end - start, -1)
        return draws[:, : self._draws]


class ComputedMarks(Rows):
    """1 at the tokens of rows that count as targets, 0 elsewhere, as `mark_rows` tells of whole rows."""

    first = 0

    def __init__(self, rows: Rows, mark_rows: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(rows.rows, rows.length)
        self._rows, self._mark_rows = rows, mark_rows

    def made(self, numbers: np.ndarray) -> np.ndarray:
        return self._mark_rows(self._rows.made(numbers))


def to_uniform(raw: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64, from the upper 53 bits."""
    return (raw >> np.uint64(11)) * 2.0**-53


def entropy(probabilities: Iterable[float]) -> float:
    """Of a distribution, in nats; what never comes adds nothing."""
    return -sum(p * math.log(p) for p in probabilities if p > 0)


if TYPE_CHECKING:
    Stream = np.ndarray | Rows
else:
    Stream = Any
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
    result: np.ndarray[Any, Any] = np.stack([stream[start : start + count] for start in starts])
    return result
