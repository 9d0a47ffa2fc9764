"""Triton kernels of `sketch`, launched per layer.

N rows, D channels, K directions in P parts of lower precision; a program handles BN rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(
    x_ptr, s_ptr, z_ptr, N, D, PIECE, K: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Store the projections of BN rows on BK directions.

    Grid: (cdiv(N, BN), cdiv(K, BK)).

    Args:
        x_ptr: Contiguous [N, D].
        s_ptr: Contiguous directions [K, D] of this layer's first part, in x's dtype.
        z_ptr: float32 [N, K], written.
        N: Rows.
        D: Channels.
        PIECE: Elements from one part of the directions to the next.
        K: constexpr, directions.
        BN: constexpr, rows of a program.
        BC: constexpr, channels read at a time.
        BK: constexpr, directions of a program.
        PIECES: constexpr, number of parts, 1 (float32) or 2 (16 bits).
    """
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k_K = tl.program_id(1) * BK + tl.arange(0, BK)
    rows, wide = (n_N < N)[:, None], (k_K < K)[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    for c in tl.range(0, D, BC):
        c_D = c + tl.arange(0, BC)
        x = tl.load(x_ptr + n_N[:, None] * D + c_D[None, :], mask=rows & (c_D < D)[None, :], other=0.0)
        s_at = s_ptr + k_K[None, :] * D + c_D[:, None]
        inside = wide & (c_D < D)[:, None]
        if PIECES == 2:
            acc = tl.dot(x, tl.load(s_at, mask=inside, other=0.0), acc)
            acc = tl.dot(x, tl.load(s_at + PIECE, mask=inside, other=0.0), acc)
        else:
            acc = tl.dot(x, tl.load(s_at, mask=inside, other=0.0), acc, input_precision="ieee")
    tl.store(z_ptr + n_N[:, None] * K + k_K[None, :], acc, mask=rows & wide)


@triton.jit
def _squares(x_ptr, square_ptr, N, D, BN: tl.constexpr, BC: tl.constexpr):
    """Store the squared lengths of BN rows, float32.

    Grid: (cdiv(N, BN),). A kernel of its own: when `_forward` summed squares of tiles that its products also read, some
    tiles on Hopper were wrong by 1e-4.

    Args:
        x_ptr: Contiguous [N, D].
        square_ptr: float32 [N], written.
        N: Rows.
        D: Channels.
        BN: constexpr, rows of a program.
        BC: constexpr, channels read at a time.
    """
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    square_N = tl.zeros([BN], tl.float32)
    for c in tl.range(0, D, BC):
        c_D = c + tl.arange(0, BC)
        inside = (n_N < N)[:, None] & (c_D < D)[None, :]
        x = tl.load(x_ptr + n_N[:, None] * D + c_D[None, :], mask=inside, other=0.0).to(tl.float32)
        square_N += tl.sum(x * x, 1)
    tl.store(square_ptr + n_N, square_N, mask=n_N < N)


@triton.jit
def _backward(
    g_ptr, h_ptr, x_ptr, s_ptr, dx_ptr, N, D, PIECE, K: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    BK: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, SQUARES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dx = g s + 2 h x for BN rows and SPAN channels.

    Grid: (cdiv(N, BN), cdiv(D, SPAN)). A program walks through its SPAN channels, BC at a time.

    Args:
        g_ptr: Gradient of the projections, contiguous float32 [N, K].
        h_ptr: Gradient of the squared lengths, float32 [N]; read only with SQUARES.
        x_ptr: Contiguous [N, D]; read only with SQUARES.
        s_ptr: Contiguous directions [K, D] of this layer's first part.
        dx_ptr: Contiguous [N, D], written in its own dtype.
        N: Rows.
        D: Channels.
        PIECE: Elements from one part of the directions to the next.
        K: constexpr, directions.
        BN: constexpr, rows of a program.
        BC: constexpr, channels written at a time.
        BK: constexpr, directions read at a time.
        SPAN: constexpr, channels of a program.
        PIECES: constexpr, number of parts, 1 (float32) or 2 (16 bits).
        SQUARES: constexpr bool, True to add 2 h x.
        STAGES: constexpr, pipeline stages of the loop over channels.
    """
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    rows = (n_N < N)[:, None]
    kind = dx_ptr.dtype.element_ty
    first = tl.program_id(1) * SPAN
    k_K = tl.arange(0, BK)
    # the entire row of g, when it fits into one block
    g = tl.load(g_ptr + n_N[:, None] * K + k_K[None, :], mask=rows & (k_K < K)[None, :], other=0.0)
    if SQUARES:
        twice_N = 2 * tl.load(h_ptr + n_N, mask=n_N < N, other=0.0)
    for c in tl.range(first, tl.minimum(first + SPAN, D), BC, num_stages=STAGES):
        c_D = c + tl.arange(0, BC)
        wide = (c_D < D)[None, :]
        acc = tl.zeros([BN, BC], tl.float32)
        for k in tl.range(0, K, BK, num_stages=1):
            k_K = k + tl.arange(0, BK)
            if K > BK:
                g = tl.load(g_ptr + n_N[:, None] * K + k_K[None, :], mask=rows & (k_K < K)[None, :], other=0.0)
            s_at = s_ptr + k_K[:, None] * D + c_D[None, :]
            inside = wide & (k_K < K)[:, None]
            s1 = tl.load(s_at, mask=inside, other=0.0)
            if PIECES == 2:
                # without the product of the two low parts, which is below 2^-16
                g1 = g.to(kind)
                acc = tl.dot(g1, s1, acc)
                acc = tl.dot((g - g1.to(tl.float32)).to(kind), s1, acc)
                acc = tl.dot(g1, tl.load(s_at + PIECE, mask=inside, other=0.0), acc)
            else:
                acc = tl.dot(g, s1, acc, input_precision="ieee")
        if SQUARES:
            x = tl.load(x_ptr + n_N[:, None] * D + c_D[None, :], mask=rows & wide, other=0.0)
            acc += twice_N[:, None] * x.to(tl.float32)
        tl.store(dx_ptr + n_N[:, None] * D + c_D[None, :], acc.to(kind), mask=rows & wide)


FORWARD_TILE = (128, 64, 4, 3)
"""(rows of a program, channels at a time, warps, stages)."""
BACKWARD_TILE = (128, 64, 1024, 8, 3)
"""(rows of a program, channels at a time, channels of a program, warps, stages)."""


def forward(xs: list[Tensor], s_PLKD: Tensor, squares: bool) -> tuple[Tensor, Tensor]:
    """Return (x sᵀ [L, N, K], ||x||² [L, N], or [L, 0] without `squares`) in float32.

    Args:
        xs: L contiguous tensors [N, D] on a GPU.
        s_PLKD: Contiguous directions in xs' dtype, as P parts that add up: 1 for float32, 2 for 16 bits
            (`split_precision`).
        squares: True to compute the squared lengths.
    """
    parts, layers, k, c = s_PLKD.shape
    n = len(xs[0])
    z_LNK = torch.empty(layers, n, k, device=s_PLKD.device, dtype=torch.float32)
    square_LN = torch.empty(layers, n if squares else 0, device=s_PLKD.device, dtype=torch.float32)
    bk = min(64, max(16, triton.next_power_of_2(k)))
    bn, bc, warps, stages = FORWARD_TILE
    for layer, x_ND in enumerate(xs):
        _forward[(triton.cdiv(n, bn), triton.cdiv(k, bk))](
            x_ND, s_PLKD[0, layer], z_LNK[layer], n, c, s_PLKD.stride(0), K=k, BN=bn, BC=bc, BK=bk, PIECES=parts,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if squares:
            _squares[(triton.cdiv(n, 16),)](x_ND, square_LN[layer], n, c, BN=16, BC=256, num_warps=4)
    return z_LNK, square_LN


def backward(g_LNK: Tensor, h_LN: Tensor, xs: list[Tensor], s_PLKD: Tensor, squares: bool) -> list[Tensor]:
    """Return dx = g s, plus 2 h x with `squares`, L tensors [N, D] in x's dtype.

    Args:
        g_LNK: Gradient of the projections, contiguous float32.
        h_LN: Gradient of the squared lengths, contiguous float32.
        xs: L contiguous tensors [N, D].
        s_PLKD: Contiguous directions in xs' dtype, as P parts that add up: 1 for float32, 2 for 16 bits
            (`split_precision`).
        squares: True to add the term 2 h x.
    """
    parts, _, k, c = s_PLKD.shape
    n = len(xs[0])
    bk = min(64, max(16, triton.next_power_of_2(k)))
    bn, bc, span, warps, stages = BACKWARD_TILE
    dxs = [torch.empty_like(x) for x in xs]
    for layer, (x_ND, dx_ND) in enumerate(zip(xs, dxs, strict=True)):
        _backward[(triton.cdiv(n, bn), triton.cdiv(c, span))](
            g_LNK[layer], h_LN[layer], x_ND, s_PLKD[0, layer], dx_ND, n, c, s_PLKD.stride(0), K=k, BN=bn, BC=bc, BK=bk,
            SPAN=span, PIECES=parts, SQUARES=squares, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return dxs
