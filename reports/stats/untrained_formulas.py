"""What the mechanisms do before any training, in closed form (docs/mechanisms.md, "Polar attention" and "Gated delta memory").

Of a sweep whose weights nobody keeps, such as a printed one, this is all that can be said of them. Sizes are those of the
published networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

MAG_BETA, GAMMA_OFFSET, HEAD_SIZE = -1.5, 3.9, 128
"""The raw slope of the count map, what is added to the retention's logit, and X, as the published networks start."""
GATE_SPREAD = 1 / math.sqrt(3)
"""Standard deviation of a gate's logit over tokens: weights uniform in +-1/sqrt(D), inputs of RMS 1."""
BETA = math.log1p(math.exp(MAG_BETA))
"""softplus(-1.5) = 0.2014, the slope of the count map before training."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)


def magnitude(count: float | np.ndarray, beta: float | np.ndarray = BETA) -> np.ndarray:
    """mag = tanh(beta ln(1 + m)): what `count` keys come to that share the weight alike."""
    return np.asarray(np.tanh(beta * np.log1p(count)))


def _mean_of(function: Callable[[np.ndarray], np.ndarray]) -> float:
    """The mean of a function of a gate's logit around zero, by Gauss-Hermite."""
    return float(_WEIGHTS @ function(GATE_SPREAD * _NODES) / _WEIGHTS.sum())


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))


def state_norms(
    lengths: Sequence[int], *, erases: bool = True, keeps: bool = False, size: int = HEAD_SIZE
) -> np.ndarray:
    """Root of the mean squared Frobenius norm of the memory's state [X, X] after so many tokens, in units of a value's component.

    Keys are independent and of unit length in all directions alike, values independent with components of variance one. A
    token then multiplies the mean square by E[gamma^2] (1 - E[2 beta - beta^2] / X) and adds E[beta^2] X. `erases` is the delta
    rule, else Hebbian writes, which take nothing out; `keeps` sets gamma = 1.
    """
    kept = 1.0 if keeps else _mean_of(lambda logit: _sigmoid(GAMMA_OFFSET + logit) ** 2)
    erased = _mean_of(lambda logit: 2 * _sigmoid(logit) - _sigmoid(logit) ** 2) / size if erases else 0.0
    written = size * _mean_of(lambda logit: _sigmoid(logit) ** 2)
    left = kept * (1 - erased)
    tokens = np.asarray(lengths, dtype=float)
    grown = tokens if left == 1 else -np.expm1(tokens * math.log(left)) / (1 - left)
    return np.asarray(np.sqrt(written * grown))
