"""Whole launches in processes of their own: what a user types, what is killed, what the database says afterwards."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "atma_sweep.cli"]
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "long",
    "row",
    "of",
    "bytes",
    "and",
    "guesses",
    "what",
    "comes",
    "next",
    "from",
    "all",
    "that",
    "it",
    "has",
    "seen",
    "so",
    "far",
]
MICRO = """
name: micro
extends: tiny
axes:
  attn_type: [nope, polar]
seeds: {seeds}
set:
  model: {{d_model: 16, n_layers: 3, n_heads: 2, n_kv_heads: 1, head_dim: 8, window_size: 8}}
  data: {{corpus: files, path: {text}, heldout_tokens: 400}}
  train: {{tokens: {tokens}, seq_len: 32, batch_tokens: 128, micro_batch: 2}}
  eval: {{lengths: [32, 64], documents: 2, junk_rows: 2, needle_trials: 2, validate_every: 10, validation_tokens: 256}}
  checkpoint: {{every_steps: 7}}
"""
LONG = 128 * 150
VERY_LONG = 128 * 1000
"""Long enough for another launch to start meanwhile."""
TRAINING = "SELECT 1 FROM attempt WHERE phase = 'training' AND checkpoint IS NOT NULL"
Curves = dict[str, list[tuple[object, ...]]]


class Bench:
    """A folder with a grid, some text, and a database; commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        draw = random.Random(0)
        text = folder / "text"
        text.mkdir()
        for index in range(40):
            (text / f"{index}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(300)))
        self.grid()

    def grid(self, *, tokens: int = 128 * 12, seeds: int = 1, more: str = "", name: str = "micro") -> Path:
        text = MICRO.format(text=self.folder / "text", tokens=tokens, seeds=seeds)
        path = self.folder / f"{name}.yaml"
        path.write_text(text.replace("name: micro", f"name: {name}") + more)
        return path

    def edit(self, old: str, new: str) -> None:
        path = self.folder / "micro.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*COMMAND, *arguments]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        out, _ = process.communicate(timeout=240)
        assert process.returncode == code, out
        return out

    def launch(self, *arguments: str, code: int = 0, executor: str = "local") -> str:
        return self.run("launch", "micro.yaml", "--executor", executor, *arguments, code=code)

    def plan(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.run("launch", "micro.yaml", "--dry-run", "--json"))
        return found

    def sql(self, query: str) -> list[tuple[object, ...]]:
        with sqlite3.connect(self.folder / "atma.db", timeout=30) as connection:
            return connection.execute(query).fetchall()

    def wait(self, query: str, seconds: float = 90) -> None:
        """Until the query gives a row."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.sql(query):
                    return
            except sqlite3.OperationalError:
                pass  # the database is only just being made
            time.sleep(0.02)
        raise AssertionError(f"never true: {query}")

    def curves(self) -> Curves:
        """By slug: the curve of the finished training, without what depends on the clock."""
        rows = self.sql(
            "SELECT slug, p.step, tokens, train_loss, val_loss, grad_norm, lr FROM curve_point p "
            "JOIN attempt a ON a.id = attempt_id JOIN cell c ON c.id = cell_id "
            "WHERE a.state = 'done' ORDER BY slug, p.step"
        )
        found: Curves = {}
        for slug, *point in rows:
            found.setdefault(str(slug), []).append(tuple(point))
        return found

    def once(self, cells: int) -> None:
        """Every cell has one finished training, and every number of it stands once."""
        done = self.sql("SELECT count(*) FROM attempt WHERE kind='train' AND state='done' GROUP BY cell_id")
        assert done == [(1,)] * cells
        assert self.sql("SELECT count(*) FROM attempt WHERE state = 'running'") == [(0,)]
        values = self.sql(
            "SELECT count(DISTINCT cell), max(n) FROM (SELECT cell, count(*) AS n FROM results "
            "WHERE probe = 'val' AND metric = 'val_loss' GROUP BY sweep, cell)"
        )
        assert values == [(cells, 1)]

    def processes(self) -> list[psutil.Process]:
        """Attempts of this bench that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if "atma_sweep.sweep.job" in line and any(str(self.folder) in part for part in line):
                found.append(process)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def long_curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """The curves of an uninterrupted run of the grid that the killing tests use."""
    bench = Bench(tmp_path_factory.mktemp("whole"))
    bench.grid(tokens=LONG)
    bench.launch()
    return bench.curves()


def test_launch_twice_trains_once_and_a_new_level_only_itself(bench: Bench) -> None:
    assert "micro: 2 done" in bench.launch()
    bench.once(2)
    assert "to train: 0 cells" in bench.launch()
    bench.once(2)
    bench.grid(seeds=2)
    plan = bench.plan()
    assert plan["counts"] == {"done": 2, "new": 2}
    assert plan["tokens"] == 2 * 128 * 12
    bench.launch()
    bench.once(4)
    assert bench.sql("SELECT max(number) FROM attempt") == [(1,)]


def test_measured_numbers_reach_sql_and_the_table(bench: Bench) -> None:
    bench.launch()
    kinds = bench.sql("SELECT DISTINCT probe, metric, length FROM results WHERE slug LIKE 'polar%' ORDER BY 1, 2, 3")
    assert [kind for kind in kinds if kind[0] == "clean"] == [("clean", "nats", 32), ("clean", "nats", 64)]
    needle = {kind[1] for kind in kinds if kind[0] == "needle"}
    assert needle == {"digit_accuracy", "exact_accuracy", "nats", "absent_nats"}
    assert {kind[1] for kind in kinds if kind[0] == "val"} == {"val_loss", "val_loss_full"}
    mfu = bench.sql("SELECT DISTINCT value, reason FROM measurement WHERE metric IN ('mfu', 'mfu_paper')")
    assert mfu == [(None, "n/a: no peak FLOP/s known for the CPU")]
    rows = json.loads(bench.run("report", "--table", "6", "--json"))
    assert [row["attn_type"] for row in rows] == ["nope", "polar"]
    last = bench.sql("SELECT val_loss FROM curve_point WHERE step = 12 ORDER BY attempt_id")
    assert [row["values"][0]["value"] for row in rows] == [value for (value,) in last]
    config, fingerprint, threads = bench.sql("SELECT config, corpus_fingerprint, threads FROM provenance LIMIT 1")[0]
    assert json.loads(str(config))["data"]["fingerprint"] == fingerprint
    assert threads == 1
    assert bench.sql("SELECT count(*) FROM example WHERE probe = 'clean' AND length = 64") == [(2 * 2,)]


def test_added_lengths_are_evaluated_from_kept_weights(bench: Bench) -> None:
    bench.launch()
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


def test_lost_weights_are_said_and_retrained_only_on_request(bench: Bench) -> None:
    bench.launch("--only", "attn_type=nope")
    (weights,) = (bench.folder / "atma-runs").glob("*/1/weights.safetensors")
    weights.unlink()
    bench.edit("lengths: [32, 64]", "lengths: [32, 128]")
    out = bench.launch("--only", "attn_type=nope", code=1)
    assert "1 weights gone" in out
    assert "--retrain" in out
    bench.launch("--only", "attn_type=nope", "--retrain")
    assert bench.sql("SELECT count(*) FROM attempt WHERE kind = 'train' AND state = 'done'") == [(2,)]


def test_a_revision_is_added_when_the_grid_or_its_requests_change(bench: Bench) -> None:
    bench.launch("--only", "attn_type=nope")
    bench.launch("--only", "attn_type=polar")
    assert bench.sql("SELECT number FROM revision") == [(1,)]
    bench.grid(more="# a remark\n")
    bench.launch()
    assert bench.sql("SELECT number FROM revision") == [(1,), (2,)]
    changed = ("--set", "eval.lengths=[32, 128]", "--name", "longer")
    bench.launch(*changed)
    bench.launch("--set", "eval.lengths=[32, 256]", "--name", "longer")
    asked = bench.sql(
        "SELECT s.name, r.number, json_array_length(options, '$.requested') FROM revision r "
        "JOIN sweep s ON s.id = sweep_id ORDER BY r.id"
    )
    assert asked == [("micro", 1, 7), ("micro", 2, 7), ("longer", 1, 7), ("longer", 2, 7)]
    bench.once(2)


def test_two_sweeps_that_share_a_cell_train_it_once(bench: Bench) -> None:
    bench.launch()
    bench.grid(name="other", seeds=2)
    assert "to train: 2 cells" in bench.run("launch", "other.yaml", "--executor", "local")
    counts = bench.sql("SELECT sweep, count(DISTINCT cell) FROM results GROUP BY 1 ORDER BY 1")
    assert counts == [("micro", 2), ("other", 4)]
    assert bench.sql("SELECT count(*) FROM attempt") == [(4,)]


def test_a_cell_that_another_sweep_is_training_is_waited_for(bench: Bench) -> None:
    bench.grid(tokens=VERY_LONG)
    bench.edit("every_steps: 7", "every_steps: 1000")
    other = (bench.folder / "micro.yaml").read_text().replace("name: micro", "name: other")
    (bench.folder / "other.yaml").write_text(other)
    one = ("--executor", "local", "--only", "attn_type=nope")
    first = bench.start("launch", "micro.yaml", *one)
    bench.wait("SELECT 1 FROM attempt WHERE phase = 'training'")
    out = bench.run("launch", "other.yaml", *one)
    assert "is being trained by another sweep" in out
    assert "other: 1 done" in out
    first.communicate(timeout=60)
    assert first.returncode == 0
    bench.once(1)
    assert bench.sql("SELECT count(*) FROM attempt") == [(1,)]


def test_interrupt_saves_marks_and_the_next_launch_continues(bench: Bench, long_curves: Curves) -> None:
    bench.grid(tokens=LONG)
    process = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait(TRAINING)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    assert time.monotonic() - began < 10
    assert "launch again to continue" in out
    assert bench.sql("SELECT state, cause FROM attempt") == [("interrupted", "stopped on request")]
    assert bench.processes() == []
    assert bench.sql("SELECT owner FROM sweep") == [(None,)]
    bench.launch()
    bench.once(2)
    assert len(bench.sql("SELECT 1 FROM event WHERE kind = 'resumed'")) == 1
    assert bench.curves() == long_curves


def _kill(bench: Bench, executor: str, victim: Callable[[subprocess.Popen[str]], None]) -> subprocess.Popen[str]:
    bench.grid(tokens=LONG)
    process = bench.start("launch", "micro.yaml", "--executor", executor)
    bench.wait(TRAINING)
    victim(process)
    return process


def test_killed_launch_on_ray_is_continued_to_the_same_curves(bench: Bench, long_curves: Curves) -> None:
    process = _kill(bench, "ray", lambda process: process.kill())
    process.communicate(timeout=60)
    bench.launch(executor="ray")
    bench.once(2)
    assert bench.processes() == []
    assert bench.curves() == long_curves
    assert ("interrupted",) in bench.sql("SELECT DISTINCT state FROM attempt WHERE number = 1")


def test_killed_trainer_is_tried_again_within_the_launch(bench: Bench, long_curves: Curves) -> None:
    process = _kill(bench, "local", lambda _: bench.processes()[0].kill())
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    bench.once(2)
    assert bench.curves() == long_curves
    first = bench.sql("SELECT state, cause, exit_code FROM attempt ORDER BY id LIMIT 1")
    assert first == [("interrupted", "process killed by SIGKILL (out of memory, or by hand)", -9)]


def test_damaged_newest_checkpoint_is_passed_over(bench: Bench, long_curves: Curves) -> None:
    process = _kill(bench, "local", lambda process: process.send_signal(signal.SIGTERM))
    process.communicate(timeout=30)
    assert process.returncode == 143
    older, newest = sorted((bench.folder / "atma-runs").glob("*/1/checkpoint-*"))
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    bench.launch()
    bench.once(2)
    assert bench.curves() == long_curves
    ((message,),) = bench.sql("SELECT message FROM event WHERE kind = 'resumed'")
    assert message == f"from step {int(older.name.removeprefix('checkpoint-'))} of attempt 1"


def test_second_launch_of_a_running_sweep_names_the_first(bench: Bench) -> None:
    bench.grid(tokens=10 * VERY_LONG)
    first = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait("SELECT 1 FROM attempt WHERE phase = 'training'")
    out = bench.launch(code=3)
    assert f"pid {first.pid}" in out
    assert len(out.strip().splitlines()) == 1
    status = json.loads(bench.run("status", "--json"))
    assert status[0]["owner"] is not None
    assert sum(cell["standing"] == "running" for cell in status[0]["cells"]) == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PLUGIN = re.findall(r"^```python\n(# my_mixer.py\n.*?)^```$", README, re.MULTILINE | re.DOTALL)[0]
"""The mixer that the README shows, to the letter."""


def test_plugin_mixer_trains_and_appears_in_the_table(bench: Bench) -> None:
    (bench.folder / "my_mixer.py").write_text(PLUGIN)
    bench.grid(more="plugins: [my_mixer.py]\n")
    bench.edit("[nope, polar]", "[fade, nope]")
    bench.edit("set:\n", "set:\n  model.mixers.fade.keep: 0.8\n")
    bench.launch()
    rows = json.loads(bench.run("report", "--table", "6", "--json"))
    assert [row["attn_type"] for row in rows] == ["fade", "nope"]
    assert rows[0]["values"][0]["value"] < math.log(264)
    ((config,),) = bench.sql("SELECT config FROM cell WHERE attn_type = 'fade'")
    assert json.loads(str(config))["model"]["mixers"] == {"fade": {"canon": True, "keep": 0.8}}
    # an edited plugin is another mixer: a new cell; the cell without it stays
    (bench.folder / "my_mixer.py").write_text(PLUGIN.replace("Mean of", "A mean of"))
    assert bench.plan()["counts"] == {"new": 1, "done": 1}


def test_failing_cell_is_told_and_the_others_go_on(bench: Bench) -> None:
    (bench.folder / "my_mixer.py").write_text(PLUGIN.replace("        steps =", "        1 / 0\n        steps ="))
    bench.grid(more="plugins: [my_mixer.py]\n")
    bench.edit("[nope, polar]", "[fade, nope]")
    assert "ZeroDivisionError: division by zero" in bench.launch(code=1)
    states = bench.sql(
        "SELECT attn_type, a.state, traceback LIKE '%my_mixer.py%' FROM attempt a JOIN cell c ON c.id = cell_id ORDER BY 1"
    )
    assert states == [("fade", "failed", 1), ("nope", "done", None)]
    assert "failed: ZeroDivisionError: division by zero" in bench.run("status")
    table = bench.run("report", "--table", "6", "--format", "csv").splitlines()
    assert table[1].split(",")[5:12] == ["failed"] * 7


def test_divergence_is_a_result(bench: Bench) -> None:
    bench.edit("train: {", "train: {muon_lr: 1.0e+38, ")
    assert "diverged" in bench.launch("--only", "attn_type=nope")
    ((state, cause),) = bench.sql("SELECT state, cause FROM attempt")
    assert state == "diverged"
    assert "is not finite at step" in str(cause)
    assert "to train: 0 cells" in bench.launch("--only", "attn_type=nope")


def test_gpu_that_is_not_there_ends_before_any_attempt(bench: Bench) -> None:
    bench.grid(more="resources: {gpus: 1}\n")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [*COMMAND, "launch", "micro.yaml"]
    result = subprocess.run(command, cwd=bench.folder, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 3
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("atma-sweep: no usable CUDA GPU: ")
    assert "resources.gpus" in message
    assert bench.sql("SELECT count(*) FROM attempt") == [(0,)]


def test_dry_run_writes_nothing(bench: Bench) -> None:
    before = sorted(bench.folder.iterdir())
    bench.run("launch", "micro.yaml", "--dry-run")
    assert sorted(bench.folder.iterdir()) == before
