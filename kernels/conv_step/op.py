"""Causal convolutions one token at a time, from the inputs before it (docs/explanation/decoding.md).

B texts, C channels, W taps, E channels of x, H query heads, J KV heads, X head size, R rows of a table of texts. The
table `tails` [R, W - 1, C] holds the last W - 1 inputs of each text, zeros before its start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op
from ..dispatch import (
    BackendChoice,
    checked_backend,
    compile_time_constant,
    max_relative_error,
    self_test_failure,
    triton_or_torch,
    why_no_triton,
)
from ..norms import rms_norm


def conv_step(
    x_BC: Tensor, tails_RWC: Tensor, slots_B: Tensor, w_CW: Tensor, residual: bool = False, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `causal_conv` at the next token of each text, [B, C] of x's dtype, and append x to the tails in place.

    The oldest input of a tail is dropped. No gradients.

    Args:
        x_BC: Inputs of the new tokens.
        tails_RWC: [R, W - 1, C] of x's dtype, last W - 1 inputs of each text, oldest first, zeros before its start;
            changed in place.
        slots_B: int64, row of the table of each text; rows named twice end undefined.
        w_CW: Filters, of x's dtype; w[:, -1] multiplies the new token.
        residual: True to add the input.
        backend: "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree.
    """
    taps = w_CW.shape[1]
    if x_BC.ndim != 2 or tails_RWC.shape[1:] != (taps - 1, x_BC.shape[1]) or w_CW.shape[0] != x_BC.shape[1]:
        raise ValueError(
            f"x must be [B, C], w [C, W] and the tails [R, W - 1, C], got {tuple(x_BC.shape)}, {tuple(w_CW.shape)}, {tuple(tails_RWC.shape)}"
        )
    if (checked_backend(backend, "triton") or choose_backend(x_BC.device, x_BC.dtype).backend) == "triton":
        return plain_step(x_BC, tails_RWC, slots_B, w_CW, residual)
    seen_BWC = torch.cat([tails_RWC[slots_B], x_BC[:, None]], 1)
    tails_RWC.index_copy_(0, slots_B, seen_BWC[:, 1:])
    w_WC = w_CW.t()
    y_BC = x_BC * (w_WC[-1] + 1 if residual else w_WC[-1])
    for back in range(1, taps):
        y_BC.addcmul_(seen_BWC[:, taps - 1 - back], w_WC[taps - 1 - back])
    return y_BC


def gated_conv_step(
    x_BE: Tensor, tails_RWC: Tensor, slots_B: Tensor, w_CW: Tensor, *, backend: str | None = None
) -> Tensor:
    """Return `gated_causal_conv` at the next token of each text, c conv(b u), [B, C] of x's dtype.

    Appends b u to the tails in place. No gradients.

    Args:
        x_BE: Inputs [b | c | u] of the new tokens, E = 3 C.
        tails_RWC: [R, W - 1, C] of x's dtype, last W - 1 products b u of each text, oldest first; changed in place.
        slots_B: int64, row of the table of each text; rows named twice end undefined.
        w_CW: Filters, of x's dtype; w[:, -1] multiplies the new token.
        backend: "triton", which checks no shapes or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree, in torch.
    """
    if (checked_backend(backend, "triton") or choose_backend(x_BE.device, x_BE.dtype).backend) == "triton":
        return gated_step(x_BE, tails_RWC, slots_B, w_CW)
    b, c, u = x_BE.chunk(3, -1)
    return c * conv_step(b * u, tails_RWC, slots_B, w_CW, backend=backend)


