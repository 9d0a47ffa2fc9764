"""Bundle format: its content, writing, and reading without trust in the content.

A bundle is a zip file: manifest.json (format, schema, sweep, row counts, size and SHA-256 of every other member), one
JSON-lines member per table, and optionally the saved weights and logs. The same rows give the same bytes. Attempts in a
bundle are numbered by age, from 1 for the oldest, so that it does not depend on the ids of the database that it came
from.
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
from ..store.recorder import finite_or_none
from ..store.schema import HEAD, REVISIONS
from .row_validation import (
    ATTEMPT_TABLES,
    BUNDLE_TABLES,
    MAX_LINE_BYTES,
    TABLES,
    InvalidRow,
    RowDict,
    RowValidator,
    is_storable_text,
    quoted_value,
)

FORMAT_VERSION = 1
BUNDLE_TYPE = "atma-sweep bundle"
MANIFEST = "manifest.json"
LOG = "log.txt"
WEIGHTS = "weights.safetensors"
ATTEMPT_FILES = {WEIGHTS: "weights", LOG: "log"}
"""Files of an attempt that a bundle may hold, and their role."""

MANIFEST_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20
MAX_PENDING_BLOCKS = 4
"""Number of blocks that one thread may be ahead of the other."""
BATCH_ROWS = 5000
FILE_MEMBER = re.compile(r"files/([1-9][0-9]{0,8})/(weights\.safetensors|log\.txt)")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the size of a bundle.

    The defaults allow sweeps of tens of thousands of cells; `unlimited` is for larger ones.
    """

    max_rows: int = 1_000_000_000
    """Rows of one table."""
    max_compared_bytes: int = 256 * 2**20
    """Unpacked bytes of the tables that are compared with the database in memory."""
    max_ratio: int = 200
    """Unpacked bytes per packed byte, beyond the first `free_bytes`."""
    free_bytes: int = 32 * 2**20
    max_files: int = 200_000

    @classmethod
    def unlimited(cls) -> Limits:
        """Return limits that no real sweep reaches."""
        return cls(max_rows=2**62, max_compared_bytes=2**62, max_ratio=2**31, max_files=2**62)


@dataclass(frozen=True, kw_only=True)
class BundleSummary:
    """Result of an export or import. `added` and `present` count rows by table, `bytes` is the size of the file.

    `notes` are sentences for the user about skipped data and possible surprises.
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
    """Return the path in an address of weights; None for no address or one that is not on a disk of this machine.

    An address without a scheme, or with the scheme `file` or `local`, is on this machine. The file need not exist; a
    relative path is relative to the runs folder.
    """
    scheme, separator, rest = (address or "").rpartition("://")
    return rest or None if not separator or scheme in ("file", "local") else None


def format_utc(value: datetime) -> str:
    """Return the time in ISO-8601, UTC, with milliseconds, as in bundles and tables."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_value(column: Column[Any], value: Any) -> Any:
    """Return the value of a column in the form that is written as JSON.

    Times become text and non-finite numbers of float columns None. Inside JSON columns non-finite numbers become "NaN",
    "Infinity" or "-Infinity". Other values are returned as they are.
    """
    if value is None or isinstance(value, datetime):
        return None if value is None else format_utc(value)
    if isinstance(column.type, Double):
        return finite_or_none(value)
    return jsonable(value) if isinstance(column.type, JSON) else value


def json_line(row: RowDict) -> bytes:
    """Return a row as one line of JSON, with a line break at its end."""
    # escaped, since some programs take further characters for the end of a line
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# --- writing ----------------------------------------------------------------------------------------------------------


