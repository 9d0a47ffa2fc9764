"""Table 6, the complete results: one row per configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...results.metrics import Metric
from ...results.store.records import AXES
from ...results.store.store import Store
from ..number_format import Column
from ..result_columns import AXIS_HEADINGS, complete_columns, extra_metrics
from ..stats.effects.needle_baseline import needle_note
from ..sweep_data import SweepData
from ..table import Table
from ..table_builder import (
    TableRow,
    build_table,
    cell_json_fields,
    measured_entry,
    placeholder_notes,
    reference_note,
    seed_notes,
    sweep_note,
)

UNITS = (
    "Val, Clean and Junk: nats per token. MFU: by the paper's formula, in %. "
    "Clean, Junk and Ndl at the shortest and the longest context length, in tokens."
)
TAIL = (
    "Tail: loss on the same last tokens of the Clean documents at every length; the length is the "
    "number of tokens read."
)


def table6(
    store: Store,
    data: SweepData,
    *,
    orphans: bool = False,
    lengths: Mapping[str, Sequence[int]] | None = None,
    seeds: bool = False,
    has_chances: bool = True,
) -> Table:
    """Return Table 6, the complete results: one row per configuration, in the grid's order.

    Columns: the five axes, the number of seeds if any configuration has several, every extra axis that varies, and then
    validation loss, clean loss, junk loss, loss of the same last tokens (if measured), needle accuracy, further metrics
    and MFU. Numbers over lengths have only the shortest and the longest context length, whatever lengths are given. A
    configuration of several seeds has their mean, standard deviation and number. A missing number prints as the status
    of its cell (needs-eval for a trained one), an impossible one as the code of its reason; no entry is blank.

    Args:
        store: The database; not used.
        data: The sweep.
        orphans: Whether the title says that the cells are those that the newest revision dropped; it does not select
            them.
        lengths: Context lengths in tokens by probe (clean, junk, needle), instead of those of the data; lengths
            between the shortest and the longest of a probe have no column.
        seeds: Whether each seed is a row of its own, in the order of the cells' positions, with its seed as a label.
        has_chances: Whether to compute the probability of each bold number being the best, which takes most of the
            time.
    """
    columns = complete_columns(data, lengths)
    groups = list(data.configurations().items())
    several = max((len(cells) for _, cells in groups), default=1) > 1
    if several and seeds:
        groups = [(key, [cell]) for key, cells in groups for cell in cells]
        groups.sort(key=lambda group: group[1][0].position)
    seed_headings = ["Seed" if seeds else "Seeds"] if several else []
    extra = data.extra_axes()
    lines = []
    for key, cells in groups:
        count = [str(cells[0].seed if seeds else len(cells))] if several else []
        entries = tuple(measured_entry(data, cells, column, "6") for column in columns)
        json_fields = cell_json_fields(data, cells[0]) if len(cells) == 1 else dict(cells[0].levels)
        row = (*key[: len(AXES)], *count, *key[len(AXES) :])
        lines.append(TableRow(labels=row, entries=entries, cells=cells, json_fields=json_fields))
    which = " (cells dropped by the newest revision)" if orphans else ""
    grid = [line.entries for line in lines]
    notes = [
        sweep_note(data),
        UNITS,
        needle_note(data),
        *([TAIL] if any(column.probe == "same_tail" for column in columns) else []),
        *_extra_metric_notes(data, columns),
        *seed_notes(grid, 0 if seeds else max((len(cells) for _, cells in groups), default=0)),
        *reference_note(data),
        *placeholder_notes(grid),
    ]
    options = {
        "orphans": orphans,
        "seeds": seeds,
        "lengths": {probe: list(probe_lengths) for probe, probe_lengths in lengths.items()} if lengths else None,
    }
    return build_table(
        data,
        "6",
        f"Table 6. Complete results of sweep {data.sweep}, revision {data.revision}{which}",
        (*AXIS_HEADINGS, *seed_headings, *extra),
        lines,
        numbers=[column.heading for column in columns],
        notes=notes,
        rank="column",
        has_chances=has_chances,
        options={name: value for name, value in options.items() if value},
        paged=True,
        names_sweep=False,
    )


def _unit_suffix(metric: Metric) -> str:
    """Return the unit of a metric after a comma; an empty string for a number without unit."""
    return ", in %" if metric.percent else "" if metric.unit in ("", "1") else f", {metric.unit}"


def _extra_metric_notes(data: SweepData, columns: Sequence[Column]) -> list[str]:
    """Return one note per further metric (`extra_metrics`) among `columns`: heading, unit and definition.

    The heading has no length. Metrics of the package that have no fixed column count, too, not only those of plugins.
    """
    further = {(probe, metric.name): metric for probe, metric in extra_metrics(data)}
    shown = dict.fromkeys(
        (column.probe, column.metric) for column in columns if (column.probe, column.metric) in further
    )
    headings = {(column.probe, column.metric): column.heading.partition("@")[0] for column in columns}
    return [f"{headings[key]}{_unit_suffix(further[key])}: {further[key].definition}" for key in shown]
