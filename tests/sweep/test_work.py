"""Attempts in this process: where their state goes, what is left of it, and that a place far away does as well."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.results.records import Attempt, CurvePoint
from atma_sweep.results.store import Store, open_store
from atma_sweep.sweep import planner, process, texts
from atma_sweep.sweep.cell import Cell
from atma_sweep.sweep.grid import load_grid
from atma_sweep.sweep.job import Job
from atma_sweep.sweep.probes import requested
from atma_sweep.sweep.supervisor import Supervisor
from atma_sweep.sweep.training import checkpoint, storage
from atma_sweep.sweep.training.loop import Stopped
from atma_sweep.sweep.work import Work
from bench import Bench
from fsspec.implementations.memory import MemoryFileSystem

serial = itertools.count()
STEPS = 12


class Flag:
    """A stop flag that sets itself when it is read for the n-th time."""

    def __init__(self, after: int | None) -> None:
        self.reads, self.after = 0, after

    @property
    def set(self) -> bool:
        self.reads += 1
        return self.after is not None and self.reads >= self.after


@dataclass
class Room:
    """A database, a runs folder and one cell; attempts run one after another, as the supervisor would ask for them."""

    store: Store
    runs: Path
    cell: Cell
    works: list[Work] = field(default_factory=list)
    saved: list[list[str]] = field(default_factory=list)
    """After each save, the checkpoints of all attempts."""

    def asked(self, kind: str, config: dict[str, Any], weights: str | None) -> Job:
        attempt = self.store.start_attempt(
            self.cell.id,
            kind=kind,  # type: ignore[arg-type]
            owner=process.this_process("launch"),
            fence=0,
        )
        task = planner.Task(self.cell, kind, [], "new")
        supervisor = Supervisor(self.store, "g", 0, None, None, runs=self.runs, commit=(None, None))  # type: ignore[arg-type]
        return Job(
            attempt=attempt.id, fence=0, cell=self.cell.id, slug=self.cell.slug, kind=kind, folder=attempt.run_dir,
            config=config, missing=requested(self.cell.config.eval), resume=list(supervisor._resumable(task, attempt)),
            weights=weights,
        )  # fmt: skip

    def run(
        self, kind: str = "train", *, stop: int | None = None, weights: str | None = None, **settings: Any
    ) -> Attempt:
        """One attempt with the given checkpoint settings, stopped when the flag is read for the `stop`-th time."""
        config = self.cell.config.model_dump(mode="json")
        config["checkpoint"] |= settings
        job = self.asked(kind, config, weights)
        work = Work(job, self.runs, self.store, Flag(stop))  # type: ignore[arg-type]
        self.works.append(work)
        save = work.save

        def spy(*arguments: Any) -> None:
            save(*arguments)
            self.saved.append([name for one in self.works for name in checkpoint.found(one._place)])

        work.save = spy  # type: ignore[method-assign]
        try:
            work.run(time.monotonic())
        except Stopped:
            self.store.finish_attempt(job.attempt, 0, "interrupted")
        else:
            self.store.finish_attempt(job.attempt, 0, "done", weights=work.weights)
            work.clean()
        return self.store.attempt(job.attempt)

    def curve(self, attempt: Attempt) -> list[tuple[float | None, ...]]:
        def bare(point: CurvePoint) -> tuple[float | None, ...]:
            return point.step, point.train_loss, point.val_loss, point.grad_norm, point.lr

        return [bare(point) for point in self.store.curve(attempt.id)]

    def names(self, attempt: Attempt) -> list[str]:
        """What lies in the attempt's place, the supervisor's own files aside."""
        work = self.works[attempt.number - 1]
        return [name for name in storage.place(work._place).names() if name not in ("job.json", "log.txt")]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of one cell with its text prepared."""
    bench = Bench(tmp_path_factory.mktemp("grid"))
    bench.edit("[nope, polar]", "[polar]")
    bench.edit("every_steps: 7", "every_steps: 2")
    bench.edit("validate_every: 10", "validate_every: 1")
    bench.edit("validation_tokens: 256", "validation_tokens: 64")
    return bench.folder / "micro.yaml"


@pytest.fixture
def room(grid: Path, tmp_path: Path) -> Callable[..., Room]:
    def make(*sets: str) -> Room:
        loaded = load_grid(grid, sets=sets, rename="g")
        (cell,), _ = texts.expand(loaded, grid.parent / "corpora")
        store = open_store(tmp_path / f"{next(serial)}.db", create=True)
        store.record_revision("g", grid_text="", grid_file="g.yaml", options={}, cells=[planner.record(cell)])
        store.runs.mkdir()
        (store.runs / "corpora").symlink_to(grid.parent / "corpora")
        return Room(store, store.runs, cell)

    return make


@pytest.fixture
def far() -> str:
    """A place that only this process has."""
    return f"memory://far-{next(serial)}"


def test_an_attempt_far_away_is_stopped_continued_and_evaluated(room: Callable[..., Room], far: str) -> None:
    plain = room()
    whole = plain.run()
    ours = room()
    first = ours.run(stop=11, path=far)
    assert (first.state, first.checkpoint) == ("interrupted", f"{far}/{ours.cell.id}/1/checkpoint-00000003")
    second = ours.run(path=far)
    assert second.state == "done"
    assert second.weights == f"{far}/{ours.cell.id}/2/weights.safetensors"
    assert ours.curve(second) == plain.curve(whole)
    assert len(ours.curve(second)) == STEPS
    assert [event.message for event in ours.store.events() if event.kind == "resumed"] == ["from step 3 of attempt 1"]
    assert (ours.names(first), ours.names(second)) == ([], ["weights.safetensors"])
    assert not list(ours.runs.rglob("*.safetensors"))

    third = ours.run("evaluate", weights=second.weights)
    again = {
        (v.probe, v.metric, v.length): v.value for v in ours.store.measurements(ours.cell.id) if v.metric == "nats"
    }
    straight = {(v.probe, v.metric, v.length): v.value for v in plain.store.measurements(plain.cell.id)}
    assert {v.attempt_id for v in ours.store.measurements(ours.cell.id) if v.metric == "nats"} == {third.id}
    assert again == {key: value for key, value in straight.items() if key[1] == "nats"}
    assert again


