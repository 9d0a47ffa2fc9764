"""Claims of the rival papers: threshold attention (probes `flipflop`, `extrapolation`), Wall (`downstream`).

Each is bound to its query, as in paper_claims.py.
"""

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
from ..sweep_differences import ABSENT_LEVELS
from .paper_claims import CLAIMS, DIFFERS, FALSE, NOT_SHOWN, TRUE, Claim, ClaimFacts, ClaimResult, MissingData

FLIPFLOP_SETS = paper.SETS
THRESHOLD, ROTARY, NO_POSITION, FORGETTING, WALL = "tra", "rope", "nope", "fox", "wall"
DOWNSTREAM_TASKS = ("hellaswag", "arc_c", "mmlu", "winogrande")
TEXT_AXIS_PREFIX = "data."
"""Beginning of axes over texts: a configuration without positions is plain in each of their levels."""
RESCALE_EXPONENT = 0.02
"""Exponent of the rescale factor, in base 2, per token of a chunk."""
ROUNDING_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ClaimSet:
    """Claims of a paper, and the probes of which a sweep needs at least one number for them to apply."""

    probes: tuple[str, ...]
    claims: Sequence[Claim]


@dataclass(frozen=True)
class SeedMean:
    """A number averaged over seeds, or over the runs of a printed mean.

    `sd` is the standard deviation between runs, None if unknown. `high` is the upper end of the 95% interval over
    trials of a single run.
    """

    value: float
    seeds: int = 1
    sd: float | None = None
    high: float | None = None


def claims_for(facts: ClaimFacts) -> list[Claim]:
    """Return the claims of each paper whose probes a sweep has, our paper first.

    Probes are clean, junk, needle (our paper); flipflop, extrapolation (threshold attention); downstream (Wall). One
    measured or requested probe of a paper suffices. The claims of our paper are returned if there is none, or the sweep
    has no number yet.
    """
    data = facts.data
    claims = [
        claim
        for claim_set in CLAIM_SETS
        if data.values and data.has_any(claim_set.probes)
        for claim in claim_set.claims
    ]
    return claims or list(CLAIMS)


def _plain(facts: ClaimFacts, mixer: str, column: Column) -> SeedMean:
    """Return the number of the first plain configuration with that mixer that has it, without memory.

    Plain means baseline regularizer, no distractor, no window. Configurations with a component on an extra axis are
    skipped; axes over texts do not matter. The number is recorded as read.

    Args:
        facts: The sweep.
        mixer: Level of the mixer axis.
        column: Column of the number.

    Raises:
        MissingData: There is none.
    """
    extra = [axis for axis in facts.data.extra_axes() if not axis.startswith(TEXT_AXIS_PREFIX)]
    for runs in facts.plain_configurations(mixer):
        if any(cell_level(runs[0], axis) not in ABSENT_LEVELS for axis in extra):
            continue
        if facts.mean_or_none(runs, (column.probe, column.metric), column.length) is not None:
            return _mean(facts.data, runs, column)
    length_text = f" at {format_length(column.length)}" if column.length else ""
    raise MissingData(f"no measurement of {column.metric}{length_text} for {mixer}")


def _mean(data: SweepData, runs: Sequence[CellState], column: Column) -> SeedMean:
    """Return the mean over runs with its sample standard deviation, or the printed one of a single cell.

    A single run without a printed spread has the upper end of its interval over trials, if recorded. At least one run
    must have the number.
    """
    values = data.column_numbers(runs, column)
    if len(values) > 1:
        return SeedMean(fmean(values), len(values), stdev(values))
    cell = next(cell for cell in runs if data.column_numbers([cell], column))
    printed, measured = data.printed_spread(cell, column), data.measured_value(cell, column)
    if printed is not None:
        return SeedMean(values[0], *printed)
    return SeedMean(values[0], high=measured.high if measured is not None else None)


def _share(seed_mean: SeedMean) -> str:
    spread = f" ± {format_number(seed_mean.sd, 2, percent=True)}" if seed_mean.sd is not None else ""
    return f"{format_number(round(seed_mean.value, 12), 2, percent=True)}{spread}"


def check_solved(facts: ClaimFacts) -> ClaimResult:
    """Decide if every sequence of every flip-flop set is right in the mean over seeds, and thus for every seed.

    Of plain threshold attention: "true" for all sets (iid, sparse, dense), "false" for none, else "true of K of N".
    Numbers: share of right sequences by set, as fractions.

    Raises:
        MissingData: A set was not measured.
    """
    by_set = {name: _plain(facts, THRESHOLD, column_of("flipflop", f"exact_{name}")) for name in FLIPFLOP_SETS}
    shares_text = ", ".join(f"{name} {_share(seed_mean)}" for name, seed_mean in by_set.items())
    seeds = min(seed_mean.seeds for seed_mean in by_set.values())
    num_solved = sum(seed_mean.value >= 1 - ROUNDING_TOLERANCE for seed_mean in by_set.values())
    verdict = TRUE if num_solved == len(by_set) else f"true of {num_solved} of {len(by_set)}" if num_solved else FALSE
    return ClaimResult(
        verdict, f"{shares_text}; {_runs(seeds)}", {name: seed_mean.value for name, seed_mean in by_set.items()}
    )


