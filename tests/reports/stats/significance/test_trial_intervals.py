"""The interval of an accuracy is that of its trials, also of rows that were stored with another."""

from __future__ import annotations

import pytest
from atma_sweep.reports.stats.significance.trial_intervals import with_intervals
from atma_sweep.results.store.records import MeasuredValue
from statsmodels.stats.proportion import proportion_confint


def accuracy(metric: str = "digit_accuracy", **fields: object) -> MeasuredValue:
    defaults = {"cell_id": "a", "attempt_id": 1, "probe": "needle", "metric": metric, "length": 64, "unit": "fraction"}
    return MeasuredValue(**(defaults | fields))  # type: ignore[arg-type]


def first_interval(*values: MeasuredValue) -> tuple[float | None, float | None]:
    """Return the interval of the first value."""
    by_key = with_intervals({(v.cell_id, v.probe, v.metric, v.length): v for v in values})
    first = next(iter(by_key.values()))
    return first.low, first.high


def wilson_interval(hits: float, trials: int) -> tuple[float, float]:
    low, high = proportion_confint(hits, trials, method="wilson")
    return pytest.approx((low, high), abs=1e-12)  # type: ignore[no-any-return]


def test_interval_of_eighty_digits_in_sixteen_trials() -> None:
    assert first_interval(accuracy(value=0.925, n=80)) == wilson_interval(14.8, 16)


def test_interval_over_digits_is_replaced() -> None:
    assert first_interval(accuracy(value=0.925, n=80, low=0.846, high=0.965)) == wilson_interval(14.8, 16)


def test_independent_trials_from_the_exact_accuracy() -> None:
    """Trials have two digits, which an older row does not record."""
    exact = accuracy("exact_accuracy", value=0.5, n=40)
    assert first_interval(accuracy(value=0.75, n=80), exact) == wilson_interval(30, 40)
    newer_exact = accuracy("exact_accuracy", value=0.5, n=40, attempt_id=2)
    assert first_interval(accuracy(value=0.75, n=80), newer_exact) == wilson_interval(12, 16), (
        "of another attempt, which may have asked for others"
    )


def test_independent_trials_from_the_description() -> None:
    assert first_interval(accuracy(value=0.75, n=80, description={"trials": 2})) == wilson_interval(30, 40)


def test_interval_over_trials_is_unchanged() -> None:
    assert first_interval(accuracy("exact_accuracy", value=0.5, n=16, low=0.1, high=0.9)) == (0.1, 0.9)
    assert first_interval(accuracy("exact_accuracy", value=0.5, n=16)) == wilson_interval(8, 16)
    mine = accuracy("found", probe="mine", value=0.5, n=20, description={"trials": True})
    assert first_interval(mine) == wilson_interval(10, 20)


@pytest.mark.parametrize(
    "fields",
    [{"value": None, "reason": "oom: no"}, {"value": 0.5}, {"value": 0.5, "n": 0}, {"value": 1.5, "n": 80}, {"value": 2.0, "n": 80, "metric": "nats", "unit": "nats/digit"}],
)  # fmt: skip
def test_no_interval_without_a_count(fields: dict[str, object]) -> None:
    assert first_interval(accuracy(**fields)) == (None, None)  # type: ignore[arg-type]
