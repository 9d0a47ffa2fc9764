"""`atma-sweep logs`: what an attempt printed, from its log.txt on this machine, while it runs or afterwards."""

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

LOG = "log.txt"
POLL_S = 0.2
ASK_S = 1.0
"""How often the database is asked whether the attempt still runs."""
SETTLE_S = (0.5, 5.0)
"""After the end of an attempt: followed until nothing came for the first, at most for the second. Its last words, a
traceback for instance, come after it told the database."""
BLOCK = 2**16


class LogMissing(SweepError):
    """There is no such attempt, or its log is not on this machine."""


class JsonLines:
    """An Out that turns each line of text into one JSON object, {"line": ...}, on its own line."""

    def __init__(self, out: TextStream) -> None:
        self._out, self._rest = out, ""

    def write(self, text: str, /) -> None:
        """Hands complete lines on."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._out.write(json.dumps({"line": without_passwords(line)}) + "\n")

    def flush(self) -> None:
        """Lets complete lines be seen."""
        self._out.flush()

    def close(self) -> None:
        """Hands on a last line that no newline ended."""
        if self._rest:
            self.write("\n")
        self.flush()


def attempt_of(store: Store, asked: str, attempt: int | None = None, sweep: str | None = None) -> Attempt:
    """The cell's newest attempt, or the one with that number. Raises LogMissing, and as `Store.find_cell` does."""
    cell = store.find_cell(asked, sweep)
    known = store.attempts(cell.id)
    if not known:
        raise LogMissing(f"cell {cell.id} ({cell.slug}) has no attempt yet; launch its grid")
    chosen = [one for one in known if attempt is None or one.number == attempt]
    if not chosen:
        numbers = ", ".join(str(one.number) for one in known)
        raise LogMissing(f"cell {cell.id} ({cell.slug}) has no attempt {attempt}; there is: {numbers}")
    return chosen[-1]


def log_of(store: Store, runs: Path, asked: str, attempt: int | None = None, sweep: str | None = None) -> Path:
    """The log of a cell's newest attempt, or of the one with that number.

    `asked` as for `Store.find_cell`; `runs` is the folder of artifacts. That of an attempt which runs on this machine need not
    exist yet. Raises LogMissing with where it lies when that is not here, and as `Store.find_cell` does.
    """
    found = attempt_of(store, asked, attempt, sweep)
    # a URL that went through Path has lost a slash
    if re.search(r"(^|/)[a-z][a-z0-9+]+:/", str(runs)) or "://" in found.run_dir:
        raise LogMissing(
            f"logs lie on the disk of the machine that ran the attempt ({found.host}), not in {runs}; name its runs folder with --runs"
        )
    path = runs / found.run_dir / LOG
    here = found.host == socket.gethostname()
    if path.is_file() or (here and found.state == "running"):
        return path
    if not here:
        raise LogMissing(
            f"attempt {found.number} ran on {found.host} and its log is not in {path}; ask there, or name a folder that "
            "both share with --runs"
        )
    raise LogMissing(f"attempt {found.number} left no log in {path}; name its runs folder with --runs")


def liveness_check(store: Store, attempt: Attempt) -> Callable[[], bool]:
    """Says whether an attempt still runs: the database says so, and its process has not vanished from this machine.

    The database is asked once a second at most.
    """
    last: list[tuple[float, bool]] = []

    def alive() -> bool:
        if not last or time.monotonic() - last[0][0] >= ASK_S:
            now = store.attempt(attempt.id)
            here = processes.here(now.host, now.pid_space)
            gone = here and now.pid is not None and processes.find(now.pid, now.pid_started) is None
            last[:] = [(time.monotonic(), now.state == "running" and not gone)]
        return last[0][1]

    return alive


def tail(path: Path, lines: int | None = None) -> str:
    """The last lines of a log, all of them for None; "" when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(_start_of(file, lines))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _start_of(file: IO[bytes], lines: int | None) -> int:
    """Where the last so many lines begin. Reads backwards, so that a large log costs no more than a small one."""
    if lines is None:
        return 0
    end = position = file.seek(0, os.SEEK_END)
    if lines == 0 or end == 0:
        return end
    file.seek(end - 1)
    # a newline at the very end ends the last line and begins none
    wanted = lines + (file.read(1) == b"\n")
    while position > 0:
        step = min(BLOCK, position)
        position -= step
        file.seek(position)
        block = file.read(step)
        if block.count(b"\n") >= wanted:
            at = len(block)
            for _ in range(wanted):
                at = block.rfind(b"\n", 0, at)
            return position + at + 1
        wanted -= block.count(b"\n")
    return 0


def follow(
    path: Path, alive: Callable[[], bool], out: TextStream, *, lines: int | None = None, poll: float = POLL_S
) -> None:
    """Writes the last `lines` of a log (None: all) and what is appended, until `alive` says no; `poll` in seconds.

    A file that appears later is read from its beginning, and so is one that was cut short or replaced; what the old
    one still held comes first. Ctrl-C ends it quietly.
    """
    log = _Log(path, lines)
    try:
        while alive():
            log.copy(out)
            time.sleep(poll)
        ended = quiet = time.monotonic()
        while time.monotonic() - quiet < SETTLE_S[0] and time.monotonic() - ended < SETTLE_S[1]:
            if log.copy(out):
                quiet = time.monotonic()
            time.sleep(min(poll, SETTLE_S[0] / 4))
        log.copy(out)
    except KeyboardInterrupt:
        pass
    finally:
        log.close()


class _Log:
    """A file that grows, and may be missing, cut short or replaced."""

    def __init__(self, path: Path, lines: int | None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if self._open() and self._file is not None:
            self._file.seek(_start_of(self._file, lines))

    def copy(self, out: TextStream) -> bool:
        """Writes what is new; whether there was anything."""
        text = self.read()
        if text:
            out.write(text)
            out.flush()
        return bool(text)

    def read(self) -> str:
        """What is new."""
        if self._file is None and not self._open():
            return ""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._decoder.reset()
        text = self._decoder.decode(self._file.read())
        if self._replaced():
            text += self._decoder.decode(self._file.read(), final=True)
            self.close()
            if self._open():
                text += self._decoder.decode(self._file.read())
        return text

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return False
        self._decoder.reset()
        return True

    def _replaced(self) -> bool:
        assert self._file is not None
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False  # between the old one and the new
        mine = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
