"""What tables of a task have in common: the configurations that were asked, a column a share, and the intervals of seeds and of rows.

A row is a configuration. A mean over seeds stands with their standard deviation, and Student's t interval of the seeds; where a
share is of sequences, Wilson's interval of the sequences of one seed stands beside it, since every seed is asked the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy import special

from ...results import paper
from ...results.intervals import of_trials
from ...results.store.records import AXES, CellState
from ...results.store.store import Store
from ..number_format import Column, rounded
from ..result_columns import AXIS_HEADINGS
from ..stats.significance.paired_tests import ALPHA
from ..stats.significance.trial_intervals import trials_of
from ..sweep_data import SweepData, level_of
from ..table import Entry, Table
from ..table_builder import DUST, NOTHING, Line, assemble, seed_notes, sweep_note, word_notes
from .plain_cells import titled
from .printed_discrepancies import facts_of

SEEDS, SEQUENCES, WRONG, RATIO = "95% seeds", "95% sequences", "wrong reads", "longest/shortest"
MEANT = {
    SEEDS: "Student's t of the mean over seeds",
    SEQUENCES: "Wilson's of the sequences that one seed is asked",
    WRONG: "share of reads, in %",
    RATIO: "perplexity at the longest length over that at the shortest, seed by seed",
}
"""What the headings of further columns end in, and what that means."""


@dataclass(frozen=True)
class Rows:
    """The configurations that a table is about, and the axes that tell them apart."""

    data: SweepData
    groups: Sequence[Sequence[CellState]]

    @property
    def axes(self) -> list[str]:
        every = (*AXES, *self.data.extra_axes())
        levels = {axis: {level_of(cells[0], axis) for cells in self.groups} for axis in every}
        return [axis for axis in every if axis == AXES[0] or len(levels[axis]) > 1]

    @property
    def headings(self) -> tuple[str, ...]:
        named = dict(zip(AXES, AXIS_HEADINGS, strict=True))
        return tuple(named.get(axis, axis) for axis in self.axes)

    def words(self, cells: Sequence[CellState]) -> tuple[str, ...]:
        return tuple(level_of(cells[0], axis) for axis in self.axes)

    @property
    def seeds(self) -> int:
        return max((len(cells) for cells in self.groups), default=0)


def rows_about(data: SweepData, probe: str) -> Rows:
    """The configurations with a number of the probe; all of them where the sweep asks for it."""
    have = {cell for cell, of, *_ in data.values if of == probe}
    asked = any(name == probe for name, _ in data.requested)
    groups = data.configurations().values()
    return Rows(data, [cells for cells in groups if asked or any(cell.cell_id in have for cell in cells)])


def task_table(store: Store, rows: Rows, name: str, title: str, lines: Sequence[Line], notes: Sequence[str]) -> Table:
    """The table of the task of a probe of that name, with what its headings mean and how far seeds lie apart."""
    data, grid = rows.data, [line.entries for line in lines]
    published = paper.is_published(data.sweep)
    runs = max((one.seeds for row in grid for one in row), default=0)
    if published and runs > 1:
        told = any(one.sd is not None for row in grid for one in row)
        spread = [f"Mean{' ± standard deviation' if told else 's'} over {runs} runs, as printed."]
    else:
        spread = seed_notes(grid, rows.seeds)
    numbers = [one.heading for one in grid[0]] if grid else []
    meant = [f"{end}: {words}" for end, words in MEANT.items() if any(heading.endswith(end) for heading in numbers)]
    words = word_notes([one for one in row if one.low is None] for row in grid)
    said = [sweep_note(data), *(notes if lines else []), *([f"{'; '.join(meant)}."] if meant else []), *spread, *words]
    said += _names(store, rows) if published else []
    if not lines:
        said.append(f"Nothing of the probe {name} was measured or asked for.")
    return assemble(
        data, name, titled(name, title, data), rows.headings, lines, numbers=numbers, notes=said, rank="column"
    )


def without_empty(lines: Sequence[Line], kept: Sequence[str]) -> list[Line]:
    """The lines without the columns in which none says anything, but for those that are always there."""
    if not lines:
        return []
    places = [
        place
        for place, one in enumerate(lines[0].entries)
        if one.heading in kept
        or any(line.entries[place].value is not None or line.entries[place].low is not None for line in lines)
    ]
    return [replace(line, entries=tuple(line.entries[place] for place in places)) for line in lines]


def _names(store: Store, rows: Rows) -> list[str]:
    """What the paper calls the configurations, where it calls them otherwise."""
    told = []
    for cells in rows.groups:
        name, words = facts_of(store, cells[0].cell_id).get("name", ""), rows.words(cells)
        if name and name.lower() != words[0].lower():
            told.append(f"{named(words)} is {name}")
    return [f"Names there: {', '.join(dict.fromkeys(told))}."] if told else []


def named(words: Sequence[str]) -> str:
    """A configuration in a sentence."""
    return " ".join(word for word in words if word not in ("none", NOTHING))


def of_seeds(mean: Entry, column: Column) -> Entry:
    """Student's t interval of the mean over seeds; of a share within 0 and 1."""
    base = Entry(text=NOTHING, heading=f"{mean.heading} {SEEDS}", unit=mean.unit, origins=mean.origins)
    if mean.value is None or mean.sd is None or mean.seeds < 2:
        return base
    reach = float(special.stdtrit(mean.seeds - 1, 1 - ALPHA / 2)) * mean.sd / math.sqrt(mean.seeds)
    low, high = mean.value - reach, mean.value + reach
    return _interval(base, column, *((max(0.0, low), min(1.0, high)) if column.percent else (low, high)))


def of_sequences(data: SweepData, cells: Sequence[CellState], mean: Entry) -> Entry:
    """Wilson's interval of the mean share, of as many sequences as the fewest that a seed was asked."""
    column = Column("", mean.probe, mean.metric, 2, True)
    base = Entry(text=NOTHING, heading=f"{mean.heading} {SEQUENCES}", unit=mean.unit, origins=mean.origins)
    given = (data.given(cell, column) for cell in cells)
    counts = [n for value in given if value is not None and (n := trials_of(value, data.values))]
    if mean.value is None or not counts:
        return base
    return replace(_interval(base, column, *of_trials(mean.value, min(counts))), n=min(counts))


def _interval(base: Entry, column: Column, low: float, high: float) -> Entry:
    words = (rounded(round(end, DUST), column.decimals, percent=column.percent) for end in (low, high))
    return replace(base, text=f"[{', '.join(words)}]", low=low, high=high)
