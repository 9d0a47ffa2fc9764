"""Rows of a gradient cast to 8 bits where they are made: by a kernel of ours, or by torch's operations.

M rows, N numbers of a row, F = N / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_ops import load_kernels, torch_op
from ..dispatch import BackendChoice, compile_time_constant, failure, triton_or_torch, why_no_triton, worst
from ..gates import squared_relu_gate_backward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_EXPONENTS = {E4M3: 7, E5M2: 14}
"""The largest number of a row becomes 2^TOP to 2^(TOP + 1), below 448 and 57,344, which are the largest of the type."""
MIN_SCALE = 2.0**-100
"""A row with smaller numbers alone is cast as if it had this one."""
MAX_ROW_WIDTH = 16_384
"""Numbers of a row that a program keeps in registers."""
MIN_ROW_WIDTH = 2048
"""Numbers of a row, below which torch's compiler puts the cast into the kernel before it, and reads the row once."""


def quantise(x_MK: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q [M, K] of the 8-bit type, contiguous; s float32 [M, 1], powers of two) with x = q s but for rounding.

    A row with a number that is not finite becomes NaN.
    """
    largest_M1 = x_MK.abs().amax(-1, keepdim=True).float().clamp(min=MIN_SCALE)
    # a float32 without the bits of its mantissa is the power of two below it, on every device the same
    below_M1 = (largest_M1.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale_M1 = below_M1 * 2.0 ** -MAX_EXPONENTS[kind]
    return (x_MK.float() * (1 / scale_M1)).to(kind).contiguous(), scale_M1


def quantise_gradient(g_MN: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise` to e5m2 of a gradient that a kernel of ours has made, which no compiler can cast on its way."""
    if MIN_ROW_WIDTH <= g_MN.shape[1] <= MAX_ROW_WIDTH and choose_backend(g_MN.device, g_MN.dtype).backend == "triton":
        return cast_rows(g_MN)
    return quantise(g_MN, E5M2)


def gate_backward(ag_MN: Tensor, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of y = `squared_relu_gate`(ag): the gradient of ag in its type, `quantise` of that to e5m2 as q and s, its sums over rows in float32 [N]."""
    if ag_MN.shape[1] <= MAX_ROW_WIDTH and choose_backend(ag_MN.device, ag_MN.dtype).backend == "triton":
        return gate_rows(ag_MN, dy_MF)
    return _gate_backward(ag_MN, dy_MF)


def _gate_backward(ag_MN: Tensor, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_MN = squared_relu_gate_backward(ag_MN, dy_MF)
    return d_MN, *quantise(d_MN, E5M2), d_MN.sum(0, dtype=torch.float32)


@compile_time_constant
def choose_backend(device: torch.device, dtype: torch.dtype) -> BackendChoice:
    """ "triton" where it can run and passes its self-test, else "torch"."""
    return triton_or_torch(why_no_triton(device, dtype) or failure("casts to 8 bits", _error, device, dtype))


def _error(device: torch.device, dtype: torch.dtype, *, seed: int) -> float:
    """Largest relative error of what the kernels make, against torch's operations, at odd sizes.

    Of a gradient that the kernel makes, q and s are compared as the numbers that they stand for: where its last bit takes a
    row's largest number over a power of two, s doubles and q halves.
    """
    draw = torch.Generator().manual_seed(seed)
    ag, dy = (torch.randn(1031, width, generator=draw).to(device, dtype) for width in (96, 48))
    results: list[list[Tensor]] = []
    for cast, gated in ((cast_rows(ag), gate_rows(ag, dy)), (quantise(ag, E5M2), _gate_backward(ag, dy))):
        d_MN, q_MN, s_M1, sums_N = gated
        # in float32, in which 8-bit numbers can be compared
        results.append([cast[0].float(), cast[1], d_MN.float(), q_MN.float() * s_M1, sums_N])
    return worst(*results)


def _empty_quantised(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    rows = x_MN.shape[0]
    return x_MN.new_empty(x_MN.shape, dtype=E5M2), x_MN.new_empty((rows, 1), dtype=torch.float32)


@torch_op("fp8_cast_rows", _empty_quantised)
def cast_rows(g_MN: Tensor) -> tuple[Tensor, Tensor]:
    """q and s of `quantise` to e5m2."""
    return load_kernels(__package__).cast(g_MN.contiguous(), E5M2, MIN_SCALE, 2.0 ** -MAX_EXPONENTS[E5M2])


@torch_op(
    "fp8_gate_rows",
    lambda ag, dy: (ag.new_empty(ag.shape), *_empty_quantised(ag), ag.new_empty(ag.shape[1:], dtype=torch.float32)),
)
def gate_rows(ag_MN: Tensor, dy_MF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gate_backward` by the kernel."""
    return load_kernels(__package__).gate_backward(
        ag_MN.contiguous(), dy_MF.contiguous(), E5M2, MIN_SCALE, 2.0 ** -MAX_EXPONENTS[E5M2]
    )
