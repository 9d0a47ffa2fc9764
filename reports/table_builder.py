"""Construction of tables: entries (means over seeds), best values, notes, JSON rows and provenance trace.

A trace is the record of a table's origin: its sweep, revision and options, the attempts behind its numbers, and their
code and GPU.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..renamed import old_names
from ..results.console.text import counted
from ..results.store.records import CellState, CodeAndGpu
from .best_values import Grid, GridIndex, Rank, ranked, ranking_notes
from .cell_filter import describe_filters
from .number_format import BARE, PLUS_MINUS, Column, format_number, format_signed, reason_code
from .render.trace import attempts_by_cell, attempts_by_source, shown_beyond
from .result_columns import UNMEASURED, placeholder_for_cell
from .stats.effects.needle_baseline import baseline_text, below_baseline_note, mentions_needle, needle_note
from .sweep_data import REFERENCES, SweepData
from .table import Table, TableEntry

NO_CELL_TEXT = "no cell"
"""Text of an entry whose combination of levels the sweep does not list."""
EMPTY_TEXT = "-"
"""Text of an entry without content."""
SMALL_P = 1e-4
ROUND_DECIMALS = 12  # decimals to which a computed number is rounded before it is rounded half up


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A table row: labels, entries, what they are based on, and extra JSON fields."""

    labels: tuple[str, ...]
    """Texts of the label columns."""
    entries: tuple[TableEntry, ...] = ()
    """Entries of the number columns."""
    cells: Sequence[CellState] = ()
    """Cells that the row is based on, besides those of its entries."""
    origins: tuple[tuple[str, int | None], ...] = ()
    """(cell id, attempt id or None) pairs that the row is based on, besides those of its entries."""
    json_fields: Mapping[str, Any] = field(default_factory=dict)
    """Extra fields of the row's JSON object, by name."""


def measured_entry(data: SweepData, cells: Sequence[CellState], column: Column, table: str | None = None) -> TableEntry:
    """Return the entry of a column for cells that differ in their seed only: one number, or a mean over seeds.

    The value is unrounded, shares as fractions. A mean has its sample standard deviation, also in the text ("1.23 ±
    0.04"); for a single cell with a printed mean both are the printed ones. A mean over fewer cells than given ends
    with "(n=K)". Interval and number of answers are set for a single cell only. Without any number the text is the
    distinct placeholders of the cells, joined by "/", such as a standing or a reason.

    Args:
        data: The sweep.
        cells: Cells of one configuration; empty for a combination that the sweep does not list (the text is "no cell").
        column: Column of the number.
        table: Table of the paper whose printed number is preferred.
    """
    values = [data.measured_value(cell, column, table) for cell in cells]
    measured = [value for value in values if value is not None and value.value is not None]
    numbers = [value.value for value in measured if value.value is not None]
    first = next((value for value in values if value is not None), None)
    sources = {value.source for value in measured}
    fields: dict[str, Any] = {
        "heading": column.heading,
        "probe": column.probe,
        "metric": column.metric,
        "length": column.length if column.length >= 0 else None,
        "direction": column.direction,
        "unit": first.unit if first else None,
        "source": next(iter(sources)) if len(sources) == 1 else None,
        "origins": tuple(
            [(cell.cell_id, value.attempt_id if value else None) for cell, value in zip(cells, values, strict=True)]
        ),
    }
    if not numbers:
        placeholders = [
            placeholder_for_cell(data, cell, column, value) for cell, value in zip(cells, values, strict=True)
        ]
        text = "/".join(dict.fromkeys(placeholders)) or NO_CELL_TEXT
        return TableEntry(text=text, reason=first.reason if first else None, seeds=0, **fields)
    mean = statistics.fmean(numbers) if len(numbers) > 1 else numbers[0]
    # the first rounding removes floating-point errors of the mean
    text = format_number(
        mean if len(numbers) == 1 else round(mean, ROUND_DECIMALS), column.decimals, percent=column.percent
    )
    seeds, sd = len(numbers), None
    if seeds > 1:  # statistics.stdev computes with fractions, thirty times as long
        sd = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (seeds - 1))
    if len(cells) == 1:
        fields |= {"n": measured[0].n, "low": measured[0].low, "high": measured[0].high}
        printed = data.printed_spread(cells[0], column)
        seeds, sd = printed if printed is not None else (1, None)
    if sd is not None:
        text += PLUS_MINUS + format_number(sd, column.decimals, percent=column.percent)
    if len(numbers) < len(cells):
        text += f" (n={len(numbers)})"
    return TableEntry(text=text, value=mean, sd=sd, seeds=seeds, **fields)


