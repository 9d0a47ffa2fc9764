"""Comparison of the page's sweep with a reference sweep: matched numbers, verdicts, effects and needle curves.

Numbers that cannot be compared are not judged, and the page says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...results.builtin_sweeps import store_with_builtin
from ...results.console.text import counted
from ...results.store.store import Store
from ..live.status import printed_source
from ..number_format import format_number
from ..result_columns import AXIS_HEADINGS
from ..stats.significance.paired_tests import ALPHA
from ..stats.sweep_differences import ComparedSweep
from ..sweep_data import ReportError, SweepData, load_sweep_data
from ..table_builder import difference_entry
from ..tables.compare import BEYOND, UNKNOWN, WITHIN, NumberComparison, compare_sweeps, not_judged_lines
from .main_results import forest_json, json_fields, main_columns, needle_panels


def comparison_block(store: Store, data: SweepData, reference: str) -> dict[str, Any]:
    """Return the JSON block that compares the page's sweep with the sweep `reference`.

    Args:
        store: Database of the page's sweep.
        data: The page's sweep.
        reference: Name of the other sweep, of the database or built in.

    Returns:
        reference, source (where the reference is printed, or None) and why. Where the sweeps have nothing in common,
        `why` says so and there are no other keys; otherwise it is None. measures: what both measured, with counts of
        verdicts. squares: indices of the measures to draw, each at its longest length. counts: headings and rows of the
        table of verdicts. rows: a dict per compared number (measure, words, cells, texts, numbers, verdict, beware). effects and
        needle: of both sweeps, the page's first. refused and notes: sentences. words: headings of the levels.

    Raises:
        SweepUnknown, StoreError: The reference cannot be read.
        ReportError: The reference is the page's own sweep.
    """
    if reference == data.sweep:
        raise ReportError(f"--compare {reference}: this is the sweep of the page itself; choose another one")
    reference_store = store_with_builtin(store, reference)
    reference_data = load_sweep_data(reference_store, reference)
    base = {
        "reference": reference,
        "source": printed_source(reference_store.revision(reference, reference_data.revision)),
    }
    try:
        both = compare_sweeps(ComparedSweep(store, data), ComparedSweep(reference_store, reference_data))
    except ReportError as error:
        return base | {"why": f"{str(error).partition('; choose')[0].capitalize()}."}
    columns = list(dict.fromkeys(number.column for number in both.numbers))
    measures = [
        json_fields(column)
        | {"probe": column.probe}
        | _verdict_counts([number for number in both.numbers if number.column == column])
        for column in columns
    ]
    cell_index = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    return base | {
        "why": None,
        "refused": list(not_judged_lines(both.differences, both.numbers)),
        "notes": [
            *([f"Differences from {reference}: "
f"{'; '.join(recipe_difference.text for recipe_difference in both.differences)}."] if both.differences else []),
            *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in both.unrecorded),
            ("Limit: the largest difference that the spread between runs of the same mixer and memory explains "
"(95%), at least a printed digit and the sampling error of an accuracy's trials. "
f"{'The authors’ logs are compared where available.' if base['source'] else ''}").strip(),
        ],
        "measures": measures,
        "squares": [index for index, measure in enumerate(measures) if measure["matched"] and measure["probe"] not in [later["probe"] for later in measures[index + 1 :]]],
        "counts": [GLANCE_HEADINGS, [_glance_row(measure) for measure in measures]],
        "rows": [_number_row(number, columns.index(number.column), cell_index) for number in both.numbers],
        "words": [*AXIS_HEADINGS, *both.axes],
        "effects": _effect_pairs(data, reference_data),
        "needle": _needle_panels(store, data, reference_store, reference_data),
    }  # fmt: skip


GLANCE_HEADINGS = ["Measure", "Matched", "Within", "Beyond", "Expected by chance", "Not judged"]


def _glance_row(measure: Mapping[str, Any]) -> list[str]:
    """Return the texts of a measure in the table of verdicts."""
    counts = [str(measure[name]) for name in ("matched", "within", "beyond")]
    chance = measure["chance"] if measure["within"] + measure["beyond"] else ""
    return [measure["heading"], *counts, chance, str(measure["unknown"])]


def comparison_summary(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a comparison block that the first page shows: reference, lines and why.

    `lines` are sentences: why there is no comparison, else what is not judged and then one per kind of number.
    """
    lines = (
        [comparison["why"]] if comparison["why"] else [*comparison["refused"], *_measure_lines(comparison["measures"])]
    )
    return {"reference": comparison["reference"], "lines": lines, "why": comparison["why"]}


