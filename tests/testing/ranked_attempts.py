"""Attempts on several ranks, run by `run_ranks`: rank 0 records into the database, others into nothing."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import MagicMock

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.attempt.cell_runner import CellRunner
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.ranks.group import Ranks
from atma_sweep.sweep.training.loop import Stopped
from attempts import Flag


def run(ranks: Ranks, runs: Path, folder: str, database: Path, stop: int | None) -> str:
    """Run the job of a folder, stopped when rank 0 reads its flag for the `stop`-th time; return how it ended.

    The runs folder is the database's; the attempt's state is recorded.
    """
    job = Job.read(runs / folder)
    if not ranks.is_first:
        recorder = MagicMock()
        recorder.last_point.return_value = None
        try:
            CellRunner(job, runs, recorder, Flag(None), ranks).run(time.monotonic())  # type: ignore[arg-type]
        except Stopped:
            return "interrupted"
        return "done"
    store = open_store(database)
    runner = CellRunner(job, runs, DatabaseRecorder(store, job.attempt, job.fence), Flag(stop), ranks)  # type: ignore[arg-type]
    try:
        runner.run(time.monotonic())
    except Stopped:
        store.finish_attempt(job.attempt, job.fence, "interrupted")
        return "interrupted"
    store.finish_attempt(job.attempt, job.fence, "done", weights=runner.weights)
    runner.clean()
    return "done"