def derived_entry(
    data: SweepData,
    column: Column,
    value: float | None,
    parts: Sequence[TableEntry],
    missing_text: str = "n/a",
    *,
    sd: float | None = None,
) -> TableEntry:
    """Return an entry computed from other entries; its origins are those of all parts, without repetition.

    Args:
        data: The sweep; not used.
        column: Column that gives unit, decimals and direction.
        value: The computed number, shares as fractions; None if it cannot be computed.
        parts: Entries it is computed from. The first one without a number gives the reason and, if `value` is None, the
            text. Fewer seeds than cells are shown as "(n=K)".
        missing_text: Text if `value` is None and every part has a number.
        sd: Standard deviation of `value`, if known.
    """
    missing_part = next((part for part in parts if part.value is None), None)
    text = missing_text
    if value is not None:
        text = format_number(round(value, ROUND_DECIMALS), column.decimals, percent=column.percent)
        if sd is not None:
            text += PLUS_MINUS + format_number(sd, column.decimals, percent=column.percent)
        text += _seed_count_text(parts)
    elif missing_part is not None:
        text = missing_part.text
    reason = missing_part.reason if missing_part else None
    origins = tuple(dict.fromkeys(origin for part in parts for origin in part.origins))
    fields: dict[str, Any] = {"direction": column.direction, "reason": reason, "sd": sd, "origins": origins}
    return number_entry(column, column.heading, text, value, **fields)


def number_entry(column: Column, heading: str, text: str, value: float | None, **extra_fields: Any) -> TableEntry:
    """Return the entry of a number in the unit of a column, printed as `text`.

    Args:
        column: Column that gives probe, metric, length and unit.
        heading: Heading of the entry, instead of the column's.
        text: Printed text.
        value: Unrounded number; None for a placeholder.
        extra_fields: Further fields of TableEntry.
    """
    fields: dict[str, Any] = {
        "probe": column.probe,
        "metric": column.metric,
        "length": column.length,
        "unit": column.unit or None,
    }
    return TableEntry(text=text, heading=heading, value=value, **fields, **extra_fields)


def p_value_entry(heading: str, p: float) -> TableEntry:
    """Return the entry of a p value with four decimals, "<0.0001" for smaller ones; "-" for NaN."""
    if math.isnan(p):
        return TableEntry(text=EMPTY_TEXT, heading=heading, unit=BARE)
    return TableEntry(
        text=f"<{SMALL_P:.4f}" if p < SMALL_P else format_number(p, 4), heading=heading, value=p, unit=BARE
    )


def count_entry(heading: str, n: int | None, origins: tuple[tuple[str, int | None], ...] = ()) -> TableEntry:
    """Return the entry of a count, without a unit; "-" for None.

    Args:
        heading: Heading of the entry.
        n: The count.
        origins: (cell id, attempt id or None) pairs behind it.
    """
    if n is None:
        return TableEntry(text=EMPTY_TEXT, heading=heading)
    return TableEntry(text=str(n), heading=heading, value=float(n), origins=origins)


def difference_entry(column: Column, heading: str, value: float | None) -> TableEntry:
    """Return the entry of a difference in a column's unit, with its sign; "-" for None or NaN.

    Args:
        column: Column that gives unit and decimals.
        heading: Heading of the entry.
        value: The difference, shares as fractions.
    """
    if value is None or math.isnan(value):
        return number_entry(column, heading, EMPTY_TEXT, None)
    return number_entry(
        column, heading, format_signed(round(value, ROUND_DECIMALS), column.decimals, percent=column.percent), value
    )


