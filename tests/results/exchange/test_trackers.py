"""The contract of every exporter, and what TensorBoard, W&B and Trackio read is what the database holds."""

import json
import sys
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
import studied
from atma_sweep.results.errors import PackageMissing, StoreError, SweepUnknown
from atma_sweep.results.exchange import trackers
from atma_sweep.results.exchange.trackers import EXPORTERS
from atma_sweep.results.exchange.trackers.runs import tracker_runs
from atma_sweep.results.maintenance import names_tags_notes
from atma_sweep.results.store import attempt_queries
from atma_sweep.results.store.records import AXES
from histories import at, files, launch, rows, run
from tracker_files import records

pytestmark = [pytest.mark.usefixtures("working_folder"), pytest.mark.parametrize("backend", ["sqlite"], indirect=True)]


@pytest.fixture
def filled(store, cells):
    """Three cells, two with one slug: one done twice, one failed, one new."""
    first, second, third = cells(3)
    launch(store, [first, replace(second, slug=first.slug), replace(third, slug="odd / slug", axes={"lr": "0.1"})], 1)
    run(store, first.id, 5, value=1 / 3)
    run(store, first.id, 6, value=2 / 3)
    run(store, second.id, 7, value=0.1, state="failed")
    names_tags_notes.tag(store, "quick", ["paper", "baseline"])
    return store


NAMES = ["odd_slug-6e5d1382", "polar0-baseline-c-s0-c00000000000", "polar0-baseline-c-s0-c01000000000"]
CURVE = ("tokens", "wall_s", "train_loss")
"""What histories.run fills of a curve."""


def curve_of(store, cell):
    newest = max(row["id"] for row in rows(store, "attempt") if row["cell_id"] == cell)
    return [row for row in rows(store, "curve_point") if row["attempt_id"] == newest]


