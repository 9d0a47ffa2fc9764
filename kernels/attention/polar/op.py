"""Polar attention: direction and magnitude separately, with a null key (docs/reference/mechanisms.md, "Polar attention").

B batch, T length, H query heads, J KV heads, G = H/J queries per KV head, X head size, S keys in reach of a query
block, N real keys a query sees, R distractors. docs/explanation/kernels.md, "Polar attention over real keys only", derives what
`_PolarFunction` computes: the softmax runs over real keys only and the null is folded in last, so nothing underflows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...custom_ops import differentiate, empty_like, load_kernels, rows_like, torch_op
from ...dispatch import BackendChoice, checked_backend, compile_time_constant, gluon_choice, max_relative_error
from ...norms import statistics_dtype
from ...shapes import QUERY_BLOCK, check_groups, check_qkv, check_window, cut, visible_mask
from ..softmax.op import log_sum

MASK_VALUE = -1e30
"""Score of a hidden key: finite, because -inf times a temperature gives NaN gradients."""
TINY = 1e-6
"""Floor of ||s|| in c = s / max(||s||, TINY)."""
LOG2E = math.log2(math.e)


def polar_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor,
    mag_beta_H: Tensor, v_null_HX: Tensor, *, window: int | None = None, n_eff_floor: float = 1e-30,
    exact_floor: bool = True, query_block: int = QUERY_BLOCK, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the direction c [B, T, H, X] in q's dtype and the magnitude [B, T, H] in float32 (float64 for float64).

    c = s / |s| for the softmax mean s of the values, null included; its length is 1 unless |s| is below 1e-6, where c
    is s / 1e-6. The magnitude is tanh(softplus(mag_beta) ln(1 + n_eff r)), from 0 to 1, where r is the weight of all
    real keys together and n_eff is (sum of weights)^2 / (sum of squared weights) over them. Scores are q k / sqrt(X)
    times the temperature of `null_schedule`, as is the null score. Causal and differentiable.
    "torch" works through `query_block` queries at a time with the keys they can see, forward and backward, so no T x T
    matrix exists beyond that; the kernels hold none at all.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys, of q's dtype; query head h uses KV head h // (H / J).
        v_BTJX: Values, of q's dtype.
        null_base_H: Offset of the null key's score, used as it is, of any float dtype.
        null_slope_H: Raw growth of the null key's score; softplus is applied here, as to the following two.
        len_gain_H: Raw gain of the temperature with the number of keys.
        mag_beta_H: Raw gain of the magnitude.
        v_null_HX: Value of the null key.
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        n_eff_floor: Lower bound of the sum of squared weights, in units of the largest weight, null included.
        exact_floor: False differentiates as if the floor never bound, as the published runs did.
        query_block: Queries that "torch" scores at a time.
        backend: "gluon" (no window below 128), "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, the window is below 1, or below 128 with "gluon"; in "torch" also a
            `query_block` below 1.
    """
    _, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    _check_heads(h, null_base_H, null_slope_H, len_gain_H, mag_beta_H)
    if v_null_HX.shape != (h, d):
        raise ValueError(f"v_null has shape {tuple(v_null_HX.shape)}, but q has {h} heads of size {d}")
    dtype = statistics_dtype(q_BTHX.dtype)
    temp_TH, null_TH = schedules(t, window, null_base_H, null_slope_H, len_gain_H, dtype)
    beta_H = functional.softplus(mag_beta_H.to(dtype))
    score_null_TH = temp_TH * null_TH
    backend = (
        checked_backend(backend, "gluon", "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d, window).backend
    )
    if backend != "torch":
        q = _in_log2(q_BTHX, temp_TH)
        args = (q, k_BTJX, v_BTJX, score_null_TH * LOG2E, beta_H, v_null_HX.to(dtype))
        c, mag, *_ = polar_forward(*args, cut(window, t), float(n_eff_floor), exact_floor, backend)
        return c, mag
    q_scaled = q_BTHX.to(dtype) * (temp_TH * d**-0.5).unsqueeze(-1)
    k, v = k_BTJX.to(dtype), v_BTJX.to(dtype)
    options = (window, float(n_eff_floor), exact_floor, query_block)
    c, mag = _PolarFunction.apply(q_scaled, k, v, score_null_TH, beta_H, v_null_HX.to(dtype), *options)
    return c.to(q_BTHX.dtype), mag


def polar_distractor_loss(
    q_BTHX: Tensor, k_r_BRJX: Tensor, len_gain_H: Tensor, null_base_H: Tensor, null_slope_H: Tensor, *,
    query_block: int = 512, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean weight of R distractor keys when only they and the null key compete, in [0, 1].

    The weight is that of all R together; the mean runs over B, H and T: scalar float32 (float64 for float64). Every
    query sees every distractor; temperature and null are those of a query that sees all earlier keys, whatever the
    window. In "torch" inputs longer than `query_block` are done in blocks that the backward computes again; no [B, H,
    T, R] tensor exists in either backend.

    Args:
        q_BTHX: Queries.
        k_r_BRJX: Distractor keys; the kernels have no gradient for them, so they must not require one.
        len_gain_H: Raw gain of the temperature with the number of keys; softplus is applied here.
        null_base_H: Offset of the null key's score, used as it is.
        null_slope_H: Raw growth of the null key's score; softplus is applied here.
        query_block: Queries that "torch" scores at a time.
        backend: "gluon" or "triton", which do the same here, or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree, or with the kernels the distractor keys require a gradient.
    """
    b, t, h, d = q_BTHX.shape
    j = k_r_BRJX.shape[2]
    if k_r_BRJX.shape[0] != b or k_r_BRJX.shape[3] != d:
        raise ValueError(f"q has shape {tuple(q_BTHX.shape)}, but the distractor keys {tuple(k_r_BRJX.shape)}")
    check_groups(h, j)
    _check_heads(h, null_base_H, null_slope_H, len_gain_H)
    dtype = statistics_dtype(q_BTHX.dtype)
    temp_TH, null_TH = schedules(t, None, null_base_H, null_slope_H, len_gain_H, dtype)
    backend = checked_backend(backend, "gluon", "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d).backend
    if backend != "torch" and k_r_BRJX.shape[1] > 0:
        lse_BHT, _ = log_sum(_in_log2(q_BTHX, temp_TH), k_r_BRJX)
        return torch.sigmoid(lse_BHT / LOG2E - (temp_TH * null_TH).t()).mean()
    q_scaled = q_BTHX.to(dtype) * (temp_TH * d**-0.5).unsqueeze(-1)
    k_r_BJXR = k_r_BRJX.to(dtype).permute(0, 2, 3, 1)
    score_null_TH = temp_TH * null_TH
    if t <= query_block:
        return _distractor_weight(q_scaled, k_r_BJXR, score_null_TH) / (b * t * h)
    total = torch.zeros((), dtype=dtype, device=q_BTHX.device)
    for q, null in zip(q_scaled.split(query_block, 1), score_null_TH.split(query_block), strict=True):
        total = total + checkpoint(_distractor_weight, q, k_r_BJXR, null, use_reentrant=False)
    return total / (b * t * h)


@compile_time_constant
def choose_backend(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, window: int | None = None
) -> BackendChoice:
    """Return the backend of `polar_attention`: "gluon" on Hopper, "triton" from Ampere on, "torch" elsewhere.

    Both kernels need 16-bit activations; heads other than 16, 32, 64, 128 and 256 get "torch". The kernels must pass a
    self-test, forward and backward, on a small input, which the first call for a case runs. "gluon" also needs heads of
    64 or 128 and no window below 128 (`gluon_choice`).
    """
    return gluon_choice("polar attention", torch.device(device), dtype, head_dim, window, _error)


def available(device: torch.device | str, dtype: torch.dtype, head_dim: int, window: int | None = None) -> list[str]:
    """Return the names of all backends that give right results for such tensors, the chosen one first.

    They follow from `choose_backend`: "gluon" implies "triton", and "torch" is always among them. A backend that was
    not chosen because of a better one is not tested again.
    """
    chosen = choose_backend(device, dtype, head_dim, window).backend
    return {"gluon": ["gluon", "triton", "torch"], "triton": ["triton", "torch"]}.get(chosen, ["torch"])


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of the results and of three gradients, against "torch" in float32.

    The gradients are those of q, k and v, for one row of 397 tokens with a window of 150.
    """
    # odd, longer than two tiles, and a window that ends inside one
    t, h, j, window = 397, 2, 1, 150
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, t, h, head_dim), (1, t, j, head_dim), (1, t, j, head_dim), (h,), (h,), (h,), (h,), (h, head_dim)]
    tensors = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
    results = []
    for name, kind in ((backend, dtype), ("torch", torch.float32)):
        args = [x.to(dtype).to(kind) if x.ndim == 4 else x for x in tensors]
        args = [x.detach().requires_grad_() for x in args]
        with torch.enable_grad():
            c, mag = polar_attention(*args, window=window, backend=name)
            grads = torch.autograd.grad((c.float() * tensors[0]).sum() + mag.sum(), args[:3])
        results.append([c, mag, *grads])
    return max_relative_error(*results)


