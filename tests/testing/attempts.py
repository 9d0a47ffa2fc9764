"""A database, a runs folder and one small cell, for tests of single attempts without a supervisor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Attempt, CurvePoint
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt.cell_runner import CellRunner
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.checkpoints import checkpoint, storage
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host import processes
from atma_sweep.sweep.orchestrator.supervisor import freeze_plugins, resumable
from atma_sweep.sweep.planning import admission, planner
from atma_sweep.sweep.probes import requested
from atma_sweep.sweep.training.loop import Stopped
from bench import Bench

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
    works: list[CellRunner] = field(default_factory=list)
    saved: list[list[str]] = field(default_factory=list)
    """After each save, the checkpoints of all attempts."""

    def job(self, kind: str, config: dict[str, Any], weights: str | None) -> Job:
        attempt = self.store.start_attempt(
            self.cell.id,
            kind=kind,  # type: ignore[arg-type]
            owner=processes.this_process("launch"),
            fence=0,
        )
        job = Job(
            attempt=attempt.id, fence=0, cell=self.cell.id, slug=self.cell.slug, kind=kind, folder=attempt.run_dir,
            config=config, missing=requested(self.cell.config.eval), resume=list(resumable(self.store, attempt)),
            weights=weights,
        )  # fmt: skip
        job.write(self.runs)
        return job

    def run(
        self, kind: str = "train", *, stop: int | None = None, weights: str | None = None, **settings: Any
    ) -> Attempt:
        """Run one attempt with these checkpoint settings, stopped when the flag is read for the `stop`-th time."""
        job = self.job(kind, self.settings(**settings), weights)
        work = CellRunner(job, self.runs, DatabaseRecorder(self.store, job.attempt, job.fence), Flag(stop))  # type: ignore[arg-type]
        self.works.append(work)
        save = work.save

        def spy(*arguments: Any) -> None:
            save(*arguments)
            self.saved.append(
                [name for work in self.works for name in checkpoint.list_checkpoints(work.storage_address)]
            )

        work.save = spy  # type: ignore[method-assign]
        try:
            work.run(time.monotonic())
        except Stopped:
            self.store.finish_attempt(job.attempt, 0, "interrupted")
        else:
            self.store.finish_attempt(job.attempt, 0, "done", weights=work.weights)
            work.clean()
        return self.store.attempt(job.attempt)

    def start(
        self, job: Job, *wrapper: str, out: IO[str] | int = subprocess.PIPE, more: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """The attempt in a process of its own, as an executor starts it, under `wrapper` and with `more` options."""
        command = [sys.executable, "-m", "atma_sweep.sweep.job", "--runs", str(self.runs), "--folder", job.folder]
        return subprocess.Popen(
            [*wrapper, *command, "--parent", str(os.getpid()), *more], stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, env=os.environ | {"ATMA_DB": str(self.store.url), "OMP_NUM_THREADS": "1"}, text=True,
        )  # fmt: skip

    def settings(self, **checkpoint: Any) -> dict[str, Any]:
        """The cell's config with other checkpoint settings."""
        config = self.cell.config.model_dump(mode="json")
        config["checkpoint"] |= checkpoint
        return config

    def curve(self, attempt: Attempt) -> list[tuple[float | None, ...]]:
        def bare(point: CurvePoint) -> tuple[float | None, ...]:
            return point.step, point.train_loss, point.val_loss, point.grad_norm, point.lr

        return [bare(point) for point in self.store.curve(attempt.id)]

    def names(self, attempt: Attempt) -> list[str]:
        """Return the names in the attempt's folder without the supervisor's own files."""
        work = self.works[attempt.number - 1]
        return [
            name for name in storage.open_storage(work.storage_address).names() if name not in ("job.json", "log.txt")
        ]


def small_grid(folder: Path) -> Path:
    """A grid of one cell with its text, twelve steps with a validation each."""
    bench = Bench(folder)
    bench.edit("[nope, polar]", "[polar]")
    bench.edit("every_steps: 7", "every_steps: 2")
    bench.edit("validate_every: 10", "validate_every: 1")
    bench.edit("validation_tokens: 256", "validation_tokens: 64")
    return bench.folder / "micro.yaml"


def room_of(grid: Path, folder: Path, *sets: str) -> Room:
    """A new database and runs folder for the grid's cell, its text prepared beside the grid."""
    loaded = load_grid(grid, sets=sets, rename="g")
    (cell,), _ = admission.expand_grid(loaded, grid.parent / "corpora")
    store = open_store(folder / f"{next(serial)}.db", create=True)
    store.runs.mkdir()
    (cell,) = freeze_plugins([cell], store.runs)
    store.record_revision("g", grid_text="", grid_file="g.yaml", options={}, cells=[planner.to_record(cell)])
    (store.runs / "corpora").symlink_to(grid.parent / "corpora")
    return Room(store, store.runs, cell)
