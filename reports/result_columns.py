"""Columns shared by tables, statistics and figures, and the placeholders of missing numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..renamed import old_names
from ..results.metrics import METRICS, Metric
from ..results.paper import is_published
from ..results.store.records import CellState, MeasuredValue
from .number_format import Column, column_of, format_length, reason_code
from .sweep_data import WEIGHTED_SUFFIX, SweepData

AXIS_HEADINGS = ("Type", "Reg", "Dist", "Mem", "Win")
FIXED_PROBES = {
    "val": "val_loss", "clean": "nats", "junk": "nats", "same_tail": "nats", "needle": "digit_accuracy", "throughput": "mfu_paper",
}  # fmt: skip
"""Metric of each probe, or part of a training, that has its own column in the complete results."""
LengthSelector = Callable[[SweepData, Mapping[str, Sequence[int]], Column], list[Column]]
NO_LENGTHS = [(-1, "shortest"), (-1, "longest")]


def shortest_and_longest(data: SweepData, lengths: Mapping[str, Sequence[int]], column: Column) -> list[Column]:
    """Return the column at the shortest and at the longest context length, in this order, as a list.

    One column if there is only one length. If no length is known yet, two columns of length -1, "@shortest" and
    "@longest".

    Args:
        data: The sweep.
        lengths: Requested context lengths by probe; measured ones are used for other probes.
        column: Column without a length.
    """
    column_lengths = sorted(lengths.get(column.probe, ())) or data.lengths(column.probe, column.metric)
    named = (
        [(length, format_length(length)) for length in dict.fromkeys((column_lengths[0], column_lengths[-1]))]
        if column_lengths
        else NO_LENGTHS
    )
    return [replace(column, heading=f"{column.heading}@{name}", length=length) for length, name in named]


def longest_only(data: SweepData, lengths: Mapping[str, Sequence[int]], column: Column) -> list[Column]:
    """Return the column at the longest context length only, as a list of one; arguments as `shortest_and_longest`."""
    return shortest_and_longest(data, lengths, column)[-1:]


def all_lengths(data: SweepData, lengths: Mapping[str, Sequence[int]], column: Column) -> list[Column]:
    """Return the column at every context length and, with several lengths, its length-weighted average.

    Shortest first, the average ("avg", length 0) last; empty if no length is known.

    Args:
        data: The sweep.
        lengths: Requested context lengths by probe; measured ones are used for other probes.
        column: Column without a length.
    """
    column_lengths = sorted(lengths.get(column.probe, ())) or data.lengths(column.probe, column.metric)
    columns = [
        replace(column, heading=f"{column.heading}@{format_length(length)}", length=length) for length in column_lengths
    ]
    if len(column_lengths) > 1:
        columns.append(replace(column, heading=f"{column.heading} avg", metric=column.metric + WEIGHTED_SUFFIX))
    return columns


def complete_columns(
    data: SweepData, lengths: Mapping[str, Sequence[int]] | None = None, over: LengthSelector = shortest_and_longest
) -> list[Column]:
    """Return the columns of the complete results.

    Order: validation loss, clean loss, junk loss, loss of the same last tokens, needle accuracy, metrics of further
    probes (`extra_metrics`), MFU. All are there without any number, too, except the loss of the same last tokens and
    the further metrics, which must be measured. A further metric whose heading is taken is headed "PROBE.METRIC".

    Args:
        data: The sweep.
        lengths: Requested context lengths by probe; None for those of the sweep.
        over: Selects the context lengths at which a number with lengths is shown: `shortest_and_longest`,
            `longest_only` or `all_lengths`.
    """
    # `over` says at which lengths a number that has them is shown
    requested = data.requested_lengths() if lengths is None else lengths
    columns = [
        column_of("val", "val_loss"),
        *over(data, requested, column_of("clean", "nats")),
        *over(data, requested, column_of("junk", "nats")),
        *(over(data, requested, column_of("same_tail", "nats")) if data.lengths("same_tail", "nats") else ()),
        *over(data, requested, column_of("needle", "digit_accuracy")),
        column_of("throughput", "mfu_paper"),
    ]
    headings = {column.heading.partition("@")[0] for column in columns}
    further: list[Column] = []
    for probe, metric in extra_metrics(data):
        extra_column = column_of(
            probe, metric, f"{probe}.{metric.name}" if metric.heading in headings else metric.heading
        )
        headings.add(extra_column.heading)
        further += over(data, requested, extra_column) if any(data.lengths(probe, metric.name)) else [extra_column]
    return [*columns[:-1], *further, columns[-1]]


def extra_metrics(data: SweepData) -> list[tuple[str, Metric]]:
    """Return (probe, metric) of the measured and shown metrics with a heading that have no column of their own.

    A column of their own have val.val_loss, clean.nats, junk.nats, same_tail.nats, needle.digit_accuracy and
    throughput.mfu_paper; another metric of these probes, such as throughput.tokens_per_s, is included. Those of the
    package come first, then those of plugins, each in the order of their registry or name.
    """
    registered = [(probe, metric) for (probe, name), metric in METRICS.items() if FIXED_PROBES.get(probe) != name]
    measured = [
        (probe, data.metric(probe, metric.name)) for probe, metric in registered if data.lengths(probe, metric.name)
    ]
    return [(probe, metric) for probe, metric in [*measured, *data.unregistered_metrics()] if metric.heading]


def quality_columns(data: SweepData) -> list[Column]:
    """Return [validation loss, needle accuracy at the longest length], the qualities that speed is compared to.

    Both are there without any number, too; the needle's length is then -1 if none is known.
    """
    columns = complete_columns(data)
    needle = [column for column in columns if (column.probe, column.metric) == ("needle", "digit_accuracy")][-1]
    return [next(column for column in columns if column.metric == "val_loss"), needle]


def speed_column(data: SweepData, heading: str) -> Column:
    """Return the column of tokens per second under this heading, else that of the seconds of training, else MFU.

    Seconds count only beside a utilization and if the cells train on equally many tokens. These two columns keep their
    own headings.
    """
    column = column_of("throughput", "tokens_per_s", heading)
    if data.is_measured(column.probe, column.metric):
        return column
    utilization = next(column for column in complete_columns(data) if column.metric == "mfu_paper")
    seconds = column_of("throughput", "train_seconds", "Train s")
    is_fair = "train.tokens" not in data.extra_axes() or len(data.levels("train.tokens")) <= 1
    measured = all(data.is_measured(each.probe, each.metric) for each in (seconds, utilization))
    return seconds if measured and is_fair else utilization


# --- words in place of a number, and names of measures ----------------------------------------------------------------


def plain_name(column: Column) -> str:
    """Return the plain name of a column's metric, such as "needle accuracy"; its heading if the metric has none."""
    metric = METRICS.get((column.probe, column.metric))
    return metric.noun if metric is not None and metric.noun else column.heading


