"""What MLflow reads from an export is what the database holds: read file by file, and by MLflow itself where it is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.exchange.trackers import TRACKERS, export_mlflow
from atma_sweep.results.maintenance import names_tags_notes
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import AXES, CurvePoint, Example, Measurement, Owner
from atma_sweep.results.store.store import Store, StoreError
from ruamel.yaml import YAML

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.parametrize("backend", ["sqlite"], indirect=True)]
CONFIG = {"model": {"d_model": 8, "mixers": {"polar": {"base": 1e-3}}}, "train": {"lr": None}, "seed": 0}


@pytest.fixture
def filled(store: Store, cells: Any, owner: Owner) -> Store:
    """Sweep quick: a cell that is done, with odd names and a number that could not be had, one that failed, one that is new."""
    from dataclasses import replace

    first, second, third = cells(3)
    made = [replace(first, config=CONFIG, axes={"train.lr": "0.1"}), second, replace(third, slug="odd / slug")]
    store.record_revision("quick", grid_text="x", grid_file="x", cells=made)
    for cell, state in ((first, "done"), (second, "failed")):
        attempt = store.start_attempt(cell.id, owner=owner, fence=1)
        recorder = Recorder(store, attempt.id, 1)
        recorder.curve([CurvePoint(step=s, tokens=s * 7, wall_s=s / 8, train_loss=1 / (s + 3)) for s in range(4)])
        recorder.measurements(
            [
                Measurement(probe="val", metric="val_loss", value=2 / 3),
                *(Measurement(probe="needle", metric="digit/right", length=n, value=1 / n) for n in (64, 128)),
                Measurement(probe="../clean", metric="nats", length=4096, reason="oom: no\nmemory"),
            ]
        )
        recorder.examples([Example(probe="val", metric="val_loss", item=0, value=1.0)])
        store.finish_attempt(attempt.id, 1, state)  # type: ignore[arg-type]
    names_tags_notes.tag(store, "quick", ["paper"])
    names_tags_notes.note(store, "quick", "of a sweep\nin two lines")
    names_tags_notes.note(store, first.id, "of a cell")
    return store


def meta(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load((folder / "meta.yaml").read_text())
    return found


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_is_laid_out_as_a_file_store(filled: Store, cells: Any, tmp_path: Path) -> None:
    assert export_mlflow(filled, "quick", tmp_path / "out") == 3
    (experiment,) = (tmp_path / "out").iterdir()
    about = meta(experiment)
    assert (about["name"], about["experiment_id"], about["lifecycle_stage"]) == ("quick", experiment.name, "active")
    assert experiment.name.isdigit()
    assert about["artifact_location"] == experiment.as_uri()
    expected = {
        "tag.paper": "true",
        "sweep": "quick",
        "revision": "1",
        "mlflow.note.content": "of a sweep\nin two lines",
    }
    assert texts(experiment / "tags") == expected
    ids = [cell.id for cell in cells(3)]
    assert sorted(path.name for path in experiment.iterdir() if path.is_dir() and path.name != "tags") == ids
    runs = [meta(experiment / one) for one in ids]
    assert [one["status"] for one in runs] == [3, 4, 2], "finished, failed, scheduled"
    assert [one["run_id"] for one in runs] == ids
    assert runs[2]["run_name"].startswith("odd_slug-")
    attempt = filled.attempts(ids[0])[0]
    assert attempt.finished_at is not None
    assert runs[0]["start_time"] == math.floor(attempt.started_at.timestamp() * 1000 + 0.5)
    assert runs[0]["end_time"] == math.floor(attempt.finished_at.timestamp() * 1000 + 0.5)
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    with pytest.raises(StoreError, match="name a new folder with --out"):
        export_mlflow(filled, "quick", tmp_path / "out")
    assert TRACKERS["mlflow"] is export_mlflow


def test_numbers_to_the_last_bit(filled: Store, cells: Any, tmp_path: Path) -> None:
    export_mlflow(filled, "quick", tmp_path / "out")
    first = cells(1)[0]
    (home,) = tmp_path.glob(f"out/*/{first.id}")
    found = {name: [line.split(" ") for line in text.splitlines()] for name, text in texts(home / "metrics").items()}
    assert sorted(found) == ["curve/tokens", "curve/train_loss", "curve/wall_s", "needle/digit_right", "val/val_loss"]
    began = meta(home)["start_time"]
    assert [(int(at), float(value), int(step)) for at, value, step in found["curve/train_loss"]] == [
        (began + 125 * s, 1 / (s + 3), s) for s in range(4)
    ]
    assert [(float(value), int(step)) for _, value, step in found["needle/digit_right"]] == [
        (1 / 64, 64),
        (1 / 128, 128),
    ]
    assert [(float(value), int(step)) for _, value, step in found["val/val_loss"]] == [(2 / 3, 0)]
    params = texts(home / "params")
    assert {axis: params[axis] for axis in AXES} == first.levels
    assert (params["cell"], params["seed"], params["train.lr"]) == (first.id, "0", "0.1")
    flat = {name: json.loads(text) for name, text in params.items() if name.startswith("config.")}
    assert flat == {
        "config.model.d_model": 8,
        "config.model.mixers.polar.base": 1e-3,
        "config.train.lr": None,
        "config.seed": 0,
    }
    tags = texts(home / "tags")
    assert (tags["reason..._clean.nats.4096"], tags["mlflow.note.content"]) == ("oom: no\nmemory", "of a cell")


@pytest.mark.thorough
def test_mlflow_itself_reads_it(filled: Store, cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install -e '.[oracles]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    export_mlflow(filled, "quick", tmp_path / "out")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "out").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'quick'")
    assert (experiment.tags["tag.paper"], experiment.tags["mlflow.note.content"]) == (
        "true",
        "of a sweep\nin two lines",
    )
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    first, second, third = cells(3)
    assert {key: run.info.status for key, run in runs.items()} == {
        first.id: "FINISHED",
        second.id: "FAILED",
        third.id: "SCHEDULED",
    }
    history = client.get_metric_history(first.id, "curve/train_loss")
    assert [(one.step, one.value) for one in history] == [(s, 1 / (s + 3)) for s in range(4)]
    assert sorted((one.step, one.value) for one in client.get_metric_history(first.id, "needle/digit_right")) == [
        (64, 1 / 64),
        (128, 1 / 128),
    ]
    run = runs[first.id]
    assert run.info.run_name == first.slug
    assert run.data.params["config.model.d_model"] == "8"
    assert run.data.tags["mlflow.note.content"] == "of a cell"
    found = client.search_runs([experiment.experiment_id], "params.memory = 'off' and metrics.`val/val_loss` < 1")
    assert [run.info.run_id for run in found] == [first.id]
