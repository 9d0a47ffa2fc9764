"""Pruning of checkpoints: removed and retained files, freed bytes, and safety of a kill between any two files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Attempt, Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.checkpoints import checkpoint, storage
from atma_sweep.sweep.checkpoints import prune as pruning
from atma_sweep.sweep.checkpoints.prune import prune
from atma_sweep.sweep.errors import SweepError
from factories import cell_record
from patience import PATIENCE_S

OWNER = Owner(name="ada", host="here", pid=1, started=0.0)
MODEL, OPTIMIZERS, WEIGHTS = 1000, 300, 700
serial = count()


def write(size: int, path: Path) -> None:
    path.write_bytes(bytes(size))


def bundle(folder: str | Path, step: int) -> None:
    """Write a checkpoint of 1300 bytes and its seal."""
    writers = {"model.safetensors": partial(write, MODEL), "optimizers.pt": partial(write, OPTIMIZERS)}
    facts = {"step": step, "tokens": step, "wall_s": 1.0, "pending": None}
    storage.open_storage(folder).publish(checkpoint.name_of(step), writers, facts)


class Bench:
    """A database with a sweep of cells a to f, and a runs folder."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "atma-runs"
        self.store: Store = open_store(folder / "atma.db", create=True)
        self.store.record_revision(
            "s", grid_text="x", grid_file="x", cells=[cell_record(letter) for letter in "abcdef"]
        )

    def attempt(
        self, letter: str, state: str, steps: tuple[int, ...] = (), *, weights: bool = False, home: str | None = None
    ) -> Attempt:
        """Record an attempt with checkpoints after these steps; the last one is named in the database."""
        attempt = self.store.start_attempt(letter * 12, owner=OWNER, fence=1, steps_total=100)
        address = storage.attempt_address(home, attempt.run_dir)
        full = storage.resolve(self.runs, address)
        recorder = DatabaseRecorder(self.store, attempt.id, 1)
        if home is not None:
            recorder.provenance(Provenance(config={"checkpoint": {"path": home}}, seed=0))
        for step in steps:
            bundle(full, step)
            recorder.checkpoint(storage.join(address, checkpoint.name_of(step)))
        weights_address = None
        if weights:
            storage.open_storage(full).put("weights.safetensors", partial(write, WEIGHTS))
            weights_address = storage.join(address, "weights.safetensors")
        if state == "done":
            recorder.measurements([Measurement(probe="val", metric="val_loss", value=1.0)])
        if state != "running":
            self.store.finish_attempt(attempt.id, 1, state, weights=weights_address)  # type: ignore[arg-type]
        return self.store.attempt(attempt.id)

    def fill(self) -> None:
        """Record attempts in every state, a cell for each case."""
        self.attempt("a", "interrupted", (5,))
        self.attempt("a", "done", (90, 100), weights=True)
        self.attempt("b", "diverged", (7,))
        self.attempt("c", "interrupted", (5, 10))
        self.attempt("c", "failed", (15,))
        self.attempt("c", "interrupted", (20, 25))
        self.attempt("d", "interrupted", (3, 6, 9))
        self.attempt("d", "running", (12,))
        self.attempt("e", "done", weights=True)
        self.attempt("e", "interrupted", (30,))

    def names(self, letter: str = "?") -> list[str]:
        """Return checkpoints and weights in the runs folder; c/2/15 is the one after step 15 of c's second attempt."""
        names = []
        for path in sorted(self.runs.glob(f"{letter}*/*/*")):
            key = f"{path.parts[-3][0]}/{path.parts[-2]}"
            names.append(f"{key}/{path.name.removeprefix('checkpoint-').lstrip('0').removesuffix('.safetensors')}")
        return names

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.runs.rglob("*") if path.is_file())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    case = Bench(tmp_path)
    yield case
    case.store.close()


def test_prune_patterns_match_checkpoint_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    name = checkpoint.save(tmp_path, model, {"a": 1}, step=12, tokens=1, wall_s=1.0)
    checkpoint.save_weights(tmp_path / checkpoint.WEIGHTS, model)
    assert set(os.listdir(tmp_path / name)) == pruning.CHECKPOINT_FILES
    assert pruning.CHECKPOINT.fullmatch(name)
    assert pruning.CHECKPOINT.fullmatch(checkpoint.name_of(123_456_789))
    assert set(os.listdir(tmp_path)) == {name, checkpoint.WEIGHTS}
    seen: list[str] = []

    def spy(path: Path) -> None:
        seen.extend(os.listdir(tmp_path))
        path.touch()

    storage.open_storage(tmp_path).publish(checkpoint.name_of(13), {"x": spy}, {})
    storage.open_storage(tmp_path).put(checkpoint.WEIGHTS, spy)
    assert [name for name in seen if pruning.UNFINISHED.fullmatch(name)] == [".checkpoint-00000013.part"]
    storage.open_storage(tmp_path).put(checkpoint.WEIGHTS, lambda path: seen.append(path.name) or path.touch())  # type: ignore[func-returns-value]
    assert seen[-1] == pruning.UNFINISHED_WEIGHTS


