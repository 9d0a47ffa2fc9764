"""The sentences of the paper against numbers: each is bound to the query that decides it, in the published sweeps as in any other.

A query reads a sweep through `ClaimFacts`, which remembers what it read, and gives a verdict with the numbers behind it. What the
sweep lacks ends it: the verdict is then SILENT, with what is missing. 64K in a sentence stands for the longest context length of
the sweep.
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
from ..effects.effect_types import FLOOR
from ..effects.needle_baseline import ceiling, is_at_chance
from ..significance.paired_tests import ALPHA, paired_difference_tests

TRUE, WEAK, NOT_SHOWN, FALSE, DIFFERS = "true", "weak", "not shown", "false", "differs"
SILENT, UNCHECKED = "cannot say", "unchecked"
SPEED, SIZE = ("throughput", "mfu_paper"), ("throughput", "parameters")
WRITING = ("decode", "written_per_s")
CLAIMED_RATE = 19_270
"""Tokens per second that polar attention with memory is said to write, of 512 texts on an NVIDIA L4."""
STEP, SECONDS = ("throughput", "step_seconds"), ("throughput", "train_seconds")
OURS, SOFTMAX, ROTARY = "polar", "nope", "rope"
CLAIMED_ACCURACY = 0.9
"""What is claimed to hold to the longest length."""
AVERAGE, SPAN = "94", (91, 98)  # %, as printed
NAMED = 2  # counterexamples by name
DIGIT = 0.01  # of a printed loss
DUST = 1e-9
PROTOTYPE = 16
"""Size of a key in the prototype that the eigenvalue was taken from."""
DECAY, WRITE = 0.98, 0.5
PUBLISHED: Mapping[str, int] = {"n_heads": 8, "head_dim": 128}
"""Of the published networks, whose logs do not say it."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
Metric = tuple[str, str]


@dataclass(frozen=True)
class ClaimResult:
    """What the numbers say of a sentence."""

    verdict: str
    told: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class MissingData(Exception):
    """What a query would need."""


