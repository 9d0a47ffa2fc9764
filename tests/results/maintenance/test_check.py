"""The check finds what was broken on purpose, and nothing else."""

import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime

import psutil
import pytest
from atma_sweep.results.errors import StoreError, StoreMissing
from atma_sweep.results.maintenance import check as runner
from atma_sweep.results.maintenance import host_checks
from atma_sweep.results.maintenance import integrity as schema_findings
from atma_sweep.results.maintenance.backup import backup
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.maintenance.finding import Finding
from atma_sweep.results.store import schema
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.store import open_store
from databases import finished, sql

FORK = multiprocessing.get_context("fork")
ME = Owner(name="me", host=os.uname().nodename, pid=os.getpid(), started=psutil.Process().create_time())


def dump(path):
    connection = sqlite3.connect(path)
    statements = list(connection.iterdump())
    connection.close()
    return statements


def summary(findings):
    return [(finding.severity, finding.what) for finding in findings]


def test_nothing_is_wrong(db, tmp_path):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert check(db) == []
    assert check(f"sqlite:///{db}", runs=tmp_path / "runs", identify=None) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_what_is_no_database_of_ours(tmp_path):
    with pytest.raises(StoreMissing):
        check(tmp_path / "none.db")
    (tmp_path / "notes.db").write_text("just some notes, long enough to be looked at " * 50)
    with pytest.raises(StoreError, match="not a database"):
        check(tmp_path / "notes.db")
    sql(tmp_path / "theirs.db", "CREATE TABLE trials (id INTEGER)")
    with pytest.raises(StoreError, match="not a database of atma-sweep"):
        check(tmp_path / "theirs.db")
    (tmp_path / "empty.db").touch()
    assert summary(check(tmp_path / "empty.db")) == [("note", "the database is empty")]


