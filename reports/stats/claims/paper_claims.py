"""Claims of the paper, each bound to the query that decides it, for the published sweeps and any other.

A query reads a sweep through `ClaimFacts`, which records the numbers it read, and returns a verdict with the numbers
behind it. Missing data raises MissingData, and the verdict is then CANNOT_SAY with what is missing. "64K" in a claim
stands for the longest context length of the sweep. Numbers named in claims are those of the published text. A plain
configuration has the baseline regularizer, no distractor and no window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
from scipy import special

from ....results import metrics, paper
from ....results.console.text import counted
from ....results.store.records import AXES, CellState
from ...number_format import CLEAN, NEEDLE, format_length, format_number, format_signed
from ...sweep_data import WEIGHTED_SUFFIX, SweepData
from ..effects.effect_types import AT_CHANCE_VERDICT
from ..effects.needle_baseline import constant_answer_score, is_at_chance
from ..significance.paired_tests import ALPHA, paired_difference_tests

TRUE, WEAKLY_TRUE, NOT_SHOWN, FALSE, DIFFERS = "true", "weak", "not shown", "false", "differs"
CANNOT_SAY, UNCHECKED = "not decidable", "not checked"
SPEED, SIZE = ("throughput", "mfu_paper"), ("throughput", "parameters")
WRITING = ("decode", "written_per_s")
CLAIMED_RATE = 19_270
"""Tokens per second claimed for polar attention with memory, for 512 texts on an NVIDIA L4."""
STEP, SECONDS = ("throughput", "step_seconds"), ("throughput", "train_seconds")
MAIN_MIXER, SOFTMAX, ROTARY = "polar", "nope", "rope"
CLAIMED_ACCURACY = 0.9
"""Needle accuracy claimed to hold up to the longest context length."""
AVERAGE, SPAN = "94", (91, 98)  # %, as printed
MAX_NAMED = 2  # largest number of counterexamples that are named
LAST_DIGIT = 0.01  # last digit of a printed loss
ROUNDING_TOLERANCE = 1e-9
PROTOTYPE_KEY_SIZE = 16
"""Key size of the prototype from which the claimed eigenvalue was taken."""
DECAY, WRITE = 0.98, 0.5
PUBLISHED_SETTINGS: Mapping[str, int] = {"n_heads": 8, "head_dim": 128}
"""Settings of the published networks that their logs do not contain."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MetricKey = tuple[str, str]


@dataclass(frozen=True)
class ClaimResult:
    """Verdict on a claim."""

    verdict: str
    """Verdict text, never a bool.

    One of "true" (TRUE), "weak" (WEAKLY_TRUE), "not shown" (NOT_SHOWN), "false" (FALSE), "differs" (DIFFERS), "cannot
    say" (CANNOT_SAY), "unchecked" (UNCHECKED), "not tested: all at chance level" (AT_CHANCE_VERDICT), or a text such as "true
    of K of N".
    """
    explanation: str
    """Explanation with the numbers behind the verdict."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers behind the verdict, by name; shares as fractions. Empty where the query gives none."""


class MissingData(Exception):
    """Data that a query needs is missing; the message names it."""


