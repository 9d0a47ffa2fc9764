"""Starting order of cells: exact orders of small grids, and properties of the order by matched pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.contrasts import Contrast
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import Cell, cell_id
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.orchestrator import launch
from atma_sweep.sweep.planning.difference import describe_design
from atma_sweep.sweep.planning.ordering import ordered, pairs_first, predicted_costs, unpaired_contrasts
from atma_sweep.sweep.planning.planner import Task, plan
from atma_sweep.sweep.training import flops
from bench import Bench
from factories import contrast, fingerprint, state_of, trainings
from hypothesis import given, settings
from hypothesis import strategies as st

AXES = ("a", "b", "c")


def make_cell(levels: Mapping[str, str], seed: int = 0) -> Cell:
    """Return a cell with only axes and a seed."""
    name = f"{seed}" + "".join(levels.values())
    return Cell(name, name, CellConfig(seed=seed), dict(levels))


def factorial(*counts: int, seeds: int = 1) -> list[Cell]:
    """Return every combination in grid order: the last axis fastest, seeds innermost."""
    levels = [[str(level) for level in range(count)] for count in counts]
    points = list(itertools.product(*levels))
    return [make_cell(dict(zip(AXES, point, strict=False)), seed) for point in points for seed in range(seeds)]


def matched(cells: Sequence[Cell]) -> set[frozenset[str]]:
    """Return the pairs that differ in one axis only, by comparing every cell with every other."""
    pairs = set()
    for first, second in itertools.combinations(cells, 2):
        differing = [axis for axis in AXES if first.axes.get(axis) != second.axes.get(axis)]
        if len(differing) == 1 and first.config.seed == second.config.seed:
            pairs.add(frozenset((first.id, second.id)))
    return pairs


def names(cells: Sequence[Cell]) -> list[str]:
    return [cell.id for cell in cells]


def test_pairs_order_of_a_factorial() -> None:
    """The first axis changes fastest and seeds slowest, whatever the grid's own order is."""
    cells = factorial(2, 2, 2)
    assert names(pairs_first(cells, cells, AXES)) == ["0000", "0100", "0010", "0110", "0001", "0101", "0011", "0111"]
    cells = factorial(3, 2, seeds=2)
    expected = ["000", "010", "020", "001", "011", "021"]
    assert names(pairs_first(cells, cells, AXES)) == expected + ["1" + name[1:] for name in expected]


def test_pairs_order_puts_finished_partners_first() -> None:
    cells = [*factorial(2, 2, 2), make_cell({"a": "9", "b": "9", "c": "9"})]
    finished = {"0011"}
    wanted = [cell for cell in cells if cell.id not in finished]
    # partners of 0011 along a, b and c, then blocks along a, then what is left, then the one without any
    expected = ["0111", "0001", "0010", "0000", "0100", "0110", "0101", "0999"]
    assert names(pairs_first(wanted, cells, AXES, finished)) == expected


def test_pairs_order_with_an_excluded_corner() -> None:
    cells = [cell for cell in factorial(2, 3) if cell.id not in ("010", "011")]
    assert names(cells) == ["000", "001", "002", "012"]
    assert names(pairs_first(cells, cells, AXES)) == ["002", "012", "000", "001"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_contrasts_without_a_pair_are_named(data: st.DataObject) -> None:
    """Against a loop over all pairs of cells: a line where none agrees, with the axes in which every pair differs."""
    cells = data.draw(
        st.lists(st.sampled_from(factorial(3, 2, 2, seeds=2)), min_size=1, unique_by=lambda cell: cell.id)
    )
    within = data.draw(st.sampled_from([{}, {"b": "1"}]))
    inside = [cell for cell in cells if all(cell.axes[axis] == level for axis, level in within.items())]
    both = [[cell for cell in inside if cell.axes["a"] == level] for level in "10"]
    pairs = list(itertools.product(*both))
    measures = [contrast("a", "1", **within), replace(contrast("a", "1", **within), metric="val_accuracy")]
    lines = unpaired_contrasts(cells, measures)
    if any(x.id[2:] == y.id[2:] and x.config.seed == y.config.seed for x, y in pairs):
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"warning: contrast a: 1 against 0{', b=1' if within else ''} compares no pair of cells: ")
    always = [axis for axis in "bc" if all(x.axes[axis] != y.axes[axis] for x, y in pairs)]
    if not pairs:
        assert f"no cell has level {'0' if both[0] else '1'};" in line
    elif always:
        assert f"they always differ in {' and '.join(always)} too;" in line
    else:
        assert "none agree in all other axes and the seed;" in line


