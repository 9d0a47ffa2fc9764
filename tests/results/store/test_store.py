"""The contract of the store, on every backend."""

import pickle
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from atma_sweep.results.errors import (
    AttemptUnknown,
    CellAlreadyRunning,
    CellAmbiguous,
    CellUnknown,
    LeaseLost,
    StoreError,
    SweepBusy,
    SweepReadOnly,
    SweepUnknown,
)
from atma_sweep.results.store import queries, sweep_lease
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner
from atma_sweep.results.store.schema import CellRow
from atma_sweep.results.store.store import Store, open_store
from databases import finished
from sqlalchemy import event, select, text

SECOND_OWNER = Owner(name="bob", host="there", pid=202, started=2.5)


def launch(store, cells, name="quick", text="grid: 1"):
    return store.record_revision(name, grid_text=text, grid_file="g.yaml", options={"only": None}, cells=cells)


class TestRevisions:
    def test_a_relaunch_of_the_same_grid_adds_nothing(self, store, cells):
        assert [launch(store, cells(3)), launch(store, cells(3))] == [1, 1]
        assert launch(store, cells(3), text="grid: 2") == 2
        assert launch(store, cells(4), text="grid: 2") == 3
        assert launch(store, cells(4)[::-1], text="grid: 2") == 4
        assert [state.cell_id for state in store.cell_states()] == [cell.id for cell in cells(4)[::-1]]
        assert len(store.cell_states(revision=1)) == 3

    def test_changed_axes_make_a_revision_and_keep_the_cells(self, store, cells):
        launch(store, cells(2))
        renamed = [
            CellRecord(
                id=cell.id, slug="other", seed=9, levels=cell.levels, config={}, axes={"train.lr": "0.1"}, tokens=1
            )
            for cell in cells(2)
        ]
        assert launch(store, renamed) == 2
        assert [state.axes for state in store.cell_states()] == [{"train.lr": "0.1"}] * 2
        assert store.cell(renamed[0].id).slug == cells(1)[0].slug  # a cell, once known, never changes

    def test_a_cell_comes_back_as_it_went_in(self, store, cells):
        launch(store, cells(3))
        assert store.cell(cells(3)[2].id) == cells(3)[2]
        assert store.cell_states()[2].tokens_total == 3 * 10**9

    def test_record_revision_stores_the_launch(self, store, cells):
        launch(store, cells(1), text="a: ä\n")
        record = store.revision("quick")
        assert (record.grid_text, record.grid_file, record.options, record.number) == (
            "a: ä\n",
            "g.yaml",
            {"only": None},
            1,
        )

    def test_two_sweeps_share_a_cell(self, store, cells, owner):
        launch(store, cells(2), "one")
        launch(store, cells(3), "two")
        finished(store, cells(1)[0])
        assert [[state.state for state in store.cell_states(name)] for name in ("one", "two")] == [
            ["done", "new"],
            ["done", "new", "new"],
        ]
        assert [(summary.name, summary.counts) for summary in store.sweeps()] == [
            ("two", {"done": 1, "new": 2}),
            ("one", {"done": 1, "new": 1}),
        ]

    def test_default_sweep_is_that_launched_last(self, store, cells):
        for name in ("one", "two", "one"):
            launch(store, cells(1), name)
            assert store.default_sweep() == name
        assert store.cell_states() == store.cell_states("one")

    def test_dropped_cells_are_orphans(self, store, cells):
        launch(store, cells(4))
        launch(store, cells(2))
        assert [state.cell_id for state in store.cell_states(orphans=True)] == [cell.id for cell in cells(4)[2:]]
        assert store.cell_states(revision=1, orphans=True) == []

    def test_a_read_only_sweep_takes_no_launch(self, store, cells, owner):
        launch(store, cells(1))
        store.set_read_only("quick")
        with pytest.raises(SweepReadOnly, match="--name"):
            launch(store, cells(2))
        with pytest.raises(SweepReadOnly):
            store.acquire_sweep("quick", owner, 10)
        assert len(store.cell_states()) == 1

    def test_unknown_sweep_error_lists_existing_sweeps(self, store, cells):
        with pytest.raises(SweepUnknown, match="launch a grid first"):
            store.default_sweep()
        launch(store, cells(1))
        with pytest.raises(SweepUnknown, match="quick"):
            store.cell_states("quik")
        with pytest.raises(StoreError, match="no revision 7"):
            store.cell_states(revision=7)


