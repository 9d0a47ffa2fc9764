"""The interval of an accuracy: of its trials, which are independent, never of the answers inside a trial, which are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..results import metrics
from ..results.intervals import of_trials
from ..results.store.records import Value

Place = tuple[str, str, str, int]
"""(cell, probe, metric, length)."""
DIGITS, TRIALS = ("needle", "digit_accuracy"), ("needle", "exact_accuracy")


def with_intervals(values: Mapping[Place, Value]) -> dict[Place, Value]:
    """The values, every share of right answers that has a count with the 95% interval of its trials as `low` and `high`.

    A recorded interval stays where each answer is a trial of its own. Elsewhere it is worked out anew, since older rows
    have Wilson's over all answers; of the needle's digits there are as many trials as its exact accuracy counts.
    """
    return {place: _with_interval(value, values) for place, value in values.items()}


def trials_of(value: Value, values: Mapping[Place, Value]) -> int | None:
    """How many independent trials are behind an accuracy; None for what is none, and where no count was recorded."""
    if value.value is None or not value.n or value.unit not in (metrics.SHARE, ""):
        return None
    answers = metrics.metric(value.probe, value.metric, value.description, value.unit).trials
    if not answers or not 0 <= value.value <= 1:
        return None
    if (value.probe, value.metric) == DIGITS:
        exact = values.get((value.cell_id, *TRIALS, value.length))
        if exact is not None and exact.n and exact.attempt_id == value.attempt_id:
            return exact.n
    return max(1, round(value.n / answers))


def _with_interval(value: Value, values: Mapping[Place, Value]) -> Value:
    trials = trials_of(value, values)
    if trials is None or value.value is None:
        return value
    # each answer was a trial of its own
    if trials == value.n and value.low is not None and value.high is not None:
        return value
    low, high = of_trials(value.value, trials)
    return replace(value, low=low, high=high)
