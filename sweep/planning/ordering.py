"""In which order cells are started: the longest first, matched pairs first, declared contrasts first, or as the grid lists them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from ...results.contrasts import Contrast, reference_level
from ...results.store.records import CellState
from ..errors import GridError
from ..grid.cell import Cell
from ..probes import bound
from ..training import flops
from .planner import Task, level_of, remaining_share

Order = Literal["longest", "pairs", "contrasts", "grid"]
CellCoordinates = tuple[str | None, ...]
"""The seed, then the level of every axis."""


def order_of(cells: Sequence[Cell]) -> Order:
    """The order that the cells ask for. Raises GridError when they ask for several, since one launch has one order."""
    words = sorted({cell.config.resources.order for cell in cells})
    if len(words) > 1:
        raise GridError("grid", None, "resources.order", f"is {' and '.join(words)}; give all cells of a grid the same")
    return words[0] if words else "longest"


def ordered(
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    axes: Sequence[str],
    states: Mapping[str, CellState],
    finished: Collection[str] = (),
    contrasts: Sequence[Contrast] = (),
) -> list[Task]:
    """The tasks in the order that their cells ask for.

    `cells` are all that are launched, in grid order; `axes` those of the grid in the order written; `finished` the ids of
    cells that have all their numbers; `contrasts` what the grid declares. Raises GridError for an order by contrasts without any.
    """
    order = order_of(cells)
    if order == "contrasts" and not contrasts:
        raise GridError("grid", None, "resources.order", "is contrasts, and the grid declares none; `contrasts:` does")
    if order == "grid" or not tasks:
        return list(tasks)
    if order == "contrasts":
        return [task for block in blocks(tasks, cells, contrasts, finished) for task in block]
    if order == "longest":
        cost = costs(tasks, cells, states)
        return sorted(tasks, key=lambda task: (-cost[task.cell.id], task.cell.slug))
    of_cell = {task.cell.id: task for task in tasks}
    return [of_cell[cell.id] for cell in pairs_first([task.cell for task in tasks], cells, axes, finished)]


def costs(tasks: Sequence[Task], cells: Sequence[Cell], states: Mapping[str, CellState]) -> dict[str, float]:
    """Predicted cost by cell id: seconds as soon as any cell's speed is known, FLOPs until then.

    A cell whose like (same model, recipe and resources, another seed) was measured takes its tokens at that speed; another
    one its FLOPs at the median FLOP/s of those measured. A part that does not say its FLOPs counts for none of them. Steps
    that a checkpoint holds are left out.
    """
    measured = [(cell, speed) for cell in cells if (state := states.get(cell.id)) and (speed := state.tokens_per_s)]
    speeds = {_alike(cell): speed for cell, speed in measured}
    rate = median([speed * _per_token(cell) for cell, speed in measured]) if measured else 1.0
    counted: dict[tuple[int, int], float] = {}
    found = {}
    for task in tasks:
        config = task.cell.config
        # most cells of a grid share their model section, which the cells keep alive
        key = id(config.model), config.train.seq_len
        if key not in counted:
            counted[key] = _per_token(task.cell)
        if task.kind == "evaluate":
            found[task.cell.id] = _probing(task) * counted[key] / 3 / rate
            continue
        tokens = config.train.tokens * remaining_share(states.get(task.cell.id))
        speed = speeds.get(_alike(task.cell)) if speeds else None
        found[task.cell.id] = tokens / speed if speed else tokens * counted[key] / rate
    return found


def _alike(cell: Cell) -> tuple[str, ...]:
    config = cell.config
    return tuple(part.model_dump_json() for part in (config.model, config.train, config.resources))


def _per_token(cell: Cell) -> float:
    return flops.estimated_flops(cell.config.model, cell.config.train.seq_len)


def _probing(task: Task) -> int:
    """Tokens that an evaluation reads."""
    probes = {name: bound(name, task.cell.config) for name in {name for name, _ in task.missing}}
    return sum(probes[name].tokens(length) for name, length in task.missing)


def pairs_first(
    wanted: Sequence[Cell], cells: Sequence[Cell], axes: Sequence[str], finished: Collection[str] = ()
) -> list[Cell]:
    """The wanted cells so that matched pairs, which differ in the level of one axis and nothing else, are complete early.

    First cells whose partner is finished. Then blocks that differ in the first axis only, the second axis changing
    fastest from block to block and seeds slowest; then what is left in blocks of the second axis, and so on. Then cells
    whose partners have all gone before, and last those without any partner. So after the first n cells that have a
    partner at least floor(n / 2) matched pairs are complete that were not before.
    """
    names = list(dict.fromkeys([*axes, *(axis for cell in cells for axis in cell.axes)]))
    points = {cell.id: (str(cell.config.seed), *(level_of(cell, name) for name in names)) for cell in (*cells, *wanted)}
    levels_of = [dict.fromkeys(points[cell.id][place] for cell in cells) for place in range(len(names) + 1)]
    ranks = [{level: rank for rank, level in enumerate(levels)} for levels in levels_of]
    along = range(1, len(names) + 1)

    def rank(cell: Cell) -> tuple[int, ...]:
        seed, *levels = (ranks[place].get(level, 0) for place, level in enumerate(points[cell.id]))
        return seed, *reversed(levels)

    left, out = sorted(wanted, key=rank), list[Cell]()
    for axis in along:
        known = {_without(points[cell.id], axis) for cell in cells if cell.id in finished}
        out += [cell for cell in left if _without(points[cell.id], axis) in known]
        left = _less(left, out)
    for axis in along:
        blocks: dict[CellCoordinates, list[Cell]] = defaultdict(list)
        for cell in left:
            blocks[_without(points[cell.id], axis)].append(cell)
        out += [cell for block in blocks.values() if len(block) > 1 for cell in block]
        left = _less(left, out)
    gone = {_without(points[cell.id], axis) for cell in out for axis in along}
    late = [cell for cell in left if any(_without(points[cell.id], axis) in gone for axis in along)]
    return [*out, *late, *_less(left, late)]


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


def _without(point: CellCoordinates, axis: int) -> CellCoordinates:
    """The point with that axis taken out of it; its place is kept, so that other axes give other points."""
    return (*point[:axis], f"any of axis {axis}", *point[axis + 1 :])


def _less(cells: Sequence[Cell], gone: Sequence[Cell]) -> list[Cell]:
    known = {cell.id for cell in gone}
    return [cell for cell in cells if cell.id not in known]
