"""Effects, interactions and declared contrasts of a partial design, estimated by least squares over its cells.

A partial design lists too few cells for matched pairs.
"""

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
from .effect_types import NO_TEST, EffectRow, subset_text
from .matched_groups import MetricMatrix, level_combinations, level_pairs

Levels = Mapping[str, tuple[str, str]]
"""(level, reference) by axis."""


@dataclass(kw_only=True)
class FittedRow(EffectRow):
    """An effect row with the least-squares estimate that it reports."""

    estimate: Estimate


class FittedDesign:
    """Estimator of the effects of a partial design; one least-squares fit per measure, made on first use and cached.

    The seeds of a configuration are one observation, their mean.
    """

    def __init__(self, data: SweepData, design: Design, columns: Sequence[Column]) -> None:
        """Read the numbers of all cells.

        Args:
            data: The sweep.
            design: Its partial design, with the linear model.
            columns: Measures.
        """
        self.data, self.design, self.columns = data, design, list(columns)
        self.axes = list(design.space.axes)
        self.numbers = MetricMatrix(data, columns)
        design_indices = [SweepData.design_index(design, cell) for cell in data.cells]
        self._design_index = np.array([-1 if index is None else index for index in design_indices])
        self._fits: dict[int, tuple[DesignRegression, dict[str, Any]]] = {}
        self._weights: dict[tuple[Any, ...], np.ndarray] = {}

    def fit(self, column_index: int) -> tuple[DesignRegression, dict[str, Any]]:
        """Return the least-squares fit of a measure, and the fields that all its rows share, by name; cached.

        Observations are the means over seeds of combinations of the design with a number; cells outside the design
        (grid option `include`) are ignored. Fields that only matched pairs have (median, sign test, heterogeneity,
        worst case) are NaN or 0. `n` is the number of combinations, and `missing` counts cells without a number by
        placeholder text.

        Args:
            column_index: Position of the measure among the columns.
        """
        if column_index not in self._fits:
            values = self.numbers.values[:, column_index]
            in_design = self._design_index >= 0
            has_value = in_design & ~np.isnan(values)
            members = np.unique(self._design_index[has_value])
            seeds = np.array([(has_value & (self._design_index == member)).sum() for member in members], dtype=int)
            means = np.array([values[has_value & (self._design_index == member)].mean() for member in members])
            missing = Counter(
                self.numbers.placeholder(cell, column_index) for cell in np.flatnonzero(in_design & ~has_value).tolist()
            )
            fields = dict.fromkeys(("median", "p_sign", "i2", "p_heterogeneity", "worst"), math.nan) | {
                "measure": self.columns[column_index],
                "n": len(members),
                "seeds": int(seeds.max(initial=0)),
                "expected": len(np.unique(self._design_index[in_design])),
                "missing": dict(missing),
                "origins": self.numbers.origins(np.flatnonzero(has_value), column_index),
                **dict.fromkeys(("up", "down", "ties"), 0),
            }
            self._fits[column_index] = DesignRegression(self.design.model, members, means), fields
        return self._fits[column_index]

    def has_levels(self, levels: Levels, subset: Mapping[str, str]) -> bool:
        """Return True if the design's space contains all these levels, and those of `subset`, whose axes must exist."""
        axes = self.design.space.axes
        has_axis_levels = all(axis in axes and set(pair) <= set(axes[axis]) for axis, pair in levels.items())
        return has_axis_levels and all(level in axes[axis] for axis, level in subset.items())

    def contrast_row(self, column_index: int, levels: Levels, subset: Mapping[str, str]) -> FittedRow:
        """Return the row of one difference of one measure; its estimate is NaN if the cells cannot determine it.

        Its family is the measure and the axes; the method is `least-squares`, or `none` without a p.

        Args:
            column_index: Position of the measure among the columns.
            levels: (level, reference) by axis; several axes give an interaction.
            subset: Level by axis at which the difference is taken; empty for the average over the design's space. Axes
                that the design lacks are ignored in the estimate.
        """
        fit, fields = self.fit(column_index)
        in_subset = {axis: level for axis, level in subset.items() if axis in self.axes}
        key = tuple(levels.items()), tuple(in_subset.items())
        if key not in self._weights:
            stratum = next((a for a in STRATUM_AXES if a not in levels and a not in in_subset and a in self.axes), None)
            model = self.design.model
            is_present = self.has_levels(levels, in_subset)
            self._weights[key] = (
                model.interaction_contrast(levels, in_subset, stratum)
                if is_present
                else np.zeros(model.full_matrix.shape[1])
            )
        estimate = fit.estimate(self._weights[key])
        row_fields = {
            "mean": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "p": estimate.p,
            "where": subset_text(subset),
        }
        row_fields |= {"method": NO_TEST if math.isnan(estimate.p) else FITTED}
        row_fields |= {"family": f"{self.columns[column_index].heading}: {' x '.join(levels)}"}
        return FittedRow(column_index=column_index, levels=levels, fields=fields | row_fields, estimate=estimate)

    def effect_rows(self, levels: Levels, include_strata: bool) -> Iterator[FittedRow]:
        """Return an iterator of the estimable differences of two levels of an axis, for every measure.

        They are over the full space and, with `include_strata`, within each mixer if the model has the mixer-by-axis
        interaction. Subsets are the outer loop, measures the inner one.

        Args:
            levels: One axis with its (level, reference).
            include_strata: Also return differences within each mixer.
        """
        first, (axis,) = STRATUM_AXES[0], levels
        has_stratum_term = (
            include_strata and first != axis and self.design.space.term((first, axis)) in self.design.terms
        )
        subsets = [{}, *({first: level} for level in self.design.space.axes[first])] if has_stratum_term else [{}]
        return self._estimable_rows(levels, *subsets)

    def interaction_rows(self) -> Iterator[FittedRow]:
        """Yield the estimable interactions of the design's model (terms of two or more axes), for every measure.

        Levels are compared to reference levels, mixers also among each other; there are no rows within strata.
        """
        for term in (term for term in self.design.terms if len(term) > 1):
            for levels in level_combinations(
                {axis: level_pairs(self.data, axis, all_pairs=axis == STRATUM_AXES[0]) for axis in term}
            ):
                yield from self._estimable_rows(levels, {})

    def _estimable_rows(self, levels: Levels, *subsets: Mapping[str, str]) -> Iterator[FittedRow]:
        """Return an iterator of the rows of every subset and measure, without those that the cells cannot determine."""
        rows = (
            self.contrast_row(column_index, levels, subset)
            for subset in subsets
            for column_index in range(len(self.columns))
        )
        return (row for row in rows if not math.isnan(row.estimate.value))

    def equivalence_p_values(self, rows: Sequence[FittedRow], margins: Sequence[float]) -> list[float]:
        """Return the p value of the two one-sided tests (TOST) that a difference lies within its margin, row by row.

        The larger of the two one-sided p values, not corrected; NaN without a standard error.

        Args:
            rows: Rows with their estimates.
            margins: Margin of each row, above 0, in the unit of its measure.
        """
        estimates = [row.estimate for row in rows]
        return [
            max(estimate.p_at_most(-margin), estimate.p_at_least(margin))
            for estimate, margin in zip(estimates, margins, strict=True)
        ]

    def corrected_p_values(self, rows: Sequence[FittedRow], families: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the p values of every family, given by the indices of its rows, after Holm's correction."""
        return [holm([rows[index].estimate.p for index in members]) for members in families]


# --- the linear model -------------------------------------------------------------------------------------------------


MIN_ROBUST_DF = 4
"""Residual degrees of freedom from which the robust variance (HC3) is used instead of the pooled one."""
MAX_ROBUST_LEVERAGE = 0.99
"""Largest leverage of an observation with which the robust variance (HC3) is used."""
ROUNDING_TOLERANCE = 1e-9
"""Estimates and standard errors below this share of the largest observation are rounding errors."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of a linear combination of regression coefficients with its 95% t interval.

    All but `df` are NaN if the cells cannot determine it. `error` (standard error), `low`, `high` and `p` (two-sided,
    of zero, not corrected) are NaN without a residual variance. `df` are the residual degrees of freedom.
    """

    value: float
    error: float
    df: int
    low: float
    high: float
    p: float

    def p_at_most(self, bound: float) -> float:
        """Return the one-sided p value of the hypothesis "true value at most `bound`"; NaN without an error."""
        return _upper_tail_p((self.value - bound) / self.error, self.df) if self.error > 0 else math.nan

    def p_at_least(self, bound: float) -> float:
        """Return the one-sided p value of the hypothesis "true value at least `bound`"; NaN without an error."""
        return _upper_tail_p((bound - self.value) / self.error, self.df) if self.error > 0 else math.nan


class DesignRegression:
    """Least-squares regression of a linear model of a design on one observation per configuration.

    Variances are HC3, which is valid if cells of one mixer vary more than those of another. With few residual degrees
    of freedom (below MIN_ROBUST_DF), or a leverage of MAX_ROBUST_LEVERAGE or more, the pooled residual variance is
    used.

    Source:
        HC3: MacKinnon and White, Journal of Econometrics 29, 1985.
    """

    def __init__(self, model: LinearModel, members: np.ndarray, values: np.ndarray, *, pooled: bool = False) -> None:
        """Fit the model.

        Attributes are the observed `rows`, `values`, `coefficients` [column], `df` (observations minus rank), `robust`
        (variances are HC3) and `covariance` of the coefficients (NaN without a residual degree of freedom).

        Args:
            model: Linear model with the rows of all combinations of the design's space.
            members: Indices of the observed combinations in that space, [n].
            values: Observation of each, [n].
            pooled: Use the pooled variance in any case.
        """
        self.model, self.rows, self.values = model, model.full_matrix[members], values
        inverse = np.linalg.pinv(self.rows.T @ self.rows, rcond=1e-10, hermitian=True)
        self.coefficients = inverse @ self.rows.T @ values
        residuals = values - self.rows @ self.coefficients
        self.df = len(values) - int(np.linalg.matrix_rank(self.rows))
        leverage = ((self.rows @ inverse) * self.rows).sum(axis=1)
        self.robust = not pooled and self.df >= MIN_ROBUST_DF and float(leverage.max(initial=0.0)) < MAX_ROBUST_LEVERAGE
        if self.robust:
            weighted = (self.rows * (residuals / (1 - leverage))[:, None]) @ inverse
            self.covariance = weighted.T @ weighted
        else:
            self.covariance = inverse * (float(residuals @ residuals) / self.df if self.df else math.nan)
        self._scale = float(np.abs(values).max(initial=0.0))

    def estimate(self, weights: np.ndarray) -> Estimate:
        """Return the estimate of the combination of coefficients with these weights, [column], with its 95% t interval.

        An estimate below rounding is exactly 0. All fields but `df` are NaN if the cells cannot determine the
        combination; without a residual variance all but value and `df`.
        """
        if not len(self.values) or not is_estimable(self.rows, weights):
            return Estimate(math.nan, math.nan, self.df, math.nan, math.nan, math.nan)
        value = float(weights @ self.coefficients)
        value = 0.0 if abs(value) <= ROUNDING_TOLERANCE * self._scale else value
        variance = float(weights @ self.covariance @ weights)
        error = math.sqrt(max(variance, 0.0)) if not math.isnan(variance) else math.nan
        if not error > ROUNDING_TOLERANCE * self._scale:
            return Estimate(value, math.nan, self.df, math.nan, math.nan, math.nan)
        half = float(special.stdtrit(self.df, 0.975)) * error
        return Estimate(
            value, error, self.df, value - half, value + half, 2 * _upper_tail_p(abs(value) / error, self.df)
        )


def _upper_tail_p(t: float, df: int) -> float:
    """Return the probability that Student's t with `df` degrees of freedom is above `t`."""
    return float(special.stdtr(df, -t))
