"""The switches of what stands around a mixer: each by its formula (docs/reference/mechanisms.md, "Backbone")."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from atma_sweep.model.attention import Attention
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone
from graded import check_pieces_and_gradients
from registries import PAIRS, has_distractor
from tiers import every_nth
from torch import Tensor
from torch.nn import functional

Awake = Callable[..., Backbone]
Aux = Callable[..., AuxiliaryTerms]
SWITCHES = ("qk_norm", "output_gate", "bias")
COMBINATIONS = [dict(zip(SWITCHES, values, strict=True)) for values in product((True, False), repeat=3)]


def naive(attention: Attention, x: Tensor, *, normed: bool, gated: bool, canon: bool) -> Tensor:
    """Token by token and head by head, from the weights alone: softmax attention without positions."""
    heads, groups, size = 4, 2, 8

    def linear(part: Any, row: Tensor) -> Tensor:
        out = part.weight @ row
        return out if part.bias is None else out + part.bias

    def norm(v: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + torch.finfo(v.dtype).eps).sqrt() if normed else v

    def convolved(rows: list[Tensor], weight: Tensor) -> list[Tensor]:
        if not canon:
            return rows
        outputs = []
        for t, row in enumerate(rows):
            flat = row.flatten().clone()
            for j in range(4):
                if t - 3 + j >= 0:
                    flat = flat + weight[:, 0, j] * rows[t - 3 + j].flatten()
            outputs.append(flat.view_as(row))
        return outputs

    both = [linear(attention.w_q, row).view(heads, -1) for row in x]
    q = convolved([norm(head[:, :size]) for head in both], attention.canon.q.weight if canon else x)
    k = convolved(
        [norm(linear(attention.w_k, r).view(groups, size)) for r in x], attention.canon.k.weight if canon else x
    )
    v = convolved([linear(attention.w_v, r).view(groups, size) for r in x], attention.canon.v.weight if canon else x)
    out = []
    for t in range(len(x)):
        read = []
        for h in range(heads):
            g = h // (heads // groups)
            weights = torch.stack([q[t][h] @ k[s][g] for s in range(t + 1)]).div(math.sqrt(size)).softmax(0)
            y = sum(weight * v[s][g] for s, weight in enumerate(weights))
            read.append(y / (1 + torch.exp(-both[t][h, size:])) if gated else y)
        out.append(linear(attention.proj, torch.cat(read)))
    return torch.stack(out)


@torch.no_grad()
@pytest.mark.parametrize(("canon", "settings"), [
    (True, {}), (False, {"mixers": {"nope": {"canon": False}}}), (False, {"canon": False}),
])  # fmt: skip
@pytest.mark.parametrize("switches", COMBINATIONS, ids=str)
def test_attention_is_its_formula(
    awake: Awake, switches: dict[str, bool], canon: bool, settings: dict[str, Any]
) -> None:
    attention = awake(attn_type="nope", **settings, **switches).blocks[2].mix
    x = torch.randn(9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = naive(attention, x, normed=switches["qk_norm"], gated=switches["output_gate"], canon=canon)
    assert (attention(x[None])[0][0] - expected).abs().max() <= 1e-12
    assert (attention.evaluate(x[None], window=None, chunk=4)[0] - expected).abs().max() <= 1e-12


@torch.no_grad()
def test_distractor_keys_are_normed_where_the_real_ones_are(awake: Awake) -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    inputs: list[Tensor] = []
    for normed in (True, False):
        attention = awake(attn_type="nope", qk_norm=normed).blocks[2].mix
        attention.mixer.distractor_loss = lambda q, k, v, k_r, v_r, y, *, window: inputs.append(k_r)
        attention(x, distractors_BRD=x)
        k = inputs[-1]
        plain = functional.linear(x, attention.w_k.weight, attention.w_k.bias).view(2, 5, 2, 8)
        expected = functional.rms_norm(plain, (8,)) if normed else plain
        assert (k - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("mixer", "memory"), every_nth(PAIRS, 5))
def test_without_biases_is_with_biases_of_zero(
    awake: Awake, tokens: Tensor, auxiliary: Aux, mixer: str, memory: str, tied: bool
) -> None:
    options = {"attn_type": mixer, "memory": memory, "tie_head": tied}
    bare, full = awake(bias=False, **options), awake(**options)
    weights = dict(bare.named_parameters())
    assert not [name for name in weights if name.endswith("bias")]
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            parameter.copy_(weights[name] if name in weights else torch.zeros_like(parameter))
    terms = auxiliary(distractor=has_distractor(mixer))
    losses = []
    for model in (bare, full):
        features = model.features(tokens[:, :-1], auxiliary=terms)
        extra = 0 if features.distractor is None else features.distractor
        loss = model.total_loss(features.hidden_BTD, tokens[:, 1:]) + extra
        loss.backward()
        losses.append(loss.item())
        single = model.token_losses(features.hidden_BTD, tokens[:, 1:]).sum() + extra
        assert single.item() == pytest.approx(loss.item(), abs=1e-10)
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert (bare(tokens) - full(tokens)).abs().max() <= 1e-12
    for name, parameter in full.named_parameters():
        if name in weights:
            assert (parameter.grad - weights[name].grad).abs().max() <= 1e-10, name


@pytest.mark.parametrize(("switch", "gone"), [
    ({"qkv_bias": False}, {f"blocks.2.mix.w_{x}.bias" for x in "qkv"}),
    ({"head_bias": False}, {"head.bias"}), ({"head_bias": False, "tie_head": True}, {"head.bias"}),
])  # fmt: skip
@torch.no_grad()
def test_qkv_and_head_bias_can_be_dropped_separately(
    awake: Awake, tokens: Tensor, switch: dict[str, bool], gone: set[str]
) -> None:
    switched, full = awake(**switch), awake(tie_head=switch.get("tie_head", False))
    weights = dict(switched.named_parameters())
    assert {name for name, _ in full.named_parameters()} - set(weights) == gone
    for name, parameter in full.named_parameters():
        parameter.copy_(weights[name] if name in weights else torch.zeros_like(parameter))
    assert (switched(tokens) - full(tokens)).abs().max() <= 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("switches", COMBINATIONS, ids=str)
@pytest.mark.parametrize(("mixer", "memory"), PAIRS)
def test_the_pieces_and_the_gradients_follow(
    awake: Awake, tokens: Tensor, auxiliary: Aux, mixer: str, memory: str, switches: dict[str, bool]
) -> None:
    model = awake(attn_type=mixer, memory=memory, **switches)
    check_pieces_and_gradients(model, tokens, auxiliary(), (1, 5))
