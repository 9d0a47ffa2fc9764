"""A calibration on the CPU: it times the cell that it is given, and what it says of a longer step is arithmetic."""

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


def test_a_step_is_made_of_those_that_were_timed(
    cells: Callable[..., list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells(SMALL)
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "import_seconds", lambda: 3.0)
    seen: list[int] = []

    class Watched(calibrate.TimedCell):
        def advance(self) -> None:
            seen.append(self.cell.config.train.accumulation)
            super().advance()
            for _ in range({1: 30, 2: 4}.get(len(seen), 0)):  # compiling, and capturing
                next(now)

        def optimizer_seconds(self) -> float:
            super().optimizer_seconds()
            return 0.25

    now = iter(range(1000))
    monkeypatch.setattr(calibrate, "TimedCell", Watched)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: float(next(now)))
    told: list[str] = []
    found = calibrate.calibrate_cell(cell, "abc", TargetMachine(None), tell=told.append)
    assert seen == [8] * (2 + calibrate.STEPS)
    # the clock says a second a step: a quarter for the optimizer, the rest four times
    assert found.step_s == found.low_s == found.high_s == pytest.approx(0.25 + 0.75 * 4)
    assert found.compile_s == 30 + 4
    assert found.start_s >= 3.0
    assert found.validation_token_s > 0
    assert (found.like, found.slug, found.device) == ("abc", cell.slug, TargetMachine(None).name(cell.config))
    assert len(told) == 1


@pytest.mark.thorough
def test_what_is_compiled_is_timed_in_a_process_that_finds_it(
    cells: Callable[..., list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As attempts do: the first step of a process that has compiled itself would tell too little."""
    (cell,) = cells(SMALL)
    monkeypatch.setattr(calibrate, "does_compile", lambda cell, device: True)
    asked: list[str] = []
    apart = calibrate.run_in_subprocess

    def watched(what: str, function: Callable[..., object], *args: object) -> object:
        asked.append(function.__name__)
        return apart(what, function, *args)

    monkeypatch.setattr(calibrate, "run_in_subprocess", watched)
    monkeypatch.setattr(calibrate, "TimedCell", None)  # nothing is built in this process
    told: list[str] = []
    found = calibrate.calibrate_cell(cell, "abc", TargetMachine(None), tell=told.append)
    assert asked == ["_compile", "_timed"]
    assert found.low_s <= found.step_s <= found.high_s
    assert min(found.low_s, found.start_s, found.validation_token_s) > 0
    first = found.start_s + found.compile_s + found.step_s
    assert told == [
        f"{cell.slug}: {2048 / found.step_s:,.0f} tokens/s on {found.device}, first step after {first:.1f} s"
    ]


def test_a_process_apart_answers_or_says_how_it_ended() -> None:
    assert calibrate.run_in_subprocess("it", os.getpid) != os.getpid()
    # an interrupt ends the one that waits, and leaves no traceback of the other
    assert signal.SIGINT in calibrate.run_in_subprocess("it", signal.pthread_sigmask, signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"):
        calibrate.run_in_subprocess("it", ends.too_much)
    with pytest.raises(MachineError, match="it ended with -9; a machine out of memory does that"):
        calibrate.run_in_subprocess("it", ends.killed)
    with pytest.raises(MachineError, match="GridError: g: a: is wrong") as caught:
        calibrate.run_in_subprocess("it", ends.wrong)
    assert caught.value.exit_code == 3
