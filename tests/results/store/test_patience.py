"""Waiting time for a database that does not answer: it is spent once, not again by every call after a failure."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.errors import StoreBusy
from atma_sweep.results.store import database, database_connection
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.store import Store, open_store
from patience import until
from sqlalchemy import text

ME = Owner(name="ada", host="here", pid=101, started=1.5)


class Clock:
    """Stands still but for those who wait: `waited` is what they waited in all."""

    def __init__(self) -> None:
        self.waited = 0.0

    def monotonic(self) -> float:
        return self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    new_clock = Clock()
    monkeypatch.setattr(database_connection, "time", new_clock)
    return new_clock


@pytest.fixture
def held(tmp_path: Path, cells: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Any]]:
    """A sweep in a file that somebody else keeps locked for ever."""
    monkeypatch.setattr(database, "BUSY_MS", 20)
    store = open_store(tmp_path / "atma.db", create=True, patience=60.0)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(1))
    store.acquire_sweep("quick", ME, 600.0)
    holder = sqlite3.connect(tmp_path / "atma.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    yield store, holder
    holder.close()
    store.close()


def test_a_launch_that_gives_up_does_not_wait_again_to_clean_up(clock: Clock, held: tuple[Store, Any]) -> None:
    """It renews, fails, notes an event, and releases the sweep; readers are answered meanwhile."""
    store, holder = held
    with pytest.raises(StoreBusy, match="is locked by another program"):
        store.renew_sweep("quick", 1, 60.0)
    assert clock.waited == pytest.approx(60.0)
    for cleaning in (lambda: store.add_event("stopped", "x", sweep="quick"), lambda: store.release_sweep("quick", 1)):
        assert len(store.cell_states("quick")) == 1
        with pytest.raises(StoreBusy):
            cleaning()
    assert clock.waited == pytest.approx(60.0)
    holder.execute("ROLLBACK")
    assert store.release_sweep("quick", 1)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        store.add_event("stopped", "x", sweep="quick")
    assert clock.waited == pytest.approx(120.0), "it had answered, so it is waited for anew"


def test_waits_of_the_driver_are_part_of_the_patience(held: tuple[Store, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute for a lock would otherwise come on top of the last try."""
    store, _ = held
    monkeypatch.setattr(database, "BUSY_MS", 30_000)
    waits: list[int] = []
    with store.transaction(write=False, wait=0.25) as session:
        waits.append(session.scalar(text("PRAGMA busy_timeout")))
    with store.transaction(write=False) as session:
        waits.append(session.scalar(text("PRAGMA busy_timeout")))
    with store.transaction(write=False, wait=300.0) as session:
        waits.append(session.scalar(text("PRAGMA busy_timeout")))
    assert waits == [250, 30_000, 30_000]


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_row_that_stays_locked_on_a_server_ends_patience_too(
    store: Store, url: str, cells: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL waits for a lock for ever, unless it is told otherwise."""
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(1))
    store.acquire_sweep("quick", ME, 600.0)
    hurried = open_store(url, patience=0.5)
    refused: list[str] = []

    def renew() -> None:
        try:
            hurried.renew_sweep("quick", 1, 60.0)
        except StoreBusy as error:
            refused.append(str(error))

    thread = threading.Thread(target=renew, daemon=True)
    with store.transaction() as session:
        session.execute(text("SELECT 1 FROM sweep FOR UPDATE"))
        thread.start()
        until(lambda: not thread.is_alive(), "the refusal")
    assert "is locked by another program" in refused[0]
    hurried.renew_sweep("quick", 1, 60.0)
    hurried.close()
