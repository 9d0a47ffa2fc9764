"""Agent of a cluster node without Ray: its lease on a clock set by the test, its processes real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from atma_sweep.results.store.journal import JOURNAL, JournalRecorder
from atma_sweep.results.store.records import CurvePoint
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt.failures import NODE_LOST
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.executors import node_agent as nodes
from atma_sweep.sweep.executors.executor import ProcessSpec
from atma_sweep.sweep.executors.node_agent import NodeAgent, presumed_dead_after
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.host import processes
from atma_sweep.sweep.host.hardware import Gpu
from atma_sweep.sweep.orchestrator.supervisor import reap
from factories import WAITING_JOB, AtOnce, hold_sweep, record_sweep, stand_in, supervisor_of, trainings
from patience import PATIENCE_S, until

GRACE = 1.0
"""Seconds that an attempt gets which hears nothing; one that listens leaves in its own time."""


class Clock:
    """Clock that advances when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(request: pytest.FixtureRequest, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    """Agent with a grace period long enough for any attempt, or the one that the test requests."""
    monkeypatch.setattr(nodes, "POLL_S", 0.1)
    agent = NodeAgent(lease=60.0, grace=getattr(request, "param", PATIENCE_S), clock=clock)
    yield agent
    agent.close()


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., ProcessSpec]:
    """launch(number) returns an attempt whose stand-in job waits for a file `go`, or for SIGTERM."""
    source = stand_in(tmp_path, WAITING_JOB)

    def ready(number: int, *, deaf: bool = False) -> ProcessSpec:
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        if deaf:
            (folder / "deaf").touch()
        resources = Resources(cpus=1, gpus=0)
        return ProcessSpec(number, tmp_path / "runs", str(number), resources, None, source)

    return ready


def begun(launch: ProcessSpec) -> Path:
    folder = launch.runs / launch.folder
    until((folder / "said").exists)
    return folder


def alive(folder: Path) -> bool:
    """Return True if the attempt that wrote its pid there lives."""
    pid = int((folder / "said").read_text().split("|")[0])
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_exit_is_reported_until_acknowledged(node: NodeAgent, launch: Callable[..., ProcessSpec]) -> None:
    assert node.poll([]) == []
    first = launch(1)
    node.start(first, None)
    folder = begun(first)
    _, report, database, _ = (folder / "said").read_text().split("|")
    assert report.split() == [
        "--runs", str(first.runs), "--folder", "1", "--parent", str(os.getpid()), "--journal"
    ]  # fmt: skip
    assert database == "none", "it has no way to the database"
    assert node.poll([]) == []
    (folder / "go").touch()
    until(lambda: node.poll([]) == [(1, 7)])
    assert node.poll([]) == [(1, 7)], "the answer may have been lost"
    assert node.poll([1]) == []


@pytest.mark.parametrize(("node", "deaf"), [(PATIENCE_S, False), (GRACE, True)], indirect=["node"])
def test_ended_lease_saves_and_ends_every_attempt(
    node: NodeAgent, clock: Clock, launch: Callable[..., ProcessSpec], deaf: bool
) -> None:
    node.poll([])
    folders = []
    for number in (1, 2):
        spec = launch(number, deaf=deaf)
        node.start(spec, None)
        folders.append(begun(spec))
    clock.now += 59.9
    assert not node.tick()
    assert all(map(alive, folders))
    clock.now += 0.2
    assert node.tick()
    assert [(folder / "saved").exists() for folder in folders] == [not deaf] * 2
    assert not any(map(alive, folders))
    assert node.poll([]) is None
    node.start(launch(3), None)
    assert not (folders[0].with_name("3") / "log.txt").exists(), "nothing starts once it is over"


def test_delayed_poll_extends_the_lease_from_the_last_answer(node: NodeAgent, clock: Clock) -> None:
    """The poll was sent right after the answer at 1010 and arrives at 1069.

    The supervisor counts from when it was sent.
    """
    node.poll([])
    clock.now = 1010.0
    node.poll([])
    clock.now = 1069.0
    node.poll([])
    clock.now = 1069.9
    assert not node.tick()
    clock.now = 1070.1
    assert node.tick()
    assert presumed_dead_after(60.0, GRACE) >= 60.0 + GRACE


def test_first_poll_may_come_late_and_starts_the_lease(
    node: NodeAgent, clock: Clock, launch: Callable[..., ProcessSpec]
) -> None:
    clock.now += nodes.FIRST_POLL_TIMEOUT_S - 1
    assert not node.tick()
    assert node.poll([]) == []
    clock.now += 59.0
    assert not node.tick()


