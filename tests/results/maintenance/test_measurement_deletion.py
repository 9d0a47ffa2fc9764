"""Measurements that are deleted on purpose: which, what is said before, and what stays, on both kinds of database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.results.errors import StoreError, SweepReadOnly
from atma_sweep.results.maintenance.deletion import MeasurementCount, delete_measurements, plan_measurements
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Example, Measurement, Owner, requests_from_options, standing
from atma_sweep.results.store.store import Store
from databases import finished

REQUESTED = {"requested": [["val", 0], ["clean", 64], ["clean", 128]]}
Make = Callable[[int], list[CellRecord]]


def values(length: int, value: float | None) -> list[Measurement]:
    reason = None if value is not None else "too-few-docs: 0 of 2 held-out documents have that"
    return [Measurement(probe="clean", metric="nats", length=length, value=value, reason=reason, unit="nats/token")]


@pytest.fixture
def measured(store: Store, cells: Make, owner: Owner) -> CellRecord:
    """A cell of sweep `quick` that is done, was evaluated at a length that nothing can have, and twice at 64."""
    first, second = cells(2)
    store.record_revision("quick", grid_text="x", grid_file="x", options=REQUESTED, cells=[first, second])
    for kind, batch in (
        ("train", [Measurement(probe="val", metric="val_loss", value=2.0), *values(64, 1.0), *values(128, 1.5)]),
        ("evaluate", [*values(64, 1.25), *values(999_999_999, None)]),
    ):
        finished(
            store,
            first,
            kind=kind,
            measurements=batch,
            examples=[Example(probe="clean", metric="nats", length=64, item=item, value=1.0) for item in (0, 1)],
            weights="w" if kind == "train" else None,
        )
    return first


def word(store: Store, cell: str) -> str:
    return standing(store.states([cell])[cell], requests_from_options(store.revision("quick").options))


def test_a_stranger_goes_and_all_else_stays(store: Store, measured: CellRecord) -> None:
    before = store.measurements(measured.id)
    planned = plan_measurements(store, measured.slug, lengths=[999_999_999])
    assert planned.rows == [MeasurementCount(probe="clean", length=999_999_999, measurements=1, attempts=1, examples=0)]
    assert planned.asked_by == {}
    assert store.measurements(measured.id) == before, "a plan changes nothing"
    done = delete_measurements(store, planned, who="ada on here")
    assert done.deleted
    assert store.measurements(measured.id) == [value for value in before if value.length != 999_999_999]
    assert word(store, measured.id) == "done"
    event = store.events(cell_id=measured.id)[-1]
    assert (event.kind, event.message) == ("forgot", "1 number deleted by ada on here: clean at 999999999")


def test_plan_names_the_sweeps_that_request_the_numbers(store: Store, measured: CellRecord) -> None:
    planned = plan_measurements(store, measured.id, probes=["clean"], lengths=[64])
    assert planned.rows == [MeasurementCount(probe="clean", length=64, measurements=2, attempts=2, examples=4)]
    assert planned.asked_by == {"quick": "needs-eval"}
    assert planned.lines()[1:] == [
        "  clean at 64: 2 numbers of 2 attempts, 4 items behind them",
        "  sweep quick requests them: there, the cell becomes needs-eval, and the next launch measures it again",
    ]
    delete_measurements(store, planned, who="ada")
    assert word(store, measured.id) == "needs-eval"
    keys = {(value.probe, value.length) for value in store.measurements(measured.id)}
    assert keys == {("val", 0), ("clean", 128), ("clean", 999_999_999)}, "no older number came back"
    assert (
        store.read(lambda session: session.connection().exec_driver_sql("SELECT count(*) FROM example").scalar()) == 0
    )


def test_plan_warns_if_the_weights_are_gone(store: Store, measured: CellRecord) -> None:
    store.clear_weights(store.attempts(measured.id)[0].id)
    planned = plan_measurements(store, measured.id, probes=["val"])
    assert planned.asked_by == {"quick": "weights gone"}
    assert "only after a launch with --retrain" in planned.lines()[-1]


def test_a_plan_that_is_out_of_date_deletes_nothing(store: Store, measured: CellRecord, owner: Owner) -> None:
    planned = plan_measurements(store, measured.id, probes=["clean"])
    attempt = store.start_attempt(measured.id, kind="evaluate", owner=owner, fence=1)
    DatabaseRecorder(store, attempt.id, 1).measurements(values(256, 3.0))
    assert plan_measurements(store, measured.id, probes=["clean"]).rows == planned.rows, "what runs is left alone"
    store.finish_attempt(attempt.id, 1, "done")
    before = store.measurements(measured.id)
    with pytest.raises(StoreError, match="changed meanwhile"):
        delete_measurements(store, planned, who="ada")
    assert store.measurements(measured.id) == before


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({}, "select measurements with"),
        ({"lengths": [-1]}, "no measurement has such a length"),
        ({"lengths": [2**40]}, "no measurement"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    store: Store, measured: CellRecord, selection: dict[str, Any], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        plan_measurements(store, measured.id, **selection)


def test_imported_numbers_stay(store: Store, measured: CellRecord) -> None:
    store.set_read_only("quick")
    with pytest.raises(SweepReadOnly, match="belongs to quick, whose measurements were imported"):
        plan_measurements(store, measured.id, probes=["clean"])
    store.record_revision("mine", grid_text="x", grid_file="x", options={}, cells=[measured])
    assert plan_measurements(store, measured.id, probes=["clean"], lengths=[128]).asked_by == {"quick": "needs-eval"}
