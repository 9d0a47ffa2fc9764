"""Associative recall: pairs of a key and a value, and later some keys again, each to be answered with its value
(docs/mechanisms.md, "Associative recall").
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
"""The token between questions, the first key, the first value."""
ENTROPY_ROWS = 4096
"""Rows from which the share of questions at each place is taken."""


class MqarConfig(CorpusConfig):
    """Settings of the corpus mqar, which decide its tokens, so that they are in a cell's id by way of its fingerprint."""

    length: Int = knob(
        128,
        "Tokens of a row, an even number; train.seq_len has to be the same.",
        ge=4,
        multiple_of=2,
        le=MAX_COMPUTED_ROW,
    )
    pairs: Int = knob(8, "Pairs of a row, each asked for once.", ge=1, le=MAX_COMPUTED_ROW)
    keys: Int = knob(64, "Keys that there are; those of a row differ.", ge=1, le=RecallTokenizer.KEYS)
    values: Int = knob(64, "Values that there are.", ge=2, le=RecallTokenizer.VALUES)
    gap: Float = knob(
        0.1, "Exponent a of the questions' places: the n-th place after the pairs has the weight n^(a - 1).", gt=0, le=1
    )
    train_rows: Int = knob(1_000_000, "Rows of the training split.", ge=1, le=MAX_COUNT)
    validation_rows: Int = knob(4_000, "Rows of the validation split.", ge=1, le=MAX_COUNT)
    seed: Int = knob(0, "Seed of all rows; the same for every cell, whatever its own seed.", ge=0, le=MAX_INT64)

    @model_validator(mode="after")
    def _check_sizes(self) -> MqarConfig:
        if self.length < 4 * self.pairs + 2:
            raise ValueError(f"length: {self.pairs} pairs and as many questions take {4 * self.pairs + 2} tokens")
        if self.keys < self.pairs:
            raise ValueError(f"keys: {self.pairs} pairs of a row need as many keys, got {self.keys}")
        return self


class MqarRows(RandomRows):
    """Rows of one split, uint16 [rows, length]: a blank, the pairs, then a question or two blanks at every second place, a blank.

    A row takes a number for each key there is, which are sorted; for each pair, which chooses its value; and for each place of
    a question, where the smallest of -ln(1 - u) / weight win, the smallest for the first pair: drawing without replacement.
    """

    first = BLANK

    def __init__(self, rows: int, settings: MqarConfig, *, split: str) -> None:
        self.settings = settings
        self._question_slots = settings.length // 2 - 1 - settings.pairs
        draws = settings.keys + settings.pairs + self._question_slots
        super().__init__(rows, settings.length, corpus=NAME, seed=settings.seed, split=split, draws=draws)
        self._weights = np.arange(1, self._question_slots + 1, dtype=np.float64) ** (settings.gap - 1)

    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
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
    """For each token of whole rows [..., length] whether it answers a question: uint16 of the same shape, 0 or 1."""
    marks = np.zeros_like(rows, dtype=np.uint16)
    marks[..., 2 * pairs + 1 :] = rows[..., 2 * pairs + 1 :] >= VALUES
    return marks


def settings_of(data: Any) -> MqarConfig:
    """What a data section says of the corpus, or the defaults."""
    return MqarConfig.model_validate(data.settings.get(NAME, {}))


class MqarCorpus(CorpusKind):
    """Rows of pairs and questions; marked are the answers."""

    Config: ClassVar[type[Config]] = MqarConfig
    description = (
        "rows of keys and values whose keys are asked for again, worked out from their numbers; answers are marked"
    )
    tokenizer = "mqar"
    may_mark = True
    at_hand = True

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Both splits, and the entropies of the training split as it is expected."""
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
        """Rows are whole: a row of training is one of these."""
        return int(settings.length)


def _entropies(rows: MqarRows, settings: MqarConfig) -> tuple[float, float]:
    """Of a token, and of a token given the one before, in nats.

    Keys and values are uniform; how often one of the three kinds follows another is taken from the first rows.
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
