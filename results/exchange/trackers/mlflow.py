"""A database of MLflow's, `mlflow.db`: one experiment with one run a cell.

Run name: the cell's slug. Parameters: id, seed, levels, axes and tokens, and under `config.` the cell's complete config. Metrics:
`curve/NAME` by step, at the times they were trained, and `PROBE/METRIC` by context length (0: not about one). Tags: `cell` (its id),
`state`, and as `reason.PROBE.METRIC.LENGTH` why a number could not be had. What somebody wrote about sweep or cell is the description.
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

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would tell its makers of every run

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from ...store.store import Store
from .runs import CURVE, TrackerRun

BATCH = {"metrics": 1000, "params": 100, "tags": 100}
"""Items that MLflow takes in one call, by kind."""
STATUS = {"done": "FINISHED", "failed": "FAILED", "diverged": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
"""MLflow's status by the state of a cell; of a new one SCHEDULED."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000
"""Letters of a parameter, as MLflow limits them."""


def runs(store: Store, sweep: str, folder: Path, out: Path) -> Callable[[TrackerRun], None]:
    """Make the experiment, and return the function that writes a run into it."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    summary = store.sweep(sweep)
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    tags = {f"tag.{name}": "true" for name in summary.tags} | {"sweep": sweep, "revision": str(summary.revision)}
    tags |= {"mlflow.note.content": summary.note} if summary.note else {}
    artifacts = (Path(os.path.abspath(out)) / "artifacts").as_uri()
    experiment = client.create_experiment(sweep, artifact_location=artifacts, tags=tags)
    return lambda run: _log(client, experiment, run)


def _log(client: Any, experiment: str, run: TrackerRun) -> None:
    """Write one run into MLflow's database."""
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
    for kind, size in BATCH.items():
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
