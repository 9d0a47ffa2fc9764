"""Loading of published sweeps into a database, each in one transaction."""

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
IDS_PER_SWEEP = 1000  # distance between the first attempt ids of two sweeps, in a database of published sweeps alone
NAMES = (OPEN_WEIGHT, *SWEEPS, *RIVALS)
"""All published sweeps, in the order of their ids, which never changes: files refer to attempts by them."""
LISTING_ORDER = (*RIVALS, OPEN_WEIGHT, *SWEEPS)
"""All published sweeps from the last to the first in listings."""


def load_published(store: Store, names: Collection[str] = NAMES, *, alone: bool = False) -> list[str]:
    """Add the published sweeps that the database lacks or holds in an older edition.

    It may be called repeatedly, by several processes at once, and after an interruption. Each sweep is one transaction.
    Published sweeps are read-only and never become the default sweep of a database that has another. Numbers of an
    older edition stay with their attempts; reports use the newest.

    Args:
        store: database.
        names: published sweeps to add; unknown names are ignored.
        alone: the database holds only published sweeps, and each sweep's attempts get fixed ids in whatever order they
            are loaded.

    Returns:
        Names of the sweeps that were added or renewed, in the order of NAMES.

    Raises:
        StoreError: a sweep of the user has the name of a published one.
    """
    return [
        name
        for name in NAMES
        if name in names
        and not holds_published(store, name)
        and store.write(partial(_load_if_outdated, name=name, alone=alone))
    ]


def holds_published(store: Store, name: str) -> bool:
    """Return True if the database has a published sweep in the current edition; False for an older edition or none.

    Raises:
        StoreError: a sweep of the user has its name (possible in old databases).
    """
    return store.read(_is_current, name)


