"""Analysis of variance over the axes of a sweep."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ..number_format import Column
from ..sweep_data import SweepData
from .effects.effects import NEAR_REPLICATE_AXIS, STRATUM_AXES, values_frame, varying_axes
from .significance.permutation_anova import AnovaFit, fit_anova

COLUMNS = ("term", "df", "sum_sq", "F", "p", "p_permuted", "p_robust", "omega_sq", "partial_eta_sq")
SHAPIRO_SIZES = (3, 5_000)  # smallest and largest sample of the Shapiro-Wilk test
ASSUMPTION_ALPHA = 0.05
MIN_RESIDUAL_DF = 5  # residual degrees of freedom below which F has little power

Terms = dict[tuple[str, ...], np.ndarray]


@dataclass(frozen=True)
class AnovaResult:
    """Analysis of variance of one measure.

    `frame` has the columns term, df, sum_sq, F, p, p_permuted, p_robust, omega_sq and partial_eta_sq. It has a row per
    term ("axis x axis"), then `residual` and, with several runs of a configuration, `lack of fit` and
    `pure error`. `sum_sq` is in the squared unit of the measure, shares as fractions; no p is corrected. `numbers`
    holds the observations (as `values_frame`), `remarks` the footnotes. `permutations` is the number of permutations
    behind `p_permuted`.
    """

    column: Column
    frame: pd.DataFrame
    numbers: pd.DataFrame
    remarks: tuple[str, ...]
    permutations: int = 0


def anova_results(data: SweepData, columns: Sequence[Column]) -> list[AnovaResult]:
    """Return the type III analysis of variance of every measure, with sum contrasts, in the order of the columns.

    Terms are main effects and, where the design allows, two-way and three-way interactions; for a partial design the
    terms it was made for. An observation is a cell, so seeds are several observations. `omega_sq` = (SS - df MS_res) /
    (SS_total + MS_res), `partial_eta_sq` = SS / (SS + SS_res); p is that of the F test, `p_permuted` of a permutation
    test (Freedman and Lane), `p_robust` of Box's F, which bears unequal variances. Measures that the same cells have
    share one fit. Where configurations have several runs, the residual is split into lack of fit and pure error.

    Args:
        data: The sweep.
        columns: Measures.

    Returns:
        One result per column. Its frame is empty if no analysis is possible; the first remark then gives the reason.
    """
    numbers = [values_frame(data, column) for column in columns]
    by_cells: dict[tuple[str, ...], list[int]] = {}
    results: dict[int, AnovaResult] = {}
    for index, frame in enumerate(numbers):
        if (reason := _obstacle(data, columns[index], frame)) is not None:
            results[index] = AnovaResult(columns[index], pd.DataFrame(columns=list(COLUMNS)), frame, (reason,))
        else:
            by_cells.setdefault(tuple(frame["cell"]), []).append(index)
    for indices in by_cells.values():
        frame = numbers[indices[0]]
        varying = [axis for axis in varying_axes(data) if frame[axis].nunique() > 1]
        terms, remarks = _terms(frame, varying, data.partial_design.terms if data.partial_design is not None else None)
        if not terms:
            for index in indices:
                reason = f"too few cells have {columns[index].heading} ({len(frame)}) for an analysis of variance; finish the sweep"
                results[index] = AnovaResult(columns[index], pd.DataFrame(columns=list(COLUMNS)), frame, (reason,))
            continue
        fitted = fit_anova(
            terms, np.stack([numbers[index]["value"].to_numpy(dtype=float) for index in indices], axis=1)
        )
        names = [name for (name, *further_axes) in terms if not further_axes]
        for measure, index in enumerate(indices):
            table, table_remarks = _table(terms, fitted, measure, numbers[index], names)
            checked = (*remarks, *table_remarks, *_checks(fitted, measure, numbers[index], names))
            results[index] = AnovaResult(columns[index], table, numbers[index], checked, fitted.permutations)
    return [results[index] for index in range(len(columns))]


def _obstacle(data: SweepData, column: Column, frame: pd.DataFrame) -> str | None:
    """Return the reason for no analysis of variance; None if it is possible.

    Reasons are no numbers, no varying axis and no variance.

    Args:
        data: The sweep.
        column: The measure, for its heading.
        frame: Its observations, as `values_frame`.
    """
    if frame.empty:
        return f"no cell has {column.heading}"
    if not any(frame[axis].nunique() > 1 for axis in varying_axes(data)):
        return f"no axis varies among the cells that have {column.heading}; an analysis of variance needs one"
    values = frame["value"].to_numpy(dtype=float)
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return f"{column.heading} is the same in all {len(frame)} cells; there is no variance to analyse"
    return None


# --- the model ----------------------------------------------------------------------------------------------------


def _terms(
    frame: pd.DataFrame, names: Sequence[str], planned: Sequence[tuple[str, ...]] | None = None
) -> tuple[Terms, list[str]]:
    """Return the design columns of the largest supported model, by term, and remarks on what it leaves out.

    An interaction needs an observation in each of its combinations. Models are tried with interactions of two and three
    axes, then of two, then with main effects alone. A model is supported if it has full rank and a residual degree of
    freedom.

    Args:
        frame: One row per observation.
        names: Axes that vary.
        planned: Terms of a partial design, used if the data supports them, else as for a full grid; None for a full
            grid.

    Returns:
        Columns [N, df] by term, a tuple of axes, without the intercept; and remarks. ({}, []) if even the main effects
        leave no residual degree of freedom.
    """
    main = {(name,): _contrasts(frame[name]) for name in names}
    if planned is not None:
        terms = {term: _product([main[name,] for name in term]) for term in planned if set(term) <= set(names)}
        design = np.concatenate([np.ones((len(frame), 1)), *terms.values()], axis=1)
        if design.shape[1] < len(frame) and np.linalg.matrix_rank(design) == design.shape[1]:
            return terms, [
                "partial design: only the terms that it was built to estimate, all others are in the residual"
            ]
    interactions: list[Terms] = []
    remarks = []
    for order in (2, 3):
        complete: Terms = {}
        missing = []
        for term in combinations(names, order):
            if len(frame.groupby(list(term)).size()) < math.prod(frame[name].nunique() for name in term):
                missing.append(" x ".join(term))
            else:
                complete[term] = _product([main[name,] for name in term])
        interactions.append(complete)
        if missing:
            are = "is" if len(missing) == 1 else "are"
            of_them = "some of its" if len(missing) == 1 else "some of their"
            remarks.append(f"{', '.join(missing)} {are} excluded, since {of_them} combinations have no measurement")
    for orders in ((2, 3), (2,), ()):
        terms = main | {name: columns for order in orders for name, columns in interactions[order - 2].items()}
        design = np.concatenate([np.ones((len(frame), 1)), *terms.values()], axis=1)
        if design.shape[1] < len(frame) and np.linalg.matrix_rank(design) == design.shape[1]:
            if orders == ():
                model_remarks = ["the design supports no interactions"] if interactions[0] else remarks[:1]
            elif orders == (2,):
                model_remarks = remarks[: bool(remarks) and len(interactions[0]) < math.comb(len(names), 2)]
                model_remarks += (
                    ["three-way terms stay in the residual"] if interactions[1] else remarks[len(model_remarks) :]
                )
            else:
                model_remarks = remarks
            return terms, model_remarks
    return {}, []


def _contrasts(levels: pd.Series) -> np.ndarray:
    """Return the sum contrasts of an axis, [N, levels - 1].

    Levels are in the order of first appearance; the last of them is -1 in all columns.
    """
    codes, levels_present = pd.factorize(levels)
    return np.concatenate([np.eye(len(levels_present) - 1), np.full((1, len(levels_present) - 1), -1.0)])[codes]


def _product(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the columns of an interaction: all products of one column of each part.

    Parts are [N, width]; the result is [N, product of widths], the last part fastest.
    """
    product = parts[0]
    for part in parts[1:]:
        product = np.einsum("ni,nj->nij", product, part).reshape(len(product), -1)
    return product


