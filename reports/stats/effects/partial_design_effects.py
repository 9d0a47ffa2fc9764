"""Effects, interactions and declared contrasts of a partial design: by least squares over its cells, since few of them are pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from scipy import special

from ....results.contrasts import Contrast
from ....results.designs.design_option import Design
from ....results.designs.design_space import Model, estimable
from ...number_format import Column
from ...sweep_data import SweepData
from ..noise.run_noise import STRATA
from ..significance.paired_tests import FITTED, holm
from . import stopping_rows
from .effect_types import CONFIRMATORY, NONE, Effect, Interaction, where_text
from .matched_groups import Numbers, contrast_column, level_pairs, reference_level
from .needle_baseline import with_floor

__all__ = ["contrasts", "effects", "interactions"]

Levels = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class _Row:
    """An estimate with what it is of."""

    measure: Column
    levels: Levels
    within: Mapping[str, str]
    estimate: Estimate
    fields: dict[str, Any]


class _Fitted:
    """The numbers of a sweep, fitted measure by measure; seeds of a configuration are one observation, their mean."""

    def __init__(self, data: SweepData, columns: Sequence[Column]) -> None:
        assert data.partial is not None
        self.data, self.design, self.columns = data, data.partial, list(columns)
        self.numbers = Numbers(data, columns)
        places = [SweepData.place(self.design, cell) for cell in data.cells]
        self._places = np.array([-1 if place is None else place for place in places])

    @property
    def space(self) -> Any:
        """That of the design."""
        return self.design.space

    @cached_property
    def _fits(self) -> dict[int, tuple[Fit, dict[str, Any]]]:
        return {}

    @cached_property
    def _weights(self) -> dict[tuple[Any, ...], np.ndarray]:
        return {}

    def fit(self, place: int) -> tuple[Fit, dict[str, Any]]:
        """The fit of a measure, and the fields that all its rows have."""
        if place not in self._fits:
            values = self.numbers.values[:, place]
            inside = self._places >= 0
            have = inside & ~np.isnan(values)
            members = np.unique(self._places[have])
            seeds = np.array([(have & (self._places == one)).sum() for one in members], dtype=int)
            means = np.array([values[have & (self._places == one)].mean() for one in members])
            lacking = Counter(self.numbers.word(cell, place) for cell in np.flatnonzero(inside & ~have).tolist())
            fields = {
                "n": len(members),
                "seeds": int(seeds.max(initial=0)),
                "expected": len(np.unique(self._places[inside])),
                "missing": dict(lacking),
                "origins": self.numbers.origins(np.flatnonzero(have), place),
            }
            self._fits[place] = Fit(self.design.model, members, means), fields
        return self._fits[place]

    def known(self, levels: Levels, within: Mapping[str, str]) -> bool:
        """Whether the design has these levels."""
        axes = self.space.axes
        both = all(axis in axes and set(pair) <= set(axes[axis]) for axis, pair in levels.items())
        return both and all(axis in axes and word in axes[axis] for axis, word in within.items())

    def row(self, place: int, levels: Levels, within: Mapping[str, str]) -> _Row:
        """The estimate of these differences of one measure."""
        fit, fields = self.fit(place)
        inside = {axis: word for axis, word in within.items() if axis in self.space.axes}
        key = tuple(levels.items()), tuple(inside.items())
        if key not in self._weights:
            stratum = next((a for a in STRATA if a not in levels and a not in inside and a in self.space.axes), None)
            known = self.known(levels, inside)
            model = self.design.model
            self._weights[key] = model.contrasted(levels, inside, stratum) if known else np.zeros(model.every.shape[1])
        weights = self._weights[key]
        return _Row(self.columns[place], levels, within, fit.estimate(weights), fields)


def effects(data: SweepData, columns: Sequence[Column], *, within: bool = True) -> list[Effect]:
    """The declared contrasts, then every two levels of every axis over the whole grid and, `within` the mixers, where the design
    estimates the interaction."""
    shown = {one.key for one in columns}
    declared = [one for one in contrasts(data) if one.measure.key in shown and (within or not one.where)]
    taken = {(one.measure.key, one.axis, frozenset((one.level, one.reference)), one.where) for one in declared}
    made = _Fitted(data, columns)
    rows = []
    for place in range(len(made.columns)):
        for axis in made.space.axes:
            for pair in level_pairs(data, axis):
                for where in [{}, *(_strata(made.design, axis) if within else [])]:
                    row = made.row(place, {axis: pair}, where)
                    what = (row.measure.key, axis, frozenset(pair), where_text(where))
                    if not math.isnan(row.estimate.value) and what not in taken:
                        rows.append(row)
    return declared + [_effect(row, more) for row, more in _tested(rows)]


def interactions(data: SweepData, columns: Sequence[Column]) -> list[Interaction]:
    """The interactions that the design estimates, against the reference levels, for mixers between all of them."""
    made = _Fitted(data, columns)
    rows = []
    for place in range(len(made.columns)):
        for term in made.design.terms:
            if len(term) < 2:
                continue
            pairs = [level_pairs(data, axis, every=axis == STRATA[0]) for axis in term]
            for chosen in product(*pairs):
                row = made.row(place, dict(zip(term, chosen, strict=True)), {})
                if not math.isnan(row.estimate.value):
                    rows.append(row)
    found = []
    for row, more in _tested(rows):
        levels, references = zip(*row.levels.values(), strict=True)
        about = {"axes": tuple(row.levels), "levels": levels, "references": references, "fours": row.fields["n"]}
        found.append(Interaction(**_common(row), **more, **about))
    return found


def contrasts(data: SweepData) -> list[Effect]:
    """The declared contrasts in the grid's order, one that cannot be estimated too."""
    if not data.contrasts:
        return []
    made = _Fitted(data, [contrast_column(data, one) for one in data.contrasts])
    rows = [made.row(place, {one.axis: _pair(data, one)}, one.within) for place, one in enumerate(data.contrasts)]
    ps = holm([row.estimate.p for row in rows])
    margins = [one.margin for one in data.contrasts]
    asked = [
        place
        for place, (row, margin) in enumerate(zip(rows, margins, strict=True))
        if margin is not None and not math.isnan(row.estimate.error)
    ]
    equal = dict(zip(asked, holm([_outside(rows[place].estimate, margins[place]) for place in asked]), strict=True))
    found = [
        _effect(
            row,
            {"family": CONFIRMATORY, "confirmatory": True, "p_corrected": p},
            margin=margin,
            p_equivalence=equal.get(place, math.nan),
        )
        for place, (row, p, margin) in enumerate(zip(rows, ps, margins, strict=True))
    ]
    return with_floor(data, stopping_rows.applied(data, found))


