"""Sources of documents: the Python standard library, files on disk, and datasets of the Hugging Face hub."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import itertools
import json
import logging
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from ..errors import MachineError, SweepError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Suffixes of files that are one document each."""
RECORD_SUFFIXES = (".jsonl", ".parquet")
"""Suffixes of files with one document per record."""
PACKED_SUFFIXES = (".gz", ".xz", ".zst")
"""Suffixes that compressed files other than Parquet have in addition."""
READ_FILES = (
    f"{', '.join(TEXT_SUFFIXES)}, {RECORD_SUFFIXES[0]} (each also {', '.join(PACKED_SUFFIXES)}) or {RECORD_SUFFIXES[1]}"
)
"""Kinds of files that are read, for messages."""
DEFAULT_COLUMN = "text"
"""Field or column that holds the text, unless a setting names another."""
STDLIB_SKIP = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "ensurepip",
    "sitecustomize.py",
}
"""Names of files and folders of the standard library that are not read."""
STDLIB_HELDOUT_MIN_BYTES = 20_000
"""Minimum number of characters of a held-out document of the standard library."""


class CorpusError(SweepError):
    """Exception for text that cannot be used as it is."""


@dataclass(frozen=True)
class Text:
    """A document of a corpus before tokenisation."""

    name: str
    """Name that is unique within the corpus and decides the split by its hash."""
    text: str
    """Contents of the document."""
    split: str | None = None
    """"train", "validation" or "heldout" if the source has splits of its own; None leaves the choice to the corpus."""


class DocumentSource(Protocol):
    """Protocol of a resumable source of documents in a fixed order."""

    def documents(self, state: Any = None) -> Iterator[Text]:
        """Yield all documents, or those after `state`."""

    def state(self) -> Any:
        """Return the position of the last iterator of `documents`, as JSON."""

    def read_share(self) -> float | None:
        """Return the share of the text that was read, 0 to 1; None if its size is unknown."""

    def key(self) -> Any:
        """Return JSON that changes whenever the documents may have changed."""


def name_fraction(name: str) -> float:
    """Return a number in [0, 1) that follows from the hash of a document's name."""
    return int.from_bytes(name_digest(name)[:8], "big") / 2**64


def name_digest(name: str) -> bytes:
    """Return the SHA-256 of a document's name, which may hold bytes that are not UTF-8."""
    return hashlib.sha256(os.fsencode(name)).digest()


@dataclass
class CountingSource:
    """A source that resumes by skipping as many documents as were yielded before."""

    _done: int = field(default=0, init=False)

    def _texts(self) -> Iterator[Text]:
        """Yield all documents; subclasses override it."""
        yield from ()

    def documents(self, state: Any = None) -> Iterator[Text]:
        """Yield all documents, or those after `state`, the number of documents to skip (None: 0).

        Skipped documents are read all the same.
        """
        self._done = int(state or 0)
        for text in itertools.islice(self._texts(), self._done, None):
            self._done += 1
            yield text

    def state(self) -> Any:
        """Return the number of documents yielded so far."""
        return self._done

    def read_share(self) -> float | None:
        """Return the share of the text that was read, 0 to 1; None if its size is unknown."""
        return None


@dataclass
class StdlibSource(CountingSource):
    """Documents of the Python standard library: its source files, and its help topics.

    The folders and files of STDLIB_SKIP are left out, among them tests, idlelib and site-packages. Documents are
    divided into the splits train, validation and heldout by name and length.
    """

    def _texts(self) -> Iterator[Text]:
        """Yield each source file and each help topic, with its split (train, validation or heldout).

        Files are sorted by path. Help topics come in the place of pydoc_data/topics.py among them, which itself is no
        document. Files in STDLIB_SKIP (tests, idlelib and more) are left out. Invalid UTF-8 is replaced.

        Raises:
            MachineError: This Python has no source files.
        """
        root = self._root()
        for path in self._paths():
            parts = path.relative_to(root).parts
            if parts == ("pydoc_data", "topics.py"):
                yield from _help_topics(path)
            else:
                yield _stdlib_text("/".join(parts), path.read_text(encoding="utf-8", errors="replace"))

    def _root(self) -> Path:
        """Return the folder of the standard library.

        Raises:
            MachineError: This Python has no source files there.
        """
        root = Path(sysconfig.get_paths()["stdlib"])
        if not (root / "argparse.py").is_file():
            raise MachineError(
                f"this Python has no standard library sources under {root}; use `data.corpus: files` with your own text"
            )
        return root

    def _paths(self) -> Iterator[Path]:
        """Yield the source files (*.py) of the standard library, sorted by path, without those to skip."""
        paths = []
        for folder, folders, files in os.walk(self._root()):
            # never into site-packages, which may hold a hundred times as many files
            folders[:] = [name for name in folders if _is_stdlib_file(name)]
            paths += [Path(folder, name) for name in files if name.endswith(".py") and _is_stdlib_file(name)]
        yield from sorted(paths)

    def key(self) -> Any:
        """Return a list of the interpreter's version, the folder, and a hash of its files' names, sizes and times."""
        return [sys.version, *listing_key(self._root(), list(self._paths()))]


