"""What the levels do: matched pairs, interactions, analysis of variance, spread, intervals and Pareto fronts.

A pair is two cells that agree on every axis and the seed but for the axis in question, so each effect is a mean of
differences within the sweep. One run a cell says nothing of seeds: the spread comes from seeds where the sweep has
several, else from near-replicates (cells that differ in their regularizer alone, whose weight is nearly nothing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from ..results.records import AXES
from .audit import homogeneity
from .data import ReportError, SweepData
from .numbers import Column
from .tables import complete_columns

__all__ = [
    "Effect", "Interaction", "Spread", "accuracies", "anova", "bootstrap", "detectable", "effects", "factors", "holm",
    "homogeneity", "interactions", "matched_pairs", "measures", "numbers_of", "origins_of", "pareto",
    "reference_level", "seed_robustness", "sign_flip", "sign_test", "spread", "spreads_by_configuration", "wilson",
]  # fmt: skip

RESAMPLES = 10_000
EXACT = 30  # pairs up to which every flip of signs is counted
FLIPS = 20_000  # random flips beyond that
ALPHA, POWER = 0.05, 0.8
RANDOM = 20_260  # every draw of this module starts from it, so that tables repeat
NEAR = "reg_mode"


# --- single formulas ------------------------------------------------------------------------------------------------


def wilson(hits: float, n: int, *, alpha: float = ALPHA) -> tuple[float, float]:
    """Wilson score interval of a share, 95% by default; bounds in [0, 1]. Raises ValueError for an empty sample."""
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"{hits} of {n} is no share")
    low, high = proportion_confint(hits, n, alpha=alpha, method="wilson")
    return max(0.0, min(float(low), hits / n)), min(1.0, max(float(high), hits / n))


def accuracies(data: SweepData) -> pd.DataFrame:
    """Every accuracy of the sweep with its 95% interval: the recorded one, else Wilson's from the sample count.

    Columns: cell, attempt, probe, metric, length, value, n, low, high; shares as fractions. An accuracy without a sample
    count has no interval (NaN).
    """
    rows = []
    for value in data.values.values():
        if value.value is None or not value.metric.endswith("accuracy"):
            continue
        low, high = value.low, value.high
        if (low is None or high is None) and value.n:
            low, high = wilson(value.value * value.n, value.n)
        about = {"cell": value.cell_id, "attempt": value.attempt_id, "probe": value.probe, "metric": value.metric}
        rows.append(about | {"length": value.length, "value": value.value, "n": value.n, "low": low, "high": high})
    columns = ["cell", "attempt", "probe", "metric", "length", "value", "n", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"value": float, "low": float, "high": float})


def sign_test(differences: Sequence[float] | np.ndarray) -> float:
    """Two-sided exact sign test: probability of as uneven a split of the non-zero differences by chance. 1 without any."""
    d = np.asarray(differences, dtype=float)
    up, down = int((d > 0).sum()), int((d < 0).sum())
    return float(stats.binomtest(up, up + down).pvalue) if up + down else 1.0


@lru_cache(maxsize=16)
def _signs(n: int) -> np.ndarray:
    draw = np.random.default_rng((RANDOM, n))
    return draw.choice(np.array([-1.0, 1.0]), size=(FLIPS, n))


def _half_sums(d: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for x in d:
        sums = np.concatenate([sums - x, sums + x])
    return sums


def sign_flip(differences: Sequence[float] | np.ndarray) -> float:
    """Two-sided permutation test of the mean difference: how often random signs give one as large.

    Exact up to EXACT pairs (two halves of sums, combined by binary search), from FLIPS seeded draws beyond.
    """
    d = np.asarray(differences, dtype=float)
    if not len(d):
        return 1.0
    slack = 1e-9 * float(np.abs(d).sum())
    seen = abs(float(d.sum())) - slack
    if len(d) > EXACT:
        found = np.abs(_signs(len(d)) @ d) >= seen
        return float((found.sum() + 1) / (FLIPS + 1))
    if seen <= 0:
        return 1.0
    left, right = _half_sums(d[: len(d) // 2]), np.sort(_half_sums(d[len(d) // 2 :]))
    above = len(right) - np.searchsorted(right, seen - left, side="left")
    below = np.searchsorted(right, -seen - left, side="right")
    return float((above.sum() + below.sum()) / 2 ** len(d))


@lru_cache(maxsize=64)
def _resampled(n: int) -> np.ndarray:
    """How often each of n pairs is drawn, as weights that sum to 1: [RESAMPLES, n]."""
    draw = np.random.default_rng((RANDOM, n))
    return draw.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n


def bootstrap(differences: Sequence[float] | np.ndarray, *, alpha: float = ALPHA) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, 95% by default, from RESAMPLES seeded draws. NaN for fewer than two."""
    d = np.asarray(differences, dtype=float)
    if len(d) < 2:
        return math.nan, math.nan
    low, high = np.quantile(_resampled(len(d)) @ d, [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values after Holm's correction for the whole family, in the order given."""
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]] if p_values else []


