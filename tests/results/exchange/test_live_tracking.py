"""A sweep that runs, in the eyes of each tracker's own reader: everything once, in order, whatever stops in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.exchange.trackers import EXPORTERS, Exporter, live
from atma_sweep.results.exchange.trackers.live import Follower, default_target, follow
from atma_sweep.results.exchange.trackers.runs import LiveTarget
from atma_sweep.results.maintenance import names_tags_notes
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Measurement, Owner
from atma_sweep.results.store.store import Store
from bench import Bench
from patience import PATIENCE_S
from tracker_files import records

pytestmark = pytest.mark.usefixtures("working_folder")
SQLITE = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
OWNER = Owner(name="ada", host="here", pid=1, started=0.0)
Numbers = dict[str, list[tuple[int, float]]]
"""(step or context length, value) by the name of a scalar."""


def read_tensorboard(folder: Path, name: str, cell: str) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    states = [state.tensor_proto.string_val[0] for state in events.Tensors("state")]
    assert states[-1] in (b"done", b"failed")
    if cell:  # followed from the beginning, with tags
        assert states[0] == b"running"
        assert events.Tensors("tags")[0].tensor_proto.string_val[0] == b"paper"
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(folder: Path, name: str, cell: str) -> Numbers:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("quick")
    (own_run,) = [run for run in client.search_runs([experiment.experiment_id]) if run.info.run_name == name]
    assert own_run.info.status == ("FAILED" if own_run.data.tags["state"] == "failed" else "FINISHED")
    assert own_run.data.tags["tag.paper"] == "true"
    assert "state" not in own_run.data.params, "parameters never change"
    history = {tag: client.get_metric_history(own_run.info.run_id, tag) for tag in own_run.data.metrics}
    return {tag: [(metric.step, metric.value) for metric in metrics] for tag, metrics in history.items()}


def read_wandb(folder: Path, name: str, cell: str) -> Numbers:
    from wandb.proto.wandb_internal_pb2 import Record

    numbers: Numbers = {}
    for file in sorted(folder.glob(f"wandb/offline-run-*-{cell}/run-{cell}.wandb")):
        for record in records(file, Record):
            if record.HasField("run"):
                assert list(record.run.tags) == ["paper"]
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            row = {key: json.loads(value) for key, value in items.items() if key[0] != "_"}
            x = row.pop("step", row.pop("length", None))
            for tag, value in row.items():
                numbers.setdefault(tag, []).append((x, value))
    return numbers


def read_trackio(folder: Path, name: str, cell: str) -> Numbers:
    from trackio import Api, sqlite_storage

    sqlite_storage.TRACKIO_DIR = folder
    (own_run,) = [run for run in Api().runs("quick") if run.name == name]
    (state,) = [state for state in ("done", "failed") if own_run.config["state"] == state]
    assert (own_run.id, own_run.config["cell"], own_run.config["tags"]) == (cell, cell, ["paper"])
    assert own_run.config["reasons"] == ({"clean/nats@64": "oom: no memory"} if state == "done" else {})
    numbers: Numbers = {}
    for row in sqlite_storage.SQLiteStorage.get_logs("quick", name, run_id=cell):
        step = row.pop("step")
        assert row.pop("timestamp")
        for tag, value in row.items():
            numbers.setdefault(tag, []).append((step, value))
    return numbers


READERS: dict[str, Callable[[Path, str, str], Numbers]] = {
    "tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb,
    "trackio": read_trackio,
}  # fmt: skip
MARKS = {"wandb": pytest.mark.thorough, "mlflow": pytest.mark.slow, "trackio": pytest.mark.slow}


def target_of(tracker: str, folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}" if tracker == "mlflow" else str(folder)


def expected(store: Store, cell: str) -> Numbers:
    """Return the numbers of a cell in the database, by the names that trackers show."""
    states = {state.cell_id: state for state in store.cell_states("quick")}
    numbers: Numbers = {}
    for point in store.curve(states[cell].attempt_id):
        for name in ("tokens", "wall_s", "train_loss", "val_loss"):
            if getattr(point, name) is not None:
                numbers.setdefault(f"curve/{name}", []).append((point.step, getattr(point, name)))
    for value in store.measurements(cell):
        if value.value is not None:
            numbers.setdefault(f"{value.probe}/{value.metric}", []).append((value.length, value.value))
    return {name: sorted(pairs) for name, pairs in numbers.items()}


def rounded(numbers: Numbers, tracker: str) -> Numbers:
    """TensorBoard keeps 32-bit floats."""
    kind = np.float32 if tracker == "tensorboard" else float
    return {name: sorted((step, float(kind(value))) for step, value in pairs) for name, pairs in numbers.items()}


def points(recorder: DatabaseRecorder, *steps: int) -> None:
    recorder.curve(
        [CurvePoint(step=s, tokens=s * 7, wall_s=s / 8, train_loss=1 / (s + 3), val_loss=1 / (s + 4)) for s in steps]
    )


@pytest.mark.thorough
@SQLITE
@pytest.mark.parametrize("tracker", [pytest.param(name, marks=MARKS.get(name, ())) for name in READERS])
def test_tracker_holds_every_number_once(
    store: Store, cells: Any, tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip(tracker)
    first, second = cells(2)
    store.record_revision("quick", grid_text="x", grid_file="x", cells=[first, second])
    names_tags_notes.tag(store, "quick", ["paper"])
    target, memory = target_of(tracker, tmp_path / "target"), tmp_path / "memory.json"

    def begin(cell: Any, inherit: tuple[int, int] | None = None) -> DatabaseRecorder:
        recorder = DatabaseRecorder(
            store, store.start_attempt(cell.id, owner=OWNER, fence=1, kind="train", steps_total=9).id, 1
        )
        if inherit is not None:
            recorder.inherit_curve(*inherit)
        return recorder

    follower = Follower(store, "quick", tracker, target, memory)
    assert follower.poll() == 0, "nothing has begun"
    recorder = begin(first)
    points(recorder, 1, 2)
    assert follower.poll() == 1
    assert follower.poll() == 0, "nothing is new"
    points(recorder, 3)
    recorder.progress(3, 9, 0.5, 1.0, "training")
    assert follower.poll() == 1
    # the attempt dies, and so does the follower; the next attempt goes on from step 2 and repeats step 3
    store.finish_attempt(1, 1, "interrupted")
    follower.close()
    second_recorder = begin(second)
    points(second_recorder, 1)
    resumed = begin(first, (1, 2))
    points(resumed, 3, 4)
    again = Follower(store, "quick", tracker, target, memory)
    assert again.poll() == 2
    resumed.measurements(
        [
            Measurement(probe="val", metric="val_loss", value=2 / 3),
            *(Measurement(probe="needle", metric="digit_accuracy", length=n, value=1 / n) for n in (64, 128)),
            Measurement(probe="clean", metric="nats", length=64, reason="oom: no memory"),
        ]
    )
    resumed.finish("done")
    assert again.poll() == 1
    second_recorder.finish("failed")
    assert again.poll() == 1
    for state in store.cell_states("quick"):
        name = state.slug.replace(" ", "_").replace("/", "_")
        numbers = READERS[tracker](tmp_path / "target", name, state.cell_id)
        shown = {tag: sorted(pairs) for tag, pairs in numbers.items()}
        assert shown == rounded(expected(store, state.cell_id), tracker)


@SQLITE
def test_tracker_that_is_down_gets_everything_later(
    store: Store, cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []
    problems = [ConnectionError("no\nroute"), ConnectionError("no\nroute"), None, None]

    def push(run: Any, key: str | None) -> str:
        if problem := problems.pop(0):
            raise problem
        sent.append((run.cell.id, len(run.curve)))
        return "key"

    module = SimpleNamespace(follow=lambda *arguments: LiveTarget(push))
    monkeypatch.setattr(Exporter, "load", lambda self: module)
    monkeypatch.setattr(live.time, "sleep", lambda seconds: waits.append(seconds))
    waits: list[float] = []
    store.record_revision("quick", grid_text="x", grid_file="x", cells=cells(2))
    for cell in cells(2):
        points(DatabaseRecorder(store, store.start_attempt(cell.id, owner=OWNER, fence=1, kind="train").id, 1), 1, 2, 3)
    lines: list[str] = []
    running = iter([True, True, True, False, False])
    follower = Follower(store, "quick", "mlflow", "nowhere", tmp_path / "memory.json")
    assert follow(follower, lambda: next(running), interval=4.0, until_end=True, tell=lines.append)
    assert sent == [(cell.id, 3) for cell in cells(2)]
    assert lines == [
        "the tracker cannot be reached, and gets everything later: ConnectionError: no route",
        "the tracker can be reached again",
    ]
    assert waits == [8.0, 16.0, 4.0], "the wait doubles while it is down"
    problems[:] = [ConnectionError("no route")]
    recorder = DatabaseRecorder(store, 1, 1)
    points(recorder, 4)
    recorder.progress(4, 9, 0.5, 1.0, "training")
    assert not follow(follower, lambda: False, interval=4.0, until_end=True, tell=lines.append)


def test_default_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_target("my_sweep", "tensorboard") == str(Path("my_sweep-tensorboard").absolute())
    assert default_target("quick", "mlflow") == f"sqlite:///{Path('quick-mlflow').absolute() / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert default_target("quick", "mlflow") == "http://server:5000"
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    assert default_target("quick", "trackio") == str(Path("quick-trackio").absolute())
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    assert default_target("quick", "trackio") == "elsewhere"
    assert set(READERS) == {name for name, exporter in EXPORTERS.items() if not exporter.ending}


@pytest.mark.slow
@pytest.mark.parametrize("sweep", ["registry-a", "a_configs", "a.b", "a=b", "quick", "a_b-c"])
def test_trackio_project_is_named_as_the_sweep(sweep: str) -> None:
    pytest.importorskip("trackio")
    from atma_sweep.results.exchange.trackers.trackio import project_name
    from trackio import sqlite_storage, utils

    name = project_name(sweep)
    sqlite_storage.SQLiteStorage.validate_project_name(name)
    assert utils.canonical_project_name(name) == name
    assert (name == sweep) == (sweep in ("quick", "a_b-c"))


@pytest.mark.thorough
def test_launch_sends_its_news_and_waits_for_the_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.env["WANDB_MODE"] = "offline"
    bench.launch("--track", "tensorboard", "--only", "attn_type=nope")
    memory = tmp_path / "atma-runs" / "tracking" / "micro-tensorboard.json"
    deadline = time.monotonic() + PATIENCE_S  # on a slow machine it is still catching up when the launch ends
    while time.monotonic() < deadline and not (memory.exists() and '"done"' in memory.read_text()):
        time.sleep(0.2)
    slug = "nope-baseline-d0-m0-w0-s0"
    numbers = read_tensorboard(tmp_path / "micro-tensorboard", slug, "")
    ((loss,),) = bench.sql("SELECT value FROM results WHERE metric = 'val_loss'")
    assert numbers["val/val_loss"] == [(0, float(np.float32(loss)))]
    validated = [step for (step,) in bench.sql("SELECT step FROM curve_point WHERE val_loss IS NOT NULL ORDER BY step")]
    assert [step for step, _ in numbers["curve/val_loss"]] == validated
    steps = [step for (step,) in bench.sql("SELECT step FROM curve_point ORDER BY step")]
    assert [step for step, _ in numbers["curve/train_loss"]] == steps
    bench.run("track", "tensorboard", "--until-end", "--out", "second")
    assert read_tensorboard(tmp_path / "second", slug, "") == numbers, "another folder gets everything"
    again = bench.run("track", "tensorboard", "--until-end")
    assert "micro: sending to tensorboard" in again
    assert read_tensorboard(tmp_path / "micro-tensorboard", slug, "") == numbers, "nothing is sent twice"
    assert "no tracker 'tensorbord'; " in bench.launch("--track", "tensorbord", code=2)
    refused = bench.run("track", "tensorboard", "--sweep", "mikro", "--until-end", code=2)
    assert refused.splitlines() == [refused.strip()], "one line"
    assert "no sweep is named 'mikro'" in refused