def _is_stdlib_file(name: str) -> bool:
    """Return True if a file or folder of that name is read."""
    # _sysconfigdata and config-* describe one machine's build, not the language
    return name not in STDLIB_SKIP and not name.startswith(("_sysconfigdata", "config-"))


def _stdlib_text(name: str, text: str) -> Text:
    """Return a document of the standard library in the split that its name and length decide.

    It is held out if its fraction (`name_fraction`) is below 0.25 and it has at least 20,000 characters
    (STDLIB_HELDOUT_MIN_BYTES). Else it validates if the fraction is below 0.08.
    """
    number = name_fraction(name)
    if number < 0.25 and len(text) >= STDLIB_HELDOUT_MIN_BYTES:
        return Text(name, text, "heldout")
    return Text(name, text, "validation" if number < 0.08 else "train")


def _help_topics(path: Path) -> Iterator[Text]:
    """Yield the help topics in the dictionary of `pydoc_data/topics.py`, sorted by name, each as `help/<topic>`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield _stdlib_text(f"help/{topic}", text)


def listing_key(root: Path, paths: list[Path]) -> list[Any]:
    """Return a JSON key that changes with the names, sizes and modification times of files.

    It is a list of the root's path and a SHA-256 in hex, in which the order of the files counts.

    Args:
        root: Folder to which names are relative, or the only file.
        paths: The files.

    Raises:
        OSError: A file does not exist.
    """
    facts = []
    for path in paths:
        stat = path.stat()
        name = path.relative_to(root).as_posix() if path != root else path.name
        facts.append([name, stat.st_size, stat.st_mtime_ns])
    return [str(root), hashlib.sha256(json.dumps(facts).encode()).hexdigest()]


@dataclass
class ReadPosition:
    """Position in the files of a source, in stored (compressed) bytes."""

    total_bytes: int
    read_bytes: int = 0
    """Bytes of the files that were read to their end."""
    tell: Callable[[], int] = lambda: 0
    """Function that returns the bytes read of the current file."""


@dataclass
class FileSource(CountingSource):
    """Documents of a folder or file: text files, JSON lines and Parquet; the first two also as .gz, .xz or .zst."""

    root: Path = Path()
    """Folder or file."""
    setting: str = "data.path"
    """Name of the setting that gives the root, for error messages."""
    column: str = DEFAULT_COLUMN
    """Field of JSON lines and column of Parquet that holds the text."""
    _position: ReadPosition | None = field(default=None, init=False)

    def read_share(self) -> float | None:
        """Return the share of the bytes of all files that was read, 0 to 1; None before the first document."""
        at = self._position
        return None if at is None else (at.read_bytes + at.tell()) / max(1, at.total_bytes)

    def paths(self) -> list[Path]:
        """Return the files to read, of all subfolders too, sorted by path.

        They are those that end as READ_FILES says, ignoring case. A root that is a file must end so, too.

        Raises:
            CorpusError: The root does not exist or holds no readable file.
        """
        if not self.root.exists():
            raise CorpusError(f"{self.setting}: {self.root} does not exist")
        files = sorted(p for p in self.root.rglob("*") if p.is_file()) if self.root.is_dir() else [self.root]
        readable = [path for path in files if _kind(path).endswith((*TEXT_SUFFIXES, *RECORD_SUFFIXES))]
        if not readable:
            raise CorpusError(f"{self.setting}: {self.root} holds no {READ_FILES} file")
        return readable

    def _texts(self) -> Iterator[Text]:
        """Yield each text file, and each record of the other files, as a document.

        A text file is named by its path relative to the root, a record by that and its number from 1, after a colon.
        Invalid UTF-8 is replaced.

        Raises:
            CorpusError: There is no file, or one cannot be read.
        """
        sizes = {path: path.stat().st_size for path in self.paths()}
        position = self._position = ReadPosition(sum(sizes.values()))
        for path, size in sizes.items():
            name = path.name if path == self.root else path.relative_to(self.root).as_posix()
            kind = _kind(path)
            if kind.endswith(".parquet"):
                yield from _read_parquet(name, path, self.column, position)
            elif kind.endswith(RECORD_SUFFIXES):
                yield from _read_json_lines(name, path, self.column, position)
            else:
                yield Text(name, _read_text_file(path, position))
            position.read_bytes += size
            position.tell = lambda: 0

    def key(self) -> Any:
        """Return a key of the files with their sizes and modification times, and of an unusual column."""
        return [*listing_key(self.root, self.paths()), *([self.column] if self.column != DEFAULT_COLUMN else [])]


def _kind(path: Path) -> str:
    """Return the name of a file in lower case, without the suffix of its compression."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED_SUFFIXES if name.endswith(suffix)), "")
    kind = name.removesuffix(packed)
    return name if kind.endswith(".parquet") else kind


