"""Taking a bundle into a database: all of it in one transaction, or nothing."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Table, delete, insert, literal, select, text
from sqlalchemy import update as sql_update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from ..console.text import counted
from ..derived import Derive
from ..errors import BundleError, StoreError, WriteRefused
from ..failure_classes import PREEMPTED
from ..names import quoted_short, why_not
from ..store import queries
from ..store.database import explain_driver_error, file_of
from ..store.database import place as place_of
from ..store.store import Store
from .bundles import WEIGHTS, Bundle, BundleSummary, Limits, format_utc, local_path, open_bundle, with_parsed_json
from .import_files import BundleFiles
from .import_plan import UNFINISHED_CAUSE, ComputeCellId, Content, ImportPlan, ImportPlanner
from .row_validation import ATTEMPT_TABLES, BUNDLE_TABLES, RowDict, T, bundle_columns
from .staging import Stage, StageLost

BATCH = 500
"""Rows with JSON columns that are objects at once."""


def _references(table: Table) -> list[Column[Any]]:
    """Every column that refers to the table's id."""
    return [key.parent for other in T.values() for key in other.foreign_keys if key.column is table.c.id]


def _copy(session: Session, table: Table, old: int, new: int, number: int) -> None:
    """Gives a row another id and number, and takes everything along that refers to it."""
    given: dict[str, Any] = {"id": literal(new), "number": literal(number)}
    names = [column.name for column in table.columns]
    source = select(*(given.get(column.name, column) for column in table.columns)).where(table.c.id == old)
    session.execute(insert(table).from_select(names, source))
    for column in _references(table):
        session.execute(sql_update(column.table).where(column == old).values({column.name: new}))
    session.execute(delete(table).where(table.c.id == old))


def _move(session: Session, table: Table, moves: Mapping[int, tuple[int, int]]) -> None:
    """Renames rows: id -> (new id, new number). By way of negative ids, since the new ones are in use."""
    for old in moves:
        _copy(session, table, old, -old, -old)
    for old, (new, number) in moves.items():
        _copy(session, table, -old, new, number)


