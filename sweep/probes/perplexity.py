"""Losses in nats per token: validation, clean and junk text by context length, and a fixed tail of documents.

Source: docs/reference/mechanisms.md, "Losses".
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
from .base import PROBE_PLACEHOLDER, DocumentProbe, LengthwiseProbe, Probe, ProbeConfig, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ...results.store.records import Measurement
    from ..data.corpora import Corpus
    from .subject import Subject, TextExtent


def stream_losses(subject: Subject, *, full_context: bool) -> tuple[Tensor, TextExtent | None]:
    """Return losses of the validation split in rows of seq_len, nats [targets], and their extent as text.

    As many whole rows are read as fit into `eval.validation_tokens`, from the start of the split. Losses are in the
    order of the text, on the CPU. With `loss_on: marked` only marked targets are returned. For a subject with another
    tokenizer than the corpus only targets that its extent counts are; otherwise the extent is None.

    Args:
        subject: Model to be measured.
        full_context: Read without the attention window of training.

    Raises:
        DataError: The split is shorter than requested, has no marks, or has no marked target.
    """
    import torch

    from ..data.batches import DataError, may_replace_targets, stream_rows
    from ..data.computed_rows import replace_targets
    from ..data.corpora import UNMARKED

    config, corpus = subject.config, subject.corpus
    seq_len, marks = config.train.seq_len, corpus.validation_marks
    rows = config.eval.validation_tokens // seq_len
    inputs, targets = stream_rows(corpus.validation, seq_len, rows)
    mark_rows = None
    if config.train.loss_on == "marked":
        if marks is None:
            raise DataError(UNMARKED)
        mark_rows = stream_rows(marks, seq_len, rows)[1]
        if may_replace_targets(marks):
            targets = torch.from_numpy(replace_targets(targets.numpy(), mark_rows.numpy()))
    losses, extent = subject.losses(inputs, targets, full_context=full_context), subject.extent(targets)
    if mark_rows is not None:
        losses = losses[mark_rows.bool()]
        if not losses.numel():
            raise DataError("no target of the validation loss is marked: raise eval.validation_tokens")
    return (losses if extent is None else losses[extent.counted_BT]).flatten(), extent


def stream_loss(subject: Subject, *, full_context: bool) -> tuple[float, int]:
    """Return (mean loss in nats, number of targets) of the validation split, as `stream_losses` reads it."""
    losses, _ = stream_losses(subject, full_context=full_context)
    return float(losses.double().mean()), losses.numel()


def document_rows(subject: Subject, length: int) -> Tensor | str:
    """Return the first `length` + 1 tokens of each document, int64 [documents, length + 1], or a reason as text.

    The reason is that the model cannot read `length` tokens, or that one of `eval.documents` documents is missing or
    shorter.
    """
    import torch

    reason = subject.beyond(length) or subject.lacking(length + 1)
    if reason is not None:
        return reason
    return torch.from_numpy(np.stack([d[: length + 1] for d in subject.documents]).astype(np.int64))


def _score_rows(probe: Probe, subject: Subject, length: int, inputs_BT: Tensor, targets_BT: Tensor) -> Result:
    """Return the mean loss (`nats`) over all counted targets, its bits, and an example with the mean of each row.

    Bits are added for a subject with another tokenizer than the corpus alone. Examples are `nats`, with `item` the
    index of the row.

    Args:
        probe: Probe that reports the numbers.
        subject: Model to be measured.
        length: Context length in tokens, for the record.
        inputs_BT: Input tokens, int64.
        targets_BT: Target tokens, int64.
    """
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
    """Return `bits` (per GPT-2 token) and `bits_per_byte`, which do not depend on the model's tokenizer.

    Both are nats / ln 2, divided by the number of GPT-2 tokens or bytes. Without GPT-2's tokenizer `bits` has a reason
    instead of a value.

    Args:
        probe: Probe that reports the numbers.
        length: Context length in tokens, for the record.
        nats: Sum of the losses of all counted targets.
        extent: Extent of these targets; None gives an empty list.
    """
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
    """Validation losses: `val_loss` with the attention window of training, and `val_loss_full` without it.

    Their unit differs if they are of marked targets alone.
    """

    divided = True
    metrics, more_of_others = metrics.by_subject("val")
    of_any = True

    def tokens(self, length: int) -> int:
        """Return the validation tokens, twice if the attention window requires two passes."""
        return self.config.eval.validation_tokens * (2 if self.config.model.window else 1)

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return `val_loss`, `val_loss_full` and, for an external model, bits; without examples.

        Both losses are means in nats and are equal, from one pass, for a model without an attention window. Bits belong
        to `val_loss`. If the validation split is too short, or nothing in it is marked, an external model gets a reason
        instead.

        Args:
            subject: Model to be measured.
            length: Ignored; the rows have the training length, and numbers are recorded with length 0.

        Raises:
            DataError: The validation split is too short or lacks marks, for a network of the project.
        """
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
        """Return a measurement as `Probe.value` does.

        The unit of losses is nats per marked token if only marked targets count (`train.loss_on`); bits keep theirs.
        """
        return self._with_marked_unit(super().value(metric, value, length, **more))

    def missing(self, reason: str, length: int = 0, metric: str | None = None) -> Measurement:
        """Return a measurement without a value as `Probe.missing` does.

        Its unit is nats per marked token if only marked targets count.
        """
        return self._with_marked_unit(super().missing(reason, length, metric))

    def _with_marked_unit(self, measurement: Measurement) -> Measurement:
        marked = self.config.train.loss_on == "marked"
        nats = measurement.metric.startswith("val_loss")
        return replace(measurement, unit="nats/marked token") if marked and nats else measurement


