"""The tables that the rivals' papers print, of any sweep: the flip-flop task, perplexity over context lengths, and four questionnaires
(docs/recipes.md, "The rivals' printed numbers").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from ...results import paper
from ...results.store.records import CellState
from ...results.store.store import Store
from ..number_format import BARE, Column, column_of, length_name, rounded
from ..sweep_data import Lengths, SweepData, gather
from ..table import Entry, Table
from ..table_builder import DUST, NOTHING, Line, derived, entry
from .task_rows import (
    RATIO,
    WRONG,
    Rows,
    named,
    of_seeds,
    of_sequences,
    rows_about,
    task_table,
    without_empty,
)

FLIPFLOP, EXTRAPOLATION, DOWNSTREAM = "flipflop", "extrapolation", "downstream"
PERPLEXITY = "perplexity"
TASKS = ("hellaswag", "arc_c", "mmlu", "winogrande")
AVERAGE = "average"
HEADINGS = {"iid": "IID", "sparse": "Sparse", "dense": "Dense"}
SETS = (
    "IID, Sparse, Dense: sequences in which every bit that is read is right, in %, of the test sets like training, with fewer and "
    "with more reads."
)


def flipflop(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Sequences of the flip-flop task without an error, in the three test sets, with the intervals of seeds and of sequences."""
    data = gather(store, sweep, revision=revision)
    rows = rows_about(data, FLIPFLOP)
    shares = {name: column_of(FLIPFLOP, f"exact_{name}", heading) for name, heading in HEADINGS.items()}
    lines = []
    for cells in rows.groups:
        found: list[Entry] = []
        for name, column in shares.items():
            mean = entry(data, cells, column)
            wrong = column_of(FLIPFLOP, f"error_{name}", f"{column.heading} {WRONG}", decimals=2)
            found += [mean, of_seeds(mean, column), of_sequences(data, cells, mean), entry(data, cells, wrong)]
        lines.append(Line(words=rows.words(cells), entries=tuple(found), cells=cells))
    notes = [SETS, *_coins(data, rows)]
    return task_table(
        store, rows, FLIPFLOP, "The flip-flop task", without_empty(lines, tuple(HEADINGS.values())), notes
    )


