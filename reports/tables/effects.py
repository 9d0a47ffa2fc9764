"""The tables `effects`, `interactions` and `contrasts`: what the levels do, alone and together, by matched pairs; of a partial design
by least squares.

Without --all-rows a reader sees the answers and every row that is sure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...results.console.text import counted
from ...results.designs import aliasing
from ...results.store.store import Store
from ..number_format import BARE, Column, format_number
from ..result_columns import extra_metrics, quality_columns
from ..stats.effects import stopping_rows
from ..stats.effects.effects import (
    EQUIVALENT,
    Effect,
    Interaction,
    Tested,
    contrast_column,
    contrasts,
    effects,
    first_measures,
    interactions,
    main_measures,
    measures,
    reference_level,
)
from ..stats.noise.run_noise import detectable, noise_by_stratum
from ..stats.significance.paired_tests import METHODS
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import DUST, EMPTY_TEXT, TableRow, build_table, sweep_note, tested_entry

UNITS = "Differences in nats per token, needle and MFU in points; n is configurations, never runs: the seeds of one are one observation."
TESTS = (
    "Low, High and p belong together ({}): what configurations like these would come to. p corr: p after the correction for "
    "its family, the tests of one number and one axis ({} families); sure: below 0.05."
)
SIGNS = " p sign: exact sign test."
STRATA_NOTE = (
    "A row over several mixers (or memories) gives each the same weight. I2: share of the differences between them that is more "
    "than chance, p het: its test (Brown and Forsythe); ~ marks rows where p het < 0.05: they speak of none of their mixers."
)
FIRST_FITTED = ("Mean", "Low", "High", "p", "p corr")
FIRST = ("Mean", "Low", "High", "p", "p corr", "I2", "p het", "Up", "Down")
FURTHER = ("Median", "p sign")
ALL_ROWS = "--all-rows"
WORST = "Worst"
MIXED = " ~"


def effects_table(store: Store, data: SweepData, *, all_rows: bool = False) -> Table:
    """The effects of levels by matched pairs, declared contrasts first: those that are sure and those over the whole sweep, at the
    longest length; with `all_rows` every one, on every number at every length."""
    every = effects(data, None if all_rows else default_columns(data))
    return build_effects_table(data, every, None if all_rows else default_effects(data, every))


def build_effects_table(data: SweepData, every: Sequence[Effect], first: Sequence[Effect] | None = None) -> Table:
    """The table of effects that are worked out already, a row each, or of those that come first."""
    found = every if first is None else first
    headings = _headings(data, found, first is None)
    lines = [
        _line(one, _words(one, " (declared)" if one.confirmatory else ""), _numbers(data, one, headings))
        for one in found
    ]
    notes = [
        sweep_note(data),
        UNITS,
        *_tests(every, first is None),
        *_declared(data, found),
        *_averages(data),
        *_own_units(data),
    ]
    notes += [*_two_seeds(found), *_missing(found)]
    if first is not None and every:
        notes.append(
            "Shown are, at the longest context length, what is sure and every level against the reference over the whole sweep, with "
            f"mixers where they differ; {_further(len(every) - len(found))} there, the other lengths and all pairs of levels: {ALL_ROWS}."
        )
    if data.partial is None:
        notes += _limits(data, [one for one in main_measures(data) if _told(data, one)], found)
    if not any(one.pairs for one in found):
        notes.append("No two cells with numbers agree on all axes but one: there is no pair to compare yet.")
    by = "matched pairs" if data.partial is None else "least squares"
    title = f"Effects of levels by {by}"
    words, numbers = ("Measure", "Axis", "Levels", "Within"), (_heading(data, "Pairs"), *headings)
    options = {"all_rows": True} if first is None else {}
    return build_table(data, "effects", title, words, lines, numbers=numbers, notes=notes, options=options)


def interactions_table(store: Store, data: SweepData, *, all_rows: bool = False) -> Table:
    """Two-way and three-way interactions by differences of differences over matched fours and eights of cells: those that are
    sure, and the nearest of every family; with `all_rows` every one, at the shortest length too."""
    every = interactions(data, None if all_rows else first_measures(data))
    found = every if all_rows else default_interactions(every)
    headings = _headings(data, found, all_rows)
    lines = [
        _line(one, (one.measure.heading, *_sides(one), _within(one)), _numbers(data, one, headings)) for one in found
    ]
    title = "Interactions"
    notes = [
        sweep_note(data),
        UNITS,
        *_tests(every, all_rows),
        *_averages(data),
        *_own_units(data),
        *_two_seeds(found),
        *_missing(found),
    ]
    if data.partial is None:
        notes.append(
            "Fours: configurations with all corners of a difference of differences; where a third axis is named, eights."
        )
    if not all_rows and every:
        notes.append(
            "Shown are, at the longest context length, the interactions that are sure, over the whole sweep and in its mixers, and of "
            f"axes without one the nearest (p corr below {NEAR:g}); families by their smallest p corr. {_further(len(every) - len(found))}: {ALL_ROWS}."
        )
    if not every:
        if data.partial is not None and all(len(term) < 2 for term in data.partial.terms):
            notes.append(
                "The design estimates no interaction; contrasts with `within`, or `model: two-way`, ask for some."
            )
        else:
            notes.append("No four cells with numbers agree on all axes but two: there is no interaction to see yet.")
    elif not found:
        notes.append("None came near.")
    words, numbers = ("Measure", "First", "Second", "Third", "Within"), (_heading(data, "Fours"), *headings)
    return build_table(
        data,
        "interactions",
        title,
        words,
        lines,
        numbers=numbers,
        notes=notes,
        options={"all_rows": True} if all_rows else {},
    )


def contrasts_table(store: Store, data: SweepData) -> Table:
    """The contrasts that the grid declares: the confirmatory family, with what each came to."""
    found = contrasts(data)
    lines = []
    for one in found:
        margin = TableEntry(text=EMPTY_TEXT, heading="Margin")
        if one.margin is not None:
            text = format_number(one.margin, one.measure.decimals, percent=one.measure.percent)
            margin = replace(margin, text=text, value=one.margin)
        tested = [tested_entry(one, heading) for heading in ("Mean", "Low", "High", "p", "p corr", "p equiv")]
        entries = (_count(data, one), *tested[:5], margin, tested[5], TableEntry(text=_verdict(one), heading="Verdict"))
        lines.append(_line(one, _words(one), entries))
    notes = [sweep_note(data)]
    if found:
        notes += [
            UNITS,
            "Declared in the grid before the launch, corrected together (p corr) as one family; everything else that a report tests "
            "is exploratory.",
            "Margin: the difference that the grid says would not matter; p equiv: two one-sided tests that the mean lies within "
            "it, after Holm's correction. Verdict at 5%: not shown is neither a difference nor its absence; not asked: neither a "
            "cell nor the mean of a side has a needle accuracy above that of always the same digit by more than chance (5% over all cells, and "
            "over both means), so a difference says nothing of retrieval.",
            *stopping_rows.notes(data),
            *_averages(data, strata=False),
            *_two_seeds(found),
            *_missing(found),
        ]
    else:
        notes.append(
            "The grid declares no contrasts, so every test of this sweep is exploratory; `contrasts:` in a grid declares them "
            "(docs/guide.md)."
        )
    title = "Declared contrasts"
    numbers = (_heading(data, "Pairs"), "Mean", "Low", "High", "p", "p corr", "Margin", "p equiv", "Verdict")
    headings = ("Measure", "Axis", "Levels", "Within")
    return build_table(data, "contrasts", title, headings, lines, numbers=numbers, notes=notes)


def _verdict(one: Effect) -> str:
    if one.margin is None or one.verdict != EQUIVALENT:
        return one.verdict
    unit = "points" if one.measure.percent else one.measure.unit.partition("/")[0]
    return f"{EQUIVALENT} within {format_number(one.margin, one.measure.decimals, percent=one.measure.percent)} {unit}".strip()


# --- words --------------------------------------------------------------------------------------------------------


def _within(one: Tested) -> str:
    """all; polar; polar, memory on: with a mark where it averages strata that differ."""
    parts = [part.split("=", 1) for part in one.where.split(", ")] if one.where else []
    told = ", ".join(level if axis == "attn_type" else f"{axis} {level}" for axis, level in parts) or "all"
    return told + (MIXED if one.mixed else "")


def _sides(one: Interaction) -> list[str]:
    told = [f"{a}: {x} - {r}" for a, x, r in zip(one.axes, one.levels, one.references, strict=True)]
    return [*told, *[EMPTY_TEXT] * (3 - len(told))]


def _words(one: Effect, declared: str = "") -> tuple[str, ...]:
    return one.measure.heading, one.axis + declared, f"{one.level} - {one.reference}", _within(one)


def _line(one: Tested, words: tuple[str, ...], entries: tuple[TableEntry, ...]) -> TableRow:
    """Return the row of a tested difference."""
    about = {name: getattr(one, name) for name in ("family", "confirmatory", "method", "expected", "missing", "where")}
    return TableRow(words=words, entries=entries, about=about | {"missing": dict(one.missing)})


# --- numbers --------------------------------------------------------------------------------------------------------


def _heading(data: SweepData, counted: str) -> str:
    """Above the count of a row's pairs, or of the cells that a partial design was fitted to."""
    return counted if data.partial is None else "Cells"


