"""A sweep into one file: a bundle that another database takes in."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, CursorResult, Table, select
from sqlalchemy.orm import Session

from ..console.output_files import atomic_file
from ..console.text import counted
from ..errors import StoreError
from ..store import queries
from ..store.recorder import finite
from ..weights import difference, recorded_hash
from .bundles import LOG, WEIGHTS, BundleSummary, BundleWriter, json_line, json_value, local_path
from .row_validation import BUNDLE_TABLES, RowDict, T, bundle_columns

if TYPE_CHECKING:
    from ..store.store import Store

ATTEMPTS = 50
"""Attempts whose numbers are in memory at once, to be sorted."""
LINES = 5000
"""Rows of a member that are in memory at once, where they need no sorting."""


class _SweepExport:
    """What a sweep consists of, read inside one transaction."""

    def __init__(self, session: Session, name: str | None) -> None:
        self.session = session
        sweep = queries.sweep_row(session, name)
        self.id, self.name = sweep.id, sweep.name
        query = select(T["revision"].c.id, T["revision"].c.number).where(T["revision"].c.sweep_id == sweep.id)
        self.revisions = {row.id: row.number for row in session.execute(query.order_by(T["revision"].c.number))}
        member = T["revision_cell"].c
        self.cells = set(session.scalars(select(member.cell_id).where(member.revision_id.in_(self.revisions))))
        self.attempts = self._attempts()
        self.local = {row["id"]: index for index, row in enumerate(self.attempts, 1)}

    def _attempts(self) -> list[RowDict]:
        """All attempts of the cells, by age; a parent that belongs to another cell takes that cell along."""
        found: list[RowDict] = []
        wanted = set(self.cells)
        while wanted:
            found += self._where(T["attempt"], T["attempt"].c.cell_id, wanted)
            parents = {row["parent_id"] for row in found if row["parent_id"] is not None} - {row["id"] for row in found}
            wanted = {row["cell_id"] for row in self._where(T["attempt"], T["attempt"].c.id, parents)} - self.cells
            self.cells |= wanted
        return sorted(found, key=lambda row: int(row["id"]))

    def _where(self, table: Table, column: Column[Any], values: Iterable[Any]) -> list[RowDict]:
        return [dict(row._mapping) for row in queries.rows_in(self.session, select(table), column, sorted(values))]

    def _shaped(self, name: str, row: RowDict) -> RowDict:
        return {column.name: json_value(column, row[column.name]) for column in bundle_columns(name)}

    def rows(self, name: str) -> Iterator[RowDict]:
        """The rows of one member in their order."""
        if name == "sweep":
            yield from (self._shaped(name, row) for row in self._where(T[name], T[name].c.id, [self.id]))
        elif name == "revision":
            found = self._where(T[name], T[name].c.id, self.revisions)
            yield from sorted((self._shaped(name, row) for row in found), key=lambda row: row["number"])
        elif name == "cell":
            found = self._where(T[name], T[name].c.id, self.cells)
            yield from sorted((self._shaped(name, row) for row in found), key=lambda row: row["id"])
        elif name == "revision_cell":
            found = self._where(T[name], T[name].c.revision_id, self.revisions)
            linked = ({"revision": self.revisions[row["revision_id"]]} | self._shaped(name, row) for row in found)
            yield from sorted(linked, key=lambda row: (row["revision"], row["position"], row["cell_id"]))
        elif name == "attempt":
            for row in self.attempts:
                parent = self.local.get(row["parent_id"])
                yield self._shaped(name, row) | {"id": self.local[row["id"]], "parent_id": parent}
        elif name == "event":
            yield from self._events()
        else:
            known = list(self.local)
            for start in range(0, len(known), ATTEMPTS):
                attempts = known[start : start + ATTEMPTS]
                yield from self._numbers(name, attempts)

    def _numbers(self, name: str, attempts: list[int]) -> Iterator[RowDict]:
        """What these attempts have in a table, attempt by attempt."""
        by_attempt: dict[int, list[RowDict]] = {attempt: [] for attempt in attempts}
        for row in self._where(T[name], T[name].c.attempt_id, attempts):
            by_attempt[row["attempt_id"]].append(
                self._shaped(name, row) | {"attempt_id": self.local[row["attempt_id"]]}
            )
        for found in by_attempt.values():
            yield from sorted(found, key=_sort_key)

    def lines(self, name: str) -> Iterator[list[bytes]]:
        """The rows of one member as lines, many at a time."""
        if name == "curve_point":
            yield from self._curves()
            return
        rows = self.rows(name)
        while lines := [json_line(row) for row in islice(rows, LINES)]:
            yield lines

    def _curves(self) -> Iterator[list[bytes]]:
        """Points of curves: numbers alone, and millions of them, so that each line is one formatting of a text."""
        table = T["curve_point"]
        words = [column.name for column in bundle_columns("curve_point") if column.name != "attempt_id"]
        query = select(*(table.c[word] for word in words)).order_by(table.c.step)
        rest = ",".join(f'"{word}":%r' for word in words)
        for attempt, index in self.local.items():
            shape = f'{{"attempt_id":{index},{rest}}}\n'
            found = self.session.execute(query.where(table.c.attempt_id == attempt))
            assert isinstance(found, CursorResult)
            # the driver's own rows, since no column of this table is anything but a number
            while points := found.cursor.fetchmany(LINES):
                text = "".join([shape % tuple(point) for point in points]).replace("None", "null")
                if "nan" in text or "inf" in text:  # which no program of ours writes
                    shaped = [{"attempt_id": index} | dict(zip(words, map(finite, p), strict=True)) for p in points]
                    yield [json_line(row) for row in shaped]
                else:
                    yield text.encode().splitlines(keepends=True)
            found.close()

    def _events(self) -> Iterator[RowDict]:
        event = T["event"]
        found = {row["id"]: row for row in self._where(event, event.c.sweep_id, [self.id])}
        found |= {row["id"]: row for row in self._where(event, event.c.cell_id, self.cells)}
        rows = []
        for row in found.values():
            shaped = {"sweep": row["sweep_id"] == self.id} | self._shaped("event", row)
            shaped["attempt_id"] = self.local.get(row["attempt_id"])
            shaped["cell_id"] = row["cell_id"] if row["cell_id"] in self.cells else None
            rows.append((shaped["at"], row["id"], shaped))
        yield from (shaped for _, _, shaped in sorted(rows, key=lambda item: (item[0], _sort_key(item[2]), item[1])))

    def files(self, runs: Path) -> Iterator[tuple[str, Path, str, str | None]]:
        """(member, file, role, recorded SHA-256) of weights and logs that the attempts name, whether or not they are there."""
        kept = {row["id"] for row in self.attempts if local_path(row["weights"]) is not None}
        origins = self._where(T["provenance"], T["provenance"].c.attempt_id, kept)
        recorded = {row["attempt_id"]: recorded_hash(row["extra"]) for row in origins}
        for row in self.attempts:
            index = self.local[row["id"]]
            local = local_path(row["weights"])
            if local is not None:
                source = runs / local
                yield f"files/{index}/{WEIGHTS}", source, "weights", recorded.get(row["id"])
            yield f"files/{index}/{LOG}", runs / row["run_dir"] / LOG, "log", None


def _sort_key(row: RowDict) -> list[tuple[bool, Any]]:
    """Rows by all their values, in an order that no collation of a server changes; None first."""
    values = ([str(value)] if isinstance(value, dict | list) else value for value in row.values())
    return [(value is not None, value) for value in values]


def export_sweep(
    store: Store, sweep: str | None, to: Path, *, weights: bool = False, examples: bool = True, runs: Path | None = None
) -> BundleSummary:
    """Writes a sweep (None: the one launched last) with all its revisions, cells, attempts and numbers into a bundle.

    `weights` takes the kept weights and the logs along, from the folder `runs` (None: the store's own). Without `examples`,
    what was answered item by item stays here, nine tenths of the bytes, which no report reads. An existing file
    is replaced once the new one is whole. Reads one state of the database, and blocks no writer.

    Raises SweepUnknown, StoreError (also for weights that have changed since they were written), WriteRefused (the file
    cannot be written).
    """
    where, notes = runs or store.runs, []
    with atomic_file(to) as stream, store.transaction(write=False) as session:
        queries.snapshot(session)
        export = _SweepExport(session, sweep)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            writer = BundleWriter(archive)
            for name in BUNDLE_TABLES:
                writer.rows(name, export.lines(name) if examples or name != "example" else ())
            kept = sum(1 for row in export.attempts if row["weights"])
            files = 0
            for member, source, role, recorded in export.files(where) if weights else ():
                if source.is_file():
                    found = writer.file(member, source, role)
                    if recorded is not None and found != recorded:
                        raise StoreError(f"{difference(str(source), found, recorded)}; nothing was written")
                    files += 1
                elif role == "weights":
                    notes.append(f"the weights {source} are missing and were left out")
            writer.manifest(export.name)
        size = stream.tell()
        if weights:
            kept = sum(1 for row in export.attempts if row["weights"] and local_path(row["weights"]) is None)
            notes += [f"the weights of {counted(kept, 'attempt')} lie elsewhere and are only named"] if kept else []
        elif kept:
            notes.append(f"the weights of {counted(kept, 'attempt')} stay here; --with-weights takes them along")
        if not examples:
            notes.append("what was answered item by item stays here (--no-examples)")
        live = sum(1 for row in export.attempts if row["state"] == "running")
        if live:
            notes.append(f"of {counted(live, 'attempt')} that had not ended it holds what there was so far")
    return BundleSummary(
        sweep=export.name, file=str(to), added=writer.counts, files=files, bytes=size, notes=tuple(notes)
    )
