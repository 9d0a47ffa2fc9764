"""Tables `effects`, `interactions` and `contrasts`: effects of the levels, alone and together, by matched pairs.

A partial design is estimated by least squares instead. Without --all-rows the tables show the main rows and every
significant one.
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
from ..stats.effects.effect_types import AT_CHANCE_VERDICT
from ..stats.effects.effects import (
    EQUIVALENT_VERDICT,
    Effect,
    EffectEstimate,
    Interaction,
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
from ..stats.significance.paired_tests import METHOD_LABELS
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import EMPTY_TEXT, ROUND_DECIMALS, TableRow, build_table, sweep_note, tested_entry

UNITS = (
    "Differences in nats per token; needle and MFU in percentage points. n counts configurations: the "
    "seeds of one are averaged, not counted."
)
TESTS = "Low, High and p come from the same test ({}), for configurations like these."
FAMILIES = (
    " p corr: p corrected within its family, the tests of one number and one axis ({} families); significant: p corr "
    "below 0.05."
)
SIGNS = " p sign: exact sign test."
STRATA_NOTE = (
    "A row over several mixers (or memories) weights each equally. I2: share of the variation between "
    "them beyond chance; p het: test of equal effects (Brown and Forsythe). ~ marks rows with p het < 0.05: "
    "the effect differs between the averaged mixers or memories; see each."
)
FIRST_FITTED = ("Mean", "Low", "High", "p", "p corr")
FIRST = ("Mean", "Low", "High", "p", "p corr", "I2", "p het", "Up", "Down")
FURTHER = ("Median", "p sign")
ALL_ROWS = "--all-rows"
WORST = "Worst"
MIXED = " ~"


def effects_table(store: Store, data: SweepData, *, all_rows: bool = False) -> Table:
    """Return the table `effects`: the effects of levels by matched pairs, declared contrasts first.

    A pair are two configurations that differ in one axis alone. A partial design is estimated by least squares instead.

    Args:
        store: The database; not used.
        data: The sweep.
        all_rows: Whether to show every effect on every number at every length, instead of `default_effects` at the
            longest length.
    """
    every = effects(data, None if all_rows else default_columns(data))
    return build_effects_table(data, every, None if all_rows else default_effects(data, every))


def build_effects_table(data: SweepData, every: Sequence[Effect], first: Sequence[Effect] | None = None) -> Table:
    """Return the table `effects` of effects that are already computed, one row each, in the given order.

    Label columns: Measure, Axis (with " (declared)" for contrasts of the grid), Levels ("level - reference") and Within
    (the stratum: cells that share mixer, or mixer and memory; "all" for the whole sweep). Number columns: Pairs, Mean,
    Low, High, p, p corr, I2, p het, Up, Down; with all effects also Median and p sign; with diverged runs also Worst. A
    partial design has Cells, Mean, Low, High, p and p corr only.

    Args:
        data: The sweep.
        every: All effects that were tested; notes count them.
        first: The effects to show, out of `every`; None: all of them, with the columns Median and p sign.
    """
    shown = every if first is None else first
    headings = _number_headings(data, shown, first is None)
    lines = [
        _difference_row(
            effect,
            _effect_labels(effect, " (declared)" if effect.confirmatory else ""),
            _number_entries(data, effect, headings),
        )
        for effect in shown
    ]
    notes = [
        sweep_note(data),
        UNITS,
        *_test_notes(every, first is None),
        *_declared_note(data, shown),
        *_averaging_notes(data),
        *_own_unit_notes(data),
    ]
    notes += [*_two_seeds_note(shown), *_missing_notes(shown)]
    if first is not None and every:
        notes.append(
            "Shown, at the longest context length: all significant effects, and each level against the "
            f"reference over the whole sweep, by mixer where they differ. {ALL_ROWS} adds "
            f"{_further_rows_text(len(every) - len(shown))} there, the other lengths and all pairs of levels."
        )
    if data.partial_design is None:
        notes += _detection_notes(
            data, [column for column in main_measures(data) if _is_quality_column(data, column)], shown
        )
    if not any(effect.pairs for effect in shown):
        notes.append("No matched pairs yet: no two measured cells differ in exactly one axis.")
    by = "matched pairs" if data.partial_design is None else "least squares"
    title = f"Effect of each factor, by {by}"
    text_headings, numbers = ("Measure", "Axis", "Levels", "Within"), (_count_heading(data, "Pairs"), *headings)
    options = {"all_rows": True} if first is None else {}
    return build_table(data, "effects", title, text_headings, lines, numbers=numbers, notes=notes, options=options)


def interactions_table(store: Store, data: SweepData, *, all_rows: bool = False) -> Table:
    """Return the table `interactions`: two-way and three-way interactions by differences of differences.

    They are taken over matched groups of four or eight configurations that agree on all other axes. Label columns:
    Measure, First, Second and Third (axis with its levels; "-" as third of a two-way one) and Within. Number columns:
    Fours (the count of groups), Mean, Low, High, p, p corr, I2, p het, Up and Down; with `all_rows` Median and p sign,
    with diverged runs Worst. Without interactions it has no rows and a note. `store` is not used.

    Args:
        store: The database; not used.
        data: The sweep.
        all_rows: Whether to show every interaction of every number at every length, instead of those that
            `default_interactions` selects at the longest length.
    """
    every = interactions(data, None if all_rows else first_measures(data))
    shown = every if all_rows else default_interactions(every)
    headings = _number_headings(data, shown, all_rows)
    lines = [
        _difference_row(
            interaction,
            (interaction.measure.heading, *_level_differences(interaction), _stratum_text(interaction)),
            _number_entries(data, interaction, headings),
        )
        for interaction in shown
    ]
    title = "Interactions"
    notes = [
        sweep_note(data),
        UNITS,
        *_test_notes(every, all_rows),
        *_averaging_notes(data),
        *_own_unit_notes(data),
        *_two_seeds_note(shown),
        *_missing_notes(shown),
    ]
    if data.partial_design is None:
        notes.append(
            "Fours: matched quadruples, configurations with all corners of a difference of differences; with a "
            "third axis, groups of eight."
        )
    if not all_rows and every:
        notes.append(
            "Shown, at the longest context length: significant interactions, over the whole sweep and by "
            f"mixer; for axes without one, the interaction with the smallest p corr, if below {NEAR_MISS_P:g}. "
            f"Families are ordered by their smallest p corr. {ALL_ROWS} adds "
            f"{_further_rows_text(len(every) - len(shown))}."
        )
    if not every:
        if data.partial_design is not None and all(len(term) < 2 for term in data.partial_design.terms):
            notes.append(
                "The design estimates no interaction; declare contrasts with `within`, or `model: two-way`, to "
                "estimate some."
            )
        else:
            notes.append("No interactions yet: no four measured cells form a matched quadruple of two axes.")
    elif not shown:
        notes.append(f"No interaction has a p corr below {NEAR_MISS_P:g}.")
    text_headings, numbers = (
        ("Measure", "First", "Second", "Third", "Within"),
        (_count_heading(data, "Fours"), *headings),
    )
    return build_table(
        data,
        "interactions",
        title,
        text_headings,
        lines,
        numbers=numbers,
        notes=notes,
        options={"all_rows": True} if all_rows else {},
    )


def contrasts_table(store: Store, data: SweepData) -> Table:
    """Return the table `contrasts`: the contrasts that the grid declares, each with its verdict.

    They are corrected as one family. Label columns: Measure, Axis, Levels, Within. Number columns: Pairs (or Cells),
    Mean, Low, High, p, p corr, Margin (the difference that would not matter; "-" if not declared), p equiv and Verdict
    (a text). Without declared contrasts the table has no rows and a note that says so. `store` is not used.
    """
    declared = contrasts(data)
    lines = []
    for effect in declared:
        margin = TableEntry(text=EMPTY_TEXT, heading="Margin")
        if effect.margin is not None:
            text = format_number(effect.margin, effect.measure.decimals, percent=effect.measure.percent)
            margin = replace(margin, text=text, value=effect.margin)
        tested = [tested_entry(effect, heading) for heading in ("Mean", "Low", "High", "p", "p corr", "p equiv")]
        entries = (
            _pair_count_entry(data, effect),
            *tested[:5],
            margin,
            tested[5],
            TableEntry(text=_verdict(effect), heading="Verdict"),
        )
        lines.append(_difference_row(effect, _effect_labels(effect), entries))
    notes = [sweep_note(data)]
    if declared:
        notes += [
            UNITS,
            _methods_text(declared),
            "Contrasts were declared in the grid before the launch and are corrected together (p corr) as one "
            "family; all other tests are exploratory.",
            "Margin: the largest difference that does not matter, as declared in the grid; p equiv: two "
            "one-sided tests that the mean lies within it, after Holm's correction. Verdict at 5%: not "
            "significant means neither a difference nor equivalence is shown. "
            f"{AT_CHANCE_VERDICT.partition(':')[0].capitalize()}: no cell and no mean of a side is above the "
            "constant-digit baseline of the needle by more than chance (5% over all cells, and over both "
            "means), so a difference says nothing about retrieval.",
            *stopping_rows.stopping_notes(data),
            *_averaging_notes(data, strata=False),
            *_two_seeds_note(declared),
            *_missing_notes(declared),
        ]
    else:
        notes.append(
            "The grid declares no contrasts, so all tests of this sweep are exploratory; declare some with "
            "`contrasts:` in the grid (docs/how-to/write-a-grid.md)."
        )
    title = "Declared contrasts"
    numbers = (_count_heading(data, "Pairs"), "Mean", "Low", "High", "p", "p corr", "Margin", "p equiv", "Verdict")
    headings = ("Measure", "Axis", "Levels", "Within")
    return build_table(data, "contrasts", title, headings, lines, numbers=numbers, notes=notes)


def _verdict(effect: Effect) -> str:
    """Return the verdict of a contrast as text, "equivalent" followed by "within <margin> <unit>".

    The others are "no pairs", "not tested: all at chance level", "differs", "differs, within the margin" and "not
    significant".
    """
    if effect.margin is None or effect.verdict != EQUIVALENT_VERDICT:
        return effect.verdict
    unit = "points" if effect.measure.percent else effect.measure.unit.partition("/")[0]
    return f"{EQUIVALENT_VERDICT} within {format_number(effect.margin, effect.measure.decimals, percent=effect.measure.percent)} {unit}".strip()


# --- words --------------------------------------------------------------------------------------------------------


def _stratum_text(difference: EffectEstimate) -> str:
    """Return the stratum of a row, such as "polar, memory on", or "all" for the whole sweep.

    A level of attn_type stands alone, any other after its axis. The text ends in MIXED (" ~") if the row averages
    strata that differ.
    """
    parts = [part.split("=", 1) for part in difference.where.split(", ")] if difference.where else []
    text = ", ".join(level if axis == "attn_type" else f"{axis} {level}" for axis, level in parts) or "all"
    return text + (MIXED if difference.is_heterogeneous else "")


def _level_differences(interaction: Interaction) -> list[str]:
    """Return one text "axis: level - reference" per axis of an interaction, padded with "-" to three."""
    parts = [
        f"{a}: {x} - {r}" for a, x, r in zip(interaction.axes, interaction.levels, interaction.references, strict=True)
    ]
    return [*parts, *[EMPTY_TEXT] * (3 - len(parts))]


def _effect_labels(effect: Effect, declared: str = "") -> tuple[str, ...]:
    """Return the labels of an effect: measure, axis (followed by `declared`), "level - reference", and the stratum."""
    return effect.measure.heading, effect.axis + declared, f"{effect.level} - {effect.reference}", _stratum_text(effect)


def _difference_row(difference: EffectEstimate, labels: tuple[str, ...], entries: tuple[TableEntry, ...]) -> TableRow:
    """Return the table row of a tested difference, without origins of its own: its count entry carries them.

    JSON fields: family, confirmatory, method, expected, missing (number of missing pairs by reason) and where.
    """
    json_fields = {
        name: getattr(difference, name) for name in ("family", "confirmatory", "method", "expected", "missing", "where")
    }
    return TableRow(labels=labels, entries=entries, json_fields=json_fields | {"missing": dict(difference.missing)})


# --- numbers --------------------------------------------------------------------------------------------------------


def _count_heading(data: SweepData, counted: str) -> str:
    """Return the heading of the count: `counted`, or "Cells" for a partial design, whose model is fitted to cells."""
    return counted if data.partial_design is None else "Cells"


def _number_headings(data: SweepData, differences: Sequence[EffectEstimate], all_rows: bool) -> tuple[str, ...]:
    """Return the headings of the number columns after the count.

    A partial design has Mean, Low, High, p and p corr. A full one has Mean, Low, High, p, p corr, I2, p het, Up and
    Down, then Median and p sign if `all_rows`, and Worst if any of `differences` has a worst case.
    """
    if data.partial_design is not None:
        return FIRST_FITTED
    return (*FIRST, *(FURTHER if all_rows else ()), *([WORST] if _any_worst(differences) else []))


def _any_worst(differences: Sequence[EffectEstimate]) -> bool:
    return any(not math.isnan(difference.worst) for difference in differences)


def _pair_count_entry(data: SweepData, difference: Effect | Interaction) -> TableEntry:
    """Return the entry of the number of pairs (or fours): "n", or "n of expected" where some are missing.

    It carries the cells and attempts that the whole row comes from.
    """
    n = difference.pairs if isinstance(difference, Effect) else difference.fours
    text = str(n) if n == difference.expected else f"{n} of {difference.expected}"
    heading = _count_heading(data, "Pairs" if isinstance(difference, Effect) else "Fours")
    return TableEntry(text=text, heading=heading, value=float(n), origins=difference.origins)


def _number_entries(
    data: SweepData, difference: Effect | Interaction, headings: Sequence[str]
) -> tuple[TableEntry, ...]:
    """Return the entries of a row: the count of pairs (or fours), then one per heading in the order of `headings`.

    I2 is a share from 0 to 1 with two decimals; "-" where it is NaN.
    """
    i2 = TableEntry(text=EMPTY_TEXT, heading="I2", unit=BARE)
    if not math.isnan(difference.i2):
        i2 = replace(i2, text=format_number(round(difference.i2, ROUND_DECIMALS), 2), value=difference.i2)
    return (
        _pair_count_entry(data, difference),
        *(i2 if name == "I2" else tested_entry(difference, name) for name in headings),
    )


# --- notes ----------------------------------------------------------------------------------------------------------


def _test_notes(differences: Sequence[EffectEstimate], signs: bool) -> list[str]:
    """Return the note on the test methods and the number of families, as a list; empty without differences.

    Args:
        differences: All differences that were tested, shown or not.
        signs: Whether the table has sign tests, which the note then names.
    """
    if not differences:
        return []
    families = FAMILIES.format(len({difference.family for difference in differences}))
    return [_methods_text(differences) + families + (SIGNS if signs else "")]


def _methods_text(differences: Sequence[EffectEstimate]) -> str:
    """Return the sentence that names the tests of the differences."""
    used = {difference.method for difference in differences}
    return TESTS.format("; ".join(label for name, label in METHOD_LABELS.items() if name in used))


def _declared_note(data: SweepData, differences: Sequence[EffectEstimate]) -> list[str]:
    """Return the note on declared contrasts and exploratory rows, as a list; empty without rows.

    With filtered cells every row is exploratory.
    """
    if data.only and differences:
        return [
            "All rows are exploratory, since cells are filtered: contrasts of the grid are about all of its "
            "cells (table contrasts)."
        ]
    declared = sum(difference.confirmatory for difference in differences)
    if declared:
        return [
            f"The first {'row is a contrast' if declared == 1 else f'{declared} rows are contrasts'} declared "
            "in the grid; all others are exploratory."
        ]
    return ["The grid declares no contrasts: all rows are exploratory."] if differences else []


def _averaging_notes(data: SweepData, strata: bool = True) -> list[str]:
    """Return the notes on averages over strata (full design), or on what a partial design estimates and confounds.

    For a partial design: the estimated terms, then one sentence per set of terms that its cells cannot tell apart.

    Args:
        data: The sweep.
        strata: Whether rows average over strata; without them a full design has no note.
    """
    design = data.partial_design
    if design is None:
        return [STRATA_NOTE] if strata else []
    members = np.array(sorted({point for cell in data.cells if (point := data.design_index(design, cell)) is not None}))
    sentences = aliasing.alias_sentences(design.model, members)
    return [
        f"A partial design ({design.method}, {len(members)} of "
        f"{counted(len(design.space.points), 'combination')}): least squares estimate the mean, "
        f"{', '.join(map(aliasing.term_text, design.terms))} together. Other interactions are assumed to be "
        "zero; where they are not, they are part of the terms that they are confounded with.",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences),
    ]


def _further_rows_text(n: int) -> str:
    return counted(n, "further row") if n else "no further rows"


def _own_unit_notes(data: SweepData) -> list[str]:
    """Return the note on the units of extra metrics that are not shares, as a list; empty without such numbers."""
    further = {(probe, metric.name) for probe, metric in extra_metrics(data)}
    own = [column for column in measures(data) if (column.probe, column.metric) in further and not column.percent]
    return [f"Other units: {', '.join(f'{column.heading} {column.unit}' for column in own)}."] if own else []


def _two_seeds_note(differences: Sequence[EffectEstimate]) -> list[str]:
    """Return the note that two seeds give wide intervals, as a list; empty unless a row was tested over two seeds."""
    if not any(difference.method == "crossed" and difference.seeds == 2 for difference in differences):
        return []
    return [
        "With two seeds the spread between seeds is estimated from a single difference, so intervals are "
        "wide; a third seed narrows them."
    ]


def _missing_notes(differences: Sequence[EffectEstimate]) -> list[str]:
    """Return up to two notes: one on missing pairs with counts by reason, one on the worst case of diverged runs.

    Each is left out where no row needs it.
    """
    counted: Counter[str] = Counter()
    for difference in differences:
        counted.update(difference.missing)
    notes = []
    if counted:
        reasons = ", ".join(f"{word} {n}" for word, n in counted.most_common())
        lacking = sum(bool(difference.missing) for difference in differences)
        notes.append(
            f"{lacking} of {len(differences)} rows lack runs that the grid lists (Pairs: found of expected). "
            f"Reasons, by the first cell without its number, over all rows: {reasons}."
        )
    if _any_worst(differences):
        notes.append(
            f"{WORST}: the mean with every diverged run at the worst possible value: 0% or 100% for a share; "
            "for a loss, which has no bound, the worst value measured in the sweep."
        )
    return notes


def _is_quality_column(data: SweepData, column: Column) -> bool:
    """Return True for validation loss and for needle accuracy at the longest length (`quality_columns`)."""
    return column.key in {quality.key for quality in quality_columns(data)}


def _detection_notes(data: SweepData, columns: Sequence[Column], effects: Sequence[Effect]) -> list[str]:
    """Return the notes on single runs, and on the smallest difference that each stratum detects with 80 % power.

    A stratum is the cells that share mixer and memory. The difference is given for one pair and for the largest number
    of pairs of any effect (of any effect within a mixer, if there are several mixers). Without a spread between runs a
    note says that it is not known.

    Args:
        data: The sweep.
        columns: The numbers to report.
        effects: Effects whose largest number of pairs is used.
    """
    notes = []
    if max((len(cells) for cells in data.configurations().values()), default=1) < 2:
        notes.append("One run per configuration (n = 1): variation between seeds is unknown.")
    strata = len(data.levels("attn_type")) > 1
    pairs = max((effect.pairs for effect in effects if not strata or "attn_type=" in effect.where), default=1)
    noise = [(column, noise_by_stratum(data, column)) for column in columns]
    texts = []
    for column, by_stratum in noise:
        parts = [
            f"{_stratum_label(key)} {_amount(column, detectable(stratum_noise, 1))} and {_amount(column, detectable(stratum_noise, max(pairs, 1)))}"
            for key, stratum_noise in by_stratum.items()
        ]
        texts += [f"{column.heading} {', '.join(parts)}"] if parts else []
    if texts:
        kind = next(stratum_noise.kind for _, by_stratum in noise for stratum_noise in by_stratum.values())
        notes.append(
            f"Smallest difference detected with 80% power, from the spread between {kind} of the same mixer and "
            f"memory, for one pair and for {max(pairs, 1)}: {'; '.join(texts)}. More in table power."
        )
    else:
        notes.append(
            "The detectable difference is unknown: the sweep has neither several seeds nor near-replicates (cells of one seed that differ only in a regularizer of negligible weight)."
        )
    return notes


def _stratum_label(key: tuple[str, ...]) -> str:
    return key[0] + (" + memory" if key[1] == "on" else f" + {key[1]}" if key[1] != "off" else "")


def _amount(column: Column, value: float) -> str:
    return format_number(value, column.decimals, percent=column.percent)


# --- the rows that a reader sees first --------------------------------------------------------------------------------


NEAR_MISS_P = 0.5
"""p corr below which the nearest interaction of a family without a sure one is shown."""


def default_columns(data: SweepData) -> list[Column]:
    """Return the numbers of declared contrasts and every number at its longest context length, without repetition."""
    declared = [contrast_column(data, contrast) for contrast in data.contrasts]
    return list({column.key: column for column in [*declared, *first_measures(data)]}.values())


def default_effects(data: SweepData, effects: Sequence[Effect]) -> list[Effect]:
    """Return the effects that are shown without --all-rows, in the given order.

    The declared contrasts are shown for every number. All other rows are limited to numbers at their longest context
    length: significant effects, within strata too; every level against the axis's reference level over the whole sweep;
    and, where the strata of such a row differ (heterogeneity), its rows within a single level of another axis.

    Args:
        data: The sweep.
        effects: All effects that were tested.
    """
    first = {column.key for column in first_measures(data)}
    apart = {
        (effect.measure.heading, *_level_key(effect))
        for effect in effects
        if not effect.where and effect.is_heterogeneous
    }

    def is_shown(effect: Effect) -> bool:
        """Return True for effects to show.

        These are declared contrasts, and of numbers at their longest length significant effects, levels against the
        reference over the whole sweep, and strata of one axis where such a row's strata differ.
        """
        if effect.confirmatory or (effect.is_significant and effect.measure.key in first):
            return True
        if effect.measure.key not in first or effect.reference != reference_level(data.levels(effect.axis)):
            return False
        return not effect.where or (
            effect.where.count("=") == 1 and (effect.measure.heading, *_level_key(effect)) in apart
        )

    return [effect for effect in effects if is_shown(effect)]


def default_interactions(interactions: Sequence[Interaction]) -> list[Interaction]:
    """Return the interactions that are shown without --all-rows.

    They are ordered by number (first appearance), then by the smallest corrected p of their family: the tests of one
    number and one set of axes, which are corrected together. A family with significant interactions gives all rows of
    the levels of these, within every stratum, significant or not. Any other family gives its row with the smallest
    corrected p if this is below 0.5, else none. Rows of a family keep their order.
    """
    families: dict[str, list[Interaction]] = {}
    for interaction in interactions:
        families.setdefault(interaction.family, []).append(interaction)
    order: dict[str, list[tuple[float, list[Interaction]]]] = {}
    for rows in families.values():
        nearest = min(rows, key=_sortable_p)
        sure_levels = {_level_key(row) for row in rows if row.is_significant}
        selected = [row for row in rows if _level_key(row) in sure_levels] or [nearest] * (
            _sortable_p(nearest) < NEAR_MISS_P
        )
        order.setdefault(nearest.measure.heading, []).append((_sortable_p(nearest), selected))
    return [
        interaction
        for blocks in order.values()
        for _, selected in sorted(blocks, key=lambda block: block[0])
        for interaction in selected
    ]


def _level_key(difference: EffectEstimate) -> tuple[object, ...]:
    """Return (axis, level, reference) of an effect, or (axes, levels, references) of an interaction."""
    if isinstance(difference, Effect):
        return difference.axis, difference.level, difference.reference
    assert isinstance(difference, Interaction)
    return difference.axes, difference.levels, difference.references


def _sortable_p(difference: EffectEstimate) -> float:
    """Return the corrected p of a row; 2.0 for NaN, so that it comes last."""
    return difference.p_corrected if difference.p_corrected == difference.p_corrected else 2.0
