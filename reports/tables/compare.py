"""Tables `compare` and `claims`.

A sweep against a reference sweep number by number, and against the papers' claims.
"""

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
from ...results.intervals import wilson_of_trials
from ...results.store.records import AXES
from ...results.store.store import Store
from ..number_format import Column, column_of, format_length, format_number
from ..result_columns import AXIS_HEADINGS, extra_metrics
from ..stats.claims.paper_claims import CANNOT_SAY, NOT_SHOWN, ClaimFacts
from ..stats.claims.rival_claims import claims_for
from ..stats.effects.effect_types import AT_CHANCE_VERDICT
from ..stats.effects.needle_baseline import needle_note
from ..stats.noise.best_probability import noise_with_pooled_fallback, stratum_of
from ..stats.noise.run_noise import NoiseEstimate
from ..stats.significance.paired_tests import ALPHA
from ..stats.significance.trial_intervals import independent_trials
from ..stats.sweep_differences import (
    ComparedSweep,
    Match,
    RecipeDifference,
    further_axes,
    match_configurations,
    recipe_differences,
)
from ..sweep_data import ReportError, SweepData, load_sweep_data
from ..table import Table, TableEntry
from ..table_builder import (
    TableRow,
    build_table,
    difference_entry,
    measured_entry,
    p_value_entry,
    seed_notes,
    sweep_note,
)
from .paper_rows import printed_discrepancies
from .paper_tables import TRAIN_SECONDS
from .task_tables import printed_fact_notes

COLUMNS = (
    column_of("val", "val_loss"),
    column_of("clean", "nats"),
    column_of("junk", "nats"),
    column_of("needle", "digit_accuracy"),
    column_of("throughput", "mfu_paper"),
)
MAX_LISTED = 8  # differences listed in the line above the table
WITHIN, BEYOND, UNKNOWN = "within", "beyond", "-"
PRINTED = "printed"
"""Kind of a spread that is printed with a mean."""
WELCH_NOTE = (
    "For a published mean with a standard deviation over runs, the limit is that of Welch's t test "
    "with the spread of the seeds here and of the runs there; with a single seed here, the spread of "
    "the runs alone. p is of the same test."
)
EQUAL_RUNS_NOTE = (
    "Where all published runs have the same number, the limit is what the sequences of a seed explain "
    "(Wilson), and p is of a permutation of the seeds here and the runs there: at least 1 in 5 for one "
    "seed and four runs. There, beyond means that this run differs from the published number, not that "
    "other seeds would."
)
TIE_TOLERANCE = 1e-9  # relative to the largest number: statistics of exchanged runs that are this close count as equal


@dataclass(frozen=True, kw_only=True)
class NumberComparison:
    """A number of the sweep and of the reference, in its own unit (shares as fractions).

    `levels` are those of the five AXES. `measured` may lack a value, where the sweep has requested the number but not
    measured it. `difference` is measured minus published; None without a measured value. `spread` is the noise between
    runs that gives the limit; None where it is unknown or where the number must not be judged. `limit` is the largest
    absolute difference that the spread explains (95 %); None without a spread. `flags` are sentences that say where the
    paper prints another number than its authors' logs give. `p` belongs to the difference; None unless the reference
    prints a mean over runs with its standard deviation.
    """

    levels: tuple[str, ...]
    column: Column
    measured: TableEntry
    published: TableEntry
    difference: float | None
    spread: NoiseEstimate | None
    limit: float | None
    flags: tuple[str, ...] = ()
    p: float | None = None
    further: tuple[str, ...] = ()
    """Levels of the further axes that tell matched configurations apart."""

    @property
    def verdict(self) -> str:
        """Verdict: "within" or "beyond" the limit; "-" where there is no difference or no limit."""
        if self.difference is None or self.limit is None:
            return UNKNOWN
        return WITHIN if abs(self.difference) <= self.limit * (1 + 1e-9) else BEYOND


@dataclass(frozen=True, kw_only=True)
class SweepComparison:
    """Numbers of the configurations that two sweeps have in common, and the differences of their recipes.

    `numbers` has those that the reference has and this sweep has measured or requested (see `compare_sweeps`).
    `unrecorded` are sentences on settings that one of the sweeps did not record.
    """

    numbers: Sequence[NumberComparison]
    differences: Sequence[RecipeDifference]
    unrecorded: Sequence[str]
    axes: tuple[str, ...] = ()
    """The extra axes in which matched configurations differ."""
    substitutes: Sequence[str] = ()
    """Sentences on configurations whose mixer the reference leaves open."""


