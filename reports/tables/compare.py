"""The tables `compare` and `claims`: a sweep beside another number by number, and beside the sentences of the papers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from scipy import special

from ...results import paper
from ...results.builtin_sweeps import store_with_builtin
from ...results.intervals import of_trials
from ...results.store.records import AXES
from ...results.store.store import Store
from ..number_format import Column, column_of, format_length, format_number
from ..result_columns import AXIS_HEADINGS, extra_metrics
from ..stats.claims.paper_claims import SILENT, ClaimFacts
from ..stats.claims.rival_claims import claims_for
from ..stats.effects.needle_baseline import needle_note
from ..stats.noise.best_probability import spreads_by_stratum, stratum_of
from ..stats.noise.run_noise import Spread
from ..stats.significance.paired_tests import ALPHA
from ..stats.significance.trial_intervals import independent_trials
from ..stats.sweep_differences import ComparedSweep, Match, RecipeDifference, differences, further_axes, matched
from ..sweep_data import ReportError, SweepData, load_sweep_data
from ..table import Table, TableEntry
from ..table_builder import TableRow, build_table, difference, measured_entry, p_value_entry, seed_notes, sweep_note
from .paper_rows import printed_discrepancies
from .task_tables import facts_besides

COLUMNS = (
    column_of("val", "val_loss"),
    column_of("clean", "nats"),
    column_of("junk", "nats"),
    column_of("needle", "digit_accuracy"),
    column_of("throughput", "mfu_paper"),
)
SHOWN = 8  # differences named in the line above the table
WITHIN, BEYOND, UNKNOWN = "within", "beyond", "-"
PRINTED = "printed"
"""Kind of a spread that stands beside a printed mean."""
WELCH_NOTE = (
    "Beside a mean that is printed with the standard deviation of its runs the limit is Welch's t, with the spread of the seeds "
    "here and of the runs there; beside a single seed with that of the runs alone. p is of the same t."
)
ALIKE = (
    "Beside runs that all printed the same number the limit is what the sequences of a seed explain (Wilson), and p that of "
    "exchanging seeds here and runs there: never below 1 in 5 for one seed beside four runs. There, beyond says that this run is not "
    "what is printed, not that other seeds would miss it, too."
)
SAME = 1e-9  # of a mean: how near two statistics of exchanged runs count as equal


@dataclass(frozen=True, kw_only=True)
class NumberComparison:
    """One number on both sides, in its own unit (shares as fractions).

    `limit` is the largest difference that the known spread explains, `verdict` within, beyond, or - where there is nothing
    to judge by, or what must not be judged. `p` is of the difference, beside a printed mean over runs alone. `flags` says where the
    paper prints another number than its authors' logs give.
    """

    levels: tuple[str, ...]
    column: Column
    measured: TableEntry
    published: TableEntry
    difference: float | None
    spread: Spread | None
    limit: float | None
    flags: tuple[str, ...] = ()
    p: float | None = None
    further: tuple[str, ...] = ()
    """Levels of the further axes that tell matched configurations apart."""

    @property
    def verdict(self) -> str:
        """Within the limit or beyond it; UNKNOWN where there is none."""
        if self.difference is None or self.limit is None:
            return UNKNOWN
        return WITHIN if abs(self.difference) <= self.limit * (1 + 1e-9) else BEYOND


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The numbers that two sweeps have in common, what their cells do not share, and what one of them did not record."""

    numbers: Sequence[NumberComparison]
    differences: Sequence[RecipeDifference]
    unrecorded: Sequence[str]
    axes: tuple[str, ...] = ()
    """The further axes that tell matched configurations apart."""


