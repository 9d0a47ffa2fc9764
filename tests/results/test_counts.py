"""Numbers of things agree with their noun."""

from __future__ import annotations

from pathlib import Path

import pytest
from atma_sweep.results.counts import counted
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.plan import corpora, planner
from atma_sweep.sweep.run.progress import describe_plan


@pytest.mark.parametrize(
    ("number", "noun", "plural", "words"),
    [
        (0, "value", None, "0 values"),
        (1, "value", None, "1 value"),
        (2, "value", None, "2 values"),
        (1, "entry", "entries", "1 entry"),
        (1200, "entry", "entries", "1,200 entries"),
    ],
)
def test_counted_agrees_with_its_number(number: int, noun: str, plural: str | None, words: str) -> None:
    assert counted(number, noun, plural) == words


@pytest.mark.parametrize(("only", "words"), [(1, "1 cell"), (2, "2 cells")])
def test_a_plan_of_one_cell_says_one_cell(tmp_path: Path, only: int, words: str) -> None:
    cells, _ = corpora.expand(load_grid("quick"), tmp_path, dry=True)
    made = planner.plan(cells[:only], {}, retrain=False, left_out=0)
    first, second = describe_plan(made, "quick")[:2]
    assert first == f"quick: {words}: {only} new"
    assert second.startswith(f"to train: {words}, ")
