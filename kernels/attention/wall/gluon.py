"""Forward of wall attention in Gluon for Hopper (docs/explanation/kernels.md, "Wall attention"); the backward is plain Triton's.

Loader and two warpgroups as in polar attention, over tiles of 128 queries, but keys in blocks of 64, at which the gates
of q' and k' are cut. A warpgroup's 64 queries are such a block too, so one vector of rates [X] multiplies them for a
block of keys,

    rate = 2^(E before the queries' block - E at the end of the keys' block),

which from one block of keys to the next lower one is multiplied by the decay over that block. Each thread holds one
channel of it. Shared memory distributes it in 16 bits, as it is multiplied with queries that stay in registers.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..gluon.host import check_tile_window, head_blocks, processors
from ..gluon.shared import (
    _HALF,
    _HIDDEN,
    _TILE,
    HALF,
    TILE,
    _barrier,
    _barriers,
    _jit,
    _num_program_tiles,
    _release_stages,
    _tile_of_round,
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .triton import BLOCK, apply_gates

STAGES = 4
assert BLOCK == HALF, "a warpgroup's queries are one block of gates"


@_jit
def _tile(t, TQ, window, H: gl.constexpr, BH, WINDOWED: gl.constexpr):
    """Return (b, h, first query, first visible block of 64 keys) of tile t of 128 queries.

    The longest rows come first. TQ: tokens. window: attention window in keys, read only when WINDOWED. H: query heads,
    BH: B H.
    """
    m0 = (gl.cdiv(TQ, _TILE) - 1 - t // BH) * _TILE
    first = 0
    if WINDOWED:
        first = gl.maximum(m0 - window + 1, 0) // _HALF
    return t % BH // H, t % BH % H, m0, first


@_jit
def _load(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, TQ, tiles, BH, window,
    H: gl.constexpr, J: gl.constexpr, Y: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load queries, keys and values of this program's tiles into shared memory by TMA; runs in one warp.

    Key blocks of 64 go from the diagonal down, STAGES in flight: the loader waits for a stage's `empty` barrier and its
    copies signal the `full` one. Descriptors in blocks of 64: q' [B, T, H X], k' [B, T, Y X], v [B, T, J X]. TQ:
    tokens; tiles: tiles of all programs; BH: B H; window: attention window in keys; H, J and Y: query, KV and gate
    heads.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, h, m0, first = _tile(_tile_of_round(r), TQ, window, H, BH, WINDOWED)
        mbarrier.wait(q_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [b, m0 + half * _HALF, h * X], q_full.index(0), q_smem.index(half))  # fmt: skip
        top = m0 // _HALF + 1
        for i in range(top - first + 1):
            n = (top - i) * _HALF
            stage = steps % STAGES
            free = ((steps // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [b, n, h // (H // Y) * X], k_full.index(stage), k_smem.index(stage))  # fmt: skip
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [b, n, h // (H // J) * X], v_full.index(stage), v_smem.index(stage))  # fmt: skip
            steps += 1


@_jit
def _scaled(q, rate_smem):
    """Return q [64, X] times the rates in shared memory [X], in bfloat16 and q's layout, two channels at once."""
    rate = rate_smem.load(gl.SliceLayout(0, q.type.layout))
    rate, q = gl.broadcast(rate[None, :], q)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [q, rate], dtype=gl.bfloat16, is_pure=True, pack=2)  # fmt: skip


@_jit
def _keys(
    acc, p, top, total, rate, q, rates, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rate_smem, anchor, steps, count, block, low,
    PART: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, X: gl.constexpr, S_MMA: gl.constexpr, O_MMA: gl.constexpr,
):  # fmt: skip
    """Add `count` blocks of 64 keys, from `block` down, to the running softmax of a warpgroup's 64 queries.

    The product with v lags one block behind the scores: acc lacks the last block's. `rate` [X] is that of `block`,
    which also lies in rate_smem, in this part's buffer `steps % 2`. `rates` points at the block sums of the gates in
    units of log 2, X per block, starting with block 0. `low` is the largest key position that the window hides from the
    first query, read with MASKED. `full` and `empty` are the stages' barriers, `steps` the stages consumed so far.
    `anchor`, float32 [64] in shared memory, gets a row sum per block and is never read: the store orders instructions,
    so it must be memory of its own.

    Returns:
        (acc, p of the last block, row maximum, row sum, rate of the next block, steps).
    """
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_MMA)
    for i in range(count):
        stage = steps % STAGES
        fallen = gl.load(rates + (block - i) * X)
        scaled = _scaled(q, rate_smem.index(2 * PART + steps % 2))
        mbarrier.wait(k_full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_HALF, X]).permute([1, 0])
        blank = gl.zeros([_HALF, _HALF], gl.float32, S_MMA)
        s = warpgroup_mma(scaled, k, blank, use_acc=False, is_async=True)
        last = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(last).reshape([_HALF, X]), acc, is_async=True)
        rate = rate * gl.exp2(fallen)
        rate_smem.index(2 * PART + (steps + 1) % 2).store(rate.to(gl.bfloat16))
        s = warpgroup_mma_wait(1, deps=[s])
        if MASKED:
            # the window's lower edge: key > row - window
            row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
            key = gl.arange(0, _HALF, gl.SliceLayout(0, S_MMA))
            s = gl.where(key[None, :] - row[:, None] > low - (block - i) * _HALF, s, _HIDDEN)
        higher = gl.maximum(top, gl.max(s, 1))
        shrink = gl.exp2(top - higher)
        e = gl.exp2(s - higher[:, None])
        total = total * shrink + gl.sum(e, 1)
        top = higher
        next_p = gl.convert_layout(e.to(p.dtype), p.type.layout)
        # this store is never read: it depends on all exponentials and keeps the assembler from waiting before them
        anchor.store(total)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.arrive(v_empty.index(last))
        acc = acc * gl.convert_layout(shrink, O_ROW)[:, None]
        p = next_p
        steps += 1
    return acc, p, top, total, rate, steps


