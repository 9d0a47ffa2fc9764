"""Forward of forgetting attention in Gluon for Hopper: polar attention's without a null key, with decayed scores.

See docs/explanation/kernels.md, "Forgetting attention". With every block of keys the copy engine loads F_first - F_j, each key's
decay relative to the block's first. The decay between the block and the tile of queries is one number, and shifts the
block's largest score instead of every score. The backward is plain Triton's.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..gluon.forward import _forward_roles
from ..gluon.host import check_tile_window, head_blocks, processors, row_blocks
from ..gluon.shared import _TILE, FORWARD_STAGES, HALF, TILE, _jit, gl
from .triton import sums_in_tiles


@_jit
def _forgetting_forward(
    q_desc, k_desc, v_desc, o_desc, fade_desc, hi_ptr, lo_ptr, lse_ptr, TQ, tiles, BH, window,
    H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of forgetting attention for this program's share of the tiles.

    Grid: (min(tiles, multiprocessors),), persistent programs over tiles of 128 queries of one head. Descriptors: q and
    o [B, T, H X] in blocks of 64, k and v [B, T, J X] in blocks of 128, fade [B H, T] float32. hi_ptr and lo_ptr: the
    two parts of F, float32 [B, H, T] in units of log 2. lse_ptr: float32 [B, H, T], written. BH: B H. FACTOR:
    constexpr, factor of q·k in units of log 2.

    TQ: tokens. tiles: tiles of all programs. window: attention window in keys, read only when WINDOWED. Constexprs: H
    query heads, G query heads per KV head, STAGES blocks in flight.
    """
    fade_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _TILE], fade_desc.layout)
    fade = (fade_smem, hi_ptr, lo_ptr, fade_desc)
    _forward_roles(
        q_desc, k_desc, v_desc, o_desc, lse_ptr, (), fade, TQ, tiles, BH, window, H, G, STAGES, WINDOWED, FACTOR)  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate_BTH: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (o [B, T, H, X], lse [B, H, T], high and low part of F [B, H, T]) of forgetting attention.

    Scores are factor q·k + F_i - F_j, with F the running sum of the gates in units of log 2. o is in q's dtype, the
    others are float32. lse is in units of log 2, relative to F, and serves the backward alone.

    Args:
        q: Contiguous queries [B, T, H, X] in 16 bits, not scaled; X is 64 or 128.
        k: Contiguous keys [B, T, J, X].
        v: Contiguous values [B, T, J, X].
        log_gate_BTH: Contiguous natural log gates, float32 or float64.
        factor: Factor of q·k that gives units of log 2, not 0.
        window: Attention window in keys, or None.

    Raises:
        ValueError: The window is below 128 and cuts inside the diagonal's tile.
    """
    check_tile_window(window)
    b, t, h, _ = q.shape
    hi, lo, fade = sums_in_tiles(log_gate_BTH, TILE)
    o, lse = torch.empty_like(q), torch.empty_like(hi)
    tiles = b * h * triton.cdiv(t, TILE)
    _forgetting_forward[(min(tiles, processors(q.device)),)](
        head_blocks(q, HALF), head_blocks(k, TILE), head_blocks(v, TILE), head_blocks(o, HALF), row_blocks(fade, TILE),
        hi, lo, lse, t, tiles, b * h, window or 0,
        H=h, G=h // k.shape[2], STAGES=FORWARD_STAGES, WINDOWED=window is not None, FACTOR=factor, num_warps=4,
    )  # fmt: skip
    return o, lse, hi, lo
