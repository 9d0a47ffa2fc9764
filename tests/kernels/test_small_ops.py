"""Convolution, rotary positions, norms, the MLP's gate, soft cap and cross-entropy against their references."""

from __future__ import annotations

import math

import pytest
import torch
from atma_sweep.kernels.conv.op import causal_conv, causal_conv_reference
from atma_sweep.kernels.cross_entropy import op as cross_entropy
from atma_sweep.kernels.cross_entropy.op import linear_cross_entropy, linear_cross_entropy_reference, softcap
from atma_sweep.kernels.gates import squared_relu_gate, squared_relu_gate_reference, swish_gate, swish_gate_reference
from atma_sweep.kernels.norms import EPS_FLOAT32, rms_norm, rms_norm_reference
from atma_sweep.kernels.rotary import apply_rotary, apply_rotary_reference, frequencies, rotary_tables
from tolerances import rounding_bound
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def assert_same(ours: Tensor, theirs: Tensor, args: list[Tensor], tolerance: float = 1e-12) -> None:
    """Values and gradients agree."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance
    weight = torch.cos(torch.arange(ours.numel(), dtype=ours.dtype)).view_as(ours)
    for a, b in zip(torch.autograd.grad(ours, args, weight), torch.autograd.grad(theirs, args, weight), strict=True):
        assert (a - b).abs().max() <= tolerance


@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_conv(length: int, taps: int, residual: bool) -> None:
    args = [normal(2, length, 7), normal(7, taps, seed=1)]
    assert_same(causal_conv(*args, residual), causal_conv_reference(*args, residual), args)


def test_conv_last_tap_is_the_current_token() -> None:
    x, w = normal(1, 5, 3), torch.zeros(3, 4, dtype=torch.float64)
    w[:, -1] = 2
    assert torch.equal(causal_conv(x, w), 2 * x)
    with pytest.raises(ValueError, match=r"\(1, 5, 3\) and \(4, 4\)"):
        causal_conv(x, torch.zeros(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["full", "half-truncated"])
@pytest.mark.parametrize("offset", [0, 5])
def test_rotary(kind: str, offset: int) -> None:
    x = normal(2, 9, 3, 16)
    tables = rotary_tables(kind, 9, 16, 1024.0, offset=offset, dtype=torch.float64)
    assert_same(apply_rotary(x, *tables), apply_rotary_reference(x, kind, 1024.0, offset), [x])
    if offset == 0:
        assert torch.equal(apply_rotary(x, *tables)[:, 0], x[:, 0])


def test_rotary_frequencies() -> None:
    full, half = frequencies("full", 128, 10000.0), frequencies("half-truncated", 128, 1024.0)
    assert [full[m].item() for m in (0, 1, 63)] == pytest.approx([1, 10000 ** (-2 / 128), 10000 ** (-126 / 128)])
    assert [half[m].item() for m in (0, 1, 31)] == pytest.approx([1, (1 / 1024) ** (1 / 31), 1 / 1024])
    assert half[32:].abs().max() == 0
    for kind, size in (("full", 5), ("half-truncated", 6), ("half-truncated", 4)):
        with pytest.raises(ValueError, match=f"got {size}"):
            frequencies(kind, size, 1024.0)


def test_rotary_scores_depend_on_distance_and_not_at_all_on_still_pairs() -> None:
    size, length = 16, 12
    q, k = (normal(1, 1, 1, size, seed=s).detach().expand(1, length, 1, size) for s in (1, 2))
    tables = rotary_tables("half-truncated", length, size, 1024.0, dtype=torch.float64)
    score = apply_rotary(q, *tables)[0, :, 0] @ apply_rotary(k, *tables)[0, :, 0].t()
    for lag in range(length):
        diagonal = score.diagonal(lag)
        assert (diagonal - diagonal[0]).abs().max() <= 1e-13
    still = [*range(size // 4, size // 2), *range(3 * size // 4, size)]
    assert torch.equal(apply_rotary(q, *tables)[..., still], q[..., still])


@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(weighted: bool) -> None:
    x, weight = normal(3, 4, 7), normal(7, seed=1)
    args = [x, weight] if weighted else [x]
    assert_same(rms_norm(*args), rms_norm_reference(*args), args)


def test_rms_norm_epsilon_is_float32s_for_half_types() -> None:
    x = torch.full((1, 8), 1e-4)
    expected = 1e-4 / math.sqrt(1e-8 + EPS_FLOAT32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = rms_norm(x.to(dtype))
        assert y.dtype == dtype
        assert y[0, 0].item() == pytest.approx(expected, rel=rounding_bound(dtype, 8))
    with pytest.raises(ValueError, match=r"\(7,\).*8"):
        rms_norm(x, torch.ones(7))


def test_squared_relu_gate() -> None:
    x = normal(3, 5, 14)
    assert_same(squared_relu_gate(x), squared_relu_gate_reference(x), [x])
    assert torch.autograd.gradcheck(squared_relu_gate, normal(3, 6))
    with pytest.raises(ValueError, match="got 7"):
        squared_relu_gate(x[..., :7])


def test_swish_gate() -> None:
    x = normal(3, 5, 14)
    assert_same(swish_gate(x), swish_gate_reference(x), [x])
    a, gate = x.detach().chunk(2, -1)
    assert torch.allclose(swish_gate(x), gate * torch.nn.functional.silu(a), rtol=1e-13)
    assert torch.autograd.gradcheck(swish_gate, normal(3, 6))
    with pytest.raises(ValueError, match="got 7"):
        swish_gate(x[..., :7])


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


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_cross_entropy_equals_reference_in_any_chunks(chunk: int) -> None:
    args = [normal(23, 6), normal(11, 6, seed=1), normal(11, seed=2)]
    args = [(10 * x).detach().requires_grad_() for x in args]
    targets = torch.randint(0, 11, (23,), generator=torch.Generator().manual_seed(3))
    ours = linear_cross_entropy(*args, targets, cap=15.0, chunk=chunk)
    assert_same(ours, linear_cross_entropy_reference(*args, targets, cap=15.0), args)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(*args, targets, cap=15.0, chunk=chunk), ours)


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


def test_cross_entropy_errors() -> None:
    h, w, b, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"h has 3 rows, but targets have shape \(2,\)"):
        linear_cross_entropy(h, w, b, targets, cap=15.0)
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(5, 3\)"):
        linear_cross_entropy(h, w[:, :3], b, targets, cap=15.0)
