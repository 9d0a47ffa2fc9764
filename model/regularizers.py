"""Regularizers of the residual stream (MECHANISMS E).

N tokens, C channels, K sketch directions. Each takes x [N, C] of any float type and K directions [K, C] drawn from
N(0, 1) on x's device, and returns a scalar in float32 (float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.norms import statistics_dtype
from ..kernels.sketch import gram, sketch

STRONG_POINTS, STRONG_LIMIT = 17, 5.0
"""`strong` compares characteristic functions at 17 points on [-5, 5]."""
TINY = 1e-6


def weak(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """||cov(x Sᵀ) - I||_F with S [K, C] ~ N(0, 1)/sqrt(C). For x ~ N(0, I) it tends to sqrt(K^2/C)."""
    return _off_identity(_sketched(x_NC, normal_KC))


def discrete(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """`weak` of sqrt(C) x / ||x||: only directions count. A zero row stays zero."""
    z_NK = _sketched(x_NC, normal_KC)
    length_N1 = torch.linalg.vector_norm(x_NC.to(z_NK.dtype), dim=1, keepdim=True)
    # the sketch is linear, so its rows are scaled in place of x's, which are longer
    return _off_identity(z_NK * (math.sqrt(x_NC.shape[1]) / length_N1.clamp(min=torch.finfo(z_NK.dtype).tiny)))


def strong(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """N times the weighted squared distance between the characteristic functions of xA and of N(0, 1), mean over K."""
    _check(x_NC)
    wide = statistics_dtype(x_NC.dtype)
    a_KC = normal_KC.to(wide)
    a_KC = a_KC / (torch.linalg.vector_norm(a_KC, dim=1, keepdim=True) + TINY)
    projected_NK = sketch(x_NC, a_KC)
    # cos is even and sin odd in t, so the points t > 0 count twice in the trapezoid rule; at t = 0 the gap is zero
    half = STRONG_POINTS // 2
    step = STRONG_LIMIT / half
    first_cos, first_sin = (projected_NK * step).cos(), (projected_NK * step).sin()
    cos_NK, sin_NK = first_cos, first_sin
    distance_K = projected_NK.new_zeros(len(normal_KC))
    for point in range(1, half + 1):
        if point > 1:
            cos_NK, sin_NK = cos_NK * first_cos - sin_NK * first_sin, sin_NK * first_cos + cos_NK * first_sin
        target = math.exp(-((point * step) ** 2) / 2)
        gap_K = (cos_NK.mean(0) - target).square() + sin_NK.mean(0).square()
        distance_K = distance_K + (step if point == half else 2 * step) * target * gap_K
    return distance_K.mean() * len(x_NC)


def zipfian(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """Off-diagonal second moments of sketched directions, plus the distance of sorted lengths from Zipf's 1/rank."""
    z_NK = _centred(_sketched(x_NC, normal_KC))
    length_N1 = torch.linalg.vector_norm(z_NK, dim=1, keepdim=True).clamp(min=TINY)
    n = len(z_NK)
    moment_KK = gram(z_NK / length_N1) / (n - 1)
    angular = torch.linalg.matrix_norm(moment_KK - torch.diag(moment_KK.diagonal()))
    sorted_N = length_N1.squeeze(1).sort(descending=True).values
    zipf_N = 1 / torch.arange(1, n + 1, dtype=z_NK.dtype, device=z_NK.device)
    return angular + torch.linalg.vector_norm(sorted_N / sorted_N.sum() - zipf_N / zipf_N.sum())


def _check(x_NC: Tensor) -> None:
    if x_NC.ndim != 2 or x_NC.shape[0] < 2:
        raise ValueError(f"x must be [N, C] with at least 2 rows, got shape {tuple(x_NC.shape)}")


def _sketched(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """x Sᵀ, [N, K] in the statistics' type."""
    _check(x_NC)
    return sketch(x_NC, normal_KC.to(statistics_dtype(x_NC.dtype)) / math.sqrt(x_NC.shape[1]))


def _centred(z_NK: Tensor) -> Tensor:
    return z_NK - z_NK.mean(0)


def _off_identity(z_NK: Tensor) -> Tensor:
    """||cov(z) - I||_F."""
    covariance_KK = gram(_centred(z_NK)) / (len(z_NK) - 1)
    return torch.linalg.matrix_norm(covariance_KK - torch.eye(len(covariance_KK), dtype=z_NK.dtype, device=z_NK.device))
