"""What a probe measures: a trained model with its tokenizer, corpus and settings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.backbone import Backbone
from ...results.records import Measurement
from ..cell import CellConfig
from ..training.corpora import Corpus
from ..training.tokenizer import Tokenizer

FORWARD_TOKENS = 8192
"""Tokens of one evaluation forward, unless a single row is longer."""


@dataclass(frozen=True)
class Subject:
    """The model is in evaluation mode on `device`."""

    model: Backbone
    tokenizer: Tokenizer
    corpus: Corpus
    config: CellConfig
    device: torch.device

    @torch.no_grad()
    def losses(self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool = True) -> Tensor:
        """Cross-entropy of every target, nats, float32 [B, T] on the CPU; a few rows at a time."""
        rows = max(1, FORWARD_TOKENS // inputs_BT.size(1))
        parts = []
        for first in range(0, inputs_BT.size(0), rows):
            inputs, targets = (x[first : first + rows].to(self.device) for x in (inputs_BT, targets_BT))
            hidden = self.model.features(inputs, full_context=full_context).hidden_BTD
            parts.append(self.model.token_losses(hidden, targets).float().cpu())
        return torch.cat(parts)


@contextlib.contextmanager
def evaluating(model: Backbone) -> Iterator[None]:
    """Evaluation mode inside, and the mode that was before after it."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def unmeasured(probe: str, metric: str, length: int, unit: str, reason: str) -> Measurement:
    """The row that says why a number is missing."""
    return Measurement(probe=probe, metric=metric, length=length, value=None, unit=unit, n=0, reason=reason)


def wilson(successes: float, trials: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95% by default. Bounds in [0, 1]."""
    p = successes / trials
    scale = 1 + z * z / trials
    middle = (p + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    # rounding must not leave the proportion itself outside
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))