AFTER_KEEP_NEWEST = ["a/2/weights", "c/3/20", "c/3/25", "d/1/3", "d/1/6", "d/1/9", "d/2/12", "e/1/weights", "e/2/30"]
AFTER_KEEP_WEIGHTS = ["a/2/weights", "d/1/3", "d/1/6", "d/1/9", "d/2/12", "e/1/weights"]
AFTER_KEEP_NOTHING = ["d/1/3", "d/1/6", "d/1/9", "d/2/12"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("keep", "remaining"),
    [("newest", AFTER_KEEP_NEWEST), ("weights", AFTER_KEEP_WEIGHTS), ("nothing", AFTER_KEEP_NOTHING)],
)
def test_what_goes_and_what_stays(bench: Bench, keep: Any, remaining: list[str]) -> None:
    bench.fill()
    part = bench.runs / ("c" * 12) / "2" / ".checkpoint-00000017.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(bytes(50))
    before, names = bench.size(), bench.names()
    looked = prune(bench.store, bench.runs, keep=keep, dry=True)
    assert (bench.size(), bench.names(), len(bench.store.events(sweep="s"))) == (before, names, 19)
    done = prune(bench.store, bench.runs, "s", keep=keep)
    assert bench.names() == remaining
    assert done.bytes == before - bench.size() > 0
    assert (done.cells, done.bytes) == (looked.cells, looked.bytes)
    assert (done.sweep, done.keep, list(done.running), done.problems) == ("s", keep, ["slug-d"], [])
    rows = {row.slug[-1]: row for row in done.cells}
    assert rows["a"].checkpoints == 3
    assert (rows["b"].checkpoints, rows["b"].standing, rows["b"].starts_over) == (1, "diverged", False)
    assert (rows["c"].checkpoints, rows["c"].starts_over) == (4 if keep == "newest" else 6, keep != "newest")
    assert ("e" in rows) == (keep != "newest")
    assert {row.slug[-1]: row.weights for row in done.cells if row.weights} == (
        {"a": 1, "e": 1} if keep == "nothing" else {}
    )
    assert [event.message for event in bench.store.events(sweep="s")][-1].endswith(f"(keep {keep})")
    again = prune(bench.store, bench.runs, "s", keep=keep)
    assert (list(again.cells), again.bytes, bench.names()) == ([], 0, remaining)
    assert len(bench.store.events(sweep="s")) == 20


def test_prune_forgets_weights_before_removal(bench: Bench) -> None:
    bench.fill()
    prune(bench.store, bench.runs, keep="weights")
    assert bench.store.cell_states("s")[0].weights == f"{'a' * 12}/2/weights.safetensors"
    prune(bench.store, bench.runs, keep="nothing", dry=True)
    assert bench.store.cell_states("s")[0].weights is not None
    prune(bench.store, bench.runs, keep="nothing")
    assert [state.weights for state in bench.store.cell_states("s")] == [None] * 6


def test_prune_keeps_record_of_remote_weights(bench: Bench, tmp_path: Path) -> None:
    bench.attempt("a", "done", (5,), weights=True)
    report = prune(bench.store, tmp_path / "elsewhere", keep="nothing")
    assert (list(report.cells), report.problems) == ([], [])
    assert bench.store.cell_states("s")[0].weights is not None


def test_prune_keeps_damaged_checkpoint_if_none_is_intact(bench: Bench) -> None:
    attempt = bench.attempt("c", "interrupted", (5, 10, 15, 20))
    folder = bench.runs / attempt.run_dir
    with (folder / "checkpoint-00000020" / "model.safetensors").open("r+b") as file:
        file.write(b"x")
    (folder / "checkpoint-00000015" / "optimizers.pt").unlink()
    (folder / "checkpoint-00000005" / "state.json").unlink()
    report = prune(bench.store, bench.runs)
    assert bench.names() == ["c/1/10"]
    assert report.cells[0].checkpoints == 3
    (folder / "checkpoint-00000010" / "state.json").write_text("{}")
    assert list(prune(bench.store, bench.runs).cells) == []
    assert bench.names() == ["c/1/10"], "the disk may read it tomorrow"
    assert prune(bench.store, bench.runs, keep="weights").cells[0].starts_over is False, (
        "there was nothing to go on from"
    )
    assert bench.names() == []


