"""Probability that a configuration is the best, or lies on the Pareto front of speed and quality, by simulation.

Each number is drawn many times around its measured value, with the run-to-run standard deviation of its stratum (mixer
and memory): that of seeds where the sweep has several, else that of near-replicates. The standard deviation is an
estimate, so each draw also draws a variance: the draws of one number are Student's t, and those of a stratum share the
drawn variance. Draws start from a fixed seed, so tables are reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np
from scipy import special

from ....results.store.records import CellState
from ...number_format import Column
from ...sweep_data import SweepData
from .run_noise import STRATUM_AXES, NoiseEstimate, noise_by_stratum, pooled_noise, printed_noise

RANDOM_SEED = 20_261
MAX_DRAWS = 10_000
MAX_SIMULATED_VALUES = 4_000_000  # largest number of simulated values, unless MIN_DRAWS draws need more
MIN_DRAWS = 2_000
DRAW_BLOCK = 500  # draws per block in memory

Configuration = tuple[str, ...]
"""Levels of the five AXES, then of the extra axes, as `SweepData.configurations` orders them."""
Stratum = tuple[str, ...]
"""Levels of STRATUM_AXES: mixer, memory."""


@dataclass(frozen=True)
class Candidate:
    """A configuration's number in a comparison: the mean of `seeds` runs with run-to-run standard deviation `sd`.

    The mean is drawn with sd / sqrt(seeds). `sd` is that of a single run in `stratum`, estimated with `df` degrees of
    freedom (infinite: known exactly). Draws of a `share` (a fraction) are clipped to [0, 1].
    """

    value: float
    sd: float
    df: float = math.inf
    stratum: Stratum = ()
    seeds: int = 1
    share: bool = False


def simulate_p_best(candidates: Sequence[Candidate], direction: int) -> np.ndarray:
    """Return the probability that each candidate is the best, [candidate]; tied draws are shared, and the sum is 1.

    Seeded and cached by candidates and direction; each call returns a fresh array. Empty without candidates.

    Args:
        candidates: The numbers that are compared.
        direction: 1 where more is better, -1 where less is.
    """
    return _simulated_p_best(tuple(candidates), direction).copy()


@lru_cache(maxsize=32)  # the dashboard's first page ranks the numbers of Table 6 again
def _simulated_p_best(candidates: tuple[Candidate, ...], direction: int) -> np.ndarray:
    """Return the share of draws that each candidate wins, [candidate]; cached by candidates and direction.

    The array is the cached one, so callers must copy it before they change it. A draw with ties counts in equal parts.
    """
    won = np.zeros(len(candidates))
    if not candidates:
        return won
    for drawn in _simulated_values(candidates):
        first = drawn * direction
        draws, winners = np.nonzero(first == first.max(axis=1, keepdims=True))
        won += np.bincount(winners, 1 / np.bincount(draws)[draws], len(candidates))
    return won / _draw_count(len(candidates))


def simulate_p_front(
    pairs: Sequence[tuple[Candidate, Candidate]], directions: tuple[int, int] = (1, 1), above: float = -math.inf
) -> np.ndarray:
    """Return the probability that each pair lies on the Pareto front, [pair]; empty without pairs.

    A pair is on the front if no other is at least as good in both numbers and better in one. Speeds and qualities are
    drawn independently, from fixed seeds.

    Args:
        pairs: (speed, quality) of each configuration.
        directions: 1 where more is better, -1 where less is, for speed and quality.
        above: Quality that a pair on the front must exceed.
    """
    front_counts = np.zeros(len(pairs))
    if not pairs:
        return front_counts
    first = _simulated_values([speed for speed, _ in pairs], salt=1)
    second = _simulated_values([quality for _, quality in pairs], salt=2)
    for x, y in zip(first, second, strict=True):
        front_counts += (_unbeaten(x * directions[0], y * directions[1]) & (y > above)).sum(axis=0)
    return front_counts / _draw_count(len(pairs))


def _unbeaten(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a mask of the non-dominated points of each draw, [draw, point].

    Equal points do not dominate each other.

    Args:
        x: First coordinate, more is better, [draw, point].
        y: Second coordinate, more is better, [draw, point].
    """
    order = np.lexsort((-y, -x), axis=1)
    sorted_x, sorted_y = np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)
    before = np.maximum.accumulate(sorted_y, axis=1)[:, :-1]
    # later points are not faster: one is on the front only with a higher quality, or as an equal point
    twin = (sorted_x[:, 1:] == sorted_x[:, :-1]) & (sorted_y[:, 1:] == sorted_y[:, :-1])
    stays = np.ones(x.shape, dtype=bool)
    stays[:, 1:] = sorted_y[:, 1:] > before
    for index in np.flatnonzero(twin.any(axis=0)) + 1:
        stays[:, index] |= twin[:, index - 1] & stays[:, index - 1]
    is_unbeaten = np.empty_like(stays)
    np.put_along_axis(is_unbeaten, order, stays, 1)
    return is_unbeaten


def best_probabilities(data: SweepData, column: Column) -> dict[Configuration, float]:
    """Return the probability that each configuration with the number is the best, by configuration.

    Probabilities sum to 1. Empty if the column has no better side, or if no stratum has seeds or near-replicates to
    estimate the noise from. Keys are the levels of the five axes, then of the extra axes, as text.
    """
    return probabilities_of_candidates(candidates_by_configuration(data, column), column.direction)


def probabilities_of_candidates(
    candidates: Mapping[Configuration, Candidate], direction: int
) -> dict[Configuration, float]:
    """Return the probability that each candidate is the best, by configuration; empty with a direction of 0."""
    if not direction:
        return {}
    return dict(zip(candidates, simulate_p_best(list(candidates.values()), direction).tolist(), strict=True))


