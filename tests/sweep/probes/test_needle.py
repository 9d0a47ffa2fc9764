"""Induction needle: prompt, oracles with known scores, and records (docs/reference/mechanisms.md, "Induction needle")."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes.needle import NeedleConfig, NeedleTrial, build_prompt, make_trials
from atma_sweep.sweep.probes.subject import run_probe
from statsmodels.stats.proportion import proportion_confint

EOT = 256
SCORED = ("digit_accuracy", "exact_accuracy", "nats")
TRIAL = NeedleTrial(" The access code for record 8394266 is", (1, 0, 1, 9, 0))
HAY = np.concatenate([[EOT], np.arange(100) % 26 + 97]).astype(np.uint16)


# --- trials and prompts -------------------------------------------------------------------------------------------


def test_needle_trials_are_published_ones() -> None:
    cast = make_trials(NeedleConfig())
    assert len(cast) == 16
    assert cast[0] == TRIAL
    assert (TRIAL.cue, TRIAL.value) == (" The access code for record 8394266 is", " 1 0 1 9 0")
    assert all(len(t.digits) == 5 and set(t.digits) <= set(range(10)) for t in cast)
    assert all(re.fullmatch(r" The access code for record [1-9]\d{6} is", t.cue) for t in cast)
    assert len({t.cue for t in cast}) == 16


def test_needle_trials_depend_on_settings_alone() -> None:
    assert make_trials(NeedleConfig(trials=3)) == make_trials(NeedleConfig())[:3]
    assert make_trials(NeedleConfig(seed=5)) != make_trials(NeedleConfig())
    assert [len(t.digits) for t in make_trials(NeedleConfig(digits=2, trials=2))] == [2, 2]
    torch.manual_seed(0)
    assert make_trials(NeedleConfig())[0] == TRIAL


@pytest.mark.parametrize("gap", [0, 1, 37, 101])
def test_needle_layout_in_bytes(gap: int) -> None:
    prompt = build_prompt(TRIAL, HAY, gap, load_tokenizer("bytes"))
    pair = [*TRIAL.cue.encode(), *TRIAL.value.encode()]
    assert prompt.tokens.tolist() == [EOT, *pair, *HAY[:gap].tolist(), *pair]
    assert [chr(prompt.tokens[at]) for at in prompt.scored] == ["1", "0", "1", "9", "0"]
    total = len(prompt.tokens)
    assert prompt.scored.tolist() == [total - 9, total - 7, total - 5, total - 3, total - 1], "spaces are not scored"


def test_needle_keeps_tokens_of_large_vocabulary() -> None:
    class Large:
        eot = 70_000

        def encode(self, text: str) -> np.ndarray:
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) + 70_001

        def token_bytes(self, token: int) -> bytes:
            return bytes([token - 70_001])

    prompt = build_prompt(TRIAL, HAY.astype(np.uint32) + 65_536, 3, Large())
    assert prompt.tokens[[0, 1, -1]].tolist() == [70_000, 70_001 + ord(" "), 70_001 + ord("0")]
    assert prompt.tokens.max() < 70_001 + 128


def test_layout_without_the_needle_is_as_long() -> None:
    tokenizer = load_tokenizer("bytes")
    present, absent = (build_prompt(TRIAL, HAY, 20, tokenizer, absent=flag) for flag in (False, True))
    pair = [*TRIAL.cue.encode(), *TRIAL.value.encode()]
    assert absent.tokens.tolist() == [EOT, *HAY[: 20 + len(pair)].tolist(), *pair]
    assert (len(absent.tokens), absent.scored.tolist()) == (len(present.tokens), present.scored.tolist())


def test_needle_layout_in_byte_pairs(pairs: Any) -> None:
    for trial in make_trials(NeedleConfig()):
        cue, value = pairs.encode(trial.cue), pairs.encode(trial.value)
        assert len(cue) < len(trial.cue.encode())
        assert len(value) == 5
        prompt = build_prompt(trial, HAY, 30, pairs)
        assert prompt.tokens.tolist() == [pairs.eot, *cue, *value, *HAY[:30].tolist(), *cue, *value]
        assert prompt.scored.tolist() == list(range(len(prompt.tokens) - 5, len(prompt.tokens)))
        assert [pairs.token_bytes(int(prompt.tokens[at])) for at in prompt.scored] == [
            f" {d}".encode() for d in trial.digits
        ]


# --- oracles ------------------------------------------------------------------------------------------------------


def copier(reach: int | None = None, least: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Return a predictor that continues the longest earlier match of the present context, at most `reach` tokens back.

    If no match is `least` long it guesses a digit by position.
    """

    def predict(row: np.ndarray) -> np.ndarray:
        n = len(row)
        guess = np.empty(n, dtype=np.int64)
        match = np.zeros(n + 1, dtype=np.int64)
        for t in range(n):
            # match[s + 1] = length of the common suffix of row[: t + 1] and row[: s + 1]
            match[1:] = np.where(row[:n] == row[t], match[:-1] + 1, 0)
            lengths = match[1 : t + 1].copy()
            if reach is not None:
                lengths[: max(0, t - reach)] = 0
            best = int(lengths.argmax()) if t else 0
            guess[t] = row[best + 1] if t and lengths[best] >= least else 48 + (7 * t) % 10
        return guess

    return predict


