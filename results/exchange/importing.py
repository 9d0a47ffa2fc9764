"""Import of a bundle into a database, in one transaction."""

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
from ..names import quoted_short, sweep_name_problem
from ..store import queries
from ..store.database import explain_driver_error, sqlite_file
from ..store.database import resolve_url as place_of
from ..store.store import Store
from .bundles import WEIGHTS, Bundle, BundleSummary, Limits, format_utc, local_path, open_bundle, with_parsed_json
from .import_files import BundleFiles
from .import_plan import UNFINISHED_CAUSE, BundleContent, ComputeCellId, ImportPlan, ImportPlanner
from .row_validation import ATTEMPT_TABLES, BUNDLE_TABLES, TABLES, RowDict, bundle_columns
from .staging import StagingTables, StagingTablesLost

BATCH = 500
"""Rows per INSERT; their JSON columns are parsed."""


def _references(table: Table) -> list[Column[Any]]:
    """Return every column that refers to the table's id."""
    return [key.parent for referring in TABLES.values() for key in referring.foreign_keys if key.column is table.c.id]


def _change_id(session: Session, table: Table, old: int, new: int, number: int) -> None:
    """Give a row another id and number, and update all rows that refer to it.

    Inserts a copy under the new id, moves the references, and deletes the old row.

    Args:
        session: open session.
        table: table of the row, with the columns `id` and `number`.
        old: current id.
        new: new id, not in use.
        number: new number, not in use beside the old row.
    """
    new_values: dict[str, Any] = {"id": literal(new), "number": literal(number)}
    names = [column.name for column in table.columns]
    source = select(*(new_values.get(column.name, column) for column in table.columns)).where(table.c.id == old)
    session.execute(insert(table).from_select(names, source))
    for column in _references(table):
        session.execute(sql_update(column.table).where(column == old).values({column.name: new}))
    session.execute(delete(table).where(table.c.id == old))


def _change_ids(session: Session, table: Table, moves: Mapping[int, tuple[int, int]]) -> None:
    """Change the ids and numbers of rows, by way of negative ids, since the new ones are in use.

    Args:
        session: open session.
        table: table of the rows.
        moves: id -> (new id, new number); rows that are not listed keep theirs.
    """
    for old in moves:
        _change_id(session, table, old, -old, -old)
    for old, (new, number) in moves.items():
        _change_id(session, table, -old, new, number)


