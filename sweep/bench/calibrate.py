"""Times a few steps of a cell, so that a plan can say what all of them will take. On a GPU or on the CPU."""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ..attempt.device import WORKSPACE, choose_device, share_compiled
from ..errors import MachineError
from ..grid.cell import Cell
from ..plan.calibrated import Calibration
from ..plan.speed import Place
from ..probes.subject import evaluating
from .train import Runner

MOST_MICRO = 8
"""Micro-batches of a timed step: one that has more is made of such ones, and its optimizer works once."""
SECONDS = 2.0
"""At least so long steps are timed, and at least STEPS of them."""
STEPS = 3
MOST_STEPS = 60


def timed(cell: Cell, like: str, place: Place, *, tell: Callable[[str], None]) -> Calibration:
    """What steps of the cell take on this machine, which must be that of `place`.

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
        share_compiled(device, *(plugin.sha256 for plugin in config.plugins))
        torch.compiler.reset()  # which else compiles no more than a few networks of one process
    else:
        torch.set_num_threads(config.resources.cpus)
    if config.train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    try:
        return _timed(cell, like, place.name(config), device, tell)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MachineError(f"cell {cell.slug} does not fit in memory beside what runs there: {error}") from error


def _timed(cell: Cell, like: str, where: str, device: torch.device, tell: Callable[[str], None]) -> Calibration:
    train = cell.config.train
    together = min(train.accumulation, MOST_MICRO)
    shorter = train.model_copy(update={"batch_tokens": together * train.micro_batch * train.seq_len})
    short = replace(cell, config=cell.config.model_copy(update={"train": shorter}))
    if device.type == "cuda" and train.compile:
        # what is compiled is kept for every later process, so that the attempts of a sweep find it; so does the next runner
        Runner(short, device)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    runner = Runner(short, device)
    optimizer = statistics.median(runner.optimizer_seconds() for _ in range(3))
    steps: list[float] = []
    while len(steps) < STEPS or (sum(steps) < SECONDS and len(steps) < MOST_STEPS):
        began = time.perf_counter()
        runner.advance()
        runner.wait()
        steps.append(time.perf_counter() - began)

    def whole(seconds: float) -> float:
        return optimizer + max(seconds - optimizer, 0.0) * train.accumulation / together

    step = whole(statistics.median(steps))
    found = Calibration(
        like=like,
        device=where,
        slug=cell.slug,
        step_s=step,
        low_s=whole(min(steps)),
        high_s=whole(max(steps)),
        start_s=_imports() + runner.built,
        compile_s=max(0.0, runner.first_step - runner.built - statistics.median(steps)),
        validation_token_s=_forward(runner),
    )
    tell(
        f"{cell.slug}: {train.batch_tokens / step:,.0f} tokens/s on {where}, first step after {runner.first_step:.1f} s"
    )
    return found


@torch.no_grad()
def _forward(runner: Runner) -> float:
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
def _imports() -> float:
    """Seconds until the process of an attempt has loaded what it needs."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import atma_sweep.sweep.attempt.runner"], check=True, capture_output=True)
    return time.perf_counter() - began
