"""Table `power`: required sample size (matched pairs) by mixer and memory."""

from __future__ import annotations

import math

from ...results.store.store import Store
from ..number_format import Column, format_number
from ..stats.power_analysis import LOSS_DIFFERENCES, MAX_PAIRS, SHARE_DIFFERENCES, PowerAnalysis, power_analyses
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import EMPTY_TEXT, TableRow, build_table, count_entry, number_entry, sweep_note

HEADINGS = tuple(
    f"{100 * points:g} pt / {nats:g}" for points, nats in zip(SHARE_DIFFERENCES, LOSS_DIFFERENCES, strict=True)
)
NOTES = (
    "sd: standard deviation between replicates of the same mixer and memory, pooled; Floor: sampling "
    "error of an accuracy's trials (binomial, by Jeffreys), used where it is larger. df: degrees of "
    "freedom of the sd.",
    "1 pair, n pairs: smallest difference that a test at 5% (two-sided) detects with 80% power. 1 pair: one "
    "difference, judged by the sd between replicates. n pairs: Student's t over the largest number of pairs that the "
    "grid has for two levels of one axis (Pairs).",
    "{}: pairs required for a difference of so many percentage points (losses: nats per token). The "
    "numbers allow for the uncertainty of the sd (df) and of the pairs' own estimate of it. They "
    "assume the same effect in every pair; an effect that varies requires more.",
)


def power_table(store: Store, data: SweepData) -> Table:
    """Return the table `power`: one row per number and stratum (cells that share mixer and memory) with a spread.

    It shows the standard deviation between runs, the smallest difference that one pair and the sweep's own pairs detect
    with 80 % power, and the pairs needed for differences of 5, 10 and 20 points (of losses 0.01, 0.02 and 0.05 nats per
    token). Without seeds or near-replicates (runs of one seed that differ in a regularizer of negligible weight alone)
    it has no rows and a note. `store` is not used.
    """
    analyses = power_analyses(data)
    lines = [
        TableRow(
            labels=(analysis.measure.heading, *analysis.stratum),
            entries=_analysis_entries(analysis),
            origins=analysis.origins,
        )
        for analysis in analyses
    ]
    notes = [sweep_note(data)]
    if analyses:
        kinds = " and ".join(dict.fromkeys(analysis.spread.kind for analysis in analyses))
        notes += [f"Spread between {kinds}.", *(note.format(", ".join(HEADINGS)) for note in NOTES)]
    else:
        notes.append(
            "The required sample size is unknown: the sweep has neither several seeds nor near-replicates (cells of one seed that differ "
            "only in a regularizer of negligible weight). Set "
            "`seeds: 3` in its grid."
        )
    title = "Required sample size"
    numbers = ("sd", "Floor", "df", "Pairs", "1 pair", "n pairs", *HEADINGS)
    return build_table(data, "power", title, ("Measure", "Type", "Mem"), lines, numbers=numbers, notes=notes)


def _analysis_entries(analysis: PowerAnalysis) -> tuple[TableEntry, ...]:
    """Return the entries of a row: sd, floor, df, pairs, differences that 1 and n pairs detect, one per HEADINGS.

    A floor of 0 prints as "-". The pairs needed print as ">1048576", without a value, beyond that number (MAX_PAIRS).
    They print as "-" where the spread is 0 or the number has no planned differences.
    """
    amounts = {
        "sd": analysis.spread.sd,
        "Floor": analysis.spread.floor,
        "1 pair": analysis.detectable_one_pair,
        "n pairs": analysis.detectable_all_pairs,
    }
    entries = {name: _amount_entry(analysis.measure, name, value) for name, value in amounts.items()}
    if not analysis.spread.floor:
        entries["Floor"] = TableEntry(text=EMPTY_TEXT, heading="Floor")
    counts = {"df": analysis.spread.df, "Pairs": analysis.pairs}
    entries |= {name: count_entry(name, n) for name, n in counts.items()}
    needed = dict.fromkeys(HEADINGS, None) | dict(zip(HEADINGS, analysis.needed, strict=False))
    for name, n in needed.items():
        if not analysis.differences or not analysis.spread.effective_sd:
            entries[name] = TableEntry(text=EMPTY_TEXT, heading=name)
        else:
            text = f">{MAX_PAIRS}" if n is None else str(n)
            entries[name] = TableEntry(text=text, heading=name, value=None if n is None else float(n))
    return tuple(entries[name] for name in ("sd", "Floor", "df", "Pairs", "1 pair", "n pairs", *HEADINGS))


def _amount_entry(column: Column, name: str, value: float) -> TableEntry:
    if math.isnan(value):
        return TableEntry(text=EMPTY_TEXT, heading=name)
    return number_entry(column, name, format_number(value, column.decimals, percent=column.percent), value)
