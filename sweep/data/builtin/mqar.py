"""Associative recall: rows of key-value pairs, after which each key returns as a question for its value.

See docs/reference/mechanisms.md, "Associative recall".
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import numpy as np
from pydantic import model_validator

from ....model.bounds import MAX_COMPUTED_ROW, MAX_COUNT, MAX_INT64
from ....model.config import Config, Float, Int, knob
from ..computed_rows import ComputedMarks, RandomRows, Streams, entropy, to_uniform
from ..corpus_kind import CorpusConfig, CorpusKind
from ..tokenizer import RecallTokenizer

NAME = "mqar"
BLANK, KEYS, VALUES = 0, 1, 1 + RecallTokenizer.KEYS
"""Ids of the blank token between questions, of the first key and of the first value."""
ENTROPY_ROWS = 4096
"""Rows from which the frequencies of token kinds are estimated."""


class MqarConfig(CorpusConfig):
    """Settings of the corpus mqar, which decide its tokens, so that they are in a cell's id by way of its fingerprint."""

    length: Int = knob(
        128,
        "Tokens per row, an even number; must equal train.seq_len.",
        ge=4,
        multiple_of=2,
        le=MAX_COMPUTED_ROW,
    )
    pairs: Int = knob(8, "Pairs per row, each queried once.", ge=1, le=MAX_COMPUTED_ROW)
    keys: Int = knob(64, "Number of different keys; those of a row differ.", ge=1, le=RecallTokenizer.KEYS)
    values: Int = knob(64, "Number of different values.", ge=2, le=RecallTokenizer.VALUES)
    gap: Float = knob(
        0.1,
        "Exponent a of the questions' positions: the n-th slot after the pairs has the weight n^(a - 1).",
        gt=0,
        le=1,
    )
    train_rows: Int = knob(1_000_000, "Rows of the training split.", ge=1, le=MAX_COUNT)
    validation_rows: Int = knob(4_000, "Rows of the validation split.", ge=1, le=MAX_COUNT)
    seed: Int = knob(0, "Seed of all rows; the same for every cell, regardless of its own seed.", ge=0, le=MAX_INT64)

    @model_validator(mode="after")
    def _check_sizes(self) -> MqarConfig:
        """Raise ValueError if the row is too short for the pairs, or there are fewer keys than pairs."""
        if self.length < 4 * self.pairs + 2:
            raise ValueError(f"length: {self.pairs} pairs and as many questions take {4 * self.pairs + 2} tokens")
        if self.keys < self.pairs:
            raise ValueError(f"keys: {self.pairs} pairs of a row need as many keys, got {self.keys}")
        return self


