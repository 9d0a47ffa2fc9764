"""Simulated coverage of the 95% intervals of matched differences, and the error rate of their p under no effect.

`python -m tests.testing.simulations.coverage` prints the tables of docs/experiments/statistics-checks.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from atma_sweep.reports.stats.significance.paired_tests import PairedTest, correct_family, paired_difference_tests
from atma_sweep.reports.stats.significance.sign_flip_test import ALPHA, sign_flip_p_values

CONFIGURATIONS = (5, 8, 12, 20)
DRAWS = 2_000
RESAMPLES = 1_000  # of the percentile bootstrap beside it
BOUNDS = (0.93, 0.97)
HOLES = 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Source of differences.

    Every run's noise has sd 1; effects differ between configurations by `heterogeneity`, a seed moves all
    configurations by `shock`, both as standard deviations. `skew` is the skewness of the noise. With `holes`, HOLES of
    the runs are missing. 95% is not promised for a setting that is not `claimed`: intervals are too wide with two
    seeds, and where seeds do nothing to configurations that all agree, since so few cannot show it; they are too narrow
    where differences are skewed.
    """

    name: str
    seeds: int = 1
    heterogeneity: float = 0.0
    shock: float = 0.0
    skew: float = 0.0
    holes: bool = False
    claimed: bool = True

    def draw(self, random: np.random.Generator, configurations: int) -> np.ndarray:
        """Differences [configurations, seeds] whose true mean is 0."""
        size = (configurations, self.seeds)
        if self.skew:
            shape = 4 / self.skew**2
            noise = (random.gamma(shape, size=size) - shape) / np.sqrt(shape)
        else:
            noise = random.normal(size=size)
        noise = noise + self.heterogeneity * random.normal(size=(configurations, 1))
        noise = noise + self.shock * random.normal(size=(1, self.seeds))
        if self.holes:
            noise[random.random(size) < HOLES] = np.nan
        return np.asarray(noise)


