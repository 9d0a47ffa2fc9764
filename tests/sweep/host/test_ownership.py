"""Ownership of sweeps: other PID namespaces, several sweeps at once, and launches that are gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from atma_sweep.results.failure_classes import FAILURES
from atma_sweep.results.maintenance import check
from atma_sweep.results.store import records
from atma_sweep.results.store.records import Attempt, Owner
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.executors.executor import AttemptExit, ProcessSpec
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.host import processes as process
from atma_sweep.sweep.orchestrator import control, launch, supervisor
from factories import AtOnce, hold_sweep, record_sweep, supervisor_of, trainings
from machine import Quiet
from patience import PATIENCE_S, gone, until

# --- namespaces -----------------------------------------------------------------------------------------------------

JUDGE = """
import sys
from atma_sweep.results.errors import SweepBusy
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.host import processes as process
from atma_sweep.sweep.executors.executor import HostExecutor
store = open_store(sys.argv[1])
try:
    store.acquire_sweep("s", process.this_process("launch"), 60.0, is_alive=process.is_alive)
except SweepBusy as error:
    print(error)
print(sorted(HostExecutor().end(store.live_attempts(), None)))
"""


def _apart(*flags: str) -> list[str]:
    """Return a command prefix that runs a command in a PID namespace of its own; skips where that is not allowed."""
    executable = shutil.which("unshare")
    command = [executable or "unshare", "--pid", "--fork", *flags]
    if executable is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and the right to make PID namespaces")
    return command


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [(), ("--mount-proc",)], ids=["", "with its own proc"])
def test_launch_in_a_foreign_pid_namespace_waits_for_the_lease(
    store: Store, cells: Callable[..., list[Cell]], flags: tuple[str, ...]
) -> None:
    """The launch has this host's name and cannot see this process, which runs the sweep and an attempt."""
    (cell,) = cells()
    me = process.this_process("test")
    hold_sweep(store, [cell], lease=600.0)
    attempt = store.start_attempt(cell.id, owner=me, fence=1)
    command = [*_apart(*flags), sys.executable, "-c", JUDGE, str(store.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    busy, ended = result.stdout.splitlines()
    assert f"run by test on {me.host} (pid {me.pid})" in busy
    assert "its lease ends" in busy
    assert ended == "[]", "whether an attempt lives cannot be seen from there"
    assert (store.sweeps()[0].fence, store.attempt(attempt.id).state) == (1, "running")
    # when the lease has ended, it may have the sweep
    store.renew_sweep("s", 1, 0.0)
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.stdout.splitlines() == ["[]"]
    assert store.sweeps()[0].fence == 2


def test_pid_is_valid_only_in_its_boot_and_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    me = process.this_process("test")
    dead = replace(me, started=me.started + 100)
    assert (process.is_alive(me), process.is_alive(dead)) == (True, False)
    if me.space is not None:
        assert process.is_alive(replace(me, space="another boot or namespace")) is None
        assert not me.is_same_process(replace(me, space="another boot or namespace"))
    # an owner that an older release wrote, or one seen from a system without /proc, is judged by its host's name
    assert process.is_alive(replace(dead, space=None)) is False
    assert me.is_same_process(replace(me, space=None))
    monkeypatch.setattr(records, "BOOT", Path("/nowhere/boot_id"))
    assert process.this_process("test").space is None
    assert process.is_alive(dead) is False


def test_db_check_does_not_report_invisible_attempts_as_dead(store: Store, cells: Callable[..., list[Cell]]) -> None:
    (cell,) = cells()
    record_sweep(store, [cell])
    me = process.this_process("test")
    gone = replace(me, started=me.started + 100)
    attempt = store.start_attempt(cell.id, owner=replace(gone, space="elsewhere"), fence=1)
    assert (store.attempt(attempt.id).pid_space, check.check(store.path)) == ("elsewhere", [])
    store.set_process(attempt.id, 1, gone.pid, gone.started, space=me.space)
    (finding,) = check.check(store.path)
    assert "marked as running, but without a process" in finding.what


# --- several sweeps -------------------------------------------------------------------------------------------------


class Looking(AtOnce):
    """Executor that records the end of each sweep's lease when an attempt starts."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.leases: list[dict[str, Any]] = []

    def end_of(self, job: Job) -> int:
        self.leases.append({sweep.name: sweep.lease_until for sweep in self.store.sweeps()})
        return super().end_of(job)


def test_leases_of_all_claimed_sweeps_are_renewed(
    store: Store, cells: Callable[..., list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RENEW_S", 0.0)
    shares = []
    for name, cell in zip("ab", cells("seeds: 2\n"), strict=True):
        shares.append((name, hold_sweep(store, [cell], name, 1.0), trainings([cell])))
    before = {sweep.name: sweep.lease_until for sweep in store.sweeps()}
    executor: Any = Looking(store)
    launch.run_tasks(store, shares, Quiet(), executor, runs=tmp_path / "runs", commit=(None, None))
    assert len(executor.leases) == 2
    for leases in executor.leases:
        assert all(leases[name] > until for name, until in before.items())


# --- wishes ---------------------------------------------------------------------------------------------------------


def _failed(store: Store, cells: list[Cell]) -> tuple[str, ...]:
    me = process.this_process("test")
    hold_sweep(store, cells, lease=600.0)
    for cell in cells:
        store.finish_attempt(store.start_attempt(cell.id, owner=me, fence=1).id, 1, "failed")
    return tuple(cell.id for cell in cells)


@pytest.mark.parametrize("after", range(1, 6))
def test_concurrent_retry_requests_are_merged(
    store: Store, cells: Callable[..., list[Cell]], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Each request follows a transaction of the other."""
    first, second = _failed(store, cells("seeds: 2\n"))
    second_store = open_store(store.path)
    remaining = [after]

    def disturbed(work: Any) -> Any:
        def transaction(*arguments: Any, **options: Any) -> Any:
            result = work(*arguments, **options)
            remaining[0] -= 1
            if remaining[0] == 0:
                control.send_command(second_store, "retry", "s", [second])
            return result

        return transaction

    for name in ("read", "write"):
        monkeypatch.setattr(store, name, disturbed(getattr(store, name)))
    control.send_command(store, "retry", "s", [first])
    monkeypatch.undo()
    if remaining[0] > 0:
        control.send_command(second_store, "retry", "s", [second])
    assert store.pending_requests("s") == {"retry": sorted([first, second])}


def test_empty_retry_leaves_no_request(store: Store, cells: Callable[..., list[Cell]]) -> None:
    (cell,) = cells()
    hold_sweep(store, [cell], lease=600.0)
    control.send_command(store, "retry", "s")
    assert store.pending_requests("s") == {}


class Retried(AtOnce):
    """Executor that fails every cell's first attempt, except the last cell's, which runs until two cells are retried."""

    def __init__(self, store: Store, cells: list[Cell]) -> None:
        super().__init__(store)
        self.names = [cell.id for cell in cells]
        self.again: list[tuple[str, dict[str, Any]]] = []
        """Cells that are tried again, and what is asked for at that moment."""

    def start(self, launch: ProcessSpec) -> None:
        job = Job.read(launch.runs / launch.folder)
        if job.cell in [job.cell for job in self.jobs]:
            self.again.append((job.cell, self.store.pending_requests("s")))
        super().start(launch)

    def end_of(self, job: Job) -> int:
        first = [earlier.cell for earlier in self.jobs].count(job.cell) == 1
        self.store.finish_attempt(
            job.attempt, job.fence, "failed" if first else "done", failure="host_oom" if first else None
        )
        return int(first)

    def wait(self, seconds: float) -> list[AttemptExit]:
        ended = super().wait(seconds)
        running = [job.attempt for job in self.jobs if job.cell == self.names[-1]][:1]
        self._ended += [exit_ for exit_ in ended if exit_[0] in running and len(self.again) < 2]
        return [exit_ for exit_ in ended if exit_ not in self._ended]


def test_retry_requested_during_another_is_not_lost(
    store: Store, cells: Callable[..., list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for a cell whose failed attempt is not finished yet."""
    seed_cells = cells("seeds: 3\n")
    first, second, third = (cell.id for cell in seed_cells)
    executor = Retried(store, seed_cells)
    monkeypatch.setattr(supervisor, "LISTEN_S", 0.0)
    monkeypatch.setattr(supervisor, "POLL_S", 0.0)
    monkeypatch.setitem(FAILURES, "host_oom", replace(FAILURES["host_oom"], tries=1, alone=False))  # type: ignore[arg-type]
    read_requests, looks = store.pending_requests, iter(range(10**9))

    def late(name: str) -> dict[str, Any]:
        look = next(looks)
        if look == 2:
            store.request_actions("s", retry=[first, third])
        requests = read_requests(name)
        if look == 2:
            store.request_actions("s", retry=[second])
        return requests

    monkeypatch.setattr(store, "pending_requests", late)
    fence = hold_sweep(store, seed_cells)
    supervisor_of(store, fence, executor, tmp_path / "runs").run(trainings(seed_cells))
    monkeypatch.undo()
    assert executor.again[0] == (first, {"retry": sorted([second, third])})
    assert [cell for cell, _ in executor.again] == [first, second]
    assert store.pending_requests("s") == {"retry": [third]}, "whoever goes on hears it"


# --- frozen attempts ------------------------------------------------------------------------------------------------

LAUNCH = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
ATTEMPT = """
import os, signal, time
from atma_sweep.sweep.host import guard, processes as process
signal.signal(signal.SIGTERM, {hears})
process.exit_with_parent(os.getppid())
guard.start(os.getppid(), 1.0)
print(os.getpid(), flush=True)
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("hears", ["signal.SIG_DFL", "signal.SIG_IGN"], ids=["that hears", "that hears nothing"])
def test_frozen_attempt_of_a_killed_launch_is_ended(hears: str) -> None:
    command = [sys.executable, "-c", LAUNCH, ATTEMPT.format(hears=hears)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    attempt = int(parent.stdout.readline())
    guards: list[psutil.Process] = []

    def guarded() -> bool:
        guards[:] = [
            process
            for process in psutil.Process(attempt).children()
            if "atma_sweep.sweep.host.guard" in process.cmdline()
        ]
        return guards != []

    until(guarded, "its guard")
    time.sleep(1.0)
    assert guards[0].is_running(), "it leaves an attempt alone whose launch lives"
    os.kill(attempt, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    gone(attempt)
    gone(guards[0].pid)


def test_guard_ends_with_its_attempt() -> None:
    from atma_sweep.sweep.host import guard

    attempt = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    guard.end_after_parent(attempt.pid, os.getpid(), 600.0)
    assert attempt.wait(PATIENCE_S) == 0


def test_owner_without_a_pid_space_is_restored(store: Store, cells: Callable[..., list[Cell]]) -> None:
    (cell,) = cells()
    record_sweep(store, [cell])
    owner = Owner(name="old", host="there", pid=1, started=1.5)
    store.acquire_sweep("s", owner, 60.0)
    assert store.sweeps()[0].owner == owner
    new = replace(owner, space="a b")
    store.release_sweep("s", 1)
    store.acquire_sweep("s", new, 60.0)
    assert store.sweeps()[0].owner == new
    attempt: Attempt = store.start_attempt(cell.id, owner=new, fence=2)
    assert attempt.pid_space == "a b"