def _headings(data: SweepData, found: Sequence[Tested], all_rows: bool) -> tuple[str, ...]:
    if data.partial is not None:
        return FIRST_FITTED
    return (*FIRST, *(FURTHER if all_rows else ()), *([WORST] if _any_worst(found) else []))


def _any_worst(found: Sequence[Tested]) -> bool:
    return any(not math.isnan(one.worst) for one in found)


def _count(data: SweepData, one: Effect | Interaction) -> TableEntry:
    """How many pairs there are, of how many; it says which cells and attempts the whole row comes from."""
    n = one.pairs if isinstance(one, Effect) else one.fours
    text = str(n) if n == one.expected else f"{n} of {one.expected}"
    heading = _heading(data, "Pairs" if isinstance(one, Effect) else "Fours")
    return TableEntry(text=text, heading=heading, value=float(n), origins=one.origins)


def _numbers(data: SweepData, one: Effect | Interaction, headings: Sequence[str]) -> tuple[TableEntry, ...]:
    i2 = TableEntry(text=EMPTY_TEXT, heading="I2", unit=BARE)
    if not math.isnan(one.i2):
        i2 = replace(i2, text=format_number(round(one.i2, DUST), 2), value=one.i2)
    return (_count(data, one), *(i2 if name == "I2" else tested_entry(one, name) for name in headings))


