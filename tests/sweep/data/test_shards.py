"""Token shards on disk: layout, resumption after a crash, and rejected files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from atma_sweep.sweep.data.shards import ShardError, SplitWriter, open_shard, read_shard_facts, write_shard
from refusals import refused

TOKENS = np.array([50256, 0, 7, 65535, 300, 1, 2], dtype=np.uint16)
WIDE = np.array([128_001, 0, 65_536, 2**32 - 1, 5], dtype=np.uint32)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "train.bin"
    write_shard(path, TOKENS)
    return path


@pytest.mark.parametrize("tokens", [TOKENS, WIDE, *(tokens[:n] for tokens in (TOKENS, WIDE) for n in (0, 1))])
def test_shard_round_trip(tmp_path: Path, tokens: np.ndarray) -> None:
    write_shard(tmp_path / "s.bin", tokens)
    reopened = open_shard(tmp_path / "s.bin")
    assert (reopened.dtype, reopened.tolist()) == (tokens.dtype, tokens.tolist())
    assert [p.name for p in tmp_path.iterdir()] == ["s.bin"], "nothing is left aside"


def test_shard_layout_matches_published_shards(shard: Path) -> None:
    """The header is 256 int32: magic 20240520, version 1, count, zeros; see docs/reference/mechanisms.md, "Training"."""
    raw = shard.read_bytes()
    assert len(raw) == 1024 + 2 * len(TOKENS)
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, 7]
    assert not header[3:].any()
    assert np.frombuffer(raw[1024:], dtype="<u2").tolist() == TOKENS.tolist()
    assert raw[1024:1026] == bytes([0x50, 0xC4])


def test_shard_layout_of_large_vocabularies(tmp_path: Path) -> None:
    """llm.c writes magic 20240801, version 7, little-endian uint32."""
    write_shard(tmp_path / "s.bin", WIDE)
    raw = (tmp_path / "s.bin").read_bytes()
    assert np.frombuffer(raw[:1024], dtype="<i4")[:4].tolist() == [20240801, 7, 5, 0]
    assert raw[1024:] == b"".join(int(token).to_bytes(4, "little") for token in WIDE)


def test_open_shard_is_read_only_memory_map(shard: Path) -> None:
    tokens = open_shard(shard)
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_write_shard_replaces_file(shard: Path) -> None:
    write_shard(shard, TOKENS[:2])
    assert open_shard(shard).tolist() == [50256, 0]


@pytest.mark.parametrize("tokens", [TOKENS, WIDE, TOKENS[:0]], ids=["uint16", "uint32", "empty"])
def test_shard_facts_match_hash_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: np.ndarray) -> None:
    monkeypatch.setattr("atma_sweep.sweep.data.shards.CHUNK_TOKENS", 3)
    write_shard(tmp_path / "s.bin", tokens)
    facts = read_shard_facts(tmp_path / "s.bin")
    digest = hashlib.sha256((tmp_path / "s.bin").read_bytes()[1024:]).hexdigest()
    largest = max(tokens.tolist(), default=-1)
    assert (facts.file, facts.tokens, facts.largest, facts.sha256) == ("s.bin", len(tokens), largest, digest)


# --- rejected input -----------------------------------------------------------------------------------------------


FOREIGN = "not a token shard (expected magic 20240520 or 20240801)"
SIZE = "truncated or too long: {} bytes, but {} tokens need {}"


def with_header(raw: bytes, **fields: int) -> bytes:
    header = np.frombuffer(raw[:1024], dtype="<i4").copy()
    for index, name in enumerate(("magic", "version", "count")):
        header[index] = fields.get(name, header[index])
    return header.tobytes() + raw[1024:]


@pytest.mark.parametrize(("change", "what"), [
    (lambda raw: raw[:-3], SIZE.format(1035, 7, 1038)), (lambda raw: raw + b"\0", SIZE.format(1039, 7, 1038)),
    (lambda raw: with_header(raw, count=6), SIZE.format(1038, 6, 1036)),
    (lambda raw: with_header(raw, count=-1), SIZE.format(1038, -1, 1022)),
    (lambda raw: with_header(raw, count=8), SIZE.format(1038, 8, 1040)),
    (lambda raw: b"", FOREIGN), (lambda raw: raw[:3], FOREIGN), (lambda raw: raw[:1023], FOREIGN),
    (lambda raw: with_header(raw, magic=20240802), FOREIGN),
    (lambda raw: with_header(raw, version=2), "shard version 2, this program reads version 1"),
    # uint16 tokens under the header of uint32 are half as many bytes as they should be
    (lambda raw: with_header(raw, magic=20240801), "shard version 1, this program reads version 7"),
    (lambda raw: with_header(raw, magic=20240801, version=7), SIZE.format(1038, 7, 1052)),
    (None, "cannot be read: No such file or directory"),
])  # fmt: skip
def test_open_shard_rejects_foreign_files(shard: Path, change: Callable[[bytes], bytes] | None, what: str) -> None:
    raw = shard.read_bytes()
    shard.unlink()
    if change is not None:
        shard.write_bytes(change(raw))
    assert refused(lambda: open_shard(shard), ShardError) == f"{shard}: {what}"
    assert refused(lambda: open_shard(shard.parent), ShardError) == f"{shard.parent}: cannot be read: Is a directory"


@pytest.mark.parametrize(("tokens", "what"), [
    (np.zeros(3, dtype=np.int64), "a shard takes uint16 or uint32 tokens, got int64"),
    (np.zeros(3, dtype=">u2"), "a shard takes uint16 or uint32 tokens, got >u2"),
    (np.zeros(3, dtype=np.uint8), "a shard takes uint16 or uint32 tokens, got uint8"),
    (np.zeros((2, 2), dtype=np.uint16), "s.bin: a shard takes one row of tokens, got 2 dimensions"),
])  # fmt: skip
def test_write_shard_rejects_unsuitable_arrays(tmp_path: Path, tokens: np.ndarray, what: str) -> None:
    assert refused(lambda: write_shard(tmp_path / "s.bin", tokens), ShardError) == what
    assert list(tmp_path.iterdir()) == []


# --- writing a split ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atma_sweep.sweep.data.shards.SHARD_TOKENS", 10)


PARTS = [np.arange(start, start + size, dtype=np.uint16) for start, size in [(0, 3), (3, 0), (3, 25), (28, 2), (30, 7)]]
"""37 tokens: shards of 10, 10, 10 and 7."""


def contents(folder: Path) -> dict[str, list[int]]:
    return {path.name: open_shard(path).tolist() for path in sorted(folder.iterdir())}


def joined(folder: Path) -> list[int]:
    return [token for shard in contents(folder).values() for token in shard]


def test_split_writer_cuts_into_shards(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", np.uint16)
    for part in PARTS:
        writer.append(part)
    written_shards = writer.close()
    cut = {f"train_{n:06d}.bin": list(range(10 * n, min(37, 10 * n + 10))) for n in range(4)}
    assert contents(tmp_path) == cut
    assert [(shard.file, shard.tokens, shard.largest) for shard in written_shards] == [
        (name, len(tokens), tokens[-1]) for name, tokens in cut.items()
    ]
    assert written_shards == [read_shard_facts(tmp_path / shard.file) for shard in written_shards]
    assert writer.tokens == 37


@pytest.mark.parametrize(("tokens", "sizes"), [(0, [0]), (10, [10]), (20, [10, 10]), (1, [1])])
def test_split_writer_removes_empty_last_shard(tmp_path: Path, tokens: int, sizes: list[int]) -> None:
    writer = SplitWriter(tmp_path, "validation", np.uint16)
    writer.append(np.arange(tokens, dtype=np.uint16))
    assert [shard.tokens for shard in writer.close()] == sizes
    assert [len(shard) for shard in contents(tmp_path).values()] == sizes


@pytest.mark.parametrize("n_saved", range(len(PARTS) + 1))
@pytest.mark.parametrize("lost", [0, 1, 2, 5])
def test_split_writer_resumes_from_any_state(tmp_path: Path, n_saved: int, lost: int) -> None:
    writer = SplitWriter(tmp_path, "train", np.uint16)
    for part in PARTS[:n_saved]:
        writer.append(part)
    state = json.loads(json.dumps(writer.sync()))
    for part in PARTS[n_saved : n_saved + lost]:
        writer.append(part + 1000)
    writer.sync()
    again = SplitWriter(tmp_path, "train", np.uint16, state=state)
    assert again.tokens == sum(map(len, PARTS[:n_saved]))
    for part in PARTS[n_saved:]:
        again.append(part)
    written_shards = again.close()
    assert joined(tmp_path) == list(range(37))
    assert [shard.tokens for shard in written_shards] == [10, 10, 10, 7]
    assert written_shards == [read_shard_facts(tmp_path / shard.file) for shard in written_shards]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_split_writer_rejects_lost_data(tmp_path: Path, damage: str) -> None:
    writer = SplitWriter(tmp_path, "train", np.uint16)
    writer.append(TOKENS)
    state = writer.sync()
    path = tmp_path / "train_000000.bin"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    assert refused(lambda: SplitWriter(tmp_path, "train", np.uint16, state=state), ShardError) == (
        f"{path}: shorter than the saved progress says; remove {tmp_path} and prepare the corpus again"
    )


def test_split_writer_rejects_wrong_dtype(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="a shard takes uint16 or uint32 tokens, got int32"):
        SplitWriter(tmp_path, "train", np.int32)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
