"""Live view of a sweep (`status --watch`), from the database only. Imports neither torch, ray nor pandas."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from ...results.console.progress import RunningCell, SweepProgress, progress_lines, running_lines, visible_cells
from ...results.console.text import fold, sanitize_all, sanitize_line
from ...results.store.records import CellStanding, CellState, Event, requests_from_options, standing
from ...results.store.store import Store
from ...results.store.store_reader import StoreReader
from .estimate import remaining_seconds, remaining_tokens, sweep_progress

DEAD_HEARTBEAT_S = 300.0
"""Age of a heartbeat, in seconds, from which it is marked dead and a supervisor gives up an attempt of another host."""
MAX_EVENTS = 8
MAX_FAILURES = 8
STANDING_ORDER = ("done", "running", "new", "interrupted", "pruned", "needs-eval", "failed", "diverged", "weights gone")
COLOURS = {"done": "green", "running": "cyan", "failed": "red", "diverged": "yellow", "interrupted": "yellow"}
PROBLEM_STANDINGS = ("failed", "diverged", "interrupted", "weights gone")


def live_state(store: Store, sweep: str | None = None) -> dict[str, Any]:
    """Return the live state of a sweep, read in one transaction; `--json` prints it at each refresh.

    Times are UTC datetimes by the database's clock, durations are seconds. Keys:

    - sweep, revision, launched_at, now
    - owner, owner_host, owner_pid: the process that runs or ran it, None for none; owned: its lease is valid
    - request: pause or cancel request, None for none; ended: not owned and no running cell has a live heartbeat
    - cells: number of cells; done: number of done ones; counts: numbers above 0 by standing, in the order done,
      running, new, interrupted, pruned, needs-eval, failed, diverged, weights gone
    - tokens_total, tokens_left, tokens_done: training tokens; failed and diverged cells have none left and none done
    - tokens_per_s: sum over training cells, None without any; seconds_left: estimate to the end, None if unknown or no
      cell runs
    - running: an object per running cell (cell_id, slug, attempt_id, number, kind, host, gpu, ranks, phase, step,
      steps_total, loss, tokens_per_s, tokens_per_s_per_rank, seconds_left, seconds_since_heartbeat, losses, stale)
    - failures: an object per failed, diverged or interrupted cell or one without weights, last finished first (cell_id,
      slug, number, standing, failure, finished_at, cause)
    - events: objects (at, kind, cell_id, slug, message) of the newest eight, newest last

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last.

    Raises:
        SweepUnknown: No such sweep.
    """
    with store.snapshot() as snapshot:
        summary = snapshot.sweep(sweep)
        now = snapshot.now()
        cells = snapshot.cell_states(summary.name)
        requested = requests_from_options(snapshot.revision(summary.name).options)
        standings = {cell.cell_id: standing(cell, requested) for cell in cells}
        counts: Counter[str] = Counter(standings.values())
        running = [cell for cell in cells if cell.state == "running"]
        rows = _running_json(snapshot, running, now)
        progress = sweep_progress(summary.name, cells, counts["done"])
        remaining_s = progress.remaining_s
        owner, lease = summary.owner, summary.lease_until
        owned = owner is not None and lease is not None and lease > now
        return {
            "sweep": summary.name, "revision": summary.revision, "launched_at": summary.launched_at, "now": now,
            "owner": owner and owner.name, "owner_host": owner and owner.host, "owner_pid": owner and owner.pid,
            "owned": owned, "request": summary.request or None,
            "ended": not owned and all(row["stale"] for row in rows), "cells": len(cells), "done": counts["done"],
            "counts": {standing_name: counts[standing_name] for standing_name in STANDING_ORDER if counts[standing_name]},
            "tokens_total": sum(cell.tokens_total for cell in cells),
            "tokens_left": sum(remaining_tokens(cell) for cell in cells),
            "tokens_done": progress.tokens_done,
            "tokens_per_s": progress.tokens_per_s, "seconds_left": None if remaining_s is None else round(remaining_s, 3),
            "running": rows,
            "failures": _failures_json(snapshot, cells, standings),
            "events": [_event_json(event, cells) for event in snapshot.events(sweep=summary.name, limit=MAX_EVENTS)[::-1]],
        }  # fmt: skip


def _running_json(snapshot: StoreReader, cells: Sequence[CellState], now: datetime) -> list[dict[str, Any]]:
    """Return one object per given (running) cell, oldest attempt first.

    Keys: cell_id, slug, attempt_id, number (of the attempt), kind, host, gpu (name or device, None if not recorded),
    ranks (GPUs or processes of the attempt), phase, step, steps_total, loss, tokens_per_s (of all ranks),
    tokens_per_s_per_rank, seconds_left (None if unknown), seconds_since_heartbeat (at least 0, 0 without a heartbeat),
    losses (of training so far, oldest first), stale (True from 300 s on).

    Args:
        snapshot: The open transaction.
        cells: Running cells.
        now: Time of the database, UTC.
    """
    losses = snapshot.training_losses([cell.attempt_id for cell in cells if cell.attempt_id is not None])
    provenances = snapshot.provenances([cell.attempt_id for cell in cells if cell.attempt_id is not None])
    devices: dict[int | None, str] = {
        attempt: provenance.gpu_name or provenance.device for attempt, provenance in provenances.items()
    }
    rows = []
    for cell in sorted(cells, key=lambda cell: cell.attempt_id or 0):
        silent_s = (now - cell.heartbeat_at).total_seconds() if cell.heartbeat_at else 0.0
        row: dict[str, Any] = {
            "cell_id": cell.cell_id,
            "slug": cell.slug,
            "attempt_id": cell.attempt_id,
            "number": cell.attempt_number,
        }
        provenance = provenances.get(cell.attempt_id or 0)
        ranks = provenance.ranks if provenance is not None else 1
        row |= {"kind": cell.kind, "host": cell.host, "gpu": devices.get(cell.attempt_id), "ranks": ranks}
        row |= {name: getattr(cell, name) for name in ("phase", "step", "steps_total", "loss", "tokens_per_s")}
        row["tokens_per_s_per_rank"] = None if cell.tokens_per_s is None else cell.tokens_per_s / ranks
        row |= {"seconds_left": remaining_seconds(cell), "seconds_since_heartbeat": round(max(0.0, silent_s), 3)}
        row["losses"] = losses.get(cell.attempt_id or 0, [])
        rows.append(row | {"stale": silent_s >= DEAD_HEARTBEAT_S})
    return rows


def _failures_json(
    snapshot: StoreReader, cells: Sequence[CellState], standings: Mapping[str, CellStanding]
) -> list[dict[str, Any]]:
    """Return one object per failed, diverged or interrupted cell, or one without weights, last finished first.

    Keys: cell_id, slug, number (of the attempt), standing, failure (failure class, None if not recorded), finished_at
    (datetime or None, not yet JSON), cause (one line, may be empty). Cells without an end come last.

    Args:
        snapshot: The open transaction.
        cells: Cells of the sweep.
        standings: Standing by cell id.
    """
    problem_cells = [cell for cell in cells if standings[cell.cell_id] in PROBLEM_STANDINGS]
    classes = snapshot.failures([cell.attempt_id for cell in problem_cells if cell.attempt_id is not None])
    problem_cells.sort(key=lambda cell: (str(cell.finished_at or ""), cell.position), reverse=True)
    return [
        {
            "cell_id": cell.cell_id, "slug": cell.slug, "number": cell.attempt_number,
            "standing": standings[cell.cell_id], "failure": classes.get(cell.attempt_id or 0),
            "finished_at": cell.finished_at, "cause": _single_line(cell.cause or ""),
        }
        for cell in problem_cells
    ]  # fmt: skip


def _event_json(event: Event, cells: Sequence[CellState]) -> dict[str, Any]:
    """Return an event as an object with the keys at, kind, cell_id, slug and message (one line).

    The slug is None for an event without a cell, or of a cell that is not in `cells`.
    """
    slug = next((cell.slug for cell in cells if cell.cell_id == event.cell_id), None)
    return {
        "at": event.at, "kind": event.kind, "cell_id": event.cell_id, "slug": slug, "message": _single_line(event.message),
    }  # fmt: skip


def _single_line(message: str) -> str:
    return " ".join(message.split())


# --- drawing --------------------------------------------------------------------------------------------------------


def title_line(view: Mapping[str, Any]) -> str:
    """Return a line on the sweep, the time of the view, and the process that runs it.

    Args:
        view: State as `live_state` returns it.
    """
    if view["owned"]:
        owner_text = f"run by {view['owner']} on {view['owner_host']}, pid {view['owner_pid']}"
        request = view["request"] or {}
        owner_text += ", stopping" if request.get("cancel") else ", paused" if request.get("pause") else ""
    elif view["owner"]:
        owner_text = f"{view['owner']} on {view['owner_host']} (pid {view['owner_pid']}) does not respond; launch again to continue"
    else:
        owner_text = "not running" if view["done"] < view["cells"] else "finished"
    return f"{view['sweep']} (revision {view['revision']}), {view['now']:%Y-%m-%d %H:%M:%S} UTC: {owner_text}"


def _progress(view: Mapping[str, Any]) -> SweepProgress:
    """Return the progress of the sweep that a view shows."""
    done, remaining = view["tokens_done"], view["tokens_left"]
    return SweepProgress(
        sweep=view["sweep"], cells_done=view["done"], cells=view["cells"], tokens_done=done, tokens=done + remaining,
        tokens_per_s=view["tokens_per_s"], remaining_s=view["seconds_left"],
    )  # fmt: skip


def _running_rows(view: Mapping[str, Any]) -> list[RunningCell]:
    """Return the running cells of a view as rows; the machine is left out if all run on one host without a GPU."""
    hosts = [_machine_text(row) for row in view["running"]]
    is_single = len({*hosts, view["owner_host"]}) == 1
    return [
        RunningCell(
            slug=row["slug"], phase=(row["phase"] if row["kind"] == "train" else row["kind"]) or "starting",
            step=row["step"], steps_total=row["steps_total"], loss=row["loss"], losses=row["losses"],
            tokens_per_s=row["tokens_per_s"] if row["phase"] == "training" else None, ranks=row["ranks"],
            remaining_s=row["seconds_left"], host="" if is_single else host, silent_s=row["seconds_since_heartbeat"],
            is_stale=row["stale"],
        )
        for row, host in zip(view["running"], hosts, strict=True)
    ]  # fmt: skip


def _machine_text(row: Mapping[str, Any]) -> str:
    """Return "HOST/GPU" of a running cell's row, "HOST/4 x GPU" for several GPUs, or the host alone without a GPU."""
    if row["gpu"] in (None, "cpu"):
        return row["host"] or ""
    count = f"{row['ranks']} x " if row["ranks"] > 1 else ""
    return f"{row['host']}/{count}{row['gpu']}"


