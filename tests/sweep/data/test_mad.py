"""Corpus mad: a slow solver recomputes every target from the tokens that the network reads, and frequencies of each rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.data.builtin.mad import MadConfig, MadCorpus, MadRows, mark_targets
from atma_sweep.sweep.data.computed_rows import TARGET
from atma_sweep.sweep.data.tokenizer import TokenizerError, load_tokenizer
from pydantic import ValidationError

ROWS = 60
TASKS: dict[str, dict[str, Any]] = {
    "recall": {"vocabulary": 12, "length": 32},
    "noisy": {"vocabulary": 20, "length": 48, "noise": 0.4, "noise_vocabulary": 8},
    "fuzzy": {"vocabulary": 13, "length": 80},
    "copying": {"vocabulary": 10, "length": 24, "copied": 4},
    "compression": {"vocabulary": 9, "length": 12},
    "memorization": {"vocabulary": 33, "length": 16},
}


def settings_of(task: str, **more: Any) -> MadConfig:
    return MadConfig(task=task, train_rows=ROWS, validation_rows=ROWS, **(TASKS[task] | more))  # type: ignore[arg-type]


def runs(row: list[int], keys: int, last: int) -> list[tuple[bool, tuple[int, ...], int]]:
    """Return (is a key, tokens, end) of each run of keys or values; padding, the token `last`, is dropped."""
    parsed: list[tuple[bool, tuple[int, ...], int]] = []
    for index, token in enumerate(row):
        if token == last:
            continue
        if parsed and parsed[-1][0] == (token < keys):
            kind, tokens, _ = parsed.pop()
            parsed.append((kind, (*tokens, token), index + 1))
        else:
            parsed.append((token < keys, (token,), index + 1))
    return parsed


def solve(task: str, row: list[int], settings: MadConfig, memorized: dict[int, int]) -> dict[int, int]:
    """Return, by position of the prediction's token in the row, the target that follows from earlier tokens alone."""
    answers: dict[int, int] = {}
    if task in ("recall", "noisy"):
        values: dict[int, int] = {}
        for index in range(0, len(row), 2):
            key, value = row[index : index + 2]
            if key >= settings.keys:
                continue
            if key in values:
                answers[index + 1] = values[key]
            values.setdefault(key, value)
    elif task == "fuzzy":
        motifs: dict[tuple[int, ...], tuple[int, ...]] = {}
        parsed = runs(row, settings.keys, settings.vocabulary - 1)
        for (_, key, _), (_, value, end) in zip(parsed[0::2], parsed[1::2], strict=True):
            if key in motifs:
                answers |= {end - len(motifs[key]) + at: token for at, token in enumerate(motifs[key])}
            motifs.setdefault(key, value)
    elif task == "copying":
        sign = row.index(settings.vocabulary - 1)
        copied = [token for token in row[:sign] if token != settings.vocabulary - 2]
        answers = {sign + 2 + index: token for index, token in enumerate(copied)}
    elif task == "compression":
        answers = {index + 1: token for index, token in enumerate(row[:-1])}
    else:
        answers = {index + 2: memorized[row[index]] for index in range(0, len(row) - 1, 2)}
    return answers


@pytest.mark.parametrize("task", TASKS)
def test_mad_targets_follow_from_earlier_tokens(task: str) -> None:
    settings = settings_of(task)
    training = MadRows(ROWS, settings, split="train").made(np.arange(ROWS))
    memorized = {}
    if task == "memorization":
        # the facts are read off the marks of training, and must hold in validation
        for row, marks in zip(training, mark_targets(training, settings), strict=True):
            memorized |= {int(row[at - 2]): int(marks[at]) - TARGET for at in range(2, len(row), 2)}
        assert len(memorized) == len(set(memorized.values())) == settings.keys
    for split in ("train", "validation"):
        rows = MadRows(ROWS, settings, split=split).made(np.arange(ROWS))
        n_targets = 0
        for row, marks in zip(rows.tolist(), mark_targets(rows, settings).tolist(), strict=True):
            targets = {at: (row[at] if mark == 1 else mark - TARGET) for at, mark in enumerate(marks) if mark}
            assert targets == solve(task, row, settings, memorized)
            n_targets += len(targets)
        assert n_targets >= ROWS, "the last pair of a row repeats a key"


