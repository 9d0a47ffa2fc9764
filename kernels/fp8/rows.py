"""Casts of rows to 8 bits, by a Triton kernel or by torch's operations.

M rows, N numbers of a row, F = N / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op
from ..dispatch import (
    BackendChoice,
    compile_time_constant,
    max_relative_error,
    self_test_failure,
    triton_or_torch,
    why_no_triton,
)
from ..gates import squared_relu_gate_backward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_EXPONENTS = {E4M3: 7, E5M2: 14}
"""Exponent e by type: the largest number of a row is scaled to 2^e .. 2^(e + 1).

That is below the type's maximum of 448 or 57,344.
"""
MIN_SCALE = 2.0**-100
"""Lower bound of a row's largest absolute number in the choice of its scale."""
MAX_ROW_WIDTH = 16_384
"""Largest number of elements of a row that a program holds in registers."""
MIN_ROW_WIDTH = 2048
"""Row width below which torch's compiler fuses the cast into the kernel before it, and reads the row once."""


def quantise(x_MK: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (q, s) with x = q s up to rounding: 8-bit numbers and one scale per row.

    The scale takes a row's largest number to 2^e .. 2^(e + 1), with e of `MAX_EXPONENTS`. For a row with a number that
    is not finite, q s is NaN throughout; a row of zeros stays zero.

    Args:
        x_MK: Rows of any float dtype.
        kind: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        q [M, K] of the 8-bit type, contiguous; s float32 [M, 1], powers of two.
    """
    largest_M1 = x_MK.abs().amax(-1, keepdim=True).float().clamp(min=MIN_SCALE)
    # a float32 without its mantissa bits is the power of two below it, the same on every device
    below_M1 = (largest_M1.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale_M1 = below_M1 * 2.0 ** -MAX_EXPONENTS[kind]
    return (x_MK.float() * (1 / scale_M1)).to(kind).contiguous(), scale_M1


def quantise_gradient(g_MN: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantise` of a gradient to e5m2: (q [M, N] contiguous, s float32 [M, 1]).

    Our kernel does the cast for rows of 2048 to 16,384 numbers where it is available, with the same result: gradients
    come out of kernels into which no compiler can fuse it.
    """
    if MIN_ROW_WIDTH <= g_MN.shape[1] <= MAX_ROW_WIDTH and choose_backend(g_MN.device, g_MN.dtype).backend == "triton":
        return cast_rows(g_MN)
    return quantise(g_MN, E5M2)


def gate_backward(ag_MN: Tensor, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the input of `squared_relu_gate`, also quantised to e5m2, and its sums over rows.

    Our kernel does it for rows of up to 16,384 numbers where it is available.

    Args:
        ag_MN: Input [a | g] of the gate.
        dy_MF: Gradient of the gate's result, F = N / 2.

    Returns:
        (d [M, N] in ag's dtype, q [M, N] in e5m2 and s float32 [M, 1] with d = q s up to rounding, sum of d over the M
        rows, float32 [N]).
    """
    if ag_MN.shape[1] <= MAX_ROW_WIDTH and choose_backend(ag_MN.device, ag_MN.dtype).backend == "triton":
        return gate_rows(ag_MN, dy_MF)
    return _gate_backward(ag_MN, dy_MF)


def _gate_backward(ag_MN: Tensor, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_MN = squared_relu_gate_backward(ag_MN, dy_MF)
    return d_MN, *quantise(d_MN, E5M2), d_MN.sum(0, dtype=torch.float32)


@compile_time_constant
def choose_backend(device: torch.device, dtype: torch.dtype) -> BackendChoice:
    """Return the backend of the casts: "triton" where it can run and passes its self-test, else "torch".

    With the reason. Widths of rows are not considered; the callers do that.
    """
    return triton_or_torch(why_no_triton(device, dtype) or self_test_failure("casts to 8 bits", _error, device, dtype))


def _error(device: torch.device, dtype: torch.dtype, *, seed: int) -> float:
    """Return the largest relative error of the kernels' casts and gradients, against torch's operations.

    1031 rows of 96 numbers. Of a gradient that the kernel computes, q and s are compared as the numbers that they stand
    for: where its last bit takes a row's largest number over a power of two, s doubles and q halves.
    """
    draw = torch.Generator().manual_seed(seed)
    ag, dy = (torch.randn(1031, width, generator=draw).to(device, dtype) for width in (96, 48))
    results: list[list[Tensor]] = []
    for cast, gated in ((cast_rows(ag), gate_rows(ag, dy)), (quantise(ag, E5M2), _gate_backward(ag, dy))):
        d_MN, q_MN, s_M1, sums_N = gated
        # in float32, because 8-bit numbers cannot be compared
        results.append([cast[0].float(), cast[1], d_MN.float(), q_MN.float() * s_M1, sums_N])
    return max_relative_error(*results)


def _empty_quantised(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    rows = x_MN.shape[0]
    return x_MN.new_empty(x_MN.shape, dtype=E5M2), x_MN.new_empty((rows, 1), dtype=torch.float32)


@torch_op("fp8_cast_rows", _empty_quantised)
def cast_rows(g_MN: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantise` of contiguous or strided rows to e5m2 by the Triton kernel: (q [M, N], s float32 [M, 1])."""
    return load_kernels(__package__).cast(g_MN.contiguous(), E5M2, MIN_SCALE, 2.0 ** -MAX_EXPONENTS[E5M2])


@torch_op(
    "fp8_gate_rows",
    lambda ag, dy: (ag.new_empty(ag.shape), *_empty_quantised(ag), ag.new_empty(ag.shape[1:], dtype=torch.float32)),
)
def gate_rows(ag_MN: Tensor, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `gate_backward` by the Triton kernel: (d [M, N], q [M, N], s [M, 1], sums [N]).

    Inputs are made contiguous.
    """
    return load_kernels(__package__).gate_backward(
        ag_MN.contiguous(), dy_MF.contiguous(), E5M2, MIN_SCALE, 2.0 ** -MAX_EXPONENTS[E5M2]
    )
