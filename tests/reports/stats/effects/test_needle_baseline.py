"""What a constant answer scores on the needle's own trials, and that every table of needle numbers says so."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.live.status import cell_details
from atma_sweep.reports.stats.effects.needle_baseline import (
    below_baseline_note,
    ceiling,
    mentions_needle,
    needle_note,
    yardstick,
)
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.store.records import Measurement
from atma_sweep.sweep.probes.needle import NeedleConfig, trials
from ordinary import TABLES
from statsmodels.stats.proportion import proportion_confint
from tiers import every_nth


@pytest.fixture
def told(empty, make, run):
    """told(value by length or None, description) -> a sweep of cells with these ceilings, one cell an entry."""
    cell, _ = make

    def told(*cells, description=None):
        records = [cell(index + 1, seed=index) for index in range(len(cells))]
        empty.record_revision("own", grid_text="x", grid_file="x.yaml", cells=records)
        for record, shares in zip(records, cells, strict=True):
            found = []
            for length, share in shares.items():
                about = {"probe": "needle", "length": length, "unit": "fraction", "n": 80}
                found.append(Measurement(metric="digit_accuracy", value=0.5, description=description, **about))
                if share is not None:
                    found.append(Measurement(metric="constant_accuracy", value=share, **about))
            run(empty, record.id, "done", found)
        return load_sweep_data(empty, "own")

    return told


def test_the_published_one_is_that_of_the_digits_which_its_seed_draws(published):
    asked = Counter(digit for trial in trials(NeedleConfig()) for digit in trial.digits)
    assert asked.most_common(1) == [(7, paper.MOST_FREQUENT)]
    assert asked.total() == paper.DIGITS
    for sweep in paper.SWEEPS:
        data = load_sweep_data(published, sweep)
        assert [ceiling(data, length) for length in (0, *paper.LENGTHS)] == pytest.approx([0.175] * 7)


@pytest.fixture
def six(empty, make, run):
    """Three mixers with and without memory, two seeds: tables have something to say of their needles."""
    cell, numbers = make
    levels = list(product(("polar", "nope", "rope"), ("off", "on"), (0, 1)))
    cells = [cell(i + 1, attn_type=a, memory=m, seed=seed) for i, (a, m, seed) in enumerate(levels)]
    empty.record_revision("own", grid_text="x", grid_file="x.yaml", cells=cells)
    for index, record in enumerate(cells):
        found = [one for one in numbers(3.0 + index / 7) if one.probe != "needle" and one.value is not None]
        for length in (128, 2048):
            about = {"probe": "needle", "length": length, "unit": "fraction", "n": 9}
            found.append(Measurement(metric="digit_accuracy", value=index / 12, **about))
            found.append(Measurement(metric="constant_accuracy", value=4 / 9, **about))
        found.append(Measurement(probe="throughput", metric="mfu_paper", value=0.3 + index / 100, unit="fraction"))
        run(empty, record.id, "done", found)
    return empty


@pytest.mark.parametrize(
    "name", every_nth([name for name in TABLES if name not in ("failures", "provenance", "budgets")], 4)
)
def test_every_table_of_needle_numbers_or_their_differences_names_that_of_its_own_trials(name, six):
    options = {"all_rows": True} if name in ("effects", "interactions") else {}
    table = make_table(name, six, "own", **options)
    if mentions_needle((one for row in table.entries for one in row), (word for row in table.rows for word in row)):
        assert "the same digit everywhere: 44.4; a guess: 10" in " ".join(table.notes)
    else:
        without = "4 5 contrasts items claims flipflop mqar extrapolation downstream budget".split()
        assert name in without, "these have no needle number here"


@pytest.mark.parametrize("name", ["1", "2", "3", "6", "open-weight", "pareto"])
def test_published_tables_name_the_published_one(name, published):
    notes = " ".join(make_table(name, published, "printed-v2").notes)
    assert "needle digits right, in % (the same digit everywhere: 17.5; a guess: 10)" in notes


@pytest.mark.thorough
def test_effects_say_how_many_cells_are_told_apart_by_luck(published, published_effects):
    """63 of the 120 cells at 64K have no digit right, 32 have some and at most 14 of 80."""
    found = below_baseline_note(load_sweep_data(published, "printed-v2"))
    assert "95 of 120 at 64K" in found
    assert found in " ".join(published_effects.notes)


@pytest.mark.parametrize("name", ["needle", "pareto", "effects", "interactions"])
def test_every_figure_of_needle_numbers_says_it(name, six):
    made = make_figure(name, six, "own")
    assert "44.4" in " ".join(made.notes)


def test_a_cell_is_shown_with_it(six, published):
    (line,) = (
        line for line in cell_details(six, "000000000003", "own").text().splitlines() if "digit_accuracy at 128" in line
    )
    # nine digits are two trials
    low, high = proportion_confint(2 / 6, 2, method="wilson")
    text = f"  needle digit_accuracy at 128: 0.166667 [{low:.4g}, {high:.4g}] fraction, n=9"
    assert line == f"{text}; the same digit everywhere: 0.4444 (attempt 1)"
    printed = [
        line
        for line in cell_details(published, "polar-baseline-d0-m1-w0-s0", "printed-v2").text().splitlines()
        if "digit_accuracy" in line
    ]
    assert len(printed) > 12
    assert all(line.endswith("; the same digit everywhere: 0.175") for line in printed)


def test_what_was_measured_counts_at_its_length(told):
    data = told({128: 0.3, 256: 0.2})
    assert (ceiling(data, 128), ceiling(data, 256), ceiling(data, 512)) == (0.3, 0.2, None)
    assert ceiling(data, 0) == pytest.approx((128 * 0.3 + 256 * 0.2) / 384)
    assert yardstick(data) == "the same digit everywhere: 20.0 to 30.0; a guess: 10"
    assert yardstick(data, [256]) == "the same digit everywhere: 20.0; a guess: 10"


def test_of_cells_with_digits_of_their_own_the_highest(told):
    assert ceiling(told({128: 0.2}, {128: 0.4}, {128: None}), 128) == 0.4


def test_a_database_from_before_says_it_beside_the_accuracy(told):
    assert ceiling(told({128: None}, description={"chance": 0.25}), 128) == 0.25


def test_where_it_was_not_recorded_nothing_is_made_up(told):
    data = told({128: None})
    assert ceiling(data, 128) is None
    assert ceiling(data, 0) is None
    assert (
        needle_note(data)
        == "Ndl: needle digits right, in % (a guess: 10; the same digit everywhere: more, not recorded)."
    )
