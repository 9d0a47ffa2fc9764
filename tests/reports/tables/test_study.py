"""The table `study` against its trials: order, settings, standing, and what each took by the clock of its attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
import studied
from atma_sweep.reports.check import check_file
from atma_sweep.reports.render import render
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.store import Store
from atma_sweep.results.studies.optuna_study import Trial
from here import run_in_process
from studied import ENDS, RATE, SEARCH, SECONDS, TWO, loss, speed, trials_at_random


def rows_of(table: Table) -> dict[int, dict[str, str]]:
    return {int(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


@pytest.mark.thorough
def test_study_table_lists_ten_best_trials(studies: Store) -> None:
    table = make_table("study", studies, "tuned")
    done = [trial for trial in trials_at_random(SEARCH, 39, ends=ENDS) if trial.standing == "done"]
    best = sorted(done, key=lambda trial: loss(dict(trial.params)))[:10]
    assert [int(row[0]) for row in table.rows] == [trial.number for trial in best]
    rows = rows_of(table)
    for trial in best:
        row = rows[trial.number]
        assert row["Cell"] == trial.cell
        assert row["muon_lr"] == f"{trial.params[RATE]:.4g}"
        assert float(row["validation loss"]) == pytest.approx(loss(dict(trial.params)), abs=6e-4)
        assert row["Standing"] == "done"
        assert row["Seconds"] == str(SECONDS * (trial.number + 1))
        assert float(row["GPU h"]) == pytest.approx(2 * SECONDS * (trial.number + 1) / 3600, rel=6e-3)
    assert table.best == {(0, len(table.columns) - 1)}
    assert table.above == (
        "Sampler TPE, pruner ASHA, seed 0; objective: val.val_loss (less is better); search space: train.muon_lr (0.003 to 0.1, logarithmic); "
        "model.n_layers (4 to 16, steps of 4); attn_type (polar, nope, rope); train.weight_decay (0 to 0.2).",
        "40 of 40 trials: 33 done, 4 pruned, 1 diverged, 1 failed, 1 not finished.",
    )
    assert "10 of 40 trials; --all-rows lists all." in table.notes
    every = SECONDS * sum(range(1, 40))
    assert f"All trials together: {every:,} s, {2 * every / 3600:.3g} GPU h." in table.notes[1]


@pytest.mark.thorough
def test_every_trial_with_its_end_and_the_front_first(studies: Store) -> None:
    table = make_table("study", studies, "both", all_rows=True)
    assert len(table.rows) == 30
    points = {
        trial.number: (-loss(dict(trial.params)), speed(dict(trial.params)))
        for trial in trials_at_random(TWO, 30)
        if trial.number != 5
    }
    front = [n for n, a in points.items() if not any(b[0] >= a[0] and b[1] >= a[1] and b != a for b in points.values())]
    assert {row for row, _ in table.best} == set(range(len(front)))
    assert sorted(int(row[0]) for row in table.rows[: len(front)]) == front
    assert table.raw[0]["best"] is True
    assert table.raw[0]["params"] == dict(trials_at_random(TWO, 30)[table.raw[0]["number"]].params)
    assert rows_of(table)[5]["Standing"] == "failed"
    assert list(rows_of(table))[-1] == 5


@pytest.mark.thorough
def test_how_trials_end_and_what_a_repeated_cell_costs(empty: Store, tmp_path: Path) -> None:
    first, second = trials_at_random(SEARCH, 2, ends={1: "pruned"})
    again = Trial(2, first.params, "done", first.values, cell=first.cell)
    nowhere = Trial(3, {RATE: 0.01}, "failed", reason="makes no cell")
    studied.record(empty, "small", SEARCH, [first, second, again, nowhere], gpus=0)
    table = make_table("study", empty, "small", all_rows=True)
    rows = rows_of(table)
    assert [row["Standing"] for row in rows.values()] == [
        "done",
        "done (cell of trial 0)",
        "pruned at validation 2",
        "failed",
    ]
    assert [row["Seconds"] for row in rows.values()] == ["90", "0", "180", "0"]
    assert rows[0]["core h"] == "0.1", "four cores for 90 seconds"
    assert (rows[3]["Cell"], rows[3]["attn_type"]) == ("-", "-")
    assert "All trials together: 270 s, 0.3 core h." in table.notes[1]
    (tmp_path / "x.md").write_text(render(table, "md"))
    assert check_file(tmp_path / "x.md", empty) == []


@pytest.mark.thorough
def test_a_study_without_a_trial_says_so(empty: Store) -> None:
    studied.record(empty, "new", SEARCH, [])
    table = make_table("study", empty, "new")
    assert (table.rows, table.notes[0]) == ((), "No trial of sweep new is done yet.")
    assert table.above[1] == "0 of 40 trials."


def test_study_table_refuses_plain_sweep(store: Store, tmp_path: Path) -> None:
    code, out, err = run_in_process(tmp_path, "report", "--table", "study", "--db", "test.db")
    assert (code, out) == (2, "")
    assert (
        err
        == "atma-sweep: sweep quick is not a study; add search: to its grid (docs/how-to/search-settings.md), or name a sweep that has it\n"
    )
