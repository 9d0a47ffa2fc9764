"""Recall of a value by depth and length (docs/reference/mechanisms.md, "Passkey")."""

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
from atma_sweep.sweep.probes.subject import CellSubject, run_probe
from pydantic import ValidationError
from statsmodels.stats.proportion import proportion_confint

Make = Callable[..., CellSubject]
EOT = 256
TRIAL = NeedleTrial(" The code is", (1, 0, 7))
TEXT = (np.arange(400) % 26 + 97).astype(np.uint16)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [36, 37, 100, 255])
def test_passkey_layout_in_bytes(depth: float, length: int) -> None:
    prompt = build_prompt(TRIAL, TEXT, length, depth, load_tokenizer("bytes"))
    assert not isinstance(prompt, int)
    pair = [*b" The code is 1 0 7"]
    n = length - 2 * len(pair)
    d = int(np.floor(depth * n))
    assert prompt.tokens.tolist() == [EOT, *TEXT[:d], *pair, *TEXT[d:n], *pair]
    assert len(prompt.tokens) - 1 == length, "what is read"
    assert prompt.scored.tolist() == [length - 4, length - 2, length], "digits, not spaces"


def test_passkey_reports_needed_tokens() -> None:
    assert build_prompt(TRIAL, TEXT, 35, 0.5, load_tokenizer("bytes")) == 36


def test_passkey_trials_are_independent_draws() -> None:
    cast = make_hidden_values(PasskeyConfig())
    assert cast[:3] == make_hidden_values(PasskeyConfig(trials=3))
    assert len({trial.digits for trial in cast}) == len({trial.cue for trial in cast}) == 8
    assert all(trial.cue.startswith(" The access code for record ") and len(trial.digits) == 5 for trial in cast)
    magic = make_hidden_values(PasskeyConfig(kind="niah", trials=7, digits=2))
    assert [trial.cue for trial in magic] == [f" The special magic {MAGIC_NAMES[i % 6]} number is" for i in range(7)]
    assert make_hidden_values(PasskeyConfig(seed=5)) != cast
    torch.manual_seed(3)
    assert make_hidden_values(PasskeyConfig()) == cast


