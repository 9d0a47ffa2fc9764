"""Token streams whose rows are computed when they are read, so that they take no disk space.

Rows are drawn from raw Philox numbers, which NumPy guarantees across versions. Any row follows from its number alone.
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
    """Token stream of `rows` rows of `length` tokens, followed by the first token of the row that would come next.

    It reads like a one-dimensional array: its length is rows * length + 1, and slices of it are arrays (an integer
    index is not supported). Row i depends on i alone, so the order of reading and the number of rows read at once do
    not change the tokens.
    """

    first: int | None
    """Token with which every row begins; None if rows differ in it."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens, uint16."""
        return np.dtype(np.uint16)

    @abstractmethod
    def made(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows with these numbers.

        Args:
            numbers: Row numbers from 0, int64 [n].

        Returns:
            Tokens, uint16 [n, length].
        """

    def __len__(self) -> int:
        return self.rows * self.length + 1

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return a slice of the stream, uint16 [n]; bounds work as for a list, so the result can be shorter or empty.

        Raises:
            ValueError: The slice has a step other than 1.
        """
        start, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"computed rows support contiguous slices only, got step {step}")
        return self.pieces(np.array([start]), max(0, end - start))[0]

    def pieces(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return `count` consecutive tokens from each start; the end of the stream is not checked.

        Positions past the end give the tokens of rows with higher numbers, which belong to no split.

        Args:
            starts: Positions in the stream, int64 [n].
            count: Tokens per piece.

        Returns:
            Tokens, uint16 [n, count].
        """
        numbers, offsets = np.divmod(starts, self.length)
        span = int(offsets.max(initial=0)) + count
        full_rows, remainder = divmod(span, self.length)
        # a row of which only the first token is needed, such as the last target of a row, is not computed
        next_is_first = remainder == 1 and not offsets.any() and self.first is not None
        rows_per_piece = full_rows if next_is_first else full_rows + (remainder > 0)
        row_numbers = (numbers[:, None] + np.arange(rows_per_piece)).ravel()
        tokens = self.made(row_numbers).reshape(len(starts), rows_per_piece * self.length)
        if next_is_first:
            end = np.full((len(starts), 1), self.first, dtype=self.dtype)
            return np.concatenate([tokens, end], 1)
        return np.take_along_axis(tokens, offsets[:, None] + np.arange(count), 1)


class RandomRows(Rows):
    """Rows made from `draws` random numbers each.

    Corpus, seed and split determine the Philox key, the number of a row its counter.
    """

    NUMBERS_AT_ONCE: ClassVar[int] = 1 << 21
    """Random numbers that are drawn at a time, which bounds memory."""
    MAX_STORED: ClassVar[int] = 1 << 25
    """Most tokens of a split whose rows are stored."""
    stores_rows: ClassVar[bool] = False
    """Store all rows after the first epoch, for small splits that training reads many times."""

    def __init__(self, rows: int, length: int, *, corpus: str, seed: int, split: str, draws: int) -> None:
        """Create the stream without drawing anything.

        Args:
            rows: Number of rows.
            length: Tokens per row.
            corpus: Name of the corpus, for the key.
            seed: Seed of the corpus, for the key.
            split: Name of the split, for the key.
            draws: Random numbers per row.
        """
        super().__init__(rows, length)
        digest = hashlib.sha256(f"{corpus}/{seed}/{split}".encode()).digest()
        self._key = int.from_bytes(digest[:16], "big")
        self._draws = draws
        self._n_requested = 0
        self._stored_rows: np.ndarray | None = None
        self._blocks = -(-draws // 4)  # a Philox block is four numbers

    def made(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows with these numbers (int64 [n]) as uint16 [n, length], from the stored ones where there are."""
        self._n_requested += len(numbers)
        is_small = self.stores_rows and self.rows * self.length <= self.MAX_STORED
        if not is_small or self._n_requested <= self.rows or int(numbers.max(initial=0)) >= self.rows:
            return self._compute_rows(numbers)
        if self._stored_rows is None:
            self._stored_rows = self._compute_rows(np.arange(self.rows))
        return self._stored_rows[numbers]

    def _compute_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows with these numbers as uint16 [n, length], a bounded number of them at a time."""
        rows = np.empty((len(numbers), self.length), dtype=self.dtype)
        rows_at_once = max(1, self.NUMBERS_AT_ONCE // self._draws)
        for start in range(0, len(numbers), rows_at_once):
            part = slice(start, start + rows_at_once)
            self.fill(rows[part], self._draw_numbers(numbers[part]))
        return rows

    @abstractmethod
    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write the rows that follow from their random numbers into `rows`.

        Args:
            rows: Output, uint16 [n, length].
            raw: Raw Philox numbers, uint64 [n, draws].
        """

    def _draw_numbers(self, numbers: np.ndarray) -> np.ndarray:
        """Return the raw Philox numbers of these rows (int64 [n], in any order) as uint64 [n, draws].

        The counter of row i starts at i times the number of four-number blocks of a row, so each row has numbers of its
        own.
        """
        draws = np.empty((len(numbers), 4 * self._blocks), dtype=np.uint64)
        if not len(numbers):
            return draws[:, : self._draws]
        bits = np.random.Philox(key=self._key)
        state: Any = bits.state
        # consecutive rows need a single jump of the counter
        runs = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
        for start, end in zip(runs, [*runs[1:], len(numbers)], strict=True):
            counter = int(numbers[start]) * self._blocks
            state["state"]["counter"][:] = (counter, 0, 0, 0)
            bits.state = state
            draws[start:end] = bits.random_raw(4 * self._blocks * int(end - start)).reshape(end - start, -1)
        return draws[:, : self._draws]


TARGET = 2
"""Mark m from here on: the target is token m - TARGET in place of the marked one, which the network reads."""


def replace_targets(tokens: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return the tokens with those that marks replace as targets, of the tokens' shape and type."""
    return np.where(marks >= TARGET, marks.astype(tokens.dtype) - TARGET, tokens)


class ComputedMarks(Rows):
    """Marks of a computed stream: 1 at the tokens that count as targets, 0 elsewhere, or a target (TARGET) instead."""

    first = 0

    def __init__(
        self, rows: Rows, mark_rows: Callable[[np.ndarray], np.ndarray], *, replaces_targets: bool = False
    ) -> None:
        """Create the marks of a stream.

        Args:
            rows: The marked stream.
            mark_rows: Function from complete rows [n, length] to marks of the same shape: 0, 1 or from TARGET on.
            replaces_targets: True if any mark is TARGET or more; training then needs the marks.
        """
        super().__init__(rows.rows, rows.length)
        self._rows, self._mark_rows, self.replaces_targets = rows, mark_rows, replaces_targets

    def made(self, numbers: np.ndarray) -> np.ndarray:
        """Return the marks of the rows with these numbers, uint16 [n, length]."""
        return self._mark_rows(self._rows.made(numbers))


def to_uniform(raw: np.ndarray) -> np.ndarray:
    """Convert raw uint64 numbers to uniform float64 numbers in [0, 1), from their upper 53 bits."""
    return (raw >> np.uint64(11)) * 2.0**-53


def entropy(probabilities: Iterable[float]) -> float:
    """Return the entropy of a distribution in nats; zero probabilities add nothing."""
    return -sum(p * math.log(p) for p in probabilities if p > 0)


if TYPE_CHECKING:
    Stream = np.ndarray | Rows
else:
    Stream = Any
"""One-dimensional stream of tokens, from a file or computed."""


@dataclass(frozen=True)
class Streams:
    """Splits of a computed corpus, with its reference values."""

    train: Rows
    """Training split."""
    validation: Rows
    """Validation split."""
    train_marks: Rows | None
    """Marks of the training split (`ComputedMarks`); None together with `validation_marks`."""
    validation_marks: Rows | None
    """Marks of the validation split."""
    largest: int
    """Largest token id of any split."""
    unigram_entropy: float
    """Expected entropy of the training split, nats per token."""
    bigram_entropy: float
    """Expected conditional entropy of a token given the previous one, nats."""
    marked_share: float
    """Expected share of the training tokens that are marked, 0 to 1."""


def pieces(stream: Stream, starts: Sequence[int], count: int) -> np.ndarray:
    """Return `count` consecutive tokens from each start of a stream, as an array [n, count] of the stream's type.

    Raises:
        ValueError: `stream` is an array, and `starts` is empty or its pieces differ in length because one exceeds the
            end.
    """
    if isinstance(stream, Rows):
        return stream.pieces(np.asarray(starts, dtype=np.int64), count)
    result: np.ndarray[Any, Any] = np.stack([stream[start : start + count] for start in starts])
    return result
