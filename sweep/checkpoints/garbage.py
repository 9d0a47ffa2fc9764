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
YOUNG_S = 3600.0
"""A frozen plugin or the log of a launch is there before its sweep is in the database: younger ones stay."""
SHOWN = 20
"""Lines of a list for people; --json has all."""

_CELL = re.compile(r"[0-9a-f]{12}")
_NUMBER = re.compile(r"[1-9]\d{0,8}(?:-[1-9]\d{0,8}){0,4}")
_ASIDE = re.compile(rf"\.({_NUMBER.pattern})\.unowned")
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
        return sum(thing.bytes for thing in self.things if not thing.problem)

    @property
    def problems(self) -> list[str]:
        """One line for each thing that should have gone and stayed."""
        return [f"{thing.address}: {thing.problem}" for thing in self.things if thing.problem]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"bytes": self.bytes}

    def lines(self) -> list[str]:
        """For people: the largest first."""
        listed = sorted(self.things, key=lambda thing: (-thing.bytes, thing.address))
        lines = [f"{thing.address}: {thing.kind}, {size(thing.bytes)}" for thing in listed[:SHOWN]]
        lines += [f"... and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
        done = "freed" if self.removed else "nobody owns"
        count = len(self.things) - len(self.problems)
        lines.append(f"{done} {size(self.bytes)}, {counted(count, 'file')} or folders of {self.runs}")
        lines += [
            f"not looked into: {place}; if no other database uses it: atma-sweep gc --place {place}"
            for place in self.elsewhere
        ]
        return lines + self.problems


def find(store: Store, runs: Path, places: Sequence[str] = ()) -> GarbageReport:
    """What nobody owns under `runs` and in `places` (checkpoint.path as a grid says it). Changes nothing.

    Raises SweepError while an import may be under way, and when no attempt that lies there is one of the database's;
    AddressError and StorageError for a place that cannot be looked into.
    """
    if staged := sorted(runs.glob(f"{STAGING}*")):
        raise SweepError(f"{staged[0]} belongs to an import; wait for its end, or remove it if that was killed")
    # listed before the database is asked: whatever is made meanwhile is in it, or is not in the list
    local, plugins, logs = list(_attempts_in(runs)), list(_named(runs / "plugins", _PLUGIN)), list(_named(runs, _LOG))
    remote = [(place, folder) for place in places for folder in _attempts_at(place)]
    known = store.read(_known)
    seen = {folder for folder, _ in local} | {folder for _, folder in remote}
    if seen and not seen & known.folders and not known.deleted:
        raise SweepError(
            f"none of the {counted(len(seen), 'attempt')} under {runs} is one of {store}; name both with --db and --runs"
        )
    things = [UnownedFile(kind="attempt", address=str(path), bytes=size_on_disk(path), folder=folder)
              for folder, path in local if folder not in known.folders]  # fmt: skip
    for place, folder in remote:
        if folder not in known.folders:
            address = storage.join(place, folder)
            held, name = storage.split(address)
            things.append(
                UnownedFile(kind="attempt", address=address, bytes=bytes_of(storage.place(held), name), folder=folder)
            )
    things += [UnownedFile(kind="plugin", address=str(path), bytes=size_on_disk(path))
               for word, path in plugins if word not in known.plugins and _old(path)]  # fmt: skip
    things += [UnownedFile(kind="log", address=str(path), bytes=size_on_disk(path))
               for word, path in logs if word not in known.sweeps and _old(path)]  # fmt: skip
    given = {storage.home(place, "") for place in places}
    elsewhere = tuple(sorted(place for place in known.places if storage.home(place, "") not in given))
    return GarbageReport(runs=str(runs), things=tuple(things), elsewhere=elsewhere)


def remove(store: Store, found: GarbageReport) -> GarbageReport:
    """Removes what `find` found and nobody owns by now; what cannot be removed has a problem and stops nothing."""
    done = []
    for thing in found.things:
        problem = ""
        try:
            path = None if "://" in thing.address else Path(thing.address)
            if thing.kind != "attempt" and path is not None:
                path.unlink(missing_ok=True)
            elif path is not None:
                problem = _remove_folder(path, lambda thing=thing: _owned(store, thing))  # type: ignore[misc]
            elif _owned(store, thing):
                problem = _TAKEN
            else:
                place, name = storage.split(thing.address)
                storage.place(place).remove(name)
        except SweepError as error:
            problem = " ".join(str(error).split())
        except OSError as error:
            problem = f"{error.strerror}; make it writable, then collect again"
        done.append(replace(thing, problem=problem))
    result = replace(found, things=tuple(done), removed=True)
    gone = len(done) - len(result.problems)
    if gone:
        store.add_event("collected", f"{counted(gone, 'file')} and folders that nobody owned, {size(result.bytes)}")
    return result


_TAKEN = "is owned by now, and stays"


def _remove_folder(path: Path, owned: Callable[[], bool]) -> str:
    """Removes an attempt's folder; why not, if somebody took it up."""
    aside = path if _ASIDE.fullmatch(path.name) else path.with_name(f".{path.name}.unowned")
    if aside != path:
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(path, aside)
        if owned():
            if not path.exists():
                os.rename(aside, path)
            return _TAKEN
    shutil.rmtree(aside)
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
    return ""


def _owned(store: Store, thing: UnownedFile) -> bool:
    def ask(session: Session) -> bool:
        found = session.scalar(select(AttemptRow.id).where(AttemptRow.run_dir == thing.folder).limit(1))
        return found is not None

    return store.read(ask)


# --- what is there ----------------------------------------------------------------------------------------------------


def _attempts_in(runs: Path) -> Iterator[tuple[str, Path]]:
    """(cell/number, folder) of the attempts that lie there; links are nobody's attempts."""
    for cell in sorted(runs.iterdir()) if runs.is_dir() else ():
        if _CELL.fullmatch(cell.name) and cell.is_dir() and not cell.is_symlink():
            for one in sorted(cell.iterdir()):
                aside = _ASIDE.fullmatch(one.name)
                if (aside or _NUMBER.fullmatch(one.name)) and one.is_dir() and not one.is_symlink():
                    # what an earlier removal had put aside is nobody's, whoever has its number by now
                    yield f"{cell.name}/{one.name}", one


def _attempts_at(place: str) -> Iterator[str]:
    for cell in storage.place(place).names():
        if _CELL.fullmatch(cell):
            names = storage.place(storage.join(place, cell)).names()
            yield from (f"{cell}/{name}" for name in names if _NUMBER.fullmatch(name))


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = pattern.fullmatch(path.name)
        if found and (path.is_file() or path.is_symlink()):
            yield found[1], path


def _old(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > YOUNG_S


# --- what the database knows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    folders: set[str]
    """Of attempts: cell and number."""
    plugins: set[str]
    """How the names of frozen copies begin."""
    sweeps: set[str]
    """As files are named after them."""
    places: set[str]
    deleted: bool
    """Whether anything was ever deleted from it."""


def _known(session: Session) -> _Known:
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
    named = ProvenanceRow.config["checkpoint"]["path"].as_string()
    query = select(named).join(AttemptRow, AttemptRow.id == ProvenanceRow.attempt_id)
    places = set(session.scalars(query.where(AttemptRow.imported.is_(False), named.is_not(None)).distinct()))
    sweeps = {name for sweep in session.scalars(select(SweepRow.name)) for name in (sweep, safe_file_name(sweep))}
    deleted = session.scalar(select(func.count()).select_from(EventRow).where(EventRow.kind == "deleted"))
    return _Known(folders, plugins, sweeps, places, bool(deleted))
