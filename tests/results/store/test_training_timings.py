"""Timings of finished trainings, on both kinds of database."""

from __future__ import annotations

from datetime import timedelta

from atma_sweep.results.store.attempt_queries import MAX_PER_GROUP
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store
from databases import finished

ME = Owner(name="ada", host="here", pid=1, started=0.0)


def cell(index: int, width: int) -> CellRecord:
    levels = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True))
    config = {"model": {"d_model": width}, "train": {"micro_batch": 2}}
    return CellRecord(id=f"{index:012x}", slug=f"c-s{index}", seed=index, levels=levels, config=config, tokens=9)


def run(store: Store, cell: CellRecord, *, state: str = "done", points: int = 3) -> int:
    attempt = finished(
        store,
        cell,
        state,
        owner=ME,
        provenance=Provenance(config=cell.config, seed=0, gpu_name="NVIDIA H200", extra={"start_seconds": 4}),
        curve=[
            CurvePoint(step=n, tokens=100 * n, wall_s=2.0 * n, train_loss=1.0, val_loss=1.0, tokens_per_s=50.0 + n)
            for n in range(1, points + 1)
        ],
        measurements=[
            Measurement(probe="val", metric=metric, value=1.0, unit="nats", seconds=seconds)
            for metric, seconds in (("val_loss", 1.5), ("val_loss_full", 1.5), ("untimed", None))
        ],
    )
    with store.transaction() as session:
        row = session.get(AttemptRow, attempt.id)
        assert row is not None
        row.finished_at = row.started_at + timedelta(seconds=30)
    return attempt.id


def test_a_training_tells_its_times_and_only_finished_ones_do(store: Store) -> None:
    cells = [cell(0, 16), cell(1, 16)]
    store.record_revision("g", grid_text="a: 1\n", grid_file="g.yaml", cells=cells)
    assert store.training_timings() == []
    first = run(store, cells[0], points=5)
    failed = run(store, cells[1], state="failed")
    second = run(store, cells[1], points=1)
    first_timing, second_timing = store.training_timings()
    assert (first_timing.attempt_id, first_timing.gpu_name, first_timing.host, first_timing.start_s, first_timing.elapsed_s) == (
        first, "NVIDIA H200", "here", 4.0, 30.0,
    )  # fmt: skip
    assert (first_timing.points, first_timing.curve_start, first_timing.curve_end, first_timing.tokens_per_s) == (
        5,
        (100, 2.0),
        (500, 10.0),
        55.0,
    )
    assert dict(first_timing.probes) == {("val", 0): 1.5}
    assert first_timing.config == {"model": {"d_model": 16}, "train": {"micro_batch": 2}}
    assert (first_timing.is_first_attempt, second_timing.is_first_attempt) == (True, False), (
        "the second attempt may have gone on from the first"
    )
    assert (second_timing.attempt_id, second_timing.points, second_timing.curve_start, second_timing.curve_end) == (
        second,
        1,
        (100, 2.0),
        (100, 2.0),
    )
    assert store.startup_seconds([first, failed, second]) == {first: 4.0, failed: 4.0, second: 4.0}


def test_of_trainings_that_are_alike_the_newest_are_read(store: Store) -> None:
    narrow = [cell(n, 16) for n in range(MAX_PER_GROUP + 3)]
    wide = [cell(100 + n, 32) for n in range(2)]
    store.record_revision("g", grid_text="a: 1\n", grid_file="g.yaml", cells=[*narrow, *wide])
    attempt_ids = [run(store, item) for item in (*wide, *narrow)]
    assert [item.attempt_id for item in store.training_timings()] == [*attempt_ids[:2], *attempt_ids[-MAX_PER_GROUP:]]
