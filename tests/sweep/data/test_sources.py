"""Sources of documents: complete, in a fixed order, resumable at any position, with clear errors for damaged files."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import random
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import sources
from atma_sweep.sweep.data.builtin.hub import FinePDFs
from atma_sweep.sweep.data.registry import CORPORA
from atma_sweep.sweep.data.sources import (
    CorpusError,
    DocumentSource,
    FileSource,
    HubSource,
    StdlibSource,
    Text,
    articles,
    is_external_error,
    name_fraction,
)
from atma_sweep.sweep.errors import MachineError
from copies import article, finepdfs, fineweb_edu, prose, table, wikitext
from pyarrow import parquet
from refusals import refused

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def error_text(source: DocumentSource) -> str:
    """The one line that is said when the documents are read."""
    return refused(lambda: list(source.documents()))


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))


def zstd(raw: bytes) -> bytes:
    """Return one frame of Zstandard."""
    return pa.Codec("zstd").compress(raw, asbytes=True)


def goes_on_everywhere(make: Callable[[], DocumentSource]) -> list[Text]:
    """Check that the state after every document, as JSON, resumes at the next one, and return all documents."""
    first, documents = make(), []
    states, shares = [], [0.0]
    for text in first.documents():
        documents.append(text)
        states.append(json.dumps(first.state()))
        shares.append(first.read_share() or 0.0)
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    for number, state in enumerate(states, 1):
        assert list(make().documents(json.loads(state))) == documents[number:]
    return documents


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "train/17", "help/with", "größe.txt:3"])
def test_name_fraction_values(name: str) -> None:
    expected = int(hashlib.sha256(name.encode("utf-8")).hexdigest()[:16], 16) / 16**16
    assert name_fraction(name) == expected
    assert 0 <= expected < 1


def test_name_fractions_are_uniform() -> None:
    fractions = [name_fraction(f"train/{n}") for n in range(4000)]
    for tenth in range(10):
        # 400 expected, standard deviation 19
        assert 320 < sum(tenth <= 10 * number < tenth + 1 for number in fractions) < 480


# --- the standard library -----------------------------------------------------------------------------------------


def test_stdlib_source_resumes_and_key_has_version() -> None:
    source, second = StdlibSource(), StdlibSource()
    reader = source.documents()
    # near the end, in the help texts; a distribution's Python has some dozens fewer than one from python.org
    for _ in range(sum(1 for _ in StdlibSource().documents()) - 20):
        next(reader)
    rest = second.documents(source.state())
    assert [next(rest) for _ in range(20)] == [next(reader) for _ in range(20)]
    key = json.loads(json.dumps(source.key()))
    assert key == second.key()
    assert key[:2] == [sys.version, str(LIBRARY)]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet"])
def test_read_share_follows_the_bytes_of_files(tmp_path: Path, ending: str) -> None:
    """Four files of equal size and 1000 records each: after n records, n/4000 up to the reader's buffer."""
    generator = random.Random(1)
    texts = ["".join(chr(generator.randrange(97, 123)) for _ in range(200)) for _ in range(1000)]
    raw = lines(texts).encode()
    pack = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.xz": lzma.compress, ".jsonl.zst": zstd}
    for number in range(4):
        path = tmp_path / f"{number}{ending}"
        if ending == ".parquet":
            parquet.write_table(pa.table({"text": texts}), path)
        else:
            path.write_bytes(pack[ending](raw))
    source = FileSource(tmp_path)
    assert source.read_share() is None
    for number, _ in enumerate(source.documents(), 1):
        if number % 499 == 0:
            # blocks of up to a file for Zstandard, of 256 rows for Parquet, of 8 to 128 KiB for the others
            assert source.read_share() == pytest.approx(number / 4000, abs=0.25)
    assert source.read_share() == 1


def test_stdlib_source_rejects_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert refused(lambda: list(StdlibSource().documents()), MachineError) == (
        f"this Python has no standard library sources under {tmp_path}; use `data.corpus: files` with your own text"
    )


# --- files --------------------------------------------------------------------------------------------------------


