"""What the backward of an attention needs of each of its rows alone.

B batch, T length, H query heads, X head size, R rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Rows of a tile, 32 KiB of two bf16 tensors with heads of 128."""


@triton.jit
def _row_products(a_ptr, b_ptr, out_ptr, T, rows, H: tl.constexpr, X: tl.constexpr, BR: tl.constexpr):
    # rows as they lie in memory, so that a tile is one piece of it
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < rows
    place = row.to(tl.int64)[:, None] * X + tl.arange(0, X)[None, :]
    a = tl.load(a_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + place, mask=inside[:, None], other=0.0).to(tl.float32)
    h = row % H
    t = row // H % T
    batch = row // H // T
    tl.store(out_ptr + (batch * H + h) * T + t, tl.sum(a * b, 1), mask=inside)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Scalar products of the rows of a and b, both [B, T, H, X] and contiguous: float32 [B, H, T].

    One pass without float32 copies. The order of a sum is fixed, so numbers repeat to the bit. X is a power of two.
    """
    n, t, h, x = a.shape
    out = torch.empty(n, h, t, device=a.device, dtype=torch.float32)
    rows = n * t * h
    _row_products[(triton.cdiv(rows, ROWS),)](a, b, out, t, rows, H=h, X=x, BR=ROWS, num_warps=4)
    return out
