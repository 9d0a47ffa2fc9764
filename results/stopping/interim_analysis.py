"""Interim analyses (looks) of a contrast while seeds are added, and the decision to stop.

Decisions depend only on the stored numbers, so that a relaunch repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from ..contrasts import length_weighted_mean
from ..designs.design_option import Design, design_from_options
from ..store.records import CellState, MeasuredValue, ProbeRequest, requests_from_options, standing
from ..store.store import Store
from ..store.store_reader import StoreReader
from .alpha_spending import alpha_levels, repeated_p_value
from .contrast_estimator import ContrastEstimator, LevelMap, complete_subset
from .stopping_rule import StoppingRule, rule_from_options

WIDTH_TOLERANCE = 1e-9
"""Relative amount by which an interval may exceed the goal: the rounding error of a subtraction."""
ROUNDING_TOLERANCE = 1e-12
ValuesByKey = Mapping[tuple[str, str, str, int], MeasuredValue]
"""Measurements by (cell, probe, metric, length)."""
Verdict = Literal["narrow", "sure", "most", "nothing", "open"]
"""Decision of a rule.

narrow: the interval is narrow enough. sure: it excludes zero. most: the maximum of seeds is reached. nothing: no group
has a value at any seed. open: seeds are added.
"""


@dataclass(frozen=True)
class SeedResult:
    """Result of a configuration at one seed: if its cell is finished, and its value (None without one)."""

    seed: int
    levels: LevelMap
    is_finished: bool
    value: float | None


@dataclass(frozen=True)
class InterimAnalysis:
    """A look, in the metric's own unit.

    `low` and `high` are the ends of the interval with confidence 1 - `level`, by Student's t over the seeds of these
    configurations. They are NaN, as is `error`, if the values do not differ between seeds.
    """

    number: int
    """Number of the look, from 1."""
    seeds: int
    """Number of the rule's seeds at this look."""
    used: int
    """Number of seeds with all values, which the estimate uses."""
    configurations: int
    """Number of used groups: pairs, or cells of a partial design."""
    left_out: int
    """Number of groups that are not used because they lack values."""
    level: float
    mean: float
    error: float
    """Standard error, with `used` - 1 degrees of freedom."""
    low: float
    high: float

    @property
    def width(self) -> float:
        """Width of the interval."""
        return self.high - self.low


@dataclass(frozen=True)
class StoppingStatus:
    """State of a stopping rule: the looks so far and the missing cells."""

    rule: StoppingRule
    looks: tuple[InterimAnalysis, ...]
    """Looks that were possible, the first one first."""
    seeds_launched: int
    """Number of seeds for which there are cells, rounded up to a look of the rule."""
    cells: int
    """Number of cells that these seeds need."""
    unfinished_cells: int
    """Number of these cells that are neither measured nor diverged."""
    has_no_values: bool = False
    """True if all cells are finished and no group has all its values at any seed."""

    @property
    def last_look(self) -> InterimAnalysis | None:
        """The last look; None before the first."""
        return self.looks[-1] if self.looks else None

    @property
    def verdict(self) -> Verdict:
        """The decision: to stop, by "narrow", "sure", "most" or "nothing" (no values), or "open".

        Only a look that uses all launched seeds can stop by width or sureness; "narrow" has precedence over "sure".
        "most" also requires that all cells are finished. An interval that is NaN never stops.
        """
        last, rule = self.last_look, self.rule
        if self.has_no_values:
            return "nothing"
        if last is not None and last.seeds == self.seeds_launched:
            if rule.width is not None and last.width <= rule.width * (1 + WIDTH_TOLERANCE):
                return "narrow"
            if rule.sure and (last.low > 0 or last.high < 0):
                return "sure"
        return "most" if self.seeds_launched == rule.max_seeds and not self.unfinished_cells else "open"

    @property
    def seeds_wanted(self) -> int:
        """Number of seeds to have now: that of the next look, or the launched number.

        It exceeds the launched number only if all launched cells are finished and the verdict is open.
        """
        return (
            self.rule.next_look(self.seeds_launched)
            if not self.unfinished_cells and self.verdict == "open"
            else self.seeds_launched
        )

    def p(self) -> float:
        """Return the two-sided p value of a zero mean, corrected for all looks; NaN without an interval.

        It is Student's over the seeds of the last look, with `used` - 1 degrees of freedom.
        """
        last = self.last_look
        if last is None or not last.error > 0:
            return math.nan
        return self._repeated(2 * float(special.stdtr(last.used - 1, -abs(last.mean) / last.error)))

    def p_equivalence(self, margin: float) -> float:
        """Return the p value of equivalence to zero within `margin` (two one-sided tests), corrected for all looks.

        `margin` is in the metric's own unit. 1.0 if the mean is outside the margin; NaN without an interval.
        """
        last = self.last_look
        if last is None or not last.error > 0:
            return math.nan
        t = (margin - abs(last.mean)) / last.error
        return self._repeated(2 * float(special.stdtr(last.used - 1, -t))) / 2 if t > 0 else 1.0

    def _repeated(self, p_value: float) -> float:
        rule = self.rule
        return repeated_p_value(p_value, [look.used for look in self.looks], rule.max_seeds, spending=rule.spending)


