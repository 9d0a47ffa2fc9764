"""Row of the contrast under a stopping rule: interval and p of its last interim analysis, against SciPy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from atma_sweep.reports.stats.effects.effects import contrasts, effects
from atma_sweep.reports.stats.significance.paired_tests import holm
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.contrasts import Contrast, contrasts_as_json
from atma_sweep.results.designs.design_option import Design
from atma_sweep.results.designs.design_space import DesignSpace
from atma_sweep.results.stopping.alpha_spending import critical_values
from atma_sweep.results.stopping.stopping_rule import StoppingRule, rule_as_json
from atma_sweep.results.store.store import Store
from scipy import stats

MEMORY = Contrast(probe="val", metric="val_loss", length=0, axis="memory", level="on", reference="off", margin=2.0)
MIXER = Contrast(probe="needle", metric="digit_accuracy", length=64, axis="attn_type", level="nope", reference="polar")
RULE = StoppingRule(contrast=MEMORY, width=0.001, seeds=(0, 1, 2, 3, 4))


@pytest.fixture
def data(replicated: Store) -> SweepData:
    declared = (replace(MEMORY, reference=None), MIXER)
    return replace(load_sweep_data(replicated, "twice"), contrasts=declared, stop=RULE)


def effects_by_seed(data: SweepData) -> list[float]:
    """Return the effect of memory at each seed, averaged over both mixers."""
    values_by_seed: dict[int, list[float]] = {}
    for cell in data.cells:
        number = data.values[cell.cell_id, "val", "val_loss", 0].value
        assert number is not None
        values_by_seed.setdefault(cell.seed, []).append(number * (2 if cell.levels["memory"] == "on" else -2) / 4)
    return [sum(values) for values in values_by_seed.values()]


def test_apply_last_look_replaces_the_row(data: SweepData) -> None:
    d = effects_by_seed(data)
    own, unrelated = contrasts(data)
    level = 2 * stats.norm.sf(critical_values([3 / 5])[0])
    low, high = stats.t.interval(1 - level, 2, np.mean(d), stats.sem(d))
    assert (own.mean, own.low, own.high) == pytest.approx((np.mean(d), low, high))
    assert (own.method, own.seeds, own.pairs) == ("looks", 3, 2)
    plain = contrasts(replace(data, stop=None))
    assert (unrelated.mean, unrelated.low, unrelated.high, unrelated.p) == (
        plain[1].mean,
        plain[1].low,
        plain[1].high,
        plain[1].p,
    )
    assert [own.p_corrected, unrelated.p_corrected] == holm([own.p, unrelated.p])
    assert (own.p < 0.05) == (low > 0 or high < 0)
    # memory is worth 1, so well within 2 of nothing
    assert own.p_equivalence < 0.05
    declared = [row for row in effects(data) if row.confirmatory]
    assert (declared[0].low, declared[0].high) == (own.low, own.high), "the table of effects says the same"


def test_apply_last_look_before_the_first_look(data: SweepData) -> None:
    early = replace(data, cells=[cell for cell in data.cells if cell.seed < 2])
    own, _ = contrasts(early)
    assert math.isnan(own.p)
    assert math.isnan(own.p_equivalence)
    assert own.method == "none"


@pytest.mark.thorough
def test_apply_last_look_keeps_unrelated_contrasts(data: SweepData) -> None:
    moved = replace(data, stop=replace(RULE, contrast=replace(MEMORY, within={"attn_type": "polar"})))
    assert contrasts(moved) == contrasts(replace(data, stop=None))


def test_stopping_notes_state_looks_levels_and_end(replicated: Store) -> None:
    cells = [replicated.cell(state.cell_id) for state in replicated.cell_states("twice")]
    axes = {state.cell_id: state.axes for state in replicated.cell_states("twice")}
    options = dict(replicated.revision("twice").options)
    for width, text in (
        (9.0, "Stopped after 3 seeds: "),
        (0.0001, "Not decided: no interval is at most 0.00010 nats wide yet, and further seeds were not started; launch "
            "again to continue."),
    ):  # fmt: skip
        options |= {"contrasts": contrasts_as_json((MEMORY,)), "stop": rule_as_json(replace(RULE, width=width))}
        replicated.record_revision("twice", grid_text="x", grid_file="x", options=options, cells=[replace(cell, axes=axes[cell.id]) for cell in cells])  # fmt: skip
        notes = " ".join(make_table("contrasts", replicated, "twice").notes)
        assert "Interim analysis 1 of at most 3, after 3 of at most 5 seeds: -1.0" in notes
        assert "at significance level 0.76% instead of 5%" in notes
        assert text in notes


@pytest.mark.thorough
def test_last_look_of_a_partial_design_by_least_squares(data: SweepData) -> None:
    space = DesignSpace({"attn_type": ("polar", "nope"), "memory": ("off", "on")})
    design = Design(method="d-optimal", runs=3, space=space, terms=(("attn_type",), ("memory",)))
    three = replace(data, design=design, cells=[cell for cell in data.cells if cell.levels["attn_type"] == "polar" or cell.levels["memory"] == "off"])  # fmt: skip
    assert three.partial_design is not None
    own = contrasts(three)[0]
    # without interaction nope says nothing of the memory: what it is worth in polar, 1 and 0.01 a seed
    assert (own.method, own.mean) == ("looks", pytest.approx(-1.0))
    level = 2 * stats.norm.sf(critical_values([3 / 5])[0])
    assert (own.low, own.high) == pytest.approx(stats.t.interval(1 - level, 2, -1, stats.sem([-1.01, -1, -0.99])))
