"""Checks of a grid's text: every shortfall is reported in one line before any process starts."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.sweep.config import CellConfig, DataConfig, EvalConfig, TrainConfig
from atma_sweep.sweep.data.corpora import Corpus, open_corpus
from atma_sweep.sweep.data.prepare import prepare, prepare_in_memory
from atma_sweep.sweep.errors import GridError, MachineError, SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning import admission as texts
from copies import fineweb_edu, prose, published_shard
from prepared import files, prepare_corpus, put

Write = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
EVAL_SETTINGS: dict[str, Any] = {"lengths": (8, 16), "documents": 3, "junk_rows": 4, "validation_tokens": 50}


def corpus(
    *, train: tuple[int, ...] = (200,), validation: int = 65, held: tuple[int, ...] = (17, 18, 19), largest: int = 256
) -> Corpus:
    def tokens(count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.uint16)

    return Corpus(
        fingerprint="f" * 64, tokenizer="bytes", train=[tokens(count) for count in train], validation=tokens(validation),
        heldout=[tokens(count) for count in held], heldout_names=[str(count) for count in held],
        unigram_entropy=1.0, bigram_entropy=None, largest=largest,
    )  # fmt: skip


def config(
    *, vocabulary: int = 257, data: dict[str, Any] | None = None, seq_len: int = 8, **eval_settings: Any
) -> CellConfig:
    cell_config = CellConfig(
        data=DataConfig(**(data or {})),
        train=TrainConfig(seq_len=seq_len, micro_batch=2, batch_tokens=2 * seq_len),
        eval=EvalConfig(**(EVAL_SETTINGS | eval_settings)),
    )
    return cell_config.model_copy(update={"model": cell_config.model.model_copy(update={"vocab_size": vocabulary})})


def test_corpus_check_accepts_just_enough_text() -> None:
    """25 rows of 8 + 1, 48 validation tokens + 1, 4 rows of 16 + 1, three documents of 16 + 1."""
    assert texts.corpus_problems(config(), corpus(train=(9,), validation=65, held=(17, 17, 17, 3))) == []
    assert texts.corpus_problems(config(junk_rows=3), corpus(validation=49)) == []
    assert texts.corpus_problems(config(probes=("val",)), corpus(validation=49, held=())) == []
    assert texts.corpus_problems(config(data={"whole_steps": True}), corpus(train=(3, 18))) == []


def long(count: str, have: int = 3, read: str = "clean and needle read") -> str:
    return (
        f"of the first 3 held-out documents, which {read}, {count} 17 tokens (it holds {have}): "
        "lower eval.documents or eval.lengths, or provide longer documents with data.heldout"
    )


SHORT = ": lower train.seq_len or train.batch_tokens, or provide more text"
JUNK = "probe junk requests 4: lower eval.settings.junk.rows or eval.lengths"


@pytest.mark.parametrize(("eval_settings", "have", "message"), [
    ({}, {"train": (8, 8)}, f"the training split has 16 tokens, less than one row of 8 + 1{SHORT}"),
    ({"data": {"whole_steps": True}}, {"train": (17, 17)}, f"the training split has 34 tokens, less than one step of 16 + 2 in any shard{SHORT}"),
    ({}, {"largest": 257}, "holds token 257, but model.vocab_size is 257: raise it to 258 or more"),
    ({"probes": ("val", "clean", "needle")}, {"validation": 48}, "the validation split has 48 tokens, but eval.validation_tokens needs 49: lower it"),
    ({"validation_tokens": 7}, {}, "eval.validation_tokens is 7, less than one row of 8 tokens: raise it"),
    ({}, {"validation": 64}, f"the validation split has 64 tokens, 3 rows of 16; {JUNK}"),
    ({}, {"held": (17, 16, 17, 17)}, long("only 2 have", 4)),
    ({}, {"held": (17,)}, long("only 1 has", 1)),
    ({}, {"held": ()}, long("none have", 0)),
    ({"probes": ("val", "needle")}, {"held": (16, 16, 16)}, long("none have", 3, "needle reads")),
])  # fmt: skip
def test_corpus_check_gives_a_sentence_per_shortfall(
    eval_settings: dict[str, Any], have: dict[str, Any], message: str
) -> None:
    assert texts.corpus_problems(config(**eval_settings), corpus(**have)) == [message]


def test_corpus_check_lists_several_shortfalls() -> None:
    problems = texts.corpus_problems(config(), corpus(train=(1,), validation=0, held=(), largest=300))
    assert len(problems) == 5
    assert f"the validation split has 0 tokens, 0 rows of 16; {JUNK}" in problems


# --- the corpora of a grid ----------------------------------------------------------------------------------------

GRID = """
name: g
extends: micro
axes:
  attn_type: [nope, polar]
