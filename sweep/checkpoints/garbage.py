"""`atma-sweep gc`: what lies in the runs folder and belongs to no attempt, cell or sweep of the database any more.

Such files are left of what was deleted from it. What runs is in the database, before it makes its folder, and so is never
touched. A folder goes in two steps: it gets another name, and is removed only if nobody owns it still; if this is cut short, the
next one finds it. Places elsewhere (checkpoint.path) may be shared by databases, so they are looked into when they are named.
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
from ...results.console.text import counted
from ...results.exchange.bundles import local_path
from ...results.exchange.import_files import STAGING
from ...results.names import safe_file_name
from ...results.store.schema import AttemptRow, CellRow, EventRow, ProvenanceRow, SweepRow
from ...results.store.store import Store
from ..errors import SweepError
from ..units import size
from . import storage
from .prune import bytes_of

Kind = Literal["attempt", "plugin", "log"]
MIN_AGE_S = 3600.0
"""A frozen plugin or the log of a launch is there before its sweep is in the database: younger ones stay."""
MAX_LINES = 20
"""Lines of a list for people; --json has all."""

_CELL = re.compile(r"[0-9a-f]{12}")
_NUMBER = re.compile(r"[1-9]\d{0,8}(?:-[1-9]\d{0,8}){0,4}")
_RENAMED = re.compile(rf"\.({_NUMBER.pattern})\.unowned")
_PLUGIN = re.compile(r"([0-9a-f]{12})_.+")
_LOG = re.compile(r"launch-(.+)\.log")


@dataclass(frozen=True, kw_only=True)
class UnownedFile:
    """A file or folder that nobody owns."""

    kind: Kind
    address: str
    """Its path, or its URL."""
    bytes: int
    folder: str = ""
    """Of an attempt: cell and number."""
    problem: str = ""
    """Why it is still there; one line."""


@dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """What nobody owns, or what of it went."""

    runs: str
    things: Sequence[UnownedFile]
    elsewhere: Sequence[str]
    """Places that attempts of the database name and that were not looked into."""
    removed: bool = False

    @property
    def bytes(self) -> int:
        """What went, or would go."""
        return sum(item.bytes for item in self.things if not item.problem)

    @property
    def problems(self) -> list[str]:
        """One line for each thing that should have gone and stayed."""
        return [f"{item.address}: {item.problem}" for item in self.things if item.problem]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"bytes": self.bytes}

    def lines(self) -> list[str]:
        """For people: the largest first."""
        listed = sorted(self.things, key=lambda thing: (-thing.bytes, thing.address))
        lines = [f"{thing.address}: {thing.kind}, {size(thing.bytes)}" for thing in listed[:MAX_LINES]]
        lines += [f"... and {len(listed) - MAX_LINES} more"] if len(listed) > MAX_LINES else []
        done = "freed" if self.removed else "nobody owns"
        count = len(self.things) - len(self.problems)
        lines.append(f"{done} {size(self.bytes)}, {counted(count, 'file')} or folders of {self.runs}")
        lines += [
            f"not looked into: {address}; if no other database uses it: atma-sweep gc --place {address}"
            for address in self.elsewhere
        ]
        return lines + self.problems


def find(store: Store, runs: Path, paths: Sequence[str] = ()) -> GarbageReport:
    """What nobody owns under `runs` and in `paths` (checkpoint.path as a grid says it). Changes nothing.

    Raises SweepError while an import may be under way, and when no attempt that lies there is one of the database's;
    AddressError and StorageError for a place that cannot be looked into.
    """
    if staged := sorted(runs.glob(f"{STAGING}*")):
        raise SweepError(f"{staged[0]} belongs to an import; wait for its end, or remove it if that was killed")
    # listed before the database is asked: whatever is made meanwhile is in it, or is not in the list
    local_attempts, plugins, logs = (
        list(_attempts_in(runs)),
        list(_list_matching(runs / "plugins", _PLUGIN)),
        list(_list_matching(runs, _LOG)),
    )
    remote_attempts = [(place, folder) for place in paths for folder in _attempts_at(place)]
    owned = store.read(_read_owned_names)
    attempts = {folder for folder, _ in local_attempts} | {folder for _, folder in remote_attempts}
    if attempts and not attempts & owned.folders and not owned.deleted:
        raise SweepError(
            f"none of the {counted(len(attempts), 'attempt')} under {runs} is one of {store}; name both with --db and --runs"
        )
    unowned = [UnownedFile(kind="attempt", address=str(path), bytes=size_on_disk(path), folder=folder)
              for folder, path in local_attempts if folder not in owned.folders]  # fmt: skip
    for place, folder in remote_attempts:
        if folder not in owned.folders:
            address = storage.join(place, folder)
            parent, name = storage.split(address)
            unowned.append(
                UnownedFile(kind="attempt", address=address, bytes=bytes_of(storage.place(parent), name), folder=folder)
            )
    unowned += [UnownedFile(kind="plugin", address=str(path), bytes=size_on_disk(path))
               for prefix, path in plugins if prefix not in owned.plugins and _is_old(path)]  # fmt: skip
    unowned += [UnownedFile(kind="log", address=str(path), bytes=size_on_disk(path))
               for word, path in logs if word not in owned.sweeps and _is_old(path)]  # fmt: skip
    scanned = {storage.home(place, "") for place in paths}
    elsewhere = tuple(sorted(place for place in owned.storage_paths if storage.home(place, "") not in scanned))
    return GarbageReport(runs=str(runs), things=tuple(unowned), elsewhere=elsewhere)


def remove(store: Store, report: GarbageReport) -> GarbageReport:
    """Removes what `find_garbage` found and nobody owns by now; what cannot be removed has a problem and stops nothing."""
    results = []
    for thing in report.things:
        problem = ""
        try:
            path = None if "://" in thing.address else Path(thing.address)
            if thing.kind != "attempt" and path is not None:
                path.unlink(missing_ok=True)
            elif path is not None:
                problem = _remove_folder(path, lambda item=thing: _is_owned(store, item))  # type: ignore[misc]
            elif _is_owned(store, thing):
                problem = _OWNED_NOW
            else:
                parent, name = storage.split(thing.address)
                storage.place(parent).remove(name)
        except SweepError as error:
            problem = " ".join(str(error).split())
        except OSError as error:
            problem = f"{error.strerror}; make it writable, then collect again"
        results.append(replace(thing, problem=problem))
    result = replace(report, things=tuple(results), removed=True)
    n_removed = len(results) - len(result.problems)
    if n_removed:
        store.add_event(
            "collected", f"{counted(n_removed, 'file')} and folders that nobody owned, {size(result.bytes)}"
        )
    return result


_OWNED_NOW = "is owned by now, and stays"


def _remove_folder(path: Path, is_owned: Callable[[], bool]) -> str:
    """Removes an attempt's folder; why not, if somebody took it up."""
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
    def query(session: Session) -> bool:
        attempt_id = session.scalar(select(AttemptRow.id).where(AttemptRow.run_dir == item.folder).limit(1))
        return attempt_id is not None

    return store.read(query)


