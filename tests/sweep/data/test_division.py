"""Division into splits by tokens: sizes, assignment of documents, resumption, and corpora of older releases."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora, division, prepare
from atma_sweep.sweep.data.builtin.local import OwnFiles
from atma_sweep.sweep.data.division import Division, Pooled
from atma_sweep.sweep.grid.grid import load_grid, shipped
from atma_sweep.sweep.planning import admission as plan_corpora
from copies import prose
from prepared import divided, files, preparation_error, prepare_corpus, put, stream


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size of shards to 1,009 tokens."""
    monkeypatch.setattr("atma_sweep.sweep.data.shards.SHARD_TOKENS", 1009)


def lengths(count: int, seed: int, *, long: int = 400) -> list[int]:
    """Return document sizes of which a few are large, like books among articles."""
    rng = random.Random(seed)
    return [rng.randrange(1, 60) if rng.random() < 0.9 else rng.randrange(long, 4 * long) for _ in range(count)]


def pool(sizes: list[int]) -> list[Pooled]:
    return [Pooled(f"document/{number}", size, None) for number, size in enumerate(sizes)]


def sizes_of(**sizes: Any) -> Division:
    """Return the default division of a corpus, or one with the given sizes."""
    sizes = {"train_tokens": None, "validation_tokens": None, "heldout_documents": None} | sizes
    return Division("files", long_tokens=400, has_foreign_heldout=False, **sizes)


@pytest.mark.parametrize("validation", [None, 1, 500, 3000])
@pytest.mark.parametrize("documents", [None, 0, 5])
def test_division_sizes_are_within_a_document(validation: int | None, documents: int | None) -> None:
    """The validation split exceeds its target by less than one of its documents."""
    for seed in range(8):
        sizes = lengths(300, seed)
        total = sum(sizes)
        splits = sizes_of(validation_tokens=validation, heldout_documents=documents).assign(pool(sizes))
        of_split = {
            name: [size for size, split in zip(sizes, splits, strict=True) if split == name] for name in division.SPLITS
        }
        target = validation or total // 20
        assert target <= sum(of_split["validation"]) < target + max(of_split["validation"])
        assert min(of_split["heldout"], default=400) >= 400
        if documents is not None:
            assert len(of_split["heldout"]) == documents
        else:
            # the next of the long documents, of less than 1,600 tokens, would not fit a quarter, or there are 16
            held = sum(of_split["heldout"])
            assert held <= total / 4
            assert len(of_split["heldout"]) == 16 or held > total / 4 - 1600


def test_division_of_few_large_documents_favours_training() -> None:
    """Manual count: 40 books of 1,000 tokens, of which a quarter is 10 and a twentieth is 2."""
    splits = sizes_of().assign(pool([1000] * 40))
    assert {name: splits.count(name) for name in division.SPLITS} == {"train": 28, "validation": 2, "heldout": 10}


def test_division_of_books_keeps_validation_size() -> None:
    """16 of 63 books of 190,000 tokens are held out, and 2,097,153 of 50.4M tokens validate."""
    rng = random.Random(7)
    sizes = [190_000] * 63 + [rng.randrange(16_000, 48_000) for _ in range(1196)]
    splits = Division("files", 65_601, None, None, None, has_foreign_heldout=False).assign(pool(sizes))
    tokens = {
        name: sum(size for size, split in zip(sizes, splits, strict=True) if split == name) for name in division.SPLITS
    }
    assert splits.count("heldout") == 16
    assert tokens["heldout"] == 16 * 190_000
    assert 2_097_153 <= tokens["validation"] < 2_097_153 + 48_000
    assert tokens["train"] > 0.88 * sum(sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [1, 7, 2000])
