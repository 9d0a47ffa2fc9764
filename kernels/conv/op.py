"""Depthwise causal convolutions: LFM2's between two gates, and Canon's on the heads of q, k and v.

B batch, T length, C channels, W taps, E = 3 C, H heads, X head size. See docs/reference/mechanisms.md, "Backbone".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..custom_ops import differentiate, empty_like, keep_inputs, load_kernels, torch_op
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

MAX_TAPS = 4
"""Largest number of taps that the kernels take: rows that the backward kernels hold in registers."""


def gated_causal_conv(x_BTE: Tensor, w_CW: Tensor, *, backend: str | None = None) -> Tensor:
    """Return c conv(b u) of x = [b | c | u], [B, T, C] of x's dtype; conv as in `causal_conv`, without residual.

    conv(n)_t = sum_j w[:, j] n_{t-W+1+j}, depthwise, with zeros before the start. Differentiable in x and w.

    Args:
        x_BTE: [B, T, 3 C], the three parts side by side in that order.
        w_CW: Filters, of x's dtype; w[:, -1] multiplies the current token.
        backend: "triton" (at most 4 taps) or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Channels or dtypes disagree, or "triton" is given more than 4 taps.
    """
    if x_BTE.ndim != 3 or w_CW.ndim != 2 or x_BTE.shape[2] != 3 * w_CW.shape[0]:
        raise ValueError(f"x must be [B, T, 3 C] and w [C, W], got {tuple(x_BTE.shape)} and {tuple(w_CW.shape)}")
    if _takes_kernels(x_BTE, w_CW, backend):
        return gated_conv_forward(x_BTE, w_CW)
    b, c, u = x_BTE.chunk(3, -1)
    return c * causal_conv(b * u, w_CW)


def canon(x_BTHX: Tensor, w_CW: Tensor, *, norm: bool, backend: str | None = None) -> Tensor:
    """Return n + conv(n) over the C = H X flattened heads, [B, T, H, X] of x's dtype; conv as in `causal_conv`.

    n is `rms_norm(x)` over X without a weight with `norm`, else x itself. conv(n)_t = sum_j w[:, j] n_{t-W+1+j},
    depthwise, with zeros before the start. Differentiable in x and w.

    Args:
        x_BTHX: Queries, keys or values.
        w_CW: Filters [H X, W], of x's dtype; w[:, -1] multiplies the current token.
        norm: True to norm x before the convolution.
        backend: "triton" (at most 4 taps) or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Channels or dtypes disagree, or "triton" is given more than 4 taps.
    """
    if x_BTHX.ndim != 4 or x_BTHX.shape[2] * x_BTHX.shape[3] != w_CW.shape[0]:
        raise ValueError(f"x must be [B, T, H, X] and w [H X, W], got {tuple(x_BTHX.shape)} and {tuple(w_CW.shape)}")
    if _takes_kernels(x_BTHX, w_CW, backend):
        return canon_forward(x_BTHX, w_CW, norm)
    n_BTHX = rms_norm(x_BTHX) if norm else x_BTHX
    return causal_conv(n_BTHX.flatten(2), w_CW, residual=True).view_as(x_BTHX)


def causal_conv(x_BTC: Tensor, w_CW: Tensor, residual: bool = False) -> Tensor:
    """Return the depthwise causal convolution of x in plain torch, [B, T, C] of x's dtype.

    y_t = sum_j w[:, j] x_{t-W+1+j} with zeros before the start; w[:, -1] multiplies the current token. With `residual`,
    x_t is added. Sums are rounded to x's dtype after each tap. Differentiable.

    Args:
        x_BTC: Inputs.
        w_CW: Filters, of x's dtype.
        residual: True to add the input.

    Raises:
        ValueError: Channels or dtypes disagree.
    """
    _check(x_BTC, w_CW)
    t, taps = x_BTC.shape[1], w_CW.shape[1]
    w_WC = w_CW.t()
    y_BTC = x_BTC * (w_WC[-1] + 1 if residual else w_WC[-1])
    for back in range(1, min(taps, t)):
        y_BTC[:, back:].addcmul_(x_BTC[:, : t - back], w_WC[taps - 1 - back])
    return y_BTC


def causal_conv_reference(x_BTC: Tensor, w_CW: Tensor, residual: bool = False) -> Tensor:
    """Return `causal_conv` of x, computed by torch's grouped convolution.

    y_t = sum_j w[:, j] x_{t-W+1+j}, depthwise and causal, with zeros before the start. [B, T, C] of x's dtype.

    Args:
        x_BTC: Inputs.
        w_CW: Filters, of x's dtype; w[:, -1] multiplies the current token.
        residual: True to add the input.

    Raises:
        ValueError: Channels or dtypes disagree.
    """
    _check(x_BTC, w_CW)
    padded_BCT = functional.pad(x_BTC.transpose(1, 2), (w_CW.shape[1] - 1, 0))
    y_BTC = functional.conv1d(padded_BCT, w_CW.unsqueeze(1), groups=x_BTC.shape[2]).transpose(1, 2)
    return y_BTC + x_BTC if residual else y_BTC


def _check(x_BTC: Tensor, w_CW: Tensor) -> None:
    if x_BTC.ndim != 3 or w_CW.ndim != 2 or x_BTC.shape[2] != w_CW.shape[0]:
        raise ValueError(f"x must be [B, T, C] and w [C, W], got {tuple(x_BTC.shape)} and {tuple(w_CW.shape)}")
    _check_types(x_BTC, w_CW)


def _check_types(x: Tensor, w_CW: Tensor) -> None:
    if x.dtype != w_CW.dtype:
        raise ValueError(f"x has type {x.dtype}, but w has type {w_CW.dtype}")


def _takes_kernels(x: Tensor, w_CW: Tensor, backend: str | None) -> bool:
    """Return True when the Triton kernels run, False for plain torch.

    Args:
        x: Input, whose device and dtype decide without `backend`.
        w_CW: Filters.
        backend: Backend that was asked for, or None for `choose_backend`.

    Raises:
        ValueError: The kernels were chosen, but dtypes disagree or the filter has more than 4 taps.
    """
    taps = w_CW.shape[1]
    if (checked_backend(backend, "triton") or choose_backend(x.device, x.dtype, taps).backend) != "triton":
        return False
    _check_types(x, w_CW)
    if taps > MAX_TAPS:
        raise ValueError(f"the kernels take at most {MAX_TAPS} taps, got {taps}; use backend torch")
    return True


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, taps: int) -> BackendChoice:
    """Return the backend of `gated_causal_conv` and `canon`, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher, 16-bit activations and at most 4 taps; else it is
    "torch". The kernels must pass a self-test on small tensors, which the first call for a device and dtype runs.
    """
    device = torch.device(device)
    why = why_no_triton(device, dtype)
    if why is None and taps > MAX_TAPS:
        why = f"the kernels take at most {MAX_TAPS} taps, got {taps}"
    return triton_or_torch(why or self_test_failure("the convolutions", _error, device, dtype))


def _error(device: torch.device, dtype: torch.dtype, *, seed: int) -> float:
    """Return the largest relative error of "triton", results and gradients of both ops, against "torch" in float32.

    The gated convolution has 3 taps and 16 channels, Canon 4 taps, 48 channels and the norm.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = [(2, 37, 48), (16, 3), (2, 37, 2, 24), (48, 4)]
    tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    results = []
    for backend, kind in (("triton", dtype), ("torch", torch.float32)):
        x, w, heads, filters = (tensor.detach().to(kind).requires_grad_() for tensor in tensors)
        with torch.enable_grad():
            y = gated_causal_conv(x, w, backend=backend)
            z = canon(heads, filters, norm=True, backend=backend)
            loss = (y.float() * tensors[0][..., :16].float()).sum() + (z.float() * tensors[2].float().cos()).sum()
            results.append([y, z, *torch.autograd.grad(loss, (x, w, heads, filters))])
    return max_relative_error(*results)


