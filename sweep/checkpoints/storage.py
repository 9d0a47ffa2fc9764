"""Storage of checkpoints and weights: a local folder, or any fsspec URL such as s3://bucket/folder.

An *address* names a storage location as text: an absolute path, a URL, or a path relative to the runs folder. The
database stores addresses. A *bundle* is a folder of files with a seal, such as a checkpoint. On a local disk it is
written under a temporary name, synced and renamed. Object stores cannot rename, so there the files are written under
their final names and the seal, a small file with their hashes (see seal.py), last: a bundle without a valid seal counts
as absent. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...results.console.output_files import fsync_path, sha256
from ..errors import MachineError, SweepError
from .seal import SEAL, map_in_threads, seal_content

Writer = Callable[[Path], None]
"""Function that writes one file to the given local path; failures are OSErrors."""


class StorageError(MachineError):
    """Exception for a storage location that cannot be reached, written or trusted."""


class StorageOccupied(StorageError):
    """Exception for a storage location that holds the state of another training."""

    passing = False


class StorageAddressError(SweepError):
    """Exception for text that is no valid address."""


SCHEMES = frozenset(
    "file local s3 s3a gs gcs az abfs abfss adl oss oci hf hdfs webhdfs sftp ssh smb webdav memory".split()
)
"""Allowed URL schemes, which name plain file stores.

fsspec supports further ones that read other addresses from files, unpack archives or call services, and it allows
chains with `::`.
"""


# --- addresses ------------------------------------------------------------------------------------------------------


def join(address: str | Path, *names: str) -> str:
    """Return the address of an entry inside a storage location."""
    return "/".join([str(address).rstrip("/"), *names])


def split(address: str) -> tuple[str, str]:
    """Split an address into (address of the containing storage location, name of the entry)."""
    folder, _, name = address.rpartition("/")
    return folder, name


def resolve(runs: Path, address: str) -> str:
    """Return the full address of one in the database: a relative path lies under the runs folder.

    An absolute path and a URL are returned as they are.
    """
    return address if "://" in address else str(runs / address)


def attempt_address(path: str | None, folder: str) -> str:
    """Return the address of the folder for an attempt's state, as the database stores it.

    Args:
        path: Value of checkpoint.path; None uses the attempt's own folder.
        folder: Folder of the attempt, relative to the runs folder; it is appended to `path`.

    Raises:
        StorageAddressError: `path` is a file:// or local:// URL with a relative path.
    """
    if path is None:
        return folder
    local = _local_path(path)
    return join(path if local is None else local, folder)


def check_address(address: str) -> None:
    """Check that an address is a path or one plain URL; no other address is ever given to fsspec.

    Raises:
        StorageAddressError: The address is a chain of URLs, or its scheme is not in `SCHEMES` (file, local, s3, gs, az,
            hdfs, sftp, webdav, memory and more; not http).
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        return
    if "::" in address:
        raise StorageAddressError(
            f"{address}: chained addresses (::) are not supported; name a folder or one fsspec URL such as s3://..."
        )
    if scheme not in SCHEMES:
        raise StorageAddressError(
            f"{address}: unknown protocol {scheme}; name a folder or an fsspec URL such as s3://..."
        )


def open_storage(address: str | Path) -> Storage:
    """Return the storage location of an address; it need not exist yet, and nothing is created.

    Args:
        address: A full address (`resolve`); a relative path would be one of the working folder.

    Raises:
        StorageAddressError: The address is invalid.
        StorageError: The backend's package is missing, or the backend fails.
    """
    check_address(str(address))
    local = _local_path(str(address))
    return LocalStorage(local) if local is not None else RemoteStorage(str(address))


def exists(address: str) -> bool:
    """Return True if a file (not a folder) exists at a full address.

    Raises:
        StorageAddressError: The address is invalid.
        StorageError: The storage location cannot be reached.
    """
    folder, name = split(address)
    return open_storage(folder).has(name)


def free_bytes(address: str) -> int | None:
    """Return the free bytes of the disk of a local storage location, which need not exist yet.

    The nearest existing parent folder counts. The result is None for a remote location or a file system without a size,
    such as /proc.

    Raises:
        StorageAddressError: The address is a file:// or local:// URL with a relative path.
    """
    local = _local_path(address)
    if local is None:
        return None
    usage = shutil.disk_usage(next(path for path in (local, *local.parents) if path.exists()))
    return usage.free if usage.total else None  # such as /proc


def _local_path(address: str) -> Path | None:
    """Return the local path of an address, which may be relative, or None for a remote one.

    Raises:
        StorageAddressError: The address is a file:// or local:// URL with a relative path.
    """
    scheme, separator, path = address.partition("://")
    if not separator:
        return Path(address)
    if scheme not in ("file", "local"):
        return None
    if not path.startswith("/"):
        raise StorageAddressError(f"{address}: needs an absolute path, as in {scheme}:///data/checkpoints")
    return Path(path)


# --- bundles --------------------------------------------------------------------------------------------------------


