"""Exporter to MLflow: a database `mlflow.db` with one experiment and one run per cell.

Run name: the cell's slug. Parameters, which never change: id, seed, levels, axes, tokens, and the complete config
under `config.`.
Metrics: `curve/NAME` by step, with the times of training, and `PROBE/METRIC` by context length (0: without a length).
Tags: `cell` (its id), `state`, the sweep's as `tag.NAME`, and the reasons of missing values as
`reason.PROBE.METRIC.LENGTH`. Notes of users are the descriptions.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would report every run to its makers

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from ...console.output_files import make_folder
from ...store.store import Store
from .runs import CURVE, LiveTarget, TrackerRun

BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""Maximum number of items in one call of MLflow, by kind."""
STATUS = {"done": "FINISHED", "failed": "FAILED", "diverged": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
"""MLflow's status by the state of a cell; a new cell has SCHEDULED."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000
"""MLflow's maximum lengths of the name and the value of a parameter, in characters."""


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Create the experiment, and return the function that writes a run into it. Sets MLflow's log level to WARNING.

    The experiment has tags for the sweep, its newest revision and the user's tags, and the user's note as description.

    Args:
        store: database.
        sweep: name of the sweep, and of the experiment.
        folder: folder to write `mlflow.db` to.
        out: final name of the folder, for the address of artifacts.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    summary = store.sweep(sweep)
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    tags = {f"tag.{name}": "true" for name in summary.tags} | {"sweep": sweep, "revision": str(summary.revision)}
    tags |= {"mlflow.note.content": summary.note} if summary.note else {}
    artifacts = (Path(os.path.abspath(out)) / "artifacts").as_uri()
    experiment = client.create_experiment(sweep, artifact_location=artifacts, tags=tags)
    return lambda run: _log(client, _create(client, experiment, run), run, is_new=True)


def follow(store: Store, sweep: str, target: str) -> LiveTarget:
    """Return the receiver that sends the news of runs to the tracking server at the URI `target`.

    The experiment has the sweep's name and is created if it does not exist.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    if target.startswith("sqlite:///"):
        make_folder(Path(target.removeprefix("sqlite:///")).parent, parents=True)
    client = MlflowClient(tracking_uri=target)
    existing = client.get_experiment_by_name(sweep)
    experiment = (
        existing.experiment_id if existing is not None else client.create_experiment(sweep, tags={"sweep": sweep})
    )

    def push(run: TrackerRun, key: str | None) -> str:
        """Send the news; the key is MLflow's id of the run."""
        id_ = key or _create(client, experiment, run)
        _log(client, id_, run, is_new=key is None)
        return id_

    return LiveTarget(push)


def _create(client: Any, experiment: str, run: TrackerRun) -> str:
    """Create a run in an experiment (its id) and return the run's id."""
    return str(client.create_run(experiment, start_time=_ms(run.started_at), run_name=run.name).info.run_id)


def _log(client: Any, id_: str, run: TrackerRun, *, is_new: bool) -> None:
    """Write a run into MLflow's database: metrics, tags, times and status, and parameters of a new one.

    Metrics without a value are left out; a missing measurement gives a tag with its reason. Values longer than 6,000
    characters are cut. The status is FINISHED for a done cell, FAILED for a failed or diverged one, KILLED for an
    interrupted one, RUNNING, or else SCHEDULED.

    Args:
        client: MlflowClient.
        id_: MLflow's id of the run.
        run: run to write.
        is_new: write its parameters too, which MLflow does not allow to change.
    """
    began, ended = _ms(run.started_at), _ms(run.finished_at)
    facts = {name: str(value) for name, value in run.hyperparameters().items()} if is_new else {}
    facts |= {f"config.{name}": value for name, value in _flat(run.cell.config)} if is_new else {}
    tags = {"cell": run.cell.id, "state": run.state} | {f"tag.{name}": "true" for name in run.tags}
    tags |= {"mlflow.note.content": run.cell.note} if run.cell.note else {}
    metrics = [
        Metric(f"curve/{_valid_name(name)}", value, began + round(1000 * point.wall_s), point.step)
        for point in run.curve
        for name in CURVE
        if (value := getattr(point, name)) is not None
    ]
    for measured in run.values:
        probe, metric = _valid_name(measured.probe), _valid_name(measured.metric)
        if measured.value is not None:
            metrics.append(Metric(f"{probe}/{metric}", measured.value, ended or began, measured.length))
        else:
            tags[f"reason.{probe}.{metric}.{measured.length}"] = measured.reason or ""
    items: dict[str, list[Any]] = {
        "metrics": metrics,
        "params": [Param(_valid_name(name), value[:LONGEST_VALUE]) for name, value in facts.items()],
        "tags": [RunTag(_valid_name(name), value[:LONGEST_VALUE]) for name, value in tags.items()],
    }
    for kind, size in BATCH.items():
        for start in range(0, len(items[kind]), size):
            client.log_batch(id_, **{kind: items[kind][start : start + size]})
    status = STATUS.get(run.state, "SCHEDULED")
    if ended:
        client.set_terminated(id_, status, ended)
    else:
        client.update_run(id_, status)


def _ms(moment: datetime | None) -> int:
    """Return milliseconds since the epoch; 0 for None."""
    return round(1000 * moment.timestamp()) if moment is not None else 0


def _valid_name(text: str) -> str:
    """Return the text with the characters and the length that MLflow allows in a name."""
    word = re.sub(r"[^A-Za-z0-9_. -]", "_", text)[:LONGEST_NAME]
    return word if word.strip(". ") else "_"


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting of a nested config as (dotted path, text).

    Text is unchanged; other values are JSON, also lists and empty mappings. `path` is the prefix of the paths, with its
    dot.
    """
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value if isinstance(value, str) else json.dumps(value)
