"""Plan of a launch, from the requested cells and their state in the database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.records import CellState
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import Grid, load_grid
from atma_sweep.sweep.planning.planner import plan, select, to_record
from factories import state_of

AXES = """name: g
extends: micro
seeds: 2
axes:
  attn_type: [polar, nope]
  memory: [off, on]
  train.muon_lr: [0.01, 0.020]
include:
  - {attn_type: rope}
"""
WANTED = [("val", 0), ("junk", 128), ("junk", 256)]
Write = Callable[..., Path]


@pytest.fixture
def grid(write: Write) -> Grid:
    return load_grid(write(AXES))


def make_state(cell: Cell, word: str, *, trained: bool = False, weights: bool = False, measured: Any = ()) -> CellState:
    attempt, weights_path = 7 if trained else None, "a/w.safetensors" if weights else None
    return state_of(cell, word, measured=measured, trained_attempt_id=attempt, weights=weights_path)


@pytest.mark.parametrize(("only", "count"), [
    ([], 18), (["attn_type=polar"], 8), (["attn_type=polar,rope"], 10), (["memory=no"], 10), (["memory=TRUE"], 8),
    (["seed=1"], 9), (["window=off"], 18), (["attn_type=nope", "memory=on", "seed=0"], 2), (["train.muon_lr=1e-2"], 8),
    (["train.muon_lr=0.02,0.01"], 16),
])  # fmt: skip
def test_only_selects_matching_cells(grid: Grid, fake_fingerprint: Any, only: list[str], count: int) -> None:
    cells = grid.expand(fake_fingerprint)
    chosen = select(grid, cells, only)
    assert len(chosen) == count
    assert chosen == [cell for cell in cells if cell in chosen], "in grid order"


@pytest.mark.parametrize(("only", "expected"), [
    ("memory", "--only: memory: must read axis=level,level, for example attn_type=polar,nope"),
    ("memry=on", "--only: memry: not an axis of this grid; allowed: attn_type, reg_mode, distractor, memory, window, "
     "train.muon_lr, seed; did you mean 'memory'?"),
    ("attn_type=polr", "--only: attn_type: no cell has level 'polr'; allowed: nope, polar, rope; did you mean 'polar'?"),
    ("window=on", "--only: window: no cell has level 'on'; allowed: off"),
    ("train.muon_lr=1", "--only: train.muon_lr: no cell has level '1'; allowed: 0.01, 0.02"),
    ("seed=5", "--only: seed: no cell has level '5'; allowed: 0, 1"),
])  # fmt: skip
def test_only_rejects_invalid_filters(grid: Grid, fake_fingerprint: Any, only: str, expected: str) -> None:
    with pytest.raises(GridError) as caught:
        select(grid, grid.expand(fake_fingerprint), [only])
    assert str(caught.value) == expected


def test_only_refuses_two_filters_of_an_axis(grid: Grid, fake_fingerprint: Any) -> None:
    with pytest.raises(GridError, match="--only: memory: has two filters; list its levels in one: axis=level,level"):
        select(grid, grid.expand(fake_fingerprint), ["memory=on", "seed=0", "memory=off"])


@pytest.fixture
def cell(cells: Callable[..., list[Cell]]) -> Cell:
    (only_cell,) = cells("set:\n  eval: {probes: [val, junk], lengths: [128, 256]}\n")
    return only_cell


ALL = [("val", "val_loss", 0), ("junk", "nats", 128), ("junk", "nats", 256)]
STANDINGS: dict[str, tuple[dict[str, Any] | None, list[tuple[str, str]]]] = {
    # standing -> (what the database has, what the planner does: [(kind, with --retrain or not)])
    "new": (None, [("train", "always")]),
    "running": ({"word": "running"}, [("train", "always")]),
    "interrupted": ({"word": "interrupted"}, [("train", "always")]),
    "failed": ({"word": "failed"}, [("train", "always")]),
    "diverged": ({"word": "diverged"}, [("train", "retrain")]),
    "done": ({"word": "done", "trained": True, "weights": True, "measured": ALL}, []),
    "needs-eval": ({"word": "done", "trained": True, "weights": True, "measured": ALL[:2]}, [("evaluate", "always")]),
    "weights gone": ({"word": "done", "trained": True, "measured": ALL[:2]}, [("train", "retrain")]),
}


@pytest.mark.parametrize("retrain", [False, True])
@pytest.mark.parametrize("word", STANDINGS)
def test_plan_action_for_each_standing(cell: Cell, word: str, retrain: bool) -> None:
    has, does = STANDINGS[word]
    states = {} if has is None else {cell.id: make_state(cell, **has)}
    result = plan([cell], states, retrain=retrain, num_filtered_out=4)
    assert result.standings == {cell.id: word}
    assert result.counts == {word: 1}
    assert result.num_filtered_out == 4
    assert [task.kind for task in result.tasks] == [kind for kind, when in does if retrain or when == "always"]
    for task in result.tasks:
        assert (task.cell, task.standing) == (cell, word)
        evaluates = task.kind == "evaluate"
        assert task.missing == ([("junk", 256)] if evaluates else WANTED)
        assert (task.weights, task.parent_id) == (("a/w.safetensors", 7) if evaluates else (None, None))
    # a running cell is only waited for, so it adds nothing to train
    waits = word == "running"
    assert result.training == [task for task in result.tasks if task.kind == "train" and not waits]
    assert result.evaluating == [task for task in result.tasks if task.kind == "evaluate"]
    assert result.tokens == 153_600 * len(result.training)


def test_plan_counts_measured_cell_without_weights_done(cell: Cell) -> None:
    result = plan([cell], {cell.id: make_state(cell, "done", trained=True, measured=ALL)}, retrain=True)
    assert (result.standings[cell.id], result.tasks) == ("done", [])


def test_plan_keeps_grid_order_and_ignores_extra_cells(grid: Grid, fake_fingerprint: Any) -> None:
    cells = grid.expand(fake_fingerprint)
    first, *rest = cells
    result = plan(rest, {first.id: make_state(first, "failed"), rest[1].id: make_state(rest[1], "running")})
    assert [task.cell for task in result.tasks] == rest
    assert [task.cell for task in result.training] == [rest[0], *rest[2:]]
    assert result.counts == {"new": 16, "running": 1}


def test_cell_record(cell: Cell) -> None:
    row = to_record(cell)
    assert (row.id, row.slug, row.seed, row.tokens) == (cell.id, cell.slug, 0, 153_600)
    assert row.levels == {
        "attn_type": "polar",
        "reg_mode": "baseline",
        "distractor": "off",
        "memory": "off",
        "window": "off",
    }
    assert row.config["train"]["tokens"] == 153_600
    assert row.config["eval"]["lengths"] == [128, 256]


def test_cell_record_counts_tokens_of_full_steps(cells: Callable[..., list[Cell]]) -> None:
    (odd,) = cells("set:\n  train.tokens: 2_500\n")
    assert (odd.config.train.steps, to_record(odd).tokens) == (2, 2048)