def compare_sweeps(mine: ComparedSweep, theirs: ComparedSweep) -> SweepComparison:
    """Compare two sweeps number by number, over the configurations that both have.

    There is one comparison per matched configuration and column for which the reference has a number. Columns are
    validation, clean and junk loss, needle accuracy, MFU and extra metrics of the reference, at every length that the
    reference has and this sweep has or requests. A number that this sweep has only requested at that length, and any
    missing throughput, is an entry too, without a measured value, difference or verdict. Comparisons are in the order
    of the matches, then of the columns.

    The reference number is the authors' log where there is one, else the printed number. The limit is t(0.975, df) sd
    sqrt(1/k + 1/m) for the means of k and m seeds. The spread sd is that between runs of the same stratum (cells that
    share mixer and memory) in the reference, pooled over its strata where a stratum has no replicates. Where the
    reference has no spread of the number, it is that of this sweep. The limit of an accuracy is at least what its
    trials explain, and every limit is at least one printed digit. Where a mean is printed with the standard deviation
    of its m runs, the limit is Welch's of both sides' spreads, or that of the printed one for a single seed. Where the
    printed deviation is 0, the limit is what the trials of a seed explain. A number that a recipe difference affects
    has neither spread, limit nor verdict.

    Args:
        mine: The sweep.
        theirs: The reference sweep.

    Raises:
        ReportError: The sweeps have no number of a common configuration.
    """
    data, published = mine.data, theirs.data
    pairs = match_configurations(data, published)
    unlike, unrecorded = recipe_differences(mine, theirs, [(pair.own_cells, pair.reference_cells) for pair in pairs])
    flags = {
        (discrepancy.cell, discrepancy.probe, discrepancy.metric, discrepancy.length): discrepancy.text
        for discrepancy in printed_discrepancies(published)
    }
    columns = _common_columns(data, published)
    judged = {
        column: not any(recipe_difference.affects_probe(column.probe) for recipe_difference in unlike)
        for column in columns
    }
    spreads = {
        column: {**noise_with_pooled_fallback(data, column), **noise_with_pooled_fallback(published, column)}
        if judged[column]
        else {}
        for column in columns
    }
    extra = further_axes(data, published)
    axes = tuple(axis for axis in extra if len({pair.further[axis] for pair in pairs}) > 1)
    comparisons = []
    for pair in pairs:
        for column in columns:
            right, measured = (
                measured_entry(published, pair.reference_cells, column),
                measured_entry(data, pair.own_cells, column),
            )
            if right.value is None or (
                measured.value is None
                and not ((column.probe, column.length) in data.requested or column.probe == "throughput")
            ):
                continue
            keys = [(cell.cell_id, *column.key) for cell in pair.reference_cells]
            spread = spreads[column].get(stratum_of(pair.reference_cells[0]))
            if judged[column] and (printed := _printed_spread(published, pair, column)) is not None:
                spread = printed
            comparison = _judged_comparison(pair, column, measured, right, spread)
            if comparison.spread is not None and comparison.spread.kind == PRINTED:
                comparison = _with_run_test(comparison, data, pair)
            discrepancy_texts = tuple(flags[key] for key in keys if key in flags)
            comparisons.append(
                replace(comparison, flags=discrepancy_texts, further=tuple(pair.further[axis] for axis in axes))
            )
    if not comparisons:
        why = f" (further axes vary: {', '.join(extra)})" if extra else ""
        raise ReportError(
            f"sweeps {data.sweep} and {published.sweep} have no number of a common configuration{why}; choose "
            "others with --sweep"
        )
    return SweepComparison(
        numbers=comparisons, differences=unlike, unrecorded=unrecorded, axes=axes, substitutes=_substitute_notes(pairs)
    )


def _substitute_notes(pairs: Sequence[Match]) -> list[str]:
    """Return a sentence for each pair of matched configurations whose mixers differ."""
    return [
        f"{pair.reference_cells[0].slug} is compared with {pair.own_cells[0].slug}: its source leaves the mixer open."
        for pair in pairs
        if pair.own_cells[0].levels["attn_type"] != pair.reference_cells[0].levels["attn_type"]
    ]


