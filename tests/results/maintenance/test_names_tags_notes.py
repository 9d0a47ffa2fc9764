"""Names, tags and notes of sweeps, on both kinds of database: nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest
from atma_sweep.results.errors import CellUnknown, StoreError, SweepBusy, SweepUnknown
from atma_sweep.results.maintenance import names_tags_notes
from atma_sweep.results.maintenance.overview import list_sweeps
from atma_sweep.results.store.records import CellRecord, Owner
from atma_sweep.results.store.store import Store
from databases import finished
from sqlalchemy import text
from tiers import every_nth

Make = Callable[..., list[CellRecord]]


def inactive(owner: Owner, until: datetime | None) -> bool:
    return False


def active(owner: Owner, until: datetime | None) -> bool:
    return True


def rows(store: Store, query: str) -> list[tuple[object, ...]]:
    return store.read(lambda session: [tuple(row) for row in session.execute(text(query))])


@pytest.fixture
def filled(store: Store, cells: Make, owner: Owner) -> Store:
    """Sweeps one (two revisions of three cells) and two (one of them and another); of one: done, failed, new."""
    first, second, third, fourth = cells(4)
    options = {"requested": []}
    store.record_revision("one", grid_text="a", grid_file="one.yaml", options=options, cells=[first, second])
    store.record_revision("one", grid_text="b", grid_file="one.yaml", options=options, cells=[first, second, third])
    store.record_revision("two", grid_text="c", grid_file="two.yaml", options=options, cells=[first, fourth])
    for cell, state in ((first, "done"), (second, "failed")):
        finished(store, cell, state)
    return store


def test_a_sweep_with_another_name_is_the_same_sweep(filled: Store) -> None:
    before = rows(filled, "SELECT id, created_at, launched_at, fence FROM sweep ORDER BY id")
    view = "SELECT cell, slug, axes, state FROM results WHERE sweep = '{}' ORDER BY cell"
    seen = [(row[0], row[1], str(row[2]), row[3]) for row in rows(filled, view.format("one"))]
    assert names_tags_notes.rename(filled, "one", "first-try", is_active=active, who="ada") == "one.yaml", (
        "nobody runs it"
    )
    assert rows(filled, "SELECT id, created_at, launched_at, fence FROM sweep ORDER BY id") == before
    assert [(row[0], row[1], str(row[2]), row[3]) for row in rows(filled, view.format("first-try"))] == seen
    assert rows(filled, view.format("one")) == []
    assert [event.message for event in filled.events(sweep="first-try") if event.kind == "renamed"] == [
        "one to first-try by ada"
    ]


@pytest.mark.parametrize(
    ("name", "new", "message"),
    every_nth([
        ("one", "two", "there is a sweep two already"),
        ("one", "a b", "is not a valid sweep name"),
        ("one", "printed-mine", "is not available as a sweep name"),
        ("printed-v2", "mine", "cannot be renamed"),
    ], 4),
)  # fmt: skip
def test_rename_refuses_invalid_names(filled: Store, name: str, new: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        names_tags_notes.rename(filled, name, new, is_active=inactive, who="ada")
    assert [sweep.name for sweep in filled.sweeps()] == ["two", "one"]


def test_a_sweep_that_runs_keeps_its_name(filled: Store, owner: Owner) -> None:
    filled.acquire_sweep("one", owner, 60)
    with pytest.raises(SweepBusy, match="cannot be renamed until it stops"):
        names_tags_notes.rename(filled, "one", "new", is_active=active, who="ada")
    with pytest.raises(SweepUnknown):
        filled.sweep("new")
    names_tags_notes.rename(filled, "one", "new", is_active=inactive, who="ada")
    assert filled.sweep("new").name == "new", "whose launch has died is free"


def test_tags_come_and_go(filled: Store) -> None:
    assert names_tags_notes.tag(filled, "one", ["paper", "a.b", "paper"]) == ("a.b", "paper")
    assert names_tags_notes.tag(filled, "one", ["old"]) == ("a.b", "old", "paper")
    assert names_tags_notes.tag(filled, "one", ["a.b", "old"], remove=True) == ("paper",)
    with pytest.raises(StoreError, match="has no tag 'old'; it has: paper"):
        names_tags_notes.tag(filled, "one", ["paper", "old"], remove=True)
    for strange in ("", "two words", "x" * 41, "-x", "\x1b[31m"):
        with pytest.raises(StoreError, match="is not a valid tag"):
            names_tags_notes.tag(filled, "one", ["fine", strange])
    assert (filled.sweep("one").tags, filled.sweep("two").tags) == (("paper",), ())
    names_tags_notes.tag(filled, "one", ["paper"], remove=True)
    assert rows(filled, "SELECT count(*) FROM sweep WHERE tags IS NOT NULL") == [(0,)]


def test_notes_of_sweeps_and_cells(filled: Store, cells: Make) -> None:
    cell = cells(1)[0]
    assert names_tags_notes.note(filled, "one", "  zu kurz \0 http://ada:geheim@x/ ") == (
        "sweep",
        "one",
        "zu kurz \N{REPLACEMENT CHARACTER} http://ada:***@x/",
    )
    assert names_tags_notes.note(filled, cell.slug, "look") == ("cell", cell.id, "look")
    assert names_tags_notes.note(filled, cell.id[:3], None) == ("cell", cell.id, "look")
    assert filled.cell(cell.id).note == "look"
    assert names_tags_notes.note(filled, cell.id, "") == ("cell", cell.id, None)
    with pytest.raises(CellUnknown, match=r"no sweep is named 'nine'.*there is: "):
        names_tags_notes.note(filled, "nine", "x")
    with pytest.raises(StoreError, match="at most 4,000 characters"):
        names_tags_notes.note(filled, "one", "x" * 4001)
    assert rows(filled, "SELECT count(*) FROM cell WHERE note IS NOT NULL") == [(0,)]


def test_the_list_counts_as_sql_does(filled: Store, owner: Owner) -> None:
    names_tags_notes.tag(filled, "two", ["paper"])
    filled.set_read_only("two")
    filled.acquire_sweep("one", owner, 60)
    second, first = list_sweeps(filled, active).sweeps
    assert (first.sweep, first.revisions, first.cells, first.done, first.failed, first.open) == ("one", 2, 3, 1, 1, 1)
    assert (second.sweep, second.revisions, second.cells, second.done, second.failed, second.open) == (
        "two",
        1,
        2,
        1,
        0,
        1,
    )
    states = rows(filled, "SELECT state, count(*) FROM results WHERE sweep = 'one' GROUP BY state ORDER BY state")
    assert states == [("done", 1), ("failed", 1), ("new", 1)] == sorted(first.counts.items())
    assert (first.origin, second.origin, second.tags) == ("launched", "imported", ("paper",))
    assert (first.run_by, second.run_by) == ("ada on here, pid 101", None)
    assert list_sweeps(filled, inactive).sweeps[1].run_by is None
    text = "\n".join(list_sweeps(filled, inactive).lines())
    assert "paper" in text
    assert "imported" in text