@torch_op("gated_conv_forward", lambda x, w: x.new_empty(*x.shape[:2], w.shape[0]))
def gated_conv_forward(x_BTE: Tensor, w_CW: Tensor) -> Tensor:
    """Return c conv(b u) of x = [b | c | u] by the Triton kernel, [B, T, C]."""
    return load_kernels(__package__).gated_forward(x_BTE.contiguous(), w_CW.contiguous())


@torch_op("gated_conv_backward", lambda g, x, w: empty_like(x, w))
def gated_conv_backward(g_BTC: Tensor, x_BTE: Tensor, w_CW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and w from g, that of the result, by the Triton kernel."""
    return load_kernels(__package__).gated_backward(g_BTC.contiguous(), x_BTE.contiguous(), w_CW.contiguous())


@torch_op("canon_forward", lambda x, w, norm: x.new_empty(x.shape))
def canon_forward(x_BTHX: Tensor, w_CW: Tensor, norm: bool) -> Tensor:
    """Return n + conv(n) by the Triton kernel, contiguous [B, T, H, X], with n = x or, with `norm`, its RMS norm."""
    return load_kernels(__package__).canon_forward(_with_row_layout(x_BTHX), w_CW.contiguous(), norm)


@torch_op("canon_backward", lambda g, x, w, norm: empty_like(x, w))
def canon_backward(g_BTHX: Tensor, x_BTHX: Tensor, w_CW: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (contiguous) and w from g, that of the result, by the Triton kernel."""
    args = (g_BTHX.contiguous(), _with_row_layout(x_BTHX), w_CW.contiguous())
    return load_kernels(__package__).canon_backward(*args, norm)


def _with_row_layout(x_BTHX: Tensor) -> Tensor:
    """Return x itself if its layout suits the Canon kernels, else a contiguous copy.

    It suits when heads have no gaps inside and tokens have one stride throughout the batch.
    """
    fits = x_BTHX.stride(3) == 1 and x_BTHX.stride(0) == x_BTHX.shape[1] * x_BTHX.stride(1)
    return x_BTHX if fits else x_BTHX.contiguous()


differentiate(gated_conv_forward, gated_conv_backward, keep_inputs(2, 1))
differentiate(canon_forward, canon_backward, keep_inputs(2, 1))
