"""Row decoder: every position is decoded from the last hidden state alone, against its formula by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.config import ModelConfig
from torch.nn import functional

SIZES: dict[str, Any] = {
    "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 20, "attn_every": 1,
    "attn_offset": 0, "mlp_ratio": 2, "attn_type": "nope", "init": "llama",
}  # fmt: skip


def network(**more: Any) -> Backbone:
    return build(ModelConfig(**(SIZES | more)), seed=3, dtype=torch.float64).eval()


def test_row_decoder_matches_formula_from_last_state() -> None:
    model, plain = network(decoder="row"), network()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "row_decoder" not in name})
    tokens = torch.arange(2 * 7).view(2, 7) % 20
    last = plain.features(tokens).hidden_BTD[:, -1]
    decoder: Any = model.row_decoder

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    for position in range(7):
        waves = [position / 10000 ** (2 * (channel // 2) / 16) for channel in range(16)]
        position_vector = torch.tensor(
            [(math.cos if channel % 2 else math.sin)(wave) for channel, wave in enumerate(waves)]
        )
        x = last + position_vector
        for linear in (decoder.first, decoder.second):
            x = functional.gelu(norm(x) @ linear.weight.T + linear.bias)
        for chunk in (None, 3):
            hidden = model.features(tokens, chunk=chunk).hidden_BTD[:, position]
            assert hidden.detach() == pytest.approx(norm(x).detach(), abs=1e-6)


def test_row_decoder_trains_in_group_of_matrices() -> None:
    model = network(decoder="row").train()
    groups = {name: group for group, members in model.parameter_groups().items() for name, _ in members}
    assert groups["row_decoder.first.weight"] == "muon"
    assert groups["row_decoder.norms.0.weight"] == "scalar"
    terms = AuxiliaryTerms("baseline", 1, False, None, 0, 0, 0)
    tokens = torch.arange(8)[None]
    model.total_loss(model.features(tokens, auxiliary=terms).hidden_BTD, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.row_decoder.parameters())  # type: ignore[union-attr]
    assert model.no_step_reason() == "a network with a row decoder"
