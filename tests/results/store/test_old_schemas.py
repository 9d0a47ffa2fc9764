"""Databases of every release come to this one whole: with every row, or not at all.

fixtures/schema-<revision>.sql.gz holds a populated database as SQL. `python tests/results/store/test_old_schemas.py` writes those
that are missing, of every revision before the newest; an existing one is never written again, since it stands for files
that people have.
"""

import gzip
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from atma_sweep.results.errors import StoreError
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.store.database import make_engine, resolve_url
from atma_sweep.results.store.schema import HEAD, REVISIONS
from atma_sweep.results.store.store import open_store
from atma_sweep.results.store.upgrading import MIGRATIONS, migrate, upgrade_store
from patience import PATIENCE_S
from sqlalchemy import MetaData, event, insert, select
from sqlalchemy.engine import Engine

FIXTURES = Path(__file__).with_name("fixtures")
FORK = multiprocessing.get_context("fork")
FILES = sorted(FIXTURES.glob("schema-*.sql.gz"))
TIME = "2026-01-02T03:04:{:02d}.678Z"


def load(file, path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(gzip.decompress(file.read_bytes()).decode())
    connection.close()
    return path


def columns(path):
    """Table -> its columns."""
    connection = sqlite3.connect(path)
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    columns_by_table = {name: [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')] for name in names}
    connection.close()
    return {name: listed for name, listed in columns_by_table.items() if name != "alembic_version"}


def contents(path, listed):
    """Table -> (rows, checksum over those columns, in the order of all of them)."""
    connection = sqlite3.connect(path)
    rows_by_table = {}
    for name, wanted in listed.items():
        quoted = ", ".join(f'"{column}"' for column in wanted)
        rows = sorted(repr(row) for row in connection.execute(f'SELECT {quoted} FROM "{name}"'))
        rows_by_table[name] = len(rows), hashlib.sha256("\n".join(rows).encode()).hexdigest()
    connection.close()
    return rows_by_table


def schema_of(path):
    connection = sqlite3.connect(path)
    entries = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
    # alembic lists the constraints of a table that it makes anew in any order
    entries = [(kind, name, sorted((text or "").replace(",", " ").split())) for kind, name, text in entries]
    version = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    return entries, version


def test_every_earlier_release_has_a_fixture():
    have = {file.name.removeprefix("schema-").removesuffix(".sql.gz") for file in FILES}
    assert have == set(REVISIONS[:-1]), f"run: python {Path(__file__).name}"


@pytest.fixture(params=FILES, ids=[file.name.removesuffix(".sql.gz") for file in FILES])
def old(request, tmp_path):
    return load(request.param, tmp_path / "atma.db")


@pytest.mark.thorough
def test_an_old_database_comes_to_this_release_with_every_row(old):
    listed = columns(old)
    before = contents(old, listed)
    assert {"sweep", "revision", "cell", "attempt", "measurement", "curve_point"} <= set(before)
    assert all(rows > 0 for rows, _ in before.values())
    was = schema_of(old)[1][0][0]
    if was != HEAD:
        with pytest.raises(StoreError, match="db upgrade"):
            open_store(old)
    backup = upgrade_store(old)
    assert contents(old, listed) == before
    assert schema_of(old)[1] == [(HEAD,)]
    if was != HEAD:
        assert columns(backup) == listed
        assert contents(backup, listed) == before
    assert upgrade_store(old) is None
    assert check(old, runs=None) == []
    # and it is read as what it was
    store = open_store(old)
    states = {state.cell_id: state for state in store.cell_states("quick")}
    assert [states[cell].state for cell in sorted(states)] == ["done", "interrupted", "failed", "new"]
    trained = states["c0de00000000"]
    assert {v.metric: v.value for v in store.measurements(trained.cell_id)} == {"val_loss": 0.1 + 0.2, "nats": None}
    assert [point.train_loss for point in store.curve(trained.trained_attempt_id)] == [3 / 7, None, 3e-5]
    assert store.provenance(trained.trained_attempt_id).config["é"] == "ü\n"
    assert store.revision("quick").grid_text == "name: quick # ä\n"
    store.close()


def test_upgraded_schema_equals_a_new_schema(old, tmp_path):
    """Upgraded and new databases have the same tables, columns, constraints and indexes."""
    upgrade_store(old)
    open_store(tmp_path / "new.db", create=True).close()

    def shape(path):
        connection = sqlite3.connect(path)
        tables = {}
        for name in columns(path):
            tables[name] = [
                sorted(connection.execute(f'PRAGMA {pragma}("{name}")'), key=repr)
                for pragma in ("table_info", "foreign_key_list")
            ]
            tables[name].append(
                sorted((row[1:] for row in connection.execute(f'PRAGMA index_list("{name}")')), key=repr)
            )
        tables["views"] = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'view'").fetchall()
        connection.close()
        return tables

    assert shape(old) == shape(tmp_path / "new.db")


@pytest.mark.thorough
@pytest.mark.parametrize("revision", REVISIONS)
def test_an_old_database_on_a_server(postgres_url, revision):
    """The same rows in PostgreSQL at that revision come to this release."""
    url = resolve_url(postgres_url)
    engine = make_engine(url)
    with engine.begin() as connection:
        migrate(connection, head=revision)
        populate(connection)

    def rows():
        with engine.connect() as connection:
            return {name: sorted(map(repr, connection.execute(select(*old[name])))) for name in old}

    metadata = MetaData()
    metadata.reflect(engine)
    old = {name: list(table.columns) for name, table in metadata.tables.items() if name != "alembic_version"}
    before = rows()
    assert upgrade_store(postgres_url) is None
    assert rows() == before
    assert all(before.values())
    assert check(postgres_url) == []
    store = open_store(postgres_url)
    assert [state.state for state in store.cell_states("quick")] == ["done", "interrupted", "failed", "new"]
    store.close()
    engine.dispose()


# --- the next release, which makes tables anew ----------------------------------------------------------------------

NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "next", "{head}"

def upgrade():
    view = op.get_bind().exec_driver_sql("SELECT sql FROM sqlite_master WHERE type = 'view'").scalar()
    op.execute("DROP VIEW results")
    for name in {tables}:
        with op.batch_alter_table(name, recreate="always") as batch:
            batch.add_column(sa.Column("remark", sa.Text(), nullable=False, server_default="none"))
    op.execute(view)
"""


@pytest.fixture
def following(tmp_path):
    """Return a function that writes the migrations of a later release, which rebuilds the given tables."""

    def release(*tables):
        folder = tmp_path / "migrations"
        shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "versions" / "next.py").write_text(NEXT.replace("{head}", HEAD).replace("{tables}", repr(tables)))
        return folder

    return release


PARENTS = ("sweep", "revision", "cell", "attempt")
"""Every table that others refer to."""


@pytest.mark.thorough
def test_rebuilt_tables_take_no_children_with_them(old, following):
    listed = columns(old)
    before = contents(old, listed)
    upgrade_store(old, migrations=following(*PARENTS), head="next")
    assert contents(old, listed) == before
    assert schema_of(old)[1] == [("next",)]


def test_the_trap_is_there(old, following):
    """The same migration with foreign keys on loses rows, without an error: what the test above is worth."""
    listed = columns(old)
    before = contents(old, listed)
    engine = make_engine(resolve_url(old))
    with engine.begin() as connection:
        migrate(connection, migrations=following("sweep"), head="next")
    engine.dispose()
    after = contents(old, listed)
    assert after["sweep"] == before["sweep"]
    assert after["revision"][0] == after["revision_cell"][0] == 0 < before["revision"][0]


@pytest.mark.thorough
@pytest.mark.parametrize(("tables", "message"), [(("sweep",), "would lose data"), (PARENTS, "failed and was undone")])
def test_foreign_keys_that_are_on_undo_the_upgrade(old, following, monkeypatch, tables, message):
    """Should somebody lose the switch, the comparison of row counts still catches it, or SQLite does."""
    before = contents(old, columns(old))
    real = make_engine
    monkeypatch.setattr("atma_sweep.results.store.upgrading.make_engine", lambda url, **options: real(url))
    with pytest.raises(StoreError, match=message):
        upgrade_store(old, migrations=following(*tables), head="next")
    assert contents(old, columns(old)) == before


def _upgrade(path, folder, die_at=None):
    """Upgrades; dies just before the given statement. Returns the number of statements."""
    seen = [0]

    @event.listens_for(Engine, "before_cursor_execute")
    @event.listens_for(Engine, "commit")
    def count(*arguments):
        seen[0] += 1
        if seen[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    upgrade_store(path, migrations=folder, head="next")
    return seen[0]


@pytest.mark.thorough
def test_killed_in_the_midst_it_is_wholly_old_or_wholly_new(tmp_path, following):
    """Ten times: at a statement drawn at random, at the last ones, and at moments drawn at random."""
    source, release = load(FILES[0], tmp_path / "source.db"), following(*PARENTS)
    listed = columns(source)
    before, was = contents(source, listed), schema_of(source)
    grown, queue = shutil.copy(source, tmp_path / "grown.db"), FORK.Queue()
    start = time.monotonic()
    uninterrupted = FORK.Process(target=lambda: queue.put(_upgrade(grown, release)))
    uninterrupted.start()
    total = queue.get(timeout=PATIENCE_S)
    uninterrupted.join(PATIENCE_S)
    took, now = time.monotonic() - start, schema_of(grown)
    assert contents(grown, listed) == before
    assert now != was
    draw, outcomes = random.Random(5), []
    points = [total, total - 1, *(draw.randint(1, total) for _ in range(4)), *[None] * 4]
    for index, point in enumerate(points):
        folder = tmp_path / f"killed{index}"
        folder.mkdir()
        path = shutil.copy(source, folder / "atma.db")
        process = FORK.Process(target=_upgrade, args=(path, release, point))
        process.start()
        if point is None:
            time.sleep(draw.uniform(0, took))
            process.kill()
        process.join(PATIENCE_S)
        outcomes.append((process.exitcode, schema_of(path)))
        assert contents(path, listed) == before
        assert outcomes[-1][1] in (was, now)
        for copy in folder.glob("*before-upgrade*"):
            if not copy.name.endswith((".part", "-journal")):
                assert (contents(copy, listed), schema_of(copy)) == (before, was)
        upgrade_store(path, migrations=release, head="next")
        assert (contents(path, listed), schema_of(path)) == (before, now)
    assert all(code == -signal.SIGKILL for (code, _), point in zip(outcomes, points, strict=True) if point)
    assert (-signal.SIGKILL, was) in outcomes


# --- making fixtures ------------------------------------------------------------------------------------------------


def populate(connection):
    """Rows in every table, as far as the tables of that release have the columns."""
    metadata = MetaData()
    metadata.reflect(connection)

    def add(name, *rows):
        table = metadata.tables.get(name)
        if table is None:
            return
        valid_rows = [{key: value for key, value in row.items() if key in table.c} for row in rows]
        for row in valid_rows:
            connection.execute(insert(table).values(**row))

    moments = [TIME.format(second) for second in range(30)]
    add("sweep", *({"id": i, "name": name, "created_at": moments[i], "launched_at": moments[i], "fence": i, "read_only": i == 1,
                    "request": {"pause": True}, "owner_space": "boot namespace", "tags": ["paper"], "note": "é"} for i, name in ((1, "published"), (2, "quick"))))  # fmt: skip
    grid = {
        "grid_file": "g.yaml", "options": {"only": None, "requested": [["val", 0]]}, "git_commit": "c0ffee",
        "git_dirty": True,
    }  # fmt: skip
    add("revision", {"id": 1, "sweep_id": 1, "number": 1, "grid_text": "name: published", **grid, "created_at": moments[1]},
        {"id": 2, "sweep_id": 2, "number": 1, "grid_text": "name: quick", **grid, "created_at": moments[2]},
        {"id": 3, "sweep_id": 2, "number": 2, "grid_text": "name: quick # ä\n", **grid, "created_at": moments[3]})  # fmt: skip
    levels = {"attn_type": "polar", "reg_mode": "baseline", "distractor": "off", "memory": "on", "window": "off"}
    cells = [f"c0de0000000{i}" for i in range(4)]
    add("cell", *({"id": cell, "slug": f"polar-s{i}", "seed": 2**40 + i, **levels, "config": {"model": {"d_model": 64 + i}},
                   "tokens_total": 10**12, "created_at": moments[2], "note": "ü\n"} for i, cell in enumerate(cells)))  # fmt: skip
    add("revision_cell", *({"revision_id": r, "cell_id": cell, "position": i, "axes": {"z": "1", "attn_type": "polar"}}
                           for r in (1, 2, 3) for i, cell in enumerate(cells)))  # fmt: skip
    shared = {"fence": 2, "owner": "ada", "host": "far", "pid": 7, "pid_started": 1.5, "phase": "probing", "step": 3}
    shared |= {
        "steps_total": 9, "loss": 1 / 3, "tokens_per_s": 1e5, "exit_code": 1, "deviation": {"micro_batch": 2},
        "pid_space": "boot namespace",
    }  # fmt: skip
    plan = [(1, 0, 1, "train", None, "failed"), (2, 0, 2, "train", None, "done"), (3, 0, 3, "evaluate", 2, "done"),
            (4, 1, 1, "train", None, "interrupted"), (5, 2, 1, "train", None, "diverged"), (6, 2, 2, "train", None, "failed")]  # fmt: skip
    for id_, cell, number, kind, parent, state in plan:
        folder = f"{cells[cell]}/{number}"
        add("attempt", {"id": id_, "cell_id": cells[cell], "number": number, "kind": kind, "parent_id": parent, "state": state, **shared,
                        "started_at": moments[id_], "heartbeat_at": moments[id_ + 1], "finished_at": moments[id_ + 2],
                        "cause": "a 'cause' with \"quotes\"; ünïcode\n", "traceback": "T" * 500, "run_dir": folder,
                        "checkpoint": f"{folder}/checkpoint-1", "weights": f"{folder}/weights.safetensors" if state == "done" else None,
                        "failure": "code" if state == "failed" else None})  # fmt: skip
        attempt_key = {"attempt_id": id_}
        add("measurement", {**attempt_key, "probe": "val", "metric": "val_loss", "length": 0, "value": 0.1 + 0.2, "unit": "nats", "n": 2**40,
                            "low": 1e-300, "high": 5e-324, "seconds": 1.5, "peak_memory": 2**36, "created_at": moments[9],
                            "source": "5" * 64, "description": {"words": "é"}},
            {**attempt_key, "probe": "clean", "metric": "nats", "length": 65536, "unit": "nats", "reason": "oom: no memory",
             "created_at": moments[9]})  # fmt: skip
        add("example", *({**attempt_key, "probe": "clean", "metric": "nats", "length": 64, "item": i, "position": i % 2, "value": i / 7,
                          "detail": {"é": i} if i else None} for i in range(4)))  # fmt: skip
        add("curve_point", *({**attempt_key, "step": s, "tokens": 10**11 * s, "wall_s": s / 3, "train_loss": loss, "lr": 1.0}
                             for s, loss in ((0, 3 / 7), (5, None), (10, 3e-5))))  # fmt: skip
        add("provenance", {**attempt_key, "config": {"z": 1, "é": "ü\n"}, "seed": 2**62, "git_commit": None, "git_dirty": None,
                           "packages": {"numpy": "2"}, "python": "3.11", "platform": "Linux", "host": "far", "device": "cpu",
                           "gpu_count": 0, "dtype": "float32", "kernels": {}, "tokenizer": "bytes", "corpus": "x",
                           "corpus_fingerprint": "f", "extra": {}})  # fmt: skip
    add("event", *({"id": i, "sweep_id": 2 if i % 2 else None, "attempt_id": i, "cell_id": cells[0], "at": moments[i], "kind": "note",
                    "message": f"event {i}"} for i in range(1, 6)))  # fmt: skip
    add("study", {"sweep_id": 2, "part": "", "memory": {"é": [1]}})
    add("trial", *({"sweep_id": 2, "part": "", "number": i, "cell_id": cells[i], "params": {"train.muon_lr": 1 / (i + 3)}, "attrs": {},
                    "standing": standing, "objectives": [1 / 7] if standing == "done" else None, "curve": [[1, 0.1 + 0.2]],
                    "asked_at": moments[i], "ended_at": moments[i + 1]} for i, standing in enumerate(("done", "pruned", "failed"))))  # fmt: skip


def write_missing():
    """Writes the fixtures that are not there yet."""
    for revision in REVISIONS[:-1]:
        file, path = FIXTURES / f"schema-{revision}.sql.gz", FIXTURES / f"{revision}.tmp"
        if file.exists():
            continue
        engine = make_engine(resolve_url(path), foreign_keys=False)
        with engine.begin() as connection:
            migrate(connection, head=revision)
            populate(connection)
        engine.dispose()
        connection = sqlite3.connect(path)
        text = "\n".join(connection.iterdump()) + "\n"
        connection.close()
        path.unlink()
        with file.open("wb") as stream, gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, filename="") as packed:
            packed.write(text.encode())
        print(json.dumps({"wrote": str(file)}))


if __name__ == "__main__":
    sys.exit(write_missing())
