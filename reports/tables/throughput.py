"""Table 4, training throughput: seconds of a step, MFU, and what memory costs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...results.store.records import CellState
from ...results.store.store import Store
from ..number_format import column_of
from ..sweep_data import SweepData, gather
from ..table import Entry, Table
from ..table_builder import NO_CELL, NOTHING, Line, assemble, derived, entry, seed_notes, sweep_note, word_notes
from .plain_cells import OURS, chosen, memories, mixers, named, plain_levels, titled
from .printed_discrepancies import contradicted

STEP = column_of("throughput", "step_seconds", "Step s")
MFU = column_of("throughput", "mfu_paper")
DROP = column_of("throughput", "mfu_drop", "Drop")
SPEED = column_of("throughput", "tokens_per_s", "Tokens/s")
HONEST = column_of("throughput", "mfu", "MFU honest")
PEAK = column_of("throughput", "train_seconds", "Train s")


def _step_seconds(data: SweepData, cells: Sequence[CellState], number: str) -> Entry:
    """Seconds of one optimizer step: as published, else training seconds by steps, averaged over seeds."""
    given = entry(data, cells, STEP, number)
    steps = cells[0].steps_total if cells else None
    if given.value is not None or not steps:
        return given
    whole = entry(data, cells, PEAK)
    sd = whole.sd / steps if whole.sd is not None else None
    made = derived(data, STEP, whole.value / steps if whole.value is not None else None, [whole], sd=sd)
    return replace(made, seeds=whole.seeds)


def table4(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Training throughput: seconds of a step, MFU by the paper's formula, and its drop against the mixer alone."""
    data = gather(store, sweep, revision=revision)
    known, number = memories(data), "4"
    printed = {key[0] for key in data.printed if key[1] == number}
    measured = [
        column for column in (SPEED, HONEST) if any(k[1:3] == (column.probe, column.metric) for k in data.values)
    ]
    lines = []
    for mixer in sorted(mixers(data), key=lambda name: (name != OURS, name)):
        rows = [(mixer, plain_levels(data, attn_type=mixer))]
        for memory in known:
            name = named(mixer, memory, len(known) == 1)
            rows.append((name, plain_levels(data, attn_type=mixer, memory=memory)))
            rows.append((f"{name} + distractor", plain_levels(data, attn_type=mixer, memory=memory, distractor="on")))
        alone: dict[tuple[str, ...], Entry] = {}
        for name, levels in rows:
            groups = chosen(data, levels) or {("-",) * len(data.extra_axes()): []}
            for group, cells in groups.items():
                if printed and not any(cell.cell_id in printed for cell in cells):
                    continue
                share = entry(data, cells, MFU, number)
                first = alone.setdefault(group, share) if levels["memory"] == "off" else alone.get(group)
                line = [_step_seconds(data, cells, number), share, _drop(data, first, share)]
                line += [entry(data, cells, column) for column in measured]
                lines.append(Line(words=(name, *group), entries=tuple(line), cells=cells))
    grid = [line.entries for line in lines]
    notes = [
        sweep_note(data),
        "Step s: seconds of an optimizer step. MFU: in %, by the paper's formula, which counts the embedding and attention in "
        "every layer. Drop: of that MFU against the mixer alone, in %.",
        *(["MFU honest: in %, of the operations that are really done."] if HONEST in measured else []),
        *seed_notes(grid, max((len(line.cells) for line in lines), default=0)),
        *word_notes(grid),
        *(f"{one.slug}: {one.text}." for one in contradicted(data, number)),
    ]
    headings = [column.heading for column in (STEP, MFU, DROP, *measured)]
    title = titled(number, "Training throughput", data)
    return assemble(
        data, number, title, ("Configuration", *data.extra_axes()), lines, numbers=headings, notes=notes, rank="column"
    )


def _drop(data: SweepData, alone: Entry | None, share: Entry) -> Entry:
    if alone is share:
        return Entry(text=NOTHING, heading=DROP.heading, probe=DROP.probe, metric=DROP.metric)
    parts = [share] if alone is None else [alone, share]
    if alone is None or not alone.value or share.value is None:
        return derived(data, DROP, None, parts, NO_CELL if alone is None else "n/a")
    return derived(data, DROP, 1 - share.value / alone.value, parts)
