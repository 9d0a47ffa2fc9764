"""Polar attention as a few PyTorch operations over the whole T x T matrix of scores, the form that fused kernels are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention.polar.op import TINY
from ...kernels.shapes import expand_kv, visible_mask

SQUARES = 7
"""Float32 matrices [B, H, T, T] that one forward and backward pass holds at its peak, at most (5.8 were counted on an H100)."""


def peak_bytes(b: int, h: int, t: int) -> int:
    """Return an upper bound of the bytes that a forward and backward pass of that size allocates."""
    return SQUARES * 4 * b * h * t * t


def polar_attention_eager(
    q_BTHX: Tensor,
    k_BTJX: Tensor,
    v_BTJX: Tensor,
    null_base_H: Tensor,
    null_slope_H: Tensor,
    len_gain_H: Tensor,
    mag_beta_H: Tensor,
    v_null_HX: Tensor,
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute polar attention without blocks and without recomputation; autograd keeps every T x T matrix.

    Products are made in the type of q, everything else in float32 (float64 for float64 inputs).

    Args:
        q_BTHX: Queries [B, T, H, X].
        k_BTJX: Keys [B, T, J, X]; query head h reads KV head h // (H / J).
        v_BTJX: Values, as the keys.
        null_base_H: Parameters before softplus, as `kernels.attention.polar.polar_attention` takes them.
        null_slope_H: See null_base_H.
        len_gain_H: See null_base_H.
        mag_beta_H: See null_base_H.
        v_null_HX: Value of the null key, per head.
        window: Number of keys that a query sees, its own included; None for all before it.

    Returns:
        Direction [B, T, H, X] in the type of q, and magnitude [B, T, H] in float32 (float64 for float64 inputs).

    Source:
        docs/mechanisms.md, "Polar attention".
    """
    _, t, h, d = q_BTHX.shape
    dtype = torch.promote_types(q_BTHX.dtype, torch.float32)
    n_T1 = torch.arange(1, t + 1, dtype=dtype, device=q_BTHX.device)[:, None].clamp(max=window or t)
    temp_TH = 1 + functional.softplus(len_gain_H.to(dtype)) * n_T1.log()
    null_TH = null_base_H.to(dtype) + functional.softplus(null_slope_H.to(dtype)) * n_T1.log1p().sqrt()
    q_BHTX, k_BHTX, v_BHTX = (x.transpose(1, 2) for x in (q_BTHX, expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)))
    scores_BHTS = (q_BHTX @ k_BHTX.mT).to(dtype) * (temp_TH.t()[..., None] / math.sqrt(d))
    visible_TS = visible_mask(0, t, 0, window, q_BTHX.device)
    scores_BHTS = scores_BHTS.masked_fill(~visible_TS, -math.inf)
    null_HT1 = (temp_TH * null_TH).t()[..., None]
    null_BHT1 = null_HT1.expand(scores_BHTS.shape[0], h, t, 1)
    weights = torch.softmax(torch.cat([scores_BHTS, null_BHT1], -1), -1)
    real_BHTS, null_BHT1 = weights[..., :-1], weights[..., -1:]
    s_BHTX = (real_BHTS.to(v_BTJX.dtype) @ v_BHTX).to(dtype) + null_BHT1 * v_null_HX.to(dtype)[:, None]
    c_BHTX = s_BHTX / torch.linalg.vector_norm(s_BHTX, dim=-1, keepdim=True).clamp(min=TINY)
    sum_BHT = real_BHTS.sum(-1)
    # (sum p)^3 / (sum p^2 (sum p + p_null)) of unnormalised weights; normalised ones sum to 1 with the null
    m_eff_BHT = sum_BHT**3 / real_BHTS.square().sum(-1)
    mag_BHT = torch.tanh(functional.softplus(mag_beta_H.to(dtype))[:, None] * m_eff_BHT.log1p())
    return c_BHTX.transpose(1, 2).to(q_BTHX.dtype), mag_BHT.transpose(1, 2)
