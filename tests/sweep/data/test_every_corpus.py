"""Contract of every registered corpus: fingerprints, batches, damage, and interrupted preparations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mortal
import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora, prepare
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.data.registry import CORPORA
from copies import article, finepdfs, fineweb_edu, prose, published_shard, wikitext
from prepared import prepare_corpus, put, rederived
from refusals import refused

AGAIN = "remove {} and prepare the corpus again"
EVERY = list(CORPORA)
COMPUTED = [name for name in EVERY if CORPORA.load(name).tokenizer is not None]
SMALL = {
    "flipflop": {"length": 12, "train_rows": 50, "validation_rows": 7},
    "mqar": {"length": 34, "train_rows": 50},
    "mad": {"length": 16, "train_rows": 50, "validation_rows": 7},
    "hub": {"dataset": "own/text"},
}


def shards_of(folder: Path) -> Path:
    for name, size in (("x_train_1", 300), ("x_train_2", 200), ("x_val_0", 90)):
        published_shard(folder / f"{name}.bin", [number % 256 for number in range(size)])
    return folder


SOURCES: dict[str, Callable[[Path], Path]] = {
    "files": lambda folder: put(folder, prose(60)),
    "shards": shards_of,
    "fineweb-edu-shards": shards_of,
    "fineweb-edu": lambda folder: fineweb_edu(folder, prose(60)),
    "finepdfs": lambda folder: finepdfs(folder, prose(60)),
    "hub": lambda folder: finepdfs(folder, prose(60)),
    "wikitext-103": lambda folder: wikitext(
        folder, {split: [row for n in range(9) for row in article(f"{n}", f" {split} {n}\n")] for split in ("train", "validation", "test")}
    ),
}  # fmt: skip


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[[str], DataConfig]:
    """Fixture: a function from the name of a corpus to a data section for a small text of it."""

    def ask(name: str) -> DataConfig:
        settings = {name: SMALL[name]} if name in SMALL else {}
        if name in SOURCES:
            path = str(SOURCES[name](tmp_path / "text"))
            return DataConfig(corpus=name, path=path, heldout_tokens=150, settings=settings)
        return DataConfig(corpus=name, settings=settings)

    return ask


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_corpus_fingerprint_follows_tokens_not_folder(
    name: str, config_of: Callable[[str], DataConfig], tmp_path: Path
) -> None:
    data = config_of(name)
    first, second = (prepare_corpus(data, tmp_path / root) for root in "ab")
    assert first.fingerprint == second.fingerprint == prepare.prepare_in_memory(data).fingerprint
    assert first.folder is not None
    assert mortal.contents(tmp_path / "a") == mortal.contents(tmp_path / "b")
    assert corpora.verify(first.folder) == []
    if name not in (*COMPUTED, "stdlib"):
        assert first.fingerprint == rederived(first)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shuffle", [False, True])
def test_corpus_batches_are_disjoint_and_reproducible(
    name: str, shuffle: bool, config_of: Callable[[str], DataConfig], tmp_path: Path
) -> None:
    """Also when reading resumes in the middle, and for any number of rows read at once."""
    data = config_of(name)
    corpus, kind = prepare_corpus(data, tmp_path / "c"), CORPORA.load(name)
    length = kind.row_length(kind.Config.model_validate(data.settings.get(name, {}))) or 7

    def batches(rows: int) -> Batches:
        return Batches(corpus.train, length, rows, 5, shuffle, marks=corpus.train_marks)

    source, wider = batches(2), batches(4)
    steps = min(source.rows, 40) // 4
    read = torch.cat([source.step(step)[0] for step in range(2 * steps)])
    assert torch.equal(read, torch.cat([wider.step(step)[0] for step in reversed(range(steps))][::-1]))
    order = [source.row(index) for index in range(source.rows)]
    assert sorted(order) == list(range(source.rows))
    assert (order == sorted(order)) != shuffle
    inputs, targets = source.step(steps)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    if corpus.train_marks is not None:
        marked = [batches(2).marked(step) for step in range(source.rows // 2)]
        assert sum(int(mask.sum()) for mask in marked if mask is not None) == corpus.train_marks[0][:].sum()


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_corpus_damage_of_any_file_is_detected(
    name: str, config_of: Callable[[str], DataConfig], tmp_path: Path
) -> None:
    corpus = prepare_corpus(config_of(name), tmp_path / "c")
    folder = corpus.folder
    assert folder is not None
    draw = np.random.default_rng(0)
    for path in sorted(path for path in folder.iterdir() if path.stat().st_size > 1024 or path.suffix == ".json"):
        linked, raw = path.resolve(), path.read_bytes()
        # only the used words of a header
        used = [*range(12), *range(1024, len(raw))] if path.suffix == ".bin" else range(len(raw))
        flipped = [
            (at, 1 << int(draw.integers(8)))
            for at in (
                *used[: 2 if name == "stdlib" else 12],
                *draw.choice(used, 1 if name == "stdlib" else 20).tolist(),
            )
        ]
        for changed in (
            raw[:-1],
            raw[: len(raw) // 2],
            *(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :] for at, bit in flipped),
        ):
            linked.write_bytes(changed)
            findings = corpora.verify(folder)
            assert findings, path.name
            assert all(line.startswith(str(folder)) and len(line.splitlines()) == 1 for line in findings)
            assert refused(lambda: corpora.open_verified(tmp_path / "c", corpus.fingerprint)).endswith(
                AGAIN.format(folder)
            )
        linked.write_bytes(raw)
        assert corpora.verify(folder) == []
    (folder / "manifest.json").unlink()
    assert "no prepared corpus" in refused(lambda: open_corpus(tmp_path / "c", corpus.fingerprint))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*SOURCES, *COMPUTED])
def test_corpus_preparation_resumes_to_same_corpus(
    name: str, config_of: Callable[[str], DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt before and after each saved state, one interruption after another."""
    data, root = config_of(name), tmp_path / "c"
    prepare_corpus(data, tmp_path / "undisturbed")
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 9)
    monkeypatch.setattr(prepare, "SYNC_SECONDS", -1.0)
    write, stops = corpora.write_json, []

    def dying(path: Path, value: Any) -> None:
        stops.append(path.name)
        if len(stops) % 2 == 0:
            write(path, value)
        raise KeyboardInterrupt

    monkeypatch.setattr(corpora, "write_json", dying)
    while stops.count("manifest.json") < 2:
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(data, root)
    monkeypatch.setattr(corpora, "write_json", write)
    prepare.prepare(data, root)
    assert len(stops) > {"files": 60, "fineweb-edu": 9, "finepdfs": 9}.get(name, 1)
    assert mortal.contents(root) == mortal.contents(tmp_path / "undisturbed")
    assert not list(root.glob("*.part"))
