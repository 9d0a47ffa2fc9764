"""Tables `budget`, `failures` and `provenance`: hours of the attempts, causes of failure, and code and machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from ...results import paper
from ...results.console.text import counted
from ...results.exchange.installed_parts import describe_plugins
from ...results.store.records import Attempt, CellState, Provenance
from ...results.store.store import Store
from ..stats.audit import audit_differences
from ..sweep_data import SweepData, attempts_of_sweep, provenances_of_attempts
from ..table import Table
from ..table_builder import EMPTY_TEXT, TableRow, build_table, count_entry, sweep_note

HEADINGS = (
    "Cells like", "Done", "Predicted h", "From", "By FLOPs", "Calibrated", "Took h", "Ratio", "Start", "Training", "Probing",
    "Rest", "Lost",
)  # fmt: skip
SOURCES = ("measured", "calibrated", "FLOPs")
"""Sources of a prediction, the best first."""


@dataclass(frozen=True)
class TimeSpent:
    """GPU hours (core hours without GPUs) of a cell's attempts by purpose; the fields add up to the total."""

    start: float = 0.0
    training: float = 0.0
    probing: float = 0.0
    rest: float = 0.0
    """Time of finished attempts that is none of the above: before the process reports its start, validation,
    checkpoints.
    """
    lost: float = 0.0
    """Time of unfinished attempts, without the training that a later attempt continued."""

    @property
    def total(self) -> float:
        """Sum of all fields, in hours."""
        return sum(getattr(self, field.name) for field in fields(self))


def predicted_hours_table(store: Store, data: SweepData) -> Table:
    """Return the table `budget`: predicted against actual hours, a row per group of cells of one prediction.

    Without a prediction a group is the seeds of a configuration. With several groups a last row is all cells; a
    published sweep has no rows. Both hours are of the cells that are done, so that they can be compared; lost hours are
    of all cells. Hours are multiplied by the GPUs (or cores) of an attempt. All columns are texts: Cells like, Done,
    Predicted h, From (source), By FLOPs (low, likely and high), Calibrated, Took h, Ratio (took / predicted), Start,
    Training, Probing, Rest and Lost.
    """
    attempts: dict[str, list[Attempt]] = {cell.cell_id: [] for cell in data.cells}
    for attempt in store.attempts_of(attempts):
        attempts[attempt.cell_id].append(attempt)
    took = _time_by_cell(store, data, attempts)
    groups: dict[object, list[CellState]] = {}
    published = paper.is_published(data.sweep)
    for cell in () if published else data.cells:
        forecast_class = (
            data.forecast.group_of_position[cell.position]
            if data.forecast and cell.position < len(data.forecast.group_of_position)
            else None
        )
        groups.setdefault(
            cell.slug.removesuffix(f"-s{cell.seed}") if forecast_class is None else forecast_class, []
        ).append(cell)
    lines = [_hours_row(data, cells, took, _group_name(cells)) for cells in groups.values()]
    if len(lines) > 1:
        lines.append(_hours_row(data, data.cells, took, "all"))
    origins = {cell: tuple((cell, attempt.id) for attempt in cell_attempts) for cell, cell_attempts in attempts.items()}
    lines = [
        replace(line, origins=tuple(pair for cell in line.cells for pair in origins[cell.cell_id])) for line in lines
    ]
    machine = f" on {data.forecast.hardware}" if data.forecast is not None else ""
    notes = [
        sweep_note(data),
        f"Hours{machine}, multiplied by an attempt's GPUs (without GPUs: cores). Predicted (at the first "
        "launch of the revision, by the source in From), Took and Ratio cover the cells that are done. By "
        "FLOPs: low, likely and high. Start: from the first lines of the process to the built network. "
        "Rest: time before that, validation and checkpoints. Lost: unfinished attempts, without the steps "
        "that a later attempt continued.",
    ]
    if data.forecast is None:
        notes.append("Published cells have no recorded hours." if published else "The launch stored no prediction.")
    title = "Predicted and actual hours"
    sources = store.sources([attempt.id for cell_attempts in attempts.values() for attempt in cell_attempts])
    return build_table(data, "budget", title, HEADINGS, lines, notes=notes, sources=sources)


def _group_name(cells: Sequence[CellState]) -> str:
    """Return the slug, without seed, of the first cell, followed by "and n more" if the cells have several."""
    stems = dict.fromkeys(cell.slug.removesuffix(f"-s{cell.seed}") for cell in cells)
    first = next(iter(stems))
    return first if len(stems) == 1 else f"{first} and {len(stems) - 1} more"


