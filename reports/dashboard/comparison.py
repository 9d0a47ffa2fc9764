"""Another sweep beside that of the page: matched numbers with a verdict, the needle and the effects of both; what cannot be
compared is not judged, and the page says why."""

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
from ..table_builder import difference
from ..tables.compare import BEYOND, UNKNOWN, WITHIN, NumberComparison, compared, not_judged_lines
from .main_results import forest_json, json_fields, main_columns, needle_panels


def comparison_block(store: Store, data: SweepData, reference: str) -> dict[str, Any]:
    """The sweep of the page beside `reference`; `why` where they have nothing in common, and then nothing else.

    `measures` are what both measured, `rows` the numbers by their place in it: the words of a configuration, its cells by
    their place in the sweep, the printed numbers (here, there, difference, limit), the numbers of here and there in the unit
    that is printed, the verdict, and what to beware of. `effects` and `needle` are of both sweeps, this one first.
    Raises SweepUnknown, StoreError, ReportError for a sweep beside itself.
    """
    if reference == data.sweep:
        raise ReportError(f"--compare {reference}: that is the sweep of the page itself; name another one")
    reference_store = store_with_builtin(store, reference)
    reference_data = load_sweep_data(reference_store, reference)
    base = {
        "reference": reference,
        "source": printed_source(reference_store.revision(reference, reference_data.revision)),
    }
    try:
        both = compared(ComparedSweep(store, data), ComparedSweep(reference_store, reference_data))
    except ReportError as error:
        return base | {"why": f"{str(error).partition('; compare')[0].capitalize()}."}
    columns = list(dict.fromkeys(number.column for number in both.numbers))
    cell_index = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    return base | {
        "why": None,
        "refused": list(not_judged_lines(both.differences, both.numbers)),
        "notes": [
            *([f"Unlike {reference}: {'; '.join(recipe_difference.text for recipe_difference in both.differences)}."] if both.differences else []),
            *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in both.unrecorded),
            f"Limit: the largest difference that the spread between runs of the same mixer and memory explains (95%), at least a printed digit and what the trials of an accuracy explain. {'The authors’ logs are compared where there are any.' if base['source'] else ''}".strip(),
        ],
        "measures": [json_fields(column) | {"probe": column.probe} | _verdict_counts([number for number in both.numbers if number.column == column]) for column in columns],
        "rows": [_number_row(number, columns.index(number.column), cell_index) for number in both.numbers],
        "words": [*AXIS_HEADINGS, *both.axes],
        "effects": _effect_pairs(data, reference_data),
        "needle": _needle_panels(store, data, reference_store, reference_data),
    }  # fmt: skip


def comparison_summary(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """What the first page says of it."""
    lines = (
        [comparison["why"]] if comparison["why"] else [*comparison["refused"], *_measure_lines(comparison["measures"])]
    )
    return {"reference": comparison["reference"], "lines": lines, "why": comparison["why"]}


def _measure_lines(measures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for every kind of number, all its lengths together."""
    for name in dict.fromkeys(measure["heading"].partition("@")[0] for measure in measures):
        lengths_of_measure = [measure for measure in measures if measure["heading"].partition("@")[0] == name]
        within, beyond, unknown = (
            sum(measure[kind] for measure in lengths_of_measure) for kind in ("within", "beyond", "unknown")
        )
        judged, more = within + beyond, f"; {unknown} not judged" if unknown else ""
        lengths = f" at {len(lengths_of_measure)} lengths" if len(lengths_of_measure) > 1 else ""
        if judged:
            chance = format_number(ALPHA * judged, 1)
            yield f"{name}: {beyond} of {counted(judged, 'number')}{lengths} differ by more than the known spread, where chance alone puts {chance}{more}."
        elif unknown:
            yield f"{name}: {counted(unknown, 'number')}{lengths} matched, none judged."
        else:
            yield f"{name}: no number on both sides."


def _verdict_counts(numbers: Sequence[NumberComparison]) -> dict[str, Any]:
    count = Counter(number.verdict for number in numbers)
    alone = sum(number.difference is None for number in numbers)
    counts = {"within": count[WITHIN], "beyond": count[BEYOND], "unknown": count[UNKNOWN] - alone}
    return counts | {
        "matched": len(numbers) - alone,
        "chance": format_number(ALPHA * (count[WITHIN] + count[BEYOND]), 1),
    }


def _number_row(number: NumberComparison, measure: int, cell_index: Mapping[str, int]) -> dict[str, Any]:
    column, scale = number.column, 100 if number.column.percent else 1
    limit = "-" if number.limit is None else format_number(number.limit, column.decimals, percent=column.percent)
    return {
        "measure": measure,
        "words": [*number.levels, *number.further],
        "cells": [cell_index[cell] for cell in number.measured.cells],
        "texts": [number.measured.text, number.published.text, difference(column, "", number.difference).text, limit],
        "numbers": [None if value is None else round(scale * value, 9) for value in (number.measured.value, number.published.value)],
        "verdict": {WITHIN: "within", BEYOND: "beyond"}.get(number.verdict, "not judged"),
        "beware": list(number.flags),
    }  # fmt: skip


def _effect_pairs(data: SweepData, reference_data: SweepData) -> dict[str, Any]:
    """What each level does in both, by rows that both have."""
    reference_keys = {column.key for column in main_columns(reference_data)}
    columns = [column for column in main_columns(data) if column.key in reference_keys]
    rows_of_sweep, reference_rows = (forest_json(sweep_data, columns)["rows"] for sweep_data in (data, reference_data))

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("measure", "axis", "level", "reference", "where"))

    reference_by_key = {key(row): row for row in reference_rows}
    rows = [{"here": row, "there": reference_by_key[key(row)]} for row in rows_of_sweep if key(row) in reference_by_key]
    return {"measures": [json_fields(column) for column in columns], "rows": rows}


def _needle_panels(
    store: Store, data: SweepData, reference_store: Store, reference_data: SweepData
) -> list[dict[str, Any]]:
    panels_by_sweep = (
        (data.sweep, needle_panels(store, data)),
        (reference_data.sweep, needle_panels(reference_store, reference_data)),
    )
    return [{"sweep": sweep, **needle} for sweep, needle in panels_by_sweep]
