"""What a constant answer scores on the needle's own trials, and that every table of needle numbers says so."""

from __future__ import annotations

from collections import Counter

import pytest
from atma_sweep.reports.data import gather
from atma_sweep.reports.stats.ceiling import ceiling, needle_note, yardstick
from atma_sweep.reports.tables import make_table
from atma_sweep.results import paper
from atma_sweep.results.store.records import Measurement
from atma_sweep.sweep.probes.needle import NeedleConfig, trials


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
        return gather(empty, "own")

    return told


def test_the_published_one_is_that_of_the_digits_which_its_seed_draws(published):
    asked = Counter(digit for trial in trials(NeedleConfig()) for digit in trial.digits)
    assert asked.most_common(1) == [(7, paper.MOST_FREQUENT)]
    assert asked.total() == paper.DIGITS
    for sweep in paper.SWEEPS:
        data = gather(published, sweep)
        assert [ceiling(data, length) for length in (0, *paper.LENGTHS)] == pytest.approx([0.175] * 7)


@pytest.mark.parametrize("table", ["1", "2", "3", "6", "open-weight", "pareto"])
def test_every_table_of_needle_numbers_names_it_beside_a_guess(table, published):
    notes = " ".join(make_table(table, published, "printed-v2").notes)
    assert "needle digits right, in % (the same digit everywhere: 17.5; a guess: 10)" in notes


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
