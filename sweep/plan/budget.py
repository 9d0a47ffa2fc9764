"""Which attempts of a plan fit into a budget of hours, best first for the contrasts that the grid declares."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

from ...results.contrasts import Contrast, reference_level
from ...results.store.store import Store
from ..errors import SweepError
from ..grid.cell import Cell
from .planner import Budget, Plan, Task, level_of
from .price import Prices, unit_of


def rate_of(text: str | None) -> float | None:
    """Money of an hour. Raises SweepError for what is none."""
    if text is None:
        return None
    number, _, hour = text.strip().lstrip("$€£").partition("/")
    with contextlib.suppress(ValueError):
        if hour.strip() in ("", "h", "hour") and 0 < float(number) < float("inf"):
            return float(number)
    raise SweepError(f"--rate {text!r} must be an amount above 0 of money an hour, such as 2.50/h")


def hours_of(text: str, rate: float | None) -> float:
    """The hours that `--budget 40h` means, or with a rate `100$`. Raises SweepError."""
    word = text.strip()
    money = word.strip("$€£") != word
    number = word.strip("$€£ ").removesuffix("h").strip()
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf") or (money and "h" in word):
        raise SweepError(f"--budget {text!r} must be hours above 0, such as 40h, or with --rate money, such as 100$")
    if money and rate is None:
        raise SweepError(f"--budget {text} is money; say what an hour costs with --rate, such as --rate 2.50/h")
    return amount / rate if money and rate is not None else amount


def spent(store: Store | None, cells: Sequence[Cell]) -> float:
    """Hours that attempts of these cells took so far; those that came with a bundle cost nothing here."""
    if store is None:
        return 0.0
    shares = {cell.id: cell.config.resources.gpus or float(cell.config.resources.cpus) for cell in cells}
    total = 0.0
    for attempt in store.attempts_of(shares):
        if not attempt.imported:
            end = attempt.finished_at or attempt.heartbeat_at
            total += (end - attempt.started_at).total_seconds() / 3600 * shares[attempt.cell_id]
    return total


def within(
    plan: Plan, allowed: float, used: float, prices: Prices, contrasts: Iterable[Contrast], finished: Collection[str]
) -> tuple[list[Task], Budget]:
    """The tasks that fit, in the order of what they tell, and what is left.

    A block that does not fit is left, and a smaller one after it may still be taken.
    """
    costs = {id(task): prices.of(task).hours.likely for task in plan.tasks}
    room = max(0.0, allowed - used)
    taken: list[Task] = []
    left: list[Task] = []
    for block in blocks(plan.tasks, plan.cells, contrasts, finished):
        cost = sum(costs[id(task)] for task in block)
        if cost <= room:
            room -= cost
            taken += block
        else:
            left += block
    hours, rest = (sum(costs[id(task)] for task in some) for some in (taken, left))
    return taken, Budget(allowed, unit_of(plan.tasks), used, len(taken), hours, left, rest)


def blocks(
    tasks: Sequence[Task], cells: Sequence[Cell], contrasts: Iterable[Contrast], finished: Collection[str]
) -> list[list[Task]]:
    """The tasks in blocks, each of which belongs together, best first.

    Seed by seed: one pair of each declared contrast in turn, in their order, a pair being the two cells at the
    contrast's levels that agree in everything else; among the pairs of a contrast first those of which one cell is
    finished, then as the grid lists them. Then what is in no pair, one by one; without contrasts that is all, in the
    order that the tasks have.
    """
    declared = list(contrasts)
    waiting = {task.cell.id: task for task in tasks}
    if not declared:
        return [[task] for task in tasks]
    names = list(dict.fromkeys(name for cell in cells for name in (*cell.levels, *cell.axes)))
    queues = [_pairs(one, cells, names) for one in declared]
    out: list[list[Task]] = []
    for seed in dict.fromkeys(cell.config.seed for cell in cells):
        turns = []
        for pairs in queues:
            mine = [pair for pair in pairs if pair[0].config.seed == seed]
            able = [pair for pair in mine if all(cell.id in waiting or cell.id in finished for cell in pair)]
            turns.append(sorted(able, key=lambda pair: sum(cell.id in waiting for cell in pair)))
        while any(turns):
            for turn in turns:
                block: list[Task] = []
                # the next pair that is not complete already by pairs of other contrasts
                while turn and not block:
                    block = [waiting.pop(cell.id) for cell in turn.pop(0) if cell.id in waiting]
                if block:
                    out.append(block)
    out += [[task] for task in tasks if task.cell.id in waiting]
    return out


def _pairs(one: Contrast, cells: Sequence[Cell], names: Sequence[str]) -> list[tuple[Cell, Cell]]:
    """The pairs of cells that the contrast compares, in the grid's order."""
    levels = list(dict.fromkeys(level for cell in cells if (level := level_of(cell, one.axis)) is not None))
    if not levels:
        return []
    reference = one.reference if one.reference is not None else reference_level(levels)
    found: dict[tuple[str | None, ...], dict[str, Cell]] = {}
    for cell in cells:
        level = level_of(cell, one.axis)
        if level not in (one.level, reference) or level is None:
            continue
        if all(level_of(cell, axis) == word for axis, word in one.within.items()):
            rest = (str(cell.config.seed), *(level_of(cell, name) for name in names if name != one.axis))
            found.setdefault(rest, {})[level] = cell
    return [(some[reference], some[one.level]) for some in found.values() if len(some) == 2]
