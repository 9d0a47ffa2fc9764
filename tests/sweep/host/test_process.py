"""Processes: start, death, identity, and locks that are released with their holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from atma_sweep.results.console.cores import usable_cores
from atma_sweep.results.store.records import Owner
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.executors.executor import ProcessSpec, attempt_command, attempt_environment
from atma_sweep.sweep.host import processes
from factories import line_of, script
from patience import PATIENCE_S, gone


def test_process_is_distinguished_from_a_reused_pid() -> None:
    me = processes.this_process("test")
    assert processes.is_alive(me) is True
    later = Owner(name="x", host=me.host, pid=me.pid, started=me.started + 5)
    assert processes.is_alive(later) is False
    assert processes.is_alive(Owner(name="x", host="elsewhere", pid=me.pid, started=me.started)) is None
    assert processes.find_process(None, None) is None


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])
print(child.pid, flush=True)
time.sleep(3600)  # longer than a test waits: whoever is gone before was ended
"""


def test_terminate_all_kills_a_process_that_ignores_sigterm() -> None:
    child = script(STUBBORN)
    grandchild = int(line_of(child))
    assert psutil.Process(grandchild).ppid() == child.pid
    processes.terminate_all([psutil.Process(child.pid)], grace_s=0.3)
    gone(child.pid)
    gone(grandchild)


SUICIDE = """
import os, psutil
from atma_sweep.sweep.host import processes as process
for pid in (os.getpid(), os.getppid()):
    process.terminate_all([psutil.Process(pid)], grace_s=0.2)
from pathlib import Path
from types import SimpleNamespace
from atma_sweep.sweep.executors.executor import HostExecutor
me = process.this_process("x")
who = {"host": me.host, "pid_space": me.space}
attempts = [
    SimpleNamespace(id=key, **who, pid=pid, pid_started=psutil.Process(pid).create_time())
    for key, pid in enumerate((os.getpid(), os.getppid()))
]
attempts.append(SimpleNamespace(id=2, **who, pid=os.getppid(), pid_started=1.0))  # one that had this pid long ago
print("alive", sorted(HostExecutor().end(attempts, Path("."))), flush=True)
"""


def test_terminate_all_spares_itself_and_its_ancestors() -> None:
    """A parent is terminated with its children, so terminating one's parent would terminate oneself."""
    shell = ["sh", "-c", '"$0" -c "$1"; echo "parent alive"', sys.executable, SUICIDE]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.splitlines(), done.returncode) == (["alive [0, 2]", "parent alive"], 0)


ORPHAN = """
import os, subprocess, sys, time
code = "import os, time; from atma_sweep.sweep.host.processes import exit_with_parent; exit_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(3600)"
subprocess.Popen([sys.executable, '-c', code])
time.sleep(600)
"""


def test_child_ends_when_its_parent_is_killed() -> None:
    parent = script(ORPHAN)
    child = int(line_of(parent))
    assert psutil.pid_exists(child)
    parent.kill()
    parent.wait()
    gone(child)


def test_child_of_an_already_dead_parent_ends_at_once() -> None:
    code = "from atma_sweep.sweep.host.processes import exit_with_parent; import time; exit_with_parent(1 << 22); time.sleep(600)"
    assert script(code).wait(PATIENCE_S) == -signal.SIGTERM


LISTENS = """
import signal, time
from atma_sweep.sweep.host import processes
signal.signal(signal.SIGWINCH, lambda *_: print("alive", flush=True))
def later(*_):
    processes.ECHO_S = 0.0
    print("later", flush=True)
signal.signal(signal.SIGUSR1, later)
processes.ECHO_S = 3600.0  # whatever comes meanwhile is an echo, however slow the machine
{asked}
print("begun", flush=True)
while True:
    time.sleep(0.1)
"""
STOP_SOURCES = {
    "job": "from atma_sweep.sweep.attempt.process import StopFlag; StopFlag()",
    "launch": "from atma_sweep.sweep.host.signals import StopSignals; StopSignals().__enter__()",
}


@pytest.mark.parametrize("who", STOP_SOURCES)
def test_repeated_stop_signal_counts_once_until_later(who: str) -> None:
    child = script(LISTENS.format(asked=STOP_SOURCES[who]))
    line_of(child)
    for _ in range(5):
        child.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        child.send_signal(signal.SIGWINCH)  # heard after SIGTERM, if both wait
        assert line_of(child) == "alive"
    child.send_signal(signal.SIGUSR1)
    assert line_of(child) == "later"
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 143


def test_child_sees_its_allocated_gpus_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    plain = ProcessSpec(1, tmp_path, "a/1", Resources(cpus=2, gpus=0), "sqlite:///x.db")
    env = attempt_environment(plain)
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["ATMA_DB"]) == ("", "2", "sqlite:///x.db")
    accelerated = ProcessSpec(1, tmp_path, "a/1", Resources(cpus=2, gpus=1), "postgresql://me:secret@host/x")
    assert attempt_environment(accelerated, "5")["CUDA_VISIBLE_DEVICES"] == "5"
    assert attempt_environment(accelerated)["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert "secret" not in " ".join(attempt_command(accelerated, os.getpid()))


def test_cores_are_those_of_this_process() -> None:
    if not hasattr(os, "sched_setaffinity"):
        assert usable_cores() == os.cpu_count()
        return
    code = "import os; os.sched_setaffinity(0, {0}); from atma_sweep.results.console.cores import usable_cores; print(usable_cores())"
    assert line_of(script(code)) == "1"
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_cores_are_limited_by_the_slurm_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a Slurm that binds no job to cores, only this variable says how many a job may use."""
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    every = usable_cores()
    for text, expected in (("1", 1), (str(every), every), (str(every + 7), every), ("", every), ("0", every)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", text)
        assert usable_cores() == expected
