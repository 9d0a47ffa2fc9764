"""An exported sweep can be imported again, and two databases merge to the same result, in either order."""

import random
from dataclasses import replace

import pytest
from atma_sweep.results.errors import BundleError, StoreError, SweepBusy, SweepUnknown
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.maintenance.deletion import delete_measurements, plan_measurements
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Owner
from histories import T, all_rows, at, bundle, cells_of, launch, natural, rows, run, view
from sqlalchemy import delete, select

pytestmark = pytest.mark.usefixtures("working_folder")


class TestRoundTrip:
    def test_reexported_bundle_has_the_same_bytes(self, store, cells, tmp_path, make):
        launch(store, cells(3), 1, grid="a: ä\n")
        trained = run(store, cells(3)[0].id, 5, value=1 / 3)
        run(store, cells(3)[0].id, 6, kind="evaluate", parent=trained.id, value=2e-308)
        run(store, cells(3)[1].id, 7, state="failed")
        launch(store, cells(2), 8, grid="b")
        store.add_event("note", "hello", sweep="quick")
        file = bundle(store, tmp_path)
        target = make("other")
        summary = import_bundle(target, file)
        assert summary.added == {**summary.added, "sweep": 1, "revision": 2, "cell": 3, "attempt": 3, "measurement": 6}
        assert natural(target) == natural(store)
        assert view(target) == view(store)
        assert [a.parent_id for a in target.attempts(cells(3)[0].id)] == [None, target.attempts(cells(3)[0].id)[0].id]
        assert bundle(target, tmp_path, "again.zip").read_bytes() == file.read_bytes()
        assert target.cell(cells(3)[2].id) == replace(cells(3)[2], axes=store.cell(cells(3)[2].id).axes)
        assert [state.state for state in target.cell_states(orphans=True)] == ["new"]

    def test_an_empty_database_numbers_attempts_as_they_were(self, store, cells, tmp_path, make):
        """The ids in a report's trace are valid on both sides, whatever order the cells were run in."""
        grid = cells(3)
        launch(store, grid, 1)
        for minute, index in enumerate((2, 0, 1, 0, 2)):
            run(store, grid[index].id, minute + 2, value=minute / 7)
        target = make("other")
        import_bundle(target, bundle(store, tmp_path))
        before, after = (
            sorted((a.id, a.cell_id, a.started_at) for c in grid for a in side.attempts(c.id))
            for side in (store, target)
        )
        assert [row[1:] for row in before] == [row[1:] for row in after]
        if store.path is not None:  # a sequence of PostgreSQL has gaps
            assert before == after

    def test_without_items_all_else_comes_along_and_items_can_follow(self, store, cells, tmp_path, make):
        launch(store, cells(2), 1)
        for minute, cell in enumerate(cells(2)):
            run(store, cell.id, minute + 2, value=minute / 7)
        small = tmp_path / "small.zip"
        summary = export_sweep(store, "quick", small, examples=False)
        assert (summary.added["example"], summary.added["measurement"]) == (0, 4)
        assert any("--no-examples" in note for note in summary.notes)
        target = make("other")
        import_bundle(target, small)
        assert view(target) == view(store)
        assert not rows(target, "example")
        assert bundle(target, tmp_path, "again.zip", examples=False).read_bytes() == small.read_bytes()
        # the whole bundle brings them later
        assert import_bundle(target, bundle(store, tmp_path)).added["example"] == 2
        assert natural(target) == natural(store)
        held = all_rows(store)
        # the database that has the items keeps them
        assert import_bundle(store, small).added["example"] == 0
        assert all_rows(store) == held

    def test_items_of_deleted_numbers_stay_away(self, store, cells, tmp_path, make):
        cell = cells(1)[0].id
        launch(store, cells(1), 1)
        trained = run(store, cell, 2, state="running")
        item = Example(probe="clean", metric="nats", length=4096, item=1, value=0.1)
        DatabaseRecorder(store, trained.id, 1).examples([item])
        store.finish_attempt(trained.id, 1, "done")
        file, small = bundle(store, tmp_path), bundle(store, tmp_path, "small.zip", examples=False)
        target = make("other")
        import_bundle(target, small)
        for side in (store, target):
            delete_measurements(side, plan_measurements(side, cell, lengths=[4096]), who="ada")
        # those of numbers that are still here come
        assert import_bundle(target, file).added["example"] == 1
        assert [row["length"] for row in rows(target, "example")] == [64]
        # and an attempt of one's own, which never was without, gets none back
        delete_measurements(store, plan_measurements(store, cell, probes=["val"]), who="ada")
        with store.transaction() as session:
            session.execute(delete(T["example"]))
        assert import_bundle(store, file).added["example"] == 0

    def test_a_bundle_without_items_takes_none_away(self, store, cells, tmp_path, make):
        cell = cells(1)[0].id
        launch(store, cells(1), 1)
        attempt = run(store, cell, 2, state="running")
        target = make("other")
        import_bundle(target, bundle(store, tmp_path))
        assert len(rows(target, "example")) == 1
        DatabaseRecorder(store, attempt.id, 1).examples(
            [Example(probe="clean", metric="nats", length=64, item=2, value=0.3)]
        )
        store.finish_attempt(attempt.id, 1, "done")
        summary = import_bundle(target, bundle(store, tmp_path, "ended.zip", examples=False))
        assert summary.added["attempt"] == 1
        assert [row["state"] for row in rows(target, "attempt")] == ["done"]
        assert len(rows(target, "example")) == 1
        # and what is still missing comes with the whole bundle
        assert import_bundle(target, bundle(store, tmp_path, "whole.zip")).added["example"] == 1
        assert natural(target)["example"] == natural(store)["example"]

    def test_importing_twice_changes_nothing(self, laptops, tmp_path):
        first, second = laptops
        import_bundle(first, bundle(second, tmp_path))
        before = all_rows(first)
        again = import_bundle(first, bundle(second, tmp_path))
        assert all_rows(first) == before
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
    def test_export_refuses_unknown_sweeps_and_bad_targets(self, laptops, tmp_path):
        with pytest.raises(SweepUnknown):
            export_sweep(laptops[0], "quik", tmp_path / "x.zip")
        with pytest.raises(StoreError, match="does not exist; create it"):
            export_sweep(laptops[0], "quick", tmp_path / "no" / "x.zip")
        with pytest.raises(StoreError, match="is a folder"):
            export_sweep(laptops[0], "quick", tmp_path)
        assert not [path for path in tmp_path.iterdir() if "zip" in path.name]
        with pytest.raises(BundleError, match="no file"):
            import_bundle(laptops[0], tmp_path / "none.zip")