class _ImportWriter:
    """The writing half of an import, inside one transaction."""

    def __init__(self, session: Session, content: Content, stage: Stage, plan: ImportPlan, files: BundleFiles) -> None:
        self.session, self.content, self.stage, self.plan, self.files = session, content, stage, plan, files
        self.counts: dict[str, int] = content.bundle.manifest["counts"]
        self.added: Counter[str] = Counter(dict.fromkeys(BUNDLE_TABLES, 0))
        self.present: Counter[str] = Counter(dict.fromkeys(BUNDLE_TABLES, 0))
        self.notes: list[str] = []

    def write(self, name: str) -> None:
        """Everything, the files last: they can be taken back, and so can the transaction."""
        sweep = self._sweep(name)
        self._cells()
        self._revisions(sweep)
        self._attempts()
        self._numbers()
        self._events(sweep)
        self._weights()
        for row in self.plan.new:
            self.files.place(row["id"], row["run_dir"])
        for index, folder in self.plan.folders.items():
            self.files.place(index, folder)

    def _sweep(self, name: str) -> int:
        table, given = T["sweep"], dict(self.content.sweep)
        # a clock that is ahead must not make it the newest sweep for years
        given["launched_at"] = min(given["launched_at"], queries.now(self.session))
        found = self.session.execute(select(table).where(table.c.name == name)).one_or_none()
        if found is None:
            self.session.execute(insert(table).values({**given, "name": name, "fence": 0}))
            self.added["sweep"] += 1
            return int(self.session.scalar(select(table.c.id).where(table.c.name == name)) or 0)
        self.present["sweep"] += 1
        if given["launched_at"] > found.launched_at:
            later = sql_update(table).where(table.c.id == found.id)
            self.session.execute(later.values(launched_at=given["launched_at"]))
        member, revision = T["revision_cell"].c, T["revision"].c
        listed = select(member.cell_id).join(T["revision"], revision.id == member.revision_id)
        ours = set(self.session.scalars(listed.where(revision.sweep_id == found.id)))
        theirs = {row["cell_id"] for rows in self.content.members.values() for row in rows}
        if ours and theirs and not ours & theirs:
            self.notes.append(
                f"sweep {name!r} had no cell in common with the bundle's and now holds both; --name keeps them apart"
            )
        return int(found.id)

    def _cells(self) -> None:
        table, cells = T["cell"], self.content.cells
        known, other = set(), 0
        for row in queries.rows_in(self.session, select(table.c.id, table.c.config), table.c.id, sorted(cells)):
            known.add(row.id)
            other += row.config != json.loads(cells[row.id]["config"])
        self._insert("cell", [row for cell, row in cells.items() if cell not in known])
        self.present["cell"] += len(known)
        if other:
            self.notes.append(
                f"{counted(other, 'cell')} {'is' if other == 1 else 'are'} evaluated or kept otherwise in the bundle; what is here stays"
            )

    def _revisions(self, sweep: int) -> None:
        _move(self.session, T["revision"], self.plan.renumbered)
        columns = {column.name for column in bundle_columns("revision")}
        for place, number, row in self.plan.revisions:
            values = {name: value for name, value in row.items() if name in columns}
            self._insert("revision", [values | {"id": place, "sweep_id": sweep, "number": number}])
            links = [
                {name: value for name, value in link.items() if name != "revision"} | {"revision_id": place}
                for link in self.content.members[row["number"]]
            ]
            self._insert("revision_cell", links)
        for table in ("revision", "revision_cell"):
            self.present[table] = self.counts[table] - self.added[table]

    def _attempts(self) -> None:
        table = T["attempt"]
        numbers = {row.id: row.number for row in self.session.execute(select(table.c.id, table.c.number))}
        moves = {old: (new, numbers[old]) for old, new in self.plan.moved.items()}
        _move(self.session, table, moves)
        ids = self.plan.ids()
        self.unnamed = self.elsewhere = 0
        for row in sorted(self.plan.new, key=lambda row: int(row["id"])):
            values = self._attempt(row) | {"id": row["place"], "parent_id": None}
            self._insert("attempt", [values])
        for index in self.plan.replaced:
            row = self.content.attempts[index]
            for name in ATTEMPT_TABLES:
                if name != "example" or self.counts[name]:  # a bundle without items takes none away
                    self.session.execute(delete(T[name]).where(T[name].c.attempt_id == ids[index]))
            folder = self.plan.folders[index] if self.files.names(index) else None
            here = self.session.scalar(select(table.c.run_dir).where(table.c.id == ids[index]))
            values = self._attempt(with_parsed_json("attempt", row) | {"run_dir": folder or here})
            values = {name: value for name, value in values.items() if name not in ("id", "parent_id", "number")}
            self.session.execute(sql_update(table).where(table.c.id == ids[index]).values(values))
            self.added["attempt"] += 1
        # parents may come after their children in the bundle
        for index in [*(row["id"] for row in self.plan.new), *self.plan.replaced]:
            parent = self.content.attempts[index]["parent_id"]
            if parent is not None:
                child = sql_update(table).where(table.c.id == ids[index])
                self.session.execute(child.values(parent_id=ids[parent]))
        self.present["attempt"] = len(self.plan.present)
        if self.unnamed:
            self.notes.append(
                f"the weights of {counted(self.unnamed, 'attempt')} are not in the bundle; export --with-weights takes them along"
            )
        if self.elsewhere:
            self.notes.append(
                f"the weights of {counted(self.elsewhere, 'attempt')} lie elsewhere; an address in a bundle is not followed, so they "
                "count as gone here"
            )

    def _attempt(self, row: RowDict) -> RowDict:
        """The attempt as a row of this database. Addresses of a stranger lead nowhere: only files that came along count."""
        values = {name: value for name, value in row.items() if name != "place"}
        values |= {"checkpoint": None, "weights": None, "imported": True}
        if self.files.names(row["id"], "weights"):
            values["weights"] = f"{row['run_dir']}/{WEIGHTS}"
        elif row["weights"]:
            near = local_path(row["weights"]) is not None
            self.unnamed, self.elsewhere = self.unnamed + near, self.elsewhere + (not near)
        if row["state"] == "running":
            values |= {"state": "interrupted", "finished_at": row["heartbeat_at"]}
            values["cause"] = (
                f"{UNFINISHED_CAUSE}, on {row['host']} (pid {row['pid']}), last heard of at {format_utc(row['heartbeat_at'])}"
            )
            values["failure"] = PREEMPTED
        return values

    def _numbers(self) -> None:
        ids = self.plan.ids()
        here = {index: place for index, place in ids.items() if index not in self.plan.present}
        self.stage.place(self.session, here)
        for table in ATTEMPT_TABLES:
            moved = self.stage.move(self.session, table)
            self.added[table] += moved
            self.present[table] += self.counts[table] - moved
        self._items({index: ids[index] for index in self.plan.present})

    def _items(self, present: Mapping[int, int]) -> None:
        """Those that attempts lack which a bundle without items brought; none of numbers that were deleted here."""
        if not self.counts["example"]:
            return
        attempt = T["attempt"].c
        query = select(attempt.id).where(attempt.imported)
        brought = {row.id for row in queries.rows_in(self.session, query, attempt.id, sorted(present.values()))}
        if not brought:
            return
        self.stage.place(self.session, {index: at for index, at in present.items() if at in brought})
        moved = self.stage.move_items(self.session)
        self.added["example"] += moved
        self.present["example"] -= moved

    def _events(self, sweep: int) -> None:
        event, ids = T["event"], self.plan.ids()
        rows = [dict(row) for row in self.content.events]
        known: Counter[tuple[Any, ...]] = Counter()
        if rows:
            query = select(event).where(event.c.at >= min(row["at"] for row in rows))
            query = query.where(event.c.at <= max(row["at"] for row in rows))
            known.update(_event_key(dict(row._mapping)) for row in self.session.execute(query))
        new = []
        for row in rows:
            row["attempt_id"] = ids.get(row["attempt_id"])
            if known[_event_key(row)] > 0:
                known[_event_key(row)] -= 1
                self.present["event"] += 1
                continue
            ours = row.pop("sweep") is True
            new.append(row | {"sweep_id": sweep if ours else None})
        self._insert("event", new)

    def _weights(self) -> None:
        """Weights that come with the bundle for attempts that are here without them."""
        for index, (here, folder) in self.plan.weights.items():
            self.files.place(index, folder)
            place = self.plan.moved.get(here["id"], here["id"])
            found = sql_update(T["attempt"]).where(T["attempt"].c.id == place)
            self.session.execute(found.values(weights=f"{folder}/{WEIGHTS}"))

    def _insert(self, table: str, rows: list[RowDict]) -> None:
        for start in range(0, len(rows), BATCH):
            batch = [with_parsed_json(table, row) for row in rows[start : start + BATCH]]
            self.session.execute(insert(T[table]), batch)
            self.added[table] += len(batch)


