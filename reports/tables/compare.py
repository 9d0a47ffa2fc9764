"""Measured numbers beside published ones, with the difference and what is known of the spread between runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy import stats

from ...results import paper
from ...results.store.records import AXES, CellState
from ...results.store.store import Store
from ..columns import AXIS_HEADINGS
from ..data import Lengths, ReportError, SweepData, gather
from ..layout import DUST, Line, assemble, entry, seed_notes, sweep_note
from ..numbers import Column, column_of, length_name, rounded, signed
from ..stats.audit import between
from ..stats.ceiling import needle_note
from ..stats.effects import ALPHA, NEAR, Spread, spreads_by_configuration
from ..table import Entry, Table
from .printed import contradicted

COLUMNS = (
    column_of("val", "val_loss"),
    column_of("clean", "nats"),
    column_of("junk", "nats"),
    column_of("needle", "digit_accuracy"),
    column_of("throughput", "mfu_paper"),
)
WITHIN, BEYOND, UNKNOWN = "within", "beyond", "-"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number on both sides, in its own unit (shares as fractions).

    `limit` is the largest difference that the known spread explains, `verdict` within, beyond, or - where there is nothing
    to judge by. `flags` says where the paper prints another number than its authors' logs give.
    """

    levels: tuple[str, ...]
    column: Column
    measured: Entry
    published: Entry
    difference: float | None
    spread: Spread | None
    limit: float | None
    verdict: str
    flags: tuple[str, ...] = ()


def compare(
    store: Store, sweep: str | None = None, reference: str = paper.SWEEPS[1], *, revision: int | None = None
) -> list[Comparison]:
    """Every number that both sweeps have, by the five axes, cells with further axes that vary left out of the match.

    The published side is the authors' log where there is one, else the printed number. The limit is
    t(0.975, df) sd sqrt(1 + 1/k) for the mean of k seeds against one run, with the standard deviation between the
    published near-replicates of that configuration (docs/mechanisms.md, "Decisions"), and never less than half a printed digit.
    Raises SweepUnknown, ReportError (nothing in common).
    """
    return _compare(gather(store, sweep, revision=revision), gather(paper.with_published(store, reference), reference))


def _compare(data: SweepData, published: SweepData) -> list[Comparison]:
    mine = _by_levels(data)
    theirs = _by_levels(published)
    flags = {(one.cell, one.probe, one.metric, one.length): one.text for one in contradicted(published)}
    columns = _columns(data, published)
    spreads = {column: spreads_by_configuration(published, column) for column in columns}
    found = []
    for levels, cells in theirs.items():
        near = tuple(level for axis, level in zip(AXES, levels, strict=True) if axis != NEAR)
        for column in columns if levels in mine else ():
            right, left = entry(published, cells, column), entry(data, mine[levels], column)
            if right.value is None or (left.value is None and not _asked(data, column)):
                continue
            keys = [(cell.cell_id, column.probe, column.metric, column.length) for cell in cells]
            told = [flags[key] for key in keys if key in flags]
            found.append(_judge(levels, column, left, right, spreads[column].get(near), told))
    extra = data.extra_axes()
    if not found:
        why = f" (further axes vary: {', '.join(extra)})" if extra else ""
        raise ReportError(
            f"sweeps {data.sweep} and {published.sweep} have no number of a common configuration{why}; compare others with --sweep"
        )
    return found


def _by_levels(data: SweepData) -> dict[tuple[str, ...], list[CellState]]:
    if data.extra_axes():
        return {}
    return {key[: len(AXES)]: cells for key, cells in data.configurations().items()}


def _asked(data: SweepData, column: Column) -> bool:
    return (column.probe, column.length) in data.requested or column.probe == "throughput"


def _columns(data: SweepData, published: SweepData) -> list[Column]:
    columns = []
    for one in COLUMNS:
        lengths = set(published.lengths(one.probe, one.metric)) & {
            *data.lengths(one.probe, one.metric),
            *(length for probe, length in data.requested if probe == one.probe),
        }
        for length in sorted(lengths):
            name = f"{one.heading}@{length_name(length)}" if length else one.heading
            columns.append(replace(one, heading=name, length=length))
    return columns


