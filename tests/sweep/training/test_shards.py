"""Token shards on disk: their layout, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from atma_sweep.sweep.training.shards import ShardError, open_shard, write_shard

TOKENS = np.array([50256, 0, 7, 65535, 300, 1, 2], dtype=np.uint16)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    write_shard(path, TOKENS)
    return path


def test_round_trip(shard: Path) -> None:
    found = open_shard(shard)
    assert (found.dtype, found.tolist()) == (np.uint16, TOKENS.tolist())
    assert [p.name for p in shard.parent.iterdir()] == ["train.bin"], "nothing is left aside"


@pytest.mark.parametrize("count", [0, 1, 513])
def test_round_trip_of_odd_sizes(tmp_path: Path, count: int) -> None:
    write_shard(tmp_path / "s.bin", np.arange(count, dtype=np.uint16))
    assert open_shard(tmp_path / "s.bin").tolist() == list(range(count))


def test_layout_is_that_of_the_published_shards(shard: Path) -> None:
    """256 little-endian int32 (magic 20240520, version 1, count, zeros), then little-endian uint16 (MECHANISMS F)."""
    raw = shard.read_bytes()
    assert len(raw) == 1024 + 2 * len(TOKENS)
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, 7]
    assert not header[3:].any()
    assert np.frombuffer(raw[1024:], dtype="<u2").tolist() == TOKENS.tolist()
    assert raw[1024:1026] == bytes([0x50, 0xC4])


def test_a_shard_is_mapped_not_read_and_not_writable(shard: Path) -> None:
    found = open_shard(shard)
    assert isinstance(found, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_writing_again_replaces(shard: Path) -> None:
    write_shard(shard, TOKENS[:2])
    assert open_shard(shard).tolist() == [50256, 0]


def change(path: Path, at: int, value: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(bytes(raw))


def test_cut_short(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(ShardError, match=r"train\.bin: cut short or overlong, 1035 bytes where 7 tokens need 1038"):
        open_shard(shard)


def test_overlong(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(ShardError, match="1039 bytes where 7 tokens need 1038; prepare the corpus again"):
        open_shard(shard)


def test_cut_inside_the_header(shard: Path) -> None:
    for size in (0, 3, 1023):
        shard.write_bytes(shard.read_bytes()[:size])
        with pytest.raises(ShardError, match="not a token shard"):
            open_shard(shard)


def test_foreign_magic(shard: Path) -> None:
    change(shard, 0, 20240801)
    with pytest.raises(ShardError, match=r"train\.bin: not a token shard \(expected magic 20240520\)"):
        open_shard(shard)


def test_other_version(shard: Path) -> None:
    change(shard, 4, 2)
    with pytest.raises(ShardError, match="shard version 2, this program reads version 1"):
        open_shard(shard)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no such shard; prepare the corpus again"):
        open_shard(tmp_path / "gone.bin")


@pytest.mark.parametrize(("tokens", "what"), [
    (np.zeros(3, dtype=np.int64), "int64 with 1 dimensions"), (np.zeros((2, 2), dtype=np.uint16), "uint16 with 2 dimensions"),
])  # fmt: skip
def test_what_is_no_row_of_uint16_is_not_written(tmp_path: Path, tokens: np.ndarray, what: str) -> None:
    with pytest.raises(ShardError, match=f"a shard takes one row of uint16, got {what}"):
        write_shard(tmp_path / "s.bin", tokens)
    assert list(tmp_path.iterdir()) == []
