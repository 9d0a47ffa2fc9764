"""Checks of a drawn figure: its texts, and whether any overlap or leave the canvas."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.files import drawn
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.text import Text

COLUMN = FigureOptions(style="nature", width_mm=89.0, title=False)
"""A column of a journal."""


def figure_of(figure_data: FigureData, look: FigureOptions = COLUMN) -> Any:
    """Return the figure of matplotlib, laid out."""
    with drawing.settings(look):
        return drawn(figure_data, look)


def text_boxes(figure: Any) -> Iterator[tuple[str, Any]]:
    """Every text that is to be seen, with its box in dots."""
    renderer = figure.canvas.get_renderer()
    hidden = {text for axes in figure.findobj(Axes) if not axes.axison for text in axes.findobj(Text)}
    for axis in figure.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-6 * (high - low)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low - slack <= tick.get_loc() <= high + slack:
                hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text.get_text(), text.get_window_extent(renderer)


def assert_texts_apart(figure: Any) -> int:
    """Raises where two texts meet or one is cut off; returns how many there are."""
    boxes = list(text_boxes(figure))
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in boxes:
        assert -1 <= box.x0 <= box.x1 <= width + 1, f"{text!r} is cut off"
        assert -1 <= box.y0 <= box.y1 <= height + 1, f"{text!r} is cut off"
    for (text, a), (next_text, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 1, f"{text!r} meets {next_text!r}"
    return len(boxes)


def ticks_of(axis: Any) -> list[float]:
    """Return the positions of the visible ticks of an axis."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    return [tick for tick in axis.get_ticklocs() if low - slack <= tick <= high + slack]


def numeric(figure: Any) -> Iterator[Any]:
    """Every axis whose ticks are numbers."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axes.axison and axis.get_visible() and len(axis.get_ticklocs()) and not _worded(axis):
                yield axis


def _worded(axis: Any) -> bool:
    return any(any(sign.isalpha() for sign in label.get_text().strip("KM")) for label in axis.get_ticklabels())


def check_column(figure: Any) -> None:
    """Raises where words meet or are cut off, and where an axis has fewer than three ticks."""
    assert_texts_apart(figure)
    assert figure.get_figwidth() == pytest.approx(89 / 25.4)
    for axis in numeric(figure):
        assert len(ticks_of(axis)) >= 3, [label.get_text() for label in axis.get_ticklabels()]
