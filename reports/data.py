"""What a report is made of: one snapshot of a sweep, read in one transaction. Imports neither pandas nor torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..results import queries
from ..results.records import AXES, CellState, Value
from ..results.standing import Request, Standing, requests_of, standing
from ..results.store import Store

REFERENCES = {"unigram_entropy": "unigram entropy", "bigram_entropy": "bigram entropy"}
"""Metrics of the probe `corpus` that tables give as a yardstick, in nats per token."""


class ReportError(Exception):
    """A report that cannot be made as asked; the message is one line with the remedy."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """A revision of a sweep with the newest value of every (cell, probe, metric, length).

    `references` holds, by metric of REFERENCES, the distinct values among the cells (one, unless corpora differ).
    """

    sweep: str
    revision: int
    cells: Sequence[CellState]
    values: Mapping[tuple[str, str, str, int], Value]
    references: Mapping[str, tuple[float, ...]]
    requested: Sequence[Request] = ()
    """Every (probe, length) that the launch asked for."""

    @property
    def done(self) -> int:
        """How many cells are trained and measured at everything that was asked for."""
        return sum(self.standing(cell) == "done" for cell in self.cells)

    def standing(self, cell: CellState) -> Standing:
        """Where a cell stands, as `status` says it."""
        return standing(cell, self.requested)

    def requested_lengths(self) -> dict[str, list[int]]:
        """The context lengths asked for, by probe, shortest first."""
        found: dict[str, list[int]] = {}
        for probe, length in sorted(self.requested):
            if length:
                found.setdefault(probe, []).append(length)
        return found

    def lengths(self, probe: str, metric: str) -> list[int]:
        """The context lengths at which any cell has a value or a reason, shortest first."""
        return sorted({key[3] for key in self.values if key[1:3] == (probe, metric)})

    def extra_axes(self) -> list[str]:
        """The axes beyond the five AXES whose level differs between cells, in the grid's order."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.axes if name not in AXES)
        return [name for name in names if len({cell.axes.get(name) for cell in self.cells}) > 1]


def gather(store: Store, sweep: str | None = None, *, revision: int | None = None, orphans: bool = False) -> SweepData:
    """Reads a sweep (None: the one launched last) for a report. Raises SweepUnknown, StoreError."""
    with store.transaction(write=False) as session:
        launched = queries.revision(session, sweep, revision)
        cells = queries.cell_states(session, launched.sweep, launched.number, orphans=orphans)
        values = queries.sweep_values(session, launched.sweep, launched.number, orphans=orphans)
    return SweepData(
        sweep=launched.sweep,
        revision=launched.number,
        cells=cells,
        values={(value.cell_id, value.probe, value.metric, value.length): value for value in values},
        references=_references(values),
        requested=requests_of(launched.options),
    )


def _references(values: Iterable[Value]) -> dict[str, tuple[float, ...]]:
    found: dict[str, set[float]] = {metric: set() for metric in REFERENCES}
    for value in values:
        if value.probe == "corpus" and value.metric in found and value.value is not None:
            found[value.metric].add(value.value)
    return {metric: tuple(sorted(numbers)) for metric, numbers in found.items() if numbers}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table before it has a format.

    `rows` is printed text under `columns`, of which the first `text_columns` are words and the rest numbers; `raw` has
    one object a row, with the database's column names, unrounded values and the printed ones.
    """

    number: str
    title: str
    columns: tuple[str, ...]
    text_columns: int
    rows: tuple[tuple[str, ...], ...]
    raw: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
