"""Power analysis by stratum: pairs required for a difference, and the difference that given pairs can detect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..number_format import Column
from ..sweep_data import SweepData
from .effects.matched_groups import (
    MetricMatrix,
    frame_origins,
    level_pairs,
    main_measures,
    subset_mask,
    values_frame,
    varying_axes,
)
from .noise.run_noise import POWER, STRATUM_AXES, NoiseEstimate, detectable, noise_by_stratum, power_of

SHARE_DIFFERENCES = (0.05, 0.1, 0.2)
"""Differences of shares that are planned for, as fractions."""
LOSS_DIFFERENCES = (0.01, 0.02, 0.05)
"""Differences of losses that are planned for, in nats per token."""
MAX_PAIRS = 1 << 20
"""Largest number of pairs that is computed."""
LOSS_UNIT = "nats"
"""Beginning of the unit of losses."""


@dataclass(frozen=True, kw_only=True)
class PowerAnalysis:
    """Statistical power of the matched comparisons of one measure in one stratum (mixer and memory)."""

    measure: Column
    stratum: tuple[str, ...]
    """(mixer, memory) levels."""
    spread: NoiseEstimate
    """Noise estimate (run-to-run standard deviation) of the measure in this stratum."""
    pairs: int
    """Largest number of matched pairs that the design has in the stratum, for two levels of any axis."""
    detectable_one_pair: float
    """Smallest difference that one pair detects with 80% power, in the measure's unit (shares as fractions)."""
    detectable_all_pairs: float
    """Smallest difference that all `pairs` detect with 80% power, in the measure's unit; NaN without pairs."""
    differences: tuple[float, ...]
    """Planned differences, in the measure's unit.

    0.05, 0.1 and 0.2 of shares (fractions), 0.01, 0.02 and 0.05 nats per token of losses, empty for other measures.
    """
    needed: tuple[int | None, ...]
    """Pairs required for each of `differences`, at least 2; None beyond 2^20 (MAX_PAIRS)."""
    origins: tuple[tuple[str, int | None], ...]
    """(cell id, attempt id) pairs of the stratum that have the number."""


def power_analyses(data: SweepData, columns: Sequence[Column] | None = None) -> list[PowerAnalysis]:
    """Return the power analysis of every measure in every stratum with a noise estimate; speeds are left out.

    Strata are (mixer, memory). Measures of the probe `throughput` are dropped, also from an explicit list.

    Args:
        data: The sweep.
        columns: Measures; None for `main_measures(data)`.

    Returns:
        One analysis per (measure, stratum): measures in their order, strata by first appearance. A stratum without
        replicate runs (seeds or near-replicates) has none.
    """
    chosen = [
        column for column in (main_measures(data) if columns is None else columns) if column.probe != "throughput"
    ]
    pairs = _max_pairs_by_stratum(data)
    analyses = []
    for column in chosen:
        deltas = SHARE_DIFFERENCES if column.percent else LOSS_DIFFERENCES if column.unit.startswith(LOSS_UNIT) else ()
        cells = dict(iter(values_frame(data, column).groupby(list(STRATUM_AXES), sort=False)))
        for stratum, spread in noise_by_stratum(data, column).items():
            n = pairs.get(stratum, 0)
            needed = pairs_needed(
                np.full(len(deltas), spread.effective_sd), np.full(len(deltas), spread.df), np.array(deltas)
            )
            analyses.append(
                PowerAnalysis(
                    measure=column,
                    stratum=stratum,
                    spread=spread,
                    pairs=n,
                    detectable_one_pair=detectable(spread, 1),
                    detectable_all_pairs=detectable(spread, n) if n else float("nan"),
                    differences=deltas,
                    needed=tuple(int(k) if k <= MAX_PAIRS else None for k in needed),
                    origins=frame_origins(cells[stratum], ""),
                )
            )
    return analyses


def pairs_needed(sd: np.ndarray, df: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """Return the smallest number of matched pairs that detects each difference with 80% power at a two-sided 5%.

    The planned test is Student's t over the pairs, with pairs - 1 degrees of freedom. `df` only says how uncertain `sd`
    is, and the power is averaged over that uncertainty. The search is a bisection, since the power grows with the
    number of pairs.

    Args:
        sd: Standard deviation of a single run (not of a pair's difference), [n]; 0 needs the fewest pairs.
        df: Degrees of freedom with which `sd` was estimated, [n].
        difference: Difference to detect, in the unit of `sd`, [n]; positive, since 0 and below give 2^20 + 1.

    Returns:
        Integers [n], from 2 to 2^20 (MAX_PAIRS); 2^20 + 1 where more pairs are required.
    """
    low, high = np.ones(len(sd), dtype=int), np.full(len(sd), MAX_PAIRS + 1)
    with np.errstate(divide="ignore"):
        ratios = difference / sd
    while len(sd) and (high - low > 1).any():
        middle = np.where(high - low > 1, (low + high) // 2, high)
        has_power = power_of(middle, df, ratios) >= POWER
        low, high = np.where(has_power, low, middle), np.where(has_power, middle, high)
        low = np.minimum(low, high - 1)
    return high


def _max_pairs_by_stratum(data: SweepData) -> dict[tuple[str, ...], int]:
    """Return, by stratum (mixer, memory), the largest number of matched pairs listed for two levels of an axis.

    Pairs are pairs of configurations with at least one common seed; numbers need not be measured yet. The axes mixer
    and memory do not count. Every stratum of the sweep is a key; 0 without pairs.
    """
    numbers = MetricMatrix(data, [])
    strata = dict.fromkeys(tuple(cell.levels[axis] for axis in STRATUM_AXES) for cell in data.cells)
    max_pairs = dict.fromkeys(strata, 0)
    for axis in varying_axes(data):
        if axis in STRATUM_AXES:
            continue
        for pair in level_pairs(data, axis):
            matched = numbers.differences_between({axis: pair})
            listed = np.any(np.all(matched.corners >= 0, axis=-1), axis=1)
            for stratum in strata:
                inside = subset_mask(
                    matched.levels, dict(zip(STRATUM_AXES, stratum, strict=True)), len(matched.corners)
                )
                max_pairs[stratum] = max(max_pairs[stratum], int((listed & inside).sum()))
    return max_pairs