SETTINGS = (
    Setting(name="one run, normal"),
    Setting(name="one run, effects differ by 2 sd", heterogeneity=2.0),
    *(
        setting
        for seeds in (2, 3, 5)
        for setting in (
            Setting(name=f"{seeds} seeds, noise alone (wide)", seeds=seeds, claimed=False),
            Setting(name=f"{seeds} seeds, effects differ by 2 sd", seeds=seeds, heterogeneity=2.0, claimed=seeds > 2),
            Setting(name=f"{seeds} seeds, a shock of 0.5 sd a seed", seeds=seeds, shock=0.5, claimed=seeds > 2),
            Setting(name=f"{seeds} seeds, effects differ by 2 sd and a shock of 2", seeds=seeds, heterogeneity=2.0, shock=2.0, claimed=seeds > 2),
            Setting(name=f"{seeds} seeds, effects differ by 2 sd and a shock of 0.5", seeds=seeds, heterogeneity=2.0, shock=0.5, claimed=seeds > 2),
            Setting(name=f"{seeds} seeds, the same, every tenth run missing", seeds=seeds, heterogeneity=2.0, shock=0.5, holes=True, claimed=seeds > 2),
        )
    ),
    Setting(name="one run, skewness 1 (narrow)", skew=1.0, claimed=False),
    Setting(name="one run, skewness 2, exponential (narrow)", skew=2.0, claimed=False),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Covered:
    """Coverage of a setting.

    Shares of intervals that hold the truth and of p below 5%: today's method, and with every run as a pair of its own
    (percentile bootstrap, and permutation of signs).
    """

    now: float
    wrong: float
    bootstrap: float
    wrong_as_pairs: float


def covered(setting: Setting, configurations: int, *, draws: int = DRAWS, seed: int = 0) -> Covered:
    """Simulates so many samples of a setting."""
    random = np.random.default_rng((seed, configurations, SETTINGS.index(setting)))
    samples = [setting.draw(random, configurations) for _ in range(draws)]
    tested = [result for result in paired_difference_tests(samples) if result.method != "none"]
    low, high = _bootstrap(samples, random)
    return Covered(
        now=_share([result.low <= 0 <= result.high for result in tested]),
        wrong=_share([one.p < ALPHA for one in tested]),
        bootstrap=float(((low <= 0) & (high >= 0)).mean()),
        wrong_as_pairs=_share([p < ALPHA for p in _as_pairs(samples)]),
    )


def _share(hits: Sequence[bool]) -> float:
    return float(np.mean(hits))


def _runs(samples: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The samples that have as many runs, together: [runs, samples]."""
    by_size: dict[int, list[np.ndarray]] = {}
    for sample in samples:
        runs = sample[np.isfinite(sample)]
        by_size.setdefault(len(runs), []).append(runs)
    for group in by_size.values():
        yield np.stack(group, axis=1)


def _bootstrap(samples: Sequence[np.ndarray], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ends = []
    for table in _runs(samples):
        weights = random.multinomial(len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES) / len(table)
        ends.append(np.quantile(weights @ table, [ALPHA / 2, 1 - ALPHA / 2], axis=0))
    low, high = np.concatenate(ends, axis=1)
    return low, high


def _as_pairs(samples: Sequence[np.ndarray]) -> list[float]:
    return [float(p) for table in _runs(samples) for p in sign_flip_p_values(table)]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Family of tests that are corrected together.

    `members` levels are compared with one reference, whose noise they share (correlation one half); `real` of them have
    an effect of 1.5 sd.
    """

    name: str
    members: int
    real: int = 0
    seeds: int = 1


FAMILIES = (
    Family(name="4 levels, none does anything", members=4),
    Family(name="4 levels, one does", members=4, real=1),
    Family(name="12 levels, none does anything", members=12),
    Family(name="12 levels, four do", members=12, real=4),
    Family(name="4 levels, 3 seeds, none does anything", members=4, seeds=3),
)


def family_wise(family: Family, configurations: int, *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """The share of families in which at least one level that does nothing has p below 5%: corrected, and not."""
    random = np.random.default_rng((seed, configurations, len(SETTINGS) + FAMILIES.index(family)))
    size = (draws, configurations, family.seeds)
    reference = random.normal(size=size)
    levels = [random.normal(size=size) + (1.5 * 2**0.5 if index < family.real else 0.0) for index in range(family.members)]  # fmt: skip
    samples = [[level[draw] - reference[draw] for level in levels] for draw in range(draws)]
    flat = paired_difference_tests([sample for group in samples for sample in group])
    together = [flat[start : start + family.members] for start in range(0, len(flat), family.members)]
    wrong = [
        any(p < ALPHA for p in correct_family(group, summed)[family.real :])
        for group, summed in zip(samples, together, strict=True)
    ]
    return _share(wrong), _share([_any(summed[family.real :]) for summed in together])


def _any(summed: Sequence[PairedTest]) -> bool:
    return any(result.p < ALPHA for result in summed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables as Markdown.

    Returns:
        1 where a setting that 95% is claimed for lies outside of BOUNDS by more than two standard errors of the simulation, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.testing.simulations.coverage", description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"samples a row (default {DRAWS})")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.draws < 1 or options.seed < 0:
        parser.error("--draws is at least 1, --seed at least 0")
    print(
        "| Differences | Configurations | Holds the truth | p < 0.05 of a zero | Bootstrap, runs as pairs | Its p < 0.05 |"
    )
    print("|---|---|---|---|---|---|")
    outside, chance = 0, 2 * (ALPHA * (1 - ALPHA) / options.draws) ** 0.5
    for setting in SETTINGS:
        for n in CONFIGURATIONS:
            result = covered(setting, n, draws=options.draws, seed=options.seed)
            outside += setting.claimed and not BOUNDS[0] - chance <= result.now <= BOUNDS[1] + chance
            columns = (result.now, result.wrong, result.bootstrap, result.wrong_as_pairs)
            name = setting.name if setting.claimed else f"not claimed: {setting.name}"
            print(f"| {name} | {n} | {' | '.join(f'{100 * share:.1f}' for share in columns)} |", flush=True)
    print("\n| Family | Configurations | Any wrong, corrected | Any wrong, uncorrected |\n|---|---|---|---|")
    for family in FAMILIES:
        for n in CONFIGURATIONS:
            shares = family_wise(family, n, draws=max(options.draws // 4, 1), seed=options.seed)
            print(f"| {family.name} | {n} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |", flush=True)
    return 1 if outside else 0


if __name__ == "__main__":
    raise SystemExit(main())