def _event_key(row: RowDict) -> tuple[Any, ...]:
    return (row["at"], row["kind"], row["message"], row["cell_id"], row["attempt_id"])


def import_bundle(
    store: Store,
    file: Path,
    *,
    rename: str | None = None,
    runs: Path | None = None,
    identify: ComputeCellId | None = None,
    derive: Derive | None = None,
    large: bool = False,
) -> BundleSummary:
    """Takes a bundle into the database: all of it in one transaction, or nothing.

    Adds what is missing and leaves what is there; a second import changes nothing. `rename` gives the sweep another name
    here. Weights and logs go under `runs` (None: the store's own), into new folders alone. Attempts that ran when they
    were exported come in as interrupted, until a later bundle has them finished. `identify` gives the id of a config,
    that of the bundle if the config may have it; cells that contradict it are refused. `derive` gives
    the columns that follow from a config, which are compared, too. `large` lifts the limits on sizes and counts.

    Raises BundleError for a file that is damaged, is no bundle or is made to do harm; StoreTooNew for one of a newer
    release; SweepBusy when it concerns cells that somebody trains here at this moment; StoreBusy.
    """
    where = (runs or store.runs).absolute()
    if rename is not None and (why := why_not(rename)):
        raise StoreError(f"--name: {quoted_short(rename)} {why}")
    # its connection holds what is not yet known to be in order
    mine = Store(store.url.render_as_string(hide_password=False), patience=store.patience)
    try:
        with open_bundle(file, Limits.none() if large else Limits()) as bundle:
            if rename is None and (why := why_not(bundle.sweep)):
                raise BundleError(f"{file}: {quoted_short(bundle.sweep)} {why}; give it another with --name")
            _check_room(bundle, file_of(store.url), where)
            files = BundleFiles(bundle, where)
            try:
                with _uncollected():
                    while True:
                        # from the beginning when the connection is lost on the way
                        with contextlib.suppress(StageLost):
                            return _import_with_retry(mine, bundle, files, rename or bundle.sweep, identify, derive)
            except (IntegrityError, DataError) as error:
                raise bundle.wrong(f"the database refuses its rows ({_first(error)})") from error
            except DBAPIError as error:
                unknown = StoreError(f"cannot write to {store}: {_first(error)}; nothing was changed")
                raise explain_driver_error(error, store.url) or unknown from error
            except OSError as error:
                said = error.strerror or str(error)
                raise WriteRefused(f"cannot write under {where}: {said}; nothing was changed") from error
            finally:
                files.clear()
    finally:
        mine.close()


