"""Stop signals to a launch and to its other processes: cells are saved or retried, never failed."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from atma_sweep.sweep.host import signals
from bench import COMMAND, Bench
from factories import ended
from patience import PATIENCE_S, until
from tiers import long_form

pytestmark = pytest.mark.slow
COMPILES = """
import subprocess, sys
from pathlib import Path
from atma_sweep.model.mixers.softmax import NoPE
from atma_sweep.model.registry import register_mixer

HERE = Path({folder!r})
CODE = "import signal, sys, time; signal.signal(2, signal.SIG_DFL); open(sys.argv[1], 'w').close(); time.sleep(2.5)"

@register_mixer("slow")
class Slow(NoPE):
    def forward(self, *given, **named):
        if not (HERE / "compiled").exists():
            subprocess.run([sys.executable, "-c", CODE, str(HERE / "compiling")], check=True)
            (HERE / "compiled").touch()
        return super().forward(*given, **named)
"""
"""A mixer whose first step runs what a compiler is to an attempt: a process that a Ctrl-C ends, and that has to
succeed."""
LAUNCH_NOPE = ("launch", "micro.yaml", "--only", "attn_type=nope", "--executor")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.grid(tokens=128 * 1000)
    yield bench
    bench.close()


@pytest.fixture
def compiling(bench: Bench) -> Bench:
    """Bench of one cell, whose training begins with a compiler process."""
    (bench.folder / "slow.py").write_text(COMPILES.format(folder=str(bench.folder)))
    bench.grid(more="plugins: [slow.py]\n")
    bench.edit("[nope, polar]", "[slow]")
    return bench


def launched(bench: Bench, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=bench.folder, env=bench.env, text=True, process_group=0,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},
    )  # fmt: skip


def appears(path: Path) -> None:
    until(path.exists, path, pause=0.01)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are still alive after a while, which an orphan may need to end."""
    return psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("executor", "number"),
    [
        ("local", signal.SIGINT),
        ("local", signal.SIGTERM),
        *long_form(("local", signal.SIGHUP), ("ray", signal.SIGTERM)),
    ],
)
def test_signal_to_the_group_spares_attempts_and_compilers(compiling: Bench, executor: str, number: int) -> None:
    process = launched(compiling, "launch", "micro.yaml", "--executor", executor)
    appears(compiling.folder / "compiling")
    started = family(process)
    os.killpg(process.pid, number)
    out = ended(process, 128 + number)
    assert (compiling.folder / "compiled").exists(), "the compiler came to its end"
    assert compiling.sql("SELECT state, cause FROM attempt") == [("interrupted", "stopped on request")]
    assert "launch again to continue" in out
    assert survivors(started) == []


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["local", *long_form("ray")])
def test_compiler_signalled_before_its_attempt_fails_no_cell(compiling: Bench, executor: str) -> None:
    """Slurm and systemd end a job by its control group, and so signal every process, in any order."""
    process = launched(compiling, "launch", "micro.yaml", "--executor", executor)
    appears(compiling.folder / "compiling")
    for member in [*reversed(family(process)), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
            time.sleep(0.05)
    ended(process, 143)
    ((state, failure, cause),) = compiling.sql("SELECT state, failure, cause FROM attempt")
    assert (state, failure) == ("interrupted", None), cause
    assert "this error was raised while stopping: CalledProcessError" in str(cause)
    if executor == "local":
        compiling.grid(more="plugins: [slow.py]\n")
        compiling.edit("[nope, polar]", "[slow]")
        compiling.launch()


@pytest.mark.thorough
def test_finished_attempt_leaves_no_processes(bench: Bench) -> None:
    stray = "import os, subprocess; os.fork() or (os.fork() and os._exit(0)) or subprocess.run(['sleep', '987'])"
    code = COMPILES.format(folder=str(bench.folder)).replace("check=True", "check=False")
    code = code.replace(', "-c", CODE,', f', "-c", {stray!r},')
    (bench.folder / "slow.py").write_text(code)
    bench.grid(more="plugins: [slow.py]\n")
    bench.edit("[nope, polar]", "[slow]")
    bench.launch()
    assert [
        process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "987"]
    ] == []


