"""Axes that are logarithmic in the distance from an end, such as 1 − retention or loss − best loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import drawing
from .scales import hide_overlapping_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEGLIGIBLE = 1e-7
"""Distance, as a share of the farthest, up to which a number counts as the end itself."""
MARGIN, END_MARGIN = 1.3, 3.0
"""Factors by which an axis goes beyond the nearest and the farthest number, and towards an end that is on it."""
TICK_MULTIPLES = {0: (1.0, 2.0, 3.0, 5.0), 1: (1.0, 3.0), 3: (1.0,)}
"""Multiples of powers of ten at which distances have ticks, by the least number of decades of the axis."""


@dataclass(frozen=True, kw_only=True)
class DistanceScale:
    """Axis of numbers on one side of an end, logarithmic in their distance; the end itself stands at `near`."""

    end: float
    sign: int
    """1 if numbers lie above the end, -1 if below."""
    near: float
    far: float
    """Distances from the end at which the axis begins and ends."""
    has_end: bool
    """True if a number is the end itself, which then closes the axis."""

    def forward(self, values: Any) -> Any:
        """Return positions, ascending with the values, of a number or an array."""
        distances = self.sign * (np.asarray(values, dtype=float) - self.end)
        return self.sign * np.log10(np.maximum(distances, self.near))

    def inverse(self, positions: Any) -> Any:
        """Return the values at positions of `forward`."""
        return self.end + self.sign * 10.0 ** (self.sign * np.asarray(positions, dtype=float))

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 at its low to 1 at its high end; values are clipped."""
        inside = math.log(min(max(self.sign * (value - self.end), self.near), self.far) / self.near)
        along = inside / math.log(self.far / self.near)
        return along if self.sign > 0 else 1 - along

    def distances(self) -> list[float]:
        """Return the round distances that have ticks, ascending, apart from that of the end."""
        decades = math.log10(self.far / self.near)
        multiples = TICK_MULTIPLES[max(least for least in TICK_MULTIPLES if decades >= least)]
        powers = range(math.floor(math.log10(self.near)), math.ceil(math.log10(self.far)) + 1)
        # a tick next to that of the end itself would meet its label
        lowest = self.near * (END_MARGIN - 1 if self.has_end else 1)
        steps = [float(f"{factor * 10.0**power:.6g}") for power in powers for factor in multiples]
        return [step for step in steps if lowest <= step <= self.far]

    def ticks(self, label: Callable[[float, float], str], end: str) -> dict[float, str]:
        """Return the tick labels by number, those of the end last.

        Args:
            label: Function (number, signed distance from the end) that returns the label of a tick.
            end: Label of the end.
        """
        signed = [self.sign * step for step in self.distances()]
        ticks = {self.end + step: label(self.end + step, step) for step in signed}
        return ticks | ({self.end: end} if self.has_end else {})

    def apply_to_axis(self, axes: Axes, which: str, ticks: dict[float, str]) -> None:
        """Set the scale, limits and ticks of an axis; overlapping x labels are hidden after the layout.

        Args:
            axes: The axes.
            which: "x" or "y".
            ticks: Tick labels by number, as `ticks` returns them.
        """
        getattr(axes, f"set_{which}scale")("function", functions=(self.forward, self.inverse))
        drawing.put_ticks(getattr(axes, f"{which}axis"), ticks)
        closed = self.end if self.has_end else self.end + self.sign * self.near
        getattr(axes, f"set_{which}lim")(*sorted((closed, self.end + self.sign * self.far)))
        if which == "x":
            drawing.after_layout(axes.figure, lambda: hide_overlapping_labels(axes))  # type: ignore[arg-type]


def distance_scale(numbers: Iterable[float], end: float, sign: int) -> DistanceScale | None:
    """Return the scale over these numbers, none of them on the other side of the end; None if all are the end itself.

    Args:
        numbers: Finite numbers; at least one.
        end: The end.
        sign: 1 if they lie above the end, -1 if below.
    """
    distances = sign * (np.asarray(list(numbers), dtype=float) - end)
    apart = distances[distances > NEGLIGIBLE * max(float(distances.max()), 0.0)]
    if not len(apart):
        return None
    has_end = len(apart) < len(distances)
    return DistanceScale(
        end=end, sign=sign, near=float(apart.min()) / (END_MARGIN if has_end else MARGIN),
        far=float(apart.max()) * MARGIN, has_end=has_end,
    )  # fmt: skip