MARKS = {"wandb": pytest.mark.thorough, "mlflow": pytest.mark.slow, "trackio": pytest.mark.slow}
"""Of exporters whose package takes long to import."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in EXPORTERS])
class TestContract:
    """Requirements on every exporter in the registry."""

    @pytest.mark.thorough
    def test_it_writes_all_and_replaces_nothing(self, filled, tmp_path, name):
        exporter, out = EXPORTERS[name], tmp_path / "out"
        count = len(studied.record_study(filled)) if exporter.counts == "trials" else 3
        sweep = "tuned" if exporter.counts == "trials" else "quick"
        with pytest.raises(SweepUnknown):
            exporter.export(filled, "quik", out)
        before = set(tmp_path.iterdir())
        assert exporter.export(filled, sweep, out) == count
        assert set(tmp_path.iterdir()) - before == {out}
        assert out.is_file() == bool(exporter.ending)
        first = files(tmp_path)
        with pytest.raises(StoreError, match=r"name a new (folder|file) with --out"):
            exporter.export(filled, sweep, out)
        assert files(tmp_path) == first
        if name == "wandb":
            assert not any(bytes(tmp_path) in content for path, content in first.items() if path.startswith("out"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name, exporter in EXPORTERS.items() if exporter.tracker]
)
def test_a_missing_package_names_the_command(filled, tmp_path, monkeypatch, name):
    exporter = EXPORTERS[name]
    module = f"{trackers.__name__}.{exporter.module}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for part in (exporter.module, "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(PackageMissing, match=rf"package '{name}', .* pip install 'atma-sweep\[trackers\]'"):
        exporter.export(filled, "quick", tmp_path / "x")
    assert not (tmp_path / "x").exists()


class TestTensorboard:
    @pytest.fixture
    def read(self, filled, tmp_path):
        pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -e '.[trackers]'")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert EXPORTERS["tensorboard"].export(filled, "quick", tmp_path / "logs") == 3

        def reader(name):
            events = EventAccumulator(str(tmp_path / "logs" / name), size_guidance={"scalars": 0, "tensors": 0})
            return events.Reload()

        return reader

    def test_tensorboard_has_a_run_per_cell(self, read, tmp_path):
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == NAMES

    def test_curves_by_step_at_their_time(self, read, filled, cells):
        events = read(NAMES[1])
        points = curve_of(filled, cells(1)[0].id)
        assert len(points) == 3
        for name in CURVE:
            scalars = events.Scalars(f"curve/{name}")
            assert [event.step for event in scalars] == [0, 1, 2]
            assert [event.value for event in scalars] == [float(np.float32(point[name])) for point in points]
            times = [event.wall_time - at(6).timestamp() for event in scalars]
            assert times == pytest.approx([point["wall_s"] for point in points], abs=1e-6)
        assert [tag for tag in events.Tags()["scalars"] if tag.startswith("curve/")] == [f"curve/{n}" for n in CURVE]

    def test_measurements_by_length_and_reasons_as_text(self, read):
        events = read(NAMES[1])
        (value,) = events.Scalars("val/val_loss")
        assert (value.step, value.value) == (0, float(np.float32(2 / 3)))
        assert value.wall_time == (at(6).timestamp() + 40)
        (reason,) = events.Tensors("clean/nats/reason")
        assert (reason.step, reason.tensor_proto.string_val[0]) == (4096, b"oom: no memory")
        assert "clean/nats" not in events.Tags()["scalars"]

    def test_cells_without_numbers_have_their_levels(self, read, cells):
        from tensorboard.plugins.hparams import plugin_data_pb2

        events = read(NAMES[0])
        assert events.Tags()["scalars"] == []
        data = plugin_data_pb2.HParamsPluginData.FromString(
            events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        )
        hyperparameters = {
            name: value.string_value or value.number_value for name, value in data.session_start_info.hparams.items()
        }
        expected = {"cell": cells(3)[2].id, "seed": 0, "tokens": 3 * 10**9, "lr": "0.1"}
        assert hyperparameters == expected | dict(cells(3)[2].levels)
        texts = {
            tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in ("config", "tags", "state")
        }
        assert (texts["state"], texts["tags"]) == ("new", "baseline, paper")
        assert json.loads(texts["config"]) == cells(3)[2].config
        assert "val/val_loss" not in read(NAMES[2]).Tags()["scalars"]  # it failed; its curve is there all the same
        assert len(read(NAMES[2]).Scalars("curve/train_loss")) == 3

    def test_the_same_rows_give_the_same_bytes(self, read, filled, tmp_path):
        EXPORTERS["tensorboard"].export(filled, "quick", tmp_path / "again")
        assert files(tmp_path / "logs") == files(tmp_path / "again")


@pytest.mark.thorough
class TestWandb:
    @pytest.fixture
    def read(self, filled, tmp_path):
        """Return a function from a cell to (its run, the history as dictionaries, the summary)."""
        pytest.importorskip("wandb", reason="needs wandb: pip install -e '.[trackers]'")
        from wandb.proto.wandb_internal_pb2 import Record

        assert EXPORTERS["wandb"].export(filled, "quick", tmp_path / "runs") == 3

        def reader(cell):
            (file,) = (tmp_path / "runs" / "wandb").glob(f"offline-run-*-{cell}/run-{cell}.wandb")
            described, history, summary = None, [], {}
            for record in records(file, Record):
                if record.HasField("run"):
                    described = record.run
                if record.HasField("history"):
                    items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                    history.append({key: json.loads(value) for key, value in items.items() if key[0] != "_"})
                if record.HasField("summary"):
                    items = {item.key or ".".join(item.nested_key): item.value_json for item in record.summary.update}
                    summary |= {key: json.loads(value) for key, value in items.items() if key[0] != "_"}
            return described, history, summary

        return reader

    def test_numbers_to_the_last_bit(self, read, filled, cells, tmp_path):
        cell = cells(1)[0]
        described, history, summary = read(cell.id)
        assert (described.project, described.run_id, described.display_name) == ("quick", cell.id, NAMES[1])
        assert described.run_group == NAMES[1].partition("-s0")[0]
        points = curve_of(filled, cell.id)
        expected = [{"step": point["step"]} | {f"curve/{n}": point[n] for n in CURVE} for point in points]
        assert history == [*expected, {"length": 0, "val/val_loss": 2 / 3}]
        assert summary["val/val_loss"] == 2 / 3
        assert summary["clean/nats@4096"] == "oom: no memory"
        config = {item.key: json.loads(item.value_json) for item in described.config.update}
        assert config["config"] == cell.config
        assert {axis: config[axis] for axis in AXES} == cell.levels
        assert (config["seed"], config["state"], config["began"]) == (0, "done", "2026-01-02T03:10:05.678Z")
        assert list(described.tags) == ["baseline", "paper"]

    def test_runs_of_an_unmeasured_and_a_failed_cell(self, read, cells):
        described, history, _ = read(cells(3)[2].id)
        assert (described.display_name, history) == (NAMES[0], [])
        assert [sorted(row)[-1] for row in read(cells(3)[1].id)[1]] == ["step"] * 3

    def test_this_machine_is_not_described(self, read, tmp_path):
        names = {path.name for path in (tmp_path / "runs").rglob("files/*")}
        assert names & {"wandb-metadata.json", "requirements.txt", "conda-environment.yaml", "output.log"} == set()
        assert not (tmp_path / "wandb").exists()


@pytest.mark.slow
class TestTrackio:
    @pytest.fixture
    def read(self, filled, tmp_path):
        """Return a function from a cell to (its run, the rows of its log)."""
        pytest.importorskip("trackio", reason="needs trackio: pip install -e '.[trackers]'")
        from trackio import Api, sqlite_storage

        assert EXPORTERS["trackio"].export(filled, "quick", tmp_path / "runs") == 3

        def reader(cell):
            sqlite_storage.TRACKIO_DIR = tmp_path / "runs"
            (run,) = [run for run in Api().runs("quick") if run.id == cell.id]
            return run, sqlite_storage.SQLiteStorage.get_logs("quick", run.name, run_id=cell.id)

        return reader

    def test_numbers_to_the_last_bit_at_their_time(self, read, filled, cells):
        described, log = read(cells(1)[0])
        points = curve_of(filled, cells(1)[0].id)
        header, *curve, values = log
        assert set(header) == {"step", "timestamp"}
        assert [row["step"] for row in curve] == [point["step"] for point in points]
        assert [{n: row[f"curve/{n}"] for n in CURVE} for row in curve] == [{n: p[n] for n in CURVE} for p in points]
        times = [datetime.fromisoformat(row["timestamp"]) - at(6) for row in curve]
        assert [time.total_seconds() for time in times] == pytest.approx([p["wall_s"] for p in points], abs=1e-6)
        assert (values["step"], values["val/val_loss"]) == (0, 2 / 3)
        config = described.config
        assert (described.name, config["state"], config["config"]) == (NAMES[1], "done", cells(1)[0].config)
        assert config["tags"] == ["baseline", "paper"]
        assert config["_Group"] == cells(1)[0].slug.removesuffix("-s0")
        assert config["reasons"] == {"clean/nats@4096": "oom: no memory"}
        assert {axis: config[axis] for axis in AXES} == cells(1)[0].levels

    def test_cells_without_numbers_are_listed(self, read, cells):
        described, log = read(cells(3)[2])
        assert (described.name, described.config["lr"], len(log)) == (NAMES[0], "0.1", 1)

    def test_what_was_sent_is_not_sent_twice(self, read, filled, tmp_path, cells):
        from atma_sweep.results.exchange.trackers import trackio

        before = [read(cell)[1] for cell in cells(3)]
        push = trackio.follow(filled, "quick", str(tmp_path / "runs")).push
        for sent in tracker_runs(filled, "quick"):
            assert push(sent, None) == sent.cell.id
        assert [read(cell)[1] for cell in cells(3)] == before


def test_numbers_of_a_batch_need_a_single_query(filled, monkeypatch):
    scopes = []
    query = attempt_queries.values
    monkeypatch.setattr(attempt_queries, "values", lambda session, ids: scopes.append(ids) or query(session, ids))
    runs = list(tracker_runs(filled, "quick"))
    assert [len(ids) for ids in scopes] == [3]
    monkeypatch.undo()
    assert [list(run.values) for run in runs] == [filled.measurements(run.cell.id) for run in runs]
