"""A value in a text by depth and length (docs/mechanisms.md, "Passkey")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, EvalConfig
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.needle import NeedleTrial
from atma_sweep.sweep.probes.passkey import GRASS, MAGIC_NAMES, PasskeyConfig, build_prompt, make_hidden_values
from atma_sweep.sweep.probes.subject import CellSubject, measure
from pydantic import ValidationError
from statsmodels.stats.proportion import proportion_confint

Make = Callable[..., CellSubject]
EOT = 256
ONE = NeedleTrial(" The code is", (1, 0, 7))
TEXT = (np.arange(400) % 26 + 97).astype(np.uint16)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [36, 37, 100, 255])
def test_layout_in_bytes(depth: float, length: int) -> None:
    made = build_prompt(ONE, TEXT, length, depth, load_tokenizer("bytes"))
    assert not isinstance(made, int)
    pair = [*b" The code is 1 0 7"]
    n = length - 2 * len(pair)
    d = int(np.floor(depth * n))
    assert made.tokens.tolist() == [EOT, *TEXT[:d], *pair, *TEXT[d:n], *pair]
    assert len(made.tokens) - 1 == length, "what is read"
    assert made.scored.tolist() == [length - 4, length - 2, length], "digits, not spaces"


def test_no_room_is_told() -> None:
    assert build_prompt(ONE, TEXT, 35, 0.5, load_tokenizer("bytes")) == 36


def test_trials_are_draws_of_their_own() -> None:
    cast = make_hidden_values(PasskeyConfig())
    assert cast[:3] == make_hidden_values(PasskeyConfig(trials=3))
    assert len({one.digits for one in cast}) == len({one.cue for one in cast}) == 8
    assert all(one.cue.startswith(" The access code for record ") and len(one.digits) == 5 for one in cast)
    magic = make_hidden_values(PasskeyConfig(kind="niah", trials=7, digits=2))
    assert [one.cue for one in magic] == [f" The special magic {MAGIC_NAMES[i % 6]} number is" for i in range(7)]
    assert make_hidden_values(PasskeyConfig(seed=5)) != cast
    torch.manual_seed(3)
    assert make_hidden_values(PasskeyConfig()) == cast


def recall(reach: int) -> Callable[[np.ndarray], np.ndarray]:
    """After the last cue it says what followed the first one, if that is at most `reach` tokens back, else digit 3."""

    def predict(row: np.ndarray) -> np.ndarray:
        text = bytes(row.clip(0, 255).astype(np.uint8))
        second = text.rindex(b" The")
        first = text.index(b" The")
        guess = np.full(len(row), ord("3"))
        if first < second and second - first <= reach:
            known = row[first : second if second - first < len(row) - second + 1 else first + len(row) - second + 1]
            guess[second : second + len(known) - 1] = known[1:]
        return guess

    return predict


def test_an_oracle_of_short_reach_recalls_what_stands_deep_and_nothing_else(rule: Any, subject: Make) -> None:
    settings = {"depths": [0, 0.5, 1], "trials": 4, "digits": 3}
    who = subject(rule(recall(150)), settings={"passkey": settings}, documents=2)
    (numbers, examples), *_ = measure("passkey", who, [300])
    cast = make_hidden_values(PasskeyConfig(**settings))
    asked = [digit for one in cast for digit in one.digits]
    guess = asked.count(3) / len(asked)
    at = {
        depth: [e.value for e in examples if e.metric == "digit_accuracy" and e.detail == {"depth": depth}]
        for depth in (0.0, 0.5, 1.0)
    }
    # 300 tokens, of which question and value take 46 each: 0 and about 104 and 208 stand before it
    assert [len(hits) for hits in at.values()] == [12, 12, 12]
    assert [np.mean(hits) for hits in at.values()] == pytest.approx([guess, 1.0, 1.0])
    found = {m.metric: m for m in numbers}
    share = (guess + 2) / 3
    assert (found["digit_accuracy"].value, found["digit_accuracy"].n) == (pytest.approx(share), 36)
    low, high = proportion_confint(share * 4, 4, method="wilson")
    assert (found["digit_accuracy"].low, found["digit_accuracy"].high) == pytest.approx((low, high))
    rows = np.array([e.value for e in examples if e.metric == "digit_accuracy"]).reshape(4, 3, 3)
    assert [(e.item, e.position) for e in examples if e.metric == "nats"] == [
        (i, p) for i in range(4) for p in range(9)
    ]
    assert (found["exact_accuracy"].value, found["exact_accuracy"].n) == (pytest.approx(rows.all(2).mean()), 12)
    assert found["constant_accuracy"].value == max(asked.count(digit) for digit in range(10)) / 12
    assert (
        bound("passkey", who.config).chance(bound("passkey", who.config).metrics[0]) == found["constant_accuracy"].value
    )


def test_text_is_that_of_the_trial_s_document_or_the_sentences(rule: Any, subject: Make) -> None:
    for filler in ("documents", "grass"):
        model = rule(recall(0))
        settings = {"depths": [1.0], "trials": 3, "filler": filler}
        who = subject(model, documents=2, settings={"passkey": settings})
        list(measure("passkey", who, [200]))
        rows = torch.cat(model.seen).numpy()
        assert rows.shape == (3, 200)
        assert all(model.full)
        n = 200 - 2 * len(" The access code for record 1234567 is 1 2 3 4 5")
        for index, row in enumerate(rows):
            text = (
                who.corpus.heldout[index % 2][1:]
                if filler == "documents"
                else np.frombuffer((GRASS * 9).encode(), np.uint8)
            )
            assert row[: n + 1].tolist() == [EOT, *text[:n]]


def test_sentences_are_long_enough_for_any_length(subject: Make, network: Any) -> None:
    who = subject(
        network(vocab_size=264).eval(), settings={"passkey": {"filler": "grass", "trials": 1, "depths": [0.5]}}
    )
    probe = bound("passkey", who.config)
    assert (probe.longest(who.corpus), probe.lack(who.corpus, 10**6)) == (None, None)
    ((numbers, _),) = measure("passkey", who, [400])
    assert numbers[0].value is not None


@pytest.mark.parametrize("depths", [[], [0.5, 0.5], [0.5, 0.2], [-0.1], [1.5]])
def test_depths_that_are_none(depths: list[float]) -> None:
    with pytest.raises(ValidationError, match="depths must rise and lie between 0 and 1"):
        PasskeyConfig(depths=depths)


def test_a_report_hears_how_many_answers_a_trial_has() -> None:
    told = EvalConfig(settings={"passkey": {"depths": [0, 1], "digits": 3}})
    probe = bound("passkey", CellConfig(eval=told))
    assert [(probe.description(name) or {}).get("trials") for name in ("digit_accuracy", "exact_accuracy")] == [6, 2]
    plain = bound("passkey", CellConfig())
    assert [(plain.description(name) or {}).get("trials") for name in ("digit_accuracy", "exact_accuracy")] == [
        None,
        None,
    ]
    assert plain.tokens(1000) == 40_000