class BundleWriter:
    """Writes a bundle: its members in turn, and the manifest last, since it holds their hashes.

    `members` maps the name of a written member to its `sha256` and `bytes`, `counts` a table to its number of rows.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        """Start with an empty, open zip archive."""
        self.archive = archive
        self.members: dict[str, RowDict] = {}
        self.counts: dict[str, int] = {}

    @contextlib.contextmanager
    def _member(self, name: str, method: int) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that appends bytes to a new member; at the end record the member's size and hash.

        A second thread hashes and packs the data; the function blocks while more than 4 blocks (MAX_PENDING_BLOCKS)
        wait. Its errors are raised by a later call of the function or at the end.

        Args:
            name: name of the member.
            method: compression method of zipfile.
        """
        info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # a fixed time, so that the same rows give the same bytes
        info.compress_type, info.create_system, info.external_attr = method, 3, 0o644 << 16
        # a higher level makes numbers at most a tenth smaller and takes three times as long
        setattr(info, "compress_level" if hasattr(info, "compress_level") else "_compresslevel", 1)
        digest, size = hashlib.sha256(), 0
        waiting: deque[Future[None]] = deque()
        # hashing and packing release the GIL, so that a second thread uses another core
        with self.archive.open(info, "w", force_zip64=True) as stream, ThreadPoolExecutor(1) as executor:

            def write(data: bytes) -> None:
                nonlocal size
                digest.update(data)
                size += len(data)
                stream.write(data)

            def add(data: bytes) -> None:
                waiting.append(executor.submit(write, data))
                if len(waiting) > MAX_PENDING_BLOCKS:
                    waiting.popleft().result()

            yield add
            while waiting:
                waiting.popleft().result()
        self.members[name] = {"sha256": digest.hexdigest(), "bytes": size}

    def rows(self, table: str, rows: Iterable[list[bytes]]) -> None:
        """Write a table as the member `TABLE.jsonl`, and record its number of rows.

        Args:
            table: name of the table.
            rows: lists of lines, each a JSON object with its line break; the lines are written as they are.
        """
        self.counts[table] = 0
        with self._member(f"{table}.jsonl", zipfile.ZIP_DEFLATED) as add:
            for lines in rows:
                add(b"".join(lines))
                self.counts[table] += len(lines)

    def file(self, name: str, source: Path, role: str) -> str:
        """Write a file as an uncompressed member, and return its SHA-256 in hex.

        Data appended to the file in the meantime is not included. A file that shrinks is written as far as it goes.

        Args:
            name: name of the member.
            source: file to write.
            role: `weights` or `log`.
        """
        with source.open("rb") as stream, self._member(name, zipfile.ZIP_STORED) as add:
            remaining = os.fstat(stream.fileno()).st_size  # a log may grow meanwhile
            while remaining > 0 and (data := stream.read(min(remaining, CHUNK_BYTES))):
                add(data)
                remaining -= len(data)
        self.members[name]["role"] = role
        return str(self.members[name]["sha256"])

    def manifest(self, sweep: str) -> None:
        """Write the manifest; call it after all other members.

        It holds type, format, schema, the name of the sweep, row counts, and size and hash of every member.
        """
        facts = {"what": BUNDLE_TYPE, "format": FORMAT_VERSION, "schema": HEAD, "sweep": sweep, "counts": self.counts}
        members = dict(self.members)
        with self._member(MANIFEST, zipfile.ZIP_DEFLATED) as add:
            add(json.dumps({**facts, "members": members}, ensure_ascii=False, indent=1).encode() + b"\n")