def extrapolation(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """Perplexity over context lengths, and how many times that of the shortest the perplexity of the longest is."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    rows = rows_about(data, EXTRAPOLATION)
    known = sorted({*data.lengths(EXTRAPOLATION, PERPLEXITY), *data.requested_lengths().get(EXTRAPOLATION, ())})
    about = data.metric(EXTRAPOLATION, PERPLEXITY)
    columns = [column_of(EXTRAPOLATION, about, f"PPL@{length_name(n)}", decimals=2, length=n) for n in known if n]
    lines = []
    for cells in rows.groups:
        found: list[Entry] = []
        for column in columns:
            mean = entry(data, cells, column)
            found += [mean, of_seeds(mean, column)]
        if len(columns) > 1:
            found += _ratio(data, cells, columns[0], columns[-1])
        lines.append(Line(words=rows.words(cells), entries=tuple(found), cells=cells))
    notes = ["PPL@L: exp of the mean cross-entropy over windows of L tokens.", *_trained(data, rows)]
    kept = tuple(column.heading for column in columns)
    return task_table(store, rows, EXTRAPOLATION, "Perplexity over context lengths", without_empty(lines, kept), notes)


def downstream(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Four questionnaires and their average."""
    data = gather(store, sweep, revision=revision)
    rows = rows_about(data, DOWNSTREAM)
    columns = [column_of(DOWNSTREAM, data.metric(DOWNSTREAM, name), decimals=1) for name in TASKS]
    average = column_of(DOWNSTREAM, data.metric(DOWNSTREAM, AVERAGE), "Avg", decimals=1)
    lines, differing = [], []
    for cells in rows.groups:
        found = [entry(data, cells, column) for column in columns]
        known = [one.value for one in found if one.value is not None]
        mean = derived(data, average, fmean(known) if len(known) == len(found) else None, found)
        printed = entry(data, cells, average)
        if printed.value is not None and mean.value is not None and printed.text != mean.text:
            exact = rounded(round(mean.value, DUST), 3, percent=True)
            differing.append(f"{named(rows.words(cells))} {printed.text}, of the four as printed {exact}")
        found.append(printed if printed.value is not None else mean)
        lines.append(Line(words=rows.words(cells), entries=tuple(found), cells=cells))
    notes = ["Questions answered rightly, in %. Avg: mean of the four."]
    if differing:
        notes.append(f"An average that is not the four's to the digit: {'; '.join(differing)}.")
    if rows.groups and all(one.seeds < 2 for line in lines for one in line.entries):
        notes.append("One run a configuration: how far runs lie apart is not known.")
    return task_table(store, rows, DOWNSTREAM, "Downstream tasks", lines, [*notes, *facts_besides(data.sweep)])


def _coins(data: SweepData, rows: Rows) -> list[str]:
    """What fair coins would get right of the very sequences, and how many those are."""
    told = []
    for name, heading in HEADINGS.items():
        values = [
            data.values.get((cell.cell_id, FLIPFLOP, f"coin_{name}", 0)) for cells in rows.groups for cell in cells
        ]
        known = {_small(value.value): value.n for value in values if value is not None and value.value is not None}
        told += [f"{heading} {share}" + (f" of {n:,}" if n else "") for share, n in known.items()]
    if told:
        return [f"Fair coins get exactly right: {', '.join(told)} sequences."]
    if data.sweep == paper.TRA:
        shares = {
            heading: _small(_coin_level(ignore)) for heading, ignore in zip(HEADINGS.values(), IGNORED, strict=True)
        }
        return [
            f"Fair coins get exactly right, by the task's definition: {', '.join(f'{a} {b}' for a, b in shares.items())}."
        ]
    return []


IGNORED = (0.8, 0.98, 0.1)
"""Probability of an instruction to ignore in the three test sets of the threshold paper."""
FREE_PAIRS = 254
"""Of the 256 pairs of a sequence: the first always writes, the last always reads."""


def _coin_level(ignore: float) -> float:
    """Mean of 2^-reads over sequences whose free pairs read with probability (1 - ignore) / 2 each."""
    return 0.5 * (1 - (1 - ignore) / 4) ** FREE_PAIRS


def _small(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 else f"{share:.0e}"


def _trained(data: SweepData, rows: Rows) -> list[str]:
    """The tokens of a training row."""
    known = {data.setting(cell, "train.seq_len") for cells in rows.groups for cell in cells}
    lengths = sorted(int(length) for length in known if length)
    return [f"Trained on rows of {' or '.join(f'{length:,}' for length in lengths)} tokens."] if lengths else []


def facts_besides(sweep: str) -> list[str]:
    """Return what a rival prints besides the numbers of its sweep: one line per place where it stands."""
    facts: list[tuple[str, str]] = []
    if sweep == paper.WALL:
        facts += [(row["where"], f"{row['setting']}: {row['printed']}") for row in paper.rows("wall-settings")]
        facts += [
            (row["where"], f"HellaSwag of {row['name']}: {row['hellaswag']}") for row in paper.rows("wall-hellaswag")
        ]
        facts += [
            (row["where"], f"{row['model']} {row['setting']}: {row['printed']}") for row in paper.rows("wall-recipes")
        ]
    if sweep == paper.ATLAS:
        facts += [(row["where"], f"{row['setting']}: {row['printed']}") for row in paper.rows("atlas-settings")]
    return [
        f"Printed there besides ({source}): {'; '.join(fact for where, fact in facts if where == source)}."
        for source in dict.fromkeys(where for where, _ in facts)
    ]


def _ratio(data: SweepData, cells: Sequence[CellState], first: Column, last: Column) -> list[Entry]:
    """Last over first seed by seed: mean and standard deviation, and Student's t interval."""
    column = replace(first, heading=RATIO, unit=BARE, length=0, metric="")
    pairs = [(data.numbers([cell], last), data.numbers([cell], first)) for cell in cells]
    found = [a[0] / b[0] for a, b in pairs if a and b]
    parts = [entry(data, cells, one) for one in (first, last)]
    spread = stdev(found) if len(found) > 1 else None
    made = derived(data, column, fmean(found) if found else None, parts, NOTHING, sd=spread)
    made = replace(made, probe="", direction=-1, length=None, seeds=len(found))
    return [made, of_seeds(made, column)]