def test_mad_rules_have_their_frequencies() -> None:
    n = 4000
    noisy = MadRows(n, settings_of("noisy"), split="train").made(np.arange(n))
    share = float((noisy[:, :-2:2] >= 12).mean())
    # one of the 23 pairs before the last one always stays
    assert share == pytest.approx(0.4 * 22 / 23, abs=4 * (0.24 / noisy.shape[0] / 23) ** 0.5)
    first_keys = Counter(MadRows(n, settings_of("recall"), split="train").made(np.arange(n))[:, 0].tolist())
    assert sorted(first_keys) == list(range(6))
    assert max(first_keys.values()) - min(first_keys.values()) < 8 * (n / 6) ** 0.5
    for split, sizes in (("train", {1, 2, 3}), ("validation", {3})):
        rows = MadRows(300, settings_of("fuzzy"), split=split).made(np.arange(300))
        parsed = [run for row in rows.tolist() for run in runs(row, 6, 12)]
        assert {len(tokens) for is_key, tokens, _ in parsed if is_key} == sizes
        assert {len(tokens) for is_key, tokens, _ in parsed if not is_key} == {1, 2, 3}
        assert all(len(set(tokens)) == len(tokens) for _, tokens, _ in parsed)
    blanks = MadRows(n, settings_of("copying"), split="train").made(np.arange(n))[:, 0] == 8
    # each of the 15 blanks stands before the first of the four tokens with probability 1/4
    assert float(blanks.mean()) == pytest.approx(1 - 0.75**15, abs=0.01)


def test_mad_rows_are_the_same_when_stored() -> None:
    rows = MadRows(ROWS, settings_of("fuzzy"), split="train")
    order = np.random.default_rng(0).permutation(ROWS)
    first = np.concatenate([rows.made(order[:7]), rows.made(order[7:])])
    assert np.array_equal(rows.made(order), first)
    assert np.array_equal(rows.made(np.array([ROWS + 3, 5]))[1:], first[order == 5])


def test_mad_last_target_starts_the_next_row() -> None:
    rows = MadRows(ROWS, settings_of("recall"), split="train")
    single = rows.pieces(np.arange(ROWS - 1) * 32, 33)
    assert np.array_equal(single.ravel(), np.concatenate([rows[at : at + 33] for at in range(0, 32 * (ROWS - 1), 32)]))
    assert np.array_equal(single[:, -1], rows.made(np.arange(1, ROWS))[:, 0])


def test_mad_batches_have_the_replaced_targets() -> None:
    settings = settings_of("memorization")
    streams = MadCorpus.streams(settings)
    batches = Batches([streams.train], settings.row, 4, 0, False, marks=[streams.train_marks])  # type: ignore[list-item]
    inputs, targets = batches.step(0)
    mask = batches.marked(0)
    assert mask is not None
    assert mask.sum() == 4 * 8
    assert (inputs[mask] == settings.vocabulary - 1).all(), "the network reads the sign, never the value"
    assert ((targets[mask] >= settings.keys) & (targets[mask] < settings.plain)).all()
    assert streams.marked_share == pytest.approx(8 / 17)


@pytest.mark.parametrize(("settings", "message"), [
    ({"noise": 0.1}, "only the task noisy has noise"),
    ({"task": "noisy", "noise": 0.1}, "noise needs token ids of its own"),
    ({"task": "copying", "length": 32, "copied": 16}, "16 copied tokens need a row of 34 or more"),
    ({"task": "fuzzy", "length": 16}, "need a row of 24 or more"),
    ({"task": "noisy", "vocabulary": 16, "noise_vocabulary": 15}, "needs 18 token ids"),
])  # fmt: skip
def test_mad_rejects_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MadConfig(**settings)


def test_mad_tokenizer_round_trip() -> None:
    tokenizer = load_tokenizer("mad")
    assert tokenizer.encode("t0 t8191 t17").tolist() == [0, 8191, 17]
    assert b"".join(map(tokenizer.token_bytes, (0, 8191, tokenizer.eot))) == b"t0 t8191 "
    with pytest.raises(TokenizerError, match="got 't8192'"):
        tokenizer.encode("t1 t8192")
