"""PolySketch attention against sums over pairs, and its features against the powers that they estimate."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels import features
from atma_sweep.kernels.attention.polysketch.op import polysketch_attention
from torch import Tensor

B, T, H, J, X, R, BLOCK, SCALE = 2, 11, 4, 2, 5, 3, 4, 0.7


def by_pairs(q: Tensor, k: Tensor, v: Tensor, draws: Tensor, window: int | None) -> Tensor:
    """Computes a query and a key at a time; the half sketch is written out as products of projections."""
    y = torch.zeros_like(q)

    def half(x: Tensor, head: int) -> Tensor:
        m = torch.ones(R, dtype=x.dtype)
        for direction in draws[:, head]:
            m = m * (x @ direction) * SCALE**0.5
        return m / R**0.5

    for b in range(B):
        for h in range(H):
            j = h // (H // J)
            for i in range(T):
                total, norm = torch.zeros(X, dtype=q.dtype), 1.0
                for s in range(0 if window is None else max(0, i + 1 - window), i + 1):
                    weight = (SCALE * q[b, i, h] @ k[b, s, j]) ** (2 * len(draws))
                    if i // BLOCK != s // BLOCK:
                        weight = (half(q[b, i, h], j) @ half(k[b, s, j], j)) ** 2
                    total, norm = total + weight * v[b, s, j], norm + weight
                y[b, i, h] = total / norm
    return y


@pytest.mark.parametrize(("degree", "window"), [(4, None), (2, None), (4, 6), (4, 3)])
def test_polysketch_equals_sums_over_pairs(degree: int, window: int | None) -> None:
    draw = torch.Generator().manual_seed(degree)
    q, k, v = (torch.randn(B, T, heads, X, generator=draw, dtype=torch.float64) for heads in (H, J, J))
    draws = features.sketch_draws(J, X, R, degree, draw).double()
    expected = by_pairs(q, k, v, draws, window)
    for query_block in (None, 1, 3):
        ours = polysketch_attention(
            q, k, v, draws, block=BLOCK, scale=SCALE, window=window, query_block=query_block
        )  # fmt: skip
        assert (ours - expected).abs().max() <= 1e-12
    exact = polysketch_attention(q, k, v, draws, block=T, scale=SCALE)
    weights = (SCALE * torch.einsum("bihx,bjhx->bhij", q, k.repeat_interleave(H // J, 2))).tril() ** degree
    plain = torch.einsum("bhij,bjhx->bihx", weights / (1 + weights.sum(-1, keepdim=True)), v.repeat_interleave(2, 2))
    assert (exact - plain).abs().max() <= 1e-12
    assert (ours - plain).abs().max() > 1e-3


def test_sketched_weight_has_the_mean_and_variance_of_its_draws() -> None:
    """Over 4,000 draws, within 3 standard errors: E m(q)·m(k) = s², and E of its square by Isserlis' theorem.

    For degree 4 and unit vectors of product s a column has the variance (1 + 2 s²)² - s⁴, and the weight the mean
    s⁴ + that over r.
    """
    n, r, draw = 4000, 4, torch.Generator().manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 6, generator=draw, dtype=torch.float64), dim=-1)
    s = float(q @ k)
    draws = features.sketch_draws(n, 6, r, 4, draw).double()
    rows = [features.half_sketch(x.expand(1, 1, n, 6), draws)[0, 0] for x in (q, k)]
    halves = (rows[0] * rows[1]).sum(-1)
    error = halves.std() / n**0.5
    assert abs(float(halves.mean()) - s**2) <= 3 * error
    squares = halves.square()
    expected = s**4 + ((1 + 2 * s**2) ** 2 - s**4) / r
    assert abs(float(squares.mean()) - expected) <= 3 * squares.std() / n**0.5
