"""Journal file of an attempt whose database only another machine may write.

The attempt calls a JournalRecorder like a DatabaseRecorder, and each call becomes one line. The process that holds the
database applies the lines to a DatabaseRecorder, in order (JournalReader). The file grows while the database is locked
or unreachable, and applying a line twice changes nothing. The file is in the attempt's folder next to its checkpoints,
so that an attempt that resumes from a checkpoint of a lost machine also finds all numbers before it.
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
"""Record classes of the calls whose argument is a list of mappings. The argument of `provenance` is one mapping."""
UNSYNCED_CALLS = ("heartbeat", "progress")
"""Calls that do not wait for the disk, since losing them in a power failure does no harm."""
CALLS = (*UNSYNCED_CALLS, "set_process", "neighbours", "inherit_curve", "checkpoint", "event", "finish")
"""Calls that a line may contain besides those with records; a line has their arguments."""
RENAMED_CALLS = {"add_event": "event", "finish_attempt": "finish"}
"""Names of calls in journals of earlier releases, which may still exist next to attempts that were killed."""


class Journal:
    """Journal of one attempt, written by its process alone. Raises OSError if the disk does not accept a line."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending, create it if missing, and make its directory entry durable."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._file).st_size
        fsync_path(path.parent)  # the directory entry must be durable, too

    def append(self, call: str, *arguments: Any, **named: Any) -> None:
        """Append a call as one line of JSON; it is on the disk on return, except for "heartbeat" and "progress".

        A partly written line is removed if writing fails. Numbers of numpy and torch become plain numbers; values that
        JSON does not support become text.

        Args:
            call: name of the AttemptWriter method.
            *arguments: its positional arguments.
            **named: its keyword arguments.

        Raises:
            OSError: the disk does not accept the line.
        """
        line = json.dumps({"call": call, "given": arguments, "named": named}, default=_plain).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
            if call not in UNSYNCED_CALLS:
                os.fsync(self._file)
        except OSError:
            # a partial line must not precede the next one
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _plain(value: Any) -> Any:
    """Return numbers of numpy and torch as Python's own, other mappings as dict, and anything else as text."""
    if hasattr(value, "item"):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else str(value)


class JournalRecorder(AttemptWriter):
    """AttemptWriter that writes lines of a journal.

    Only a full disk causes an error here; a lost lease is not detected.
    """

    def __init__(self, path: Path, ends: Mapping[int, CurvePoint] | None = None) -> None:
        """Open the journal for appending; a missing file is created.

        Args:
            path: journal file, in an existing folder.
            ends: last curve point of earlier attempts, by attempt id; needed for `last_point` after `inherit_curve`.
                None for none.

        Raises:
            OSError: the file cannot be opened.
        """
        self.journal = Journal(path)
        self.ends = dict(ends or {})
        self._last: CurvePoint | None = None

    def set_process(self, pid: int, started: float, *, host: str | None = None, space: str | None = None) -> None:
        self.journal.append("set_process", pid, started, host=host, space=space)

    def heartbeat(self) -> None:
        self.journal.append("heartbeat")

    def settle(self) -> None:
        """Do nothing: the line of every call that matters is on the disk and can be applied again."""

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
        """Write the progress as a line that does not wait for the disk; None keeps a column, as in AttemptWriter."""
        self.journal.append("progress", step, steps_total, loss, tokens_per_s, phase)

    def curve(self, points: Sequence[CurvePoint]) -> None:
        """Write the points as one line, and remember the one with the highest step for `last_point`.

        Of points with the same step the last is remembered.
        """
        self.journal.append("curve", [_fields(point) for point in points])
        for point in points:
            if self._last is None or point.step >= self._last.step:
                self._last = CurvePoint(**finite_fields(point))

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        """Write the request as a line, and update `last_point` from the earlier attempt's last point.

        `last_point` does not change if `ends` lacks the earlier attempt or its last point is after `up_to_step`.
        """
        # the earlier attempt's journal is applied before this line
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

    def finish(self, state: AttemptState, **details: Any) -> None:
        require_end_state(state)
        self.journal.append("finish", state, **details)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


class JournalReader:
    """Applies the complete lines of an attempt's journal to the database. For use by one thread.

    A new reader starts at the beginning; lines that were applied before change nothing.
    """

    def __init__(self, path: Path, store: Store, attempt_id: int, fence: int) -> None:
        """Start at the beginning of the journal.

        Args:
            path: journal file; it need not exist.
            store: database.
            attempt_id: attempt of the journal.
            fence: fencing token of the attempt.
        """
        self.path = path
        self._writer: AttemptWriter = DatabaseRecorder(store, attempt_id, fence)
        self._offset = 0
        self._broken = False
        self.has_more = False
        """True if the limit of the last `apply` left complete lines for the next."""

    def apply(self, limit: int | None = None) -> int:
        """Apply the new lines, at most `limit`, and return their number.

        An incomplete last line is left for later. A line that cannot be parsed is the end of the journal: nothing after
        it is applied, now or later, and no error is raised. A missing file counts as empty. Sets `has_more`.

        Args:
            limit: maximum number of lines; None for all.

        Raises:
            LeaseLost: the attempt no longer runs under its fencing token.
            StoreBusy: the database is not available; the next call goes on with the same line.
        """
        if self._broken:
            return 0
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        applied, self.has_more = 0, False
        for line in lines:
            self.has_more = line.endswith(b"\n") and applied == limit
            if self.has_more or not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                work = self._bound_call(entry["call"], entry["given"], entry["named"])
            except (ValueError, TypeError, KeyError):
                self._broken = True
                break
            work()
            self._offset += len(line)
            applied += 1
        return applied

    def _bound_call(self, call: str, arguments: list[Any], named: dict[str, Any]) -> Callable[[], None]:
        """Return the call that a line describes, as a function without arguments; nothing is written yet.

        Args:
            call: name of an AttemptWriter method, or of one of an earlier release ("add_event", "finish_attempt").
            arguments: positional arguments; records are mappings of their fields.
            named: keyword arguments.

        Raises:
            KeyError: the call is not one that attempts write.
            TypeError: the fields of a record do not fit.
            ValueError: a measurement has neither value nor reason.
        """
        record = RECORD_TYPES.get(call)
        if call == "provenance":
            arguments = [Provenance(**arguments[0])]
        elif record is not None:
            arguments = [[record(**fields) for fields in arguments[0]]]
        elif call in RENAMED_CALLS:
            # older lines also name the cell and the attempt, which the journal's folder already determines
            call, named = (
                RENAMED_CALLS[call],
                {name: value for name, value in named.items() if name not in ("cell_id", "attempt_id")},
            )
        elif call not in CALLS:
            raise KeyError(call)
        return partial(getattr(self._writer, call), *arguments, **named)


def apply_remaining(store: Store, runs: Path, attempt_id: int) -> None:
    """Apply all remaining lines of an attempt's journal; its process must be gone.

    Does nothing without a journal or if the attempt is not running. A lost lease ends it silently.

    Args:
        store: database.
        runs: runs folder, which holds the attempt's folder.
        attempt_id: attempt.

    Raises:
        StoreBusy: the database is not available.
        AttemptUnknown: there is no such attempt.
    """
    attempt = store.attempt(attempt_id)
    if attempt.state == "running":
        with contextlib.suppress(LeaseLost):
            JournalReader(runs / attempt.run_dir / JOURNAL, store, attempt.id, attempt.fence).apply()
