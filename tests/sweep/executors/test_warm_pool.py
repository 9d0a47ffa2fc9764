"""Warm processes: each becomes one attempt at most, with the same numbers, and none is left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from atma_sweep.sweep.attempt.failures import EXIT_MACHINE
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.executors.executor import ProcessSpec, attempt_command
from atma_sweep.sweep.executors.warm_pool import WarmPool
from atma_sweep.sweep.host import processes
from bench import Bench
from patience import PATIENCE_S
from tiers import long_form

Start = Callable[[], subprocess.Popen[bytes]]
Began = list[subprocess.Popen[bytes]]
READS = "import sys; print(sys.stdin.readline().strip(), flush=True); sys.stdin.read()"
WARM = "from atma_sweep.sweep.executors.executor import LocalExecutor; LocalExecutor.has_cpu_warm_pool = True; from atma_sweep.cli import app; app()"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.in_turn()
    yield bench
    bench.close()


def waiting(bench: Bench) -> list[psutil.Process]:
    """Return warm processes that no attempt has claimed, and attempts that were warm processes."""
    return [process for process in bench.processes() if "--spare" in process.cmdline()]


# --- from outside ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("n_ranks", [2, *long_form(1)])
def test_attempts_that_were_spares_are_attempts(
    bench: Bench, tmp_path: Path, request: pytest.FixtureRequest, n_ranks: int
) -> None:
    """Two cells in a row: the second runs in a warm process and gives the numbers of any other process."""
    bench.edit("resources: {", f"resources: {{ranks: {n_ranks}, ")
    bench.launch("--db", f"sqlite:///{tmp_path}/plain.db", "--runs", "plain")
    spares: list[int] = request.getfixturevalue("spares")
    bench.launch()
    bench.once(2)
    attempts = bench.sql("SELECT pid, run_dir FROM attempt ORDER BY id")
    assert [pid in spares for pid, _ in attempts] == [False, True]
    for _, folder in attempts:
        log = (bench.folder / "atma-runs" / str(folder) / "log.txt").read_text()
        assert "12 steps of 128 tokens" in log
        assert log.rstrip().splitlines()[-1].split(maxsplit=2)[2].startswith("done after")
    assert bench.processes() == []
    warm = bench.curves()
    (tmp_path / "atma.db").unlink()
    (tmp_path / "plain.db").rename(tmp_path / "atma.db")
    assert warm == bench.curves()


@pytest.mark.thorough
@pytest.mark.usefixtures("spares")
def test_failed_warm_start_does_not_stop_attempts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(processes, "start_piped_child", refused)
    bench.launch()
    bench.once(2)
    assert bench.processes() == []


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_warm_process_ends_with_its_launch(bench: Bench, number: int) -> None:
    bench.grid(tokens=128 * 4000)
    bench.in_turn()
    command = [sys.executable, "-c", WARM, "launch", "micro.yaml", "--executor", "local"]
    launch = subprocess.Popen(command, cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    bench.wait("SELECT 1 FROM attempt WHERE step > 3", launch)
    assert len(waiting(bench)) == 1
    launch.send_signal(number)
    launch.communicate(timeout=PATIENCE_S)
    bench.gone()


def become(folder: Path, env: Mapping[str, str] = os.environ) -> int:
    """Return the exit code of a warm process that becomes the attempt in `folder`/cell/1."""
    command = attempt_command(ProcessSpec(1, folder, "", Resources(gpus=0), "sqlite:///x.db"), os.getpid(), spare=True)
    spare = processes.start_piped_child(command, env, folder)
    assert spare.stdin is not None
    spare.stdin.write(b"cell/1\n")
    spare.stdin.close()
    return spare.wait(PATIENCE_S)


@pytest.mark.thorough
def test_warm_process_with_failed_import_restarts_as_attempt(tmp_path: Path) -> None:
    """A failed import may fail differently the second time, so the attempt is a fresh process with the same pid."""
    (tmp_path / "cell" / "1").mkdir(parents=True)
    broken = tmp_path / "path" / "torch" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("raise OSError(5, 'Input/output error')")
    path = f"{broken.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    assert become(tmp_path, {**os.environ, "PYTHONPATH": path}) != 0
    log = (tmp_path / "cell" / "1" / "log.txt").read_text()
    assert "job.json" in log, "the first thing that an attempt looks for, which here is not there"


@pytest.mark.thorough
def test_warm_process_without_its_folder_is_a_machine_failure(tmp_path: Path) -> None:
    assert become(tmp_path) == EXIT_MACHINE


# --- from inside ----------------------------------------------------------------------------------------------------


@pytest.fixture
def began(tmp_path: Path) -> Iterator[Began]:
    started: Began = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start(began: Began, tmp_path: Path) -> Start:
    """Function that starts a process which waits for a line, and appends it to `began`."""

    def begin() -> subprocess.Popen[bytes]:
        began.append(processes.start_piped_child([sys.executable, "-c", READS], os.environ, tmp_path))
        return began[-1]

    return begin


def test_warm_process_is_claimed_once(start: Start, tmp_path: Path) -> None:
    spares, env = WarmPool(), {"A": "1"}
    assert spares.claim("0", tmp_path, env, "cell/1") is None
    for device in ("0", "1", "0"):
        spares.refill(device, tmp_path, env, start)
    first = spares.claim("0", tmp_path, env, "cell/1")
    assert first is not None
    assert first.wait(PATIENCE_S) == 0, "it has read its line, and the pipe's end"
    assert spares.claim("0", tmp_path, env, "cell/2") is None
    second = spares.claim("1", tmp_path, env, "cell/2")
    assert second is not None
    assert second.pid != first.pid


@pytest.mark.parametrize("change", ["environment", "runs", "dead"])
def test_unsuitable_warm_process_is_killed(start: Start, began: Began, tmp_path: Path, change: str) -> None:
    spares = WarmPool()
    spares.refill("", tmp_path, {"A": "1"}, start)
    if change == "dead":
        began[0].kill()
        began[0].wait()
    env, runs = {"A": "2" if change == "environment" else "1"}, tmp_path / "other" if change == "runs" else tmp_path
    assert spares.claim("", runs, env, "cell/1") is None
    assert began[0].poll() == -signal.SIGKILL
    assert spares.claim("", tmp_path, {"A": "1"}, "cell/1") is None


def test_closing_ends_all(start: Start, began: Began, tmp_path: Path) -> None:
    spares = WarmPool()
    for device in ("0", "1"):
        spares.refill(device, tmp_path, {}, start)
    spares.close()
    assert [process.poll() for process in began] == [-signal.SIGKILL] * 2
    spares.close()
