"""Token shards that others made: found by their names, with the marks that lie beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .sources import CorpusError, listing_key

MARKS = ".marks.bin"
"""How a shard of marks ends that lies beside a shard of tokens."""


def shard_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and validation shards under a folder, by name. Raises CorpusError when one kind is missing."""
    if not folder.is_dir():
        raise CorpusError(f"data.path: {folder} is no folder with token shards")
    files = [path for path in sorted(folder.rglob("*.bin")) if not path.name.endswith(MARKS)]
    train = [path for path in files if "train" in path.name]
    validation = [path for path in files if "val" in path.name and "train" not in path.name]
    for found, what in ((train, "train"), (validation, "val")):
        if not found:
            raise CorpusError(f"data.path: {folder} holds no *{what}*.bin; shards are told apart by their names")
    return train, validation


def marks_of(shards: Sequence[Path]) -> list[Path]:
    """The shard of marks beside each shard of tokens; none at all when no shard has one.

    Raises CorpusError when some have one and some do not.
    """
    marks = [path.with_suffix(MARKS) for path in shards]
    missing = [path for path in marks if not path.is_file()]
    if missing and len(missing) < len(marks):
        raise CorpusError(f"data.path: {missing[0]} is missing, and other shards have marks; mark all of them or none")
    return [] if missing else marks


def key_of(folder: Path) -> list[Any]:
    """Changes with the names, sizes and times of change of the folder's shards and their marks."""
    train, validation = shard_files(folder)
    shards = [*train, *validation]
    return listing_key(folder, [*shards, *marks_of(shards)])