def _write_files(folder: Path, writers: Mapping[str, Writer]) -> dict[str, str]:
    """Write and sync every file into `folder`, read it back, and return the SHA-256 in hex by name.

    Files are written in one thread each.

    Args:
        folder: Existing folder.
        writers: Function that writes each file, by file name.

    Raises:
        OSError: A file cannot be written.
    """

    def write_and_hash(name: str) -> str:
        writers[name](folder / name)
        fsync_path(folder / name)
        return sha256(folder / name)

    return dict(zip(writers, map_in_threads(write_and_hash, list(writers)), strict=True))


# --- storage locations ----------------------------------------------------------------------------------------------


class Storage(ABC):
    """A storage location: a folder of bundles and single files.

    Methods that write or remove raise StorageError when they fail, and so does every method of a remote location.
    Listing or reading a local folder can raise OSError.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all entries, sorted, hidden and unfinished ones included.

        Empty when the location does not exist.
        """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return True if it holds a file (not a folder) of that name."""

    @abstractmethod
    def publish(self, name: str, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
        """Write a sealed bundle, completely or not at all, replacing one of the same name.

        Files are written in parallel, and every file has been read back when this returns.

        Args:
            name: Name of the bundle.
            writers: Function that writes each file, by file name.
            facts: Facts for the seal, as JSON.

        Raises:
            StorageError: The location cannot be written, or returns other bytes than were written.
        """

    @abstractmethod
    def bundle(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager that provides a bundle as a local folder.

        Files that the location lacks are missing.
        """

    @abstractmethod
    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager that provides a file as a local one.

        The path is missing if the location lacks it.
        """

    @abstractmethod
    def put(self, name: str, writer: Writer) -> str:
        """Write one file, completely or not at all, and return its SHA-256 in hex."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a bundle or file, if it exists."""

    def check(self) -> None:
        """Write and remove a small file, so that an unusable location is noticed early; creates a missing local folder.

        Raises:
            StorageError: The location cannot be written.
        """

        def write(path: Path) -> None:
            path.write_bytes(b"?")

        name = f".writable-{os.getpid()}"
        self.put(name, write)
        self.remove(name)

    def _unwritable(self, error: Exception) -> StorageError:
        """Return the StorageError for a failed write; it is not raised here."""
        return StorageError(
            f"{self.address} cannot be written: {_first_line(error)}; free space there or set checkpoint.path to "
            "another location, then launch again"
        )


