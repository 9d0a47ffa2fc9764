"""Measurements of a drawn figure: positions, sizes and contrast of its texts, and the numbers that it plots.

`layout_faults(figure)` lists what a journal would send back. `unlisted_values(figure, frame)` lists the plotted numbers
that the data file beside the picture lacks. Both take a figure with its final layout, as `pictures.figure_of` gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgba
from matplotlib.text import Annotation, Text
from matplotlib.transforms import ScaledTranslation

LEAST_POINTS = 5.0
LEAST_CONTRAST = 4.5
TOLERANCE = 1.0
"""Pixels by which boxes may overlap or leave the canvas: they include the space of descenders that a text lacks."""
MAX_BURIED_SHARE = 0.25
"""Largest share of the pixels behind a text, such as those of a line that it crosses, that may lack contrast."""
SCALES = (1.0, 100.0)
"""Factors between numbers of a frame and of an axis: shares are drawn in %."""


def shown_texts(figure: Any) -> Iterator[Text]:
    """Yield every visible text of a figure that is not empty; tick labels beyond the view of their axis are not."""
    hidden = {text for axes in figure.findobj(Axes) if not axes.axison for text in axes.findobj(Text)}
    for axis in figure.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-6 * (high - low)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low - slack <= tick.get_loc() <= high + slack:
                hidden |= {tick.label1, tick.label2}
        if not axis.get_visible():
            hidden |= set(axis.findobj(Text))
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text


def box_of(text: Text, renderer: Any) -> Any:
    """Return the box of a text in pixels, without the arrow of an annotation."""
    if isinstance(text, Annotation):
        text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)


def text_boxes(figure: Any) -> Iterator[tuple[str, Any]]:
    """Yield (text, box in pixels) of every visible text."""
    renderer = figure.canvas.get_renderer()
    for text in shown_texts(figure):
        yield text.get_text(), box_of(text, renderer)


def layout_faults(figure: Any) -> list[str]:
    """Return a line per fault of the texts: outside the canvas, overlapping, below 5 points, below 4.5:1 of contrast."""
    return [*outside_faults(figure), *overlap_faults(figure), *size_faults(figure), *contrast_faults(figure)]


def outside_faults(figure: Any) -> list[str]:
    """Return a line per text that leaves the canvas, or the box that it is clipped to."""
    renderer, faults = figure.canvas.get_renderer(), []
    for text in shown_texts(figure):
        box = box_of(text, renderer)
        limits = [figure.bbox, *([text.get_clip_box()] if text.get_clip_on() and text.get_clip_box() else [])]
        for limit in limits:
            if not (
                limit.x0 - TOLERANCE <= box.x0 <= box.x1 <= limit.x1 + TOLERANCE
                and limit.y0 - TOLERANCE <= box.y0 <= box.y1 <= limit.y1 + TOLERANCE
            ):
                faults.append(f"{text.get_text()!r} is cut off")
                break
    return faults


def overlap_faults(figure: Any) -> list[str]:
    """Return a line per pair of texts whose boxes overlap."""
    faults = []
    for (text, a), (next_text, b) in combinations(text_boxes(figure), 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > TOLERANCE and down > TOLERANCE:
            faults.append(f"{text!r} overlaps {next_text!r}")
    return faults


def size_faults(figure: Any) -> list[str]:
    """Return a line per text that is smaller than 5 points."""
    return [
        f"{text.get_text()!r} has {text.get_fontsize():.3g} points"
        for text in shown_texts(figure)
        if text.get_fontsize() < LEAST_POINTS - 1e-6
    ]


def luminance(colours: np.ndarray) -> np.ndarray:
    """Return the relative luminance (WCAG 2) of colours [..., 3] with channels from 0 to 1."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    weighted: np.ndarray = linear @ np.array([0.2126, 0.7152, 0.0722])
    return weighted


