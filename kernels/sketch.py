"""Projection of bf16 rows on a few float32 directions, without a float32 copy of the rows.

N rows, C channels, K directions. Forward 2 N C K FLOPs and 2 N C + 4 N K bytes, backward the same: bytes decide. What is
not in 16 bits is cut into two pieces that are, 16 bits of its mantissa, and accumulated in float32: the result is within
1e-5 of float32's in the norm, gradients are rounded once, to x's type.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from .choice import Choice, constant, failure, triton_or_torch, why_no_triton, worst
from .norms import statistics_dtype


def sketch(x_NC: Tensor, s_KC: Tensor, *, backend: str | None = None) -> Tensor:
    """x sᵀ, float32 [N, K] (float64 for float64); x [N, C] of any float type, s [K, C], which takes no gradient.

    `backend` None is what `choose_backend` says. Raises ValueError when the channels disagree.
    """
    if x_NC.ndim != 2 or s_KC.ndim != 2 or x_NC.shape[1] != s_KC.shape[1]:
        raise ValueError(f"x must be [N, C] and s [K, C], got {tuple(x_NC.shape)} and {tuple(s_KC.shape)}")
    if (backend or choose_backend(x_NC.device, x_NC.dtype).backend) == "triton":
        z_NK: Tensor = sketch_forward(x_NC, s_KC.float())
        return z_NK
    return sketch_reference(x_NC, s_KC)


def sketch_reference(x_NC: Tensor, s_KC: Tensor) -> Tensor:
    """The same with a copy of x in the type of the result."""
    wide = statistics_dtype(x_NC.dtype)
    return x_NC.to(wide) @ s_KC.to(wide).t()


def gram(z_NK: Tensor) -> Tensor:
    """zᵀ z of z [..., N, K], [..., K, K]; its gradient is one product where autograd's would be two."""
    found: Tensor = _Gram.apply(z_NK)
    return found


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_NK: Tensor) -> Tensor:
        ctx.save_for_backward(z_NK)
        return z_NK.mT @ z_NK

    @staticmethod
    def backward(ctx: Any, g_KK: Tensor) -> Tensor:
        (z_NK,) = ctx.saved_tensors
        found: Tensor = z_NK @ (g_KK + g_KK.mT)
        return found


@constant
def choose_backend(device: torch.device | str, dtype: torch.dtype) -> Choice:
    """What `sketch` takes for such tensors, tried once on small ones before it is believed."""
    device = torch.device(device)
    why = why_no_triton(device, dtype)
    return triton_or_torch(why or failure("the sketch", _error, device, dtype))


@functools.cache
def _error(device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of the result and of its gradient, against "torch" in float32."""
    draw = torch.Generator().manual_seed(0)
    x, s, g = (torch.randn(shape, generator=draw).to(device) for shape in ((300, 96), (64, 96), (300, 64)))
    found = []
    for backend, kind in (("triton", dtype), ("torch", torch.float32)):
        rows = x.to(dtype).to(kind).requires_grad_()
        with torch.enable_grad():
            z = sketch(rows, s, backend=backend)
            found.append([z, *torch.autograd.grad(z, rows, g)])
    return worst(*found)


def _kernels() -> Any:
    return importlib.import_module(".sketch_triton", __package__)


@torch.library.custom_op("atma::sketch_forward", mutates_args=())
def sketch_forward(x_NC: Tensor, s_KC: Tensor) -> Tensor:
    """x sᵀ, [N, K] in float32."""
    z_NK: Tensor = _kernels().forward(x_NC.contiguous(), s_KC.contiguous())
    return z_NK


@torch.library.custom_op("atma::sketch_backward", mutates_args=())
def sketch_backward(g_NK: Tensor, s_KC: Tensor, dtype: torch.dtype) -> Tensor:
    """g s, [N, C] in `dtype`."""
    dx_NC: Tensor = _kernels().backward(g_NK.contiguous(), s_KC.contiguous(), dtype)
    return dx_NC


@sketch_forward.register_fake
def _(x_NC: Tensor, s_KC: Tensor) -> Tensor:
    return s_KC.new_empty(len(x_NC), len(s_KC))


@sketch_backward.register_fake
def _(g_NK: Tensor, s_KC: Tensor, dtype: torch.dtype) -> Tensor:
    return g_NK.new_empty(len(g_NK), s_KC.shape[1], dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dtype = inputs[0].dtype


def _gradient(ctx: Any, g_NK: Tensor) -> tuple[Tensor, None]:
    return sketch_backward(g_NK, *ctx.saved_tensors, ctx.dtype), None


sketch_forward.register_autograd(_gradient, setup_context=_keep)
