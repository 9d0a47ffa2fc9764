"""A table, independent of its output format, and its entries."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..results.console.text import choices_hint

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A number of a table, or the placeholder text in its place.

    `text` is the printed text. `value` is the unrounded number in `unit` (shares as fractions), None for a placeholder:
    a mean over `seeds` cells (0 without a number) with sample standard deviation `sd`. `low` and `high` are the 95%
    interval of a single cell, `n` its number of answers. `length` is a context length in tokens, 0 for a number without
    one. `reason` is the recorded reason of a missing number. `origins` are the (cell id, attempt id) pairs behind it,
    with attempt None where a cell has no value. `best` is True for the best of the compared numbers.
    """

    text: str
    heading: str = ""
    probe: str = ""
    metric: str = ""
    length: int | None = None
    direction: int = 0
    """-1 where less is better, 1 where more is, 0 where neither is."""
    value: float | None = None
    unit: str | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    sd: float | None = None
    seeds: int = 1
    source: str | None = None
    """SHA-256 of the plugin whose probe measured it; None for a probe of the package, or several versions."""
    origins: tuple[tuple[str, int | None], ...] = ()
    best: bool = False
    p_best: float | None = None
    """Simulated probability that no compared number is better; None if unknown."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Ids of the cells of `origins` in their order, without repetition."""
        return tuple(dict.fromkeys(cell for cell, _ in self.origins))

    @property
    def attempts(self) -> tuple[int, ...]:
        """Ids of the attempts of `origins` in their order, without repetition and without None."""
        return tuple(dict.fromkeys(attempt for _, attempt in self.origins if attempt is not None))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, independent of its output format.

    `number` is its number or name. `rows` is printed text below `columns`, of which the first `text_columns` are labels
    and the rest numbers; `entries` holds the numbers, [row][number column]. `notes` are printed below. `raw_of` and
    `trace_of` compute `raw` and `trace` on demand, since each takes longer than the table itself for sweeps of
    thousands of cells.
    """

    number: str
    title: str
    columns: tuple[str, ...]
    text_columns: int
    rows: tuple[tuple[str, ...], ...]
    raw_of: Callable[[], tuple[dict[str, Any], ...]]
    trace_of: Callable[[], Mapping[str, Any]]
    notes: tuple[str, ...]
    entries: tuple[tuple[TableEntry, ...], ...] = ()
    above: tuple[str, ...] = ()
    """Lines printed between title and rows: cautions that concern every comparison."""
    paged: bool = False
    """True if LaTeX may break the table over pages, however few its rows are."""

    @cached_property
    def raw(self) -> tuple[dict[str, Any], ...]:
        """JSON objects, one per row; cached.

        Keys are sweep, revision, row (labels by heading), further fields, values and trace. Values are entries with
        unrounded numbers and printed texts.
        """
        return self.raw_of()

    @cached_property
    def trace(self) -> Mapping[str, Any]:
        """Provenance of the table: table, sweep, revision, options, cells and sources; cached.

        `cells` holds the attempts of every cell, `sources` the commits and GPUs of these attempts.
        """
        return self.trace_of()

    @property
    def frame(self) -> pd.DataFrame:
        """Frame of the table: the labels as printed, the numbers unrounded (NaN for placeholders).

        Its columns are the table's headings. Units are the database's: shares as fractions.
        """
        import pandas as pd

        numbers = [[math.nan if entry.value is None else entry.value for entry in row] for row in self.entries]
        labels = [row[: self.text_columns] for row in self.rows]
        return pd.DataFrame(
            [[*own, *row] for own, row in zip(labels, numbers, strict=True)], columns=list(self.columns)
        )

    @property
    def best(self) -> frozenset[tuple[int, int]]:
        """(row, column) of every best value, both from 0, label columns counted."""
        num_labels = self.text_columns
        return frozenset((r, num_labels + c) for r, row in enumerate(self.entries) for c, e in enumerate(row) if e.best)


def _without_columns(note: str, omitted: Collection[str], shown: Collection[str]) -> str:
    """Return a note without its sentences, and its clauses "; of COLUMN: ...", that mention omitted columns alone.

    Args:
        note: The note; "" is returned if nothing is left over.
        omitted: Headings of the omitted columns, without their length.
        shown: Headings of the shown columns, without their length.
    """

    def concerns_shown(text: str) -> bool:
        """Return False if the text mentions omitted columns, and none that is shown."""
        tokens = set(re.findall(r"[\w/%()]+", text))
        return not tokens & set(omitted) or bool(tokens & set(shown))

    sentences = re.split(r"(?<=\.) (?=[A-Z])", note)
    clauses = [[part for part in sentence.split("; of ") if concerns_shown(part)] for sentence in sentences]
    texts = ["; of ".join(parts) for parts in clauses if parts]
    return " ".join(text if text.endswith(".") or not note.endswith(".") else f"{text}." for text in texts)


def presented(
    table: Table, *, columns: Sequence[str] | None = None, caption: str | None = None, notes: bool = True
) -> Table:
    """Return a table with some of its number columns, another title, or no notes; its trace records the choice.

    Notes on other columns alone go with them.

    Args:
        table: The table.
        columns: Headings of the number columns to show, in their order; None: all.
        caption: Title in place of the table's, with or without a full stop; None: the table's.
        notes: Whether it keeps the notes, and the cautions above it.

    Raises:
        ReportError: The table has no such column.
    """
    from .sweep_data import ReportError

    shown = {"columns": list(columns) if columns else None, "caption": caption, "notes": notes}
    if shown == {"columns": None, "caption": None, "notes": True}:
        return table
    labels, headings = table.columns[: table.text_columns], table.columns[table.text_columns :]
    for heading in columns or ():
        if heading not in headings:
            raise ReportError(f"table {table.number} has no column {heading!r}; {choices_hint(heading, headings)}")
    chosen = [headings.index(heading) for heading in columns or headings]

    def trace() -> Mapping[str, Any]:
        return {**table.trace, "shown": shown}

    caption = caption.removesuffix(".") if caption else caption
    names = {headings[index].partition("@")[0] for index in chosen}
    omitted = {heading.partition("@")[0] for heading in headings} - names
    remaining_notes = tuple(filter(None, (_without_columns(note, omitted, names) for note in table.notes)))
    title = (
        table.title if caption is None else f"Table {table.number}. {caption}" if table.number.isdigit() else caption
    )
    return replace(
        table,
        title=title,
        columns=(*labels, *(headings[index] for index in chosen)),
        rows=tuple((*row[: len(labels)], *(row[len(labels) + index] for index in chosen)) for row in table.rows),
        entries=tuple(tuple(row[index] for index in chosen) for row in table.entries),
        notes=remaining_notes if notes else (),
        above=table.above if notes else (),
        trace_of=trace,
    )
