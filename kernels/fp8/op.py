"""Linear layers with 8-bit products, e4m3 in the forward and e5m2 for gradients (docs/reference/mechanisms.md, "Precision").

M rows, K inputs, N outputs. Every row of a factor has a scale of its own, a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import BackendChoice, checked_backend, max_relative_error, self_test_failure, version
from ..gates import squared_relu_gate_forward
from .rows import E4M3, E5M2, MAX_EXPONENTS, MIN_SCALE, gate_backward, quantise, quantise_gradient

MULTIPLE = 16
"""Divisor that inputs and outputs must have for torch's 8-bit product."""


def fp8_linear(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Return x Wᵀ + b, [..., K] -> [..., N] in x's dtype, computed from x and W cast to e4m3 with a scale per row.

    In the backward dx comes from the gradient in e5m2 and W in e4m3, dW from gradient and x in x's own dtype, and db is
    the sum of the gradient. dW and db have the dtypes of W and b.

    Args:
        x: Inputs [..., K].
        w_NK: Weight, of any float dtype.
        b_N: Bias, of any float dtype, or None.
        backend: "scaled_mm", torch's product of 8-bit matrices, or "torch", the same 8-bit numbers multiplied in
            float32; None: `choose_backend`.

    Raises:
        ValueError: Shapes do not fit, or with "scaled_mm" K or N is no multiple of 16.
    """
    _check(x, w_NK, backend)
    backend = checked_backend(backend, "scaled_mm") or choose_backend(x.device).backend
    y_MN: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), w_NK, b_N, backend)
    return y_MN.view(*x.shape[:-1], w_NK.shape[0])


def fp8_gated_linear(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Return `squared_relu_gate` of `fp8_linear`, [..., K] -> [..., N / 2] in x's dtype.

    The forward equals that composition exactly, the backward up to rounding: there the gate's kernel casts the gradient
    that it computes, which would otherwise be read once or twice more.

    Args:
        x: Inputs [..., K].
        w_NK: Weight, of any float dtype; N is even.
        b_N: Bias, of any float dtype, or None.
        backend: "scaled_mm" or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes do not fit, N is odd, or with "scaled_mm" K or N is no multiple of 16.
    """
    _check(x, w_NK, backend)
    if w_NK.shape[0] % 2:
        raise ValueError(f"w must have an even number of rows (two halves), got shape {tuple(w_NK.shape)}")
    backend = checked_backend(backend, "scaled_mm") or choose_backend(x.device).backend
    y_MF: Tensor = _GatedLinear.apply(x.reshape(-1, x.shape[-1]), w_NK, b_N, backend)
    return y_MF.view(*x.shape[:-1], w_NK.shape[0] // 2)


def _check(x: Tensor, w_NK: Tensor, backend: str | None) -> None:
    """Raise ValueError when x and W do not fit, or when the backend is "scaled_mm" and a size is no multiple of 16.

    Args:
        x: Inputs [..., K].
        w_NK: Weight.
        backend: Backend that was asked for, or None for `choose_backend`.
    """
    if w_NK.ndim != 2 or x.shape[-1] != w_NK.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, but w has shape {tuple(w_NK.shape)}")
    backend_name = checked_backend(backend, "scaled_mm") or choose_backend(x.device).backend
    if backend_name == "scaled_mm" and (w_NK.shape[0] % MULTIPLE or w_NK.shape[1] % MULTIPLE):
        raise ValueError(f"rows and columns of w must be multiples of {MULTIPLE}, got shape {tuple(w_NK.shape)}")


def fp8_linear_reference(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """Return the forward of `fp8_linear` in float64, from the definition of the 8-bit types.

    Its gradient is that of an exact linear layer of the rounded factors, not that of `fp8_linear`.
    """
    y = round_to_type(x.double(), E4M3) @ round_to_type(w_NK.double(), E4M3).mT
    return y if b_N is None else y + b_N.double()


def round_to_type(rows: Tensor, kind: torch.dtype) -> Tensor:
    """Round each number to the nearest one of an 8-bit type, ties to even, and return it in the input's dtype.

    Each row is scaled by a power of two of its own first, which takes its largest number to 2^7 .. 2^8 (e4m3) or 2^14
    .. 2^15 (e5m2), and back. The gradient passes through unchanged.

    Args:
        rows: Finite float numbers [..., K].
        kind: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    mantissa, smallest = {E4M3: (3, -6), E5M2: (2, -14)}[kind]
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=MIN_SCALE)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - MAX_EXPONENTS[kind])
    scaled = rows / unit
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**smallest)))
    step = torch.exp2(exponent - mantissa)
    return (torch.round(scaled / step) * step * unit).detach() + (rows - rows.detach())


def _quantised_product(x_MK: Tensor, kind: torch.dtype, w_NK: Tensor, b_N: Tensor | None, backend: str) -> Tensor:
    """Return x Wᵀ + b in x's dtype, from x in the 8-bit type `kind` and W in e4m3, summed in float32."""
    return _multiply_quantised(quantise(x_MK, kind), w_NK, b_N, x_MK.dtype, backend)


def _multiply_quantised(
    rows: tuple[Tensor, Tensor], w_NK: Tensor, b_N: Tensor | None, dtype: torch.dtype, backend: str
) -> Tensor:
    """Return x Wᵀ + b from rows that are quantised already, in `dtype`.

    Args:
        rows: (8-bit numbers [M, K], float32 scales [M, 1]) of x.
        w_NK: Weight, cast to e4m3 here.
        b_N: Bias, or None.
        dtype: Dtype of the result.
        backend: "scaled_mm" or "torch".
    """
    (q_MK, s_M1), (q_NK, s_N1) = rows, quantise(w_NK, E4M3)
    if backend == "scaled_mm":
        bias = None if b_N is None else b_N.to(dtype)
        # private: torch is pinned below 3 for it (pyproject.toml)
        return torch._scaled_mm(
            q_MK, q_NK.t(), scale_a=s_M1, scale_b=s_N1.t(), bias=bias, out_dtype=dtype, use_fast_accum=True
        )
    y_MN = (q_MK.float() @ q_NK.float().t()) * s_M1 * s_N1.t()
    return (y_MN if b_N is None else y_MN + b_N.to(dtype).float()).to(dtype)


class _Linear(torch.autograd.Function):
    """Autograd function of `fp8_linear`.

    It saves x and W unquantised: the backward casts other rows, which have other scales.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, b_N: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.backend, ctx.bias = backend, None if b_N is None else b_N.dtype
        return _quantised_product(x_MK, E4M3, w_NK, b_N, backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of x, w and b, None where not needed, and None for the backend.

        x's has the dtype of the result, the others those of w and b.
        """
        x_MK, w_NK = ctx.saved_tensors
        (g_MN,) = grads
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        dx_MK = (
            _multiply_quantised(quantise_gradient(g_MN), w_NK.t(), None, g_MN.dtype, ctx.backend) if needs_x else None
        )
        dw_NK = (g_MN.t() @ x_MK).to(w_NK.dtype) if needs_w else None
        return dx_MK, dw_NK, g_MN.sum(0).to(ctx.bias) if needs_b else None, None


class _GatedLinear(torch.autograd.Function):
    """Autograd function of `fp8_gated_linear`, whose backward quantises the gradient in the gate's kernel."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, b_N: Tensor | None, backend: str) -> Tensor:
        ag_MN = _quantised_product(x_MK, E4M3, w_NK, b_N, backend)
        ctx.save_for_backward(x_MK, w_NK, ag_MN)
        ctx.backend, ctx.bias = backend, None if b_N is None else b_N.dtype
        return squared_relu_gate_forward(ag_MN)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Return the gradients of x, w and b, None where not needed, and None for the backend.

        x's has the dtype of the result, the others those of w and b.
        """
        x_MK, w_NK, ag_MN = ctx.saved_tensors
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        d_MN, q_MN, s_M1, sums_N = gate_backward(ag_MN, grads[0])
        dx_MK = _multiply_quantised((q_MN, s_M1), w_NK.t(), None, d_MN.dtype, ctx.backend) if needs_x else None
        dw_NK = (d_MN.t() @ x_MK).to(w_NK.dtype) if needs_w else None
        return dx_MK, dw_NK, sums_N.to(ctx.bias) if needs_b else None, None


def why_no_fp8(device: torch.device) -> str | None:
    """Return the reason why torch's 8-bit product cannot run on a device, or None when it can.

    It needs CUDA with compute capability 8.9. There the first call runs a self-test, whose result is cached. The
    setting of `use_torch_backend` is not considered.
    """
    if device.type != "cuda":
        return f"8-bit products need CUDA, the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"compute capability {major}.{minor} is below 8.9"
    return self_test_failure("8-bit products", _error, device)


def choose_backend(device: torch.device | str) -> BackendChoice:
    """Return "scaled_mm" where the GPU has 8-bit products and they pass a self-test, else "torch" with the reason.

    The first call for a GPU runs the self-test.
    """
    why = why_no_fp8(torch.device(device))
    return BackendChoice("scaled_mm", f"torch {version('torch')}") if why is None else BackendChoice("torch", why)


def _error(device: torch.device, *, seed: int) -> float:
    """Return the largest relative error of "scaled_mm" against "torch", both ops and the gradients of x, w and b.

    One case of 67 rows, 48 inputs and 80 outputs, in bfloat16.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=draw).to(device) for shape in ((67, 48), (80, 48), (80,), (67, 80))]
    results = []
    for backend in ("scaled_mm", "torch"):
        x, w, b = (
            tensor.to(kind).requires_grad_()
            for tensor, kind in zip(tensors, (torch.bfloat16, torch.float32, torch.float32), strict=False)
        )
        y, g = fp8_linear(x, w, b, backend=backend), tensors[3].to(torch.bfloat16)
        z = fp8_gated_linear(x, w, b, backend=backend)
        # scaled, so that both losses have similar gradients
        both = torch.autograd.grad(y, (x, w, b), g), torch.autograd.grad(z, (x, w, b), g[:, :40] / 8)
        results.append([y, *both[0], z, *both[1]])
    return max_relative_error(*results)
