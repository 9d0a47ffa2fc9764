"""Exporter to Trackio: a folder with one database, for `TRACKIO_DIR=FOLDER trackio show`.

Project: the sweep. Run: the cell, with the cell's id as its id and the cell's configuration (all of its seeds) as its
group. Config: id, state, seed, tags, levels, axes, the cell's complete config, and the reasons of missing values.
Metrics: `curve/NAME` by step, with the times of training, and `PROBE/METRIC` by context length (0: without a length).
Rows are written by Trackio's storage layer in one transaction per run: no server, no thread, no network.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trackio import sqlite_storage

from ...names import safe_file_name
from ...store.store import Store
from .runs import CURVE, LiveTarget, TrackerRun

Storage = sqlite_storage.SQLiteStorage


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Return the function that writes a run into the project of the sweep below `folder`.

    `out` belongs to the protocol of exporters and is not used.
    """
    return lambda run: _write(folder, project_name(sweep), run)


def follow(store: Store, sweep: str, target: str) -> LiveTarget:
    """Return the receiver that appends the news of a run to the project of the sweep in the folder `target`."""

    def push(run: TrackerRun, key: str | None) -> str:
        """Append the news; the key is the cell's id."""
        _write(Path(target), project_name(sweep), run)
        return run.cell.id

    return LiveTarget(push)


def project_name(sweep: str) -> str:
    """Return the name of a sweep's project: the sweep's own, unless Trackio changes or reserves it."""
    name = safe_file_name(sweep)
    try:
        Storage.validate_project_name(name)
    except ValueError:
        return f"sweep-{name}-numbers"
    return name if re.fullmatch(r"[\w-]+", name) else re.sub(r"[^\w-]", "-", name) + f"-{_digest(name)}"


def _write(folder: Path, project: str, run: TrackerRun) -> None:
    """Write a run's config and numbers in one transaction; a row that was written before is left alone.

    Args:
        folder: folder of the databases, created if it does not exist.
        project: name of the project.
        run: run to write, possibly with its new points and values alone.
    """
    sqlite_storage.TRACKIO_DIR = folder  # a constant of the module, which TRACKIO_DIR sets only at its import
    own = {"tags": list(run.tags), "note": run.cell.note, "_Group": run.group}
    config = run.config() | own
    earlier = Storage.get_run_config(project, run.name, run_id=run.cell.id) or {}
    reasons = dict(earlier.get("reasons", {}))
    for value in run.values:
        name = f"{value.probe}/{value.metric}@{value.length}"
        reasons.pop(name, None)
        if value.value is None:
            reasons[name] = value.reason
    rows = _rows(run)
    Storage.bulk_log(
        project,
        run.name,
        [numbers for _, _, numbers, _ in rows],
        steps=[step for step, _, _, _ in rows],
        timestamps=[moment.isoformat() for _, moment, _, _ in rows],
        config=config | {"reasons": reasons},
        log_ids=[f"{run.cell.id}-{key}" for _, _, _, key in rows],
        run_id=run.cell.id,
    )


def _rows(run: TrackerRun) -> list[tuple[int, datetime, dict[str, Any], str]]:
    """Return the rows of a run as (step or context length, time, numbers by name, key that is unique in the run).

    The first row has no numbers: Trackio lists a run only if it has a row.
    """
    began = run.started_at or datetime.fromtimestamp(0, UTC)
    rows: list[tuple[int, datetime, dict[str, Any], str]] = [(0, began, {}, "run")]
    for point in run.curve:
        numbers = {f"curve/{name}": value for name in CURVE if (value := getattr(point, name)) is not None}
        rows.append((point.step, began + timedelta(seconds=point.wall_s), numbers, f"curve-{point.step}"))
    by_source: dict[tuple[int, int], dict[str, Any]] = {}
    for value in run.values:
        if value.value is not None:
            numbers = by_source.setdefault((value.length, value.attempt_id), {})
            numbers[f"{value.probe}/{value.metric}"] = value.value
    for (length, attempt_id), numbers in sorted(by_source.items()):
        key = f"values-{length}-{attempt_id}-{_digest(json.dumps(numbers, sort_keys=True))}"
        rows.append((length, run.finished_at or began, numbers, key))
    return rows


def _digest(text: str) -> str:
    """Return 12 hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
