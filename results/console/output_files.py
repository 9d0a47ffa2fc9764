"""The one writer of files that people ask for: each takes its place whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import StoreError, WriteRefused
from ..names import quoted_short
from .streams import OutputClosed

STDOUT = Path("-")
"""Standard output, wherever an option names one file."""
SHOWN = 300
MAX_LINKS = 40
_INPUT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ENXIO}
"""What is wrong with the name itself; all else is the machine's."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REMEDIES = {
    errno.EACCES: "see to its permissions, or name another place",
    errno.EPERM: "see to its permissions, or name another place",
    errno.EROFS: "name another place",
    errno.ENOSPC: "make room, or name another place",
    errno.EDQUOT: "make room, or name another place",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name another place",
}


_SYSTEM = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EIO, errno.ESTALE, *_REMEDIES}
"""What an operating system says of a place, whatever we do there; the rest of its errors may be mistakes of ours."""


def size_on_disk(path: Path) -> int:
    """What a file, or all below a folder, takes, bytes; what goes while one looks counts for nothing."""
    taken, files = 0, [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(top, name) for top, _, names in os.walk(path) for name in names]
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            taken += file.lstat().st_size
    return taken


def store_error_for(error: BaseException) -> StoreError | None:
    """What to say when an error that nobody caught is the system's refusal of a place, or a name that is no text; None
    for any other."""
    if isinstance(error, UnicodeEncodeError):
        return _no_text(str(error.object))
    if not isinstance(error, OSError) or error.errno not in _SYSTEM or isinstance(error.filename, int):
        return None
    return refused(error, os.fsdecode(_named(error) or "the place that this goes to"), "use")


def _named(error: OSError) -> str | bytes | None:
    """The path that an error is about: of a copy that its disk cannot take the target, not the source."""
    named = error.filename2 if error.errno in _NO_ROOM and error.filename2 is not None else error.filename
    return None if isinstance(named, int) else named


def _no_text(name: str) -> WriteRefused | None:
    """The error of a name that Python could not read as UTF-8, which no database can hold; None for any other."""
    if not any("\udc80" <= letter <= "\udcff" for letter in name):
        return None
    told = name.encode(errors="surrogateescape").decode(errors="replace")
    return WriteRefused(f"{_short(Path(told))} is not in UTF-8, so it cannot be written down; rename it")


def refused(error: OSError, place: Path | str, verb: str = "write") -> StoreError:
    """What the machine said about a place as one line with a remedy: WriteRefused, or StoreError for a name that
    cannot be."""
    said = error.strerror or str(error) or type(error).__name__
    text = told(Path(place))
    shown = text if len(text) <= SHOWN else quoted_short(text)
    remedy = _REMEDIES.get(error.errno or 0, "name another place")
    kind = StoreError if error.errno in _INPUT else WriteRefused
    return kind(f"cannot {verb} {shown}: {said}; {remedy}")


@contextlib.contextmanager
def translate_os_errors(place: Path | str, verb: str = "write") -> Iterator[None]:
    """Turns what the machine refuses inside into one line about the place, or about the file that it names."""
    try:
        yield
    except OSError as error:
        raise refused(error, os.fsdecode(_named(error) or place), verb) from error


