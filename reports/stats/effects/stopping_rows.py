"""Row of the contrast under a sequential stopping rule, with the interval of the last interim analysis."""

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


def apply_last_look(data: SweepData, effects: Sequence[Effect]) -> list[Effect]:
    """Return the rows with that of the stopping rule's contrast replaced by its last interim analysis.

    Rows are returned unchanged without a stopping rule, or if no declared contrast is the rule's. Otherwise
    `p_corrected` of all rows is computed again, by Holm. Before the first interim analysis, or without an interval in
    it, the rule's row has NaN for low, high and p and the method `none`. Its equivalence p is multiplied by the number
    of contrasts with a margin (Bonferroni).

    Args:
        data: The sweep.
        effects: Rows of the declared contrasts, in the grid's order.
    """
    rows, index = list(effects), _contrast_index(data)
    status = _stopping_status(data)
    if status is None or index is None:
        return rows
    rule_row = replace(rows[index], low=math.nan, high=math.nan, p=math.nan, method=NO_TEST)
    if status.last_look is not None and not math.isnan(status.last_look.width):
        last = status.last_look
        rule_row = replace(
            rule_row, mean=last.mean, low=last.low, high=last.high, p=status.p(), method=LOOKS, seeds=last.used
        )
    if rule_row.margin is not None:
        margins = sum(effect.margin is not None for effect in rows)
        worth = status.p_equivalence(rule_row.margin)
        rule_row = replace(rule_row, p_equivalence=worth if math.isnan(worth) else min(1.0, margins * worth))
    rows[index] = rule_row
    return [replace(row, p_corrected=p) for row, p in zip(rows, holm([row.p for row in rows]), strict=True)]


def stopping_notes(data: SweepData) -> list[str]:
    """Return two footnotes about the stopping rule; an empty list without one.

    The first gives the rule's contrast and goal, the way that its error is spent over interim analyses, and its present
    status. The second explains the columns of its row.
    """
    status = _stopping_status(data)
    if status is None:
        return []
    contrast = status.rule.contrast
    metric = data.metric(contrast.probe, contrast.metric)
    last, *rest = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in messages.status_sentences(status, metric)]
    return [
        f"Seeds were added for {messages.contrast_text(status.rule)} until its interval {messages.goal_text(status.rule, metric)} "
        f"({messages.SPENDING_LABELS[status.rule.spending]}). {' '.join([last, *rest])}",
        "Low, High, p and p corr of that row come from the last interim analysis: they allow for all interim analyses, and "
        "generalise to further seeds of these configurations only. Those of the other rows assume a number of seeds fixed in advance.",
    ]


def _contrast_index(data: SweepData) -> int | None:
    """Return the index of the declared contrast of the stopping rule; None without a rule or such a contrast."""
    if data.stop is None:
        return None
    for index, contrast in enumerate(data.contrasts):
        reference = contrast.reference or reference_level(data.levels(contrast.axis) or [""])
        if data.stop.applies_to(contrast, reference):
            return index
    return None


def _stopping_status(data: SweepData) -> StoppingStatus | None:
    """Return the state of the sweep's stopping rule; None without one."""
    if data.stop is None:
        return None
    return evaluate_rule(data.stop, seed_results(data.stop, data.cells, data.requested, data.values), data.design)
