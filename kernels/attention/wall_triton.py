"""Triton kernels of wall attention, for every NVIDIA GPU from Ampere on (docs/kernels.md, "Wall attention").

B batch, T length, H query heads, J KV heads, Y gate heads (H, or J when tied), X head size, M queries of a tile, S its keys.
Units of log 2. P_t is the sum of a channel's log gates up to t, and a score is sum_x q_ix k_jx 2^(P_ix - P_jx). P falls
without end, so it is cut at blocks of `BLOCK` tokens: with E_b the sum up to the end of block b,

    q'_i = q_i 2^(P_i - A),  k'_j = k_j 2^(E_b(j) - P_j),  score = sum_x q'_ix 2^(A - E_b(j))_x k'_jx,

where the anchor A of a tile of queries is P before the block in its middle. Every exponent of q' and k' is a sum over at most
BLOCK gates, so it stays within BLOCK g_max / ln 2 (80 for the mixer's 0.86) and bf16 holds it; the vector in the middle is
the only thing that a tile of scores multiplies by, also on the diagonal. `_gate` makes q' and k', the three kernels in the
middle are those of softmax attention with that vector, `_ungate` gives back the gradients of q, k and the gates:
dP = q dq - k dk, summed from the end, since shifting P changes nothing. No atomics: every number repeats bit for bit.

Products of n scores, 2 n X each: forward 2, dq 3, dk and dv 4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows_triton import row_products
from .triton import HIDDEN, LN2, Tiles, flat, precision, visible

BLOCK = 64
"""Tokens whose gates one exponent sums at most."""

_LN2 = tl.constexpr(LN2)
_HIDDEN = tl.constexpr(HIDDEN)


@triton.jit
def _sums(f_ptr, b, y, t0, T, Y: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr):
    """(sum of the gates of a block up to each token [BLOCK, X], of all of it [X], places, which exist)."""
    t_S = t0 + tl.arange(0, BLOCK)
    inside = t_S < T
    place = ((b * T + t_S) * Y + y)[:, None] * X + tl.arange(0, X)[None, :]
    f = tl.load(f_ptr + place, mask=inside[:, None], other=0.0)
    return tl.cumsum(f, 0), tl.sum(f, 0), place, inside


@triton.jit
def _gate(
    q_ptr, k_ptr, f_ptr, q_out, k_out, total_ptr, T, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    b = tl.program_id(1) // Y
    y = tl.program_id(1) % Y
    local, total, place, inside = _sums(f_ptr, b, y, n * BLOCK, T, Y, X, BLOCK)
    tl.store(total_ptr + ((b * Y + y) * N + n) * X + tl.arange(0, X), total)
    t_S = n * BLOCK + tl.arange(0, BLOCK)
    j = y // (Y // J)
    k = tl.load(
        k_ptr + ((b * T + t_S) * J + j)[:, None] * X + tl.arange(0, X)[None, :], mask=inside[:, None], other=0.0
    )
    faded = k.to(tl.float32) * tl.exp2(total[None, :] - local)
    tl.store(k_out + place, faded.to(k_out.dtype.element_ty), mask=inside[:, None])
    # the first half of a tile of two blocks lies before its anchor
    early = (TILE > BLOCK) & (n % 2 == 0)
    grown = tl.exp2(tl.where(early, local - total[None, :], local))
    for g in tl.range(0, H // Y):
        at = ((b * T + t_S) * H + y * (H // Y) + g)[:, None] * X + tl.arange(0, X)[None, :]
        q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
        tl.store(q_out + at, (q.to(tl.float32) * grown).to(q_out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _ungate(
    q_ptr, k_ptr, dq_ptr, dk_ptr, f_ptr, df_ptr, rest_ptr, T, N,
    H: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dq' and dk' become dq and dk in place; df [B, T, Y, X] summed to the block's end, and its sum [B, Y, N, X]."""
    n = tl.program_id(0)
    b = tl.program_id(1) // Y
    y = tl.program_id(1) % Y
    local, total, place, inside = _sums(f_ptr, b, y, n * BLOCK, T, Y, X, BLOCK)
    t_S = n * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(k_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
    dk = tl.load(dk_ptr + place, mask=inside[:, None], other=0.0)
    along = -k * dk
    tl.store(dk_ptr + place, dk * tl.exp2(total[None, :] - local), mask=inside[:, None])
    early = (TILE > BLOCK) & (n % 2 == 0)
    grown = tl.exp2(tl.where(early, local - total[None, :], local))
    for g in tl.range(0, H // Y):
        at = ((b * T + t_S) * H + y * (H // Y) + g)[:, None] * X + tl.arange(0, X)[None, :]
        q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        dq = tl.load(dq_ptr + at, mask=inside[:, None], other=0.0)
        along += q * dq
        tl.store(dq_ptr + at, dq * grown, mask=inside[:, None])
    whole = tl.sum(along, 0)
    tl.store(df_ptr + place, whole[None, :] - tl.cumsum(along, 0) + along, mask=inside[:, None])
    tl.store(rest_ptr + ((b * Y + y) * N + n) * X + tl.arange(0, X), whole)


@triton.jit
def _between(hi_ptr, lo_ptr, row, one, two, N, X: tl.constexpr):
    """2^(E_one - E_two) [X], E before those blocks, and E = hi + lo."""
    d_X = tl.arange(0, X)
    hi = tl.load(hi_ptr + (row + one) * X + d_X) - tl.load(hi_ptr + (row + two) * X + d_X)
    lo = tl.load(lo_ptr + (row + one) * X + d_X) - tl.load(lo_ptr + (row + two) * X + d_X)
    return tl.exp2(hi + lo)


@triton.jit
def _forward_keys(
    acc, top, total, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, start, stop, T, window, N,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n in tl.range(start, stop, BN):
        k = k_desc.load([b, n, y * X]).reshape(BN, X)
        rate = _between(hi_ptr, lo_ptr, row, middle, n // BN + 1, N, X)
        s = tl.dot((q * rate[None, :]).to(k.dtype), k.T, input_precision=PRECISION)
        if MASKED:
            s = tl.where(visible(p_M, n + tl.arange(0, BN), T, window, WINDOWED), s, _HIDDEN)
        higher = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit
def _reach(m0, T, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """Keys first <= n < end of a tile of queries; those of whole_from <= n < whole_to every query of it sees."""
    end = tl.minimum(m0 + BM, T)
    first = 0
    whole_from = 0
    if WINDOWED:
        first = tl.maximum(0, m0 - window + 1) // BN * BN
        whole_from = tl.maximum(first, tl.cdiv(tl.maximum(0, m0 + BM - window), BN) * BN)
        whole_from = tl.minimum(whole_from, tl.cdiv(end, BN) * BN)
    whole_to = tl.maximum(whole_from, tl.minimum(m0 + 1, T) // BN * BN)
    return first, whole_from, whole_to, end


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, o_desc, hi_ptr, lo_ptr, lse_ptr, T, window, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # the longest rows first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    y = h // (H // Y)
    j = h // (H // J)
    p_M = m0 + tl.arange(0, BM)
    row = (b * Y + y) * (N + 1)
    middle = tl.minimum((m0 + BM // 2) // BN, N)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    acc = tl.zeros([BM, X], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    first, whole_from, whole_to, end = _reach(m0, T, window, BM, BN, WINDOWED)
    if WINDOWED:
        acc, top, total = _forward_keys(
            acc, top, total, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, first, whole_from, T, window, N,
            BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    acc, top, total = _forward_keys(
        acc, top, total, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, whole_from, whole_to, T, window, N,
        BN, X, False, WINDOWED, PRECISION)  # fmt: skip
    acc, top, total = _forward_keys(
        acc, top, total, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, whole_to, end, T, window, N,
        BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    tl.store(lse_ptr + (b * H + h) * T + p_M, top + tl.log2(total), mask=p_M < T)
    o_desc.store([b, m0, h * X], (acc / total[:, None]).to(o_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dq_keys(
    dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, start, stop, T, window, N,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n in tl.range(start, stop, BN):
        k = k_desc.load([b, n, y * X]).reshape(BN, X)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        rate = _between(hi_ptr, lo_ptr, row, middle, n // BN + 1, N, X)
        s = tl.dot((q * rate[None, :]).to(k.dtype), k.T, input_precision=PRECISION) - lse[:, None]
        if MASKED:
            s = tl.where(visible(p_M, n + tl.arange(0, BN), T, window, WINDOWED), s, _HIDDEN)
        p = tl.exp2(s)
        da = p * (tl.dot(g, v.T, input_precision=PRECISION) + add[:, None])
        dq += tl.dot(da.to(k.dtype), k, input_precision=PRECISION) * rate[None, :]
    return dq


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_ptr, hi_ptr, lo_ptr, lse_ptr, add_ptr, T, window, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    y = h // (H // Y)
    j = h // (H // J)
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    row = (b * Y + y) * (N + 1)
    middle = tl.minimum((m0 + BM // 2) // BN, N)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    at = (b * H + h) * T + p_M
    lse = tl.load(lse_ptr + at, mask=inside, other=-_HIDDEN)
    add = tl.load(add_ptr + at, mask=inside, other=0.0)
    dq = tl.zeros([BM, X], tl.float32)
    first, whole_from, whole_to, end = _reach(m0, T, window, BM, BN, WINDOWED)
    if WINDOWED:
        dq = _dq_keys(dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, first, whole_from,
                      T, window, N, BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    dq = _dq_keys(dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, whole_from, whole_to,
                  T, window, N, BN, X, False, WINDOWED, PRECISION)  # fmt: skip
    dq = _dq_keys(dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, middle, b, y, j, whole_to, end,
                  T, window, N, BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    place = ((b * T + p_M) * H + h)[:, None] * X + tl.arange(0, X)[None, :]
    tl.store(dq_ptr + place, dq, mask=inside[:, None])


@triton.jit
def _dkv_queries(
    dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, after, b, h, start, stop, T, window, N,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for m in tl.range(start, stop, BM):
        i_M = m + tl.arange(0, BM)
        inside = i_M < T
        at = (b * H + h) * T + i_M
        q = q_desc.load([b, m, h * X]).reshape(BM, X)
        g = g_desc.load([b, m, h * X]).reshape(BM, X)
        lse = tl.load(lse_ptr + at, mask=inside, other=-_HIDDEN)
        add = tl.load(add_ptr + at, mask=inside, other=0.0)
        middle = tl.minimum((m // TILE * TILE + TILE // 2) // BN, N)
        faded = (q * _between(hi_ptr, lo_ptr, row, middle, after, N, X)[None, :]).to(k.dtype)
        s_SM = tl.dot(k, faded.T, input_precision=PRECISION) - lse[None, :]
        if MASKED:
            s_SM = tl.where(visible(i_M, n_S, T, window, WINDOWED).T, s_SM, _HIDDEN)
        p_SM = tl.exp2(s_SM)
        dv = tl.dot(p_SM.to(g.dtype), g, dv, input_precision=PRECISION)
        da = p_SM * (tl.dot(v, g.T, input_precision=PRECISION) + add[None, :])
        dk = tl.dot(da.to(k.dtype), faded, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, dk_ptr, dv_ptr, hi_ptr, lo_ptr, lse_ptr, add_ptr, T, window, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TILE: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BN
    b = tl.program_id(1) // Y
    y = tl.program_id(1) % Y
    j = y // (Y // J)
    n_S = n0 + tl.arange(0, BN)
    row = (b * Y + y) * (N + 1)
    after = tl.program_id(0) + 1
    k = k_desc.load([b, n0, y * X]).reshape(BN, X)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    first = n0 // BM * BM
    end = T
    whole_from = tl.cdiv(n0 + BN - 1, BM) * BM
    whole_to = T
    if WINDOWED:
        end = tl.minimum(T, n0 + BN - 1 + window)
        whole_to = (n0 + window) // BM * BM
    whole_from = tl.maximum(first, tl.minimum(whole_from, tl.cdiv(end, BM) * BM))
    whole_to = tl.maximum(whole_from, tl.minimum(whole_to, tl.cdiv(end, BM) * BM))
    for g in tl.range(0, H // Y):
        h = y * (H // Y) + g
        dk, dv = _dkv_queries(dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, after, b, h,
                              first, whole_from, T, window, N, H, BM, BN, TILE, X, True, WINDOWED, PRECISION)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, after, b, h,
                              whole_from, whole_to, T, window, N, H, BM, BN, TILE, X, False, WINDOWED, PRECISION)  # fmt: skip
        if WINDOWED:
            dk, dv = _dkv_queries(dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, after, b, h,
                                  whole_to, end, T, window, N, H, BM, BN, TILE, X, True, WINDOWED, PRECISION)  # fmt: skip
    place = ((b * T + n_S) * Y + y)[:, None] * X + tl.arange(0, X)[None, :]
    tl.store(dk_ptr + place, dk, mask=(n_S < T)[:, None])
    tl.store(dv_ptr + place, dv, mask=(n_S < T)[:, None])


# --- launches -----------------------------------------------------------------------------------------------------


def tiles_for(kernel: str, d: int, dtype: torch.dtype) -> Tiles:
    """Keys in tiles of one block, queries of the forward and of dq in tiles of one or two."""
    if dtype == torch.float32 or d > 128:
        return {"forward": Tiles(64, BLOCK, 4, 1), "dq": Tiles(64, BLOCK, 4, 1), "dkv": Tiles(32, BLOCK, 4, 1)}[kernel]
    return {"forward": Tiles(64, BLOCK, 4, 3), "dq": Tiles(64, BLOCK, 4, 2), "dkv": Tiles(64, BLOCK, 4, 2)}[kernel]


def forward(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o [B, T, H, X], lse [B, H, T], q', k' [B, T, Y, X], E [B, Y, N + 1, X] float64); f [B, T, Y, X] float32, contiguous."""
    (b, t, h, d), j, y = q.shape, k.shape[2], f.shape[2]
    bm, bn, warps, stages = tiles_for("forward", d, q.dtype)
    n = triton.cdiv(t, BLOCK)
    q_, k_ = torch.empty_like(q), torch.empty(b, t, y, d, device=k.device, dtype=k.dtype)
    total = torch.empty(b, y, n, d, device=q.device, dtype=torch.float32)
    _gate[(n, b * y)](
        q, k, f, q_, k_, total, t, n, H=h, J=j, Y=y, X=d, BLOCK=BLOCK, TILE=bm, num_warps=4
    )  # fmt: skip
    before = torch.zeros(b, y, n + 1, d, device=q.device, dtype=torch.float64)
    torch.cumsum(total.double(), 2, out=before[:, :, 1:])
    o = torch.empty_like(q)
    lse = torch.empty(b, h, t, device=q.device, dtype=torch.float32)
    _forward[(triton.cdiv(t, bm), b * h)](
        flat(q_, bm, d), flat(k_, bn, d), flat(v, bn, d), flat(o, bm, d), *_halves(before), lse, t, window or 0, n,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **_shared(q, j, y, window),
    )  # fmt: skip
    return o, lse, q_, k_, before


def backward(
    g_o: Tensor, q_: Tensor, k_: Tensor, v: Tensor, f: Tensor, o: Tensor, lse: Tensor, before: Tensor, *,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (q, k, v, f) in float32, from q' and k' of `forward`; those of k and v [B, T, Y, X], a head of gates each."""
    (b, t, h, d), j, y = q_.shape, v.shape[2], f.shape[2]
    shared, halves = _shared(q_, j, y, window), _halves(before)
    n = before.shape[2] - 1
    add = -row_products(g_o, o)
    dq = torch.empty(q_.shape, device=q_.device, dtype=torch.float32)
    dk, dv, df = (torch.empty(b, t, y, d, device=q_.device, dtype=torch.float32) for _ in range(3))
    tile = tiles_for("forward", d, q_.dtype).rows
    bm, bn, warps, stages = tiles_for("dkv", d, q_.dtype)
    _dkv[(n, b * y)](
        flat(q_, bm, d), flat(k_, bn, d), flat(v, bn, d), flat(g_o, bm, d), dk, dv, *halves, lse, add, t, window or 0, n,
        BM=bm, BN=bn, TILE=tile, num_warps=warps, num_stages=stages, **shared,
    )  # fmt: skip
    bm, bn, warps, stages = tiles_for("dq", d, q_.dtype)
    _dq[(triton.cdiv(t, bm), b * h)](
        flat(q_, bm, d), flat(k_, bn, d), flat(v, bn, d), flat(g_o, bm, d), dq, *halves, lse, add, t, window or 0, n,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **shared,
    )  # fmt: skip
    rest = torch.empty(b, y, n, d, device=q_.device, dtype=torch.float32)
    _ungate[(n, b * y)](
        q_, k_, dq, dk, f, df, rest, t, n, H=h, Y=y, X=d, BLOCK=BLOCK, TILE=tile, num_warps=4
    )  # fmt: skip
    later = (rest.flip(2).cumsum(2).flip(2) - rest).repeat_interleave(BLOCK, 2)[:, :, :t].transpose(1, 2)
    # a score in units of log 2 is 1 / ln 2 of itself, and so is the exponent of a gate
    return dq * LN2, dk * LN2, dv, (df + later) * LN2**2


def _shared(q: Tensor, kv_heads: int, gate_heads: int, window: int | None) -> dict[str, Any]:
    return {
        "H": q.shape[2], "J": kv_heads, "Y": gate_heads, "X": q.shape[3], "WINDOWED": window is not None,
        "PRECISION": precision(q.dtype),
    }  # fmt: skip


def _halves(before: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 numbers whose sum is the float64 one."""
    high = before.float()
    return high, (before - high).float()