def front_probabilities(
    data: SweepData, speed: Column, quality: Column, above: float = -math.inf
) -> dict[Configuration, float]:
    """Return the probability that each configuration lies on the front of speed and quality, by configuration.

    Configurations without either number are left out. A speed without a noise estimate counts as exact; more of it is
    better unless its column says otherwise. Empty if the quality has no noise estimate. Qualities that do not exceed
    `above` are on no front.
    """
    qualities = candidates_by_configuration(data, quality)
    if not qualities:
        return {}
    speeds = candidates_by_configuration(data, speed) or {
        key: Candidate(value, 0.0) for key, (value, _) in configuration_means(data, speed).items()
    }
    common_keys = [key for key in qualities if key in speeds]
    chances = simulate_p_front(
        [(speeds[key], qualities[key]) for key in common_keys], (speed.direction or 1, quality.direction), above
    )
    return dict(zip(common_keys, chances.tolist(), strict=True))


def configuration_means(data: SweepData, column: Column) -> dict[Configuration, tuple[float, int]]:
    """Return (mean over seeds, number of seeds) of each configuration with the number, by configuration.

    Seeds without the number are skipped; the mean of printed means counts each cell once.
    """
    means = {}
    for key, cells in data.configurations().items():
        if values := data.column_numbers(cells, column):
            means[key] = (fmean(values), len(values))
    return means


def candidates_by_configuration(data: SweepData, column: Column) -> dict[Configuration, Candidate]:
    """Return the candidate of each configuration with the number, by configuration.

    Empty without any noise estimate. A printed mean takes the standard deviation printed beside it (0 if none) and its
    number of runs. Other numbers take the standard deviation of their stratum, but at least the floor of an accuracy's
    trials, and the number of their seeds.
    """
    spreads = noise_with_pooled_fallback(data, column)
    if not spreads:
        return {}
    groups = data.configurations()
    candidates = {}
    for key, (value, seeds) in configuration_means(data, column).items():
        cell = groups[key][0]
        stratum, noise_as_printed = stratum_of(cell), printed_noise(data, cell, column)
        noise = spreads[stratum]
        if noise_as_printed is not None:
            stratum, noise, seeds = (cell.cell_id,), noise_as_printed, noise_as_printed.df + 1
        candidates[key] = Candidate(value, noise.effective_sd, noise.df, stratum, seeds, column.percent)
    return candidates


def stratum_of(cell: CellState) -> Stratum:
    """Return the levels of mixer and memory of a cell."""
    return tuple(cell.levels[axis] for axis in STRATUM_AXES)


def noise_with_pooled_fallback(data: SweepData, column: Column) -> dict[Stratum, NoiseEstimate]:
    """Return the noise estimate of a number in every stratum, by (mixer, memory).

    A stratum without seeds or near-replicates gets the estimate pooled over the sweep, or is left out if there is none.
    Empty if no stratum has an estimate.
    """
    by_stratum = noise_by_stratum(data, column)
    strata = dict.fromkeys(map(stratum_of, data.cells))
    if not by_stratum or not strata.keys() - by_stratum.keys():
        return by_stratum
    pooled = pooled_noise(data, column)
    return {stratum: by_stratum.get(stratum, pooled) for stratum in strata} if pooled is not None else by_stratum


def expected_maximum(runs: int) -> float:
    """Return the expected maximum of `runs` standard normals: the selection bias of the best run, in sd units."""
    x = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(x * runs * density * special.ndtr(x) ** (runs - 1), x))


def _draw_count(num_candidates: int) -> int:
    """Return the number of draws for at least one candidate: from 2,000 to 10,000, in steps of 500.

    Within these bounds, draws times candidates are at most four million.
    """
    return max(MIN_DRAWS, min(MAX_DRAWS, MAX_SIMULATED_VALUES // num_candidates // DRAW_BLOCK * DRAW_BLOCK))


def _simulated_values(candidates: Sequence[Candidate], salt: int = 0) -> Iterator[np.ndarray]:
    """Yield simulated values of every candidate in blocks [500, candidate]; reproducible for each `salt`.

    Values are normal around the candidate's value with its standard error, times sqrt(df / chi2) where df is finite:
    Student's t. Candidates with equal stratum and df share the chi-square of a draw. Shares are clipped to [0, 1]. A
    salt gives an independent set of draws.
    """
    draw = np.random.default_rng((RANDOM_SEED, salt, len(candidates)))
    values = np.array([candidate.value for candidate in candidates])
    errors = np.array([candidate.sd / math.sqrt(candidate.seeds) for candidate in candidates])
    shares = np.array([candidate.share for candidate in candidates])
    bounds = np.where(shares, 0.0, -math.inf), np.where(shares, 1.0, math.inf)
    strata: dict[tuple[Stratum, float], list[int]] = {}
    for index, candidate in enumerate(candidates):
        if math.isfinite(candidate.df):
            strata.setdefault((candidate.stratum, candidate.df), []).append(index)
    scaled = [(df, np.array(indices)) for (_, df), indices in strata.items()]
    for _ in range(_draw_count(len(candidates)) // DRAW_BLOCK):
        values_drawn = draw.standard_normal((DRAW_BLOCK, len(candidates))) * errors
        for df, indices in scaled:
            values_drawn[:, indices] *= np.sqrt(df / draw.chisquare(df, (DRAW_BLOCK, 1)))
        values_drawn += values
        yield np.clip(values_drawn, *bounds, out=values_drawn)