def compared(mine: ComparedSweep, theirs: ComparedSweep) -> Compared:
    """Return every number that both sweeps have of a common configuration (stats/sweep_differences.py).

    The published side is the authors' log where there is one, else the printed number. The limit is t(0.975, df) sd
    sqrt(1/k + 1/m) for the means of k and m seeds, with the spread between runs of that mixer and memory in the reference
    (of one's own where it has none), an accuracy's never below what its trials alone explain, and never less than a printed
    digit. Where a mean is printed with the standard deviation of its m runs, the limit is Welch's of both sides' own spreads,
    of the printed one alone beside a single seed; where that is 0, what the trials of a seed explain. A number that the sweeps'
    differences touch is not judged. Raises ReportError where they have nothing in common.
    """
    data, published = mine.data, theirs.data
    pairs = matched(data, published)
    unlike, unrecorded = differences(mine, theirs, [(one.mine, one.theirs) for one in pairs])
    flags = {(one.cell, one.probe, one.metric, one.length): one.text for one in printed_discrepancies(published)}
    columns = _columns(data, published)
    judged = {column: not any(one.touches(column.probe) for one in unlike) for column in columns}
    spreads = {
        column: {**spreads_by_stratum(data, column), **spreads_by_stratum(published, column)} if judged[column] else {}
        for column in columns
    }
    extra = further_axes(data, published)
    axes = tuple(axis for axis in extra if len({pair.further[axis] for pair in pairs}) > 1)
    found = []
    for pair in pairs:
        for column in columns:
            right, left = measured_entry(published, pair.theirs, column), measured_entry(data, pair.mine, column)
            if right.value is None or (
                left.value is None
                and not ((column.probe, column.length) in data.requested or column.probe == "throughput")
            ):
                continue
            keys = [(cell.cell_id, *column.key) for cell in pair.theirs]
            spread = spreads[column].get(stratum_of(pair.theirs[0]))
            if judged[column] and (printed := _printed(published, pair, column)) is not None:
                spread = printed
            one = _judge(pair, column, left, right, spread)
            if one.spread is not None and one.spread.kind == PRINTED:
                one = _with_run_test(one, data, pair)
            told = tuple(flags[key] for key in keys if key in flags)
            found.append(replace(one, flags=told, further=tuple(pair.further[axis] for axis in axes)))
    if not found:
        why = f" (further axes vary: {', '.join(extra)})" if extra else ""
        raise ReportError(
            f"sweeps {data.sweep} and {published.sweep} have no number of a common configuration{why}; compare others with --sweep"
        )
    return Compared(numbers=found, differences=unlike, unrecorded=unrecorded, axes=axes)


def _printed(published: SweepData, pair: Match, column: Column) -> Spread | None:
    """The spread that is printed beside a mean over runs."""
    told = published.printed_spread(pair.theirs[0], column)
    if told is None or told[1] is None or told[0] < 2:
        return None
    return Spread(PRINTED, told[1], told[0] - 1, 1)


def _columns(data: SweepData, published: SweepData) -> list[Column]:
    columns = []
    known = {(one.probe, one.metric) for one in COLUMNS}
    further = [column_of(probe, about) for probe, about in extra_metrics(published)]
    for one in (*COLUMNS, *(one for one in further if (one.probe, one.metric) not in known)):
        lengths = set(published.lengths(one.probe, one.metric)) & {
            *data.lengths(one.probe, one.metric),
            *(length for probe, length in data.requested if probe == one.probe),
        }
        for length in sorted(lengths):
            name = f"{one.heading}@{format_length(length)}" if length else one.heading
            columns.append(replace(one, heading=name, length=length))
    return columns


def _judge(pair: Match, column: Column, left: TableEntry, right: TableEntry, spread: Spread | None) -> NumberComparison:
    difference = left.value - right.value if left.value is not None and right.value is not None else None
    limit = None
    if spread is not None:
        # how far two means lie apart by chance, at most, with 95%; at least a printed digit
        error, df = _error(left, right, spread)
        reach = float(special.stdtrit(df, 1 - ALPHA / 2)) * error if error else 0.0
        limit = max(reach, 10.0**-column.decimals / (100 if column.percent else 1))
    levels = tuple(pair.theirs[0].levels[axis] for axis in AXES)
    return NumberComparison(
        levels=levels,
        column=column,
        measured=left,
        published=right,
        difference=difference,
        spread=spread,
        limit=limit,
    )


def _error(measured: TableEntry, published: TableEntry, spread: Spread) -> tuple[float, float]:
    """Return the standard error of the difference of two means, and its degrees of freedom."""
    here, there = max(measured.seeds, 1), max(published.seeds, 1)
    if spread.kind != PRINTED or measured.sd is None or here < 2:
        return spread.used * math.sqrt(1 / here + 1 / there), spread.df
    parts = (measured.sd**2 / here, spread.sd**2 / there)
    if not sum(parts):
        return 0.0, spread.df
    return math.sqrt(sum(parts)), sum(parts) ** 2 / (parts[0] ** 2 / (here - 1) + parts[1] ** 2 / (there - 1))


