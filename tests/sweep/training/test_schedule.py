"""The learning-rate factor (docs/mechanisms.md, "Training")."""

from __future__ import annotations

import math

import pytest
from atma_sweep.sweep.cell import TrainConfig
from atma_sweep.sweep.training.schedule import factor


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 1.0), (1, 1.0), (569, 1.0), (570, 1.0), (1235, 0.5), (1899, 1 / 1330)]
)
def test_linear(step: int, expected: float) -> None:
    assert factor(step, 1900, decay="linear") == pytest.approx(expected, abs=1e-12)


def test_last_linear_step_is_the_documented_one() -> None:
    assert factor(1899, 1900, decay="linear") == pytest.approx(7.5e-4, rel=3e-3)


@pytest.mark.parametrize(("step", "expected"), [
    (0, 1.0), (570, 1.0), (1235, 0.5), (570 + 1330 // 4, 0.5 * (1 + math.cos(math.pi * 332 / 1330))),
    (1899, 0.5 * (1 + math.cos(math.pi * 1329 / 1330))),
])  # fmt: skip
def test_cosine(step: int, expected: float) -> None:
    assert factor(step, 1900, decay="cosine") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("constant", [0.0, 0.3, 0.99, 1.0])
def test_never_rises_and_stays_above_zero(decay: str, constant: float) -> None:
    values = [factor(step, 37, constant=constant, decay=decay) for step in range(37)]
    assert values[0] == 1.0
    assert values == sorted(values, reverse=True)
    assert min(values) > 0


def test_constant_part_of_a_whole_run() -> None:
    assert [factor(step, 5, constant=1.0) for step in range(5)] == [1.0] * 5


def test_one_step_is_at_full_rate() -> None:
    assert factor(0, 1) == 1.0


def test_published_number_of_steps() -> None:
    assert TrainConfig(tokens=996_147_200).steps == 1900
    assert TrainConfig(tokens=10**9).steps == 1907
    assert TrainConfig(tokens=996_147_199).steps == 1899
    assert TrainConfig().accumulation == 64
