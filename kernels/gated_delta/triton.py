"""Triton kernels of the chunked gated delta rule, forward and backward (oracle: `gated_delta_reference`).

See docs/reference/mechanisms.md, "Gated delta memory". B batch, T length, H heads, J KV heads, G = H / J, X head size, C = 64
chunk, N = ceil(T / C) chunks, L = N C. In a chunk with start state S [X_v, X_k], k and q of unit length, g the running
sum of log_gamma, ratio_ps = exp(g_p - g_s), s <= p:
    N_ps = beta_p ratio_ps k_p.k_s (s < p),  T = (I + N)^-1,  y_p = beta_p (v_p - e^{g_p} S k_p),  u = T y,
    P_ps = ratio_ps q_p.k_s,  r_p = e^{g_p} S q_p + sum_s P_ps u_s,  S' = e^{g_C} S + sum_s e^{g_C - g_s} u_s k_sᵀ.
Backward, with g_r and dS' (gradients of r and S'):
    du = Pᵀ g_r + e^{g_C - g} dS' k,  dy = Tᵀ du,  dv = beta dy,  d_beta = dy.u / beta,  dN = -dy uᵀ (s < p),
    dS = e^{g_C} dS' + sum_p e^{g_p} g_r_p q_pᵀ - sum_p e^{g_p} beta_p dy_p k_pᵀ,  dP = g_r uᵀ (s <= p),
    dq = e^g g_r S + (ratio dP) k,  dk = dk_read + dk_write with E_ps = beta_p ratio_ps dN_ps,
    dk_read = -e^g beta dy S + E k,  dk_write = e^{g_C - g} u dS' + (ratio dP)ᵀ q + Eᵀ k,
    dg = q.dq + k.dk_read - k.dk_write,  and at the last position of the chunk also <S', dS'>.
dg sums from the chunk's end to d_log_gamma: no gradient of T and no second inverse are needed. Its pairs inside a chunk
enter once with each sign, from one product (P dP and k kᵀ E), so that they cancel there to float32.

Scales 1 / |k| and 1 / |q| are applied to rows and columns of products, so that k and q reach the tensor cores
unrounded. Only the state passes from chunk to chunk, in float32 registers; everything that belongs to one chunk runs
for all chunks at once. No atomics and fixed tiles: every number repeats bit for bit. Rows past T read as zeros,
whatever follows in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

CHUNK = 64
NORM_FLOOR = 1e-12

_FLOOR = tl.constexpr(NORM_FLOOR)
# a scale at or above this belongs to a length at the floor, which passes no gradient through the length
_AT_FLOOR = tl.constexpr(0.999 / NORM_FLOOR)
# planes of the table of row statistics, each [B H, L]
_DECAY = tl.constexpr(0)
_INV_K = tl.constexpr(1)
_INV_Q = tl.constexpr(2)
_BETA = tl.constexpr(3)
_READ = tl.constexpr(4)
_WRITE = tl.constexpr(5)
_GROWN = tl.constexpr(6)
NUM_PLANES = 7


@triton.jit
def _inverse_length(x):
    """Return 1 / max(length, 1e-12) of each row of x [rows, X], float32."""
    x = x.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), _FLOOR)


@triton.jit
def _pair_block(k_a, k_b, inv_a, inv_b, g_a, g_b, beta_a, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr):
    """Return a block [16, 16] of N: beta_a exp(g_a - g_b) of unit keys' products.

    Args:
        k_a: Raw keys [16, X] of the rows.
        k_b: Raw keys [16, X] of the columns.
        inv_a: Inverse lengths of k_a.
        inv_b: Inverse lengths of k_b.
        g_a: Running log decays of the rows.
        g_b: Running log decays of the columns.
        beta_a: Write strengths of the rows.
        DIAGONAL: constexpr bool, True for a block on the diagonal, where only the strictly lower half counts.
        PRECISION: constexpr, input precision of the product.
    """
    i = tl.arange(0, 16)
    power = g_a[:, None] - g_b[None, :]
    if DIAGONAL:
        power = tl.where(i[:, None] > i[None, :], power, float("-inf"))
    scale = tl.exp(power) * (beta_a * inv_a)[:, None] * inv_b[None, :]
    return tl.dot(k_a, k_b.T, input_precision=PRECISION) * scale


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Return a @ b, [16, 16] float32, in full precision or as three products of 16-bit halves.

    The halves have a relative error of about 2^-16.

    Args:
        a: float32 [16, 16].
        b: float32 [16, 16].
        PRECISION: constexpr; "ieee" for full precision, any other value for halves.
    """
    if PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    a_high = a.to(tl.bfloat16)
    b_high = b.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def _inverse16(n, PRECISION: tl.constexpr):
    """Return (I + n)^-1, [16, 16] float32, of a strictly lower triangular n [16, 16].

    Inverses of diagonal squares of 2, 4, 8 and 16 rows follow from those of their halves. Numbers on and above the
    diagonal of n are not read as such and must be 0.
    """
    i = tl.arange(0, 16)
    apart = i[:, None] ^ i[None, :]
    t = tl.where(apart == 0, 1.0, tl.where(apart == 1, -n, 0.0))
    for level in tl.static_range(1, 4):
        below = tl.where((apart >> level) == 1, n, 0.0)
        t = t - _product(t, _product(below, t, PRECISION), PRECISION)
    return t