def test_plan_names_a_contrast_without_a_pair() -> None:
    """GatedDeltaNet is compared with rope twice and once with the memory alone, whose cells have another memory."""
    grid = load_grid("rivals-fla")
    (line,) = describe_design(grid, grid.expand(fingerprint), None)
    assert "fla:GatedDeltaNet against none compares no pair of cells: they always differ in memory too;" in line


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pairs_order_properties(data: st.DataObject) -> None:
    """The order is a permutation; the first n cells with a partner complete at least n // 2 new matched pairs."""
    all_cells = factorial(
        *data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), seeds=data.draw(st.integers(1, 2))
    )
    cells = data.draw(st.lists(st.sampled_from(all_cells), min_size=1, unique_by=lambda cell: cell.id))
    finished = set(names(data.draw(st.lists(st.sampled_from(cells), unique_by=lambda cell: cell.id))))
    wanted = [cell for cell in cells if cell.id not in finished]
    out = pairs_first(wanted, cells, AXES, finished)
    assert sorted(names(out)) == sorted(names(wanted))
    have = [cell for cell in cells if cell.id in finished]
    before, lonely = len(matched(have)), set(names(cells)) - {cell for pair in matched(cells) for cell in pair}
    sociable = [cell for cell in out if cell.id not in lonely]
    assert names(out[: len(sociable)]) == names(sociable)
    for count in range(len(sociable) + 1):
        assert len(matched([*have, *sociable[:count]])) - before >= count // 2


def by_contrasts(cells: Sequence[Cell], contrasts: Sequence[Contrast], finished: Collection[str] = ()) -> list[str]:
    for cell in cells:
        cell.config.__dict__["resources"] = cell.config.resources.model_copy(update={"order": "contrasts"})
    tasks = trainings([cell for cell in cells if cell.id not in finished])
    return [task.cell.id for task in ordered(tasks, cells, AXES, {}, finished, contrasts)]


def test_contrasts_order_goes_seed_by_seed() -> None:
    cells = factorial(2, 2, 2, seeds=2)
    contrasts = [contrast("a", "1", b="1"), contrast("c", "1", a="0", b="0")]
    # a pair of the first, a pair of the second, in turn; at both seeds before what no contrast needs
    first = ["010", "110", "000", "001", "011", "111"]
    rest = ["100", "101"]
    wanted = [*(f"0{name}" for name in first), *(f"1{name}" for name in first)]
    out = by_contrasts(cells, contrasts)
    assert out[:12] == wanted
    assert sorted(out[12:]) == sorted(f"{seed}{name}" for seed in "01" for name in rest)
    # whose partner is finished comes before other pairs of its contrast
    assert by_contrasts(cells, contrasts, {"0011"})[:2] == ["0111", "0000"]
    with pytest.raises(GridError, match="is contrasts, but the grid declares none"):
        by_contrasts(cells, [])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_order_is_a_permutation(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(["longest", "pairs", "contrasts", "grid"]))
    cells = data.draw(st.permutations(factorial(2, 2, 2)))
    for cell in cells:
        cell.config.__dict__["resources"] = cell.config.resources.model_copy(update={"order": order})
    tasks = trainings(data.draw(st.lists(st.sampled_from(cells), unique_by=id)))
    out = ordered(tasks, cells, AXES, {}, contrasts=[contrast("b", "1")])
    assert sorted(task.cell.id for task in out) == sorted(task.cell.id for task in tasks)


# --- longest first --------------------------------------------------------------------------------------------------

GRID = "axes: {attn_type: [polar, nope], memory: [off, on], train.tokens: [8192, 4096]}\n"


def shown(tasks: Sequence[Task]) -> list[str]:
    return [" ".join(task.cell.axes.values()) for task in tasks]


def test_longest_order_by_flops_then_slug(cells: Callable[..., list[Cell]]) -> None:
    grid_cells = cells(GRID)
    assert shown(ordered(trainings(grid_cells), grid_cells, [], {})) == [
        "nope on 8192", "polar on 8192", "nope off 8192", "polar off 8192",
        "nope on 4096", "polar on 4096", "nope off 4096", "polar off 4096",
    ]  # fmt: skip
    cost = predicted_costs(trainings(grid_cells), grid_cells, {})
    for cell in grid_cells:
        per_token = flops.training_flops(cell.config.model, 128)
        assert cost[cell.id] == pytest.approx(cell.config.train.tokens * per_token)


