"""Declared contrasts, their equivalence within a margin, and the treatment of missing and diverged cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.stats.effects.effects import AT_CHANCE_VERDICT, Effect, contrasts, effects
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.contrasts import Contrast, contrasts_as_json
from atma_sweep.results.paper import rows
from atma_sweep.results.store.records import Measurement
from atma_sweep.results.store.store import Store
from scipy.stats import binom
from statsmodels.stats.weightstats import ttost_paired

AXES = ("attn_type", "reg_mode", "distractor", "memory", "window")
NEEDLE = Contrast(probe="needle", metric="digit_accuracy", length=65536, axis="memory", level="on")


@pytest.fixture(scope="module")
def paper(published: Store) -> SweepData:
    return load_sweep_data(published, "printed-v2")


def differences_by_hand(contrast: Contrast) -> list[float]:
    """Return the differences of a contrast on needle accuracy at 64K, from the printed hits of 80."""
    values = {
        tuple(row[axis] for axis in AXES): round(float(row["needle"]) * 0.8) / 80
        for row in rows("lengths")
        if row["length"] == "65536"
    }
    axis_index, reference = AXES.index(contrast.axis), contrast.reference or "off"
    return [
        value - values[(*key[:axis_index], reference, *key[axis_index + 1 :])]
        for key, value in values.items()
        if key[axis_index] == contrast.level
        and all(key[AXES.index(axis)] == level for axis, level in contrast.within.items())
    ]


def equivalence_p_by_hand(d: np.ndarray, margin: float) -> float:
    """Return the larger one-sided p of equivalence within the margin, by every flip of signs."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
    return max(float((signs @ shifted >= shifted.sum() - 1e-12).mean()) for shifted in (margin + d, margin - d))


def test_a_contrast_is_equivalent_differs_or_shows_nothing(paper: SweepData) -> None:
    declared_contrasts = (
        replace(NEEDLE, within={"attn_type": "polar"}, margin=0.05),
        replace(NEEDLE, within={"attn_type": "rope"}, margin=0.05),
        replace(NEEDLE, axis="distractor", within={"attn_type": "polar", "memory": "on"}, margin=0.1),
        replace(NEEDLE, axis="reg_mode", level="weak", reference="baseline", within={"attn_type": "nope", "memory": "off"}, margin=0.1),
        replace(NEEDLE, axis="window"),
    )  # fmt: skip
    results = contrasts(replace(paper, contrasts=declared_contrasts))
    # rope answers nothing at 64K, nor does nope without memory
    assert [result.verdict for result in results] == [
        "differs",
        AT_CHANCE_VERDICT,
        "not significant",
        AT_CHANCE_VERDICT,
        "not significant",
    ]
    assert [replace(results[index], is_at_chance=False).verdict for index in (1, 3)] == [
        "equivalent",
        "not significant",
    ]
    assert {(result.family, result.confirmatory) for result in results} == {("declared contrasts", True)}
    for result, declared in zip(results, declared_contrasts, strict=True):
        d = differences_by_hand(declared)
        assert (result.pairs, result.mean) == (len(d), pytest.approx(np.mean(d), abs=1e-9))
    raw = [
        1.0,  # 47.8 points are not within 5
        2.0**-20,  # twenty differences of zero
        equivalence_p_by_hand(np.array(differences_by_hand(declared_contrasts[2])), 0.1),
        # four pairs: Student's t
        float(ttost_paired(np.array(differences_by_hand(declared_contrasts[3])), np.zeros(4), -0.1, 0.1)[0]),
    ]
    order = np.argsort(raw)
    holm = np.empty(4)
    holm[order] = np.minimum(1, np.maximum.accumulate(np.array(raw)[order] * [4, 3, 2, 1]))
    assert [result.p_equivalence for result in results[1:4]] == pytest.approx(holm[1:].tolist(), rel=1e-9)
    assert results[0].p_equivalence > 0.999
    assert math.isnan(results[4].p_equivalence)


def test_contrasts_are_a_family_of_their_own(paper: SweepData) -> None:
    """A single declared test needs no correction, though its axis is a family of four otherwise."""
    polar = {"attn_type": "polar", "memory": "on"}
    window_contrast = replace(NEEDLE, axis="window", within=polar)
    (alone,) = contrasts(replace(paper, contrasts=(window_contrast,)))
    both = contrasts(replace(paper, contrasts=(window_contrast, replace(NEEDLE, within={"attn_type": "polar"}))))
    assert alone.p_corrected == alone.p < both[0].p_corrected
    assert both[1].p_corrected < 1e-4
    rows = effects(replace(paper, contrasts=(window_contrast,)), [alone.measure])
    # as text, since an undefined number differs from itself
    assert repr(rows[0]) == repr(alone)
    same = [repr(row) for row in rows if (row.axis, row.where) == (alone.axis, alone.where)]
    assert same == [repr(alone)], "once, as declared"


def test_contrast_without_pairs_is_listed(paper: SweepData) -> None:
    lost = replace(NEEDLE, axis="train.lr", level="1", reference="2")
    absent = replace(NEEDLE, within={"attn_type": "fox"})
    results = contrasts(replace(paper, contrasts=(lost, NEEDLE, absent)))
    assert [(result.pairs, result.verdict) for result in results] == [(0, "no pairs"), (60, "differs"), (0, "no pairs")]
    assert [result.axis for result in effects(replace(paper, contrasts=(lost,)), [results[0].measure])[:1]] == [
        "train.lr"
    ]


