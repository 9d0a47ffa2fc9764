"""Triton kernels of PolySketch attention, for NVIDIA GPUs from Ampere on.

See docs/explanation/kernels.md, "PolySketch attention". B batch, T length, H query heads, J KV heads, P = H or J, G = H / J, X
head size, C blocks of tokens, r columns of a half sketch, R the next power of two from 16 on, F = r R columns of a feature, M
queries of a tile, S its keys.

Half sketches m are float32 [B, P, R, T], 0 in the columns from r on. Features m ⊗ m exist in registers only, R columns
at a time: row a of the outer product is m_a m, and its product with R rows of a sum is m_a times theirs with m. Per block of tokens there is one sum of features times values [F, X] and
one of features [F], which a scan turns into sums over all earlier (forward) or all later (backward) blocks, float32 until
they are stored in the activations' type. Those of the forward are divided by the number of tokens in them, so that they
fit into float16. Scores s give weights s^(2 K) within a block.

With D = 1 + the sum of a query's weights, a weight has the gradient g·v / D + delta with delta = -g·o / D. The sums are
symmetric in their two columns, so dm = 2 Σ_a m_a (row a of the gradient of the feature). No atomics: every number
repeats bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launcher
from ..launcher import Tiles

SCAN = 1024
"""Numbers of a program of the scan."""


@triton.jit
def _directions(draws_ptr, layer, j, J: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr):
    """Return the directions [X, R] of one factor of a half sketch and of KV head j, float32; 0 in the columns from SKETCH on."""
    r_R = tl.arange(0, R)
    at = draws_ptr + ((layer * J + j) * X + tl.arange(0, X))[:, None] * SKETCH + r_R[None, :]
    return tl.load(at, mask=(r_R < SKETCH)[None, :], other=0.0)


@triton.jit
def _projection(
    x, draws_ptr, layer, j, J: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return x times the directions of one factor, float32 [M, R].

    For 16-bit x [M, X] the directions are the sum of two parts of x's type, so they keep 16 bits of their mantissa.
    """
    g = _directions(draws_ptr, layer, j, J, X, R, SKETCH)
    if x.dtype == tl.float32:
        z = tl.dot(x, g, input_precision=PRECISION)
    else:
        high = g.to(x.dtype)
        z = tl.dot(x, (g - high.to(tl.float32)).to(x.dtype))
        z = tl.dot(x, high, z)
    return z


