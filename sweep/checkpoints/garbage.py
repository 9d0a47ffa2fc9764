"""`atma-sweep gc`: files under the runs folder that belong to no attempt, cell or sweep of the database any more.

Such files remain after deletions from the database. A running attempt is in the database before its folder exists, and
so is never touched. A folder is removed in two steps: it is renamed, and deleted only if it is still unowned. If the
command is interrupted in between, the next one finds the renamed folder. Storage locations elsewhere (checkpoint.path)
may be shared by databases, so they are scanned only when they are named.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ...results.console.output_files import size_on_disk
from ...results.console.quantities import format_bytes
from ...results.console.text import counted
from ...results.exchange.bundles import local_path
from ...results.exchange.import_files import STAGING
from ...results.names import safe_file_name
from ...results.store.schema import AttemptRow, CellRow, EventRow, ProvenanceRow, SweepRow
from ...results.store.store import Store
from ..errors import SweepError
from . import storage
from .initial import FOLDER as INITIAL_FOLDER
from .prune import bytes_of

Kind = Literal["attempt", "plugin", "log", "weights"]
MIN_AGE_S = 3600.0
"""Minimum age in seconds of other files than attempts, because these exist before their sweep is in the database."""
MAX_LINES = 20
"""Maximum number of listed files in the text output; --json lists all."""

_CELL = re.compile(r"[0-9a-f]{12}")
_NUMBER = re.compile(r"[1-9]\d{0,8}(?:-[1-9]\d{0,8}){0,4}")
_RENAMED = re.compile(rf"\.({_NUMBER.pattern})\.unowned")
_PLUGIN = re.compile(r"([0-9a-f]{12})_.+")
_INITIAL = re.compile(r"([0-9a-f]{64})\.(?:safetensors|sha256)")
_LOG = re.compile(r"launch-(.+)\.log")


@dataclass(frozen=True, kw_only=True)
class UnownedFile:
    """A file or folder without an owner in the database."""

    kind: Kind
    """"attempt" for its folder, "plugin" for a frozen copy of a plugin's source, "log" for the log of a launch, "weights" for copied initial weights."""
    address: str
    """Path or URL."""
    bytes: int
    """Size on the disk."""
    folder: str = ""
    """Cell and number of an attempt, joined by "/"; else empty."""
    problem: str = ""
    """Reason in one line why it could not be removed; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """Unowned files under the runs folder, or the result of removing them."""

    runs: str
    """The runs folder."""
    things: Sequence[UnownedFile]
    """The unowned files."""
    elsewhere: Sequence[str]
    """Values of checkpoint.path in the database that were not scanned."""
    removed: bool = False
    """True for the result of `remove_garbage`."""

    @property
    def bytes(self) -> int:
        """Bytes that were, or would be, freed."""
        return sum(item.bytes for item in self.things if not item.problem)

    @property
    def problems(self) -> list[str]:
        """Problems, one line per file that could not be removed."""
        return [f"{item.address}: {item.problem}" for item in self.things if item.problem]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON.

        Its keys are runs, things (a list with a dict per file: kind, address, bytes, folder, problem), elsewhere,
        removed, and bytes (in total).

        `kind` is "attempt", "plugin", "log" or "weights"; `elsewhere` lists the storage locations that were not scanned.
        """
        return asdict(self) | {"bytes": self.bytes}

    def lines(self) -> list[str]:
        """Return the report as text for people.

        There is a line for each of the 20 largest files (MAX_LINES), largest first, and one with the number of others.
        Then follow the total, a line for each storage location that was not scanned, and the problems.
        """
        listed = sorted(self.things, key=lambda item: (-item.bytes, item.address))
        lines = [f"{item.address}: {item.kind}, {format_bytes(item.bytes)}" for item in listed[:MAX_LINES]]
        lines += [f"... and {len(listed) - MAX_LINES} more"] if len(listed) > MAX_LINES else []
        done = "freed" if self.removed else "unowned:"
        count = len(self.things) - len(self.problems)
        lines.append(
            f"{done} {format_bytes(self.bytes)} in {counted(count, 'file or folder', 'files and folders')} of {self.runs}"
        )
        lines += [
            f"not scanned: {address}; if no other database uses it, run: atma-sweep gc --place {address}"
            for address in self.elsewhere
        ]
        return lines + self.problems


