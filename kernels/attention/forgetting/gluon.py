"""Forgetting attention's forward in Gluon: polar's without a null, its scores faded (docs/kernels.md, "Forgetting attention").

With every block of keys the copy engine brings what each of them lies behind the block's first, F_first - F_j; what the block lies
behind the tile of queries is one number, and shifts the block's largest score instead of every score. The backward is plain Triton's.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..gluon.forward import _forward_roles
from ..gluon.host import head_blocks, num_multiprocessors, row_blocks
from ..gluon.shared import _TILE, FORWARD_STAGES, HALF, TILE, _jit, gl
from .triton import sums_in_tiles


@_jit
def _forgetting_forward(
    q_desc, k_desc, v_desc, o_desc, fade_desc, hi_ptr, lo_ptr, lse_ptr, TQ, tiles, BH, window,
    H: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    fade_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, _TILE], fade_desc.layout)
    fade = (fade_smem, hi_ptr, lo_ptr, fade_desc)
    _forward_roles(
        q_desc, k_desc, v_desc, o_desc, lse_ptr, (), fade, TQ, tiles, BH, window, H, G, STAGES, WINDOWED, FACTOR)  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_gate_BTH: Tensor, *, factor: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in `.triton`. Raises ValueError for a window that cuts inside the diagonal's tile."""
    if window is not None and window < TILE:
        raise ValueError(f"window {window} is below {TILE}; these kernels mask the diagonal's tile by order alone")
    b, t, h, _ = q.shape
    hi, lo, fade = sums_in_tiles(log_gate_BTH, TILE)
    o, lse = torch.empty_like(q), torch.empty_like(hi)
    tiles = b * h * triton.cdiv(t, TILE)
    _forgetting_forward[(min(tiles, num_multiprocessors(q.device)),)](
        head_blocks(q, HALF), head_blocks(k, TILE), head_blocks(v, TILE), head_blocks(o, HALF), row_blocks(fade, TILE),
        hi, lo, lse, t, tiles, b * h, window or 0,
        H=h, G=h // k.shape[2], STAGES=FORWARD_STAGES, WINDOWED=window is not None, FACTOR=factor, num_warps=4,
    )  # fmt: skip
    return o, lse, hi, lo
