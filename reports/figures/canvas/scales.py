"""Axes of settings: linear or logarithmic numbers, and categorical levels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...number_format import format_count, format_length
from . import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_TICKS, MAX_TICKS = 3, 5
"""Least and largest number of ticks on an axis of numbers, if its range has enough round numbers."""
ROOM = 0.05
"""Share of its length by which an axis is extended at both ends."""
WIDE = 8.0
"""Ratio of the highest to the lowest number from which on an axis of positive numbers is logarithmic."""
LARGE, MILLION = 1e4, 1e6
LONGEST = 12  # characters of a level's label on an axis
DECADES = (12, 6, 4, 3, 2)
"""Powers of ten between two ticks of a logarithmic axis, the widest steps first; then come MULTIPLES of each
power.
"""
MULTIPLES = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), tuple(map(float, range(1, 10))))


@dataclass(frozen=True)
class Scale:
    """Axis of numbers from `low` to `high`, or of `levels`, whose positions are 0, 1, 2, ...

    `log` makes the axis of numbers logarithmic, for which `low` must be positive. With `levels` the other fields have
    no effect.
    """

    low: float = 0.0
    high: float = 1.0
    log: bool = False
    integers_only: bool = False
    """True if only integers are on it."""
    levels: tuple[str, ...] = ()
    at: tuple[float, ...] = ()
    """Positions of the ticks; empty: round numbers."""

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 at `low` to 1 at `high`.

        Values outside give positions outside. For levels the value is the index of a level; an axis of one level or
        value gives 0.5. On a logarithmic axis the value must be positive.
        """
        if self.levels:
            return value / (len(self.levels) - 1) if len(self.levels) > 1 else 0.5
        if self.low == self.high:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = MAX_TICKS) -> dict[float, str]:
        """Return the tick labels by position, in units of the axis (an index for levels).

        They are those of all levels (shortened to 12 characters), those at `at`, or those of about `most` round
        numbers.
        """
        if self.levels:
            return {float(index): drawing.shortened(level, LONGEST) for index, level in enumerate(self.levels)}
        if self.at:
            return {tick: tick_label(tick) for tick in self.at}
        return {
            tick: tick_label(tick)
            for tick in round_numbers(self.low, self.high, log=self.log, integers_only=self.integers_only, most=most)
        }

    def apply_to_axis(self, axes: Axes, which: str, most: int = MAX_TICKS) -> None:
        """Set the scale, limits and ticks of an axis; overlapping x labels are hidden after the layout.

        Numbers have a margin of 5 % of the length at both ends (logarithmic for a logarithmic axis), levels one of half
        a step.

        Args:
            axes: The axes.
            which: "x" or "y".
            most: Approximate maximum number of ticks.
        """
        axis: Any = getattr(axes, f"{which}axis")
        limits = getattr(axes, f"set_{which}lim")
        if self.log and not self.levels:
            getattr(axes, f"set_{which}scale")("log")
            room = (self.high / self.low) ** ROOM if self.high > self.low else 2.0
            limits(self.low / room, self.high * room)
        elif self.levels:
            limits(-0.5, len(self.levels) - 0.5)
        else:
            room = ROOM * (self.high - self.low) or 0.05 * abs(self.high) or 1.0
            limits(self.low - room, self.high + room)
        drawing.put_ticks(axis, self.ticks(most))
        if which == "x":
            drawing.after_layout(axes.figure, lambda: hide_overlapping_labels(axes))  # type: ignore[arg-type]


def scale_for_values(numbers: Sequence[float]) -> Scale:
    """Return the scale from the lowest to the highest of these numbers (at least one).

    It is logarithmic if they are positive and span a factor of at least 8, and has integer ticks only if all are
    integers.
    """
    low, high = min(numbers), max(numbers)
    return Scale(
        low,
        high,
        log=low > 0 and high >= WIDE * low,
        integers_only=all(float(number).is_integer() for number in numbers),
    )


def tick_label(tick: float) -> str:
    """Return the label of a number on an axis, such as 0.003, 20K, 65.5M or 16K (16384), with a typographic minus sign.

    Powers of two from 1024 on are abbreviated in powers of 1024. Other numbers from 10,000 on are in powers of 1000, if
    three digits give them exactly or from a million on.
    """
    size = float(abs(tick))
    short = size >= LARGE and (float(f"{size:.3g}") == size or size >= MILLION)
    text = format_count(size) if short else f"{size:.0f}" if size >= 1 and size.is_integer() else f"{size:g}"
    if size >= 1 << 10 and size.is_integer() and int(size).bit_count() == 1:
        text = format_length(int(size))
    return f"−{text}" if tick < 0 else text


