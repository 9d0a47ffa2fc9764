"""The list of all sweeps: what each is, how far it is, and what people wrote about it."""

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
"""Columns of words, the others are numbers."""
MAX_NOTE_CHARS = 60
"""Letters of a note in the table."""


@dataclass(frozen=True, kw_only=True)
class SweepOverview:
    """One sweep. `failed` counts cells that failed or diverged, `open` those that are neither that, nor done, nor
    given up by a study."""

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
    """By where a cell stands, as `status` says it."""
    run_by: str | None
    """Who runs it now, on which host; None for nobody."""


@dataclass(frozen=True)
class Overview:
    """Every sweep, the one launched last first."""

    sweeps: Sequence[SweepOverview]
    without: Sequence[str] = ("no sweep yet; launch a grid first",)
    """Lines for people where there is no sweep."""

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [asdict(one) for one in self.sweeps]

    def lines(self, width: int | None = None) -> list[str]:
        """A table for people, as wide as a terminal of that width."""
        if not self.sweeps:
            return list(self.without)
        rows = [
            (
                one.sweep,
                ", ".join(one.tags) or "-",
                one.origin,
                f"{one.launched_at:%Y-%m-%d %H:%M}",
                one.run_by or "-",
                _short(" ".join((one.note or "-").split())),
                *(str(count) for count in (one.revisions, one.cells, one.done, one.failed, one.open)),
            )
            for one in self.sweeps
        ]
        return terminal_table.lines(HEADINGS, rows, LABEL_COLUMNS, width)


def overview(store: Store, holds: OwnerIsActive) -> Overview:
    """Every sweep as it stands now. `holds` says whether its owner still runs it."""
    with store.snapshot() as seen:
        found = []
        for summary in seen.sweeps():
            launched = seen.revision(summary.name)
            requested = requests_from_options(launched.options)
            counts = Counter(standing(cell, requested) for cell in seen.cell_states(summary.name))
            failed = counts["failed"] + counts["diverged"]
            found.append(
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
                    run_by=_runs(summary, holds),
                )
            )
    return Overview(found)


def _runs(summary: SweepSummary, holds: OwnerIsActive) -> str | None:
    owner = summary.owner
    return f"{owner.name} on {owner.host}, pid {owner.pid}" if owner and holds(owner, summary.lease_until) else None


def _short(text: str) -> str:
    return text if len(text) <= MAX_NOTE_CHARS else f"{text[: MAX_NOTE_CHARS - 3]}..."