@dataclass
class ClaimFacts:
    """A sweep, and which of its numbers were read."""

    data: SweepData
    read: dict[tuple[str, int | None], None] = field(default_factory=dict)

    @property
    def memory(self) -> str:
        """The level of memory that claims are about: the first that is not `off`."""
        return next((level for level in self.data.levels("memory") if level != "off"), "on")

    def lengths(self, metric: Metric) -> list[int]:
        """The context lengths, shortest first."""
        found = [length for length in self.data.lengths(*metric) if length]
        if not found:
            raise MissingData(f"no number of {metric[0]}")
        return found

    def cells(self, **levels: str) -> list[list[CellState]]:
        """The configurations at these levels, each as its runs."""
        groups = self.data.configurations().values()
        found = [runs for runs in groups if all(runs[0].levels[axis] == level for axis, level in levels.items())]
        if not found:
            raise MissingData(f"no cell {_named(levels)}")
        return found

    def plain(self, mixer: str, memory: bool, **levels: str) -> list[CellState]:
        """The runs of the plain recipe with that mixer."""
        return self.plain_of(mixer, memory, **levels)[0]

    def plain_of(self, mixer: str, memory: bool = False, **levels: str) -> list[list[CellState]]:
        """The same at every combination of levels of further axes."""
        modes = self.data.levels("reg_mode")
        mode = "baseline" if "baseline" in modes or not modes else modes[0]
        asked = {"reg_mode": mode, "distractor": "off", "memory": self.memory if memory else "off", "window": "off"}
        return self.cells(attn_type=mixer, **{**asked, **levels})

    def known(
        self, runs: Sequence[CellState], metric: Metric, length: int = 0, table: str | None = None
    ) -> float | None:
        """The mean over runs; None where none has the number."""
        values = []
        for cell in runs:
            value = self.data.value(cell.cell_id, *metric, length, table)
            if value is not None and value.value is not None:
                values.append(value.value)
                self.read[cell.cell_id, value.attempt_id] = None
        return fmean(values) if values else None

    def value(self, runs: Sequence[CellState], metric: Metric, length: int = 0, table: str | None = None) -> float:
        """As `known`, but it is an end where there is none."""
        found = self.known(runs, metric, length, table)
        if found is None:
            at = f" at {format_length(length)}" if length else ""
            raise MissingData(f"{_slug(runs)} has no {metric[0]} {metric[1].removesuffix(WEIGHTED_SUFFIX)}{at}")
        return found

    def differences(self, axis: str, metric: Metric, length: int, **levels: str) -> list[float]:
        """What switching an axis from `off` does, configuration by configuration."""
        sides: dict[bool, dict[tuple[str, ...], float]] = {False: {}, True: {}}
        place = AXES.index(axis)
        for key, runs in self.data.configurations().items():
            at, level = runs[0].levels, runs[0].levels[axis]
            asked = level in ("off", self.memory if axis == "memory" else "on")
            if not asked or any(at[name] != wanted for name, wanted in levels.items()):
                continue
            value = self.known(runs, metric, length)
            if value is not None:
                sides[level != "off"][key[:place] + key[place + 1 :]] = value
        found = [value - sides[False][key] for key, value in sides[True].items() if key in sides[False]]
        if not found:
            raise MissingData(f"no pairs of {axis} off and on at {_named(levels)}")
        return found

    def at_chance(self, sides: Iterable[Sequence[Sequence[CellState]]], length: int) -> bool:
        """Whether nobody retrieves anything there, of configurations that are held against each other side by side."""
        sides = [list(side) for side in sides]
        for runs in (runs for side in sides for runs in side):
            self.known(runs, NEEDLE, length)  # a verdict rests on them, too
        return is_at_chance(self.data, [[cell.cell_id for runs in side for cell in runs] for side in sides], [length])

    def sides(self, axis: str, **levels: str) -> list[list[list[CellState]]]:
        """The configurations with that axis off, and with it on."""
        on = self.memory if axis == "memory" else "on"
        return [self.cells(**levels, **{axis: level}) for level in ("off", on)]

    def setting(self, path: str) -> list[str]:
        """The values of a setting of the recipe, in the order of the cells."""
        known = (self.data.setting(cell, path) for cell in self.data.cells)
        found = dict.fromkeys(str(one) for one in known if one is not None)
        part, _, name = path.partition(".")
        if not found and part == "model" and self.data.sweep in paper.SWEEPS and name in PUBLISHED:
            return [str(PUBLISHED[name])]
        if not found:
            raise MissingData(f"no cell with the setting {path}")
        return list(found)

    def gpus(self, cell: CellState) -> float:
        """How much of how many GPUs a cell was given; 0 where nothing says so."""
        return float(self.data.setting(cell, "resources.gpus") or 0)


Query = Callable[[ClaimFacts], ClaimResult]


@dataclass(frozen=True)
class Claim:
    """A sentence, and what decides it."""

    name: str
    sentence: str
    query: Query

    def asked_of(self, facts: ClaimFacts) -> ClaimResult:
        """The verdict; SILENT with what is missing."""
        try:
            return self.query(facts)
        except MissingData as lacking:
            return ClaimResult(SILENT, f"{lacking}")


# --- words ------------------------------------------------------------------------------------------------------------


def _named(levels: Mapping[str, str]) -> str:
    """polar + memory, or every level by its axis."""
    rest = {axis: level for axis, level in levels.items() if axis not in ("attn_type", "memory")}
    first = levels.get("attn_type", "")
    memory = {"off": "", None: ""}.get(levels.get("memory"), "memory")
    head = " + ".join(word for word in (first, memory) if word)
    return ", ".join(word for word in (head, *(f"{axis} {level}" for axis, level in rest.items())) if word)


def _slug(runs: Sequence[CellState]) -> str:
    return runs[0].slug.removesuffix(f"-s{runs[0].seed}")


def _points(share: float, decimals: int = 1) -> str:
    return format_number(round(share, 12), decimals, percent=True)


def _range(values: Sequence[float], decimals: int = 2) -> str:
    return f"{_points(min(values), decimals)} to {_points(max(values), decimals)}"


def _of(count: int, total: int) -> str:
    """True, of some, or of none."""
    return TRUE if count == total else f"true of {count} of {total}" if count else FALSE