def _runs(seeds: int) -> str:
    return "one run" if seeds < 2 else f"{seeds} runs"


def check_fails(mixer: str, set_name: str, printed: str) -> Callable[[ClaimFacts], ClaimResult]:
    """Return a query that decides if a mixer leaves some sequences of a flip-flop set wrong.

    The query gives "false" if all sequences are right, "true" if the upper end of the 95% interval is below 1, else
    "not shown". Without an interval it gives "true" only if the share prints as in the paper. Numbers: share and, with
    an interval, high (its upper end), as fractions.

    Args:
        mixer: Level of the mixer axis.
        set_name: Flip-flop set, "iid", "sparse" or "dense".
        printed: Share of right sequences in the paper, in percent as printed, compared if no interval is available.
    """

    def query(facts: ClaimFacts) -> ClaimResult:
        """Compare the upper end of the 95% interval (Student's t over seeds, or over sequences of one run) to 1.

        Raises:
            MissingData: The set was not measured with that mixer.
        """
        seed_mean = _plain(facts, mixer, column_of("flipflop", f"exact_{set_name}"))
        text = f"{mixer}, {set_name}: {_share(seed_mean)}; {_runs(seed_mean.seeds)}"
        numbers = {"share": seed_mean.value}
        if seed_mean.value >= 1 - ROUNDING_TOLERANCE:
            return ClaimResult(FALSE, text, numbers)
        if seed_mean.sd is not None and seed_mean.seeds > 1:
            high = seed_mean.value + float(
                special.stdtrit(seed_mean.seeds - 1, 1 - ALPHA / 2)
            ) * seed_mean.sd / math.sqrt(seed_mean.seeds)
            text += f", 95% interval up to {format_number(min(1.0, high), 2, percent=True)}"
            return ClaimResult(TRUE if high < 1 else NOT_SHOWN, text, numbers | {"high": high})
        if seed_mean.high is not None:
            text += f", 95% interval over sequences up to {format_number(seed_mean.high, 2, percent=True)}"
            return ClaimResult(TRUE if seed_mean.high < 1 else NOT_SHOWN, text, numbers | {"high": seed_mean.high})
        same = format_number(round(seed_mean.value, 12), 2, percent=True) == printed
        return ClaimResult(TRUE if same else NOT_SHOWN, f"{text}, no interval available", numbers)

    return query


def check_extrapolates(facts: ClaimFacts) -> ClaimResult:
    """Decide if perplexity does not rise with length for threshold and forgetting attention, and doubles for RoPE.

    Compared are the longest and the shortest length. "true" if all three conditions hold, "false" if none, else "true
    of K of 3". Numbers: ratio of perplexities by mixer.

    Raises:
        MissingData: Only one length, or a perplexity is missing.
    """
    lengths = facts.lengths(("extrapolation", "perplexity"))
    if len(lengths) < 2:
        raise MissingData(f"perplexity at {format_length(lengths[0])} only")
    ratios = {}
    for mixer in (THRESHOLD, FORGETTING, ROTARY):
        columns = [_perplexity(facts, length) for length in (lengths[0], lengths[-1])]
        first, last = (_plain(facts, mixer, column).value for column in columns)
        ratios[mixer] = last / first
    conditions = [
        ratios[THRESHOLD] <= 1 + ROUNDING_TOLERANCE,
        ratios[FORGETTING] <= 1 + ROUNDING_TOLERANCE,
        ratios[ROTARY] > 2,
    ]
    ratios_text = ", ".join(f"{mixer} {format_number(ratio, 2)}" for mixer, ratio in ratios.items())
    verdict = TRUE if all(conditions) else f"true of {sum(conditions)} of 3" if any(conditions) else FALSE
    return ClaimResult(
        verdict,
        f"perplexity at {format_length(lengths[-1])} over that at {format_length(lengths[0])}: {ratios_text}",
        ratios,
    )


def _perplexity(facts: ClaimFacts, length: int) -> Column:
    return column_of("extrapolation", facts.data.metric("extrapolation", "perplexity"), length=length)


def check_averages(facts: ClaimFacts) -> ClaimResult:
    """Decide if each printed average equals, to the printed digit, the mean of its four tasks.

    The tasks are hellaswag, arc_c, mmlu and winogrande, weighted equally; a digit is 0.1 %. Configurations that lack a
    task or the average are skipped. "true" or "true of K of N". Numbers: computed mean by slug of the configuration's
    first run, as fractions.

    Raises:
        MissingData: No configuration has all five numbers.
    """
    total, num_right, deviations, numbers = 0, 0, [], {}
    for runs in facts.cells():
        average = facts.mean_or_none(runs, ("downstream", "average"))
        scores = [facts.mean_or_none(runs, ("downstream", name)) for name in DOWNSTREAM_TASKS]
        if average is None or None in scores:
            continue
        mean = round(math.fsum(value for value in scores if value is not None) / len(DOWNSTREAM_TASKS), 12)
        total, numbers[runs[0].slug] = total + 1, mean
        if format_number(mean, 1, percent=True) == format_number(average, 1, percent=True):
            num_right += 1
        else:
            printed = format_number(average, 1, percent=True)
            deviations.append(f"{runs[0].slug} {format_number(mean, 3, percent=True)}, printed {printed}")
    if not total:
        raise MissingData("no configuration has all four tasks and their average")
    verdict = TRUE if num_right == total else f"true of {num_right} of {total}"
    return ClaimResult(verdict, "; ".join([f"{num_right} of {total} match to the printed digit", *deviations]), numbers)


