"""The design of a sweep: which cells belong together as pairs, fours and eights, and what is measured in them.

A *configuration* is what cells share that differ in their seed alone. Two cells are a pair when they agree on the seed and
on every axis but one; the seeds of a configuration stay together, since they say nothing of another configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ....results.contrasts import Contrast, reference_level
from ....results.store.records import AXES
from ...number_format import Column, column_of, format_length
from ...result_columns import all_lengths, complete_columns, ends, longest, placeholder_for_cell
from ...sweep_data import WEIGHTED_SUFFIX, SweepData, cell_level

if TYPE_CHECKING:
    import pandas as pd

MOST_LEVELS = 6
"""Of an axis whose levels are all held against each other; those of a longer one are held against the reference alone."""
LOSS_DECIMALS = 3
DIVERGED = "diverged"


def measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """Every number that effects are worked out for, where at least so many cells have it: those of the complete results, at all
    context lengths that the grid asks for and averaged over them, a decimal more than is printed of losses."""
    return _known(data, complete_columns(data, over=all_lengths), at_least)


def main_measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """As `measures`, at the shortest and the longest context length alone."""
    return _known(data, complete_columns(data, over=ends), at_least)


def first_measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """As `measures`, at the longest context length alone: what a reader asks of first."""
    return _known(data, complete_columns(data, over=longest), at_least)


def _known(data: SweepData, columns: Sequence[Column], at_least: int) -> list[Column]:
    found = {}
    for column in columns:
        if len(data.numbers(data.cells, column)) >= at_least:
            found[column.key] = replace(column, decimals=column.decimals if column.percent else LOSS_DECIMALS)
    return list(found.values())


def factors(data: SweepData) -> list[str]:
    """The axes that vary, the five first; the seed is none of them."""
    return [axis for axis in AXES if len(data.levels(axis)) > 1] + data.extra_axes()


def contrast_column(data: SweepData, one: Contrast) -> Column:
    """The column of the number that a contrast is about."""
    known = data.metric(one.probe, one.metric)
    heading = known.heading or f"{one.probe}.{one.metric}"
    base = column_of(one.probe, known, heading, length=one.length or 0)
    base = base if base.percent else replace(base, decimals=LOSS_DECIMALS)
    if one.length is None:
        return replace(base, heading=f"{heading} avg", metric=one.metric + WEIGHTED_SUFFIX)
    return replace(base, heading=f"{heading}@{format_length(one.length)}") if one.length else base


def level_pairs(data: SweepData, axis: str, *, every: bool = True) -> list[tuple[str, str]]:
    """(level, reference) of an axis: every level against the reference level, then the others against each other."""
    levels = data.levels(axis)
    first = reference_level(levels)
    rest = [level for level in levels if level != first]
    against = [(level, first) for level in rest]
    return against + [(b, a) for a, b in combinations(rest, 2)] if every and len(levels) <= MOST_LEVELS else against


def numbers_of(data: SweepData, column: Column) -> pd.DataFrame:
    """One row a cell that has the number: cell, attempt, seed, every axis, value."""
    import pandas as pd  # most tables do without it, and reading it in takes half a second

    axes = (*AXES, *data.extra_axes())
    rows = []
    for cell in data.cells:
        value = data.given(cell, column)
        if value is not None and value.value is not None:
            row: dict[str, Any] = {"cell": cell.cell_id, "attempt": value.attempt_id, "seed": cell.seed}
            row |= {axis: cell_level(cell, axis) for axis in axes}
            rows.append(row | {"value": value.value})
    return pd.DataFrame(rows, columns=["cell", "attempt", "seed", *axes, "value"])


def origins_of(frame: pd.DataFrame, *suffixes: str) -> tuple[tuple[str, int | None], ...]:
    """The (cell, attempt) pairs of a frame of pairs, whose columns `cell` and `attempt` end in these."""
    return tuple(
        (str(cell), int(attempt))
        for end in suffixes
        for cell, attempt in zip(frame[f"cell{end}"].tolist(), frame[f"attempt{end}"].tolist(), strict=True)
    )


# --- all numbers of a sweep at once -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchedDifferences:
    """Differences of one kind over the whole sweep: of levels of one axis, or differences of differences for several.

    `corners` are cells, [configuration, seed, corner], -1 where the grid lists none; a corner's sign is in `signs`.
    `differences` are [configuration, seed, measure], NaN where a number is lacking. `levels` is the level of every other axis,
    by axis: [configuration].
    """

    axes: tuple[str, ...]
    corners: np.ndarray
    signs: np.ndarray
    differences: np.ndarray
    levels: Mapping[str, np.ndarray]


class Numbers:
    """The numbers of a sweep as arrays: [cell, measure]."""

    def __init__(self, data: SweepData, columns: Sequence[Column]) -> None:
        self.data, self.columns, self.cells = data, list(columns), list(data.cells)
        self.axes = [*AXES, *data.extra_axes()]
        found = [[data.given(cell, one) for one in self.columns] for cell in self.cells]
        shape = (len(self.cells), len(self.columns))
        known = [[np.nan if v is None or v.value is None else v.value for v in row] for row in found]
        self.values = np.array(known, dtype=float).reshape(shape)
        self.attempts = np.array([[0 if v is None else v.attempt_id for v in row] for row in found]).reshape(shape)
        self._given = found
        standings = [data.standing(cell) for cell in self.cells]
        self.diverged = np.isnan(self.values) & (np.array(standings, dtype=object) == DIVERGED)[:, None]
        """Cells that lack a number because their training diverged, [cell, measure]."""
        seeds = sorted({cell.seed for cell in self.cells})
        self._seeds = np.array([seeds.index(cell.seed) for cell in self.cells], dtype=int)
        self._words: dict[tuple[int, int], str] = {}
        self._places: dict[tuple[str, ...], tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        self._pairs: dict[tuple[str, int], tuple[str, int]] = {}
        self._origins: dict[int, list[tuple[str, int]]] = {}

    @cached_property
    def _codes(self) -> dict[str, tuple[list[str], np.ndarray]]:
        """By axis: its levels, and which of them each cell stands at."""
        found = {}
        for axis in self.axes:
            words = [cell_level(cell, axis) for cell in self.cells]
            names = list(dict.fromkeys(words))
            place = {name: index for index, name in enumerate(names)}
            found[axis] = names, np.array([place[word] for word in words], dtype=int)
        return found

    def contrasted(self, levels: Mapping[str, tuple[str, str]]) -> MatchedDifferences:
        """The differences of these levels, axis -> (level, reference): of one axis, or of differences for several."""
        if unknown := levels.keys() - self._codes.keys():
            raise KeyError(f"the sweep has no axis {min(unknown)}")
        places, others = self._table(tuple(levels))
        picks, signs = [], []
        for corner in product((0, 1), repeat=len(levels)):
            words = [(axis, pair[end]) for end, (axis, pair) in zip(corner, levels.items(), strict=True)]
            known = all(word in self._codes[axis][0] for axis, word in words)
            at = tuple(self._codes[axis][0].index(word) for axis, word in words) if known else ()
            there = places
            for level in at:
                there = there[:, level]
            picks.append(there if known else np.full((len(places), places.shape[-1]), -1))
            signs.append((-1.0) ** sum(corner))
        corners = np.stack(picks, axis=-1)
        listed = corners >= 0
        numbers = np.where(listed[..., None], self.values[corners], np.nan)
        # in this order, so that a difference of differences of equal numbers is zero
        weights = np.array(signs)
        return MatchedDifferences(tuple(levels), corners, weights, np.einsum("ksjm,j->ksm", numbers, weights), others)

    def _table(self, axes: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Which cell stands where, [configuration of the other axes, level of each of these, seed], -1 for none; and the
        levels of the other axes, by axis."""
        if axes not in self._places:
            others = [axis for axis in self.axes if axis not in axes]
            keys = np.array([self._codes[axis][1] for axis in others], dtype=int).reshape(len(others), -1).T
            found, which = np.unique(keys, axis=0, return_inverse=True)
            sizes = [len(self._codes[axis][0]) for axis in axes]
            places = np.full((len(found), *sizes, int(self._seeds.max(initial=0)) + 1), -1)
            at = (which.reshape(-1), *(self._codes[axis][1] for axis in axes), self._seeds)
            places[at] = np.arange(len(self.cells))
            levels = {a: np.array(self._codes[a][0], dtype=object)[found[:, i]] for i, a in enumerate(others)}
            self._places[axes] = places, levels
        return self._places[axes]

    def word(self, cell: int, measure: int) -> str:
        """What a table prints in place of a number that the cell lacks."""
        if (cell, measure) not in self._words:
            given = self._given[cell][measure]
            self._words[cell, measure] = placeholder_for_cell(self.data, self.cells[cell], self.columns[measure], given)
        return self._words[cell, measure]

    def origins(self, cells: np.ndarray, measure: int) -> tuple[tuple[str, int | None], ...]:
        """The (cell, attempt) pairs of these cells for that number."""
        if measure not in self._origins:
            # one pair for all rows and, mostly, all measures: a large sweep has millions of places for it
            pairs = zip((cell.cell_id for cell in self.cells), self.attempts[:, measure].tolist(), strict=True)
            self._origins[measure] = [self._pairs.setdefault(pair, pair) for pair in pairs]
        return tuple(map(self._origins[measure].__getitem__, cells.tolist()))

    @cached_property
    def scales(self) -> list[float]:
        """The largest size of each number, [measure]; 0 where there is none."""
        return [float(np.abs(some[~np.isnan(some)]).max(initial=0.0)) for some in self.values.T]

    @cached_property
    def filled(self) -> np.ndarray:
        """The numbers, those of diverged cells at the worst value possible, [cell, measure]."""
        return np.where(self.diverged, self.worst, self.values)

    @cached_property
    def worst(self) -> np.ndarray:
        """The worst that each number can be, [measure]: 0 or 1 for shares, else the worst measured; NaN for what has no better
        side, and for speeds, which an end in divergence does not make worse."""
        found = np.full(len(self.columns), np.nan)
        for place, one in enumerate(self.columns):
            known = self.values[:, place][~np.isnan(self.values[:, place])]
            if not one.direction or one.probe == "throughput" or not len(known):
                continue
            if one.percent:
                found[place] = 0.0 if one.direction > 0 else 1.0
            else:
                found[place] = known.min() if one.direction > 0 else known.max()
        return found


def within(levels: Mapping[str, np.ndarray], where: Mapping[str, str], size: int) -> np.ndarray:
    """Which configurations stand at these levels, [configuration]; none where an axis is the one that is contrasted."""
    kept = np.ones(size, dtype=bool)
    for axis, level in where.items():
        kept &= levels[axis] == level if axis in levels else np.zeros(size, dtype=bool)
    return kept


def level_combinations(pairs: Mapping[str, Sequence[tuple[str, str]]]) -> Iterator[dict[str, tuple[str, str]]]:
    """Every combination of these (level, reference) pairs, axis -> pair, the last axis fastest."""
    for chosen in product(*pairs.values()):
        yield dict(zip(pairs, chosen, strict=True))