AMOUNT_FIELDS = {"Mean": "mean", "Median": "median", "Low": "low", "High": "high", "Worst": "worst"}
COUNT_FIELDS = {"Up": "up", "Down": "down", "Pairs": "pairs", "Gained": "gained", "Lost": "lost"}
P_VALUE_FIELDS = {
    "p": "p", "p corr": "p_corrected", "p sign": "p_sign", "p het": "p_heterogeneity", "p equiv": "p_equivalence",
    "p McN": "p_mcnemar",
}  # fmt: skip
"""Fields of a tested difference by heading, printed as a p value; the mappings above hold amounts and counts."""


def tested_entry(test: Any, heading: str) -> TableEntry:
    """Return the entry of a tested difference under a heading, which decides field and format.

    Amounts (Mean, Median, Low, High, Worst) are signed, in the unit of the measure; counts (Up, Down, Pairs, Gained,
    Lost) are whole numbers; p values are "p", "p corr", "p sign", "p het", "p equiv" and "p McN". A missing number
    (NaN, or None of a count or an amount) prints as "-".

    Args:
        test: PairedTest with a `measure` and the field of the heading.
        heading: Heading of the column, one of those above.

    Raises:
        KeyError: Unknown heading.
    """
    if heading in AMOUNT_FIELDS:
        return difference_entry(test.measure, heading, getattr(test, AMOUNT_FIELDS[heading]))
    if heading in COUNT_FIELDS:
        return count_entry(heading, getattr(test, COUNT_FIELDS[heading]))
    return p_value_entry(heading, getattr(test, P_VALUE_FIELDS[heading]))


def _seed_count_text(parts: Sequence[TableEntry]) -> str:
    """Return " (n=K)", or " (n=K to M)", with the numbers of seeds behind parts of which any has fewer than cells.

    Empty if none has.
    """
    if all(part.seeds >= len(part.cells) for part in parts):
        return ""
    fewest, most = min(part.seeds for part in parts), max(part.seeds for part in parts)
    return f" (n={fewest})" if fewest == most else f" (n={fewest} to {most})"


def _entry_json(entry: TableEntry) -> dict[str, Any]:
    """Return an entry as a JSON object: its fields except `text` and `origins`, and further keys in their place.

    The fields keep the names of TableEntry; numbers are unrounded, shares fractions. The further keys are `printed`
    (the text), `cells` (ids), `attempts` (ids) and `attempt_id` (the only attempt, None for several or none).
    """
    # origins are given as cells and attempts below
    row = {name: value for name, value in vars(entry).items() if name not in ("text", "origins")}
    row["printed"] = entry.text
    attempts = list(entry.attempts)
    return row | {
        "attempt_id": attempts[0] if len(attempts) == 1 else None,
        "cells": list(entry.cells),
        "attempts": attempts,
    }