def recall(reach: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a predictor that repeats what followed the first cue, at most `reach` tokens back, else digit 3."""

    def predict(row: np.ndarray) -> np.ndarray:
        text = bytes(row.clip(0, 255).astype(np.uint8))
        second = text.rindex(b" The")
        first = text.index(b" The")
        guess = np.full(len(row), ord("3"))
        if first < second and second - first <= reach:
            window = row[first : second if second - first < len(row) - second + 1 else first + len(row) - second + 1]
            guess[second : second + len(window) - 1] = window[1:]
        return guess

    return predict


def test_passkey_of_short_reach_oracle_recalls_deep_values(rule: Any, subject: Make) -> None:
    settings = {"depths": [0, 0.5, 1], "trials": 4, "digits": 3}
    who = subject(rule(recall(150)), settings={"passkey": settings}, documents=2)
    (numbers, examples), *_ = run_probe("passkey", who, [300])
    cast = make_hidden_values(PasskeyConfig(**settings))
    digits = [digit for trial in cast for digit in trial.digits]
    guess = digits.count(3) / len(digits)
    at = {
        depth: [e.value for e in examples if e.metric == "digit_accuracy" and e.detail == {"depth": depth}]
        for depth in (0.0, 0.5, 1.0)
    }
    # 300 tokens, of which question and value take 46 each: 0 and about 104 and 208 stand before it
    assert [len(hits) for hits in at.values()] == [12, 12, 12]
    assert [np.mean(hits) for hits in at.values()] == pytest.approx([guess, 1.0, 1.0])
    measured = {m.metric: m for m in numbers}
    share = (guess + 2) / 3
    assert (measured["digit_accuracy"].value, measured["digit_accuracy"].n) == (pytest.approx(share), 36)
    low, high = proportion_confint(share * 4, 4, method="wilson")
    assert (measured["digit_accuracy"].low, measured["digit_accuracy"].high) == pytest.approx((low, high))
    rows = np.array([e.value for e in examples if e.metric == "digit_accuracy"]).reshape(4, 3, 3)
    assert [(e.item, e.position) for e in examples if e.metric == "nats"] == [
        (i, p) for i in range(4) for p in range(9)
    ]
    assert (measured["exact_accuracy"].value, measured["exact_accuracy"].n) == (pytest.approx(rows.all(2).mean()), 12)
    assert measured["constant_accuracy"].value == max(digits.count(digit) for digit in range(10)) / 12
    assert (
        bound("passkey", who.config).chance(bound("passkey", who.config).metrics[0])
        == measured["constant_accuracy"].value
    )


def test_passkey_text_is_document_or_sentences(rule: Any, subject: Make) -> None:
    for filler in ("documents", "grass"):
        model = rule(recall(0))
        settings = {"depths": [1.0], "trials": 3, "filler": filler}
        who = subject(model, documents=2, settings={"passkey": settings})
        list(run_probe("passkey", who, [200]))
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


def test_passkey_sentences_fit_any_length(subject: Make, network: Any) -> None:
    who = subject(
        network(vocab_size=264).eval(), settings={"passkey": {"filler": "grass", "trials": 1, "depths": [0.5]}}
    )
    probe = bound("passkey", who.config)
    assert (probe.longest(who.corpus), probe.lack(who.corpus, 10**6)) == (None, None)
    ((numbers, _),) = run_probe("passkey", who, [400])
    assert numbers[0].value is not None


@pytest.mark.parametrize("depths", [[], [0.5, 0.5], [0.5, 0.2], [-0.1], [1.5]])
def test_passkey_rejects_invalid_depths(depths: list[float]) -> None:
    with pytest.raises(ValidationError, match="depths must rise and lie between 0 and 1"):
        PasskeyConfig(depths=depths)


def test_passkey_description_counts_answers_per_trial() -> None:
    section = EvalConfig(settings={"passkey": {"depths": [0, 1], "digits": 3}})
    probe = bound("passkey", CellConfig(eval=section))
    assert [(probe.description(name) or {}).get("trials") for name in ("digit_accuracy", "exact_accuracy")] == [6, 2]
    plain = bound("passkey", CellConfig())
    assert [(plain.description(name) or {}).get("trials") for name in ("digit_accuracy", "exact_accuracy")] == [
        None,
        None,
    ]
    assert plain.tokens(1000) == 40_000


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", ["wall", "path"])
def test_written_answers_match_a_greedy_loop(network: Any, subject: Make, mixer: str) -> None:
    """Digits 3 and 7 alone are likely; the loop takes the most likely token of a complete pass. PaTH has no cache."""
    model = network(awake=True, vocab_size=264, attn_type=mixer).eval()
    with torch.no_grad():
        model.head.bias[[ord("3"), ord("7")]] += 14.0
    settings = {
        "passkey": {"kind": "niah", "filler": "grass", "depths": [0.0, 1.0], "trials": 6, "digits": 1, "generate": 3}
    }
    who = subject(model, lengths=(120,), settings=settings)
    ((measured, examples),) = run_probe("passkey", who, [120])
    written = {(e.item, e.position): e.value for e in examples if e.metric == "match_accuracy"}
    probe, expected = bound("passkey", who.config), {}
    for item, trial in enumerate(probe.cast()):
        for question, depth in enumerate((0.0, 1.0)):
            text = np.tile(np.frombuffer(GRASS.encode(), dtype=np.uint8).astype(np.uint16), 9)[:120]
            prompt = build_prompt(trial, text, 120, depth, who.tokenizer)
            assert not isinstance(prompt, int)
            row = prompt.tokens[:-2].astype(np.int64).tolist()
            for _ in range(3):
                hidden = model.features(torch.tensor([row]), full_context=True).hidden_BTD
                row.append(int(model.logits(hidden)[0, -1, :257].argmax()))
            expected[item, question] = float(ord(str(trial.digits[0])) in row[-3:])
    assert written == expected
    numbers = {m.metric: m for m in measured}
    assert (numbers["match_accuracy"].value, numbers["match_accuracy"].n) == (sum(expected.values()) / 12, 12)
    assert 0 < sum(expected.values()) < 12
    assert probe.description("match_accuracy") == {"trials": 2}
