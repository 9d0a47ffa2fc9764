"""Numbers of things agree with their noun."""

from __future__ import annotations

from pathlib import Path

import pytest
from atma_sweep.results.console.text import counted
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.orchestrator.display import describe_plan
from atma_sweep.sweep.planning import admission, planner


@pytest.mark.parametrize(
    ("number", "noun", "plural", "wording"),
    [
        (0, "value", None, "0 values"),
        (1, "value", None, "1 value"),
        (2, "value", None, "2 values"),
        (1, "entry", "entries", "1 entry"),
        (1200, "entry", "entries", "1,200 entries"),
    ],
)
def test_counted_agrees_with_its_number(number: int, noun: str, plural: str | None, wording: str) -> None:
    assert counted(number, noun, plural) == wording


@pytest.mark.parametrize(("only", "wording"), [(1, "1 cell"), (2, "2 cells")])
def test_a_plan_counts_its_cells(tmp_path: Path, only: int, wording: str) -> None:
    cells, _ = admission.expand_grid(load_grid("quick"), tmp_path, dry=True)
    plan = planner.plan(cells[:only], {}, retrain=False, num_filtered_out=0)
    first, second = describe_plan(plan, "quick")[:2]
    assert first == f"quick: {wording}: {only} new"
    assert second.startswith(f"to train: {wording}, ")
