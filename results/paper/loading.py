"""Published sweeps into a database: each in one transaction, so that it is there whole or not at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from ..errors import StoreError
from ..failure_classes import PREEMPTED
from ..store import attempt_queries, queries, sweep_lease
from ..store.records import CellRecord, NewRevision, Provenance
from ..store.schema import AttemptRow, CurvePointRow, MeasurementRow, ProvenanceRow, RevisionRow, SweepRow
from ..store.store import Store
from .base import Sheet
from .published_sweeps import OPEN_WEIGHT, RIVALS, SWEEPS, options_of, published_sweep

GRID_FILE = "results/paper"
OWNER = "published"
APART = 1000  # ids from the first attempt of one sweep to that of the next, in a database of published sweeps alone
NAMES = (OPEN_WEIGHT, *SWEEPS, *RIVALS)
"""Every published sweep, in the order of their ids, which never changes: files name attempts by them."""
SHOWN = (*RIVALS, OPEN_WEIGHT, *SWEEPS)
"""The same in the order in which a list shows them, last first."""


def load_published(store: Store, names: Collection[str] = NAMES, *, alone: bool = False) -> list[str]:
    """Adds the published sweeps that the database lacks, or holds as an older release had them; returns their names.

    `alone`: the database holds nothing but published sweeps, and the attempts of each get the same ids whichever came first.

    Safe to call again, by several processes at once, and after an interruption. They never become the default sweep of a
    database that has another. Numbers of an older release stay with the attempts that they were stored for; reports take
    the newest. Raises StoreError when a sweep of one's own has such a name.
    """
    return [
        name
        for name in NAMES
        if name in names and not holds(store, name) and store.write(partial(_load, name=name, alone=alone))
    ]


def holds(store: Store, name: str) -> bool:
    """Whether the database has a published sweep as this release has it.

    Raises StoreError when a sweep of one's own has its name, from a time when it could.
    """
    return store.read(_held, name)


def _held(session: Session, name: str) -> bool:
    found = session.execute(
        select(SweepRow.read_only, RevisionRow.grid_file, RevisionRow.options)
        .join(RevisionRow, RevisionRow.sweep_id == SweepRow.id)
        .where(SweepRow.name == name)
        .order_by(RevisionRow.number.desc())
        .limit(1)
    ).one_or_none()
    if found is None:
        return False
    if found.grid_file != GRID_FILE:
        raise StoreError(
            f"a sweep of your own is named {name!r}, as the paper's numbers are: export it, import it with --name into a "
            "new database, and use that"
        )
    return bool(found.read_only and found.options == options_of(name))


def _load(session: Session, name: str, alone: bool) -> bool:
    """Whether there was anything to do: another process may have done it meanwhile."""
    session.execute(select(SweepRow.id).where(SweepRow.name == name).with_for_update())
    if _held(session, name):
        return False
    given = published_sweep(name)
    session.execute(update(SweepRow).where(SweepRow.name == name).values(read_only=False))
    row = sweep_lease.lock_or_create(session, name)
    options = options_of(name)
    text = f"# the numbers printed in {options['source']}{given.version}\n"
    revision = NewRevision(grid_text=text, grid_file=GRID_FILE, options=options, cells=given.cells)
    sweep_lease.write_revision(session, row, revision)
    _fill(session, given, 1 + APART * NAMES.index(name) if alone else None)
    # before every launch, so that the default sweep stays the one that was launched last
    row.launched_at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=SHOWN.index(name))
    row.read_only = True
    return True


def _fill(session: Session, given: Sheet, first: int | None) -> None:
    """One finished training of the paper for each cell, with its numbers, after those of an older release; their ids begin at
    `first`, where that is given."""
    moment = queries.now(session)
    earlier = attempt_queries.attempts_of(session, [cell.id for cell in given.cells])
    # what a loader of an older release, which went step by step, left behind
    dead = update(AttemptRow).where(AttemptRow.id.in_([one.id for one in earlier if one.state == "running"]))
    cause = "loading the published numbers was interrupted"
    session.execute(dead.values(state="interrupted", finished_at=moment, cause=cause, failure=PREEMPTED))
    numbers = {one.cell_id: one.number + 1 for one in earlier}
    attempts = [_attempt(given, cell, numbers.get(cell.id, 1), moment) for cell in given.cells]
    if first is not None:
        attempts = [one | {"id": first + place} for place, one in enumerate(attempts)]
    made = session.scalars(insert(AttemptRow).returning(AttemptRow.id, sort_by_parameter_order=True), attempts)
    ids = dict(zip([cell.id for cell in given.cells], made, strict=True))
    insert_rows(session, ProvenanceRow, [_of(ids[cell.id], _provenance(given, cell)) for cell in given.cells])
    values = [_of(ids[cell], one) | {"created_at": moment} for cell, found in given.values.items() for one in found]
    insert_rows(session, MeasurementRow, values)
    insert_rows(
        session, CurvePointRow, [_of(ids[cell], one) for cell, points in given.curves.items() for one in points]
    )


def insert_rows(session: Session, table: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Insert many rows at once."""
    # by the table, not the model: no object is made for each of thousands of rows
    if rows:
        session.execute(insert(table.__table__), rows)


def _of(attempt: int, record: Any) -> dict[str, Any]:
    return {"attempt_id": attempt} | vars(record)


def _attempt(given: Sheet, cell: CellRecord, number: int, moment: datetime) -> dict[str, Any]:
    curve = given.curves.get(cell.id)
    steps = cell.tokens // cell.config["train"]["batch_tokens"] if cell.tokens else None
    return {
        "cell_id": cell.id, "number": number, "kind": "train", "state": "done", "fence": 0, "owner": OWNER,
        "host": "paper", "pid": 0, "pid_started": 0.0, "started_at": moment, "heartbeat_at": moment,
        "finished_at": moment, "step": steps or 0, "steps_total": steps,
        "tokens_per_s": curve[-1].tokens_per_s if curve else None, "phase": "probing" if steps else "starting",
        "run_dir": f"{cell.id}/{number}",
    }  # fmt: skip


def _provenance(given: Sheet, cell: CellRecord) -> Provenance:
    torch, options = given.torch.get(cell.id), options_of(given.name)
    source = {"source": options["source"], "version": given.version, "edition": options["edition"]}
    return Provenance(
        config=cell.config,
        seed=0,
        packages={"torch": torch} if torch else {},
        host="paper",
        extra={"published": source | {"seed": given.seed}},
        **given.ran.get(cell.id, {}),
    )