class MqarRows(RandomRows):
    """Rows of one split, uint16 [rows, length]: blank, pairs, a question or two blanks per slot, blank.

    A row takes one random number per existing key, whose order chooses the keys. Then come one number per pair, which
    chooses its value, and one per slot of a question. The slots with the smallest -ln(1 - u) / weight get the
    questions, the smallest for the first pair, which is weighted drawing without replacement.
    """

    first = BLANK

    def __init__(self, rows: int, settings: MqarConfig, *, split: str) -> None:
        """Create the rows of a split.

        Args:
            rows: Number of rows.
            settings: Settings of the corpus.
            split: Name of the split, which enters the random key.
        """
        self.settings = settings
        self._question_slots = settings.length // 2 - 1 - settings.pairs
        draws = settings.keys + settings.pairs + self._question_slots
        super().__init__(rows, settings.length, corpus=NAME, seed=settings.seed, split=split, draws=draws)
        self._weights = np.arange(1, self._question_slots + 1, dtype=np.float64) ** (settings.gap - 1)

    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write the rows (uint16 [n, length]) that follow from the raw numbers `raw` (uint64 [n, draws]).

        Each row has its pairs first, then each key once more, followed by its value, at a random place. The keys of a
        row differ; values may repeat.

        Keys are drawn without replacement, uniformly. Places of questions are drawn without replacement with weight
        slot^(gap - 1), slots counted from 1, and go to the pairs in the order drawn. Free places hold BLANK (token 0).
        """
        keys, pairs = self.settings.keys, self.settings.pairs
        key = KEYS + np.argsort(raw[:, :keys], axis=1, kind="stable")[:, :pairs]
        value = VALUES + (to_uniform(raw[:, keys : keys + pairs]) * self.settings.values).astype(np.int64)
        waiting_time = -np.log1p(-to_uniform(raw[:, keys + pairs :])) / self._weights
        questions = 1 + 2 * (pairs + np.argsort(waiting_time, axis=1, kind="stable")[:, :pairs])
        rows[:] = BLANK
        rows[:, 1 : 1 + 2 * pairs : 2], rows[:, 2 : 2 + 2 * pairs : 2] = key, value
        np.put_along_axis(rows, questions, key.astype(rows.dtype), 1)
        np.put_along_axis(rows, questions + 1, value.astype(rows.dtype), 1)


def mark_answers(rows: np.ndarray, pairs: int) -> np.ndarray:
    """Return 1 for each token that answers a question and 0 elsewhere, for complete rows.

    Answers are the values after the pairs; the values of the pairs themselves are not marked.

    Args:
        rows: Tokens, [..., length].
        pairs: Pairs per row.

    Returns:
        Marks, uint16 of the shape of `rows`.
    """
    marks = np.zeros_like(rows, dtype=np.uint16)
    marks[..., 2 * pairs + 1 :] = rows[..., 2 * pairs + 1 :] >= VALUES
    return marks


def settings_of(data: Any) -> MqarConfig:
    """Return the settings of this corpus in a data section, or its defaults."""
    return MqarConfig.model_validate(data.settings.get(NAME, {}))


class MqarCorpus(CorpusKind):
    """Corpus of rows of pairs and questions; the answers are marked."""

    Config: ClassVar[type[Config]] = MqarConfig
    description = "rows of key-value pairs and questions about the keys, generated from row numbers; answers are marked"
    tokenizer = "mqar"
    may_mark = True
    at_hand = True

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Return both splits with the expected entropies (nats per token) and marked share of the training split.

        The entropies are estimated from up to 4,096 training rows (ENTROPY_ROWS), which are computed here.

        Args:
            settings: An `MqarConfig`.
        """
        train = MqarRows(settings.train_rows, settings, split="train")
        validation = MqarRows(settings.validation_rows, settings, split="validation")
        mark = functools.partial(mark_answers, pairs=settings.pairs)
        unigram, bigram = _entropies(train, settings)
        return Streams(
            train=train, validation=validation, train_marks=ComputedMarks(train, mark),
            validation_marks=ComputedMarks(validation, mark), largest=VALUES + settings.values - 1,
            unigram_entropy=unigram, bigram_entropy=bigram, marked_share=settings.pairs / settings.length,
        )  # fmt: skip

    @classmethod
    def row_length(cls, settings: Any) -> int:
        """Return the tokens of a row, which every training row must have."""
        return int(settings.length)


def _entropies(rows: MqarRows, settings: MqarConfig) -> tuple[float, float]:
    """Return (entropy of a token, entropy of a token given the previous one) in nats.

    Keys and values are taken as uniform, and as independent of earlier tokens but for their kind. Only the frequency
    with which blank, key and value follow each other is estimated, from the first `ENTROPY_ROWS` rows.

    Args:
        rows: Training split.
        settings: Settings of the corpus.
    """
    within = np.array([0.0, math.log(settings.keys), math.log(settings.values)])
    tokens = rows[: min(rows.rows, ENTROPY_ROWS) * rows.length + 1]
    kind = (tokens >= KEYS).astype(np.int64) + (tokens >= VALUES)
    transitions = np.zeros((3, 3))
    np.add.at(transitions, (kind[:-1], kind[1:]), 1.0)
    share = transitions.sum(0) / transitions.sum()
    unigram = entropy(share.tolist()) + share @ within
    after = transitions / transitions.sum(1, keepdims=True)
    bigram = sum(before * (entropy(row.tolist()) + row @ within) for before, row in zip(share, after, strict=True))
    return float(unigram), float(bigram)