REBUILT = "PRAGMA foreign_keys=OFF"
BROKEN = {
    "the view results": ["DROP VIEW results"],
    "the index one_live_attempt": ["DROP INDEX one_live_attempt"],
    "the index ix_cell_slug": ["DROP INDEX ix_cell_slug", "CREATE INDEX ix_cell_slug ON cell (id)"],
    "the index ix_revision_cell_cell_id": ["DROP INDEX ix_revision_cell_cell_id"],
    "the index one_live_attempt is": [
        "DROP INDEX one_live_attempt", "CREATE UNIQUE INDEX one_live_attempt ON attempt (cell_id, id)",
    ],
    "the index one_live_attempt is missing or": [
        "DELETE FROM attempt WHERE id > 1000", "DROP INDEX one_live_attempt",
        "CREATE UNIQUE INDEX one_live_attempt ON attempt (cell_id)",
    ],
    "the primary key of event": [
        "CREATE TABLE copy AS SELECT * FROM event", "DROP TABLE event", "ALTER TABLE copy RENAME TO event",
    ],
    "the constraint ck_measurement_value_or_reason": [
        "CREATE TABLE copy AS SELECT * FROM measurement", "DROP TABLE measurement", "ALTER TABLE copy RENAME TO measurement",
    ],
    "the table example is missing": ["DROP TABLE example"],
    "the table attempt's column exit_code": ["ALTER TABLE attempt DROP COLUMN exit_code"],
    "the constraint uq_measurement_attempt_id_probe_metric_length": [
        "CREATE TABLE copy AS SELECT * FROM measurement", "DROP TABLE measurement", "ALTER TABLE copy RENAME TO measurement",
    ],
    "the foreign key event.sweep_id": [
        "CREATE TABLE copy AS SELECT * FROM event", "DROP TABLE event", "ALTER TABLE copy RENAME TO event",
    ],
    "row of measurement refers to missing rows of attempt": [REBUILT, "DELETE FROM attempt WHERE id = 1"],
    "rows of revision_cell refer to missing rows of cell": [REBUILT, "DELETE FROM cell"],
    "sweep 'quick' has no revision": [REBUILT, "DELETE FROM revision_cell", "DELETE FROM revision"],
    "the schema was written by a newer atma-sweep (revision 9999": ["UPDATE alembic_version SET version_num = '9999'"],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("what", BROKEN)
def test_check_reports_the_damage(db, what):
    """The report is one error that names the damage, with a remedy."""
    sql(
        db,
        *["DROP VIEW IF EXISTS results"] * (what.startswith("the table attempt") or "copy" in str(BROKEN[what])),
        *BROKEN[what],
    )
    before = dump(db)
    findings = check(db)
    named = [finding for finding in findings if what in finding.what]
    assert named
    assert all(finding.severity == "error" and finding.remedy for finding in named)
    assert all(isinstance(finding, Finding) for finding in findings)
    assert dump(db) == before


def test_an_older_schema_is_a_warning(db, monkeypatch):
    sql(db, "UPDATE alembic_version SET version_num = '0001'")
    for module in (runner, schema_findings):
        monkeypatch.setattr(module, "HEAD", "0002")
    monkeypatch.setattr(schema_findings, "REVISIONS", ("0001", "0002"))
    (finding,) = check(db)
    assert (finding.severity, finding.remedy) == ("warning", "run: atma-sweep db upgrade, then check again")


def test_keys_that_are_there_twice(db):
    sql(
        db, "DROP VIEW results", "CREATE TABLE copy AS SELECT * FROM measurement", "DROP TABLE measurement",
        "ALTER TABLE copy RENAME TO measurement", "INSERT INTO measurement SELECT * FROM measurement WHERE id = 1",
        "DROP INDEX one_live_attempt", "UPDATE attempt SET state = 'running', cell_id = (SELECT MIN(cell_id) FROM attempt), number = id",
    )  # fmt: skip
    problems = [what for _, what in summary(check(db))]
    assert "measurement has 1 duplicate keys (id)" in problems
    assert "measurement has 1 duplicate keys (attempt_id, probe, metric, length)" in problems
    assert "cells with two attempts in state running: 1" in problems


def test_a_damaged_file_names_the_newest_backup(db):
    copy = backup(db)
    draw = random.Random(4)
    for _ in range(8):
        data = bytearray(copy.read_bytes())
        for page in draw.sample(range(1, len(data) // 4096), 3):  # a copy has no page that is not in use
            data[4096 * page : 4096 * (page + 1)] = draw.randbytes(4096)
        db.write_bytes(data)
        findings = check(db)
        assert findings[0].severity == "error"
        assert any(str(copy) in finding.remedy for finding in findings)
    copy.unlink()
    assert any(".recover" in finding.remedy for finding in check(db))


def test_an_index_that_lies(db):
    """Rows that an index does not know: what a lost write leaves."""
    sql(
        db, "PRAGMA writable_schema=ON",
        "UPDATE sqlite_master SET sql = 'CREATE INDEX ix_cell_slug ON cell (id)' WHERE name = 'ix_cell_slug'",
    )  # fmt: skip
    assert any("the file is damaged" in what for _, what in summary(check(db)))


@pytest.mark.thorough
def test_attempts_whose_process_is_gone(db, cells):
    store = open_store(db)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner(name="x", host=ME.host, pid=child.pid, started=psutil.Process(child.pid).create_time())
    attempt = store.start_attempt(cells(3)[2].id, owner=owner, fence=1)
    assert check(db) == []
    child.kill()
    child.wait()
    (finding,) = check(db)
    assert finding.severity == "warning"
    assert f"{cells(3)[2].id} attempt 1 (pid {child.pid})" in finding.what
    assert "launch" in finding.remedy
    store.set_process(attempt.id, 1, os.getpid(), 5.0)  # the pid lives again, as another process
    assert len(check(db)) == 1
    store.set_process(attempt.id, 1, os.getpid(), 5.0, host="another host")  # nobody can look there
    assert check(db) == []
    store.close()


def test_files_that_are_missing(db, tmp_path, cells):
    store, runs = open_store(db), tmp_path / "atma-runs"
    sql(db, "UPDATE attempt SET weights = run_dir || '/weights.safetensors', checkpoint = run_dir || '/checkpoint-1'")
    live = store.start_attempt(cells(3)[2].id, owner=ME, fence=1)
    store.finish_attempt(live.id, 1, "interrupted", checkpoint=f"{live.run_dir}/checkpoint-1")
    weights, checkpoint = check(db, runs=runs)
    assert "weights of 2 attempts" in weights.what
    # checkpoints of finished cells are removed on purpose
    assert "newest checkpoint of 1 unfinished" in checkpoint.what
    assert live.run_dir in checkpoint.what
    assert (weights.severity, checkpoint.severity) == ("warning", "warning")
    again = finished(store, cells(3)[2], "diverged", owner=ME)
    assert len(check(db, runs=runs)) == 1  # gone since that cell ended, on purpose too
    sql(db, f"UPDATE attempt SET state = 'interrupted' WHERE id = {again.id}")
    for attempt in (*store.attempts(cells(1)[0].id), *store.attempts(cells(2)[1].id)):
        (runs / attempt.run_dir).mkdir(parents=True)
        (runs / attempt.weights).write_bytes(b"w")
    (runs / live.run_dir / "checkpoint-1").mkdir(parents=True)
    (unhashed,) = check(db, runs=runs)
    assert summary([unhashed])[0][0] == "note"
    assert "the kept weights of 2 attempts have no hash recorded: kept by an earlier version" in unhashed.what
    assert check(db) == []
    shutil.rmtree(runs)
    sql(db, "UPDATE attempt SET weights = 's3://bucket/' || weights, checkpoint = NULL WHERE weights IS NOT NULL")
    sql(db, "UPDATE attempt SET checkpoint = NULL")
    (elsewhere,) = check(db, runs=runs)
    assert (elsewhere.severity, "2 attempts are not local and were not read" in elsewhere.what) == ("note", True)
    sql(db, "UPDATE attempt SET weights = NULL")
    assert check(db, runs=runs) == []
    (runs / ".import-abc").mkdir(parents=True)
    (db.parent / ".atma.db.x.part").touch()
    assert [finding.severity for finding in check(db, runs=runs)] == ["note", "note"]
    store.close()


@pytest.mark.thorough
def test_ids_that_are_not_those_of_their_configs(db, cells):
    id_by_width = {cell.config["model"]["d_model"]: cell.id for cell in cells(3)}

    def identify(config, claimed):
        return id_by_width[config["model"]["d_model"]]

    assert check(db, identify=identify) == []
    sql(db, f"UPDATE cell SET config = replace(config, '8', '9') WHERE id = '{cells(1)[0].id}'")
    (finding,) = check(db, identify=identify)
    assert (finding.severity, cells(1)[0].id in finding.what) == ("error", True)
    sql(db, "UPDATE cell SET config = '{}'")
    (finding,) = check(db, identify=identify)
    assert finding.severity == "warning"
    assert "config of 3 cells cannot be read" in finding.what
    sql(db, "UPDATE sweep SET read_only = 1")
    assert len(check(db, identify=identify)) == 1
    sql(db, "DELETE FROM sweep", "DELETE FROM revision", "DELETE FROM revision_cell")  # cells of no sweep
    assert len(check(db, identify=identify)) == 1


def test_a_clock_that_went_back(db):
    sql(db, "UPDATE event SET at = '2199-01-02T03:04:05.678Z' WHERE id = 1")
    (finding,) = check(db)
    assert (finding.severity, "event.at has the later time 2199-01-02 03:04:05" in finding.what) == ("warning", True)


def test_a_disk_that_is_nearly_full(db, monkeypatch):
    for free, severity in ((10**6, "error"), (10**9, "warning")):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(10**12, 10**12, free)
        )
        (finding,) = check(db)
        assert (finding.severity, "free" in finding.what) == (severity, True)


@pytest.mark.parametrize("kind", ["nfs4", "9p"])
def test_a_network_file_system(db, monkeypatch, kind):
    monkeypatch.setattr(host_checks, "network_filesystem", lambda path, mounts: kind)
    (finding,) = check(db)
    assert (finding.severity, kind in finding.what, "PostgreSQL" in finding.remedy) == ("error", True, True)


def test_check_during_writes(db, cells):
    store = open_store(db)
    with store.transaction() as session:
        session.execute(
            schema.Base.metadata.tables["event"].insert(), {"at": datetime.now(UTC), "kind": "x", "message": "y"}
        )
        assert check(db) == []
    store.close()
