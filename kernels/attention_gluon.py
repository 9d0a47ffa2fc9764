"""Polar attention's three heavy kernels for Hopper (compute capability 9.0), in Triton's Gluon (MECHANISMS B).

B batch, T length, H query heads, J KV heads, G = H / J, D head size, M rows of queries. Formulas, units and signs are
those of the plain Triton kernels: queries carry temp log2(e) / sqrt(D), null scores temp log2(e), P = 2^(q'k - lse);
negative n_eff marks a row bound by the floor, negative inverse one whose |s| is below TINY.
    s = r O + w_null v_null,  c = s / |s|
    da = P (g.v + add + twice P),  dq' = ln2 sum da k,  dk = ln2 sum da q',  dv = sum P g

Each kernel runs one program on each multiprocessor, over tiles of 128 positions, the longest first, forth and back. One
warp asks the copy engine for blocks, two warpgroups of 64 positions each multiply; mbarriers tell which stage is full
and which is empty. Queries take their keys from the diagonal down, so that a row's maximum is real from its first block
on, and only the diagonal and a window's lower edge are masked. Zeros follow the end of a sequence and add nothing.
No atomics, and no sum whose order depends on timing: every number repeats bit for bit.

Matrix products of n visible scores, 2 n D each: forward 2, dq 3, dkv 4. Shared memory at D = 128: 198, 230 and 167 KB.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from .attention_triton import polar_rows

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # 3.6 calls it thread_barrier, 3.7 barrier
    _barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    _missing = None
except (ImportError, AttributeError) as error:
    _missing = f"Triton without Hopper's Gluon: {error}"

TINY = 1e-6
LN2 = 0.6931471805599453
HIDDEN = -1e30
TILE = 128
HALF = 64
FORWARD_STAGES, DQ_STAGES, DKV_STAGES = 2, 4, 3


def _jit(kernel: Any) -> Any:
    return kernel if _missing else gluon.jit(kernel)


if _missing is None:
    _LN2 = tl.constexpr(LN2)
    _TINY = tl.constexpr(TINY)
    _HIDDEN = tl.constexpr(HIDDEN)
    _TILE = tl.constexpr(TILE)
    _HALF = tl.constexpr(HALF)


# --- shared by the kernels ------------------------------------------------------------------------------------------


@_jit
def _rounds(tiles):
    """How many of `tiles` fall to this program when the programs take turns, forth and back."""
    programs = gl.num_programs(0)
    whole = tiles // programs
    at = gl.program_id(0) + (whole % 2) * (programs - 1 - 2 * gl.program_id(0))
    return whole + gl.where(at < tiles - whole * programs, 1, 0)


@_jit
def _turn(r):
    """The tile of this program in round r."""
    programs = gl.num_programs(0)
    return r * programs + gl.program_id(0) + (r % 2) * (programs - 1 - 2 * gl.program_id(0))


@_jit
def _log1p(x):
    return gl.where(x < 1e-3, x * (1.0 - x * (0.5 - x * 0.33333334)), gl.log(1.0 + x))


@_jit
def _tanh(x):
    # x >= 0; the fraction loses the digits of a small x
    square = x * x
    e = gl.exp(-2.0 * x)
    return gl.where(x < 0.05, x * (1.0 - square * (0.33333334 - square * 0.13333334)), (1.0 - e) / (1.0 + e))


@_jit
def _pass_over(full, empty, steps, count, STAGES: gl.constexpr):
    """Hand `count` stages back unread: blocks that only the other warpgroup needs."""
    for _ in range(count):
        # an arrival before the stage is full could fall into its last round
        mbarrier.wait(full.index(steps % STAGES), (steps // STAGES) & 1)
        mbarrier.arrive(empty.index(steps % STAGES))
        steps += 1
    return steps


@_jit
def _barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """(full, empty): mbarriers of as many stages, with one writer and `READERS` readers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


# --- forward --------------------------------------------------------------------------------------------------------


