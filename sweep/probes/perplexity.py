"""Validation loss, and clean and junk perplexity over context lengths (docs/mechanisms.md, "Losses"). All in nats per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from ...results.store.records import Example, Measurement
from ..data.batches import DataError, stream_rows
from ..data.corpora import UNMARKED
from . import Result
from .subject import Subject, unmeasured


def stream_loss(subject: Subject, *, full_context: bool) -> tuple[float, int]:
    """Mean loss over the first `validation_tokens` of the validation split in rows of seq_len, and the targets it is of.

    With `loss_on: marked` of the marked targets alone. Raises DataError when the split is shorter than asked: a sample
    is never made smaller; and when it has no marked target.
    """
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


def validation(subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """val_loss with the window the model was trained with, and val_loss_full without it.

    Their unit says so where they are of marked targets alone.
    """
    trained, n = stream_loss(subject, full_context=False)
    full = stream_loss(subject, full_context=True)[0] if subject.config.model.window else trained
    unit = "nats/marked token" if subject.config.train.loss_on == "marked" else "nats/token"
    for _ in lengths:
        yield (
            [
                Measurement(probe="val", metric="val_loss", length=0, value=trained, unit=unit, n=n),
                Measurement(probe="val", metric="val_loss_full", length=0, value=full, unit=unit, n=n),
            ],
            [],
        )


def _by_row(probe: str, length: int, losses_BT: Tensor) -> Result:
    means = losses_BT.double().mean(1)
    value = Measurement(
        probe=probe, metric="nats", length=length, value=float(means.mean()), unit="nats/token", n=losses_BT.numel()
    )
    rows = [
        Example(probe=probe, metric="nats", length=length, item=item, value=float(mean))
        for item, mean in enumerate(means)
    ]
    return [value], rows


def clean(subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """Mean over all targets of the first L + 1 tokens of each document; the same documents at every length."""
    for length in lengths:
        reason = subject.beyond(length) or subject.lacking(length + 1)
        if reason is not None:
            yield [unmeasured("clean", "nats", length, "nats/token", reason)], []
            continue
        rows = torch.from_numpy(np.stack([d[: length + 1] for d in subject.documents]).astype(np.int64))
        yield _by_row("clean", length, subject.losses(rows[:, :-1], rows[:, 1:]))


def junk(subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """Mean over rows of L tokens of the validation stream, which run across document borders, from its start."""
    wanted = subject.config.eval.junk_rows
    for length in lengths:
        have = (len(subject.corpus.validation) - 1) // length
        reason = subject.beyond(length)
        if have < wanted:
            reason = f"too-short: the validation split holds {have} of {wanted} rows of {length} tokens"
        if reason is not None:
            yield [unmeasured("junk", "nats", length, "nats/token", reason)], []
            continue
        yield _by_row("junk", length, subject.losses(*stream_rows(subject.corpus.validation, length, wanted)))
