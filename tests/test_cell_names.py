"""Every command that takes a cell takes the same names for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results.errors import CellAmbiguous, CellUnknown
from atma_sweep.results.store.records import AXES, CellRecord, Owner
from atma_sweep.results.store.store import Store, open_store

Run = Callable[..., tuple[int, str, str]]
WANTED = "fa11ed000001"
NAMES = ("fa11ed000001", "fa11", "fade-weak-d0-m1-w0-s1", "fade-weak-d0-m1-w0", "fade", "fade-weak-d0")


def cell(key: str, mixer: str, seed: int) -> CellRecord:
    levels = dict(zip(AXES, (mixer, "weak", "off", "on", "off"), strict=True))
    return CellRecord(
        id=key, slug=f"{mixer}-weak-d0-m1-w0-s{seed}", seed=seed, levels=levels, config={}, axes={}, tokens=10
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The wanted cell, which failed, two seeds of another, and in an older sweep a cell of its own."""
    opened = open_store(tmp_path / "atma.db", create=True)
    opened.record_revision("old", grid_text="x", grid_file="x", cells=[cell("0dd000000004", "nope", 1)])
    new = [cell(WANTED, "fade", 1), cell("ab0000000002", "wall", 1), cell("ab0000000003", "wall", 10)]
    opened.record_revision("new", grid_text="x", grid_file="x", cells=new)
    attempt = opened.start_attempt(WANTED, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
    opened.finish_attempt(attempt.id, 1, "failed", cause="no luck")
    return opened


def test_find_cell_takes_id_slug_and_beginnings(store: Store) -> None:
    names = dict.fromkeys(NAMES, WANTED) | {"nope": "0dd000000004", "wall-weak-d0-m1-w0-s1": "ab0000000002"}
    assert {name: store.find_cell(name).id for name in names} == names
    with pytest.raises(CellAmbiguous, match=r"'wall-weak-d0-m1-w0' fits 2 cells: .*; add the seed"):
        store.find_cell("wall-weak-d0-m1-w0")
    with pytest.raises(
        CellAmbiguous, match=r"'wall' fits 2 cells: ab0{9}2 \(wall-.*; give more characters of the id or"
    ):
        store.find_cell("wall")
    for unknown in ("ade", "", "nope-s1", "wall-weak-d0-m1-w1"):
        with pytest.raises(CellUnknown):
            store.find_cell(unknown)
    with pytest.raises(CellUnknown):
        store.find_cell("nope", "new")


def test_find_cell_breaks_no_number_of_a_slug(store: Store) -> None:
    """`-s1` is no beginning of `-s10`, or a command would take another seed than the one that was typed."""
    store.record_revision("ten", grid_text="x", grid_file="x", cells=[cell("0ff000000005", "rope", 10)])
    with pytest.raises(CellUnknown):
        store.find_cell("rope-weak-d0-m1-w0-s1")
    assert store.find_cell("rope-weak-d0-m1-w0-s").id == "0ff000000005"


def test_find_cell_prefers_a_complete_name_anywhere(store: Store) -> None:
    """A cell of an older sweep whose slug is the beginning of one in the newest."""
    short = cell("0ee000000006", "wall", 1)
    store.record_revision(
        "older", grid_text="x", grid_file="x", cells=[CellRecord(**{**vars(short), "slug": "fade-weak"})]
    )
    store.record_revision("new", grid_text="x", grid_file="x", cells=[store.cell(WANTED)])
    assert store.find_cell("fade-weak").id == "0ee000000006"


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_every_name_of_a_cell(store: Store, run: Run, name: str) -> None:
    """A command that lacks weights or a log names the cell that was meant, and so does a refusal to delete it."""
    code, out, _ = run("show", name, "--json")
    assert (code, json.loads(out)["cell"]["id"]) == (0, WANTED)
    code, out, _ = run("note", name, "--json")
    assert (code, json.loads(out)) == (0, {"cell": WANTED, "note": None})
    code, out, _ = run("retry", name, "--json")
    assert (code, json.loads(out)["cells"]) == (0, [WANTED])
    code, out, _ = run("db", "forget", name, "--probe", "needle", "--json")
    assert (code, json.loads(out)["cell"]) == (0, WANTED)
    refused = {command: run(command, name) for command in ("logs", "generate", "evaluate")}
    assert "attempt 1 ran on h, and its log is not in" in refused["logs"][2]
    for command in ("generate", "evaluate"):
        assert f"cell {WANTED} (fade-weak-d0-m1-w0-s1) is not trained yet" in refused[command][2]
    code, out, refusal = run("delete", name, "--dry-run")
    if name in (WANTED, "fade-weak-d0-m1-w0-s1"):
        assert (code, "to delete: 1 cell" in out) == (0, True)
    else:
        assert (code, f"if cell {WANTED} (fade-weak-d0-m1-w0-s1) is meant, give its complete id" in refusal) == (
            2,
            True,
        )


def test_status_points_to_the_log_of_a_failed_cell(store: Store, run: Run) -> None:
    code, out, _ = run("status", "--sweep", "new")
    lines = out.splitlines()
    assert (code, lines[-2:]) == (
        0,
        [
            f"  {WANTED} fade-weak-d0-m1-w0-s1: failed: no luck",
            f"  atma-sweep logs {WANTED} prints the log of fade-weak-d0-m1-w0-s1",
        ],
    )