class TestMerging:
    def test_merged_halves_equal_the_complete_sweep(self, laptops, tmp_path):
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

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("backend", "seed"),
        [*(("sqlite", seed) for seed in range(4)), ("postgresql", 1)],
        indirect=["backend"],
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
                attempts = store.attempts(cell.id)
                assert [(attempt.pid - 100, attempt.state) for attempt in attempts] == expected
                assert len({attempt.number for attempt in attempts}) == len(attempts)
                assert len({attempt.run_dir for attempt in attempts}) == len(attempts)
                for attempt in attempts:
                    assert store.provenance(attempt.id).seed == attempt.pid - 100
                    assert len(store.curve(attempt.id)) == 3
        # and the next attempt goes on after all of them
        assert merged[0].start_attempt(grid[0].id, owner=Owner(name="a", host="h", pid=1, started=1.0), fence=1)

    def test_older_attempts_come_first_and_keep_their_numbers(self, make, cells, tmp_path):
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
        attempts = ours.attempts(cell)
        assert [attempt.pid - 100 for attempt in attempts] == [10, 50, 55, 60]
        assert {a.pid: (a.number, a.run_dir) for a in attempts if a.host == "here"} == before
        assert [attempt.number for attempt in attempts] == [3, 1, 4, 2]
        assert attempts[3].parent_id == attempts[1].id
        assert [value.value for value in ours.measurements(cell) if value.probe == "val"] == [6.0]
        assert {event.attempt_id for event in ours.events(cell_id=cell)} == {attempt.id for attempt in attempts}
        assert [event.attempt_id for event in ours.events(cell_id=cell)] == [
            attempt.id for attempt in attempts for _ in "12"
        ]
        assert [event.at for event in ours.events(cell_id=cell, limit=3)] == [at(55), at(60), at(60)]

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
    def test_import_notes_sweeps_without_common_cells(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(1, prefix="a"))
        launch(theirs, cells(1, prefix="b"), 3)
        notes = import_bundle(ours, bundle(theirs, tmp_path)).notes
        assert any("--name imports into a separate sweep" in note for note in notes)

    @pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
    def test_a_cell_that_is_evaluated_otherwise_stays(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        changed = replace(cells(1)[0], config={"eval": {"lengths": [1]}})
        launch(ours, cells(1))
        launch(theirs, [changed])
        notes = import_bundle(ours, bundle(theirs, tmp_path)).notes
        assert ours.cell(changed.id).config == cells(1)[0].config
        assert any("other evaluation or checkpoint settings" in note for note in notes)


class TestRunning:
    def test_import_replaces_an_interrupted_copy_by_its_end(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        cell = cells(1)[0].id
        launch(theirs, cells(1))
        attempt = run(theirs, cell, 5, host="there", state="running", value=9.0)
        DatabaseRecorder(theirs, attempt.id, 1).checkpoint(f"{attempt.run_dir}/checkpoint-1")
        import_bundle(ours, bundle(theirs, tmp_path, "early.zip"))
        (copy,) = ours.attempts(cell)
        assert (copy.state, copy.finished_at, copy.checkpoint) == ("interrupted", copy.heartbeat_at, None)
        assert "still running when it was exported, on there (pid 105)" in copy.cause
        assert ours.live_attempts() == []
        before = all_rows(ours)
        import_bundle(ours, bundle(theirs, tmp_path, "same.zip"))
        assert all_rows(ours) == before
        # later, still running: the copy goes on
        DatabaseRecorder(theirs, attempt.id, 1).curve([CurvePoint(step=9, tokens=9, wall_s=9.0, train_loss=0.5)])
        import_bundle(ours, bundle(theirs, tmp_path, "later.zip"))
        assert [point.step for point in ours.curve(copy.id)] == [0, 1, 2, 9]
        # and finished
        DatabaseRecorder(theirs, attempt.id, 1).measurements([Measurement(probe="val", metric="val_loss", value=1.0)])
        theirs.finish_attempt(attempt.id, 1, "done")
        import_bundle(ours, bundle(theirs, tmp_path, "end.zip"))
        (done,) = ours.attempts(cell)
        assert (done.id, done.state, done.cause) == (copy.id, "done", None)
        assert {value.probe: value.value for value in ours.measurements(cell)} == {"val": 1.0, "clean": None}
        assert natural(ours)["measurement"] == natural(theirs)["measurement"]
        # an old bundle, and the copy that went home again, add nothing
        before = all_rows(ours)
        import_bundle(ours, tmp_path / "early.zip")
        import_bundle(ours, tmp_path / "later.zip")
        assert all_rows(ours) == before

    def test_its_own_machine_takes_no_copy_of_it(self, make, cells, tmp_path):
        ours, theirs = make("a"), make("b")
        launch(ours, cells(1))
        attempt = run(ours, cells(1)[0].id, 5, state="running")
        import_bundle(theirs, bundle(ours, tmp_path, "1.zip"))
        DatabaseRecorder(ours, attempt.id, 1).heartbeat()
        before = all_rows(ours)
        import_bundle(ours, bundle(theirs, tmp_path, "2.zip"))
        assert all_rows(ours) == before
        DatabaseRecorder(ours, attempt.id, 1).heartbeat()
        ours.finish_attempt(attempt.id, 1, "done")
        before = all_rows(ours)
        import_bundle(ours, tmp_path / "2.zip")
        assert all_rows(ours) == before

    def test_import_refuses_cells_that_are_running(self, laptops, tmp_path, cells):
        first, second = laptops
        run(first, cells(4)[2].id, 90, state="running")
        before = all_rows(first)
        with pytest.raises(SweepBusy, match=r"is running here \(attempt 1, pid 190 on here\)"):
            import_bundle(first, bundle(second, tmp_path))
        assert all_rows(first) == before

    def test_import_refuses_older_attempts_of_a_running_sweep(self, laptops, tmp_path, owner):
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
        DatabaseRecorder(ours, running.id, 1).heartbeat()
        assert [state.state for state in ours.cell_states()] == ["running", "done"]
