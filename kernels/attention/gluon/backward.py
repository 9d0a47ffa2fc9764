"""Backward kernels of polar attention in Gluon for Hopper, one for queries and one for keys."""

from __future__ import annotations

from .shared import (
    _HALF,
    _HIDDEN,
    _LN2,
    _TILE,
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# --- backward, queries ----------------------------------------------------------------------------------------------


@_jit
def _dq_tile(t, TQ, window, H: gl.constexpr, BH, WINDOWED: gl.constexpr):
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
def _dq_load(
    q_desc, k_desc, v_desc, g_desc, q_smem, g_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
    TQ, tiles, BH, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load queries, gradients, keys and values of this program's tiles into shared memory by TMA.

    Runs in one warp. Key blocks of 64 go from the diagonal down, STAGES in flight: the loader waits for a stage's
    `empty` barrier and its copies signal the `full` one. Descriptors: q and g [B, T, H X], k and v [B, T, J X], in
    blocks of 64. TQ: tokens; tiles: tiles of all programs; BH: B H; G: query heads per KV head.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, h, m0, first = _dq_tile(_tile_of_round(r), TQ, window, H, BH, WINDOWED)
        at = h // G * X
        mbarrier.wait(q_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(q_full.index(0), 4 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            corner = [b, m0 + half * _HALF, h * X]
            tma.async_copy_global_to_shared(q_desc, corner, q_full.index(0), q_smem.index(half))
            tma.async_copy_global_to_shared(g_desc, corner, q_full.index(0), g_smem.index(half))
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
    DIAGONAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, X: gl.constexpr,
    S_MMA: gl.constexpr, O_MMA: gl.constexpr,
):  # fmt: skip
    """Add `count` blocks of 64 keys, from `block` down, to dq of a warpgroup's 64 queries.

    The product into dq stays in flight between steps, so a stage is released one step late. minus_lse, add and twice
    are the rows' statistics [64], the first with its sign changed. DIAGONAL masks keys after the query, MASKED those
    that the window hides, up to position `low` for the first query. `steps` counts the stages consumed so far.

    Returns:
        (dq, steps); dq lacks the factor ln 2.
    """
    blank = gl.zeros([_HALF, _HALF], gl.float32, S_MMA)
    for i in range(count):
        stage = steps % STAGES
        mbarrier.wait(full.index(stage), (steps // STAGES) & 1)
        k = k_smem.index(stage).reshape([_HALF, X])
        v = v_smem.index(stage).reshape([_HALF, X])
        # the accumulators start at -lse and at `add`, which saves two additions
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
        # waiting for p here lets more of the exponentials overlap the second product
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
    """Compute and store dq of rows 64 PART to 64 PART + 63 of every tile of this program.

    Runs in one warpgroup, on the blocks that `_dq_load` copies into shared memory. dq_desc describes dq [B, T, H X];
    lse, add and twice are float32 [B, H, T], with da = P (g.v + add + twice P). `full` and `empty` are the barriers of
    the stages. TQ: tokens; tiles: tiles of all programs; BH: B H; window: attention window in keys; PART: constexpr, 0
    or 1.
    """
    X: gl.constexpr = dq_desc.block_type.shape[2]
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 16])
    q = q_smem.index(PART).reshape([_HALF, X])
    g = g_smem.index(PART).reshape([_HALF, X])
    dq_part = dq_smem.index(PART)
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, h, m0, tile_first = _dq_tile(_tile_of_round(r), TQ, window, H, BH, WINDOWED)
        m = m0 + PART * _HALF
        block = m // _HALF
        first = 0
        unmasked_from = 0
        if WINDOWED:
            first = gl.maximum(m - window + 1, 0) // _HALF
            unmasked_from = gl.cdiv(gl.maximum(m + _HALF - window, 0), _HALF)
        i_M = m + gl.arange(0, _HALF, gl.SliceLayout(1, S_MMA))
        at = (b * H + h) * TQ + i_M
        # rows beyond the end have P = 0
        minus_lse = -gl.load(lse_ptr + at, mask=i_M < TQ, other=-_HIDDEN)
        add = gl.load(add_ptr + at, mask=i_M < TQ, other=0.0)
        twice = gl.load(twice_ptr + at, mask=i_M < TQ, other=0.0)
        mbarrier.wait(q_full.index(0), r & 1)
        steps = _release_stages(k_full, k_empty, steps, 1 - PART, STAGES)
        dq = warpgroup_mma_init(gl.zeros([_HALF, X], gl.float32, O_MMA))
        dq, steps = _dq_keys(dq, q, g, minus_lse, add, twice, k_smem, v_smem, k_full, k_empty, steps, 1, block, 0,
                             True, False, STAGES, X, S_MMA, O_MMA)  # fmt: skip
        dq, steps = _dq_keys(dq, q, g, minus_lse, add, twice, k_smem, v_smem, k_full, k_empty, steps,
                             block - unmasked_from, block - 1, 0, False, False, STAGES, X, S_MMA, O_MMA)  # fmt: skip
        if WINDOWED:
            dq, steps = _dq_keys(dq, q, g, minus_lse, add, twice, k_smem, v_smem, k_full, k_empty, steps,
                                 unmasked_from - first, unmasked_from - 1, m - window,
                                 False, True, STAGES, X, S_MMA, O_MMA)  # fmt: skip
        mbarrier.arrive(q_empty.index(0))
        # the last tile must have left the buffer
        tma.store_wait(0)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _barrier()
        mbarrier.arrive(k_empty.index((steps - 1) % STAGES))
        dq_part.reshape([_HALF, X]).store((dq * _LN2).to(dq_desc.dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(dq_desc, [b, m, h * X], dq_part)
        steps = _release_stages(k_full, k_empty, steps, first - tile_first, STAGES)
    tma.store_wait(0)


@_jit
def _dq_part(PART: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, rows):
    _dq_rows(*rows, H, STAGES, WINDOWED, PART)


@_jit
def _dq(
    q_desc, k_desc, v_desc, g_desc, dq_desc, lse_ptr, add_ptr, twice_ptr,
    TQ, tiles, BH, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Store dq of the scaled queries for this program's share of the tiles.

    Grid: (min(tiles, multiprocessors),), persistent programs over tiles of 128 queries of one head: one warp loads, two
    warpgroups of 64 rows compute. Descriptors: q, g and dq [B, T, H X], k and v [B, T, J X], all in blocks of 64.
    lse_ptr (units of log 2), add_ptr and twice_ptr: float32 [B, H, T]. BH: B H.

    TQ: tokens. tiles: tiles of all programs. window: attention window in keys, read only when WINDOWED. Constexprs: H
    query heads, G query heads per KV head, STAGES blocks in flight.

    With P = 2^(score - lse), da = P (g.v + add + twice P) is the gradient of the scores, and dq = ln 2 sum da k.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, _HALF, X], q_desc.layout)
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [2, 1, _HALF, X], g_desc.layout)
    dq_smem = gl.allocate_shared_memory(dq_desc.dtype, [2, 1, _HALF, X], dq_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, _HALF, X], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, _HALF, X], v_desc.layout)
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
    """Return (b, j, first key, end) of tile t of 128 keys of one KV head.

    The tile needs the queries from its first key on; `end` is the end of their blocks of 64. The tiles with most
    queries come first. TQ: tokens. window: attention window in keys, read only when WINDOWED. J: KV heads, BJ: B J.
    """
    n0 = t // BJ * _TILE
    end = gl.cdiv(TQ, _HALF)
    if WINDOWED:
        end = gl.minimum(end, (n0 + _TILE - 2 + window) // _HALF + 1)
    # includes the diagonal of the tile's later half, even beyond the last query
    return t % BJ // J, t % BJ % J, n0, gl.maximum(end, n0 // _HALF + 2)


@_jit
def _dkv_load(
    q_desc, k_desc, v_desc, g_desc, lse_desc, add_desc, twice_desc, q_smem, g_smem, stats_smem, k_smem, v_smem,
    k_full, k_empty, q_full, q_empty,
    TQ, tiles, BJ, window, H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load keys, values, queries, gradients and row statistics of this program's tiles into shared memory by TMA.

    Runs in one warp. Blocks of 64 queries of all G heads follow each other, STAGES in flight: the loader waits for a
    stage's `empty` barrier and its copies signal the `full` one. Descriptors: q and g [B, T, H X], k and v [B, T, J X],
    in blocks of 64; lse, add and twice float32 [B H, T]. TQ: tokens; tiles: tiles of all programs; BJ: B J.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    J: gl.constexpr = H // G
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, j, n0, end = _dkv_tile(_tile_of_round(r), TQ, window, J, BJ, WINDOWED)
        mbarrier.wait(k_empty.index(0), (r & 1) ^ 1)
        mbarrier.expect(k_full.index(0), 4 * k_desc.block_type.nbytes)
        for half in gl.static_range(2):
            corner = [b, n0 + half * _HALF, j * X]
            tma.async_copy_global_to_shared(k_desc, corner, k_full.index(0), k_smem.index(half))
            tma.async_copy_global_to_shared(v_desc, corner, k_full.index(0), v_smem.index(half))
        for h in range(j * G, j * G + G):
            for block in range(n0 // _HALF, end):
                stage = steps % STAGES
                full = q_full.index(stage)
                mbarrier.wait(q_empty.index(stage), ((steps // STAGES) & 1) ^ 1)
                mbarrier.expect(full, 2 * q_desc.block_type.nbytes + 3 * lse_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [b, block * _HALF, h * X], full, q_smem.index(stage))
                at = [b * H + h, block * _HALF]
                tma.async_copy_global_to_shared(lse_desc, at, full, stats_smem.index(3 * stage))
                tma.async_copy_global_to_shared(add_desc, at, full, stats_smem.index(3 * stage + 1))
                tma.async_copy_global_to_shared(twice_desc, at, full, stats_smem.index(3 * stage + 2))
                tma.async_copy_global_to_shared(g_desc, [b, block * _HALF, h * X], full, g_smem.index(stage))
                steps += 1


@_jit
def _dkv_queries(
    dk, dv, k, v, q_smem, g_smem, stats_smem, full, empty, steps, start, stop, high,
    DIAGONAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, X: gl.constexpr,
    S_MMA: gl.constexpr, O_MMA: gl.constexpr,
):  # fmt: skip
    """Add the blocks of 64 queries start <= block < stop to dk and dv of a warpgroup's 64 keys.

    Keys are rows and queries are columns of the scores. stats_smem holds lse, add and twice of each stage. DIAGONAL
    masks queries before the key, MASKED those from position `high` on for the first key. `steps` counts the stages
    consumed so far.

    Returns:
        (dk, dv, steps); dk lacks the factor ln 2.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_MMA)
    P_DOT: gl.constexpr = gl.DotOperandLayout(0, O_MMA, 2)
    blank = gl.zeros([_HALF, _HALF], gl.float32, S_MMA)
    for block in range(start, stop):
        stage = steps % STAGES
        mbarrier.wait(full.index(stage), (steps // STAGES) & 1)
        q = q_smem.index(stage).reshape([_HALF, X])
        g = g_smem.index(stage).reshape([_HALF, X])
        # the accumulators start at -lse and at `add`, which saves two additions
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
    """Compute and store dk and dv of keys 64 PART to 64 PART + 63 of every tile of this program.

    Runs in one warpgroup, on the blocks that `_dkv_load` copies into shared memory; results leave through the buffers
    of k and v. stats_smem holds lse, add and twice of each stage. dk_desc and dv_desc describe dk and dv [B, T, J X].
    TQ: tokens; tiles: tiles of all programs; BJ: B J; window: attention window in keys; PART: constexpr, 0 or 1.
    """
    X: gl.constexpr = dk_desc.block_type.shape[2]
    J: gl.constexpr = H // G
    S_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    O_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 16])
    k_part = k_smem.index(PART)
    v_part = v_smem.index(PART)
    k = k_part.reshape([_HALF, X])
    v = v_part.reshape([_HALF, X])
    steps = 0
    for r in range(_num_program_tiles(tiles)):
        b, j, n0, tile_end = _dkv_tile(_tile_of_round(r), TQ, window, J, BJ, WINDOWED)
        n = n0 + PART * _HALF
        first = n // _HALF
        end = tile_end
        unmasked_to = tile_end
        if WINDOWED:
            end = gl.minimum(tile_end, (n + _HALF - 2 + window) // _HALF + 1)
            unmasked_to = gl.minimum(end, (n + window) // _HALF)
        mbarrier.wait(k_full.index(0), r & 1)
        dk = gl.zeros([_HALF, X], gl.float32, O_MMA)
        dv = gl.zeros([_HALF, X], gl.float32, O_MMA)
        for _ in range(G):
            steps = _release_stages(q_full, q_empty, steps, PART, STAGES)
            dk, dv, steps = _dkv_queries(dk, dv, k, v, q_smem, g_smem, stats_smem, q_full, q_empty, steps,
                                         first, first + 1, 0, True, False, STAGES, X, S_MMA, O_MMA)  # fmt: skip
            dk, dv, steps = _dkv_queries(dk, dv, k, v, q_smem, g_smem, stats_smem, q_full, q_empty, steps,
                                         first + 1, unmasked_to, 0, False, False, STAGES, X, S_MMA, O_MMA)  # fmt: skip
            if WINDOWED:
                dk, dv, steps = _dkv_queries(dk, dv, k, v, q_smem, g_smem, stats_smem, q_full, q_empty, steps,
                                             unmasked_to, end, n + window, False, True, STAGES, X, S_MMA, O_MMA)  # fmt: skip
            steps = _release_stages(q_full, q_empty, steps, tile_end - end, STAGES)
        # no product reads this half of k and v any more, so the results are stored through its buffer
        k.store((dk * _LN2).to(dk_desc.dtype))
        v.store(dv.to(dv_desc.dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(dk_desc, [b, n, j * X], k_part)
        tma.async_copy_shared_to_global(dv_desc, [b, n, j * X], v_part)
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
    """Store dk and dv for this program's share of the tiles, summed over the G query heads of a KV head.

    Grid: (min(tiles, multiprocessors),), persistent programs over tiles of 128 keys of one KV head: one warp loads, two
    warpgroups of 64 keys compute. Descriptors: q and g [B, T, H X], k, v, dk and dv [B, T, J X], in blocks of 64; lse,
    add and twice float32 [B H, T]. BJ: B J.

    TQ: tokens. tiles: tiles of all programs. window: attention window in keys, read only when WINDOWED. Constexprs: H
    query heads, G query heads per KV head, STAGES blocks in flight.

    With P = 2^(score - lse), da = P (g.v + add + twice P) is the gradient of the scores, dk = ln 2 sum da q and dv =
    sum P g.
    """
    X: gl.constexpr = q_desc.block_type.shape[2]
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, _HALF, X], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, _HALF, X], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, _HALF, X], q_desc.layout)
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [STAGES, 1, _HALF, X], g_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [3 * STAGES, 1, _HALF], lse_desc.layout)
    k_full, k_empty = _barriers(1, 2)
    q_full, q_empty = _barriers(STAGES, 2)
    fence_async_shared()
    _barrier()
    keys = (dk_desc, dv_desc, q_smem, g_smem, stats_smem, k_smem, v_smem, k_full, k_empty, q_full, q_empty,
            TQ, tiles, BJ, window)  # fmt: skip
    # an assigned tuple turns constants into tensors, so constants are passed separately
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
