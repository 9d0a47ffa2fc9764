"""The figure `response`: which axis it goes over, its means and bands by hand, and ticks of axes of numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.canvas.length_frames import line_means
from atma_sweep.reports.figures.canvas.scales import Scale, round_numbers, scale_for_values
from atma_sweep.reports.figures.response import is_geometric, level_as_number
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner
from atma_sweep.results.store.store import Store
from here import run_in_process
from hypothesis import given
from hypothesis import strategies as st
from pictures import COLUMN, figure_of
from scipy import stats
from swept import AXIS, LAYERS, RATES, loss


def test_response_line_is_mean_with_t_interval(rates: Store) -> None:
    figure_data = make_figure("response", rates)
    assert figure_data.title == "Response to Muon learning rate"
    assert set(figure_data.frame["axis"]) == {AXIS}, "it has the most levels"
    assert set(figure_data.frame["length"]) == set(RATES)
    assert figure_data.notes == (
        "Lines: means over layers, seed (4 cells each); dots: single cells. No band over fewer than three configurations or seeds.",
        "Other numeric axes: layers.",
        "Sweep rates, revision 1.",
    )
    assert list(figure_data.glossary) == ["PoLAR", "NoPE"]
    axes = figure_of(figure_data).axes[0]
    lines = {
        line.get_label(): line
        for line in axes.lines
        if line.get_linestyle() != "None" and line.get_color() != "#ffffff"
    }
    drawn_ones = sorted(tuple(line.get_ydata()) for line in lines.values())
    expected, ends = [], []
    for kind in ("polar", "nope"):
        each = [[sum(loss(kind, rate, n, seed) for seed in (0, 1)) / 2 for n in LAYERS] for rate in RATES]
        means = [sum(values) / len(values) for values in each]
        expected.append(tuple(means))
        ends += [
            mean + sign * stats.t.ppf(0.975, len(LAYERS) - 1) * stats.sem(values)
            for mean, values in zip(means, each, strict=True)
            for sign in (-1, 1)
        ]
    for drawn_line, wanted in zip(drawn_ones, sorted(expected), strict=True):
        assert drawn_line == pytest.approx(wanted)
    # over two configurations a t interval is 13 standard errors wide, so it is computed and not drawn
    bounds = line_means(figure_data.frame)[["low", "high"]].to_numpy().ravel()
    for end in ends:
        assert min(abs(end - bound) for bound in bounds) < 1e-9
    assert not [
        band for band in axes.collections if type(band).__name__ in ("PolyCollection", "FillBetweenPolyCollection")
    ]
    # on a logarithmic axis, since the levels are even in their ratio
    assert axes.get_xscale() == "log"


def offset_sweep(store: Store, make: Any, offsets: dict[str, float], memories: tuple[str, ...] = ("on",)) -> None:
    """Record a sweep `apart` of two mixers, two rates and recipes whose losses differ by `offsets`."""
    combinations = itertools.product(("polar", "nope"), memories, (0.01, 0.02), offsets)
    cells = [
        replace(record, axes=record.axes | {AXIS: str(rate), "recipe": recipe})
        for i, (kind, memory, rate, recipe) in enumerate(combinations)
        for record in [make[0](i + 1, attn_type=kind, memory=memory)]
    ]
    store.record_revision("apart", grid_text="x", grid_file="x.yaml", cells=cells)
    for record in cells:
        attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        value = loss(record.levels["attn_type"], float(record.axes[AXIS]), 4, 0) + offsets[record.axes["recipe"]]
        DatabaseRecorder(store, attempt.id, 1).measurements(
            [Measurement(probe="val", metric="val_loss", value=value, unit="nats/token")]
        )
        store.finish_attempt(attempt.id, 1, "done")


def drawn_lines(axes: Any) -> list[tuple[float, ...]]:
    """Return the y values of the lines of a panel, sorted, without halos and dots."""
    lines = (line for line in axes.lines if line.get_linestyle() != "None" and line.get_color() != "#ffffff")
    return sorted(tuple(line.get_ydata()) for line in lines)


def test_levels_that_lie_apart_have_lines_of_their_own(empty: Store, make: Any) -> None:
    offset_sweep(empty, make, {"old": 0.5, "new": 0.0})
    figure_data = make_figure("response", empty, "apart")
    expected = [
        tuple(loss(kind, rate, 4, 0) + offset for rate in (0.01, 0.02))
        for kind in ("polar", "nope")
        for offset in (0.5, 0.0)
    ]
    axes = figure_of(figure_data).axes[0]
    assert np.array(drawn_lines(axes)) == pytest.approx(np.array(sorted(expected)))
    lines = [line for line in axes.lines if line.get_linestyle() != "None" and line.get_color() != "#ffffff"]
    assert {line.get_linestyle() for line in lines} == {"-"}, "dashes are those of the memory"
    assert len({(line.get_marker(), line.get_linewidth()) for line in lines}) == 2
    assert figure_data.notes[0] == "Points: single cells, one run each, so that the spread between runs is unknown."


def test_levels_close_together_are_averaged(empty: Store, make: Any) -> None:
    offset_sweep(empty, make, {"old": 0.002, "new": 0.0})
    figure_data = make_figure("response", empty, "apart")
    expected = [tuple(loss(kind, rate, 4, 0) + 0.001 for rate in (0.01, 0.02)) for kind in ("polar", "nope")]
    assert np.array(drawn_lines(figure_of(figure_data).axes[0])) == pytest.approx(np.array(sorted(expected)))
    assert figure_data.notes[0].startswith("Lines: means over recipe (2 cells each); dots: single cells.")


@pytest.mark.thorough
def test_third_axis_that_lies_apart_has_panels(empty: Store, make: Any) -> None:
    offset_sweep(empty, make, {"old": 0.5, "new": 0.0}, memories=("on", "off"))
    figure = figure_of(make_figure("response", empty, "apart"))
    titles = [" ".join(axes.get_title().split()) for axes in figure.axes]
    assert titles == [f"validation loss, recipe {recipe} (less is better)" for recipe in ("old", "new")]
    for axes, offset in zip(figure.axes, (0.5, 0.0), strict=True):
        expected = [tuple(loss(kind, rate, 4, 0) + offset for rate in (0.01, 0.02)) for kind in ("polar", "nope")] * 2
        assert np.array(drawn_lines(axes)) == pytest.approx(np.array(sorted(expected)))


def test_lines_that_coincide_are_listed(empty: Store, make: Any) -> None:
    offset_sweep(empty, make, {"old": 0.5, "new": 0.0}, memories=("on", "off"))
    notes = make_figure("response", empty, "apart").notes
    (listed,) = [note for note in notes if note.startswith("Lines that coincide: ")]
    assert "(PoLAR, with memory) and (PoLAR, no memory) at all 2 levels" in listed


@pytest.mark.thorough
def test_response_by_second_axis(rates: Store) -> None:
    figure_data = make_figure("response", rates, options={"by": "model.n_layers"})
    assert set(figure_data.frame["length"]) == {4.0, 8.0}
    assert figure_data.trace["options"] == {"by": "model.n_layers"}
    assert figure_of(figure_data).axes[0].get_xscale() == "linear"
    for look in (COLUMN, FigureOptions()):
        figure_of(figure_data, look)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--by", "attn_type"], "--by attn_type: sweep rates has no such numeric axis"),
        (["--by", "train.muon"], "did you mean train.muon_lr?"),
        (["--compare", "printed-v2"], "figure response does not take --compare; figures that do: loss"),
    ],
)
def test_response_refusals_are_single_lines(rates: Store, tmp_path: Path, arguments: list[str], why: str) -> None:
    code, _, err = run_in_process(tmp_path, "report", "--figure", "response", "--db", "rates.db", "--json", *arguments)
    assert code == 2
    assert why in err
    assert err.count("\n") == 1


def test_sweep_without_numeric_axis_has_no_response(every: Store) -> None:
    with pytest.raises(ReportError, match="sweep all has no numeric axis; add one to its grid"):
        make_figure("response", every)


def test_levels_that_are_numbers() -> None:
    assert [level_as_number(level) for level in ("1e-3", "1_000", "-2", "off", "inf", "nan", "")] == [
        0.001,
        1000,
        -2,
        *[None] * 4,
    ]


class TestTicks:
    def test_round_numbers_by_hand(self) -> None:
        assert round_numbers(0.003, 0.1, log=True) == [0.003, 0.01, 0.03, 0.1]
        assert round_numbers(1e-6, 1e3, log=True) == [1e-6, 1e-3, 1, 1000]
        assert round_numbers(0, 1) == [0, 0.5, 1]
        assert round_numbers(4, 8, integers_only=True) == [4, 6, 8]
        assert round_numbers(2, 3, integers_only=True) == [2, 3]
        assert round_numbers(5, 5) == [5]
        assert (
            scale_for_values([1, 2, 64]).log,
            scale_for_values([0, 2, 64]).log,
            scale_for_values([1, 2, 7]).log,
        ) == (
            True,
            False,
            False,
        )
        assert Scale(levels=("on", "off")).ticks() == {0.0: "on", 1.0: "off"}

    @given(st.floats(1e-9, 1e9), st.floats(1.0001, 1e9), st.booleans(), st.booleans())
    def test_ticks_lie_in_the_range_three_or_more(
        self, low: float, times: float, log: bool, integers_only: bool
    ) -> None:
        high = low * times
        if integers_only:
            low, high = math.floor(low), math.ceil(high)
            log = log and low > 0
        ticks = round_numbers(low, high, log=log, integers_only=integers_only)
        assert ticks == sorted(set(ticks))
        assert all(low - 1e-6 * abs(low) - 1e-12 <= tick <= high * (1 + 1e-6) for tick in ticks)
        assert 1 <= len(ticks) <= 9
        if not integers_only:
            assert len(ticks) >= 3

    @given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.floats(0, 1), st.booleans())
    def test_scale_share_runs_from_0_to_1(self, low: float, times: float, part: float, log: bool) -> None:
        scale = Scale(low, low * times, log=log)
        value = low * times**part if log else low + part * (low * times - low)
        assert scale.share(value) == pytest.approx(part, abs=1e-6)
        assert (scale.share(scale.low), scale.share(scale.high)) == (0, pytest.approx(1))


@pytest.mark.parametrize(
    ("levels", "expected"),
    [((0.02, 0.03, 0.045, 0.065), True), ((1.0, 2.0, 3.0), False), ((1.0, 2.0), False), ((0.0, 1.0, 3.0), False)],
)
def test_levels_of_equal_ratios_make_a_logarithmic_axis(levels: tuple[float, ...], expected: bool) -> None:
    assert is_geometric(levels) is expected
