"""What taking a bundle in would do: its rows checked against each other, then compared with the database. Reads only.

Taking a bundle in adds what is missing and changes no number that is there: cells are the same by id, revisions by what
they ask for, attempts by (cell, started_at, host, pid, kind, finished_at). Reports take the newest attempt by id, and ids
follow the age: where older attempts arrive after younger ones, the ids of both are dealt anew among them, so two databases
that take in each other's bundles show the same results whoever was first.

Why ids and not times say which is newer: of one machine's attempts the later is the newer even after its clock was set
back, and only the order of ids knows that. Numbers and folders, which people read, stay as they are.
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
from .row_validation import ATTEMPT_TABLES, RowDict, T, quoted_value

if TYPE_CHECKING:
    from ..store.store import Store

ComputeCellId = Callable[[Mapping[str, Any], str], str]
StoreColumns = Callable[[str, Mapping[str, list[Any]]], None]
UNFINISHED_CAUSE = "still running when it was exported"
"""How the cause of an attempt begins that was taken in unfinished; its finished self replaces it."""


class Content:
    """The rows of a bundle that fit into memory, checked against each other. Numbers go to `keep`, many at a time.

    JSON columns are text (see bundles.opened).
    """

    def __init__(
        self,
        bundle: Bundle,
        identify: ComputeCellId | None,
        keep: StoreColumns | None = None,
        derive: Derive | None = None,
    ) -> None:
        self.bundle = bundle
        wrong = bundle.wrong
        sweeps = list(bundle.rows("sweep"))
        if [row["name"] for row in sweeps] != [bundle.sweep]:
            raise wrong("it does not hold exactly the sweep that the manifest names")
        self.sweep = sweeps[0]
        self.cells = {row["id"]: row for row in bundle.rows("cell")}
        if len(self.cells) != bundle.manifest["counts"]["cell"]:
            raise wrong("cell.jsonl has a cell twice")
        # before anything else that a cell says is looked at
        if identify is not None:
            self._identify(identify)
        self.revisions = {row["number"]: row for row in bundle.rows("revision")}
        if len(self.revisions) != bundle.manifest["counts"]["revision"] or not self.revisions:
            raise wrong("its revisions are not numbered one by one")
        self.members = self._members()
        if derive is not None:
            self._check_labels(derive)
        self.attempts = {row["id"]: row for row in bundle.rows("attempt")}
        if sorted(self.attempts) != list(range(1, bundle.manifest["counts"]["attempt"] + 1)):
            raise wrong("its attempts are not numbered one by one")
        for row in self.attempts.values():
            self._check_attempt(row)
        hashes: dict[int, str | None] = {}
        for table in ATTEMPT_TABLES:
            for columns in bundle.columns(table):
                if table == "provenance":
                    hashes |= zip(columns["attempt_id"], map(recorded_hash, columns["extra"]), strict=True)
                if max(columns["attempt_id"]) > len(self.attempts):
                    raise wrong(f"{table}.jsonl speaks of attempts that are not there")
                if keep is not None:
                    keep(table, columns)
        attempts, cells = {None, *self.attempts}, {None, *self.cells}
        self.events = []
        for row in bundle.rows("event"):
            if row["attempt_id"] not in attempts or row["cell_id"] not in cells:
                raise wrong("event.jsonl speaks of what is not there")
            self.events.append(row)
        for member, (number, name, role) in bundle.files.items():
            if number not in self.attempts:
                raise wrong(f"the file {name} belongs to no attempt")
            recorded = hashes.get(number) if role == "weights" else None
            if recorded not in (None, bundle.manifest["members"][member]["sha256"]):
                raise wrong(
                    f"{member} are other weights than attempt {number} recorded (SHA-256 {quoted_value(recorded)})"
                )
        for member in bundle.files:
            for _ in bundle.chunks(member):
                pass

    def _members(self) -> dict[int, list[RowDict]]:
        found: dict[int, list[RowDict]] = {number: [] for number in self.revisions}
        for row in self.bundle.rows("revision_cell"):
            if row["revision"] not in found or row["cell_id"] not in self.cells:
                raise self.bundle.wrong("revision_cell.jsonl lists what is not there")
            found[row["revision"]].append(row)
        if any(len({row["cell_id"] for row in rows}) != len(rows) for rows in found.values()):
            raise self.bundle.wrong("revision_cell.jsonl lists a cell twice")
        return found

    def _check_attempt(self, row: RowDict) -> None:
        at = f"attempt.jsonl, attempt {row['id']}"
        if row["cell_id"] not in self.cells:
            raise self.bundle.wrong(f"{at}: its cell is not there")
        if not row["run_dir"].startswith(f"{row['cell_id']}/"):
            raise self.bundle.wrong(f"{at}: run_dir is {row['run_dir']!r}, not in the folder of its cell")
        if (row["state"] == "running") != (row["finished_at"] is None):
            raise self.bundle.wrong(f"{at}: it is both running and finished")
        parent, seen = row["parent_id"], {row["id"]}
        while parent is not None:
            if parent not in self.attempts or parent in seen:
                raise self.bundle.wrong(f"{at}: its parent is not there, or its own child")
            seen.add(parent)
            parent = self.attempts[parent]["parent_id"]

    def _identify(self, identify: ComputeCellId) -> None:
        """Every id is that of its config; only the published numbers, whose configs nobody knows whole, have others."""
        for number, (cell, row) in enumerate(self.cells.items(), 1):
            if paper.is_published_cell(cell, row["slug"]):
                continue
            at = f"cell.jsonl, row {number}"
            try:
                found = identify(json.loads(row["config"]), cell)
            except Exception as error:
                raise self.bundle.wrong(
                    f"{at}: the config of cell {cell} cannot be read ({error_text(error)})"
                ) from error
            if found != cell:
                raise self.bundle.wrong(f"{at}: the config of cell {cell} is that of {found}")

    def _check_labels(self, derive: Derive) -> None:
        """Refuse cells whose columns, or whose levels in a revision, are not those of their configs."""
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
                raise self.bundle.wrong(
                    f"cell.jsonl, row {number}: the config of cell {cell} cannot be read ({error_text(error)})"
                ) from error
            for line in column_contradictions(row, derived):
                raise self.bundle.wrong(f"cell.jsonl, row {number}: {line}")
            for link in axes[cell]:
                for line in axis_contradictions(cell, json.loads(link["axes"]), config, derived):
                    raise self.bundle.wrong(f"revision_cell.jsonl, revision {link['revision']}: {line}")


# --- the plan ---------------------------------------------------------------------------------------------------------


def _identity(row: RowDict) -> tuple[Any, ...]:
    return (row["cell_id"], row["started_at"], row["host"], row["pid"], row["kind"], row["finished_at"])


def _unfinished(row: RowDict) -> bool:
    """Whether it is known only as far as it was when somebody exported it."""
    copied = row["state"] == "interrupted" and (row["cause"] or "").startswith(UNFINISHED_CAUSE)
    return copied or row["state"] == "running"


def _interleaved(
    here: Sequence[RowDict], there: Sequence[RowDict], same: Mapping[int, int], age: Callable[[RowDict], Any]
) -> list[RowDict]:
    """Both by age, each in its own order, whatever its clock did: what both have (`same`, by id) divides them alike."""
    places = {row["id"]: place for place, row in enumerate(here)}
    found: list[RowDict] = []
    done, waiting = 0, []
    for row in there:
        place = places.get(same.get(row["id"], 0))
        if place is None:
            waiting.append(row)
        elif place >= done:
            found += [*_by_age(here[done:place], waiting, age), here[place]]
            done, waiting = place + 1, []
    return found + _by_age(here[done:], waiting, age)


def _by_age(here: Sequence[RowDict], there: Sequence[RowDict], age: Callable[[RowDict], Any]) -> list[RowDict]:
    ours, theirs, found = list(here), list(there), []
    while ours or theirs:
        take = theirs if not ours or (theirs and age(theirs[0]) < age(ours[0])) else ours
        found.append(take.pop(0))
    return found


@dataclass
class ImportPlan:
    """What an import does to the attempts and revisions of the database."""

    new: list[RowDict] = field(default_factory=list)
    """Attempts of the bundle to insert, with `place`, `number` and `run_dir` as they will be here."""
    replaced: dict[int, int] = field(default_factory=dict)
    """Attempt of the bundle -> attempt here that was an unfinished copy of it (its id before anything moves)."""
    folders: dict[int, str] = field(default_factory=dict)
    """Attempt of the bundle that replaces one -> its folder here, should files come with it."""
    present: dict[int, int] = field(default_factory=dict)
    """Attempt of the bundle -> the same one here (its id before anything moves)."""
    moved: dict[int, int] = field(default_factory=dict)
    """Attempt here -> its new id."""
    revisions: list[tuple[int, int, RowDict]] = field(default_factory=list)
    """Revisions to insert: (id, number, row)."""
    renumbered: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Revision here -> its new (id, number)."""
    weights: dict[int, tuple[RowDict, str]] = field(default_factory=dict)
    """Attempt of the bundle -> the same one here, should its weights be missing, and the folder for those that come."""

    @property
    def wanted(self) -> list[int]:
        """The attempts of the bundle whose files are needed."""
        return [*(row["id"] for row in self.new), *self.replaced, *self.weights]

    def ids(self) -> dict[int, int]:
        """Attempt of the bundle -> its id here, once everything has moved."""
        known = self.present | self.replaced
        placed = {index: self.moved.get(id_, id_) for index, id_ in known.items()}
        return placed | {row["id"]: row["place"] for row in self.new}


