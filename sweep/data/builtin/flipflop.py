"""Flip-flop corpus: rows that write bits and read back the last one (docs/reference/mechanisms.md, "Flip-flop").

A row consists of pairs of an instruction and a bit. "w 1" writes it, "i 0" is to be ignored, and "r" is followed by the
bit that was written last.
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

WRITE, READ, IGNORE, BIT_0, BIT_1 = (FLIPFLOP.index(letter) for letter in "wri01")
NAME = "flipflop"


class FlipFlopConfig(CorpusConfig):
    """Settings of the corpus flipflop, which decide its tokens, so that they are in a cell's id by way of its fingerprint."""

    length: Int = knob(
        512,
        "Tokens per row, an even number; must equal train.seq_len.",
        ge=4,
        multiple_of=2,
        le=MAX_COMPUTED_ROW,
    )
    ignore: Float = knob(0.8, "Probability of i; w and r share the rest.", ge=0, le=1)
    train_rows: Int = knob(1_600_000, "Rows of the training split.", ge=1, le=MAX_COUNT)
    validation_rows: Int = knob(16_000, "Rows of the validation split.", ge=1, le=MAX_COUNT)
    seed: Int = knob(0, "Seed of all rows; the same for every cell, regardless of its own seed.", ge=0, le=MAX_INT64)


class FlipFlopRows(RandomRows):
    """Rows of one split, uint16 [rows, length].

    Each pair takes one random number: its lowest bit is the bit, its upper 53 bits choose the instruction.
    """

    first = WRITE

    def __init__(self, rows: int, length: int, *, ignore: float, seed: int, split: str) -> None:
        """Create the rows of a split.

        Args:
            rows: Number of rows.
            length: Tokens per row, even.
            ignore: Probability of the instruction i; w and r share the remainder equally.
            seed: Seed of the corpus.
            split: Name of the split, which enters the random key.
        """
        self.ignore, self._pairs = ignore, length // 2
        super().__init__(rows, length, corpus=NAME, seed=seed, split=split, draws=self._pairs)

    def fill(self, rows: np.ndarray, raw: np.ndarray) -> None:
        """Write the rows (uint16 [n, length]) that follow from the raw numbers `raw` (uint64 [n, length / 2]).

        Even columns hold the tokens of the instructions w, r and i, odd ones those of the bits 0 and 1. The first
        instruction is always w, the last one r. A bit after r repeats the last written one; a bit after w or i is
        random.
        """
        uniform = to_uniform(raw)
        instruction = np.where(uniform < self.ignore, IGNORE, np.where(uniform < (1 + self.ignore) / 2, WRITE, READ))
        instruction[:, 0], instruction[:, -1] = WRITE, READ
        bit = (raw & np.uint64(1)).astype(np.int64)
        pairs = np.arange(self._pairs)
        last_write = np.maximum.accumulate(np.where(instruction == WRITE, pairs, 0), axis=1)
        rows[:, 0::2] = instruction
        rows[:, 1::2] = BIT_0 + np.where(instruction == READ, np.take_along_axis(bit, last_write, 1), bit)


def mark_reads(rows: np.ndarray) -> np.ndarray:
    """Return 1 for each bit that is read and 0 elsewhere, for complete rows [..., length]: uint16 of the same shape."""
    marks = np.zeros_like(rows, dtype=np.uint16)
    marks[..., 1::2] = rows[..., 0::2] == READ
    return marks


def settings_of(data: DataConfig) -> FlipFlopConfig:
    """Return the settings of this corpus in a data section, or its defaults."""
    return FlipFlopConfig.model_validate(data.settings.get(NAME, {}))


class FlipFlopCorpus(CorpusKind):
    """Corpus of rows of instructions and bits; the bits that are read are marked."""

    Config: ClassVar[type[Config]] = FlipFlopConfig
    description = "rows of bits that are written and read again, generated from row numbers; the bits read are marked"
    tokenizer = "flipflop"
    may_mark = True
    at_hand = True

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Return both splits, with the expected values of the training split instead of counted ones.

        The fixed first and last pair of a row count in them. Entropies are per token, in nats. The marked share is the
        number of reads per token.

        Args:
            settings: A `FlipFlopConfig`.
        """

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
            largest=max(BIT_0, BIT_1),
            unigram_entropy=math.log(2) + (instruction + math.log(2)) / 2,
            bigram_entropy=(instruction + math.log(2)) / 2,
            marked_share=ends / 2,
        )

    @classmethod
    def row_length(cls, settings: Any) -> int:
        """Return the tokens of a row, which every training row must have."""
        return int(settings.length)


def coin_flip_accuracy(length: int, ignore: float) -> float:
    """Return the expected share of rows in which fair coin flips answer every read correctly.

    It is the mean of 2^-reads over random rows, whose last pair is always a read and whose first pair never is.

    Args:
        length: Tokens per row.
        ignore: Probability of the instruction i.
    """
    return 0.5 * (1 - (1 - ignore) / 4) ** (length // 2 - 2)
