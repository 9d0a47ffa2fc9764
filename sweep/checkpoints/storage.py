"""Where checkpoints and kept weights lie: a local folder, or any fsspec URL such as s3://bucket/folder.

An *address* names a place in text: an absolute path, a URL, or a path relative to the runs folder; the database holds
addresses. On a local disk a bundle of files is written aside, synced and renamed. Object stores cannot rename, so there
the files go to where they belong and the seal, a small file with their hashes (see seal.py), goes last: a bundle without a
valid seal does not exist. Imports no torch.
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
"""Writes one file to the given local path; failures to write are OSErrors."""


class StorageError(MachineError):
    """A place that cannot be reached, written or trusted."""


class StorageOccupied(StorageError):
    """A place that holds somebody else's state."""

    passing = False


class StorageAddressError(SweepError):
    """Text that names no place."""


SCHEMES = frozenset(
    "file local s3 s3a gs gcs az abfs abfss adl oss oci hf hdfs webhdfs sftp ssh smb webdav memory".split()
)
"""Of addresses that name a store of files and nothing more. fsspec knows others, which read further addresses out of
files, unpack archives or ask services, and it lets any be chained with `::`."""


# --- addresses ------------------------------------------------------------------------------------------------------


def join(address: str | Path, *names: str) -> str:
    """The address of something inside a place."""
    return "/".join([str(address).rstrip("/"), *names])


def split(address: str) -> tuple[str, str]:
    """(the place that holds it, its name there)."""
    folder, _, name = address.rpartition("/")
    return folder, name


def resolve(runs: Path, address: str) -> str:
    """The full address of what the database names: a relative one lies under the runs folder."""
    return address if "://" in address else str(runs / address)


def home(path: str | None, folder: str) -> str:
    """Where an attempt keeps its state, as the database says it: its own folder, or one like it under `path`."""
    if path is None:
        return folder
    local = _local_path(path)
    return join(path if local is None else local, folder)


def check_address(address: str) -> None:
    """Raises AddressError unless it is a path or one plain URL: the only addresses that are ever given to fsspec."""
    scheme, separator, _ = address.partition("://")
    if not separator:
        return
    if "::" in address:
        raise StorageAddressError(
            f"{address}: is a chain of addresses; name a folder or one fsspec URL such as s3://..."
        )
    if scheme not in SCHEMES:
        raise StorageAddressError(
            f"{address}: Protocol not known: {scheme}; name a folder or an fsspec URL such as s3://..."
        )


def place(address: str | Path) -> Storage:
    """The place of that address; it need not exist yet.

    Raises AddressError for one that cannot be understood, StorageError when its backend is missing or fails.
    """
    check_address(str(address))
    local = _local_path(str(address))
    return LocalStorage(local) if local is not None else RemoteStorage(str(address))


def exists(address: str) -> bool:
    """Whether there is such a file. Raises as `address` does, and StorageError when its place cannot be reached."""
    folder, name = split(address)
    return place(folder).has(name)


def free_bytes(address: str) -> int | None:
    """Bytes free on the disk of a local place, which need not exist yet; None for a place elsewhere, or on no disk at all."""
    local = _local_path(address)
    if local is None:
        return None
    usage = shutil.disk_usage(next(path for path in (local, *local.parents) if path.exists()))
    return usage.free if usage.total else None  # such as /proc


def _local_path(address: str) -> Path | None:
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
    """Writes every file, syncs it and reads it back for its hash; by name."""

    def write_and_hash(name: str) -> str:
        writers[name](folder / name)
        fsync_path(folder / name)
        return sha256(folder / name)

    return dict(zip(writers, map_in_threads(write_and_hash, list(writers)), strict=True))


# --- places ---------------------------------------------------------------------------------------------------------


