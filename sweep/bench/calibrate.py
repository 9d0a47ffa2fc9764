"""Calibration: a few timed steps of a cell, on a GPU or the CPU, from which a plan estimates the rest."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..attempt.device import CUBLAS_WORKSPACE, choose_device, use_shared_self_tests
from ..errors import MachineError
from ..grid.cell import Cell
from ..grid.plugins import load_plugin
from ..host.processes import exit_with_parent
from ..planning.speed_model import Calibration, TargetMachine
from ..probes.subject import evaluating
from .train import TimedCell

MAX_MICRO_BATCHES = 8
"""Micro-batches of a timed step; a longer step is extrapolated, with its optimizer counted once."""
MIN_SECONDS = 2.0
"""Shortest time that steps are timed for, with at least MIN_STEPS steps."""
MIN_STEPS = 3
MAX_STEPS = 60


def calibrate_cell(cell: Cell, speed_key: str, machine: TargetMachine, *, tell: Callable[[str], None]) -> Calibration:
    """Return the calibration of a cell, timed on this machine; it is not stored.

    A cell that compiles is timed in a subprocess, after another subprocess has filled the compiler's cache. On the CPU,
    the number of torch threads of this process is set to the cell's cores.

    Args:
        cell: The cell.
        speed_key: Key of cells of equal speed, as `SpeedClasses.key` returns it.
        machine: Machine that is priced, which must be this one.
        tell: Called with a line of progress at the end.

    Raises:
        MachineError: If the cell needs a GPU that is missing or differs from `machine`, does not fit into memory, or
            its subprocess dies.
    """
    config = cell.config
    device = choose_device(1 if config.resources.gpus else 0)
    if device.type == "cuda":
        local_gpu = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
        if local_gpu != machine.name(config):
            raise MachineError(
                f"--calibrate times the {local_gpu} of this machine, but the plan is for {machine.name(config)}; "
                "leave --gpu out, or calibrate there"
            )
    else:
        torch.set_num_threads(config.resources.cpus)
    short = _shortened_cell(cell)
    description = f"the process that timed cell {cell.slug}"
    try:
        if does_compile(cell, device):
            # the second process finds the compiler's cache filled, as the attempts of a sweep do
            run_in_subprocess(description, _compile, short, device)
            calibration: Calibration = run_in_subprocess(
                description, _time_cell, cell, short, speed_key, machine.name(config), device, import_seconds()
            )
        else:
            calibration = _time_cell(cell, short, speed_key, machine.name(config), device, import_seconds())
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MachineError(f"cell {cell.slug} does not fit into the free memory: {error}") from error
    tell(
        f"{cell.slug}: {config.train.batch_tokens / calibration.step_s:,.0f} tokens/s on {calibration.device}, "
        f"first step after {calibration.start_s + calibration.compile_s + calibration.step_s:.1f} s"
    )
    return calibration


def does_compile(cell: Cell, device: torch.device) -> bool:
    return device.type == "cuda" and cell.config.train.compile is not False


def run_in_subprocess(description: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a module-level function in a fresh process, wait for it, and return its result or raise its exception.

    An exception that cannot be pickled arrives as MachineError. Ctrl-C reaches only this process, which then ends the
    other.

    Args:
        description: Name of the process in error messages.
        function: Function that can be pickled, with a result that can be.
        args: Its arguments, which can be pickled.

    Raises:
        MachineError: If the process ends without a result.
    """
    context = multiprocessing.get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(answer, os.getpid(), function, args))
    resource_tracker.ensure_running()  # else process.start() starts it, which unblocks the signal
    # Ctrl-C must reach this process only, which then ends the other
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    answer.close()
    try:
        returned, result = answers.recv()
    except EOFError:
        process.join()
        hint = "; the machine may have run out of memory" if process.exitcode == -signal.SIGKILL else ""
        raise MachineError(f"{description} ended with exit code {process.exitcode}{hint}") from None
    finally:
        process.terminate()
        process.join()
    if not returned:
        raise result
    return result


