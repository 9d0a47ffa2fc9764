"""The table `failures`: the attempts that did not finish, with their causes."""

from __future__ import annotations

from datetime import datetime

from ...results.console.text import counted
from ...results.store.records import Attempt
from ...results.store.store import Store
from ..sweep_data import gather
from ..table import Table
from ..table_builder import Line, assemble, sweep_note


def failures(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Every attempt of the sweep's cells that failed, diverged or was interrupted, oldest first, with its cause."""
    data = gather(store, sweep, revision=revision)
    cells = {cell.cell_id: cell for cell in data.cells}
    lines = []
    for attempt in store.attempts_of(cells):
        if attempt.state in ("failed", "diverged", "interrupted"):
            lines.append(_failure(attempt, cells[attempt.cell_id].slug, data.standing(cells[attempt.cell_id])))
    count = f"{counted(len(lines), 'attempt')} did not finish" if lines else "Every attempt that ended finished"
    headings = ("Cell", "Attempt", "State", "Class", "Cell now", "Started (UTC)", "Host", "Step", "Exit", "Cause")
    title = f"Failures, sweep {data.sweep}, revision {data.revision}"
    sources = store.sources([int(line.about["attempt_id"]) for line in lines])
    return assemble(data, "failures", title, headings, lines, notes=[sweep_note(data), f"{count}."], sources=sources)


def _failure(attempt: Attempt, slug: str, now: str) -> Line:
    step = f"{attempt.step}/{attempt.steps_total}" if attempt.steps_total else str(attempt.step)
    words = (
        slug,
        f"{attempt.number} ({attempt.kind})",
        attempt.state,
        attempt.failure or "-",
        now,
        _moment(attempt.started_at),
        attempt.host,
        step,
        "-" if attempt.exit_code is None else str(attempt.exit_code),
        attempt.cause or "-",
    )
    about = {
        "cell": attempt.cell_id,
        "attempt_id": attempt.id,
        "state": attempt.state,
        "failure": attempt.failure,
        "cause": attempt.cause,
    }
    return Line(
        words=words,
        origins=((attempt.cell_id, attempt.id),),
        about=about | {"traceback": attempt.traceback, "exit_code": attempt.exit_code},
    )


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment is not None else "-"
