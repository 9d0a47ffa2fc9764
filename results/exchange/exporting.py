"""Export of a sweep into one file: a bundle that another database can import."""

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
from ..store.recorder import finite_or_none
from ..weights import hash_mismatch_text, recorded_hash
from .bundles import LOG, WEIGHTS, BundleSummary, BundleWriter, json_line, json_value, local_path
from .row_validation import BUNDLE_TABLES, TABLES, RowDict, bundle_columns

if TYPE_CHECKING:
    from ..store.store import Store

ATTEMPTS_PER_BATCH = 50
"""Attempts whose numbers are in memory at once, for sorting."""
ROWS_PER_BATCH = 5000
"""Rows of a table that are in memory at once if they need no sorting."""


class _SweepExport:
    """Content of a sweep, read inside one transaction.

    `revisions` maps the id of a revision to its number, in the order of the numbers. `cells` holds the ids of the
    exported cells, `attempts` the rows of their attempts by age, and `bundle_index` maps an attempt's id to its number
    in the bundle.
    """

    def __init__(self, session: Session, name: str | None) -> None:
        """Read the sweep, its revisions, the ids of its cells, and its attempts; number the attempts by age, from 1.

        Args:
            session: open session; later calls read from it.
            name: sweep; None for the one launched last.

        Raises:
            SweepUnknown: there is no such sweep.
        """
        self.session = session
        sweep = queries.sweep_row(session, name)
        self.id, self.name = sweep.id, sweep.name
        query = select(TABLES["revision"].c.id, TABLES["revision"].c.number).where(
            TABLES["revision"].c.sweep_id == sweep.id
        )
        self.revisions = {row.id: row.number for row in session.execute(query.order_by(TABLES["revision"].c.number))}
        member = TABLES["revision_cell"].c
        self.cells = set(session.scalars(select(member.cell_id).where(member.revision_id.in_(self.revisions))))
        self.attempts = self._attempts()
        self.bundle_index = {row["id"]: index for index, row in enumerate(self.attempts, 1)}

    def _attempts(self) -> list[RowDict]:
        """Return all attempts of the cells, by age (id), as rows.

        The cells of parent attempts that the sweep does not list, and all their attempts, are added to the export (and
        to `self.cells`).
        """
        attempts: list[RowDict] = []
        pending_cells = set(self.cells)
        while pending_cells:
            attempts += self._rows_in(TABLES["attempt"], TABLES["attempt"].c.cell_id, pending_cells)
            parents = {row["parent_id"] for row in attempts if row["parent_id"] is not None} - {
                row["id"] for row in attempts
            }
            pending_cells = {
                row["cell_id"] for row in self._rows_in(TABLES["attempt"], TABLES["attempt"].c.id, parents)
            } - self.cells
            self.cells |= pending_cells
        return sorted(attempts, key=lambda row: int(row["id"]))

    def _rows_in(self, table: Table, column: Column[Any], values: Iterable[Any]) -> list[RowDict]:
        return [dict(row._mapping) for row in queries.rows_in(self.session, select(table), column, sorted(values))]

    def _json_values(self, name: str, row: RowDict) -> RowDict:
        return {column.name: json_value(column, row[column.name]) for column in bundle_columns(name)}

    def rows(self, name: str) -> Iterator[RowDict]:
        """Yield the rows of one table in the order of the bundle, with values as for JSON.

        Ids of attempts are replaced by their numbers in the bundle. A row of `revision_cell` has the number of its
        revision under `revision`; one of `event` has under `sweep` True if it is about the sweep itself.

        Args:
            name: "sweep", "revision", "cell", "revision_cell", "attempt", "provenance", "measurement", "example",
                "curve_point" or "event". Order: revisions by number, cells by id, their links by revision and position,
                attempts by age, events by time, and the tables of numbers attempt by attempt.
        """
        if name == "sweep":
            yield from (
                self._json_values(name, row) for row in self._rows_in(TABLES[name], TABLES[name].c.id, [self.id])
            )
        elif name == "revision":
            rows = self._rows_in(TABLES[name], TABLES[name].c.id, self.revisions)
            yield from sorted((self._json_values(name, row) for row in rows), key=lambda row: row["number"])
        elif name == "cell":
            rows = self._rows_in(TABLES[name], TABLES[name].c.id, self.cells)
            yield from sorted((self._json_values(name, row) for row in rows), key=lambda row: row["id"])
        elif name == "revision_cell":
            rows = self._rows_in(TABLES[name], TABLES[name].c.revision_id, self.revisions)
            linked = ({"revision": self.revisions[row["revision_id"]]} | self._json_values(name, row) for row in rows)
            yield from sorted(linked, key=lambda row: (row["revision"], row["position"], row["cell_id"]))
        elif name == "attempt":
            for row in self.attempts:
                parent = self.bundle_index.get(row["parent_id"])
                yield self._json_values(name, row) | {"id": self.bundle_index[row["id"]], "parent_id": parent}
        elif name == "event":
            yield from self._events()
        else:
            attempt_ids = list(self.bundle_index)
            for start in range(0, len(attempt_ids), ATTEMPTS_PER_BATCH):
                attempts = attempt_ids[start : start + ATTEMPTS_PER_BATCH]
                yield from self._attempt_rows(name, attempts)

    def _attempt_rows(self, name: str, attempts: list[int]) -> Iterator[RowDict]:
        """Yield the rows of these attempts in a table, attempt by attempt, within each sorted by all values.

        Args:
            name: table with a column `attempt_id`.
            attempts: ids of attempts, by age; their rows are in memory at once.
        """
        by_attempt: dict[int, list[RowDict]] = {attempt: [] for attempt in attempts}
        for row in self._rows_in(TABLES[name], TABLES[name].c.attempt_id, attempts):
            by_attempt[row["attempt_id"]].append(
                self._json_values(name, row) | {"attempt_id": self.bundle_index[row["attempt_id"]]}
            )
        for rows in by_attempt.values():
            yield from sorted(rows, key=_sort_key)

    def lines(self, name: str) -> Iterator[list[bytes]]:
        """Yield the rows of one table as lists of JSON lines, in the order of `rows`; nothing for an empty table.

        A list has at most 5,000 lines (ROWS_PER_BATCH).
        """
        if name == "curve_point":
            yield from self._curves()
            return
        rows = self.rows(name)
        while lines := [json_line(row) for row in islice(rows, ROWS_PER_BATCH)]:
            yield lines

    def _curves(self) -> Iterator[list[bytes]]:
        """Yield the curve points as lists of JSON lines, attempt by attempt, by step.

        There are millions of them and all columns are numbers, so that a format string writes each line. NULL and
        numbers that are not finite become null.
        """
        table = TABLES["curve_point"]
        names = [column.name for column in bundle_columns("curve_point") if column.name != "attempt_id"]
        query = select(*(table.c[word] for word in names)).order_by(table.c.step)
        rest = ",".join(f'"{word}":%r' for word in names)
        for attempt, index in self.bundle_index.items():
            shape = f'{{"attempt_id":{index},{rest}}}\n'
            result = self.session.execute(query.where(table.c.attempt_id == attempt))
            assert isinstance(result, CursorResult)
            # the driver's own rows, since all columns of this table are numbers
            while points := result.cursor.fetchmany(ROWS_PER_BATCH):
                text = "".join([shape % tuple(point) for point in points]).replace("None", "null")
                if "nan" in text or "inf" in text:  # values that this program never writes
                    shaped = [
                        {"attempt_id": index} | dict(zip(names, map(finite_or_none, p), strict=True)) for p in points
                    ]
                    yield [json_line(row) for row in shaped]
                else:
                    yield text.encode().splitlines(keepends=True)
            result.close()

    def _events(self) -> Iterator[RowDict]:
        """Yield the events of the sweep and of its exported cells, by time.

        References to attempts or cells outside the export become None.
        """
        event = TABLES["event"]
        events = {row["id"]: row for row in self._rows_in(event, event.c.sweep_id, [self.id])}
        events |= {row["id"]: row for row in self._rows_in(event, event.c.cell_id, self.cells)}
        rows = []
        for row in events.values():
            shaped = {"sweep": row["sweep_id"] == self.id} | self._json_values("event", row)
            shaped["attempt_id"] = self.bundle_index.get(row["attempt_id"])
            shaped["cell_id"] = row["cell_id"] if row["cell_id"] in self.cells else None
            rows.append((shaped["at"], row["id"], shaped))
        yield from (shaped for _, _, shaped in sorted(rows, key=lambda item: (item[0], _sort_key(item[2]), item[1])))

    def files(self, runs: Path) -> Iterator[tuple[str, Path, str, str | None]]:
        """Yield (member, file, role, recorded SHA-256) of the attempts' weights and logs; the files may be missing.

        Every attempt has a log; weights that are not on this machine's disk are left out. The hash is None for logs and
        for weights whose hash was not recorded. `runs` is the runs folder.
        """
        with_weights = {row["id"] for row in self.attempts if local_path(row["weights"]) is not None}
        origins = self._rows_in(TABLES["provenance"], TABLES["provenance"].c.attempt_id, with_weights)
        recorded = {row["attempt_id"]: recorded_hash(row["extra"]) for row in origins}
        for row in self.attempts:
            index = self.bundle_index[row["id"]]
            local = local_path(row["weights"])
            if local is not None:
                source = runs / local
                yield f"files/{index}/{WEIGHTS}", source, "weights", recorded.get(row["id"])
            yield f"files/{index}/{LOG}", runs / row["run_dir"] / LOG, "log", None


