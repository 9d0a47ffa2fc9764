"""Deleting measurements of a cell: one that was a mistake, or a row that says that nothing could be measured.

Nothing is deleted before it was listed, and the list says which sweeps ask for it and will want it measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from ..console.text import counted, did_you_mean
from ..errors import StoreError, SweepReadOnly
from ..metrics import METRICS
from ..names import short
from ..store import queries
from ..store.database import storable
from ..store.records import CellState, Standing, requests_of, standing
from ..store.schema import (
    AttemptRow,
    EventRow,
    ExampleRow,
    MeasurementRow,
    RevisionCellRow,
    RevisionRow,
    SweepRow,
    UtcNow,
)
from ..store.store import Store


@dataclass(frozen=True, kw_only=True)
class Row:
    """What goes of one probe at one length: numbers (in how many attempts) and the single items behind them."""

    probe: str
    length: int
    measurements: int
    attempts: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class Forgetting:
    """What would be deleted of a cell, and `asked_by`: the sweeps that ask for it, with where the cell then stands in them."""

    cell: str
    slug: str
    rows: Sequence[Row]
    asked_by: dict[str, Standing]
    deleted: bool = False

    def lines(self) -> list[str]:
        """For people."""
        if not self.rows:
            return [f"{self.cell} {self.slug}: nothing of that is measured"]
        said = "deleted" if self.deleted else "to delete"
        lines = [f"{self.cell} {self.slug}, {said}:"]
        for row in self.rows:
            at = f" at {row.length}" if row.length else ""
            items = f", {counted(row.examples, 'item')} behind them" if row.examples else ""
            lines.append(
                f"  {row.probe}{at}: {counted(row.measurements, 'number')} of {counted(row.attempts, 'attempt')}{items}"
            )
        for sweep, then in self.asked_by.items():
            how = {
                "needs-eval": "becomes needs-eval, and the next launch measures it again",
                "weights gone": "becomes `weights gone`: it can be measured again only after a launch with --retrain",
            }.get(then, f"is {then}")
            lines.append(f"  sweep {sweep} asks for it: there the cell {how}")
        return lines


def plan(
    store: Store,
    cell: str,
    *,
    probes: Sequence[str] = (),
    lengths: Sequence[int] = (),
    metrics: Sequence[str] = (),
    sweep: str | None = None,
) -> Forgetting:
    """What `forget` would delete: the numbers of finished attempts of the cell, of these probes, lengths and metrics.

    None of one means all of them, but not of all three. Raises CellUnknown, CellAmbiguous, SweepUnknown, StoreError (neither
    probe nor length, or a length that no number can have), SweepReadOnly for a cell of imported or published sweeps alone.
    """
    if not probes and not lengths and not metrics:
        raise StoreError(
            "say which measurements: --probe NAME, --length TOKENS (0 for those without a length), or both"
        )
    if wrong := [length for length in lengths if not 0 <= length < 2**31]:
        raise StoreError(
            f"--length {wrong[0]}: no measurement has such a length; atma-sweep show lists those of a cell"
        )
    return store.read(_plan, store.find_cell(cell, sweep).id, (tuple(probes), tuple(lengths), tuple(metrics)))


def forget(
    store: Store,
    found: Forgetting,
    *,
    probes: Sequence[str] = (),
    lengths: Sequence[int] = (),
    metrics: Sequence[str] = (),
    who: str,
    check: Callable[[Session], None] = lambda session: None,
) -> Forgetting:
    """Deletes what `plan` found, at once, and notes in an event that `who` did; returns what was there to delete.

    The plan is made again in the same transaction: when it is another by now, StoreError is raised and nothing changes.
    `check` is called in that transaction, too, and may refuse by raising.
    """
    among = tuple(probes), tuple(lengths), tuple(metrics)

    def work(session: Session) -> Forgetting:
        check(session)
        now = _plan(session, found.cell, among)
        if now != found:
            raise StoreError(
                f"the measurements of cell {found.cell} changed meanwhile; nothing was deleted, look again"
            )
        attempts = _finished(session, found.cell)
        for table in (ExampleRow, MeasurementRow):
            session.execute(delete(table).where(table.attempt_id.in_(attempts), *_among(table, among)))
        what = ", ".join(f"{row.probe}{f' at {row.length}' if row.length else ''}" for row in now.rows)
        count = sum(row.measurements for row in now.rows)
        message = storable(f"{counted(count, 'number')} deleted by {who}: {what}")
        session.execute(insert(EventRow).values(at=UtcNow(), kind="forgot", message=message, cell_id=found.cell))
        return replace(now, deleted=True)

    return store.write(work)


def _finished(session: Session, cell: str) -> list[int]:
    query = select(AttemptRow.id).where(AttemptRow.cell_id == cell, AttemptRow.state != "running")
    return list(session.scalars(query))


Among = tuple[Sequence[str], Sequence[int], Sequence[str]]
"""Probes, lengths and metrics; of an empty one all."""


def _among(table: Any, among: Among) -> list[Any]:
    probes, lengths, metrics = among
    return [
        *([table.probe.in_(probes)] if probes else []),
        *([table.length.in_(lengths)] if lengths else []),
        *([table.metric.in_(metrics)] if metrics else []),
    ]


def _plan(session: Session, cell: str, among: Among) -> Forgetting:
    attempts = _finished(session, cell)
    key = (MeasurementRow.probe, MeasurementRow.length)
    counted = select(*key, func.count(), func.count(MeasurementRow.attempt_id.distinct())).group_by(*key)
    where = (MeasurementRow.attempt_id.in_(attempts), *_among(MeasurementRow, among))
    items_key = (ExampleRow.probe, ExampleRow.length)
    items = select(*items_key, func.count()).group_by(*items_key)
    items = items.where(ExampleRow.attempt_id.in_(attempts), *_among(ExampleRow, among))
    behind = {(probe, length): count for probe, length, count in session.execute(items)}
    rows = [
        Row(probe=probe, length=length, measurements=count, attempts=of, examples=behind.get((probe, length), 0))
        for probe, length, count, of in session.execute(counted.where(*where).order_by(*key))
    ]
    if not rows:
        _check_names(session, cell, among)
    gone = {(row.probe, row.length) for row in rows}
    slug, asked_by = _asked_by(session, cell, gone, among)
    return Forgetting(cell=cell, slug=slug, rows=rows, asked_by=asked_by)


def _check_names(session: Session, cell: str, among: Among) -> None:
    """Raise StoreError for a probe or metric that neither the cell has numbers of nor this release knows."""
    probes, _, metrics = among
    for option, names, column in (
        ("--probe", probes, MeasurementRow.probe),
        ("--metric", metrics, MeasurementRow.metric),
    ):
        query = select(column).distinct().where(MeasurementRow.attempt_id.in_(_finished(session, cell)))
        own = sorted(session.scalars(query))
        standard = {pair[option == "--metric"] for pair in METRICS}
        for name in names:
            if name not in own and name not in standard:
                listed = f"; it has: {', '.join(own)}" if own else ""
                hint = did_you_mean(name, own or standard)
                raise StoreError(f"{option} {short(name)}: cell {cell} has no such numbers{listed}{hint}")


def _asked_by(session: Session, cell: str, gone: set[tuple[str, int]], among: Among) -> tuple[str, dict[str, Standing]]:
    """The cell's slug, and by sweep whose newest revision asks for any of it: where the cell stands without."""
    newest = select(func.max(RevisionRow.id)).group_by(RevisionRow.sweep_id)
    query = select(SweepRow.name, SweepRow.read_only, RevisionRow.options).join_from(SweepRow, RevisionRow)
    query = query.join(RevisionCellRow, RevisionCellRow.revision_id == RevisionRow.id)
    query = query.where(RevisionRow.id.in_(newest), RevisionCellRow.cell_id == cell).order_by(SweepRow.name)
    holders = list(session.execute(query))
    if holders and all(read_only for _, read_only, _ in holders):
        names = ", ".join(name for name, _, _ in holders)
        raise SweepReadOnly(f"cell {cell} belongs to {names} alone, whose numbers were imported; they stay as they are")
    state = next(iter(queries.states(session, [cell])), None)
    slug = queries.cell(session, cell).slug
    if state is None:
        return slug, {}
    found = {}
    for name, _, options in holders:
        asked = requests_of(options)
        if gone & set(asked):
            found[name] = standing(_without(state, among), asked)
    return slug, found


def _without(state: CellState, among: Among) -> CellState:
    probes, lengths, metrics = among

    def goes(probe: str, metric: str, length: int) -> bool:
        return all(one in said for one, said in ((probe, probes), (length, lengths), (metric, metrics)) if said)

    return replace(state, measured=frozenset(key for key in state.measured if not goes(*key)))
