"""Exporter to Weights & Biases: offline runs, one per cell, for `wandb sync FOLDER/wandb/*`.

Project: the sweep. Run id: the cell's id. Config: id, state, seed, levels, axes and the cell's complete config.
History: `curve/NAME` over `step`, and `PROBE/METRIC` over `length`. Summary: `PROBE/METRIC@LENGTH`, or the reason of a
missing value. Nothing about this machine or the working folder is written.
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
    """Return the function that writes an offline run below `folder`, in a project named after the sweep.

    The project's name is the sweep's as a safe file name. `store` and `out` belong to the protocol of exporters and are
    not used.
    """
    settings = wandb.Settings(mode="offline", console="off", x_save_requirements=False, **dict.fromkeys(QUIET, True))

    def write(run: TrackerRun) -> None:
        """Write one offline run, with the cell's id as its run id; nothing is sent.

        The config holds cell (the id), state, seed, tokens, the levels and the grid's axes by name, `began` and `ended`
        as UTC text or None, and under `config` the cell's complete config. No tags or groups are set.
        """
        times = {
            "began": run.started_at and format_utc(run.started_at),
            "ended": run.finished_at and format_utc(run.finished_at),
        }
        config = run.hyperparameters() | times | {"config": dict(run.cell.config)}
        project = safe_file_name(sweep)
        with wandb.init(
            project=project, id=run.cell.id, name=run.name, dir=str(folder), config=config, settings=settings
        ) as target:
            _log(run, target)

    return write


def _log(run: TrackerRun, target: Any) -> None:
    """Log the curve by step and the measurements by context length, and fill the summary.

    Values that are None are left out of the history; the summary then has the reason, a text. Summary keys are
    `PROBE/METRIC@LENGTH`, or `PROBE/METRIC` for length 0. Measurements follow the curve, one entry per length, in
    ascending order.

    Args:
        run: run to log.
        target: open W&B run.
    """
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
