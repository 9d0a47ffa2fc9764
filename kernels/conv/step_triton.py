"""A causal convolution one token at a time, as one pass over its tails (docs/decoding.md). B texts, C channels, W taps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 256
"""Channels of a program."""


@triton.jit
def _conv(
    x_ptr, tails_ptr, slots_ptr, w_ptr, y_ptr, C, W: tl.constexpr, RESIDUAL: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    tail_ptr = tails_ptr + tl.load(slots_ptr + b) * ((W - 1) * C) + c
    x = tl.load(x_ptr + b * C + c, mask=inside, other=0.0)
    y = x.to(tl.float32) * tl.load(w_ptr + c * W + (W - 1), mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += x.to(tl.float32)
    for tap in tl.static_range(W - 1):
        earlier = tl.load(tail_ptr + tap * C, mask=inside, other=0.0)
        y += earlier.to(tl.float32) * tl.load(w_ptr + c * W + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(tail_ptr + (tap - 1) * C, earlier, mask=inside)
    if W > 1:
        tl.store(tail_ptr + (W - 2) * C, x, mask=inside)
    tl.store(y_ptr + b * C + c, y.to(y_ptr.dtype.element_ty), mask=inside)


def step(x: Tensor, tails: Tensor, slots: Tensor, w: Tensor, *, residual: bool) -> Tensor:
    """As `conv_step`."""
    b, c = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _conv[(b, triton.cdiv(c, CHANNELS))](
        x.contiguous(), tails, slots, w.contiguous(), y, c, W=w.shape[1], RESIDUAL=residual, BC=CHANNELS, num_warps=2
    )  # fmt: skip
    return y
