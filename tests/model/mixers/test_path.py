"""PaTH attention as a mixer: how a token's map is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.path.op import path_attention
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.mixers.path import PaTH, PaTHConfig
from torch import Tensor
from torch.nn import functional

T, MODEL = 19, ModelConfig(d_model=12, n_heads=4, n_kv_heads=2, head_dim=8)


def build_mixer(**settings: Any) -> PaTH:
    torch.manual_seed(3)
    mixer = PaTH(MODEL, PaTHConfig(**{"gate_std": 0.7, "rank": 5} | settings)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_()
    return mixer


@pytest.mark.parametrize("rank", [5, None])
def test_transition_reads_its_token_and_the_two_before(read: list[Tensor], rank: int | None) -> None:
    mixer, x = build_mixer(rank=rank), read[3]
    low = x if mixer.low is None else x @ mixer.low.weight.T
    wide = low @ mixer.w.weight.T
    filters = mixer.conv.weight[:, 0]
    w, beta = mixer.maps(x)
    t, head = 7, 1
    mean = sum(filters[:, tap] * wide[:, t - 2 + tap] for tap in range(3))[:, head * 8 : head * 8 + 8]
    direction = mean * torch.sigmoid(mean)
    assert (w[:, t, head] - direction / direction.norm(dim=-1, keepdim=True)).abs().max() <= 1e-13
    logit = x[:, t] @ mixer.beta.weight[head] + mixer.beta.offset[head]
    assert (beta[:, t, head] - 2 * torch.sigmoid(logit)).abs().max() <= 1e-13


def test_the_mixer_is_path_attention_with_these_maps(read: list[Tensor]) -> None:
    mixer, (q, k, v, x) = build_mixer(scale=0.3), read
    ours = mixer(q, k, v, window=6, x_BTD=x)
    assert (ours - path_attention(q, k, v, *mixer.maps(x), scale=0.3, window=6)).abs().max() == 0


def test_it_starts_near_a_projection() -> None:
    _, beta = PaTH(MODEL, PaTHConfig(gate_std=0.0)).maps(functional.pad(torch.ones(1, 3, 1), (0, 11)))
    assert (beta == 1).all()


def test_paths_name_the_window(read: list[Tensor]) -> None:
    paths = build_mixer().kernel_paths(torch.device("cpu"), torch.bfloat16)
    assert set(paths) == {"path", "path_window"}
    assert all("the device is cpu" in path for path in paths.values())