@pytest.mark.parametrize("sizes", [
    {}, {"train_tokens": 1}, {"train_tokens": 3001}, {"validation_tokens": 700, "train_tokens": 2000},
    {"validation_tokens": 2000}, {"heldout_documents": 3}, {"heldout_documents": 0, "train_tokens": 5000},
])  # fmt: skip
def test_prepared_splits_match_naive_division(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None, batch: int, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", batch)
    named = {f"{number:03d}.txt": text for number, text in enumerate(prose(100, longest=90))}
    put(tmp_path / "t", list(named.values()), "{:03d}.txt")
    names = {"train_tokens": "train", "validation_tokens": "validation", "heldout_documents": "documents"}
    expected = divided(named, long=200, **{names[name]: size for name, size in sizes.items()})
    corpus = prepare_corpus(files(tmp_path / "t", heldout_tokens=200, **sizes), tmp_path / "c")
    assert stream(corpus) == expected["train"]
    assert [len(shard) for shard in corpus.train[:-1]] == [1009] * (len(corpus.train) - 1)
    assert corpus.validation.tolist() == expected["validation"]
    assert corpus.heldout_names == list(expected["heldout"])
    assert [tokens.tolist() for tokens in corpus.heldout] == list(expected["heldout"].values())
    if "train_tokens" in sizes:
        assert corpus.train_tokens == sizes["train_tokens"]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == sorted([corpus.fingerprint[:16], "requests"])
    assert not list((tmp_path / "c").glob("*/pool*")), "the pool is gone"


# --- rejected sizes and older corpora -----------------------------------------------------------------------------


def test_division_rejects_excessive_validation_tokens(tmp_path: Path) -> None:
    put(tmp_path / "t", ["text", "more text"])
    assert preparation_error(files(tmp_path / "t", validation_tokens=15), tmp_path / "c") == (
        "corpus 'files' has 15 tokens besides the held-out documents, and data.validation_tokens requests 15, "
        "which leaves none for training: lower it, or add text"
    )
    corpus = prepare_corpus(files(tmp_path / "t", validation_tokens=5), tmp_path / "c")
    assert (corpus.train_tokens, len(corpus.validation)) == (10, 5)


@pytest.mark.parametrize("corpus", ["stdlib", "shards", "flipflop"])
def test_corpora_with_splits_reject_validation_tokens(tmp_path: Path, corpus: str) -> None:
    data = DataConfig(corpus=corpus, validation_tokens=100)
    assert (
        preparation_error(data, tmp_path / "c")
        == f"data.validation_tokens: corpus {corpus!r} has its own splits; remove data.validation_tokens"
    )


def test_division_keeps_splits_of_earlier_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a division comes from a release that divided by names."""
    data, root = files(put(tmp_path / "t", prose(60)), heldout_tokens=150), tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(OwnFiles, "by_tokens", False)
        before = prepare.prepare(data, root, name="mine")
    assert "division" not in json.loads(next(root.glob("requests/*.json")).read_text())["request"]
    assert prepare.prepare(data, root) == before == corpora.find_fingerprint(data, root)
    assert prepare.prepare(DataConfig(corpus="mine"), root) == before
    assert prepare.prepare(data.model_copy(update={"validation_tokens": 500}), root) != before
    assert prepare.prepare(data, tmp_path / "elsewhere") != before


def test_provisional_fingerprints_are_pinned() -> None:
    """The hash of an unprepared corpus leaves out settings that older databases do not have."""
    plain = DataConfig(corpus="files", path="/a")
    assert (
        corpora.provisional_fingerprint(plain)
        == "unprepared:f068ca336ce8d48abb432ecee48b269cf59ae295dd496ad4163f3659e6a3ad1b"
    )
    assert corpora.provisional_fingerprint(
        plain.model_copy(update={"validation_tokens": 5})
    ) != corpora.provisional_fingerprint(plain)


@pytest.mark.thorough
def test_division_defaults_cover_shipped_grids() -> None:
    for name in shipped():
        for cell in load_grid(name).expand(corpora.provisional_fingerprint, lambda corpus: None):
            config = cell.config
            if config.data.corpus in ("flipflop", "mqar"):
                continue
            assert plan_corpora.validation_need(config) <= division.VALIDATION_TOKENS, name
            assert config.eval.documents <= division.HELDOUT_DOCUMENTS, name
