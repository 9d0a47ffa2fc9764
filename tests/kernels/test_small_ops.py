"""Convolution, rotary positions, norms, the MLP's gate, soft cap and cross-entropy against their references."""

from __future__ import annotations

import math

import pytest
import torch
from atma_sweep.kernels.conv.op import causal_conv
from atma_sweep.kernels.cross_entropy import op as cross_entropy
from atma_sweep.kernels.cross_entropy.op import linear_cross_entropy, linear_cross_entropy_reference, softcap
from atma_sweep.kernels.norms import EPS_FLOAT32, rms_norm
from atma_sweep.kernels.rotary import apply_rotary, frequencies, rotary_tables
from tolerances import rounding_bound
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def test_conv_last_tap_is_the_current_token() -> None:
    x, w = normal(1, 5, 3), torch.zeros(3, 4, dtype=torch.float64)
    w[:, -1] = 2
    assert torch.equal(causal_conv(x, w), 2 * x)


def test_rotary_frequencies() -> None:
    full, half = frequencies("full", 128, 10000.0), frequencies("half-truncated", 128, 1024.0)
    assert [full[m].item() for m in (0, 1, 63)] == pytest.approx([1, 10000 ** (-2 / 128), 10000 ** (-126 / 128)])
    assert [half[m].item() for m in (0, 1, 31)] == pytest.approx([1, (1 / 1024) ** (1 / 31), 1 / 1024])
    assert half[32:].abs().max() == 0


def test_rotary_scores_depend_on_distance_only() -> None:
    size, length = 16, 12
    q, k = (normal(1, 1, 1, size, seed=s).detach().expand(1, length, 1, size) for s in (1, 2))
    tables = rotary_tables("half-truncated", length, size, 1024.0, dtype=torch.float64)
    score = apply_rotary(q, *tables)[0, :, 0] @ apply_rotary(k, *tables)[0, :, 0].t()
    for lag in range(length):
        diagonal = score.diagonal(lag)
        assert (diagonal - diagonal[0]).abs().max() <= 1e-13
    still = [*range(size // 4, size // 2), *range(3 * size // 4, size)]
    assert torch.equal(apply_rotary(q, *tables)[..., still], q[..., still])


def test_rms_norm_epsilon_is_float32s_for_half_types() -> None:
    x = torch.full((1, 8), 1e-4)
    expected = 1e-4 / math.sqrt(1e-8 + EPS_FLOAT32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = rms_norm(x.to(dtype))
        assert y.dtype == dtype
        assert y[0, 0].item() == pytest.approx(expected, rel=rounding_bound(dtype, 8))


def test_an_infinite_cap_is_none() -> None:
    z = torch.tensor([0.0, -40.0, 1e4])
    assert torch.equal(softcap(z, math.inf), z)


def test_softcap() -> None:
    z = torch.tensor([0.0, 1e-3, 1.0, -40.0, 1e4], dtype=torch.float64, requires_grad=True)
    y = softcap(z, 15.0)
    assert y.abs().max() < 15
    assert torch.allclose(y, 15 * z / torch.sqrt(z**2 + 225))
    assert torch.autograd.grad(y.sum(), z)[0][0].item() == 1
    assert softcap(z.bfloat16(), 15.0).dtype == torch.float32


def test_cross_entropy_in_bfloat16() -> None:
    h, w, b = normal(23, 6), normal(11, 6, seed=1), normal(11, seed=2)
    targets = torch.arange(23) % 11
    losses = linear_cross_entropy(h.bfloat16(), w.float(), b.float(), targets, cap=15.0)
    assert losses.dtype == torch.float32
    assert (losses - linear_cross_entropy_reference(h, w, b, targets, cap=15.0)).abs().max() <= 0.1


def test_cross_entropy_under_grad_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = cross_entropy._losses
    monkeypatch.setattr(cross_entropy, "_losses", lambda h, *rest: (rows.append(len(h)), plain(h, *rest))[1])
    h, w, b = normal(20, 6), normal(11, 6, seed=1), normal(11, seed=2)
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.shape), x)[1], lambda x: x):
        loss = linear_cross_entropy(h, w, b, torch.zeros(20, dtype=torch.int64), cap=15.0, chunk=8).sum()
    assert rows == [8, 8, 4]
    assert all(shape[-1:] != (11,) or len(shape) == 1 for shape in saved)
    loss.backward()
    assert sorted(rows) == [4, 4, 8, 8, 8, 8]
