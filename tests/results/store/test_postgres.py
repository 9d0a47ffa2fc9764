"""Differences of PostgreSQL from SQLite: clocks, sizes, text, locks, and servers that become unreachable."""

import contextlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import postgres
import pytest
from atma_sweep.results.errors import CellAlreadyRunning, LeaseLost, StoreBusy, StoreError, StoreUnreachable, SweepBusy
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.maintenance import backup, check
from atma_sweep.results.store.database import is_server_unreachable, resolve_url
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import AttemptRow, EventRow, SweepRow
from atma_sweep.results.store.store import Store, open_store
from databases import finished, launched
from patience import PATIENCE_S, gone
from sqlalchemy import create_engine, inspect, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError

FORK = multiprocessing.get_context("fork")
server_only = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


@pytest.fixture
def running(store, cells, owner):
    launched(store, cells(2))
    return store.start_attempt(cells(1)[0].id, owner=owner, fence=3)


# --- clocks ---------------------------------------------------------------------------------------------------------


@server_only
def test_times_are_utc_wherever_the_server_stands(store, running):
    with store.transaction(write=False) as session:
        assert session.scalar(text("SHOW timezone")) == "Asia/Kathmandu"
        stored = session.scalar(text("SELECT started_at FROM attempt"))
    assert abs(datetime.now(UTC) - running.started_at) < timedelta(seconds=60)
    assert len(stored) == 24
    assert stored.endswith("Z")


def test_the_clock_goes_on_inside_a_transaction(store):
    """now() of PostgreSQL stands still there, and a lease that was waited for would be born expired."""
    from atma_sweep.results.store import queries

    def work(session):
        first = queries.now(session)
        time.sleep(0.05)
        return queries.now(session) - first

    assert store.write(work) >= timedelta(seconds=0.04)


# --- claims ---------------------------------------------------------------------------------------------------------


def test_the_database_itself_refuses_a_second_live_attempt(store, running):
    with store.transaction(write=False) as session:
        values = dict(session.execute(select(AttemptRow.__table__)).one()._mapping)

    def second(session):
        session.add(AttemptRow(**values | {"id": 99, "number": 2}))

    with pytest.raises(IntegrityError):
        store.write(second)
    store.finish_attempt(running.id, 3, "done")
    with store.transaction() as session:  # finished ones may be many
        session.add(AttemptRow(**values | {"id": 98, "number": 2, "state": "failed"}))


@server_only
def test_a_claim_that_waits_for_another_transaction_loses_to_it(store, url, running):
    """Two conditional updates of one row: the second waits for the first and must then see what it wrote."""
    second_store, begun, results = open_store(url), threading.Event(), []

    def stale():
        begun.wait()
        try:
            DatabaseRecorder(second_store, running.id, 3).heartbeat()
        except LeaseLost:
            results.append("refused")

    thread = threading.Thread(target=stale)
    thread.start()
    with store.transaction() as session:
        session.execute(update(AttemptRow).values(fence=4))
        session.flush()
        begun.set()
        time.sleep(0.3)
        assert not results
    thread.join()
    assert results == ["refused"]
    second_store.close()


@server_only
def test_a_start_waits_for_another_that_is_not_committed_yet(store, url, cells, owner):
    launched(store, cells(1))
    second_store, results = open_store(url), []

    def second():
        try:
            second_store.start_attempt(cells(1)[0].id, owner=owner, fence=2)
        except CellAlreadyRunning as error:
            results.append(str(error))

    thread = threading.Thread(target=second)
    real = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
    store.interrupt_dead(real.id, "gone")
    with store.transaction() as session:
        row = session.get(AttemptRow, real.id)
        values = {column.name: getattr(row, column.name) for column in AttemptRow.__table__.columns}
        session.add(AttemptRow(**values | {"id": 50, "number": 2, "state": "running"}))
        session.flush()
        thread.start()
        time.sleep(0.3)
        assert not results
    thread.join()
    assert "already has an attempt in state running" in results[0]
    second_store.close()


