"""Attempts that shared a GPU; test_attempt_writer.py holds the contract of all writes."""

import time
from dataclasses import replace

import pytest
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Provenance


def test_a_measurement_needs_a_value_or_a_reason():
    with pytest.raises(ValueError, match="value or a reason"):
        Measurement(probe="p", metric="m")


# --- who shared a GPU -----------------------------------------------------------------------------------------------


def on_gpu(store, cell, owner, uuid="GPU-a", fence=3):
    attempt = store.start_attempt(cell.id, owner=owner, fence=fence)
    recorder = DatabaseRecorder(store, attempt.id, fence)
    recorder.provenance(Provenance(config={}, seed=0, gpu_uuid=uuid))
    time.sleep(0.005)  # times in the database are milliseconds
    return recorder


def ended(store, recorder):
    recorder.neighbours()
    store.finish_attempt(recorder.attempt_id, 3, "done")
    time.sleep(0.005)
    return store.provenance(recorder.attempt_id).co_tenants


def test_co_tenants_are_those_alive_meanwhile_on_the_same_gpu(store, cells, owner):
    records = cells(6)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=records)
    elsewhere = replace(owner, host="elsewhere")
    before = on_gpu(store, records[0], owner)
    assert ended(store, before) == 0
    first = on_gpu(store, records[1], owner)
    first.neighbours()
    assert store.provenance(first.attempt_id).co_tenants == 0
    second = on_gpu(store, records[2], owner)
    on_gpu(store, records[3], owner, "GPU-b")
    on_gpu(store, records[4], elsewhere)  # the same name on another host is another GPU
    second.neighbours()
    assert store.provenance(second.attempt_id).co_tenants == 1
    assert ended(store, second) == 1
    third = on_gpu(store, records[5], owner)
    assert ended(store, first) == 2
    assert ended(store, third) == 1, "the second had ended before it began"


def test_stale_attempts_are_no_co_tenants(store, cells, owner):
    records = cells(2)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=records)
    on_gpu(store, records[0], owner, fence=2)
    late = on_gpu(store, records[1], owner)
    assert ended(store, late) == 0
    assert store.attempts(records[0].id)[0].state == "running"


def test_without_a_gpu_there_is_nothing_to_count(store, cells, owner):
    records = cells(2)
    store.record_revision("quick", grid_text="x", grid_file="x.yaml", cells=records)
    plain = [on_gpu(store, cell, owner, None) for cell in records]
    assert [ended(store, attempt_) for attempt_ in plain] == [None, None]
