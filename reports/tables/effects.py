"""The tables of `effects`: effects, interactions, analysis of variance, Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...results.store.store import Store
from ..data import Entry, Lengths, ReportError, SweepData, Table, gather
from ..numbers import Column, column_of, rounded, signed
from ..stats.effects import (
    Effect,
    Interaction,
    anova,
    detectable,
    effects,
    interactions,
    measures,
    numbers_of,
    origins_of,
    pareto,
    spread,
)
from ..stats.resampling import EXACT
from . import AXIS_HEADINGS, complete_columns
from .layout import DUST, Line, assemble, entry, seed_notes, sweep_note, word_notes

SMALL_P = 1e-4


def _p(value: float) -> str:
    return "-" if math.isnan(value) else f"<{SMALL_P:.4f}" if value < SMALL_P else rounded(value, 4)


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


def _difference(column: Column, name: str, value: float) -> Entry:
    base = Entry(text="-", heading=name, probe=column.probe, metric=column.metric, length=column.length)
    if math.isnan(value):
        return base
    return replace(base, text=signed(round(value, DUST), column.decimals, percent=column.percent), value=value)


def _tested(one: Effect | Interaction, n: int) -> tuple[Entry, ...]:
    """The ten numbers of an effect or an interaction; the first says which cells and attempts all of them come from."""
    count = Entry(text=str(n), heading="Pairs" if isinstance(one, Effect) else "Fours", value=float(n))
    amounts = {"Mean": one.mean, "Median": one.median, "Low": one.low, "High": one.high}
    mean, median, low, high = (_difference(one.measure, name, value) for name, value in amounts.items())
    up, down = (
        Entry(text=str(found), heading=name, value=float(found)) for name, found in (("Up", one.up), ("Down", one.down))
    )
    ps = {"p sign": one.p_sign, "p perm": one.p_permutation, "p Holm": one.p_holm}
    tests = (Entry(text=_p(p), heading=name, value=_plain(p)) for name, p in ps.items())
    return (replace(count, origins=one.origins), mean, median, up, down, low, high, *tests)


TEST_NOTE = (
    "Differences in nats per token, needle and MFU in points. Low, High: 95% of 10,000 bootstrap means. p sign: exact sign test; "
    f"p perm: permutation of signs, exact up to {EXACT}. p Holm: the sign test's, corrected for the {{}} tests of this table."
)


def effects_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """The effect of every level on every number of the complete results, by matched pairs."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    found = effects(data)
    lines = [
        Line(
            words=(
                one.measure.heading,
                one.axis,
                f"{one.level} - {one.reference}",
                one.where.partition("=")[2] or "all",
            ),
            entries=_tested(one, one.pairs),
        )
        for one in found
    ]
    notes = [sweep_note(data), TEST_NOTE.format(len(found))]
    notes += _limits(data, measures(data), max((one.pairs for one in found), default=1))
    if not found:
        notes.append("No two cells with numbers agree on all axes but one: there is no pair to compare yet.")
    title = f"Effects of levels by matched pairs, sweep {data.sweep}, revision {data.revision}"
    numbers = ("Pairs", "Mean", "Median", "Up", "Down", "Low", "High", "p sign", "p perm", "p Holm")
    return assemble(
        data, "effects", title, ("Measure", "Axis", "Levels", "Within"), lines, numbers=numbers, notes=notes
    )


def interactions_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """Two-way interactions by differences of differences over matched fours of cells."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    found = interactions(data)
    lines = [
        Line(
            words=(
                one.measure.heading,
                *(f"{a}: {x} - {r}" for a, x, r in zip(one.axes, one.levels, one.references, strict=True)),
            ),
            entries=_tested(one, one.fours),
        )
        for one in found
    ]
    title = f"Two-way interactions, sweep {data.sweep}, revision {data.revision}"
    numbers = ("Fours", "Mean", "Median", "Up", "Down", "Low", "High", "p sign", "p perm", "p Holm")
    notes = [sweep_note(data), TEST_NOTE.format(len(found))]
    return assemble(data, "interactions", title, ("Measure", "First", "Second"), lines, numbers=numbers, notes=notes)


def anova_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """Type-III analysis of variance of every number of the complete results, with partial eta squared."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    lines, remarks = [], []
    for column in measures(data):
        frame = numbers_of(data, column)
        try:
            table, told = anova(data, column)
        except ReportError as error:
            remarks.append(str(error))
            continue
        remarks += told
        origins = origins_of(frame, "")
        for row in table.to_dict("records"):
            entries = [
                Entry(text=str(row["df"]), heading="df", value=float(row["df"]), origins=origins),
                *(_statistic(name, heading, row[name]) for name, heading in (("sum_sq", "Sum sq"), ("F", "F"))),
                Entry(text=_p(row["p"]), heading="p", value=_plain(row["p"])),
                _statistic("partial_eta_sq", "Partial eta sq", row["partial_eta_sq"]),
            ]
            lines.append(Line(words=(column.heading, str(row["term"])), entries=tuple(entries)))
    title = f"Type-III analysis of variance, sweep {data.sweep}, revision {data.revision}"
    numbers = ("df", "Sum sq", "F", "p", "Partial eta sq")
    notes = [
        sweep_note(data),
        "Sum contrasts; shares as fractions. Partial eta squared: SS / (SS + residual SS).",
        *(f"{r}." for r in remarks),
    ]
    return assemble(data, "anova", title, ("Measure", "Term"), lines, numbers=numbers, notes=notes)


