"""Products of a few rows as one pass over the matrix (docs/decoding.md).

B rows, K inputs, N outputs. A program has BN outputs of every row, and their gates. One row is multiplied and summed in place, several
are padded to a power of two from the 16 that the matrix units take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _end(
    y, gates, bias_ptr, under_ptr, y_ptr, at, n, inside, N, BIAS: tl.constexpr, GATE: tl.constexpr, UNDER: tl.constexpr
):  # fmt: skip
    """What is behind a product, and its storing: y and the other half `gates`, where they go, which outputs they are."""
    dtype = y_ptr.dtype.element_ty
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if GATE > 0:
            gates += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
    # rounded where torch rounds
    y = y.to(dtype).to(tl.float32)
    if GATE > 0:
        gates = gates.to(dtype).to(tl.float32)
    if GATE == 1:
        y = tl.maximum(y, 0.0)
        y = y * gates * y
    if GATE == 2:
        y = y * _sigmoid(y) * gates
    if UNDER:
        y = y.to(dtype).to(tl.float32) + tl.load(under_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(dtype), mask=inside)


@triton.jit
def _one(
    x_ptr, w_ptr, bias_ptr, norm_ptr, under_ptr, y_ptr, eps, N, K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, UNDER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n.to(tl.int64)[:, None] * K
    y = tl.zeros([BN, BK], tl.float32)
    gates = tl.zeros([BN, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < N)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + rows + k[None, :], mask=inside, other=0.0)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            square += x * x
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        y += w.to(tl.float32) * x[None, :]
        if GATE > 0:
            g = tl.load(w_ptr + rows + N * K + k[None, :], mask=inside, other=0.0)
            gates += g.to(tl.float32) * x[None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
    _end(
        tl.sum(y, 1) * scale, tl.sum(gates, 1) * scale, bias_ptr, under_ptr, y_ptr, n, n, n < N, N, BIAS, GATE, UNDER
    )  # fmt: skip


@triton.jit
def _several(
    x_ptr, w_ptr, bias_ptr, norm_ptr, under_ptr, y_ptr, eps, B, N, x_row, K: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, UNDER: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.arange(0, BB)
    rows = n.to(tl.int64)[:, None] * K
    y = tl.zeros([BB, BN], tl.float32)
    gates = tl.zeros([BB, BN], tl.float32)
    square = tl.zeros([BB], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < N)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + b[:, None] * x_row + k[None, :], mask=(b < B)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + rows + k[None, :], mask=inside, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(w.dtype)
        y += tl.dot(x, tl.trans(w), input_precision="ieee")
        if GATE > 0:
            g = tl.load(w_ptr + rows + N * K + k[None, :], mask=inside, other=0.0)
            gates += tl.dot(x, tl.trans(g), input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(square / K + eps)[:, None]
        y *= scale
        gates *= scale
    at = b[:, None] * N + n[None, :]
    inside = (b < B)[:, None] & (n < N)[None, :]
    _end(y, gates, bias_ptr, under_ptr, y_ptr, at, n[None, :], inside, N, BIAS, GATE, UNDER)


def product(
    x: Tensor, w: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, gate: int, under: Tensor | None
) -> Tensor:
    """As `row_linear`."""
    (b, k), n = x.shape, w.shape[0] // (2 if gate else 1)
    x, w = x if x.stride(1) == 1 else x.contiguous(), w.contiguous()
    under = None if under is None else under.contiguous()
    y = torch.empty(b, n, dtype=x.dtype, device=x.device)
    given = [y if part is None else part for part in (bias, norm, under)]
    flags = {"NORM": norm is not None, "BIAS": bias is not None, "GATE": gate, "UNDER": under is not None}
    args = x, w, *given, y, eps
    if b == 1:
        bn = 8
        _one[(triton.cdiv(n, bn),)](
            *args, n, K=k, **flags, BN=bn, BK=min(1024, triton.next_power_of_2(k)), num_warps=8 if gate else 4
        )  # fmt: skip
    else:
        bn = 16 if b <= 16 else 32
        _several[(triton.cdiv(n, bn),)](
            *args, b, n, x.stride(0), K=k, **flags, BB=max(16, triton.next_power_of_2(b)), BN=bn,
            BK=min(256, max(16, triton.next_power_of_2(k))), num_warps=4, num_stages=4,
        )  # fmt: skip
    return y
