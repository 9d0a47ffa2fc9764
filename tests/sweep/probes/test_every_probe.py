"""Properties of every registered probe, whatever it measures."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.results import metrics
from atma_sweep.sweep.config import CellConfig, DataConfig
from atma_sweep.sweep.data.builtin.mqar import VALUES
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import PROBES, Metric, Probe, ProbeConfig, bound, register_probe
from atma_sweep.sweep.probes.subject import CellSubject, evaluating, run_probe
from tiers import every_nth

EVERY = [name for name in PROBES if name != "downstream"]
"""Every probe but that of downstream tasks, which has no numbers without tasks (test_downstream.py)."""
OVER_LENGTHS = [name for name in EVERY if PROBES.load(name).by_length]

MIXERS = {"gates": "fox", "gate_dynamics": "wall"}
"""The mixer of which a probe has numbers, where it has none of polar."""
TOKENS = {"mqar": "mqar", "mad": "mad"}
"""The tokenizer of a probe that has no numbers of bytes."""
LENGTHS = {"passkey": (120, 150)}
"""Lengths of a probe that asks a question of more tokens than 32."""

FOR_EVERY_METRIC = {"passkey": {"settings": {"passkey": {"trials": 2, "generate": 1}}}}
"""Settings with which a probe has all its metrics."""
OF_NO_TEXT = ("decode",)
"""Probes over lengths that read no text, so that none can be too long for it."""
SAME_TEXT = ("extrapolation",)
"""Probes that read as much text at every length."""
BY_THE_CLOCK = ("written_per_s",)
"""Metrics of which no two measurements are the same."""


@pytest.fixture
def who(network: Any, subject: Callable[..., CellSubject]) -> Callable[..., CellSubject]:
    """Fixture: a function from mixer, tokenizer and settings to a network.

    Every probe but those of MIXERS and TOKENS can measure it.
    """

    def make(mixer: str = "polar", tokens: str = "bytes", *, awake: bool = True, **settings: Any) -> CellSubject:
        size = {"bytes": 264}.get(tokens, 1024)
        sizes = {"attn_type": mixer, "memory": "gated_delta", "window": True, "vocab_size": size}
        model = network(awake=awake, dtype=torch.float64, **sizes).eval()
        small = {
            "lengths": (16, 32),
            "settings": {
                "flipflop": {"iid": 4, "sparse": 5, "dense": 3, "length": 16},
                "mqar": {"rows": 3},
                "mad": {"rows": 3},
            },
        }
        return replace(subject(model, **(small | settings)), tokenizer=load_tokenizer(tokens))

    return make


def lengths_of(name: str) -> tuple[int, ...]:
    return LENGTHS.get(name, (16, 32)) if name in OVER_LENGTHS else (0,)


@pytest.fixture
def able(who: Callable[..., CellSubject]) -> Callable[..., CellSubject]:
    """Fixture: a function from a probe's name and settings to a network of which the probe has all numbers."""
    return lambda name, **settings: who(MIXERS.get(name, "polar"), TOKENS.get(name, "bytes"), **settings)


def numbers(
    name: str, cell_subject: CellSubject, lengths: tuple[int, ...] | None = None
) -> dict[tuple[Any, ...], float]:
    """Return every measurement and example of a probe that does not depend on the clock."""
    values: dict[tuple[Any, ...], float] = {}
    for measured, examples in run_probe(name, cell_subject, lengths or lengths_of(name)):
        values |= {("mean", m.metric, m.length): m.value for m in measured if m.metric not in BY_THE_CLOCK}
        values |= {("one", e.metric, e.length, e.item, e.position): e.value for e in examples}
    return values


@pytest.mark.parametrize("name", EVERY)
def test_probe_describes_its_metrics(name: str) -> None:
    probe = PROBES.load(name)
    assert issubclass(probe.Config, ProbeConfig)
    assert [field for field, field_info in probe.Config.model_fields.items() if not field_info.description] == []
    assert probe.metrics
    for metric in probe.metrics:
        assert metric.words
        assert metric.unit
        assert metrics.builtin_metric(name, metric.name) in (None, metric), (
            "what a report knows without the probe is the same"
        )
    assert [
        metric.chance for metric in probe.metrics if metric.chance is not None and metric.unit == "nats/token"
    ] == []


