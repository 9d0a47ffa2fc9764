"""Probe flipflop on networks whose answers are known, against a separate count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atma_sweep.results import metrics
from atma_sweep.results.intervals import wilson
from atma_sweep.sweep.config import CellConfig, DataConfig, EvalConfig
from atma_sweep.sweep.data.builtin.flipflop import FlipFlopRows, coin_flip_accuracy
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.subject import CellSubject, run_probe

SMALL = {"iid": 60, "sparse": 80, "dense": 40, "length": 32}
SHARES = {"iid": 0.8, "sparse": 0.98, "dense": 0.1}
SPLITS = {"iid": "validation", "sparse": "sparse", "dense": "dense"}
Predict = Callable[[str], list[str]]


def texts(split: str, length: int = 32) -> list[str]:
    rows = FlipFlopRows(SMALL[split], length, ignore=SHARES[split], seed=0, split=SPLITS[split])
    return ["".join("wri01"[token] for token in row) for row in rows.made(np.arange(SMALL[split]))]


def remember(text: str) -> list[str]:
    """Return the prediction of an automaton after each token."""
    last_bit, predicted = "0", []
    for index, letter in enumerate(text):
        last_bit = letter if index % 2 and text[index - 1] == "w" else last_bit
        predicted.append(last_bit)
    return predicted


def copy(text: str) -> list[str]:
    """Predict the last bit, whatever its instruction."""
    return [text[index - 1] if index % 2 == 0 and index else "0" for index in range(len(text))]


@pytest.fixture
def make_subject(rule: Any, subject: Callable[..., CellSubject]) -> Callable[..., CellSubject]:
    """Fixture: a function from a predictor and settings of the probe to a subject whose letters are bytes."""

    def make(predict: Predict, **settings: Any) -> CellSubject:
        def tokens(row: np.ndarray) -> np.ndarray:
            return np.array([ord(letter) for letter in predict(bytes(row.tolist()).decode())])

        return subject(rule(tokens), chunk_tokens=100, settings={"flipflop": SMALL | settings})

    return make


def numbers(who: CellSubject) -> dict[str, Any]:
    ((measured, _),) = run_probe("flipflop", who, [0])
    return {measurement.metric: measurement for measurement in measured}


def test_flipflop_of_automaton_is_perfect(make_subject: Callable[..., CellSubject]) -> None:
    measured = numbers(make_subject(remember))
    for split, count in (("iid", 60), ("sparse", 80), ("dense", 40)):
        exact = measured[f"exact_{split}"]
        assert (exact.value, exact.n, exact.low, exact.high) == (1.0, count, *wilson(count, count))
        assert measured[f"error_{split}"].value == 0
        reads = sum(text.count("r") for text in texts(split))
        assert (measured[f"reads_{split}"].value, measured[f"error_{split}"].n) == (reads, reads)


def test_flipflop_of_copier_matches_manual_count(make_subject: Callable[..., CellSubject]) -> None:
    measured = numbers(make_subject(copy))
    for split in SPLITS:
        wrong = []
        for text in texts(split):
            last_bit, last, missed = "", "", 0
            for instruction, bit in zip(text[::2], text[1::2], strict=True):
                missed += instruction == "r" and last != last_bit
                last_bit = bit if instruction == "w" else last_bit
                last = bit
            wrong.append(missed)
        reads = [text.count("r") for text in texts(split)]
        exact = sum(missed == 0 for missed in wrong)
        assert 0 < exact < len(wrong)
        assert measured[f"exact_{split}"].value == exact / len(wrong)
        assert (measured[f"exact_{split}"].low, measured[f"exact_{split}"].high) == wilson(exact, len(wrong))
        assert measured[f"error_{split}"].value == sum(wrong) / sum(reads)
        assert measured[f"coin_{split}"].value == pytest.approx(np.mean([0.5**count for count in reads]), rel=1e-12)


def test_flipflop_examples_are_first_sequences(make_subject: Callable[..., CellSubject]) -> None:
    ((_, examples),) = run_probe("flipflop", make_subject(copy, items=7), [0])
    assert [(example.metric, example.item) for example in examples] == [
        (f"exact_{split}", item) for split in SPLITS for item in range(7)
    ]
    ((_, every),) = run_probe("flipflop", make_subject(copy, items=1000), [0])
    assert [example for example in every if example.item < 7] == examples
    assert (
        np.mean([example.value for example in every if example.metric == "exact_dense"])
        == numbers(make_subject(copy))["exact_dense"].value
    )
    ((_, none),) = run_probe("flipflop", make_subject(copy, items=0), [0])
    assert none == []


def test_flipflop_counts_any_wrong_token(make_subject: Callable[..., CellSubject]) -> None:
    measured = numbers(make_subject(lambda text: ["w"] * len(text)))
    assert [measured[f"error_{split}"].value for split in SPLITS] == [1, 1, 1]


def test_flipflop_iid_split_follows_corpus() -> None:
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


def test_flipflop_with_unsuitable_tokenizer_has_reason(make_subject: Callable[..., CellSubject]) -> None:
    class WordTokenizer(type(load_tokenizer("bytes"))):  # type: ignore[misc]
        name = "words"

        def encode(self, text: str) -> Any:
            return super().encode(text + " ")

    ((measured, _),) = run_probe("flipflop", replace(make_subject(copy), tokenizer=WordTokenizer()), [0])
    assert [measurement.reason for measurement in measured] == [
        "n/a: tokenizer words has no token for each of the letters w r i 0 1"
    ]
    assert EvalConfig().settings == {}
