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
from .effects.effects import NEAR, STRATUM_AXES, factors, numbers_of
from .significance.permutation_anova import AnovaFit, fit_anova

COLUMNS = ("term", "df", "sum_sq", "F", "p", "p_permuted", "p_robust", "omega_sq", "partial_eta_sq")
SHAPIRO = (3, 5_000)  # residuals that Shapiro's test is made for
DOUBT = 0.05
FEW_DF = 5  # of a residual, below which F tells little

Terms = dict[tuple[str, ...], np.ndarray]


@dataclass(frozen=True)
class AnovaResult:
    """The analysis of one measure: `frame` with COLUMNS (shares as fractions), the rows it was made from, what to know of it."""

    column: Column
    frame: pd.DataFrame
    numbers: pd.DataFrame
    remarks: tuple[str, ...]
    permutations: int = 0


def anova_results(data: SweepData, columns: Sequence[Column]) -> list[AnovaResult]:
    """Type-III analyses of variance with sum contrasts: main effects and, where the design carries them, two- and three-way
    interactions.

    `omega_sq` = (SS - df MS_res) / (SS_total + MS_res), `partial_eta_sq` = SS / (SS + SS_res); p as Fit has them. Where
    configurations have several runs, the residual is split into the lack of fit and the pure error between runs. A frame is empty where
    nothing can be worked out: the first remark says why.
    """
    numbers = [numbers_of(data, column) for column in columns]
    alike: dict[tuple[str, ...], list[int]] = {}
    found: dict[int, AnovaResult] = {}
    for place, frame in enumerate(numbers):
        if (reason := _nothing(data, columns[place], frame)) is not None:
            found[place] = AnovaResult(columns[place], pd.DataFrame(columns=list(COLUMNS)), frame, (reason,))
        else:
            alike.setdefault(tuple(frame["cell"]), []).append(place)
    for places in alike.values():
        frame = numbers[places[0]]
        varying = [axis for axis in factors(data) if frame[axis].nunique() > 1]
        terms, remarks = _terms(frame, varying, data.partial.terms if data.partial is not None else None)
        if not terms:
            for place in places:
                reason = f"too few cells have {columns[place].heading} ({len(frame)}) for an analysis of variance; finish the sweep"
                found[place] = AnovaResult(columns[place], pd.DataFrame(columns=list(COLUMNS)), frame, (reason,))
            continue
        fitted = fit_anova(terms, np.stack([numbers[place]["value"].to_numpy(dtype=float) for place in places], axis=1))
        names = [name for (name, *more) in terms if not more]
        for measure, place in enumerate(places):
            table, told = _table(terms, fitted, measure, numbers[place], names)
            checked = (*remarks, *told, *_checks(fitted, measure, numbers[place], names))
            found[place] = AnovaResult(columns[place], table, numbers[place], checked, fitted.permutations)
    return [found[place] for place in range(len(columns))]


def _nothing(data: SweepData, column: Column, frame: pd.DataFrame) -> str | None:
    """Why a measure has no analysis, where that can be seen without one."""
    if frame.empty:
        return f"no cell has {column.heading}"
    if not any(frame[axis].nunique() > 1 for axis in factors(data)):
        return f"no axis varies among the cells that have {column.heading}; an analysis of variance needs one"
    values = frame["value"].to_numpy(dtype=float)
    if np.ptp(values) <= 1e-12 * np.abs(values).max():
        return f"{column.heading} is the same in all {len(frame)} cells; there is no variance to analyse"
    return None


# --- the model ----------------------------------------------------------------------------------------------------


def _terms(
    frame: pd.DataFrame, names: Sequence[str], planned: Sequence[tuple[str, ...]] | None = None
) -> tuple[Terms, list[str]]:
    """The columns of the largest model that the design carries, by term, and what it leaves out; none where even the main
    effects leave nothing over. `planned`: the terms that a partial design was made for, which are taken if it carries them."""
    main = {(name,): _contrasts(frame[name]) for name in names}
    if planned is not None:
        terms = {term: _product([main[name,] for name in term]) for term in planned if set(term) <= set(names)}
        design = np.concatenate([np.ones((len(frame), 1)), *terms.values()], axis=1)
        if design.shape[1] < len(frame) and np.linalg.matrix_rank(design) == design.shape[1]:
            return terms, ["a partial design: what it was made to estimate, all else is in the residual"]
    whole: list[Terms] = []
    remarks = []
    for order in (2, 3):
        found: Terms = {}
        missing = []
        for term in combinations(names, order):
            if len(frame.groupby(list(term)).size()) < math.prod(frame[name].nunique() for name in term):
                missing.append(" x ".join(term))
            else:
                found[term] = _product([main[name,] for name in term])
        whole.append(found)
        if missing:
            are = "is" if len(missing) == 1 else "are"
            some = "some of its" if len(missing) == 1 else "some of their"
            remarks.append(f"{', '.join(missing)} {are} left out, since {some} combinations have no number")
    for orders in ((2, 3), (2,), ()):
        terms = main | {name: columns for order in orders for name, columns in whole[order - 2].items()}
        design = np.concatenate([np.ones((len(frame), 1)), *terms.values()], axis=1)
        if design.shape[1] < len(frame) and np.linalg.matrix_rank(design) == design.shape[1]:
            if orders == ():
                told = ["the design carries no interactions"] if whole[0] else remarks[:1]
            elif orders == (2,):
                told = remarks[: bool(remarks) and len(whole[0]) < math.comb(len(names), 2)]
                told += ["three-way terms stay in the residual"] if whole[1] else remarks[len(told) :]
            else:
                told = remarks
            return terms, told
    return {}, []


