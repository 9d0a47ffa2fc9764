"""How large the memory's state grows with the text, beside writes that erase nothing (docs/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...model.outline import NO_MEMORY
from ...results import metrics
from .base import OverDocuments, Result

if TYPE_CHECKING:
    from torch import Tensor

    from .subject import Subject


class StateNorm(OverDocuments):
    """Norms of the state after the first L tokens of each document, mean over documents, layers and heads.

    The trained network runs at full context; the three controls read the same keys, values and gates and change nothing
    in it. Examples hold the mean over heads by document (`item`) and memory layer (`position`).
    """

    metrics = metrics.of_probe("state_norm")

    def inapplicable(self) -> str | None:
        """A network without memory has no state."""
        return "has no memory whose state could be measured" if self.config.model.memory == NO_MEMORY else None

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """Four numbers a length, in the order of `metrics`."""
        import torch

        from .memory_state import memories_of, norms_after

        lacking = None if memories_of(subject.model) else "n/a: the network has no gated delta memory"
        for length in lengths:
            reason = lacking or subject.lacking(length) or subject.beyond(length)
            if reason is not None:
                yield [self.missing(reason, length, metric.name) for metric in self.metrics], []
                continue
            rows = torch.from_numpy(np.stack([d[:length] for d in subject.documents]).astype(np.int64))

            def read(rows: Tensor = rows) -> None:
                for batch in subject.batches(*rows.shape):
                    subject.features(rows[batch])

            yield self._measured(length, norms_after(subject.model, read, self.config.eval.chunk_tokens))

    def _measured(self, length: int, norms_4BLH: Tensor) -> Result:
        values, examples = [], []
        for metric, norms_BLH in zip(self.metrics, norms_4BLH, strict=True):
            values.append(self.value(metric.name, float(norms_BLH.mean()), length, n=norms_BLH.numel()))
            for item, layers in enumerate(norms_BLH.mean(2)):
                for position, value in enumerate(layers):
                    examples.append(self.example(metric.name, float(value), length, item=item, position=position))
        return values, examples
