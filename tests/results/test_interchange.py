"""Bundles: what goes out comes in, two databases merge to one whole, and nothing hostile gets past the manifest."""

import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from atma_sweep.results import interchange, schema
from atma_sweep.results.errors import BundleError
from atma_sweep.results.interchange import export_sweep, export_table, import_bundle
from atma_sweep.results.recorder import Recorder
from atma_sweep.results.records import CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store import StoreError, StoreTooNew, SweepBusy, SweepUnknown, open_store
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
    """One attempt with numbers in every table, begun at that minute."""
    owner = Owner(name="ada", host=host, pid=100 + minute, started=1.5)
    attempt = store.start_attempt(cell, owner=owner, fence=1, kind=kind, parent_id=parent, steps_total=7)
    recorder = Recorder(store, attempt.id, 1)
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


def natural(store, *, numbers=False):
    """Everything in the database by what it is, whatever its ids are. Two equal ones hold the same."""
    attempts = {row["id"]: row for row in rows(store, "attempt")}

    def who(attempt):
        row = attempts.get(attempt)
        return row and tuple(str(row[name]) for name in ("cell_id", "started_at", "host", "pid", "kind"))

    found = {}
    for table in T:
        kept = []
        for row in rows(store, table):
            shown = {name: value for name, value in row.items() if name not in IGNORED}
            for name in ("attempt_id", "parent_id"):
                if name in shown:
                    shown[name] = who(shown[name])
            kept.append(json.dumps(shown, sort_keys=True, default=str))
        found[table] = sorted(kept)
    return found