@pytest.mark.thorough
def test_closed_terminal_stops_like_sigterm(bench: Bench) -> None:
    bench.grid(tokens=128 * 3000)  # on a busy machine a short one ends before anybody closes anything
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, fcntl, signal, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.orig_argv[:1] + sys.argv[1:])",
         *COMMAND[1:], *LAUNCH_NOPE, "local"],
        cwd=bench.folder, env=bench.env, start_new_session=True, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    bench.wait("SELECT 1 FROM attempt WHERE step > 10")
    started = psutil.Process(process.pid).children(recursive=True)
    os.close(master)
    assert process.wait(timeout=PATIENCE_S) == 129
    ((state, cause, checkpoint),) = bench.sql("SELECT state, cause, checkpoint FROM attempt")
    assert (state, cause) == ("interrupted", "stopped on request")
    assert (bench.folder / "atma-runs" / str(checkpoint) / "model.safetensors").is_file()
    assert bench.sql("SELECT owner FROM sweep") == [(None,)]
    assert survivors(started) == []


@pytest.mark.thorough
def test_nohup_outlives_its_terminal(bench: Bench) -> None:
    bench.grid()
    process = launched(bench, *LAUNCH_NOPE, "local", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    bench.wait("SELECT 1 FROM attempt")
    os.killpg(process.pid, signal.SIGHUP)
    ended(process)
    assert bench.sql("SELECT state FROM attempt") == [("done",)]
    bench.once(1)


@pytest.mark.thorough
@pytest.mark.parametrize(("daemon", "number"), [
    ("gcs_server", signal.SIGTERM), ("raylet", signal.SIGINT),
    *long_form(("raylet", signal.SIGTERM), ("ray::IDLE", signal.SIGTERM)),
])  # fmt: skip
def test_launch_stopped_while_ray_starts_ends_cleanly(bench: Bench, daemon: str, number: int) -> None:
    process = launched(bench, *LAUNCH_NOPE, "ray")
    started: list[psutil.Process] = []
    while process.poll() is None:
        started = family(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(process.name() == daemon for process in started):
                break
    out = ended(process, 128 + number, number)
    last = out.strip().splitlines()[-1]
    assert last.startswith(("atma-sweep: stopped", "to train:", "disk:", "cells:")), out
    assert "*** SIG" not in out
    assert "Traceback" not in out
    assert survivors(started) == []
    assert bench.sql("SELECT owner FROM sweep") == [(None,)]


@pytest.mark.thorough
def test_launch_stopped_before_it_begins_prints_a_line(bench: Bench) -> None:
    process = launched(bench, *LAUNCH_NOPE, "local")
    appears(bench.folder / "atma.db")
    out = ended(process, 143, signal.SIGTERM)
    assert "atma-sweep: stopped" in out.splitlines()[-1]
    assert "Traceback" not in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_within_a_callback_is_sent_again(number: signal.Signals) -> None:
    """A callback of a weak reference lets no exception out: it would be printed and lost."""
    code = f"""
        import os, signal, time, weakref
        from atma_sweep.sweep.host.signals import StopRequested, StopSignals

        # below nohup it would be ignored
        signal.signal({number.value}, signal.default_int_handler if {number.value} == 2 else signal.SIG_DFL)

        class Thing: ...

        def gone(_: object) -> None:
            os.kill(os.getpid(), {number.value})
            time.sleep(1)

        thing = Thing()
        reference = weakref.ref(thing, gone)
        try:
            with StopSignals(raises=True):
                del thing
                time.sleep(20)
        except (StopRequested, KeyboardInterrupt) as stop:
            print(type(stop).__name__, getattr(stop, "number", 2))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    kind = "KeyboardInterrupt" if number == signal.SIGINT else "StopRequested"
    assert (done.stdout, done.stderr) == (f"{kind} {number.value}\n", "")


BLOCKED = """
import ctypes, subprocess, sys, threading
from atma_sweep import cli
from atma_sweep.sweep.host import signals

signals.GRACE_S = 0.2

def command():
    child = subprocess.Popen(["sleep", "987"])
    threading.Timer(0.3, print, (child.pid,), {"flush": True}).start()
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

cli.main(command)
"""
"""A command whose main thread waits in native code for ever, as for a backward pass that compiles, with a child
process."""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: locks glibc's mutex")
def test_signals_end_a_main_thread_in_native_code(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (143, "atma-sweep: stopped by SIGTERM\n")
    assert survivors([child]) == []


def test_signals_give_the_wakeup_descriptor_back() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with signals.StopSignals(raises=True):
        ours = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(ours)
    after = signal.set_wakeup_fd(before)
    assert after == before != ours
