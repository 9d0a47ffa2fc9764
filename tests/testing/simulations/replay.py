"""Partial designs and pruning replayed on the published sweep: what a part of its 120 cells would have said of all.

`python -m tests.testing.simulations.replay` prints the tables of docs/explanation/designs.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from atma_sweep.reports.stats.effects.partial_design_effects import DesignRegression
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.results.builtin_sweeps import open_store_with_builtins as opened
from atma_sweep.results.designs import design_choice, point_exchange
from atma_sweep.results.designs.design_space import DesignSpace, LinearModel, Term, hierarchical_closure, residual
from atma_sweep.results.paper import with_published
from atma_sweep.results.store.records import AXES
from atma_sweep.results.store.store import Store
from scipy import stats

SWEEP = "printed-v2"
DRAWS = 1_000
RUNGS = (250, 500, 1_000)
"""Steps of 1,900 at which cells are pruned, an eighth, a quarter and a half of the training."""
BEST = 10
EFFECTS: Mapping[str, Mapping[str, str]] = {"all": {}, "polar": {"attn_type": "polar"}}
"""Within what the memory effect is asked for."""

Draw = Callable[["Published", np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Published:
    """Published cells as points of their space, [point].

    Needle accuracy at 64K, GPU-hours of the training, and the validation loss by step.
    """

    space: DesignSpace
    needle: np.ndarray
    hours: np.ndarray
    losses: Mapping[int, np.ndarray]

    @property
    def model(self) -> LinearModel:
        """Return the design of a grid that declares the memory effect within a mixer."""
        return LinearModel(self.space, tuple(_terms(self.space)))


def _terms(space: DesignSpace) -> list[Term]:
    return hierarchical_closure([*space.terms(1), ("attn_type", "memory")])


def published(store: Store | None = None) -> Published:
    """The 120 cells of the paper's second version."""
    held = with_published(store, SWEEP) if store is not None else opened(None, SWEEP)
    data = load_sweep_data(held, SWEEP)
    space = DesignSpace({axis: tuple(data.levels(axis)) for axis in AXES})
    index_by_id = {cell.cell_id: index for cell in data.cells if (index := space.index(cell.levels)) is not None}
    needle, hours = (_numbers(data, index_by_id, *what) for what in (("needle", "digit_accuracy", 65536), ("throughput", "train_seconds", 0)))  # fmt: skip
    losses: dict[int, np.ndarray] = {}
    for cell in data.cells:
        assert cell.attempt_id is not None
        for point in held.curve(cell.attempt_id):
            if point.val_loss is not None:
                losses.setdefault(point.step, np.full(len(index_by_id), np.nan))[index_by_id[cell.cell_id]] = (
                    point.val_loss
                )
    return Published(space, needle, hours / 3600, losses)


def _numbers(data: SweepData, index_by_id: Mapping[str, int], probe: str, metric: str, length: int) -> np.ndarray:
    values = np.full(len(index_by_id), np.nan)
    for cell, index in index_by_id.items():
        value = data.values[cell, probe, metric, length].value
        assert value is not None
        values[index] = value
    return values


# --- draws of a design ------------------------------------------------------------------------------------------------


def at_random(sweep: Published, random: np.random.Generator) -> np.ndarray:
    """Any 40 cells."""
    return random.permutation(len(sweep.needle))[:40]


def third(sweep: Published, random: np.random.Generator) -> np.ndarray:
    """Every combination of the four other axes once, its mixer by a sum modulo 3: 40 cells, nearly orthogonal."""
    points = sweep.space.points
    order = random.permutation(5)
    steps = random.integers(1, 3, size=3)
    mixer = (order[points[:, 1]] + points[:, 2:] @ steps + random.integers(3)) % 3
    return np.flatnonzero(points[:, 0] == mixer)


def half(sweep: Published, random: np.random.Generator) -> np.ndarray:
    """Return one half of the other three axes for every mixer and regularizer.

    I = + or - their product: 60 cells, orthogonal.
    """
    points = sweep.space.points
    parity = points[:, 2:].sum(axis=1) % 2
    return np.flatnonzero(parity == random.integers(2, size=(3, 5))[points[:, 0], points[:, 1]])


def optimal(interaction: bool) -> Draw:
    """Forty cells that exchanges lead to from random ones, for main effects alone or with memory x attn_type."""

    def draw(sweep: Published, random: np.random.Generator) -> np.ndarray:
        model = sweep.model if interaction else LinearModel(sweep.space, tuple(sweep.space.terms(1)))
        return point_exchange.improve_design(
            model.whitened, _unmodelled_terms(model), random.permutation(len(sweep.needle))[:40]
        )

    return draw


def _unmodelled_terms(model: LinearModel) -> np.ndarray:
    """The interactions of two axes beside a model, orthonormal; as choice.d_optimal has them."""
    residuals = residual(LinearModel(model.space, tuple(model.space.terms(2))).full_matrix[:, 1:], model.full_matrix)
    basis, sizes, _ = np.linalg.svd(residuals, full_matrices=False)
    return np.asarray(basis[:, sizes > 1e-9 * sizes[0]] * np.sqrt(len(basis)))


def shipped(sweep: Published, random: np.random.Generator) -> np.ndarray:
    """Return the cells that `design: {runs: 40}` takes, with the levels of every axis permuted."""
    points = _forty(tuple(sweep.space.axes.items()))
    turned = [random.permutation(len(levels))[points[:, i]] for i, levels in enumerate(sweep.space.axes.values())]
    return np.ravel_multi_index(tuple(turned), [len(levels) for levels in sweep.space.axes.values()])


