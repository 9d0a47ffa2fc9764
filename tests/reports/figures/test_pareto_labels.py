"""Labels of the figure `pareto`: off every mark, joined to their own ring, apart from one another."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.canvas.labels import label_rings
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.store import Store
from matplotlib.collections import LineCollection
from matplotlib.path import Path
from matplotlib.text import Text
from pictures import COLUMN, figure_of

RING, MARK = 4.0, 2.4
"""Radii in points in the style `paper`."""


def shapes(axes: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the boxes of the numbers of a panel by text, and the ends of every leader [label, ring], in pixels."""
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    boxes, leaders = {}, []
    for note in axes.texts:
        if note.arrow_patch is not None:
            note.update_positions(renderer)
            leaders.append(axes.transData.transform([note.xy, note.xyann]))
        elif note.get_text().isdigit():
            boxes[note.get_text()] = Text.get_window_extent(note, renderer)
    return boxes, leaders


def label_faults(figure_data: FigureData, look: FigureOptions) -> list[str]:
    """Return what is wrong with the labels of every panel of the figure `pareto`.

    Marks are sampled as circles of 32 points and leaders as 50 points each, which is no way of the product.
    """
    figure = figure_of(figure_data, look)
    frame, faults = figure_data.frame, []
    for axes, (quality, rows) in zip(figure.axes, frame.groupby("quality", sort=False), strict=True):
        unit = figure.dpi / 72
        at = axes.transData.transform(rows[["speed", "value"]].to_numpy(dtype=float))
        front = rows["front"].to_numpy()
        boxes, leaders = shapes(axes)
        numbers = [str(number) for number in rows["front_number"][front]]
        assert set(boxes) == set(numbers)
        circle = np.exp(2j * np.pi * np.arange(32) / 32)
        rim = np.stack([circle.real, circle.imag], axis=1)
        for text, box in boxes.items():
            # the box of a digit includes descenders, which it lacks
            inner = box.padded(-0.8 * unit)
            near = [i for i, centre in enumerate(at) if inner.count_contains(centre + MARK * unit * rim)]
            faults += [f"{quality}: {text} on mark {i}" for i in near]
            own = at[front][numbers.index(text)]
            centre = np.array([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2])
            joined = [ends for ends in leaders if np.hypot(*(ends[1] - own)) < (RING + 1) * unit]
            nearest = int(np.argmin(np.hypot(*(at[front] - centre).T)))
            if not joined and numbers[nearest] != text:
                faults.append(f"{quality}: {text} without a line is nearest to {numbers[nearest]}")
        for ends in leaders:
            steps = np.linspace(ends[0], ends[1], 50)
            distances = np.hypot(*(steps[:, None, :] - at[None]).transpose(2, 0, 1)).min(axis=0)
            own_ring = np.argmin(np.hypot(*(at[front] - ends[1]).T))
            foreign = np.hypot(*(at - at[front][own_ring]).T) > unit
            faults += [f"{quality}: a line meets {i}" for i in np.flatnonzero((distances < MARK * unit) & foreign)]
        pairs = combinations(boxes.items(), 2)
        faults += [f"{quality}: {below} on {above}" for (below, a), (above, b) in pairs if a.padded(-unit).overlaps(b)]
    return faults


@pytest.mark.thorough
@pytest.mark.parametrize("look", [COLUMN, FigureOptions(width_mm=120.0, title=False), FigureOptions()])
def test_front_labels_stand_off_all_marks(published: Store, look: FigureOptions) -> None:
    assert label_faults(make_figure("pareto", published, "printed-v2"), look) == []


@pytest.mark.thorough
def test_front_is_listed_below_its_panel(published: Store) -> None:
    figure_data = make_figure("pareto", published, "printed-v2")
    figure = figure_of(figure_data, COLUMN)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes, (quality, rows) in zip(figure.axes, figure_data.frame.groupby("quality", sort=False), strict=True):
        (text,) = [text for text in axes.texts if text.get_text().startswith("Pareto front")]
        listed = [line.split(" ")[0] for line in text.get_text().split("\n")[1:]]
        assert listed == [str(number) for number in sorted(rows[rows["front"]]["front_number"])]
        below = axes.xaxis.label.get_window_extent(renderer).y0
        assert text.get_window_extent(renderer).y1 <= below
        assert quality == "Val" or rows[rows["front"]]["value"].min() > 17.5


@pytest.mark.thorough
def test_front_labels_of_few_points() -> None:
    assert label_faults(make_figure("pareto", shipped_store("headline-370m"), "headline-370m"), COLUMN) == []


@pytest.mark.thorough
def test_front_is_broader_than_bars_without_caps(published: Store) -> None:
    axes = figure_of(make_figure("pareto", published, "printed-v2")).axes[1]
    (step,) = [line for line in axes.lines if line.get_drawstyle().startswith("steps")]
    bars = [lines for lines in axes.collections if isinstance(lines, LineCollection) and len(lines.get_segments())]
    assert all(step.get_linewidth() > 2 * bar.get_linewidth()[0] for bar in bars)
    assert "_" not in {line.get_marker() for line in axes.lines}, "caps would make squares of circles"
    assert step.get_color() not in {tuple(bar.get_color()[0]) for bar in bars}


class TestLabelRings:
    def labelled(self, marks: list[tuple[float, float]]) -> tuple[Any, Any]:
        """Return the panel of 2 x 2 inches, 0 to 1, whose point (0.5, 0.5) has a label among `marks`, and its box."""
        with drawing.settings(FigureOptions()):
            figure = drawing.page(2.0, 2.0)
            figure.set_layout_engine("none")
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set(xlim=(0, 1), ylim=(0, 1))
            label_rings(axes, [(0.5, 0.5, "1")], [(0.5, 0.5), *marks], ring=RING, mark=MARK)
            box = Text.get_window_extent(axes.texts[0], figure.canvas.get_renderer())
        return axes, box

    def test_label_alone_is_at_the_right_without_a_line(self) -> None:
        axes, box = self.labelled([])
        assert len(axes.texts) == 1
        x, y = axes.transData.transform((0.5, 0.5))
        assert 0 < (box.x0 - x) * 72 / axes.figure.dpi - RING < 4
        assert abs((box.y0 + box.y1) / 2 - y) * 72 / axes.figure.dpi < 2

    def test_line_leads_out_of_a_crowd_through_its_gap(self) -> None:
        """A ring of marks around the point, open towards the lower left."""
        angles = np.radians(np.arange(0, 360, 5))
        crowd = [
            (0.5 + radius * np.cos(a), 0.5 + radius * np.sin(a))
            for radius in (0.06, 0.1, 0.14, 0.18)
            for a in angles
            if abs(a - np.radians(225)) > np.radians(23)
        ]
        axes, box = self.labelled(crowd)
        assert box.x1 < axes.transData.transform((0.5, 0.5))[0]
        assert box.y1 < axes.transData.transform((0.5, 0.5))[1]
        _, leader = axes.texts
        ends = axes.transData.transform([leader.xy, leader.xyann])
        centre = axes.transData.transform((0.5, 0.5))
        unit = axes.figure.dpi / 72
        assert sorted(np.hypot(*(ends - centre).T) / unit)[0] == pytest.approx(RING)
        path = Path(np.linspace(ends[0], ends[1], 100))
        for mark in axes.transData.transform(crowd):
            assert np.hypot(*(path.vertices - mark).T).min() > MARK * unit
