"""Corpora by name: built-in ones, and those of plugin files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.model.registry import registering_for
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import CorpusKind, corpora, register_corpus
from atma_sweep.sweep.data.corpora import CorpusUnknown, open_corpus
from atma_sweep.sweep.data.prepare import prepare
from atma_sweep.sweep.data.registry import CORPORA, all_kinds
from atma_sweep.sweep.data.shards import write_shard
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import identity
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.plugins import load_plugins
from atma_sweep.sweep.planning.admission import expand_grid
from bench import Bench
from registries import scope

PLUGIN = """
from atma_sweep.sweep.data import CorpusKind, Text, register_corpus

@register_corpus("counting")
class Counting(CorpusKind):
    description = "numbers, counted"

    @classmethod
    def texts(cls, data):
        for first in range(60):
            yield Text(f"count/{first}", " ".join(str(first + step) for step in range(300)))
"""


@pytest.mark.parametrize("name", CORPORA)
def test_corpus_kinds_have_descriptions(name: str) -> None:
    kind = CORPORA.load(name)
    assert issubclass(kind, CorpusKind)
    assert kind.description
    DataConfig(corpus=name, **kind.preset)
    assert kind.ready == ("shards" in vars(kind))
    assert kind.remote(DataConfig(corpus=name)) == (kind.preset != {} or name == "hub")
    assert not kind.remote(DataConfig(corpus=name, path="here"))


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Context manager that forgets loaded plugins at its end, as a process of its own would."""
    with scope():
        yield
    for name in [name for name in sys.modules if name.startswith("atma_sweep_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Grid whose text comes from a plugin next to it."""
    case = Bench(tmp_path)
    case.edit(f"corpus: files, path: {case.text}", "corpus: counting")
    (tmp_path / "micro.yaml").write_text((tmp_path / "micro.yaml").read_text() + "plugins: [count.py]\n")
    (tmp_path / "count.py").write_text(PLUGIN)
    return case


def test_plugin_corpus_is_prepared_and_named_in_grid(bench: Bench) -> None:
    sha = hashlib.sha256(PLUGIN.encode()).hexdigest()
    root = bench.folder / "atma-runs" / "corpora"
    with fresh():
        rows = json.loads(
            bench.ask("data", "prepare", "counting", "--plugin", "count.py", "--heldout-tokens", "400", "--json")
        )
        assert [row["corpus"] for row in rows] == ["counting"]
        assert "numbers, counted" in bench.ask("data", "list", "--known", "--plugin", "count.py")
    assert "counting" not in CORPORA
    # neither list nor verify needs the plugin
    assert "counting" in bench.ask("data", "list")
    assert "unchanged" in bench.ask("data", "verify", "counting")
    with fresh():
        cells, remarks = expand_grid(load_grid(str(bench.folder / "micro.yaml")), root, dry=True)
    assert remarks == []
    assert {cell.config.data.fingerprint for cell in cells} == {rows[0]["fingerprint"]}
    assert identity(cells[0].config)["data"]["corpus_source"] == sha
    corpus = open_corpus(root, rows[0]["fingerprint"])
    documents = [" ".join(str(first + step) for step in range(300)) for first in range(60)]
    texts = {bytes(part.tolist()[1:]).decode() for part in corpus.heldout}
    assert texts
    assert texts <= set(documents)
    assert corpus.train_tokens + len(corpus.validation) + sum(map(len, corpus.heldout)) == sum(
        len(w) + 1 for w in documents
    )


def test_plugin_file_enters_id_and_request(bench: Bench) -> None:
    root = bench.folder / "atma-runs" / "corpora"
    grid = str(bench.folder / "micro.yaml")
    with fresh():
        before, _ = expand_grid(load_grid(grid), root)
    (bench.folder / "count.py").write_text(PLUGIN.replace("range(60)", "range(61)"))
    with fresh():
        _, remarks = expand_grid(load_grid(grid), root, dry=True)
        assert "is not prepared" in remarks[0]
        after, _ = expand_grid(load_grid(grid), root)
    assert not {cell.id for cell in before} & {cell.id for cell in after}
    (bench.folder / "count.py").write_text(PLUGIN + "# the same text\n")
    with fresh():
        same, _ = expand_grid(load_grid(grid), root)
    assert {cell.config.data.fingerprint for cell in same} == {cell.config.data.fingerprint for cell in before}
    assert not {cell.id for cell in before} & {cell.id for cell in same}


def test_builtin_corpus_has_no_plugin_source(tmp_path: Path) -> None:
    sections: list[DataConfig] = []
    load_grid("quick").expand(lambda data: sections.append(data) or "f")  # type: ignore[func-returns-value]
    assert {data.corpus_source for data in sections} == {None}
    assert "plugin" not in corpora.request(sections[0])


def test_plugin_corpus_with_marked_shards(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    train, validation = (draw.integers(0, 256, size, dtype=np.uint16) for size in (5000, 900))
    marks = {name: (tokens < 9).astype(np.uint16) for name, tokens in (("train", train), ("val", validation))}
    with fresh(), registering_for("a_plugin"):

        @register_corpus("drawn")
        class Drawn(CorpusKind):
            description = "drawn numbers"
            ready = True
            may_mark = True

            @classmethod
            def shards(cls, data: DataConfig, work_folder: Path, log: Any) -> tuple[list[Path], list[Path]]:
                for name, tokens in (("train", train), ("val", validation)):
                    write_shard(work_folder / f"{name}.bin", tokens)
                    write_shard(work_folder / f"{name}.marks.bin", marks[name])
                return [work_folder / "train.bin"], [work_folder / "val.bin"]

        # shards have no long documents, so another corpus provides them
        data = DataConfig(corpus="drawn", heldout="stdlib", heldout_tokens=20_000)
        corpus = open_corpus(tmp_path, prepare(data, tmp_path))
    assert np.array_equal(corpus.train[0], train)
    assert np.array_equal(corpus.validation, validation)
    assert corpus.train_marks is not None
    assert np.array_equal(corpus.train_marks[0], marks["train"])
    assert corpus.folder is not None
    assert not any(path.is_symlink() or path.is_dir() for path in corpus.folder.iterdir()), "it needs nothing elsewhere"


ROWS = """
import numpy as np
from atma_sweep.model.config import Int, knob
from atma_sweep.sweep.data import CorpusConfig, CorpusKind, Rows, Streams, register_corpus

class Config(CorpusConfig):
    step: Int = knob(1, "How far a letter is from the one before.")

class Letters(Rows):
    first = 97
    def __init__(self, rows, step):
        super().__init__(rows, 8)
        self.step = step
    def made(self, numbers):
        steps = self.step * np.arange(8) * (numbers[:, None] + 1)
        return (97 + steps % 26).astype(np.uint16)

@register_corpus("letters")
class Counting(CorpusKind):
    Config = Config
    description = "letters in steps"
    tokenizer = "bytes"
    @classmethod
    def streams(cls, settings):
        rows = Letters(40, settings.step)
        return Streams(rows, Letters(9, settings.step), None, None, 122, 3.0, 1.0, 1.0)
"""


def test_plugin_corpus_with_computed_rows(bench: Bench) -> None:
    """A grid prepares it, its settings are validated, and training reads it without a file of tokens."""
    (bench.folder / "count.py").write_text(ROWS)
    bench.edit("corpus: counting", "corpus: letters, settings.letters.step: 3")
    root = bench.folder / "atma-runs" / "corpora"
    with fresh():
        cells, _ = expand_grid(load_grid(str(bench.folder / "micro.yaml")), root)
        data = cells[0].config.data
        assert data.settings == {"letters": {"step": 3}}
        corpus = open_corpus(root, str(data.fingerprint))
    assert corpus.validation[8:17].tolist() == [97 + 6 * pair % 26 for pair in range(8)] + [97]
    assert (corpus.train_marks, corpus.marked_share, corpus.load_tokenizer().name) == (None, 1.0, "bytes")
    assert "letters" in bench.ask("data", "list")
    with fresh():
        assert "unchanged" in bench.ask("data", "verify", "letters", "--plugin", "count.py")
    (problem,) = corpora.verify(root / str(data.fingerprint)[:16])
    assert problem.startswith("corpus 'letters' is generated by a plugin that is not loaded")


def test_plugin_errors_are_single_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(PLUGIN.replace('"counting"', '"stdlib"'))
    with fresh(), pytest.raises(GridError, match="ValueError: a corpus named 'stdlib' exists already"):
        load_plugins([file])
    with pytest.raises(GridError, match=r"--plugin: .*gone.py: no such file"):
        load_plugins([tmp_path / "gone.py"])
    with pytest.raises(CorpusUnknown, match=f"no corpus 'counting'; allowed: {', '.join(all_kinds())}"):
        corpora.find_fingerprint(DataConfig(corpus="counting"), tmp_path)


@pytest.mark.slow
@pytest.mark.thorough
def test_sweep_on_plugin_corpus_trains_and_evaluates(bench: Bench) -> None:
    bench.launch("--only", "attn_type=nope")
    ((cell, state),) = bench.sql("SELECT cell_id, state FROM attempt")
    assert state == "done"
    (bench.folder / "count.py").unlink()
    bench.run("evaluate", str(cell), "--executor", "local", "--probe", "val")
    assert bench.sql("SELECT kind, state FROM attempt ORDER BY id") == [("train", "done"), ("evaluate", "done")]
