"""Regularizers of the residual stream (MECHANISMS E).

N tokens, C channels, K sketch directions. Each takes x [N, C] of any float type and K directions [K, C] drawn from
N(0, 1) on x's device, and returns a scalar in float32 (float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.norms import statistics_dtype

STRONG_POINTS, STRONG_LIMIT = 17, 5.0
"""`strong` compares characteristic functions at 17 points on [-5, 5]."""
TINY = 1e-6


def weak(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """||cov(x Sᵀ) - I||_F with S [K, C] ~ N(0, 1)/sqrt(C). For x ~ N(0, I) it tends to sqrt(K^2/C)."""
    z_NK = _sketched(_wide(x_NC), normal_KC)
    covariance_KK = z_NK.t() @ z_NK / (z_NK.shape[0] - 1)
    return torch.linalg.matrix_norm(covariance_KK - torch.eye(len(normal_KC), dtype=z_NK.dtype, device=z_NK.device))


def discrete(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """`weak` of sqrt(C) x / ||x||: only directions count. A zero row stays zero."""
    wide = _wide(x_NC)
    length_N1 = torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    return weak(wide * (math.sqrt(wide.shape[1]) / length_N1), normal_KC)


def strong(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """N times the weighted squared distance between the characteristic functions of xA and of N(0, 1), mean over K."""
    wide = _wide(x_NC)
    n = wide.shape[0]
    a_CK = normal_KC.t().to(wide.dtype)
    a_CK = a_CK / (torch.linalg.vector_norm(a_CK, dim=0) + TINY)
    projected_NK = wide @ a_CK
    t_P = torch.linspace(-STRONG_LIMIT, STRONG_LIMIT, STRONG_POINTS, dtype=wide.dtype, device=wide.device)
    target_P = torch.exp(-t_P.square() / 2)
    # cos is even and sin odd in t, so the points t >= 0 carry everything; the trapezoid rule doubles all but t = 0.
    half = STRONG_POINTS // 2
    step = 2 * STRONG_LIMIT / (STRONG_POINTS - 1)
    distance_K = wide.new_zeros(len(normal_KC))
    for index in range(half, STRONG_POINTS):
        angle_NK = projected_NK * t_P[index]
        gap_K = (angle_NK.cos().mean(0) - target_P[index]).square() + angle_NK.sin().mean(0).square()
        width = step if index in (half, STRONG_POINTS - 1) else 2 * step
        distance_K = distance_K + width * target_P[index] * gap_K
    return distance_K.mean() * n


def zipfian(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """Off-diagonal second moments of sketched directions, plus the distance of sorted lengths from Zipf's 1/rank."""
    z_NK = _sketched(_wide(x_NC), normal_KC)
    length_N1 = torch.linalg.vector_norm(z_NK, dim=1, keepdim=True).clamp(min=TINY)
    u_NK = z_NK / length_N1
    n = u_NK.shape[0]
    moment_KK = u_NK.t() @ u_NK / (n - 1)
    angular = torch.linalg.matrix_norm(moment_KK - torch.diag(moment_KK.diagonal()))
    sorted_N = length_N1.squeeze(1).sort(descending=True).values
    zipf_N = 1 / torch.arange(1, n + 1, dtype=z_NK.dtype, device=z_NK.device)
    return angular + torch.linalg.vector_norm(sorted_N / sorted_N.sum() - zipf_N / zipf_N.sum())


def _wide(x_NC: Tensor) -> Tensor:
    if x_NC.ndim != 2 or x_NC.shape[0] < 2:
        raise ValueError(f"x must be [N, C] with at least 2 rows, got shape {tuple(x_NC.shape)}")
    return x_NC.to(statistics_dtype(x_NC.dtype))


def _sketched(x_NC: Tensor, normal_KC: Tensor) -> Tensor:
    """Centred x Sᵀ, [N, K]."""
    s_KC = normal_KC.to(x_NC.dtype) / math.sqrt(x_NC.shape[1])
    z_NK = x_NC @ s_KC.t()
    return z_NK - z_NK.mean(0)
