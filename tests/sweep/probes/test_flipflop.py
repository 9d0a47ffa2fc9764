"""The probe flipflop against networks whose answers are known, counted another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atma_sweep.results import metrics
from atma_sweep.results.intervals import wilson
from atma_sweep.sweep.config import CellConfig, DataConfig, EvalConfig
from atma_sweep.sweep.data.known.flipflop import FlipFlopRows, coin_flip_accuracy
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.subject import CellSubject, measure

SMALL = {"iid": 60, "sparse": 80, "dense": 40, "length": 32}
SHARES = {"iid": 0.8, "sparse": 0.98, "dense": 0.1}
SPLITS = {"iid": "validation", "sparse": "sparse", "dense": "dense"}
Predict = Callable[[str], list[str]]


def texts(split: str, length: int = 32) -> list[str]:
    rows = FlipFlopRows(SMALL[split], length, ignore=SHARES[split], seed=0, split=SPLITS[split])
    return ["".join("wri01"[token] for token in row) for row in rows.made(np.arange(SMALL[split]))]


def remember(text: str) -> list[str]:
    """What an automaton says after each token."""
    kept, said = "0", []
    for place, letter in enumerate(text):
        kept = letter if place % 2 and text[place - 1] == "w" else kept
        said.append(kept)
    return said


def copy(text: str) -> list[str]:
    """The last bit of any kind."""
    return [text[place - 1] if place % 2 == 0 and place else "0" for place in range(len(text))]


@pytest.fixture
def asked(rule: Any, subject: Callable[..., CellSubject]) -> Callable[..., CellSubject]:
    """asked(predict, **settings of the probe): letters are bytes."""

    def make(predict: Predict, **settings: Any) -> CellSubject:
        def tokens(row: np.ndarray) -> np.ndarray:
            return np.array([ord(letter) for letter in predict(bytes(row.tolist()).decode())])

        return subject(rule(tokens), chunk_tokens=100, settings={"flipflop": SMALL | settings})

    return make


def numbers(who: CellSubject) -> dict[str, Any]:
    ((measured, _),) = measure("flipflop", who, [0])
    return {one.metric: one for one in measured}


def test_an_automaton_is_right_throughout(asked: Callable[..., CellSubject]) -> None:
    found = numbers(asked(remember))
    for split, count in (("iid", 60), ("sparse", 80), ("dense", 40)):
        exact = found[f"exact_{split}"]
        assert (exact.value, exact.n, exact.low, exact.high) == (1.0, count, *wilson(count, count))
        assert found[f"error_{split}"].value == 0
        reads = sum(text.count("r") for text in texts(split))
        assert (found[f"reads_{split}"].value, found[f"error_{split}"].n) == (reads, reads)


def test_whoever_copies_the_last_bit_is_scored_as_counted_by_hand(asked: Callable[..., CellSubject]) -> None:
    found = numbers(asked(copy))
    for split in SPLITS:
        wrong = []
        for text in texts(split):
            kept, last, missed = "", "", 0
            for instruction, bit in zip(text[::2], text[1::2], strict=True):
                missed += instruction == "r" and last != kept
                kept = bit if instruction == "w" else kept
                last = bit
            wrong.append(missed)
        reads = [text.count("r") for text in texts(split)]
        exact = sum(missed == 0 for missed in wrong)
        assert 0 < exact < len(wrong)
        assert found[f"exact_{split}"].value == exact / len(wrong)
        assert (found[f"exact_{split}"].low, found[f"exact_{split}"].high) == wilson(exact, len(wrong))
        assert found[f"error_{split}"].value == sum(wrong) / sum(reads)
        assert found[f"coin_{split}"].value == pytest.approx(np.mean([0.5**count for count in reads]), rel=1e-12)


def test_items_are_the_first_sequences(asked: Callable[..., CellSubject]) -> None:
    ((_, examples),) = measure("flipflop", asked(copy, items=7), [0])
    assert [(one.metric, one.item) for one in examples] == [
        (f"exact_{split}", item) for split in SPLITS for item in range(7)
    ]
    ((_, every),) = measure("flipflop", asked(copy, items=1000), [0])
    assert [one for one in every if one.item < 7] == examples
    assert (
        np.mean([one.value for one in every if one.metric == "exact_dense"])
        == numbers(asked(copy))["exact_dense"].value
    )
    ((_, none),) = measure("flipflop", asked(copy, items=0), [0])
    assert none == []


def test_any_token_but_the_right_bit_is_wrong(asked: Callable[..., CellSubject]) -> None:
    found = numbers(asked(lambda text: ["w"] * len(text)))
    assert [found[f"error_{split}"].value for split in SPLITS] == [1, 1, 1]


def test_length_seed_and_share_of_the_sequences_like_those_of_training_are_the_corpus_s() -> None:
    data = DataConfig(corpus="flipflop", settings={"flipflop": {"length": 16, "seed": 3, "ignore": 0.5}})
    probe: Any = bound("flipflop", CellConfig(data=data))
    rows, ignore = probe.split_of("iid")
    assert (ignore, rows.rows) == (0.5, 16_000)
    expected = FlipFlopRows(1, 16, ignore=0.5, seed=3, split="validation")
    assert rows.made(np.arange(5)).tolist() == expected.made(np.arange(5)).tolist()
    assert probe.tokens(0) == 16 * 180_000
    levels = {metric.name: probe.chance(metric) for metric in probe.metrics}
    assert levels["exact_iid"] == coin_flip_accuracy(16, 0.5)
    assert levels["exact_dense"] == coin_flip_accuracy(16, 0.1)
    assert (levels["error_iid"], levels["reads_iid"], levels["coin_iid"]) == (0.5, None, None)
    assert probe.description("exact_sparse") == {"chance": coin_flip_accuracy(16, 0.98)}
    assert metrics.metric("flipflop", "exact_sparse", probe.description("exact_sparse")).chance == coin_flip_accuracy(
        16, 0.98
    )


def test_letters_that_are_no_tokens_have_a_reason(asked: Callable[..., CellSubject]) -> None:
    class Words(type(load_tokenizer("bytes"))):  # type: ignore[misc]
        name = "words"

        def encode(self, text: str) -> Any:
            return super().encode(text + " ")

    ((measured, _),) = measure("flipflop", replace(asked(copy), tokenizer=Words()), [0])
    assert [one.reason for one in measured] == ["n/a: tokenizer words has no token for each of the letters w r i 0 1"]
    assert EvalConfig().settings == {}
