"""Flip-flop corpus: computed rows against a slow automaton."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora
from atma_sweep.sweep.data.batches import stream_rows
from atma_sweep.sweep.data.builtin.flipflop import FlipFlopRows, coin_flip_accuracy, mark_reads
from atma_sweep.sweep.data.computed_rows import ComputedMarks
from atma_sweep.sweep.data.tokenizer import TokenizerError, load_tokenizer
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.planning import admission as corpora_plan
from attempts import room_of, small_grid
from prepared import preparation_error, prepare_corpus
from refusals import refused

LETTERS = "wri01"
GOLDEN = {"train": "72296698be1e2e33", "validation": "dfe1c3f2cc5dec4a"}
SMALL = {"length": 12, "train_rows": 50, "validation_rows": 7}


def rows(
    count: int = 50, length: int = 12, *, ignore: float = 0.8, seed: int = 0, split: str = "train"
) -> FlipFlopRows:
    return FlipFlopRows(count, length, ignore=ignore, seed=seed, split=split)


def text(tokens: Any) -> str:
    return "".join(LETTERS[token] for token in tokens)


def by_hand(number: int, length: int, ignore: float, seed: int, split: str) -> str:
    """Return a row, pair by pair, from a separate generator that jumps to the start of the row."""
    key = int.from_bytes(hashlib.sha256(f"flipflop/{seed}/{split}".encode()).digest()[:16], "big")
    pairs = length // 2
    raw = np.random.Philox(key=key).advance(number * ((pairs + 3) // 4)).random_raw(pairs).tolist()  # type: ignore[union-attr]
    letters, last_bit = "", ""
    for index, drawn in enumerate(raw):
        share, bit = (drawn >> 11) / 2**53, str(drawn & 1)
        instruction = "i" if share < ignore else "w" if share < (1 + ignore) / 2 else "r"
        instruction = {0: "w", pairs - 1: "r"}.get(index, instruction)
        last_bit = bit if instruction == "w" else last_bit
        letters += instruction + (last_bit if instruction == "r" else bit)
    return letters


@pytest.mark.parametrize(("length", "ignore", "seed", "split"), [
    (512, 0.8, 0, "train"), (512, 0.98, 3, "sparse"), (4, 0.1, 0, "dense"), (22, 0.1, 0, "train"), (8, 1.0, 0, "x"),
])  # fmt: skip
def test_flipflop_rows_match_slow_automaton(length: int, ignore: float, seed: int, split: str) -> None:
    source = rows(10**9, length, ignore=ignore, seed=seed, split=split)
    numbers = np.array([0, 1, 2, 77, 78, 5, 10**9])
    assert [text(row) for row in source.made(numbers)] == [
        by_hand(int(n), length, ignore, seed, split) for n in numbers
    ]


def test_flipflop_shipped_splits_are_pinned() -> None:
    """Otherwise every number of a network trained on them would belong to another text."""
    hashes = {
        split: hashlib.sha256(rows(10**6, 512, split=split)[: 512 * 8].astype("<u2").tobytes()).hexdigest()[:16]
        for split in ("train", "validation")
    }
    assert hashes == GOLDEN
    assert rows(seed=1).made(np.arange(9)).tolist() != rows().made(np.arange(9)).tolist()


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_flipflop_shares_match_settings(ignore: float) -> None:
    """Within three standard errors: instructions between the fixed ends, bits, and reads per row."""
    tokens = rows(2000, 512, ignore=ignore).made(np.arange(2000))
    inside, bits = tokens[:, 2:-2:2], tokens[:, 1::2]
    for letter, share in (("i", ignore), ("w", (1 - ignore) / 2), ("r", (1 - ignore) / 2)):
        seen = float((inside == LETTERS.index(letter)).mean())
        assert abs(seen - share) < 3 * (share * (1 - share) / inside.size) ** 0.5, letter
    # bits that are read repeat others, so rows are the independent observations
    ones = (bits == LETTERS.index("1")).mean(1)
    assert abs(float(ones.mean()) - 0.5) < 3 * float(ones.std()) / 2000**0.5
    reads = (tokens[:, 0::2] == LETTERS.index("r")).sum(1)
    expected = 1 + 254 * (1 - ignore) / 2
    assert abs(float(reads.mean()) - expected) < 3 * float(reads.std()) / 2000**0.5
    binomial = sum(
        math.comb(254, k) * p**k * (1 - p) ** (254 - k) * 0.5 ** (k + 1) for p in [(1 - ignore) / 2] for k in range(255)
    )
    assert coin_flip_accuracy(512, ignore) == pytest.approx(binomial, rel=1e-9)


def test_flipflop_reads_repeat_last_write() -> None:
    """An automaton is right at every marked bit; copying the last bit is not."""
    tokens, marks = rows(200, 64).made(np.arange(200)), ComputedMarks(rows(200, 64), mark_reads).made(np.arange(200))
    right = {"automaton": [], "copier": []}  # type: dict[str, list[bool]]
    for row, marked in zip(tokens, marks, strict=True):
        letters, last_bit = text(row), ""
        assert [index for index in range(64) if index % 2 and letters[index - 1] == "r"] == np.flatnonzero(
            marked
        ).tolist()
        for index in range(1, 64, 2):
            if letters[index - 1] == "r":
                right["automaton"].append(letters[index] == last_bit)
                right["copier"].append(letters[index] == letters[index - 2])
            elif letters[index - 1] == "w":
                last_bit = letters[index]
    assert all(right["automaton"])
    assert 0.5 < np.mean(right["copier"]) < 0.7


@pytest.mark.parametrize(
    "of", [lambda row_stream: row_stream, lambda row_stream: ComputedMarks(row_stream, mark_reads)]
)
def test_flipflop_stream_slices_like_array(of: Callable[[FlipFlopRows], Any]) -> None:
    stream = of(rows())
    expected = np.concatenate([stream.made(np.arange(50)).ravel(), [stream.first]])
    assert len(stream) == len(expected) == 601
    for part in (
        slice(None),
        slice(0, 13),
        slice(5, 30),
        slice(588, 601),
        slice(601, 700),
        slice(3, 3),
        slice(-1, None),
    ):
        assert stream[part].tolist() == expected[part].tolist(), part
    starts = np.array([0, 7, 588, 24, 24])
    assert stream.pieces(starts, 13).tolist() == [expected[start : start + 13].tolist() for start in starts]
    assert stream.pieces(starts, 2).dtype == np.uint16
    with pytest.raises(ValueError, match="contiguous slices"):
        stream[::2]


# --- as a prepared corpus -----------------------------------------------------------------------------------------


def small(**settings: Any) -> DataConfig:
    return DataConfig(corpus="flipflop", settings={"flipflop": SMALL | settings})


def test_flipflop_corpus_stores_no_tokens(tmp_path: Path) -> None:
    corpus = prepare_corpus(small(), tmp_path)
    assert corpus.folder is not None
    assert [path.name for path in corpus.folder.iterdir()] == ["manifest.json"]
    assert corpus.train[0][:].tolist() == rows(50)[:].tolist()
    assert corpus.validation[:].tolist() == rows(7, split="validation")[:].tolist()
    assert corpus.train_marks is not None
    assert corpus.train_marks[0][:].tolist() == ComputedMarks(rows(50), mark_reads)[:].tolist()
    assert (corpus.train_tokens, corpus.heldout, corpus.largest) == (601, [], 4)
    assert stream_rows(corpus.validation, 12, 7)[0].shape == (7, 12)
    tokenizer = corpus.load_tokenizer()
    assert text(tokenizer.encode("w1r1")) == "w1r1"
    assert b"".join(tokenizer.token_bytes(token) for token in range(6)) == LETTERS.encode()
    with pytest.raises(TokenizerError, match="only the letters wri01, got 'x'"):
        tokenizer.encode("wx")
    assert load_tokenizer("flipflop").vocabulary == 6
    (row,) = corpora.listing(tmp_path)
    assert (row["train_tokens"], row["validation_tokens"], row["heldout_tokens"]) == (601, 85, 0)
    assert corpora.verify(corpus.folder) == []


def test_flipflop_expected_values_match_counts(tmp_path: Path) -> None:
    corpus = prepare_corpus(small(length=32, train_rows=4000, ignore=0.3), tmp_path)
    unigram, bigram = corpora.entropies([corpus.train[0][:]], 6)
    assert bigram is not None
    assert (corpus.unigram_entropy, corpus.bigram_entropy) == (
        pytest.approx(unigram, abs=2e-3),
        pytest.approx(bigram, abs=2e-3),
    )
    assert corpus.train_marks is not None
    assert corpus.marked_share == pytest.approx(float(corpus.train_marks[0][:].mean()), abs=2e-3)


def test_flipflop_fingerprint_follows_settings_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"ignore": 0.7},
        {"train_rows": 51},
        {"validation_rows": 8},
        {"length": 14},
    ]
    variants = [prepare_corpus(small(**change), tmp_path) for change in changes]
    assert len({corpus.fingerprint for corpus in variants}) == 6
    assert prepare_corpus(small(), tmp_path / "elsewhere").fingerprint == variants[0].fingerprint
    monkeypatch.setattr("atma_sweep.sweep.data.builtin.flipflop.NAME", "flopflip")
    folder = variants[0].folder
    assert folder is not None
    assert corpora.verify(folder) == [
        f"{folder}: the rows of {split} differ from those recorded when it was prepared; remove {folder} and prepare the corpus again"
        for split in ("train", "validation", "train_marks", "validation_marks")
    ]
    facts = json.loads((folder / "manifest.json").read_text())
    facts["computed"]["corpus"] = "gone"
    (folder / "manifest.json").write_text(
        json.dumps(corpora.with_checksum(facts | {"fingerprint": corpora.fingerprint_of(facts)}))
    )
    assert "generated by a plugin that is not loaded" in corpora.verify(folder)[0]


def test_flipflop_rejects_unsupported_settings(tmp_path: Path) -> None:
    for field, value in (
        ("path", "x"),
        ("train_tokens", 5),
        ("heldout", "stdlib"),
        ("tokenizer_file", "x"),
        ("end_of_text", "x"),
    ):
        assert preparation_error(small().model_copy(update={field: value}), tmp_path) == (
            f"data.{field}: corpus flipflop is generated from data.settings.flipflop; remove data.{field}"
        )
    assert "has its own tokenizer" in preparation_error(small().model_copy(update={"tokenizer": "gpt2"}), tmp_path)
    assert preparation_error(small(), tmp_path, name="mine") == (
        "--name: corpus flipflop is generated, not prepared, and takes no name; set data.corpus: flipflop in the grid"
    )


def test_grid_with_flipflop_gets_its_tokenizer(cells: Callable[..., list[Cell]]) -> None:
    (cell,) = cells(
        "set:\n  data: {corpus: flipflop, settings.flipflop.seed: 2}\n  train: {seq_len: 512, micro_batch: 2, loss_on: marked}\n"
    )
    data = cell.config.data
    assert (data.tokenizer, data.settings["flipflop"]["seed"]) == ("flipflop", 2)
    assert data.settings["flipflop"]["length"] == 512
    assert hash(data) == hash(data.model_copy())
    (plain,) = cells("set:\n  data.settings.flipflop.seed: 2\n")
    assert plain.config.data.settings == {}, "of another corpus"


@pytest.mark.parametrize(("setting", "message"), [
    ("data: {corpus: flipflop}\n", "train.seq_len is 128, but the rows of corpus flipflop have 512 tokens "
     "(data.settings.flipflop.length); make them the same"),
    ("data: {corpus: flipflop, settings.flipflop.length: 13}\n", "must be a multiple of 2, got 13"),
    ("data: {corpus: flipflop, settings.flipflop.size: 13}\n", "no such setting under data.settings.flipflop"),
    ("data: {corpus: flipflop, tokenizer: gpt2}\n", "but the grid requests gpt2"),
])  # fmt: skip
def test_grid_with_impossible_flipflop_is_rejected(
    cells: Callable[..., list[Cell]], setting: str, message: str
) -> None:
    with pytest.raises(GridError) as caught:
        cells(f"set:\n  {setting}")
    assert message in str(caught.value)


@pytest.mark.thorough
def test_attempt_trains_and_evaluates_flipflop(tmp_path: Path) -> None:
    """From the grid to the database; probes of long documents are rejected before training."""
    (tmp_path / "grid").mkdir()
    grid = small_grid(tmp_path / "grid")
    small = {"iid": 20, "sparse": 30, "dense": 10, "items": 4}
    sets = (
        "data.corpus=flipflop", "data.path=null", "eval.validate_every=6", "data.settings.flipflop.length=32", "data.settings.flipflop.train_rows=40",
        "train.loss_on=marked", "train.seq_len=32", *(f"eval.settings.flipflop.{name}={count}" for name, count in small.items()),
    )  # fmt: skip
    full, halves = (room_of(grid, tmp_path, *sets, "eval.probes=[val, flipflop]") for _ in range(2))
    corpora_plan.check_corpora([full.cell], grid.parent / "corpora")
    assert halves.run(stop=20).state == "interrupted"
    rooms = (full, halves)
    ends = [room.run() for room in rooms]
    assert [end.state for end in ends] == ["done", "done"]
    curves = [room.curve(end) for room, end in zip(rooms, ends, strict=True)]
    assert curves[0] == curves[1], "one that goes on in the middle reads the same rows"
    measurements, again = (
        {
            measurement.metric: measurement
            for measurement in room.store.measurements(room.cell.id)
            if measurement.probe == "flipflop"
        }
        for room in rooms
    )
    assert {name: measurement.value for name, measurement in measurements.items()} == {
        name: measurement.value for name, measurement in again.items()
    }
    assert (measurements["exact_sparse"].n, measurements["exact_sparse"].length) == (30, 0)
    assert measurements["exact_sparse"].description == {"chance": coin_flip_accuracy(32, 0.98)}
    assert measurements["error_dense"].n == measurements["reads_dense"].value
    assert refused(
        lambda: corpora_plan.check_corpora(
            [room_of(grid, tmp_path, *sets, "eval.probes=[clean, junk]").cell], grid.parent / "corpora"
        ),
        corpora.CorpusError,
    ) == ("corpus 'flipflop': it has no long documents, which clean reads: remove these probes from eval.probes")
