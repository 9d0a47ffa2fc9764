"""Slow, obvious versions of polar attention: by query, by key block, and a backward derived by hand.

B batch, T length, H query heads, J KV heads, X head size, S keys that one query sees. See docs/reference/mechanisms.md, "Polar
attention".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ...shapes import expand_kv

TINY = 1e-6


def polar_attention_reference(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor,
    mag_beta_H: Tensor, v_null_HX: Tensor, *, window: int | None = None, n_eff_floor: float = 1e-30,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (c [B, T, H, X], mag [B, T, H]) by the formula, one query at a time; slow.

    With n visible keys (the window considered), the real scores are a = t q k / sqrt(X), the null key's t (null_base +
    sp(null_slope) sqrt(ln(n + 1))), where t = 1 + sp(len_gain) ln n and sp is softplus; parameters are raw. One softmax
    over both weights the values (v_null for the null key) to s. c is s / |s|, or s / 1e-6 for a shorter s. mag is
    tanh(sp(mag_beta) ln(1 + n_eff r)), from 0 to 1, with r the weight of all real keys together. n_eff is
    (sum_j p_j)^2 / sum_j p_j^2 over real keys, with p_j = exp(a_j - largest a, null included).

    Differentiable by autograd; float32 or float64 throughout, as the inputs are.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        null_base_H: Offset of the null score.
        null_slope_H: Raw slope of the null score.
        len_gain_H: Raw gain of the temperature.
        mag_beta_H: Raw gain of the magnitude.
        v_null_HX: Value of the null key.
        window: Attention window in keys, the query's own included, or None.
        n_eff_floor: Lower bound of sum_j p_j^2.
    """
    _, t, h, d = q_BTHX.shape
    k_BTHX, v_BTHX = expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)
    c_rows, mag_rows = [], []
    for i in range(t):
        first = 0 if window is None else max(0, i + 1 - window)
        temp_H, null_H = _schedule(i + 1 - first, null_base_H, null_slope_H, len_gain_H)
        a_BHS = torch.einsum("bhd,bshd->bhs", q_BTHX[:, i], k_BTHX[:, first : i + 1]) / math.sqrt(d) * temp_H[:, None]
        a_null_BH1 = (temp_H * null_H)[None, :, None].expand(a_BHS.shape[0], h, 1)
        logits = torch.cat([a_BHS, a_null_BH1], -1)
        p = torch.exp(logits - logits.amax(-1, keepdim=True))
        p_BHS, p_null_BH = p[..., :-1], p[..., -1]
        w = p / p.sum(-1, keepdim=True)
        s_BHX = torch.einsum("bhs,bshd->bhd", w[..., :-1], v_BTHX[:, first : i + 1]) + w[..., -1:] * v_null_HX
        c_rows.append(s_BHX / torch.linalg.vector_norm(s_BHX, dim=-1, keepdim=True).clamp(min=TINY))
        sum_BH = p_BHS.sum(-1)
        n_eff_BH = sum_BH**2 / (p_BHS**2).sum(-1).clamp(min=n_eff_floor)
        m_eff_BH = n_eff_BH * sum_BH / (sum_BH + p_null_BH)
        mag_rows.append(torch.tanh(functional.softplus(mag_beta_H) * torch.log1p(m_eff_BH)))
    return torch.stack(c_rows, 1), torch.stack(mag_rows, 1)