class _StreamWriter(io.RawIOBase):
    """A pipe, device or terminal to write to: it counts what went out, and cannot go back."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._written = stream, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self._written += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()


def _descriptor(to: Path) -> int | None:
    """The number of our own open file that the path means, such as /dev/stdout; opening that anew would begin it anew."""
    ours = ("/dev/fd", f"/proc/{os.getpid()}/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd")
    for _ in range(MAX_LINKS):
        folder = os.path.realpath(to.parent)
        if folder in ours and to.name.isdigit():
            return int(to.name)
        if not os.path.islink(to):
            return None
        to = Path(folder) / os.readlink(to)
    return None


def is_stream(to: Path) -> bool:
    """Whether writing there goes straight into a pipe, a device or what is open already, not into a file of that name."""
    if to == STDOUT or _descriptor(to) is not None:
        return True
    try:
        kind = os.stat(to).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def is_stdout(to: Path | None) -> bool:
    """Whether writing there goes to standard output, which is then no place for anything else."""
    return to is not None and (to == STDOUT or _descriptor(to) == 1)


def told(to: Path) -> str:
    """The place for people."""
    return "standard output" if to == STDOUT else str(to)


@contextlib.contextmanager
def atomic_file(to: Path, option: str = "--out") -> Iterator[IO[bytes]]:
    """A file that takes its place when it is whole. A link is followed; pipes, devices and `-` are written straight into.

    Raises StoreError for a name that cannot be (no such folder, a folder itself), WriteRefused when the machine does not
    let us (permissions, read-only, no room).
    """
    try:
        if is_stream(to):
            with _straight(to) as straight:
                yield straight
            return
        final = Path(os.path.realpath(to))
        mode = _may_replace(final, to, option)
        # of its own name only a piece, since the whole may be as long as a name can be
        aside = final.with_name(f".{final.name[:60]}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as stream:
                if mode is not None:
                    os.fchmod(stream.fileno(), mode)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(aside, final)
            fsync_path(final.parent)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise refused(error, to) from error


def _may_replace(final: Path, to: Path, option: str) -> int | None:
    """The mode of the file that is there, None for none. Raises StoreError, OSError."""
    try:
        found = os.stat(final)
    except (FileNotFoundError, NotADirectoryError):
        check_parent(final, option)
        return None
    if stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{to} is a folder; name a file with {option}")
    if not os.access(final, os.W_OK):
        # a rename would not ask
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(found.st_mode)


@contextlib.contextmanager
def _straight(to: Path) -> Iterator[IO[bytes]]:
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno() if to == STDOUT else _descriptor(to)
    except io.UnsupportedOperation:  # standard output was redirected inside this process
        yield _StreamWriter(sys.stdout.buffer)  # type: ignore[misc]
        return
    # a copy, so that nothing stays behind in the buffer of standard output when it cannot be written
    handle = os.dup(number) if number is not None else os.open(to, os.O_WRONLY | os.O_CLOEXEC)
    with os.fdopen(handle, "wb") as stream:
        yield _StreamWriter(stream)  # type: ignore[misc]


def write(to: Path, content: str | bytes, option: str = "--out") -> None:
    """Writes a whole file as `atomic_file` does; text as UTF-8. Raises StoreError, WriteRefused."""
    with atomic_file(to, option) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def check_parent(to: Path, option: str = "--out") -> None:
    """Raises StoreError unless the folder that `to` would stand in is there."""
    if not os.path.isdir(to.parent):
        where = _short(to.parent)
        if os.path.lexists(to.parent):
            raise StoreError(f"{where} is no folder; name another place with {option}")
        raise StoreError(f"there is no folder {where}; make it, or name another place with {option}")


def _short(path: Path) -> str:
    return str(path) if len(str(path)) <= SHOWN else quoted_short(path)


def resolve_format(
    to: Path | None, said: str | None, endings: Mapping[str, str], default: str, *, option: str = "--format"
) -> str:
    """The format to write: what was said, else what the file's ending means; `default` where there is no file with one.

    `endings` are the known ones in lower case. Raises StoreError for a folder, an unknown ending, and for one of another format
    than was said.
    """
    if to is None or is_stream(to):
        return said or default
    if os.path.isdir(to):
        raise StoreError(f"{to} is a folder; name a file")
    meant = endings.get(to.suffix.lower())
    if meant is None and said is None:
        known = ", ".join(endings)
        raise StoreError(
            f"{quoted_short(to.name)} has no ending that names a format; end it in {known}"
            + (f", or add {option}" if option else "")
        )
    if said is not None and meant is not None and meant != said:
        raise StoreError(f"{quoted_short(to.name)} ends as {meant}, but {option} says {said}; change one of them")
    return said or str(meant)


def make_folder(to: Path, option: str = "--out", *, parents: bool = False) -> None:
    """Makes a folder unless it is there; those above it only with `parents`. Raises StoreError, WriteRefused."""
    if to == STDOUT:
        raise StoreError(f"{option} names a folder here, and standard output is none; name one")
    try:
        if not parents and not os.path.lexists(to):
            check_parent(Path(os.path.abspath(to)), option)
        to.mkdir(parents=parents, exist_ok=True)
    except FileExistsError as error:
        what = "a link to nothing" if to.is_symlink() and not to.exists() else "no folder"
        raise StoreError(f"{_short(to)} is {what}; name another with {option}") from error
    except OSError as error:
        raise refused(error, to, "make") from error


def check_file_writable(to: Path, option: str = "--out") -> None:
    """Before long work: whether a file can be written there. Raises StoreError, WriteRefused."""
    if is_stream(to):
        return
    with translate_os_errors(to):
        final = Path(os.path.realpath(to))
        _may_replace(final, to, option)
    _try(final.parent)


def check_folder_writable(to: Path, option: str = "--out") -> None:
    """Before anything is made: whether the folder, or the nearest above it that is there, takes files.

    Raises StoreError, WriteRefused.
    """
    place = Path(os.path.abspath(to))
    strange = _no_text(str(place))
    if strange is not None:
        raise strange
    with translate_os_errors(to):
        while not _is_there(place):
            if place.is_symlink() or place == place.parent:
                raise StoreError(f"{_short(place)} is a link to nothing; name another with {option}")
            place = place.parent
        if not os.path.isdir(place):
            raise StoreError(f"{_short(place)} is no folder; name another with {option}")
    _try(place)


def _is_there(place: Path) -> bool:
    try:
        os.stat(place)
    except FileNotFoundError:
        return False
    return True


def _try(folder: Path) -> None:
    """Makes a file without a name: asking for permission says nothing of read-only mounts, quotas and servers."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise refused(error, folder) from error


@contextlib.contextmanager
def atomic_folder(to: Path, option: str = "--out") -> Iterator[Path]:
    """A new folder that gets its name when it is whole.

    Raises StoreError where something is already or the folder above is not there, WriteRefused.
    """
    if to == STDOUT:
        raise StoreError(f"{option} names a folder here, and standard output is none; name one")
    to = Path(os.path.abspath(to))
    aside = to.with_name(f".{to.name[:60]}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if os.path.lexists(to):
            raise StoreError(f"{to} exists already; name a new folder with {option}")
        check_parent(to, option)
        aside.mkdir()
        yield aside
        os.rename(aside, to)
        fsync_path(to.parent)
    except OSError as error:
        raise refused(error, to) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_regular(path: Path, remedy: str) -> None:
    """Refuse a path to read from that names a folder, a pipe or a device, which might never end, and an empty file.

    Raises StoreError that ends with `remedy`.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise StoreError(f"there is no file {_short(path)}; {remedy}") from error
    except OSError as error:
        raise StoreError(f"cannot read {_short(path)}: {error.strerror}; {remedy}") from error
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise StoreError(f"{_short(path)} is {kind} and no file; {remedy}")
    if status.st_size == 0:
        raise StoreError(f"{_short(path)} is empty; {remedy}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
