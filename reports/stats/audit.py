"""Audit of the cells of a sweep: everything that differs between them besides their axes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ...results.console.text import counted
from ...results.paper import OWNER
from ...results.store.records import Attempt, CellState, Provenance
from ...results.store.store import Store
from .. import cell_filter
from ..sweep_data import (
    ExtraLengths,
    SweepData,
    attempts_of_sweep,
    cached_result,
    load_sweep_data,
    provenances_of_attempts,
)

MAX_LISTED = 3  # largest number of values that are named; the rest is counted
IGNORED_SETTINGS = (
    "seed",
    "resources.",
    "checkpoint.",
    "plugins",
    "published",
    "data.fingerprint",
    "data.corpus",
    "data.tokenizer",
    "eval.probes",
    "eval.lengths",
)
"""Beginnings of settings that cannot change a stored number, or that are reported separately.

Requested probes and lengths of an attempt, for example, change none of its numbers.
"""
TEXT_AXIS_PREFIX = "data."
TEXT_FACTS = ("tokenizer", "corpus")
"""Facts that an axis over texts (a setting that begins with TEXT_AXIS_PREFIX) explains."""
ALWAYS_NAMED = "train.micro_batch"
"""Setting that is reported even where an axis explains it, since regularizers depend on it."""
PROVENANCE_FACTS: Mapping[str, Callable[[Provenance], object]] = {
    "GPU": lambda p: p.gpu_name or p.device or None,
    "driver": lambda p: p.driver,
    "code": lambda p: p.git_commit[:12] + (" with changes" if p.git_dirty else "") if p.git_commit else None,
    "Python": lambda p: p.python or None,
    "precision": lambda p: p.dtype or None,
    "tokenizer": lambda p: p.tokenizer or None,
    "corpus": lambda p: f"{p.corpus} {p.corpus_fingerprint[:12]}".strip() or None,
    "threads": lambda p: p.threads if p.device == "cpu" else None,
}
"""Facts about an attempt by name, each read from its provenance; None where not recorded."""


def audit_differences(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: ExtraLengths = None
) -> list[str]:
    """Return one line for everything that differs between the cells whose numbers are shown.

    In this order: GPU, driver, code (commit), Python, precision, tokenizer, corpus, CPU threads, package versions,
    kernels, plugins of probes and settings of the config. Except for the paper's sweeps, settings changed by a retry,
    restarts, shared GPUs and co-tenancy follow. A last line lists what was not recorded. A setting that follows the
    levels of one axis is intended and left out, except train.micro_batch.

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last.
        revision: Revision of the sweep; None for the newest.
        lengths: Extra context lengths in tokens whose numbers are included; "all" for every measured one.

    Returns:
        Lines without a final full stop; empty if nothing differs and everything was recorded.

    Raises:
        SweepUnknown: No such sweep.
        ReportError: Nothing was measured at one of `lengths`.
    """
    data = load_sweep_data(store, sweep, revision=revision, lengths=lengths)
    return list(cached_result(data, "audit", lambda: _difference_lines(store, data)))


def _difference_lines(store: Store, data: SweepData) -> list[str]:
    """Return the lines of `audit_differences` for a sweep that is read already."""
    used = {value.attempt_id for value in data.shown_values.values()}
    cells = {cell.cell_id: cell for cell in data.cells}
    by_cell = provenances_of(store, data)
    attempts = attempts_of_sweep(store, data)
    paper = bool(attempts) and all(attempt.owner == OWNER for attempt in attempts)
    texts = {
        cell.cell_id: {axis: level for axis, level in cell.axes.items() if axis.startswith(TEXT_AXIS_PREFIX)}
        for cell in data.cells
    }
    axes = {name: texts if name in TEXT_FACTS else None for name in PROVENANCE_FACTS}
    lines = [
        line for name, fact in PROVENANCE_FACTS.items() if (line := _difference_line(name, by_cell, fact, axes[name]))
    ]
    lines += _lines_by_name("package", by_cell, lambda p: p.packages) + _lines_by_name(
        "kernel of", by_cell, lambda p: p.kernels
    )
    lines += _plugin_lines(data)
    lines += _setting_lines(
        data, {cell: provenances[-1].config for cell, provenances in by_cell.items() if provenances}
    )
    if not paper:
        lines += _deviation_lines([attempt for attempt in attempts if attempt.id in used])
        lines += _restart_lines(attempts, cells)
        lines += _gpu_sharing_lines(by_cell)
        lines += _co_tenancy_lines(
            [attempt for attempt in _all_attempts(store, data, attempts) if attempt.id in used or data.only]
        )
    return lines + _unrecorded_lines(by_cell, paper)


def _all_attempts(store: Store, data: SweepData, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempts of all cells of the sweep, also of cells that a filter hides, which shared the GPUs.

    Without a filter these are `attempts`; with one the sweep is read again without it.
    """
    if not data.only:
        return attempts
    with cell_filter.filtered_cells(data.sweep, ()):
        return attempts_of_sweep(store, load_sweep_data(store, data.sweep, revision=data.revision))