# --- notes ----------------------------------------------------------------------------------------------------------


def _tests(made: Sequence[Tested], signs: bool) -> list[str]:
    """How the tests were made."""
    if not made:
        return []
    methods = [METHODS[name] for name in METHODS if any(one.method == name for one in made)]
    return [TESTS.format("; ".join(methods), len({one.family for one in made})) + (SIGNS if signs else "")]


def _declared(data: SweepData, found: Sequence[Tested]) -> list[str]:
    """Which tests were asked for before the launch."""
    if data.only and found:
        return [
            "Every row is exploratory: contrasts that a grid declares are about all of its cells (table contrasts)."
        ]
    declared = sum(one.confirmatory for one in found)
    if declared:
        return [
            f"The first {'row is a contrast' if declared == 1 else f'{declared} rows are contrasts'} that the grid declares; "
            "all others are exploratory."
        ]
    return ["The grid declares no contrasts: every row is exploratory."] if found else []


def _averages(data: SweepData, strata: bool = True) -> list[str]:
    """What rows over several strata are means of; of a partial design what was estimated, and what it cannot tell."""
    design = data.partial
    if design is None:
        return [STRATA_NOTE] if strata else []
    members = np.array(sorted({place for cell in data.cells if (place := data.place(design, cell)) is not None}))
    told = aliasing.alias_sentences(design.model, members)
    return [
        f"A partial design ({design.method}, {len(members)} of {counted(len(design.space.points), 'combination')}): estimated together by least "
        f"squares are the mean, {', '.join(map(aliasing.words, design.terms))}. Other interactions are taken for nothing; where they are "
        "not, they are part of what they are mixed with.",
        *(f"{one[0].upper()}{one[1:]}." for one in told),
    ]


def _further(n: int) -> str:
    return counted(n, "further row") if n else "no further rows"


def _own_units(data: SweepData) -> list[str]:
    """The units of numbers that are neither losses nor shares: those of further probes."""
    further = {(probe, about.name) for probe, about in extra_metrics(data)}
    own = [one for one in measures(data) if (one.probe, one.metric) in further and not one.percent]
    return [f"In their own units: {', '.join(f'{one.heading} {one.unit}' for one in own)}."] if own else []


def _two_seeds(found: Sequence[Tested]) -> list[str]:
    """Why intervals can be wider with two seeds than they were with one, which says nothing of seeds."""
    if not any(one.method == "crossed" and one.seeds == 2 for one in found):
        return []
    return [
        "Of two seeds one difference alone says how far seeds lie apart, so that intervals are wide; a third seed narrows them."
    ]


def _missing(found: Sequence[Tested]) -> list[str]:
    """Why pairs that the grid lists are not there, and what diverged runs could make of the means."""
    counted: Counter[str] = Counter()
    for one in found:
        counted.update(one.missing)
    notes = []
    if counted:
        told = ", ".join(f"{word} {n}" for word, n in counted.most_common())
        lacking = sum(bool(one.missing) for one in found)
        notes.append(
            f"{lacking} of {len(found)} rows lack runs that the grid lists (Pairs: found of expected); by the first cell without "
            f"its number, over all rows: {told}."
        )
    if _any_worst(found):
        notes.append(
            f"{WORST}: the mean with every diverged run at the worst value possible, 0% or 100% of a share; of a loss no bound is "
            "known, and the worst that any cell of the sweep measured stands for it."
        )
    return notes


