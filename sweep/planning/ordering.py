"""Order in which cells start: longest first, matched pairs first, declared contrasts first, or grid order."""

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
"""The seed as text, then the level of every axis (None where the cell has none)."""


def order_of(cells: Sequence[Cell]) -> Order:
    """Return the `resources.order` that the cells request; "longest" without cells. Raises GridError if they differ."""
    orders = sorted({cell.config.resources.order for cell in cells})
    if len(orders) > 1:
        raise GridError(
            "grid",
            None,
            "resources.order",
            f"differs between cells ({' and '.join(orders)}); give all cells of a grid the same order",
        )
    return orders[0] if orders else "longest"


def ordered(
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    axes: Sequence[str],
    states: Mapping[str, CellState],
    finished: Collection[str] = (),
    contrasts: Sequence[Contrast] = (),
) -> list[Task]:
    """Return the tasks in the order that their cells request.

    "grid" keeps the given order. "longest" sorts by predicted cost, the highest first, then by slug. "pairs" completes
    matched pairs early (see `pairs_first`). "contrasts" completes pairs of the declared contrasts early (see `blocks`).

    Args:
        tasks: Tasks to order, at most one per cell.
        cells: All cells of the launch, in grid order; they must agree on the order.
        axes: Axes of the grid, in the order written.
        states: Cell id -> state in the database, for speeds and checkpoints.
        finished: Ids of cells with all their numbers.
        contrasts: Declared contrasts of the grid, in the order of priority.

    Raises:
        GridError: For cells that request several orders, or an order by contrasts in a grid that declares none.
    """
    order = order_of(cells)
    if order == "contrasts" and not contrasts:
        raise GridError(
            "grid", None, "resources.order", "is contrasts, but the grid declares none; add the key contrasts"
        )
    if order == "grid" or not tasks:
        return list(tasks)
    if order == "contrasts":
        return [task for block in blocks(tasks, cells, contrasts, finished) for task in block]
    if order == "longest":
        cost = predicted_costs(tasks, cells, states)
        return sorted(tasks, key=lambda task: (-cost[task.cell.id], task.cell.slug))
    of_cell = {task.cell.id: task for task in tasks}
    return [of_cell[cell.id] for cell in pairs_first([task.cell for task in tasks], cells, axes, finished)]


def predicted_costs(tasks: Sequence[Task], cells: Sequence[Cell], states: Mapping[str, CellState]) -> dict[str, float]:
    """Return cell id -> predicted cost of its task: seconds if the speed of any cell is known, else FLOPs.

    A training with the same model, recipe and resources as a measured cell takes its tokens at that speed. Other
    trainings take their FLOPs at the median FLOP/s of the measured cells. Evaluations take a third of a training
    token's FLOPs for each token that their missing probes read. Parts with an unknown FLOP count add nothing. Steps
    that a checkpoint holds are not counted.

    Args:
        tasks: Tasks to predict.
        cells: All cells of the launch, among which measured ones are looked for.
        states: Cell id -> state in the database.
    """
    measured = [(cell, speed) for cell in cells if (state := states.get(cell.id)) and (speed := state.tokens_per_s)]
    speeds = {_speed_key(cell): speed for cell, speed in measured}
    rate = median([speed * _flops_per_token(cell) for cell, speed in measured]) if measured else 1.0
    counted: dict[tuple[int, int], float] = {}
    costs_by_cell = {}
    for task in tasks:
        config = task.cell.config
        # most cells share their model section; the cells keep it alive, so its id stays unique
        key = id(config.model), config.train.seq_len
        if key not in counted:
            counted[key] = _flops_per_token(task.cell)
        if task.kind == "evaluate":
            costs_by_cell[task.cell.id] = _probe_tokens(task) * counted[key] / 3 / rate
            continue
        tokens = config.train.tokens * remaining_share(states.get(task.cell.id))
        speed = speeds.get(_speed_key(task.cell)) if speeds else None
        costs_by_cell[task.cell.id] = tokens / speed if speed else tokens * counted[key] / rate
    return costs_by_cell


def _speed_key(cell: Cell) -> tuple[str, ...]:
    config = cell.config
    return tuple(part.model_dump_json() for part in (config.model, config.train, config.resources))


def _flops_per_token(cell: Cell) -> float:
    return flops.estimated_flops(cell.config.model, cell.config.train.seq_len)