def _read_text_file(path: Path, position: ReadPosition) -> str:
    """Return the contents of a text file, decompressed; invalid UTF-8 is replaced. Raises CorpusError."""
    try:
        with _open_text(path, position) as file:
            return file.read()
    except DAMAGE as error:
        raise CorpusError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


DAMAGE = (lzma.LZMAError, zlib.error, EOFError, OSError)
"""Errors of files that are damaged, incomplete or unreadable."""


@contextlib.contextmanager
def _open_text(path: Path, position: ReadPosition) -> Iterator[IO[str]]:
    """Open a file for reading, decompressed if it ends in .xz, .gz or .zst; invalid UTF-8 is replaced.

    While it is open, `position` follows the bytes that were read.
    """
    kind = path.name.lower()
    with path.open("rb") as raw:
        position.tell = raw.tell
        stream: Any = raw
        if kind.endswith(".xz"):
            stream = lzma.open(raw)  # noqa: SIM115 - closed with the text below
        elif kind.endswith(".gz"):
            import gzip

            stream = gzip.open(raw)  # noqa: SIM115
        elif kind.endswith(".zst"):
            import pyarrow

            stream = pyarrow.input_stream(raw, compression="zstd")
        try:
            with io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as text:
                yield text
        finally:
            position.tell = lambda: 0


def _read_json_lines(name: str, path: Path, column: str, position: ReadPosition) -> Iterator[Text]:
    """Yield a document per non-empty line, named `<name>:<line number>`, counted from 1 with empty lines.

    Raises:
        CorpusError: The file cannot be read, or a line is no record with a string in that field.
    """
    number = 0
    try:
        with _open_text(path, position) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_record(f"{name}:{number}", path, number, line, column)
    except DAMAGE as error:
        raise CorpusError(f"{path}: cannot be read after line {number}: {error}") from error


def _parse_record(name: str, path: Path, number: int, line: str, column: str) -> Text:
    """Return the document of one line of JSON; keys other than `column` are ignored.

    Args:
        name: Name of the document.
        path: The file, for messages.
        number: Number of the line, for messages.
        line: The line.
        column: Key of the text.

    Raises:
        CorpusError: The line is no JSON object with a string under that key.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise CorpusError(f"{path}:{number}: not a JSON object: {cause}") from error
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        raise CorpusError(f"{path}:{number}: a record needs the key `{column}` with a string{_text_columns(record)}")
    return Text(name, record[column])


def _text_columns(row: object) -> str:
    """Return the end of a message: the keys of a record that hold strings, which data.column or --column may name."""
    names = [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    return f"; data.column (--column) may name another: {', '.join(names)}" if names else ""


def _read_parquet(name: str, path: Path, column: str, position: ReadPosition) -> Iterator[Text]:
    """Yield a document per row of the column, named `<name>:<row number>`, counted from 1.

    Raises:
        CorpusError: The file is no Parquet, or the column is missing or holds no strings.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise CorpusError(f"{path}: has no column `{column}`; its columns: {', '.join(file.schema_arrow.names)}")
        number, n_rows, size = 0, max(1, file.metadata.num_rows), path.stat().st_size
        position.tell = lambda: number * size // n_rows
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for text in batch.column(0).to_pylist():
                number += 1
                if not isinstance(text, str):
                    raise CorpusError(
                        f"{path}:{number}: the column `{column}` holds {type(text).__name__}, not a string"
                    )
                yield Text(f"{name}:{number}", text)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: cannot be read as Parquet: {error}") from error


