"""A file between an attempt and a database that only another machine may write to.

The attempt calls a JournalStore and a JournalRecorder as it would a Store and a Recorder, and each call becomes one line;
whoever holds the database applies the lines in order (Reader). A database that is locked or away lets the file grow, and
applying a line twice changes nothing. The file lies in the attempt's folder beside its checkpoints, so that whoever goes
on from a checkpoint of a machine that is gone finds every number before it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import LostLease
from ..files import sync
from .recorder import Recorder
from .records import AttemptState, CurvePoint, Example, Measurement, Phase, Provenance
from .store import Store

JOURNAL = "journal.jsonl"
RECORDS: Mapping[str, Any] = {
    "provenance": Provenance,
    "curve": CurvePoint,
    "measurements": Measurement,
    "examples": Example,
}
"""What the lines of these calls hold, as mappings."""
FLEETING = ("heartbeat", "progress")
"""Calls that nobody misses after a power cut, so they do not wait for the disk."""


class Journal:
    """The lines of one attempt, written by its process alone. Raises OSError when the disk does not take them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._file).st_size
        sync(path.parent)  # the file's name, too, must last

    def append(self, call: str, *given: Any, **named: Any) -> None:
        """Notes a call; returns when the line is on the disk."""
        line = json.dumps({"call": call, "given": given, "named": named}, default=_plain).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
            if call not in FLEETING:
                os.fsync(self._file)
        except OSError:
            # half a line must not stand before the next one
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own; other mappings and paths as what the database would hold."""
    if hasattr(value, "item"):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else str(value)


class JournalStore:
    """The part of a Store that an attempt's process uses. Nothing is refused here: who lost an attempt is ended."""

    def __init__(self, path: Path, ends: Mapping[int, CurvePoint] | None = None) -> None:
        """`ends`: the last points of earlier attempts' curves, which may be inherited."""
        self.journal = Journal(path)
        self.ends = dict(ends or {})
        self.points: list[CurvePoint] = []

    def curve(self, attempt_id: int) -> list[CurvePoint]:
        """The points that this attempt has written, and of an inherited curve the last one, if it is known here."""
        return list(self.points)

    def set_process(self, attempt_id: int, fence: int, pid: int, started: float, *, space: str | None = None) -> None:
        """As Store.set_process, with this host."""
        self.journal.append("set_process", pid, started, host=socket.gethostname(), space=space)

    def finish_attempt(self, attempt_id: int, fence: int, state: AttemptState, **values: Any) -> None:
        """As Store.finish_attempt."""
        self.journal.append("finish_attempt", state, **values)

    def add_event(self, kind: str, message: str, *, cell_id: str, attempt_id: int) -> None:
        """As Store.add_event."""
        self.journal.append("add_event", kind, message, cell_id=cell_id, attempt_id=attempt_id)


class JournalRecorder(Recorder):
    """A Recorder that writes lines."""

    def __init__(self, known: JournalStore, attempt_id: int, fence: int) -> None:
        self.known, self.journal = known, known.journal
        self.attempt_id, self.fence = attempt_id, fence

    def heartbeat(self) -> None:
        """Says that the attempt lives; the time is the one at which the line is applied."""
        self.journal.append("heartbeat")

    def settle(self) -> None:
        """Nothing is left to wait for: the line of every call that matters is on the disk, to be applied anew if need be."""

    def provenance(self, provenance: Provenance) -> None:
        """Where the numbers come from."""
        self.journal.append("provenance", asdict(provenance))

    def neighbours(self) -> None:
        """Has the attempts on the same GPU counted when the line is applied."""
        self.journal.append("neighbours")

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        """How far the attempt is."""
        self.journal.append("progress", step, steps_total, loss, tokens_per_s, phase)

    def curve(self, points: Sequence[CurvePoint]) -> None:
        """Points of the training curve."""
        self.journal.append("curve", [asdict(point) for point in points])
        self.known.points += points

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        """Has the curve copied when the line is applied; that of the earlier attempt is whole by then."""
        self.journal.append("inherit_curve", from_attempt, up_to_step)
        last = self.known.ends.get(from_attempt)
        if last is not None and last.step <= up_to_step:
            self.known.points.append(last)

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        """Numbers of a probe."""
        self.journal.append("measurements", [asdict(measurement) for measurement in measurements])

    def examples(self, examples: Sequence[Example]) -> None:
        """Outcomes item by item."""
        self.journal.append("examples", [asdict(example) for example in examples])

    def checkpoint(self, path: str) -> None:
        """Names the newest checkpoint."""
        self.journal.append("checkpoint", path)


def recorder_of(store: Store | JournalStore, attempt_id: int, fence: int) -> Recorder:
    """What an attempt writes its numbers with: into the database, or into the journal that stands for it."""
    if isinstance(store, JournalStore):
        return JournalRecorder(store, attempt_id, fence)
    return Recorder(store, attempt_id, fence)


class Reader:
    """Applies the lines of an attempt's journal to the database, those that are whole. Used from one thread."""

    def __init__(self, path: Path, store: Store, attempt_id: int, fence: int) -> None:
        self.path, self.store = path, store
        self.attempt_id, self.fence = attempt_id, fence
        self._recorder = Recorder(store, attempt_id, fence)
        self._offset = 0
        self._broken = False
        self.behind = False
        """Whether the limit of the last `apply` left whole lines for the next."""

    def apply(self, limit: int | None = None) -> int:
        """Applies what has come since, up to `limit` lines, and returns how many lines that was.

        A last line without its end is left for later, and a line that cannot be read is the end of the journal.
        Raises LostLease when the attempt is not running under its fence any more, and StoreBusy, after which it goes on
        with the same line.
        """
        if self._broken:
            return 0
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        applied, self.behind = 0, False
        for line in lines:
            self.behind = line.endswith(b"\n") and applied == limit
            if self.behind or not line.endswith(b"\n"):
                break
            try:
                said = json.loads(line)
                work = self._work(said["call"], said["given"], said["named"])
            except (ValueError, TypeError, KeyError):
                self._broken = True
                break
            work()
            self._offset += len(line)
            applied += 1
        return applied

    def _work(self, call: str, given: list[Any], named: dict[str, Any]) -> Callable[[], None]:
        about = (self.attempt_id, self.fence)
        if call == "add_event":
            return lambda: self._tell(*given, **named)
        if call in ("set_process", "finish_attempt"):
            return lambda: getattr(self.store, call)(*about, *given, **named)
        record = RECORDS.get(call)
        if record is None:
            if call not in (*FLEETING, "neighbours", "inherit_curve", "checkpoint"):
                raise KeyError(call)
        elif call == "provenance":
            given = [record(**given[0])]
        else:
            given = [[record(**one) for one in given[0]]]
        return lambda: getattr(self._recorder, call)(*given)

    def _tell(self, kind: str, message: str, *, cell_id: str, attempt_id: int) -> None:
        """Notes an event unless it was noted before: events have no key that would make a second one the same."""
        for event in self.store.events(cell_id=cell_id):
            if (event.attempt_id, event.kind, event.message) == (self.attempt_id, kind, message):
                return
        self.store.add_event(kind, message, cell_id=cell_id, attempt_id=self.attempt_id)


def settle(store: Store, runs: Path, attempt_id: int) -> None:
    """Applies what the journal of an attempt still holds; its process must be gone. Without a journal nothing.

    Raises StoreBusy.
    """
    attempt = store.attempt(attempt_id)
    if attempt.state == "running":
        with contextlib.suppress(LostLease):
            Reader(runs / attempt.run_dir / JOURNAL, store, attempt.id, attempt.fence).apply()
