"""MAD probe: share of right answers in one of the six tasks of corpus mad (docs/reference/mechanisms.md, "MAD")."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ...model.bounds import MAX_COUNT
from ...model.config import Int, knob
from ...results import metrics
from ...results.intervals import wilson_of_trials
from ...results.metrics import Metric
from ..data.builtin.mad import MadRows, guess, mark_targets, settings_of
from ..data.tokenizer import MadTokenizer
from .base import LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from .subject import CellSubject


class MadProbeConfig(ProbeConfig):
    """Settings of the probe mad. Task and rows are the corpus's to say."""

    rows: Int = knob(1_280, "Number of rows that are scored, the first of the validation split.", ge=1, le=MAX_COUNT)
    items: Int = knob(
        200, "Number of first rows whose shares of right answers are stored individually.", ge=0, le=MAX_COUNT
    )


class MadProbe(LengthwiseProbe):
    """Share of right answers in the MAD task of the corpus, on rows like those of training.

    An answer is right when it has the largest logit of the vocabulary, given the true tokens before it.
    """

    divided = True
    Config = MadProbeConfig
    metrics = metrics.metrics_of_probe("mad")

    def tokens(self, length: int) -> int:
        """Return the tokens of all rows."""
        return int(self.settings.rows * settings_of(self.config.data).row)

    def chance(self, metric: Metric) -> float | None:
        """Return the score of a random guess: among the values, or among the tokens to copy; else the metric's own."""
        return guess(settings_of(self.config.data)) if metric.name == "accuracy" else metric.chance

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `accuracy` and `answers` (their number), or a reason.

        `accuracy` is the share of all targets answered right, with the Wilson interval over rows. n is the number of
        rows with a target. An example is the accuracy of one such row (`item`). The reason is that the model cannot
        read the length or has another tokenizer.

        Args:
            subject: Network to be measured.
            length: 0; the corpus decides the length of a row.
        """
        corpus = settings_of(self.config.data)
        if (reason := subject.beyond(corpus.row)) is not None:
            return reason
        if subject.tokenizer.name != MadTokenizer.name:
            return f"n/a: tokenizer {subject.tokenizer.name} has no tokens of the task; use the corpus mad"
        rows = MadRows(self.settings.rows, corpus, split="validation")
        targets, right = subject.right_answers(
            rows, functools.partial(mark_targets, settings=corpus), full_context=False
        )
        share, n = float(right.sum() / max(1, targets.sum())), int((targets > 0).sum())
        low, high = wilson_of_trials(share, n)
        measured = [
            self.value("accuracy", share, length, n=n, low=low, high=high),
            self.value("answers", float(targets.sum()), length, n=n),
        ]
        items = [(item, right[item] / targets[item]) for item in range(len(right)) if targets[item]]
        stored = items[: self.settings.items]
        return measured, [self.example("accuracy", float(value), length, item=item) for item, value in stored]
