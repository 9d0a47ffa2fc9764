"""Triton kernels of contextual positions, for NVIDIA GPUs from Ampere on (docs/explanation/kernels.md, "Contextual positions").

B batch, T length, H query heads, J KV heads, G = H / J, X head size, P positions, M queries of a tile, S its keys.
Units of log 2: s = factor q·k, gate = 1 / (1 + 2^-s), weight = 2^(s + z(p) - lse). p sums the gates from the key to the
query, at most P - 1. z(p) is interpolated between the row's numbers z of the whole positions around it. So a row is
walked from its query back to its first key with `gate_count`, the sum so far. Once all rows of a tile have reached P -
1, every further key has the last position, and the rest is softmax attention with one number per row.

Backward, with dl = weight (g.v - g.o) and slope = z above p less z below it, both of the keys before the last position
alone:
    dp = dl slope,  ds = dl + gate (1 - gate) (sum of dp over the key and all farther ones),
so the pass for queries walks a row twice: first as far as gates are counted, for the sum of its dp, then all of it. The
pass for keys goes the other way, and needs `gate_count` and the remaining sum at each tile of keys. They are stored for
`SEGMENT_TOKENS` keys at a time, so that memory grows linearly with T; each further segment repeats the row walks of the
pass for queries. No atomics: every number repeats bit for bit, and every kernel multiplies q by k in the same order, so
that all of them see the same positions.

Products of n scores, 2 n X each: forward 2, dq 3 and where gates are counted 2 more, dk and dv 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..device import LN2, bounds, online_softmax_step, query_bounds, visible
from ..launcher import Tiles

SEGMENT_TOKENS = 4096
"""Keys whose row states are stored at a time in the backward."""

_LN2 = tl.constexpr(LN2)


@triton.jit
def _scores(
    q, k_desc, p_M, b, j, n, T, window,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the keys, scores and visible pairs of the tile of keys from position n on.

    q holds the queries [M, X] of the positions p_M; b and j are batch row and KV head; k_desc describes keys [B, T, J
    X]. With MASKED the causal mask and the window apply, else all pairs count as visible.

    Returns:
        (k [BN, X], scores float32 [M, BN] in units of log 2, not masked, bool [M, BN], True for visible pairs).
    """
    k = k_desc.load([b, n, j * X]).reshape(BN, X)
    s = tl.dot(q, k.T, input_precision=PRECISION) * FACTOR
    seen = tl.full(s.shape, True, tl.int1)
    if MASKED:
        seen = visible(p_M, n + tl.arange(0, BN), T, window, WINDOWED)
    return k, s, seen


@triton.jit
def _gates(s, seen):
    """Return the sigmoid of scores in units of log 2, 0 for hidden pairs."""
    return tl.where(seen, 1.0 / (1.0 + tl.exp2(-s)), 0.0)


@triton.jit
def _positions(z_ptr, gate_count, gate, P: tl.constexpr):
    """Return the contextual positions of a tile's pairs, their position terms and slopes.

    Args:
        z_ptr: Pointers [M] to rows of P numbers, float32 in units of log 2.
        gate_count: float32 [M], sum of the gates of all nearer tiles.
        gate: float32 [M, S], gates of the tile.
        P: constexpr, positions.

    Returns:
        (position before the cap at P - 1, z at the capped position in units of log 2, slope of z there per position, 0
        beyond the cap), each float32 [M, S].
    """
    beyond = gate_count[:, None] + tl.cumsum(gate, 1, reverse=True)
    p = tl.minimum(beyond, P - 1.0)
    below = tl.floor(p)
    low = tl.load(z_ptr[:, None] + below.to(tl.int32))
    high = tl.load(z_ptr[:, None] + tl.ceil(p).to(tl.int32))
    return beyond, low + (p - below) * (high - low), tl.where(beyond <= P - 1.0, high - low, 0.0)


