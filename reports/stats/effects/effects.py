"""Main effects, interactions and declared contrasts as mean differences over matched groups, with their tests.

A partial design has few matched groups, so its effects come from least squares (partial_design_effects.py).

The unit of analysis is the *configuration*: the levels of all axes without the seed. The seeds of a configuration are
repeated observations of it, never further configurations. An interval covers the configurations that the grid lists and
similar ones. A family (the tests that are corrected together) is one measure and one axis, or combination of axes. The
contrasts that the grid declares form one family of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any, Protocol

import numpy as np
from scipy import special

from ...number_format import Column
from ...sweep_data import SweepData
from ..noise.run_noise import NEAR_REPLICATE_AXIS, STRATUM_AXES, NoiseEstimate, detectable, pooled_noise
from ..significance.paired_tests import ALPHA, correct_families, holm, paired_difference_tests
from . import stopping_rows
from .effect_types import (
    AT_CHANCE_VERDICT,
    DECLARED_FAMILY,
    EQUIVALENT_VERDICT,
    Effect,
    EffectEstimate,
    EffectRow,
    Interaction,
    subset_text,
)
from .matched_groups import (
    MatchedDifferences,
    MetricMatrix,
    contrast_column,
    first_measures,
    frame_origins,
    level_combinations,
    level_pairs,
    main_measures,
    measures,
    reference_level,
    values_frame,
    varying_axes,
)
from .matched_groups import subset_mask as standing
from .needle_baseline import flag_chance_level
from .partial_design_effects import FittedDesign, Levels

__all__ = [
    "ALPHA",
    "AT_CHANCE_VERDICT",
    "DECLARED_FAMILY",
    "EQUIVALENT_VERDICT",
    "NEAR_REPLICATE_AXIS",
    "Effect",
    "EffectEstimate",
    "Interaction",
    "NoiseEstimate",
    "contrast_column",
    "contrasts",
    "detectable",
    "effects",
    "first_measures",
    "frame_origins",
    "interactions",
    "main_measures",
    "measures",
    "pareto",
    "pooled_noise",
    "reference_level",
    "values_frame",
    "varying_axes",
]  # fmt: skip


# --- the rows ---------------------------------------------------------------------------------------------------------


def effects(data: SweepData, columns: Sequence[Column] | None = None, *, include_strata: bool = True) -> list[Effect]:
    """Return the effect of every pair of levels of every axis on every measure, tested and corrected by family.

    A family is one measure and one axis, its strata included; the declared contrasts are a family of their own. A
    stratum is a set of cells that share mixer, or mixer and memory.

    Args:
        data: The sweep.
        columns: Measures to analyse; None for `measures(data)`.
        include_strata: Also return effects within the strata (mixer, memory) of the sweep.

    Returns:
        First the declared contrasts in the grid's order, those of other measures excluded and, without
        `include_strata`, those within a subset. Then the exploratory effects measure by measure, axis by axis, without
        those that repeat a declared contrast in either direction. Exploratory effects without a single matched pair are
        left out; declared ones stay, with NaN.
    """
    chosen = measures(data) if columns is None else columns
    shown = {column.key for column in chosen}
    declared = [
        effect for effect in contrasts(data) if effect.measure.key in shown and (include_strata or not effect.where)
    ]
    declared_keys = {
        _comparison_key(effect.measure, effect.axis, effect.level, effect.reference, effect.where)
        for effect in declared
    }
    estimator = _estimator(data, chosen)
    rows = [
        row
        for axis in estimator.axes
        for pair in level_pairs(data, axis)
        for row in estimator.effect_rows({axis: pair}, include_strata)
    ]
    rows = [
        row
        for row in rows
        if _comparison_key(row.fields["measure"], *_axis_and_levels(row), row.fields["where"]) not in declared_keys
    ]
    return declared + [
        _effect(row, fields)
        for row, fields in _corrected_fields(estimator, sorted(rows, key=lambda row: row.column_index))
    ]


def _axis_and_levels(row: EffectRow) -> tuple[str, str, str]:
    """Return (axis, level, reference) of a row of one axis."""
    ((axis, (level, reference)),) = row.levels.items()
    return axis, level, reference


def _comparison_key(column: Column, axis: str, level: str, reference: str, subset: str) -> tuple[Any, ...]:
    """Return a key that is the same for a difference and for its opposite.

    Args:
        column: The measure.
        axis: The compared axis.
        level: Level of the difference.
        reference: Level that is subtracted; swapping both gives the same key.
        subset: Text of the subset, empty for the full sweep.
    """
    return *column.key, axis, frozenset((level, reference)), subset


def _effect(row: EffectRow, fields: Mapping[str, Any], **extra_fields: Any) -> Effect:
    """Return the Effect of a row; `fields` are its shared fields, `extra_fields` those that only Effect has.

    Its `pairs` is the field `n`, or 0 if the mean is NaN.
    """
    axis, level, reference = _axis_and_levels(row)
    pairs = 0 if math.isnan(fields["mean"]) else fields["n"]
    return Effect(**fields, axis=axis, level=level, reference=reference, pairs=pairs, **extra_fields)


def interactions(data: SweepData, columns: Sequence[Column] | None = None) -> list[Interaction]:
    """Return the tested two-way and three-way interactions on every measure.

    Two-way interactions are estimated over the full sweep; those of levels against the reference levels also within
    every mixer. They compare all pairs of levels of an axis of up to six levels, of a longer one each level against the
    reference only. Three-way ones compare mixers pairwise, and other axes against their reference level only. A partial
    design yields only the interactions that its model contains.

    Args:
        data: The sweep.
        columns: Measures to analyse; None for `main_measures(data)`.

    Returns:
        Interactions in the order of the measures, two-way before three-way, corrected by family (one measure and one
        combination of axes). Those without a matched group are left out.
    """
    estimator = _estimator(data, main_measures(data) if columns is None else columns)
    rows = sorted(estimator.interaction_rows(), key=lambda row: (row.column_index, len(row.levels)))
    estimates = []
    for row, fields in _corrected_fields(estimator, rows):
        levels, references = zip(*row.levels.values(), strict=True)
        estimates.append(
            Interaction(**fields, axes=tuple(row.levels), levels=levels, references=references, fours=fields["n"])
        )
    return estimates


def contrasts(data: SweepData) -> list[Effect]:
    """Return the contrasts that the grid declares, in its order and corrected as one family (maxT or Holm).

    A contrast without a single pair is included, with NaN estimates and 0 pairs. The contrast of a stopping rule has
    the interval and p of its last interim analysis, and the correction is then Holm's. Contrasts with both sides at
    chance level have `is_at_chance`. The equivalence p values of contrasts with a margin are corrected by Holm among
    themselves. Empty if the grid declares none.
    """
    if not data.contrasts:
        return []
    estimator = _estimator(data, [contrast_column(data, contrast) for contrast in data.contrasts])
    rows = []
    for index, contrast in enumerate(data.contrasts):
        reference = (
            reference_level(data.levels(contrast.axis) or [""]) if contrast.reference is None else contrast.reference
        )
        rows.append(estimator.contrast_row(index, {contrast.axis: (contrast.level, reference)}, contrast.within))
        rows[-1].fields |= {"family": DECLARED_FAMILY, "confirmatory": True}
    margins = {
        row.column_index: contrast.margin
        for row, contrast in zip(rows, data.contrasts, strict=True)
        if contrast.margin is not None
    }
    equivalence_p = dict(
        zip(
            margins,
            holm(estimator.equivalence_p_values([rows[index] for index in margins], list(margins.values()))),
            strict=True,
        )
    )
    tested_contrasts = [
        _effect(
            row,
            fields,
            margin=margins.get(row.column_index),
            p_equivalence=equivalence_p.get(row.column_index, math.nan),
        )
        for row, fields in _corrected_fields(estimator, rows)
    ]
    return flag_chance_level(data, stopping_rows.apply_last_look(data, tested_contrasts))


class _Estimator(Protocol):
    """Estimator of a sweep's effects, by matched groups or by least squares."""

    axes: list[str]

    def effect_rows(self, levels: Levels, include_strata: bool) -> Iterable[EffectRow]: ...
    def interaction_rows(self) -> Iterable[EffectRow]: ...
    def contrast_row(self, column_index: int, levels: Levels, subset: Mapping[str, str]) -> EffectRow: ...
    def equivalence_p_values(self, rows: Sequence[Any], margins: Sequence[float]) -> list[float]: ...
    def corrected_p_values(self, rows: Sequence[Any], families: Sequence[Sequence[int]]) -> list[list[float]]: ...


