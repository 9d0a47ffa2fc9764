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
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from scipy import special

from ....results.contrasts import Contrast
from ...number_format import Column
from ...sweep_data import SweepData
from ..noise.run_noise import NEAR, STRATA, Spread, detectable, spread
from ..significance.paired_tests import ALPHA, Summary, corrected_families, holm, summaries
from . import partial_design_effects, stopping_rows
from .effect_types import CONFIRMATORY, EQUIVALENT, FLOOR, NONE, Effect, Interaction, Tested, where_text
from .matched_groups import (
    Contrasted,
    Numbers,
    combined,
    contrast_column,
    factors,
    first_measures,
    level_pairs,
    main_measures,
    measures,
    numbers_of,
    origins_of,
    reference_level,
)
from .matched_groups import within as standing
from .needle_baseline import with_floor

__all__ = [
    "ALPHA", "CONFIRMATORY", "EQUIVALENT", "FLOOR", "NEAR", "Effect", "Interaction", "Spread", "Tested", "contrast_column", "contrasts", "detectable", "effects", "factors",
    "first_measures", "interactions", "main_measures", "measures", "numbers_of", "origins_of", "pareto",
    "reference_level", "spread",
]  # fmt: skip


# --- the rows ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Row:
    """A row before its tests: its fields, its differences [configuration] or [configuration, seed], and those as they are
    before strata are given equal weights."""

    place: int
    fields: dict[str, Any]
    sample: np.ndarray
    plain: np.ndarray
    keys: Sequence[Hashable] = ()
    """The configuration of every difference: rows that share some are tested with common flips of signs."""
    scale: float = 0.0
    """The largest number behind the differences, beside which their dust is small."""
    about: dict[str, Any] = field(default_factory=dict)


def effects(data: SweepData, columns: Sequence[Column] | None = None, *, within: bool = True) -> list[Effect]:
    """What the levels of every axis do to every measure, against each other: first the declared contrasts, then, exploratory and
    measure by measure, over the whole sweep and `within` its strata. What has not a single pair is left out."""
    chosen = measures(data) if columns is None else columns
    if data.partial is not None:
        return partial_design_effects.effects(data, chosen, within=within)
    shown = {one.key for one in chosen}
    declared = [one for one in contrasts(data) if one.measure.key in shown and (within or not one.where)]
    taken = {_what(one.measure, one.axis, one.level, one.reference, one.where) for one in declared}
    numbers = Numbers(data, chosen)
    rows = [
        row
        for axis in factors(data)
        for pair in level_pairs(data, axis)
        for row in _rows(numbers, {axis: pair}, _strata(data, [axis]) if within else [], _strata(data, [axis]))
    ]
    rows = [row for row in rows if _what(row.fields["measure"], *_single(row), row.fields["where"]) not in taken]
    found = _tested(sorted(rows, key=lambda row: row.place))
    return declared + [_effect(row, about) for row, about in found]


def _single(row: _Row) -> tuple[str, str, str]:
    ((axis, (level, reference)),) = row.about["levels"].items()
    return axis, level, reference


def _what(column: Column, axis: str, level: str, reference: str, where: str) -> tuple[Any, ...]:
    """The same for a difference and for its opposite."""
    return *column.key, axis, frozenset((level, reference)), where


def _effect(row: _Row, about: Mapping[str, Any], **more: Any) -> Effect:
    axis, level, reference = _single(row)
    return Effect(**about, axis=axis, level=level, reference=reference, pairs=about["n"], **more)


def interactions(data: SweepData, columns: Sequence[Column] | None = None) -> list[Interaction]:
    """Every two-way interaction on every main measure, over the whole sweep and within every mixer, and every three-way one: for
    the mixers between all of them, for other axes against the reference."""
    chosen = main_measures(data) if columns is None else columns
    if data.partial is not None:
        return partial_design_effects.interactions(data, chosen)
    numbers = Numbers(data, chosen)
    rows: list[_Row] = []
    for count in (2, 3):
        for axes in combinations(factors(data), count):
            strata = _strata(data, axes)
            pairs = {axis: level_pairs(data, axis, every=count == 2 or axis == STRATA[0]) for axis in axes}
            against = {axis: level_pairs(data, axis, every=False) for axis in axes}
            for levels in combined(pairs):
                main = all(levels[axis] in against[axis] for axis in axes)
                rows += _rows(numbers, levels, strata[:1] if count == 2 and main else [], strata)
    return [
        Interaction(
            **about,
            axes=tuple(row.about["levels"]),
            levels=tuple(level for level, _ in row.about["levels"].values()),
            references=tuple(reference for _, reference in row.about["levels"].values()),
            fours=about["n"],
        )
        for row, about in _tested(sorted(rows, key=lambda row: (row.place, len(row.about["levels"]))))
    ]


