"""Published sweeps come into a database whole or not at all, once, and anew when it holds those of an older release."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.builtin_sweeps import open_store_with_builtins
from atma_sweep.results.paper import loading
from atma_sweep.results.store.store import Store, open_store, temporary_store

Values = dict[tuple[str, str, str, int], float | None]


def values_of(store: Store, sweep: str = "printed-v1") -> Values:
    return {(v.cell_id, v.probe, v.metric, v.length): v.value for v in store.values(sweep)}


def points(store: Store, sweep: str = "printed-v1") -> int:
    return sum(len(store.curve(cell.trained_attempt_id or 0)) for cell in store.cell_states(sweep))


@pytest.fixture
def older(tmp_path: Path) -> Store:
    """A database with the first version as the first release had it: no curves, no nats, no times, MFU as printed."""
    path = tmp_path / "older.db"
    store = open_store(path, create=True)
    paper.load_published(store, ["printed-v1"])
    store.close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM curve_point")
        database.execute("DELETE FROM measurement WHERE probe = 'needle' AND metric LIKE '%nats'")
        database.execute("DELETE FROM measurement WHERE metric = 'train_seconds'")
        database.execute(
            "UPDATE measurement SET value = round(value, 3) WHERE probe = 'throughput' AND metric = 'mfu_paper'"
        )
        database.execute("UPDATE revision SET options = json_remove(options, '$.edition')")
        database.execute("UPDATE attempt SET tokens_per_s = NULL")
    return open_store(path)


@pytest.mark.thorough
def test_reports_take_the_numbers_of_this_release(older: Store) -> None:
    fresh = paper.open_published()
    assert values_of(older) != values_of(fresh)
    store_ = paper.with_published(older, "printed-v1")
    assert store_ is not older
    assert values_of(store_) == values_of(fresh)
    assert points(store_) == 1700


@pytest.mark.thorough
def test_an_older_database_gets_the_numbers_once(older: Store) -> None:
    table = make_table("6", older, "printed-v1").rows
    assert paper.load_published(older, ["printed-v1"]) == ["printed-v1"]
    assert values_of(older) == values_of(paper.open_published())
    assert points(older) == 1700
    assert paper.with_published(older, "printed-v1") is older
    assert make_table("6", older, "printed-v1").rows == table
    assert paper.load_published(older, ["printed-v1"]) == []
    cell = older.cell_states("printed-v1")[0]
    assert [(attempt.number, attempt.state) for attempt in older.attempts(cell.cell_id)] == [(1, "done"), (2, "done")]
    (summary,) = older.sweeps()
    assert (summary.revision, summary.read_only, summary.cells, summary.launched_at.year) == (2, True, 100, 1970)


@pytest.mark.thorough
@pytest.mark.parametrize("table", ["provenance", "measurement", "curve_point"])
def test_an_interruption_leaves_it_as_it_was(older: Store, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, insert = values_of(older), loading.insert_rows

    def dies(session: Any, row: Any, rows: Any) -> None:
        insert(session, row, rows)
        if row.__tablename__ == table:
            raise KeyboardInterrupt

    monkeypatch.setattr(loading, "insert_rows", dies)
    with pytest.raises(KeyboardInterrupt):
        paper.load_published(older, ["printed-v1"])
    (summary,) = older.sweeps()
    assert (summary.revision, summary.read_only) == (1, True)
    assert values_of(older) == before
    monkeypatch.setattr(loading, "insert_rows", insert)
    assert paper.load_published(older, ["printed-v1"]) == ["printed-v1"]
    assert points(older) == 1700


def test_several_at_once_load_it_once(tmp_path: Path) -> None:
    open_store(tmp_path / "atma.db", create=True).close()
    loaded: list[list[str]] = []
    start = threading.Barrier(3)

    def load() -> None:
        store = open_store(tmp_path / "atma.db")
        start.wait()
        loaded.append(paper.load_published(store, ["printed-v2-open-weight"]))
        store.close()

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == [[], [], ["printed-v2-open-weight"]]
    store = open_store(tmp_path / "atma.db")
    assert {len(store.attempts(cell.cell_id)) for cell in store.cell_states("printed-v2-open-weight")} == {1}


def test_temporary_database_has_the_migrated_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks only the view for people, and holds only the requested sweep."""

    def schema(store: Store) -> dict[str, list[tuple[Any, ...]]]:
        with closing(sqlite3.connect(str(store.path))) as database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            columns = 'SELECT name, upper(type), "notnull", pk FROM pragma_table_info(?) ORDER BY cid'
            return {name: sorted(database.execute(columns, (name,)).fetchall()) for name in names}

    migrated = open_store(tmp_path / "atma.db", create=True)
    monkeypatch.delenv("ATMA_DB", raising=False)
    monkeypatch.setattr("atma_sweep.results.store.database.DEFAULT", str(tmp_path / "none.db"))
    temporary = open_store_with_builtins(None, "printed-v2-open-weight")
    assert schema(temporary) == schema(migrated)
    assert "printed-v2-open-weight" in [summary.name for summary in temporary.sweeps()]


@pytest.mark.thorough
def test_published_attempt_ids_do_not_depend_on_read_order() -> None:
    """So that a file's trace, which names them, holds for `report --check` in another process."""
    ids = []
    for names in (("printed-v2",), ("printed-v1", "printed-v2")):
        store = temporary_store("published", lambda store: None)
        for name in names:
            loading.load_published(store, [name], alone=True)
        ids.append({cell.slug: cell.attempt_id for cell in store.cell_states("printed-v2")})
    assert ids[0] == ids[1] == {cell.slug: cell.attempt_id for cell in paper.open_published().cell_states("printed-v2")}
