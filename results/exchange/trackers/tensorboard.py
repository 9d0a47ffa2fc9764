"""Event files of TensorBoard: one run a cell, for `tensorboard --logdir`.

Scalars `curve/NAME` by step, at the times they were trained, and `PROBE/METRIC` by context length (0: not about one); the reason of
a number that could not be had is a text `PROBE/METRIC/reason`; levels and seed are hyper-parameters. TensorBoard keeps 32-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from ...store.store import Store
from .runs import CURVE, TrackerRun


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Return the function that writes the event file of a run."""

    def write(run: TrackerRun) -> None:
        (folder / run.name).mkdir()
        # TensorBoard knows its files by the name; their own writer would put time, host and pid behind it
        with (folder / run.name / "events.out.tfevents.0.atma-sweep").open("wb") as stream:
            writer = RecordWriter(stream)
            _record(run, lambda **event: writer.write(Event(**event).SerializeToString()))
            writer.flush()

    return write


def _record(run: TrackerRun, record: Callable[..., Any]) -> None:
    """Write the events of a run."""
    began = run.began.timestamp() if run.began else 0.0
    ended = run.ended.timestamp() if run.ended else began
    record(wall_time=began, file_version="brain.Event:2")
    hyper = {name: value if isinstance(value, int) else str(value) for name, value in run.facts().items()}
    record(wall_time=began, summary=hparams_pb(hyper, trial_id=run.cell.id, start_time_secs=began))
    for point in run.curve:
        found = [(name, getattr(point, name)) for name in CURVE]
        scalars = [Summary.Value(tag=f"curve/{n}", simple_value=value) for n, value in found if value is not None]
        record(wall_time=began + point.wall_s, step=point.step, summary=Summary(value=scalars))
    for value in run.values:
        tag = f"{value.probe}/{value.metric}"
        scalar = Summary(value=[Summary.Value(tag=tag, simple_value=value.value or 0.0)])
        summary = scalar if value.value is not None else text_pb(f"{tag}/reason", value.reason or "")
        record(wall_time=ended, step=value.length, summary=summary)
