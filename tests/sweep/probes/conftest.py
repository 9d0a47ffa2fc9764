"""Subjects for tests of probes: real networks, and stand-ins that answer by a rule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.config import CellConfig, EvalConfig, TrainConfig
from atma_sweep.sweep.data.corpora import Corpus
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes.subject import CellSubject
from torch import Tensor

EOT, LETTERS = 256, np.arange(97, 111)


def document(length: int, seed: int) -> np.ndarray:
    """Return end of text, then letters a to n, without digits and spaces, so that nothing resembles a needle."""
    letters = np.random.default_rng(seed).choice(LETTERS, length - 1)
    return np.concatenate([[EOT], letters]).astype(np.uint16)


def corpus(*, documents: int = 5, length: int = 300, validation: int = 700) -> Corpus:
    empty = np.zeros(0, dtype=np.uint16)
    return Corpus(
        fingerprint="f" * 64, tokenizer="bytes", train=[empty], validation=document(validation, 999),
        heldout=[document(length + index, index) for index in range(documents)],
        heldout_names=[str(index) for index in range(documents)], unigram_entropy=1.0, bigram_entropy=None,
    )  # fmt: skip


class Rule:
    """Stand-in for the network: `predict` gives the next token at every position, and the logits are certain of it."""

    def __init__(self, predict: Callable[[np.ndarray], np.ndarray], vocabulary: int = 264) -> None:
        self.predict, self.vocabulary = predict, vocabulary
        self.seen: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.full: list[bool] = []
        self.chunks: list[int] = []

    def features(self, tokens_BT: Tensor, *, full_context: bool = False, chunk: int) -> Any:
        self.seen.append(tokens_BT.clone())
        self.full.append(full_context)
        self.chunks.append(chunk)
        guess_BT = np.stack([self.predict(row) for row in tokens_BT.numpy()])
        hidden_BTD = 20.0 * torch.nn.functional.one_hot(torch.from_numpy(guess_BT), self.vocabulary)
        return SimpleNamespace(hidden_BTD=hidden_BTD)

    def no_step_reason(self) -> str:
        return "mixer Rule"

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD

    def token_losses(self, hidden_BTD: Tensor, targets_BT: Tensor, *, chunk: int) -> Tensor:
        self.targets.append(targets_BT.clone())
        self.chunks.append(chunk)
        flat = torch.nn.functional.cross_entropy(hidden_BTD.flatten(0, 1), targets_BT.flatten(), reduction="none")
        return flat.view(targets_BT.shape)


@pytest.fixture
def rule() -> type[Rule]:
    return Rule


@pytest.fixture
def subject() -> Callable[..., CellSubject]:
    """Fixture: a function from a model and eval settings to a subject with byte tokens.

    The corpus has `held` held-out documents of `length`, `length` + 1, ... tokens.
    """

    def make(
        model: Any,
        *,
        held: int = 5,
        length: int = 300,
        validation: int = 700,
        seq_len: int = 13,
        seed: int = 0,
        **settings: Any,
    ) -> CellSubject:
        small = {"lengths": (16, 32, 64), "documents": 3, "junk_rows": 4, "needle_trials": 6, "validation_tokens": 300}
        config = CellConfig(
            model=model.config if hasattr(model, "config") else ModelConfig(),
            train=TrainConfig(seq_len=seq_len, micro_batch=1, batch_tokens=seq_len),
            eval=EvalConfig(**(small | settings)),
            seed=seed,
        )
        probe_corpus = corpus(documents=held, length=length, validation=validation)
        return CellSubject(model, load_tokenizer("bytes"), probe_corpus, config, torch.device("cpu"))

    return make
