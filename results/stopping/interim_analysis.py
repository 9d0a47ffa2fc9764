"""Looks at a contrast while seeds are added: what each found, and whether that is enough. The numbers alone decide, so that a launch
that goes on decides as the one before it would have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from ..contrasts import weighted
from ..designs.design_option import Design, design_of
from ..store.records import CellState, MeasuredValue, Request, requests_from_options, standing
from ..store.store import Store
from ..store.store_reader import StoreReader
from .alpha_spending import levels, repeated_p_value
from .contrast_estimator import ContrastEstimator, Levels, complete
from .stopping_rule import StoppingRule, rule_of

SLACK = 1e-9
"""By how much of itself an interval may be wider than asked for: the dust of a subtraction."""
DUST = 1e-12
ValuesByKey = Mapping[tuple[str, str, str, int], MeasuredValue]
"""By (cell, probe, metric, length)."""
Verdict = Literal["narrow", "sure", "most", "nothing", "open"]
"""Narrow enough; zero left out; no further seed allowed; no number at any seed; or none of these, so that seeds are added."""


@dataclass(frozen=True)
class SeedResult:
    """A configuration at one seed: whether its cell is finished, and its number, None where it has none."""

    seed: int
    levels: Levels
    finished: bool
    value: float | None


@dataclass(frozen=True)
class InterimAnalysis:
    """One look, in the number's own unit. `low` and `high` are the ends of the interval with 1 - `level` confidence, by Student's t over
    the seeds of these very configurations; NaN where there is no spread to judge by."""

    number: int
    """1, 2, ..."""
    seeds: int
    """Of the rule's seeds, how many there were."""
    used: int
    """Of these, how many have every number."""
    configurations: int
    """Pairs, or cells of a partial design, that count."""
    left_out: int
    """Those that do not, since they lack numbers."""
    level: float
    mean: float
    error: float
    """Standard error, of `used` - 1 degrees of freedom."""
    low: float
    high: float

    @property
    def width(self) -> float:
        """From end to end."""
        return self.high - self.low


@dataclass(frozen=True)
class StoppingStatus:
    """How far a rule is."""

    rule: StoppingRule
    looks: tuple[InterimAnalysis, ...]
    """Those that could be made, the first first."""
    asked: int
    """Seeds that there are cells of."""
    cells: int
    """How many cells that needs."""
    waiting: int
    """Of these, how many are neither measured nor diverged."""
    nothing: bool = False
    """Whether all are finished and not one group of them has its numbers at any seed."""

    @property
    def last(self) -> InterimAnalysis | None:
        """The last one."""
        return self.looks[-1] if self.looks else None

    @property
    def verdict(self) -> Verdict:
        """Whether seeds are to be added, and if not, why."""
        last, rule = self.last, self.rule
        if self.nothing:
            return "nothing"
        if last is not None and last.seeds == self.asked:
            if rule.width is not None and last.width <= rule.width * (1 + SLACK):
                return "narrow"
            if rule.sure and (last.low > 0 or last.high < 0):
                return "sure"
        return "most" if self.asked == rule.most and not self.waiting else "open"

    @property
    def further(self) -> int:
        """How many seeds there are to be now: more than `asked` only when all that was asked for is there and is not enough."""
        return self.rule.after(self.asked) if not self.waiting and self.verdict == "open" else self.asked

    def p(self) -> float:
        """Of the last look: p of a mean of zero, of what it is worth after all looks; NaN without an interval."""
        last = self.last
        if last is None or not last.error > 0:
            return math.nan
        return self._repeated(2 * float(special.stdtr(last.used - 1, -abs(last.mean) / last.error)))

    def outside(self, margin: float) -> float:
        """The same of two one-sided tests that the mean lies no nearer to zero than `margin`."""
        last = self.last
        if last is None or not last.error > 0:
            return math.nan
        t = (margin - abs(last.mean)) / last.error
        return self._repeated(2 * float(special.stdtr(last.used - 1, -t))) / 2 if t > 0 else 1.0

    def _repeated(self, p: float) -> float:
        rule = self.rule
        return repeated_p_value(p, [look.used for look in self.looks], rule.most, spending=rule.spending)


