"""Words at the ends of lines: apart, in order, and no further from their lines than that takes."""

import numpy as np
import pytest
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.labels import separate, separate_within
from atma_sweep.reports.figures.canvas.line_drawing import label_line_ends
from scipy.optimize import minimize


@pytest.mark.parametrize("seed", range(5))
def test_labels_move_as_little_as_keeps_them_apart(seed: int) -> None:
    chance = np.random.default_rng(seed)
    positions = chance.uniform(0, 5, 6)
    separated = np.array(separate(list(positions), 1.0))
    order = np.argsort(positions)
    assert (np.diff(separated[order]) >= 1 - 1e-9).all()
    best = minimize(
        lambda moved: float(((moved - np.sort(positions)) ** 2).sum()),
        np.arange(6.0),
        constraints=[{"type": "ineq", "fun": lambda moved: np.diff(moved) - 1}],
    )
    assert ((separated - positions) ** 2).sum() == pytest.approx(best.fun, abs=1e-5)


def test_labels_that_are_apart_stay() -> None:
    assert separate([3.0, 1.0, 2.0], 0.5) == [3.0, 1.0, 2.0]
    assert separate([], 1.0) == []


def test_labels_stay_between_their_bounds() -> None:
    assert separate_within([-2.0, 0.0, 2.0, 9.0], 2.0, 0.0, 10.0) == [0.0, 2.0, 4.0, 9.0]
    assert separate_within([6.0, 12.0, 10.0], 2.0, 0.0, 10.0) == [6.0, 10.0, 8.0]
    assert separate_within([3.0, 5.0], 2.0, 0.0, 10.0) == [3.0, 5.0]


def test_line_end_label_hides_no_line() -> None:
    """A long text at the end of a line that falls steeply: the room lies far above its end."""
    figure = drawing.page(2.0, 3.0)
    axes = figure.add_subplot()
    axes.set_ylim(-5, 130)
    x = np.linspace(0, 5, 6)
    drawn = [axes.plot(x, 55 * np.exp(-fall * x) + 5)[0] for fall in (0.17, 0.3, 0.6)]
    label_line_ends(
        axes, [(5.0, float(55 * np.exp(-0.85) + 5), "best cell: 28.5%\nzipfian, with distractor loss, seed 0")]
    )
    drawing.finalize_layout(figure)
    (label,) = axes.texts
    box = label.get_window_extent()
    for line in drawn:
        points = line.get_path().interpolated(50).transformed(line.get_transform()).vertices
        assert box.count_contains(points) == 0
    assert axes.get_window_extent().y1 >= box.y1