class TestLeases:
    def test_a_live_owner_keeps_its_sweep(self, store, cells, owner):
        launch(store, cells(1))
        assert store.acquire_sweep("quick", owner, 60) == 1
        with pytest.raises(SweepBusy, match=r"ada on here \(pid 101\) since 20\d\d-"):
            store.acquire_sweep("quick", SECOND_OWNER, 60, is_alive=lambda held: held == owner)
        with pytest.raises(SweepBusy):
            store.acquire_sweep("quick", SECOND_OWNER, 60)  # nobody knows, and the lease runs

    def test_a_dead_owner_is_replaced_at_once_and_its_fence_is_void(self, store, cells, owner):
        launch(store, cells(1))
        old = store.acquire_sweep("quick", owner, 600)
        new = store.acquire_sweep("quick", SECOND_OWNER, 600, is_alive=lambda held: False)
        assert new == old + 1
        with pytest.raises(LeaseLost):
            store.renew_sweep("quick", old, 60)
        with pytest.raises(LeaseLost):
            store.start_attempt(cells(1)[0].id, owner=owner, fence=old, sweep="quick")
        assert not store.release_sweep("quick", old)
        assert store.sweeps()[0].owner == SECOND_OWNER
        assert store.attempts(cells(1)[0].id) == []

    def test_an_expired_lease_counts_only_when_nobody_can_know(self, store, cells, owner):
        launch(store, cells(1))
        store.acquire_sweep("quick", owner, 0.01)
        time.sleep(0.05)
        with pytest.raises(SweepBusy):
            store.acquire_sweep("quick", SECOND_OWNER, 60, is_alive=lambda held: True)
        assert store.acquire_sweep("quick", SECOND_OWNER, 60) == 2

    def test_renewing_extends_and_releasing_frees(self, store, cells, owner):
        launch(store, cells(1))
        fence = store.acquire_sweep("quick", owner, 5)
        store.renew_sweep("quick", fence, 3600)
        remaining = store.sweeps()[0].lease_until - datetime.now(UTC)
        assert timedelta(seconds=3500) < remaining < timedelta(seconds=3700)
        assert store.release_sweep("quick", fence)
        assert store.sweeps()[0].owner is None
        assert not store.release_sweep("quick", fence)
        with pytest.raises(LeaseLost):
            store.renew_sweep("quick", fence, 10)
        assert store.acquire_sweep("quick", SECOND_OWNER, 5) == 2

    def test_the_same_process_may_take_its_sweep_again(self, store, cells, owner):
        launch(store, cells(1))
        assert [store.acquire_sweep("quick", owner, 60) for _ in range(3)] == [1, 2, 3]


class TestAttempts:
    def test_start_attempt_numbers_attempts_and_allows_a_single_live(self, store, cells, owner):
        launch(store, cells(2))
        first = store.start_attempt(cells(2)[0].id, owner=owner, fence=4, steps_total=7)
        assert (first.number, first.state, first.run_dir, first.steps_total) == (1, "running", "c0000000000" + "0/1", 7)
        with pytest.raises(CellAlreadyRunning, match="pid 101 on here"):
            store.start_attempt(cells(2)[0].id, owner=SECOND_OWNER, fence=5)
        store.start_attempt(cells(2)[1].id, owner=SECOND_OWNER, fence=5)
        store.finish_attempt(first.id, 4, "interrupted", cause="SIGTERM", checkpoint="c/1/step3")
        second = store.start_attempt(cells(2)[0].id, owner=SECOND_OWNER, fence=5)
        assert second.number == 2
        assert [attempt.cause for attempt in store.attempts(cells(2)[0].id)] == ["SIGTERM", None]
        assert store.cell_states()[0].checkpoint == "c/1/step3"
        assert [attempt.id for attempt in store.live_attempts("quick")] == [second.id - 1, second.id]

    def test_finishing_needs_the_fence_and_happens_once(self, store, cells, owner):
        launch(store, cells(1))
        attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=4)
        with pytest.raises(LeaseLost):
            store.finish_attempt(attempt.id, 3, "done")
        store.finish_attempt(attempt.id, 4, "failed", cause="boom", traceback="T", exit_code=1)
        with pytest.raises(LeaseLost):
            store.finish_attempt(attempt.id, 4, "done")
        stored = store.attempt(attempt.id)
        assert (stored.state, stored.cause, stored.traceback, stored.exit_code) == ("failed", "boom", "T", 1)
        assert stored.finished_at is not None
        assert stored.finished_at.tzinfo is not None

    def test_reaping(self, store, cells, owner):
        launch(store, cells(1))
        attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
        assert store.interrupt_dead(attempt.id, "process 101 is gone")
        assert not store.interrupt_dead(attempt.id, "again")
        assert store.cell_states()[0].cause == "process 101 is gone"
        assert store.live_attempts() == []
        assert [event.kind for event in store.events(sweep="quick")] == ["started", "interrupted"]

    def test_set_process(self, store, cells, owner):
        launch(store, cells(1))
        attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
        store.set_process(attempt.id, 1, 555, 9.25)
        assert (store.attempt(attempt.id).pid, store.attempt(attempt.id).pid_started) == (555, 9.25)
        with pytest.raises(LeaseLost):
            store.set_process(attempt.id, 2, 556, 9.25)

    def test_unknown_cells_and_attempts_are_refused(self, store, cells, owner):
        launch(store, cells(1))
        with pytest.raises(CellUnknown):
            store.start_attempt("nothing", owner=owner, fence=1)
        with pytest.raises(AttemptUnknown):
            store.start_attempt(cells(1)[0].id, owner=owner, fence=1, parent_id=99)
        with pytest.raises(AttemptUnknown):
            store.attempt(99)