def check_outperforms(facts: ClaimFacts) -> ClaimResult:
    """Count the tasks on which Wall attention is ahead of rotary and of forgetting attention.

    "true" if in all eight comparisons, "false" if in none, else "true of K of N"; there is no test, a lead above 1e-9
    counts. Tasks are hellaswag, arc_c, mmlu and winogrande. Numbers: Wall minus rival by "TASK, RIVAL" (RIVAL is rope
    or fox), as fractions.

    Raises:
        MissingData: A number is missing.
    """
    num_ahead, total, numbers, not_ahead = 0, 0, {}, []
    for name in DOWNSTREAM_TASKS:
        column = column_of("downstream", facts.data.metric("downstream", name))
        wall_mean = _plain(facts, WALL, column)
        for rival in (ROTARY, FORGETTING):
            difference = wall_mean.value - _plain(facts, rival, column).value
            total, num_ahead, numbers[f"{name}, {rival}"] = (
                total + 1,
                num_ahead + (difference > ROUNDING_TOLERANCE),
                difference,
            )
            not_ahead += [f"not ahead of {rival} on {name}"] if difference <= ROUNDING_TOLERANCE else []
    smallest = min(numbers.values())
    text = f"ahead in {num_ahead} of {total}, by at least {format_number(round(smallest, 12), 1, percent=True)} points"
    if wall_mean.seeds < 2:
        text += "; one run each, so run-to-run variation is unknown"
    verdict = TRUE if num_ahead == total else f"true of {num_ahead} of {total}" if num_ahead else FALSE
    return ClaimResult(verdict, "; ".join([text, *not_ahead]), numbers)


def check_rescale_factors(facts: ClaimFacts) -> ClaimResult:
    """Decide if the printed rescale factors equal 2^(0.02 C) to the printed digit.

    "true", "differs" if none does, else "true of K of N". Numbers: computed factor by "C = SIZE".

    Raises:
        MissingData: The sweep is not the published one that prints the factors.
    """
    if facts.data.sweep != paper.WALL:
        raise MissingData(f"only sweep {paper.WALL} has these factors")
    num_right, parts, numbers = 0, [], {}
    printed = [row for row in paper.rows("wall-settings") if row["setting"].startswith("rescale factor")]
    for row in printed:
        size = int(row["setting"].rpartition("= ")[2])
        factor = 2.0 ** (RESCALE_EXPONENT * size)
        numbers[f"C = {size}"] = factor
        num_right += format_number(factor, 2) == row["printed"]
        parts.append(f"{format_number(factor, 3)} at C = {size}, printed {row['printed']}")
    verdict = (
        TRUE if num_right == len(printed) else DIFFERS if not num_right else f"true of {num_right} of {len(printed)}"
    )
    return ClaimResult(verdict, f"2^({RESCALE_EXPONENT} C): {'; '.join(parts)}", numbers)


CLAIM_SETS = (
    ClaimSet(("clean", "junk", "needle"), CLAIMS),
    ClaimSet(
        ("flipflop", "extrapolation"),
        (
            Claim(
                "solved",
                "Threshold attention solves the flip-flop task: 100% of the sequences are right in every set.",
                check_solved,
            ),
            Claim(
                "rope-sparse",
                "RoPE fails the sparse flip-flop set: 72.82% of its sequences are right.",
                check_fails(ROTARY, "sparse", "72.82"),
            ),
            Claim(
                "fox-sparse",
                "Forgetting attention fails the sparse flip-flop set: 93.4% of its sequences are right.",
                check_fails(FORGETTING, "sparse", "93.40"),
            ),
            Claim(
                "nope-dense",
                "NoPE fails the dense flip-flop set: 0.15% of its sequences are right.",
                check_fails(NO_POSITION, "dense", "0.15"),
            ),
            Claim(
                "extrapolates",
                "Perplexity does not rise with length for threshold and forgetting attention; RoPE's more than doubles.",
                check_extrapolates,
            ),
        ),
    ),
    ClaimSet(
        ("downstream",),
        (
            Claim("outperforms", "Wall attention outperforms RoPE and forgetting attention.", check_outperforms),
            Claim(
                "averages",
                "The printed averages are the means of HellaSwag, ARC-C, MMLU and WinoGrande.",
                check_averages,
            ),
            Claim("rescale", "Rescale factors of 1.56, 2.43 and 5.91 at C = 32, 64 and 128.", check_rescale_factors),
        ),
    ),
)
"""Claim sets in the order of the table."""
