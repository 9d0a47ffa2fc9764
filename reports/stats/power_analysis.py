"""How many matched pairs a difference takes to be seen, stratum by stratum, and what the pairs of the design can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..number_format import Column
from ..sweep_data import SweepData
from .effects.matched_groups import Numbers, factors, level_pairs, main_measures, numbers_of, origins_of, within
from .noise.run_noise import POWER, STRATUM_AXES, Spread, detectable, noise_by_stratum, power_of

POINTS = (0.05, 0.1, 0.2)
"""Differences of shares that are planned for."""
NATS = (0.01, 0.02, 0.05)
"""Differences of losses that are planned for, in nats per token."""
MOST = 1 << 20
"""Pairs beyond which nobody plans."""
LOSS = "nats"


@dataclass(frozen=True, kw_only=True)
class PowerAnalysis:
    """What can be seen of a number in a stratum. `pairs` is the most that the design has there for two levels of an axis;
    `one` and `all` are the smallest differences that one pair and those pairs show with 80% power; `needed` are the pairs
    that each of `differences` takes, None beyond MOST, empty where nobody said what difference matters."""

    measure: Column
    stratum: tuple[str, ...]
    spread: Spread
    pairs: int
    one: float
    all: float
    differences: tuple[float, ...]
    needed: tuple[int | None, ...]
    origins: tuple[tuple[str, int | None], ...]
    """The cells and attempts of the stratum that have the number."""


def power_analyses(data: SweepData, columns: Sequence[Column] | None = None) -> list[PowerAnalysis]:
    """Of every main measure but speeds, in every stratum with a known spread."""
    chosen = [one for one in (main_measures(data) if columns is None else columns) if one.probe != "throughput"]
    pairs = _pairs(data)
    found = []
    for column in chosen:
        deltas = POINTS if column.percent else NATS if column.unit.startswith(LOSS) else ()
        cells = dict(iter(numbers_of(data, column).groupby(list(STRATUM_AXES), sort=False)))
        for stratum, spread in noise_by_stratum(data, column).items():
            n = pairs.get(stratum, 0)
            needed = pairs_needed(np.full(len(deltas), spread.used), np.full(len(deltas), spread.df), np.array(deltas))
            found.append(
                PowerAnalysis(
                    measure=column,
                    stratum=stratum,
                    spread=spread,
                    pairs=n,
                    one=detectable(spread, 1),
                    all=detectable(spread, n) if n else float("nan"),
                    differences=deltas,
                    needed=tuple(int(k) if k <= MOST else None for k in needed),
                    origins=origins_of(cells[stratum], ""),
                )
            )
    return found


def pairs_needed(sd: np.ndarray, df: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """The fewest pairs, at least 2, of which a mean shows each difference with 80% power at a two-sided 5%; MOST + 1 where
    more would be needed. `sd` is that of a run, known with `df` degrees of freedom.

    By halving, since the test's own degrees of freedom grow with the pairs, and what they show falls with each.
    """
    low, high = np.ones(len(sd), dtype=int), np.full(len(sd), MOST + 1)
    with np.errstate(divide="ignore"):
        ratios = difference / sd
    while len(sd) and (high - low > 1).any():
        middle = np.where(high - low > 1, (low + high) // 2, high)
        seen = power_of(middle, df, ratios) >= POWER
        low, high = np.where(seen, low, middle), np.where(seen, middle, high)
        low = np.minimum(low, high - 1)
    return high


def _pairs(data: SweepData) -> dict[tuple[str, ...], int]:
    """By stratum: the most pairs of configurations that the grid lists for two levels of an axis."""
    numbers = Numbers(data, [])
    strata = dict.fromkeys(tuple(cell.levels[axis] for axis in STRATUM_AXES) for cell in data.cells)
    found = dict.fromkeys(strata, 0)
    for axis in factors(data):
        if axis in STRATUM_AXES:
            continue
        for pair in level_pairs(data, axis):
            made = numbers.contrasted({axis: pair})
            listed = np.any(np.all(made.corners >= 0, axis=-1), axis=1)
            for stratum in strata:
                inside = within(made.levels, dict(zip(STRATUM_AXES, stratum, strict=True)), len(made.corners))
                found[stratum] = max(found[stratum], int((listed & inside).sum()))
    return found