class TestCellStates:
    def test_fields_come_from_the_right_attempts(self, store: Store, cells, owner):
        launch(store, cells(2))
        cell = cells(2)[0].id
        train = store.start_attempt(cell, owner=owner, fence=1)
        DatabaseRecorder(store, train.id, 1).measurements([Measurement(probe="val", metric="val_loss", value=3.0)])
        DatabaseRecorder(store, train.id, 1).measurements(
            [Measurement(probe="clean", metric="nats", length=64, reason="oom: no memory")]
        )
        store.finish_attempt(train.id, 1, "done", weights="w.pt")
        lost = store.start_attempt(cell, owner=owner, fence=1, kind="evaluate", parent_id=train.id)
        DatabaseRecorder(store, lost.id, 1).measurements(
            [Measurement(probe="junk", metric="nats", length=64, value=1.0)]
        )
        DatabaseRecorder(store, lost.id, 1).progress(3, 9, 2.5, 1000.0, "probing")
        store.finish_attempt(lost.id, 1, "failed", cause="boom")
        state, untouched = store.cell_states()
        assert (state.state, state.attempt_id, state.attempt_number, state.kind) == ("failed", lost.id, 2, "evaluate")
        assert (state.trained_attempt_id, state.weights, state.cause) == (train.id, "w.pt", "boom")
        assert (state.step, state.steps_total, state.loss, state.tokens_per_s) == (3, 9, 2.5, 1000.0)
        assert state.measured == {("val", "val_loss", 0), ("clean", "nats", 64)}  # a failed attempt measures nothing
        assert (untouched.state, untouched.attempt_id, untouched.measured) == ("new", None, frozenset())
        assert untouched.levels == dict(cells(2)[1].levels)
        assert tuple(state.levels) == AXES
        store.clear_weights(train.id)
        assert store.cell_states()[0].weights is None

    @pytest.mark.thorough
    def test_ten_thousand_cells(self, store, cells, capsys):
        records = [
            CellRecord(
                id=f"{index:012x}",
                slug=f"s{index}",
                seed=index,
                levels=cells(1)[0].levels,
                config={},
                axes={},
                tokens=1,
            )
            for index in range(10_000)
        ]
        launch(store, records)
        start = time.perf_counter()
        assert len(store.cell_states()) == 10_000
        with capsys.disabled():
            print(f" [cell_states of 10,000 cells: {time.perf_counter() - start:.2f} s]", end="")


class TestFindCell:
    def test_by_id_prefix_and_slug(self, store, cells):
        launch(store, cells(3))
        wanted = cells(3)[1]
        for cell_name in (wanted.id, "c01", wanted.slug):
            assert store.find_cell(cell_name) == wanted

    def test_near_and_ambiguous(self, store, cells):
        with pytest.raises(CellUnknown, match="launch a grid first"):
            store.find_cell("x")
        launch(store, cells(3))
        with pytest.raises(CellAmbiguous, match="fits 3 cells"):
            store.find_cell("c0")
        with pytest.raises(CellUnknown, match="polar1-baseline-c-s0"):
            store.find_cell("polar1-basline-c-s0")
        with pytest.raises(CellUnknown):
            store.find_cell("")

    def test_find_cell_prefers_the_newest_sweep(self, store, cells):
        launch(store, cells(1, prefix="a"), "one")
        launch(store, cells(1, prefix="b"), "two")
        assert store.find_cell("a00").id == cells(1, prefix="a")[0].id
        with pytest.raises(CellUnknown):
            store.find_cell("a00", "two")


