"""Projections of 16-bit rows on a few float32 directions, without float32 copies of the rows, for all layers at once.

L layers of N rows with D channels, K directions. The forward takes 2 L N D K FLOPs and moves 2 L N D + 4 L N K bytes,
the backward the same: memory bandwidth decides. A float32 factor is split into two 16-bit parts, together 16 bits of
its mantissa, and products accumulate in float32. The result is within 1e-5 of float32's in the norm; gradients are
rounded once, to x's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from ..norms import statistics_dtype


def sketch(
    xs: Sequence[Tensor], s_LKD: Tensor, *, squares: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the projections of each layer's rows, and with `squares` their squared lengths.

    Differentiable in xs.

    Args:
        xs: L >= 1 tensors [N, D] of one float dtype.
        s_LKD: Directions [L, K, D]; "triton" gives them no gradient.
        squares: True to compute the squared lengths.
        backend: "triton" or "torch"; None: `choose_backend`.

    Returns:
        (x sᵀ [L, N, K], ||x||² [L, N], or [L, 0] without `squares`), float32 (float64 for float64).

    Raises:
        ValueError: Shapes disagree.
    """
    if s_LKD.ndim != 3 or len(xs) != len(s_LKD) or any(x.shape != (*xs[0].shape[:1], s_LKD.shape[2]) for x in xs):
        shapes = ", ".join(str(tuple(x.shape)) for x in xs)
        raise ValueError(f"x must be L tensors [N, D] and s [L, K, D], got {shapes} and {tuple(s_LKD.shape)}")
    if (checked_backend(backend, "triton") or choose_backend(xs[0].device, xs[0].dtype).backend) == "triton":
        z_LNK, square_LN = sketch_forward(list(xs), split_precision(s_LKD.float(), xs[0].dtype), squares)
        return z_LNK, square_LN
    return sketch_reference(xs, s_LKD, squares=squares)


def sketch_reference(xs: Sequence[Tensor], s_LKD: Tensor, *, squares: bool = False) -> tuple[Tensor, Tensor]:
    """Return (x sᵀ [L, N, K], ||x||² [L, N], or [L, 0] without `squares`), as `sketch`, in plain torch.

    x is copied to float32 (float64 for float64), the dtype of the result. Differentiable in xs and s.
    """
    x_LND = torch.stack([x.to(statistics_dtype(x.dtype)) for x in xs])
    square_LN = x_LND.square().sum(2) if squares else x_LND.new_zeros(len(xs), 0)
    return x_LND @ s_LKD.to(x_LND.dtype).mT, square_LN