@triton.jit
def _load_rows16(k_ptr, gate_ptr, beta_ptr, row, stride_k, stride_gate, T, X: tl.constexpr):
    """Load 16 rows of a chunk, from row `row` on; rows from T on read as zeros.

    Args:
        k_ptr: Keys of one row of the batch and one KV head.
        gate_ptr: float32 log decays of one row of the batch and one head.
        beta_ptr: float32 write strengths of the same.
        row: First token.
        stride_k: Elements from one token's key to the next.
        stride_gate: Elements from one token's gate to the next.
        T: Tokens.
        X: constexpr, head size.

    Returns:
        (raw keys [16, X], their inverse lengths [16], running sum of the log decays from `row` on [16], its total,
        write strengths [16]); all but the keys are float32.
    """
    i = row + tl.arange(0, 16)
    inside = i < T
    k = tl.load(k_ptr + i[:, None] * stride_k + tl.arange(0, X)[None, :], mask=inside[:, None], other=0.0)
    gate = tl.load(gate_ptr + i * stride_gate, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + i * stride_gate, mask=inside, other=0.0)
    return k, _inverse_length(k), tl.cumsum(gate, 0), tl.sum(gate), beta


@triton.jit
def _store_row_stats(stats_ptr, plane, at, inv_k, decay, end, beta):
    """Store the key-side statistics of 16 rows: decay, 1/|k|, beta, read and write factors.

    Args:
        stats_ptr: float32 table of planes.
        plane: Elements of a plane.
        at: Offsets of the rows within a plane.
        inv_k: Inverse lengths of the keys.
        decay: Running log decay g.
        end: Log decay at the end of the chunk, g_C.
        beta: Write strengths.
    """
    tl.store(stats_ptr + _DECAY * plane + at, decay)
    tl.store(stats_ptr + _INV_K * plane + at, inv_k)
    tl.store(stats_ptr + _BETA * plane + at, beta)
    tl.store(stats_ptr + _READ * plane + at, beta * tl.exp(decay) * inv_k)
    tl.store(stats_ptr + _WRITE * plane + at, tl.exp(end - decay) * inv_k)


@triton.jit
def _store_block_row(t_ptr, t0, t1, t2, t3):
    """Store four blocks [16, 16] side by side, 16 rows of a matrix [64, 64], in its dtype."""
    tl.store(t_ptr, t0.to(t_ptr.dtype.element_ty))
    tl.store(t_ptr + 16, t1.to(t_ptr.dtype.element_ty))
    tl.store(t_ptr + 32, t2.to(t_ptr.dtype.element_ty))
    tl.store(t_ptr + 48, t3.to(t_ptr.dtype.element_ty))


