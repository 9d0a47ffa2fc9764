"""Plan of an import: validate the rows of a bundle against each other, then compare them with the database.

This module only reads. An import adds missing rows and changes no existing number. Cells are equal by id, revisions by
their content, attempts by (cell, started_at, host, pid, kind, finished_at). Reports use the attempt with the highest
id, and ids follow the age. If older attempts arrive after younger ones, ids are therefore reassigned among them. Two
databases that import each other's bundles then show the same results, whichever was first.

Ids rather than times say which attempt is newer: on one machine the later attempt is newer even after the clock was set
back, and only the order of ids records that. Attempt numbers and folders, which users see, stay.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from .. import forecast, paper
from ..derived import Derive, axis_contradictions, column_contradictions
from ..errors import SweepBusy
from ..store import queries
from ..store.database import jsonable
from ..weights import recorded_hash
from .bundles import Bundle, error_text, local_path
from .row_validation import ATTEMPT_TABLES, TABLES, RowDict, quoted_value

if TYPE_CHECKING:
    from ..store.store import Store

ComputeCellId = Callable[[Mapping[str, Any], str], str]
StoreColumns = Callable[[str, Mapping[str, list[Any]]], None]
UNFINISHED_CAUSE = "still running when it was exported"
"""Prefix of the cause of an attempt that was imported unfinished.

