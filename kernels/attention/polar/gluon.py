"""Polar attention's three heavy kernels for Hopper (compute capability 9.0), in Triton's Gluon.

See docs/reference/mechanisms.md, "Polar attention". B batch, T length, H query heads, J KV heads, G = H / J, X head size, M rows
of queries. Formulas, units and signs are those of the plain Triton kernels: queries carry temp log2(e) / sqrt(X), null
scores temp log2(e), P = 2^(q'k - lse). Negative n_eff marks a row bound by the floor, negative inverse a row whose |s|
is below TINY.
    s = r O + w_null v_null,  c = s / |s|
    da = P (g.v + add + twice P),  dq' = ln2 sum da k,  dk = ln2 sum da q',  dv = sum P g

Each kernel runs one program per multiprocessor, over tiles of 128 positions, the longest first, forth and back. One
warp requests blocks from the copy engine, two warpgroups of 64 positions each multiply; mbarriers tell which stage is
full and which is empty. Queries take their keys from the diagonal down, so that a row's maximum is real from its first
block on, and only the diagonal and a window's lower edge are masked. Zeros follow the end of a sequence and add
nothing. No atomics, and no sum whose order depends on timing: every number repeats bit for bit.

Matrix products of n visible scores, 2 n X each: forward 2, dq 3, dkv 4. Shared memory at X = 128: 198, 230 and 167 KB.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..gluon.backward import _dkv, _dq
from ..gluon.forward import _forward
from ..gluon.host import check_tile_window, float_bits, head_blocks, processors, row_blocks
from ..gluon.shared import DKV_STAGES, DQ_STAGES, FORWARD_STAGES, HALF, TILE
from .triton import polar_rows


def polar_forward(
    q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor, *,
    window: int | None, floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (c [B, T, H, X], mag [B, T, H], lse, n_eff, inverse [B, H, T]) by the Gluon kernel.

    s is the softmax-weighted sum of the values, the null key's included, and r the weight of all real keys together. c
    is s / max(|s|, 1e-6) in q's dtype, mag = tanh(beta ln(1 + n_eff r)), lse that of the real keys in units of log 2,
    inverse 1 / |s|. Two signs are flags: negative n_eff marks a row that the floor binds, negative inverse a row with
    |s| below 1e-6.

    Args:
        q: Contiguous queries [B, T, H, X] in 16 bits, scaled to units of log 2; X is 64 or 128.
        k: Contiguous keys [B, T, J, X].
        v: Contiguous values [B, T, J, X].
        null_TH: Null scores, float32 in units of log 2.
        beta_H: float32, after softplus.
        v_null_HX: Value of the null key, float32.
        window: Attention window in keys, or None.
        floor: Lower bound of the sum of squared weights, where the largest weight, null included, counts as 1.

    Raises:
        ValueError: The window is below 128 and cuts inside the diagonal's tile.
    """
    check_tile_window(window)
    bsz, t, h, _ = q.shape
    tiles = bsz * h * triton.cdiv(t, TILE)
    c = torch.empty_like(q)
    mag = torch.empty(bsz, t, h, device=q.device, dtype=torch.float32)
    lse, n_eff, inverse = (torch.empty(bsz, h, t, device=q.device, dtype=torch.float32) for _ in range(3))
    _forward[(min(tiles, processors(q.device)),)](
        head_blocks(q, HALF), head_blocks(k, TILE), head_blocks(v, TILE), head_blocks(c, HALF),
        null_TH, v_null_HX, beta_H, mag, lse, n_eff, inverse, t, tiles, bsz * h, window or 0, float_bits(floor),
        H=h, G=h // k.shape[2], STAGES=FORWARD_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return c, mag, lse, n_eff, inverse


def polar_backward(
    gc: Tensor, g_mag: Tensor, q: Tensor, k: Tensor, v: Tensor, null_TH: Tensor, beta_H: Tensor, v_null_HX: Tensor,
    c: Tensor, lse: Tensor, n_eff: Tensor, inverse: Tensor, *, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of (q', k, v, null_TH, beta_H, v_null_HX) from those of c and mag.

    The pass over rows is that of `.triton`; dq, dk and dv come from the Gluon kernels. Those of q', k and v are in
    their dtypes, the others float32. Arguments are contiguous; from q to v_null_HX the inputs of `polar_forward`, from
    c to inverse its results without mag.
    """
    g, add, twice, d_null, d_beta, d_v_null = polar_rows(gc, g_mag, null_TH, beta_H, v_null_HX, c, lse, n_eff, inverse)
    dq, dk, dv = _gradients(q, k, v, g, lse, add, twice, window=window)
    return dq, dk, dv, d_null, d_beta, d_v_null


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, add: Tensor, twice: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq [B, T, H, X] of the scaled queries, dk, dv [B, T, J, X]).

    Args:
        q: Scaled queries [B, T, H, X].
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        g: Gradient of the weighted sum, like q.
        lse: float32 [B, H, T] in units of log 2.
        add: float32 [B, H, T], added to g.v.
        twice: float32 [B, H, T], factor of the weights in da.
        window: Attention window in keys, or None.
    """
    (bsz, t, h, _), heads_kv, blocks = q.shape, k.shape[2], [head_blocks(x, HALF) for x in (q, k, v, g)]
    rows = bsz * heads_kv
    tiles = rows * triton.cdiv(t, TILE)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    _dkv[(min(tiles, processors(q.device)),)](
        *blocks, row_blocks(lse), row_blocks(add), row_blocks(twice), head_blocks(dk, HALF), head_blocks(dv, HALF), t, tiles, rows, window or 0,
        H=h, G=h // heads_kv, STAGES=DKV_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    tiles = bsz * h * triton.cdiv(t, TILE)
    _dq[(min(tiles, processors(q.device)),)](
        *blocks, head_blocks(dq, HALF), lse, add, twice, t, tiles, bsz * h, window or 0,
        H=h, G=h // heads_kv, STAGES=DQ_STAGES, WINDOWED=window is not None, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv
