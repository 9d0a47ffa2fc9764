"""A bundle: what it consists of, how it is written, and how it is read by somebody who trusts nothing in it.

A bundle is a zip: manifest.json (format, schema, sweep, rows a table, size and SHA-256 of every other member), one
JSON-lines member a table, and, when asked for, the kept weights and logs. The same rows give the same bytes. Inside a
bundle attempts are numbered by cell and age, so nothing in it depends on the ids of the database it came from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from sqlalchemy import JSON, Column, Double

from ..console.output_files import check_regular
from ..console.text import counted
from ..errors import BundleError, StoreError, StoreTooNew
from ..store.database import jsonable
from ..store.recorder import finite
from ..store.schema import HEAD, REVISIONS
from .row_validation import (
    ATTEMPT_TABLES,
    BUNDLE_TABLES,
    MAX_LINE_BYTES,
    InvalidRow,
    RowDict,
    RowValidator,
    T,
    is_storable_text,
    quoted_value,
)

FORMAT = 1
BUNDLE_TYPE = "atma-sweep bundle"
MANIFEST = "manifest.json"
LOG = "log.txt"
WEIGHTS = "weights.safetensors"
ATTEMPT_FILES = {WEIGHTS: "weights", LOG: "log"}
"""The files that a bundle may hold of an attempt, and what they are."""

MANIFEST_BYTES = 64 * 2**20
CHUNK = 2**20
MAX_PENDING_BLOCKS = 4
"""Blocks that one thread may be ahead of the other."""
BATCH_ROWS = 5000
FILE = re.compile(r"files/([1-9][0-9]{0,8})/(weights\.safetensors|log\.txt)")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a bundle may be. The usual ones hold sweeps of tens of thousands of cells; `none` is for larger ones."""

    rows: int = 1_000_000_000
    """Of one table."""
    kept: int = 256 * 2**20
    """Unpacked bytes of the tables that are compared with the database in memory."""
    ratio: int = 200
    """Unpacked bytes for each packed one, beyond the first `free`."""
    free: int = 32 * 2**20
    files: int = 200_000

    @classmethod
    def none(cls) -> Limits:
        """None that a real sweep could meet."""
        return cls(rows=2**62, kept=2**62, ratio=2**31, files=2**62)


@dataclass(frozen=True, kw_only=True)
class BundleSummary:
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


def local_path(address: str | None) -> str | None:
    """The path in an address of weights, None when it lies on no disk of this machine."""
    scheme, separator, rest = (address or "").rpartition("://")
    return rest or None if not separator or scheme in ("file", "local") else None


def format_utc(value: datetime) -> str:
    """ISO-8601 in UTC to the millisecond, as bundles and tables have it."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_value(column: Column[Any], value: Any) -> Any:
    """The value of a column as JSON takes it."""
    if value is None or isinstance(value, datetime):
        return None if value is None else format_utc(value)
    if isinstance(column.type, Double):
        return finite(value)
    return jsonable(value) if isinstance(column.type, JSON) else value


def json_line(row: RowDict) -> bytes:
    """A row as one line of JSON."""
    # escaped, since there are letters that some programs take for the end of a line
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# --- writing ----------------------------------------------------------------------------------------------------------


class BundleWriter:
    """A bundle as it is written: members in turn, the manifest last, since it holds their hashes."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.archive = archive
        self.members: dict[str, RowDict] = {}
        self.counts: dict[str, int] = {}

    @contextlib.contextmanager
    def _member(self, name: str, method: int) -> Iterator[Callable[[bytes], None]]:
        info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # not the time: the same rows give the same bytes
        info.compress_type, info.create_system, info.external_attr = method, 3, 0o644 << 16
        # numbers get a tenth smaller at most with more effort, which takes three times as long
        setattr(info, "compress_level" if hasattr(info, "compress_level") else "_compresslevel", 1)
        digest, size = hashlib.sha256(), 0
        waiting: deque[Future[None]] = deque()
        # hashing and packing let the interpreter go, so they get the second core
        with self.archive.open(info, "w", force_zip64=True) as stream, ThreadPoolExecutor(1) as aside:

            def write(data: bytes) -> None:
                nonlocal size
                digest.update(data)
                size += len(data)
                stream.write(data)

            def add(data: bytes) -> None:
                waiting.append(aside.submit(write, data))
                if len(waiting) > MAX_PENDING_BLOCKS:
                    waiting.popleft().result()

            yield add
            while waiting:
                waiting.popleft().result()
        self.members[name] = {"sha256": digest.hexdigest(), "bytes": size}

    def rows(self, table: str, rows: Iterable[list[bytes]]) -> None:
        """A table, given as lines, many at a time."""
        self.counts[table] = 0
        with self._member(f"{table}.jsonl", zipfile.ZIP_DEFLATED) as add:
            for lines in rows:
                add(b"".join(lines))
                self.counts[table] += len(lines)

    def file(self, name: str, source: Path, role: str) -> str:
        """Write a file as a member, and return its SHA-256 in hex."""
        with source.open("rb") as stream, self._member(name, zipfile.ZIP_STORED) as add:
            left = os.fstat(stream.fileno()).st_size  # a log may grow meanwhile
            while left > 0 and (data := stream.read(min(left, CHUNK))):
                add(data)
                left -= len(data)
        self.members[name]["role"] = role
        return str(self.members[name]["sha256"])

    def manifest(self, sweep: str) -> None:
        facts = {"what": BUNDLE_TYPE, "format": FORMAT, "schema": HEAD, "sweep": sweep, "counts": self.counts}
        members = dict(self.members)
        with self._member(MANIFEST, zipfile.ZIP_DEFLATED) as add:
            add(json.dumps({**facts, "members": members}, ensure_ascii=False, indent=1).encode() + b"\n")


