"""Exporter to TensorBoard: event files with one run per cell, for `tensorboard --logdir`.

Scalars: `curve/NAME` by step, with the times of training, and `PROBE/METRIC` by context length (0: without a length).
The reason of a missing value is a text `PROBE/METRIC/reason`. Levels and seed are hyper-parameters; `config`, `tags`
and `state` are texts, of which the newest state holds. TensorBoard stores 32-bit floats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from ...store.store import Store
from .runs import CURVE, LiveTarget, TrackerRun


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Return the function that writes the event file of a run into a new folder below `folder`, named after the run.

    Args:
        store: not used; belongs to the protocol of exporters.
        sweep: not used.
        folder: folder to write to.
        out: not used.
    """

    def write(run: TrackerRun) -> None:
        """Write the event file of one run into a new folder named after it.

        Raises FileExistsError if the folder exists.
        """
        (folder / run.name).mkdir()
        _append(folder, run, is_new=True)

    return write


def follow(store: Store, sweep: str, target: str) -> LiveTarget:
    """Return the receiver that appends the news of a run to its event file in the folder `target`."""

    def push(run: TrackerRun, key: str | None) -> str:
        """Append the news; the key is the run's name."""
        (Path(target) / run.name).mkdir(parents=True, exist_ok=True)
        _append(Path(target), run, is_new=key is None)
        return run.name

    return LiveTarget(push)


def _append(folder: Path, run: TrackerRun, *, is_new: bool) -> None:
    """Append a run's events to its file; `is_new` starts the file, with version and hyper-parameters first."""
    # TensorBoard recognizes its files by name; its own writer would append time, host and pid
    with (folder / run.name / "events.out.tfevents.0.atma-sweep").open("wb" if is_new else "ab") as stream:
        writer = RecordWriter(stream)

        def record(**event: Any) -> None:
            writer.write(Event(**event).SerializeToString())

        if is_new:
            _record_header(run, record)
        _record_numbers(run, record)
        _record_state(run, record)
        writer.flush()


def _record_header(run: TrackerRun, record: Callable[..., Any]) -> None:
    """Write version and hyper-parameters by calls of `record`, which takes the fields of an event by keyword."""
    began = run.started_at.timestamp() if run.started_at else 0.0
    record(wall_time=began, file_version="brain.Event:2")
    hyper = {name: value if isinstance(value, int) else str(value) for name, value in run.hyperparameters().items()}
    record(wall_time=began, summary=hparams_pb(hyper, trial_id=run.cell.id, start_time_secs=began))
    # indented text is code in TensorBoard's Markdown
    config = json.dumps(run.cell.config, indent=1).replace("\n", "\n    ")
    record(wall_time=began, summary=text_pb("config", f"    {config}"))
    if run.tags:
        record(wall_time=began, summary=text_pb("tags", ", ".join(run.tags)))


def _record_state(run: TrackerRun, record: Callable[..., Any]) -> None:
    """Write the state of the cell at the last step of its curve by a call of `record`."""
    moment = run.finished_at or run.started_at
    record(wall_time=moment.timestamp() if moment else 0.0, step=run.step, summary=text_pb("state", run.state))


def _record_numbers(run: TrackerRun, record: Callable[..., Any]) -> None:
    """Write curve points (time: start plus training seconds) and measurements (time: end of the attempt) by `record`.

    The step of a measurement is its context length. Curve values that are None are left out; a missing measurement
    gives a text with its reason.
    """
    began = run.started_at.timestamp() if run.started_at else 0.0
    ended = run.finished_at.timestamp() if run.finished_at else began
    for point in run.curve:
        values = [(name, getattr(point, name)) for name in CURVE]
        scalars = [Summary.Value(tag=f"curve/{n}", simple_value=value) for n, value in values if value is not None]
        record(wall_time=began + point.wall_s, step=point.step, summary=Summary(value=scalars))
    for value in run.values:
        tag = f"{value.probe}/{value.metric}"
        scalar = Summary(value=[Summary.Value(tag=tag, simple_value=value.value or 0.0)])
        summary = scalar if value.value is not None else text_pb(f"{tag}/reason", value.reason or "")
        record(wall_time=ended, step=value.length, summary=summary)
