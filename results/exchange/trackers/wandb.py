"""Exporter to Weights & Biases: offline runs, one per cell, for `wandb sync FOLDER/wandb/*`.

Project: the sweep. Run id: the cell's id. Group: the seeds of one configuration. Config: id, state, seed, levels, axes and the cell's complete config.
History: `curve/NAME` over `step`, and `PROBE/METRIC` over `length`. Summary: `PROBE/METRIC@LENGTH`, or the reason of a
missing value. Tags: the sweep's. Nothing about this machine or the working folder is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from ...console.output_files import make_folder
from ...names import safe_file_name
from ...store.store import Store
from .runs import CURVE, LiveTarget, TrackerRun

QUIET = ("silent", "disable_code", "disable_git", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Return the function that writes an offline run below `folder`, in a project named after the sweep.

    The project's name is the sweep's as a safe file name. `store` and `out` belong to the protocol of exporters and are
    not used.
    """
    settings = _settings("offline")

    def write(run: TrackerRun) -> None:
        """Write one offline run, with the cell's id as its run id and without W&B's logs; nothing is sent.

        The config holds cell (the id), state, seed, tokens, the levels and the grid's axes by name, `began` and `ended`
        as UTC text or None, and under `config` the cell's complete config.
        """
        with wandb.init(
            project=safe_file_name(sweep),
            id=run.cell.id,
            name=run.name,
            group=run.group,
            dir=str(folder),
            config=run.config(),
            tags=run.tags,
            settings=settings,
        ) as target:
            _log(run, target)
        # W&B's service goes on writing its logs, with paths of this machine, after the run has ended
        shutil.rmtree(Path(target.dir).parent / "logs", ignore_errors=True)
        for link in Path(folder, "wandb").glob("debug*.log"):
            link.unlink()

    return write


ENDED = ("done", "failed", "diverged", "pruned")
"""States of a cell that end its W&B run; a later attempt continues it."""


def follow(store: Store, sweep: str, target: str) -> LiveTarget:
    """Return the receiver that sends the news of runs to Weights & Biases; its files lie below the folder `target`.

    The project is that of WANDB_PROJECT, else the sweep's name;
    the run's id is the cell's, so that a later process continues it. WANDB_MODE chooses online or offline; without it
    runs are online where this machine is logged in, else offline.
    """
    make_folder(Path(target), parents=True)
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    open_runs: dict[str, Any] = {}

    def push(run: TrackerRun, key: str | None) -> str:
        """Send the news; the key is the cell's id."""
        if run.cell.id not in open_runs:
            open_runs[run.cell.id] = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or safe_file_name(sweep), id=run.cell.id, name=run.name, group=run.group,
                dir=target, config=run.config(), tags=run.tags, resume="allow", reinit="create_new",
                settings=_settings(mode),
            )  # fmt: skip
        handle = open_runs[run.cell.id]
        handle.config.update({"state": run.state}, allow_val_change=True)
        _log(run, handle)
        if run.state in ENDED:
            open_runs.pop(run.cell.id).finish(exit_code=int(run.state != "done"))
        return run.cell.id

    def close() -> None:
        """Finish the runs of cells that have not ended; a later process continues them."""
        while open_runs:
            open_runs.popitem()[1].finish(exit_code=1)

    return LiveTarget(push, close)


def _settings(mode: Any) -> Any:
    """Return W&B's settings of that mode, "online" or "offline", without facts about this machine."""
    return wandb.Settings(mode=mode, console="off", x_save_requirements=False, **dict.fromkeys(QUIET, True))


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
