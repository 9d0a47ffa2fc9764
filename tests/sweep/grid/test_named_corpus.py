"""A corpus with a name brings its tokenizer and its vocabulary; what the grid says besides has to agree."""

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
NUM_WORDS = 300
HEAD = "name: g\nextends: micro\naxes: {attn_type: [nope, polar]}\n"


def write_words(path: Path, count: int = NUM_WORDS) -> Path:
    """A tokenizers file of so many words."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[UNK]", "<eos>", *(str(n) for n in range(count - 2))])}
    model = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save(str(path))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where launch looks: `books`, words of a file, and `letters`, bytes; the base says bytes and 264."""
    put(tmp_path / "b", [text * 3 for text in prose(80)])
    root_folder = tmp_path / "atma-runs" / "corpora"
    settings: dict[str, Any] = {"tokenizer": "json", "tokenizer_file": str(write_words(tmp_path / "own.json"))}
    prepare(files(tmp_path / "b", heldout_tokens=40, **settings), root_folder, name="books")
    prepare(files(tmp_path / "b", heldout_tokens=200), root_folder, name="letters")
    return root_folder


def mark(file: Path) -> str:
    return f"json:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def cells(path: Path, root: Path, **options: Any) -> list[Cell]:
    grid_cells, remarks = texts.expand_grid(load_grid(path, **options), root)
    assert remarks == []
    return grid_cells


def test_the_name_is_enough(write: Write, tmp_path: Path, root: Path) -> None:
    """The base's tokenizer and vocabulary are its own corpus's; the cells are those of one who said everything."""
    prepared = corpora.prepared("books", root)
    assert prepared is not None
    short = cells(write(f"{HEAD}set: {{data.corpus: books}}\n"), root)
    corpus_settings = f"corpus: books, tokenizer: json, tokenizer_file: {tmp_path}/own.json"
    long = cells(write(f"{HEAD}set: {{data: {{{corpus_settings}}}, model.vocab_size: {NUM_WORDS}}}\n"), root)
    assert [cell.id for cell in short] == [cell.id for cell in long]
    for short_cell, long_cell in zip(short, long, strict=True):
        assert (short_cell.config.model, short_cell.config.train) == (long_cell.config.model, long_cell.config.train)
        data = short_cell.config.data
        assert (data.tokenizer, data.fingerprint, short_cell.config.model.vocab_size) == (
            "json",
            prepared.fingerprint,
            NUM_WORDS,
        )
        tokenizer = tokenizers.load_tokenizer(data.tokenizer, data.tokenizer_file, data.end_of_text)
        assert (tokenizer.name, tokenizer.vocabulary) == (mark(tmp_path / "own.json"), NUM_WORDS)


@pytest.mark.parametrize(("settings", "size"), [
    ("data.corpus: letters", 264), ("data.corpus: letters, model.vocab_size: 300", 300),
    ("data.corpus: books, model.vocab_size: 320", 320), ("data.corpus: books", NUM_WORDS),
])  # fmt: skip
def test_a_vocabulary_that_is_large_enough_stays(write: Write, root: Path, settings: str, size: int) -> None:
    grid_cells = cells(write(f"{HEAD}set: {{{settings}}}\n"), root)
    assert {cell.config.model.vocab_size for cell in grid_cells} == {size}


def test_each_level_of_an_axis_has_its_own(write: Write, root: Path) -> None:
    path = write("name: g\nextends: micro\naxes: {data.corpus: [letters, books, stdlib]}\n")
    grid_cells, _ = texts.expand_grid(load_grid(path), root, dry=True)
    settings = [(cell.config.data.tokenizer, cell.config.model.vocab_size) for cell in grid_cells]
    assert settings == [("bytes", 264), ("json", NUM_WORDS), ("bytes", 264)]


def test_the_command_line_names_another_corpus_than_the_grid(write: Write, root: Path) -> None:
    path = write(f"{HEAD}set: {{data: {{corpus: letters, tokenizer: bytes}}}}\n")
    grid_cells = cells(path, root, sets=["data.corpus=books"], rename="h")
    assert {cell.config.data.tokenizer for cell in grid_cells} == {"json"}


def test_a_base_of_a_base_is_below_too(write: Write, root: Path) -> None:
    write("extends: micro\nset: {train.clip: 2}\n", "middle.yaml")
    write("extends: middle\nset: {data.corpus: books}\n", "upper.yaml")
    grid_cells = cells(write("name: g\nextends: upper\n"), root)
    assert [(cell.config.data.tokenizer, cell.config.model.vocab_size) for cell in grid_cells] == [("json", NUM_WORDS)]


DIFFERS = "corpus {!r} was prepared with tokenizer {}, but the grid asks for {}"


@pytest.mark.parametrize(("settings", "key", "said"), [
    ("data: {corpus: books, tokenizer: bytes}", "set.data.tokenizer", DIFFERS.format("books", "{own}", "bytes")),
    ("data: {corpus: letters, tokenizer: json, tokenizer_file: own.json}", "set.data.tokenizer",
     DIFFERS.format("letters", "bytes", "json")),
    ("data: {corpus: books, tokenizer_file: other.json}", "set.data.tokenizer_file", DIFFERS.format("books", "{own}", "{other}")),
    ("data: {corpus: books, end_of_text: '7'}", "set.data.end_of_text", DIFFERS.format("books", "{own}", "{own}:7")),
    ("data: {corpus: books, end_of_text: nosuch}", "set.data.end_of_text",
     "data.tokenizer_file: {copy} has no token nosuch to end a text with; name its own in data.end_of_text"),
    ("{data.corpus: books, model.vocab_size: 299}", "set.model.vocab_size",
     "model.vocab_size is 299, but corpus 'books' was prepared with tokenizer {own} of 300 tokens"),
])  # fmt: skip
def test_only_a_contradiction_is_an_error_and_names_both(
    write: Write, tmp_path: Path, root: Path, command: Command, settings: str, key: str, message: str
) -> None:
    prepared = corpora.prepared("books", root)
    assert prepared is not None
    write_words(tmp_path / "other.json", 250)
    path = write(f"{HEAD}set:\n  {settings}\n" if settings[0] != "{" else f"{HEAD}set: {settings}\n")
    own, second = mark(tmp_path / "own.json"), mark(tmp_path / "other.json")
    line = 4 if settings[0] == "{" else 5
    code, out, err = command("launch", str(path), "--dry-run")
    assert (code, out) == (2, "")
    assert err == f"atma-sweep: {path}:{line}: {key}: {message.format(own=own, other=second, copy=prepared.file)}\n"


def test_the_manifest_is_read_once_a_plan(write: Write, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    manifest = corpora.manifest
    monkeypatch.setattr(corpora, "manifest", lambda folder: (read.append(folder), manifest(folder))[1])
    path = write(f"{HEAD}seeds: 5\nset: {{data.corpus: books}}\n".replace("polar]", "polar], data.shuffle: [on, off]"))
    assert len(cells(path, root)) == 20
    assert len(read) == 1


def test_data_prepare_takes_a_grid_that_names_one(write: Write, root: Path, command: Command) -> None:
    path = write(f"{HEAD}set: {{data.corpus: books}}\n")
    code, out, err = command("data", "prepare", "--grid", str(path), "--json")
    assert (code, err) == (0, "")
    assert [row["names"] for row in json.loads(out)] == [["books"]]
