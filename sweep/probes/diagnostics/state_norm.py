"""Norm of the memory's state by text length, next to writes that erase nothing (docs/reference/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....model.resolve import NO_MEMORY
from ....results import metrics
from ..base import DocumentProbe, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ..subject import CellSubject


class StateNorm(DocumentProbe):
    """Norms of the state after the first L tokens of each document, as means over documents, layers and heads.

    The trained network reads at full context; the controls use the same keys, values and gates and change nothing in
    it. Examples hold the mean over documents by layer of the network (`item`) and head (`position`).
    """

    divided = True
    metrics = metrics.metrics_of_probe("state_norm")
    names_every_missing = True

    def inapplicable(self) -> str | None:
        """Return a phrase if the network has no memory, else None."""
        return "has no memory whose state could be measured" if self.config.model.memory == NO_MEMORY else None

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return the norms of the state after the first `length` tokens of each document, or a reason.

        They are Frobenius norms: delta_norm, hebbian_norm, delta_norm_kept and hebbian_norm_kept, each a mean over
        documents, layers and heads. A memory without a delta rule has a reason in place of the Hebbian norms. The
        reason instead of all is that there is no memory, that it lacks a method, that documents are missing or too
        short, or that the network cannot read the length.
        """
        import torch

        from .memory_state import memories_of, memory_state_norms_after, missing_methods_reason

        reason = missing_methods_reason(subject.model, "read_rates", "write", "norm") or subject.lacking(length)
        if reason or (reason := subject.beyond(length)) is not None:
            return reason
        rows = torch.from_numpy(np.stack([d[:length] for d in subject.documents]).astype(np.int64))
        norms = memory_state_norms_after(subject, rows, self.config.eval.chunk_tokens)
        return self._result(length, norms, list(memories_of(subject.model)))

    def _result(self, length: int, norms: dict[str, Tensor], layers: list[int]) -> Result:
        """Return a measurement per metric, and of every head the mean over documents as an example.

        An example has the layer as `item` and the head as `position`.

        Args:
            length: Context length in tokens.
            norms: Norms [B, L, H] by metric; a metric that is missing gets a reason.
            layers: Layers of the memories, in the order of the norms.
        """
        values, examples = [], []
        for metric in self.metrics:
            if metric.name not in norms:
                reason = f"n/a: memory {self.config.model.memory} does not write by a delta rule"
                values.append(self.missing(reason, length, metric.name))
                continue
            norms_BLH = norms[metric.name]
            values.append(self.value(metric.name, float(norms_BLH.mean()), length, n=norms_BLH.numel()))
            for layer, heads in zip(layers, norms_BLH.mean(0), strict=True):
                for head, value in enumerate(heads.tolist()):
                    examples.append(self.example(metric.name, value, length, item=layer, position=head))
        return values, examples
