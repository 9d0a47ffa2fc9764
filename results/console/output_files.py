"""Writing of files that users request: a file or folder appears under its name only when it is complete."""

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
"""Path that stands for standard output in options that name a file."""
MAX_SHOWN_CHARS = 300
MAX_LINKS = 40
_NAME_ERRORS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ENXIO}
"""Error numbers that mean a wrong name; the others are caused by the machine."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REMEDIES = {
    errno.EACCES: "check its permissions, or choose another path",
    errno.EPERM: "check its permissions, or choose another path",
    errno.EROFS: "choose another path",
    errno.ENOSPC: "free disk space, or choose another path",
    errno.EDQUOT: "free disk space, or choose another path",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another path",
}


_PATH_ERRORS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EIO, errno.ESTALE, *_REMEDIES}
"""Error numbers that the operating system reports for a path, whatever the program does.

Others may be bugs of this program.
"""


def size_on_disk(path: Path) -> int:
    """Return the size of a file, or of all files below a folder, in bytes; 0 for a missing path.

    Sizes are those of the content (st_size), not of the blocks used. Links are not followed; a link counts with its own
    size. Files that vanish meanwhile count as 0.
    """
    total_bytes, files = 0, [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(top, name) for top, _, names in os.walk(path) for name in names]
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total_bytes += file.lstat().st_size
    return total_bytes


def store_error_for(error: BaseException) -> StoreError | None:
    """Return the error to show for an uncaught OSError about a path, or for a name that is not UTF-8.

    The result is returned, not raised. OSErrors count if their number says that the system refuses a path whatever the
    program does. These are permission (EACCES, EPERM), read-only (EROFS), no space, quota or size limit (ENOSPC,
    EDQUOT, EFBIG), name too long, too many links, a parent that is no folder, I/O error and stale handle. An error
    without a file name counts, too. None for any other error: a missing or existing file and a folder in place of a
    file may be bugs of this program.
    """
    if isinstance(error, UnicodeEncodeError):
        return _undecodable_name_error(str(error.object))
    if not isinstance(error, OSError) or error.errno not in _PATH_ERRORS or isinstance(error.filename, int):
        return None
    return path_error(error, os.fsdecode(_error_path(error) or "the output"), "use")


def _error_path(error: OSError) -> str | bytes | None:
    """Return the path that an error is about; for a full disk the target of a copy, not its source."""
    named = error.filename2 if error.errno in _NO_SPACE and error.filename2 is not None else error.filename
    return None if isinstance(named, int) else named


def _undecodable_name_error(name: str) -> WriteRefused | None:
    """Return the error about a name that is not UTF-8, which no database can store; None for any other name.

    Such a name holds surrogates from U+DC80 to U+DCFF, as Python decodes undecodable bytes of file names.
    """
    if not any("\udc80" <= letter <= "\udcff" for letter in name):
        return None
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    return WriteRefused(f"{_short_path(Path(shown))} is not valid UTF-8 and cannot be recorded; rename it")


def path_error(error: OSError, path: Path | str, verb: str = "write") -> StoreError:
    """Return the error about a path as one line with a remedy; it is not raised.

    Args:
        error: error of the operating system.
        path: path that the message names, whichever path the error has.
        verb: refused action ("write", "make", "use").

    Returns:
        A StoreError for a name that is not possible, a WriteRefused for any other reason.
    """
    cause = error.strerror or str(error) or type(error).__name__
    text = display_path(Path(path))
    shown = text if len(text) <= MAX_SHOWN_CHARS else quoted_short(text)
    remedy = _REMEDIES.get(error.errno or 0, "choose another path")
    kind = StoreError if error.errno in _NAME_ERRORS else WriteRefused
    return kind(f"cannot {verb} {shown}: {cause}; {remedy}")


@contextlib.contextmanager
def translate_os_errors(path: Path | str, verb: str = "write") -> Iterator[None]:
    """Turn an OSError inside the context into a StoreError (impossible name) or WriteRefused (any other reason).

    The message is about the path that the error names, or else about `path`; `verb` is the refused action ("write",
    "make", "use"). Other exceptions pass unchanged.
    """
    try:
        yield
    except OSError as error:
        raise path_error(error, os.fsdecode(_error_path(error) or path), verb) from error


class _StreamWriter(io.RawIOBase):
    """Writer for a pipe, device or terminal: it counts the bytes and cannot seek.

    Closing it flushes the stream, which stays open.
    """

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
    """Return the number of this process's own file descriptor that a path such as /dev/stdout names.

    None for other paths. Links are followed, at most 40 (MAX_LINKS). Opening such a path again would truncate the file.
    """
    own_folders = ("/dev/fd", f"/proc/{os.getpid()}/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd")
    for _ in range(MAX_LINKS):
        folder = os.path.realpath(to.parent)
        if folder in own_folders and to.name.isdigit():
            return int(to.name)
        if not os.path.islink(to):
            return None
        to = Path(folder) / os.readlink(to)
    return None


def is_stream(to: Path) -> bool:
    """Return True if the path is a pipe, a device, `-` or an open descriptor, which are written to directly.

    False for files, folders and paths that do not exist or cannot be examined.
    """
    if to == STDOUT or _descriptor(to) is not None:
        return True
    try:
        kind = os.stat(to).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def is_stdout(to: Path | None) -> bool:
    """Return True if the path means standard output, so that nothing else may be printed there."""
    return to is not None and (to == STDOUT or _descriptor(to) == 1)


def display_path(to: Path) -> str:
    """Return the path as shown to the user."""
    return "standard output" if to == STDOUT else str(to)


@contextlib.contextmanager
def atomic_file(to: Path, option: str = "--out") -> Iterator[IO[bytes]]:
    """Yield a binary stream whose content appears under the name when it is complete.

    A link is followed. Pipes, devices and `-` are written to directly, so that a part may have been written before an
    error. An existing file keeps its permissions. The new file is synced; on any exception the old one stays and
    nothing else remains. OSErrors of the body are translated as well.

    Args:
        to: file to write.
        option: option that named the file, for messages.

    Raises:
        StoreError: the name is not possible (no such folder, or a folder itself).
        WriteRefused: permissions, a read-only file system, or no free space.
        OutputClosed: the reader of a pipe is gone.
    """
    try:
        if is_stream(to):
            with _open_stream(to) as straight:
                yield straight
            return
        final = Path(os.path.realpath(to))
        mode = _may_replace(final, to, option)
        # only a part of the name, which may already have the maximum length
        temporary = final.with_name(f".{final.name[:60]}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb"
            ) as stream:
                if mode is not None:
                    os.fchmod(stream.fileno(), mode)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, final)
            fsync_path(final.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except BrokenPipeError as error:
        raise OutputClosed from error
    except OSError as error:
        raise path_error(error, to) from error


def _may_replace(final: Path, to: Path, option: str) -> int | None:
    """Return the permissions (mode bits) of the existing file; None if there is none and its folder exists.

    Args:
        final: path with links resolved.
        to: path as the user gave it, for messages.
        option: option that named it, for messages.

    Raises:
        StoreError: it is a folder, or its parent folder does not exist.
        OSError: it may not be written.
    """
    try:
        status = os.stat(final)
    except (FileNotFoundError, NotADirectoryError):
        check_parent(final, option)
        return None
    if stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{to} is a folder; name a file with {option}")
    if not os.access(final, os.W_OK):
        # a rename would ignore the file's permissions
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(status.st_mode)


@contextlib.contextmanager
def _open_stream(to: Path) -> Iterator[IO[bytes]]:
    """Yield a writer for a pipe, a device or standard output.

    Flushes sys.stdout first. The writer uses a copy of the descriptor, closed when the context ends, or sys.stdout
    itself if that was replaced inside this process. Raises OSError if the path cannot be opened.
    """
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno() if to == STDOUT else _descriptor(to)
    except io.UnsupportedOperation:  # standard output was redirected inside this process
        yield _StreamWriter(sys.stdout.buffer)  # type: ignore[misc]
        return
    # a copy of the descriptor, so that a failed write leaves nothing in the buffer of standard output
    handle = os.dup(number) if number is not None else os.open(to, os.O_WRONLY | os.O_CLOEXEC)
    with os.fdopen(handle, "wb") as stream:
        yield _StreamWriter(stream)  # type: ignore[misc]


def write_file(to: Path, content: str | bytes, option: str = "--out") -> None:
    """Write a complete file as `atomic_file` does; text as UTF-8. Raises StoreError, WriteRefused."""
    with atomic_file(to, option) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def check_parent(to: Path, option: str = "--out") -> None:
    """Raise StoreError unless the parent folder of `to` exists; `option` is named in the message."""
    if not os.path.isdir(to.parent):
        folder = _short_path(to.parent)
        if os.path.lexists(to.parent):
            raise StoreError(f"{folder} is not a folder; choose another with {option}")
        raise StoreError(f"folder {folder} does not exist; create it, or choose another with {option}")


def _short_path(path: Path) -> str:
    return str(path) if len(str(path)) <= MAX_SHOWN_CHARS else quoted_short(path)


def resolve_format(
    to: Path | None, format_name: str | None, endings: Mapping[str, str], default: str, *, option: str = "--format"
) -> str:
    """Return the format to write: the given one, else that of the file's suffix, else `default` for a stream.

    Args:
        to: file to write; None for standard output.
        format_name: format named by the user; None for none. It is not validated here.
        endings: format by lower-case suffix, with its dot.
        default: format for streams (None, pipes, devices, `-`).
        option: option that names the format, for messages.

    Raises:
        StoreError: the path is a folder, the suffix is unknown and no format is given, or it contradicts the given
            format.
    """
    if to is None or is_stream(to):
        return format_name or default
    if os.path.isdir(to):
        raise StoreError(f"{to} is a folder; name a file")
    implied = endings.get(to.suffix.lower())
    if implied is None and format_name is None:
        endings_text = ", ".join(endings)
        raise StoreError(
            f"{quoted_short(to.name)} has no file extension of a known format; use one of {endings_text}"
            + (f", or add {option}" if option else "")
        )
    if format_name is not None and implied is not None and implied != format_name:
        raise StoreError(
            f"{quoted_short(to.name)} has the extension of {implied}, but {option} is {format_name}; change one of them"
        )
    return format_name or str(implied)


def make_folder(to: Path, option: str = "--out", *, parents: bool = False) -> None:
    """Create a folder unless it exists; a link to a folder is accepted.

    Args:
        to: folder.
        option: option that named it, for messages.
        parents: create missing parent folders as well.

    Raises:
        StoreError: the name is not possible or `-`, a file has it, or a parent is missing.
        WriteRefused: permissions, a read-only file system, or no free space.
    """
    if to == STDOUT:
        raise StoreError(f"{option} needs a folder here, not standard output; name a folder")
    try:
        if not parents and not os.path.lexists(to):
            check_parent(Path(os.path.abspath(to)), option)
        to.mkdir(parents=parents, exist_ok=True)
    except FileExistsError as error:
        kind = "a broken symbolic link" if to.is_symlink() and not to.exists() else "not a folder"
        raise StoreError(f"{_short_path(to)} is {kind}; choose another with {option}") from error
    except OSError as error:
        raise path_error(error, to, "make") from error


def check_file_writable(to: Path, option: str = "--out") -> None:
    """Check before long work that a file can be written; creates and removes an unnamed file in its folder.

    Streams such as pipes and `-` pass unchecked.

    Args:
        to: file.
        option: option that named it, for messages.

    Raises:
        StoreError: the name is not possible (no such folder, or a folder itself).
        WriteRefused: it cannot be written.
    """
    if is_stream(to):
        return
    with translate_os_errors(to):
        final = Path(os.path.realpath(to))
        _may_replace(final, to, option)
    _check_writable(final.parent)


def check_folder_writable(to: Path, option: str = "--out") -> None:
    """Check that the folder, or its nearest existing parent, accepts files.

    Creates and removes an unnamed file there; creates no folder.

    Args:
        to: folder, which need not exist.
        option: option that named it, for messages.

    Raises:
        StoreError: the name is not possible.
        WriteRefused: no file can be written there, or the path is not UTF-8.
    """
    path = Path(os.path.abspath(to))
    name_error = _undecodable_name_error(str(path))
    if name_error is not None:
        raise name_error
    with translate_os_errors(to):
        while not _exists(path):
            if path.is_symlink() or path == path.parent:
                raise StoreError(f"{_short_path(path)} is a broken symbolic link; choose another with {option}")
            path = path.parent
        if not os.path.isdir(path):
            raise StoreError(f"{_short_path(path)} is not a folder; choose another with {option}")
    _check_writable(path)


def _exists(path: Path) -> bool:
    """Return True if the path exists; a broken link does not. Raises OSError other than FileNotFoundError."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _check_writable(folder: Path) -> None:
    """Create and remove an unnamed file in a folder. Raises StoreError or WriteRefused if that fails.

    A permission check would miss read-only mounts, quotas and network file systems.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise path_error(error, folder) from error


@contextlib.contextmanager
def atomic_folder(to: Path, option: str = "--out") -> Iterator[Path]:
    """Yield a new folder that gets its name when it is complete; it is deleted on an exception.

    Until then its name is that of a hidden folder next to the target. OSErrors of the body are translated as well.

    Args:
        to: new folder, which must not exist.
        option: option that named the folder, for messages.

    Raises:
        StoreError: the name exists, or the parent folder does not.
        WriteRefused: permissions, a read-only file system, or no free space.
    """
    if to == STDOUT:
        raise StoreError(f"{option} needs a folder here, not standard output; name a folder")
    to = Path(os.path.abspath(to))
    temporary = to.with_name(f".{to.name[:60]}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if os.path.lexists(to):
            raise StoreError(f"{to} exists already; name a new folder with {option}")
        check_parent(to, option)
        temporary.mkdir()
        yield temporary
        os.rename(temporary, to)
        fsync_path(to.parent)
    except OSError as error:
        raise path_error(error, to) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_regular(path: Path, remedy: str) -> None:
    """Raise StoreError, ending with `remedy`, unless a path to read from is a non-empty regular file.

    Links are followed. Pipes and devices are refused because reading them might never end. The permission to read is
    not checked.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise StoreError(f"there is no file {_short_path(path)}; {remedy}") from error
    except OSError as error:
        raise StoreError(f"cannot read {_short_path(path)}: {error.strerror}; {remedy}") from error
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise StoreError(f"{_short_path(path)} is {kind}, not a file; {remedy}")
    if status.st_size == 0:
        raise StoreError(f"{_short_path(path)} is empty; {remedy}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
