"""Rotary positions (docs/mechanisms.md, "Softmax attention").

B batch, T length, H heads, D head size, M = D/2 rotating pairs.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .norms import statistics_dtype
from .rotary_forms import Kind, check_rotary


def frequencies(kind: Kind, head_dim: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position, float64 [D/2]: base^(-2m/D), or (1/base)^(m/(D/4-1)) for D/4 pairs and then D/4 zeros."""
    check_rotary(kind, head_dim)
    if kind == "full":
        return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    quarter = head_dim // 4
    turning = (1 / base) ** torch.linspace(0, 1, quarter, dtype=torch.float64, device=device)
    return torch.cat([turning, turning.new_zeros(quarter)])


def rotary_tables(
    kind: Kind,
    length: int,
    head_dim: int,
    base: float,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [T, D/2], of the positions offset .. offset + T - 1."""
    # the op imports the compiler on its first call, a second that a run without it can do without
    tables = _tables if torch.compiler.is_compiling() else _cos_and_sin
    cos_TM, sin_TM = tables(kind, length, head_dim, float(base), offset, dtype, torch.device(device))
    return cos_TM, sin_TM


def _cos_and_sin(
    kind: str, length: int, head_dim: int, base: float, offset: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    position = torch.arange(offset, offset + length, dtype=dtype, device=device)
    angle_TM = torch.outer(position, frequencies(cast(Kind, kind), head_dim, base, device).to(dtype))
    return angle_TM.cos(), angle_TM.sin()


# an op of its own, or the compiler works out the angles again for every element that they turn
_tables = torch.library.custom_op("atma::rotary_tables", _cos_and_sin, mutates_args=())


@_tables.register_fake
def _(kind: str, length: int, head_dim: int, base: float, offset: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cos_TM, sin_TM = (torch.empty(length, head_dim // 2, dtype=dtype, device=device) for _ in range(2))
    return cos_TM, sin_TM


def apply_rotary(x_BTHD: Tensor, cos_TM: Tensor, sin_TM: Tensor) -> Tensor:
    """Rotates the halves x1, x2: y1 = x1 cos + x2 sin, y2 = -x1 sin + x2 cos; in float32, returned in x's type."""
    t, d = x_BTHD.shape[1], x_BTHD.shape[3]
    if cos_TM.shape != (t, d // 2) or cos_TM.shape != sin_TM.shape or d % 2:
        raise ValueError(f"tables have shapes {tuple(cos_TM.shape)}, {tuple(sin_TM.shape)}; x needs [{t}, {d}/2]")
    x1, x2 = x_BTHD.to(statistics_dtype(x_BTHD.dtype)).chunk(2, -1)
    cos, sin = cos_TM.unsqueeze(1), sin_TM.unsqueeze(1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1).to(x_BTHD.dtype)


def apply_rotary_reference(x_BTHD: Tensor, kind: Kind, base: float, offset: int = 0) -> Tensor:
    """The same as complex multiplication by exp(-i angle), in float64 angles."""
    t, d = x_BTHD.shape[1], x_BTHD.shape[3]
    position = torch.arange(offset, offset + t, dtype=torch.float64, device=x_BTHD.device)
    angle = torch.outer(position, frequencies(kind, d, base, x_BTHD.device)).unsqueeze(1)
    wide = x_BTHD.to(torch.float64)
    z = torch.complex(wide[..., : d // 2], wide[..., d // 2 :]) * torch.polar(torch.ones_like(angle), -angle)
    return torch.cat([z.real, z.imag], -1).to(x_BTHD.dtype)
