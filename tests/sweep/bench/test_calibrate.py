"""Calibration on the CPU: it times the given cell, and extrapolates longer steps arithmetically."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import ends
import pytest
import torch
from atma_sweep.sweep.bench import calibrate
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.planning.speed_model import TargetMachine

SMALL = """
set:
  model: {d_model: 16, n_layers: 3, n_heads: 2, n_kv_heads: 1, head_dim: 8, window_size: 8}
  train: {tokens: 40960, seq_len: 32, micro_batch: 2, batch_tokens: 2048}
"""
"""A step of 32 micro-batches, of which the calibration takes eight."""


def test_calibration_extrapolates_a_longer_step(
    cells: Callable[..., list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells(SMALL)
    monkeypatch.setattr(calibrate, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "import_seconds", lambda: 3.0)
    seen: list[int] = []

    class Watched(calibrate.TimedCell):
        def advance(self) -> None:
            seen.append(self.cell.config.train.accumulation)
            super().advance()
            for _ in range({1: 30, 2: 4}.get(len(seen), 0)):  # compiling, and capturing
                next(now)

        def optimizer_seconds(self) -> float:
            return 0.25

    now = iter(range(1000))
    monkeypatch.setattr(calibrate, "TimedCell", Watched)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: float(next(now)))
    lines: list[str] = []
    calibration = calibrate.calibrate_cell(cell, "abc", TargetMachine(None), tell=lines.append)
    assert seen == [8] * (2 + calibrate.MIN_STEPS)
    # the clock says a second a step: a quarter for the optimizer, the rest four times
    assert calibration.step_s == calibration.low_s == calibration.high_s == pytest.approx(0.25 + 0.75 * 4)
    assert calibration.compile_s == 30 + 4
    assert calibration.start_s >= 3.0
    assert calibration.validation_token_s > 0
    assert (calibration.like, calibration.slug, calibration.device) == (
        "abc",
        cell.slug,
        TargetMachine(None).name(cell.config),
    )
    assert len(lines) == 1


@pytest.mark.thorough
def test_calibration_times_compiled_cell_in_second_process(
    cells: Callable[..., list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that compiles itself would report a first step that attempts of a sweep do not have."""
    (cell,) = cells(SMALL)
    monkeypatch.setattr(calibrate, "does_compile", lambda cell, device: True)
    functions: list[str] = []
    apart = calibrate.run_in_subprocess

    def watched(what: str, function: Callable[..., object], *args: object) -> object:
        functions.append(function.__name__)
        return apart(what, function, *args)

    monkeypatch.setattr(calibrate, "run_in_subprocess", watched)
    monkeypatch.setattr(calibrate, "TimedCell", None)  # nothing is built in this process
    lines: list[str] = []
    calibration = calibrate.calibrate_cell(cell, "abc", TargetMachine(None), tell=lines.append)
    assert functions == ["_compile", "_time_cell"]
    assert calibration.low_s <= calibration.step_s <= calibration.high_s
    assert min(calibration.low_s, calibration.start_s, calibration.validation_token_s) > 0
    first = calibration.start_s + calibration.compile_s + calibration.step_s
    assert lines == [
        f"{cell.slug}: {2048 / calibration.step_s:,.0f} tokens/s on {calibration.device}, first step after {first:.1f} s"
    ]


@pytest.mark.thorough
def test_run_in_subprocess_returns_or_raises() -> None:
    assert calibrate.run_in_subprocess("it", os.getpid) != os.getpid()
    # an interrupt ends the one that waits, and leaves no traceback of the other
    assert signal.SIGINT in calibrate.run_in_subprocess("it", signal.pthread_sigmask, signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"):
        calibrate.run_in_subprocess("it", ends.exhaust_memory)
    with pytest.raises(MachineError, match="it ended with exit code -9; the machine may have run out of memory"):
        calibrate.run_in_subprocess("it", ends.killed)
    with pytest.raises(MachineError, match="GridError: g: a: is wrong") as caught:
        calibrate.run_in_subprocess("it", ends.wrong)
    assert caught.value.exit_code == 3