class _ImportWriter:
    """Writes a planned import, inside one transaction.

    `added` and `present` count rows of the bundle by table: inserted, or there already. `notes` are sentences for the
    user.
    """

    def __init__(
        self, session: Session, content: BundleContent, stage: StagingTables, plan: ImportPlan, files: BundleFiles
    ) -> None:
        """Start with zero counts of added and present rows.

        Args:
            session: session of the import's transaction.
            content: checked rows of the bundle.
            stage: staged numbers of the bundle.
            plan: what to do with attempts and revisions.
            files: weights and logs of the bundle.
        """
        self.session, self.content, self.stage, self.plan, self.files = session, content, stage, plan, files
        self.counts: dict[str, int] = content.bundle.manifest["counts"]
        self.added: Counter[str] = Counter(dict.fromkeys(BUNDLE_TABLES, 0))
        self.present: Counter[str] = Counter(dict.fromkeys(BUNDLE_TABLES, 0))
        self.notes: list[str] = []

    def write(self, name: str) -> None:
        """Write all rows, then move the files; both can still be undone by the caller.

        Args:
            name: name of the sweep in this database.

        Raises:
            StoreError: a folder for files is in use.
        """
        sweep = self._write_sweep(name)
        self._write_cells()
        self._write_revisions(sweep)
        self._write_attempts()
        self._write_numbers()
        self._write_events(sweep)
        self._write_weights()
        for row in self.plan.new:
            self.files.move_to_folder(row["id"], row["run_dir"])
        for index, folder in self.plan.folders.items():
            self.files.move_to_folder(index, folder)

    def _write_sweep(self, name: str) -> int:
        """Insert the sweep if it is missing, and return its id. Its launch time is never in the future.

        An existing sweep gets the bundle's launch time if that is later; its other columns stay. If it lists cells and
        shares none with the bundle, a note is added.
        """
        table, values = TABLES["sweep"], dict(self.content.sweep)
        # a clock that is ahead must not keep it the newest sweep for years
        values["launched_at"] = min(values["launched_at"], queries.now(self.session))
        existing = self.session.execute(select(table).where(table.c.name == name)).one_or_none()
        if existing is None:
            self.session.execute(insert(table).values({**values, "name": name, "fence": 0}))
            self.added["sweep"] += 1
            return int(self.session.scalar(select(table.c.id).where(table.c.name == name)) or 0)
        self.present["sweep"] += 1
        if values["launched_at"] > existing.launched_at:
            later = sql_update(table).where(table.c.id == existing.id)
            self.session.execute(later.values(launched_at=values["launched_at"]))
        member, revision = TABLES["revision_cell"].c, TABLES["revision"].c
        listed = select(member.cell_id).join(TABLES["revision"], revision.id == member.revision_id)
        existing_cells = set(self.session.scalars(listed.where(revision.sweep_id == existing.id)))
        bundle_cells = {row["cell_id"] for rows in self.content.members.values() for row in rows}
        if existing_cells and bundle_cells and not existing_cells & bundle_cells:
            self.notes.append(
                f"sweep {name!r} had no cell in common with the bundle and now has the cells of both; --name "
                "imports into a separate sweep"
            )
        return int(existing.id)

    def _write_cells(self) -> None:
        """Insert the missing cells; existing ones stay, with a note about the number whose config differs."""
        table, cells = TABLES["cell"], self.content.cells
        existing, n_different = set(), 0
        for row in queries.rows_in(self.session, select(table.c.id, table.c.config), table.c.id, sorted(cells)):
            existing.add(row.id)
            n_different += row.config != json.loads(cells[row.id]["config"])
        self._insert("cell", [row for cell, row in cells.items() if cell not in existing])
        self.present["cell"] += len(existing)
        if n_different:
            self.notes.append(
                f"{counted(n_different, 'cell')} {'has' if n_different == 1 else 'have'} other evaluation or "
                "checkpoint settings in the bundle; those in this database are unchanged"
            )

    def _write_revisions(self, sweep: int) -> None:
        """Reassign ids of existing revisions, and insert the planned ones with their cells.

        `sweep` is the id of the sweep.
        """
        _change_ids(self.session, TABLES["revision"], self.plan.new_revision_ids)
        columns = {column.name for column in bundle_columns("revision")}
        for revision_id, number, row in self.plan.revisions:
            values = {name: value for name, value in row.items() if name in columns}
            self._insert("revision", [values | {"id": revision_id, "sweep_id": sweep, "number": number}])
            links = [
                {name: value for name, value in link.items() if name != "revision"} | {"revision_id": revision_id}
                for link in self.content.members[row["number"]]
            ]
            self._insert("revision_cell", links)
        for table in ("revision", "revision_cell"):
            self.present[table] = self.counts[table] - self.added[table]

    def _write_attempts(self) -> None:
        """Reassign ids of existing attempts, insert the new ones, replace unfinished copies, and set parents.

        Replacing deletes the copy's numbers first (its items only if the bundle has items); its id and number stay.
        Adds notes about weights that the bundle lacks.
        """
        table = TABLES["attempt"]
        numbers = {row.id: row.number for row in self.session.execute(select(table.c.id, table.c.number))}
        moves = {old: (new, numbers[old]) for old, new in self.plan.new_attempt_ids.items()}
        _change_ids(self.session, table, moves)
        ids = self.plan.ids()
        self.n_missing_weights = self.n_remote_weights = 0
        for row in sorted(self.plan.new, key=lambda row: int(row["id"])):
            values = self._attempt_values(row) | {"id": row["place"], "parent_id": None}
            self._insert("attempt", [values])
        for index in self.plan.replaced:
            row = self.content.attempts[index]
            for name in ATTEMPT_TABLES:
                if name != "example" or self.counts[name]:  # a bundle without items takes none away
                    self.session.execute(delete(TABLES[name]).where(TABLES[name].c.attempt_id == ids[index]))
            folder = self.plan.folders[index] if self.files.names(index) else None
            run_dir = self.session.scalar(select(table.c.run_dir).where(table.c.id == ids[index]))
            values = self._attempt_values(with_parsed_json("attempt", row) | {"run_dir": folder or run_dir})
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
        if self.n_missing_weights:
            self.notes.append(
                f"the weights of {counted(self.n_missing_weights, 'attempt')} are not in the bundle; export "
                "--with-weights adds them"
            )
        if self.n_remote_weights:
            self.notes.append(
                f"the weights of {counted(self.n_remote_weights, 'attempt')} are stored elsewhere; import does "
                "not use addresses in a bundle, so these weights count as gone here"
            )

    def _attempt_values(self, row: RowDict) -> RowDict:
        """Return the attempt as a row of this database, marked as imported.

        Checkpoints and remote addresses are dropped; only weights that are files of the bundle count. An attempt that
        was running at the export becomes interrupted, with its last heartbeat as end and the failure class PREEMPTED.
        Counts weights that are missing in the bundle.

        Args:
            row: planned row of the attempt, with JSON columns as they are.
        """
        values = {name: value for name, value in row.items() if name != "place"}
        values |= {"checkpoint": None, "weights": None, "imported": True}
        if self.files.names(row["id"], "weights"):
            values["weights"] = f"{row['run_dir']}/{WEIGHTS}"
        elif row["weights"]:
            is_local = local_path(row["weights"]) is not None
            self.n_missing_weights, self.n_remote_weights = (
                self.n_missing_weights + is_local,
                self.n_remote_weights + (not is_local),
            )
        if row["state"] == "running":
            values |= {"state": "interrupted", "finished_at": row["heartbeat_at"]}
            values["cause"] = (
                f"{UNFINISHED_CAUSE}, on {row['host']} (pid {row['pid']}), last heartbeat at "
                f"{format_utc(row['heartbeat_at'])}"
            )
            values["failure"] = PREEMPTED
        return values

    def _write_numbers(self) -> None:
        """Copy the staged rows of new and replaced attempts into the database.

        Missing items of attempts that were present are added, too.
        """
        ids = self.plan.ids()
        new_ids = {index: id_ for index, id_ in ids.items() if index not in self.plan.present}
        self.stage.set_attempt_ids(self.session, new_ids)
        for table in ATTEMPT_TABLES:
            moved = self.stage.move_rows(self.session, table)
            self.added[table] += moved
            self.present[table] += self.counts[table] - moved
        self._write_missing_items({index: ids[index] for index in self.plan.present})

    def _write_missing_items(self, present: Mapping[int, int]) -> None:
        """Add the items of imported attempts that an earlier bundle brought without items.

        Skips attempts that ran in this database, and items whose measurements were deleted here.

        Args:
            present: number of an attempt in the bundle -> id of the same attempt in this database.
        """
        if not self.counts["example"]:
            return
        attempt = TABLES["attempt"].c
        query = select(attempt.id).where(attempt.imported)
        imported = {row.id for row in queries.rows_in(self.session, query, attempt.id, sorted(present.values()))}
        if not imported:
            return
        self.stage.set_attempt_ids(self.session, {index: id_ for index, id_ in present.items() if id_ in imported})
        moved = self.stage.move_missing_items(self.session)
        self.added["example"] += moved
        self.present["example"] -= moved

    def _write_events(self, sweep: int) -> None:
        """Insert the events that the database lacks; `sweep` is the sweep's id.

        Events are equal if time, kind, message, cell and attempt are; n equal events in the bundle need n in the
        database.
        """
        event, ids = TABLES["event"], self.plan.ids()
        rows = [dict(row) for row in self.content.events]
        existing: Counter[tuple[Any, ...]] = Counter()
        if rows:
            query = select(event).where(event.c.at >= min(row["at"] for row in rows))
            query = query.where(event.c.at <= max(row["at"] for row in rows))
            existing.update(_event_key(dict(row._mapping)) for row in self.session.execute(query))
        new = []
        for row in rows:
            row["attempt_id"] = ids.get(row["attempt_id"])
            if existing[_event_key(row)] > 0:
                existing[_event_key(row)] -= 1
                self.present["event"] += 1
                continue
            is_of_sweep = row.pop("sweep") is True
            new.append(row | {"sweep_id": sweep if is_of_sweep else None})
        self._insert("event", new)

    def _write_weights(self) -> None:
        """Move weights of the bundle to existing attempts that lack theirs, and record their new paths."""
        for index, (existing, folder) in self.plan.weights.items():
            self.files.move_to_folder(index, folder)
            id_ = self.plan.new_attempt_ids.get(existing["id"], existing["id"])
            statement = sql_update(TABLES["attempt"]).where(TABLES["attempt"].c.id == id_)
            self.session.execute(statement.values(weights=f"{folder}/{WEIGHTS}"))

    def _insert(self, table: str, rows: list[RowDict]) -> None:
        for start in range(0, len(rows), BATCH):
            batch = [with_parsed_json(table, row) for row in rows[start : start + BATCH]]
            self.session.execute(insert(TABLES[table]), batch)
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
    """Import a bundle into the database, in one transaction.

    Adds missing rows and keeps existing ones; a second import changes nothing. Attempts that ran at the time of the
    export are imported as interrupted, until a later bundle contains them finished. Ids of existing attempts and
    revisions may change, so that their order follows the age. Opens a connection of its own. After an error nothing has
    changed, files included.

    Args:
        store: database.
        file: bundle.
        rename: name of the sweep in this database; None keeps its name. An existing sweep of that name is extended.
        runs: folder for weights and logs, which go into new folders only; None for the store's own.
        identify: returns the id of a config, given the id in the bundle; cells with another id are refused. None skips
            the check.
        derive: returns the columns that follow from a config; cells that contradict them are refused. None skips the
            check.
        large: lift the limits on sizes and counts.

    Returns:
        Counts of added and present rows, and notes for the user.

    Raises:
        BundleError: the file is damaged, is not a bundle, or is malicious.
        StoreTooNew: a newer release has written it.
        SweepBusy: it concerns cells that are being trained in this database.
        StoreError: the new name is invalid, or the import would overwrite a file.
        StoreBusy: the database stays locked.
        WriteRefused: the disk is full or read-only.
    """
    runs_folder = (runs or store.runs).absolute()
    if rename is not None and (problem := sweep_name_problem(rename)):
        raise StoreError(f"--name: {quoted_short(rename)} {problem}")
    # its connection holds the rows that are not validated yet
    import_store = Store(store.url.render_as_string(hide_password=False), patience=store.patience)
    try:
        with open_bundle(file, Limits.unlimited() if large else Limits()) as bundle:
            if rename is None and (problem := sweep_name_problem(bundle.sweep)):
                raise BundleError(f"{file}: {quoted_short(bundle.sweep)} {problem}; choose another with --name")
            _require_disk_space(bundle, sqlite_file(store.url), runs_folder)
            files = BundleFiles(bundle, runs_folder)
            try:
                with _garbage_collection_off():
                    while True:
                        # starts again if the connection is lost
                        with contextlib.suppress(StagingTablesLost):
                            return _import_with_retry(
                                import_store, bundle, files, rename or bundle.sweep, identify, derive
                            )
            except (IntegrityError, DataError) as error:
                raise bundle.invalid_error(f"the database rejected its rows ({_first_line(error)})") from error
            except DBAPIError as error:
                unknown = StoreError(f"cannot write to {store}: {_first_line(error)}; nothing was changed")
                raise explain_driver_error(error, store.url) or unknown from error
            except OSError as error:
                cause = error.strerror or str(error)
                raise WriteRefused(f"cannot write under {runs_folder}: {cause}; nothing was changed") from error
            finally:
                files.clear()
    finally:
        import_store.close()


