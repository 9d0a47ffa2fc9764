"""A sweep for experiment trackers: event files of TensorBoard, offline runs of Weights & Biases, files of MLflow, one run a cell;
a study as a database of Optuna's.

The packages of the first two are optional and imported only here. Nothing is sent anywhere: `wandb sync FOLDER/wandb/*` does that
later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..console.output_files import filling
from ..errors import StoreError
from ..names import file_name
from ..store.store import Store
from .bundles import iso
from .mlflow_files import export_mlflow
from .optuna_files import export_optuna
from .runs import CURVE, Run, runs_of


def export_tensorboard(store: Store, sweep: str, out: Path) -> int:
    """Writes a folder with one run a cell for `tensorboard --logdir`; returns how many.

    Scalars `curve/NAME` by step, at the times they were trained, and `PROBE/METRIC` by context length (0: not about
    one); the reason of a number that could not be had is a text `PROBE/METRIC/reason`; levels and seed are hyper-parameters.
    TensorBoard keeps 32-bit floats. Raises StoreError: the folder exists, cannot be written, or the package is missing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise _missing("TensorBoard", "tensorboard>=2.18", error) from error

    def write(run: Run, record: Callable[..., None]) -> None:
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

    count = 0
    with filling(out) as folder:
        for run in runs_of(store, sweep):
            (folder / run.name).mkdir()
            # TensorBoard knows its files by the name; their own writer would put time, host and pid behind it
            with (folder / run.name / "events.out.tfevents.0.atma-sweep").open("wb") as stream:
                writer = RecordWriter(stream)
                write(run, lambda writer=writer, **event: writer.write(Event(**event).SerializeToString()))
                writer.flush()
            count += 1
    return count


def export_wandb(store: Store, sweep: str, out: Path) -> int:
    """Writes a folder with one offline run a cell for `wandb sync`; returns how many.

    Project: the sweep; run id: the cell's; config: id, state, seed, levels, axes and the cell's complete config. History:
    `curve/NAME` over `step`, `PROBE/METRIC` over `length`; summary: `PROBE/METRIC@LENGTH`, or the reason why there is none.
    Neither this machine nor the working folder is described. Raises StoreError as export_tensorboard does.
    """
    try:
        import wandb
    except ImportError as error:
        raise _missing("Weights & Biases", "wandb>=0.22", error) from error
    quiet = dict.fromkeys(("x_disable_meta", "x_disable_stats", "x_disable_machine_info"), True)
    settings = wandb.Settings(
        mode="offline",
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        x_save_requirements=False,
        **quiet,
    )
    count = 0
    with filling(out) as folder:
        for run in runs_of(store, sweep):
            times = {"began": run.began and iso(run.began), "ended": run.ended and iso(run.ended)}
            with wandb.init(
                project=file_name(sweep),
                id=run.cell.id,
                name=run.name,
                dir=str(folder),
                config=run.facts() | times | {"config": dict(run.cell.config)},
                settings=settings,
            ) as found:
                _log(run, found)
            count += 1
    return count


def _log(run: Run, found: Any) -> None:
    found.define_metric("curve/*", step_metric="step")
    for probe in sorted({value.probe for value in run.values}):
        found.define_metric(f"{probe}/*", step_metric="length")
    for point in run.curve:
        values = {f"curve/{name}": getattr(point, name) for name in CURVE}
        found.log({"step": point.step} | {name: value for name, value in values.items() if value is not None})
    by_length: dict[int, dict[str, float]] = {}
    for value in run.values:
        name = f"{value.probe}/{value.metric}"
        if value.value is not None:
            by_length.setdefault(value.length, {})[name] = value.value
        found.summary[f"{name}@{value.length}" if value.length else name] = (
            value.value if value.value is not None else value.reason
        )
    for length, values in sorted(by_length.items()):
        found.log({"length": length} | values)


def _missing(what: str, package: str, error: ImportError) -> StoreError:
    return StoreError(f"{what} files need a package ({error}); install it with: pip install '{package}'")


TRACKERS: Mapping[str, Callable[[Store, str, Path], int]] = {
    "tensorboard": export_tensorboard,
    "wandb": export_wandb,
    "mlflow": export_mlflow,
    "optuna": export_optuna,
}
IN_FILES: Mapping[str, str] = {"optuna": ".db"}
"""Those that write one file, and its ending; the others fill a folder."""
