"""The paper's small tables, from any sweep: attention alone, memory, window and distractor, throughput, regularizers,
and the comparison with open-weight models.

They stand at the plain recipe: the regularizer `baseline` where the sweep has it (else its first), other switches off
unless the table is about them. A sweep of published numbers gives the rows and columns that were printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...results import paper
from ...results.store.records import AXES, CellState
from ...results.store.store import Store
from ..data import Entry, Lengths, ReportError, SweepData, Table, gather
from ..numbers import GUESS, Column, column_of, large, length_name, rounded
from .layout import NO_CELL, NOTHING, Line, assemble, derived, entry, reference_note, seed_notes, sweep_note, word_notes
from .printed import contradicted

OURS = "polar"
NATS, NEEDLE = ("clean", "nats"), ("needle", "digit_accuracy")
ZETTA = 1e21
UNITS = f"clean: nats per token; needle: digits right, in % (a guess: {GUESS})."


@dataclass(frozen=True)
class Series:
    """A column of a table over lengths: the levels that its cells stand at, and what is measured."""

    heading: str
    levels: dict[str, str]
    what: tuple[str, str]


def plain_levels(data: SweepData, **levels: str) -> dict[str, str]:
    """The plain recipe with the given levels."""
    modes = data.levels("reg_mode")
    mode = "baseline" if "baseline" in modes or not modes else modes[0]
    return {"reg_mode": mode, "distractor": "off", "memory": "off", "window": "off"} | levels


def chosen(data: SweepData, levels: dict[str, str]) -> dict[tuple[str, ...], list[CellState]]:
    """The cells at these levels, by their levels of the extra axes; several of one group differ in their seed."""
    found: dict[tuple[str, ...], list[CellState]] = {}
    for key, cells in data.configurations().items():
        if all(cells[0].levels[axis] == level for axis, level in levels.items()):
            found.setdefault(key[len(AXES) :], []).extend(cells)
    return found


def memories(data: SweepData) -> list[str]:
    """The levels of memory but `off`; `on` where the sweep has none."""
    return [level for level in data.levels("memory") if level != "off"] or ["on"]


def mixers(data: SweepData) -> list[str]:
    """The levels of attn_type by name."""
    return sorted(data.levels("attn_type"))


def ours_last(names: Iterable[str]) -> list[str]:
    """The names with our own mixer at the end, as the paper has it."""
    return sorted(names, key=lambda name: (name == OURS, name))


def _named(mixer: str, memory: str, one_memory: bool) -> str:
    if memory == "off":
        return mixer
    return f"{mixer} + memory" if one_memory else f"{mixer} + {memory}"


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
    notes = [sweep_note(data), UNITS, *seed_notes(grid, n), *reference_note(data), *word_notes(grid)]
    notes += [f"{one.slug}: {one.text}." for one in contradicted(data, number)]
    if not lines:
        notes.append("There is no context length yet: nothing was measured or asked for.")
    headings = ("Length", *extra)
    numbers = [one.heading for one in series]
    return assemble(
        data, number, _titled(number, title, data), headings, lines, numbers=numbers, notes=notes, rank="row"
    )


def _titled(number: str, title: str, data: SweepData) -> str:
    name = f"Table {number}. " if number.isdigit() else ""
    return f"{name}{title}, sweep {data.sweep}, revision {data.revision}"


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
        Series(f"{_named(mixer, memory, one)} {what[0]}", plain_levels(data, attn_type=mixer, memory=memory), what)
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


# --- throughput -----------------------------------------------------------------------------------------------------

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
    return replace(made, unit="s", seeds=whole.seeds)


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
            name = _named(mixer, memory, len(known) == 1)
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
    title = _titled(number, "Training throughput", data)
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


def table5(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Regularizer modes: what each asks for, and how many cells of the sweep train with it."""
    data = gather(store, sweep, revision=revision)
    objectives = {row["mode"]: row["objective"] for row in paper.rows("regularizers")}
    lines = []
    for mode in data.levels("reg_mode"):
        cells = [cell for cell in data.cells if cell.levels["reg_mode"] == mode]
        done = sum(data.standing(cell) == "done" for cell in cells)
        objective = objectives.get(mode, "not in the paper")
        count = Entry(text=str(len(cells)), heading="Cells", value=float(len(cells)))
        lines.append(
            Line(words=(mode, objective), entries=(count, replace(count, text=str(done), heading="Done", value=float(done))), cells=cells)
        )  # fmt: skip
    title = _titled("5", "Regularizer modes", data)
    return assemble(data, "5", title, ("Mode", "Objective"), lines, numbers=("Cells", "Done"), notes=[sweep_note(data)])