def test_prune_keeps_unexpected_files(bench: Bench, tmp_path: Path) -> None:
    attempt = bench.attempt("b", "diverged", (5, 10, 15))
    folder = bench.runs / attempt.run_dir
    mine = tmp_path / "mine"
    bundle(tmp_path, 1)
    os.rename(tmp_path / "checkpoint-00000001", mine)
    (folder / "checkpoint-00000010" / "notes.txt").write_text("precious")
    for name in (
        "checkpoint-best",
        "checkpoint-00000020.bak",
        "weights.safetensors.mine",
        ".checkpoint-x.part",
        "log.txt",
    ):
        (folder / name).write_text("precious")
    os.symlink(mine, folder / "checkpoint-00000030")
    (folder / "checkpoint-00000040").write_text("a file")
    before = {path.name for path in folder.iterdir()} - {"checkpoint-00000005", "checkpoint-00000015"}
    report = prune(bench.store, bench.runs, keep="nothing")
    assert {path.name for path in folder.iterdir()} == before
    assert len(list(mine.iterdir())) == 3
    assert report.cells[0].checkpoints == 2
    (problem,) = report.problems
    assert "checkpoint-00000010 is not a plain checkpoint (notes.txt) and was kept" in problem
    assert "checkpoint-00000030 is not a plain checkpoint (a link)" in problem
    assert "checkpoint-00000040 is not a plain checkpoint (no folder)" in problem
    assert any("notes.txt" in line for line in report.lines())


def test_prune_skips_cell_of_new_launch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.attempt("c", "interrupted", (5, 10, 15))
    real = pruning.is_sound

    def slow(location: storage.Storage, name: str) -> bool:
        if not bench.store.live_attempts():
            bench.store.start_attempt("c" * 12, owner=OWNER, fence=2)
        return real(location, name)

    monkeypatch.setattr(pruning, "is_sound", slow)
    report = prune(bench.store, bench.runs)
    assert (list(report.cells), list(report.running)) == ([], ["slug-c"])
    assert bench.names() == ["c/1/5", "c/1/10", "c/1/15"]


def test_prune_includes_orphans_on_request(bench: Bench) -> None:
    bench.attempt("b", "diverged", (5,))
    bench.store.record_revision("s", grid_text="y", grid_file="x", cells=[cell_record("a")])
    assert list(prune(bench.store, bench.runs).cells) == []
    assert [row.slug for row in prune(bench.store, bench.runs, orphans=True).cells] == ["slug-b"]


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_prune_storage_outside_runs_folder(bench: Bench, tmp_path: Path, kind: str) -> None:
    home = str(tmp_path / "big disk") if kind == "folder" else f"memory://prune{next(serial)}"
    first = bench.attempt("c", "interrupted", (5, 10), home=home)
    second = bench.attempt("c", "interrupted", (15,), home=home)
    bench.attempt("a", "done", (3,), weights=True, home=home)
    bench.attempt("f", "interrupted", home=home)  # known by its provenance alone

    def names(attempt: Attempt) -> list[str]:
        return storage.open_storage(storage.join(home, attempt.run_dir)).names()

    assert pruning.checkpoint_address(bench.store, bench.store.attempts("f" * 12)[0]) == f"{home}/{'f' * 12}/1"
    done = bench.store.attempts("a" * 12)[0]
    seal = len(json.dumps({"step": 5, "tokens": 5, "wall_s": 1.0, "pending": None, "sha256": {
        "model.safetensors": "0" * 64, "optimizers.pt": "0" * 64}, "seal": "0" * 64}))  # fmt: skip
    report = prune(bench.store, bench.runs)
    assert report.bytes == 2 * (MODEL + OPTIMIZERS + seal)
    assert (names(first), names(second)) == (["checkpoint-00000010"], ["checkpoint-00000015"])
    assert names(done) == ["weights.safetensors"]
    assert prune(bench.store, bench.runs, keep="nothing").bytes == 2 * (MODEL + OPTIMIZERS + seal + 2) + WEIGHTS
    assert (names(first), names(second), names(done)) == ([], [], [])
    assert bench.store.attempts("a" * 12)[0].weights is None


def test_prune_reports_unreachable_storage_per_cell(bench: Bench) -> None:
    attempt = bench.store.start_attempt("a" * 12, owner=OWNER, fence=1)
    DatabaseRecorder(bench.store, attempt.id, 1).checkpoint("tape://drive/a/1/checkpoint-00000005")
    bench.store.finish_attempt(attempt.id, 1, "diverged")
    bench.attempt("b", "diverged", (5,))
    report = prune(bench.store, bench.runs)
    assert [row.slug for row in report.cells] == ["slug-a", "slug-b"]
    assert (report.cells[0].checkpoints, report.cells[1].checkpoints) == (0, 1)
    assert len(report.problems) == 1
    assert report.problems[0].startswith("slug-a: tape://")