def _run_supervisor(url, index, rounds, queue):
    store = open_store(url)
    me = Owner(name=str(index), host="h", pid=index, started=0.0)
    won = []
    for _ in range(rounds):
        with contextlib.suppress(StoreError):
            won.append(store.acquire_sweep("quick", me, 0.001))
        time.sleep(0.002)
    queue.put(won)


@pytest.mark.thorough
@server_only
def test_fencing_tokens_are_unique(store, url, cells):
    launched(store, cells(1))
    queue = FORK.Queue()
    processes = [FORK.Process(target=_run_supervisor, args=(url, index, 15, queue)) for index in range(4)]
    for process in processes:
        process.start()
    won = sorted(fence for _ in processes for fence in queue.get(timeout=PATIENCE_S))
    for process in processes:
        process.join()
    assert won == list(range(1, len(won) + 1))
    assert len(won) > 4
    with store.transaction(write=False) as session:
        assert session.scalar(select(SweepRow.fence)) == len(won)


# --- values ---------------------------------------------------------------------------------------------------------


def test_numbers_of_every_size(store, running, cells, owner):
    recorder = DatabaseRecorder(store, running.id, 3)
    huge = 2**62 + 1
    recorder.measurements(
        [
            Measurement(probe="p", metric="m", length=2**31 - 1, value=5e-324, n=huge, peak_memory=huge, low=1e308),
            Measurement(probe="p", metric="numpy", value=np.float32(0.1), n=np.int64(7), seconds=np.float64(1.5)),
        ]
    )
    recorder.curve([CurvePoint(step=2**31 - 1, tokens=huge, wall_s=1 / 3, train_loss=0.1 + 0.2, peak_memory=huge)])
    recorder.provenance(Provenance(config={"n": 2**70, "x": 1e-320}, seed=2**63 - 1))
    store.finish_attempt(running.id, 3, "done", exit_code=-(2**31))
    point, values = store.curve(running.id)[0], {value.metric: value for value in store.measurements(running.cell_id)}
    assert (point.tokens, point.wall_s, point.train_loss) == (huge, 1 / 3, 0.1 + 0.2)
    assert (values["m"].value, values["m"].n, values["m"].low, values["m"].length) == (5e-324, huge, 1e308, 2**31 - 1)
    assert (values["numpy"].value, values["numpy"].n) == (float(np.float32(0.1)), 7)
    assert store.provenance(running.id).config == {"n": 2**70, "x": 1e-320}
    assert store.provenance(running.id).seed == 2**63 - 1
    wide = CellRecord(**{**vars(cells(1)[0]), "id": "wide", "seed": 2**63 - 1, "tokens": 2**62})
    store.record_revision("wide", grid_text="x", grid_file="x", cells=[wide])
    assert store.cell("wide") == wide


def test_slugs_are_matched_as_they_are_written(store, cells):
    """No LIKE, no letter case, no collation: `%` and `_` are letters."""
    launched(store, cells(3))
    for cell_name in ("%", "_00000000000", "C01", "POLAR1-baseline-c-s0", "c%"):
        with pytest.raises(StoreError, match="no cell has"):
            store.find_cell(cell_name)


@pytest.mark.parametrize("locale", ["en-US", "tr-TR"])
def test_server_collation_does_not_change_the_order(server, locale, cells, owner):
    with postgres.database(server, locale=locale) as url:
        store = open_store(url, create=True)
        launched(store, cells(2))
        attempt = store.start_attempt(cells(2)[0].id, owner=owner, fence=1)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        names = ["Z", "a", "A", "z", "ı", "I", "i", "_", "a-b", "ab"]
        recorder.measurements([Measurement(probe=name, metric="m", value=1.0) for name in names])
        store.finish_attempt(attempt.id, 1, "done")
        assert {value.probe for value in store.measurements(cells(2)[0].id)} == set(names)
        assert {key[0] for key in store.cell_states()[0].measured} == set(names)
        store.close()