def plain_view(view: Mapping[str, Any]) -> str:
    """Return the complete view as plain lines, for a pipe or a file; control characters are removed.

    Lines: title, bar, counts by standing, running cells with a heading, at most eight failures (a further line counts
    the others), events.

    Args:
        view: State as `live_state` returns it.
    """
    view = sanitize_all(view)
    lines = [title_line(view), *progress_lines(_progress(view), None), _counts_text(view)]
    lines += [f"  {line}" for row in running_lines(_running_rows(view), None) for line in row]
    lines += [f"  {_failure_line(row)}" for row in view["failures"][:MAX_FAILURES]]
    if len(view["failures"]) > MAX_FAILURES:
        lines.append(f"  and {len(view['failures']) - MAX_FAILURES} more failed or interrupted")
    lines += [f"  {_event_line(row)}" for row in view["events"]]
    return "\n".join(lines)


def _counts_text(view: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {standing_name}" for standing_name, count in view["counts"].items()) or "no cells"


def _failure_line(row: Mapping[str, Any]) -> str:
    failure_text = f" ({row['failure']})" if row["failure"] not in (None, row["standing"]) else ""
    return f"{row['slug']} {row['standing']}{failure_text}" + (f": {row['cause']}" if row["cause"] else "")


def _event_line(row: Mapping[str, Any]) -> str:
    slug_text = f" {row['slug']}" if row["slug"] else ""
    # the message of a finished cell often repeats the kind
    message_text = f": {row['message']}" if row["message"] != row["kind"] else ""
    return f"{row['at']:%H:%M:%S} {row['kind']}{slug_text}{message_text}"


def lines_per_section(free: int, running: int, failures: int, events: int) -> tuple[int, int, int]:
    """Return the number of lines for (running cells, failures, events) of a screen; running cells have priority.

    If a list is truncated, its last line, which is included here, tells the number of hidden entries. With five free
    lines or more, one failure and one event stay beside any number of running cells. Failures and events are at most
    eight each.

    Args:
        free: Lines of the screen below the heading.
        running: Number of lines that all running cells take, with the head of their table.
        failures: Number of failures.
        events: Number of events.
    """
    num_free = max(0, free)
    # one failure and one event are shown beside any number of running cells, if the screen is large enough
    num_reserved = min(failures, 1) + min(events, 1) if num_free >= 5 else 0
    num_running = min(running, max(0, num_free - num_reserved))
    num_free -= num_running
    num_failures = min(failures, MAX_FAILURES, num_free - 1 if events and num_free > 1 else num_free)
    return num_running, num_failures, min(events, MAX_EVENTS, num_free - num_failures)


def screen_view(view: Mapping[str, Any], width: int, height: int, note: str = "") -> RenderableType:
    """Return the view as a rich renderable for a terminal of this size, at most `height` lines.

    Lines are folded between words, failures and events cut to one line each, and control characters removed. Lists that
    do not fit are truncated by `lines_per_section`.

    Args:
        view: State as `live_state` returns it.
        width: Columns of the terminal.
        height: Lines of the terminal.
        note: Warning below the counts; empty for none.
    """
    view, note = sanitize_all(view), sanitize_line(note)
    failures, events = view["failures"], view["events"]
    parts = [
        *(Text(line, style="bold") for line in fold(title_line(view), width).split("\n")),
        *map(Text, progress_lines(_progress(view), width)),
        *_coloured_counts(view).wrap(Console(width=width), width),
        *([_cut_to_width(Text(note, style="red"))] if note else []),
    ]
    rows = _running_rows(view)
    cells = running_lines(rows, width)
    num_lines, num_failures, num_events = lines_per_section(
        height - len(parts), sum(map(len, cells)), len(failures), len(events)
    )
    styles = ["dim", *(("bold red" if row.is_stale else "yellow" if row.is_late else "") for row in rows)]
    parts += [Text(line, style=style) for line, style in visible_cells(cells, num_lines, styles)]
    parts += [
        _cut_to_width(Text(line, style=COLOURS.get(row["standing"], "red")))
        for line, row in zip(
            _lines_with_rest(failures, num_failures, _failure_line), failures[:num_failures], strict=True
        )
    ]
    parts += [_cut_to_width(Text(_event_line(row), style="dim")) for row in events[:num_events]]
    return Group(*parts[:height])


def _cut_to_width(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _coloured_counts(view: Mapping[str, Any]) -> Text:
    """Return the counts by standing as a coloured line; "no cells" without any."""
    line = Text()
    for standing_name, count in view["counts"].items():
        line.append(", " if line else "").append(f"{count} {standing_name}", style=COLOURS.get(standing_name, ""))
    return line or Text("no cells")


def _lines_with_rest(rows: Sequence[Any], count: int, format_row: Callable[[Any], str]) -> list[str]:
    """Return `count` lines, formatted by `format_row`; with more rows, the last line gives the number hidden.

    All rows are formatted if `count` is at least their number; 0 gives no line, not even for hidden rows.
    """
    if count >= len(rows) or not count:
        return [format_row(row) for row in rows[:count]]
    return [*(format_row(row) for row in rows[: count - 1]), f"and {len(rows) - count + 1} more"]


# --- the loop -------------------------------------------------------------------------------------------------------


def watch(
    store: Store,
    sweep: str | None,
    console: Console,
    *,
    interval: float = 2.0,
    until_end: bool = False,
    as_json: bool = False,
    rounds: int | None = None,
) -> None:
    """Show the live state of a sweep every `interval` seconds until Ctrl-C, which returns normally.

    Blocks. A terminal shows one view that fits into it. Elsewhere each view is written to the console's file as plain
    text or, with `as_json` (on a terminal, too), as one JSON object per line, and flushed. If the database does not
    answer a later read, a note is shown and the last state is repeated until it does; an error of the first read is
    raised.

    Args:
        store: The database.
        sweep: Name of the sweep; None for the one launched last, which stays the same even if another is launched.
        console: Console to write to.
        interval: Seconds between two views.
        until_end: Return after a view in which no process runs the sweep (key `ended` of `live_state`).
        as_json: Print JSON.
        rounds: Return after this many views; None for no limit.

    Raises:
        SweepUnknown: No such sweep.
    """
    name = store.default_sweep() if sweep is None else sweep
    live = (
        None
        if as_json or not console.is_terminal
        else Live(console=console, auto_refresh=False, vertical_overflow="crop")
    )
    view, note, round_number = live_state(store, name), "", 1
    try:
        with live or nullcontext():
            while True:
                if live is not None:
                    # the terminal may have been resized; the cursor needs one line
                    width, height = console.size
                    live.update(screen_view(view, width, height - 1, note), refresh=True)
                else:
                    # rich would break lines at 80 columns; one write and flush gives a pipe complete views
                    console.file.write(_output_text(view, note, as_json=as_json, first=round_number == 1) + "\n")
                    console.file.flush()
                if round_number == rounds or (until_end and view["ended"]):
                    return
                time.sleep(interval)
                round_number += 1
                try:
                    view, note = live_state(store, name), ""
                except DBAPIError as error:
                    note = f"the database does not answer: {_single_line(str(error.orig))}"
    except KeyboardInterrupt:
        return


def _output_text(view: Mapping[str, Any], note: str, *, as_json: bool, first: bool) -> str:
    """Return a view as one line of JSON, or as plain text with an empty line before each view but the first.

    Without a final line break. The note, if any, is the key `note` of the JSON or the last line of the text; dates
    become text.

    Args:
        view: State as `live_state` returns it.
        note: Warning; empty for none.
        as_json: Return JSON.
        first: The view is the first one.
    """
    if as_json:
        return json.dumps({**view, "note": note} if note else view, default=str)
    return ("" if first else "\n") + plain_view(view) + (f"\n{sanitize_line(note)}" if note else "")
