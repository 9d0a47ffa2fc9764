"""Declarations of metrics, and of metrics that the package does not define."""

from __future__ import annotations

import pytest
from atma_sweep.results import metrics
from atma_sweep.results.main_results import MainResult
from atma_sweep.results.metrics import METRICS, Metric, metric, metric_description


def test_declared_metrics_have_a_text_and_a_unit() -> None:
    assert [
        key for key, declared in METRICS.items() if not (declared.words and declared.unit and key[1] == declared.name)
    ] == []


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        (("val", "val_loss"), -1), (("clean", "bits"), -1), (("throughput", "mfu"), 1), (("throughput", "mfu_drop"), 0),
        (("needle", "nats"), -1), (("needle", "absent_nats"), 0), (("state_norm", "delta_norm"), 0),
        (("needle", "peak_memory"), -1), (("mine", "peak_memory"), -1), (("mine", "nats"), 0),
    ],
)  # fmt: skip
def test_metric_direction_comes_from_its_declaration(key: tuple[str, str], direction: int) -> None:
    assert metric(*key).direction == direction


def test_an_unknown_metric_says_who_recorded_it_and_no_more() -> None:
    unknown = metric("mine", "glow", unit="lux")
    assert unknown.definition == "Recorded by the probe mine, which describes it by name and unit only."
    assert (unknown.unit, unknown.better, unknown.chance, unknown.heading) == ("lux", "neither", None, "")


def test_a_description_comes_back_as_it_was_written() -> None:
    mine = Metric("glow", "fraction", "higher", "Share of lamps that glow.", "Glow", 1, 0.25, 4)
    assert metric("mine", "glow", metric_description(mine), "fraction") == mine
    assert mine.definition == "Share of lamps that glow. More is better. Score of a trivial answer: 25%."
    assert metric_description(Metric("glow", "lux")) == {}
    assert metric("mine", "glow", {}, "lux").words == metrics.UNKNOWN_METRIC_TEXT.format(probe="mine")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"better": "sideways"}, {"better": []}, {"decimals": -1}, {"decimals": True}, {"decimals": 400}, {"words": 3},
        {"heading": None}, {"chance": "often"}, {"chance": True}, {"trials": -1}, {"trials": 2.5}, {"name": "other"}, {"unit": "s"}, {"what": 1},
    ],
)  # fmt: skip
def test_invalid_description_fields_are_ignored(nonsense: dict[str, object]) -> None:
    assert metric("mine", "glow", nonsense, "lux") == metric("mine", "glow", unit="lux")


def test_metric_description_overrides_the_chance_level() -> None:
    needle = metric("needle", "digit_accuracy", {"chance": 0.175})
    assert (needle.chance_text, needle.heading) == ("17.5%", "Ndl")


def test_main_results_have_units_except_losses() -> None:
    results = [
        ("val", "val_loss", 0, 2.345),
        ("needle", "digit_accuracy", 512, 0.125),
        ("decode", "written_per_s", 128, 713.0),
    ]
    texts = [MainResult(METRICS[probe, name], length, value).text for probe, name, length, value in results]
    assert texts == ["validation loss 2.345", "needle accuracy at 512 12.5 %", "decoding speed at 128 713 tokens/s"]
