"""`status --watch`: a sweep as it goes, from the database alone. Imports neither torch, ray nor pandas."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from ...results.console.text import plain, sanitize_all
from ...results.store.records import CellState, Event, Standing, requests_from_options, standing
from ...results.store.store import Store
from ...results.store.store_reader import StoreReader
from .status import format_duration, seconds_left

LATE_HEARTBEAT_S = 60.0
"""A heartbeat this old is marked: a long probe, a compilation, or trouble."""
DEAD_HEARTBEAT_S = 300.0
"""One this old is marked as dead; it is when a supervisor gives up an attempt of another host."""
SPEED_SAMPLE = 20
"""Finished cells whose speed counts."""
EVENTS = 8
FAILURES = 8
STANDING_ORDER = ("done", "running", "new", "interrupted", "pruned", "needs-eval", "failed", "diverged", "weights gone")
COLOURS = {"done": "green", "running": "cyan", "failed": "red", "diverged": "yellow", "interrupted": "yellow"}
PROBLEM_STANDINGS = ("failed", "diverged", "interrupted", "weights gone")


def live_state(store: Store, sweep: str | None = None) -> dict[str, Any]:
    """One sweep at this moment, read in one transaction; what `--json` prints at each refresh.

    Times are UTC by the database's clock, durations seconds. `seconds_left` is what the running and the waiting cells
    need at the speed of those that run and of the last ones that finished, probes and start included where a finished
    cell shows them; None while nothing runs or nothing has a speed yet. `tokens_left` leaves failed cells out, since
    they wait for a person. `ended`: nobody runs the sweep any more. Raises SweepUnknown.
    """
    with store.snapshot() as seen:
        summary = seen.sweep(sweep)
        now = seen.now()
        cells = seen.cell_states(summary.name)
        requested = requests_from_options(seen.revision(summary.name).options)
        standings = {cell.cell_id: standing(cell, requested) for cell in cells}
        counts: Counter[str] = Counter(standings.values())
        running = [cell for cell in cells if cell.state == "running"]
        rows = _running(seen, running, now)
        owner, lease = summary.owner, summary.lease_until
        owned = owner is not None and lease is not None and lease > now
        return {
            "sweep": summary.name, "revision": summary.revision, "launched_at": summary.launched_at, "now": now,
            "owner": owner and owner.name, "owner_host": owner and owner.host, "owner_pid": owner and owner.pid,
            "owned": owned, "request": summary.request or None,
            "ended": not owned and all(one["stale"] for one in rows), "cells": len(cells), "done": counts["done"],
            "counts": {word: counts[word] for word in STANDING_ORDER if counts[word]},
            "tokens_total": sum(cell.tokens_total for cell in cells),
            "tokens_left": sum(_tokens_left(cell) for cell in cells),
            **_speed(cells),
            "running": rows,
            "failures": _failures(seen, cells, standings),
            "events": [_event(event, cells) for event in seen.events(sweep=summary.name, limit=EVENTS)[::-1]],
        }  # fmt: skip


def _running(seen: StoreReader, cells: Sequence[CellState], now: datetime) -> list[dict[str, Any]]:
    """Rows of the table, oldest attempt first."""
    told = seen.provenances([cell.attempt_id for cell in cells if cell.attempt_id is not None])
    devices: dict[int | None, str] = {attempt: one.gpu_name or one.device for attempt, one in told.items()}
    rows = []
    for cell in sorted(cells, key=lambda cell: cell.attempt_id or 0):
        silent = (now - cell.heartbeat_at).total_seconds() if cell.heartbeat_at else 0.0
        row: dict[str, Any] = {
            "cell_id": cell.cell_id,
            "slug": cell.slug,
            "attempt_id": cell.attempt_id,
            "number": cell.attempt_number,
        }
        row |= {"kind": cell.kind, "host": cell.host, "gpu": devices.get(cell.attempt_id)}
        row |= {name: getattr(cell, name) for name in ("phase", "step", "steps_total", "loss", "tokens_per_s")}
        row |= {"seconds_left": seconds_left(cell), "seconds_since_heartbeat": round(max(0.0, silent), 3)}
        rows.append(row | {"stale": silent >= DEAD_HEARTBEAT_S})
    return rows


def _tokens_left(cell: CellState) -> float:
    """Tokens that are still to be trained; those of an interrupted cell from its last step, if it left a checkpoint."""
    training = cell.state == "running" and cell.kind == "train"
    if not training and (cell.trained_attempt_id is not None or cell.state in ("failed", "diverged")):
        return 0
    resumed = training or cell.checkpoint is not None
    if cell.kind != "train" or not resumed or not cell.steps_total or cell.step is None:
        return cell.tokens_total
    return round(cell.tokens_total * (1 - min(1.0, cell.step / cell.steps_total)))


def _speed(cells: Sequence[CellState]) -> dict[str, float | None]:
    """Tokens a second of all running cells, and the seconds left.

    The work that is left, in seconds of one place, is divided over the places that run now. Waiting cells cost what
    finished ones did from start to end; a cell under way costs its tokens at its own speed, at least.
    """
    running = [cell for cell in cells if cell.state == "running"]
    own = {cell.cell_id: cell.tokens_per_s for cell in running if cell.phase == "training" and cell.tokens_per_s}
    whole = sum(own.values()) or None
    finished = sorted(
        (cell for cell in cells if cell.state == "done" and cell.kind == "train" and cell.attempt_number == 1),
        key=lambda cell: cell.finished_at or cell.started_at,  # type: ignore[arg-type, return-value]
    )
    overall = [rate for rate in map(_overall, finished[-SPEED_SAMPLE:]) if rate]
    queued_rate = statistics.median(overall) if overall else statistics.mean(own.values()) if own else None
    if not running or queued_rate is None:
        return {"tokens_per_s": whole, "seconds_left": None}
    under_way = [_tokens_left(cell) / own.get(cell.cell_id, queued_rate) for cell in running]
    waiting = sum(_tokens_left(cell) for cell in cells if cell.state != "running") / queued_rate
    return {
        "tokens_per_s": whole,
        "seconds_left": round(max((sum(under_way) + waiting) / len(running), *under_way), 3),
    }


def _overall(cell: CellState) -> float | None:
    """Tokens a second from start to end of a finished cell, probes included."""
    if cell.started_at is None or cell.finished_at is None:
        return cell.tokens_per_s
    seconds = (cell.finished_at - cell.started_at).total_seconds()
    return cell.tokens_total / seconds if seconds > 0 else cell.tokens_per_s


def _failures(seen: StoreReader, cells: Sequence[CellState], standings: Mapping[str, Standing]) -> list[dict[str, Any]]:
    """Cells that did not end well, the newest first, `failure` the class that the supervisor put them in."""
    bad = [cell for cell in cells if standings[cell.cell_id] in PROBLEM_STANDINGS]
    classes = seen.failures([cell.attempt_id for cell in bad if cell.attempt_id is not None])
    bad.sort(key=lambda cell: (str(cell.finished_at or ""), cell.position), reverse=True)
    return [
        {
            "cell_id": cell.cell_id, "slug": cell.slug, "number": cell.attempt_number,
            "standing": standings[cell.cell_id], "failure": classes.get(cell.attempt_id or 0),
            "finished_at": cell.finished_at, "cause": _one_line(cell.cause or ""),
        }
        for cell in bad
    ]  # fmt: skip


def _event(event: Event, cells: Sequence[CellState]) -> dict[str, Any]:
    slug = next((cell.slug for cell in cells if cell.cell_id == event.cell_id), None)
    return {
        "at": event.at, "kind": event.kind, "cell_id": event.cell_id, "slug": slug, "message": _one_line(event.message),
    }  # fmt: skip


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- drawing --------------------------------------------------------------------------------------------------------


def heading(found: Mapping[str, Any]) -> list[str]:
    """Two lines: the sweep and who runs it; how far it is."""
    if found["owned"]:
        who = f"run by {found['owner']} on {found['owner_host']}, pid {found['owner_pid']}"
        asked = found["request"] or {}
        who += ", is stopping" if asked.get("cancel") else ", paused" if asked.get("pause") else ""
    elif found["owner"]:
        who = (
            f"{found['owner']} on {found['owner_host']} (pid {found['owner_pid']}) is silent; launch again to continue"
        )
    else:
        who = "nobody runs it" if found["done"] < found["cells"] else "finished"
    speed, left = found["tokens_per_s"], found["seconds_left"]
    parts = [f"{found['done']}/{found['cells']} done"]
    if found["tokens_left"]:
        parts.append(f"{format_tokens(found['tokens_left'])} tokens left")
    if speed:
        parts.append(f"{speed:,.0f} tokens/s")
    if left is not None:
        parts.append(f"about {format_duration(left)} left")
    title = f"{found['sweep']} (revision {found['revision']}), {found['now']:%Y-%m-%d %H:%M:%S} UTC: {who}"
    return [title, ", ".join(parts)]


def format_tokens(tokens: float) -> str:
    """950, 12.3K, 4.56M, 1.20B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= size:
            value = tokens / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{tokens:.0f}"