def _measure_lines(measures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence per kind of number, over all its lengths: how many differ beyond the limit.

    A kind is a heading without its length. The sentence of a kind without judged numbers says so.

    Args:
        measures: JSON of the measures, with heading and the counts of `_verdict_counts`.
    """
    for name in dict.fromkeys(measure["heading"].partition("@")[0] for measure in measures):
        lengths_of_measure = [measure for measure in measures if measure["heading"].partition("@")[0] == name]
        within, beyond, unknown = (
            sum(measure[kind] for measure in lengths_of_measure) for kind in ("within", "beyond", "unknown")
        )
        judged, more = within + beyond, f"; {unknown} not judged" if unknown else ""
        lengths = f" at {len(lengths_of_measure)} lengths" if len(lengths_of_measure) > 1 else ""
        if judged:
            chance = format_number(ALPHA * judged, 1)
            yield (
                f"{name}: {beyond} of {counted(judged, 'number')}{lengths} exceed the limit ({chance} expected by "
                f"chance){more}."
            )
        elif unknown:
            yield f"{name}: {counted(unknown, 'number')}{lengths} matched, none judged."
        else:
            yield f"{name}: no number in both sweeps."


def _verdict_counts(numbers: Sequence[NumberComparison]) -> dict[str, Any]:
    """Return the counts of a measure: within, beyond, unknown (matched but not judged), matched, and chance.

    Numbers that one side has not measured count nowhere. `chance` is the text of the number of `beyond` verdicts
    expected by chance: 5 % of the judged ones.
    """
    count = Counter(number.verdict for number in numbers)
    alone = sum(number.difference is None for number in numbers)
    counts = {"within": count[WITHIN], "beyond": count[BEYOND], "unknown": count[UNKNOWN] - alone}
    return counts | {
        "matched": len(numbers) - alone,
        "chance": format_number(ALPHA * (count[WITHIN] + count[BEYOND]), 1),
    }


def _number_row(number: NumberComparison, measure: int, cell_index: Mapping[str, int]) -> dict[str, Any]:
    """Return the JSON row of a compared number.

    Args:
        number: The comparison.
        measure: Index of its measure.
        cell_index: Index in the sweep by cell id.

    Returns:
        measure, words (levels of the axes), cells (indices), texts (measured, published, difference, limit), numbers
        (measured and published in printed units, None where missing), verdict ("within", "beyond" or "not judged") and
        beware (flags).
    """
    column, scale = number.column, 100 if number.column.percent else 1
    limit = "-" if number.limit is None else format_number(number.limit, column.decimals, percent=column.percent)
    return {
        "measure": measure,
        "words": [*number.levels, *number.further],
        "cells": [cell_index[cell] for cell in number.measured.cells],
        "texts": [number.measured.text, number.published.text, difference_entry(column, "", number.difference).text, limit],
        "numbers": [None if value is None else round(scale * value, 9) for value in (number.measured.value, number.published.value)],
        "verdict": {WITHIN: "within", BEYOND: "beyond"}.get(number.verdict, "not judged"),
        "beware": list(number.flags),
    }  # fmt: skip


def _effect_pairs(data: SweepData, reference_data: SweepData) -> dict[str, Any]:
    """Return the effects that both sweeps have, as {"measures": ..., "rows": [{"here": row, "there": row}], "texts": ...}.

    A row has measure (index), axis, level, reference, where, pairs, mean, low, high and their texts, sure, mixed, i2,
    declared and worst; rows are in the order of the page's sweep. Effects agree if measure, axis, levels and stratum
    do. texts: the effects over the whole sweep as lines of a table (measure, factor, levels, both means, agreement).
    """
    reference_keys = {column.key for column in main_columns(reference_data)}
    columns = [column for column in main_columns(data) if column.key in reference_keys]
    rows_of_sweep, reference_rows = (forest_json(sweep_data, columns)["rows"] for sweep_data in (data, reference_data))

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("measure", "axis", "level", "reference", "where"))

    reference_by_key = {key(row): row for row in reference_rows}
    rows = [{"here": row, "there": reference_by_key[key(row)]} for row in rows_of_sweep if key(row) in reference_by_key]
    texts = [
        [columns[own_row["measure"]].heading, own_row["axis"], f"{own_row['level']} against {own_row['reference']}"]
        + [f"{mean} ({spread})" if row["low"] is not None else mean for row in (own_row, reference_row) for mean, spread in [row["shown"]]]
        + [_agreement(own_row, reference_row)]
        for own_row, reference_row in (pair.values() for pair in rows)
        if not own_row["where"]
    ]  # fmt: skip
    return {"measures": [json_fields(column) for column in columns], "rows": rows, "texts": texts}


def _agreement(own_row: Mapping[str, Any], reference_row: Mapping[str, Any]) -> str:
    """Return how significance and signs of an effect agree between both sweeps."""
    if own_row["sure"] and reference_row["sure"]:
        return f"{'same sign' if own_row['mean'] * reference_row['mean'] > 0 else 'opposite signs'}, both significant"
    return "significant in one" if own_row["sure"] or reference_row["sure"] else "significant in neither"


def _needle_panels(
    store: Store, data: SweepData, reference_store: Store, reference_data: SweepData
) -> list[dict[str, Any]]:
    """Return two dicts, for the page's sweep and the reference.

    Keys: sweep (name), panels (title and lines, shares in %), trained, ceiling, note, yardstick and why; of a sweep
    without needle accuracies only sweep, panels ([]) and why.
    """
    panels_by_sweep = (
        (data.sweep, needle_panels(store, data)),
        (reference_data.sweep, needle_panels(reference_store, reference_data)),
    )
    return [{"sweep": sweep, **needle} for sweep, needle in panels_by_sweep]