set:
  data: {{{data}}}
  train: {{tokens: 2048}}
  eval: {{lengths: [128], documents: 2, junk_rows: 2, validation_tokens: 256}}
"""


@pytest.fixture
def grid(write: Write, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a grid of two cells with these settings of data.

    Its text lies in the folder `text`, long documents in `long`.
    """
    put(tmp_path / "text", [text * 3 for text in prose(80)])
    put(tmp_path / "long", [text * 20 for text in prose(9)])
    return lambda data: write(GRID.format(data=data))


def ids(out: str) -> dict[str, str]:
    return {cell["cell"]: cell["attn_type"] for cell in json.loads(out)["cells"]}


def attempts(database: Path) -> list[int]:
    with sqlite3.connect(database) as connection:
        return [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("attempt", "sweep", "cell")
        ]


def test_launch_prepares_and_pins_local_text(grid: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load_grid(grid("corpus: files, path: text, heldout_tokens: 200"))
    heard: list[Any] = []
    cells, remarks = texts.expand_grid(loaded, tmp_path / "c", tell=heard.append)
    number = prepare_in_memory(files(tmp_path / "text", heldout_tokens=200)).fingerprint
    assert {cell.config.data.fingerprint for cell in cells} == {number}
    assert remarks == []
    assert {report.phase for report in heard} == {"tokenizing"}
    assert heard[-1].documents == 80
    before = len(heard)
    assert open_corpus(tmp_path / "c", number).train_tokens > 2048
    again, _ = texts.expand_grid(loaded, tmp_path / "c", tell=heard.append)
    assert [cell.id for cell in again] == [cell.id for cell in cells]
    assert len(heard) == before, "prepared once"


def test_a_dry_run_prepares_nothing_and_says_so(grid: Callable[[str], Path], tmp_path: Path, command: Command) -> None:
    path = grid("corpus: files, path: text, heldout_tokens: 200")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command("launch", str(path), "--dry-run", "--json")
    assert (code, err) == (0, "")
    corpora = tmp_path / "atma-runs" / "corpora"
    how = f"corpus 'files' is not prepared in {corpora}: atma-sweep data prepare --grid {path}"
    assert json.loads(out)["remarks"] == [
        f"{how}; until then cell ids are provisional and the corpus size is not checked"
    ]
    assert sorted(tmp_path.rglob("*")) == before
    assert (
        f"{how}; until then cell ids are provisional and the corpus size is not checked"
        in command("launch", str(path), "--dry-run")[1].splitlines()
    )


def test_a_dry_run_of_the_embedded_text_knows_its_ids(write: Write, tmp_path: Path, command: Command) -> None:
    path = write("name: g\nextends: micro\n")
    before = sorted(tmp_path.rglob("*"))
    (prepared_cell,) = load_grid(path).expand(lambda data: prepare_in_memory(data).fingerprint)
    out = json.loads(command("launch", str(path), "--dry-run", "--json")[1])
    assert ([cell["cell"] for cell in out["cells"]], out["remarks"]) == ([prepared_cell.id], [])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("data", [
    "corpus: fineweb-edu", "corpus: fineweb-edu-shards", "corpus: finepdfs", "corpus: wikitext-103",
    "corpus: files, path: text, heldout: finepdfs", "heldout: wikitext-103",
])  # fmt: skip
def test_launch_refuses_to_download_unasked(
    grid: Callable[[str], Path], tmp_path: Path, command: Command, data: str
) -> None:
    """A launch never downloads: it exits with 3 at once and prints the command, with paths quoted for a shell."""
    path = grid(data)
    name = data.split()[1].strip(",") if data.startswith("corpus") else "stdlib"
    runs = tmp_path / "runs of mine"
    code, out, err = command("launch", str(path), "--runs", str(runs), "--executor", "local")
    assert (code, out) == (3, "")
    (line, remedy), *rest = [pair for pair in itertools.pairwise(err.splitlines()) if pair[0].startswith("  text  ")]
    assert rest == []
    if "heldout" in data:
        lender = data.split()[-1]
        assert line.startswith(
            f"  text  data.heldout: {lender} ({path}:7), the source of long documents for corpus '{name}', is not"
        )
    else:
        assert line.startswith(
            f"  text  corpus '{name}' is not prepared in {runs}/corpora: the complete corpus, about "
        )
    assert remedy.strip().startswith(
        f"-> atma-sweep data prepare --grid {path} --runs '{runs}', or launch with --prepare"
    )
    assert not (tmp_path / "atma.db").exists()
    assert not runs.exists()


def test_a_local_copy_is_prepared_for_the_grid_and_gives_the_ids(
    grid: Callable[[str], Path], tmp_path: Path, command: Command
) -> None:
    fineweb_edu(tmp_path / "copy", [text * 3 for text in prose(80)])
    path = grid("corpus: fineweb-edu, path: copy, heldout: long, heldout_tokens: 200, train_tokens: 5000")
    path.write_text(path.read_text().replace("heldout: long", "heldout: ./long"))
    provisional = command("launch", str(path), "--dry-run", "--json")[1]
    assert len(json.loads(provisional)["remarks"]) == 1
    code, out, _ = command("data", "prepare", "--grid", str(path), "--json")
    assert code == 0
    (row,) = json.loads(out)
    real = command("launch", str(path), "--dry-run", "--json")[1]
    assert json.loads(real)["remarks"] == []
    assert ids(real).keys().isdisjoint(ids(provisional))
    cells = load_grid(path).expand(lambda data: row["fingerprint"])
    assert ids(real) == {cell.id: cell.levels["attn_type"] for cell in cells}
    assert (row["train_tokens"], row["corpus"], row["heldout"]) == (5000, "fineweb-edu", str(tmp_path / "long"))


def test_a_grid_over_several_corpora(grid: Callable[[str], Path], tmp_path: Path, command: Command) -> None:
    """Unprepared corpora must give distinct cells; one command prepares all of them."""
    put(tmp_path / "other", [text * 3 for text in prose(80, 1)])
    path = grid("corpus: files, heldout_tokens: 200")
    path.write_text(
        path.read_text().replace("[nope, polar]", f"[nope]\n  data.path: [{tmp_path}/text, {tmp_path}/other]")
    )
    plan = json.loads(command("launch", str(path), "--dry-run", "--json")[1])
    assert len({cell["cell"] for cell in plan["cells"]}) == 2
    code, out, _ = command("data", "prepare", "--grid", str(path), "--json")
    assert code == 0
    assert [row["path"] for row in json.loads(out)] == [f"{tmp_path}/text", f"{tmp_path}/other"]
    plan = json.loads(command("launch", str(path), "--dry-run", "--json")[1])
    assert (len({cell["cell"] for cell in plan["cells"]}), plan["remarks"]) == (2, [])
    code, _, err = command("data", "prepare", "--grid", str(path), "--name", "both")
    assert (code, err) == (2, "atma-sweep: --name both: the grid needs 2 corpora, and a name applies to one\n")


# --- names --------------------------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path) -> str:
    """Return the fingerprint of the corpus `books`, prepared as bytes in the folder of `launch`."""
    put(tmp_path / "b", [text * 3 for text in prose(80)])
    root = tmp_path / "atma-runs" / "corpora"
    return prepare(files(tmp_path / "b", heldout_tokens=200), root, name="books")


def test_corpus_by_its_prepared_name(grid: Callable[[str], Path], named: str, tmp_path: Path, command: Command) -> None:
    path = grid("corpus: books")
    out = command("launch", str(path), "--dry-run", "--json")[1]
    cells = load_grid(path).expand(lambda data: named)
    assert ids(out) == {cell.id: cell.levels["attn_type"] for cell in cells}
    by_path = load_grid(grid(f"corpus: files, path: {tmp_path}/b, heldout_tokens: 200"))
    assert {cell.id for cell in texts.expand_grid(by_path, tmp_path / "atma-runs" / "corpora")[0]} == ids(out).keys()


def test_an_unknown_corpus_names_line_and_nearest(
    grid: Callable[[str], Path], named: str, tmp_path: Path, command: Command
) -> None:
    path = grid("corpus: boks")
    corpus_names = "stdlib, files, shards, fineweb-edu, fineweb-edu-shards, finepdfs, hub, wikitext-103, flipflop, mqar, mad, books"
    for dry in (True, False):
        with pytest.raises(GridError) as caught:
            texts.expand_grid(load_grid(path), tmp_path / "atma-runs" / "corpora", dry=dry)
        assert str(caught.value) == (
            f"{path}:7: set.data.corpus: no built-in or prepared corpus 'boks'; "
            f"atma-sweep data prepare PATH --name boks prepares one; allowed: {corpus_names}; did you mean 'books'?"
        )
    code, _, err = command("launch", str(path), "--set", "data.corpus=finepdf", "--name", "h", "--dry-run")
    assert code == 2
    assert err.startswith("atma-sweep: --set: data.corpus: no built-in or prepared corpus 'finepdf'; ")
    assert err.endswith("did you mean 'finepdfs'?\n")


@pytest.mark.parametrize(("data", "message"), [
    ("corpus: files, path: gone", "data.path: {}/gone does not exist"),
    ("corpus: files", "data.corpus: files needs data.path, the folder or file that holds the text"),
    ("corpus: finepdfs, path: gone", "data.path: {}/gone is not a folder with a copy of codelion/finepdfs-100M"),
    ("corpus: files, path: text, heldout: ./gone",
     "data.heldout: {}/gone is neither a file, a folder nor a corpus with long documents: stdlib, fineweb-edu, finepdfs, wikitext-103"),
    ("corpus: files, path: text, heldout: ./text",
     "data.heldout: {}/text is also the training text; name other text, or remove data.heldout to hold out part of it"),
])  # fmt: skip
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_dry_run_reports_invalid_paths(
    grid: Callable[[str], Path], tmp_path: Path, command: Command, data: str, message: str, dry: tuple[str, ...]
) -> None:
    code, out, err = command("launch", str(grid(data)), *dry)
    assert (code, out, err) == (2, "", f"atma-sweep: {tmp_path}/g.yaml:7: set.{message.format(tmp_path)}\n")
    assert not (tmp_path / "atma.db").exists()


# --- before any process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    (("documents: 2", "documents: 65"), "of the first 65 held-out documents, which clean and needle read, only 16 have 129 tokens (it holds 16)"),
    (("lengths: [128]", "lengths: [128, 1024]"), "of the first 2 held-out documents, which clean and needle read, none have 1025 tokens"),
    (("validation_tokens: 256", "validation_tokens: 1e6"), "the validation split has 2263 tokens, but eval.validation_tokens needs 999937"),
    (("junk_rows: 2", "junk_rows: 99"), "the validation split has 2263 tokens, 17 rows of 128; probe junk requests 99"),
])  # fmt: skip
def test_launch_stops_early_on_insufficient_text(
    grid: Callable[[str], Path], tmp_path: Path, command: Command, change: tuple[str, str], message: str
) -> None:
    path = grid("corpus: files, path: text, heldout_tokens: 200")
    path.write_text(path.read_text().replace(*change))
    code, _, err = command("launch", str(path), "--executor", "local")
    assert code == 2
    assert err.splitlines()[-1].startswith(f"atma-sweep: corpus 'files': {message}")
    assert len(err.splitlines()) == 1
    assert attempts(tmp_path / "atma.db") == [0, 0, 0]
    assert [path.name for path in (tmp_path / "atma-runs").iterdir()] == ["corpora"]