def _pair(data: SweepData, one: Contrast) -> tuple[str, str]:
    return one.level, reference_level(data.levels(one.axis) or [""]) if one.reference is None else one.reference


def _outside(estimate: Estimate, margin: float | None) -> float:
    """p of two one-sided tests that it lies outside of the margin."""
    assert margin is not None
    return max(estimate.above(-margin), estimate.below(margin))


def _strata(design: Design, axis: str) -> Iterator[dict[str, str]]:
    """The levels of the mixer, where the design estimates what it does to that axis."""
    first = STRATA[0]
    if first != axis and design.space.term((first, axis)) in design.terms:
        yield from ({first: level} for level in design.space.axes[first])


def _tested(rows: Sequence[_Row]) -> Iterator[tuple[_Row, dict[str, Any]]]:
    """Every row with its family and its p after Holm's correction, in the order given."""
    families: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        families.setdefault(f"{row.measure.heading}: {' x '.join(row.levels)}", []).append(place)
    found: dict[int, dict[str, Any]] = {}
    for name, places in families.items():
        for place, p in zip(places, holm([rows[i].estimate.p for i in places]), strict=True):
            found[place] = {"family": name, "confirmatory": False, "p_corrected": p}
    for place, row in enumerate(rows):
        yield row, found[place]


def _common(row: _Row) -> dict[str, Any]:
    """The fields of a Tested that a fit has; those of pairs alone are empty."""
    one = row.estimate
    pairs: dict[str, Any] = {"median": math.nan, "up": 0, "down": 0, "ties": 0, "p_sign": math.nan}
    strata = {"i2": math.nan, "p_heterogeneity": math.nan, "worst": math.nan}
    told: dict[str, Any] = {"mean": one.value, "low": one.low, "high": one.high, "p": one.p}
    told |= {"method": NONE if math.isnan(one.p) else FITTED}
    return row.fields | pairs | strata | told | {"measure": row.measure, "where": where_text(row.within)}


def _effect(row: _Row, about: Mapping[str, Any], **more: Any) -> Effect:
    ((axis, (level, reference)),) = row.levels.items()
    n = 0 if math.isnan(row.estimate.value) else row.fields["n"]
    return Effect(**_common(row), **about, axis=axis, level=level, reference=reference, pairs=n, **more)


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
        value = 0.0 if abs(value) <= ROUNDING * self._scale else value
        variance = float(weights @ self.covariance @ weights)
        error = math.sqrt(max(variance, 0.0)) if not math.isnan(variance) else math.nan
        if not error > ROUNDING * self._scale:
            return Estimate(value, math.nan, self.df, math.nan, math.nan, math.nan)
        half = float(special.stdtrit(self.df, 0.975)) * error
        return Estimate(value, error, self.df, value - half, value + half, 2 * _upper(abs(value) / error, self.df))


def _upper(t: float, df: int) -> float:
    return float(special.stdtr(df, -t))
