"""Perplexity of one text cut into windows of every length (docs/reference/mechanisms.md, "Losses")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...model.bounds import MAX_TOKENS
from ...model.config import Int, knob
from ...results import metrics
from .base import PROBE_PLACEHOLDER, LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.corpora import Corpus
    from .subject import CellSubject

PIECES = 64
"""Maximum number of examples per length: equal pieces of the text, the same at every length."""


class ExtrapolationConfig(ProbeConfig):
    """Settings of the probe extrapolation."""

    span: Int = knob(
        0,
        "Number of targets, from the start of the validation split; 0: as many complete rows of the training length as fit in eval.validation_tokens.",
        ge=0,
        le=MAX_TOKENS,
    )


class Extrapolation(LengthwiseProbe):
    """Mean loss over the same targets at every length L, predicted within windows of L tokens.

    Windows lie next to each other from the start of the validation split; the last one is shorter where L does not
    divide the span. An example is the mean over one of 64 pieces (PIECES) of the targets.
    """

    divided = True
    Config = ExtrapolationConfig
    metrics = metrics.metrics_of_probe("extrapolation")
    by_length = True
    names_every_missing = True

    @property
    def _span(self) -> int:
        """Number of targets."""
        seq_len = self.config.train.seq_len
        return int(self.settings.span) or max(1, self.config.eval.validation_tokens // seq_len) * seq_len

    def tokens(self, length: int) -> int:
        """Return the tokens of the text, the same for every length."""
        return self._span

    def longest(self, corpus: Corpus) -> int:
        """Return the span, which is then a single window; 0 if the validation split is shorter."""
        return self._span if len(corpus.validation) > self._span else 0

    def validation_need(self, length: int) -> int:
        """Return the tokens of the span plus the last target."""
        return self._span + 1

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Return a message if the validation split is shorter than the span, or the span than `length`, else None."""
        if len(corpus.validation) <= self._span:
            return (
                f"the validation split, which {PROBE_PLACEHOLDER}, has {len(corpus.validation)} tokens, but {self._span + 1} are needed: lower "
                f"eval.settings.{self.name}.span"
            )
        if length > self._span:
            return (
                f"the text, which {PROBE_PLACEHOLDER}, is cut into windows of at most {self._span} tokens: raise eval.settings.{self.name}.span or "
                "lower eval.lengths"
            )
        return None

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `perplexity` (exp of the mean loss) and `nats` (the mean loss), each over all targets of the span.

        An example is the mean loss (`nats`) of one of at most 64 (`PIECES`) nearly equal pieces of the targets, in
        order. The reason for their absence is that the validation split or the span is too short, or that the network
        cannot read the length.
        """
        import torch

        span, available = self._span, len(subject.corpus.validation)
        if available <= span:
            return f"too-short: the validation split has {available} of {span + 1} tokens"
        if length > span:
            return f"n/a: the text of {span} targets is shorter than a window of {length} tokens"
        if (reason := subject.beyond(length)) is not None:
            return reason
        losses_N = torch.cat(list(self._window_losses(subject, length))).double()
        mean = losses_N.mean()
        numbers = {"perplexity": mean.exp(), "nats": mean}
        pieces = enumerate(losses_N.tensor_split(min(PIECES, span)))
        return [self.value(name, float(number), length, n=span) for name, number in numbers.items()], [
            self.example("nats", float(piece.mean()), length, item=item) for item, piece in pieces
        ]

    def _window_losses(self, subject: CellSubject, length: int) -> Iterator[Tensor]:
        """Yield the losses of the complete windows, then those of a shorter last one, if any.

        Each is one-dimensional, in nats, in the order of the text. Together they have one loss per target of the span.
        """
        from ..data.batches import stream_rows

        text = subject.corpus.validation
        rows, remainder = divmod(self._span, length)
        yield subject.losses(*stream_rows(text, length, rows)).flatten()
        if remainder:
            yield subject.losses(*stream_rows(text[rows * length : self._span + 1], remainder, 1)).flatten()
