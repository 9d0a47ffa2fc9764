"""Triton kernels that cast gradients to 8 bits while they compute them (docs/reference/mechanisms.md, "Precision").

M rows, N numbers of a row, F = N / 2. A row is read once and stays in registers until its largest number is known.
Bytes per row with 16-bit numbers: the cast alone reads 2 N and writes N; the gate's backward reads 3 N and writes 3 N,
where one that casts afterwards reads 2 N to 4 N more. Sums over rows are stored per program and added up afterwards, so
that every number repeats bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264
"""Programs of the gate's backward, each with sums of its own: two per multiprocessor of a large Hopper."""


@triton.jit
def _scale(largest, LEAST: tl.constexpr, UNIT: tl.constexpr):
    """Return the power of two below the largest number of a row, times UNIT, float32; the same as in `quantise`."""
    bits = tl.maximum(largest, LEAST).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True) * UNIT


@triton.jit
def _cast(x_ptr, q_ptr, s_ptr, N, LEAST: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Store the 8-bit numbers and the scale of one row.

    Grid: (M,).

    Args:
        x_ptr: Contiguous [M, N] of any float dtype.
        q_ptr: Contiguous [M, N] of the 8-bit type, written.
        s_ptr: float32 [M], written.
        N: Numbers of a row.
        LEAST: constexpr, lower bound of the row's largest absolute number.
        UNIT: constexpr, 2^-e for the exponent e that the row's largest number is scaled to.
        BLOCK: constexpr, N rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    x = tl.load(x_ptr + row * N + at, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(x), 0), LEAST, UNIT)
    tl.store(q_ptr + row * N + at, (x * (1.0 / scale)).to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(s_ptr + row, scale)


@triton.jit
def _gate_backward(
    ag_ptr, dy_ptr, d_ptr, q_ptr, s_ptr, sums_ptr, M, F, PROGRAMS,
    LEAST: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the gate's input, its 8-bit numbers and scales, and a share of its sums over rows.

    With the result g relu(a)^2 of the gate, d_a = 2 relu(a) g dy and d_g = relu(a)^2 dy; d = q s up to rounding, with
    one scale s, a power of two, for both halves of a row. Grid: (PROGRAMS,). Program p takes the rows p, p + PROGRAMS,
    p + 2 PROGRAMS, ...

    Args:
        ag_ptr: Contiguous [M, 2 F], input [a | g] of the gate.
        dy_ptr: Contiguous [M, F], gradient of the gate's result.
        d_ptr: Contiguous [M, 2 F], gradient of the input, written.
        q_ptr: Contiguous [M, 2 F] of the 8-bit type, written.
        s_ptr: float32 [M], scales, written.
        sums_ptr: float32 [PROGRAMS, 2 F], written; the caller sums over programs.
        M: Rows.
        F: Half of a row.
        PROGRAMS: Number of programs.
        LEAST: constexpr, lower bound of a row's largest absolute number.
        UNIT: constexpr, 2^-e for the exponent e that the row's largest number is scaled to.
        BLOCK: constexpr, F rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    sums_ptr += row * 2 * F
    at = tl.arange(0, BLOCK)
    inside = at < F
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_g = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(tl.cdiv(M - row, PROGRAMS)):
        start = row * F
        a = tl.load(ag_ptr + 2 * start + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(ag_ptr + 2 * start + F + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        positive = tl.maximum(a, 0.0)
        scaled = positive * dy
        # rounded before the cast, so that both products see the same gradient
        d_a = (2.0 * scaled * g).to(d_ptr.dtype.element_ty)
        d_g = (positive * scaled).to(d_ptr.dtype.element_ty)
        tl.store(d_ptr + 2 * start + at, d_a, mask=inside)
        tl.store(d_ptr + 2 * start + F + at, d_g, mask=inside)
        d_a = d_a.to(tl.float32)
        d_g = d_g.to(tl.float32)
        sum_a += d_a
        sum_g += d_g
        scale = _scale(tl.max(tl.maximum(tl.abs(d_a), tl.abs(d_g)), 0), LEAST, UNIT)
        inverse = 1.0 / scale
        tl.store(q_ptr + 2 * start + at, (d_a * inverse).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(q_ptr + 2 * start + F + at, (d_g * inverse).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(s_ptr + row, scale)
        row += PROGRAMS
    tl.store(sums_ptr + at, sum_a, mask=inside)
    tl.store(sums_ptr + F + at, sum_g, mask=inside)


def cast(x_MN: Tensor, kind: torch.dtype, min_largest: float, unit: float) -> tuple[Tensor, Tensor]:
    """Return (q [M, N] of dtype `kind`, s float32 [M, 1]) of contiguous rows x, with x = q s up to rounding.

    Args:
        x_MN: Contiguous rows on a GPU.
        kind: 8-bit dtype.
        min_largest: Lower bound of a row's largest absolute number.
        unit: 2^-e for the exponent e that a row's largest number is scaled to.
    """
    rows, width = x_MN.shape
    q_MN = torch.empty_like(x_MN, dtype=kind)
    s_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x_MN.device)
    if rows:
        block = triton.next_power_of_2(width)
        _cast[(rows,)](
            x_MN, q_MN, s_M1, width, LEAST=min_largest, UNIT=unit, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return q_MN, s_M1


def gate_backward(
    ag_MN: Tensor, dy_MF: Tensor, kind: torch.dtype, min_largest: float, unit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the gate's input, also in 8 bits, and its sums over rows.

    With the result g relu(a)^2 of the gate and its gradient dy: d_a = 2 relu(a) g dy and d_g = relu(a)^2 dy. d = q s up
    to rounding, with a power of two s per row.

    Args:
        ag_MN: Contiguous input [a | g] of the gate, on a GPU.
        dy_MF: Contiguous gradient of the gate's result, F = N / 2.
        kind: 8-bit dtype.
        min_largest: Lower bound of a row's largest absolute number.
        unit: 2^-e for the exponent e that a row's largest number is scaled to.

    Returns:
        (d [M, N] in ag's dtype, q [M, N] of dtype `kind`, s float32 [M, 1], sums of d over the M rows, float32 [N]).
    """
    rows, width = ag_MN.shape
    d_MN, q_MN = torch.empty_like(ag_MN), torch.empty_like(ag_MN, dtype=kind)
    s_M1 = torch.empty(rows, 1, dtype=torch.float32, device=ag_MN.device)
    programs = min(PROGRAMS, max(1, rows))
    sums = torch.empty(programs, width, dtype=torch.float32, device=ag_MN.device)
    block = triton.next_power_of_2(width // 2)
    _gate_backward[(programs,)](
        ag_MN, dy_MF, d_MN, q_MN, s_M1, sums, rows, width // 2, programs,
        LEAST=min_largest, UNIT=unit, BLOCK=block, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return d_MN, q_MN, s_M1, sums.sum(0)
