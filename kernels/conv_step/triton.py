"""Triton kernels of the causal convolutions one token at a time, as one pass over their tails (docs/explanation/decoding.md).

B texts, C channels, W taps, H query heads, J KV heads, X head size, R rows of the table of tails.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..norms import EPS_FLOAT32

CHANNELS = 128
"""Channels of a program."""

_EPS = tl.constexpr(EPS_FLOAT32)


@triton.jit
def _convolve_and_shift(x, tail_ptr, w_ptr, c, inside, C, W: tl.constexpr, RESIDUAL: tl.constexpr):
    """Return the convolution of these channels at the new input x, float32, and append x to their tail.

    Args:
        x: Inputs of the channels, in the tails' dtype.
        tail_ptr: [W - 1, C] of the text, oldest first; shifted by one token in place.
        w_ptr: Filters [C, W].
        c: Indices of the channels.
        inside: Mask of the channels that exist.
        C: Channels of a row of the tail.
        W: constexpr, taps.
        RESIDUAL: constexpr bool, True to add x.
    """
    y = x.to(tl.float32) * tl.load(w_ptr + c * W + (W - 1), mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += x.to(tl.float32)
    for tap in tl.static_range(W - 1):
        earlier = tl.load(tail_ptr + tap * C + c, mask=inside, other=0.0)
        y += earlier.to(tl.float32) * tl.load(w_ptr + c * W + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(tail_ptr + (tap - 1) * C + c, earlier, mask=inside)
    if W > 1:
        tl.store(tail_ptr + (W - 2) * C + c, x, mask=inside)
    return y


@triton.jit
def _conv(
    x_ptr, tails_ptr, slots_ptr, w_ptr, y_ptr, x_text, C, W: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Store one step of a plain or a gated convolution, for one text and BC channels.

    Grid: (B, cdiv(C, BC)).

    Args:
        x_ptr: Inputs, [B, C], or [B, 3 C] as [b | c | u] when GATED.
        tails_ptr: [R, W - 1, C], shifted in place.
        slots_ptr: int64 [B], row of the table of each text.
        w_ptr: Contiguous filters [C, W].
        y_ptr: Contiguous [B, C], written.
        x_text: Elements from one text of x to the next.
        C: Channels.
        W: constexpr, taps.
        RESIDUAL: constexpr bool, True to add the input.
        GATED: constexpr bool, True for c conv(b u).
        BC: constexpr, channels of a program.
    """
    b = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + b * x_text + c, mask=inside, other=0.0)
    if GATED:
        u = tl.load(x_ptr + b * x_text + 2 * C + c, mask=inside, other=0.0)
        x = (x.to(tl.float32) * u.to(tl.float32)).to(dtype)
    tail_ptr = tails_ptr + tl.load(slots_ptr + b) * ((W - 1) * C)
    y = _convolve_and_shift(x, tail_ptr, w_ptr, c, inside, C, W, RESIDUAL)
    if GATED:
        gate = tl.load(x_ptr + b * x_text + C + c, mask=inside, other=0.0)
        y = y.to(dtype).to(tl.float32) * gate.to(tl.float32)
    tl.store(y_ptr + b * C + c, y.to(dtype), mask=inside)


