"""`data prepare`, `data list`, `data verify`: their output, their files, and their exit codes."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from atma_sweep.results.console.quantities import format_tokens
from atma_sweep.sweep.commands import data_display as preparing
from atma_sweep.sweep.data import prepare
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.data.prepare import PrepareProgress
from atma_sweep.sweep.data.registry import CORPORA, all_kinds
from copies import finepdfs, fineweb_edu, prose, published_shard
from patience import PATIENCE_S, until
from prepared import divided, document, joined, naive, parts, put, stream
from rich.console import Console

Command = Callable[..., tuple[int, str, str]]
KEYS = [
    "names", "corpus", "path", "heldout", "tokenizer", "train_tokens", "validation_tokens", "heldout_tokens",
    "heldout_documents", "fingerprint", "folder", "bytes", "prepared_at",
]  # fmt: skip


def states(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return put(tmp_path / "größe text", prose(60))


def corpora(tmp_path: Path) -> Path:
    return tmp_path / "atma-runs" / "corpora"


# --- prepare ------------------------------------------------------------------------------------------------------


def test_prepare_prints_the_prepared_corpus(text: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("data", "prepare", "größe text", "--name", "mine", "--heldout-tokens", "150", "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert list(row) == KEYS
    assert (row["names"], row["corpus"], row["path"]) == (["mine"], "files", str(text))
    assert (row["heldout"], row["tokenizer"], row["folder"]) == (
        None,
        "bytes",
        f"{corpora(tmp_path)}/{row['fingerprint'][:16]}",
    )
    named = {path.name: path.read_text() for path in sorted(text.iterdir())}
    expected = divided(named, long=150)
    assert row["train_tokens"] == len(expected["train"])
    assert row["validation_tokens"] == len(expected["validation"])
    assert (row["heldout_documents"], row["heldout_tokens"]) == (
        len(expected["heldout"]), len(joined(list(expected["heldout"].values()))),
    )  # fmt: skip
    corpus = open_corpus(corpora(tmp_path), row["fingerprint"])
    assert stream(corpus) == expected["train"]
    total = row["train_tokens"] + row["validation_tokens"] + row["heldout_tokens"]
    assert re.fullmatch(rf"files: 60 documents, {format_tokens(total)} tokens, [\d.,]+[KMB]? tokens/s in \d+ s\n", err)


def test_prepare_again_changes_nothing(text: Path, tmp_path: Path, command: Command) -> None:
    arguments = ("data", "prepare", str(text), "--heldout-tokens", "150")
    first = command(*arguments)
    before = states(tmp_path)
    second = command(*arguments)
    assert (first[0], second[0]) == (0, 0)
    assert first[1].splitlines()[-2:] == second[1].splitlines()[-2:], "the same table"
    assert "tokens/s" in first[1]
    assert "tokens/s" not in second[1]
    assert states(tmp_path) == before


@pytest.mark.parametrize("written", ["1000", "1e3", "1_000"])
def test_tokens_are_cut_exactly(text: Path, tmp_path: Path, command: Command, written: str) -> None:
    code, out, _ = command("data", "prepare", str(text), "--tokens", written, "--json")
    assert (code, json.loads(out)[0]["train_tokens"]) == (0, 1000)
    corpus = open_corpus(corpora(tmp_path), json.loads(out)[0]["fingerprint"])
    named = {path.name: path.read_text() for path in sorted(text.iterdir())}
    assert stream(corpus) == divided(named, long=65_601, train=1000)["train"]


def test_prepare_local_copy_with_heldout_from_another_corpus(tmp_path: Path, command: Command) -> None:
    fineweb_edu(tmp_path / "fw edu", prose(90))
    finepdfs(tmp_path / "pdfs", [text * 9 for text in prose(6)])
    arguments = "--path|fw edu|--tokenizer|bytes|--tokens|5e3|--heldout|pdfs|--heldout-tokens|300".split("|")
    code, out, _ = command("data", "prepare", "fineweb-edu", *arguments, "--name", "small", "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert (row["path"], row["heldout"]) == (str(tmp_path / "fw edu"), str(tmp_path / "pdfs"))
    assert row["train_tokens"] == 5000
    corpus = open_corpus(corpora(tmp_path), row["fingerprint"])
    named = {f"train/{n}": text for n, text in enumerate(prose(90))}
    assert stream(corpus) == joined(naive(named, long=10**6, train=5000)["train"])
    held = [document(text * 9) for text in prose(6) if len(text * 9) >= 299]
    assert [tokens.tolist() for tokens in corpus.heldout] == held
    assert corpus.heldout_names == [f"data/train-00000-of-00001.parquet:{n + 1}" for n, text in enumerate(prose(6)) if len(text * 9) >= 299]  # fmt: skip


def test_prepare_recognises_shards_by_their_files(tmp_path: Path, command: Command) -> None:
    published_shard(tmp_path / "s" / "x_train_1.bin", list(range(40)))
    published_shard(tmp_path / "s" / "x_val_1.bin", list(range(9)))
    code, out, _ = command("data", "prepare", "s", "--json")
    assert (code, json.loads(out)[0]["corpus"], json.loads(out)[0]["train_tokens"]) == (0, "shards", 40)


def test_prepare_requires_an_unusual_end_of_text_to_be_named(text: Path, tmp_path: Path, command: Command) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[fin]", "one", "two"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "own.json"))
    arguments = ("data", "prepare", str(text), "--tokenizer", "json", "--tokenizer-file", "own.json")
    code, _, err = command(*arguments)
    assert code == 2
    assert err.endswith("[SEP]; name its own in data.end_of_text\n")
    code, out, _ = command(*arguments, "--end-of-text", "[fin]", "--json")
    assert code == 0
    corpus = open_corpus(corpora(tmp_path), json.loads(out)[0]["fingerprint"])
    assert (stream(corpus) + corpus.validation.tolist()).count(1) == 60
    assert corpus.load_tokenizer().encode("one [fin] two").tolist() == [2, 3]


def test_odd_text_goes_in_as_it_is(tmp_path: Path, command: Command) -> None:
    (tmp_path / "t").mkdir()
    lines = [r'{"text": "a\r\nb \ud800"}', "", '{"text": ""}', '{"text": "caf\xe9"}']
    (tmp_path / "t" / "a.jsonl").write_bytes("\r\n".join(lines).encode("latin-1"))
    (tmp_path / "t" / "b.txt").write_bytes(b"one\r\ntwo\xff")
    code, out, _ = command("data", "prepare", "t", "--json")
    assert code == 0
    corpus = open_corpus(corpora(tmp_path), json.loads(out)[0]["fingerprint"])
    token_parts = sorted(parts(stream(corpus) + corpus.validation.tolist()))
    assert token_parts == sorted(document(text) for text in ("a\r\nb ?", "", "caf\ufffd", "one\ntwo\ufffd"))


@pytest.mark.parametrize(
    ("what", "package"), [("x.jsonl.zst", "pyarrow"), ("x.parquet", "pyarrow"), ("hf:own/text", "datasets")]
)
def test_missing_package_names_its_extra(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, what: str, package: str
) -> None:
    (tmp_path / what.replace(":", "-").replace("/", "-")).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = command("data", "prepare", what)
    assert (code, out) == (3, "")
    assert re.fullmatch(rf"atma-sweep: the Python package '{package}', .* pip install 'atma-sweep\[\w+\]'\n", err)


@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_truncated_archive_is_an_error_until_replaced(tmp_path: Path, command: Command, kind: str) -> None:
    raw = "".join(json.dumps({"text": text}) + "\n" for text in prose(900)).encode()
    compressed = (lzma.compress if kind == "xz" else gzip.compress)(raw)
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes(compressed[: len(compressed) // 2])
    code, out, err = command("data", "prepare", str(path))
    assert (code, out) == (2, "")
    cause = "Compressed file ended before the end-of-stream marker was reached"
    assert re.fullmatch(rf"atma-sweep: {re.escape(str(path))}: cannot be read after line \d+: {cause}\n", err)
    path.write_bytes(compressed)
    assert command("data", "prepare", str(path))[0] == 0


def test_interrupted_preparation_resumes(
    text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(prepare, "SYNC_SECONDS", -1.0)
    real, heard = preparing.PrepareDisplay.__call__, []

    def interrupted(self: Any, progress: PrepareProgress) -> None:
        heard.append(progress)
        if len(heard) == 4:
            raise KeyboardInterrupt
        real(self, progress)

    monkeypatch.setattr(preparing.PrepareDisplay, "__call__", interrupted)
    code, _, err = command("data", "prepare", str(text))
    assert (code, err) == (130, "atma-sweep: files: stopped; run again to continue\n")
    assert command("data", "list")[1].startswith("no corpus is prepared in ")
    assert command("data", "prepare", str(text))[0] == 0
    assert [progress.documents for progress in heard] == [10, 20, 30, 40, 40, 50, 60]
    assert heard[-1].new_tokens < heard[-1].tokens


@pytest.mark.thorough
def test_prepare_without_a_network_fails_at_once(tmp_path: Path) -> None:
    """Exit code 3 and one line, for streamed text, for shards, and for a held-out corpus after the text itself."""
    put(tmp_path / "t", prose(9))
    arguments = {
        "fineweb-edu": ("fineweb-edu", "--tokenizer", "bytes"),
        "fineweb-edu-shards": ("fineweb-edu-shards", "--tokenizer", "bytes"),
        "lender": ("t", "--heldout", "finepdfs"),
    }
    # an empty cache, or the machine might have what is asked for
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-m", "atma_sweep.cli", "data", "prepare", *arguments, "--runs", name],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name, arguments in arguments.items()
    }  # fmt: skip
    outputs = {}
    for name, process in runs.items():
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, len(err.splitlines())) == (3, "", 1), err
        outputs[name] = err
    start = "atma-sweep: {} cannot be read from the Hugging Face hub ("
    assert outputs["fineweb-edu"].startswith(start.format("HuggingFaceFW/fineweb-edu"))
    assert outputs["fineweb-edu"].endswith("or set data.path to a folder with a copy of it\n")
    assert outputs["lender"].startswith(start.format("codelion/finepdfs-100M"))
    assert outputs["lender"].endswith("or set data.heldout to a folder with a copy of it\n")
    assert outputs["fineweb-edu-shards"].startswith(
        "atma-sweep: kjj0/finewebedu10B-gpt2/finewebedu_train_000001.bin cannot be downloaded ("
    )


# --- list ---------------------------------------------------------------------------------------------------------


def test_list(text: Path, tmp_path: Path, command: Command) -> None:
    nothing = f"no corpus is prepared in {corpora(tmp_path)}; see atma-sweep data prepare --help\n"
    assert command("data", "list") == (0, nothing, "")
    command("data", "prepare", str(text), "--heldout-tokens", "150", "--name", "mine")
    command("data", "prepare", str(text), "--heldout-tokens", "150", "--name", "also")
    second_text = put(tmp_path / "other", prose(5, 1))
    command("data", "prepare", str(second_text), "--heldout", str(text), "--heldout-tokens", "150")
    first, two = json.loads(command("data", "list", "--json")[1])
    assert (first["names"], two["names"]) == (["also", "mine"], [])
    head, *lines = command("data", "list")[1].splitlines()
    assert head.split() == "fingerprint name corpus tokenizer train validation held out size".split()
    cells = [re.split(r" {2,}", line) for line in lines]
    assert [cell[:3] for cell in cells] == [
        [first["fingerprint"][:12], "also, mine", f"files {text}"], [two["fingerprint"][:12], "-", f"files {second_text}"],
    ]  # fmt: skip
    assert cells[0][3:] == [
        "bytes", format_tokens(first["train_tokens"]), format_tokens(first["validation_tokens"]), f"{first['heldout_documents']} documents", "0 MiB",
    ]  # fmt: skip
    assert cells[1][6] == f"{two['heldout_documents']} documents of {text}"


def test_what_can_be_prepared(command: Command) -> None:
    code, out, _ = command("data", "list", "--known")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(CORPORA)
    rows = json.loads(command("data", "list", "--known", "--json")[1])
    assert {row["corpus"]: row["description"] for row in rows} == {
        name: kind.description for name, kind in all_kinds().items()
    }


# --- verify -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["train_000000.bin", "heldout.bin", "tokenizer.json", "manifest.json"])
def test_verify_exits_with_1_after_a_flipped_byte(text: Path, tmp_path: Path, command: Command, file: str) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "<eos>", *(str(n) for n in range(60))])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "own.json"))
    arguments = "--tokenizer json --tokenizer-file own.json --heldout-tokens 30 --name mine --json".split()
    (row,) = json.loads(command("data", "prepare", str(text), *arguments)[1])
    fine = put(tmp_path / "fine", prose(5))
    (second,) = json.loads(command("data", "prepare", str(fine), "--json")[1])
    folder, number = Path(row["folder"]), row["fingerprint"]
    assert command("data", "verify") == (0, f"{folder}: unchanged\n{second['folder']}: unchanged\n", "")
    assert command("data", "verify", "mine") == (0, f"{folder}: unchanged\n", "")
    assert command("data", "verify", "files") == command("data", "verify"), "the list's word for both"
    path = folder / file
    raw = bytearray(path.read_bytes())
    raw[1030 if path.suffix == ".bin" else len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    for word in ("mine", "files", number[:16], number[:7]):
        code, out, err = command("data", "verify", word)
        assert (code, err) == (1, "")
        lines = out.splitlines()
        assert (f"{second['folder']}: unchanged" in lines) == (word == "files")
        wrong = [line for line in lines if not line.startswith(second["folder"])]
        assert wrong[0].startswith(f"{path}: ")
        assert wrong[0].endswith(f"; remove {folder} and prepare the corpus again")
    code, out, _ = command("data", "verify", "--json")
    assert code == 1
    differs = {row["folder"]: bool(row["problems"]) for row in json.loads(out)}
    assert differs == {str(folder): True, second["folder"]: False}
    # what it says helps
    for gone in folder.iterdir():
        gone.unlink()
    folder.rmdir()
    (again,) = json.loads(command("data", "prepare", str(text), *arguments)[1])
    assert (again["fingerprint"], again["names"]) == (number, ["mine"])
    assert command("data", "verify")[0] == 0


def test_verify_of_nothing_and_of_what_is_not_there(tmp_path: Path, command: Command) -> None:
    assert command("data", "verify") == (0, f"no corpus is prepared in {corpora(tmp_path)}\n", "")
    assert command("data", "verify", "mine") == (
        2, "", f"atma-sweep: no corpus 'mine' is prepared in {corpora(tmp_path)}; list them with atma-sweep data list\n",
    )  # fmt: skip


def test_databases_have_their_own_corpora(text: Path, tmp_path: Path, command: Command) -> None:
    command("data", "prepare", str(text), "--db", "deep/other.db")
    assert (tmp_path / "deep" / "other-runs" / "corpora").is_dir()
    assert command("data", "list", "--json")[1] == "[]\n"
    assert len(json.loads(command("data", "list", "--db", "deep/other.db", "--json")[1])) == 1
    assert len(json.loads(command("data", "list", "--runs", "deep/other-runs", "--json")[1])) == 1


# --- what is shown on the way -------------------------------------------------------------------------------------


def progress(phase: str, tokens: int, seconds: float, wanted: int | None = None) -> PrepareProgress:
    return PrepareProgress(phase, 1234, tokens, seconds, tokens, wanted)


def test_display_prints_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(preparing.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with preparing.PrepareDisplay(Console(file=out, width=200), "books") as tell:
        for seconds in range(0, 50, 5):
            clock[0] = float(seconds)
            tell(progress("tokenizing", 2_000_000 * seconds, float(seconds or 1)))
    assert out.getvalue().splitlines() == [
        "books: tokenizing: 1,234 documents, 40.0M tokens, 2.00M tokens/s",
        "books: tokenizing: 1,234 documents, 80.0M tokens, 2.00M tokens/s",
        "books: 1,234 documents, 90.0M tokens, 2.00M tokens/s in 45 s",
    ]


def test_display_draws_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with preparing.PrepareDisplay(Console(file=out, width=120, force_terminal=True), "books") as tell:
        tell(progress("tokenizing", 500, 1.0, 1000))
        bar = re.compile(r"books +━+.* tokenizing: 50 %, 1,234 documents, 500 tokens, 500 tokens/s")
        until(lambda: bar.search(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())), "the bar")
    assert "books: 1,234 documents, 500 tokens, 500 tokens/s in 1 s" in out.getvalue()


def test_share_of_a_preparation_is_that_of_what_ends_first() -> None:
    assert progress("tokenizing", 500, 1.0).share is None
    assert progress("tokenizing", 500, 1.0, 1000).share == 0.5
    assert replace(progress("tokenizing", 500, 1.0, 1000), read_share=0.75).share == 0.75
    assert replace(progress("tokenizing", 500, 1.0), read_share=0.25).share == 0.25
    assert progress("tokenizing", 5000, 1.0, 1000).share == 1.0


def test_display_prints_nothing_without_progress_or_on_error() -> None:
    out = io.StringIO()
    with preparing.PrepareDisplay(Console(file=out), "books"):
        pass

    def fail() -> None:
        with preparing.PrepareDisplay(Console(file=out), "books") as tell:
            tell(progress("tokenizing", 1, 1.0))
            raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        fail()
    assert out.getvalue() == ""
