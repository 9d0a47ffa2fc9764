"""Triton kernels of threshold relative attention, for NVIDIA GPUs from Ampere on.

See docs/explanation/kernels.md, "Threshold relative attention". B batch, T length, H query heads, J KV heads, G = H / J, X head
size, M queries of a tile, S its keys. Units of log 2: s = factor q·k, weight = 2^(s + D decay - lse) for keys with s >
0, where D counts the survivors from the key to the query. So a row is walked from its query back to its first key with
`count`, the survivors so far. Inside a tile the count is a product of the 0/1 matrix of survivors with a triangle of
ones, exact in float32.

The backward of keys goes the other way and needs each row's count at each tile of keys. These are stored for
`SEGMENT_TOKENS` keys at a time, 4 SEGMENT_TOKENS / S bytes per row: memory grows linearly with T. No atomics: every
number repeats bit for bit, and every kernel multiplies q by k in the same order, so that all of them see the same
survivors.

Products of n scores, 2 n X each, and 2 n S for the count: forward 2 + 1, dq 3 + 1, dk and dv 4 + 1, and beyond
SEGMENT_TOKENS keys 1 + 1 more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..device import LN2, bounds, online_softmax_step, query_bounds
from ..launcher import Tiles

SEGMENT_TOKENS = 4096
"""Keys whose counts are stored at a time in the backward."""

_LN2 = tl.constexpr(LN2)


@triton.jit
def _survivors(
    q, k_desc, p_M, b, j, n, T, window, upper,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the keys, scores and survivors of the tile of keys from position n on.

    A pair survives when its score is positive and, with MASKED, the key is visible.

    A survivor is a visible key with a positive score; its distance counts the survivors from it to the query.

    Args:
        q: Queries [M, X], not scaled.
        k_desc: Descriptor of keys [B, T, J X].
        p_M: Positions of the queries.
        b: Batch row.
        j: KV head.
        n: First key of the tile.
        T: Tokens.
        window: Attention window in keys; read only when WINDOWED.
        upper: Matrix of `_upper`, [BN, BN].
        BN: constexpr, keys of a tile.
        X: constexpr, head size.
        MASKED: constexpr bool, True to apply the causal mask and the window.
        WINDOWED: constexpr bool, True with a window.
        PRECISION: constexpr, input precision of products.
        FACTOR: constexpr, factor of q·k that gives units of log 2.

    Returns:
        (k [BN, X], scores float32 [M, BN] in units of log 2, bool survivors [M, BN], number of survivors from each key
        to the tile's end, its own included, [M, BN]).
    """
    k = k_desc.load([b, n, j * X]).reshape(BN, X)
    s = tl.dot(q, k.T, input_precision=PRECISION) * FACTOR
    keep = s > 0.0
    if MASKED:
        n_S = n + tl.arange(0, BN)
        keep = keep & (n_S[None, :] <= tl.minimum(p_M, T - 1)[:, None])
        if WINDOWED:
            keep = keep & (n_S[None, :] > p_M[:, None] - window)
    local = tl.dot(keep.to(upper.dtype), upper, input_precision=PRECISION)
    return k, s, keep, local


@triton.jit
def _upper(BN: tl.constexpr, dtype: tl.constexpr):
    row = tl.arange(0, BN)
    return (row[:, None] >= row[None, :]).to(dtype)