def test_stops_do_not_pile_up_checkpoints(room: Callable[..., Room], far: str) -> None:
    """Whatever the places of the attempts, two checkpoints are left after each save: the newest and the one before."""
    ours = room()
    for stop, settings in ((8, {}), (6, {"path": far}), (6, {}), (4, {"path": far}), (None, {})):
        ours.run(stop=stop, **settings)
    assert all(len(names) <= 2 for names in ours.saved)
    written = [int(max(names).removeprefix("checkpoint-")) for names in ours.saved]
    assert written == sorted(written)
    assert written[-1] == STEPS
    for before, after in itertools.pairwise(ours.saved):
        assert max(before) in after or max(before) == max(after), "the one before stays"
    plain = room()
    assert ours.curve(ours.store.attempts(ours.cell.id)[-1]) == plain.curve(plain.run())


@pytest.mark.parametrize(("keep", "left"), [
    ("nothing", []),
    ("weights", ["weights.safetensors"]),
    ("everything", ["checkpoint-00000010", "checkpoint-00000012", "weights.safetensors"]),
])  # fmt: skip
def test_what_is_left_of_a_finished_cell(room: Callable[..., Room], keep: str, left: list[str]) -> None:
    ours = room()
    first = ours.run(stop=11, keep=keep)
    assert ours.names(first) == ["checkpoint-00000002", "checkpoint-00000003"]
    second = ours.run(keep=keep)
    assert (ours.names(first), ours.names(second)) == ([], left)
    assert (second.weights is None) == (keep == "nothing")


def test_what_a_deleted_database_left_in_the_runs_folder_is_not_taken_up(room: Callable[..., Room]) -> None:
    """The same cell under the same attempt number, from another life: its curve would have a hole."""
    ours = room()
    stale = ours.runs / ours.cell.id / "1"
    checkpoint.save(stale, torch.nn.Linear(2, 2), {}, step=9, tokens=1, wall_s=1.0)
    first = ours.run(stop=11)
    assert ours.names(first) == ["checkpoint-00000002", "checkpoint-00000003"]
    second = ours.run()
    assert [point[0] for point in ours.curve(second)] == list(range(1, STEPS + 1))


def test_an_attempt_whose_first_checkpoint_was_not_recorded_is_found(room: Callable[..., Room], far: str) -> None:
    """Killed between the upload and the note about it: its place is known from its config."""
    ours = room()

    def die(_: str) -> None:
        raise KeyboardInterrupt

    config = ours.cell.config.model_dump(mode="json")
    config["checkpoint"] |= {"path": far}
    job = ours.asked("train", config, None)
    work = Work(job, ours.runs, ours.store, Flag(None))  # type: ignore[arg-type]
    ours.works.append(work)
    work.recorder.checkpoint = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        work.run(time.monotonic())
    ours.store.interrupt_dead(job.attempt, "killed")
    assert ours.store.attempt(job.attempt).checkpoint is None
    second = ours.run()
    assert [event.message for event in ours.store.events() if event.kind == "resumed"] == ["from step 2 of attempt 1"]
    assert second.state == "done"
    assert ours.names(ours.store.attempt(job.attempt)) == []


def test_checkpoints_that_cannot_be_removed_are_told_and_the_cell_is_done(
    room: Callable[..., Room], far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = room("checkpoint.every_steps=100")

    remove = MemoryFileSystem.rm

    def fail(self: Any, path: str, **options: Any) -> None:
        if "checkpoint" in path:
            raise ConnectionResetError("gone")
        remove(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "rm", fail)
    done = ours.run(path=far)
    assert done.state == "done"
    (told,) = [event.message for event in ours.store.events() if event.kind == "storage"]
    assert told.startswith(f"checkpoints were left behind: {far}/{ours.cell.id}/1 cannot be used: gone; ")


@pytest.fixture
def inexact() -> Iterator[None]:
    """Deterministic operations are off again after the test."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        stack.callback(setattr, torch.backends.cudnn, "deterministic", False)
        stack.callback(torch.use_deterministic_algorithms, False)
        yield


@pytest.mark.usefixtures("inexact")
def test_a_deterministic_attempt_gives_the_same_numbers_on_the_cpu(room: Callable[..., Room]) -> None:
    plain, exact = room(), room("train.deterministic=on")
    assert plain.cell.id != exact.cell.id
    expected = plain.curve(plain.run())
    assert not torch.are_deterministic_algorithms_enabled()
    assert exact.curve(exact.run()) == expected
    assert torch.are_deterministic_algorithms_enabled()
    for key in ("clean", "needle", "val", "junk"):
        found, wanted = (
            {(v.metric, v.length): v.value for v in r.store.measurements(r.cell.id) if v.probe == key}
            for r in (exact, plain)
        )
        assert {k: v for k, v in found.items() if k[0] != "peak_memory"} == {
            k: v for k, v in wanted.items() if k[0] != "peak_memory"
        }
