"""Triton kernels of wall attention, for NVIDIA GPUs from Ampere on (docs/explanation/kernels.md, "Wall attention").

B batch, T length, H query heads, J KV heads, Y gate heads (H, or J when tied), X head size, M queries of a tile, S its
keys. Units of log 2. P_t is the sum of a channel's log gates up to t, and a score is sum_x q_ix k_jx 2^(P_ix - P_jx). P
falls without end, so it is cut at blocks of `BLOCK` tokens: with E_b the sum up to the end of block b,

    q'_i = factor q_i 2^(P_i - E_b(i)-1),  k'_j = k_j 2^(E_b(j) - P_j),  score = sum_x q'_ix 2^(E_b(i)-1 - E_b(j))_x
    k'_jx.

q' and k' are no larger than q and k. The vector in the middle is the only thing that a tile of scores multiplies by; on
the diagonal it is a sum over BLOCK gates, so it stays within 2^(BLOCK g_max / ln 2) (2^80 for the mixer's 0.86) and
bf16 can represent it. `_gate` computes q' and k'. The three kernels in the middle are those of softmax attention with
that vector. `_ungate` computes the gradients of q, k and the gates: dP = q dq - k dk = q' dq' - k' dk', summed from the
end, since shifting P changes nothing. The sums of entire blocks come from the kernels in the middle, in float32; only
the part within a block is summed from dq' and dk' as they are written. No atomics: every number repeats bit for bit.

Products of n scores, 2 n X each: forward 2, dq 3, dk and dv 4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..device import HIDDEN, LN2, LOG2E, visible
from ..launcher import Tiles
from .op import BLOCK

BLOCKS_PER_SCAN = 32
"""Blocks whose gates are summed at once."""
CHANNELS = 32
"""Channels of a program of `_gate` or `_ungate`, so that all of a channel's numbers stay in registers."""

_LN2 = tl.constexpr(LN2)
_LOG2E = tl.constexpr(LOG2E)
_HIDDEN = tl.constexpr(HIDDEN)


