"""Triton kernels of polar and of softmax attention, for NVIDIA GPUs from Ampere on.

See docs/reference/mechanisms.md, "Polar attention" and "Softmax attention". B batch, T length, H query heads, J KV heads, G = H /
J, X head size, M queries of a tile, S its keys. Scores are in units of log 2: the caller scales queries by log2(e)
times the factor of the scores (polar: temp / sqrt(X)) and null scores by temp log2(e), so that weights are 2^(q'k -
lse). Query i stands at position `offset` + i of the keys; an offset of TK or more shows every key to every query.

The forward of polar stores per row the log-sum of the real keys `lse`, their participation ratio `n_eff`, and `inverse`
= 1 / |s|. Negative `n_eff` marks a row whose ratio is bound by the floor, negative `inverse` a row whose |s| is below
TINY. Its backward, with r = 1 - w_null, P = 2^(q'k - lse), kappa = g_mag (1 - mag^2) beta m / (1 + m) and g = (r / |s|)
(gc - (gc.c) c):
    da = P (g.v + kappa (2 + w_null) - 2 kappa n_eff P),  dv = sum P g,  dk = ln2 sum da q',  dq' = ln2 sum da k,
    d null = (w_null / r) g.v_null - kappa w_null.
Softmax is the same with g = g_o and da = P (g_o.v - g_o.o + g_lse). So `_dq` and `_dkv` serve both: each row has an
`add`, added to g.v, and a `twice`, the factor of P. No atomics: every number repeats bit for bit.

Forgetting attention adds F_i - F_j to the scores, where F is the running sum of the log gates in units of log 2, held
as a high and a low float32 part.

Matrix products of n scores, 2 n X each: forward 2, dq 3, dkv 4. Bytes: q, k, v, the result and 12 per row forward;
twice that and dq, dk, dv backward. In bf16 the norm of the error is at most twice that of the naive formula in bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..device import HIDDEN, LN2, LOG2E, TINY, log1p, tanh, visible
from ..launcher import Tiles

_LN2 = tl.constexpr(LN2)
_TINY = tl.constexpr(TINY)
_HIDDEN = tl.constexpr(HIDDEN)


@triton.jit
def _decay_between(hi_ptr, lo_ptr, row, n, from_hi, from_lo, T):
    """Return F at an anchor less F at the positions n, float32 of n's shape, where F = hi + lo.

    The two parts are subtracted apart, so that nothing is lost where F is large. Positions from T on read as F = 0.

    Args:
        hi_ptr: High part of F, float32 [B, H, T] in units of log 2.
        lo_ptr: Low part of F.
        row: Offset of the head's F.
        n: Positions, a number or a vector.
        from_hi: High part of F at the anchor.
        from_lo: Low part of F at the anchor.
        T: Number of tokens.
    """
    hi = tl.load(hi_ptr + row + n, mask=n < T, other=0.0)
    lo = tl.load(lo_ptr + row + n, mask=n < T, other=0.0)
    return (from_hi - hi) + (from_lo - lo)


@triton.jit
def _forward_keys(
    acc, row_max, row_sum, square, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, start, stop, TK, window,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    POLAR: tl.constexpr, FORGETS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the keys start <= n < stop, BN at a time, to the running softmax of a tile of queries.

    q holds the queries of the positions p_M, b and j are batch row and KV head. k_desc and v_desc describe keys and
    values [B, TK, J X]. hi_ptr and lo_ptr are the parts of F, float32 [B, H, TK] in units of log 2, `row` the offset of
    the head's F, from_hi and from_lo F at the tile's first query; read only with FORGETS. With MASKED the causal mask
    and the window apply, else all keys count as visible.

    Returns:
        (acc [M, X], row_max [M], row_sum [M], square [M]) with these keys included: sum of weights times values,
        largest score in units of log 2, sum of weights, and, with POLAR, sum of squared weights, for the weights
        2^(score - row_max).
    """
    for n in tl.range(start, stop, BN):
        k = k_desc.load([b, n, j * X]).reshape(BN, X)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if FORGETS:
            s = s * FACTOR + _decay_between(hi_ptr, lo_ptr, row, n + tl.arange(0, BN), from_hi, from_lo, TK)[None, :]
        if MASKED:
            s = tl.where(visible(p_M, n + tl.arange(0, BN), TK, window, WINDOWED), s, _HIDDEN)
        higher = tl.maximum(row_max, tl.max(s, 1))
        shrink = tl.exp2(row_max - higher)
        p = tl.exp2(s - higher[:, None])
        row_sum = row_sum * shrink + tl.sum(p, 1)
        if POLAR:
            square = square * shrink * shrink + tl.sum(p * p, 1)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        row_max = higher
    return acc, row_max, row_sum, square


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, c_desc, null_ptr, v_null_ptr, beta_ptr, floor_ptr, mag_ptr, lse_ptr, n_eff_ptr, inverse_ptr,
    hi_ptr, lo_ptr, TQ, TK, offset, window,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, POLAR: tl.constexpr, FORGETS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Store the outputs of one tile of queries of one head.

    These are softmax, polar (POLAR) or forgetting attention (FORGETS). Grid: (cdiv(TQ, BM), B H), the longest rows
    first.

    Args:
        q_desc: Descriptor of queries [B, TQ, H X].
        k_desc: Descriptor of keys [B, TK, J X].
        v_desc: Descriptor of values [B, TK, J X].
        c_desc: Descriptor of the output [B, TQ, H X], written.
        null_ptr: Null scores, float32 [TQ, H] in units of log 2; this, the next four, n_eff and inverse only with
            POLAR.
        v_null_ptr: float32 [H, X].
        beta_ptr: float32 [H].
        floor_ptr: float32 scalar, lower bound of the sum of squared weights.
        mag_ptr: float32 [B, TQ, H], written.
        lse_ptr: float32 [B, H, TQ] in units of log 2, written in every case: with POLAR of the real keys alone, with
            FORGETS less F of the row over that of the tile's first query.
        n_eff_ptr: float32 [B, H, TQ], written; negative where the floor binds.
        inverse_ptr: float32 [B, H, TQ], 1 / max(|s|, 1e-6), written; negative where |s| is below 1e-6.
        hi_ptr: High part of F, float32 [B, H, TK]; read only with FORGETS.
        lo_ptr: Low part of F.
        TQ: Queries.
        TK: Keys.
        offset: Position of the first query among the keys.
        window: Attention window in keys; read only when WINDOWED.
        H: constexpr, query heads.
        G: constexpr, query heads per KV head.
        X: constexpr, head size.
        BM: constexpr, queries of a tile.
        BN: constexpr, keys of a tile.
        WINDOWED: constexpr bool, True with a window.
        PRECISION: constexpr, input precision of products.
        POLAR: constexpr bool, True for polar attention.
        FORGETS: constexpr bool, True for forgetting attention.
        FACTOR: constexpr, factor of q·k with FORGETS; otherwise q is scaled already.
    """
    # the longest rows first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    i_M = m0 + tl.arange(0, BM)
    p_M = offset + i_M
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    acc = tl.zeros([BM, X], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    square = tl.zeros([BM], tl.float32)
    end = tl.minimum(TK, offset + tl.minimum(m0 + BM, TQ))
    first = 0
    unmasked_from = 0
    if WINDOWED:
        first = tl.maximum(0, offset + m0 - window + 1) // BN * BN
        unmasked_from = tl.maximum(first, tl.cdiv(tl.maximum(0, offset + m0 + BM - window), BN) * BN)
        unmasked_from = tl.minimum(unmasked_from, tl.cdiv(end, BN) * BN)
    unmasked_to = tl.maximum(unmasked_from, tl.minimum(offset + m0 + 1, TK) // BN * BN)
    row = (b * H + h) * TK
    from_hi = 0.0
    from_lo = 0.0
    if FORGETS:  # F counts from the tile's first query
        from_hi = tl.load(hi_ptr + row + m0)
        from_lo = tl.load(lo_ptr + row + m0)
    if WINDOWED:
        acc, row_max, row_sum, square = _forward_keys(
            acc, row_max, row_sum, square, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, first, unmasked_from, TK, window,
            BN, X, True, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR)  # fmt: skip
    acc, row_max, row_sum, square = _forward_keys(
        acc, row_max, row_sum, square, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, unmasked_from, unmasked_to, TK, window,
        BN, X, False, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR)  # fmt: skip
    acc, row_max, row_sum, square = _forward_keys(
        acc, row_max, row_sum, square, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, unmasked_to, end, TK, window,
        BN, X, True, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR)  # fmt: skip

    inside = i_M < TQ
    at = (b * H + h) * TQ + i_M
    lse = row_max + tl.log2(row_sum)  # with gates lse is relative to F of the row less that of the tile's first query
    tl.store(lse_ptr + at, lse, mask=inside)
    if POLAR:
        null = tl.load(null_ptr + i_M * H + h, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + h)
        floor = tl.load(floor_ptr)
        n_eff = row_sum * row_sum / square
        d = lse - null
        r = 1.0 / (1.0 + tl.exp2(-d))
        w = 1.0 / (1.0 + tl.exp2(d))
        cap = tl.exp2(2.0 * d) / floor
        bound = n_eff > cap
        n_eff = tl.where(bound, cap, n_eff)
        v_null = tl.load(v_null_ptr + h * X + tl.arange(0, X))
        s = acc * (r / row_sum)[:, None] + w[:, None] * v_null[None, :]
        length = tl.sqrt(tl.sum(s * s, 1))
        inverse = 1.0 / tl.maximum(length, _TINY)
        tl.store(n_eff_ptr + at, tl.where(bound, -n_eff, n_eff), mask=inside)
        tl.store(inverse_ptr + at, tl.where(length < _TINY, -inverse, inverse), mask=inside)
        mag = tanh(beta * log1p(n_eff * r))
        tl.store(mag_ptr + (b * TQ + i_M) * H + h, mag, mask=inside)
        out = s * inverse[:, None]
    else:
        out = acc / row_sum[:, None]
    c_desc.store([b, m0, h * X], out.to(c_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dq_keys(
    dq, over, q, g, lse, add, twice, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, start, stop, TK, window,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    POLAR: tl.constexpr, FORGETS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the keys start <= n < stop, BN at a time, to dq of a tile of queries.

    q and g hold the queries and the gradient of the weighted sum [M, X] at the positions p_M; lse, add and twice are
    [M], `twice` read only with POLAR. b and j are batch row and KV head; k_desc and v_desc describe keys and values [B,
    TK, J X]. hi_ptr and lo_ptr are the parts of F, `row` the offset of the head's F, from_hi and from_lo F at the
    tile's first query; read only with FORGETS. With MASKED the causal mask and the window (in keys, read only when
    WINDOWED) apply, else all pairs count as visible. dq still lacks the factor ln 2 FACTOR.

    With P = 2^(score - lse) and g the gradient of the weighted sum of values, da = P (g.v + add + twice P) is the
    gradient of the scores.

    Returns:
        (dq [M, X], over [M], sum of da over the keys, with FORGETS).
    """
    for n in tl.range(start, stop, BN):
        k = k_desc.load([b, n, j * X]).reshape(BN, X)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        # the accumulator starts at -lse, which saves a subtraction per element
        s = tl.dot(q, k.T, tl.broadcast_to(-lse[:, None], [q.shape[0], BN]), input_precision=PRECISION)
        if FORGETS:
            s = s * FACTOR + _decay_between(hi_ptr, lo_ptr, row, n + tl.arange(0, BN), from_hi, from_lo, TK)[None, :]
        p = tl.exp2(s)
        if MASKED:
            p = tl.where(visible(p_M, n + tl.arange(0, BN), TK, window, WINDOWED), p, 0.0)
        dp = tl.dot(g, v.T, tl.broadcast_to(add[:, None], [q.shape[0], BN]), input_precision=PRECISION)
        da = p * (dp + twice[:, None] * p) if POLAR else p * dp
        dq = tl.dot(da.to(k.dtype), k, dq, input_precision=PRECISION)
        if FORGETS:
            over += tl.sum(da, 1)
    return dq, over


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, lse_ptr, add_ptr, twice_ptr, hi_ptr, lo_ptr, exact_ptr, TQ, TK,
    offset, window, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, POLAR: tl.constexpr, FORGETS: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store dq of one tile of queries of one head.

    Grid: (cdiv(TQ, BM), B H). Descriptors: q, g and dq [B, TQ, H X], k and v [B, TK, J X]. lse, add and twice are
    float32 [B, H, TQ]; hi and lo, float32 [B, H, TK], are the parts of F. With FORGETS it also writes exact_ptr,
    float32 [B, H, TQ]: `add` corrected so that each row of da sums to 0. TILE: constexpr, queries of a tile of the
    forward, to whose first query its lse refers.

    TQ queries stand at the positions `offset` on of TK keys. window: attention window in keys, read only when WINDOWED.
    Constexprs: H query heads, G query heads per KV head, X head size, BM and BN queries and keys of a tile, POLAR and
    FORGETS True for polar and forgetting attention, FACTOR that of q·k with FORGETS.

    With P = 2^(score - lse) and g the gradient of the weighted sum of values, da = P (g.v + add + twice P) is the
    gradient of the scores.
    """
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    i_M = m0 + tl.arange(0, BM)
    p_M = offset + i_M
    inside = i_M < TQ
    at = (b * H + h) * TQ + i_M
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    lse = tl.load(lse_ptr + at, mask=inside, other=-_HIDDEN)
    add = tl.load(add_ptr + at, mask=inside, other=0.0)
    twice = tl.load(twice_ptr + at, mask=inside, other=0.0) if POLAR else 0.0
    end = tl.minimum(TK, offset + tl.minimum(m0 + BM, TQ))
    first = 0
    unmasked_from = 0
    if WINDOWED:
        first = tl.maximum(0, offset + m0 - window + 1) // BN * BN
        unmasked_from = tl.maximum(first, tl.cdiv(tl.maximum(0, offset + m0 + BM - window), BN) * BN)
        unmasked_from = tl.minimum(unmasked_from, tl.cdiv(end, BN) * BN)
    unmasked_to = tl.maximum(unmasked_from, tl.minimum(offset + m0 + 1, TK) // BN * BN)
    row = (b * H + h) * TK
    from_hi = 0.0
    from_lo = 0.0
    if FORGETS:
        from_hi = tl.load(hi_ptr + row + m0)
        from_lo = tl.load(lo_ptr + row + m0)
        # the accumulator's start value is multiplied by FACTOR too
        lse = (lse + _decay_between(hi_ptr, lo_ptr, row, i_M // TILE * TILE, from_hi, from_lo, TK)) / FACTOR
    dq = tl.zeros([BM, X], tl.float32)
    over = tl.zeros([BM], tl.float32)
    if WINDOWED:
        dq, over = _dq_keys(dq, over, q, g, lse, add, twice, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, first, unmasked_from, TK, window,
                      BN, X, True, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR)  # fmt: skip
    dq, over = _dq_keys(dq, over, q, g, lse, add, twice, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, unmasked_from, unmasked_to, TK, window,
                  BN, X, False, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR)  # fmt: skip
    dq, over = _dq_keys(dq, over, q, g, lse, add, twice, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, from_hi, from_lo, b, j, unmasked_to, end, TK, window,
                  BN, X, True, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR)  # fmt: skip
    if FORGETS:  # a row of da sums to 0 exactly, but `add` comes from a rounded output
        tl.store(exact_ptr + at, add - over, mask=inside)
    dq_desc.store([b, m0, h * X], (dq * (_LN2 * FACTOR)).to(dq_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dkv_queries(
    dk, dv, df, k, v, n_S, q_desc, g_desc, lse_ptr, add_ptr, twice_ptr, hi_ptr, lo_ptr, f_S, from_hi, from_lo, b, h,
    start, stop, TQ, TK, offset, window, H: tl.constexpr, BM: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, POLAR: tl.constexpr, FORGETS: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return dk, dv [BN, X] and df [BN] of a tile of keys with the queries of one head added, BM at a time.

    The queries are start <= m < stop of head h; k and v hold the keys n_S and their values. q_desc and g_desc describe
    queries and the output's gradient [B, TQ, H X]; lse, add and twice are float32 [B, H, TQ], `twice` read only with
    POLAR. With MASKED the causal mask and the window apply. With FORGETS f_S [BN] is F at the tile's first key less F
    of each key, from_hi and from_lo are F at that first key. dk still lacks the factor ln 2 FACTOR.

    With P = 2^(score - lse) and g the gradient of the weighted sum of values, da = P (g.v + add + twice P) is the
    gradient of the scores.
    """
    for m in tl.range(start, stop, BM):
        i_M = m + tl.arange(0, BM)
        inside = i_M < TQ
        at = (b * H + h) * TQ + i_M
        q = q_desc.load([b, m, h * X]).reshape(BM, X)
        lse = tl.load(lse_ptr + at, mask=inside, other=-_HIDDEN)
        if FORGETS:
            lse = (
                lse + _decay_between(hi_ptr, lo_ptr, (b * H + h) * TK, m // TILE * TILE, from_hi, from_lo, TK)
            ) / FACTOR
        s_SM = tl.dot(k, q.T, tl.broadcast_to(-lse[None, :], [k.shape[0], BM]), input_precision=PRECISION)
        if FORGETS:
            s_SM = s_SM * FACTOR + f_S[:, None]
        p_SM = tl.exp2(s_SM)
        if MASKED:
            p_SM = tl.where(visible(offset + i_M, n_S, TK, window, WINDOWED).T, p_SM, 0.0)
        g = g_desc.load([b, m, h * X]).reshape(BM, X)
        dv = tl.dot(p_SM.to(g.dtype), g, dv, input_precision=PRECISION)
        add = tl.load(add_ptr + at, mask=inside, other=0.0)
        dp_SM = tl.dot(v, g.T, tl.broadcast_to(add[None, :], [k.shape[0], BM]), input_precision=PRECISION)
        if POLAR:
            twice = tl.load(twice_ptr + at, mask=inside, other=0.0)
            da = p_SM * (dp_SM + twice[None, :] * p_SM)
        else:
            da = p_SM * dp_SM
        dk = tl.dot(da.to(q.dtype), q, dk, input_precision=PRECISION)
        if FORGETS:
            df -= tl.sum(da, 1)
    return dk, dv, df


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, lse_ptr, add_ptr, twice_ptr, hi_ptr, lo_ptr, df_ptr, TQ, TK, offset,
    window, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, POLAR: tl.constexpr, FORGETS: tl.constexpr,
    FACTOR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile of keys of one KV head, summed over its G query heads.

    Grid: (cdiv(TK, BN), B J). Descriptors: q and g [B, TQ, H X], k, v, dk and dv [B, TK, J X]. lse, add and twice are
    float32 [B, H, TQ]. With FORGETS it also writes df_ptr, float32 [B, H, TK], the gradient of F in natural units.
    TILE: constexpr, queries of a tile of the forward.

    TQ queries stand at the positions `offset` on of TK keys. window: attention window in keys, read only when WINDOWED.
    Constexprs: H query heads, G query heads per KV head, X head size, BM and BN queries and keys of a tile, POLAR and
    FORGETS True for polar and forgetting attention, FACTOR that of q·k with FORGETS.

    With P = 2^(score - lse) and g the gradient of the weighted sum of values, da = P (g.v + add + twice P) is the
    gradient of the scores.
    """
    n0 = tl.program_id(0) * BN
    b = tl.program_id(1) // (H // G)
    j = tl.program_id(1) % (H // G)
    n_S = n0 + tl.arange(0, BN)
    k = k_desc.load([b, n0, j * X]).reshape(BN, X)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    # queries at m see key n when n <= offset + m < n + window
    first = tl.maximum(0, n0 - offset) // BM * BM
    end = TQ
    unmasked_from = tl.cdiv(tl.maximum(0, n0 + BN - 1 - offset), BM) * BM
    unmasked_to = TQ
    if WINDOWED:
        end = tl.minimum(TQ, tl.maximum(0, n0 + BN - 1 + window - offset))
        unmasked_to = tl.maximum(0, n0 + window - offset) // BM * BM
    unmasked_from = tl.maximum(first, tl.minimum(unmasked_from, tl.cdiv(end, BM) * BM))
    unmasked_to = tl.maximum(unmasked_from, tl.minimum(unmasked_to, tl.cdiv(end, BM) * BM))
    for g in tl.range(0, G):
        h = j * G + g
        df = tl.zeros([BN], tl.float32)
        f_S = df
        from_hi = 0.0
        from_lo = 0.0
        if FORGETS:  # F counts from the tile's first key
            row = (b * H + h) * TK
            from_hi = tl.load(hi_ptr + row + n0)
            from_lo = tl.load(lo_ptr + row + n0)
            f_S = _decay_between(hi_ptr, lo_ptr, row, n_S, from_hi, from_lo, TK)
        dk, dv, df = _dkv_queries(dk, dv, df, k, v, n_S, q_desc, g_desc, lse_ptr, add_ptr, twice_ptr, hi_ptr, lo_ptr,
                              f_S, from_hi, from_lo, b, h,
                              first, unmasked_from, TQ, TK, offset, window, H, BM, X, True, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR, TILE)  # fmt: skip
        dk, dv, df = _dkv_queries(dk, dv, df, k, v, n_S, q_desc, g_desc, lse_ptr, add_ptr, twice_ptr, hi_ptr, lo_ptr,
                              f_S, from_hi, from_lo, b, h,
                              unmasked_from, unmasked_to, TQ, TK, offset, window, H, BM, X, False, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR, TILE)  # fmt: skip
        if WINDOWED:
            dk, dv, df = _dkv_queries(dk, dv, df, k, v, n_S, q_desc, g_desc, lse_ptr, add_ptr, twice_ptr, hi_ptr, lo_ptr,
                              f_S, from_hi, from_lo, b, h,
                                  unmasked_to, end, TQ, TK, offset, window, H, BM, X, True, WINDOWED, PRECISION, POLAR, FORGETS, FACTOR, TILE)  # fmt: skip
        if FORGETS:
            tl.store(df_ptr + (b * H + h) * TK + n_S, df, mask=n_S < TK)
    dk_desc.store([b, n0, j * X], (dk * (_LN2 * FACTOR)).to(dk_desc.dtype).reshape(1, BN, X))
    dv_desc.store([b, n0, j * X], dv.to(dv_desc.dtype).reshape(1, BN, X))


# --- launches -----------------------------------------------------------------------------------------------------


def tiles_for(kernel: str, keys: int, d: int, dtype: torch.dtype, forgets: bool = False) -> Tiles:
    """Return the launch configuration of a kernel, measured on an H200.

    The result is (queries, keys, warps, stages). It depends on the sizes and not on measured time, so that every
    process rounds alike. Float32 and heads above 128 get (32, 32, 4, 1), whatever the rest.

    Args:
        kernel: Name of the kernel: "forward", "dq" or "dkv".
        keys: Number of keys TK; from 8192 on tiles are larger.
        d: Head size.
        dtype: Dtype of the queries.
        forgets: True for forgetting attention, whose scores decay by gates.
    """
    if launcher.needs_small_tiles(d, dtype):
        return launcher.SMALL_TILES
    if keys >= 8192:
        return {"forward": Tiles(128, 128, 8, 3), "dq": Tiles(128, 64, 8, 3), "dkv": Tiles(64, 128, 8, 3)}[kernel]
    if forgets:
        return {"forward": Tiles(128, 128, 8, 3), "dq": Tiles(64, 64, 4, 2), "dkv": Tiles(64, 64, 4, 2)}[kernel]
    return {"forward": Tiles(64, 64, 4, 3), "dq": Tiles(128, 64, 8, 3), "dkv": Tiles(64, 64, 4, 2)}[kernel]


HighLow = tuple[Tensor, Tensor]
"""High and low float32 part whose sum is a float64 tensor."""


def softmax_forward(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, offset: int = 0, log_decay: HighLow | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (o [B, T, H, X] in q's dtype, lse [B, H, T] float32 in units of log 2).

    Args:
        q: Queries, contiguous like all inputs, scaled to units of log 2.
        k: Keys.
        v: Values.
        window: Attention window in keys, or None.
        offset: Position of the first query among the keys; 0 with `log_decay`.
        log_decay: Parts of F [B, H, T] in units of log 2; adds F_i - F_j to the score of query i and key j. lse is then
            for `weights_backward` alone: less F of the row over that of its tile's first query.
        factor: Factor of q·k, not 0, that the kernels apply with `log_decay`.
    """
    b, t, h, _ = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(b, h, t, device=q.device, dtype=torch.float32)
    launch_forward(q, k, v, o, (lse,) * 8, window, offset, polar=False, log_decay=log_decay, factor=factor)
    return o, lse


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra_tensors: tuple[Tensor, ...], window: int | None, offset: int, *,
    polar: bool, log_decay: HighLow | None = None, factor: float = 1.0,
) -> None:  # fmt: skip
    """Launch `_forward`, which overwrites `out` and the outputs among `extra_tensors`.

    Args:
        q: Contiguous queries [B, T, H, X], scaled to units of log 2 unless `log_decay` is given.
        k: Contiguous keys [B, TK, J, X].
        v: Contiguous values [B, TK, J, X].
        out: Contiguous output, of q's shape.
        extra_tensors: The eight tensors of `_forward` from null to inverse: null, v_null, beta, floor, mag, lse, n_eff,
            inverse. Without `polar` only lse is used, and any tensor may stand for the others.
        window: Attention window in keys, or None.
        offset: Position of the first query among the keys.
        polar: True for polar attention.
        log_decay: Parts of F, for forgetting attention.
        factor: Factor of q·k with `log_decay`.
    """
    (b, t, h, d), (tk, j) = q.shape, k.shape[1:3]
    bm, bn, warps, stages = tiles_for("forward", tk, d, q.dtype, log_decay is not None)
    _forward[(triton.cdiv(t, bm), b * h)](
        launcher.head_blocks(q, bm, d), launcher.head_blocks(k, bn, d), launcher.head_blocks(v, bn, d), launcher.head_blocks(out, bm, d), *extra_tensors,
        *(log_decay or extra_tensors[-2:]), t, tk, offset, window or 0, H=h, G=h // j, X=d, BM=bm, BN=bn,
        WINDOWED=window is not None, PRECISION=launcher.precision(q.dtype), POLAR=polar, FORGETS=log_decay is not None,
        FACTOR=factor, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def softmax_backward(
    g_o: Tensor, g_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *,
    window: int | None, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q', k, v), q' the scaled queries, from those of o and of lse (in units of log 2).

    Args:
        g_o: Gradient of o [B, T, H, X], contiguous like all inputs.
        g_lse: Gradient of lse, float32 [B, H, T].
        q: Scaled queries of `softmax_forward`.
        k: Keys.
        v: Values.
        o: First result of `softmax_forward`.
        lse: Second result.
        window: Attention window in keys, or None.
        offset: Position of the first query among the keys.
    """
    add = g_lse * LOG2E - launcher.row_products(g_o, o)
    return weights_backward(q, k, v, g_o, lse, add, None, window=window, offset=offset)[:3]


def weights_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor | None, *,
    window: int | None, offset: int = 0, log_decay: HighLow | None = None, factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q', k, v, F) where da = P (g.v + add + twice P) and dv = sum P g.

    The first three are in the inputs' dtypes. The last, of F in natural units, is float32 [B, H, T], or one
    uninitialised number without `log_decay`. A row's own F adds the same to all of its scores, so only keys have a
    gradient of it.

    Args:
        q: Queries [B, T, H, X] in units of log 2 (with `log_decay` unscaled), contiguous like all inputs.
        k: Keys [B, TK, J, X].
        v: Values [B, TK, J, X].
        g: Gradient of the weighted sum of values, of q's shape.
        lse: float32 [B, H, T] of the forward.
        add: float32 [B, H, T], added to g.v.
        twice: float32 [B, H, T], factor of P; None for 0.
        window: Attention window in keys, or None.
        offset: Position of the first query among the keys.
        log_decay: Parts of F, or None.
        factor: Factor of q·k with `log_decay`.
    """
    t, d, tk = q.shape[1], q.shape[3], k.shape[1]
    forgets, decay_parts = log_decay is not None, log_decay or (lse, lse)
    df = torch.empty(lse.shape if forgets else (1,), device=q.device)
    # the pass for queries corrects `add` for the pass for keys, because gate gradients are sums of cancelling terms
    exact = torch.empty_like(add) if forgets else add
    constexprs = launcher.constants(q, k, window, factor)
    constexprs["POLAR"], constexprs["FORGETS"] = twice is not None, forgets
    constexprs["TILE"] = tiles_for("forward", tk, d, q.dtype, forgets).rows
    twice = lse if twice is None else twice
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sizes = (t, tk, offset, window or 0)
    tiles = tiles_for("dq", tk, d, q.dtype, forgets)
    launcher.queries_backward(_dq, tiles, q, k, v, g, dq, (lse, add, twice, *decay_parts, exact, *sizes), constexprs)
    tiles = tiles_for("dkv", tk, d, q.dtype, forgets)
    launcher.keys_backward(_dkv, tiles, q, k, v, g, dk, dv, (lse, exact, twice, *decay_parts, df, *sizes), constexprs)
    return dq, dk, dv, df
