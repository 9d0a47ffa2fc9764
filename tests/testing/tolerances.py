"""Largest errors that rounding explains: tolerances that hold on every machine and in every order of additions."""

from __future__ import annotations

import math

import torch

CONFIDENCE = 6.0
"""Standard deviations within which a sum of roundings is taken to stay: it leaves them in 2 exp(-18) = 3e-8 of all cases."""


def rounding_bound(dtype: torch.dtype, depth: int = 1, condition: float = 1.0) -> float:
    """Return the largest relative error that `depth` roundings to `dtype`, one after the other, explain.

    Each is off by at most u = eps / 2. In the worst case they add up to u depth. With mean 0 and independent of each other they
    stay within 6 u sqrt(depth), which is smaller from a depth of 36 on.

    Args:
        depth: Terms of the longest sum, in whatever order, or operations in a row.
        condition: Factor by which a relative error grows: sum |x| / |sum x| of a sum that cancels.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41 (2019).
    """
    return min(depth, CONFIDENCE * math.sqrt(depth)) * condition * torch.finfo(dtype).eps / 2