def provenances_of(store: Store, data: SweepData) -> dict[str, list[Provenance]]:
    """Return, for each cell with shown numbers, the provenances of the attempts behind them, oldest attempt first.

    Keys are cell ids. Attempts without a recorded provenance are left out, so a list may be empty.
    """
    attempts_by_cell: dict[str, set[int]] = defaultdict(set)
    for (cell, *_), value in data.shown_values.items():
        attempts_by_cell[cell].add(value.attempt_id)
    by_attempt = provenances_of_attempts(
        store, {attempt for attempt_ids in attempts_by_cell.values() for attempt in attempt_ids}
    )
    return {
        cell: [by_attempt[attempt] for attempt in sorted(attempt_ids) if attempt in by_attempt]
        for cell, attempt_ids in attempts_by_cell.items()
    }


def _cells_by_value(pairs: Iterable[tuple[str, object]]) -> dict[str, set[str]]:
    """Return the ids of the cells with each value, by the value as text; a cell may have several values."""
    groups: dict[str, set[str]] = defaultdict(set)
    for cell, value in pairs:
        groups[str(value)].add(cell)
    return groups


def _line(name: str, groups: Mapping[str, set[str]]) -> str:
    """Return "<name> differs: VALUE (N cells), ..." with the most frequent values first.

    At most three values are named and the others counted.
    """
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    values_text = [f"{value} ({counted(len(cells), 'cell')})" for value, cells in ranked[:MAX_LISTED]]
    rest_text = f", and {len(ranked) - MAX_LISTED} more" if len(ranked) > MAX_LISTED else ""
    return f"{name} differs: {', '.join(values_text)}{rest_text}"


def _difference_line(
    name: str,
    by_cell: Mapping[str, Sequence[Provenance]],
    fact: Callable[[Provenance], object],
    levels: Mapping[str, Mapping[str, str]] | None = None,
) -> str | None:
    """Return the line on a fact that differs between cells; None if it does not, or follows one of the axes.

    Args:
        name: Name of the fact in the line.
        by_cell: Provenances by cell id.
        fact: Reads the fact; None means not recorded and is ignored.
        levels: Level by axis, by cell id, of axes that may explain the fact; None or empty for no such axes.
    """
    pairs = [(cell, fact(provenance)) for cell, provenances in by_cell.items() for provenance in provenances]
    groups = _cells_by_value((cell, value) for cell, value in pairs if value is not None)
    if len(groups) < 2 or (levels and _follows_an_axis({cell: str(value) for cell, value in pairs}, levels)):
        return None
    return _line(name, groups)