def view(store):
    with store.transaction(write=False) as session:
        found = [dict(row._mapping) for row in session.execute(text("SELECT * FROM results"))]
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in found)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def whole(store):
    """Every row with its ids."""
    return {table: sorted(map(str, rows(store, table))) for table in T}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Artifacts of a PostgreSQL database go into the working folder."""
    monkeypatch.chdir(tmp_path)


def halves(first, second, cells):
    """Both databases know a grid of four cells; each has done one half, and both the last cell."""
    for store, minute, half in ((first, 1, (0, 1, 3)), (second, 2, (2, 3))):
        launch(store, cells(4), minute)
        for index in half:
            run(store, cells(4)[index].id, 10 * minute + index, host=f"laptop{minute}", value=minute + index / 10)
    return first, second


@pytest.fixture
def laptops(make, cells):
    return halves(make("a"), make("b"), cells)


def bundle(store, tmp_path, name="out.zip", **options):
    export_sweep(store, "quick", tmp_path / name, **options)
    return tmp_path / name


class TestRoundTrip:
    def test_everything_comes_back_and_goes_out_again_as_the_same_bytes(self, store, cells, tmp_path, make):
        launch(store, cells(3), 1, grid="a: ä\n")
        trained = run(store, cells(3)[0].id, 5, value=1 / 3)
        run(store, cells(3)[0].id, 6, kind="evaluate", parent=trained.id, value=2e-308)
        run(store, cells(3)[1].id, 7, state="failed")
        launch(store, cells(2), 8, grid="b")
        store.add_event("note", "hello", sweep="quick")
        file = bundle(store, tmp_path)
        other = make("other")
        summary = import_bundle(other, file)
        assert summary.added == {**summary.added, "sweep": 1, "revision": 2, "cell": 3, "attempt": 3, "measurement": 6}
        assert natural(other) == natural(store)
        assert view(other) == view(store)
        assert [a.parent_id for a in other.attempts(cells(3)[0].id)] == [None, other.attempts(cells(3)[0].id)[0].id]
        assert bundle(other, tmp_path, "again.zip").read_bytes() == file.read_bytes()
        assert other.cell(cells(3)[2].id) == replace(cells(3)[2], axes=store.cell(cells(3)[2].id).axes)
        assert [state.state for state in other.cell_states(orphans=True)] == ["new"]

    def test_importing_twice_changes_nothing(self, laptops, tmp_path):
        first, second = laptops
        import_bundle(first, bundle(second, tmp_path))
        before = whole(first)
        again = import_bundle(first, bundle(second, tmp_path))
        assert whole(first) == before
        assert set(again.added.values()) == {0}
        assert again.present["attempt"] == 2

    def test_another_name(self, laptops, tmp_path):
        first, second = laptops
        import_bundle(first, bundle(second, tmp_path), rename="theirs")
        assert {summary.name: summary.counts for summary in first.sweeps()} == {
            "theirs": {"done": 4}, "quick": {"done": 4},
        }  # fmt: skip
        assert import_bundle(first, bundle(second, tmp_path), rename="theirs").added["attempt"] == 0
        for wrong in ("", "x\n", "\x1b[31m", "x" * 300):
            with pytest.raises(StoreError, match="--name"):
                import_bundle(first, bundle(second, tmp_path), rename=wrong)

    @pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
    def test_unknown_sweep_and_places_that_cannot_be(self, laptops, tmp_path):
        with pytest.raises(SweepUnknown):
            export_sweep(laptops[0], "quik", tmp_path / "x.zip")
        with pytest.raises(StoreError, match="no folder"):
            export_sweep(laptops[0], "quick", tmp_path / "no" / "x.zip")
        with pytest.raises(StoreError, match="is a folder"):
            export_sweep(laptops[0], "quick", tmp_path)
        assert not [path for path in tmp_path.iterdir() if "zip" in path.name]
        with pytest.raises(BundleError, match="no file"):
            import_bundle(laptops[0], tmp_path / "none.zip")


class TestMerging:
    def test_two_halves_make_the_whole(self, laptops, tmp_path):
        first, second = laptops
        out = bundle(first, tmp_path, "1.zip"), bundle(second, tmp_path, "2.zip")
        import_bundle(first, out[1])
        import_bundle(second, out[0])
        assert natural(first)["attempt"] == natural(second)["attempt"]
        assert natural(first)["measurement"] == natural(second)["measurement"]
        assert view(first) == view(second)
        assert [summary.counts for summary in first.sweeps()] == [{"done": 4}]
        assert [summary.revision for summary in (*first.sweeps(), *second.sweeps())] == [1, 1]
        # both did the last cell, the second laptop later: its number is the newest on either
        newest = [value.value for value in first.measurements(cells_of(first)[3]) if value.probe == "val"]
        assert newest == [2.3]

    @pytest.mark.parametrize(
        ("backend", "seed"), [*(("sqlite", seed) for seed in range(4)), ("postgresql", 1)], indirect=["backend"]
    )
    def test_any_order_of_merging_gives_the_same_results(self, make, cells, tmp_path, seed):
        """Random histories of three machines, merged in two orders, against each other and against one plain list."""
        draw = random.Random(seed)
        grid = cells(3)
        machines = [make(name) for name in "abc"]
        minutes = draw.sample(range(100, 900), 60)
        history = []
        for number, store in enumerate(machines):
            launch(store, grid[: draw.randint(2, 3)], number, grid=draw.choice(["x", "y"]))
            for minute in sorted(minutes.pop() for _ in range(draw.randint(3, 8))):
                cell, state = draw.choice(grid[:2]).id, draw.choice(["done", "done", "failed"])
                run(store, cell, minute, host=f"h{number}", state=state, value=draw.random())
                history.append((minute, cell, state))
        out = [bundle(store, tmp_path, f"{seed}-{index}.zip") for index, store in enumerate(machines)]
        merged = []
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            store = make(f"m{order}")
            for index in order:
                import_bundle(store, out[index])
            merged.append(store)
        import_bundle(machines[1], out[2])
        import_bundle(machines[1], out[0])
        merged.append(machines[1])
        assert all(view(store) == view(merged[0]) for store in merged)
        assert all(natural(store)["attempt"] == natural(merged[0])["attempt"] for store in merged)
        for store in merged:
            with store.transaction(write=False) as session:
                for table in T.values():
                    for key in table.foreign_keys:
                        lost = select(key.parent).where(key.parent.not_in(select(key.column)))
                        assert session.scalars(lost).all() == []
            for cell in grid[:2]:
                expected = [(m, state) for m, c, state in sorted(history) if c == cell.id]
                found = store.attempts(cell.id)
                assert [(attempt.pid - 100, attempt.state) for attempt in found] == expected
                assert len({attempt.number for attempt in found}) == len(found)
                assert len({attempt.run_dir for attempt in found}) == len(found)
                for attempt in found:
                    assert store.provenance(attempt.id).seed == attempt.pid - 100
                    assert len(store.curve(attempt.id)) == 3
        # and the next attempt goes on after all of them
        assert merged[0].start_attempt(grid[0].id, owner=Owner(name="a", host="h", pid=1, started=1.0), fence=1)

    def test_older_attempts_go_before_younger_ones_whose_numbers_stay(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        for store in (ours, theirs):
            launch(store, cells(1))
        cell = cells(1)[0].id
        trained = run(ours, cell, 50, value=5.0)
        run(ours, cell, 60, kind="evaluate", parent=trained.id, value=6.0)
        run(theirs, cell, 10, host="there", value=1.0)
        run(theirs, cell, 55, host="there", value=2.0)
        before = {attempt.pid: (attempt.number, attempt.run_dir) for attempt in ours.attempts(cell)}
        import_bundle(ours, bundle(theirs, tmp_path))
        found = ours.attempts(cell)
        assert [attempt.pid - 100 for attempt in found] == [10, 50, 55, 60]
        assert {a.pid: (a.number, a.run_dir) for a in found if a.host == "here"} == before
        assert [attempt.number for attempt in found] == [3, 1, 4, 2]
        assert found[3].parent_id == found[1].id
        assert [value.value for value in ours.measurements(cell) if value.probe == "val"] == [6.0]
        assert {event.attempt_id for event in ours.events(cell_id=cell)} == {attempt.id for attempt in found}

    def test_a_clock_that_went_back_keeps_the_order_of_its_machine(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        cell = cells(1)[0].id
        for store in (ours, theirs):
            launch(store, cells(1))
        for minute in (50, 20, 30):
            run(ours, cell, minute)
        run(theirs, cell, 40, host="there")
        out = bundle(ours, tmp_path, "1.zip"), bundle(theirs, tmp_path, "2.zip")
        import_bundle(ours, out[1])
        import_bundle(theirs, out[0])
        assert [a.pid - 100 for a in ours.attempts(cell)] == [a.pid - 100 for a in theirs.attempts(cell)]
        assert [a.pid - 100 for a in ours.attempts(cell) if a.host == "here"] == [50, 20, 30]

    @pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
    def test_clocks_that_went_back_after_a_common_past(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        cell = cells(1)[0].id
        launch(ours, cells(1))
        run(ours, cell, 50)
        import_bundle(theirs, bundle(ours, tmp_path, "0.zip"))
        run(ours, cell, 30, host="one")
        run(theirs, cell, 20, host="two")
        run(theirs, cell, 25, host="two")
        out = bundle(ours, tmp_path, "1.zip"), bundle(theirs, tmp_path, "2.zip")
        for store, file in ((ours, out[1]), (theirs, out[0])):
            import_bundle(store, file)
            assert [attempt.pid - 100 for attempt in store.attempts(cell)] == [50, 20, 25, 30]
        assert view(ours) == view(theirs)

    def test_revisions_merge_by_age(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(2), 1, grid="x")
        launch(ours, cells(4), 9, grid="newest")
        launch(theirs, cells(2), 2, grid="x")
        launch(theirs, cells(3), 5, grid="between")
        out = bundle(ours, tmp_path, "1.zip"), bundle(theirs, tmp_path, "2.zip")
        for store, file in ((ours, out[1]), (theirs, out[0])):
            import_bundle(store, file)
            assert [store.revision("quick", n).grid_text for n in (1, 2, 3)] == ["x", "between", "newest"]
            assert len(store.cell_states("quick")) == 4
            assert [len(store.cell_states("quick", revision=n)) for n in (1, 2, 3)] == [2, 3, 4]
            with pytest.raises(StoreError):
                store.revision("quick", 4)
        assert view(ours) == view(theirs)

    def test_a_shared_cell_of_another_sweep(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(2), 1, name="mine")
        launch(theirs, cells(3), 2)
        run(theirs, cells(3)[0].id, 5)
        import_bundle(ours, bundle(theirs, tmp_path))
        assert [state.state for state in ours.cell_states("mine")] == ["done", "new"]
        assert len(rows(ours, "cell")) == 3

    @pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
    def test_sweeps_of_one_name_that_share_nothing_are_told_of(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(1, prefix="a"))
        launch(theirs, cells(1, prefix="b"), 3)
        notes = import_bundle(ours, bundle(theirs, tmp_path)).notes
        assert any("--name keeps them apart" in note for note in notes)

    @pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
    def test_a_cell_that_is_evaluated_otherwise_stays(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        other = replace(cells(1)[0], config={"eval": {"lengths": [1]}})
        launch(ours, cells(1))
        launch(theirs, [other])
        notes = import_bundle(ours, bundle(theirs, tmp_path)).notes
        assert ours.cell(other.id).config == cells(1)[0].config
        assert any("evaluated or kept otherwise" in note for note in notes)


def cells_of(store):
    return [state.cell_id for state in store.cell_states()]


class TestRunning:
    def test_a_running_attempt_comes_in_as_interrupted_and_is_replaced_by_its_end(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        cell = cells(1)[0].id
        launch(theirs, cells(1))
        attempt = run(theirs, cell, 5, host="there", state="running", value=9.0)
        Recorder(theirs, attempt.id, 1).checkpoint(f"{attempt.run_dir}/checkpoint-1")
        import_bundle(ours, bundle(theirs, tmp_path, "early.zip"))
        (copy,) = ours.attempts(cell)
        assert (copy.state, copy.finished_at, copy.checkpoint) == ("interrupted", copy.heartbeat_at, None)
        assert "still running when it was exported, on there (pid 105)" in copy.cause
        assert ours.live_attempts() == []
        before = whole(ours)
        import_bundle(ours, bundle(theirs, tmp_path, "same.zip"))
        assert whole(ours) == before
        # later, still running: the copy goes on
        Recorder(theirs, attempt.id, 1).curve([CurvePoint(step=9, tokens=9, wall_s=9.0, train_loss=0.5)])
        import_bundle(ours, bundle(theirs, tmp_path, "later.zip"))
        assert [point.step for point in ours.curve(copy.id)] == [0, 1, 2, 9]
        # and finished
        Recorder(theirs, attempt.id, 1).measurements([Measurement(probe="val", metric="val_loss", value=1.0)])
        theirs.finish_attempt(attempt.id, 1, "done")
        import_bundle(ours, bundle(theirs, tmp_path, "end.zip"))
        (done,) = ours.attempts(cell)
        assert (done.id, done.state, done.cause) == (copy.id, "done", None)
        assert {value.probe: value.value for value in ours.measurements(cell)} == {"val": 1.0, "clean": None}
        assert natural(ours)["measurement"] == natural(theirs)["measurement"]
        # an old bundle, and the copy that went home again, add nothing
        before = whole(ours)
        import_bundle(ours, tmp_path / "early.zip")
        import_bundle(ours, tmp_path / "later.zip")
        assert whole(ours) == before

    def test_its_own_machine_takes_no_copy_of_it(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(1))
        attempt = run(ours, cells(1)[0].id, 5, state="running")
        import_bundle(theirs, bundle(ours, tmp_path, "1.zip"))
        Recorder(ours, attempt.id, 1).heartbeat()
        before = whole(ours)
        import_bundle(ours, bundle(theirs, tmp_path, "2.zip"))
        assert whole(ours) == before
        Recorder(ours, attempt.id, 1).heartbeat()
        ours.finish_attempt(attempt.id, 1, "done")
        before = whole(ours)
        import_bundle(ours, tmp_path / "2.zip")
        assert whole(ours) == before

    def test_cells_that_run_here_are_left_alone(self, laptops, tmp_path, cells):
        first, second = laptops
        run(first, cells(4)[2].id, 90, state="running")
        before = whole(first)
        with pytest.raises(SweepBusy, match=r"being run here \(attempt 1, pid 190 on here\)"):
            import_bundle(first, bundle(second, tmp_path))
        assert whole(first) == before

    def test_older_attempts_are_not_set_among_those_of_a_sweep_that_runs(self, laptops, tmp_path, owner):
        first, second = laptops
        out = bundle(first, tmp_path)
        fence = second.acquire_sweep("quick", owner, 60)
        with pytest.raises(SweepBusy, match="import again when the launch has ended"):
            import_bundle(second, out)
        second.release_sweep("quick", fence)
        assert import_bundle(second, out).added["attempt"] == 3

    def test_new_cells_may_come_while_the_sweep_runs(self, make, cells, tmp_path, owner):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(2), 1)
        launch(theirs, cells(2), 1)
        run(theirs, cells(2)[1].id, 5)
        ours.acquire_sweep("quick", owner, 60)
        running = ours.start_attempt(cells(2)[0].id, owner=owner, fence=1)
        import_bundle(ours, bundle(theirs, tmp_path))
        Recorder(ours, running.id, 1).heartbeat()
        assert [state.state for state in ours.cell_states()] == ["running", "done"]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
class TestFiles:
    def test_weights_and_logs_come_along(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(theirs, cells(2))
        run(theirs, cells(2)[0].id, 5, weights=os.urandom(3_000_000))
        run(theirs, cells(2)[1].id, 6, weights=b"tiny")
        out = bundle(theirs, tmp_path, weights=True)
        assert bundle(theirs, tmp_path, "same.zip", weights=True).read_bytes() == out.read_bytes()
        assert import_bundle(ours, out).files == 4
        assert files(ours.runs) == files(theirs.runs)
        assert [state.weights for state in ours.cell_states()] == [state.weights for state in theirs.cell_states()]
        assert import_bundle(ours, out).files == 0
        assert sorted(os.listdir(ours.runs)) == sorted(cells_of(ours))

    def test_the_end_of_an_attempt_brings_its_files_beside_those_of_its_beginning(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(theirs, cells(1))
        attempt = run(theirs, cells(1)[0].id, 5, state="running", weights=b"w", log="begun\n")
        import_bundle(ours, bundle(theirs, tmp_path, "early.zip", weights=True))
        (theirs.runs / attempt.run_dir / "log.txt").write_text("begun\nended\n")
        theirs.finish_attempt(attempt.id, 1, "done", weights=f"{attempt.run_dir}/weights.safetensors")
        import_bundle(ours, bundle(theirs, tmp_path, "end.zip", weights=True))
        (found,) = ours.attempts(cells(1)[0].id)
        assert (ours.runs / found.weights).read_bytes() == b"w"
        assert (ours.runs / found.run_dir / "log.txt").read_text() == "begun\nended\n"
        assert (ours.runs / attempt.run_dir / "log.txt").read_text() == "begun\n"

    def test_without_weights_none_are_named(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(theirs, cells(1))
        run(theirs, cells(1)[0].id, 5, weights=b"w")
        out = export_sweep(theirs, None, tmp_path / "bare.zip")
        assert any("--with-weights" in note for note in out.notes)
        summary = import_bundle(ours, tmp_path / "bare.zip")
        assert any("not in the bundle" in note for note in summary.notes)
        assert ours.cell_states()[0].weights is None
        assert not ours.runs.exists()
        # they may follow, for attempts that are there already
        import_bundle(ours, bundle(theirs, tmp_path, weights=True))
        (attempt,) = ours.attempts(cells(1)[0].id)
        assert (ours.runs / attempt.weights).read_bytes() == b"w"
        assert attempt.state == "done"

    def test_weights_that_were_lost_come_back(self, make, cells, tmp_path):
        store = make("a")
        launch(store, cells(1))
        run(store, cells(1)[0].id, 5, weights=b"w")
        out = bundle(store, tmp_path, weights=True)
        shutil.rmtree(store.runs)
        import_bundle(store, out)
        assert (store.runs / store.cell_states()[0].weights).read_bytes() == b"w"

    def test_missing_weights_are_told_of(self, make, cells, tmp_path):
        store = make("a")
        launch(store, cells(1))
        run(store, cells(1)[0].id, 5, weights=b"w")
        shutil.rmtree(store.runs)
        assert any("are missing" in note for note in export_sweep(store, None, tmp_path / "x.zip", weights=True).notes)

    def test_folders_in_the_way_are_left_alone(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        cell = cells(1)[0].id
        for store, minute, word in ((ours, 50, b"ours"), (theirs, 10, b"theirs")):
            launch(store, cells(1))
            run(store, cell, minute, host=str(minute), weights=word)
        stranger = ours.runs / cell / "2"
        stranger.mkdir()
        (stranger / "weights.safetensors").write_bytes(b"stranger")
        import_bundle(ours, bundle(theirs, tmp_path, weights=True))
        found = {attempt.host: (ours.runs / attempt.weights).read_bytes() for attempt in ours.attempts(cell)}
        assert found == {"50": b"ours", "10": b"theirs"}
        assert (stranger / "weights.safetensors").read_bytes() == b"stranger"

    def test_nothing_stays_of_an_import_that_fails(self, laptops, tmp_path, cells, monkeypatch):
        first, second = laptops
        run(second, cells(4)[0].id, 95, weights=b"w", log="x")
        out = bundle(second, tmp_path, weights=True)
        before, disk = whole(first), sorted(tmp_path.rglob("*"))

        def refuse(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(interchange, "_sync", refuse)
        with pytest.raises(StoreError, match="No space left"):
            import_bundle(first, out)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        real = os.rename

        def interrupted(source, target):
            real(source, target)
            monkeypatch.setattr(os, "rename", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            import_bundle(first, out)
        assert whole(first) == before
        left = {path for path in tmp_path.rglob("*") if path not in disk and not path.name.endswith(("-wal", "-shm"))}
        assert {path.name for path in left} <= {first.runs.name}  # empty
        assert import_bundle(first, out).added["attempt"] == 3

    def test_a_full_disk_is_noticed_first(self, laptops, tmp_path, monkeypatch):
        out = bundle(laptops[1], tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(BundleError, match="make room"):
            import_bundle(laptops[0], out)


KILLED = """
import os, signal, sys
from atma_sweep.results import interchange
from atma_sweep.results.store import open_store
store, out, limit = open_store(sys.argv[1]), sys.argv[2], int(sys.argv[3])
seen = [0]
def hook(event, arguments):
    if event in ("os.rename", "os.mkdir", "open", "sqlite3.connect"):
        seen[0] += 1
        if seen[0] == limit:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from sqlalchemy import event
