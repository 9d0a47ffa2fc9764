"""Forgetting attention as a mixer: its gates, and the mixers that it becomes at their ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.mixers.fox import FoX, FoXConfig
from torch import Tensor

T, MODEL = 19, ModelConfig(d_model=12, n_heads=4, n_kv_heads=2, head_dim=8)


def build_mixer(**settings: Any) -> FoX:
    torch.manual_seed(3)
    return FoX(MODEL, FoXConfig(**{"gate_std": 0.7} | settings)).double()


def test_the_output_is_the_formula(read: list[Tensor]) -> None:
    """Gates and scores written out for one query of one head."""
    mixer, (q, k, v, x) = build_mixer(scale=0.4, gate_bias=1.0), read
    i, h, first = 14, 3, 14 - 6
    gate = torch.sigmoid(x[0] @ mixer.gate.weight[h] + 1.0)
    retention = torch.stack([gate[j + 1 : i + 1].prod() for j in range(first, i + 1)])
    weights = (0.4 * (k[0, first : i + 1, 1] @ q[0, i, h])).exp() * retention
    ours = mixer(q, k, v, window=7, x_BTD=x)
    assert (ours[0, i, h] - weights / weights.sum() @ v[0, first : i + 1, 1]).abs().max() <= 1e-13


def test_gates_start_at_a_half() -> None:
    mixer = FoX(MODEL, FoXConfig())
    assert mixer.gate.offset.tolist() == [0.0] * 4
    big = FoX(ModelConfig(d_model=1024, n_heads=64, n_kv_heads=1, head_dim=8), FoXConfig())
    assert big.gate.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_its_flops_are_those_of_attention_and_of_the_gates() -> None:
    assert FoX.forward_flops(MODEL, FoXConfig(), 100) == 4 * 4 * 8 * 100 + 2 * 12 * 4
