"""Validation loss, and clean and junk perplexity over context lengths (docs/mechanisms.md, "Losses"). All in nats per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.config import Int, knob
from ...results import metrics
from .base import OverDocuments, Probe, ProbeConfig, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ...results.store.records import Measurement
    from ..data.corpora import Corpus
    from .subject import Subject


def stream_loss(subject: Subject, *, full_context: bool) -> tuple[float, int]:
    """Mean loss over the first `validation_tokens` of the validation split in rows of seq_len, and the targets it is of.

    With `loss_on: marked` of the marked targets alone. Raises DataError when the split is shorter than asked: a sample
    is never made smaller; and when it has no marked target.
    """
    from ..data.batches import DataError, stream_rows
    from ..data.corpora import UNMARKED

    config, corpus = subject.config, subject.corpus
    seq_len, marks = config.train.seq_len, corpus.validation_marks
    rows = config.eval.validation_tokens // seq_len
    inputs, targets = stream_rows(corpus.validation, seq_len, rows)
    losses = subject.losses(inputs, targets, full_context=full_context)
    if config.train.loss_on == "marked":
        if marks is None:
            raise DataError(UNMARKED)
        losses = losses[stream_rows(marks, seq_len, rows)[1].bool()]
        if not losses.numel():
            raise DataError("no target of the validation loss is marked: raise eval.validation_tokens")
    return float(losses.double().mean()), losses.numel()


def document_losses(subject: Subject, length: int) -> Tensor | str:
    """Losses of the first `length` targets of each of the documents [documents, length], or why there are none."""
    import torch

    reason = subject.beyond(length) or subject.lacking(length + 1)
    if reason is not None:
        return reason
    rows = torch.from_numpy(np.stack([d[: length + 1] for d in subject.documents]).astype(np.int64))
    return subject.losses(rows[:, :-1], rows[:, 1:])


def _by_row(probe: Probe, length: int, losses_BT: Tensor) -> Result:
    means = losses_BT.double().mean(1)
    rows = [probe.example("nats", float(mean), length, item=item) for item, mean in enumerate(means)]
    return [probe.value("nats", float(means.mean()), length, n=losses_BT.numel())], rows


class Validation(Probe):
    """val_loss with the window the model was trained with, and val_loss_full without it.

    Their unit says so where they are of marked targets alone.
    """

    metrics = metrics.of_probe("val")

    def tokens(self, length: int) -> int:
        """The validation tokens, twice where the window makes two numbers of them."""
        return self.config.eval.validation_tokens * (2 if self.config.model.window else 1)

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """Raises DataError when the validation split is shorter than asked."""
        trained, n = stream_loss(subject, full_context=False)
        full = stream_loss(subject, full_context=True)[0] if self.config.model.window else trained
        for _ in lengths:
            yield [self.value("val_loss", trained, n=n), self.value("val_loss_full", full, n=n)], []

    def value(self, metric: str, value: float, length: int = 0, **more: Any) -> Measurement:
        """As of every probe, in the unit of the targets that count."""
        return self._told(super().value(metric, value, length, **more))

    def missing(self, reason: str, length: int = 0, metric: str | None = None) -> Measurement:
        """The same of a number that is missing."""
        return self._told(super().missing(reason, length, metric))

    def _told(self, measurement: Measurement) -> Measurement:
        marked = self.config.train.loss_on == "marked"
        return replace(measurement, unit="nats/marked token") if marked else measurement


class Clean(OverDocuments):
    """Mean over all targets of the first L + 1 tokens of each document; the same documents at every length."""

    metrics = metrics.of_probe("clean")[:1]
    beyond = 1

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """An example is the mean of one document."""
        for length in lengths:
            losses = document_losses(subject, length)
            yield ([self.missing(losses, length)], []) if isinstance(losses, str) else _by_row(self, length, losses)


class JunkConfig(ProbeConfig):
    """Settings of the junk probe."""

    rows: Int = knob(16, "Rows of the junk probe.", ge=1)


class Junk(Probe):
    """Mean over rows of L tokens of the validation stream, which run across document borders, from its start."""

    Config = JunkConfig
    metrics = metrics.of_probe("junk")[:1]
    by_length = True

    def tokens(self, length: int) -> int:
        """That many rows."""
        return int(self.settings.rows) * length

    def longest(self, corpus: Corpus) -> int:
        """Each row takes L tokens of the validation split, the last one a token more."""
        return max(0, len(corpus.validation) - 1) // int(self.settings.rows)

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Rows of the validation split."""
        rows = max(0, len(corpus.validation) - 1) // length
        if rows >= self.settings.rows:
            return None
        return (
            f"the validation split has {len(corpus.validation)} tokens, {rows} rows of {length}; probe {self.name} asks for "
            f"{self.settings.rows}: lower eval.settings.junk.rows or eval.lengths"
        )

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """An example is the mean of one row."""
        from ..data.batches import stream_rows

        wanted = self.settings.rows
        for length in lengths:
            have = (len(subject.corpus.validation) - 1) // length
            reason = subject.beyond(length)
            if have < wanted:
                reason = f"too-short: the validation split holds {have} of {wanted} rows of {length} tokens"
            if reason is not None:
                yield [self.missing(reason, length)], []
                continue
            yield _by_row(self, length, subject.losses(*stream_rows(subject.corpus.validation, length, wanted)))