@event.listens_for(store._engine, "before_cursor_execute")
def statement(*arguments):
    hook("os.rename", ())
interchange.import_bundle(store, interchange.Path(out))
print(seen[0])
"""


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_an_import_that_is_killed_leaves_all_or_nothing(laptops, tmp_path, cells):
    first, second = laptops
    run(second, cells(4)[0].id, 95, weights=b"new weights")
    out = bundle(second, tmp_path, weights=True)
    before = natural(first)
    first.close()
    whole = tmp_path / "whole"
    shutil.copytree(first.path.parent, whole)
    counted = subprocess.run(
        [sys.executable, "-c", KILLED, str(whole / "atma.db"), str(out), "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    total, after = int(counted.stdout), natural(open_store(whole / "atma.db"))
    draw, outcomes = random.Random(3), []
    for index in range(5):
        copy = tmp_path / f"killed{index}"
        shutil.copytree(first.path.parent, copy)
        limit = draw.randint(1, total) if index else total - 1
        done = subprocess.run([sys.executable, "-c", KILLED, str(copy / "atma.db"), str(out), str(limit)], check=False)
        assert done.returncode == -signal.SIGKILL
        store = open_store(copy / "atma.db")
        assert natural(store) in (before, after)
        outcomes.append(natural(store) == after)
        import_bundle(store, out)  # and again, to the end
        assert natural(store) == after
        (mine,) = [attempt for attempt in store.attempts(cells(4)[0].id) if attempt.weights]
        assert (store.runs / mine.weights).read_bytes() == b"new weights"
        store.close()
    assert False in outcomes


# --- hostile bundles ------------------------------------------------------------------------------------------------


def unpacked(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(file, members, /, **changes):
    """Writes the members with a manifest that fits them, but for what `changes` says of it."""
    manifest = json.loads(members["manifest.json"])
    listed = {name: data for name, data in members.items() if name != "manifest.json"}
    for name, data in listed.items():
        facts = manifest["members"].setdefault(name, {"role": "log" if name.endswith("log.txt") else "weights"})
        facts |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        if name.endswith(".jsonl"):
            manifest["counts"][name[:-6]] = data.count(b"\n")
    manifest["members"] = {name: facts for name, facts in manifest["members"].items() if name in listed}
    for path, value in changes.items():
        place, *rest = path.split("__")
        if rest:
            manifest[place][rest[0]] = value
        else:
            manifest[place] = value
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in listed.items():
            archive.writestr(name, data)
        archive.writestr("manifest.json", json.dumps(manifest))
    return file


def edited(members, table, **values):
    """The members with the first row of a table changed."""
    first, *rest = members[f"{table}.jsonl"].splitlines(keepends=True)
    row = json.loads(first) | values
    return members | {f"{table}.jsonl": json.dumps(row).encode() + b"\n" + b"".join(rest)}


ROWS = {
    "a folder outside": ("attempt", {"run_dir": "../../../etc"}),
    "an absolute folder": ("attempt", {"run_dir": "/etc"}),
    "a folder of another cell": ("attempt", {"run_dir": "corpora/1"}),
    "dots in a folder": ("attempt", {"run_dir": "c02000000000/../../x"}),
    "an unknown cell": ("attempt", {"cell_id": "nothing"}),
    "an unknown parent": ("attempt", {"parent_id": 99}),
    "a number of zero": ("attempt", {"number": 0}),
    "an unknown state": ("attempt", {"state": "splendid"}),
    "running and finished": ("attempt", {"state": "running"}),
    "a time that is none": ("attempt", {"started_at": "yesterday"}),
    "a time without seconds": ("attempt", {"started_at": "2026-01-02T03:04Z"}),
    "a bool for a number": ("attempt", {"number": True}),
    "a number beyond 64 bits": ("measurement", {"n": 2**63}),
    "text for a number": ("measurement", {"value": "1.0"}),
    "a missing unit": ("measurement", {"unit": None}),
    "neither value nor reason": ("measurement", {"value": None, "reason": None}),
    "a lone surrogate": ("measurement", {"unit": "\ud800"}),
    "another column": ("measurement", {"id": 5}),
    "an unknown attempt": ("measurement", {"attempt_id": 77}),
    "the key of another row": ("curve_point", {"step": 1}),
    "a list for an object": ("cell", {"config": []}),
    "a long id": ("cell", {"id": "c" * 13}),
    "an id with a slash": ("cell", {"id": "../x"}),
    "another sweep": ("sweep", {"name": "other"}),
    "a revision below one": ("revision", {"number": -1}),
    "a link to nothing": ("revision_cell", {"revision": 9}),
    "an event of nobody": ("event", {"attempt_id": 55}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, cells):
    """(the file of a database, the members of a bundle for it)"""
    folder = tmp_path_factory.mktemp("prepared")
    first, second = halves(*(open_store(folder / name, create=True) for name in ("a.db", "b.db")), cells)
    run(second, cells(4)[0].id, 95, weights=b"w")
    members = unpacked(bundle(second, folder, weights=True))
    first.close()
    second.close()
    return first.path, members


@pytest.fixture
def victim(prepared, tmp_path):
    """(a database, the members of a bundle for it, a check that nothing has changed)"""
    path, members = prepared
    store = open_store(shutil.copy(path, tmp_path / "a.db"))
    before, disk = whole(store), {*files(tmp_path), "evil.zip"}

    def unchanged():
        assert whole(store) == before
        assert {name for name in files(tmp_path) if not name.endswith(("-wal", "-shm"))} <= disk

    yield store, members, unchanged
    store.close()


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_cannot_be_are_refused(victim, tmp_path, what):
    store, members, unchanged = victim
    table, values = ROWS[what]
    with pytest.raises(BundleError, match="nothing was changed"):
        import_bundle(store, packed(tmp_path / "evil.zip", edited(members, table, **values)))
    unchanged()


LINES = {
    "no JSON": b"{\n",
    "an array": b"[1]\n",
    "NaN": b'{"attempt_id": NaN}\n',
    "a key twice": b'{"a": 1, "a": 2}\n',
    "no end": b"{}",
    "too deep": b"[" * 100_000 + b"\n",
    "a number of many digits": b'{"a": ' + b"9" * 10_000 + b"}\n",
    "no UTF-8": b'{"a": "\xff"}\n',
}


@pytest.mark.parametrize("what", LINES)
def test_lines_that_are_no_rows(victim, tmp_path, what):
    store, members, unchanged = victim
    members = members | {"measurement.jsonl": members["measurement.jsonl"] + LINES[what]}
    with pytest.raises(BundleError):
        import_bundle(store, packed(tmp_path / "evil.zip", members))
    unchanged()


MANIFESTS = {
    "a wrong hash": {"members__cell.jsonl": {"sha256": "0" * 64, "bytes": 0}},
    "no members": {"members": {}},
    "a count too many": {"counts__event": 99},
    "a negative count": {"counts__event": -1},
    "no format": {"format": None},
    "something else": {"what": "a cake"},
    "no sweep": {"sweep": ""},
    "a sweep that colours the terminal": {"sweep": "\x1b[31m"},
}


def test_a_row_that_was_changed_without_its_hash(victim, tmp_path):
    """Another number of the same length, in a zip that is in order."""
    store, members, unchanged = victim
    manifest = json.loads(members["manifest.json"])
    changed = members | {"measurement.jsonl": members["measurement.jsonl"].replace(b":2.2,", b":1.2,")}
    assert changed != members
    facts = manifest["members"]["measurement.jsonl"]
    with pytest.raises(BundleError, match="has not the hash"):
        import_bundle(store, packed(tmp_path / "evil.zip", changed, **{"members__measurement.jsonl": facts}))
    weights = next(name for name in members if name.endswith("safetensors"))
    facts = manifest["members"][weights]
    with pytest.raises(BundleError, match="has not the hash"):
        import_bundle(store, packed(tmp_path / "evil.zip", members | {weights: b"x"}, **{f"members__{weights}": facts}))
    unchanged()


@pytest.mark.parametrize("what", MANIFESTS)
def test_manifests_that_lie(victim, tmp_path, what):
    store, members, unchanged = victim
    with pytest.raises(BundleError):
        import_bundle(store, packed(tmp_path / "evil.zip", members, **MANIFESTS[what]))
    unchanged()


@pytest.mark.parametrize(
    "changes", [{"format": 2}, {"schema": "9999"}, {"format": 99, "schema": "from the future", "members": 1}]
)
def test_a_newer_bundle_names_the_remedy(victim, tmp_path, changes):
    store, members, unchanged = victim
    with pytest.raises(StoreTooNew, match="upgrade the program"):
        import_bundle(store, packed(tmp_path / "evil.zip", members, **changes))
    unchanged()


NAMES = [
    "../evil",
    "/evil",
    "files/../../evil",
    "files/1/../evil",
    "files/1/.hidden",
    "files/1/a/b",
    "files/77/log.txt",
]


@pytest.mark.parametrize("name", [*NAMES, "files/1/a\\..\\evil", "attempt.jsonl/x", "files/0/log.txt", "evil.py"])
def test_names_that_lead_elsewhere(victim, tmp_path, name):
    store, members, unchanged = victim
    with pytest.raises(BundleError):
        import_bundle(store, packed(tmp_path / "evil.zip", members | {name: b"evil"}))
    unchanged()


def test_members_that_the_manifest_does_not_list_or_lists_twice(victim, tmp_path):
    store, members, unchanged = victim
    file = packed(tmp_path / "evil.zip", members)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("files/1/more.txt", b"x")
    with pytest.raises(BundleError, match="members are not those"):
        import_bundle(store, file)
    file = packed(tmp_path / "evil.zip", members)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("attempt.jsonl", b"")
    with pytest.raises(BundleError, match="twice"):
        import_bundle(store, file)
    unchanged()


def test_sizes_are_bounded_by_the_manifest(victim, tmp_path):
    store, members, unchanged = victim
    lies = {"sha256": hashlib.sha256(members["cell.jsonl"]).hexdigest(), "bytes": 7}
    with pytest.raises(BundleError, match="size"):
        import_bundle(store, packed(tmp_path / "evil.zip", members, **{"members__cell.jsonl": lies}))
    # a bomb: the directory of the zip says little, the data unpack to much
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"\0" * 50_000_000)
    file = packed(tmp_path / "evil.zip", members | {"files/1/zeros": b"\0" * 1_000_000})
    data = file.read_bytes().replace((1_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    file.write_bytes(data)
    with pytest.raises(BundleError):
        import_bundle(store, file)
    unchanged()


def test_damaged_files(victim, tmp_path):
    """A bit flipped anywhere: refused, or (in what a zip does not care about) the same rows."""
    store, members, unchanged = victim
    good = packed(tmp_path / "good.zip", members).read_bytes()
    draw, refused = random.Random(1), 0
    for _ in range(150):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "evil.zip").write_bytes(data)
        try:
            with interchange._opened(tmp_path / "evil.zip") as found:
                interchange._Content(found, None)
        except (BundleError, StoreTooNew):
            refused += 1
    assert refused > 75
    for cut in (0, 1, 100, len(good) // 2, len(good) - 1):
        (tmp_path / "evil.zip").write_bytes(good[:cut])
        with pytest.raises(BundleError):
            import_bundle(store, tmp_path / "evil.zip")
    (tmp_path / "good.zip").unlink()
    with pytest.raises(BundleError):
        import_bundle(store, tmp_path)
    unchanged()


def test_ids_are_compared_with_configs_when_asked(victim, tmp_path):
    store, members, unchanged = victim
    file = packed(tmp_path / "evil.zip", members)
    with pytest.raises(BundleError, match="is that of other"):
        import_bundle(store, file, identify=lambda config: "other")
    with pytest.raises(BundleError, match="cannot be read"):
        import_bundle(store, file, identify=lambda config: config["nothing"])
    unchanged()
    published = packed(tmp_path / "evil.zip", edited(members, "sweep", read_only=True))
    assert import_bundle(store, published, rename="published", identify=lambda config: "other").added["sweep"] == 1


def test_a_bundle_of_the_first_release(victim, tmp_path):
    """It lacks the columns that came later; they get their defaults."""
    store, members, _ = victim
    later = {"failure", "deviation"}
    old = []
    for line in members["attempt.jsonl"].splitlines():
        old.append(json.dumps({name: value for name, value in json.loads(line).items() if name not in later}))
    members = members | {"attempt.jsonl": "".join(f"{line}\n" for line in old).encode()}
    with pytest.raises(BundleError):
        import_bundle(store, packed(tmp_path / "evil.zip", members))
    import_bundle(store, packed(tmp_path / "evil.zip", members, schema="0001"))
    assert [summary.counts for summary in store.sweeps()] == [{"done": 4}]


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
class TestTables:
    @pytest.fixture
    def filled(self, store, cells):
        launch(store, cells(4), 1)
        launch(store, cells(3), 2, grid="newest")
        for index, minute in ((0, 5), (1, 6), (3, 7), (0, 8)):
            run(store, cells(4)[index].id, minute, value=index + 1 / 3)
        return store

    def test_formats_agree_with_each_other_and_with_sql(self, filled, tmp_path):
        for what, table in (
            ("cells", "cell"), ("attempts", "attempt"), ("measurements", "measurement"),
            ("curves", "curve_point"), ("examples", "example"),
        ):  # fmt: skip
            for fmt in ("csv", "jsonl", "parquet"):
                count = export_table(filled, what, tmp_path / f"{what}.{fmt}", fmt)
            lines = [json.loads(line) for line in (tmp_path / f"{what}.jsonl").read_text().splitlines()]
            csv = pd.read_csv(tmp_path / f"{what}.csv", dtype_backend="numpy_nullable")
            parquet = pd.read_parquet(tmp_path / f"{what}.parquet", dtype_backend="numpy_nullable")
            assert count == len(lines) == len(csv) == len(parquet) > 0
            assert list(csv.columns) == list(parquet.columns) == list(lines[0])
            assert set(T[table].columns.keys()) - {"id", "attempt_id"} <= set(csv.columns)
            for name in csv.columns:
                wanted = [line[name] for line in lines]
                if isinstance(wanted[0], dict) or name in ("detail", "deviation"):
                    wanted = [None if value is None else json.dumps(value, ensure_ascii=False) for value in wanted]
                for frame in (csv, parquet):
                    assert [None if pd.isna(value) else value for value in frame[name]] == wanted, (what, name)
        losses = sorted(line["value"] for line in jsonl(tmp_path / "measurements.jsonl") if line["probe"] == "val")
        assert losses == [1 / 3, 1 / 3, 1 + 1 / 3]  # both attempts of the first cell; the dropped cell is left out

    def test_csv_has_one_header_line(self, filled, tmp_path, monkeypatch):
        monkeypatch.setattr(interchange, "ROWS", 2)
        export_table(filled, "curves", tmp_path / "c.csv", "csv")
        text_ = (tmp_path / "c.csv").read_text()
        assert text_.startswith("attempt_id,cell_id,number,")
        assert text_.count("attempt_id") == 1
        assert text_.count("\n") == 10

    def test_an_empty_table_has_its_columns(self, store, cells, tmp_path):
        launch(store, cells(1))
        for fmt in ("csv", "jsonl", "parquet"):
            assert export_table(store, "measurements", tmp_path / f"m.{fmt}", fmt) == 0
        assert list(pd.read_parquet(tmp_path / "m.parquet").columns) == list(pd.read_csv(tmp_path / "m.csv").columns)

    def test_what_cannot_be_is_told(self, filled, tmp_path, monkeypatch):
        with pytest.raises(StoreError, match="use csv, jsonl or parquet"):
            export_table(filled, "cells", tmp_path / "x", "xls")
        with pytest.raises(StoreError, match="use cells, measurements"):
            export_table(filled, "cell", tmp_path / "x", "csv")
        with pytest.raises(SweepUnknown):
            export_table(filled, "cells", tmp_path / "x", "csv", "nothing")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(StoreError, match="pip install 'pyarrow"):
            export_table(filled, "cells", tmp_path / "x", "parquet")
        assert not [path for path in tmp_path.iterdir() if path.suffix != ".db" and "x" in path.name]


def jsonl(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]