def _printed_spread(published: SweepData, pair: Match, column: Column) -> NoiseEstimate | None:
    """Return the standard deviation that is printed with a mean over at least two runs, as a spread of kind PRINTED.

    Its degrees of freedom are the runs minus 1. None where no deviation is printed, or the mean is over fewer runs.

    Args:
        published: The reference sweep.
        pair: Matched configuration; the first of its reference cells is looked up.
        column: The number.
    """
    printed_spread = published.printed_spread(pair.reference_cells[0], column)
    if printed_spread is None or printed_spread[1] is None or printed_spread[0] < 2:
        return None
    return NoiseEstimate(PRINTED, printed_spread[1], printed_spread[0] - 1, 1)


def _common_columns(data: SweepData, published: SweepData) -> list[Column]:
    """Return the columns to compare: one per number and length, with the length in its heading ("Ndl@2K").

    They are validation loss, clean loss, junk loss, needle accuracy, MFU by the paper's formula (of a published sweep
    without it: the time of training), and then extra metrics of the reference. Each comes at the lengths that the reference has and that this sweep has or requests, ascending.
    Numbers without a length have length 0. A number that the reference lacks has no column.

    Args:
        data: This sweep.
        published: The reference sweep.
    """
    columns = []
    standard_keys = {(column.probe, column.metric) for column in COLUMNS}
    seconds = (
        [TRAIN_SECONDS]
        if paper.is_published(published.sweep) and not published.lengths("throughput", "mfu_paper")
        else []
    )
    further = [column_of(probe, metric) for probe, metric in extra_metrics(published)]
    for column in (
        *COLUMNS,
        *seconds,
        *(
            metric_column
            for metric_column in further
            if (metric_column.probe, metric_column.metric) not in standard_keys
        ),
    ):
        lengths = set(published.lengths(column.probe, column.metric)) & {
            *data.lengths(column.probe, column.metric),
            *(length for probe, length in data.requested if probe == column.probe),
        }
        for length in sorted(lengths):
            name = f"{column.heading}@{format_length(length)}" if length else column.heading
            columns.append(replace(column, heading=name, length=length))
    return columns


def _judged_comparison(
    pair: Match, column: Column, measured: TableEntry, published: TableEntry, spread: NoiseEstimate | None
) -> NumberComparison:
    """Return the comparison of one number, with its difference where both are known and its limit where a spread is.

    The limit is the 95 % quantile of |t| times the standard error of the difference, and at least one printed digit.

    Args:
        pair: Matched configuration; its first reference cell gives the levels.
        column: The number.
        measured: Entry of this sweep; may lack a value.
        published: Entry of the reference.
        spread: Noise between runs; None: the number is not judged.
    """
    difference = (
        measured.value - published.value if measured.value is not None and published.value is not None else None
    )
    limit = None
    if spread is not None:
        # the largest difference of two means by chance (95%), and at least one printed digit
        error, df = _difference_error(measured, published, spread)
        reach = float(special.stdtrit(df, 1 - ALPHA / 2)) * error if error else 0.0
        limit = max(reach, 10.0**-column.decimals / (100 if column.percent else 1))
    levels = tuple(pair.reference_cells[0].levels[axis] for axis in AXES)
    return NumberComparison(
        levels=levels,
        column=column,
        measured=measured,
        published=published,
        difference=difference,
        spread=spread,
        limit=limit,
    )


def _difference_error(measured: TableEntry, published: TableEntry, spread: NoiseEstimate) -> tuple[float, float]:
    """Return the standard error of the difference of two means, and its degrees of freedom.

    For a printed spread and at least two seeds here both are Welch's, from the standard deviations of both sides; the
    error is 0.0 where both are 0. Otherwise the error is sd sqrt(1/k + 1/m) of the spread's effective sd for k seeds
    here and m there, with the spread's degrees of freedom.
    """
    measured_seeds, published_seeds = max(measured.seeds, 1), max(published.seeds, 1)
    if spread.kind != PRINTED or measured.sd is None or measured_seeds < 2:
        return spread.effective_sd * math.sqrt(1 / measured_seeds + 1 / published_seeds), spread.df
    parts = (measured.sd**2 / measured_seeds, spread.sd**2 / published_seeds)
    if not sum(parts):
        return 0.0, spread.df
    return math.sqrt(sum(parts)), sum(parts) ** 2 / (
        parts[0] ** 2 / (measured_seeds - 1) + parts[1] ** 2 / (published_seeds - 1)
    )


