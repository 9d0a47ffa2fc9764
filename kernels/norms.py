"""Root-mean-square norm (docs/reference/mechanisms.md, "Backbone")."""

from __future__ import annotations

import torch
from torch import Tensor

EPS_FLOAT32 = 1.1920928955078125e-07
"""Default epsilon of the norm: that of float32 whatever the input's dtype, because the statistics are float32."""
EPS_FLOAT64 = 2.220446049250313e-16


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that statistics are computed in: float64 for float64, float32 for every other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last axis, times `weight` if given.

    Args:
        x: [..., D] of any float dtype; the statistics are float32 (float64 for float64).
        weight: [D], or None for a norm without weights.
        eps: Added to the mean square; None: 1.19e-7, or 2.2e-16 in float64.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: `weight` does not have D entries.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, but the last axis of x has {x.shape[-1]} entries")
    dtype = statistics_dtype(x.dtype)
    if eps is None:
        eps = EPS_FLOAT64 if dtype == torch.float64 else EPS_FLOAT32
    wide = x.to(dtype)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(dtype)
    return y.to(x.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return `rms_norm` of x [..., D], computed row by row; slow, for tests.

    That is x / sqrt(mean(x^2) + eps) over the last axis, times `weight` if given, in x's shape and dtype, with float32
    statistics (float64 for float64).

    `weight` is not checked. `eps` None is the machine epsilon of the statistics' dtype: 1.19e-7, or 2.2e-16 in float64.
    x needs a row.
    """
    dtype = statistics_dtype(x.dtype)
    if eps is None:
        eps = torch.finfo(dtype).eps
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        wide = row.to(dtype)
        rows.append(wide / torch.sqrt((wide @ wide) / wide.numel() + eps))
    y = torch.stack(rows).reshape(x.shape)
    return (y if weight is None else y * weight.to(dtype)).to(x.dtype)