def test_events(store, cells):
    launch(store, cells(1))
    for index in range(3):
        store.add_event("note", f"n{index}", sweep="quick")
    store.add_event("note", "elsewhere")
    assert [event.message for event in store.events(sweep="quick", limit=2)] == ["n1", "n2"]
    assert [event.message for event in store.events()] == ["n0", "n1", "n2", "elsewhere"]


def test_nothing_stays_of_a_transaction_that_raises(store, cells):
    def work(session):
        launch_row = sweep_lease.lock_or_create(session, "half")
        assert launch_row.id
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        store.write(work)
    assert store.sweeps() == []


def test_a_store_pickles_as_its_address(store, cells):
    launch(store, cells(2))
    again = pickle.loads(pickle.dumps(store))
    assert again.cell_states() == store.cell_states()
    again.close()


def test_reopening_and_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATMA_DB", raising=False)
    opened = open_store(create=True)
    assert (opened.path, opened.runs) == (tmp_path / "atma.db", tmp_path / "atma-runs")
    opened.close()
    monkeypatch.setenv("ATMA_DB", f"sqlite:///{tmp_path}/other.db")
    assert open_store(create=True).path == tmp_path / "other.db"
    assert open_store(Path("atma.db")).path == tmp_path / "atma.db"


class TestDurability:
    def test_only_durable_writes_wait_for_the_disk(self, store):
        """Also where the server was told to wait for nothing; a connection used again is as it was."""
        server = store.url.get_backend_name() == "postgresql"

        def mode(session):
            return str(session.scalar(text("SHOW synchronous_commit" if server else "PRAGMA synchronous")))

        if server:
            with store.engine.connect() as connection:
                connection.execute(text(f'ALTER DATABASE "{store.url.database}" SET synchronous_commit = off'))
                connection.commit()
            store.close()
        relaxed, strict = ("off", "on") if server else ("1", "2")
        modes = [store.write(mode, durable=durable) for durable in (False, True, True, False, True)]
        assert modes == [relaxed, strict, strict, relaxed, strict]
        assert store.read(mode) in (relaxed, strict), "a read syncs nothing"

    def test_what_a_file_may_go_after_is_durable(self, store: Store, cells, owner, monkeypatch):
        waited = []
        write = store.write

        def spy(work, **how):
            waited.append(how.get("durable", False))
            return write(work, **how)

        launch(store, cells(1))
        monkeypatch.setattr(store, "write", spy)
        attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        recorder.progress(3, loss=1.0)
        recorder.settle()
        recorder.checkpoint("c/1/checkpoint-00000003")
        store.finish_attempt(attempt.id, 1, "done", weights="c/1/weights.safetensors")
        store.clear_weights(attempt.id)
        assert waited == [True, False, True, True, True, True]


def test_rows_of_1000_ids_are_in_query_order(store, cells):
    """1,203 ids: more than one list of parameters holds. The ids and the order of the query run against each other."""
    count = 1203
    records = [
        CellRecord(id=f"{index:012x}", slug=f"c{index}", seed=count - index, levels=dict.fromkeys(AXES, "x"), config={}, axes={}, tokens=1)
        for index in range(count)
    ]  # fmt: skip
    launch(store, records)
    ids = [record.id for record in records]
    statements = []
    event.listen(store.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    with store.snapshot() as snapshot:
        query = select(CellRow.id, CellRow.seed).order_by(CellRow.seed)
        assert [tuple(row) for row in queries.rows_in(snapshot.session, query, CellRow.id, ids)] == [
            (id_, seed) for seed, id_ in enumerate(reversed(ids), start=1)
        ]
        assert sum("FROM cell" in statement for statement in statements) == 1
        few = queries.rows_in(snapshot.session, query, CellRow.seed, range(700))
        assert [row.seed for row in few] == list(range(1, 700))
        assert list(queries.rows_in(snapshot.session, query, CellRow.id, [])) == []