def _hours_row(data: SweepData, cells: Sequence[CellState], took: Mapping[str, TimeSpent], name: str) -> TableRow:
    """Return the row of a group of cells, with texts in the order of HEADINGS and "-" for what is unknown.

    The prediction is known only if every done cell has one. JSON fields: done, cells, predicted_hours, took_hours (0
    without done cells), predicted_measured, predicted_calibrated, predicted_flops (each [low, likely, high] or None),
    start_hours, training_hours, probing_hours, rest_hours, lost_hours, ratio (took / predicted, or None) and sources.

    Args:
        data: The sweep.
        cells: Cells with the same prediction, or all cells.
        took: Hours by cell id.
        name: Text of the first column.
    """
    done = [cell for cell in cells if data.standing(cell) == "done"]
    predicted = {source: _predicted_hours(data, done, source) for source in SOURCES}
    best = _likely_hours(data, done)
    actual = _summed_time([took[cell.cell_id] for cell in done])
    lost = _summed_time([took[cell.cell_id] for cell in cells]).lost
    ratio = actual.total / best if best else None
    sources = dict.fromkeys(
        source for cell in done if (source := next(iter(_predictions(data, cell)), None)) is not None
    )
    by_flops, calibrated = predicted["FLOPs"], predicted["calibrated"]
    labels = (
        name,
        f"{len(done)} of {len(cells)}",
        _hours_text(best),
        ", ".join(sources) or EMPTY_TEXT,
        EMPTY_TEXT
        if by_flops is None
        else f"{_hours_text(by_flops[0])} {_hours_text(by_flops[1])} {_hours_text(by_flops[2])}",
        _hours_text(calibrated[1] if calibrated is not None else None),
        _hours_text(actual.total if done else None),
        EMPTY_TEXT if ratio is None else f"{ratio:.2f}",
        *(
            _hours_text(number if done else None)
            for number in (actual.start, actual.training, actual.probing, actual.rest)
        ),
        _hours_text(lost),
    )
    json_fields: dict[str, Any] = {
        "done": len(done),
        "cells": len(cells),
        "predicted_hours": best,
        "took_hours": actual.total,
    }
    json_fields |= {f"predicted_{source.lower()}": predicted[source] for source in SOURCES}
    json_fields |= {f"{field.name}_hours": getattr(actual, field.name) for field in fields(actual)} | {
        "lost_hours": lost
    }
    return TableRow(
        labels=labels, cells=list(cells), json_fields=json_fields | {"ratio": ratio, "sources": list(sources)}
    )


def _hours_text(hours: float | None) -> str:
    """Return hours as text: three significant digits, whole numbers with separators from 1000 on; "-" for None."""
    return EMPTY_TEXT if hours is None else f"{hours:,.0f}" if hours >= 1000 else f"{hours:.3g}"


def _predictions(data: SweepData, cell: CellState) -> dict[str, tuple[float, float, float]]:
    """Return the predicted (low, likely, high) hours of a cell by source, the best source first.

    Sources are "measured", "calibrated" and "FLOPs", in this order; those without a prediction are no keys.

    The result is empty without a forecast.
    """
    by_source = data.forecast.cell(cell.position) if data.forecast is not None else {}
    return {source: by_source[source] for source in SOURCES if source in by_source}


def _likely_hours(data: SweepData, cells: Sequence[CellState]) -> float | None:
    """Return the sum of the likely hours by the best source of each cell.

    None for no cells, or unless every cell has a prediction.
    """
    predictions = [next(iter(_predictions(data, cell).values()), None) for cell in cells]
    return (
        sum(prediction[1] for prediction in predictions if prediction is not None)
        if predictions and None not in predictions
        else None
    )


def _predicted_hours(data: SweepData, cells: Sequence[CellState], source: str) -> tuple[float, float, float] | None:
    """Return the summed (low, likely, high) hours that one source predicts for all these cells.

    None for no cells, or unless the source predicts each of them.

    Args:
        data: The sweep.
        cells: The cells.
        source: "measured", "calibrated" or "FLOPs".
    """
    predictions = [by_source[source] for cell in cells if source in (by_source := _predictions(data, cell))]
    if not predictions or len(predictions) < len(cells):
        return None
    low, likely, high = (sum(prediction[index] for prediction in predictions) for index in range(3))
    return low, likely, high


def _summed_time(times: Sequence[TimeSpent]) -> TimeSpent:
    return TimeSpent(**{field.name: sum(getattr(time, field.name) for time in times) for field in fields(TimeSpent)})


# --- what it took -------------------------------------------------------------------------------------------------------


