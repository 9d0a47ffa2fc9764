"""Rows that were changed by hand: every reading command ends with one line or goes on, whatever a column holds."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results import open_store
from atma_sweep.results.errors import RowDamaged
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.maintenance.values import first_damage
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import Base
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning.planner import to_record
from here import run_in_process
from once import once

GRID = """
name: fuzzed
extends: tiny
axes: {attn_type: [polar, nope], memory: [on, off], train.muon_lr: [0.01, 0.02]}
seeds: 2
"""
OWNER = Owner(name="ada", host="far", pid=7, started=1.5)
SURROGATE = b"\xed\xa0\x80"
HOSTILE: list[Any] = [
    None, "", "junk", "0", -1, 0, 1, 2**62, 9e999, -9e999, 1e308, -1e308, 1e-320, b"\x00\xff", "[", "[]", "{}", "null", '{"a": 1e999}',
    "9999-99-99T99:99:99.999Z", "2026-01-02", "0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "x\x1b[31m\u202e", "a" * 5000,
    SURROGATE,
]  # fmt: skip
COMMANDS = [
    ("status",), ("status", "--json"), ("show", "CELL"), ("report", "--table", "6"), ("report", "--table", "effects"),
    ("report", "--table", "items"), ("report", "--table", "budget"), ("report", "--table", "contrasts"),
    ("report", "--table", "anova"), ("report", "--figure", "loss", "--out", "loss.svg"),
    ("report", "--dashboard", "page.html"),
    ("export", "--out", "out.zip"), ("export", "--to", "csv", "--out", "out.csv"), ("db", "check"), ("sweeps",),
    ("plan", "grid.yaml"), ("launch", "grid.yaml", "--dry-run"), ("logs", "CELL"), ("prune-checkpoints", "--dry-run"),
]  # fmt: skip


def prepare(folder: Path) -> None:
    """A database with eight configurations at two seeds and rows in every table but those of studies."""
    (folder / "grid.yaml").write_text(GRID)
    cells = [to_record(cell) for cell in load_grid(str(folder / "grid.yaml")).expand(lambda data: "f" * 64)]
    store = open_store(folder / "atma.db", create=True)
    options = {"requested": [["val", 0], ["needle", 64]]}
    store.record_revision("fuzzed", grid_text=GRID, grid_file="grid.yaml", options=options, cells=cells)
    draw = random.Random(0)
    for cell in cells:
        attempt = store.start_attempt(cell.id, owner=OWNER, fence=1, steps_total=9)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        recorder.provenance(Provenance(config=dict(cell.config), seed=cell.seed, device="cpu", gpu_name="H100"))
        recorder.curve([CurvePoint(step=s, tokens=s, wall_s=s, train_loss=draw.random()) for s in range(1, 9)])
        measurements = [Measurement(probe="val", metric="val_loss", value=2 + draw.random(), unit="nats/token", n=9)]
        measurements += [
            Measurement(probe="needle", metric="digit_accuracy", length=64, value=draw.random(), unit="fraction", n=8)
        ]
        recorder.measurements(measurements)
        items = range(4)
        recorder.examples(
            [Example(probe="needle", metric="digit_accuracy", length=64, item=n, value=draw.random()) for n in items]
        )
        store.finish_attempt(attempt.id, 1, "done")
    store.close()


def edit(file: Path, table: str, column: str, value: Any) -> bool:
    """Set a column of a table's second row; False where the database itself refuses that."""
    with closing(sqlite3.connect(file)) as connection:
        placeholder = "CAST(? AS TEXT)" if value is SURROGATE else "?"
        row = f"(SELECT rowid FROM {table} ORDER BY rowid LIMIT 1 OFFSET 1)"
        row = (
            row
            if connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] > 1
            else f"(SELECT rowid FROM {table})"
        )
        try:
            changed = connection.execute(f"UPDATE {table} SET {column} = {placeholder} WHERE rowid = {row}", [value])
            connection.commit()
        except sqlite3.IntegrityError:
            return False
        return changed.rowcount == 1


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder."""
    monkeypatch.delenv("ATMA_DB", raising=False)
    return Path(shutil.copytree(once(tmp_path_factory, "fuzzed", prepare), tmp_path / "fuzzed"))


def cell_of(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "atma.db")) as connection:
        return str(connection.execute("SELECT id FROM cell ORDER BY rowid LIMIT 1 OFFSET 1").fetchone()[0])


def named_in(file: Path) -> str:
    """Return the message about the edited row; empty if its value breaks no rule."""
    store = open_store(file)
    try:
        return first_damage(store.engine) or ""
    finally:
        store.close()


def fuzz(folder: Path, work: Path, *, seed: int, n_edits: int, n_commands: int, share: float = 1.0) -> int:
    """Run commands on copies with one value edited each; return how many ended with a line about the edited row.

    Of values that break a rule, so that whatever a command raises becomes a line about them, a `share` is tried with one command;
    every other is tried with all `n_commands`.
    """
    draw, named, cell = random.Random(seed), 0, cell_of(folder)
    tables = [table for name, table in Base.metadata.tables.items() if name not in ("study", "trial")]
    edits = [(table.name, column.name, value) for table in tables for column in table.columns for value in HOSTILE]
    for table, column, value in draw.sample(edits, n_edits):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(folder, work)
        if not edit(work / "atma.db", table, column, value):
            continue
        commands = draw.sample(COMMANDS, n_commands)
        if share < 1 and (message := named_in(work / "atma.db")):
            assert table in message, (table, column, value, message)
            commands = commands[: draw.random() < share]
        for command in commands:
            code, _, err = run_in_process(work, *(cell if word == "CELL" else word for word in command))
            case = (table, column, value, command, err)
            assert code in (0, 1, 2, 3), case
            assert "Traceback" not in err, case
            named += code == 2 and "run: atma-sweep db check" in err
    return named


@pytest.mark.thorough
@pytest.mark.slow
def test_edited_rows_end_in_no_traceback(folder: Path, tmp_path: Path) -> None:
    assert fuzz(folder, tmp_path / "work", seed=1, n_edits=30, n_commands=2) > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_edited_rows_end_in_no_traceback_at_length(folder: Path, tmp_path: Path) -> None:
    assert fuzz(folder, tmp_path / "work", seed=2, n_edits=150, n_commands=2, share=0.1) > 0


NAMED: list[tuple[str, str, Any, tuple[str, ...], str]] = [
    ("attempt", "started_at", "junk", ("status",), "attempt.started_at of the row with id 2 is 'junk'; it must be a time"),
    ("cell", "config", "{", ("show", "CELL"), "cell.config of the row with id '{cell}' is '{{'; it must be a JSON object"),
    ("revision_cell", "axes", b"\x00", ("status",), "revision_cell.axes of the row with revision_id 1, cell_id '{cell}' is "),
    ("measurement", "value", 1e308, ("report", "--table", "effects"), "is 1e+308; it is too large to compute with"),
    ("measurement", "value", 9e999, ("report", "--table", "6"), "measurement.value of the row with id "),
    ("cell", "slug", SURROGATE, ("status",), "cell.slug of the row with id '{cell}' is '\\udced\\udca0\\udc80'; it must be text"),
]  # fmt: skip


@pytest.mark.usefixtures("no_databases")
@pytest.mark.parametrize(("table", "column", "value", "command", "message"), NAMED)
def test_errors_name_the_edited_row(
    folder: Path, table: str, column: str, value: Any, command: tuple[str, ...], message: str
) -> None:
    """The error is one line that ends with the remedy; db check reports the same."""
    cell = cell_of(folder)
    assert edit(folder / "atma.db", table, column, value)
    code, out, err = run_in_process(folder, *(cell if word == "CELL" else word for word in command))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message.format(cell=cell) in err
    assert "run: atma-sweep db check" in err
    code, out, _ = run_in_process(folder, "db", "check")
    assert (code, "error: 1 invalid values" in out) == (1, True)
    assert message.format(cell=cell) in out


def test_the_library_names_the_edited_row(folder: Path) -> None:
    edit(folder / "atma.db", "attempt", "started_at", "junk")
    store = open_store(folder / "atma.db")
    with pytest.raises(RowDamaged, match=r"attempt\.started_at of the row with id 2 is 'junk'"):
        store.attempts(cell_of(folder))
    store.close()


def test_a_dangling_reference_is_named(folder: Path) -> None:
    """It is named if nothing else explains an error."""
    store = open_store(folder / "atma.db")
    assert first_damage(store.engine) is None
    edit(folder / "atma.db", "measurement", "attempt_id", 999)
    assert "measurement has a row (rowid 2) that refers to a missing row of attempt" in (
        first_damage(store.engine) or ""
    )
    store.close()


def test_sound_databases_have_no_damaged_values(folder: Path, db: Path) -> None:
    assert check(folder / "atma.db") == []
    assert check(db) == []
