"""Loss by place in the document, in one forward a document (docs/mechanisms.md, "Losses")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...model.bounds import MAX_LENGTH
from ...model.config import Int, knob
from ...results import metrics
from .base import OverDocuments, ProbeConfig, Result
from .perplexity import document_losses

if TYPE_CHECKING:
    from .subject import Subject


class PositionNllConfig(ProbeConfig):
    """Settings of the probe position_nll."""

    bin: Int = knob(256, "Tokens of a document that one item is the mean of.", ge=1, le=MAX_LENGTH)


class PositionNll(OverDocuments):
    """Means over the targets b K + 1 .. (b + 1) K of each document, K = `bin`; the last of them over what is left.

    The mean of all, each weighted by its targets, is what `clean` finds at that length.
    """

    Config = PositionNllConfig
    metrics = metrics.of_probe("position_nll")
    beyond = 1

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """An example is the mean of one bin (`position`) of one document (`item`)."""
        for length in lengths:
            losses = document_losses(subject, length)
            if isinstance(losses, str):
                yield [self.missing(losses, length, metric.name) for metric in self.metrics], []
                continue
            bins = losses.double().split(self.settings.bin, 1)
            found = [
                self.value("nats", float(losses.double().mean(1).mean()), length, n=losses.numel()),
                self.value("end_nats", float(bins[-1].mean()), length, n=bins[-1].numel()),
                self.value("bin", float(self.settings.bin), length),
            ]
            means = [part.mean(1) for part in bins]
            yield (
                found,
                [
                    self.example("nats", float(mean), length, item=item, position=position)
                    for position, column in enumerate(means)
                    for item, mean in enumerate(column)
                ],
            )