The finished attempt replaces it in a later import.
"""


class BundleContent:
    """Rows of a bundle that fit into memory, checked against each other.

    JSON columns are text (see `bundles.with_parsed_json`). `sweep` is the row of the sweep; `cells` are rows by cell
    id, `revisions` by revision number, `attempts` by number in the bundle; `members` lists the rows of `revision_cell`
    by revision number; `events` lists rows.
    """

    def __init__(
        self,
        bundle: Bundle,
        compute_cell_id: ComputeCellId | None,
        store_columns: StoreColumns | None = None,
        derive: Derive | None = None,
    ) -> None:
        """Read and check all rows and files of the bundle; this unpacks everything once.

        Args:
            bundle: open bundle.
            compute_cell_id: returns the id of a config, given the id in the bundle; None skips the check of cell ids.
            store_columns: receives the rows of the tables of numbers, in batches: table name, and values by column;
                called before all checks are done. None drops these rows.
            derive: returns the columns that follow from a config; None skips their check.

        Raises:
            BundleError: the content contradicts itself.
        """
        self.bundle = bundle
        invalid_error = bundle.invalid_error
        sweeps = list(bundle.rows("sweep"))
        if [row["name"] for row in sweeps] != [bundle.sweep]:
            raise invalid_error("it does not contain exactly one sweep, the one in the manifest")
        self.sweep = sweeps[0]
        self.cells = {row["id"]: row for row in bundle.rows("cell")}
        if len(self.cells) != bundle.manifest["counts"]["cell"]:
            raise invalid_error("cell.jsonl lists a cell twice")
        # first of all, since later checks rely on the ids
        if compute_cell_id is not None:
            self._check_cell_ids(compute_cell_id)
        self.revisions = {row["number"]: row for row in bundle.rows("revision")}
        if len(self.revisions) != bundle.manifest["counts"]["revision"] or not self.revisions:
            raise invalid_error("its revisions are not numbered consecutively")
        self.members = self._members()
        if derive is not None:
            self._check_labels(derive)
        self.attempts = {row["id"]: row for row in bundle.rows("attempt")}
        if sorted(self.attempts) != list(range(1, bundle.manifest["counts"]["attempt"] + 1)):
            raise invalid_error("its attempts are not numbered consecutively")
        for row in self.attempts.values():
            self._check_attempt(row)
        hashes: dict[int, str | None] = {}
        for table in ATTEMPT_TABLES:
            for columns in bundle.columns(table):
                if table == "provenance":
                    hashes |= zip(columns["attempt_id"], map(recorded_hash, columns["extra"]), strict=True)
                if max(columns["attempt_id"]) > len(self.attempts):
                    raise invalid_error(f"{table}.jsonl refers to attempts that are not in the bundle")
                if store_columns is not None:
                    store_columns(table, columns)
        attempts, cells = {None, *self.attempts}, {None, *self.cells}
        self.events = []
        for row in bundle.rows("event"):
            if row["attempt_id"] not in attempts or row["cell_id"] not in cells:
                raise invalid_error("event.jsonl refers to attempts or cells that are not in the bundle")
            self.events.append(row)
        for member, (number, name, role) in bundle.files.items():
            if number not in self.attempts:
                raise invalid_error(f"the file {name} belongs to no attempt")
            recorded = hashes.get(number) if role == "weights" else None
            if recorded not in (None, bundle.manifest["members"][member]["sha256"]):
                raise invalid_error(
                    f"{member} differs from the weights that attempt {number} recorded (SHA-256 "
                    f"{quoted_value(recorded)})"
                )
        for member in bundle.files:
            for _ in bundle.chunks(member):
                pass

    def _members(self) -> dict[int, list[RowDict]]:
        """Return the rows of revision_cell by revision number, in the bundle's order.

        A revision without cells has an empty list.

        Raises:
            BundleError: a row names an unknown revision or cell, or a revision lists a cell twice.
        """
        members: dict[int, list[RowDict]] = {number: [] for number in self.revisions}
        for row in self.bundle.rows("revision_cell"):
            if row["revision"] not in members or row["cell_id"] not in self.cells:
                raise self.bundle.invalid_error(
                    "revision_cell.jsonl refers to cells or revisions that are not in the bundle"
                )
            members[row["revision"]].append(row)
        if any(len({row["cell_id"] for row in rows}) != len(rows) for rows in members.values()):
            raise self.bundle.invalid_error("revision_cell.jsonl lists a cell twice")
        return members

    def _check_attempt(self, row: RowDict) -> None:
        """Check an attempt against the cells and the other attempts.

        Raises:
            BundleError: its cell or an ancestor is missing, it is its own ancestor, its folder is not below that of its
                cell, or exactly one of "running" and "without end" holds.
        """
        at = f"attempt.jsonl, attempt {row['id']}"
        if row["cell_id"] not in self.cells:
            raise self.bundle.invalid_error(f"{at}: its cell is not in the bundle")
        if not row["run_dir"].startswith(f"{row['cell_id']}/"):
            raise self.bundle.invalid_error(f"{at}: run_dir is {row['run_dir']!r}, not in the folder of its cell")
        if (row["state"] == "running") != (row["finished_at"] is None):
            raise self.bundle.invalid_error(f"{at}: it is both running and finished")
        parent, ancestors = row["parent_id"], {row["id"]}
        while parent is not None:
            if parent not in self.attempts or parent in ancestors:
                raise self.bundle.invalid_error(f"{at}: its parent is not in the bundle, or is its own descendant")
            ancestors.add(parent)
            parent = self.attempts[parent]["parent_id"]

    def _check_cell_ids(self, compute_cell_id: ComputeCellId) -> None:
        """Check that every cell id is that of its config.

        Published numbers (the paper's cells), whose configs are incomplete, are exempt.

        Args:
            compute_cell_id: called with the config and the id in the bundle; returns the id of the config.

        Raises:
            BundleError: an id differs, or `compute_cell_id` raised an error.
        """
        for number, (cell, row) in enumerate(self.cells.items(), 1):
            if paper.is_published_cell(cell, row["slug"]):
                continue
            at = f"cell.jsonl, row {number}"
            try:
                cell_id = compute_cell_id(json.loads(row["config"]), cell)
            except Exception as error:
                raise self.bundle.invalid_error(
                    f"{at}: the config of cell {cell} cannot be read ({error_text(error)})"
                ) from error
            if cell_id != cell:
                raise self.bundle.invalid_error(f"{at}: cell {cell} contradicts its config, whose id is {cell_id}")

    def _check_labels(self, derive: Derive) -> None:
        """Check the columns of cells, and their levels in each revision, against their configs.

        Published numbers are exempt.

        Args:
            derive: returns the columns that follow from a config.

        Raises:
            BundleError: a column or a level contradicts the config, or `derive` raised an error.
        """
        axes: dict[str, list[RowDict]] = {cell: [] for cell in self.cells}
        for rows in self.members.values():
            for row in rows:
                axes[row["cell_id"]].append(row)
        for number, (cell, row) in enumerate(self.cells.items(), 1):
            if paper.is_published_cell(cell, row["slug"]):
                continue
            config = json.loads(row["config"])
            try:
                derived = derive(config)
            except Exception as error:
                raise self.bundle.invalid_error(
                    f"cell.jsonl, row {number}: the config of cell {cell} cannot be read ({error_text(error)})"
                ) from error
            for line in column_contradictions(row, derived):
                raise self.bundle.invalid_error(f"cell.jsonl, row {number}: {line}")
            for link in axes[cell]:
                for line in axis_contradictions(cell, json.loads(link["axes"]), config, derived):
                    raise self.bundle.invalid_error(f"revision_cell.jsonl, revision {link['revision']}: {line}")


# --- the plan ---------------------------------------------------------------------------------------------------------


def _attempt_key(row: RowDict) -> tuple[Any, ...]:
    return (row["cell_id"], row["started_at"], row["host"], row["pid"], row["kind"], row["finished_at"])


def _is_unfinished(row: RowDict) -> bool:
    """Return True if the row holds an attempt as it was at an export before its end.

    So it is for a running attempt, and for an interrupted one whose cause starts with "still running when it was
    exported" (UNFINISHED_CAUSE), as an import writes.
    """
    copied = row["state"] == "interrupted" and (row["cause"] or "").startswith(UNFINISHED_CAUSE)
    return copied or row["state"] == "running"


def _merge_by_age(
    existing: Sequence[RowDict], incoming: Sequence[RowDict], same: Mapping[int, int], age: Callable[[RowDict], Any]
) -> list[RowDict]:
    """Return both lists as one, by age, with the order inside each list kept whatever its clock says.

    Rows in both appear once, as the row of the database. They split the lists into intervals, and only the rows of one
    interval are merged by age. A common row that comes in another order than in the database is skipped as a split
    point.

    Args:
        existing: rows of the database, oldest first.
        incoming: rows of the bundle, oldest first.
        same: id in the bundle -> id in the database, for rows in both.
        age: sort key of a row, smaller for older.
    """
    index_by_id = {row["id"]: index for index, row in enumerate(existing)}
    merged: list[RowDict] = []
    done, waiting = 0, []
    for row in incoming:
        index = index_by_id.get(same.get(row["id"], 0))
        if index is None:
            waiting.append(row)
        elif index >= done:
            merged += [*_merge_interval(existing[done:index], waiting, age), existing[index]]
            done, waiting = index + 1, []
    return merged + _merge_interval(existing[done:], waiting, age)


def _merge_interval(
    existing: Sequence[RowDict], incoming: Sequence[RowDict], age: Callable[[RowDict], Any]
) -> list[RowDict]:
    """Return both lists merged by `age`, oldest first; each keeps its own order even if it is not sorted.

    The head of each list with the smaller age key comes next; of equal ones the one of `existing`.
    """
    existing_rest, incoming_rest, merged = list(existing), list(incoming), []
    while existing_rest or incoming_rest:
        older = (
            incoming_rest
            if not existing_rest or (incoming_rest and age(incoming_rest[0]) < age(existing_rest[0]))
            else existing_rest
        )
        merged.append(older.pop(0))
    return merged


@dataclass
class ImportPlan:
    """Changes that an import makes to the attempts and revisions of the database."""

    new: list[RowDict] = field(default_factory=list)
    """Attempts of the bundle to insert, with their `place` (new id), `number` and `run_dir` in this database."""
    replaced: dict[int, int] = field(default_factory=dict)
    """Attempt of the bundle -> id of an existing unfinished copy of it (before ids are reassigned)."""
    folders: dict[int, str] = field(default_factory=dict)
    """Attempt of the bundle that replaces a copy -> its folder in the runs folder, for its files if there are any."""
    present: dict[int, int] = field(default_factory=dict)
    """Attempt of the bundle -> id of the same existing attempt (before ids are reassigned)."""
    new_attempt_ids: dict[int, int] = field(default_factory=dict)
    """Id of an existing attempt -> its new id."""
    revisions: list[tuple[int, int, RowDict]] = field(default_factory=list)
    """Revisions to insert: (id, number, row)."""
    new_revision_ids: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Id of an existing revision -> its new (id, number)."""
    weights: dict[int, tuple[RowDict, str]] = field(default_factory=dict)
    """Attempt of the bundle -> the same existing attempt, which lacks its weights, and the folder for them."""

    @property
    def attempts_with_files(self) -> list[int]:
        """Attempts of the bundle whose files are to be unpacked."""
        return [*(row["id"] for row in self.new), *self.replaced, *self.weights]

    def ids(self) -> dict[int, int]:
        """Return attempt of the bundle -> its id in this database after ids are reassigned.

        Every attempt of the bundle is a key.
        """
        existing_ids = self.present | self.replaced
        placed = {index: self.new_attempt_ids.get(id_, id_) for index, id_ in existing_ids.items()}
        return placed | {row["id"]: row["place"] for row in self.new}


class ImportPlanner:
    """Compares a bundle with the database. Reads only."""

    def __init__(self, session: Session, store: Store, content: BundleContent, name: str, runs: Path) -> None:
        """Start with an empty plan.

        Args:
            session: open session.
            store: database of the session.
            content: checked rows of the bundle.
            name: name that the sweep gets in this database, whether or not it exists.
            runs: runs folder, which decides the folders that are free.
        """
        self.session, self.store, self.content, self.name, self.runs = session, store, content, name, runs
        self.plan = ImportPlan()
        self.folders: set[str] = set()
        self.with_weights = {index for index, _, role in content.bundle.files.values() if role == "weights"}

    def _new_ids(self, table: str, count: int) -> list[int]:
        """Return ids for `count` new rows, in increasing order; on SQLite they follow the highest existing one.

        On PostgreSQL they are taken from the table's sequence, which advances for good.
        """
        if count and self.store.path is None:
            query = text(f"SELECT nextval(pg_get_serial_sequence('{table}', 'id')) FROM generate_series(1, {count})")
            return sorted(self.session.scalars(query))
        top = self.session.scalar(select(func.max(TABLES[table].c.id))) or 0
        return list(range(top + 1, top + 1 + count))

    def build(self) -> ImportPlan:
        """Return the plan; call it once per instance.

        Raises:
            SweepBusy: the plan would affect a running cell or sweep.
        """
        self._plan_attempts()
        self._plan_revisions()
        return self.plan

    def _plan_attempts(self) -> None:
        """Match the attempts of the bundle with existing ones, and plan ids, numbers and folders of the new ones.

        Fills all fields of the plan that concern attempts.

        Raises:
            SweepBusy: a cell with new attempts is running, or ids would change under a running sweep.
        """
        incoming = defaultdict(list)
        for row in sorted(self.content.attempts.values(), key=lambda row: int(row["id"])):
            incoming[row["cell_id"]].append(row)
        existing = defaultdict(list)
        attempt = TABLES["attempt"]
        query = select(attempt).order_by(attempt.c.id)
        for db_row in queries.rows_in(self.session, query, attempt.c.cell_id, sorted(incoming)):
            existing[db_row.cell_id].append(dict(db_row._mapping))
            self.folders.add(db_row.run_dir)
        added = {cell: self._match(existing[cell], rows) for cell, rows in incoming.items()}
        # in the bundle's order across cells, so that an empty database gets the bundle's numbering
        ranked = sorted(row["id"] for new in added.values() for row in new)
        new_ids = dict(zip(ranked, self._new_ids("attempt", len(ranked)), strict=True))
        for cell, new in added.items():
            if new:
                self._merge(cell, existing[cell], incoming[cell], new, [new_ids[row["id"]] for row in new])

    def _match(self, existing: list[RowDict], rows: list[RowDict]) -> list[RowDict]:
        """Match each attempt of a cell with an existing one, plan the matches, and return those without a match.

        The attempts are the same if cell, start, host, pid, kind and end are equal. An unfinished copy (an attempt that
        was exported before its end) also matches by start, host and kind. A later copy replaces an earlier one, and a
        finished attempt replaces its copy. Other matches are planned as present, with weights if the database lacks
        them.

        Args:
            existing: the cell's attempts in the database.
            rows: the cell's attempts in the bundle.
        """
        exact = {_attempt_key(row): row for row in existing}
        loose = {(row["started_at"], row["host"], row["kind"]): row for row in existing}
        new = []
        for row in rows:
            same = exact.get(_attempt_key(row))
            same_start = loose.get((row["started_at"], row["host"], row["kind"]))
            if same is None and same_start is not None and _is_unfinished(row):
                same = same_start
            if same is not None:
                if _is_unfinished(row) and same_start is same and self._is_older_copy(same, row):
                    self._replace(row, same)
                    continue
                self.plan.present[row["id"]] = same["id"]
                if row["id"] in self.with_weights and same["state"] == "done" and lacks_weights(same, self.runs):
                    self.plan.weights[row["id"]] = same, self._free_folder(same["run_dir"])
            elif same_start is not None and same_start["state"] != "running" and _is_unfinished(same_start):
                self._replace(row, same_start)
            else:
                new.append(row)
        return new

    def _replace(self, row: RowDict, existing: RowDict) -> None:
        """Plan to replace an existing unfinished copy by the bundle's attempt, whose id and folder it keeps.

        If files exist in its folder, these stay, and the new files go to another folder.

        Args:
            row: row of the bundle.
            existing: row of the database.
        """
        self.plan.replaced[row["id"]] = existing["id"]
        free = not os.path.lexists(self.runs / existing["run_dir"])
        self.plan.folders[row["id"]] = existing["run_dir"] if free else self._free_folder(existing["run_dir"])

    def _is_older_copy(self, existing: RowDict, row: RowDict) -> bool:
        """Return True if the existing attempt is an unfinished copy with an earlier heartbeat than the row's.

        A running attempt of this database is no copy.

        Args:
            existing: row of the database.
            row: row of the bundle, unfinished as well.
        """
        copy = existing["state"] != "running" and _is_unfinished(existing)
        return copy and bool(row["heartbeat_at"] > existing["heartbeat_at"])

    def _merge(
        self, cell: str, existing: list[RowDict], rows: list[RowDict], new: list[RowDict], new_ids: list[int]
    ) -> None:
        """Plan ids, numbers and folders of a cell's new attempts, and new ids of existing ones that come later.

        A new attempt keeps its number if no attempt of the cell has it; otherwise it gets the next one above all of
        them.

        Args:
            cell: cell id.
            existing: the cell's attempts in the database, by age.
            rows: the cell's attempts in the bundle, by age.
            new: those of the bundle that the database lacks; not empty.
            new_ids: ids for them, increasing and above those of `existing`.

        Raises:
            SweepBusy: an attempt of the cell is running, or ids would change under a running sweep.
        """
        live = [row for row in existing if row["state"] == "running"]
        if live:
            raise SweepBusy(
                f"cell {cell} is running here (attempt {live[0]['number']}, pid {live[0]['pid']} on "
                f"{live[0]['host']}), and the bundle has other attempts of it; import again when it has ended"
            )

        def age(row: RowDict) -> tuple[Any, ...]:
            return (row["started_at"], row["host"], row["pid"] or 0, row["kind"], str(row["finished_at"]))

        ids = [*(row["id"] for row in existing), *new_ids]
        arriving = {id(row) for row in new}
        order = _merge_by_age(existing, rows, self.plan.present | self.plan.replaced, age)
        numbers = {row["number"] for row in existing}
        for id_, row in zip(ids, order, strict=True):
            if id(row) in arriving:
                number = row["number"] if row["number"] not in numbers else max(numbers) + 1
                plain = row["run_dir"] == f"{cell}/{row['number']}"
                folder = self._free_folder(f"{cell}/{number}" if plain else row["run_dir"])
                numbers.add(number)
                self.plan.new.append(row | {"place": id_, "number": number, "run_dir": folder})
            elif row["id"] != id_:
                self.plan.new_attempt_ids[row["id"]] = id_
        if any(row["id"] in self.plan.new_attempt_ids for row in existing):
            self._require_idle(cell)

    def _free_folder(self, preferred: str) -> str:
        """Return the folder, or one with a suffix (`-2`, `-3`, ...) if another attempt or an existing file uses it.

        A suffix that the folder already has is replaced. Paths are relative to the runs folder. The result is reserved
        for the rest of the plan.
        """
        folder, attempt = preferred, 2
        plain = preferred.partition("-")[0]
        while folder in self.folders or os.path.lexists(self.runs / folder):
            folder, attempt = f"{plain}-{attempt}", attempt + 1
        self.folders.add(folder)
        return folder

    def _require_idle(self, cell: str) -> None:
        """Raise SweepBusy if a sweep that lists this cell in any revision is being run.

        A sweep is being run while a process holds it under a lease that has not ended.
        """
        member, revision, sweep = TABLES["revision_cell"].c, TABLES["revision"].c, TABLES["sweep"].c
        held = (sweep.owner.is_not(None), sweep.lease_until > queries.now(self.session))
        query = (
            select(sweep.name)
            .join(TABLES["revision"], revision.sweep_id == sweep.id)
            .join(TABLES["revision_cell"], member.revision_id == revision.id)
            .where(member.cell_id == cell, *held)
        )
        self._raise_if_running(self.session.scalar(query.limit(1)))

    def _raise_if_running(self, running: str | None) -> None:
        """Raise SweepBusy for the name of a running sweep; do nothing for None."""
        if running is not None:
            raise SweepBusy(
                f"sweep {running!r} is running, and the import would mix older results with its own; import "
                "again when the launch has ended"
            )

    # --- revisions ---

    def _plan_revisions(self) -> None:
        """Plan the revisions to insert and the new ids and numbers of existing ones, in the order of their creation.

        Revisions are the same if content and time of creation are equal. A revision of the bundle with the content of
        the one before or after it is not inserted. A sweep without revisions in the database keeps the bundle's
        numbers. Adds the keys `asked` and `id` to the rows of the content.

        Raises:
            SweepBusy: revisions would be added to a sweep that is being run.
        """
        sweep = self.session.execute(select(TABLES["sweep"]).where(TABLES["sweep"].c.name == self.name)).one_or_none()
        existing: list[RowDict] = []
        if sweep is not None:
            revision = TABLES["revision"]
            query = select(revision).where(revision.c.sweep_id == sweep.id).order_by(revision.c.number)
            existing = [dict(row._mapping) for row in self.session.execute(query)]
            for row in existing:
                row["asked"] = _revision_hash(row, queries.members(self.session, row["id"]))
        rows = [self.content.revisions[number] for number in sorted(self.content.revisions)]
        for row in rows:
            listed = sorted(self.content.members[row["number"]], key=lambda link: int(link["position"]))
            axes = [(link["cell_id"], json.loads(link["axes"])) for link in listed]
            row["asked"] = _revision_hash(row | {"options": json.loads(row["options"])}, axes)
        id_by_key = {(row["asked"], row["created_at"]): row["id"] for row in existing}
        for row in rows:
            row["id"] = row["number"]
        same = {row["id"]: id_by_key[key] for row in rows if (key := (row["asked"], row["created_at"])) in id_by_key}
        arriving = {id(row) for row in rows if row["id"] not in same}
        merged = _merge_by_age(existing, rows, same, lambda row: (row["created_at"], row["asked"]))
        distinct: list[RowDict] = []
        for index, row in enumerate(merged):
            neighbours = [distinct[-1]] if distinct else []
            neighbours += merged[index + 1 : index + 2]
            # as on one machine, a launch equal to the one before or after it is not a revision of its own
            if id(row) not in arriving or all(neighbour["asked"] != row["asked"] for neighbour in neighbours):
                distinct.append(row)
        count = len(distinct) - len(existing)
        if count and sweep is not None and sweep.owner is not None and sweep.lease_until is not None:
            self._raise_if_running(self.name if sweep.lease_until > queries.now(self.session) else None)
        ids = [*(row["id"] for row in existing), *self._new_ids("revision", count)]
        top = max((row["number"] for row in existing), default=0)
        numbers = [*(row["number"] for row in existing), *range(top + 1, top + 1 + count)]
        if not existing:
            numbers = [row["number"] for row in distinct]
        for row, id_, number in zip(distinct, ids, numbers, strict=True):
            if id(row) in arriving:
                self.plan.revisions.append((id_, number, row))
            elif row["id"] != id_ or row["number"] != number:
                self.plan.new_revision_ids[row["id"]] = (id_, number)


def lacks_weights(row: RowDict, runs: Path) -> bool:
    """Return True if an attempt of the database has no weights, or if their file is missing on this machine.

    Weights at an address elsewhere do not count as missing.

    Args:
        row: row of the attempt.
        runs: runs folder.
    """
    local = local_path(row["weights"])
    return not row["weights"] or (local is not None and not (runs / local).exists())


def _revision_hash(row: RowDict, members: Iterable[tuple[str, Any]]) -> str:
    """Return one SHA-256 (hex) of a revision's grid, options (without forecast), and cells with their axes.

    Args:
        row: row of the revision, with its options as a dict.
        members: (cell id, axes) in the grid's order, which counts; the order of the axes does not.
    """
    content = [
        row["grid_text"],
        forecast.without_forecast(row["options"]),
        [[cell, sorted(axes.items())] for cell, axes in members],
    ]
    return hashlib.sha256(json.dumps(jsonable(content), sort_keys=True).encode()).hexdigest()
