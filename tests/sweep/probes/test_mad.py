"""Probe mad on networks whose answers are computed, against a separate count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.intervals import wilson_of_trials
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data.builtin.mad import MadConfig, MadRows, mark_targets
from atma_sweep.sweep.data.computed_rows import TARGET
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.subject import CellSubject, run_probe

ROWS = 25
TASKS: dict[str, dict[str, Any]] = {
    "recall": {"task": "recall", "vocabulary": 10, "length": 16},
    "copying": {"task": "copying", "vocabulary": 10, "length": 16, "copied": 3},
    "compression": {"task": "compression", "vocabulary": 10, "length": 8},
}


def answers(task: str) -> dict[tuple[int, ...], np.ndarray]:
    """Return, by the row that the network reads, the token that it should predict at each position; 0 elsewhere."""
    settings = MadConfig(**TASKS[task])
    rows = MadRows(ROWS, settings, split="validation").made(np.arange(ROWS)).astype(np.int64)
    marks = mark_targets(rows.astype(np.uint16), settings).astype(np.int64)
    targets = np.where(marks >= TARGET, marks - TARGET, np.where(marks == 1, rows, 0))
    read = rows[:, :-1] if task == "recall" else rows
    predicted = np.concatenate([targets[:, 1:], np.zeros((ROWS, 1), dtype=np.int64)], 1)
    return {tuple(row.tolist()): wanted[: len(row)] for row, wanted in zip(read, predicted, strict=True)}


@pytest.fixture
def scores(rule: Any, subject: Callable[..., CellSubject]) -> Callable[..., dict[str, Any]]:
    """Fixture: a function from a predictor and a task to the probe's measurements by metric."""

    def measure(predict: Callable[[np.ndarray], np.ndarray], task: str) -> dict[str, Any]:
        who = subject(rule(predict, 16), chunk_tokens=60, settings={"mad": {"rows": ROWS, "items": 4}})
        config = who.config.model_copy(update={"data": DataConfig(corpus="mad", settings={"mad": TASKS[task]})})
        ((measured, examples),) = run_probe("mad", replace(who, tokenizer=load_tokenizer("mad"), config=config), [0])
        return {each.metric: each for each in measured} | {"items": examples}

    return measure


@pytest.mark.parametrize("task", TASKS)
def test_mad_scores_of_solver_and_of_constant(task: str, scores: Callable[..., dict[str, Any]]) -> None:
    solved = answers(task)
    perfect = scores(lambda row: solved[tuple(row.tolist())], task)
    assert (perfect["accuracy"].value, perfect["accuracy"].n) == (1, ROWS)
    assert [example.value for example in perfect["items"]] == [1] * 4
    settings = MadConfig(**TASKS[task])
    rows = MadRows(ROWS, settings, split="validation").made(np.arange(ROWS)).astype(np.int64)
    marks = mark_targets(rows.astype(np.uint16), settings).astype(np.int64)
    wanted = np.where(marks >= TARGET, marks - TARGET, rows)[marks > 0]
    constant = scores(lambda row: np.full(len(row), 7), task)
    assert constant["accuracy"].value == pytest.approx((wanted == 7).mean())
    low_high = wilson_of_trials(constant["accuracy"].value, ROWS)
    assert (constant["accuracy"].low, constant["accuracy"].high) == low_high
    assert constant["answers"].value == len(wanted)


def test_mad_chance_is_guess_among_values(subject: Callable[..., CellSubject], rule: Any) -> None:
    who = subject(rule(lambda row: row))
    for task, level in (("recall", 1 / 5), ("copying", 1 / 8), ("compression", 1 / 9)):
        config = who.config.model_copy(update={"data": DataConfig(corpus="mad", settings={"mad": TASKS[task]})})
        probe = bound("mad", config)
        assert [probe.chance(metric) for metric in probe.metrics] == [level, None]
