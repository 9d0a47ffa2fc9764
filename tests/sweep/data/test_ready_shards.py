"""Ready-made shards: downloaded or given, linked unchanged, and rejected before anything is linked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora, prepare
from atma_sweep.sweep.data.builtin import hub
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.errors import MachineError
from copies import published_shard
from optional_data import optional_data
from prepared import document, preparation_error, prepare_corpus, put, rederived, stream
from refusals import refused


def ready(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(**({"corpus": "shards", "path": str(path), "tokenizer": "bytes"} | settings))


def small_shards(folder: Path, sizes: tuple[int, ...] = (30, 20, 10)) -> Path:
    for number, size in enumerate(sizes, 1):
        published_shard(folder / f"x_train_{number:06d}.bin", np.arange(size) + number)
    published_shard(folder / "x_val_000000.bin", [256, 1, 2, 3])
    return folder


@pytest.mark.parametrize("corpus", ["shards", "fineweb-edu-shards"])
def test_ready_shards_are_linked_unchanged(tmp_path: Path, corpus: str) -> None:
    folder = small_shards(tmp_path / "their shards")
    prepared_corpus = prepare_corpus(ready(folder, corpus=corpus), tmp_path / "c")
    assert [shard.tolist() for shard in prepared_corpus.train] == [
        list(range(n, n + size)) for n, size in ((1, 30), (2, 20), (3, 10))
    ]
    assert prepared_corpus.validation.tolist() == [256, 1, 2, 3]
    assert (prepared_corpus.heldout, prepared_corpus.heldout_names, prepared_corpus.largest) == ([], [], 256)
    assert prepared_corpus.fingerprint == rederived(prepared_corpus)
    placed = sorted((tmp_path / "c" / prepared_corpus.fingerprint[:16]).glob("*.bin"))
    assert [path.name for path in placed] == ["heldout.bin", *(f"train_{n:06d}.bin" for n in range(3)), "validation_000000.bin"]  # fmt: skip
    assert [path.is_symlink() for path in placed] == [False, True, True, True, True], "no second copy of gigabytes"
    assert prepare.prepare(ready(folder, corpus=corpus), tmp_path / "c") == prepared_corpus.fingerprint


@pytest.mark.parametrize(("tokens", "shards"), [(None, 3), (60, 3), (51, 3), (50, 2), (30, 1), (1, 1)])
def test_ready_shards_stop_at_requested_tokens(tmp_path: Path, tokens: int | None, shards: int) -> None:
    prepared_corpus = prepare_corpus(ready(small_shards(tmp_path / "s"), train_tokens=tokens), tmp_path / "c")
    assert len(prepared_corpus.train) == shards


def test_ready_shards_reject_too_few_tokens(tmp_path: Path) -> None:
    assert preparation_error(ready(small_shards(tmp_path / "s"), train_tokens=61), tmp_path / "c") == (
        "corpus 'shards' has 60 training tokens; data.train_tokens requests 61"
    )


def test_ready_shards_with_uint32_tokens(tmp_path: Path) -> None:
    published_shard(tmp_path / "s" / "a_train_0.bin", [50256, 5, 6], wide=True)
    published_shard(tmp_path / "s" / "deep" / "a_val_0.bin", [50256, 7])
    file = str(optional_data("data/gpt2/gpt2.tiktoken"))
    prepared_corpus = prepare_corpus(ready(tmp_path / "s", tokenizer="gpt2", tokenizer_file=file), tmp_path / "c")
    assert [shard.tolist() for shard in [*prepared_corpus.train, prepared_corpus.validation]] == [
        [50256, 5, 6],
        [50256, 7],
    ]
    assert (prepared_corpus.train[0].dtype, prepared_corpus.validation.dtype) == (np.uint32, np.uint16)
    assert prepared_corpus.load_tokenizer().encode("Hello world").tolist() == [15496, 995]


def test_ready_shards_with_heldout_of_second_corpus(tmp_path: Path) -> None:
    put(tmp_path / "long", ["short", "long " * 30])
    data = ready(small_shards(tmp_path / "s"), heldout=str(tmp_path / "long"), heldout_tokens=100)
    prepared_corpus = prepare_corpus(data, tmp_path / "c")
    assert prepared_corpus.heldout_names == ["1.txt"]
    assert [tokens.tolist() for tokens in prepared_corpus.heldout] == [document("long " * 30)]


def damage(path: Path, at: int, value: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("which", ["x_train_000002.bin", "x_val_000000.bin"])
def test_ready_shards_reject_damaged_files(tmp_path: Path, which: str) -> None:
    path = small_shards(tmp_path / "s") / which
    content, count = path.read_bytes(), {"x_train_000002.bin": 20, "x_val_000000.bin": 4}[which]
    mend = "; fetch the file again, or remove it"

    def error_text() -> str:
        return preparation_error(ready(tmp_path / "s"), tmp_path / "c")

    path.write_bytes(content[:-1])
    size = 1024 + 2 * count
    assert error_text() == f"{path}: truncated or too long: {size - 1} bytes, but {count} tokens need {size}{mend}"
    path.write_bytes(content)
    damage(path, 8, count + 1)
    assert error_text() == f"{path}: truncated or too long: {size} bytes, but {count + 1} tokens need {size + 2}{mend}"
    path.write_bytes(b"x" * 2000)
    assert error_text() == f"{path}: not a token shard (expected magic 20240520 or 20240801){mend}"
    path.write_bytes(content)
    damage(path, 4, 2)
    assert error_text() == f"{path}: shard version 2, this program reads version 1{mend}"
    path.write_bytes(content)
    damage(path, 1024, 300 + (1 << 16))
    assert error_text() == (
        f"{path}: holds token 300, but tokenizer bytes has 257 tokens; set data.tokenizer to the one that made the shard"
    )
    path.write_bytes(content)
    assert prepare_corpus(ready(tmp_path / "s"), tmp_path / "c").train_tokens == 60


def test_ready_shards_reject_folder_without_shards(tmp_path: Path) -> None:
    gone, folder = tmp_path / "gone", tmp_path / "s"
    assert preparation_error(ready(gone), tmp_path / "c") == f"data.path: {gone} is not a folder with token shards"
    advice = "; training and validation shards are recognised by name"
    published_shard(folder / "val.bin", [1])
    assert preparation_error(ready(folder), tmp_path / "c") == f"data.path: {folder} holds no *train*.bin{advice}"
    (folder / "val.bin").rename(folder / "train_val.bin")
    assert preparation_error(ready(folder), tmp_path / "c") == f"data.path: {folder} holds no *val*.bin{advice}"
    assert preparation_error(DataConfig(corpus="shards"), tmp_path / "c") == (
        "data.corpus: shards needs data.path, the folder or file that holds the text"
    )


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names requested from the hub; each file is placed in a cache behind a symlink, like the hub's own cache."""
    requested_files: list[str] = []

    def download(repository: str, name: str, *, repo_type: str) -> str:
        assert (repository, repo_type) == ("kjj0/finewebedu10B-gpt2", "dataset")
        requested_files.append(name)
        number = int(name[-10:-4])
        blob = published_shard(tmp_path / "hub" / "blobs" / name, np.arange(20) + number)
        link = tmp_path / "hub" / "snapshots" / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
        return str(link)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return requested_files


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (100, 1), (101, 2), (300, 3)])
def test_hub_shards_are_downloaded_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: list[str], tokens: int, count: int
) -> None:
    monkeypatch.setattr(hub, "SHARD_TOKENS", 100)
    data = DataConfig(corpus="fineweb-edu-shards", train_tokens=tokens)
    if tokens > 20 * count:
        assert "training tokens; data.train_tokens requests" in preparation_error(data, tmp_path / "c")
    else:
        prepare_corpus(data, tmp_path / "c")
    train = [f"finewebedu_train_{n:06d}.bin" for n in range(1, count + 1)]
    assert repository == [*train, "finewebedu_val_000000.bin"]


