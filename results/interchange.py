"""A sweep as one file that another database takes in, and tables for other programs.

A bundle is a zip: manifest.json (format, schema, sweep, rows a table, size and SHA-256 of every other member), one
JSON-lines member a table, and, when asked for, the kept weights and logs. The same rows give the same bytes. Inside a
bundle attempts are numbered by cell and age, so nothing in it depends on the ids of the database it came from.

Taking a bundle in adds what is missing and changes no number that is there: cells are the same by id, revisions by what
they ask for, attempts by (cell, started_at, host, pid, kind, finished_at). Reports take the newest attempt by id, and ids
follow the age: where older attempts arrive after younger ones, the ids of both are dealt anew among them, so two databases
that take in each other's bundles show the same results whoever was first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Double,
    Integer,
    String,
    Table,
    delete,
    func,
    insert,
    literal,
    select,
    text,
)
from sqlalchemy import update as sql_update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from . import queries
from .database import file_of, jsonable
from .errors import BundleError, StoreError, StoreTooNew, SweepBusy
from .recorder import finite
from .records import AXES
from .schema import HEAD, REVISIONS, Base, UtcTime

if TYPE_CHECKING:
    from .store import Store

FORMAT = 1
WHAT = "atma-sweep bundle"
MANIFEST = "manifest.json"
LOG = "log.txt"
STAGING = ".import-"
"""How folders begin that an import fills before it commits; one that is left over may be deleted."""
COPY = "still running when it was exported"
"""How the cause of an attempt begins that was taken in unfinished; its finished self replaces it."""

Row = dict[str, Any]
Identify = Callable[[Mapping[str, Any]], str]
What = Literal["cells", "measurements", "curves", "examples", "attempts"]
Format = Literal["csv", "jsonl", "parquet"]

T = Base.metadata.tables
SWEEP_COLUMNS = ("name", "created_at", "launched_at", "read_only")
"""The rest says who runs it, which is nobody's business elsewhere."""
OF_ATTEMPTS = ("provenance", "measurement", "example", "curve_point")
DROPPED = {
    "revision": ("id", "sweep_id"),
    "revision_cell": ("revision_id",),
    "measurement": ("id",),
    "event": ("id", "sweep_id"),
}
MEMBERS = ("sweep", "revision", "cell", "revision_cell", "attempt", *OF_ATTEMPTS, "event")