def _table(
    terms: Terms, fitted: AnovaFit, measure: int, numbers: pd.DataFrame, names: Sequence[str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of a measure as a frame with the columns of `AnovaResult.frame`, and remarks on its residual.

    Rows are the terms in order, `residual` and, where configurations have several runs, `lack of fit` (tested against
    pure error) and `pure error`. Columns that a row lacks are NaN. Without a residual all F, p and effect sizes are
    NaN.

    Args:
        terms: Design columns by term.
        fitted: Fit of all measures.
        measure: Index of the measure in the fit.
        numbers: Observations, with `value` and the axes.
        names: Axes of the model.
    """
    residual, df = float(fitted.residual[measure]), fitted.residual_df
    values = numbers["value"].to_numpy(dtype=float)
    total = float(((values - values.mean()) ** 2).sum())
    exact = residual == 0
    rows = []
    for index, term in enumerate(terms):
        square, term_df = float(fitted.squares[index, measure]), int(fitted.dfs[index])
        row: dict[str, Any] = {
            "term": " x ".join(term),
            "df": term_df,
            "sum_sq": square,
            "F": float(fitted.f_statistics[index, measure]),
        }
        row |= {name: float(getattr(fitted, name)[index, measure]) for name in ("p", "p_permuted", "p_robust")}
        error = residual / df
        row["omega_sq"] = math.nan if exact else (square - term_df * error) / (total + error)
        row["partial_eta_sq"] = math.nan if exact else square / (square + residual)
        rows.append(row)
    rows.append({"term": "residual", "df": df, "sum_sq": residual})
    groups = numbers.groupby(list(names))["value"]
    pure_df = len(numbers) - groups.ngroups
    if not exact and 0 < pure_df < df:
        pure = float(((numbers["value"] - groups.transform("mean")) ** 2).sum())
        lack: dict[str, Any] = {"term": "lack of fit", "df": df - pure_df, "sum_sq": max(residual - pure, 0.0)}
        if pure > 1e-12 * total:
            lack["F"] = (lack["sum_sq"] / lack["df"]) / (pure / pure_df)
            lack["p"] = float(stats.f.sf(lack["F"], lack["df"], pure_df))
        rows += [lack, {"term": "pure error", "df": pure_df, "sum_sq": pure}]
    remarks = (
        [
            "the residual is zero: the terms give every value exactly (so do constant values); F, p and effect sizes are empty"
        ]
        if exact
        else []
    )
    if not exact and df < MIN_RESIDUAL_DF:
        remarks.append(
            f"only {df} residual degree{'' if df == 1 else 's'} of freedom, so the F tests have little power"
        )
    return pd.DataFrame(rows, columns=list(COLUMNS)), remarks


# --- what the F test takes for granted ------------------------------------------------------------------------------


def _checks(fitted: AnovaFit, measure: int, numbers: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return a list with one warning if the residuals are not normal or have unequal variances; else empty.

    Normality is tested by Shapiro and Wilk with 3 to 5,000 observations, equal variances by Levene's test between the
    strata (mixer, memory; else the first two axes). Groups that differ in the regularizer alone and have no variance
    count as unequal variances. The warning names the p value to use instead: "p Box" for unequal variances, else "p
    perm". Empty also without a residual.

    Args:
        fitted: Fit of all measures.
        measure: Index of the measure in the fit.
        numbers: Observations, with `value` and the axes.
        names: Axes of the model.
    """
    # residuals are scaled up to the size of the errors
    scaled_residuals = fitted.residuals[:, measure] * math.sqrt(len(numbers) / fitted.residual_df)
    if fitted.residual[measure] == 0:
        return []
    problems, advised_column = [], "p perm"
    if (
        SHAPIRO_SIZES[0] <= len(scaled_residuals) <= SHAPIRO_SIZES[1]
        and (p := float(stats.shapiro(scaled_residuals).pvalue)) < ASSUMPTION_ALPHA
    ):
        problems.append(f"the residuals are not normal (Shapiro p {_p_text(p)})")
    strata = [name for name in STRATUM_AXES if name in names] or list(names[:2])
    groups = [
        part.to_numpy()
        for _, part in pd.Series(scaled_residuals).groupby([numbers[name].to_numpy() for name in strata])
    ]
    groups = [part for part in groups if len(part) > 1]
    if len(groups) > 1 and (levene_p := _levene(groups)) is not None and levene_p < ASSUMPTION_ALPHA:
        advised_column = "p Box"
        spreads = sorted(float(part.std(ddof=1)) for part in groups)
        problems.append(
            f"the spread of the residuals differs by {' and '.join(strata)} (Levene p {_p_text(levene_p)}, sd {spreads[0]:.3g} to {spreads[-1]:.3g})"
        )
    same = [name for name in names if name != NEAR_REPLICATE_AXIS]
    values = numbers.groupby(same)["value"] if same else None
    if values is not None and NEAR_REPLICATE_AXIS in names:
        sizes, ranges = values.size(), values.max() - values.min()
        several = int((sizes > 1).sum())
        flat = int(((sizes > 1) & (ranges <= 1e-12 * numbers["value"].abs().max())).sum())
        if flat:
            advised_column = "p Box"
            problems.append(
                f"{flat} of {several} groups that differ in {NEAR_REPLICATE_AXIS} alone have no variance at all"
            )
    return [f"{'; '.join(problems)}: use {advised_column}"] if problems else []


def _levene(groups: Sequence[np.ndarray]) -> float | None:
    """Return the p value of Levene's test around medians (Brown-Forsythe).

    None if no group varies or p is not finite.
    """
    if max(float(np.ptp(np.abs(part - np.median(part)))) for part in groups) == 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        p = float(stats.levene(*groups, center="median").pvalue)
    return p if math.isfinite(p) else None


def _p_text(p: float) -> str:
    return f"{p:.0e}".replace("e-0", "e-") if p < 1e-3 else f"{p:.3f}"
