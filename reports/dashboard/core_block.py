"""The core of a page: cells, numbers, attempts, origins and failures, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ... import __version__
from ...results.paper import OWNER
from ...results.store.records import Attempt, Provenance, Sample
from ...results.store.store import Store
from ..live.status import printed_source
from ..result_columns import complete_columns, extra_metrics
from ..stats.audit import homogeneity
from ..stats.effects.needle_baseline import ceiling, needle_caption
from ..stats.significance.trial_intervals import DIGITS
from ..sweep_data import SweepData, load_sweep_data, provenances_of_attempts
from ..table import Table, TableEntry
from ..tables.complete import table6
from ..tables.run_records import failures, provenance
from .caveats import sweep_caveats
from .curves import CellCurves, curve_facts
from .setup_and_progress import progress_json, setup_facts


def core(
    store: Store, data: SweepData, attempts: Sequence[Attempt], curves: Mapping[str, CellCurves]
) -> dict[str, Any]:
    """Everything but what is worked out of the numbers, and curves. Cells stand by their place in `cells`, attempts by id, metrics by `keys`."""
    launched = store.revision(data.sweep, data.revision)
    printed = printed_source(launched)
    table = table6(store, data)
    several = "Seeds" in table.columns
    keys = sorted({key[1:] for key in data.values})
    units = {key[1:]: value.unit for key, value in data.values.items() if value.unit}
    origins = provenance(store, load_sweep_data(store, data.sweep))
    groups = {attempt: r for r, row in enumerate(origins.entries) for _, attempt in row[0].origins}
    known = provenances_of_attempts(store, [attempt.id for attempt in attempts])
    audit = homogeneity(store, data.sweep, lengths=data.beyond)
    progress = progress_json(store, data)
    return {
        "sweep": data.sweep, "revision": data.revision, "version": __version__,
        "launched": None if printed else _moment(launched.created_at), "printed": printed,
        "commit": launched.git_commit, "dirty": launched.git_dirty, "grid": launched.grid_text,
        "done": data.done, "asked": setup_facts(store, data, launched), "progress": progress,
        "care": sweep_caveats(data, audit, running=progress["runs"]), "audit": audit, "notes": list(table.notes),
        "columns": _columns(data), "charts": _charts(data),
        "tables": {"mean": _rows(data, table)} | ({"each": _rows(data, table6(store, data, seeds=True, has_chances=False))} if several else {}),
        "keys": [_key(data, key, units.get(key, "")) for key in keys],
        "cells": _cells(store, data, keys, curves),
        "attempts": {attempt.id: _attempt(attempt, known.get(attempt.id), groups.get(attempt.id)) for attempt in attempts},
        "origins": {"columns": origins.columns[: origins.text_columns], "rows": [r[: origins.text_columns] for r in origins.rows]},
        "failures": _failures(failures(store, data)),
    }  # fmt: skip


def _moment(moment: datetime | None) -> str | None:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else None


def _columns(data: SweepData) -> list[dict[str, Any]]:
    """The numbers of the complete results, as their headings."""
    return [
        {name: getattr(column, name) for name in ("heading", "probe", "metric", "length", "percent")}
        | {"better": column.direction}
        for column in complete_columns(data)
    ]


SAME_TAIL = ("same_tail", "nats")
CHARTS = {
    ("clean", "nats"): "Clean: long documents",
    ("junk", "nats"): "Junk: across documents",
    DIGITS: "Needle: digits right",
}
"""The numbers that are drawn against the context length; after them the main ones of further probes."""


def _charts(data: SweepData) -> list[dict[str, Any]]:
    """One chart a probe."""
    titles = dict(CHARTS)
    if data.lengths(*SAME_TAIL):
        titles[SAME_TAIL] = "The same last tokens at every length"
    for probe, about in extra_metrics(data):
        if any(data.lengths(probe, about.name)) and probe not in {of for of, _ in titles}:
            titles[probe, about.name] = f"{about.heading}: {about.words.partition('.')[0] or about.name}"
    found = []
    for (probe, name), title in titles.items():
        about = data.metric(probe, name)
        unit = "%" if about.percent else about.unit
        chart = {"title": title, "probe": probe, "metric": name, "unit": unit, "percent": about.percent}
        found.append(chart | ({"hint": needle_caption(data)} if (probe, name) == DIGITS else {}))
    return found


def _key(data: SweepData, key: tuple[str, str, int], unit: str) -> dict[str, Any]:
    probe, metric, length = key
    about = data.metric(probe, metric)
    if (probe, metric) == DIGITS:
        # what the very trials allow, rather than a guess of a digit
        about = replace(about, chance=ceiling(data, length) or about.chance)
    told = about.definition
    return {"probe": probe, "metric": metric, "length": length, "unit": unit, "definition": told}


def _rows(data: SweepData, table: Table) -> dict[str, Any]:
    place = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    words = table.text_columns
    return {
        "words": table.columns[:words],
        "rows": [
            {"words": row[:words], "cells": [place[cell] for cell in entries[0].cells], "numbers": [_number(e) for e in entries]}
            for row, entries in zip(table.rows, table.entries, strict=True)
        ],
    }  # fmt: skip


def _number(one: TableEntry) -> list[Any]:
    """[printed, value, sd, seeds, best, attempt of every cell]."""
    return [one.text, one.value, one.sd, one.seeds, one.best, [attempt for _, attempt in one.origins]]


MAX_SAMPLE_STEPS = 12  # steps of a cell whose samples a page has: evenly over the training, with the last


def _cells(
    store: Store, data: SweepData, keys: Sequence[tuple[str, str, int]], curves: Mapping[str, CellCurves]
) -> list[dict[str, Any]]:
    place = {key: index for index, key in enumerate(keys)}
    values: dict[str, list[list[Any]]] = {}
    for v in data.values.values():
        row = [place[(v.probe, v.metric, v.length)], v.value, v.n, v.low, v.high, v.attempt_id, v.reason]
        values.setdefault(v.cell_id, []).append(row)
    found = []
    samples = store.samples([curve.attempt for curve in curves.values()])
    for cell in data.cells:
        curve = curves.get(cell.cell_id)
        written = _thinned(samples.get(curve.attempt, [])) if curve else []
        facts = {"id": cell.cell_id, "slug": cell.slug, "seed": cell.seed, "state": data.word(cell)}
        numbers = sorted(values.get(cell.cell_id, []), key=lambda row: row[0])
        facts |= {"cause": cell.cause, "axes": {**cell.levels, **cell.axes}, "values": numbers}
        facts |= {"curve": curve_facts(curve) if curve else None}
        found.append(facts | ({"samples": [[s.step, s.prompt, s.text] for s in written]} if written else {}))
    return found


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Those of SAMPLED steps at most."""
    steps = sorted({one.step for one in samples})
    every = max(1, -(-len(steps) // MAX_SAMPLE_STEPS))
    kept = set(steps[(len(steps) - 1) % every :: every])
    return [one for one in samples if one.step in kept]


def _attempt(attempt: Attempt, known: Provenance | None, group: int | None) -> dict[str, Any]:
    # the moment at which a published number came into this database says nothing of its run
    ran = attempt.owner != OWNER
    facts: dict[str, Any] = {"printed": not ran, "number": attempt.number, "kind": attempt.kind, "state": attempt.state}
    run = {"host": attempt.host, "started": _moment(attempt.started_at), "finished": _moment(attempt.finished_at)}
    facts |= run if ran else dict.fromkeys(run)
    facts |= {"commit": known.git_commit if known else None, "dirty": known.git_dirty if known else None}
    gpu = (known.gpu_name or known.device or None) if known else None
    return facts | {"gpu": gpu, "deviation": attempt.deviation, "origin": group}


def _failures(table: Table) -> dict[str, Any]:
    tracebacks = [row["traceback"] for row in table.raw]
    return {"columns": table.columns, "rows": table.rows, "tracebacks": tracebacks, "notes": table.notes[1:]}