def polar_streaming_reference(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor,
    mag_beta_H: Tensor, v_null_HX: Tensor, *, window: int | None = None, key_block: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (c [B, T, H, X], mag [B, T, H]) by the online recurrence over blocks of keys.

    c has unit length (s / 1e-6 for an s shorter than that) and mag = tanh(softplus(mag_beta) ln(1 + n_eff r)) lies from
    0 to 1, as in `polar_attention_reference`. The null is folded in last. The running maximum, sum, sum of squares and
    weighted values are rescaled at each new maximum. There is no floor of the sum of squared weights.

    Args:
        q_BTHX: Queries, in the dtype of all arithmetic.
        k_BTJX: Keys.
        v_BTJX: Values.
        null_base_H: Offset of the null score.
        null_slope_H: Raw slope of the null score.
        len_gain_H: Raw gain of the temperature.
        mag_beta_H: Raw gain of the magnitude.
        v_null_HX: Value of the null key.
        window: Attention window in keys, or None.
        key_block: Keys of a step of the recurrence.
    """
    b, t, h, d = q_BTHX.shape
    k_BTHX, v_BTHX = expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)
    c_rows, mag_rows = [], []
    for i in range(t):
        first = 0 if window is None else max(0, i + 1 - window)
        temp_H, null_H = _schedule(i + 1 - first, null_base_H, null_slope_H, len_gain_H)
        top = q_BTHX.new_full((b, h), -1e30)
        total, square, s = torch.zeros_like(top), torch.zeros_like(top), q_BTHX.new_zeros(b, h, d)
        for start in range(first, i + 1, key_block):
            keys = slice(start, min(start + key_block, i + 1))
            a_BHS = torch.einsum("bhd,bshd->bhs", q_BTHX[:, i], k_BTHX[:, keys]) * (temp_H / math.sqrt(d))[:, None]
            new_top = torch.maximum(top, a_BHS.amax(-1))
            alpha, p_BHS = torch.exp(top - new_top), torch.exp(a_BHS - new_top[..., None])
            total = total * alpha + p_BHS.sum(-1)
            square = square * alpha**2 + (p_BHS**2).sum(-1)
            s = s * alpha[..., None] + torch.einsum("bhs,bshd->bhd", p_BHS, v_BTHX[:, keys])
            top = new_top
        new_top = torch.maximum(top, temp_H * null_H)
        alpha, p_null = torch.exp(top - new_top), torch.exp(temp_H * null_H - new_top)
        total, square, s = total * alpha, square * alpha**2, s * alpha[..., None] + p_null[..., None] * v_null_HX
        z = total + p_null
        length = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        c_rows.append(s / torch.maximum(length, TINY * z[..., None]))
        m_eff = total**3 / (square * z)
        mag_rows.append(torch.tanh(functional.softplus(mag_beta_H) * torch.log1p(m_eff)))
    return torch.stack(c_rows, 1), torch.stack(mag_rows, 1)


def polar_backward_reference(
    g_c_BTHX: Tensor, g_mag_BTH: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, null_base_H: Tensor,
    null_slope_H: Tensor, len_gain_H: Tensor, mag_beta_H: Tensor, v_null_HX: Tensor, *, window: int | None = None,
    n_eff_floor: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of the eight tensors of `polar_attention`, in its order, by hand-derived formulas.

    Where `n_eff_floor` binds, they use dm/dQ2 = -m/Q2 under the clamp and take the largest weight as constant. This is
    not the gradient of the forward, but the one that the published runs trained with (docs/reference/mechanisms.md, "Polar
    attention"). The tensors from q to v_null are the inputs of `polar_attention`; |s| must not be 0.

    Args:
        g_c_BTHX: Gradient of the direction.
        g_mag_BTH: Gradient of the magnitude.
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        null_base_H: Offset of the null score.
        null_slope_H: Raw slope of the null score.
        len_gain_H: Raw gain of the temperature.
        mag_beta_H: Raw gain of the magnitude.
        v_null_HX: Value of the null key.
        window: Attention window in keys, or None.
        n_eff_floor: Lower bound of the sum of squared weights, in units of the largest weight, null included.
    """
    _, t, h, d = q_BTHX.shape
    j = k_BTJX.shape[2]
    k_BTHX, v_BTHX = expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)
    dq, dk, dv = torch.zeros_like(q_BTHX), torch.zeros_like(k_BTHX), torch.zeros_like(v_BTHX)
    d_base, d_slope, d_gain, d_beta = (torch.zeros_like(null_base_H) for _ in range(4))
    d_v_null = torch.zeros_like(v_null_HX)
    beta_H = functional.softplus(mag_beta_H)
    for i in range(t):
        first = 0 if window is None else max(0, i + 1 - window)
        n = i + 1 - first
        temp_H, null_H = _schedule(n, null_base_H, null_slope_H, len_gain_H)
        sigma = torch.einsum("bhd,bshd->bhs", q_BTHX[:, i], k_BTHX[:, first : i + 1]) / math.sqrt(d)
        a, a_null = sigma * temp_H[:, None], (temp_H * null_H).expand(sigma.shape[:2])
        top = torch.maximum(a.amax(-1), a_null)
        p, p_null = torch.exp(a - top[..., None]), torch.exp(a_null - top)
        total, square = p.sum(-1), (p**2).sum(-1).clamp(min=n_eff_floor)
        z, m_eff = total + p_null, total**3 / (square * (total + p_null))
        s = torch.einsum("bhs,bshd->bhd", p, v_BTHX[:, first : i + 1]) + p_null[..., None] * v_null_HX
        length = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        c, mag = s / length, torch.tanh(beta_H * torch.log1p(m_eff))
        gc, gm = g_c_BTHX[:, i], g_mag_BTH[:, i] * (1 - mag**2)
        gs = (gc - (gc * c).sum(-1, keepdim=True) * c) / length
        gme = gm * beta_H / (1 + m_eff)
        g_total, g_square = gme * (3 * m_eff / total - m_eff / z), -gme * m_eff / square
        g_p_null = (gs * v_null_HX).sum(-1) - gme * m_eff / z
        dp = torch.einsum("bhd,bshd->bhs", gs, v_BTHX[:, first : i + 1])
        dp = dp + g_total[..., None] + 2 * p * g_square[..., None]
        da, da_null = dp * p, g_p_null * p_null
        d_sigma = temp_H[:, None] * da / math.sqrt(d)
        dq[:, i] += torch.einsum("bhs,bshd->bhd", d_sigma, k_BTHX[:, first : i + 1])
        dk[:, first : i + 1] += torch.einsum("bhs,bhd->bshd", d_sigma, q_BTHX[:, i])
        dv[:, first : i + 1] += torch.einsum("bhs,bhd->bshd", p, gs)
        d_temp, d_null = (da * sigma).sum((0, 2)) + (da_null * null_H).sum(0), (da_null * temp_H).sum(0)
        d_gain += torch.sigmoid(len_gain_H) * d_temp * math.log(n)
        d_base += d_null
        d_slope += torch.sigmoid(null_slope_H) * d_null * math.sqrt(math.log(n + 1))
        d_beta += torch.sigmoid(mag_beta_H) * (gm * torch.log1p(m_eff)).sum(0)
        d_v_null += (p_null[..., None] * gs).sum(0)
    dk, dv = (x.unflatten(2, (j, h // j)).sum(3) for x in (dk, dv))
    return dq, dk, dv, d_base, d_slope, d_gain, d_beta, d_v_null


def _schedule(n: int, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor) -> tuple[Tensor, Tensor]:
    temp_H = 1 + functional.softplus(len_gain_H) * math.log(n)
    return temp_H, null_base_H + functional.softplus(null_slope_H) * math.sqrt(math.log(n + 1))