class ImportPlanner:
    """Compares a bundle with the database. Reads only."""

    def __init__(self, session: Session, store: Store, content: Content, name: str, runs: Path) -> None:
        self.session, self.store, self.content, self.name, self.runs = session, store, content, name, runs
        self.plan = ImportPlan()
        self.folders: set[str] = set()
        self.brought = {index for index, _, role in content.bundle.files.values() if role == "weights"}

    def _fresh(self, table: str, count: int) -> list[int]:
        """Ids for that many new rows, higher than all."""
        if count and self.store.path is None:
            query = text(f"SELECT nextval(pg_get_serial_sequence('{table}', 'id')) FROM generate_series(1, {count})")
            return sorted(self.session.scalars(query))
        top = self.session.scalar(select(func.max(T[table].c.id))) or 0
        return list(range(top + 1, top + 1 + count))

    def make(self) -> ImportPlan:
        """The plan. Raises SweepBusy when it would touch what somebody runs at this moment."""
        self._attempts()
        self._revisions()
        return self.plan

    def _attempts(self) -> None:
        incoming = defaultdict(list)
        for row in sorted(self.content.attempts.values(), key=lambda row: int(row["id"])):
            incoming[row["cell_id"]].append(row)
        here = defaultdict(list)
        attempt = T["attempt"]
        query = select(attempt).order_by(attempt.c.id)
        for found in queries.rows_in(self.session, query, attempt.c.cell_id, sorted(incoming)):
            here[found.cell_id].append(dict(found._mapping))
            self.folders.add(found.run_dir)
        added = {cell: self._match(here[cell], rows) for cell, rows in incoming.items()}
        # in the bundle's order, whatever their cells: an empty database then numbers them as the bundle does
        ranked = sorted(row["id"] for new in added.values() for row in new)
        dealt = dict(zip(ranked, self._fresh("attempt", len(ranked)), strict=True))
        for cell, new in added.items():
            if new:
                self._merge(cell, here[cell], incoming[cell], new, [dealt[row["id"]] for row in new])

    def _match(self, here: list[RowDict], rows: list[RowDict]) -> list[RowDict]:
        """Finds each attempt of the bundle here; those that are not are returned."""
        exact = {_identity(row): row for row in here}
        loose = {(row["started_at"], row["host"], row["kind"]): row for row in here}
        new = []
        for row in rows:
            same = exact.get(_identity(row))
            near = loose.get((row["started_at"], row["host"], row["kind"]))
            if same is None and near is not None and _unfinished(row):
                same = near
            if same is not None:
                if _unfinished(row) and near is same and self._copied(same, row):
                    self._replace(row, same)
                    continue
                self.plan.present[row["id"]] = same["id"]
                if row["id"] in self.brought and same["state"] == "done" and lacks_weights(same, self.runs):
                    self.plan.weights[row["id"]] = same, self._folder(same["run_dir"])
            elif near is not None and near["state"] != "running" and _unfinished(near):
                self._replace(row, near)
            else:
                new.append(row)
        return new

    def _replace(self, row: RowDict, here: RowDict) -> None:
        """Ours is an unfinished copy of the bundle's. What its folder holds already stays where it is."""
        self.plan.replaced[row["id"]] = here["id"]
        free = not os.path.lexists(self.runs / here["run_dir"])
        self.plan.folders[row["id"]] = here["run_dir"] if free else self._folder(here["run_dir"])

    def _copied(self, here: RowDict, row: RowDict) -> bool:
        """Whether ours is an older copy of the same unfinished attempt."""
        copy = here["state"] != "running" and _unfinished(here)
        return copy and bool(row["heartbeat_at"] > here["heartbeat_at"])

    def _merge(self, cell: str, here: list[RowDict], rows: list[RowDict], new: list[RowDict], fresh: list[int]) -> None:
        live = [row for row in here if row["state"] == "running"]
        if live:
            raise SweepBusy(
                f"cell {cell} is being run here (attempt {live[0]['number']}, pid {live[0]['pid']} on "
                f"{live[0]['host']}) and the bundle has other attempts of it; import again when that has ended"
            )

        def age(row: RowDict) -> tuple[Any, ...]:
            return (row["started_at"], row["host"], row["pid"] or 0, row["kind"], str(row["finished_at"]))

        places = [*(row["id"] for row in here), *fresh]
        arriving = {id(row) for row in new}
        order = _interleaved(here, rows, self.plan.present | self.plan.replaced, age)
        numbers = {row["number"] for row in here}
        for place, row in zip(places, order, strict=True):
            if id(row) in arriving:
                number = row["number"] if row["number"] not in numbers else max(numbers) + 1
                plain = row["run_dir"] == f"{cell}/{row['number']}"
                folder = self._folder(f"{cell}/{number}" if plain else row["run_dir"])
                numbers.add(number)
                self.plan.new.append(row | {"place": place, "number": number, "run_dir": folder})
            elif row["id"] != place:
                self.plan.moved[row["id"]] = place
        if any(row["id"] in self.plan.moved for row in here):
            self._refuse_while_run(cell)

    def _folder(self, wanted: str) -> str:
        """That folder, or one like it where another attempt, or a stranger's folder, is in the way."""
        found, attempt = wanted, 2
        plain = wanted.partition("-")[0]
        while found in self.folders or os.path.lexists(self.runs / found):
            found, attempt = f"{plain}-{attempt}", attempt + 1
        self.folders.add(found)
        return found

    def _refuse_while_run(self, cell: str) -> None:
        member, revision, sweep = T["revision_cell"].c, T["revision"].c, T["sweep"].c
        held = (sweep.owner.is_not(None), sweep.lease_until > queries.now(self.session))
        query = (
            select(sweep.name)
            .join(T["revision"], revision.sweep_id == sweep.id)
            .join(T["revision_cell"], member.revision_id == revision.id)
            .where(member.cell_id == cell, *held)
        )
        self._refuse(self.session.scalar(query.limit(1)))

    def _refuse(self, running: str | None) -> None:
        if running is not None:
            raise SweepBusy(
                f"sweep {running!r} is being run, and the import would set older results among its own; "
                "import again when the launch has ended"
            )

    # --- revisions ---

    def _revisions(self) -> None:
        sweep = self.session.execute(select(T["sweep"]).where(T["sweep"].c.name == self.name)).one_or_none()
        here: list[RowDict] = []
        if sweep is not None:
            revision = T["revision"]
            query = select(revision).where(revision.c.sweep_id == sweep.id).order_by(revision.c.number)
            here = [dict(row._mapping) for row in self.session.execute(query)]
            for row in here:
                row["asked"] = _asked(row, queries.members(self.session, row["id"]))
        rows = [self.content.revisions[number] for number in sorted(self.content.revisions)]
        for row in rows:
            listed = sorted(self.content.members[row["number"]], key=lambda link: int(link["position"]))
            axes = [(link["cell_id"], json.loads(link["axes"])) for link in listed]
            row["asked"] = _asked(row | {"options": json.loads(row["options"])}, axes)
        known = {(row["asked"], row["created_at"]): row["id"] for row in here}
        for row in rows:
            row["id"] = row["number"]
        same = {row["id"]: known[key] for row in rows if (key := (row["asked"], row["created_at"])) in known}
        arriving = {id(row) for row in rows if row["id"] not in same}
        merged = _interleaved(here, rows, same, lambda row: (row["created_at"], row["asked"]))
        kept: list[RowDict] = []
        for index, row in enumerate(merged):
            near = [kept[-1]] if kept else []
            near += merged[index + 1 : index + 2]
            # a launch that asked for the same as the one before or after it is no revision, as on one machine
            if id(row) not in arriving or all(other["asked"] != row["asked"] for other in near):
                kept.append(row)
        count = len(kept) - len(here)
        if count and sweep is not None and sweep.owner is not None and sweep.lease_until is not None:
            self._refuse(self.name if sweep.lease_until > queries.now(self.session) else None)
        ids = [*(row["id"] for row in here), *self._fresh("revision", count)]
        top = max((row["number"] for row in here), default=0)
        numbers = [*(row["number"] for row in here), *range(top + 1, top + 1 + count)]
        if not here:
            numbers = [row["number"] for row in kept]
        for row, place, number in zip(kept, ids, numbers, strict=True):
            if id(row) in arriving:
                self.plan.revisions.append((place, number, row))
            elif row["id"] != place or row["number"] != number:
                self.plan.renumbered[row["id"]] = (place, number)


def lacks_weights(row: RowDict, runs: Path) -> bool:
    """Whether an attempt here has no weights, or they are gone from where they were on this machine."""
    local = local_path(row["weights"])
    return not row["weights"] or (local is not None and not (runs / local).exists())


def _asked(row: RowDict, members: Iterable[tuple[str, Any]]) -> str:
    """What a revision asks for, as one hash."""
    asked = [
        row["grid_text"],
        forecast.without_forecast(row["options"]),
        [[cell, sorted(axes.items())] for cell, axes in members],
    ]
    return hashlib.sha256(json.dumps(jsonable(asked), sort_keys=True).encode()).hexdigest()
