"""A network that trains in milliseconds, with every branch awake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.config import ModelConfig

SMALL = {
    "d_model": 24,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,
    "window_size": 3,
    "memories": {"omega": {"window": 3, "chunk": 4}, "atlas": {"window": 3, "chunk": 4}},
}


@pytest.fixture
def small() -> Callable[..., ModelConfig]:
    return lambda **changes: ModelConfig(**(SMALL | changes))


@pytest.fixture
def awake(wake: Callable[[Backbone], None]) -> Callable[..., Backbone]:
    """A small float64 network with seeded noise on every parameter, so that no branch ends in a zero projection."""

    def make(**changes: Any) -> Backbone:
        model = build(ModelConfig(**(SMALL | changes)), seed=0, dtype=torch.float64)
        wake(model)
        return model

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    """[2, 12]: eleven inputs and their targets."""
    return torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def auxiliary() -> Callable[..., AuxiliaryTerms]:
    plain = {"regularizer": "baseline", "sketch": 5, "distractor": False, "distractor_count": None}
    return lambda **changes: AuxiliaryTerms(**({**plain, "seed": 0, "step": 3, "micro": 1} | changes))
