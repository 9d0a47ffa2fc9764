"""Table 6, the complete results: one row a configuration."""

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
TAIL = "Tail: loss on the same last tokens of the Clean documents at every length, read after so many tokens."


def table6(
    store: Store,
    data: SweepData,
    *,
    orphans: bool = False,
    lengths: Mapping[str, Sequence[int]] | None = None,
    seeds: bool = False,
    has_chances: bool = True,
) -> Table:
    """Table 6, the complete results: one row a configuration, in the grid's order.

    Thirteen columns; one for every further axis that varies joins after Win. Where a configuration has several seeds, its
    row gives mean, standard deviation and their number; `seeds` lists each seed as a row instead.
    `lengths` are context lengths by probe (clean, junk, needle) in place of those that the data shows. Without `has_chances` nothing says how probable it is that a bold number is the best, which takes
    most of the time.
    A number that is missing prints as where the cell stands (needs-eval in a trained one), one that could not be had as the
    code of its reason; nothing prints blank. Raises SweepUnknown, StoreError.
    """
    columns = complete_columns(data, lengths)
    groups = list(data.configurations().items())
    several = max((len(cells) for _, cells in groups), default=1) > 1
    if several and seeds:
        groups = [(key, [cell]) for key, cells in groups for cell in cells]
        groups.sort(key=lambda group: group[1][0].position)
    words = ["Seed" if seeds else "Seeds"] if several else []
    extra = data.extra_axes()
    lines = []
    for key, cells in groups:
        count = [str(cells[0].seed if seeds else len(cells))] if several else []
        entries = tuple(measured_entry(data, cells, column, "6") for column in columns)
        about = cell_json_fields(data, cells[0]) if len(cells) == 1 else dict(cells[0].levels)
        row = (*key[: len(AXES)], *count, *key[len(AXES) :])
        lines.append(TableRow(words=row, entries=entries, cells=cells, about=about))
    which = " (cells that the newest revision dropped)" if orphans else ""
    grid = [line.entries for line in lines]
    notes = [
        sweep_note(data),
        UNITS,
        needle_note(data),
        *([TAIL] if any(column.probe == "same_tail" for column in columns) else []),
        *_of_further(data, columns),
        *seed_notes(grid, 0 if seeds else max((len(cells) for _, cells in groups), default=0)),
        *reference_note(data),
        *placeholder_notes(grid),
    ]
    given = {
        "orphans": orphans,
        "seeds": seeds,
        "lengths": {probe: list(some) for probe, some in lengths.items()} if lengths else None,
    }
    return build_table(
        data,
        "6",
        f"Table 6. Complete results of sweep {data.sweep}, revision {data.revision}{which}",
        (*AXIS_HEADINGS, *words, *extra),
        lines,
        numbers=[column.heading for column in columns],
        notes=notes,
        rank="column",
        has_chances=has_chances,
        options={name: value for name, value in given.items() if value},
        paged=True,
        names_sweep=False,
    )


def _unit(about: Metric) -> str:
    """Its unit after a comma; nothing of a bare number."""
    return ", in %" if about.percent else "" if about.unit in ("", "1") else f", {about.unit}"


def _of_further(data: SweepData, columns: Sequence[Column]) -> list[str]:
    """What the columns of further probes mean."""
    further = {(probe, about.name): about for probe, about in extra_metrics(data)}
    shown = dict.fromkeys(
        (column.probe, column.metric) for column in columns if (column.probe, column.metric) in further
    )
    headings = {(column.probe, column.metric): column.heading.partition("@")[0] for column in columns}
    return [f"{headings[key]}{_unit(further[key])}: {further[key].definition}" for key in shown]