def _told(data: SweepData, column: Column) -> bool:
    """Whether the notes tell what can be seen in a number: in the two qualities, since there is a table of the rest."""
    return column.key in {one.key for one in quality_columns(data)}


def _limits(data: SweepData, columns: Sequence[Column], found: Sequence[Effect]) -> list[str]:
    """Notes on what the design can and cannot see, stratum by stratum."""
    notes = []
    if max((len(cells) for cells in data.configurations().values()), default=1) < 2:
        notes.append("One run a configuration (n = 1): these numbers say nothing of seeds.")
    strata = len(data.levels("attn_type")) > 1
    pairs = max((one.pairs for one in found if not strata or "attn_type=" in one.where), default=1)
    known = [(column, noise_by_stratum(data, column)) for column in columns]
    told = []
    for column, by_stratum in known:
        parts = [
            f"{_stratum(key)} {_amount(column, detectable(one, 1))} and {_amount(column, detectable(one, max(pairs, 1)))}"
            for key, one in by_stratum.items()
        ]
        told += [f"{column.heading} {', '.join(parts)}"] if parts else []
    if told:
        kind = next(one.kind for _, by_stratum in known for one in by_stratum.values())
        notes.append(
            f"By the spread between {kind} of the same mixer and memory, the smallest difference that is seen with 80% power, of "
            f"one pair and of {max(pairs, 1)}: {'; '.join(told)}. Table power has more."
        )
    else:
        notes.append(
            "The sweep has neither seeds nor near-replicates, so how large a difference it can see is not known."
        )
    return notes


def _stratum(key: tuple[str, ...]) -> str:
    return key[0] + (" + memory" if key[1] == "on" else f" + {key[1]}" if key[1] != "off" else "")


def _amount(column: Column, value: float) -> str:
    return format_number(value, column.decimals, percent=column.percent)


# --- the rows that a reader sees first --------------------------------------------------------------------------------


NEAR = 0.5
"""p corr below which the nearest interaction of a family without a sure one is shown."""


def default_columns(data: SweepData) -> list[Column]:
    """Every number at its longest context length, and those that declared contrasts are about."""
    declared = [contrast_column(data, one) for one in data.contrasts]
    return list({one.key: one for one in [*declared, *first_measures(data)]}.values())


def default_effects(data: SweepData, found: Sequence[Effect]) -> list[Effect]:
    """The declared contrasts; of the others all that are sure, and besides every level against the reference over the whole
    sweep, with its strata where they differ."""
    first = {one.key for one in first_measures(data)}
    apart = {(one.measure.heading, *_levels(one)) for one in found if not one.where and one.mixed}

    def kept(one: Effect) -> bool:
        if one.confirmatory or (one.sure and one.measure.key in first):
            return True
        if one.measure.key not in first or one.reference != reference_level(data.levels(one.axis)):
            return False
        return not one.where or (one.where.count("=") == 1 and (one.measure.heading, *_levels(one)) in apart)

    return [one for one in found if kept(one)]


def default_interactions(found: Sequence[Interaction]) -> list[Interaction]:
    """Of every number the families that hold something sure first; of a family all rows that are sure, with those over the whole
    sweep that they are part of, and the strata of these; of the others the row that came nearest, if near it came."""
    families: dict[str, list[Interaction]] = {}
    for one in found:
        families.setdefault(one.family, []).append(one)
    order: dict[str, list[tuple[float, list[Interaction]]]] = {}
    for rows in families.values():
        nearest = min(rows, key=_p)
        told = {_levels(one) for one in rows if one.sure}
        kept = [one for one in rows if _levels(one) in told] or [nearest] * (_p(nearest) < NEAR)
        order.setdefault(nearest.measure.heading, []).append((_p(nearest), kept))
    return [one for blocks in order.values() for _, kept in sorted(blocks, key=lambda block: block[0]) for one in kept]


def _levels(one: Tested) -> tuple[object, ...]:
    if isinstance(one, Effect):
        return one.axis, one.level, one.reference
    assert isinstance(one, Interaction)
    return one.axes, one.levels, one.references


def _p(one: Tested) -> float:
    return one.p_corrected if one.p_corrected == one.p_corrected else 2.0
