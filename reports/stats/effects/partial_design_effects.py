"""Effects, interactions and declared contrasts of a partial design: by least squares over its cells, since few of them are pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from ....results.designs.design_option import Design
from ....results.designs.design_space import LinearModel, is_estimable
from ...number_format import Column
from ...sweep_data import SweepData
from ..noise.run_noise import STRATUM_AXES
from ..significance.paired_tests import FITTED, holm
from .effect_types import NO_TEST, EffectRow, where_text
from .matched_groups import Numbers, level_combinations, level_pairs

Levels = Mapping[str, tuple[str, str]]
"""(level, reference) by axis."""


@dataclass(kw_only=True)
class FittedRow(EffectRow):
    """A row with the estimate that it tells of."""

    estimate: Estimate


class FittedDesign:
    """The rows of a partial design, fitted measure by measure; seeds of a configuration are one observation, their mean."""

    def __init__(self, data: SweepData, design: Design, columns: Sequence[Column]) -> None:
        self.data, self.design, self.columns = data, design, list(columns)
        self.axes = list(design.space.axes)
        self.numbers = Numbers(data, columns)
        places = [SweepData.place(design, cell) for cell in data.cells]
        self._places = np.array([-1 if place is None else place for place in places])
        self._fits: dict[int, tuple[DesignRegression, dict[str, Any]]] = {}
        self._weights: dict[tuple[Any, ...], np.ndarray] = {}

    def fit(self, place: int) -> tuple[DesignRegression, dict[str, Any]]:
        """The fit of a measure, and the fields that all its rows have; those of pairs alone are empty."""
        if place not in self._fits:
            values = self.numbers.values[:, place]
            inside = self._places >= 0
            have = inside & ~np.isnan(values)
            members = np.unique(self._places[have])
            seeds = np.array([(have & (self._places == one)).sum() for one in members], dtype=int)
            means = np.array([values[have & (self._places == one)].mean() for one in members])
            lacking = Counter(self.numbers.word(cell, place) for cell in np.flatnonzero(inside & ~have).tolist())
            fields = dict.fromkeys(("median", "p_sign", "i2", "p_heterogeneity", "worst"), math.nan) | {
                "measure": self.columns[place],
                "n": len(members),
                "seeds": int(seeds.max(initial=0)),
                "expected": len(np.unique(self._places[inside])),
                "missing": dict(lacking),
                "origins": self.numbers.origins(np.flatnonzero(have), place),
                **dict.fromkeys(("up", "down", "ties"), 0),
            }
            self._fits[place] = DesignRegression(self.design.model, members, means), fields
        return self._fits[place]

    def known(self, levels: Levels, within: Mapping[str, str]) -> bool:
        """Whether the design has these levels."""
        axes = self.design.space.axes
        both = all(axis in axes and set(pair) <= set(axes[axis]) for axis, pair in levels.items())
        return both and all(word in axes[axis] for axis, word in within.items())

    def declared(self, place: int, levels: Levels, where: Mapping[str, str]) -> FittedRow:
        """The estimate of these differences of one measure, whether or not the cells tell it."""
        fit, fields = self.fit(place)
        inside = {axis: word for axis, word in where.items() if axis in self.axes}
        key = tuple(levels.items()), tuple(inside.items())
        if key not in self._weights:
            stratum = next((a for a in STRATUM_AXES if a not in levels and a not in inside and a in self.axes), None)
            model = self.design.model
            known = self.known(levels, inside)
            self._weights[key] = model.contrasted(levels, inside, stratum) if known else np.zeros(model.every.shape[1])
        one = fit.estimate(self._weights[key])
        own = {"mean": one.value, "low": one.low, "high": one.high, "p": one.p, "where": where_text(where)}
        own |= {"method": NO_TEST if math.isnan(one.p) else FITTED}
        own |= {"family": f"{self.columns[place].heading}: {' x '.join(levels)}"}
        return FittedRow(place=place, levels=levels, fields=fields | own, estimate=one)

    def effects(self, levels: Levels, within: bool) -> Iterator[FittedRow]:
        """The estimates of two levels of an axis over the whole grid and, `within` the mixers, where the design estimates what
        these do to that axis."""
        first, (axis,) = STRATUM_AXES[0], levels
        split = within and first != axis and self.design.space.term((first, axis)) in self.design.terms
        wheres = [{}, *({first: level} for level in self.design.space.axes[first])] if split else [{}]
        return self._estimable_rows(levels, *wheres)

    def interactions(self) -> Iterator[FittedRow]:
        """The interactions that the design estimates, against the reference levels, for mixers between all of them."""
        for term in (term for term in self.design.terms if len(term) > 1):
            for levels in level_combinations(
                {axis: level_pairs(self.data, axis, every=axis == STRATUM_AXES[0]) for axis in term}
            ):
                yield from self._estimable_rows(levels, {})

    def _estimable_rows(self, levels: Levels, *wheres: Mapping[str, str]) -> Iterator[FittedRow]:
        rows = (self.declared(place, levels, where) for where in wheres for place in range(len(self.columns)))
        return (row for row in rows if not math.isnan(row.estimate.value))

    def outside(self, rows: Sequence[FittedRow], margins: Sequence[float]) -> list[float]:
        """p of two one-sided tests that a difference lies outside of its margin."""
        estimates = [row.estimate for row in rows]
        return [max(one.above(-margin), one.below(margin)) for one, margin in zip(estimates, margins, strict=True)]

    def corrected(self, rows: Sequence[FittedRow], families: Sequence[Sequence[int]]) -> list[list[float]]:
        """The p of every family after Holm's correction."""
        return [holm([rows[index].estimate.p for index in members]) for members in families]


# --- the linear model -------------------------------------------------------------------------------------------------


LEAST_DF = 4
"""Degrees of freedom from which the spread of single cells can be told apart."""
MOST_LEVERAGE = 0.99
ROUNDING = 1e-9


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


class DesignRegression:
    """The model fitted to one number a combination: `members` are their places in the model's space.

    Variances are HC3 (MacKinnon and White, Journal of Econometrics 29, 1985), which holds where cells of one mixer vary more
    than those of another; with few cells to spare, or one that nothing else stands beside, the pooled one.
    """

    def __init__(self, model: LinearModel, members: np.ndarray, values: np.ndarray, *, pooled: bool = False) -> None:
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
        if not len(self.values) or not is_estimable(self.rows, weights):
            return Estimate(math.nan, math.nan, self.df, math.nan, math.nan, math.nan)
        value = float(weights @ self.coefficients)
        value = 0.0 if abs(value) <= ROUNDING * self._scale else value
        variance = float(weights @ self.covariance @ weights)
        error = math.sqrt(max(variance, 0.0)) if not math.isnan(variance) else math.nan
        if not error > ROUNDING * self._scale:
            return Estimate(value, math.nan, self.df, math.nan, math.nan, math.nan)
        half = float(special.stdtrit(self.df, 0.975)) * error
        return Estimate(value, error, self.df, value - half, value + half, 2 * _upper(abs(value) / error, self.df))


def _upper(t: float, df: int) -> float:
    return float(special.stdtr(df, -t))