def evaluate_rule(rule: StoppingRule, results: Sequence[SeedResult], design: Design | None) -> StoppingStatus:
    """Return the state of a stopping rule for these results of a sweep.

    Looks are repeated from the first on: the look at n seeds of the rule is made if all needed configurations are
    finished at these seeds, and the first one that is not ends the series. A look without two usable seeds, or without
    more than the look before, is skipped. Seeds that the rule does not list, and configurations without weight, are
    ignored.

    Args:
        rule: stopping rule.
        results: result of each configuration at each seed, in any order; a missing one counts as unfinished.
        design: partial design of the sweep; None for a complete grid.
    """
    index_by_levels: dict[tuple[tuple[str, str], ...], int] = {}
    indices = [index_by_levels.setdefault(tuple(sorted(run.levels.items())), len(index_by_levels)) for run in results]
    estimator = ContrastEstimator([dict(key) for key in index_by_levels], rule.contrast, design)
    used_configurations = estimator.used_configurations
    column_by_seed = {seed: column for column, seed in enumerate(rule.seeds)}
    values = np.full((len(index_by_levels), rule.max_seeds), np.nan)
    has_cell, finished = np.zeros_like(values, dtype=bool), np.zeros_like(values, dtype=bool)
    for run, index in zip(results, indices, strict=True):
        if run.seed in column_by_seed and used_configurations[index]:
            at = index, column_by_seed[run.seed]
            has_cell[at], finished[at] = True, run.is_finished
            values[at] = run.value if run.is_finished and run.value is not None else np.nan
    have = int(np.flatnonzero(has_cell.any(axis=0)).max(initial=-1)) + 1
    seeds_launched = next(n for n in rule.seeds_at_looks if n >= have)
    unfinished_cells = int((~finished[used_configurations, :seeds_launched]).sum())
    looks: list[InterimAnalysis] = []
    for n in rule.seeds_at_looks:
        if n > seeds_launched or not finished[used_configurations, :n].all() or not used_configurations.any():
            break
        look = _next_look(rule, estimator, values[:, :n], looks)
        if look is not None:
            looks.append(look)
    cells = int(used_configurations.sum()) * seeds_launched
    measured = [np.isfinite(values[group][:, :seeds_launched]).all(axis=0).any() for group in estimator.groups]
    return StoppingStatus(
        rule,
        tuple(looks),
        seeds_launched,
        cells,
        unfinished_cells,
        has_no_values=not unfinished_cells and not any(measured),
    )


def _next_look(
    rule: StoppingRule, estimator: ContrastEstimator, values: np.ndarray, earlier: Sequence[InterimAnalysis]
) -> InterimAnalysis | None:
    """Return the next look, in the metric's own unit.

    The contrast is estimated at each seed; `error` is its standard deviation over seeds / √seeds, and the interval is
    the mean ± t error, with the t quantile of 1 - level / 2 for seeds - 1 degrees of freedom. None if fewer than two
    seeds are usable, or not more than at the last look, or if the contrast is undetermined. `error` and the interval
    are NaN if the estimates are equal at all seeds.

    Args:
        rule: stopping rule.
        estimator: weights of the configurations.
        values: [configuration, seed] of the seeds up to this look, in the rule's order; NaN for a missing value.
        earlier: looks so far.
    """
    has_values = np.array([np.isfinite(values[group]).all(axis=0) for group in estimator.groups])
    groups, seeds = complete_subset(has_values, lambda groups: estimator.weights(groups) is not None)
    n_used = int(seeds.sum())
    weights = estimator.weights(groups)
    if weights is None or n_used < 2 or (earlier and n_used <= earlier[-1].used):
        return None
    level = alpha_levels([*(look.used for look in earlier), n_used], rule.max_seeds, spending=rule.spending)[-1]
    chosen = weights != 0
    of_seeds = weights[chosen] @ values[chosen][:, seeds]
    mean, error = float(of_seeds.mean()), float(of_seeds.std(ddof=1)) / math.sqrt(n_used)
    has_spread = error > ROUNDING_TOLERANCE * float(np.abs(values[chosen][:, seeds]).max(initial=0.0))
    half = float(special.stdtrit(n_used - 1, 1 - level / 2)) * error if has_spread else math.nan
    return InterimAnalysis(
        number=len(earlier) + 1, seeds=values.shape[1], used=n_used, configurations=int(groups.sum()),
        left_out=int((~groups).sum()), level=level, mean=mean, error=error if has_spread else math.nan,
        low=mean - half, high=mean + half,
    )  # fmt: skip