def _judged(differences: Sequence[float], direction: int) -> tuple[str, dict[str, float], str]:
    """Whether a mean difference lies on the claimed side of zero: the exact test of signs and Student's t must agree."""
    d = np.array(differences)
    if len(d) < 2:
        raise MissingData(f"one pair alone ({format_signed(round(float(d[0]), 12), 1, percent=True)} points)")
    (summed,) = paired_difference_tests([d])
    error = float(d.std(ddof=1)) / math.sqrt(len(d))
    reach = float(special.stdtrit(len(d) - 1, 1 - ALPHA / 2)) * error
    low, high = summed.mean - reach, summed.mean + reach
    tests = (summed.p < ALPHA, bool(error > 0 and (low > 0 or high < 0)))
    if summed.mean * direction > 0:
        verdict = TRUE if all(tests) else WEAK if any(tests) else NOT_SHOWN
    else:
        verdict = FALSE if all(tests) else NOT_SHOWN
    numbers = {
        "pairs": float(len(d)), "mean": summed.mean, "error": error, "up": float(summed.up), "down": float(summed.down),
        "low": summed.low, "high": summed.high, "p": summed.p, "t_low": low, "t_high": high,
    }  # fmt: skip
    numbers = {name: value for name, value in numbers.items() if not math.isnan(value)}
    if "p" not in numbers:
        # nothing varies
        return verdict, numbers, f"{_signed(summed.mean)} points in every one of {counted(len(d), 'pair')}"
    told = (
        f"{_signed(summed.mean)} ± {_points(error)} points over {counted(len(d), 'pair')} ({summed.up} up, {summed.down} down), "
        f"95% [{_points(summed.low)}, {_points(summed.high)}], by Student's t [{_points(low)}, {_points(high)}]"
    )
    return verdict, numbers, told


def _signed(share: float) -> str:
    return format_signed(round(share, 12), 1, percent=True)


# --- retrieval --------------------------------------------------------------------------------------------------------


def memory_helps(facts: ClaimFacts) -> ClaimResult:
    """The effect of memory on our mixer at the longest length."""
    length = facts.lengths(NEEDLE)[-1]
    verdict, numbers, told = _judged(facts.differences("memory", NEEDLE, length, attn_type=OURS), 1)
    if facts.at_chance(facts.sides("memory", attn_type=OURS), length):
        verdict = FLOOR
    return ClaimResult(verdict, f"{format_length(length)}: {told}", numbers)


def holds_ninety(facts: ClaimFacts) -> ClaimResult:
    """How many of our cells with memory keep 90% at the longest length."""
    length = facts.lengths(NEEDLE)[-1]
    groups = facts.cells(attn_type=OURS, memory=facts.memory)
    known = [(runs, facts.known(runs, NEEDLE, length)) for runs in groups]
    values = [value for _, value in known if value is not None]
    if not values:
        raise MissingData(f"no needle accuracy at {format_length(length)} of {OURS} + memory")
    open_ = [value for runs, value in known if value is not None and runs[0].levels["window"] == "off"]
    count = sum(value >= CLAIMED_ACCURACY - DUST for value in values)
    told = f"{count} of {counted(len(values), 'cell')} have {_points(CLAIMED_ACCURACY, 0)}% at {format_length(length)}; mean {_points(fmean(values))}"
    numbers = {"cells": float(len(values)), "held": float(count), "mean": fmean(values)}
    if len(open_) > 1:
        numbers |= {"no_window": fmean(open_), "no_window_sd": stdev(open_)}
        told += f", without window {_points(fmean(open_))} (sd {_points(stdev(open_))}, {counted(len(open_), 'cell')})"
    return ClaimResult(_of(count, len(values)), told, numbers)


