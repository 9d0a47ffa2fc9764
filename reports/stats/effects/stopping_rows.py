"""The contrast that seeds were added for until it was known closely enough: its row speaks of the last look, at that look's level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ....results.contrasts import reference_level
from ....results.stopping import messages
from ....results.stopping.interim_analysis import StoppingStatus, evaluate_rule, seed_results
from ...sweep_data import SweepData
from ..significance.paired_tests import LOOKS, holm
from .effect_types import NO_TEST, Effect


def apply_last_look(data: SweepData, found: Sequence[Effect]) -> list[Effect]:
    """The rows of the declared contrasts in their order, the one of the rule with the interval and p of its last look, and all
    corrected anew."""
    rows, place = list(found), _place(data)
    seen = _looked(data)
    if seen is None or place is None:
        return rows
    own = replace(rows[place], low=math.nan, high=math.nan, p=math.nan, method=NO_TEST)
    if seen.last is not None and not math.isnan(seen.last.width):
        last = seen.last
        own = replace(own, mean=last.mean, low=last.low, high=last.high, p=seen.p(), method=LOOKS, seeds=last.used)
    if own.margin is not None:
        margins = sum(one.margin is not None for one in rows)
        worth = seen.outside(own.margin)
        own = replace(own, p_equivalence=worth if math.isnan(worth) else min(1.0, margins * worth))
    rows[place] = own
    return [replace(row, p_corrected=p) for row, p in zip(rows, holm([row.p for row in rows]), strict=True)]


def notes(data: SweepData) -> list[str]:
    """How often it was looked at, at which level, and why no more seeds were added."""
    seen = _looked(data)
    if seen is None:
        return []
    one = seen.rule.contrast
    metric = data.metric(one.probe, one.metric)
    last, *rest = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in messages.status_sentences(seen, metric)]
    return [
        f"Seeds were added for {messages.contrast_text(seen.rule)} until its interval {messages.goal_text(seen.rule, metric)} "
        f"({messages.SPENDING_LABELS[seen.rule.spending]}). {' '.join([last, *rest])}",
        "Low, High, p and p corr of that row are of the last look: they allow for every look, and speak of further seeds of these very "
        "configurations. Those of the other rows take the number of seeds for one that was fixed before.",
    ]


def _place(data: SweepData) -> int | None:
    """Which of the declared contrasts it is."""
    if data.stop is None:
        return None
    for place, one in enumerate(data.contrasts):
        reference = one.reference or reference_level(data.levels(one.axis) or [""])
        if data.stop.about(one, reference):
            return place
    return None


def _looked(data: SweepData) -> StoppingStatus | None:
    if data.stop is None:
        return None
    return evaluate_rule(data.stop, seed_results(data.stop, data.cells, data.requested, data.values), data.design)
