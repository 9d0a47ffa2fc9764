"""`search:` of a grid: the parsed study, and a single line per error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.studies.search import Interval, LevelChoice
from atma_sweep.sweep.grid.cell import cell_id
from atma_sweep.sweep.grid.grid import Grid, load_grid
from ruamel.yaml import YAML

GRID = """
name: s
extends: tiny
set: {eval: {validate_every: 5}}
search:
  objective: val_loss
  ranges:
    train.muon_lr: {low: 3e-3, high: 0.1, log: true}
    model.n_layers: [4, 6]
"""


def grid_of(folder: Path, change: dict[str, Any] | None = None, search: dict[str, Any] | None = None) -> Grid:
    yaml = YAML(typ="safe")
    data = yaml.load(GRID)
    data |= change or {}
    data["search"] |= search or {}
    data = {key: value for key, value in data.items() if value is not None}
    file = folder / "g.yaml"
    with file.open("w") as stream:
        yaml.dump(data, stream)
    return load_grid(file)


def cells_of(grid: Grid) -> Any:
    return grid.expand(lambda data: "0" * 12)


def test_search_section_defaults(tmp_path: Path) -> None:
    search = grid_of(tmp_path).search
    assert search is not None
    assert dict(search.ranges) == {
        "train.muon_lr": Interval(0.003, 0.1, log=True),
        "model.n_layers": LevelChoice((4, 6)),
    }
    assert dict(search.objectives) == {"val.val_loss": "minimize"}
    assert (search.sampler, search.trials, search.pruner, search.seed) == ("tpe", 20, None, 0)
    assert cells_of(grid_of(tmp_path, search={"pruner": "asha"})), "it validates before the end"


@pytest.mark.parametrize(
    ("objective", "objectives"),
    [
        ("needle@512", {"needle.digit_accuracy@512": "maximize"}),
        ("clean.bits@128", {"clean.bits@128": "minimize"}),
        ({"val_loss": "minimize", "tokens_per_s": "maximize"},
         {"val.val_loss": "minimize", "throughput.tokens_per_s": "maximize"}),
        ({"throughput.train_seconds": "minimize"}, {"throughput.train_seconds": "minimize"}),
    ],
)  # fmt: skip
def test_search_objectives_are_resolved_in_full(tmp_path: Path, objective: Any, objectives: Any) -> None:
    grid = grid_of(tmp_path, search={"objective": objective})
    assert grid.search is not None
    assert dict(grid.search.objectives) == objectives
    assert cells_of(grid)


def test_search_range_of_integer_setting_has_integer_ends(tmp_path: Path) -> None:
    ranges = {"train.tokens": {"low": "1e5", "high": 200_000.0}, "train.clip": {"low": 1, "high": 2, "step": 0.5}}
    search = grid_of(tmp_path, search={"ranges": ranges}).search
    assert search is not None
    tokens, clip = search.ranges["train.tokens"], search.ranges["train.clip"]
    assert isinstance(tokens, Interval)
    assert isinstance(clip, Interval)
    assert tokens.is_integer
    assert not clip.is_integer


def test_search_corner_cells_are_regular_cells(tmp_path: Path) -> None:
    cells = cells_of(grid_of(tmp_path))
    settings = [(cell.config.train.muon_lr, cell.config.model.n_layers) for cell in cells]
    assert sorted(settings) == [(0.003, 4), (0.003, 6), (0.1, 4)]
    assert [cell.id for cell in cells] == [cell_id(cell.config) for cell in cells]
    assert cells[0].axes == {"train.muon_lr": "0.003", "model.n_layers": "4"}


def test_search_uses_the_seed_of_its_grid(tmp_path: Path) -> None:
    assert cells_of(grid_of(tmp_path, {"seeds": [7]}))[0].config.seed == 7