def _with_run_test(comparison: NumberComparison, data: SweepData, pair: Match) -> NumberComparison:
    """Return the comparison with the two-sided p value of its difference against printed runs.

    It is returned unchanged where spread, difference or a value is missing. For a positive printed deviation p is that
    of t, as in the limit. Where all printed runs are equal, p is that of `exchange_p_value`; the limit becomes the
    distance from the measured value to its 95 % Wilson bound on the side of the published one, with the fewest trials
    of any seed, and at least one printed digit. Without a known number of trials the limit stays.

    Args:
        comparison: A comparison whose spread is a printed one.
        data: This sweep.
        pair: Matched configuration, whose own cells are the seeds.
    """
    spread, measured, published = comparison.spread, comparison.measured, comparison.published
    if spread is None or comparison.difference is None or measured.value is None or published.value is None:
        return comparison
    if spread.sd > 0:
        error, df = _difference_error(measured, published, spread)
        return replace(comparison, p=2 * float(special.stdtr(df, -abs(comparison.difference) / error)))
    p = exchange_p_value(data.column_numbers(pair.own_cells, comparison.column), published.value, published.seeds)
    counts = [
        independent_trials(value, data.values)
        for cell in pair.own_cells
        if (value := data.measured_value(cell, comparison.column)) is not None
    ]
    positive = [n for n in counts if n]
    if not positive:
        return replace(comparison, p=p)
    low, high = wilson_of_trials(measured.value, min(positive))
    limit = max(
        high - measured.value if comparison.difference < 0 else measured.value - low,
        10.0**-comparison.column.decimals / 100,
    )
    return replace(comparison, p=p, limit=limit)


def _has_equal_runs(comparison: NumberComparison) -> bool:
    """Return whether the number was tested against printed runs that all have the same number."""
    return comparison.p is not None and comparison.spread is not None and not comparison.spread.sd


def exchange_p_value(seeds: Sequence[float], value: float, runs: int) -> float:
    """Return the p value of an exchange test between seeds and printed runs that all have the same number.

    It is the share of all assignments of the numbers to groups of these two sizes, the observed one included, whose
    means lie at least as far apart (two-sided; nearly equal distances count as equal).

    Args:
        seeds: Numbers of the seeds; at least one.
        value: Number of every printed run.
        runs: Count of printed runs; at least one.
    """
    numbers = [*seeds, *[value] * runs]
    total, size = math.fsum(numbers), len(seeds)

    def mean_gap(group: Sequence[float]) -> float:
        part = math.fsum(group)
        return abs(part / size - (total - part) / runs)

    least = mean_gap(seeds) - TIE_TOLERANCE * max(map(abs, numbers))
    return fmean(mean_gap(group) >= least for group in combinations(numbers, size))


