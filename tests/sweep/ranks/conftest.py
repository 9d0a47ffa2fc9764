"""Subjects of probes for tests on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, EvalConfig, TrainConfig
from atma_sweep.sweep.data.corpora import Corpus
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes.subject import CellSubject


def _text(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(97, 123, length).astype(np.uint16)


@pytest.fixture
def subject_for(network: Callable[..., Any]) -> Callable[[str], CellSubject]:
    """Fixture: a function from a probe's name to a float64 network that it can measure, in batches of 64 tokens."""

    def make(name: str) -> CellSubject:
        tokenizer = name if name in ("mqar", "mad") else "bytes"
        size = 264 if tokenizer == "bytes" else 1024
        model = network(
            awake=True, dtype=torch.float64, attn_type="fox" if name in ("gates", "gate_dynamics") else "polar", memory="gated_delta",
            window=True, vocab_size=size,
        )  # fmt: skip
        corpus = Corpus(
            fingerprint="f" * 64, tokenizer="bytes", train=[_text(9, 0)], validation=_text(700, 1),
            heldout=[_text(300 + index, index) for index in range(5)], heldout_names=list("abcde"),
            unigram_entropy=1.0, bigram_entropy=None,
        )  # fmt: skip
        settings = {
            "flipflop": {"iid": 40, "sparse": 30, "dense": 20, "length": 16},
            "mqar": {"rows": 9},
            "mad": {"rows": 9},
        }
        evaluation = EvalConfig(
            lengths=(16, 32), documents=5, validation_tokens=300, chunk_tokens=64,
            settings=settings | {"junk": {"rows": 7}, "needle": {"trials": 7}},
        )  # fmt: skip
        config = CellConfig(
            model=model.config, train=TrainConfig(seq_len=13, micro_batch=1, batch_tokens=13), eval=evaluation
        )
        return CellSubject(model.eval(), load_tokenizer(tokenizer), corpus, config, torch.device("cpu"))

    return make
