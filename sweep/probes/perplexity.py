"""Losses in nats per token: validation, clean and junk text by context length, and the same last tokens at every length.

Source: docs/mechanisms.md, "Losses".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...model.bounds import MAX_COUNT, MAX_LENGTH
from ...model.config import Int, knob
from ...results import metrics
from ..config import EvalConfig
from .base import WHO, DocumentProbe, LengthwiseProbe, Probe, ProbeConfig, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ...results.store.records import Measurement
    from ..data.corpora import Corpus
    from .subject import Subject, TextExtent


def stream_losses(subject: Subject, *, full_context: bool) -> tuple[Tensor, TextExtent | None]:
    """Losses of the first `validation_tokens` of the validation split in rows of seq_len, [targets], and what these are as text.

    With `loss_on: marked` of the marked targets alone. Raises DataError when the split is shorter than asked: a sample
    is never made smaller; and when it has no marked target.
    """
    from ..data.batches import DataError, stream_rows
    from ..data.corpora import UNMARKED

    config, corpus = subject.config, subject.corpus
    seq_len, marks = config.train.seq_len, corpus.validation_marks
    rows = config.eval.validation_tokens // seq_len
    inputs, targets = stream_rows(corpus.validation, seq_len, rows)
    losses, extent = subject.losses(inputs, targets, full_context=full_context), subject.extent(targets)
    if config.train.loss_on == "marked":
        if marks is None:
            raise DataError(UNMARKED)
        losses = losses[stream_rows(marks, seq_len, rows)[1].bool()]
        if not losses.numel():
            raise DataError("no target of the validation loss is marked: raise eval.validation_tokens")
    return (losses if extent is None else losses[extent.counted_BT]).flatten(), extent


def stream_loss(subject: Subject, *, full_context: bool) -> tuple[float, int]:
    """The mean of `stream_losses`, and the targets it is of."""
    losses, _ = stream_losses(subject, full_context=full_context)
    return float(losses.double().mean()), losses.numel()


def document_rows(subject: Subject, length: int) -> Tensor | str:
    """The first `length` + 1 tokens of each of the documents, int64 [documents, length + 1], or why there are none."""
    import torch

    reason = subject.beyond(length) or subject.lacking(length + 1)
    if reason is not None:
        return reason
    return torch.from_numpy(np.stack([d[: length + 1] for d in subject.documents]).astype(np.int64))


def _score_rows(probe: Probe, subject: Subject, length: int, inputs_BT: Tensor, targets_BT: Tensor) -> Result:
    losses_BT, extent = subject.losses(inputs_BT, targets_BT), subject.extent(targets_BT)
    if extent is None:
        means, n = losses_BT.double().mean(1), losses_BT.numel()
        nats = means.mean()
    else:
        counted_BT, n = extent.counted_BT, int(extent.counted_BT.sum())
        means, nats = losses_BT.double().sum(1) / counted_BT.sum(1), losses_BT.double().sum() / n
    examples = [probe.example("nats", float(mean), length, item=item) for item, mean in enumerate(means)]
    measured = [probe.value("nats", float(nats), length, n=n)]
    return [*measured, *_bits_measurements(probe, length, float(losses_BT.double().sum()), extent)], examples


def _bits_measurements(probe: Probe, length: int, nats: float, extent: TextExtent | None) -> list[Measurement]:
    """The same nats, of all targets together, over what does not depend on a tokenizer: tokens of GPT-2, and bytes."""
    if extent is None:
        return []
    bits = nats / math.log(2)
    per_token = (
        probe.missing(extent.lacking, length, "bits")
        if extent.gpt2_tokens is None
        else probe.value("bits", bits / extent.gpt2_tokens, length, n=extent.gpt2_tokens)
    )
    return [per_token, probe.value("bits_per_byte", bits / extent.bytes, length, n=extent.bytes)]


class Validation(LengthwiseProbe):
    """val_loss with the window the model was trained with, and val_loss_full without it.

    Their unit says so where they are of marked targets alone.
    """

    metrics, more_of_others = metrics.by_subject("val")
    of_any = True

    def tokens(self, length: int) -> int:
        """The validation tokens, twice where the window makes two numbers of them."""
        return self.config.eval.validation_tokens * (2 if self.config.model.window else 1)

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Raises DataError when the validation split is shorter than asked; in tokens of another tokenizer that is a reason."""
        from ..data.batches import DataError

        try:
            losses, extent = stream_losses(subject, full_context=False)
        except DataError as error:
            if not subject.own_tokens:
                raise
            return f"too-short: {error}"
        trained, n = float(losses.double().mean()), losses.numel()
        bits = _bits_measurements(self, 0, float(losses.double().sum()), extent)
        full = stream_loss(subject, full_context=True)[0] if self.config.model.window else trained
        return [self.value("val_loss", trained, n=n), self.value("val_loss_full", full, n=n), *bits], []

    def value(self, metric: str, value: float, length: int = 0, **more: Any) -> Measurement:
        """As of every probe, in the unit of the targets that count."""
        return self._with_marked_unit(super().value(metric, value, length, **more))

    def missing(self, reason: str, length: int = 0, metric: str | None = None) -> Measurement:
        """The same of a number that is missing."""
        return self._with_marked_unit(super().missing(reason, length, metric))

    def _with_marked_unit(self, measurement: Measurement) -> Measurement:
        marked = self.config.train.loss_on == "marked"
        nats = measurement.metric.startswith("val_loss")
        return replace(measurement, unit="nats/marked token") if marked and nats else measurement


