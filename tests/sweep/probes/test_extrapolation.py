"""Perplexity of one text in windows of every length (docs/reference/mechanisms.md, "Losses")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.probes.subject import CellSubject, run_probe

Make = Callable[..., CellSubject]


@pytest.mark.parametrize("length", [16, 13, 50, 100])
def test_extrapolation_matches_loop_over_windows(length: int, network: Any, subject: Make) -> None:
    """In float64, every target is predicted from the tokens of its window alone; length 13 leaves a window of 9."""
    model = network(awake=True, vocab_size=264, dtype=torch.float64, attn_type="nope", window=True).eval()
    who = subject(model, settings={"extrapolation": {"span": 100}})
    text = who.corpus.validation.astype(np.int64)
    losses = []
    for start in range(0, 100, length):
        stop = min(start + length, 100)
        logits = model.logits(model.features(torch.from_numpy(text[start:stop])[None], full_context=True).hidden_BTD)[0]
        losses += torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(text[start + 1 : stop + 1]), reduction="none"
        ).tolist()
    (((perplexity, nats), examples),) = run_probe("extrapolation", who, [length])
    assert (nats.value, nats.n) == (pytest.approx(np.mean(losses), abs=1e-9), 100)
    assert (perplexity.value, perplexity.n) == (pytest.approx(math.exp(np.mean(losses))), 100)
    pieces = np.array_split(np.array(losses), 64)
    assert [e.value for e in examples] == pytest.approx([piece.mean() for piece in pieces], abs=1e-9)
    assert [e.item for e in examples] == list(range(64))


def test_extrapolation_has_same_targets_at_every_length(rule: Any, subject: Make) -> None:
    model = rule(lambda row: np.zeros(len(row), int))
    who = subject(model)
    results = list(run_probe("extrapolation", who, [16, 32, 64]))
    # 300 tokens are 23 rows of 13
    assert {m.n for measured, _ in results for m in measured} == {299}
    targets = [t for targets in model.targets for t in targets.flatten().tolist()]
    assert targets == 3 * who.corpus.validation[1:300].tolist()
    assert all(model.full)
    assert {seen.shape[1] for seen in model.seen} == {16, 32, 64, 299 % 16, 299 % 32, 299 % 64}


def test_extrapolation_at_training_length_is_val_loss(network: Any, subject: Make) -> None:
    who = subject(network(awake=True, vocab_size=264, window=True).eval())
    ((_, full), _), ((_, nats), _) = next(run_probe("val", who, [0])), next(run_probe("extrapolation", who, [13]))
    assert (full.metric, nats.value, nats.n) == ("val_loss_full", pytest.approx(full.value, abs=1e-12), full.n)