def average(facts: ClaimFacts) -> ClaimResult:
    """The length-weighted average of our plain cell with memory, and its range."""
    runs, lengths = facts.plain(OURS, True), facts.lengths(NEEDLE)
    mean = facts.value(runs, (NEEDLE[0], NEEDLE[1] + WEIGHTED_SUFFIX))
    values = [facts.value(runs, NEEDLE, length) for length in lengths]
    whole = [round(100 * value) for value in values]
    kept = format_number(mean, 0, percent=True) == AVERAGE and SPAN[0] <= min(whole) and max(whole) <= SPAN[1]
    others = [
        facts.known(some, (NEEDLE[0], NEEDLE[1] + WEIGHTED_SUFFIX))
        for some in facts.cells(attn_type=OURS, memory=facts.memory)
    ]
    best = sum(value is not None and value >= mean - DUST for value in others)
    known = sum(value is not None for value in others)
    told = f"{_slug(runs)}: average {_points(mean, 2)}, {_range(values)} from {format_length(lengths[0])} to {format_length(lengths[-1])}"
    told += f"; {best} of {counted(known, 'cell')} {OURS} + memory have at least that"
    numbers = {
        "average": mean,
        "lowest": min(values),
        "highest": max(values),
        "cells": float(known),
        "reach": float(best),
    }
    verdict = DIFFERS if not kept else TRUE if best == known else f"true of {best} of {known}"
    return ClaimResult(verdict, told, numbers)


def axis_hurts(axis: str) -> Callable[[ClaimFacts], ClaimResult]:
    """Whether switching this axis on costs our mixer with memory accuracy."""

    def query(facts: ClaimFacts) -> ClaimResult:
        length = facts.lengths(NEEDLE)[-1]
        levels = {"attn_type": OURS, "memory": facts.memory}
        verdict, numbers, told = _judged(facts.differences(axis, NEEDLE, length, **levels), -1)
        if facts.at_chance(facts.sides(axis, **levels), length):
            verdict = FLOOR
        if axis == "window":
            return ClaimResult(verdict, f"{format_length(length)}: {told}", numbers)
        alone = facts.differences(axis, NEEDLE, length, **levels, window="off")
        if len(alone) > 1:
            error = stdev(alone) / math.sqrt(len(alone))
            numbers |= {"no_window": fmean(alone), "no_window_error": error}
            told += f"; without window {' '.join(map(_signed, alone))}, mean {_signed(fmean(alone))} ± {_points(error)}"
        return ClaimResult(verdict, f"{format_length(length)}: {told}", numbers)

    return query


def simplest(facts: ClaimFacts) -> ClaimResult:
    """Whether neither distractor nor window is best within every regularizer."""
    length = facts.lengths(NEEDLE)[-1]
    found: dict[tuple[str, ...], dict[tuple[str, str], tuple[float, str]]] = {}
    for key, runs in _with_memory(facts):
        value = facts.known(runs, NEEDLE, length)
        if value is not None:
            levels = runs[0].levels
            where = (levels["distractor"], levels["window"])
            name = f"{levels['reg_mode']}/{where[0]}/{where[1]}"
            found.setdefault((levels["reg_mode"], *key[len(AXES) :]), {})[where] = (value, name)
    held = [(one, some["off", "off"]) for some in found.values() if ("off", "off") in some for one in some.values()]
    rivals = [(one, plain) for one, plain in held if one is not plain]
    if not rivals:
        raise MissingData("no cell with distractor or window beside one without either")
    better = sorted(
        (pair for pair in rivals if pair[0][0] > pair[1][0] + DUST), key=lambda pair: pair[1][0] - pair[0][0]
    )
    told = f"{format_length(length)}: {len(better)} of {counted(len(rivals), 'cell')} with distractor or window beat the one without"
    examples = [f"{a[1]} {_points(a[0])} > {b[1]} {_points(b[0])}" for a, b in better[:NAMED]]
    numbers = {"better": float(len(better)), "cells": float(len(rivals))}
    sides: dict[tuple[str, str], list[list[CellState]]] = {}
    for _, runs in _with_memory(facts):
        sides.setdefault((runs[0].levels["distractor"], runs[0].levels["window"]), []).append(runs)
    verdict = FLOOR if facts.at_chance(sides.values(), length) else FALSE if better else TRUE
    return ClaimResult(verdict, "; ".join([told, *examples]), numbers)