BATCH = 2000
MANIFEST_BYTES = 64 * 2**20
LINE_BYTES = 64 * 2**20
_CHUNK = 2**20
_FILE = re.compile(r"files/([1-9][0-9]{0,8})/([A-Za-z0-9_][A-Za-z0-9_.-]{0,99})")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What an export wrote or an import found. `added` and `present` count rows by table, `bytes` is the file's size.

    `notes` are sentences for people: what was left out, and what is not as they might think.
    """

    sweep: str
    file: str
    added: Mapping[str, int]
    present: Mapping[str, int] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = ()


# --- rows -----------------------------------------------------------------------------------------------------------


def _columns(name: str) -> list[Column[Any]]:
    if name == "sweep":
        return [T[name].c[column] for column in SWEEP_COLUMNS]
    return [column for column in T[name].columns if column.name not in DROPPED.get(name, ())]


def _iso(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _encoded(column: Column[Any], value: Any) -> Any:
    if value is None or isinstance(value, datetime):
        return None if value is None else _iso(value)
    if isinstance(column.type, Double):
        return finite(value)
    return jsonable(value) if isinstance(column.type, JSON) else value


def _line(row: Row) -> bytes:
    # escaped, since there are letters that some programs take for the end of a line
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _sort_key(row: Row) -> list[tuple[bool, Any]]:
    """Rows by all their values, in an order that no collation of a server changes; None first."""
    values = ([str(value)] if isinstance(value, dict | list) else value for value in row.values())
    return [(value is not None, value) for value in values]


def _text_ok(value: Any, longest: int | None) -> bool:
    if not isinstance(value, str) or (longest is not None and len(value) > longest):
        return False
    # a lone surrogate is no text for any database
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _decoded(column: Column[Any], value: Any) -> Any:
    """The value as the column takes it. Raises ValueError when it is none."""
    kind = column.type
    good = False
    if value is None:
        good = bool(column.nullable)
    elif isinstance(kind, Boolean):
        good = isinstance(value, bool)
    elif isinstance(kind, UtcTime):
        if isinstance(value, str) and _TIME.fullmatch(value):
            return datetime.fromisoformat(value)
    elif isinstance(kind, JSON):
        good = isinstance(value, dict) and _text_ok(json.dumps(value, ensure_ascii=False), None)
    elif isinstance(kind, Integer):
        good = type(value) is int and -(2**63) <= value < 2**63
    elif isinstance(kind, Double):
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif isinstance(kind, String):
        good = _text_ok(value, kind.length)
    if not good:
        raise ValueError(f"{column.name} is {str(value)[:40]!r}")
    return value


def _has_default(column: Column[Any]) -> bool:
    return bool(column.nullable) or column.server_default is not None


# --- export ---------------------------------------------------------------------------------------------------------


class _Writer:
    """A bundle as it is written: members in turn, the manifest last, since it holds their hashes."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.archive = archive
        self.members: dict[str, Row] = {}
        self.counts: dict[str, int] = {}

    @contextlib.contextmanager
    def _member(self, name: str, method: int) -> Iterator[Callable[[bytes], None]]:
        info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # not the time: the same rows give the same bytes
        info.compress_type, info.create_system, info.external_attr = method, 3, 0o644 << 16
        digest, size = hashlib.sha256(), 0
        with self.archive.open(info, "w", force_zip64=True) as stream:

            def add(data: bytes) -> None:
                nonlocal size
                digest.update(data)
                size += len(data)
                stream.write(data)

            yield add
        self.members[name] = {"sha256": digest.hexdigest(), "bytes": size}

    def rows(self, table: str, rows: Iterable[Row]) -> None:
        self.counts[table] = 0
        with self._member(f"{table}.jsonl", zipfile.ZIP_DEFLATED) as add:
            for row in rows:
                add(_line(row))
                self.counts[table] += 1

    def file(self, name: str, source: Path, role: str) -> None:
        with source.open("rb") as stream, self._member(name, zipfile.ZIP_STORED) as add:
            left = os.fstat(stream.fileno()).st_size  # a log may grow meanwhile
            while left > 0 and (data := stream.read(min(left, _CHUNK))):
                add(data)
                left -= len(data)
        self.members[name]["role"] = role

    def manifest(self, sweep: str) -> None:
        facts = {"what": WHAT, "format": FORMAT, "schema": HEAD, "sweep": sweep, "counts": self.counts}
        members = dict(self.members)
        with self._member(MANIFEST, zipfile.ZIP_DEFLATED) as add:
            add(json.dumps({**facts, "members": members}, ensure_ascii=False, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _replacing(to: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is whole. Raises StoreError when it cannot be written."""
    if to.is_dir():
        raise StoreError(f"{to} is a folder; name a file with --out")
    if not to.parent.is_dir():
        raise StoreError(f"there is no folder {to.parent}; make it, or name another place with --out")
    aside = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, to)
        _sync(to.parent)
    except OSError as error:
        raise StoreError(f"cannot write {to}: {error.strerror or error}; make room or name another place") from error
    finally:
        aside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Export:
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

    def _attempts(self) -> list[Row]:
        """All attempts of the cells; a parent that belongs to another cell takes that cell along."""
        found: list[Row] = []
        wanted = set(self.cells)
        while wanted:
            found += self._where(T["attempt"], T["attempt"].c.cell_id, wanted)
            parents = {row["parent_id"] for row in found if row["parent_id"] is not None} - {row["id"] for row in found}
            wanted = {row["cell_id"] for row in self._where(T["attempt"], T["attempt"].c.id, parents)} - self.cells
            self.cells |= wanted
        return sorted(found, key=lambda row: (row["cell_id"], row["id"]))

    def _where(self, table: Table, column: Column[Any], values: Iterable[Any]) -> list[Row]:
        given, found = sorted(values), []
        for start in range(0, len(given), 500):
            query = select(table).where(column.in_(given[start : start + 500]))
            found += [dict(row._mapping) for row in self.session.execute(query)]
        return found

    def _shaped(self, name: str, row: Row) -> Row:
        return {column.name: _encoded(column, row[column.name]) for column in _columns(name)}

    def rows(self, name: str) -> Iterator[Row]:
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
            for attempt, index in self.local.items():
                query = select(T[name]).where(T[name].c.attempt_id == attempt)
                found = [self._shaped(name, dict(row._mapping)) for row in self.session.execute(query)]
                yield from sorted((row | {"attempt_id": index} for row in found), key=_sort_key)

    def _events(self) -> Iterator[Row]:
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

    def files(self, runs: Path) -> Iterator[tuple[str, Path, str]]:
        """(member, file, role) of weights and logs that the attempts name, whether or not they are there."""
        for row in self.attempts:
            index = self.local[row["id"]]
            local = _local(row["weights"])
            if local is not None:
                source = runs / local
                yield f"files/{index}/{_safe(source.name)}", source, "weights"
            yield f"files/{index}/{LOG}", runs / row["run_dir"] / LOG, "log"


def _local(address: str | None) -> str | None:
    """The path in an address of weights, None when it lies on no disk of this machine."""
    scheme, separator, rest = (address or "").rpartition("://")
    return rest or None if not separator or scheme in ("file", "local") else None


def _safe(name: str) -> str:
    clean = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:90]
    return clean if _PART.fullmatch(clean) and clean != LOG else f"w{clean}"


def export_sweep(
    store: Store, sweep: str | None, to: Path, *, weights: bool = False, runs: Path | None = None
) -> Summary:
    """Writes a sweep (None: the one launched last) with all its revisions, cells, attempts and numbers into a bundle.

    `weights` takes the kept weights and the logs along, from the folder `runs` (None: the store's own). An existing file
    is replaced once the new one is whole. Reads one state of the database, and blocks no writer.

    Raises SweepUnknown, StoreError (the file cannot be written).
    """
    where, notes = runs or store.runs, []
    with _replacing(to) as stream, _snapshot(store) as session:
        export = _Export(session, sweep)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            writer = _Writer(archive)
            for name in MEMBERS:
                writer.rows(name, export.rows(name))
            kept = sum(1 for row in export.attempts if row["weights"])
            files = 0
            for member, source, role in export.files(where) if weights else ():
                if source.is_file():
                    writer.file(member, source, role)
                    files += 1
                elif role == "weights":
                    notes.append(f"the weights {source} are missing and were left out")
            writer.manifest(export.name)
        if weights:
            kept = sum(1 for row in export.attempts if row["weights"] and _local(row["weights"]) is None)
            notes += [f"the weights of {kept} attempts lie elsewhere and are only named"] if kept else []
        elif kept:
            notes.append(f"the weights of {kept} attempts stay here; --with-weights takes them along")
        live = sum(1 for row in export.attempts if row["state"] == "running")
        if live:
            notes.append(f"{live} attempts still run and are in it as far as they are")
    return Summary(
        sweep=export.name,
        file=str(to),
        added=writer.counts,
        files=files,
        bytes=to.stat().st_size,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _snapshot(store: Store) -> Iterator[Session]:
    """A reading transaction in which every query sees the same state of the database."""
    with store.transaction(write=False) as session:
        if store.path is None:
            session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        yield session


# --- bundles as they are read ---------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _parsed(data: bytes) -> Row:
    """A JSON object. Raises ValueError, also for what only Python's parser would take."""
    try:
        found = json.loads(data, object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


class _Bundle:
    """An open bundle. Nothing in it is trusted: sizes, names, hashes, types and references are checked before use."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive
        infos = archive.infolist()
        self.infos = {info.filename: info for info in infos}
        if len(self.infos) != len(infos):
            raise self.wrong("a member is there twice")
        for info in infos:
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 0x41:
                raise self.wrong(f"the member {info.filename[:80]!r} is packed in a way that no bundle is")
        if MANIFEST not in self.infos or self.infos[MANIFEST].file_size > MANIFEST_BYTES:
            raise self.wrong(f"it has no {MANIFEST}")
        try:
            with archive.open(MANIFEST) as stream:
                self.manifest = _parsed(stream.read(MANIFEST_BYTES))
        except (ValueError, zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError) as error:
            raise self.wrong(f"{MANIFEST}: {error}") from error
        self._check_manifest()
        self.sweep = str(self.manifest["sweep"])
        self.complete = self.manifest["schema"] == HEAD
        """Whether rows must have every column of this release; those of an older one lack the newer columns."""

    def wrong(self, why: str) -> BundleError:
        return BundleError(f"{self.path} cannot be taken in: {why}; nothing was changed. Export the sweep again")

    def _check_manifest(self) -> None:
        found = self.manifest
        if found.get("what") != WHAT:
            raise self.wrong(f"it is no bundle of atma-sweep (its manifest says {str(found.get('what'))[:40]!r})")
        form, schema = found.get("format"), found.get("schema")
        if type(form) is not int or not isinstance(schema, str):
            raise self.wrong("the manifest names no format and schema")
        if form > FORMAT or schema not in REVISIONS:
            raise StoreTooNew(
                f"{self.path} was written by a newer atma-sweep (bundle format {form}, schema {schema[:20]}; this one "
                f"reads up to {FORMAT} and {HEAD}); upgrade the program, then import again"
            )
        if form != FORMAT or not _name_ok(found.get("sweep")):
            raise self.wrong("the manifest names no format or sweep that can be")
        members, counts = found.get("members"), found.get("counts")
        if not isinstance(members, dict) or not isinstance(counts, dict) or sorted(counts) != sorted(MEMBERS):
            raise self.wrong("the manifest does not list the members")
        if set(members) | {MANIFEST} != set(self.infos) or not {f"{name}.jsonl" for name in MEMBERS} <= set(members):
            raise self.wrong("its members are not those that the manifest lists")
        for name, facts in members.items():
            self._check_member(name, facts)
        taken = Counter(name.lower() for name in members)
        if max(taken.values()) > 1 or not all(type(count) is int and count >= 0 for count in counts.values()):
            raise self.wrong("the manifest contradicts itself")

    def _check_member(self, name: str, facts: Any) -> None:
        file = _FILE.fullmatch(name)
        if file is None and name not in {f"{table}.jsonl" for table in MEMBERS}:
            raise self.wrong(f"the member {name[:80]!r} has a name that no bundle has")
        expected = {"sha256", "bytes"} | ({"role"} if file else set())
        if not isinstance(facts, dict) or set(facts) != expected or type(facts["bytes"]) is not int:
            raise self.wrong(f"the manifest says too little of {name}")
        if facts["bytes"] != self.infos[name].file_size:
            raise self.wrong(f"{name} has not the size that the manifest says")
        if file and (facts["role"] not in ("weights", "log") or (facts["role"] == "log") != (file[2] == LOG)):
            raise self.wrong(f"{name} is neither weights nor a log")

    @property
    def files(self) -> dict[str, tuple[int, str, str]]:
        """Weights and logs: member -> (attempt, file name, role)."""
        found = {}
        for name, facts in self.manifest["members"].items():
            match = _FILE.fullmatch(name)
            if match:
                found[name] = (int(match[1]), match[2], str(facts["role"]))
        return found

    def size(self, *, files: bool) -> int:
        """Unpacked bytes of the files, or of everything else."""
        members = self.manifest["members"].items()
        return sum(facts["bytes"] for name, facts in members if (_FILE.fullmatch(name) is not None) == files)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[Callable[[int], bytes]]:
        """Reads of a member that end in an error unless its bytes are those of the manifest."""
        digest, facts = hashlib.sha256(), self.manifest["members"][name]
        size = 0

        def seen(data: bytes) -> bytes:
            nonlocal size
            digest.update(data)
            size += len(data)
            if size > facts["bytes"]:
                raise self.wrong(f"{name} is larger than the manifest says")
            return data

        try:
            with self.archive.open(name) as stream:
                yield lambda limit: seen(stream.readline(limit) if name.endswith(".jsonl") else stream.read(limit))
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError) as error:
            raise self.wrong(f"{name} is damaged ({error})") from error
        if digest.hexdigest() != facts["sha256"] or size != facts["bytes"]:
            raise self.wrong(f"{name} has not the hash that the manifest says")

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file. The hash is checked at the end, so nothing counts until the last one came."""
        with self._reading(name) as read:
            while data := read(_CHUNK):
                yield data

    def rows(self, table: str) -> Iterator[Row]:
        """The rows of a table as the database takes them; times are datetimes."""
        columns = {column.name: column for column in _columns(table)}
        extra = {"event": {"sweep"}, "revision_cell": {"revision"}}.get(table, set())
        names = columns.keys() | extra
        optional = set() if self.complete else {name for name, column in columns.items() if _has_default(column)}
        count = 0
        with self._reading(f"{table}.jsonl") as read:
            while data := read(LINE_BYTES):
                count += 1
                try:
                    if not data.endswith(b"\n"):
                        raise ValueError("the line is too long, or cut off")
                    row = _parsed(data)
                    if not names - optional <= row.keys() <= names:
                        raise ValueError(f"the columns are {sorted(row)}")
                    for name, column in columns.items():
                        if name in row:
                            row[name] = _decoded(column, row[name])
                except ValueError as error:
                    raise self.wrong(f"{table}.jsonl, line {count}: {error}") from error
                yield row
        if count != self.manifest["counts"][table]:
            raise self.wrong(f"{table}.jsonl has {count} rows, the manifest says {self.manifest['counts'][table]}")


def _name_ok(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and _text_ok(name, None)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[_Bundle]:
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            yield _Bundle(file, archive)
    except FileNotFoundError as error:
        raise BundleError(f"there is no file {file}; name a bundle that atma-sweep export wrote") from error
    except (zipfile.BadZipFile, IsADirectoryError, PermissionError) as error:
        raise BundleError(f"{file} cannot be read as a bundle: {error}; export the sweep again") from error


class _Content:
    """The rows of a bundle that fit into memory, checked against each other. Numbers are streamed instead."""

    def __init__(self, bundle: _Bundle, identify: Identify | None) -> None:
        wrong = bundle.wrong
        sweeps = list(bundle.rows("sweep"))
        if [row["name"] for row in sweeps] != [bundle.sweep]:
            raise wrong("it does not hold exactly the sweep that the manifest names")
        self.sweep = sweeps[0]
        self.cells = {row["id"]: row for row in bundle.rows("cell")}
        self.revisions = {row["number"]: row for row in bundle.rows("revision")}
        if len(self.cells) != bundle.manifest["counts"]["cell"] or not all(map(_PART.fullmatch, self.cells)):
            raise wrong("its cells have ids that cannot be")
        if len(self.revisions) != bundle.manifest["counts"]["revision"] or not self.revisions:
            raise wrong("its revisions are not numbered one by one")
        if min(self.revisions) < 1:
            raise wrong("its revisions are not numbered from 1")
        self.members: dict[int, list[Row]] = {number: [] for number in self.revisions}
        for row in bundle.rows("revision_cell"):
            if row["revision"] not in self.members or row["cell_id"] not in self.cells:
                raise wrong("a revision lists what is not there")
            self.members[row["revision"]].append(row)
        if any(len({row["cell_id"] for row in rows}) != len(rows) for rows in self.members.values()):
            raise wrong("a revision lists a cell twice")
        self.attempts = {row["id"]: row for row in bundle.rows("attempt")}
        if sorted(self.attempts) != list(range(1, bundle.manifest["counts"]["attempt"] + 1)):
            raise wrong("its attempts are not numbered one by one")
        for row in self.attempts.values():
            self._check_attempt(row, wrong)
        for table in OF_ATTEMPTS:
            if not all(row["attempt_id"] in self.attempts for row in bundle.rows(table)):
                raise wrong(f"{table}.jsonl speaks of attempts that are not there")
        attempts, cells = {None, *self.attempts}, {None, *self.cells}
        for row in bundle.rows("event"):
            if row["attempt_id"] not in attempts or row["cell_id"] not in cells or type(row["sweep"]) is not bool:
                raise wrong("event.jsonl speaks of what is not there")
        for number, name, _ in bundle.files.values():
            if number not in self.attempts:
                raise wrong(f"the file {name} belongs to no attempt")
        for member in bundle.files:
            for _ in bundle.chunks(member):
                pass
        # published numbers have ids of their own, since nobody knows their whole config
        if identify is not None and not self.sweep["read_only"]:
            self._identify(identify, wrong)

    def _check_attempt(self, row: Row, wrong: Callable[[str], BundleError]) -> None:
        parent = row["parent_id"]
        if row["cell_id"] not in self.cells or (parent is not None and parent not in self.attempts):
            raise wrong("an attempt belongs to what is not there")
        parts = row["run_dir"].split("/")
        if parts[0] != row["cell_id"] or len(parts) > 4 or not all(map(_PART.fullmatch, parts)) or row["number"] < 1:
            raise wrong(f"an attempt has the folder {row['run_dir'][:80]!r}")
        if (row["state"] == "running") != (row["finished_at"] is None):
            raise wrong("an attempt is both running and finished")

    def _identify(self, identify: Identify, wrong: Callable[[str], BundleError]) -> None:
        for cell, row in self.cells.items():
            try:
                found = identify(row["config"])
            except Exception as error:
                raise wrong(f"the config of cell {cell} cannot be read ({error})") from error
            if found != cell:
                raise wrong(f"the config of cell {cell} is that of {found}")


# --- import: the plan -----------------------------------------------------------------------------------------------


def _identity(row: Row) -> tuple[Any, ...]:
    return (row["cell_id"], row["started_at"], row["host"], row["pid"], row["kind"], row["finished_at"])


def _unfinished(row: Row) -> bool:
    """Whether it is known only as far as it was when somebody exported it."""
    copied = row["state"] == "interrupted" and (row["cause"] or "").startswith(COPY)
    return copied or row["state"] == "running"


def _interleaved(
    here: Sequence[Row], there: Sequence[Row], same: Mapping[int, int], age: Callable[[Row], Any]
) -> list[Row]:
    """Both by age, each in its own order, whatever its clock did: what both have (`same`, by id) divides them alike."""
    places = {row["id"]: place for place, row in enumerate(here)}
    found: list[Row] = []
    done, waiting = 0, []
    for row in there:
        place = places.get(same.get(row["id"], 0))
        if place is None:
            waiting.append(row)
        elif place >= done:
            found += [*_by_age(here[done:place], waiting, age), here[place]]
            done, waiting = place + 1, []
    return found + _by_age(here[done:], waiting, age)


def _by_age(here: Sequence[Row], there: Sequence[Row], age: Callable[[Row], Any]) -> list[Row]:
    ours, theirs, found = list(here), list(there), []
    while ours or theirs:
        take = theirs if not ours or (theirs and age(theirs[0]) < age(ours[0])) else ours
        found.append(take.pop(0))
    return found


@dataclass
class _Plan:
    """What an import does to the attempts and revisions of the database."""

    new: list[Row] = field(default_factory=list)
    """Attempts of the bundle to insert, with `place`, `number` and `run_dir` as they will be here."""
    replaced: dict[int, int] = field(default_factory=dict)
    """Attempt of the bundle -> attempt here that was an unfinished copy of it (its id before anything moves)."""
    folders: dict[int, str] = field(default_factory=dict)
    """Attempt of the bundle that replaces one -> its folder here, should files come with it."""
    present: dict[int, int] = field(default_factory=dict)
    """Attempt of the bundle -> the same one here (its id before anything moves)."""
    moved: dict[int, int] = field(default_factory=dict)
    """Attempt here -> its new id."""
    revisions: list[tuple[int, int, Row]] = field(default_factory=list)
    """Revisions to insert: (id, number, row)."""
    renumbered: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Revision here -> its new (id, number)."""
    weights: dict[int, Row] = field(default_factory=dict)
    """Attempt of the bundle -> the same one here, whose weights are missing and come with the bundle."""

    def ids(self) -> dict[int, int]:
        """Attempt of the bundle -> its id here, once everything has moved."""
        known = self.present | self.replaced
        placed = {index: self.moved.get(id_, id_) for index, id_ in known.items()}
        return placed | {row["id"]: row["place"] for row in self.new}


class _Planner:
    """Compares a bundle with the database. Reads only."""

    def __init__(self, session: Session, store: Store, content: _Content, name: str, runs: Path) -> None:
        self.session, self.store, self.content, self.name, self.runs = session, store, content, name, runs
        self.plan = _Plan()
        self.folders: set[str] = set()

    def _fresh(self, table: str, count: int) -> list[int]:
        """Ids for that many new rows, higher than all."""
        if count and self.store.path is None:
            query = text(f"SELECT nextval(pg_get_serial_sequence('{table}', 'id')) FROM generate_series(1, {count})")
            return sorted(self.session.scalars(query))
        top = self.session.scalar(select(func.max(T[table].c.id))) or 0
        return list(range(top + 1, top + 1 + count))

    def make(self) -> _Plan:
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
        cells = sorted(incoming)
        for start in range(0, len(cells), 500):
            query = select(attempt).where(attempt.c.cell_id.in_(cells[start : start + 500])).order_by(attempt.c.id)
            for found in self.session.execute(query):
                here[found.cell_id].append(dict(found._mapping))
                self.folders.add(found.run_dir)
        added = {cell: self._match(here[cell], rows) for cell, rows in incoming.items()}
        fresh = iter(self._fresh("attempt", sum(map(len, added.values()))))
        for cell, new in added.items():
            if new:
                self._merge(cell, here[cell], incoming[cell], new, [next(fresh) for _ in new])

    def _match(self, here: list[Row], rows: list[Row]) -> list[Row]:
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
                if same["state"] == "done":
                    self.plan.weights[row["id"]] = same
            elif near is not None and near["state"] != "running" and _unfinished(near):
                self._replace(row, near)
            else:
                new.append(row)
        return new

    def _replace(self, row: Row, here: Row) -> None:
        """Ours is an unfinished copy of the bundle's. What its folder holds already stays where it is."""
        self.plan.replaced[row["id"]] = here["id"]
        free = not os.path.lexists(self.runs / here["run_dir"])
        self.plan.folders[row["id"]] = here["run_dir"] if free else self._folder(here["run_dir"])

    def _copied(self, here: Row, row: Row) -> bool:
        """Whether ours is an older copy of the same unfinished attempt."""
        copy = here["state"] != "running" and _unfinished(here)
        return copy and bool(row["heartbeat_at"] > here["heartbeat_at"])

    def _merge(self, cell: str, here: list[Row], rows: list[Row], new: list[Row], fresh: list[int]) -> None:
        live = [row for row in here if row["state"] == "running"]
        if live:
            raise SweepBusy(
                f"cell {cell} is being run here (attempt {live[0]['number']}, pid {live[0]['pid']} on "
                f"{live[0]['host']}) and the bundle has other attempts of it; import again when that has ended"
            )

        def age(row: Row) -> tuple[Any, ...]:
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
        while found in self.folders or os.path.lexists(self.runs / found):
            found, attempt = f"{wanted}-{attempt}", attempt + 1
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
        here: list[Row] = []
        if sweep is not None:
            revision = T["revision"]
            query = select(revision).where(revision.c.sweep_id == sweep.id).order_by(revision.c.number)
            here = [dict(row._mapping) for row in self.session.execute(query)]
            for row in here:
                row["asked"] = _asked(row, queries.members(self.session, row["id"]))
        rows = [self.content.revisions[number] for number in sorted(self.content.revisions)]
        for row in rows:
            listed = sorted(self.content.members[row["number"]], key=lambda link: int(link["position"]))
            row["asked"] = _asked(row, [(link["cell_id"], link["axes"]) for link in listed])
        known = {(row["asked"], row["created_at"]): row["id"] for row in here}
        for row in rows:
            row["id"] = row["number"]
        same = {row["id"]: known[key] for row in rows if (key := (row["asked"], row["created_at"])) in known}
        arriving = {id(row) for row in rows if row["id"] not in same}
        merged = _interleaved(here, rows, same, lambda row: (row["created_at"], row["asked"]))
        kept: list[Row] = []
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


def _asked(row: Row, members: Iterable[tuple[str, Any]]) -> str:
    """What a revision asks for, as one hash."""
    asked = [row["grid_text"], row["options"], [[cell, sorted(axes.items())] for cell, axes in members]]
    return hashlib.sha256(json.dumps(jsonable(asked), sort_keys=True).encode()).hexdigest()


# --- import: the files ----------------------------------------------------------------------------------------------


class _Files:
    """Weights and logs on their way from a bundle into the runs folder, and back if the import fails."""

    def __init__(self, bundle: _Bundle, runs: Path) -> None:
        self.bundle, self.runs = bundle, runs
        self._staging: Path | None = None
        self._staged: set[str] = set()
        self._undo: list[Callable[[], object]] = []
        self.placed = 0

    def stage(self, indices: Iterable[int]) -> None:
        """Unpacks the files of those attempts beside the others, synced, not yet in their place."""
        wanted = set(indices)
        for member, (index, name, _) in sorted(self.bundle.files.items()):
            if index not in wanted or member in self._staged:
                continue
            if self._staging is None:
                self.runs.mkdir(parents=True, exist_ok=True)
                self._staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.runs))
            target = self._staging / str(index) / name
            target.parent.mkdir(exist_ok=True)
            with target.open("xb") as stream:
                for data in self.bundle.chunks(member):
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            _sync(target.parent)
            self._staged.add(member)

    def names(self, index: int, role: str | None = None) -> list[str]:
        """The file names that the bundle has for an attempt."""
        return [name for at, name, what in self.bundle.files.values() if at == index and role in (None, what)]

    def place(self, index: int, folder: str) -> None:
        """Moves all files of a new attempt into its folder, which must not exist."""
        if self.names(index):
            target = self.runs / folder
            made = [path for path in reversed(target.parents) if not path.exists()]
            self._undo += [path.rmdir for path in made]
            target.parent.mkdir(parents=True, exist_ok=True)
            source = self._of(index)
            # first noted, so that an interrupt between the two loses nothing; undoing what was not done is harmless
            self._undo.append(lambda: os.rename(target, source))
            os.rename(source, target)
            self.placed += len(self.names(index))
            _sync(target.parent)

    def adopt(self, index: int, folder: str, name: str) -> bool:
        """Moves the weights of a known attempt into its folder. False when another file of that name is there."""
        target, source = self.runs / folder / name, self._of(index) / name
        if target.exists():
            return _hash(target) == self.bundle.manifest["members"][f"files/{index}/{name}"]["sha256"]
        target.parent.mkdir(parents=True, exist_ok=True)
        self._undo.append(lambda: os.rename(target, source))
        os.rename(source, target)
        self.placed += 1
        _sync(target.parent)
        return True

    def _of(self, index: int) -> Path:
        assert self._staging is not None
        return self._staging / str(index)

    def undo(self) -> None:
        """Takes back everything that was moved."""
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()
        self.placed = 0

    def clear(self) -> None:
        """Removes what was unpacked and not moved."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- import: the writing --------------------------------------------------------------------------------------------


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


class _Import:
    """The writing half of an import, inside one transaction."""

    def __init__(self, session: Session, bundle: _Bundle, content: _Content, plan: _Plan, files: _Files) -> None:
        self.session, self.bundle, self.content, self.plan, self.files = session, bundle, content, plan, files
        self.added: Counter[str] = Counter(dict.fromkeys(MEMBERS, 0))
        self.present: Counter[str] = Counter(dict.fromkeys(MEMBERS, 0))
        self.notes: list[str] = []

    def write(self, name: str) -> None:
        """Everything, the files last: they can be taken back, and so can the transaction."""
        sweep = self._sweep(name)
        self._cells()
        self._revisions(sweep)
        self._attempts()
        for table in OF_ATTEMPTS:
            self._numbers(table)
        self._events(sweep)
        self._weights()
        for row in self.plan.new:
            self.files.place(row["id"], row["run_dir"])
        for index, folder in self.plan.folders.items():
            self.files.place(index, folder)

    def _sweep(self, name: str) -> int:
        table, given = T["sweep"], self.content.sweep
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
        known: dict[str, Any] = {}
        names = sorted(cells)
        for start in range(0, len(names), 500):
            query = select(table.c.id, table.c.config).where(table.c.id.in_(names[start : start + 500]))
            known |= {row.id: row.config for row in self.session.execute(query)}
        self._insert("cell", [row for cell, row in cells.items() if cell not in known])
        self.present["cell"] += len(known)
        other = sum(1 for cell, config in known.items() if config != cells[cell]["config"])
        if other:
            self.notes.append(f"{other} cells are evaluated or kept otherwise in the bundle; what is here stays")

    def _revisions(self, sweep: int) -> None:
        _move(self.session, T["revision"], self.plan.renumbered)
        columns = {column.name for column in _columns("revision")}
        for place, number, row in self.plan.revisions:
            values = {name: value for name, value in row.items() if name in columns}
            self._insert("revision", [values | {"id": place, "sweep_id": sweep, "number": number}])
            links = [
                {name: value for name, value in link.items() if name != "revision"} | {"revision_id": place}
                for link in self.content.members[row["number"]]
            ]
            self._insert("revision_cell", links)
        for table in ("revision", "revision_cell"):
            self.present[table] = self.bundle.manifest["counts"][table] - self.added[table]

    def _attempts(self) -> None:
        table = T["attempt"]
        numbers = {row.id: row.number for row in self.session.execute(select(table.c.id, table.c.number))}
        moves = {old: (new, numbers[old]) for old, new in self.plan.moved.items()}
        _move(self.session, table, moves)
        ids = self.plan.ids()
        self.unnamed = 0
        for row in sorted(self.plan.new, key=lambda row: int(row["id"])):
            values = self._attempt(row) | {"id": row["place"], "parent_id": None}
            self._insert("attempt", [values])
        for index in self.plan.replaced:
            row = self.content.attempts[index]
            for name in OF_ATTEMPTS:
                self.session.execute(delete(T[name]).where(T[name].c.attempt_id == ids[index]))
            folder = self.plan.folders[index] if self.files.names(index) else None
            here = self.session.scalar(select(table.c.run_dir).where(table.c.id == ids[index]))
            values = self._attempt(row | {"run_dir": folder or here})
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
                f"the weights of {self.unnamed} attempts are not in the bundle; export --with-weights takes them along"
            )

    def _attempt(self, row: Row) -> Row:
        """The attempt as a row of this database. Checkpoints stay where they are: their owner may still need them."""
        values = {name: value for name, value in row.items() if name != "place"} | {"checkpoint": None}
        names = self.files.names(row["id"], "weights")
        remote = row["weights"] if _local(row["weights"]) is None else None
        values["weights"] = f"{row['run_dir']}/{names[0]}" if names else remote
        self.unnamed += bool(row["weights"]) and values["weights"] is None
        if row["state"] == "running":
            values |= {"state": "interrupted", "finished_at": row["heartbeat_at"]}
            values["cause"] = (
                f"{COPY}, on {row['host']} (pid {row['pid']}), last heard of at {_iso(row['heartbeat_at'])}"
            )
            if "failure" in T["attempt"].columns:
                values["failure"] = "preempted"
        return values

    def _numbers(self, table: str) -> None:
        ids = self.plan.ids()
        waiting: list[Row] = []
        for row in self.bundle.rows(table):
            if row["attempt_id"] in self.plan.present:
                self.present[table] += 1
                continue
            waiting.append(row | {"attempt_id": ids[row["attempt_id"]]})
            if len(waiting) >= BATCH:
                self._insert(table, waiting)
                waiting = []
        self._insert(table, waiting)

    def _events(self, sweep: int) -> None:
        event, ids = T["event"], self.plan.ids()
        rows = list(self.bundle.rows("event"))
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
        for index, here in self.plan.weights.items():
            names = self.files.names(index, "weights")
            if not names or not _lacks_weights(here, self.files.runs):
                continue
            if self.files.adopt(index, here["run_dir"], names[0]):
                place = self.plan.moved.get(here["id"], here["id"])
                found = sql_update(T["attempt"]).where(T["attempt"].c.id == place)
                self.session.execute(found.values(weights=f"{here['run_dir']}/{names[0]}"))
            else:
                self.notes.append(f"{here['run_dir']} holds another {names[0]}, which stays; the bundle's was left out")

    def _insert(self, table: str, rows: list[Row]) -> None:
        if rows:
            self.session.execute(insert(T[table]), rows)
            self.added[table] += len(rows)


def _event_key(row: Row) -> tuple[Any, ...]:
    return (row["at"], row["kind"], row["message"], row["cell_id"], row["attempt_id"])


def _lacks_weights(row: Row, runs: Path) -> bool:
    local = _local(row["weights"])
    return not row["weights"] or (local is not None and not (runs / local).exists())


def import_bundle(
    store: Store,
    file: Path,
    *,
    rename: str | None = None,
    runs: Path | None = None,
    identify: Identify | None = None,
) -> Summary:
    """Takes a bundle into the database: all of it in one transaction, or nothing.

    Adds what is missing and leaves what is there; a second import changes nothing. `rename` gives the sweep another name
    here. Weights and logs go under `runs` (None: the store's own), into the attempt's folder or, where a stranger's is in
    the way, one beside it. Attempts that ran when they were exported come in as interrupted, until a later bundle has
    them finished. `identify` gives the id of a config; cells that contradict it are refused, but for read-only sweeps.

    Raises BundleError for a file that is damaged, is no bundle or is made to do harm; StoreTooNew for one of a newer
    release; SweepBusy when it concerns cells that somebody trains here at this moment; StoreBusy.
    """
    where = (runs or store.runs).absolute()
    if rename is not None and not _name_ok(rename):
        raise StoreError(f"{rename!r} is no name for a sweep; give --name up to 200 printable letters")
    with _opened(file) as bundle:
        _refuse_full(file, (file_of(store.url) or where).parent, bundle.size(files=False))
        _refuse_full(file, where, bundle.size(files=True))
        content = _Content(bundle, identify)
        name = rename or bundle.sweep
        files = _Files(bundle, where)
        try:
            # unpacking takes time, so most of it happens before the database is locked
            with store.transaction(write=False) as session:
                first = _Planner(session, store, content, name, where).make()
            files.stage(_wanted(first, where))

            def work(session: Session) -> _Import:
                files.undo()
                if store.path is None:
                    session.execute(text("LOCK TABLE sweep, revision, cell, attempt IN SHARE ROW EXCLUSIVE MODE"))
                plan = _Planner(session, store, content, name, where).make()
                files.stage(_wanted(plan, where))
                done = _Import(session, bundle, content, plan, files)
                done.write(name)
                return done

            done = store.write(work)
        except (IntegrityError, DataError) as error:
            files.undo()
            raise bundle.wrong(f"the database refuses its rows ({_first(error)})") from error
        except DBAPIError as error:
            files.undo()
            raise StoreError(f"cannot write to {store}: {_first(error)}; nothing was changed") from error
        except OSError as error:
            files.undo()
            raise StoreError(f"cannot write under {where}: {error.strerror or error}; nothing was changed") from error
        except BaseException:
            files.undo()
            raise
        finally:
            files.clear()
        return Summary(
            sweep=name,
            file=str(file),
            added=dict(done.added),
            present=dict(done.present),
            files=files.placed,
            bytes=file.stat().st_size,
            notes=tuple(done.notes),
        )


def _wanted(plan: _Plan, runs: Path) -> list[int]:
    """The attempts whose files are needed."""
    lacking = [index for index, row in plan.weights.items() if _lacks_weights(row, runs)]
    return [*(row["id"] for row in plan.new), *plan.replaced, *lacking]


def _refuse_full(file: Path, folder: Path, size: int) -> None:
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if size > free:
        raise BundleError(
            f"{file} holds {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; make room, then import again"
        )


def _first(error: Exception) -> str:
    return (str(getattr(error, "orig", None) or error).strip().splitlines() or ["no reason given"])[0][:200]


# --- tables for other programs --------------------------------------------------------------------------------------

ROWS = 50_000
"""Rows of a table that are in memory at once."""
_CELL = ("slug", "seed", *AXES)
_ATTEMPT = ("cell_id", "number", "kind", "state")


def _listed(what: str) -> tuple[list[Column[Any]], Any, list[Any]]:
    """The columns of a table as it is exported, what it is selected from, and its order."""
    cell, attempt = T["cell"], T["attempt"]
    member = T["revision_cell"]
    of_cell = [cell.c[name] for name in _CELL]
    if what == "cells":
        rest = [column for column in cell.columns if column.name not in ("id", *_CELL)]
        source = member.join(cell, cell.c.id == member.c.cell_id)
        return [cell.c.id, *of_cell, member.c.position, member.c.axes, *rest], source, [member.c.position]
    source = member.join(cell, cell.c.id == member.c.cell_id).join(attempt, attempt.c.cell_id == cell.c.id)
    order: list[Any] = [member.c.position, attempt.c.id]
    if what == "attempts":
        rest = [column for column in attempt.columns if column.name not in ("id", "cell_id")]
        return [attempt.c.id, attempt.c.cell_id, *of_cell, *rest], source, order
    table = T[{"measurements": "measurement", "curves": "curve_point", "examples": "example"}[what]]
    rest = [column for column in table.columns if column.name not in ("id", "attempt_id")]
    source = source.join(table, table.c.attempt_id == attempt.c.id)
    order += [table.c[name] for name in ("probe", "metric", "length", "step", "item", "position") if name in table.c]
    return [table.c.attempt_id, *(attempt.c[name] for name in _ATTEMPT), *of_cell, *rest], source, order


def _dtype(column: Column[Any]) -> str:
    kind = column.type
    if isinstance(kind, Boolean):
        return "boolean"
    return "Int64" if isinstance(kind, Integer) else "Float64" if isinstance(kind, Double) else "string"


def _cell_text(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(jsonable(value), ensure_ascii=False)
    return _iso(value) if isinstance(value, datetime) else value


def export_table(store: Store, what: What, to: Path, fmt: Format, sweep: str | None = None) -> int:
    """Writes a table of a sweep's newest revision (None: the one launched last) for another program; returns its rows.

    `what`: cells, attempts, or measurements, curves and examples of every attempt, each row with its cell and attempt.
    Columns have the database's names and units, times are ISO-8601 UTC text; JSON columns are text in CSV and Parquet.
    An existing file is replaced once the new one is whole. Raises SweepUnknown, StoreError.
    """
    if what not in ("cells", "measurements", "curves", "examples", "attempts"):
        raise StoreError(f"there is no table {what!r}; use cells, measurements, curves, examples or attempts")
    if fmt not in ("csv", "jsonl", "parquet"):
        raise StoreError(f"{fmt!r} is no format; use csv, jsonl or parquet")
    columns, source, order = _listed(what)
    count = 0
    with _replacing(to) as stream, _snapshot(store) as session:
        revision = queries.revision_row(session, queries.sweep_row(session, sweep).id)
        query = select(*columns).select_from(source).where(T["revision_cell"].c.revision_id == revision.id)
        found = session.execute(query.order_by(*order).execution_options(yield_per=ROWS))
        with _sheet(fmt, columns, stream) as write:
            write([])
            for rows in found.partitions(ROWS):
                write([tuple(row) for row in rows])
                count += len(rows)
    return count


@contextlib.contextmanager
def _sheet(fmt: str, columns: list[Column[Any]], stream: IO[bytes]) -> Iterator[Callable[[list[Any]], None]]:
    names = [column.name for column in columns]
    if fmt == "jsonl":

        def write_lines(rows: list[Any]) -> None:
            for row in rows:
                values = map(_encoded, columns, row)
                stream.write(_line(dict(zip(names, values, strict=True))))

        yield write_lines
        return
    import pandas as pd

    def frame(rows: list[Any]) -> pd.DataFrame:
        by_column = zip(*rows, strict=True) if rows else [()] * len(columns)
        return pd.DataFrame(
            {
                column.name: pd.array([_cell_text(value) for value in values], dtype=_dtype(column))  # type: ignore[call-overload]
                for column, values in zip(columns, by_column, strict=True)
            }
        )

    if fmt == "csv":
        stream.write((",".join(names) + "\n").encode())
        yield lambda rows: frame(rows).to_csv(stream, index=False, header=False, lineterminator="\n", encoding="utf-8")
        return
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise StoreError("Parquet needs pyarrow; install it with: pip install 'pyarrow>=18', or use csv") from error
    kinds = {"boolean": pa.bool_(), "Int64": pa.int64(), "Float64": pa.float64(), "string": pa.string()}
    shape = pa.schema([(column.name, kinds[_dtype(column)]) for column in columns])
    with pq.ParquetWriter(stream, shape) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pandas(frame(rows), schema=shape, preserve_index=False))