def round_long_numbers(text: str) -> str:
    """Return the text with numbers of five decimals or more in three significant digits."""
    return re.sub(r"\d+\.\d{5,}(?:e-?\d+)?", lambda number: f"{float(number[0]):.3g}", text)


def short_numbers(axis: Any) -> None:
    """Abbreviate the tick labels of an axis (`tick_label`) if its present view reaches 10,000; else do nothing."""
    from matplotlib.ticker import FuncFormatter

    if max(map(abs, axis.get_view_interval())) >= LARGE:
        axis.set_major_formatter(FuncFormatter(lambda tick, _: tick_label(float(f"{tick:.10g}"))))


def round_numbers(
    low: float, high: float, *, log: bool = False, integers_only: bool = False, most: int = MAX_TICKS
) -> list[float]:
    """Return ascending round numbers from `low` to `high`: three to `most` if there are as many, else both ends.

    On a logarithmic axis they are equidistant in the logarithm if three such exist, and may then exceed `most`.

    Args:
        low: Lower end.
        high: Upper end.
        log: Whether the axis is logarithmic; without effect unless `low` is positive.
        integers_only: Whether only integers are allowed.
        most: Maximum number of ticks.
    """
    if log and low > 0:
        ticks = _logarithmic_ticks(low, high, integers_only, most)
        if len(ticks) >= MIN_TICKS:
            return ticks
    return _even_ticks(low, high, integers_only, most) or sorted({low, high})


def _logarithmic_ticks(low: float, high: float, integers_only: bool, most: int) -> list[float]:
    """Return ascending round numbers in about equal logarithmic steps; [] if no step gives at least three.

    Steps are tried from the widest on, and the first that gives at least three is taken. A step that gives more than
    `most` is taken only if the step before gave none.

    Args:
        low: Lower end, positive.
        high: Upper end.
        integers_only: Whether only integers are allowed.
        most: Preferred maximum number of ticks.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    best: list[float] = []
    ways = [((1.0,), step) for step in DECADES] + [(multiples_of_decade, 1) for multiples_of_decade in MULTIPLES]
    for multiples, step in ways:
        powers = [power for power in range(first, last + 1) if power % step == 0]
        every = [float(f"{multiple}e{power}") for power in powers for multiple in multiples]
        in_range = [
            tick for tick in every if _is_in_range(tick, low, high) and (not integers_only or tick.is_integer())
        ]
        if len(in_range) >= MIN_TICKS and (len(in_range) <= most or not best):
            return in_range
        best = in_range
    return []


def _even_ticks(low: float, high: float, integers_only: bool, most: int) -> list[float]:
    """Return equidistant round numbers, of the widest step that gives at least three; [] if none does.

    Equal ends give [low]. With `integers_only` and a step below 1 all integers in the range are returned, however many.

    Args:
        low: Lower end.
        high: Upper end.
        integers_only: Whether only integers are allowed.
        most: Maximum number of ticks; more are thinned.
    """
    span = high - low
    if span <= 0:
        return [low]
    for power in range(math.floor(math.log10(span)), math.floor(math.log10(span)) - 3, -1):
        for step in (5.0, 2.0, 1.0):
            each = step * 10.0**power
            if integers_only and each < 1:
                return [float(tick) for tick in range(math.ceil(low), math.floor(high) + 1)]
            start, end = math.ceil(low / each - 1e-9), math.floor(high / each + 1e-9)
            if end - start + 1 >= MIN_TICKS:
                # a step of 4 would not be round, so the rare case of too many ticks is thinned
                ticks = [float(f"{index * each:.12g}") for index in range(start, end + 1)]
                return ticks if len(ticks) <= most else ticks[:: -(-len(ticks) // most)]
    return []


def _is_in_range(tick: float, low: float, high: float) -> bool:
    return low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)


def hide_overlapping_labels(axes: Axes) -> None:
    """Hide every second label of the x axis until none overlap, the first one never; the layout must be final."""
    low, high = sorted(axes.get_xlim())
    ticks = axes.xaxis.get_major_ticks()
    labels = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
    air = 0.35 * drawing.size("xtick.labelsize") * axes.figure.dpi / 72
    while len(labels) > 1:
        ends = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in labels))
        if all(after[0] - before[1] >= air for before, after in pairwise(ends)):
            return
        for label in labels[1::2]:
            label.set_visible(False)
        labels = labels[::2]
