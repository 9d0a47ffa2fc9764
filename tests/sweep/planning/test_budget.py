"""Budgets: properties of the order of blocks, and small cases by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import factories
import pytest
from atma_sweep.results.contrasts import Contrast
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.planning import cost_estimate, ordering
from atma_sweep.sweep.planning.planner import Budget, Plan, Task
from factories import trainings

AXES = ("train.a", "train.b", "train.c")


def cell(levels: Sequence[str], seed: int = 0) -> Cell:
    name = "".join(levels) + f"-s{seed}"
    return Cell(name, name, CellConfig(seed=seed), dict(zip(AXES, levels, strict=False)))


def factorial(*counts: int, seeds: int = 1) -> list[Cell]:
    every = itertools.product(*(range(count) for count in counts))
    return [cell([str(n) for n in point], seed) for point in every for seed in range(seeds)]


def contrast(axis: str, level: str, reference: str, **within: str) -> Contrast:
    inside = {f"train.{name}": word for name, word in within.items()}
    return factories.contrast(f"train.{axis}", level, reference, **inside)


def blocks(cells: Sequence[Cell], contrasts: Sequence[Contrast], done: Sequence[str] = ()) -> list[list[str]]:
    tasks = trainings([cell for cell in cells if cell.id not in done])
    return [[task.cell.id for task in block] for block in ordering.blocks(tasks, cells, contrasts, done)]


def pairs(cells: Sequence[Cell], contrast: Contrast) -> set[frozenset[str]]:
    """Return the pairs of a contrast, by comparing every cell with every other."""
    pair_ids = set()
    for low, high in itertools.permutations(cells, 2):
        levels = {name: (low.axes[name], high.axes[name]) for name in low.axes}
        inside = all(low.axes[name] == word for name, word in contrast.within.items())
        apart = [name for name, (a, b) in levels.items() if a != b]
        alike = inside and low.config.seed == high.config.seed
        if alike and apart == [contrast.axis] and levels[contrast.axis] == (contrast.reference, contrast.level):
            pair_ids.add(frozenset((low.id, high.id)))
    return pair_ids


def test_blocks_without_contrasts_keep_the_order() -> None:
    cells = factorial(2, 2)
    assert blocks(cells, []) == [[cell.id] for cell in cells]


def test_blocks_put_pairs_of_each_seed_first() -> None:
    cells = factorial(3, 2, seeds=2)
    assert blocks(cells, [contrast("a", "2", "0", b="1")]) == [
        ["01-s0", "21-s0"], ["01-s1", "21-s1"],
        *([f"{name}-s{seed}"] for name in ("00", "10", "11", "20") for seed in (0, 1)),
    ]  # fmt: skip


def test_blocks_alternate_between_contrasts() -> None:
    cells = factorial(2, 2)
    both = [contrast("a", "1", "0"), contrast("b", "1", "0")]
    # a: 00-10, 01-11; b: 00-01 lacks 01 after the first, and so completes both
    assert blocks(cells, both) == [["00-s0", "10-s0"], ["01-s0"], ["11-s0"]]
    assert blocks(cells, both[:1], done=["11-s0"]) == [["01-s0"], ["00-s0", "10-s0"]]


def test_blocks_properties_on_random_grids() -> None:
    draw = random.Random(0)
    for _ in range(60):
        cells = factorial(draw.randint(2, 3), draw.randint(1, 3), draw.randint(1, 3), seeds=draw.randint(1, 3))
        cells = [cell for cell in cells if draw.random() < 0.8]
        done = [cell.id for cell in cells if draw.random() < 0.2]
        wanted = [contrast("a", "1", "0"), contrast("b", "1", "0", a="1")][: draw.randint(1, 2)]
        order = blocks(cells, wanted, done)
        flat = [name for block in order for name in block]
        assert sorted(flat) == sorted(cell.id for cell in cells if cell.id not in done)
        every = set().union(*(pairs(cells, contrast) for contrast in wanted))
        paired = {name for pair in every for name in pair}
        have = set(done)
        seeds = []
        for block in order:
            have |= set(block)
            if paired & set(block):
                # each block completes a pair of its own
                assert any(pair <= have and pair & set(block) for pair in every)
                seeds.append(int(block[0].rpartition("s")[2]))
        listed = list(dict.fromkeys(cell.config.seed for cell in cells))
        assert seeds == sorted(seeds, key=listed.index)
        first_alone = next((n for n, block in enumerate(order) if not paired & set(block)), len(order))
        assert not any(paired & set(block) for block in order[first_alone:])


class Flat:
    """Prices of made-up cells: hours by the first letter of a cell."""

    def remaining_cost(self, task: Task) -> Flat:
        self.likely = float(task.cell.slug[0]) + 1
        self.hours = self
        return self


@pytest.mark.parametrize(("allowed", "used", "expected", "deferred"), [
    (100, 0, ["00", "10", "01", "11"], 0.0), (3, 0, ["00", "10"], 3.0), (2.9, 0, [], 6.0), (9, 4, ["00", "10"], 3.0),
    (3, 5, [], 6.0), (6, 0, ["00", "10", "01", "11"], 0.0),
])  # fmt: skip
def test_budget_selects_pairs_that_fit(allowed: float, used: float, expected: list[str], deferred: float) -> None:
    """The cells of a pair cost one and two hours."""
    cells = factorial(2, 2)
    tasks = trainings(cells)
    selected, budget = cost_estimate.select_within(
        Plan(tasks, {}, cells), allowed, used, Flat(), [contrast("a", "1", "0")], ()
    )  # type: ignore[arg-type]
    assert [task.cell.id.removesuffix("-s0") for task in selected] == expected
    assert (budget.deferred_hours, budget.cells, budget.spent) == (deferred, len(expected), used)
    assert len(budget.describe()) == (2 if deferred else 1)


def test_budget_skips_a_block_that_is_too_large() -> None:
    cells = [cell(["8"]), cell(["0"])]
    tasks = trainings(cells)
    selected, budget = cost_estimate.select_within(Plan(tasks, {}, cells), 5, 0, Flat(), [], ())  # type: ignore[arg-type]
    assert ([task.cell.id for task in selected], budget.deferred_hours) == (["0-s0"], 9.0)
    assert isinstance(budget, Budget)


@pytest.mark.parametrize(("text", "rate", "hours"), [
    ("40h", None, 40), ("40", None, 40), ("0.5 h", None, 0.5), ("100$", 2.5, 40), ("$100", 2.5, 40), ("1e3h", 2.5, 1000),
])  # fmt: skip
def test_budget_in_hours_and_money(text: str, rate: float | None, hours: float) -> None:
    assert cost_estimate.parse_budget(text, rate) == pytest.approx(hours)


@pytest.mark.parametrize(("text", "message"), [
    ("0h", "must be hours above 0"), ("-1", "must be hours above 0"), ("much", "must be hours above 0"), ("infh", "must be"),
    ("nan", "must be"), ("5$h", "must be"), ("5$", "add the price of a GPU-hour"),
])  # fmt: skip
def test_budget_rejects_invalid_text(text: str, message: str) -> None:
    with pytest.raises(SweepError, match=message):
        cost_estimate.parse_budget(text, None)


@pytest.mark.parametrize(("text", "rate"), [(None, None), ("2.50/h", 2.5), ("2.5", 2.5), ("$3/hour", 3.0)])
def test_rate_is_parsed(text: str | None, rate: float | None) -> None:
    assert cost_estimate.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "x/h", "0/h", "-2", "2/day", "nan", "inf/h"])
def test_rate_rejects_invalid_text(text: str) -> None:
    with pytest.raises(SweepError, match="money per hour above 0"):
        cost_estimate.parse_rate(text)
