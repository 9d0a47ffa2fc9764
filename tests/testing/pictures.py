"""Checks of a drawn figure: its texts, and whether any overlap or leave the canvas."""

from collections.abc import Iterator
from typing import Any

import pytest
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.files import drawn
from figure_layout import outside_faults, overlap_faults, text_boxes

COLUMN = FigureOptions(style="nature", width_mm=89.0, title=False)
"""A column of a journal."""


def figure_of(figure_data: FigureData, look: FigureOptions = COLUMN) -> Any:
    """Return the figure of matplotlib, laid out."""
    with drawing.settings(look):
        figure = drawn(figure_data, look)
        # panels with a fixed aspect ratio have their place only after this
        figure.draw_without_rendering()
        return figure


def assert_texts_apart(figure: Any) -> int:
    """Raises where two texts meet or one is cut off; returns how many there are."""
    if faults := [*outside_faults(figure), *overlap_faults(figure)]:
        raise AssertionError("; ".join(map(str, faults)))
    return len(list(text_boxes(figure)))


def ticks_of(axis: Any) -> list[float]:
    """Return the positions of the visible ticks of an axis."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    return [tick for tick in axis.get_ticklocs() if low - slack <= tick <= high + slack]


def numeric(figure: Any) -> Iterator[Any]:
    """Every axis whose ticks are numbers; panels that share an axis show it once."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axes.axison and axis.get_visible() and axis.get_ticklabels() and not _worded(axis):
                yield axis


def _worded(axis: Any) -> bool:
    return any(any(sign.isalpha() for sign in label.get_text().strip("KM")) for label in axis.get_ticklabels())


def check_column(figure: Any) -> None:
    """Raises where words meet or are cut off, and where an axis has fewer than three ticks."""
    assert_texts_apart(figure)
    assert figure.get_figwidth() == pytest.approx(89 / 25.4)
    for axis in numeric(figure):
        assert len(ticks_of(axis)) >= 3, [label.get_text() for label in axis.get_ticklabels()]
