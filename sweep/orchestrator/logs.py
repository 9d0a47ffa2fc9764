"""`atma-sweep logs`: the output of an attempt, from its log.txt on this machine, live or afterwards."""

from __future__ import annotations

import codecs
import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ...results.console.text import TextStream, without_passwords
from ...results.store.records import Attempt
from ...results.store.store import Store
from ..errors import SweepError
from ..host import processes

LOG_FILE = "log.txt"
POLL_S = 0.2
"""Seconds between two reads of a followed log."""
LIVENESS_POLL_S = 1.0
"""Seconds between two database queries for the attempt's state."""
DRAIN_S = (0.5, 5.0)
"""Seconds to go on reading after an attempt has ended: until nothing came for the first, at most the second. Its last
output, such as a traceback, may arrive after the database records the end.
"""
READ_BLOCK_BYTES = 2**16
"""Size of the blocks in which a log is read backwards."""


class LogMissing(SweepError):
    """Error of an attempt that does not exist, or whose log is not on this machine."""


class JsonLines:
    """Text stream that writes each line of text as one JSON object, {"line": ...}, with passwords masked."""

    def __init__(self, out: TextStream) -> None:
        self._out, self._rest = out, ""

    def write(self, text: str, /) -> None:
        """Write the complete lines of the text so far as JSON, and buffer the rest."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._out.write(json.dumps({"line": without_passwords(line)}) + "\n")

    def flush(self) -> None:
        """Flush the underlying stream; an incomplete line stays buffered."""
        self._out.flush()

    def close(self) -> None:
        """Write a last line that no newline ended, and flush. The underlying stream stays open."""
        if self._rest:
            self.write("\n")
        self.flush()


def resolve_attempt(store: Store, cell_name: str, number: int | None = None, sweep: str | None = None) -> Attempt:
    """Return a cell's newest attempt of any kind (training or evaluation), or the one with the given number.

    Args:
        store: Database with the cell.
        cell_name: Cell by slug or id, as `Store.find_cell` takes it.
        number: Number of the attempt within its cell, from 1; None for the newest.
        sweep: Sweep to look for the cell in; None as for `Store.find_cell`. Attempts of all sweeps count.

    Raises:
        LogMissing: The cell has no attempt, or none of that number.
        CellUnknown: There is no such cell.
        CellAmbiguous: The name fits several cells.
    """
    cell = store.find_cell(cell_name, sweep)
    attempts = store.attempts(cell.id)
    if not attempts:
        raise LogMissing(f"cell {cell.id} ({cell.slug}) has no attempt yet; launch its grid")
    matches = [attempt for attempt in attempts if number is None or attempt.number == number]
    if not matches:
        numbers = ", ".join(str(attempt.number) for attempt in attempts)
        raise LogMissing(f"cell {cell.id} ({cell.slug}) has no attempt {number}; its attempts: {numbers}")
    return matches[-1]


def log_path(store: Store, runs: Path, cell_name: str, number: int | None = None, sweep: str | None = None) -> Path:
    """Return the path of an attempt's log. The file may be absent only while the attempt runs on this machine.

    Args:
        store: Database with the cell.
        runs: Runs folder; a URL raises LogMissing.
        cell_name: Cell by slug or id, as `Store.find_cell` takes it.
        number: Number of the attempt within its cell, from 1; None for the newest.
        sweep: Sweep to look for the cell in; None as for `Store.find_cell`.

    Raises:
        LogMissing: The cell has no such attempt, or its log is not here. For an attempt of another host, the message
            names that host.
        CellUnknown: There is no such cell.
        CellAmbiguous: The name fits several cells.
    """
    attempt = resolve_attempt(store, cell_name, number, sweep)
    # Path collapses the // of a URL
    if re.search(r"(^|/)[a-z][a-z0-9+]+:/", str(runs)) or "://" in attempt.run_dir:
        raise LogMissing(
            f"the log is on the disk of the machine that ran the attempt ({attempt.host}), not in {runs}; name its runs folder with --runs"
        )
    path = runs / attempt.run_dir / LOG_FILE
    is_local = attempt.host == socket.gethostname()
    if path.is_file() or (is_local and attempt.state == "running"):
        return path
    if not is_local:
        raise LogMissing(
            f"attempt {attempt.number} ran on {attempt.host}, and its log is not in {path}; run this command there, or "
            "pass a folder that both machines share with --runs"
        )
    raise LogMissing(f"attempt {attempt.number} left no log in {path}; name its runs folder with --runs")


def liveness_check(store: Store, attempt: Attempt) -> Callable[[], bool]:
    """Return a function that tells if the attempt still runs.

    It does while the database has it as running, unless its process was on this machine and is gone. An attempt on
    another machine, or without a recorded process, is judged by the database alone. A result is cached for 1 s
    (LIVENESS_POLL_S).
    """
    cached: list[tuple[float, bool]] = []

    def is_alive() -> bool:
        """Return the cached result, renewed after 1 s (LIVENESS_POLL_S)."""
        if not cached or time.monotonic() - cached[0][0] >= LIVENESS_POLL_S:
            current = store.attempt(attempt.id)
            is_local = processes.is_local_pid(current.host, current.pid_space)
            gone = (
                is_local
                and current.pid is not None
                and processes.find_process(current.pid, current.pid_started) is None
            )
            cached[:] = [(time.monotonic(), current.state == "running" and not gone)]
        return cached[0][1]

    return is_alive


def tail(path: Path, lines: int | None = None) -> str:
    """Return the last `lines` lines of a log as text (None: the entire log); "" if the file does not exist.

    An unfinished last line counts as a line; 0 lines give "". Invalid UTF-8 is replaced.
    """
    try:
        with path.open("rb") as file:
            file.seek(_offset_of_last_lines(file, lines))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _offset_of_last_lines(file: IO[bytes], lines: int | None) -> int:
    """Return the byte offset of the last `lines` lines of an open file: 0 for None, its end for 0.

    0 also if the file has fewer lines. An unfinished last line counts as a line. Reads backwards in blocks, so that a
    large log costs no more than a small one. Moves the file's position.
    """
    if lines is None:
        return 0
    end = position = file.seek(0, os.SEEK_END)
    if lines == 0 or end == 0:
        return end
    file.seek(end - 1)
    # a final newline ends the last line and starts no new one
    newlines_needed = lines + (file.read(1) == b"\n")
    while position > 0:
        block_bytes = min(READ_BLOCK_BYTES, position)
        position -= block_bytes
        file.seek(position)
        block = file.read(block_bytes)
        if block.count(b"\n") >= newlines_needed:
            newline = len(block)
            for _ in range(newlines_needed):
                newline = block.rfind(b"\n", 0, newline)
            return position + newline + 1
        newlines_needed -= block.count(b"\n")
    return 0


def follow(
    path: Path, is_alive: Callable[[], bool], out: TextStream, *, lines: int | None = None, poll_s: float = POLL_S
) -> None:
    """Write the last lines of a log and then everything appended to it; block until the attempt ends.

    A file that appears later, was truncated or was replaced is read from its beginning; the unread rest of the replaced
    file comes first. After the attempt's end, reading goes on until nothing came for 0.5 s, for at most 5 s (DRAIN_S).
    Ctrl-C ends the function without an exception. `out` stays open.

    Args:
        path: Log file, which need not exist yet.
        is_alive: Tells if the attempt still runs; called before each read.
        out: Stream to write to; flushed after every write.
        lines: Number of existing lines to begin with; None for all.
        poll_s: Seconds between two reads.
    """
    log = _TailedFile(path, lines)
    try:
        while is_alive():
            log.copy_new_text(out)
            time.sleep(poll_s)
        ended = quiet = time.monotonic()
        while time.monotonic() - quiet < DRAIN_S[0] and time.monotonic() - ended < DRAIN_S[1]:
            if log.copy_new_text(out):
                quiet = time.monotonic()
            time.sleep(min(poll_s, DRAIN_S[0] / 4))
        log.copy_new_text(out)
    except KeyboardInterrupt:
        pass
    finally:
        log.close()


class _TailedFile:
    """File that grows and may be missing, truncated or replaced; yields the text added since the last read."""

    def __init__(self, path: Path, lines: int | None) -> None:
        """Open the file, if it exists, at its last `lines` lines (None: at its start).

        A file that appears later is read from its start.
        """
        self.path = path
        self._file: IO[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if self._open() and self._file is not None:
            self._file.seek(_offset_of_last_lines(self._file, lines))

    def copy_new_text(self, out: TextStream) -> bool:
        """Write the text added since the last call to `out` and flush it; return False if there was none."""
        text = self.read_new_text()
        if text:
            out.write(text)
            out.flush()
        return bool(text)

    def read_new_text(self) -> str:
        """Return the text added since the last call; "" while the file is missing.

        A file that became shorter is read from its start. Of a replaced file, the rest of the old one and all of the
        new one are returned. Bytes of an incomplete character are kept for the next call; invalid UTF-8 is replaced.
        """
        if self._file is None and not self._open():
            return ""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._decoder.reset()
        text = self._decoder.decode(self._file.read())
        if self._was_replaced():
            text += self._decoder.decode(self._file.read(), final=True)
            self.close()
            if self._open():
                text += self._decoder.decode(self._file.read())
        return text

    def _open(self) -> bool:
        """Open the file at its start and reset the decoder; return False if the file does not exist.

        Other errors, such as a missing permission, are raised.
        """
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return False
        self._decoder.reset()
        return True

    def _was_replaced(self) -> bool:
        """Return True if the path now names another file than the open one; False while it names none.

        Files are told apart by device and inode.
        """
        assert self._file is not None
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            return False  # between removal and creation
        opened = os.fstat(self._file.fileno())
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None
