"""Sweeps with attempts at chosen minutes, as files and as what a database holds whatever its ids are."""

import json
from datetime import UTC, datetime, timedelta

from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.store import schema
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Owner, Provenance
from sqlalchemy import select, text, update

T = schema.Base.metadata.tables
START = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)


def at(minute):
    return START + timedelta(minutes=minute)


def launch(store, cells, minute=0, name="quick", grid="grid: 1"):
    store.record_revision(name, grid_text=grid, grid_file="g.yaml", options={"only": None}, cells=cells)
    with store.transaction() as session:
        newest = select(T["revision"].c.id).order_by(T["revision"].c.id.desc()).limit(1).scalar_subquery()
        session.execute(update(T["revision"]).where(T["revision"].c.id == newest).values(created_at=at(minute)))
        session.execute(update(T["sweep"]).values(launched_at=at(minute), created_at=START))


def run(
    store, cell, minute, *, host="here", state="done", kind="train", value=1.0, parent=None, weights=None, log=None
):
    """Record one attempt that began at that minute, with numbers in every table."""
    owner = Owner(name="ada", host=host, pid=100 + minute, started=1.5)
    attempt = store.start_attempt(cell, owner=owner, fence=1, kind=kind, parent_id=parent, steps_total=7)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    recorder.provenance(Provenance(config={"z": 1, "a": [1.5, None]}, seed=minute, packages={"numpy": "2"}, host=host))
    recorder.curve([CurvePoint(step=s, tokens=10**10 + s, wall_s=s / 3, train_loss=value / 7) for s in range(3)])
    recorder.measurements(
        [
            Measurement(probe="val", metric="val_loss", value=value, unit="nats", n=2**40),
            Measurement(probe="clean", metric="nats", length=4096, reason="oom: no memory", unit="nats"),
        ]
    )
    recorder.examples([Example(probe="clean", metric="nats", length=64, item=1, value=0.1, detail={"é": "ü\n\u2028"})])
    if weights is not None:
        folder = store.runs / attempt.run_dir
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(weights)
        (folder / "log.txt").write_text(log or f"log of {host} {minute}\n")
    if state != "running":
        named = f"{attempt.run_dir}/weights.safetensors" if weights is not None else None
        store.finish_attempt(attempt.id, 1, state, cause="ünïcode", weights=named)
    times = {"started_at": at(minute), "heartbeat_at": at(minute) + timedelta(seconds=30)}
    times |= {"finished_at": at(minute) + timedelta(seconds=40)} if state != "running" else {}
    with store.transaction() as session:
        session.execute(update(T["attempt"]).where(T["attempt"].c.id == attempt.id).values(times))
        session.execute(
            update(T["measurement"]).where(T["measurement"].c.attempt_id == attempt.id).values(created_at=at(minute))
        )
        session.execute(update(T["event"]).where(T["event"].c.attempt_id == attempt.id).values(at=at(minute)))
    return attempt


def rows(store, table):
    with store.transaction(write=False) as session:
        return [dict(row._mapping) for row in session.execute(select(T[table]))]


IGNORED = {"id", "number", "run_dir", "weights", "checkpoint", "sweep_id", "revision_id", "created_at", "launched_at"}
IGNORED |= {"imported"}


def natural(store, *, numbers=False):
    """Everything in the database by what it is, whatever its ids are. Two equal ones hold the same."""
    attempts = {row["id"]: row for row in rows(store, "attempt")}

    def who(attempt):
        row = attempts.get(attempt)
        return row and tuple(str(row[name]) for name in ("cell_id", "started_at", "host", "pid", "kind"))

    histories = {}
    for table in T:
        lines = []
        for row in rows(store, table):
            shown = {name: value for name, value in row.items() if name not in IGNORED}
            for name in ("attempt_id", "parent_id"):
                if name in shown:
                    shown[name] = who(shown[name])
            lines.append(json.dumps(shown, sort_keys=True, default=str))
        histories[table] = sorted(lines)
    return histories


def view(store):
    with store.transaction(write=False) as session:
        rows = [dict(row._mapping) for row in session.execute(text("SELECT * FROM results"))]
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in rows)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def all_rows(store):
    """Every row with its ids."""
    return {table: sorted(map(str, rows(store, table))) for table in T}


def halves(first, second, cells):
    """Both databases know a grid of four cells; each has done one half, and both the last cell."""
    for store, minute, half in ((first, 1, (0, 1, 3)), (second, 2, (2, 3))):
        launch(store, cells(4), minute)
        for index in half:
            run(store, cells(4)[index].id, 10 * minute + index, host=f"laptop{minute}", value=minute + index / 10)
    return first, second


def bundle(store, tmp_path, name="out.zip", **options):
    export_sweep(store, "quick", tmp_path / name, **options)
    return tmp_path / name


def cells_of(store):
    return [state.cell_id for state in store.cell_states()]
