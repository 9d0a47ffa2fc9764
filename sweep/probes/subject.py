"""What a probe measures: a trained model with its tokenizer, corpus and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...model.backbone import Backbone
from ...model.outline import longest_text
from ..config import CellConfig
from ..data.corpora import Corpus
from ..data.tokenizer import Tokenizer


def _never() -> None:
    pass


@dataclass(frozen=True)
class Subject:
    """The model is in evaluation mode on `device`."""

    model: Backbone
    tokenizer: Tokenizer
    corpus: Corpus
    config: CellConfig
    device: torch.device
    pause: Callable[[], None] = _never
    """Called before each forward; may raise to end a probe that takes minutes."""

    @property
    def documents(self) -> list[np.ndarray]:
        """The first `eval.documents` held-out documents, each led by the end-of-text token, whatever the lengths are."""
        return self.corpus.heldout[: self.config.eval.documents]

    def lacking(self, tokens: int) -> str | None:
        """Why nothing is measured where each of `documents` must have `tokens` tokens, or None when each has."""
        wanted = self.config.eval.documents
        enough = sum(len(document) >= tokens for document in self.documents)
        if enough == wanted:
            return None
        return f"too-few-docs: {enough} of {wanted} held-out documents have {tokens} tokens"

    def beyond(self, tokens: int) -> str | None:
        """Why the network cannot read a text of `tokens` tokens, or None when it can."""
        longest = longest_text(self.config.model)
        if longest is None or tokens <= longest:
            return None
        return f"n/a: positions {self.config.model.positions} has {longest} places, fewer than {tokens} tokens"

    def batches(self, rows: int, length: int) -> list[slice]:
        """Which of `rows` rows of `length` tokens go through the network together: `eval.chunk_tokens`, at least one."""
        together = max(1, self.config.eval.chunk_tokens // length)
        return [slice(first, first + together) for first in range(0, rows, together)]

    def features(self, tokens_BT: Tensor, *, full_context: bool = True) -> Tensor:
        """Hidden states [B, T, D] on `device`, `eval.chunk_tokens` at a time."""
        self.pause()
        chunk = self.config.eval.chunk_tokens
        return self.model.features(tokens_BT.to(self.device), full_context=full_context, chunk=chunk).hidden_BTD

    @torch.no_grad()
    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool = True, last: int | None = None
    ) -> Tensor:
        """Cross-entropy of every target, or of the `last` ones of each row, nats, float32 [B, T] on the CPU (float64 for a
        float64 network)."""
        parts = []
        for rows in self.batches(*inputs_BT.shape):
            hidden_BTD = self.features(inputs_BT[rows], full_context=full_context)
            targets = targets_BT[rows].to(self.device)
            if last is not None:
                # only these go through the head, which is most of the memory
                hidden_BTD, targets = hidden_BTD[:, -last:], targets[:, -last:]
            parts.append(self.model.token_losses(hidden_BTD, targets, chunk=self.config.eval.chunk_tokens).cpu())
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