def build_table(
    data: SweepData,
    number: str,
    title: str,
    headings: Sequence[str],
    lines: Sequence[TableRow],
    *,
    numbers: Sequence[str] = (),
    notes: Sequence[str] = (),
    rank: Rank = "none",
    unlisted: Sequence[Sequence[TableEntry]] = (),
    options: Mapping[str, Any] | None = None,
    sources: Mapping[int, CodeAndGpu] | None = None,
    has_chances: bool = True,
    above: Sequence[str] = (),
    paged: bool = False,
    names_sweep: bool = True,
) -> Table:
    """Build a table from its rows, with ranking, notes, JSON rows and provenance trace.

    Where an entry is a needle accuracy, or derived from one, a note gives the score of the best constant answer, unless
    a note has it already. Notes on best values follow. JSON rows and trace are computed on first use.

    Args:
        data: The sweep.
        number: Number or name of the table.
        title: Title without number and sweep, which are added unless `names_sweep` is False. Cell filters are always
            added.
        headings: Column headings of the labels.
        lines: Rows; each has as many labels as `headings` and as many entries as `numbers`.
        numbers: Column headings of the entries.
        notes: Notes below the table.
        rank: Direction of the comparison for bold best values: down a column, along a row, or none.
        unlisted: Entries of rows that are not printed but take part in the probability of being best.
        options: Options of the table, for its trace.
        sources: Code and GPU by attempt id; None for those of the sweep.
        has_chances: Compute the probability of being best, and state it in the notes.
        above: Lines between title and rows.
        paged: LaTeX may break the table over pages, however short it is.
        names_sweep: Add number, sweep and revision to the title.
    """
    labels = (word for line in lines for word in line.labels)
    if mentions_needle((entry for line in lines for entry in line.entries), labels) and baseline_text(
        data
    ) not in " ".join(notes):
        notes = [*notes, " ".join(filter(None, (needle_note(data), below_baseline_note(data))))]
    grid, contests = ranked(data, [line.entries for line in lines], rank, unlisted, has_chances=has_chances)
    if has_chances:
        names = _entry_names(lines, grid, rank)
        notes = [*notes, *ranking_notes(contests, rank, names, [" ".join(line.labels) for line in lines])]
    sources_by_attempt = data.sources if sources is None else sources
    metadata: dict[str, Any] = {"table": number, "sweep": data.sweep, "revision": data.revision}
    metadata["options"] = dict(options or {}) | shown_beyond(data) | ({"only": list(data.only)} if data.only else {})
    if names_sweep:
        title = (
            f"{f'Table {number}. ' if number.isdigit() else ''}{title}, sweep {data.sweep}, revision {data.revision}"
        )
    return Table(
        number=number,
        title=title + filter_suffix(data),
        columns=(*headings, *numbers),
        text_columns=len(headings),
        rows=tuple((*line.labels, *(entry.text for entry in row)) for line, row in zip(lines, grid, strict=True)),
        raw_of=partial(_json_rows, metadata, headings, lines, grid, sources_by_attempt),
        trace_of=partial(_trace, metadata, lines, grid, sources_by_attempt),
        notes=tuple(notes),
        entries=grid,
        above=tuple(above),
        paged=paged,
    )


def _origins(line: TableRow, row: Sequence[TableEntry]) -> dict[tuple[str, int | None], None]:
    """Return the (cell, attempt) pairs of a row without repetition, in the order of its numbers, as keys."""
    return dict.fromkeys(chain(line.origins, *(entry.origins for entry in row)))


def _trace(
    metadata: Mapping[str, Any], lines: Sequence[TableRow], grid: Grid, sources: Mapping[int, CodeAndGpu]
) -> Mapping[str, Any]:
    """Return the trace of a table: its metadata, `cells` (attempts of every cell) and `sources` of the attempts.

    Args:
        metadata: Table, sweep, revision and options.
        lines: Rows.
        grid: Entries, [row, column].
        sources: Code and GPU by attempt id.
    """
    by_cell = attempts_by_cell(
        pair
        for line, row in zip(lines, grid, strict=True)
        for pair in chain(((cell.cell_id, None) for cell in line.cells), _origins(line, row))
    )
    return {**metadata, "cells": by_cell, "sources": attempts_by_source(chain(*by_cell.values()), sources)}


def _json_rows(
    metadata: Mapping[str, Any],
    headings: Sequence[str],
    lines: Sequence[TableRow],
    grid: Grid,
    sources: Mapping[int, CodeAndGpu],
) -> tuple[dict[str, Any], ...]:
    """Return the rows of a table as JSON objects, each with the trace of its own attempts.

    Keys: sweep, revision, row (labels by heading), the row's `json_fields`, values (one object per entry) and trace
    (metadata and sources).

    Args:
        metadata: Table, sweep, revision and options.
        headings: Headings of the labels.
        lines: Rows.
        grid: Entries, [row, column].
        sources: Code and GPU by attempt id.
    """
    rows = []
    for line, row in zip(lines, grid, strict=True):
        fields = {"sweep": metadata["sweep"], "revision": metadata["revision"]}
        fields |= {"row": dict(zip(headings, line.labels, strict=True))}
        row_sources = attempts_by_source(
            (attempt for _, attempt in _origins(line, row) if attempt is not None), sources
        )
        trace = {**metadata, "sources": row_sources}
        rows.append(fields | dict(line.json_fields) | {"values": [_entry_json(entry) for entry in row], "trace": trace})
    return tuple(rows)


