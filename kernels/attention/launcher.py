"""Launches that the Triton attention kernels share: tile sizes, tensor descriptors, grids, row products.

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
    """Store the scalar products of BR rows of a and b.

    Grid: (cdiv(rows, BR),). A row is one head of one token in memory order, [B, T, H, X] flattened.

    Args:
        a_ptr: Contiguous [B, T, H, X] of any float dtype.
        b_ptr: Contiguous [B, T, H, X] of any float dtype.
        out_ptr: float32 [B, H, T], written.
        T: Tokens of a row of the batch.
        rows: Number of rows, B T H.
        H: constexpr, heads.
        X: constexpr, head size, a power of two.
        BR: constexpr, rows of a program.
    """
    # rows in memory order, so that a tile is contiguous
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
    """Return the scalar products of the rows of a and b over X, float32 [B, H, T].

    The heads come before the tokens, unlike in a and b. One pass without float32 copies. The order of each sum is
    fixed, so results repeat bit for bit.

    Args:
        a: Contiguous [B, T, H, X] on a GPU, of any float dtype; X is a power of two.
        b: Contiguous, of a's shape.
    """
    n, t, h, x = a.shape
    out = torch.empty(n, h, t, device=a.device, dtype=torch.float32)
    rows = n * t * h
    _row_products[(triton.cdiv(rows, ROWS),)](a, b, out, t, rows, H=h, X=x, BR=ROWS, num_warps=4)
    return out


# --- launches -----------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Launch configuration of one attention kernel: queries and keys of a tile, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


SMALL_TILES = Tiles(32, 32, 4, 1)
"""Tiles of float32 inputs and of heads above 128."""


def needs_small_tiles(d: int, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or d > 128


def constants(q: Tensor, k: Tensor, window: int | None, factor: float) -> dict[str, Any]:
    """Return a new dictionary of the constexprs that every attention kernel takes; callers may add to it.

    Keys: H query heads, G query heads per KV head, X head size, WINDOWED (True unless `window` is None), PRECISION of
    float32 products ("ieee" for float32 tensors, else "tf32"), FACTOR of q·k.

    Args:
        q: [B, T, H, X].
        k: [B, T, J, X].
        window: Attention window in keys, or None.
        factor: Factor of q·k that gives logits in units of log 2.
    """
    return {
        "H": q.shape[2], "G": q.shape[2] // k.shape[2], "X": q.shape[3], "WINDOWED": window is not None,
        "PRECISION": precision(q.dtype), "FACTOR": factor,
    }  # fmt: skip


def forward(
    kernel: Any, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, extra: tuple[Tensor, ...], sizes: tuple[int, ...],
    constexprs: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch a forward kernel, one program per tile of queries and head, and return its outputs.

    Grid: (cdiv(T, tiles.rows), B H). Descriptors are in blocks of one head: tiles.rows positions of q and o, tiles.keys
    of k and v.

    Args:
        kernel: Triton kernel of descriptors of q, k, v, o, then `extra`, lse and `sizes`.
        tiles: Launch configuration.
        q: Contiguous [B, T, H, X].
        k: Contiguous [B, T, J, X].
        v: Contiguous, like k; it may have fewer heads.
        extra: Further tensors that the kernel reads.
        sizes: Further integers that the kernel takes, such as T and the window.
        constexprs: Constexprs of the kernel, without the tile's BM and BN.

    Returns:
        (o [B, T, H, X] in q's dtype, lse [B, H, T] float32 in units of log 2), new tensors that the kernel writes.
    """
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
    kernel: Any, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, g: Tensor, dq: Tensor, kernel_args: tuple[Any, ...],
    constexprs: dict[str, Any],
) -> None:  # fmt: skip
    """Launch the kernel that writes dq, one program per tile of queries and head.

    Grid: (cdiv(T, tiles.rows), B H). Descriptors are in blocks of one head: tiles.rows positions of q, g and dq,
    tiles.keys of k and v.

    Args:
        kernel: Triton kernel of descriptors of q, k, v, g, dq, then `kernel_args`.
        tiles: Launch configuration.
        q: Contiguous [B, T, H, X].
        k: Contiguous [B, T, J, X].
        v: Contiguous, like k; it may have fewer heads.
        g: Gradient of the output, contiguous [B, T, H, X].
        dq: Contiguous output of q's shape, overwritten.
        kernel_args: Further arguments of the kernel, in order.
        constexprs: Constexprs of the kernel, without the tile's BM and BN.
    """
    b, t, h, d = q.shape
    bm, bn, warps, stages = tiles
    kernel[(triton.cdiv(t, bm), b * h)](
        head_blocks(q, bm, d), head_blocks(k, bn, d), head_blocks(v, bn, d), head_blocks(g, bm, d), head_blocks(dq, bm, d), *kernel_args,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip


def keys_backward(
    kernel: Any, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, g: Tensor, dk: Tensor, dv: Tensor, kernel_args: tuple[Any, ...],
    constexprs: dict[str, Any], programs: int | None = None,
) -> None:  # fmt: skip
    """Launch the kernel that writes dk and dv, one program per tile of keys and head of k.

    Grid: (programs, B J), with J the heads of k. Descriptors are in blocks of one head: tiles.rows positions of q and
    g, tiles.keys of k, v, dk and dv.

    Args:
        kernel: Triton kernel of descriptors of q, k, v, g, dk, dv, then `kernel_args`.
        tiles: Launch configuration.
        q: Contiguous [B, T, H, X].
        k: Contiguous [B, T, J, X].
        v: Contiguous; it may have fewer heads than k.
        g: Gradient of the output, contiguous [B, T, H, X].
        dk: Contiguous output of k's shape, overwritten.
        dv: Contiguous output of k's shape, overwritten.
        kernel_args: Further arguments of the kernel, in order.
        constexprs: Constexprs of the kernel, without the tile's BM and BN.
        programs: Size of the grid's first axis; None: the number of key tiles.
    """
    (b, t, heads, d), (bm, bn, warps, stages) = k.shape, tiles
    kernel[(programs or triton.cdiv(t, bn), b * heads)](
        head_blocks(q, bm, d), head_blocks(k, bn, d), head_blocks(v, bn, d), head_blocks(g, bm, d), head_blocks(dk, bn, d), head_blocks(dv, bn, d), *kernel_args,
        BM=bm, BN=bn, num_warps=warps, num_stages=stages, **constexprs,
    )  # fmt: skip


def head_blocks(x: Tensor, rows: int, d: int) -> TensorDescriptor:
    """Return a descriptor of contiguous x [B, T, H, X] as [B, T, H X], in blocks of `rows` positions of one head."""
    return TensorDescriptor.from_tensor(x.view(*x.shape[:2], -1), [1, rows, d])


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