@triton.jit
def _sums(f_ptr, b, y, t0, d_C, T, Y: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sums of one block's gates for a gate head, in units of log 2.

    Args:
        f_ptr: Contiguous natural log gates [B, T, Y, X].
        b: Batch row.
        y: Gate head.
        t0: First token of the block.
        d_C: Channels.
        T: Tokens.
        Y: constexpr, gate heads.
        X: constexpr, head size.
        BLOCK: constexpr, tokens of a block.

    Returns:
        (sum up to each token [BLOCK, C], sum of the block [C], offsets of the gates [BLOCK, C], mask of tokens that
        exist [BLOCK]).
    """
    t_S = t0 + tl.arange(0, BLOCK)
    inside = t_S < T
    gate_at = ((b * T + t_S) * Y + y)[:, None] * X + d_C[None, :]
    f = tl.load(f_ptr + gate_at, mask=inside[:, None], other=0.0) * _LOG2E
    return tl.cumsum(f, 0), tl.sum(f, 0), gate_at, inside


@triton.jit
def _gate(
    q_ptr, k_ptr, f_ptr, q_out, k_out, total_ptr, T, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store q' and k' and the block sums of the gates, for one block of tokens, one gate head and C channels.

    Grid: (N, B Y, X / C). Read: q [B, T, H, X], k [B, T, J, X], natural log gates f [B, T, Y, X]. Written: q_out [B, T,
    H, X], k_out [B, T, Y, X], total float32 [B, Y, N, X] in units of log 2. N is the number of blocks, FACTOR that of
    the scores in units of log 2.

    T: tokens. Constexprs: H query heads, J KV heads, Y gate heads, X head size, BLOCK tokens of a block, C channels of
    a program.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.
    """
    n = tl.program_id(0)
    b = tl.program_id(1) // Y
    y = tl.program_id(1) % Y
    d_C = tl.program_id(2) * C + tl.arange(0, C)
    local, total, gate_at, inside = _sums(f_ptr, b, y, n * BLOCK, d_C, T, Y, X, BLOCK)
    tl.store(total_ptr + ((b * Y + y) * N + n) * X + d_C, total)
    t_S = n * BLOCK + tl.arange(0, BLOCK)
    j = y // (Y // J)
    k = tl.load(k_ptr + ((b * T + t_S) * J + j)[:, None] * X + d_C[None, :], mask=inside[:, None], other=0.0)
    faded = k.to(tl.float32) * tl.exp2(total[None, :] - local)
    tl.store(k_out + gate_at, faded.to(k_out.dtype.element_ty), mask=inside[:, None])
    grown = tl.exp2(local) * FACTOR
    for g in tl.range(0, H // Y):
        at = ((b * T + t_S) * H + y * (H // Y) + g)[:, None] * X + d_C[None, :]
        q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
        tl.store(q_out + at, (q.to(tl.float32) * grown).to(q_out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _edges(total_ptr, hi_ptr, lo_ptr, N, X: tl.constexpr, C: tl.constexpr, BLOCKS_PER_SCAN: tl.constexpr):
    """Store the sums of all blocks before each block and before the end, in units of log 2.

    Grid: (B Y, X / C). Summed in float64 and stored as high and low float32 parts, hi and lo [B, Y, N + 1, X]. total:
    float32 [B, Y, N, X].
    """
    row = tl.program_id(0)
    d_C = tl.program_id(1) * C + tl.arange(0, C)
    first = row * (N + 1) * X + d_C
    tl.store(hi_ptr + first, tl.zeros([C], tl.float32))
    tl.store(lo_ptr + first, tl.zeros([C], tl.float32))
    before = tl.zeros([C], tl.float64)
    for start in tl.range(0, N, BLOCKS_PER_SCAN):
        n = start + tl.arange(0, BLOCKS_PER_SCAN)
        inside = (n < N)[:, None]
        total = tl.load(total_ptr + (row * N + n)[:, None] * X + d_C[None, :], mask=inside, other=0.0).to(tl.float64)
        edge = before[None, :] + tl.cumsum(total, 0)
        hi = edge.to(tl.float32)
        edge_at = (row * (N + 1) + n + 1)[:, None] * X + d_C[None, :]
        tl.store(hi_ptr + edge_at, hi, mask=inside)
        tl.store(lo_ptr + edge_at, (edge - hi.to(tl.float64)).to(tl.float32), mask=inside)
        before += tl.sum(total, 0)


@triton.jit
def _suffix_sums(
    of_q_ptr,
    of_k_ptr,
    later_ptr,
    N,
    H: tl.constexpr,
    Y: tl.constexpr,
    X: tl.constexpr,
    C: tl.constexpr,
    BLOCKS_PER_SCAN: tl.constexpr,
):
    """Store the sum over all blocks after each block of the gradients of P, float32 [B, Y, N, X].

    Grid: (B Y, X / C). Queries add (of_q, float32 [B, H, N, X], block sums of q' dq'), keys subtract (of_k, float32 [B,
    Y, N, X], block sums of k' dk'). Summed in float64, BLOCKS_PER_SCAN blocks at a time.
    """
    b = tl.program_id(0) // Y
    y = tl.program_id(0) % Y
    d_C = tl.program_id(1) * C + tl.arange(0, C)
    behind = tl.zeros([C], tl.float64)
    rounds = tl.cdiv(N, BLOCKS_PER_SCAN)
    for i in tl.range(0, rounds):
        n = (rounds - 1 - i) * BLOCKS_PER_SCAN + tl.arange(0, BLOCKS_PER_SCAN)
        inside = (n < N)[:, None]
        at = ((b * Y + y) * N + n)[:, None] * X + d_C[None, :]
        along = -tl.load(of_k_ptr + at, mask=inside, other=0.0).to(tl.float64)
        for g in tl.range(0, H // Y):
            of_head = ((b * H + y * (H // Y) + g) * N + n)[:, None] * X + d_C[None, :]
            along += tl.load(of_q_ptr + of_head, mask=inside, other=0.0).to(tl.float64)
        total = behind + tl.sum(along, 0)
        tl.store(later_ptr + at, (total[None, :] - tl.cumsum(along, 0)).to(tl.float32), mask=inside)
        behind = total


@triton.jit
def _ungate(
    q_ptr, k_ptr, dq_ptr, dk_ptr, dv_ptr, f_ptr, later_ptr, df_ptr, dk_out, dv_out, T, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Turn gradients of q' and k' into those of q, k and the log gates, for one block, one KV head and C channels.

    Grid: (N, B J, X / C). dq [B, T, H, X] is updated in place. dk and dv of the gate heads of a KV head [B, T, Y, X]
    are summed into dk_out and dv_out [B, T, J, X]; dv_out is written only when Y > J. df, float32 [B, T, Y, X], is
    written: the gradient of the natural log gates. later: float32 [B, Y, N, X] of `_suffix_sums`.

    T: tokens. Constexprs: H query heads, J KV heads, Y gate heads, X head size, BLOCK tokens of a block, C channels of
    a program.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.
    """
    n = tl.program_id(0)
    b = tl.program_id(1) // J
    j = tl.program_id(1) % J
    t_S = n * BLOCK + tl.arange(0, BLOCK)
    d_C = tl.program_id(2) * C + tl.arange(0, C)
    out = ((b * T + t_S) * J + j)[:, None] * X + d_C[None, :]
    dk_sum = tl.zeros([BLOCK, C], tl.float32)
    dv_sum = tl.zeros([BLOCK, C], tl.float32)
    for gate_head in tl.range(0, Y // J):
        y = j * (Y // J) + gate_head
        local, total, gate_at, inside = _sums(f_ptr, b, y, n * BLOCK, d_C, T, Y, X, BLOCK)
        k = tl.load(k_ptr + gate_at, mask=inside[:, None], other=0.0).to(tl.float32)
        dk = tl.load(dk_ptr + gate_at, mask=inside[:, None], other=0.0).to(tl.float32)
        along = -k * dk
        dk_sum += dk * tl.exp2(total[None, :] - local)
        if Y > J:
            dv_sum += tl.load(dv_ptr + gate_at, mask=inside[:, None], other=0.0).to(tl.float32)
        grown = tl.exp2(local) * FACTOR
        for g in tl.range(0, H // Y):
            at = ((b * T + t_S) * H + y * (H // Y) + g)[:, None] * X + d_C[None, :]
            q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
            dq = tl.load(dq_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
            along += q * dq
            tl.store(dq_ptr + at, (dq * grown).to(dq_ptr.dtype.element_ty), mask=inside[:, None])
        later = tl.load(later_ptr + ((b * Y + y) * N + n) * X + d_C)
        suffix_sum = (tl.sum(along, 0) + later)[None, :] - tl.cumsum(along, 0) + along
        tl.store(df_ptr + gate_at, suffix_sum, mask=inside[:, None])
    tl.store(dk_out + out, dk_sum.to(dk_out.dtype.element_ty), mask=(t_S < T)[:, None])
    if Y > J:
        tl.store(dv_out + out, dv_sum.to(dv_out.dtype.element_ty), mask=(t_S < T)[:, None])


@triton.jit
def _edge(hi_ptr, lo_ptr, row, n, X: tl.constexpr):
    """Return E before block n, [X], as high and low part; `row` is the offset of the gate head's edges."""
    at = (row + n) * X + tl.arange(0, X)
    return tl.load(hi_ptr + at), tl.load(lo_ptr + at)


@triton.jit
def _decay_between(hi_ptr, lo_ptr, row, hi, lo, n, N, X: tl.constexpr):
    """Return 2^(E - E before block n), [X], where E = hi + lo; for n beyond the last edge that of the last edge."""
    hi_n, lo_n = _edge(hi_ptr, lo_ptr, row, tl.minimum(n, N), X)
    return tl.exp2((hi - hi_n) + (lo - lo_n))


@triton.jit
def _forward_keys(
    acc, row_max, row_sum, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, start, stop, T, window, N,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys start <= n < stop, a block at a time, to the running softmax of a tile of queries.

    q holds q' of the positions p_M; b, y and j are batch row, gate head and KV head. k_desc and v_desc describe k' [B,
    T, Y X] and v [B, T, J X]. hi and lo [X] are the parts of E before the queries' block, `row` the offset of the gate
    head's edges in hi_ptr and lo_ptr. With MASKED the causal mask and the window apply, else all keys count as visible.

    Returns:
        (acc [M, X], row_max [M], row_sum [M]) with these keys included: sum of weights times values, largest score in
        units of log 2, sum of weights, relative to 2^row_max.
    """
    # loaded one step ahead, because the compiler would otherwise serialise the loads and the products
    rate = _decay_between(hi_ptr, lo_ptr, row, hi, lo, start // BN + 1, N, X)
    for n in tl.range(start, stop, BN):
        k = k_desc.load([b, n, y * X]).reshape(BN, X)
        s = tl.dot((q * rate[None, :]).to(k.dtype), k.T, input_precision=PRECISION)
        rate = _decay_between(hi_ptr, lo_ptr, row, hi, lo, n // BN + 2, N, X)
        if MASKED:
            s = tl.where(visible(p_M, n + tl.arange(0, BN), T, window, WINDOWED), s, _HIDDEN)
        higher = tl.maximum(row_max, tl.max(s, 1))
        shrink = tl.exp2(row_max - higher)
        p = tl.exp2(s - higher[:, None])
        row_sum = row_sum * shrink + tl.sum(p, 1)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        row_max = higher
    return acc, row_max, row_sum


@triton.jit
def _reach(m0, T, window, BM: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the range of keys that a tile of queries sees, and the part of it that needs no mask.

    Args:
        m0: Position of the tile's first query.
        T: Tokens.
        window: Attention window in keys; read only when WINDOWED.
        BM: constexpr, queries of a tile.
        BN: constexpr, keys of a tile.
        WINDOWED: constexpr bool, True with a window.

    Returns:
        (first, unmasked_from, unmasked_to, end), positions of keys, all but `end` multiples of BN. Tiles of keys from
        `first` up to `end` have a visible pair; those of unmasked_from <= n < unmasked_to are visible to all queries.
    """
    end = tl.minimum(m0 + BM, T)
    first = 0
    unmasked_from = 0
    if WINDOWED:
        first = tl.maximum(0, m0 - window + 1) // BN * BN
        unmasked_from = tl.maximum(first, tl.cdiv(tl.maximum(0, m0 + BM - window), BN) * BN)
        unmasked_from = tl.minimum(unmasked_from, tl.cdiv(end, BN) * BN)
    unmasked_to = tl.maximum(unmasked_from, tl.minimum(m0 + 1, T) // BN * BN)
    return first, unmasked_from, unmasked_to, end


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, o_desc, hi_ptr, lo_ptr, lse_ptr, T, window, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of one tile of queries of one head.

    Grid: (cdiv(T, BM), B H), the longest rows first. Descriptors: q' and o [B, T, H X], k' [B, T, Y X], v [B, T, J X].
    hi_ptr and lo_ptr: parts of E, float32 [B, Y, N + 1, X] in units of log 2. lse_ptr: float32 [B, H, T] in units of
    log 2, written. N: blocks of gates; BN is one block.

    T: tokens. window: attention window in keys, read only when WINDOWED. Constexprs: H query heads, J KV heads, Y gate
    heads, X head size, BM and BN queries and keys of a tile.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.
    """
    # the longest rows first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    y = h // (H // Y)
    j = h // (H // J)
    p_M = m0 + tl.arange(0, BM)
    row = (b * Y + y) * (N + 1)
    hi, lo = _edge(hi_ptr, lo_ptr, row, m0 // BN, X)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    acc = tl.zeros([BM, X], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, end = _reach(m0, T, window, BM, BN, WINDOWED)
    if WINDOWED:
        acc, row_max, row_sum = _forward_keys(
            acc, row_max, row_sum, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, first, unmasked_from, T, window, N,
            BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    acc, row_max, row_sum = _forward_keys(
        acc, row_max, row_sum, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, unmasked_from, unmasked_to, T, window, N,
        BN, X, False, WINDOWED, PRECISION)  # fmt: skip
    acc, row_max, row_sum = _forward_keys(
        acc, row_max, row_sum, q, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, unmasked_to, end, T, window, N,
        BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    tl.store(lse_ptr + (b * H + h) * T + p_M, row_max + tl.log2(row_sum), mask=p_M < T)
    o_desc.store([b, m0, h * X], (acc / row_sum[:, None]).to(o_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dq_keys(
    dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, start, stop, T, window, N,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dq' [M, X] of a tile of queries with the keys start <= n < stop added, one block of BN at a time.

    q and g hold q' and the output's gradient [M, X] of the positions p_M; lse and add (-g·o) are [M]. k_desc and v_desc
    describe k' [B, T, Y X] and v [B, T, J X]. hi and lo [X] are the parts of E before the queries' block, `row` the
    offset of the gate head's edges in hi_ptr and lo_ptr. dq' still lacks the factor ln 2.
    """
    for n in tl.range(start, stop, BN):
        k = k_desc.load([b, n, y * X]).reshape(BN, X)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        rate = _decay_between(hi_ptr, lo_ptr, row, hi, lo, n // BN + 1, N, X)
        # accumulators start at the terms that would be added
        start_MS = tl.broadcast_to(-lse[:, None], [q.shape[0], BN])
        s = tl.dot((q * rate[None, :]).to(k.dtype), k.T, start_MS, input_precision=PRECISION)
        if MASKED:
            s = tl.where(visible(p_M, n + tl.arange(0, BN), T, window, WINDOWED), s, _HIDDEN)
        p = tl.exp2(s)
        add_MS = tl.broadcast_to(add[:, None], [q.shape[0], BN])
        da = p * tl.dot(g, v.T, add_MS, input_precision=PRECISION)
        dq += tl.dot(da.to(k.dtype), k, input_precision=PRECISION) * rate[None, :]
    return dq


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, along_ptr, T, window, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dq' of one tile of queries of one head, and per channel the tile's sum of q' dq'.

    Grid: (cdiv(T, BM), B H). Descriptors: q', g and dq' [B, T, H X], k' [B, T, Y X], v [B, T, J X]. hi_ptr and lo_ptr:
    parts of E, float32 [B, Y, N + 1, X]. lse and add (-g·o) are float32 [B, H, T]. along_ptr: float32 [B, H, N, X],
    written.

    T: tokens. window: attention window in keys, read only when WINDOWED. Constexprs: H query heads, J KV heads, Y gate
    heads, X head size, BM and BN queries and keys of a tile.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.
    """
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    y = h // (H // Y)
    j = h // (H // J)
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    row = (b * Y + y) * (N + 1)
    hi, lo = _edge(hi_ptr, lo_ptr, row, m0 // BN, X)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    at = (b * H + h) * T + p_M
    lse = tl.load(lse_ptr + at, mask=inside, other=-_HIDDEN)
    add = tl.load(add_ptr + at, mask=inside, other=0.0)
    dq = tl.zeros([BM, X], tl.float32)
    first, unmasked_from, unmasked_to, end = _reach(m0, T, window, BM, BN, WINDOWED)
    if WINDOWED:
        dq = _dq_keys(dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, first, unmasked_from,
                      T, window, N, BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    dq = _dq_keys(dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, unmasked_from, unmasked_to,
                  T, window, N, BN, X, False, WINDOWED, PRECISION)  # fmt: skip
    dq = _dq_keys(dq, q, g, lse, add, p_M, k_desc, v_desc, hi_ptr, lo_ptr, row, hi, lo, b, y, j, unmasked_to, end,
                  T, window, N, BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    dq *= _LN2
    tl.store(along_ptr + ((b * H + h) * N + m0 // BN) * X + tl.arange(0, X), tl.sum(q.to(tl.float32) * dq, 0))
    dq_desc.store([b, m0, h * X], dq.to(dq_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dkv_queries(
    dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, hi, lo, b, h, start, stop, T, window, N,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dk' and dv [BN, X] of a block of keys with the queries of one head added, BM at a time.

    The queries are start <= m < stop of head h; k and v hold k' of the keys n_S and their values. q_desc and g_desc
    describe q' and the output's gradient [B, T, H X]. lse and add (-g·o) are float32 [B, H, T]. hi and lo [X] are the
    parts of E at the end of the keys' block, `row` the offset of the gate head's edges in hi_ptr and lo_ptr. dk' still
    lacks the factor ln 2.
    """
    for m in tl.range(start, stop, BM):
        i_M = m + tl.arange(0, BM)
        inside = i_M < T
        at = (b * H + h) * T + i_M
        q = q_desc.load([b, m, h * X]).reshape(BM, X)
        g = g_desc.load([b, m, h * X]).reshape(BM, X)
        lse = tl.load(lse_ptr + at, mask=inside, other=-_HIDDEN)
        add = tl.load(add_ptr + at, mask=inside, other=0.0)
        hi_m, lo_m = _edge(hi_ptr, lo_ptr, row, m // BN, X)
        faded = (q * tl.exp2((hi_m - hi) + (lo_m - lo))[None, :]).to(k.dtype)
        start_SM = tl.broadcast_to(-lse[None, :], [k.shape[0], BM])
        s_SM = tl.dot(k, faded.T, start_SM, input_precision=PRECISION)
        if MASKED:
            s_SM = tl.where(visible(i_M, n_S, T, window, WINDOWED).T, s_SM, _HIDDEN)
        p_SM = tl.exp2(s_SM)
        dv = tl.dot(p_SM.to(g.dtype), g, dv, input_precision=PRECISION)
        add_SM = tl.broadcast_to(add[None, :], [k.shape[0], BM])
        da = p_SM * tl.dot(v, g.T, add_SM, input_precision=PRECISION)
        dk = tl.dot(da.to(k.dtype), faded, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, along_ptr, T, window, N,
    H: tl.constexpr, J: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dk' and dv of one block of keys of one gate head, and per channel the block's sum of k' dk'.

    Grid: (N, B Y), summed over the H / Y query heads of the gate head. Descriptors: q' and g [B, T, H X], k', dk' and
    dv [B, T, Y X], v [B, T, J X]. hi_ptr and lo_ptr: parts of E, float32 [B, Y, N + 1, X]. lse and add (-g·o) are
    float32 [B, H, T]. along_ptr: float32 [B, Y, N, X], written.

    T: tokens. window: attention window in keys, read only when WINDOWED. Constexprs: H query heads, J KV heads, Y gate
    heads, X head size, BM and BN queries and keys of a tile.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.
    """
    n0 = tl.program_id(0) * BN
    b = tl.program_id(1) // Y
    y = tl.program_id(1) % Y
    j = y // (Y // J)
    n_S = n0 + tl.arange(0, BN)
    row = (b * Y + y) * (N + 1)
    hi, lo = _edge(hi_ptr, lo_ptr, row, tl.program_id(0) + 1, X)
    k = k_desc.load([b, n0, y * X]).reshape(BN, X)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    first = n0 // BM * BM
    end = T
    unmasked_from = tl.cdiv(n0 + BN - 1, BM) * BM
    unmasked_to = T
    if WINDOWED:
        end = tl.minimum(T, n0 + BN - 1 + window)
        unmasked_to = (n0 + window) // BM * BM
    unmasked_from = tl.maximum(first, tl.minimum(unmasked_from, tl.cdiv(end, BM) * BM))
    unmasked_to = tl.maximum(unmasked_from, tl.minimum(unmasked_to, tl.cdiv(end, BM) * BM))
    for g in tl.range(0, H // Y):
        h = y * (H // Y) + g
        dk, dv = _dkv_queries(dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, hi, lo, b, h,
                              first, unmasked_from, T, window, N, H, BM, BN, X, True, WINDOWED, PRECISION)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, hi, lo, b, h,
                              unmasked_from, unmasked_to, T, window, N, H, BM, BN, X, False, WINDOWED, PRECISION)  # fmt: skip
        if WINDOWED:
            dk, dv = _dkv_queries(dk, dv, k, v, n_S, q_desc, g_desc, hi_ptr, lo_ptr, lse_ptr, add_ptr, row, hi, lo, b, h,
                                  unmasked_to, end, T, window, N, H, BM, BN, X, True, WINDOWED, PRECISION)  # fmt: skip
    dk *= _LN2
    at = ((b * Y + y) * N + tl.program_id(0)) * X + tl.arange(0, X)
    tl.store(along_ptr + at, tl.sum(k.to(tl.float32) * dk, 0))
    dk_desc.store([b, n0, y * X], dk.to(dk_desc.dtype).reshape(1, BN, X))
    dv_desc.store([b, n0, y * X], dv.to(dv_desc.dtype).reshape(1, BN, X))


# --- launches -----------------------------------------------------------------------------------------------------


def tiles_for(kernel: str, d: int, dtype: torch.dtype) -> Tiles:
    """Return the launch configuration of a kernel, "forward", "dq" or "dkv", for a head size and dtype.

    The result is (queries, keys, warps, stages), with 4 warps and 3 stages for "forward", 2 for the others, 1 for
    float32 or heads above 128. A tile of keys is one block of gates, 64. So is a tile of queries, except for float32 or
    heads above 128 in "dkv", where it is half of one.
    """
    if launcher.needs_small_tiles(d, dtype):
        rows, stages = {"forward": (BLOCK, 1), "dq": (BLOCK, 1), "dkv": (BLOCK // 2, 1)}[kernel]
    else:
        rows, stages = {"forward": (BLOCK, 3), "dq": (BLOCK, 2), "dkv": (BLOCK, 2)}[kernel]
    return Tiles(rows, BLOCK, 4, stages)


def apply_gates(q: Tensor, k: Tensor, f: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (q' [B, T, H, X], k' [B, T, Y, X], block sums of the gates [B, Y, N, X], E [2, B, Y, N + 1, X]).

    q' and k' are in the inputs' dtypes, the others float32 in units of log 2; N is the number of blocks of 64 tokens. E
    holds the high and the low part of the sums of all blocks before each block and before the end.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.

    Args:
        q: Contiguous queries [B, T, H, X].
        k: Contiguous keys [B, T, J, X].
        f: Contiguous natural log gates, float32 [B, T, Y, X].
        factor: Factor of the products that gives units of log 2; q' includes it.
    """
    (b, t, h, d), j, y = q.shape, k.shape[2], f.shape[2]
    n = triton.cdiv(t, BLOCK)
    q_, k_ = torch.empty_like(q), torch.empty(b, t, y, d, device=k.device, dtype=k.dtype)
    total = torch.empty(b, y, n, d, device=q.device, dtype=torch.float32)
    c = min(CHANNELS, d)
    _gate[(n, b * y, d // c)](
        q, k, f, q_, k_, total, t, n, H=h, J=j, Y=y, X=d, BLOCK=BLOCK, FACTOR=factor, C=c, num_warps=4
    )  # fmt: skip
    edges = torch.empty(2, b, y, n + 1, d, device=q.device, dtype=torch.float32)
    _edges[(b * y, d // c)](total, edges[0], edges[1], n, X=d, C=c, BLOCKS_PER_SCAN=BLOCKS_PER_SCAN, num_warps=4)
    return q_, k_, total, edges


def forward(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (o [B, T, H, X], lse float32 [B, H, T] in units of log 2, q', k' [B, T, Y, X], E).

    E is float32 [2, B, Y, N + 1, X], the high and the low part of the sums before each block.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.

    Args:
        q: Queries [B, T, H, X], contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        f: Natural log gates, float32 [B, T, Y, X].
        factor: Factor of the products that gives units of log 2.
        window: Attention window in keys, or None.
    """
    q_, k_, total, edges = apply_gates(q, k, f, factor)
    tiles, sizes = tiles_for("forward", q.shape[3], q.dtype), (q.shape[1], window or 0, total.shape[2])
    constexprs = _constexprs(q, k.shape[2], f.shape[2], window)
    o, lse = launcher.forward(_forward, tiles, q_, k_, v, (edges[0], edges[1]), sizes, constexprs)
    return o, lse, q_, k_, edges


def backward(
    g_o: Tensor, q_: Tensor, k_: Tensor, v: Tensor, f: Tensor, o: Tensor, lse: Tensor, edges: Tensor, *,
    factor: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q, k, v) in their dtypes and of the natural log gates f in float32.

    Args:
        g_o: Gradient of the output, contiguous like all inputs.
        q_: q' of `forward`.
        k_: k' of `forward`.
        v: Values [B, T, J, X].
        f: Natural log gates, float32 [B, T, Y, X].
        o: Output of `forward`.
        lse: Log-sum-exp of `forward`.
        edges: E of `forward`.
        factor: Factor of the products that gives units of log 2.
        window: Attention window in keys, or None.
    """
    (b, t, h, d), j, y = q_.shape, v.shape[2], f.shape[2]
    constexprs, n = _constexprs(q_, j, y, window), edges.shape[3] - 1
    add = -launcher.row_products(g_o, o)
    dq, dk, dv, df = (torch.empty_like(x) for x in (q_, k_, k_, f))
    of_q, of_k = (torch.empty(b, heads, n, d, device=q_.device, dtype=torch.float32) for heads in (h, y))
    kernel_args = (edges[0], edges[1], lse, add, of_k, t, window or 0, n)
    launcher.keys_backward(_dkv, tiles_for("dkv", d, q_.dtype), q_, k_, v, g_o, dk, dv, kernel_args, constexprs)
    kernel_args = (edges[0], edges[1], lse, add, of_q, t, window or 0, n)
    launcher.queries_backward(_dq, tiles_for("dq", d, q_.dtype), q_, k_, v, g_o, dq, kernel_args, constexprs)
    c, later = min(CHANNELS, d), torch.empty_like(of_k)
    _suffix_sums[(b * y, d // c)](
        of_q, of_k, later, n, H=h, Y=y, X=d, C=c, BLOCKS_PER_SCAN=BLOCKS_PER_SCAN, num_warps=4
    )
    dk_, dv_ = (dk, dv) if y == j else (torch.empty_like(v) for _ in range(2))
    _ungate[(n, b * j, d // c)](
        q_, k_, dq, dk, dv, f, later, df, dk_, dv_, t, n, H=h, J=j, Y=y, X=d, BLOCK=BLOCK, FACTOR=factor, C=c, num_warps=4
    )  # fmt: skip
    return dq, dk_, dv_, df


def _constexprs(q: Tensor, kv_heads: int, gate_heads: int, window: int | None) -> dict[str, Any]:
    """Return the constexprs of the three attention kernels by name: H, J, Y, X, WINDOWED and PRECISION.

    Args:
        q: Queries [B, T, H, X].
        kv_heads: KV heads J.
        gate_heads: Gate heads Y.
        window: Attention window in keys, or None.
    """
    return {
        "H": q.shape[2], "J": kv_heads, "Y": gate_heads, "X": q.shape[3], "WINDOWED": window is not None,
        "PRECISION": launcher.precision(q.dtype),
    }  # fmt: skip
