"""Rotary position embeddings (docs/reference/mechanisms.md, "Softmax attention").

B batch, T length, H heads, X head size, F = X/2 rotated pairs.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from .custom_ops import torch_op
from .norms import statistics_dtype

Kind = Literal["full", "half-truncated"]


def check_rotary(kind: Kind | Literal["none"], head_dim: int) -> None:
    """Raise ValueError when heads of size `head_dim` cannot be rotated by this kind of rotary embedding.

    "full" needs an even size, "half-truncated" a multiple of 4 of at least 8; "none" takes any size.
    """
    if kind == "full" and head_dim % 2:
        raise ValueError(f"full rotary needs an even head_dim, got {head_dim}")
    if kind == "half-truncated" and (head_dim % 4 or head_dim < 8):
        raise ValueError(
            f"half-truncated rotary needs a head_dim that is a multiple of 4 and at least 8, got {head_dim}"
        )


def frequencies(kind: Kind, head_dim: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle of each of the F = X/2 pairs per position, in radians, float64 [F], falling from 1.

    "full": base^(-2m/X) for pair m. "half-truncated": (1/base)^(m/(X/4-1)) for the first X/4 pairs, then X/4 zeros,
    which rotate nothing. Pair m consists of the channels m and m + X/2.

    Raises:
        ValueError: The head size does not suit the kind.
    """
    check_rotary(kind, head_dim)
    if kind == "full":
        return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    quarter = head_dim // 4
    turning = (1 / base) ** torch.linspace(0, 1, quarter, dtype=torch.float64, device=device)
    return torch.cat([turning, turning.new_zeros(quarter)])


def rotary_tables(
    kind: Kind, length: int, head_dim: int, base: float, *, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (cos, sin), each [T, X/2] in `dtype`, of the angles at positions 0 .. T - 1.

    An angle is the position times the frequency of the pair (`frequencies`), in radians.

    Args:
        kind: Rotary embedding.
        length: Number of positions T.
        head_dim: Head size X.
        base: Base of the frequencies.
        dtype: Dtype of positions, angles and tables; frequencies are computed in float64 and rounded to it.
        device: Device of the tables.

    Raises:
        ValueError: The head size does not suit the kind.
    """
    # the op imports the compiler at its first call, which costs a second that an eager run does not need
    tables = _tables if torch.compiler.is_compiling() else _cos_and_sin
    cos_TF, sin_TF = tables(kind, length, head_dim, float(base), dtype, torch.device(device))
    return cos_TF, sin_TF


def _cos_and_sin(
    kind: str, length: int, head_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [T, X/2] in `dtype`, of the angles at positions 0 .. T - 1.

    An angle is the position times the frequency of the pair (`frequencies`), in radians. `length` is T; positions and
    angles have `dtype`, frequencies are rounded to it.
    """
    position = torch.arange(length, dtype=dtype, device=device)
    angle_TF = torch.outer(position, frequencies(cast(Kind, kind), head_dim, base, device).to(dtype))
    return angle_TF.cos(), angle_TF.sin()


def _empty_tables(
    kind: str, length: int, head_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return uninitialised results of `rotary_tables`, for torch.compile."""
    return tuple(torch.empty(length, head_dim // 2, dtype=dtype, device=device) for _ in range(2))


# a separate op, because the compiler would otherwise recompute the angles for every rotated element
_tables = torch_op("rotary_tables", _empty_tables)(_cos_and_sin)


def rotate(x_BTHX: Tensor, kind: Kind | Literal["none"], base: float, positions_BT: Tensor | None = None) -> Tensor:
    """Return x rotated to its tokens' positions, in x's shape and dtype; "none" returns x itself.

    Channels m and m + X/2 form a pair (x1, x2), which becomes (x1 cos + x2 sin, x2 cos - x1 sin) with the angle
    position times frequency. Angles and rotation are float32 (float64 for float64). Positions beyond the trained length
    are not scaled.

    Args:
        x_BTHX: Queries or keys.
        kind: Rotary embedding, or "none".
        base: Base of the frequencies.
        positions_BT: int64 positions of the tokens; None: 0, 1, 2, ... in every row.

    Raises:
        ValueError: The head size does not suit the kind.
    """
    if kind == "none":
        return x_BTHX
    dtype, size = statistics_dtype(x_BTHX.dtype), x_BTHX.shape[-1]
    if positions_BT is None:
        return apply_rotary(
            x_BTHX, *rotary_tables(kind, x_BTHX.shape[1], size, base, dtype=dtype, device=x_BTHX.device)
        )
    angle_NF = torch.outer(positions_BT.flatten().to(dtype), frequencies(kind, size, base, x_BTHX.device).to(dtype))
    return apply_rotary(x_BTHX.flatten(0, 1)[None], angle_NF.cos(), angle_NF.sin()).view(x_BTHX.shape)


def apply_rotary(x_BTHX: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Return x [B, T, H, X] with its halves x1, x2 rotated: y1 = x1 cos + x2 sin, y2 = -x1 sin + x2 cos.

    Computed in float32 (float64 for float64), returned in x's dtype.

    Args:
        x_BTHX: Queries or keys.
        cos_TF: Cosines [T, X/2].
        sin_TF: Sines [T, X/2].

    Raises:
        ValueError: The tables do not fit x.
    """
    t, d = x_BTHX.shape[1], x_BTHX.shape[3]
    if cos_TF.shape != (t, d // 2) or cos_TF.shape != sin_TF.shape or d % 2:
        raise ValueError(f"tables have shapes {tuple(cos_TF.shape)}, {tuple(sin_TF.shape)}; x needs [{t}, {d}/2]")
    x1, x2 = x_BTHX.to(statistics_dtype(x_BTHX.dtype)).chunk(2, -1)
    cos, sin = cos_TF.unsqueeze(1), sin_TF.unsqueeze(1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1).to(x_BTHX.dtype)


def apply_rotary_reference(x_BTHX: Tensor, kind: Kind, base: float, offset: int = 0) -> Tensor:
    """Return x [B, T, H, X] rotated as complex numbers by exp(-i angle), with float64 angles, in x's dtype.

    The tokens of every row are at the positions offset, offset + 1, ...
    """
    t, d = x_BTHX.shape[1], x_BTHX.shape[3]
    position = torch.arange(offset, offset + t, dtype=torch.float64, device=x_BTHX.device)
    angle = torch.outer(position, frequencies(kind, d, base, x_BTHX.device)).unsqueeze(1)
    wide = x_BTHX.to(torch.float64)
    z = torch.complex(wide[..., : d // 2], wide[..., d // 2 :]) * torch.polar(torch.ones_like(angle), -angle)
    return torch.cat([z.real, z.imag], -1).to(x_BTHX.dtype)