def _time_by_cell(store: Store, data: SweepData, attempts: Mapping[str, Sequence[Attempt]]) -> dict[str, TimeSpent]:
    """Return the hours of all attempts of each cell by purpose, by cell id, with zeros for a cell without attempts.

    Args:
        store: The database.
        data: The sweep, whose values carry the seconds of probing and training.
        attempts: Attempts by cell id, oldest first.
    """
    ended = [attempt.id for cell_attempts in attempts.values() for attempt in cell_attempts if attempt.state == "done"]
    starts = store.startup_seconds(ended)
    probing: dict[str, dict[int, dict[tuple[str, int], float]]] = {}
    trained: dict[str, dict[int, float]] = {}
    for (cell, probe, metric, length), value in data.values.items():
        if value.seconds is not None:
            # each number of a probe carries the seconds of the complete probe at that length
            probing.setdefault(cell, {}).setdefault(value.attempt_id, {})[probe, length] = value.seconds
        if (probe, metric) == ("throughput", "train_seconds") and value.value is not None:
            trained.setdefault(cell, {})[value.attempt_id] = value.value
    time_by_cell = {}
    for cell, attempts_of_cell in attempts.items():
        probes = {attempt: sum(times.values()) for attempt, times in probing.get(cell, {}).items()}
        share = gpu_share(data.configs.get(cell, {}))
        time_by_cell[cell] = _cell_time(attempts_of_cell, starts, probes, trained.get(cell, {}), share)
    return time_by_cell


def _cell_time(
    attempts: Sequence[Attempt],
    starts: Mapping[int, float],
    probes: Mapping[int, float],
    trained: Mapping[int, float],
    share: float,
) -> TimeSpent:
    """Return the hours of a cell's attempts by purpose, multiplied by `share`; a running attempt is not counted.

    An attempt that is not done is lost, except training that a later attempt continued. `training` may come out lower
    than stored where the clocks disagree, so that the fields add up to the elapsed time.

    Args:
        attempts: The cell's attempts, oldest first.
        starts: Seconds from process start to the built network, by attempt id; 0 where missing.
        probes: Seconds of probing by attempt id; 0 where missing.
        trained: Seconds of training by attempt id, counted on from the checkpoint that it continued; 0 where missing.
        share: GPUs (or cores) of the cell.
    """
    start = training = probing = rest = lost = carried = 0.0
    for attempt in attempts:
        elapsed = attempt.elapsed_s
        if attempt.state == "running":
            continue
        if attempt.state != "done":
            lost += elapsed
            continue
        mine = starts.get(attempt.id, 0.0), trained.get(attempt.id, 0.0), probes.get(attempt.id, 0.0)
        # training seconds continue from a checkpoint: what exceeds this attempt's own time ran in earlier attempts
        carried += max(0.0, sum(mine) - elapsed)
        rest += max(0.0, elapsed - sum(mine))
        start, training, probing = start + mine[0], training + mine[1], probing + mine[2]
    attributed = min(carried, lost)
    # where clocks disagree by more than the lost time, training absorbs the difference, so that the sum stays the total
    hours = [
        seconds * share / 3600
        for seconds in (start, training - (carried - attributed), probing, rest, lost - attributed)
    ]
    return TimeSpent(*hours)


def gpu_share(config: Mapping[str, Any]) -> float:
    """Return the number of GPUs, or of CPUs without a GPU, in a cell's config; 1 where neither is set."""
    resources = config.get("resources", {})
    return float(resources.get("gpus") or resources.get("cpus") or 1)


# --- attempts that did not finish -------------------------------------------------------------------------------------


def failures_table(store: Store, data: SweepData) -> Table:
    """Return the table `failures`: every attempt that failed, diverged or was interrupted, with its cause.

    Rows are attempts, oldest first; all columns are texts: cell, attempt number and kind, state, class of failure,
    present standing of the cell, start (UTC), host, step, exit code and cause. JSON fields add the traceback.
    """
    cells = {cell.cell_id: cell for cell in data.cells}
    lines = []
    for attempt in attempts_of_sweep(store, data):
        if attempt.state in ("failed", "diverged", "interrupted"):
            lines.append(_failure_row(attempt, cells[attempt.cell_id].slug, data.standing(cells[attempt.cell_id])))
    count = (
        f"{counted(len(lines), 'attempt')} did not finish"
        if lines
        else "No attempt failed, diverged or was interrupted"
    )
    headings = ("Cell", "Attempt", "State", "Class", "Cell now", "Started (UTC)", "Host", "Step", "Exit", "Cause")
    title = "Failures"
    sources = store.sources([int(line.json_fields["attempt_id"]) for line in lines])
    return build_table(data, "failures", title, headings, lines, notes=[sweep_note(data), f"{count}."], sources=sources)