class Clean(DocumentProbe):
    """Mean over all targets of the first L + 1 tokens of each document; the same documents at every length."""

    metrics, more_of_others = metrics.by_subject("clean")
    of_any = True
    beyond = 1

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the mean loss; an example is the mean of one document."""
        rows = document_rows(subject, length)
        return rows if isinstance(rows, str) else _score_rows(self, subject, length, rows[:, :-1], rows[:, 1:])


class JunkConfig(ProbeConfig):
    """Settings of the junk probe."""

    rows: Int = knob(16, "Rows of the junk probe.", ge=1, le=MAX_COUNT)


class Junk(LengthwiseProbe):
    """Mean over rows of L tokens of the validation stream, which run across document borders, from its start."""

    Config = JunkConfig
    metrics, more_of_others = metrics.by_subject("junk")
    of_any = True
    by_length = True

    def tokens(self, length: int) -> int:
        """That many rows."""
        return int(self.settings.rows) * length

    def longest(self, corpus: Corpus) -> int:
        """Each row takes L tokens of the validation split, the last one a token more."""
        return max(0, len(corpus.validation) - 1) // int(self.settings.rows)

    def validation_need(self, length: int) -> int:
        """Return the tokens of the rows, and the last target."""
        return int(self.settings.rows) * length + 1

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Rows of the validation split."""
        rows = max(0, len(corpus.validation) - 1) // length
        if rows >= self.settings.rows:
            return None
        return (
            f"the validation split has {len(corpus.validation)} tokens, {rows} rows of {length}; probe {self.name} asks for "
            f"{self.settings.rows}: lower eval.settings.junk.rows or eval.lengths"
        )

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the mean loss; an example is the mean of one row."""
        from ..data.batches import stream_rows

        n_rows, available = self.settings.rows, (len(subject.corpus.validation) - 1) // length
        if available < n_rows:
            return f"too-short: the validation split holds {available} of {n_rows} rows of {length} tokens"
        if (reason := subject.beyond(length)) is not None:
            return reason
        return _score_rows(self, subject, length, *stream_rows(subject.corpus.validation, length, n_rows))


MAX_SCORED = 512
"""Tokens that same_tail scores at most where its settings do not say."""


class SameTailConfig(ProbeConfig):
    """Settings of the probe same_tail; a launch writes down what 0 stands for, so that further lengths join the same tokens."""

    last: Int = knob(
        0, f"Tokens that are scored; 0: half the shortest of eval.lengths, at most {MAX_SCORED}.", ge=0, le=MAX_LENGTH
    )
    end: Int = knob(
        0,
        "Place in the document, from 0, of the last token that is scored; 0: the longest of eval.lengths.",
        ge=0,
        le=MAX_LENGTH,
    )

    def settled(self, lengths: Iterable[int]) -> Self:
        """With numbers in place of 0, for these context lengths."""
        ordered = sorted(lengths)
        last = self.last or max(1, min(MAX_SCORED, ordered[0] // 2))
        return self.model_copy(update={"last": last, "end": self.end or ordered[-1]})


class SameTail(DocumentProbe):
    """Mean over the targets d[end - last + 1 .. end] of each document d, read after the L tokens d[end - L .. end - 1].

    `clean` falls with the length also because later text is easier; here the targets are the same at every length.
    """

    Config = SameTailConfig
    metrics = metrics.metrics_of_probe("same_tail")
    beyond = 1

    @classmethod
    def settled(cls, settings: SameTailConfig, config: EvalConfig) -> SameTailConfig:
        """From the context lengths of the grid."""
        return settings.settled(config.lengths)

    @property
    def _resolved_settings(self) -> SameTailConfig:
        settings: SameTailConfig = self.settings
        return settings.settled(self.config.eval.lengths)

    def longest(self, corpus: Corpus) -> int:
        """The whole text before the end; 0 where a document ends before that."""
        end = self._resolved_settings.end
        return end if super().longest(corpus) >= end else 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Held-out documents that reach to the end, and text before it."""
        end = self._resolved_settings.end
        if (short := super().lack(corpus, end)) is not None or length <= end:
            return short
        return f"the text, which {WHO}, ends at token {end}, before {length}: raise eval.settings.{self.name}.end or lower eval.lengths"

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the mean loss; an example is the mean of one document."""
        import torch

        last, end = self._resolved_settings.last, self._resolved_settings.end
        if length > end:
            return f"n/a: before token {end}, where the text ends, there are no {length} tokens"
        if length < last:
            return f"n/a: {last} tokens are scored, more than a context of {length}"
        if (reason := subject.beyond(length) or subject.lacking(end + 1)) is not None:
            return reason
        rows = torch.from_numpy(np.stack([d[end - length : end + 1] for d in subject.documents]).astype(np.int64))
        means = subject.losses(rows[:, :-1], rows[:, 1:], last=last).double().mean(1)
        measured = [self.value("nats", float(means.mean()), length, n=last * len(means))]
        measured.append(self.value("end", float(end), length))
        return measured, [self.example("nats", float(mean), length, item=item) for item, mean in enumerate(means)]
