"""Differential attention against one pair of heads and one query at a time, and what must hold of lambda."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from atma_sweep.model.backbone import build
from atma_sweep.model.bases import Mixer
from atma_sweep.model.config import ModelConfig
from torch import Tensor

MixerFactory = Callable[..., Mixer]
Draw = Callable[..., list[Tensor]]
FIRST = {0: 0.2, 1: 0.8 - 0.6 * math.exp(-0.3), 4: 0.8 - 0.6 * math.exp(-1.2)}
"""Layer -> lambda's constant part."""
LINEAR = 1e12
"""An epsilon beside which what is normed is nothing: the norm then only divides by a million."""


def turned(x: Tensor, base: float) -> Tensor:
    """Halves of each head as pairs, turned by position times base^(-m / pairs)."""
    pairs = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    turn = torch.polar(torch.ones_like(angle), -angle)[:, None]
    y = torch.complex(x[..., :pairs], x[..., pairs:]) * turn
    return torch.cat([y.real, y.imag], -1)


def maps(q: Tensor, k: Tensor, pair: int, which: int, i: int, window: int | None) -> tuple[range, Tensor]:
    """Keys that query i sees, and the weights [B, S] of one of a pair's two maps."""
    head, kv = 2 * pair + which, 2 * (pair // (q.shape[2] // k.shape[2])) + which
    keys = range(0 if window is None else max(0, i + 1 - window), i + 1)
    scores = torch.stack([(q[:, i, head] * k[:, j, kv]).sum(-1) for j in keys], -1)
    return keys, torch.softmax(scores * q.shape[-1] ** -0.5, -1)


def per_query_reference(mixer: Mixer, q: Tensor, k: Tensor, v: Tensor, share: Tensor, window: int | None) -> Tensor:
    first, eps = FIRST[mixer.layer], mixer.config.norm_eps
    out = torch.zeros_like(q)
    for pair in range(q.shape[2] // 2):
        kv = 2 * (pair // (q.shape[2] // k.shape[2]))
        values = torch.cat([v[:, :, kv], v[:, :, kv + 1]], -1)
        for i in range(q.shape[1]):
            keys, weights = maps(q, k, pair, 0, i, window)
            _, two = maps(q, k, pair, 1, i, window)
            y = torch.einsum("bs,bsx->bx", weights - share * two, values[:, keys.start : keys.stop])
            y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * mixer.norm.weight * (1 - first)
            out[:, i, 2 * pair], out[:, i, 2 * pair + 1] = y.chunk(2, -1)
    return out


@pytest.mark.parametrize(("layer", "rotary", "window"), [(0, "full", None), (4, "none", 4)])
def test_diff_equals_per_query_reference(
    build_mixer: MixerFactory, qkv: Draw, layer: int, rotary: str, window: int | None
) -> None:
    """Eight heads and four KV heads: two pairs of query heads for each pair of KV heads."""
    mixer = build_mixer("diff", heads=8, kv=4, rotary=rotary, base=77.0)
    mixer.layer = layer
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    args = qkv(7, heads=8, kv=4)
    q, k, v = args
    if rotary == "full":
        q, k = turned(q, 77.0), turned(k, 77.0)
    share = torch.exp(mixer.q1 @ mixer.k1) - torch.exp(mixer.q2 @ mixer.k2) + FIRST[layer]
    expected = per_query_reference(mixer, q, k, v, share, window)
    inputs = [*args, *mixer.parameters()]
    weight = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view_as(expected)
    theirs = torch.autograd.grad(expected, inputs, weight)
    for block in (None, 3):
        ours = mixer(*args, window=window, block=block)
        assert (ours - expected).abs().max() <= 1e-12
        for a, b in zip(torch.autograd.grad(ours, inputs, weight), theirs, strict=True):
            assert (a - b).abs().max() <= 1e-11


@torch.no_grad()
def with_share(mixer: Mixer, share: float) -> Mixer:
    """Lambda of layer 0 is `share`, by its first product."""
    mixer.q1.zero_()[0], mixer.k1.zero_()[0] = 1, math.log(1 + share - FIRST[0])
    mixer.q2.zero_()
    return mixer


@pytest.mark.parametrize("share", [0.0, 0.3, 1.7])
@torch.no_grad()
def test_identical_maps_leave_the_complement_of_lambda(build_mixer: MixerFactory, qkv: Draw, share: float) -> None:
    """(1 - lambda) softmax, read through a norm that is linear."""
    mixer, (q, k, v) = with_share(build_mixer("diff", rotary="none", norm_eps=LINEAR), share), qkv()
    q, k = (x[:, :, ::2].repeat_interleave(2, 2) for x in (q, k))
    reads = [build_mixer("nope")(q[:, :, ::2], k[:, :, ::2], v[:, :, side::2], window=4) for side in (0, 1)]
    expected = (1 - share) * 0.8 * torch.cat(reads, -1).view_as(q)
    assert (mixer(q, k, v, window=4) * 1e6 - expected).abs().max() <= 1e-10


def test_lambda_knows_its_layer() -> None:
    """Counted from 0 over all blocks, those without attention too."""
    config = ModelConfig(
        d_model=8, n_layers=5, n_heads=2, n_kv_heads=2, head_dim=4, vocab_size=9, attn_type="diff", attn_every=4,
        attn_offset=0,
    )  # fmt: skip
    model = build(config, seed=0, dtype=torch.float64)
    for layer in (0, 4):
        mixer = model.blocks[layer].mix.mixer
        for name in ("q1", "k1", "q2", "k2"):
            getattr(mixer, name).data.zero_()
        assert mixer.lambda_init == pytest.approx(FIRST[layer], rel=1e-15)
        assert mixer.lambda_value().item() == pytest.approx(FIRST[layer], rel=1e-15)
