"""Corpora of this machine: the user's files and token shards, and the Python standard library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config import DataConfig
from ..corpus_kind import CorpusKind, LogFn
from ..shards import shard_files, shards_key
from ..sources import CorpusError, DocumentSource, FileSource, StdlibSource


class OwnShards(CorpusKind):
    """Token shards under `data.path`."""

    description = (
        "your own token shards under data.path: *train*.bin and *val*.bin with the 256-int32 header; with "
        "train.loss_on: marked, also a *.marks.bin for each, which holds 1 for tokens that count and 0 for others"
    )
    ready = True
    may_mark = True

    @classmethod
    def key(cls, data: DataConfig) -> Any:
        """Return a key of the shard files under `data.path`, as `shards_key` does.

        Raises:
            CorpusError: `data.path` is not set, or its folder lacks shards.
        """
        if not data.path:
            raise CorpusError("data.corpus: shards needs data.path, the folder or file that holds the text")
        return shards_key(Path(data.path))

    @classmethod
    def shards(cls, data: DataConfig, work_folder: Path, log: LogFn) -> tuple[list[Path], list[Path]]:
        """Return (training shards, validation shards) of the folder `data.path`."""
        return shard_files(Path(str(data.path)))


class OwnFiles(CorpusKind):
    """Text files under `data.path`."""

    description = "your own text under data.path: .txt, .md, .rst, .py, .jsonl (also .gz, .xz, .zst) or .parquet, a file or a folder"

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Return a source of one document per file, or per record of a file; the path is not looked at yet.

        Raises:
            CorpusError: `data.path` is not set.
        """
        if not data.path:
            raise CorpusError("data.corpus: files needs data.path, the folder or file that holds the text")
        return FileSource(Path(data.path), column=data.column)


class StandardLibrary(CorpusKind):
    """Source files and help topics of the running Python."""

    description = "the Python standard library's sources and help topics, always available"
    at_hand = True
    by_tokens = False

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Return a source of one document per file and per help topic."""
        return StdlibSource()

    @classmethod
    def lent(cls) -> DocumentSource:
        """Return the standard library's documents for use as held-out text."""
        return StdlibSource()
