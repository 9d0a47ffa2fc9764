"""A table before it has a format, and a number of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One number of a table, or the word that stands for it.

    `value` is the unrounded number (the mean over `seeds` cells, with the sample standard deviation `sd`), in `unit`;
    `origins` are the (cell, attempt) pairs it comes from, without an attempt where a cell has no value. `best` is set when it
    is the best of the numbers it is held against.
    """

    text: str
    heading: str = ""
    probe: str = ""
    metric: str = ""
    length: int | None = None
    direction: int = 0
    """-1 where less is better, 1 where more is, 0 where neither."""
    value: float | None = None
    unit: str | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    sd: float | None = None
    seeds: int = 1
    source: str | None = None
    """SHA-256 of the plugin whose probe gave it; None for one of the package, and where several versions did."""
    origins: tuple[tuple[str, int | None], ...] = ()
    best: bool = False
    p_best: float | None = None
    """How probable it is that none that it is held against is better; None where that is not known."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The ids of the cells, each once."""
        return tuple(dict.fromkeys(cell for cell, _ in self.origins))

    @property
    def attempts(self) -> tuple[int, ...]:
        """The ids of the attempts, each once."""
        return tuple(dict.fromkeys(attempt for _, attempt in self.origins if attempt is not None))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table before it has a format.

    `rows` is printed text under `columns`, of which the first `text_columns` are words and the rest numbers; `entries`
    has what is behind the numbers. `raw_of` and `trace_of` make `raw` and `trace` when a format needs them: in a sweep of
    thousands of cells each takes longer than the table.
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
    """What to know before any two rows are compared: printed between title and rows."""
    paged: bool = False
    """Whether LaTeX lets it run over pages however few its rows are."""

    @cached_property
    def raw(self) -> tuple[dict[str, Any], ...]:
        """One object a row, with the database's column names, unrounded values and the printed ones."""
        return self.raw_of()

    @cached_property
    def trace(self) -> Mapping[str, Any]:
        """The origin of the table: its name, sweep, revision and options, the attempts of every cell, and their commits and GPUs."""
        return self.trace_of()

    @property
    def best(self) -> frozenset[tuple[int, int]]:
        """(row, column) of every best value."""
        words = self.text_columns
        return frozenset((r, words + c) for r, row in enumerate(self.entries) for c, e in enumerate(row) if e.best)
