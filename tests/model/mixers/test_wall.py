"""Wall attention as a mixer: its gates, and what its settings do to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from atma_sweep.kernels.attention.wall.op import soft_clamp, wall_attention
from atma_sweep.kernels.rotary import apply_rotary_reference
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.mixers.wall import Wall, WallConfig
from torch import Tensor

SIZES = {"d_model": 12, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
X = SIZES["head_dim"]


def build_mixer(**settings: Any) -> Wall:
    """Gates that are neither open nor closed, as they would be after some training."""
    torch.manual_seed(3)
    return Wall(ModelConfig(**SIZES), WallConfig(**{"gate_std": 0.7, "gate_bias": 1.5} | settings)).double()


def mixed(mixer: Wall, read: list[Tensor], **options: Any) -> Tensor:
    q, k, v, x = read
    return mixer(q, k, v, x_BTD=x, **({"window": None} | options)).detach()


def test_the_soft_clamp() -> None:
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    at_zero = soft_clamp(zero, 0.87)
    assert (at_zero, *torch.autograd.grad(at_zero, zero)) == (0, 1)
    assert soft_clamp(torch.tensor(-torch.inf), 0.87) == -torch.tensor(0.87)
    assert soft_clamp(torch.tensor(-50.0), 0.87).exp() == pytest.approx(0.419, abs=5e-4)
    assert soft_clamp(torch.tensor(0.5).log(), 0.87).exp() == pytest.approx(0.620, abs=5e-4)
    falling = soft_clamp(torch.linspace(-9, 0, 99), 0.86)
    assert (falling.diff() > 0).all()


def test_gates_start_open() -> None:
    mixer = Wall(ModelConfig(**SIZES), WallConfig(gate_std=0.0))
    gates = mixer.log_gates(torch.randn(1, 3, 12), torch.randn(1, 3, 2, X)).detach()
    assert gates.shape == (1, 3, 4, X)
    assert gates.exp().numpy() == pytest.approx(0.9975, abs=5e-5)
    assert math.exp(2048 * gates[0, 0, 0, 0]) == pytest.approx(0.0063, abs=1e-4)


def test_the_output_is_the_formula(read: list[Tensor]) -> None:
    """Gates, their clamp and the scores written out for one query of one head."""
    mixer = build_mixer(scale=0.4)
    i, h, first = 14, 3, 14 - 6
    logit = read[3][0] @ mixer.gate.weight[h * X : (h + 1) * X].T + mixer.gate.offset[h * X : (h + 1) * X]
    open_ = 0.86 * ((torch.sigmoid(logit).log() / 0.86).exp() - 1)
    retention = torch.stack([open_[j + 1 : i + 1].sum(0).exp() for j in range(first, i + 1)])
    q, k, v = read[0][0, i, h], read[1][0, first : i + 1, 1], read[2][0, first : i + 1, 1]
    wanted = (0.4 * (q * k * retention).sum(-1)).softmax(0) @ v
    assert (mixed(mixer, read, window=7)[0, i, h] - wanted).abs().max() <= 1e-13


def test_without_limit_gates_fall_as_they_are(read: list[Tensor]) -> None:
    free, held = build_mixer(g_max="none", gate_bias=-4.0), build_mixer(gate_bias=-4.0)
    _, k, _, x = read
    logit = x @ free.gate.weight.T + free.gate.offset
    assert (free.log_gates(x, k).flatten(2) - torch.sigmoid(logit).log()).abs().max() <= 1e-13
    assert free.log_gates(x, k).min() < -3
    assert held.log_gates(x, k).min() > -0.86
    for mixer, backend in (
        (free, "no limit"),
        (build_mixer(g_max=1.5), "the limit 1.5"),
        (held, "Triton needs CUDA, the device is cpu"),
    ):
        assert backend in mixer.kernel_paths(torch.device("cpu"), torch.bfloat16)["wall"]


def test_subdim_gates_the_first_channels(read: list[Tensor]) -> None:
    """Gating every channel is the default, gating none is softmax; otherwise the first ones have gates."""
    default, all_, partial, none = (build_mixer(subdim=n) for n in (None, X, 3, 0))
    assert torch.equal(mixed(all_, read), mixed(default, read))
    q, k, v, x = read
    assert (mixed(none, read) - softmax_attention_reference(q, k, v)).abs().max() <= 1e-12
    assert list(none.parameters()) == []
    gates = partial.log_gates(x, k)
    assert (gates[..., :3] < 0).all()
    assert (gates[..., 3:] == 0).all()


def test_scalar_gate_multiplies_the_score(read: list[Tensor]) -> None:
    """Computes a query of a head by the formula: the retention of a path times scale q k, unlike FoX, which adds its log."""
    mixer = build_mixer(gates="scalar", scale=0.4)
    assert mixer.gate.weight.shape == (4, 12)
    q, k, v, x = read
    i, h = 11, 2
    log_gate = soft_clamp((x[0] @ mixer.gate.weight[h] + mixer.gate.offset[h]).sigmoid().log(), 0.86)
    retention = torch.stack([log_gate[j + 1 : i + 1].sum().exp() for j in range(i + 1)])
    weights = (0.4 * retention * (k[0, : i + 1, 1] @ q[0, i, h])).softmax(0)
    assert (mixed(mixer, read)[0, i, h] - weights @ v[0, : i + 1, 1]).abs().max() <= 1e-13
    # as channel gates whose rows are equal
    apart = build_mixer(scale=0.4)
    with torch.no_grad():
        for name in ("weight", "offset"):
            getattr(apart.gate, name).copy_(getattr(mixer.gate, name).repeat_interleave(X, 0))
    assert (mixed(apart, read) - mixed(mixer, read)).abs().max() <= 1e-13
    assert Wall.forward_flops(ModelConfig(**SIZES), mixer.config, 100) == 4 * 4 * X * 100 + 2 * 12 * 4
    with pytest.raises(ValueError, match="gates is scalar"):
        Wall.check(ModelConfig(**SIZES), WallConfig(gates="scalar", subdim=3))


def test_kv_head_gates_equal_query_head_gates_of_equal_rows(read: list[Tensor]) -> None:
    tied, apart = build_mixer(tie="kv"), build_mixer()
    assert tied.gate.weight.shape == (2 * X, 12)
    with torch.no_grad():
        for name in ("weight", "offset"):
            rows = getattr(tied.gate, name).unflatten(0, (2, X)).repeat_interleave(2, 0).flatten(0, 1)
            getattr(apart.gate, name).copy_(rows)
    assert (mixed(tied, read) - mixed(apart, read)).abs().max() <= 1e-13


@pytest.mark.parametrize("tie", ["head", "kv"])
def test_gates_from_keys(read: list[Tensor], tie: str) -> None:
    """Those of a head are projected from the key of its own KV head, and the block's input says nothing."""
    mixer = build_mixer(gate_source="keys", tie=tie)
    _, k, _, x = read
    heads = 4 if tie == "head" else 2
    weight, offset = mixer.gate.weight.unflatten(0, (heads, X)), mixer.gate.offset.unflatten(0, (heads, X))
    gates = mixer.log_gates(x, k)
    for head in range(heads):
        logit = k[:, :, head // (heads // 2)] @ weight[head].T + offset[head]
        assert (gates[:, :, head] - soft_clamp(torch.sigmoid(logit).log(), 0.86)).abs().max() <= 1e-13
    assert torch.equal(mixed(mixer, read), mixed(mixer, [*read[:3], 0 * x]))


@pytest.mark.parametrize("source", ["input", "keys"])
def test_rotary_turns_queries_and_keys_but_no_gates(read: list[Tensor], source: str) -> None:
    mixer = build_mixer(rotary="full", base=50.0, gate_source=source)
    q, k, v, x = read
    turned = [apply_rotary_reference(states, "full", 50.0) for states in (q, k)]
    assert (mixed(mixer, read) - wall_attention(*turned, v, mixer.log_gates(x, k))).abs().max() <= 1e-12


def test_flops_are_those_of_attention_and_of_the_gates() -> None:
    model = ModelConfig(**SIZES)
    plain = 4 * 4 * X * 100
    for settings, extra in (({}, 2 * 12 * 4 * X), ({"tie": "kv"}, 2 * 12 * 2 * X), ({"subdim": 3}, 2 * 12 * 4 * 3),
                            ({"gate_source": "keys"}, 2 * X * 4 * X), ({"subdim": 0}, 0)):  # fmt: skip
        assert Wall.forward_flops(model, WallConfig(**settings), 100) == plain + extra