LOOKS = [
    line.split() for line in ("plan", "plan --json", "plan --calibrate", "launch --dry-run", "launch --dry-run --json")
]
"""What only looks, or times steps before a launch."""


@pytest.mark.parametrize("change", [
    ("documents: 2", "documents: 65"), ("lengths: [128]", "lengths: [128, 1024]"),
    ("validation_tokens: 256", "validation_tokens: 1e6"), ("junk_rows: 2", "junk_rows: 99"),
    ("tokens: 2048", "tokens: 1e6, batch_tokens: 524288"),
])  # fmt: skip
def test_plan_and_launch_report_the_same_shortfall(
    grid: Callable[[str], Path], tmp_path: Path, command: Command, change: tuple[str, str]
) -> None:
    path = grid("corpus: files, path: text, heldout_tokens: 200, whole_steps: on")
    path.write_text(path.read_text().replace(*change))
    assert command("data", "prepare", "--grid", str(path))[0] == 0
    before = sorted(tmp_path.rglob("*"))
    looked = [command(word, str(path), *options) for word, *options in LOOKS]
    assert sorted(tmp_path.rglob("*")) == before
    code, _, err = command("launch", str(path), "--executor", "local")
    assert code == 2
    assert err.startswith("atma-sweep: corpus 'files': ")
    assert len(err.splitlines()) == 1
    assert looked == [(2, "", err)] * len(LOOKS)