def test_prune_report_as_text_and_json(bench: Bench) -> None:
    bench.fill()
    report = prune(bench.store, bench.runs, keep="weights", dry=True)
    lines = report.lines()
    assert re.fullmatch(
        r"c{12} slug-c \(interrupted\): 5 checkpoints, \d\.\d KiB; starts over at the next launch", lines[2]
    )
    assert re.fullmatch(r"s: would free \d+ KiB of 4 cells \(keep weights\); 1 running cells skipped", lines[-1])
    payload = report.as_json()
    assert json.loads(json.dumps(payload)) == payload
    assert (payload["bytes"], payload["dry"], payload["running"]) == (report.bytes, True, ["slug-d"])
    assert payload["cells"][0] | {"bytes": 0} == {
        "cell_id": "a" * 12, "slug": "slug-a", "standing": "done", "checkpoints": 3, "weights": 0, "bytes": 0,
        "starts_over": False, "problem": "",
    }  # fmt: skip
    with pytest.raises(SweepError, match="--keep all: no such choice; choose one of: newest, weights, nothing"):
        prune(bench.store, bench.runs, keep="all")  # type: ignore[arg-type]


# --- kills ----------------------------------------------------------------------------------------------------------

TESTING = str(Path(__file__).resolve().parents[2] / "testing")
MORTAL = """
import gc, json, shutil, signal, sys
from functools import partial
from pathlib import Path
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.checkpoints.prune import prune, is_sound
from atma_sweep.sweep.checkpoints import storage
sys.path.insert(0, sys.argv[4])
from mortal import die_before, in_child, is_within

real = Store.write
whole, work, keep = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def pruned(point=None):
    if point is not None:
        die = die_before(point, partial(is_within, work, changes=("os.remove", "os.rmdir")))
        Store.write = lambda *given, **options: die() or real(*given, **options)
    store = open_store(work / "atma.db")
    prune(store, work / "atma-runs", "s", keep=keep)
    store.close()

def wrong():
    store = open_store(work / "atma.db")
    found = []
    for state in store.cell_states("s"):
        for attempt in store.attempts(state.cell_id):
            if attempt.weights and not storage.exists(storage.resolve(work / "atma-runs", attempt.weights)):
                found.append("named, but gone: " + attempt.weights)
    store.close()
    for path in (work / "atma-runs").glob("*/*/checkpoint-*"):
        if (path / "state.json").exists() and not is_sound(storage.open_storage(path.parent), path.name):
            found.append("half of it, with a seal: " + str(path))
    if keep == "newest":
        for step in (15, 20):
            if not is_sound(storage.open_storage(work / "atma-runs" / ("c" * 12) / "2"), f"checkpoint-{step:08d}"):
                found.append(f"needed, but gone: {step}")
    return found

def tree():
    return sorted(str(path.relative_to(work)) for path in (work / "atma-runs").rglob("*"))

def fresh():
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work)

fresh()
pruned()  # in this process, so that the others need not import what it does
expected, told = tree(), []
gc.freeze()
for point in range(1, 1000):
    fresh()
    code = in_child(partial(pruned, point))
    if code != -signal.SIGKILL:
        assert code == 0
        break
    told += [f"{point}: {line}" for line in wrong()]
    pruned()
    if tree() != expected:
        told.append(f"{point}: not finished by the next run")
    told += [f"{point}, afterwards: {line}" for line in wrong()]
print(json.dumps({"points": point - 1, "wrong": told}))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("keep", "changes"), [
    ("newest", 3 * 4 + 1), ("nothing", 5 * 4 + 1 + 2)
])  # fmt: skip
def test_prune_survives_kill_between_any_two_files(tmp_path: Path, keep: str, changes: int) -> None:
    full_folder = tmp_path / "whole"
    full_folder.mkdir()
    bench = Bench(full_folder)
    bench.attempt("a", "done", (100,), weights=True)
    bench.attempt("c", "interrupted", (5,))
    bench.attempt("c", "interrupted", (10, 15, 20))
    bench.store.close()
    run = subprocess.run([sys.executable, "-c", MORTAL, str(full_folder), str(tmp_path / "work"), keep, TESTING], capture_output=True,
                         text=True, timeout=PATIENCE_S)  # fmt: skip
    assert run.returncode == 0, run.stderr
    payload = json.loads(run.stdout)
    # three files and the folder of each checkpoint, each file of weights; and what is written to the database
    assert payload == {"points": changes, "wrong": []}
