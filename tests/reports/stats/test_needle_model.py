"""The binomial model of the needle against the formulas, and where odds are infinite."""

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from atma_sweep.reports.render import render
from atma_sweep.reports.stats import needle_model as nm
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.records import Measurement
from scipy import stats
from statsmodels.genmod.families import Binomial
from statsmodels.genmod.generalized_linear_model import GLM


@pytest.fixture
def needle(empty, make, run):
    """Return a function that stores a sweep of (levels, seed, right digits of 80) cells and returns its data."""

    def make_sweep(rows):
        cell, _ = make
        cells = [cell(index, seed=seed, **levels) for index, (levels, seed, _) in enumerate(rows)]
        empty.record_revision("own", grid_text="x", grid_file="x", cells=cells)
        for record, (*_, hits) in zip(cells, rows, strict=True):
            value = None if hits is None else hits / 80
            reason = "oom: none free" if hits is None else None
            measurements = [
                Measurement(probe="needle", metric="digit_accuracy", length=128, value=value, n=80, reason=reason)
            ]
            run(empty, record.id, "done", measurements)
        return empty

    return make_sweep


def model(store):
    data = load_sweep_data(store)
    (column,) = nm.needle_columns(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nm.needle_model(data, column)


def test_odds_ratio_of_two_groups_by_hand(needle):
    off, on = [20, 32, 24, 28], [60, 44, 52, 64]
    result = model(
        needle(
            [
                ({"memory": m}, seed, x)
                for m, counts_right in (("off", off), ("on", on))
                for seed, x in enumerate(counts_right)
            ]
        )
    )
    shares = [np.mean(counts_right) / 80 for counts_right in (off, on)]
    # 16 trials a cell, not 80 digits
    chi2 = sum(
        16 * (x / 80 - p) ** 2 / (p * (1 - p))
        for counts_right, p in zip((off, on), shares, strict=True)
        for x in counts_right
    )
    scale = chi2 / 6
    assert result.scale == pytest.approx(scale)
    term, _, level = result.frame.to_dict("records")
    log_odds = math.log(shares[1] / (1 - shares[1])) - math.log(shares[0] / (1 - shares[0]))
    error = math.sqrt(scale * sum(1 / (64 * p * (1 - p)) for p in shares))
    t = stats.t.ppf(0.975, 6)
    assert level["term"] == "memory: on / off"
    expected = [math.exp(log_odds + side * t * error) for side in (0, -1, 1)]
    assert [level[name] for name in ("odds_ratio", "low", "high")] == pytest.approx(expected)
    assert level["p"] == pytest.approx(2 * stats.t.sf(log_odds / error, 6))
    middle = sum(shares) / 2
    deviance = 2 * sum(64 * (p * math.log(p / middle) + (1 - p) * math.log((1 - p) / (1 - middle))) for p in shares)
    assert (term["term"], term["df"], term["deviance"]) == ("memory", 1, pytest.approx(deviance))
    assert term["p"] == pytest.approx(stats.f.sf(deviance / scale, 1, 6))


@pytest.mark.parametrize("seed", range(5))
def test_fit_equals_statsmodels(seed):
    """Random designs of three factors, shares of 0 and 1 among them; its last step moves a result by 1e-8 at most."""
    draw = np.random.default_rng(seed)
    columns = draw.integers(0, 2, (40, 3)).astype(float)
    trials = draw.integers(4, 60, 40).astype(float)
    hits = draw.binomial(trials.astype(int), 1 / (1 + np.exp(1.5 - columns @ [2.0, -1.0, 0.5])))
    hits[:2] = 0, trials[1]
    cells = pd.DataFrame({"trials": trials, "value": hits / trials})
    fit = nm._fit(cells, {(str(index),): columns[:, index : index + 1] for index in range(3)})
    design = np.column_stack([np.ones(40), columns])
    oracle = GLM(np.column_stack([hits, trials - hits]), design, family=Binomial()).fit(tol=1e-12)
    assert fit.coefficients == pytest.approx(oracle.params, rel=1e-7)
    assert fit.errors == pytest.approx(oracle.bse, rel=1e-7)
    assert fit.deviance == pytest.approx(oracle.deviance, rel=1e-7)
    assert fit.dispersion == pytest.approx(oracle.pearson_chi2 / oracle.df_resid, rel=1e-7)


def test_model_of_the_published_needle(published):
    data = load_sweep_data(published, "printed-v2")
    column = next(each_column for each_column in nm.needle_columns(data) if each_column.length == 65536)
    result = nm.needle_model(data, column)
    assert "attn_type=rope: no digit right in 40 cells" in result.remarks[0]
    assert len(result.numbers) == 80
    rows = result.frame.set_index("term")
    assert rows.loc["memory: on / off", "low"] > 1
    assert rows.loc["reg_mode", "p"] > 0.5
    assert result.scale > 1


def test_separated_groups_are_dropped(needle):
    draw = np.random.default_rng(0)
    rows = [
        ({"attn_type": t, "memory": m}, seed, 0 if t == "rope" and m == "off" else int(draw.integers(20, 60)))
        for t, m, seed in itertools.product(("polar", "rope"), ("off", "on"), range(3))
    ]
    result = model(needle(rows))
    assert "attn_type=rope, memory=off: no digit right in 3 cells" in result.remarks[0]
    assert len(result.numbers) == 9


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([({"memory": m}, s, 0) for m in ("off", "on") for s in range(2)], "every cell is excluded"),
        ([({"memory": m}, s, 80) for m in ("off", "on") for s in range(2)], "every digit right"),
        ([({"memory": "on"}, 0, 40)], "no axis varies"),
        ([({"memory": "off"}, 0, 30), ({"memory": "on"}, 0, 40)], "no residual degree of freedom remains"),
        ([({"memory": m}, s, 30) for m in ("off", "on") for s in range(3)], "the same in all 6 cells"),
        ([({"memory": m}, 0, None) for m in ("off", "on")], "no cell has a needle accuracy"),
        ([({"memory": "on", "window": w}, s, 30 + s if s else None) for w in ("off", "on") for s in range(3)], "window"),
    ],
)  # fmt: skip
def test_reasons_for_no_model(needle, rows, why):
    store = needle(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why in " ".join(render(make_table("needle-model", store), "terminal").split())


def test_table_of_a_sweep_without_needle(store, empty, make, run):
    cell, _ = make
    record = cell(1)
    empty.record_revision("own", grid_text="x", grid_file="x", cells=[record])
    run(empty, record.id, "done", [Measurement(probe="val", metric="val_loss", value=1.0)])
    assert "Nothing to model" in " ".join(render(make_table("needle-model", empty), "terminal").split())