@pytest.fixture
def holed(empty: Store, make: Any, run: Callable[..., None]) -> Store:
    """Return a store with four pairs of memory on and off; one cell with memory diverged and one did not start."""
    cell, _ = make
    modes = ("baseline", "weak", "strong", "zipfian")
    cells = [cell(i, reg_mode=modes[i % 4], memory="on" if i < 4 else "off") for i in range(8)]
    declared = [Contrast(probe="val", metric="val_loss", length=0, axis="memory", level="on", margin=10.0)]
    empty.record_revision(
        "s", grid_text="x", grid_file="x", cells=cells, options={"contrasts": contrasts_as_json(tuple(declared))}
    )
    hits, losses = (0.8, 0.6, 0, 0, 0.1, 0.2, 0.3, 0.4), (2.0, 2.5, 0, 0, 3.0, 3.25, 2.75, 3.5)
    for index, record in enumerate(cells):
        fields = {"probe": "needle", "metric": "digit_accuracy", "length": 128, "n": 80}
        measurements = [
            Measurement(**fields, value=hits[index]),
            Measurement(probe="val", metric="val_loss", value=losses[index]),
        ]
        if index != 3:
            run(empty, record.id, "diverged" if index == 2 else "done", [] if index == 2 else measurements)
    return empty


def memory_row(rows: list[Effect], heading: str) -> Effect:
    (row,) = [row for row in rows if row.measure.heading == heading and row.axis == "memory"]
    return row


def test_missing_cells_are_counted_and_bounded(holed: Store) -> None:
    rows = effects(load_sweep_data(holed))
    needle, val = memory_row(rows, "Ndl@128"), memory_row(rows, "Val")
    for row in (needle, val):
        assert (row.pairs, row.expected, row.missing) == (2, 4, {"diverged": 1, "new": 1})
    assert needle.mean == pytest.approx((0.7 + 0.4) / 2)
    assert needle.worst == pytest.approx((0.7 + 0.4 + (0 - 0.3)) / 3), "the diverged one finds nothing"
    assert val.mean == pytest.approx((-1 - 0.75) / 2)
    assert val.worst == pytest.approx((-1 - 0.75 + (3.5 - 2.75)) / 3), "the diverged one at the worst loss measured"
    table = make_table("effects", holed)
    shown = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows if row[1].startswith("memory")}
    assert [shown["Ndl@128"][name] for name in ("Pairs", "Mean", "Worst")] == ["2 of 4", "+55.0", "+26.7"]
    assert any("diverged" in note and "new" in note for note in table.notes)
    assert shown["Val"]["Axis"] == "memory (declared)"


def test_contrast_at_chance_level_is_not_tested(paper: SweepData) -> None:
    """A single cell above the constant answer (14 of 80) is enough, if that is not chance in 16 trials."""
    rope = {"attn_type": "rope"}
    declared_contrasts = (
        replace(NEEDLE, within=rope),
        replace(NEEDLE, length=None, within=rope),
        replace(NEEDLE, within={"attn_type": "polar"}),
        Contrast(probe="clean", metric="nats", length=65536, axis="memory", level="on", within=rope),
    )

    cells = [cell.cell_id for cell in paper.cells if cell.levels["attn_type"] == "rope"]
    needle = paper.lengths("needle", "digit_accuracy")

    def at_chance_flags(share: float, *, num_cells: int = 1, lengths: Sequence[int] = (65536,)) -> list[bool]:
        keys = [(cell, "needle", "digit_accuracy", length) for cell in cells[:num_cells] for length in lengths]
        values = {**paper.values, **{key: replace(paper.values[key], value=share) for key in keys}}
        return [row.is_at_chance for row in contrasts(replace(paper, values=values, contrasts=declared_contrasts))]

    # of an average every length counts: at 2K rope finds some
    assert at_chance_flags(0.0) == [True, False, False, False]
    assert at_chance_flags(0.0, num_cells=40, lengths=needle) == [True, True, False, False]
    # a little more than 14 of 80 is chance in 16 trials, in one number and in their average
    assert at_chance_flags(0.18, num_cells=40, lengths=needle) == [True, True, False, False]
    # the smallest of 16 trials that forty cells do not reach by chance
    least = next(hits for hits in range(17) if binom.sf(hits - 1, 16, 14 / 80) <= 0.05 / 40)
    assert at_chance_flags((least - 1) / 16)[0] is True
    assert at_chance_flags(least / 16)[0] is False
    # a length that is shown besides changes no verdict
    assert [row.is_at_chance for row in contrasts(replace(paper, contrasts=declared_contrasts, also=(1024,)))] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.thorough
def test_table_of_contrasts(holed: Store) -> None:
    table = make_table("contrasts", holed)
    (row,) = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    reference_p = ttost_paired(np.array([2.0, 2.5]), np.array([3.0, 3.25]), -10, 10)[0]
    assert (row["Pairs"], row["Mean"], row["Margin"]) == ("2 of 4", "-0.875", "10.000")
    assert float(row["p equiv"]) == pytest.approx(reference_p, abs=5e-5)
    assert row["Verdict"] == "equivalent within 10.000 nats"
    assert any(
        "Low, High and p come from the same test (Student's t over configurations" in note for note in table.notes
    )