def values(results: Any) -> dict[tuple[str, int], Any]:
    return {(m.metric, m.length): m for measured, _ in results for m in measured}


def test_needle_of_copying_oracle_is_perfect(rule: Any, subject: Any) -> None:
    model = rule(copier())
    measured = values(run_probe("needle", subject(model, needle_trials=8), [16, 32, 64]))
    for length in (16, 32, 64):
        digits, exact = measured["digit_accuracy", length], measured["exact_accuracy", length]
        assert (digits.value, digits.n, exact.value, exact.n) == (1.0, 40, 1.0, 8)
        # a certain answer: 263 further tokens are 20 nats below
        assert measured["nats", length].value == pytest.approx(math.log1p(263 * math.exp(-20)), abs=1e-6)
    assert measured["absent_nats", 16].value > 5
    assert all(model.full), "always at full context"


def test_needle_bigrams_suffice_for_first_trial(pairs: Any) -> None:
    prompt = build_prompt(TRIAL, HAY, 50, pairs)
    follows: dict[tuple[int, int], int] = {}
    right = []
    for at in range(2, len(prompt.tokens)):
        before = (int(prompt.tokens[at - 2]), int(prompt.tokens[at - 1]))
        if at in prompt.scored:
            right.append(follows.get(before) == prompt.tokens[at])
        follows[before] = int(prompt.tokens[at])
    assert right == [True] * 5


def test_needle_of_short_reach_oracle_is_chance(rule: Any, subject: Any) -> None:
    reach = 100
    measured = values(run_probe("needle", subject(rule(copier(reach, least=6)), needle_trials=40), [16, 32, 64]))
    pair = len(TRIAL.cue) + len(TRIAL.value)
    for length in (16, 32, 64):
        digits = measured["digit_accuracy", length]
        assert digits.n == 200
        if length + pair < reach:
            assert digits.value == 1.0
        else:
            assert digits.low < 0.1 < digits.high, "guessing one of ten digits"
            assert measured["exact_accuracy", length].value == 0
    assert [length + pair < reach for length in (16, 32, 64)] == [True, True, False]


def test_needle_answers_match_network_logits(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264, dtype=torch.float64, window=True).eval()
    who = subject(model)
    cast = make_trials(NeedleConfig(trials=6))
    losses, hits = [], []
    for index, trial in enumerate(cast):
        prompt = build_prompt(trial, who.corpus.heldout[index % 3], 16, who.tokenizer)
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        logits = model.logits(model.features(tokens, full_context=True).hidden_BTD)[0].log_softmax(-1)
        for at in prompt.scored.tolist():
            losses.append(-logits[at - 1, tokens[0, at]].item())
            hits.append(float(logits[at - 1].argmax() == tokens[0, at]))
    measured = values(run_probe("needle", who, [16]))
    assert measured["nats", 16].value == pytest.approx(np.mean(losses), abs=1e-6)
    assert measured["digit_accuracy", 16].value == pytest.approx(np.mean(hits), abs=1e-12)


