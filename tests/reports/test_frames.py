"""The tidy frames hold what the view `results` holds."""

import math
import os
import sqlite3
import subprocess
import sys

import pandas as pd
from atma_sweep.reports.frames import CELL_COLUMNS, complete_table
from atma_sweep.results.store import open_store


def test_one_row_a_cell_in_grid_order(store):
    table = complete_table(store)
    assert (table.sweep, table.revision, table.done, table.total) == ("quick", 1, 2, 5)
    assert tuple(table.cells.columns[: len(CELL_COLUMNS)]) == CELL_COLUMNS
    assert list(table.cells["cell"]) == [f"{index:012x}" for index in (4, 1, 3, 2, 0)]
    assert list(table.cells["state"]) == ["done", "done", "running", "diverged", "new"]
    loss = table.cells["val.val_loss"]
    assert list(loss[:2]) == [0.125, 3.14159]
    assert loss[2:].isna().all()
    assert table.cells["clean.nats@65536"][0] == 0.125 + 0.065536
    assert math.isnan(table.cells["junk.nats@65536"][0])
    assert table.references == {"unigram_entropy": (7.4321,), "bigram_entropy": (5.5,)}


def test_the_long_frame_equals_the_view(store):
    found = complete_table(store).values
    connection = sqlite3.connect(store.path)
    expected = pd.read_sql(
        "SELECT cell, probe, metric, length, value, unit, n FROM results WHERE probe IS NOT NULL", connection
    )
    keys = ["cell", "probe", "metric", "length"]
    left = found[list(expected.columns)].sort_values(keys, ignore_index=True)
    right = expected.sort_values(keys, ignore_index=True)
    pd.testing.assert_frame_equal(left, right, check_dtype=False)
    assert len(found) == 13 + 1
    assert set(found.loc[found["value"].isna(), "reason"]) == {
        "n/a: no peak FLOPs known for cpu",
        "oom: 3 GiB asked, 1 free",
    }


def test_corpora_that_differ_are_both_named(store, run, make):
    _, numbers = make
    run(store, f"{0:012x}", "done", numbers(1.0, entropy=6.5))
    assert complete_table(store).references["unigram_entropy"] == (6.5, 7.4321)


def test_axes_that_vary_become_columns(tmp_path, make):
    cell, _ = make
    store = open_store(tmp_path / "axes.db", create=True)
    cells = [cell(0, axes={"train.lr": "0.1", "state": "a"}), cell(1, axes={"train.lr": "0.2", "state": "b"})]
    store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    table = complete_table(store)
    assert table.axis_columns == ("train.lr", "axis.state")
    assert list(table.cells["train.lr"]) == ["0.1", "0.2"]
    assert list(table.cells["axis.state"]) == ["a", "b"]
    assert list(table.cells["state"]) == ["new", "new"]
    assert len(table.values) == 0


def test_reports_import_nothing_heavy():
    code = (
        "import sys, atma_sweep.reports.frames\n"
        "print([n for n in ('torch', 'ray', 'matplotlib', 'alembic', 'atma_sweep.sweep', 'atma_sweep.model')"
        " if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert found.stdout == "[]\n"