def _entry_names(lines: Sequence[TableRow], grid: Sequence[Sequence[TableEntry]], rank: Rank) -> dict[GridIndex, str]:
    """Return the name of each entry in ranking notes, by (row, column).

    Along a row it is the entry's heading. Else it is the slug of the row's first cell without its seed, or the row's
    labels if it has no cells.
    """
    names = {}
    for r, (line, row) in enumerate(zip(lines, grid, strict=True)):
        cell = line.cells[0] if line.cells else None
        name = cell.slug.removesuffix(f"-s{cell.seed}") if cell else " ".join(line.labels)
        for c, entry in enumerate(row):
            names[r, c] = name if rank == "column" else entry.heading
    return names


def cell_json_fields(data: SweepData, cell: CellState) -> dict[str, Any]:
    """Return the JSON fields of a row that is one cell, named as the database's columns.

    Keys: cell (id), slug, seed, each of the fixed AXES (level as text), axes (all levels by axis), state, standing,
    attempt_id (the training attempt, else the newest one, or None).
    """
    state = {
        "axes": dict(cell.axes),
        "state": cell.state,
        "standing": data.standing(cell),
        # the training attempt; later evaluations do not change it
        "attempt_id": cell.trained_attempt_id or cell.attempt_id,
    }
    return {"cell": cell.cell_id, "slug": cell.slug, "seed": cell.seed} | dict(cell.levels) | state


def filter_suffix(data: SweepData) -> str:
    """Return the part of a title that names the cell filters; empty without filters."""
    return f", only {describe_filters(data.only)}" if data.only else ""


def sweep_note(data: SweepData) -> str:
    """Return a note with the sweep, its revision and progress, and its earlier tuning if any."""
    note = f"Sweep {data.sweep}, revision {data.revision}{filter_suffix(data)}: {data.done} of {counted(len(data.cells), 'cell')} done."
    return note if data.tuned is None else f"{note} {data.tuned.note}"


def reference_note(data: SweepData) -> list[str]:
    """Return a list with one note on the entropies of the corpus, in nats per token; empty if they are not measured.

    Several values of one entropy, from different corpora, are joined by "/".
    """
    entropies = [
        f"{name} {' / '.join(format_number(number, 3) for number in data.references[metric])}"
        for metric, name in REFERENCES.items()
        if metric in data.references
    ]
    return [f"Corpus, for comparison, in nats per token: {', '.join(entropies)}."] if entropies else []


def placeholder_notes(grid: Iterable[Sequence[TableEntry]]) -> list[str]:
    """Return notes that explain the placeholders of a grid of entries; empty if every entry has a number.

    First one note per recorded reason, sorted, with its number of entries. Then notes on "no cell", on unmeasured
    numbers and on standings of cells, where they occur.
    """
    entries = [entry for row in grid for entry in row if entry.value is None]
    reasons = Counter(entry.reason for entry in entries if entry.reason)
    notes = []
    for reason, count in sorted(reasons.items()):
        code = reason_code(reason)
        notes.append(f"{code} ({counted(count, 'value')}): {reason.removeprefix(code).lstrip(': ') or code}.")
    if any(entry.text == NO_CELL_TEXT for entry in entries):
        notes.append(f"{NO_CELL_TEXT}: the sweep does not list that combination.")
    if any(entry.text == UNMEASURED for entry in entries):
        notes.append(f"{UNMEASURED}: not requested by the grid; evaluate measures it, and report --length shows it.")
    if any(not entry.reason and entry.text not in (NO_CELL_TEXT, EMPTY_TEXT, UNMEASURED) for entry in entries):
        notes.append("A word instead of a number is the status of a cell that has no measurement yet.")
    return notes


def seed_notes(grid: Iterable[Sequence[TableEntry]], n: int) -> list[str]:
    """Return a list with one note on means over seeds and "(n=k)"; empty below two seeds.

    The note speaks of standard deviations only if an entry has one.

    Args:
        grid: Entries, [row][column].
        n: Largest number of seeds of a configuration.
    """
    if n < 2:
        return []
    text = f"ean ± sample standard deviation over up to {counted(n, 'seed')}"
    if not any(PLUS_MINUS in entry.text for row in grid for entry in row):
        text = f"eans over up to {counted(n, 'seed')}"
    return [f"M{text}; (n=k) where only k of them have a measurement."]


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