# --- records ------------------------------------------------------------------------------------------------------


def test_measurements_and_examples(rule: Any, subject: Any) -> None:
    half = copier(100, least=6)
    who = subject(rule(half), needle_trials=7)
    results = list(run_probe("needle", who, [16, 64]))
    assert [[m.metric for m in measured] for measured, _ in results] == [
        [*SCORED, "absent_nats", "constant_accuracy"], [*SCORED, "constant_accuracy"],
    ]  # fmt: skip
    for (measured, examples), length in zip(results, (16, 64), strict=True):
        assert {(m.probe, m.length) for m in measured} == {("needle", length)}
        assert len(examples) == 2 * 7 * 5
        digits, _, nats = measured[:3]
        for of in (digits, nats):
            parts = [e for e in examples if e.metric == of.metric]
            assert [(e.item, e.position) for e in parts] == [(i, p) for i in range(7) for p in range(5)]
            assert np.mean([e.value for e in parts]) == pytest.approx(of.value, rel=1e-6)
        assert (digits.low, digits.high) == pytest.approx(proportion_confint(7 * digits.value, 7, method="wilson"))
        assert (digits.unit, nats.unit, nats.low) == ("fraction", "nats/digit", None)


def test_needle_haystacks_rotate_heldout_documents(rule: Any, subject: Any) -> None:
    model = rule(copier())
    who = subject(model, held=5, needle_trials=5)
    list(run_probe("needle", who, [32]))
    (seen,) = model.seen
    pair = len(TRIAL.cue) + len(TRIAL.value)
    for row, index in enumerate((0, 1, 2, 0, 1)):
        assert seen[row, 1 + pair : 1 + pair + 32].tolist() == who.corpus.heldout[index][:32].tolist()
    assert seen.shape == (5, 1 + 2 * pair + 32 - 1), "the last token is not read"


def test_needle_with_few_documents_has_reason(rule: Any, subject: Any) -> None:
    """Documents of 63 to 65 tokens suffice for gaps of 16 and 63, but not for 64."""
    model = rule(copier())
    who = subject(model, held=3, length=63)
    (short, short_examples), (exact, _), (long, none) = run_probe("needle", who, [16, 63, 64])
    assert all(m.value == 1.0 for m in (*short[:2], *exact[:2]))
    assert (len(short), len(short_examples), len(exact)) == (5, 60, 4)
    (only,) = long
    assert (only.metric, only.length, only.value, only.n, none) == ("digit_accuracy", 64, None, 0, [])
    assert only.reason == "too-few-docs: 2 of 3 held-out documents have 64 tokens"
    assert [len(row) for rows in model.seen for row in rows] == [112] * 6 + [159] * 6


def test_absent_nats_needs_longer_documents(rule: Any, subject: Any) -> None:
    """The haystack replaces the 48 tokens of the needle: the gap has its number, the reference a reason."""
    pair = len(TRIAL.cue) + len(TRIAL.value)
    for length, reason in ((16 + pair, None), (15 + pair, "too-few-docs: 2 of 3 held-out documents have 64 tokens")):
        ((measured, examples),) = run_probe("needle", subject(rule(copier()), held=3, length=length), [16])
        assert [m.metric for m in measured] == [*SCORED, "absent_nats", "constant_accuracy"]
        assert (measured[0].value, len(examples)) == (1.0, 60)
        assert measured[3].reason == reason
        assert (measured[3].value is None) == (reason is not None)
        assert measured[3].unit == "nats/digit"


def test_needle_length_added_later_changes_nothing(network: Any, subject: Any) -> None:
    """With documents of 200 tokens and more a length of 4096 has a reason, and the others stay the same."""
    model = network(awake=True, vocab_size=264).eval()
    before = list(run_probe("needle", subject(model, length=200), [16, 64]))
    after = list(run_probe("needle", subject(model, length=200, lengths=(16, 32, 64, 4096)), [16, 64, 4096]))
    assert after[:2] == before
    assert after[2][0][0].reason == "too-few-docs: 0 of 3 held-out documents have 4096 tokens"
