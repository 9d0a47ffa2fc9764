"""The bar, the time left and the sparkline, against closed forms and counted values."""

from __future__ import annotations

import pytest
from atma_sweep.results.console.progress import (
    SPARKS,
    RunningCell,
    SweepProgress,
    bar,
    estimate_remaining_seconds,
    progress_lines,
    running_lines,
    sparkline,
    visible_cells,
)
from atma_sweep.results.console.text import fold

WIDTHS = (60, 80, 120, 200)


def progress(**changes: object) -> SweepProgress:
    fields = {"cells_done": 5, "cells": 12, "tokens_done": 3e6, "tokens": 8e6, "tokens_per_s": 12_300.0}
    return SweepProgress(sweep="quick", **(fields | {"remaining_s": 407.0} | changes))  # type: ignore[arg-type]


def test_bar_counts_tokens_and_not_cells() -> None:
    (line,) = progress_lines(progress(), 160)
    # 3 of 8 million tokens are 37.5 % of 40 characters
    assert line.count("━") == 15
    assert line.count("─") == 25
    assert " 37 %  5 of 12 cells, 3.00M of 8.00M tokens, 12,300 tokens/s, about 7 min left" in line
    assert [bar(share / 8, 8) for share in (0, 4, 7.9, 8)] == ["─" * 8, "━" * 4 + "─" * 4, "━" * 7 + "─", "━" * 8]


def test_fraction_counts_cells_where_nothing_is_trained() -> None:
    assert progress(tokens=0, tokens_done=0).fraction == 5 / 12
    assert progress(tokens=0, cells=0).fraction == 0
    assert progress(tokens_done=9e6).fraction == 1


def test_remaining_time_is_the_closed_form() -> None:
    # two workers: 200 s and 100 s of their own, and 900 tokens at 3 tokens/s in between
    assert estimate_remaining_seconds([(2000, 10.0), (500, 5.0)], 900, 3.0) == (200 + 100 + 300) / 2
    # the slowest cell bounds it from below
    assert estimate_remaining_seconds([(2000, 10.0), (5, 5.0)], 0, 3.0) == 200
    # a cell without a speed of its own runs at the typical one
    assert estimate_remaining_seconds([(900, None)], 300, 3.0) == 400
    assert estimate_remaining_seconds([], 300, 3.0) is None
    assert estimate_remaining_seconds([(10, 1.0)], 300, None) is None


def test_sparkline_against_counted_values() -> None:
    assert sparkline(range(8), 8) == SPARKS
    assert sparkline(range(7, -1, -1), 8) == SPARKS[::-1]
    # the means of two values each: 0.5, 2.5, 4.5, 6.5 -> levels 0, 7/3, 14/3, 7
    assert sparkline(range(8), 4) == "".join(SPARKS[level] for level in (0, 2, 5, 7))
    assert sparkline([2.0] * 5, 3) == SPARKS[0] * 3
    assert sparkline([], 3) == ""
    assert [len(sparkline(range(n), 16)) for n in (1, 15, 16, 17, 1000)] == [1, 15, 16, 16, 16]


@pytest.mark.parametrize("width", WIDTHS)
def test_progress_lines_fit(width: int) -> None:
    lines = progress_lines(progress(), width)
    assert max(map(len, lines)) <= width
    facts = "37 % 5 of 12 cells, 3.00M of 8.00M tokens, 12,300 tokens/s, about 7 min left"
    assert " ".join(" ".join(lines).split()).replace("━", "").replace("─", "").split() == ["quick", *facts.split()]


def rows() -> list[RunningCell]:
    trained = RunningCell(
        slug="polar-baseline-d0-m1-w0-recipeintended-s0", phase="training", step=500, steps_total=1900, loss=3.25,
        losses=[5, 4, 3.5, 3.25], tokens_per_s=195_899.0, remaining_s=3e4, host="node-17/NVIDIA H200", silent_s=75.0,
    )  # fmt: skip
    return [trained, RunningCell(slug="nope-baseline-d0-m1-w0-s0", phase="probing", host="node-2/NVIDIA H200")]


@pytest.mark.parametrize("width", WIDTHS)
def test_running_lines_fit_completely(width: int) -> None:
    lines = [line for cell in running_lines(rows(), width) for line in cell]
    assert max(map(len, lines)) <= width
    printed = " ".join(lines).replace(",", "").split()
    for word in (
        rows()[0].slug, "500/1900", "3.250", "█▄▂▁", "195899", "8.3", "h", "node-17/NVIDIA", "75", "s", "probing",
    ):  # fmt: skip
        assert word in printed, word


def test_table_of_running_cells_keeps_its_columns() -> None:
    cells = rows()
    short, long = (
        running_lines([RunningCell(slug="a", phase="training", step=1, losses=losses, tokens_per_s=10.0)], 120)[1][0]
        for losses in ([1.0], list(range(50)))
    )
    assert short.index("10") == long.index("10")
    assert running_lines([], 80) == []
    assert len(running_lines(cells, None)) == 3


def test_hidden_cells_are_counted() -> None:
    cells = [["cell  step"], *([f"c{index}"] for index in range(5))]
    styles = ["dim"] * 6
    assert [line for line, _ in visible_cells(cells, 6, styles)] == [line for (line,) in cells]
    assert [line for line, _ in visible_cells(cells, 4, styles)] == ["cell  step", "c0", "c1", "and 3 more running"]
    assert visible_cells(cells, 1, styles) == [("and 5 more running", "")]
    assert visible_cells(cells, 0, styles) == []


def test_fold_hangs_below_the_last_column() -> None:
    line = "ok      clock   the clock of this machine and that of the database agree within a second or two"
    folded = fold(line, 60).split("\n")
    assert folded[0].startswith("ok      clock   the clock")
    assert all(rest.startswith(" " * 16 + rest.strip()[0]) for rest in folded[1:])
    assert " ".join(" ".join(folded).split()) == " ".join(line.split())
    assert fold("x" * 70 + " y", 60) == "x" * 70 + "\n  y"
    assert fold(line, None) == line