class Storage(ABC):
    """A folder of bundles and single files. Every method raises StorageError when the place fails it."""

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def names(self) -> list[str]:
        """What lies in it, sorted; nothing when it does not exist."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether it holds that file."""

    @abstractmethod
    def publish(self, name: str, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
        """Writes a bundle whole or not at all, sealed with `facts`; one of the same name is replaced.

        Every file has been read back when this returns. Files are written side by side.
        """

    @abstractmethod
    def bundle(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A bundle as a local folder, for as long as the context lasts. Files are missing where the place lacks them."""

    @abstractmethod
    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A single file as a local one, for as long as the context lasts; missing where the place lacks it."""

    @abstractmethod
    def put(self, name: str, writer: Writer) -> str:
        """Write one file whole or not at all, and return the SHA-256 of what was written, in hex."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a bundle or a file, if it is there."""

    def check(self) -> None:
        """Writes a small file and removes it, so that a place which cannot be used is noticed early."""

        def write(path: Path) -> None:
            path.write_bytes(b"?")

        name = f".writable-{os.getpid()}"
        self.put(name, write)
        self.remove(name)

    def _unwritable(self, error: Exception) -> StorageError:
        return StorageError(
            f"{self.address} cannot be written: {_first_line(error)}; make room there or name another place with "
            "checkpoint.path, then launch again"
        )


class LocalStorage(Storage):
    """A place on a local disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def publish(self, name: str, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
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
        return contextlib.nullcontext(self.path / name)

    file = bundle

    def put(self, name: str, writer: Writer) -> str:
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
        path = self.path / name
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be removed: {_first_line(error)}; remove it by hand") from error


class RemoteStorage(Storage):
    """A place behind fsspec. Everything passes through a temporary folder of this machine."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        check_address(address)
        from fsspec.core import url_to_fs

        try:
            self._fs, root = url_to_fs(address)
        except ImportError as error:
            raise StorageError(
                f"{address}: {_first_line(error)}; install that package beside atma-sweep, or name a folder with checkpoint.path"
            ) from error
        except ValueError as error:
            raise StorageAddressError(
                f"{address}: {_first_line(error)}; name a folder or an fsspec URL such as s3://..."
            ) from error
        except Exception as error:
            raise self._unreachable(error) from error
        self._root = root.rstrip("/")

    def names(self) -> list[str]:
        return self._names(self._root)

    def has(self, name: str) -> bool:
        with self._translate_errors():
            self._fs.invalidate_cache()
            try:
                return bool(self._fs.info(self._remote_path(name))["type"] == "file")
            except FileNotFoundError:
                return False

    def publish(self, name: str, writers: Mapping[str, Writer], facts: Mapping[str, Any]) -> None:
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
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as folder:
            files = self._names(self._remote_path(name))
            if SEAL in files:  # else it does not exist, and nothing is worth fetching
                with self._translate_errors():
                    map_in_threads(
                        lambda file: self._download(self._remote_path(name, file), Path(folder) / file), files
                    )
            yield Path(folder)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as folder:
            with self._translate_errors():
                self._download(self._remote_path(name), Path(folder) / name)
            yield Path(folder) / name

    def put(self, name: str, writer: Writer) -> str:
        with tempfile.TemporaryDirectory(prefix="atma-sweep-") as temporary:
            hashes = self._write_local(Path(temporary), {name: writer})
            with self._translate_errors():
                self._upload(Path(temporary) / name, self._remote_path(name), hashes[name])
            return hashes[name]

    def remove(self, name: str) -> None:
        with self._translate_errors(), contextlib.suppress(FileNotFoundError):
            self._unseal(name)
            self._fs.rm(self._remote_path(name), recursive=True)

    def bytes_of(self, name: str) -> int:
        """What a bundle or a file takes, bytes. Raises StorageError."""
        with self._translate_errors():
            return int(self._fs.du(self._remote_path(name)))

    def _remote_path(self, *names: str) -> str:
        return "/".join([self._root, *names])

    def _names(self, path: str) -> list[str]:
        with self._translate_errors():
            # What another machine wrote since must be seen.
            self._fs.invalidate_cache()
            try:
                return sorted(split(path_.rstrip("/"))[1] for path_ in self._fs.ls(path, detail=False))
            except FileNotFoundError:
                return []

    def _unseal(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._remote_path(name, SEAL))

    def _write_local(self, folder: Path, writers: Mapping[str, Writer]) -> dict[str, str]:
        try:
            return _write_files(folder, writers)
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be written: {_first_line(error)}; make room there or let TMPDIR name another folder"
            ) from error

    def _upload(self, local: Path, remote: str, expected: str) -> None:
        self._fs.put_file(str(local), remote)
        with self._fs.open(remote, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise StorageError(f"{self.address} gave back other bytes than were written; name another place")

    def _download(self, remote: str, local: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.get_file(remote, str(local))

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Every backend has errors of its own, so all become one; a missing file is the caller's matter."""
        try:
            yield
        except SweepError:
            raise
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> StorageError:
        return StorageError(
            f"{self.address} cannot be used: {_first_line(error)}; check the address, the credentials and the network, or "
            "name another place with checkpoint.path, then launch again"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
