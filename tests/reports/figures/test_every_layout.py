"""Every figure on every sweep that comes along, at the widths of a journal: readable, in its frame, and in its data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import studied
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results.metrics import TEXT_SEPARATOR
from atma_sweep.results.names import PUBLISHED, SHIPPED
from atma_sweep.results.paper import open_published
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.store import Store, open_store
from figure_layout import contrast_faults, layout_faults, outside_faults, overlap_faults, size_faults, unlisted_values
from pictures import figure_of
from scipy import stats
from sweeps import fill_every, fill_probed, fill_replicated
from swept import swept
from tiers import long_form

WIDTHS = (89.0, 120.0, 183.0)
"""Millimetres of one column, one and a half, and two columns."""


def _fill_studies(store: Store) -> None:
    studied.record_study(store)
    studied.two(store)


SYNTHETIC: dict[str, Callable[[Store], Any]] = {
    "all": fill_every, "twice": fill_replicated, "probed": fill_probed, "rates": swept, "tuned": _fill_studies, "both": _fill_studies,
}  # fmt: skip
"""Sweeps synthetic by test factories, by name: every kind of number, replicates, probes, a numeric axis, and two studies."""
PAIRS = [(figure, sweep) for figure in FIGURES for sweep in (*PUBLISHED, *SHIPPED, *SYNTHETIC)]
DRAWN = (("effects", "printed-v2"), ("seeds", "twice"), ("attention-map", "probed"), ("slices", "tuned"))
"""Pairs that certainly have a picture."""
IN_TURN = [pair for index, pair in enumerate(PAIRS) if pair in DRAWN or index % 3 == 0]
"""What the second tier draws: of every figure and of every sweep a third. The long form draws all."""


@pytest.fixture(scope="module")
def store_of(tmp_path_factory: pytest.TempPathFactory, blank: Any) -> Callable[[str], Store]:
    """Return a function from the name of a sweep to a store that holds it."""
    folder = tmp_path_factory.mktemp("layouts")
    published = functools.cache(open_published)

    @functools.cache
    def synthetic(name: str) -> Store:
        path = folder / f"{name}.db"
        path.write_bytes(blank.read_bytes())
        store = open_store(path)
        SYNTHETIC[name](store)
        return store

    return lambda name: (
        published() if name in PUBLISHED else shipped_store(name) if name in SHIPPED else synthetic(name)
    )


def means_by_hand(frame: pd.DataFrame) -> list[float]:
    """Return the means of the lines of a frame over lengths, seeds first, and the ends of their 95 % t intervals.

    Of a single configuration the interval is that of its seeds. Gates that never decay are drawn with 2^20 tokens, ends of
    attempts in minutes or hours.
    """
    numbers: list[float] = []
    x = next((name for name in ("length", "pairs") if name in frame), None)
    if x is not None and {"panel", "line", "configuration"} <= set(frame):
        keys = [name for name in ("panel", "line", "probe", "metric", x) if name in frame]
        lines_at: dict[Any, list[list[float]]] = {}
        for key, rows in frame.groupby(keys):
            units = [float(np.mean(group)) for _, group in rows.groupby("configuration")["value"]]
            centre = float(np.mean(units))
            numbers.append(centre)
            same_length = lines_at.setdefault(
                tuple(part for name, part in zip(keys, key, strict=True) if name != "line"), []
            )
            same_length.append([centre])
            units = units if len(units) > 1 else list(rows["value"])
            if len(units) > 1:
                half = stats.t.ppf(0.975, len(units) - 1) * np.std(units, ddof=1) / len(units) ** 0.5
                numbers += [centre - half, centre + half, max(0, centre - half), min(1, centre + half)]
                same_length[-1] += [centre - half, centre + half]
        # figure texts draws differences from the mean of the lines
        of_texts = "probe" in frame and frame["probe"].astype(str).str.contains(TEXT_SEPARATOR, regex=False).any()
        for lines in lines_at.values() if of_texts else ():
            numbers += [number - float(np.mean([line[0] for line in lines])) for line in lines for number in line]
    for column in ("val_loss", "smoothed") if {"val_loss", "smoothed"} <= set(frame) else ():
        keys = ["first", "second", "tokens"]
        each = frame[~frame["diverged"]].groupby([*keys, "configuration"])[column].mean()
        numbers += list(each.groupby(keys).mean().dropna())
    if "depth" in frame:
        numbers += list(frame.groupby(["configuration", "depth", "length"])["value"].mean())
    if {"query", "key"} <= set(frame):
        numbers += list(frame.groupby(["cell", "query", "key"])["weight"].mean())
    if {"length", "column"} <= set(frame):
        numbers += list(frame.groupby(["length", "column"])["value"].mean())
    if "failure" in frame:
        numbers += [*(frame["end"] / 60), *(frame["end"] / 3600)]
    if "half_life" in frame and frame["half_life"].isna().any():
        numbers.append(2.0**20)
    return numbers


@pytest.mark.thorough
@pytest.mark.usefixtures("few_deals")
@pytest.mark.parametrize(("figure", "sweep"), [*IN_TURN, *long_form(*(pair for pair in PAIRS if pair not in IN_TURN))])
def test_layout_at_two_widths(store_of: Callable[[str], Store], figure: str, sweep: str) -> None:
    """Texts lie inside, apart, at 5 points or more, with a contrast of 4.5:1; plotted numbers are in the data."""
    try:
        figure_data = make_figure(figure, store_of(sweep), sweep)
    except ReportError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert (figure, sweep) not in DRAWN
        assert f"sweep {sweep}" in reason
        assert "\n" not in reason
        return
    narrow, *wider = (FigureOptions(style="nature", width_mm=width, title=False) for width in WIDTHS)
    # the narrowest column is the hardest; the wider ones and the screen take turns over the sweeps of a figure
    looks = (narrow, [*wider, FigureOptions()][PAIRS.index((figure, sweep)) % 3])
    faults = {}
    for look in looks:
        drawn = figure_of(figure_data, look)
        faults[look.width_mm] = layout_faults(drawn)
        if look.width_mm == WIDTHS[0]:
            faults["data"] = unlisted_values(drawn, figure_data.frame, means_by_hand(figure_data.frame))
    assert {width: problems for width, problems in faults.items() if problems} == {}


def _page(*texts: dict[str, Any]) -> Any:
    """Return a figure of 1 x 1 inches with these texts, given as arguments of `Figure.text`, and an empty panel."""
    with drawing.settings(FigureOptions()):
        figure = drawing.page(1.0, 1.0)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        for text in texts:
            figure.text(**({"x": 0.5, "y": 0.5, "ha": "center", "fontsize": 6} | text))
        figure.canvas.draw()
    return figure


def test_each_layout_fault_is_reported() -> None:
    assert layout_faults(_page({"s": "good"})) == []
    assert outside_faults(_page({"s": "far too long for this page"})) == ["'far too long for this page' is cut off"]
    assert overlap_faults(_page({"s": "one"}, {"s": "two", "x": 0.6})) == ["'one' overlaps 'two'"]
    assert overlap_faults(_page({"s": "one"}, {"s": "two", "y": 0.8})) == []
    assert size_faults(_page({"s": "tiny", "fontsize": 4.9})) == ["'tiny' has 4.9 points"]
    # (1 + 0.05) / (luminance of #e69f00 + 0.05), by the formula of WCAG 2
    assert contrast_faults(_page({"s": "pale", "color": "#e69f00"})) == ["'pale' has a contrast of 2.25"]
    assert contrast_faults(_page({"s": "dark", "color": "#767676"})) == []
    assert contrast_faults(_page({"s": "faint", "color": "#000000", "alpha": 0.3})) == [
        "'faint' has a contrast of 2.11"
    ]


def test_contrast_is_that_with_what_lies_behind() -> None:
    figure = _page({"s": "white", "color": "#ffffff"})
    figure.axes[0].axvspan(0, 1, color="#000000")
    figure.axes[0].set(xticks=[], yticks=[])
    figure.axes[0].set_axis_on()
    assert contrast_faults(figure) == []
    figure.axes[0].patches[0].set_color("#cccccc")
    assert contrast_faults(figure) == ["'white' has a contrast of 1.61"]


def test_a_moved_point_is_not_in_the_data() -> None:
    figure = _page()
    axes = figure.axes[0]
    axes.set_axis_on()
    frame = pd.DataFrame({"length": [128.0, 256.0], "value": [0.25, 0.5], "cell": ["a", "b"]})
    axes.plot([128, 256], [25, 50])
    assert unlisted_values(figure, frame) == []
    axes.plot([140, 256], [25.01, 50])
    assert unlisted_values(figure, frame) == ["line of panel 0: 1 of 2 points, such as [140.0, 25.01]"]
    assert unlisted_values(figure, frame, more=[0.2501]) == []


def test_layout_widths_are_those_of_the_written_file() -> None:
    figure = _page({"s": "Hebbian writes, γ = 1", "fontsize": 6.2})
    widths = []
    with drawing.settings(FigureOptions()):
        for dots in (100, 600):
            figure.set_dpi(dots)
            widths.append(figure.texts[0].get_window_extent(figure.canvas.get_renderer()).width / dots)
    assert widths[0] == pytest.approx(widths[1], rel=2e-3)
