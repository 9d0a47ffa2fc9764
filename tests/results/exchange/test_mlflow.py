"""MLflow reads from an export the values of the database."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.exchange.trackers import EXPORTERS
from atma_sweep.results.maintenance import names_tags_notes
from atma_sweep.results.store.records import AXES, CurvePoint, Example, Measurement, Owner
from atma_sweep.results.store.store import Store
from databases import finished

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("working_folder"),
    pytest.mark.parametrize("backend", ["sqlite"], indirect=True),
]
CONFIG = {"model": {"d_model": 8, "mixers": {"polar": {"base": 1e-3}}}, "train": {"lr": None}, "seed": 0}


@pytest.fixture
def filled(store: Store, cells: Any, owner: Owner) -> Store:
    """Sweep quick: a cell that is done, with odd names and a number that could not be had, one that failed, one that is new."""
    from dataclasses import replace

    first, second, third = cells(3)
    records = [replace(first, config=CONFIG, axes={"train.lr": "0.1"}), second, replace(third, slug="odd / slug")]
    store.record_revision("quick", grid_text="x", grid_file="x", cells=records)
    for cell, state in ((first, "done"), (second, "failed")):
        finished(
            store,
            cell,
            state,
            curve=[CurvePoint(step=s, tokens=s * 7, wall_s=s / 8, train_loss=1 / (s + 3)) for s in range(4)],
            measurements=[
                Measurement(probe="val", metric="val_loss", value=2 / 3),
                *(Measurement(probe="needle", metric="digit/right", length=n, value=1 / n) for n in (64, 128)),
                Measurement(probe="../clean", metric="nats", length=4096, reason="oom: no\nmemory"),
            ],
            examples=[Example(probe="val", metric="val_loss", item=0, value=1.0)],
        )
    names_tags_notes.tag(store, "quick", ["paper"])
    names_tags_notes.note(store, "quick", "of a sweep\nin two lines")
    names_tags_notes.note(store, first.id, "of a cell")
    return store


@pytest.fixture
def client(filled: Store, tmp_path: Path) -> Any:
    """Return MLflow's own client for the exported database."""
    from mlflow import MlflowClient

    assert EXPORTERS["mlflow"].export(filled, "quick", tmp_path / "out") == 3
    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'out' / 'mlflow.db'}")


def runs_of(client: Any) -> dict[str, Any]:
    """By the id of its cell: every run of the experiment quick."""
    (experiment,) = client.search_experiments(filter_string="name = 'quick'")
    return {run.data.tags["cell"]: run for run in client.search_runs([experiment.experiment_id])}


@pytest.mark.thorough
def test_mlflow_experiment_has_a_run_per_cell(client: Any, filled: Store, cells: Any, tmp_path: Path) -> None:
    (experiment,) = client.search_experiments(filter_string="name = 'quick'")
    assert experiment.lifecycle_stage == "active"
    assert experiment.artifact_location == (tmp_path / "out" / "artifacts").as_uri()
    expected = {
        "tag.paper": "true", "sweep": "quick", "revision": "1", "mlflow.note.content": "of a sweep\nin two lines",
    }  # fmt: skip
    assert expected.items() <= experiment.tags.items()
    first, second, third = cells(3)
    runs = runs_of(client)
    assert {key: run.info.status for key, run in runs.items()} == {
        first.id: "FINISHED",
        second.id: "FAILED",
        third.id: "SCHEDULED",
    }
    assert runs[first.id].info.run_name == first.slug
    assert runs[third.id].info.run_name.startswith("odd_slug-")
    attempt = filled.attempts(first.id)[0]
    assert attempt.finished_at is not None
    assert runs[first.id].info.start_time == math.floor(attempt.started_at.timestamp() * 1000 + 0.5)
    assert runs[first.id].info.end_time == math.floor(attempt.finished_at.timestamp() * 1000 + 0.5)
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    matching = client.search_runs([experiment.experiment_id], "params.memory = 'off' and metrics.`val/val_loss` < 1")
    assert [run.data.tags["cell"] for run in matching] == [first.id]


@pytest.mark.thorough
def test_numbers_to_the_last_bit(client: Any, cells: Any) -> None:
    first = cells(1)[0]
    run = runs_of(client)[first.id]

    def history(name: str) -> list[tuple[int, float]]:
        return sorted((entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, name))

    assert sorted(run.data.metrics) == [
        "curve/tokens", "curve/train_loss", "curve/wall_s", "needle/digit_right", "val/val_loss",
    ]  # fmt: skip
    began = run.info.start_time
    curve = client.get_metric_history(run.info.run_id, "curve/train_loss")
    assert sorted((entry.timestamp, entry.value, entry.step) for entry in curve) == [
        (began + 125 * s, 1 / (s + 3), s) for s in range(4)
    ]
    assert history("needle/digit_right") == [(64, 1 / 64), (128, 1 / 128)]
    assert history("val/val_loss") == [(0, 2 / 3)]
    params = run.data.params
    assert {axis: params[axis] for axis in AXES} == first.levels
    assert (params["cell"], params["seed"], params["train.lr"]) == (first.id, "0", "0.1")
    flat = {name: json.loads(text) for name, text in params.items() if name.startswith("config.")}
    assert flat == {
        "config.model.d_model": 8, "config.model.mixers.polar.base": 1e-3, "config.train.lr": None,
        "config.seed": 0,
    }  # fmt: skip
    tags = run.data.tags
    assert (tags["state"], tags["tag.paper"], "state" in params) == ("done", "true", False)
    assert (tags["reason..._clean.nats.4096"], tags["mlflow.note.content"]) == ("oom: no\nmemory", "of a cell")
