"""Regularizers of the residual stream: weak, discrete, strong and zipfian.

Each takes the stream after every layer, L tensors [N, D] of any float type, and directions [L, K, D] drawn from N(0, 1)
on their device. It returns one value per layer, [L], in float32 (float64 for float64). Layers share nothing; they are
processed together so that a hundred small kernels become a few.

Source: docs/reference/mechanisms.md, "Regularizers".
Letters of shapes: L layers, N tokens, D channels, K sketch directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.norms import statistics_dtype
from ..kernels.sketch.op import gram, sketch

STRONG_POINTS, STRONG_LIMIT = 17, 5.0
"""`strong` compares characteristic functions at 17 points on [-5, 5]."""
TINY = 1e-6
"""Smallest norm to divide by."""


def weak(streams: Sequence[Tensor], normal_LKD: Tensor) -> Tensor:
    """Return ||cov(x Sᵀ) - I||_F per layer, [L], with S [K, D] ~ N(0, 1)/sqrt(D).

    The covariance is centred over the N tokens and divided by N - 1. For x ~ N(0, I) the value tends to sqrt(K^2/D),
    not to 0.

    Args:
        streams: residual stream after every layer, L tensors [N, D].
        normal_LKD: directions of the sketch, drawn from N(0, 1); divided by sqrt(D) here.

    Raises:
        ValueError: a stream has another number of axes or fewer than 2 rows.
    """
    return _off_identity(_sketched(streams, normal_LKD)[0])


def discrete(streams: Sequence[Tensor], normal_LKD: Tensor) -> Tensor:
    """Return ||cov(u Sᵀ) - I||_F per layer, [L], with u = sqrt(D) x / ||x||: only the directions of rows count.

    S [K, D] ~ N(0, 1)/sqrt(D), and the covariance is centred over the N tokens and divided by N - 1, as in `weak`. A
    zero row stays zero.

    Args:
        streams: residual stream after every layer, L tensors [N, D].
        normal_LKD: directions of the sketch, drawn from N(0, 1).

    Raises:
        ValueError: a stream has another number of axes or fewer than 2 rows.
    """
    z_LNK, square_LN = _sketched(streams, normal_LKD, squares=True)
    is_nonzero_LN = square_LN > 0
    scale_LN = torch.where(
        is_nonzero_LN, torch.where(is_nonzero_LN, square_LN, 1).rsqrt() * math.sqrt(normal_LKD.shape[2]), 0
    )
    # the sketch is linear, so scaling its rows instead of the longer rows of x gives the same result
    return _off_identity(z_LNK * scale_LN.unsqueeze(2))


def strong(streams: Sequence[Tensor], normal_LKD: Tensor) -> Tensor:
    """Return N times the squared distance of the characteristic functions of x A and of N(0, 1) per layer, [L].

    The columns of A are unit vectors along the directions. The squared distance is weighted by exp(-t^2 / 2),
    integrated over t in [-5, 5] by the trapezoid rule at 17 points, and averaged over the K directions. x is neither
    centred nor scaled. The value grows with the number N of tokens.

    Args:
        streams: residual stream after every layer, L tensors [N, D].
        normal_LKD: directions of the sketch, drawn from N(0, 1).

    Raises:
        ValueError: a stream has another number of axes or fewer than 2 rows.
    """
    a_LKD = normal_LKD.to(statistics_dtype(streams[0].dtype))
    a_LKD = a_LKD / (torch.linalg.vector_norm(a_LKD, dim=2, keepdim=True) + TINY)
    projected_LNK, _ = _projected(streams, a_LKD)
    # cos is even and sin odd in t, so the points t > 0 count twice in the trapezoid rule; at t = 0 the gap is zero
    half = STRONG_POINTS // 2
    step = STRONG_LIMIT / half
    first_cos, first_sin = (projected_LNK * step).cos(), (projected_LNK * step).sin()
    cos_LNK, sin_LNK = first_cos, first_sin
    distance_LK = projected_LNK.new_zeros(normal_LKD.shape[:2])
    for point in range(1, half + 1):
        if point > 1:
            cos_LNK, sin_LNK = cos_LNK * first_cos - sin_LNK * first_sin, sin_LNK * first_cos + cos_LNK * first_sin
        target = math.exp(-((point * step) ** 2) / 2)
        gap_LK = (cos_LNK.mean(1) - target).square() + sin_LNK.mean(1).square()
        distance_LK = distance_LK + (step if point == half else 2 * step) * target * gap_LK
    return distance_LK.mean(1) * len(streams[0])


def zipfian(streams: Sequence[Tensor], normal_LKD: Tensor) -> Tensor:
    """Return two distances of the sketched stream z from Zipf's law, added up, per layer: [L].

    z = x Sᵀ with S ~ N(0, 1)/sqrt(D), centred over the N tokens. First, the Frobenius norm of the off-diagonal of the
    sum over tokens of z zᵀ / ||z||^2, divided by N - 1. Second, the Euclidean distance between the sorted lengths
    ||z||, divided by their sum, and 1/rank, divided by its sum (longest vector: rank 1).

    Args:
        streams: residual stream after every layer, L tensors [N, D].
        normal_LKD: directions of the sketch, drawn from N(0, 1).

    Raises:
        ValueError: a stream has another number of axes or fewer than 2 rows.
    """
    z_LNK = _centred(_sketched(streams, normal_LKD)[0])
    length_LN = torch.linalg.vector_norm(z_LNK, dim=2).clamp(min=TINY)
    n = length_LN.shape[1]
    moment_LKK = gram(z_LNK / length_LN.unsqueeze(2)) / (n - 1)
    angular_L = torch.linalg.matrix_norm(moment_LKK - torch.diag_embed(moment_LKK.diagonal(dim1=1, dim2=2)))
    # ascending, like the sorted lengths
    zipf_N = 1 / torch.arange(n, 0, -1, dtype=z_LNK.dtype, device=z_LNK.device)
    share_LN = _sorted(length_LN) / length_LN.sum(1, keepdim=True)
    return angular_L + torch.linalg.vector_norm(share_LN - zipf_N / zipf_N.sum(), dim=1)


def _projected(streams: Sequence[Tensor], s_LKD: Tensor, *, squares: bool = False) -> tuple[Tensor, Tensor]:
    """Return (x sᵀ of every layer, ||x||^2 of every row) in float32 (float64 for float64).

    Args:
        streams: residual stream after every layer, L tensors [N, D].
        s_LKD: directions, used as they are.
        squares: compute ||x||^2 too.

    Returns:
        (projections [L, N, K], squares [L, N]); the latter is empty, [L, 0], without `squares`.

    Raises:
        ValueError: a stream has another number of axes or fewer than 2 rows.
    """
    for x_ND in streams:
        if x_ND.ndim != 2 or x_ND.shape[0] < 2:
            raise ValueError(f"x must be [N, D] with at least 2 rows, got shape {tuple(x_ND.shape)}")
    return sketch(streams, s_LKD, squares=squares)


def _sketched(streams: Sequence[Tensor], normal_LKD: Tensor, *, squares: bool = False) -> tuple[Tensor, Tensor]:
    """Return `_projected` with directions divided by sqrt(D): (x sᵀ [L, N, K], ||x||^2 [L, N] or [L, 0])."""
    dtype = statistics_dtype(streams[0].dtype)
    return _projected(streams, normal_LKD.to(dtype) / math.sqrt(normal_LKD.shape[2]), squares=squares)


def _centred(z_LNK: Tensor) -> Tensor:
    return z_LNK - z_LNK.mean(1, keepdim=True)


def _off_identity(z_LNK: Tensor) -> Tensor:
    """Return ||cov(z) - I||_F per layer, [L]; the covariance over N is centred and divided by N - 1."""
    covariance_LKK = gram(_centred(z_LNK)) / (z_LNK.shape[1] - 1)
    identity_KK = torch.eye(z_LNK.shape[2], dtype=z_LNK.dtype, device=z_LNK.device)
    return torch.linalg.matrix_norm(covariance_LKK - identity_KK)


def _sorted(length_LN: Tensor) -> Tensor:
    """Return each row of numbers in ascending order, [L, N]; gradients pass through the permutation.

    Float32 numbers must be positive: they are sorted by their bits.
    """
    if length_LN.dtype != torch.float32:
        return length_LN.sort(dim=1).values
    # one sort of all rows: positive floats sort like their bits, and the row's index fills the upper bits
    rows = torch.arange(len(length_LN), device=length_LN.device).unsqueeze(1)
    order = ((rows << 32) + length_LN.detach().view(torch.int32)).flatten().argsort()
    return length_LN.flatten()[order].view_as(length_LN)
