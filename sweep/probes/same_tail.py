"""Loss on the same last tokens at several context lengths: what more context is worth, whatever text is easy (docs/mechanisms.md, "Losses")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self

from ...model.bounds import MAX_LENGTH
from ...model.config import Int, knob
from ...results import metrics
from ...results.lazy_import import Late
from ..config import EvalConfig
from .base import WHO, OverDocuments, ProbeConfig, Result

if TYPE_CHECKING:
    import numpy as np

    from ..data.corpora import Corpus
    from .subject import Subject
else:
    np = Late("numpy")

MOST = 512


class SameTailConfig(ProbeConfig):
    """Settings of the probe same_tail; a launch writes down what 0 stands for, so that further lengths join the same tokens."""

    last: Int = knob(
        0, f"Tokens that are scored; 0: half the shortest of eval.lengths, at most {MOST}.", ge=0, le=MAX_LENGTH
    )
    end: Int = knob(
        0,
        "Place in the document, from 0, of the last token that is scored; 0: the longest of eval.lengths.",
        ge=0,
        le=MAX_LENGTH,
    )

    def settled(self, lengths: Iterable[int]) -> Self:
        """With numbers in place of 0, for these context lengths."""
        known = sorted(lengths)
        last = self.last or max(1, min(MOST, known[0] // 2))
        return self.model_copy(update={"last": last, "end": self.end or known[-1]})


class SameTail(OverDocuments):
    """Mean over the targets d[end - last + 1 .. end] of each document d, read after the L tokens d[end - L .. end - 1].

    `clean` falls with the length also because later text is easier; here the targets are the same at every length.
    """

    Config = SameTailConfig
    metrics = metrics.of_probe("same_tail")
    beyond = 1

    @classmethod
    def settled(cls, settings: SameTailConfig, config: EvalConfig) -> SameTailConfig:
        """From the context lengths of the grid."""
        return settings.settled(config.lengths)

    @property
    def _chosen(self) -> SameTailConfig:
        settings: SameTailConfig = self.settings
        return settings.settled(self.config.eval.lengths)

    def longest(self, corpus: Corpus) -> int:
        """The whole text before the end; 0 where a document ends before that."""
        end = self._chosen.end
        return end if super().longest(corpus) >= end else 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Held-out documents that reach to the end, and text before it."""
        end = self._chosen.end
        if (short := super().lack(corpus, end)) is not None or length <= end:
            return short
        return f"the text, which {WHO}, ends at token {end}, before {length}: raise eval.settings.{self.name}.end or lower eval.lengths"

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """An example is the mean of one document."""
        import torch

        last, end = self._chosen.last, self._chosen.end
        for length in lengths:
            reason = subject.beyond(length) or subject.lacking(end + 1)
            if length > end:
                reason = f"n/a: before token {end}, where the text ends, there are no {length} tokens"
            elif length < last:
                reason = f"n/a: {last} tokens are scored, more than a context of {length}"
            if reason is not None:
                yield [self.missing(reason, length)], []
                continue
            rows = torch.from_numpy(np.stack([d[end - length : end + 1] for d in subject.documents]).astype(np.int64))
            means = subject.losses(rows[:, :-1], rows[:, 1:], last=last).double().mean(1)
            found = [self.value("nats", float(means.mean()), length, n=last * len(means))]
            found.append(self.value("end", float(end), length))
            yield found, [self.example("nats", float(mean), length, item=item) for item, mean in enumerate(means)]
