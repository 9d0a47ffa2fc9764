"""`tune:` of a grid: a study per level of an axis, and a factorial with the best settings of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import cell_id
from atma_sweep.sweep.grid.grid import Grid, load_grid
from ruamel.yaml import YAML

GRID: dict[str, Any] = {
    "name": "fair",
    "extends": "tiny",
    "axes": {"attn_type": ["polar", "nope"], "memory": ["off", "on"], "window": ["off", "on"]},
    "seeds": [3, 4],
    "tune": {
        "per": "attn_type",
        "trials": 5,
        "objective": "val_loss",
        "ranges": {"train.muon_lr": {"low": 0.003, "high": 0.1, "log": True}, "train.clip": [0.5, 1.0]},
        "at": {"memory": "on"},
    },
}


def grid_of(folder: Path, change: dict[str, Any] | None = None, tune: dict[str, Any] | None = None) -> Grid:
    data = GRID | (change or {}) | {"tune": GRID["tune"] | (tune or {})}
    with (folder / "g.yaml").open("w") as stream:
        YAML(typ="safe").dump(data, stream)
    return load_grid(folder / "g.yaml")


def cells_of(grid: Grid) -> Any:
    return grid.expand(lambda data: "0" * 12)


def test_tune_gives_every_level_an_equal_study(tmp_path: Path) -> None:
    parts = grid_of(tmp_path).studies()
    assert {word: part.name for word, part in parts.items()} == {"polar": "fair-tune-polar", "nope": "fair-tune-nope"}
    for word, part in parts.items():
        assert part.search is not None
        assert (part.search.trials, list(part.search.objectives)) == (5, ["val.val_loss"])
        ends = cells_of(part)
        assert len(ends) == 3
        assert {(cell.config.model.attn_type, cell.config.model.memory, cell.config.model.window, cell.config.seed) for cell in ends} == {
            (word, "gated_delta", False, 3)
        }  # fmt: skip


def test_tuned_factorial_uses_the_selected_settings(tmp_path: Path) -> None:
    from dataclasses import replace

    grid = grid_of(tmp_path)
    plain = cells_of(grid)
    best_settings = {
        "polar": {"train.muon_lr": 0.05, "train.clip": 0.5},
        "nope": {"train.muon_lr": 0.01, "train.clip": 1.0},
    }
    tuned = cells_of(replace(grid, tuned=best_settings))
    assert [cell.slug for cell in tuned] == [cell.slug for cell in plain]
    assert [cell.axes for cell in tuned] == [cell.axes for cell in plain]
    for cell, before in zip(tuned, plain, strict=True):
        settings = best_settings[cell.axes["attn_type"]]
        assert (cell.config.train.muon_lr, cell.config.train.clip) == tuple(settings.values())
        assert cell.id == cell_id(cell.config) != before.id
    # the trial whose settings won is a cell of the factorial: it is not trained again
    best = grid.studies()["polar"].expansion(lambda data: "0" * 12).cells(best_settings["polar"], None)[0]
    assert best.id in {cell.id for cell in tuned}


def test_tune_error_points_to_the_invalid_range(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, tune={"ranges": {"train.clip": {"low": -1, "high": 2}}})
    with pytest.raises(GridError, match=r"tune\.ranges\.train\.clip"):
        cells_of(grid.studies()["polar"])