# --- reading ----------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> RowDict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


_PLAIN = json.JSONDecoder(parse_constant=_no_number)
_STRICT = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_object)
_DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, struct.error)


def _parsed(data: bytes, decoder: json.JSONDecoder = _STRICT) -> Any:
    """A JSON value. Raises ValueError, also for what only Python's parser would take."""
    try:
        return decoder.decode(data.decode())
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


class Bundle:
    """An open bundle. Nothing in it is trusted: sizes, names, hashes, types and references are checked before use."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, limits: Limits) -> None:
        self.path, self.archive, self.limits = path, archive, limits
        infos = archive.infolist()
        self.infos = {info.filename: info for info in infos}
        if len(self.infos) != len(infos):
            raise self.wrong("a member is there twice")
        for info in infos:
            self._check_info(info)
        if MANIFEST not in self.infos or self.infos[MANIFEST].file_size > MANIFEST_BYTES:
            raise self.wrong(f"it has no {MANIFEST}")
        self._check_sizes()
        try:
            with archive.open(MANIFEST) as stream:
                self.manifest = _parsed(stream.read(MANIFEST_BYTES))
        except (ValueError, *_DAMAGED) as error:
            raise self.wrong(f"{MANIFEST}: {error_text(error)}") from error
        if not isinstance(self.manifest, dict):
            raise self.wrong(f"{MANIFEST} is no JSON object")
        self._check_manifest()
        self.sweep = str(self.manifest["sweep"])
        self.complete = self.manifest["schema"] == HEAD
        """Whether rows must have every column of this release; those of an older one lack the newer columns."""

    def wrong(self, why: str) -> BundleError:
        """The error to raise."""
        return BundleError(f"{self.path} cannot be taken in: {why}; nothing was changed. Export the sweep again")

    def too_large(self, why: str) -> BundleError:
        """The error of a bundle that is larger than sweeps are."""
        return BundleError(
            f"{self.path} cannot be taken in: {why}, which no usual sweep has; nothing was changed. "
            "If you trust whom it is from, import it with --large"
        )

    def _check_info(self, info: zipfile.ZipInfo) -> None:
        name = quoted_value(info.filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 0x41:
            raise self.wrong(f"the member {name} is packed in a way that no bundle is")
        mode = info.external_attr >> 16
        if info.filename.endswith("/") or (stat.S_IFMT(mode) not in (0, stat.S_IFREG)):
            raise self.wrong(f"the member {name} is no plain file")

    def _check_sizes(self) -> None:
        """Before anything is unpacked: what it says of its sizes, which reading then holds it to."""
        packed, whole = sum(info.compress_size for info in self.infos.values()), self.path.stat().st_size
        if packed > whole:
            raise self.wrong("its members lie over each other")
        if len(self.infos) > self.limits.files + len(BUNDLE_TABLES) + 1:
            raise self.too_large(f"it has {len(self.infos):,} members")
        for info in self.infos.values():
            if info.file_size > self.limits.free + self.limits.ratio * info.compress_size:
                raise self.too_large(f"{quoted_value(info.filename)} unpacks to {info.file_size / 1e6:,.0f} MB")
        size = sum(info.file_size for info in self.infos.values())
        if size > self.limits.free + self.limits.ratio * packed:
            raise self.too_large(f"it unpacks to {size / 1e6:,.0f} MB")
        kept = sum(info.file_size for name, info in self.infos.items() if name in _KEPT)
        if kept > self.limits.kept:
            raise self.too_large(f"its cells, attempts and events take {kept / 1e6:,.0f} MB")

    def _check_manifest(self) -> None:
        found = self.manifest
        if found.get("what") != BUNDLE_TYPE:
            raise self.wrong(f"it is no bundle of atma-sweep (its manifest says {quoted_value(found.get('what'))})")
        form, schema = found.get("format"), found.get("schema")
        if type(form) is not int or not isinstance(schema, str):
            raise self.wrong("the manifest names no format and schema")
        if form > FORMAT or schema not in REVISIONS:
            raise StoreTooNew(
                f"{self.path} was written by a newer atma-sweep (bundle format {form}, schema {quoted_value(schema)}; this one "
                f"reads up to {FORMAT} and {HEAD}); upgrade the program, then import again"
            )
        if form != FORMAT or not is_valid_sweep_name(found.get("sweep")):
            raise self.wrong("the manifest names no format or sweep that can be")
        members, counts = found.get("members"), found.get("counts")
        if not isinstance(members, dict) or not isinstance(counts, dict) or sorted(counts) != sorted(BUNDLE_TABLES):
            raise self.wrong("the manifest does not list the members")
        if set(members) | {MANIFEST} != set(self.infos) or not {f"{name}.jsonl" for name in BUNDLE_TABLES} <= set(
            members
        ):
            raise self.wrong("its members are not those that the manifest lists")
        for name, facts in members.items():
            self._check_member(name, facts)
        taken = Counter(name.lower() for name in members)
        if max(taken.values()) > 1 or not all(type(count) is int and count >= 0 for count in counts.values()):
            raise self.wrong("the manifest contradicts itself")
        for name, count in counts.items():
            if count > self.limits.rows:
                raise self.too_large(f"{name}.jsonl has {counted(count, 'row')}")

    def _check_member(self, name: str, facts: Any) -> None:
        file = FILE.fullmatch(name)
        if file is None and name not in {f"{table}.jsonl" for table in BUNDLE_TABLES}:
            raise self.wrong(f"the member {quoted_value(name)} has a name that no bundle has")
        expected = {"sha256", "bytes"} | ({"role"} if file else set())
        if not isinstance(facts, dict) or set(facts) != expected or type(facts["bytes"]) is not int:
            raise self.wrong(f"the manifest says too little of {name}")
        if facts["bytes"] != self.infos[name].file_size:
            raise self.wrong(f"{name} has not the size that the manifest says")
        if file and facts["role"] != ATTEMPT_FILES[file[2]]:
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

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a member. The hash is checked at the end, so nothing counts until the last one came."""
        digest, facts = hashlib.sha256(), self.manifest["members"][name]
        size = 0

        def read(stream: IO[bytes]) -> bytes:
            data = stream.read(CHUNK)
            digest.update(data)
            return data

        try:
            # unpacking and hashing let the interpreter go: the next block comes while the last one is looked at
            with self.archive.open(name) as stream, ThreadPoolExecutor(1) as aside:
                coming = aside.submit(read, stream)
                while data := coming.result():
                    size += len(data)
                    if size > facts["bytes"]:
                        raise self.wrong(f"{name} is larger than the manifest says")
                    coming = aside.submit(read, stream)
                    yield data
        except _DAMAGED as error:
            raise self.wrong(f"{name} is damaged ({error_text(error)})") from error
        if digest.hexdigest() != facts["sha256"] or size != facts["bytes"]:
            raise self.wrong(f"{name} has not the hash that the manifest says")

    def _lines(self, name: str, longest: int) -> Iterator[list[bytes]]:
        """The lines of a member, many at a time. Raises ValueError for one that is too long or cut off."""
        rest = b""
        for data in self.chunks(name):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > longest or any(len(line) > longest for line in lines):
                raise self.wrong(f"{name} has a line of more than {longest:,} bytes")
            for start in range(0, len(lines), BATCH_ROWS):
                yield lines[start : start + BATCH_ROWS]
        if rest:
            raise self.wrong(f"{name} ends within a line")

    def columns(self, table: str) -> Iterator[dict[str, list[Any]]]:
        """The rows of a table, many at a time, as columns; checked, times as text."""
        name, incoming, count = f"{table}.jsonl", RowValidator(table, complete=self.complete), 0
        # millions of rows have no time for a look at each pair; of two keys that are the same the last one counts
        decoder = _PLAIN if table in ATTEMPT_TABLES else _STRICT
        for lines in self._lines(name, MAX_LINE_BYTES[table]):
            try:
                rows = _parsed(b"[" + b",".join(lines) + b"]", decoder)
                if len(rows) != len(lines):
                    raise ValueError("a line is not a row")
            except ValueError:
                rows = []
                for at, line in enumerate(lines, count + 1):
                    try:
                        rows.append(_parsed(line, decoder))
                    except ValueError as error:
                        raise self.wrong(f"{name}, row {at}: {error_text(error)}") from error
            try:
                yield incoming.checked(rows)
            except InvalidRow as error:
                raise self.wrong(f"{name}, row {count + error.at + 1}: {error}") from error
            count += len(rows)
        if count != self.manifest["counts"][table]:
            raise self.wrong(f"{name} has {counted(count, 'row')}, the manifest says {self.manifest['counts'][table]}")

    def rows(self, table: str) -> Iterator[RowDict]:
        """The rows of a table; times are datetimes, JSON columns text, which takes a tenth of the memory (see `with_parsed_json`)."""
        fields = RowValidator(table, complete=self.complete).fields
        for columns in self.columns(table):
            for name, values in columns.items():
                if fields[name].kind == "time":
                    columns[name] = [None if value is None else datetime.fromisoformat(value) for value in values]
                elif fields[name].kind == "json":
                    columns[name] = [None if value is None else _packed(value) for value in values]
            for row in zip(*columns.values(), strict=True):
                yield dict(zip(columns, row, strict=True))