def is_cell_finished(rule: StoppingRule, state: CellState, requested: Sequence[ProbeRequest]) -> bool:
    """Return True if a cell is trained and has the rule's measurement or a reason for its absence, or has diverged.

    Only requested lengths of the rule's probe count; for a length-weighted contrast all of them.

    Args:
        rule: stopping rule.
        state: state of the cell.
        requested: requested (probe, length) pairs of the sweep.
    """
    contrast = rule.contrast
    of_probe = [(probe, length) for probe, length in requested if probe == contrast.probe]
    return standing(state, of_probe if contrast.length is None else [(probe, n) for probe, n in of_probe if n == contrast.length]) in (
        "done", "diverged",
    )  # fmt: skip


def seed_results(
    rule: StoppingRule, cells: Sequence[CellState], requested: Sequence[ProbeRequest], values: ValuesByKey
) -> list[SeedResult]:
    """Return the cells of a sweep as results for `evaluate_rule`, one per cell in their order.

    The levels of a result are the cell's five levels and the axes of the grid. A value is None if the measurement is
    missing or has only a reason; for a length-weighted contrast, if that is so at any requested length.

    Args:
        rule: stopping rule; for a length-weighted contrast the value is the mean over all requested lengths.
        cells: cells of the sweep.
        requested: requested (probe, length) pairs of the sweep.
        values: measurements of the sweep.
    """
    contrast = rule.contrast
    lengths = [length for probe, length in requested if probe == contrast.probe and length]

    def number(cell: str) -> float | None:
        """Return the value of a cell: the measurement, or the length-weighted mean over all lengths.

        None if the measurement, or that of any length, is missing or has only a reason.
        """
        if contrast.length is not None:
            measured = values.get((cell, contrast.probe, contrast.metric, contrast.length))
            return measured.value if measured is not None else None
        measured_by_length = [
            (length, values.get((cell, contrast.probe, contrast.metric, length))) for length in lengths
        ]
        values_by_length = {
            length: value.value for length, value in measured_by_length if value is not None and value.value is not None
        }
        return (
            length_weighted_mean(values_by_length)
            if values_by_length and len(values_by_length) == len(measured_by_length)
            else None
        )

    return [
        SeedResult(
            cell.seed,
            dict(cell.axes) | dict(cell.levels),
            is_cell_finished(rule, cell, requested),
            number(cell.cell_id),
        )
        for cell in cells
    ]


def stopping_status(store: Store, sweep: str) -> StoppingStatus | None:
    """Return the state of the rule of a sweep's newest launch, from one snapshot of the database.

    None for a sweep without a rule.

    Raises:
        SweepUnknown: there is no such sweep.
    """
    with store.snapshot() as snapshot:
        return _status_from(snapshot, sweep)


def _status_from(reader: StoreReader, sweep: str) -> StoppingStatus | None:
    """Return the state of the rule of a sweep's newest launch as a reader sees it; None without a valid rule.

    Raises SweepUnknown.
    """
    revision = reader.revision(sweep)
    rule = rule_from_options(revision.options)
    if rule is None:
        return None
    values = {(v.cell_id, v.probe, v.metric, v.length): v for v in reader.values(sweep)}
    runs = seed_results(rule, reader.cell_states(sweep), requests_from_options(revision.options), values)
    return evaluate_rule(rule, runs, design_from_options(revision.options))
