"""Sweeps of which effects, interactions, contrasts and power can say little or nothing: a note says why, and nothing else does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.contrasts import Contrast, as_options
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

    def made(levels: list[dict[str, Any]], value: Value, state: str = "done") -> dict[str, Table]:
        cells: list[CellRecord] = [cell(place, **words) for place, words in enumerate(levels)]
        options = {"contrasts": as_options(tuple(DECLARED)), "requested": [["val", 0], ["needle", 128]]}
        empty.record_revision("s", grid_text="x", grid_file="x", cells=cells, options=options)
        for place, one in enumerate(cells):
            number = value(place)
            if number is not None:
                found = [
                    Measurement(probe="val", metric="val_loss", value=3 + number),
                    Measurement(probe="needle", metric="digit_accuracy", length=128, value=number, n=80),
                ]
                run(empty, one.id, state, found if state == "done" else [])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return {name: make_table(name, empty) for name in TABLES}

    return made


def square(*mixers: str, seeds: int = 1) -> list[dict[str, Any]]:
    words = ("off", "on")
    return [
        {"attn_type": mixer, "memory": memory, "window": window, "seed": seed}
        for mixer in mixers
        for memory in words
        for window in words
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
    found = tables(levels, lambda place: 0.5, state)
    rows = found["effects"].rows
    assert all(row[1].endswith("(declared)") and "-" in row for row in rows)
    assert "no two cells with numbers agree on all axes but one" in notes(found["effects"]).lower()
    assert found["interactions"].rows == found["power"].rows == ()
    assert "no four cells" in notes(found["interactions"]).lower()
    assert "how large a difference it can see is not known" in notes(found["power"])
    assert {row[-1] for row in found["contrasts"].rows} == {"no pairs"}


def test_a_constant_metric(tables: Any) -> None:
    found = tables(square("polar", "nope"), lambda place: 0.5)
    assert len(found["effects"].rows) > 0
    for row in found["effects"].rows:
        shown = dict(zip(found["effects"].columns, row, strict=True))
        assert (shown["Up"], shown["Down"], float(shown["Mean"])) == ("0", "0", 0)
        assert shown["p corr"] in ("1.0000", "-"), "equals differ by nothing, never surely"
    assert found["interactions"].rows == ()
    assert "none came near" in notes(found["interactions"]).lower()
    assert {row[-1] for row in found["contrasts"].rows} == {"not shown"}, "four pairs without variance have no test"


@pytest.mark.thorough
def test_seeds_missing_here_and_there(tables: Any) -> None:
    """Every third run is not there, and one configuration has none at all."""
    found = tables(
        square("polar", "nope", seeds=3), lambda place: None if place % 3 == 1 or place < 3 else place % 7 / 10
    )
    assert len(found["effects"].rows) > 0
    assert "lack runs that the grid lists" in notes(found["effects"])
    assert any(" of " in cell for row in found["effects"].rows for cell in row)
    assert len(found["power"].rows) > 0


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_that_two_seeds_say_little_of_seeds_is_said(tables: Any, seeds: int) -> None:
    found = tables(square("polar", "nope", seeds=seeds), lambda place: place * (place + 3) % 11 / 10)
    for name in ("effects", "contrasts"):
        assert ("Of two seeds one difference alone" in notes(found[name])) == (seeds == 2)


def test_all_seeds_alike(tables: Any) -> None:
    """A spread of nothing: nobody can plan by it, and a difference without variance is no infinite t."""
    found = tables(square("polar", "nope", seeds=2), lambda place: 0.25 * (place // 8))
    assert len(found["power"].rows) > 0
    assert not any("inf" in cell or "nan" in cell for name in TABLES for row in found[name].rows for cell in row)
