"""Prepared corpora: contents, pinned fingerprints, lookup, and detection of damage."""

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
from atma_sweep.sweep.data.registry import CORPORA, all_kinds
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
    """(split, text) of the embedded corpus by name, in its order, gathered without the package."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "ensurepip", "sitecustomize.py"}
    names = []
    for folder, _, file_names in os.walk(root):
        for name in file_names:
            path = (Path(folder) / name).relative_to(root).parts
            machine = any(part.startswith(("_sysconfigdata", "config-")) for part in path)
            if name.endswith(".py") and not machine and not skipped & set(path):
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


@pytest.mark.thorough
def test_the_embedded_corpus_keeps_the_fingerprint_of_its_text(
    stdlib: Corpus, texts: dict[str, tuple[str, str]]
) -> None:
    """Cells of every database contain it: SHA-256 over the JSON of layout, tokenizer, hashes, names and ends."""
    splits = {
        name: {title: document(text) for title, (split, text) in texts.items() if split == name}
        for name in ("train", "validation", "heldout")
    }
    order = sorted(splits["heldout"], key=lambda name: hashlib.sha256(name.encode()).digest())
    splits["heldout"] = {name: splits["heldout"][name] for name in order}
    expected_texts: dict[str, Any] = {
        "layout": 1,
        "tokenizer": "bytes",
        "heldout_names": order,
        "heldout_ends": np.cumsum([len(tokens) for tokens in splits["heldout"].values()]).tolist(),
    }
    for name, documents in splits.items():
        expected_texts[name] = hashlib.sha256(
            np.array(joined(list(documents.values())), dtype="<u2").tobytes()
        ).hexdigest()
    assert stdlib.fingerprint == hashlib.sha256(json.dumps(expected_texts, sort_keys=True).encode()).hexdigest()
    assert stdlib.heldout_names == order
    assert [tokens.tolist() for tokens in stdlib.heldout] == list(splits["heldout"].values())


def test_stdlib_fingerprint_is_same_in_another_process(stdlib: Corpus) -> None:
    program = (
        "from atma_sweep.sweep.data.prepare import prepare_in_memory; from atma_sweep.sweep.config import DataConfig\n"
        "print(prepare_in_memory(DataConfig()).fingerprint)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [stdlib.fingerprint]


def test_stdlib_splits_are_disjoint_by_file(texts: dict[str, tuple[str, str]], stdlib: Corpus) -> None:
    (train,) = stdlib.train
    documents_by_split = {
        "train": parts(train), "validation": parts(stdlib.validation), "heldout": [t.tolist() for t in stdlib.heldout],
    }  # fmt: skip
    for name, documents in documents_by_split.items():
        assert sorted(documents) == sorted(document(text) for split, text in texts.values() if split == name)
        assert len(documents) >= 40
    assert sum(map(len, documents_by_split.values())) == len(texts)


def test_stdlib_split_sizes(stdlib: Corpus) -> None:
    held = list(map(len, stdlib.heldout))
    assert min(held) > 16_384
    assert len(held) >= 16
    assert stdlib.train_tokens > max(5_000_000, 3 * (len(stdlib.validation) + sum(held)))
    assert len(stdlib.validation) > 100_000
    assert stdlib.largest == EOT
    assert 3.1 < stdlib.unigram_entropy < 3.5
    assert 2.4 < (stdlib.bigram_entropy or 0) < 2.5


def test_corpus_loads_saved_tokenizer(stdlib: Corpus) -> None:
    assert stdlib.load_tokenizer().encode("é").tolist() == [0xC3, 0xA9]
    bare = Corpus("f" * 64, "bytes", [], stdlib.validation, [], [], 1.0, None)
    assert bare.load_tokenizer().vocabulary == 257


# --- entropies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 301, 1000])
@pytest.mark.parametrize("cuts", [[], [1, 2, 150], [7, 14, 300]])
def test_entropies_of_shards_match_slow_count(monkeypatch: pytest.MonkeyPatch, piece: int, cuts: list[int]) -> None:
    """Pairs within a shard count, whatever the chunk size; pairs across a border do not."""
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


def test_entropies_of_large_vocabulary_have_no_bigram() -> None:
    unigram, bigram = entropies([np.array([0, 5000], dtype=np.uint16)], 50257)
    assert (unigram, bigram) == (pytest.approx(math.log(2)), None)
    assert entropies([np.array([0, 70_000, 0], dtype=np.uint32)], 70_001)[0] == pytest.approx(
        math.log(3) - 2 / 3 * math.log(2)
    )


# --- requests -----------------------------------------------------------------------------------------------------


def test_corpus_presets_match_shipped_grids() -> None:
    sections: list[DataConfig] = []

    def collect(data: DataConfig) -> str:
        sections.append(data)
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
    presets = {name: DataConfig(corpus=name, **kind.preset) for name, kind in all_kinds().items() if kind.preset}
    for data in sections:
        assert [getattr(data, name) for name in fields] == [getattr(presets[data.corpus], name) for name in fields]
    assert {data.corpus for data in sections} == {"fineweb-edu-shards"}
    assert set(presets) >= {"fineweb-edu", "fineweb-edu-shards", "finepdfs", "wikitext-103"}


def test_request_changes_with_settings_that_decide_text(tmp_path: Path) -> None:
    put(tmp_path / "t", prose(3))
    (tmp_path / "a.json").write_text("1")
    plain = files(tmp_path / "t")
    number = corpora.request_id(corpora.request(plain))
    for same in ({"shuffle": False}, {"whole_steps": True}, {"fingerprint": "f" * 64}):
        assert corpora.request_id(corpora.request(plain.model_copy(update=same))) == number
    changes = [
        {"path": str(put(tmp_path / "u", prose(3)))}, {"tokenizer": "gpt2"}, {"end_of_text": "</s>"}, {"train_tokens": 5},
        {"tokenizer_file": str(tmp_path / "a.json")}, {"heldout": "stdlib"}, {"heldout_tokens": 7},
    ]  # fmt: skip
    ids = {corpora.request_id(corpora.request(plain.model_copy(update=change))) for change in changes}
    assert len(ids | {number}) == 8
    (tmp_path / "a.json").write_text("2")
    changed = corpora.request(plain.model_copy(update={"tokenizer_file": str(tmp_path / "a.json")}))
    assert corpora.request_id(changed) not in ids


def test_provisional_fingerprint_differs_by_request() -> None:
    placeholders = {
        corpora.provisional_fingerprint(DataConfig(corpus="files", path=path)) for path in ("/a", "/b", "/b")
    }
    assert len(placeholders) == 2
    assert all(word.startswith("unprepared:") for word in placeholders)


def test_find_reports_missing_paths(tmp_path: Path) -> None:
    def find(**settings: Any) -> str:
        return refused(lambda: corpora.find_fingerprint(DataConfig(**settings), tmp_path))

    assert find(corpus="files", path=f"{tmp_path}/gone") == f"data.path: {tmp_path}/gone does not exist"
    needs = "needs data.path, the folder or file that holds the text"
    assert find(corpus="files") == f"data.corpus: files {needs}"
    assert find(corpus="shards") == f"data.corpus: shards {needs}"
    assert find(corpus="fineweb-edu", path=f"{tmp_path}/gone") == (
        f"data.path: {tmp_path}/gone is not a folder with a copy of HuggingFaceFW/fineweb-edu"
    )
    assert find(corpus="fineweb-edu-shards", path=f"{tmp_path}/gone") == (
        f"data.path: {tmp_path}/gone is not a folder with token shards"
    )
    assert find(corpus="wikitext-103", heldout="finepdfss").startswith("data.heldout: finepdfss is neither a file, ")


def test_find_rejects_unknown_names(tmp_path: Path) -> None:
    prepare.prepare(files(put(tmp_path / "t", prose(3))), tmp_path / "c", name="books")
    builtin = ", ".join(CORPORA)
    with pytest.raises(CorpusUnknown) as caught:
        corpora.find_fingerprint(DataConfig(corpus="boks"), tmp_path / "c")
    assert str(caught.value) == (
        f"no corpus 'boks'; allowed: {builtin}, books, or one prepared with `data prepare PATH --name boks`; "
        "did you mean 'books'?"
    )
    assert (caught.value.name, caught.value.allowed[-1]) == ("boks", "books")
    for name in ("../t", "", ".x"):
        with pytest.raises(CorpusUnknown):
            corpora.find_fingerprint(DataConfig(corpus=name), tmp_path / "c")


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


def test_find_by_request_and_by_name(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    number = corpora.read_manifest(folder)["fingerprint"]
    assert corpora.find_fingerprint(data, root) == number
    assert corpora.find_fingerprint(data.model_copy(update={"corpus": "mine", "path": None}), root) == number
    assert corpora.find_fingerprint(data.model_copy(update={"train_tokens": 5}), root) is None
    assert corpora.find_fingerprint(data, root / "other") is None
    assert corpora.named_fingerprints(root) == {"mine": number}
    for word in ("mine", "files", number, number[:5], number[:16], number[:40]):
        assert corpora.find_folders(root, word) == [folder]
    for word in ("nine", "zzz", "stdlib", f"{number[:16]}zzz"):
        assert refused(lambda word=word: corpora.find_folders(root, word)) == (  # type: ignore[misc]
            f"no corpus {word!r} is prepared in {root}; list them with atma-sweep data list"
        )


def test_find_rejects_wrong_tokenizer_for_named_corpus(small: tuple[DataConfig, Path, Path], tmp_path: Path) -> None:
    data, root, folder = small
    named = data.model_copy(update={"corpus": "mine", "path": None})
    have = corpora.read_manifest(folder)["tokenizer"]
    assert refused(lambda: corpora.find_fingerprint(named.model_copy(update={"tokenizer": "gpt2"}), root)) == (
        f"corpus 'mine' was prepared with tokenizer {have}, but the grid requests gpt2"
    )
    changed_file = tmp_path / "other.json"
    changed_file.write_text((tmp_path / "own.json").read_text().replace('"98"', '"98th"'))
    mark = f"json:{hashlib.sha256(changed_file.read_bytes()).hexdigest()[:16]}"
    assert refused(
        lambda: corpora.find_fingerprint(named.model_copy(update={"tokenizer_file": str(changed_file)}), root)
    ) == (f"corpus 'mine' was prepared with tokenizer {have}, but the grid requests {mark}")


def test_find_returns_none_without_pointer_or_manifest(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    pointer = next((root / "requests").iterdir())
    content = pointer.read_text()
    for text in ("", "[1", "{}"):
        pointer.write_text(text)
        assert corpora.find_fingerprint(data, root) is None
    pointer.write_text(content)
    (folder / "manifest.json").unlink()
    assert corpora.find_fingerprint(data, root) is None
    assert corpora.named_fingerprints(root) == {}
    assert refused(lambda: open_corpus(root, "a" * 64)) == (
        f"no prepared corpus in {root}/{'a' * 16}; prepare it again, or launch the grid again"
    )


def test_listing_describes_prepared_corpora(small: tuple[DataConfig, Path, Path], tmp_path: Path) -> None:
    data, root, folder = small
    corpus = open_corpus(root, corpora.read_manifest(folder)["fingerprint"])
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
    # a working folder with a manifest that is not renamed yet
    os.rename(root / later[:16], root / "0123456789abcdef.part")
    assert corpora.folders(root) == [folder]
    os.rename(root / "0123456789abcdef.part", root / later[:16])
    assert [row["fingerprint"] for row in corpora.listing(root)] == [corpus.fingerprint, later]
    assert [row["fingerprint"] for row in corpora.listing(root, fingerprints=[later])] == [later]


def test_listing_and_verify_handle_broken_symlinks(tmp_path: Path) -> None:
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
def test_open_corpus_and_verify_detect_cut_shards(small: tuple[DataConfig, Path, Path], file: str) -> None:
    _, root, folder = small
    number, path = corpora.read_manifest(folder)["fingerprint"], folder / file
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    count = (len(content) - 1024) // 2
    cut = f"{path}: truncated or too long: {len(content) - 1} bytes, but {count} tokens need {len(content)}{again(folder)}"
    assert refused(lambda: open_corpus(root, number)) == cut
    assert corpora.verify(folder) == [cut]
    # a valid shard with one token less
    path.write_bytes(content[:8] + (count - 1).to_bytes(4, "little") + content[12:-2])
    assert refused(lambda: open_corpus(root, number)) == (
        f"{path}: {count - 1} tokens instead of the {count} that were prepared{again(folder)}"
    )
    path.write_bytes(content)
    assert corpora.verify(folder) == []
    assert open_corpus(root, number).fingerprint == number


def test_open_corpus_rejects_wrong_fingerprint_in_folder(small: tuple[DataConfig, Path, Path]) -> None:
    _, root, folder = small
    number = corpora.read_manifest(folder)["fingerprint"]
    assert refused(lambda: open_corpus(root, number[:16] + "0" * 48)) == (
        f"{folder} holds corpus {number[:12]}, not {number[:12]}{again(folder)}"
    )
    renamed_folder = root / ("0" * 16)
    os.rename(folder, renamed_folder)
    assert corpora.verify(renamed_folder) == [
        f"{renamed_folder}: the fingerprint does not match the manifest{again(renamed_folder)}"
    ]


def test_verify_lists_differences(small: tuple[DataConfig, Path, Path]) -> None:
    _, root, folder = small
    path = folder / "train_000000.bin"
    changed = bytearray(path.read_bytes())
    changed[1024:1026] = (7).to_bytes(2, "little")
    path.write_bytes(bytes(changed))
    shard_facts = corpora.read_manifest(folder)["shards"]["train"][0]
    digest = hashlib.sha256(changed[1024:]).hexdigest()
    assert corpora.verify(folder) == [
        f"{path}: sha256 is {digest}, but {shard_facts['sha256']} in the manifest{again(folder)}"
    ]
    tokenizer = folder / "tokenizer.json"
    tokenizer.unlink()
    lost = f"{tokenizer}: missing, or not the tokenizer that made the corpus{again(folder)}"
    assert corpora.verify(folder)[1:] == [lost]
    corpus = open_corpus(root, corpora.read_manifest(folder)["fingerprint"])
    assert refused(corpus.load_tokenizer) == lost
    manifest = folder / "manifest.json"
    for text in ("", "[]", "\udcff", manifest.read_text().replace('"documents": 60', '"documents": 61')):
        manifest.write_text(text, errors="surrogateescape")
        damaged = f"{manifest}: damaged or of another version{again(folder)}"
        assert corpora.verify(folder) == [damaged]
        assert refused(lambda: corpora.listing(root)) == damaged
        assert refused(lambda: open_corpus(root, corpus.fingerprint)) == damaged


def test_open_corpus_maps_shards_into_memory(small: tuple[DataConfig, Path, Path]) -> None:
    _, root, folder = small
    corpus = open_corpus(root, corpora.read_manifest(folder)["fingerprint"])
    assert all(isinstance(tokens, np.memmap) for tokens in [*corpus.train, corpus.validation])
    assert len(stream(corpus)) == corpus.train_tokens
