"""Triton kernels of the omega memory of one matrix, forward and backward (oracle: `omega.reference`).

See docs/explanation/kernels.md, "Omega memory: one scan, the rest products". B batch, T length, H heads, X head size and size of a
feature, G = B H, C tokens of a chunk, S pairs that it sees, N chunks, L = T + S - C. With M and R the memory and its
momentum [X, X] before a chunk, K, V, Q its pairs and queries, a = memory_decay and c = momentum_weight [C], W =
pair_weights [C, S], E = K Mᵀ - V, P = W ⊙ Q Kᵀ, and the last token's entries a_C, c_C and W_C:
    Y = a Q Mᵀ - P E - c Q Rᵀ,  M' = a_C M - c_C R - (W_C ⊙ E)ᵀ K,  R' = momentum_decay R + (share ⊙ E)ᵀ K,
or, orthogonal, Y = Q Mᵀ, M' = a_C M - step N(R'). Backward, with y, m and r the gradients of Y, M' and R':
    e = -Pᵀ y - W_C ⊙ K mᵀ + share ⊙ K rᵀ (orthogonal: share ⊙ K rᵀ alone, r with what N gives back of -step m),
    dM = a_C m + (a y)ᵀ Q + eᵀ K,  dR = momentum_decay r - c_C m - (c y)ᵀ Q,  dA = -W ⊙ y Eᵀ,  dV = -e,
    dQ = a y M - c y R + dA K,  dK = dAᵀ Q + e M - (W_C ⊙ E) m + (share ⊙ E) r,
and the coefficients' gradients are row sums of these products.

Only M and R pass from chunk to chunk. Plain: rows of M never meet, so a program takes a block of them through all
chunks, in float32 registers. Orthogonal: they do, so a program has a head's whole matrix, and all chunks and
Newton-Schulz steps run in one launch: G = 128 programs fill 132 multiprocessors, and a product of 128³ in 16 bits takes
half a microsecond where a launch takes ten. Everything that belongs to one chunk runs for all chunks at once. Operands:
bfloat16; orthogonal: float16 over the largest number of the tile, because Newton-Schulz and its gradient amplify
rounding 485 times (measured error of dK: 0.04 with bfloat16, 0.004 with float16). No atomics.
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
# the accumulator starts with the term that is no product, so that no second one occupies registers
_B_OF_C = tl.constexpr(FACTORS[1] / FACTORS[2])
_C = tl.constexpr(FACTORS[2])
_EPS = tl.constexpr(EPS)
_STEPS = tl.constexpr(STEPS)
_TINY = tl.constexpr(1e-30)


@triton.jit
def _operand(x, kind: tl.constexpr):
    """Return (x in the tensor cores' dtype, scale that the product must be multiplied by).

    float16 operands are divided by the largest absolute number of the tile, at least 1e-30; other dtypes have scale 1.

    Args:
        x: Tile of two axes, of any float dtype.
        kind: constexpr, dtype of the operand: float16, bfloat16 or float32.
    """
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
    """Load rows [len(i), X] of the tokens first + i of one head, 0 where not inside.

    Args:
        x_ptr: Tensor [., tokens, H, X], already moved to the batch row and head.
        first: First token of the chunk.
        i: Tokens counted from `first`.
        inside: Mask of the rows that exist, like i.
        H: constexpr, heads.
        X: constexpr, head size.
    """
    at = (first + i).to(tl.int64)[:, None] * (H * X) + tl.arange(0, X)[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None], other=0.0)


@triton.jit
def _scan(
    k_ptr, v_ptr, memory_decay_ptr, pair_weights_ptr, momentum_weight_ptr, share_ptr, momentum_decay_ptr, memory_ptr, momentum_ptr,
    memories_ptr, momenta_ptr, last_ptr, last_momentum_ptr, N, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr,
    SLOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store memories (and momenta) before every chunk, and those after the last, for BX rows.

    Per chunk M' = a M - c R - (w E)ᵀ K and R' = momentum_decay R + (share E)ᵀ K, with memory M, momentum R, pairs K and
    V, E = K Mᵀ - V, and the last token's memory_decay a, momentum_weight c and pair_weights w (terms with R only with
    SLOW). Grid: (X / BX, G). A program walks through all chunks with its rows in float32 registers.

    Args:
        k_ptr: Keys [B, L, H, X], operands.
        v_ptr: Values [B, L, H, X].
        memory_decay_ptr: float32 [N, G, C].
        pair_weights_ptr: float32 [N, G, C, S].
        momentum_weight_ptr: float32 [N, G, C]; read only with SLOW.
        share_ptr: float32 [N, G, S]; read only with SLOW.
        momentum_decay_ptr: float32 [N, G]; read only with SLOW.
        memory_ptr: First memory, float32 [G, X, X].
        momentum_ptr: First momentum, float32 [G, X, X]; read only with SLOW.
        memories_ptr: Operands [N, G, X, X], written.
        momenta_ptr: Operands [N, G, X, X], written with SLOW.
        last_ptr: float32 [G, X, X], written.
        last_momentum_ptr: float32 [G, X, X], written with SLOW.
        N: Chunks.
        L: Tokens of keys and values.
        H: constexpr, heads.
        X: constexpr, head size.
        C: constexpr, tokens of a chunk.
        S: constexpr, pairs that a chunk sees.
        BX: constexpr, rows of a program.
        BS: constexpr, pairs at a time.
        SLOW: constexpr bool, True with a momentum.
        PRECISION: constexpr, input precision of products.
    """
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
    """Store the readout Y of one chunk and head, and P [BC, padded S] where steps are not orthogonal.

    Y = a Q Mᵀ - P E - c Q Rᵀ with P = pair_weights (Q Kᵀ) by element, E = K Mᵀ - V, memory_decay a and momentum_weight
    c of each token; when ORTHOGONAL, Y = Q Mᵀ. Grid: (N, G). q [B, T, H, X] and k [B, L, H, X] are operands, v is [B,
    L, H, X]; coefficients are float32: memory_decay and momentum_weight [N, G, C], pair_weights [N, G, C, S]; memories
    and momenta [N, G, X, X] are those before each chunk. y [B, T, H, X] is written in its own dtype, P [N, G, BC,
    padded S] in operands. k, v, coefficients and P are not touched when ORTHOGONAL. BC: constexpr, C rounded up to a
    power of two. BS: constexpr, pairs at a time; S is padded to a multiple. SLOW: constexpr bool, True with a momentum.

    T and L: tokens of queries and of keys and values. Constexprs: H heads, X head size, C tokens of a chunk, S pairs
    that it sees, PRECISION input precision of products.
    """
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
    """Store the gradients of the memory (and the momentum) after every chunk and before the first, for BX rows.

    Grid: (X / BX, G), from the last chunk to the first. g_memories and g_momenta are operands [N, G, X, X], g_first and
    g_first_momentum float32 [G, X, X]; all are written, momenta only with SLOW. gy and q are [B, T, H, X], k [B, L, H,
    X], p [N, G, BC, padded S]. HAS_LAST and HAS_LAST_MOMENTUM: constexpr bools, True when the last state has a
    gradient, float32 [G, X, X].

    Coefficients are float32: memory_decay and momentum_weight [N, G, C], pair_weights [N, G, C, S], share [N, G, S],
    momentum_decay [N, G]. N: chunks; L: tokens of keys; T: tokens of queries; BC: constexpr, C rounded up to a power of
    two of at least 16.
    """
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
    """Return (M Mᵀ, b M Mᵀ + c (M Mᵀ)²) of one Newton-Schulz step, in m's dtype; (a, b, c) = `FACTORS`.

    m is an operand [X, X].
    """
    gram = tl.dot(m, m.T, input_precision=PRECISION)
    small = gram.to(m.dtype)
    # a Gram matrix is symmetric
    factor = tl.dot(small, small.T, gram * _B_OF_C, input_precision=PRECISION) * _C
    return small, factor.to(m.dtype)


@triton.jit
def _orthogonal_scan(
    k_ptr, v_ptr, memory_decay_ptr, step_ptr, share_ptr, momentum_decay_ptr, memories_ptr, momenta_ptr, N, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store memories and momenta of one row and head for all chunks, with orthogonal steps.

    Per chunk R' = momentum_decay R + (share E)ᵀ K with E = K Mᵀ - V, and M' = a M - step N(R'), with N of Newton-Schulz
    and a the last token's memory_decay. Grid: (G,). memories and momenta are float32 [N + 1, G, X, X]; index 0 is
    given, the others are written. Keys are operands [B, L, H, X], values [B, L, H, X], coefficients float32:
    memory_decay [N, G, C], step and momentum_decay [N, G], share [N, G, S].

    N: chunks; L: tokens of keys and values. Constexprs: H heads, X head size, C tokens of a chunk, S pairs that it
    sees, BS pairs at a time.
    """
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
        # threads of the next chunk read numbers that other threads wrote in this one
        tl.debug_barrier()


@triton.jit
def _orthogonal_scan_backward(
    gy_ptr, q_ptr, k_ptr, memory_decay_ptr, momentum_step_ptr, share_ptr, momentum_decay_ptr, momenta_ptr, steps_ptr,
    g_memories_ptr, g_momenta_ptr, g_step_ptr, g_first_momentum_ptr, N, T, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of memories, momenta and steps of one row and head, with orthogonal steps.

    Grid: (G,), from the last chunk to the first. g_memories is float32 [N + 1, G, X, X]; index N is given, the others
    are written. g_momenta [N, G, X, X], after every chunk, and g_step [N, G] are written. g_first_momentum [G, X, X]
    holds the gradient of the last momentum and ends as that of the first. steps_ptr [G, 5, X, X] is scratch for one
    chunk's Newton-Schulz steps, operands.

    gy and q are [B, T, H, X], momenta those of `_orthogonal_scan`; keys are operands [B, L, H, X], coefficients
    float32: memory_decay [N, G, C], momentum_step and momentum_decay [N, G], share [N, G, S]. N: chunks; L: tokens of
    keys. T: tokens of queries; BC: constexpr, C rounded up to a power of two of at least 16.
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
        # scaled to length 1, which no step amplifies beyond float16
        size = tl.maximum(tl.sqrt(_sum(d * d)), _TINY)
        d *= 1.0 / size
        tl.debug_barrier()
        for step in tl.range(0, _STEPS, num_stages=1):
            # in the order that needs fewest matrices in registers
            small = tl.load(steps_ptr + (_STEPS - 1 - step) * (X * X))
            d_operand = d.to(kind)
            both = tl.dot(d_operand, small.T, input_precision=PRECISION)
            both = tl.dot(small, d_operand.T, both, input_precision=PRECISION).to(kind)
            gram, factor = _newton_schulz_factor(small, PRECISION)
            d = tl.dot(factor, d_operand, d * _A, input_precision=PRECISION)
            # both matrices are symmetric
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
def _gradients(
    gy_ptr, q_ptr, k_ptr, v_ptr, p_ptr, memory_decay_ptr, pair_weights_ptr, momentum_weight_ptr, share_ptr,
    memories_ptr, momenta_ptr, g_memories_ptr, g_momenta_ptr,
    dq_ptr, dk_ptr, dv_ptr, d_memory_decay_ptr, d_pair_weights_ptr, d_momentum_weight_ptr, d_share_ptr, d_momentum_decay_ptr, T, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    ORTHOGONAL: tl.constexpr, SLOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store all gradients of one chunk and head that are not carried from chunk to chunk.

    Grid: (N, G). dq is float32 [B, T, H, X]; dk and dv [N, G, padded S, X] are the chunk's shares for every pair that
    it sees; the coefficients' gradients are float32 in the shapes of the coefficients. g_memories and g_momenta [N, G,
    X, X] are the gradients after each chunk. ORTHOGONAL and SLOW: constexpr bools, True for orthogonal steps and with a
    momentum.

    gy and q are [B, T, H, X], k and v [B, L, H, X], p [N, G, BC, padded S], memories and momenta [N, G, X, X] those
    before each chunk. Coefficients are float32: memory_decay and momentum_weight [N, G, C], pair_weights [N, G, C, S],
    share [N, G, S]. P and the weights of pairs are read, and their gradients written, only where steps are not
    orthogonal.
    """
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
def _sum_over_chunks(
    part_k_ptr, part_v_ptr, dk_ptr, dv_ptr, N, L,
    H: tl.constexpr, X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of BL tokens of one head: the ordered sum of the shares of all chunks that see them.

    Grid: (cdiv(L, BL), G). part_k and part_v are [N, G, padded S, X]; dk is float32 [B, L, H, X], dv [B, L, H, X] of
    its own dtype.

    N: chunks; L: tokens. Constexprs: H heads, X head size, C tokens of a chunk, S pairs that it sees, BS pairs of a
    tile.
    """
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
    """Return the readout, the last memory and momentum, and the tensors that `backward` reads.

    Args:
        q: Queries [B, T, H, X], operands, contiguous like all inputs; a chunk's C tokens divide T.
        k: Keys [B, L, H, X], operands, those of the window before first.
        v: Values [B, L, H, X].
        memory_decay: float32 [N, G, C].
        pair_weights: float32 [N, G, C, S]; None: steps are orthogonal.
        momentum_weight: float32 [N, G, C], or None.
        share: float32 [N, G, S]; None: no momentum. Orthogonal steps need it.
        momentum_decay: float32 [N, G], or None.
        step: float32 [N, G], for orthogonal steps, or None.
        memory: First memory, float32 [G, X, X].
        momentum: First momentum, float32 [G, X, X].

    Returns:
        (readout [B, T, H, X] in v's dtype, last memory and last momentum float32 [G, X, X], memories, momenta, P).
        Memories and momenta are those before each chunk, [N, G, X, X] in the operands' dtype. With orthogonal steps
        they are float32 [N + 1, G, X, X], the last ones included, and P is empty; else P is [N, G, token tile, padded
        S] in the operands' dtype. Without a momentum both momenta are empty.
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
    """Return the number of warps of a program that holds a whole matrix [x, x]."""
    return 8 if x == 128 else 4


def backward(
    g_y: Tensor, g_last: Tensor | None, g_last_momentum: Tensor | None, q: Tensor, k: Tensor, v: Tensor, memory_decay: Tensor,
    pair_weights: Tensor | None, momentum_weight: Tensor | None, share: Tensor | None, momentum_decay: Tensor | None, step: Tensor | None,
    memories: Tensor, momenta: Tensor, p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the inputs of `forward` in its order, empty for inputs that are None.

    The gradient of v is in its dtype, the others are float32. Arguments from q to step are the inputs of `forward`,
    contiguous like all; memories, momenta and p are its last three results.

    Args:
        g_y: Gradient of the readout [B, T, H, X].
        g_last: Gradient of the last memory, float32 [G, X, X], or None for zeros.
        g_last_momentum: Gradient of the last momentum, float32 [G, X, X], or None for zeros.
        q: Queries.
        k: Keys.
        v: Values.
        memory_decay: Decays of the memory.
        pair_weights: Weights of the pairs, or None for orthogonal steps.
        momentum_weight: Weights of the momentum, or None.
        share: Weights of the pairs in the momentum, or None.
        momentum_decay: Decays of the momentum, or None.
        step: Steps of orthogonal updates, or None.
        memories: Memories of the chunks.
        momenta: Momenta of the chunks.
        p: P of the chunks.
    """
    size = sizes(q, k, memory_decay)
    n, g, x, length = size.n, size.heads, size.x, k.shape[1]
    orthogonal, slow = pair_weights is None, share is not None
    constexprs = _constexprs(size, q.dtype)
    d_memory_decay = torch.empty_like(memory_decay)
    d_felt, d_carried, d_share, d_old, d_to = (
        memory_decay.new_empty(0 if coefficient is None else coefficient.shape)
        for coefficient in (pair_weights, momentum_weight, share, momentum_decay, step)
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
    dq, dk = (tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (q, k))
    dv = torch.empty_like(v)
    _gradients[(n, g)](
        g_y, q, k, v, p, memory_decay, pair_weights, momentum_weight, share, memories, momenta, after, d_momenta,
        dq, part_k, part_v, d_memory_decay, d_felt, d_carried, d_share, d_old, size.t, length,
        **constexprs, BC=size.token_tile, ORTHOGONAL=orthogonal, SLOW=slow, num_warps=_warps(x), num_stages=1,
    )  # fmt: skip
    tokens = 16
    _sum_over_chunks[(triton.cdiv(length, tokens), g)](
        part_k, part_v, dk, dv, n, length, **_tiles(size), BL=tokens, num_warps=4, num_stages=1
    )
    return dq, dk, dv, d_memory_decay, d_felt, d_carried, d_share, d_old, d_to, d_memory, d_momentum
