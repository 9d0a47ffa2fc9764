"""What is said of a metric, and what of one that nobody knows."""

from __future__ import annotations

import pytest
from atma_sweep.results import metrics
from atma_sweep.results.metrics import METRICS, Metric, metric, metric_description


def test_every_metric_of_the_package_has_words_and_a_unit() -> None:
    assert [key for key, one in METRICS.items() if not (one.words and one.unit and key[1] == one.name)] == []


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        (("val", "val_loss"), -1), (("clean", "bits"), -1), (("throughput", "mfu"), 1), (("throughput", "mfu_drop"), 0),
        (("needle", "nats"), -1), (("needle", "absent_nats"), 0), (("state_norm", "delta_norm"), 0),
        (("needle", "peak_memory"), -1), (("mine", "peak_memory"), -1), (("mine", "nats"), 0),
    ],
)  # fmt: skip
def test_the_direction_is_that_of_the_probe_s_metric_and_never_guessed(key: tuple[str, str], direction: int) -> None:
    assert metric(*key).direction == direction


def test_an_unknown_metric_says_who_recorded_it_and_no_more() -> None:
    found = metric("mine", "glow", unit="lux")
    assert found.definition == "Recorded by the probe mine, which says no more of it than its name and unit."
    assert (found.unit, found.better, found.chance, found.heading) == ("lux", "neither", None, "")


def test_a_description_comes_back_as_it_was_written() -> None:
    mine = Metric("glow", "fraction", "higher", "Share of lamps that glow.", "Glow", 1, 0.25, 4)
    assert metric("mine", "glow", metric_description(mine), "fraction") == mine
    assert mine.definition == "Share of lamps that glow. More is better. A trivial answer scores 25%."
    assert metric_description(Metric("glow", "lux")) == {}
    assert metric("mine", "glow", {}, "lux").words == metrics.UNKNOWN_METRIC_TEXT.format(probe="mine")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"better": "sideways"}, {"better": []}, {"decimals": -1}, {"decimals": True}, {"decimals": 400}, {"words": 3},
        {"heading": None}, {"chance": "often"}, {"chance": True}, {"trials": -1}, {"trials": 2.5}, {"name": "other"}, {"unit": "s"}, {"what": 1},
    ],
)  # fmt: skip
def test_what_makes_no_sense_in_a_description_counts_as_not_said(nonsense: dict[str, object]) -> None:
    assert metric("mine", "glow", nonsense, "lux") == metric("mine", "glow", unit="lux")


def test_a_cell_s_own_chance_level_stands_over_that_of_the_package() -> None:
    found = metric("needle", "digit_accuracy", {"chance": 0.175})
    assert (found.chance_text, found.heading) == ("17.5%", "Ndl")