def _is_current(session: Session, name: str) -> bool:
    """Return True if the database has the published sweep, read-only and with the options of the current edition.

    Raises:
        StoreError: a sweep of the user has its name.
    """
    row = session.execute(
        select(SweepRow.read_only, RevisionRow.grid_file, RevisionRow.options)
        .join(RevisionRow, RevisionRow.sweep_id == SweepRow.id)
        .where(SweepRow.name == name)
        .order_by(RevisionRow.number.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return False
    if row.grid_file != GRID_FILE:
        raise StoreError(
            f"a sweep of yours is named {name!r}, which is reserved for the paper's numbers; export it, import "
            "it with --name into a new database, and use that database"
        )
    return bool(row.read_only and row.options == options_of(name))


def _load_if_outdated(session: Session, name: str, alone: bool) -> bool:
    """Load a published sweep, and return True; return False if another process has already done so.

    Runs in the caller's transaction. The sweep is dated before every launch and becomes read-only.

    Args:
        session: open session.
        name: published sweep.
        alone: give its attempts fixed ids.
    """
    session.execute(select(SweepRow.id).where(SweepRow.name == name).with_for_update())
    if _is_current(session, name):
        return False
    sheet = published_sweep(name)
    session.execute(update(SweepRow).where(SweepRow.name == name).values(read_only=False))
    row = sweep_lease.lock_or_create(session, name)
    options = options_of(name)
    text = f"# the numbers printed in {options['source']}{sheet.version}\n"
    revision = NewRevision(grid_text=text, grid_file=GRID_FILE, options=options, cells=sheet.cells)
    sweep_lease.write_revision(session, row, revision)
    _insert_sheet(session, sheet, 1 + IDS_PER_SWEEP * NAMES.index(name) if alone else None)
    # dated before every launch, so that the default sweep does not change
    row.launched_at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=LISTING_ORDER.index(name))
    row.read_only = True
    return True


def _insert_sheet(session: Session, sheet: Sheet, first_id: int | None) -> None:
    """Insert one finished training with provenance, measurements and curve for each cell of the sheet.

    Cells must exist. An attempt gets the next number of its cell. Attempts that an older loader left running become
    interrupted. The ids of the attempts start at `first_id` if it is given.
    """
    moment = queries.now(session)
    earlier = attempt_queries.attempts_of(session, [cell.id for cell in sheet.cells])
    # the loader of an older release used several transactions and may have left running attempts
    dead = update(AttemptRow).where(
        AttemptRow.id.in_([attempt.id for attempt in earlier if attempt.state == "running"])
    )
    cause = "loading the published numbers was interrupted"
    session.execute(dead.values(state="interrupted", finished_at=moment, cause=cause, failure=PREEMPTED))
    numbers = {attempt.cell_id: attempt.number + 1 for attempt in earlier}
    attempts = [_attempt(sheet, cell, numbers.get(cell.id, 1), moment) for cell in sheet.cells]
    if first_id is not None:
        attempts = [columns | {"id": first_id + index} for index, columns in enumerate(attempts)]
    attempt_ids = session.scalars(insert(AttemptRow).returning(AttemptRow.id, sort_by_parameter_order=True), attempts)
    ids = dict(zip([cell.id for cell in sheet.cells], attempt_ids, strict=True))
    insert_rows(
        session, ProvenanceRow, [_attempt_columns(ids[cell.id], _provenance(sheet, cell)) for cell in sheet.cells]
    )
    values = [
        _attempt_columns(ids[cell], measurement) | {"created_at": moment}
        for cell, measurements in sheet.values.items()
        for measurement in measurements
    ]
    insert_rows(session, MeasurementRow, values)
    insert_rows(
        session,
        CurvePointRow,
        [_attempt_columns(ids[cell], point) for cell, points in sheet.curves.items() for point in points],
    )


def insert_rows(session: Session, table: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Insert many rows in one statement."""
    # by the table, not the model, which would create an object per row
    if rows:
        session.execute(insert(table.__table__), rows)


def _attempt_columns(attempt: int, record: Any) -> dict[str, Any]:
    return {"attempt_id": attempt} | vars(record)


def _attempt(sheet: Sheet, cell: CellRecord, number: int, moment: datetime) -> dict[str, Any]:
    """Return the columns of a cell's attempt: a finished training by "published" on the host `paper`.

    All its times are `moment`. Steps follow from the cell's tokens; 0 and None for a cell without tokens. The speed is
    that of the curve's last point; the phase is "probing", or "starting" without tokens. The folder is
    `<cell>/<number>`.

    Args:
        sheet: sheet of the sweep, for the curve.
        cell: the cell.
        number: number of the attempt within its cell.
        moment: time of the insertion.
    """
    curve = sheet.curves.get(cell.id)
    steps = cell.tokens // cell.config["train"]["batch_tokens"] if cell.tokens else None
    return {
        "cell_id": cell.id, "number": number, "kind": "train", "state": "done", "fence": 0, "owner": OWNER,
        "host": "paper", "pid": 0, "pid_started": 0.0, "started_at": moment, "heartbeat_at": moment,
        "finished_at": moment, "step": steps or 0, "steps_total": steps,
        "tokens_per_s": curve[-1].tokens_per_s if curve else None, "phase": "probing" if steps else "starting",
        "run_dir": f"{cell.id}/{number}",
    }  # fmt: skip


def _provenance(sheet: Sheet, cell: CellRecord) -> Provenance:
    """Return the provenance of a published cell: config, release of torch, and known facts about machine and data.

    `extra` has under `published` source, version, edition and a text about seeds. The host is `paper`, the seed 0.
    """
    torch, options = sheet.torch.get(cell.id), options_of(sheet.name)
    source = {"source": options["source"], "version": sheet.version, "edition": options["edition"]}
    return Provenance(
        config=cell.config,
        seed=0,
        packages={"torch": torch} if torch else {},
        host="paper",
        extra={"published": source | {"seed": sheet.seed}},
        **sheet.ran.get(cell.id, {}),
    )