def _statistic(name: str, heading: str, value: float) -> Entry:
    decimals = {"sum_sq": 6, "F": 2, "partial_eta_sq": 3}[name]
    text = "-" if math.isnan(value) or math.isinf(value) else rounded(value, decimals)
    return Entry(text=text, heading=heading, value=value if math.isfinite(value) else None)


def _limits(data: SweepData, columns: Sequence[Column], pairs: int) -> list[str]:
    """Notes on what the design can and cannot see."""
    notes = []
    if max((len(cells) for cells in data.configurations().values()), default=1) < 2:
        notes.append("One run a configuration (n = 1): these numbers say nothing of seeds.")
    known = [(column, found) for column in columns if (found := spread(data, column)) is not None]
    if known:
        kind = known[0][1].kind
        told = [
            f"{column.heading} {_amount(column, detectable(found, 1))} and {_amount(column, detectable(found, max(pairs, 1)))} "
            f"(sd {_amount(column, found.sd)})"
            for column, found in known
        ]
        notes.append(
            f"By the spread between {kind}, the smallest difference that this design shows with 80% power, of one pair and of "
            f"{max(pairs, 1)}: {'; '.join(told)}."
        )
    else:
        notes.append(
            "The sweep has neither seeds nor near-replicates, so how large a difference it can see is not known."
        )
    return notes


def _amount(column: Column, value: float) -> str:
    return rounded(value, column.decimals, percent=column.percent)


def pareto_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """The configurations that no other beats in speed and quality at once: in validation loss, or in needle accuracy at
    the longest length. Speed is tokens/s, or MFU where the sweep has no tokens/s."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    columns = {column.heading: column for column in complete_columns(data)}
    speed = column_of("throughput", "tokens_per_s", "Tokens/s")
    if not any(key[1:3] == (speed.probe, speed.metric) for key in data.values):
        speed = columns["MFU"]
    needle = [column for column in columns.values() if column.probe == "needle"][-1]
    qualities = [columns["Val"], needle]
    groups = list(data.configurations().items())
    grid = [[entry(data, cells, column) for column in (speed, *qualities)] for _, cells in groups]
    fronts: dict[int, list[str]] = {}
    for index, quality in enumerate(qualities, start=1):
        known = [r for r, row in enumerate(grid) if row[0].value is not None and row[index].value is not None]
        points = [(grid[r][0].value or 0.0, grid[r][index].value or 0.0) for r in known]
        for r, kept in zip(known, pareto(points, (1, quality.direction)), strict=True):
            if kept:
                fronts.setdefault(r, []).append(quality.heading)
    ranked = sorted(fronts, key=lambda r: -(grid[r][0].value or 0.0))
    lines = [
        Line(words=(*groups[r][0], " and ".join(fronts[r])), entries=tuple(grid[r]), cells=groups[r][1]) for r in ranked
    ]
    title = f"Pareto fronts of quality and speed, sweep {data.sweep}, revision {data.revision}"
    headings = (*AXIS_HEADINGS, *data.extra_axes(), "Front")
    shown, n = [grid[r] for r in ranked], max((len(groups[r][1]) for r in ranked), default=0)
    notes = [sweep_note(data), f"Speed: {speed.heading}. Fastest first.", *seed_notes(shown, n), *word_notes(shown)]
    numbers = [column.heading for column in (speed, *qualities)]
    return assemble(data, "pareto", title, headings, lines, numbers=numbers, notes=notes, rank="column")
