"""Prepared corpora: what is in them, that they never change, how they are found again, and what damage is noticed."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora, prepare
from atma_sweep.sweep.data.corpora import Corpus, CorpusUnknown, entropies, open_corpus
from atma_sweep.sweep.data.registry import CORPORA, every_kind
from atma_sweep.sweep.grid.grid import load_grid
from copies import prose, published_shard
from prepared import EOT, document, files, joined, number_of, parts, put, stream, word_level
from refusals import refused


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("corpora")
    return open_corpus(root, prepare.prepare(DataConfig(), root))


@pytest.fixture(scope="module")
def texts() -> dict[str, tuple[str, str]]:
    """Name -> (split, text) of the embedded corpus, in its order, gathered without the package."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idlelib", "site-packages", "dist-packages", "ensurepip", "sitecustomize.py"}
    names = []
    for folder, _, found in os.walk(root):
        for name in found:
            path = (Path(folder) / name).relative_to(root).parts
            machine = any(part.startswith(("_sysconfigdata", "config-")) for part in path)
            if name.endswith(".py") and not machine and not left_out & set(path):
                names.append(path)
    gathered: dict[str, str] = {}
    for path in sorted(names):
        text = root.joinpath(*path).read_text(encoding="utf-8", errors="replace")
        if path == ("pydoc_data", "topics.py"):
            topics = ast.literal_eval(text[text.index("{") :])
            gathered |= {f"help/{topic}": topics[topic] for topic in sorted(topics)}
        else:
            gathered["/".join(path)] = text
    splits = {}
    for name, text in gathered.items():
        held = number_of(name) < 0.25 and len(text) >= 20_000
        splits[name] = ("heldout" if held else "validation" if number_of(name) < 0.08 else "train", text)
    return splits


# --- the embedded corpus ------------------------------------------------------------------------------------------


def test_the_embedded_corpus_keeps_the_fingerprint_of_its_text(
    stdlib: Corpus, texts: dict[str, tuple[str, str]]
) -> None:
    """Cells of every database carry it: SHA-256 over the JSON of layout, tokenizer, hashes, names and ends."""
    splits = {
        name: {title: document(text) for title, (split, text) in texts.items() if split == name}
        for name in ("train", "validation", "heldout")
    }
    order = sorted(splits["heldout"], key=lambda name: hashlib.sha256(name.encode()).digest())
    splits["heldout"] = {name: splits["heldout"][name] for name in order}
    known: dict[str, Any] = {
        "layout": 1,
        "tokenizer": "bytes",
        "heldout_names": order,
        "heldout_ends": np.cumsum([len(tokens) for tokens in splits["heldout"].values()]).tolist(),
    }
    for name, documents in splits.items():
        known[name] = hashlib.sha256(np.array(joined(list(documents.values())), dtype="<u2").tobytes()).hexdigest()
    assert stdlib.fingerprint == hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    assert stdlib.heldout_names == order
    assert [tokens.tolist() for tokens in stdlib.heldout] == list(splits["heldout"].values())


