"""Placement of labels next to what they name, such as at the ends of lines, so that no legend is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from . import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOMINATED = "#f1f1f1"
"""Shade of what a front dominates."""
LEADER = 8.0
"""Points that a line between the end of a line and its label takes."""
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


def mark_better_corner(axes: Axes, x_sign: int, y_sign: int) -> None:
    """Draw an arrow with the word "better" into the corner of the better ends of both axes.

    Args:
        axes: The panel.
        x_sign: 1 if more of x is better, else -1.
        y_sign: 1 if more of y is better, else -1.
    """
    corner = (0.985 if x_sign > 0 else 0.015, 0.98 if y_sign > 0 else 0.02)
    style: dict[str, Any] = {"xycoords": "axes fraction", "color": drawing.GREY, "va": "center"}
    style |= {"ha": "left" if x_sign < 0 else "right"}
    style |= {"arrowprops": {"arrowstyle": "->", "color": drawing.GREY, "shrinkA": 1, "shrinkB": 0}}
    shift = (-14 * x_sign, -12 * y_sign)
    drawing.note(axes, "better", corner, shift, **style)


def shade_dominated(axes: Axes, front: Sequence[tuple[float, float]], x_sign: int, y_sign: int) -> None:
    """Shade all that is worse in both directions than a point of a front, as far as the axes go, and keep their limits.

    Args:
        axes: The panel, with its limits.
        front: Points (x, y) of the front by ascending x; without any nothing is shaded.
        x_sign: 1 if more of x is better, else -1.
        y_sign: 1 if more of y is better, else -1.
    """
    if not front:
        return
    ends, (low, high) = axes.get_xlim(), axes.get_ylim()
    (first, *_), last = front, front[-1]
    corners = [(ends[0], first[1]), *front] if x_sign > 0 else [*front, (ends[1], last[1])]
    x, y = zip(*corners, strict=True)
    worst, step = (low if y_sign > 0 else high), ("pre" if x_sign > 0 else "post")
    axes.fill_between(x, y, worst, step=step, color=DOMINATED, linewidth=0, zorder=0.4)  # type: ignore[arg-type]
    axes.set(xlim=ends, ylim=(low, high))


def dominated_key() -> dict[str, Any]:
    """Return the legend entry of the area of `shade_dominated`."""
    return {"dominated": drawing.patch(facecolor=DOMINATED, edgecolor="none")}


def label_ends(
    axes: Axes,
    labels: Sequence[tuple[str, float, Any]],
    x: float | None = None,
    *,
    leaders: bool = False,
    size: str = "small",
) -> None:
    """Write labels at the right of the axes or of the ends of lines. The axes must have their scales and limits.

    Labels of one call do not overlap.

    It runs the layout of the figure once.

    Args:
        axes: The axes.
        labels: (text, y of the line's end in data, colour) of each label.
        x: x of the ends in data, right of which the labels stand; None: they stand at the right of the axes.
        leaders: Whether a thin line joins each label to its end, for ends that lie closer than their labels.
        size: Size of the labels, as `drawing.size` names it.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()
    dots = [float(axes.transData.transform((axes.get_xlim()[1], y))[1]) for _, y, _ in labels]
    lowest, highest = axes.bbox.y0, axes.bbox.y1
    min_distance = AIR * drawing.size(size) * figure.dpi / 72
    moved = separate_within(
        separate([min(max(dot, lowest), highest) for dot in dots], min_distance), min_distance, lowest, highest
    )
    for (text, y, colour), current, target in zip(labels, dots, moved, strict=True):
        side, gap = ("axes fraction", 4.0) if x is None else ("data", 3.0 + drawing.line_width(MARK_RADIUS))
        look: dict[str, Any] = {
            "va": "center",
            "color": colour,
            "fontsize": drawing.size(size),
            "annotation_clip": False,
        }
        if leaders:
            gap += LEADER
            line = {
                "arrowstyle": "-",
                "color": colour,
                "linewidth": drawing.line_width(0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            }
            look |= {"arrowprops": line | {"relpos": (0, 0.5)}}
        at, shift = (1.0 if x is None else x, y), (gap, (target - current) * 72 / figure.dpi)
        drawing.note(axes, text, at, shift, xycoords=(side, "data"), **look)


MARK_RADIUS = 2.1  # points in the style `paper`, half the size of a mark at the end of a line
DIRECTIONS = 24
"""Directions, evenly around a point, in which `label_rings` tries a label."""
DISTANCES = (2.0, 5.0, 9.0, 14.0, 20.0, 27.0, 35.0, 45.0, 57.0, 72.0, 90.0)
"""Distances in points between a ring and its label; from the second on a line joins them."""
CLEARANCE = 1.0
"""Points that stay free between a mark and a label or line that belongs to another."""
LINE_CLEARANCE = 2.5
"""Points that stay free between a label and a line, whose caps are as wide."""
GLYPH_HEIGHT = 0.72
"""Height of a digit as a share of the font size, to which the box of a text is cut: it includes descenders."""


Segment = tuple[np.ndarray, np.ndarray]
"""Both ends (x, y) of a straight line, or the lower left and upper right corner of a box, in pixels."""


@dataclass(kw_only=True)
class Obstacles:
    """Marks, rings, lines and texts that a label should not meet, in pixels; placed labels and lines are added."""

    inside: Segment
    """Box of the panel."""
    dots: np.ndarray
    rings: np.ndarray
    """Centres [n, 2] of marks and of rings."""
    mark: float
    ring: float
    """Radii of marks and of rings, with the space that stays free around them."""
    walls: Sequence[Segment]
    air: float
    """Space that stays free between a label and the walls, which are further lines."""
    boxes: list[Segment]
    leaders: list[Segment]

    def cost(self, at: np.ndarray, box: Segment, leader: Segment | None) -> float:
        """Return how much a label at `box` and its line would meet: 1000 outside of the panel, 12 to 200 per object.

        A label without a line that is nearer to another ring than to its own costs 60.

        Args:
            at: Centre of the label's own ring, which does not count.
            box: Box of the label.
            leader: The label's line, from its ring; None: it has no line.
        """
        low, high = box
        cost = 1000.0 * bool((low < self.inside[0]).any() or (high > self.inside[1]).any())
        for centres, radius in ((self.dots, self.mark), (self.rings, self.ring)):
            foreign = centres[np.hypot(*(centres - at).T) > 0.3 * self.mark]
            cost += 60 * int((_distances_to_box(foreign, low, high) < radius).sum())
            if leader is not None:
                cost += 60 * int((_distances_to_segment(foreign, *leader) < radius).sum())
        cost += 200 * sum(bool((low < top).all() and (high > bottom).all()) for bottom, top in self.boxes)
        cost += 100 * sum(_crosses_box(*line, low, high) for line in self.leaders)
        cost += 12 * sum(_crosses_box(*wall, low - self.air, high + self.air) for wall in self.walls)
        if leader is not None:
            cost += 100 * sum(_crosses_box(*leader, *written) for written in self.boxes)
            cost += 60 * sum(_cross(*leader, *line) for line in self.leaders)
        else:
            # without a line a label seems to belong to the nearest ring
            from_label, from_own = np.hypot(*(self.rings - (low + high) / 2).T), np.hypot(*(self.rings - at).T)
            cost += 60 * bool(from_own[np.argmin(from_label)] > 0.3 * self.mark)
        return cost


def label_rings(
    axes: Axes,
    labels: Sequence[tuple[float, float, str]],
    marks: Sequence[tuple[float, float]],
    *,
    ring: float,
    mark: float,
    lines: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write each label off all marks, with a thin line that ends at the ring of its own point.

    Of all positions the one is taken where label and line meet the fewest marks, rings, labels and lines, and then the
    nearest. Labels have no box, so that they hide nothing. The layout must be final.

    Args:
        axes: The axes.
        labels: (x, y, text) of each label, in data; these points have rings.
        marks: (x, y) of every mark, in data.
        ring: Radius of a ring in points.
        mark: Radius of a mark in points.
        lines: Corners (x, y), in data, of further lines that labels should not stand on.
    """
    if not labels:
        return
    figure: Any = axes.figure
    renderer, unit = figure.canvas.get_renderer(), figure.dpi / 72
    to_pixels = axes.transData.transform
    dots, centres = to_pixels(list(marks)), to_pixels([label[:2] for label in labels])
    obstacles = Obstacles(
        inside=_corners(axes.get_window_extent(renderer)), dots=dots, rings=centres,
        mark=(mark + CLEARANCE) * unit, ring=(ring + CLEARANCE) * unit, air=LINE_CLEARANCE * unit, leaders=[],
        walls=[ends for line in lines for ends in pairwise(to_pixels(list(line)))],
        boxes=[_corners(text.get_window_extent(renderer)) for text in axes.texts],
    )  # fmt: skip
    # the most crowded first, while there is free space
    crowd = [int((np.hypot(*(dots - at).T) < 30 * unit).sum()) for at in centres]
    for index in sorted(range(len(labels)), key=lambda index: -crowd[index]):
        x, y, text = labels[index]
        note = drawing.note(axes, text, (x, y), (0, 0), ha="center", va="center_baseline", zorder=6)
        width = note.get_window_extent(renderer).width
        half = np.array([width, GLYPH_HEIGHT * note.get_fontsize() * unit]) / 2
        centre, leader = _free_position(obstacles, centres[index], half, ring, unit)
        note.set_position(tuple((centre - centres[index]) / unit))
        obstacles.boxes.append((centre - half, centre + half))
        if leader is not None:
            obstacles.leaders.append(leader)
            ends = axes.transData.inverted().transform(leader)
            arrow = {"arrowstyle": "-", "linewidth": drawing.line_width(0.5), "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", ends[0], ends[1], zorder=5, arrowprops=arrow | {"color": drawing.INK})


def _free_position(
    obstacles: Obstacles, at: np.ndarray, half: np.ndarray, ring: float, unit: float
) -> tuple[np.ndarray, Segment | None]:
    """Return the centre of a label, in pixels, and its line; None for a label right next to its ring.

    Args:
        obstacles: What label and line should not meet.
        at: Centre of its ring, in pixels.
        half: Half the width and height of the label, in pixels.
        ring: Radius of the ring in points.
        unit: Pixels per point.
    """
    costs: list[float] = []
    positions: list[tuple[np.ndarray, Segment | None]] = []
    for distance in DISTANCES:
        for angle in 2 * np.pi * np.arange(DIRECTIONS) / DIRECTIONS:
            way = np.array([math.cos(angle), math.sin(angle)])
            # from the centre of a box to its edge in this direction
            reach = float(np.min(half / np.maximum(np.abs(way), 1e-9)))
            centre = at + way * ((ring + distance) * unit + reach)
            leader = (at + way * ring * unit, at + way * (ring + distance - 1) * unit)
            line = leader if distance > DISTANCES[0] else None
            positions.append((centre, line))
            costs.append(obstacles.cost(at, (centre - half, centre + half), line) + 0.35 * distance)
    return positions[int(np.argmin(costs))]


def _corners(box: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.array([box.x0, box.y0]), np.array([box.x1, box.y1])


def _distances_to_box(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the distance of each point [n, 2] from a box, 0 inside."""
    return np.hypot(*np.maximum(np.maximum(low - points, points - high), 0).T)


def _distances_to_segment(points: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the distance of each point [n, 2] from the segment from `start` to `end`."""
    along = end - start
    share = np.clip((points - start) @ along / max(float(along @ along), 1e-12), 0, 1)
    return np.hypot(*(points - start - share[:, None] * along).T)


def _crosses_box(start: np.ndarray, end: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    """Return True if a segment meets a box: clipped to the box along both axes, something of it remains."""
    along = end - start
    first, last = 0.0, 1.0
    for origin, step, least, most in zip(start, along, low, high, strict=True):
        if abs(step) < 1e-12:
            if not least <= origin <= most:
                return False
            continue
        enter, leave = sorted(((least - origin) / step, (most - origin) / step))
        first, last = max(first, enter), min(last, leave)
    return first <= last


def _cross(start: np.ndarray, end: np.ndarray, begin: np.ndarray, stop: np.ndarray) -> bool:
    """Return True if two segments cross: the ends of each lie on both sides of the other."""

    def side(tail: np.ndarray, head: np.ndarray, point: np.ndarray) -> float:
        return float((head[0] - tail[0]) * (point[1] - tail[1]) - (head[1] - tail[1]) * (point[0] - tail[0]))

    return (
        side(start, end, begin) * side(start, end, stop) < 0 and side(begin, stop, start) * side(begin, stop, end) < 0
    )
