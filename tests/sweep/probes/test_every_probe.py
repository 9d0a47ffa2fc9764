"""What holds of every probe of the registry, whatever it measures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from atma_sweep.results import metrics
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import PROBES, Metric, Probe, ProbeConfig, bound, register_probe
from atma_sweep.sweep.probes.subject import Network, measure

EVERY = list(PROBES)
OVER_LENGTHS = [name for name in EVERY if PROBES.load(name).by_length]

OTHER = {"gates": "fox"}
"""The mixer of which a probe has numbers, where it has none of polar."""
TOKENS = {"mqar": "mqar"}
"""The tokenizer of a probe that has no numbers of bytes."""
LENGTHS = {"passkey": (120, 150)}
"""Lengths of a probe that asks a question of more tokens than 32."""

OF_NO_TEXT = ("decode",)
"""Probes over lengths that read no text, so that none can be too long for it."""
SAME_TEXT = ("extrapolation",)
"""Probes that read as much text at every length."""


@pytest.fixture
def who(network: Any, subject: Callable[..., Network]) -> Callable[..., Network]:
    """who(mixer, tokens, **settings): a network that every probe can measure but those of OTHER and TOKENS."""

    def make(mixer: str = "polar", tokens: str = "bytes", **settings: Any) -> Network:
        size = {"bytes": 264}.get(tokens, 1024)
        model = network(awake=True, vocab_size=size, attn_type=mixer, memory="gated_delta", window=True).eval()
        small = {
            "lengths": (16, 32),
            "settings": {"flipflop": {"iid": 4, "sparse": 5, "dense": 3, "length": 16}, "mqar": {"rows": 3}},
        }
        return replace(subject(model, **(small | settings)), tokenizer=load_tokenizer(tokens))

    return make


@pytest.mark.parametrize("name", EVERY)
def test_a_probe_says_what_it_measures(name: str) -> None:
    probe = PROBES.load(name)
    assert issubclass(probe.Config, ProbeConfig)
    assert [field for field, about in probe.Config.model_fields.items() if not about.description] == []
    assert probe.metrics
    for metric in probe.metrics:
        assert metric.words
        assert metric.unit
        assert metrics.known(name, metric.name) in (None, metric), "what a report knows without the probe is the same"
    assert [
        metric.chance for metric in probe.metrics if metric.chance is not None and metric.unit == "nats/token"
    ] == []


@pytest.mark.parametrize("name", EVERY)
def test_the_cost_is_above_zero_and_never_falls_with_the_length(name: str) -> None:
    probe = bound(name, CellConfig())
    costs = [probe.tokens(length) for length in ((16, 32, 64) if probe.by_length else (0,))]
    assert costs[0] > 0
    assert costs == sorted(costs)
    assert len(set(costs)) == (1 if name in SAME_TEXT else len(costs))


@pytest.mark.parametrize("name", EVERY)
def test_everything_that_it_yields_is_declared(name: str, who: Callable[..., Network]) -> None:
    one = who(OTHER.get(name, "polar"), TOKENS.get(name, "bytes"))
    lengths = LENGTHS.get(name, (16, 32)) if name in OVER_LENGTHS else (0,)
    results = list(measure(name, one, lengths))
    units = {metric.name: metric.unit for metric in PROBES.load(name).metrics}
    found = {measured.metric for some, _ in results for measured in some}
    for (some, examples), length in zip(results, lengths, strict=True):
        assert some[0].metric == PROBES.load(name).metrics[0].name, "the main number first"
        for measured in some:
            assert (measured.probe, measured.length, measured.unit) == (name, length, units[measured.metric])
            assert measured.value is not None, measured.reason
        assert {(e.probe, e.length) for e in examples} <= {(name, length)}
        assert {e.metric for e in examples} <= units.keys()
    assert found == units.keys(), "and everything that is declared is yielded"


@pytest.mark.parametrize("name", [name for name in OVER_LENGTHS if name not in OF_NO_TEXT])
@pytest.mark.parametrize("settings", [{"documents": 3, "junk_rows": 4}, {"documents": 5, "junk_rows": 7}])
def test_one_token_more_than_the_longest_length_is_not_measured(
    name: str, settings: dict[str, int], who: Callable[..., Network]
) -> None:
    asked = who(needle_trials=2, **settings)
    probe = bound(name, asked.config)
    limit = probe.longest(asked.corpus)
    assert limit is not None, "a probe over lengths says how long they may be"
    assert limit > 1
    assert probe.lack(asked.corpus, limit - 1) is None
    assert probe.lack(asked.corpus, limit + 1) is not None
    found: dict[int, str | None] = {}
    for measured, _ in measure(name, asked, [limit, limit + 1]):
        found |= {one.length: one.reason for one in measured}
    assert found[limit] is None
    assert found[limit + 1] is not None


@pytest.mark.parametrize("name", [name for name in EVERY if name not in OVER_LENGTHS or name in OF_NO_TEXT])
def test_what_has_no_length_has_no_limit(name: str, who: Callable[..., Network]) -> None:
    asked = who()
    assert bound(name, asked.config).longest(asked.corpus) is None


def test_too_few_documents_give_no_length_at_all(who: Callable[..., Network]) -> None:
    asked = who(documents=6)
    assert [bound(name, asked.config).longest(asked.corpus) for name in ("clean", "needle", "state_norm")] == [0, 0, 0]


def test_a_plan_needs_no_torch_to_ask_every_probe() -> None:
    code = (
        "import sys; from atma_sweep.sweep.config import CellConfig; from atma_sweep.sweep.probes import PROBES, bound; "
        "print(len([bound(name, CellConfig()).tokens(8) for name in PROBES]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{len(EVERY)} False\n", done.stderr


def test_the_needle_s_chance_is_that_of_the_best_constant_answer() -> None:
    """The published 16 x 5 digits: 7 stands 14 times."""
    probe = bound("needle", CellConfig())
    assert [probe.chance(metric) for metric in probe.metrics] == [14 / 80, None, None, None, None]


# --- of a plugin --------------------------------------------------------------------------------------------------


class Whole(Probe):
    """Everything that a probe must have."""

    metrics = (Metric("glow", "lux"),)

    def tokens(self, length: int) -> int:
        return 1

    def run(self, subject: Any, lengths: Any) -> Any:
        for length in lengths:
            yield [self.value("glow", 1.0, length)], []


def test_a_registered_probe_is_one_of_all() -> None:
    with PROBES.scope():
        assert register_probe("glow")(Whole) is Whole
        assert list(PROBES)[-1] == "glow"
        assert bound("glow", CellConfig()).value("glow", 2.0).unit == "lux"
        with pytest.raises(KeyError):
            bound("glow", CellConfig()).value("gloom", 2.0)
    assert "glow" not in PROBES


@pytest.mark.parametrize(
    ("name", "parts", "error", "said"),
    [
        ("Glow", {}, ValueError, "no probe can be named 'Glow'; use small letters"),
        ("table-6", {}, ValueError, "no probe can be named 'table-6'"),
        ("throughput", {}, ValueError, "which means something else"),
        ("clean", {}, ValueError, "a probe named 'clean' exists already"),
        ("glow", {"metrics": ()}, TypeError, "must have `metrics`"),
        ("glow", {"metrics": ("nats",)}, TypeError, "must have `metrics`"),
        ("glow", {"metrics": (Metric("a", "s"), Metric("a", "s"))}, TypeError, "each with its own name"),
        ("glow", {"tokens": Probe.tokens}, TypeError, "probe 'glow' must define tokens"),
    ],
)
def test_what_is_no_probe_is_refused(name: str, parts: dict[str, Any], error: type[Exception], said: str) -> None:
    with PROBES.scope(), pytest.raises(error, match=said):
        register_probe(name)(type("Glow", (Whole,), parts))
