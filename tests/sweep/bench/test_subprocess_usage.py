"""Benchmarks in subprocesses: measured resources of a command, and rows with a time limit."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from atma_sweep.sweep.bench.subprocess_usage import rows_of_child, run_measured
from atma_sweep.sweep.errors import MachineError
from patience import PATIENCE_S

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads another process's peak of memory")
def test_run_measured_reports_memory_of_the_command(tmp_path):
    ballast = b"x" * (400 * MIB)
    held = "x = b'x' * (150 << 20); import time; time.sleep(0.3); print(len(x))"
    took = run_measured([sys.executable, "-c", held], tmp_path)
    assert 150 * MIB < took.memory < 300 * MIB < len(ballast)
    assert took.printed == f"{150 * MIB}\n"
    assert took.wall > 0.3
    assert took.processor > 0


def test_run_measured_raises_with_the_output(tmp_path):
    with pytest.raises(MachineError, match="no such luck"):
        run_measured([sys.executable, "-c", "raise SystemExit('no such luck')"], tmp_path)


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Return the name of a new module with that code, which prints lines of JSON."""
    head = "import os, subprocess, sys, time\nfrom atma_sweep.sweep.bench.subprocess_usage import child_arguments\nargs = child_arguments()\n"
    (folder / "rows_printer.py").write_text(head + code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return "rows_printer"


def test_rows_of_child_come_with_its_arguments(tmp_path, monkeypatch):
    name = module(tmp_path, monkeypatch, "for one in args: print('[{\"a\": %s}]' % one, flush=True)\n")
    assert rows_of_child([name, "1", "2.5"], PATIENCE_S) == ([[{"a": 1}], [{"a": 2.5}]], None)


def test_rows_of_child_says_why_it_failed(tmp_path, monkeypatch):
    name = module(tmp_path, monkeypatch, "print('[]', flush=True)\nsys.exit(9)\n")
    assert rows_of_child([name], PATIENCE_S) == ([[]], "the timing process ended with exit code 9")


@pytest.mark.thorough
def test_rows_of_child_ends_it_and_its_compilers_in_time(tmp_path, monkeypatch):
    code = """
compiler = subprocess.Popen(["sleep", "986"])
open(args[0], "w").write(f"{os.getpid()} {compiler.pid}")
print("[]", flush=True)
time.sleep(985)
"""
    pids = tmp_path / "pids"
    name = module(tmp_path, monkeypatch, code)
    limit_s = 8.0  # many times what Python needs to start and print the first line
    began = time.monotonic()
    assert rows_of_child([name, str(pids)], limit_s) == ([[]], "no result after 8 s")
    assert time.monotonic() - began < 900
    started = [psutil.Process(pid) for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []
