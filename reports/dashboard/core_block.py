"""Core block of a page as JSON: cells, numbers, attempts, origins and failures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ... import __version__
from ...results.paper import OWNER
from ...results.store.records import Attempt, CellState, Provenance, Sample
from ...results.store.store import Store
from ..figures.canvas.drawing import level_label
from ..live.status import printed_source
from ..number_format import Column, format_length
from ..result_columns import complete_columns, extra_metrics
from ..stats.audit import audit_differences
from ..stats.effects.effects import varying_axes
from ..stats.effects.needle_baseline import constant_answer_score, needle_caption
from ..stats.significance.trial_intervals import DIGIT_ACCURACY
from ..sweep_data import SweepData, cell_level, load_sweep_data, provenances_of_attempts
from ..table import Table, TableEntry
from ..tables.complete import table6
from ..tables.run_records import failures_table, provenance_table
from .caveats import sweep_caveats
from .curves import CellCurves, curve_facts
from .parallel_axes import parallel_axes, scale_headings
from .setup_and_progress import progress_json, setup_facts


def core_block(
    store: Store, data: SweepData, attempts: Sequence[Attempt], curves: Mapping[str, CellCurves]
) -> dict[str, Any]:
    """Return the JSON of the core block: everything except computed results and curves.

    Cells are referred to by index in `cells`, attempts by id, and metrics by index in `keys`.

    Args:
        store: The database.
        data: The sweep.
        attempts: All attempts of its cells.
        curves: Training curves by cell id.

    Returns:
        Facts of the launch (sweep, revision, version, launched, printed, commit, grid), done (number of cells),
        asked (`setup_facts`), progress (`progress_json`), care (caveats), audit and notes (sentences), columns, order (of the columns,
        `_column_order`), metrics, charts,
        tables ("mean", and "each" with a row per seed if configurations have several), keys, cells, attempts (by id),
        origins and failures.
    """
    launched = store.revision(data.sweep, data.revision)
    printed = printed_source(launched)
    table = table6(store, data)
    several = "Seeds" in table.columns
    keys = sorted({key[1:] for key in data.values})
    units = {key[1:]: value.unit for key, value in data.values.items() if value.unit}
    key_facts = [_key_facts(data, key, units.get(key, "")) for key in keys]
    origins = provenance_table(store, load_sweep_data(store, data.sweep))
    provenance_by_attempt = provenances_of_attempts(store, [attempt.id for attempt in attempts])
    audit = audit_differences(store, data.sweep, lengths=data.extra_lengths_option)
    progress = progress_json(store, data)
    return {
        "sweep": data.sweep, "revision": data.revision, "version": __version__,
        "launched": None if printed else _moment_text(launched.created_at), "printed": printed,
        "commit": _commit_text(launched.git_commit, dirty=launched.git_dirty), "grid": launched.grid_text,
        "done": data.done, "asked": setup_facts(store, data, launched), "progress": progress,
        "care": sweep_caveats(data, audit, running=progress["runs"]), "audit": audit, "notes": list(table.notes),
        "columns": _column_facts(data, key_facts), "order": _column_order(complete_columns(data)), "metrics": _metric_texts(data, key_facts), "charts": _chart_facts(data),
        "tables": {"mean": _table_rows(data, table)} | ({"each": _table_rows(data, table6(store, data, seeds=True, has_chances=False))} if several else {}),
        "keys": key_facts,
        "cells": _cell_facts(store, data, keys, curves),
        "attempts": {attempt.id: _attempt_facts(attempt, provenance_by_attempt.get(attempt.id)) for attempt in attempts},
        "origins": {"columns": origins.columns, "rows": origins.rows},
        "failures": _failure_facts(failures_table(store, data)),
    }  # fmt: skip


def _moment_text(moment: datetime | None) -> str | None:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else None


NOT_RECORDED = "not recorded"


def _commit_text(commit: str | None, *, dirty: bool | None) -> str:
    return f"{commit}{' with changes' if dirty else ''}" if commit else NOT_RECORDED


def _column_facts(data: SweepData, key_facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a dict per column of Table 6: heading, probe, metric, length, percent, better (1, -1 or 0) and definition."""
    definitions = {(key["probe"], key["metric"]): key["definition"] for key in reversed(key_facts)}
    return [
        {name: getattr(column, name) for name in ("heading", "probe", "metric", "length", "percent")}
        | {"better": column.direction, "definition": definitions.get((column.probe, column.metric), "")}
        for column in complete_columns(data)
    ]


def _column_order(columns: Sequence[Column]) -> list[int]:
    """Return the indices of the columns as the table shows them: the needle first, each measure's longest length before the rest."""
    longest = {column.probe: index for index, column in enumerate(columns)}  # columns are sorted by length

    def rank(index: int) -> tuple[bool, bool]:
        return longest[columns[index].probe] != index, columns[index].probe != "needle"

    return sorted(range(len(columns)), key=rank)