def contrast(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the contrast ratio (WCAG 2), 1 to 21, of colours [..., 3] with channels from 0 to 1."""
    a, b = luminance(first), luminance(second)
    return (np.maximum(a, b) + 0.05) / (np.minimum(a, b) + 0.05)


def contrast_faults(figure: Any) -> list[str]:
    """Return a line per text that is hard to read on what is drawn behind it.

    The background is what the figure shows with all texts transparent; the boxes behind texts stay.
    """
    renderer, texts = figure.canvas.get_renderer(), list(shown_texts(figure))
    alphas = [text.get_alpha() for text in texts]
    boxes = [box_of(text, renderer) for text in texts]
    for text in texts:
        text.set_alpha(0)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3] / 255
    for text, alpha in zip(texts, alphas, strict=True):
        text.set_alpha(alpha)
    faults = []
    for text, box in zip(texts, boxes, strict=True):
        rows, columns = (
            slice(max(0, round(low)), max(1, round(high))) for low, high in ((box.y0, box.y1), (box.x0, box.x1))
        )
        behind = pixels[rows, columns].reshape(-1, 3)
        if not len(behind):
            continue
        *ink, opacity = to_rgba(text.get_color(), text.get_alpha())
        ratios = contrast(opacity * np.array(ink) + (1 - opacity) * behind, behind)
        if (ratios < LEAST_CONTRAST).mean() > MAX_BURIED_SHARE:
            faults.append(f"{text.get_text()!r} has a contrast of {np.median(ratios):.2f}")
    return faults


def _is_of_data(artist: Any, axes: Axes) -> bool:
    """Return True if an artist is in data coordinates, moved on the page by an equal distance or not at all."""
    transform = artist.get_transform()
    moved = getattr(transform, "_a", None) == axes.transData and isinstance(transform._b, ScaledTranslation)
    return bool(transform == axes.transData or moved)


def plotted_values(figure: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (description, numbers [points, 2]) of what is drawn in data coordinates: lines, markers, bars and maps.

    Guides, axis lines and shaded areas are left out: their transform is not that of the data, or their label begins
    with "_guide". An image gives its numbers in both columns.
    """
    for index, axes in enumerate(figure.axes):
        if not axes.axison or axes.get_label() == "<colorbar>":
            continue
        drawn: list[tuple[str, Any, Any]] = [
            ("line", line, line.get_xydata()) for line in axes.lines if _is_of_data(line, axes)
        ]
        for group in axes.collections:
            if type(group).__name__ == "PathCollection":
                drawn.append(("markers", group, group.get_offsets()))
            elif type(group).__name__ == "LineCollection" and _is_of_data(group, axes):
                drawn.append(("lines", group, np.concatenate([*group.get_segments(), np.empty((0, 2))])))
        for image in axes.images:
            numbers = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan).ravel()
            drawn.append(("map", image, np.column_stack([numbers, numbers])))
        for kind, artist, points in drawn:
            if not str(artist.get_label()).startswith("_guide") and artist.get_visible() and len(points):
                yield f"{kind} of panel {index}", np.ma.filled(np.ma.asarray(points, dtype=float), np.nan)


def unlisted_values(figure: Any, frame: pd.DataFrame, more: Sequence[float] = ()) -> list[str]:
    """Return a line per drawn object with a point neither of whose coordinates is a number of the frame.

    Args:
        figure: The figure.
        frame: The data beside it.
        more: Further numbers that a test computes from the frame in a way of its own, such as means.
    """
    numeric = [frame[name].astype(float) for name in frame.columns if pd.api.types.is_numeric_dtype(frame[name])]
    listed = np.unique(np.concatenate([*[column[np.isfinite(column)] for column in numeric], np.asarray(more, float)]))
    faults = []
    for description, points in plotted_values(figure):
        finite = points[np.isfinite(points).all(axis=1)]
        missing = ~_are_listed(finite, listed).any(axis=1)
        if missing.any():
            faults.append(
                f"{description}: {missing.sum()} of {len(finite)} points, such as {finite[missing][0].tolist()}"
            )
    return faults


def _are_listed(numbers: np.ndarray, listed: np.ndarray) -> np.ndarray:
    """Return a mask of the numbers that equal a listed one up to 1e-6 of it and a factor of SCALES."""
    is_plotted = np.zeros(numbers.shape, dtype=bool)
    if not len(listed):
        return is_plotted
    for scale in SCALES:
        scaled = numbers / scale
        index = np.searchsorted(listed, scaled).clip(1, max(1, len(listed) - 1))
        for neighbour in (index - 1, np.minimum(index, len(listed) - 1)):
            is_plotted |= np.isclose(scaled, listed[neighbour], rtol=1e-6, atol=1e-9)
    return is_plotted
