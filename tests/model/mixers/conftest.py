"""A single mixer in float64, with tensors of odd sizes to call it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model.bases import Mixer
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.registry import MIXERS
from atma_sweep.model.resolve import check_model_config, mixer_settings
from torch import Tensor

MixerFactory = Callable[..., Mixer]


@pytest.fixture
def build_mixer() -> MixerFactory:
    """A mixer by its name, in a network of `heads` and `kv` heads of `size`; the rest are its own settings."""

    def make(name: str, *, heads: int = 4, kv: int = 2, size: int = 6, **settings: Any) -> Mixer:
        model = check_model_config(ModelConfig(
            d_model=8, n_layers=1, n_heads=heads, n_kv_heads=kv, head_dim=size, attn_type=name, mixers={name: settings},
            attn_every=1, attn_offset=0,
        ))  # fmt: skip
        torch.set_default_dtype(torch.float64)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return MIXERS.load(name)(model, mixer_settings(model))
        finally:
            torch.set_default_dtype(torch.float32)

    return make


@pytest.fixture
def qkv() -> Callable[..., list[Tensor]]:
    """q, k and v of 2 rows."""

    def make(t: int = 9, *, heads: int = 4, kv: int = 2, size: int = 6, seed: int = 0) -> list[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        shapes = [(2, t, heads, size), (2, t, kv, size), (2, t, kv, size)]
        return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]

    return make


@pytest.fixture
def read() -> list[Tensor]:
    """q, k, v and the block's input of two texts of 19 tokens."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(2, 19, 4, 8), (2, 19, 2, 8), (2, 19, 2, 8), (2, 19, 12)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