@_jit
def _forward_tile(t, TQ, window, H: gl.constexpr, BH, WINDOWED: gl.constexpr):
    """(b, h, first row, its block of keys, the last block without an edge of the window, the last block)."""
    m0 = (gl.cdiv(TQ, _TILE) - 1 - t // BH) * _TILE
    first = 0
    whole = 0
    if WINDOWED:
        first = gl.maximum(m0 - window + 1, 0) // _TILE
        whole = gl.cdiv(gl.maximum(m0 + _TILE - window, 0), _TILE)
    return t % BH // H, t % BH % H, m0, m0 // _TILE, whole, first


@_jit
def _forward_load(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    TQ, tiles, BH, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    steps = 0
    for r in range(_rounds(tiles)):
        b, h, m0, top, _whole, first = _forward_tile(_turn(r), TQ, window, H, BH, WINDOWED)
        at = h // G * D
        mbarrier.wait(q_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [b, m0 + half * _HALF, h * D], q_full.index(0), q_smem.index(half))  # fmt: skip
        for i in range(top - first + 1):
            n = (top - i) * _TILE
            stage = steps % STAGES
            free = ((steps // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [b, n, at], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [b, n, at], v_full.index(stage), v_smem.index(stage))
            steps += 1


@_jit
def _forward_keys(
    acc, p, top, total, square, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, anchor,
    steps, count, block, low,
    MASKED: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, S_MMA: gl.constexpr, O_MMA: gl.constexpr,
):  # fmt: skip
    """`count` more blocks of keys, from `block` down; the product with v lags one block behind the scores.

    Scores of a block and the product of the one before are issued together; the softmax runs under the latter.
    """
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_MMA)
    for i in range(count):
        stage = steps % STAGES
        mbarrier.wait(k_full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_TILE, D]).permute([1, 0])
        hidden = gl.zeros([_HALF, _TILE], gl.float32, S_MMA)
        s = warpgroup_mma(q, k, hidden, use_acc=False, is_async=True)
        last = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(last).reshape([_TILE, D]), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if MASKED:
            # the window's lower edge: key > row - window
            row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
            key = gl.arange(0, _TILE, gl.SliceLayout(0, S_MMA))
            s = gl.where(key[None, :] - row[:, None] > low - (block - i) * _TILE, s, _HIDDEN)
        higher = gl.maximum(top, gl.max(s, 1))
        shrink = gl.exp2(top - higher)
        e = gl.exp2(s - higher[:, None])
        total = total * shrink + gl.sum(e, 1)
        square = square * (shrink * shrink) + gl.sum(e * e, 1)
        top = higher
        next_p = gl.convert_layout(e.to(p.dtype), p.type.layout)
        # nobody reads it: a store of what all exponentials entered keeps the assembler from waiting ahead of them
        anchor.store(total)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.arrive(v_empty.index(last))
        acc = acc * gl.convert_layout(shrink, O_ROW)[:, None]
        p = next_p
        steps += 1
    return acc, p, top, total, square, steps


@_jit
def _forward_rows(
    c_desc, null_ptr, v_null_ptr, beta_ptr, mag_ptr, lse_ptr, n_eff_ptr, inverse_ptr,
    q_smem, k_smem, v_smem, c_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, anchor_smem,
    TQ, tiles, BH, window, floor_bits,
    H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART to 64 PART + 63 of every tile."""
    D: gl.constexpr = c_desc.block_type.shape[2]
    DTYPE: gl.constexpr = c_desc.dtype
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_DOT: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_MMA)
    row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA)) + PART * _HALF
    key = gl.arange(0, _TILE, gl.SliceLayout(0, S_MMA))
    q = q_smem.index(PART).reshape([_HALF, D])
    c_part = c_smem.index(PART)
    anchor = anchor_smem.index(PART)
    steps = 0
    for r in range(_rounds(tiles)):
        b, h, m0, block, whole, first = _forward_tile(_turn(r), TQ, window, H, BH, WINDOWED)
        mbarrier.wait(q_full.index(0), r & 1)
        stage = steps % STAGES
        mbarrier.wait(k_full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_TILE, D]).permute([1, 0])
        blank = gl.zeros([_HALF, _TILE], gl.float32, S_MMA)
        s = warpgroup_mma(q, k, blank, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        _barrier()
        mbarrier.arrive(k_empty.index(stage))
        s = gl.where(key[None, :] <= row[:, None], s, _HIDDEN)
        top = gl.max(s, 1)
        e = gl.exp2(s - top[:, None])
        total = gl.sum(e, 1)
        square = gl.sum(e * e, 1)
        p = gl.convert_layout(e.to(DTYPE), P_DOT)
        acc = gl.zeros([_HALF, D], gl.float32, O_MMA)
        steps += 1
        low = m0 + PART * _HALF - window
        acc, p, top, total, square, steps = _forward_keys(
            acc, p, top, total, square, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, anchor,
            steps, block - whole, block - 1, low, False, STAGES, D, S_MMA, O_MMA)  # fmt: skip
        if WINDOWED:
            acc, p, top, total, square, steps = _forward_keys(
                acc, p, top, total, square, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, anchor,
                steps, whole - first, whole - 1, low, True, STAGES, D, S_MMA, O_MMA)  # fmt: skip
        mbarrier.arrive(q_empty.index(0))
        stage = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(stage).reshape([_TILE, D]), acc, is_async=True)

        # the null, while the last product runs
        i_M = m0 + PART * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        inside = i_M < TQ
        null = gl.load(null_ptr + i_M * H + h, mask=inside, other=0.0)
        beta = gl.load(beta_ptr + h)
        floor = floor_bits.to(gl.float32, bitcast=True)
        v_null = gl.load(v_null_ptr + h * D + gl.arange(0, D, gl.SliceLayout(0, O_MMA)))
        lse = top + gl.log2(total)
        n_eff = total * total / square
        d = lse - null
        real = 1.0 / (1.0 + gl.exp2(-d))
        w = 1.0 / (1.0 + gl.exp2(d))
        cap = gl.exp2(2.0 * d) / floor
        bound = n_eff > cap
        n_eff = gl.where(bound, cap, n_eff)
        at = (b * H + h) * TQ + i_M
        gl.store(lse_ptr + at, lse, mask=inside)
        gl.store(n_eff_ptr + at, gl.where(bound, -n_eff, n_eff), mask=inside)
        gl.store(mag_ptr + (b * TQ + i_M) * H + h, _tanh(beta * _log1p(n_eff * real)), mask=inside)
        real = gl.convert_layout(real / total, O_ROW)
        w = gl.convert_layout(w, O_ROW)

        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(v_empty.index(stage))
        x = acc * real[:, None] + w[:, None] * v_null[None, :]
        length = gl.sqrt(gl.sum(x * x, 1))
        inverse = 1.0 / gl.maximum(length, _TINY)
        # the last tile has left the buffer
        tma.store_wait(0)
        _barrier()
        c_part.reshape([_HALF, D]).store((x * inverse[:, None]).to(DTYPE))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(c_desc, [b, m0 + PART * _HALF, h * D], c_part)
        signed = gl.convert_layout(gl.where(length < _TINY, -inverse, inverse), gl.SliceLayout(1, S_MMA))
        gl.store(inverse_ptr + at, signed, mask=inside)
    tma.store_wait(0)


@_jit
def _forward_part(PART: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, rows):
    _forward_rows(*rows, H, STAGES, WINDOWED, PART)


@_jit
def _forward(
    q_desc, k_desc, v_desc, c_desc, null_ptr, v_null_ptr, beta_ptr, mag_ptr, lse_ptr, n_eff_ptr, inverse_ptr,
    TQ, tiles, BH, window, floor_bits, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, _HALF, D], q_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2, 1, _HALF, D], c_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, _TILE, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, _TILE, D], v_desc.layout)
    anchor_smem = gl.allocate_shared_memory(gl.float32, [2, _HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = _barriers(1, 2)
    k_full, k_empty = _barriers(STAGES, 2)
    v_full, v_empty = _barriers(STAGES, 2)
    fence_async_shared()
    _barrier()
    rows = (c_desc, null_ptr, v_null_ptr, beta_ptr, mag_ptr, lse_ptr, n_eff_ptr, inverse_ptr,
            q_smem, k_smem, v_smem, c_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, anchor_smem,
            TQ, tiles, BH, window, floor_bits)  # fmt: skip
    gl.warp_specialize(
        [
            (_forward_part, (0, H, STAGES, WINDOWED, rows)),
            (_forward_part, (1, H, STAGES, WINDOWED, rows)),
            (_forward_load, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                             v_full, v_empty, TQ, tiles, BH, window, H, G, STAGES, WINDOWED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# --- backward, queries ----------------------------------------------------------------------------------------------


@_jit
def _dq_tile(t, TQ, window, H: gl.constexpr, BH, WINDOWED: gl.constexpr):
    """(b, h, first row, the last block of 64 keys that a row sees)."""
    m0 = (gl.cdiv(TQ, _TILE) - 1 - t // BH) * _TILE
    first = 0
    if WINDOWED:
        first = gl.maximum(m0 - window + 1, 0) // _HALF
    return t % BH // H, t % BH % H, m0, first


@_jit
def _dq_load(
    q_desc, k_desc, v_desc, g_desc, q_smem, g_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
    TQ, tiles, BH, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    steps = 0
    for r in range(_rounds(tiles)):
        b, h, m0, first = _dq_tile(_turn(r), TQ, window, H, BH, WINDOWED)
        at = h // G * D
        mbarrier.wait(q_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 4 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            place = [b, m0 + half * _HALF, h * D]
            tma.async_copy_global_to_shared(q_desc, place, q_full.index(0), q_smem.index(half))
            tma.async_copy_global_to_shared(g_desc, place, q_full.index(0), g_smem.index(half))
        block = m0 // _HALF + 1
        for i in range(block - first + 1):
            stage = steps % STAGES
            full = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), ((steps // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [b, (block - i) * _HALF, at], full, k_smem.index(stage))
            tma.async_copy_global_to_shared(v_desc, [b, (block - i) * _HALF, at], full, v_smem.index(stage))
            steps += 1


@_jit
def _dq_keys(
    dq, q, g, minus_lse, add, twice, k_smem, v_smem, full, empty, steps, count, block, low,
    DIAGONAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    S_MMA: gl.constexpr, O_MMA: gl.constexpr,
):  # fmt: skip
    """`count` blocks of keys, from `block` down; dq is in flight between steps, so a stage goes back a step late."""
    blank = gl.zeros([_HALF, _HALF], gl.float32, S_MMA)
    for i in range(count):
        stage = steps % STAGES
        mbarrier.wait(full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_HALF, D])
        v = v_smem.index(stage).reshape([_HALF, D])
        # the accumulators start at -lse and at what is added to g.v
        s, _ = gl.broadcast(minus_lse[:, None], blank)
        s = warpgroup_mma(q, k.permute([1, 0]), s, is_async=True)
        dp, _ = gl.broadcast(add[:, None], blank)
        dp = warpgroup_mma(g, v.permute([1, 0]), dp, is_async=True)
        if DIAGONAL:
            s = warpgroup_mma_wait(1, deps=[s])
        else:
            dq, s = warpgroup_mma_wait(1, deps=[dq, s])
            _barrier()
            mbarrier.arrive(empty.index((steps - 1) % STAGES))
        p = gl.exp2(s)
        row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        key = gl.arange(0, _HALF, gl.SliceLayout(0, S_MMA))
        if DIAGONAL:
            p = gl.where(key[None, :] <= row[:, None], p, 0.0)
        if MASKED:
            p = gl.where(key[None, :] - row[:, None] > low - (block - i) * _HALF, p, 0.0)
        # p among what waits: a little more of the exponentials runs under the second product
        dp, p = warpgroup_mma_wait(0, deps=[dp, p])
        da = p * (dp + twice[:, None] * p)
        da = gl.convert_layout(da.to(k.dtype), gl.DotOperandLayout(0, O_MMA, 2))
        dq = warpgroup_mma(da, k, dq, is_async=True)
        steps += 1
    return dq, steps


@_jit
def _dq_rows(
    dq_desc, lse_ptr, add_ptr, twice_ptr, q_smem, g_smem, k_smem, v_smem, dq_smem, q_full, q_empty, k_full, k_empty,
    TQ, tiles, BH, window, H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART to 64 PART + 63 of every tile."""
    D: gl.constexpr = dq_desc.block_type.shape[2]
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q = q_smem.index(PART).reshape([_HALF, D])
    g = g_smem.index(PART).reshape([_HALF, D])
    dq_part = dq_smem.index(PART)
    steps = 0
    for r in range(_rounds(tiles)):
        b, h, m0, tile_first = _dq_tile(_turn(r), TQ, window, H, BH, WINDOWED)
        m = m0 + PART * _HALF
        block = m // _HALF
        first = 0
        whole = 0
        if WINDOWED:
            first = gl.maximum(m - window + 1, 0) // _HALF
            whole = gl.cdiv(gl.maximum(m + _HALF - window, 0), _HALF)
        i_M = m + gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        at = (b * H + h) * TQ + i_M
        # rows beyond the end have P = 0
        minus_lse = -gl.load(lse_ptr + at, mask=i_M < TQ, other=-_HIDDEN)
        add = gl.load(add_ptr + at, mask=i_M < TQ, other=0.0)
        twice = gl.load(twice_ptr + at, mask=i_M < TQ, other=0.0)
        mbarrier.wait(q_full.index(0), r & 1)
        steps = _pass_over(k_full, k_empty, steps, 1 - PART, STAGES)
        dq = warpgroup_mma_init(gl.zeros([_HALF, D], gl.float32, O_MMA))
        dq, steps = _dq_keys(dq, q, g, minus_lse, add, twice, k_smem, v_smem, k_full, k_empty, steps, 1, block, 0,
                             True, False, STAGES, D, S_MMA, O_MMA)  # fmt: skip
        dq, steps = _dq_keys(dq, q, g, minus_lse, add, twice, k_smem, v_smem, k_full, k_empty, steps,
                             block - whole, block - 1, 0, False, False, STAGES, D, S_MMA, O_MMA)  # fmt: skip
        if WINDOWED:
            dq, steps = _dq_keys(dq, q, g, minus_lse, add, twice, k_smem, v_smem, k_full, k_empty, steps,
                                 whole - first, whole - 1, m - window,
                                 False, True, STAGES, D, S_MMA, O_MMA)  # fmt: skip
        mbarrier.arrive(q_empty.index(0))
        # the last tile has left the buffer
        tma.store_wait(0)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _barrier()
        mbarrier.arrive(k_empty.index((steps - 1) % STAGES))
        dq_part.reshape([_HALF, D]).store((dq * _LN2).to(dq_desc.dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(dq_desc, [b, m, h * D], dq_part)
        steps = _pass_over(k_full, k_empty, steps, first - tile_first, STAGES)
    tma.store_wait(0)


@_jit
def _dq_part(PART: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, rows):
    _dq_rows(*rows, H, STAGES, WINDOWED, PART)


@_jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, lse_ptr, add_ptr, twice_ptr,
    TQ, tiles, BH, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, _HALF, D], q_desc.layout)
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [2, 1, _HALF, D], g_desc.layout)
    dq_smem = gl.allocate_shared_memory(dq_desc.dtype, [2, 1, _HALF, D], dq_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, _HALF, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, _HALF, D], v_desc.layout)
    q_full, q_empty = _barriers(1, 2)
    k_full, k_empty = _barriers(STAGES, 2)
    fence_async_shared()
    _barrier()
    rows = (dq_desc, lse_ptr, add_ptr, twice_ptr, q_smem, g_smem, k_smem, v_smem, dq_smem, q_full, q_empty,
            k_full, k_empty, TQ, tiles, BH, window)  # fmt: skip
    gl.warp_specialize(
        [
            (_dq_part, (0, H, STAGES, WINDOWED, rows)),
            (_dq_part, (1, H, STAGES, WINDOWED, rows)),
            (_dq_load, (q_desc, k_desc, v_desc, g_desc, q_smem, g_smem, k_smem, v_smem, q_full, q_empty,
                        k_full, k_empty, TQ, tiles, BH, window, H, G, STAGES, WINDOWED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# --- backward, keys -------------------------------------------------------------------------------------------------


@_jit
def _dkv_tile(t, TQ, window, J: gl.constexpr, BJ, WINDOWED: gl.constexpr):
    """(b, j, first key, the first block of 64 queries that the tile does not need)."""
    n0 = t // BJ * _TILE
    end = gl.cdiv(TQ, _HALF)
    if WINDOWED:
        end = gl.minimum(end, (n0 + _TILE - 2 + window) // _HALF + 1)
    # the younger half's diagonal, even beyond the last query
    return t % BJ // J, t % BJ % J, n0, gl.maximum(end, n0 // _HALF + 2)


@_jit
def _dkv_load(
    q_desc, k_desc, v_desc, g_desc, lse_desc, add_desc, twice_desc, q_smem, g_smem, stats_smem, k_smem, v_smem,
    k_full, k_empty, q_full, q_empty,
    TQ, tiles, BJ, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    J: gl.constexpr = H // G
    steps = 0
    for r in range(_rounds(tiles)):
        b, j, n0, end = _dkv_tile(_turn(r), TQ, window, J, BJ, WINDOWED)
        mbarrier.wait(k_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(k_full.index(0), 4 * k_desc.block_type.nbytes)
        for half in gl.static_range(2):
            place = [b, n0 + half * _HALF, j * D]
            tma.async_copy_global_to_shared(k_desc, place, k_full.index(0), k_smem.index(half))
            tma.async_copy_global_to_shared(v_desc, place, k_full.index(0), v_smem.index(half))
        for h in range(j * G, j * G + G):
            for block in range(n0 // _HALF, end):
                stage = steps % STAGES
                full = q_full.index(stage)
                mbarrier.wait(q_empty.index(stage), ((steps // STAGES) & 1) ^ 1)
                mbarrier.expect(full, 2 * q_desc.block_type.nbytes + 3 * lse_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [b, block * _HALF, h * D], full, q_smem.index(stage))
                at = [b * H + h, block * _HALF]
                tma.async_copy_global_to_shared(lse_desc, at, full, stats_smem.index(3 * stage))
                tma.async_copy_global_to_shared(add_desc, at, full, stats_smem.index(3 * stage + 1))
                tma.async_copy_global_to_shared(twice_desc, at, full, stats_smem.index(3 * stage + 2))
                tma.async_copy_global_to_shared(g_desc, [b, block * _HALF, h * D], full, g_smem.index(stage))
                steps += 1


@_jit
def _dkv_queries(
    dk, dv, k, v, q_smem, g_smem, stats_smem, full, empty, steps, start, stop, high,
    DIAGONAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    S_MMA: gl.constexpr, O_MMA: gl.constexpr,
):  # fmt: skip
    """Blocks of queries from `start` to `stop`; keys are rows, queries columns."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_MMA)
    P_DOT: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    blank = gl.zeros([_HALF, _HALF], gl.float32, S_MMA)
    for block in range(start, stop):
        stage = steps % STAGES
        mbarrier.wait(full.index(stage), (steps // STAGES) & 1)
        q = q_smem.index(stage).reshape([_HALF, D])
        g = g_smem.index(stage).reshape([_HALF, D])
        # the accumulators start at -lse and at what is added to g.v
        lse = stats_smem.index(3 * stage).reshape([_HALF]).load(COLUMN)
        s, _ = gl.broadcast(-lse[None, :], blank)
        s = warpgroup_mma(k, q.permute([1, 0]), s, is_async=True)
        add = stats_smem.index(3 * stage + 1).reshape([_HALF]).load(COLUMN)
        dp, _ = gl.broadcast(add[None, :], blank)
        dp = warpgroup_mma(v, g.permute([1, 0]), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s)
        row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        query = gl.arange(0, _HALF, COLUMN)
        if DIAGONAL:
            p = gl.where(query[None, :] >= row[:, None], p, 0.0)
        if MASKED:
            p = gl.where(query[None, :] - row[:, None] < high - block * _HALF, p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(g.dtype), P_DOT), g, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        twice = stats_smem.index(3 * stage + 2).reshape([_HALF]).load(COLUMN)
        da = p * (dp + twice[None, :] * p)
        dk = warpgroup_mma(gl.convert_layout(da.to(q.dtype), P_DOT), q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        _barrier()
        mbarrier.arrive(empty.index(stage))
        steps += 1
    return dk, dv, steps


@_jit
def _dkv_keys(
    dk_desc, dv_desc, q_smem, g_smem, stats_smem, k_smem, v_smem, k_full, k_empty, q_full, q_empty,
    TQ, tiles, BJ, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Keys 64 PART to 64 PART + 63 of every tile."""
    D: gl.constexpr = dk_desc.block_type.shape[2]
    J: gl.constexpr = H // G
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_part = k_smem.index(PART)
    v_part = v_smem.index(PART)
    k = k_part.reshape([_HALF, D])
    v = v_part.reshape([_HALF, D])
    steps = 0
    for r in range(_rounds(tiles)):
        b, j, n0, tile_end = _dkv_tile(_turn(r), TQ, window, J, BJ, WINDOWED)
        n = n0 + PART * _HALF
        first = n // _HALF
        end = tile_end
        whole = tile_end
        if WINDOWED:
            end = gl.minimum(tile_end, (n + _HALF - 2 + window) // _HALF + 1)
            whole = gl.minimum(end, (n + window) // _HALF)
        mbarrier.wait(k_full.index(0), r & 1)
        dk = gl.zeros([_HALF, D], gl.float32, O_MMA)
        dv = gl.zeros([_HALF, D], gl.float32, O_MMA)
        for _ in range(G):
            steps = _pass_over(q_full, q_empty, steps, PART, STAGES)
            dk, dv, steps = _dkv_queries(dk, dv, k, v, q_smem, g_smem, stats_smem, q_full, q_empty, steps,
                                         first, first + 1, 0, True, False, STAGES, D, S_MMA, O_MMA)  # fmt: skip
            dk, dv, steps = _dkv_queries(dk, dv, k, v, q_smem, g_smem, stats_smem, q_full, q_empty, steps,
                                         first + 1, whole, 0, False, False, STAGES, D, S_MMA, O_MMA)  # fmt: skip
            if WINDOWED:
                dk, dv, steps = _dkv_queries(dk, dv, k, v, q_smem, g_smem, stats_smem, q_full, q_empty, steps,
                                             whole, end, n + window, False, True, STAGES, D, S_MMA, O_MMA)  # fmt: skip
            steps = _pass_over(q_full, q_empty, steps, tile_end - end, STAGES)
        # no product reads this half of k and v any more: the results leave through it
        k.store((dk * _LN2).to(dk_desc.dtype))
        v.store(dv.to(dv_desc.dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(dk_desc, [b, n, j * D], k_part)
        tma.async_copy_shared_to_global(dv_desc, [b, n, j * D], v_part)
        tma.store_wait(0)
        _barrier()
        mbarrier.arrive(k_empty.index(0))


@_jit
def _dkv_part(PART: gl.constexpr, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, keys):
    _dkv_keys(*keys, H, G, STAGES, WINDOWED, PART)


@_jit
def _dkv(
    q_desc, k_desc, v_desc, g_desc, lse_desc, add_desc, twice_desc, dk_desc, dv_desc,
    TQ, tiles, BJ, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, _HALF, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, _HALF, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, _HALF, D], q_desc.layout)
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [STAGES, 1, _HALF, D], g_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [3 * STAGES, 1, _HALF], lse_desc.layout)
    k_full, k_empty = _barriers(1, 2)
    q_full, q_empty = _barriers(STAGES, 2)
    fence_async_shared()
    _barrier()
    keys = (dk_desc, dv_desc, q_smem, g_smem, stats_smem, k_smem, v_smem, k_full, k_empty, q_full, q_empty,
            TQ, tiles, BJ, window)  # fmt: skip
    # an assigned tuple turns constants into tensors: they travel beside it
    gl.warp_specialize(
        [
            (_dkv_part, (0, H, G, STAGES, WINDOWED, keys)),
            (_dkv_part, (1, H, G, STAGES, WINDOWED, keys)),
            (_dkv_load, (q_desc, k_desc, v_desc, g_desc, lse_desc, add_desc, twice_desc, q_smem, g_smem, stats_smem,
                         k_smem, v_smem, k_full, k_empty, q_full, q_empty,
                         TQ, tiles, BJ, window, H, G, STAGES, WINDOWED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# --- host -----------------------------------------------------------------------------------------------------------


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])


def _flat(x: Tensor, rows: int) -> Any:
    """[B, T, X, D] as [B, T, X * D], read and written in blocks of `rows` positions of one head."""
    bsz, t, heads, d = x.shape
    block = (1, rows, d)
    return TensorDescriptor(
        x, [bsz, t, heads * d], [t * heads * d, heads * d, 1], list(block), _layout(block, x.dtype))  # fmt: skip


def _columns(x: Tensor) -> Any:
    """[B, H, T] as [B * H, T], read in blocks of 64 positions; zeros follow the last."""
    bsz, h, t = x.shape
    if t % 4:
        # the copy engine steps by multiples of 16 bytes
        x = torch.nn.functional.pad(x, (0, -t % 4))
        t = x.shape[2]
    return TensorDescriptor(x, [bsz * h, t], [t, 1], [1, HALF], _layout((1, HALF), x.dtype))


def forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HD: Tensor,
    *, window: int | None, floor: float, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(c [B, T, H, D], mag [B, T, H], lse, n_eff, inverse [B, H, T]); all contiguous, statistics float32.

    q [B, T, H, D], k and v [B, T, J, D], null_TH [T, H], beta_H [H], v_null_HD [H, D]; a row sees `window` keys.
    """
    bsz, t, h, _ = q.shape
    tiles = bsz * h * triton.cdiv(t, TILE)
    c = torch.empty_like(q)
    mag = torch.empty(bsz, t, h, device=q.device, dtype=torch.float32)
    lse, n_eff, inverse = (torch.empty(bsz, h, t, device=q.device, dtype=torch.float32) for _ in range(3))
    _forward[(min(tiles, _processors(q.device)),)](
        _flat(q, HALF), _flat(k, TILE), _flat(v, TILE), _flat(c, HALF),
        null_TH, v_null_HD, beta_H, mag, lse, n_eff, inverse, t, tiles, bsz * h, window or 0, _bits(floor),
        H=h, G=h // k.shape[2], STAGES=FORWARD_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return c, mag, lse, n_eff, inverse


@functools.cache
def _bits(x: float) -> int:
    """The bits of a float32 of value x."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def dq(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> Tensor:  # fmt: skip
    """Gradient of the scaled queries, [B, T, H, D]; g as q, statistics [B, H, T]."""
    return _run_dq([_flat(x, HALF) for x in (q, k, v, g)], q, k, lse, add, twice, window)


def dkv(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of keys and values, [B, T, J, D]; g as q, statistics [B, H, T]."""
    return _run_dkv([_flat(x, HALF) for x in (q, k, v, g)], q, k, lse, add, twice, window)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv): `dq` and `dkv` with the descriptors of their inputs made once."""
    blocks = [_flat(x, HALF) for x in (q, k, v, g)]
    dk, dv = _run_dkv(blocks, q, k, lse, add, twice, window)
    return _run_dq(blocks, q, k, lse, add, twice, window), dk, dv


def _run_dq(
    blocks: list[Any], q: Tensor, k: Tensor, lse: Tensor, add: Tensor, twice: Tensor, window: int | None
) -> Tensor:  # fmt: skip
    bsz, t, h, _ = q.shape
    tiles = bsz * h * triton.cdiv(t, TILE)
    out = torch.empty_like(q)
    _dq[(min(tiles, _processors(q.device)),)](
        *blocks, _flat(out, HALF), lse, add, twice, t, tiles, bsz * h, window or 0,
        H=h, G=h // k.shape[2], STAGES=DQ_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return out


def _run_dkv(
    blocks: list[Any], q: Tensor, k: Tensor, lse: Tensor, add: Tensor, twice: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bsz, t, h, _ = q.shape
    heads_kv = k.shape[2]
    tiles = bsz * heads_kv * triton.cdiv(t, TILE)
    dk, dv = torch.empty_like(k), torch.empty_like(k)
    _dkv[(min(tiles, _processors(q.device)),)](
        *blocks, _columns(lse), _columns(add), _columns(twice), _flat(dk, HALF), _flat(dv, HALF),
        t, tiles, bsz * heads_kv, window or 0,
        H=h, G=h // heads_kv, STAGES=DKV_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return dk, dv


def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HD: Tensor, *,
    window: int | None, floor: float, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As in `attention_triton`. Raises ValueError for a key offset, which these kernels do not know."""
    _check(q, k, offset)
    return forward(q, k, v, null_TH, beta_H, v_null_HD, window=window, floor=floor)


def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HD: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, *, window: int | None, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As in `attention_triton`, whose pass over rows it shares."""
    _check(q, k, offset)
    g, add, twice, d_null, d_beta, d_v_null = polar_rows(gc, g_mag, null_TH, beta_H, v_null_HD, c, lse, n_eff, inverse)
    dq, dk, dv = gradients(q, k, v, g, lse, add, twice, window=window)
    return dq, dk, dv, d_null, d_beta, d_v_null


def _check(q: Tensor, k: Tensor, offset: int) -> None:
    if offset != 0 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} queries at {offset} of {k.shape[1]} keys; these kernels want the same positions"
        )


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    """None if these kernels can take such tensors, else why not."""
    if _missing:
        return _missing
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "not a GPU of compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}, neither bfloat16 nor float16"
    if head_dim not in (64, 128):
        return f"head size {head_dim}, not 64 or 128"
    if window is not None and window < TILE:
        return f"window {window} cuts inside the diagonal's tile of {TILE}"
    return None
