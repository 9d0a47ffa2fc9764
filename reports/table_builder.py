"""From the values of a snapshot to entries, and from entries to a table: means over seeds, best values, the trace."""

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
from .best_values import Grid, Place, Rank, ranked, ranking_notes
from .cell_filter import told
from .number_format import BARE, PLUS_MINUS, Column, format_number, format_signed, reason_code
from .render.trace import attempts_by_cell, attempts_by_source, shown_beyond
from .result_columns import UNMEASURED, placeholder_for_cell
from .stats.effects.needle_baseline import below_baseline_note, mentions_needle, needle_note, yardstick
from .sweep_data import REFERENCES, SweepData
from .table import Table, TableEntry

NO_CELL_TEXT = "no cell"
"""Printed where a table asks for a combination of levels that the sweep does not list."""
EMPTY_TEXT = "-"
"""Printed where there is nothing to say."""
SMALL_P = 1e-4
DUST = 12  # decimals that a computed number is held to before it is rounded half up


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of a table: its words, the cells (or cells with attempts) it speaks of besides those of its numbers, its numbers,
    and what JSON says of it besides."""

    words: tuple[str, ...]
    entries: tuple[TableEntry, ...] = ()
    cells: Sequence[CellState] = ()
    origins: tuple[tuple[str, int | None], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


def measured_entry(data: SweepData, cells: Sequence[CellState], column: Column, table: str | None = None) -> TableEntry:
    """The number of one cell, or mean and sample standard deviation over cells that differ in their seed alone, or over the runs
    that a printed mean is of.

    With `table`, a published number stands as that table of the paper prints it. A mean over fewer cells than there are
    says how many; nothing is left blank.
    """
    values = [data.given(cell, column, table) for cell in cells]
    have = [value for value in values if value is not None and value.value is not None]
    numbers = [value.value for value in have if value.value is not None]
    pairs = list(zip(cells, values, strict=True))
    words = [] if numbers else [placeholder_for_cell(data, cell, column, value) for cell, value in pairs]
    first = next((value for value in values if value is not None), None)
    sources = {value.source for value in have}
    about: dict[str, Any] = {
        "heading": column.heading,
        "probe": column.probe,
        "metric": column.metric,
        "length": column.length if column.length >= 0 else None,
        "direction": column.direction,
        "unit": first.unit if first else None,
        "source": next(iter(sources)) if len(sources) == 1 else None,
        "origins": tuple((cell.cell_id, value.attempt_id if value is not None else None) for cell, value in pairs),
    }
    if not numbers:
        text = "/".join(dict.fromkeys(words)) or NO_CELL_TEXT
        return TableEntry(text=text, reason=first.reason if first else None, seeds=0, **about)
    mean = statistics.fmean(numbers) if len(numbers) > 1 else numbers[0]
    # a mean of tidy numbers is tidy again only after its floating-point dust is gone
    text = format_number(mean if len(numbers) == 1 else round(mean, DUST), column.decimals, percent=column.percent)
    sd, seeds = statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers)
    if len(cells) == 1:
        about |= {"n": have[0].n, "low": have[0].low, "high": have[0].high}
        printed = data.printed_spread(cells[0], column)
        seeds, sd = printed if printed is not None else (1, None)
    if sd is not None:
        text += PLUS_MINUS + format_number(sd, column.decimals, percent=column.percent)
    if len(numbers) < len(cells):
        text += f" (n={len(numbers)})"
    return TableEntry(text=text, value=mean, sd=sd, seeds=seeds, **about)


def derived_entry(
    data: SweepData,
    column: Column,
    value: float | None,
    parts: Sequence[TableEntry],
    word: str = "n/a",
    *,
    sd: float | None = None,
) -> TableEntry:
    """An entry worked out from others, with its standard deviation `sd` where that is known.

    The first part that has no number says why there is none; parts that are means over fewer cells than there are say how many.
    """
    lacking = next((part for part in parts if part.value is None), None)
    text = word
    if value is not None:
        text = format_number(round(value, DUST), column.decimals, percent=column.percent)
        if sd is not None:
            text += PLUS_MINUS + format_number(sd, column.decimals, percent=column.percent)
        text += _counted(parts)
    elif lacking is not None:
        text = lacking.text
    reason = lacking.reason if lacking else None
    origins = tuple(dict.fromkeys(origin for part in parts for origin in part.origins))
    about: dict[str, Any] = {"direction": column.direction, "reason": reason, "sd": sd, "origins": origins}
    return number_of(column, column.heading, text, value, **about)


def number_of(column: Column, heading: str, text: str, value: float | None, **more: Any) -> TableEntry:
    """Return the entry of a number in the unit of a column, printed as `text`."""
    about: dict[str, Any] = {
        "probe": column.probe,
        "metric": column.metric,
        "length": column.length,
        "unit": column.unit or None,
    }
    return TableEntry(text=text, heading=heading, value=value, **about, **more)


def p_value_entry(heading: str, p: float) -> TableEntry:
    """The entry of a probability; NaN where there is none."""
    if math.isnan(p):
        return TableEntry(text=EMPTY_TEXT, heading=heading, unit=BARE)
    return TableEntry(
        text=f"<{SMALL_P:.4f}" if p < SMALL_P else format_number(p, 4), heading=heading, value=p, unit=BARE
    )


def count_entry(heading: str, n: int | None, origins: tuple[tuple[str, int | None], ...] = ()) -> TableEntry:
    """Return the entry of a count; None where there is none."""
    if n is None:
        return TableEntry(text=EMPTY_TEXT, heading=heading)
    return TableEntry(text=str(n), heading=heading, value=float(n), origins=origins)


def difference(column: Column, heading: str, value: float | None) -> TableEntry:
    """The entry of a difference in a column's number, with its sign; None or NaN where there is none."""
    if value is None or math.isnan(value):
        return number_of(column, heading, EMPTY_TEXT, None)
    return number_of(column, heading, format_signed(round(value, DUST), column.decimals, percent=column.percent), value)