@pytest.mark.parametrize(("tokens", "count"), [(None, 99), (10**9, 10), (10**9 + 1, 11), (10**12, 99)])
def test_hub_shards_for_a_billion_tokens_are_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: list[str], tokens: int | None, count: int
) -> None:
    def enough(self: Any, shards: Any) -> None:
        raise MachineError("all fetched")

    monkeypatch.setattr(prepare.Preparation, "check_training_tokens", enough)
    assert (
        preparation_error(DataConfig(corpus="fineweb-edu-shards", train_tokens=tokens), tmp_path / "c") == "all fetched"
    )
    assert len(repository) == count + 1


def test_hub_shards_outlive_download_cache(tmp_path: Path, repository: list[str]) -> None:
    corpus = prepare_corpus(DataConfig(corpus="fineweb-edu-shards", train_tokens=20), tmp_path / "c")
    path = tmp_path / "c" / corpus.fingerprint[:16] / "train_000000.bin"
    blob = tmp_path / "hub" / "blobs" / "finewebedu_train_000001.bin"
    assert path.stat().st_ino == blob.stat().st_ino, "no second copy on the same disk"
    assert not path.is_symlink()
    for name in repository:
        (tmp_path / "hub" / "blobs" / name).unlink()
    again = open_corpus(tmp_path / "c", corpus.fingerprint)
    assert [stream(again), again.validation.tolist()] == [list(range(1, 21)), list(range(20))]
    assert corpora.verify(path.parent) == []


def test_hub_shards_are_copied_if_links_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: list[str]
) -> None:
    def fail_link(*arguments: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(prepare.os, "link", fail_link)
    corpus = prepare_corpus(DataConfig(corpus="fineweb-edu-shards", train_tokens=20), tmp_path / "c")
    path = tmp_path / "c" / corpus.fingerprint[:16] / "train_000000.bin"
    assert path.stat().st_nlink == 1
    assert stream(corpus) == list(range(1, 21))


@pytest.mark.parametrize("error", [ConnectionError("x"), RuntimeError("CAS service error")])
def test_hub_shards_report_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*arguments: Any, **more: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert refused(
        lambda: prepare.prepare(DataConfig(corpus="fineweb-edu-shards", train_tokens=1), tmp_path / "c"), MachineError
    ) == (
        f"kjj0/finewebedu10B-gpt2/finewebedu_train_000001.bin cannot be downloaded ({type(error).__name__}); run "
        "again to continue, or set data.path to a folder with the shards"
    )
