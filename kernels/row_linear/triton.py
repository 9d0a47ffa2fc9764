"""Products of a few rows as one pass over the matrix (docs/decoding.md).

B rows, K inputs, N outputs. A program has BN outputs of every row, and their gates. One row is multiplied and summed in place, several
are padded to a power of two from the 16 that the matrix units take.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _read(at, inside, EVEN: tl.constexpr):
    """What is at these places of a matrix. Without a mask more of it is under way at a time."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


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
    EVEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n.to(tl.int64)[:, None] * K
    y = tl.zeros([BN, BK], tl.float32)
    gates = tl.zeros([BN, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < N)[:, None] & (k < K)[None, :]
        w = _read(w_ptr + rows + k[None, :], inside, EVEN)
        if GATE > 0:
            g = _read(w_ptr + rows + N * K + k[None, :], inside, EVEN)
        # what of the matrix is asked for is asked for before anything waits
        tl.debug_barrier()
        x = _read(x_ptr + k, k < K, EVEN).to(tl.float32)
        if NORM:
            square += x * x
            x *= _read(norm_ptr + k, k < K, EVEN).to(tl.float32)
        y += w.to(tl.float32) * x[None, :]
        if GATE > 0:
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
    EVEN: tl.constexpr,
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
        w = _read(w_ptr + rows + k[None, :], inside, EVEN)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(w.dtype)
        y += tl.dot(x, tl.trans(w), input_precision="ieee")
        if GATE > 0:
            g = _read(w_ptr + rows + N * K + k[None, :], inside, EVEN)
            gates += tl.dot(x, tl.trans(g), input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(square / K + eps)[:, None]
        y *= scale
        gates *= scale
    at = b[:, None] * N + n[None, :]
    inside = (b < B)[:, None] & (n < N)[None, :]
    _end(y, gates, bias_ptr, under_ptr, y_ptr, at, n[None, :], inside, N, BIAS, GATE, UNDER)


@triton.jit
def _conv_end(
    b, c, u, bias_ptr, tails_ptr, tail, filters_ptr, y_ptr, at, n, inside, C, BIAS: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """c conv(b u) of a token, and its storing; `tail` is where the tails of these outputs begin, which have b u at their end then."""
    dtype = y_ptr.dtype.element_ty
    if BIAS:
        b += tl.load(bias_ptr + n, mask=n < C, other=0.0).to(tl.float32)
        c += tl.load(bias_ptr + C + n, mask=n < C, other=0.0).to(tl.float32)
        u += tl.load(bias_ptr + 2 * C + n, mask=n < C, other=0.0).to(tl.float32)
    # rounded where torch rounds
    x = (b.to(dtype).to(tl.float32) * u.to(dtype).to(tl.float32)).to(dtype)
    y = x.to(tl.float32) * tl.load(filters_ptr + n * W + (W - 1), mask=n < C, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        earlier = tl.load(tails_ptr + tail + tap * C, mask=inside, other=0.0)
        y += earlier.to(tl.float32) * tl.load(filters_ptr + n * W + tap, mask=n < C, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(tails_ptr + tail + (tap - 1) * C, earlier, mask=inside)
    if W > 1:
        tl.store(tails_ptr + tail + (W - 2) * C, x, mask=inside)
    y = y.to(dtype).to(tl.float32) * c.to(dtype).to(tl.float32)
    tl.store(y_ptr + at, y.to(dtype), mask=inside)


@triton.jit
def _one_conv(
    x_ptr, w_ptr, bias_ptr, norm_ptr, tails_ptr, slots_ptr, filters_ptr, y_ptr, eps, C, K: tl.constexpr,
    BIAS: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n.to(tl.int64)[:, None] * K
    b = tl.zeros([BN, BK], tl.float32)
    c = tl.zeros([BN, BK], tl.float32)
    u = tl.zeros([BN, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < C)[:, None] & (k < K)[None, :]
        w_b = _read(w_ptr + rows + k[None, :], inside, EVEN)
        w_c = _read(w_ptr + rows + C * K + k[None, :], inside, EVEN)
        w_u = _read(w_ptr + rows + 2 * C * K + k[None, :], inside, EVEN)
        # what of the matrix is asked for is asked for before anything waits
        tl.debug_barrier()
        x = _read(x_ptr + k, k < K, EVEN).to(tl.float32)
        square += x * x
        x *= _read(norm_ptr + k, k < K, EVEN).to(tl.float32)
        b += w_b.to(tl.float32) * x[None, :]
        c += w_c.to(tl.float32) * x[None, :]
        u += w_u.to(tl.float32) * x[None, :]
    scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
    tail = tl.load(slots_ptr) * ((W - 1) * C) + n
    _conv_end(
        tl.sum(b, 1) * scale, tl.sum(c, 1) * scale, tl.sum(u, 1) * scale, bias_ptr, tails_ptr, tail, filters_ptr, y_ptr, n,
        n, n < C, C, BIAS, W,
    )  # fmt: skip


@triton.jit
def _several_conv(
    x_ptr, w_ptr, bias_ptr, norm_ptr, tails_ptr, slots_ptr, filters_ptr, y_ptr, eps, B, C, x_row, K: tl.constexpr,
    BIAS: tl.constexpr, W: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    text = tl.arange(0, BB)
    rows = n.to(tl.int64)[:, None] * K
    b = tl.zeros([BB, BN], tl.float32)
    c = tl.zeros([BB, BN], tl.float32)
    u = tl.zeros([BB, BN], tl.float32)
    square = tl.zeros([BB], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = (n < C)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + text[:, None] * x_row + k[None, :], mask=(text < B)[:, None] & (k < K)[None, :], other=0.0)
        w_b = _read(w_ptr + rows + k[None, :], inside, EVEN)
        w_c = _read(w_ptr + rows + C * K + k[None, :], inside, EVEN)
        w_u = _read(w_ptr + rows + 2 * C * K + k[None, :], inside, EVEN)
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(w_b.dtype)
        b += tl.dot(x, tl.trans(w_b), input_precision="ieee")
        c += tl.dot(x, tl.trans(w_c), input_precision="ieee")
        u += tl.dot(x, tl.trans(w_u), input_precision="ieee")
    scale = tl.rsqrt(square / K + eps)[:, None]
    slot = tl.load(slots_ptr + text, mask=text < B, other=0)
    at = text[:, None] * C + n[None, :]
    inside = (text < B)[:, None] & (n < C)[None, :]
    tail = (slot * ((W - 1) * C))[:, None] + n[None, :]
    _conv_end(
        b * scale, c * scale, u * scale, bias_ptr, tails_ptr, tail, filters_ptr, y_ptr, at, n[None, :], inside, C, BIAS, W
    )  # fmt: skip


def conv_step(
    x: Tensor, w: Tensor, bias: Tensor | None, norm: Tensor, eps: float, tails: Tensor, slots: Tensor, filters: Tensor
) -> Tensor:
    """As `row_conv_step`."""
    (b, k), (c, taps) = x.shape, filters.shape
    x, w = x if x.stride(1) == 1 else x.contiguous(), w.contiguous()
    y = torch.empty(b, c, dtype=x.dtype, device=x.device)
    args = x, w, y if bias is None else bias, norm, tails, slots, filters.contiguous(), y, eps
    tiles = _tiles(b, c, k, 128)
    grid = (triton.cdiv(c, tiles["BN"]),)
    if b == 1:
        _one_conv[grid](*args, c, K=k, BIAS=bias is not None, W=taps, **tiles)
    else:
        _several_conv[grid](*args, b, c, x.stride(0), K=k, BIAS=bias is not None, W=taps, **tiles)
    return y


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
    args, tiles = (x, w, *given, y, eps), _tiles(b, n, k, 256)
    grid = (triton.cdiv(n, tiles["BN"]),)
    if b == 1:
        _one[grid](*args, n, K=k, **flags, **tiles)
    else:
        _several[grid](*args, b, n, x.stride(0), K=k, **flags, **tiles)
    return y


def _tiles(b: int, n: int, k: int, inputs: int) -> dict[str, Any]:
    """Of a product of b rows, with so many inputs at a time where matrix units take several rows."""
    most = 1024 if b == 1 else inputs if b <= 16 else 128
    bn, bk = 4 if b == 1 else 16 if b <= 16 else 32, min(most, max(16, triton.next_power_of_2(k)))
    found = {"BN": bn, "BK": bk, "EVEN": n % bn == 0 and k % bk == 0, "num_warps": 4}
    return found if b == 1 else found | {"BB": max(16, triton.next_power_of_2(b)), "num_stages": 4}