def _estimator(data: SweepData, columns: Sequence[Column]) -> _Estimator:
    """Return the least-squares estimator for a partial design and the matched-group estimator otherwise."""
    return (
        _MatchedEstimator(data, columns)
        if data.partial_design is None
        else FittedDesign(data, data.partial_design, columns)
    )


def _corrected_fields(estimator: _Estimator, rows: Sequence[EffectRow]) -> list[tuple[EffectRow, dict[str, Any]]]:
    """Return every row, in order, with its shared fields, `p_corrected` included, corrected within each family.

    A family is the set of rows with equal field `family`. The matched estimator also adds test fields to the rows.
    """
    families: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        families.setdefault(row.fields["family"], []).append(index)
    members = list(families.values())
    ps = dict(zip(chain(*members), chain(*estimator.corrected_p_values(rows, members)), strict=True))
    return [(row, row.fields | {"p_corrected": ps[index]}) for index, row in enumerate(rows)]


# --- matched pairs ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _MatchedRow(EffectRow):
    """An effect row with its sample of matched differences.

    `sample` holds the differences: [configuration] of means if no configuration has several seeds, else [configuration,
    seed] with NaN. They are scaled so that their mean gives every stratum an equal weight. `unweighted` holds the
    differences without those weights, averaged over seeds: [configuration].
    """

    sample: np.ndarray
    unweighted: np.ndarray
    keys: Sequence[Hashable]
    """Configuration of every difference: rows that share some are tested with common sign flips."""
    scale: float
    """Largest absolute value of the measure, relative to which a tiny difference counts as a tie."""


