"""Confidence intervals of accuracies over their independent trials, and the needle probe's constant-answer baseline.

An interval is over trials, never over the answers inside a trial (such as the digits of a needle), which are dependent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ....results import metrics, paper
from ....results.intervals import wilson_of_trials
from ....results.store.records import MeasuredValue
from ...number_format import NEEDLE

ValueKey = tuple[str, str, str, int]
"""(cell id, probe, metric, context length in tokens)."""
DIGIT_ACCURACY, EXACT_ACCURACY = NEEDLE, ("needle", "exact_accuracy")
CONSTANT_ACCURACY = ("needle", "constant_accuracy")


def with_intervals(values: Mapping[ValueKey, MeasuredValue]) -> dict[ValueKey, MeasuredValue]:
    """Return the values with the 95% interval of its trials as `low` and `high` of every accuracy that has a count.

    A recorded interval is kept where each answer is a trial. Otherwise it is Wilson's over the independent trials,
    since older rows hold Wilson intervals over all answers. The needle's digit accuracy has as many trials as its exact
    accuracy. Values that are no accuracy, or have no count, are unchanged.

    Args:
        values: Measured values of the whole sweep, by (cell id, probe, metric, context length).
    """
    return {key: _with_interval(value, values) for key, value in values.items()}


def independent_trials(value: MeasuredValue, values: Mapping[ValueKey, MeasuredValue]) -> int | None:
    """Return the number of independent trials behind an accuracy, such as needles rather than their digits.

    It is the number of answers over the metric's answers per trial, rounded and at least 1. For the needle's digit
    accuracy it is the count of the exact accuracy of the same attempt, where recorded.

    Args:
        value: The accuracy.
        values: All values of the sweep, among which the needle's exact accuracy is looked up.

    Returns:
        None if the value is not an accuracy in [0, 1], or no count was recorded.
    """
    if value.value is None or not value.n or value.unit not in (metrics.FRACTION, ""):
        return None
    answers_per_trial = metrics.metric(value.probe, value.metric, value.description, value.unit).trials
    if not answers_per_trial or not 0 <= value.value <= 1:
        return None
    if (value.probe, value.metric) == DIGIT_ACCURACY:
        exact = values.get((value.cell_id, *EXACT_ACCURACY, value.length))
        if exact is not None and exact.n and exact.attempt_id == value.attempt_id:
            return exact.n
    return max(1, round(value.n / answers_per_trial))


def _with_interval(value: MeasuredValue, values: Mapping[ValueKey, MeasuredValue]) -> MeasuredValue:
    """Return the value with the 95% interval of its trials (Wilson's) as `low` and `high`.

    It is unchanged if it is no accuracy, has no count, or has an interval in which each answer is a trial.
    """
    trials = independent_trials(value, values)
    if trials is None or value.value is None:
        return value
    # a recorded interval is right if each answer is a trial
    if trials == value.n and value.low is not None and value.high is not None:
        return value
    low, high = wilson_of_trials(value.value, trials)
    # dataclasses.replace is several times slower, and this runs for every accuracy
    return MeasuredValue(**(vars(value) | {"low": low, "high": high}))


def constant_answer_scores(values: Iterable[MeasuredValue], published: bool) -> dict[int, float]:
    """Return the needle score of the best constant answer by context length, as a fraction.

    Keys are the lengths at which a constant-answer score or a digit accuracy was measured and a score is known.
    Recorded scores come first, then the chance level in the description of older accuracies, then the paper's.

    Args:
        values: Measured values of one or several cells; of several scores at one length the largest counts.
        published: The values are those of the paper, so that its known score stands in where none was recorded.
    """
    measured: dict[int, list[float]] = {}
    described: dict[int, list[float]] = {}
    for value in values:
        description = value.description or {}
        if (value.probe, value.metric) == CONSTANT_ACCURACY and value.value is not None:
            measured.setdefault(value.length, []).append(value.value)
        elif (value.probe, value.metric) == DIGIT_ACCURACY and value.value is not None:
            # older rows hold it as the chance level in the description of the accuracy
            shares = [metrics.metric(*DIGIT_ACCURACY, description).chance or 0.0] if "chance" in description else []
            described.setdefault(value.length, []).extend(shares)
    fallback = [paper.MOST_FREQUENT / paper.DIGITS] if published else []
    scores = {length: measured.get(length) or described.get(length) or fallback for length in measured | described}
    return {length: max(shares) for length, shares in scores.items() if shares}
