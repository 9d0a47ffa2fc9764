"""Sweeps and attempts of a database, made through the store as a launch and its jobs make them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Attempt, CellRecord, CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store

OWNER = Owner(name="ada", host="here", pid=101, started=1.5)


def cell_records(count: int, *, seed: int = 0, prefix: str = "c") -> list[CellRecord]:
    """Return `count` cells named c00..., c01..., c02..., which differ in the first axis."""
    records = []
    for index in range(count):
        axes = {"attn_type": f"polar{index}", "memory": "on" if index % 2 else "off"}
        records.append(
            CellRecord(
                id=f"{prefix}{index:02d}{'0' * (9 - len(prefix))}{seed}",
                slug=f"polar{index}-baseline-{prefix}-s{seed}",
                seed=seed,
                levels={"attn_type": "", "reg_mode": "baseline", "distractor": "off", "memory": "", "window": "off"}
                | axes,
                config={"model": {"d_model": 8 + index}, "seed": seed},
                axes=axes,
                tokens=10**9 * (index + 1),
            )
        )
    return records


def launched(
    store: Store, cells: Sequence[CellRecord], name: str = "quick", *, text: str = "x", options: Any = None
) -> int:
    """Record a launch; returns its revision."""
    return store.record_revision(name, grid_text=text, grid_file="x.yaml", options=options, cells=cells)


def finished(
    store: Store,
    cell: CellRecord | str,
    state: Any = "done",
    *,
    owner: Owner = OWNER,
    fence: int = 1,
    kind: Any = "train",
    parent_id: int | None = None,
    provenance: Provenance | None = None,
    curve: Sequence[CurvePoint] = (),
    measurements: Sequence[Measurement] = (),
    examples: Sequence[Example] = (),
    **end: Any,
) -> Attempt:
    """Make an attempt of a cell with these numbers, and end it in `state` unless that is `running`."""
    id_ = cell if isinstance(cell, str) else cell.id
    attempt = store.start_attempt(id_, owner=owner, fence=fence, kind=kind, parent_id=parent_id)
    recorder = DatabaseRecorder(store, attempt.id, fence)
    if provenance is not None:
        recorder.provenance(provenance)
    for write, values in (
        (recorder.curve, curve), (recorder.measurements, measurements), (recorder.examples, examples),
    ):  # fmt: skip
        if values:
            write(values)  # type: ignore[operator]
    if state != "running":
        store.finish_attempt(attempt.id, fence, state, **end)
    return attempt


def sql(path: Path, *statements: str) -> None:
    """Run statements on a SQLite file, past the store, each committed at once."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()
