"""A sweep for experiment trackers: event files of TensorBoard, offline runs of Weights & Biases, a database of MLflow's, one run a
cell; a study as a database of Optuna's.

The packages of the first three are optional and imported only here. Nothing is sent anywhere: `wandb sync FOLDER/wandb/*` does that
later.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from ..console.output_files import filling
from ..errors import StoreError
from ..names import file_name
from ..store.records import CellRecord, CurvePoint, Value
from ..store.store import Store
from .bundles import iso
from .optuna_files import export_optuna

CURVE = tuple(field.name for field in fields(CurvePoint) if field.name != "step")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A cell with its curve and its newest values. `name` is its slug, with the id where several cells share that."""

    name: str
    cell: CellRecord
    state: str
    began: datetime | None
    ended: datetime | None
    curve: tuple[CurvePoint, ...]
    values: tuple[Value, ...]

    def facts(self) -> dict[str, Any]:
        """What the cell is: id, state, seed, levels, the grid's axes and tokens."""
        facts = {"cell": self.cell.id, "state": self.state, "seed": self.cell.seed, "tokens": self.cell.tokens}
        return facts | dict(self.cell.levels) | dict(self.cell.axes)


def runs_of(store: Store, sweep: str) -> Iterator[Run]:
    """The cells of the newest revision in the grid's order; the curve is that of frames.Frames.curves."""
    states = store.cell_states(sweep)
    values: dict[str, list[Value]] = {state.cell_id: [] for state in states}
    for value in store.values(sweep):
        values[value.cell_id].append(value)
    named = Counter(state.slug for state in states)
    for state in states:
        shown = state.trained_attempt_id or state.attempt_id
        attempt = store.attempt(shown) if shown is not None else None
        plain = file_name(state.slug)
        yield Run(
            name=plain if named[state.slug] == 1 else f"{plain}-{state.cell_id}",
            cell=store.cell(state.cell_id),
            state=state.state,
            began=attempt.started_at if attempt is not None else None,
            ended=attempt.finished_at if attempt is not None else None,
            curve=tuple(store.curve(shown)) if shown is not None else (),
            values=tuple(values[state.cell_id]),
        )


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


MLFLOW_BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""Items that MLflow takes in one call, by kind."""
STATUS = {"done": "FINISHED", "failed": "FAILED", "diverged": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
"""MLflow's status by the state of a cell; of a new one SCHEDULED."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000
"""Letters of a parameter, as MLflow limits them."""


def export_mlflow(store: Store, sweep: str, out: Path) -> int:
    """Writes a folder with MLflow's database `mlflow.db`, in it one experiment with one run a cell; returns how many runs.

    Run name: the cell's slug. Parameters: id, seed, levels, axes and tokens, and under `config.` the cell's complete config.
    Metrics: `curve/NAME` by step, at the times they were trained, and `PROBE/METRIC` by context length (0: not about one).
    Tags: `cell` (its id), `state`, and as `reason.PROBE.METRIC.LENGTH` why a number could not be had. What somebody wrote about
    sweep or cell is the description. Raises StoreError as export_tensorboard does.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would tell its makers of every run
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise _missing("MLflow", "mlflow-skinny>=3.10", error) from error
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    count, summary = 0, store.sweep(sweep)
    with filling(out) as folder:
        client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
        tags = {f"tag.{name}": "true" for name in summary.tags} | {"sweep": sweep, "revision": str(summary.revision)}
        tags |= {"mlflow.note.content": summary.note} if summary.note else {}
        artifacts = (Path(os.path.abspath(out)) / "artifacts").as_uri()
        experiment = client.create_experiment(sweep, artifact_location=artifacts, tags=tags)
        for run in runs_of(store, sweep):
            _log_to_mlflow(client, experiment, run)
            count += 1
    return count


def _log_to_mlflow(client: Any, experiment: str, run: Run) -> None:
    """Write one run into MLflow's database."""
    from mlflow.entities import Metric, Param, RunTag

    began, ended = _ms(run.began), _ms(run.ended)
    facts = {name: str(value) for name, value in run.facts().items()}
    facts |= {f"config.{name}": value for name, value in _flat(run.cell.config)}
    tags = {"cell": run.cell.id, "state": run.state}
    tags |= {"mlflow.note.content": run.cell.note} if run.cell.note else {}
    metrics = [
        Metric(f"curve/{_word(name)}", value, began + round(1000 * point.wall_s), point.step)
        for point in run.curve
        for name in CURVE
        if (value := getattr(point, name)) is not None
    ]
    for one in run.values:
        probe, metric = _word(one.probe), _word(one.metric)
        if one.value is not None:
            metrics.append(Metric(f"{probe}/{metric}", one.value, ended or began, one.length))
        else:
            tags[f"reason.{probe}.{metric}.{one.length}"] = one.reason or ""
    items: dict[str, list[Any]] = {
        "metrics": metrics,
        "params": [Param(_word(name), value[:LONGEST_VALUE]) for name, value in facts.items()],
        "tags": [RunTag(_word(name), value[:LONGEST_VALUE]) for name, value in tags.items()],
    }
    id_ = client.create_run(experiment, start_time=began, run_name=run.name).info.run_id
    for kind, size in MLFLOW_BATCH.items():
        for start in range(0, len(items[kind]), size):
            client.log_batch(id_, **{kind: items[kind][start : start + size]})
    status = STATUS.get(run.state, "SCHEDULED")
    if ended:
        client.set_terminated(id_, status, ended)
    else:
        client.update_run(id_, status)


def _ms(moment: datetime | None) -> int:
    """Milliseconds since the epoch; 0 for a time that there is not."""
    return round(1000 * moment.timestamp()) if moment is not None else 0


def _word(text: str) -> str:
    """The text as MLflow lets a name be."""
    word = re.sub(r"[^A-Za-z0-9_. -]", "_", text)[:LONGEST_NAME]
    return word if word.strip(". ") else "_"


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every setting by its dotted path, as JSON unless it is text."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value if isinstance(value, str) else json.dumps(value)


TRACKERS: Mapping[str, Callable[[Store, str, Path], int]] = {
    "tensorboard": export_tensorboard,
    "wandb": export_wandb,
    "mlflow": export_mlflow,
    "optuna": export_optuna,
}
IN_FILES: Mapping[str, str] = {"optuna": ".db"}
"""Those that write one file, and its ending; the others fill a folder."""
