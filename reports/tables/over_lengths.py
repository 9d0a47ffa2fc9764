"""Tables 1 to 3, over context lengths: attention alone, what memory adds, window and distractor on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...results.store.store import Store
from ..number_format import Column, column_of, length_name
from ..stats.effects.needle_baseline import needle_note
from ..sweep_data import Lengths, SweepData, gather
from ..table import Table
from ..table_builder import Line, assemble, entry, reference_note, seed_notes, sweep_note, word_notes
from .plain_cells import NATS, NEEDLE, OURS, chosen, memories, mixers, named, ours_last, plain_levels, titled
from .printed_discrepancies import contradicted

UNITS = "clean: nats per token."


@dataclass(frozen=True)
class Series:
    """A column of a table over lengths: the levels that its cells stand at, and what is measured."""

    heading: str
    levels: dict[str, str]
    what: tuple[str, str]


def _column(series: Series, length: int) -> Column:
    return column_of(*series.what, series.heading, decimals=0 if series.what == NEEDLE else 2, length=length)


def over_lengths(data: SweepData, number: str, title: str, series: Sequence[Series]) -> Table:
    """A table with a row for every length and, where further axes vary, every combination of their levels."""
    where = [chosen(data, one.levels) for one in series]
    printed = {key for key in data.printed if key[1] == number}
    lengths = sorted({length for one in series for length in data.lengths(*one.what)})
    asked = data.requested_lengths()
    lengths = sorted({*lengths, *(length for one in series for length in asked.get(one.what[0], ()))})
    if printed:
        shown = [
            any(
                (c.cell_id, *key[1:4]) == key[:4] and key[2:4] == one.what
                for key in printed
                for cs in cells.values()
                for c in cs
            )
            for one, cells in zip(series, where, strict=True)
        ]
        series = [one for one, kept in zip(series, shown, strict=True) if kept]
        where = [cells for cells, kept in zip(where, shown, strict=True) if kept]
        lengths = sorted({key[4] for key in printed})
    extra = data.extra_axes()
    groups = list(dict.fromkeys(key for cells in where for key in cells)) or [("-",) * len(extra)]
    lines = []
    for group in groups:
        for length in lengths:
            cells = [found.get(group, []) for found in where]
            entries = tuple(
                entry(data, some, _column(one, length), number) for one, some in zip(series, cells, strict=True)
            )
            about = {"length": length}
            lines.append(Line(words=(length_name(length), *group), entries=entries, about=about))
    grid = [line.entries for line in lines]
    n = max((len(some) for found in where for some in found.values()), default=0)
    notes = [
        sweep_note(data),
        f"{UNITS} {needle_note(data, 'needle')}",
        *seed_notes(grid, n),
        *reference_note(data),
        *word_notes(grid),
    ]
    notes += [f"{one.slug}: {one.text}." for one in contradicted(data, number)]
    if not lines:
        notes.append("There is no context length yet: nothing was measured or asked for.")
    headings = ("Length", *extra)
    numbers = [one.heading for one in series]
    return assemble(
        data, number, titled(number, title, data), headings, lines, numbers=numbers, notes=notes, rank="row"
    )


def table1(store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None) -> Table:
    """Attention alone: clean loss and needle accuracy of every mixer without memory, over context lengths."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    series = [
        Series(f"{mixer} {what[0]}", plain_levels(data, attn_type=mixer), what)
        for what in (NATS, NEEDLE)
        for mixer in mixers(data)
    ]
    return over_lengths(data, "1", "Attention alone, without memory", series)


def table2(store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None) -> Table:
    """What memory adds: needle accuracy of our mixer alone and of every mixer with memory, and the latter's clean loss."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    names, known = ours_last(mixers(data)), memories(data)
    one = len(known) == 1
    pairs = [(mixer, memory) for memory in known for mixer in names]
    alone = [(OURS, "off")] if OURS in names else []
    series = [
        Series(f"{named(mixer, memory, one)} {what[0]}", plain_levels(data, attn_type=mixer, memory=memory), what)
        for what, some in ((NEEDLE, [*alone, *pairs]), (NATS, pairs))
        for mixer, memory in some
    ]
    return over_lengths(data, "2", "What memory adds", series)


def _main_mixer(data: SweepData) -> str:
    names = data.levels("attn_type")
    return OURS if OURS in names or not names else names[0]


def table3(store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None) -> Table:
    """Window and distractor: needle accuracy with memory, and with each of the two added to it."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    mixer, memory = _main_mixer(data), memories(data)[0]
    base = {"attn_type": mixer, "memory": memory}
    series = [
        Series(f"{mixer} + memory", plain_levels(data, **base), NEEDLE),
        Series("+ distractor", plain_levels(data, **base, distractor="on"), NEEDLE),
        Series("+ window", plain_levels(data, **base, window="on"), NEEDLE),
    ]
    return over_lengths(data, "3", "Window and distractor on top of memory, needle", series)