def test_the_text_that_every_machine_has_is_checked_unprepared(write: Write, tmp_path: Path, command: Command) -> None:
    path = write("name: g\nextends: micro\nset: {eval.validation_tokens: 1e9}\n")
    have = len(prepare_corpus(DataConfig(), tmp_path / "apart").validation)
    before = sorted(tmp_path.rglob("*"))
    message = f"atma-sweep: corpus 'stdlib': the validation split has {have} tokens, but eval.validation_tokens needs 1000000001: lower it\n"
    assert [command(word, str(path), *options) for word, *options in LOOKS] == [(2, "", message)] * len(LOOKS)
    assert sorted(tmp_path.rglob("*")) == before


RANGES = "trials: 2, objective: val_loss, ranges: {train.muon_lr: [0.01, 0.02]}"


@pytest.mark.parametrize(("old", "new"), [
    ("axes:\n  attn_type: [nope, polar]", f"search: {{{RANGES}}}"),
    ("axes:", f"tune: {{per: attn_type, {RANGES}}}\naxes:"),
])  # fmt: skip
def test_text_too_short_for_the_trials_of_a_study_ends_a_plan(
    grid: Callable[[str], Path], command: Command, old: str, new: str
) -> None:
    path = grid("corpus: files, path: text, heldout_tokens: 200")
    path.write_text(path.read_text().replace(old, new))
    assert command("data", "prepare", "--grid", str(path))[0] == 0
    assert [command(word, str(path), *options)[0] for word, *options in LOOKS if "--calibrate" not in options] == [
        0
    ] * 4
    path.write_text(path.read_text().replace("validation_tokens: 256", "validation_tokens: 1e6"))
    message = "the validation split has 2263 tokens, but eval.validation_tokens needs 999937: lower it"
    results = [command(word, str(path), *options) for word, *options in (*LOOKS, ["launch", "--executor", "local"])]
    assert results == [(2, "", f"atma-sweep: corpus 'files': {message}\n")] * 6


