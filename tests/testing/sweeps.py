"""Factories of sweeps for tests of reports: cells, numbers, finished runs, whole databases; and tables and comparisons of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import probed as probed_data
from atma_sweep.reports.number_format import Column
from atma_sweep.reports.stats.effects.matched_groups import reference_level, values_frame
from atma_sweep.reports.stats.sweep_differences import ComparedSweep
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import complete
from atma_sweep.reports.tables.compare import NumberComparison, compare_sweeps
from atma_sweep.results.builtin_sweeps import store_with_builtin
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Example, Measurement, Owner
from atma_sweep.results.store.store import Store

ME = Owner(name="ada", host="here", pid=1, started=0.0)


def cell(index: int, *, seed: int = 0, axes: dict[str, str] | None = None, **levels: str) -> CellRecord:
    levels_by_axis = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True)) | levels
    return CellRecord(
        id=f"{index:012x}",
        slug=f"slug-{index}",
        seed=seed,
        levels=levels_by_axis,
        config={},
        axes=axes or {},
        tokens=10,
    )


def numbers(val: float, entropy: float = 7.4321) -> list[Measurement]:
    measurements = [
        Measurement(probe="val", metric="val_loss", value=val, unit="nats/token", n=11),
        Measurement(probe="corpus", metric="unigram_entropy", value=entropy, unit="nats/token"),
        Measurement(probe="corpus", metric="bigram_entropy", value=5.5, unit="nats/token"),
        Measurement(probe="throughput", metric="mfu_paper", reason="n/a: no peak FLOPs known for cpu"),
    ]
    for length in (128, 2048, 65536):
        measurements += [
            Measurement(probe="clean", metric="nats", length=length, value=val + length / 1e6, unit="nats/token"),
            Measurement(probe="needle", metric="digit_accuracy", length=length, value=0.9625, low=0.9, high=1.0, n=80),
        ]
        if length < 65536:
            measurements.append(Measurement(probe="junk", metric="nats", length=length, value=2.675, unit="nats/token"))
        else:
            measurements.append(
                Measurement(probe="junk", metric="nats", length=length, reason="oom: 3 GiB asked, 1 free")
            )
    return measurements


def record(store: Store, cell_id: str, state: str, measurements: list[Measurement]) -> None:
    attempt = store.start_attempt(cell_id, owner=ME, fence=1)
    DatabaseRecorder(store, attempt.id, 1).measurements(measurements)
    if state != "running":
        store.finish_attempt(attempt.id, 1, state)


TRIALS = [(1, 1, 1, 1, 1), (0, 1, 0, 1, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0)]
"""What a cell of `replicated` with memory gets right of four trials of five digits; without memory, the third trial alone."""


def fill_replicated(store: Store) -> None:
    """Record a sweep `twice` of two mixers, with and without memory, three seeds each, and every trial of the needle."""
    levels = [(kind, memory, seed) for kind in ("polar", "nope") for memory in ("off", "on") for seed in (0, 1, 2)]
    cells = [cell(i + 1, attn_type=kind, memory=memory, seed=seed) for i, (kind, memory, seed) in enumerate(levels)]
    store.record_revision("twice", grid_text="x", grid_file="x.yaml", cells=cells)
    for record, (kind, memory, seed) in zip(cells, levels, strict=True):
        attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        loss = 2 + 0.02 * (seed - 1) if memory == "on" else 3 + 0.01 * (seed - 1)
        recorder.measurements([Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token")])
        for length in (64, 128):
            digits = [TRIALS[(trial + 2) % 4] if memory == "on" else [int(trial == 2)] * 5 for trial in range(4)]
            if kind == "nope":
                digits = [[digit * (position < 3) for position, digit in enumerate(row)] for row in digits]
            fields: dict[str, Any] = {"probe": "needle", "metric": "digit_accuracy", "length": length}
            gone = 1 if (kind, memory, seed) == ("nope", "on", 2) else 0
            right = sum(sum(row) for row in digits[gone:]) / (5 * (4 - gone))
            recorder.measurements([Measurement(**fields, value=right, unit="fraction", n=5 * (4 - gone))])
            recorder.examples(
                [
                    Example(**fields, item=trial, position=index, value=float(digit))
                    for trial, row in enumerate(digits)
                    for index, digit in enumerate(row)
                    if trial >= gone
                ]
            )
        store.finish_attempt(attempt.id, 1, "done")


def fill_probed(store: Store) -> None:
    """Record a sweep `probed` of four cells, trained at 64 tokens, with the items of the probes that have figures of their own."""
    levels = [(kind, seed) for kind in ("fox", "nope") for seed in (0, 1)]
    cells = [
        replace(cell(i + 1, attn_type=kind, seed=seed), config={"train": {"seq_len": 64}})
        for i, (kind, seed) in enumerate(levels)
    ]
    store.record_revision("probed", grid_text="x", grid_file="x.yaml", cells=cells)
    for i, record in enumerate(cells):
        attempt = store.start_attempt(record.id, owner=ME, fence=1)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        probed_data.probe_items(recorder, 3 + i / 10, i / 4, lengths=(64, 128, 256))
        probed_data.recall(recorder, 3 + i / 10, i / 4)
        store.finish_attempt(attempt.id, 1, "done")


def fill_every(empty: Store) -> None:
    """Record a sweep `all` of six cells, with every kind of number and two ends that are no good."""
    levels = [(kind, memory) for kind in ("polar", "nope", "a-mixer-of-a-long-name") for memory in ("off", "on")]
    cells = [cell(i + 1, attn_type=kind, memory=memory) for i, (kind, memory) in enumerate(levels)]
    empty.record_revision("all", grid_text="x", grid_file="x.yaml", cells=cells)
    for i, record in enumerate(cells):
        attempt = empty.start_attempt(
            record.id, owner=Owner(name="a", host=f"host-{i % 2}", pid=1, started=0.0), fence=1
        )
        recorder = DatabaseRecorder(empty, attempt.id, 1)
        recorder.curve(
            [CurvePoint(step=s, tokens=s * 100, wall_s=s * 2.0, train_loss=9 - s / 9 + i / 7) for s in (1, 9, 30)]
        )
        measurements = [
            Measurement(probe="val", metric="val_loss", value=3 + i / 10),
            Measurement(probe="throughput", metric="tokens_per_s", value=1000.0 + 31 * (i % 4)),
        ]
        for length in (64, 128, 256):
            measurements += [
                Measurement(probe="needle", metric="digit_accuracy", length=length, value=(9 - i) / 10, n=80),
                Measurement(probe="clean", metric="nats", length=length, value=2 + i / length),
                Measurement(probe="junk", metric="nats", length=length, value=3 + i / length),
            ]
            names = ("delta_norm", "hebbian_norm", "delta_norm_kept", "hebbian_norm_kept")
            measurements += [
                Measurement(probe="state_norm", metric=name, length=length, value=(1 + position) * length**0.5)
                for position, name in enumerate(names)
            ]
        if record.levels["attn_type"] == "polar":
            slopes = (("beta", 0.2), ("beta_lowest", 0.1), ("beta_highest", 0.4))
            measurements += [
                Measurement(probe="count_map", metric=name, value=slope + i / 50) for name, slope in slopes
            ]
        recorder.measurements(measurements)
        empty.finish_attempt(attempt.id, 1, "done")
    for i, end in enumerate(("failed", "diverged", "interrupted", "running")):
        attempt = empty.start_attempt(cells[i].id, owner=Owner(name="a", host="host-1", pid=1, started=0.0), fence=1)
        if end != "running":
            empty.finish_attempt(attempt.id, 1, end)


def table6(
    store: Store, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False, **options: Any
) -> Table:
    """Return the complete results of a sweep alone, without the lines above them."""
    data = load_sweep_data(store, sweep, revision=revision, orphans=orphans)
    return complete.table6(store, data, **options | ({"orphans": True} if orphans else {}))


def compare(store: Store, sweep: str, reference: str = "printed-v2") -> list[NumberComparison]:
    """Return every number that both sweeps have of a common configuration."""
    home = store_with_builtin(store, reference)
    return list(
        compare_sweeps(
            ComparedSweep(store, load_sweep_data(store, sweep)), ComparedSweep(home, load_sweep_data(home, reference))
        ).numbers
    )


def matched_pairs(
    data: SweepData, column: Column, axis: str, level: str, where: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return the pairs of cells at a level and at the reference level of an axis that agree on all other axes and the seed.

    An oracle for matched differences, by a join of frames: every axis and seed, value, value_ref, difference, cells, attempts.
    """
    frame = values_frame(data, column)
    for name, wanted in (where or {}).items():
        frame = frame[frame[name] == wanted]
    keys = [name for name in (*AXES, *data.extra_axes(), "seed") if name != axis]
    reference = frame[frame[axis] == reference_level(data.levels(axis))].drop(columns=axis)
    pairs = frame[frame[axis] == level].merge(reference, on=keys, suffixes=("", "_ref"))
    return pairs.assign(difference=pairs["value"] - pairs["value_ref"])
