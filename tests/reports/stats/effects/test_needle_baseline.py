"""Score of a constant answer on the needle's own trials, and its statement in every table of needle numbers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.live.cell_details import cell_details
from atma_sweep.reports.stats.effects.needle_baseline import (
    baseline_text,
    below_baseline_note,
    constant_answer_score,
    mentions_needle,
    needle_note,
)
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.store.records import Measurement
from atma_sweep.sweep.probes.needle import NeedleConfig, make_trials
from ordinary import TABLES
from statsmodels.stats.proportion import proportion_confint


@pytest.fixture
def make_sweep(empty, make, run):
    """Return a function that stores a sweep, one cell per argument: baseline by length, or None if not recorded."""
    cell, _ = make

    def make_sweep(*cells, description=None):
        records = [cell(index + 1, seed=index) for index in range(len(cells))]
        empty.record_revision("own", grid_text="x", grid_file="x.yaml", cells=records)
        for record, shares in zip(records, cells, strict=True):
            measured = []
            for length, share in shares.items():
                fields = {"probe": "needle", "length": length, "unit": "fraction", "n": 80}
                measured.append(Measurement(metric="digit_accuracy", value=0.5, description=description, **fields))
                if share is not None:
                    measured.append(Measurement(metric="constant_accuracy", value=share, **fields))
            run(empty, record.id, "done", measured)
        return load_sweep_data(empty, "own")

    return make_sweep


def test_published_baseline_follows_from_its_seed(published):
    digit_counts = Counter(digit for trial in make_trials(NeedleConfig()) for digit in trial.digits)
    assert digit_counts.most_common(1) == [(7, paper.MOST_FREQUENT)]
    assert digit_counts.total() == paper.DIGITS
    for sweep in paper.SWEEPS:
        data = load_sweep_data(published, sweep)
        assert [constant_answer_score(data, length) for length in (0, *paper.LENGTHS)] == pytest.approx([0.175] * 7)


@pytest.fixture
def six(empty, make, run):
    """Return a store with three mixers, with and without memory, two seeds each, and needle accuracies."""
    cell, numbers = make
    levels = list(product(("polar", "nope", "rope"), ("off", "on"), (0, 1)))
    cells = [cell(i + 1, attn_type=a, memory=m, seed=seed) for i, (a, m, seed) in enumerate(levels)]
    empty.record_revision("own", grid_text="x", grid_file="x.yaml", cells=cells)
    for index, record in enumerate(cells):
        baseline_values = [
            measurement
            for measurement in numbers(3.0 + index / 7)
            if measurement.probe != "needle" and measurement.value is not None
        ]
        for length in (128, 2048):
            fields = {"probe": "needle", "length": length, "unit": "fraction", "n": 9}
            baseline_values.append(Measurement(metric="digit_accuracy", value=index / 12, **fields))
            baseline_values.append(Measurement(metric="constant_accuracy", value=4 / 9, **fields))
        baseline_values.append(
            Measurement(probe="throughput", metric="mfu_paper", value=0.3 + index / 100, unit="fraction")
        )
        run(empty, record.id, "done", baseline_values)
    return empty


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in TABLES if name not in ("failures", "provenance", "budgets")])
def test_tables_with_needle_numbers_state_the_baseline(name, six):
    options = {"all_rows": True} if name in ("effects", "interactions") else {}
    table = make_table(name, six, "own", **options)
    if mentions_needle((entry for row in table.entries for entry in row), (word for row in table.rows for word in row)):
        assert "constant-digit baseline 44.4 %, chance level 10 %" in " ".join(table.notes)
    else:
        without = "4 5 contrasts items claims flipflop mqar mad extrapolation downstream budget".split()
        assert name in without, "these have no needle number here"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["1", "2", "3", "6", "open-weight", "pareto"])
def test_published_tables_state_the_published_baseline(name, published):
    notes = " ".join(make_table(name, published, "printed-v2").notes)
    assert "needle accuracy, % of digits (constant-digit baseline 17.5 %, chance level 10 %)" in notes


@pytest.mark.thorough
def test_effects_note_counts_cells_below_the_baseline(published, published_effects):
    """63 of the 120 cells at 64K have no digit right, 32 have some and at most 14 of 80."""
    note = below_baseline_note(load_sweep_data(published, "printed-v2"))
    assert "95 of 120 at 64K" in note
    assert note in " ".join(published_effects.notes)


@pytest.mark.parametrize("name", ["needle", "pareto", "effects", "interactions"])
def test_figures_with_needle_numbers_state_the_baseline(name, six):
    figure = make_figure(name, six, "own")
    assert "44.4" in " ".join(figure.notes)


def test_show_prints_the_baseline(six, published):
    lines = cell_details(six, "000000000003", "own").text().splitlines()
    at = next(index for index, line in enumerate(lines) if "digit_accuracy (n=9)" in line)
    # nine digits are two trials
    low, high = proportion_confint(2 / 6, 2, method="wilson")
    # the same at both lengths
    assert lines[at].split()[2:] == ["16.67", "%"] * 2
    assert lines[at + 1].split()[2:] == [f"{100 * low:.3g}–{100 * high:.3g}"] * 2
    # the baseline was measured, so that it has a line of its own
    assert lines[at - 1].split() == ["constant_accuracy", "(n=9)", *["44.44", "%"] * 2]
    printed = cell_details(published, "polar-baseline-d0-m1-w0-s0", "printed-v2").text().splitlines()
    baselines = [line.split()[2:] for line in printed if "constant-digit baseline" in line]
    assert sum(map(len, baselines)) > 2 * 12
    assert {word for line in baselines for word in line} == {"17.5", "%"}


def test_measured_baseline_is_used_at_its_length(make_sweep):
    data = make_sweep({128: 0.3, 256: 0.2})
    assert (constant_answer_score(data, 128), constant_answer_score(data, 256), constant_answer_score(data, 512)) == (
        0.3,
        0.2,
        None,
    )
    assert constant_answer_score(data, 0) == pytest.approx((128 * 0.3 + 256 * 0.2) / 384)
    assert baseline_text(data) == "constant-digit baseline 20.0 to 30.0 %, chance level 10 %"
    assert baseline_text(data, [256]) == "constant-digit baseline 20.0 %, chance level 10 %"


def test_baseline_of_different_trials_is_the_highest(make_sweep):
    assert constant_answer_score(make_sweep({128: 0.2}, {128: 0.4}, {128: None}), 128) == 0.4


def test_baseline_from_an_old_description(make_sweep):
    assert constant_answer_score(make_sweep({128: None}, description={"chance": 0.25}), 128) == 0.25


def test_baseline_is_none_if_not_recorded(make_sweep):
    data = make_sweep({128: None})
    assert constant_answer_score(data, 128) is None
    assert constant_answer_score(data, 0) is None
    assert (
        needle_note(data)
        == "Ndl: needle accuracy, % of digits (chance level 10 %; constant-digit baseline higher, not recorded)."
    )
