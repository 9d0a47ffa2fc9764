"""The sentences of the rivals' papers: verdicts worked out by hand from what they print, and of sweeps of one's own."""

from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.number_format import column_of
from atma_sweep.reports.stats.claims.paper_claims import CLAIMS, ClaimFacts
from atma_sweep.reports.stats.claims.rival_claims import claims_for
from atma_sweep.reports.stats.noise.best_probability import candidates_by_configuration
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner
from atma_sweep.results.store.store import Store
from scipy import stats


def verdicts(store: Store, sweep: str) -> dict[str, tuple[str, str]]:
    table = make_table("claims", store, sweep)
    return {raw["claim"]: (row[1], row[2]) for raw, row in zip(table.raw, table.rows, strict=True)}


def test_claims_of_the_threshold_paper(published: Store) -> None:
    by_claim = verdicts(published, "printed-tra")
    assert by_claim["solved"] == ("true", "iid 100.00 ± 0.00, sparse 100.00 ± 0.00, dense 100.00 ± 0.00; 4 runs")
    for name, mean, sd in (("rope-sparse", 72.82, 1.27), ("fox-sparse", 93.4, 4.21)):
        high = stats.t.interval(0.95, 3, mean, sd / 2)[1]
        assert by_claim[name][0] == ("true" if high < 100 else "not shown")
        assert by_claim[name][1].endswith(f"95% interval up to {min(100.0, high):.2f}")
    assert (by_claim["rope-sparse"][0], by_claim["fox-sparse"][0]) == ("true", "not shown")
    assert by_claim["nope-dense"][0] == "true"
    assert by_claim["extrapolates"] == ("not decidable", "perplexity at 128 only")


def test_claims_of_the_wall_page(published: Store) -> None:
    by_claim = verdicts(published, "printed-wall")
    bars = np.array([[68.0, 46.5, 31.1, 62.4], [66.9, 45.0, 28.8, 61.2], [68.9, 47.1, 39.8, 63.0]])
    ahead = bars[2] - bars[:2]
    assert by_claim["outperforms"] == (
        "true", f"ahead in {(ahead > 0).sum()} of 8, by at least {ahead.min():.1f} points; one run each, so run-to-run variation is unknown",
    )  # fmt: skip
    assert by_claim["averages"] == ("true of 3 of 4", "3 of 4 match to the printed digit; fox 50.475, printed 50.4")
    assert by_claim["rescale"][0] == "true of 2 of 3"
    assert f"{2**2.56:.3f} at C = 128, printed 5.91" in by_claim["rescale"][1]


def test_claims_for_our_sweep_are_those_of_our_paper(published: Store) -> None:
    assert claims_for(ClaimFacts(load_sweep_data(published, "printed-v2"))) == list(CLAIMS)


def verdicts_of_launched(
    store: Store, make: Any, values_by_mixer: dict[str, list[list[Measurement]]]
) -> dict[str, tuple[str, str]]:
    cell, _ = make
    listed = [(kind, seed, values) for kind, runs in values_by_mixer.items() for seed, values in enumerate(runs)]
    cells = [cell(i, attn_type=kind, memory="off", seed=seed) for i, (kind, seed, _) in enumerate(listed)]
    store.record_revision("own", grid_text="x", grid_file="x", cells=cells)
    for record, (_, _, values) in zip(cells, listed, strict=True):
        attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        DatabaseRecorder(store, attempt.id, 1).measurements(values)
        store.finish_attempt(attempt.id, 1, "done")
    return verdicts(store, "own")


def shares(**sets: float) -> list[Measurement]:
    return [
        Measurement(probe="flipflop", metric=f"exact_{name}", value=value, unit="fraction", n=4000)
        for name, value in sets.items()
    ]


def lengths(*values: float) -> list[Measurement]:
    return [
        Measurement(probe="extrapolation", metric="perplexity", length=length, value=value, unit="perplexity")
        for length, value in zip((128, 4096), values, strict=True)
    ]


def test_rival_claims_on_a_launched_sweep(empty: Store, make: Any) -> None:
    by_claim = verdicts_of_launched(
        empty,
        make,
        {
            "tra": [
                shares(iid=1, sparse=1, dense=1) + lengths(30, 29),
                shares(iid=1, sparse=0.9, dense=1) + lengths(30, 29),
            ],
            "rope": [shares(sparse=1.0) + lengths(30, 80)],
            "fox": [shares(sparse=0.9999) + lengths(30, 31)],
            "nope": [shares(dense=0.5)],
        },
    )
    assert set(by_claim) == {"solved", "rope-sparse", "fox-sparse", "nope-dense", "extrapolates"}
    assert by_claim["solved"] == (
        "true of 2 of 3",
        "iid 100.00 ± 0.00, sparse 95.00 ± 7.07, dense 100.00 ± 0.00; 2 runs",
    )
    assert by_claim["rope-sparse"][0] == "false"
    # Wilson of 3,999.6 of 4,000 by hand: 0.99999
    assert by_claim["fox-sparse"][0] == "true"
    assert by_claim["nope-dense"][0] == "true"
    assert by_claim["extrapolates"] == (
        "true of 2 of 3",
        "perplexity at 4K over that at 128: tra 0.97, fox 1.03, rope 2.67",
    )


def test_rival_claims_without_measurements(empty: Store, make: Any) -> None:
    by_configuration = verdicts_of_launched(empty, make, {"rope": [shares(sparse=0.5)]})
    assert by_configuration["rope-sparse"][0] == "true"
    assert {name: verdict for name, (verdict, _) in by_configuration.items()} == dict.fromkeys(
        by_configuration, "not decidable"
    ) | {"rope-sparse": "true"}
    assert by_configuration["solved"][1].startswith("no cell tra")


def test_printed_mean_uses_its_printed_sd(published: Store) -> None:
    """The noise is not that of its stratum, which two position schemes share; TRA's printed sd is zero."""
    data = load_sweep_data(published, "printed-tra")
    by_configuration = {
        key[0] + key[5]: candidate
        for key, candidate in candidates_by_configuration(data, column_of("flipflop", "exact_sparse")).items()
    }
    assert (by_configuration["foxnone"].sd, by_configuration["foxnone"].df, by_configuration["foxnone"].seeds) == (
        pytest.approx(0.0421),
        3,
        4,
    )
    assert by_configuration["nopenone"].sd == pytest.approx(0.001)
    assert by_configuration["nopeape"].sd == pytest.approx(0.0564)
    assert by_configuration["tranone"].sd == 0.0


@pytest.mark.thorough
def test_every_figure_of_a_rival_draws_or_explains(published: Store) -> None:
    drawn_figures, refused = {}, []
    for sweep in ("printed-tra", "printed-wall", "printed-atlas"):
        for name in FIGURES:
            try:
                drawn_figures[sweep, name] = len(make_figure(name, published, sweep).frame)
            except ReportError as error:
                refused.append(str(error))
    assert all(why.endswith("; a published sweep has printed numbers only") and "\n" not in why for why in refused)
    assert set(drawn_figures) >= {("printed-tra", name) for name in ("power", "extrapolation")}
    assert not {name for _, name in drawn_figures} & {"needle", "loss", "seeds", "pareto", "timeline"}