# --- beside open-weight models --------------------------------------------------------------------------------------


def _is_published(data: SweepData) -> bool:
    return data.sweep in (*paper.SWEEPS, paper.OPEN_WEIGHT)


def _facts(store: Store, cell: str) -> dict[str, str]:
    found = store.cell(cell).config.get("published", {})
    return {name: str(text) for name, text in found.items()}


def _ends(data: SweepData) -> list[int]:
    lengths = sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*NATS)})
    return list(dict.fromkeys((lengths[0], lengths[-1]))) if lengths else []


def _bits(probe: str, length: int, name: str) -> Column:
    if probe == "needle":
        return column_of(probe, "digit_accuracy", f"Ndl {name}", length=length)
    return column_of(probe, "bits", f"{probe.capitalize()} {name}", length=length)


def weighted(values: dict[int, float]) -> float:
    """Mean over lengths weighted by length: sum of L x value over sum of L (docs/mechanisms.md, "Losses")."""
    return math.fsum(length * value for length, value in values.items()) / sum(values)


def _own_entry(data: SweepData, cells: Sequence[CellState], column: Column, lengths: Sequence[int]) -> Entry:
    """A number of our own cells in bits per token, at a length or (0) weighted over all of them."""
    metric = "digit_accuracy" if column.probe == "needle" else "nats"
    asked = [column.length] if column.length else lengths
    parts = [entry(data, cells, replace(column, metric=metric, length=length)) for length in asked]
    found = {length: part.value for length, part in zip(asked, parts, strict=True) if part.value is not None}
    scale = 1.0 if column.probe == "needle" else 1 / math.log(2)
    whole = len(found) == len(parts) > 0
    made = derived(data, column, weighted(found) * scale if whole else None, parts, NO_CELL)
    return replace(made, seeds=max((part.seeds for part in parts), default=0))


