"""Offline runs of Weights & Biases: one a cell, for `wandb sync FOLDER/wandb/*`.

Project: the sweep; run id: the cell's; config: id, state, seed, levels, axes and the cell's complete config. History: `curve/NAME`
over `step`, `PROBE/METRIC` over `length`; summary: `PROBE/METRIC@LENGTH`, or the reason why there is none. Neither this machine nor
the working folder is described.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from ...names import safe_file_name
from ...store.store import Store
from ..bundles import format_utc
from .runs import CURVE, TrackerRun

QUIET = ("silent", "disable_code", "disable_git", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Return the function that writes an offline run."""
    settings = wandb.Settings(mode="offline", console="off", x_save_requirements=False, **dict.fromkeys(QUIET, True))

    def write(run: TrackerRun) -> None:
        times = {"began": run.began and format_utc(run.began), "ended": run.ended and format_utc(run.ended)}
        config = run.facts() | times | {"config": dict(run.cell.config)}
        project = safe_file_name(sweep)
        with wandb.init(
            project=project, id=run.cell.id, name=run.name, dir=str(folder), config=config, settings=settings
        ) as target:
            _log(run, target)

    return write


def _log(run: TrackerRun, target: Any) -> None:
    target.define_metric("curve/*", step_metric="step")
    for probe in sorted({value.probe for value in run.values}):
        target.define_metric(f"{probe}/*", step_metric="length")
    for point in run.curve:
        values = {f"curve/{name}": getattr(point, name) for name in CURVE}
        target.log({"step": point.step} | {name: value for name, value in values.items() if value is not None})
    by_length: dict[int, dict[str, float]] = {}
    for value in run.values:
        name = f"{value.probe}/{value.metric}"
        if value.value is not None:
            by_length.setdefault(value.length, {})[name] = value.value
        target.summary[f"{name}@{value.length}" if value.length else name] = (
            value.value if value.value is not None else value.reason
        )
    for length, values in sorted(by_length.items()):
        target.log({"length": length} | values)
