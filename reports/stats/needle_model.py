"""Quasi-binomial regression of the needle's digit accuracy on the axes of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from ...results.console.text import counted
from ..number_format import NEEDLE, Column, column_of, format_length
from ..sweep_data import SweepData
from .effects.effects import STRATUM_AXES, reference_level, values_frame, varying_axes

COLUMNS = ("term", "df", "deviance", "F", "p", "odds_ratio", "low", "high")
CONFIDENCE_LEVEL = 0.95
MAX_LINEAR_PREDICTOR = 12.0  # largest linear predictor: beyond (a share of 6e-6) the odds count as infinite
MAX_ITERATIONS = 50  # Newton steps; a dozen suffice for odds below that

Terms = dict[tuple[str, ...], np.ndarray]


@dataclass(frozen=True)
class NeedleModel:
    """Quasi-binomial model of the needle's digit accuracy at one context length.

    `frame` has the columns term, df, deviance, F, p, odds_ratio, low and high, NaN where a row lacks one. Rows of terms
    come first, then the residual, then levels (with odds ratio and interval, without deviance and F); it is empty
    without a model.
    `numbers` are the cells it was fitted to, with `value` (share of right digits) and `trials`. `scale` is the
    dispersion: the variance as a multiple of that of independent trials (NaN without a model, 0 if it explains
    everything). `remarks` are footnotes.
    """

    column: Column
    frame: pd.DataFrame
    numbers: pd.DataFrame
    scale: float
    remarks: tuple[str, ...]


def needle_columns(data: SweepData) -> list[Column]:
    """Return the columns of the needle's digit accuracy at every length that is shown.

    The shortest length comes first; empty without a length.
    """
    lengths = data.lengths(*NEEDLE)
    return [column_of(*NEEDLE, f"Ndl@{format_length(length)}", length=length) for length in lengths if length]


def needle_model(data: SweepData, column: Column) -> NeedleModel:
    """Fit a quasi-binomial model: logit of the share of right digits ~ axes and, where possible, pairs of axes.

    A cell counts with its trials, whose digits are right or wrong together; cells without a count are dropped. The
    dispersion (Pearson's chi-square over the residual degrees of freedom) absorbs the dependence of cells and trials.
    Terms have an F test of type II: the drop in deviance without the term and all that contain it, compared with the
    same model with the term, over the dispersion. Levels have odds ratios to their reference with 95% intervals, from
    the model without pairs. Groups of cells in which no digit, or every digit, is right have infinite odds: they are
    left out and named in the remarks. No p is corrected.

    Args:
        data: The sweep.
        column: Needle accuracy at one length.

    Returns:
        A model with an empty frame, and the reason as its last remark, if nothing can be fitted.
    """
    numbers = values_frame(data, column)
    numbers = numbers.assign(trials=numbers["cell"].map(_trial_counts(data, column)).astype(float))
    numbers = numbers[numbers["trials"] > 0].reset_index(drop=True)
    empty = pd.DataFrame(columns=list(COLUMNS))
    if numbers.empty:
        return NeedleModel(
            column, empty, numbers, math.nan, ("no cell has a needle accuracy with a recorded number of digits",)
        )
    cells, remarks = _without_separated(numbers, [axis for axis in varying_axes(data) if numbers[axis].nunique() > 1])
    names = [axis for axis in varying_axes(data) if cells[axis].nunique() > 1]
    if not names:
        if cells.empty:
            reason = "every cell is excluded, so there is nothing to model"
        elif remarks:
            reason = "without the excluded cells no axis varies, so there is nothing to model"
        else:
            reason = "no axis varies among the cells with a needle accuracy, so there is nothing to model"
        return NeedleModel(column, empty, numbers, math.nan, (*remarks, reason))
    if cells["value"].nunique() == 1:
        same = f"the share of right digits is the same in all {counted(len(cells), 'cell')}; there is nothing to model"
        return NeedleModel(column, empty, numbers, math.nan, (*remarks, same))
    main: Terms = {(name,): _indicators(cells[name], data.levels(name)) for name in names}
    pairs, pair_remarks = _pairs(cells, main)
    for terms in (main | pairs, main) if pairs else (main,):
        if (fitted := _fit(cells, terms)) is not None:
            break
        pair_remarks = [
            *pair_remarks,
            "two-way terms are excluded: with them, some odds are infinite or no residual degree of freedom remains",
        ]
    else:
        reason = "no model: among the remaining cells, some odds are infinite or no residual degree of freedom remains"
        return NeedleModel(column, empty, numbers, math.nan, (*remarks, reason))
    scale = fitted.dispersion
    if scale <= 1e-9:
        return NeedleModel(
            column, empty, numbers, 0.0, (*remarks, "the model fits perfectly, so there is no error to test against")
        )
    rows = _term_rows(cells, terms, fitted, scale) + _level_rows(data, cells, main)
    return NeedleModel(column, pd.DataFrame(rows, columns=list(COLUMNS)), cells, scale, (*remarks, *pair_remarks))


def _trial_counts(data: SweepData, column: Column) -> dict[str, float]:
    """Return the number of needle trials of each cell with a stored value, by cell id; 0 if no count was recorded.

    It is the number of answered digits over the digits of a trial.
    """
    digits = data.metric(column.probe, column.metric).trials or 1
    values = {cell.cell_id: data.measured_value(cell, column) for cell in data.cells}
    return {cell: (value.n or 0) / digits for cell, value in values.items() if value is not None}


# --- what has no odds -----------------------------------------------------------------------------------------------


def _without_separated(numbers: pd.DataFrame, names: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Return (cells without separated groups, list of at most one remark that names these).

    A group is a level, or a combination of the strata's levels (mixer, memory), whose cells are all at 0 or all at 1.
    Removal repeats until no such group is left, so all cells may go.

    Args:
        numbers: One row per cell, with `value` and the axes.
        names: Axes that vary.
    """
    cells, separated = numbers, []
    strata = tuple(name for name in STRATUM_AXES if name in names)
    while True:
        for group in [(name,) for name in names] + ([strata] if len(strata) > 1 else []):
            shares = cells.groupby(list(group))["value"]
            bad = shares.transform("max").le(0) | shares.transform("min").ge(1)
            if bad.any():
                break
        else:
            break
        removed = cells[bad]
        for levels, group_cells in removed.groupby(list(group)):
            share = "no digit" if group_cells["value"].max() <= 0 else "every digit"
            levels_text = ", ".join(f"{axis}={level}" for axis, level in zip(group, levels, strict=True))
            separated.append(
                f"{levels_text}: {share} right in {len(group_cells)} cell{'s' if len(group_cells) > 1 else ''}"
            )
        cells = cells[~bad]
    return cells.reset_index(drop=True), [
        f"excluded, since their odds are infinite: {'; '.join(separated)}"
    ] if separated else []


def _pairs(cells: pd.DataFrame, main: Terms) -> tuple[Terms, list[str]]:
    """Return (design columns of the usable pairs of axes by term, list of at most one remark on the others).

    A pair is usable if all of its combinations have cells, and none has only wrong or only right digits.

    Args:
        cells: One row per cell, with trials and share of right digits.
        main: Design columns of the main effects, by one-element term.
    """
    pairs: Terms = {}
    missing = []
    for a, b in combinations([name for (name,) in main], 2):
        shares = cells.groupby([a, b])["value"].mean()
        has_all_combinations = len(shares) == cells[a].nunique() * cells[b].nunique()
        if has_all_combinations and shares.gt(0).all() and shares.lt(1).all():
            products = np.einsum("ni,nj->nij", main[a,], main[b,])
            pairs[a, b] = products.reshape(len(cells), -1)
        else:
            missing.append(f"{a} x {b}")
    return pairs, [
        f"two-way terms excluded, since some of their combinations have no cell or infinite odds: {', '.join(missing)}"
    ] if missing else []


# --- the model ----------------------------------------------------------------------------------------------------


def _indicators(levels: pd.Series, order: Sequence[str]) -> np.ndarray:
    """Return indicator columns of the levels without the reference, [N, levels - 1]."""
    present = _ordered(levels, order)
    return np.asarray(np.stack([(levels == level).to_numpy(dtype=float) for level in present[1:]], axis=1))


def _ordered(levels: pd.Series, order: Sequence[str]) -> list[str]:
    """Return the levels that occur, the reference level first and the others in the order of `order`."""
    present = [level for level in order if (levels == level).any()]
    reference = reference_level(present)
    return [reference, *(level for level in present if level != reference)]


@dataclass(frozen=True)
class _BinomialFit:
    """Binomial regression with logit link, as fitted by maximum likelihood.

    `coefficients` (K,) are logarithms of odds, `errors` (K,) their standard errors for a dispersion of 1. `deviance`
    and `pearson` (Pearson's chi-squared) have `residual_df` degrees of freedom.
    """

    coefficients: np.ndarray
    errors: np.ndarray
    deviance: float
    pearson: float
    residual_df: int

    @property
    def dispersion(self) -> float:
        """Variance as a multiple of that of independent trials."""
        return self.pearson / self.residual_df


def _fit(cells: pd.DataFrame, terms: Terms) -> _BinomialFit | None:
    """Fit the share of right digits, weighted by trials, by iteratively reweighted least squares.

    Source: McCullagh and Nelder, Generalized Linear Models, 1989, section 4.4.

    Args:
        cells: One row per cell, with trials and share of right digits.
        terms: Design columns by term, without the intercept, which is added first.

    Returns:
        The fit; None without convergence to finite odds (linear predictors below 12), with collinear columns, or no
        residual degree of freedom.
    """
    design = np.concatenate([np.ones((len(cells), 1)), *terms.values()], axis=1)
    if design.shape[1] >= len(cells) or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    trials, shares = cells["trials"].to_numpy(dtype=float), cells["value"].to_numpy(dtype=float)
    linear = special.logit((shares * trials + 0.5) / (trials + 1))  # finite for shares of 0 and 1
    coefficients = np.zeros(design.shape[1])
    for _ in range(MAX_ITERATIONS):
        expected = special.expit(linear)
        weights = trials * expected * (1 - expected)
        root = np.sqrt(weights)
        target = linear + (shares - expected) / (expected * (1 - expected))
        before, coefficients = coefficients, np.linalg.lstsq(root[:, None] * design, root * target, rcond=None)[0]
        linear = design @ coefficients
        if not np.abs(linear).max() < MAX_LINEAR_PREDICTOR:
            return None
        if np.abs(coefficients - before).max() < 1e-10:
            break
    else:
        return None
    expected = special.expit(linear)
    weights = trials * expected * (1 - expected)
    likelihoods = special.xlogy(shares, shares / expected) + special.xlogy(1 - shares, (1 - shares) / (1 - expected))
    return _BinomialFit(
        coefficients=coefficients,
        errors=np.sqrt(np.diag(np.linalg.inv(design.T @ (weights[:, None] * design)))),
        deviance=float(2 * (trials * likelihoods).sum()),
        pearson=float((trials**2 * (shares - expected) ** 2 / weights).sum()),
        residual_df=len(cells) - design.shape[1],
    )


def _term_rows(cells: pd.DataFrame, terms: Terms, fitted: _BinomialFit, scale: float) -> list[dict[str, Any]]:
    """Return one row per term with its deviance, F and p, and a last row for the residual.

    Rows are dicts with the keys term ("axis x axis"), df, deviance, F and p; the residual's has no F and p. The
    deviance of a term is the drop against the model without it and all terms that contain it (type II), at least 0. F
    is that per degree of freedom over `scale`; F and p are absent if a model cannot be fitted.

    Args:
        cells: One row per cell, with trials and share of right digits.
        terms: Design columns by term.
        fitted: fit with all terms.
        scale: Dispersion, by which F is divided; above 0.
    """
    rows = []
    for term, columns in terms.items():
        without_term = {name: term_columns for name, term_columns in terms.items() if not set(term) <= set(name)}
        with_term = without_term | {term: columns}
        larger, smaller = _deviance(cells, with_term, terms, fitted), _deviance(cells, without_term, terms, fitted)
        row: dict[str, Any] = {"term": " x ".join(term), "df": columns.shape[1], "deviance": max(smaller - larger, 0.0)}
        if math.isfinite(row["deviance"]):
            row["F"] = row["deviance"] / columns.shape[1] / scale
            row["p"] = float(special.fdtrc(columns.shape[1], fitted.residual_df, row["F"]))
        rows.append(row)
    rows.append({"term": "residual", "df": fitted.residual_df, "deviance": fitted.deviance})
    return rows


def _deviance(cells: pd.DataFrame, subset: Terms, terms: Terms, fitted: _BinomialFit) -> float:
    """Return the deviance of the model with the terms of `subset`; NaN if it cannot be fitted.

    Args:
        cells: One row per cell, with trials and share of right digits.
        subset: Design columns by term.
        terms: Those of the full model.
        fitted: fit of the full model, returned without a new fit if `subset` equals `terms`.
    """
    if subset.keys() == terms.keys():
        return fitted.deviance
    fitted_subset = _fit(cells, subset)
    return math.nan if fitted_subset is None else fitted_subset.deviance


def _level_rows(data: SweepData, cells: pd.DataFrame, main: Terms) -> list[dict[str, Any]]:
    """Return one row per level but the reference, with its odds ratio to that, 95% interval and p.

    The model has main effects only.

    Rows are dicts with the keys `term` ("axis: level / reference"), `df`, `p`, `odds_ratio`, `low` and `high`; odds
    ratios are not logarithms. Intervals and p (two-sided, not corrected) are Student's t with the model's own
    dispersion. Empty if that model cannot be fitted.

    Args:
        data: The sweep, for the order of levels.
        cells: One row per cell, with trials and share of right digits.
        main: Design columns of the main effects, by one-element term.
    """
    if (fitted := _fit(cells, main)) is None:
        return []
    t = float(special.stdtrit(fitted.residual_df, (1 + CONFIDENCE_LEVEL) / 2))
    scale = math.sqrt(fitted.dispersion)
    rows, index = [], 1
    for (name,) in main:
        reference, *non_reference = _ordered(cells[name], data.levels(name))
        for level in non_reference:
            log_odds, error = float(fitted.coefficients[index]), scale * float(fitted.errors[index])
            bounds = {"odds_ratio": log_odds, "low": log_odds - t * error, "high": log_odds + t * error}
            p = 2 * float(special.stdtr(fitted.residual_df, -abs(log_odds) / error))
            odds = {name_of_bound: math.exp(x) for name_of_bound, x in bounds.items()}
            rows.append({"term": f"{name}: {level} / {reference}", "df": 1, "p": p, **odds})
            index += 1
    return rows
