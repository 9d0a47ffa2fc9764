"""Times a few steps of a cell, so that a plan can say what all of them will take. On a GPU or on the CPU."""

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

from ..attempt.device import WORKSPACE, choose_device, share_self_tests
from ..errors import MachineError
from ..grid.cell import Cell
from ..grid.plugins import load_plugin
from ..host.processes import exit_with_parent
from ..planning.speed_model import Calibration, TargetMachine
from ..probes.subject import evaluating
from .train import TimedCell

MOST_MICRO = 8
"""Micro-batches of a timed step: one that has more is made of such ones, and its optimizer works once."""
SECONDS = 2.0
"""At least so long steps are timed, and at least STEPS of them."""
STEPS = 3
MOST_STEPS = 60


def calibrate_cell(cell: Cell, like: str, place: TargetMachine, *, tell: Callable[[str], None]) -> Calibration:
    """What steps of the cell take on this machine, which must be that of `length`.

    Raises MachineError where there is no GPU though the cell needs one, where it is another one, and where its memory
    does not do.
    """
    config = cell.config
    device = choose_device(1 if config.resources.gpus else 0)
    if device.type == "cuda":
        here = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
        if here != place.name(config):
            raise MachineError(
                f"--calibrate times the {here} of this machine, and the plan is for {place.name(config)}; "
                "leave --gpu out, or calibrate there"
            )
    else:
        torch.set_num_threads(config.resources.cpus)
    short = _short(cell)
    what = f"the process that timed cell {cell.slug}"
    try:
        if does_compile(cell, device):
            # the first compiles; the second finds that and pays the rest of a first step, as the attempts of a sweep do
            run_in_subprocess(what, _compile, short, device)
            found: Calibration = run_in_subprocess(
                what, _timed, cell, short, like, place.name(config), device, import_seconds()
            )
        else:
            found = _timed(cell, short, like, place.name(config), device, import_seconds())
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MachineError(f"cell {cell.slug} does not fit in memory beside what runs there: {error}") from error
    tell(
        f"{cell.slug}: {config.train.batch_tokens / found.step_s:,.0f} tokens/s on {found.device}, "
        f"first step after {found.start_s + found.compile_s + found.step_s:.1f} s"
    )
    return found


def does_compile(cell: Cell, device: torch.device) -> bool:
    return device.type == "cuda" and cell.config.train.compile is not False


def run_in_subprocess(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What `function`, one of a module, returns in a process of its own, which ends with it; raises what that raises.

    Raises MachineError, with `what` it was, where the process ends without an answer.
    """
    context = multiprocessing.get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(answer, os.getpid(), function, args))
    resource_tracker.ensure_running()  # which else starts here, and takes the signal's block off
    # an interrupt is for this process, which ends the other
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    answer.close()
    try:
        returned, found = answers.recv()
    except EOFError:
        process.join()
        hint = "; a machine out of memory does that" if process.exitcode == -signal.SIGKILL else ""
        raise MachineError(f"{what} ended with {process.exitcode}{hint}") from None
    finally:
        process.terminate()
        process.join()
    if not returned:
        raise found
    return found


def _answer(answer: Connection, parent: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    exit_with_parent(parent)
    try:
        answer.send((True, function(*args)))
    except Exception as error:  # noqa: BLE001, raised where it is waited for
        error.add_note(traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001, one that cannot travel
            error = MachineError(f"{type(error).__name__}: {error}")
        answer.send((False, error))


def _short(cell: Cell) -> Cell:
    """The cell with no more micro-batches a step than are timed."""
    train = cell.config.train
    together = min(train.accumulation, MOST_MICRO)
    shorter = train.model_copy(update={"batch_tokens": together * train.micro_batch * train.seq_len})
    return replace(cell, config=cell.config.model_copy(update={"train": shorter}))


def _first_step(short: Cell, device: torch.device) -> TimedCell:
    """The cell after its first steps, in a process that knows its plugins."""
    for plugin in short.config.plugins:
        load_plugin(Path(plugin.path), plugin.sha256)
    if device.type == "cuda":
        share_self_tests(device)
    if short.config.train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    return TimedCell(short, device)


def _compile(short: Cell, device: torch.device) -> None:
    _first_step(short, device)


def _timed(cell: Cell, short: Cell, like: str, where: str, device: torch.device, imports: float) -> Calibration:
    train, together = cell.config.train, short.config.train.accumulation
    runner = _first_step(short, device)
    optimizer = statistics.median(runner.optimizer_seconds() for _ in range(3))
    steps: list[float] = []
    while len(steps) < STEPS or (sum(steps) < SECONDS and len(steps) < MOST_STEPS):
        began = time.perf_counter()
        runner.advance()
        runner.wait()
        steps.append(time.perf_counter() - began)

    usual = statistics.median(steps)
    first = max(0.0, runner.first_step - runner.built - usual) + max(0.0, runner.second_step - usual)

    def whole(seconds: float) -> float:
        return optimizer + max(seconds - optimizer, 0.0) * train.accumulation / together

    return Calibration(
        like=like,
        device=where,
        slug=cell.slug,
        step_s=whole(usual),
        low_s=whole(min(steps)),
        high_s=whole(max(steps)),
        start_s=imports + runner.built,
        compile_s=first,
        validation_token_s=_forward(runner),
    )


@torch.no_grad()
def _forward(runner: TimedCell) -> float:
    """Seconds of a token that a validation reads, its rows as many together as there."""
    config, seen = runner.cell.config, list[float]()
    length, chunk = config.train.seq_len, config.eval.chunk_tokens
    rows = max(1, chunk // length)
    tokens = torch.zeros((rows, length), dtype=torch.int64, device=runner.device)
    with evaluating(runner.model):
        for _ in range(4):
            runner.wait()
            began = time.perf_counter()
            hidden = runner.model.features(tokens, full_context=False, chunk=chunk).hidden_BTD
            runner.model.token_losses(hidden, tokens, chunk=chunk).cpu()
            seen.append(time.perf_counter() - began)
    return statistics.median(seen[1:]) / (rows * length)


@functools.cache
def import_seconds() -> float:
    """Seconds until the process of an attempt has loaded what it needs."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import atma_sweep.sweep.attempt.cell_runner"], check=True, capture_output=True
    )
    return time.perf_counter() - began