# --- reading ----------------------------------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, Any]]) -> RowDict:
    """Return the pairs of a JSON object as a dict. Raises ValueError for a duplicate key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a valid number")


_PLAIN = json.JSONDecoder(parse_constant=_reject_constant)
_STRICT = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
_DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, struct.error)


def _parse_json(data: bytes, decoder: json.JSONDecoder = _STRICT) -> Any:
    """Return a JSON value.

    Args:
        data: UTF-8 text.
        decoder: decoder; the default refuses duplicate keys in an object.

    Raises:
        ValueError: invalid JSON or UTF-8, NaN or infinite numbers, duplicate keys, or excessive nesting.
    """
    try:
        return decoder.decode(data.decode())
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error


class Bundle:
    """An open bundle. Nothing in it is trusted: sizes, names, hashes, types and references are checked before use."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, limits: Limits) -> None:
        """Check the members, their sizes and the manifest; no row and no file is read yet.

        Raises:
            BundleError: the content is not a valid bundle or exceeds the limits.
            StoreTooNew: a newer release has written it.
        """
        self.path, self.archive, self.limits = path, archive, limits
        infos = archive.infolist()
        self.infos = {info.filename: info for info in infos}
        if len(self.infos) != len(infos):
            raise self.invalid_error("a member occurs twice")
        for info in infos:
            self._check_info(info)
        if MANIFEST not in self.infos or self.infos[MANIFEST].file_size > MANIFEST_BYTES:
            raise self.invalid_error(f"it has no {MANIFEST}")
        self._check_sizes()
        try:
            with archive.open(MANIFEST) as stream:
                self.manifest = _parse_json(stream.read(MANIFEST_BYTES))
        except (ValueError, *_DAMAGED) as error:
            raise self.invalid_error(f"{MANIFEST}: {error_text(error)}") from error
        if not isinstance(self.manifest, dict):
            raise self.invalid_error(f"{MANIFEST} is not a JSON object")
        self._check_manifest()
        self.sweep = str(self.manifest["sweep"])
        self.is_current_schema = self.manifest["schema"] == HEAD
        """True if rows must have every column of this release; rows of an older release lack the newer columns."""

    def invalid_error(self, reason: str) -> BundleError:
        """Return the error to raise for an invalid bundle; `reason` is a clause for the message."""
        return BundleError(f"{self.path} cannot be imported: {reason}; nothing was changed. Export the sweep again")

    def too_large_error(self, reason: str) -> BundleError:
        """Return the error to raise for a bundle that exceeds the limits; `reason` is a clause for the message."""
        return BundleError(
            f"{self.path} cannot be imported: {reason}, more than any usual sweep; nothing was changed. If you "
            "trust its source, import it with --large"
        )

    def _check_info(self, info: zipfile.ZipInfo) -> None:
        """Raise BundleError unless the member is a plain file, unencrypted, and stored or deflated."""
        name = quoted_value(info.filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 0x41:
            raise self.invalid_error(f"the member {name} is compressed in a way that bundles do not use")
        mode = info.external_attr >> 16
        if info.filename.endswith("/") or (stat.S_IFMT(mode) not in (0, stat.S_IFREG)):
            raise self.invalid_error(f"the member {name} is not a plain file")

    def _check_sizes(self) -> None:
        """Check the declared sizes against the limits, before anything is unpacked.

        Reading then enforces the declared sizes.

        Raises:
            BundleError: members overlap, or their number, their size or their compression ratio exceeds the limits.
        """
        packed, archive_bytes = sum(info.compress_size for info in self.infos.values()), self.path.stat().st_size
        if packed > archive_bytes:
            raise self.invalid_error("its members overlap")
        if len(self.infos) > self.limits.max_files + len(BUNDLE_TABLES) + 1:
            raise self.too_large_error(f"it has {len(self.infos):,} members")
        for info in self.infos.values():
            if info.file_size > self.limits.free_bytes + self.limits.max_ratio * info.compress_size:
                raise self.too_large_error(f"{quoted_value(info.filename)} unpacks to {info.file_size / 1e6:,.0f} MB")
        size = sum(info.file_size for info in self.infos.values())
        if size > self.limits.free_bytes + self.limits.max_ratio * packed:
            raise self.too_large_error(f"it unpacks to {size / 1e6:,.0f} MB")
        compared_bytes = sum(info.file_size for name, info in self.infos.items() if name in _COMPARED_MEMBERS)
        if compared_bytes > self.limits.max_compared_bytes:
            raise self.too_large_error(f"its cells, attempts and events take {compared_bytes / 1e6:,.0f} MB")

    def _check_manifest(self) -> None:
        """Check type, versions, sweep name, members and row counts of the manifest.

        The members must be exactly those in the zip file; names that differ only in case are refused.

        Raises:
            BundleError: the manifest is invalid, or a row count exceeds the limits.
            StoreTooNew: its format or schema is unknown to this release.
        """
        manifest = self.manifest
        if manifest.get("what") != BUNDLE_TYPE:
            raise self.invalid_error(
                f"it is not a bundle of atma-sweep (its manifest says {quoted_value(manifest.get('what'))})"
            )
        version, schema = manifest.get("format"), manifest.get("schema")
        if type(version) is not int or not isinstance(schema, str):
            raise self.invalid_error("the manifest lacks a format or schema")
        if version > FORMAT_VERSION or schema not in REVISIONS:
            raise StoreTooNew(
                f"{self.path} was written by a newer atma-sweep (bundle format {version}, schema {quoted_value(schema)}; this one "
                f"reads up to {FORMAT_VERSION} and {HEAD}); upgrade the program, then import again"
            )
        if version != FORMAT_VERSION or not is_valid_sweep_name(manifest.get("sweep")):
            raise self.invalid_error("the manifest has an invalid format or sweep")
        members, counts = manifest.get("members"), manifest.get("counts")
        if not isinstance(members, dict) or not isinstance(counts, dict) or sorted(counts) != sorted(BUNDLE_TABLES):
            raise self.invalid_error("the manifest does not list the members")
        if set(members) | {MANIFEST} != set(self.infos) or not {f"{name}.jsonl" for name in BUNDLE_TABLES} <= set(
            members
        ):
            raise self.invalid_error("its members differ from those that the manifest lists")
        for name, facts in members.items():
            self._check_member(name, facts)
        names = Counter(name.lower() for name in members)
        if max(names.values()) > 1 or not all(type(count) is int and count >= 0 for count in counts.values()):
            raise self.invalid_error("the manifest contradicts itself")
        for name, count in counts.items():
            if count > self.limits.max_rows:
                raise self.too_large_error(f"{name}.jsonl has {counted(count, 'row')}")

    def _check_member(self, name: str, facts: Any) -> None:
        """Check name, size and role of a member in the manifest.

        Args:
            name: name of the member, which must be in the zip file.
            facts: its entry: exactly `sha256` and `bytes`, and `role` for a file of an attempt.

        Raises:
            BundleError: the entry is invalid or contradicts the zip file.
        """
        file = FILE_MEMBER.fullmatch(name)
        if file is None and name not in {f"{table}.jsonl" for table in BUNDLE_TABLES}:
            raise self.invalid_error(f"the member {quoted_value(name)} has an unexpected name")
        expected = {"sha256", "bytes"} | ({"role"} if file else set())
        if not isinstance(facts, dict) or set(facts) != expected or type(facts["bytes"]) is not int:
            raise self.invalid_error(f"the manifest entry of {name} is incomplete")
        if facts["bytes"] != self.infos[name].file_size:
            raise self.invalid_error(f"the size of {name} differs from the manifest")
        if file and facts["role"] != ATTEMPT_FILES[file[2]]:
            raise self.invalid_error(f"{name} is neither weights nor a log")

    @property
    def files(self) -> dict[str, tuple[int, str, str]]:
        """Weights and logs: member name -> (attempt's number in the bundle, file name, role).

        The role is `weights` or `log`.
        """
        files = {}
        for name, facts in self.manifest["members"].items():
            match = FILE_MEMBER.fullmatch(name)
            if match:
                files[name] = (int(match[1]), match[2], str(facts["role"]))
        return files

    def size(self, *, files: bool) -> int:
        """Return the unpacked bytes of the weights and logs (`files`), or of all other members."""
        members = self.manifest["members"].items()
        return sum(facts["bytes"] for name, facts in members if (FILE_MEMBER.fullmatch(name) is not None) == files)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a member in blocks of at most 1 MiB (CHUNK_BYTES); a second thread reads one block ahead.

        The hash is checked after the last block, so the data must not be used before the end.

        Args:
            name: member that the manifest lists.

        Raises:
            BundleError: the member is damaged, or its size or hash is not the one in the manifest.
        """
        digest, facts = hashlib.sha256(), self.manifest["members"][name]
        size = 0

        def read(stream: IO[bytes]) -> bytes:
            data = stream.read(CHUNK_BYTES)
            digest.update(data)
            return data

        try:
            # unpacking and hashing release the GIL: the next block is read while the last one is used
            with self.archive.open(name) as stream, ThreadPoolExecutor(1) as executor:
                coming = executor.submit(read, stream)
                while data := coming.result():
                    size += len(data)
                    if size > facts["bytes"]:
                        raise self.invalid_error(f"{name} is larger than the manifest states")
                    coming = executor.submit(read, stream)
                    yield data
        except _DAMAGED as error:
            raise self.invalid_error(f"{name} is damaged ({error_text(error)})") from error
        if digest.hexdigest() != facts["sha256"] or size != facts["bytes"]:
            raise self.invalid_error(f"the hash of {name} differs from the manifest")

    def _lines(self, name: str, max_bytes: int) -> Iterator[list[bytes]]:
        """Yield the lines of a member without their line breaks, in lists of at most 5,000 (BATCH_ROWS).

        Raises:
            BundleError: a line has more than `max_bytes` bytes, the last one has no line break, or the member is
                damaged.
        """
        rest = b""
        for data in self.chunks(name):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > max_bytes or any(len(line) > max_bytes for line in lines):
                raise self.invalid_error(f"{name} has a line of more than {max_bytes:,} bytes")
            for start in range(0, len(lines), BATCH_ROWS):
                yield lines[start : start + BATCH_ROWS]
        if rest:
            raise self.invalid_error(f"{name} ends in the middle of a line")

    def columns(self, table: str) -> Iterator[dict[str, list[Any]]]:
        """Yield the rows of a table in batches, each as a dictionary from column name to a list of validated values.

        Times are text, values of JSON columns are parsed. The lists of a batch have equal lengths; the columns are
        those of FIELD_RULES. The number of rows and the hash are checked after the last batch.

        Raises:
            BundleError: a row is invalid, or their number is not the one in the manifest.
        """
        name, validator, count = f"{table}.jsonl", RowValidator(table, complete=self.is_current_schema), 0
        # for millions of rows, checking for duplicate keys takes too long; the last of equal keys counts
        decoder = _PLAIN if table in ATTEMPT_TABLES else _STRICT
        for lines in self._lines(name, MAX_LINE_BYTES[table]):
            try:
                rows = _parse_json(b"[" + b",".join(lines) + b"]", decoder)
                if len(rows) != len(lines):
                    raise ValueError("a line is not a row")
            except ValueError:
                rows = []
                for at, line in enumerate(lines, count + 1):
                    try:
                        rows.append(_parse_json(line, decoder))
                    except ValueError as error:
                        raise self.invalid_error(f"{name}, row {at}: {error_text(error)}") from error
            try:
                yield validator.validated_columns(rows)
            except InvalidRow as error:
                raise self.invalid_error(f"{name}, row {count + error.row_index + 1}: {error}") from error
            count += len(rows)
        if count != self.manifest["counts"][table]:
            raise self.invalid_error(
                f"{name} has {counted(count, 'row')}, but the manifest states {self.manifest['counts'][table]}"
            )

    def rows(self, table: str) -> Iterator[RowDict]:
        """Yield the validated rows of a table, by column name. Times are datetimes.

        JSON columns are text, which takes a tenth of the memory; `with_parsed_json` parses them.

        Raises:
            BundleError: a row is invalid, or their number is not the one in the manifest; earlier rows were yielded by
                then.
        """
        fields = RowValidator(table, complete=self.is_current_schema).fields
        for columns in self.columns(table):
            for name, values in columns.items():
                if fields[name].kind == "time":
                    columns[name] = [None if value is None else datetime.fromisoformat(value) for value in values]
                elif fields[name].kind == "json":
                    columns[name] = [None if value is None else _json_text(value) for value in values]
            for row in zip(*columns.values(), strict=True):
                yield dict(zip(columns, row, strict=True))


_COMPARED_MEMBERS = tuple(f"{name}.jsonl" for name in BUNDLE_TABLES if name not in ATTEMPT_TABLES)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def with_parsed_json(table: str, row: RowDict) -> RowDict:
    """Return a copy of a row of `Bundle.rows` with its JSON columns parsed; None stays None.

    The row may have keys that are no columns. JSON columns must be text, so it must not be applied twice. `table` is
    the name of the row's table.
    """
    columns = TABLES[table].columns
    texts = {name for name in row if name in columns and isinstance(columns[name].type, JSON)}
    return {name: json.loads(value) if name in texts and value is not None else value for name, value in row.items()}


def is_valid_sweep_name(name: Any) -> bool:
    """Return True for printable text of 1 to 200 characters that every database can store."""
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and is_storable_text(name, None)


def error_text(error: BaseException) -> str:
    """Return the message of an error on one line, at most 60 characters, without control characters.

    Characters outside ASCII are escaped. An error without a message gives the name of its class.
    """
    return quoted_value(" ".join(str(error).split()) or type(error).__name__)[1:-1]


DIRECTORY_BYTES = 256
"""Upper limit of the size of one member's entry in the directory of a bundle's zip file."""


def _check_directory(path: Path, stream: IO[bytes], limits: Limits) -> None:
    """Check the size of the zip's directory, which zipfile reads into memory at once.

    It may have 256 bytes (DIRECTORY_BYTES) per member that is allowed. Leaves the stream at its start.

    Args:
        path: bundle, for the message.
        stream: open bundle, seekable.
        limits: limits; `max_files` decides.

    Raises:
        BadZipFile: there is no directory.
        BundleError: it is larger than the limits allow.
    """
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
    if min(listed, size) > DIRECTORY_BYTES * (limits.max_files + len(BUNDLE_TABLES) + 1):
        raise BundleError(
            f"{path} cannot be imported: it lists too many members for a sweep; nothing was changed. If you "
            "trust its source, import it with --large"
        )
    stream.seek(0)


def check_bundle(file: Path) -> None:
    """Raise BundleError unless the path is a non-empty regular file (links are followed), before anything is opened."""
    try:
        check_regular(file, "name a bundle that atma-sweep export wrote")
    except StoreError as error:
        raise BundleError(str(error)) from error


@contextlib.contextmanager
def open_bundle(file: Path, limits: Limits = Limits()) -> Iterator[Bundle]:
    """Yield an open, checked bundle; the file is closed when the context ends.

    Errors about a missing or unreadable file or a damaged zip that occur inside the context also become BundleError.

    Args:
        file: bundle.
        limits: limits on its size.

    Raises:
        BundleError: the file is missing, empty or no regular file, is not a bundle, or exceeds the limits.
        StoreTooNew: a newer release has written it.
    """
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
