"""Mixers that add to their scores what distance says, against one query and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model.bases import Mixer
from atma_sweep.model.mixers.biased import alibi_slopes
from torch import Tensor

MixerFactory = Callable[..., Mixer]
Draw = Callable[..., list[Tensor]]
Pair = Callable[[int, int, int], Tensor | float]
"""(head, i, j) -> what is added to their score."""


def per_query_reference(
    q: Tensor, k: Tensor, v: Tensor, added: Pair, window: int | None, scale: float | None = None
) -> Tensor:
    _, t, heads, size = q.shape
    share = heads // k.shape[2]
    scale = size**-0.5 if scale is None else scale
    y = []
    for h in range(heads):
        for i in range(t):
            keys = range(0 if window is None else max(0, i + 1 - window), i + 1)
            logits = [scale * (q[:, i, h] * k[:, j, h // share]).sum(-1) + added(h, i, j) for j in keys]
            weights = torch.softmax(torch.stack(logits), 0)
            y.append(sum(w[:, None] * v[:, j, h // share] for w, j in zip(weights, keys, strict=True)))
    return torch.stack(y, 1).view(-1, heads, t, size).transpose(1, 2)  # type: ignore[arg-type]


def assert_agree(mixer: Mixer, args: list[Tensor], added: Pair, window: int | None, scale: float | None = None) -> None:
    """Result and all gradients, in blocks too."""
    inputs = [*args, *mixer.parameters()]
    expected = per_query_reference(*args, added, window, scale)
    weight = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view_as(expected)
    theirs = torch.autograd.grad(expected, inputs, weight)
    for block in (None, 1, 4):
        y = mixer(*args, window=window, block=block)
        assert (y - expected).abs().max() <= 1e-13
        ours = torch.autograd.grad(y, inputs, weight)
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_alibi(build_mixer: MixerFactory, qkv: Draw, window: int | None, scale: float | None) -> None:
    slope = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert_agree(build_mixer("alibi", scale=scale), qkv(), lambda h, i, j: -slope[h] * (i - j), window, scale)


@pytest.mark.parametrize(("heads", "powers"), [
    (1, [8]), (2, [4, 8]), (3, [4, 8, 2]), (4, [2, 4, 6, 8]), (6, [2, 4, 6, 8, 1, 3]), (8, [1, 2, 3, 4, 5, 6, 7, 8]),
    (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
])  # fmt: skip
def test_slopes_by_hand(heads: int, powers: list[float]) -> None:
    """Slopes equal those of the authors' program, for numbers of heads that are no power of two as well."""
    assert alibi_slopes(heads) == pytest.approx([2.0**-power for power in powers], rel=1e-15)


@pytest.mark.parametrize("window", [None, 4])
def test_alibi_is_forgetting_attention_with_constant_gates(
    build_mixer: MixerFactory, qkv: Draw, window: int | None
) -> None:
    alibi, fox = build_mixer("alibi"), build_mixer("fox", gate_std=0)
    with torch.no_grad():
        # sigmoid(offset) = exp(-slope)
        for offset, slope in zip(fox.gate.offset, alibi_slopes(4), strict=True):
            offset.fill_(-math.log(math.expm1(slope)))
        args = qkv()
        faded = fox(*args, window=window, x_BTD=torch.ones(2, 9, 8, dtype=torch.float64))
        assert (alibi(*args, window=window) - faded).abs().max() <= 1e-13


# --- rel ----------------------------------------------------------------------------------------------------------


def drawn(mixer: Mixer) -> Mixer:
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(5))
    return mixer


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("settings", "numbers"), [
    ({"reach": 3}, [0, 1, 2, 3, 3, 3, 3, 3, 3]), ({"reach": 20}, list(range(9))),
    ({"reach": 8, "buckets": 5}, [0, 1, 2, 2, 3, 3, 4, 4, 4]),
])  # fmt: skip
def test_rel(
    build_mixer: MixerFactory, qkv: Draw, window: int | None, settings: dict[str, Any], numbers: list[int]
) -> None:
    """Five buckets up to 8: two of one distance, then 2 to 3.2, to 5.04, and from there on."""
    mixer = drawn(build_mixer("rel", **settings))
    table = mixer.table.view(4, -1)
    assert_agree(mixer, qkv(), lambda h, i, j: table[h, numbers[i - j]], window)


FIRST = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
"""First distance of each of T5's 32 causal buckets up to 128: from 16 on the whole numbers from 16 · 8^(m/16)."""


@pytest.mark.parametrize(("reach", "buckets", "first"), [
    (128, 32, FIRST), (64, 8, [0, 1, 2, 3, 4, 8, 16, 32]), (8, 2, [0, 1]), (16, 5, [0, 1, 2, 4, 8]), (3, 3, [0, 1, 2]),
    (125, 6, [0, 1, 2, 3, 11, 37]), (243, 6, [0, 1, 2, 3, 13, 57]), (160, 10, [0, 1, 2, 3, 4, 5, 10, 20, 40, 80]), (4096, 9, [0, 1, 2, 3, 4, 16, 64, 256, 1024]),
])  # fmt: skip
def test_buckets_by_hand(build_mixer: MixerFactory, reach: int, buckets: int, first: list[int]) -> None:
    """A power that falls on a whole number is in the bucket that it begins."""
    mixer = drawn(build_mixer("rel", heads=2, kv=1, size=2, reach=reach, buckets=buckets))
    assert len(mixer.table) == 2 * buckets
    buckets_of_distances = mixer.bucket_of_distance()
    assert [int((buckets_of_distances == bucket).nonzero()[0]) for bucket in range(buckets)] == first
    assert (buckets_of_distances.diff() >= 0).all()
    assert len(buckets_of_distances) == reach + 1


# --- cope ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "scale"), [(None, None), (4, 0.9)])
def test_cope(build_mixer: MixerFactory, qkv: Draw, window: int | None, scale: float | None) -> None:
    """The vectors, the scale and the window reach the kernel, whose own tests hold the formula against loops."""
    mixer, (q, k, v) = drawn(build_mixer("cope", positions=3, scale=scale)), qkv()
    factor = 6**-0.5 if scale is None else scale

    def added(h: int, i: int, j: int) -> Tensor:
        gates = [torch.sigmoid(factor * (q[:, i, h] * k[:, u, h // 2]).sum(-1)) for u in range(j, i + 1)]
        position = torch.stack(gates).sum(0).clamp(max=2)
        below = position.detach().floor()
        vectors = [mixer.vectors[index.long()] for index in (below, (below + 1).clamp(max=2))]
        e = vectors[0] + (position - below)[:, None] * (vectors[1] - vectors[0])
        return (q[:, i, h] * e).sum(-1)

    assert_agree(mixer, [q, k, v], added, window, scale)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("name", "settings"), [("rel", {"reach": 3}), ("cope", {})])
def test_it_starts_as_nope(
    build_mixer: MixerFactory, qkv: Draw, name: str, settings: dict[str, Any], window: int | None
) -> None:
    args = qkv()
    assert (
        build_mixer(name, **settings)(*args, window=window) - build_mixer("nope")(*args, window=window)
    ).abs().max() <= 1e-13