def test_orphans_are_ended_by_folder_and_by_pid(
    node: NodeAgent, launch: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    node.poll([])
    ours, theirs = launch(1), launch(2)
    node.start(ours, None)
    begun(ours)
    env = {**os.environ, "PYTHONPATH": str(theirs.source)}
    arguments = ["-m", "atma_sweep.sweep.job", "--runs", str(theirs.runs), "--folder", "2"]
    stray = subprocess.Popen([sys.executable, *arguments], env=env, cwd=theirs.runs / "2")
    begun(theirs)
    unrelated = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = psutil.Process(unrelated.pid).create_time()
    node.end_orphans(
        [theirs.runs / "2"], [(unrelated.pid, started), (unrelated.pid, started - 100), (None, None), (0, 0.0)]
    )
    assert (theirs.runs / "2" / "saved").exists()
    assert [stray.poll() is None, unrelated.poll() is None] == [False, False]
    assert alive(ours.runs / "1"), "its own are left alone"


def test_gpus_are_held_until_it_is_over(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two supervisors on one machine: the second gets the first one's GPUs when the first one's lease has ended."""
    gpus = [Gpu("0", "GPU-a", "NVIDIA L4"), Gpu("1", "GPU-b", "NVIDIA H200")]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(nodes.hardware, "query_gpus", lambda: gpus)
    first, second = (NodeAgent(lease=60.0, grace=GRACE, clock=clock) for _ in range(2))
    first.poll([])
    machine, why = first.lock_gpus(["H200"])
    assert (machine.gpus, why) == ((gpus[1],), "")
    assert second.lock_gpus([None])[0].gpus == (gpus[0],)
    assert second.lock_gpus(["H200"])[0].gpus == ()
    assert "in use by another sweep" in second.lock_gpus(["H200"])[1]
    clock.now += 61.0
    assert first.tick()
    assert second.lock_gpus(["H200"])[0].gpus == (gpus[1],)
    assert second.lock_gpus([])[0].gpus == ()
    second.close()


# --- the supervisor and what a lost node leaves -----------------------------------------------------------------------


class Loses(AtOnce):
    """Executor whose first attempt is lost with its node, saved or not, and whose second attempt ends."""

    writes_directly = False

    def __init__(self, store: Store, *, saved: bool) -> None:
        super().__init__(store)
        self.saved = saved

    def end_of(self, job: Job) -> int:
        if len(self.jobs) > 1:
            return super().end_of(job)
        if self.saved:
            self.store.finish_attempt(job.attempt, job.fence, "interrupted", cause="stopped on request", exit_code=143)
        return NODE_LOST


@pytest.mark.parametrize("saved", [True, False])
def test_cell_of_a_lost_node_is_retried(cells: Callable[..., list[Cell]], tmp_path: Path, saved: bool) -> None:
    (cell,) = cells()
    store = open_store(tmp_path / "atma.db", create=True)
    fence = hold_sweep(store, [cell])
    executor = Loses(store, saved=saved)
    supervisor_of(store, fence, executor, tmp_path / "runs").run(trainings([cell]))
    first, second = store.attempts(cell.id)
    assert (first.state, second.state) == ("interrupted", "done")
    expected = ("stopped on request", 143, None) if saved else ("its node was lost", None, "node_lost")
    assert (first.cause, first.exit_code, first.failure) == expected
    assert [launch.database for launch in executor.launches] == [None, None], (
        "no way to the database leaves this machine"
    )


@pytest.mark.parametrize("finished", [True, False])
def test_journal_of_a_dead_launch_is_applied(cells: Callable[..., list[Cell]], tmp_path: Path, finished: bool) -> None:
    """The launch died before it had applied a line."""
    (cell,) = cells()
    store = open_store(tmp_path / "atma.db", create=True)
    record_sweep(store, [cell])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    owner = replace(processes.this_process("launch"), pid=gone.pid, started=psutil.Process(gone.pid).create_time())
    gone.wait()
    attempt = store.start_attempt(cell.id, owner=owner, fence=1)
    folder = tmp_path / "runs" / attempt.run_dir
    folder.mkdir(parents=True)
    recorder = JournalRecorder(folder / JOURNAL)
    recorder.curve([CurvePoint(step=3, tokens=9, wall_s=0.5, train_loss=1.5)])
    if finished:
        recorder.finish("done", exit_code=0)
    marked = reap(store, [cell], tmp_path / "runs")
    stored = store.attempt(attempt.id)
    assert (stored.state, len(marked)) == (("done", 0) if finished else ("interrupted", 1))
    assert [point.train_loss for point in store.curve(attempt.id)] == [1.5]