def canon_step(
    x_BE: Tensor, tails_RWC: Tensor, slots_B: Tensor, w_CW: Tensor, heads: tuple[int, int, int], *, norm: bool,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `canon` at the next token of q, k and v side by side, [B, C] of x's dtype with C = (H + 2 J) X.

    The result holds the H query heads, J heads of keys and J of values without gaps. With `norm` queries and keys are
    normed over X first, values never. No gradients.

    Args:
        x_BE: Inputs of the new tokens: H query heads of X channels, `head_stride` channels apart, then J heads of keys
            and J of values. Channels between query heads and behind the values are not read.
        tails_RWC: [R, W - 1, C], last W - 1 inputs of each text, oldest first, normed with `norm`; changed in place.
        slots_B: int64, row of the table of each text; rows named twice end undefined.
        w_CW: Filters, of x's dtype; X is their number of channels over H + 2 J.
        heads: (H, J, head_stride).
        norm: True to divide queries and keys by their root mean square.
        backend: "triton" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree.
    """
    h, j, head_stride = heads
    x = w_CW.shape[0] // (h + 2 * j)
    if w_CW.shape[0] != (h + 2 * j) * x or x_BE.shape[1] < h * head_stride + 2 * j * x or head_stride < x:
        raise ValueError(
            f"x has {x_BE.shape[1]} channels and w has {w_CW.shape[0]}, which do not fit {h} query heads at stride {head_stride} and {j} KV heads"
        )
    if (checked_backend(backend, "triton") or choose_backend(x_BE.device, x_BE.dtype).backend) == "triton":
        return heads_step(x_BE, tails_RWC, slots_B, w_CW, h, j, head_stride, norm)
    q, k, v, _ = x_BE.split([h * head_stride, j * x, j * x, x_BE.shape[1] - h * head_stride - 2 * j * x], -1)
    q, k, v = q.unflatten(-1, (h, head_stride))[..., :x], k.unflatten(-1, (j, x)), v.unflatten(-1, (j, x))
    if norm:
        q, k = rms_norm(q), rms_norm(k)
    return conv_step(torch.cat([q, k, v], 1).flatten(1), tails_RWC, slots_B, w_CW, residual=True, backend=backend)


def last_inputs(x_TC: Tensor, taps: int) -> Tensor:
    """Return the last W - 1 inputs of a text, a new tensor [W - 1, C], oldest first, with zeros before its start.

    Args:
        x_TC: Inputs of one text; T may be 0.
        taps: Taps W of the filter.
    """
    tail_length = taps - 1
    last = x_TC[max(0, len(x_TC) - tail_length) :]
    return torch.cat([last.new_zeros(tail_length - len(last), x_TC.shape[1]), last])


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype) -> BackendChoice:
    """Return the backend of the three convolution steps, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher and 16-bit activations. The kernels must pass a self-test,
    which the first call for a device and dtype runs.
    """
    device = torch.device(device)
    return triton_or_torch(
        why_no_triton(device, dtype) or self_test_failure("the convolution step", _error, device, dtype)
    )


def _error(device: torch.device, dtype: torch.dtype, *, seed: int) -> float:
    """Return the largest relative error of a few outputs, and of the tails after them, against "torch" in float32.

    Three tokens of two texts for each of the three steps, from tails of zeros.
    """
    draw = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(shape, generator=draw).to(device, dtype) for shape in ((3, 2, 900), (300, 4)))
    slots = torch.tensor([2, 0], device=device)
    results = []
    for name, kind in (("triton", dtype), ("torch", torch.float32)):
        plain, gated, heads = (torch.zeros(3, 3, 300, dtype=kind, device=device) for _ in range(3))
        parts = []
        for row in x.to(kind):
            parts.append(conv_step(row[:, :300], plain, slots, w.to(kind), residual=True, backend=name))
            parts.append(gated_conv_step(row, gated, slots, w.to(kind), backend=name))
            parts.append(canon_step(row, heads, slots, w.to(kind), (3, 1, 120), norm=True, backend=name))
        results.append([*parts, plain[slots], gated[slots], heads[slots]])
    return max_relative_error(*results)


def _of_channels(x: Tensor, tails: Tensor, slots: Tensor, w: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch_op("conv_step", lambda x, *_: x.new_empty(x.shape), ("tails_RWC",))
def plain_step(x_BC: Tensor, tails_RWC: Tensor, slots_B: Tensor, w_CW: Tensor, residual: bool) -> Tensor:
    """Return `conv_step` by the Triton kernel; `tails_RWC` is changed in place."""
    return load_kernels(__package__).step(x_BC, tails_RWC, slots_B, w_CW, residual=residual)


@torch_op("gated_conv_step", _of_channels, ("tails_RWC",))
def gated_step(x_BE: Tensor, tails_RWC: Tensor, slots_B: Tensor, w_CW: Tensor) -> Tensor:
    """Return `gated_conv_step` by the Triton kernel; `tails_RWC` is changed in place."""
    return load_kernels(__package__).gated(x_BE, tails_RWC, slots_B, w_CW)


@torch_op("canon_step", _of_channels, ("tails_RWC",))
def heads_step(
    x_BE: Tensor,
    tails_RWC: Tensor,
    slots_B: Tensor,
    w_CW: Tensor,
    heads: int,
    kv_heads: int,
    head_stride: int,
    norm: bool,
) -> Tensor:
    """Return `canon_step` by the Triton kernel, [B, C]; `tails_RWC` is changed in place.

    Args:
        x_BE: Inputs of the new tokens: query heads, then keys and values.
        tails_RWC: Last W - 1 inputs of each text.
        slots_B: int64, row of the table of each text.
        w_CW: Filters.
        heads: Query heads H.
        kv_heads: KV heads J.
        head_stride: Channels from one query head of x to the next.
        norm: True to divide queries and keys by their root mean square.
    """
    return load_kernels(__package__).heads(x_BE, tails_RWC, slots_B, w_CW, heads, kv_heads, head_stride, norm=norm)
