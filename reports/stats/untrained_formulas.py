"""Closed-form behaviour of the mechanisms before training (docs/reference/mechanisms.md has the derivations).

For sweeps without stored weights, such as printed ones, nothing else can be derived. Sizes are those of the published
networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

MAG_BETA, GAMMA_OFFSET, HEAD_SIZE = -1.5, 3.9, 128
"""Initial values of the published networks: raw slope of the count map, retention logit offset, head size X."""
GATE_SPREAD = 1 / math.sqrt(3)
"""Standard deviation of a gate's logit over tokens: weights uniform in +-1/sqrt(D), inputs of RMS 1."""
BETA = math.log1p(math.exp(MAG_BETA))
"""softplus(-1.5) = 0.2014, the initial slope of the count map."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)


def count_map(count: float | np.ndarray, beta: float | np.ndarray = BETA) -> np.ndarray:
    """Return tanh(beta ln(1 + m)), in [0, 1): the output magnitude when m keys share the attention weight equally.

    Args:
        count: Number m of such keys, at least 0; an array gives an array of the same (broadcast) shape, a number an
            array without dimensions.
        beta: Slope of the count map at m = 0; by default the untrained one, 0.2014.
    """
    return np.asarray(np.tanh(beta * np.log1p(count)))


def _gate_mean(function: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the mean of a function of a gate's logit, normal around 0 with sd GATE_SPREAD (Gauss-Hermite)."""
    return float(_WEIGHTS @ function(GATE_SPREAD * _NODES) / _WEIGHTS.sum())


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))


def state_norms(
    lengths: Sequence[int], *, erases: bool = True, keeps: bool = False, size: int = HEAD_SIZE
) -> np.ndarray:
    """Return the root mean squared Frobenius norm of the untrained memory state [X, X] after each length.

    The result is [length]. The state starts at zero. The unit is a component of a value. Keys are independent,
    isotropic and of unit length; values are independent with components of variance 1. A token multiplies the mean
    square by E[gamma^2] (1 - E[2 beta - beta^2] / X) and adds E[beta^2] X. The logits of the decay gamma and of the
    write gate beta are normal with standard deviation 1 / sqrt(3), the former around 3.9, the latter around 0.

    Args:
        lengths: Numbers of tokens.
        erases: Delta rule (True), or Hebbian writes that erase nothing (False).
        keeps: Set gamma = 1, that is no decay.
        size: Head size X.
    """
    retained = 1.0 if keeps else _gate_mean(lambda logit: _sigmoid(GAMMA_OFFSET + logit) ** 2)
    erased_share = _gate_mean(lambda logit: 2 * _sigmoid(logit) - _sigmoid(logit) ** 2) / size if erases else 0.0
    write_variance = size * _gate_mean(lambda logit: _sigmoid(logit) ** 2)
    growth_factor = retained * (1 - erased_share)
    tokens = np.asarray(lengths, dtype=float)
    token_sum = tokens if growth_factor == 1 else -np.expm1(tokens * math.log(growth_factor)) / (1 - growth_factor)
    return np.asarray(np.sqrt(write_variance * token_sum))
