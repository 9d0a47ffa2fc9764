"""A sweep as a file store of MLflow: a folder with one experiment, the sweep, and in it one run a cell.

Written by us, since the layout is a few small files and the package that writes them brings dozens of others. MLflow opens it with
`--backend-store-uri`; its newer releases ask for MLFLOW_ALLOW_FILE_STORE=true, or take it over with `mlflow migrate-filestore`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..console.output_files import filling
from ..store.store import Store
from .runs import CURVE, Run, runs_of

FINISHED, FAILED, KILLED, RUNNING, SCHEDULED = 3, 4, 5, 1, 2
STATUS = {"done": FINISHED, "failed": FAILED, "diverged": FAILED, "interrupted": KILLED, "running": RUNNING}
"""MLflow's number by the state of a cell; of a new one SCHEDULED."""
LOCAL = 4
"""The kind of a run's source: a file on this machine."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000
"""Letters of a parameter, as MLflow limits them."""


def export_mlflow(store: Store, sweep: str, out: Path) -> int:
    """Writes the folder; returns how many runs. Run id: the cell's id; run name: its slug.

    Parameters: id, seed, levels, axes and tokens, and under `config.` the cell's complete config. Metrics: `curve/NAME` by step,
    at the times they were trained, and `PROBE/METRIC` by context length (0: not about one). The reason of a number that could
    not be had is a tag `reason.PROBE.METRIC.LENGTH`, what somebody wrote about sweep or cell the description.
    Raises StoreError: the folder exists or cannot be written.
    """
    count, summary = 0, store.sweep(sweep)
    experiment = str(int(hashlib.sha256(sweep.encode()).hexdigest()[:14], 16))
    final = Path(os.path.abspath(out)) / experiment
    with filling(out) as folder:
        home = folder / experiment
        created = _ms(summary.created_at)
        about: dict[str, Any] = {
            "artifact_location": final.as_uri(),
            "creation_time": created,
            "experiment_id": experiment,
        }
        about |= {"last_update_time": _ms(summary.launched_at), "lifecycle_stage": "active", "name": sweep}
        _meta(home, about)
        tags = {f"tag.{name}": "true" for name in summary.tags} | {"sweep": sweep, "revision": str(summary.revision)}
        _texts(home / "tags", tags | ({"mlflow.note.content": summary.note} if summary.note else {}))
        for run in runs_of(store, sweep):
            _run(home / run.cell.id, run, experiment, final)
            count += 1
    return count


def _run(home: Path, run: Run, experiment: str, final: Path) -> None:
    began, ended = _ms(run.began), _ms(run.ended)
    _meta(
        home,
        {
            "artifact_uri": (final / run.cell.id / "artifacts").as_uri(),
            "end_time": ended or None,
            "entry_point_name": "",
            "experiment_id": experiment,
            "lifecycle_stage": "active",
            "run_id": run.cell.id,
            "run_name": run.name,
            "run_uuid": run.cell.id,
            "source_name": "",
            "source_type": LOCAL,
            "source_version": "",
            "start_time": began,
            "status": STATUS.get(run.state, SCHEDULED),
            "tags": [],
            "user_id": "unknown",
        },
    )
    (home / "artifacts").mkdir()
    facts = {name: str(value) for name, value in run.facts().items()}
    _texts(home / "params", facts | {f"config.{name}": value for name, value in _flat(run.cell.config)})
    tags = {"mlflow.runName": run.name, "cell": run.cell.id, "state": run.state}
    tags |= {"mlflow.note.content": run.cell.note} if run.cell.note else {}
    lines: dict[str, list[str]] = {}
    for point in run.curve:
        for name in CURVE:
            value = getattr(point, name)
            if value is not None:
                at = began + round(1000 * point.wall_s)
                lines.setdefault(f"curve/{_word(name)}", []).append(_line(at, value, point.step))
    for one in run.values:
        probe, metric = _word(one.probe), _word(one.metric)
        if one.value is not None:
            lines.setdefault(f"{probe}/{metric}", []).append(_line(ended or began, one.value, one.length))
        else:
            tags[f"reason.{probe}.{metric}.{one.length}"] = one.reason or ""
    _texts(home / "tags", tags)
    _texts(home / "metrics", {name: "".join(written) for name, written in lines.items()}, cut=False)


def _ms(moment: datetime | None) -> int:
    """Milliseconds since the epoch; 0 for a time that there is not."""
    return round(1000 * moment.timestamp()) if moment is not None else 0


def _line(at: int, value: float, step: int) -> str:
    return f"{at} {float(value)!r} {step}\n"


def _word(text: str) -> str:
    """The text as MLflow lets a name be, which is a file's, too."""
    word = re.sub(r"[^A-Za-z0-9_. -]", "_", text)[:LONGEST_NAME]
    return word if word.strip(". ") else "_"


def _meta(folder: Path, values: Mapping[str, Any]) -> None:
    folder.mkdir()
    # JSON is YAML
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())
    (folder / "meta.yaml").write_text(text, encoding="utf-8")


def _texts(folder: Path, values: Mapping[str, str], *, cut: bool = True) -> None:
    """A file a value."""
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        file = folder.joinpath(*(_word(part) for part in name.split("/")))
        file.parent.mkdir(exist_ok=True)
        file.write_text(value[:LONGEST_VALUE] if cut else value, encoding="utf-8", errors="replace", newline="")


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Every setting by its dotted path, as JSON unless it is text."""
    items: Iterable[tuple[str, Any]] = config.items()
    for name, value in items:
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value if isinstance(value, str) else json.dumps(value)
