"""Projection of one row, with the norm before it and the gate or sum after it in one pass over its matrix.

B texts, D inputs, E outputs, C channels, W taps, R rows of the table of convolution tails. See docs/explanation/decoding.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..conv_step.op import gated_conv_step
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
from ..gates import squared_relu_gate, swish_gate
from ..norms import rms_norm

MAX_ROWS = 1
"""Largest number of rows that the kernel takes.

With two or more, matrix units, cuBLAS and the compiler's fusions around it are faster (docs/experiments/speed.md, "Decoding").
"""
GATES = {"none": 0, "relu2": 1, "swiglu": 2}


def row_linear(
    x_BD: Tensor, w_ED: Tensor, bias_E: Tensor | None = None, *, norm_D: Tensor | None = None, eps: float = 0.0,
    gate: str = "none", under_BE: Tensor | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return under + gate(rms_norm(x) wᵀ + bias), [B, E] of x's dtype, or [B, E / 2] with a gate.

    Norm, bias, gate and `under` apply only where they are given. The Triton kernel has no gradient.

    Args:
        x_BD: Rows.
        w_ED: Weight, of x's dtype.
        bias_E: Bias, or None.
        norm_D: Weight of the RMS norm, or None for no norm.
        eps: Epsilon of the norm, added to the mean square.
        gate: "none", or of outputs [a | g] "relu2", g relu(a)^2, or "swiglu", g silu(a). Another name counts as
            "swiglu" in torch and raises KeyError with "triton".
        under_BE: Residual that is added to the result, of the result's shape and x's dtype, or None.
        backend: "triton" (one row only) or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes of x and w disagree, or "triton" is given several rows.
    """
    if x_BD.ndim != 2 or w_ED.ndim != 2 or x_BD.shape[1] != w_ED.shape[1] or x_BD.dtype != w_ED.dtype:
        raise ValueError(
            f"x must be [B, D] and w [E, D] of one type, got {tuple(x_BD.shape)} {x_BD.dtype} and {tuple(w_ED.shape)} {w_ED.dtype}"
        )
    if _uses_kernel(x_BD, backend):
        return fused(x_BD, w_ED, bias_E, norm_D, eps, GATES[gate], under_BE)
    y = functional.linear(x_BD if norm_D is None else rms_norm(x_BD, norm_D, eps), w_ED, bias_E)
    if gate != "none":
        y = squared_relu_gate(y) if gate == "relu2" else swish_gate(y)
    return y if under_BE is None else under_BE + y


