"""Token shards: a header of 256 int32 (magic, version, count), then the tokens, memory-mapped.

The magic tells two formats apart. 20240520, version 1, holds uint16: the shards of modded-nanogpt and llm.c for GPT-2.
20240801, version 7, holds uint32: llm.c's shards for larger vocabularies.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import SweepError
from .sources import CorpusError, listing_key

FORMATS: dict[int, tuple[int, str]] = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and token type of each magic."""
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
SHARD_TOKENS = 100_000_000
"""Tokens of a full shard."""
CHUNK_TOKENS = 1 << 24
"""Tokens that are read at a time."""


class ShardError(SweepError):
    """Exception for a shard that is missing, truncated or in another format."""


@dataclass(frozen=True)
class ShardFacts:
    """Facts of one shard, as a manifest stores them."""

    file: str
    """File name within the folder of the corpus."""
    tokens: int
    """Number of tokens."""
    largest: int
    """Largest token id; -1 without tokens."""
    sha256: str
    """SHA-256 in hex of the tokens as little-endian bytes, without the header."""


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return the header of a shard, 1024 bytes: magic, version, number of tokens, as int32.

    Magic and version are 20240520 and 1 for two bytes a token, 20240801 and 7 for four. The rest is zeros; all numbers
    are little-endian.
    """
    magic, version = next(
        (magic, version) for magic, (version, kind) in FORMATS.items() if np.dtype(kind).itemsize == dtype.itemsize
    )
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = (magic, version, count)
    return header.tobytes()


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype not in (np.uint16, np.uint32):
        raise ShardError(f"a shard takes uint16 or uint32 tokens, got {dtype}")


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write a shard atomically: through a synced temporary file that replaces it.

    Args:
        path: File to write.
        tokens: Tokens, one-dimensional, uint16 or uint32.

    Raises:
        ShardError: `tokens` has another type or number of dimensions.
    """
    _check_dtype(tokens.dtype)
    if tokens.ndim != 1:
        raise ShardError(f"{path.name}: a shard takes one row of tokens, got {tokens.ndim} dimensions")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    with temporary.open("wb") as file:
        file.write(_header(tokens.dtype, len(tokens)))
        file.write(tokens.astype(tokens.dtype.newbyteorder("<")).tobytes())
        _sync(file)
    os.replace(temporary, path)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def open_shard(path: Path) -> np.ndarray:
    """Return the tokens of a shard, uint16 or uint32 [n], memory-mapped for reading only.

    A shard without tokens gives a plain empty array.

    Raises:
        ShardError: The file is missing, is no shard, or holds another number of tokens than its header says.
    """
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror}") from error
    if size < HEADER_BYTES or int(header[0]) not in FORMATS:
        magics = " or ".join(map(str, FORMATS))
        raise ShardError(f"{path}: not a token shard (expected magic {magics})")
    version, kind = FORMATS[int(header[0])]
    if header[1] != version:
        raise ShardError(f"{path}: shard version {header[1]}, this program reads version {version}")
    count = int(header[2])
    need = HEADER_BYTES + np.dtype(kind).itemsize * count
    if size != need:
        raise ShardError(f"{path}: truncated or too long: {size} bytes, but {count} tokens need {need}")
    if count == 0:
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", offset=HEADER_BYTES, shape=(count,))


def read_shard_facts(path: Path) -> ShardFacts:
    """Read a complete shard once and return its facts, with the name of the file alone.

    Raises:
        ShardError: The shard cannot be opened.
    """
    tokens, largest, digest = open_shard(path), -1, hashlib.sha256()
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS])
        largest = max(largest, int(chunk.max()))
        digest.update(chunk.tobytes())
    return ShardFacts(path.name, len(tokens), largest, digest.hexdigest())