def _send_result(channel: Connection, parent: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in the subprocess and send (True, result) or (False, exception) through the channel.

    An exception that cannot be pickled is sent as a MachineError. The process ends with its parent.
    """
    exit_with_parent(parent)
    try:
        channel.send((True, function(*args)))
    except Exception as error:  # noqa: BLE001, raised where it is waited for
        error.add_note(traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001, one that cannot travel
            error = MachineError(f"{type(error).__name__}: {error}")
        channel.send((False, error))


def _shortened_cell(cell: Cell) -> Cell:
    """Return the cell with at most eight micro-batches (MAX_MICRO_BATCHES) per step; id and slug are unchanged."""
    train = cell.config.train
    micro_batches = min(train.accumulation, MAX_MICRO_BATCHES)
    shorter = train.model_copy(update={"batch_tokens": micro_batches * train.micro_batch * train.seq_len})
    return replace(cell, config=cell.config.model_copy(update={"train": shorter}))


def _warmed_up(short: Cell, device: torch.device) -> TimedCell:
    """Return the cell after its first steps; loads its plugins into this process.

    Deterministic cells set CUBLAS_WORKSPACE_CONFIG in the environment.
    """
    for plugin in short.config.plugins:
        load_plugin(Path(plugin.path), plugin.sha256)
    if device.type == "cuda":
        use_shared_self_tests(device)
    if short.config.train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    return TimedCell(short, device)


def _compile(short: Cell, device: torch.device) -> None:
    _warmed_up(short, device)


def _time_cell(
    cell: Cell, short: Cell, speed_key: str, device_name: str, device: torch.device, import_s: float
) -> Calibration:
    """Return the calibration of a cell from timed steps of its shortened form.

    `step_s`, `low_s` and `high_s` are median, fastest and slowest step, extrapolated to the full number of
    micro-batches. `start_s` is `import_s` plus the construction of the network. `compile_s` is the time of the first
    two steps beyond two median steps (compiling, capturing), not part of `start_s`.

    At least 3 steps are timed (MIN_STEPS), and more until they took 2 s (MIN_SECONDS) or there are 60 (MAX_STEPS).

    Args:
        cell: The cell.
        short: The shortened cell, which is run.
        speed_key: Key of cells of equal speed.
        device_name: Name of the device in the calibration.
        device: The device.
        import_s: Seconds of an attempt's imports, added to the start.
    """
    train, timed_micro_batches = cell.config.train, short.config.train.accumulation
    runner = _warmed_up(short, device)
    optimizer = statistics.median(runner.optimizer_seconds() for _ in range(3))
    steps: list[float] = []
    while len(steps) < MIN_STEPS or (sum(steps) < MIN_SECONDS and len(steps) < MAX_STEPS):
        began = time.perf_counter()
        runner.advance()
        runner.wait()
        steps.append(time.perf_counter() - began)

    median_s = statistics.median(steps)
    first_steps_s = max(0.0, runner.first_step - runner.built - median_s) + max(0.0, runner.second_step - median_s)

    def full_step(seconds: float) -> float:
        """Return the seconds of a full step from those of a shortened one."""
        return optimizer + max(seconds - optimizer, 0.0) * train.accumulation / timed_micro_batches

    return Calibration(
        like=speed_key,
        device=device_name,
        slug=cell.slug,
        step_s=full_step(median_s),
        low_s=full_step(min(steps)),
        high_s=full_step(max(steps)),
        start_s=import_s + runner.built,
        compile_s=first_steps_s,
        validation_token_s=_validation_token_seconds(runner),
    )


@torch.no_grad()
def _validation_token_seconds(runner: TimedCell) -> float:
    """Return the seconds per token of a validation's forward pass, losses included.

    It is the median of three timed passes after an untimed one, over rows of training length up to `eval.chunk_tokens`.
    """
    config, times_s = runner.cell.config, list[float]()
    length, chunk = config.train.seq_len, config.eval.chunk_tokens
    rows = max(1, chunk // length)
    tokens = torch.zeros((rows, length), dtype=torch.int64, device=runner.device)
    with evaluating(runner.model):
        for _ in range(4):
            runner.wait()
            began = time.perf_counter()
            hidden = runner.model.features(tokens, full_context=False, chunk=chunk).hidden_BTD
            runner.model.token_losses(hidden, tokens, chunk=chunk).cpu()
            times_s.append(time.perf_counter() - began)
    return statistics.median(times_s[1:]) / (rows * length)


@functools.cache
def import_seconds() -> float:
    """Return the wall seconds of a new Python process that imports an attempt's modules; measured once, then cached."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import atma_sweep.sweep.attempt.cell_runner"], check=True, capture_output=True
    )
    return time.perf_counter() - began
