"""How probable it is that a configuration is the best, or on a front: what bold print and a ring do not say.

Each number is drawn anew many times around what was measured, with the spread between runs of its stratum (mixer and memory):
that of seeds where the sweep has several, else of near-replicates. The spread is itself an estimate, so that each draw takes
a variance of its own from it: one number's draws are Student's t, those of a stratum share their variance. Draws start from
RANDOM, so that tables repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np
from scipy import special

from ....results.store.records import CellState
from ...number_format import Column
from ...sweep_data import SweepData
from .run_noise import STRATUM_AXES, Spread, noise_by_stratum, printed, spread

RANDOM = 20_261
DRAWS = 10_000
NUMBERS = 4_000_000  # that are drawn at most, but for FEWEST draws of each: of very many rivals fewer draws
FEWEST = 2_000
CHUNK = 500  # draws held in memory at a time

Configuration = tuple[str, ...]
"""Levels of the five AXES, then of the extra axes, as `SweepData.configurations` has them."""
Stratum = tuple[str, ...]
"""Levels of STRATA."""


@dataclass(frozen=True)
class Candidate:
    """A number among those that it is held against: the mean of `seeds` runs, whose standard deviation `sd` is that of `stratum`,
    estimated with `df` degrees of freedom. A `share` stays between 0 and 1."""

    value: float
    sd: float
    df: float = math.inf
    stratum: Stratum = ()
    seeds: int = 1
    share: bool = False


def best(candidates: Sequence[Candidate], direction: int) -> np.ndarray:
    """By rival, how probable it is that none is better; those that draw alike share. `direction` is 1 where more is better, -1
    where less is. Sums to 1."""
    return _best(tuple(candidates), direction).copy()


@lru_cache(maxsize=32)  # the first page ranks the numbers of Table 6 again
def _best(rivals: tuple[Candidate, ...], direction: int) -> np.ndarray:
    """Draw the numbers and return the shares of draws that each rival wins; drawn once for the same rivals."""
    won = np.zeros(len(rivals))
    if not rivals:
        return won
    for drawn in _draws(rivals):
        first = drawn * direction
        draws, winners = np.nonzero(first == first.max(axis=1, keepdims=True))
        won += np.bincount(winners, 1 / np.bincount(draws)[draws], len(rivals))
    return won / _draws_of(len(rivals))


def front(pairs: Sequence[tuple[Candidate, Candidate]], directions: tuple[int, int] = (1, 1)) -> np.ndarray:
    """By pair (speed, quality), how probable it is that no other is at least as good in both and better in one."""
    kept = np.zeros(len(pairs))
    if not pairs:
        return kept
    first = _draws([one for one, _ in pairs], salt=1)
    second = _draws([one for _, one in pairs], salt=2)
    for x, y in zip(first, second, strict=True):
        kept += _unbeaten(x * directions[0], y * directions[1]).sum(axis=0)
    return kept / _draws_of(len(pairs))


def _unbeaten(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[draws, points], more is better in both: whether no other point of the draw is as good in both and better in one."""
    order = np.lexsort((-y, -x), axis=1)
    fast, good = np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)
    before = np.maximum.accumulate(good, axis=1)[:, :-1]
    # what follows is slower or as fast and no better: it stays only by more quality, or by being the same point
    twin = (fast[:, 1:] == fast[:, :-1]) & (good[:, 1:] == good[:, :-1])
    stays = np.ones(x.shape, dtype=bool)
    stays[:, 1:] = good[:, 1:] > before
    for place in np.flatnonzero(twin.any(axis=0)) + 1:
        stays[:, place] |= twin[:, place - 1] & stays[:, place - 1]
    found = np.empty_like(stays)
    np.put_along_axis(found, order, stays, 1)
    return found


def best_probabilities(data: SweepData, column: Column) -> dict[Configuration, float]:
    """By configuration that has the number, how probable it is that no other is better in it. Empty where neither more nor less
    is better, or where no stratum has seeds or near-replicates that tell the spread."""
    found = rivals(data, column)
    if not column.direction or not found:
        return {}
    return dict(zip(found, best(list(found.values()), column.direction).tolist(), strict=True))


