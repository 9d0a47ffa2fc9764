"""A file between an attempt and a database that only another machine may write to.

The attempt calls a JournalRecorder as it would a Recorder, and each call becomes one line; whoever holds the database
applies the lines to a Recorder, in order (Reader). A database that is locked or away lets the file grow, and
applying a line twice changes nothing. The file lies in the attempt's folder beside its checkpoints, so that whoever goes
on from a checkpoint of a machine that is gone finds every number before it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ..console.output_files import fsync_path
from ..errors import LeaseLost
from .recorder import AttemptWriter, DatabaseRecorder, finite_fields
from .records import AttemptState, CurvePoint, Example, Measurement, Phase, Provenance
from .store import Store, require_end_state

JOURNAL = "journal.jsonl"
RECORD_TYPES: Mapping[str, Any] = {"curve": CurvePoint, "measurements": Measurement, "examples": Example}
"""What the lines of these calls hold lists of, as mappings; that of `provenance` holds one."""
UNSYNCED_CALLS = ("heartbeat", "progress")
"""Calls that nobody misses after a power cut, so they do not wait for the disk."""
CALLS = (*UNSYNCED_CALLS, "set_process", "neighbours", "inherit_curve", "checkpoint", "event", "finish")
"""The other calls that a line may ask for: its arguments are theirs."""
RENAMED_CALLS = {"add_event": "event", "finish_attempt": "finish"}
"""Words of earlier releases, whose journals may still lie beside attempts that were killed."""


class Journal:
    """The lines of one attempt, written by its process alone. Raises OSError when the disk does not take them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._file).st_size
        fsync_path(path.parent)  # the file's name, too, must last

    def append(self, call: str, *given: Any, **named: Any) -> None:
        """Notes a call; returns when the line is on the disk."""
        line = json.dumps({"call": call, "given": given, "named": named}, default=_plain).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
            if call not in UNSYNCED_CALLS:
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


class JournalRecorder(AttemptWriter):
    """An AttemptWriter that writes lines. Nothing is refused here but a full disk: who lost an attempt is ended."""

    def __init__(self, path: Path, ends: Mapping[int, CurvePoint] | None = None) -> None:
        """`ends`: the last points of earlier attempts' curves, which may be inherited."""
        self.journal = Journal(path)
        self.ends = dict(ends or {})
        self._last: CurvePoint | None = None

    def set_process(self, pid: int, started: float, *, host: str | None = None, space: str | None = None) -> None:
        self.journal.append("set_process", pid, started, host=host, space=space)

    def heartbeat(self) -> None:
        self.journal.append("heartbeat")

    def settle(self) -> None:
        """Has nothing to wait for: the line of every call that matters is on the disk, to be applied anew if need be."""

    def provenance(self, provenance: Provenance) -> None:
        self.journal.append("provenance", _fields(provenance))

    def neighbours(self) -> None:
        self.journal.append("neighbours")

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        self.journal.append("progress", step, steps_total, loss, tokens_per_s, phase)

    def curve(self, points: Sequence[CurvePoint]) -> None:
        self.journal.append("curve", [_fields(point) for point in points])
        for point in points:
            if self._last is None or point.step >= self._last.step:
                self._last = CurvePoint(**finite_fields(point))

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        # the earlier attempt's own journal is applied before this line is
        self.journal.append("inherit_curve", from_attempt, up_to_step)
        end = self.ends.get(from_attempt)
        if end is not None and end.step <= up_to_step and (self._last is None or end.step > self._last.step):
            self._last = end

    def last_point(self) -> CurvePoint | None:
        return self._last

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        self.journal.append("measurements", [_fields(measurement) for measurement in measurements])

    def examples(self, examples: Sequence[Example]) -> None:
        self.journal.append("examples", [_fields(example) for example in examples])

    def checkpoint(self, path: str) -> None:
        self.journal.append("checkpoint", path)

    def event(self, kind: str, message: str) -> None:
        self.journal.append("event", kind, message)

    def finish(self, state: AttemptState, **told: Any) -> None:
        require_end_state(state)
        self.journal.append("finish", state, **told)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


class JournalReader:
    """Applies the lines of an attempt's journal to the database, those that are whole. Used from one thread."""

    def __init__(self, path: Path, store: Store, attempt_id: int, fence: int) -> None:
        self.path = path
        self._writer: AttemptWriter = DatabaseRecorder(store, attempt_id, fence)
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
        """What a line asks for. Raises KeyError or TypeError for one that no attempt writes."""
        record = RECORD_TYPES.get(call)
        if call == "provenance":
            given = [Provenance(**given[0])]
        elif record is not None:
            given = [[record(**one) for one in given[0]]]
        elif call in RENAMED_CALLS:
            # it told whose it was, which the place of the file says
            call, named = (
                RENAMED_CALLS[call],
                {name: value for name, value in named.items() if name not in ("cell_id", "attempt_id")},
            )
        elif call not in CALLS:
            raise KeyError(call)
        return partial(getattr(self._writer, call), *given, **named)


def settle(store: Store, runs: Path, attempt_id: int) -> None:
    """Applies what the journal of an attempt still holds; its process must be gone. Without a journal nothing.

    Raises StoreBusy.
    """
    attempt = store.attempt(attempt_id)
    if attempt.state == "running":
        with contextlib.suppress(LeaseLost):
            JournalReader(runs / attempt.run_dir / JOURNAL, store, attempt.id, attempt.fence).apply()