def test_file_source_reads_all_formats_in_order(tmp_path: Path) -> None:
    texts = prose(30)
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.jsonl").write_text(lines(texts[1:6]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(texts[6:9]).encode()))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.md").write_text(texts[9])
    (tmp_path / "d" / "b.RST").write_text(texts[10])
    (tmp_path / "e.jsonl.xz").write_bytes(lzma.compress(lines(texts[11:20]).encode()))
    table(tmp_path / "f.parquet", texts[20:29], group=4)
    (tmp_path / "g.py.zst").write_bytes(zstd(texts[29].encode()))
    for name in ("picture.png", "notes.txt.bak", "jsonl", "z.json"):
        (tmp_path / name).write_text("not text")
    documents = goes_on_everywhere(lambda: FileSource(tmp_path))
    assert [text.text for text in documents] == texts
    assert [text.name for text in documents[:2]] == ["a.txt", "b.jsonl:1"]
    assert [text.name for text in documents[8:12]] == ["c.jsonl.gz:3", "d/a.md", "d/b.RST", "e.jsonl.xz:1"]
    assert [text.name for text in documents[28:]] == ["f.parquet:9", "g.py.zst"]
    assert {text.split for text in documents} == {None}


@pytest.mark.parametrize("name", ["own text.jsonl", "größe/ü b.jsonl.xz", "two frames.jsonl.zst", "x.parquet"])
def test_file_source_reads_single_file(tmp_path: Path, name: str) -> None:
    path, texts = tmp_path / name, prose(5)
    path.parent.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        table(path, texts, group=2)
    else:
        raw = lines(texts).encode()
        packed = {".xz": lzma.compress, ".zst": lambda raw: zstd(raw[:99]) + zstd(raw[99:])}
        path.write_bytes(packed.get(path.suffix, bytes)(raw))
    assert [(text.name, text.text) for text in goes_on_everywhere(lambda: FileSource(path))] == [
        (f"{path.name}:{number}", text) for number, text in enumerate(texts, 1)
    ]


def test_file_source_keeps_odd_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\xff\n")
    (tmp_path / "b.txt").write_bytes(b"")
    odd = [
        r'{"text": "a\r\nb \ud800 \u2028c"}',
        "",
        '  {"text": ""}  ',
        "\t",
        '{"id": 1, "text": "x\x85y", "n": 1e400}',
    ]
    (tmp_path / "c.jsonl").write_bytes("\r\n".join(odd).encode() + b'\n{"text": "b\xff"}')
    documents = [(text.name, text.text) for text in FileSource(tmp_path).documents()]
    assert documents == [
        ("a.txt", "one\ntwo\ufffd\n"),
        ("b.txt", ""),
        ("c.jsonl:1", "a\r\nb \ud800 \u2028c"),
        ("c.jsonl:3", ""),
        ("c.jsonl:5", "x\x85y"),
        ("c.jsonl:6", "b\ufffd"),
    ]


def test_file_source_accepts_undecodable_names(tmp_path: Path) -> None:
    try:
        with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as file:
            file.write("a text")
    except OSError:
        pytest.skip("needs a file system that takes names in Latin-1, as those of Linux do")
    (text,) = FileSource(tmp_path).documents()
    assert name_fraction(text.name) == int(hashlib.sha256(b"\xff.txt").hexdigest()[:16], 16) / 16**16


def test_file_source_key_follows_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.png").write_text("one")
    keys = [FileSource(tmp_path).key()]
    (tmp_path / "b.png").write_text("another")
    assert FileSource(tmp_path).key() == keys[0] == json.loads(json.dumps(keys[0]))
    (tmp_path / "a.txt").write_text("four")
    keys.append(FileSource(tmp_path).key())
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    keys.append(FileSource(tmp_path).key())
    (tmp_path / "c.txt").write_text("")
    keys.append(FileSource(tmp_path).key())
    (tmp_path / "a.txt").rename(tmp_path / "d.txt")
    keys.append(FileSource(tmp_path).key())
    assert len({json.dumps(key) for key in keys}) == 5


