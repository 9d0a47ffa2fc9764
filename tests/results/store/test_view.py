"""The view `results`, asked the way a person asks it."""

import json
import random
import sqlite3

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement
from sqlalchemy import text

COLUMNS = [
    "sweep", "cell", "slug", "seed", "attn_type", "reg_mode", "distractor", "memory", "window", "axes", "probe",
    "metric", "length", "value", "unit", "n", "state", "source",
]  # fmt: skip


def run(store, cell, owner, state, values, kind="train"):
    attempt = store.start_attempt(cell, owner=owner, fence=1, kind=kind)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    recorder.measurements(
        [Measurement(probe=p, metric=m, length=n, value=v, unit="nats", n=3) for p, m, n, v in values]
    )
    if state != "running":
        store.finish_attempt(attempt.id, 1, state)


def rows(store, query='SELECT * FROM results ORDER BY slug, probe, metric, "length"'):
    with store.transaction(write=False) as session:
        return [dict(row._mapping) for row in session.execute(text(query))]


def test_the_query_of_the_handbook_through_sqlite3(tmp_path, cells, owner):
    from atma_sweep.results.store.store import open_store

    store = open_store(tmp_path / "test.db", create=True)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(2) + cells(2, seed=1))
    for index, cell in enumerate(cells(2) + cells(2, seed=1)):
        run(store, cell.id, owner, "done", [("val", "val_loss", 0, 3.0 + index), ("clean", "nats", 64, 100.0)])
    store.close()
    result = sqlite3.connect(tmp_path / "test.db").execute(
        "SELECT attn_type, memory, avg(value) FROM results WHERE sweep='quick' AND metric='val_loss' GROUP BY 1, 2"
    )
    assert result.fetchall() == [("polar0", "off", 4.0), ("polar1", "on", 5.0)]


def test_columns_and_cells_without_numbers(store, cells, owner):
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(3))
    run(store, cells(3)[0].id, owner, "running", [("val", "val_loss", 0, 9.0)])
    run(store, cells(3)[1].id, owner, "diverged", [])
    result = rows(store)
    assert list(result[0]) == COLUMNS
    assert [(row["state"], row["probe"], row["value"], row["n"]) for row in result] == [
        ("running", None, None, None),
        ("diverged", None, None, None),
        ("new", None, None, None),
    ]
    axes = result[1]["axes"]
    assert (json.loads(axes) if isinstance(axes, str) else axes) == {"attn_type": "polar1", "memory": "on"}


def test_only_the_newest_revision_of_each_sweep(store, cells, owner):
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(3))
    store.record_revision("quick", grid_text="y", grid_file="x.yaml", cells=cells(2))
    store.record_revision("full", grid_text="x", grid_file="x.yaml", cells=cells(1))
    assert sorted((row["sweep"], row["cell"]) for row in rows(store)) == [
        ("full", cells(1)[0].id),
        *(("quick", cell.id) for cell in cells(2)),
    ]


def test_the_newest_finished_value_wins_everywhere(store, cells, owner):
    """A random history against a plain dictionary that is written in the order of the attempts."""
    draw = random.Random(7)
    grid = cells(5)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=grid)
    expected, states = {}, {cell.id: "new" for cell in grid}
    for _ in range(37):
        cell = draw.choice(grid).id
        state = draw.choice(["done", "done", "failed", "interrupted", "diverged"])
        keys = draw.sample(
            [("val", "val_loss", 0), ("clean", "nats", 64), ("clean", "nats", 4096), ("junk", "n", 1)], 2
        )
        values = [(*key, draw.random()) for key in keys]
        run(store, cell, owner, state, values, draw.choice(["train", "evaluate"]))
        states[cell] = state
        if state == "done":
            expected |= {(cell, *key): value for *key, value in values}
    result = rows(store)
    assert {(r["cell"], r["probe"], r["metric"], r["length"]): r["value"] for r in result if r["probe"]} == expected
    assert {row["cell"]: row["state"] for row in result} == states
    assert len([row for row in result if row["probe"]]) == len(expected)
    assert {(v.cell_id, v.probe, v.metric, v.length): v.value for v in store.values("quick")} == expected
    for state in store.cell_states("quick"):
        assert state.state == states[state.cell_id]
        assert state.measured == {key[1:] for key in expected if key[0] == state.cell_id}
        assert len(store.measurements(state.cell_id)) == len(state.measured)
