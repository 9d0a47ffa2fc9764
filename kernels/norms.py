"""Root-mean-square norm (docs/mechanisms.md, "Backbone")."""

from __future__ import annotations

import torch
from torch import Tensor

EPS_FLOAT32 = 1.1920928955078125e-07
"""The weightless norm's epsilon: float32's, whatever the input's type, because the statistics are float32."""
EPS_FLOAT64 = 2.220446049250313e-16


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics are computed in: float64 stays float64, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times `weight` if given, over the last axis.

    x [..., D] of any float type, weight [D]; the result has x's type, the statistics are float32 (float64 for float64).
    `eps` None means 1.19e-7, or 2.2e-16 in float64. Raises ValueError when `weight` does not have D entries.
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
    """The same row by row."""
    dtype = statistics_dtype(x.dtype)
    if eps is None:
        eps = torch.finfo(dtype).eps
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        wide = row.to(dtype)
        rows.append(wide / torch.sqrt((wide @ wide) / wide.numel() + eps))
    y = torch.stack(rows).reshape(x.shape)
    return (y if weight is None else y * weight.to(dtype)).to(x.dtype)
