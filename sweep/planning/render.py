"""Text of the difference between a grid and the database, and of a plan's price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...results.console.quantities import format_duration
from .cost_estimate import ATTEMPT_PHASES, Bill, PriceGroup
from .difference import Change, GridDifference
from .planner import Plan
from .speed_model import RANK_EFFICIENCY, ThreePointEstimate, sum_estimates

STANDING_LABELS = {"needs-eval": "needs evaluation", "weights gone": "weights gone"}
MAX_LINES = 12
"""Limit on the lines of one kind, unless all are requested."""


def difference_lines(difference: GridDifference, *, list_all: bool) -> Iterator[str]:
    """Yield the lines of a difference: groups of cells with their counts, then the changes since the last launch.

    A group's line has the distinct notes of its cells if there are at most three. The line of "excluded" counts the
    cells that rules drop and has the rules as notes. A sweep without a revision ends with "never launched before", an
    unchanged one with "nothing changed since revision N". Inherited changes are marked as from a base or a default.

    Args:
        difference: The difference.
        list_all: True lists each cell and every change; False lists no cells and limits the changes to 12 (MAX_LINES).
    """
    for word, cells in difference.groups.items():
        notes = {cell.note for cell in cells} if word != "excluded" else set(difference.rules)
        note = "; ".join(sorted(notes - {""})) if len(notes) <= 3 else ""
        yield f"  {STANDING_LABELS.get(word, word):<16} {len(cells) if word != 'excluded' else sum(difference.rules.values()):>6}  {note}".rstrip()
        if list_all:
            yield from (
                f"    {cell.id or '-':<12}  {cell.slug}" + (f"  {cell.note}" if cell.note else "") for cell in cells
            )
    if difference.revision is None:
        yield "never launched before"
        return
    changes = [
        *difference.changes,
        *((f"{key} (from a base or a default)", a, b) for key, a, b in difference.inherited),
    ]
    if not changes and not difference.axes:
        yield f"nothing changed since revision {difference.revision}"
        return
    yield f"changed since revision {difference.revision}:"
    yield from (f"  {sentence}" for sentence in difference.axes)
    shown = changes if list_all else changes[:MAX_LINES]
    yield from (f"  {key}: {_value(old)} -> {_value(new)}" for key, old, new in shown)
    if len(shown) < len(changes):
        yield f"  and {len(changes) - len(shown)} more; --list shows all"


def cell_lines(plan: Plan, *, list_all: bool) -> Iterator[str]:
    """Yield a line per cell with its id, standing and slug, or if there are many, a line per standing.

    A cell that a budget leaves out is marked in its line. Lines per standing have the number of cells and the slugs of
    the first and the last one; standings are in the order in which they first occur.

    Args:
        plan: The plan.
        list_all: True yields a line per cell, however many there are; False at most 12 (MAX_LINES).
    """
    if list_all or len(plan.cells) <= MAX_LINES:
        deferred = {task.cell.id for task in plan.budget.deferred} if plan.budget is not None else set[str]()
        for cell in plan.cells:
            mark = "  over budget" if cell.id in deferred else ""
            yield f"{cell.id}  {plan.standings[cell.id]:<12} {cell.slug}{mark}"
        return
    slugs: dict[str, list[str]] = {}
    for cell in plan.cells:
        slugs.setdefault(plan.standings[cell.id], []).append(cell.slug)
    for standing, alike in slugs.items():
        ends = " to ".join(dict.fromkeys((alike[0], alike[-1])))
        yield f"{len(alike):>6,} {STANDING_LABELS.get(standing, standing):<16} {ends}"
    yield "--list shows every cell"


def _value(value: object) -> str:
    """Return a setting's value as text: None is "none", booleans are "on" and "off", lists are in brackets."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def difference_json(difference: GridDifference) -> dict[str, Any]:
    """Return the difference as JSON values.

    Keys: groups (group -> cells as {id, slug, note}), excluded_by (rule text -> number of cells), revision, changes
    ({key, old, new, from}, where from is "grid" or "inherited") and axes (sentences).
    """
    return {
        "groups": {word: [vars(cell) for cell in cells] for word, cells in difference.groups.items()},
        "excluded_by": dict(difference.rules),
        "revision": difference.revision,
        "changes": [_as_row(change, "grid") for change in difference.changes]
        + [_as_row(change, "inherited") for change in difference.inherited],
        "axes": list(difference.axes),
    }


def _as_row(change: Change, source: str) -> dict[str, object]:
    return {"key": change[0], "old": change[1], "new": change[2], "from": source}


# --- the price ----------------------------------------------------------------------------------------------------------


def price_line(bill: Bill) -> str:
    """Return the price as one line: hours, duration, machine, money if a rate is set, and attempts per basis.

    Hours, duration and money read "likely (low to high)". Without attempts the line says that nothing is to do.
    """
    if not bill.groups:
        return "price: nothing to do"
    finish = bill.finish
    times = f"{format_duration(finish.likely)} ({format_duration(finish.low)} to {format_duration(finish.high)})"
    money = f", {_amount(bill.money)} at {bill.hourly_rate:g} per hour" if bill.money is not None else ""
    return (
        f"price: {_amount(bill.hours)} {bill.unit}, finishes in {times} on {_where(bill)}{money}; "
        f"{_sources(bill.sources)}"
    )