def _contrasts(levels: pd.Series) -> np.ndarray:
    """Sum contrasts of an axis: [N, levels - 1], the last level -1 in all of them."""
    codes, known = pd.factorize(levels)
    return np.concatenate([np.eye(len(known) - 1), np.full((1, len(known) - 1), -1.0)])[codes]


def _product(parts: Sequence[np.ndarray]) -> np.ndarray:
    found = parts[0]
    for part in parts[1:]:
        found = np.einsum("ni,nj->nij", found, part).reshape(len(found), -1)
    return found


def _table(
    terms: Terms, fitted: AnovaFit, measure: int, numbers: pd.DataFrame, names: Sequence[str]
) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a measure, and what to know of them."""
    residual, df = float(fitted.residual[measure]), fitted.residual_df
    values = numbers["value"].to_numpy(dtype=float)
    total = float(((values - values.mean()) ** 2).sum())
    exact = residual == 0
    rows = []
    for place, term in enumerate(terms):
        square, own = float(fitted.squares[place, measure]), int(fitted.dfs[place])
        row: dict[str, Any] = {
            "term": " x ".join(term),
            "df": own,
            "sum_sq": square,
            "F": float(fitted.f[place, measure]),
        }
        row |= {name: float(getattr(fitted, name)[place, measure]) for name in ("p", "p_permuted", "p_robust")}
        error = residual / df
        row["omega_sq"] = math.nan if exact else (square - own * error) / (total + error)
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
    remarks = ["the terms explain everything, so there is no residual to hold them against"] if exact else []
    if not exact and df < FEW_DF:
        remarks.append(f"{df} degrees of freedom are left over; F tells little")
    return pd.DataFrame(rows, columns=list(COLUMNS)), remarks


# --- what the F test takes for granted ------------------------------------------------------------------------------


def _checks(fitted: AnovaFit, measure: int, numbers: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Where the residuals are not what an F test is made for: normal, and of one spread."""
    # as large as errors are, not as what the model leaves of them
    left = fitted.residuals[:, measure] * math.sqrt(len(numbers) / fitted.residual_df)
    if fitted.residual[measure] == 0:
        return []
    told, robust = [], "p perm"
    if SHAPIRO[0] <= len(left) <= SHAPIRO[1] and (p := float(stats.shapiro(left).pvalue)) < DOUBT:
        told.append(f"the residuals are not normal (Shapiro p {_p(p)})")
    strata = [name for name in STRATUM_AXES if name in names] or list(names[:2])
    groups = [part.to_numpy() for _, part in pd.Series(left).groupby([numbers[name].to_numpy() for name in strata])]
    groups = [part for part in groups if len(part) > 1]
    if len(groups) > 1 and (found := _levene(groups)) is not None and found < DOUBT:
        robust = "p Box"
        spreads = sorted(float(part.std(ddof=1)) for part in groups)
        told.append(
            f"their spread differs by {' and '.join(strata)} (Levene p {_p(found)}, sd {spreads[0]:.3g} to {spreads[-1]:.3g})"
        )
    same = [name for name in names if name != NEAR]
    values = numbers.groupby(same)["value"] if same else None
    if values is not None and NEAR in names:
        sizes, ranges = values.size(), values.max() - values.min()
        several = int((sizes > 1).sum())
        flat = int(((sizes > 1) & (ranges <= 1e-12 * numbers["value"].abs().max())).sum())
        if flat:
            robust = "p Box"
            told.append(f"{flat} of {several} groups that differ in {NEAR} alone have no variance at all")
    return [f"{'; '.join(told)}: go by {robust}"] if told else []


def _levene(groups: Sequence[np.ndarray]) -> float | None:
    """Levene's test about medians; None where no group varies."""
    if max(float(np.ptp(np.abs(part - np.median(part)))) for part in groups) == 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = float(stats.levene(*groups, center="median").pvalue)
    return found if math.isfinite(found) else None


def _p(p: float) -> str:
    return f"{p:.0e}".replace("e-0", "e-") if p < 1e-3 else f"{p:.3f}"
