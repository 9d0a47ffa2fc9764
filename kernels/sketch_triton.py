"""The kernels of `sketch`. N rows, C channels, K directions; a program has BN rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product(a, b, acc, kind, PIECES: tl.constexpr):
    """acc + a b of float32 a and b; in two pieces each where the matrix units take `kind`, less what is below 2^-16."""
    if PIECES:
        a1 = a.to(kind)
        b1 = b.to(kind)
        acc = tl.dot(a1, b1, acc)
        acc = tl.dot(a1, (b - b1.to(tl.float32)).to(kind), acc)
        acc = tl.dot((a - a1.to(tl.float32)).to(kind), b1, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _forward(
    x_ptr, s_ptr, z_ptr, N, C, K: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k_K = tl.program_id(1) * BK + tl.arange(0, BK)
    rows, wide = (n_N < N)[:, None], (k_K < K)[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    for c in tl.range(0, C, BC):
        c_C = c + tl.arange(0, BC)
        x = tl.load(x_ptr + n_N[:, None] * C + c_C[None, :], mask=rows & (c_C < C)[None, :], other=0.0)
        s = tl.load(s_ptr + k_K[None, :] * C + c_C[:, None], mask=wide & (c_C < C)[:, None], other=0.0)
        if PIECES:
            s1 = s.to(x.dtype)
            acc = tl.dot(x, s1, acc)
            acc = tl.dot(x, (s - s1.to(tl.float32)).to(x.dtype), acc)
        else:
            acc = tl.dot(x, s, acc, input_precision="ieee")
    tl.store(z_ptr + n_N[:, None] * K + k_K[None, :], acc, mask=rows & wide)


@triton.jit
def _backward(
    g_ptr, s_ptr, dx_ptr, N, C, K: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program goes through SPAN channels, BC at a time."""
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    rows = (n_N < N)[:, None]
    kind = dx_ptr.dtype.element_ty
    first = tl.program_id(1) * SPAN
    k_K = tl.arange(0, BK)
    # all of a row's g where there is no more of it
    g = tl.load(g_ptr + n_N[:, None] * K + k_K[None, :], mask=rows & (k_K < K)[None, :], other=0.0)
    for c in tl.range(first, tl.minimum(first + SPAN, C), BC, num_stages=STAGES):
        c_C = c + tl.arange(0, BC)
        wide = (c_C < C)[None, :]
        acc = tl.zeros([BN, BC], tl.float32)
        for k in tl.range(0, K, BK, num_stages=1):
            k_K = k + tl.arange(0, BK)
            if K > BK:
                g = tl.load(g_ptr + n_N[:, None] * K + k_K[None, :], mask=rows & (k_K < K)[None, :], other=0.0)
            s = tl.load(s_ptr + k_K[:, None] * C + c_C[None, :], mask=wide & (k_K < K)[:, None], other=0.0)
            acc = _product(g, s, acc, kind, PIECES)
        tl.store(dx_ptr + n_N[:, None] * C + c_C[None, :], acc.to(kind), mask=rows & wide)


BACKWARD = (64, 128, 512, 4, 3)
"""Rows, channels at a time, channels in all, warps and stages of a program of the backward."""


def forward(x_NC: Tensor, s_KC: Tensor) -> Tensor:
    """x sᵀ of contiguous x and float32 s, [N, K] in float32."""
    (n, c), k = x_NC.shape, len(s_KC)
    z_NK = torch.empty(n, k, device=x_NC.device, dtype=torch.float32)
    bk = min(64, max(16, triton.next_power_of_2(k)))
    _forward[(triton.cdiv(n, 128), triton.cdiv(k, bk))](
        x_NC, s_KC, z_NK, n, c, K=k, BN=128, BC=64, BK=bk, PIECES=x_NC.dtype != torch.float32,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return z_NK


def backward(g_NK: Tensor, s_KC: Tensor, dtype: torch.dtype) -> Tensor:
    """g s of contiguous float32 g and s, [N, C] in `dtype`."""
    (n, k), c = g_NK.shape, s_KC.shape[1]
    dx_NC = torch.empty(n, c, device=g_NK.device, dtype=dtype)
    bk = min(64, max(16, triton.next_power_of_2(k)))
    bn, bc, span, warps, stages = BACKWARD
    _backward[(triton.cdiv(n, bn), triton.cdiv(c, span))](
        g_NK, s_KC, dx_NC, n, c, K=k, BN=bn, BC=bc, BK=bk, SPAN=span, PIECES=dtype != torch.float32, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return dx_NC