def check_import(file: Path, url_or_path: str | Path | None, runs: Path, *, large: bool = False) -> None:
    """Check that a bundle can be opened and has room, before a database is made for it.

    Raises: as import_bundle.
    """
    with open_bundle(file, Limits.none() if large else Limits()) as bundle:
        _check_room(bundle, file_of(place_of(url_or_path)), runs)


def _check_room(bundle: Bundle, database: Path | None, runs: Path) -> None:
    _refuse_full(bundle.path, (database or runs).parent, bundle.size(files=False))
    _refuse_full(bundle.path, runs, bundle.size(files=True))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for cycles: millions of plain rows have none, and looking takes a sixth of an import."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _import_with_retry(
    store: Store, bundle: Bundle, files: BundleFiles, name: str, identify: ComputeCellId | None, derive: Derive | None
) -> BundleSummary:
    """Checks everything, then writes it. What was done to files is undone when anything is raised."""
    stage = Stage(store)
    with store.transaction(write=False) as session:
        content = Content(bundle, identify, lambda table, columns: stage.add(table, columns, session), derive)

    def work(session: Session) -> _ImportWriter:
        files.undo()
        stage.check(session)
        if store.path is None:
            session.execute(text("LOCK TABLE sweep, revision, cell, attempt IN SHARE ROW EXCLUSIVE MODE"))
        plan = ImportPlanner(session, store, content, name, files.runs).make()
        files.stage(plan.wanted)
        done = _ImportWriter(session, content, stage, plan, files)
        done.write(name)
        return done

    try:
        # unpacking takes time, so most of it happens before the database is locked
        with store.transaction(write=False) as session:
            first = ImportPlanner(session, store, content, name, files.runs).make()
        files.stage(first.wanted)
        done = store.write(work)
    except BaseException:
        files.undo()
        raise
    return BundleSummary(
        sweep=name,
        file=str(bundle.path),
        added=dict(done.added),
        present=dict(done.present),
        files=files.placed,
        bytes=bundle.path.stat().st_size,
        notes=tuple(done.notes),
    )


def _refuse_full(file: Path, folder: Path, size: int) -> None:
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if size > free:
        raise WriteRefused(
            f"{file} holds {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; make room, then import again"
        )


def _first(error: Exception) -> str:
    return (str(getattr(error, "orig", None) or error).strip().splitlines() or ["no reason given"])[0][:200]
