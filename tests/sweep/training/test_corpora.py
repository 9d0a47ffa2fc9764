"""Text into splits: what is in them, that they never change, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from atma_sweep.sweep.cell import DataConfig
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.training import corpora
from atma_sweep.sweep.training.corpora import Corpus, CorpusError, entropies, fingerprint, open_corpus, prepare
from atma_sweep.sweep.training.shards import ShardError

EOT = 256
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Files may change between tests; the cache of built corpora must not remember them."""
    yield
    corpora._build.cache_clear()


@pytest.fixture(scope="module")
def texts() -> dict[str, tuple[str, str]]:
    """Name -> (split, text) of the embedded corpus."""
    return {text.name: (corpora._stdlib_split(text), text.text) for text in corpora._stdlib_texts()}


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("corpora")
    prepare(DataConfig(), root)
    found = open_corpus(root, fingerprint(DataConfig()))
    corpora._build.cache_clear()
    return found


def decoded(tokens: np.ndarray) -> list[str]:
    """Documents of a stream of bytes."""
    cuts = np.flatnonzero(tokens == EOT)
    assert cuts[0] == 0
    return [bytes(part[1:].astype(np.uint8)).decode() for part in np.split(tokens, cuts[1:])]


# --- the embedded corpus ------------------------------------------------------------------------------------------


