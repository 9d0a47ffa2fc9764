"""Gated and residual depthwise causal convolutions as one pass over memory each way (MECHANISMS A: LFM2 and Canon).

B batch, T length, C channels, K taps, H heads, D head size, M rows of a tile. Every program reads its rows and the K - 1
beside them; what neighbours share comes from the cache. Sums over rows are kept one a program and added up afterwards,
so that every number repeats bit for bit. Arithmetic is float32, rounded once at the end.

Bytes in bf16, forward and backward: gated 8 C and 14 C a token, Canon 4 C and 6 C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1.1920928955078125e-07

_EPS = tl.constexpr(EPS)


@triton.jit
def _gated_forward(
    x_ptr, w_ptr, y_ptr, T, C: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t_M = tl.program_id(0) * BT + tl.arange(0, BT)
    c_C = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(2).to(tl.int64) * T + t_M
    wide = (c_C < C)[None, :]
    inside = (t_M < T)[:, None] & wide
    at = row[:, None] * (3 * C) + c_C[None, :]
    acc = tl.zeros([BT, BC], tl.float32)
    for back in tl.static_range(K):
        seen = inside & (t_M >= back)[:, None]
        b = tl.load(x_ptr + at - back * 3 * C, mask=seen, other=0.0).to(tl.float32)
        u = tl.load(x_ptr + at - back * 3 * C + 2 * C, mask=seen, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c_C * K + (K - 1 - back), mask=c_C < C, other=0.0).to(tl.float32)
        acc += w[None, :] * (b * u)
    c = tl.load(x_ptr + at + C, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * C + c_C[None, :], (acc * c).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    x_ptr, w_ptr, g_ptr, dx_ptr, dw_ptr, T, C: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t_M = tl.program_id(0) * BT + tl.arange(0, BT)
    c_C = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(2).to(tl.int64) * T + t_M
    inside = (t_M < T)[:, None] & (c_C < C)[None, :]
    at = row[:, None] * (3 * C) + c_C[None, :]
    at_g = row[:, None] * C + c_C[None, :]
    g = tl.load(g_ptr + at_g, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(x_ptr + at + C, mask=inside, other=0.0).to(tl.float32)
    dy = g * c
    part = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    conv = tl.zeros([BT, BC], tl.float32)
    dp = tl.zeros([BT, BC], tl.float32)
    b = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + at + 2 * C, mask=inside, other=0.0).to(tl.float32)
    for back in tl.static_range(K):
        w = tl.load(w_ptr + c_C * K + (K - 1 - back), mask=c_C < C, other=0.0).to(tl.float32)
        if back == 0:
            p = b * u
            later = dy
        else:
            seen = inside & (t_M >= back)[:, None]
            earlier = tl.load(x_ptr + at - back * 3 * C, mask=seen, other=0.0).to(tl.float32)
            p = earlier * tl.load(x_ptr + at - back * 3 * C + 2 * C, mask=seen, other=0.0).to(tl.float32)
            ahead = inside & (t_M + back < T)[:, None]
            later = tl.load(g_ptr + at_g + back * C, mask=ahead, other=0.0).to(tl.float32)
            later = later * tl.load(x_ptr + at + back * 3 * C + C, mask=ahead, other=0.0).to(tl.float32)
        conv += w[None, :] * p
        dp += w[None, :] * later
        tl.store(dw_ptr + (part * K + (K - 1 - back)) * C + c_C, tl.sum(dy * p, 0), mask=c_C < C)
    kind = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + at, (dp * u).to(kind), mask=inside)
    tl.store(dx_ptr + at + C, (g * conv).to(kind), mask=inside)
    tl.store(dx_ptr + at + 2 * C, (dp * b).to(kind), mask=inside)


@triton.jit
def _normed(x_ptr, at, seen, D: tl.constexpr, NORM: tl.constexpr):
    x = tl.load(x_ptr + at, mask=seen, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + _EPS)[:, None]
    return x


@triton.jit
def _canon_forward(
    x_ptr, w_ptr, y_ptr, T, stride_t, stride_h, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t_M = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    d_D = tl.arange(0, P)
    row = tl.program_id(2).to(tl.int64) * T + t_M
    inside = (t_M < T)[:, None] & (d_D < D)[None, :]
    at = row[:, None] * stride_t + h * stride_h + d_D[None, :]
    y = tl.zeros([BT, P], tl.float32)
    for back in tl.static_range(K):
        x = _normed(x_ptr, at - back * stride_t, inside & (t_M >= back)[:, None], D, NORM)
        w = tl.load(w_ptr + (h * D + d_D) * K + (K - 1 - back), mask=d_D < D, other=0.0).to(tl.float32)
        if back == 0:
            w += 1.0
        y += w[None, :] * x
    tl.store(y_ptr + (row[:, None] * H + h) * D + d_D[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _canon_backward(
    x_ptr, w_ptr, g_ptr, dx_ptr, dw_ptr, T, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t_M = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    d_D = tl.arange(0, P)
    row = tl.program_id(2).to(tl.int64) * T + t_M
    inside = (t_M < T)[:, None] & (d_D < D)[None, :]
    at = row[:, None] * stride_t + h * stride_h + d_D[None, :]
    at_g = (row[:, None] * H + h) * D + d_D[None, :]
    part = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    g = tl.load(g_ptr + at_g, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.full([BT], 1.0, tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + _EPS)
    n = x * scale[:, None]
    dn = g
    for back in tl.static_range(K):
        w = tl.load(w_ptr + (h * D + d_D) * K + (K - 1 - back), mask=d_D < D, other=0.0).to(tl.float32)
        if back == 0:
            earlier = n
            later = g
        else:
            earlier = _normed(x_ptr, at - back * stride_t, inside & (t_M >= back)[:, None], D, NORM)
            ahead = inside & (t_M + back < T)[:, None]
            later = tl.load(g_ptr + at_g + back * H * D, mask=ahead, other=0.0).to(tl.float32)
        dn += w[None, :] * later
        at_w = (part * K + (K - 1 - back)) * (H * D) + h * D + d_D
        tl.store(dw_ptr + at_w, tl.sum(g * earlier, 0), mask=d_D < D)
    if NORM:
        dn = scale[:, None] * (dn - n * (tl.sum(dn * n, 1) / D)[:, None])
    tl.store(dx_ptr + at_g, dn.to(dx_ptr.dtype.element_ty), mask=inside)


GATED = (16, 128, 8)
"""Rows, channels and warps of a tile of the gated backward."""
CANON = (16, 4)
"""Rows and warps of a tile of Canon's backward."""