def _probe_tokens(task: Task) -> int:
    """Return the number of tokens that an evaluation reads for its missing measurements."""
    probes = {name: bound(name, task.cell.config) for name in {name for name, _ in task.missing}}
    return sum(probes[name].tokens(length) for name, length in task.missing)


def pairs_first(
    wanted: Sequence[Cell], cells: Sequence[Cell], axes: Sequence[str], finished: Collection[str] = ()
) -> list[Cell]:
    """Return the wanted cells in an order that completes matched pairs (cells that differ in one axis only) early.

    First come cells whose partner is finished. Then blocks that differ in the first axis only, the second axis changing
    fastest between blocks and seeds slowest. Then the remaining cells in blocks of the second axis, and so on. Then
    cells whose partners all come earlier, and last those without a partner. After the first n cells that have a
    partner, at least floor(n / 2) new matched pairs are complete. Partners always have the same seed.

    Args:
        wanted: Cells to order; each is returned once.
        cells: All cells of the launch, in grid order, which fix the order of levels.
        axes: Axes of the grid, in the order written; axes of cells that are not among them follow.
        finished: Ids of cells with all their numbers.
    """
    names = list(dict.fromkeys([*axes, *(axis for cell in cells for axis in cell.axes)]))
    points = {cell.id: (str(cell.config.seed), *(level_of(cell, name) for name in names)) for cell in (*cells, *wanted)}
    levels_of = [dict.fromkeys(points[cell.id][index] for cell in cells) for index in range(len(names) + 1)]
    ranks = [{level: rank for rank, level in enumerate(levels)} for levels in levels_of]
    along = range(1, len(names) + 1)

    def rank(cell: Cell) -> tuple[int, ...]:
        """Return the sort key of a cell: seed first, then levels from the last axis to the first."""
        seed, *levels = (ranks[index].get(level, 0) for index, level in enumerate(points[cell.id]))
        return seed, *reversed(levels)

    remaining, out = sorted(wanted, key=rank), list[Cell]()
    for axis in along:
        finished_points = {_without(points[cell.id], axis) for cell in cells if cell.id in finished}
        out += [cell for cell in remaining if _without(points[cell.id], axis) in finished_points]
        remaining = _without_cells(remaining, out)
    for axis in along:
        blocks: dict[CellCoordinates, list[Cell]] = defaultdict(list)
        for cell in remaining:
            blocks[_without(points[cell.id], axis)].append(cell)
        out += [cell for block in blocks.values() if len(block) > 1 for cell in block]
        remaining = _without_cells(remaining, out)
    covered = {_without(points[cell.id], axis) for cell in out for axis in along}
    follow_ups = [cell for cell in remaining if any(_without(points[cell.id], axis) in covered for axis in along)]
    return [*out, *follow_ups, *_without_cells(remaining, follow_ups)]


def blocks(
    tasks: Sequence[Task], cells: Sequence[Cell], contrasts: Iterable[Contrast], finished: Collection[str]
) -> list[list[Task]]:
    """Return the tasks in blocks that should start together, most informative first.

    Each task is in exactly one block. Seed by seed, the declared contrasts take turns; each contributes a pair in its
    turn. A pair is two cells at the contrast's levels that agree in every other axis and the seed, each of which has a
    task or is finished. Among the pairs of a contrast, those with one finished cell come first, then grid order. A
    block holds a pair's tasks that are in no earlier block: one or two. Other tasks follow as single blocks, in their
    given order.

    Args:
        tasks: Tasks to arrange.
        cells: All cells of the launch, in grid order.
        contrasts: Declared contrasts, in the order of priority; without any, each task is a block of its own.
        finished: Ids of cells with all their numbers.
    """
    declared = list(contrasts)
    waiting = {task.cell.id: task for task in tasks}
    if not declared:
        return [[task] for task in tasks]
    names = _axis_names(cells)
    queues = [_pairs(contrast, cells, names) for contrast in declared]
    out: list[list[Task]] = []
    for seed in dict.fromkeys(cell.config.seed for cell in cells):
        turns = []
        for pairs in queues:
            pairs_of_seed = [pair for pair in pairs if pair[0].config.seed == seed]
            runnable = [
                pair for pair in pairs_of_seed if all(cell.id in waiting or cell.id in finished for cell in pair)
            ]
            turns.append(sorted(runnable, key=lambda pair: sum(cell.id in waiting for cell in pair)))
        while any(turns):
            for turn in turns:
                block: list[Task] = []
                # skip pairs that other contrasts have completed
                while turn and not block:
                    block = [waiting.pop(cell.id) for cell in turn.pop(0) if cell.id in waiting]
                if block:
                    out.append(block)
    out += [[task] for task in tasks if task.cell.id in waiting]
    return out