def _failure_row(attempt: Attempt, slug: str, now: str) -> TableRow:
    """Return the row of an attempt that did not finish, with "-" for what is unknown.

    JSON fields: cell, attempt_id, state, failure, cause, traceback, exit_code.

    Args:
        attempt: The attempt.
        slug: Slug of its cell.
        now: Present standing of the cell.
    """
    step = f"{attempt.step}/{attempt.steps_total}" if attempt.steps_total else str(attempt.step)
    labels = (
        slug,
        f"{attempt.number} ({attempt.kind})",
        attempt.state,
        attempt.failure or "-",
        now,
        _moment_text(attempt.started_at),
        attempt.host,
        step,
        "-" if attempt.exit_code is None else str(attempt.exit_code),
        attempt.cause or "-",
    )
    json_fields = {
        "cell": attempt.cell_id,
        "attempt_id": attempt.id,
        "state": attempt.state,
        "failure": attempt.failure,
        "cause": attempt.cause,
    }
    return TableRow(
        labels=labels,
        origins=((attempt.cell_id, attempt.id),),
        json_fields=json_fields | {"traceback": attempt.traceback, "exit_code": attempt.exit_code},
    )


def _moment_text(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment is not None else "-"


# --- code, machine and software ---------------------------------------------------------------------------------------


SHORT_ID_LENGTH = 12  # characters of a commit or a fingerprint
PACKAGES = ("torch", "triton", "fla-core", "numpy")


def provenance_table(store: Store, data: SweepData) -> Table:
    """Return the table `provenance`: one row per combination of code, machine and software behind the shown numbers.

    Columns: Commit, GPU, Driver, Precision, Python, Software, Kernels, Tokenizer and Corpus as texts ("-" where
    unknown), then Cells and Attempts, the numbers of cells and of (cell, attempt) pairs. Attempts without a recorded
    provenance are left out. Rows are in the order of their first attempt. Notes list the cells' plugins and the
    homogeneity audit's differences.
    """
    pairs = {(key[0], value.attempt_id) for key, value in data.shown_values.items()}
    provenance_by_attempt = provenances_of_attempts(store, {attempt for _, attempt in pairs})
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for cell, attempt in sorted(pairs, key=lambda pair: pair[1]):
        if attempt in provenance_by_attempt:
            groups[_origin_labels(provenance_by_attempt[attempt])].append((cell, attempt))
    lines = []
    for labels, pairs_of_origin in groups.items():
        origins = tuple(pairs_of_origin)
        count = len({cell for cell, _ in pairs_of_origin})
        entries = (count_entry("Cells", count, origins), count_entry("Attempts", len(pairs_of_origin), origins))
        lines.append(TableRow(labels=labels, entries=entries))
    audit = audit_differences(store, data.sweep, revision=data.revision)
    used = (plugin for record in provenance_by_attempt.values() for plugin in record.config.get("plugins", ()))
    notes = [
        sweep_note(data),
        *(f"Plugin {line}." for line in describe_plugins(used)),
        *(
            f"{line}."
            for line in audit
            or [
                "The audit found no difference in hardware, code, software or settings between the cells, except the levels of their axes"
            ]
        ),
    ]
    headings = ("Commit", "GPU", "Driver", "Precision", "Python", "Software", "Kernels", "Tokenizer", "Corpus")
    title = "Provenance"
    return build_table(data, "provenance", title, headings, lines, numbers=("Cells", "Attempts"), notes=notes)


def _origin_labels(recorded: Provenance) -> tuple[str, ...]:
    """Return the nine texts of a provenance row, "-" where unknown.

    They are commit (12 characters, "with changes" for a modified checkout), GPU or device, driver, precision, Python,
    versions of torch, triton, fla-core and numpy, kernels ("name: path", sorted), tokenizer, and corpus with 12
    characters of its fingerprint.
    """
    commit = (recorded.git_commit or "-")[:SHORT_ID_LENGTH] + (" with changes" if recorded.git_dirty else "")
    software = ", ".join(f"{name} {recorded.packages[name]}" for name in PACKAGES if name in recorded.packages) or "-"
    kernels = ", ".join(f"{name}: {path}" for name, path in sorted(recorded.kernels.items())) or "-"
    return (
        commit,
        recorded.gpu_name or recorded.device or "-",
        recorded.driver or "-",
        recorded.dtype or "-",
        recorded.python or "-",
        software,
        kernels,
        recorded.tokenizer or "-",
        f"{recorded.corpus} {recorded.corpus_fingerprint[:SHORT_ID_LENGTH]}".strip() or "-",
    )