def _metric_texts(data: SweepData, key_facts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return [PROBE.METRIC, its definition, unit, context lengths and columns as sentences] of every metric."""
    columns = complete_columns(data)
    keys_by_metric: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for key in key_facts:
        keys_by_metric.setdefault((key["probe"], key["metric"]), []).append(key)
    texts = []
    for (probe, metric), keys in keys_by_metric.items():
        headings = [column.heading for column in columns if (column.probe, column.metric) == (probe, metric)]
        lengths = [format_length(key["length"]) for key in keys if key["length"]]
        sentences = [keys[0]["definition"]]
        sentences += [f"Unit: {keys[0]['unit']}."] if keys[0]["unit"] else []
        sentences += [f"At context lengths {', '.join(lengths)}."] if lengths else []
        sentences += [f"Shown as {', '.join(headings)}."] if headings else []
        texts.append([f"{probe}.{metric}", " ".join(filter(None, sentences))])
    return texts


SAME_TAIL = ("same_tail", "nats")
CHARTS = {
    ("clean", "nats"): "Clean: long documents",
    ("junk", "nats"): "Junk: across documents",
    DIGIT_ACCURACY: "Needle: digits recalled",
}
"""Numbers that are drawn over the context length; the main ones of extra probes follow."""


def _chart_facts(data: SweepData) -> list[dict[str, Any]]:
    """Return a dict per chart of a number over lengths: title, probe, metric, unit and percent.

    That of the needle has the key hint, too. They are clean loss, junk loss and needle accuracy (with or without
    numbers), same_tail if measured, and the first metric over lengths of each extra probe.
    """
    titles = dict(CHARTS)
    if data.lengths(*SAME_TAIL):
        titles[SAME_TAIL] = "Same last tokens at every length"
    for probe, extra_metric in extra_metrics(data):
        if any(data.lengths(probe, extra_metric.name)) and probe not in {of for of, _ in titles}:
            titles[probe, extra_metric.name] = (
                f"{extra_metric.heading}: {extra_metric.words.partition('.')[0] or extra_metric.name}"
            )
    charts = []
    for (probe, name), title in titles.items():
        extra_metric = data.metric(probe, name)
        unit = "%" if extra_metric.percent else extra_metric.unit
        chart = {"title": title, "probe": probe, "metric": name, "unit": unit, "percent": extra_metric.percent}
        charts.append(chart | ({"hint": needle_caption(data)} if (probe, name) == DIGIT_ACCURACY else {}))
    return charts


def _key_facts(data: SweepData, key: tuple[str, str, int], unit: str) -> dict[str, Any]:
    """Return probe, metric, length, printed unit, scale from stored to printed, and definition (text) of a number.

    Fractions are printed in %, at a scale of 100. The definition has the chance level.

    That of needle accuracy is the constant-digit baseline of its trials where that is known.

    Args:
        data: The sweep.
        key: (probe, metric, length).
        unit: Unit of the stored values.
    """
    probe, metric, length = key
    description = data.metric(probe, metric)
    if (probe, metric) == DIGIT_ACCURACY:
        # the constant-digit baseline of these trials, rather than the chance level of a digit
        description = replace(description, chance=constant_answer_score(data, length) or description.chance)
    definition = description.definition
    printed_unit, scale = ("%", 100) if unit == "fraction" else (unit, 1)
    return {
        "probe": probe,
        "metric": metric,
        "length": length,
        "unit": printed_unit,
        "scale": scale,
        "definition": definition,
    }


def _table_rows(data: SweepData, table: Table) -> dict[str, Any]:
    """Return the JSON of a table: words (headings of the text columns), rows, and looks.

    The looks are scales (`scale_headings`), axes (`parallel_axes`) and heat (`_heat_ends` of each column).

    A row has words (its texts), cells (indices in the sweep, those of its first number) and numbers: per entry [text,
    value, sd, seeds, best, attempt ids].
    """
    cell_index = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    n_text_columns = table.text_columns
    columns = complete_columns(data)
    return {
        "words": table.columns[:n_text_columns],
        "scales": scale_headings(table),
        "axes": parallel_axes(data, table),
        "heat": [_heat_ends([entries[index].value for entries in table.entries], column.direction) for index, column in enumerate(columns)],
        "rows": [
            {"words": row[:n_text_columns], "cells": [cell_index[cell] for cell in entries[0].cells], "numbers": [_number_facts(e) for e in entries]}
            for row, entries in zip(table.rows, table.entries, strict=True)
        ],
    }  # fmt: skip


def _heat_ends(column_values: Sequence[float | None], direction: int) -> list[float] | None:
    """Return the poor and the good end of a column's shading, a twentieth of outliers at each end left out.

    Args:
        column_values: Numbers of the column, None where missing.
        direction: 1 if more is better, -1 if less is, 0 if neither.

    Returns:
        [poor, good], or None for fewer than three numbers, equal ends or no better side.
    """
    values = sorted(value for value in column_values if value is not None)
    if not direction or len(values) < 3:
        return None
    ends = [values[math.floor(share * (len(values) - 1) + 0.5)] for share in (0.05, 0.95)]
    return None if ends[0] == ends[1] else ends[::direction]


def _number_facts(entry: TableEntry) -> list[Any]:
    """Return [printed text, value or None, sd or None, seeds, best, attempt id (or None) of every cell] of a number."""
    return [entry.text, entry.value, entry.sd, entry.seeds, entry.best, [attempt for _, attempt in entry.origins]]


MAX_SAMPLE_STEPS = 12  # steps per cell whose text samples a page carries: evenly spaced, the last among them


def _cell_facts(
    store: Store, data: SweepData, keys: Sequence[tuple[str, str, int]], curves: Mapping[str, CellCurves]
) -> list[dict[str, Any]]:
    """Return the JSON of every cell, in the grid's order.

    Keys: id, slug, name (`_cell_name`), seed, state (status), cause, axes (level by axis), values, curve (`curve_facts` or None) and, where
    there are any, samples ([step, prompt, text]). A value is [index of its key, value, n, low, high, attempt id,
    reason].

    Args:
        store: The database.
        data: The sweep.
        keys: (probe, metric, length) of every number; values refer to them by index.
        curves: Training curves by cell id.
    """
    key_index = {key: index for index, key in enumerate(keys)}
    values: dict[str, list[list[Any]]] = {}
    for v in data.values.values():
        row = [key_index[(v.probe, v.metric, v.length)], v.value, v.n, v.low, v.high, v.attempt_id, v.reason]
        values.setdefault(v.cell_id, []).append(row)
    cells = []
    samples = store.samples([curve.attempt for curve in curves.values()])
    axes, has_seeds = varying_axes(data), len({cell.seed for cell in data.cells}) > 1
    for cell in data.cells:
        curve = curves.get(cell.cell_id)
        written = _thinned_samples(samples.get(curve.attempt, [])) if curve else []
        facts = {
            "id": cell.cell_id,
            "slug": cell.slug,
            "name": _cell_name(cell, axes, has_seeds=has_seeds),
            "seed": cell.seed,
            "state": data.status_word(cell),
        }
        numbers = sorted(values.get(cell.cell_id, []), key=lambda row: row[0])
        facts |= {"cause": cell.cause, "axes": {**cell.levels, **cell.axes}, "values": numbers}
        facts |= {"curve": curve_facts(curve) if curve else None}
        cells.append(facts | ({"samples": [[s.step, s.prompt, s.text] for s in written]} if written else {}))
    return cells


def _cell_name(cell: CellState, axes: Sequence[str], *, has_seeds: bool) -> str:
    """Return a cell in plain words: its levels on the axes that vary, without those that are off, and its seed.

    The name is the slug if nothing varies.
    """
    labels = [level_label(cell_level(cell, axis), axis) for axis in axes]
    names = [label for label in labels if label and not label.startswith("no ")]
    return ", ".join([*names, *([f"seed {cell.seed}"] if has_seeds else [])]) or cell.slug


def _thinned_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the text samples of at most 12 evenly spaced steps, the last step among them.

    The order stays.
    """
    steps = sorted({sample.step for sample in samples})
    stride = max(1, -(-len(steps) // MAX_SAMPLE_STEPS))
    selected_steps = set(steps[(len(steps) - 1) % stride :: stride])
    return [sample for sample in samples if sample.step in selected_steps]


def _attempt_facts(attempt: Attempt, recorded: Provenance | None) -> list[list[str]]:
    """Return the facts of an attempt as [name, text] pairs, in the order of the page; those without a text are left out.

    Names: Attempt, Commit, GPU or device, Host, Started, Finished and Deviation from the request. A printed number never
    ran here: it has no host and no times.

    Args:
        attempt: The attempt.
        recorded: Its provenance; None if not recorded.
    """
    summary = f"number {attempt.number} of its cell, {attempt.kind}, {attempt.state}"
    facts = {
        "Attempt": f"{attempt.id} ({'the authors’ run; nothing ran here' if attempt.owner == OWNER else summary})",
        "Commit": _commit_text(recorded.git_commit, dirty=recorded.git_dirty) if recorded else NOT_RECORDED,
        "GPU or device": (recorded.gpu_name or recorded.device if recorded else None) or NOT_RECORDED,
    }
    # the time at which a published number was imported says nothing about its run
    if attempt.owner != OWNER:
        moments = {"Started": _moment_text(attempt.started_at), "Finished": _moment_text(attempt.finished_at)}
        facts |= {name: text for name, text in {"Host": attempt.host, **moments}.items() if text}
    if attempt.deviation:
        facts["Deviation from the request"] = json.dumps(attempt.deviation)
    return [[name, text] for name, text in facts.items()]


def _failure_facts(table: Table) -> dict[str, Any]:
    tracebacks = [row["traceback"] for row in table.raw]
    return {"columns": table.columns, "rows": table.rows, "tracebacks": tracebacks, "notes": table.notes[1:]}