def test_file_source_rejects_empty_paths(tmp_path: Path) -> None:
    assert error_text(FileSource(tmp_path / "gone")) == f"data.path: {tmp_path}/gone does not exist"
    (tmp_path / "a.pdf").write_text("")
    kinds = ".txt, .md, .rst, .py, .jsonl (each also .gz, .xz, .zst) or .parquet"
    assert error_text(FileSource(tmp_path)) == f"data.path: {tmp_path} holds no {kinds} file"
    assert (
        error_text(FileSource(tmp_path / "a.pdf", "data.heldout"))
        == f"data.heldout: {tmp_path}/a.pdf holds no {kinds} file"
    )


@pytest.mark.parametrize(("line", "problem"), [
    ('{"text": "a"', "not a JSON object: Expecting ',' delimiter"),
    ("[1]", "a record needs the key `text` with a string"),
    ('{"txt": "a"}', "a record needs the key `text` with a string"),
    ('{"text": 3}', "a record needs the key `text` with a string"),
    ('{"text": null}', "a record needs the key `text` with a string"),
    ('{"text": "a", "n": ' + "9" * 5000 + "}", "not a JSON object: Exceeds the limit (4300 digits) for integer string conversion"),
    ('{"text": "a", "n": ' + "[" * 200_000 + "}", "not a JSON object: "),
])  # fmt: skip
def test_file_source_error_names_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    assert error_text(FileSource(path)).startswith(f"{path}:3: {problem}")


def damaged(raw: bytes, how: str) -> bytes:
    middle = len(raw) // 2
    return {"cut": raw[:-middle], "changed": raw[:middle] + b"\0" * 40 + raw[middle + 40 :], "none": b"nonsense"}[how]


@pytest.mark.parametrize("how", ["cut", "changed", "none"])
@pytest.mark.parametrize("kind", ["xz", "gz", "zst"])
def test_file_source_rejects_damaged_archives(tmp_path: Path, kind: str, how: str) -> None:
    # random letters, so that the archive is long
    texts = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(2000)]
    raw = {"xz": lzma.compress, "gz": gzip.compress, "zst": zstd}[kind](lines(texts).encode())
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes(damaged(raw, how))
    message = error_text(FileSource(path))
    assert message.startswith(f"{path}:" if "not a JSON object" in message else f"{path}: cannot be read after line ")


def test_file_source_rejects_damaged_parquet(tmp_path: Path) -> None:
    path = table(tmp_path / "x.parquet", prose(50))
    content = path.read_bytes()
    for raw in (content[:-9], b"PAR1" + content[:90] + b"PAR1", b""):
        path.write_bytes(raw)
        assert error_text(FileSource(path)).startswith(f"{path}: cannot be read as Parquet: ")


def test_file_source_rejects_parquet_without_text(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"content": ["a"], "id": [1]}), path)
    assert error_text(FileSource(path)) == f"{path}: has no column `text`; its columns: content, id"
    parquet.write_table(pa.table({"text": ["a", None]}), path)
    assert error_text(FileSource(path)) == f"{path}:2: the column `text` holds NoneType, not a string"
    parquet.write_table(pa.table({"text": [1]}), path)
    assert error_text(FileSource(path)) == f"{path}:1: the column `text` holds int, not a string"


def test_column_selects_the_text_and_the_key(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"content": ["a"], "text": ["b"]}), tmp_path / "x.parquet")
    (tmp_path / "y.jsonl").write_text('{"content": "c", "text": "d"}\n')
    for column, expected in (("content", ["a", "c"]), ("text", ["b", "d"])):
        assert [text.text for text in FileSource(tmp_path, column=column).documents()] == expected
    usual, changed = (FileSource(tmp_path, column=column).key() for column in ("text", "content"))
    assert changed == [*usual, "content"]
    message = error_text(FileSource(tmp_path / "y.jsonl", column="body"))
    assert message.endswith(
        "needs the key `body` with a string; data.column (--column) may name another: content, text"
    )