class _MatchedEstimator:
    """Estimator of effects by matched pairs, and of interactions by matched groups of four and eight.

    Create it once per set of columns: it reads every number of the sweep into arrays.
    """

    def __init__(self, data: SweepData, columns: Sequence[Column]) -> None:
        self.data, self.axes, self.numbers = data, varying_axes(data), MetricMatrix(data, columns)

    def effect_rows(self, levels: Levels, include_strata: bool) -> Iterator[EffectRow]:
        """Yield the rows of two levels of an axis over the full sweep and, with `include_strata`, within its strata.

        Rows come for every measure; subsets without a single pair are skipped. For each measure the row over the full
        sweep comes first, then one within every mixer; rows within the levels of memory follow only where these differ
        significantly.

        Args:
            levels: One axis with its (level, reference).
            include_strata: Yield rows within strata as well.
        """
        strata = _strata(self.data, levels)
        return _rows(self.numbers, levels, strata if include_strata else [], strata)

    def interaction_rows(self) -> Iterator[EffectRow]:
        """Yield the rows of every two axes, over the full sweep and within every mixer, and of every three axes.

        Rows within mixers come only for levels against reference levels. If the mixer is one of the two axes, rows
        within the levels of memory take their place where these differ significantly. Three axes compare mixers
        pairwise and other axes against their reference level.
        """
        for count in (2, 3):
            for axes in combinations(self.axes, count):
                strata = _strata(self.data, axes)
                pairs = {
                    axis: level_pairs(self.data, axis, all_pairs=count == 2 or axis == STRATUM_AXES[0]) for axis in axes
                }
                against = {axis: level_pairs(self.data, axis, all_pairs=False) for axis in axes}
                for levels in level_combinations(pairs):
                    main = all(levels[axis] in against[axis] for axis in axes)
                    yield from _rows(self.numbers, levels, strata[:1] if count == 2 and main else [], strata)

    def contrast_row(self, column_index: int, levels: Levels, subset: Mapping[str, str]) -> EffectRow:
        """Return the row of a declared contrast; its sample is empty if the sweep has no matched pair of it.

        Its `where` is the text of `subset`; the family stays unset.

        Args:
            column_index: Position of the contrast's measure among the columns.
            levels: One axis with its (level, reference); an axis or level that the sweep lacks gives an empty sample.
            subset: Level by axis that both sides have; empty for the full sweep.
        """
        ((axis, (level, reference)),) = levels.items()
        # an axis of an earlier grid, or one with a single level, has no pair in this sweep
        is_present = axis in self.numbers.axes and level != reference
        matched = self.numbers.differences_between(levels if is_present else {STRATUM_AXES[0]: ("", "")})
        mask = standing(matched.levels, subset, len(matched.corners)) & is_present
        strata = [
            stratum_axis for stratum_axis in _strata(self.data, levels) if is_present and stratum_axis not in subset
        ]
        row = _row(self.numbers, _Subset(matched, mask, strata[0] if strata else None), column_index)
        row.levels = levels
        row.fields["where"] = subset_text(subset)
        return row

    def equivalence_p_values(self, rows: Sequence[_MatchedRow], margins: Sequence[float]) -> list[float]:
        """Return the p value of the two one-sided tests (TOST) that the mean lies within its margin, row by row.

        Each one-sided p is half of the two-sided p of the differences shifted by the margin, whichever test that is;
        the larger of the two is returned. Not corrected for multiple tests. NaN where no test is possible.

        Args:
            rows: Rows with their samples.
            margins: Margin of each row, above 0, in the unit of its measure.
        """
        scales = [row.scale for row in rows]
        below = paired_difference_tests(
            [row.sample + margin for row, margin in zip(rows, margins, strict=True)], scales
        )
        above = paired_difference_tests(
            [row.sample - margin for row, margin in zip(rows, margins, strict=True)], scales
        )
        return [max(_upper_tail_p(a.p, a.mean), _upper_tail_p(b.p, -b.mean)) for a, b in zip(below, above, strict=True)]

    def corrected_p_values(self, rows: Sequence[_MatchedRow], families: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the corrected p values of each family, one list per family in the order of its indices.

        Adds the fields of its PairedTest to the `fields` of every row. `median` is over the differences without the
        weights of strata; `p_sign` is NaN for an empty sample.

        Args:
            rows: All rows.
            families: Indices of the rows of each family.
        """
        samples, scales = [row.sample for row in rows], [row.scale for row in rows]
        summed = paired_difference_tests(samples, scales)
        for row, summary in zip(rows, summed, strict=True):
            # the median is over the differences without the weights of strata
            median = {"median": float(np.median(row.unweighted))} if summary.n else {"p_sign": math.nan}
            row.fields |= vars(summary) | median
        keys = [row.keys for row in rows]
        return correct_families(
            [tuple([values[i] for i in members] for values in (samples, summed, keys, scales)) for members in families]  # type: ignore[misc]
        )


def _upper_tail_p(p: float, mean: float) -> float:
    """Return the one-sided p for a mean above zero from a two-sided p and the mean."""
    return p / 2 if mean > 0 else 1 - p / 2


def _strata(data: SweepData, axes: Iterable[str]) -> list[str]:
    """Return those of attn_type (mixer) and memory, in this order, that have several levels and are not in `axes`.

    A row averages the strata of the first one with equal weights; rows within its levels average the second.
    """
    return [axis for axis in STRATUM_AXES if axis not in axes and len(data.levels(axis)) > 1]


def _rows(
    numbers: MetricMatrix, levels: Levels, stratum_rows: Sequence[str], strata: Sequence[str]
) -> Iterator[EffectRow]:
    """Yield the rows of these levels for every measure, with and without restriction to strata.

    For each measure, a row over the full sweep comes first, then a row within every mixer. Rows within the levels of
    memory follow only where these differ significantly (heterogeneity p < 0.05), within the sweep or the mixer. Subsets
    without data are skipped.

    Args:
        numbers: The numbers of the sweep.
        levels: (level, reference) by axis.
        stratum_rows: Axes of `strata` within whose levels rows are wanted.
        strata: Axes whose strata get equal weights, in order; the first one that the subset leaves free is averaged.
    """
    matched = numbers.differences_between(levels)
    parts: dict[tuple[str, ...], _Subset] = {}  # shared by the measures
    for column_index, column in enumerate(numbers.columns):
        family = f"{column.heading}: {' x '.join(levels)}"
        subsets: list[dict[str, str]] = [{}]
        for subset in subsets:
            remaining = [axis for axis in strata if axis not in subset]
            key = tuple(chain.from_iterable(subset.items()))
            if key not in parts:
                mask = standing(matched.levels, subset, len(matched.corners))
                parts[key] = _Subset(matched, mask, remaining[0] if remaining else None)
            row = _row(numbers, parts[key], column_index)
            if not len(row.sample):
                continue
            row.levels = levels
            row.fields |= {"where": subset_text(subset), "family": family}
            yield row
            if (
                remaining
                and remaining[0] in stratum_rows
                and (remaining[0] == STRATUM_AXES[0] or row.fields["p_heterogeneity"] < ALPHA)
            ):
                subsets += [subset | {remaining[0]: level} for level in numbers.data.levels(remaining[0])]


class _Subset:
    """Configurations of a subset of matched differences; all that does not depend on the measure is computed once.

    `differences` is [measure, configuration, seed], `corners` [configuration, seed, corner], and `listed`
    [configuration, seed] says that the grid lists a complete group. `strata` are those of the configurations.
    """

    def __init__(self, matched: MatchedDifferences, mask: np.ndarray, axis: str | None) -> None:
        """Select configurations.

        Args:
            matched: Differences of the levels over all configurations.
            mask: Configurations to include, [configuration].
            axis: Axis whose strata get equal weights; None for a single stratum.
        """
        self.signs = matched.signs
        self.differences = np.ascontiguousarray(np.moveaxis(matched.differences[mask], -1, 0))
        self.corners = matched.corners[mask]
        self.listed = (self.corners >= 0).all(axis=-1)
        self.expected = int(self.listed.any(axis=1).sum())
        self.keys = [matched.keys[index] for index in np.flatnonzero(mask).tolist()]
        levels = matched.levels[axis][mask].tolist() if axis is not None else [""] * len(self.corners)
        numbers = {level: number for number, level in enumerate(dict.fromkeys(levels))}
        self.strata = _Strata(np.array([numbers[level] for level in levels], dtype=int))


class _Strata:
    """Division of configurations into strata: `codes` has the number of each one's stratum, [configuration]."""

    def __init__(self, codes: np.ndarray) -> None:
        self.codes = codes

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Number of configurations by code."""
        return np.bincount(self.codes)

    @cached_property
    def _order(self) -> np.ndarray:
        """Indices of the configurations, stratum by stratum."""
        return np.argsort(self.codes, kind="stable")

    @cached_property
    def weights(self) -> np.ndarray:
        """Factors [configuration] that turn the mean over configurations into the mean of the stratum means.

        They are n / (strata x size of the configuration's stratum), and their mean is 1.
        """
        return np.asarray(len(self.codes) / (np.count_nonzero(self._sizes) * self._sizes[self.codes]))

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the values [configuration] of every stratum, by rising code."""
        return [part for part in np.split(values[self._order], np.cumsum(self._sizes)[:-1]) if len(part)]


def _row(numbers: MetricMatrix, part: _Subset, column_index: int) -> _MatchedRow:
    """Return the row of one measure over the configurations of a subset.

    Configurations without any difference are dropped from the sample. `expected` counts configurations with a complete
    group in the grid, `missing` runs of such groups without a difference.

    Args:
        numbers: The numbers of the sweep.
        part: Configurations to include.
        column_index: Position of the measure.

    Returns:
        A row with empty `levels` and without `where`, `family` and the fields of its test, which the caller adds.
    """
    all_differences = part.differences[column_index]
    has_value = ~np.isnan(all_differences)
    runs = has_value.sum(axis=1)
    has_any_run = runs > 0
    is_complete = bool(has_any_run.all())
    sample = all_differences if is_complete else all_differences[has_any_run]
    strata = part.strata if is_complete else _Strata(part.strata.codes[has_any_run])
    means = _means(sample)
    lost = part.listed & ~has_value
    i2, p = heterogeneity_test(strata.split(means))
    fields = {
        "measure": numbers.columns[column_index],
        "expected": part.expected,
        "missing": _count_missing(numbers, part.corners[lost], column_index) if lost.any() else {},
        "worst": _worst_case_mean(numbers, part, column_index),
        "origins": numbers.origins(part.corners[has_value].T.reshape(-1), column_index),
        "i2": i2,
        "p_heterogeneity": p,
    }
    return _MatchedRow(
        column_index=column_index,
        levels={},
        fields=fields,
        sample=sample * strata.weights[:, None] if runs.max(initial=0) > 1 else means * strata.weights,
        unweighted=means,
        keys=part.keys if is_complete else [part.keys[index] for index in np.flatnonzero(has_any_run).tolist()],
        scale=numbers.scales[column_index],
    )


def _means(sample: np.ndarray) -> np.ndarray:
    """Return the mean of every configuration over its seeds, [configuration], NaN skipped.

    Args:
        sample: Differences [configuration, seed]; each row needs at least one number. With one seed it is a view.
    """
    if sample.shape[1] == 1:
        return sample[:, 0]
    counts = (~np.isnan(sample)).sum(axis=1)
    return np.asarray(np.nansum(sample, axis=1) / np.maximum(counts, 1))


def _count_missing(numbers: MetricMatrix, corners: np.ndarray, column_index: int) -> dict[str, int]:
    """Return the number of runs without a difference, by the placeholder text of the first cell without a number.

    Args:
        numbers: The numbers of the sweep.
        corners: Cell indices of the incomplete runs, [run, corner]; each run needs a cell without the number.
        column_index: Position of the measure.
    """
    counts: Counter[str] = Counter()
    for run in corners:
        cell = next(cell for cell in run.tolist() if math.isnan(numbers.values[cell, column_index]))
        counts[numbers.placeholder(cell, column_index)] += 1
    return dict(counts)


def _worst_case_mean(numbers: MetricMatrix, part: _Subset, column_index: int) -> float:
    """Return the mean difference with diverged cells at the worst possible value; NaN if no cell of `part` diverged.

    It is the mean of the stratum means, in which each configuration's mean over its seeds counts once.

    Args:
        numbers: The numbers of the sweep.
        part: Configurations to include.
        column_index: Position of the measure.
    """
    filled, diverged = numbers.filled[:, column_index], numbers.diverged[:, column_index]
    listed = part.listed[..., None]
    if not diverged.any() or not (diverged[part.corners] & listed).any():
        return math.nan
    values = np.where(listed, filled[part.corners], np.nan) @ part.signs
    has_value = ~np.isnan(values).all(axis=1)
    if not has_value.any():
        return math.nan
    strata = _Strata(part.strata.codes[has_value])
    return float(np.mean([stratum.mean() for stratum in strata.split(_means(values[has_value]))]))


def heterogeneity_test(strata: Sequence[np.ndarray]) -> tuple[float, float]:
    """Test that all strata have the same mean, without assuming equal variances.

    Args:
        strata: Values of each stratum (means of configurations), [n] each, without NaN.

    Returns:
        (I2, p). I2 = max(0, (F - 1) / F), the share of the variation between strata beyond chance. Both are NaN for
        fewer than two strata or a stratum with a single value. Without any variance inside the strata: (1, 0) if their
        means differ, else (0, 1).

    Source:
        Brown and Forsythe's F with Mehrotra's degrees of freedom.
    """
    if len(strata) < 2 or min(len(part) for part in strata) < 2:
        return math.nan, math.nan
    n = np.array([len(part) for part in strata], dtype=float)
    if n.min() == n.max():  # one call instead of one per stratum, with the same sums
        table = np.stack(strata)
        means, variances, largest = table.mean(axis=1), table.var(axis=1, ddof=1), float(np.abs(table).max())
    else:
        means = np.array([part.mean() for part in strata])
        variances = np.array([part.var(ddof=1) for part in strata])
        largest = max(float(np.abs(part).max()) for part in strata)
    share = n / n.sum()
    between = float((n * (means - (share * means).sum()) ** 2).sum())
    inside = (1 - share) * variances
    dust = 1e-18 * largest**2
    if inside.sum() <= dust:
        return (1.0, 0.0) if between > dust else (0.0, 1.0)
    statistic = between / float(inside.sum())
    between_df = float((inside.sum() ** 2) / (inside**2 / (n - 1)).sum())
    squares = variances**2
    residual_df = float(inside.sum() ** 2 / ((share * variances).sum() ** 2 + (squares * (1 - 2 * share)).sum()))
    return max(0.0, 1 - 1 / statistic) if statistic > 0 else 0.0, float(
        special.fdtrc(residual_df, between_df, statistic)
    )


# --- quality against speed ------------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[float, float]], directions: tuple[int, int] = (1, 1)) -> list[bool]:
    """Return a Pareto front mask: True for points that no other one dominates.

    A point dominates another if it is at least as good in both coordinates and better in one.

    Args:
        points: (x, y) pairs. Equal points do not dominate each other.
        directions: 1 where more is better, -1 where less is better, for x and y.

    Returns:
        One boolean per point, in order; empty without points.
    """
    scaled = [(x * directions[0], y * directions[1]) for x, y in points]

    def is_dominated(a: tuple[float, float]) -> bool:
        return any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in scaled)

    return [not is_dominated(point) for point in scaled]
