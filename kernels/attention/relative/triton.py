"""Triton kernels of learned relative bias, for NVIDIA GPUs from Ampere on (docs/explanation/kernels.md, "Relative bias").

B batch, T length, H query heads, J KV heads, G = H / J, X head size, R reach, M queries of a tile, S its keys, as many.
Units of log 2: weight = 2^(factor q·k + bias of min(i - j, R) - lse). A tile whose keys all lie R or more away adds one
number; any other reads a number per pair, of which 2 M - 1 differ. Their gradient is a sum along each diagonal of ds:
rows are shifted so that diagonals become columns. The columns' sums of each tile go into memory of its own, and are
added up outside. No atomics: every number repeats bit for bit.

Products of n scores, 2 n X each: forward 2, dq 3, dk and dv 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..device import LN2, bounds, online_softmax_step, query_bounds, visible
from ..launcher import Tiles

_LN2 = tl.constexpr(LN2)


@triton.jit
def _logits(
    q, k_desc, bias_ptr, p_M, b, j, m0, n, T, window,
    R: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return (k [BN, X], logits float32 [M, BN] in units of log 2) of the tile of keys from position n on.

    bias_ptr points at the head's R + 1 biases; b and j are batch row and KV head, m0 and p_M the first and all
    positions of the queries. With MASKED hidden pairs are -inf.
    """
    k = k_desc.load([b, n, j * X]).reshape(BN, X)
    n_S = n + tl.arange(0, BN)
    a = tl.dot(q, k.T, input_precision=PRECISION) * FACTOR
    if m0 - (n + BN - 1) < R:
        distance = tl.minimum(tl.maximum(p_M[:, None] - n_S[None, :], 0), R)
        a += tl.load(bias_ptr + distance)
    else:
        a += tl.load(bias_ptr + R)
    if MASKED:
        a = tl.where(visible(p_M, n_S, T, window, WINDOWED), a, float("-inf"))
    return k, a


