"""Custom axes: levels that stand for several settings at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.grid.grid import find_file, load_grid
from atma_sweep.sweep.grid.settings import flatten
from atma_sweep.sweep.grid.yaml_document import load
from atma_sweep.sweep.planning.planner import select

Write = Callable[..., Path]
GRID = """
name: g
extends: tiny
set: {train.clip: 0.5}
axes:
  attn_type: [polar, nope]
  recipe:
    here: {}
    there: {train.schedule: linear, train: {clip: 2.0}, model.mixers.polar.n_eff_floor: 1e-6}
"""


def test_named_level_ids_equal_those_of_its_settings(write: Write, fake_fingerprint: Any) -> None:
    cells = load_grid(write(GRID)).expand(fake_fingerprint)
    assert [cell.slug for cell in cells] == [
        f"{mixer}-baseline-d0-m0-w0-recipe{recipe}-s0" for mixer in ("polar", "nope") for recipe in ("here", "there")
    ]
    assert [cell.axes["recipe"] for cell in cells] == ["here", "there"] * 2
    assert [(c.config.train.schedule, c.config.train.clip) for c in cells] == [("cosine", 0.5), ("linear", 2.0)] * 2
    # another way of writing the same settings: the name of a level is no part of a cell
    text = """
name: h
extends: tiny
set: {train.clip: 2.0, train.schedule: linear, model.mixers.polar.n_eff_floor: 1e-6}
axes: {attn_type: [polar, nope]}
"""
    plain = load_grid(write(text, "h.yaml")).expand(fake_fingerprint)
    assert [cell.id for cell in plain] == [cell.id for cell in cells[1::2]]


def test_named_level_in_rules_filters_and_contrasts(write: Write, fake_fingerprint: Any) -> None:
    text = f"""{GRID}
exclude: [{{attn_type: nope, recipe: there}}]
include: [{{attn_type: rope, recipe: [here, there]}}]
contrasts:
  - {{measure: val.val_loss, axis: recipe, level: there, within: {{attn_type: polar}}}}
"""
    grid = load_grid(write(text))
    cells = grid.expand(fake_fingerprint)
    assert [(c.axes["attn_type"], c.axes["recipe"]) for c in cells] == [
        ("polar", "here"), ("polar", "there"), ("nope", "here"), ("rope", "here"), ("rope", "there"),
    ]  # fmt: skip
    assert [c.axes["attn_type"] for c in select(grid, cells, ["recipe=there"])] == ["polar", "rope"]
    assert (grid.contrasts[0].axis, grid.contrasts[0].level) == ("recipe", "there")
    tuned = f"{GRID}\ntune: {{per: recipe, trials: 2, objective: val_loss, ranges: {{train.muon_lr: [0.01, 0.02]}}}}\n"
    studies = load_grid(write(tuned)).studies()
    assert [study.expand(fake_fingerprint)[0].config.train.clip for study in studies.values()] == [0.5, 2.0]


def test_level_settings_apply_to_any_axis(write: Write, fake_fingerprint: Any) -> None:
    text = f"{GRID}levels:\n  attn_type: {{polar: {{train.muon_lr: 0.05}}}}\n  recipe: {{there: {{train.constant: 0.5}}}}\n"
    cells = load_grid(write(text)).expand(fake_fingerprint)
    plain = load_grid(write(GRID)).expand(fake_fingerprint)
    usual = plain[0].config.train
    settings = [(cell.config.train.muon_lr, cell.config.train.constant) for cell in cells]
    assert settings == [(0.05, usual.constant), (0.05, 0.5), (usual.muon_lr, usual.constant), (usual.muon_lr, 0.5)]
    assert [a.id == b.id for a, b in zip(cells, plain, strict=True)] == [False, False, True, False]
    assert [cell.slug for cell in cells] == [cell.slug for cell in plain]


@pytest.mark.parametrize("grid", ["replication", "replication-rates"])
def test_replication_published_level_matches_the_recipe(grid: str) -> None:
    def settings(name: str, folder: str, *where: str) -> dict[str, Any]:
        document = load(find_file(name, folder=folder) or Path())
        tree: Any = document.data
        for key in where:
            tree = tree[key]
        return {path: value for path, value, _, _ in flatten(tree, document, where)}

    theirs = settings("published-370m", "base", "set")
    assert len(theirs) == 14
    # rows are drawn: the paper's text came in no order, and the replication's is whole books
    assert theirs.pop("data.shuffle") is False
    assert settings(grid, "", "axes", "recipe", "published") == theirs