def test_hub_dataset_reads_its_column_and_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = [f"{split} {number}" for number in range(30)]
        (tmp_path / "data").mkdir(exist_ok=True)
        parquet.write_table(pa.table({"story": rows}), tmp_path / "data" / f"{split}-0.parquet", row_group_size=4)
    data = DataConfig(
        corpus="hub", path=str(tmp_path), column="story", settings={"hub": {"dataset": "own/stories", "split": "test"}}
    )
    kind = CORPORA.load("hub")
    documents = goes_on_everywhere(lambda: kind.source(data))
    assert [(text.name, text.text) for text in documents] == [(f"test/{n}", f"test {n}") for n in range(30)]
    keys = []
    for change in ({}, {"column": "text"}, {"settings": {"hub": {"dataset": "own/stories"}}}):
        keys.append(json.dumps(kind.source(data.model_copy(update=change)).key()))
    assert len(set(keys)) == 3
    message = error_text(kind.source(data.model_copy(update={"column": "text"})))
    assert message.endswith("column `text` holds no string; data.column (--column) may name another: story")
    assert "needs data.settings.hub.dataset" in refused(lambda: kind.source(DataConfig(corpus="hub")))
    assert kind.remote(DataConfig(corpus="hub"))
    assert not kind.remote(data)


def test_file_source_reports_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("")

    def refuse(self: Path, *mode: Any, **more: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert error_text(FileSource(tmp_path)) == f"{path}: cannot be read: Permission denied"


# --- lines of Wikipedia -------------------------------------------------------------------------------------------


def test_articles_join_lines_without_loss() -> None:
    rows = [
        *article("First", " text of it \n", "", " = = Section = = \n", " = 5 apples , not a heading\n", " = = = Deep = = = \n"),
        *article("E = mc ²", " a title with a sign\n", "= x =no heading, nothing around it\n"),
        *article("Alone"), *article("Last", " end"),
    ]  # fmt: skip
    documents = list(articles(iter(rows)))
    assert [text.split("\n")[0] for text in documents] == [" = First = ", " = E = mc ² = ", " = Alone = ", " = Last = "]
    assert "".join(documents) == "".join(rows)
    assert documents[0].count("\n") == 5
    assert documents[2] == " = Alone = \n"


def test_articles_include_lines_before_first_heading() -> None:
    assert list(articles(iter(["", " lead\n", "", " = A = \n", " b\n"]))) == [" lead\n", " = A = \n b\n"]
    assert list(articles(iter([]))) == []
    assert list(articles(iter(["", "\n", " "]))) == []


# --- the hub ------------------------------------------------------------------------------------------------------


def hub(name: str, path: Path | None) -> HubSource:
    return HubSource(CORPORA.load(name).spec, path)


def test_hub_source_reads_fineweb_edu_sample_alone(tmp_path: Path) -> None:
    texts = prose(27)
    root = fineweb_edu(tmp_path / "FineWeb Edu ü", texts)
    documents = goes_on_everywhere(lambda: hub("fineweb-edu", root))
    assert documents == [Text(f"train/{number}", text) for number, text in enumerate(texts)]


@pytest.mark.parametrize("layout", ["card", "quoted card", "no card", "files alone", "folder of the config"])
def test_hub_source_reads_partial_copies(tmp_path: Path, layout: str) -> None:
    texts = prose(9)
    root = fineweb_edu(tmp_path / "copy", texts)
    card = root / "README.md"
    if layout == "quoted card":
        card.write_text(card.read_text().replace("sample-10BT", '"sample-10BT"'))
    if layout in ("no card", "folder of the config"):
        card.unlink()
    if layout == "folder of the config":
        (root / "sample" / "10BT").rename(root / "sample-10BT")
    folder = root / "sample" / "10BT" if layout == "files alone" else root
    assert [text.text for text in hub("fineweb-edu", folder).documents()] == texts


def test_hub_source_reads_finepdfs(tmp_path: Path) -> None:
    texts = prose(5)
    documents = list(hub("finepdfs", finepdfs(tmp_path / "pdfs", texts)).documents())
    assert documents == [Text(f"train/{number}", text) for number, text in enumerate(texts)]


def test_hub_source_keeps_wikitext_splits(tmp_path: Path) -> None:
    parts = {
        "test": article("T", " held\n"),
        "validation": article("V 0", " checked\n") + article("V 1"),
        "train": [row for n in range(4) for row in article(f"{n}", f" text {n}\n", "", " = = S = = \n", " more\n")],
    }
    source = hub("wikitext-103", wikitext(tmp_path / "wikitext", parts))
    documents = list(source.documents())
    assert [(text.name, text.split) for text in documents] == [
        *((f"train/{n}", "train") for n in range(4)),
        *((f"validation/{n}", "validation") for n in range(2)),
        ("test/0", "heldout"),
    ]
    assert documents[2].text == " = 2 = \n text 2\n = = S = = \n more\n"
    assert "".join(text.text for text in documents if text.split == "train") == "".join(parts["train"])
    assert source.state() is None, "a preparation begins again: articles are no rows"


def test_hub_source_key_follows_files_of_copy(tmp_path: Path) -> None:
    assert hub("fineweb-edu", None).key() == ["HuggingFaceFW/fineweb-edu", "sample-10BT"]
    root = finepdfs(tmp_path / "pdfs", prose(5))
    before = hub("finepdfs", root).key()
    (root / ".cache").mkdir()
    (root / ".cache" / "download.lock").write_text("")
    assert hub("finepdfs", root).key() == before
    table(root / "data" / "train-00000-of-00001.parquet", prose(6))
    assert hub("finepdfs", root).key() != before


def test_hub_source_rejects_unreadable_copies(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert (
        refused(lambda: hub("finepdfs", gone).key(), CorpusError)
        == f"data.path: {gone} is not a folder with a copy of codelion/finepdfs-100M"
    )
    root = tmp_path / "copy"
    root.mkdir()
    start = f"data.path: {root} cannot be read as a copy of codelion/finepdfs-100M: "
    assert error_text(hub("finepdfs", root)).startswith(start)
    path = table(root / "train.parquet", prose(50))
    path.write_bytes(path.read_bytes()[:-9])
    assert error_text(hub("finepdfs", root)).startswith(start)
    for rows in ({"content": ["a"]}, {"text": ["a", None]}, {"text": [3]}):
        parquet.write_table(pa.table(rows), path)
        problem = f"{root}: split train has a row whose column `text` holds no string"
        assert error_text(hub("finepdfs", root)).partition(";")[0] == problem
    parquet.write_table(pa.table({"text": ["a"]}), path)
    parquet.write_table(pa.table({"other": [1], "text": ["a"]}), root / "train2.parquet")
    assert error_text(hub("finepdfs", root)).startswith(start)


def test_hub_source_rejects_copy_without_split(tmp_path: Path) -> None:
    root = wikitext(tmp_path / "w", {"train": article("A"), "validation": article("B"), "test": article("C")})
    (root / "wikitext-103-raw-v1" / "test-00000-of-00001.parquet").unlink()
    (root / "README.md").unlink()
    assert error_text(hub("wikitext-103", root)) == (
        f"data.path: {root} cannot be read as a copy of Salesforce/wikitext: "
        "Bad split: test. Available splits: ['train', 'validation']"
    )


class ReadTimeout(Exception):
    """Exception of httpx, which is no OSError."""


ReadTimeout.__module__ = "httpx"


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), ReadTimeout("no route to host")])
@pytest.mark.parametrize("when", ["at once", "on the way"])
def test_hub_source_reports_unreachable_hub(monkeypatch: pytest.MonkeyPatch, error: Exception, when: str) -> None:
    def rows() -> Any:
        yield {"text": "a"}
        raise error

    def load(*arguments: Any, **more: Any) -> Any:
        assert arguments == ("codelion/finepdfs-100M", None)
        assert more == {"split": "train", "streaming": True}
        if when == "at once":
            raise error
        return rows()

    monkeypatch.setattr("datasets.load_dataset", load)
    source = HubSource(FinePDFs.spec, setting="data.heldout")
    assert refused(lambda: list(source.documents()), MachineError) == (
        f"codelion/finepdfs-100M cannot be read from the Hugging Face hub ({type(error).__name__}: no route to "
        "host); run again to continue, or set data.heldout to a folder with a copy of it"
    )


def test_hub_source_passes_internal_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **more: Any) -> Any:
        raise TypeError("ours")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(TypeError, match="ours"):
        list(hub("finepdfs", None).documents())
    assert not is_external_error(KeyError("text"))
    assert is_external_error(pa.ArrowNotImplementedError("encoding"))
