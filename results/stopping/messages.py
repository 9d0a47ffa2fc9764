"""A rule, its looks and how it ended, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..console.text import counted
from ..metrics import Metric
from .stopping_rule import StoppingRule

if TYPE_CHECKING:
    from .interim_analysis import InterimAnalysis, StoppingStatus

SPENDING_LABELS = {"obrien-fleming": "O'Brien-Fleming", "pocock": "Pocock"}


def contrast_text(rule: StoppingRule) -> str:
    """memory: on - off, needle.digit_accuracy@65536, attn_type polar."""
    one = rule.contrast
    within = "".join(f", {axis} {word}" for axis, word in one.within.items())
    return f"{one.axis}: {one.level} - {one.reference}, {one.measure}{within}"


def goal_text(rule: StoppingRule, metric: Metric) -> str:
    """What is enough."""
    narrow = [] if rule.width is None else [f"is at most {width_text(rule.width, metric)} wide"]
    return " or ".join([*narrow, *(["leaves out 0"] if rule.sure else [])])


def plan(rule: StoppingRule, metric: Metric, configurations: int) -> str:
    """What the rule does."""
    looks = rule.looks if len(rule.looks) < 8 else (*rule.looks[:3], "...", rule.most)
    return (
        f"stop: {contrast_text(rule)}: seeds are added to {counted(configurations, 'configuration')} until its interval {goal_text(rule, metric)}; looks after "
        f"{', '.join(map(str, looks))} seeds, levels by {SPENDING_LABELS[rule.spending]}"
    )


def look_text(rule: StoppingRule, look: InterimAnalysis, metric: Metric) -> str:
    """What a look saw."""
    told = (
        f"look {look.number} of at most {len(rule.looks)}, after {look.seeds} of at most {counted(rule.most, 'seed')}: "
        f"{_number(look.mean, metric, look.width, sign=True)}"
    )
    if math.isnan(look.width):
        return f"{told} {unit(metric)}, the same at every seed, so that there is no interval".replace("  ", " ")
    ends = f"[{_number(look.low, metric, look.width)}, {_number(look.high, metric, look.width)}]"
    told += f" {ends}, {width_text(look.width, metric)} wide, at level {100 * look.level:.2g}% in place of 5%"
    if look.left_out:
        told += f"; {look.left_out} of {counted(look.left_out + look.configurations, 'pair')} or cells left out for want of numbers"
    lost = look.seeds - look.used
    return told + (f"; {counted(lost, 'seed')} left out for want of numbers" if lost else "")


def outcome_text(looked: StoppingStatus, metric: Metric) -> str:
    """Why no seed is added, or that some are to be."""
    rule, last = looked.rule, looked.last
    if looked.verdict == "narrow":
        assert last is not None
        assert rule.width is not None
        return f"stopped after {counted(looked.asked, 'seed')}: {width_text(last.width, metric)} wide, {width_text(rule.width, metric)} were asked for"
    if looked.verdict == "sure":
        return f"stopped after {counted(looked.asked, 'seed')}: the interval leaves out 0"
    if looked.verdict == "nothing":
        return f"stopped after {counted(looked.asked, 'seed')}: none of these cells has this number"
    if looked.verdict == "most":
        return f"stopped after {counted(looked.asked, 'seed')}, as many as max_seeds allows, though no interval {goal_text(rule, metric)}"
    if looked.waiting:
        return f"not decided: {looked.waiting} of {counted(looked.cells, 'cell')} are still to be measured"
    return f"not decided: no interval {goal_text(rule, metric)} yet, and further seeds were not started; launch again to go on"


def status_sentences(looked: StoppingStatus, metric: Metric) -> Iterator[str]:
    """The last look and the ending, a sentence each."""
    if looked.last is not None:
        yield look_text(looked.rule, looked.last, metric)
    yield outcome_text(looked, metric)


def width_text(value: float, metric: Metric) -> str:
    """A width with its unit: 9.1 points."""
    return f"{_number(value, metric, value)} {unit(metric)}".strip()


def unit(metric: Metric) -> str:
    """As tables print numbers of a metric: shares in points."""
    return "points" if metric.percent else metric.unit.partition("/")[0] if metric.unit != "1" else ""


def _number(value: float, metric: Metric, width: float, *, sign: bool = False) -> str:
    """A number as tables print it, with more decimals where an interval is so narrow that two digits of its width would not show."""
    scale, least = (100, 1) if metric.percent else (1, 3)
    fine = 1 - math.floor(math.log10(scale * width)) if width > 0 else least
    text = f"{scale * value:.{min(max(least, fine), 12)}f}"
    text = text.lstrip("-") if not text.strip("-0.") else text  # no -0.0
    return f"+{text}" if sign and not text.startswith("-") else text
