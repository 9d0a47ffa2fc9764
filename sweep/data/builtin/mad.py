"""Six synthetic tasks of MAD: recall, fuzzy recall, noisy recall, copying, compression and memorization.

See docs/reference/mechanisms.md, "MAD". Ids of a vocabulary of V tokens: keys come first, then values, then noise; the
last ids are the signs of the task, such as the blank. Copying and compression have plain tokens in place of keys and
values.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from ....model.bounds import MAX_COMPUTED_ROW, MAX_COUNT, MAX_INT64
from ....model.config import Config, Float, Int, knob
from ..computed_rows import TARGET, ComputedMarks, RandomRows, Streams, entropy, to_uniform
from ..corpus_kind import CorpusConfig, CorpusKind
from ..tokenizer import MadTokenizer

NAME = "mad"
MOTIF = 3
"""Largest number of tokens of a key or value of fuzzy recall."""
COUNTED_ROWS = 512
"""Rows from which frequencies of tokens and the share of marked ones are estimated."""
MIX = tuple(np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of the hash splitmix64."""


class MadConfig(CorpusConfig):
    """Settings of the corpus mad, which decide its tokens, so that they are in a cell's id by way of its fingerprint.

    Names and defaults are those of the benchmark; `vocabulary` counts signs and noise too.
    """

    task: Literal["recall", "fuzzy", "noisy", "copying", "compression", "memorization"] = knob("recall", "Task.")
    vocabulary: Int = knob(16, "Token ids; at most model.vocab_size.", ge=8, le=MadTokenizer.TOKENS)
    length: Int = knob(
        128,
        "Tokens that the network reads per row, an even number. train.seq_len is one more for fuzzy, copying and memorization.",
        ge=8,
        multiple_of=2,
        le=MAX_COMPUTED_ROW,
    )
    noise: Float = knob(0.0, "Probability that noise takes the place of a pair, for noisy.", ge=0, lt=1)
    noise_vocabulary: Int = knob(
        0, "Token ids of noise, a part of the vocabulary, for noisy.", ge=0, le=MadTokenizer.TOKENS
    )
    copied: Int = knob(16, "Tokens to copy per row, for copying.", ge=1, le=MAX_COMPUTED_ROW)
    train_rows: Int = knob(12_800, "Rows of the training split, each read once per epoch.", ge=1, le=MAX_COUNT)
    validation_rows: Int = knob(1_280, "Rows of the validation split.", ge=1, le=MAX_COUNT)
    seed: Int = knob(0, "Seed of all rows; the same for every cell, regardless of its own seed.", ge=0, le=MAX_INT64)

    @model_validator(mode="after")
    def _check_sizes(self) -> MadConfig:
        """Raise ValueError if tokens of the task do not fit into the row or into the vocabulary."""
        if (self.noise > 0 or self.noise_vocabulary > 0) and self.task != "noisy":
            raise ValueError(
                f"noise: only the task noisy has noise, not {self.task}; set noise and noise_vocabulary to 0"
            )
        if self.noise > 0 and self.noise_vocabulary == 0:
            raise ValueError("noise_vocabulary: noise needs token ids of its own; set it above 0")
        need = 2 * (MOTIF if self.task == "fuzzy" else 1) + self.noise_vocabulary + 1
        if self.vocabulary < need:
            raise ValueError(f"vocabulary: the task {self.task} needs {need} token ids or more, got {self.vocabulary}")
        if self.task == "copying" and self.length < 2 * self.copied + 2:
            raise ValueError(f"length: {self.copied} copied tokens need a row of {2 * self.copied + 2} or more")
        if self.task == "fuzzy" and self.length < 8 * MOTIF:
            raise ValueError(f"length: keys and values of up to {MOTIF} tokens need a row of {8 * MOTIF} or more")
        return self

    @property
    def plain(self) -> int:
        """Token ids that are neither sign nor noise."""
        signs = {"fuzzy": 1, "copying": 2, "compression": 1, "memorization": 1}.get(self.task, 0)
        return self.vocabulary - signs - self.noise_vocabulary

    @property
    def keys(self) -> int:
        """Number of key tokens, which is also the id of the first value; 0 for a task without pairs."""
        return 0 if self.task in ("copying", "compression") else self.plain // 2

    @property
    def row(self) -> int:
        """Tokens of a row of the stream: one more than `length` where the last token read has a target of its own."""
        return self.length + (self.task in ("fuzzy", "copying", "memorization"))


