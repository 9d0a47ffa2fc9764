"""Checks of `doctor` for disk, database and clock: real files, databases and locks."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.schema import HEAD
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep import doctor
from atma_sweep.sweep.doctor import LookFailed
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.planning import admission, planner
from examined import PLAIN, TWO, cuda, gpu, level_and_text

GIB = 2**30
OWNER = Owner(name="ada", host="here", pid=1, started=0.0)


# --- disk and files -------------------------------------------------------------------------------------------------


def needs(**changes: Any) -> dict[str, Any]:
    plain = {"sweep": "g", "cells": 4, "place": "/runs", "disk_bytes_per_cell": GIB, "disk_bytes_kept": 4 * GIB,
             "disk_bytes_running": 3 * GIB, "disk_bytes_free": 100 * GIB}  # fmt: skip
    return plain | changes


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "work" / "atma.db"
    store = open_store(path, create=True)
    store.record_revision("g", grid_text="x", grid_file="x", cells=[])
    store.close()
    return path


def test_room_for_the_default_sweep(database: Path, driver: Any, look: Any) -> None:
    want = "g has 4 cells to train: 4.0 GiB to keep, 3.0 GiB for 1 running at once"
    assert level_and_text(look(disk=needs())["disk space"]) == ("ok", f"100 GiB free in /runs; {want}")
    assert look(disk=needs(disk_bytes_free=7 * GIB))["disk space"].state == "ok"
    assert look(disk=needs(disk_bytes_free=7 * GIB - 1))["disk space"].state == "warn"
    assert look(disk=needs(disk_bytes_free=3 * GIB - 1))["disk space"].state == "bad"
    assert level_and_text(look(disk=needs(disk_bytes_free=None, place="s3://b"))["disk space"]) == (
        "ok",
        f"{want}, in s3://b",
    )
    assert "needs no further space" in look(disk=needs(cells=0))["disk space"].found
    assert look(disk=LookFailed("ModelConfigError: x"))["disk space"].found.endswith("unknown: ModelConfigError: x")
    driver(gpus=TWO, plain=PLAIN)
    check = look(disk=needs(disk_bytes_free=6 * GIB - 1), torch=cuda(gpu("aaaa"), gpu("bbbb")))["disk space"]
    assert (check.state, check.found.endswith("6.0 GiB for 2 running at once")) == ("bad", True)


@pytest.mark.thorough
def test_disk_needs_equal_those_of_launch(cells: Callable[..., list[Cell]], tmp_path: Path) -> None:
    chosen = cells("seeds: 3\naxes:\n  attn_type: [polar, nope]\nset:\n  checkpoint.keep: weights\n")
    path = tmp_path / "work" / "atma.db"
    store = open_store(path, create=True)
    store.record_revision("g", grid_text="x", grid_file="x", cells=[planner.to_record(cell) for cell in chosen])
    done = store.start_attempt(chosen[0].id, owner=OWNER, fence=1)
    store.finish_attempt(done.id, 1, "done")
    runs = tmp_path / "work" / "atma-runs"
    expected = admission.disk_needed(chosen[1:], runs)
    answer = doctor.answer("disk", str(runs), seconds=120, db=f"sqlite:///{path}")
    assert answer.pop("disk_bytes_free") > 0
    assert answer == {"sweep": "g", "cells": 5, "place": str(runs), "disk_bytes_per_cell": expected.per_cell[1],
                      "disk_bytes_kept": expected.retained, "disk_bytes_running": expected.running}  # fmt: skip
    assert expected.retained > 5 * 10**6


@pytest.mark.thorough
def test_failed_worker_raises_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(LookFailed, match=r"^atma_sweep\.results\.errors\.StoreMissing: there is no database"):
        doctor.answer("disk", str(tmp_path), seconds=120, db=str(tmp_path / "none.db"))


def test_file_systems(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/shm").is_mount():
        assert doctor.filesystem(Path("/dev/shm/not/yet/there")) == "tmpfs"

    def mounts(*pairs: tuple[Path | str, str]) -> None:
        listed = [SimpleNamespace(mountpoint=str(point), fstype=kind) for point, kind in pairs]
        monkeypatch.setattr(psutil, "disk_partitions", lambda all: listed)

    work = tmp_path / "work"
    mounts(("/", "ext4"), (work / "atma-runs", "lustre"), (tmp_path, "xfs"))
    checks = look()
    assert level_and_text(checks["file system of database"]) == ("ok", f"{work / 'atma.db'} is on xfs")
    assert checks["file system of runs"].state == "ok"
    assert "is on lustre, a network file system" in checks["file system of runs"].found
    mounts(("/", "ext4"), (work, "nfs4"))
    checks = look()
    assert level_and_text(checks["file system of database"]) == (
        "bad",
        f"{work / 'atma.db'} is on nfs4, where SQLite databases become corrupt",
    )
    assert checks["file system of database"].remedy == "use a local disk or PostgreSQL (--db)"
    mounts(("/", "ext4"), (work, "nfs4"), (work, "tmpfs"))
    assert look()["file system of database"].state == "warn", "the later mount covers the earlier"
    mounts()
    assert look()["file system of runs"].found.endswith("a file system of unknown type")


def test_unwritable_runs_folder_is_bad(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look()["writing"].found.endswith(f" in {tmp_path / 'work'}")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert level_and_text(look()["writing"]) == ("bad", f"{tmp_path / 'work'}: No space left on device")
    assert list((tmp_path / "work").iterdir()) == []
    counts = SimpleNamespace(f_files=100, f_favail=50, f_frsize=1, f_blocks=1, f_bavail=1)
    monkeypatch.setattr(os, "statvfs", lambda path: counts)
    assert level_and_text(look()["inodes"]) == ("warn", "50 of 100 free")
    counts.f_favail = 0
    assert look()["inodes"].state == "bad"
    counts.f_files = 0
    assert level_and_text(look()["inodes"]) == ("ok", "this file system does not report inodes")


# --- database and clock ---------------------------------------------------------------------------------------------


def sql(path: Path, query: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(query, values)


def test_sound_database_passes_all_checks(database: Path, look: Any) -> None:
    checks = look(disk=needs(cells=0))
    assert checks["database"].state == "ok"
    assert checks["database"].found.startswith(f"{database}, revision {HEAD}, 1 sweep, ")
    assert level_and_text(checks["database integrity"]) == ("ok", "quick_check found no error")
    assert checks["database lock"].state == "ok"
    assert level_and_text(checks["clock and database"]) == ("ok", "no row yet")
    sql(database, "UPDATE alembic_version SET version_num = '9999'")
    newer = look()["database"]
    assert level_and_text(newer) == ("bad", f"{database} was written by a newer atma-sweep (revision 9999)")
    assert newer.remedy == "upgrade the program"


def test_missing_database_is_absent_and_invalid_file_is_bad(tmp_path: Path, look: Any) -> None:
    checks = look()
    assert [checks[f"database{rest}"].state for rest in ("", " integrity", " lock")] == ["absent"] * 3
    (tmp_path / "work" / "atma.db").write_text("a diary, and not a database at all\n" * 100)
    checks = look()
    assert [checks[f"database{rest}"].state for rest in ("", " integrity", " lock")] == ["bad"] * 3
    assert "file is not a database" in checks["database"].found


def test_database_with_a_torn_page_is_bad(database: Path, look: Any) -> None:
    for index in range(400):
        sql(
            database,
            "INSERT INTO event (at, kind, message) VALUES (?, 'x', ?)",
            "2026-01-02T03:04:05.678Z",
            f"{index}" * 99,
        )
    sql(database, "PRAGMA wal_checkpoint(TRUNCATE)")
    with database.open("r+b") as file:
        file.seek(-3 * 4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    check = look(disk=needs(cells=0))["database integrity"]
    assert check.state == "bad"
    assert check.found.startswith("quick_check: ")
    assert ".recover" in check.remedy


def test_locked_database_is_bad(database: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor.context, doctor.database):
        monkeypatch.setattr(module, "LOCK_SECONDS", 0.3)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        checks = look(disk=needs(cells=0))
        assert level_and_text(checks["database lock"]) == ("bad", "another program has held the lock for 0.3 s")
        assert checks["database"].state == "ok", "reading goes on"
    assert look(disk=needs(cells=0))["database lock"].state == "ok"


@pytest.mark.thorough
@pytest.mark.parametrize(("ahead", "state"), [(-5, "ok"), (1, "ok"), (30, "warn"), (7200, "bad")])
def test_row_from_the_future_is_reported(database: Path, look: Any, ahead: int, state: str) -> None:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() + ahead))
    sql(database, "INSERT INTO event (at, kind, message) VALUES (?, 'x', 'y')", moment)
    check = look(disk=needs(cells=0))["clock and database"]
    assert check.state == state
    if ahead > 2:
        seconds = int(check.found.removeprefix("the time of the newest row is ").split()[0])
        assert ahead - 5 <= seconds <= ahead


def test_jumping_clock_is_a_warning(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look()["clock"].state == "ok"
    real, jumps = time.time, iter((0.0, *[3.0] * 10**4))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    check = doctor.database.check_clock(None)  # type: ignore[arg-type]
    assert check.state == "warn"
    assert 2950 < float(check.found.split(" UTC, ")[1].split()[0]) < 3050