def _with_memory(facts: ClaimFacts) -> Iterable[tuple[tuple[str, ...], list[CellState]]]:
    """Our configurations with memory, by their levels."""
    facts.cells(attn_type=OURS, memory=facts.memory)  # raises Lacking
    for key, runs in facts.data.configurations().items():
        if (runs[0].levels["attn_type"], runs[0].levels["memory"]) == (OURS, facts.memory):
            yield key, runs


def check_collapse(facts: ClaimFacts) -> ClaimResult:
    """Whether softmax attention with memory, which retrieves at the shortest length, does not at the longest."""
    first, length = _ends(facts)
    runs = facts.plain(SOFTMAX, True)
    value, level = facts.value(runs, NEEDLE, length), ceiling(facts.data, length)
    given = facts.data.value(runs[0].cell_id, *NEEDLE, length)
    hits = f", {round(value * given.n)} of {given.n} digits" if len(runs) == 1 and given and given.n else ""
    if level is None:
        level = metrics.metric(*NEEDLE).chance or 0.0
        yardstick = f"a guess scores {_points(level)}; what always the same digit scores is not recorded"
        nothing = value <= level + DUST
    else:
        yardstick = f"always the same digit scores {_points(level)}"
        nothing = facts.at_chance([[runs]], length)
    numbers = {"value": value, "ceiling": level}
    told = f"{_slug(runs)} at {format_length(length)}: {_points(value, 2)}{hits}; {yardstick}"
    if nothing and facts.at_chance([[runs]], first):
        return ClaimResult(FLOOR, f"{told}; at {format_length(first)} it retrieves nothing either", numbers)
    return ClaimResult(TRUE if nothing else FALSE, told, numbers)


def _ends(facts: ClaimFacts) -> tuple[int, int]:
    lengths = facts.lengths(NEEDLE)
    if len(lengths) < 2:
        raise MissingData("one context length alone")
    return lengths[0], lengths[-1]


def rotary(facts: ClaimFacts) -> ClaimResult:
    """RoPE with memory: no needle from half the longest length on, and the loss that is printed."""
    _ends(facts)  # raises Lacking
    runs, last = facts.plain(ROTARY, True), facts.lengths(NEEDLE)[-2:]
    needle = [facts.value(runs, NEEDLE, length) for length in last]
    loss = facts.value(runs, CLEAN, facts.lengths(CLEAN)[-1])
    at = ", ".join(f"{_points(value)} at {format_length(length)}" for value, length in zip(needle, last, strict=True))
    told = f"{_slug(runs)}: needle {at}; loss {format_number(loss, 2)} at {format_length(facts.lengths(CLEAN)[-1])}"
    if not any(value > DUST for value in needle):
        verdict = TRUE if format_number(loss, 2) == "2.86" else DIFFERS
    else:  # digits that always the same answer gets right, too, are no needle found
        verdict = DIFFERS if all(facts.at_chance([[runs]], length) for length in last) else FALSE
    return ClaimResult(verdict, told, {"needle": max(needle), "loss": loss})


# --- loss -------------------------------------------------------------------------------------------------------------


def monotone(facts: ClaimFacts) -> ClaimResult:
    """In how many cells the loss falls from every context length to the next."""
    lengths = facts.lengths(CLEAN)
    if len(lengths) < 2:
        raise MissingData("one context length alone")
    groups = [(OURS, True), (SOFTMAX, True), (ROTARY, True), (None, False)]
    told: list[str] = []
    numbers: dict[str, float] = {}
    for mixer, memory in groups:
        levels = {"memory": facts.memory if memory else "off"} | ({"attn_type": mixer} if mixer else {})
        name = f"{mixer} + memory" if mixer else "without memory"
        try:
            some = facts.cells(**levels)
        except MissingData:
            continue
        rows = [[facts.known(runs, CLEAN, length) for length in lengths] for runs in some]
        rows = [row for row in rows if None not in row]
        count = sum(all(b < a for a, b in pairwise(row)) for row in rows)  # type: ignore[operator]
        if rows:
            told.append(f"{name} {count} of {len(rows)}")
            numbers |= {f"{name}, falling": float(count), f"{name}, cells": float(len(rows))}
    if f"{OURS} + memory, cells" not in numbers:
        raise MissingData(f"no cell {OURS} + memory with a loss at every length")
    verdict = _of(int(numbers[f"{OURS} + memory, falling"]), int(numbers[f"{OURS} + memory, cells"]))
    return ClaimResult(
        verdict, f"{format_length(lengths[0])} to {format_length(lengths[-1])}: {', '.join(told)}", numbers
    )


