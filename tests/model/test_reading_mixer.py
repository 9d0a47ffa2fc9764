"""A mixer that reads the block's input gets it in training and in evaluation, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model import Mixer, MixerConfig, register_mixer
from atma_sweep.model.backbone import Backbone
from atma_sweep.model.config import ModelConfig
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("registries")
Awake = Callable[..., Backbone]


class Forgetting(Mixer):
    """A running mean of the values with a forget gate that is read from x, and its evaluation a piece at a time."""

    reads_input = True

    def __init__(self, model: ModelConfig, config: MixerConfig) -> None:
        super().__init__(model, config)
        self.gate = nn.Parameter(torch.randn(model.n_heads, model.d_model))
        self.share = model.n_heads // model.n_kv_heads

    def forward(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, x_BTD: Tensor) -> Tensor:
        decay_BTH = nn.functional.logsigmoid(x_BTD @ self.gate.to(x_BTD.dtype).T).cumsum(1)
        weights = (decay_BTH[:, :, None] - decay_BTH[:, None]).exp()
        reach = torch.ones(weights.shape[1:3], dtype=torch.bool).tril()
        if window is not None:
            reach = reach.triu(1 - window)
        weights = torch.where(reach[None, :, :, None], weights, 0)
        return torch.einsum("btsh,bshx->bthx", weights, v_BTJX.repeat_interleave(self.share, 2))


@pytest.fixture(params=[False, True])
def model(request: pytest.FixtureRequest, awake: Awake) -> Backbone:
    register_mixer("forgetting")(Forgetting)
    return awake(attn_type="forgetting", memory="gated_delta", window=request.param)


@torch.no_grad()
def test_evaluation_in_pieces_is_the_forward_pass(model: Backbone, tokens: Tensor) -> None:
    at_once = model.features(tokens).hidden_BTD
    for chunk in (1, 5, 100):
        assert (model.features(tokens, chunk=chunk).hidden_BTD - at_once).abs().max() <= 1e-12


@torch.no_grad()
def test_it_reads_the_normed_input_of_its_block(model: Backbone, tokens: Tensor) -> None:
    block, read = model.blocks[2], []
    forward = block.mix.mixer.forward

    def spy(*arguments: Any, **options: Any) -> Tensor:
        read.append(options["x_BTD"])
        mixed: Tensor = forward(*arguments, **options)
        return mixed

    block.mix.mixer.forward = spy
    x_BTD = model.embedding(tokens)
    for before in model.blocks[:2]:
        x_BTD, _ = before(x_BTD, window=None)
    model.features(tokens)
    weight, wide = block.norm1.weight, x_BTD.square().mean(-1, keepdim=True)
    assert (read[0] - x_BTD / (wide + 1e-6).sqrt() * weight).abs().max() <= 1e-12


def test_a_mixer_without_forward_says_so(awake: Awake, tokens: Tensor) -> None:
    register_mixer("empty")(type("Empty", (Mixer,), {}))
    with pytest.raises(NotImplementedError, match="Empty defines no forward"):
        awake(attn_type="empty").features(tokens)