# --- bundles and maintenance ----------------------------------------------------------------------------------------


@server_only
def test_a_bundle_goes_through_the_server_unchanged(store, tmp_path, cells, owner):
    """SQLite -> PostgreSQL -> SQLite, to the byte."""
    local = open_store(tmp_path / "local.db", create=True)
    launched(local, cells(3))
    for cell in cells(2):
        finished(
            local,
            cell,
            provenance=Provenance(config={"z": 1, "a": 1e-9}, seed=5),
            measurements=[Measurement(probe=name, metric="m", value=1 / 3) for name in ("b", "B", "a", "_")],
            examples=[
                Example(probe="p", metric="m", item=i, value=i / 7, detail={"b": 1, "a": [None]}) for i in (2, 1)
            ],
        )
    first = export_sweep(local, "quick", tmp_path / "1.zip")
    import_bundle(store, tmp_path / "1.zip", runs=tmp_path / "runs")
    assert export_sweep(store, "quick", tmp_path / "2.zip").added == first.added
    assert (tmp_path / "2.zip").read_bytes() == (tmp_path / "1.zip").read_bytes()
    # ids go on where the import left off
    assert store.start_attempt(cells(3)[2].id, owner=owner, fence=1).number == 1


@server_only
def test_an_import_does_not_disturb_writers(store, url, tmp_path, cells, owner):
    launched(store, cells(6))
    live = store.start_attempt(cells(6)[5].id, owner=owner, fence=1)
    local = open_store(tmp_path / "local.db", create=True)
    launched(local, cells(6))
    for cell in cells(5):
        finished(local, cell, curve=[CurvePoint(step=s, tokens=s, wall_s=s, train_loss=1.0) for s in range(500)])
    export_sweep(local, "quick", tmp_path / "1.zip")
    stop, written = threading.Event(), []

    def write():
        mine = open_store(url)
        recorder = DatabaseRecorder(mine, live.id, 1)
        while not stop.is_set():
            recorder.curve([CurvePoint(step=len(written), tokens=1, wall_s=1.0, train_loss=1.0)])
            written.append(1)
        mine.close()

    thread = threading.Thread(target=write)
    thread.start()
    import_bundle(store, tmp_path / "1.zip", runs=tmp_path / "runs")
    stop.set()
    thread.join()
    assert len(store.curve(live.id)) == len(written) > 0
    assert [state.state for state in store.cell_states()] == ["done"] * 5 + ["running"]


@server_only
def test_an_import_waits_for_a_start_that_is_not_committed_yet(store, tmp_path, cells, owner):
    launched(store, cells(1))
    local = open_store(tmp_path / "local.db", create=True)
    launched(local, cells(1))
    local.finish_attempt(local.start_attempt(cells(1)[0].id, owner=owner, fence=1).id, 1, "done")
    with local.transaction(write=False) as session:
        values = dict(session.execute(select(AttemptRow.__table__)).one()._mapping)
    export_sweep(local, "quick", tmp_path / "1.zip")
    local.close()
    results = []

    def take_in():
        try:
            import_bundle(store, tmp_path / "1.zip", runs=tmp_path / "runs")
        except StoreError as error:
            results.append(error)

    thread = threading.Thread(target=take_in)
    with store.transaction() as session:
        session.execute(AttemptRow.__table__.insert(), values | {"id": 50, "state": "running", "pid": 9})
        thread.start()
        time.sleep(0.5)
        assert not results
    thread.join()
    assert isinstance(results[0], SweepBusy)
    assert "pid 9" in str(results[0])


@server_only
def test_rows_that_only_the_server_would_refuse_do_not_reach_it(store, tmp_path, cells, owner):
    local = open_store(tmp_path / "local.db", create=True)
    launched(local, cells(1))
    finished(local, cells(1)[0], curve=[CurvePoint(step=2**31, tokens=1, wall_s=1.0, train_loss=1.0)])
    export_sweep(local, "quick", tmp_path / "1.zip")
    with pytest.raises(StoreError, match=r"curve_point.jsonl, row 1: step is 2147483648; it must be a whole number"):
        import_bundle(store, tmp_path / "1.zip", runs=tmp_path / "runs")
    assert store.sweeps() == []


