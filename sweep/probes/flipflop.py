"""Flip-flop probe: share of rows that repeat the last written bit at every read (docs/reference/mechanisms.md, "Flip-flop")."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...model.bounds import MAX_COUNT, MAX_LENGTH
from ...model.config import Float, Int, knob
from ...results import metrics
from ...results.intervals import wilson_of_trials
from ...results.metrics import Metric
from ...results.store.records import Measurement
from ..data.builtin.flipflop import FlipFlopRows, coin_flip_accuracy, mark_reads, settings_of
from ..data.tokenizer import FLIPFLOP
from .base import LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from .subject import CellSubject


class FlipFlopProbeConfig(ProbeConfig):
    """Settings of the probe flipflop. Length, seed and the probability of i in the split iid are those of the corpus."""

    iid: Int = knob(
        16_000, "Sequences like those of training: the first rows of the validation split.", ge=1, le=MAX_COUNT
    )
    sparse: Int = knob(160_000, "Number of sequences in which bits are seldom written or read.", ge=1, le=MAX_COUNT)
    dense: Int = knob(4_000, "Number of sequences in which bits are often written and read.", ge=1, le=MAX_COUNT)
    ignore_sparse: Float = knob(0.98, "Probability of i in the split sparse; w and r share the rest.", ge=0, le=1)
    ignore_dense: Float = knob(0.1, "Probability of i in the split dense.", ge=0, le=1)
    length: Int = knob(
        0, "Tokens of a sequence, an even number; 0: that of the corpus.", ge=0, multiple_of=2, le=MAX_LENGTH
    )
    items: Int = knob(
        1_000,
        "Number of first sequences per split whose outcomes are stored individually; all sequences are scored.",
        ge=0,
        le=MAX_COUNT,
    )


class _Split(NamedTuple):
    """Rows of a split and its probability of i."""

    rows: FlipFlopRows
    ignore: float


class _Score(NamedTuple):
    """Scores of a split, each int64 [sequences]."""

    reads: np.ndarray
    """Number of reads of each sequence."""
    wrong: np.ndarray
    """Number of wrong reads of each sequence."""


class FlipFlopProbe(LengthwiseProbe):
    """Accuracy of the reads in sequences of three splits.

    For each split it has the share of sequences with all reads right, the share of wrong reads, the number of reads,
    and the score of coin flips.

    A read is right when its bit has the largest logit of the vocabulary, given the preceding text.
    """

    divided = True
    Config = FlipFlopProbeConfig
    metrics = metrics.metrics_of_probe("flipflop")

    @property
    def _length(self) -> int:
        """Tokens of a sequence."""
        return int(self.settings.length or settings_of(self.config.data).length)

    def split_of(self, name: str) -> _Split:
        """Return the rows of a split and its probability of i.

        Those of iid are the first rows of the corpus's validation split, unless the probe has a length of its own. The
        others are drawn with the corpus's seed.

        Args:
            name: "iid", "sparse" or "dense".
        """
        corpus = settings_of(self.config.data)
        ignore = corpus.ignore if name == "iid" else float(getattr(self.settings, f"ignore_{name}"))
        split = "validation" if name == "iid" else name
        count = int(getattr(self.settings, name))
        return _Split(FlipFlopRows(count, self._length, ignore=ignore, seed=corpus.seed, split=split), ignore)

    def tokens(self, length: int) -> int:
        """Return the tokens of all sequences in all splits."""
        return self._length * int(self.settings.iid + self.settings.sparse + self.settings.dense)

    def chance(self, metric: Metric) -> float | None:
        """Return the score of a trivial answer in this cell, or None.

        For `exact_*` it is the expected share of sequences that coin flips answer right, over random sequences of the
        split. Else it is the metric's own chance.
        """
        kind, _, split = metric.name.partition("_")
        return coin_flip_accuracy(self._length, self.split_of(split).ignore) if kind == "exact" else metric.chance

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return a measurement for each of `metrics`, or a reason.

        An example is 1 if one sequence was right throughout, else 0: metric `exact_<split>`, `item` the index of the
        sequence. There are examples of the first `settings.items` sequences of each split. The reason is that the model
        cannot read the length, or that its tokenizer has no token per letter.

        Args:
            subject: Network to be measured.
            length: 0; the length of the sequences is a setting.
        """
        if (reason := subject.beyond(self._length - 1)) is not None:
            return reason
        letters = [subject.tokenizer.encode(letter) for letter in FLIPFLOP]
        if any(len(letter) != 1 for letter in letters):
            return f"n/a: tokenizer {subject.tokenizer.name} has no token for each of the letters {' '.join(FLIPFLOP)}"
        scores = {}
        for name in ("iid", "sparse", "dense"):
            rows = self.split_of(name).rows
            reads, right = subject.right_answers(rows, mark_reads, letters=np.concatenate(letters))
            scores[name] = _Score(reads, reads - right)
        measured = [self._measurement(metric.name, scores, length) for metric in self.metrics]
        return measured, [
            self.example(f"exact_{split}", float(wrong == 0), length, item=item)
            for split, score in scores.items()
            for item, wrong in enumerate(score.wrong[: int(self.settings.items)])
        ]

    def _measurement(self, metric: str, scores: dict[str, _Score], length: int) -> Measurement:
        """Return the measurement of one metric from the scores by split.

        `exact_*` is the share of sequences without a wrong read, with a Wilson interval over sequences. `error_*` is
        the number of wrong reads divided by that of all reads, without an interval. `reads_*` is the number of reads.
        `coin_*` is the expected share of sequences that coin flips answer right, given the reads of these sequences.

        Args:
            metric: Name of a metric, `<kind>_<split>`.
            scores: Scores by split.
            length: Length to record.
        """
        kind, _, split = metric.partition("_")
        reads, wrong = scores[split]
        sequences, n_reads = len(reads), int(reads.sum())
        if kind == "exact":
            share = float((wrong == 0).mean())
            low, high = wilson_of_trials(share, sequences)
            return self.value(metric, share, length, n=sequences, low=low, high=high)
        if kind == "error":
            return self.value(metric, int(wrong.sum()) / n_reads, length, n=n_reads)
        if kind == "reads":
            return self.value(metric, float(n_reads), length, n=sequences)
        return self.value(metric, float((0.5**reads).mean()), length, n=sequences)
