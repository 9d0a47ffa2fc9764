"""The trials behind an accuracy: its interval is theirs, never that of the answers inside a trial, which are not independent; and
what an answer scores there that is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ....results import metrics, paper
from ....results.intervals import of_trials
from ....results.store.records import MeasuredValue
from ...number_format import NEEDLE

Place = tuple[str, str, str, int]
"""(cell, probe, metric, length)."""
DIGITS, TRIALS = NEEDLE, ("needle", "exact_accuracy")
CONSTANT = ("needle", "constant_accuracy")


def with_intervals(values: Mapping[Place, MeasuredValue]) -> dict[Place, MeasuredValue]:
    """The values, every share of right answers that has a count with the 95% interval of its trials as `low` and `high`.

    A recorded interval stays where each answer is a trial of its own. Elsewhere it is worked out anew, since older rows
    have Wilson's over all answers; of the needle's digits there are as many trials as its exact accuracy counts.
    """
    return {place: _with_interval(value, values) for place, value in values.items()}


def independent_trials(value: MeasuredValue, values: Mapping[Place, MeasuredValue]) -> int | None:
    """How many independent trials are behind an accuracy; None for what is none, and where no count was recorded."""
    if value.value is None or not value.n or value.unit not in (metrics.FRACTION, ""):
        return None
    answers = metrics.metric(value.probe, value.metric, value.description, value.unit).trials
    if not answers or not 0 <= value.value <= 1:
        return None
    if (value.probe, value.metric) == DIGITS:
        exact = values.get((value.cell_id, *TRIALS, value.length))
        if exact is not None and exact.n and exact.attempt_id == value.attempt_id:
            return exact.n
    return max(1, round(value.n / answers))


def _with_interval(value: MeasuredValue, values: Mapping[Place, MeasuredValue]) -> MeasuredValue:
    trials = independent_trials(value, values)
    if trials is None or value.value is None:
        return value
    # each answer was a trial of its own
    if trials == value.n and value.low is not None and value.high is not None:
        return value
    low, high = of_trials(value.value, trials)
    return replace(value, low=low, high=high)


def ceilings(values: Iterable[MeasuredValue], published: bool) -> dict[int, float]:
    """By context length, what the best constant answer scores on the needle's trials, of the numbers of one cell or several;
    `published`: they are the paper's."""
    measured: dict[int, list[float]] = {}
    described: dict[int, list[float]] = {}
    for value in values:
        told = value.description or {}
        if (value.probe, value.metric) == CONSTANT and value.value is not None:
            measured.setdefault(value.length, []).append(value.value)
        elif (value.probe, value.metric) == DIGITS and value.value is not None:
            # before it was a number of its own, it stood beside the accuracy as what a trivial answer scores
            shares = [metrics.metric(*DIGITS, told).chance or 0.0] if "chance" in told else []
            described.setdefault(value.length, []).extend(shares)
    fallback = [paper.MOST_FREQUENT / paper.DIGITS] if published else []
    known = {length: measured.get(length) or described.get(length) or fallback for length in measured | described}
    return {length: max(shares) for length, shares in known.items() if shares}
