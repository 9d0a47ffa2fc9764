"""News of a sweep that runs, sent to an experiment tracker from the database.

The database stays the truth. A tracker that is down only delays its own copy, which catches up later; no cell waits for
it. What was sent is remembered in a file, so that a later process goes on where this one ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ...console.output_files import atomic_file
from ...errors import SweepUnknown
from ...names import safe_file_name
from ...store.records import CellState
from ...store.store import Store
from . import EXPORTERS
from .runs import LiveTarget, TrackerRun, run_names, tracker_run

RETRY_S = 30.0
"""Longest time in seconds between two attempts to reach a tracker that failed."""
TRACKED_LAUNCH = "ATMA_TRACKED_LAUNCH"
"""Environment variable that `launch --track` sets for its trackers: the id of its process."""


class Follower:
    """Sender of a sweep's news to one tracker; `poll` sends what is new."""

    def __init__(self, store: Store, sweep: str, tracker: str, target: str, memory: Path) -> None:
        """Prepare to follow; nothing is sent.

        Args:
            store: database.
            sweep: name of the sweep.
            tracker: name in EXPORTERS of an exporter that fills a folder.
            target: folder (tensorboard, wandb, trackio) or tracking URI (mlflow).
            memory: file that remembers what was sent; created if it does not exist.

        Raises:
            PackageMissing: the tracker's package is not installed.
            StoreError: `memory` cannot be read.
        """
        self._store, self._sweep, self._memory = store, sweep, memory
        self._module, self._target = EXPORTERS[tracker].load(), target
        self._receiver: LiveTarget | None = None
        self._sent: dict[str, dict[str, Any]] = json.loads(memory.read_text()) if memory.exists() else {}
        self._seen: dict[str, CellState] = {}

    def poll(self) -> int:
        """Send the news of every cell that has changed since the last poll; return the number of these cells.

        Raises:
            Exception: of the tracker; what was sent before it is remembered, and the rest is news of the next poll.
        """
        states = self._store.cell_states(self._sweep)
        changed = [
            (state, name)
            for state, name in zip(states, run_names(states), strict=True)
            if state.attempt_id is not None and self._seen.get(state.cell_id) != state
        ]
        values = self._store.measurements_of([state.cell_id for state, _ in changed])
        tags = self._store.sweep(self._sweep).tags if changed else ()
        count = 0
        try:
            for state, name in changed:
                if self._send(tracker_run(self._store, state, name, values[state.cell_id], tags)):
                    count += 1
                self._seen[state.cell_id] = state
        finally:
            if count:
                with atomic_file(self._memory) as stream:
                    stream.write(json.dumps(self._sent).encode())
        return count

    def close(self) -> None:
        """End the connection to the tracker."""
        if self._receiver is not None:
            self._receiver.close()

    def _send(self, run: TrackerRun) -> bool:
        """Send what is new of the run of a cell and remember it; return False if nothing is."""
        sent = self._sent.get(run.cell.id, {"key": None, "step": -1, "state": None, "values": {}})
        values = {f"{value.probe}.{value.metric}@{value.length}": value for value in run.values}
        new_values = {key: value for key, value in values.items() if sent["values"].get(key) != _content(value)}
        curve = tuple(point for point in run.curve if point.step > sent["step"])
        if not (curve or new_values or sent["state"] != run.state):
            return False
        if self._receiver is None:
            self._receiver = self._module.follow(self._store, self._sweep, self._target)
        key = self._receiver.push(replace(run, curve=curve, values=tuple(new_values.values())), sent["key"])
        self._sent[run.cell.id] = {
            "key": key,
            "step": max([sent["step"], *(point.step for point in curve)]),
            "state": run.state,
            "values": sent["values"] | {key: _content(value) for key, value in new_values.items()},
        }
        return True


def _content(value: Any) -> list[Any]:
    """Return what a tracker shows of a measurement, as JSON: value and reason."""
    return [value.value, value.reason]


def default_target(sweep: str, tracker: str) -> str:
    """Return where the news go if the user names no place: a folder, or for MLflow a tracking URI."""
    variable = {"mlflow": "MLFLOW_TRACKING_URI", "trackio": "TRACKIO_DIR"}.get(tracker, "")
    return os.environ.get(variable) or _own_target(sweep, tracker)


def _own_target(sweep: str, tracker: str) -> str:
    """Return the target in the working folder that is named after sweep and tracker."""
    folder = Path(f"{safe_file_name(sweep)}-{tracker}").absolute()
    return f"sqlite:///{folder / 'mlflow.db'}" if tracker == "mlflow" else str(folder)


def memory_name(sweep: str, tracker: str, target: str) -> str:
    """Return the name of the file that remembers what a target was sent; every target has its own."""
    target = target if "://" in target else str(Path(target).absolute())
    is_own = target == _own_target(sweep, tracker)
    digest = "" if is_own else f"-{hashlib.sha256(target.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    return f"{safe_file_name(sweep)}-{tracker}{digest}.json"


def watch_owner(store: Store, sweep: str, launch: str | None) -> Callable[[], bool]:
    """Return a function that says whether a process still runs the sweep.

    A launch that has only begun, given by the id of its process as text, counts too as long as that process lives and
    has not run the sweep yet.
    """
    has_run = False

    def is_running() -> bool:
        """Return True if the sweep has an owner, or its launch has yet to claim it."""
        nonlocal has_run
        try:
            is_owned = store.sweep(sweep).owner is not None
        except SweepUnknown:
            is_owned = False
        has_run = has_run or is_owned
        return is_owned or (launch is not None and not has_run and psutil.pid_exists(int(launch)))

    return is_running


def follow(
    follower: Follower, is_running: Callable[[], bool], *, interval: float, until_end: bool, tell: Callable[[str], None]
) -> bool:
    """Send news every `interval` seconds, until the sweep has ended and everything was sent (`until_end`), or for ever.

    An error of the tracker is told once, and the tracker tried again after twice the time, at most every RETRY_S (30)
    seconds.

    Args:
        follower: sender of the news.
        is_running: function that returns True while a process runs the sweep.
        interval: seconds between two polls.
        until_end: return when the sweep has ended.
        tell: prints one line.

    Returns:
        True if everything was sent; False if the tracker could not be reached at the end.
    """
    problem, wait = "", interval
    while True:
        is_last = until_end and not is_running()  # before the poll, which then sees all that the sweep has recorded
        try:
            follower.poll()
        except SweepUnknown:
            if is_last:
                return True
            time.sleep(wait)  # its launch has not recorded it yet
            continue
        except Exception as error:  # noqa: BLE001 - the client of a tracker may raise anything, and must fail nothing
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if text != problem:
                tell(f"the tracker cannot be reached, and gets everything later: {text}")
            problem, wait = text, min(2 * wait, RETRY_S)
            if is_last:
                return False
        else:
            if problem:
                tell("the tracker can be reached again")
            problem, wait = "", interval
            if is_last:
                return True
        time.sleep(wait)