@triton.jit
def _inverse(
    k_ptr, gate_ptr, beta_ptr, t_ptr, stats_ptr, T, plane,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store T = (I + N)^-1 [C, C] of one chunk and head, by blocks of 16, and the key-side row statistics.

    Grid: (N, B H), one warp each.

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included.

    Args:
        k_ptr: Contiguous keys [B, T, J, X].
        gate_ptr: Contiguous float32 natural log decays [B, T, H].
        beta_ptr: Contiguous float32 write strengths [B, T, H].
        t_ptr: Contiguous [B, H, N, C, C], written.
        stats_ptr: float32 [planes, B, H, N C], written.
        T: Tokens.
        plane: Elements of a plane of statistics.
        H: constexpr, heads.
        G: constexpr, heads per KV head.
        X: constexpr, head size.
        PRECISION: constexpr, input precision of products.
    """
    n = tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    J: tl.constexpr = H // G
    k_ptr += b * T * J * X + (h // G) * X
    gate_ptr += b * T * H + h
    beta_ptr += b * T * H + h
    row = n * 64
    k0, inv0, g0, sum0, beta0 = _load_rows16(k_ptr, gate_ptr, beta_ptr, row, J * X, H, T, X)
    k1, inv1, g1, sum1, beta1 = _load_rows16(k_ptr, gate_ptr, beta_ptr, row + 16, J * X, H, T, X)
    k2, inv2, g2, sum2, beta2 = _load_rows16(k_ptr, gate_ptr, beta_ptr, row + 32, J * X, H, T, X)
    k3, inv3, g3, sum3, beta3 = _load_rows16(k_ptr, gate_ptr, beta_ptr, row + 48, J * X, H, T, X)
    sum1 += sum0
    sum2 += sum1
    sum3 += sum2
    g1 += sum0
    g2 += sum1
    g3 += sum2
    i = tl.arange(0, 16)
    at = bh.to(tl.int64) * tl.num_programs(0) * 64 + row + i
    _store_row_stats(stats_ptr, plane, at, inv0, g0, sum3, beta0)
    _store_row_stats(stats_ptr, plane, at + 16, inv1, g1, sum3, beta1)
    _store_row_stats(stats_ptr, plane, at + 32, inv2, g2, sum3, beta2)
    _store_row_stats(stats_ptr, plane, at + 48, inv3, g3, sum3, beta3)

    n00 = _pair_block(k0, k0, inv0, inv0, g0, g0, beta0, True, PRECISION)
    n11 = _pair_block(k1, k1, inv1, inv1, g1, g1, beta1, True, PRECISION)
    n22 = _pair_block(k2, k2, inv2, inv2, g2, g2, beta2, True, PRECISION)
    n33 = _pair_block(k3, k3, inv3, inv3, g3, g3, beta3, True, PRECISION)
    n10 = _pair_block(k1, k0, inv1, inv0, g1, g0, beta1, False, PRECISION)
    n20 = _pair_block(k2, k0, inv2, inv0, g2, g0, beta2, False, PRECISION)
    n21 = _pair_block(k2, k1, inv2, inv1, g2, g1, beta2, False, PRECISION)
    n30 = _pair_block(k3, k0, inv3, inv0, g3, g0, beta3, False, PRECISION)
    n31 = _pair_block(k3, k1, inv3, inv1, g3, g1, beta3, False, PRECISION)
    n32 = _pair_block(k3, k2, inv3, inv2, g3, g2, beta3, False, PRECISION)

    t00 = _inverse16(n00, PRECISION)
    t11 = _inverse16(n11, PRECISION)
    t22 = _inverse16(n22, PRECISION)
    t33 = _inverse16(n33, PRECISION)
    t10 = -_product(t11, _product(n10, t00, PRECISION), PRECISION)
    t21 = -_product(t22, _product(n21, t11, PRECISION), PRECISION)
    t32 = -_product(t33, _product(n32, t22, PRECISION), PRECISION)
    t20 = _product(n20, t00, PRECISION) + _product(n21, t10, PRECISION)
    t20 = -_product(t22, t20, PRECISION)
    t31 = _product(n31, t11, PRECISION) + _product(n32, t21, PRECISION)
    t31 = -_product(t33, t31, PRECISION)
    t30 = _product(n30, t00, PRECISION) + _product(n31, t10, PRECISION) + _product(n32, t20, PRECISION)
    t30 = -_product(t33, t30, PRECISION)

    t_ptr += (bh.to(tl.int64) * tl.num_programs(0) + n) * 4096 + i[:, None] * 64 + i[None, :]
    none = tl.zeros([16, 16], tl.float32)
    _store_block_row(t_ptr, t00, none, none, none)
    _store_block_row(t_ptr + 1024, t10, t11, none, none)
    _store_block_row(t_ptr + 2048, t20, t21, t22, none)
    _store_block_row(t_ptr + 3072, t30, t31, t32, t33)


@triton.jit
def _scan_states(
    k_desc, v_desc, t_desc, s_desc, u_desc, stats_ptr, first_ptr, last_ptr, N, plane,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the states at the start of every chunk, the writes u, and the last state, for BV rows of X_v.

    y_p = beta_p (v_p - e^(g_p) S k_p), and S' = e^(g_C) S + sum_s e^(g_C - g_s) u_s k_sᵀ with g_C that of the chunk's
    last token. Grid: (X / BV, B H); a program walks through all chunks with its rows of the state in float32 registers.

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included.

    Args:
        k_desc: Descriptor of keys [B, T, J X].
        v_desc: Descriptor of values [B, T, J X].
        t_desc: Descriptor of T [B H N C, C].
        s_desc: Descriptor of start states [B H N X, X], written.
        u_desc: Descriptor of writes [B H N X, C], written.
        stats_ptr: float32 [planes, B, H, N C].
        first_ptr: Initial state, float32 [B, H, X_v, X_k]; read only with HAS_FIRST.
        last_ptr: Last state, float32 [B, H, X_v, X_k], written.
        N: Chunks.
        plane: Elements of a plane of statistics.
        H: constexpr, heads.
        G: constexpr, heads per KV head.
        X: constexpr, head size.
        C: constexpr, tokens of a chunk.
        BV: constexpr, rows of the state of a program.
        HAS_FIRST: constexpr bool, True with an initial state.
        PRECISION: constexpr, input precision of products.
    """
    v0 = tl.program_id(0) * BV
    bh = tl.program_id(1)
    b = bh // H
    j = bh % H // G
    at = (bh.to(tl.int64) * X + v0 + tl.arange(0, BV))[:, None] * X + tl.arange(0, X)[None, :]
    state = tl.zeros([BV, X], tl.float32)
    if HAS_FIRST:
        state = tl.load(first_ptr + at)
    row = stats_ptr + bh.to(tl.int64) * N * C
    c = tl.arange(0, C)
    beta = tl.load(row + _BETA * plane + c)
    read = tl.load(row + _READ * plane + c)
    write = tl.load(row + _WRITE * plane + c)
    keep = tl.load(row + _DECAY * plane + C - 1)
    for n in tl.range(0, N):
        k = k_desc.load([b, n * C, j * X]).reshape(C, X)
        v = v_desc.load([b, n * C, j * X + v0]).reshape(C, BV)
        t = t_desc.load([(bh * N + n) * C, 0])
        # prefetch the next chunk's rows
        row += C * (n + 1 < N).to(tl.int32)
        next_beta = tl.load(row + _BETA * plane + c)
        next_read = tl.load(row + _READ * plane + c)
        next_write = tl.load(row + _WRITE * plane + c)
        next_keep = tl.load(row + _DECAY * plane + C - 1)
        start = state.to(k.dtype)
        s_desc.store([(bh * N + n) * X + v0, 0], start)
        recalled = tl.dot(start, k.T, input_precision=PRECISION)
        y = beta[None, :] * v.T.to(tl.float32) - read[None, :] * recalled
        u = tl.dot(y.to(k.dtype), t.T, input_precision=PRECISION)
        u_desc.store([(bh * N + n) * X + v0, 0], u.to(k.dtype))
        state = tl.dot((u * write[None, :]).to(k.dtype), k, state * tl.exp(keep), input_precision=PRECISION)
        beta, read, write, keep = next_beta, next_read, next_write, next_keep
    tl.store(last_ptr + at, state)


@triton.jit
def _readout(
    q_desc, k_desc, s_desc, u_desc, r_desc, p_desc, stats_ptr, N, plane,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the readout, P, 1/|q| and e^g/|q| of one chunk and head.

    The readout is r_p = e^(g_p) S q_p + sum_s P_ps u_s. Grid: (N, B H).

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included.

    Args:
        q_desc: Descriptor of queries [B, T, H X].
        k_desc: Descriptor of keys [B, T, J X].
        s_desc: Descriptor of start states [B H N X, X].
        u_desc: Descriptor of writes [B H N X, C].
        r_desc: Descriptor of the readout [B, T, H X], written.
        p_desc: Descriptor of P [B H N C, C], written.
        stats_ptr: float32 [planes, B, H, N C]; two planes are written.
        N: Chunks.
        plane: Elements of a plane of statistics.
        H: constexpr, heads.
        G: constexpr, heads per KV head.
        X: constexpr, head size.
        C: constexpr, tokens of a chunk.
        BV: constexpr, columns of the readout at a time.
        PRECISION: constexpr, input precision of products.
    """
    n = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    c = tl.arange(0, C)
    row = stats_ptr + (bh.to(tl.int64) * N + n) * C + c
    decay = tl.load(row + _DECAY * plane)
    inv_k = tl.load(row + _INV_K * plane)
    q = q_desc.load([b, n * C, h * X]).reshape(C, X)
    k = k_desc.load([b, n * C, h // G * X]).reshape(C, X)
    inv_q = _inverse_length(q)
    tl.store(row + _INV_Q * plane, inv_q)
    power = tl.where(c[:, None] >= c[None, :], decay[:, None] - decay[None, :], float("-inf"))
    p = tl.dot(q, k.T, input_precision=PRECISION) * tl.exp(power) * inv_q[:, None] * inv_k[None, :]
    p = p.to(q.dtype)
    p_desc.store([(bh * N + n) * C, 0], p)
    grown = tl.exp(decay) * inv_q
    tl.store(row + _GROWN * plane, grown)
    for v0 in tl.range(0, X, BV):
        s = s_desc.load([(bh * N + n) * X + v0, 0])
        u = u_desc.load([(bh * N + n) * X + v0, 0])
        r = tl.dot(q, s.T, input_precision=PRECISION) * grown[:, None]
        r = tl.dot(p, u.T, r, input_precision=PRECISION)
        r_desc.store([b, n * C, h * X + v0], r.to(q.dtype).reshape(1, C, BV))


@triton.jit
def _scan_states_backward(
    q_desc, k_desc, gr_desc, p_desc, t_desc, ds_desc, dy_desc, stats_ptr, last_ptr, first_ptr, N, plane,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    HAS_LAST: tl.constexpr, KEEP_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dS', the gradient of every chunk's end state, and dy, for BV rows of X_v.

    Grid: (X / BV, B H), from the last chunk to the first.

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included. dX is the
    gradient of X; `ratio` holds the decays between two tokens, and E = -beta ratio dy uᵀ below the diagonal.

    Args:
        q_desc: Descriptor of queries [B, T, H X].
        k_desc: Descriptor of keys [B, T, J X].
        gr_desc: Descriptor of the readout's gradient [B, T, H X].
        p_desc: Descriptor of P [B H N C, C].
        t_desc: Descriptor of T [B H N C, C].
        ds_desc: Descriptor of dS' [B H N X, X], written.
        dy_desc: Descriptor of dy [B H N X, C], written.
        stats_ptr: float32 [planes, B, H, N C].
        last_ptr: Gradient of the last state, float32 [B, H, X, X]; read only with HAS_LAST.
        first_ptr: Gradient of the initial state, written only with KEEP_FIRST.
        N: Chunks.
        plane: Elements of a plane of statistics.
        H: constexpr, heads.
        G: constexpr, heads per KV head.
        X: constexpr, head size.
        C: constexpr, tokens of a chunk.
        BV: constexpr, rows of the state of a program.
        HAS_LAST: constexpr bool, True when the last state has a gradient.
        KEEP_FIRST: constexpr bool, True to store the initial state's gradient.
        PRECISION: constexpr, input precision of products.
    """
    v0 = tl.program_id(0) * BV
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    at = (bh.to(tl.int64) * X + v0 + tl.arange(0, BV))[:, None] * X + tl.arange(0, X)[None, :]
    state = tl.zeros([BV, X], tl.float32)
    if HAS_LAST:
        state = tl.load(last_ptr + at)
    row = stats_ptr + (bh.to(tl.int64) * N + N - 1) * C
    c = tl.arange(0, C)
    read = tl.load(row + _READ * plane + c)
    write = tl.load(row + _WRITE * plane + c)
    grown = tl.load(row + _GROWN * plane + c)
    keep = tl.load(row + _DECAY * plane + C - 1)
    for i in tl.range(0, N):
        n = N - 1 - i
        q = q_desc.load([b, n * C, h * X]).reshape(C, X)
        k = k_desc.load([b, n * C, h // G * X]).reshape(C, X)
        gr = gr_desc.load([b, n * C, h * X + v0]).reshape(C, BV)
        p = p_desc.load([(bh * N + n) * C, 0])
        t = t_desc.load([(bh * N + n) * C, 0])
        row -= C * (n > 0).to(tl.int32)
        next_read = tl.load(row + _READ * plane + c)
        next_write = tl.load(row + _WRITE * plane + c)
        next_grown = tl.load(row + _GROWN * plane + c)
        next_keep = tl.load(row + _DECAY * plane + C - 1)
        end = state.to(k.dtype)
        ds_desc.store([(bh * N + n) * X + v0, 0], end)
        decayed_queries = (q.to(tl.float32) * grown[:, None]).to(k.dtype)
        state = tl.dot(gr.T, decayed_queries, state * tl.exp(keep), input_precision=PRECISION)
        du = tl.dot(end, k.T, input_precision=PRECISION) * write[None, :]
        du = tl.dot(gr.T, p, du, input_precision=PRECISION)
        dy = tl.dot(du.to(k.dtype), t, input_precision=PRECISION)
        dy_desc.store([(bh * N + n) * X + v0, 0], dy.to(k.dtype))
        state = tl.dot((dy * -read[None, :]).to(k.dtype), k, state, input_precision=PRECISION)
        read, write, grown, keep = next_read, next_write, next_grown, next_keep
    if KEEP_FIRST:
        tl.store(first_ptr + at, state)


@triton.jit
def _pair_gradients(
    q_desc, k_desc, gr_desc, p_desc, s_desc, u_desc, dy_desc, dq_desc, dp_desc, e_desc,
    stats_ptr, parts_ptr, d_beta_ptr, T, N, plane,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dq, d_beta, ratio dP, E and the terms of dg from pairs within the chunk, of one chunk and head.

    Grid: (N, B H). Descriptors: q, gr and dq [B, T, H X], k [B, T, J X], P, dP and E [B H N C, C], S [B H N X, X], u
    and dy [B H N X, C]; dq, dP and E are written in k's dtype. `stats_ptr` is float32 [planes, B, H, N C], `plane` the
    elements of a plane. Written: `parts_ptr` float32 [3, B, H, N C], terms of dg of queries, of E's rows, and of
    columns; `d_beta_ptr` float32 [B, T, H]. BV columns of X_v are read at a time.

    T: tokens. N: chunks. Constexprs: H heads, G heads per KV head, X head size, C tokens of a chunk, PRECISION input
    precision of products.

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included. dX is the
    gradient of X; `ratio` holds the decays between two tokens, and E = -beta ratio dy uᵀ below the diagonal.
    """
    n = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    c = tl.arange(0, C)
    first = (bh.to(tl.int64) * N + n) * C
    row = stats_ptr + first + c
    parts = parts_ptr + first + c
    dq = tl.zeros([C, X], tl.float32)
    dp = tl.zeros([C, C], tl.float32)
    dn = tl.zeros([C, C], tl.float32)
    for v0 in tl.range(0, X, BV):
        gr = gr_desc.load([b, n * C, h * X + v0]).reshape(C, BV)
        dy = dy_desc.load([(bh * N + n) * X + v0, 0])
        s = s_desc.load([(bh * N + n) * X + v0, 0])
        u = u_desc.load([(bh * N + n) * X + v0, 0])
        dn = tl.dot(dy.T, u, dn, input_precision=PRECISION)
        dp = tl.dot(gr, u, dp, input_precision=PRECISION)
        dq = tl.dot(gr, s, dq, input_precision=PRECISION)
    decay = tl.load(row + _DECAY * plane)
    inv_k = tl.load(row + _INV_K * plane)
    inv_q = tl.load(row + _INV_Q * plane)
    beta = tl.load(row + _BETA * plane)
    token_at = (b.to(tl.int64) * T + n * C + c) * H + h
    # u / beta is v less the memory's prediction, which keeps its digits however small beta is
    d_beta = tl.sum(tl.where(c[:, None] == c[None, :], dn, 0.0), 1)
    d_beta = tl.where(beta > 1e-30, d_beta / tl.maximum(beta, 1e-30), 0.0)
    tl.store(d_beta_ptr + token_at, d_beta, mask=n * C + c < T)

    k = k_desc.load([b, n * C, h // G * X]).reshape(C, X)
    power = tl.where(c[:, None] >= c[None, :], decay[:, None] - decay[None, :], float("-inf"))
    ratio = tl.exp(power)
    e = tl.where(c[:, None] > c[None, :], dn * ratio, 0.0) * (-beta)[:, None]
    pairs = tl.dot(k, k.T, input_precision=PRECISION) * inv_k[:, None] * inv_k[None, :] * e
    e_desc.store([(bh * N + n) * C, 0], e.to(k.dtype))
    tl.store(parts + plane, tl.sum(pairs, 1))
    p = p_desc.load([(bh * N + n) * C, 0])
    pairs_q = dp * p.to(tl.float32)
    tl.store(parts + 2 * plane, tl.sum(pairs + pairs_q, 0))
    dp = (dp * ratio).to(k.dtype)
    dp_desc.store([(bh * N + n) * C, 0], dp)
    q = q_desc.load([b, n * C, h * X]).reshape(C, X)
    dq *= tl.exp(decay)[:, None]
    dg = tl.sum(q.to(tl.float32) * dq, 1) * inv_q + tl.sum(pairs_q, 1)
    tl.store(parts, dg)
    dq = tl.dot((dp.to(tl.float32) * inv_k[None, :]).to(k.dtype), k, dq, input_precision=PRECISION)
    along = tl.where(inv_q < _AT_FLOOR, dg, 0.0) * inv_q
    dq = (dq - q.to(tl.float32) * along[:, None]) * inv_q[:, None]
    dq_desc.store([b, n * C, h * X], dq.to(q.dtype).reshape(1, C, X))


@triton.jit
def _key_gradients(
    q_desc, k_desc, dp_desc, e_desc, s_desc, u_desc, ds_desc, dy_desc, dk_desc,
    stats_ptr, parts_ptr, d_gate_ptr, T, N, plane,
    H: tl.constexpr, G: tl.constexpr, X: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the head's share of dk, and d_log_gamma (the gradient of the log decays), of one chunk and head.

    dk includes the gradient of the normalisation of keys: it is projected off k, except where the norm is at its floor.

    Grid: (N, B H). Descriptors: q and dk [B, T, H X], k [B, T, J X], dP and E [B H N C, C], S and dS' [B H N X, X], u
    and dy [B H N X, C]; dk is written in k's dtype. `d_gate_ptr` is float32 [B, T, H], written; `parts_ptr` float32 [3,
    B, H, N C] comes from `_pair_gradients`. `stats_ptr` is float32 [planes, B, H, N C], `plane` the elements of a
    plane. BV columns of X_v are read at a time.

    T: tokens. N: chunks. Constexprs: H heads, G heads per KV head, X head size, C tokens of a chunk, PRECISION input
    precision of products.

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included. dX is the
    gradient of X; `ratio` holds the decays between two tokens, and E = -beta ratio dy uᵀ below the diagonal.
    """
    n = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    c = tl.arange(0, C)
    first = (bh.to(tl.int64) * N + n) * C
    row = stats_ptr + first + c
    parts = parts_ptr + first + c
    dk = tl.zeros([C, X], tl.float32)
    write = tl.zeros([C, X], tl.float32)
    state_product = tl.zeros([X], tl.float32)
    for v0 in tl.range(0, X, BV):
        s = s_desc.load([(bh * N + n) * X + v0, 0])
        ds = ds_desc.load([(bh * N + n) * X + v0, 0])
        u = u_desc.load([(bh * N + n) * X + v0, 0])
        dy = dy_desc.load([(bh * N + n) * X + v0, 0])
        state_product += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
        dk = tl.dot(dy.T, s, dk, input_precision=PRECISION)
        write = tl.dot(u.T, ds, write, input_precision=PRECISION)
    decay = tl.load(row + _DECAY * plane)
    inv_k = tl.load(row + _INV_K * plane)
    inv_q = tl.load(row + _INV_Q * plane)
    beta = tl.load(row + _BETA * plane)
    end = tl.load(stats_ptr + _DECAY * plane + first + C - 1)
    k = k_desc.load([b, n * C, h // G * X]).reshape(C, X)
    write *= tl.exp(end - decay)[:, None]
    along_write = tl.sum(k.to(tl.float32) * write, 1) * inv_k
    last = tl.sum(along_write) + tl.exp(end) * tl.sum(state_product)
    along_write += tl.load(parts + 2 * plane)
    dk *= (-beta * tl.exp(decay))[:, None]
    along_read = tl.sum(k.to(tl.float32) * dk, 1) * inv_k + tl.load(parts + plane)
    dk += write
    e = e_desc.load([(bh * N + n) * C, 0]).to(tl.float32)
    dk = tl.dot((e * inv_k[None, :]).to(k.dtype), k, dk, input_precision=PRECISION)
    dk = tl.dot((e * inv_k[:, None]).to(k.dtype).T, k, dk, input_precision=PRECISION)
    q = q_desc.load([b, n * C, h * X]).reshape(C, X)
    dp = dp_desc.load([(bh * N + n) * C, 0]).to(tl.float32)
    dk = tl.dot((dp * inv_q[:, None]).to(k.dtype).T, q, dk, input_precision=PRECISION)
    along = tl.where(inv_k < _AT_FLOOR, along_read + along_write, 0.0) * inv_k
    dk = (dk - k.to(tl.float32) * along[:, None]) * inv_k[:, None]
    dk_desc.store([b, n * C, h * X], dk.to(k.dtype).reshape(1, C, X))
    dg = tl.load(parts) + along_read - along_write + tl.where(c == C - 1, last, 0.0)
    token_at = (b.to(tl.int64) * T + n * C + c) * H + h
    tl.store(d_gate_ptr + token_at, tl.cumsum(dg, 0, reverse=True), mask=n * C + c < T)


@triton.jit
def _sum_heads(
    part_desc, dy_desc, dk_desc, dv_desc, stats_ptr, N, plane,
    J: tl.constexpr, G: tl.constexpr, X: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of one KV head and chunk, BD columns, as the ordered sum over its G heads.

    Grid: (N, B J, X / BD). dk is the sum of the shares in `part_desc`, dv that of beta dy. With G = 1 only dv is
    written.

    Names: S the state at a chunk's start, S' at its end, y = beta (v - what S recalls for k), u = T y the writes, T =
    (I + N)^-1 with N_ps = beta_p e^(g_p - g_s) k_p.k_s for s < p and P_ps = e^(g_p - g_s) q_p.k_s for s <= p. Here k
    and q have unit length, and g is the running sum of the chunk's log decays, each token's own included. dX is the
    gradient of X; `ratio` holds the decays between two tokens, and E = -beta ratio dy uᵀ below the diagonal.

    Args:
        part_desc: Descriptor of the heads' shares of dk [B, T, H X].
        dy_desc: Descriptor of dy [B H N X, C].
        dk_desc: Descriptor of dk [B, T, J X], written.
        dv_desc: Descriptor of dv [B, T, J X], written.
        stats_ptr: float32 [planes, B, H, N C].
        N: Chunks.
        plane: Elements of a plane of statistics.
        J: constexpr, KV heads.
        G: constexpr, heads per KV head.
        X: constexpr, head size.
        C: constexpr, tokens of a chunk.
        BD: constexpr, columns of a program.
    """
    n = tl.program_id(0)
    b = tl.program_id(1) // J
    j = tl.program_id(1) % J
    d0 = tl.program_id(2) * BD
    c = tl.arange(0, C)
    dk = tl.zeros([C, BD], tl.float32)
    dv = tl.zeros([BD, C], tl.float32)
    for g in tl.range(0, G):
        bh = (b * J + j) * G + g
        beta = tl.load(stats_ptr + _BETA * plane + (bh.to(tl.int64) * N + n) * C + c)
        if G > 1:
            dk += part_desc.load([b, n * C, (j * G + g) * X + d0]).reshape(C, BD).to(tl.float32)
        dv += dy_desc.load([(bh * N + n) * X + d0, 0]).to(tl.float32) * beta[None, :]
    if G > 1:
        dk_desc.store([b, n * C, j * X + d0], dk.to(dk_desc.dtype).reshape(1, C, BD))
    dv_desc.store([b, n * C, j * X + d0], dv.T.to(dv_desc.dtype).reshape(1, C, BD))


# --- launches -----------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Launch configuration of one kernel.

    `block` is the number of rows of X_v (or columns of X) handled at a time, `warps` the warps of a program, `stages`
    the pipeline stages of its loop, `registers` a cap on registers per thread, or None.
    """

    block: int
    warps: int
    stages: int
    registers: int | None = None

    def launch(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def _tiles(d: int, dtype: torch.dtype) -> dict[str, Tile]:
    """Return the launch configuration of each kernel for a head size and dtype; measured on an H200.

    Keys: inverse, scan, readout, scan_back, pair_gradients, key_gradients, sum_heads; values: `Tile` (rows or columns
    at a time, warps, stages, cap on registers or None). Float32 gets the smallest tiles.
    """
    if dtype == torch.float32:
        names = ("scan", "readout", "scan_back", "pair_gradients", "key_gradients", "sum_heads")
        small = dict.fromkeys(names, Tile(min(d, 16), 4, 1))
        return small | {"inverse": Tile(16, 1, 1)}
    return {
        "inverse": Tile(16, 1, 1),
        "scan": Tile(min(d, 64), 4, 3),
        "readout": Tile(min(d, 128), 4, 1),
        "scan_back": Tile(128, 8, 2) if d == 128 else Tile(min(d, 64), 4, 2),
        "pair_gradients": Tile(min(d, 64), 4, 2),
        "key_gradients": Tile(min(d, 64), 4, 2),
        "sum_heads": Tile(min(d, 64), 4, 2),
    }


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _token_blocks(x_BTHX: Tensor, columns: int) -> TensorDescriptor:
    """Return a descriptor of x [B, T, H, X] as [B, T, H X], in blocks of a chunk and `columns` of one head."""
    return TensorDescriptor.from_tensor(x_BTHX.view(*x_BTHX.shape[:2], -1), [1, CHUNK, columns])


def _row_blocks(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of x [..., A, B] as [... A, B], in blocks of `rows` whole rows."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, x.shape[-1]])


def _sizes(q_BTHX: Tensor, k_BTJX: Tensor) -> tuple[int, int, int, int, int, int]:
    b, t, h, d = q_BTHX.shape
    return b, t, h, k_BTJX.shape[2], d, triton.cdiv(t, CHUNK)


def _widen_float16(x: Tensor) -> Tensor:
    # products of raw keys and 1 / |k| leave the range of float16
    return x.float() if x.dtype == torch.float16 else x


def forward(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, log_gamma_BTH: Tensor, beta_BTH: Tensor,
    initial_state_BHXX: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Return (readout, last state, tensors that `backward` reads).

    The readout is [B, T, H, X] in q's dtype, the last state float32 [B, H, X_v, X_k]. The saved tensors are stats [7,
    B, H, L] float32 (g, 1 / |k|, 1 / |q|, beta, beta e^g / |k|, e^(g_C - g) / |k|, e^g / |q|), T and P [B, H, N, C, C],
    S [B, H, N, X_v, X_k] and u [B, H, N, X_v, C] in q's dtype (float32 for float16). With e bytes per element of q
    these are e (2 C + X + X²/C) bytes per token and head (1 KiB for bfloat16, X = 128). Multiply-adds per token and
    head: 3 X² + 3.6 C X, and the inverse.

    Args:
        q_BTHX: Contiguous queries on a GPU; float16 is computed in float32.
        k_BTJX: Contiguous keys, of q's dtype.
        v_BTJX: Contiguous values, of q's dtype.
        log_gamma_BTH: Contiguous float32 natural log decays.
        beta_BTH: Contiguous float32 write strengths.
        initial_state_BHXX: Contiguous float32 state, or None for zeros.
    """
    kind = q_BTHX.dtype
    q, k, v = _widen_float16(q_BTHX), _widen_float16(k_BTJX), _widen_float16(v_BTJX)
    b, t, h, heads_kv, d, n = _sizes(q, k)
    tiles, precision = _tiles(d, q.dtype), _precision(q.dtype)
    stats = q.new_empty(NUM_PLANES, b, h, n * CHUNK, dtype=torch.float32)
    inverse, p = (q.new_empty(b, h, n, CHUNK, CHUNK) for _ in range(2))
    s, u = q.new_empty(b, h, n, d, d), q.new_empty(b, h, n, d, CHUNK)
    r, last = torch.empty_like(q), q.new_empty(b, h, d, d, dtype=torch.float32)
    plane = stats.stride(0)
    constexprs: dict[str, Any] = {"H": h, "G": h // heads_kv, "X": d, "PRECISION": precision}
    _inverse[(n, b * h)](
        k, log_gamma_BTH, beta_BTH, inverse, stats, t, plane,
        **tiles["inverse"].launch(), **constexprs,
    )  # fmt: skip
    tile = tiles["scan"]
    block = tile.block
    _scan_states[(d // block, b * h)](
        _token_blocks(k, d), _token_blocks(v, block), _row_blocks(inverse, CHUNK), _row_blocks(s, block), _row_blocks(u, block), stats,
        last if initial_state_BHXX is None else initial_state_BHXX, last, n, plane,
        C=CHUNK, BV=block, HAS_FIRST=initial_state_BHXX is not None, **tile.launch(), **constexprs,
    )  # fmt: skip
    tile = tiles["readout"]
    block = tile.block
    _readout[(n, b * h)](
        _token_blocks(q, d), _token_blocks(k, d), _row_blocks(s, block), _row_blocks(u, block), _token_blocks(r, block), _row_blocks(p, CHUNK),
        stats, n, plane, C=CHUNK, BV=block, **tile.launch(), **constexprs,
    )  # fmt: skip
    return r.to(kind), last, (stats, inverse, p, s, u)


def backward(
    g_r_BTHX: Tensor, g_last_state_BHXX: Tensor | None, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor,
    log_gamma_BTH: Tensor, beta_BTH: Tensor, initial_state_BHXX: Tensor | None, *saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of (q, k, v, log_gamma, beta, initial state or None).

    Those of q, k and v have q's dtype, those of the gates and the state are float32.

    Works in dS [B, H, N, X_v, X_k], dy [B, H, N, X_v, C], ratio dP and E [B, H, N, C, C] and the heads' shares of dk
    [B, T, H, X], all in q's dtype (float32 for float16). Multiply-adds per token and head: 6 X² + 9 C X. At beta 0 the
    gradient of beta is given as 0. All tensors are contiguous; those from q to the initial state are inputs of
    `forward`.

    Args:
        g_r_BTHX: Gradient of the readout, of q's dtype.
        g_last_state_BHXX: Gradient of the last state, float32, or None for zeros.
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values, read by `forward` alone; only their shape and dtype count, which are those of k.
        log_gamma_BTH: float32 natural log decays; only their shape counts.
        beta_BTH: float32 write strengths; only their shape counts.
        initial_state_BHXX: float32 state, or None, which gives None as its gradient.
        *saved: Third result of `forward`.
    """
    stats, inverse, p, s, u = saved
    kind = q_BTHX.dtype
    q, k, g_r = _widen_float16(q_BTHX), _widen_float16(k_BTJX), _widen_float16(g_r_BTHX)
    b, t, h, heads_kv, d, n = _sizes(q, k)
    tiles, plane = _tiles(d, q.dtype), stats.stride(0)
    constexprs: dict[str, Any] = {"H": h, "G": h // heads_kv, "X": d, "C": CHUNK, "PRECISION": _precision(q.dtype)}
    ds, dy = torch.empty_like(s), torch.empty_like(u)
    d_first = None if initial_state_BHXX is None else torch.empty_like(initial_state_BHXX)
    tile = tiles["scan_back"]
    block = tile.block
    _scan_states_backward[(d // block, b * h)](
        _token_blocks(q, d), _token_blocks(k, d), _token_blocks(g_r, block), _row_blocks(p, CHUNK), _row_blocks(inverse, CHUNK),
        _row_blocks(ds, block), _row_blocks(dy, block), stats, stats if g_last_state_BHXX is None else g_last_state_BHXX,
        stats if d_first is None else d_first, n, plane,
        BV=block, HAS_LAST=g_last_state_BHXX is not None, KEEP_FIRST=d_first is not None,
        **tile.launch(), **constexprs,
    )  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    shares = dk if h == heads_kv else torch.empty_like(q)
    d_gate, d_beta = torch.empty_like(log_gamma_BTH), torch.empty_like(beta_BTH)
    dp, e = torch.empty_like(p), torch.empty_like(p)
    parts = stats.new_empty(3, b, h, n * CHUNK)
    tile = tiles["pair_gradients"]
    block = tile.block
    _pair_gradients[(n, b * h)](
        _token_blocks(q, d), _token_blocks(k, d), _token_blocks(g_r, block), _row_blocks(p, CHUNK), _row_blocks(s, block), _row_blocks(u, block),
        _row_blocks(dy, block), _token_blocks(dq, d), _row_blocks(dp, CHUNK), _row_blocks(e, CHUNK),
        stats, parts, d_beta, t, n, plane, BV=block, **tile.launch(), **constexprs,
    )  # fmt: skip
    tile = tiles["key_gradients"]
    block = tile.block
    _key_gradients[(n, b * h)](
        _token_blocks(q, d), _token_blocks(k, d), _row_blocks(dp, CHUNK), _row_blocks(e, CHUNK), _row_blocks(s, block), _row_blocks(u, block),
        _row_blocks(ds, block), _row_blocks(dy, block), _token_blocks(shares, d), stats, parts, d_gate, t, n, plane,
        BV=block, **tile.launch(), **constexprs,
    )  # fmt: skip
    tile = tiles["sum_heads"]
    block = tile.block
    _sum_heads[(n, b * heads_kv, d // block)](
        _token_blocks(shares, block), _row_blocks(dy, block), _token_blocks(dk, block), _token_blocks(dv, block), stats, n, plane,
        J=heads_kv, G=h // heads_kv, X=d, C=CHUNK, BD=block, **tile.launch(),
    )  # fmt: skip
    return dq.to(kind), dk.to(kind), dv.to(kind), d_gate, d_beta, d_first