def open_weight(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """Losses in bits per token and needle accuracy beside open-weight models, the published ones as printed.

    `WAvg` weights every length by itself. Our own rows are the plain recipe, computed from the sweep's numbers; published
    models are shown where the sweep's context lengths are theirs.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    if data.sweep == paper.SWEEPS[0]:
        raise ReportError(f"the first version has no open-weight table; ask for --sweep {paper.SWEEPS[1]}")
    ends = _ends(data)
    own = not _is_published(data)
    shown = [length_name(length) for length in ends] or ["shortest", "longest"]
    columns = [
        _bits(probe, length, name)
        for probe in ("clean", "junk", "needle")
        for length, name in zip((0, *(ends or (-1, -1))), ("WAvg", *shown), strict=True)
    ]
    lines: list[Line] = []
    if not own or ends == [paper.LENGTHS[0], paper.LENGTHS[-1]]:
        lines = _published_rows(store, columns)
        notes = ["Models by name: as the paper's second version prints them."]
    else:
        where = f"from {' to '.join(shown)}" if len(shown) > 1 else f"at {shown[0]} alone"
        notes = [f"The published models were measured from 2K to 64K tokens, this sweep {where}: left out."]
    lines += _own_rows(data, columns) if own else []
    grid = [line.entries for line in lines]
    about = "Clean and Junk: bits per token (published: per GPT-2 token of the text). Ndl: needle digits right, in %. "
    n = max((len(line.cells) for line in lines), default=0)
    notes = [sweep_note(data), about + "WAvg: weighted by length.", *notes, *seed_notes(grid, n), *word_notes(grid)]
    title = _titled("open-weight", "Beside open-weight models", data)
    numbers = [column.heading for column in columns]
    return assemble(
        data,
        "open-weight",
        title,
        ("Model", "Params"),
        lines,
        numbers=numbers,
        notes=notes,
        rank="column",
    )


def _published_rows(store: Store, columns: Sequence[Column]) -> list[Line]:
    home = paper.with_published(store, paper.OPEN_WEIGHT)
    data = gather(home, paper.OPEN_WEIGHT)
    lines = []
    for cell in data.cells:
        if not any((cell.cell_id, *NEEDLE, length) in data.values for length in paper.LENGTHS):
            continue
        facts = _facts(home, cell.cell_id)
        # attempts of a temporary database mean nothing in ours
        entries = (replace(one, origins=((cell.cell_id, None),)) for one in (entry(data, [cell], c) for c in columns))
        about = {"model": facts["model"]}
        lines.append(Line(words=(facts["model"], facts["params"]), entries=tuple(entries), cells=[cell], about=about))
    return lines


def _own_rows(data: SweepData, columns: Sequence[Column]) -> list[Line]:
    lengths = sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*NATS)})
    known = memories(data)
    lines = []
    for memory in (*known, "off"):
        for mixer in sorted(mixers(data), key=lambda name: (name != OURS, name)):
            for group, cells in chosen(data, plain_levels(data, attn_type=mixer, memory=memory)).items():
                name = " ".join((_named(mixer, memory, len(known) == 1), *(f"[{level}]" for level in group)))
                size = entry(data, cells, column_of("throughput", "parameters", "Params"))
                words = (name, large(size.value) if size.value is not None else "-")
                entries = tuple(_own_entry(data, cells, column, lengths) for column in columns)
                lines.append(Line(words=words, entries=entries, cells=cells, about={"model": name}))
    return lines


def budgets(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Training budgets of the open-weight models as printed, and of the sweep's own: 6 x parameters x tokens FLOPs.

    A ZF is 1e21 floating-point operations.
    """
    data = gather(store, sweep, revision=revision)
    if data.sweep == paper.SWEEPS[0]:
        raise ReportError(f"the first version has no table of budgets; ask for --sweep {paper.SWEEPS[1]}")
    other_store = paper.with_published(store, paper.OPEN_WEIGHT)
    other = gather(other_store, paper.OPEN_WEIGHT)
    printed = {row["model"] for row in paper.rows("budgets")}
    lines = []
    for cell in other.cells:
        facts = _facts(other_store, cell.cell_id)
        if facts["model"] in printed:
            words = tuple(facts[name] for name in ("model", "params", "train_tokens", "native_ctx", "train_flops"))
            lines.append(Line(words=words, cells=[cell], about=facts))
    if not _is_published(data):
        lines.append(_own_budget(store, data))
    title = _titled("budgets", "Training budgets", data)
    notes = [sweep_note(data), "Training FLOPs: 6 x parameters x tokens; ZF: 1e21."]
    headings = ("Model", "Params", "Train tokens", "Native context", "Train FLOPs")
    return assemble(data, "budgets", title, headings, lines, notes=notes)


def _range(texts: Iterable[str], unit: str = "") -> str:
    """One text, or the first and the last of several; a shared unit is printed once."""
    found = list(dict.fromkeys(texts))
    return (f"{found[0]}–{found[-1]}" if len(found) > 1 else found[0] if found else "-") + (unit if found else "")


def _own_budget(store: Store, data: SweepData) -> Line:
    sizes = {key[0]: value.value for key, value in data.values.items() if key[1:3] == ("throughput", "parameters")}
    known = [(size, cell.tokens_total) for cell in data.cells if (size := sizes.get(cell.cell_id)) is not None]
    known.sort(key=lambda pair: pair[0] * pair[1])
    contexts = {store.cell(cell.cell_id).config.get("train", {}).get("seq_len") for cell in data.cells[:1]}
    flops = [rounded(6 * size * tokens / ZETTA, 4) for size, tokens in known]
    if known and not float(flops[-1]):
        flops = [f"{6 * size * tokens / ZETTA:.2e}" for size, tokens in known]
    words = (
        f"sweep {data.sweep}",
        _range(large(size) for size in sorted(size for size, _ in known)),
        _range(large(tokens) for tokens in sorted({cell.tokens_total for cell in data.cells})),
        _range(length_name(length) for length in contexts if length),
        _range(flops, " ZF"),
    )
    return Line(words=words, cells=list(data.cells), about={"model": words[0]})