@pytest.mark.parametrize("name", EVERY)
def test_probe_missing_value_has_reason(name: str) -> None:
    row, main = bound(name, CellConfig()).missing("oom: too large", 64), PROBES.load(name).metrics[0]
    assert (row.probe, row.metric, row.unit, row.length) == (name, main.name, main.unit, 64)
    assert (row.value, row.n, row.reason) == (None, 0, "oom: too large")


@pytest.mark.parametrize("name", EVERY)
def test_probe_tokens_are_positive_and_monotonic(name: str) -> None:
    probe = bound(name, CellConfig())
    costs = [probe.tokens(length) for length in ((16, 32, 64) if probe.by_length else (0,))]
    assert costs[0] > 0
    assert costs == sorted(costs)
    assert len(set(costs)) == (1 if name in SAME_TEXT else len(costs))


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_probe_yields_declared_metrics_alone(name: str, able: Callable[..., CellSubject]) -> None:
    cell_subject, lengths = able(name, **FOR_EVERY_METRIC.get(name, {})), lengths_of(name)
    results = list(run_probe(name, cell_subject, lengths))
    units = {metric.name: metric.unit for metric in PROBES.load(name).metrics}
    metric_names = {measured.metric for measurements, _ in results for measured in measurements}
    for (measurements, examples), length in zip(results, lengths, strict=True):
        assert measurements[0].metric == PROBES.load(name).metrics[0].name, "the main number first"
        for measured in measurements:
            assert (measured.probe, measured.length, measured.unit) == (name, length, units[measured.metric])
            assert measured.value is not None, measured.reason
        assert {(e.probe, e.length) for e in examples} <= {(name, length)}
        assert {e.metric for e in examples} <= units.keys()
    assert metric_names == units.keys(), "and everything that is declared is yielded"


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("training", [False, True])
def test_probe_leaves_network_unchanged(name: str, training: bool, able: Callable[..., CellSubject]) -> None:
    cell_subject = able(name)
    model = cell_subject.model.train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config, drawn, tokens = model.config.model_dump(), torch.random.get_rng_state(), torch.arange(24)[None]
    with torch.no_grad():
        logits = model(tokens)
    with evaluating(model):
        list(run_probe(name, cell_subject, lengths_of(name)))
    assert {module.training for module in model.modules()} == {training}
    assert model.config.model_dump() == config
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not any("evaluate" in vars(part) for part in model.modules())
    with torch.no_grad():
        assert torch.equal(model(tokens), logits), "the window is still there"


@pytest.mark.parametrize("name", every_nth(EVERY, 6))
def test_probe_lengths_and_batches_are_independent(name: str, able: Callable[..., CellSubject]) -> None:
    together = numbers(name, able(name))
    again = able(name)
    assert together == {
        key: n for length in lengths_of(name)[::-1] for key, n in numbers(name, again, (length,)).items()
    }
    # a token at a time only where texts are short
    for chunk in (40, 10**6) if name in LENGTHS else (1, 40, 10**6):
        assert numbers(name, able(name, chunk_tokens=chunk)) == pytest.approx(together, rel=1e-9, abs=1e-9), chunk


UNTRAINED = {"nats/token": math.log(264), "nats/digit": math.log(264), "perplexity": 264.0, "fraction": 0.0}
"""By unit or name: the numbers of a network whose logits are all the same, so that it says token 0."""