@server_only
def test_check_and_backup(store, url, cells, owner):
    launched(store, cells(1))
    assert check.check(url) == []
    with pytest.raises(StoreError, match="pg_dump") as refused:
        backup.backup(url)
    command = str(refused.value).partition("run: ")[2]
    assert "+psycopg" not in command
    if postgres.SERVER_URL is None:
        folder = postgres.programs()
        assert folder is not None
        arguments = [word for word in shlex.split(command) if not word.startswith("--file")]
        dumped = subprocess.run([folder / arguments[0], *arguments[1:]], capture_output=True, check=True)
        assert dumped.stdout.startswith(b"PGDMP")
    shown = backup.dump_command(resolve_url("postgresql://ada:secret@db:5433/x"))
    assert shown == "pg_dump --format=custom --file=x.dump --dbname=postgresql://ada@db:5433/x"
    with store.transaction() as session:
        session.execute(text("DROP INDEX one_live_attempt"))
        session.execute(text("DROP VIEW results"))
        session.execute(text("ALTER TABLE measurement DROP CONSTRAINT uq_measurement_attempt_id_probe_metric_length"))
        session.execute(text("ALTER TABLE event DROP CONSTRAINT fk_event_attempt_id"))
        session.execute(text("INSERT INTO event (attempt_id, at, kind, message) VALUES (77, '2026', 'x', 'x')"))
    problems = " ".join(finding.what for finding in check.check(url))
    for part in ("one_live_attempt", "view results", "uq_measurement", "event.attempt_id", "1 row of event refers"):
        assert part in problems


def test_newer_or_foreign_database_is_refused(server, cells):
    with postgres.database(server) as url:
        with pytest.raises(StoreError, match="is empty; launch a grid first"):
            open_store(url)
        engine = create_engine(resolve_url(url))
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE theirs (id INTEGER)"))
        with pytest.raises(StoreError, match="not a database of atma-sweep"):
            open_store(url, create=True)
        assert inspect(engine).get_table_names() == ["theirs"]
        engine.dispose()


# --- servers and clients that die -----------------------------------------------------------------------------------


def test_unreachable_server_gives_a_single_clear_line(tmp_path):
    if postgres.missing():
        pytest.skip(str(postgres.missing()))
    away = ("ada:secret@127.0.0.1:1", "ada:secret@nowhere.invalid")
    for wrong in (f"postgresql://atma@/x?host={tmp_path}", *(f"postgresql://{server}/x" for server in away)):
        with pytest.raises(StoreUnreachable, match=r"does not answer: .*; start its server") as refused:
            open_store(wrong)
        assert refused.value.exit_code == 3
        assert "secret" not in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_server_that_does_not_know_us_is_a_wrong_input(server):
    for wrong, name in (("postgres", "nobody"), ("no_such_database", "atma")):
        with pytest.raises(StoreError, match=r"cannot use .*FATAL") as refused:
            open_store(make_url(server).set(database=wrong, username=name))
        assert refused.value.exit_code == 2


def test_a_server_that_only_starts_or_is_full_is_away():
    failed = 'connection failed: connection to server at "db", port 5432 failed: FATAL:  '
    assert is_server_unreachable(f"{failed}the database system is starting up")
    assert is_server_unreachable(f"{failed}sorry, too many clients already")
    assert is_server_unreachable("connection timeout expired")
    assert not is_server_unreachable(f'{failed}password authentication failed for user "ada"')
    assert not is_server_unreachable("no such table: attempt")


