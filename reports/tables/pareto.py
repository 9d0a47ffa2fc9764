"""The table `pareto`: the configurations that no other beats in quality and speed at once."""

from __future__ import annotations

from ...results.store.store import Store
from ..columns import AXIS_HEADINGS, qualities, speed_of
from ..data import Lengths, gather
from ..layout import Line, assemble, entry, seed_notes, sweep_note, word_notes
from ..stats.ceiling import needle_note
from ..stats.effects import pareto
from ..table import Table


def pareto_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """The configurations that no other beats in speed and quality at once: in validation loss, or in needle accuracy at
    the longest length. Speed is tokens/s, or MFU where the sweep has no tokens/s."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    speed, (loss, needle) = speed_of(data, "Tokens/s"), qualities(data)
    groups = list(data.configurations().items())
    grid = [[entry(data, cells, column) for column in (speed, loss, needle)] for _, cells in groups]
    fronts: dict[int, list[str]] = {}
    for index, quality in enumerate((loss, needle), start=1):
        known = [r for r, row in enumerate(grid) if row[0].value is not None and row[index].value is not None]
        points = [(grid[r][0].value or 0.0, grid[r][index].value or 0.0) for r in known]
        for r, kept in zip(known, pareto(points, (1, quality.direction)), strict=True):
            if kept:
                fronts.setdefault(r, []).append(quality.heading)
    ranked = sorted(fronts, key=lambda r: -(grid[r][0].value or 0.0))
    lines = [
        Line(words=(*groups[r][0], " and ".join(fronts[r])), entries=tuple(grid[r]), cells=groups[r][1]) for r in ranked
    ]
    title = f"Pareto fronts of quality and speed, sweep {data.sweep}, revision {data.revision}"
    headings = (*AXIS_HEADINGS, *data.extra_axes(), "Front")
    shown, n = [grid[r] for r in ranked], max((len(groups[r][1]) for r in ranked), default=0)
    about = f"Speed: {speed.heading}. Fastest first. {needle_note(data)}"
    notes = [sweep_note(data), about, *seed_notes(shown, n), *word_notes(shown)]
    numbers = [column.heading for column in (speed, loss, needle)]
    return assemble(data, "pareto", title, headings, lines, numbers=numbers, notes=notes, rank="column")
