"""Backups are whole whatever goes on meanwhile."""

import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from atma_sweep.results.errors import StoreError, StoreMissing
from atma_sweep.results.maintenance.backup import backup
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.store import schema, upgrading
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.store import open_store
from databases import sql
from patience import PATIENCE_S

FORK = multiprocessing.get_context("fork")
ME = Owner(name="me", host=os.uname().nodename, pid=os.getpid(), started=psutil.Process().create_time())


def dump(path):
    connection = sqlite3.connect(path)
    statements = sorted(connection.iterdump())  # a copy may name views before indexes
    connection.close()
    return statements


class TestBackup:
    def test_a_copy_with_every_row(self, db):
        copy = backup(db)
        assert dump(copy) == dump(db)
        assert copy.parent == db.parent
        stamp = copy.name.removeprefix("atma.db.").removesuffix(".backup")
        assert abs(datetime.strptime(stamp, "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(
            minutes=1
        )
        assert open_store(copy).cell_states()[0].state == "done"
        assert check(copy) == []

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
    def test_it_is_as_private_as_the_database(self, db, mode):
        db.chmod(mode)
        assert backup(db).stat().st_mode & 0o777 == mode

    def test_targets(self, db, tmp_path, monkeypatch):
        (tmp_path / "folder").mkdir()
        assert backup(db, tmp_path / "folder").parent == tmp_path / "folder"
        assert backup(f"sqlite:///{db}", tmp_path / "named") == tmp_path / "named"
        monkeypatch.chdir(tmp_path)
        assert dump(backup(db, Path("rel"))) == dump(db)
        with pytest.raises(StoreError, match="exists already"):
            backup(db, tmp_path / "named")
        (tmp_path / "dangling").symlink_to("nowhere")
        with pytest.raises(StoreError, match="exists already"):
            backup(db, tmp_path / "dangling")
        with pytest.raises(StoreError, match="does not exist; create it"):
            backup(db, tmp_path / "no" / "where")
        with pytest.raises(StoreMissing, match="--db"):
            backup(tmp_path / "none.db")
        (tmp_path / "empty.db").touch()
        with pytest.raises(StoreMissing, match="nothing to back up"):
            backup(tmp_path / "empty.db")
        (tmp_path / "notes.db").write_text("just some notes, long enough to be looked at " * 50)
        with pytest.raises(StoreError, match="not a database"):
            backup(tmp_path / "notes.db")
        assert [path for path in tmp_path.iterdir() if path.name.endswith(".part")] == []

    def test_concurrent_backups_overwrite_nothing(self, db):
        copies = [backup(db) for _ in range(5)]
        assert len(set(copies)) == 5

    def test_backup_keeps_a_file_created_meanwhile(self, db, tmp_path, monkeypatch):
        real = upgrading.verify_copy

        def slow(part):
            (tmp_path / "mine").write_text("somebody's")
            real(part)

        monkeypatch.setattr(upgrading, "verify_copy", slow)
        with pytest.raises(StoreError, match="cannot be copied"):
            backup(db, tmp_path / "mine")

        def no_links(*arguments):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
        with pytest.raises(StoreError, match="exists already"):
            backup(db, tmp_path / "mine")
        assert (tmp_path / "mine").read_text() == "somebody's"
        monkeypatch.setattr(upgrading, "verify_copy", real)
        assert dump(backup(db, tmp_path / "other")) == dump(db)

    def test_a_damaged_copy_is_refused(self, db, tmp_path, monkeypatch):
        real = upgrading.verify_copy

        def damage(part):
            data = bytearray(part.read_bytes())
            data[4096:8192] = os.urandom(4096)
            part.write_bytes(data)
            real(part)

        monkeypatch.setattr(upgrading, "verify_copy", damage)
        with pytest.raises(StoreError, match="db check"):
            backup(db, tmp_path / "copy")
        assert not [path for path in tmp_path.iterdir() if "copy" in path.name]

    def test_of_an_older_schema(self, db):
        sql(db, "UPDATE alembic_version SET version_num = '0000'")
        assert dump(backup(db)) == dump(db)

    @pytest.mark.thorough
    def test_while_writers_write(self, db, cells):
        """Each writer keeps two tables equal, in one transaction; so must every copy, and copies only grow."""
        stop, ready = FORK.Event(), FORK.Barrier(3)

        def work(index):
            store = open_store(db)
            attempt = (
                store.start_attempt(cells(3)[2].id, owner=ME, fence=1)
                if index == 0
                else store.attempts(cells(1)[0].id)[0]
            )
            ready.wait()
            step = 0
            while not stop.is_set():
                step += 1

                def both(session, step=step):
                    table = schema.Base.metadata.tables
                    row = {"attempt_id": attempt.id, "step": 10_000 * (index + 1) + step}
                    session.execute(table["curve_point"].insert(), row | {"tokens": 1, "wall_s": 0.0})
                    key = {"attempt_id": attempt.id, "probe": f"w{index}", "metric": "m", "length": 0, "item": step}
                    session.execute(table["example"].insert(), key | {"position": 0, "value": 1.0})

                store.write(both)

        processes = [FORK.Process(target=work, args=(index,)) for index in range(2)]
        for process in processes:
            process.start()
        ready.wait(PATIENCE_S)
        sizes = []
        for _ in range(6):
            connection = sqlite3.connect(backup(db))
            points = connection.execute("SELECT COUNT(*) FROM curve_point WHERE step >= 10000").fetchone()[0]
            items = connection.execute("SELECT COUNT(*) FROM example WHERE probe LIKE 'w%'").fetchone()[0]
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert points == items
            sizes.append(points)
            connection.close()
        stop.set()
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
        assert sizes == sorted(sizes)
        assert sizes[-1] > sizes[0]

    @pytest.mark.thorough
    def test_killed_at_any_moment(self, db, tmp_path):
        """Either there is a backup, and it is whole, or there is none."""
        before, draw = dump(db), random.Random(2)
        (tmp_path / "out").mkdir()

        def work(limit):
            seen = [0]

            def hook(event, arguments):
                if event in ("open", "os.link", "os.chmod", "os.remove", "sqlite3.connect"):
                    seen[0] += 1
                    if seen[0] == limit:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            backup(db, tmp_path / "out")

        outcomes = []
        for limit in [*range(1, 8), 99]:
            process = FORK.Process(target=work, args=(limit,))
            process.start()
            process.join(PATIENCE_S)
            backups = list((tmp_path / "out").glob("*.backup"))
            assert all(dump(copy) == before for copy in backups)
            outcomes.append(process.exitcode)
        for _ in range(4):
            process = FORK.Process(target=work, args=(999,))
            process.start()
            time.sleep(draw.uniform(0, 0.02))
            process.kill()
            process.join(PATIENCE_S)
            assert all(dump(copy) == before for copy in (tmp_path / "out").glob("*.backup"))
        assert outcomes[-1] == 0
        assert -signal.SIGKILL in outcomes
        assert dump(db) == before