# --- the design -----------------------------------------------------------------------------------------------------


def measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """The numbers of the complete results that at least so many cells have, a decimal more than is printed of losses."""
    found = []
    for column in complete_columns(data):
        count = sum((cell.cell_id, column.probe, column.metric, column.length) in data.values for cell in data.cells)
        if count >= at_least and numbers_of(data, column).shape[0] >= at_least:
            found.append(replace(column, decimals=column.decimals if column.percent else 3))
    return list({(c.probe, c.metric, c.length): c for c in found}.values())


def factors(data: SweepData) -> list[str]:
    """The axes that vary, the five first; the seed is none of them."""
    return [axis for axis in AXES if len(data.levels(axis)) > 1] + data.extra_axes()


def numbers_of(data: SweepData, column: Column) -> pd.DataFrame:
    """One row a cell that has the number: cell, attempt, seed, every axis, value."""
    axes = (*AXES, *data.extra_axes())
    rows = []
    for cell in data.cells:
        value = data.value(cell.cell_id, column.probe, column.metric, column.length)
        if value is not None and value.value is not None:
            row: dict[str, Any] = {"cell": cell.cell_id, "attempt": value.attempt_id, "seed": cell.seed}
            row |= {axis: cell.levels[axis] if axis in AXES else cell.axes.get(axis, "-") for axis in axes}
            rows.append(row | {"value": value.value})
    return pd.DataFrame(rows, columns=["cell", "attempt", "seed", *axes, "value"])


def reference_level(levels: Sequence[str]) -> str:
    """The level that the others are held against: off, baseline, else the grid's first."""
    return next((word for word in ("off", "baseline") if word in levels), levels[0])


@dataclass(frozen=True, kw_only=True)
class Tested:
    """Differences in a measure, summed up and tested."""

    measure: Column
    mean: float
    median: float
    up: int
    down: int
    low: float
    high: float
    p_sign: float
    p_permutation: float
    p_holm: float = math.nan
    origins: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Effect(Tested):
    """The difference that a level makes, over matched pairs; in the measure's own unit, shares as fractions.

    `where` names a subset (`attn_type=polar`) or is empty for the whole sweep. `p_holm` is the sign test's p, corrected
    for every test made together with this one. `origins` are the cells and attempts of the pairs.
    """

    axis: str
    level: str
    reference: str
    where: str
    pairs: int


