"""Tables 1 to 5.

Mixers, memory, window and distractor over context lengths, training throughput, and regularizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...results import paper
from ...results.store.records import CellState
from ...results.store.store import Store
from ..number_format import CLEAN, NEEDLE, column_of, format_length
from ..stats.effects.needle_baseline import needle_note
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import (
    EMPTY_TEXT,
    NO_CELL_TEXT,
    TableRow,
    build_table,
    count_entry,
    derived_entry,
    measured_entry,
    placeholder_notes,
    reference_note,
    seed_notes,
    sweep_note,
)
from .paper_rows import (
    MAIN_MIXER,
    cells_at_levels,
    configuration_label,
    main_mixer_last,
    memories,
    mixers,
    plain_levels,
    printed_discrepancies,
)

UNITS = "clean: nats per token."


@dataclass(frozen=True)
class LengthSeries:
    """A column of a table over lengths.

    `levels` has the levels of its cells by axis, `metric_key` the (probe, metric) that it shows.
    """

    heading: str
    levels: dict[str, str]
    metric_key: tuple[str, str]


def length_table(data: SweepData, number: str, title: str, series: Sequence[LengthSeries]) -> Table:
    """Return a table over context lengths: one row per combination of levels of the extra axes and length.

    Lengths ascend within a combination. Where the table was printed (a sweep of published numbers), only the printed
    columns and lengths are shown. Otherwise lengths are all that were measured or requested for any column. Entries are
    means over seeds, or the placeholder of a missing number; the best along a row are marked, losses and accuracies
    apart. Labels: Length and the extra axes.

    Args:
        data: The sweep.
        number: Number of the table in the paper.
        title: Title of the table.
        series: The columns.
    """
    groups_by_column = [cells_at_levels(data, column.levels) for column in series]
    printed = {key for key in data.printed if key[1] == number}
    lengths = sorted({length for column in series for length in data.lengths(*column.metric_key)})
    requested = data.requested_lengths()
    lengths = sorted({*lengths, *(length for column in series for length in requested.get(column.metric_key[0], ()))})
    if printed:
        shown = [
            any(
                (c.cell_id, *key[1:4]) == key[:4] and key[2:4] == column.metric_key
                for key in printed
                for cs in cells.values()
                for c in cs
            )
            for column, cells in zip(series, groups_by_column, strict=True)
        ]
        series = [column for column, is_printed in zip(series, shown, strict=True) if is_printed]
        groups_by_column = [cells for cells, is_printed in zip(groups_by_column, shown, strict=True) if is_printed]
        lengths = sorted({key[4] for key in printed})
    extra = data.extra_axes()
    groups = list(dict.fromkeys(key for cells in groups_by_column for key in cells)) or [("-",) * len(extra)]
    lines = []
    for group in groups:
        for length in lengths:
            cells = [groups_of_column.get(group, []) for groups_of_column in groups_by_column]
            entries = tuple(
                measured_entry(
                    data,
                    column_cells,
                    column_of(
                        *column.metric_key,
                        column.heading,
                        decimals=0 if column.metric_key == NEEDLE else 2,
                        length=length,
                    ),
                    number,
                )
                for column, column_cells in zip(series, cells, strict=True)
            )
            json_fields = {"length": length}
            lines.append(TableRow(labels=(format_length(length), *group), entries=entries, json_fields=json_fields))
    grid = [line.entries for line in lines]
    n = max(
        (len(column_cells) for groups_of_column in groups_by_column for column_cells in groups_of_column.values()),
        default=0,
    )
    notes = [
        sweep_note(data),
        f"{UNITS} {needle_note(data, 'needle')}",
        *seed_notes(grid, n),
        *reference_note(data),
        *placeholder_notes(grid),
    ]
    notes += [f"{discrepancy.slug}: {discrepancy.text}." for discrepancy in printed_discrepancies(data, number)]
    if not lines:
        notes.append("No context length yet: no measurement was made or requested.")
    headings = ("Length", *extra)
    numbers = [column.heading for column in series]
    return build_table(data, number, title, headings, lines, numbers=numbers, notes=notes, rank="row")


def table1(store: Store, data: SweepData) -> Table:
    """Return Table 1, attention alone: clean loss, then needle accuracy, of every mixer without memory.

    It has one row per context length, measured or requested (of a published sweep: printed), with means over seeds.
    Cells of the plain recipe alone are shown: regularizer baseline (else the sweep's first), no distractor, no window.
    `store` is not used.
    """
    series = [
        LengthSeries(f"{mixer} {what[0]}", plain_levels(data, attn_type=mixer), what)
        for what in (CLEAN, NEEDLE)
        for mixer in mixers(data)
    ]
    return length_table(data, "1", "Attention alone, without memory", series)


def table2(store: Store, data: SweepData) -> Table:
    """Return Table 2, effect of memory, with one row per context length (`length_table`).

    Columns: needle accuracy of polar attention without memory (if the sweep has it) and of every mixer with each
    memory, then clean loss of every mixer with each memory. Entries are means over seeds. Cells of the plain recipe
    alone are shown: regularizer baseline (else the sweep's first), no distractor, no window. `store` is not used.
    """
    names, memory_levels = main_mixer_last(mixers(data)), memories(data)
    is_single_memory = len(memory_levels) == 1
    pairs = [(mixer, memory) for memory in memory_levels for mixer in names]
    alone = [(MAIN_MIXER, "off")] if MAIN_MIXER in names else []
    series = [
        LengthSeries(
            f"{configuration_label(mixer, memory, is_single_memory)} {what[0]}",
            plain_levels(data, attn_type=mixer, memory=memory),
            what,
        )
        for what, configurations in ((NEEDLE, [*alone, *pairs]), (CLEAN, pairs))
        for mixer, memory in configurations
    ]
    return length_table(data, "2", "Effect of memory", series)


def _main_mixer(data: SweepData) -> str:
    names = data.levels("attn_type")
    return MAIN_MIXER if MAIN_MIXER in names or not names else names[0]


def table3(store: Store, data: SweepData) -> Table:
    """Return Table 3, window and distractor: needle accuracy with memory, and with each of the two added to it.

    It has one row per context length (`length_table`). It shows polar attention (else the sweep's first mixer), the
    first memory level, and the regularizer baseline (else the sweep's first). `store` is not used.
    """
    mixer, memory = _main_mixer(data), memories(data)[0]
    base = {"attn_type": mixer, "memory": memory}
    series = [
        LengthSeries(f"{mixer} + memory", plain_levels(data, **base), NEEDLE),
        LengthSeries("+ distractor", plain_levels(data, **base, distractor="on"), NEEDLE),
        LengthSeries("+ window", plain_levels(data, **base, window="on"), NEEDLE),
    ]
    return length_table(data, "3", "Window and distractor loss with memory: needle accuracy", series)


# --- table 4 ----------------------------------------------------------------------------------------------------------


STEP = column_of("throughput", "step_seconds", "Step s")
MFU = column_of("throughput", "mfu_paper")
DROP = column_of("throughput", "mfu_drop", "Drop")
SPEED = column_of("throughput", "tokens_per_s", "Tokens/s")
MFU_ACTUAL = column_of("throughput", "mfu", "MFU honest")
TRAIN_SECONDS = column_of("throughput", "train_seconds", "Train s")


def _step_seconds(data: SweepData, cells: Sequence[CellState], number: str) -> TableEntry:
    """Return the entry of the seconds per optimizer step: the mean over seeds, with their standard deviation.

    It is the stored number of STEP where there is one (a published one), else the training seconds divided by the steps
    of the first cell. Without either it has no value.

    Args:
        data: The sweep.
        cells: Seeds of one configuration; may be empty.
        number: Table of the paper whose printed number is preferred.
    """
    published = measured_entry(data, cells, STEP, number)
    steps = cells[0].steps_total if cells else None
    if published.value is not None or not steps:
        return published
    train_seconds = measured_entry(data, cells, TRAIN_SECONDS)
    sd = train_seconds.sd / steps if train_seconds.sd is not None else None
    entry = derived_entry(
        data, STEP, train_seconds.value / steps if train_seconds.value is not None else None, [train_seconds], sd=sd
    )
    return replace(entry, seeds=train_seconds.seeds)


def table4(store: Store, data: SweepData) -> Table:
    """Return Table 4, training throughput: for each mixer rows alone, with each memory, and with distractor.

    Columns: seconds per step, MFU by the paper's formula, its relative drop against the mixer alone, and, where
    measured, tokens/s and MFU of the operations that are really done. Polar attention comes first, then by name. Where
    the table was printed, only printed configurations are shown; otherwise combinations that the sweep lacks have
    placeholders. `store` is not used.
    """
    memory_levels, number = memories(data), "4"
    printed = {key[0] for key in data.printed if key[1] == number}
    measured = [
        column for column in (SPEED, MFU_ACTUAL) if any(k[1:3] == (column.probe, column.metric) for k in data.values)
    ]
    lines = []
    for mixer in sorted(mixers(data), key=lambda name: (name != MAIN_MIXER, name)):
        rows = [(mixer, plain_levels(data, attn_type=mixer))]
        for memory in memory_levels:
            name = configuration_label(mixer, memory, len(memory_levels) == 1)
            rows.append((name, plain_levels(data, attn_type=mixer, memory=memory)))
            rows.append((f"{name} + distractor", plain_levels(data, attn_type=mixer, memory=memory, distractor="on")))
        alone: dict[tuple[str, ...], TableEntry] = {}
        for name, levels in rows:
            groups = cells_at_levels(data, levels) or {("-",) * len(data.extra_axes()): []}
            for group, cells in groups.items():
                if printed and not any(cell.cell_id in printed for cell in cells):
                    continue
                share = measured_entry(data, cells, MFU, number)
                first = alone.setdefault(group, share) if levels["memory"] == "off" else alone.get(group)
                line = [_step_seconds(data, cells, number), share, _drop_entry(data, first, share)]
                line += [measured_entry(data, cells, column) for column in measured]
                lines.append(TableRow(labels=(name, *group), entries=tuple(line), cells=cells))
    grid = [line.entries for line in lines]
    notes = [
        sweep_note(data),
        "Step s: seconds per optimizer step. MFU: in %, by the paper's formula, which counts the "
        "embedding, and attention in every layer. Drop: relative to the MFU of the mixer alone, in %.",
        *(["MFU honest: in %, counting only the operations performed."] if MFU_ACTUAL in measured else []),
        *seed_notes(grid, max((len(line.cells) for line in lines), default=0)),
        *placeholder_notes(grid),
        *(f"{discrepancy.slug}: {discrepancy.text}." for discrepancy in printed_discrepancies(data, number)),
    ]
    headings = [column.heading for column in (STEP, MFU, DROP, *measured)]
    title = "Training throughput"
    return build_table(
        data, number, title, ("Configuration", *data.extra_axes()), lines, numbers=headings, notes=notes, rank="column"
    )


def _drop_entry(data: SweepData, alone: TableEntry | None, share: TableEntry) -> TableEntry:
    """Return the entry of 1 - share / alone, the relative drop of MFU as a fraction; "-" for the mixer itself.

    It has no value where either MFU is missing or that of the mixer alone is 0.

    Args:
        data: The sweep.
        alone: MFU of the mixer alone; None where it has no cells. The same object as `share` for its own row.
        share: MFU of the row.
    """
    if alone is share:
        return TableEntry(text=EMPTY_TEXT, heading=DROP.heading, probe=DROP.probe, metric=DROP.metric)
    parts = [share] if alone is None else [alone, share]
    if alone is None or not alone.value or share.value is None:
        return derived_entry(data, DROP, None, parts, NO_CELL_TEXT if alone is None else "n/a")
    return derived_entry(data, DROP, 1 - share.value / alone.value, parts)


# --- table 5 ----------------------------------------------------------------------------------------------------------


def table5(store: Store, data: SweepData) -> Table:
    """Return Table 5, regularizer modes: one row per level of reg_mode, with its objective and numbers of cells.

    Columns: Mode, Objective (as the paper prints it, else "not in the paper"), Cells (all that train with it) and Done.
    `store` is not used.
    """
    objectives = {row["mode"]: row["objective"] for row in paper.rows("regularizers")}
    lines = []
    for mode in data.levels("reg_mode"):
        cells = [cell for cell in data.cells if cell.levels["reg_mode"] == mode]
        done = sum(data.standing(cell) == "done" for cell in cells)
        objective = objectives.get(mode, "not in the paper")
        entries = (count_entry("Cells", len(cells)), count_entry("Done", done))
        lines.append(TableRow(labels=(mode, objective), entries=entries, cells=cells))
    title = "Regularizer modes"
    return build_table(
        data, "5", title, ("Mode", "Objective"), lines, numbers=("Cells", "Done"), notes=[sweep_note(data)]
    )