def compare_table(
    store: Store, data: SweepData, *, reference: str = paper.SWEEPS[1], table: str | None = None
) -> Table:
    """Return the table `compare`: one row per compared number, in the order of `compare_sweeps`.

    Label columns: the five axes, extra axes that tell matched configurations apart, Measure, Verdict (within, beyond or
    "-") and Beware (flags). Number columns: Measured, Published, Difference, Limit, and p if any row has one. A number
    that is requested but not measured has a row with a placeholder. A line above the table says what is not judged and
    why.

    Args:
        store: The database.
        data: The sweep.
        reference: Name of the reference sweep, of the database or built in.
        table: Number of a table of the paper: only numbers that it prints are shown; None: all.

    Raises:
        ReportError: The sweeps have no number in common, or the reference has no printed numbers of `table`.
    """
    home = store_with_builtin(store, reference)
    published = load_sweep_data(home, reference)
    both = compare_sweeps(ComparedSweep(store, data), ComparedSweep(home, published))
    comparisons = list(both.numbers)
    if table is not None:
        comparisons = _comparisons_in_table(comparisons, published, table)
    tested = any(comparison.p is not None for comparison in comparisons)
    lines = [_comparison_row(comparison, both.axes, tested) for comparison in comparisons]
    notes = [
        sweep_note(data),
        f"Published: {reference}, from the authors' logs where available. Limit: the largest difference "
        "that the spread between runs of the same mixer and memory explains (95%), at least a printed "
        "digit and the sampling error of an accuracy's trials.",
        *both.substitutes,
        *([WELCH_NOTE] if tested else []),
        *([EQUAL_RUNS_NOTE] if any(_has_equal_runs(comparison) for comparison in comparisons) else []),
        *seed_notes(
            [[comparison.measured] for comparison in comparisons],
            max((len(comparison.measured.cells) for comparison in comparisons), default=0),
        ),
        *([needle_note(published)] if any(comparison.column.probe == "needle" for comparison in comparisons) else []),
        *(
            [
                f"Differences from {reference}: "
                f"{'; '.join(recipe_difference.text for recipe_difference in both.differences)}."
            ]
            if both.differences
            else []
        ),
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in both.unrecorded),
        *(
            _count_note(name, [comparison for comparison in comparisons if comparison.column.heading == name])
            for name in dict.fromkeys(comparison.column.heading for comparison in comparisons)
        ),
        *printed_fact_notes(reference),
    ]
    flagged = {flag for comparison in comparisons for flag in comparison.flags}
    if flagged:
        notes.append(f"{len(flagged)} printed numbers contradict the authors' own logs; the log is compared.")
    title = f"Sweep {data.sweep}, revision {data.revision}, compared with {reference}"
    headings = (*AXIS_HEADINGS, *both.axes, "Measure", "Verdict", "Beware")
    numbers = ("Measured", "Published", "Difference", "Limit", *(("p",) if tested else ()))
    options = {"reference": reference} | ({"table": table} if table is not None else {})
    return build_table(
        data, "compare", title, headings, lines, numbers=numbers, notes=notes, options=options,
        above=not_judged_lines(both.differences, comparisons), names_sweep=False,
    )  # fmt: skip


def not_judged_lines(unlike: Sequence[RecipeDifference], comparisons: Sequence[NumberComparison]) -> tuple[str, ...]:
    """Return the line on numbers that are not judged, as a tuple of one text; empty if all are judged.

    Differences that affect all probes give one line for the whole sweep, which lists the first eight and counts the
    others. Otherwise the line names the measures of each affected probe with their differences.

    Args:
        unlike: Differences of the recipes.
        comparisons: The comparisons that the table shows, which give the measures.
    """
    sweep_level_texts = [recipe_difference.text for recipe_difference in unlike if recipe_difference.probes is None]
    if sweep_level_texts:
        more = f"; and {len(sweep_level_texts) - MAX_LISTED} more below" if len(sweep_level_texts) > MAX_LISTED else ""
        return (f"Not judged, since the sweeps differ in kind: {'; '.join(sweep_level_texts[:MAX_LISTED])}{more}.",)
    parts = []
    for probe in dict.fromkeys(comparison.column.probe for comparison in comparisons):
        why = [recipe_difference.text for recipe_difference in unlike if recipe_difference.affects_probe(probe)]
        if why:
            names = dict.fromkeys(
                comparison.column.heading.partition("@")[0]
                for comparison in comparisons
                if comparison.column.probe == probe
            )
            parts.append(f"{', '.join(names)} ({'; '.join(why)})")
    return (f"Not judged: {'; '.join(parts)}.",) if parts else ()


def _comparisons_in_table(
    comparisons: Sequence[NumberComparison], published: SweepData, table: str
) -> list[NumberComparison]:
    """Return the comparisons whose reference number is printed in a table of the paper, in their order.

    Args:
        comparisons: All comparisons.
        published: The reference sweep.
        table: Number of the table.

    Raises:
        ReportError: The published sweep has no printed numbers of that table.
    """
    printed = {(cell, *rest) for cell, number, *rest in published.printed if number == table}
    if not printed:
        raise ReportError(f"{published.sweep} has no printed numbers of table {table}; remove --table to compare all")

    def inside(comparison: NumberComparison) -> bool:
        return any((cell, *comparison.column.key) in printed for cell in comparison.published.cells)

    return [comparison for comparison in comparisons if inside(comparison)]