def find_garbage(store: Store, runs: Path, paths: Sequence[str] = ()) -> GarbageReport:
    """Return the files without an owner under `runs` and in other storage locations; nothing is changed.

    They are folders of attempts that the database does not name, and frozen plugins, initial weights and launch logs that are older than
    an hour (MIN_AGE_S) and belong to no cell or sweep of it. Files with other names are ignored, and so are links to
    folders of attempts.

    Args:
        store: The database.
        runs: The runs folder; it may be absent.
        paths: Storage locations to scan, as grids name them in checkpoint.path.

    Raises:
        SweepError: An import may be in progress, or attempts exist, none of them is one of the database, and nothing
            was ever deleted from that.
        StorageAddressError: A storage location has an invalid address.
        StorageError: A storage location cannot be read.
    """
    if staged := sorted(runs.glob(f"{STAGING}*")):
        raise SweepError(
            f"{staged[0]} belongs to an unfinished import; wait until it ends, or remove the folder if the import was killed"
        )
    # files are listed before the database is read, so that a new attempt is unlisted or has its owner
    local_attempts, plugins, weights, logs = (
        list(_attempts_in(runs)),
        list(_list_matching(runs / "plugins", _PLUGIN)),
        list(_list_matching(runs / INITIAL_FOLDER, _INITIAL)),
        list(_list_matching(runs, _LOG)),
    )
    remote_attempts = [(location, folder) for location in paths for folder in _attempts_in_storage(location)]
    owned = store.read(_read_owned_names)
    attempts = {folder for folder, _ in local_attempts} | {folder for _, folder in remote_attempts}
    if attempts and not attempts & owned.folders and not owned.deleted:
        raise SweepError(
            f"none of the {counted(len(attempts), 'attempt')} under {runs} is in the database {store}; give a matching pair of --db and --runs"
        )
    unowned = [UnownedFile(kind="attempt", address=str(path), bytes=size_on_disk(path), folder=folder)
              for folder, path in local_attempts if folder not in owned.folders]  # fmt: skip
    for location, folder in remote_attempts:
        if folder not in owned.folders:
            address = storage.join(location, folder)
            parent, name = storage.split(address)
            unowned.append(
                UnownedFile(
                    kind="attempt", address=address, bytes=bytes_of(storage.open_storage(parent), name), folder=folder
                )
            )
    unowned += [UnownedFile(kind="plugin", address=str(path), bytes=size_on_disk(path))
               for prefix, path in plugins if prefix not in owned.plugins and _is_old(path)]  # fmt: skip
    unowned += [UnownedFile(kind="weights", address=str(path), bytes=size_on_disk(path))
               for digest, path in weights if digest not in owned.weights and _is_old(path)]  # fmt: skip
    unowned += [UnownedFile(kind="log", address=str(path), bytes=size_on_disk(path))
               for sweep_name, path in logs if sweep_name not in owned.sweeps and _is_old(path)]  # fmt: skip
    scanned = {storage.attempt_address(location, "") for location in paths}
    elsewhere = tuple(
        sorted(location for location in owned.storage_paths if storage.attempt_address(location, "") not in scanned)
    )
    return GarbageReport(runs=str(runs), things=tuple(unowned), elsewhere=elsewhere)


def remove_garbage(store: Store, report: GarbageReport) -> GarbageReport:
    """Remove the files of a report and return the result; the folder of an attempt stays if it has an owner by now.

    Other files are removed without asking the database again. A file that cannot be removed, or that has an owner,
    gets a `problem`, and the others are removed all the same. If any was removed, the database gets an event
    "collected".

    Args:
        store: The database.
        report: Result of `find_garbage`.
    """
    results = []
    for item in report.things:
        problem = ""
        try:
            path = None if "://" in item.address else Path(item.address)
            if item.kind != "attempt" and path is not None:
                path.unlink(missing_ok=True)
            elif path is not None:
                problem = _remove_folder(path, lambda item=item: _is_owned(store, item))  # type: ignore[misc]
            elif _is_owned(store, item):
                problem = _OWNED_NOW
            else:
                parent, name = storage.split(item.address)
                storage.open_storage(parent).remove(name)
        except SweepError as error:
            problem = " ".join(str(error).split())
        except OSError as error:
            problem = f"{error.strerror}; make it writable, then run atma-sweep gc again"
        results.append(replace(item, problem=problem))
    result = replace(report, things=tuple(results), removed=True)
    n_removed = len(results) - len(result.problems)
    if n_removed:
        store.add_event(
            "collected", f"{counted(n_removed, 'file')} and folders without an owner, {format_bytes(result.bytes)}"
        )
    return result


_OWNED_NOW = "now belongs to an attempt in the database and was kept"


def _remove_folder(path: Path, is_owned: Callable[[], bool]) -> str:
    """Remove an attempt's folder and, if empty, the folder of its cell.

    A folder that an earlier run renamed is removed without a query. Another one is renamed first, and restored if it
    has an owner, unless a new folder of its name exists by then.

    Args:
        path: Folder of the attempt.
        is_owned: Query of the database, asked after the folder has been renamed.

    Returns:
        An empty string, or the reason why the folder was restored.

    Raises:
        OSError: A file cannot be renamed or removed.
    """
    renamed = path if _RENAMED.fullmatch(path.name) else path.with_name(f".{path.name}.unowned")
    if renamed != path:
        if renamed.exists():
            shutil.rmtree(renamed)
        os.rename(path, renamed)
        if is_owned():
            if not path.exists():
                os.rename(renamed, path)
            return _OWNED_NOW
    shutil.rmtree(renamed)
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
    return ""


