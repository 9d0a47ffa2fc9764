"""Triton kernels of the gated and the residual depthwise causal convolution (docs/reference/mechanisms.md, "Backbone").

B batch, T length, C channels, W taps (at most 4), H heads, X head size, M rows of a tile; a row is a token. In the
forward a program reads its rows and the W - 1 before them again for each tap, out of the cache. In the backward a warp
walks down its rows. Gradients of the filters are stored per program and summed afterwards, so that every number repeats
bit for bit. Arithmetic is float32, rounded once at the end.

Bytes in bf16, forward and backward: gated 8 C and 14 C per token, Canon 4 C and 6 C.
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
    x_ptr, w_ptr, y_ptr, T, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store y = c conv(b u) of BT tokens and BC channels, with a causal convolution and zeros before token 0.

    Grid: (cdiv(T, BT), cdiv(C, BC), B).

    Args:
        x_ptr: Contiguous [B, T, 3 C], [b | c | u].
        w_ptr: Contiguous filters [C, W]; the last tap multiplies the current token.
        y_ptr: Contiguous [B, T, C], written in its own dtype.
        T: Tokens of a row of the batch.
        C: constexpr, channels.
        W: constexpr, taps, at most 4.
        BT: constexpr, tokens of a program.
        BC: constexpr, channels of a program, a power of two.
    """
    t_M = tl.program_id(0) * BT + tl.arange(0, BT)
    c_C = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(2).to(tl.int64) * T + t_M
    wide = (c_C < C)[None, :]
    inside = (t_M < T)[:, None] & wide
    at = row[:, None] * (3 * C) + c_C[None, :]
    acc = tl.zeros([BT, BC], tl.float32)
    for back in tl.static_range(W):
        seen = inside & (t_M >= back)[:, None]
        b = tl.load(x_ptr + at - back * 3 * C, mask=seen, other=0.0).to(tl.float32)
        u = tl.load(x_ptr + at - back * 3 * C + 2 * C, mask=seen, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c_C * W + (W - 1 - back), mask=c_C < C, other=0.0).to(tl.float32)
        acc += w[None, :] * (b * u)
    c = tl.load(x_ptr + at + C, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row[:, None] * C + c_C[None, :], (acc * c).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _zeros(width: tl.constexpr):
    """Return four separate float32 vectors of zeros.

    Variables that start as one shared value cannot rotate in a loop: Triton takes them for loop constants.
    """
    a = tl.zeros([width], tl.float32)
    b = tl.zeros([width], tl.float32)
    c = tl.zeros([width], tl.float32)
    d = tl.zeros([width], tl.float32)
    return a, b, c, d


@triton.jit
def _taps(w_ptr, at_C, inside_C, W: tl.constexpr):
    """Return the filter weights (w0, w1, w2, w3) of these channels, float32, each of at_C's shape.

    The index is the number of tokens back; weights beyond the filter are 0.

    Args:
        w_ptr: Contiguous filters [C, W].
        at_C: Indices of the channels.
        inside_C: Mask of the channels that exist.
        W: constexpr, taps, at most 4.
    """
    w0 = tl.load(w_ptr + at_C * W + (W - 1), mask=inside_C, other=0.0).to(tl.float32)
    w1 = tl.zeros_like(w0)
    w2 = tl.zeros_like(w0)
    w3 = tl.zeros_like(w0)
    if W > 1:
        w1 = tl.load(w_ptr + at_C * W + (W - 2), mask=inside_C, other=0.0).to(tl.float32)
    if W > 2:
        w2 = tl.load(w_ptr + at_C * W + (W - 3), mask=inside_C, other=0.0).to(tl.float32)
    if W > 3:
        w3 = tl.load(w_ptr + at_C * W + (W - 4), mask=inside_C, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _conv_transposed(w0, w1, w2, w3, x0, x1, x2, x3, W: tl.constexpr):
    """Return sum over j < W of w_j x_{t+j}, the transposed convolution; the newest row is that of t + W - 1.

    w0 to w3 are the filter weights of 0 to 3 tokens back; x0 is the newest row, x1 to x3 the rows 1 to 3 tokens before
    it.
    """
    if W == 1:
        y = w0 * x0
    elif W == 2:
        y = w0 * x1 + w1 * x0
    elif W == 3:
        y = w0 * x2 + w1 * x1 + w2 * x0
    else:
        y = w0 * x3 + w1 * x2 + w2 * x1 + w3 * x0
    return y


@triton.jit
def _store_tap_sums(dw_ptr, part, width, at_C, inside_C, a0, a1, a2, a3, W: tl.constexpr):
    """Store a program's share of the filters' gradient, float32, into dw [parts, W, width].

    `part` is the index of the share, `at_C` the program's channels out of `width`, `inside_C` the mask of those that
    exist. a0 to a3 are the gradients of the weights of 0 to 3 tokens back; those beyond W are dropped.
    """
    at = part.to(tl.int64) * W * width + at_C
    tl.store(dw_ptr + at + (W - 1) * width, a0, mask=inside_C)
    if W > 1:
        tl.store(dw_ptr + at + (W - 2) * width, a1, mask=inside_C)
    if W > 2:
        tl.store(dw_ptr + at + (W - 3) * width, a2, mask=inside_C)
    if W > 3:
        tl.store(dw_ptr + at + (W - 4) * width, a3, mask=inside_C)


@triton.jit
def _gated_backward(
    x_ptr, w_ptr, g_ptr, dx_ptr, dw_ptr, T, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x, and a share of that of w, for R tokens and BC channels of the gated convolution.

    Grid: (cdiv(T, R), cdiv(C, BC), B), one warp each. The warp walks down its rows, plus W - 1 before and after, and
    holds the last W in registers, so that each is read once.

    Args:
        x_ptr: Contiguous [B, T, 3 C], [b | c | u].
        w_ptr: Contiguous filters [C, W].
        g_ptr: Gradient of y, contiguous [B, T, C].
        dx_ptr: Like x, written.
        dw_ptr: float32 [B cdiv(T, R), W, C], written; the caller sums over the first axis.
        T: Tokens of a row of the batch.
        C: constexpr, channels.
        W: constexpr, taps, at most 4.
        R: constexpr, tokens of a program.
        BC: constexpr, channels of a program, a power of two.
    """
    t0 = tl.program_id(0) * R
    c_C = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c_C < C
    row = tl.program_id(2).to(tl.int64) * T
    w0, w1, w2, w3 = _taps(w_ptr, c_C, inside, W)
    p1, p2, p3, _ = _zeros(BC)
    d1, d2, d3, _ = _zeros(BC)
    a0, a1, a2, a3 = _zeros(BC)
    kind = dx_ptr.dtype.element_ty
    for i in range(0, R + 2 * W - 2):
        t = t0 - (W - 1) + i
        seen = inside & (t >= 0) & (t < T)
        at = (row + t) * (3 * C) + c_C
        own_u = tl.load(x_ptr + at + 2 * C, mask=seen, other=0.0).to(tl.float32)
        p0 = tl.load(x_ptr + at, mask=seen, other=0.0).to(tl.float32) * own_u
        later = seen & (t >= t0)
        g = tl.load(g_ptr + (row + t) * C + c_C, mask=later, other=0.0).to(tl.float32)
        d0 = g * tl.load(x_ptr + at + C, mask=later, other=0.0).to(tl.float32)
        y = w0 * p0 + w1 * p1 + w2 * p2 + w3 * p3
        mine = t < t0 + R
        tl.store(dx_ptr + at + C, (g * y).to(kind), mask=later & mine)
        counted = tl.where(mine, d0, 0.0)
        a0 += counted * p0
        a1 += counted * p1
        a2 += counted * p2
        a3 += counted * p3
        past = t - (W - 1)
        dp = _conv_transposed(w0, w1, w2, w3, d0, d1, d2, d3, W)
        done = inside & (past >= t0) & (past < t0 + R) & (past < T)
        at -= (W - 1) * 3 * C
        b = tl.load(x_ptr + at, mask=done, other=0.0).to(tl.float32)
        u = tl.load(x_ptr + at + 2 * C, mask=done, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (dp * u).to(kind), mask=done)
        tl.store(dx_ptr + at + 2 * C, (dp * b).to(kind), mask=done)
        p3, p2, p1 = p2, p1, p0
        d3, d2, d1 = d2, d1, d0
    part = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    _store_tap_sums(dw_ptr, part, C, c_C, inside, a0, a1, a2, a3, W)


@triton.jit
def _normed(x_ptr, at, seen, X: tl.constexpr, NORM: tl.constexpr):
    """Return rows of x in float32, divided by their root mean square over X when NORM.

    Args:
        x_ptr: Rows of X numbers.
        at: Offsets of the elements, [rows, P].
        seen: Mask of the elements that exist, others read as 0.
        X: constexpr, numbers of a row that exist.
        NORM: constexpr bool, True for the norm, with epsilon 1.19e-7.
    """
    x = tl.load(x_ptr + at, mask=seen, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / X + _EPS)[:, None]
    return x


@triton.jit
def _canon_forward(
    x_ptr, w_ptr, y_ptr, T, stride_t, stride_h, H: tl.constexpr, X: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store y = n + conv(n) of BT tokens of one head, with n = x or, with NORM, the RMS norm of x over X.

    The norm comes before the convolution and has no weight; y is not normed. The convolution is depthwise and causal,
    with zeros before the first token. Grid: (cdiv(T, BT), H, B).

    Args:
        x_ptr: [B, T, H, X] with unit stride in X; batch rows follow each other without a gap.
        w_ptr: Contiguous filters [H X, W]; the last tap multiplies the current token.
        y_ptr: Contiguous [B, T, H, X], written in its own dtype.
        T: Tokens of a row of the batch.
        stride_t: Elements from one token of x to the next.
        stride_h: Elements from one head of x to the next.
        H: constexpr, heads.
        X: constexpr, head size.
        P: constexpr, X rounded up to a power of two.
        W: constexpr, taps, at most 4.
        BT: constexpr, tokens of a program.
        NORM: constexpr bool, True for the RMS norm.
    """
    t_M = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    d_X = tl.arange(0, P)
    row = tl.program_id(2).to(tl.int64) * T + t_M
    inside = (t_M < T)[:, None] & (d_X < X)[None, :]
    at = row[:, None] * stride_t + h * stride_h + d_X[None, :]
    y = tl.zeros([BT, P], tl.float32)
    for back in tl.static_range(W):
        x = _normed(x_ptr, at - back * stride_t, inside & (t_M >= back)[:, None], X, NORM)
        w = tl.load(w_ptr + (h * X + d_X) * W + (W - 1 - back), mask=d_X < X, other=0.0).to(tl.float32)
        if back == 0:
            w += 1.0
        y += w[None, :] * x
    tl.store(y_ptr + (row[:, None] * H + h) * X + d_X[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _canon_backward(
    x_ptr, w_ptr, g_ptr, dx_ptr, dw_ptr, T, stride_t, stride_h,
    H: tl.constexpr, X: tl.constexpr, P: tl.constexpr, W: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x, and a share of that of w, for R tokens of one head of Canon.

    Canon is y = n + conv(n), with n = x or, with NORM, the RMS norm of x over X. Grid: (cdiv(T, R), H, B), one warp
    each. The warp walks down its rows, plus W - 1 before and after, and holds the last W in registers.

    Args:
        x_ptr: [B, T, H, X] with unit stride in X; batch rows follow each other without a gap.
        w_ptr: Contiguous filters [H X, W].
        g_ptr: Gradient of y, contiguous [B, T, H, X].
        dx_ptr: Contiguous [B, T, H, X], written.
        dw_ptr: float32 [B cdiv(T, R), W, H X], written; the caller sums over the first axis.
        T: Tokens of a row of the batch.
        stride_t: Elements from one token of x to the next.
        stride_h: Elements from one head of x to the next.
        H: constexpr, heads.
        X: constexpr, head size.
        P: constexpr, X rounded up to a power of two.
        W: constexpr, taps, at most 4.
        R: constexpr, tokens of a program.
        NORM: constexpr bool, True for the RMS norm.
    """
    t0 = tl.program_id(0) * R
    h = tl.program_id(1)
    d_X = tl.arange(0, P)
    inside = d_X < X
    row = tl.program_id(2).to(tl.int64) * T
    w0, w1, w2, w3 = _taps(w_ptr, h * X + d_X, inside, W)
    n1, n2, n3, _ = _zeros(P)
    g1, g2, g3, _ = _zeros(P)
    a0, a1, a2, a3 = _zeros(P)
    unit_scale = tl.sum(tl.zeros([P], tl.float32), 0) + 1.0
    s1, s2, s3 = unit_scale, unit_scale + 0.0, unit_scale - 0.0
    for i in range(0, R + 2 * W - 2):
        t = t0 - (W - 1) + i
        seen = inside & (t >= 0) & (t < T)
        n0 = tl.load(x_ptr + (row + t) * stride_t + h * stride_h + d_X, mask=seen, other=0.0).to(tl.float32)
        s0 = unit_scale
        if NORM:
            s0 = tl.rsqrt(tl.sum(n0 * n0, 0) / X + _EPS)
            n0 = n0 * s0
        later = seen & (t >= t0)
        at = ((row + t) * H + h) * X + d_X
        g0 = tl.load(g_ptr + at, mask=later, other=0.0).to(tl.float32)
        counted = tl.where(t < t0 + R, g0, 0.0)
        a0 += counted * n0
        a1 += counted * n1
        a2 += counted * n2
        a3 += counted * n3
        dn = _conv_transposed(w0, w1, w2, w3, g0, g1, g2, g3, W)
        if W == 1:
            dn += g0
            n, s = n0, s0
        elif W == 2:
            dn += g1
            n, s = n1, s1
        elif W == 3:
            dn += g2
            n, s = n2, s2
        else:
            dn += g3
            n, s = n3, s3
        if NORM:
            dn = s * (dn - n * (tl.sum(dn * n, 0) / X))
        past = t - (W - 1)
        done = inside & (past >= t0) & (past < t0 + R) & (past < T)
        tl.store(dx_ptr + at - (W - 1) * H * X, dn.to(dx_ptr.dtype.element_ty), mask=done)
        n3, n2, n1 = n2, n1, n0
        g3, g2, g1 = g2, g1, g0
        s3, s2, s1 = s2, s1, s0
    part = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    _store_tap_sums(dw_ptr, part, H * X, h * X + d_X, inside, a0, a1, a2, a3, W)


GATED_TILE = (64, 256)
"""Tokens and channels of a program of the gated backward."""
CANON_ROWS = 32
"""Tokens of a program of Canon's backward."""


def gated_forward(x_BTE: Tensor, w_CW: Tensor) -> Tensor:
    """Return c conv(b u) of contiguous x = [b | c | u], [B, T, C] in x's dtype.

    The convolution is depthwise and causal, with zeros before the first token.

    Args:
        x_BTE: Contiguous, on a GPU, E = 3 C.
        w_CW: Contiguous filters, of x's dtype; the last tap multiplies the current token.
    """
    (b, t, _), (c, k) = x_BTE.shape, w_CW.shape
    y_BTC = x_BTE.new_empty(b, t, c)
    bt, bc = 16, min(256, triton.next_power_of_2(c))
    grid = (triton.cdiv(t, bt), triton.cdiv(c, bc), b)
    _gated_forward[grid](x_BTE, w_CW, y_BTC, t, C=c, W=k, BT=bt, BC=bc, num_warps=8)
    return y_BTC


def gated_backward(g_BTC: Tensor, x_BTE: Tensor, w_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and w, in their dtypes, from that of the result.

    Args:
        g_BTC: Gradient of the result, contiguous.
        x_BTE: Contiguous input, E = 3 C.
        w_CW: Contiguous filters.
    """
    (b, t, _), (c, k) = x_BTE.shape, w_CW.shape
    rows, bc = GATED_TILE
    bc = min(bc, triton.next_power_of_2(c))
    dx_BTE = torch.empty_like(x_BTE)
    parts = triton.cdiv(t, rows)
    dw_PWC = torch.empty(b * parts, k, c, device=x_BTE.device, dtype=torch.float32)
    grid = (parts, triton.cdiv(c, bc), b)
    _gated_backward[grid](x_BTE, w_CW, g_BTC, dx_BTE, dw_PWC, t, C=c, W=k, R=rows, BC=bc, num_warps=1)
    return dx_BTE, dw_PWC.sum(0).t().contiguous().to(w_CW.dtype)


def canon_forward(x_BTHX: Tensor, w_CW: Tensor, norm: bool) -> Tensor:
    """Return n + conv(n), contiguous [B, T, H, X], with n = x or, with `norm`, the RMS norm of x over X.

    Args:
        x_BTHX: Input on a GPU; it may have gaps between tokens and heads.
        w_CW: Contiguous filters, C = H X, W at most 4; the last tap multiplies the current token.
        norm: True to norm x before the convolution (per token and head, without weight, epsilon 1.19e-7).
    """
    (b, t, h, d), k = x_BTHX.shape, w_CW.shape[1]
    y_BTHX = torch.empty(b, t, h, d, device=x_BTHX.device, dtype=x_BTHX.dtype)
    bt = 32
    _canon_forward[(triton.cdiv(t, bt), h, b)](
        x_BTHX, w_CW, y_BTHX, t, *_strides(x_BTHX), H=h, X=d, P=triton.next_power_of_2(d), W=k, BT=bt, NORM=norm
    )
    return y_BTHX


def canon_backward(g_BTHX: Tensor, x_BTHX: Tensor, w_CW: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (contiguous) and w, in their dtypes, from that of the result.

    Args:
        g_BTHX: Gradient of the result, contiguous.
        x_BTHX: Input; it may have gaps between tokens and heads.
        w_CW: Contiguous filters, C = H X.
        norm: True if x was normed first.
    """
    (b, t, h, d), k = x_BTHX.shape, w_CW.shape[1]
    dx_BTHX = torch.empty_like(g_BTHX)
    parts = triton.cdiv(t, CANON_ROWS)
    dw_PWC = torch.empty(b * parts, k, h * d, device=g_BTHX.device, dtype=torch.float32)
    _canon_backward[(parts, h, b)](
        x_BTHX, w_CW, g_BTHX, dx_BTHX, dw_PWC, t, *_strides(x_BTHX),
        H=h, X=d, P=triton.next_power_of_2(d), W=k, R=CANON_ROWS, NORM=norm, num_warps=1,
    )  # fmt: skip
    return dx_BTHX, dw_PWC.sum(0).t().contiguous().to(w_CW.dtype)


def _strides(x_BTHX: Tensor) -> tuple[int, int]:
    """Return the strides of T and H in elements; the kernels count tokens through the whole batch."""
    return x_BTHX.stride(1), x_BTHX.stride(2)
