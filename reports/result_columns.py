"""Columns of the complete results, shared by tables, statistics and figures, and the placeholders of missing numbers."""

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


def ends(data: SweepData, lengths: Mapping[str, Sequence[int]], one: Column) -> list[Column]:
    """The column at the shortest and at the longest context length: one where there is one (-1 where none is known yet)."""
    known = sorted(lengths.get(one.probe, ())) or data.lengths(one.probe, one.metric)
    named = (
        [(length, format_length(length)) for length in dict.fromkeys((known[0], known[-1]))] if known else NO_LENGTHS
    )
    return [replace(one, heading=f"{one.heading}@{name}", length=length) for length, name in named]


def longest(data: SweepData, lengths: Mapping[str, Sequence[int]], one: Column) -> list[Column]:
    """The column at the longest context length alone."""
    return ends(data, lengths, one)[-1:]


def all_lengths(data: SweepData, lengths: Mapping[str, Sequence[int]], one: Column) -> list[Column]:
    """Return the column at every context length and, with several lengths, its length-weighted average."""
    known = sorted(lengths.get(one.probe, ())) or data.lengths(one.probe, one.metric)
    found = [replace(one, heading=f"{one.heading}@{format_length(length)}", length=length) for length in known]
    if len(known) > 1:
        found.append(replace(one, heading=f"{one.heading} avg", metric=one.metric + WEIGHTED_SUFFIX))
    return found


def complete_columns(
    data: SweepData, lengths: Mapping[str, Sequence[int]] | None = None, over: LengthSelector = ends
) -> list[Column]:
    """Return the columns of the complete results.

    Order: validation loss, clean loss, junk loss, loss of the same last tokens (if measured), needle accuracy, metrics of further
    probes that have a heading, MFU.

    Args:
        data: The sweep.
        lengths: Requested context lengths by probe; None for those of the sweep.
        over: Selects the context lengths at which a number with lengths is shown.
    """
    # `over` says at which lengths a number that has them is shown
    asked = data.requested_lengths() if lengths is None else lengths
    columns = [
        column_of("val", "val_loss"),
        *over(data, asked, column_of("clean", "nats")),
        *over(data, asked, column_of("junk", "nats")),
        *(over(data, asked, column_of("same_tail", "nats")) if data.lengths("same_tail", "nats") else ()),
        *over(data, asked, column_of("needle", "digit_accuracy")),
        column_of("throughput", "mfu_paper"),
    ]
    taken = {column.heading.partition("@")[0] for column in columns}
    further: list[Column] = []
    for probe, about in extra_metrics(data):
        one = column_of(probe, about, f"{probe}.{about.name}" if about.heading in taken else about.heading)
        taken.add(one.heading)
        further += over(data, asked, one) if any(data.lengths(probe, about.name)) else [one]
    return [*columns[:-1], *further, columns[-1]]


def extra_metrics(data: SweepData) -> list[tuple[str, Metric]]:
    """Return (probe, metric) of the measured metrics with a heading besides those of FIXED_PROBES.

    Those of the package come first, then those of plugins.
    """
    known = [(probe, about) for (probe, name), about in METRICS.items() if FIXED_PROBES.get(probe) != name]
    measured = [(probe, data.metric(probe, about.name)) for probe, about in known if data.lengths(probe, about.name)]
    return [(probe, about) for probe, about in [*measured, *data.unregistered_metrics()] if about.heading]


def quality_columns(data: SweepData) -> list[Column]:
    """Return [validation loss, needle accuracy at the longest length], the qualities that speed is compared to."""
    columns = complete_columns(data)
    needle = [column for column in columns if (column.probe, column.metric) == ("needle", "digit_accuracy")][-1]
    return [next(column for column in columns if column.metric == "val_loss"), needle]


def speed_column(data: SweepData, heading: str) -> Column:
    """Return the column of tokens per second under this heading, or the MFU column if no cell has tokens per second."""
    found = column_of("throughput", "tokens_per_s", heading)
    if data.is_measured(found.probe, found.metric):
        return found
    return next(column for column in complete_columns(data) if column.metric == "mfu_paper")


# --- words in place of a number, and names of measures ----------------------------------------------------------------


METRIC_LABELS = {
    "val_loss": "validation loss",
    "clean.nats": "clean loss",
    "junk.nats": "junk loss",
    "needle.digit_accuracy": "needle",
}
"""Display names in figures, by metric or by probe and metric."""
UNMEASURED = "unmeasured"
"""Text where a cell lacks a number that its grid does not request."""
UNPRINTED = "-"
"""Text where a published sweep lacks a number: its cells cannot be evaluated."""


def placeholder(standing: str, value: MeasuredValue | None) -> str:
    """Return the text in place of a missing number: the code of the recorded reason, or else the standing of its cell."""
    if value is None:
        return "needs-eval" if standing == "done" else standing
    return reason_code(value.reason or "n/a")


def placeholder_for_cell(data: SweepData, cell: CellState, column: Column, value: MeasuredValue | None) -> str:
    """Return the text in place of the number that a cell lacks in a column.

    Args:
        data: The sweep.
        cell: The cell.
        column: Column of the number.
        value: Stored value with a reason; None if nothing is stored.
    """
    if value is None and is_published(data.sweep):
        return UNPRINTED
    word = placeholder(data.word(cell), value)
    unasked = not data.shows(column.probe) or (column.length > 0 and not data.is_requested(column.probe, column.length))
    return UNMEASURED if word == "needs-eval" and unasked else word


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
