"""The network as a whole: sizes, initial values, causality, groups, chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from atma_sweep.kernels.conv import op as conv_op
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build, count_parameters
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.rng import derive_seed, rng_stream
from registries import PAIRS
from torch import Tensor

Small = Callable[..., ModelConfig]
Awake = Callable[..., Backbone]
Aux = Callable[..., AuxiliaryTerms]
PUBLISHED_ROPE = {"rope": {"rotary": "half-truncated", "base": 1024, "scale": 0.12, "canon": False}}


@pytest.mark.parametrize(("attn_type", "memory", "total"), [
    ("rope", "none", 369_692_800), ("rope", "gated_delta", 378_155_200),
    ("nope", "none", 369_717_376), ("nope", "gated_delta", 378_179_776),
    ("polar", "none", 369_758_464), ("polar", "gated_delta", 378_220_864),
])  # fmt: skip
def test_published_parameter_counts(attn_type: str, memory: str, total: int) -> None:
    mixers = PUBLISHED_ROPE if attn_type == "rope" else {}
    config = ModelConfig(attn_type=attn_type, memory=memory, init="zero-ends-and-conv-in", mixers=mixers)
    assert count_parameters(config) == total


def test_intended_rope_has_canon_and_so_nopes_size() -> None:
    assert count_parameters(ModelConfig(attn_type="rope")) == 369_717_376
    assert count_parameters(ModelConfig(attn_type="rope", memory="gated_delta")) == 378_179_776


@pytest.mark.parametrize("init", ["zero-ends", "zero-ends-and-conv-in"])
def test_convolutions_train_unless_in_proj_starts_at_zero(small: Small, tokens: Tensor, init: str) -> None:
    """D1: with both ends at zero, in_proj and conv get exactly zero gradient at every step; with one, they learn."""
    model = build(small(init=init), seed=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        sgd.zero_grad()
        model.token_losses(model.features(tokens[:, :-1]).hidden_BTD, tokens[:, 1:]).mean().backward()
        sgd.step()
    dead = init == "zero-ends-and-conv-in"
    for block in (model.blocks[i] for i in (0, 1, 3)):
        watched = [block.mix.in_proj.weight, block.mix.in_proj.bias, block.mix.conv.weight, block.mix.out_proj.weight]
        for parameter in watched:
            assert parameter.grad is not None
            assert (parameter.grad.abs().max().item() == 0) == dead
        assert block.mix.out_proj.bias.grad.abs().max() > 0


def test_logits_are_capped(awake: Awake, tokens: Tensor) -> None:
    model = awake()
    with torch.no_grad():
        model.head.weight.mul_(100)
        logits = model(tokens)
        losses = model.token_losses(model.features(tokens[:, :-1]).hidden_BTD, tokens[:, 1:])
    assert 14 < logits.abs().max() < 15
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    assert (losses.flatten() - expected).abs().max() <= 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "window"), [(*pair, window) for pair in PAIRS for window in (False, True)]
)
def test_a_token_never_changes_earlier_outputs(
    awake: Awake, tokens: Tensor, attn_type: str, memory: str, window: bool
) -> None:
    model = awake(attn_type=attn_type, memory=memory, window=window)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 37
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert (before[:, :6] - after[:, :6]).abs().max() <= 1e-12
    assert ((before[:, 6:] - after[:, 6:]).abs().amax((0, 2)) > 1e-6).all()


def test_gated_conv_of_a_single_token(awake: Awake) -> None:
    mix = awake().blocks[0].mix
    x = torch.randn(2, 1, 24, dtype=torch.float64)
    b, c, u = mix.in_proj(x).chunk(3, -1)
    expected = mix.out_proj(c * mix.conv.weight[:, 0, 2] * b * u)
    out, loss = mix(x)
    assert (out - expected).abs().max() <= 1e-14
    assert loss is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "dtype"), [(*pair, dtype) for pair in PAIRS for dtype in (torch.float32, torch.bfloat16)]
)
def test_initial_loss_is_ln_v(small: Small, tokens: Tensor, attn_type: str, memory: str, dtype: torch.dtype) -> None:
    model = build(small(attn_type=attn_type, memory=memory), seed=0, dtype=dtype)
    hidden = model.features(tokens[:, :-1]).hidden_BTD
    assert hidden.dtype == dtype
    losses = model.token_losses(hidden, tokens[:, 1:])
    assert losses.dtype == torch.float32
    assert losses.detach().flatten().tolist() == pytest.approx([math.log(37)] * 22, abs=1e-6)
    losses.mean().backward()
    assert model.head.weight.grad.abs().max() > 0


def test_initial_values(small: Small) -> None:
    model = build(small(memory="gated_delta"), seed=0)
    attention = model.blocks[2].mix
    for linear in (
        attention.w_q,
        attention.w_k,
        attention.memory.gate,
        attention.memory.w_gamma,
        model.blocks[0].mlp.fc,
    ):
        for parameter in (linear.weight, linear.bias):
            assert 0 < parameter.abs().max() <= linear.weight.shape[1] ** -0.5
    for conv, taps in ((model.blocks[0].mix.conv, 3), (attention.canon.k, 4)):
        assert 0.8 * taps**-0.5 < conv.weight.abs().max() <= taps**-0.5
    ends = (attention.proj, attention.memory.proj, attention.mixer.mu_proj, model.blocks[0].mlp.proj,
            model.blocks[0].mix.out_proj, model.head)  # fmt: skip
    assert all(p.abs().max() == 0 for end in ends for p in end.parameters())
    assert model.embedding.weight.std().item() == pytest.approx(1, abs=0.1)
    scalars = {"null_base": 2.0, "null_slope": 0.5, "len_gain": -1.0, "mag_beta": -1.5, "v_null": 0.0}
    for name, value in scalars.items():
        assert (getattr(attention.mixer, name) == value).all()


@pytest.mark.parametrize(("attn_type", "memory"), PAIRS)
def test_each_parameter_is_in_exactly_a_single_group(small: Small, attn_type: str, memory: str) -> None:
    model = build(small(attn_type=attn_type, memory=memory), seed=0)
    groups = model.parameter_groups()
    names = [name for members in groups.values() for name, _ in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [name for name, _ in groups["embedding"]] == ["embedding.weight"]
    assert [name for name, _ in groups["head"]] == ["head.weight"]
    assert all(parameter.ndim < 2 for _, parameter in groups["scalar"])
    assert {"head.bias", "norm.weight", "blocks.0.norm1.weight"} <= {name for name, _ in groups["scalar"]}
    muon = dict(groups["muon"])
    assert muon["blocks.0.mix.conv.weight"].shape == (24, 1, 3)
    assert muon["blocks.2.mix.canon.q.weight"].shape == (32, 1, 4)
    assert ("blocks.2.mix.mixer.v_null" in muon) == (attn_type == "polar")
    assert ("blocks.2.mix.mixer.mu_proj.weight" in muon) == (attn_type == "polar")
    assert ("blocks.2.mix.memory.gate.weight" in muon) == (memory != "none")


def test_a_parameter_without_a_group_is_an_error(small: Small) -> None:
    model = build(small(), seed=0)
    model.extra = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="parameter extra with shape"):
        model.parameter_groups()


def test_networks_share_the_parameters_they_have_in_common(small: Small) -> None:
    parameters = dict(build(small(attn_type="polar"), seed=3).named_parameters())
    for variant in (small(memory="gated_delta"), small(attn_type="nope"), small(attn_type="rope", window=True)):
        two = dict(build(variant, seed=3).named_parameters())
        common = parameters.keys() & two.keys()
        assert len(common) > 30
        assert all(torch.equal(parameters[name], two[name]) for name in common)
    again = dict(build(small(), seed=4).named_parameters())
    assert not torch.equal(parameters["blocks.0.mlp.fc.weight"], again["blocks.0.mlp.fc.weight"])
    assert not torch.equal(parameters["blocks.0.mlp.fc.weight"], parameters["blocks.1.mlp.fc.weight"])


def test_building_leaves_the_global_generator_alone(small: Small) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(small(), seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_chance_depends_on_seed_purpose_and_key() -> None:
    seeds = [derive_seed(*key) for key in ((0, "init", "a"), (1, "init", "a"), (0, "sketch", "a"), (0, "init", "b"))]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "init", 1) == derive_seed(0, "init", "1")
    assert seeds[0] == 1121984756811719870
    draws = [torch.rand(2, generator=rng_stream(0, "init", "a")) for _ in range(2)]
    assert torch.equal(*draws)


def test_unrequested_losses_are_none(small: Small, tokens: Tensor, auxiliary: Aux) -> None:
    model = build(small(), seed=0)
    for features in (model.features(tokens), model.features(tokens, auxiliary=auxiliary())):
        assert features.regularizer is None
        assert features.distractor is None


def test_auxiliary_terms_draw_independently(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    model = awake()
    both = model.features(tokens, auxiliary=auxiliary(regularizer="weak", distractor=True))
    assert torch.equal(both.distractor, model.features(tokens, auxiliary=auxiliary(distractor=True)).distractor)
    assert torch.equal(both.regularizer, model.features(tokens, auxiliary=auxiliary(regularizer="weak")).regularizer)
    assert torch.equal(both.hidden_BTD, model.features(tokens).hidden_BTD)
    for change in ({"step": 4}, {"micro": 2}, {"seed": 1}):
        changed = model.features(tokens, auxiliary=auxiliary(regularizer="weak", distractor=True, **change))
        assert changed.regularizer != both.regularizer
        assert changed.distractor != both.distractor


def test_impossible_requests(small: Small, tokens: Tensor, auxiliary: Aux) -> None:
    with pytest.raises(ValueError, match="no global layer"):
        build(small(n_layers=2), seed=0).features(tokens, auxiliary=auxiliary(distractor=True))
    with pytest.raises(ValueError, match="no regularizer named 'weka'"):
        build(small(), seed=0).features(tokens, auxiliary=auxiliary(regularizer="weka"))
    with pytest.raises(ValueError, match=r"\[B, T\], got shape \(12,\)"):
        build(small(), seed=0).features(tokens[0])


def test_kernel_paths(small: Small) -> None:
    paths = build(small(memory="gated_delta"), seed=0).kernel_paths()
    assert paths["polar"] == "torch (Triton needs CUDA, the device is cpu)"
    assert paths["blocks"] == "eager"
    assert paths["memory"] == "torch chunk 64 (Triton needs CUDA, the device is cpu)"
    assert "softmax" in build(small(attn_type="rope"), seed=0).kernel_paths()
    assert {"gated_conv", "canon", "sketch", "cross_entropy"} <= paths.keys()
    # an op that the network lacks has no path
    alone = small(attn_type="nope", mixers={"nope": {"canon": False}}, attn_every=1, attn_offset=0)
    assert not {"gated_conv", "canon", "memory"} & build(alone, seed=0).kernel_paths().keys()


def test_gated_conv_path_is_the_choice_of_the_convolutions(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_op, "why_no_triton", lambda device, dtype: None)
    monkeypatch.setattr(conv_op, "self_test_failure", lambda *arguments: None)
    paths = build(small(memory="gated_delta"), seed=0).kernel_paths()
    assert paths["gated_conv"] == paths["canon"]
    assert paths["gated_conv"].startswith("triton")
    assert paths["memory"].startswith("torch")


def test_float32_embedding_learns_updates_lost_in_bfloat16(small: Small, tokens: Tensor) -> None:
    """And the network is the same: activations stay bfloat16."""
    moved = []
    for word in ("activations", "float32"):
        settings = {"positions": "ape", "position_settings": {"ape": {"length": 64}}, "init": "llama"}
        config = small(embedding_dtype=word, attn_type="nope", **settings)
        model = build(config, seed=0, dtype=torch.bfloat16)
        assert (model.dtype, model.features(tokens).hidden_BTD.dtype) == (torch.bfloat16, torch.bfloat16)
        table = model.positions.table.weight  # type: ignore[union-attr]
        assert {model.embedding.weight.dtype, table.dtype} == {
            torch.bfloat16 if word == "activations" else torch.float32
        }
        with torch.no_grad():
            before = model.embedding.weight.normal_(generator=torch.Generator().manual_seed(0)).clone()
        optimizer = torch.optim.AdamW([model.embedding.weight], lr=1e-4, weight_decay=0)
        model(tokens).float().square().sum().backward()
        optimizer.step()
        large = (before.float().abs() > 0.1) & (model.embedding.weight.grad != 0)  # type: ignore[operator]
        moved.append(float((model.embedding.weight.detach() != before)[large].float().mean()))
    assert moved == [0, 1]
    assert build(config, seed=0, dtype=torch.float64).embedding.weight.dtype == torch.float64


def test_bfloat16_network_keeps_float32_weights(small: Small, tokens: Tensor, auxiliary: Aux) -> None:
    model = build(small(memory="gated_delta", window=True), seed=0, dtype=torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert types.pop("embedding.weight") == torch.bfloat16
    assert set(types.values()) == {torch.float32}
    features = model.features(tokens, auxiliary=auxiliary(regularizer="strong", distractor=True))
    assert features.regularizer.dtype == features.distractor.dtype == torch.float32
    (features.hidden_BTD.float().square().mean() + features.regularizer + features.distractor).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
