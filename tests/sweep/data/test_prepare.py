"""Preparation of corpora: assignment of documents, fingerprints, resumption, and rejected input."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mortal
import numpy as np
import pytest
from atma_sweep.results.errors import WriteRefused
from atma_sweep.results.names import quoted_short
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora, prepare, shards
from atma_sweep.sweep.data.builtin.local import OwnFiles
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.data.prepare import PrepareProgress, prepare_in_memory
from atma_sweep.sweep.data.sources import StdlibSource
from atma_sweep.sweep.errors import MachineError
from copies import finepdfs, prose, wikitext
from optional_data import optional_data
from patience import PATIENCE_S
from prepared import (
    EOT,
    document,
    files,
    joined,
    naive,
    number_of,
    parts,
    preparation_error,
    prepare_corpus,
    put,
    rederived,
    stream,
    word_level,
)


@pytest.fixture
def shards_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fixture: a function that sets the number of tokens per shard."""
    return lambda tokens: monkeypatch.setattr(shards, "SHARD_TOKENS", tokens)


@pytest.fixture
def by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide documents by their names, as corpora of the hub do."""
    monkeypatch.setattr(OwnFiles, "by_tokens", False)


# --- assignment to splits -----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("by_names")
@pytest.mark.parametrize("batch", [1, 7, 2000])
@pytest.mark.parametrize("train", [None, 1, 3001, 9000])
@pytest.mark.parametrize("most", [64, 3])
def test_splits_against_a_naive_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards_of: Callable[[int], None], batch: int, train: int | None, most: int
) -> None:  # fmt: skip
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", batch)
    monkeypatch.setattr(prepare, "HELDOUT_DOCUMENTS", most)
    shards_of(1009)
    named = {f"{number}.txt": text for number, text in enumerate(prose(100, longest=90))}
    put(tmp_path / "t", list(named.values()))
    expected = naive(dict(sorted(named.items())), long=200, most=most, train=train)
    corpus = prepare_corpus(files(tmp_path / "t", heldout_tokens=200, train_tokens=train), tmp_path / "c")
    assert stream(corpus) == joined(expected["train"])
    assert [len(shard) for shard in corpus.train[:-1]] == [1009] * (len(corpus.train) - 1)
    assert corpus.validation.tolist() == joined(expected["validation"])
    assert corpus.heldout_names == list(expected["heldout"])
    assert [tokens.tolist() for tokens in corpus.heldout] == list(expected["heldout"].values())
    assert corpus.train_tokens == len(stream(corpus))
    assert corpus.largest == EOT
    if train is None:
        assert len(joined(expected["train"])) > 10 * 1009
        assert len(expected["heldout"]) >= 3
        assert all(len(tokens) >= 200 for tokens in corpus.heldout)
    else:
        assert corpus.train_tokens == train


@pytest.mark.usefixtures("by_names")
def test_heldout_limit_counts_end_of_text_token(tmp_path: Path) -> None:
    name = next(name for name in (f"long{n}.txt" for n in range(99)) if number_of(name) < 0.25)
    put(tmp_path / "t", prose(60), "x{}.txt")
    put(tmp_path / "t", ["é" * 50], name)
    names_by_limit = [
        prepare_corpus(files(tmp_path / "t", heldout_tokens=long), tmp_path / "c").heldout_names for long in (101, 102)
    ]
    assert [name in names for names in names_by_limit] == [True, False]


@pytest.mark.usefixtures("by_names")
@pytest.mark.parametrize("held", [False, True])
def test_every_tenth_document_validates_if_no_name_does(tmp_path: Path, held: bool) -> None:
    names = sorted(name for name in (f"{i}.txt" for i in range(200)) if number_of(name) > (0.05 if held else 0.3))[:41]
    for name in names:
        put(tmp_path / "t", [f"text of {name}"], name)
    corpus = prepare_corpus(files(tmp_path / "t", heldout_tokens=2 if held else 1000), tmp_path / "c")
    own = [name for name in names if held and number_of(name) < 0.25]
    rest = [name for name in names if name not in own]
    assert len(own) >= 5 * held
    assert sorted(corpus.heldout_names) == own
    assert corpus.validation.tolist() == joined([document(f"text of {name}") for name in rest[::10]])
    assert stream(corpus) == joined([document(f"text of {name}") for i, name in enumerate(rest) if i % 10])


@pytest.mark.parametrize("count", [0, 1])
def test_prepare_rejects_too_few_documents(tmp_path: Path, count: int) -> None:
    put(tmp_path / "t", ["text"] * count)
    expected = (
        "corpus 'files' has too few documents: give at least two"
        if count
        else f"data.path: {tmp_path}/t holds no .txt, .md, .rst, .py, .jsonl (each also .gz, .xz, .zst) or .parquet file"
    )
    assert preparation_error(files(tmp_path / "t"), tmp_path / "c") == expected


def test_prepare_rejects_too_few_training_tokens(tmp_path: Path) -> None:
    assert min(number_of(f"b{n}.txt") for n in range(2)) > 0.25, "so the first validates"
    put(tmp_path / "t", ["text", "more text"], "b{}.txt")
    expected = "corpus 'files' has 10 training tokens; data.train_tokens requests 11"
    assert preparation_error(files(tmp_path / "t", train_tokens=11), tmp_path / "c") == expected
    assert prepare_corpus(files(tmp_path / "t", train_tokens=10), tmp_path / "c").train_tokens == 10


@pytest.mark.usefixtures("by_names")
def test_prepare_handles_empty_and_very_long_documents(tmp_path: Path, shards_of: Callable[[int], None]) -> None:
    shards_of(100)
    texts = ["", "b" * 731, "", "c"]
    assert min(number_of(f"b{n}.txt") for n in range(4)) > 0.25, "so the first validates"
    put(tmp_path / "t", texts, "b{}.txt")
    corpus = prepare_corpus(files(tmp_path / "t"), tmp_path / "c")
    assert [len(shard) for shard in corpus.train] == [100, 100, 100, 100, 100, 100, 100, 35]
    assert stream(corpus) == joined([document(text) for text in texts[1:]])
    assert corpus.validation.tolist() == [EOT]


def test_prepare_writes_wide_shards_for_large_vocabulary(tmp_path: Path) -> None:
    word_level(*(f"w{n}" for n in range(70_000))).save(str(tmp_path / "own.json"))
    put(tmp_path / "t", [f"w{n} w{69_999 - n} nothing" for n in range(30)])
    data = files(tmp_path / "t", tokenizer="json", tokenizer_file=str(tmp_path / "own.json"))
    corpus = prepare_corpus(data, tmp_path / "c")
    assert {shard.dtype for shard in [*corpus.train, corpus.validation]} == {np.dtype("<u4")}
    assert corpus.largest == 70_001
    assert corpus.bigram_entropy is None
    texts = sorted([1, 2 + n, 2 + 69_999 - n, 0] for n in range(30))
    assert sorted(np.array(stream(corpus) + corpus.validation.tolist()).reshape(-1, 4).tolist()) == texts
    header = np.fromfile(next(tmp_path.glob("c/*/train_000000.bin")), dtype="<i4", count=3)
    assert header.tolist() == [20240801, 7, corpus.train_tokens]
    # the corpus does not need the user's file any more
    (tmp_path / "own.json").unlink()
    again = open_corpus(tmp_path / "c", corpus.fingerprint).load_tokenizer()
    assert again.encode("w5 w69999 x").tolist() == [7, 70_001, 0]
    assert again.name == corpus.tokenizer


def test_prepare_with_gpt2_tokenizer(gpt2: Any, tmp_path: Path) -> None:
    copy = tmp_path / "g.tiktoken"
    copy.write_bytes((optional_data("data/gpt2/gpt2.tiktoken")).read_bytes())
    texts = [f"Document {n}: 12345 <|endoftext|>" for n in range(25)]
    put(tmp_path / "t", texts)
    corpus = prepare_corpus(files(tmp_path / "t", tokenizer="gpt2", tokenizer_file=str(copy)), tmp_path / "c")
    copy.unlink()
    tokens = np.array(stream(corpus) + corpus.validation.tolist())
    documents = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == 50256))[1:]]
    assert sorted(documents) == sorted([50256, *gpt2.encode(text).tolist()] for text in texts)
    assert corpus.load_tokenizer().encode("Hello world").tolist() == [15496, 995]
    assert corpus.bigram_entropy is None


# --- the fingerprint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [10**8, 1500])
def test_fingerprint_is_derived_from_tokens(tmp_path: Path, shards_of: Callable[[int], None], shard: int) -> None:
    shards_of(shard)
    corpus = prepare_corpus(files(put(tmp_path / "t", prose(60)), heldout_tokens=150), tmp_path / "c")
    assert len(corpus.train) == (1 if shard == 10**8 else 6)
    assert len(corpus.heldout) > 2
    assert corpus.fingerprint == rederived(corpus)
    assert len(corpus.fingerprint) == 64


def test_fingerprint_follows_text_not_folder(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        put(tmp_path / folder, [f"text {n}" + ("!" if folder == "c" and n == 7 else "") for n in range(12)])
    fingerprint, same, changed = (prepare_in_memory(files(tmp_path / folder)).fingerprint for folder in "abc")
    assert fingerprint == same != changed
    assert prepare_in_memory(files(tmp_path / "a", shuffle=False, whole_steps=True)).fingerprint == fingerprint
    assert prepare_in_memory(files(tmp_path / "a", heldout_tokens=5)).fingerprint != fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"], "nothing is left on the disk"
    root = tmp_path / "r"
    assert [prepare.prepare(files(tmp_path / folder), root) for folder in "ab"] == [fingerprint, fingerprint]
    assert len(list(root.glob("*/manifest.json"))) == 1
    assert len(list(root.glob("requests/*.json"))) == 2
    assert not list(root.glob("*.part"))


def test_fingerprint_ignores_further_keys_of_records(tmp_path: Path) -> None:
    """The same text under the same names, packed differently."""
    texts = prose(40)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x.jsonl").write_text(rows)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "x.jsonl").write_text(rows.replace('{"text"', '{"id": 7,  "text"'))
    assert (
        prepare_in_memory(files(tmp_path / "one")).fingerprint == prepare_in_memory(files(tmp_path / "two")).fingerprint
    )


def test_fingerprint_differs_by_sharding(tmp_path: Path, shards_of: Callable[[int], None]) -> None:
    """Training rows do not cross shards, so borders matter even if the tokens are the same."""
    put(tmp_path / "t", prose(60))
    by_shard_size = {}
    for shard in (1500, 1501, 10**8):
        shards_of(shard)
        by_shard_size[shard] = prepare_corpus(files(tmp_path / "t"), tmp_path / f"c{shard}")
    assert len({corpus.fingerprint for corpus in by_shard_size.values()}) == 3
    assert stream(by_shard_size[1500]) == stream(by_shard_size[1501]) == stream(by_shard_size[10**8])
    assert by_shard_size[1500].unigram_entropy == pytest.approx(by_shard_size[10**8].unigram_entropy, abs=1e-12)


# --- repeated preparation -----------------------------------------------------------------------------------------


def states(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.rglob("*")}


def test_prepare_does_nothing_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, root = files(put(tmp_path / "t", prose(30))), tmp_path / "c"
    number = prepare.prepare(data, root)
    before = states(root)
    monkeypatch.setattr(prepare, "Preparation", lambda *a: pytest.fail("prepares again"))
    assert prepare.prepare(data, root) == number
    assert states(root) == before
    assert sorted(path.name for path in root.iterdir()) == sorted([number[:16], "requests"])
    assert prepare.prepare(data, root, name="mine") == number
    assert corpora.named_fingerprints(root) == {"mine": number}


def test_concurrent_prepare_waits_for_first(tmp_path: Path) -> None:
    data, root = files(put(tmp_path / "t", prose(30))), tmp_path / "c"
    working, go_on, heard = threading.Event(), threading.Event(), []

    def first(progress: PrepareProgress) -> None:
        working.set()
        assert go_on.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        first_run = pool.submit(prepare.prepare, data, root, report=first)
        assert working.wait(PATIENCE_S)
        two = pool.submit(prepare.prepare, data, root, report=heard.append)
        time.sleep(0.2)
        assert not two.done()
        go_on.set()
        assert first_run.result(PATIENCE_S) == two.result(PATIENCE_S)
    assert heard == [], "the second found it done"


def test_prepare_again_after_text_changed(tmp_path: Path) -> None:
    data, root = files(put(tmp_path / "t", prose(30))), tmp_path / "c"
    first_fingerprint = prepare.prepare(data, root)
    (tmp_path / "t" / "3.txt").write_text("another text")
    two = prepare.prepare(data, root)
    assert first_fingerprint != two
    assert prepare.prepare(data, root) == two
    assert open_corpus(root, first_fingerprint).fingerprint == first_fingerprint


@pytest.mark.parametrize("damage", ["no manifest", "older layout", "cut shard"])
def test_prepare_replaces_damaged_folder(tmp_path: Path, damage: str) -> None:
    data, root = files(put(tmp_path / "t", prose(30))), tmp_path / "c"
    number = prepare.prepare(data, root)
    folder, content = root / number[:16], mortal.contents(root)
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "older layout":
        (folder / "manifest.json").write_text(json.dumps({"fingerprint": number, "train": "0" * 64}))
    else:
        (folder / "train_000000.bin").write_bytes((folder / "train_000000.bin").read_bytes()[:-1])
    if damage != "no manifest":
        (next((root / "requests").iterdir())).unlink()
    assert prepare.prepare(data, root) == number
    assert mortal.contents(root) == content


@pytest.mark.parametrize("name", ["stdlib", "shards", "", "a b", "../x", ".hidden", "größe", "x" * 5000])
def test_prepare_rejects_invalid_names(tmp_path: Path, name: str) -> None:
    data = files(put(tmp_path / "t", prose(3)))
    message = preparation_error(data, tmp_path / "c", name=name)
    assert message.startswith(f"--name: {quoted_short(name)} must be letters, digits, '.', '_' and '-', at most 100")
    assert message.endswith("and must not be the name of a known corpus")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_prepare_reports_unwritable_folder_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    data = files(put(tmp_path / "t", prose(30)))

    def refuse(path: Path, value: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(corpora, "write_json", refuse)
    with pytest.raises(WriteRefused, match=f"^cannot use {tmp_path}/c/.*: {os.strerror(number)}; ") as error:
        prepare.prepare(data, tmp_path / "c")
    assert error.value.exit_code == 3


def test_prepare_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 10)
    put(tmp_path / "t", prose(40))
    put(tmp_path / "long", prose(3, longest=500))
    heard: list[PrepareProgress] = []
    data = files(tmp_path / "t", heldout=str(tmp_path / "long"), heldout_tokens=100)
    corpus = prepare_corpus(data, tmp_path / "c", report=heard.append)
    assert [progress.phase for progress in heard] == ["tokenizing"] * 4 + ["long documents"]
    assert [progress.documents for progress in heard[:4]] == [10, 20, 30, 40]
    everything = corpus.train_tokens + len(corpus.validation)
    assert heard[3].tokens == heard[3].new_tokens == everything
    assert heard[4].tokens == heard[4].new_tokens == everything + sum(map(len, corpus.heldout))
    assert heard[4].rate == pytest.approx(heard[4].new_tokens / heard[4].seconds)
    assert {progress.target_tokens for progress in heard} == {None}


# --- sources with their own splits --------------------------------------------------------------------------------


@pytest.fixture
def wiki(tmp_path: Path) -> dict[str, list[str]]:
    """Articles by split, which are also written as a copy under `wiki`."""
    texts = {
        split: [f" = {split} {n} = \n text {n}\n = = S = = \n more {n}\n" for n in range(count)]
        for split, count in (("train", 13), ("validation", 3), ("test", 4))
    }
    rows = {
        split: [row for text in mine for row in ["", *text.splitlines(keepends=True)]] for split, mine in texts.items()
    }
    wikitext(tmp_path / "wiki", rows)
    return texts


def test_wikitext_keeps_its_own_splits(tmp_path: Path, wiki: dict[str, list[str]]) -> None:
    corpus = prepare_corpus(DataConfig(corpus="wikitext-103", path=str(tmp_path / "wiki")), tmp_path / "c")
    assert stream(corpus) == joined([document(text) for text in wiki["train"]])
    assert corpus.validation.tolist() == joined([document(text) for text in wiki["validation"]])
    held = {f"test/{n}": document(text) for n, text in enumerate(wiki["test"])}
    assert corpus.heldout_names == sorted(held, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert {name: tokens.tolist() for name, tokens in zip(corpus.heldout_names, corpus.heldout, strict=True)} == held


def test_train_tokens_do_not_change_further_splits(tmp_path: Path, wiki: dict[str, list[str]]) -> None:
    data = DataConfig(corpus="wikitext-103", path=str(tmp_path / "wiki"), train_tokens=101)
    corpus = prepare_corpus(data, tmp_path / "c")
    assert stream(corpus) == joined([document(text) for text in wiki["train"]])[:101]
    assert corpus.validation.tolist() == joined([document(text) for text in wiki["validation"]])
    assert len(corpus.heldout) == 4


def test_heldout_of_second_corpus_replaces_own(tmp_path: Path, wiki: dict[str, list[str]]) -> None:
    """Own held-out documents are not used for training either."""
    long = put(tmp_path / "long", prose(3, longest=500))
    data = DataConfig(corpus="wikitext-103", path=str(tmp_path / "wiki"), heldout=str(long), heldout_tokens=100)
    corpus = prepare_corpus(data, tmp_path / "c")
    assert stream(corpus) == joined([document(text) for text in wiki["train"]])
    texts = {name: document((long / name).read_text()) for name in ("0.txt", "1.txt", "2.txt")}
    assert corpus.heldout_names == [name for name, tokens in texts.items() if len(tokens) >= 100]
    assert len(corpus.heldout_names) >= 2


# --- held-out documents of another corpus -------------------------------------------------------------------------


def test_heldout_of_second_corpus_keeps_order_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 4)
    put(tmp_path / "t", prose(40))
    texts = prose(200, seed=5, longest=60)
    put(tmp_path / "long", texts, "{:03d}.txt")
    long = [f"{n:03d}.txt" for n, text in enumerate(texts) if len(text) + 1 >= 120]
    assert len(long) > 70
    data = files(tmp_path / "t", heldout=str(tmp_path / "long"), heldout_tokens=120)
    corpus = prepare_corpus(data, tmp_path / "c")
    assert corpus.heldout_names == long[:64]
    held = [document((tmp_path / "long" / name).read_text()) for name in long[:64]]
    assert [tokens.tolist() for tokens in corpus.heldout] == held
    everything = sorted(document((tmp_path / "t" / f"{n}.txt").read_text()) for n in range(40))
    documents = parts(stream(corpus) + corpus.validation.tolist())
    assert sorted(documents) == everything, "none of its own is held out"


def test_heldout_from_local_copy_of_finepdfs(tmp_path: Path) -> None:
    texts = [text * 9 for text in prose(6)]
    finepdfs(tmp_path / "pdfs", texts)
    put(tmp_path / "t", prose(40))
    corpus = prepare_corpus(files(tmp_path / "t", heldout=str(tmp_path / "pdfs"), heldout_tokens=400), tmp_path / "c")
    assert [tokens.tolist() for tokens in corpus.heldout] == [document(text) for text in texts if len(text) >= 399]
    assert len(corpus.heldout) >= 3


def test_heldout_from_stdlib(tmp_path: Path) -> None:
    corpus = prepare_corpus(
        files(put(tmp_path / "t", prose(40)), heldout="stdlib", heldout_tokens=60_000), tmp_path / "c"
    )
    assert len(corpus.heldout) > 10
    order = [text.name for text in StdlibSource().documents()]
    assert corpus.heldout_names == sorted(corpus.heldout_names, key=order.index)
    assert min(map(len, corpus.heldout)) >= 60_000


def test_heldout_counts_four_bytes_per_character(tmp_path: Path) -> None:
    put(tmp_path / "t", prose(40))
    put(tmp_path / "long", ["🙂" * 25, "🙂" * 24 + "é"])
    corpus = prepare_corpus(files(tmp_path / "t", heldout=str(tmp_path / "long"), heldout_tokens=101), tmp_path / "c")
    assert corpus.heldout_names == ["0.txt"]


def test_heldout_source_rejects_unusable_text(tmp_path: Path) -> None:
    text, root = put(tmp_path / "t", prose(40)), tmp_path / "c"
    put(text / "long", ["long " * 99])
    providers = "stdlib, fineweb-edu, finepdfs, wikitext-103"
    assert preparation_error(files(text, heldout="finepdf"), root) == (
        f"data.heldout: finepdf is neither a file, a folder nor a corpus with long documents: {providers}"
    )
    for inside in (text, text / "long", tmp_path):
        assert preparation_error(files(text, heldout=str(inside)), root) == (
            f"data.heldout: {inside} is also the training text; name other text, or remove data.heldout to hold out part of it"
        )
    assert "stdlib is also the training text" in preparation_error(DataConfig(heldout="stdlib"), root)
    short_texts = put(tmp_path / "other", ["short"])
    assert preparation_error(files(text, heldout=str(short_texts), heldout_tokens=7), root) == (
        f"data.heldout: {short_texts} has no document of 7 tokens; lower data.heldout_tokens or name another text"
    )
    (short_texts / "0.txt").unlink()
    assert preparation_error(files(text, heldout=str(short_texts)), root).startswith(
        f"data.heldout: {short_texts} holds no .txt, "
    )


def test_prepare_resumes_after_failed_heldout_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "t", prose(40))
    data, root = files(tmp_path / "t", heldout="finepdfs", heldout_tokens=400), tmp_path / "c"
    answers: Iterator[Any] = iter([ConnectionError("no route"), [{"text": "word " * 99}, {"text": "short"}]])

    def load(*arguments: Any, **more: Any) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(MachineError, match="run again to continue, or set data\\.heldout to a folder"):
        prepare.prepare(data, root)
    heard: list[PrepareProgress] = []
    corpus = prepare_corpus(data, root, report=heard.append)
    assert [progress.phase for progress in heard] == ["long documents"]
    assert heard[0].new_tokens == 496
    assert corpus.heldout_names == ["train/0"]
    assert corpus.train_tokens + len(corpus.validation) == sum(len(text) + 1 for text in prose(40))
