"""Commands that list, rename, tag, annotate and delete sweeps."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results import open_store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host import processes
from atma_sweep.sweep.planning import planner
from synthetic import synthetic_sweep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def filled(run: Run) -> None:
    """Sweep big with six done cells, in the working folder's database."""
    store = open_store("atma.db", create=True)
    synthetic_sweep(store, 6, 3)
    store.close()


@pytest.mark.usefixtures("filled")
def test_tags_and_notes_are_shown_in_lists_of_sweeps(run: Run) -> None:
    assert run("tag", "big", "paper", "old")[:2] == (0, "big: old, paper\n")
    assert run("tag", "big", "old", "--remove")[1] == "big: paper\n"
    assert run("note", "big", "too \x1b[31mshort")[0] == 0
    for command in ("sweeps", "status"):
        code, out, _ = run(command)
        assert (code, "paper" in out, "\x1b" in out) == (0, True, False)
        listed = json.loads(run(command, "--json")[1])[0]
        assert (listed["sweep"], listed["tags"], listed["note"]) == ("big", ["paper"], "too \x1b[31mshort")
    assert run("note", "000000000003", "look at it")[0] == 0
    assert "note: look at it\n" in run("show", "000000000003")[1]
    assert run("note", "big", "")[1] == "sweep big: no note\n"
    code, out, err = run("tag", "big", "no tag")
    assert (code, out, len(err.splitlines())) == (2, "", 1)


@pytest.mark.usefixtures("filled")
def test_report_of_a_renamed_sweep_differs_only_in_its_name(run: Run, tmp_path: Path) -> None:
    before = run("report", "--table", "6")[1]
    assert "sweep big" in before
    code, out, _ = run("rename", "big", "grand")
    assert (code, out) == (0, "sweep big is now named grand; to continue it: atma-sweep launch big.yaml --name grand\n")
    assert run("report", "--table", "6")[1] == before.replace("weep big", "weep grand")
    assert run("report", "--dashboard", "page.html", "--sweep", "grand")[0] == 0
    assert "grand, revision 1" in (tmp_path / "page.html").read_text()
    code, _, err = run("status", "--sweep", "big")
    assert (code, "no sweep is named 'big'" in err) == (2, True)


PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "keep-a-database-tidy.md"


def test_page_runs_as_pasted(run: Run) -> None:
    """The commands of the page run line by line on a sweep named quick; questions are answered here."""
    store = open_store("atma.db", create=True)
    cells = [planner.to_record(cell) for cell in load_grid("quick").expand(lambda _: "f" * 64)]
    synthetic_sweep(store, len(cells), 3, name="quick", cells=cells)
    store.close()
    lines = re.findall(r"^\$ atma-sweep (.*)$", PAGE.read_text(), re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["sweeps", "rename", "tag", "note", *["delete"] * 4, *["gc"] * 2]
    for line in lines:
        arguments = shlex.split(line, comments=True)
        asks = arguments[0] in ("delete", "gc") and not {"--yes", "--dry-run"} & set(arguments)
        code, _, err = run(*arguments, *(["--yes"] if asks else []))
        assert (code, err) == (0, ""), line
    assert sql("SELECT count(*) FROM sweep") == sql("SELECT count(*) FROM cell") == [(0,)]


@pytest.fixture
def sharing(run: Run) -> None:
    """Sweep big with eight done cells, of which sweep part shares three."""
    store = open_store("atma.db", create=True)
    sweep_cells = synthetic_sweep(store, 8, 3)
    store.record_revision("part", grid_text="axes: {}\n", grid_file="part.yaml", cells=sweep_cells[2:5])
    store.close()


def sql(query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect("atma.db")) as connection:
        return connection.execute(query).fetchall()


TABLES = "sweep revision revision_cell cell attempt measurement curve_point provenance event".split()


@pytest.mark.usefixtures("sharing")
def test_deletion_keeps_reports_of_a_sharing_sweep_unchanged(run: Run, tmp_path: Path) -> None:
    queries = [("report", "--table", "6", "--format", "csv"), ("report", "--table", "6", "--json"), ("status", "--json"), ("export", "--to", "csv", "--out", "-")]  # fmt: skip
    before = [run(*query, "--sweep", "part")[1] for query in queries]
    assert all(before)
    counted = [sql(f"SELECT count(*) FROM {table}")[0] for table in TABLES]
    code, out, _ = run("delete", "big", "--dry-run")
    assert (code, "stays: 3 cells, shared with sweep part" in out) == (0, True)
    code, out, err = run("delete", "big")
    assert (code, err) == (2, "atma-sweep: nothing was deleted; confirm with --yes\n")
    assert [sql(f"SELECT count(*) FROM {table}")[0] for table in TABLES] == counted
    assert not list(tmp_path.glob("*.backup"))
    deletion = json.loads(run("delete", "big", "--yes", "--json")[1])
    assert [run(*query, "--sweep", "part")[1] for query in queries] == before
    assert (deletion["deleted"], len(deletion["cells"]), len(deletion["kept"])) == (True, 5, 3)
    assert sql("PRAGMA foreign_key_check") == []
    rows_after = dict(zip(TABLES, [sql(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES], strict=True))
    assert (rows_after["sweep"], rows_after["cell"], rows_after["attempt"], rows_after["curve_point"]) == (1, 3, 3, 9)
    # and the copy that was made before has all of it
    with contextlib.closing(sqlite3.connect(deletion["backup"])) as copy:
        assert [copy.execute(f"SELECT count(*) FROM {table}").fetchone() for table in TABLES] == counted


@pytest.mark.usefixtures("sharing")
def test_single_measurements_go_and_those_that_are_shared_stay(run: Run) -> None:
    mine, shared = "000000000000", "000000000003"
    query = f"SELECT count(*) FROM results WHERE sweep = 'big' AND cell = '{mine}'"
    (before,) = sql(query)[0]
    named = ("--probe", "clean", "--metric", "nats", "--length", "2048")
    code, out, _ = run("delete", mine, *named, "--yes", "--no-backup")
    assert (code, out.splitlines()[-1]) == (0, "deleted")
    assert sql(query) == [(before - 1,)]
    assert sql(f"{query} AND probe = 'clean' AND length = 2048") == [(0,)]
    assert sql(f"{query} AND probe = 'junk' AND length = 2048") == [(1,)]
    code, _, err = run("delete", shared, *named, "--yes")
    assert (code, "sweeps big and part share cell" in err) == (2, True)
    for wrong in (("big", *named), (mine, shared, *named)):
        assert run("delete", *wrong, "--yes")[0] == 2
    code, out, _ = run("delete", shared, "--dry-run")
    assert (code, "to delete: nothing" in out, "shared with sweep big and part" in out) == (0, True, True)


@pytest.mark.usefixtures("sharing")
def test_running_sweep_is_not_deleted(run: Run) -> None:
    store = open_store("atma.db")
    store.acquire_sweep("big", processes.this_process("launch"), 60)
    for command in (("delete", "big", "--yes"), ("delete", "000000000000", "--yes"), ("rename", "big", "new")):
        code, out, err = run(*command)
        assert (code, out, len(err.splitlines())) == (3, "", 1)
        assert "is run by launch" in err
    store.close()
