"""The switches of what surrounds a mixer: each by its formula, and none of them inert (docs/reference/mechanisms.md, "Backbone")."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.resolve import check_model_config
from graded import check_pieces_and_gradients, loss_of
from torch import Tensor
from torch.nn import functional

Awake = Callable[..., Backbone]
Aux = Callable[..., AuxiliaryTerms]
Small = Callable[..., ModelConfig]
SWITCHES: list[dict[str, Any]] = [
    {"mlp": "swiglu"}, {"mlp": "swiglu", "mlp_ratio": 2}, {"residual": "normed"}, {"logit_cap": None},
    {"tie_head": True}, {"dropout": 0.25},
]  # fmt: skip
EVERYTHING = {"mlp": "swiglu", "residual": "normed", "logit_cap": None, "tie_head": True, "dropout": 0.25}


# --- one by one against its formula -------------------------------------------------------------------------------


def test_the_mlp_with_swiglu(awake: Awake) -> None:
    mlp = awake(mlp="swiglu", mlp_ratio=2).blocks[0].mlp
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    a, g = (x @ mlp.fc.weight.T + mlp.fc.bias).chunk(2, -1)
    assert a.shape[-1] == 48
    expected = (g * a / (1 + torch.exp(-a))) @ mlp.proj.weight.T + mlp.proj.bias
    assert (mlp(x) - expected).abs().max() <= 1e-13


@pytest.mark.parametrize("layer", [0, 2])
def test_normed_residual_adds_to_the_normed_input(awake: Awake, layer: int) -> None:
    plain, normed = (awake(residual=word, attn_type="nope").blocks[layer] for word in ("pre-norm", "normed"))
    x = torch.randn(2, 5, 24, dtype=torch.float64)

    def mixed(block: Any, x: Tensor) -> Tensor:
        out: Tensor = block.mix(x, window=None)[0]
        return out

    def norm(weight: Tensor, x: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    n1 = norm(plain.norm1.weight, x)
    y = x + mixed(plain, n1)
    expected = y + plain.mlp(norm(plain.norm2.weight, y))
    assert (plain(x, window=None)[0] - expected).abs().max() <= 1e-12
    y = norm(normed.norm2.weight, n1 + mixed(normed, n1))
    assert (normed(x, window=None)[0] - (y + normed.mlp(y))).abs().max() <= 1e-12


@pytest.mark.parametrize("cap", ["none", "NONE", None])
def test_no_cap_is_a_word(cap: str | None) -> None:
    config = ModelConfig(logit_cap=cap)
    assert config.model_dump(mode="json")["logit_cap"] == "none"
    assert ModelConfig(**config.model_dump(mode="json")) == config
    assert ModelConfig(logit_cap="3e1").logit_cap == 30.0


def test_logits_without_a_cap(awake: Awake, tokens: Tensor) -> None:
    model = awake(logit_cap=None)
    with torch.no_grad():
        model.head.weight.mul_(100)
    hidden = model.features(tokens[:, :-1]).hidden_BTD
    z = hidden @ model.head.weight.T + model.head.bias
    assert torch.equal(model.logits(hidden), functional.linear(hidden, model.head.weight, model.head.bias))
    assert z.abs().max() > 100
    expected = functional.cross_entropy(z.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 11)
    assert (model.token_losses(hidden, tokens[:, 1:]) - expected).abs().max() <= 1e-10
    ours = torch.autograd.grad(model.total_loss(hidden, tokens[:, 1:]), model.head.weight, retain_graph=True)[0]
    assert (ours - torch.autograd.grad(expected.sum(), model.head.weight)[0]).abs().max() <= 1e-10


@pytest.mark.parametrize("cap", [15.0, None])
def test_a_tied_head_is_a_head_that_equals_the_embedding(
    awake: Awake, tokens: Tensor, auxiliary: Aux, cap: float | None
) -> None:
    tied, untied = awake(tie_head=True, logit_cap=cap), awake(logit_cap=cap)
    with torch.no_grad():
        state = tied.state_dict()
        untied.load_state_dict(state | {"head.weight": state["embedding.weight"].clone()})
    assert "head.weight" not in state
    values = [loss_of(model, tokens, auxiliary()) for model in (tied, untied)]
    assert torch.equal(*values)
    for value in values:
        value.backward()
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    assert (tied.embedding.weight.grad - expected).abs().max() <= 1e-12
    for name, parameter in tied.named_parameters():
        if name != "embedding.weight":
            assert torch.equal(parameter.grad, dict(untied.named_parameters())[name].grad), name


def test_tied_head_shares_the_matrix_and_the_head_rate(small: Small) -> None:
    tied, untied = (build(small(tie_head=tie), seed=0) for tie in (True, False))
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 37 * 24
    groups = tied.parameter_groups()
    assert (groups["embedding"], [name for name, _ in groups["head"]]) == ([], ["embedding.weight"])
    # the draw of an embedding of its own, at the size of a head's matrix
    assert torch.equal(tied.embedding.weight, untied.embedding.weight * 0.02)


def test_tied_matrix_stays_float32_with_bfloat16_activations(small: Small, tokens: Tensor, auxiliary: Aux) -> None:
    model = build(small(tie_head=True), seed=0, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    hidden = model.features(tokens[:, :-1], auxiliary=auxiliary()).hidden_BTD
    assert (model.dtype, hidden.dtype) == (torch.bfloat16, torch.bfloat16)
    assert model.token_losses(hidden, tokens[:, 1:]).mean().item() == pytest.approx(math.log(37), abs=0.2)


# --- dropout ------------------------------------------------------------------------------------------------------


def test_dropout_on_both_branches_by_hand(awake: Awake, auxiliary: Aux) -> None:
    model = awake(dropout=0.25, attn_type="nope")
    block = model.blocks[0]
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    mix, mlp = model.draw(auxiliary(), 2, 5).dropout_masks[0]
    out = block.mix(block.norm1(x))[0].masked_fill(~mix, 0) / 0.75
    y = x + out
    expected = y + block.mlp(block.norm2(y)).masked_fill(~mlp, 0) / 0.75
    assert (block(x, window=None, dropout_masks=(mix, mlp))[0] - expected).abs().max() <= 1e-12


def test_dropout_drops_its_share(small: Small, auxiliary: Aux) -> None:
    model = build(small(dropout=0.3), seed=0)
    masks = torch.stack([part for parts in model.draw(auxiliary(), 8, 200).dropout_masks.values() for part in parts])
    n = masks.numel()
    assert abs(masks.double().mean() - 0.7) < 4 * math.sqrt(0.3 * 0.7 / n)
    # a draw of its own for each layer and branch: two agree where chance has it
    flat = masks.flatten(1)
    for first, second in pairwise(flat):
        assert abs((first == second).double().mean() - (0.49 + 0.09)) < 0.02


def test_the_mean_of_dropout_is_the_branch(awake: Awake, auxiliary: Aux) -> None:
    """Many steps average to the network without, for a block whose branch is linear in nothing else."""
    model = awake(dropout=0.5, n_layers=1, attn_every=2, attn_offset=1)
    block = model.blocks[0]
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    with torch.no_grad():
        branch, _ = block.mix(block.norm1(x))
        outputs = [branch * model.draw(auxiliary(step=step), 1, 6).dropout_masks[0][0] * 2 for step in range(400)]
    assert (torch.stack(outputs).mean(0) - branch).abs().max() < 5 * branch.abs().max() / 20


def test_dropout_depends_on_seed_step_and_micro_batch_alone(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    model = awake(dropout=0.25)
    terms = auxiliary()
    first = loss_of(model, tokens, terms)
    torch.manual_seed(99)
    assert torch.equal(first, loss_of(awake(dropout=0.25), tokens, terms))
    for change in ({"seed": 1}, {"step": 4}, {"micro": 0}):
        assert not torch.equal(first, loss_of(model, tokens, replace(terms, **change)))


def test_dropout_is_off_in_evaluation(awake: Awake, tokens: Tensor) -> None:
    dropping, plain = awake(dropout=0.25), awake()
    assert dropping.training
    assert torch.equal(dropping.features(tokens).hidden_BTD, plain.features(tokens).hidden_BTD)
    with torch.no_grad():
        chunked = [model.features(tokens, chunk=3).hidden_BTD for model in (dropping, plain)]
    assert torch.equal(*chunked)


def test_dropout_leaves_further_draws_unchanged(awake: Awake, auxiliary: Aux) -> None:
    terms = auxiliary(regularizer="weak", distractor=True)
    with_dropout, without_dropout = (model.draw(terms, 2, 5) for model in (awake(dropout=0.25), awake()))
    assert without_dropout.dropout_masks == {}
    assert torch.equal(with_dropout.sketches_LKD, without_dropout.sketches_LKD)
    assert all(
        torch.equal(with_dropout.distractors[layer], without_dropout.distractors[layer])
        for layer in without_dropout.distractors
    )


# --- initial values -----------------------------------------------------------------------------------------------


def test_llama_starts_no_projection_at_zero(small: Small) -> None:
    model = build(small(init="llama", memory="gated_delta", vocab_size=500), seed=0)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks") and name.endswith(("proj.weight", "proj.bias", "fc.weight", "w_k.bias")):
            inputs = dict(model.named_modules())[name.rpartition(".")[0]].weight.shape[1]
            assert 0.5 * inputs**-0.5 < parameter.abs().max() <= inputs**-0.5, name
    assert 0.009 < model.embedding.weight.abs().max() <= 0.01
    assert model.embedding.weight.std().item() == pytest.approx(0.01 / math.sqrt(3), rel=0.03)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not model.head.bias.any()
    tied = build(small(init="llama", tie_head=True, vocab_size=500), seed=0)
    assert tied.embedding.weight.std().item() == pytest.approx(0.02, rel=0.03)


def test_llama_init_keeps_the_draws_of_unchanged_parameters(small: Small) -> None:
    llama, zero_ends = (dict(build(small(init=init), seed=3).named_parameters()) for init in ("llama", "zero-ends"))
    for name in ("blocks.0.mlp.fc.weight", "blocks.2.mix.w_q.weight", "blocks.1.mix.conv.weight"):
        assert torch.equal(llama[name], zero_ends[name])


# --- all of them --------------------------------------------------------------------------------------------------


def test_no_switch_is_inert(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    values = [loss_of(awake(**switch), tokens, auxiliary()).item() for switch in [{}, *SWITCHES]]
    assert all(high - low > 1e-7 for low, high in pairwise(sorted(values)))


@pytest.mark.parametrize("switch", [*SWITCHES, EVERYTHING, EVERYTHING | {"bias": False, "init": "llama"}], ids=str)
def test_the_pieces_and_the_gradients_follow(
    awake: Awake, small: Small, tokens: Tensor, auxiliary: Aux, switch: dict[str, Any]
) -> None:
    config = check_model_config(small(**switch))
    model = awake(**switch)
    loss_of(build(config, seed=0), tokens, auxiliary()).backward()
    check_pieces_and_gradients(model, tokens, auxiliary(), (1, 5, 128))
