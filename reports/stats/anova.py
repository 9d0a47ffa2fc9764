"""Analysis of variance over the axes of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

from ..data import ReportError, SweepData
from ..numbers import Column
from .effects import factors, numbers_of


def anova(data: SweepData, column: Column) -> tuple[pd.DataFrame, list[str]]:
    """Type-III analysis of variance with sum contrasts: main effects and, where the design carries them, two-way
    interactions. Returns the frame (term, df, sum_sq, F, p, partial_eta_sq) and remarks.

    partial_eta_sq = SS / (SS + SS of the residual); NaN, as F and p, where the residual is zero. Raises ReportError where
    nothing is left to estimate the error from.
    """
    frame = numbers_of(data, column)
    names = [axis for axis in factors(data) if frame[axis].nunique() > 1]
    if not names:
        raise ReportError(
            f"no axis varies among the cells that have {column.heading}; an analysis of variance needs one"
        )
    # names that a formula can hold
    short = {axis: f"f{index}" for index, axis in enumerate(names)}
    model, remarks = _model(frame, short, column.heading)
    fit = model.fit()
    table = anova_lm(fit, typ=3)
    residual = float(table.loc["Residual", "sum_sq"])
    total = float(((frame["value"] - frame["value"].mean()) ** 2).sum())
    exact = residual <= 1e-12 * max(total, 1e-300)
    if exact:
        remarks.append(f"{column.heading}: the terms explain everything, so there is no residual to hold them against")
    rows = []
    for term, row in table.drop(index=["Intercept", "Residual"]).iterrows():
        parts = [axis for part in str(term).split(":") for axis, name in short.items() if f"C({name}," in part]
        square = float(row["sum_sq"])
        about = {"term": " x ".join(parts), "df": int(row["df"]), "sum_sq": square}
        if exact:
            rows.append(about | {"F": math.nan, "p": math.nan, "partial_eta_sq": math.nan})
        else:
            known = {"F": float(row["F"]), "p": float(row["PR(>F)"])}
            rows.append(about | known | {"partial_eta_sq": square / (square + residual)})
    end = {"term": "residual", "df": int(fit.df_resid), "sum_sq": residual, "F": math.nan, "p": math.nan}
    rows.append(end | {"partial_eta_sq": math.nan})
    return pd.DataFrame(rows), remarks


def _model(frame: pd.DataFrame, short: Mapping[str, str], heading: str) -> tuple[Any, list[str]]:
    """The largest model that the design carries, with every axis under its short name, and what it leaves out."""
    tidy = frame.rename(columns=short)
    code = {axis: f"C({name}, Sum)" for axis, name in short.items()}
    carried, remarks = [], []
    for a, b in combinations(short, 2):
        if (pd.crosstab(frame[a], frame[b]) == 0).any(axis=None):
            remarks.append(f"{heading}: {a} x {b} is left out, since some of its combinations have no number")
        else:
            carried.append(f"{code[a]}:{code[b]}")
    for terms in (carried, []):
        model = ols(f"value ~ {' + '.join([*code.values(), *terms])}", data=tidy)
        if np.linalg.matrix_rank(model.exog) == model.exog.shape[1] < len(tidy):
            return model, remarks
        if terms:
            remarks = [f"{heading}: the design carries no two-way interactions"]
    raise ReportError(f"too few cells have {heading} ({len(tidy)}) for an analysis of variance; finish the sweep")
