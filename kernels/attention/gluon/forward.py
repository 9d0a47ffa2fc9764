"""Forward kernel of polar and forgetting attention in Gluon for Hopper."""

from __future__ import annotations

from .shared import (
    _HALF,
    _HIDDEN,
    _TILE,
    _TINY,
    _barrier,
    _barriers,
    _jit,
    _log1p,
    _num_program_tiles,
    _tanh,
    _tile_of_round,
    fence_async_shared,
    gl,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@_jit
def _forward_tile(t, TQ, window, H: gl.constexpr, BH, WINDOWED: gl.constexpr):
    """Return the coordinates and key blocks of tile t of 128 queries; the longest rows come first.

    Returns:
        (b, h, first query, its own block of 128 keys, first block that the window's lower edge does not cut, first
        visible block).
    """
    m0 = (gl.cdiv(TQ, _TILE) - 1 - t // BH) * _TILE
    first = 0
    unmasked_from = 0
    if WINDOWED:
        first = gl.maximum(m0 - window + 1, 0) // _TILE
        unmasked_from = gl.cdiv(gl.maximum(m0 + _TILE - window, 0), _TILE)
    return t % BH // H, t % BH % H, m0, m0 // _TILE, unmasked_from, first


@_jit
def _forward_load(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    TQ, tiles, BH, window, fade, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
    FADES: gl.constexpr,
):  # fmt: skip
    """Load queries, keys and values of this program's tiles into shared memory by TMA; runs in one warp.

    Key blocks of 128 go from the diagonal down, STAGES in flight: the loader waits for a stage's `empty` barrier and
    its copies signal the `full` one. With FADES, fade[0] is a buffer and fade[3] the descriptor of the keys' decays,
    loaded with each block of keys. Descriptors: q [B, T, H X] in blocks of 64, k and v [B, T, J X] in blocks of 128.
    TQ: tokens; tiles: tiles of all programs; BH: B H; window: attention window in keys, read only when WINDOWED.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, h, m0, top, _unmasked_from, first = _forward_tile(_tile_of_round(r), TQ, window, H, BH, WINDOWED)
        at = h // G * X
        mbarrier.wait(q_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [b, m0 + half * _HALF, h * X], q_full.index(0), q_smem.index(half))  # fmt: skip
        for i in range(top - first + 1):
            n = (top - i) * _TILE
            stage = steps % STAGES
            free = ((steps // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            if FADES:
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes + fade[3].block_type.nbytes)
                tma.async_copy_global_to_shared(fade[3], [b * H + h, n], k_full.index(stage), fade[0].index(stage))
            else:
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [b, n, at], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [b, n, at], v_full.index(stage), v_smem.index(stage))
            steps += 1


@_jit
def _forward_keys(
    acc, p, top, total, square, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, anchor,
    fade, at_F, from_hi, from_lo, steps, count, block, low,
    MASKED: gl.constexpr, STAGES: gl.constexpr, X: gl.constexpr, S_MMA: gl.constexpr, O_MMA: gl.constexpr,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """Add `count` blocks of 128 keys, from `block` down, to the running softmax of a warpgroup's 64 queries.

    The product with v lags one block behind the scores: both are issued together, and the softmax of a block runs under
    the other product, so acc lacks the last block's. With a FACTOR, scores are FACTOR q·k + F_m0 - F_j, where m0 is the
    tile's first query and F_m0 = from_hi + from_lo. `fade` is then (buffer of each key's decay relative to its block's
    first, high part of F, low part of F), and at_F the offset of the head's row in F. `low` is the largest key position
    that the window hides from the first row, read with MASKED. `full` and `empty` are the stages' barriers, `steps` the
    stages consumed so far. `anchor`, float32 [64] in shared memory, gets a row sum per block and is never read: the
    store orders instructions, so it must be memory of its own.

    Returns:
        (acc, p of the last block, row maximum in units of log 2, row sum, sum of squares, steps); without the sum of
        squares with a FACTOR.
    """
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_MMA)
    for i in range(count):
        stage = steps % STAGES
        if FACTOR is not None:
            # F of the block's first key, loaded early because the scores need it
            hi = gl.load(fade[1] + at_F + (block - i) * _TILE)
            lo = gl.load(fade[2] + at_F + (block - i) * _TILE)
        mbarrier.wait(k_full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_TILE, X]).permute([1, 0])
        hidden = gl.zeros([_HALF, _TILE], gl.float32, S_MMA)
        s = warpgroup_mma(q, k, hidden, use_acc=False, is_async=True)
        last = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(last).reshape([_TILE, X]), acc, is_async=True)
        if FACTOR is not None:
            local = fade[0].index(stage).reshape([_TILE]).load(gl.SliceLayout(0, S_MMA))
        s = warpgroup_mma_wait(1, deps=[s])
        if FACTOR is not None:
            s = s * FACTOR + local[None, :]
        if MASKED:
            # the window's lower edge: key > row - window
            row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
            key = gl.arange(0, _TILE, gl.SliceLayout(0, S_MMA))
            if FACTOR is None:
                s = gl.where(key[None, :] - row[:, None] > low - (block - i) * _TILE, s, _HIDDEN)
            else:
                # without the 64 differences, which would not fit into registers beside the decays
                s = gl.where(key[None, :] > (row + (low - (block - i) * _TILE))[:, None], s, _HIDDEN)
        if FACTOR is not None:
            # scores are relative to the block's first key, so one number shifts them all
            shift = (from_hi - hi) + (from_lo - lo)
            higher = gl.maximum(top, gl.max(s, 1) + shift)
            base = higher - shift
        else:
            higher = gl.maximum(top, gl.max(s, 1))
            base = higher
        shrink = gl.exp2(top - higher)
        e = gl.exp2(s - base[:, None])
        total = total * shrink + gl.sum(e, 1)
        if FACTOR is None:
            square = square * (shrink * shrink) + gl.sum(e * e, 1)
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
    return acc, p, top, total, square, steps


@_jit
def _forward_rows(
    c_desc, lse_ptr, null, fade, q_smem, k_smem, v_smem, c_smem, anchor_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    TQ, tiles, BH, window,
    H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FACTOR: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Compute and store the outputs of rows 64 PART to 64 PART + 63 of every tile; runs in one warpgroup.

    Without a FACTOR this is polar attention: c, magnitude, lse, n_eff and inverse are written; `null` is then the tuple
    (null, v_null, beta, mag, n_eff, inverse, bits of the floor), all but the last pointers. With a FACTOR it is
    forgetting attention: output and lse. The inputs are the blocks that `_forward_load` copies into shared memory;
    `full` and `empty` are the barriers of the stages. c_desc describes the output [B, T, H X], lse_ptr is float32 [B,
    H, T] in units of log 2. TQ: tokens; tiles: tiles of all programs; BH: B H; window: attention window in keys; PART:
    constexpr, 0 or 1. anchor_smem, float32 [2, 64], is written and never read: the stores order instructions.
    """
    X: gl.constexpr = c_desc.block_type.shape[2]
    DTYPE: gl.constexpr = c_desc.dtype
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 16])
    P_DOT: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_MMA)
    row = gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA)) + PART * _HALF
    key = gl.arange(0, _TILE, gl.SliceLayout(0, S_MMA))
    q = q_smem.index(PART).reshape([_HALF, X])
    c_part = c_smem.index(PART)
    anchor = anchor_smem.index(PART)
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, h, m0, block, unmasked_from, first = _forward_tile(_tile_of_round(r), TQ, window, H, BH, WINDOWED)
        at_F, from_hi, from_lo = 0, 0, 0
        if FACTOR is not None:
            at_F = (b * H + h) * TQ
            from_hi = gl.load(fade[1] + at_F + m0)
            from_lo = gl.load(fade[2] + at_F + m0)
        mbarrier.wait(q_full.index(0), r & 1)
        stage = steps % STAGES
        mbarrier.wait(k_full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_TILE, X]).permute([1, 0])
        blank = gl.zeros([_HALF, _TILE], gl.float32, S_MMA)
        s = warpgroup_mma(q, k, blank, use_acc=False, is_async=True)
        if FACTOR is not None:
            local = fade[0].index(stage).reshape([_TILE]).load(gl.SliceLayout(0, S_MMA))
        s = warpgroup_mma_wait(0, deps=[s])
        _barrier()
        mbarrier.arrive(k_empty.index(stage))
        if FACTOR is not None:
            # the diagonal block's first key is the tile's first query, so there is no shift
            s = s * FACTOR + local[None, :]
        s = gl.where(key[None, :] <= row[:, None], s, _HIDDEN)
        top = gl.max(s, 1)
        e = gl.exp2(s - top[:, None])
        total = gl.sum(e, 1)
        square = total
        if FACTOR is None:
            square = gl.sum(e * e, 1)
        p = gl.convert_layout(e.to(DTYPE), P_DOT)
        acc = gl.zeros([_HALF, X], gl.float32, O_MMA)
        steps += 1
        low = m0 + PART * _HALF - window
        acc, p, top, total, square, steps = _forward_keys(
            acc, p, top, total, square, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, anchor,
            fade, at_F, from_hi, from_lo, steps, block - unmasked_from, block - 1, low, False, STAGES, X, S_MMA, O_MMA, FACTOR)  # fmt: skip
        if WINDOWED:
            acc, p, top, total, square, steps = _forward_keys(
                acc, p, top, total, square, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, anchor,
                fade, at_F, from_hi, from_lo, steps, unmasked_from - first, unmasked_from - 1, low, True, STAGES, X, S_MMA, O_MMA, FACTOR)  # fmt: skip
        mbarrier.arrive(q_empty.index(0))
        stage = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((steps - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(stage).reshape([_TILE, X]), acc, is_async=True)

        # the null key and the row statistics overlap the last product
        i_M = m0 + PART * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        inside = i_M < TQ
        at = (b * H + h) * TQ + i_M
        if FACTOR is None:
            null_ptr, v_null_ptr, beta_ptr, mag_ptr, n_eff_ptr, inverse_ptr, floor_bits = null
            null_score = gl.load(null_ptr + i_M * H + h, mask=inside, other=0.0)
            beta = gl.load(beta_ptr + h)
            floor = floor_bits.to(gl.float32, bitcast=True)
            v_null = gl.load(v_null_ptr + h * X + gl.arange(0, X, gl.SliceLayout(0, O_MMA)))
            lse = top + gl.log2(total)
            n_eff = total * total / square
            d = lse - null_score
            real = 1.0 / (1.0 + gl.exp2(-d))
            w = 1.0 / (1.0 + gl.exp2(d))
            cap = gl.exp2(2.0 * d) / floor
            bound = n_eff > cap
            n_eff = gl.where(bound, cap, n_eff)
            gl.store(lse_ptr + at, lse, mask=inside)
            gl.store(n_eff_ptr + at, gl.where(bound, -n_eff, n_eff), mask=inside)
            gl.store(mag_ptr + (b * TQ + i_M) * H + h, _tanh(beta * _log1p(n_eff * real)), mask=inside)
            real = gl.convert_layout(real / total, O_ROW)
            w = gl.convert_layout(w, O_ROW)
        else:
            gl.store(lse_ptr + at, top + gl.log2(total), mask=inside)
            share = gl.convert_layout(1.0 / total, O_ROW)

        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(v_empty.index(stage))
        if FACTOR is None:
            x = acc * real[:, None] + w[:, None] * v_null[None, :]
            length = gl.sqrt(gl.sum(x * x, 1))
            inverse = 1.0 / gl.maximum(length, _TINY)
            c = x * inverse[:, None]
        else:
            c = acc * share[:, None]
        # the last tile must have left the buffer
        tma.store_wait(0)
        _barrier()
        c_part.reshape([_HALF, X]).store(c.to(DTYPE))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(c_desc, [b, m0 + PART * _HALF, h * X], c_part)
        if FACTOR is None:
            signed = gl.convert_layout(gl.where(length < _TINY, -inverse, inverse), gl.SliceLayout(1, S_MMA))
            gl.store(inverse_ptr + at, signed, mask=inside)
    tma.store_wait(0)


@_jit
def _forward_part(
    PART: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FACTOR: gl.constexpr, rows
):
    _forward_rows(*rows, H, STAGES, WINDOWED, FACTOR, PART)


@_jit
def _forward_roles(
    q_desc, k_desc, v_desc, c_desc, lse_ptr, null, fade, TQ, tiles, BH, window,
    H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """Run one warp that loads and two warpgroups of 64 rows each, over this program's tiles.

    Allocates shared memory and barriers, then splits the program's warps. Polar attention without a FACTOR, forgetting
    attention with one.

    Args:
        q_desc: Descriptor of queries [B, T, H X], in blocks of 64.
        k_desc: Descriptor of keys [B, T, J X], in blocks of 128.
        v_desc: Descriptor of values [B, T, J X], in blocks of 128.
        c_desc: Descriptor of the output [B, T, H X], in blocks of 64, written.
        lse_ptr: float32 [B, H, T], written.
        null: Pointers of polar attention, from null to inverse, and the floor's bits; () for forgetting attention.
        fade: (buffer, high part of F, low part of F, descriptor of decays) of forgetting attention; () for polar.
        TQ: Queries.
        tiles: Tiles of all programs.
        BH: B H.
        window: Attention window in keys; read only when WINDOWED.
        H: constexpr, query heads.
        G: constexpr, query heads per KV head.
        STAGES: constexpr, blocks of keys in flight.
        WINDOWED: constexpr bool, True with a window.
        FACTOR: constexpr, factor of q·k of forgetting attention; None for polar.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, _HALF, X], q_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, [2, 1, _HALF, X], c_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, _TILE, X], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, _TILE, X], v_desc.layout)
    anchor_smem = gl.allocate_shared_memory(gl.float32, [2, _HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = _barriers(1, 2)
    k_full, k_empty = _barriers(STAGES, 2)
    v_full, v_empty = _barriers(STAGES, 2)
    fence_async_shared()
    _barrier()
    rows = (c_desc, lse_ptr, null, fade, q_smem, k_smem, v_smem, c_smem, anchor_smem,
            q_full, q_empty, k_full, k_empty, v_full, v_empty, TQ, tiles, BH, window)  # fmt: skip
    gl.warp_specialize(
        [
            (_forward_part, (0, H, STAGES, WINDOWED, FACTOR, rows)),
            (_forward_part, (1, H, STAGES, WINDOWED, FACTOR, rows)),
            (_forward_load, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                             v_full, v_empty, TQ, tiles, BH, window, fade, H, G, STAGES, WINDOWED, FACTOR is not None)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@_jit
def _forward(
    q_desc, k_desc, v_desc, c_desc, null_ptr, v_null_ptr, beta_ptr, mag_ptr, lse_ptr, n_eff_ptr, inverse_ptr,
    TQ, tiles, BH, window, floor_bits, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Store polar attention's outputs for this program's share of the tiles.

    Grid: (min(tiles, multiprocessors),), persistent programs over tiles of 128 queries of one head. Descriptors: q and
    c [B, T, H X] in blocks of 64, k and v [B, T, J X] in blocks of 128; q is scaled to units of log 2. null_ptr [T, H],
    v_null_ptr [H, X] and beta_ptr [H] are float32. Written, float32: mag_ptr [B, T, H], lse_ptr, n_eff_ptr and
    inverse_ptr [B, H, T]. floor_bits: bits of the float32 floor. BH: B H.

    TQ: tokens. tiles: tiles of all programs. window: attention window in keys, read only when WINDOWED. Constexprs: H
    query heads, G query heads per KV head, STAGES blocks in flight.
    """
    null = (null_ptr, v_null_ptr, beta_ptr, mag_ptr, n_eff_ptr, inverse_ptr, floor_bits)
    _forward_roles(
        q_desc, k_desc, v_desc, c_desc, lse_ptr, null, (), TQ, tiles, BH, window, H, G, STAGES, WINDOWED, None)  # fmt: skip
