"""Which attempts of a plan fit into a budget of hours, best first for the contrasts that the grid declares."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

from ...results.contrasts import Contrast
from ...results.store.store import Store
from ..errors import SweepError
from ..grid.cell import Cell
from .cost_estimate import Prices, unit_of
from .ordering import blocks
from .planner import Budget, Plan, Task


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