def evaluate_rule(rule: StoppingRule, runs: Sequence[SeedResult], design: Design | None) -> StoppingStatus:
    """How far the rule is with these runs of a sweep."""
    places: dict[tuple[tuple[str, str], ...], int] = {}
    of = [places.setdefault(tuple(sorted(run.levels.items())), len(places)) for run in runs]
    estimator = ContrastEstimator([dict(key) for key in places], rule.contrast, design)
    needed = estimator.needed
    number = {seed: place for place, seed in enumerate(rule.seeds)}
    values = np.full((len(places), rule.most), np.nan)
    there, finished = np.zeros_like(values, dtype=bool), np.zeros_like(values, dtype=bool)
    for run, place in zip(runs, of, strict=True):
        if run.seed in number and needed[place]:
            at = place, number[run.seed]
            there[at], finished[at] = True, run.finished
            values[at] = run.value if run.finished and run.value is not None else np.nan
    have = int(np.flatnonzero(there.any(axis=0)).max(initial=-1)) + 1
    asked = next(n for n in rule.looks if n >= have)
    waiting = int((~finished[needed, :asked]).sum())
    looks: list[InterimAnalysis] = []
    for n in rule.looks:
        if n > asked or not finished[needed, :n].all() or not needed.any():
            break
        look = _look(rule, estimator, values[:, :n], looks)
        if look is not None:
            looks.append(look)
    cells = int(needed.sum()) * asked
    measured = [np.isfinite(values[group][:, :asked]).all(axis=0).any() for group in estimator.groups]
    return StoppingStatus(rule, tuple(looks), asked, cells, waiting, nothing=not waiting and not any(measured))


def _look(
    rule: StoppingRule, estimator: ContrastEstimator, values: np.ndarray, before: Sequence[InterimAnalysis]
) -> InterimAnalysis | None:
    """The next look, at `values` [configuration, seed]; None where fewer than two seeds count, or no more than at the last one."""
    there = np.array([np.isfinite(values[group]).all(axis=0) for group in estimator.groups])
    groups, seeds = complete(there, lambda kept: estimator.weights(kept) is not None)
    used = int(seeds.sum())
    weights = estimator.weights(groups)
    if weights is None or used < 2 or (before and used <= before[-1].used):
        return None
    level = levels([*(look.used for look in before), used], rule.most, spending=rule.spending)[-1]
    chosen = weights != 0
    of_seeds = weights[chosen] @ values[chosen][:, seeds]
    mean, error = float(of_seeds.mean()), float(of_seeds.std(ddof=1)) / math.sqrt(used)
    known = error > DUST * float(np.abs(values[chosen][:, seeds]).max(initial=0.0))
    half = float(special.stdtrit(used - 1, 1 - level / 2)) * error if known else math.nan
    return InterimAnalysis(
        number=len(before) + 1, seeds=values.shape[1], used=used, configurations=int(groups.sum()),
        left_out=int((~groups).sum()), level=level, mean=mean, error=error if known else math.nan,
        low=mean - half, high=mean + half,
    )  # fmt: skip


def finished(rule: StoppingRule, state: CellState, requested: Sequence[Request]) -> bool:
    """Whether a cell is trained and has the rule's number, or a reason why not: then nothing more comes of it."""
    one = rule.contrast
    asked = [(probe, length) for probe, length in requested if probe == one.probe]
    return standing(state, asked if one.length is None else [(probe, n) for probe, n in asked if n == one.length]) in (
        "done", "diverged",
    )  # fmt: skip


def seed_results(
    rule: StoppingRule, cells: Sequence[CellState], requested: Sequence[Request], values: ValuesByKey
) -> list[SeedResult]:
    """The cells of a sweep as a look sees them."""
    one = rule.contrast
    asked = [length for probe, length in requested if probe == one.probe and length]

    def number(cell: str) -> float | None:
        if one.length is not None:
            found = values.get((cell, one.probe, one.metric, one.length))
            return found.value if found is not None else None
        every = [(length, values.get((cell, one.probe, one.metric, length))) for length in asked]
        known = {length: value.value for length, value in every if value is not None and value.value is not None}
        return weighted(known) if known and len(known) == len(every) else None

    return [
        SeedResult(
            cell.seed, dict(cell.axes) | dict(cell.levels), finished(rule, cell, requested), number(cell.cell_id)
        )
        for cell in cells
    ]


def stopping_status(store: Store, sweep: str) -> StoppingStatus | None:
    """How far the rule of a sweep's newest launch is, from the database alone; None for a sweep without one. Raises SweepUnknown."""
    with store.snapshot() as seen:
        return _looked_at(seen, sweep)


def _looked_at(seen: StoreReader, sweep: str) -> StoppingStatus | None:
    revision = seen.revision(sweep)
    rule = rule_of(revision.options)
    if rule is None:
        return None
    values = {(v.cell_id, v.probe, v.metric, v.length): v for v in seen.values(sweep)}
    runs = seed_results(rule, seen.cell_states(sweep), requests_from_options(revision.options), values)
    return evaluate_rule(rule, runs, design_of(revision.options))
