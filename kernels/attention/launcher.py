"""Set-up that the attention kernels in Triton share: tile sizes, tensor descriptors, launches, sums of rows.

B batch, T length, H query heads, J KV heads, X head size, R rows of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 64
"""Rows of a tile of `row_products`, 32 KiB of two bf16 tensors with heads of 128."""


@triton.jit
def _row_products(a_ptr, b_ptr, out_ptr, T, rows, H: tl.constexpr, X: tl.constexpr, BR: tl.constexpr):
    # rows as they lie in memory, so that a tile is one piece of it
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < rows
    offsets = row.to(tl.int64)[:, None] * X + tl.arange(0, X)[None, :]
    a = tl.load(a_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
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


# --- launches -----------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Rows and keys of a tile of one kernel, its warps and its stages."""

    rows: int
    keys: int
    warps: int
    stages: int


SMALL_TILES = Tiles(32, 32, 4, 1)
"""Of float32 and of large heads."""


def needs_small_tiles(d: int, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or d > 128


def constants(q: Tensor, k: Tensor, window: int | None, factor: float) -> dict[str, Any]:
    """Return what every kernel of an attention is compiled for, in a new dictionary that may be added to."""
    return {
        "H": q.shape[2], "G": q.shape[2] // k.shape[2], "X": q.shape[3], "WINDOWED": window is not None,
        "PRECISION": precision(q.dtype), "FACTOR": factor,
    }  # fmt: skip


def forward(
    kernel: Any, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, extra: tuple[Tensor, ...], sizes: tuple[int, ...],
    constexprs: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [B, T, H, X] in q's type, lse [B, H, T] float32) of a kernel that takes q, k, v, o, `extra`, lse and `sizes`."""
    b, t, h, d = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(b, h, t, device=q.device, dtype=torch.float32)
    bm, bn, warps, stages = tiles
    kernel[(triton.cdiv(t, bm), b * h)](
        head_blocks(q, bm, d), head_blocks(k, bn, d), head_blocks(v, bn, d), head_blocks(o, bm, d), *extra, lse, *sizes,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip
    return o, lse


def queries_backward(
    kernel: Any, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, g: Tensor, dq: Tensor, other_args: tuple[Any, ...],
    constexprs: dict[str, Any],
) -> None:  # fmt: skip
    """Fill dq by a kernel that takes q, k, v, g, dq and `other_args`, a program per tile of queries."""
    b, t, h, d = q.shape
    bm, bn, warps, stages = tiles
    kernel[(triton.cdiv(t, bm), b * h)](
        head_blocks(q, bm, d), head_blocks(k, bn, d), head_blocks(v, bn, d), head_blocks(g, bm, d), head_blocks(dq, bm, d), *other_args,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip


def keys_backward(
    kernel: Any, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, g: Tensor, dk: Tensor, dv: Tensor, other_args: tuple[Any, ...],
    constexprs: dict[str, Any], programs: int | None = None,
) -> None:  # fmt: skip
    """Fill dk and dv by a kernel that takes q, k, v, g, dk, dv and `other_args`, a program per tile of keys, or so many."""
    (b, t, heads, d), (bm, bn, warps, stages) = k.shape, tiles
    kernel[(programs or triton.cdiv(t, bn), b * heads)](
        head_blocks(q, bm, d), head_blocks(k, bn, d), head_blocks(v, bn, d), head_blocks(g, bm, d), head_blocks(dk, bn, d), head_blocks(dv, bn, d), *other_args,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip


def head_blocks(x: Tensor, rows: int, d: int) -> TensorDescriptor:
    """[B, T, H, X] as [B, T, H * X], read and written in blocks of `rows` positions of one head."""
    return TensorDescriptor.from_tensor(x.view(*x.shape[:2], -1), [1, rows, d])


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
