"""Words beside what they name: at the ends of lines, where nothing then has to be looked up in a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AIR = 1.12
"""Distance of two labels' middles, in heights of a line of text."""


def apart(places: Sequence[float], least: float) -> list[float]:
    """The places, moved as little as puts neighbours at least so far apart; the order stays."""
    order = sorted(range(len(places)), key=lambda i: (places[i], i))
    blocks: list[list[Any]] = []  # [mean place, members]
    for i in order:
        blocks.append([places[i], [i]])
        while len(blocks) > 1 and _bottom(blocks[-1], least) < _top(blocks[-2], least) + least:
            last = blocks.pop()
            members = [*blocks[-1][1], *last[1]]
            total = blocks[-1][0] * len(blocks[-1][1]) + last[0] * len(last[1])
            blocks[-1] = [total / len(members), members]
    found = [0.0] * len(places)
    for block in blocks:
        for place, i in enumerate(block[1]):
            found[i] = _bottom(block, least) + place * least
    return found


def within(places: Sequence[float], least: float, lowest: float, highest: float) -> list[float]:
    """Places that lie apart, moved between the two bounds where that leaves them apart: upwards first."""
    order = sorted(range(len(places)), key=lambda i: (places[i], i))
    found = list(places)
    for rank, i in enumerate(order):
        found[i] = max(found[i], lowest + rank * least)
    for rank, i in enumerate(reversed(order)):
        found[i] = min(found[i], highest - rank * least)
    return found


def _bottom(block: Sequence[Any], least: float) -> float:
    return float(block[0] - least * (len(block[1]) - 1) / 2)


def _top(block: Sequence[Any], least: float) -> float:
    return float(block[0] + least * (len(block[1]) - 1) / 2)


def at_ends(axes: Axes, labels: Sequence[tuple[str, float, Any]], *, size: float) -> None:
    """Writes each (text, height of the line's end in data, colour) right of the axes, none over another.

    The axes must have their scales and limits.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()
    dots = [float(axes.transData.transform((axes.get_xlim()[1], y))[1]) for _, y, _ in labels]
    lowest, highest = axes.bbox.y0, axes.bbox.y1
    to_points = 72 / figure.dpi
    least = AIR * size * figure.dpi / 72
    moved = within(apart([min(max(place, lowest), highest) for place in dots], least), least, lowest, highest)
    for (text, y, ink), place, wanted in zip(labels, dots, moved, strict=True):
        axes.annotate(
            text,
            (1.0, y),
            xycoords=("axes fraction", "data"),
            xytext=(4, (wanted - place) * to_points),
            textcoords="offset points",
            va="center",
            ha="left",
            color=ink,
            fontsize=size,
            annotation_clip=False,
        )