@triton.jit
def _forward_keys(
    acc, row_max, row_sum, q, bias_ptr, p_M, k_desc, v_desc, b, j, m0, start, stop, T, window,
    R: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys stop - 1, ..., start, nearest first, to the running softmax of a tile of queries.

    q holds the queries of the positions p_M from m0 on; v_desc describes values [B, T, J X]. start and stop count
    tiles. bias_ptr points at the head's R + 1 biases in units of log 2; b and j are batch row and KV head; k_desc
    describes keys [B, T, J X]. With MASKED the causal mask and the window (in keys, read only when WINDOWED) apply,
    else all pairs count as visible. FACTOR brings q·k to units of log 2.

    Returns:
        (acc [M, X], row_max [M], row_sum [M]) of `online_softmax_step` with these tiles included.
    """
    for step in tl.range(0, stop - start):
        n = (stop - 1 - step) * BN
        _k, a = _logits(q, k_desc, bias_ptr, p_M, b, j, m0, n, T, window, R, BN, X, MASKED, WINDOWED, PRECISION, FACTOR)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc, row_max, row_sum = online_softmax_step(acc, row_max, row_sum, a, v, PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, o_desc, bias_ptr, lse_ptr, T, window,
    R: tl.constexpr, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of one tile of queries of one head.

    Grid: (cdiv(T, BM), B H), the longest rows first. Descriptors: q and o [B, T, H X], k and v [B, T, J X]. bias_ptr:
    float32 [H, R + 1] in units of log 2. lse_ptr: float32 [B, H, T] in units of log 2, written.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.
    """
    # the longest rows first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    bias_ptr += h * (R + 1)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    acc = tl.zeros([BM, X], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    acc, row_max, row_sum = _forward_keys(
        acc, row_max, row_sum, q, bias_ptr, p_M, k_desc, v_desc, b, j, m0, unmasked_to, last, T, window,
        R, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    acc, row_max, row_sum = _forward_keys(
        acc, row_max, row_sum, q, bias_ptr, p_M, k_desc, v_desc, b, j, m0, unmasked_from, unmasked_to, T, window,
        R, BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    if WINDOWED:
        acc, row_max, row_sum = _forward_keys(
            acc, row_max, row_sum, q, bias_ptr, p_M, k_desc, v_desc, b, j, m0, first, unmasked_from, T, window,
            R, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    # rows beyond the last token may see no key
    row_sum = tl.where(inside, row_sum, 1.0)
    tl.store(lse_ptr + (b * H + h) * T + p_M, row_max + tl.log2(row_sum), mask=inside)
    o_desc.store([b, m0, h * X], (acc / row_sum[:, None]).to(o_desc.dtype).reshape(1, BM, X))


@triton.jit
def _store_diagonal_sums(ds, out_ptr, BN: tl.constexpr):
    """Store the sums of ds [BN, BN] over i - j = d, for -BN < d < BN, to out[BN + d], float32.

    ds is the gradient of the logits.
    """
    row = tl.arange(0, BN)[:, None]
    x = tl.arange(0, BN)[None, :]
    below = tl.gather(ds, tl.maximum(row - x, 0), 1)
    tl.store(out_ptr + BN + tl.arange(0, BN), tl.sum(tl.where(row >= x, below, 0.0), 0))
    above = tl.gather(ds, tl.minimum(row + x, BN - 1), 1)
    at = tl.arange(0, BN)
    tl.store(out_ptr + BN - at, tl.sum(tl.where(row + x < BN, above, 0.0), 0), mask=at > 0)


@triton.jit
def _dq_keys(
    dq, far_sum, q, g, bias_ptr, lse, delta, p_M, k_desc, v_desc, parts_ptr, b, j, m0, start, stop, T, window,
    R: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys stop - 1, ..., start, nearest first, to dq, and store their diagonal sums of ds.

    The sums of a tile within the reach go to parts_ptr, at the row of 2 BN numbers that counts its tiles from the
    query's. q and g hold the queries and the output's gradient [M, X]; lse and delta (g·o) are [M]. dq lacks the factor
    ln 2 FACTOR. bias_ptr points at the head's R + 1 biases in units of log 2; b and j are batch row and KV head; k_desc
    and v_desc describe keys and values [B, T, J X]. With MASKED the causal mask and the window (in keys, read only when
    WINDOWED) apply, else all pairs count as visible.

    ds is the gradient of the logits.

    Returns:
        (dq [M, X], far_sum [M], sum of ds over tiles beyond the reach).
    """
    for step in tl.range(0, stop - start):
        n = (stop - 1 - step) * BN
        k, a = _logits(q, k_desc, bias_ptr, p_M, b, j, m0, n, T, window, R, BN, X, MASKED, WINDOWED, PRECISION, FACTOR)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        ds = tl.exp2(a - lse[:, None]) * (tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if m0 - (n + BN - 1) < R:
            _store_diagonal_sums(ds, parts_ptr + (m0 - n) // BN * (2 * BN), BN)
        else:
            far_sum += tl.sum(ds, 1)
    return dq, far_sum


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, bias_ptr, lse_ptr, delta_ptr, parts_ptr, far_sum_ptr, T, window,
    R: tl.constexpr, NEAR: tl.constexpr, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store dq and the sums that the bias's gradient consists of, for one tile of queries of one head.

    Grid: (cdiv(T, BM), B H). Descriptors: q, g and dq [B, T, H X], k and v [B, T, J X]. Read: bias, float32 [H, R + 1]
    in units of log 2; lse and delta (g·o), float32 [B, H, T]. Written: dq; parts, float32 [B, H, tiles, NEAR, 2 S],
    diagonal sums of ds with the key tiles 0, 1, ... NEAR - 1 tiles before the query's; far_sum, float32 [B, H, T], sum
    of ds over tiles beyond the reach. Entries of parts for tiles that do not exist, or that the window hides, are not
    written.

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.

    ds is the gradient of the logits.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m0 = tile * BM
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    j = h // G
    p_M = m0 + tl.arange(0, BM)
    inside = p_M < T
    at = (b * H + h) * T + p_M
    bias_ptr += h * (R + 1)
    parts_ptr += ((b * H + h).to(tl.int64) * tl.num_programs(0) + tile) * (NEAR * 2 * BN)
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    # rows beyond the last token get weight 0
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
    dq = tl.zeros([BM, X], tl.float32)
    far_sum = tl.zeros([BM], tl.float32)
    first, unmasked_from, unmasked_to, last = bounds(m0, T, window, BM, BN, WINDOWED)
    dq, far_sum = _dq_keys(dq, far_sum, q, g, bias_ptr, lse, delta, p_M, k_desc, v_desc, parts_ptr, b, j, m0, unmasked_to, last, T, window,
                        R, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    dq, far_sum = _dq_keys(dq, far_sum, q, g, bias_ptr, lse, delta, p_M, k_desc, v_desc, parts_ptr, b, j, m0, unmasked_from, unmasked_to, T, window,
                        R, BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    if WINDOWED:
        dq, far_sum = _dq_keys(dq, far_sum, q, g, bias_ptr, lse, delta, p_M, k_desc, v_desc, parts_ptr, b, j, m0, first, unmasked_from, T,
                            window, R, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    tl.store(far_sum_ptr + at, far_sum, mask=inside)
    dq_desc.store([b, m0, h * X], (dq * (_LN2 * FACTOR)).to(dq_desc.dtype).reshape(1, BM, X))


@triton.jit
def _dkv_queries(
    dk, dv, k_desc, v, q_desc, g_desc, bias_ptr, lse_ptr, delta_ptr, b, h, j, n0, start, stop, T, window,
    R: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, X: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return dk and dv [BN, X] of a tile of keys with the queries of one head added, BM at a time.

    The queries are start <= m < stop of head h, the keys n0 <= n < n0 + BN of KV head j; v holds their values. q_desc
    and g_desc describe queries and the output's gradient [B, T, H X]. lse and delta (g·o) are float32 [B, H, T],
    bias_ptr float32 [H, R + 1] in units of log 2. dk still lacks the factor ln 2 FACTOR.
    """
    for m in tl.range(start, stop, BM):
        p_M = m + tl.arange(0, BM)
        inside = p_M < T
        at = (b * H + h) * T + p_M
        q = q_desc.load([b, m, h * X]).reshape(BM, X)
        g = g_desc.load([b, m, h * X]).reshape(BM, X)
        lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        _k, a = _logits(q, k_desc, bias_ptr + h * (R + 1), p_M, b, j, m, n0, T, window, R, BN, X,
                        MASKED, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        p = tl.exp2(a - lse[:, None])
        dv = tl.dot(p.to(g.dtype).T, g, dv, input_precision=PRECISION)
        ds = p * (tl.dot(g, v.T, input_precision=PRECISION) - delta[:, None])
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, bias_ptr, lse_ptr, delta_ptr, T, window,
    R: tl.constexpr, H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one tile of keys of one KV head, summed over its G query heads.

    Grid: (cdiv(T, BN), B J). Descriptors: q and g [B, T, H X], k, v, dk and dv [B, T, J X]. bias is float32 [H, R + 1]
    in units of log 2; lse and delta (g·o) are float32 [B, H, T].

    T: tokens. window: attention window in keys, read only when WINDOWED. BM and BN: constexprs, queries and keys of a
    tile. Constexprs: H query heads, G query heads per KV head, X head size, WINDOWED True with a window, PRECISION
    input precision of products, FACTOR that brings q·k to units of log 2.
    """
    n0 = tl.program_id(0) * BN
    b = tl.program_id(1) // (H // G)
    j = tl.program_id(1) % (H // G)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    first, unmasked_from, unmasked_to, end = query_bounds(n0, T, window, BM, BN, WINDOWED)
    for g in tl.range(0, G):
        h = j * G + g
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, bias_ptr, lse_ptr, delta_ptr, b, h, j, n0,
                              first, unmasked_from, T, window, R, H, BM, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, bias_ptr, lse_ptr, delta_ptr, b, h, j, n0,
                              unmasked_from, unmasked_to, T, window, R, H, BM, BN, X, False, WINDOWED, PRECISION, FACTOR)  # fmt: skip
        dk, dv = _dkv_queries(dk, dv, k_desc, v, q_desc, g_desc, bias_ptr, lse_ptr, delta_ptr, b, h, j, n0,
                              unmasked_to, end, T, window, R, H, BM, BN, X, True, WINDOWED, PRECISION, FACTOR)  # fmt: skip
    dk_desc.store([b, n0, j * X], (dk * (_LN2 * FACTOR)).to(dk_desc.dtype).reshape(1, BN, X))
    dv_desc.store([b, n0, j * X], dv.to(dv_desc.dtype).reshape(1, BN, X))


# --- launches -----------------------------------------------------------------------------------------------------


def tiles_for(kernel: str, d: int, dtype: torch.dtype) -> Tiles:
    """Return the launch configuration of a kernel, "forward", "dq" or "dkv", for a head size and dtype.

    It depends on the sizes only, so that every process rounds alike. The result is (queries, keys, warps, stages): (64,
    64, 4, 2) for "forward", (64, 64, 8, 1) for "dq", (64, 64, 4, 1) for "dkv". Float32 and heads above 128 get (32, 32,
    4, 1).
    """
    if launcher.needs_small_tiles(d, dtype):
        return launcher.SMALL_TILES
    return {"forward": Tiles(64, 64, 4, 2), "dq": Tiles(64, 64, 8, 1), "dkv": Tiles(64, 64, 4, 1)}[kernel]


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias_HR: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (o [B, T, H, X] in q's dtype, lse [B, H, T] float32 in units of log 2).

    Args:
        q: Queries [B, T, H, X], contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        bias_HR: float32 [H, R + 1] in units of log 2.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    tiles, sizes = tiles_for("forward", q.shape[3], q.dtype), (q.shape[1], window or 0)
    constexprs = launcher.constants(q, k, window, factor)
    constexprs["R"] = bias_HR.shape[1] - 1
    return launcher.forward(_forward, tiles, q, k, v, (bias_HR,), sizes, constexprs)


def backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_HR: Tensor, o: Tensor, lse: Tensor, *,
    factor: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q, k, v, bias) as given, from that of o; the bias's is float32.

    Args:
        g_o: Gradient of the output, contiguous like all inputs.
        q: Queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        bias_HR: float32 [H, R + 1] in units of log 2.
        o: Output of `forward`.
        lse: Log-sum-exp of `forward`.
        factor: Factor of q·k that gives units of log 2.
        window: Attention window in keys, or None.
    """
    b, t, h, d = q.shape
    constexprs, reach, visible_window = launcher.constants(q, k, window, factor), bias_HR.shape[1] - 1, window or 0
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), launcher.row_products(g_o, o)
    tiles = tiles_for("dq", d, q.dtype)
    count, bn = triton.cdiv(t, tiles.rows), tiles.keys
    # number of tiles m0 - n0 = 0, bn, 2 bn, ... whose smallest distance, m0 - n0 - (bn - 1), is below the reach
    near = min(count, (reach + bn - 2) // bn + 1)
    parts = torch.zeros(b, h, count, near, 2 * bn, device=q.device, dtype=torch.float32)
    far_sum = torch.empty(b, h, t, device=q.device, dtype=torch.float32)
    constexprs["R"], constexprs["NEAR"] = reach, near
    launcher.queries_backward(
        _dq, tiles, q, k, v, g_o, dq, (bias_HR, lse, delta, parts, far_sum, t, visible_window), constexprs
    )
    del constexprs["NEAR"]
    launcher.keys_backward(
        _dkv, tiles_for("dkv", d, q.dtype), q, k, v, g_o, dk, dv, (bias_HR, lse, delta, t, visible_window), constexprs
    )
    return dq, dk, dv, _sum_by_distance(parts.sum((0, 2)), far_sum.sum((0, 2)), bias_HR) * LN2


def _sum_by_distance(parts_HNS: Tensor, far_sum_H: Tensor, bias_HR: Tensor) -> Tensor:
    """Return the sums of ds by distance, [H, R + 1], from the diagonal sums of the near tiles.

    Args:
        parts_HNS: [H, near tiles, 2 S]; tile n's column S + x belongs to the distance n S + x, never negative.
        far_sum_H: Sums of the tiles beyond the reach.
        bias_HR: Biases, for their shape.
    """
    near, columns = parts_HNS.shape[1:]
    s = columns // 2
    at = parts_HNS[..., s:]
    # the next tile's columns below S belong to distances of this tile
    at = at + torch.nn.functional.pad(parts_HNS[:, 1:, :s], (0, 0, 0, 1))
    by_distance = at.flatten(1)
    reach = bias_HR.shape[1] - 1
    own = torch.nn.functional.pad(by_distance[:, :reach], (0, max(0, reach - near * s)))
    return torch.cat([own, (by_distance[:, reach:].sum(1) + far_sum_H)[:, None]], 1)
