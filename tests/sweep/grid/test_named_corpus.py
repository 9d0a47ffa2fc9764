"""Corpora prepared under a name set tokenizer and vocabulary; contradicting settings are errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.data import corpora
from atma_sweep.sweep.data import tokenizer as tokenizers
from atma_sweep.sweep.data.prepare import prepare
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning import admission as texts
from copies import prose
from prepared import files, put

Write = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
NUM_TOKENS = 300
HEAD = "name: g\nextends: micro\naxes: {attn_type: [nope, polar]}\n"


def write_tokenizer(path: Path, count: int = NUM_TOKENS) -> Path:
    """Write a tokenizers file with `count` words and return its path."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[UNK]", "<eos>", *(str(n) for n in range(count - 2))])}
    model = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save(str(path))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of the corpora `books`, with a word tokenizer, and `letters`, in bytes.

    The base says bytes and a vocabulary of 264.
    """
    put(tmp_path / "b", [text * 3 for text in prose(80)])
    root_folder = tmp_path / "atma-runs" / "corpora"
    settings: dict[str, Any] = {"tokenizer": "json", "tokenizer_file": str(write_tokenizer(tmp_path / "own.json"))}
    prepare(files(tmp_path / "b", heldout_tokens=40, **settings), root_folder, name="books")
    prepare(files(tmp_path / "b", heldout_tokens=200), root_folder, name="letters")
    return root_folder


def mark(file: Path) -> str:
    return f"json:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def cells(path: Path, root: Path, **options: Any) -> list[Cell]:
    grid_cells, remarks = texts.expand_grid(load_grid(path, **options), root)
    assert remarks == []
    return grid_cells


def test_named_corpus_sets_tokenizer_and_vocabulary(write: Write, tmp_path: Path, root: Path) -> None:
    """The base's own tokenizer and vocabulary belong to another corpus.

    The cells equal those with every setting spelled out.
    """
    prepared = corpora.find_prepared("books", root)
    assert prepared is not None
    short = cells(write(f"{HEAD}set: {{data.corpus: books}}\n"), root)
    corpus_settings = f"corpus: books, tokenizer: json, tokenizer_file: {tmp_path}/own.json"
    long = cells(write(f"{HEAD}set: {{data: {{{corpus_settings}}}, model.vocab_size: {NUM_TOKENS}}}\n"), root)
    assert [cell.id for cell in short] == [cell.id for cell in long]
    for short_cell, long_cell in zip(short, long, strict=True):
        assert (short_cell.config.model, short_cell.config.train) == (long_cell.config.model, long_cell.config.train)
        data = short_cell.config.data
        assert (data.tokenizer, data.fingerprint, short_cell.config.model.vocab_size) == (
            "json",
            prepared.fingerprint,
            NUM_TOKENS,
        )
        tokenizer = tokenizers.load_tokenizer(data.tokenizer, data.tokenizer_file, data.end_of_text)
        assert (tokenizer.name, tokenizer.vocabulary) == (mark(tmp_path / "own.json"), NUM_TOKENS)


@pytest.mark.parametrize(("settings", "size"), [
    ("data.corpus: letters", 264), ("data.corpus: letters, model.vocab_size: 300", 300),
    ("data.corpus: books, model.vocab_size: 320", 320), ("data.corpus: books", NUM_TOKENS),
])  # fmt: skip
def test_named_corpus_keeps_a_larger_vocabulary(write: Write, root: Path, settings: str, size: int) -> None:
    grid_cells = cells(write(f"{HEAD}set: {{{settings}}}\n"), root)
    assert {cell.config.model.vocab_size for cell in grid_cells} == {size}


def test_named_corpus_per_axis_level(write: Write, root: Path) -> None:
    path = write("name: g\nextends: micro\naxes: {data.corpus: [letters, books, stdlib]}\n")
    grid_cells, _ = texts.expand_grid(load_grid(path), root, dry=True)
    settings = [(cell.config.data.tokenizer, cell.config.model.vocab_size) for cell in grid_cells]
    assert settings == [("bytes", 264), ("json", NUM_TOKENS), ("bytes", 264)]


def test_named_corpus_of_the_command_line(write: Write, root: Path) -> None:
    path = write(f"{HEAD}set: {{data: {{corpus: letters, tokenizer: bytes}}}}\n")
    grid_cells = cells(path, root, sets=["data.corpus=books"], rename="h")
    assert {cell.config.data.tokenizer for cell in grid_cells} == {"json"}


def test_named_corpus_overrides_every_base(write: Write, root: Path) -> None:
    write("extends: micro\nset: {train.clip: 2}\n", "middle.yaml")
    write("extends: middle\nset: {data.corpus: books}\n", "upper.yaml")
    grid_cells = cells(write("name: g\nextends: upper\n"), root)
    assert [(cell.config.data.tokenizer, cell.config.model.vocab_size) for cell in grid_cells] == [("json", NUM_TOKENS)]


DIFFERS = "corpus {!r} was prepared with tokenizer {}, but the grid requests {}"


@pytest.mark.parametrize(("settings", "key", "message"), [
    ("data: {corpus: books, tokenizer: bytes}", "set.data.tokenizer", DIFFERS.format("books", "{own}", "bytes")),
    ("data: {corpus: letters, tokenizer: json, tokenizer_file: own.json}", "set.data.tokenizer",
     DIFFERS.format("letters", "bytes", "json")),
    ("data: {corpus: books, tokenizer_file: other.json}", "set.data.tokenizer_file", DIFFERS.format("books", "{own}", "{other}")),
    ("data: {corpus: books, end_of_text: '7'}", "set.data.end_of_text", DIFFERS.format("books", "{own}", "{own}:7")),
    ("data: {corpus: books, end_of_text: nosuch}", "set.data.end_of_text",
     "data.tokenizer_file: {copy} has no end-of-text token nosuch; name its own in data.end_of_text"),
    ("{data.corpus: books, model.vocab_size: 299}", "set.model.vocab_size",
     "model.vocab_size is 299, but corpus 'books' was prepared with tokenizer {own} of 300 tokens; raise it to 300 or more"),
])  # fmt: skip
def test_named_corpus_contradiction_names_both(
    write: Write, tmp_path: Path, root: Path, command: Command, settings: str, key: str, message: str
) -> None:
    prepared = corpora.find_prepared("books", root)
    assert prepared is not None
    write_tokenizer(tmp_path / "other.json", 250)
    path = write(f"{HEAD}set:\n  {settings}\n" if settings[0] != "{" else f"{HEAD}set: {settings}\n")
    own, second = mark(tmp_path / "own.json"), mark(tmp_path / "other.json")
    line = 4 if settings[0] == "{" else 5
    code, out, err = command("launch", str(path), "--dry-run")
    assert (code, out) == (2, "")
    assert err == f"atma-sweep: {path}:{line}: {key}: {message.format(own=own, other=second, copy=prepared.file)}\n"


def test_named_corpus_manifest_is_read_once_per_plan(write: Write, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    manifest = corpora.read_manifest
    monkeypatch.setattr(corpora, "read_manifest", lambda folder: (read.append(folder), manifest(folder))[1])
    path = write(f"{HEAD}seeds: 5\nset: {{data.corpus: books}}\n".replace("polar]", "polar], data.shuffle: [on, off]"))
    assert len(cells(path, root)) == 20
    assert len(read) == 1


def test_data_prepare_accepts_grid_with_named_corpus(write: Write, root: Path, command: Command) -> None:
    path = write(f"{HEAD}set: {{data.corpus: books}}\n")
    code, out, err = command("data", "prepare", "--grid", str(path), "--json")
    assert (code, err) == (0, "")
    assert [row["names"] for row in json.loads(out)] == [["books"]]