# --- what is there ----------------------------------------------------------------------------------------------------


def _attempts_in(runs: Path) -> Iterator[tuple[str, Path]]:
    """(cell/number, folder) of the attempts that lie there; links are nobody's attempts."""
    for cell in sorted(runs.iterdir()) if runs.is_dir() else ():
        if _CELL.fullmatch(cell.name) and cell.is_dir() and not cell.is_symlink():
            for attempt in sorted(cell.iterdir()):
                renamed = _RENAMED.fullmatch(attempt.name)
                if (renamed or _NUMBER.fullmatch(attempt.name)) and attempt.is_dir() and not attempt.is_symlink():
                    # what an earlier removal had put aside is nobody's, whoever has its number by now
                    yield f"{cell.name}/{attempt.name}", attempt


def _attempts_at(address: str) -> Iterator[str]:
    for cell in storage.place(address).names():
        if _CELL.fullmatch(cell):
            names = storage.place(storage.join(address, cell)).names()
            yield from (f"{cell}/{name}" for name in names if _NUMBER.fullmatch(name))


def _list_matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and (path.is_file() or path.is_symlink()):
            yield match[1], path


def _is_old(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > MIN_AGE_S


# --- what the database knows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OwnedNames:
    folders: set[str]
    """Of attempts: cell and number."""
    plugins: set[str]
    """How the names of frozen copies begin."""
    sweeps: set[str]
    """As files are named after them."""
    storage_paths: set[str]
    deleted: bool
    """Whether anything was ever deleted from it."""


def _read_owned_names(session: Session) -> _OwnedNames:
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
    path_column = ProvenanceRow.config["checkpoint"]["path"].as_string()
    query = select(path_column).join(AttemptRow, AttemptRow.id == ProvenanceRow.attempt_id)
    storage_paths = set(
        session.scalars(query.where(AttemptRow.imported.is_(False), path_column.is_not(None)).distinct())
    )
    sweeps = {name for sweep in session.scalars(select(SweepRow.name)) for name in (sweep, safe_file_name(sweep))}
    deleted = session.scalar(select(func.count()).select_from(EventRow).where(EventRow.kind == "deleted"))
    return _OwnedNames(folders, plugins, sweeps, storage_paths, bool(deleted))
