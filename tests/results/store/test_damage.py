"""Damaged SQLite files, and disks without room: every command says so in one line."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.console.output_files import store_error_for
from atma_sweep.results.errors import StoreBusy, StoreError, WriteRefused
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.store import database_connection, upgrading
from atma_sweep.results.store.database import explain_driver_error, resolve_url
from atma_sweep.results.store.store import Store, open_store
from every_command import example_lines, fill_database, no_hang
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

Run = Callable[..., tuple[int, str, str]]
PAGE = 4096


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with the sweep of the examples, and with free pages."""
    path = fill_database(tmp_path_factory.mktemp("sound"))
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM curve_point WHERE step > 40")
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert connection.execute("PRAGMA freelist_count").fetchone()[0] > 1
    connection.close()
    return path.read_bytes()


def flipped(content: bytes, draw: random.Random, begin: int, end: int, count: int) -> bytes:
    """Flip so many bits between two places."""
    out = bytearray(content)
    for _ in range(count):
        out[draw.randrange(begin, end)] ^= 1 << draw.randrange(8)
    return bytes(out)


def zeroed(content: bytes, page: int) -> bytes:
    return content[: page * PAGE] + bytes(PAGE) + content[(page + 1) * PAGE :]


def damages(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """Damage without end: cut off, pages lost, bits of the header, the schema, a tree and the list of free pages."""
    pages = len(content) // PAGE
    while True:
        yield content[: draw.choice((1, 15, 50, 100, 512, PAGE - 1, PAGE, 2 * PAGE, draw.randrange(len(content))))]
        yield zeroed(content, draw.randrange(pages))
        yield flipped(content, draw, 0, 100, draw.choice((1, 4)))
        yield flipped(content, draw, 100, 5 * PAGE, draw.choice((1, 8, 60)))
        start = PAGE * draw.randrange(1, pages)
        yield flipped(content, draw, start, start + 12, draw.choice((1, 4)))
        free = draw.randrange(1, 2 * pages).to_bytes(4, "big") + draw.randrange(1, 50).to_bytes(4, "big")
        yield content[:32] + free + content[40:]
        yield flipped(content, draw, 0, len(content), 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
def test_no_command_fails_badly_on_damage(run: Run, tmp_path: Path, sound: bytes, seed: int) -> None:
    """By the tree of commands: each of its examples on a file that is damaged another way."""
    draw = random.Random(seed)
    # the doctor looks at the whole machine, generate imports torch, and the live page is served without end
    lines = [arguments for arguments in example_lines() if arguments[0] not in ("doctor", "generate", "dashboard")]
    lines = [arguments for arguments in lines if "--watch" not in arguments and arguments[0] != "data"]
    lines = lines if seed else lines[::4]
    for arguments, content in zip(lines, damages(sound, draw), strict=False):
        for old in tmp_path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        (tmp_path / "atma.db").write_bytes(content)
        with no_hang(arguments):
            code, _, err = run(*arguments)
        assert code in (0, 1, 2, 3), (arguments, err)
        assert code < 2 or len(err.splitlines()) == 1, (arguments, err)


READING = ["status", "report --table 6", "show 000000000000", "export --to csv --out x.csv"]
WRITING = ["note quick seen", "delete quick --yes", "db backup", "db upgrade"]


@pytest.mark.parametrize("arguments", [*READING, *WRITING])
def test_a_lost_page_is_a_single_line(run: Run, tmp_path: Path, sound: bytes, arguments: str) -> None:
    # the root of the table which is listed first; SQLite reads it for every question about the others
    (tmp_path / "atma.db").write_bytes(zeroed(sound, 1))
    code, _, err = run(*arguments.split())
    assert (code, err) == (
        3,
        f"atma-sweep: {tmp_path}/atma.db is damaged: database disk image is malformed; run atma-sweep db check, "
        f"then restore a backup, or recover what can be read: sqlite3 {tmp_path}/atma.db .recover | sqlite3 "
        "NEW.db\n",
    )


def test_a_binary_schema_is_a_single_line(run: Run, tmp_path: Path, sound: bytes) -> None:
    (tmp_path / "atma.db").write_bytes(sound.replace(b"CREATE TABLE sweep", b"CREATE TABL\xff\xfe sweep"[:18]))
    for arguments in (*READING, *WRITING):
        code, _, err = run(*arguments.split())
        assert (code, len(err.splitlines())) == (3, 1), (arguments, err)
        assert f"{tmp_path}/atma.db is damaged: " in err


def test_no_database_is_a_single_line(run: Run, tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "atma.db"
    message = {
        "header": (3, "is damaged: its header cannot be read; run atma-sweep db check"),
        "text": (2, "as a database: file is not a database; name another with --db"),
        "empty": (2, "is empty; launch a grid first, or name the database with --db"),
    }
    for name, content in (("header", b"sql" + sound[3:]), ("text", b"some text\n" * 1000), ("empty", b"")):
        path.write_bytes(content)
        code, _, err = run("show", "x")
        assert (code, len(err.splitlines())) == (message[name][0], 1)
        assert message[name][1] in err
    path.unlink()
    path.mkdir()
    assert run("status")[::2] == (2, f"atma-sweep: {path} is a folder, not a database; name a file with --db\n")


def test_a_foreign_log_is_a_single_line(run: Run, tmp_path: Path, sound: bytes) -> None:
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("PRAGMA journal_mode=WAL")
    foreign.execute("CREATE TABLE t (a)")
    foreign.execute("INSERT INTO t VALUES (zeroblob(40000))")
    foreign.commit()
    for arguments in (*READING, *WRITING):
        (tmp_path / "atma.db").write_bytes(sound)
        shutil.copyfile(tmp_path / "foreign.db-wal", tmp_path / "atma.db-wal")
        code, _, err = run(*arguments.split())
        assert code in (2, 3), err
        assert len(err.splitlines()) == 1
    foreign.close()


# --- no room ----------------------------------------------------------------------------------------------------------

FULL = OperationalError("SELECT 1", {}, sqlite3.OperationalError("disk I/O error"))


def test_a_full_disk_is_no_reason_for_another_database(tmp_path: Path) -> None:
    error = explain_driver_error(FULL, resolve_url(tmp_path / "atma.db"))
    assert isinstance(error, WriteRefused)
    assert error.exit_code == 3
    assert str(error) == (
        f"{tmp_path}/atma.db cannot be written, which SQLite needs even for reading: its disk is full or broken "
        "(disk I/O error); free disk space"
    )


def test_check_finds_no_damage_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path / "atma.db", create=True).close()

    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr("atma_sweep.results.maintenance.check.findings_inside", full)
    with pytest.raises(WriteRefused, match="its disk is full or broken"):
        check(tmp_path / "atma.db")


def test_a_copy_without_room_names_its_target() -> None:
    error = store_error_for(OSError(28, "No space left on device", "cli.py", None, "/full/source/cli.py"))
    assert str(error) == (
        "cannot use /full/source/cli.py: No space left on device; free disk space, or choose another path"
    )


def test_a_failed_creation_leaves_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(engine: Any) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE half (a)"))
            raise FULL

    (tmp_path / "empty.db").touch()
    monkeypatch.setattr(upgrading, "create_if_empty", full)
    for name in ("atma.db", "empty.db"):
        with pytest.raises(WriteRefused):
            open_store(tmp_path / name, create=True)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".db"] == ["empty.db"]


def test_a_bundle_that_is_none_makes_no_database(run: Run, tmp_path: Path) -> None:
    (tmp_path / "no.zip").write_text("no bundle")
    assert run("import", "no.zip")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["no.zip"]


def test_a_tokenizer_without_room_leaves_no_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some arguments of a text " * 50)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run("data", "tokenizer", "a.txt", "--size", "260", "--out", "bpe.json")
    assert (code, err) == (
        3,
        "atma-sweep: cannot write bpe.json: No space left on device; free disk space, or choose another path\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def cramped(tmp_path: Path) -> tuple[Store, list[int]]:
    """A database that may grow to so many pages, for writes that need more than there is."""
    store, most = open_store(tmp_path / "atma.db", create=True), [1]

    @event.listens_for(store.engine, "begin")
    def limit(connection: Any) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={most[0]}")

    return store, most


def grow(session: Any) -> None:
    session.execute(text("CREATE TABLE large AS SELECT zeroblob(100000) AS a"))


def test_a_write_without_room_says_so_and_goes_on(
    cramped: tuple[Store, list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, most = cramped
    monkeypatch.setattr(database_connection, "WARN_AFTER_S", 0.0)

    def room(record: logging.LogRecord) -> bool:
        most[0] = 10_000
        return True

    caplog.handler.addFilter(room)
    store.write(grow)
    assert store.read(lambda session: session.scalar(text("SELECT length(a) FROM large"))) == 100_000
    (line,) = caplog.messages
    assert line.startswith(
        f"{store} cannot be written, its disk is full or broken; free disk space; trying again for another "
    )


def test_a_write_that_never_finds_room_ends_with_3(cramped: tuple[Store, list[int]]) -> None:
    with pytest.raises(StoreBusy, match="its disk is full or broken; free disk space and launch again") as error:
        cramped[0].write(grow, patience=0.2)
    assert error.value.exit_code == 3
    assert database_connection.WARN_AFTER_S + 5.0 < 15, "the longest pause between two tries comes on top"


@pytest.mark.thorough
def test_commands_on_a_full_disk(run: Run, tmp_path: Path, sound: bytes) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(full)], capture_output=True)
    if mounted.returncode:
        pytest.skip(
            f"needs the right to mount, in a container --privileged: {mounted.stderr.decode(errors='replace').strip()}"
        )
    try:
        (full / "atma.db").write_bytes(sound)
        with (full / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(bytes(PAGE))
        for arguments in (
            "status",
            "report --table 6",
            "note quick seen",
            "db check",
            "db backup",
            "export --out x.csv",
        ):
            code, _, err = run(*arguments.split(), "--db", str(full / "atma.db"))
            assert (code, len(err.splitlines())) == (3, 1), (arguments, err)
            assert f"{full}/atma.db cannot be written" in err
            assert "free disk space" in err
        code, _, err = run("launch", "quick", "--executor", "local", "--db", str(full / "new.db"))
        assert code == 3
        assert f"; 0 B free in {full}/new-runs" in err
        assert not (full / "new.db").exists()
    finally:
        subprocess.run(["umount", "--lazy", str(full)], check=True)


def test_errors_of_a_server_are_no_damage() -> None:
    url = resolve_url("postgresql://me@host/db")
    assert explain_driver_error(OperationalError("SELECT 1", {}, sqlite3.DatabaseError("malformed")), url) is None
    assert explain_driver_error(StoreError("x"), url) is None
