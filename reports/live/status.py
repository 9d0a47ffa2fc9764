"""Data and text of the commands `status` and `show`. Imports neither torch, ray nor pandas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from ...results.console.progress import progress_lines, running_lines
from ...results.console.text import counted
from ...results.store import records
from ...results.store.store import Store
from ...results.studies import study_text
from ...results.studies.optuna_study import Trial
from ...results.studies.search import Search, search_from_options
from ...results.studies.study_store import trials_of
from .estimate import remaining_seconds, running_cell, sweep_progress


@dataclass(frozen=True)
class PauseState:
    """Pause state of a sweep with a pause request.

    `since` is the time in UTC since when the sweep is paused (None: not yet), not the time of the request. `asked` is
    the message of the request, on who made it (None: not recorded); it is no time either.
    """

    since: datetime | None
    asked: str | None

    def text(self, running: bool) -> str:
        """Return the state as one line with the command that continues the sweep.

        The time is to the minute, in UTC; without `since` the text is "about to pause".

        Args:
            running: Whether the sweep has an owner, that is a process that runs it; if not, the advice is to launch it.
        """
        state_text = f"paused since {format_time(self.since)}" if self.since else "pausing"
        requester_text = f", requested {self.asked}" if self.asked else ""
        advice = "continue with atma-sweep resume" if running else "not running; launch it again"
        return f"{state_text}{requester_text}; {advice}"


@dataclass(frozen=True)
class SweepStatus:
    """Status of one sweep: its summary, its cells, and the standing of each cell by its id.

    `pause` is None without a pause request, `search` None for a sweep that is no study.
    """

    summary: records.SweepSummary
    cells: Sequence[records.CellState]
    standings: dict[str, records.CellStanding]
    pause: PauseState | None = None
    source: str | None = None
    """Publication of the numbers of a published sweep; None for a launched sweep."""
    search: Search | None = None
    trials: Sequence[Trial] = ()
    """Trials of a study; empty for other sweeps."""
    losses: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Training losses of running attempts by attempt id, oldest first."""

    @property
    def counts(self) -> Counter[str]:
        """Number of cells by standing."""
        return Counter(self.standings.values())

    def as_json(self) -> dict[str, Any]:
        """Return the status as a dict for JSON; dates are still datetime objects.

        Keys: sweep, revision, tags, note, counts (cells by standing), owner (None for none), paused (None, or since:
        time at which it paused, and asked: message on who requested it), cells, and for a study `study`. A cell has the
        fields of CellState with `measured` as a sorted list, its `standing`, and `seconds_left` (None unless it trains
        at a known speed).
        """
        cells = [
            {**_record_json(cell), "standing": self.standings[cell.cell_id], "seconds_left": remaining_seconds(cell)}
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
            **({"study": study_text.study_as_json(self.search, self.trials)} if self.search is not None else {}),
        }

    def text(self, width: int | None = None) -> str:
        """Return the status as text: a heading with counts, the bar, running cells and cells that need attention.

        The cells are in the order of `cells`; counts are sorted by the name of the standing. Lines on note, study,
        publication, owner and pause follow the heading where they apply. Cells that are done, new or pruned have no
        line; a failed one adds the command that prints the log of the first. A study, a publication and a complete
        sweep have no bar.

        Args:
            width: Characters per line of the bar and of running cells; None for no limit.
        """
        summary = self.summary
        counts_text = ", ".join(f"{count} {standing_name}" for standing_name, count in sorted(self.counts.items()))
        since = f"launched {format_time(summary.launched_at)}" if self.source is None else f"printed in {self.source}"
        tags = f" [{', '.join(summary.tags)}]" if summary.tags else ""
        cells = counted(len(self.cells), "cell")
        lines = [f"{summary.name}{tags} (revision {summary.revision}, {since}): {cells}: {counts_text}"]
        running = [cell for cell in self.cells if self.standings[cell.cell_id] == "running"]
        if self.source is None and self.search is None and self.counts["done"] < len(self.cells):
            progress = sweep_progress(summary.name, self.cells, self.counts["done"])
            lines += [f"  {line}" for line in progress_lines(progress, width and width - 2)]
        lines += [f"  note: {summary.note}"] if summary.note else []
        lines += [f"  {study_text.describe_study(self.search, self.trials)}"] if self.search is not None else []
        if self.source is not None:
            lines.append("  published numbers, not run here; atma-sweep report shows them")
        if summary.owner:
            lines.append(f"  run by {summary.owner.name} on {summary.owner.host}, pid {summary.owner.pid}")
        if self.pause:
            lines.append(f"  {self.pause.text(summary.owner is not None)}")
        failed = [cell for cell in self.cells if self.standings[cell.cell_id] == "failed"]
        rows = [running_cell(cell, self.losses.get(cell.attempt_id or 0, ())) for cell in running]
        lines += [f"  {line}" for row in running_lines(rows, width and width - 2) for line in row]
        for cell in self.cells:
            cell_standing = self.standings[cell.cell_id]
            if cell_standing not in ("done", "new", "pruned", "running"):
                lines.append(
                    f"  {cell.cell_id} {cell.slug}: {cell_standing}" + (f": {cell.cause}" if cell.cause else "")
                )
        if failed:
            lines.append(f"  atma-sweep logs {failed[0].cell_id} prints the log of {failed[0].slug}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Status:
    """Status of every sweep, or of the requested one."""

    sweeps: Sequence[SweepStatus]
    lines_if_empty: Sequence[str] = ("no sweep yet; launch a grid first",)
    """Lines that the text view prints if there is no sweep."""

    def as_json(self) -> list[dict[str, Any]]:
        """Return one JSON object per sweep, in their order; empty without a sweep."""
        return [sweep.as_json() for sweep in self.sweeps]

    def text(self, width: int | None = None) -> str:
        """Return the text of every sweep, one after the other, for a terminal of that width (None: no limit)."""
        return "\n".join(sweep.text(width) for sweep in self.sweeps) or "\n".join(self.lines_if_empty)


def sweep_statuses(store: Store, sweep: str | None = None) -> Status:
    """Return the status of one sweep, or of every sweep (None), the last launched first.

    Without `sweep` an empty database gives an empty status.

    Raises:
        SweepUnknown: No such sweep.
    """
    summaries = [summary for summary in store.sweeps() if sweep is None or summary.name == sweep]
    if sweep is not None and not summaries:
        store.revision(sweep)  # raises SweepUnknown, which lists the names
    summaries.sort(key=lambda summary: summary.launched_at, reverse=True)
    return Status([_sweep_status(store, summary) for summary in summaries])


def _sweep_status(store: Store, summary: records.SweepSummary) -> SweepStatus:
    """Return the status of the newest revision of a sweep.

    The database is read several times, not in one transaction, so the parts may differ by what happened in between.
    """
    launched = store.revision(summary.name)
    requested = records.requests_from_options(launched.options)
    cells = store.cell_states(summary.name)
    standings = {cell.cell_id: records.standing(cell, requested) for cell in cells}
    search = search_from_options(launched.options)
    trials = trials_of(store, summary.name) if search is not None else ()
    running = [cell.attempt_id for cell in cells if cell.state == "running" and cell.attempt_id is not None]
    return SweepStatus(
        summary, cells, standings, _pause_state(store, summary), printed_source(launched), search, trials,
        store.training_losses(running),
    )  # fmt: skip


def printed_source(launched: records.RevisionRecord) -> str | None:
    """Return source and version of the publication that prints a sweep's numbers; None for a launched sweep."""
    return launched.printed_in


def _pause_state(store: Store, summary: records.SweepSummary) -> PauseState | None:
    """Return the pause state of a sweep; None without a pause request.

    Its `since` is the time at which the sweep paused (None: not yet), its `asked` the message of the newest request, on
    who made it (None: not recorded). A pause that is older than the newest request, or was followed by a resumption,
    does not count as paused.
    """
    if not summary.request.get("pause"):
        return None
    request_event = store.newest_event(summary.name, ("pause asked",))
    pause_event = store.newest_event(summary.name, ("paused", "resumed"))
    since = pause_event.at if pause_event is not None and pause_event.kind == "paused" else None
    if request_event is not None and since is not None and request_event.at > since:
        since = None
    return PauseState(since, request_event.message if request_event is not None else None)


def format_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _record_json(record: Any) -> dict[str, Any]:
    """Return a dataclass record as a dict by field name, nested ones too, with the set `measured` as a sorted list."""
    values = asdict(record)
    if "measured" in values:
        values["measured"] = sorted(values["measured"])
    return values
