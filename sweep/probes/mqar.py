"""Associative recall probe: share of keys answered with their value (docs/reference/mechanisms.md, "Associative recall")."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ...model.bounds import MAX_COUNT
from ...model.config import Int, knob
from ...results import metrics
from ...results.intervals import wilson_of_trials
from ...results.metrics import Metric
from ...results.store.records import Measurement
from ..data.builtin.mqar import MqarRows, mark_answers, settings_of
from ..data.tokenizer import RecallTokenizer
from .base import LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from .subject import CellSubject


class MqarProbeConfig(ProbeConfig):
    """Settings of the probe mqar. What a row is like is the corpus's to say."""

    rows: Int = knob(2_000, "Number of rows that are scored, the first of the validation split.", ge=1, le=MAX_COUNT)
    items: Int = knob(
        500, "Number of first rows whose shares of right answers are stored individually.", ge=0, le=MAX_COUNT
    )


class MqarProbe(LengthwiseProbe):
    """Share of correctly answered questions, and share of rows without a wrong answer, on rows like those of training.

    An answer is right when it has the largest logit of the vocabulary, given the row before it. The attention window of
    training applies, so that answers beyond it need the memory.
    """

    divided = True
    Config = MqarProbeConfig
    metrics = metrics.metrics_of_probe("mqar")

    def tokens(self, length: int) -> int:
        """Return the tokens of all rows."""
        return int(self.settings.rows * settings_of(self.config.data).length)

    def chance(self, metric: Metric) -> float | None:
        """Return the score of a guess among the values of the corpus.

        It is 1 / values for a question (`accuracy`), and that to the power of the number of pairs for a row (`exact`).
        Other metrics have their own.
        """
        corpus = settings_of(self.config.data)
        guess = 1 / corpus.values
        return {"accuracy": guess, "exact": guess**corpus.pairs}.get(metric.name, metric.chance)

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `accuracy`, `exact`, `questions` (their number) and `state_bytes`, or a reason.

        `accuracy` is the share of questions answered right, `exact` that of rows without a wrong answer, both with
        Wilson intervals over rows. n is the number of rows. An example is the accuracy of one row (`item`), of the
        first `settings.items` rows. The reason is that the model cannot read the length or has another tokenizer.
        `state_bytes` has a reason of its own: a part of the network cannot decode token by token.

        Args:
            subject: Network to be measured.
            length: 0; the corpus decides the length of a row.
        """
        corpus = settings_of(self.config.data)
        if (reason := subject.beyond(corpus.length - 1)) is not None:
            return reason
        if subject.tokenizer.name != RecallTokenizer.name:
            return f"n/a: tokenizer {subject.tokenizer.name} has no keys and values; use the corpus mqar"
        rows = MqarRows(self.settings.rows, corpus, split="validation")
        mark = functools.partial(mark_answers, pairs=corpus.pairs)
        _, right = subject.right_answers(rows, mark, full_context=False)
        shares = right / corpus.pairs
        measured = []
        for name, outcomes in (("accuracy", shares), ("exact", (right == corpus.pairs).astype(float))):
            share = float(outcomes.mean())
            low, high = wilson_of_trials(share, len(outcomes))
            measured.append(self.value(name, share, length, n=len(outcomes), low=low, high=high))
        measured.append(self.value("questions", float(corpus.pairs * len(right)), length, n=len(right)))
        measured.append(self._measure_state(subject, corpus.length - 1))
        items = enumerate(shares[: self.settings.items].tolist())
        return measured, [self.example("accuracy", share, length, item=item) for item, share in items]

    def _measure_state(self, subject: CellSubject, tokens: int) -> Measurement:
        """Return the bytes that decoding stores for a row of `tokens` tokens, or the reason why there is none."""
        from ...model.inference.decode import decoding_state_bytes

        if (unsupported := subject.model.no_step_reason()) is not None:
            return self.missing(f"n/a: {unsupported} cannot decode token by token", metric="state_bytes")
        return self.value("state_bytes", float(decoding_state_bytes(subject.model, tokens)), n=1)