def gated_forward(x_BTE: Tensor, w_CK: Tensor) -> Tensor:
    """c conv(b u) of contiguous [b | c | u], E = 3 C; [B, T, C] in x's type."""
    (b, t, _), (c, k) = x_BTE.shape, w_CK.shape
    y_BTC = x_BTE.new_empty(b, t, c)
    bt, bc = 16, min(256, triton.next_power_of_2(c))
    grid = (triton.cdiv(t, bt), triton.cdiv(c, bc), b)
    _gated_forward[grid](x_BTE, w_CK, y_BTC, t, C=c, K=k, BT=bt, BC=bc, num_warps=8)
    return y_BTC


def gated_backward(g_BTC: Tensor, x_BTE: Tensor, w_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and w."""
    (b, t, _), (c, k) = x_BTE.shape, w_CK.shape
    bt, bc, warps = GATED
    bc = min(bc, triton.next_power_of_2(c))
    dx_BTE = torch.empty_like(x_BTE)
    parts = triton.cdiv(t, bt)
    dw_PKC = torch.empty(b * parts, k, c, device=x_BTE.device, dtype=torch.float32)
    grid = (parts, triton.cdiv(c, bc), b)
    _gated_backward[grid](x_BTE, w_CK, g_BTC, dx_BTE, dw_PKC, t, C=c, K=k, BT=bt, BC=bc, num_warps=warps)
    return dx_BTE, dw_PKC.sum(0).t().contiguous().to(w_CK.dtype)


def canon_forward(x_BTHD: Tensor, w_CK: Tensor, norm: bool) -> Tensor:
    """n + conv(n) with n = x or its RMS norm over D; x may have gaps between heads; contiguous [B, T, H, D]."""
    (b, t, h, d), k = x_BTHD.shape, w_CK.shape[1]
    y_BTHD = torch.empty(b, t, h, d, device=x_BTHD.device, dtype=x_BTHD.dtype)
    bt = 32
    _canon_forward[(triton.cdiv(t, bt), h, b)](
        x_BTHD, w_CK, y_BTHD, t, *_strides(x_BTHD), H=h, D=d, P=triton.next_power_of_2(d), K=k, BT=bt, NORM=norm
    )
    return y_BTHD


def canon_backward(g_BTHD: Tensor, x_BTHD: Tensor, w_CK: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x (contiguous) and w."""
    (b, t, h, d), k = x_BTHD.shape, w_CK.shape[1]
    dx_BTHD = torch.empty_like(g_BTHD)
    bt, warps = CANON
    parts = triton.cdiv(t, bt)
    dw_PKC = torch.empty(b * parts, k, h * d, device=g_BTHD.device, dtype=torch.float32)
    _canon_backward[(parts, h, b)](
        x_BTHD, w_CK, g_BTHD, dx_BTHD, dw_PKC, t, *_strides(x_BTHD),
        H=h, D=d, P=triton.next_power_of_2(d), K=k, BT=bt, NORM=norm, num_warps=warps,
    )  # fmt: skip
    return dx_BTHD, dw_PKC.sum(0).t().contiguous().to(w_CK.dtype)


def _strides(x_BTHD: Tensor) -> tuple[int, int]:
    """Strides of T and H; the kernels count rows through the whole batch."""
    return x_BTHD.stride(1), x_BTHD.stride(2)
