"""`search:` of a grid: what is understood, and one line for what is not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from atma_sweep.results.studies.search import Choice, Interval
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import cell_id
from atma_sweep.sweep.grid.grid import GRIDS, Grid, load_grid
from atma_sweep.sweep.grid.json_schema import grid_schema
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


def test_a_study_is_read_with_its_defaults(tmp_path: Path) -> None:
    search = grid_of(tmp_path).search
    assert search is not None
    assert dict(search.ranges) == {"train.muon_lr": Interval(0.003, 0.1, log=True), "model.n_layers": Choice((4, 6))}
    assert dict(search.objectives) == {"val.val_loss": "minimize"}
    assert (search.sampler, search.trials, search.pruner, search.seed) == ("tpe", 20, None, 0)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("needle@512", {"needle.digit_accuracy@512": "maximize"}),
        ("clean.bits@128", {"clean.bits@128": "minimize"}),
        ({"val_loss": "minimize", "tokens_per_s": "maximize"},
         {"val.val_loss": "minimize", "throughput.tokens_per_s": "maximize"}),
        (["val_loss", "needle.absent_nats@512"], None),
        ({"throughput.train_seconds": "minimize"}, {"throughput.train_seconds": "minimize"}),
    ],
)  # fmt: skip
def test_objectives_are_the_numbers_that_reports_know(tmp_path: Path, given: Any, found: Any) -> None:
    if found is None:
        with pytest.raises(GridError, match="neither side of it is better by itself"):
            grid_of(tmp_path, search={"objective": given})
        return
    grid = grid_of(tmp_path, search={"objective": given})
    assert grid.search is not None
    assert dict(grid.search.objectives) == found
    assert cells_of(grid)


def test_a_whole_setting_has_whole_ends_however_they_are_written(tmp_path: Path) -> None:
    ranges = {"train.tokens": {"low": "1e5", "high": 200_000.0}, "train.clip": {"low": 1, "high": 2, "step": 0.5}}
    search = grid_of(tmp_path, search={"ranges": ranges}).search
    assert search is not None
    tokens, clip = search.ranges["train.tokens"], search.ranges["train.clip"]
    assert isinstance(tokens, Interval)
    assert isinstance(clip, Interval)
    assert tokens.whole
    assert not clip.whole


def test_the_ends_of_the_ranges_are_cells_like_any_other(tmp_path: Path) -> None:
    cells = cells_of(grid_of(tmp_path))
    told = [(cell.config.train.muon_lr, cell.config.model.n_layers) for cell in cells]
    assert sorted(told) == [(0.003, 4), (0.003, 6), (0.1, 4)]
    assert [cell.id for cell in cells] == [cell_id(cell.config) for cell in cells]
    assert cells[0].axes == {"train.muon_lr": "0.003", "model.n_layers": "4"}


FACTORIAL = {"axes": {"memory": ["off", "on"]}}


def test_a_pruner_needs_validations_before_the_end(tmp_path: Path) -> None:
    assert cells_of(grid_of(tmp_path, search={"pruner": "asha"}))
    with pytest.raises(GridError, match="no validation before the end: 100 steps"):
        cells_of(grid_of(tmp_path, {"set": {"eval": {"validate_every": 100}}}, {"pruner": "asha"}))


@pytest.mark.parametrize("key", ["axes", "include", "exclude", "contrasts", "design"])
def test_what_is_about_a_factorial_is_refused_beside_a_study(tmp_path: Path, key: str) -> None:
    given: Any = {"axes": {"memory": ["off"]}, "design": {"runs": 2}}.get(key, [{"memory": "off"}])
    with pytest.raises(GridError, match=rf"(?s){key}.*(factorial|axis)"):
        grid_of(tmp_path, {key: given})


def test_a_study_has_one_seed(tmp_path: Path) -> None:
    with pytest.raises(GridError, match="a study has one seed"):
        grid_of(tmp_path, {"seeds": 2})
    assert cells_of(grid_of(tmp_path, {"seeds": [7]}))[0].config.seed == 7


@pytest.mark.parametrize("where", ["search", "top"])
def test_a_factorial_is_not_pruned_and_the_reason_is_said(tmp_path: Path, where: str) -> None:
    change: Any = copy.deepcopy(FACTORIAL)
    if where == "top":
        change |= {"pruner": "asha", "search": {}}
    with pytest.raises(GridError, match=r"pruner: .*best ones at retrieval \(docs/designs\.md"):
        grid_of(tmp_path, change, {"pruner": "asha"} if where == "search" else {"ranges": None})


@pytest.mark.thorough
def test_editors_know_the_keys(tmp_path: Path) -> None:
    schema = grid_schema()
    shipped = YAML(typ="safe").load((GRIDS / "search-mini.yaml").read_text())
    jsonschema.validate(json.loads(json.dumps(shipped)), schema)
    for wrong in ({"sampler": "grid"}, {"trials": 0}, {"ranges": {"train.clip": {"low": 1}}}, {"pruners": "asha"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(shipped | {"search": shipped["search"] | wrong}, schema)
