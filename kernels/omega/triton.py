"""The omega memory of one matrix as plain Triton kernels, forward and backward (docs/kernels.md, "Omega memory: one scan, the rest products"; oracle: `omega.py`).

B batch, T length, H heads, X head size and size of a feature, G = B H, C tokens of a chunk, S pairs that it sees, N chunks, L = T + S - C.
With M and R the memory and its momentum [X, X] before a chunk, K, V, Q its pairs and queries, E = K Mᵀ - V, P = felt ⊙ Q Kᵀ, and the
chunk's last token giving keep, fl and to out of kept, felt and carried:
    Y = kept Q Mᵀ - P E - carried Q Rᵀ,  M' = keep M - to R - (fl ⊙ E)ᵀ K,  R' = old R + (share ⊙ E)ᵀ K,
or, orthogonal, Y = Q Mᵀ, M' = keep M - to N(R'). Backward, with y, m and r the gradients of Y, M' and R':
    e = -Pᵀ y - fl ⊙ K mᵀ + share ⊙ K rᵀ (orthogonal: share ⊙ K rᵀ alone, r with what N gives back of -to m),
    dM = keep m + (kept y)ᵀ Q + eᵀ K,  dR = old r - to m - (carried y)ᵀ Q,  dA = -felt ⊙ y Eᵀ,  dV = -e,
    dQ = kept y M - carried y R + dA K,  dK = dAᵀ Q + e M - (fl ⊙ E) m + (share ⊙ E) r, and the rates' are row sums of these products.

Only M and R pass from chunk to chunk. Plain: rows of M never meet, so a program takes a block of them through all chunks, in float32
registers. Orthogonal: they do, so a program has a head's whole matrix, and all chunks and Newton-Schulz steps in one launch: G = 128
programs fill 132 multiprocessors, and a product of 128³ in 16 bits takes half a microsecond where a launch takes ten.
What belongs to one chunk runs for all at once. Operands: bfloat16; orthogonal: float16 over the largest number of the tile, since what
Newton-Schulz and its gradient enlarge 485 times must not be bfloat16's rounding (measured: 0.04 of dK, against 0.004). No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .newton_schulz import EPS, FACTORS, STEPS
from .tiles import Sizes, sizes

_A = tl.constexpr(FACTORS[0])
# a sum begins with what is not a product, so that no second one is in registers
_B_OF_C = tl.constexpr(FACTORS[1] / FACTORS[2])
_C = tl.constexpr(FACTORS[2])
_EPS = tl.constexpr(EPS)
_STEPS = tl.constexpr(STEPS)
_TINY = tl.constexpr(1e-30)


@triton.jit
def _operand(x, kind: tl.constexpr):
    """(x as the tensor cores take it, what it is to be multiplied by)."""
    if kind == tl.float16:
        top = tl.maximum(tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0), _TINY)
        return (x.to(tl.float32) * (1.0 / top)).to(kind), top
    else:
        return x.to(kind), 1.0


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _load_rows(x_ptr, first, i, inside, H: tl.constexpr, X: tl.constexpr):
    """[., X] of the tokens first + i of one head, 0 where not inside; x_ptr stands at its row and head."""
    at = (first + i).to(tl.int64)[:, None] * (H * X) + tl.arange(0, X)[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None], other=0.0)


@triton.jit
def _scan(
    k_ptr, v_ptr, memory_decay_ptr, pair_weights_ptr, momentum_weight_ptr, share_ptr, momentum_decay_ptr, memory_ptr, momentum_ptr,
    memories_ptr, momenta_ptr, last_ptr, last_momentum_ptr, N, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr,
    SLOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Memories (and momenta) before every chunk, BX rows at a time, and after the last."""
    x0 = tl.program_id(0) * BX
    g = tl.program_id(1).to(tl.int64)
    G = tl.num_programs(1)
    row = x0 + tl.arange(0, BX)
    at = row[:, None] * X + tl.arange(0, X)[None, :]
    k_ptr += (g // H * L * H + g % H) * X
    v_ptr += (g // H * L * H + g % H) * X
    m = tl.load(memory_ptr + g * (X * X) + at)
    r = m
    if SLOW:
        r = tl.load(momentum_ptr + g * (X * X) + at)
    kind = k_ptr.dtype.element_ty
    for n in tl.range(0, N):
        ng = n * G + g
        keep = tl.load(memory_decay_ptr + ng * C + C - 1)
        start = m.to(kind)
        tl.store(memories_ptr + ng * (X * X) + at, start)
        m *= keep
        if SLOW:
            tl.store(momenta_ptr + ng * (X * X) + at, r.to(kind))
            m -= tl.load(momentum_weight_ptr + ng * C + C - 1) * r
            r *= tl.load(momentum_decay_ptr + ng)
        for s0 in tl.static_range(0, S, BS):
            i = s0 + tl.arange(0, BS)
            k = _load_rows(k_ptr, n * C, i, i < S, H, X)
            token = (n * C + i).to(tl.int64)
            v = tl.load(v_ptr + token[:, None] * (H * X) + row[None, :], mask=(i < S)[:, None], other=0.0)
            pair_weights = tl.load(pair_weights_ptr + (ng * C + C - 1) * S + i, mask=i < S, other=0.0)
            errors = tl.dot(start, k.T, input_precision=PRECISION) - v.T.to(tl.float32)
            m = tl.dot((errors * -pair_weights[None, :]).to(kind), k, m, input_precision=PRECISION)
            if SLOW:
                share = tl.load(share_ptr + ng * S + i, mask=i < S, other=0.0)
                r = tl.dot((errors * share[None, :]).to(kind), k, r, input_precision=PRECISION)
    tl.store(last_ptr + g * (X * X) + at, m)
    if SLOW:
        tl.store(last_momentum_ptr + g * (X * X) + at, r)


@triton.jit
def _readout(
    q_ptr, k_ptr, v_ptr, memory_decay_ptr, pair_weights_ptr, momentum_weight_ptr, memories_ptr, momenta_ptr, y_ptr, p_ptr, T, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    ORTHOGONAL: tl.constexpr, SLOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y of one chunk and head; keeps P [BC, S in whole blocks]."""
    n = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    ng = n * tl.num_programs(1) + g
    x = tl.arange(0, X)
    at = x[:, None] * X + x[None, :]
    c = tl.arange(0, BC)
    q = _load_rows(q_ptr + (g // H * T * H + g % H) * X, n * C, c, c < C, H, X)
    kind = q.dtype
    m, size = _operand(tl.load(memories_ptr + ng * (X * X) + at), kind)
    y = tl.dot(q, m.T, input_precision=PRECISION) * size
    if not ORTHOGONAL:
        PADDED_S: tl.constexpr = (S + BS - 1) // BS * BS
        y *= tl.load(memory_decay_ptr + ng * C + c, mask=c < C, other=0.0)[:, None]
        if SLOW:
            r = tl.load(momenta_ptr + ng * (X * X) + at)
            momentum_weight = tl.load(momentum_weight_ptr + ng * C + c, mask=c < C, other=0.0)
            y -= tl.dot(q, r.T, input_precision=PRECISION) * momentum_weight[:, None]
        k_ptr += (g // H * L * H + g % H) * X
        v_ptr += (g // H * L * H + g % H) * X
        for s0 in tl.static_range(0, S, BS):
            i = s0 + tl.arange(0, BS)
            k = _load_rows(k_ptr, n * C, i, i < S, H, X)
            v = _load_rows(v_ptr, n * C, i, i < S, H, X)
            pair_weights = tl.load(
                pair_weights_ptr + (ng * C + c)[:, None] * S + i[None, :],
                mask=(c < C)[:, None] & (i < S)[None, :],
                other=0.0,
            )
            p = (tl.dot(q, k.T, input_precision=PRECISION) * pair_weights).to(kind)
            tl.store(p_ptr + (ng * BC + c)[:, None] * PADDED_S + i[None, :], p)
            errors = tl.dot(k, m.T, input_precision=PRECISION) - v.to(tl.float32)
            y -= tl.dot(p, errors.to(kind), input_precision=PRECISION)
    token = (n * C + c).to(tl.int64)[:, None] * (H * X) + x[None, :]
    tl.store(y_ptr + (g // H * T * H + g % H) * X + token, y.to(y_ptr.dtype.element_ty), mask=(c < C)[:, None])


@triton.jit
def _scan_backward(
    gy_ptr, q_ptr, k_ptr, p_ptr, memory_decay_ptr, pair_weights_ptr, momentum_weight_ptr, share_ptr, momentum_decay_ptr, g_last_ptr, g_last_momentum_ptr,
    g_memories_ptr, g_momenta_ptr, g_first_ptr, g_first_momentum_ptr, N, T, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BX: tl.constexpr, BC: tl.constexpr,
    BS: tl.constexpr, SLOW: tl.constexpr, HAS_LAST: tl.constexpr, HAS_LAST_MOMENTUM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the memory (and the momentum) after every chunk, BX rows at a time, and before the first."""
    x0 = tl.program_id(0) * BX
    g = tl.program_id(1).to(tl.int64)
    G = tl.num_programs(1)
    row = x0 + tl.arange(0, BX)
    at = row[:, None] * X + tl.arange(0, X)[None, :]
    gy_ptr += (g // H * T * H + g % H) * X
    q_ptr += (g // H * T * H + g % H) * X
    k_ptr += (g // H * L * H + g % H) * X
    PADDED_S: tl.constexpr = (S + BS - 1) // BS * BS
    kind = k_ptr.dtype.element_ty
    c = tl.arange(0, BC)
    m = tl.zeros([BX, X], tl.float32)
    if HAS_LAST:
        m = tl.load(g_last_ptr + g * (X * X) + at)
    r = tl.zeros([BX, X], tl.float32)
    if HAS_LAST_MOMENTUM:
        r = tl.load(g_last_momentum_ptr + g * (X * X) + at)
    for back in tl.range(0, N):
        n = N - 1 - back
        ng = n * G + g
        end = m.to(kind)
        tl.store(g_memories_ptr + ng * (X * X) + at, end)
        q = _load_rows(q_ptr, n * C, c, c < C, H, X)
        token = (n * C + c).to(tl.int64)
        gy = tl.load(gy_ptr + token[:, None] * (H * X) + row[None, :], mask=(c < C)[:, None], other=0.0).to(kind).T
        memory_decay = tl.load(memory_decay_ptr + ng * C + c, mask=c < C, other=0.0)
        slow = r.to(kind)
        if SLOW:
            tl.store(g_momenta_ptr + ng * (X * X) + at, slow)
            momentum_weight = tl.load(momentum_weight_ptr + ng * C + c, mask=c < C, other=0.0)
            r = r * tl.load(momentum_decay_ptr + ng) - tl.load(momentum_weight_ptr + ng * C + C - 1) * m
            weighted_queries = (q.to(tl.float32) * -momentum_weight[:, None]).to(kind)
            r = tl.dot(gy, weighted_queries, r, input_precision=PRECISION)
        m *= tl.load(memory_decay_ptr + ng * C + C - 1)
        m = tl.dot(gy, (q.to(tl.float32) * memory_decay[:, None]).to(kind), m, input_precision=PRECISION)
        for s0 in tl.static_range(0, S, BS):
            i = s0 + tl.arange(0, BS)
            k = _load_rows(k_ptr, n * C, i, i < S, H, X)
            p = tl.load(p_ptr + (ng * BC + c)[:, None] * PADDED_S + i[None, :])
            pair_weights = tl.load(pair_weights_ptr + (ng * C + C - 1) * S + i, mask=i < S, other=0.0)
            d_errors = tl.dot(end, k.T, input_precision=PRECISION) * -pair_weights[None, :]
            d_errors -= tl.dot(gy, p, input_precision=PRECISION)
            if SLOW:
                share = tl.load(share_ptr + ng * S + i, mask=i < S, other=0.0)
                d_errors += tl.dot(slow, k.T, input_precision=PRECISION) * share[None, :]
            m = tl.dot(d_errors.to(kind), k, m, input_precision=PRECISION)
    tl.store(g_first_ptr + g * (X * X) + at, m)
    if SLOW:
        tl.store(g_first_momentum_ptr + g * (X * X) + at, r)


@triton.jit
def _newton_schulz_factor(m, PRECISION: tl.constexpr):
    """(M Mᵀ, and what multiplies M beside a) of one Newton-Schulz step, as operands."""
    gram = tl.dot(m, m.T, input_precision=PRECISION)
    small = gram.to(m.dtype)
    # a Gram matrix is its own transpose
    factor = tl.dot(small, small.T, gram * _B_OF_C, input_precision=PRECISION) * _C
    return small, factor.to(m.dtype)


@triton.jit
def _orthogonal_scan(
    k_ptr, v_ptr, memory_decay_ptr, step_ptr, share_ptr, momentum_decay_ptr, memories_ptr, momenta_ptr, N, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Memories and momenta [N + 1, G, X, X] of one row and head; those at 0 are given."""
    g = tl.program_id(0).to(tl.int64)
    G = tl.num_programs(0)
    x = tl.arange(0, X)
    at = x[:, None] * X + x[None, :]
    k_ptr += (g // H * L * H + g % H) * X
    v_ptr += (g // H * L * H + g % H) * X
    kind = k_ptr.dtype.element_ty
    for n in tl.range(0, N, num_stages=1):
        ng = n * G + g
        memory_at = memories_ptr + ng * (X * X) + at
        momentum_at = momenta_ptr + ng * (X * X) + at
        start, size = _operand(tl.load(memory_at), kind)
        r = tl.load(momentum_at) * tl.load(momentum_decay_ptr + ng)
        for s0 in tl.range(0, S, BS, num_stages=1):
            i = s0 + tl.arange(0, BS)
            k = _load_rows(k_ptr, n * C, i, i < S, H, X)
            v = _load_rows(v_ptr, n * C, i, i < S, H, X)
            share = tl.load(share_ptr + ng * S + i, mask=i < S, other=0.0)
            errors = tl.dot(start, k.T, input_precision=PRECISION) * size - v.T.to(tl.float32)
            errors, errors_scale = _operand(errors * share[None, :], kind)
            r += tl.dot(errors, k, input_precision=PRECISION) * errors_scale
        tl.store(momentum_at + G * X * X, r)
        r *= 1.0 / (tl.sqrt(_sum(r * r)) + _EPS)
        for _ in tl.range(0, _STEPS, num_stages=1):
            small = r.to(kind)
            _gram, factor = _newton_schulz_factor(small, PRECISION)
            r = tl.dot(factor, small, r * _A, input_precision=PRECISION)
        keep = tl.load(memory_decay_ptr + ng * C + C - 1)
        tl.store(memory_at + G * X * X, tl.load(memory_at) * keep - tl.load(step_ptr + ng) * r)
        # the next chunk's threads read what others of this one wrote
        tl.debug_barrier()


@triton.jit
def _orthogonal_scan_backward(
    gy_ptr, q_ptr, k_ptr, memory_decay_ptr, momentum_step_ptr, share_ptr, momentum_decay_ptr, momenta_ptr, steps_ptr,
    g_memories_ptr, g_momenta_ptr, g_step_ptr, g_first_momentum_ptr, N, T, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of memories [N + 1, G, X, X], the last given, of momenta after every chunk, [N, G, X, X], and of to.

    The momentum's own gradient after the last chunk is given in `g_first_momentum`. `steps` [G, 5, X, X] holds one chunk's steps.
    """
    g = tl.program_id(0).to(tl.int64)
    G = tl.num_programs(0)
    x = tl.arange(0, X)
    at = x[:, None] * X + x[None, :]
    c = tl.arange(0, BC)
    gy_ptr += (g // H * T * H + g % H) * X
    q_ptr += (g // H * T * H + g % H) * X
    k_ptr += (g // H * L * H + g % H) * X
    steps_ptr += g * (_STEPS * X * X) + at
    carry = g_first_momentum_ptr + g * (X * X) + at
    kind = k_ptr.dtype.element_ty
    for back in tl.range(0, N, num_stages=1):
        n = N - 1 - back
        ng = n * G + g
        g_memory_at = g_memories_ptr + (ng + G) * (X * X) + at
        r_ptr = momenta_ptr + (ng + G) * (X * X) + at
        to = tl.load(momentum_step_ptr + ng)
        m = tl.load(r_ptr)
        length = tl.sqrt(_sum(m * m))
        norm = length + _EPS
        m *= 1.0 / norm
        for step in tl.range(0, _STEPS, num_stages=1):
            small = m.to(kind)
            tl.store(steps_ptr + step * (X * X), small)
            _gram, factor = _newton_schulz_factor(small, PRECISION)
            m = tl.dot(factor, small, m * _A, input_precision=PRECISION)
        d = tl.load(g_memory_at)
        tl.store(g_step_ptr + ng, -_sum(d * m))
        # of length 1, which no step enlarges beyond float16
        size = tl.maximum(tl.sqrt(_sum(d * d)), _TINY)
        d *= 1.0 / size
        tl.debug_barrier()
        for step in tl.range(0, _STEPS, num_stages=1):
            # in the order that keeps fewest matrices in registers
            small = tl.load(steps_ptr + (_STEPS - 1 - step) * (X * X))
            d_operand = d.to(kind)
            both = tl.dot(d_operand, small.T, input_precision=PRECISION)
            both = tl.dot(small, d_operand.T, both, input_precision=PRECISION).to(kind)
            gram, factor = _newton_schulz_factor(small, PRECISION)
            d = tl.dot(factor, d_operand, d * _A, input_precision=PRECISION)
            # both are their own transposes
            inner = tl.dot(both, gram.T, both.to(tl.float32) * _B_OF_C, input_precision=PRECISION)
            inner = tl.dot(gram, both.T, inner, input_precision=PRECISION) * _C
            d = tl.dot(inner.to(kind), small, d, input_precision=PRECISION)
        d *= -to * size
        r = tl.load(r_ptr)
        along = _sum(d * r) / tl.maximum(length * norm * norm, _TINY)
        d = tl.load(carry) + d * (1.0 / norm) - along * r
        tl.store(g_momenta_ptr + ng * (X * X) + at, d)
        tl.store(carry, d * tl.load(momentum_decay_ptr + ng))
        slow, size = _operand(d, kind)
        q = _load_rows(q_ptr, n * C, c, c < C, H, X)
        gy, gy_scale = _operand(_load_rows(gy_ptr, n * C, c, c < C, H, X), kind)
        m = tl.load(g_memory_at) * tl.load(memory_decay_ptr + ng * C + C - 1)
        m += tl.dot(gy.T, q, input_precision=PRECISION) * gy_scale
        for s0 in tl.range(0, S, BS, num_stages=1):
            i = s0 + tl.arange(0, BS)
            k = _load_rows(k_ptr, n * C, i, i < S, H, X)
            share = tl.load(share_ptr + ng * S + i, mask=i < S, other=0.0) * size
            d_errors = tl.dot(slow, k.T, input_precision=PRECISION) * share[None, :]
            d_errors, gy_scale = _operand(d_errors, kind)
            m += tl.dot(d_errors, k, input_precision=PRECISION) * gy_scale
        tl.store(g_memory_at - G * X * X, m)
        tl.debug_barrier()


@triton.jit
def _chunk_gradients(
    gy_ptr, q_ptr, k_ptr, v_ptr, p_ptr, memory_decay_ptr, pair_weights_ptr, momentum_weight_ptr, share_ptr,
    memories_ptr, momenta_ptr, g_memories_ptr, g_momenta_ptr,
    dq_ptr, dk_ptr, dv_ptr, d_memory_decay_ptr, d_pair_weights_ptr, d_momentum_weight_ptr, d_share_ptr, d_momentum_decay_ptr, T, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    ORTHOGONAL: tl.constexpr, SLOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head, all that is not carried; dk and dv of every pair that the chunk sees, in whole blocks."""
    n = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    ng = n * tl.num_programs(1) + g
    x = tl.arange(0, X)
    at = ng * (X * X) + x[:, None] * X + x[None, :]
    PADDED_S: tl.constexpr = (S + BS - 1) // BS * BS
    c = tl.arange(0, BC)
    row = g // H * T * H + g % H
    k_ptr += (g // H * L * H + g % H) * X
    v_ptr += (g // H * L * H + g % H) * X
    kind = q_ptr.dtype.element_ty
    m, m_size = _operand(tl.load(memories_ptr + at), kind)
    dm, dm_size = _operand(tl.load(g_memories_ptr + at), kind)
    d_keep = _sum(m.to(tl.float32) * dm.to(tl.float32)) * (m_size * dm_size)
    q = _load_rows(q_ptr + row * X, n * C, c, c < C, H, X)
    gy, gy_size = _operand(_load_rows(gy_ptr + row * X, n * C, c, c < C, H, X), kind)
    dq = tl.dot(gy, m, input_precision=PRECISION) * (m_size * gy_size)
    last = c == C - 1
    if ORTHOGONAL:
        tl.store(d_memory_decay_ptr + ng * C + c, tl.where(last, d_keep, 0.0), mask=c < C)
    else:
        d_memory_decay = tl.sum(dq * q.to(tl.float32), 1) + tl.where(last, d_keep, 0.0)
        tl.store(d_memory_decay_ptr + ng * C + c, d_memory_decay, mask=c < C)
        dq *= tl.load(memory_decay_ptr + ng * C + c, mask=c < C, other=0.0)[:, None]
    if SLOW:
        dr, dr_size = _operand(tl.load(g_momenta_ptr + at), kind)
        r = tl.load(momenta_ptr + at).to(tl.float32)
        tl.store(d_momentum_decay_ptr + ng, _sum(r * dr.to(tl.float32)) * dr_size)
        if not ORTHOGONAL:
            d_to = _sum(r * dm.to(tl.float32))
            queried_momentum = tl.dot(gy, r.to(kind), input_precision=PRECISION)
            d_carried = -tl.sum(queried_momentum * q.to(tl.float32), 1) - tl.where(last, d_to, 0.0)
            tl.store(d_momentum_weight_ptr + ng * C + c, d_carried, mask=c < C)
            dq -= queried_momentum * tl.load(momentum_weight_ptr + ng * C + c, mask=c < C, other=0.0)[:, None]
    for s0 in tl.static_range(0, S, BS):
        i = s0 + tl.arange(0, BS)
        k = _load_rows(k_ptr, n * C, i, i < S, H, X)
        v = _load_rows(v_ptr, n * C, i, i < S, H, X)
        errors = tl.dot(k, m.T, input_precision=PRECISION) * m_size - v.to(tl.float32)
        de = tl.zeros([BS, X], tl.float32)
        dk = tl.zeros([BS, X], tl.float32)
        if SLOW:
            share = tl.load(share_ptr + ng * S + i, mask=i < S, other=0.0)
            key_products = tl.dot(k, dr.T, input_precision=PRECISION) * dr_size
            tl.store(d_share_ptr + ng * S + i, tl.sum(errors * key_products, 1), mask=i < S)
            de += key_products * share[:, None]
            part, size = _operand(errors * share[:, None], kind)
            dk += tl.dot(part, dr, input_precision=PRECISION) * (size * dr_size)
        if not ORTHOGONAL:
            both = (c < C)[:, None] & (i < S)[None, :]
            spot = (ng * C + c)[:, None] * S + i[None, :]
            pair_weights = tl.load(pair_weights_ptr + spot, mask=both, other=0.0)
            end = tl.load(pair_weights_ptr + (ng * C + C - 1) * S + i, mask=i < S, other=0.0)
            key_products = tl.dot(k, dm.T, input_precision=PRECISION)
            d_end = tl.sum(errors * key_products, 1)
            p = tl.load(p_ptr + (ng * BC + c)[:, None] * PADDED_S + i[None, :])
            de -= tl.dot(p.T, gy, input_precision=PRECISION) + key_products * end[:, None]
            dp = -tl.dot(gy, errors.to(kind).T, input_precision=PRECISION)
            a = tl.dot(q, k.T, input_precision=PRECISION)
            tl.store(d_pair_weights_ptr + spot, dp * a - tl.where(last[:, None], d_end[None, :], 0.0), mask=both)
            da = (dp * pair_weights).to(kind)
            dq = tl.dot(da, k, dq, input_precision=PRECISION)
            dk = tl.dot(da.T, q, dk, input_precision=PRECISION)
            dk -= tl.dot((errors * end[:, None]).to(kind), dm, input_precision=PRECISION)
        part, size = _operand(de, kind)
        dk += tl.dot(part, m, input_precision=PRECISION) * (size * m_size)
        pair_at = (ng * PADDED_S + i)[:, None] * X + x[None, :]
        tl.store(dk_ptr + pair_at, dk.to(dk_ptr.dtype.element_ty))
        tl.store(dv_ptr + pair_at, (-de).to(dv_ptr.dtype.element_ty))
    token = (n * C + c).to(tl.int64)[:, None] * (H * X) + x[None, :]
    tl.store(dq_ptr + row * X + token, dq, mask=(c < C)[:, None])


@triton.jit
def _sum_pair_gradients(
    part_k_ptr, part_v_ptr, dk_ptr, dv_ptr, N, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """dk and dv of BL tokens of one head: the shares of the chunks that see them, from the last on."""
    g = tl.program_id(1).to(tl.int64)
    x = tl.arange(0, X)
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    PADDED_S: tl.constexpr = (S + BS - 1) // BS * BS
    MAX_CHUNKS: tl.constexpr = (S + C - 1) // C
    dk = tl.zeros([BL, X], tl.float32)
    dv = tl.zeros([BL, X], tl.float32)
    for back in tl.static_range(0, MAX_CHUNKS):
        n = t // C - back
        s = t - n * C
        seen = (n >= 0) & (n < N) & (s < S)
        part_at = ((n * tl.num_programs(1) + g) * PADDED_S + s)[:, None] * X + x[None, :]
        dk += tl.load(part_k_ptr + part_at, mask=seen[:, None], other=0.0).to(tl.float32)
        dv += tl.load(part_v_ptr + part_at, mask=seen[:, None], other=0.0).to(tl.float32)
    token_at = ((g // H * L + t) * H + g % H)[:, None] * X + x[None, :]
    tl.store(dk_ptr + token_at, dk, mask=(t < L)[:, None])
    tl.store(dv_ptr + token_at, dv.to(dv_ptr.dtype.element_ty), mask=(t < L)[:, None])


# --- launches -----------------------------------------------------------------------------------------------------


def _tiles(size: Sizes) -> dict[str, int]:
    return {"H": size.h, "X": size.x, "C": size.c, "S": size.s, "BS": size.pair_tile}


def _constexprs(size: Sizes, kind: torch.dtype) -> dict[str, Any]:
    return {**_tiles(size), "PRECISION": "ieee" if kind == torch.float32 else "tf32"}


def forward(
    q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor, pair_weights: Tensor | None, momentum_weight: Tensor | None, share: Tensor | None,
    momentum_decay: Tensor | None, step: Tensor | None, memory: Tensor, momentum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(readout [B, T, H, X] of v's type, memory and momentum after the last chunk [G, X, X], and what `backward` takes).

    q [B, T, H, X] and k [B, L, H, X] are operands, v [B, L, H, X]; the rest is float32: kept and carried [N, G, C], felt [N, G, C, S],
    share [N, G, S], old and to [N, G]; all contiguous. `pair_weights` None: orthogonal, with `step`; `share` None: no momentum. Kept are memories and
    momenta, N G X² numbers each (bfloat16, or float32 where orthogonal), and P in operands.
    """
    size = sizes(q, k, memory_decay)
    n, g, x, length = size.n, size.heads, size.x, k.shape[1]
    orthogonal, slow = pair_weights is None, share is not None
    constexprs = _constexprs(size, q.dtype)
    y = v.new_empty(q.shape)
    p = q.new_empty(0) if orthogonal else q.new_empty(n, g, size.token_tile, size.padded_pairs)
    if orthogonal:
        memories, momenta = memory.new_empty(n + 1, g, x, x), memory.new_empty(n + 1, g, x, x)
        memories[0], momenta[0] = memory, momentum
        _orthogonal_scan[(g,)](
            k,
            v,
            memory_decay,
            step,
            share,
            momentum_decay,
            memories,
            momenta,
            n,
            length,
            **constexprs,
            num_warps=_warps(x),
            num_stages=1,
        )
        last, last_momentum = memories[n].clone(), momenta[n].clone()
    else:
        memories = q.new_empty(n, g, x, x)
        momenta = q.new_empty(n if slow else 0, g, x, x)
        last = torch.empty_like(memory)
        last_momentum = memory.new_empty(memory.shape if slow else 0)
        block = min(x, 64)
        _scan[(x // block, g)](
            k, v, memory_decay, pair_weights, momentum_weight, share, momentum_decay, memory, momentum, memories, momenta, last, last_momentum, n, length,
            **constexprs, BX=block, SLOW=slow, num_warps=4, num_stages=2,
        )  # fmt: skip
    _readout[(n, g)](
        q, k, v, memory_decay, pair_weights, momentum_weight, memories, momenta, y, p, size.t, length,
        **constexprs, BC=size.token_tile, ORTHOGONAL=orthogonal, SLOW=slow, num_warps=_warps(x), num_stages=1,
    )  # fmt: skip
    return y, last, last_momentum, memories, momenta, p


def _warps(x: int) -> int:
    """Where a program holds a whole matrix."""
    return 8 if x == 128 else 4


def backward(
    g_y: Tensor, g_last: Tensor | None, g_last_momentum: Tensor | None, q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor,
    pair_weights: Tensor | None, momentum_weight: Tensor | None, share: Tensor | None, momentum_decay: Tensor | None, step: Tensor | None,
    memories: Tensor, momenta: Tensor, p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what `forward` takes, in its order, empty for what is None; v's in its type, the others in float32."""
    size = sizes(q, k, memory_decay)
    n, g, x, length = size.n, size.heads, size.x, k.shape[1]
    orthogonal, slow = pair_weights is None, share is not None
    constexprs = _constexprs(size, q.dtype)
    d_memory_decay = torch.empty_like(memory_decay)
    d_felt, d_carried, d_share, d_old, d_to = (
        memory_decay.new_empty(0 if given is None else given.shape)
        for given in (pair_weights, momentum_weight, share, momentum_decay, step)
    )
    if orthogonal:
        d_memories, d_momenta = torch.empty_like(memories), torch.empty_like(momenta[1:])
        d_memories[n] = 0 if g_last is None else g_last
        d_momentum = torch.zeros_like(momenta[0]) if g_last_momentum is None else g_last_momentum.clone()
        steps = q.new_empty(g, STEPS, x, x)
        _orthogonal_scan_backward[(g,)](
            g_y, q, k, memory_decay, step, share, momentum_decay, momenta, steps, d_memories, d_momenta, d_to, d_momentum, n, size.t, length,
            **constexprs, BC=size.token_tile, num_warps=_warps(x), num_stages=1,
        )  # fmt: skip
        d_memory, after = d_memories[0].clone(), d_memories[1:]
    else:
        d_memories, d_momenta = torch.empty_like(memories), torch.empty_like(momenta)
        after = d_memories
        d_memory = memory_decay.new_empty(g, x, x)
        d_momentum = memory_decay.new_empty((g, x, x) if slow else 0)
        block = min(x, 64)
        _scan_backward[(x // block, g)](
            g_y, q, k, p, memory_decay, pair_weights, momentum_weight, share, momentum_decay, g_last, g_last_momentum, d_memories, d_momenta, d_memory,
            d_momentum, n, size.t, length,
            **constexprs, BX=block, BC=size.token_tile, SLOW=slow, HAS_LAST=g_last is not None,
            HAS_LAST_MOMENTUM=slow and g_last_momentum is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
    partial_dtype = torch.bfloat16 if q.dtype == torch.float16 else q.dtype
    part_k, part_v = (q.new_empty(n, g, size.padded_pairs, x, dtype=partial_dtype) for _ in range(2))
    dq, dk = (given.new_empty(given.shape, dtype=torch.float32) for given in (q, k))
    dv = torch.empty_like(v)
    _chunk_gradients[(n, g)](
        g_y, q, k, v, p, memory_decay, pair_weights, momentum_weight, share, memories, momenta, after, d_momenta,
        dq, part_k, part_v, d_memory_decay, d_felt, d_carried, d_share, d_old, size.t, length,
        **constexprs, BC=size.token_tile, ORTHOGONAL=orthogonal, SLOW=slow, num_warps=_warps(x), num_stages=1,
    )  # fmt: skip
    tokens = 16
    _sum_pair_gradients[(triton.cdiv(length, tokens), g)](
        part_k, part_v, dk, dv, n, length, **_tiles(size), BL=tokens, num_warps=4, num_stages=1
    )
    return dq, dk, dv, d_memory_decay, d_felt, d_carried, d_share, d_old, d_to, d_memory, d_momentum