@triton.jit
def _forward_keys(
    acc, row_max, row_sum, count, q, decay, p_M, k_desc, v_desc, b, j, start, stop, T, window, upper,
    BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys stop - 1, ..., start, nearest first, to the running softmax of a tile of queries.

    q holds the queries of the positions p_M, decay [M] their decays in units of log 2; b and j are batch row and KV
    head. k_desc and v_desc describe keys and values [B, T, J X]; `upper` is the matrix of `_upper`. start and stop
    count tiles.

    Returns:
        (acc [M, X], row_max [M], row_sum [M], count [M]) with these tiles included: the sums of `online_softmax_step`,
        and the number of survivors so far.
    """
    for step in tl.range(0, stop - start):
        n = (stop - 1 - step) * BN
        _, s, keep, local = _survivors(
            q, k_desc, p_M, b, j, n, T, window, upper, BN, X, MASKED, WINDOWED, PRECISION, FACTOR
        )
        a = tl.where(keep, s + (count[:, None] + local) * decay[:, None], float("-inf"))
        count += tl.sum(keep.to(tl.float32), 1)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc, row_max, row_sum = online_softmax_step(acc, row_max, row_sum, a, v, PRECISION)
    return acc, row_max, row_sum, count


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, o_desc, decay_ptr, lse_ptr, T, window,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of one tile of queries of one head; -inf and 0 for rows without a survivor.

    Grid: (cdiv(T, BM), B H), the longest rows first. Descriptors: q and o [B, T, H X], k and v [B, T, J X]. decay_ptr:
    float32 [B, H, T] in units of log 2. lse_ptr: float32 [B, H, T] in units of log 2, written.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    A survivor is a visible key with a positive score; its distance counts the survivors from it to the query.
    """
    # the longest rows first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    at = (b * H + h) * T + p_M
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    decay = tl.load(decay_ptr + at, mask=inside, other=0.0)
    upper = _upper(BN, q.dtype)
    acc = tl.zeros([BM, X], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    count = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    acc, row_max, row_sum, count = _forward_keys(
        acc, row_max, row_sum, count, q, decay, p_M, k_desc, v_desc, b, j, unmasked_to, last, T, window, upper,
        BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    acc, row_max, row_sum, count = _forward_keys(
        acc, row_max, row_sum, count, q, decay, p_M, k_desc, v_desc, b, j, unmasked_from, unmasked_to, T, window, upper,
        BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    if WINDOWED:
        acc, row_max, row_sum, count = _forward_keys(
            acc, row_max, row_sum, count, q, decay, p_M, k_desc, v_desc, b, j, first, unmasked_from, T, window, upper,
            BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    has_survivors = row_sum > 0.0
    safe_sum = tl.where(has_survivors, row_sum, 1.0)
    tl.store(lse_ptr + at, tl.where(has_survivors, row_max + tl.log2(safe_sum), float("-inf")), mask=inside)
    o_desc.store([b, m0, h * X], (acc / safe_sum[:, None]).to(o_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dq_keys(
    dq, d_decay, count, q, g, decay, lse, delta, p_M, k_desc, v_desc, counts_ptr, at, b, j, start, stop, T, window, upper,
    stride, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
    STORES_COUNTS: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys stop - 1, ..., start, nearest first, to dq and d_decay of a tile of queries.

    q and g hold the queries and the output's gradient [M, X] at the positions p_M; decay, lse and delta (g·o) are [M].
    With STORES_COUNTS it also stores the row's count of survivors before each of these tiles, at counts_ptr + tile
    stride + at. b and j are batch row and KV head; k_desc and v_desc describe keys and values [B, T, J X]; `upper` is
    the triangle of ones of `_upper`. start and stop count tiles of BN keys. With MASKED the causal mask and the window
    (in keys, read only when WINDOWED) apply, else all pairs count as visible. dq lacks the factor ln 2 FACTOR, d_decay
    ln 2.

    Returns:
        (dq [M, X], d_decay [M], count [M]).
    """
    for step in tl.range(0, stop - start):
        tile = stop - 1 - step
        n = tile * BN
        if STORES_COUNTS:
            tl.store(counts_ptr + tile.to(tl.int64) * stride + at, count, mask=p_M < T)
        k, s, keep, local = _survivors(
            q, k_desc, p_M, b, j, n, T, window, upper, BN, X, MASKED, WINDOWED, PRECISION, FACTOR
        )
        distance = count[:, None] + local
        p = tl.where(keep, tl.exp2(s + distance * decay[:, None] - lse[:, None]), 0.0)
        count += tl.sum(keep.to(tl.float32), 1)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        ds = p * (tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        d_decay += tl.sum(ds * distance, 1)
    return dq, d_decay, count


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, decay_ptr, lse_ptr, delta_ptr, d_decay_ptr, counts_ptr, T, window, stride,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr, STORES_COUNTS: tl.constexpr,
):  # fmt: skip
    """Store dq and the decay's gradient of one tile of queries of one head.

    Grid: (cdiv(T, BM), B H). Descriptors: q, g and dq [B, T, H X], k and v [B, T, J X]. Read: decay in units of log 2,
    lse and delta (g·o), float32 [B, H, T]. Written: dq; d_decay float32 [B, H, T], by the decay in units of log 2; and
    with STORES_COUNTS the count of survivors nearer than each tile of keys, float32 [tiles, B, H, T], whose tiles are
    `stride` elements apart. Of the counts only those of key tiles that this tile of queries sees are written; the rest
    stays as it was.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    A survivor is a visible key with a positive score; its distance counts the survivors from it to the query.
    """
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    at = (b * H + h) * T + p_M
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    decay = tl.load(decay_ptr + at, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
    upper = _upper(BN, q.dtype)
    dq = tl.zeros([BM, X], tl.float32)
    d_decay = tl.zeros([BM], tl.float32)
    count = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    dq, d_decay, count = _dq_keys(
        dq, d_decay, count, q, g, decay, lse, delta, p_M, k_desc, v_desc, counts_ptr, at, b, j, unmasked_to, last, T, window,
        upper, stride, BN, X, True, WINDOWED, PRECISION, FACTOR, STORES_COUNTS)  # fmt: skip
    dq, d_decay, count = _dq_keys(
        dq, d_decay, count, q, g, decay, lse, delta, p_M, k_desc, v_desc, counts_ptr, at, b, j, unmasked_from, unmasked_to, T,
        window, upper, stride, BN, X, False, WINDOWED, PRECISION, FACTOR, STORES_COUNTS)  # fmt: skip
    if WINDOWED:
        dq, d_decay, count = _dq_keys(
            dq, d_decay, count, q, g, decay, lse, delta, p_M, k_desc, v_desc, counts_ptr, at, b, j, first, unmasked_from, T,
            window, upper, stride, BN, X, True, WINDOWED, PRECISION, FACTOR, STORES_COUNTS)  # fmt: skip
    dq_desc.store([b, m0, h * X], (dq * (_LN2 * FACTOR)).to(dq_desc.dtype).reshape(1, BM, X))
    tl.store(d_decay_ptr + at, d_decay * _LN2, mask=inside)


@triton.jit
def _count(
    q_desc, k_desc, count_ptr, counts_ptr, T, window, low, high, stride,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store the counts of survivors at the tiles of keys high - 1, ..., low, for one tile of queries of one head.

    A survivor is a visible key with a positive score. A count at a tile is the number of survivors nearer to the query than that tile. Grid: (cdiv(T, BM), B H).
    Descriptors: q [B, T, H X], k [B, T, J X]. count_ptr, float32 [B, H, T], holds the survivors in the tiles from
    `high` on, and is advanced in place by those of the tiles down to `low`. counts_ptr: float32 [high - low, B, H, T],
    whose tiles are `stride` elements apart, written for tiles that this tile of queries sees; the rest stays as it was.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.
    """
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    at = (b * H + h) * T + p_M
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    upper = _upper(BN, q.dtype)
    count = tl.load(count_ptr + at, mask=inside, other=0.0)
    first, _unmasked_from, _unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    first = tl.maximum(first, low)
    last = tl.minimum(last, high)
    for step in tl.range(0, last - first):
        tile = last - 1 - step
        tl.store(counts_ptr + (tile - low).to(tl.int64) * stride + at, count, mask=inside)
        _k, _s, keep, _local = _survivors(
            q, k_desc, p_M, b, j, tile * BN, T, window, upper, BN, X, True, WINDOWED, PRECISION, FACTOR
        )
        count += tl.sum(keep.to(tl.float32), 1)
    tl.store(count_ptr + at, count, mask=inside)


@triton.jit
def _dkv_queries(
    dk, dv, k_desc, v, q_desc, g_desc, decay_ptr, lse_ptr, delta_ptr, counts_ptr, b, h, j, n0, start, stop, T, window,
    upper, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return dk and dv [BN, X] of a tile of keys with the queries of one head added, BM at a time.

    The queries are start <= m < stop of head h, the keys n0 <= n < n0 + BN of KV head j; v holds their values. q_desc
    and g_desc describe queries and the output's gradient [B, T, H X]. decay (units of log 2), lse and delta (g·o) are
    float32 [B, H, T]; counts_ptr points at this tile's counts of survivors [B, H, T]. dk still lacks the factor ln 2
    FACTOR.
    """
    for m in tl.range(start, stop, BM):
        p_M = m + tl.arange(0, BM)
        inside = p_M < T
        at = (b * H + h) * T + p_M
        q = q_desc.load([b, m, h * X]).reshape(BM, X)
        g = g_desc.load([b, m, h * X]).reshape(BM, X)
        decay = tl.load(decay_ptr + at, mask=inside, other=0.0)
        lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        count = tl.load(counts_ptr + at, mask=inside, other=0.0)
        _, s, keep, local = _survivors(
            q, k_desc, p_M, b, j, n0, T, window, upper, BN, X, MASKED, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        if MASKED:
            keep = keep & inside[:, None]
        p = tl.where(keep, tl.exp2(s + (count[:, None] + local) * decay[:, None] - lse[:, None]), 0.0)
        dv = tl.dot(p.to(g.dtype).T, g, dv, input_precision=PRECISION)
        ds = p * (tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None])
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, decay_ptr, lse_ptr, delta_ptr, counts_ptr, T, window, low, stride,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile of keys of one KV head, summed over its G query heads.

    Grid: (tiles of the segment, B J); program 0 takes the key tile `low`. Descriptors: q and g [B, T, H X], k, v, dk
    and dv [B, T, J X]. decay (units of log 2), lse and delta (g·o) are float32 [B, H, T]. counts_ptr holds the counts
    at these tiles, float32 [tiles, B, H, T], `stride` elements apart.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    A survivor is a visible key with a positive score; its distance counts the survivors from it to the query.
    """
    tile = low + tl.program_id(0)
    n0 = tile * BN
    b = tl.program_id(1) // (H // G)
    j = tl.program_id(1) % (H // G)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    upper = _upper(BN, v.dtype)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    first, unmasked_from, unmasked_to, end = query_bounds(n0, T, window, BM, BN, WINDOWED)
    counts_ptr += (tile - low).to(tl.int64) * stride
    for g in tl.range(0, G):
        h = j * G + g
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, decay_ptr, lse_ptr, delta_ptr, counts_ptr, b, h, j, n0,
                              first, unmasked_from, T, window, upper, H, BM, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, decay_ptr, lse_ptr, delta_ptr, counts_ptr, b, h, j, n0,
                              unmasked_from, unmasked_to, T, window, upper, H, BM, BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, decay_ptr, lse_ptr, delta_ptr, counts_ptr, b, h, j, n0,
                              unmasked_to, end, T, window, upper, H, BM, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    dk_desc.store([b, n0, j * X], (dk * (_LN2 * FACTOR)).to(dk_desc.dtype).reshape(1, BN, X))
    dv_desc.store([b, n0, j * X], dv.to(dv_desc.dtype).reshape(1, BN, X))


# --- launches -----------------------------------------------------------------------------------------------------


def tiles_for(kernel: str, d: int, dtype: torch.dtype) -> Tiles:
    """Return the launch configuration of a kernel, "forward", "dq" or "dkv", for a head size and dtype.

    It depends on the sizes only, so that every process rounds alike. The result is (queries, keys, warps, stages): (64,
    64, 4, 2) for "forward" and "dq", (128, 64, 8, 2) for "dkv". Float32 and heads above 128 get (32, 32, 4, 1).
    """
    if launcher.needs_small_tiles(d, dtype):
        return launcher.SMALL_TILES
    return {"forward": Tiles(64, 64, 4, 2), "dq": Tiles(64, 64, 4, 2), "dkv": Tiles(128, 64, 8, 2)}[kernel]


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay_BHT: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (o [B, T, H, X] in q's dtype, lse [B, H, T] float32 in units of log 2, -inf where no key survives).

    Args:
        q: Queries [B, T, H, X], contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        decay_BHT: float32 in units of log 2.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    tiles, sizes = tiles_for("forward", q.shape[3], q.dtype), (q.shape[1], window or 0)
    return launcher.forward(_forward, tiles, q, k, v, (decay_BHT,), sizes, launcher.constants(q, k, window, factor))


def backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, decay_BHT: Tensor, o: Tensor, lse: Tensor, *,
    factor: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q, k, v, decay) as given, from that of o, in their dtypes.

    Args:
        g_o: Gradient of the output, contiguous like all inputs.
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        decay_BHT: float32 in units of log 2.
        o: Output of `forward`.
        lse: Log-sum-exp of `forward`.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    b, t, h, d = q.shape
    constexprs, visible_window = launcher.constants(q, k, window, factor), window or 0
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_decay = torch.empty_like(decay_BHT)
    delta = launcher.row_products(g_o, o)
    of_queries, of_keys = (tiles_for(kernel, d, q.dtype) for kernel in ("dq", "dkv"))
    bm, bn, warps, stages = of_queries
    tiles, tiles_per_segment, stride = triton.cdiv(t, bn), SEGMENT_TOKENS // bn, b * h * t
    counts = torch.empty(min(tiles, tiles_per_segment), b, h, t, device=q.device, dtype=torch.float32)
    constexprs["STORES_COUNTS"] = tiles <= tiles_per_segment
    launcher.queries_backward(
        _dq,
        of_queries,
        q,
        k,
        v,
        g_o,
        dq,
        (decay_BHT, lse, delta, d_decay, counts, t, visible_window, stride),
        constexprs,
    )
    del constexprs["STORES_COUNTS"]
    count = torch.zeros_like(decay_BHT)
    for high in range(tiles, 0, -tiles_per_segment):
        low = max(0, high - tiles_per_segment)
        if tiles > tiles_per_segment:
            _count[(triton.cdiv(t, bm), b * h)](
                launcher.head_blocks(q, bm, d), launcher.head_blocks(k, bn, d), count, counts, t, visible_window, low, high, stride,
                BM=bm, BN=bn, num_warps=warps, num_stages=stages, **constexprs,
            )  # fmt: skip
        rest = (decay_BHT, lse, delta, counts, t, visible_window, low, stride)
        launcher.keys_backward(_dkv, of_keys, q, k, v, g_o, dk, dv, rest, constexprs, programs=high - low)
    return dq, dk, dv, d_decay