def _with_run_test(comparison: NumberComparison, data: SweepData, pair: Match) -> NumberComparison:
    """Return the comparison with a printed mean over runs with its p; judged by the trials of a seed where all runs are equal."""
    spread, measured, published = comparison.spread, comparison.measured, comparison.published
    if spread is None or comparison.difference is None or measured.value is None or published.value is None:
        return comparison
    if spread.sd > 0:
        error, df = _error(measured, published, spread)
        return replace(comparison, p=2 * float(special.stdtr(df, -abs(comparison.difference) / error)))
    p = exchanged(data.numbers(pair.mine, comparison.column), published.value, published.seeds)
    counts = [
        independent_trials(value, data.values)
        for cell in pair.mine
        if (value := data.given(cell, comparison.column)) is not None
    ]
    positive = [n for n in counts if n]
    if not positive:
        return replace(comparison, p=p)
    low, high = of_trials(measured.value, min(positive))
    limit = max(
        high - measured.value if comparison.difference < 0 else measured.value - low,
        10.0**-comparison.column.decimals / 100,
    )
    return replace(comparison, p=p, limit=limit)


def _has_equal_runs(comparison: NumberComparison) -> bool:
    """Return whether it is tested against printed runs that all have the same number."""
    return comparison.p is not None and comparison.spread is not None and not comparison.spread.sd


def exchanged(seeds: Sequence[float], value: float, runs: int) -> float:
    """Return the p of the difference between the mean of `seeds` and that of `runs` runs that all have `value`: the share of all
    ways to deal these numbers to both sides whose means lie at least as far apart."""
    numbers = [*seeds, *[value] * runs]
    total, size = math.fsum(numbers), len(seeds)

    def apart(group: Sequence[float]) -> float:
        part = math.fsum(group)
        return abs(part / size - (total - part) / runs)

    least = apart(seeds) - SAME * max(map(abs, numbers))
    return fmean(apart(group) >= least for group in combinations(numbers, size))


def compare_table(
    store: Store, data: SweepData, *, reference: str = paper.SWEEPS[1], table: str | None = None
) -> Table:
    """Measured, published and difference side by side, one row a number, with a verdict and what to beware of.

    `table` keeps the numbers that this table of the paper prints. Raises as `compared` does.
    """
    home = store_with_builtin(store, reference)
    published = load_sweep_data(home, reference)
    both = compared(ComparedSweep(store, data), ComparedSweep(home, published))
    found = list(both.numbers)
    if table is not None:
        found = _in_table(found, published, table)
    tested = any(comparison.p is not None for comparison in found)
    lines = [_line(one, both.axes, tested) for one in found]
    notes = [
        sweep_note(data),
        f"Published: {reference}, the authors' logs where there are any. Limit: the largest difference that the spread between "
        "runs of the same mixer and memory explains (95%), at least a printed digit and what the trials of an accuracy explain.",
        *([WELCH_NOTE] if tested else []),
        *([ALIKE] if any(_has_equal_runs(comparison) for comparison in found) else []),
        *seed_notes([[one.measured] for one in found], max((len(one.measured.cells) for one in found), default=0)),
        *([needle_note(published)] if any(one.column.probe == "needle" for one in found) else []),
        *([f"Unlike {reference}: {'; '.join(one.text for one in both.differences)}."] if both.differences else []),
        *(f"{one[0].upper()}{one[1:]}." for one in both.unrecorded),
        *(
            _count_note(name, [one for one in found if one.column.heading == name])
            for name in dict.fromkeys(one.column.heading for one in found)
        ),
        *facts_besides(reference),
    ]
    flagged = {flag for one in found for flag in one.flags}
    if flagged:
        notes.append(f"{len(flagged)} printed numbers contradict the authors' own logs; compared is the log.")
    title = f"Sweep {data.sweep}, revision {data.revision}, beside {reference}"
    headings = (*AXIS_HEADINGS, *both.axes, "Measure", "Verdict", "Beware")
    numbers = ("Measured", "Published", "Difference", "Limit", *(("p",) if tested else ()))
    options = {"reference": reference} | ({"table": table} if table is not None else {})
    return build_table(
        data, "compare", title, headings, lines, numbers=numbers, notes=notes, options=options,
        above=refused(both.differences, found), names_sweep=False,
    )  # fmt: skip