def test_only_the_cells_that_are_chosen_are_checked(grid: Callable[[str], Path], command: Command) -> None:
    path = grid("corpus: files, path: text, heldout_tokens: 200, whole_steps: on")
    varied = path.read_text().replace("axes:", "axes:\n  train.batch_tokens: [1024, 524288]")
    path.write_text(varied.replace("tokens: 2048", "tokens: 1e6"))
    assert command("data", "prepare", "--grid", str(path))[0] == 0
    codes = [
        command("plan", str(path), "--only", f"train.batch_tokens={batch_tokens}")[0] for batch_tokens in (1024, 524288)
    ]
    assert codes == [0, 2]


@pytest.mark.parametrize("argv", [("plan",), ("launch", "--dry-run")])
def test_seeds_that_a_stop_rule_begins_with_can_be_chosen(
    write: Write, command: Command, argv: tuple[str, ...]
) -> None:
    """They exist before the text is checked: the rule starts with two seeds, the grid has one."""
    path = write(
        "name: g\nextends: recall-mini\naxes: {memory: [off, atlas]}\nseeds: 1\n"
        "stop: {contrast: memory, level: atlas, metric: mqar.accuracy, ci: 20}\n"
    )
    name, *more = argv
    code, out, err = command(name, str(path), *more, "--only", "seed=1", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["counts"]["new"] == 2


def test_calibration_first_reports_unchecked_text(
    grid: Callable[[str], Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atma_sweep.sweep.bench import calibrate

    def stop(*args: Any, **more: Any) -> None:
        raise MachineError("timing begins")

    monkeypatch.setattr(calibrate, "calibrate_cell", stop)
    path = grid("corpus: files, path: text, heldout_tokens: 200")
    path.write_text(path.read_text().replace("validation_tokens: 256", "validation_tokens: 1e6"))
    message = (
        f"corpus 'files' is not prepared in {tmp_path}/atma-runs/corpora: atma-sweep data prepare --grid {path}; "
        "until then cell ids are provisional and the corpus size is not checked"
    )
    assert command("plan", str(path), "--calibrate") == (3, "", f"{message}\natma-sweep: timing begins\n")
    code, out, err = command("plan", str(path))
    assert (code, out.splitlines()[-1], err) == (0, message, "")


def test_tokens_beyond_the_vocabulary(grid: Callable[[str], Path], tmp_path: Path, command: Command) -> None:
    """The tokenizer is checked when shards are taken in, the model when a named corpus had a larger tokenizer."""
    published_shard(tmp_path / "s" / "a_train_1.bin", [3] * 5000)
    published_shard(tmp_path / "s" / "a_val_1.bin", [257] * 500)
    path = grid("corpus: shards, path: s, tokenizer: bytes")
    assert command("launch", str(path), "--executor", "local")[::2] == (
        2,
        f"atma-sweep: {tmp_path}/s/a_val_1.bin: holds token 257, but tokenizer bytes has 257 tokens; "
        "set data.tokenizer to the one that made the shard\n",
    )
    assert not (tmp_path / "atma.db").exists()
    number = prepare(files(tmp_path / "text", heldout_tokens=200), tmp_path / "c")
    (cell, _) = load_grid(path).expand(lambda data: number)
    small = cell.config.model.model_copy(update={"vocab_size": 200})
    shrunk = Cell(cell.id, cell.slug, cell.config.model_copy(update={"model": small}), cell.axes)
    with pytest.raises(SweepError) as caught:
        texts.check_corpora([shrunk], tmp_path / "c")
    assert str(caught.value) == (
        "corpus 'shards': holds token 256, but model.vocab_size is 200: raise it to 257 or more"
    )


def test_a_damaged_corpus_ends_the_launch_before_it_begins(
    grid: Callable[[str], Path], named: str, tmp_path: Path, command: Command
) -> None:
    path = grid("corpus: books")
    folder = tmp_path / "atma-runs" / "corpora" / named[:16]
    shard = folder / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, _, err = command("launch", str(path), "--executor", "local")
    assert code == 2
    assert err.startswith(f"atma-sweep: {shard}: truncated or too long: ")
    assert err.endswith(f"; remove {folder} and prepare the corpus again\n")
    assert not (tmp_path / "atma.db").exists()


def test_corpus_check_runs_once_per_requirement(
    cells: Callable[..., list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "t", [text * 3 for text in prose(80)])
    number = prepare(files(tmp_path / "t", heldout_tokens=200), tmp_path / "c")
    seen: list[int] = []
    monkeypatch.setattr(texts, "corpus_problems", lambda config, corpus: seen.append(config.train.seq_len) or [])
    grid_cells = cells("axes:\n  attn_type: [nope, polar]\n  train.seq_len: [64, 128]\nseeds: 2\n")
    pinned = [
        Cell(c.id, c.slug, c.config.model_copy(update={"data": c.config.data.model_copy(update={"fingerprint": number})}), c.axes)
        for c in grid_cells
    ]  # fmt: skip
    texts.check_corpora(pinned, tmp_path / "c")
    assert sorted(seen) == [64, 128]
    with pytest.raises(SweepError, match="no prepared corpus in"):
        texts.check_corpora(grid_cells, tmp_path / "c")
    assert issubclass(MachineError, SweepError)


def test_corpus_check_reports_all_shortfalls_together(
    grid: Callable[[str], Path], tmp_path: Path, command: Command
) -> None:
    """Validation loss, junk and documents lack text for one cause; one preparation with the sizes named mends them all."""
    path = grid("corpus: files, path: text, heldout_tokens: 200")
    path.write_text(
        path.read_text()
        .replace("validation_tokens: 256", "validation_tokens: 4096")
        .replace("documents: 2, junk_rows: 2", "documents: 20, junk_rows: 30")
    )
    code, _, err = command("launch", str(path), "--executor", "local")
    assert code == 2
    assert len(err.splitlines()) == 1
    lacks = [
        "corpus 'files': the validation split has 2263 tokens, but eval.validation_tokens needs 4097: lower it",
        "corpus 'files': of the first 20 held-out documents, which clean and needle read, only 16 have 129 tokens (it holds 16): "
        "lower eval.documents or eval.lengths, or provide longer documents with data.heldout",
        "corpus 'files': the validation split has 2263 tokens, 17 rows of 128; probe junk requests 30: lower "
        "eval.settings.junk.rows or eval.lengths",
        "to prepare the text with splits that are large enough, set data.validation_tokens: 4097 and data.heldout_documents: 20 "
        "(atma-sweep data prepare ... --validation-tokens 4097 --heldout-documents 20)",
    ]
    assert err == f"atma-sweep: {'; '.join(lacks)}\n"
    cells, _ = texts.expand_grid(load_grid(path), tmp_path / "atma-runs" / "corpora")
    assert texts.corpus_lacks(cells, tmp_path / "atma-runs" / "corpora") == lacks
    sizes = "heldout_tokens: 200, validation_tokens: 4097, heldout_documents: 20"
    path.write_text(path.read_text().replace("heldout_tokens: 200", sizes))
    cells, _ = texts.expand_grid(load_grid(path), tmp_path / "atma-runs" / "corpora")
    assert texts.corpus_lacks(cells, tmp_path / "atma-runs" / "corpora") == []
