"""A database opened for reading alone: nothing can be changed through it, and it sees what others change."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from atma_sweep.results.errors import WriteRefused
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, CurvePoint, Measurement, Owner
from atma_sweep.results.store.store import Store, open_store
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError


@pytest.fixture
def reader(store: Store, url: str, cells: Callable[..., list[CellRecord]]) -> Store:
    """The same database, in which a sweep of one cell was launched, opened for reading alone."""
    store.record_revision("big", grid_text="axes: {a: 1}\n", grid_file="big.yaml", cells=cells(1))
    return open_store(url, read_only=True)


def test_the_database_itself_refuses_a_change(reader: Store) -> None:
    with pytest.raises(WriteRefused, match="is read-only here"):
        reader.add_event("told", "something happened", sweep="big")
    with pytest.raises(DBAPIError, match=r"(?i)read-?\s?only"), reader.engine.begin() as connection:
        connection.execute(text("DELETE FROM event"))
    assert len(reader.cell_states("big")) == 1


def test_a_copy_in_another_process_reads_alone_too(reader: Store) -> None:
    with pytest.raises(WriteRefused):
        pickle.loads(pickle.dumps(reader)).add_event("told", "something happened", sweep="big")


def test_reader_sees_changes_and_a_new_change_token(store: Store, reader: Store, owner: Owner) -> None:
    marks = [reader.change_token("big"), reader.change_token("big")]
    assert marks[0] == marks[1]
    attempt = store.start_attempt(reader.cell_states("big")[0].cell_id, owner=owner, fence=1)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    for change in (
        lambda: recorder.progress(3, 10, 2.5, 100.0),
        lambda: recorder.curve([CurvePoint(step=9, tokens=9, wall_s=1.0, train_loss=2.0)]),
        lambda: recorder.measurements([Measurement(probe="val", metric="val_loss", value=2.0)]),
        lambda: store.finish_attempt(attempt.id, 1, "done"),
    ):
        change()
        marks.append(reader.change_token("big"))
    assert len(set(marks)) == 5
