"""What `status` and `show` print. Quick: imports neither torch, ray nor pandas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any

from ...results.console.text import counted
from ...results.store import records
from ...results.store.store import Store
from ...results.studies import study_text
from ...results.studies.optuna_study import Trial
from ...results.studies.search import Search, search_from
from ...results.studies.study_store import trials_of
from ..stats.significance.trial_intervals import DIGITS, ceilings, with_intervals

CURVE_LINES = 12
SCHEDULED_RATES = ("embedding_lr", "head_lr", "scalar_lr")
"""The learning rates of a config that the schedule's factor multiplies, beside that of the matrices."""


@dataclass(frozen=True)
class PauseState:
    """A sweep that waits, or is about to: since when it does (None: not yet), and who asked for it, where that is known."""

    since: datetime | None
    asked: str | None

    def text(self, running: bool) -> str:
        """In a line."""
        said = f"paused since {_format_time(self.since)}" if self.since else "about to pause"
        asked = f", asked {self.asked}" if self.asked else ""
        how = "atma-sweep resume lets it go on" if running else "nobody runs it; launch it again"
        return f"{said}{asked}; {how}"


@dataclass(frozen=True)
class SweepStatus:
    """One sweep in full: its summary, its cells and where each stands."""

    summary: records.SweepSummary
    cells: Sequence[records.CellState]
    standings: dict[str, records.Standing]
    pause: PauseState | None = None
    source: str | None = None
    """Where the numbers of a published sweep are printed; None for a sweep that was launched."""
    search: Search | None = None
    trials: Sequence[Trial] = ()
    """Of a study."""

    @property
    def counts(self) -> Counter[str]:
        """Cells by where they stand."""
        return Counter(self.standings.values())

    def as_json(self) -> dict[str, Any]:
        """Column names of the database as keys."""
        cells = [
            {**_plain(cell), "standing": self.standings[cell.cell_id], "seconds_left": seconds_left(cell)}
            for cell in self.cells
        ]
        return {
            "sweep": self.summary.name,
            "revision": self.summary.revision,
            "tags": self.summary.tags,
            "note": self.summary.note,
            "counts": self.counts,
            "owner": self.summary.owner,
            "paused": asdict(self.pause) if self.pause else None,
            "cells": cells,
            **({"study": study_text.as_json(self.search, self.trials)} if self.search is not None else {}),
        }

    def text(self) -> str:
        """Counts, then running cells, then those that need a person."""
        summary = self.summary
        told = ", ".join(f"{count} {word}" for word, count in sorted(self.counts.items()))
        since = f"launched {_format_time(summary.launched_at)}" if self.source is None else f"printed in {self.source}"
        tags = f" [{', '.join(summary.tags)}]" if summary.tags else ""
        cells = counted(len(self.cells), "cell")
        lines = [f"{summary.name}{tags} (revision {summary.revision}, {since}): {cells}: {told}"]
        lines += [f"  note: {summary.note}"] if summary.note else []
        lines += [f"  {study_text.describe(self.search, self.trials)}"] if self.search is not None else []
        if self.source is not None:
            lines.append("  numbers of the paper: nothing of it runs or ran here; atma-sweep report shows them")
        if summary.owner:
            lines.append(f"  run by {summary.owner.name} on {summary.owner.host}, pid {summary.owner.pid}")
        if self.pause:
            lines.append(f"  {self.pause.text(summary.owner is not None)}")
        failed = [cell for cell in self.cells if self.standings[cell.cell_id] == "failed"]
        for cell in self.cells:
            word = self.standings[cell.cell_id]
            if word == "running":
                lines.append(f"  {cell.cell_id} {cell.slug}: {_progress(cell)}")
            elif word not in ("done", "new", "pruned"):
                lines.append(f"  {cell.cell_id} {cell.slug}: {word}" + (f": {cell.cause}" if cell.cause else ""))
        if failed:
            lines.append(f"  atma-sweep logs {failed[0].cell_id} prints the log of {failed[0].slug}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Status:
    """Every sweep, or the one that was asked for."""

    sweeps: Sequence[SweepStatus]
    without: Sequence[str] = ("no sweep yet; launch a grid first",)
    """Lines for people where there is no sweep."""

    def as_json(self) -> list[dict[str, Any]]:
        """A list of sweeps, the one launched last first."""
        return [sweep.as_json() for sweep in self.sweeps]

    def text(self) -> str:
        """One paragraph a sweep."""
        return "\n".join(sweep.text() for sweep in self.sweeps) or "\n".join(self.without)


def sweep_statuses(store: Store, sweep: str | None = None) -> Status:
    """Where one sweep, or every sweep, stands. Raises SweepUnknown."""
    wanted = [summary for summary in store.sweeps() if sweep is None or summary.name == sweep]
    if sweep is not None and not wanted:
        store.revision(sweep)  # raises SweepUnknown, which lists the names
    wanted.sort(key=lambda summary: summary.launched_at, reverse=True)
    return Status([_sweep_status(store, summary) for summary in wanted])


def _sweep_status(store: Store, summary: records.SweepSummary) -> SweepStatus:
    launched = store.revision(summary.name)
    requested = records.requests_from_options(launched.options)
    cells = store.cell_states(summary.name)
    standings = {cell.cell_id: records.standing(cell, requested) for cell in cells}
    search = search_from(launched.options)
    trials = trials_of(store, summary.name) if search is not None else ()
    return SweepStatus(summary, cells, standings, _pause(store, summary), printed_source(launched), search, trials)


def printed_source(launched: records.RevisionRecord) -> str | None:
    """Where the numbers of a sweep are printed; None for one that was launched."""
    return launched.printed_in


def _pause(store: Store, summary: records.SweepSummary) -> PauseState | None:
    if not summary.request.get("pause"):
        return None
    asked = store.newest_event(summary.name, ("pause asked",))
    done = store.newest_event(summary.name, ("paused", "resumed"))
    since = done.at if done is not None and done.kind == "paused" else None
    if asked is not None and since is not None and asked.at > since:
        since = None
    return PauseState(since, asked.message if asked is not None else None)


def seconds_left(cell: records.CellState) -> float | None:
    """Training time left at the present speed, seconds; None when it is not training or has not reported yet."""
    trains = cell.state == "running" and cell.phase == "training"
    if not trains or not cell.tokens_per_s or not cell.steps_total or cell.step is None:
        return None
    return cell.tokens_total * (1 - cell.step / cell.steps_total) / cell.tokens_per_s


def _progress(cell: records.CellState) -> str:
    if cell.phase != "training" or cell.loss is None:
        return cell.phase or "starting"
    left = seconds_left(cell)
    rate = f", {cell.tokens_per_s:,.0f} tokens/s" if cell.tokens_per_s else ""
    more = f", {format_duration(left)} left" if left is not None else ""
    return f"step {cell.step}/{cell.steps_total}, loss {cell.loss:.3f}{rate}{more}"


def format_duration(seconds: float) -> str:
    """5 s, 12 min, 3.4 h, 2.1 d."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _format_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _plain(record: Any) -> dict[str, Any]:
    values = asdict(record)
    if "measured" in values:
        values["measured"] = sorted(values["measured"])
    return values


@dataclass(frozen=True)
class CellDetails:
    """Everything known of one cell."""

    cell: records.CellRecord
    attempts: Sequence[records.Attempt]
    curve: Sequence[records.CurvePoint]
    values: Sequence[records.MeasuredValue]
    source: str | None = None
    """Where the numbers of a published cell are printed; None for a cell that was launched."""
    samples: Sequence[records.Sample] = ()
    """What the network wrote during the training that `curve` is of."""

    def as_json(self) -> dict[str, Any]:
        """Column names of the database as keys."""
        return {
            "cell": asdict(self.cell),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "curve": [asdict(point) for point in self.curve],
            "samples": [asdict(sample) for sample in self.samples],
            "measurements": [asdict(value) for value in self.values],
        }

    def text(self) -> str:
        """Config by section, attempts, the curve thinned out, measurements."""
        cell = self.cell
        lines = [f"cell {cell.id}  {cell.slug}", *([f"note: {cell.note}"] if cell.note else []), "config:"]
        known: tuple[str, ...] = ("model", "data", "train", "eval", "resources", "checkpoint")
        if "open_weight" in cell.config:  # a model from elsewhere, of which we have no more than this
            known = ("open_weight", "data", "train", "eval", "resources")
        for section in known:
            settings = (f"{k}={value}" for k, value in cell.config.get(section, {}).items() if value not in (None, {}))
            lines.append(f"  {section}: {', '.join(settings)}")
        if self.source is not None:
            lines.append(f"attempts: none here; these are numbers of {self.source}, as printed and as logged")
            lines += self._curve_lines() if self.curve else []
        else:
            lines += [*self._attempt_lines(), *self._curve_lines()]
        numbers = {attempt.id: attempt.number for attempt in self.attempts}
        constant = ceilings(self.values, self.source is not None)
        lines.append("measurements:" if self.values else "measurements: none yet")
        for value in self.values:
            by = f" (attempt {numbers[value.attempt_id]})" if self.source is None else ""
            lines.append(f"  {_measured(value, constant)}{by}")
        return "\n".join([*lines, *self._sample_lines()])

    def _sample_lines(self) -> list[str]:
        """What was written last, a prompt and its text on a line."""
        if not self.samples:
            return []
        steps = sorted({sample.step for sample in self.samples})
        more = f", the last of {len(steps)} steps with samples; --json has all" if len(steps) > 1 else ""
        last = [sample for sample in self.samples if sample.step == steps[-1]]
        quoted = partial(json.dumps, ensure_ascii=False)
        told = (f"  {quoted(sample.prompt)} -> {quoted(sample.text)}" for sample in last)
        return [f"samples after step {steps[-1]}{more}:", *told]

    def _attempt_lines(self) -> list[str]:
        lines = ["attempts:" if self.attempts else "attempts: none yet"]
        for attempt in self.attempts:
            cause = f": {attempt.cause}" if attempt.cause else ""
            where = f"step {attempt.step}/{attempt.steps_total}" if attempt.kind == "train" else attempt.kind
            lines.append(
                f"  {attempt.number} {attempt.state}, {where}, started {_format_time(attempt.started_at)} on {attempt.host}, "
                f"attempt_id {attempt.id}{cause}"
            )
        return lines

    def _curve_lines(self) -> list[str]:
        if not self.curve:
            return ["curve: none yet"]
        every = max(1, -(-len(self.curve) // CURVE_LINES))
        shown = [point for index, point in enumerate(self.curve) if (len(self.curve) - 1 - index) % every == 0]
        lines = [
            f"curve ({counted(len(self.curve), 'point')}): step, tokens, train loss, val loss, gradient norm, schedule factor, tokens/s"
        ]
        train = self.cell.config.get("train", {})
        if train.get("loss_on") == "marked":
            lines.append("  losses: mean over the targets that the corpus marks")
        matrices = "matrix_lr" if train.get("optimizer") == "adamw" else "muon_lr"
        rates = [
            f"{name} {train[name]:.6g}"
            for name in (matrices, *SCHEDULED_RATES)
            if isinstance(train.get(name), int | float)
        ]
        if rates:
            lines.append(f"  learning rates: schedule factor x {', '.join(rates)}")
        for p in shown:
            four = (p.train_loss, p.val_loss, p.grad_norm, p.lr)
            numbers = " ".join(f"{'-' if value is None else f'{value:.4f}':>9}" for value in four)
            lines.append(f"  {p.step:>7} {p.tokens:>12,} {numbers} {p.tokens_per_s or 0:>10,.0f}")
        return lines


def _measured(value: records.MeasuredValue, constant: Mapping[int, float]) -> str:
    """A line; a needle accuracy beside what the best constant answer scores on these trials."""
    at = f" at {value.length}" if value.length else ""
    if value.value is None:
        return f"{value.probe} {value.metric}{at}: {value.reason}"
    interval = f" [{value.low:.4g}, {value.high:.4g}]" if value.low is not None and value.high is not None else ""
    sample = f", n={value.n}" if value.n else ""
    plugin = f", plugin {value.source[:12]}" if value.source else ""
    of_needle = (value.probe, value.metric) == DIGITS or value.metric == ".".join(DIGITS)
    level = constant.get(value.length) if of_needle else None
    beside = f"; the same digit everywhere: {level:.4g}" if level is not None else ""
    return f"{value.probe} {value.metric}{at}: {value.value:.6g}{interval} {value.unit}{sample}{plugin}{beside}"


def cell_details(store: Store, asked: str, sweep: str | None = None) -> CellDetails:
    """The cell of that name, as `Store.find_cell` takes it. Raises CellUnknown, CellAmbiguous, SweepUnknown."""
    cell = store.find_cell(asked, sweep)
    attempts = store.attempts(cell.id)
    trainings = [attempt for attempt in attempts if attempt.kind == "train"]
    finished = [attempt for attempt in trainings if attempt.state == "done"]
    newest = (finished or trainings)[-1:] or []
    curve = store.curve(newest[0].id) if newest else []
    samples = store.samples([attempt.id for attempt in newest]).get(newest[0].id, []) if newest else []
    values = {(value.cell_id, value.probe, value.metric, value.length): value for value in store.measurements(cell.id)}
    # with the intervals that a report prints
    shown = list(with_intervals(values).values())
    return CellDetails(cell, attempts, curve, shown, _printed_in(store, attempts), samples)


def _printed_in(store: Store, attempts: Sequence[records.Attempt]) -> str | None:
    """Where the numbers of these attempts are printed; None when they ran."""
    known = store.provenance(attempts[-1].id) if attempts else None
    told = known.extra.get("published") if known is not None else None
    is_complete = isinstance(told, dict) and {"source", "version"} <= set(told)
    return f"{told['source']}{told['version']}" if told and is_complete else None
