"""Run-to-run noise against plain Python over the printed numbers, and detectable differences against statsmodels."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.reports.number_format import Column
from atma_sweep.reports.stats.noise.run_noise import (
    NoiseEstimate,
    detectable,
    detectable_factor,
    noise_by_stratum,
    pooled_noise,
)
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.results.paper import rows
from atma_sweep.results.store.records import CellRecord, Measurement
from atma_sweep.results.store.store import Store
from scipy import stats

NEEDLE = Column("Ndl@64K", "needle", "digit_accuracy", 1, percent=True, length=65536)
VAL = Column("Val", "val", "val_loss", 3)
MFU = Column("MFU", "throughput", "mfu_paper", 1, percent=True)
MODES = ("baseline", "weak", "strong", "discrete", "zipfian")


@pytest.fixture(scope="module")
def paper(published: Store) -> SweepData:
    return load_sweep_data(published, "printed-v2")


def pooled_sd_by_hand(mixer: str, memory: str, *, without: str = "") -> tuple[float, int]:
    """Return the pooled standard deviation of needle hits at 64K, in points, and its degrees of freedom."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows("lengths"):
        if (row["length"], row["attn_type"], row["memory"]) == ("65536", mixer, memory) and row["reg_mode"] != without:
            groups[row["distractor"], row["window"]].append(round(float(row["needle"]) / 1.25) * 1.25)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in groups.values())
    df = sum(len(values) - 1 for values in groups.values())
    return math.sqrt(squares / df), df


def test_strata_are_told_apart(paper: SweepData) -> None:
    """A single sd of 9.2 points would understate polar + memory by half, and rope has no variation at all."""
    noise_of_strata = noise_by_stratum(paper, NEEDLE)
    assert len(noise_of_strata) == 6
    for (mixer, memory), noise in noise_of_strata.items():
        sd, df = pooled_sd_by_hand(mixer, memory, without="strong")
        assert (noise.kind, noise.df, noise.groups) == ("near-replicates", df, 4)
        assert 100 * noise.sd == pytest.approx(sd, abs=1e-9)
        assert noise == pooled_noise(paper, NEEDLE, {"attn_type": mixer, "memory": memory})
    with_strong = [
        f"{pooled_sd_by_hand(*stratum)[0]:.1f}" for stratum in (("polar", "on"), ("nope", "on"), ("rope", "off"))
    ]
    assert with_strong == ["19.9", "7.5", "0.0"], "as worked out apart from this package"
    assert (
        noise_of_strata["polar", "on"].sd
        > 2 * noise_of_strata["nope", "on"].sd
        > noise_of_strata["rope", "off"].sd
        == 0
    )


def test_an_accuracy_varies_at_least_by_its_trials(paper: SweepData) -> None:
    """Rope has no right trial in 20 cells, but its rate may be above zero: Jeffreys, (hits + 1/2) / (trials + 1)."""
    noise = noise_by_stratum(paper, NEEDLE)["rope", "on"]
    share = 0.5 / (20 * 16 + 1)
    assert noise.floor == pytest.approx(math.sqrt(share * (1 - share) / 16))
    assert noise.effective_sd == noise.floor > noise.sd == 0
    for key, stratum_noise in noise_by_stratum(paper, NEEDLE).items():
        accuracies = [
            float(row["needle"]) / 100
            for row in rows("lengths")
            if (row["length"], row["attn_type"], row["memory"]) == ("65536", *key)
        ]
        share = (16 * sum(accuracies) + 0.5) / (16 * len(accuracies) + 1)
        assert stratum_noise.floor == pytest.approx(math.sqrt(share * (1 - share) / 16), rel=1e-6)
    assert noise_by_stratum(paper, VAL)["rope", "on"].floor == 0


def test_regularizers_cost_speed(paper: SweepData) -> None:
    assert pooled_noise(paper, MFU) is None
    assert noise_by_stratum(paper, MFU) == {}


@pytest.mark.parametrize(
    ("reduction", "modes", "df"), [("sum", MODES, 3), ("mean", MODES, None), ("sum", ("baseline", "strong"), None)]
)
def test_regularizers_are_treatments_beside_a_mean_loss(
    empty: Store, make: Any, run: Callable[..., None], reduction: str, modes: tuple[str, ...], df: int | None
) -> None:
    cell, _ = make
    cells = []
    for index, mode in enumerate(modes):
        bare = cell(index + 1, reg_mode=mode)
        config = {"train": {"loss_reduction": reduction, "regularizer": mode}}
        cells.append(CellRecord(**{**vars(bare), "config": config}))
    empty.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    for index, record in enumerate(cells):
        run(empty, record.id, "done", [Measurement(probe="val", metric="val_loss", value=3 + index / 7)])
    noise = pooled_noise(load_sweep_data(empty), VAL)
    assert (noise.df if noise else None) == df


def test_one_pair_is_held_against_the_spread() -> None:
    sd, df = pooled_sd_by_hand("polar", "on")
    t = stats.t.ppf(0.975, df) + stats.t.ppf(0.8, df)
    assert detectable(NoiseEstimate("near-replicates", sd, df, 4), 1) == pytest.approx(t * sd * math.sqrt(2))
    assert f"{t * sd * math.sqrt(2):.0f}" == "84", "points: nothing less shows in one pair of polar with memory"


@pytest.mark.parametrize("pairs", [2, 3, 6, 10, 20, 65, 400])
def test_detectable_factor_has_the_power_of_noncentral_t(pairs: int) -> None:
    """With a known sd, the t statistic of the pairs is noncentral t."""
    threshold = stats.t.ppf(0.975, pairs - 1)
    shift = detectable_factor(pairs, 10**7) * math.sqrt(pairs / 2)
    assert stats.nct.sf(threshold, pairs - 1, shift) == pytest.approx(0.8, abs=1e-4)
    assert detectable_factor(pairs, 12) > detectable_factor(pairs, 10**7)
