"""The learning-rate factor (docs/reference/mechanisms.md, "Training")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.training.schedule import is_curve_step, lr_factor
from torch.optim import lr_scheduler


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (80, 1.0), (85, 0.5), (99, 1 - 0.95**0.5)])
def test_wsd_falls_by_the_square_root(step: int, expected: float) -> None:
    assert lr_factor(step, 100, constant=0.8, decay="wsd") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("decay", "theirs"), [
    ("cosine", lambda adam, steps: lr_scheduler.CosineAnnealingLR(adam, steps)),
    ("linear", lambda adam, steps: lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)),
])  # fmt: skip
@pytest.mark.parametrize(("steps", "warmup", "constant"), [
    (40, 1, 0.0), (40, 2, 0.0), (47, 7, 0.25), (1900, 0, 0.3), (1901, 1, 0.3), (5, 0, 1.0), (1, 0, 0.3),
])  # fmt: skip
def test_warm_up_and_decay_are_torchs_own(
    decay: str, theirs: Callable[..., Any], steps: int, warmup: int, constant: float
) -> None:
    adam = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    level = math.ceil((steps - warmup) * constant)
    rise = lr_scheduler.LinearLR(adam, 1 / max(1, warmup), 1.0, max(1, warmup - 1))
    # torch counts from 0, and so does each of its parts
    parts = [rise, lr_scheduler.ConstantLR(adam, 1.0), theirs(adam, max(1, steps - warmup - level))]
    every = lr_scheduler.SequentialLR(adam, parts, [warmup, warmup + level])
    for step in range(steps):
        expected = adam.param_groups[0]["lr"]
        assert lr_factor(step, steps, constant=constant, decay=decay, warmup=warmup) == pytest.approx(
            expected, abs=1e-9
        )
        adam.step()
        every.step()
    if (steps, decay) == (1900, "linear"):
        assert expected == pytest.approx(7.5e-4, rel=3e-3), "as documented"


def test_the_constant_part_begins_after_the_warm_up() -> None:
    plain = [lr_factor(step, 50, constant=0.4, decay="wsd") for step in range(50)]
    warm = [lr_factor(step, 60, constant=0.4, decay="wsd", warmup=10) for step in range(60)]
    assert warm[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert warm[10:] == plain


def test_a_run_that_never_leaves_its_warm_up_is_refused() -> None:
    small = {"tokens": 80, "seq_len": 4, "batch_tokens": 8, "micro_batch": 1}
    assert TrainConfig(**small, warmup_steps=9).steps == 10
    with pytest.raises(ValueError, match=r"warmup_steps \(10\) must be below the 10 steps of the run"):
        TrainConfig(**small, warmup_steps=10)


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("constant", [0.0, 0.3, 0.99, 1.0])
def test_never_rises_and_stays_above_zero(decay: str, constant: float) -> None:
    values = [lr_factor(step, 37, constant=constant, decay=decay) for step in range(37)]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert min(values) > 0


def test_published_number_of_steps() -> None:
    assert TrainConfig(tokens=996_147_200).steps == 1900
    assert TrainConfig(tokens=10**9).steps == 1907
    assert TrainConfig(tokens=996_147_199).steps == 1899
    assert TrainConfig().accumulation == 64


@pytest.mark.parametrize("steps", [1, 2, 99, 100, 101, 1900, 10**5 + 7])
def test_stored_losses_begin_early_and_are_bounded(steps: int) -> None:
    stored = [step for step in range(1, steps + 1) if is_curve_step(step, steps)]
    assert {1, 2, 4, 8} & set(range(steps + 1)) <= set(stored)
    assert len(stored) <= 100 + math.log2(steps) + 1
    assert max(np.diff([0, *stored, steps + 1])) <= math.ceil(steps / 100)
