"""The first commands of a newcomer: without a database every reader says what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main
from atma_sweep import cli
from atma_sweep.results import names
from atma_sweep.results.console.text import did_you_mean
from atma_sweep.results.store.records import CellRecord
from atma_sweep.results.store.store import open_store

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("word", ["status", "sweeps"])
def test_lists_without_a_database_say_what_to_type(run: Run, tmp_path: Path, word: str) -> None:
    code, out, err = run(word)
    assert (code, err) == (0, "")
    first, _, *commands = out.splitlines()
    assert first == f"nothing has been launched here yet: there is no database {tmp_path}/atma.db"
    app = typer.main.get_command(cli.app)
    for command in commands:
        program, name, *options = shlex.split(command.strip().partition("  ")[0])
        assert program == "atma-sweep"
        app.commands[name].make_context(name, options)  # type: ignore[attr-defined]
    assert run(word, "--json") == (0, "[]\n", "")
    # a database, or a sweep, that is named and not there is a mistake
    code, out, err = run(word, "--db", "mine.db")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        ["report", "--table", "6"],
        ["show", "x"],
        ["dashboard", "--no-open"],
        ["export"],
        ["report", "--all", "--out", "x"],
    ],
    ids=lambda line: line[0],
)
def test_readers_without_a_database_offer_printed_sweeps(run: Run, line: list[str]) -> None:
    code, out, err = run(*line)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "launch a grid first" in err
    assert "these sweeps need no database: printed-v2 (the paper's numbers)" in err
    assert all(name in err for name in (*names.PUBLISHED, *names.SHIPPED))


def test_mistyped_printed_sweep_names_the_nearest(run: Run) -> None:
    for line in (["report", "--table", "6"], ["status"], ["show", "x"]):
        code, _, err = run(*line, "--sweep", "replicatoin")
        assert (code, err.rstrip().endswith("; did you mean replication?")) == (2, True)


@pytest.mark.parametrize(
    "line",
    [["status"], ["show", "x"], ["report", "--table", "6"], ["dashboard", "--no-open"]],
    ids=lambda line: line[0],
)
def test_a_named_missing_database_hides_builtin_sweeps(
    run: Run, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for sweep in ("printed-v2", "replication-pilot"):
        for remedy, options in (("omit --db", ["--db", "typo.db"]), ("unset ATMA_DB", [])):
            with monkeypatch.context() as patch:
                if not options:
                    patch.setenv("ATMA_DB", "typo.db")
                code, out, err = run(*line, "--sweep", sweep, *options)
            assert (code, out, len(err.splitlines())) == (2, "", 1)
            assert "there is no database" in err
            assert "typo.db" in err
            assert err.rstrip().endswith(f"sweep {sweep} is built in: {remedy} to read it without a database")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "atma.db", create=True)
    levels = {"attn_type": "polar", "reg_mode": "weak", "distractor": "off", "memory": "on", "window": "off"}
    cells = [
        CellRecord(id=f"{i:012x}", slug=f"polar-{i}", seed=i, levels=levels, config={}, tokens=1) for i in range(2)
    ]
    store.record_revision("quick", grid_text="", grid_file="q.yaml", cells=cells)
    store.close()
    return tmp_path / "atma.db"


@pytest.mark.parametrize(
    ("line", "near"),
    [
        (["status", "--sweep", "qiuck"], "quick"),
        (["report", "--table", "6", "--sweep", "printed-v3"], "printed-v2"),
        (["show", "pola-0"], "polar-0"),
        (["logs", "pola-0"], "polar-0"),
        (["report", "--table", "efects"], "effects"),
        (["report", "--figure", "needel"], "needle"),
        (["delete", "polar-0", "--metric", "val_los", "--yes"], "val_loss"),
        (["delete", "polar-0", "--probe", "needel", "--yes"], "needle"),
        (["launch", "quikc"], "'quick'"),
        (["data", "prepare", "--grid", "ful"], "'full'"),
    ],
    ids=lambda line: "-".join(line) if isinstance(line, list) else line,
)
def test_mistyped_names_end_with_the_nearest(run: Run, database: Path, line: list[str], near: str) -> None:
    code, out, err = run(*line)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    _, _, hint = err.rstrip().rpartition("; did you mean ")
    assert near in hint
    assert hint.endswith("?")


def test_did_you_mean_lists_the_nearest() -> None:
    assert did_you_mean("abx", ["abc", "xyz"]) == "; did you mean abc?"
    assert did_you_mean("abx", ["abc", "abd", "aby"], most=3).count("ab") == 3
    assert did_you_mean("abx", ["abc", "abd"], most=2, shown=repr) in (
        "; did you mean 'abc' or 'abd'?",
        "; did you mean 'abd' or 'abc'?",
    )
    assert did_you_mean("abx", ["q"]) == ""
