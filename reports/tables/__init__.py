"""The tables of the appendix, from the database. `make_table("6", store)` then `render(table, "tex")`.

By number (as the paper's first version counts): 1 attention alone, 2 memory, 3 window and distractor, 4 training throughput,
5 regularizer modes, 6 complete results. By name: open-weight, budgets, effects,
interactions, anova, pareto, failures, provenance, compare.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...results.store.records import AXES
from ...results.store.store import Store
from ...results.text import choice
from ..data import REFERENCES, Lengths, ReportError, SweepData, Table, gather
from ..numbers import GUESS, Column, column_of, length_name, reason_code, rounded
from ..render import FORMATS, render
from ..stats.audit import homogeneity
from .layout import Line, about_cell, assemble, entry, reference_note, seed_notes, sweep_note, word_notes

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FORMATS", "REFERENCES", "TABLES", "ReportError", "Table", "length_name", "make_table", "reason_code", "render",
    "rounded", "table6", "tidy",
]  # fmt: skip

AXIS_HEADINGS = ("Type", "Reg", "Dist", "Mem", "Win")
TABLES: dict[str, tuple[str, str]] = {
    "1": ("paper:table1", "attention alone, over context lengths"),
    "2": ("paper:table2", "what memory adds, over context lengths"),
    "3": ("paper:table3", "window and distractor on top of memory"),
    "4": ("paper:table4", "training throughput"),
    "5": ("paper:table5", "regularizer modes"),
    "6": (":table6", "complete results"),
    "open-weight": ("paper:open_weight", "beside open-weight models, bits per token"),
    "budgets": ("paper:budgets", "training budgets"),
    "effects": ("effects:effects_table", "effect of every level, by matched pairs"),
    "interactions": ("effects:interactions_table", "two-way interactions"),
    "anova": ("effects:anova_table", "type-III analysis of variance"),
    "pareto": ("effects:pareto_table", "quality against speed"),
    "failures": ("logbook:failures", "attempts that did not finish"),
    "provenance": ("logbook:provenance", "where the numbers come from"),
    "compare": ("compare:compare_table", "measured beside published"),
}
"""By number or name: where the function stands, and what the table shows."""
NO_LENGTHS = [(-1, "shortest"), (-1, "longest")]
WITHOUT_LENGTHS = ("4", "5", "budgets", "failures", "provenance")
"""Tables in which no context length plays a part."""
WORDS_ONLY = ("5", "budgets", "failures", "provenance")
"""Tables in which nothing measured is compared."""


def ends(data: SweepData, lengths: Mapping[str, Sequence[int]], one: Column) -> list[Column]:
    """The column at the shortest and at the longest context length: one where there is one (-1 where none is known yet)."""
    known = sorted(lengths.get(one.probe, ())) or data.lengths(one.probe, one.metric)
    named = [(length, length_name(length)) for length in dict.fromkeys((known[0], known[-1]))] if known else NO_LENGTHS
    return [replace(one, heading=f"{one.heading}@{name}", length=length) for length, name in named]


def complete_columns(data: SweepData, lengths: Mapping[str, Sequence[int]] | None = None) -> list[Column]:
    """The eight numbers of the complete results; five where there is one context length."""
    asked = data.requested_lengths() if lengths is None else lengths
    return [
        column_of("val", "val_loss"),
        *ends(data, asked, column_of("clean", "nats")),
        *ends(data, asked, column_of("junk", "nats")),
        *ends(data, asked, column_of("needle", "digit_accuracy")),
        column_of("throughput", "mfu_paper"),
    ]


def table6(
    store: Store,
    sweep: str | None = None,
    *,
    revision: int | None = None,
    orphans: bool = False,
    lengths: Mapping[str, Sequence[int]] | Lengths = None,
    seeds: bool = False,
) -> Table:
    """Table 6, the complete results: one row a configuration, in the grid's order.

    Thirteen columns; one for every further axis that varies joins after Win. Where a configuration has several seeds, its
    row gives mean, standard deviation and their number; `seeds` lists each seed as a row instead.
    The context lengths are those that the launch asked for, and `lengths` besides; a mapping gives them by probe (clean,
    junk, needle) instead.
    A number that is missing prints as where the cell stands (needs-eval in a trained one), one that could not be had as the
    code of its reason; nothing prints blank. Raises SweepUnknown, StoreError.
    """
    chosen, further = (lengths, None) if isinstance(lengths, Mapping) else (None, lengths)
    data = gather(store, sweep, revision=revision, orphans=orphans, lengths=further)
    columns = complete_columns(data, chosen)
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
        entries = tuple(entry(data, cells, column, "6") for column in columns)
        about = about_cell(data, cells[0]) if len(cells) == 1 else dict(cells[0].levels)
        row = (*key[: len(AXES)], *count, *key[len(AXES) :])
        lines.append(Line(words=row, entries=entries, cells=cells, about=about))
    which = " (cells that the newest revision dropped)" if orphans else ""
    grid = [line.entries for line in lines]
    notes = [
        sweep_note(data),
        f"Val, Clean and Junk: nats per token. Ndl: needle digits right, in % (a guess: {GUESS}). MFU: by the paper's formula, in %. "
        "Clean, Junk and Ndl at the shortest and the longest context length, in tokens.",
        *seed_notes(grid, 0 if seeds else max((len(cells) for _, cells in groups), default=0)),
        *reference_note(data),
        *word_notes(grid),
    ]
    given = {
        "orphans": orphans,
        "seeds": seeds,
        "lengths": {probe: list(some) for probe, some in chosen.items()} if chosen else None,
    }
    return assemble(
        data,
        "6",
        f"Table 6. Complete results of sweep {data.sweep}, revision {data.revision}{which}",
        (*AXIS_HEADINGS, *words, *extra),
        lines,
        numbers=[column.heading for column in columns],
        notes=notes,
        rank="column",
        options={name: value for name, value in given.items() if value},
    )


def make_table(number: str | int, store: Store, sweep: str | None = None, **options: Any) -> Table:
    """The table of that number or name; options as its function takes them.

    `lengths` adds context lengths to those that the launch asked for. Raises ReportError for an unknown name, and for
    lengths where none play a part.
    """
    name = str(number).lower()
    if name not in TABLES:
        raise ReportError(f"there is no table {number}; {choice(name, TABLES)}")
    if name in WITHOUT_LENGTHS and options.pop("lengths", None):
        raise ReportError(f"table {name} is not about context lengths; leave --length out")
    module, _, function = TABLES[name][0].partition(":")
    made: Table = getattr(importlib.import_module(f".{module}", __package__), function)(store, sweep, **options)
    if name in WORDS_ONLY:
        return made
    audit = homogeneity(store, made.trace["sweep"], revision=made.trace["revision"])
    return replace(made, above=(f"Before comparing: {'; '.join(audit)}.",) if audit else ())


def tidy(table: Table) -> pd.DataFrame:
    """The table as a tidy frame: one row a number (a table of words alone: one a row), unrounded and as printed."""
    import pandas as pd

    rows = []
    for raw in table.raw:
        about = {name: value for name, value in raw.items() if name not in ("values", "trace", "row", "axes")}
        about |= raw.get("row", {})
        rows += [about | value for value in raw["values"]] or [about]
    return pd.DataFrame(rows)
