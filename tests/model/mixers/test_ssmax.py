"""Scalable softmax against one query at a time, and what it does as keys become many."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from atma_sweep.model.bases import Mixer
from torch import Tensor

MixerFactory = Callable[..., Mixer]
Draw = Callable[..., list[Tensor]]


def per_query_reference(
    q: Tensor, k: Tensor, v: Tensor, sharpness: Tensor, window: int | None, extra: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`extra`: keys and values that every query sees besides, which do not count as keys."""
    out = torch.zeros_like(q)
    for h in range(q.shape[2]):
        for i in range(q.shape[1]):
            first = 0 if window is None else max(0, i + 1 - window)
            keys, values = k[:, first : i + 1, h // 2], v[:, first : i + 1, h // 2]
            count = keys.shape[1]
            if extra is not None:
                keys, values = (torch.cat([x, y[:, :, h // 2]], 1) for x, y in zip((keys, values), extra, strict=True))
            scores = torch.einsum("bx,bsx->bs", q[:, i, h], keys) * 0.7
            weights = torch.softmax(sharpness[h] * math.log(count) * scores, -1)
            out[:, i, h] = torch.einsum("bs,bsx->bx", weights, values)
    return out


@pytest.mark.parametrize("window", [None, 4])
def test_one_query_at_a_time(build_mixer: MixerFactory, qkv: Draw, window: int | None) -> None:
    mixer, args = build_mixer("ssmax", scale=0.7), qkv()
    with torch.no_grad():
        mixer.sharpness.copy_(torch.tensor([0.168, 0.9, -0.4, 2.0]))
    inputs = [*args, mixer.sharpness]
    expected = per_query_reference(*args, mixer.sharpness, window)
    weight = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view_as(expected)
    theirs = torch.autograd.grad(expected, inputs, weight)
    for block in (None, 3):
        ours = mixer(*args, window=window, block=block)
        assert (ours - expected).abs().max() <= 1e-13
        for a, b in zip(torch.autograd.grad(ours, inputs, weight), theirs, strict=True):
            assert (a - b).abs().max() <= 1e-12


def test_the_distractor_loss_has_the_same_sharpness(build_mixer: MixerFactory, qkv: Draw) -> None:
    """Distractors are more keys in sight, but n stays the number of tokens."""
    mixer, (q, k, v) = build_mixer("ssmax", scale=0.7, sharpness=0.6), qkv()
    _, k_r, v_r = (x.detach() for x in qkv(5, seed=2))
    y = mixer(q, k, v, window=4)
    ours = mixer.distractor_loss(q, k, v, k_r, v_r, y, window=4)
    expected = (per_query_reference(q, k, v, mixer.sharpness, 4, (k_r, v_r)) - y).square().mean()
    assert ours.item() == pytest.approx(expected.item(), abs=1e-13)


@torch.no_grad()
def test_the_inverse_of_ln_n_is_softmax(build_mixer: MixerFactory, qkv: Draw) -> None:
    """For the last query of n; and with a window of n for every query that fills it."""
    args, nope = qkv(), build_mixer("nope")
    full, windowed = build_mixer("ssmax", sharpness=1 / math.log(9)), build_mixer("ssmax", sharpness=1 / math.log(4))
    difference = full(*args, window=None) - nope(*args, window=None)
    assert difference[:, -1].abs().max() <= 1e-13 < difference[:, 4].abs().max()
    assert (windowed(*args, window=4) - nope(*args, window=4))[:, 3:].abs().max() <= 1e-13


@torch.no_grad()
def test_ssmax_keeps_attending_to_the_best_of_any_number_of_keys(build_mixer: MixerFactory) -> None:
    """5 above n - 1 equal keys: with s = 0.43 it takes n^(5 s - 1) as much as they do together, with softmax e^5 / n."""
    shares: dict[str, list[float]] = {"ssmax": [], "nope": [], "small": []}
    for n in (16, 128, 1024):
        for name, gap in (("ssmax", 5.0), ("nope", 5.0), ("small", 2.0)):
            settings = {} if name == "nope" else {"sharpness": 0.43}
            mixer = build_mixer("nope" if name == "nope" else "ssmax", heads=1, kv=1, size=2, scale=0.5, **settings)
            k = torch.zeros(1, n, 1, 2, dtype=torch.float64)
            k[:, n // 3] = 1
            y = mixer(torch.full_like(k, gap), k, k, window=None)
            shares[name].append(y[0, -1, 0, 0].item())
        assert shares["ssmax"][-1] == pytest.approx(n**2.15 / (n**2.15 + n - 1), rel=1e-12)
    assert shares["ssmax"] == sorted(shares["ssmax"])
    assert shares["ssmax"][-1] > 0.999
    assert shares["nope"][-1] < 0.13
    assert shares["small"] == sorted(shares["small"], reverse=True), "a gap below 1 / s does not keep it"
