"""Flip-flop: a bit is written now and then, and must be said again where it is read (docs/mechanisms.md, "Flip-flop").

A row is made of pairs of an instruction and a bit: w 1 writes it, i 0 is to be ignored, and after r stands the bit that was
written last.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ....model.bounds import MAX_COMPUTED_ROW, MAX_COUNT, MAX_INT64
from ....model.config import Config, Float, Int, knob
from ...config import DataConfig
from ..computed_rows import ComputedMarks, RandomRows, Streams, entropy, to_uniform
from ..corpus_kind import CorpusConfig, CorpusKind
from ..tokenizer import FLIPFLOP

WRITE, READ, IGNORE, ZERO, ONE = (FLIPFLOP.index(letter) for letter in "wri01")
NAME = "flipflop"


class FlipFlopConfig(CorpusConfig):
    """Settings of the corpus flipflop, which decide its tokens, so that they are in a cell's id by way of its fingerprint."""

    length: Int = knob(
        512,
        "Tokens of a row, an even number; train.seq_len has to be the same.",
        ge=4,
        multiple_of=2,
        le=MAX_COMPUTED_ROW,
    )
    ignore: Float = knob(0.8, "Probability of i; w and r share the rest.", ge=0, le=1)
    train_rows: Int = knob(1_600_000, "Rows of the training split.", ge=1, le=MAX_COUNT)
    validation_rows: Int = knob(16_000, "Rows of the validation split.", ge=1, le=MAX_COUNT)
    seed: Int = knob(0, "Seed of all rows; the same for every cell, whatever its own seed.", ge=0, le=MAX_INT64)


class FlipFlopRows(RandomRows):
    """Rows of one split, uint16 [rows, length]. One number a pair: its lowest bit is the bit, its upper 53 bits choose the instruction."""

    first = WRITE

    def __init__(self, rows: int, length: int, *, ignore: float, seed: int, split: str) -> None:
        self.ignore, self._pairs = ignore, length // 2
        super().__init__(rows, length, corpus=NAME, seed=seed, split=split, draws=self._pairs)

    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
        uniform = to_uniform(raw)
        instruction = np.where(uniform < self.ignore, IGNORE, np.where(uniform < (1 + self.ignore) / 2, WRITE, READ))
        instruction[:, 0], instruction[:, -1] = WRITE, READ
        bit = (raw & np.uint64(1)).astype(np.int64)
        pairs = np.arange(self._pairs)
        last_write = np.maximum.accumulate(np.where(instruction == WRITE, pairs, 0), axis=1)
        rows[:, 0::2] = instruction
        rows[:, 1::2] = ZERO + np.where(instruction == READ, np.take_along_axis(bit, last_write, 1), bit)


def mark_reads(rows: np.ndarray) -> np.ndarray:
    """For each token of whole rows [..., length] whether it is a bit that is read: uint16 of the same shape, 0 or 1."""
    marks = np.zeros_like(rows, dtype=np.uint16)
    marks[..., 1::2] = rows[..., 0::2] == READ
    return marks


def settings_of(data: DataConfig) -> FlipFlopConfig:
    """What a data section says of the corpus, or the defaults."""
    return FlipFlopConfig.model_validate(data.settings.get(NAME, {}))


class FlipFlopCorpus(CorpusKind):
    """Rows of instructions and bits; marked are the bits that are read."""

    Config: ClassVar[type[Config]] = FlipFlopConfig
    description = (
        "rows of bits that are written and read again, worked out from their numbers; the bits read are marked"
    )
    tokenizer = "flipflop"
    may_mark = True
    at_hand = True

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Both splits, and what is expected of the training split: the forced ends of a row are counted."""

        def rows(count: int, split: str) -> FlipFlopRows:
            return FlipFlopRows(count, settings.length, ignore=settings.ignore, seed=settings.seed, split=split)

        train, validation = rows(settings.train_rows, "train"), rows(settings.validation_rows, "validation")
        pairs, write_share = settings.length // 2, (1 - settings.ignore) / 2
        ends = (1 + (pairs - 2) * write_share) / pairs
        instruction = entropy((ends, ends, (pairs - 2) * settings.ignore / pairs))
        return Streams(
            train=train,
            validation=validation,
            train_marks=ComputedMarks(train, mark_reads),
            validation_marks=ComputedMarks(validation, mark_reads),
            largest=max(ZERO, ONE),
            unigram_entropy=math.log(2) + (instruction + math.log(2)) / 2,
            bigram_entropy=(instruction + math.log(2)) / 2,
            marked_share=ends / 2,
        )

    @classmethod
    def row_length(cls, settings: Any) -> int:
        """Rows are whole: a row of training is one of these."""
        return int(settings.length)


def coin_flip_accuracy(length: int, ignore: float) -> float:
    """The share of rows that fair coins get right at every read: the mean of 2^-reads."""
    return 0.5 * (1 - (1 - ignore) / 4) ** (length // 2 - 2)