def split_precision(s_LKD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 s as a sum over the first axis of P tensors in `dtype`, [P, L, K, D].

    P = 1 for float32; P = 2, a high and a low part, for 16 bits, whose sum has an error of about 2^-16 in bfloat16.

    Args:
        s_LKD: Directions, float32.
        dtype: float32 or a 16-bit dtype.
    """
    if dtype == torch.float32:
        return s_LKD.unsqueeze(0)
    first = s_LKD.to(dtype)
    return torch.stack([first, (s_LKD - first.float()).to(dtype)])


GRAM_ROWS = 512
"""Rows of the partial products that `gram` sums: one product of 32,768 rows would run on a single core."""


def gram(z: Tensor) -> Tensor:
    """Return the Gram matrices zᵀ z of z [..., N, K], [..., K, K] in z's dtype.

    Neither centred nor divided by N. Differentiable; the backward is one product where autograd's would be two.
    """
    return _Gram.apply(z)


class _Gram(torch.autograd.Function):
    """Autograd function of `gram`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        """Return zᵀ z, summed over blocks of rows.

        A block has gcd(N, 512) rows; where that is below 64, one product takes all N.
        """
        ctx.save_for_backward(z)
        rows = math.gcd(z.shape[-2], GRAM_ROWS)
        if rows < 64:
            return z.mT @ z
        row_blocks = z.unflatten(-2, (-1, rows))
        return (row_blocks.mT @ row_blocks).sum(-3)

    @staticmethod
    def backward(ctx: Any, g_KK: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return z @ (g_KK + g_KK.mT)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype) -> BackendChoice:
    """Return the backend of `sketch`, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher and 16-bit rows. The kernels must pass a self-test on
    small tensors, which the first call for a device and dtype runs.
    """
    device = torch.device(device)
    why = why_no_triton(device, dtype)
    return triton_or_torch(why or self_test_failure("the sketch", _error, device, dtype))


def _error(device: torch.device, dtype: torch.dtype, *, seed: int) -> float:
    """Return the largest relative error of "triton", results and gradient, against "torch" in float32.

    Compares projections, squared lengths and the gradients of the rows of two layers.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = ((2, 300, 96), (2, 64, 96), (2, 300, 64), (2, 300))
    x, s, g, h = (torch.randn(shape, generator=draw).to(device) for shape in shapes)
    results = []
    for backend, kind in (("triton", dtype), ("torch", torch.float32)):
        rows = [layer.to(dtype).to(kind).requires_grad_() for layer in x]
        with torch.enable_grad():
            outputs = sketch(rows, s, squares=True, backend=backend)
            results.append([*outputs, *torch.autograd.grad(outputs, rows, (g, h))])
    return max_relative_error(*results)


def _empty_results(xs: list[Tensor], s_PLKD: Tensor, squares: bool) -> tuple[Tensor, Tensor]:
    layers, rows = len(xs), len(xs[0])
    z_LNK = s_PLKD.new_empty(layers, rows, s_PLKD.shape[2], dtype=torch.float32)
    return z_LNK, s_PLKD.new_empty(layers, rows if squares else 0, dtype=torch.float32)


@torch_op("sketch_forward", _empty_results)
def sketch_forward(xs: list[Tensor], s_PLKD: Tensor, squares: bool) -> tuple[Tensor, Tensor]:
    """Return (x sᵀ [L, N, K], ||x||² [L, N], or [L, 0] without `squares`) in float32 by the Triton kernels.

    Differentiable in xs only.

    Args:
        xs: L tensors [N, D] of one 16-bit dtype, or float32.
        s_PLKD: Directions in xs' dtype, as P parts that add up: 1 for float32, 2 for 16 bits (`split_precision`).
        squares: True to compute the squared lengths.
    """
    z_LNK, square_LN = load_kernels(__package__).forward([x.contiguous() for x in xs], s_PLKD.contiguous(), squares)
    return z_LNK, square_LN


@torch_op(
    "sketch_backward", lambda g, h, xs, *_: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
)
def sketch_backward(g_LNK: Tensor, h_LN: Tensor, xs: list[Tensor], s_PLKD: Tensor, squares: bool) -> list[Tensor]:
    """Return the gradients of xs, g s + 2 h x, L tensors [N, D] in x's dtype, by the Triton kernel.

    Args:
        g_LNK: Gradient of the projections, float32.
        h_LN: Gradient of the squared lengths, float32; ignored without `squares`.
        xs: L tensors [N, D], inputs of the forward.
        s_PLKD: Directions in xs' dtype, as P parts that add up: 1 for float32, 2 for 16 bits (`split_precision`).
        squares: False leaves out the term 2 h x.
    """
    return load_kernels(__package__).backward(
        g_LNK.contiguous(), h_LN.contiguous(), [x.contiguous() for x in xs], s_PLKD.contiguous(), squares
    )


def _keep(ctx: Any, inputs: tuple[list[Tensor], Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    xs, s_PLKD, ctx.squares = inputs
    ctx.save_for_backward(s_PLKD, *xs)


def _gradient(ctx: Any, g_LNK: Tensor, h_LN: Tensor) -> tuple[list[Tensor], None, None]:
    s_PLKD, *xs = ctx.saved_tensors
    return sketch_backward(g_LNK, h_LN, xs, s_PLKD, ctx.squares), None, None


sketch_forward.register_autograd(_gradient, setup_context=_keep)
