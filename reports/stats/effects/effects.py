"""What the levels do, alone and together: mean differences over matched pairs, fours and eights, with their tests; of a partial
design, in which these are few, by least squares (partial_design_effects.py).

The unit is the *configuration*: the levels of all other axes. Its seeds are one observation each of it, never configurations
of their own, and an interval is about the configurations that the grid lists and others like them. The tests made together, a
family, are those of one number and one axis; the contrasts that the grid declares are one family of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Protocol

import numpy as np
from scipy import special

from ...number_format import Column
from ...sweep_data import SweepData
from ..noise.run_noise import NEAR, STRATUM_AXES, Spread, detectable, spread
from ..significance.paired_tests import ALPHA, corrected_families, holm, paired_difference_tests
from . import stopping_rows
from .effect_types import CONFIRMATORY, EQUIVALENT, FLOOR, Effect, EffectRow, Interaction, Tested, where_text
from .matched_groups import (
    MatchedDifferences,
    Numbers,
    contrast_column,
    factors,
    first_measures,
    level_combinations,
    level_pairs,
    main_measures,
    measures,
    numbers_of,
    origins_of,
    reference_level,
)
from .matched_groups import within as standing
from .needle_baseline import flag_chance_level
from .partial_design_effects import FittedDesign, Levels

__all__ = [
    "ALPHA", "CONFIRMATORY", "EQUIVALENT", "FLOOR", "NEAR", "Effect", "Interaction", "Spread", "Tested", "contrast_column", "contrasts", "detectable", "effects", "factors",
    "first_measures", "interactions", "main_measures", "measures", "numbers_of", "origins_of", "pareto",
    "reference_level", "spread",
]  # fmt: skip


# --- the rows ---------------------------------------------------------------------------------------------------------


def effects(data: SweepData, columns: Sequence[Column] | None = None, *, within: bool = True) -> list[Effect]:
    """What the levels of every axis do to every measure, against each other: first the declared contrasts, then, exploratory and
    measure by measure, over the whole sweep and `within` its strata. What has not a single pair is left out."""
    chosen = measures(data) if columns is None else columns
    shown = {one.key for one in chosen}
    declared = [one for one in contrasts(data) if one.measure.key in shown and (within or not one.where)]
    taken = {_what(one.measure, one.axis, one.level, one.reference, one.where) for one in declared}
    made = _estimator(data, chosen)
    rows = [row for axis in made.axes for pair in level_pairs(data, axis) for row in made.effects({axis: pair}, within)]
    rows = [row for row in rows if _what(row.fields["measure"], *_single(row), row.fields["where"]) not in taken]
    return declared + [_effect(row, about) for row, about in _tested(made, sorted(rows, key=lambda row: row.place))]


def _single(row: EffectRow) -> tuple[str, str, str]:
    ((axis, (level, reference)),) = row.levels.items()
    return axis, level, reference


def _what(column: Column, axis: str, level: str, reference: str, where: str) -> tuple[Any, ...]:
    """The same for a difference and for its opposite."""
    return *column.key, axis, frozenset((level, reference)), where


def _effect(row: EffectRow, about: Mapping[str, Any], **more: Any) -> Effect:
    axis, level, reference = _single(row)
    pairs = 0 if math.isnan(about["mean"]) else about["n"]
    return Effect(**about, axis=axis, level=level, reference=reference, pairs=pairs, **more)


def interactions(data: SweepData, columns: Sequence[Column] | None = None) -> list[Interaction]:
    """Every two-way interaction on every main measure, over the whole sweep and within every mixer, and every three-way one: for
    the mixers between all of them, for other axes against the reference. Of a partial design those that it estimates."""
    made = _estimator(data, main_measures(data) if columns is None else columns)
    rows = sorted(made.interactions(), key=lambda row: (row.place, len(row.levels)))
    found = []
    for row, about in _tested(made, rows):
        levels, references = zip(*row.levels.values(), strict=True)
        found.append(
            Interaction(**about, axes=tuple(row.levels), levels=levels, references=references, fours=about["n"])
        )
    return found


def contrasts(data: SweepData) -> list[Effect]:
    """The contrasts that the grid declares, in its order and corrected together; one without a single pair too, so that it is
    not forgotten."""
    if not data.contrasts:
        return []
    made = _estimator(data, [contrast_column(data, one) for one in data.contrasts])
    rows = []
    for place, one in enumerate(data.contrasts):
        reference = reference_level(data.levels(one.axis) or [""]) if one.reference is None else one.reference
        rows.append(made.declared(place, {one.axis: (one.level, reference)}, one.within))
        rows[-1].fields |= {"family": CONFIRMATORY, "confirmatory": True}
    margins = {row.place: one.margin for row, one in zip(rows, data.contrasts, strict=True) if one.margin is not None}
    equal = dict(
        zip(margins, holm(made.outside([rows[place] for place in margins], list(margins.values()))), strict=True)
    )
    found = [
        _effect(row, about, margin=margins.get(row.place), p_equivalence=equal.get(row.place, math.nan))
        for row, about in _tested(made, rows)
    ]
    return flag_chance_level(data, stopping_rows.apply_last_look(data, found))


class _Estimator(Protocol):
    """The rows of a sweep before their correction, by matched pairs or by least squares."""

    axes: list[str]

    def effects(self, levels: Levels, within: bool) -> Iterable[EffectRow]: ...
    def interactions(self) -> Iterable[EffectRow]: ...
    def declared(self, place: int, levels: Levels, where: Mapping[str, str]) -> EffectRow: ...
    def outside(self, rows: Sequence[Any], margins: Sequence[float]) -> list[float]: ...
    def corrected(self, rows: Sequence[Any], families: Sequence[Sequence[int]]) -> list[list[float]]: ...


def _estimator(data: SweepData, columns: Sequence[Column]) -> _Estimator:
    return _Matched(data, columns) if data.partial is None else FittedDesign(data, data.partial, columns)


def _tested(made: _Estimator, rows: Sequence[EffectRow]) -> list[tuple[EffectRow, dict[str, Any]]]:
    """Every row with the fields of its Effect or Interaction that all have, corrected family by family."""
    families: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        families.setdefault(row.fields["family"], []).append(index)
    members = list(families.values())
    ps = dict(zip(chain(*members), chain(*made.corrected(rows, members)), strict=True))
    return [(row, row.fields | {"p_corrected": ps[index]}) for index, row in enumerate(rows)]


# --- matched pairs ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _MatchedRow(EffectRow):
    """A row with its differences [configuration] or [configuration, seed], and those as they are before strata are given equal
    weights."""

    sample: np.ndarray
    plain: np.ndarray
    keys: Sequence[Hashable]
    """The configuration of every difference: rows that share some are tested with common flips of signs."""
    scale: float
    """The largest number behind the differences, beside which their dust is small."""


class _Matched:
    """The rows of a sweep by matched pairs, fours and eights."""

    def __init__(self, data: SweepData, columns: Sequence[Column]) -> None:
        self.data, self.axes, self.numbers = data, factors(data), Numbers(data, columns)

    def effects(self, levels: Levels, within: bool) -> Iterator[EffectRow]:
        """The rows of two levels of an axis, over the whole sweep and `within` its strata."""
        strata = _strata(self.data, levels)
        return _rows(self.numbers, levels, strata if within else [], strata)

    def interactions(self) -> Iterator[EffectRow]:
        """The rows of two axes, over the whole sweep and within every mixer, and of three."""
        for count in (2, 3):
            for axes in combinations(self.axes, count):
                strata = _strata(self.data, axes)
                pairs = {
                    axis: level_pairs(self.data, axis, every=count == 2 or axis == STRATUM_AXES[0]) for axis in axes
                }
                against = {axis: level_pairs(self.data, axis, every=False) for axis in axes}
                for levels in level_combinations(pairs):
                    main = all(levels[axis] in against[axis] for axis in axes)
                    yield from _rows(self.numbers, levels, strata[:1] if count == 2 and main else [], strata)

    def declared(self, place: int, levels: Levels, where: Mapping[str, str]) -> EffectRow:
        """The row of a declared contrast, which may have no pair."""
        ((axis, (level, reference)),) = levels.items()
        # an axis that another grid of this sweep had, or that is left with one level: none of its pairs is here
        known = axis in self.numbers.axes and level != reference
        made = self.numbers.contrasted(levels if known else {STRATUM_AXES[0]: ("", "")})
        kept = standing(made.levels, where, len(made.corners)) & known
        strata = [one for one in _strata(self.data, levels) if known and one not in where]
        row = _row(self.numbers, made, kept, place, strata[0] if strata else None)
        row.levels = levels
        row.fields["where"] = where_text(where)
        return row

    def outside(self, rows: Sequence[_MatchedRow], margins: Sequence[float]) -> list[float]:
        """p of two one-sided tests that the mean lies outside of the margin; each side is half of the two-sided test of the
        differences shifted by the margin, whichever test that is."""
        scales = [row.scale for row in rows]
        below = paired_difference_tests(
            [row.sample + margin for row, margin in zip(rows, margins, strict=True)], scales
        )
        above = paired_difference_tests(
            [row.sample - margin for row, margin in zip(rows, margins, strict=True)], scales
        )
        return [max(_one_sided(a.p, a.mean), _one_sided(b.p, -b.mean)) for a, b in zip(below, above, strict=True)]

    def corrected(self, rows: Sequence[_MatchedRow], families: Sequence[Sequence[int]]) -> list[list[float]]:
        """The corrected p of every family; adds its test to each row."""
        samples, scales = [row.sample for row in rows], [row.scale for row in rows]
        summed = paired_difference_tests(samples, scales)
        for row, summary in zip(rows, summed, strict=True):
            # the median is that of the differences as they are, whatever the weights of strata
            median = {"median": float(np.median(row.plain))} if summary.n else {"p_sign": math.nan}
            row.fields |= vars(summary) | median
        keys = [row.keys for row in rows]
        return corrected_families(
            [tuple([some[i] for i in members] for some in (samples, summed, keys, scales)) for members in families]  # type: ignore[misc]
        )


def _one_sided(p: float, mean: float) -> float:
    return p / 2 if mean > 0 else 1 - p / 2


def _strata(data: SweepData, axes: Iterable[str]) -> list[str]:
    """What a row over the whole sweep averages: the first always told apart, the second where it makes a difference."""
    return [axis for axis in STRATUM_AXES if axis not in axes and len(data.levels(axis)) > 1]


def _rows(numbers: Numbers, levels: Levels, split: Sequence[str], strata: Sequence[str]) -> Iterator[EffectRow]:
    """The rows of these levels for every measure: over the whole sweep, within the levels of the first axis of `split`, and
    within those of the next wherever they differ. A row says how far the levels of the next of `strata` differ."""
    made = numbers.contrasted(levels)
    for place, column in enumerate(numbers.columns):
        family = f"{column.heading}: {' x '.join(levels)}"
        subsets: list[dict[str, str]] = [{}]
        for where in subsets:
            kept = standing(made.levels, where, len(made.corners))
            left = [axis for axis in strata if axis not in where]
            row = _row(numbers, made, kept, place, left[0] if left else None)
            if not len(row.sample):
                continue
            row.levels = levels
            row.fields |= {"where": where_text(where), "family": family}
            yield row
            if left and left[0] in split and (left[0] == STRATUM_AXES[0] or row.fields["p_heterogeneity"] < ALPHA):
                subsets += [where | {left[0]: level} for level in numbers.data.levels(left[0])]


def _row(numbers: Numbers, made: MatchedDifferences, kept: np.ndarray, place: int, axis: str | None) -> _MatchedRow:
    """The differences of these configurations in one measure, those of an axis's strata with equal weights."""
    every = made.differences[kept, :, place]
    have = ~np.isnan(every)
    there = have.any(axis=1)
    sample = every[there]
    strata = made.levels[axis][kept][there] if axis is not None else None
    means = _means(sample)
    parts = [means[strata == level] for level in dict.fromkeys(strata.tolist())] if strata is not None else []
    weights = _weights(strata, parts) if strata is not None else np.ones(len(sample))
    listed = (made.corners[kept] >= 0).all(axis=-1)
    corners = made.corners[kept]
    i2, p = heterogeneity_test(parts)
    fields = {
        "measure": numbers.columns[place],
        "expected": int(listed.any(axis=1).sum()),
        "missing": _missing(numbers, corners[listed & ~have], place),
        "worst": _worst(numbers, made, kept, place, axis),
        "origins": numbers.origins(corners[have].T.reshape(-1), place),
        "i2": i2,
        "p_heterogeneity": p,
    }
    alone = have.sum(axis=1).max(initial=0) <= 1
    return _MatchedRow(
        place=place,
        levels={},
        fields=fields,
        sample=means * weights if alone else sample * weights[:, None],
        plain=means,
        keys=[(made.axes, key) for key in np.flatnonzero(kept)[there].tolist()],
        scale=numbers.scales[place],
    )


