"""A running attempt writes its numbers once, under its fence, or not at all."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from atma_sweep.results.errors import LostLease
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Provenance
from atma_sweep.results.store.schema import CurvePointRow, EventRow, ExampleRow, MeasurementRow, ProvenanceRow
from sqlalchemy import func, select

NUMBERS = (MeasurementRow, ExampleRow, CurvePointRow, ProvenanceRow, EventRow)


@pytest.fixture
def running(store, cells, owner):
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=cells(2))
    return store.start_attempt(cells(1)[0].id, owner=owner, fence=3)


def counts(store):
    with store.transaction(write=False) as session:
        return [session.scalar(select(func.count()).select_from(row)) for row in NUMBERS]


def write_everything(recorder, value=2.0):
    recorder.provenance(Provenance(config={"lr": 0.1}, seed=5, packages={"numpy": "2"}, kernels={"wall": "reference"}))
    recorder.progress(5, 10, value, 99.5, "training")
    recorder.curve([CurvePoint(step=s, tokens=s * 100, wall_s=s / 2, train_loss=value + s, lr=1.0) for s in (0, 5, 10)])
    recorder.measurements([Measurement(probe="clean", metric="nats", length=n, value=value, n=7) for n in (64, 128)])
    recorder.examples([Example(probe="clean", metric="nats", length=64, item=i, value=value * i) for i in range(3)])
    recorder.checkpoint("c/1/step5")


def test_writing_twice_changes_nothing_and_later_wins(store, running):
    recorder = Recorder(store, running.id, 3)
    write_everything(recorder)
    once = counts(store)
    write_everything(recorder)
    assert counts(store) == once == [2, 3, 3, 1, 1]
    write_everything(recorder, value=4.0)
    assert counts(store) == once
    store.finish_attempt(running.id, 3, "done")
    assert [(value.length, value.value, value.n) for value in store.measurements(running.cell_id)] == [
        (64, 4.0, 7),
        (128, 4.0, 7),
    ]
    assert [point.train_loss for point in store.curve(running.id)] == [4.0, 9.0, 14.0]
    assert store.provenance(running.id).kernels == {"wall": "reference"}
    found = store.attempt(running.id)
    assert (found.step, found.steps_total, found.loss, found.phase, found.checkpoint) == (
        5, 10, 4.0, "training", "c/1/step5",
    )  # fmt: skip


@pytest.mark.parametrize("how", ["wrong fence", "reaped", "finished"])
def test_a_stale_writer_is_refused_and_writes_nothing(store, running, how):
    if how == "reaped":
        store.interrupt_dead(running.id, "gone")
    elif how == "finished":
        store.finish_attempt(running.id, 3, "done")
    before, attempt = counts(store), store.attempt(running.id)
    stale = Recorder(store, running.id, 2 if how == "wrong fence" else 3)
    writes = [
        lambda: stale.heartbeat(),
        lambda: stale.provenance(Provenance(config={}, seed=0)),
        lambda: stale.progress(9, 9, 0.0),
        lambda: stale.curve([CurvePoint(step=1, tokens=1, wall_s=1.0, train_loss=1.0)]),
        lambda: stale.measurements([Measurement(probe="p", metric="m", value=1.0)]),
        lambda: stale.examples([Example(probe="p", metric="m", item=0, value=1.0)]),
        lambda: stale.checkpoint("elsewhere"),
        lambda: stale.inherit_curve(running.id, 10),
    ]
    for write in writes:
        with pytest.raises(LostLease):
            write()
    assert counts(store) == before
    assert store.attempt(running.id) == attempt


def test_numbers_that_are_not_finite(store, running):
    recorder = Recorder(store, running.id, 3)
    recorder.measurements(
        [
            Measurement(probe="p", metric="nan", value=math.nan, low=math.nan, high=1.0),
            Measurement(probe="p", metric="inf", value=-math.inf, reason="diverged: loss left the range"),
            Measurement(probe="p", metric="numpy", value=np.float32(0.5), n=3),
        ]
    )
    recorder.curve([CurvePoint(step=1, tokens=1, wall_s=1.0, train_loss=math.inf, grad_norm=math.nan)])
    recorder.examples([Example(probe="p", metric="m", item=0, value=math.nan, detail={"logits": [1.0, math.inf]})])
    recorder.progress(1, loss=math.nan)
    store.finish_attempt(running.id, 3, "done")
    found = {value.metric: value for value in store.measurements(running.cell_id)}
    assert (found["nan"].value, found["nan"].low, found["nan"].high) == (None, None, 1.0)
    assert found["nan"].reason.startswith("nan:")
    assert (found["inf"].value, found["inf"].reason) == (None, "diverged: loss left the range")
    assert found["numpy"].value == 0.5
    assert (store.curve(running.id)[0].train_loss, store.curve(running.id)[0].grad_norm) == (None, None)
    assert store.attempt(running.id).loss is None
    with store.transaction(write=False) as session:
        assert session.scalars(select(ExampleRow.detail)).all() == [{"logits": [1.0, "Infinity"]}]


def test_a_measurement_needs_a_value_or_a_reason():
    with pytest.raises(ValueError, match="value or a reason"):
        Measurement(probe="p", metric="m")


def test_a_resumed_attempt_inherits_the_curve(store, running, owner):
    points = [CurvePoint(step=s, tokens=s, wall_s=float(s), train_loss=9.0 - s) for s in range(7)]
    Recorder(store, running.id, 3).curve(points)
    store.interrupt_dead(running.id, "gone")
    again = store.start_attempt(running.cell_id, owner=owner, fence=4)
    recorder = Recorder(store, again.id, 4)
    retrained = CurvePoint(step=3, tokens=3, wall_s=0.5, train_loss=1.25)
    recorder.curve([retrained])
    for _ in range(2):
        recorder.inherit_curve(running.id, 4)
    assert store.curve(again.id) == [*points[:3], retrained, points[4]]
    assert store.curve(running.id) == points


def test_every_write_is_a_heartbeat(store, running):
    before = store.attempt(running.id).heartbeat_at
    Recorder(store, running.id, 3).curve([])
    after = store.attempt(running.id).heartbeat_at
    assert after >= before
    assert store.attempt(running.id).step == 0


# --- who shared a GPU -----------------------------------------------------------------------------------------------


def on_gpu(store, cell, owner, uuid="GPU-a", fence=3):
    attempt = store.start_attempt(cell.id, owner=owner, fence=fence)
    recorder = Recorder(store, attempt.id, fence)
    recorder.provenance(Provenance(config={}, seed=0, gpu_uuid=uuid))
    time.sleep(0.005)  # times in the database are milliseconds
    return recorder


def ended(store, recorder):
    recorder.neighbours()
    store.finish_attempt(recorder.attempt_id, 3, "done")
    time.sleep(0.005)
    return store.provenance(recorder.attempt_id).co_tenants


def test_co_tenants_are_those_alive_meanwhile_on_the_same_gpu(store, cells, owner):
    made = cells(6)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=made)
    elsewhere = replace(owner, host="elsewhere")
    before = on_gpu(store, made[0], owner)
    assert ended(store, before) == 0
    first = on_gpu(store, made[1], owner)
    first.neighbours()
    assert store.provenance(first.attempt_id).co_tenants == 0
    second = on_gpu(store, made[2], owner)
    on_gpu(store, made[3], owner, "GPU-b")
    on_gpu(store, made[4], elsewhere)  # the same name on another host is another GPU
    second.neighbours()
    assert store.provenance(second.attempt_id).co_tenants == 1
    assert ended(store, second) == 1
    third = on_gpu(store, made[5], owner)
    assert ended(store, first) == 2
    assert ended(store, third) == 1, "the second had ended before it began"


def test_one_of_a_launch_that_died_is_no_co_tenant_though_nobody_has_said_so(store, cells, owner):
    made = cells(2)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=made)
    on_gpu(store, made[0], owner, fence=2)
    late = on_gpu(store, made[1], owner)
    assert ended(store, late) == 0
    assert store.attempts(made[0].id)[0].state == "running"


def test_without_a_gpu_there_is_nothing_to_count(store, cells, owner):
    made = cells(2)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=made)
    plain = [on_gpu(store, cell, owner, None) for cell in made]
    assert [ended(store, one) for one in plain] == [None, None]
