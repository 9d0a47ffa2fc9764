"""Probe mqar on networks whose answers are known, against a separate count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.intervals import wilson
from atma_sweep.sweep.config import CellConfig, DataConfig
from atma_sweep.sweep.data.builtin.mqar import MqarConfig, MqarRows
from atma_sweep.sweep.data.tokenizer import RecallTokenizer, load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.subject import CellSubject, run_probe

TASK = {"length": 24, "pairs": 4, "keys": 6, "values": 5, "gap": 1.0}
ROWS = 70
DATA = DataConfig(corpus="mqar", tokenizer="mqar", settings={"mqar": TASK})


def texts() -> list[list[int]]:
    tokens = MqarRows(ROWS, MqarConfig(**TASK), split="validation").made(np.arange(ROWS))
    return [list(map(int, row)) for row in tokens]


def dictionary(row: np.ndarray) -> np.ndarray:
    """Predict the value of each token that is a written key, else token 0."""
    value_of_key: dict[int, int] = {}
    predicted = []
    for index, token in enumerate(row.tolist()):
        if index and row[index - 1] and row[index - 1] <= RecallTokenizer.KEYS < token:
            value_of_key.setdefault(int(row[index - 1]), token)
        predicted.append(value_of_key.get(token, 0))
    return np.array(predicted)


def newest(row: np.ndarray) -> np.ndarray:
    """Predict the last value in the row."""
    predicted, last = [], 0
    for token in row.tolist():
        last = token if token > RecallTokenizer.KEYS else last
        predicted.append(last)
    return np.array(predicted)


@pytest.fixture
def make_subject(rule: Any, subject: Callable[..., CellSubject]) -> Callable[..., CellSubject]:
    """Fixture: a function from a predictor and settings of the probe to a subject with the tokenizer of mqar."""

    def make(predict: Callable[[np.ndarray], np.ndarray], **settings: Any) -> CellSubject:
        network = rule(predict, load_tokenizer("mqar").vocabulary)
        cell_subject = subject(network, chunk_tokens=100, settings={"mqar": {"rows": ROWS, **settings}})
        config = cell_subject.config.model_copy(update={"data": DATA})
        return replace(cell_subject, tokenizer=load_tokenizer("mqar"), config=config)

    return make


def numbers(who: CellSubject) -> dict[str, Any]:
    ((measured, _),) = run_probe("mqar", who, [0])
    return {measurement.metric: measurement for measurement in measured}


def test_mqar_of_dictionary_is_perfect_with_window(make_subject: Callable[..., CellSubject]) -> None:
    who = make_subject(dictionary)
    measured = numbers(who)
    for name in ("accuracy", "exact"):
        assert (measured[name].value, measured[name].n, measured[name].low, measured[name].high) == (
            1,
            ROWS,
            *wilson(ROWS, ROWS),
        )
    assert measured["questions"].value == 4 * ROWS
    model: Any = who.model
    assert set(model.full) == {False}, "with the window of training"


def test_mqar_of_newest_value_matches_manual_count(make_subject: Callable[..., CellSubject]) -> None:
    measured = numbers(make_subject(newest))
    shares = []
    for row in texts():
        pairs = dict(zip(row[1:9:2], row[2:9:2], strict=True))
        right = 0
        for index in range(9, 23, 2):
            if row[index]:
                before = [token for token in row[:index] if token > RecallTokenizer.KEYS]
                right += before[-1] == pairs[row[index]]
        shares.append(right / 4)
    assert 0 < np.mean(shares) < 1
    assert measured["accuracy"].value == pytest.approx(np.mean(shares), rel=1e-12)
    assert measured["exact"].value == pytest.approx(np.mean(np.equal(shares, 1)))
    # the questions of a row are correlated: rows are counted, not questions
    assert (measured["accuracy"].low, measured["accuracy"].high) == wilson(np.sum(shares), ROWS)


def test_mqar_examples_are_first_rows(make_subject: Callable[..., CellSubject]) -> None:
    (_, items), (_, every) = (next(run_probe("mqar", make_subject(newest, items=count), [0])) for count in (7, ROWS))
    assert [(example.metric, example.item) for example in items] == [("accuracy", item) for item in range(7)]
    assert items == every[:7]


def test_mqar_chance_is_guess_among_values() -> None:
    probe = bound("mqar", CellConfig(data=DATA))
    chances = {metric.name: probe.chance(metric) for metric in probe.metrics}
    assert chances == {"accuracy": 1 / 5, "exact": pytest.approx(5.0**-4), "questions": None, "state_bytes": None}
    assert probe.tokens(0) == 2000 * 24


@pytest.mark.parametrize(("model", "per_token", "fixed"), [
    ({"attn_type": "nope"}, 2 * 2 * 8, 0),
    # the memory's state has heads x size x size, and Canon keeps three inputs of q, k and v
    ({"attn_type": "nope", "memory": "gated_delta"}, 2 * 2 * 8, 4 * 8 * 8),
    ({"attn_type": "nope", "memory": "gated_delta", "canon": True}, 2 * 2 * 8, 4 * 8 * 8 + 3 * (4 + 2 + 2) * 8),
])  # fmt: skip
def test_mqar_state_bytes_match_closed_form(
    model: dict[str, Any], per_token: int, fixed: int, network: Any, subject: Callable[..., CellSubject]
) -> None:
    """Keys and values of each token that the window leaves, plus states of fixed size, in float32."""
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "n_layers": 2, "attn_every": 1, "attn_offset": 0}
    for window, seen in ((False, 23), (True, 5)):
        options = {"canon": False, "vocab_size": 1024, "window": window, "window_size": 5} | sizes | model
        who = subject(network(**options).eval(), settings={"mqar": {"rows": 3}})
        who = replace(who, tokenizer=load_tokenizer("mqar"), config=who.config.model_copy(update={"data": DATA}))
        assert numbers(who)["state_bytes"].value == 2 * 4 * (seen * per_token + fixed)


def test_mqar_state_has_reason_if_mixer_cannot_decode(make_subject: Callable[..., CellSubject]) -> None:
    state = numbers(make_subject(dictionary))["state_bytes"]
    assert (state.value, state.reason) == (None, "n/a: mixer Rule cannot decode token by token")
