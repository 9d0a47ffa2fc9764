"""A disk that is full is the machine's fault, also where it lets nobody say so."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atma_sweep.results.failure_classes import FAILURES
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt.failures import EXIT_MACHINE, classify_exit, record_start_failure
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.executors.executor import ProcessSpec
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.orchestrator import supervisor
from attempts import Room, room_of
from factories import AtOnce, ended, hold_sweep, supervisor_of, trainings
from patience import PATIENCE_S

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "job.json")


def endings(store: Store, cell: str) -> list[tuple[str, str | None]]:
    return [(attempt.state, attempt.failure) for attempt in store.attempts(cell)]


# --- one attempt --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux: writes to /dev/full")
def test_error_is_recorded_even_if_printing_fails(room: Callable[..., Room]) -> None:
    """Whatever the attempt prints meets a full disk; what went wrong stands in the database."""
    ours = room()
    job = ours.job("train", ours.settings(path="/dev/null/nowhere"), None)
    with Path("/dev/full").open("w") as full:
        assert ours.start(job, out=full).wait(timeout=PATIENCE_S) == EXIT_MACHINE
    assert endings(ours.store, ours.cell.id) == [("failed", "infrastructure")]
    assert "/dev/null/nowhere" in str(ours.store.attempt(job.attempt).cause)


@pytest.mark.thorough
def test_attempt_that_cannot_record_exits_with_machine_code(room: Callable[..., Room]) -> None:
    """Its journal does not grow any more, so its end does not get into it either."""
    ours = room()
    job = ours.job("train", ours.settings(), None)
    limited = ("import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700)); "
               "os.execv(sys.argv[1], sys.argv[1:])")  # fmt: skip
    attempt = ours.start(job, sys.executable, "-c", limited, more=["--journal"])
    assert "File too large" in ended(attempt, EXIT_MACHINE)


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_full_runs_folder_costs_an_attempt_but_no_results(
    grid: Path, room: Callable[..., Room], tmp_path: Path
) -> None:
    """Log, checkpoints and job.json on a disk without a byte left; with room again the cell comes to the same numbers."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("needs the right to mount, in a container --privileged")
    try:
        ours = room_of(grid, tmp_path)
        ours.runs = small
        (small / "corpora").symlink_to(grid.parent / "corpora")
        job = ours.job("train", ours.settings(), None)
        with (small / job.folder / "log.txt").open("w") as log, (small / "ballast").open("wb", buffering=0) as ballast:
            with contextlib.suppress(OSError):
                while ballast.write(bytes(4096)):
                    pass
            with pytest.raises(OSError, match="No space left"):
                job.write(small)
            assert Job.read(small / job.folder) == job, "what lay there is still whole"
            assert ours.start(job, out=log).wait(timeout=PATIENCE_S) == EXIT_MACHINE
        assert (small / job.folder / "log.txt").read_text() == ""
        assert endings(ours.store, ours.cell.id) == [("failed", "infrastructure")]
        (small / "ballast").unlink()
        plain = room()
        second = ours.run()
        assert (second.state, ours.curve(second)) == ("done", plain.curve(plain.run()))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


# --- a launch -----------------------------------------------------------------------------------------------------


class Full(AtOnce):
    """An executor that can start nothing."""

    started = 0

    def start(self, launch: ProcessSpec) -> None:
        self.started += 1
        raise NO_SPACE


@pytest.mark.parametrize("what", ["job.json", "log.txt"])
def test_cells_that_cannot_be_started_do_not_stop_the_sweep(
    cells: Callable[..., list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Five of them, tried three times each: no traceback, no word of a mistake that all of them made."""
    chosen = cells("seeds: 5\n")
    store = open_store(tmp_path / "atma.db", create=True)
    fence = hold_sweep(store, chosen)
    monkeypatch.setitem(FAILURES, "infrastructure", replace(FAILURES["infrastructure"], wait_s=0.0))  # type: ignore[arg-type]
    monkeypatch.setattr(supervisor, "POLL_S", 0.0)
    if what == "job.json":

        def full(job: Job, runs: Path) -> Path:
            raise NO_SPACE

        monkeypatch.setattr(Job, "write", full)
    messages: list[str] = []
    listener: Any = SimpleNamespace(
        started=lambda *_: messages.append("started"), ended=lambda *_: messages.append("ended"),
        running=lambda *_: None, waiting=lambda *_: None,
    )  # fmt: skip
    executor = Full(store)
    supervisor_of(store, fence, executor, tmp_path / "runs", listener=listener).run(trainings(chosen))
    assert executor.started == (0 if what == "job.json" else 15)
    for cell in chosen:
        assert endings(store, cell.id) == [("failed", "infrastructure")] * 3
        causes = {attempt.cause for attempt in store.attempts(cell.id)}
        assert causes == {f"could not be started: {NO_SPACE}"}
    assert messages == ["started", "ended"] * 15


def test_start_failure_is_classified_without_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert record_start_failure(log, NO_SPACE) == EXIT_MACHINE
    assert "could not be started: [Errno 28] No space left on device" in classify_exit(EXIT_MACHINE, log).cause
    assert record_start_failure(tmp_path / "nowhere" / "log.txt", NO_SPACE) == EXIT_MACHINE
    assert record_start_failure(log, ValueError("x")) == 1
