"""Contract of an executor, checked for each registered one and the journaling one: real processes of a stand-in job."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from atma_sweep.results.store.records import Attempt
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.attempt.failures import EXIT_MACHINE
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.executors.executor import Executor, ExecutorContext, ProcessSpec
from atma_sweep.sweep.executors.journaling import JournalingExecutor
from atma_sweep.sweep.executors.registry import EXECUTORS, open_executor
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host import hardware, processes
from atma_sweep.sweep.host.hardware import Gpu
from factories import WAITING_JOB, attempt_of, stand_in
from nodes import facts_of_node, ray_in_process
from patience import gone, until

GPUS = [Gpu("GPU-aaaa", "GPU-aaaa", "NVIDIA L4"), Gpu("GPU-bbbb", "GPU-bbbb", "NVIDIA L4")]
KINDS = [
    *(pytest.param(name, marks=[pytest.mark.thorough, pytest.mark.slow] * (name == "ray")) for name in EXECUTORS),
    "journal",
]
URL = "sqlite:///x.db"


def cell_of(**resources: Any) -> Cell:
    cell = load_grid("quick").expand(lambda data: "0" * 12)[0]
    return replace(cell, config=cell.config.model_copy(update={"resources": Resources(**resources)}))


@dataclass
class Stage:
    """Executor on a machine of four cores and two GPUs, with a folder for attempts of the stand-in job."""

    executor: Executor
    runs: Path
    source: Path
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def launch(self, *, deaf: bool = False, **resources: Any) -> ProcessSpec:
        number = next(self.numbers)
        job = Job(attempt=number, fence=1, cell="c", slug="s", kind="train", folder=str(number), config={}, missing=[], resume=[])  # fmt: skip
        folder = job.write(self.runs)
        if deaf:
            (folder / "deaf").touch()
        database = URL if self.executor.writes_directly else None
        return ProcessSpec(number, self.runs, job.folder, Resources(**({"gpus": 0} | resources)), database, self.source)

    def start(self, **how: Any) -> Attempt:
        """Start an attempt and wait until its process runs."""
        launch = self.launch(**how)
        assert self.executor.fits(launch.resources)
        self.executor.start(launch)
        return self.begun(launch.attempt)

    def begun(self, number: int) -> Attempt:
        until((self.runs / str(number) / "said").exists)
        pid, me = int(self.report(number)[0]), processes.this_process("x")
        return attempt_of(
            id=number, pid=pid, pid_started=psutil.Process(pid).create_time(), host=me.host, pid_space=me.space,
            run_dir=str(number),
        )  # fmt: skip

    def report(self, number: int) -> list[str]:
        """Return an attempt's pid, options, database and visible GPUs."""
        return (self.runs / str(number) / "said").read_text().split("|")

    def log(self, attempt: Attempt) -> str:
        return (self.runs / attempt.run_dir / "log.txt").read_text()

    def ends(self, *attempts: Attempt) -> list[int]:
        """Return the exit codes once the executor has reported all of them."""
        codes: dict[int, int] = {}
        until(lambda: codes.update(self.executor.wait(0.2)) or len(codes) == len(attempts), "every exit code")
        return [codes[attempt.id] for attempt in attempts]

    def finish(self, *attempts: Attempt) -> None:
        """Let attempts end by themselves."""
        for attempt in attempts:
            (self.runs / attempt.run_dir / "go").touch()
        assert self.ends(*attempts) == [7] * len(attempts)


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Stage shared by all tests of a kind, since Ray takes seconds to start.

    Closing its executor kills what still runs.
    """
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[train]'")
    folder, name = tmp_path_factory.mktemp("stage"), str(request.param)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="atma-", dir="/tmp") as short:
        patch.setattr(hardware, "usable_cores", lambda: 4)
        patch.setattr(hardware, "memory_gb", lambda: 8.0)
        patch.setattr(hardware, "query_gpus", lambda: GPUS)
        patch.setattr(tempfile, "tempdir", short)  # a socket's path may have 107 bytes
        # set for good by whatever test of a cluster ran in this process; Ray's daemons would ask for a token, and get none
        patch.delenv("RAY_AUTH_MODE", raising=False)
        if name == "cluster":
            ray_in_process(patch, [facts_of_node(cpus=4, gpus=2)])
        (folder / "runs").mkdir()
        opening = ExecutorContext(open_store(folder / "atma.db", create=True), folder / "runs", print, "here:1")
        executor = JournalingExecutor.open(opening) if name == "journal" else open_executor(name, opening)
        assert executor.name == (name if name in EXECUTORS else "local")
        executor.admit([cell_of(gpus=0.5)])
        prepared = Stage(executor, folder / "runs", stand_in(folder, WAITING_JOB))
        yield prepared
        last = prepared.start(deaf=True)
        executor.close()
        gone(last.pid or 0)


def test_executor_returns_log_and_exit_code(stage: Stage) -> None:
    first = stage.start()
    report = stage.report(first.id)
    options = report[1].split()
    assert [options[options.index(name) + 1] for name in ("--runs", "--folder")] == [str(stage.runs), first.run_dir]
    assert "--parent" in options
    assert ("--journal" in options, report[2]) == ((False, URL) if stage.executor.writes_directly else (True, "none"))
    assert stage.executor.wait(0.05) == []
    assert (stage.executor.failure(), stage.executor.is_unreachable(first)) == (None, False)
    assert stage.log(first) == "begun\n"
    stage.finish(first)
    assert stage.executor.wait(0.05) == [], "it is told once"


def test_attempts_share_what_there_is(stage: Stage) -> None:
    """Two halves on one GPU, a full GPU, and an attempt without; any further attempt waits."""
    four = [stage.start(gpus=share) for share in (0.5, 0.5, 1, 0)]
    assert [stage.report(attempt.id)[3] for attempt in four] == ["GPU-aaaa", "GPU-aaaa", "GPU-bbbb", ""]
    for size in ({"gpus": 0}, {"gpus": 0.25}, {"gpus": 0, "memory_gb": 9}, {"gpus": 1, "gpu_type": "H200"}):
        assert not stage.executor.fits(Resources(**size))
    stage.finish(*four)
    assert stage.executor.fits(Resources(gpus=1, cpus=4, memory_gb=8))


def test_stopped_attempt_saves_itself(stage: Stage) -> None:
    attempt = stage.start()
    assert stage.executor.stop(attempt)
    assert stage.ends(attempt) == [143]
    assert (stage.runs / attempt.run_dir / "saved").exists()
    assert (stage.executor.stop(attempt), stage.executor.kill(attempt)) == (False, False), (
        "nobody knows its process any more"
    )


def test_killed_attempt_dumps_its_stack_into_the_log(stage: Stage) -> None:
    attempt = stage.start(deaf=True)
    assert stage.executor.stop(attempt)
    assert stage.executor.kill(attempt, dump=True)
    assert stage.ends(attempt) == [-signal.SIGKILL]
    assert "most recent call first" in stage.log(attempt)


@pytest.mark.parametrize("victim", ["attempt", "worker"])
def test_dead_process_is_reported_and_the_next_runs(stage: Stage, victim: str) -> None:
    """The worker is the process between this one and the attempt, where there is one."""
    attempt = stage.start()
    process = psutil.Process(attempt.pid)
    parent = process.parent()
    (process if victim == "attempt" or parent is None or parent.pid == os.getpid() else parent).kill()
    assert stage.ends(attempt) == [-signal.SIGKILL]
    gone(attempt.pid or 0)
    stage.finish(stage.start())


def test_admit_refuses_a_cell_too_large_for_the_machine(stage: Stage) -> None:
    with pytest.raises(MachineError, match="needs 4,096 CPU cores"):
        stage.executor.admit([cell_of(gpus=0, cpus=4096)])
    stage.finish(stage.start())


def test_attempt_without_a_log_is_a_machine_failure(stage: Stage) -> None:
    """Its log cannot be opened: the executor raises OSError, or returns the exit code that stands for it."""
    launch = stage.launch()
    (stage.runs / launch.folder / "log.txt").mkdir()
    try:
        stage.executor.start(launch)
    except OSError:
        assert stage.executor.wait(0.05) == []
    else:
        assert stage.ends(attempt_of(id=launch.attempt)) == [EXIT_MACHINE]
    assert stage.executor.fits(Resources(gpus=0, cpus=4)), "what it would have taken is free"


def test_attempts_of_a_dead_supervisor_are_ended(stage: Stage) -> None:
    launch = stage.launch()
    command = [sys.executable, "-m", "atma_sweep.sweep.job", "--runs", str(stage.runs), "--folder", launch.folder]
    with (stage.runs / launch.folder / "log.txt").open("w") as log:
        stray = subprocess.Popen(
            command, cwd=stage.runs / launch.folder, env=os.environ | {"PYTHONPATH": str(launch.source)}, stdout=log
        )
    stray_attempt = stage.begun(launch.attempt)
    assert stage.executor.end([stray_attempt], stage.runs) == {stray_attempt.id}
    assert (stage.runs / launch.folder / "saved").exists()
    gone(stray.pid)


# --- nodes that come later ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["silent", "blind", "full disk"])
def test_cluster_surveys_a_node_again_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[train]'")
    near, far = facts_of_node("near", cpus=1), facts_of_node("far", cpus=8)
    first: Any = {"silent": [], "blind": [replace(far, sees_runs=False)], "full disk": OSError(28, "No space left")}
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    answers = ray_in_process(monkeypatch, [near], first[trouble], [far])
    messages: list[str] = []
    opening = ExecutorContext(open_store(tmp_path / "atma.db", create=True), tmp_path, messages.append, "here:1")
    cluster = open_executor("cluster", opening)
    try:
        until(lambda: cluster.fits(Resources(cpus=5, gpus=0)), "the other node")
        time.sleep(0.2)
        assert answers == [], "nor is a node asked that is there"
    finally:
        cluster.close()
    refusal = [f"node far is excluded for now: it cannot see {tmp_path}"]
    assert messages == (refusal if trouble == "blind" else ["node far joined"])
