"""Axes of distances from an end against logarithms by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from atma_sweep.reports.figures.canvas.distance_scale import distance_scale


@pytest.mark.parametrize("sign", [1, -1])
def test_positions_are_logarithms_of_distances(sign: int) -> None:
    numbers = [2 + sign * distance for distance in (0.0, 0.01, 0.1, 1.0)]
    scale = distance_scale(numbers, 2.0, sign)
    assert scale is not None
    assert scale.has_end
    # the end stands where a third of the nearest distance would
    along = [math.log(distance / (0.01 / 3)) / math.log(1.3 / (0.01 / 3)) for distance in (0.01 / 3, 0.01, 0.1, 1.0)]
    expected = along if sign > 0 else [1 - share for share in along]
    assert [scale.share(number) for number in numbers] == pytest.approx(expected)
    positions = scale.forward(numbers)
    low, high = sorted(scale.forward([2.0, 2 + 1.3 * sign]))
    assert (positions - low) / (high - low) == pytest.approx(np.array(expected))
    assert scale.inverse(positions)[1:] == pytest.approx(numbers[1:])
    ticks = scale.ticks(lambda _, step: f"{step:g}", "end")
    assert list(ticks.values()) == [f"{sign * step:g}" for step in (0.01, 0.03, 0.1, 0.3, 1.0)] + ["end"]
    assert list(ticks) == pytest.approx([*(2 + sign * step for step in (0.01, 0.03, 0.1, 0.3, 1.0)), 2.0])


def test_an_axis_without_the_end_has_no_tick_for_it() -> None:
    scale = distance_scale([0.9, 0.99, 0.999], 1.0, -1)
    assert scale is not None
    assert list(scale.ticks(lambda number, _: f"{number:.10g}", "1").values()) == [
        "0.999",
        "0.997",
        "0.99",
        "0.97",
        "0.9",
    ]
    assert distance_scale([1.0, 1.0], 1.0, -1) is None
