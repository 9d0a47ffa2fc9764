"""The probe mqar against networks whose answers are known, counted another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.intervals import wilson
from atma_sweep.sweep.config import CellConfig, DataConfig
from atma_sweep.sweep.data.known.mqar import MqarConfig, MqarRows
from atma_sweep.sweep.data.tokenizer import RecallTokenizer, load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.subject import CellSubject, measure

TASK = {"length": 24, "pairs": 4, "keys": 6, "values": 5, "gap": 1.0}
ROWS = 70
DATA = DataConfig(corpus="mqar", tokenizer="mqar", settings={"mqar": TASK})


def texts() -> list[list[int]]:
    made = MqarRows(ROWS, MqarConfig(**TASK), split="validation").made(np.arange(ROWS))
    return [list(map(int, row)) for row in made]


def dictionary(row: np.ndarray) -> np.ndarray:
    """After each token the value that it stands for, if it is a key that was written, else token 0."""
    known: dict[int, int] = {}
    said = []
    for place, token in enumerate(row.tolist()):
        if place and row[place - 1] and row[place - 1] <= RecallTokenizer.KEYS < token:
            known.setdefault(int(row[place - 1]), token)
        said.append(known.get(token, 0))
    return np.array(said)


def newest(row: np.ndarray) -> np.ndarray:
    """The last value that was seen."""
    said, last = [], 0
    for token in row.tolist():
        last = token if token > RecallTokenizer.KEYS else last
        said.append(last)
    return np.array(said)


@pytest.fixture
def asked(rule: Any, subject: Callable[..., CellSubject]) -> Callable[..., CellSubject]:
    """asked(predict, **settings of the probe)"""

    def make(predict: Callable[[np.ndarray], np.ndarray], **settings: Any) -> CellSubject:
        network = rule(predict, load_tokenizer("mqar").vocabulary)
        made = subject(network, chunk_tokens=100, settings={"mqar": {"rows": ROWS, **settings}})
        config = made.config.model_copy(update={"data": DATA})
        return replace(made, tokenizer=load_tokenizer("mqar"), config=config)

    return make


def numbers(who: CellSubject) -> dict[str, Any]:
    ((measured, _),) = measure("mqar", who, [0])
    return {one.metric: one for one in measured}


def test_a_dictionary_is_right_throughout_and_asked_as_it_was_trained(asked: Callable[..., CellSubject]) -> None:
    who = asked(dictionary)
    found = numbers(who)
    for name in ("accuracy", "exact"):
        assert (found[name].value, found[name].n, found[name].low, found[name].high) == (1, ROWS, *wilson(ROWS, ROWS))
    assert found["questions"].value == 4 * ROWS
    model: Any = who.model
    assert set(model.full) == {False}, "with the window of training"


def test_whoever_says_the_newest_value_is_scored_as_counted_by_hand(asked: Callable[..., CellSubject]) -> None:
    found = numbers(asked(newest))
    shares = []
    for row in texts():
        pairs = dict(zip(row[1:9:2], row[2:9:2], strict=True))
        right = 0
        for place in range(9, 23, 2):
            if row[place]:
                before = [token for token in row[:place] if token > RecallTokenizer.KEYS]
                right += before[-1] == pairs[row[place]]
        shares.append(right / 4)
    assert 0 < np.mean(shares) < 1
    assert found["accuracy"].value == pytest.approx(np.mean(shares), rel=1e-12)
    assert found["exact"].value == pytest.approx(np.mean(np.equal(shares, 1)))
    # a row's questions are about one memory: rows are counted, not questions
    assert (found["accuracy"].low, found["accuracy"].high) == wilson(np.sum(shares), ROWS)


def test_items_are_the_first_rows(asked: Callable[..., CellSubject]) -> None:
    (_, items), (_, every) = (next(measure("mqar", asked(newest, items=count), [0])) for count in (7, ROWS))
    assert [(one.metric, one.item) for one in items] == [("accuracy", item) for item in range(7)]
    assert items == every[:7]


def test_a_guess_scores_one_in_as_many_as_there_are_values() -> None:
    probe = bound("mqar", CellConfig(data=DATA))
    chances = {one.name: probe.chance(one) for one in probe.metrics}
    assert chances == {"accuracy": 1 / 5, "exact": pytest.approx(5.0**-4), "questions": None}
    assert probe.tokens(0) == 2000 * 24
