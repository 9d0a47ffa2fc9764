"""The file of a database that goes, or is exchanged, while it is in use: said as the cause, and nothing is written to it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from atma_sweep.results.errors import StoreReplaced
from atma_sweep.results.store.records import CellRecord
from atma_sweep.results.store.store import Store, open_store
from bench import Bench
from patience import PATIENCE_S

Cells = Callable[[int], list[CellRecord]]


@pytest.fixture
def used(tmp_path: Path, cells: Cells) -> Store:
    """A database that has been written to, and is open."""
    store = open_store(tmp_path / "atma.db", create=True)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(2))
    return store


def refused(store: Store) -> str:
    """The line that both a write and a read end with."""
    lines = set()
    for act in (lambda: store.add_event("note", "lost"), store.sweeps):
        with pytest.raises(StoreReplaced) as caught:
            act()
        assert caught.value.exit_code == 3
        lines.add(str(caught.value))
    (line,) = lines
    return line


REMEDY = (
    "while it was in use and accepts no more writes; stop the programs that use it, put the database back with "
    "its -wal and -shm, then launch again"
)


def test_a_removed_database_is_the_cause(used: Store) -> None:
    assert used.path is not None
    used.path.unlink()
    assert refused(used) == f"{used.path} was removed {REMEDY}"
    used.close()


def test_a_replaced_database_is_the_cause(used: Store, tmp_path: Path) -> None:
    assert used.path is not None
    open_store(tmp_path / "other.db", create=True).close()
    used.path.rename(tmp_path / "aside.db")
    os.replace(tmp_path / "other.db", used.path)
    assert refused(used) == f"{used.path} was replaced by another file {REMEDY}"
    with closing(sqlite3.connect(used.path)) as connection:
        assert connection.execute("SELECT count(*) FROM event").fetchone() == (0,)
    used.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_launch_names_the_removed_database(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(tokens=128 * 1000)
    launch = bench.start("launch", "micro.yaml", "--executor", "local", "--only", "attn_type=nope")
    bench.wait("SELECT 1 FROM attempt WHERE phase = 'training' AND step > 5", launch)
    (tmp_path / "atma.db").unlink()
    out, _ = launch.communicate(timeout=PATIENCE_S)
    last = out.strip().splitlines()[-1]
    assert launch.returncode == 3, out
    assert f"{tmp_path / 'atma.db'} was removed while it was in use" in last
    assert "Traceback" not in out
    assert not (tmp_path / "atma.db").exists()