def _axis_names(cells: Sequence[Cell]) -> list[str]:
    """Return the axes of the cells in which the two of a pair must agree, apart from that of the contrast."""
    return list(dict.fromkeys(name for cell in cells for name in (*cell.levels, *cell.axes)))


def unpaired_contrasts(cells: Sequence[Cell], contrasts: Iterable[Contrast]) -> list[str]:
    """Return a line for each declared contrast of which no two cells agree in all other axes and the seed.

    Contrasts of several measures between the same levels share a line, which names the axes that differ in every pair.

    Args:
        cells: All cells of the launch.
        contrasts: Declared contrasts.
    """
    names = _axis_names(cells)
    return list(dict.fromkeys(_unpaired_line(c, cells, names) for c in contrasts if not _pairs(c, cells, names)))


def _unpaired_line(contrast: Contrast, cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Return the warning about a contrast without a pair; arguments as for `_pairs`."""
    reference = _reference(contrast, cells)
    within = {axis: level for axis, level in contrast.within.items() if axis != contrast.axis}
    inside = [cell for cell in cells if all(level_of(cell, axis) == level for axis, level in within.items())]
    compared, references = (
        [cell for cell in inside if level_of(cell, contrast.axis) == level] for level in (contrast.level, reference)
    )
    where = "".join(f", {axis}={level}" for axis, level in within.items())
    line = f"warning: contrast {contrast.axis}: {contrast.level} against {reference}{where} compares no pair of cells: "
    if not compared or not references:
        return f"{line}no cell has level {reference if compared else contrast.level}; change exclude, within or the contrast"
    differing = [
        name
        for name in names
        if name != contrast.axis and not {level_of(c, name) for c in compared} & {level_of(c, name) for c in references}
    ]
    if not differing:
        return f"{line}none agree in all other axes and the seed; change exclude, include or the contrast"
    return f"{line}they always differ in {' and '.join(differing)} too; give both the same, or remove the contrast"


def _reference(contrast: Contrast, cells: Sequence[Cell]) -> str | None:
    """Return the contrast's reference level, or the default one of the cells' levels; None if they lack the axis."""
    levels = list(dict.fromkeys(level for cell in cells if (level := level_of(cell, contrast.axis)) is not None))
    return contrast.reference or (reference_level(levels) if levels else None)


def _pairs(contrast: Contrast, cells: Sequence[Cell], names: Sequence[str]) -> list[tuple[Cell, Cell]]:
    """Return the (reference cell, compared cell) pairs of a contrast, in grid order.

    Without a reference, the default one among the levels of the cells is taken. Cells outside `within` are left out.

    Args:
        contrast: The contrast.
        cells: Cells of all seeds; the two cells of a pair have the same seed.
        names: Axes in which the cells of a pair must agree, that of the contrast aside.
    """
    reference = _reference(contrast, cells)
    if reference is None:
        return []
    pairs_by_rest: dict[tuple[str | None, ...], dict[str, Cell]] = {}
    for cell in cells:
        level = level_of(cell, contrast.axis)
        if level not in (contrast.level, reference) or level is None:
            continue
        if all(level_of(cell, axis) == word for axis, word in contrast.within.items()):
            coordinates = (str(cell.config.seed), *(level_of(cell, name) for name in names if name != contrast.axis))
            pairs_by_rest.setdefault(coordinates, {})[level] = cell
    return [(pair[reference], pair[contrast.level]) for pair in pairs_by_rest.values() if len(pair) == 2]


def _without(point: CellCoordinates, axis: int) -> CellCoordinates:
    """Return the coordinates with those of one axis masked, so that cells which differ only there compare equal."""
    return (*point[:axis], f"any of axis {axis}", *point[axis + 1 :])


def _without_cells(cells: Sequence[Cell], gone: Sequence[Cell]) -> list[Cell]:
    removed_ids = {cell.id for cell in gone}
    return [cell for cell in cells if cell.id not in removed_ids]