class LocalStorage(Storage):
    """A storage location on a local disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def names(self) -> list[str]:
        """Return the names of all entries, sorted; empty when the folder does not exist."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def has(self, name: str) -> bool:
        """Return True if the folder holds a file of that name."""
        return (self.path / name).is_file()

    def publish(self, name: str, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
        """Write a sealed bundle into a hidden temporary folder, sync it and rename it, replacing an older one.

        The older one is removed just before the renaming. The temporary folder (.NAME.part) is removed on failure.

        Raises:
            StorageError: A file cannot be written.
        """
        final, temporary = self.path / name, self.path / f".{name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            (temporary / SEAL).write_bytes(seal_content(facts, _write_files(temporary, writers)))
            fsync_path(temporary / SEAL)
            fsync_path(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.rename(temporary, final)
            fsync_path(self.path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._unwritable(error) from error

    def bundle(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Return a context manager that provides the path of an entry, without copying; the entry may be missing."""
        return contextlib.nullcontext(self.path / name)

    file = bundle

    def put(self, name: str, writer: Writer) -> str:
        """Write a file through a synced temporary file that replaces it, and return its SHA-256 in hex.

        The folder is created if absent. The hash is that of the bytes read back.

        Raises:
            StorageError: The file cannot be written.
        """
        temporary = self.path / f"{name}.part"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            writer(temporary)
            fsync_path(temporary)
            written_hash = sha256(temporary)
            os.replace(temporary, self.path / name)
            fsync_path(self.path)
            return written_hash
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise self._unwritable(error) from error

    def remove(self, name: str) -> None:
        """Remove a folder with its contents, or a file, if it exists.

        Raises:
            StorageError: It cannot be removed.
        """
        path = self.path / name
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be removed: {_first_line(error)}; remove it by hand") from error


class RemoteStorage(Storage):
    """A storage location behind fsspec. All files pass through a temporary local folder."""

    def __init__(self, address: str) -> None:
        """Open the file system of a URL.

        Raises:
            StorageAddressError: The URL is invalid.
            StorageError: The backend's package is missing, or the backend fails.
        """
        super().__init__(address)
        check_address(address)
        from fsspec.core import url_to_fs

        try:
            self._fs, root = url_to_fs(address)
        except ImportError as error:
            raise StorageError(
                f"{address}: {_first_line(error)}; install that package in the environment of atma-sweep, or "
                "name a folder with checkpoint.path"
            ) from error
        except ValueError as error:
            raise StorageAddressError(
                f"{address}: {_first_line(error)}; name a folder or an fsspec URL such as s3://..."
            ) from error
        except Exception as error:
            raise self._unreachable(error) from error
        self._root = root.rstrip("/")

    def names(self) -> list[str]:
        """Return the names of all entries, sorted; empty when the location does not exist."""
        return self._names(self._root)

    def has(self, name: str) -> bool:
        """Return True if it holds a file of that name, without using fsspec's cached listing.

        Raises:
            StorageError: The location cannot be reached.
        """
        with self._translate_errors():
            self._fs.invalidate_cache()
            try:
                return bool(self._fs.info(self._remote_path(name))["type"] == "file")
            except FileNotFoundError:
                return False

    def publish(self, name: str, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
        """Upload a sealed bundle: remove an old seal, upload and read back each file, then upload the seal.

        The seal is the small file that makes the bundle count as complete. Files of an older bundle are overwritten,
        and ones of other names stay; until the new seal is in place the bundle counts as absent. All files are first
        written to a temporary local folder.

        Raises:
            StorageError: A file cannot be written or uploaded, or differs when it is read back.
        """
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as temporary:
            local = Path(temporary)
            hashes = self._write_local(local, writers)
            with self._translate_errors():
                self._unseal(name)
                map_in_threads(
                    lambda file: self._upload(local / file, self._remote_path(name, file), hashes[file]), list(hashes)
                )
                self._fs.pipe_file(self._remote_path(name, SEAL), seal_content(facts, hashes))

    @contextlib.contextmanager
    def bundle(self, name: str) -> Iterator[Path]:
        """Download a bundle into a temporary folder for the duration of the context.

        Without a seal the folder stays empty. Nothing is verified.

        Raises:
            StorageError: The location cannot be reached.
        """
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as folder:
            files = self._names(self._remote_path(name))
            if SEAL in files:  # without a seal the bundle counts as absent
                with self._translate_errors():
                    map_in_threads(
                        lambda file: self._download(self._remote_path(name, file), Path(folder) / file), files
                    )
            yield Path(folder)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Download a file into a temporary folder for the duration of the context.

        The provided path does not exist if the file is missing.

        Raises:
            StorageError: The location cannot be reached.
        """
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as folder:
            with self._translate_errors():
                self._download(self._remote_path(name), Path(folder) / name)
            yield Path(folder) / name

    def put(self, name: str, writer: Writer) -> str:
        """Write a file to a temporary local folder, upload it, read it back, and return its SHA-256 in hex.

        An older file is overwritten. A failed upload can leave a damaged file.

        Raises:
            StorageError: The file cannot be written or uploaded, or differs when it is read back.
        """
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as temporary:
            hashes = self._write_local(Path(temporary), {name: writer})
            with self._translate_errors():
                self._upload(Path(temporary) / name, self._remote_path(name), hashes[name])
            return hashes[name]

    def remove(self, name: str) -> None:
        """Remove a bundle, its seal first, or a file, if it exists.

        Raises:
            StorageError: It cannot be removed.
        """
        with self._translate_errors(), contextlib.suppress(FileNotFoundError):
            self._unseal(name)
            self._fs.rm(self._remote_path(name), recursive=True)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a bundle or file. Raises StorageError."""
        with self._translate_errors():
            return int(self._fs.du(self._remote_path(name)))

    def _remote_path(self, *names: str) -> str:
        return "/".join([self._root, *names])

    def _names(self, path: str) -> list[str]:
        """Return the names of the entries of a path, sorted, without using fsspec's cache.

        Empty when the path does not exist. Subfolders are not searched.

        Raises:
            StorageError: The location cannot be reached.
        """
        with self._translate_errors():
            # entries written by other machines must be visible
            self._fs.invalidate_cache()
            try:
                return sorted(split(path_.rstrip("/"))[1] for path_ in self._fs.ls(path, detail=False))
            except FileNotFoundError:
                return []

    def _unseal(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._remote_path(name, SEAL))

    def _write_local(self, folder: Path, writers: Mapping[str, Writer]) -> dict[str, str]:
        """Write files into a temporary local folder and return their SHA-256 in hex by name.

        Raises:
            StorageError: The local disk cannot be written; the message has advice.
        """
        try:
            return _write_files(folder, writers)
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be written: {_first_line(error)}; free space there or set TMPDIR to another folder"
            ) from error

    def _upload(self, local: Path, remote: str, expected: str) -> None:
        """Upload a file, replacing an older one, and read it back.

        Args:
            local: The local file.
            remote: Path in the file system of the location.
            expected: SHA-256 in hex.

        Raises:
            StorageError: The file that was read back has another hash.
        """
        self._fs.put_file(str(local), remote)
        with self._fs.open(remote, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise StorageError(
                    f"{self.address}: a file that was read back differs from what was written; use another location"
                )

    def _download(self, remote: str, local: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.get_file(remote, str(local))

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Context manager that turns every error of a backend into a StorageError.

        Errors of this program pass unchanged.
        """
        try:
            yield
        except SweepError:
            raise
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> StorageError:
        """Return the StorageError for a failed access; it is not raised here."""
        return StorageError(
            f"{self.address} cannot be used: {_first_line(error)}; check the address, the credentials and the network, or "
            "set checkpoint.path to another location, then launch again"
        )


def _first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its class."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