@_jit
def _rows(
    o_desc, lse_ptr, total_ptr, q_smem, k_smem, v_smem, o_smem, rate_smem, anchor_smem, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, TQ, N, tiles, BH, window,
    H: gl.constexpr, Y: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Compute and store output and lse of rows 64 PART to 64 PART + 63 of every tile of this program.

    Runs in one warpgroup, on the blocks that `_load` copies into shared memory. o_desc describes the output [B, T, H
    X]; lse_ptr is float32 [B, H, T] in units of log 2, written; total_ptr holds the block sums of the gates, float32
    [B, Y, N, X] in units of log 2; `full` and `empty` are the barriers of the stages. anchor_smem, float32 [2, 64], is
    written for every block of keys and never read: the store orders instructions, so it must be memory of its own. TQ:
    tokens; N: blocks of gates; tiles: tiles of all programs; BH: B H; window: attention window in keys; PART:
    constexpr, 0 or 1.
    """
    X: gl.constexpr = o_desc.block_type.shape[2]
    DTYPE: gl.constexpr = o_desc.dtype
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 16])
    Q_DOT: gl.constexpr = gl.DotOperandLayout(0, S_MMA, 2)
    P_DOT: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_MMA)
    CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
    key = gl.arange(0, _HALF, gl.SliceLayout(0, S_MMA))
    o_part = o_smem.index(PART)
    anchor = anchor_smem.index(PART)
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, h, m0, first = _tile(_tile_of_round(r), TQ, window, H, BH, WINDOWED)
        own = m0 // _HALF + PART
        rates = total_ptr + (b * Y + h // (H // Y)) * N * X + gl.arange(0, X, CHANNELS)
        # a block of queries beyond the last token has no gates; its results are never read
        fallen = gl.load(rates + gl.minimum(own, N - 1) * X)
        mbarrier.wait(q_full.index(0), r & 1)
        q = q_smem.index(PART).reshape([_HALF, X]).load(Q_DOT)
        if PART == 0:
            # only the tile's later half sees this block
            _release_stages(k_full, k_empty, steps, 1, STAGES)
            steps = _release_stages(v_full, v_empty, steps, 1, STAGES)
        rate_smem.index(2 * PART + steps % 2).store(gl.exp2(-fallen).to(gl.bfloat16))
        _barrier()
        mbarrier.arrive(q_empty.index(0))
        stage = steps % STAGES
        scaled = _scaled(q, rate_smem.index(2 * PART + steps % 2))
        mbarrier.wait(k_full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_HALF, X]).permute([1, 0])
        blank = gl.zeros([_HALF, _HALF], gl.float32, S_MMA)
        s = warpgroup_mma(scaled, k, blank, use_acc=False, is_async=True)
        # the next lower block ends where this block's sums begin, so its rate is 1
        rate = gl.full([X], 1.0, gl.float32, CHANNELS)
        rate_smem.index(2 * PART + (steps + 1) % 2).store(rate.to(gl.bfloat16))
        s = warpgroup_mma_wait(0, deps=[s])
        _barrier()
        mbarrier.arrive(k_empty.index(stage))
        s = gl.where(key[None, :] <= row[:, None], s, _HIDDEN)
        top = gl.max(s, 1)
        e = gl.exp2(s - top[:, None])
        total = gl.sum(e, 1)
        p = gl.convert_layout(e.to(DTYPE), P_DOT)
        acc = gl.zeros([_HALF, X], gl.float32, O_MMA)
        steps += 1
        unmasked_from, last = 0, 0
        low = own * _HALF - window
        if WINDOWED:
            last = gl.maximum(low + 1, 0) // _HALF
            unmasked_from = gl.cdiv(gl.maximum(low + _HALF, 0), _HALF)
        acc, p, top, total, rate, steps = _keys(
            acc, p, top, total, rate, q, rates, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rate_smem, anchor,
            steps, own - unmasked_from, own - 1, low, PART, False, STAGES, X, S_MMA, O_MMA)  # fmt: skip
        if WINDOWED:
            acc, p, top, total, rate, steps = _keys(
                acc, p, top, total, rate, q, rates, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rate_smem, anchor,
                steps, unmasked_from - last, unmasked_from - 1, low, PART, True, STAGES, X, S_MMA, O_MMA)  # fmt: skip
        stage = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(stage).reshape([_HALF, X]), acc, is_async=True)
        at = own * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        gl.store(lse_ptr + (b * H + h) * TQ + at, top + gl.log2(total), mask=at < TQ)
        share = gl.convert_layout(1.0 / total, O_ROW)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(v_empty.index(stage))
        if WINDOWED and PART == 1:
            # these blocks are visible to the earlier half only
            _release_stages(k_full, k_empty, steps, last - first, STAGES)
            steps = _release_stages(v_full, v_empty, steps, last - first, STAGES)
        # the last tile must have left the buffer
        tma.store_wait(0)
        _barrier()
        o_part.reshape([_HALF, X]).store((acc * share[:, None]).to(DTYPE))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(o_desc, [b, own * _HALF, h * X], o_part)
    tma.store_wait(0)


@_jit
def _rows_part(
    PART: gl.constexpr, H: gl.constexpr, Y: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, rows
):
    _rows(*rows, H, Y, STAGES, WINDOWED, PART)


@_jit
def _wall_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, total_ptr, TQ, N, tiles, BH, window,
    H: gl.constexpr, J: gl.constexpr, Y: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of wall attention for this program's share of the tiles.

    Grid: (min(tiles, multiprocessors),), persistent programs over tiles of 128 queries of one head: one warp loads, two
    warpgroups of 64 rows compute. Descriptors in blocks of 64: q' and o [B, T, H X], k' [B, T, Y X], v [B, T, J X],
    bfloat16. total_ptr: block sums of the gates, float32 [B, Y, N, X] in units of log 2. lse_ptr: float32 [B, H, T] in
    units of log 2, written. BH: B H.

    TQ: tokens. tiles: tiles of all programs. window: attention window in keys, read only when WINDOWED. Constexprs: H
    query heads, J KV heads, Y gate heads, STAGES blocks in flight. N: blocks of gates.

    q' and k' are queries and keys with the decays inside their block of 64 tokens applied (`triton.apply_gates`).
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, _HALF, X], q_desc.layout)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [2, 1, _HALF, X], o_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, _HALF, X], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, _HALF, X], v_desc.layout)
    rate_smem = gl.allocate_shared_memory(gl.bfloat16, [4, X], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    anchor_smem = gl.allocate_shared_memory(gl.float32, [2, _HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = _barriers(1, 2)
    k_full, k_empty = _barriers(STAGES, 2)
    v_full, v_empty = _barriers(STAGES, 2)
    fence_async_shared()
    _barrier()
    rows = (o_desc, lse_ptr, total_ptr, q_smem, k_smem, v_smem, o_smem, rate_smem, anchor_smem,
            q_full, q_empty, k_full, k_empty, v_full, v_empty, TQ, N, tiles, BH, window)  # fmt: skip
    gl.warp_specialize(
        [
            (_rows_part, (0, H, Y, STAGES, WINDOWED, rows)),
            (_rows_part, (1, H, Y, STAGES, WINDOWED, rows)),
            (_load, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                     TQ, tiles, BH, window, H, J, Y, STAGES, WINDOWED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (o, lse, q', k', E) of wall attention in bfloat16.

    o is [B, T, H, X], lse float32 [B, H, T] in units of log 2, k' [B, T, Y, X] for Y gate heads. E is float32 [2, B, Y,
    N + 1, X], the high and the low part of the sums before each of N blocks of 64 tokens and before the end.

    q' is factor q times the decay from the start of the token's block of 64 up to it, k' is k times the decay from the
    token to the end of its block; E are the sums of the log gates of all blocks before a block.

    Args:
        q: Contiguous queries [B, T, H, X] in bfloat16.
        k: Contiguous keys [B, T, J, X].
        v: Contiguous values [B, T, J, X].
        f: Natural log gates, float32 [B, T, Y, X].
        factor: Factor of the products that gives units of log 2.
        window: Attention window in keys, or None.

    Raises:
        ValueError: The window is below 128 and could cut inside a diagonal block.
    """
    check_tile_window(window)
    (b, t, h, _), j, y = q.shape, k.shape[2], f.shape[2]
    q_, k_, total, edges = apply_gates(q, k, f, factor)
    o = torch.empty_like(q)
    lse = torch.empty(b, h, t, device=q.device, dtype=torch.float32)
    tiles = b * h * triton.cdiv(t, TILE)
    _wall_forward[(min(tiles, processors(q.device)),)](
        head_blocks(q_, HALF), head_blocks(k_, HALF), head_blocks(v, HALF), head_blocks(o, HALF), lse, total,
        t, total.shape[2], tiles, b * h, window or 0,
        H=h, J=j, Y=y, STAGES=STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return o, lse, q_, k_, edges