AMOUNTS = {"Mean": "mean", "Median": "median", "Low": "low", "High": "high", "Worst": "worst"}
COUNTS = {"Up": "up", "Down": "down", "Pairs": "pairs", "Gained": "gained", "Lost": "lost"}
P_VALUES = {
    "p": "p", "p corr": "p_corrected", "p sign": "p_sign", "p het": "p_heterogeneity", "p equiv": "p_equivalence",
    "p McN": "p_mcnemar",
}  # fmt: skip
"""By heading: the fields of a tested difference in its measure's unit, counted, and of its tests."""


def tested_entry(one: Any, heading: str) -> TableEntry:
    """Return the entry of a tested difference (a Summary with a `measure`) under one of these headings."""
    if heading in AMOUNTS:
        return difference(one.measure, heading, getattr(one, AMOUNTS[heading]))
    if heading in COUNTS:
        return count_entry(heading, getattr(one, COUNTS[heading]))
    return p_value_entry(heading, getattr(one, P_VALUES[heading]))


def _counted(parts: Sequence[TableEntry]) -> str:
    """How many cells stand behind means of which at least one lacks some; nothing where all are there."""
    if all(part.seeds >= len(part.cells) for part in parts):
        return ""
    fewest, most = min(part.seeds for part in parts), max(part.seeds for part in parts)
    return f" (n={fewest})" if fewest == most else f" (n={fewest} to {most})"