def _judge(
    levels: tuple[str, ...], column: Column, left: Entry, right: Entry, near: Spread | None, flags: Sequence[str]
) -> Comparison:
    difference = left.value - right.value if left.value is not None and right.value is not None else None
    limit = None
    if near is not None:
        t = float(stats.t.ppf(1 - ALPHA / 2, near.df))
        half = 0.5 * 10.0**-column.decimals / (100 if column.percent else 1)
        limit = max(t * near.sd * math.sqrt(1 + 1 / max(left.seeds, 1)), half)
    verdict = UNKNOWN
    if difference is not None and limit is not None:
        verdict = WITHIN if abs(difference) <= limit * (1 + 1e-9) else BEYOND
    return Comparison(
        levels=levels,
        column=column,
        measured=left,
        published=right,
        difference=difference,
        spread=near,
        limit=limit,
        verdict=verdict,
        flags=tuple(flags),
    )


def compare_table(
    store: Store,
    sweep: str | None = None,
    *,
    reference: str = paper.SWEEPS[1],
    table: str | None = None,
    revision: int | None = None,
    lengths: Lengths = None,
) -> Table:
    """Measured, published and difference side by side, one row a number, with a verdict and what to beware of.

    `table` keeps the numbers that this table of the paper prints. Raises as `compare` does.
    """
    data = gather(store, sweep, revision=revision, lengths=lengths)
    home = paper.with_published(store, reference)
    published = gather(home, reference)
    found = _compare(data, published)
    if table is not None:
        found = _in_table(found, published, table)
    unlike = between(store, data, home, published)
    lines = [_line(one) for one in found]
    counts = {name: Counter(one.verdict for one in found if one.column.heading == name) for name in _names(found)}
    notes = [
        sweep_note(data),
        f"Published: {reference}, the authors' logs where there are any. Limit: the largest difference that the spread between "
        "the published near-replicates explains (regularizers alone differ; 95%).",
        *seed_notes([[one.measured] for one in found], max((len(one.measured.cells) for one in found), default=0)),
        *([f"Unlike {reference}: {'; '.join(unlike)}."] if unlike else []),
        *([needle_note(data)] if any(one.column.probe == "needle" for one in found) else []),
        *(_count_note(name, count) for name, count in counts.items()),
    ]
    flagged = {flag for one in found for flag in one.flags}
    if flagged:
        notes.append(f"{len(flagged)} printed numbers contradict the authors' own logs; compared is the log.")
    title = f"Sweep {data.sweep}, revision {data.revision}, beside {reference}"
    headings = (*AXIS_HEADINGS, "Measure", "Verdict", "Beware")
    numbers = ("Measured", "Published", "Difference", "Limit")
    options = {"reference": reference} | ({"table": table} if table is not None else {})
    return assemble(data, "compare", title, headings, lines, numbers=numbers, notes=notes, options=options)


def _in_table(found: Sequence[Comparison], published: SweepData, table: str) -> list[Comparison]:
    printed = {(cell, *rest) for cell, number, *rest in published.printed if number == table}
    if not printed:
        raise ReportError(
            f"{published.sweep} has no printed numbers of table {table}; leave --table out to compare all"
        )

    def inside(one: Comparison) -> bool:
        what = (one.column.probe, one.column.metric, one.column.length)
        return any((cell, *what) in printed for cell in one.published.cells)

    return [one for one in found if inside(one)]


def _names(found: Sequence[Comparison]) -> list[str]:
    return list(dict.fromkeys(one.column.heading for one in found))


def _count_note(name: str, count: Counter[str]) -> str:
    told = f"{count[WITHIN]} within the known spread, {count[BEYOND]} beyond"
    return f"{name}: {told}" + (f", {count[UNKNOWN]} not to be judged." if count[UNKNOWN] else ".")


def _line(one: Comparison) -> Line:
    column = one.column
    text = (
        "-" if one.difference is None else signed(round(one.difference, DUST), column.decimals, percent=column.percent)
    )
    limit = "-" if one.limit is None else rounded(one.limit, column.decimals, percent=column.percent)
    base = Entry(text=text, heading="Difference", probe=column.probe, metric=column.metric, length=column.length)
    # the published attempts may be those of another database: their cells alone have a name that holds everywhere
    origins = tuple((cell, None) for cell in one.published.cells)
    entries = (
        replace(one.measured, heading="Measured"),
        replace(one.published, heading="Published", origins=origins),
        replace(base, value=one.difference),
        replace(base, text=limit, heading="Limit", value=one.limit),
    )
    words = (*one.levels, column.heading, one.verdict, "; ".join(one.flags) or "-")
    about = dict(zip(AXES, one.levels, strict=True)) | {"measure": column.heading, "verdict": one.verdict}
    return Line(words=words, entries=entries, about=about | {"flags": list(one.flags)})
