"""The table `open-weight`: losses in bits per token and needle accuracy beside open-weight models."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace

from ...results import paper
from ...results.contrasts import weighted
from ...results.store.records import CellState
from ...results.store.store import Store
from ..number_format import Column, column_of, large, length_name
from ..stats.effects.needle_baseline import needle_note
from ..sweep_data import Lengths, ReportError, SweepData, gather
from ..table import Entry, Table
from ..table_builder import NO_CELL, Line, assemble, derived, entry, seed_notes, sweep_note, word_notes
from .external_models import External, externals, notes_on
from .plain_cells import NATS, NEEDLE, OURS, chosen, memories, mixers, named, plain_levels, titled
from .printed_discrepancies import facts_of


def _ends(data: SweepData) -> list[int]:
    lengths = sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*NATS)})
    return list(dict.fromkeys((lengths[0], lengths[-1]))) if lengths else []


def _bits(probe: str, length: int, name: str) -> Column:
    if probe == "needle":
        return column_of(probe, "digit_accuracy", f"Ndl {name}", length=length)
    return column_of(probe, "bits", f"{probe.capitalize()} {name}", length=length)


def _own_entry(
    data: SweepData, cells: Sequence[CellState], column: Column, lengths: Sequence[int], loss: str = "nats"
) -> Entry:
    """A number of cells measured here in bits per token, at a length or (0) weighted over all of them."""
    metric = "digit_accuracy" if column.probe == "needle" else loss
    asked = [column.length] if column.length else lengths
    parts = [entry(data, cells, replace(column, metric=metric, length=length)) for length in asked]
    found = {length: part.value for length, part in zip(asked, parts, strict=True) if part.value is not None}
    scale = 1 / math.log(2) if metric == "nats" else 1.0
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
    if paper.is_published(data.sweep) and data.sweep not in (paper.SWEEPS[1], paper.OPEN_WEIGHT):
        raise ReportError(f"{data.sweep} has no open-weight table; ask for --sweep {paper.SWEEPS[1]}")
    ends = _ends(data)
    own = not paper.is_published(data.sweep)
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
    elsewhere = externals(store, data)
    data = replace(data, sources=dict(ChainMap(*(dict(one.data.sources) for one in elsewhere), dict(data.sources))))
    lines += _external_rows(elsewhere, data, columns)
    lines += _own_rows(data, columns) if own else []
    grid = [line.entries for line in lines]
    about = f"Clean and Junk: bits per token (published: per GPT-2 token of the text). {needle_note(data)} "
    n = max((len(line.cells) for line in lines), default=0)
    notes = [sweep_note(data), about + "WAvg: weighted by length.", *notes]
    notes += [*notes_on(elsewhere, ends), *seed_notes(grid, n), *word_notes(grid)]
    title = titled("open-weight", "Beside open-weight models", data)
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
        facts = facts_of(home, cell.cell_id)
        # attempts of a temporary database mean nothing in ours
        entries = (replace(one, origins=((cell.cell_id, None),)) for one in (entry(data, [cell], c) for c in columns))
        about = {"model": facts["model"]}
        lines.append(Line(words=(facts["model"], facts["params"]), entries=tuple(entries), cells=[cell], about=about))
    return lines


def _external_rows(found: Sequence[External], data: SweepData, columns: Sequence[Column]) -> list[Line]:
    """Where texts are paired the loss is over the very tokens of our own rows; else over tokens of GPT-2."""
    lengths = sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*NATS)})
    lines = []
    for one in found:
        loss = "bits" if one.native else "nats"
        entries = tuple(_own_entry(one.data, [one.cell], column, lengths, loss) for column in columns)
        lines.append(Line(words=(one.label, one.params), entries=entries, cells=[one.cell], about=one.about))
    return lines


def _own_rows(data: SweepData, columns: Sequence[Column]) -> list[Line]:
    lengths = sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*NATS)})
    known = memories(data)
    lines = []
    for memory in (*known, "off"):
        for mixer in sorted(mixers(data), key=lambda name: (name != OURS, name)):
            for group, cells in chosen(data, plain_levels(data, attn_type=mixer, memory=memory)).items():
                name = " ".join((named(mixer, memory, len(known) == 1), *(f"[{level}]" for level in group)))
                size = entry(data, cells, column_of("throughput", "parameters", "Params"))
                words = (name, large(size.value) if size.value is not None else "-")
                entries = tuple(_own_entry(data, cells, column, lengths) for column in columns)
                lines.append(Line(words=words, entries=entries, cells=cells, about={"model": name}))
    return lines
