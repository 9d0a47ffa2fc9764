"""Sweeps and cells that are deleted, on both kinds of database: exactly their rows go, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
from atma_sweep.results.errors import CellAlreadyRunning, CellUnknown, StoreError, SweepBusy
from atma_sweep.results.maintenance import deletion
from atma_sweep.results.maintenance.deletion import DeletionPlan
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store, open_store
from patience import PATIENCE_S
from sqlalchemy import inspect, text

Make = Callable[..., list[CellRecord]]
REST = "sweep revision revision_cell cell attempt measurement example curve_point provenance event".split()


def holds(owner: Owner, until: datetime | None) -> bool:
    return owner.name == "alive"


def run(store: Store, cell: str, owner: Owner, state: str = "done", parent: int | None = None) -> int:
    kind = "train" if parent is None else "evaluate"
    attempt = store.start_attempt(cell, kind=kind, parent_id=parent, owner=owner, fence=1)  # type: ignore[arg-type]
    recorder = DatabaseRecorder(store, attempt.id, 1)
    config = {"checkpoint": {"path": "s3://b/c"}} if cell.startswith("c01") else {}
    recorder.provenance(Provenance(config=config, seed=0, gpu_count=2))
    recorder.curve([CurvePoint(step=step, tokens=step, wall_s=0.0, train_loss=1.0) for step in range(4)])
    recorder.measurements([Measurement(probe="val", metric="val_loss", value=2.0)])
    recorder.examples([Example(probe="val", metric="val_loss", item=item, value=1.0) for item in range(3)])
    if state != "running":
        store.finish_attempt(attempt.id, 1, state)  # type: ignore[arg-type]
    return attempt.id


def fill(store: Store, four: list[CellRecord], owner: Owner) -> None:
    """Sweep one: c00, c01, then c02, too; sweep two: c00 and c03. c01 was evaluated on its own weights, too."""
    for cells in (four[:2], four[:3]):
        store.record_revision("one", grid_text=f"{len(cells)}", grid_file="one.yaml", cells=cells)
    store.record_revision("two", grid_text="c", grid_file="two.yaml", cells=[four[0], four[3]])
    for cell in four:
        first = run(store, cell.id, owner)
        if cell is four[1]:
            run(store, cell.id, owner, parent=first)
    store.add_event("said", "of one and c01", sweep="one", cell_id=four[1].id)
    store.add_event("said", "of two and c01", sweep="two", cell_id=four[1].id, attempt_id=first)


def counts(store: Store) -> dict[str, int]:
    def ask(session):  # type: ignore[no-untyped-def]
        return {name: session.scalar(text(f"SELECT count(*) FROM {name}")) for name in REST}

    return store.read(ask)  # type: ignore[no-any-return]


def sound(store: Store) -> bool:
    """Every reference leads to a row, told by joins that the code under test does not use."""

    def ask(session):  # type: ignore[no-untyped-def]
        for name in REST:
            for key in inspect(session.connection()).get_foreign_keys(name):
                (column,), (there,), table = key["constrained_columns"], key["referred_columns"], key["referred_table"]
                query = f"SELECT count(*) FROM {name} WHERE {column} IS NOT NULL AND {column} NOT IN (SELECT {there} FROM {table})"
                if session.scalar(text(query)):
                    return False
        return True

    return store.read(ask)  # type: ignore[no-any-return]


def delete(store: Store, *names: str) -> DeletionPlan:
    planned = deletion.plan_deletion(store, names, holds=holds)
    return deletion.execute_deletion(store, planned, names, holds=holds, who="ada")


@pytest.fixture
def four(store: Store, cells: Make, owner: Owner) -> list[CellRecord]:
    records = cells(4)
    fill(store, records, owner)
    return records


def report_of(store: Store, sweep: str) -> list[object]:
    return [store.cell_states(sweep), store.values(sweep), store.revision(sweep), store.sweep(sweep)]


def test_a_sweep_goes_with_the_cells_that_are_its_own(store: Store, four: list[CellRecord]) -> None:
    before, report_before = counts(store), report_of(store, "two")
    planned = deletion.plan_deletion(store, ["one"], holds=holds)
    assert counts(store) == before, "a plan changes nothing"
    assert (planned.sweeps, planned.cells) == (("one",), (four[1].id, four[2].id))
    assert [(retained.cell, retained.why) for retained in planned.kept] == [(four[0].id, "shared with sweep two")]
    assert (planned.places, planned.asked_by) == (("s3://b/c",), {})
    done = deletion.execute_deletion(store, planned, ["one"], holds=holds, who="ada")
    assert done.deleted
    after = counts(store)
    # c01 has two attempts and c02 one, each with 1 number, 3 items, 4 points, and 2 events; one event was the sweep's
    expected = {"sweep": 1, "revision": 2, "revision_cell": 5, "cell": 2, "attempt": 3, "measurement": 3, "example": 9, "curve_point": 12, "provenance": 3}  # fmt: skip
    assert {name: before[name] - after[name] for name in expected} == expected
    assert {name: done.rows[name] for name in expected} == expected
    assert before["event"] - after["event"] == done.rows["event"] - 1, "one event more says what was deleted"
    assert done.rows["event"] == 7
    assert report_of(store, "two") == report_before
    assert [event.message for event in store.events(sweep="two") if event.kind == "said"] == ["of two and c01"]
    assert sound(store)
    assert store.find_cell(four[0].id).id == four[0].id
    assert [event.message for event in store.events()][-1] == "sweep one, 2 cells, 47 rows, by ada"


def test_deleted_cells_can_be_recorded_again(store: Store, four: list[CellRecord], owner: Owner) -> None:
    delete(store, "one", "two")
    assert {name: count for name, count in counts(store).items() if count} == {"event": 1}
    fill(store, four, owner)
    assert [summary.counts for summary in store.sweeps()] == [{"done": 2}, {"done": 3}]


def test_both_sweeps_at_once_take_what_they_share(store: Store, four: list[CellRecord]) -> None:
    assert deletion.plan_deletion(store, ["one", "two", "one"], holds=holds).cells == tuple(cell.id for cell in four)


def test_a_cell_goes_and_the_sweep_that_wants_it_is_named(store: Store, four: list[CellRecord]) -> None:
    before = counts(store)
    done = delete(store, four[1].slug)
    assert (done.sweeps, done.cells, done.asked_by) == ((), (four[1].id,), {"one": 1})
    after = counts(store)
    assert (before["cell"] - after["cell"], before["attempt"] - after["attempt"]) == (1, 2)
    assert [cell.cell_id for cell in store.cell_states("one")] == [four[0].id, four[2].id]
    retained = [event for event in store.events(sweep="one") if event.message == "of one and c01"]
    assert [(event.cell_id, event.attempt_id) for event in retained] == [(None, None)], "what happened to a sweep stays"
    assert sound(store)


def test_what_two_sweeps_share_stays(store: Store, four: list[CellRecord]) -> None:
    planned = deletion.plan_deletion(store, [four[0].id], holds=holds)
    assert planned.is_empty
    assert [retained.why for retained in planned.kept] == ["shared with sweep one and two"]
    with pytest.raises(StoreError, match="sweeps one and two share cell"):
        store.read(lambda session: deletion.require_unshared(session, four[0].id, holds))


def test_a_cell_on_whose_weights_another_was_measured_stays(store: Store, four: list[CellRecord], owner: Owner) -> None:
    theirs = store.attempts(four[2].id)[0].id
    run(store, four[3].id, owner, parent=theirs)
    planned = deletion.plan_deletion(store, ["one"], holds=holds)
    assert planned.cells == (four[1].id,)
    assert [retained.why for retained in planned.kept][1:] == [f"its weights were used to measure cell {four[3].id}"]
    delete(store, "one")
    assert sound(store)
    assert set(deletion.plan_deletion(store, ["two", four[2].id], holds=holds).cells) == {four[i].id for i in (0, 2, 3)}


def test_deletion_refuses_running_cells(store: Store, four: list[CellRecord], owner: Owner) -> None:
    before = counts(store)
    fence = store.acquire_sweep("one", Owner(name="alive", host="here", pid=1, started=1.0), 60)
    for names in (["one"], [four[1].id], ["one", "two"]):
        with pytest.raises(SweepBusy, match="is run by alive"):
            deletion.plan_deletion(store, names, holds=holds)
    with pytest.raises(SweepBusy):
        store.write(lambda session: deletion.require_unshared(session, four[1].id, holds))
    store.release_sweep("one", fence)
    run(store, four[2].id, owner, "running")
    for names in (["one"], [four[2].id]):
        with pytest.raises(CellAlreadyRunning, match="is running"):
            deletion.plan_deletion(store, names, holds=holds, is_alive=lambda attempt: True)
    assert counts(store) | {"event": 0} == before | {"event": 0, "attempt": before["attempt"] + 1, "measurement": before["measurement"] + 1, "example": before["example"] + 3, "curve_point": before["curve_point"] + 4, "provenance": before["provenance"] + 1}  # fmt: skip
    assert deletion.plan_deletion(store, ["one"], holds=holds, is_alive=lambda attempt: False).cells[-1] == four[2].id


def test_an_attempt_on_this_host_lives_as_long_as_its_process(
    store: Store, four: list[CellRecord], owner: Owner
) -> None:
    import psutil

    me = psutil.Process()
    mine = Owner(name="me", host=os.uname().nodename, pid=me.pid, started=me.create_time())
    alive = store.attempt(run(store, four[1].id, mine, "running"))
    dead = store.attempt(run(store, four[2].id, Owner(name="x", host=mine.host, pid=me.pid, started=1.0), "running"))
    far = store.attempt(run(store, four[3].id, owner, "running"))
    assert [deletion.attempt_is_alive(attempt_) for attempt_ in (alive, dead, far)] == [True, False, True]


def test_a_plan_that_is_out_of_date_deletes_nothing(store: Store, four: list[CellRecord], owner: Owner) -> None:
    planned = deletion.plan_deletion(store, ["one"], holds=holds)
    run(store, four[2].id, owner)
    before = counts(store)
    with pytest.raises(StoreError, match="changed meanwhile"):
        deletion.execute_deletion(store, planned, ["one"], holds=holds, who="ada")
    assert counts(store) == before


def test_the_beginning_of_an_id_is_not_enough(store: Store, four: list[CellRecord]) -> None:
    with pytest.raises(CellUnknown, match="give its complete id"):
        deletion.plan_deletion(store, ["c01"], holds=holds)
    with pytest.raises(CellUnknown, match="no sweep is named 'nothing'"):
        deletion.plan_deletion(store, ["nothing"], holds=holds)


def _dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        return list(connection.iterdump())


KILLED = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from atma_sweep.results.maintenance import deletion
from atma_sweep.results.store.store import open_store

at, seen = int(sys.argv[2]), [0]

@event.listens_for(Engine, "after_cursor_execute")
def count(connection, cursor, statement, *rest):
    if statement.startswith(("DELETE", "UPDATE")):
        seen[0] += 1
        if seen[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

store = open_store(sys.argv[1])
holds = lambda owner, until: False
found = deletion.PLAN(store, ["one"], holds=holds)
deletion.execute_deletion(store, found, ["one"], holds=holds, who="ada")
print(seen[0])
""".replace("PLAN", deletion.plan_deletion.__name__)


@pytest.mark.thorough
@pytest.mark.parametrize("at", [4, 1, 9])
def test_killed_in_the_midst_the_database_is_as_it_was(tmp_path: Path, cells: Make, owner: Owner, at: int) -> None:
    path = tmp_path / "atma.db"
    store = open_store(path, create=True)
    fill(store, cells(4), owner)
    store.close()
    before = _dump(path)
    ask = partial(subprocess.run, capture_output=True, text=True, timeout=PATIENCE_S)
    done = ask([sys.executable, "-c", KILLED, str(path), str(at)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert _dump(path) == before
    done = ask([sys.executable, "-c", KILLED, str(path), "0"])
    assert int(done.stdout) > 9, done.stderr
    assert _dump(path) != before