def contrasts(data: SweepData) -> list[Effect]:
    """The contrasts that the grid declares, in its order and corrected together; one without a single pair too, so that it is
    not forgotten."""
    if not data.contrasts:
        return []
    if data.partial is not None:
        return partial_design_effects.contrasts(data)
    columns = [contrast_column(data, one) for one in data.contrasts]
    numbers = Numbers(data, columns)
    rows, empty = [], {}
    for place, one in enumerate(data.contrasts):
        row = _declared(numbers, place, one, columns[place])
        if len(row.sample):
            rows.append(row)
        else:
            empty[place] = row
    found = {row.place: (row, about) for row, about in _tested(rows)}
    equal = _equivalences([found[place][0] for place in sorted(found)])
    for place, row in empty.items():
        nothing = Summary(
            n=0, seeds=0, mean=math.nan, median=math.nan, up=0, down=0, ties=0, low=math.nan, high=math.nan,
            p=math.nan, p_sign=math.nan, method=NONE,
        )  # fmt: skip
        unknown = {"i2": math.nan, "p_heterogeneity": math.nan, "p_corrected": math.nan}
        found[place] = row, row.fields | vars(nothing) | unknown
    made = [
        _effect(row, about, margin=row.about["margin"], p_equivalence=equal.get(place, math.nan))
        for place, (row, about) in sorted(found.items())
    ]
    return with_floor(data, stopping_rows.applied(data, made))


def _declared(numbers: Numbers, place: int, one: Contrast, column: Column) -> _Row:
    reference = reference_level(numbers.data.levels(one.axis) or [""]) if one.reference is None else one.reference
    levels = {one.axis: (one.level, reference)}
    # an axis that another grid of this sweep had, or that is left with one level: none of its pairs is here
    known = one.axis in numbers.axes and one.level != reference
    made = numbers.contrasted(levels if known else {STRATA[0]: ("", "")})
    kept = standing(made.levels, one.within, len(made.corners)) & known
    strata = [axis for axis in _strata(numbers.data, [one.axis]) if known and axis not in one.within]
    row = _row(numbers, made, kept, place, strata[0] if strata else None)
    row.fields |= {"measure": column, "where": where_text(one.within), "family": CONFIRMATORY, "confirmatory": True}
    row.about |= {"levels": levels, "margin": one.margin}
    return row


def _strata(data: SweepData, axes: Iterable[str]) -> list[str]:
    """What a row over the whole sweep averages: the first always told apart, the second where it makes a difference."""
    return [axis for axis in STRATA if axis not in axes and len(data.levels(axis)) > 1]


def _rows(
    numbers: Numbers, levels: Mapping[str, tuple[str, str]], split: Sequence[str], strata: Sequence[str]
) -> Iterator[_Row]:
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
            row.fields |= {"measure": column, "where": where_text(where), "family": family}
            row.about["levels"] = levels
            yield row
            if left and left[0] in split and (left[0] == STRATA[0] or row.fields["p_heterogeneity"] < ALPHA):
                subsets += [where | {left[0]: level} for level in numbers.data.levels(left[0])]


def _row(numbers: Numbers, made: Contrasted, kept: np.ndarray, place: int, axis: str | None) -> _Row:
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
    i2, p = heterogeneity(parts)
    fields = {
        "expected": int(listed.any(axis=1).sum()),
        "missing": _missing(numbers, corners[listed & ~have], place),
        "worst": _worst(numbers, made, kept, place, axis),
        "origins": numbers.origins(corners[have].T.reshape(-1), place),
        "i2": i2,
        "p_heterogeneity": p,
    }
    alone = have.sum(axis=1).max(initial=0) <= 1
    return _Row(
        place=place,
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


def _worst(numbers: Numbers, made: Contrasted, kept: np.ndarray, place: int, axis: str | None) -> float:
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


def heterogeneity(strata: Sequence[np.ndarray]) -> tuple[float, float]:
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


def _tested(rows: Sequence[_Row]) -> Iterator[tuple[_Row, dict[str, Any]]]:
    """Every row with the fields of its Effect or Interaction that all have."""
    samples = [row.sample for row in rows]
    scales = [row.scale for row in rows]
    summed = summaries(samples, scales)
    families: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        families.setdefault(row.fields["family"], []).append(place)
    ps = [math.nan] * len(rows)
    arguments = [
        (
            [samples[i] for i in members],
            [summed[i] for i in members],
            [rows[i].keys for i in members],
            [scales[i] for i in members],
        )
        for members in families.values()
    ]
    for members, together in zip(families.values(), corrected_families(arguments), strict=True):
        for i, p in zip(members, together, strict=True):
            ps[i] = p
    for row, summary, p in zip(rows, summed, ps, strict=True):
        # the median is that of the differences as they are, whatever the weights of strata
        yield row, row.fields | vars(summary) | {"median": float(np.median(row.plain)), "p_corrected": p}


def _equivalences(rows: Sequence[_Row]) -> dict[int, float]:
    """By row with a margin: p of the two one-sided tests that the mean lies within it, after Holm's correction.

    Each side is half of the two-sided test of the differences shifted by the margin, whichever test that is.
    """
    asked = [row for row in rows if row.about["margin"] is not None]
    scales = [row.scale for row in asked]
    below = summaries([row.sample + row.about["margin"] for row in asked], scales)
    above = summaries([row.sample - row.about["margin"] for row in asked], scales)
    raw = [max(_one_sided(a.p, a.mean), _one_sided(b.p, -b.mean)) for a, b in zip(below, above, strict=True)]
    return dict(zip((row.place for row in asked), holm(raw), strict=True))


def _one_sided(p: float, mean: float) -> float:
    return p / 2 if mean > 0 else 1 - p / 2


# --- quality against speed ------------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[float, float]], directions: tuple[int, int] = (1, 1)) -> list[bool]:
    """Which points no other beats: none is at least as good in both coordinates and better in one. `directions` is 1 where
    more is better, -1 where less is."""
    scaled = [(x * directions[0], y * directions[1]) for x, y in points]

    def beaten(a: tuple[float, float]) -> bool:
        return any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in scaled)

    return [not beaten(point) for point in scaled]
