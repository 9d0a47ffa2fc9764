"""The sentences of the rivals' papers, as paper_claims.py has those of our own: of the threshold paper (`flipflop`, `extrapolation`) and of the
Wall page (`downstream`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import special

from ....results import paper
from ....results.store.records import CellState
from ...number_format import Column, column_of, format_length, format_number
from ...sweep_data import SweepData, cell_level
from ..significance.paired_tests import ALPHA
from ..sweep_differences import NOT_THERE
from .paper_claims import CLAIMS, DIFFERS, FALSE, NOT_SHOWN, TRUE, Claim, ClaimFacts, ClaimResult, MissingData

SETS = paper.SETS
THRESHOLD, ROTARY, NO_POSITION, FORGETTING, WALL = "tra", "rope", "nope", "fox", "wall"
TASKS = ("hellaswag", "arc_c", "mmlu", "winogrande")
TEXT = "data."
"""Axes over texts: a configuration without positions is plain in each."""
DECAY = 0.02
"""Exponent of the rescale factor, in base 2, of each token of a chunk."""
DUST = 1e-9


@dataclass(frozen=True)
class Family:
    """The sentences of a paper, and the probes of which a sweep must have a number to be asked them."""

    probes: tuple[str, ...]
    claims: Sequence[Claim]


@dataclass(frozen=True)
class Mean:
    """A number over seeds, or over the runs of a printed mean, with the standard deviation between them; `high` is the upper end of
    the interval of the trials, of one run."""

    value: float
    seeds: int = 1
    sd: float | None = None
    high: float | None = None


def claims_for(facts: ClaimFacts) -> list[Claim]:
    """Those of every paper that a sweep has a number for; of a sweep without any, our own paper's."""
    data = facts.data
    found = [claim for one in FAMILIES if data.values and data.has_any(one.probes) for claim in one.claims]
    return found or list(CLAIMS)


def _plain(facts: ClaimFacts, mixer: str, column: Column) -> Mean:
    """The number of the plain configuration with that mixer that has it."""
    extra = [axis for axis in facts.data.extra_axes() if not axis.startswith(TEXT)]
    for runs in facts.plain_of(mixer):
        if any(cell_level(runs[0], axis) not in NOT_THERE for axis in extra):
            continue
        if facts.known(runs, (column.probe, column.metric), column.length) is not None:
            return _mean(facts.data, runs, column)
    at = f" at {format_length(column.length)}" if column.length else ""
    raise MissingData(f"no {mixer} with a number of {column.metric}{at}")


def _mean(data: SweepData, runs: Sequence[CellState], column: Column) -> Mean:
    values = data.numbers(runs, column)
    if len(values) > 1:
        return Mean(fmean(values), len(values), stdev(values))
    cell = next(cell for cell in runs if data.numbers([cell], column))
    printed, given = data.printed_spread(cell, column), data.given(cell, column)
    if printed is not None:
        return Mean(values[0], *printed)
    return Mean(values[0], high=given.high if given is not None else None)


def _share(one: Mean) -> str:
    spread = f" ± {format_number(one.sd, 2, percent=True)}" if one.sd is not None else ""
    return f"{format_number(round(one.value, 12), 2, percent=True)}{spread}"


def solved(facts: ClaimFacts) -> ClaimResult:
    """Whether every sequence of every set is right, in the mean over seeds, which is then every seed's."""
    found = {name: _plain(facts, THRESHOLD, column_of("flipflop", f"exact_{name}")) for name in SETS}
    told = ", ".join(f"{name} {_share(one)}" for name, one in found.items())
    seeds = min(one.seeds for one in found.values())
    whole = sum(one.value >= 1 - DUST for one in found.values())
    verdict = TRUE if whole == len(found) else f"true of {whole} of {len(found)}" if whole else FALSE
    return ClaimResult(verdict, f"{told}; {_runs(seeds)}", {name: one.value for name, one in found.items()})


def _runs(seeds: int) -> str:
    return "one run" if seeds < 2 else f"{seeds} runs"


def fails(mixer: str, which: str, printed: str) -> Callable[[ClaimFacts], ClaimResult]:
    """Whether a mixer leaves sequences of a set wrong: by Student's t of its seeds, by the sequences where it has one."""

    def query(facts: ClaimFacts) -> ClaimResult:
        one = _plain(facts, mixer, column_of("flipflop", f"exact_{which}"))
        told = f"{mixer}, {which}: {_share(one)}; {_runs(one.seeds)}"
        numbers = {"share": one.value}
        if one.value >= 1 - DUST:
            return ClaimResult(FALSE, told, numbers)
        if one.sd is not None and one.seeds > 1:
            high = one.value + float(special.stdtrit(one.seeds - 1, 1 - ALPHA / 2)) * one.sd / math.sqrt(one.seeds)
            told += f", 95% to {format_number(min(1.0, high), 2, percent=True)}"
            return ClaimResult(TRUE if high < 1 else NOT_SHOWN, told, numbers | {"high": high})
        if one.high is not None:
            told += f", 95% of sequences to {format_number(one.high, 2, percent=True)}"
            return ClaimResult(TRUE if one.high < 1 else NOT_SHOWN, told, numbers | {"high": one.high})
        same = format_number(round(one.value, 12), 2, percent=True) == printed
        return ClaimResult(TRUE if same else NOT_SHOWN, f"{told}, no spread of it", numbers)

    return query