def _is_owned(store: Store, item: UnownedFile) -> bool:
    """Return True if an attempt of the database has the item's `folder` ("cell/number") as its run_dir.

    Addresses of weights and checkpoints are not compared.
    """

    def query(session: Session) -> bool:
        attempt_id = session.scalar(select(AttemptRow.id).where(AttemptRow.run_dir == item.folder).limit(1))
        return attempt_id is not None

    return store.read(query)


# --- files on disk ----------------------------------------------------------------------------------------------------


def _attempts_in(runs: Path) -> Iterator[tuple[str, Path]]:
    """Yield (cell/number, folder) of the attempts under a local runs folder, sorted; symlinks are skipped.

    A folder that an earlier removal renamed is yielded under its new name, which no attempt owns. Nothing is yielded if
    the runs folder does not exist.
    """
    for cell in sorted(runs.iterdir()) if runs.is_dir() else ():
        if _CELL.fullmatch(cell.name) and cell.is_dir() and not cell.is_symlink():
            for attempt in sorted(cell.iterdir()):
                renamed = _RENAMED.fullmatch(attempt.name)
                if (renamed or _NUMBER.fullmatch(attempt.name)) and attempt.is_dir() and not attempt.is_symlink():
                    # a folder that an earlier removal renamed has no owner, even if its number is in use again
                    yield f"{cell.name}/{attempt.name}", attempt


def _attempts_in_storage(address: str) -> Iterator[str]:
    """Yield cell/number of the attempts in a storage location; other names are skipped.

    Raises:
        StorageAddressError: The address is invalid.
        StorageError: The location cannot be read.
    """
    for cell in storage.open_storage(address).names():
        if _CELL.fullmatch(cell):
            names = storage.open_storage(storage.join(address, cell)).names()
            yield from (f"{cell}/{name}" for name in names if _NUMBER.fullmatch(name))


def _list_matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    """Yield (first group of the match, path) of the files in a folder whose complete name matches, sorted by name.

    Links count as files; subfolders are not searched. Nothing is yielded if the folder does not exist.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and (path.is_file() or path.is_symlink()):
            yield match[1], path


def _is_old(path: Path) -> bool:
    """Return True if a file is older than an hour (MIN_AGE_S)."""
    return time.time() - path.lstat().st_mtime > MIN_AGE_S


# --- names in the database --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OwnedNames:
    """Names in the database that own files."""

    folders: set[str]
    """Cell and number of attempts, joined by "/"."""
    plugins: set[str]
    """Prefixes of the names of frozen plugins."""
    weights: set[str]
    """Hashes of the initial weights of cells."""
    sweeps: set[str]
    """Names of sweeps, both as given and as used in file names."""
    storage_paths: set[str]
    """Values of checkpoint.path of attempts."""
    deleted: bool
    """True if anything was ever deleted from the database."""


def _read_owned_names(session: Session) -> _OwnedNames:
    """Return the names in the database that own files.

    An attempt owns its run_dir and the folders of its recorded weights and checkpoint under the runs folder. Values of
    checkpoint.path are those of attempts that were not imported.
    """
    folders = set()
    for row in session.execute(select(AttemptRow.run_dir, AttemptRow.weights, AttemptRow.checkpoint)):
        folders.add(row.run_dir)
        for address in (row.weights, row.checkpoint):
            local = local_path(address)
            folders |= {"/".join(Path(local).parts[:2])} if local is not None else set()
    plugins = {
        plugin["sha256"][:12]
        for listed in session.scalars(select(CellRow.config["plugins"]))
        for plugin in listed or ()
    }
    weights = set(session.scalars(select(CellRow.config["train"]["init_sha256"].as_string()).distinct()))
    path_column = ProvenanceRow.config["checkpoint"]["path"].as_string()
    query = select(path_column).join(AttemptRow, AttemptRow.id == ProvenanceRow.attempt_id)
    storage_paths = set(
        session.scalars(query.where(AttemptRow.imported.is_(False), path_column.is_not(None)).distinct())
    )
    sweeps = {name for sweep in session.scalars(select(SweepRow.name)) for name in (sweep, safe_file_name(sweep))}
    deleted = session.scalar(select(func.count()).select_from(EventRow).where(EventRow.kind == "deleted"))
    return _OwnedNames(folders, plugins, weights, sweeps, storage_paths, bool(deleted))