_KEPT = tuple(f"{name}.jsonl" for name in BUNDLE_TABLES if name not in ATTEMPT_TABLES)


def _packed(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def with_parsed_json(table: str, row: RowDict) -> RowDict:
    """A row of `Bundle.rows` with its JSON columns as objects."""
    columns = T[table].columns
    texts = {name for name in row if name in columns and isinstance(columns[name].type, JSON)}
    return {name: json.loads(value) if name in texts and value is not None else value for name, value in row.items()}


def is_valid_sweep_name(name: Any) -> bool:
    """Whether a sweep may be called so."""
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and is_storable_text(name, None)


def error_text(error: BaseException) -> str:
    """What an error says, on one line, in letters that no terminal obeys."""
    return quoted_value(" ".join(str(error).split()) or type(error).__name__)[1:-1]


DIRECTORY_BYTES = 256
"""More than a bundle's zip says of one member."""


def _check_directory(path: Path, stream: IO[bytes], limits: Limits) -> None:
    """Whether the zip's list of members, which is read into memory at once, is as long as a bundle's may be."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 2**16 - 128))
    tail = stream.read()
    end = tail.rfind(b"PK\5\6")
    if end < 0 or len(tail) - end < 22:
        raise zipfile.BadZipFile("File is not a zip file")
    listed = struct.unpack_from("<L", tail, end + 12)[0]
    locator = end - 20
    if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
        stream.seek(min(struct.unpack_from("<Q", tail, locator + 8)[0], size))
        record = stream.read(56)
        listed = struct.unpack_from("<Q", record, 40)[0] if len(record) == 56 else size
    if min(listed, size) > DIRECTORY_BYTES * (limits.files + len(BUNDLE_TABLES) + 1):
        raise BundleError(
            f"{path} cannot be taken in: it lists too many members for a sweep; nothing was changed. "
            "If you trust whom it is from, import it with --large"
        )
    stream.seek(0)


def check_bundle(file: Path) -> None:
    """Refuse what is no regular file, before anything is opened. Raises BundleError."""
    try:
        check_regular(file, "name a bundle that atma-sweep export wrote")
    except StoreError as error:
        raise BundleError(str(error)) from error


@contextlib.contextmanager
def open_bundle(file: Path, limits: Limits = Limits()) -> Iterator[Bundle]:
    """A bundle to read from. Raises BundleError when the file is none or larger than the limits, StoreTooNew."""
    check_bundle(file)
    try:
        with file.open("rb") as stream:
            try:
                _check_directory(file, stream, limits)
            except (OSError, OverflowError) as error:
                raise zipfile.BadZipFile(str(error)) from error
            with zipfile.ZipFile(stream) as archive:
                yield Bundle(file, archive, limits)
    except FileNotFoundError as error:
        raise BundleError(f"there is no file {file}; name a bundle that atma-sweep export wrote") from error
    except (zipfile.BadZipFile, IsADirectoryError, PermissionError, struct.error, NotImplementedError) as error:
        raise BundleError(f"{file} cannot be read as a bundle: {error_text(error)}; export the sweep again") from error
