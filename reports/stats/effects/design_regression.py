"""Linear models of a partial design: estimates of differences, with intervals that bear unequal spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from ....results.designs.design_space import Model, estimable

LEAST_DF = 4
"""Degrees of freedom from which the spread of single cells can be told apart."""
MOST_LEVERAGE = 0.99
DUST = 1e-9


@dataclass(frozen=True)
class Estimate:
    """A combination of a model's coefficients: NaN throughout where the cells do not tell it; `low`, `high` and `p` (of zero) are NaN
    where there is no spread to judge by. `error` is the standard error, `df` its degrees of freedom."""

    value: float
    error: float
    df: int
    low: float
    high: float
    p: float

    def above(self, bound: float) -> float:
        """p, one-sided, of being no more than `bound`."""
        return _upper((self.value - bound) / self.error, self.df) if self.error > 0 else math.nan

    def below(self, bound: float) -> float:
        """p, one-sided, of being no less than `bound`."""
        return _upper((bound - self.value) / self.error, self.df) if self.error > 0 else math.nan


class Fit:
    """The model fitted to one number a combination: `members` are their places in the model's space.

    Variances are HC3 (MacKinnon and White, Journal of Econometrics 29, 1985), which holds where cells of one mixer vary more
    than those of another; with few cells to spare, or one that nothing else stands beside, the pooled one.
    """

    def __init__(self, model: Model, members: np.ndarray, values: np.ndarray, *, pooled: bool = False) -> None:
        """`pooled`: the pooled variance whatever there is to spare."""
        self.model, self.rows, self.values = model, model.every[members], values
        inverse = np.linalg.pinv(self.rows.T @ self.rows, rcond=1e-10, hermitian=True)
        self.coefficients = inverse @ self.rows.T @ values
        left = values - self.rows @ self.coefficients
        self.df = len(values) - int(np.linalg.matrix_rank(self.rows))
        leverage = ((self.rows @ inverse) * self.rows).sum(axis=1)
        self.robust = not pooled and self.df >= LEAST_DF and float(leverage.max(initial=0.0)) < MOST_LEVERAGE
        if self.robust:
            weighted = (self.rows * (left / (1 - leverage))[:, None]) @ inverse
            self.covariance = weighted.T @ weighted
        else:
            self.covariance = inverse * (float(left @ left) / self.df if self.df else math.nan)
        self._scale = float(np.abs(values).max(initial=0.0))

    def estimate(self, weights: np.ndarray) -> Estimate:
        """Of these weights of the coefficients, [column]."""
        if not len(self.values) or not estimable(self.rows, weights):
            return Estimate(math.nan, math.nan, self.df, math.nan, math.nan, math.nan)
        value = float(weights @ self.coefficients)
        value = 0.0 if abs(value) <= DUST * self._scale else value
        variance = float(weights @ self.covariance @ weights)
        error = math.sqrt(max(variance, 0.0)) if not math.isnan(variance) else math.nan
        if not error > DUST * self._scale:
            return Estimate(value, math.nan, self.df, math.nan, math.nan, math.nan)
        half = float(special.stdtrit(self.df, 0.975)) * error
        return Estimate(value, error, self.df, value - half, value + half, 2 * _upper(abs(value) / error, self.df))


def _upper(t: float, df: int) -> float:
    return float(special.stdtr(df, -t))
