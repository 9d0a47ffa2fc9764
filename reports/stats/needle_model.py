"""A binomial model of the needle's digits over the axes of a sweep, in trials and with a scale of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import special
from statsmodels.genmod.families import Binomial
from statsmodels.genmod.generalized_linear_model import GLM
from statsmodels.tools.sm_exceptions import ConvergenceWarning, PerfectSeparationWarning

from ...results.console.text import counted
from ..number_format import NEEDLE, Column, column_of, format_length
from ..sweep_data import SweepData
from .effects.effects import STRATUM_AXES, factors, numbers_of, reference_level

COLUMNS = ("term", "df", "deviance", "F", "p", "odds_ratio", "low", "high")
LEVEL = 0.95
FAR = 12.0  # of a linear predictor: a share of 6e-6, which no number of trials here can tell from none

Terms = dict[tuple[str, ...], np.ndarray]


@dataclass(frozen=True)
class NeedleModel:
    """The model of one length: `frame` with COLUMNS, first the terms, then the levels; the cells it was made from, `scale` (the
    variance as a multiple of what independent trials have), and what to know of it."""

    column: Column
    frame: pd.DataFrame
    numbers: pd.DataFrame
    scale: float
    remarks: tuple[str, ...]


def needle_columns(data: SweepData) -> list[Column]:
    """The needle's share of right digits at every length that is shown."""
    lengths = data.lengths(*NEEDLE)
    return [column_of(*NEEDLE, f"Ndl@{format_length(length)}", length=length) for length in lengths if length]


def needle_model(data: SweepData, column: Column) -> NeedleModel:
    """Quasi-binomial: logit of the share of right digits ~ axes and, where the design carries them, pairs of axes.

    A cell counts as its trials, whose digits stand or fall together; the scale, Pearson's chi-square over the residual's degrees
    of freedom, takes up how far cells and trials are from independence, either way. Terms: F of the drop in deviance without the term and all that
    contain it against the same model with the term (type II), over the scale. Levels: odds ratios with 95% intervals, by the axes alone.
    Groups of cells in which no digit, or every digit, is right have infinite odds; they are left out and named.
    """
    numbers = numbers_of(data, column)
    numbers = numbers.assign(trials=numbers["cell"].map(_trials(data, column)).astype(float))
    numbers = numbers[numbers["trials"] > 0].reset_index(drop=True)
    empty = pd.DataFrame(columns=list(COLUMNS))
    if numbers.empty:
        return NeedleModel(column, empty, numbers, math.nan, ("no cell has an accuracy with a count of digits",))
    kept, remarks = _without_separated(numbers, [axis for axis in factors(data) if numbers[axis].nunique() > 1])
    names = [axis for axis in factors(data) if kept[axis].nunique() > 1]
    if not names:
        return NeedleModel(column, empty, numbers, math.nan, (*remarks, "no axis varies among what is left"))
    if kept["value"].nunique() == 1:
        same = f"the share is the same in all {counted(len(kept), 'cell')}; there is nothing to model"
        return NeedleModel(column, empty, numbers, math.nan, (*remarks, same))
    main: Terms = {(name,): _indicators(kept[name], data.levels(name)) for name in names}
    pairs, told = _pairs(kept, main)
    for terms in (main | pairs, main) if pairs else (main,):
        if (fitted := _fit(kept, terms)) is not None:
            break
        told = [*told, "pairs of axes are left out: with them, some odds are infinite or nothing is left over"]
    else:
        why = (
            "the axes leave nothing over, or their odds are infinite, among the cells that are left; there is no model"
        )
        return NeedleModel(column, empty, numbers, math.nan, (*remarks, why))
    scale = float(fitted.pearson_chi2 / fitted.df_resid)
    if scale <= 1e-9:
        return NeedleModel(column, empty, numbers, 0.0, (*remarks, "the model explains everything; there is no error"))
    rows = _of_terms(kept, terms, fitted, scale) + _of_levels(data, kept, main)
    return NeedleModel(column, pd.DataFrame(rows, columns=list(COLUMNS)), kept, scale, (*remarks, *told))


def _trials(data: SweepData, column: Column) -> dict[str, float]:
    digits = data.metric(column.probe, column.metric).trials or 1
    values = {cell.cell_id: data.given(cell, column) for cell in data.cells}
    return {cell: (value.n or 0) / digits for cell, value in values.items() if value is not None}


# --- what has no odds -----------------------------------------------------------------------------------------------


