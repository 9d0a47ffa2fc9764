"""Labels of cells are those of their configs, in a bundle and in a database; what contradicts them is named."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results import shipped
from atma_sweep.results.derived import axis_contradictions, column_contradictions
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.names import SHIPPED
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands.verify import check, derive, identify
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.grid import shipped as shipped_grids
from atma_sweep.sweep.planning.planner import to_record
from bundles import packed, unpacked

Command = Callable[..., tuple[int, str, str]]
GRID = """
name: labels
extends: tiny
axes: {attn_type: [polar], memory: [on], train.muon_lr: [0.01], model.window_size: [8]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a database of one cell, and with its bundle."""
    (tmp_path / "grid.yaml").write_text(GRID)
    cells = [
        to_record(cell)
        for cell in load_grid(str(tmp_path / "grid.yaml")).expand(
            lambda data: hashlib.sha256(repr(data).encode()).hexdigest()
        )
    ]
    store = open_store(tmp_path / "atma.db", create=True)
    store.record_revision("labels", grid_text=GRID, grid_file="grid.yaml", cells=cells)
    export_sweep(store, "labels", tmp_path / "labels.zip")
    store.close()
    return tmp_path


FALSE: list[tuple[str, Any, str]] = [
    ("attn_type", "nope", "attn_type of cell {} is 'nope', its config gives 'polar'"),
    ("reg_mode", "spread", "reg_mode of cell {} is 'spread', its config gives 'baseline'"),
    ("distractor", "on", "distractor of cell {} is 'on', its config gives 'off'"),
    ("memory", "off", "memory of cell {} is 'off', its config gives 'on'"),
    ("window", "on", "window of cell {} is 'on', its config gives 'off'"),
    ("seed", 7, "seed of cell {} is 7, its config gives 0"),
    ("tokens_total", 7, "tokens_total of cell {} is 7, its config gives "),
    ("slug", "nope-baseline-d0-m1-w0-s0", "slug of cell {} is 'nope-baseline-d0-m1-w0-s0', its config gives 'polar-"),
    ("slug", "polar-baseline-d0-m1-w0-s1", "slug of cell {} is 'polar-baseline-d0-m1-w0-s1', its config gives 'polar-"),
    ("axes", {"memory": "off"}, "axes['memory'] of cell {} is 'off', its config gives 'on'"),
    ("axes", {"train.muon_lr": "0.02"}, "axes['train.muon_lr'] of cell {} is '0.02', its config gives '0.01'"),
    ("axes", {"model.attn_type": "nope"}, "axes['model.attn_type'] of cell {} is 'nope', its config gives 'polar'"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("column", "value", "sentence"), FALSE)
def test_false_labels_are_refused_and_reported(
    folder: Path, command_line: Command, column: str, value: Any, sentence: str
) -> None:
    """In a bundle by import, which changes nothing, and in a database by db check."""
    members = unpacked(folder / "labels.zip")
    name = "revision_cell" if column == "axes" else "cell"
    row = json.loads(members[f"{name}.jsonl"])
    cell = row["id" if name == "cell" else "cell_id"]
    row[column] = {**row[column], **value} if column == "axes" else value
    packed(folder / "false.zip", members | {f"{name}.jsonl": json.dumps(row).encode() + b"\n"})
    code, out, err = command_line("import", "false.zip", "--db", "other.db")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence.format(cell) in err
    assert open_store(folder / "other.db").sweeps() == []

    with closing(sqlite3.connect(folder / "atma.db")) as connection:
        text = json.dumps(row[column]) if column == "axes" else value
        connection.execute(f"UPDATE {name} SET {column} = ?", [text])
        connection.commit()
    code, out, _ = command_line("db", "check")
    assert (code, "error: 1 labels of cells contradict their configs" in out) == (1, True)
    assert sentence.format(cell) in out


def test_true_labels_are_imported(folder: Path, command_line: Command) -> None:
    assert command_line("import", "labels.zip", "--db", "other.db")[0] == 0
    assert command_line("db", "check", "--db", "other.db")[:2] == (0, "no problems found\n")


def test_levels_written_otherwise_are_the_same(folder: Path, command_line: Command) -> None:
    """A number in other digits, and a word that a grid resolves, contradict nothing."""
    members = unpacked(folder / "labels.zip")
    row = json.loads(members["revision_cell.jsonl"])
    row["axes"] |= {"train.muon_lr": "1e-2", "model.window_size": "8.0", "train.micro_batch": "auto", "own": "large"}
    packed(folder / "same.zip", members | {"revision_cell.jsonl": json.dumps(row).encode() + b"\n"})
    assert command_line("import", "same.zip", "--db", "other.db")[0] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("sweep", SHIPPED)
def test_shipped_bundles_carry_true_labels(sweep: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "atma.db", create=True)
    import_bundle(store, shipped.bundle_path(sweep), identify=identify, derive=derive)
    assert [finding for finding in check(str(store.path), tmp_path) if finding.severity == "error"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("grid", shipped_grids())
def test_cells_of_shipped_grids_carry_true_labels(grid: str) -> None:
    for cell in load_grid(grid).expand(lambda data: hashlib.sha256(repr(data).encode()).hexdigest()):
        stored = to_record(cell)
        derived = derive(stored.config)
        row = {
            "id": stored.id,
            "slug": stored.slug,
            "seed": stored.seed,
            "tokens_total": stored.tokens,
            **stored.levels,
        }
        assert [*column_contradictions(row, derived)] == []
        assert [*axis_contradictions(stored.id, stored.axes, stored.config, derived)] == []