@cache
def _forty(axes: tuple[tuple[str, tuple[str, ...]], ...]) -> np.ndarray:
    space = DesignSpace(dict(axes))
    return space.points[design_choice.d_optimal(space, _terms(space), 40)[1]]


METHODS: Mapping[str, Draw] = {
    "random, 40": at_random,
    "a third, nearly orthogonal, 40": third,
    "a half, orthogonal, 60": half,
    "d-optimal for main effects, random starts, 40": optimal(interaction=False),
    "d-optimal with memory x attn_type, random starts, 40": optimal(interaction=True),
    "`runs: 40`, levels relabelled": shipped,
}


@dataclass(frozen=True)
class Replayed:
    """Shares over the draws of a method.

    The memory effect could be estimated and kept its sign; its interval held the value of all cells and excluded zero;
    an interval with the pooled variance would have held it. Also the mean width of the interval in points, and the GPU-
    hours saved.
    """

    sign: float
    held: float
    sure: float
    pooled: float
    width: float
    saved: float


def replayed(sweep: Published, draw: Draw, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Replayed]:
    """A method's draws, each analysed as the report analyses a design, by EFFECTS."""
    random = np.random.default_rng(seed)
    model, every = sweep.model, np.arange(len(sweep.needle))
    weights = {name: model.contrast("memory", "on", "off", within, "attn_type") for name, within in EFFECTS.items()}
    full = {
        name: DesignRegression(model, every, sweep.needle).estimate(effect).value for name, effect in weights.items()
    }
    estimates: dict[str, list[tuple[float, ...]]] = {name: [] for name in EFFECTS}
    for _ in range(draws):
        members = draw(sweep, random)
        fits = [DesignRegression(model, members, sweep.needle[members], pooled=pooled) for pooled in (False, True)]
        saved = 1 - sweep.hours[members].sum() / sweep.hours.sum()
        for name, truth in full.items():
            first, second = (fit.estimate(weights[name]) for fit in fits)
            held = [float(e.low <= truth <= e.high) for e in (first, second)]
            columns = (
                float(first.value * truth > 0),
                held[0],
                float(first.p < 0.05),
                held[1],
                100 * (first.high - first.low),
                saved,
            )
            estimates[name].append(columns)
    return {name: Replayed(*map(float, np.nanmean(rows, axis=0))) for name, rows in estimates.items()}


# --- pruning ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned:
    """State after a rung.

    Number of cells, how many of the BEST at retrieval, the best accuracy (share of digits), complete memory pairs, and
    the rank correlation of that rung's loss with the needle over all cells.
    """

    step: int
    remaining: int
    best: int
    needle: float
    pairs: int
    correlation: float


def pruned(sweep: Published, keep: int, rungs: Sequence[int] = RUNGS) -> list[Pruned]:
    """Successive halving by validation loss: at every rung the best 1 of `keep` go on. Ties at the BEST-th place count."""
    remaining = np.arange(len(sweep.needle))
    least = np.sort(sweep.needle)[-BEST]
    memory = list(sweep.space.axes).index("memory")
    steps = []
    for step in rungs:
        loss = sweep.losses[step]
        remaining = remaining[np.argsort(loss[remaining], kind="stable")][: max(1, round(len(remaining) / keep))]
        points = np.delete(sweep.space.points[remaining], memory, axis=1)
        _, counts = np.unique(points, axis=0, return_counts=True)
        correlation = float(stats.spearmanr(-loss, sweep.needle).statistic)
        best = int((sweep.needle[remaining] >= least).sum())
        steps.append(Pruned(step, len(remaining), best, float(sweep.needle[remaining].max()), int((counts == 2).sum()), correlation))  # fmt: skip
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables as markdown."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.simulations.replay", description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of every method (default {DRAWS})")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.draws < 1 or options.seed < 0:
        parser.error("--draws is at least 1, --seed at least 0")
    began, sweep = time.monotonic(), published()
    print("| Cells | Memory effect | Keeps its sign | Interval holds the value of all 120 | Leaves out zero | Pooled variance would hold it | Width, points | GPU-hours saved |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name, draw in METHODS.items():
        for where, result in replayed(sweep, draw, draws=options.draws, seed=options.seed).items():
            shares = " | ".join(
                f"{100 * share:.1f}%" for share in (result.sign, result.held, result.sure, result.pooled)
            )
            print(f"| {name} | {where} | {shares} | {result.width:.1f} | {100 * result.saved:.0f}% |", flush=True)
    print(f"\n| Kept at a rung | Step | Cells left | Of the best {BEST} | Best that is left | Memory pairs | Rank correlation |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for keep in (2, 3):
        for rung in pruned(sweep, keep):
            columns = f"{rung.step} | {rung.remaining} | {rung.best} | {100 * rung.needle:.1f}% | {rung.pairs} | {rung.correlation:+.2f}"
            print(f"| 1 of {keep} | {columns} |")
    ends = pruned(sweep, 2, (max(sweep.losses),))[0]
    print(f"| 1 of 2, at the end | {ends.step} | {ends.remaining} | {ends.best} | {100 * ends.needle:.1f}% | {ends.pairs} | {ends.correlation:+.2f} |")  # fmt: skip
    best = np.sort(sweep.needle)[::-1]
    print(f"\nThe best {BEST} of 120: {', '.join(f'{100 * accuracy:.1f}' for accuracy in best[:BEST])} (%); {options.draws} draws, {time.monotonic() - began:.0f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