def _lines_by_name(
    prefix: str, by_cell: Mapping[str, Sequence[Provenance]], facts: Callable[[Provenance], Mapping[str, Any]]
) -> list[str]:
    """Return the lines on facts with names of their own, such as package versions, sorted by name.

    Args:
        prefix: Text before each name.
        by_cell: Provenances by cell id.
        facts: Reads the facts by name; a provenance without a name does not count as different.
    """
    names = sorted(
        {name for provenances in by_cell.values() for provenance in provenances for name in facts(provenance)}
    )
    lines = (_difference_line(f"{prefix} {name}", by_cell, lambda p, n=name: facts(p).get(n)) for name in names)  # type: ignore[misc]
    return [line for line in lines if line]


def _plugin_lines(data: SweepData) -> list[str]:
    """Return a line for each probe whose shown numbers come from different versions of its plugin, sorted by probe.

    A version is the first 12 digits of the plugin's SHA-256; numbers of built-in probes have none and are ignored.
    """
    sources: dict[str, list[tuple[str, object]]] = defaultdict(list)
    for (cell, probe, *_), value in data.shown_values.items():
        if value.source is not None:
            sources[probe].append((cell, value.source[:12]))
    by_probe = {probe: _cells_by_value(pairs) for probe, pairs in sorted(sources.items())}
    return [_line(f"plugin of the probe {probe}", groups) for probe, groups in by_probe.items() if len(groups) > 1]


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested config as dotted path -> value as text; lists are one value, an empty mapping gives none.

    Texts are those of Python's str(), such as True, None and [1, 2]. Paths are in the order of the config.

    Args:
        config: Config; mappings at any depth are flattened.
        prefix: Text before every path.
    """
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten_config(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat


def _setting_lines(data: SweepData, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each setting that differs between cells and does not follow an axis, sorted by path.

    Settings that cannot change a number or are reported separately are left out: those that begin with seed,
    resources., checkpoint., plugins, published, data.fingerprint, data.corpus, data.tokenizer, eval.probes or
    eval.lengths. A cell that lacks a setting does not count as different. train.micro_batch is named even if an axis
    explains it.

    Args:
        data: The sweep, whose axes (the seed among them) may explain a setting.
        configs: Config by cell id.
    """
    # cells share most sections, each of which is flattened once
    sections: dict[tuple[str, int], dict[str, str]] = {}
    by_cell = {
        cell: [
            sections.get((name, id(section)))
            or sections.setdefault((name, id(section)), flatten_config({name: section}))
            for name, section in config.items()
        ]
        for cell, config in configs.items()
    }
    texts: dict[str, set[str]] = defaultdict(set)
    for section in sections.values():
        for path, text in section.items():
            texts[path].add(text)
    levels = {cell.cell_id: {**cell.axes, **cell.levels, "seed": str(cell.seed)} for cell in data.cells}
    lines = []
    for path in sorted(path for path, different in texts.items() if len(different) > 1):
        if path.startswith(IGNORED_SETTINGS):
            continue
        # cells without a component lack its settings, which is no difference
        values = {cell: flat[path] for cell, flats in by_cell.items() for flat in flats if path in flat}
        groups = _cells_by_value(values.items())
        if len(groups) > 1 and (path == ALWAYS_NAMED or not _follows_an_axis(values, levels)):
            lines.append(_line(path, groups))
    return lines


def _follows_an_axis(values: Mapping[str, str], levels: Mapping[str, Mapping[str, str]]) -> bool:
    """Return True if the value is constant within each level of at least one axis.

    Args:
        values: Value by cell id; cells without it are left out.
        levels: Level by axis, by cell id, of at least these cells. Cells without an axis share one further level of it.

    Returns:
        False also if `values` is empty.
    """
    for axis in {axis for cell in values for axis in levels[cell]}:
        values_by_level: dict[str | None, set[str]] = defaultdict(set)
        for cell, value in values.items():
            values_by_level[levels[cell].get(axis)].add(value)
        if all(len(level_values) == 1 for level_values in values_by_level.values()):
            return True
    return False


