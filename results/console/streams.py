"""Standard output and standard error of every command: closed, full, or with a limited encoding.

Standard output without a reader raises OutputClosed, which ends the command silently; an unwritable one raises
WriteRefused. Standard error only carries messages, so that failed writes to it are ignored. Characters that the
encoding of either lacks are written as the most similar ASCII.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import unicodedata
from typing import Any, TextIO

from ..errors import WriteRefused

NEAREST_ASCII = "atma-sweep-nearest-ascii"
"""Name of the codec error handler that encodes missing characters by `nearest_ascii`."""
_ASCII = {
    **dict.fromkeys("─═‐‑–—−", "-"),
    "━": "=",
    **dict(zip("▁▂▃▄▅▆▇█", "_.,-~=*#", strict=True)),
    **dict.fromkeys("│┃║", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╶╴╷╵", "+"),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("•·", "*"),
    **{"×": "x", "±": "+-", "→": "->", "≤": "<=", "≥": ">=", "≈": "~"},
}


class OutputClosed(BaseException):
    """Standard output has no reader any more. As with KeyboardInterrupt, only the command line catches it."""

    exit_code = 128 + 13
    """Exit status that a shell reports for a program ended by SIGPIPE."""


def nearest_ascii(text: str) -> str:
    """Return the text with every character outside ASCII replaced by similar ASCII.

    That is a look-alike (several characters for some), its base letter without accent, or a question mark.
    """
    return "".join(_ASCII.get(sign) or _base_letter(sign) or "?" for sign in text)


def _base_letter(sign: str) -> str:
    return "".join(part for part in unicodedata.normalize("NFKD", sign) if part.isascii())


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return nearest_ascii(error.object[error.start : error.end]), error.end


codecs.register_error(NEAREST_ASCII, _replace)


class UnfailingFile(io.FileIO):
    """An open file descriptor that ignores failed writes."""

    def write(self, data: Any, /) -> int:
        """Write the data, and report all of it as written even on failure."""
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


class OutputFile(io.FileIO):
    """File descriptor 1. After its first failed write it is redirected to /dev/null, so that later writes succeed."""

    failure: BaseException | None = None
    """Error of the first failed write; None before."""

    def write(self, data: Any, /) -> int:
        """Write to standard output, and return the number of bytes written.

        After the first failure the descriptor is redirected to /dev/null for the entire process and `failure` is set.

        Raises:
            OutputClosed: it has no reader, or its terminal is gone.
            WriteRefused: it cannot be written for another reason, such as a full disk.
        """
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self._failure(error)
            _redirect_to_devnull(self.fileno())
            raise self.failure from error

    def _failure(self, error: OSError) -> BaseException:
        """Return the error to raise for an OSError of a write: OutputClosed without a reader, else WriteRefused."""
        if error.errno == errno.EPIPE or (error.errno == errno.EIO and self.isatty()):
            return OutputClosed()
        cause = error.strerror or str(error)
        return WriteRefused(f"cannot write standard output: {cause}; free disk space, or write to a file")


def open_standard_streams() -> None:
    """Set up the three standard streams of this process, even if they are closed.

    Replaces sys.stdout and sys.stderr. A closed descriptor would be reused for the first file opened, such as the
    database. So a closed standard output becomes a pipe without a reader, and the others /dev/null. Streams that were
    replaced inside Python are not changed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_closed(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _text_stream(sys.stdout, OutputFile(1, "w", closefd=False))
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text_stream(sys.stderr, UnfailingFile(2, "w", closefd=False))


def terminal_width(stream: object) -> int | None:
    """Return the width of the terminal of a stream, in characters; None for a file, a pipe or anything else."""
    import shutil

    isatty = getattr(stream, "isatty", None)
    return shutil.get_terminal_size().columns if isatty is not None and isatty() else None


def write_out(text: str, *, err: bool = False) -> None:
    """Write text unchanged to standard output or (with `err`) standard error, and flush it.

    No newline is added. Failed writes to standard error are ignored.

    Raises:
        OutputClosed: standard output has no reader, also if an earlier write found that.
        WriteRefused: standard output cannot be written, also if an earlier write found that.
    """
    stream = sys.stderr if err else sys.stdout
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, OutputFile) and raw.failure is not None:
        raise raw.failure
    stream.write(text)
    stream.flush()


def _open_closed(descriptor: int) -> None:
    """Open the given closed file descriptor (0, 1 or 2) as a stream without effect.

    Descriptor 1 becomes a pipe without a reader, so that writes fail; the others /dev/null.
    """
    opened = os.pipe() if descriptor == 1 else (os.open(os.devnull, os.O_RDWR),)
    os.dup2(opened[-1], descriptor)
    os.set_inheritable(descriptor, True)
    for handle in opened:
        if handle != descriptor:
            os.close(handle)


def _redirect_to_devnull(descriptor: int) -> None:
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, descriptor)
    os.close(devnull)


def _text_stream(before: TextIO | None, raw: io.FileIO) -> TextIO:
    """Return a text stream on `raw` with the encoding and buffering of an earlier stream, which is flushed.

    Characters that the encoding lacks are written as similar ASCII. `before` None means UTF-8 and block buffering.
    """
    if before is not None:
        with contextlib.suppress(OSError):
            before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    by_line = bool(getattr(before, "line_buffering", False) or getattr(before, "write_through", False))
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, NEAREST_ASCII, line_buffering=by_line)
