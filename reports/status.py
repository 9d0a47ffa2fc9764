"""What `status` and `show` print. Quick: imports neither torch, ray nor pandas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from ..results.records import Attempt, CellRecord, CellState, CurvePoint, SweepSummary, Value
from ..results.standing import Standing, requests_of, standing
from ..results.store import Store

CURVE_LINES = 12


@dataclass(frozen=True)
class SweepStatus:
    """One sweep in full: its summary, its cells and where each stands."""

    summary: SweepSummary
    cells: Sequence[CellState]
    standings: dict[str, Standing]

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
            "counts": self.counts,
            "owner": self.summary.owner,
            "cells": cells,
        }

    def text(self) -> str:
        """Counts, then running cells, then those that need a person."""
        summary = self.summary
        words = ", ".join(f"{count} {word}" for word, count in sorted(self.counts.items()))
        lines = [
            f"{summary.name} (revision {summary.revision}, launched {_when(summary.launched_at)}): {len(self.cells)} cells: {words}"
        ]
        if summary.owner:
            lines.append(f"  run by {summary.owner.name} on {summary.owner.host}, pid {summary.owner.pid}")
        for cell in self.cells:
            word = self.standings[cell.cell_id]
            if word == "running":
                lines.append(f"  {cell.cell_id} {cell.slug}: {_progress(cell)}")
            elif word not in ("done", "new"):
                lines.append(f"  {cell.cell_id} {cell.slug}: {word}" + (f": {cell.cause}" if cell.cause else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class Status:
    """Every sweep, or the one that was asked for."""

    sweeps: Sequence[SweepStatus]

    def as_json(self) -> list[dict[str, Any]]:
        """A list of sweeps, the one launched last first."""
        return [sweep.as_json() for sweep in self.sweeps]

    def text(self) -> str:
        """One paragraph a sweep."""
        return "\n".join(sweep.text() for sweep in self.sweeps) or "no sweep yet; launch a grid first"


def status_of(store: Store, sweep: str | None = None) -> Status:
    """Where one sweep, or every sweep, stands. Raises SweepUnknown."""
    wanted = [summary for summary in store.sweeps() if sweep is None or summary.name == sweep]
    if sweep is not None and not wanted:
        store.revision(sweep)  # raises SweepUnknown, which lists the names
    wanted.sort(key=lambda summary: summary.launched_at, reverse=True)
    return Status([_one(store, summary) for summary in wanted])


def _one(store: Store, summary: SweepSummary) -> SweepStatus:
    requested = requests_of(store.revision(summary.name).options)
    cells = store.cell_states(summary.name)
    return SweepStatus(summary, cells, {cell.cell_id: standing(cell, requested) for cell in cells})


def seconds_left(cell: CellState) -> float | None:
    """Training time left at the present speed, seconds; None when it is not training or has not reported yet."""
    if (
        cell.state != "running"
        or cell.phase != "training"
        or not cell.tokens_per_s
        or not cell.steps_total
        or cell.step is None
    ):
        return None
    return cell.tokens_total * (1 - cell.step / cell.steps_total) / cell.tokens_per_s


def _progress(cell: CellState) -> str:
    if cell.phase != "training" or cell.loss is None:
        return cell.phase or "starting"
    left = seconds_left(cell)
    rate = f", {cell.tokens_per_s:,.0f} tokens/s" if cell.tokens_per_s else ""
    return f"step {cell.step}/{cell.steps_total}, loss {cell.loss:.3f}{rate}" + (
        f", {duration(left)} left" if left is not None else ""
    )


def duration(seconds: float) -> str:
    """5 s, 12 min, 3.4 h, 2.1 d."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _plain(record: Any) -> dict[str, Any]:
    values = asdict(record)
    if "measured" in values:
        values["measured"] = sorted(values["measured"])
    return values


@dataclass(frozen=True)
class CellSheet:
    """Everything known of one cell."""

    cell: CellRecord
    attempts: Sequence[Attempt]
    curve: Sequence[CurvePoint]
    values: Sequence[Value]

    def as_json(self) -> dict[str, Any]:
        """Column names of the database as keys."""
        return {
            "cell": asdict(self.cell),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "curve": [asdict(point) for point in self.curve],
            "measurements": [asdict(value) for value in self.values],
        }

    def text(self) -> str:
        """Config by section, attempts, the curve thinned out, measurements."""
        cell = self.cell
        lines = [f"cell {cell.id}  {cell.slug}", "config:"]
        for section in ("model", "data", "train", "eval", "resources", "checkpoint"):
            values = ", ".join(
                f"{key}={value}" for key, value in cell.config.get(section, {}).items() if value not in (None, {})
            )
            lines.append(f"  {section}: {values}")
        lines.append("attempts:" if self.attempts else "attempts: none yet")
        for attempt in self.attempts:
            cause = f": {attempt.cause}" if attempt.cause else ""
            where = f"step {attempt.step}/{attempt.steps_total}" if attempt.kind == "train" else attempt.kind
            lines.append(
                f"  {attempt.number} {attempt.state}, {where}, started {_when(attempt.started_at)} on {attempt.host}{cause}"
            )
        lines += self._curve_lines()
        lines.append("measurements:" if self.values else "measurements: none yet")
        lines += [f"  {_measured(value)}" for value in self.values]
        return "\n".join(lines)

    def _curve_lines(self) -> list[str]:
        if not self.curve:
            return ["curve: none yet"]
        every = max(1, -(-len(self.curve) // CURVE_LINES))
        shown = [point for index, point in enumerate(self.curve) if (len(self.curve) - 1 - index) % every == 0]
        lines = [
            f"curve ({len(self.curve)} points): step, tokens, train loss, val loss, gradient norm, learning rate, tokens/s"
        ]
        for p in shown:
            numbers = (
                f"{value:.4f}" if value is not None else "-" for value in (p.train_loss, p.val_loss, p.grad_norm, p.lr)
            )
            lines.append(
                f"  {p.step:>7} {p.tokens:>12,} {' '.join(f'{n:>9}' for n in numbers)} {p.tokens_per_s or 0:>10,.0f}"
            )
        return lines


def _measured(value: Value) -> str:
    at = f" at {value.length}" if value.length else ""
    if value.value is None:
        return f"{value.probe} {value.metric}{at}: {value.reason}"
    interval = f" [{value.low:.4g}, {value.high:.4g}]" if value.low is not None and value.high is not None else ""
    sample = f", n={value.n}" if value.n else ""
    return f"{value.probe} {value.metric}{at}: {value.value:.6g}{interval} {value.unit}{sample} (attempt {value.attempt_id})"


def cell_sheet(store: Store, asked: str, sweep: str | None = None) -> CellSheet:
    """The cell of that id, beginning of an id, or slug. Raises CellUnknown, CellAmbiguous."""
    cell = store.find_cell(asked, sweep)
    attempts = store.attempts(cell.id)
    trainings = [attempt for attempt in attempts if attempt.kind == "train"]
    finished = [attempt for attempt in trainings if attempt.state == "done"]
    newest = (finished or trainings)[-1:] or []
    curve = store.curve(newest[0].id) if newest else []
    return CellSheet(cell, attempts, curve, store.measurements(cell.id))