def refused(unlike: Sequence[RecipeDifference], found: Sequence[NumberComparison]) -> tuple[str, ...]:
    """One line for what is not judged, and why."""
    whole = [one.text for one in unlike if one.probes is None]
    if whole:
        more = f"; and {len(whole) - SHOWN} more below" if len(whole) > SHOWN else ""
        return (f"Not judged, since the sweeps are not of one kind: {'; '.join(whole[:SHOWN])}{more}.",)
    parts = []
    for probe in dict.fromkeys(one.column.probe for one in found):
        why = [one.text for one in unlike if one.touches(probe)]
        if why:
            names = dict.fromkeys(one.column.heading.partition("@")[0] for one in found if one.column.probe == probe)
            parts.append(f"{', '.join(names)} ({'; '.join(why)})")
    return (f"Not judged: {'; '.join(parts)}.",) if parts else ()


def _in_table(found: Sequence[NumberComparison], published: SweepData, table: str) -> list[NumberComparison]:
    printed = {(cell, *rest) for cell, number, *rest in published.printed if number == table}
    if not printed:
        raise ReportError(
            f"{published.sweep} has no printed numbers of table {table}; leave --table out to compare all"
        )

    def inside(one: NumberComparison) -> bool:
        return any((cell, *one.column.key) in printed for cell in one.published.cells)

    return [one for one in found if inside(one)]


def _count_note(name: str, some: Sequence[NumberComparison]) -> str:
    count = Counter(one.verdict for one in some)
    judged = count[WITHIN] + count[BEYOND]
    if not judged:
        return f"{name}: not judged."
    told = f"{count[WITHIN]} within the known spread, {count[BEYOND]} beyond, where chance alone puts {format_number(ALPHA * judged, 1)}"
    return f"{name}: {told}" + (f"; {count[UNKNOWN]} not judged." if count[UNKNOWN] else ".")


def _line(one: NumberComparison, axes: Sequence[str], tested: bool) -> TableRow:
    """Return the row of a comparison, with its p where any of the table has one (`tested`)."""
    column = one.column
    base = difference(column, "Difference", one.difference)
    limit = "-" if one.limit is None else format_number(one.limit, column.decimals, percent=column.percent)
    # the published attempts may be those of another database: their cells alone have a name that holds everywhere
    origins = tuple((cell, None) for cell in one.published.cells)
    entries = (
        replace(one.measured, heading="Measured"),
        replace(one.published, heading="Published", origins=origins),
        base,
        replace(base, text=limit, heading="Limit", value=one.limit),
        *((p_value_entry("p", math.nan if one.p is None else one.p),) if tested else ()),
    )
    words = (*one.levels, *one.further, column.heading, one.verdict, "; ".join(one.flags) or "-")
    about = dict(zip((*AXES, *axes), (*one.levels, *one.further), strict=True))
    about |= {"measure": column.heading, "verdict": one.verdict}
    return TableRow(words=words, entries=entries, about=about | {"flags": list(one.flags)})


# --- sentences of the papers ------------------------------------------------------------------------------------------


ABOUT_CLAIMS = (
    "Every verdict is worked out from the numbers of this sweep. 64K stands for its longest context length. Weak: of the test of "
    f"signs and Student's t one alone is below {ALPHA}; not shown: neither. Differs: the sweep has another number. Not asked: "
    "neither a cell that is compared nor the mean of a side answers more of the needle's digits than always the same digit does by more "
    "than chance (5% over all cells, and over all means). Needle in %, losses in nats per token."
)


def claims_table(store: Store, data: SweepData) -> Table:
    """The sentences of the paper, each with a verdict and the numbers that decide it; of what a sweep has no cell for, that."""
    lines = []
    counts: Counter[str] = Counter()
    asked = claims_for(ClaimFacts(data))
    for claim in asked:
        facts = ClaimFacts(data)
        answer = claim.asked_of(facts)
        silent = answer.verdict == SILENT
        counts["cannot be said" if silent else answer.verdict] += 1
        about = {"claim": claim.name, "verdict": answer.verdict, "numbers": dict(answer.numbers)}
        origins = () if silent else tuple(facts.read)
        words = (claim.sentence, answer.verdict, answer.told)
        lines.append(TableRow(words=words, origins=origins, about=about))
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    notes = [sweep_note(data), f"{len(asked)} sentences: {told}.", ABOUT_CLAIMS]
    title = "Sentences of the paper against the numbers"
    return build_table(data, "claims", title, ("Sentence", "Verdict", "Numbers"), lines, notes=notes, paged=True)
