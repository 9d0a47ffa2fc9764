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
from ..tables.compare import BEYOND, UNKNOWN, WITHIN, NumberComparison, compared, refused
from .main_results import forest_of, json_fields, main_columns, needle_panels


def comparison_block(store: Store, data: SweepData, reference: str) -> dict[str, Any]:
    """The sweep of the page beside `reference`; `why` where they have nothing in common, and then nothing else.

    `measures` are what both measured, `rows` the numbers by their place in it: the words of a configuration, its cells by
    their place in the sweep, the printed numbers (here, there, difference, limit), the numbers of here and there in the unit
    that is printed, the verdict, and what to beware of. `effects` and `needle` are of both sweeps, this one first.
    Raises SweepUnknown, StoreError, ReportError for a sweep beside itself.
    """
    if reference == data.sweep:
        raise ReportError(f"--compare {reference}: that is the sweep of the page itself; name another one")
    home = store_with_builtin(store, reference)
    theirs = load_sweep_data(home, reference)
    base = {"reference": reference, "source": printed_source(home.revision(reference, theirs.revision))}
    try:
        both = compared(ComparedSweep(store, data), ComparedSweep(home, theirs))
    except ReportError as error:
        return base | {"why": f"{str(error).partition('; compare')[0].capitalize()}."}
    columns = list(dict.fromkeys(one.column for one in both.numbers))
    place = {cell.cell_id: index for index, cell in enumerate(data.cells)}
    return base | {
        "why": None,
        "refused": list(refused(both.differences, both.numbers)),
        "notes": [
            *([f"Unlike {reference}: {'; '.join(one.text for one in both.differences)}."] if both.differences else []),
            *(f"{one[0].upper()}{one[1:]}." for one in both.unrecorded),
            f"Limit: the largest difference that the spread between runs of the same mixer and memory explains (95%), at least a printed digit and what the trials of an accuracy explain. {'The authors’ logs are compared where there are any.' if base['source'] else ''}".strip(),
        ],
        "measures": [json_fields(column) | {"probe": column.probe} | _counted([one for one in both.numbers if one.column == column]) for column in columns],
        "rows": [_row(one, columns.index(one.column), place) for one in both.numbers],
        "words": [*AXIS_HEADINGS, *both.axes],
        "effects": _effects(data, theirs),
        "needle": _needles(store, data, home, theirs),
    }  # fmt: skip


def comparison_summary(beside: Mapping[str, Any]) -> dict[str, Any]:
    """What the first page says of it."""
    lines = [beside["why"]] if beside["why"] else [*beside["refused"], *_told(beside["measures"])]
    return {"reference": beside["reference"], "lines": lines, "why": beside["why"]}


def _told(measures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for every kind of number, all its lengths together."""
    for name in dict.fromkeys(measure["heading"].partition("@")[0] for measure in measures):
        some = [measure for measure in measures if measure["heading"].partition("@")[0] == name]
        within, beyond, unknown = (sum(measure[kind] for measure in some) for kind in ("within", "beyond", "unknown"))
        judged, more = within + beyond, f"; {unknown} not judged" if unknown else ""
        lengths = f" at {len(some)} lengths" if len(some) > 1 else ""
        if judged:
            chance = format_number(ALPHA * judged, 1)
            yield f"{name}: {beyond} of {counted(judged, 'number')}{lengths} differ by more than the known spread, where chance alone puts {chance}{more}."
        elif unknown:
            yield f"{name}: {counted(unknown, 'number')}{lengths} matched, none judged."
        else:
            yield f"{name}: no number on both sides."


def _counted(some: Sequence[NumberComparison]) -> dict[str, Any]:
    count = Counter(one.verdict for one in some)
    alone = sum(one.difference is None for one in some)
    told = {"within": count[WITHIN], "beyond": count[BEYOND], "unknown": count[UNKNOWN] - alone}
    return told | {"matched": len(some) - alone, "chance": format_number(ALPHA * (count[WITHIN] + count[BEYOND]), 1)}


def _row(one: NumberComparison, measure: int, place: Mapping[str, int]) -> dict[str, Any]:
    column, scale = one.column, 100 if one.column.percent else 1
    limit = "-" if one.limit is None else format_number(one.limit, column.decimals, percent=column.percent)
    return {
        "measure": measure,
        "words": [*one.levels, *one.further],
        "cells": [place[cell] for cell in one.measured.cells],
        "texts": [one.measured.text, one.published.text, difference(column, "", one.difference).text, limit],
        "numbers": [None if value is None else round(scale * value, 9) for value in (one.measured.value, one.published.value)],
        "verdict": {WITHIN: "within", BEYOND: "beyond"}.get(one.verdict, "not judged"),
        "beware": list(one.flags),
    }  # fmt: skip


def _effects(data: SweepData, theirs: SweepData) -> dict[str, Any]:
    """What each level does in both, by rows that both have."""
    known = {column.key for column in main_columns(theirs)}
    columns = [column for column in main_columns(data) if column.key in known]
    mine, other = (forest_of(one, columns)["rows"] for one in (data, theirs))

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("measure", "axis", "level", "reference", "where"))

    found = {key(row): row for row in other}
    rows = [{"here": row, "there": found[key(row)]} for row in mine if key(row) in found]
    return {"measures": [json_fields(column) for column in columns], "rows": rows}


def _needles(store: Store, data: SweepData, home: Store, theirs: SweepData) -> list[dict[str, Any]]:
    found = ((data.sweep, needle_panels(store, data)), (theirs.sweep, needle_panels(home, theirs)))
    return [{"sweep": sweep, **needle} for sweep, needle in found]
