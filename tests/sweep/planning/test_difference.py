"""Differences between a grid and the database, against comparisons that are independent of grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import Grid, load_grid
from atma_sweep.sweep.planning import difference, planner, render
from atma_sweep.sweep.planning.difference import GridDifference
from atma_sweep.sweep.probes import requested
from factories import OWNER

Write = Callable[..., Path]
FIRST = """
name: g
extends: micro
axes:
  attn_type: [nope, polar]
set:
  train: {clip: 1.0}
  eval: {lengths: [128, 256]}
"""


@pytest.fixture
def read(write: Write, fake_fingerprint: Any) -> Callable[..., tuple[Grid, list[Cell]]]:
    def reading(text: str, *, sets: Sequence[str] = ()) -> tuple[Grid, list[Cell]]:
        grid = load_grid(write(text), sets=sets, rename="other" if sets else None)
        return grid, grid.expand(fake_fingerprint)

    return reading


def launch(store: Store, grid: Grid, cells: Sequence[Cell]) -> None:
    """Record the grid as a launch does."""
    pairs = sorted({pair for cell in cells for pair in requested(cell.config.eval)})
    store.record_revision(
        grid.name, grid_text=grid.document.text, grid_file="g.yaml",
        options={"requested": [list(pair) for pair in pairs], "set": {}}, cells=[planner.to_record(cell) for cell in cells],
    )  # fmt: skip


def between(store: Store | None, grid: Grid, cells: Sequence[Cell]) -> GridDifference:
    states = store.states({cell.id for cell in cells}) if store is not None else {}
    return difference.diff(grid, planner.plan(cells, states), cells, store)


def counts(difference: GridDifference) -> dict[str, int]:
    return {word: len(cells) for word, cells in difference.groups.items()}


def attempt(store: Store, cell: Cell, state: str, *, step: int = 0) -> None:
    attempt_id = store.start_attempt(cell.id, owner=OWNER, fence=1, steps_total=150)
    if step:
        recorder = DatabaseRecorder(store, attempt_id.id, 1)
        recorder.progress(step, 150, 1.0, 1.0, "training")
        recorder.checkpoint("a/b")
    if state != "running":
        store.finish_attempt(attempt_id.id, 1, state, weights="a/w.safetensors" if state == "done" else None)


def test_difference_of_a_grid_never_launched(store: Store, read: Any) -> None:
    grid, cells = read(FIRST)
    for database in (None, store):
        difference = between(database, grid, cells)
        assert (counts(difference), difference.revision, difference.changes, difference.axes) == (
            {"new": 2},
            None,
            (),
            (),
        )
        assert list(render.difference_lines(difference, list_all=False)) == [
            "  new                   2",
            "never launched before",
        ]


def test_difference_groups_cells_by_pending_action(store: Store, read: Any) -> None:
    text = FIRST.replace("axes:", "seeds: 3\naxes:").replace("[nope, polar]", "[nope, polar, rope]")
    text += "exclude:\n  - {attn_type: rope}\n"
    grid, cells = read(text)
    launch(store, grid, cells)
    attempt(store, cells[0], "done")
    attempt(store, cells[1], "interrupted", step=30)
    attempt(store, cells[2], "interrupted")
    attempt(store, cells[3], "failed", step=75)
    attempt(store, cells[4], "diverged")
    difference = between(store, grid, cells)
    assert counts(difference) == {
        "needs-eval": 1, "resumable": 1, "interrupted": 1, "failed": 1, "diverged": 1, "new": 1, "excluded": 1,
    }  # fmt: skip
    assert [cell.note for cell in difference.groups["resumable"]] == ["20% of its steps are done"]
    assert [cell.note for cell in difference.groups["failed"]] == ["50% of its steps are done"]
    assert difference.rules == {"exclude[0] (attn_type: rope)": 3}
    assert {cell.id for word, group in difference.groups.items() for cell in group if word != "excluded"} == {
        c.id for c in cells
    }
    lines = list(render.difference_lines(difference, list_all=False))
    assert "  excluded              3  exclude[0] (attn_type: rope)" in lines
    assert "nothing changed since revision 1" in lines
    assert any(cells[5].id in line for line in render.difference_lines(difference, list_all=True))


def test_difference_names_the_first_matching_rule(read: Any) -> None:
    text = FIRST + "exclude:\n  - {attn_type: rope, memory: off}\n  - {memory: off}\n"
    text = text.replace("  attn_type: [nope, polar]", "  attn_type: [nope, rope]\n  memory: [off, on]")
    grid, cells = read(text)
    dropped = {
        (combination["attn_type"], combination["memory"]): index for index, combination in grid.excluded_combinations()
    }
    assert dropped == {("nope", "off"): 1, ("rope", "off"): 0}
    assert {(c.axes["attn_type"], c.axes["memory"]) for c in cells} | set(dropped) == {
        (a, m) for a in ("nope", "rope") for m in ("off", "on")
    }


def test_difference_lists_each_dropped_seed(read: Any) -> None:
    text = FIRST.replace("axes:", "seeds: 3\naxes:") + "exclude:\n  - {attn_type: polar, seed: [1, 2]}\n"
    grid, cells = read(text)
    difference = between(None, grid, cells)
    assert counts(difference) == {"new": 4, "excluded": 2}
    assert difference.rules == {"exclude[0] (attn_type: polar, seed: [1, 2])": 2}
    assert [cell.slug for cell in difference.groups["excluded"]] == [f"attn_type=polar, seed={seed}" for seed in (1, 2)]


# --- since the last revision ------------------------------------------------------------------------------------------


def naive(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the differences of two YAML values, descending as long as both are mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        changes: dict[str, tuple[Any, Any]] = {}
        for key in {**old, **new}:
            changes |= naive(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return changes
    return {} if old == new else {path: (old, new)}


@pytest.mark.thorough
@pytest.mark.parametrize("edit", [
    ("clip: 1.0", "clip: 0.5"), ("[nope, polar]", "[nope, polar, rope]"), ("[128, 256]", "[128, 512]"),
    ("axes:", "seeds: 2\naxes:"), ("clip: 1.0", "clip: 1.0, muon_lr: 0.01"), ("  train: {clip: 1.0}\n", ""),
    ("name: g", "name: g\ndescription: words"),
])  # fmt: skip
def test_difference_changes_match_the_file(store: Store, read: Any, edit: tuple[str, str]) -> None:
    launch(store, *read(FIRST))
    grid, cells = read(FIRST.replace(*edit))
    difference = between(store, grid, cells)
    expected = naive(yaml.safe_load(FIRST), yaml.safe_load(FIRST.replace(*edit)))
    expected.pop("description", None)
    seen = {key: (old, new) for key, old, new in difference.changes if not key.startswith("probe ")}
    assert seen == {f"{k}.clip" if k == "set.train" else k: (v[0]["clip"], None) if k == "set.train" else v for k, v in expected.items()}  # fmt: skip
    assert {key for key, _, _ in difference.changes if key.startswith("probe ")} == (
        {"probe clean", "probe junk", "probe needle"} if "512" in edit[1] else set()
    )
    assert difference.inherited == []
    if "rope" in edit[1]:
        assert "  axes.attn_type: [nope, polar] -> [nope, polar, rope]" in render.difference_lines(
            difference, list_all=False
        )


def test_difference_lists_orphaned_cells(store: Store, read: Any) -> None:
    launch(store, *read(FIRST))
    grid, cells = read(FIRST.replace("clip: 1.0", "clip: 0.5"))
    difference = between(store, grid, cells)
    assert counts(difference) == {"new": 2, "orphaned": 2}
    assert {cell.id for cell in difference.groups["orphaned"]}.isdisjoint(cell.id for cell in cells)


def test_difference_reports_changes_of_a_base(store: Store, read: Any, write: Write) -> None:
    launch(store, *read(FIRST))
    base = write("", name="unused.yaml").with_name("micro.yaml")
    base.write_text(base.read_text().replace("tokens: 153_600", "tokens: 102_400"))
    difference = between(store, *read(FIRST))
    assert (difference.changes, difference.inherited) == ([], [("train.tokens", 153_600, 102_400)])
    assert "  train.tokens (from a base or a default): 153600 -> 102400" in render.difference_lines(
        difference, list_all=False
    )


def test_difference_new_axis_names_the_former_level(store: Store, read: Any) -> None:
    _, before = read(FIRST)
    launch(store, *read(FIRST))
    grid, cells = read(FIRST.replace("axes:", "axes:\n  memory: [off, on]"))
    assert {cell.id for cell in before} <= {cell.id for cell in cells}
    difference = between(store, grid, cells)
    assert difference.axes == ["new axis memory: all 2 earlier cells have memory=off and keep their ids"]
    assert counts(difference) == {"new": 4}, "nobody has trained any yet"
    grid, cells = read(FIRST.replace("axes:", "axes:\n  train.muon_lr: [0.5]"))
    assert between(store, grid, cells).axes == [
        "new axis train.muon_lr: no earlier cell has one of its levels; all have train.muon_lr=0.02: add this level to "
        "keep their results"
    ]


def test_difference_reports_a_removed_axis(store: Store, read: Any) -> None:
    launch(store, *read(FIRST.replace("axes:", "axes:\n  memory: [off, on]")))
    difference = between(store, *read(FIRST))
    assert difference.axes == ["axis memory was removed: 2 memory=off keep their ids"]
    assert counts(difference) == {"new": 2, "orphaned": 2}


def test_difference_reports_command_line_settings(store: Store, read: Any) -> None:
    grid, cells = read(FIRST, sets=["train.clip=0.25"])
    launch(store, grid, cells)
    assert between(store, grid, cells).changes == [("--set train.clip", None, 0.25)]
