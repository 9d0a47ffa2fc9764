"""Tables of tasks that other papers print.

Flip-flop, recall, perplexity over lengths, questionnaires (docs/explanation/recipes.md, docs/experiments/memories.md). A row is a
configuration. A mean over seeds has their standard deviation and Student's t interval over seeds. A share of sequences
has Wilson's interval over the sequences of one seed in addition, since every seed reads the same sequences.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, stdev

from scipy import special

from ...results import metrics, paper
from ...results.intervals import wilson_of_trials
from ...results.store.records import AXES, CellState, MeasuredValue
from ...results.store.store import Store
from ..number_format import BARE, Column, column_of, format_length, format_number
from ..result_columns import AXIS_HEADINGS
from ..stats.claims.rival_claims import DOWNSTREAM_TASKS
from ..stats.significance.paired_tests import ALPHA
from ..stats.significance.trial_intervals import independent_trials
from ..sweep_data import SweepData, cell_level
from ..table import Table, TableEntry
from ..table_builder import (
    EMPTY_TEXT,
    ROUND_DECIMALS,
    TableRow,
    build_table,
    derived_entry,
    measured_entry,
    placeholder_notes,
    seed_notes,
    sweep_note,
)
from .open_weight import ExternalModel, external_model_notes, external_models
from .paper_rows import published_facts

FLIPFLOP, EXTRAPOLATION, DOWNSTREAM = "flipflop", "extrapolation", "downstream"
PERPLEXITY = "perplexity"
AVERAGE = "average"
HEADINGS = {"iid": "IID", "sparse": "Sparse", "dense": "Dense"}
SETS = (
    "IID, Sparse, Dense: sequences with all read bits correct, in %, on test sets like training, with "
    "fewer reads and with more reads."
)


def flipflop_table(store: Store, data: SweepData) -> Table:
    """Return the table `flipflop`: sequences without an error in the three test sets, one row per configuration.

    Per test set (IID, Sparse, Dense, in this order): the share of exact sequences, its interval over seeds, its
    interval over sequences, and the share of wrong reads. Columns other than the shares are left out where no row has a
    value. `store` gives names of published models.
    """
    rows = configurations_with_probe(data, FLIPFLOP)
    shares = {name: column_of(FLIPFLOP, f"exact_{name}", heading) for name, heading in HEADINGS.items()}

    def entries(cells: Sequence[CellState]) -> Iterator[TableEntry]:
        """Yield the entries of a configuration.

        Per test set the share, its two intervals and the share of wrong reads.
        """
        for name, column in shares.items():
            yield from with_intervals(data, cells, column)
            yield measured_entry(
                data, cells, column_of(FLIPFLOP, f"error_{name}", f"{column.heading} {WRONG}", decimals=2)
            )

    notes = [SETS, *_coin_notes(data, rows)]
    return task_table(
        store,
        rows,
        FLIPFLOP,
        "Flip-flop task",
        drop_empty_columns(rows.lines(entries), tuple(HEADINGS.values())),
        notes,
    )


def extrapolation_table(store: Store, data: SweepData) -> Table:
    """Return the table `extrapolation`: perplexity over context lengths, one row per configuration.

    Per length, measured or requested: the mean and its interval over seeds; then, with at least two lengths, the ratio
    of the longest to the shortest with its interval. Columns other than the means are left out where no row has a
    value.
    """
    rows = configurations_with_probe(data, EXTRAPOLATION)
    lengths = sorted({*data.lengths(EXTRAPOLATION, PERPLEXITY), *data.requested_lengths().get(EXTRAPOLATION, ())})
    metric = data.metric(EXTRAPOLATION, PERPLEXITY)
    columns = [column_of(EXTRAPOLATION, metric, f"PPL@{format_length(n)}", decimals=2, length=n) for n in lengths if n]

    def entries(cells: Sequence[CellState]) -> Iterator[TableEntry]:
        for column in columns:
            yield from (mean := measured_entry(data, cells, column), seed_interval_entry(mean, column))
        if len(columns) > 1:
            yield from _ratio_entries(data, cells, columns[0], columns[-1])

    notes = ["PPL@L: exp of the mean cross-entropy over windows of L tokens.", *_training_length_note(data, rows)]
    required_headings = tuple(column.heading for column in columns)
    return task_table(
        store,
        rows,
        EXTRAPOLATION,
        "Perplexity over context lengths",
        drop_empty_columns(rows.lines(entries), required_headings),
        notes,
    )


def downstream_table(store: Store, data: SweepData) -> Table:
    """Return the table `downstream`: one row per configuration, then one per open-weight model, a column per task.

    Tasks are those of lm-evaluation-harness. A score of a single run has its standard error over the questions in
    brackets. Without such scores the columns are the four questionnaires that another paper prints, and their average.
    """
    models = downstream_models(store, data)
    tasks = downstream_tasks([data, *(model.data for model in models)])
    if not tasks:
        return _questionnaires_table(store, data)
    rows = configurations_with_probe(data, DOWNSTREAM)
    lines = rows.lines(lambda cells: [_score_entry(data, cells, task) for task in tasks])
    blank = (EMPTY_TEXT,) * (len(rows.headings) - 1)
    for model in models:
        entries = tuple(_score_entry(model.data, [model.cell], task) for task in tasks)
        fields = model.json_fields
        lines.append(TableRow(labels=(model.label, *blank), entries=entries, cells=[model.cell], json_fields=fields))
    sources = ChainMap(*(dict(model.data.sources) for model in models), dict(data.sources))
    rows = replace(rows, data=replace(data, sources=dict(sources)))
    notes = [
        "Shares in %. In brackets: standard error over the questions of a single run.",
        f"Tasks of lm-evaluation-harness: {'; '.join(task.facts for task in tasks)}.",
        *external_model_notes(models, ()),
    ]
    return task_table(store, rows, DOWNSTREAM, "Downstream tasks", lines, notes)


@dataclass(frozen=True)
class DownstreamTask:
    """A task of lm-evaluation-harness with its main score, as reports show it."""

    column: Column
    chance: float | None
    """Score of a random choice, a fraction; None if the task has no choices or cells differ."""
    facts: str
    """Heading, task, metric, version, shots, questions and chance level, as a note lists them."""


def downstream_tasks(sweeps: Sequence[SweepData]) -> list[DownstreamTask]:
    """Return the tasks of which any cell of the sweeps has the main score or a reason for its absence, by heading."""
    values: dict[str, list[MeasuredValue]] = {}
    for value in chain(*(data.values.values() for data in sweeps)):
        if value.probe == DOWNSTREAM and value.description is not None and value.description.get("main") is True:
            values.setdefault(value.metric, []).append(value)
    tasks = []
    for name, measured in values.items():
        newest = max(measured, key=lambda value: (value.value is not None, value.attempt_id))
        metric = metrics.metric(DOWNSTREAM, name, newest.description, newest.unit)
        column = column_of(DOWNSTREAM, metric, metric.noun or str((newest.description or {}).get("task", name)))
        tasks.append(DownstreamTask(column, metric.chance, _task_facts(column, metric, measured)))
    return sorted(tasks, key=lambda task: (task.column.heading.lower(), task.column.metric))


def _task_facts(column: Column, metric: metrics.Metric, values: Sequence[MeasuredValue]) -> str:
    """Return the facts of a task as text; several versions, shots or numbers of questions are joined by "or"."""

    def each(facts: Iterable[object]) -> str:
        """Return the distinct facts that are known, joined by "or"; "?" without any."""
        return " or ".join(dict.fromkeys(str(fact) for fact in facts if fact is not None)) or "?"

    facts = [value.description or {} for value in values if value.value is not None] or [{}]
    limits = each(fact.get("limit") for fact in facts)
    texts = [
        f"{column.heading}: {metric.name.replace('/', ', ')}, version {each(fact.get('version') for fact in facts)}",
        f"{each(fact.get('shots') for fact in facts)} shots",
        f"{each(f'{value.n:,}' for value in values if value.n)} questions{f', the first {limits} of each task' if limits != '?' else ''}",
        *([f"chance level {metric.chance_text}"] if metric.chance is not None else []),
    ]
    return ", ".join(texts)


def downstream_models(store: Store, data: SweepData) -> list[ExternalModel]:
    """Return the open-weight models beside this sweep that were measured on downstream tasks."""
    return [
        model
        for model in external_models(store, data)
        if model.data.sweep != data.sweep
        and any(cell == model.cell.cell_id and probe == DOWNSTREAM for cell, probe, *_ in model.data.values)
    ]


def downstream_entry(data: SweepData, cells: Sequence[CellState], task: DownstreamTask) -> TableEntry:
    """Return the mean score of a task over cells of one configuration, also if the grid did not request the probe."""
    entry = measured_entry(replace(data, everything=True), cells, task.column)
    return entry if entry.value is not None or entry.reason else measured_entry(data, cells, task.column)


def _score_entry(data: SweepData, cells: Sequence[CellState], task: DownstreamTask) -> TableEntry:
    """Return the entry of a task; a single run has its standard error in brackets."""
    entry = downstream_entry(data, cells, task)
    key = (cells[0].cell_id, DOWNSTREAM, task.column.metric + metrics.STDERR_SUFFIX, 0)
    error = data.values[key].value if len(cells) == 1 and key in data.values else None
    if entry.value is None or error is None:
        return entry
    return replace(
        entry, text=f"{entry.text} ({format_number(error, task.column.decimals, percent=task.column.percent)})"
    )


def _questionnaires_table(store: Store, data: SweepData) -> Table:
    """Return the table `downstream` with four questionnaires and their average, in %, one row per configuration.

    They are hellaswag, arc_c, mmlu and winogrande. The average is the stored (printed) one where there is one, else the
    mean of the four if all are known. A note names printed averages that differ from that mean.
    """
    rows = configurations_with_probe(data, DOWNSTREAM)
    columns = [column_of(DOWNSTREAM, data.metric(DOWNSTREAM, name), decimals=1) for name in DOWNSTREAM_TASKS]
    average = column_of(DOWNSTREAM, data.metric(DOWNSTREAM, AVERAGE), "Avg", decimals=1)
    lines, differing = [], []
    for cells in rows.groups:
        entries = [measured_entry(data, cells, column) for column in columns]
        values = [entry.value for entry in entries if entry.value is not None]
        mean = derived_entry(data, average, fmean(values) if len(values) == len(entries) else None, entries)
        printed = measured_entry(data, cells, average)
        if printed.value is not None and mean.value is not None and printed.text != mean.text:
            exact = format_number(round(mean.value, ROUND_DECIMALS), 3, percent=True)
            differing.append(f"{configuration_text(rows.labels(cells))} {printed.text}, mean of the four {exact}")
        entries.append(printed if printed.value is not None else mean)
        lines.append(TableRow(labels=rows.labels(cells), entries=tuple(entries), cells=cells))
    notes = ["Correct answers, in %. Avg: mean of the four tasks."]
    if differing:
        notes.append(f"Printed averages that differ from the mean of the four printed numbers: {'; '.join(differing)}.")
    if rows.groups and all(entry.seeds < 2 for line in lines for entry in line.entries):
        notes.append("One run per configuration: variation between runs is unknown.")
    return task_table(store, rows, DOWNSTREAM, "Downstream tasks", lines, [*notes, *printed_fact_notes(data.sweep)])


def _coin_notes(data: SweepData, rows: TaskRows) -> list[str]:
    """Return the note on the share of sequences that fair coins get exactly right, per test set, as a list.

    It comes from stored values, or for the threshold paper (paper.TRA) from the task's definition; otherwise it is
    empty.
    """
    texts = []
    for name, heading in HEADINGS.items():
        values = [
            data.values.get((cell.cell_id, FLIPFLOP, f"coin_{name}", 0)) for cells in rows.groups for cell in cells
        ]
        counts_by_share = {
            _share_text(value.value): value.n for value in values if value is not None and value.value is not None
        }
        texts += [f"{heading} {share}" + (f" of {n:,}" if n else "") for share, n in counts_by_share.items()]
    if texts:
        return [f"Exactly correct by fair coins: {', '.join(texts)} sequences."]
    if data.sweep == paper.TRA:
        shares = {
            heading: _share_text(_coin_level(ignore))
            for heading, ignore in zip(HEADINGS.values(), IGNORED, strict=True)
        }
        return [
            "Exactly correct by fair coins, from the task's definition: "
            f"{', '.join(f'{a} {b}' for a, b in shares.items())}."
        ]
    return []


IGNORED = (0.8, 0.98, 0.1)
"""Probability of an ignore instruction in the three test sets of the threshold paper."""
FREE_PAIRS = 254
"""Free pairs of the 256 of a sequence: the first always writes, the last always reads."""


def _coin_level(ignore: float) -> float:
    """Return the mean of 2^-reads over sequences whose free pairs read with probability (1 - ignore) / 2 each."""
    return 0.5 * (1 - (1 - ignore) / 4) ** FREE_PAIRS


def _share_text(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 else f"{share:.0e}"


def _training_length_note(data: SweepData, rows: TaskRows) -> list[str]:
    """Return the note on the tokens of a training row, as a list; empty where no config says it."""
    row_lengths = {data.setting(cell, "train.seq_len") for cells in rows.groups for cell in cells}
    lengths = sorted(int(length) for length in row_lengths if length)
    return [f"Trained on rows of {' or '.join(f'{length:,}' for length in lengths)} tokens."] if lengths else []


def printed_fact_notes(sweep: str) -> list[str]:
    """Return the facts that another paper prints in addition to the numbers of its sweep: one note per source.

    A source is the printed table or section; facts within a note keep their stored order.

    Args:
        sweep: Name of a sweep; all but paper.WALL and paper.ATLAS give [].
    """
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
        f"Also printed there ({source}): {'; '.join(fact for where, fact in facts if where == source)}."
        for source in dict.fromkeys(where for where, _ in facts)
    ]


def _ratio_entries(data: SweepData, cells: Sequence[CellState], first: Column, last: Column) -> list[TableEntry]:
    """Return two entries: the ratio of the last column to the first, as a mean over seeds, and its t interval.

    The ratio is taken seed by seed, over seeds that have both numbers; less is better. Its standard deviation is the
    sample one, None with one seed. Without such a seed the value is None.

    Args:
        data: The sweep.
        cells: Seeds of one configuration.
        first: Column of the shortest length.
        last: Column of the longest length.
    """
    column = replace(first, heading=RATIO, unit=BARE, length=0, metric="")
    pairs = [(data.column_numbers([cell], last), data.column_numbers([cell], first)) for cell in cells]
    ratios = [a[0] / b[0] for a, b in pairs if a and b]
    parts = [measured_entry(data, cells, column) for column in (first, last)]
    spread = stdev(ratios) if len(ratios) > 1 else None
    entry = derived_entry(data, column, fmean(ratios) if ratios else None, parts, EMPTY_TEXT, sd=spread)
    entry = replace(entry, probe="", direction=-1, length=None, seeds=len(ratios))
    return [entry, seed_interval_entry(entry, column)]


# --- associative recall -----------------------------------------------------------------------------------------------


MQAR = "mqar"
SHARES = {"accuracy": "Answers", "exact": "Rows"}
MQAR_MEANT = (
    "Answers: correct answers, in %; Rows: rows without a wrong answer, in %; Loss: nats per answer, "
    "if only answers are trained on."
)


def associative_recall_table(store: Store, data: SweepData) -> Table:
    """Return the table `mqar`, a row per configuration: correct answers, rows without an error, loss per answer.

    Each of the two shares has its intervals over seeds and over sequences. Columns other than the shares are left out
    where no row has a value.
    """
    rows = configurations_with_probe(data, MQAR)
    shares = [column_of(MQAR, name, heading) for name, heading in SHARES.items()]
    loss = column_of("val", "val_loss", "Loss")
    lines = rows.lines(
        lambda cells: [
            *chain(*(with_intervals(data, cells, column) for column in shares)),
            measured_entry(data, cells, loss),
        ]
    )
    shown_rows = drop_empty_columns(lines, tuple(SHARES.values()))
    return task_table(store, rows, MQAR, "Associative recall", shown_rows, [MQAR_MEANT, *_guess_notes(data, rows)])


def _guess_notes(data: SweepData, rows: TaskRows) -> list[str]:
    """Return the note on the score expected from guessing among the values, as a list; empty where it is unknown.

    Several chance levels of the cells are joined by "or".
    """
    chance_levels = set()
    for cell in (cell for cells in rows.groups for cell in cells):
        value = data.values.get((cell.cell_id, MQAR, "accuracy", 0))
        if value is not None:
            chance_levels.add(metrics.metric(MQAR, "accuracy", value.description).chance)
    shares = sorted(share for share in chance_levels if share is not None)
    return (
        [f"Chance level (a random value): {' or '.join(format_number(share, 1, percent=True) for share in shares)} %."]
        if shares
        else []
    )


# --- MAD --------------------------------------------------------------------------------------------------------------


MAD = "mad"
MAD_TASKS = ("recall", "fuzzy", "noisy", "copying", "compression", "memorization")
"""Tasks in the order of the columns; names of `data.settings.mad.task`."""
MAD_NOTES = (
    "Score: mean over the tasks, each a mean over its difficulties, in %, as published (Poli et al., 2024). "
    "Per difficulty the best run over settings of training counts, also as published; it is chosen on the rows that are "
    "scored, which favours mixers with more runs.",
    "The paper's accuracy is a mean over classes, this one a mean over targets. Comparisons need equal states and equal "
    "parameters.",
)


def mad_table(store: Store, data: SweepData) -> Table:
    """Return the table `mad`: accuracy per task and the score, one row per configuration.

    Extra axes of the task's difficulty (those that decide `data.settings.mad`) and of training (those that change
    neither network nor data) have no rows of their own. A task that lacks a number at some difficulty of the sweep has
    the number of measured difficulties as its text. `store` is not used.
    """
    rows = _rows_without_difficulty(data, configurations_with_probe(data, MAD))
    settings = {cell.cell_id: _mad_setting(data, cell) for cells in rows.groups for cell in cells}
    difficulties = {task: sorted({each for each in settings.values() if each[0] == task}) for task in MAD_TASKS}
    tasks = [task for task in MAD_TASKS if difficulties[task]]
    column = column_of(MAD, "accuracy", "Score")

    def entries(cells: Sequence[CellState]) -> Iterator[TableEntry]:
        """Yield the entries of a row: one per task, then the score."""
        means = [
            _best_by_seed(
                data,
                [[cell for cell in cells if settings[cell.cell_id] == each] for each in difficulties[task]],
                column,
            )
            for task in tasks
        ]
        parts = [measured_entry(data, cells, column)]
        for task, (by_seed, measured) in zip(tasks, means, strict=True):
            missing_text = f"{measured} of {len(difficulties[task])}"
            yield _mean_entry(data, replace(column, heading=task.capitalize()), by_seed, parts, missing_text)
        seeds = set.intersection(*(set(by_seed) for by_seed, _ in means)) if means else set()
        scores = {seed: fmean(by_seed[seed] for by_seed, _ in means) for seed in seeds}
        yield _mean_entry(data, column, scores, parts, "incomplete")

    lines = rows.lines(entries)
    counts = ", ".join(f"{task} {len(difficulties[task])}" for task in tasks)
    notes = [*MAD_NOTES, f"Difficulties in this sweep: {counts}.", *_mad_chance_notes(data, rows, settings, tasks)]
    missing = [f"No number of the probe {MAD} was measured or requested."]
    numbers = [*(task.capitalize() for task in tasks), "Score"] if lines else []
    all_notes = [sweep_note(data), *(notes if lines else missing)]
    return build_table(
        data, MAD, "MAD: six synthetic tasks", rows.headings, lines, numbers=numbers, notes=all_notes, rank="column"
    )


def _mad_setting(data: SweepData, cell: CellState) -> tuple[str, str]:
    """Return (task, all settings of the corpus mad as text) of a cell."""
    settings = data.setting(cell, f"data.settings.{MAD}") or {}
    return str(settings.get("task", MAD_TASKS[0])), json.dumps(settings, sort_keys=True)


def _rows_without_difficulty(data: SweepData, rows: TaskRows) -> TaskRows:
    """Return the rows with the cells of all difficulties and training settings of a configuration in one group."""
    cells = [cell for group in rows.groups for cell in group]
    settings = {cell.cell_id: _mad_setting(data, cell) for cell in cells}

    def decides_task(axis: str) -> bool:
        """Return True if the level of the axis alone decides the settings of the task."""
        pairs = {(cell_level(cell, axis), settings[cell.cell_id]) for cell in cells}
        return len(pairs) == len({level for level, _ in pairs}) and len({setting for _, setting in pairs}) > 1

    every = (*AXES, *data.extra_axes())
    built = {
        cell.cell_id: json.dumps([data.setting(cell, name) for name in ("model", "data")], sort_keys=True)
        for cell in cells
    }

    def is_of_training(axis: str) -> bool:
        """Return True if cells that differ in the level of the axis alone have the same network and data."""
        by_rest: dict[tuple[str, ...], list[CellState]] = {}
        for cell in cells:
            rest = tuple(cell_level(cell, each) for each in every if each != axis)
            by_rest.setdefault((*rest, str(cell.seed)), []).append(cell)
        pairs = [group for group in by_rest.values() if len(group) > 1]
        return bool(pairs) and all(len({built[cell.cell_id] for cell in group}) == 1 for group in pairs)

    extra = [axis for axis in data.extra_axes() if not axis.startswith("data.")]
    axes = [*AXES, *(axis for axis in extra if not decides_task(axis) and not is_of_training(axis))]
    groups: dict[tuple[str, ...], list[CellState]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell_level(cell, axis) for axis in axes), []).append(cell)
    return TaskRows(data, list(groups.values()))


def _best_by_seed(
    data: SweepData, cells_by_difficulty: Sequence[Sequence[CellState]], column: Column
) -> tuple[dict[int, float], int]:
    """Return the mean over difficulties of the best accuracy by seed, and the number of difficulties with any number.

    Seeds without a number at some difficulty are left out.
    """
    best: list[dict[int, float]] = []
    for cells in cells_by_difficulty:
        by_seed: dict[int, float] = {}
        for cell in cells:
            for value in data.column_numbers([cell], column):
                by_seed[cell.seed] = max(value, by_seed.get(cell.seed, 0.0))
        best.append(by_seed)
    complete = set.intersection(*map(set, best)) if best else set()
    return {seed: fmean(each[seed] for each in best) for seed in sorted(complete)}, sum(map(bool, best))


def _mean_entry(
    data: SweepData, column: Column, by_seed: Mapping[int, float], parts: Sequence[TableEntry], missing_text: str
) -> TableEntry:
    """Return the mean over seeds with its sample standard deviation; `missing_text` without any seed."""
    values = list(by_seed.values())
    value = fmean(values) if values else None
    spread = stdev(values) if len(values) > 1 else None
    entry = derived_entry(data, column, value, parts, missing_text, sd=spread)
    return replace(entry, seeds=len(values), text=entry.text if values else missing_text)


def _mad_chance_notes(
    data: SweepData, rows: TaskRows, settings: Mapping[str, tuple[str, str]], tasks: Sequence[str]
) -> list[str]:
    """Return the note on the chance level of each task, a mean over its difficulties, as a list; empty if unknown."""
    levels: dict[str, dict[str, float]] = {task: {} for task in tasks}
    for cell in (cell for cells in rows.groups for cell in cells):
        value = data.values.get((cell.cell_id, MAD, "accuracy", 0))
        chance = metrics.metric(MAD, "accuracy", value.description).chance if value is not None else None
        if chance is not None:
            task, setting = settings[cell.cell_id]
            levels[task][setting] = chance
    means = {task: fmean(by_setting.values()) for task, by_setting in levels.items() if by_setting}
    texts = [f"{task} {format_number(mean, 1, percent=True)} %" for task, mean in means.items()]
    return [f"Chance level (a random value or token): {', '.join(texts)}."] if texts else []


# --- rows, headings and intervals that tables of tasks share ----------------------------------------------------------


SEEDS, SEQUENCES, WRONG, RATIO = "95% seeds", "95% sequences", "wrong reads", "longest/shortest"
MEANT = {
    SEEDS: "Student's t interval of the mean over seeds",
    SEQUENCES: "Wilson interval over the sequences of one seed",
    WRONG: "share of reads, in %",
    RATIO: "perplexity at the longest length divided by that at the shortest, by seed",
}
"""Meaning of each ending of a heading."""


@dataclass(frozen=True)
class TaskRows:
    """Configurations of a task table, and the axes that distinguish them.

    `groups` has the seeds of each configuration as one group. `axes` are attn_type and all others whose level differs
    between groups; `headings` are their column headings and `labels` the levels of a group. `seeds` is the size of the
    largest group, 0 without any.
    """

    data: SweepData
    groups: Sequence[Sequence[CellState]]

    @property
    def axes(self) -> list[str]:
        every = (*AXES, *self.data.extra_axes())
        levels = {axis: {cell_level(cells[0], axis) for cells in self.groups} for axis in every}
        return [axis for axis in every if axis == AXES[0] or len(levels[axis]) > 1]

    @property
    def headings(self) -> tuple[str, ...]:
        named = dict(zip(AXES, AXIS_HEADINGS, strict=True))
        return tuple(named.get(axis, axis) for axis in self.axes)

    def labels(self, cells: Sequence[CellState]) -> tuple[str, ...]:
        return tuple(cell_level(cells[0], axis) for axis in self.axes)

    def lines(self, entries: Callable[[Sequence[CellState]], Iterable[TableEntry]]) -> list[TableRow]:
        """Return one row per configuration, with the entries that `entries` makes from its cells."""
        return [
            TableRow(labels=self.labels(cells), entries=tuple(entries(cells)), cells=cells) for cells in self.groups
        ]

    @property
    def seeds(self) -> int:
        return max((len(cells) for cells in self.groups), default=0)


def configurations_with_probe(data: SweepData, probe: str) -> TaskRows:
    """Return the configurations with a stored number of the probe in any seed; all if the sweep requests it."""
    have = {cell for cell, of, *_ in data.values if of == probe}
    is_requested = any(name == probe for name, _ in data.requested)
    groups = data.configurations().values()
    return TaskRows(data, [cells for cells in groups if is_requested or any(cell.cell_id in have for cell in cells)])


def task_table(
    store: Store, rows: TaskRows, name: str, title: str, lines: Sequence[TableRow], notes: Sequence[str]
) -> Table:
    """Return the table of a task, with notes on its headings, on the spread between seeds and on missing numbers.

    Best values are ranked down a column.

    Args:
        store: The database, which has the names of published models.
        rows: The configurations.
        name: Name of the table and of the probe.
        title: Title of the table.
        lines: One row per configuration, all with the same columns; may be empty.
        notes: Further notes, dropped if there are no rows.
    """
    data, grid = rows.data, [line.entries for line in lines]
    published = paper.is_published(data.sweep)
    runs = max((entry.seeds for row in grid for entry in row), default=0)
    if published and runs > 1:
        has_deviation = any(entry.sd is not None for row in grid for entry in row)
        spread = [f"Mean{' ± standard deviation' if has_deviation else 's'} over {runs} runs, as printed."]
    else:
        spread = seed_notes(grid, rows.seeds)
    numbers = [entry.heading for entry in grid[0]] if grid else []
    meant = [f"{end}: {meaning}" for end, meaning in MEANT.items() if any(heading.endswith(end) for heading in numbers)]
    placeholder_texts = placeholder_notes([entry for entry in row if entry.low is None] for row in grid)
    all_notes = [
        sweep_note(data),
        *(notes if lines else []),
        *([f"{'; '.join(meant)}."] if meant else []),
        *spread,
        *placeholder_texts,
    ]
    all_notes += _paper_name_notes(store, rows) if published else []
    if not lines:
        all_notes.append(f"No number of the probe {name} was measured or requested.")
    return build_table(data, name, title, rows.headings, lines, numbers=numbers, notes=all_notes, rank="column")


def drop_empty_columns(lines: Sequence[TableRow], required_headings: Sequence[str]) -> list[TableRow]:
    """Return the rows without the columns that have no value in any row; [] without rows.

    An entry has no value if neither `value` nor `low` is set, so that a column of placeholder texts alone is dropped.

    Args:
        lines: The rows, all with the same columns.
        required_headings: Headings of columns that stay even if they are empty.
    """
    if not lines:
        return []
    indices = [
        index
        for index, entry in enumerate(lines[0].entries)
        if entry.heading in required_headings
        or any(line.entries[index].value is not None or line.entries[index].low is not None for line in lines)
    ]
    return [replace(line, entries=tuple(line.entries[index] for index in indices)) for line in lines]


def _paper_name_notes(store: Store, rows: TaskRows) -> list[str]:
    """Return the note on configurations with another name in the paper, as a list; empty where names agree."""
    texts = []
    for cells in rows.groups:
        name, labels = published_facts(store, cells[0].cell_id).get("name", ""), rows.labels(cells)
        if name and name.lower() != labels[0].lower():
            texts.append(f"{configuration_text(labels)} is {name}")
    return [f"Names in the paper: {', '.join(dict.fromkeys(texts))}."] if texts else []


def configuration_text(labels: Sequence[str]) -> str:
    """Return the levels of a configuration as one text, joined by spaces, without "none" and "-"."""
    return " ".join(word for word in labels if word not in ("none", EMPTY_TEXT))


def with_intervals(
    data: SweepData, cells: Sequence[CellState], column: Column
) -> tuple[TableEntry, TableEntry, TableEntry]:
    """Return three entries: the mean share of sequences, its interval over seeds, and that over sequences.

    Args:
        data: The sweep.
        cells: Seeds of one configuration.
        column: The share.
    """
    mean = measured_entry(data, cells, column)
    return mean, seed_interval_entry(mean, column), sequence_interval_entry(data, cells, mean)


def seed_interval_entry(mean: TableEntry, column: Column) -> TableEntry:
    """Return the 95 % Student's t interval of the mean over seeds, clipped to 0 and 1 for a share.

    Its bounds are `low` and `high` of the entry, which has no `value`. With fewer than two seeds, or without a standard
    deviation, there are no bounds and the text is "-".

    Args:
        mean: Entry of the mean, with standard deviation and number of seeds.
        column: Its column, which gives decimals and percent.
    """
    base = TableEntry(text=EMPTY_TEXT, heading=f"{mean.heading} {SEEDS}", unit=mean.unit, origins=mean.origins)
    if mean.value is None or mean.sd is None or mean.seeds < 2:
        return base
    reach = float(special.stdtrit(mean.seeds - 1, 1 - ALPHA / 2)) * mean.sd / math.sqrt(mean.seeds)
    low, high = mean.value - reach, mean.value + reach
    return _interval_entry(base, column, *((max(0.0, low), min(1.0, high)) if column.percent else (low, high)))


def sequence_interval_entry(data: SweepData, cells: Sequence[CellState], mean: TableEntry) -> TableEntry:
    """Return the 95 % Wilson interval of the mean share; n is the smallest number of sequences of any seed.

    Its bounds are `low` and `high` of the entry, which has no `value`. Without a mean, or where no seed's number of
    sequences is known, there are no bounds and the text is "-".

    Args:
        data: The sweep.
        cells: Seeds of one configuration.
        mean: Entry of the mean share, which names probe and metric.
    """
    column = Column("", mean.probe, mean.metric, 2, True)
    base = TableEntry(text=EMPTY_TEXT, heading=f"{mean.heading} {SEQUENCES}", unit=mean.unit, origins=mean.origins)
    measurements = (data.measured_value(cell, column) for cell in cells)
    counts = [n for value in measurements if value is not None and (n := independent_trials(value, data.values))]
    if mean.value is None or not counts:
        return base
    return replace(_interval_entry(base, column, *wilson_of_trials(mean.value, min(counts))), n=min(counts))


def _interval_entry(base: TableEntry, column: Column, low: float, high: float) -> TableEntry:
    bounds = (format_number(round(end, ROUND_DECIMALS), column.decimals, percent=column.percent) for end in (low, high))
    return replace(base, text=f"[{', '.join(bounds)}]", low=low, high=high)
