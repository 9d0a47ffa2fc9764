"""Token shards: a header of 256 int32 (magic, version, count) and then the tokens as uint16, memory-mapped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import SweepError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4


class ShardError(SweepError):
    """A shard that is missing, cut short or of another kind."""


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Writes `tokens` (one-dimensional, uint16) to `path`, complete or not at all."""
    if tokens.dtype != np.uint16 or tokens.ndim != 1:
        raise ShardError(
            f"{path.name}: a shard takes one row of uint16, got {tokens.dtype} with {tokens.ndim} dimensions"
        )
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = (MAGIC, VERSION, len(tokens))
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with aside.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, memory-mapped, uint16.

    Raises ShardError when the file is missing, is no shard, or holds fewer tokens than its header says.
    """
    if not path.is_file():
        raise ShardError(f"{path}: no such shard; prepare the corpus again")
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if size < HEADER_BYTES or header[0] != MAGIC:
        raise ShardError(f"{path}: not a token shard (expected magic {MAGIC}); prepare the corpus again")
    if header[1] != VERSION:
        raise ShardError(f"{path}: shard version {header[1]}, this program reads version {VERSION}")
    count = int(header[2])
    if size != HEADER_BYTES + 2 * count:
        raise ShardError(
            f"{path}: cut short or overlong, {size} bytes where {count} tokens need {HEADER_BYTES + 2 * count}; prepare the corpus again"
        )
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