def _count_note(name: str, comparisons: Sequence[NumberComparison]) -> str:
    """Return the note that counts the verdicts of one measure, with the number of "beyond" expected by chance (5 %).

    A measure without a verdict gives "<name>: not judged."

    Args:
        name: Heading of the measure.
        comparisons: Its comparisons.
    """
    count = Counter(comparison.verdict for comparison in comparisons)
    judged = count[WITHIN] + count[BEYOND]
    if not judged:
        return f"{name}: not judged."
    counts = (
        f"{count[WITHIN]} within the known spread, {count[BEYOND]} beyond "
        f"({format_number(ALPHA * judged, 1)} expected by chance)"
    )
    return f"{name}: {counts}" + (f"; {count[UNKNOWN]} not judged." if count[UNKNOWN] else ".")


def _comparison_row(comparison: NumberComparison, axes: Sequence[str], tested: bool) -> TableRow:
    """Return the table row of a comparison.

    Labels: the five levels, the levels of `axes`, measure, verdict, and the flags ("-" without any). Entries: Measured,
    Published, Difference, Limit ("-" if None), and p if `tested`. JSON fields: the levels by axis, measure, verdict and
    flags. The published entry names cells without attempts, which may be of another database.

    Args:
        comparison: The comparison.
        axes: Extra axes, in the order of `comparison.further`.
        tested: Whether the table has the column p; a comparison without p has "-" there.
    """
    column = comparison.column
    base = difference_entry(column, "Difference", comparison.difference)
    limit = (
        "-" if comparison.limit is None else format_number(comparison.limit, column.decimals, percent=column.percent)
    )
    # attempts of the reference may be of another database; only the cells' ids are valid in this one
    origins = tuple((cell, None) for cell in comparison.published.cells)
    entries = (
        replace(comparison.measured, heading="Measured"),
        replace(comparison.published, heading="Published", origins=origins),
        base,
        replace(base, text=limit, heading="Limit", value=comparison.limit),
        *((p_value_entry("p", math.nan if comparison.p is None else comparison.p),) if tested else ()),
    )
    labels = (
        *comparison.levels,
        *comparison.further,
        column.heading,
        comparison.verdict,
        "; ".join(comparison.flags) or "-",
    )
    json_fields = dict(zip((*AXES, *axes), (*comparison.levels, *comparison.further), strict=True))
    json_fields |= {"measure": column.heading, "verdict": comparison.verdict}
    return TableRow(labels=labels, entries=entries, json_fields=json_fields | {"flags": list(comparison.flags)})


# --- sentences of the papers ------------------------------------------------------------------------------------------


CLAIMS_NOTE = (
    "Verdicts are computed from the numbers of this sweep; 64K stands for its longest context length. "
    f"Weak: only one of the sign test and Student's t test is below {ALPHA}; {NOT_SHOWN}: neither is. "
    f"Differs: the sweep has another number. {AT_CHANCE_VERDICT.partition(':')[0].capitalize()}: no "
    "compared cell and no mean of a side is above the constant-digit baseline of the needle by more "
    "than chance (5% over all cells, and over all means). Needle in %, losses in nats per token."
)


def claims_table(store: Store, data: SweepData) -> Table:
    """Return the table `claims`: one row per claim of the papers, with its verdict and the numbers that decide it.

    Columns: Sentence, Verdict, Numbers (an explanation in words). JSON fields: claim (name), verdict, numbers (by name,
    shares as fractions). The claims are those of `claims_for`: of each paper whose probes the sweep has. A claim that
    the sweep lacks data for has the verdict "cannot say" with what is missing, and no origins. `store` is not used.
    """
    lines = []
    counts: Counter[str] = Counter()
    claims = claims_for(ClaimFacts(data))
    for claim in claims:
        facts = ClaimFacts(data)
        answer = claim.decide(facts)
        silent = answer.verdict == CANNOT_SAY
        counts["not decidable" if silent else answer.verdict] += 1
        json_fields = {"claim": claim.name, "verdict": answer.verdict, "numbers": dict(answer.numbers)}
        origins = () if silent else tuple(facts.read)
        labels = (claim.sentence, answer.verdict, answer.explanation)
        lines.append(TableRow(labels=labels, origins=origins, json_fields=json_fields))
    verdict_counts = ", ".join(f"{count} {verdict.partition(':')[0]}" for verdict, count in counts.most_common())
    notes = [sweep_note(data), f"{len(claims)} claims: {verdict_counts}.", CLAIMS_NOTE]
    title = "Checking the paper's claims"
    return build_table(data, "claims", title, ("Sentence", "Verdict", "Numbers"), lines, notes=notes, paged=True)
