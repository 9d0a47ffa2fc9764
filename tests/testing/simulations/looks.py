"""Simulated false positives of looking again after every wave of seeds, and the cost of the correction.

`python -m tests.testing.simulations.looks` prints the tables of docs/explanation/designs.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from atma_sweep.results.stopping.alpha_spending import SPENDING_FUNCTIONS, alpha_levels
from atma_sweep.results.stopping.messages import SPENDING_LABELS
from scipy import special

LOOKS: tuple[tuple[int, ...], ...] = ((3, 4, 5, 6, 7, 8), (3, 5, 7, 8), (5, 10, 15, 20), tuple(range(3, 21)))
"""Seeds at which a sweep looks."""
EACH = (None, *SPENDING_FUNCTIONS)
"""None: 5% at every look."""
WIDTHS = (1.0, 2.0, 3.0)
"""Of an interval that is enough, in standard deviations of a seed's difference."""


def error(looks: Sequence[int], spending: str | None, *, draws: int, seed: int = 0) -> float:
    """The share of sweeps that call a difference of zero sure at any look; seeds differ with sd 1."""
    low, high = _intervals(_draws(looks, draws, seed), looks, spending)
    return float(((low > 0) | (high < 0)).any(axis=1).mean())


def stopped(
    looks: Sequence[int], spending: str | None, width: float, *, draws: int, seed: int = 0
) -> tuple[float, float]:
    """Return the mean number of seeds and the coverage of the truth.

    Looking ends when the interval is that narrow or no seed remains.
    """
    low, high = _intervals(_draws(looks, draws, seed), looks, spending)
    enough = high - low <= width
    enough[:, -1] = True
    last = enough.argmax(axis=1)
    every = np.arange(draws)
    held = (low[every, last] <= 0) & (high[every, last] >= 0)
    return float(np.array(looks)[last].mean()), float(held.mean())


def _draws(looks: Sequence[int], draws: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(draws, looks[-1]))


def _intervals(values: np.ndarray, looks: Sequence[int], spending: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Low and high [draw, look], by Student's t over the seeds so far."""
    each = alpha_levels(looks, looks[-1], spending=spending) if spending is not None else [0.05] * len(looks)
    ends = []
    for n, level in zip(looks, each, strict=True):
        part = values[:, :n]
        mean = part.mean(axis=1)
        half = special.stdtrit(n - 1, 1 - level / 2) * part.std(axis=1, ddof=1) / np.sqrt(n)
        ends.append((mean - half, mean + half))
    low, high = np.array(ends).transpose(1, 2, 0)
    return low, high


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables as markdown."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.simulations.looks", description=__doc__)
    parser.add_argument("--draws", type=int, default=100_000)
    draws = parser.parse_args(arguments).draws
    names = ["5% at every look" if spending is None else SPENDING_LABELS[spending] for spending in EACH]
    print(f"| Looks after | {' | '.join(names)} |\n|---|{'---|' * len(EACH)}")
    for looks in LOOKS:
        shares = [f"{100 * error(looks, spending, draws=draws):.1f}%" for spending in EACH]
        print(f"| {_shown(looks)} | {' | '.join(shares)} |")
    print(
        f"\n| Interval of at most | {' | '.join(f'{name}: seeds, holds' for name in names)} |\n|---|{'---|' * len(EACH)}"
    )
    for width in WIDTHS:
        results = [stopped(LOOKS[0], one, width, draws=draws) for one in EACH]
        print(f"| {width:g} sd | {' | '.join(f'{seeds:.1f}, {100 * held:.1f}%' for seeds, held in results)} |")
    return 0


def _shown(looks: Sequence[int]) -> str:
    return ", ".join(map(str, looks)) if len(looks) < 8 else f"{looks[0]}, {looks[1]}, ..., {looks[-1]}"


if __name__ == "__main__":
    raise SystemExit(main())