def _sort_key(row: RowDict) -> list[tuple[bool, Any]]:
    """Return a sort key of all values of a row, independent of the collation of a server; None comes first."""
    values = ([str(value)] if isinstance(value, dict | list) else value for value in row.values())
    return [(value is not None, value) for value in values]


def export_sweep(
    store: Store, sweep: str | None, to: Path, *, weights: bool = False, examples: bool = True, runs: Path | None = None
) -> BundleSummary:
    """Write a sweep (None: the one launched last) with all its revisions, cells, attempts and numbers to a bundle.

    The bundle also has all attempts of its cells that other sweeps started, and the cells of parent attempts. An
    existing file is replaced when the new one is complete. The export reads one consistent state of the database and
    blocks no writer. Attempts that run are exported as they are.

    Args:
        store: database.
        sweep: sweep; None for the one launched last.
        to: file to write.
        weights: include the saved weights and the logs. Missing weights are skipped with a note, missing logs without.
        examples: include results by item, nine tenths of the bytes, which no report reads.
        runs: folder of weights and logs; None for the store's own.

    Returns:
        Row counts, size, and notes for the user; `present` is empty.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: weights have changed since they were written.
        WriteRefused: the file cannot be written.
    """
    runs_folder, notes = runs or store.runs, []
    with atomic_file(to) as stream, store.transaction(write=False) as session:
        queries.snapshot(session)
        export = _SweepExport(session, sweep)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            writer = BundleWriter(archive)
            for name in BUNDLE_TABLES:
                writer.rows(name, export.lines(name) if examples or name != "example" else ())
            n_weights = sum(1 for row in export.attempts if row["weights"])
            files = 0
            for member, source, role, recorded in export.files(runs_folder) if weights else ():
                if source.is_file():
                    file_hash = writer.file(member, source, role)
                    if recorded is not None and file_hash != recorded:
                        raise StoreError(f"{hash_mismatch_text(str(source), file_hash, recorded)}; nothing was written")
                    files += 1
                elif role == "weights":
                    notes.append(f"the weights {source} are missing and were not exported")
            writer.manifest(export.name)
        size = stream.tell()
        if weights:
            n_weights = sum(1 for row in export.attempts if row["weights"] and local_path(row["weights"]) is None)
            notes += (
                [
                    f"the weights of {counted(n_weights, 'attempt')} are stored elsewhere; the bundle has only their "
                    "addresses"
                ]
                if n_weights
                else []
            )
        elif n_weights:
            notes.append(
                f"the weights of {counted(n_weights, 'attempt')} are not in the bundle; --with-weights adds them"
            )
        if not examples:
            notes.append("results by item are not in the bundle (--no-examples)")
        live = sum(1 for row in export.attempts if row["state"] == "running")
        if live:
            notes.append(f"{counted(live, 'attempt')} had not ended; the bundle has their results so far")
    return BundleSummary(
        sweep=export.name, file=str(to), added=writer.counts, files=files, bytes=size, notes=tuple(notes)
    )
