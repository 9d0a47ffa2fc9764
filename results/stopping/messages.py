"""Texts about a stopping rule, its looks and its outcome."""

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
    """Return the contrast as text, such as "memory: on - off, needle.digit_accuracy@65536, attn_type polar"."""
    contrast = rule.contrast
    within = "".join(f", {axis} {level}" for axis, level in contrast.within.items())
    return f"{contrast.axis}: {contrast.level} - {contrast.reference}, {contrast.measure}{within}"


def goal_text(rule: StoppingRule, metric: Metric) -> str:
    """Return the goal of the rule as a verb phrase, such as "is at most 2.0 points wide or leaves out 0".

    Empty for a rule without a goal.
    """
    narrow = [] if rule.width is None else [f"is at most {width_text(rule.width, metric)} wide"]
    return " or ".join([*narrow, *(["excludes 0"] if rule.sure else [])])


def rule_text(rule: StoppingRule, metric: Metric, configurations: int) -> str:
    """Return a sentence (without a full stop) about the rule: contrast, goal, looks and spending function.

    Args:
        rule: stopping rule.
        metric: metric of the contrast.
        configurations: number of configurations that get seeds.
    """
    looks = rule.seeds_at_looks if len(rule.seeds_at_looks) < 8 else (*rule.seeds_at_looks[:3], "...", rule.max_seeds)
    return (
        f"stop: {contrast_text(rule)}: seeds are added to {counted(configurations, 'configuration')} until its "
        f"interval {goal_text(rule, metric)}; interim analyses after {', '.join(map(str, looks))} seeds, "
        f"significance levels by {SPENDING_LABELS[rule.spending]}"
    )


def look_text(rule: StoppingRule, look: InterimAnalysis, metric: Metric) -> str:
    """Return a sentence (without a full stop) about a look: estimate, interval, width, level, and what is left out.

    Left out are pairs or cells, and seeds, that lack values. A look without an interval (NaN) is described as such.

    Args:
        rule: stopping rule.
        look: look of the rule.
        metric: metric of the contrast; shares are printed in percentage points.
    """
    text = (
        f"interim analysis {look.number} of at most {len(rule.seeds_at_looks)}, after {look.seeds} of at most "
        f"{counted(rule.max_seeds, 'seed')}: {_number(look.mean, metric, look.width, sign=True)}"
    )
    if math.isnan(look.width):
        return f"{text} {unit_text(metric)}, the same at every seed, so there is no interval".replace("  ", " ")
    ends = f"[{_number(look.low, metric, look.width)}, {_number(look.high, metric, look.width)}]"
    text += (
        f" {ends}, {width_text(look.width, metric)} wide, at significance level {100 * look.level:.2g}% instead of 5%"
    )
    if look.left_out:
        text += (
            f"; {look.left_out} of {counted(look.left_out + look.configurations, 'pair')} or cells excluded for "
            "missing values"
        )
    lost = look.seeds - look.used
    return text + (f"; {counted(lost, 'seed')} excluded for missing values" if lost else "")


def outcome_text(status: StoppingStatus, metric: Metric) -> str:
    """Return a sentence about the outcome, without a full stop.

    It gives the reason why the rule stopped, or says that cells are still to be measured or further seeds to be
    started.
    """
    rule, last = status.rule, status.last_look
    if status.verdict == "narrow":
        assert last is not None
        assert rule.width is not None
        return (
            f"stopped after {counted(status.seeds_launched, 'seed')}: the interval is "
            f"{width_text(last.width, metric)} wide, and at most {width_text(rule.width, metric)} was requested"
        )
    if status.verdict == "sure":
        return f"stopped after {counted(status.seeds_launched, 'seed')}: the interval excludes 0"
    if status.verdict == "nothing":
        return f"stopped after {counted(status.seeds_launched, 'seed')}: none of these cells has this measurement"
    if status.verdict == "most":
        return (
            f"stopped after {counted(status.seeds_launched, 'seed')}, the maximum (max_seeds), although no interval "
            f"{goal_text(rule, metric)}"
        )
    if status.unfinished_cells:
        return f"not decided: {status.unfinished_cells} of {counted(status.cells, 'cell')} are still to be measured"
    return (
        f"not decided: no interval {goal_text(rule, metric)} yet, and further seeds were not started; launch again "
        "to continue"
    )


def status_sentences(status: StoppingStatus, metric: Metric) -> Iterator[str]:
    """Yield a sentence about the last look, if there is one, and a sentence about the outcome."""
    if status.last_look is not None:
        yield look_text(status.rule, status.last_look, metric)
    yield outcome_text(status, metric)


def width_text(value: float, metric: Metric) -> str:
    """Return a width with its unit, such as "9.1 points"."""
    return f"{_number(value, metric, value)} {unit_text(metric)}".strip()


def unit_text(metric: Metric) -> str:
    """Return the unit of differences in tables: percentage points for shares, empty for pure numbers.

    Of a unit with a slash, such as nats/token, only the part before it.
    """
    return "points" if metric.percent else metric.unit.partition("/")[0] if metric.unit != "1" else ""


def _number(value: float, metric: Metric, width: float, *, sign: bool = False) -> str:
    """Return a number as tables print it.

    Shares are printed in percent with one decimal or more, other numbers with three or more. A narrow interval gets
    more decimals, so that two digits of its width show, at most 12. Never "-0.0".

    Args:
        value: number in the metric's unit.
        metric: metric; shares are printed in percent, without a percent sign.
        width: width of the interval; 0 or NaN for the minimum of decimals.
        sign: write a plus sign before numbers that are not negative.
    """
    scale, min_decimals = (100, 1) if metric.percent else (1, 3)
    decimals = 1 - math.floor(math.log10(scale * width)) if width > 0 else min_decimals
    text = f"{scale * value:.{min(max(min_decimals, decimals), 12)}f}"
    text = text.lstrip("-") if not text.strip("-0.") else text  # no -0.0
    return f"+{text}" if sign and not text.startswith("-") else text