class MadRows(RandomRows):
    """Rows of one split, uint16 [rows, row]. Each decision takes one random number of its row."""

    first = None
    stores_rows = True

    def __init__(self, rows: int, settings: MadConfig, *, split: str) -> None:
        """Create the rows of a split; `split` enters the random key, and fuzzy keys are longest outside of "train"."""
        self.settings, self.longest_keys = settings, split != "train"
        self._fill: Callable[[np.ndarray, np.ndarray], None] = getattr(self, f"_fill_{settings.task}")
        pairs, copied = settings.length // 2, settings.copied
        blanks = settings.length - 2 * copied - 1
        draws = {
            "recall": 4 * pairs + 3, "noisy": 4 * pairs + 3, "fuzzy": 4 * pairs + 2, "copying": copied + blanks,
            "compression": settings.length - 1, "memorization": pairs,
        }  # fmt: skip
        name = f"{NAME}/{settings.task}"
        super().__init__(rows, settings.row, corpus=name, seed=settings.seed, split=split, draws=draws[settings.task])

    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write the rows (uint16 [n, row]) of the task that follow from the raw numbers `raw` (uint64 [n, draws])."""
        self._fill(rows, raw)

    def _fill_recall(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write pairs of random keys, each with the value that the row gives it; the last pair repeats a key.

        Noise, two tokens of its own ids, takes the place of a pair with probability `noise`; one pair, drawn at random,
        always stays. The last key is drawn among the different keys of the row.
        """
        settings, pairs, n = self.settings, self.settings.length // 2, len(rows)
        values, uniform = settings.plain - settings.keys, to_uniform(raw)
        key = (uniform[:, :pairs] * settings.keys).astype(np.int64)
        is_noise = uniform[:, pairs : 2 * pairs] < settings.noise
        is_noise[:, -1] = False
        is_noise[np.arange(n), (uniform[:, -2] * (pairs - 1)).astype(np.int64)] = False
        present = np.zeros((n, settings.keys), dtype=bool)
        at, column = np.nonzero(~is_noise[:, :-1])
        present[at, key[at, column]] = True
        rank = (uniform[:, -3] * present.sum(1)).astype(np.int64)
        key[:, -1] = np.argmax(np.cumsum(present, 1) == rank[:, None] + 1, 1)
        rows[:, 0::2] = key
        rows[:, 1::2] = settings.keys + (hashed_uniform(raw[:, -1:], key) * values).astype(np.int64)
        noise = settings.plain + (uniform[:, 2 * pairs : 4 * pairs] * settings.noise_vocabulary).astype(np.int64)
        np.copyto(rows, noise.astype(rows.dtype), where=np.repeat(is_noise, 2, axis=1))

    _fill_noisy = _fill_recall

    def _fill_fuzzy(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write pairs of a key and a value of one to three tokens each, as long as there is room, and one pair again.

        Tokens of a key differ, and so do those of a value. Keys of the validation split have three tokens. The pair
        that returns at the end is drawn among all. Rows are padded on the left with the last id of the vocabulary.
        """
        settings, uniform = self.settings, to_uniform(raw)
        most = settings.length // 2
        values, n = settings.plain - settings.keys, len(rows)
        written = np.full((n, settings.row + 4 * MOTIF), settings.vocabulary - 1, dtype=np.int64)
        end, index = np.zeros(n, dtype=np.int64), np.arange(n)
        starts, sizes = np.zeros((n, most), dtype=np.int64), np.zeros((n, most), dtype=np.int64)
        count = np.zeros(n, dtype=np.int64)
        for pair in range(most):
            # a pair must leave room for itself and for its return
            open_rows = end + 4 * MOTIF <= settings.row
            if not open_rows.any():
                break
            draws = uniform[:, 4 * pair : 4 * pair + 4]
            size = np.full(n, MOTIF) if self.longest_keys else 1 + (draws[:, 0] * MOTIF).astype(np.int64)
            key = distinct(draws[:, 1:4], settings.keys)
            number = sum((key[:, at] + 1) * (size > at) * (settings.keys + 1) ** at for at in range(MOTIF))
            of_value = hashed_uniform(raw[:, -1:], MOTIF * 4 * np.asarray(number)[:, None] + np.arange(4))
            value_size = 1 + (of_value[:, 0] * MOTIF).astype(np.int64)
            value = settings.keys + distinct(of_value[:, 1:], values)
            for at in range(MOTIF):
                _put(written, end + at, key[:, at], open_rows & (size > at))
                _put(written, end + size + at, value[:, at], open_rows & (value_size > at))
            starts[:, pair], sizes[:, pair] = end, size + value_size
            end, count = end + np.where(open_rows, size + value_size, 0), count + open_rows
        chosen = (uniform[:, -2] * count).astype(np.int64)
        start, size = starts[index, chosen], sizes[index, chosen]
        for at in range(2 * MOTIF):
            _put(written, end + at, written[index, start + at], size > at)
        shift = settings.row - (end + size)
        columns = np.arange(settings.row) - shift[:, None]
        rows[:] = np.where(columns < 0, settings.vocabulary - 1, np.take_along_axis(written, columns.clip(0), 1))

    def _fill_copying(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write tokens with blanks at random places before them, the sign to copy, and a blank for each token."""
        settings, copied = self.settings, self.settings.copied
        uniform = to_uniform(raw)
        blank, sign = settings.vocabulary - 2, settings.vocabulary - 1
        before = np.zeros((len(rows), copied), dtype=np.int64)
        index = np.arange(len(rows))[:, None]
        np.add.at(before, (index, (uniform[:, copied:] * copied).astype(np.int64)), 1)
        rows[:] = blank
        tokens = (uniform[:, :copied] * settings.plain).astype(rows.dtype)
        np.put_along_axis(rows, np.arange(copied) + np.cumsum(before, 1), tokens, 1)
        rows[:, settings.length - copied - 1] = sign

    def _fill_compression(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write random tokens and the sign to which they are compressed."""
        rows[:, :-1] = (to_uniform(raw) * self.settings.plain).astype(np.int64)
        rows[:, -1] = self.settings.vocabulary - 1

    def _fill_memorization(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write random keys, each followed by the sign in whose place its value belongs."""
        rows[:] = self.settings.vocabulary - 1
        rows[:, 0:-1:2] = (to_uniform(raw) * self.settings.keys).astype(np.int64)


def _put(rows: np.ndarray, columns: np.ndarray, tokens: np.ndarray, where: np.ndarray) -> None:
    """Write one token per row [n] at its own column, in the rows of the mask `where`."""
    index = np.flatnonzero(where)
    rows[index, columns[index]] = tokens[index]


def distinct(uniform: np.ndarray, count: int) -> np.ndarray:
    """Return numbers below `count`, different from each other in a row, int64 [n, k], from uniform numbers [n, k]."""
    chosen = np.empty(uniform.shape, dtype=np.int64)
    for at in range(uniform.shape[1]):
        drawn = (uniform[:, at] * (count - at)).astype(np.int64)
        for earlier in np.sort(chosen[:, :at], 1).T:
            drawn += drawn >= earlier
        chosen[:, at] = drawn
    return chosen


def hashed_uniform(row_key: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return a uniform number in [0, 1) for each number of a row, equal for equal numbers, by the hash splitmix64.

    Args:
        row_key: Random number of each row, uint64 [n, 1].
        numbers: Numbers, int64 [n, k].
    """
    with np.errstate(over="ignore"):
        state = row_key + (numbers.astype(np.uint64) + np.uint64(1)) * MIX[0]
        state = (state ^ (state >> np.uint64(30))) * MIX[1]
        state = (state ^ (state >> np.uint64(27))) * MIX[2]
        return to_uniform(state ^ (state >> np.uint64(31)))


@functools.lru_cache(maxsize=8)
def memorized_values(settings: MadConfig) -> np.ndarray:
    """Return the value token of each key of memorization, int64 [keys]; values differ, and every row has the same."""
    digest = hashlib.sha256(f"{NAME}/memorization/{settings.seed}/values".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(settings.plain - settings.keys)
    return settings.keys + np.argsort(raw, kind="stable")[: settings.keys]


def mark_targets(rows: np.ndarray, settings: MadConfig) -> np.ndarray:
    """Return the marks of complete rows [n, row], uint16: 0 for no target, 1 for the token itself, else a target.

    A mark from 2 (TARGET) on stands for the target token that many ids lower, in place of the row's own token.

    - recall, noisy and fuzzy: values of keys that the row had before, themselves.
    - copying: the copied tokens, in place of the blanks after the sign.
    - compression: the row's tokens, each in place of the token after it.
    - memorization: the value of each key, in place of the token after the sign.
    """
    marks = np.zeros(rows.shape, dtype=np.uint16)
    tokens = rows.astype(np.int64)
    if settings.task == "copying":
        n, copied = len(rows), settings.copied
        content = tokens[:, : settings.length - copied - 1]
        marks[:, settings.row - copied :] = TARGET + content[content < settings.plain].reshape(n, copied)
    elif settings.task == "compression":
        marks[:, 1:] = TARGET + tokens[:, :-1]
    elif settings.task == "memorization":
        marks[:, 2::2] = TARGET + memorized_values(settings)[tokens[:, 0:-1:2]]
    elif settings.task == "fuzzy":
        for row, mark in zip(tokens, marks, strict=True):
            _mark_motifs(row, mark, settings)
    else:
        key, value = tokens[:, 0::2], tokens[:, 1::2]
        is_pair = value < settings.plain
        first = np.full((len(rows), settings.plain + settings.noise_vocabulary), key.shape[1])
        for pair in reversed(range(key.shape[1])):
            first[np.arange(len(rows)), key[:, pair]] = pair
        marks[:, 1::2] = is_pair & (np.take_along_axis(first, key, 1) < np.arange(key.shape[1]))
    return marks


def _mark_motifs(row: np.ndarray, mark: np.ndarray, settings: MadConfig) -> None:
    """Mark the values of a row of fuzzy recall whose key the row had before; `mark` is changed in place."""
    is_key = row < settings.keys
    is_value = (row >= settings.keys) & (row < settings.plain)
    bounds = np.flatnonzero(np.diff(is_key.astype(np.int8), prepend=0)).tolist()
    bounds.append(len(row))
    seen: set[tuple[int, ...]] = set()
    # keys and values take turns: a run of keys, then a run of values
    for start, middle, end in zip(bounds[0::2], bounds[1::2], bounds[2::2], strict=False):
        key = tuple(row[start:middle].tolist())
        if key in seen:
            mark[middle:end] = is_value[middle:end]
        seen.add(key)


def settings_of(data: Any) -> MadConfig:
    """Return the settings of this corpus in a data section, or its defaults."""
    return MadConfig.model_validate(data.settings.get(NAME, {}))


def guess(settings: MadConfig) -> float:
    """Return the chance level: the probability that a random value, or a random token to copy, is right."""
    return 1 / (settings.plain - settings.keys)


class MadCorpus(CorpusKind):
    """Corpus of rows of one of MAD's six tasks; the targets are marked."""

    Config: ClassVar[type[Config]] = MadConfig
    description = "rows of one of MAD's six synthetic tasks, generated from row numbers; targets are marked"
    tokenizer = "mad"
    may_mark = True
    at_hand = True

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Return both splits; entropies and marked share are estimated from 512 training rows (COUNTED_ROWS).

        Args:
            settings: A `MadConfig`.
        """
        train = MadRows(settings.train_rows, settings, split="train")
        validation = MadRows(settings.validation_rows, settings, split="validation")
        mark = functools.partial(mark_targets, settings=settings)
        replaces = settings.task in ("copying", "compression", "memorization")
        counted = train.made(np.arange(min(train.rows, COUNTED_ROWS)))
        share = float((mark(counted) > 0).mean())
        unigram, bigram = _entropies(counted)
        return Streams(
            train=train, validation=validation,
            train_marks=ComputedMarks(train, mark, replaces_targets=replaces),
            validation_marks=ComputedMarks(validation, mark, replaces_targets=replaces),
            largest=settings.vocabulary - 1, unigram_entropy=unigram, bigram_entropy=bigram, marked_share=share,
        )  # fmt: skip

    @classmethod
    def row_length(cls, settings: Any) -> int:
        """Return the tokens of a row, which every training row must have."""
        return int(settings.row)

    @classmethod
    def vocabulary(cls, settings: Any) -> int:
        """Return the number of token ids of the task."""
        return int(settings.vocabulary)


def _entropies(rows: np.ndarray) -> tuple[float, float]:
    """Return (entropy of a token, entropy of a token given the previous one of the row) of rows [n, row], in nats."""
    tokens = rows.astype(np.int64)
    counts = np.unique(tokens, return_counts=True)[1] / tokens.size
    pairs = np.unique(tokens[:, :-1] * (MadTokenizer.TOKENS + 1) + tokens[:, 1:], return_counts=True)[1]
    before = np.unique(tokens[:, :-1], return_counts=True)[1]
    size = tokens[:, 1:].size
    return entropy(counts), max(0.0, entropy(pairs / size) - entropy(before / size)) if size else math.nan