class SplitWriter:
    """Resumable writer of a split to files `<folder>/<split>_<number>.bin` of 100 million tokens each."""

    def __init__(
        self, folder: Path, split: str, dtype: type[np.unsignedinteger[Any]], *, state: dict[str, Any] | None = None
    ) -> None:
        """Open the current shard; remove later shards and cut off tokens that were written after `state`.

        Args:
            folder: Existing folder of the shards.
            split: Name of the split.
            dtype: Type of the tokens, uint16 or uint32.
            state: Result of the last `sync`; None starts anew and removes the split's other shards.

        Raises:
            ShardError: The type is another, or a file is missing or shorter than `state` says.
        """
        self.folder, self.split = folder, split
        self.dtype = np.dtype(dtype).newbyteorder("<")
        _check_dtype(np.dtype(dtype))
        state = state or {"shards": [], "open": 0}
        self.shards = [ShardFacts(**shard) for shard in state["shards"]]
        self.tokens = sum(shard.tokens for shard in self.shards) + state["open"]
        self._count = state["open"]
        for path in folder.glob(f"{split}_*.bin"):
            if path.name > self._path().name:
                path.unlink()
        self._file: IO[bytes] = self._open_shard()

    def _path(self) -> Path:
        return self.folder / f"{self.split}_{len(self.shards):06d}.bin"

    def _open_shard(self) -> IO[bytes]:
        """Open the current shard for appending, at the resumed position or with a placeholder header.

        Raises:
            ShardError: The file is shorter than the saved state says.
        """
        path = self._path()
        if self._count == 0:
            file: IO[bytes] = path.open("w+b")
            file.write(_header(self.dtype, 0))
            return file
        need = HEADER_BYTES + self._count * self.dtype.itemsize
        if not path.is_file() or path.stat().st_size < need:
            raise ShardError(
                f"{path}: shorter than the saved progress says; remove {self.folder} and prepare the corpus again"
            )
        file = path.open("r+b")
        file.truncate(need)
        file.seek(0, os.SEEK_END)
        return file

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens; each full shard is closed, hashed and followed by a new one.

        Nothing is synced before a shard is full or `sync` is called.

        Args:
            tokens: Tokens, one-dimensional; converted to the writer's type without a check of their size.
        """
        while len(tokens):
            free = SHARD_TOKENS - self._count
            self._file.write(tokens[:free].astype(self.dtype).tobytes())
            written = min(free, len(tokens))
            self._count += written
            self.tokens += written
            tokens = tokens[free:]
            if self._count == SHARD_TOKENS:
                self._close_shard()
                self._file = self._open_shard()

    def _close_shard(self) -> None:
        """Write the final header of the current shard, sync and close it, and record its facts."""
        self._file.seek(0)
        self._file.write(_header(self.dtype, self._count))
        _sync(self._file)
        self._file.close()
        self.shards.append(read_shard_facts(self._path()))
        self._count = 0

    def sync(self) -> dict[str, Any]:
        """Sync the current shard to the disk and return the state from which to resume, as JSON.

        It has the facts of the full shards ("shards") and the number of tokens in the current one ("open").
        """
        _sync(self._file)
        return {"shards": [asdict(shard) for shard in self.shards], "open": self._count}

    def close(self) -> list[ShardFacts]:
        """Close the last shard and return the facts of all shards, in order, at least one.

        An empty last shard is removed unless it is the only one.
        """
        if self._count == 0 and self.shards:
            self._file.close()
            self._path().unlink()
        else:
            self._close_shard()
        return self.shards


# --- ready-made shards --------------------------------------------------------------------------------------------


MARKS = ".marks.bin"
"""Suffix of the shard of marks next to a shard of tokens."""


def shard_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return (training shards, validation shards) anywhere under a folder, each sorted by path.

    Training shards are the *.bin files with "train" in their names, validation shards those with "val" but not "train".
    Other files and shards of marks are ignored.

    Raises:
        CorpusError: The folder is missing, or has no shard of one of the two.
    """
    if not folder.is_dir():
        raise CorpusError(f"data.path: {folder} is not a folder with token shards")
    files = [path for path in sorted(folder.rglob("*.bin")) if not path.name.endswith(MARKS)]
    train = [path for path in files if "train" in path.name]
    validation = [path for path in files if "val" in path.name and "train" not in path.name]
    for shards, kind in ((train, "train"), (validation, "val")):
        if not shards:
            raise CorpusError(
                f"data.path: {folder} holds no *{kind}*.bin; training and validation shards are recognised by name"
            )
    return train, validation


def find_mark_shards(shards: Sequence[Path]) -> list[Path]:
    """Return the shard of marks next to each shard of tokens, in order; an empty list if no shard has one.

    Raises:
        CorpusError: Only some of the shards have marks.
    """
    marks = [path.with_suffix(MARKS) for path in shards]
    missing = [path for path in marks if not path.is_file()]
    if missing and len(missing) < len(marks):
        raise CorpusError(
            f"data.path: {missing[0]} is missing, but other shards have marks; add marks for all shards or none"
        )
    return [] if missing else marks


def shards_key(folder: Path) -> list[Any]:
    """Return a JSON key that changes with the names, sizes and modification times of a folder's shards and marks.

    It is a list of the folder's path and a hash, as `listing_key` returns it.

    Raises:
        CorpusError: The folder lacks shards of a split, or marks of some shards.
    """
    train, validation = shard_files(folder)
    shards = [*train, *validation]
    return listing_key(folder, [*shards, *find_mark_shards(shards)])