def row_conv_step(
    x_BD: Tensor, w_ED: Tensor, bias_E: Tensor | None, norm_D: Tensor, eps: float, tails_RWC: Tensor, slots_B: Tensor,
    filters_CW: Tensor, *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `gated_conv_step` of rms_norm(x) wᵀ + bias, [B, C] of x's dtype; the tails are changed in place.

    With [b | c | u] = rms_norm(x) wᵀ + bias that is c conv(b u), the convolution continued from the tails. These are
    the first operations of a block with a convolution. No gradients.

    Args:
        x_BD: Rows.
        w_ED: Weight, E = 3 C, of x's dtype; its outputs are [b | c | u].
        bias_E: Bias, or None.
        norm_D: Weight of the RMS norm.
        eps: Epsilon of the norm.
        tails_RWC: Last W - 1 inputs b u of the convolution of each text, oldest first; changed in place.
        slots_B: int64, row of `tails_RWC` of each text; rows named twice end undefined.
        filters_CW: Filters of the convolution.
        backend: "triton" (one row only, shapes not checked) or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree (in torch), or "triton" is given several rows.
    """
    if _uses_kernel(x_BD, backend):
        return fused_conv(x_BD, w_ED, bias_E, norm_D, eps, tails_RWC, slots_B, filters_CW)
    x_BE = row_linear(x_BD, w_ED, bias_E, norm_D=norm_D, eps=eps, backend=backend)
    return gated_conv_step(x_BE, tails_RWC, slots_B, filters_CW, backend=backend)


def _uses_kernel(x_BD: Tensor, backend: str | None) -> bool:
    """Return True when the Triton kernel runs, False for torch.

    Args:
        x_BD: Rows.
        backend: Backend that was asked for, or None for `choose_backend`.

    Raises:
        ValueError: "triton" was asked for with several rows.
    """
    backend = checked_backend(backend, "triton") or choose_backend(x_BD.device, x_BD.dtype, len(x_BD)).backend
    if backend == "triton" and len(x_BD) > MAX_ROWS:
        raise ValueError(f"the kernel supports a single row, got {len(x_BD)}; use backend torch")
    return backend == "triton"


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, rows: int) -> BackendChoice:
    """Return the backend of `row_linear` and `row_conv_step`: "triton" for one row where it can run, else "torch".

    "triton" needs CUDA with compute capability 8.0 or higher and 16-bit rows. The kernels must pass a self-test, which
    the first call for a device and dtype runs.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the rows.
        rows: Number of rows B.
    """
    if rows > MAX_ROWS:
        return BackendChoice("torch", f"the kernel supports a single row, got {rows}")
    device = torch.device(device)
    return triton_or_torch(
        why_no_triton(device, dtype) or self_test_failure("the product of one row", _error, device, dtype)
    )


def _error(device: torch.device, dtype: torch.dtype, *, seed: int) -> float:
    """Return the largest relative error of "triton", outputs and tails, against "torch" in float32.

    One row of 600 inputs: two convolution steps, both gates, and a product with a residual.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = (1, 600), (150, 600), (150,), (600,), (1, 150), (50, 3)
    x, w, bias, norm, under, filters = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    results = []
    slots = torch.tensor([2], device=device)
    for name, kind in (("triton", dtype), ("torch", torch.float32)):
        tails = torch.zeros(6, 2, 50, dtype=kind, device=device)
        linear_args: Any = x.to(kind), w.to(kind), bias.to(kind)
        conv = linear_args[0], linear_args[1], None, norm.float(), 1e-6, tails, slots, filters.to(kind)
        parts = [part for _ in range(2) for part in (row_conv_step(*conv, backend=name), tails[slots].clone())]
        for gate in ("relu2", "swiglu"):
            parts.append(row_linear(*linear_args, norm_D=norm.float(), eps=1e-6, gate=gate, backend=name))
        parts.append(row_linear(*linear_args, under_BE=under.to(kind), backend=name))
        results.append(parts)
    return max_relative_error(*results)


def _empty_outputs(x_BD: Tensor, w_ED: Tensor, bias: Any, norm: Any, eps: float, gate: int, under: Any) -> Tensor:
    return x_BD.new_empty(x_BD.shape[0], w_ED.shape[0] // (2 if gate else 1))


@torch_op("row_linear", _empty_outputs)
def fused(
    x_BD: Tensor, w_ED: Tensor, bias_E: Tensor | None, norm_D: Tensor | None, eps: float, gate: int,
    under_BE: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return `row_linear` of one row by the Triton kernel, [1, E] or [1, E / 2] with a gate; no gradient.

    Args:
        x_BD: The row [1, D].
        w_ED: Weight.
        bias_E: Bias, or None.
        norm_D: Weight of the RMS norm, or None for no norm.
        eps: Epsilon of the norm.
        gate: 0 none, 1 g relu(a)^2 ("relu2"), 2 g silu(a) ("swiglu"), of outputs [a | g].
        under_BE: Residual, or None.
    """
    return load_kernels(__package__).product(x_BD, w_ED, bias_E, norm_D, eps, gate, under_BE)


@torch_op("row_conv_step", lambda x, *rest: x.new_empty(x.shape[0], rest[-1].shape[0]), ("tails_RWC",))
def fused_conv(
    x_BD: Tensor, w_ED: Tensor, bias_E: Tensor | None, norm_D: Tensor, eps: float, tails_RWC: Tensor, slots_B: Tensor,
    filters_CW: Tensor,
) -> Tensor:  # fmt: skip
    """Return `row_conv_step` of one row by the Triton kernel, [1, C]; `tails_RWC` is changed in place.

    c conv(b u) with [b | c | u] = rms_norm(x) wᵀ + bias; b u is appended to the row `slots_B` [1] of the tails. No
    gradients.
    """
    return load_kernels(__package__).conv_step(x_BD, w_ED, bias_E, norm_D, eps, tails_RWC, slots_B, filters_CW)