UNMEASURED = "unmeasured"
"""Text where a cell lacks a number that its grid does not request."""
UNPRINTED = "-"
"""Text where a published sweep lacks a number: its cells cannot be evaluated."""


def placeholder(standing: str, value: MeasuredValue | None) -> str:
    """Return the text in place of a missing number: the recorded reason's code, or the standing of its cell.

    Args:
        standing: Standing of the cell; "done" gives "needs-eval", since the number is missing.
        value: Stored value with a reason; None if nothing is stored.
    """
    if value is None:
        return "needs-eval" if standing == "done" else standing
    return reason_code(value.reason or "n/a")


def placeholder_for_cell(data: SweepData, cell: CellState, column: Column, value: MeasuredValue | None) -> str:
    """Return the text in place of the number that a cell lacks in a column.

    "-" for a published sweep without a stored reason. Else the code of the reason or the standing of the cell (`oom`
    for a failure out of memory). UNMEASURED replaces "needs-eval" for a probe or length that the grid does not request.

    Args:
        data: The sweep.
        cell: The cell.
        column: Column of the number.
        value: Stored value with a reason; None if nothing is stored.
    """
    if value is None and is_published(data.sweep):
        return UNPRINTED
    text = placeholder(data.status_word(cell), value)
    is_unrequested = not data.is_shown(column.probe) or (
        column.length > 0 and not data.is_requested(column.probe, column.length)
    )
    return UNMEASURED if text == "needs-eval" and is_unrequested else text


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
