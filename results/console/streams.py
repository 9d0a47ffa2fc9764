"""Standard output and standard error of every command: closed, full, or unable to hold a character.

Standard output that nobody reads raises OutputClosed, which ends the command silently. One that cannot be written raises
WriteRefused. Standard error only carries messages, so what it cannot take is dropped. A character that the encoding of
either lacks is written as the ASCII nearest to it.
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
"""Name of the error handler that encodes what an encoding lacks as `nearest_ascii` does."""
_ASCII = {
    **dict.fromkeys("─━═‐‑–—−", "-"),
    **dict.fromkeys("│┃║", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╶╴╷╵", "+"),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("•·", "*"),
    **{"×": "x", "±": "+-", "→": "->", "≤": "<=", "≥": ">=", "≈": "~"},
}


class OutputClosed(BaseException):
    """Nobody reads standard output any more. As with KeyboardInterrupt, only the command line catches it."""

    exit_code = 128 + 13
    """What a shell reports of a program that SIGPIPE ended."""


def nearest_ascii(text: str) -> str:
    """Replace every character that is not ASCII: by one that looks like it, its letter without accent, or a question mark."""
    return "".join(_ASCII.get(sign) or _base_letter(sign) or "?" for sign in text)


def _base_letter(sign: str) -> str:
    return "".join(part for part in unicodedata.normalize("NFKD", sign) if part.isascii())


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return nearest_ascii(error.object[error.start : error.end]), error.end


codecs.register_error(NEAREST_ASCII, _replace)


class UnfailingFile(io.FileIO):
    """An open file descriptor that drops what cannot be written to it."""

    def write(self, data: Any, /) -> int:
        """Write what the system takes, and report all of it as written."""
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


class OutputFile(io.FileIO):
    """File descriptor 1. After the first failure it leads to /dev/null, so that nothing complains of the rest."""

    failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        """Write to standard output.

        Raises:
            OutputClosed: nobody reads it, or its terminal is gone.
            WriteRefused: it cannot be written for another reason, such as a full disk.
        """
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self._failure(error)
            _lead_to_nowhere(self.fileno())
            raise self.failure from error

    def _failure(self, error: OSError) -> BaseException:
        if error.errno == errno.EPIPE or (error.errno == errno.EIO and self.isatty()):
            return OutputClosed()
        cause = error.strerror or str(error)
        return WriteRefused(f"cannot write standard output: {cause}; make room, or send it to a file")


def open_standard_streams() -> None:
    """Set up the three standard streams of this process, which may be closed, for everything that is printed later.

    A descriptor that is closed would be given to the first file opened, such as the database. So standard output becomes
    a pipe without a reader, and the other two /dev/null. A stream that was replaced inside Python is left alone.
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


def write_out(text: str, *, err: bool = False) -> None:
    """Print text as it is, at once, on standard output or standard error.

    Raises: as OutputFile.write, also when what failed was written before and its failure ignored.
    """
    stream = sys.stderr if err else sys.stdout
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, OutputFile) and raw.failure is not None:
        raise raw.failure
    stream.write(text)
    stream.flush()


def _open_closed(descriptor: int) -> None:
    """Open the lowest file descriptor, which is closed, as a stream that leads nowhere."""
    opened = os.pipe() if descriptor == 1 else (os.open(os.devnull, os.O_RDWR),)
    os.dup2(opened[-1], descriptor)
    os.set_inheritable(descriptor, True)
    for handle in opened:
        if handle != descriptor:
            os.close(handle)


def _lead_to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _text_stream(before: TextIO | None, raw: io.FileIO) -> TextIO:
    """A text stream with the encoding of the one before, which holds nothing any more."""
    if before is not None:
        with contextlib.suppress(OSError):
            before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    by_line = bool(getattr(before, "line_buffering", False) or getattr(before, "write_through", False))
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, NEAREST_ASCII, line_buffering=by_line)
