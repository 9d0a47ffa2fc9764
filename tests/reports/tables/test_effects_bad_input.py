"""Sweeps of which effects, interactions, contrasts and power can say little or nothing: a note says why, and nothing else does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.contrasts import Contrast, contrasts_as_json
from atma_sweep.results.store.records import CellRecord, Measurement
from atma_sweep.results.store.store import Store

TABLES = ("effects", "interactions", "contrasts", "power")
DECLARED = [
    Contrast(probe="needle", metric="digit_accuracy", length=128, axis="memory", level="on", margin=0.05),
    Contrast(probe="val", metric="val_loss", length=0, axis="attn_type", level="nope", reference="polar"),
]
Value = Callable[[int], float | None]


@pytest.fixture
def tables(empty: Store, make: Any, run: Callable[..., None]) -> Callable[..., dict[str, Table]]:
    cell, _ = make

    def tables_of_levels(levels: list[dict[str, Any]], value: Value, state: str = "done") -> dict[str, Table]:
        cells: list[CellRecord] = [cell(index, **levels_of_cell) for index, levels_of_cell in enumerate(levels)]
        options = {"contrasts": contrasts_as_json(tuple(DECLARED)), "requested": [["val", 0], ["needle", 128]]}
        empty.record_revision("s", grid_text="x", grid_file="x", cells=cells, options=options)
        for position, record in enumerate(cells):
            number = value(position)
            if number is not None:
                measurements = [
                    Measurement(probe="val", metric="val_loss", value=3 + number),
                    Measurement(probe="needle", metric="digit_accuracy", length=128, value=number, n=80),
                ]
                run(empty, record.id, state, measurements if state == "done" else [])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return {name: make_table(name, empty) for name in TABLES}

    return tables_of_levels


def square(*mixers: str, seeds: int = 1) -> list[dict[str, Any]]:
    switch = ("off", "on")
    return [
        {"attn_type": mixer, "memory": memory, "window": window, "seed": seed}
        for mixer in mixers
        for memory in switch
        for window in switch
        for seed in range(seeds)
    ]


def notes(table: Table) -> str:
    return " ".join(table.notes)


@pytest.mark.parametrize(
    ("levels", "state"),
    [([{}], "done"), ([{}, {"memory": "off", "attn_type": "nope"}], "done"), (square("polar", "nope"), "diverged")],
    ids=["one cell", "no pairs", "all diverged"],
)
def test_nothing_to_compare(tables: Any, levels: list[dict[str, Any]], state: str) -> None:
    tables_by_name = tables(levels, lambda index: 0.5, state)
    rows = tables_by_name["effects"].rows
    assert all(row[1].endswith("(declared)") and "-" in row for row in rows)
    assert "no two measured cells differ in exactly one axis" in notes(tables_by_name["effects"]).lower()
    assert tables_by_name["interactions"].rows == tables_by_name["power"].rows == ()
    assert "no four measured cells" in notes(tables_by_name["interactions"]).lower()
    assert "the required sample size is unknown" in notes(tables_by_name["power"]).lower()
    assert {row[-1] for row in tables_by_name["contrasts"].rows} == {"no pairs"}


def test_a_constant_metric(tables: Any) -> None:
    tables_by_name = tables(square("polar", "nope"), lambda index: 0.5)
    assert len(tables_by_name["effects"].rows) > 0
    for row in tables_by_name["effects"].rows:
        shown = dict(zip(tables_by_name["effects"].columns, row, strict=True))
        assert (shown["Up"], shown["Down"], float(shown["Mean"])) == ("0", "0", 0)
        assert shown["p corr"] in ("1.0000", "-"), "equals differ by nothing, never surely"
    assert tables_by_name["interactions"].rows == ()
    assert "no interaction has a p corr below 0.5" in notes(tables_by_name["interactions"]).lower()
    assert {row[-1] for row in tables_by_name["contrasts"].rows} == {"not significant"}, (
        "four pairs without variance have no test"
    )


@pytest.mark.thorough
def test_seeds_missing_here_and_there(tables: Any) -> None:
    """Every third run is not there, and one configuration has none at all."""
    tables_by_name = tables(
        square("polar", "nope", seeds=3), lambda index: None if index % 3 == 1 or index < 3 else index % 7 / 10
    )
    assert len(tables_by_name["effects"].rows) > 0
    assert "lack runs that the grid lists" in notes(tables_by_name["effects"])
    assert any(" of " in cell for row in tables_by_name["effects"].rows for cell in row)
    assert len(tables_by_name["power"].rows) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_two_seeds_get_a_note(tables: Any, seeds: int) -> None:
    tables_by_name = tables(square("polar", "nope", seeds=seeds), lambda index: index * (index + 3) % 11 / 10)
    for name in ("effects", "contrasts"):
        assert ("With two seeds the spread" in notes(tables_by_name[name])) == (seeds == 2)


def test_all_seeds_alike(tables: Any) -> None:
    """A spread of nothing: nobody can plan by it, and a difference without variance is no infinite t."""
    tables_by_name = tables(square("polar", "nope", seeds=2), lambda index: 0.25 * (index // 8))
    assert len(tables_by_name["power"].rows) > 0
    assert not any(
        "inf" in cell or "nan" in cell for name in TABLES for row in tables_by_name[name].rows for cell in row
    )