def text(found: Mapping[str, Any]) -> str:
    """The whole view as plain lines, for a pipe or a file."""
    found = sanitize_all(found)
    lines = [*heading(found), _counts(found)]
    lines += ["  " + ", ".join(part for part in _row(row) if part) for row in found["running"]]
    lines += [f"  {_failure(row)}" for row in found["failures"][:FAILURES]]
    if len(found["failures"]) > FAILURES:
        lines.append(f"  and {len(found['failures']) - FAILURES} more that did not end well")
    lines += [f"  {_event_line(row)}" for row in found["events"]]
    return "\n".join(lines)


def _counts(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {word}" for word, count in found["counts"].items()) or "no cells"


def _row(row: Mapping[str, Any]) -> list[str]:
    """Slug, where, phase, step, loss, speed, time left, silence."""
    steps = f"step {row['step']}/{row['steps_total'] or '?'}" if row["kind"] == "train" else row["kind"]
    silent = row["seconds_since_heartbeat"]
    mark = " (dead?)" if row["stale"] else " (late)" if silent >= LATE_HEARTBEAT_S else ""
    return [
        row["slug"],
        f"{row['host']}/{row['gpu']}" if row["gpu"] else row["host"],
        row["phase"],
        steps,
        f"loss {row['loss']:.3f}" if row["loss"] is not None else "",
        f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else "",
        f"{format_duration(row['seconds_left'])} left" if row["seconds_left"] is not None else "",
        f"heard of {format_duration(silent)} ago{mark}",
    ]


def _failure(row: Mapping[str, Any]) -> str:
    word = f" ({row['failure']})" if row["failure"] not in (None, row["standing"]) else ""
    return f"{row['slug']} {row['standing']}{word}" + (f": {row['cause']}" if row["cause"] else "")


def _event_line(row: Mapping[str, Any]) -> str:
    about = f" {row['slug']}" if row["slug"] else ""
    # a finished cell's message is often the kind again
    said = f": {row['message']}" if row["message"] != row["kind"] else ""
    return f"{row['at']:%H:%M:%S} {row['kind']}{about}{said}"


def lines_per_section(height: int, running: int, failures: int, events: int) -> tuple[int, int, int]:
    """How many running cells, failures and events get a line on a screen of that height; the running ones first.

    Heading (2 lines), counts (1) and the table's own heading (1) always stand. A list that is cut gives its last line
    to the number of those left out, which is counted here.
    """
    free = max(0, height - 3)
    # trouble and the latest event are seen beside any number of running cells, where there is room at all
    spared = min(failures, 1) + min(events, 1) if free >= 5 else 0
    some = min(running, max(0, free - 1 - spared))
    free -= some + 1 if some else 0
    bad = min(failures, FAILURES, free - 1 if events and free > 1 else free)
    return some, bad, min(events, EVENTS, free - bad)


def screen(found: Mapping[str, Any], width: int, height: int, note: str = "") -> RenderableType:
    """The view for a terminal of that size, never higher; each entry is one line, cut at the right."""
    found, note = sanitize_all(found), plain(note)
    running, failures, events = found["running"], found["failures"], found["events"]
    room = height - bool(note)
    some, bad, told = lines_per_section(room, len(running), len(failures), len(events))
    title, progress = heading(found)
    parts: list[RenderableType] = [_cut(Text(title, style="bold")), _cut(Text(progress)), _cut(_coloured(found))]
    if note:
        parts.append(_cut(Text(note, style="red")))
    if some:
        parts.append(_table(running, some, width))
    parts += [
        _cut(Text(line, style=COLOURS.get(row["standing"], "red")))
        for line, row in zip(_listed(failures, bad, _failure), failures[:bad], strict=True)
    ]
    parts += [_cut(Text(_event_line(row), style="dim")) for row in events[:told]]
    return Group(*parts[:height])


def _cut(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _coloured(found: Mapping[str, Any]) -> Text:
    line = Text()
    for word, count in found["counts"].items():
        line.append(", " if line else "").append(f"{count} {word}", style=COLOURS.get(word, ""))
    return line or Text("no cells")


def _listed(rows: Sequence[Any], count: int, say: Callable[[Any], str]) -> list[str]:
    """That many lines; when more rows than that exist, the last line says how many are not shown."""
    if count >= len(rows) or not count:
        return [say(row) for row in rows[:count]]
    return [*(say(row) for row in rows[: count - 1]), f"and {len(rows) - count + 1} more"]


def _table(rows: Sequence[Mapping[str, Any]], count: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False, width=width)
    # what stands left matters most, so a narrow terminal cuts the right columns, then the slug
    cut_off: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
    table.add_column("cell", ratio=3, min_width=8, **cut_off)
    table.add_column("where", ratio=2, **cut_off)
    for name in ("phase", "step", "loss", "tokens/s", "left", "heard"):
        table.add_column(name, justify="left" if name == "phase" else "right", **cut_off)
    cut = count < len(rows)
    for row in rows[: count - 1 if cut else count]:
        silent = row["seconds_since_heartbeat"]
        style = "bold red" if row["stale"] else "yellow" if silent >= LATE_HEARTBEAT_S else ""
        # a str would be read as rich's markup
        where = Text(f"{row['host']}/{row['gpu']}" if row["gpu"] else str(row["host"]))
        table.add_row(
            Text(row["slug"]), where, row["phase"] if row["kind"] == "train" else row["kind"],
            f"{row['step']}/{row['steps_total'] or '?'}", f"{row['loss']:.3f}" if row["loss"] is not None else "-",
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "-",
            format_duration(row["seconds_left"]) if row["seconds_left"] is not None else "-",
            Text(format_duration(silent), style=style), style="red" if row["stale"] else "",
        )  # fmt: skip
    if cut:
        table.add_row(f"and {len(rows) - count + 1} more", *[""] * 7)
    return table


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
    """Shows a sweep again and again, every `interval` seconds, until Ctrl-C.

    On a terminal one view that stays within it; elsewhere the view as plain text each time; with `as_json` one object a
    line. `until_end` leaves when nobody runs the sweep any more, `rounds` after that many views. A database that does
    not answer for a while is told of and waited for, once it has answered. Raises SweepUnknown.
    """
    name = store.default_sweep() if sweep is None else sweep
    live = (
        None
        if as_json or not console.is_terminal
        else Live(console=console, auto_refresh=False, vertical_overflow="crop")
    )
    found, note, turn = live_state(store, name), "", 1
    try:
        with live or nullcontext():
            while True:
                if live is not None:
                    # at the terminal's present size, less the line that the cursor needs
                    width, height = console.size
                    live.update(screen(found, width, height - 1, note), refresh=True)
                else:
                    # not through rich, which would break lines at 80 columns; whole, so that a reader of a pipe sees it at once
                    console.file.write(_written(found, note, as_json=as_json, first=turn == 1) + "\n")
                    console.file.flush()
                if turn == rounds or (until_end and found["ended"]):
                    return
                time.sleep(interval)
                turn += 1
                try:
                    found, note = live_state(store, name), ""
                except DBAPIError as error:
                    note = f"the database does not answer: {_one_line(str(error.orig))}"
    except KeyboardInterrupt:
        return


def _written(found: Mapping[str, Any], note: str, *, as_json: bool, first: bool) -> str:
    """A view as one line of JSON, or as plain text with an empty line before each but the first."""
    if as_json:
        return json.dumps({**found, "note": note} if note else found, default=str)
    return ("" if first else "\n") + text(found) + (f"\n{plain(note)}" if note else "")