def test_the_embedded_corpus_is_the_same_in_another_process(stdlib: Corpus) -> None:
    program = (
        "from atma_sweep.sweep.data.prepare import aside; from atma_sweep.sweep.config import DataConfig\n"
        "print(aside(DataConfig()).fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [stdlib.fingerprint]


def test_splits_are_disjoint_by_file(texts: dict[str, tuple[str, str]], stdlib: Corpus) -> None:
    (train,) = stdlib.train
    found = {
        "train": parts(train), "validation": parts(stdlib.validation), "heldout": [t.tolist() for t in stdlib.heldout],
    }  # fmt: skip
    for name, documents in found.items():
        assert sorted(documents) == sorted(document(text) for split, text in texts.values() if split == name)
        assert len(documents) >= 40
    assert sum(map(len, found.values())) == len(texts)


def test_sizes_of_the_embedded_corpus(stdlib: Corpus) -> None:
    held = list(map(len, stdlib.heldout))
    assert min(held) > 16_384
    assert len(held) >= 16
    assert stdlib.train_tokens > max(5_000_000, 3 * (len(stdlib.validation) + sum(held)))
    assert len(stdlib.validation) > 100_000
    assert stdlib.largest == EOT
    assert 3.1 < stdlib.unigram_entropy < 3.5
    assert 2.4 < (stdlib.bigram_entropy or 0) < 2.5


def test_its_tokenizer_comes_with_it(stdlib: Corpus) -> None:
    assert stdlib.load_tokenizer().encode("é").tolist() == [0xC3, 0xA9]
    bare = Corpus("f" * 64, "bytes", [], stdlib.validation, [], [], 1.0, None)
    assert bare.load_tokenizer().vocabulary == 257


# --- entropies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 301, 1000])
@pytest.mark.parametrize("cuts", [[], [1, 2, 150], [7, 14, 300]])
def test_entropies_of_shards_against_a_slow_count(monkeypatch: pytest.MonkeyPatch, piece: int, cuts: list[int]) -> None:
    """Pairs within a shard count, however it is read; those across a border do not."""
    monkeypatch.setattr(corpora, "CHUNK_TOKENS", piece)
    tokens = np.random.default_rng(0).integers(0, 17, 301).astype(np.uint16) ** 2 % 17
    shards = np.split(tokens, cuts)
    pairs: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        pairs.update(zip(shard[:-1].tolist(), shard[1:].tolist(), strict=True))
    first = Counter[int]()
    for (a, _), n in pairs.items():
        first[a] += n
    total = sum(pairs.values())
    assert total == 300 - len(cuts)
    expected = -sum(n / total * math.log(n / first[a]) for (a, _), n in pairs.items())
    unigram, bigram = entropies(shards, 17)
    assert bigram == pytest.approx(expected, abs=1e-12)
    assert unigram == pytest.approx(-sum(n / 301 * math.log(n / 301) for n in Counter(tokens.tolist()).values()))


def test_large_vocabularies_have_no_bigram_entropy() -> None:
    unigram, bigram = entropies([np.array([0, 5000], dtype=np.uint16)], 50257)
    assert (unigram, bigram) == (pytest.approx(math.log(2)), None)
    assert entropies([np.array([0, 70_000, 0], dtype=np.uint32)], 70_001)[0] == pytest.approx(
        math.log(3) - 2 / 3 * math.log(2)
    )


# --- what was asked for -------------------------------------------------------------------------------------------


def test_presets_are_what_the_shipped_grids_ask_for() -> None:
    asked: list[DataConfig] = []

    def collect(data: DataConfig) -> str:
        asked.append(data)
        return "0" * 64

    load_grid("full").expand(collect)
    fields = (
        "corpus",
        "path",
        "tokenizer",
        "tokenizer_file",
        "end_of_text",
        "train_tokens",
        "heldout",
        "heldout_tokens",
    )
    presets = {name: DataConfig(corpus=name, **kind.preset) for name, kind in every_kind().items() if kind.preset}
    for data in asked:
        assert [getattr(data, name) for name in fields] == [getattr(presets[data.corpus], name) for name in fields]
    assert {data.corpus for data in asked} == {"fineweb-edu-shards"}
    assert set(presets) >= {"fineweb-edu", "fineweb-edu-shards", "finepdfs", "wikitext-103"}


def test_a_request_is_what_decides_the_text(tmp_path: Path) -> None:
    put(tmp_path / "t", prose(3))
    (tmp_path / "a.json").write_text("1")
    plain = files(tmp_path / "t")
    number = corpora.request_id(corpora.request(plain))
    for same in ({"shuffle": False}, {"whole_steps": True}, {"fingerprint": "f" * 64}):
        assert corpora.request_id(corpora.request(plain.model_copy(update=same))) == number
    others = [
        {"path": str(put(tmp_path / "u", prose(3)))}, {"tokenizer": "gpt2"}, {"end_of_text": "</s>"}, {"train_tokens": 5},
        {"tokenizer_file": str(tmp_path / "a.json")}, {"heldout": "stdlib"}, {"heldout_tokens": 7},
    ]  # fmt: skip
    ids = {corpora.request_id(corpora.request(plain.model_copy(update=other))) for other in others}
    assert len(ids | {number}) == 8
    (tmp_path / "a.json").write_text("2")
    changed = corpora.request(plain.model_copy(update={"tokenizer_file": str(tmp_path / "a.json")}))
    assert corpora.request_id(changed) not in ids


def test_what_is_not_prepared_is_told_apart() -> None:
    found = {corpora.provisional_fingerprint(DataConfig(corpus="files", path=path)) for path in ("/a", "/b", "/b")}
    assert len(found) == 2
    assert all(word.startswith("unprepared:") for word in found)


def test_settings_that_name_nothing(tmp_path: Path) -> None:
    def find(**settings: Any) -> str:
        return refused(lambda: corpora.find(DataConfig(**settings), tmp_path))

    assert find(corpus="files", path=f"{tmp_path}/gone") == f"data.path: {tmp_path}/gone does not exist"
    needs = "needs data.path, the folder or file that holds the text"
    assert find(corpus="files") == f"data.corpus: files {needs}"
    assert find(corpus="shards") == f"data.corpus: shards {needs}"
    assert find(corpus="fineweb-edu", path=f"{tmp_path}/gone") == (
        f"data.path: {tmp_path}/gone is no folder with a copy of HuggingFaceFW/fineweb-edu"
    )
    assert find(corpus="fineweb-edu-shards", path=f"{tmp_path}/gone") == (
        f"data.path: {tmp_path}/gone is no folder with token shards"
    )
    assert find(corpus="wikitext-103", heldout="finepdfss").startswith("data.heldout: finepdfss is neither a file or ")


def test_unknown_names(tmp_path: Path) -> None:
    prepare.prepare(files(put(tmp_path / "t", prose(3))), tmp_path / "c", name="books")
    known = ", ".join(CORPORA)
    with pytest.raises(CorpusUnknown) as caught:
        corpora.find(DataConfig(corpus="boks"), tmp_path / "c")
    assert str(caught.value) == (
        f"no corpus 'boks'; allowed: {known}, books, or one prepared with `data prepare PATH --name boks`; "
        "did you mean 'books'?"
    )
    assert (caught.value.name, caught.value.allowed[-1]) == ("boks", "books")
    for name in ("../t", "", ".x"):
        with pytest.raises(CorpusUnknown):
            corpora.find(DataConfig(corpus=name), tmp_path / "c")


# --- on disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> tuple[DataConfig, Path, Path]:
    """(config, root, folder) of a prepared corpus with held-out documents and a tokenizer of its own."""
    word_level(*map(str, range(99))).save(str(tmp_path / "own.json"))
    put(tmp_path / "t", prose(60))
    data = files(tmp_path / "t", tokenizer="json", tokenizer_file=str(tmp_path / "own.json"), heldout_tokens=40)
    root = tmp_path / "c"
    return data, root, root / prepare.prepare(data, root, name="mine")[:16]


def again(folder: Path) -> str:
    return f"; remove {folder} and prepare the corpus again"


def test_found_again_by_request_and_by_name(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    number = corpora.manifest(folder)["fingerprint"]
    assert corpora.find(data, root) == number
    assert corpora.find(data.model_copy(update={"corpus": "mine", "path": None}), root) == number
    assert corpora.find(data.model_copy(update={"train_tokens": 5}), root) is None
    assert corpora.find(data, root / "other") is None
    assert corpora.named_fingerprints(root) == {"mine": number}
    for word in ("mine", "files", number, number[:5], number[:16], number[:40]):
        assert corpora.choose(root, word) == [folder]
    for word in ("nine", "zzz", "stdlib", f"{number[:16]}zzz"):
        assert refused(lambda word=word: corpora.choose(root, word)) == (  # type: ignore[misc]
            f"no corpus {word!r} is prepared in {root}; atma-sweep data list shows them"
        )


def test_a_name_goes_with_its_tokenizer(small: tuple[DataConfig, Path, Path], tmp_path: Path) -> None:
    data, root, folder = small
    named = data.model_copy(update={"corpus": "mine", "path": None})
    have = corpora.manifest(folder)["tokenizer"]
    assert refused(lambda: corpora.find(named.model_copy(update={"tokenizer": "gpt2"}), root)) == (
        f"corpus 'mine' was prepared with tokenizer {have}, but the grid asks for gpt2"
    )
    other = tmp_path / "other.json"
    other.write_text((tmp_path / "own.json").read_text().replace('"98"', '"98th"'))
    mark = f"json:{hashlib.sha256(other.read_bytes()).hexdigest()[:16]}"
    assert refused(lambda: corpora.find(named.model_copy(update={"tokenizer_file": str(other)}), root)) == (
        f"corpus 'mine' was prepared with tokenizer {have}, but the grid asks for {mark}"
    )


def test_what_went_away_is_not_found(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    pointer = next((root / "requests").iterdir())
    whole = pointer.read_text()
    for text in ("", "[1", "{}"):
        pointer.write_text(text)
        assert corpora.find(data, root) is None
    pointer.write_text(whole)
    (folder / "manifest.json").unlink()
    assert corpora.find(data, root) is None
    assert corpora.named_fingerprints(root) == {}
    assert refused(lambda: open_corpus(root, "a" * 64)) == (
        f"no prepared corpus in {root}/{'a' * 16}; prepare it again, or launch the grid again"
    )


def test_listing(small: tuple[DataConfig, Path, Path], tmp_path: Path) -> None:
    data, root, folder = small
    corpus = open_corpus(root, corpora.manifest(folder)["fingerprint"])
    (row,) = corpora.listing(root)
    assert row.pop("prepared_at").endswith("+00:00")
    assert row == {
        "names": ["mine"],
        "corpus": "files",
        "path": data.path,
        "heldout": None,
        "tokenizer": corpus.tokenizer,
        "train_tokens": corpus.train_tokens,
        "validation_tokens": len(corpus.validation),
        "heldout_tokens": sum(map(len, corpus.heldout)),
        "heldout_documents": len(corpus.heldout),
        "fingerprint": corpus.fingerprint,
        "folder": str(folder),
        "bytes": sum(len(path.read_bytes()) for path in folder.iterdir()),
    }
    assert corpora.listing(tmp_path / "none") == []
    later = prepare.prepare(files(put(tmp_path / "u", prose(5))), root)
    # a part whose manifest is written but which has not got its name yet
    os.rename(root / later[:16], root / "0123456789abcdef.part")
    assert corpora.folders(root) == [folder]
    os.rename(root / "0123456789abcdef.part", root / later[:16])
    assert [row["fingerprint"] for row in corpora.listing(root)] == [corpus.fingerprint, later]
    assert [row["fingerprint"] for row in corpora.listing(root, only=[later])] == [later]


def test_links_that_lead_nowhere_are_listed_and_verified(tmp_path: Path) -> None:
    for name, tokens in (("x_train_1.bin", range(40)), ("x_val_1.bin", range(9))):
        published_shard(tmp_path / "s" / name, list(tokens))
    number = prepare.prepare(DataConfig(corpus="shards", path=str(tmp_path / "s")), tmp_path / "c")
    folder = tmp_path / "c" / number[:16]
    before = corpora.listing(tmp_path / "c")[0]["bytes"]
    (tmp_path / "s" / "x_train_1.bin").unlink()
    assert corpora.listing(tmp_path / "c")[0]["bytes"] == before - 1024 - 2 * 40
    lost = f"{folder}/train_000000.bin: cannot be read: No such file or directory{again(folder)}"
    assert corpora.verify(folder) == [lost]
    assert refused(lambda: open_corpus(tmp_path / "c", number)) == lost


@pytest.mark.parametrize("file", ["train_000000.bin", "validation_000000.bin", "heldout.bin"])
def test_cut_shards(small: tuple[DataConfig, Path, Path], file: str) -> None:
    _, root, folder = small
    number, path = corpora.manifest(folder)["fingerprint"], folder / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    count = (len(whole) - 1024) // 2
    cut = f"{path}: cut short or overlong, {len(whole) - 1} bytes where {count} tokens need {len(whole)}{again(folder)}"
    assert refused(lambda: open_corpus(root, number)) == cut
    assert corpora.verify(folder) == [cut]
    # a whole shard, with a token less
    path.write_bytes(whole[:8] + (count - 1).to_bytes(4, "little") + whole[12:-2])
    assert refused(lambda: open_corpus(root, number)) == (
        f"{path}: {count - 1} tokens, not the {count} that were prepared{again(folder)}"
    )
    path.write_bytes(whole)
    assert corpora.verify(folder) == []
    assert open_corpus(root, number).fingerprint == number


def test_another_corpus_under_the_same_name(small: tuple[DataConfig, Path, Path]) -> None:
    _, root, folder = small
    number = corpora.manifest(folder)["fingerprint"]
    assert refused(lambda: open_corpus(root, number[:16] + "0" * 48)) == (
        f"{folder} holds corpus {number[:12]}, not {number[:12]}{again(folder)}"
    )
    other = root / ("0" * 16)
    os.rename(folder, other)
    assert corpora.verify(other) == [f"{other}: the fingerprint does not follow from the manifest{again(other)}"]


def test_what_verify_says(small: tuple[DataConfig, Path, Path]) -> None:
    _, root, folder = small
    path = folder / "train_000000.bin"
    changed = bytearray(path.read_bytes())
    changed[1024:1026] = (7).to_bytes(2, "little")
    path.write_bytes(bytes(changed))
    known = corpora.manifest(folder)["shards"]["train"][0]
    digest = hashlib.sha256(changed[1024:]).hexdigest()
    assert corpora.verify(folder) == [f"{path}: sha256 is {digest}, the manifest says {known['sha256']}{again(folder)}"]
    tokenizer = folder / "tokenizer.json"
    tokenizer.unlink()
    lost = f"{tokenizer}: missing, or not the tokenizer that made the corpus{again(folder)}"
    assert corpora.verify(folder)[1:] == [lost]
    corpus = open_corpus(root, corpora.manifest(folder)["fingerprint"])
    assert refused(corpus.load_tokenizer) == lost
    manifest = folder / "manifest.json"
    for text in ("", "[]", "\udcff", manifest.read_text().replace('"documents": 60', '"documents": 61')):
        manifest.write_text(text, errors="surrogateescape")
        damaged = f"{manifest}: damaged or of another version{again(folder)}"
        assert corpora.verify(folder) == [damaged]
        assert refused(lambda: corpora.listing(root)) == damaged
        assert refused(lambda: open_corpus(root, corpus.fingerprint)) == damaged


def test_the_streams_of_an_opened_corpus_are_mapped(small: tuple[DataConfig, Path, Path]) -> None:
    _, root, folder = small
    corpus = open_corpus(root, corpora.manifest(folder)["fingerprint"])
    assert all(isinstance(tokens, np.memmap) for tokens in [*corpus.train, corpus.validation])
    assert len(stream(corpus)) == corpus.train_tokens