@dataclass
class ClaimFacts:
    """Access to a sweep for queries; `read` records the (cell id, attempt id) pairs of the numbers that were read."""

    data: SweepData
    read: dict[tuple[str, int | None], None] = field(default_factory=dict)

    @property
    def memory(self) -> str:
        """Level of the memory axis that claims are about: the first one that is not `off`."""
        return next((level for level in self.data.levels("memory") if level != "off"), "on")

    def lengths(self, metric: MetricKey) -> list[int]:
        """Return the shown context lengths of a metric in tokens, shortest first.

        Raises:
            MissingData: There is none.
        """
        shown_lengths = [length for length in self.data.lengths(*metric) if length]
        if not shown_lengths:
            raise MissingData(f"no measurement of {metric[0]}")
        return shown_lengths

    def cells(self, **levels: str) -> list[list[CellState]]:
        """Return the configurations at these levels of the fixed axes, each as the list of its runs (seeds).

        Args:
            levels: Level by axis of AXES; without any all configurations.

        Raises:
            MissingData: There is none.
        """
        groups = self.data.configurations().values()
        matching = [runs for runs in groups if all(runs[0].levels[axis] == level for axis, level in levels.items())]
        if not matching:
            raise MissingData(f"no cell {_levels_text(levels)}")
        return matching

    def plain_runs(self, mixer: str, memory: bool, **levels: str) -> list[CellState]:
        """Return the runs of the first plain configuration with that mixer.

        Plain means baseline regularizer (the first mode if the sweep has no baseline), no distractor, no window.

        Args:
            mixer: Level of the mixer axis.
            memory: With memory (True) or without.
            levels: Levels by axis that override those of a plain configuration.

        Raises:
            MissingData: There is none.
        """
        return self.plain_configurations(mixer, memory, **levels)[0]

    def plain_configurations(self, mixer: str, memory: bool = False, **levels: str) -> list[list[CellState]]:
        """Return the plain configurations with that mixer, one per combination of extra axes, each as its runs.

        Plain means baseline regularizer (the first mode if the sweep has no baseline), no distractor, no window.

        Args:
            mixer: Level of the mixer axis.
            memory: With memory (True) or without.
            levels: Levels by axis that override those of a plain configuration.

        Raises:
            MissingData: There is none.
        """
        modes = self.data.levels("reg_mode")
        mode = "baseline" if "baseline" in modes or not modes else modes[0]
        plain_levels = {
            "reg_mode": mode,
            "distractor": "off",
            "memory": self.memory if memory else "off",
            "window": "off",
        }
        return self.cells(attn_type=mixer, **{**plain_levels, **levels})

    def mean_or_none(
        self, runs: Sequence[CellState], metric: MetricKey, length: int = 0, table: str | None = None
    ) -> float | None:
        """Return the mean over runs, and record what was read in `read`; None if no run has the number.

        Runs without the number are skipped. Shares are fractions.

        Args:
            runs: Cells of a configuration.
            metric: (probe, metric).
            length: Context length in tokens; 0 for a number without one.
            table: Table of the paper whose printed number is preferred.
        """
        values = []
        for cell in runs:
            value = self.data.value(cell.cell_id, *metric, length, table)
            if value is not None and value.value is not None:
                values.append(value.value)
                self.read[cell.cell_id, value.attempt_id] = None
        return fmean(values) if values else None

    def value(self, runs: Sequence[CellState], metric: MetricKey, length: int = 0, table: str | None = None) -> float:
        """Return the mean over the runs that have the number, and record what was read in `read`.

        Args:
            runs: Cells of a configuration; those without the number are skipped.
            metric: (probe, metric).
            length: Context length in tokens; 0 for a number without one.
            table: Table of the paper whose printed number is preferred.

        Raises:
            MissingData: No run has the number.
        """
        mean = self.mean_or_none(runs, metric, length, table)
        if mean is None:
            length_text = f" at {format_length(length)}" if length else ""
            raise MissingData(
                f"{_slug(runs)} has no {metric[0]} {metric[1].removesuffix(WEIGHTED_SUFFIX)}{length_text}"
            )
        return mean

    def differences(self, axis: str, metric: MetricKey, length: int, **levels: str) -> list[float]:
        """Return the difference "on minus off" of an axis for every matched pair of configurations.

        A pair agrees on every other axis; seeds are averaged first. For memory, "on" is the first level that is not
        `off`.

        Args:
            axis: One of the fixed axes.
            metric: (probe, metric).
            length: Context length in tokens.
            levels: Required levels of other fixed axes.

        Returns:
            One difference per pair in the order of the configurations; shares as fractions. Configurations without the
            number are left out.

        Raises:
            MissingData: There is no pair.
        """
        sides: dict[bool, dict[tuple[str, ...], float]] = {False: {}, True: {}}
        axis_index = AXES.index(axis)
        for key, runs in self.data.configurations().items():
            cell_levels, level = runs[0].levels, runs[0].levels[axis]
            is_compared = level in ("off", self.memory if axis == "memory" else "on")
            if not is_compared or any(cell_levels[name] != required_level for name, required_level in levels.items()):
                continue
            value = self.mean_or_none(runs, metric, length)
            if value is not None:
                sides[level != "off"][key[:axis_index] + key[axis_index + 1 :]] = value
        paired_differences = [value - sides[False][key] for key, value in sides[True].items() if key in sides[False]]
        if not paired_differences:
            raise MissingData(f"no matched pairs of {axis} off and on at {_levels_text(levels)}")
        return paired_differences

    def at_chance(self, sides: Iterable[Sequence[Sequence[CellState]]], length: int) -> bool:
        """Return True if all compared configurations, and the means of their sides, are at chance level at this length.

        The level is the best constant answer of the needle; `is_at_chance` has the tests. The numbers are recorded as
        read. False without a recorded level.

        Args:
            sides: Compared groups of configurations, each configuration as its runs.
            length: Context length in tokens.
        """
        sides = [list(side) for side in sides]
        for runs in (runs for side in sides for runs in side):
            self.mean_or_none(runs, NEEDLE, length)  # records the numbers as read
        return is_at_chance(self.data, [[cell.cell_id for runs in side for cell in runs] for side in sides], [length])

    def sides(self, axis: str, **levels: str) -> list[list[list[CellState]]]:
        """Return [configurations with the axis off, configurations with it on], each configuration as its runs.

        Args:
            axis: One of the fixed axes; for memory, "on" is the first level that is not `off`.
            levels: Required levels of other fixed axes.

        Raises:
            MissingData: One side is empty.
        """
        on = self.memory if axis == "memory" else "on"
        return [self.cells(**levels, **{axis: level}) for level in ("off", on)]

    def setting(self, path: str) -> list[str]:
        """Return the distinct values of a setting (dotted path) as text, in the order of the cells.

        For the published sweeps two settings that their logs lack are known: model.n_heads (8), model.head_dim (128).
        Values are as Python's str() gives them (True, [1, 2]); a setting that is None does not count.

        Raises:
            MissingData: No cell has it.
        """
        recorded = (self.data.setting(cell, path) for cell in self.data.cells)
        texts = dict.fromkeys(str(value) for value in recorded if value is not None)
        part, _, name = path.partition(".")
        if not texts and part == "model" and self.data.sweep in paper.SWEEPS and name in PUBLISHED_SETTINGS:
            return [str(PUBLISHED_SETTINGS[name])]
        if not texts:
            raise MissingData(f"no cell has the setting {path}")
        return list(texts)

    def gpus(self, cell: CellState) -> float:
        """Return the GPUs of a cell, possibly a fraction of one; 0 if not recorded."""
        return float(self.data.setting(cell, "resources.gpus") or 0)


