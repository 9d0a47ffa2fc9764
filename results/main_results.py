"""Main results of a cell in one line, for messages about a cell that has ended and about the best cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .metrics import METRICS, TRAINING_SOURCES, Metric
from .store.records import MeasuredValue


@dataclass(frozen=True)
class MainResult:
    """Value of a metric that has a heading in the complete results and a better direction."""

    metric: Metric
    length: int
    """Context length; 0 for a measurement without one."""
    value: float

    @property
    def name(self) -> str:
        """Name of the measure in plain words, such as validation loss or needle accuracy at 512."""
        return f"{self.metric.plain_name} at {self.length:,}" if self.length > 0 else self.metric.plain_name

    @property
    def text(self) -> str:
        """Name and value, such as validation loss 2.345, needle accuracy at 512 12.5 % or decoding speed 713 tokens/s."""
        number = f"{100 * self.value if self.metric.percent else self.value:.{self.metric.decimals}f}"
        # losses are in nats per token, as everywhere
        unit = "%" if self.metric.percent else "" if self.metric.unit in ("nats/token", "1") else self.metric.unit
        return f"{self.name} {number} {unit}".rstrip()

    def is_better_than(self, value: float) -> bool:
        """Return True if this value is better than another one of the same measure."""
        return self.metric.direction * (self.value - value) > 0


def main_results(values: Iterable[MeasuredValue]) -> list[MainResult]:
    """Return the main results among the values of a cell, each at its longest context length, validation loss first.

    They are the metrics of the package with a heading and a direction, in the order of METRICS, without those that a
    training itself records, such as MFU. Missing values are left out.
    """
    longest: dict[tuple[str, str], MeasuredValue] = {}
    for value in values:
        key = (value.probe, value.metric)
        if value.value is not None and (key not in longest or value.length > longest[key].length):
            longest[key] = value
    return [
        MainResult(metric, longest[key].length, float(longest[key].value or 0.0))
        for key, metric in METRICS.items()
        if key in longest and metric.heading and metric.direction and key[0] not in TRAINING_SOURCES
    ]