# --- the hub ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubSpec:
    """A dataset of the Hugging Face hub."""

    repository: str
    """Repository, OWNER/NAME."""
    config: str | None
    """Config of the dataset; None: its only one."""
    splits: tuple[tuple[str, str | None], ...]
    """Pairs of a split of the dataset and the split of the corpus; None in the second divides by names."""
    tokens: int
    """Approximate number of GPT-2 tokens in all splits, to estimate download sizes."""
    articles: bool = False
    """Rows are lines, and a heading ` = Title = ` begins a document (WikiText)."""
    column: str = DEFAULT_COLUMN
    """Column that holds the text."""
    revision: str | None = None
    """Commit, tag or branch; None: the main branch."""


READERS = ("aiohttp", "datasets", "httpx", "httpx2", "huggingface_hub", "pyarrow", "requests")
"""Packages whose errors mean that a dataset could not be read; not all of them are OSErrors."""


@dataclass
class HubSource:
    """Documents of a dataset, streamed from the hub or read from a local copy of its repository."""

    spec: HubSpec
    """The dataset."""
    path: Path | None = None
    """Local copy; None streams from the hub."""
    setting: str = "data.path"
    """Name of the setting that gives a local copy, for error messages."""
    _split: int = field(default=0, init=False)
    """Index of the current split."""
    _yielded: int = field(default=0, init=False)
    """Documents of the current split that were yielded."""
    _rows: Any = field(default=None, init=False)
    """Reader of the current split."""

    def documents(self, state: Any = None) -> Iterator[Text]:
        """Yield all documents, or those after `state`, split by split in the order of the spec.

        A document is named `<split of the dataset>/<number>`, counted from 0 in each split. Its split is that of the
        spec, which can be None.

        Args:
            state: Result of `state`; None starts at the beginning.

        Raises:
            MachineError: The hub cannot be reached.
            CorpusError: The local copy, or a row, cannot be read.
        """
        state = state or {"split": 0, "given": 0, "rows": None}
        self._yielded = state["given"]
        for split in range(state["split"], len(self.spec.splits)):
            name, corpus_split = self.spec.splits[split]
            self._split, self._rows = split, self._open_split(name)
            if split == state["split"] and state["rows"] is not None:
                self._rows.load_state_dict(state["rows"])
            texts = self._texts(name)
            for text in articles(texts) if self.spec.articles else texts:
                number = self._yielded
                self._yielded += 1
                yield Text(f"{name}/{number}", text, corpus_split)
            self._yielded = 0

    def state(self) -> Any:
        """Return the position of the last iterator of `documents`, or None for articles.

        It has the index of the split ("split"), the documents yielded from it ("given") and the reader's own state
        ("rows"). Articles cannot be resumed, because they are joined from rows.
        """
        if self.spec.articles:
            return None
        return {"split": self._split, "given": self._yielded, "rows": self._rows.state_dict()}

    def read_share(self) -> float | None:
        """Return None: the size of a stream is unknown."""
        return None

    def _texts(self, split: str) -> Iterator[str]:
        """Yield the text of each row of the current split.

        Args:
            split: Name of the split, for the message.

        Raises:
            MachineError: The hub cannot be reached.
            CorpusError: The local copy cannot be read, or a row has no string in the column.
        """
        try:
            for row in self._rows:
                if not isinstance(row.get(self.spec.column), str):
                    dataset = self.path or self.spec.repository
                    raise CorpusError(
                        f"{dataset}: split {split} has a row whose column `{self.spec.column}` holds no string"
                        f"{_text_columns(row)}"
                    )
                yield row[self.spec.column]
        except Exception as error:
            if not is_external_error(error):
                raise
            raise self._unreachable(error) from error

    def _open_split(self, split: str) -> Any:
        """Return a streaming reader of a split. Turns off the logs and the progress bars of `datasets` and the hub in this process.

        Raises:
            MachineError: The hub cannot be reached.
            CorpusError: The local copy cannot be read.
        """
        import datasets

        # this program reports errors itself, so the library must not log them
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        datasets.disable_progress_bars()
        dataset, config = self._dataset_arguments()
        try:
            pinned = {"revision": self.spec.revision} if self.path is None and self.spec.revision else {}
            return datasets.load_dataset(dataset, config, split=split, streaming=True, **pinned)
        except Exception as error:
            if not is_external_error(error):
                raise
            raise self._unreachable(error) from error

    def _dataset_arguments(self) -> tuple[str, str | None]:
        """Return (path or repository, config) for `datasets.load_dataset`.

        A local copy may be the complete repository or the files of one config. For a copy whose README.md declares the
        config it is (copy, config); for any other the config's own folder, or else the copy, and None.
        """
        if self.path is None:
            return self.spec.repository, self.spec.config
        config = self.spec.config
        if config is None:
            return str(self.path), None
        card = self.path / "README.md"
        config_line = rf"""^\W*config_name:\s*['"]?{re.escape(config)}['"]?\s*$"""
        if card.is_file() and re.search(config_line, card.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            return str(self.path), config
        # repositories keep a config's files under its name, FineWeb-Edu sample-10BT under sample/10BT
        folders = (self.path / name for name in (config, config.replace("-", "/", 1)))
        return str(next((folder for folder in folders if folder.is_dir()), self.path)), None

    def _unreachable(self, error: Exception) -> SweepError:
        """Return the exception for a failed read: CorpusError for a local copy, MachineError for the hub.

        It is not raised here.
        """
        cause = " ".join(str(error).split())[:200]
        if self.path is not None:
            return CorpusError(
                f"{self.setting}: {self.path} cannot be read as a copy of {self.spec.repository}: {cause}"
            )
        return MachineError(
            f"{self.spec.repository} cannot be read from the Hugging Face hub ({type(error).__name__}: {cause}); "
            f"run again to continue, or set {self.setting} to a folder with a copy of it"
        )

    def key(self) -> Any:
        """Return [repository, config], or for a local copy a key of its path and its files' names, sizes and times.

        Unusual columns, revisions and splits follow.

        Raises:
            CorpusError: The local copy is no folder.
        """
        chosen = {"column": self.spec.column, "revision": self.spec.revision, "split": self.spec.splits[0][0]}
        usual = {"column": DEFAULT_COLUMN, "revision": None, "split": "train"}
        unusual = [{name: value} for name, value in chosen.items() if value != usual[name]]
        if self.path is None:
            return [self.spec.repository, self.spec.config, *unusual]
        if not self.path.is_dir():
            raise CorpusError(f"{self.setting}: {self.path} is not a folder with a copy of {self.spec.repository}")
        files = sorted(path for path in self.path.rglob("*") if path.is_file() and ".cache" not in path.parts)
        return [*listing_key(self.path, files), *unusual]


def is_external_error(error: Exception) -> bool:
    """Return True if a disk, a network or a file in another format caused the error, rather than this program.

    That is any OSError or ValueError, and any exception that aiohttp, datasets, httpx, httpx2, huggingface_hub, pyarrow
    or requests (READERS) defines.
    """
    return isinstance(error, (OSError, ValueError)) or type(error).__module__.partition(".")[0] in READERS


def articles(rows: Iterator[str]) -> Iterator[str]:
    """Yield documents joined from lines; a first-level heading ` = Title = ` begins one and belongs to it.

    Lines are joined as they are. Text before the first heading is a document, too. Blank lines before a document are
    dropped.

    Args:
        rows: Lines, each with its own line end.
    """
    parts: list[str] = []
    for row in rows:
        line = row.strip()
        heading = line.startswith("= ") and line.endswith(" =") and not line.startswith("= =")
        if heading and parts:
            yield "".join(parts)
            parts = []
        if parts or row.strip():
            parts.append(row)
    if parts:
        yield "".join(parts)
