"""A bundle: what it consists of, how it is written, and how it is read by somebody who trusts nothing in it.

A bundle is a zip: manifest.json (format, schema, sweep, rows a table, size and SHA-256 of every other member), one
JSON-lines member a table, and, when asked for, the kept weights and logs. The same rows give the same bytes. Inside a
bundle attempts are numbered by cell and age, so nothing in it depends on the ids of the database it came from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Boolean, Column, Double, Integer, String

from .database import jsonable
from .errors import BundleError, StoreTooNew
from .recorder import finite
from .schema import HEAD, REVISIONS, Base, UtcTime

FORMAT = 1
WHAT = "atma-sweep bundle"
MANIFEST = "manifest.json"
LOG = "log.txt"

Row = dict[str, Any]

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

MANIFEST_BYTES = 64 * 2**20
LINE_BYTES = 64 * 2**20
CHUNK = 2**20
FILE = re.compile(r"files/([1-9][0-9]{0,8})/([A-Za-z0-9_][A-Za-z0-9_.-]{0,99})")
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


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


def columns_of_member(name: str) -> list[Column[Any]]:
    """The columns of a table that a bundle holds."""
    if name == "sweep":
        return [T[name].c[column] for column in SWEEP_COLUMNS]
    return [column for column in T[name].columns if column.name not in DROPPED.get(name, ())]


def local_path(address: str | None) -> str | None:
    """The path in an address of weights, None when it lies on no disk of this machine."""
    scheme, separator, rest = (address or "").rpartition("://")
    return rest or None if not separator or scheme in ("file", "local") else None


def iso(value: datetime) -> str:
    """ISO-8601 in UTC to the millisecond, as bundles and tables have it."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encoded(column: Column[Any], value: Any) -> Any:
    """The value of a column as JSON takes it."""
    if value is None or isinstance(value, datetime):
        return None if value is None else iso(value)
    if isinstance(column.type, Double):
        return finite(value)
    return jsonable(value) if isinstance(column.type, JSON) else value


def line_of(row: Row) -> bytes:
    """A row as one line of JSON."""
    # escaped, since there are letters that some programs take for the end of a line
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def text_ok(value: Any, longest: int | None) -> bool:
    """Whether it is text that every database takes, of at most that many letters (None: any)."""
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
        if isinstance(value, str) and TIME.fullmatch(value):
            return datetime.fromisoformat(value)
    elif isinstance(kind, JSON):
        good = isinstance(value, dict) and text_ok(json.dumps(value, ensure_ascii=False), None)
    elif isinstance(kind, Integer):
        good = type(value) is int and -(2**63) <= value < 2**63
    elif isinstance(kind, Double):
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif isinstance(kind, String):
        good = text_ok(value, kind.length)
    if not good:
        raise ValueError(f"{column.name} is {str(value)[:40]!r}")
    return value


def _has_default(column: Column[Any]) -> bool:
    return bool(column.nullable) or column.server_default is not None


# --- writing ----------------------------------------------------------------------------------------------------------


class BundleWriter:
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
                add(line_of(row))
                self.counts[table] += 1

    def file(self, name: str, source: Path, role: str) -> None:
        with source.open("rb") as stream, self._member(name, zipfile.ZIP_STORED) as add:
            left = os.fstat(stream.fileno()).st_size  # a log may grow meanwhile
            while left > 0 and (data := stream.read(min(left, CHUNK))):
                add(data)
                left -= len(data)
        self.members[name]["role"] = role

    def manifest(self, sweep: str) -> None:
        facts = {"what": WHAT, "format": FORMAT, "schema": HEAD, "sweep": sweep, "counts": self.counts}
        members = dict(self.members)
        with self._member(MANIFEST, zipfile.ZIP_DEFLATED) as add:
            add(json.dumps({**facts, "members": members}, ensure_ascii=False, indent=1).encode() + b"\n")


# --- reading ----------------------------------------------------------------------------------------------------------


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


class Bundle:
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
        """The error to raise."""
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
        if form != FORMAT or not name_ok(found.get("sweep")):
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
        file = FILE.fullmatch(name)
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
            match = FILE.fullmatch(name)
            if match:
                found[name] = (int(match[1]), match[2], str(facts["role"]))
        return found

    def size(self, *, files: bool) -> int:
        """Unpacked bytes of the files, or of everything else."""
        members = self.manifest["members"].items()
        return sum(facts["bytes"] for name, facts in members if (FILE.fullmatch(name) is not None) == files)

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
            while data := read(CHUNK):
                yield data

    def rows(self, table: str) -> Iterator[Row]:
        """The rows of a table as the database takes them; times are datetimes."""
        columns = {column.name: column for column in columns_of_member(table)}
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


def name_ok(name: Any) -> bool:
    """Whether a sweep may be called so."""
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and text_ok(name, None)


@contextlib.contextmanager
def opened_bundle(file: Path) -> Iterator[Bundle]:
    """A bundle to read from. Raises BundleError when the file is none, StoreTooNew."""
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            yield Bundle(file, archive)
    except FileNotFoundError as error:
        raise BundleError(f"there is no file {file}; name a bundle that atma-sweep export wrote") from error
    except (zipfile.BadZipFile, IsADirectoryError, PermissionError) as error:
        raise BundleError(f"{file} cannot be read as a bundle: {error}; export the sweep again") from error