def front_probabilities(data: SweepData, speed: Column, quality: Column) -> dict[Configuration, float]:
    """By configuration that has both numbers, how probable it is that it is on the front of speed and quality. A speed whose
    spread is not known is taken as measured; empty where that of the quality is not."""
    good = rivals(data, quality)
    if not good:
        return {}
    fast = rivals(data, speed) or {
        key: Candidate(value, 0.0) for key, (value, _) in configuration_means(data, speed).items()
    }
    both = [key for key in good if key in fast]
    chances = front([(fast[key], good[key]) for key in both], (speed.direction or 1, quality.direction))
    return dict(zip(both, chances.tolist(), strict=True))


def configuration_means(data: SweepData, column: Column) -> dict[Configuration, tuple[float, int]]:
    """By configuration that has the number, its mean over seeds and how many they are."""
    found = {}
    for key, cells in data.configurations().items():
        if known := data.numbers(cells, column):
            found[key] = (fmean(known), len(known))
    return found


def rivals(data: SweepData, column: Column) -> dict[Configuration, Candidate]:
    """By configuration that has the number, the number with the spread of its stratum, a printed mean with the one that is printed;
    empty where no spread is known."""
    spreads = spreads_by_stratum(data, column)
    if not spreads:
        return {}
    groups = data.configurations()
    found = {}
    for key, (value, seeds) in configuration_means(data, column).items():
        cell = groups[key][0]
        stratum, own = stratum_of(cell), printed(data, cell, column)
        known = spreads[stratum]
        if own is not None:
            stratum, known, seeds = (cell.cell_id,), own, own.df + 1
        found[key] = Candidate(value, known.used, known.df, stratum, seeds, column.percent)
    return found


def stratum_of(cell: CellState) -> Stratum:
    """The mixer and the memory of a cell."""
    return tuple(cell.levels[axis] for axis in STRATUM_AXES)


def spreads_by_stratum(data: SweepData, column: Column) -> dict[Stratum, Spread]:
    """The spread of a number in every stratum; one that has neither seeds nor near-replicates gets that of all together. Empty
    where no stratum has any."""
    found = noise_by_stratum(data, column)
    strata = dict.fromkeys(map(stratum_of, data.cells))
    if not found or not strata.keys() - found.keys():
        return found
    pooled = spread(data, column)
    return {one: found.get(one, pooled) for one in strata} if pooled is not None else found


def expected_maximum(runs: int) -> float:
    """How many standard deviations the best of so many runs of one configuration lies above their mean, by chance alone."""
    x = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(x * runs * density * special.ndtr(x) ** (runs - 1), x))


def _draws_of(rivals: int) -> int:
    return max(FEWEST, min(DRAWS, NUMBERS // rivals // CHUNK * CHUNK))


def _draws(rivals: Sequence[Candidate], salt: int = 0) -> Iterator[np.ndarray]:
    """Rows of a number of each rival, [CHUNK, rivals] at a time."""
    draw = np.random.default_rng((RANDOM, salt, len(rivals)))
    values = np.array([one.value for one in rivals])
    errors = np.array([one.sd / math.sqrt(one.seeds) for one in rivals])
    shares = np.array([one.share for one in rivals])
    bounds = np.where(shares, 0.0, -math.inf), np.where(shares, 1.0, math.inf)
    strata: dict[tuple[Stratum, float], list[int]] = {}
    for place, one in enumerate(rivals):
        if math.isfinite(one.df):
            strata.setdefault((one.stratum, one.df), []).append(place)
    scaled = [(df, np.array(places)) for (_, df), places in strata.items()]
    for _ in range(_draws_of(len(rivals)) // CHUNK):
        found = draw.standard_normal((CHUNK, len(rivals))) * errors
        for df, indices in scaled:
            found[:, indices] *= np.sqrt(df / draw.chisquare(df, (CHUNK, 1)))
        found += values
        yield np.clip(found, *bounds, out=found)