def price_lines(bill: Bill, *, list_all: bool) -> Iterator[str]:
    """Yield the lines of a price: summary, hours by phase, energy, groups of attempts, and cautions.

    Only the summary is yielded without attempts. Group lines have the likely hours, attempts, tokens/s, basis, and the
    slug of one cell. With several GPUs, the duration by GPUs per cell follows. Cautions follow for incomplete FLOP counts and for prices from FLOPs.

    Args:
        bill: The price.
        list_all: True lists all groups; False folds those that would read alike, and limits them to 12 (MAX_LINES).
    """
    yield price_line(bill)
    if not bill.groups:
        return
    parts = ", ".join(f"{part} {_number(bill.parts[part].likely)}" for part in ATTEMPT_PHASES if bill.parts[part].high)
    yield f"  {bill.unit} by phase: {parts}"
    if bill.kwh is not None:
        watts_basis = (
            "assumed: the maximum of the board; --watts sets another" if bill.assumed_watts else "from --watts"
        )
        yield f"  energy: {_amount(bill.kwh)} kWh at {bill.watts:g} W per GPU ({watts_basis})"
    elif bill.unit == "core-hours":
        yield "  energy: n/a for a CPU"
    else:
        yield f"  energy: n/a, power of {bill.machine} unknown; --watts sets it"
    groups = bill.groups if list_all else _folded(bill.groups)
    shown = groups if list_all else groups[:MAX_LINES]
    yield f"  {'hours':>8}  {'attempts':>8}  {'tokens/s':>9}  {'source':<10}  example"
    for group in shown:
        yield (
            f"  {_number(group.hours.likely):>8}  {group.attempts:>8,}  {group.tokens_per_s:>9,.0f}  {group.source:<10}  "
            f"{group.slug}{'' if group.kind == 'train' else ' (evaluation)'}"
        )
    if len(shown) < len(groups):
        yield f"  and {len(groups) - len(shown)} more; --list shows all"
    yield from _choice_lines(bill)
    for gap in dict.fromkeys(group.silent for group in bill.groups if group.silent):
        yield f"  the price is too low, because {gap}; --calibrate measures it"
    if "FLOPs" in bill.sources:
        yield (
            "  from FLOPs: the time may be off by a factor of several in either direction; --calibrate times a few steps of "
            "each kind of cell on this machine"
        )


def _choice_lines(bill: Bill) -> Iterator[str]:
    """Yield a line per number of GPUs per cell, the remedy if another number ends earlier, and the assumption.

    Nothing for a plan on one GPU.
    """
    if any(group.assumed_ranks for group in bill.groups) or len(bill.choices) > 1:
        share = f"{RANK_EFFICIENCY.likely:.0%} ({RANK_EFFICIENCY.low:.0%} to {RANK_EFFICIENCY.high:.0%})"
        yield f"  several GPUs per cell: assumed {share} of N times the speed of one GPU where no attempt on N was measured"
    for choice in bill.choices:
        name = f"{choice.gpus} per cell" if choice.gpus else "as in the grid"
        yield (
            f"    {name:<15} finishes in {format_duration(choice.finish_s)}, {_number(choice.hours)} GPU-hours"
            + (" (this plan)" if choice.is_planned else "")
        )
    planned = next((choice for choice in bill.choices if choice.is_planned), None)
    best = min(bill.choices, key=lambda choice: choice.finish_s, default=None)
    if planned is not None and best is not None and best.finish_s < 0.98 * planned.finish_s:
        yield f"    -> --set resources.gpus={best.gpus} ends earlier"


def _folded(groups: Sequence[PriceGroup]) -> list[PriceGroup]:
    """Return the groups with those merged whose lines would read alike except for attempts and example.

    A merged group has the slug of its first group and the sums of attempts and hours; order is that of first groups.
    """
    folded: dict[tuple[str, ...], PriceGroup] = {}
    for group in groups:
        texts = (group.source, group.kind, f"{group.tokens_per_s:.0f}", _number(group.hours.likely / group.attempts))
        before = folded.get(texts)
        folded[texts] = group if before is None else replace(
            before, attempts=before.attempts + group.attempts, hours=sum_estimates([before.hours, group.hours])
        )  # fmt: skip
    return list(folded.values())


def _where(bill: Bill) -> str:
    if not bill.gpus:
        return bill.machine
    return f"{bill.gpus} x {bill.machine}" + (f" ({bill.machine_reason})" if bill.machine_reason else "")


def _sources(sources: Mapping[str, int]) -> str:
    labels = {"measured": "measured", "calibrated": "calibrated", "FLOPs": "from FLOPs"}
    return "attempts: " + ", ".join(f"{count} {labels[word]}" for word, count in sources.items())


def _amount(estimate: ThreePointEstimate | None) -> str:
    assert estimate is not None
    return f"{_number(estimate.likely)} ({_number(estimate.low)} to {_number(estimate.high)})"


def _number(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
