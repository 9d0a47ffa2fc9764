"""Head, soft cap and cross-entropy in one op that never stores all logits (MECHANISMS A).

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .norms import statistics_dtype

CHUNK = 8192
"""Tokens whose logits exist at a time where nothing asks for fewer."""


def softcap(z: Tensor, cap: float) -> Tensor:
    """cap z / sqrt(z^2 + cap^2): odd, slope 1 at 0, |result| < cap. In float32 (float64 stays float64)."""
    wide = z.to(statistics_dtype(z.dtype))
    return wide * (cap * torch.rsqrt(wide.square() + cap * cap))


def linear_cross_entropy(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor, targets_N: Tensor, *, cap: float, chunk: int = CHUNK
) -> Tensor:
    """Nats per token of softmax(softcap(h wᵀ + b)), float32 [N] (float64 for float64).

    h [N, D], w [V, D], b [V], targets int64 [N]. The product runs in h's type, cap and log-sum-exp in float32. More
    than `chunk` tokens are done in chunks, which the backward computes again instead of keeping their logits.
    Raises ValueError when the shapes disagree or `chunk` is not positive.
    """
    _check(h_ND, w_VD, b_V, targets_N)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if h_ND.shape[0] <= chunk:
        return _losses(h_ND, w_VD, b_V, targets_N, cap)
    pieces = zip(h_ND.split(chunk), targets_N.split(chunk), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_losses(h, w_VD, b_V, targets, cap) for h, targets in pieces])
    return torch.cat([checkpoint(_losses, h, w_VD, b_V, targets, cap, use_reentrant=False) for h, targets in pieces])


def linear_cross_entropy_reference(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, targets_N: Tensor, *, cap: float) -> Tensor:
    """The same from one matrix of logits."""
    _check(h_ND, w_VD, b_V, targets_N)
    z_NV = h_ND @ w_VD.to(h_ND.dtype).t() + b_V.to(h_ND.dtype)
    z_NV = z_NV.to(statistics_dtype(h_ND.dtype))
    z_NV = cap * z_NV / torch.sqrt(z_NV * z_NV + cap * cap)
    return torch.logsumexp(z_NV, 1) - z_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)


def _losses(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, targets_N: Tensor, cap: float) -> Tensor:
    z_NV = functional.linear(h_ND, w_VD.to(h_ND.dtype), b_V.to(h_ND.dtype))
    losses_N: Tensor = _CappedLosses.apply(z_NV, targets_N, cap)
    return losses_N


class _CappedLosses(torch.autograd.Function):
    """Cross-entropy of softcap(z); keeps the raw logits and one number a token."""

    @staticmethod
    def forward(ctx: Any, z_NV: Tensor, targets_N: Tensor, cap: float) -> Tensor:
        capped_NV = softcap(z_NV, cap)
        lse_N = torch.logsumexp(capped_NV, 1)
        ctx.save_for_backward(z_NV, targets_N, lse_N)
        ctx.cap = cap
        return lse_N - capped_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z_NV, targets_N, lse_N = ctx.saved_tensors
        wide_NV = z_NV.to(lse_N.dtype)
        # softcap(z) = z slope and softcap'(z) = slope^3
        slope_NV = wide_NV.square().add_(ctx.cap**2).rsqrt_().mul_(ctx.cap)
        d_NV = (wide_NV * slope_NV).sub_(lse_N.unsqueeze(1)).exp_()
        d_NV.scatter_add_(1, targets_N.unsqueeze(1), d_NV.new_full((len(targets_N), 1), -1.0))
        cube_NV = slope_NV.square().mul_(slope_NV)
        return d_NV.mul_(cube_NV).mul_(grads[0].unsqueeze(1)).to(z_NV.dtype), None, None


def _check(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, targets_N: Tensor) -> None:
    n, d = h_ND.shape
    if w_VD.shape[1] != d or b_V.shape != w_VD.shape[:1]:
        raise ValueError(f"h is {tuple(h_ND.shape)}, but w is {tuple(w_VD.shape)} and b {tuple(b_V.shape)}")
    if targets_N.shape != (n,):
        raise ValueError(f"h has {n} rows, but targets have shape {tuple(targets_N.shape)}")