@triton.jit
def _gate_gradients(dp, gate, remaining):
    """Return the share of ds that comes through the gates, [M, S].

    It is gate (1 - gate) times the sum of dp over the key and all farther ones, times ln 2, as scores are in units of
    log 2.

    Args:
        dp: float32 [M, S], gradient of the positions.
        gate: float32 [M, S].
        remaining: float32 [M], sum of dp over the tile and all farther keys.
    """
    farther = remaining[:, None] - tl.cumsum(dp, 1, reverse=True) + dp
    return gate * (1.0 - gate) * farther * _LN2


@triton.jit
def _forward_keys(
    acc, row_max, row_sum, gate_count, q, z_ptr, z_last, inside, p_M, k_desc, v_desc, b, j, start, stop, T, window,
    P: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys stop - 1, ..., start, nearest first, to the running softmax of a tile of queries.

    q holds the queries of the positions p_M; z_ptr points at their rows of P numbers, z_last [M] is the last of each;
    `inside` masks queries that exist. Gates are no longer counted once all rows have reached position P - 1. start and
    stop count tiles. b and j are batch row and KV head; k_desc and v_desc describe keys and values [B, T, J X]. With
    MASKED the causal mask and the window (in keys, read only when WINDOWED) apply, else all pairs count as visible.
    FACTOR brings q·k to units of log 2.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query.

    Returns:
        (acc [M, X], row_max [M], row_sum [M], gate_count [M]) with these tiles included: the sums of
        `online_softmax_step`, and the sum of the gates so far.
    """
    for step in tl.range(0, stop - start):
        n = (stop - 1 - step) * BN
        _k, s, seen = _scores(q, k_desc, p_M, b, j, n, T, window, BN, X, MASKED, WINDOWED, PRECISION, FACTOR)
        a = s + z_last[:, None]
        if tl.min(tl.where(inside, gate_count, P), 0) < P - 1:
            gate = _gates(s, seen)
            _beyond, z, _slope = _positions(z_ptr, gate_count, gate, P)
            a = s + z
            gate_count += tl.sum(gate, 1)
        if MASKED:
            a = tl.where(seen, a, float("-inf"))
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc, row_max, row_sum = online_softmax_step(acc, row_max, row_sum, a, v, PRECISION)
    return acc, row_max, row_sum, gate_count


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, o_desc, z_ptr, lse_ptr, T, window,
    P: tl.constexpr, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of one tile of queries of one head.

    Grid: (cdiv(T, BM), B H), the longest rows first. Descriptors: q and o [B, T, H X], k and v [B, T, J X]. z_ptr:
    float32 [B, H, T, P] in units of log 2. lse_ptr: float32 [B, H, T] in units of log 2, written. FACTOR: constexpr,
    factor of q·k.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query.
    """
    # the longest rows first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    at = (b * H + h) * T + p_M
    # rows beyond the last token read the last row's numbers, to stay inside the tensor
    row_ptr = z_ptr + ((b * H + h).to(tl.int64) * T + tl.minimum(p_M, T - 1)) * P
    z_last = tl.load(row_ptr + P - 1)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    acc = tl.zeros([BM, X], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    gate_count = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    acc, row_max, row_sum, gate_count = _forward_keys(
        acc, row_max, row_sum, gate_count, q, row_ptr, z_last, inside, p_M, k_desc, v_desc, b, j, unmasked_to, last, T, window,
        P, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    acc, row_max, row_sum, gate_count = _forward_keys(
        acc, row_max, row_sum, gate_count, q, row_ptr, z_last, inside, p_M, k_desc, v_desc, b, j, unmasked_from, unmasked_to, T, window,
        P, BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    if WINDOWED:
        acc, row_max, row_sum, gate_count = _forward_keys(
            acc, row_max, row_sum, gate_count, q, row_ptr, z_last, inside, p_M, k_desc, v_desc, b, j, first, unmasked_from, T, window,
            P, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    # rows beyond the last token may see no key
    row_sum = tl.where(inside, row_sum, 1.0)
    tl.store(lse_ptr + at, row_max + tl.log2(row_sum), mask=inside)
    o_desc.store([b, m0, h * X], (acc / row_sum[:, None]).to(o_desc.dtype).reshape(1, BM, X))


@triton.jit
def _sum_position_gradients(
    q, g, z_ptr, lse, delta, inside, p_M, k_desc, v_desc, b, j, first, last, T, window,
    P: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the sum of dp over each row's keys, float32 [M].

    Tiles of keys last - 1, ..., first are walked until every row of the tile has reached the last position. g is the
    output's gradient [M, X]; lse and delta (g·o) are the rows' statistics [M]; z_ptr points at the rows of P numbers.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query. ds and dp are the gradients of scores and positions.
    """
    gate_count = tl.zeros(lse.shape, tl.float32)
    total_dp = tl.zeros(lse.shape, tl.float32)
    tile = last - 1
    least = 0.0
    while (tile >= first) & (least < P - 1):
        n = tile * BN
        _k, s, seen = _scores(q, k_desc, p_M, b, j, n, T, window, BN, X, True, WINDOWED, PRECISION, FACTOR)
        gate = _gates(s, seen)
        _beyond, z, slope = _positions(z_ptr, gate_count, gate, P)
        weight = tl.where(seen, tl.exp2(s + z - lse[:, None]), 0.0)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        dl = weight * (tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None])
        total_dp += tl.sum(dl * slope, 1)
        gate_count += tl.sum(gate, 1)
        least = tl.min(tl.where(inside, gate_count, P), 0)
        tile -= 1
    return total_dp


@triton.jit
def _dq_keys(
    dq, dz, rest, gate_count, remaining, q, g, z_ptr, z_last, lse, delta, inside, p_M, k_desc, v_desc, gate_count_ptr, remaining_ptr, at, b, j,
    start, stop, T, window, low, high, stride,
    P: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys stop - 1, ..., start, nearest first, to dq and dz of a tile of queries.

    Also stores `gate_count` and `remaining` before each tile low <= tile < high, at gate_count_ptr and remaining_ptr +
    (tile - low) stride + at; tiles outside of start to stop keep what they held. Without LEARNS only these are
    computed, not dq and dz. q and g hold the queries and the output's gradient [M, X], lse and delta (g·o) are [M]. dq
    lacks the factor ln 2 FACTOR, dz ln 2. z_ptr points at the rows' P numbers, z_last [M] is the last of each, `inside`
    masks queries that exist, p_M are their positions. b and j are batch row and KV head; k_desc and v_desc describe
    keys and values [B, T, J X]. With MASKED the causal mask and the window (in keys, read only when WINDOWED) apply,
    else all pairs count as visible.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query. ds and dp are the gradients of scores and positions.

    Returns:
        (dq [M, X], dz [M, BP], far_sum [M], sum of ds over tiles where all keys have the last position, gate_count [M],
        remaining [M], sum of dp over the keys still to come).
    """
    for step in tl.range(0, stop - start):
        tile = stop - 1 - step
        n = tile * BN
        if (tile >= low) & (tile < high):
            tl.store(gate_count_ptr + (tile - low).to(tl.int64) * stride + at, gate_count, mask=inside)
            tl.store(remaining_ptr + (tile - low).to(tl.int64) * stride + at, remaining, mask=inside)
        counts = tl.min(tl.where(inside, gate_count, P), 0) < P - 1
        if LEARNS or counts:
            k, s, seen = _scores(q, k_desc, p_M, b, j, n, T, window, BN, X, MASKED, WINDOWED, PRECISION, FACTOR)
            v = v_desc.load([b, n, j * X]).reshape(BN, X)
            dweight = tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None]
            ds = tl.zeros(s.shape, tl.float32)
            if counts:
                gate = _gates(s, seen)
                beyond, z, slope = _positions(z_ptr, gate_count, gate, P)
                dl = tl.where(seen, tl.exp2(s + z - lse[:, None]), 0.0) * dweight
                dp = dl * slope
                if LEARNS:
                    ds = dl + _gate_gradients(dp, gate, remaining)
                    p = tl.minimum(beyond, P - 1.0)
                    first = tl.min(tl.min(tl.where(seen, tl.floor(p), P), 1), 0).to(tl.int32)
                    behind = tl.max(tl.max(tl.where(seen, tl.ceil(p), -1.0), 1), 0).to(tl.int32) + 1
                    for position in tl.range(first, behind):
                        share = tl.maximum(1.0 - tl.abs(p - position), 0.0)
                        dz += tl.where((tl.arange(0, BP) == position)[None, :], tl.sum(dl * share, 1)[:, None], 0.0)
                remaining -= tl.sum(dp, 1)
                gate_count += tl.sum(gate, 1)
            else:
                weight = tl.exp2(s + z_last[:, None] - lse[:, None])
                if MASKED:
                    weight = tl.where(seen, weight, 0.0)
                ds = weight * dweight
                rest += tl.sum(ds, 1)
            if LEARNS:
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dz, rest, gate_count, remaining


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, z_ptr, lse_ptr, delta_ptr, dz_ptr, gate_count_ptr, remaining_ptr, T, window, low, high, stride,
    P: tl.constexpr, BP: tl.constexpr, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """Store dq and dz of one tile of queries, and the row states that the pass for keys needs.

    Grid: (cdiv(T, BM), B H). Descriptors: q, g and dq [B, T, H X], k and v [B, T, J X]. With LEARNS it writes dq,
    without its part through z, and dz, float32 [B, H, T, P], the gradient by z in units of log 2. In every case it
    writes `gate_count`, the sum of the gates of all keys nearer than a key tile, and `remaining`, the sum of dp over
    the tile and all farther keys. Both are written at the key tiles low <= tile < high that this tile of queries sees:
    float32 [high - low, B, H, T], whose tiles are `stride` elements apart; the rest stays as it was. z is float32 [B,
    H, T, P] in units of log 2; lse and delta (g·o) are float32 [B, H, T]. BP: constexpr, P rounded up to a power of
    two.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query. ds and dp are the gradients of scores and positions.
    """
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    at = (b * H + h) * T + p_M
    row = ((b * H + h).to(tl.int64) * T + tl.minimum(p_M, T - 1)) * P
    z_last = tl.load(z_ptr + row + P - 1)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
    dq = tl.zeros([BM, X], tl.float32)
    dz = tl.zeros([BM, BP], tl.float32)
    rest = tl.zeros([BM], tl.float32)
    gate_count = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    remaining = _sum_position_gradients(
        q, g, z_ptr + row, lse, delta, inside, p_M, k_desc, v_desc, b, j, first, last, T, window,
        P, BN, X, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    dq, dz, rest, gate_count, remaining = _dq_keys(
        dq, dz, rest, gate_count, remaining, q, g, z_ptr + row, z_last, lse, delta, inside, p_M, k_desc, v_desc, gate_count_ptr, remaining_ptr, at, b, j,
        unmasked_to, last, T, window, low, high, stride, P, BP, BN, X, True, WINDOWED, PRECISION, FACTOR, LEARNS)  # fmt: skip
    dq, dz, rest, gate_count, remaining = _dq_keys(
        dq, dz, rest, gate_count, remaining, q, g, z_ptr + row, z_last, lse, delta, inside, p_M, k_desc, v_desc, gate_count_ptr, remaining_ptr, at, b, j,
        unmasked_from, unmasked_to, T, window, low, high, stride, P, BP, BN, X, False, WINDOWED, PRECISION, FACTOR, LEARNS)  # fmt: skip
    if WINDOWED:
        dq, dz, rest, gate_count, remaining = _dq_keys(
            dq, dz, rest, gate_count, remaining, q, g, z_ptr + row, z_last, lse, delta, inside, p_M, k_desc, v_desc, gate_count_ptr, remaining_ptr, at, b, j,
            first, unmasked_from, T, window, low, high, stride, P, BP, BN, X, True, WINDOWED, PRECISION, FACTOR, LEARNS)  # fmt: skip
    if LEARNS:
        dq_desc.store([b, m0, h * X], (dq * (_LN2 * FACTOR)).to(dq_desc.dtype).reshape(1, BM, X))
        of_P = tl.arange(0, BP)
        dz += tl.where((of_P == P - 1)[None, :], rest[:, None], 0.0)
        tl.store(dz_ptr + row[:, None] + of_P[None, :], dz * _LN2, mask=inside[:, None] & (of_P < P)[None, :])


@triton.jit
def _dkv_queries(
    dk, dv, k_desc, v, q_desc, g_desc, z_ptr, lse_ptr, delta_ptr, gate_count_ptr, remaining_ptr, b, h, j, n0, start, stop, T, window,
    P: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return dk and dv [BN, X] of a tile of keys with the queries of one head added, BM at a time.

    The queries are start <= m < stop, the keys n0 <= n < n0 + BN of KV head j; v holds their values. q_desc and g_desc
    describe queries and the output's gradient [B, T, H X]. z_ptr is float32 [B, H, T, P] in units of log 2; lse and
    delta (g·o) are float32 [B, H, T]. gate_count_ptr and remaining_ptr point at what `_dq` stored for this tile, [B, H,
    T]: the sum of the gates between tile and query, and the gradient still to reach earlier gates. With MASKED hidden
    pairs are masked. dk still lacks the factor ln 2 FACTOR.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query. ds and dp are the gradients of scores and positions.
    """
    for m in tl.range(start, stop, BM):
        p_M = m + tl.arange(0, BM)
        inside = p_M < T
        at = (b * H + h) * T + p_M
        row_ptr = z_ptr + ((b * H + h).to(tl.int64) * T + tl.minimum(p_M, T - 1)) * P
        q = q_desc.load([b, m, h * X]).reshape(BM, X)
        g = g_desc.load([b, m, h * X]).reshape(BM, X)
        lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        gate_count = tl.load(gate_count_ptr + at, mask=inside, other=P)
        _k, s, seen = _scores(q, k_desc, p_M, b, j, n0, T, window, BN, X, MASKED, WINDOWED, PRECISION, FACTOR)
        if MASKED:
            seen = seen & inside[:, None]
        dweight = tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None]
        if tl.min(gate_count, 0) < P - 1:
            remaining = tl.load(remaining_ptr + at, mask=inside, other=0.0)
            gate = _gates(s, seen)
            _beyond, z, slope = _positions(row_ptr, gate_count, gate, P)
            weight = tl.where(seen, tl.exp2(s + z - lse[:, None]), 0.0)
            dl = weight * dweight
            dp = dl * slope
            ds = dl + _gate_gradients(dp, gate, remaining)
        else:
            # every query is at the last position: z is constant, and gates get no gradient
            weight = tl.exp2(s + tl.load(row_ptr + P - 1)[:, None] - lse[:, None])
            if MASKED:
                weight = tl.where(seen, weight, 0.0)
            ds = weight * dweight
        dv = tl.dot(weight.to(g.dtype).T, g, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, z_ptr, lse_ptr, delta_ptr, gate_count_ptr, remaining_ptr, T, window, low, stride,
    P: tl.constexpr, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile of keys of one KV head, summed over its G query heads.

    Grid: (tiles of the segment, B J); program 0 takes the key tile `low`. Descriptors: q and g [B, T, H X], k, v, dk
    and dv [B, T, J X]. gate_count_ptr and remaining_ptr hold the row states of `_dq` for these tiles, float32 [tiles,
    B, H, T], `stride` elements apart. z is float32 [B, H, T, P] in units of log 2; lse and delta (g·o) are float32 [B,
    H, T].

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    z holds a query's products with the vectors of all P whole positions; a key's position is the sum of the gates from
    it to the query. ds and dp are the gradients of scores and positions.
    """
    tile = low + tl.program_id(0)
    n0 = tile * BN
    b = tl.program_id(1) // (H // G)
    j = tl.program_id(1) % (H // G)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    first, unmasked_from, unmasked_to, end = query_bounds(n0, T, window, BM, BN, WINDOWED)
    border = (tile - low).to(tl.int64) * stride
    gate_count_ptr += border
    remaining_ptr += border
    for g in tl.range(0, G):
        h = j * G + g
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, z_ptr, lse_ptr, delta_ptr, gate_count_ptr, remaining_ptr, b, h, j, n0,
                              first, unmasked_from, T, window, P, H, BM, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, z_ptr, lse_ptr, delta_ptr, gate_count_ptr, remaining_ptr, b, h, j, n0,
                              unmasked_from, unmasked_to, T, window, P, H, BM, BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, z_ptr, lse_ptr, delta_ptr, gate_count_ptr, remaining_ptr, b, h, j, n0,
                              unmasked_to, end, T, window, P, H, BM, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    dk_desc.store([b, n0, j * X], (dk * (_LN2 * FACTOR)).to(dk_desc.dtype).reshape(1, BN, X))
    dv_desc.store([b, n0, j * X], dv.to(dv_desc.dtype).reshape(1, BN, X))


# --- launches -----------------------------------------------------------------------------------------------------


def tiles_for(kernel: str, d: int, dtype: torch.dtype) -> Tiles:
    """Return the launch configuration of a kernel, "forward", "dq" or "dkv", for a head size and dtype.

    It depends on the sizes only, so that every process rounds alike. The result is (queries, keys, warps, stages): (64,
    64, 8, 2) for "forward", else (64, 64, 8, 1). Float32 and heads above 128 get (32, 32, 4, 1).
    """
    if launcher.needs_small_tiles(d, dtype):
        return launcher.SMALL_TILES
    # with four warps a kilobyte per thread spills
    return Tiles(64, 64, 8, 2 if kernel == "forward" else 1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, z_BHTP: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (o [B, T, H, X] in q's dtype, lse [B, H, T] float32 in units of log 2) of contextual positions (CoPE).

    Args:
        q: Queries [B, T, H, X], contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        z_BHTP: log2(e) q·e_p with position vectors e_p, without the scale of q·k, float32; P is at most 128.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    tiles, sizes = tiles_for("forward", q.shape[3], q.dtype), (q.shape[1], window or 0)
    constexprs = launcher.constants(q, k, window, factor)
    constexprs["P"] = z_BHTP.shape[3]
    return launcher.forward(_forward, tiles, q, k, v, (z_BHTP,), sizes, constexprs)


def backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, z_BHTP: Tensor, o: Tensor, lse: Tensor, *,
    factor: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q, k, v, z) as given, from that of o, in their dtypes.

    The gradient of q lacks the part through z, which the caller's autograd adds.

    Args:
        g_o: Gradient of the output, contiguous like all inputs.
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        z_BHTP: q times the position vectors, float32 in units of log 2.
        o: Output of `forward`.
        lse: Log-sum-exp of `forward`.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    b, t, h, d = q.shape
    constexprs, positions, visible_window = launcher.constants(q, k, window, factor), z_BHTP.shape[3], window or 0
    constexprs["P"] = positions
    dq, dk, dv, dz = (torch.empty_like(x) for x in (q, k, v, z_BHTP))
    delta = launcher.row_products(g_o, o)
    tiles_q, tiles_k = (tiles_for(kernel, d, q.dtype) for kernel in ("dq", "dkv"))
    tiles, tiles_per_segment, stride = triton.cdiv(t, tiles_q.keys), SEGMENT_TOKENS // tiles_q.keys, b * h * t
    gate_count, remaining = torch.empty(2, min(tiles, tiles_per_segment), b, h, t, device=q.device, dtype=torch.float32)
    for high in range(tiles, 0, -tiles_per_segment):
        low = max(0, high - tiles_per_segment)
        constexprs["BP"], constexprs["LEARNS"] = triton.next_power_of_2(positions), high == tiles
        rest = (z_BHTP, lse, delta, dz, gate_count, remaining, t, visible_window, low, high, stride)
        launcher.queries_backward(_dq, tiles_q, q, k, v, g_o, dq, rest, constexprs)
        del constexprs["BP"], constexprs["LEARNS"]
        of_keys = (z_BHTP, lse, delta, gate_count, remaining, t, visible_window, low, stride)
        launcher.keys_backward(_dkv, tiles_k, q, k, v, g_o, dk, dv, of_keys, constexprs, programs=high - low)
    return dq, dk, dv, dz