def extrapolates(facts: ClaimFacts) -> ClaimResult:
    """Whether perplexity stays below that at the training length for two mixers, and more than doubles for a third."""
    lengths = facts.lengths(("extrapolation", "perplexity"))
    if len(lengths) < 2:
        raise MissingData(f"perplexity at {format_length(lengths[0])} alone")
    ratios = {}
    for mixer in (THRESHOLD, FORGETTING, ROTARY):
        columns = [_perplexity(facts, length) for length in (lengths[0], lengths[-1])]
        first, last = (_plain(facts, mixer, column).value for column in columns)
        ratios[mixer] = last / first
    kept = [ratios[THRESHOLD] <= 1 + DUST, ratios[FORGETTING] <= 1 + DUST, ratios[ROTARY] > 2]
    told = ", ".join(f"{mixer} {format_number(ratio, 2)}" for mixer, ratio in ratios.items())
    verdict = TRUE if all(kept) else f"true of {sum(kept)} of 3" if any(kept) else FALSE
    return ClaimResult(verdict, f"{format_length(lengths[-1])} over {format_length(lengths[0])}: {told}", ratios)


def _perplexity(facts: ClaimFacts, length: int) -> Column:
    return column_of("extrapolation", facts.data.metric("extrapolation", "perplexity"), length=length)


def averages(facts: ClaimFacts) -> ClaimResult:
    """Whether each printed average is, to the digit, the mean of the four numbers beside it."""
    every, right, told, numbers = 0, 0, [], {}
    for runs in facts.cells():
        average = facts.known(runs, ("downstream", "average"))
        four = [facts.known(runs, ("downstream", name)) for name in TASKS]
        if average is None or None in four:
            continue
        mean = round(math.fsum(value for value in four if value is not None) / len(TASKS), 12)
        every, numbers[runs[0].slug] = every + 1, mean
        if format_number(mean, 1, percent=True) == format_number(average, 1, percent=True):
            right += 1
        else:
            printed = format_number(average, 1, percent=True)
            told.append(f"{runs[0].slug} {format_number(mean, 3, percent=True)}, printed {printed}")
    if not every:
        raise MissingData("no configuration with four tasks and their average")
    verdict = TRUE if right == every else f"true of {right} of {every}"
    return ClaimResult(verdict, "; ".join([f"{right} of {every} to the digit", *told]), numbers)


def outperforms(facts: ClaimFacts) -> ClaimResult:
    """On how many tasks Wall attention is ahead of rotary and of forgetting attention."""
    ahead, every, numbers, behind = 0, 0, {}, []
    for name in TASKS:
        column = column_of("downstream", facts.data.metric("downstream", name))
        ours = _plain(facts, WALL, column)
        for rival in (ROTARY, FORGETTING):
            difference = ours.value - _plain(facts, rival, column).value
            every, ahead, numbers[f"{name}, {rival}"] = every + 1, ahead + (difference > DUST), difference
            behind += [f"{name} not of {rival}"] if difference <= DUST else []
    smallest = min(numbers.values())
    told = f"ahead in {ahead} of {every}, by {format_number(round(smallest, 12), 1, percent=True)} points at least"
    if ours.seeds < 2:
        told += "; one run each, so whether runs agree is not known"
    verdict = TRUE if ahead == every else f"true of {ahead} of {every}" if ahead else FALSE
    return ClaimResult(verdict, "; ".join([told, *behind]), numbers)


def rescaled(facts: ClaimFacts) -> ClaimResult:
    """Whether the printed rescale factors are 2^(0.02 C)."""
    if facts.data.sweep != paper.WALL:
        raise MissingData(f"the factors are what {paper.WALL} prints")
    right, told, numbers = 0, [], {}
    printed = [row for row in paper.rows("wall-settings") if row["setting"].startswith("rescale factor")]
    for row in printed:
        size = int(row["setting"].rpartition("= ")[2])
        factor = 2.0 ** (DECAY * size)
        numbers[f"C = {size}"] = factor
        right += format_number(factor, 2) == row["printed"]
        told.append(f"{format_number(factor, 3)} at C = {size}, printed {row['printed']}")
    verdict = TRUE if right == len(printed) else DIFFERS if not right else f"true of {right} of {len(printed)}"
    return ClaimResult(verdict, f"2^({DECAY} C): {'; '.join(told)}", numbers)


FAMILIES = (
    Family(("clean", "junk", "needle"), CLAIMS),
    Family(
        ("flipflop", "extrapolation"),
        (
            Claim("solved", "Threshold attention solves the flip-flop task: 100% in every set.", solved),
            Claim("rope-sparse", "RoPE fails where reads are sparse (72.82%).", fails(ROTARY, "sparse", "72.82")),
            Claim("fox-sparse", "So does forgetting attention (93.4%).", fails(FORGETTING, "sparse", "93.40")),
            Claim("nope-dense", "NoPE fails where reads are dense (0.15%).", fails(NO_POSITION, "dense", "0.15")),
            Claim(
                "extrapolates",
                "Perplexity does not rise with length for threshold and forgetting attention; RoPE's more than doubles.",
                extrapolates,
            ),
        ),
    ),
    Family(
        ("downstream",),
        (
            Claim("outperforms", "Wall attention outperforms RoPE and forgetting attention.", outperforms),
            Claim("averages", "The averages are those of the four tasks.", averages),
            Claim("rescale", "Rescale factors of 1.56, 2.43 and 5.91 at C = 32, 64 and 128.", rescaled),
        ),
    ),
)
"""In the order of the table."""