def _in_log2(q_BTHX: Tensor, temp_TH: Tensor) -> Tensor:
    """Return q scaled by temp log2(e) / sqrt(X) for the kernels, rounded once to q's dtype."""
    return (q_BTHX.to(temp_TH.dtype) * (temp_TH * (LOG2E * q_BTHX.shape[-1] ** -0.5)).unsqueeze(-1)).to(q_BTHX.dtype)


def _distractor_weight(q_BTHX: Tensor, k_r_BJXR: Tensor, score_null_TH: Tensor) -> Tensor:
    """Return the summed weight of the distractors over rows, heads and queries, a scalar.

    Args:
        q_BTHX: Queries times temperature / sqrt(X), a block of them.
        k_r_BJXR: Distractor keys.
        score_null_TH: Null scores of the block, temperature included, in natural units.
    """
    b, t, h, d = q_BTHX.shape
    j = k_r_BJXR.shape[1]
    score_BJMR = q_BTHX.view(b, t, j, h // j, d).permute(0, 2, 3, 1, 4).reshape(b, j, -1, d) @ k_r_BJXR
    lse_BHT = torch.logsumexp(score_BJMR, -1).view(b, h, t)
    return torch.sigmoid(lse_BHT - score_null_TH.t()).sum()


def schedules(
    t: int, window: int | None, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (temperature, null score), each [T, H] in `dtype`, at the positions 0 .. T - 1.

    Both depend on the number of visible keys, min(i + 1, window) at position i; the null score is not yet multiplied by
    the temperature. Slope and gain are raw: softplus is applied here; the base is used as it is.
    """
    n_T1 = torch.arange(1, t + 1, dtype=dtype, device=null_base_H.device).unsqueeze(1)
    if window is not None:
        n_T1 = n_T1.clamp(max=window)
    return null_schedule(n_T1, null_base_H, null_slope_H, len_gain_H)


def null_schedule(n_T1: Tensor, null_base_H: Tensor, null_slope_H: Tensor, len_gain_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return (temperature, null score), each [T, H] in n's dtype, of queries that see n keys, n [T, 1].

    temperature = 1 + softplus(gain) ln n; null score = base + softplus(slope) sqrt(ln(1 + n)), without the temperature.

    Args:
        n_T1: Numbers of visible keys, at least 1, of a float dtype.
        null_base_H: Offset of the null score.
        null_slope_H: Raw slope of the null score.
        len_gain_H: Raw gain of the temperature.
    """
    dtype = n_T1.dtype
    temp_TH = 1 + functional.softplus(len_gain_H.to(dtype)) * n_T1.log()
    return temp_TH, null_base_H.to(dtype) + functional.softplus(null_slope_H.to(dtype)) * n_T1.log1p().sqrt()


class _PolarFunction(torch.autograd.Function):
    """Autograd function (scaled q, k, v, null score, beta, v_null) -> (c, mag) in the statistics' dtype.

    The backward computes the weights of each query block again instead of saving them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
        window: int | None, floor: float, exact_floor: bool, query_block: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (c [B, T, H, X], mag [B, T, H]) from real keys, with the null key folded in last.

        c is s / max(|s|, 1e-6) and mag is tanh(beta ln(1 + n_eff r)), with r the weight of the real keys.

        Args:
            ctx: Context of autograd.
            q: Queries times temperature / sqrt(X) [B, T, H, X], in the statistics' dtype like all tensors.
            k: Keys [B, T, J, X].
            v: Values [B, T, J, X].
            null_TH: Null scores, temperature included, in natural units.
            beta_H: Gain of the magnitude, after softplus.
            v_null_HX: Value of the null key.
            window: Attention window in keys, or None.
            floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.
            exact_floor: False makes the backward ignore the floor.
            query_block: Queries scored at a time.
        """
        b, t, h, d = q.shape
        j = k.shape[2]
        q_BJGTX = q.reshape(b, t, j, h // j, d).permute(0, 2, 3, 1, 4).contiguous()
        k_BJTX, v_BJTX = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        o = torch.empty_like(q_BJGTX)
        lse, n_eff = o.new_empty(o.shape[:4]), o.new_empty(o.shape[:4])
        for start, stop, first in _blocks(t, window, query_block):
            scores = _scores(q_BJGTX, k_BJTX, start, stop, first, window)
            weight = torch.softmax(scores, -1)
            o[..., start:stop, :] = _rows(weight @ v_BJTX[:, :, first:stop], h // j)
            # The largest weight is exp(largest score - lse), and at least 1/n.
            lse[..., start:stop] = _rows(scores.amax(-1) - weight.amax(-1).log(), h // j)
            n_eff[..., start:stop] = _rows(torch.linalg.vector_norm(weight, dim=-1).pow(-2), h // j)
        null = null_TH.t().reshape(1, j, h // j, t)
        # Two sigmoids, since 1 - w_null would lose the digits of a small share of real keys.
        w_null, w_real = torch.sigmoid(null - lse), torch.sigmoid(lse - null)
        # Q2 >= floor in units of the largest weight: n_eff <= exp(2 (lse - largest)) / floor. With a real key largest,
        # Q2 >= 1, so only the null can make it bind.
        cap = (2 * (lse - null)).exp() / floor
        bound = n_eff > cap
        n_eff = torch.where(bound, cap, n_eff)
        if not exact_floor:
            bound = torch.zeros_like(bound)
        v_null = v_null_HX.reshape(j, h // j, 1, d)
        s = o.mul_(w_real.unsqueeze(-1)).addcmul_(w_null.unsqueeze(-1), v_null)
        length = torch.linalg.vector_norm(s, dim=-1)
        c = s / length.clamp(min=TINY).unsqueeze(-1)
        grow = torch.log1p(n_eff * w_real)
        mag = torch.tanh(beta_H.view(j, h // j, 1) * grow)
        ctx.save_for_backward(
            q_BJGTX, k_BJTX, v_BJTX, v_null, beta_H, c, length, n_eff, bound, w_null, w_real, grow, mag
        )
        ctx.options = window, query_block
        return _heads_last(c), _heads_last(mag)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, null_TH, beta_H and v_null_HX, and None for the four options.

        Of rows that the floor binds the gradient is that of the bounded n_eff, or with `exact_floor` False as if the
        floor never bound.
        """
        q, k, v, v_null, beta_H, c, length, n_eff, bound, w_null, w_real, grow, mag = ctx.saved_tensors
        window, query_block = ctx.options
        b, j, g, t, d = q.shape
        gc = grads[0].reshape(b, t, j, g, d).permute(0, 2, 3, 1, 4)
        gmag = grads[1].reshape(b, t, j, g).permute(0, 2, 3, 1) * (1 - mag * mag)
        # Below TINY the direction is s / TINY, so nothing is projected away and a delta term remains.
        tiny = length < TINY
        along = torch.where(tiny, 0, (gc * c).sum(-1))
        gs = (gc - along.unsqueeze(-1) * c) / length.clamp(min=TINY).unsqueeze(-1)
        delta = torch.where(tiny, (gs * c).sum(-1) * TINY, 0)
        m = torch.expm1(grow)
        kappa = gmag * beta_H.view(j, g, 1) * m / (1 + m)
        g_null = w_null * ((gs * v_null).sum(-1) - delta) - kappa * torch.where(bound, 2 + w_null, w_null)
        g_o = w_real.unsqueeze(-1) * gs
        g_lse = kappa * (2 + w_null) - w_real * delta
        g_square = torch.where(bound, 0, -2 * kappa * n_eff)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, stop, first in _blocks(t, window, query_block):
            rows = slice(start, stop)
            weight = torch.softmax(_scores(q, k, start, stop, first, window), -1)
            g_o_rows = g_o[..., rows, :].reshape(b, j, -1, d)
            da = g_o_rows @ v[:, :, first:stop].transpose(-1, -2)
            da.add_(_flat(g_lse, rows)).addcmul_(weight, _flat(g_square, rows)).mul_(weight)
            dv[:, :, first:stop] += weight.transpose(-1, -2) @ g_o_rows
            dk[:, :, first:stop] += da.transpose(-1, -2) @ q[..., rows, :].reshape(b, j, -1, d)
            dq[..., rows, :] = _rows(da @ k[:, :, first:stop], g)
        g_null_TH = g_null.sum(0).reshape(j * g, t).t()
        g_beta_H = (gmag * grow).sum((0, 3)).reshape(-1)
        g_v_null = (w_null.unsqueeze(-1) * gs).sum((0, 3)).reshape(j * g, d)
        return _heads_last(dq), dk.transpose(1, 2), dv.transpose(1, 2), g_null_TH, g_beta_H, g_v_null, *[None] * 4


def _blocks(t: int, window: int | None, query_block: int) -> list[tuple[int, int, int]]:
    """Return (first query, end, first key in reach) of each block of queries, in order, as positions.

    Args:
        t: Number of queries.
        window: Attention window in keys, or None.
        query_block: Queries of a block; the last one may be shorter.

    Raises:
        ValueError: `query_block` is below 1.
    """
    if query_block < 1:
        raise ValueError(f"query_block must be at least 1, got {query_block}")
    starts = range(0, t, query_block)
    return [(i, min(i + query_block, t), 0 if window is None else max(0, i - window + 1)) for i in starts]


def _scores(q: Tensor, k: Tensor, start: int, stop: int, first: int, window: int | None) -> Tensor:
    """Return masked scores [B, J, G rows, S] of the queries start .. stop - 1 and the keys first .. stop - 1.

    Hidden keys get -1e30. The rows of a KV head's G query heads follow each other.

    Args:
        q: Scaled queries [B, J, G, T, X].
        k: Keys [B, J, T, X].
        start: First query.
        stop: End of the queries and keys.
        first: First key.
        window: Attention window in keys, or None.
    """
    b, j, g, _, d = q.shape
    a = q[..., start:stop, :].reshape(b, j, -1, d) @ k[:, :, first:stop].transpose(-1, -2)
    hidden = ~visible_mask(start, stop, first, window, q.device)
    a.view(b, j, g, stop - start, -1).masked_fill_(hidden, MASK_VALUE)
    return a


def _rows(x: Tensor, g: int) -> Tensor:
    """Reshape [B, J, G rows, ...] to [B, J, G, rows, ...]."""
    return x.unflatten(2, (g, -1))


def _flat(x_BJGT: Tensor, rows: slice) -> Tensor:
    """Reshape a slice of [B, J, G, T] to [B, J, G rows, 1]."""
    return x_BJGT[..., rows].reshape(*x_BJGT.shape[:2], -1, 1)


def _heads_last(x: Tensor) -> Tensor:
    """Reshape [B, J, G, T, ...] to [B, T, J G, ...]."""
    b, j, g, t = x.shape[:4]
    return x.permute(0, 3, 1, 2, *range(4, x.ndim)).reshape(b, t, j * g, *x.shape[4:])


def _check_heads(heads: int, *parameters: Tensor) -> None:
    """Raise ValueError unless every parameter has the shape [heads]."""
    for parameter in parameters:
        if parameter.shape != (heads,):
            raise ValueError(f"q has {heads} heads, but a parameter has shape {tuple(parameter.shape)}")


# --- as torch ops ---------------------------------------------------------------------------------------------------


def _empty_results(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32), *(rows_like(q) for _ in range(3))


@torch_op("polar_forward", _empty_results)
def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    window: int, floor: float, exact_floor: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (c [B, T, H, X], mag [B, T, H], lse, n_eff, inverse [B, H, T]) by the kernels.

    c and mag, tanh(beta ln(1 + n_eff r)), have gradients. c is in q's dtype, the others are float32, lse in units of
    log 2. Negative n_eff marks a row that the floor binds, negative inverse (1/|s|) a row with |s| below 1e-6.

    Args:
        q: Queries scaled so that weights are 2^(q·k - lse).
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        null_TH: Null scores in units of log 2, float32.
        beta_H: Gain of the magnitude after softplus, float32.
        v_null_HX: Value of the null key, float32.
        window: Attention window in keys, 0 for none.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.
        exact_floor: Concerns the gradient only; False differentiates as if the floor never bound.
        backend: "triton" or "gluon".
    """
    args = (q.contiguous(), k.contiguous(), v.contiguous(), null_TH.contiguous(), beta_H, v_null_HX.contiguous())
    return load_kernels(__package__, backend).polar_forward(*args, window=window or None, floor=floor)


@torch_op("polar_backward", lambda gc, g_mag, *tensors: empty_like(*tensors[:6]))
def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, window: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the scaled q, k, v, null_TH, beta_H and v_null_HX by the kernels.

    gc and g_mag are the gradients of c and mag; q to v_null_HX are the inputs of `polar_forward`, and c to inverse its
    results without mag. A positive n_eff leaves the floor out of the gradient.
    """
    args = (gc, g_mag, q, k, v, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    return load_kernels(__package__, backend).polar_backward(*(x.contiguous() for x in args), window=window or None)


def _saved(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    *tensors, window, _, exact_floor, path = inputs
    c, _, lse, n_eff, inverse = results
    # the sign of n_eff tells the kernels that the floor binds
    return (*tensors, c, lse, n_eff if exact_floor else n_eff.abs(), inverse), (window, path)


differentiate(polar_forward, polar_backward, _saved, results=2)