def _without_separated(numbers: pd.DataFrame, names: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The cells without the levels, and combinations of STRATA, all of whose cells are at 0 or all at 1."""
    kept, left_out = numbers, []
    strata = tuple(name for name in STRATUM_AXES if name in names)
    while True:
        for group in [(name,) for name in names] + ([strata] if len(strata) > 1 else []):
            shares = kept.groupby(list(group))["value"]
            bad = shares.transform("max").le(0) | shares.transform("min").ge(1)
            if bad.any():
                break
        else:
            break
        gone = kept[bad]
        for levels, part in gone.groupby(list(group)):
            share = "no digit" if part["value"].max() <= 0 else "every digit"
            told = ", ".join(f"{axis}={level}" for axis, level in zip(group, levels, strict=True))
            left_out.append(f"{told}: {share} right in {len(part)} cell{'s' if len(part) > 1 else ''}")
        kept = kept[~bad]
    return kept.reset_index(drop=True), [
        f"left out, as their odds are infinite: {'; '.join(left_out)}"
    ] if left_out else []


def _pairs(kept: pd.DataFrame, main: Terms) -> tuple[Terms, list[str]]:
    """The pairs of axes all of whose combinations have cells, and neither no digit nor every digit right."""
    found: Terms = {}
    missing = []
    for a, b in combinations([name for (name,) in main], 2):
        shares = kept.groupby([a, b])["value"].mean()
        whole = len(shares) == kept[a].nunique() * kept[b].nunique()
        if whole and shares.gt(0).all() and shares.lt(1).all():
            both = np.einsum("ni,nj->nij", main[a,], main[b,])
            found[a, b] = both.reshape(len(kept), -1)
        else:
            missing.append(f"{a} x {b}")
    return found, [
        f"left out, as some of their combinations have no cell or infinite odds: {', '.join(missing)}"
    ] if missing else []


# --- the model ----------------------------------------------------------------------------------------------------


def _indicators(levels: pd.Series, order: Sequence[str]) -> np.ndarray:
    """[N, levels - 1], the reference first and left out."""
    known = _ordered(levels, order)
    return np.asarray(np.stack([(levels == level).to_numpy(dtype=float) for level in known[1:]], axis=1))


def _ordered(levels: pd.Series, order: Sequence[str]) -> list[str]:
    there = [level for level in order if (levels == level).any()]
    reference = reference_level(there)
    return [reference, *(level for level in there if level != reference)]


def _fit(kept: pd.DataFrame, terms: Terms) -> Any | None:
    """The fitted model; None where it does not settle on finite odds, or leaves no degree of freedom."""
    design = np.concatenate([np.ones((len(kept), 1)), *terms.values()], axis=1)
    if design.shape[1] >= len(kept) or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    trials, shares = kept["trials"].to_numpy(dtype=float), kept["value"].to_numpy(dtype=float)
    both = np.stack([shares * trials, (1 - shares) * trials], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerfectSeparationWarning)
        warnings.simplefilter("error", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            fitted = GLM(both, design, family=Binomial()).fit()
        except (PerfectSeparationWarning, ConvergenceWarning):
            return None
    return fitted if np.abs(design @ fitted.params).max() < FAR else None


def _of_terms(kept: pd.DataFrame, terms: Terms, fitted: Any, scale: float) -> list[dict[str, Any]]:
    rows = []
    for term, columns in terms.items():
        without = {name: some for name, some in terms.items() if not set(term) <= set(name)}
        beside = without | {term: columns}
        larger, smaller = _deviance(kept, beside, terms, fitted), _deviance(kept, without, terms, fitted)
        row: dict[str, Any] = {"term": " x ".join(term), "df": columns.shape[1], "deviance": max(smaller - larger, 0.0)}
        if math.isfinite(row["deviance"]):
            row["F"] = row["deviance"] / columns.shape[1] / scale
            row["p"] = float(special.fdtrc(columns.shape[1], fitted.df_resid, row["F"]))
        rows.append(row)
    rows.append({"term": "residual", "df": int(fitted.df_resid), "deviance": float(fitted.deviance)})
    return rows


def _deviance(kept: pd.DataFrame, some: Terms, terms: Terms, fitted: Any) -> float:
    if some.keys() == terms.keys():
        return float(fitted.deviance)
    found = _fit(kept, some)
    return math.nan if found is None else float(found.deviance)


def _of_levels(data: SweepData, kept: pd.DataFrame, main: Terms) -> list[dict[str, Any]]:
    """The odds ratio of every level to its reference, the other axes beside it."""
    if (fitted := _fit(kept, main)) is None:
        return []
    t = float(special.stdtrit(fitted.df_resid, (1 + LEVEL) / 2))
    # statsmodels' own scale "X2" divides by the counts of trials once too often
    spread = math.sqrt(float(fitted.pearson_chi2 / fitted.df_resid))
    rows, place = [], 1
    for (name,) in main:
        reference, *others = _ordered(kept[name], data.levels(name))
        for level in others:
            at, error = float(fitted.params[place]), spread * float(fitted.bse[place])
            ends = {"odds_ratio": at, "low": at - t * error, "high": at + t * error}
            p = 2 * float(special.stdtr(fitted.df_resid, -abs(at) / error))
            told = {what: math.exp(x) for what, x in ends.items()}
            rows.append({"term": f"{name}: {level} / {reference}", "df": 1, "p": p, **told})
            place += 1
    return rows