def test_longest_order_prefers_measured_speed(cells: Callable[..., list[Cell]]) -> None:
    """Polar without memory was measured ten times slower than the FLOPs of the other measured cell predict."""
    grid_cells = cells(GRID + "seeds: 2\n")
    of = {(*cell.axes.values(), cell.config.seed): cell for cell in grid_cells}
    slow, fast = of["polar", "off", "8192", 0], of["nope", "on", "8192", 0]
    states = {slow.id: state_of(slow, tokens_per_s=100.0), fast.id: state_of(fast, tokens_per_s=1000.0)}
    rest = [cell for cell in grid_cells if cell.id not in states]
    cost = predicted_costs(trainings(rest), grid_cells, states)
    assert cost[of["polar", "off", "8192", 1].id] == pytest.approx(81.92)
    assert cost[of["nope", "on", "8192", 1].id] == pytest.approx(8.192)
    per_token = {cell.id: flops.training_flops(cell.config.model, 128) for cell in grid_cells}
    rate = (100 * per_token[slow.id] + 1000 * per_token[fast.id]) / 2
    different = of["nope", "off", "4096", 1]
    assert cost[different.id] == pytest.approx(4096 * per_token[different.id] / rate)
    assert shown(ordered(trainings(rest), grid_cells, [], states))[0] == "polar off 8192"


def test_predicted_cost_of_resumed_and_evaluated_cells(cells: Callable[..., list[Cell]]) -> None:
    grid_cells = cells("axes: {attn_type: [polar, nope, rope]}\n")
    polar, nope, rope = grid_cells
    states = {
        nope.id: state_of(nope, "interrupted", checkpoint="x", step=120, steps_total=150),
        polar.id: state_of(polar, "interrupted", step=120, steps_total=150),
    }
    tasks = [Task(rope, "evaluate", [("clean", 256), ("val", 0)], "needs-eval"), *trainings([nope, polar])]
    cost = predicted_costs(tasks, grid_cells, states)
    assert cost[nope.id] == pytest.approx(cost[polar.id] / 5)
    evaluation = rope.config.eval
    share = (256 * evaluation.documents + evaluation.validation_tokens) / (3 * rope.config.train.tokens)
    assert cost[rope.id] == pytest.approx(share * cost[polar.id])
    assert shown(ordered(tasks, grid_cells, [], states)) == ["polar", "nope", "rope"]


def test_cells_must_agree_on_the_order(cells: Callable[..., list[Cell]]) -> None:
    grid_cells = cells("include:\n  - {attn_type: nope}\n  - {attn_type: rope, resources.order: pairs}\n")
    with pytest.raises(GridError, match=r"resources\.order: differs between cells \(longest and pairs\)"):
        ordered(trainings(grid_cells), grid_cells, [], {})


def test_order_is_outside_the_id(cells: Callable[..., list[Cell]]) -> None:
    ids = [names(cells(f"{GRID}resources: {{order: {order}}}\n")) for order in ("longest", "pairs", "grid")]
    assert ids[0] == ids[1] == ids[2]
    (cell,) = cells()
    assert cell_id(cell.config) == cell.id


# --- through a launch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "expected"), [
    ("grid", ["polar off", "polar on", "nope off", "nope on"]), ("pairs", ["polar off", "nope off", "polar on", "nope on"]),
    ("longest", ["nope on", "polar on", "nope off", "polar off"]),
])  # fmt: skip
def test_the_plan_of_a_launch(
    write: Any, fake_fingerprint: Any, tmp_path: Path, order: str, expected: list[str]
) -> None:
    grid = load_grid(
        write(
            f"name: g\nextends: micro\naxes: {{attn_type: [polar, nope], memory: [off, on]}}\nresources: {{order: {order}}}\n"
        )
    )
    cells = grid.expand(fake_fingerprint)
    launch_plan = launch.plan(launch.LaunchRequest(grid=grid, cells=cells, runs=tmp_path), None)
    assert shown(launch_plan.tasks) == expected
    assert launch_plan.cells == cells
    assert plan(cells, {}).standings == launch_plan.standings


@pytest.mark.thorough
@pytest.mark.slow
def test_attempts_start_in_that_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(more="resources: {order: pairs}\n")
    bench.edit("[nope, polar]", "[polar, nope]\n  memory: [on, off]")
    bench.launch()
    slugs = [str(row[0]) for row in bench.sql("SELECT slug FROM attempt a JOIN cell c ON c.id = cell_id ORDER BY a.id")]
    assert [slug.split("-")[0] + slug.split("-")[3] for slug in slugs] == ["polarm1", "nopem1", "polarm0", "nopem0"]