class Clean(DocumentProbe):
    """Mean loss over all targets of the first L + 1 tokens of each document; the same documents at every length."""

    divided = True
    reads_texts = True
    metrics, more_of_others = metrics.by_subject("clean")
    of_any = True
    beyond = 1

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the mean loss in nats, and as examples the means of the documents, or a reason.

        External models also get bits. The reason is that the model cannot read the length, or that documents are
        missing or too short.
        """
        rows = document_rows(subject, length)
        return rows if isinstance(rows, str) else _score_rows(self, subject, length, rows[:, :-1], rows[:, 1:])


class JunkConfig(ProbeConfig):
    """Settings of the junk probe."""

    rows: Int = knob(16, "Rows of the junk probe.", ge=1, le=MAX_COUNT)


class Junk(LengthwiseProbe):
    """Mean loss over rows of L tokens from the start of the validation stream, which cross document borders."""

    divided = True
    Config = JunkConfig
    metrics, more_of_others = metrics.by_subject("junk")
    of_any = True
    by_length = True

    def tokens(self, length: int) -> int:
        """Return the tokens of all rows."""
        return int(self.settings.rows) * length

    def longest(self, corpus: Corpus) -> int:
        """Return the length at which the rows use up the validation split, which must hold one further target.

        The result is rounded down and is 0 if there is none.
        """
        return max(0, len(corpus.validation) - 1) // int(self.settings.rows)

    def validation_need(self, length: int) -> int:
        """Return the tokens of the rows plus the last target."""
        return int(self.settings.rows) * length + 1

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Return a message if the validation split has fewer rows of `length` tokens than requested, else None."""
        rows = max(0, len(corpus.validation) - 1) // length
        if rows >= self.settings.rows:
            return None
        return (
            f"the validation split has {len(corpus.validation)} tokens, {rows} rows of {length}; probe "
            f"{self.name} requests {self.settings.rows}: lower eval.settings.junk.rows or eval.lengths"
        )

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the mean loss in nats, and as examples the means of the rows, or a reason.

        External models also get bits. The reason is that the validation split is too short, or that the model cannot
        read the length.
        """
        from ..data.batches import stream_rows

        n_rows, available = self.settings.rows, (len(subject.corpus.validation) - 1) // length
        if available < n_rows:
            return f"too-short: the validation split holds {available} of {n_rows} rows of {length} tokens"
        if (reason := subject.beyond(length)) is not None:
            return reason
        return _score_rows(self, subject, length, *stream_rows(subject.corpus.validation, length, n_rows))


MAX_SCORED = 512
"""Maximum number of tokens that same_tail scores by default."""


class SameTailConfig(ProbeConfig):
    """Settings of the probe same_tail; a launch writes down what 0 stands for, so that further lengths join the same tokens."""

    last: Int = knob(
        0, f"Tokens that are scored; 0: half the shortest of eval.lengths, at most {MAX_SCORED}.", ge=0, le=MAX_LENGTH
    )
    end: Int = knob(
        0,
        "Position in the document, from 0, of the last scored token; 0: the longest of eval.lengths.",
        ge=0,
        le=MAX_LENGTH,
    )

    def settled(self, lengths: Iterable[int]) -> Self:
        """Return the settings with 0 replaced by the numbers for these context lengths.

        `last` is half the shortest length, at most 512 (MAX_SCORED) and at least 1; `end` is the longest length.
        """
        ordered = sorted(lengths)
        last = self.last or max(1, min(MAX_SCORED, ordered[0] // 2))
        return self.model_copy(update={"last": last, "end": self.end or ordered[-1]})


class SameTail(DocumentProbe):
    """Mean loss over the targets d[end - last + 1 .. end] of each document d, given the L tokens d[end - L .. end - 1].

    `clean` also falls with the length because later text is easier; here the targets are the same at every length.
    """

    divided = True
    Config = SameTailConfig
    metrics = metrics.metrics_of_probe("same_tail")
    beyond = 1

    @classmethod
    def settled(cls, settings: SameTailConfig, config: EvalConfig) -> SameTailConfig:
        """Return the settings with 0 replaced by the numbers for the grid's context lengths."""
        return settings.settled(config.lengths)

    @property
    def _resolved_settings(self) -> SameTailConfig:
        """Settings with 0 replaced by the numbers for the cell's context lengths."""
        settings: SameTailConfig = self.settings
        return settings.settled(self.config.eval.lengths)

    def longest(self, corpus: Corpus) -> int:
        """Return the position of the last scored token, from 0; 0 if a document ends before that or one is missing."""
        end = self._resolved_settings.end
        return end if (super().longest(corpus) or 0) >= end else 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Return a message if the documents are too short or fewer than `length` tokens precede their end.

        None if they suffice. The end is the last scored token, not that of the document.
        """
        end = self._resolved_settings.end
        if (message := super().lack(corpus, end)) is not None or length <= end:
            return message
        return f"the text, which {PROBE_PLACEHOLDER}, ends at token {end}, before {length}: raise eval.settings.{self.name}.end or lower eval.lengths"

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return `nats` (the mean loss) and `end` (position of the last scored token), or a reason.

        One example per document (`item`): its mean loss. Reasons for no result: `length` exceeds `end` or is below the
        number of scored tokens, the model cannot read it, or documents are missing or too short.
        """
        import torch

        last, end = self._resolved_settings.last, self._resolved_settings.end
        if length > end:
            return f"n/a: the scored tokens end at token {end}, too early for a context of {length} tokens"
        if length < last:
            return f"n/a: {last} tokens are scored, more than the context of {length}"
        if (reason := subject.beyond(length) or subject.lacking(end + 1)) is not None:
            return reason
        rows = torch.from_numpy(np.stack([d[end - length : end + 1] for d in subject.documents]).astype(np.int64))
        means = subject.losses(rows[:, :-1], rows[:, 1:], last=last).double().mean(1)
        measured = [self.value("nats", float(means.mean()), length, n=last * len(means))]
        measured.append(self.value("end", float(end), length))
        return measured, [self.example("nats", float(mean), length, item=item) for item, mean in enumerate(means)]