def _raw_entry(one: TableEntry) -> dict[str, Any]:
    # without the origins, which are thousands in an effect of a large sweep, and are told below
    row = {name: value for name, value in vars(one).items() if name not in ("text", "origins")}
    row["printed"] = one.text
    attempts = list(one.attempts)
    return row | {
        "attempt_id": attempts[0] if len(attempts) == 1 else None,
        "cells": list(one.cells),
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
    """The table of these lines: `headings` above the words, `numbers` above the entries.

    The title gets its number, if it has one, and the sweep, unless it says both itself (`names_sweep=False`).

    With `rank` the best numbers stand in bold, and in the notes (with `has_chances`) how probable it is that they are, held
    against `unlisted` rows too. Where a number is a needle accuracy, or a difference of some, the notes say what a constant answer scores.
    """
    words = (word for line in lines for word in line.words)
    if mentions_needle((one for line in lines for one in line.entries), words) and yardstick(data) not in " ".join(
        notes
    ):
        notes = [*notes, " ".join(filter(None, (needle_note(data), below_baseline_note(data))))]
    grid, contests = ranked(data, [line.entries for line in lines], rank, unlisted, has_chances=has_chances)
    if has_chances:
        names = _names(lines, grid, rank)
        notes = [*notes, *ranking_notes(contests, rank, names, [" ".join(line.words) for line in lines])]
    behind = data.sources if sources is None else sources
    made: dict[str, Any] = {"table": number, "sweep": data.sweep, "revision": data.revision}
    made["options"] = dict(options or {}) | shown_beyond(data) | ({"only": list(data.only)} if data.only else {})
    if names_sweep:
        title = (
            f"{f'Table {number}. ' if number.isdigit() else ''}{title}, sweep {data.sweep}, revision {data.revision}"
        )
    return Table(
        number=number,
        title=title + filter_suffix(data),
        columns=(*headings, *numbers),
        text_columns=len(headings),
        rows=tuple((*line.words, *(one.text for one in row)) for line, row in zip(lines, grid, strict=True)),
        raw_of=partial(_raw, made, headings, lines, grid, behind),
        trace_of=partial(_trace, made, lines, grid, behind),
        notes=tuple(notes),
        entries=grid,
        above=tuple(above),
        paged=paged,
    )


def _origins(line: TableRow, row: Sequence[TableEntry]) -> dict[tuple[str, int | None], None]:
    """Return the (cell, attempt) pairs of a row, each once, in the order of its numbers."""
    return dict.fromkeys(chain(line.origins, *(one.origins for one in row)))


def _trace(
    made: Mapping[str, Any], lines: Sequence[TableRow], grid: Grid, sources: Mapping[int, CodeAndGpu]
) -> Mapping[str, Any]:
    """Return the trace of a table: `made`, the attempts of every cell, and their sources."""
    by_cell = attempts_by_cell(
        pair
        for line, row in zip(lines, grid, strict=True)
        for pair in chain(((cell.cell_id, None) for cell in line.cells), _origins(line, row))
    )
    return {**made, "cells": by_cell, "sources": attempts_by_source(chain(*by_cell.values()), sources)}


def _raw(
    made: Mapping[str, Any],
    headings: Sequence[str],
    lines: Sequence[TableRow],
    grid: Grid,
    sources: Mapping[int, CodeAndGpu],
) -> tuple[dict[str, Any], ...]:
    """Return the rows of a table as JSON has them."""
    rows = []
    for line, row in zip(lines, grid, strict=True):
        about = {"sweep": made["sweep"], "revision": made["revision"]}
        about |= {"row": dict(zip(headings, line.words, strict=True))}
        mine = attempts_by_source((attempt for _, attempt in _origins(line, row) if attempt is not None), sources)
        trace = {**made, "sources": mine}
        rows.append(about | dict(line.about) | {"values": [_raw_entry(one) for one in row], "trace": trace})
    return tuple(rows)


def _names(lines: Sequence[TableRow], grid: Sequence[Sequence[TableEntry]], rank: Rank) -> dict[Place, str]:
    """What the notes call a number: down a column its configuration, along a row its heading and the row."""
    found = {}
    for r, (line, row) in enumerate(zip(lines, grid, strict=True)):
        cell = line.cells[0] if line.cells else None
        name = cell.slug.removesuffix(f"-s{cell.seed}") if cell else " ".join(line.words)
        for c, one in enumerate(row):
            found[r, c] = name if rank == "column" else one.heading
    return found


def cell_json_fields(data: SweepData, cell: CellState) -> dict[str, Any]:
    """What JSON says of a row that is one cell: the database's column names."""
    state = {
        "axes": dict(cell.axes),
        "state": cell.state,
        "standing": data.standing(cell),
        # the training, which an evaluation beyond the grid leaves as it is
        "attempt_id": cell.trained_attempt_id or cell.attempt_id,
    }
    return {"cell": cell.cell_id, "slug": cell.slug, "seed": cell.seed} | dict(cell.levels) | state


def filter_suffix(data: SweepData) -> str:
    """For a title: which cells alone it is about; nothing where it is all of them."""
    return f", {told(data.only)} alone" if data.only else ""


def sweep_note(data: SweepData) -> str:
    """Which sweep this is and how far it is, and what was tuned before it."""
    note = f"Sweep {data.sweep}, revision {data.revision}{filter_suffix(data)}: {data.done} of {counted(len(data.cells), 'cell')} done."
    return note if data.tuned is None else f"{note} {data.tuned.note}"


def reference_note(data: SweepData) -> list[str]:
    """The corpus entropies, where they are known."""
    known = [
        f"{name} {' / '.join(format_number(number, 3) for number in data.references[metric])}"
        for metric, name in REFERENCES.items()
        if metric in data.references
    ]
    return [f"For comparison, of the corpus in nats per token: {', '.join(known)}."] if known else []


def placeholder_notes(grid: Iterable[Sequence[TableEntry]]) -> list[str]:
    """What the words that stand for numbers mean, with how often each does."""
    entries = [one for row in grid for one in row if one.value is None]
    reasons = Counter(one.reason for one in entries if one.reason)
    notes = []
    for reason, count in sorted(reasons.items()):
        code = reason_code(reason)
        notes.append(f"{code} ({counted(count, 'value')}): {reason.removeprefix(code).lstrip(': ') or code}.")
    if any(one.text == NO_CELL_TEXT for one in entries):
        notes.append(f"{NO_CELL_TEXT}: the sweep does not list that combination.")
    if any(one.text == UNMEASURED for one in entries):
        notes.append(f"{UNMEASURED}: the grid does not ask for it; evaluate measures it, and report --length shows it.")
    if any(not one.reason and one.text not in (NO_CELL_TEXT, EMPTY_TEXT, UNMEASURED) for one in entries):
        notes.append("A word in place of a number is the state of a cell that has none yet.")
    return notes


def seed_notes(grid: Iterable[Sequence[TableEntry]], n: int) -> list[str]:
    """What the plus-minus sign and a count mean, where there are `n` seeds."""
    if n < 2:
        return []
    told = f"ean ± sample standard deviation over up to {counted(n, 'seed')}"
    if not any(PLUS_MINUS in one.text for row in grid for one in row):
        told = f"eans over up to {counted(n, 'seed')}"
    return [f"M{told}; (n=k) where only k of them have the number."]


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
