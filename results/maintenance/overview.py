"""The list of all sweeps, with progress, tags and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from ..console import terminal_table
from ..store.records import SweepSummary, requests_from_options, standing
from ..store.store import Store
from .names_tags_notes import OwnerIsActive

Origin = Literal["launched", "imported", "published"]
HEADINGS = (
    "sweep", "tags", "origin", "launched (UTC)", "runs now", "note", "revisions", "cells", "done", "failed", "open",
)  # fmt: skip
LABEL_COLUMNS = 6
"""Number of text columns; the others are numbers."""
MAX_NOTE_CHARS = 60
"""Maximum number of characters of a note in the table."""


@dataclass(frozen=True, kw_only=True)
class SweepOverview:
    """A sweep in the list.

    `failed` counts cells that failed or diverged, `open` all cells that are not done, failed, diverged or pruned.
    """

    sweep: str
    tags: Sequence[str]
    note: str | None
    origin: Origin
    created_at: datetime
    launched_at: datetime
    revisions: int
    cells: int
    done: int
    failed: int
    open: int
    counts: dict[str, int]
    """Number of cells by status, as `status` shows it."""
    run_by: str | None
    """Owner that runs the sweep now, with its host; None for no owner."""


@dataclass(frozen=True)
class Overview:
    """The list of all sweeps, the one launched last first."""

    sweeps: Sequence[SweepOverview]
    empty_lines: Sequence[str] = ("no sweep yet; launch a grid first",)
    """Lines for the user if there is no sweep."""

    def as_json(self) -> list[dict[str, Any]]:
        """Return the sweeps as plain values."""
        return [asdict(sweep) for sweep in self.sweeps]

    def lines(self, width: int | None = None) -> list[str]:
        """Return a table for the user, one line per sweep, at most `width` characters wide (None: any width).

        `empty_lines` if there is no sweep. Columns are name, tags, origin ("published", "imported" or "launched"),
        launch time, holder, note (at most 60 characters), and the numbers of revisions, cells, done, failed and open.
        """
        if not self.sweeps:
            return list(self.empty_lines)
        rows = [
            (
                sweep.sweep,
                ", ".join(sweep.tags) or "-",
                sweep.origin,
                f"{sweep.launched_at:%Y-%m-%d %H:%M}",
                sweep.run_by or "-",
                _shortened(" ".join((sweep.note or "-").split())),
                *(str(count) for count in (sweep.revisions, sweep.cells, sweep.done, sweep.failed, sweep.open)),
            )
            for sweep in self.sweeps
        ]
        return terminal_table.table_lines(HEADINGS, rows, LABEL_COLUMNS, width)


def list_sweeps(store: Store, is_active: OwnerIsActive) -> Overview:
    """Return all sweeps in their current state, the one launched last first.

    Statuses are relative to the measurements that each newest revision requests. `is_active` returns True if an owner
    still runs a sweep, given the end of its lease. Reads all cells of all sweeps in one snapshot.
    """
    with store.snapshot() as snapshot:
        sweeps = []
        for summary in snapshot.sweeps():
            launched = snapshot.revision(summary.name)
            requested = requests_from_options(launched.options)
            counts = Counter(standing(cell, requested) for cell in snapshot.cell_states(summary.name))
            failed = counts["failed"] + counts["diverged"]
            sweeps.append(
                SweepOverview(
                    sweep=summary.name,
                    tags=summary.tags,
                    note=summary.note,
                    origin="published" if launched.printed_in else "imported" if summary.read_only else "launched",
                    created_at=summary.created_at,
                    launched_at=summary.launched_at,
                    revisions=summary.revision,
                    cells=counts.total(),
                    done=counts["done"],
                    failed=failed,
                    open=counts.total() - counts["done"] - counts["pruned"] - failed,
                    counts={word: count for word, count in counts.items() if count},
                    run_by=_owner_text(summary, is_active),
                )
            )
    return Overview(sweeps)


def _owner_text(summary: SweepSummary, is_active: OwnerIsActive) -> str | None:
    owner = summary.owner
    return f"{owner.name} on {owner.host}, pid {owner.pid}" if owner and is_active(owner, summary.lease_until) else None


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_NOTE_CHARS else f"{text[: MAX_NOTE_CHARS - 3]}..."