def _deviation_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each setting and new value that attempts changed from their cell's config, as a retry may.

    Lines are sorted and read "PATH=VALUE instead of the requested value in N cells": the number of cells, without cell names,
    attempts or old values.
    """
    groups = _cells_by_value(
        (attempt.cell_id, f"{path}={value}")
        for attempt in attempts
        for path, value in flatten_config(attempt.deviation or {}).items()
    )
    return [
        f"{setting} instead of the requested value in {counted(len(cells), 'cell')}"
        for setting, cells in sorted(groups.items())
    ]


def _restart_lines(attempts: Sequence[Attempt], cells: Mapping[str, CellState]) -> list[str]:
    """Return a list with one line on the number of cells with several training attempts; empty without any.

    Args:
        attempts: Attempts of the cells, of any kind.
        cells: Cells by id; their number is the total in the line.
    """
    trainings: dict[str, int] = defaultdict(int)
    for attempt in attempts:
        trainings[attempt.cell_id] += attempt.kind == "train"
    num_restarted = sum(count > 1 for count in trainings.values())
    return (
        [f"restarts: {num_restarted} of {counted(len(cells), 'cell')} took more than one training attempt"]
        if num_restarted
        else []
    )


def _gpu_sharing_lines(by_cell: Mapping[str, Sequence[Provenance]]) -> list[str]:
    """Return a list with one line on cells that ran beside another attempt on the same GPU; empty without any.

    It gives the number of cells and the largest number of other attempts, from the provenances by cell id.
    """
    max_neighbours = {
        cell: max((p.co_tenants or 0 for p in provenances), default=0) for cell, provenances in by_cell.items()
    }
    shared = {cell for cell, count in max_neighbours.items() if count}
    if not shared:
        return []
    return [
        f"shared GPUs: {counted(len(shared), 'cell')} shared a GPU with up to "
        f"{counted(max(max_neighbours.values()), 'other attempt')}; their tokens/s and MFU are not those of an "
        "unshared GPU"
    ]


def _co_tenancy_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Return a list with one line on the largest number of attempts at once per host, on any GPU.

    Empty if all ran alone. Attempts that have not ended are ignored. At most three hosts are named, in alphabetical
    order; further ones are not mentioned.
    """
    max_concurrent: dict[str, int] = {}
    for host in sorted({attempt.host for attempt in attempts}):
        spans = [(a.started_at, a.finished_at) for a in attempts if a.host == host and a.finished_at is not None]
        # at equal times an end sorts before a start: consecutive attempts do not overlap
        moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        max_concurrent[host] = max(accumulate(step for _, step in moments), default=0)
    shared = {host: count for host, count in max_concurrent.items() if count > 1}
    hosts_text = ", ".join(
        f"up to {counted(count, 'attempt')} at once on {host}" for host, count in list(shared.items())[:MAX_LISTED]
    )
    return [f"co-tenancy: {hosts_text}; their speeds may be reduced"] if shared else []


def _unrecorded_lines(by_cell: Mapping[str, Sequence[Provenance]], paper: bool) -> list[str]:
    """Return a list with one line on the facts that were not recorded; empty if all were.

    Facts are code (commit) and software (packages), with the number of cells of which a recorded attempt lacks them,
    and provenance, with the number of cells without any recorded attempt. The paper's sweeps have a fixed line.
    """
    lacking = {
        "code": [c for c, provenances in by_cell.items() if any(p.git_commit is None for p in provenances)],
        "software": [c for c, provenances in by_cell.items() if any(not p.packages for p in provenances)],
        "provenance": [c for c, provenances in by_cell.items() if not provenances],
    }
    if paper:
        return ["not recorded by the paper: code, software, seeds, restarts, co-tenancy"]
    missing = [f"{name} ({len(cells)} of {counted(len(by_cell), 'cell')})" for name, cells in lacking.items() if cells]
    return [f"not recorded: {', '.join(missing)}"] if missing else []
