"""Finding of a sweep in one sentence: its largest significant effect, or its best cell."""

from __future__ import annotations

from ...results.main_results import measure_name
from ...results.metrics import TRAINING_SOURCES
from ...results.store.store import Store
from ..figures.canvas.drawing import level_label
from ..number_format import Column, format_number
from ..stats.effects.effects import Effect, effects, first_measures
from ..sweep_data import WEIGHTED_SUFFIX, ReportError, SweepData, load_sweep_data


def finding(store: Store, sweep: str) -> str | None:
    """Return the finding of a sweep as a sentence without a full stop; None if nothing was measured.

    It is the largest significant effect over the whole sweep, of a declared contrast or of an axis, on any measure at
    its longest context length; without one, it is the best cell by the first measure. Training speed does not count.

    Args:
        store: The database.
        sweep: Name of the sweep.

    Raises:
        SweepUnknown: No such sweep.
    """
    data = load_sweep_data(store, sweep)
    columns = [column for column in first_measures(data, at_least=1) if column.probe not in TRAINING_SOURCES]
    if not columns:
        return None
    try:
        largest = largest_effect(data, columns)
    except ReportError:
        largest = None
    if largest is None:
        return f"no significant effect; best cell: {_best(data, columns[0])}"
    return describe_effect(data, largest)


def largest_effect(data: SweepData, columns: list[Column]) -> Effect | None:
    """Return the significant effect that is largest beside the spread of its measure over cells; None without one.

    The spread is the standard deviation between all cells that have the measure, so that effects on measures of
    different units can be compared. Effects within a subset of the sweep are left out.

    Args:
        data: The sweep.
        columns: Measures to consider.
    """
    from statistics import pstdev

    def relative_size(effect: Effect) -> float:
        spread = pstdev(data.column_numbers(data.cells, effect.measure))
        return abs(effect.mean) / spread if spread else 0.0

    tested = effects(data, columns, include_strata=False)
    return max((effect for effect in tested if effect.is_significant), key=relative_size, default=None)


def describe_effect(data: SweepData, effect: Effect) -> str:
    """Return an effect as a sentence with its interval and corrected p value."""
    column = effect.measure
    unit = " points" if column.percent else f" {column.unit}" if column.unit not in ("", "1") else ""
    mean, low, high = (
        format_number(value, column.decimals, percent=column.percent)
        for value in (effect.mean, effect.low, effect.high)
    )
    sign = "" if mean.startswith("-") else "+"
    p = f"p = {effect.p_corrected:.3f}" if effect.p_corrected >= 0.001 else "p < 0.001"
    return (
        f"largest significant effect: {level_label(effect.level, effect.axis)} against "
        f"{level_label(effect.reference, effect.axis)}: {_measure(data, column)} {sign}{mean}{unit} (95% interval {low} to {high}, "
        f"{p} corrected, {effect.pairs} pairs)"
    )


def _best(data: SweepData, column: Column) -> str:
    """Return the slug of the cell that is best by a measure, and its value."""
    measured = [(value.value, cell) for cell in data.cells if (value := data.measured_value(cell, column)) is not None]
    number, cell = min(
        ((number, cell) for number, cell in measured if number is not None),
        key=lambda pair: -column.direction * pair[0],
    )
    text = format_number(number, column.decimals, percent=column.percent)
    return f"{cell.slug}, {_measure(data, column)} {text}{' %' if column.percent else ''}"


def _measure(data: SweepData, column: Column) -> str:
    """Return the name of a column's measure in plain words; an average over lengths has its heading."""
    metric = data.metric(column.probe, column.metric)
    return column.heading if column.metric.endswith(WEIGHTED_SUFFIX) else measure_name(metric, column.length)
