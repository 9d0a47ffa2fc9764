"""Matched pairs and matched groups of four and eight cells of a sweep, with the compared measures.

A *configuration* is the set of cells that differ in their seed only. Two cells are a pair if they agree on the seed and
on every axis but one. The seeds of a configuration stay together, since they say nothing about another configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ....results.contrasts import Contrast, reference_level
from ....results.store.records import AXES
from ...number_format import Column, column_of, format_length
from ...result_columns import all_lengths, complete_columns, longest_only, placeholder_for_cell, shortest_and_longest
from ...sweep_data import WEIGHTED_SUFFIX, SweepData, cached_result, cell_level

if TYPE_CHECKING:
    import pandas as pd

MAX_ALL_PAIRS_LEVELS = 6
"""Largest number of levels of which all pairs are compared; beyond, each is compared to the reference only."""
LOSS_DECIMALS = 3
"""Decimals printed of every number that is not a percentage."""
DIVERGED_STANDING = "diverged"
"""Standing of a cell whose training diverged."""


def measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """Return the measures that at least `at_least` cells have, at every context length and averaged over lengths.

    These are the columns of the complete results (validation, clean, junk and same-tail loss, needle accuracy, further
    metrics, MFU), in that order, with three decimals unless a percentage. Lengths ascend, the average comes last.
    """
    return cached_result(
        data,
        ("measures", at_least),
        lambda: _measured_columns(data, complete_columns(data, over=all_lengths), at_least),
    )


def main_measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """Return the columns of `measures` at the shortest and the longest context length only."""
    return _measured_columns(data, complete_columns(data, over=shortest_and_longest), at_least)


def first_measures(data: SweepData, *, at_least: int = 2) -> list[Column]:
    """Return the columns of `measures` at the longest context length only."""
    return _measured_columns(data, complete_columns(data, over=longest_only), at_least)


def _measured_columns(data: SweepData, columns: Sequence[Column], at_least: int) -> list[Column]:
    """Return the columns, without repetition of a key, for which at least `at_least` cells have a number.

    Order is that of `columns`. Decimals become three unless the column is a percentage.
    """
    by_key = {}
    for column in columns:
        numbered = (
            cell for cell, value in data.measured_values(data.cells, column) if value and value.value is not None
        )
        if sum(1 for _ in islice(numbered, at_least)) == at_least:
            by_key[column.key] = replace(column, decimals=column.decimals if column.percent else LOSS_DECIMALS)
    return list(by_key.values())


def varying_axes(data: SweepData) -> list[str]:
    """Return the axes with more than one level, those of AXES before extra axes; the seed is not an axis."""
    return [axis for axis in AXES if len(data.levels(axis)) > 1] + data.extra_axes()


def contrast_column(data: SweepData, contrast: Contrast) -> Column:
    """Return the column of the measure that a declared contrast compares.

    Without a length in the contrast it is the length-weighted average ("avg"); a length of 0 is a measure without
    lengths. Decimals are three unless a percentage. The measure need not be measured.
    """
    metric = data.metric(contrast.probe, contrast.metric)
    heading = metric.heading or f"{contrast.probe}.{contrast.metric}"
    base = column_of(contrast.probe, metric, heading, length=contrast.length or 0)
    base = base if base.percent else replace(base, decimals=LOSS_DECIMALS)
    if contrast.length is None:
        return replace(base, heading=f"{heading} avg", metric=contrast.metric + WEIGHTED_SUFFIX)
    return replace(base, heading=f"{heading}@{format_length(contrast.length)}") if contrast.length else base


def level_pairs(data: SweepData, axis: str, *, all_pairs: bool = True) -> list[tuple[str, str]]:
    """Return the (level, reference) pairs of an axis; a difference is level minus reference.

    Every level against the reference level comes first. With `all_pairs`, and at most six levels, the pairs of the
    other levels follow, the later level against the earlier one. Empty for an axis with a single level.

    Raises:
        IndexError: The sweep has no level of the axis.
    """
    levels = data.levels(axis)
    first = reference_level(levels)
    rest = [level for level in levels if level != first]
    against_reference = [(level, first) for level in rest]
    return (
        against_reference + [(b, a) for a, b in combinations(rest, 2)]
        if all_pairs and len(levels) <= MAX_ALL_PAIRS_LEVELS
        else against_reference
    )


def values_frame(data: SweepData, column: Column) -> pd.DataFrame:
    """Return a frame with one row per cell that has the number, in the sweep's order; imports pandas.

    Columns: cell (id), attempt (id), seed, every axis of AXES and extra axis (level as text, "-" for none), value
    (float, shares as fractions). Cells that have a reason instead of a number are left out. Columns are there without
    any row, too.
    """
    import pandas as pd  # imported late: it takes half a second, and most tables do not need it

    axes = (*AXES, *data.extra_axes())
    rows = []
    for cell in data.cells:
        value = data.measured_value(cell, column)
        if value is not None and value.value is not None:
            row: dict[str, Any] = {"cell": cell.cell_id, "attempt": value.attempt_id, "seed": cell.seed}
            row |= {axis: cell_level(cell, axis) for axis in axes}
            rows.append(row | {"value": value.value})
    return pd.DataFrame(rows, columns=["cell", "attempt", "seed", *axes, "value"])


def frame_origins(frame: pd.DataFrame, *suffixes: str) -> tuple[tuple[str, int | None], ...]:
    """Return the (cell id, attempt id) pairs of a frame of `values_frame`.

    They are row by row for the first suffix, then for the next.

    Args:
        frame: Frame with columns `cell` and `attempt`, each followed by a suffix.
        suffixes: Suffixes of both columns; "" for a frame that was not merged. Without any the result is empty.
    """
    return tuple(
        (str(cell), int(attempt))
        for end in suffixes
        for cell, attempt in zip(frame[f"cell{end}"].tolist(), frame[f"attempt{end}"].tolist(), strict=True)
    )


# --- all numbers of a sweep at once -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchedDifferences:
    """Differences between levels of one axis, or differences of differences for several axes, over the full sweep.

    `axes` are the axes that are compared. A corner is a combination of level (first) or reference of each axis, the
    last axis fastest. `corners` are cell indices, [configuration, seed, corner], -1 where the grid lists no cell.
    `signs` [corner] is 1 for an even number of references, else -1, so one axis gives level minus reference.
    `differences` is [configuration, seed, measure], NaN where any corner lacks the number. `levels` gives the level of
    every other axis, by axis: [configuration].
    """

    axes: tuple[str, ...]
    corners: np.ndarray
    signs: np.ndarray
    differences: np.ndarray
    levels: Mapping[str, np.ndarray]

    @cached_property
    def keys(self) -> list[tuple[tuple[str, ...], int]]:
        """Name of each configuration, [configuration]: the same for all levels of `axes`. Shared by all measures."""
        return [(self.axes, index) for index in range(len(self.corners))]


class MetricMatrix:
    """Numbers of a sweep as arrays [cell, measure], with the matched differences between any levels.

    `values` is NaN where a cell lacks the number (shares as fractions); `attempts` holds the attempt ids, 0 where
    nothing is stored. `cells`, `columns` and `axes` name the rows, the columns and all axes.
    """

    def __init__(self, data: SweepData, columns: Sequence[Column]) -> None:
        """Read the numbers of all cells.

        Args:
            data: The sweep.
            columns: Measures, in the order of the second dimension; may be empty.
        """
        self.data, self.columns, self.cells = data, list(columns), list(data.cells)
        self.axes = [*AXES, *data.extra_axes()]
        self._measured = [[value for _, value in data.measured_values(self.cells, column)] for column in self.columns]
        self.values = np.empty((len(self.cells), len(self.columns)))
        self.attempts = np.zeros(self.values.shape, dtype=int)
        for index, measured in enumerate(self._measured):
            self.values[:, index] = [np.nan if v is None or v.value is None else v.value for v in measured]
            self.attempts[:, index] = [0 if v is None else v.attempt_id for v in measured]
        standings = [data.standing(cell) for cell in self.cells]
        self.diverged = np.isnan(self.values) & (np.array(standings, dtype=object) == DIVERGED_STANDING)[:, None]
        """Cells that lack a number because their training diverged, [cell, measure]."""
        seeds = sorted({cell.seed for cell in self.cells})
        self._seeds = np.array([seeds.index(cell.seed) for cell in self.cells], dtype=int)
        self._placeholders: dict[tuple[int, int], str] = {}
        self._tables: dict[tuple[str, ...], tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        self._pairs: dict[tuple[str, int], tuple[str, int]] = {}
        self._origins: dict[int, list[tuple[str, int]]] = {}

    @cached_property
    def _codes(self) -> dict[str, tuple[list[str], np.ndarray]]:
        """(level names in order of appearance, index of the level of each cell [cell]) by axis."""
        codes = {}
        for axis in self.axes:
            cell_levels = [cell_level(cell, axis) for cell in self.cells]
            names = list(dict.fromkeys(cell_levels))
            index_by_level = {name: index for index, name in enumerate(names)}
            codes[axis] = names, np.array([index_by_level[level] for level in cell_levels], dtype=int)
        return codes

    def differences_between(self, levels: Mapping[str, tuple[str, str]]) -> MatchedDifferences:
        """Return the matched differences of these levels over all configurations of the other axes.

        Configurations are sorted by their levels' first appearance, axis by axis; seeds in rising order.

        Args:
            levels: (level, reference) by axis. One axis gives level minus reference, several give differences of
                differences. Levels that the sweep lacks give NaN differences and corners of -1.

        Raises:
            KeyError: The sweep has no such axis.
        """
        if unknown := levels.keys() - self._codes.keys():
            raise KeyError(f"the sweep has no axis {min(unknown)}")
        table, remaining_levels = self._table(tuple(levels))
        picks, signs = [], []
        for corner in product((0, 1), repeat=len(levels)):
            corner_levels = [(axis, pair[end]) for end, (axis, pair) in zip(corner, levels.items(), strict=True)]
            is_present = all(level in self._codes[axis][0] for axis, level in corner_levels)
            corner_indices = (
                tuple(self._codes[axis][0].index(level) for axis, level in corner_levels) if is_present else ()
            )
            cells = table
            for level in corner_indices:
                cells = cells[:, level]
            picks.append(cells if is_present else np.full((len(table), table.shape[-1]), -1))
            signs.append((-1.0) ** sum(corner))
        corners = np.stack(picks, axis=-1)
        listed = corners >= 0
        numbers = np.where(listed[..., None], self.values[corners], np.nan)
        # summed in this order, so that a difference of differences of equal numbers is exactly zero
        weights = np.array(signs)
        return MatchedDifferences(
            tuple(levels), corners, weights, np.einsum("ksjm,j->ksm", numbers, weights), remaining_levels
        )

    def _table(self, axes: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the cells arranged by configuration of the axes other than `axes`; cached by `axes`.

        Returns:
            (cell indices [configuration, level of each axis of `axes`, seed], -1 for no cell; levels of the other axes
            as text [configuration], by axis).
        """
        if axes not in self._tables:
            remaining_axes = [axis for axis in self.axes if axis not in axes]
            keys = (
                np.array([self._codes[axis][1] for axis in remaining_axes], dtype=int)
                .reshape(len(remaining_axes), -1)
                .T
            )
            configurations, configuration_index = np.unique(keys, axis=0, return_inverse=True)
            sizes = [len(self._codes[axis][0]) for axis in axes]
            table = np.full((len(configurations), *sizes, int(self._seeds.max(initial=0)) + 1), -1)
            positions = (configuration_index.reshape(-1), *(self._codes[axis][1] for axis in axes), self._seeds)
            table[positions] = np.arange(len(self.cells))
            levels = {
                a: np.array(self._codes[a][0], dtype=object)[configurations[:, i]] for i, a in enumerate(remaining_axes)
            }
            self._tables[axes] = table, levels
        return self._tables[axes]

    def placeholder(self, cell: int, measure: int) -> str:
        """Return the text that a table prints in place of the number that a cell lacks; cached.

        Args:
            cell: Index of the cell in `cells`.
            measure: Index of the column in `columns`.
        """
        if (cell, measure) not in self._placeholders:
            measured = self._measured[measure][cell]
            self._placeholders[cell, measure] = placeholder_for_cell(
                self.data, self.cells[cell], self.columns[measure], measured
            )
        return self._placeholders[cell, measure]

    def origins(self, cells: np.ndarray, measure: int) -> tuple[tuple[str, int | None], ...]:
        """Return the (cell id, attempt id) pairs of cell indices for one column, in the order of `cells`.

        Cached by column.

        Args:
            cells: Cell indices of at least 0, [n]; repetitions stay.
            measure: Index of the column.
        """
        if measure not in self._origins:
            # pairs are shared by all rows and measures, since a large sweep refers to millions of them
            pairs = zip((cell.cell_id for cell in self.cells), self.attempts[:, measure].tolist(), strict=True)
            self._origins[measure] = [self._pairs.setdefault(pair, pair) for pair in pairs]
        return tuple(map(self._origins[measure].__getitem__, cells.tolist()))

    @cached_property
    def scales(self) -> list[float]:
        """Largest absolute value of each measure, [measure]; 0 where no cell has the number."""
        return [float(np.abs(values[~np.isnan(values)]).max(initial=0.0)) for values in self.values.T]

    @cached_property
    def filled(self) -> np.ndarray:
        """Values with those of diverged cells at the worst possible value (NaN if there is none), [cell, measure]."""
        return np.where(self.diverged, self.worst, self.values)

    @cached_property
    def worst(self) -> np.ndarray:
        """Worst possible value of each measure, [measure]: 0 or 1 for shares, else the worst measured of all cells.

        NaN for a measure without a better side, for speeds (divergence does not make them worse), and without any
        number.
        """
        worst = np.full(len(self.columns), np.nan)
        for index, column in enumerate(self.columns):
            measured = self.values[:, index][~np.isnan(self.values[:, index])]
            if not column.direction or column.probe == "throughput" or not len(measured):
                continue
            if column.percent:
                worst[index] = 0.0 if column.direction > 0 else 1.0
            else:
                worst[index] = measured.min() if column.direction > 0 else measured.max()
        return worst


def subset_mask(levels: Mapping[str, np.ndarray], required_levels: Mapping[str, str], size: int) -> np.ndarray:
    """Return a mask of the configurations at the given levels, [configuration]; all True without required levels.

    Args:
        levels: Level of every axis that is not compared, by axis: [configuration].
        required_levels: Required level by axis. No configuration matches if one of them is an axis that is compared or
            unknown.
        size: Number of configurations.
    """
    mask = np.ones(size, dtype=bool)
    for axis, level in required_levels.items():
        mask &= levels[axis] == level if axis in levels else np.zeros(size, dtype=bool)
    return mask


def level_combinations(pairs: Mapping[str, Sequence[tuple[str, str]]]) -> Iterator[dict[str, tuple[str, str]]]:
    """Yield all combinations of (level, reference) pairs, one per axis, as axis -> pair; the last axis is fastest."""
    for chosen in product(*pairs.values()):
        yield dict(zip(pairs, chosen, strict=True))
