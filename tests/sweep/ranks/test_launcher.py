"""Processes of ranks that fail, hang or outlive the first: small programs in place of ranks, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from atma_sweep.sweep.ranks import launcher
from atma_sweep.sweep.ranks.launcher import FirstFault, RankFault, RankProcesses, fault_of, is_lost_peer
from atma_sweep.sweep.ranks.spawned import MeasurementFailed, run_in_ranks
from patience import gone, until
from ranked import vanish

RANK = """
import os, sys, time
from pathlib import Path
from atma_sweep.sweep.ranks import launcher
rank = int(sys.argv[-1])
launcher.follow_first(os.getppid())
Path(f"ready-{rank}").touch()
def report(error, failure="code", code=1):
    launcher.write_fault(Path("."), launcher.fault_of(rank, error, cause=str(error), failure=failure, trace="trace", code=code))
    os._exit(code)
def wait_for(name):
    while not Path(name).exists(): time.sleep(0.01)
"""
"""Start of a program in place of a rank."""
Abandoned = list[FirstFault]


def started(folder: Path, size: int, program: str) -> tuple[RankProcesses, Abandoned]:
    """Start ranks that run a program, once they all have begun; the list receives the fault if the attempt is abandoned."""
    processes, abandoned = RankProcesses(size, folder), Abandoned()
    processes.start([sys.executable, "-c", RANK + program], dict(os.environ), abandoned.append)
    until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(1, size)), "the ranks")
    return processes, abandoned


def own(error: Exception, cause: str = "mine") -> RankFault:
    return fault_of(0, error, cause=cause, failure="code", trace=None, code=1)


def test_root_cause_precedes_lost_connections(tmp_path: Path) -> None:
    """Rank 2 loses its connection before rank 1 reports, which failed before it: rank 1 is the cause."""
    program = """
