"""Loss by position in a document, from one forward pass per document (docs/reference/mechanisms.md, "Losses")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.bounds import MAX_LENGTH
from ...model.config import Int, knob
from ...results import metrics
from .base import DocumentProbe, ProbeConfig, Result
from .perplexity import document_rows

if TYPE_CHECKING:
    from .subject import Subject


class PositionNllConfig(ProbeConfig):
    """Settings of the probe position_nll."""

    bin: Int = knob(256, "Tokens of a document over which one item is the mean.", ge=1, le=MAX_LENGTH)


class PositionNll(DocumentProbe):
    """Mean losses over the targets b K + 1 .. (b + 1) K of each document, K = `bin`; the last bin can be shorter.

    The mean over all bins, weighted by their targets, equals `clean` at that length.
    """

    divided = True
    Config = PositionNllConfig
    reads_texts = True
    metrics = metrics.metrics_of_probe("position_nll")
    beyond = 1
    names_every_missing = True

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return `nats` (mean over all targets), `end_nats` (mean of the last bin) and `bin` (its size), or a reason.

        Numbers are in nats per token. An example is the mean of one bin (`position`) of one document (`item`), bin by
        bin. The reason is that the model cannot read the length, or that documents are missing or too short.
        """
        rows = document_rows(subject, length)
        if isinstance(rows, str):
            return rows
        losses = subject.losses(rows[:, :-1], rows[:, 1:])
        bins = losses.double().split(self.settings.bin, 1)
        measured = [
            self.value("nats", float(losses.double().mean(1).mean()), length, n=losses.numel()),
            self.value("end_nats", float(bins[-1].mean()), length, n=bins[-1].numel()),
            self.value("bin", float(self.settings.bin), length),
        ]
        return measured, [
            self.example("nats", float(mean), length, item=item, position=position)
            for position, part in enumerate(bins)
            for item, mean in enumerate(part.mean(1))
        ]