@triton.jit
def _heads(
    x_ptr, tails_ptr, slots_ptr, w_ptr, y_ptr, x_text, C, APART: tl.constexpr, H: tl.constexpr, J: tl.constexpr,
    X: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Store one step of Canon for one text and one head of q, k or v.

    y = n + conv(n), with n = x or, for queries and keys with NORM, its RMS norm over X (before the convolution); n is
    what the tails hold. Grid: (B, H + 2 J).

    Args:
        x_ptr: Inputs [B, E]: query heads APART channels apart, then keys and values.
        tails_ptr: [R, W - 1, C], shifted in place, C = (H + 2 J) X.
        slots_ptr: int64 [B], row of the table of each text.
        w_ptr: Contiguous filters [C, W].
        y_ptr: Contiguous [B, C], written.
        x_text: Elements from one text of x to the next.
        C: Channels of all heads.
        APART: constexpr, channels from one query head of x to the next.
        H: constexpr, query heads.
        J: constexpr, KV heads.
        X: constexpr, head size.
        W: constexpr, taps.
        NORM: constexpr bool, True to divide queries and keys by their root mean square.
        BX: constexpr, X rounded up to a power of two.
    """
    b = tl.program_id(0)
    head = tl.program_id(1)
    d_X = tl.arange(0, BX)
    inside = d_X < X
    kv_index = tl.maximum(head - H, 0)
    from_ptr = x_ptr + b * x_text + (head - kv_index) * APART + kv_index * X
    x = tl.load(from_ptr + d_X, mask=inside, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / X + _EPS)
        x = tl.where(head < H + J, normed.to(x.dtype), x)
    c = head * X + d_X
    tail_ptr = tails_ptr + tl.load(slots_ptr + b) * ((W - 1) * C)
    y = _convolve_and_shift(x, tail_ptr, w_ptr, c, inside, C, W, True)
    tl.store(y_ptr + b * C + c, y.to(y_ptr.dtype.element_ty), mask=inside)


def step(x: Tensor, tails: Tensor, slots: Tensor, w: Tensor, *, residual: bool) -> Tensor:
    """Return one step of the plain convolution, [B, C] of x's dtype; `tails` [R, W - 1, C] is changed in place."""
    return _launch_conv(x, tails, slots, w, residual=residual, gated=False)


def gated(x: Tensor, tails: Tensor, slots: Tensor, w: Tensor) -> Tensor:
    """Return one step of the gated convolution, c conv(b u) [B, C] of x = [b | c | u]; `tails` is changed in place."""
    return _launch_conv(x, tails, slots, w, residual=False, gated=True)


def _launch_conv(x: Tensor, tails: Tensor, slots: Tensor, w: Tensor, *, residual: bool, gated: bool) -> Tensor:
    """Launch `_conv` and return its output, [B, C] of x's dtype; `tails` is changed in place.

    Args:
        x: Inputs [B, C], or [B, 3 C] as [b | c | u] with `gated`.
        tails: Contiguous [R, W - 1, C].
        slots: int64 [B], row of `tails` of each text.
        w: Filters [C, W].
        residual: True to add the input.
        gated: True for c conv(b u).
    """
    x, (c, taps) = _with_unit_stride(x), w.shape
    y = torch.empty(len(x), c, dtype=x.dtype, device=x.device)
    _conv[(len(x), triton.cdiv(c, CHANNELS))](
        x, tails, slots, w.contiguous(), y, x.stride(0), c, W=taps, RESIDUAL=residual, GATED=gated, BC=CHANNELS,
        num_warps=2,
    )  # fmt: skip
    return y


def heads(
    x: Tensor, tails: Tensor, slots: Tensor, w: Tensor, heads: int, kv_heads: int, head_stride: int, *, norm: bool
) -> Tensor:
    """Return one step of Canon, [B, (H + 2 J) X] of x's dtype; `tails` is changed in place.

    Args:
        x: Inputs [B, E]: query heads, then keys and values.
        tails: [R, W - 1, C] with C = (H + 2 J) X.
        slots: int64 [B], row of the table of each text.
        w: Filters [C, W].
        heads: Query heads H.
        kv_heads: KV heads J.
        head_stride: Channels from one query head of x to the next.
        norm: True to divide queries and keys by their root mean square.
    """
    x, (c, taps) = _with_unit_stride(x), w.shape
    all_heads = heads + 2 * kv_heads
    y = torch.empty(len(x), c, dtype=x.dtype, device=x.device)
    _heads[(len(x), all_heads)](
        x, tails, slots, w.contiguous(), y, x.stride(0), c, APART=head_stride, H=heads, J=kv_heads, X=c // all_heads, W=taps,
        NORM=norm, BX=triton.next_power_of_2(c // all_heads), num_warps=2,
    )  # fmt: skip
    return y


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