@triton.jit
def _half_sketches(
    x_ptr, draws_ptr, m_ptr, T, J: tl.constexpr, P: tl.constexpr, X: tl.constexpr, R: tl.constexpr,
    SKETCH: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the half sketches of BM tokens of one head, NORM times the product of K projections.

    Grid: (cdiv(T, BM), B P). x_ptr: contiguous [B, T, P, X]. draws_ptr: float32 [K, J, X, SKETCH]. m_ptr: float32
    [B, P, R, T], written. Constexprs: P heads of x, J KV heads, X head size, R columns of m, SKETCH of them in use.
    """
    b = tl.program_id(1) // P
    p = tl.program_id(1) % P
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = t < T
    x = tl.load(_rows(x_ptr, b, t, p, T, P, X), mask=inside[:, None], other=0.0)
    m = tl.full([BM, R], NORM, tl.float32)
    for layer in tl.static_range(K):
        m *= _projection(x, draws_ptr, layer, p // (P // J), J, X, R, SKETCH, PRECISION)
    at = m_ptr + (tl.program_id(1).to(tl.int64) * R + tl.arange(0, R))[None, :] * T + t[:, None]
    tl.store(at, m, mask=inside[:, None])


@triton.jit
def _rows(x_ptr, b, t, p, T, P: tl.constexpr, X: tl.constexpr):
    """Return the addresses [M, X] of head p of the tokens t [M] of batch row b in a contiguous [B, T, P, X]."""
    return x_ptr + ((b.to(tl.int64) * T + t)[:, None] * P + p) * X + tl.arange(0, X)[None, :]


@triton.jit
def _through_half_sketch(
    dx, x, dm, draws_ptr, j, J: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dx [M, X] plus the gradient of x through its half sketch, of gradient dm, float32 [M, R].

    A factor's gradient is dm times the product of the other factors, which are computed again.
    """
    for layer in tl.static_range(K):
        dz = dm * NORM
        for factor in tl.static_range(K):
            if factor != layer:
                dz *= _projection(x, draws_ptr, factor, j, J, X, R, SKETCH, PRECISION)
        g = _directions(draws_ptr, layer, j, J, X, R, SKETCH).to(x.dtype)
        dx = tl.dot(dz.to(x.dtype), g.T, dx, input_precision=PRECISION)
    return dx


# --- sums over blocks -------------------------------------------------------------------------------------------------


@triton.jit
def _block_sums(
    m_ptr, v_ptr, inverse_ptr, delta_ptr, sums_ptr, norms_ptr, T, block, first_block, J: tl.constexpr, P: tl.constexpr,
    X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr, BA: tl.constexpr, BN: tl.constexpr, DIVIDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the sums over one block of BA rows of the features, BA R columns: times values, and alone.

    Grid: (blocks, cdiv(SKETCH, BA), B J); program 0 of the first axis takes block `first_block`. The P / J heads of m and
    v that belong to a KV head are added up.

    Args:
        m_ptr: float32 half sketches [B, P, R, T].
        v_ptr: Contiguous values [B, T, P, X].
        inverse_ptr: float32 [B, P, T], factor of each token's value; read only when DIVIDED.
        delta_ptr: float32 [B, P, T], factor of each token's feature in the second sum; read only when DIVIDED.
        sums_ptr: float32 [B, J, blocks, F, X], written.
        norms_ptr: float32 [B, J, blocks, F], written.
        T: Tokens.
        block: Tokens of a block.
        first_block: Index of the first block.
        J: constexpr, KV heads.
        P: constexpr, heads of m and v.
        X: constexpr, head size.
        R: constexpr, columns of m.
        SKETCH: constexpr, columns of m in use.
        BA: constexpr, rows of the outer product m ⊗ m per program.
        BN: constexpr, tokens at a time.
        DIVIDED: constexpr bool, True to apply `inverse_ptr` and `delta_ptr`.
        PRECISION: constexpr, input precision of products.
    """
    b = tl.program_id(2) // J
    a = tl.program_id(1) * BA + tl.arange(0, BA)
    start = (tl.program_id(0) + first_block) * block
    stop = tl.minimum(start + block, T)
    stride = tl.cast(T, tl.int64)
    acc_XF = tl.zeros([X, BA * R], tl.float32)
    norm = tl.zeros([BA * R], tl.float32)
    steps = tl.cdiv(stop - start, BN)
    for step in tl.range(0, P // J * steps):
        p = tl.program_id(2) % J * (P // J) + step // steps
        m_at = m_ptr + (b * P + p) * R * stride
        t = start + step % steps * BN + tl.arange(0, BN)
        inside = t < stop
        seen = inside[:, None] & (a < SKETCH)[None, :]
        m_rows = tl.load(m_at + a[None, :] * stride + t[:, None], mask=seen, other=0.0)
        m = tl.load(m_at + tl.arange(0, R)[None, :] * stride + t[:, None], mask=inside[:, None], other=0.0)
        feature = (m_rows[:, :, None] * m[:, None, :]).reshape(BN, BA * R)
        v = tl.load(_rows(v_ptr, b, t, p, T, P, X), mask=inside[:, None], other=0.0)
        if DIVIDED:
            at = (b * P + p) * stride + t
            inverse = tl.load(inverse_ptr + at, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
            v = (v.to(tl.float32) * inverse[:, None]).to(v.dtype)
            norm += tl.sum(feature * delta[:, None], 0)
        else:
            norm += tl.sum(feature, 0)
        acc_XF = tl.dot(v.T, feature.to(v.dtype), acc_XF, input_precision=PRECISION)
    f_F = tl.program_id(1) * (BA * R) + tl.arange(0, BA * R)
    used = f_F < SKETCH * R
    at = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (SKETCH * R) + f_F
    tl.store(norms_ptr + at, norm, mask=used)
    tl.store(sums_ptr + at[:, None] * X + tl.arange(0, X)[None, :], acc_XF.T, mask=used[:, None])


@triton.jit
def _scan(
    parts_ptr, out_ptr, size, parts, block, BS: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """Store the sums of BS numbers over the parts up to each one, divided by their tokens, or with REVERSE from each one on.

    Grid: (cdiv(size, BS), rows).

    Args:
        parts_ptr: float32 [rows, parts, size].
        out_ptr: [rows, parts, size] of any float type, written; it may be `parts_ptr`.
        size: Numbers of a part.
        parts: Number of parts.
        block: Tokens of a part.
        BS: constexpr, numbers of a program.
        REVERSE: constexpr bool, True to add up from the last part back, without division.
    """
    at = tl.program_id(0) * BS + tl.arange(0, BS)
    inside = at < size
    row = tl.program_id(1).to(tl.int64) * parts
    total = tl.zeros([BS], tl.float32)
    for step in tl.range(0, parts):
        part = step
        if REVERSE:
            part = parts - 1 - step
        offsets = (row + part) * size + at
        total += tl.load(parts_ptr + offsets, mask=inside, other=0.0)
        result = total
        if not REVERSE:
            result = total / ((step + 1) * block).to(tl.float32)
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)


# --- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def _power(s, COUNT: tl.constexpr):
    """Return s to the power of 2 COUNT; COUNT is at least 1."""
    square = s * s
    power = square
    for _ in tl.static_range(COUNT - 1):
        power *= square
    return power


@triton.jit
def _slope(s, K: tl.constexpr):
    """Return the derivative of s to the power of 2 K."""
    slope = 2.0 * K * s
    for _ in tl.static_range(K - 1):
        slope *= s * s
    return slope


@triton.jit
def _norm_products(m, norms_ptr, at, R: tl.constexpr, SKETCH: tl.constexpr, PRECISION: tl.constexpr):
    """Return m [M, R] times the sums of features, as a matrix [R, R], that begin at number `at` R SKETCH of `norms_ptr`."""
    r_R = tl.arange(0, R)
    z = tl.load(
        norms_ptr + at * (SKETCH * R) + r_R[:, None] * R + r_R[None, :], mask=(r_R < SKETCH)[:, None], other=0.0
    )
    return tl.dot(m, z, input_precision=PRECISION)


@triton.jit
def _query_tile(T, block, tiles, J: tl.constexpr, H: tl.constexpr, BM: tl.constexpr):
    """Return (block, first query, end of the block, batch row, query head, KV head, queries [BM]) of a program."""
    c = tl.program_id(0) // tiles
    m0 = c * block + tl.program_id(0) % tiles * BM
    h = tl.program_id(1) % H
    return c, m0, tl.minimum((c + 1) * block, T), tl.program_id(1) // H, h, h // (H // J), m0 + tl.arange(0, BM)


@triton.jit
def _forward(
    q_desc, k_desc, v_desc, m_ptr, sums_ptr, norms_ptr, o_ptr, inverse_ptr, T, block, tiles,
    J: tl.constexpr, H: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the output of one tile of queries of one head, and 1 / (1 + the sum of weights) of each.

    Grid: (tiles of all blocks, B H); a block has `tiles` tiles. q and o are contiguous [B, T, H, X], k and v
    [B, T, J, X], inverse float32 [B, H, T]. m_ptr holds the half sketches [B, H, R, T] of the queries, sums_ptr
    [B, J, C - 1, F, X] and norms_ptr [B, J, C - 1, F] the means over the blocks before block 1, 2, ...; they are not
    read for a single block.

    T: tokens. block: tokens of a block. Constexprs: J KV heads, H query heads, X head size, R columns of m, SKETCH of
    them in use, K half the degree, BM and BN queries and keys of a tile, SCALE of q·k.
    """
    c, m0, stop, b, h, j, t = _query_tile(T, block, tiles, J, H, BM)
    inside = t < stop
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    acc = tl.zeros([BM, X], tl.float32)
    norm = tl.zeros([BM], tl.float32)
    for n in tl.range(c * block, tl.minimum(m0 + BM, stop), BN):
        n_S = n + tl.arange(0, BN)
        k = k_desc.load([b, n, j * X]).reshape(BN, X)
        s = tl.dot(q, k.T, input_precision=PRECISION) * SCALE
        w = tl.where(n_S[None, :] <= t[:, None], _power(s, K), 0.0)
        norm += tl.sum(w, 1)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
    if c > 0:
        tokens = (c * block).to(tl.float32)
        acc *= 1.0 / tokens
        r_R = tl.arange(0, R)
        stride = tl.cast(T, tl.int64)
        m_at = m_ptr + tl.program_id(1) * R * stride
        m = tl.load(m_at + r_R[None, :] * stride + t[:, None], mask=inside[:, None], other=0.0)
        part = (b * J + j).to(tl.int64) * ((T - 1) // block) + c - 1
        sums_at = sums_ptr + part * (SKETCH * R * X) + r_R[:, None] * X + tl.arange(0, X)[None, :]
        for a in tl.range(0, SKETCH):
            m_a = tl.load(m_at + a * stride + t, mask=inside, other=0.0)
            sums = tl.load(sums_at + a * (R * X))
            acc += m_a[:, None] * tl.dot(m.to(q.dtype), sums, input_precision=PRECISION)
        acc *= tokens
        norm += tokens * tl.sum(m * _norm_products(m, norms_ptr, part, R, SKETCH, PRECISION), 1)
    inverse = 1.0 / (1.0 + norm)
    tl.store(inverse_ptr + tl.program_id(1).to(tl.int64) * T + t, inverse, mask=inside)
    o = (acc * inverse[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(_rows(o_ptr, b, t, h, T, H, X), o, mask=inside[:, None])


@triton.jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, m_ptr, sums_ptr, norms_ptr, draws_ptr, inverse_ptr, delta_ptr, dq_ptr, T, block, tiles,
    J: tl.constexpr, H: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradient of one tile of queries of one head.

    Grid and arguments as `_forward`. g_desc: gradient of the output, contiguous [B, T, H, X]. draws_ptr: float32
    [K, J, X, SKETCH]. delta_ptr: float32 [B, H, T]. dq_ptr: of q's shape, written. NORM: constexpr factor of the product
    of projections.
    """
    c, m0, stop, b, h, j, t = _query_tile(T, block, tiles, J, H, BM)
    inside = t < stop
    q = q_desc.load([b, m0, h * X]).reshape(BM, X)
    g = g_desc.load([b, m0, h * X]).reshape(BM, X)
    row = tl.program_id(1).to(tl.int64) * T + t
    inverse = tl.load(inverse_ptr + row, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
    dq = tl.zeros([BM, X], tl.float32)
    for n in tl.range(c * block, tl.minimum(m0 + BM, stop), BN):
        n_S = n + tl.arange(0, BN)
        k = k_desc.load([b, n, j * X]).reshape(BN, X)
        v = v_desc.load([b, n, j * X]).reshape(BN, X)
        s = tl.dot(q, k.T, input_precision=PRECISION) * SCALE
        dw = tl.dot(g, v.T, input_precision=PRECISION) * inverse[:, None] + delta[:, None]
        ds = tl.where(n_S[None, :] <= t[:, None], dw * _slope(s, K), 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= SCALE
    if c > 0:
        r_R = tl.arange(0, R)
        stride = tl.cast(T, tl.int64)
        m_at = m_ptr + tl.program_id(1) * R * stride
        m = tl.load(m_at + r_R[None, :] * stride + t[:, None], mask=inside[:, None], other=0.0)
        part = (b * J + j).to(tl.int64) * ((T - 1) // block) + c - 1
        sums_at = sums_ptr + part * (SKETCH * R * X) + r_R[:, None] * X + tl.arange(0, X)[None, :]
        dm = tl.zeros([BM, R], tl.float32)
        for a in tl.range(0, SKETCH):
            m_a = tl.load(m_at + a * stride + t, mask=inside, other=0.0)
            sums = tl.load(sums_at + a * (R * X))
            dm += m_a[:, None] * tl.dot(g, sums.T, input_precision=PRECISION)
        twice = 2.0 * (c * block).to(tl.float32)
        from_norms = _norm_products(m, norms_ptr, part, R, SKETCH, PRECISION)
        dm = twice * (dm * inverse[:, None] + from_norms * delta[:, None])
        dq = _through_half_sketch(dq, q, dm, draws_ptr, j, J, X, R, SKETCH, K, NORM, PRECISION)
    tl.store(_rows(dq_ptr, b, t, h, T, H, X), dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, m_ptr, sums_ptr, norms_ptr, draws_ptr, inverse_ptr, delta_ptr, dk_ptr, dv_ptr, T, block,
    tiles, J: tl.constexpr, H: tl.constexpr, X: tl.constexpr, R: tl.constexpr, SKETCH: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of one tile of keys and values of one KV head.

    Grid: (tiles of all blocks, B J); a block has `tiles` tiles of BN keys. Arguments as in `_dq`, but m_ptr holds the
    half sketches [B, J, R, T] of the keys, and the sums are those of the gradients over the blocks after block 0, 1, ...
    dk_ptr and dv_ptr: of k's shape, written.
    """
    c = tl.program_id(0) // tiles
    n0 = c * block + tl.program_id(0) % tiles * BN
    stop = tl.minimum((c + 1) * block, T)
    b = tl.program_id(1) // J
    j = tl.program_id(1) % J
    n_S = n0 + tl.arange(0, BN)
    there = n_S < stop
    k = k_desc.load([b, n0, j * X]).reshape(BN, X)
    v = v_desc.load([b, n0, j * X]).reshape(BN, X)
    dk = tl.zeros([BN, X], tl.float32)
    dv = tl.zeros([BN, X], tl.float32)
    for head in tl.range(0, H // J):
        h = j * (H // J) + head
        for first in tl.range(n0, stop, BM):
            t = first + tl.arange(0, BM)
            inside = t < stop
            q = q_desc.load([b, first, h * X]).reshape(BM, X)
            g = g_desc.load([b, first, h * X]).reshape(BM, X)
            row = (b * H + h).to(tl.int64) * T + t
            inverse = tl.load(inverse_ptr + row, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
            seen = n_S[:, None] <= t[None, :]
            s_SM = tl.dot(k, q.T, input_precision=PRECISION) * SCALE
            w_SM = tl.where(seen, _power(s_SM, K) * inverse[None, :], 0.0)
            dv = tl.dot(w_SM.to(g.dtype), g, dv, input_precision=PRECISION)
            dw_SM = tl.dot(v, g.T, input_precision=PRECISION) * inverse[None, :] + delta[None, :]
            ds_SM = tl.where(seen, dw_SM * _slope(s_SM, K), 0.0)
            dk = tl.dot(ds_SM.to(q.dtype), q, dk, input_precision=PRECISION)
    dk *= SCALE
    if stop < T:
        r_R = tl.arange(0, R)
        stride = tl.cast(T, tl.int64)
        m_at = m_ptr + tl.program_id(1) * R * stride
        m = tl.load(m_at + r_R[None, :] * stride + n_S[:, None], mask=there[:, None], other=0.0)
        part = tl.program_id(1).to(tl.int64) * ((T - 1) // block) + c
        sums_at = sums_ptr + part * (SKETCH * R * X) + r_R[:, None] * X + tl.arange(0, X)[None, :]
        dm = tl.zeros([BN, R], tl.float32)
        for a in tl.range(0, SKETCH):
            m_a = tl.load(m_at + a * stride + n_S, mask=there, other=0.0)
            sums = tl.load(sums_at + a * (R * X))
            dv += m_a[:, None] * tl.dot(m.to(v.dtype), sums, input_precision=PRECISION)
            dm += m_a[:, None] * tl.dot(v, sums.T, input_precision=PRECISION)
        dm = 2.0 * (dm + _norm_products(m, norms_ptr, part, R, SKETCH, PRECISION))
        dk = _through_half_sketch(dk, k, dm, draws_ptr, j, J, X, R, SKETCH, K, NORM, PRECISION)
    tl.store(_rows(dk_ptr, b, n_S, j, T, J, X), dk.to(dk_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(_rows(dv_ptr, b, n_S, j, T, J, X), dv.to(dv_ptr.dtype.element_ty), mask=there[:, None])


# --- launches ---------------------------------------------------------------------------------------------------------


class Sketched(NamedTuple):
    """Half sketches of a pass's rows, and the sums over other blocks that they are multiplied with.

    m [B, P, R, T] is float32, sums [B, J, C - 1, F, X] in the activations' type, norms [B, J, C - 1, F] float32.
    """

    m: Tensor
    sums: Tensor
    norms: Tensor


def tiles_for(kernel: str, block: int, d: int, dtype: torch.dtype) -> Tiles:
    """Return the launch configuration of "forward", "dq" or "dkv"; not measured yet.

    No tile is longer than the next power of two of a block.
    """
    if dtype == torch.float32:
        rows, keys, warps, stages = launcher.SMALL_TILES
    elif d > 128:
        rows, keys, warps, stages = 64, 32, 8, 1
    else:
        rows, keys, warps, stages = (64, 64, 8, 2) if kernel == "dkv" else (128, 64, 8, 2)
    longest = max(16, triton.next_power_of_2(block))
    rows, keys = min(rows, longest), min(keys, longest)
    return Tiles(rows, keys, warps if max(rows, keys) >= 64 else min(warps, 4), stages)


def constants(q: Tensor, k: Tensor, draws: Tensor, scale: float) -> dict[str, Any]:
    """Return the constexprs that all kernels of a call share."""
    (half_degree, _, x, sketch), (_, _, h, _) = draws.shape, q.shape
    return {
        "J": k.shape[2], "H": h, "X": x, "R": max(16, triton.next_power_of_2(sketch)), "SKETCH": sketch,
        "K": half_degree, "SCALE": scale, "NORM": abs(scale) ** (half_degree / 2) * sketch**-0.5,
        "PRECISION": launcher.precision(q.dtype),
    }  # fmt: skip


def _only(constexprs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: constexprs[name] for name in names}


def half_sketches(x: Tensor, draws: Tensor, constexprs: dict[str, Any]) -> Tensor:
    """Return the half sketches of contiguous x [B, T, P, X], float32 [B, P, R, T]."""
    b, t, p, _ = x.shape
    m = torch.empty(b, p, constexprs["R"], t, device=x.device, dtype=torch.float32)
    _half_sketches[(triton.cdiv(t, 64), b * p)](
        x, draws, m, t, P=p, BM=64, num_warps=4, num_stages=1,
        **_only(constexprs, "J", "X", "R", "SKETCH", "K", "NORM", "PRECISION"),
    )  # fmt: skip
    return m


def sums_over_blocks(
    m: Tensor, v: Tensor, block: int, constexprs: dict[str, Any], rows: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sums of features times values and of features, over all blocks before, or with `rows` after, a block.

    Args:
        m: Half sketches [B, P, R, T]; there are two or more blocks.
        v: Contiguous [B, T, P, X].
        block: Tokens of a block.
        constexprs: From `constants`.
        rows: Factors (of the values, of the features in their own sum), float32 [B, P, T]; None: 1, and the results are
            divided by the number of tokens.

    Returns:
        (sums [B, J, C - 1, F, X] in v's dtype, norms float32 [B, J, C - 1, F]). The entry i is over the blocks 0 to i;
        with `rows` over the blocks i + 1 to C - 1.
    """
    (b, t, p, x), j = v.shape, constexprs["J"]
    parts, size = (t - 1) // block, constexprs["SKETCH"] * constexprs["R"]
    sums = torch.empty(b, j, parts, size, x, device=v.device, dtype=torch.float32)
    norms = torch.empty(b, j, parts, size, device=v.device, dtype=torch.float32)
    columns, bn = (32, 32) if launcher.needs_small_tiles(x, v.dtype) else (64, 64)
    ba = max(1, columns // constexprs["R"])
    _block_sums[(parts, triton.cdiv(constexprs["SKETCH"], ba), b * j)](
        m, v, *(rows or (m, m)), sums, norms, t, block, int(rows is not None), P=p, BA=ba, BN=bn,
        DIVIDED=rows is not None, num_warps=4, num_stages=2,
        **_only(constexprs, "J", "X", "R", "SKETCH", "PRECISION"),
    )  # fmt: skip
    totals = torch.empty(sums.shape, device=v.device, dtype=v.dtype)
    for parts_in, out in ((sums, totals), (norms, norms)):
        n = size * (x if parts_in is sums else 1)
        _scan[(triton.cdiv(n, SCAN), b * j)](
            parts_in, out, n, parts, block, BS=SCAN, REVERSE=rows is not None, num_warps=4
        )
    return totals, norms


def before_blocks(q: Tensor, k: Tensor, v: Tensor, draws: Tensor, block: int, constexprs: dict[str, Any]) -> Sketched:
    """Return the half sketches of the queries and the sums over keys of earlier blocks; empty for a single block."""
    if q.shape[1] <= block:
        unread = q.new_empty(1, dtype=torch.float32)
        return Sketched(unread, q.new_empty(1), unread)
    sums = sums_over_blocks(half_sketches(k, draws, constexprs), v, block, constexprs)
    return Sketched(half_sketches(q, draws, constexprs), *sums)


def _blocks(d: int, rows: int, *tensors: Tensor) -> list[Any]:
    """Return descriptors of contiguous [B, T, heads, d] tensors, in blocks of `rows` positions of one head."""
    return [launcher.head_blocks(x, rows, d) for x in tensors]


def tile_count(t: int, block: int, rows: int) -> int:
    """Return the number of tiles of `rows` tokens that t tokens have, where no tile goes beyond a block."""
    full_blocks = (t - 1) // block
    return full_blocks * triton.cdiv(block, rows) + triton.cdiv(t - full_blocks * block, rows)


def forward(q: Tensor, k: Tensor, v: Tensor, draws: Tensor, *, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return (o [B, T, H, X] in q's dtype, 1 / (1 + the sum of weights), float32 [B, H, T]).

    Args:
        q: Queries [B, T, H, X], contiguous like all inputs.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        draws: Directions, float32 [K, J, X, r].
        block: Tokens of a block.
        scale: Factor of q·k.
    """
    b, t, h, x = q.shape
    constexprs = constants(q, k, draws, scale)
    sketched = before_blocks(q, k, v, draws, block, constexprs)
    o, inverse = torch.empty_like(q), torch.empty(b, h, t, device=q.device, dtype=torch.float32)
    bm, bn, warps, stages = tiles_for("forward", block, x, q.dtype)
    _forward[(tile_count(t, block, bm), b * h)](
        *_blocks(x, bm, q), *_blocks(x, bn, k, v), *sketched, o, inverse, t, block, triton.cdiv(block, bm), BM=bm, BN=bn,
        num_warps=warps, num_stages=stages,
        **_only(constexprs, "J", "H", "X", "R", "SKETCH", "K", "SCALE", "PRECISION"),
    )  # fmt: skip
    return o, inverse


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, draws: Tensor, o: Tensor, inverse: Tensor, *, block: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their dtypes; half sketches and sums are computed again.

    Args:
        g: Gradient of o [B, T, H, X], contiguous like all inputs.
        q: Queries.
        k: Keys.
        v: Values.
        draws: Directions, float32 [K, J, X, r].
        o: First result of `forward`.
        inverse: Second result.
        block: Tokens of a block.
        scale: Factor of q·k.
    """
    (b, t, h, x), j = q.shape, k.shape[2]
    constexprs = constants(q, k, draws, scale)
    delta = launcher.row_products(g, o) * -inverse
    before = after = before_blocks(q, k, v, draws, block, constexprs)
    if t > block:
        after = Sketched(
            half_sketches(k, draws, constexprs), *sums_over_blocks(before.m, g, block, constexprs, (inverse, delta))
        )
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    bm, bn, warps, stages = tiles_for("dq", block, x, q.dtype)
    _dq[(tile_count(t, block, bm), b * h)](
        *_blocks(x, bm, q), *_blocks(x, bn, k, v), *_blocks(x, bm, g), *before, draws, inverse, delta, dq, t, block, triton.cdiv(block, bm), BM=bm, BN=bn,
        num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip
    bm, bn, warps, stages = tiles_for("dkv", block, x, q.dtype)
    _dkv[(tile_count(t, block, bn), b * j)](
        *_blocks(x, bm, q), *_blocks(x, bn, k, v), *_blocks(x, bm, g), *after, draws, inverse, delta, dk, dv, t, block, triton.cdiv(block, bn), BM=bm, BN=bn,
        num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip
    return dq, dk, dv
