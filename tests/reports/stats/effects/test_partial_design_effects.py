"""Effects of a partial design: forty of the published cells, held against statsmodels and against the whole grid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from atma_sweep.reports.stats.anova import anova_results
from atma_sweep.reports.stats.effects.effects import AT_CHANCE_VERDICT, contrasts, effects, interactions
from atma_sweep.reports.stats.effects.matched_groups import contrast_column, values_frame
from atma_sweep.reports.stats.effects.partial_design_effects import DesignRegression
from atma_sweep.reports.stats.significance.paired_tests import FITTED
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.reports.tables import effects as tables
from atma_sweep.results.contrasts import Contrast
from atma_sweep.results.designs import design_choice
from atma_sweep.results.designs.design_space import DesignSpace, LinearModel, hierarchical_closure
from atma_sweep.results.paper import with_published
from atma_sweep.results.store.store import Store

NEEDLE = {"probe": "needle", "metric": "digit_accuracy", "length": 65536}
DECLARED = (
    Contrast(**NEEDLE, axis="memory", level="on", within={"attn_type": "polar"}),  # type: ignore[arg-type]
    Contrast(**NEEDLE, axis="memory", level="on", within={"attn_type": "rope"}, margin=0.1),  # type: ignore[arg-type]
    Contrast(**NEEDLE, axis="window", level="on", margin=0.5),  # type: ignore[arg-type]
)
FORMULA = "value ~ C(attn_type) * C(memory) + C(reg_mode) + C(distractor) + C(window)"


def restricted_to_design(data: SweepData, runs: int = 40) -> SweepData:
    """Return the sweep restricted to a D-optimal design of so many cells."""
    space = DesignSpace({axis: tuple(data.levels(axis)) for axis in data.cells[0].levels})
    terms = hierarchical_closure([*space.terms(1), ("attn_type", "memory")])
    design, members = design_choice.d_optimal(space, terms, runs)
    cells = [cell for cell in data.cells if space.index(cell.levels) in set(members.tolist())]
    cell_ids = {cell.cell_id for cell in cells}
    values = {key: value for key, value in data.values.items() if key[0] in cell_ids}
    return replace(data, cells=cells, values=values, design=design, contrasts=DECLARED)


@pytest.fixture(scope="module")
def all_cells(published: Store) -> SweepData:
    return load_sweep_data(with_published(published, "printed-v2"), "printed-v2")


@pytest.fixture(scope="module")
def forty(all_cells: SweepData) -> SweepData:
    return restricted_to_design(all_cells)


@pytest.fixture(scope="module")
def by_hand(forty: SweepData) -> Any:
    """Return the fit of the same forty cells by statsmodels."""
    frame = values_frame(forty, contrast_column(forty, DECLARED[0]))
    assert len(frame) == 40
    return smf.ols(FORMULA, frame).fit()


def difference_weights(all_cells: SweepData, axis: str, pair: tuple[str, str], **within: str) -> np.ndarray:
    """Return the mean difference over the configurations of the full grid, as weights of coefficients."""
    every = pd.DataFrame([cell.levels for cell in all_cells.cells]).assign(value=0.0)
    inside = every
    for name, word in within.items():
        inside = inside[inside[name] == word]
    # beside all cells, so that every level has its column
    rows = [
        smf.ols(FORMULA, pd.concat([every, inside.assign(**{axis: word})])).exog[len(every) :].mean(axis=0)
        for word in pair
    ]
    return np.asarray(rows[0] - rows[1])


@pytest.mark.parametrize(
    ("axis", "pair", "within"),
    [
        ("memory", ("on", "off"), {}),
        ("memory", ("on", "off"), {"attn_type": "polar"}),
        ("attn_type", ("rope", "nope"), {}),
        ("reg_mode", ("strong", "baseline"), {}),
    ],
)
def test_estimates_equal_statsmodels(
    forty: SweepData, all_cells: SweepData, by_hand: Any, axis: str, pair: tuple[str, str], within: dict[str, str]
) -> None:
    column = contrast_column(forty, DECLARED[0])
    where = ", ".join(f"{name}={word}" for name, word in within.items())
    (mine,) = [
        row
        for row in effects(forty, [column])
        if (row.axis, row.level, row.reference, row.where) == (axis, *pair, where)
    ]
    robust = by_hand.get_robustcov_results("HC3", use_t=True)
    theirs = robust.t_test(difference_weights(all_cells, axis, pair, **within))
    low, high = np.ravel(theirs.conf_int())
    assert (mine.mean, mine.low, mine.high) == pytest.approx((theirs.effect[0], low, high))
    assert mine.p == pytest.approx(float(theirs.pvalue), rel=1e-6, abs=1e-12)
    assert (mine.method, mine.pairs, mine.expected) == (FITTED, 40, 40)


def test_pooled_variance_equals_statsmodels() -> None:
    """The design has too few residual degrees of freedom for HC3."""
    space = DesignSpace({"a": ("0", "1"), "b": ("0", "1"), "c": ("0", "1")})
    model, members = LinearModel(space, tuple(space.terms(1))), np.array([0, 1, 2, 4, 7, 3])
    values = np.random.default_rng(1).normal(size=6)
    fit = DesignRegression(model, members, values)
    assert not fit.robust
    frame = pd.DataFrame(space.points[members], columns=list("abc")).assign(value=values)
    theirs = smf.ols("value ~ a + b + c", frame).fit()
    mine = fit.estimate(model.contrast("b", "1", "0"))
    assert (mine.value, mine.error, mine.p) == pytest.approx((theirs.params["b"], theirs.bse["b"], theirs.pvalues["b"]))
    assert (mine.low, mine.high) == pytest.approx(tuple(theirs.conf_int().loc["b"]))


def test_contrast_at_chance_in_a_partial_design(forty: SweepData) -> None:
    """The fit also includes cells above chance level."""
    rope = Contrast(
        probe="needle", metric="digit_accuracy", length=65536, axis="memory", level="on", within={"attn_type": "rope"}
    )
    polar = replace(rope, within={"attn_type": "polar"})
    assert [row.verdict for row in contrasts(replace(forty, contrasts=(rope, polar)))] == [AT_CHANCE_VERDICT, "differs"]


def test_forty_cells_estimate_the_full_effects(forty: SweepData, all_cells: SweepData) -> None:
    polar, rope, window = contrasts(forty)
    full = [row.mean for row in contrasts(replace(all_cells, contrasts=DECLARED))]
    assert polar.is_significant
    assert polar.low <= full[0] <= polar.high
    assert window.low <= full[2] <= window.high
    assert window.verdict == "equivalent"
    assert rope.pairs == 40
    assert [row.confirmatory for row in (polar, rope, window)] == [True] * 3
    assert {row.axes for row in interactions(forty, [polar.measure])} == {("attn_type", "memory")}


def test_completed_design_uses_matched_pairs(all_cells: SweepData) -> None:
    complete = restricted_to_design(all_cells, 120)
    assert complete.partial_design is None
    bare = replace(complete, design=None)
    column = contrast_column(all_cells, DECLARED[0])
    assert repr(effects(complete, [column])) == repr(effects(bare, [column]))


def test_inestimable_effects_are_nan(all_cells: SweepData) -> None:
    polar = restricted_to_design(all_cells)
    cells_of_half = [cell for cell in polar.cells if (cell.levels["memory"] == "on") == (cell.levels["window"] == "on")]
    rows = effects(replace(polar, cells=cells_of_half), [contrast_column(all_cells, DECLARED[0])])
    assert not {row.axis for row in rows if not row.confirmatory} & {"memory", "window"}
    assert {row.axis for row in rows} >= {"attn_type"}
    declared = contrasts(replace(polar, cells=cells_of_half))
    assert [row.verdict for row in declared] == ["no pairs"] * 3
    assert all(math.isnan(row.mean) for row in declared)


def test_seeds_of_a_configuration_are_averaged(forty: SweepData) -> None:
    """A second seed with the same numbers does not narrow the interval."""
    twins = [replace(cell, cell_id=f"{cell.cell_id}t", seed=1) for cell in forty.cells]
    more = {(f"{key[0]}t", *key[1:]): replace(value, cell_id=f"{key[0]}t") for key, value in forty.values.items()}
    both = replace(forty, cells=[*forty.cells, *twins], values={**forty.values, **more})
    column = contrast_column(forty, DECLARED[0])
    single, two = effects(forty, [column])[0], effects(both, [column])[0]
    assert (single.mean, single.low, single.high, single.n) == pytest.approx((two.mean, two.low, two.high, two.n))
    assert (single.seeds, two.seeds) == (1, 2)


def test_anova_has_the_terms_of_the_design(forty: SweepData) -> None:
    (result,) = anova_results(forty, [contrast_column(forty, DECLARED[0])])
    assert list(result.frame["term"]) == ["attn_type", "reg_mode", "distractor", "memory", "window", "attn_type x memory", "residual"]  # fmt: skip


def test_main_effect_design_has_no_interactions(all_cells: SweepData) -> None:
    data = restricted_to_design(all_cells)
    assert data.design is not None
    bare = replace(data, design=replace(data.design, terms=tuple(data.design.space.terms(1))), contrasts=())
    table = tables.interactions_table(None, bare)  # type: ignore[arg-type]
    assert table.rows == ()
    assert (
        "The design estimates no interaction; declare contrasts with `within`, or `model: two-way`, to estimate some."
        in table.notes
    )


def test_tables_list_aliased_effects(forty: SweepData) -> None:
    table = tables.effects_table(None, forty)  # type: ignore[arg-type]
    assert table.title.startswith("Effect of each factor, by least squares")
    assert table.columns[4] == "Cells"
    assert "Up" not in table.columns
    notes = " ".join(table.notes)
    assert "A partial design (d-optimal, 40 of 120 combinations): least squares estimate the mean, attn_type," in notes
    assert "With these 40 cells, partly aliased (correlation above 0.5): " in notes
    assert "HC3" in notes
    assert "matched" not in table.title
    for make in (tables.interactions_table, tables.contrasts_table):
        table_of_design = make(None, forty)  # type: ignore[arg-type]
        assert "With these 40 cells, " in " ".join(table_of_design.notes)
        assert "Cells" in table_of_design.columns
