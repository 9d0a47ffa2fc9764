"""Launches in processes of their own: commands, kills, and the database afterwards."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from atma_sweep.results.errors import SweepBusy
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host import processes as process
from atma_sweep.sweep.orchestrator.launch import LaunchRequest, claim_sweep
from bench import EXAMPLE_MIXER, Bench, Curves
from factories import ended
from once import once
from patience import PATIENCE_S
from tiers import long_form

pytestmark = pytest.mark.slow
LONG = 128 * 150
VERY_LONG = 128 * 1000
"""Long enough for another launch to start meanwhile."""
ONLY_NOPE = ("--only", "attn_type=nope")
TRAINING = "SELECT 1 FROM attempt WHERE phase = 'training' AND checkpoint IS NOT NULL"


@pytest.fixture(scope="session")
def long_curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Curve of an uninterrupted run of the cell that the killing tests use."""

    def make(folder: Path) -> None:
        bench = Bench(folder)
        bench.grid(tokens=LONG)
        bench.launch(*ONLY_NOPE)

    folder = once(tmp_path_factory, "long", make)
    return Bench(folder, copied=folder).curves()


@pytest.fixture
def launched(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Copy of a bench whose grid was launched in two parts, nope and then polar."""

    def make(folder: Path) -> None:
        bench = Bench(folder)
        assert "micro: 1 done" in bench.launch("--only", "attn_type=nope")
        assert "micro: 1 done" in bench.launch("--only", "attn_type=polar")

    folder = once(tmp_path_factory, "launched", make)
    shutil.copytree(folder, tmp_path / "launched")
    return Bench(tmp_path / "launched", copied=folder)


@pytest.mark.thorough
def test_launch_twice_trains_once_and_a_new_level_only_itself(launched: Bench) -> None:
    bench = launched
    bench.once(2)
    out = bench.launch()
    assert "to train: 0 cells" in out
    assert "micro: 2 done" in out
    bench.once(2)
    bench.grid(seeds=2)
    plan = bench.plan()
    assert plan["counts"] == {"done": 2, "new": 2}
    assert plan["tokens"] == 2 * 128 * 12
    bench.launch()
    bench.once(4)
    assert bench.sql("SELECT max(number) FROM attempt") == [(1,)]


def test_measured_numbers_reach_sql_and_the_table(launched: Bench) -> None:
    bench = launched
    kinds = bench.sql("SELECT DISTINCT probe, metric, length FROM results WHERE slug LIKE 'polar%' ORDER BY 1, 2, 3")
    kinds = [kind for kind in kinds if kind[1] != "peak_memory"]
    assert [kind for kind in kinds if kind[0] == "clean"] == [("clean", "nats", 32), ("clean", "nats", 64)]
    needle = {kind[1] for kind in kinds if kind[0] == "needle"}
    assert needle == {"digit_accuracy", "exact_accuracy", "nats", "absent_nats", "constant_accuracy"}
    assert {kind[1] for kind in kinds if kind[0] == "val"} == {"val_loss", "val_loss_full"}
    mfu = bench.sql("SELECT DISTINCT value, reason FROM measurement WHERE metric IN ('mfu', 'mfu_paper')")
    assert mfu == [(None, "n/a: MFU needs the device's peak FLOP/s, unknown for the CPU")]
    rows = json.loads(bench.ask("report", "--table", "6", "--json"))
    assert [row["attn_type"] for row in rows] == ["nope", "polar"]
    last = bench.sql("SELECT val_loss FROM curve_point WHERE step = 12 ORDER BY attempt_id")
    assert [row["values"][0]["value"] for row in rows] == [value for (value,) in last]
    config, fingerprint, threads = bench.sql("SELECT config, corpus_fingerprint, threads FROM provenance LIMIT 1")[0]
    assert json.loads(str(config))["data"]["fingerprint"] == fingerprint
    assert threads == 1
    assert bench.sql("SELECT DISTINCT json_extract(extra, '$.chunk_tokens') FROM provenance") == [(8192,)]
    assert bench.sql("SELECT count(*) FROM example WHERE probe = 'clean' AND length = 64") == [(2 * 2,)]


@pytest.mark.thorough
def test_added_lengths_are_evaluated_without_training(launched: Bench) -> None:
    bench = launched
    trained = bench.curves()
    bench.edit("lengths: [32, 64]", "lengths: [32, 64, 128]")
    plan = bench.plan()
    assert plan["counts"] == {"needs-eval": 2}
    assert plan["to_train"] == []
    assert "to evaluate: 2" in bench.launch()
    bench.once(2)
    assert bench.curves().items() >= trained.items()
    assert bench.sql("SELECT DISTINCT kind, parent_id IS NOT NULL FROM attempt WHERE number = 2") == [("evaluate", 1)]
    assert bench.sql("SELECT DISTINCT length FROM measurement WHERE attempt_id > 2 AND length > 0") == [(128,)]


@pytest.mark.thorough
def test_lost_weights_are_retrained_only_on_request(launched: Bench) -> None:
    bench = launched
    ((weights,),) = bench.sql("SELECT weights FROM attempt a JOIN cell c ON c.id = cell_id WHERE attn_type = 'nope'")
    (bench.folder / "atma-runs" / str(weights)).unlink()
    bench.edit("lengths: [32, 64]", "lengths: [32, 128]")
    out = bench.launch("--only", "attn_type=nope", code=1)
    assert "1 weights gone" in out
    assert "--retrain" in out
    bench.launch("--only", "attn_type=nope", "--retrain")
    assert bench.sql("SELECT count(*) FROM attempt WHERE kind = 'train' AND state = 'done'") == [(3,)]


@pytest.mark.thorough
def test_revision_is_added_when_grid_or_requests_change(launched: Bench) -> None:
    bench = launched
    assert bench.sql("SELECT number FROM revision") == [(1,)]
    bench.grid(more="# a remark\n")
    bench.launch()
    assert bench.sql("SELECT number FROM revision") == [(1,), (2,)]
    changed = ("--set", "eval.lengths=[32, 128]", "--name", "longer")
    bench.launch(*changed, "--only", "attn_type=nope")
    bench.launch("--set", "eval.lengths=[32, 256]", "--name", "longer", "--only", "attn_type=polar")
    requests = bench.sql(
        "SELECT s.name, r.number, json_array_length(options, '$.requested') FROM revision r "
        "JOIN sweep s ON s.id = sweep_id ORDER BY r.id"
    )
    assert requests == [("micro", 1, 7), ("micro", 2, 7), ("longer", 1, 7), ("longer", 2, 7)]
    bench.once(2)


@pytest.mark.thorough
def test_shared_cell_of_two_sweeps_is_trained_once(launched: Bench) -> None:
    bench = launched
    bench.grid(name="other", seeds=2)
    assert "to train: 2 cells" in bench.run("launch", "other.yaml", "--executor", "local")
    counts = bench.sql("SELECT sweep, count(DISTINCT cell) FROM results GROUP BY 1 ORDER BY 1")
    assert counts == [("micro", 2), ("other", 4)]
    assert bench.sql("SELECT count(*) FROM attempt") == [(4,)]


@pytest.mark.thorough
def test_launch_waits_for_a_cell_trained_by_another_sweep(bench: Bench) -> None:
    bench.grid(tokens=VERY_LONG)
    bench.edit("every_steps: 7", "every_steps: 1000")
    second_grid = (bench.folder / "micro.yaml").read_text().replace("name: micro", "name: other")
    (bench.folder / "other.yaml").write_text(second_grid)
    arguments = ("--executor", "local", "--only", "attn_type=nope")
    first = bench.start("launch", "micro.yaml", *arguments)
    bench.wait("SELECT 1 FROM attempt WHERE phase = 'training'")
    out = bench.run("launch", "other.yaml", *arguments)
    assert "is being trained by another sweep" in out
    assert "other: 1 done" in out
    ended(first)
    bench.once(1)
    assert bench.sql("SELECT count(*) FROM attempt") == [(1,)]


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["local", *long_form("ray")])
def test_sigterm_to_every_process_at_once_saves_the_cell(bench: Bench, executor: str) -> None:
    """Batch systems and service managers signal all processes; the launch and its wrappers pass the signal on as well."""
    bench.grid(tokens=VERY_LONG)
    bench.edit("every_steps: 7", "every_steps: 1000")
    arguments = ("launch", "micro.yaml", "--executor", executor, "--only", "attn_type=nope")
    process = bench.start(*arguments)
    bench.wait("SELECT 1 FROM attempt WHERE step > 10")
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for _ in range(2):
        for member in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
    ended(process, 143)
    ((state, cause, checkpoint),) = bench.sql("SELECT state, cause, checkpoint FROM attempt")
    assert (state, cause) == ("interrupted", "stopped on request")
    assert (bench.folder / "atma-runs" / str(checkpoint) / "model.safetensors").is_file()
    assert bench.processes() == []
    assert bench.sql("SELECT owner FROM sweep") == [(None,)]


def _kill(
    bench: Bench, executor: str, victim: Callable[[subprocess.Popen[str]], None], *only: str
) -> subprocess.Popen[str]:
    bench.grid(tokens=LONG)
    process = bench.start("launch", "micro.yaml", "--executor", executor, *only)
    bench.wait(TRAINING)
    victim(process)
    return process


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["local", *long_form("ray")])
def test_killed_launch_is_continued_to_the_same_curves(bench: Bench, long_curves: Curves, executor: str) -> None:
    process = _kill(bench, executor, lambda process: process.kill(), *ONLY_NOPE)
    process.communicate(timeout=PATIENCE_S)
    bench.launch(*ONLY_NOPE, executor=executor)
    bench.once(1)
    assert bench.processes() == []
    assert bench.curves() == long_curves
    assert ("interrupted",) in bench.sql("SELECT DISTINCT state FROM attempt WHERE number = 1")


@pytest.mark.thorough
def test_second_launch_of_a_running_sweep_names_the_first(bench: Bench) -> None:
    bench.grid(tokens=10 * VERY_LONG)
    first = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait("SELECT 1 FROM attempt WHERE phase = 'training'")
    out = bench.launch(code=3)
    assert f"pid {first.pid}" in out
    assert len(out.strip().splitlines()) == 1
    status = json.loads(bench.ask("status", "--json"))
    assert status[0]["owner"] is not None
    assert sum(cell["standing"] == "running" for cell in status[0]["cells"]) >= 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=PATIENCE_S)


def test_restarted_launch_waits_for_its_own_lease(bench: Bench) -> None:
    """A supervisor on a machine that is gone may still live, so a launch of another owner is refused."""
    grid = load_grid(str(bench.folder / "micro.yaml"))
    gone, this_process = Owner(name="launch", host="elsewhere", pid=1, started=1.0), process.this_process("launch")
    with contextlib.closing(open_store(bench.folder / "atma.db", create=True)) as store:
        store.record_revision("micro", grid_text="x", grid_file="micro.yaml", cells=[])
        assert store.acquire_sweep("micro", gone, 2.0) == 1
        request = LaunchRequest(grid=grid, cells=[], runs=bench.folder)
        with pytest.raises(SweepBusy, match="on elsewhere"):
            claim_sweep(request, store, this_process)
        assert claim_sweep(replace(request, is_restart=True), store, this_process) == 2


def test_refused_launch_leaves_no_revision(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launch takes the name right after this one has found it free."""
    grid = load_grid(str(bench.folder / "micro.yaml"))
    bench.edit("seeds: 1", "seeds: 2")
    second_grid = load_grid(str(bench.folder / "micro.yaml"))
    me = process.this_process("launch")
    with contextlib.closing(open_store(bench.folder / "atma.db", create=True)) as store:
        read = store.read

        def disturbed(*arguments: object, **options: object) -> object:
            monkeypatch.setattr(store, "read", read)
            try:
                return read(*arguments, **options)  # type: ignore[arg-type]
            finally:
                assert (
                    claim_sweep(
                        LaunchRequest(grid=second_grid, cells=[], runs=bench.folder), store, replace(me, started=1.0)
                    )
                    == 1
                )

        monkeypatch.setattr(store, "read", disturbed)
        monkeypatch.setattr("atma_sweep.sweep.host.processes.is_alive", lambda owner: True)
        with pytest.raises(SweepBusy):
            claim_sweep(LaunchRequest(grid=grid, cells=[], runs=bench.folder), store, me)
    assert bench.sql("SELECT number, grid_text FROM revision") == [(1, second_grid.document.text)]


@pytest.mark.thorough
def test_plugin_mixer_trains_and_appears_in_the_table(bench: Bench) -> None:
    (bench.folder / "my_mixer.py").write_text(EXAMPLE_MIXER)
    bench.grid(more="plugins: [my_mixer.py]\n")
    bench.edit("[nope, polar]", "[fade, nope]")
    bench.edit("set:\n", "set:\n  model.mixers.fade.keep: 0.8\n")
    bench.launch()
    rows = json.loads(bench.ask("report", "--table", "6", "--json"))
    assert [row["attn_type"] for row in rows] == ["fade", "nope"]
    assert rows[0]["values"][0]["value"] < math.log(264)
    ((config,),) = bench.sql("SELECT config FROM cell WHERE attn_type = 'fade'")
    assert json.loads(str(config))["model"]["mixers"] == {"fade": {"canon": True, "keep": 0.8}}
    # an edited plugin is another mixer: a new cell; the cell without it stays
    (bench.folder / "my_mixer.py").write_text(EXAMPLE_MIXER.replace("Mean of", "A mean of"))
    assert bench.plan()["counts"] == {"new": 1, "done": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["local", *long_form("ray")])
def test_failing_cell_does_not_stop_the_rest(bench: Bench, executor: str) -> None:
    (bench.folder / "my_mixer.py").write_text(
        EXAMPLE_MIXER.replace("        steps =", "        1 / 0\n        steps =")
    )
    bench.grid(more="plugins: [my_mixer.py]\n")
    bench.edit("[nope, polar]", "[fade, nope]")
    (line,) = [
        number
        for number, text in enumerate((bench.folder / "my_mixer.py").read_text().splitlines(), start=1)
        if text.strip() == "1 / 0"
    ]
    cause = f"ZeroDivisionError: division by zero (my_mixer.py:{line})"
    assert f"{cause}; atma-sweep logs fade-" in bench.launch(code=1, executor=executor)
    states = bench.sql(
        "SELECT attn_type, a.state, traceback LIKE '%my_mixer.py%' FROM attempt a JOIN cell c ON c.id = cell_id ORDER BY 1"
    )
    assert states == [("fade", "failed", 1), ("nope", "done", None)]
    (failed,) = bench.sql("SELECT id FROM cell WHERE attn_type = 'fade'")
    status = bench.ask("status")
    assert f"failed: {cause}\n" in status
    assert f"  atma-sweep logs {failed[0]} prints the log of fade-" in status
    table = bench.ask("report", "--table", "6", "--format", "csv").splitlines()
    assert table[1].split(",")[5:12] == ["failed"] * 7


@pytest.mark.thorough
def test_plugin_that_exits_fails_its_cell_and_is_named(bench: Bench) -> None:
    (bench.folder / "my_mixer.py").write_text(
        EXAMPLE_MIXER.replace("        steps =", "        raise SystemExit(0)\n        steps =")
    )
    bench.grid(more="plugins: [my_mixer.py]\n")
    bench.edit("[nope, polar]", "[fade]")
    assert re.search(r"my_mixer.py:\d+ ended the process with exit code 0", bench.launch(code=1))
    assert bench.sql("SELECT state, failure FROM attempt") == [("failed", "code")]


@pytest.mark.thorough
def test_divergence_is_a_result_with_step_and_curve(bench: Bench) -> None:
    bench.edit("train: {", "train: {muon_lr: 1.0e+5, ")
    bench.edit("validate_every: 10", "validate_every: 1")
    bench.edit("every_steps: 7", "every_steps: 1")
    assert "diverged" in bench.launch("--only", "attn_type=nope")
    ((state, cause),) = bench.sql("SELECT state, cause FROM attempt")
    assert state == "diverged"
    match = re.fullmatch(r"(validation loss|loss|gradient norm) is not finite at step (\d+)", str(cause))
    assert match is not None
    curve = bench.sql("SELECT step, train_loss IS NOT NULL AND val_loss IS NOT NULL FROM curve_point ORDER BY step")
    assert curve == [(step, 1) for step in range(1, int(match[2]))]
    assert len(curve) > 1
    assert list((bench.folder / "atma-runs").glob("*/1/checkpoint-*")) == []
    assert "to train: 0 cells" in bench.launch("--only", "attn_type=nope")


@pytest.mark.thorough
def test_checkpoints_and_weights_lie_where_the_grid_says(bench: Bench, long_curves: Curves) -> None:
    """Stopped under one checkpoint.path, resumed under another, killed there, resumed, and measured from there."""
    arguments = ("--only", "attn_type=nope")
    bench.grid(tokens=LONG)
    bench.edit("every_steps: 7", f"every_steps: 7, path: 'file://{bench.folder}/first'")
    process = bench.start("launch", "micro.yaml", "--executor", "local", *arguments)
    bench.wait(TRAINING)
    ended(process, 143, signal.SIGTERM)
    ((cell, checkpoint),) = bench.sql("SELECT cell_id, checkpoint FROM attempt")
    assert str(checkpoint).startswith(f"{bench.folder}/first/{cell}/1/checkpoint-")
    assert (Path(str(checkpoint)) / "model.safetensors").is_file()
    assert not list((bench.folder / "atma-runs" / str(cell) / "1").glob("checkpoint-*"))

    bench.edit(f"path: 'file://{bench.folder}/first'", "path: second")  # a folder beside the grid
    process = bench.start("launch", "micro.yaml", "--executor", "local", *arguments)
    bench.wait("SELECT 1 FROM attempt WHERE number = 2 AND checkpoint IS NOT NULL")
    checkpoints = [
        len(list((bench.folder / folder / str(cell)).glob("*/checkpoint-*"))) for folder in ("first", "second")
    ]
    assert sum(checkpoints) <= 3, "two, and perhaps one more for a moment"
    bench.processes()[0].kill()
    ended(process)
    assert bench.curves() == long_curves
    assert len(bench.sql("SELECT 1 FROM event WHERE kind = 'resumed'")) == 2
    (weights,) = [row[0] for row in bench.sql("SELECT weights FROM attempt WHERE weights IS NOT NULL")]
    assert weights == f"{bench.folder}/second/{cell}/3/weights.safetensors"
    leftovers = [path for folder in ("first", "second") for path in (bench.folder / folder).glob("*/*/*")]
    assert leftovers == [Path(str(weights))]

    bench.edit("lengths: [32, 64]", "lengths: [32, 64, 128]")
    assert "to evaluate: 1" in bench.launch(*arguments)
    assert bench.sql("SELECT DISTINCT length FROM measurement WHERE attempt_id = 4 AND length > 0") == [(128,)]
    # what another database left where this attempt would write is neither taken up nor overwritten
    second_weights = bench.folder / "second" / str(cell) / "1" / "weights.safetensors"
    second_weights.parent.mkdir()
    second_weights.write_text("of another database")
    output = bench.launch(*arguments, "--db", "other.db", code=1)
    assert f"{second_weights.parent} already holds a training that is not in this database" in output
    assert second_weights.read_text() == "of another database"
    Path(str(weights)).unlink()
    bench.edit("lengths: [32, 64, 128]", "lengths: [32, 64, 256]")
    assert bench.plan()["counts"] == {"weights gone": 1, "new": 1}


@pytest.mark.thorough
@pytest.mark.parametrize(("path", "code", "message"), [
    ("nosuch://bucket/x", 2, "nosuch://bucket/x: unknown protocol nosuch; name a folder or an fsspec URL"),
    ("micro.yaml/inside", 3, "free space there or set checkpoint.path to another location, then launch again"),
])  # fmt: skip
def test_unusable_checkpoint_path_is_refused_before_training(bench: Bench, path: str, code: int, message: str) -> None:
    bench.edit("every_steps: 7", f"every_steps: 7, path: '{path}'")
    out = bench.launch(code=code)
    assert message in out.splitlines()[-1]
    assert out.splitlines()[-1].startswith("atma-sweep: ")
    assert "Traceback" not in out
    assert bench.sql("SELECT count(*) FROM attempt") == [(0,)]


@pytest.mark.thorough
def test_predicted_disk_usage_matches_the_launch(bench: Bench) -> None:
    planned = bench.plan()
    line = next(line for line in bench.launch().splitlines() if line.startswith("disk: "))
    assert re.fullmatch(
        r"disk: \d+( to \d+)? KiB of weights per cell, \d+ KiB for 2 cells \(checkpoint.keep: weights\); "
        rf"during training up to \d+ KiB per running cell; [\d.]+ .iB free in {re.escape(str(bench.folder))}/atma-runs",
        line,
    )
    weight_sizes = [path.stat().st_size for path in (bench.folder / "atma-runs").glob("*/1/weights.safetensors")]
    # a header of some thousand bytes is much for so small a model
    assert planned["disk_bytes_kept"] == pytest.approx(sum(weight_sizes), rel=0.15)
    assert planned["disk_bytes_per_cell"] == pytest.approx(max(weight_sizes), rel=0.15)
    assert bench.plan()["disk_bytes_kept"] == 0


@pytest.mark.thorough
def test_gpu_that_is_not_there_ends_before_any_attempt(bench: Bench) -> None:
    bench.grid(more="resources: {gpus: 1}\n")
    bench.env["CUDA_VISIBLE_DEVICES"] = ""
    output = bench.run("launch", "micro.yaml", code=3)
    assert "  GPU  2 cells need a GPU, and this machine has none that can be used\n" in output
    assert "resources.gpus" in output
    assert not (bench.folder / "atma.db").exists()


def test_dry_run_writes_nothing(bench: Bench) -> None:
    before = sorted(bench.folder.iterdir())
    bench.ask("launch", "micro.yaml", "--dry-run")
    assert sorted(bench.folder.iterdir()) == before


STUDY = """
search:
  pruner: asha
  trials: 12
  startup: 4
  objective: val_loss
  ranges:
    train.muon_lr: {low: 0.003, high: 0.1, log: true}
    train.clip: {low: 0.5, high: 2.0}
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_study_killed_twice_makes_each_trial_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(tokens=128 * 40, more=STUDY)
    bench.edit("axes:\n  attn_type: [nope, polar]\n", "")
    for n_trials in (3, 7):
        process = bench.start("launch", "micro.yaml", "--executor", "local")
        bench.wait(f"SELECT 1 FROM trial WHERE number = {n_trials}", process)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        trials = bench.sql("SELECT number, params FROM trial ORDER BY number")
        assert n_trials < len(trials) < 12
        plan = bench.ask("launch", "micro.yaml", "--dry-run")
        assert f"{12 - len(trials)} to propose" in plan
        bench.gone()
    bench.launch()
    assert bench.sql("SELECT number, params FROM trial ORDER BY number")[: len(trials)] == trials, "none is lost"
    rows = bench.sql("SELECT number, standing, cell_id, curve FROM trial ORDER BY number")
    assert [row[0] for row in rows] == list(range(12))
    assert {row[1] for row in rows} == {"done", "pruned"}
    assert len({row[2] for row in rows}) == len(bench.sql("SELECT id FROM cell")) == 12
    # a cell's attempts share its steps: none begins before the checkpoint that the one before it left
    assert bench.sql("SELECT COUNT(*) FROM attempt WHERE state = 'done'")[0][0] == sum(row[1] == "done" for row in rows)
    assert bench.sql("SELECT cell_id FROM attempt WHERE state = 'done' GROUP BY cell_id HAVING COUNT(*) > 1") == []
    study = json.loads(bench.ask("status", "--json"))[0]["study"]
    assert study["left"] == 0
    attempts = bench.sql("SELECT COUNT(*) FROM attempt")
    assert "12 trials" in bench.launch()
    assert bench.sql("SELECT COUNT(*) FROM attempt") == attempts


@pytest.mark.thorough
@pytest.mark.parametrize("option", [("--only", "memory=on"), ("--budget", "1h")])
def test_cell_selection_is_refused_for_a_study(tmp_path: Path, option: tuple[str, str]) -> None:
    bench = Bench(tmp_path)
    bench.grid(more=STUDY)
    bench.edit("axes:\n  attn_type: [nope, polar]\n", "")
    assert f"{option[0]} selects cells of a factorial" in bench.launch(*option, code=2)
    assert not (tmp_path / "atma.db").exists()


TUNE = """
tune:
  per: attn_type
  trials: 2
  objective: val_loss
  ranges: {train.muon_lr: {low: 0.003, high: 0.1, log: true}}
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_factorial_uses_the_best_settings_of_its_studies(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(more=TUNE, seeds=2)
    plan = bench.plan()
    assert sum("2 to propose" in str(line) for line in plan["remarks"]) == 2  # type: ignore[attr-defined]
    out = bench.launch("--budget", "100h")
    assert "tune: --budget limits the factorial alone" in out
    assert "tuned nope: trial" in out
    best = {
        level: json.loads(str(params))["train.muon_lr"]
        for level in ("nope", "polar")
        for params, _ in [
            min(
                bench.sql(
                    f"SELECT params, objectives FROM trial JOIN sweep ON id = sweep_id WHERE name = 'micro-tune-{level}'"
                ),
                key=lambda row: json.loads(str(row[1])),
            )
        ]
    }
    cells = bench.sql("SELECT attn_type, config, c.id FROM cell c JOIN revision_cell rc ON rc.cell_id = c.id JOIN revision r ON r.id = rc.revision_id "
                      "JOIN sweep s ON s.id = r.sweep_id WHERE s.name = 'micro'")  # fmt: skip
    assert len(cells) == 4
    assert all(json.loads(str(config))["train"]["muon_lr"] == best[str(level)] for level, config, _ in cells)
    # of each level two trials, and of the factorial the other seed
    assert bench.sql("SELECT COUNT(*) FROM attempt") == [(6,)]
    report = bench.ask("report", "--table", "6")
    assert "Tuned beforehand: 2 trials per level of attn_type (tpe, for val.val_loss)" in report
    assert "trial 0 of micro-tune-nope" in report or "trial 1 of micro-tune-nope" in report
    bench.launch()
    assert bench.sql("SELECT COUNT(*) FROM attempt") == [(6,)]
    assert bench.sql("SELECT MAX(number) FROM revision") == [(1,)]
    # more trials: what is best may change, and the studies go on
    bench.edit("trials: 2", "trials: 3")
    bench.launch()
    assert bench.sql("SELECT COUNT(*) FROM trial") == [(6,)]
