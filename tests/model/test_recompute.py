"""Recomputed blocks: the same loss and gradients to the last bit, and fewer stored activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.attempt.device import RECOMPUTED_EVERY
from torch import Tensor

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "polar+memory": ({"memory": "gated_delta", "window": True}, {"regularizer": "zipfian", "distractor": True}),
    "fox": ({"attn_type": "fox"}, {}),
    "dropout": ({"attn_type": "rope", "dropout": 0.25}, {"regularizer": "strong"}),
    "kda": ({"attn_type": "nope", "memory": "kda"}, {}),
    "positions": ({"attn_type": "nope", "positions": "label"}, {}),
    "path": ({"attn_type": "path"}, {}),
}


def network(every: int, dtype: torch.dtype, settings: dict[str, Any]) -> Backbone:
    config = ModelConfig(
        d_model=16, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=29, window_size=3, init="llama",
        **settings,
    )  # fmt: skip
    model = build(config, seed=1, dtype=dtype)
    if every:
        model.recompute_blocks(every)
    return model


def backward(model: Backbone, terms: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return the loss with every gradient, and the bytes that the forward pass stored outside of recomputed blocks."""
    auxiliary = AuxiliaryTerms(
        regularizer=terms.get("regularizer", "baseline"), sketch=5, distractor=terms.get("distractor", False),
        distractor_count=None, seed=0, step=3, micro=1,
    )  # fmt: skip
    tokens = torch.arange(2 * 12).reshape(2, 12) % 29
    stored = [0]

    def pack(tensor: Tensor) -> Tensor:
        stored[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features = model.features(tokens, auxiliary=auxiliary)
        loss = model.total_loss(features.hidden_BTD, tokens)
        for extra in (features.regularizer, features.distractor):
            loss = loss if extra is None else loss + extra
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], stored[0]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", RECOMPUTED_EVERY)
@pytest.mark.parametrize("case", CASES)
def test_recompute_gives_the_same_bits(case: str, way: str, dtype: torch.dtype) -> None:
    settings, terms = CASES[case]
    expected, _ = backward(network(0, dtype, settings), terms)
    ours, _ = backward(network(RECOMPUTED_EVERY[way], dtype, settings), terms)
    assert len(ours) == len(expected) > 20
    for value, reference in zip(ours, expected, strict=True):
        assert torch.equal(value, reference)


def test_recompute_stores_less() -> None:
    stored = [backward(network(every, torch.float32, {}), {})[1] for every in (0, 2, 1)]
    assert stored[2] < stored[1] < stored[0]
    # of five blocks, all or three are recomputed; what is stored is their inputs, embedding, head and loss
    assert stored[2] < 0.2 * stored[0]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_recompute_compiles_block_by_block(backend: str) -> None:
    settings, terms = CASES["polar+memory"]
    expected, _ = backward(network(0, torch.float32, settings), terms)
    model = network(1, torch.float32, settings)
    model.compile_blocks(backend)
    assert "block by block" in model.kernel_paths()["blocks"]
    assert "5 of 5 recomputed" in model.kernel_paths()["blocks"]
    for value, reference in zip(backward(model, terms)[0], expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