Query = Callable[[ClaimFacts], ClaimResult]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: its name, its sentence, and the query that decides it."""

    name: str
    sentence: str
    query: Query

    def decide(self, facts: ClaimFacts) -> ClaimResult:
        """Return the result of the query; "cannot say" with the missing data if it raises MissingData."""
        try:
            return self.query(facts)
        except MissingData as lacking:
            return ClaimResult(CANNOT_SAY, f"{lacking}")


# --- words ------------------------------------------------------------------------------------------------------------


def _levels_text(levels: Mapping[str, str]) -> str:
    """Return levels as text: "polar + memory, window off"; any level of memory but `off` reads "memory".

    Other axes follow by name. Empty without levels.
    """
    rest = {axis: level for axis, level in levels.items() if axis not in ("attn_type", "memory")}
    first = levels.get("attn_type", "")
    memory = {"off": "", None: ""}.get(levels.get("memory"), "memory")
    head = " + ".join(text_part for text_part in (first, memory) if text_part)
    return ", ".join(
        text_part for text_part in (head, *(f"{axis} {level}" for axis, level in rest.items())) if text_part
    )


def _slug(runs: Sequence[CellState]) -> str:
    return runs[0].slug.removesuffix(f"-s{runs[0].seed}")


def _percent_text(share: float, decimals: int = 1) -> str:
    return format_number(round(share, 12), decimals, percent=True)


def _percent_range_text(values: Sequence[float], decimals: int = 2) -> str:
    return f"{_percent_text(min(values), decimals)} to {_percent_text(max(values), decimals)}"


def _verdict_of_counts(count: int, total: int) -> str:
    """Return the verdict text "true" if all count, "true of COUNT of TOTAL" if some do, or "false" for none."""
    return TRUE if count == total else f"true of {count} of {total}" if count else FALSE


def _judge_difference(differences: Sequence[float], direction: int) -> tuple[str, dict[str, float], str]:
    """Test if a mean difference lies on the claimed side of zero.

    "true" if the mean is on that side and both the sign-flip test and Student's t are significant (two-sided, 5%),
    "weak" if only one is. "false" if both are significant on the other side, else "not shown". With fewer than 6 pairs
    the first test is Student's t, too. Differences that are all equal have no variance, so that Student's t is not
    significant: fewer than 6 pairs then give "not shown", more at best "weak".

    Args:
        differences: Paired differences, as fractions.
        direction: Claimed sign, 1 or -1.

    Returns:
        (verdict, numbers by name, text in percentage points). Numbers are pairs, mean, error (standard error), up,
        down, low, high, p, t_low and t_high, without those that are NaN.

    Raises:
        MissingData: Only one pair.
    """
    d = np.array(differences)
    if len(d) < 2:
        raise MissingData(f"only one pair ({format_signed(round(float(d[0]), 12), 1, percent=True)} points)")
    (test,) = paired_difference_tests([d])
    error = float(d.std(ddof=1)) / math.sqrt(len(d))
    half_width = float(special.stdtrit(len(d) - 1, 1 - ALPHA / 2)) * error
    low, high = test.mean - half_width, test.mean + half_width
    tests = (test.p < ALPHA, bool(error > 0 and (low > 0 or high < 0)))
    if test.mean * direction > 0:
        verdict = TRUE if all(tests) else WEAKLY_TRUE if any(tests) else NOT_SHOWN
    else:
        verdict = FALSE if all(tests) else NOT_SHOWN
    numbers = {
        "pairs": float(len(d)), "mean": test.mean, "error": error, "up": float(test.up), "down": float(test.down),
        "low": test.low, "high": test.high, "p": test.p, "t_low": low, "t_high": high,
    }  # fmt: skip
    numbers = {name: value for name, value in numbers.items() if not math.isnan(value)}
    if "p" not in numbers:
        # without variance there is no p value
        return verdict, numbers, f"{_signed_percent_text(test.mean)} points in each of {counted(len(d), 'pair')}"
    text = (
        f"{_signed_percent_text(test.mean)} ± {_percent_text(error)} points over {counted(len(d), 'pair')} ({test.up} up, {test.down} down), "
        f"95% interval [{_percent_text(test.low)}, {_percent_text(test.high)}], by Student's t [{_percent_text(low)}, {_percent_text(high)}]"
    )
    return verdict, numbers, text


def _signed_percent_text(share: float) -> str:
    return format_signed(round(share, 12), 1, percent=True)


# --- retrieval --------------------------------------------------------------------------------------------------------


def check_memory_helps(facts: ClaimFacts) -> ClaimResult:
    """Decide if memory raises the needle accuracy of polar attention at the longest length.

    Compared are matched pairs with and without memory. The verdict is "true" if the mean difference is above zero and
    both the sign-flip test and Student's t are significant (two-sided, 5%), "weak" if only one is, "false" if it is not
    above zero and both are significant, else "not shown"; but "not tested: all at chance level" if both sides are at chance.
    Numbers: pairs, mean, error (standard error), up, down, low, high, p, t_low and t_high, as fractions.

    Raises:
        MissingData: Fewer than two matched pairs, or no needle accuracy.
    """
    length = facts.lengths(NEEDLE)[-1]
    verdict, numbers, text = _judge_difference(facts.differences("memory", NEEDLE, length, attn_type=MAIN_MIXER), 1)
    if facts.at_chance(facts.sides("memory", attn_type=MAIN_MIXER), length):
        verdict = AT_CHANCE_VERDICT
    return ClaimResult(verdict, f"{format_length(length)}: {text}", numbers)


def check_holds_ninety(facts: ClaimFacts) -> ClaimResult:
    """Decide if cells of polar attention with memory keep 90% needle accuracy at the longest length, and count them.

    "true" if all configurations (seeds averaged) do, "false" if none does, else "true of K of N". Configurations
    without the accuracy are ignored. Numbers: cells (N configurations), held (K), mean (of all N) and, with several
    configurations without window, no_window (their mean) and no_window_sd (their sample standard deviation).

    Raises:
        MissingData: No such configuration has the accuracy.
    """
    length = facts.lengths(NEEDLE)[-1]
    groups = facts.cells(attn_type=MAIN_MIXER, memory=facts.memory)
    runs_and_means = [(runs, facts.mean_or_none(runs, NEEDLE, length)) for runs in groups]
    values = [value for _, value in runs_and_means if value is not None]
    if not values:
        raise MissingData(f"no needle accuracy at {format_length(length)} of {MAIN_MIXER} + memory")
    without_window = [
        value for runs, value in runs_and_means if value is not None and runs[0].levels["window"] == "off"
    ]
    count = sum(value >= CLAIMED_ACCURACY - ROUNDING_TOLERANCE for value in values)
    text = f"{count} of {counted(len(values), 'configuration')} reach {_percent_text(CLAIMED_ACCURACY, 0)}% at {format_length(length)}; mean {_percent_text(fmean(values))}"
    numbers = {"cells": float(len(values)), "held": float(count), "mean": fmean(values)}
    if len(without_window) > 1:
        numbers |= {"no_window": fmean(without_window), "no_window_sd": stdev(without_window)}
        text += f", without window {_percent_text(fmean(without_window))} (sd {_percent_text(stdev(without_window))}, {counted(len(without_window), 'configuration')})"
    return ClaimResult(_verdict_of_counts(count, len(values)), text, numbers)


def check_average(facts: ClaimFacts) -> ClaimResult:
    """Compare the average needle accuracy of plain polar attention with memory, and its range, to the printed ones.

    The plain cell has the baseline regularizer, no distractor and no window. The average is weighted by length.
    "differs" if it does not print as 94 % or a length, in whole percent, lies outside 91 to 98 %. Else "true" if all
    configurations of polar attention with memory reach the average of the plain cell, or "true of K of N"; the plain
    cell counts among them. Numbers: average, lowest and highest (of the plain cell over lengths), as fractions; cells
    (N), reach (K).

    Raises:
        MissingData: The plain cell or one of its numbers is missing.
    """
    runs, lengths = facts.plain_runs(MAIN_MIXER, True), facts.lengths(NEEDLE)
    mean = facts.value(runs, (NEEDLE[0], NEEDLE[1] + WEIGHTED_SUFFIX))
    values = [facts.value(runs, NEEDLE, length) for length in lengths]
    percents = [round(100 * value) for value in values]
    matches_print = (
        format_number(mean, 0, percent=True) == AVERAGE and SPAN[0] <= min(percents) and max(percents) <= SPAN[1]
    )
    configuration_means = [
        facts.mean_or_none(runs_of_cell, (NEEDLE[0], NEEDLE[1] + WEIGHTED_SUFFIX))
        for runs_of_cell in facts.cells(attn_type=MAIN_MIXER, memory=facts.memory)
    ]
    best = sum(value is not None and value >= mean - ROUNDING_TOLERANCE for value in configuration_means)
    num_measured = sum(value is not None for value in configuration_means)
    text = f"{_slug(runs)}: average {_percent_text(mean, 2)}, {_percent_range_text(values)} from {format_length(lengths[0])} to {format_length(lengths[-1])}"
    text += f"; {best} of {counted(num_measured, 'cell')} of {MAIN_MIXER} + memory reach that average"
    numbers = {
        "average": mean,
        "lowest": min(values),
        "highest": max(values),
        "cells": float(num_measured),
        "reach": float(best),
    }
    verdict = DIFFERS if not matches_print else TRUE if best == num_measured else f"true of {best} of {num_measured}"
    return ClaimResult(verdict, text, numbers)


def check_axis_hurts(axis: str) -> Callable[[ClaimFacts], ClaimResult]:
    """Return a query that decides if this axis reduces the needle accuracy of polar attention with memory.

    The query compares "on minus off" at the longest length over matched pairs. Its verdict is "true" if the mean is
    below zero and both the sign-flip test and Student's t are significant (two-sided, 5%), "weak" if only one is,
    "false" if it is not below zero and both are significant, else "not shown"; but "not tested: all at chance level" if both
    sides are at chance. Numbers: pairs, mean, error (standard error), up, down, low, high, p, t_low and t_high, as
    fractions. For "distractor", with two or more pairs without window, the numbers no_window and no_window_error are
    their mean difference and its standard error; without any such pair the query raises MissingData.

    Args:
        axis: Fixed axis with the levels off and on: "distractor" or "window".
    """

    def query(facts: ClaimFacts) -> ClaimResult:
        """Test the paired differences at the longest length; at chance level the verdict is "not tested: all at chance level".

        Raises:
            MissingData: Fewer than two matched pairs, or no needle accuracy.
        """
        length = facts.lengths(NEEDLE)[-1]
        levels = {"attn_type": MAIN_MIXER, "memory": facts.memory}
        verdict, numbers, text = _judge_difference(facts.differences(axis, NEEDLE, length, **levels), -1)
        if facts.at_chance(facts.sides(axis, **levels), length):
            verdict = AT_CHANCE_VERDICT
        if axis == "window":
            return ClaimResult(verdict, f"{format_length(length)}: {text}", numbers)
        without_window = facts.differences(axis, NEEDLE, length, **levels, window="off")
        if len(without_window) > 1:
            error = stdev(without_window) / math.sqrt(len(without_window))
            numbers |= {"no_window": fmean(without_window), "no_window_error": error}
            text += f"; without window {' '.join(map(_signed_percent_text, without_window))}, mean {_signed_percent_text(fmean(without_window))} ± {_percent_text(error)}"
        return ClaimResult(verdict, f"{format_length(length)}: {text}", numbers)

    return query


def check_simplest(facts: ClaimFacts) -> ClaimResult:
    """Decide if configurations without distractor and window have the best needle accuracy per regularizer.

    At the longest length, each configuration of polar attention with memory and a distractor or window is compared to
    the one without either, of the same regularizer and extra axes. "false" if any of them is better by more than 1e-9,
    else "true", without a test; "not tested: all at chance level" if all are at chance. Numbers: better (how many are), cells
    (number of compared configurations).

    Raises:
        MissingData: There is no such pair.
    """
    length = facts.lengths(NEEDLE)[-1]
    by_regularizer: dict[tuple[str, ...], dict[tuple[str, str], tuple[float, str]]] = {}
    for key, runs in _with_memory(facts):
        value = facts.mean_or_none(runs, NEEDLE, length)
        if value is not None:
            levels = runs[0].levels
            combination = (levels["distractor"], levels["window"])
            name = f"{levels['reg_mode']}/{combination[0]}/{combination[1]}"
            by_regularizer.setdefault((levels["reg_mode"], *key[len(AXES) :]), {})[combination] = (value, name)
    measured_and_plain = [
        (candidate, combinations["off", "off"])
        for combinations in by_regularizer.values()
        if ("off", "off") in combinations
        for candidate in combinations.values()
    ]
    candidates = [(candidate, plain) for candidate, plain in measured_and_plain if candidate is not plain]
    if not candidates:
        raise MissingData(
            f"no cell of {MAIN_MIXER} + memory with distractor loss or window has an otherwise equal one without either"
        )
    better = sorted(
        (pair for pair in candidates if pair[0][0] > pair[1][0] + ROUNDING_TOLERANCE),
        key=lambda pair: pair[1][0] - pair[0][0],
    )
    text = f"{format_length(length)}: {len(better)} of {counted(len(candidates), 'cell')} with distractor or window beat the one without"
    examples = [f"{a[1]} {_percent_text(a[0])} > {b[1]} {_percent_text(b[0])}" for a, b in better[:MAX_NAMED]]
    numbers = {"better": float(len(better)), "cells": float(len(candidates))}
    sides: dict[tuple[str, str], list[list[CellState]]] = {}
    for _, runs in _with_memory(facts):
        sides.setdefault((runs[0].levels["distractor"], runs[0].levels["window"]), []).append(runs)
    verdict = AT_CHANCE_VERDICT if facts.at_chance(sides.values(), length) else FALSE if better else TRUE
    return ClaimResult(verdict, "; ".join([text, *examples]), numbers)


def _with_memory(facts: ClaimFacts) -> Iterable[tuple[tuple[str, ...], list[CellState]]]:
    """Yield (levels of all axes, runs) of each configuration of polar attention with memory, in the sweep's order.

    Raises:
        MissingData: There is none.
    """
    facts.cells(attn_type=MAIN_MIXER, memory=facts.memory)  # raises MissingData
    for key, runs in facts.data.configurations().items():
        if (runs[0].levels["attn_type"], runs[0].levels["memory"]) == (MAIN_MIXER, facts.memory):
            yield key, runs


def check_collapse(facts: ClaimFacts) -> ClaimResult:
    """Decide if softmax attention with memory retrieves at the shortest length but not at the longest.

    "true" if the plain cell (baseline regularizer, no distractor, no window) is at chance at the longest length,
    "false" if it is not, "not tested: all at chance level" if it is at chance at both. Without a recorded score of the best
    constant answer it is compared to a guess instead. Numbers: value, ceiling (the level), as fractions.

    Raises:
        MissingData: Only one length, or the number is missing.
    """
    first, length = _shortest_and_longest(facts)
    runs = facts.plain_runs(SOFTMAX, True)
    value, level = facts.value(runs, NEEDLE, length), constant_answer_score(facts.data, length)
    measured = facts.data.value(runs[0].cell_id, *NEEDLE, length)
    hits = f", {round(value * measured.n)} of {measured.n} digits" if len(runs) == 1 and measured and measured.n else ""
    if level is None:
        level = metrics.metric(*NEEDLE).chance or 0.0
        yardstick = (
            f"compared with the chance level {_percent_text(level)}, since no constant-digit baseline is recorded"
        )
        nothing = value <= level + ROUNDING_TOLERANCE
    else:
        yardstick = f"constant-digit baseline {_percent_text(level)}"
        nothing = facts.at_chance([[runs]], length)
    numbers = {"value": value, "ceiling": level}
    text = f"{_slug(runs)} at {format_length(length)}: {_percent_text(value, 2)}{hits}; {yardstick}"
    if nothing and facts.at_chance([[runs]], first):
        return ClaimResult(AT_CHANCE_VERDICT, f"{text}; no retrieval at {format_length(first)} either", numbers)
    return ClaimResult(TRUE if nothing else FALSE, text, numbers)


def _shortest_and_longest(facts: ClaimFacts) -> tuple[int, int]:
    """Return the shortest and the longest context length of the needle, in tokens.

    Raises:
        MissingData: There is none or only one.
    """
    lengths = facts.lengths(NEEDLE)
    if len(lengths) < 2:
        raise MissingData("only one context length")
    return lengths[0], lengths[-1]


def check_rotary(facts: ClaimFacts) -> ClaimResult:
    """Decide if RoPE with memory has a needle accuracy of 0 at the two longest lengths, and the printed loss (2.86).

    "true" if both hold for the plain cell (baseline regularizer, no distractor, no window). "differs" if the accuracy
    is 0 with another loss, or above 0 but at chance; else "false". Numbers: needle (the larger accuracy), loss (nats
    per token at the longest length).

    Raises:
        MissingData: Only one length, or a number is missing.
    """
    _shortest_and_longest(facts)  # raises MissingData
    runs, last = facts.plain_runs(ROTARY, True), facts.lengths(NEEDLE)[-2:]
    needle = [facts.value(runs, NEEDLE, length) for length in last]
    loss = facts.value(runs, CLEAN, facts.lengths(CLEAN)[-1])
    needle_text = ", ".join(
        f"{_percent_text(value)} at {format_length(length)}" for value, length in zip(needle, last, strict=True)
    )
    text = f"{_slug(runs)}: needle {needle_text}; loss {format_number(loss, 2)} at {format_length(facts.lengths(CLEAN)[-1])}"
    if not any(value > ROUNDING_TOLERANCE for value in needle):
        verdict = TRUE if format_number(loss, 2) == "2.86" else DIFFERS
    else:  # an accuracy at chance level is no retrieval
        verdict = DIFFERS if all(facts.at_chance([[runs]], length) for length in last) else FALSE
    return ClaimResult(verdict, text, {"needle": max(needle), "loss": loss})


# --- loss -------------------------------------------------------------------------------------------------------------


def check_monotone_loss(facts: ClaimFacts) -> ClaimResult:
    """Decide if the loss of polar attention with memory falls from every context length to the next.

    "true" if it does for all of its configurations, "false" if for none, else "true of K of N". Configurations without
    a loss at every length are ignored. Numbers: "NAME, falling" and "NAME, cells" for polar, softmax (nope) and rope
    with memory, and for "without memory", which do not count for the verdict.

    Raises:
        MissingData: Only one length, or no such configuration has all losses.
    """
    lengths = facts.lengths(CLEAN)
    if len(lengths) < 2:
        raise MissingData("only one context length")
    groups = [(MAIN_MIXER, True), (SOFTMAX, True), (ROTARY, True), (None, False)]
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for mixer, memory in groups:
        levels = {"memory": facts.memory if memory else "off"} | ({"attn_type": mixer} if mixer else {})
        name = f"{mixer} + memory" if mixer else "without memory"
        try:
            groups_of_mixer = facts.cells(**levels)
        except MissingData:
            continue
        rows = [[facts.mean_or_none(runs, CLEAN, length) for length in lengths] for runs in groups_of_mixer]
        rows = [row for row in rows if None not in row]
        count = sum(all(b < a for a, b in pairwise(row)) for row in rows)  # type: ignore[operator]
        if rows:
            parts.append(f"{name} {count} of {len(rows)}")
            numbers |= {f"{name}, falling": float(count), f"{name}, cells": float(len(rows))}
    if f"{MAIN_MIXER} + memory, cells" not in numbers:
        raise MissingData(f"no cell of {MAIN_MIXER} + memory has a loss at every length")
    verdict = _verdict_of_counts(
        int(numbers[f"{MAIN_MIXER} + memory, falling"]), int(numbers[f"{MAIN_MIXER} + memory, cells"])
    )
    return ClaimResult(
        verdict,
        f"loss falls at every step from {format_length(lengths[0])} to {format_length(lengths[-1])}: {', '.join(parts)}",
        numbers,
    )


def check_best_loss(facts: ClaimFacts) -> ClaimResult:
    """Decide if plain polar attention with memory has the lowest loss at the longest length.

    A plain cell has the baseline regularizer, no distractor and no window, any mixer, with or without memory. "false"
    if another plain cell has a lower loss, or there is none to compare; "true" if no configuration at all has; else
    "true among N plain cells only", where N counts ours too. Losses that differ by at most 1e-9 count as equal.
    Numbers: ours, plain (lowest of plain cells, ours included), lowest (of all configurations), losses in nats per
    token; lower (how many configurations are below ours by more than 1.5 units of the last printed digit), which has no
    effect on the verdict.

    Raises:
        MissingData: The cell or its loss is missing.
    """
    length = facts.lengths(CLEAN)[-1]
    plain_loss = facts.value(facts.plain_runs(MAIN_MIXER, True), CLEAN, length)
    plain = []
    for mixer in facts.data.levels("attn_type"):
        for memory in (False, True):
            try:
                plain.append(facts.mean_or_none(facts.plain_runs(mixer, memory), CLEAN, length))
            except MissingData:
                continue
    plain_losses = [value for value in plain if value is not None]
    all_losses = [
        (value, _slug(runs)) for runs in facts.cells() if (value := facts.mean_or_none(runs, CLEAN, length)) is not None
    ]
    lowest, name = min(all_losses)
    # lower by more than the last printed digit, however both were rounded
    lower = sum(value < plain_loss - 1.5 * LAST_DIGIT for value, _ in all_losses)
    inside = plain_loss <= min(plain_losses) + ROUNDING_TOLERANCE
    verdict = (
        FALSE
        if not inside or len(plain_losses) < 2
        else TRUE
        if plain_loss <= lowest + ROUNDING_TOLERANCE
        else f"true among {len(plain_losses)} plain cells only"
    )
    text = (
        f"{MAIN_MIXER} + memory {format_number(plain_loss, 2)} at {format_length(length)}, {'lowest' if inside else 'not the lowest'} of the "
        f"{len(plain_losses)} plain cells (no distractor, window or regularizer; with or without memory); "
        f"lowest of all is {format_number(lowest, 3)} ({name})"
    )
    if lower > 1:
        text += f", {lower - 1} more are below {format_number(round(plain_loss - 1.5 * LAST_DIGIT, 9), 3)}"
    return ClaimResult(
        verdict, text, {"ours": plain_loss, "plain": min(plain_losses), "lowest": lowest, "lower": float(lower)}
    )


def check_degrades(facts: ClaimFacts) -> ClaimResult:
    """Decide if the losses of softmax attention and RoPE without memory rise beyond the training length.

    Plain cells have the baseline regularizer, no distractor and no window. "true" if neither of the two has a lower
    loss at any longer length. "false up to Kx" if both have one at K times the training length, with the largest such
    K. Else "true of K of 2". Numbers: "MIXER, trained" and "MIXER, Kx", in nats per token.

    Raises:
        MissingData: No loss at the training length or beyond it.
    """
    (trained, *_) = [int(length) for length in facts.setting("train.seq_len")]
    lengths = facts.lengths(CLEAN)
    longer = [length for length in lengths if length > trained]
    if trained not in lengths or not longer:
        raise MissingData(f"no losses at the training length ({format_length(trained)}) and beyond it")
    parts: list[str] = []
    better_lengths: list[set[int]] = []
    numbers: dict[str, float] = {}
    for mixer in (SOFTMAX, ROTARY):
        runs = facts.plain_runs(mixer, False)
        first = facts.value(runs, CLEAN, trained)
        rest = {length: facts.value(runs, CLEAN, length) for length in longer}
        better = [length // trained for length, value in rest.items() if value < first]
        better_lengths.append(set(better))
        show = max(better, default=longer[0] // trained) * trained
        parts.append(f"{mixer} {format_number(first, 2)} -> {format_number(rest[show], 2)} at {show // trained}x")
        numbers |= {
            f"{mixer}, trained": first,
            **{f"{mixer}, {length // trained}x": value for length, value in rest.items()},
        }
    common = better_lengths[0] & better_lengths[1]
    if common:
        most = max(common)
        parts = [
            f"{mixer} {format_number(numbers[f'{mixer}, trained'], 2)} -> {format_number(numbers[f'{mixer}, {most}x'], 2)} at {format_length(most * trained)}"
            for mixer in (SOFTMAX, ROTARY)
        ]
        return ClaimResult(f"false up to {most}x", f"both improve: {', '.join(parts)}", numbers)
    return ClaimResult(
        TRUE
        if not any(better_lengths)
        else f"true of {sum(not lengths_of_mixer for lengths_of_mixer in better_lengths)} of 2",
        ", ".join(parts),
        numbers,
    )


# --- cost, size and recipe --------------------------------------------------------------------------------------------


def check_speed(facts: ClaimFacts) -> ClaimResult:
    """Compare the cost of memory and distractor in MFU, and in time per step, to the printed cost.

    Cells of polar attention with the baseline regularizer and no window are compared: without memory, with it, and with
    memory and distractor. "true" if the costs print as 4.5 points, 11.2% and 20.7%, else "differs". Numbers, as
    fractions: points (MFU), memory and both (relative drop of MFU) and, where times are known, memory_by_time and
    both_by_time.

    Raises:
        MissingData: A number is missing, or cells shared a GPU.
    """
    table = "4" if facts.data.sweep in paper.SWEEPS else None
    runs = [
        facts.plain_runs(MAIN_MIXER, False),
        facts.plain_runs(MAIN_MIXER, True),
        facts.plain_runs(MAIN_MIXER, True, distractor="on"),
    ]
    if any(0 < facts.gpus(cell) < 1 for cells in runs for cell in cells):
        raise MissingData("cells shared GPUs, so their speeds depend on their neighbours")
    no_memory, memory, both = (facts.value(cells, SPEED, table=table) for cells in runs)
    points, drops = no_memory - memory, [1 - memory / no_memory, 1 - both / no_memory]
    text = f"MFU {_percent_text(no_memory)} without memory, {_percent_text(memory)} with it, {_percent_text(both)} with distractor too: costs {_percent_text(points)} points, {_percent_text(drops[0])}%, {_percent_text(drops[1])}%"
    numbers = {"points": points, "memory": drops[0], "both": drops[1]}
    times = [facts.mean_or_none(cells, STEP, table=table) or facts.mean_or_none(cells, SECONDS) for cells in runs]
    if all(times):
        by_time = [1 - times[0] / time for time in times[1:]]  # type: ignore[operator]
        numbers |= {"memory_by_time": by_time[0], "both_by_time": by_time[1]}
        text += f"; by time per step {_percent_text(by_time[0])}% and {_percent_text(by_time[1])}%, since N in MFU includes the memory"
    same = (_percent_text(points), _percent_text(drops[0]), _percent_text(drops[1])) == ("4.5", "11.2", "20.7")
    return ClaimResult(TRUE if same else DIFFERS, text, numbers)


def check_budgets(facts: ClaimFacts) -> ClaimResult:
    """Decide if the printed training budgets equal six times parameters times tokens, as printed.

    Reads the paper's table of open-weight models; rows without plain numbers are skipped. "true", "false" or "true of K
    of N". Numbers: right, models.

    Raises:
        MissingData: The sweep is not the published one that prints the budgets.
    """
    if facts.data.sweep != paper.SWEEPS[1]:
        raise MissingData(f"only sweep {paper.SWEEPS[1]} has these budgets")
    num_right, total = 0, 0
    for row in paper.rows("budgets"):
        texts = (row["params"], row["train_tokens"])
        if not all(text[:-1].replace(".", "").isdigit() and text[-1] in UNITS for text in texts):
            continue
        size, tokens = (float(text[:-1]) * UNITS[text[-1]] for text in texts)
        total += 1
        num_right += f"{format_number(6 * size * tokens / 1e21, 1)} ZF" == row["train_flops"]
    return ClaimResult(
        _verdict_of_counts(num_right, total),
        f"{num_right} of {total} equal 6 N T to the printed digit",
        {"right": float(num_right), "models": float(total)},
    )


def check_non_embedding(facts: ClaimFacts) -> ClaimResult:
    """Decide if the printed 369.72M parameters exclude the embedding.

    "false" if all parameters of plain softmax attention without memory, embedding included, print as 369.72M; else
    "differs". Numbers: parameters (their number).

    Raises:
        MissingData: The cell or its number of parameters is missing.
    """
    size = facts.value(facts.plain_runs(SOFTMAX, False), SIZE)
    is_total = format_number(size / 1e6, 2) == "369.72"
    text = f"all parameters of {SOFTMAX} without memory, including the embedding: {format_number(size / 1e6, 2)}M"
    return ClaimResult(FALSE if is_total else DIFFERS, text, {"parameters": size})


def check_token_count(facts: ClaimFacts) -> ClaimResult:
    """Decide if exactly 10^9 tokens were trained.

    "true" if all cells have that number, else "false". Numbers: tokens (the smallest).

    Raises:
        MissingData: No cell has a number of tokens.
    """
    token_counts = sorted({cell.tokens_total for cell in facts.data.cells if cell.tokens_total})
    if not token_counts:
        raise MissingData("no cell has a number of tokens")
    text = ", ".join(f"{tokens:,}" for tokens in token_counts)
    try:
        (size, *_) = [int(text) for text in facts.setting("train.batch_tokens")]
        text += (
            f" = {token_counts[0] // size:,} steps of {size:,}"
            if len(token_counts) == 1 and not token_counts[0] % size
            else ""
        )
    except MissingData:
        pass
    return ClaimResult(TRUE if token_counts == [10**9] else FALSE, f"{text} tokens", {"tokens": float(token_counts[0])})


def check_schedule(facts: ClaimFacts) -> ClaimResult:
    """Decide if the learning-rate schedule of all cells is a cosine: "true" or "false", without numbers.

    Raises:
        MissingData: No cell has a schedule in its config.
    """
    schedules = facts.setting("train.schedule")
    return ClaimResult(TRUE if schedules == ["cosine"] else FALSE, f"schedule: {', '.join(schedules)}")


def check_eigenvalue(facts: ClaimFacts) -> ClaimResult:
    """Compare the eigenvalue of the memory's transition for RMS-normalised keys, 0.98 (1 - 0.5 d), to -7.

    "true" if it prints as -7 with d = the sweep's head size, "true of d = 16 only" if with the prototype's key size
    alone, else "false". Numbers: eigenvalue, prototype.

    Raises:
        MissingData: The head size is unknown.
    """
    (size, *_) = [int(text) for text in facts.setting("model.head_dim")]
    published, prototype = (DECAY * (1 - WRITE * keys) for keys in (size, PROTOTYPE_KEY_SIZE))
    text = f"{DECAY} (1 - {WRITE} d): {format_number(published, 1)} at d = {size}; {format_number(prototype, 1)} at d = {PROTOTYPE_KEY_SIZE}, as in a prototype"
    verdict = (
        TRUE
        if format_number(published, 0) == "-7"
        else f"true of d = {PROTOTYPE_KEY_SIZE} only"
        if format_number(prototype, 0) == "-7"
        else FALSE
    )
    return ClaimResult(verdict, text, {"eigenvalue": published, "prototype": prototype})


def check_state_size(facts: ClaimFacts) -> ClaimResult:
    """Compare the bytes of the memory's state, for one layer and sequence in float32, to the claimed 512 KB.

    The state is [head size, head size] per head. "true" or "differs". Numbers: bytes.

    Raises:
        MissingData: Number or size of heads is unknown.
    """
    heads, size = (int(facts.setting(f"model.{name}")[0]) for name in ("n_heads", "head_dim"))
    state_bytes = heads * size * size * 4
    text = f"{heads} heads x {size} x {size} x 4 bytes = {format_number(state_bytes / 1024, 0)} KB"
    return ClaimResult(TRUE if state_bytes == 512 * 1024 else DIFFERS, text, {"bytes": float(state_bytes)})


def not_decided_by_sweep(facts: ClaimFacts) -> ClaimResult:
    """Return "unchecked", with the benchmark command that measures the kernel of polar attention instead."""
    return ClaimResult(
        UNCHECKED, "not measured in sweeps: atma-sweep bench kernels polar compares the kernel with eager PyTorch"
    )


def check_rate(facts: ClaimFacts) -> ClaimResult:
    """Compare generated tokens per second of polar attention with memory to the claim, at the fastest length.

    "true" (at least 19,270 tokens/s) or "false" on an NVIDIA L4, "cannot say" on another GPU, "unchecked" if the sweep
    did not run the probe `decode`. The GPU is that of the first seed. Numbers: tokens_per_s.

    Raises:
        MissingData: The plain cell with memory has no such number.
    """
    if not any(key[1:3] == WRITING for key in facts.data.values):
        return ClaimResult(UNCHECKED, "n/a: the sweep did not run the probe decode")
    runs = facts.plain_runs(MAIN_MIXER, True)
    lengths = [length for length in facts.lengths(WRITING) if facts.mean_or_none(runs, WRITING, length)]
    if not lengths:
        raise MissingData(f"{_slug(runs)} has no {WRITING[0]} {WRITING[1]}")
    best = max(lengths, key=lambda length: facts.value(runs, WRITING, length))
    value, measured = facts.value(runs, WRITING, best), facts.data.value(runs[0].cell_id, *WRITING, best)
    source = facts.data.sources.get(measured.attempt_id) if measured is not None else None
    gpu_name = (source.gpu if source else None) or "no GPU"
    text = f"{format_number(value, 0)} at {format_length(best)} on {gpu_name}; the claim is for an NVIDIA L4"
    verdict = (TRUE if value >= CLAIMED_RATE else FALSE) if gpu_name.split()[-1] == "L4" else CANNOT_SAY
    return ClaimResult(verdict, text, {"tokens_per_s": value})


CLAIMS = (
    Claim("memory", "Memory lifts polar attention's needle accuracy at 64K.", check_memory_helps),
    Claim("hold-90", "Polar attention with memory holds at least 90% to 64K.", check_holds_ninety),
    Claim("average", "Its length-weighted average is 94%, 91 to 98% at every length.", check_average),
    Claim("monotone", "Its perplexity falls monotonically from 2K to 64K.", check_monotone_loss),
    Claim("best-loss", "It has the best 64K perplexity (1.96).", check_best_loss),
    Claim(
        "distractor",
        "With polar attention and memory, the distractor loss lowers needle accuracy at the longest length.",
        check_axis_hurts("distractor"),
    ),
    Claim(
        "window",
        "With polar attention and memory, the window lowers needle accuracy at the longest length.",
        check_axis_hurts("window"),
    ),
    Claim("simplest", "Without distractor loss and window, needle accuracy is best.", check_simplest),
    Claim("collapse", "Softmax attention with memory collapses to 16% at 64K.", check_collapse),
    Claim("rope", "RoPE with memory is at 0% by 32K and at 2.86 nats at 64K.", check_rotary),
    Claim("degrade", "NoPE and RoPE both degrade rapidly in perplexity past the training length.", check_degrades),
    Claim("mfu", "Memory costs 4.5 points of MFU, or 11.2%; with the distractor 20.7%.", check_speed),
    Claim("budgets", "Training budgets of the open-weight models, in ZF.", check_budgets),
    Claim("non-embedding", "369.72M non-embedding parameters.", check_non_embedding),
    Claim("tokens", "Exactly 1B tokens.", check_token_count),
    Claim("schedule", "A cosine schedule.", check_schedule),
    Claim("eigenvalue", "An eigenvalue of about -7, so 10^57.", check_eigenvalue),
    Claim("state", "A state of 512 KB.", check_state_size),
    Claim("generation", "Polar's Triton kernel is 7 to 27 times faster than eager PyTorch (L4).", not_decided_by_sweep),
    Claim("kept", "Its peak memory is 5 times smaller than that of eager PyTorch (L4).", not_decided_by_sweep),
    Claim("written", "Polar attention with memory generates 19,270 tokens/s.", check_rate),
)
"""Every sentence that numbers can decide, as the papers have it or in short."""