@pytest.mark.parametrize(
    "name", ["val", "clean", "junk", "needle", "same_tail", "position_nll", "extrapolation", "passkey"]
)
def test_probe_of_untrained_network_is_at_chance(name: str, able: Callable[..., CellSubject]) -> None:
    measurements = [m for measured, _ in run_probe(name, able(name, awake=False), lengths_of(name)) for m in measured]
    of = {
        m: UNTRAINED.get(m.metric, UNTRAINED.get(str(m.unit))) for m in measurements if m.metric != "constant_accuracy"
    }
    assert sum(level is not None for level in of.values()) >= len(lengths_of(name))
    assert all(m.value == pytest.approx(level, abs=1e-6) for m, level in of.items() if level is not None)


def always(token: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a predictor of one token everywhere."""
    return lambda row: np.full(len(row), token)


@pytest.mark.parametrize(("name", "settings"), [
    ("needle", {"needle_trials": 16}), ("needle", {"needle_trials": 5, "needle_digits": 2}),
    ("passkey", {"settings": {"passkey": {"trials": 7}}}), ("passkey", {"settings": {"passkey": {"digits": 3}}}),
])  # fmt: skip
def test_best_constant_digit_scores_chance(
    name: str, settings: dict[str, Any], rule: Any, subject: Callable[..., CellSubject]
) -> None:
    """Run all ten constant digits."""
    scored, levels = [], set()
    for digit in "0123456789":
        who = subject(rule(always(ord(digit))), **settings)
        for measured, _ in run_probe(name, who, [120, 150]):
            values = {m.metric: m.value for m in measured}
            scored.append(values["digit_accuracy"])
            levels.add(values["constant_accuracy"])
    probe = bound(name, who.config)
    assert levels == {max(scored)} == {probe.chance(probe.metrics[0])}


@pytest.mark.parametrize(("name", "metrics", "answers"), [
    ("flipflop", ("error_iid", "error_sparse", "error_dense"), tuple(b"01")),
    ("mqar", ("accuracy",), tuple(range(VALUES, VALUES + 5))),
])  # fmt: skip
def test_constant_answers_score_chance_on_average(
    name: str, metrics: tuple[str, ...], answers: tuple[int, ...], rule: Any, subject: Callable[..., CellSubject]
) -> None:
    """Each question has one of these answers."""
    task = {"mqar": {"length": 24, "pairs": 4, "keys": 6, "values": 5}}
    small = {"flipflop": {"iid": 20, "sparse": 30, "dense": 10, "length": 32}, "mqar": {"rows": 30}}
    scored = []
    for answer in answers:
        who = subject(rule(always(answer), 1024), settings=small)
        config = who.config.model_copy(update={"data": DataConfig(settings=task)})
        who = replace(who, config=config, tokenizer=load_tokenizer(TOKENS.get(name, "bytes")))
        ((measured, _),) = run_probe(name, who, [0])
        scored.append([m.value for m in measured if m.metric in metrics])
    probe = bound(name, config)
    assert np.mean(scored, 0).tolist() == pytest.approx([probe.chance(probe.metric(metric)) for metric in metrics])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in OVER_LENGTHS if name not in OF_NO_TEXT])
@pytest.mark.parametrize("settings", [{"documents": 3, "junk_rows": 4}, {"documents": 5, "junk_rows": 7}])
def test_probe_longest_length_is_exact(name: str, settings: dict[str, int], who: Callable[..., CellSubject]) -> None:
    cell_subject = who(needle_trials=2, **settings)
    probe = bound(name, cell_subject.config)
    limit = probe.longest(cell_subject.corpus)
    assert limit is not None, "a probe over lengths says how long they may be"
    assert limit > 1
    assert probe.lack(cell_subject.corpus, limit - 1) is None
    assert probe.lack(cell_subject.corpus, limit + 1) is not None
    reasons: dict[int, str | None] = {}
    for measured, _ in run_probe(name, cell_subject, [limit, limit + 1]):
        reasons |= {measurement.length: measurement.reason for measurement in measured}
    assert reasons[limit] is None
    assert reasons[limit + 1] is not None


@pytest.mark.parametrize("name", [name for name in EVERY if name not in OVER_LENGTHS or name in OF_NO_TEXT])
def test_probe_without_lengths_has_no_limit(name: str, who: Callable[..., CellSubject]) -> None:
    cell_subject = who()
    assert bound(name, cell_subject.config).longest(cell_subject.corpus) is None


SHORT = {"positions": "ape", "position_settings": {"ape": {"length": 30}}}
"""A network that reads 30 tokens."""
SEVEN = {"n_layers": 7, "attn_type": "nope"}
ALL_MISSING = ("position_nll", "extrapolation", "attention_map", "gates", "gate_dynamics", "state_norm", "count_map")
"""Probes that give a reason for every metric, not for the main one alone."""


@pytest.mark.parametrize(("name", "model", "settings", "length", "reason"), [
    ("same_tail", {}, {}, 65, "n/a: the scored tokens end at token 64, too early for a context of 65 tokens"),
    ("same_tail", {}, {"last": 17}, 16, "n/a: 17 tokens are scored, more than the context of 16"),
    ("same_tail", {}, {"end": 300}, 16, "too-few-docs: 2 of 3 held-out documents have 301 tokens"),
    ("position_nll", {}, {}, 303, "too-few-docs: 0 of 3 held-out documents have 304 tokens"),
    ("passkey", {}, {}, 301, "too-few-docs: 2 of 3 held-out documents have 301 tokens"),
    ("passkey", {}, {}, 80, "n/a: a value and its question take 96 tokens, more than the context of 80"),
    ("extrapolation", {}, {"span": 700}, 16, "too-short: the validation split has 700 of 701 tokens"),
    ("extrapolation", {}, {"span": 60}, 61, "n/a: the text of 60 targets is shorter than a window of 61 tokens"),
    ("attention_map", SEVEN, {"layers": [1]}, 0, "n/a: layer 1 has no attention; layers with attention: 2, 6"),
    ("attention_map", SEVEN, {"tokens": 512}, 0, "too-short: the validation split has 300 of 513 tokens"),
    ("attention_map", SHORT, {"tokens": 31}, 0, "n/a: position scheme ape supports at most 30 tokens, fewer than 31"),
    ("gate_dynamics", {"attn_type": "wall"}, {}, 0, "too-short: the validation split holds 4 of 8 rows of 13 tokens"),
    ("gates", {"attn_type": "fox"}, {}, 0, "too-short: the validation split holds 4 of 8 rows of 13 tokens"),
    ("state_norm", {}, {}, 16, "n/a: the network has no memory"),
    ("state_norm", {"memory": "gated_delta"}, {}, 4096, "too-few-docs: 0 of 3 held-out documents have 4096 tokens"),
    ("count_map", {"attn_type": "nope"}, {}, 0, "n/a: the network has no PoLAR layer"),
    ("flipflop", SHORT, {"length": 32}, 0, "n/a: position scheme ape supports at most 30 tokens, fewer than 31"),
    ("mad", {}, {}, 0, "n/a: tokenizer bytes has no tokens of the task; use the corpus mad"),
    ("mqar", {}, {}, 0, "n/a: tokenizer bytes has no keys and values; use the corpus mqar"),
    ("clean", {}, {}, 301, "too-few-docs: 1 of 3 held-out documents have 302 tokens"),
    ("clean", SHORT, {}, 31, "n/a: position scheme ape supports at most 30 tokens, fewer than 31"),
    ("junk", {}, {}, 175, "too-short: the validation split holds 3 of 4 rows of 175 tokens"),
    ("junk", SHORT, {}, 31, "n/a: position scheme ape supports at most 30 tokens, fewer than 31"),
    ("needle", SHORT, {}, 16, "n/a: position scheme ape supports at most 30 tokens, fewer than 112"),
])  # fmt: skip
def test_probe_gives_reason_if_not_measurable(
    name: str, model: Any, settings: Any, length: int, reason: str, network: Any, subject: Callable[..., CellSubject]
) -> None:
    validation = {"gates": 60, "gate_dynamics": 60, "attention_map": 300}.get(name, 700)
    changes = {"validation_tokens": 26 if name.startswith("gate") else 300, "settings": {name: settings}}
    who = subject(network(vocab_size=264, **model).eval(), validation=validation, **changes)
    assert model is not SHORT or who.beyond(30) is None
    ((missing, examples),) = run_probe(name, who, [length])
    metrics = PROBES.load(name).metrics[: None if name in ALL_MISSING else 1]
    expected = [(metric.name, length, None, 0, reason) for metric in metrics]
    assert [(m.metric, m.length, m.value, m.n, m.reason) for m in missing] == expected
    assert examples == []


@pytest.mark.parametrize(("span", "length", "advice"), [(700, 16, "lower"), (60, 61, "raise")])
def test_lack_of_extrapolation_names_span(
    span: int, length: int, advice: str, network: Any, subject: Callable[..., CellSubject]
) -> None:
    who = subject(network(vocab_size=264).eval(), settings={"extrapolation": {"span": span}})
    lack = bound("extrapolation", who.config).lack(who.corpus, length)
    assert f"{advice} eval.settings.extrapolation.span" in str(lack)


def test_longest_is_zero_with_too_few_documents(who: Callable[..., CellSubject]) -> None:
    cell_subject = who(documents=6)
    assert [
        bound(name, cell_subject.config).longest(cell_subject.corpus) for name in ("clean", "needle", "state_norm")
    ] == [
        0,
        0,
        0,
    ]


def test_probes_are_planned_without_torch() -> None:
    code = (
        "import sys; from atma_sweep.sweep.config import CellConfig; from atma_sweep.sweep.probes import PROBES, bound; "
        "print(len([bound(name, CellConfig()).tokens(8) for name in PROBES]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{len(PROBES)} False\n", done.stderr


def test_needle_chance_is_best_constant_answer() -> None:
    """Among the published 16 x 5 digits, 7 occurs 14 times."""
    probe = bound("needle", CellConfig())
    assert [probe.chance(metric) for metric in probe.metrics] == [14 / 80, None, None, None, None]


# --- plugins ------------------------------------------------------------------------------------------------------


class LengthlessProbe(Probe):
    """Smallest valid probe, without lengths."""

    metrics = (Metric("glow", "lux"),)

    def tokens(self, length: int) -> int:
        return 1

    def run(self, subject: Any, lengths: Any) -> Any:
        for length in lengths:
            yield [self.value("glow", 1.0, length)], []


def test_register_probe_adds_probe() -> None:
    with PROBES.scope():
        assert register_probe("glow")(LengthlessProbe) is LengthlessProbe
        assert list(PROBES)[-1] == "glow"
        assert bound("glow", CellConfig()).value("glow", 2.0).unit == "lux"
        with pytest.raises(KeyError):
            bound("glow", CellConfig()).value("gloom", 2.0)
    assert "glow" not in PROBES


@pytest.mark.parametrize(
    ("name", "parts", "error", "message"),
    [
        ("Glow", {}, ValueError, "invalid probe name 'Glow'; use lower-case letters"),
        ("table-6", {}, ValueError, "invalid probe name 'table-6'"),
        ("throughput", {}, ValueError, "name 'throughput' is reserved"),
        ("clean", {}, ValueError, "a probe named 'clean' exists already"),
        ("glow", {"metrics": ()}, TypeError, "must have `metrics`"),
        ("glow", {"metrics": ("nats",)}, TypeError, "must have `metrics`"),
        ("glow", {"metrics": (Metric("a", "s"), Metric("a", "s"))}, TypeError, "with distinct names"),
        ("glow", {"tokens": Probe.tokens}, TypeError, "probe 'glow' must define tokens"),
    ],
)
def test_register_probe_rejects_invalid_classes(
    name: str, parts: dict[str, Any], error: type[Exception], message: str
) -> None:
    with PROBES.scope(), pytest.raises(error, match=message):
        register_probe(name)(type("Glow", (LengthlessProbe,), parts))