def best_loss(facts: ClaimFacts) -> ClaimResult:
    """Whether our plain cell with memory has the lowest loss at the longest length, of the plain cells and of all."""
    length = facts.lengths(CLEAN)[-1]
    ours = facts.value(facts.plain(OURS, True), CLEAN, length)
    plain = []
    for mixer in facts.data.levels("attn_type"):
        for memory in (False, True):
            try:
                plain.append(facts.known(facts.plain(mixer, memory), CLEAN, length))
            except MissingData:
                continue
    known = [value for value in plain if value is not None]
    every = [(value, _slug(runs)) for runs in facts.cells() if (value := facts.known(runs, CLEAN, length)) is not None]
    lowest, name = min(every)
    # lower by more than a last printed digit, whichever way both were rounded
    lower = sum(value < ours - 1.5 * DIGIT for value, _ in every)
    inside = ours <= min(known) + DUST
    verdict = (
        FALSE
        if not inside or len(known) < 2
        else TRUE
        if ours <= lowest + DUST
        else f"true among {len(known)} plain cells only"
    )
    told = (
        f"{format_number(ours, 2)} at {format_length(length)}, {'lowest' if inside else 'not the lowest'} of the {len(known)} plain cells; "
        f"lowest of all is {format_number(lowest, 3)} ({name})"
    )
    if lower > 1:
        told += f", {lower - 1} more are below {format_number(round(ours - 1.5 * DIGIT, 9), 3)}"
    return ClaimResult(verdict, told, {"ours": ours, "plain": min(known), "lowest": lowest, "lower": float(lower)})