def test_stdlib_is_the_same_in_another_process(stdlib: Corpus) -> None:
    program = (
        "from atma_sweep.sweep.training.corpora import fingerprint; from atma_sweep.sweep.cell import DataConfig\n"
        "print(fingerprint(DataConfig()))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [stdlib.fingerprint]


def test_splits_are_disjoint_by_file(texts: dict[str, tuple[str, str]], stdlib: Corpus) -> None:
    found = {"train": decoded(stdlib.train), "validation": decoded(stdlib.validation), "heldout": [
        document for tokens in stdlib.heldout for document in decoded(tokens)]}  # fmt: skip
    for name, documents in found.items():
        expected = sorted(text for split, text in texts.values() if split == name)
        assert sorted(documents) == expected
        assert len(documents) >= 40
    assert sum(map(len, found.values())) == len(texts)


def test_tests_and_idle_are_left_out_and_help_topics_are_in(texts: dict[str, tuple[str, str]]) -> None:
    parts = {part for name in texts for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "site-packages", "__pycache__"}
    assert {"argparse.py", "asyncio/tasks.py", "help/with", "help/lambda"} <= set(texts)
    assert not any(name.startswith(("_sysconfigdata", "config-")) for name in texts)
    assert "pydoc_data/topics.py" not in texts, "its texts, not its source"
    assert texts["help/lambda"][1].startswith("Lambdas")


def test_heldout_documents_are_long_and_enough(stdlib: Corpus) -> None:
    assert len(stdlib.heldout) == len(stdlib.heldout_names)
    assert all(document[0] == EOT and EOT not in document[1:] for document in stdlib.heldout)
    assert min(map(len, stdlib.heldout)) > 16_384
    assert sum(len(document) > 16_384 for document in stdlib.heldout) >= 16


def test_training_split_is_most_of_it_and_validation_is_enough(stdlib: Corpus) -> None:
    assert len(stdlib.train) > 5_000_000
    assert len(stdlib.validation) > 100_000
    assert len(stdlib.train) > 3 * (len(stdlib.validation) + sum(map(len, stdlib.heldout)))


def test_entropies_of_the_embedded_corpus(stdlib: Corpus) -> None:
    assert 3.1 < stdlib.unigram_entropy < 3.5
    assert stdlib.bigram_entropy is not None
    assert 2.4 < stdlib.bigram_entropy < 2.5


# --- entropies ----------------------------------------------------------------------------------------------------


def test_entropies_against_counting_by_hand() -> None:
    # a b a b a c: a follows nothing first; after a come b, b, c; after b come a, a
    tokens = np.array([0, 1, 0, 1, 0, 2], dtype=np.uint16)
    unigram, bigram = entropies(tokens, 3)
    assert unigram == pytest.approx(
        -(3 / 6 * math.log(3 / 6) + 2 / 6 * math.log(2 / 6) + 1 / 6 * math.log(1 / 6)), abs=1e-12
    )
    after_a = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert bigram == pytest.approx(3 / 5 * after_a + 2 / 5 * 0, abs=1e-12)


def test_entropies_against_a_slow_count() -> None:
    tokens = np.random.default_rng(0).integers(0, 17, 301).astype(np.uint16) ** 2 % 17
    pairs = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    first = Counter(tokens[:-1].tolist())
    expected = -sum(n / 300 * math.log(n / first[a]) for (a, _), n in pairs.items())
    assert entropies(tokens, 17)[1] == pytest.approx(expected, abs=1e-12)


def test_large_vocabularies_have_no_bigram_entropy() -> None:
    unigram, bigram = entropies(np.array([0, 5000], dtype=np.uint16), 50257)
    assert (unigram, bigram) == (pytest.approx(math.log(2)), None)


# --- text of one's own --------------------------------------------------------------------------------------------


def files(path: Path, **settings: object) -> DataConfig:
    return DataConfig(corpus="files", path=str(path), **settings)


def test_a_folder_of_texts(write: Write, tmp_path: Path) -> None:
    for index in range(40):
        write(f"text {index}\n" * (300 if index % 4 == 0 else 3), f"texts/{'deep/' if index % 2 else ''}{index}.txt")
    write("not text", "texts/picture.png")
    data = files(tmp_path / "texts", heldout_tokens=1000)
    corpus = open_corpus(tmp_path / "c", prepared(data, tmp_path / "c"))
    train, validation = decoded(corpus.train), decoded(corpus.validation)
    heldout = [text for tokens in corpus.heldout for text in decoded(tokens)]
    assert len(train) + len(validation) + len(heldout) == 40
    assert len(set(train) | set(validation) | set(heldout)) == 40
    assert heldout
    assert all(len(text) >= 1000 for text in heldout)
    assert all((tmp_path / "texts" / name).is_file() for name in corpus.heldout_names)
    assert corpus.bigram_entropy is not None


def prepared(data: DataConfig, root: Path) -> str:
    prepare(data, root)
    return fingerprint(data)


def test_fingerprint_follows_the_text_and_not_its_place(write: Write, tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        for index in range(12):
            write(f"text {index}" + ("!" if folder == "c" and index == 7 else ""), f"{folder}/{index}.txt")
    one, same, other = (fingerprint(files(tmp_path / folder)) for folder in "abc")
    assert one == same != other
    assert len(one) == 64
    assert fingerprint(files(tmp_path / "a", shuffle=False)) == one
    assert fingerprint(files(tmp_path / "a", heldout_tokens=5)) != one


def test_jsonl_one_document_a_line(write: Write, tmp_path: Path) -> None:
    records = [json.dumps({"text": f"text {index}", "id": index}) for index in range(30)]
    path = write("\n".join(records[:10]) + "\n\n" + "\n".join(records[10:]) + "\n", "x.jsonl")
    corpus = open_corpus(tmp_path / "c", prepared(files(path), tmp_path / "c"))
    assert sorted(decoded(corpus.train) + decoded(corpus.validation)) == sorted(f"text {index}" for index in range(30))
    assert corpus.heldout == []


@pytest.mark.parametrize(("line", "problem"), [
    ('{"text": "a"', "not a JSON object: Expecting ',' delimiter"), ("[1]", "a record needs the key `text` with a string"),
    ('{"txt": "a"}', "a record needs the key `text` with a string"), ('{"text": 3}', "a record needs the key `text` with a string"),
])  # fmt: skip
def test_a_bad_record_names_file_and_line(write: Write, line: str, problem: str) -> None:
    path = write(f'{{"text": "good"}}\n\n{line}\n', "x.jsonl")
    with pytest.raises(CorpusError) as caught:
        fingerprint(files(path))
    assert str(caught.value) == f"{path}:3: {problem}"


def test_bytes_that_are_no_text_are_replaced_in_every_kind_of_file(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.txt").write_bytes(b"a\xff%d" % index)
        (tmp_path / f"{index}.jsonl").write_bytes(b'{"text": "b\xff%d \\ud800"}' % index)
    corpus = open_corpus(tmp_path / "c", prepared(files(tmp_path), tmp_path / "c"))
    found = decoded(corpus.train) + decoded(corpus.validation)
    assert sorted(found) == sorted([f"a\ufffd{i}" for i in range(3)] + [f"b\ufffd{i} ?" for i in range(3)])


def test_when_no_name_draws_validation_every_tenth_text_validates(write: Write, tmp_path: Path) -> None:
    names = [name for name in (f"{i}.txt" for i in range(60)) if corpora._draw(name) > 0.3][:21]
    for name in names:
        write(f"text of {name}", f"t/{name}")
    corpus = open_corpus(tmp_path / "c", prepared(files(tmp_path / "t"), tmp_path / "c"))
    assert decoded(corpus.validation) == [f"text of {name}" for name in sorted(names)[::10]]
    assert len(decoded(corpus.train)) == 18


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_documents(write: Write, tmp_path: Path, count: int) -> None:
    (tmp_path / "t").mkdir()
    for index in range(count):
        write("text", f"t/{index}.txt")
    problem = (
        "has too few documents: give at least two" if count else r"holds no \.txt, \.md, \.rst, \.py or \.jsonl file"
    )
    with pytest.raises(CorpusError, match=problem):
        fingerprint(files(tmp_path / "t"))


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"data\.path: .*gone does not exist"):
        fingerprint(files(tmp_path / "gone"))
    with pytest.raises(CorpusError, match=r"data\.corpus: files needs data\.path"):
        fingerprint(DataConfig(corpus="files"))


def test_a_corpus_that_is_not_on_this_machine_names_a_way_out() -> None:
    with pytest.raises(MachineError, match=r"corpus 'fineweb-edu' is not prepared .* --dry-run"):
        fingerprint(DataConfig(corpus="fineweb-edu"))


# --- on disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(write: Write, tmp_path: Path) -> tuple[DataConfig, Path, Path]:
    """(config, root, folder) of a prepared corpus."""
    for index in range(9):
        write(f"text {index}", f"t/{index}.txt")
    data = files(tmp_path / "t")
    return data, tmp_path / "c", prepare(data, tmp_path / "c")


def test_prepared_once(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    assert folder == root / fingerprint(data)[:16]
    before = (folder / "train.bin").stat().st_mtime_ns
    assert prepare(data, root) == folder
    assert (folder / "train.bin").stat().st_mtime_ns == before
    assert [path.name for path in root.iterdir()] == [folder.name]


def test_two_launchers_that_prepare_at_once(
    small: tuple[DataConfig, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds the folder there when it wants to rename its own."""
    data, root, folder = small
    other = root.parent / "other"
    real, numbers = corpora.write_shard, iter([1, 2])
    monkeypatch.setattr(corpora.os, "getpid", lambda: 1)

    def write_shard(path: Path, tokens: np.ndarray) -> None:
        real(path, tokens)
        if next(numbers, 3) == 1:
            monkeypatch.setattr(corpora.os, "getpid", lambda: 2)
            prepare(data, other)

    monkeypatch.setattr(corpora, "write_shard", write_shard)
    assert prepare(data, other) == other / folder.name
    assert [path.name for path in other.iterdir()] == [folder.name]
    assert open_corpus(other, fingerprint(data)).train.tolist() == open_corpus(root, fingerprint(data)).train.tolist()


def test_a_folder_left_by_a_launcher_that_died_is_no_corpus(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    (folder / "manifest.json").unlink()
    with pytest.raises(CorpusError, match=r"no prepared corpus in .*; launch the grid again"):
        open_corpus(root, fingerprint(data))


def test_damage_is_noticed(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, folder = small
    shard = folder / "train.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ShardError, match="cut short or overlong"):
        open_corpus(root, fingerprint(data))


def test_another_corpus_under_the_same_name(small: tuple[DataConfig, Path, Path]) -> None:
    data, root, _ = small
    number = fingerprint(data)
    with pytest.raises(CorpusError, match=f"holds corpus {number[:12]}, not {number[:12]}; remove it and launch again"):
        open_corpus(root, number[:16] + "0" * 48)