def _means(sample: np.ndarray) -> np.ndarray:
    """Of every configuration over its seeds, [configuration]; each has at least one."""
    if sample.shape[1] == 1:
        return sample[:, 0]
    counts = (~np.isnan(sample)).sum(axis=1)
    return np.asarray(np.nansum(sample, axis=1) / np.maximum(counts, 1))


def _weights(strata: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Factors by which the mean over all configurations becomes the mean of the strata's means."""
    sizes = {level: len(part) for level, part in zip(dict.fromkeys(strata.tolist()), parts, strict=True)}
    return np.array([len(strata) / (len(sizes) * sizes[level]) for level in strata.tolist()])


def _missing(numbers: Numbers, corners: np.ndarray, place: int) -> dict[str, int]:
    """Why these runs, [run, corner], have no difference: the word of the first cell that lacks its number, counted."""
    found: Counter[str] = Counter()
    for run in corners:
        cell = next(cell for cell in run.tolist() if math.isnan(numbers.values[cell, place]))
        found[numbers.word(cell, place)] += 1
    return dict(found)


def _worst(numbers: Numbers, made: MatchedDifferences, kept: np.ndarray, place: int, axis: str | None) -> float:
    """The mean with diverged cells at the worst value possible; NaN where none of these diverged."""
    filled = numbers.filled[:, place]
    corners = made.corners[kept]
    listed = (corners >= 0).all(axis=-1, keepdims=True)
    if not (numbers.diverged[corners, place] & listed).any():
        return math.nan
    values = np.where(listed, filled[corners], np.nan) @ made.signs
    there = ~np.isnan(values).all(axis=1)
    means = _means(values[there])
    if axis is None or not len(means):
        return float(means.mean()) if len(means) else math.nan
    strata = made.levels[axis][kept][there]
    return float(np.mean([means[strata == level].mean() for level in dict.fromkeys(strata.tolist())]))


def heterogeneity_test(strata: Sequence[np.ndarray]) -> tuple[float, float]:
    """I2 and p of the hypothesis that strata have one mean: Brown and Forsythe's F, which needs no equal variances, with
    Mehrotra's degrees of freedom. I2 = (F - 1) / F, at least 0. NaN for fewer than two strata, and for strata of one."""
    if len(strata) < 2 or min(len(part) for part in strata) < 2:
        return math.nan, math.nan
    n = np.array([len(part) for part in strata], dtype=float)
    means = np.array([part.mean() for part in strata])
    variances = np.array([part.var(ddof=1) for part in strata])
    share = n / n.sum()
    between = float((n * (means - (share * means).sum()) ** 2).sum())
    inside = (1 - share) * variances
    dust = 1e-18 * max(float(np.abs(part).max()) for part in strata) ** 2
    if inside.sum() <= dust:
        return (1.0, 0.0) if between > dust else (0.0, 1.0)
    f = between / float(inside.sum())
    below = float((inside.sum() ** 2) / (inside**2 / (n - 1)).sum())
    squares = variances**2
    above = float(inside.sum() ** 2 / ((share * variances).sum() ** 2 + (squares * (1 - 2 * share)).sum()))
    return max(0.0, 1 - 1 / f) if f > 0 else 0.0, float(special.fdtrc(above, below, f))


# --- quality against speed ------------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[float, float]], directions: tuple[int, int] = (1, 1)) -> list[bool]:
    """Which points no other beats: none is at least as good in both coordinates and better in one. `directions` is 1 where
    more is better, -1 where less is."""
    scaled = [(x * directions[0], y * directions[1]) for x, y in points]

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in scaled)

    return [not beaten(point) for point in scaled]
