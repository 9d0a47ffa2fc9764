"""Triton kernels of polar attention: those of softmax attention, and a backward pass over rows.

Units, shapes and formulas as in `..softmax.triton`; see docs/reference/mechanisms.md, "Polar attention".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import LN2, log1p, tanh
from ..softmax.triton import launch_forward, weights_backward


@triton.jit
def _rows(
    c_ptr, gc_ptr, g_mag_ptr, null_ptr, v_null_ptr, beta_ptr, lse_ptr, n_eff_ptr, inverse_ptr,
    g_ptr, add_ptr, twice_ptr, d_null_ptr, d_beta_ptr, d_v_null_ptr, TQ,
    H: tl.constexpr, X: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the part of the backward that belongs to single rows, for BM queries of one head.

    c is s / |s|, or s / TINY with |s| below TINY (1e-6); the magnitude is tanh(beta ln(1 + n_eff r)), where r is the
    softmax weight of all real keys together against the null key. Grid: (cdiv(T, BM), B H). Read: c, its gradient gc
    and the magnitude's gradient g_mag, [B, T, H, X] and [B, T, H]; null [T, H] in units of log 2, v_null [H, X], beta
    [H]; lse, n_eff and inverse [B, H, T] as the forward stored them. Written: g [B, T, H, X], gradient of the weighted
    sum over real keys; float32 add, twice and d_null [B, H, T]; float32 d_beta [parts, B, H] and d_v_null [parts, B, H,
    X], which the caller sums. TQ: number of queries T.
    """
    i_M = tl.program_id(0) * BM + tl.arange(0, BM)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    inside = i_M < TQ
    d_X = tl.arange(0, X)
    element_at = ((b * TQ + i_M) * H + h)[:, None] * X + d_X[None, :]
    c = tl.load(c_ptr + element_at, mask=inside[:, None], other=0.0).to(tl.float32)
    gc = tl.load(gc_ptr + element_at, mask=inside[:, None], other=0.0).to(tl.float32)
    at = (b * H + h) * TQ + i_M
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    n_eff = tl.load(n_eff_ptr + at, mask=inside, other=1.0)
    inverse = tl.load(inverse_ptr + at, mask=inside, other=0.0)
    null = tl.load(null_ptr + i_M * H + h, mask=inside, other=0.0)
    g_mag = tl.load(g_mag_ptr + (b * TQ + i_M) * H + h, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + h)
    v_null = tl.load(v_null_ptr + h * X + d_X)
    bound, tiny = n_eff < 0, inverse < 0
    n_eff, inverse = tl.abs(n_eff), tl.abs(inverse)
    d = lse - null
    r = 1.0 / (1.0 + tl.exp2(-d))
    w = 1.0 / (1.0 + tl.exp2(d))
    m = n_eff * r
    grow = log1p(m)
    mag = tanh(beta * grow)
    g_mag = g_mag * (1.0 - mag * mag)
    kappa = g_mag * beta * m / (1.0 + m)
    # below TINY c is s / TINY and nothing is projected away: a delta term remains
    along = tl.where(tiny, 0.0, tl.sum(gc * c, 1))
    gs = gc - along[:, None] * c
    delta = tl.where(tiny, tl.sum(gs * c, 1), 0.0)
    real, scale_null = r * inverse, w * inverse
    to_null = tl.sum(gs * v_null[None, :], 1)
    d_null = scale_null * to_null - w * delta - kappa * tl.where(bound, 2.0 + w, w)
    add = kappa * (2.0 + w) - r * delta
    tl.store(g_ptr + element_at, (real[:, None] * gs).to(g_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(add_ptr + at, add, mask=inside)
    tl.store(twice_ptr + at, tl.where(bound, 0.0, -2.0 * kappa * n_eff), mask=inside)
    tl.store(d_null_ptr + at, d_null, mask=inside)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(d_beta_ptr + part, tl.sum(tl.where(inside, g_mag * grow, 0.0)))
    tl.store(d_v_null_ptr + part * X + d_X, tl.sum(tl.where(inside[:, None], scale_null[:, None] * gs, 0.0), 0))


# --- launches -----------------------------------------------------------------------------------------------------


def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor, *,
    window: int | None, floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (c [B, T, H, X] in q's dtype, then float32 mag [B, T, H], lse, n_eff and inverse [B, H, T]).

    s is the softmax mean of the values and v_null, c is s / |s|, or s / TINY with |s| below TINY (1e-6). mag is
    tanh(beta ln(1 + n_eff r)), in [0, 1), where r is the softmax weight of all real keys together. n_eff is
    (sum of weights)^2 / (sum of squared weights) over the real keys; lse is theirs alone, in units of log 2; inverse is
    1 / max(|s|, TINY). Negative n_eff marks a row that the floor binds, negative inverse a row with |s| below TINY.

    Args:
        q: Queries [B, T, H, X] scaled to units of log 2, contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        null_TH: Null scores, float32 in units of log 2.
        beta_H: float32, after softplus.
        v_null_HX: Value of the null key, float32.
        window: Attention window in keys, or None.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.
    """
    b, t, h, _ = q.shape
    c = torch.empty_like(q)
    mag = torch.empty(b, t, h, device=q.device, dtype=torch.float32)
    lse, n_eff, inverse = (torch.empty(b, h, t, device=q.device, dtype=torch.float32) for _ in range(3))
    floor_ = torch.full((), floor, device=q.device)
    rest = (null_TH, v_null_HX, beta_H, floor_, mag, lse, n_eff, inverse)
    launch_forward(q, k, v, c, rest, window, 0, polar=True)
    return c, mag, lse, n_eff, inverse


def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, *, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q', k, v, null_TH, beta_H, v_null_HX) as given, from those of c and mag.

    Those of q', k and v are in their dtypes, the others float32. Arguments from q to v_null_HX are the inputs of
    `polar_forward`, those from c to inverse its results.

    Args:
        gc: Gradient of c [B, T, H, X], contiguous like all inputs.
        g_mag: Gradient of mag [B, T, H].
        q: Scaled queries.
        k: Keys.
        v: Values.
        null_TH: Null scores in units of log 2.
        beta_H: Gain of the magnitude, after softplus.
        v_null_HX: Value of the null key.
        c: Directions.
        lse: Log-sum-exp of the scores of the real keys, in units of log 2.
        n_eff: Participation ratios; a negative one marks a row that the floor binds.
        inverse: 1/|s|; a negative one marks a row with |s| below 1e-6.
        window: Attention window in keys, or None.
    """
    g, add, twice, d_null, d_beta, d_v_null = polar_rows(gc, g_mag, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    dq, dk, dv, _ = weights_backward(q, k, v, g, lse, add, twice, window=window)
    return dq, dk, dv, d_null, d_beta, d_v_null


def polar_rows(
    gc: Tensor, g_mag: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor, c: Tensor, lse: Tensor,
    n_eff: Tensor, inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the inputs of `weights_backward`, g, add and twice, and the gradients of null_TH, beta_H and v_null_HX.

    g is like gc; add and twice are float32 [B, H, T]; the gradients are float32. gc and g_mag are the gradients of c
    and mag; null_TH, beta_H and v_null_HX are inputs of `polar_forward`, and c, lse, n_eff and inverse its results. All
    are contiguous.
    """
    b, t, h, d = gc.shape
    g, (add, twice, d_null) = torch.empty_like(gc), (torch.empty_like(lse) for _ in range(3))
    rows = 32
    parts = triton.cdiv(t, rows)
    d_beta = torch.empty(parts, b, h, device=gc.device, dtype=torch.float32)
    d_v_null = torch.empty(parts, b, h, d, device=gc.device, dtype=torch.float32)
    _rows[(parts, b * h)](
        c, gc, g_mag, null_TH, v_null_HX, beta_H, lse, n_eff, inverse, g, add, twice, d_null, d_beta, d_v_null, t,
        H=h, X=d, BM=rows, num_warps=4,
    )  # fmt: skip
    return g, add, twice, d_null.sum(0).t().contiguous() * LN2, d_beta.sum((0, 1)), d_v_null.sum((0, 1))