def check_import(file: Path, url_or_path: str | Path | None, runs: Path, *, large: bool = False) -> None:
    """Check that a bundle can be opened and that the disks have space for it, before a database is created for it.

    Checks the manifest, not the rows. Returns nothing.

    Args:
        file: bundle.
        url_or_path: database URL, file, or None for the default; it need not exist.
        runs: runs folder.
        large: lift the limits on sizes and counts.

    Raises:
        BundleError: the file is missing, is not a bundle, or exceeds the limits.
        StoreTooNew: a newer release has written it.
        WriteRefused: a disk lacks space.
    """
    with open_bundle(file, Limits.unlimited() if large else Limits()) as bundle:
        _require_disk_space(bundle, sqlite_file(place_of(url_or_path)), runs)


def _require_disk_space(bundle: Bundle, database: Path | None, runs: Path) -> None:
    _require_free_bytes(bundle.path, (database or runs).parent, bundle.size(files=False))
    _require_free_bytes(bundle.path, runs, bundle.size(files=True))


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Turn off cyclic garbage collection of this process inside the context; restore it afterwards.

    Millions of plain rows have no cycles, and the search takes a sixth of an import.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _import_with_retry(
    store: Store,
    bundle: Bundle,
    files: BundleFiles,
    name: str,
    compute_cell_id: ComputeCellId | None,
    derive: Derive | None,
) -> BundleSummary:
    """Check the entire bundle, then write it. File operations are undone on any exception.

    The plan is made twice: once to unpack files before the database is locked, and again inside the write transaction.
    The retries are those of Store.write.

    Args:
        store: store of this import alone.
        bundle: open bundle.
        files: its weights and logs; the caller clears them.
        name: name of the sweep in this database.
        compute_cell_id: as `identify` of import_bundle.
        derive: as in import_bundle.

    Returns:
        Counts of added and present rows, number of moved files, size of the bundle, and notes.

    Raises:
        StagingTablesLost: the connection with the staged rows was lost; the import can start again.
    """
    stage = StagingTables(store)
    with store.transaction(write=False) as session:
        content = BundleContent(
            bundle, compute_cell_id, lambda table, columns: stage.add(table, columns, session), derive
        )

    def work(session: Session) -> _ImportWriter:
        """Plan the import in the locked database, unpack the missing files, and write everything; return the writer.

        Undoes the file operations of an earlier try first.
        """
        files.undo()
        stage.check(session)
        if store.path is None:
            session.execute(text("LOCK TABLE sweep, revision, cell, attempt IN SHARE ROW EXCLUSIVE MODE"))
        plan = ImportPlanner(session, store, content, name, files.runs).build()
        files.stage(plan.attempts_with_files)
        done = _ImportWriter(session, content, stage, plan, files)
        done.write(name)
        return done

    try:
        # unpacking takes time, so most of it happens before the database is locked
        with store.transaction(write=False) as session:
            first = ImportPlanner(session, store, content, name, files.runs).build()
        files.stage(first.attempts_with_files)
        done = store.write(work)
    except BaseException:
        files.undo()
        raise
    return BundleSummary(
        sweep=name,
        file=str(bundle.path),
        added=dict(done.added),
        present=dict(done.present),
        files=files.n_moved,
        bytes=bundle.path.stat().st_size,
        notes=tuple(done.notes),
    )


def _require_free_bytes(file: Path, folder: Path, size: int) -> None:
    """Raise WriteRefused if the disk of a folder has less than `size` bytes free.

    For a missing folder the nearest existing parent counts. `file` is the bundle, for the message.
    """
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if size > free:
        raise WriteRefused(
            f"{file} holds {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; free disk space, then "
            "import again"
        )


def _first_line(error: Exception) -> str:
    return (str(getattr(error, "orig", None) or error).strip().splitlines() or ["no reason given"])[0][:200]
