"""Shell completion: complete, quick because it imports little, and silent whatever the database is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from atma_sweep.reports.figures import FIGURES
from atma_sweep.reports.tables import SECOND_VERSION, TABLES
from atma_sweep.results.metrics import METRICS
from atma_sweep.results.names import PUBLISHED, SHIPPED
from atma_sweep.results.store.records import CellRecord
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.grid.grid import shipped
from atma_sweep.sweep.probes import PROBES

Complete = Callable[[str], list[str]]
HEAVY = ("torch", "pandas", "matplotlib", "ray", "sqlalchemy", "scipy", "pyarrow")


@pytest.fixture
def complete(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Returns what bash is offered for the last word of a line."""

    def offered(line: str) -> list[str]:
        monkeypatch.setenv("_ATMA_SWEEP_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        code, out, err = run()
        assert (code, err) == (0, "")
        return out.split()

    return offered


@pytest.fixture
def database(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "atma.db", create=True)
    levels = {"attn_type": "polar", "reg_mode": "weak", "distractor": "off", "memory": "on", "window": "off"}
    for name, slugs in (("one", ("a_1", "ab1")), ("two", ("b1",))):
        cells = [CellRecord(id=slug, slug=slug, seed=0, levels=levels, config={}, tokens=1) for slug in slugs]
        store.record_revision(name, grid_text="", grid_file="q.yaml", cells=cells)
    store.close()
    return tmp_path / "atma.db"


def test_completion_of_what_the_program_brings(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    assert complete("atma-sweep launch ") == [*shipped(), "mine.yaml"]
    assert complete(f"atma-sweep plan {tmp_path}/mi") == [f"{tmp_path}/mine.yaml"]
    assert complete("atma-sweep data prepare --grid qu") == ["quick"]
    assert complete("atma-sweep report --table ") == [*TABLES, *SECOND_VERSION]
    assert complete("atma-sweep report --figure ") == ["1", "2a", "2b", *FIGURES]
    assert complete("atma-sweep report --compare ") == [*PUBLISHED, *SHIPPED]
    assert complete("atma-sweep report --sweep printed-v") == [
        name for name in PUBLISHED if name.startswith("printed-v")
    ]
    assert complete("atma-sweep evaluate x --probe ") == [*PROBES]
    assert complete("atma-sweep delete x --metric ") == [*dict.fromkeys(name for _, name in METRICS)]
    assert "launch" in complete("atma-sweep la")


def test_completion_of_sweeps_and_cells(complete: Complete, database: Path) -> None:
    assert complete("atma-sweep pause --sweep ") == ["two", "one"]
    assert complete("atma-sweep status --sweep ") == ["two", "one", *PUBLISHED, *SHIPPED]
    assert complete("atma-sweep show ") == ["a_1", "ab1", "b1"]
    assert complete("atma-sweep show a_") == ["a_1"]
    assert complete("atma-sweep show --sweep two ") == ["b1"]
    assert complete("atma-sweep logs b") == ["b1"]
    assert complete("atma-sweep note t") == ["two"]
    assert complete(f"atma-sweep generate --db sqlite:///{database} ab") == ["ab1"]
    assert sorted(path.name for path in database.parent.iterdir()) == ["atma.db"]


@pytest.mark.parametrize("state", ["none", "empty", "text", "cut", "folder", "other", "server", "locked"])
def test_completion_is_silent_in_every_state(
    complete: Complete, database: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = database.read_bytes()
    database.unlink()
    if state in ("empty", "text", "cut"):
        database.write_bytes({"empty": b"", "text": b"no database" * 500, "cut": content[:5000]}[state])
    elif state == "folder":
        database.mkdir()
    elif state == "other":
        import sqlite3

        sqlite3.connect(database).executescript("CREATE TABLE sweep (x); CREATE TABLE cell (y);")
    elif state == "server":
        monkeypatch.setenv("ATMA_DB", "postgresql://nobody:secret@127.0.0.1:1/none")
    elif state == "locked":
        database.write_bytes(content)
        database.with_name("atma.db-wal").touch()
        database.with_name("atma.db-shm").mkdir()
    for line in ("status --sweep ", "show ", "delete ", "report --highlight "):
        assert set(complete(f"atma-sweep {line}")) <= {*PUBLISHED, *SHIPPED, "one", "two", "a_1", "ab1", "b1"}


@pytest.mark.thorough
def test_completion_imports_nothing_heavy(tmp_path: Path, database: Path) -> None:
    code = (
        "import sys\nfrom atma_sweep.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    for shell, line in (
        ("bash", "launch qu"),
        ("bash", "show a"),
        ("zsh", "report --table "),
        ("fish", "delete x --probe n"),
    ):
        env = os.environ | {"_ATMA_SWEEP_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        env |= {"COMP_WORDS": f"atma-sweep {line}", "COMP_CWORD": str(len(line.split(" ")))}
        env |= {"_TYPER_COMPLETE_ARGS": f"atma-sweep {line}"}
        env.pop("ATMA_DB", None)
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "[]\n")
        assert ended.stdout.strip()


# --- other ways to what there is ----------------------------------------------------------------------------------


def test_report_lists_every_table_and_figure(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("report")[2].endswith("; --list lists tables and figures\n")
    code, out, err = run("report", "--list")
    assert (code, err) == (0, "")
    lines = [tuple(line.split(maxsplit=2)) for line in out.splitlines()]
    assert [(option, name) for option, name, _ in lines if option == "--table"] == [
        ("--table", name) for name in (*TABLES, *SECOND_VERSION)
    ]
    assert [name for option, name, _ in lines if option == "--figure"] == ["1", "2a", "2b", *FIGURES]
    assert ("--table", "6", TABLES["6"].shows) in lines
    rows = json.loads(run("report", "--list", "--json")[1])
    assert [(f"--{row['kind']}", row["name"], row["shows"]) for row in rows] == lines


@pytest.mark.parametrize(("second", "first"), [("v2:7", "5"), ("V2:8", "6")])
def test_tables_by_their_number_in_the_second_version(
    run: Callable[..., tuple[int, str, str]], second: str, first: str
) -> None:
    line = ("report", "--sweep", "printed-v2", "--format", "csv", "--table")
    code, out, err = run(*line, second)
    assert (code, err) == (0, "")
    assert out == run(*line, first)[1]


def test_package_runs_as_a_module(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "atma_sweep", "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"atma-sweep {version('atma-sweep')}\n", "")