KILLED = """
import os, signal, sys
from atma_sweep.results.store.store import open_store
from atma_sweep.results.store.schema import EventRow, UtcNow
from sqlalchemy import insert
with open_store(sys.argv[1]).transaction() as session:
    session.execute(insert(EventRow).values(at=UtcNow(), kind="half", message="x"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@server_only
def test_a_killed_client_leaves_no_half(store, url):
    done = subprocess.run([sys.executable, "-c", KILLED, url], check=False)
    assert done.returncode == -signal.SIGKILL
    with store.transaction(write=False) as session:
        assert session.scalars(select(EventRow.kind)).all() == []


@server_only
def test_closed_connections_are_reopened(store, running):
    """The effect equals that of a restarted server or a silent firewall."""

    def cut():
        with store.transaction() as session:
            mine = "datname = current_database() AND pid <> pg_backend_pid()"
            session.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}"))

    second_store = open_store(store.url.render_as_string(hide_password=False))
    recorder = DatabaseRecorder(second_store, running.id, 3)
    for step in range(3):
        recorder.curve([CurvePoint(step=step, tokens=1, wall_s=1.0, train_loss=1.0)])
        cut()
    assert [point.step for point in second_store.curve(running.id)] == [0, 1, 2]
    # in the middle of a transaction: it is done again, whole
    calls = []

    def work(session):
        session.execute(update(SweepRow).values(fence=SweepRow.fence + 1))
        calls.append(1)
        if len(calls) == 1:
            cut()
        session.execute(update(SweepRow).values(fence=SweepRow.fence + 10))

    second_store.write(work)
    with store.transaction(write=False) as session:
        assert (session.scalar(select(SweepRow.fence)), len(calls)) == (11, 2)
    second_store.close()


@pytest.mark.thorough
def test_a_server_that_restarts_is_waited_for(cells, owner):
    """A recorder and whoever asks go on after the server was away, and patience ends with one line."""
    if reason := postgres.not_ours():
        pytest.skip(reason)
    with postgres.cluster() as cluster:
        cluster.start()
        with postgres.database(cluster.url) as url:
            store = open_store(url, create=True)
            launched(store, cells(1))
            attempt = store.start_attempt(cells(1)[0].id, owner=owner, fence=1)
            recorder = DatabaseRecorder(store, attempt.id, 1)
            recorder.heartbeat()
            cluster.stop(signal.SIGQUIT)  # without a checkpoint, as when the machine goes down
            with pytest.raises(StoreBusy, match="does not answer"):
                DatabaseRecorder(store, attempt.id, 1, patience=0.2).heartbeat()
            with pytest.raises(StoreBusy, match="does not answer; start its server"):
                Store(url, patience=0.2).attempt(attempt.id)
            measured = [Measurement(probe="p", metric="m", value=1.5)]
            answers = []
            waiting = [
                threading.Thread(target=recorder.measurements, args=(measured,)),
                threading.Thread(target=lambda: answers.append(store.attempt(attempt.id))),
            ]
            for thread in waiting:
                thread.start()
            time.sleep(0.3)
            assert [thread.is_alive() for thread in waiting] == [True, True]
            cluster.start()  # by this thread: the server ends with the thread that started it
            for thread in waiting:
                thread.join()
            assert [live.id for live in answers] == [attempt.id]
            store.finish_attempt(attempt.id, 1, "done")
            assert [value.value for value in store.measurements(cells(1)[0].id)] == [1.5]
            store.close()


@pytest.mark.thorough
def test_test_server_ends_with_its_process():
    """The server of a test run that is killed ends with it."""
    if not sys.platform.startswith("linux") or postgres.not_ours():
        pytest.skip(postgres.not_ours() or "needs Linux")
    code = "import postgres, time, json\nwith postgres.cluster() as c:\n c.start(); print(c.pid, c.home, flush=True); time.sleep(600)"
    env = os.environ | {"PYTHONPATH": str(Path(postgres.__file__).parent)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    pid, home = child.stdout.readline().split()
    child.kill()
    child.wait()
    child.stdout.close()
    gone(int(pid))
    subprocess.run(["rm", "-rf", home], check=True)