wait_for("go")
if rank == 1: time.sleep(0.5); report(MemoryError("no memory"), "host_oom")
report(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"))
"""
    processes, abandoned = started(tmp_path, 3, program)
    (tmp_path / "go").touch()
    until(launcher.error_path(tmp_path, 2).exists, "the report of rank 2")
    fault = processes.first_fault(own(RuntimeError("NCCL error: remote process exited")))
    assert (fault.rank, fault.failure, fault.cause, fault.is_consequence) == (1, "host_oom", "no memory", False)
    assert str(FirstFault(fault, 3)) == "rank 1 of 3: no memory"
    assert not abandoned


def test_own_error_of_rank_0_is_the_first(tmp_path: Path) -> None:
    processes, _ = started(tmp_path, 2, 'wait_for("never")')
    mine = own(ValueError("broken"))
    assert processes.first_fault(mine) is mine


@pytest.mark.parametrize(("end", "cause", "code"), [
    ("os.kill(os.getpid(), 9)", "killed by SIGKILL", -9), ("os.kill(os.getpid(), 11)", "killed by SIGSEGV", -11),
    ("os._exit(7)", "ended with exit code 7", 7),
])  # fmt: skip
def test_rank_without_a_report_is_judged_by_its_end(tmp_path: Path, end: str, cause: str, code: int) -> None:
    processes, _ = started(tmp_path, 2, f'wait_for("go"); {end}')
    (tmp_path / "go").touch()
    fault = processes.first_fault(own(RuntimeError("Connection closed by peer")))
    assert (fault.rank, fault.cause, fault.exit_code, fault.failure) == (1, cause, code, None)


def test_lost_connection_without_a_cause_has_a_class(tmp_path: Path) -> None:
    assert own(RuntimeError("gloo: Connection closed by peer")).failure == "infrastructure"
    assert own(RuntimeError("Watchdog caught collective operation timeout: NCCL ran for 1800000 ms")).failure == "hang"
    assert own(RuntimeError("gloo: Timed out waiting 1800000ms for recv operation to complete")).failure == "hang"
    assert own(ValueError("the timeout of a test")).failure == "code"
    assert not is_lost_peer("ValueError: shapes (3, 4) and (4, 5)")


def test_blocked_rank_0_is_abandoned_after_the_fault_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies, rank 2 waits: both are gone, and the attempt is abandoned once, with rank 1 as its cause."""
    monkeypatch.setattr(launcher, "SETTLE_S", 0.2)
    monkeypatch.setattr(launcher, "ABANDON_S", 0.7)
    processes, abandoned = started(tmp_path, 3, 'wait_for("go")\nif rank == 1: os._exit(5)\nwait_for("never")')
    processes.has_joined = True
    (tmp_path / "go").touch()
    until(lambda: abandoned, "the end")
    assert [(str(fault), fault.fault.exit_code) for fault in abandoned] == [("rank 1 of 3: ended with exit code 5", 5)]
    assert all(child.poll() is not None for child in processes.children.values())


def test_ends_of_ranks_after_rank_0_has_finished_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ends by itself, rank 2 never would."""
    monkeypatch.setattr(launcher, "END_S", 0.5)
    processes, abandoned = started(tmp_path, 3, 'if rank == 2: wait_for("never")')
    processes.end()
    time.sleep(4 * launcher.CHECK_INTERVAL_S)
    assert [child.returncode for child in processes.children.values()] == [0, -signal.SIGKILL]
    assert not abandoned


@pytest.mark.thorough
def test_ranks_ignore_stop_requests_and_die_with_rank_0(tmp_path: Path) -> None:
    """SIGTERM to every process of a job must not end a rank before rank 0 has saved; SIGKILL of rank 0 ends all."""
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from test_launcher import started
from pathlib import Path
processes, _ = started(Path({str(tmp_path)!r}), 3, 'time.sleep(3600)')
print(*(child.pid for child in processes.children.values()), flush=True)
sys.stdin.read()
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert first.stdout is not None
    pids = [int(word) for word in first.stdout.readline().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.3)
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    os.kill(pids[0], signal.SIGSTOP)  # a frozen rank dies, too
    first.kill()
    first.communicate()
    for pid in pids:
        gone(pid)


def test_faults_survive_the_file(tmp_path: Path) -> None:
    fault = own(ValueError("a\nb"), cause="a b (file.py:3)")
    launcher.write_fault(tmp_path, fault)
    processes = RankProcesses(2, tmp_path)
    assert processes.reported_fault(0) == fault
    launcher.error_path(tmp_path, 0).write_text('{"rank": 0')
    assert processes.reported_fault(0) is None


def test_a_single_thread_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread decides first; the main thread's decision then never returns, and this process would end."""
    monkeypatch.setattr(launcher, "SETTLE_S", 0.0)
    processes, abandoned = started(tmp_path, 2, "os._exit(3)")
    until(lambda: abandoned, "the end")
    decided: list[Callable[[], None]] = []
    threading.Thread(target=lambda: decided.append(processes.end()), daemon=True).start()  # type: ignore[func-returns-value, arg-type]
    time.sleep(0.3)
    assert not decided


@pytest.mark.thorough
def test_rank_that_dies_without_an_answer_ends_a_measurement() -> None:
    """Rank 1 of 2 leaves at once, while rank 0 waits for an hour."""
    with pytest.raises(MeasurementFailed, match="rank 1 ended with exit code 4"):
        run_in_ranks(2, vanish)


def test_rank_aborted_by_the_watchdog_is_a_consequence(tmp_path: Path) -> None:
    """Rank 1 freezes without an end; NCCL aborts rank 2 after its timeout, which rank 0 then sees."""
    program = """
if rank == 2:
    print("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 1800000 milliseconds", flush=True)
    wait_for("go"); os.abort()
wait_for("never")
"""
    processes, _ = started(tmp_path, 3, program)
    (tmp_path / "go").touch()
    until(lambda: processes.look_for_faults(), "the end of rank 2")
    (fault,) = processes.look_for_faults()
    assert (fault.rank, fault.is_consequence, fault.failure) == (2, True, "hang")
    mine = own(ValueError("broken"))
    assert processes.first_fault(mine) is mine


def test_error_of_every_rank_is_reported_without_a_rank(tmp_path: Path) -> None:
    processes, _ = started(tmp_path, 2, 'report(ValueError("mine"))')
    until(launcher.error_path(tmp_path, 1).exists, "the report")
    mine = own(ValueError("mine"))
    assert processes.first_fault(mine) is mine