def degrades(facts: ClaimFacts) -> ClaimResult:
    """Whether the losses of softmax attention without memory rise past the training length."""
    (trained, *_) = [int(length) for length in facts.setting("train.seq_len")]
    lengths = facts.lengths(CLEAN)
    longer = [length for length in lengths if length > trained]
    if trained not in lengths or not longer:
        raise MissingData(f"no loss at the training length, {format_length(trained)}, and beyond it")
    told: list[str] = []
    kept: list[set[int]] = []
    numbers: dict[str, float] = {}
    for mixer in (SOFTMAX, ROTARY):
        runs = facts.plain(mixer, False)
        first = facts.value(runs, CLEAN, trained)
        rest = {length: facts.value(runs, CLEAN, length) for length in longer}
        better = [length // trained for length, value in rest.items() if value < first]
        kept.append(set(better))
        show = max(better, default=longer[0] // trained) * trained
        told.append(f"{mixer} {format_number(first, 2)} -> {format_number(rest[show], 2)} at {show // trained}x")
        numbers |= {
            f"{mixer}, trained": first,
            **{f"{mixer}, {length // trained}x": value for length, value in rest.items()},
        }
    both = kept[0] & kept[1]
    if both:
        most = max(both)
        told = [
            f"{mixer} {format_number(numbers[f'{mixer}, trained'], 2)} -> {format_number(numbers[f'{mixer}, {most}x'], 2)} at {format_length(most * trained)}"
            for mixer in (SOFTMAX, ROTARY)
        ]
        return ClaimResult(f"false up to {most}x", f"both improve: {', '.join(told)}", numbers)
    return ClaimResult(
        TRUE if not any(kept) else f"true of {sum(not some for some in kept)} of 2", ", ".join(told), numbers
    )


# --- cost, size and recipe --------------------------------------------------------------------------------------------


def speed(facts: ClaimFacts) -> ClaimResult:
    """What memory and distractor cost of MFU, and by the time of a step."""
    table = "4" if facts.data.sweep in paper.SWEEPS else None
    runs = [facts.plain(OURS, False), facts.plain(OURS, True), facts.plain(OURS, True, distractor="on")]
    if any(0 < facts.gpus(cell) < 1 for some in runs for cell in some):
        raise MissingData("cells had a share of a GPU each, so that their speeds are their neighbours', too")
    alone, memory, both = (facts.value(some, SPEED, table=table) for some in runs)
    points, drops = alone - memory, [1 - memory / alone, 1 - both / alone]
    told = f"MFU {_points(alone)}, {_points(memory)}, {_points(both)}: {_points(points)} points, {_points(drops[0])}%, {_points(drops[1])}%"
    numbers = {"points": points, "memory": drops[0], "both": drops[1]}
    times = [facts.known(some, STEP, table=table) or facts.known(some, SECONDS) for some in runs]
    if all(times):
        by_time = [1 - times[0] / time for time in times[1:]]  # type: ignore[operator]
        numbers |= {"memory_by_time": by_time[0], "both_by_time": by_time[1]}
        told += f"; by the time of a step {_points(by_time[0])}% and {_points(by_time[1])}%, since N counts the memory"
    same = (_points(points), _points(drops[0]), _points(drops[1])) == ("4.5", "11.2", "20.7")
    return ClaimResult(TRUE if same else DIFFERS, told, numbers)


def budgets(facts: ClaimFacts) -> ClaimResult:
    """Whether the printed training budgets are six times parameters times tokens."""
    if facts.data.sweep != paper.SWEEPS[1]:
        raise MissingData(f"the budgets are of models that {paper.SWEEPS[1]} prints")
    right, every = 0, 0
    for row in paper.rows("budgets"):
        texts = (row["params"], row["train_tokens"])
        if not all(text[:-1].replace(".", "").isdigit() and text[-1] in UNITS for text in texts):
            continue
        size, tokens = (float(text[:-1]) * UNITS[text[-1]] for text in texts)
        every += 1
        right += f"{format_number(6 * size * tokens / 1e21, 1)} ZF" == row["train_flops"]
    return ClaimResult(
        _of(right, every), f"{right} of {every} are 6 N T to the digit", {"right": float(right), "models": float(every)}
    )


def non_embedding(facts: ClaimFacts) -> ClaimResult:
    """Whether 369.72M leaves the embedding out."""
    size = facts.value(facts.plain(SOFTMAX, False), SIZE)
    is_total = format_number(size / 1e6, 2) == "369.72"
    told = f"all parameters of {SOFTMAX} without memory, the embedding among them: {format_number(size / 1e6, 2)}M"
    return ClaimResult(FALSE if is_total else DIFFERS, told, {"parameters": size})


def check_token_count(facts: ClaimFacts) -> ClaimResult:
    """Whether exactly a billion tokens were trained."""
    known = sorted({cell.tokens_total for cell in facts.data.cells if cell.tokens_total})
    if not known:
        raise MissingData("no cell with a number of tokens")
    told = ", ".join(f"{tokens:,}" for tokens in known)
    try:
        (size, *_) = [int(text) for text in facts.setting("train.batch_tokens")]
        told += f" = {known[0] // size:,} steps of {size:,}" if len(known) == 1 and not known[0] % size else ""
    except MissingData:
        pass
    return ClaimResult(TRUE if known == [10**9] else FALSE, f"{told} tokens", {"tokens": float(known[0])})


def cosine(facts: ClaimFacts) -> ClaimResult:
    """Whether the schedule is a cosine."""
    known = facts.setting("train.schedule")
    return ClaimResult(TRUE if known == ["cosine"] else FALSE, f"schedule: {', '.join(known)}")


def eigenvalue(facts: ClaimFacts) -> ClaimResult:
    """The eigenvalue of the memory's transition with keys that are normed by their root mean square."""
    (size, *_) = [int(text) for text in facts.setting("model.head_dim")]
    here, there = (DECAY * (1 - WRITE * keys) for keys in (size, PROTOTYPE))
    told = f"{DECAY} (1 - {WRITE} d): {format_number(here, 1)} at d = {size}; {format_number(there, 1)} at d = {PROTOTYPE}, as in a prototype"
    verdict = (
        TRUE
        if format_number(here, 0) == "-7"
        else f"true of d = {PROTOTYPE} only"
        if format_number(there, 0) == "-7"
        else FALSE
    )
    return ClaimResult(verdict, told, {"eigenvalue": here, "prototype": there})


def state_size(facts: ClaimFacts) -> ClaimResult:
    """Bytes of the memory's state of a layer and a sequence."""
    heads, size = (int(facts.setting(f"model.{name}")[0]) for name in ("n_heads", "head_dim"))
    held = heads * size * size * 4
    told = f"{heads} heads x {size} x {size} x 4 bytes = {format_number(held / 1024, 0)} KB"
    return ClaimResult(TRUE if held == 512 * 1024 else DIFFERS, told, {"bytes": float(held)})


def in_benchmark(facts: ClaimFacts) -> ClaimResult:
    """Return that no sweep decides a sentence about the kernel of polar attention, and which command measures it."""
    return ClaimResult(
        UNCHECKED, "not of a sweep: atma-sweep bench kernels polar times the kernel beside eager PyTorch"
    )


def check_rate(facts: ClaimFacts) -> ClaimResult:
    """Tokens a second of polar attention with memory, which only numbers of the same GPU can decide."""
    if not any(key[1:3] == WRITING for key in facts.data.values):
        return ClaimResult(UNCHECKED, "the sweep did not run the probe decode: not derivable")
    runs = facts.plain(OURS, True)
    lengths = [length for length in facts.lengths(WRITING) if facts.known(runs, WRITING, length)]
    if not lengths:
        raise MissingData(f"{_slug(runs)} has no {WRITING[0]} {WRITING[1]}")
    best = max(lengths, key=lambda length: facts.value(runs, WRITING, length))
    value, found = facts.value(runs, WRITING, best), facts.data.value(runs[0].cell_id, *WRITING, best)
    source = facts.data.sources.get(found.attempt_id) if found is not None else None
    where = (source.gpu if source else None) or "no GPU"
    told = f"{format_number(value, 0)} at {format_length(best)} on {where}; the sentence is of an NVIDIA L4"
    verdict = (TRUE if value >= CLAIMED_RATE else FALSE) if where.split()[-1] == "L4" else SILENT
    return ClaimResult(verdict, told, {"tokens_per_s": value})


CLAIMS = (
    Claim("memory", "Memory lifts polar attention's needle accuracy at 64K.", memory_helps),
    Claim("hold-90", "Polar attention with memory holds at least 90% to 64K.", holds_ninety),
    Claim("average", "Its length-weighted average is 94%, 91 to 98% at every length.", average),
    Claim("monotone", "Its perplexity falls monotonically from 2K to 64K.", monotone),
    Claim("best-loss", "It has the best 64K perplexity (1.96).", best_loss),
    Claim("distractor", "The distractor hurts beside memory.", axis_hurts("distractor")),
    Claim("window", "The window hurts beside memory.", axis_hurts("window")),
    Claim("simplest", "The simplest configuration is strictly superior.", simplest),
    Claim("collapse", "Softmax attention with memory collapses to 16% at 64K.", check_collapse),
    Claim("rope", "RoPE with memory is at 0% by 32K and at 2.86 nats at 64K.", rotary),
    Claim("degrade", "NoPE and RoPE both degrade rapidly in perplexity past the training length.", degrades),
    Claim("mfu", "Memory costs 4.5 points of MFU, or 11.2%; with the distractor 20.7%.", speed),
    Claim("budgets", "Training budgets of the open-weight models, in ZF.", budgets),
    Claim("non-embedding", "369.72M non-embedding parameters.", non_embedding),
    Claim("tokens", "Exactly 1B tokens.", check_token_count),
    Claim("schedule", "A cosine schedule.", cosine),
    Claim("eigenvalue", "An eigenvalue of about -7, so 10^57.", eigenvalue),
    Claim("state", "A state of 512 KB.", state_size),
    Claim("generation", "Polar's Triton kernel is 7 to 27 times faster than eager PyTorch (L4).", in_benchmark),
    Claim("kept", "Its peak memory is 5 times smaller than that of eager PyTorch (L4).", in_benchmark),
    Claim("written", "Polar attention with memory writes 19,270 tokens/s.", check_rate),
)
"""Every sentence that numbers can decide, as the papers have it or in short."""