def matched_pairs(
    data: SweepData, column: Column, axis: str, level: str, reference: str, where: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """The pairs of cells at `level` and at `reference` of an axis that agree on all other axes and the seed.

    Columns: the other axes and seed, value and value_ref, difference (level minus reference), cell, cell_ref and their
    attempts. `where` keeps only cells at those levels. A cell without a partner, or without the number, is left out.
    """
    frame = numbers_of(data, column)
    for name, wanted in (where or {}).items():
        frame = frame[frame[name] == wanted]
    keys = [name for name in (*AXES, *data.extra_axes(), "seed") if name != axis]
    there = frame[frame[axis] == level].drop(columns=axis)
    here = frame[frame[axis] == reference].drop(columns=axis)
    pairs = there.merge(here, on=keys, suffixes=("", "_ref"))
    return pairs.assign(difference=pairs["value"] - pairs["value_ref"])


def _summary(d: np.ndarray) -> dict[str, Any]:
    low, high = bootstrap(d)
    return {
        "mean": float(d.mean()) if len(d) else math.nan,
        "median": float(np.median(d)) if len(d) else math.nan,
        "up": int((d > 0).sum()),
        "down": int((d < 0).sum()),
        "low": low,
        "high": high,
        "p_sign": sign_test(d),
        "p_permutation": sign_flip(d),
    }


def origins_of(frame: pd.DataFrame, *suffixes: str) -> tuple[tuple[str, int | None], ...]:
    """The (cell, attempt) pairs of a frame of pairs or fours, whose columns `cell` and `attempt` end in these."""
    return tuple(
        (str(cell), int(attempt))
        for end in suffixes
        for cell, attempt in zip(frame[f"cell{end}"], frame[f"attempt{end}"], strict=True)
    )


def _one(data: SweepData, column: Column, axis: str, level: str, reference: str, where: Mapping[str, str]) -> Effect:
    pairs = matched_pairs(data, column, axis, level, reference, where)
    return Effect(
        measure=column,
        axis=axis,
        level=level,
        reference=reference,
        where=", ".join(f"{name}={value}" for name, value in where.items()),
        pairs=len(pairs),
        origins=origins_of(pairs, "", "_ref"),
        **_summary(pairs["difference"].to_numpy(dtype=float)),
    )


def effects(data: SweepData, columns: Sequence[Column] | None = None) -> list[Effect]:
    """The effect of every level of every axis on every measure: over the whole sweep, and within every mixer.

    Holm's correction is over the whole list. Levels without a single pair are left out.
    """
    found = []
    for column in measures(data) if columns is None else columns:
        for axis in factors(data):
            levels = data.levels(axis)
            reference = reference_level(levels)
            mixers = data.levels("attn_type") if axis != "attn_type" else []
            subsets: list[dict[str, str]] = [{}, *({"attn_type": mixer} for mixer in mixers if len(mixers) > 1)]
            for level in levels:
                if level != reference:
                    found += [_one(data, column, axis, level, reference, where) for where in subsets]
    found = [one for one in found if one.pairs]
    corrected = holm([one.p_sign for one in found])
    return [replace(one, p_holm=p) for one, p in zip(found, corrected, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Interaction(Tested):
    """How much more a level does at a level of a second axis than at that axis's reference: differences of differences
    over matched fours of cells."""

    axes: tuple[str, str]
    levels: tuple[str, str]
    references: tuple[str, str]
    fours: int


def interactions(data: SweepData, columns: Sequence[Column] | None = None) -> list[Interaction]:
    """Every two-way interaction on every measure; Holm's correction is over the whole list."""
    found = []
    for column in measures(data) if columns is None else columns:
        for first, second in combinations(factors(data), 2):
            ref_a, ref_b = reference_level(data.levels(first)), reference_level(data.levels(second))
            for a in data.levels(first):
                pairs = matched_pairs(data, column, first, a, ref_a) if a != ref_a else None
                for b in data.levels(second):
                    if pairs is not None and b != ref_b:
                        found.append(_interaction(pairs, column, (first, second), (a, b), (ref_a, ref_b)))
    found = [one for one in found if one.fours]
    corrected = holm([one.p_sign for one in found])
    return [replace(one, p_holm=p) for one, p in zip(found, corrected, strict=True)]


def _interaction(
    pairs: pd.DataFrame, column: Column, axes: tuple[str, str], levels: tuple[str, str], references: tuple[str, str]
) -> Interaction:
    own = ("cell", "attempt", "value", "cell_ref", "attempt_ref", "value_ref", "difference")
    keys = [name for name in pairs.columns if name not in (*own, axes[1])]
    there = pairs[pairs[axes[1]] == levels[1]].drop(columns=axes[1])
    here = pairs[pairs[axes[1]] == references[1]].drop(columns=axes[1])
    fours = there.merge(here, on=keys, suffixes=("", "_b"))
    d = (fours["difference"] - fours["difference_b"]).to_numpy(dtype=float)
    origins = origins_of(fours, "", "_ref", "_b", "_ref_b")
    return Interaction(
        measure=column, axes=axes, levels=levels, references=references, fours=len(d), origins=origins, **_summary(d)
    )


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
    short = {axis: f"f{index}" for index, axis in enumerate(names)}
    tidy = frame.rename(columns=short)
    code = {axis: f"C({name}, Sum)" for axis, name in short.items()}
    carried, remarks = [], []
    for a, b in combinations(names, 2):
        if (pd.crosstab(frame[a], frame[b]) == 0).any(axis=None):
            remarks.append(f"{column.heading}: {a} x {b} is left out, since some of its combinations have no number")
        else:
            carried.append(f"{code[a]}:{code[b]}")
    for terms in (carried, []):
        model = ols(f"value ~ {' + '.join([*code.values(), *terms])}", data=tidy)
        if np.linalg.matrix_rank(model.exog) == model.exog.shape[1] < len(tidy):
            break
        if terms:
            remarks = [f"{column.heading}: the design carries no two-way interactions"]
    else:
        raise ReportError(
            f"too few cells have {column.heading} ({len(tidy)}) for an analysis of variance; finish the sweep"
        )
    fit = model.fit()
    table = anova_lm(fit, typ=3)
    residual = float(table.loc["Residual", "sum_sq"])
    total = float(((tidy["value"] - tidy["value"].mean()) ** 2).sum())
    exact = residual <= 1e-12 * max(total, 1e-300)
    if exact:
        remarks.append(f"{column.heading}: the terms explain everything, so there is no residual to hold them against")
    rows = []
    for term, row in table.drop(index=["Intercept", "Residual"]).iterrows():
        parts = [axis for part in str(term).split(":") for axis, name in short.items() if f"C({name}," in part]
        square = float(row["sum_sq"])
        rows.append(
            {
                "term": " x ".join(parts),
                "df": int(row["df"]),
                "sum_sq": square,
                "F": math.nan if exact else float(row["F"]),
                "p": math.nan if exact else float(row["PR(>F)"]),
                "partial_eta_sq": math.nan if exact else square / (square + residual),
            }
        )
    end = {"term": "residual", "df": int(fit.df_resid), "sum_sq": residual, "F": math.nan, "p": math.nan}
    rows.append(end | {"partial_eta_sq": math.nan})
    return pd.DataFrame(rows), remarks


# --- spread ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """How much a number varies between runs that ought to agree: pooled standard deviation, its degrees of freedom, and
    the groups it comes from. `kind` is `seeds` or `near-replicates`."""

    kind: str
    sd: float
    df: int
    groups: int


def spread(data: SweepData, column: Column, where: Mapping[str, str] | None = None) -> Spread | None:
    """The spread of a number: between seeds where the sweep has several, else between cells that differ in their
    regularizer alone. `where` keeps only cells at those levels. None where there is no such group."""
    frame = numbers_of(data, column)
    for name, wanted in (where or {}).items():
        frame = frame[frame[name] == wanted]
    axes = [*AXES, *data.extra_axes()]
    for kind, keys in (("seeds", axes), ("near-replicates", [axis for axis in (*axes, "seed") if axis != NEAR])):
        groups = [group["value"] for _, group in frame.groupby(keys) if len(group) > 1]
        df = sum(len(group) - 1 for group in groups)
        if df:
            squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
            return Spread(kind, math.sqrt(squares / df), df, len(groups))
    return None


def spreads_by_configuration(data: SweepData, column: Column) -> dict[tuple[str, ...], Spread]:
    """The spread of every configuration on its own, by its levels of AXES without the regularizer: between all its cells,
    which differ in their regularizer and their seed alone."""
    frame = numbers_of(data, column)
    found = {}
    for key, group in frame.groupby([axis for axis in AXES if axis != NEAR])["value"]:
        if len(group) > 1:
            found[tuple(map(str, key))] = Spread("near-replicates", float(group.std()), len(group) - 1, 1)
    return found


def detectable(found: Spread, pairs: int) -> float:
    """The smallest true difference that a mean over so many pairs shows with 80% power at a two-sided 5%:
    (t(0.975) + t(0.8)) sd sqrt(2 / pairs), t with the spread's degrees of freedom."""
    t = float(stats.t.ppf(1 - ALPHA / 2, found.df) + stats.t.ppf(POWER, found.df))
    return t * found.sd * math.sqrt(2 / pairs)


def seed_robustness(data: SweepData, column: Column) -> Spread:
    """The spread between seeds. Raises ReportError where every configuration has one run: then nothing can be said."""
    found = spread(data, column)
    if found is None or found.kind != "seeds":
        raise ReportError(
            f"every configuration of sweep {data.sweep} has one run (n = 1): nothing can be said of seeds; launch it with seeds: 3"
        )
    return found


# --- quality against speed ------------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[float, float]], directions: tuple[int, int] = (1, 1)) -> list[bool]:
    """Which points no other beats: none is at least as good in both coordinates and better in one. `directions` is 1 where
    more is better, -1 where less is."""
    scaled = [(x * directions[0], y * directions[1]) for x, y in points]

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in scaled)

    return [not beaten(point) for point in scaled]
