"""Placement of labels next to what they name, such as at the ends of lines, so that no legend is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AIR = 1.12
"""Distance between the centres of two labels, in heights of a line of text."""


def separate(positions: Sequence[float], min_distance: float) -> list[float]:
    """Return the positions moved as little as possible so that neighbours are at least `min_distance` apart.

    "As little" means least squares. The result is in the order of the input, and their order along the axis stays.
    """
    from scipy.optimize import isotonic_regression

    if not len(positions):
        return []
    order, steps = np.argsort(positions, kind="stable"), min_distance * np.arange(len(positions))
    separated = np.empty(len(positions))
    separated[order] = isotonic_regression(np.asarray(positions)[order] - steps).x + steps
    return separated.tolist()


def separate_within(positions: Sequence[float], min_distance: float, lowest: float, highest: float) -> list[float]:
    """Return separated positions moved between two bounds, while keeping them apart if they fit.

    If they do not fit, the lowest ones leave the lower bound.

    Args:
        positions: Positions, in any order, that are at least `min_distance` apart.
        min_distance: Least distance of neighbours.
        lowest: Lower bound.
        highest: Upper bound.
    """
    rank = np.argsort(np.argsort(positions, kind="stable"))
    moved = np.maximum(positions, lowest + rank * min_distance)
    return np.minimum(moved, highest - (len(positions) - 1 - rank) * min_distance).tolist()


def label_ends(axes: Axes, labels: Sequence[tuple[str, float, Any]]) -> None:
    """Write labels at the right of the axes, without overlaps. The axes must have their scales and limits.

    It runs the layout of the figure once.

    Args:
        axes: The axes.
        labels: (text, y of the line's end in data, colour) of each label.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()
    dots = [float(axes.transData.transform((axes.get_xlim()[1], y))[1]) for _, y, _ in labels]
    lowest, highest = axes.bbox.y0, axes.bbox.y1
    min_distance = AIR * drawing.size("small") * figure.dpi / 72
    moved = separate_within(
        separate([min(max(dot, lowest), highest) for dot in dots], min_distance), min_distance, lowest, highest
    )
    for (text, y, colour), current, target in zip(labels, dots, moved, strict=True):
        shift, coordinates = (4, (target - current) * 72 / figure.dpi), ("axes fraction", "data")
        drawing.note(
            axes, text, (1.0, y), shift, xycoords=coordinates, va="center", color=colour, annotation_clip=False
        )


SIDES: tuple[tuple[Literal["left", "right"], float], ...] = (
    ("left", 7.0), ("right", -7.0), ("left", 18.0), ("right", -18.0),
)  # fmt: skip
"""Positions of a text relative to its point: horizontal alignment, and horizontal offset in points."""
OFFSETS = (0.0, 4.0, -4.0, 9.0, -9.0, 15.0, -15.0, 22.0, -22.0, 30.0, -30.0, 40.0, -40.0)
"""Vertical offsets in points of a text from its point, in order of preference."""


def label_points(axes: Axes, labels: Sequence[tuple[float, float, str]], points: Sequence[tuple[float, float]]) -> None:
    """Write each label next to its point, where it overlaps no other text and hides the fewest points, if possible.

    It stays inside the axes if possible. A distant label gets a thin line to its point. The layout must be final.

    Args:
        axes: The axes.
        labels: (x, y, text) of each label, in data.
        points: (x, y) in data of all points that labels should not hide.
    """
    from matplotlib.text import Text

    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels: Any = axes.transData.transform(list(points)) if points else []
    inside = axes.get_window_extent(renderer)
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    for x, y, text in sorted(labels, key=lambda label: -label[1]):
        arrow = {"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 4, "color": drawing.GREY}
        style: dict[str, Any] = {"va": "center", "zorder": 6, "bbox": drawing.BACKING, "arrowprops": arrow}
        note = drawing.note(axes, text, (x, y), (6, 0), **style)
        line = note.arrow_patch
        costs = {}
        for side, aside in SIDES:
            for up in OFFSETS:
                note.set_position((aside, up))
                note.set_horizontalalignment(side)
                note.update_positions(renderer)
                box = Text.get_window_extent(note, renderer)
                outside = not (
                    inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
                )
                met = sum(box.overlaps(box_of_text) for box_of_text in boxes)
                hidden = box.expanded(1.02, 1.2).count_contains(pixels) if len(pixels) else 0
                costs[side, aside, up] = 1000 * outside + 400 * met + 6 * hidden + abs(up) / 3 + abs(aside) / 5
        side, aside, up = min(costs, key=costs.__getitem__)
        note.set_horizontalalignment(side)
        note.set_position((aside, up))
        note.update_positions(renderer)
        if line is not None:
            line.set_visible(abs(up) > 4 or abs(aside) > 7)
        boxes.append(Text.get_window_extent(note, renderer))
